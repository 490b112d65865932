"""The prefix tree: what is cached, token-exact, one root per namespace.

A node is an edge of a radix tree: a run of tokens with the slots that hold their K and V.  Nodes are numbers; their
fields are columns of flat arrays, their tokens one `bytes` object each, so 200,000 nodes are a dozen buffers to the
garbage collector, and nothing here is per token.

    parent    0 for a root                        kid     0 leaf · > 0 the only child · < 0 index into `fans`
    depth     tokens before this node             length  tokens of this node
    slot      first slot of the first extent              head    slots of the first extent, all if it is the only one
    tail_slot first slot of the second extent, which has the rest; with three or more slot is -1: see `scattered`
    holds     leases, pins and moves that end here + children with holds > 0
    tick      last access                         flags, priority, expiry
    hits      sequences whose hit ended here, since the number was given out

Numbers are handed out by clusters of 16: a child takes one of its parent's cluster while there is room, else the first
of an empty cluster, or one of a shared cluster where most numbers would stay empty.  A path is then a few stretches of
each column, and what walks it (a look-up, a hold, an eviction) touches a few places in memory instead of one per node
and column: in a tree that no cache holds, most of the time.

Keys are compared as tokens, never by hash.  A node with several children finds the next by its first token (in opaque
layouts: its first block) in a dict, which compares those bytes in full; the rest of the edge is compared in one
`startswith`.  Nothing recurses, so a chain of 100,000 nodes is walked like one of ten.

    evictable = tokens of nodes with holds == 0

A hold keeps all ancestors, and a node counts itself in its parent's holds only while it has some, so taking a lease
touches only the part of the path that nobody held before.  A split puts the new node above: the old number stays with
the lower part and with it every lease, which is then held a little wider than needed, never narrower.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from zlib import crc32

import numpy as np

from kvslot.allocator.eviction import Evictor, Lru
from kvslot.allocator.extents import split_extents

MOVING_FLAG = 1
WIDE = 4096  # children from which a fan is kept in parts, so that no single dict resize takes longer than ~0.1 ms
PLACE = 64  # bytes on either side that tell one place from another
_PARTS = 256
SPARSE = 4  # numbers for a node, at the most, before paths begin to share clusters
SHARING_STEPS = 64  # clusters looked at for a vacant number; then rather more are made
_ALL = 0xFFFF  # a cluster's numbers
_NUMPY_FROM = 4096  # bytes from which numpy finds the first difference faster than bisection does


class WideFan:
    """A dict of children in 256 parts: a dict of 200,000 entries would stall the caller for 10 ms when it grows."""

    __slots__ = ("_parts", "_size")

    def __init__(self, fan: dict[bytes, int]) -> None:
        self._parts: list[dict[bytes, int]] = [{} for _ in range(_PARTS)]
        self._size = 0
        for key, node in fan.items():
            self[key] = node

    def get(self, key: bytes, default: int = 0) -> int:
        return self._parts[hash(key) & (_PARTS - 1)].get(key, default)

    def __setitem__(self, key: bytes, node: int) -> None:
        part = self._parts[hash(key) & (_PARTS - 1)]
        self._size += key not in part
        part[key] = node

    def __delitem__(self, key: bytes) -> None:
        del self._parts[hash(key) & (_PARTS - 1)][key]
        self._size -= 1

    def __len__(self) -> int:
        return self._size

    def values(self) -> Iterator[int]:
        for part in self._parts:
            yield from part.values()


Fan = dict[bytes, int] | WideFan


class PrefixTree:
    """Columns, fans and the walks over them.  `unit` tokens is the grain: 1, or block_size in opaque layouts."""

    __slots__ = (
        "_empty_fans",
        "_unit_bytes",
        "depth",
        "evictable",
        "evictor",
        "expiry",
        "fans",
        "flags",
        "head",
        "_clusters_bare",
        "_clusters_part",
        "_in_part",
        "_sharing",
        "_vacant",
        "hits",
        "holds",
        "keys",
        "kid",
        "learns",
        "length",
        "log",
        "nodes",
        "parent",
        "priority",
        "scattered",
        "slot",
        "tail_slot",
        "tick",
        "tokens",
        "unit",
    )

    def __init__(self, evictor: Evictor, unit: int = 1) -> None:
        self.unit = unit
        self._unit_bytes = 4 * unit
        self.evictor = evictor
        self.learns = evictor.learns
        # Cluster 0 is nobody's, since a node's number is not 0.
        self.parent = array("i", [0] * 16)
        self.kid = array("i", [0] * 16)
        self.depth = array("i", [0] * 16)
        self.length = array("i", [0] * 16)
        self.slot = array("i", [0] * 16)
        self.head = array("i", [0] * 16)
        self.tail_slot = array("i", [0] * 16)
        self.holds = array("i", [0] * 16)
        self.hits = array("q", [0] * 16)  # of one node there may be thousands a second, for months
        self.tick = array("q", [0] * 16)
        self.flags = array("B", [0] * 16)
        self.priority = array("b", [0] * 16)
        self.keys: list[bytes] = [b""] * 16
        self.expiry: dict[int, float] = {}
        self.scattered: dict[int, list[int]] = {}  # the extents, flat, of nodes with three or more: few
        self.fans: list[Fan] = [{}]
        self._empty_fans: list[int] = []
        self._vacant = array("H", [0])  # by cluster: bit i is set when node 16 * cluster + i does not live
        self._clusters_bare: list[int] = []  # those without a live node
        self._clusters_part: list[int] = []  # those that ceased to be full; some may be full again, or bare
        self._in_part = bytearray(1)  # by cluster: 1 when it stands there
        self._sharing = 0  # the cluster that short paths share now
        self.nodes = 0  # live nodes, roots included
        self.tokens = 0  # tokens of live nodes
        self.evictable = 0
        # Where somebody listens, nodes whose slots have changed or that have gone, in order, with repetitions; negative
        # where they were only cut at the end.
        self.log: list[int] | None = None

    # -- nodes -------------------------------------------------------------------------------------------------

    def _new(self, parent: int, key: bytes, depth: int, tick: int, near: int) -> int:
        vacant = self._vacant
        cluster = near >> 4
        bits = vacant[cluster]
        if not bits:
            cluster = self._cluster()
            bits = vacant[cluster]
        bit = bits & -bits
        vacant[cluster] = bits ^ bit
        node = (cluster << 4) + bit.bit_length() - 1
        self.parent[node] = parent
        self.kid[node] = 0
        self.depth[node] = depth
        self.length[node] = len(key) >> 2
        self.holds[node] = 0
        self.hits[node] = 0
        self.tick[node] = tick
        self.flags[node] = 0
        self.priority[node] = 0
        self.keys[node] = key
        self.nodes += 1
        return node

    def _cluster(self) -> int:
        """A cluster with a vacant number: an empty one if there is one."""
        vacant, bare = self._vacant, self._clusters_bare
        if bare:
            return bare.pop()
        part = self._clusters_part
        while part:
            cluster = part[-1]
            if vacant[cluster]:
                return cluster
            self._in_part[part.pop()] = 0
        if self.nodes * SPARSE < len(self.keys):
            # Many short paths: one cluster each would be mostly empty.  They share, each cluster until it is full.
            cluster, clusters = self._sharing, len(vacant)
            for _ in range(SHARING_STEPS):
                if vacant[cluster]:
                    self._sharing = cluster
                    return cluster
                cluster = cluster + 1 if cluster + 1 < clusters else 0
            self._sharing = cluster
        self._grow()
        return bare.pop()

    def _vacate(self, node: int) -> None:
        """The number of a node that has been removed may be given out again."""
        cluster = node >> 4
        bits = self._vacant[cluster]
        if not bits and not self._in_part[cluster]:
            self._in_part[cluster] = 1
            self._clusters_part.append(cluster)
        bits |= 1 << (node & 15)
        self._vacant[cluster] = bits
        if bits == _ALL:
            self._clusters_bare.append(cluster)

    def _grow(self) -> None:
        old = len(self.keys)
        more = max(1024, old // 64 * 16)
        for column in (
            self.parent, self.kid, self.depth, self.length, self.slot, self.head, self.tail_slot, self.holds,
        ):  # fmt: skip
            column.frombytes(bytes(4 * more))
        self.tick.frombytes(bytes(8 * more))
        self.hits.frombytes(bytes(8 * more))
        self.flags.frombytes(bytes(more))
        self.priority.frombytes(bytes(more))
        self.keys.extend([b""] * more)
        self.evictor.resize(old + more)
        first = old >> 4
        self._vacant.extend([_ALL] * (more >> 4))
        self._in_part.extend(bytes(more >> 4))
        self._clusters_bare.extend(range(first + (more >> 4) - 1, first - 1, -1))

    def root(self) -> int:
        """A new empty tree; its root holds no tokens and is never evicted."""
        node = self._new(0, b"", 0, 0, 0)
        self.slot[node] = 0
        self.holds[node] = 1
        return node

    def remove_root(self, node: int) -> None:
        """Ends an empty tree that nobody holds."""
        assert not self.kid[node]
        assert self.holds[node] == 1
        self.holds[node] = 0
        self._vacate(node)
        self.nodes -= 1

    def extents(self, node: int) -> list[int]:
        """The node's slots as a flat list slot, length, ..."""
        slot = self.slot[node]
        if slot < 0:
            return list(self.scattered[node])
        head, length = self.head[node], self.length[node]
        return [slot, length] if head == length else [slot, head, self.tail_slot[node], length - head]

    def end_slot(self, node: int) -> int:
        """The slot behind the node's last one."""
        slot = self.slot[node]
        if slot < 0:
            pieces = self.scattered[node]
            return pieces[-2] + pieces[-1]
        head, length = self.head[node], self.length[node]
        return slot + length if head == length else self.tail_slot[node] + length - head

    def set_extents(self, node: int, extents: list[int]) -> None:
        """Gives the node its slots: flat slot, length, ... with lengths that sum to the node's."""
        if self.log is not None:
            self.log.append(node)
        if self.scattered:
            self.scattered.pop(node, None)
        if len(extents) == 2:
            self.slot[node], self.head[node] = extents
        elif len(extents) == 4:
            self.slot[node], self.head[node], self.tail_slot[node], _ = extents
        else:
            self.slot[node] = -1
            self.scattered[node] = extents

    # -- walks -------------------------------------------------------------------------------------------------

    def match(self, root: int, tokens: bytes, path: list[int]) -> int:
        """Walks down from `root` as far as `tokens` (little-endian int32) agree; appends the nodes entered to `path`.

        Returns the tokens matched.  The last node of the path may have been matched in part.
        """
        node, at = root, 0
        kid, keys, fans, unit = self.kid, self.keys, self.fans, self._unit_bytes
        startswith, enter = tokens.startswith, path.append
        while True:
            child = kid[node]
            if child <= 0:
                child = child and fans[-child].get(tokens[at : at + unit], 0)
                if not child:
                    return at >> 2
            key = keys[child]
            if not startswith(key, at):
                break
            enter(child)
            at += len(key)
            node = child
        common = common_prefix(tokens, at, key, unit)
        if common:
            enter(child)
        return (at + common) >> 2

    def matching(self, root: int, tokens: bytes) -> int:
        """`match` without the path: the tokens of this prompt that are cached."""
        node, at = root, 0
        kid, keys, fans, unit = self.kid, self.keys, self.fans, self._unit_bytes
        startswith = tokens.startswith
        while True:
            child = kid[node]
            if child <= 0:
                child = child and fans[-child].get(tokens[at : at + unit], 0)
                if not child:
                    return at >> 2
            key = keys[child]
            if not startswith(key, at):
                return (at + common_prefix(tokens, at, key, unit)) >> 2
            at += len(key)
            node = child

    def child(self, node: int, tokens: bytes, at: int) -> int:
        """The child of `node` whose edge begins with the unit at tokens[at:] (bytes); 0 when there is none."""
        child = self.kid[node]
        unit = self._unit_bytes
        if child > 0:
            return child if tokens.startswith(self.keys[child][:unit], at) else 0
        return self.fans[-child].get(tokens[at : at + unit], 0) if child else 0

    def children(self, node: int) -> list[int]:
        """All children, in no order."""
        child = self.kid[node]
        if child >= 0:
            return [child] if child else []
        return list(self.fans[-child].values())

    def path_extents(self, path: list[int], hit: int, out: list[int]) -> None:
        """Appends the slots of the first `hit` tokens along `path` to the flat list `out`, joined where nodes touch."""
        slots, lengths, heads, tail_slots = self.slot, self.length, self.head, self.tail_slot
        end = -1
        for node in path:
            n = lengths[node]
            if n > hit:
                n = hit
                if not n:
                    return
            hit -= n
            slot = slots[node]
            if slot >= 0:
                head = heads[node]
                if head > n:
                    head = n
                if slot == end:
                    out[-1] += head
                else:
                    out.append(slot)
                    out.append(head)
                end = slot + head
                n -= head
                if n:
                    slot = tail_slots[node]
                    out.append(slot)
                    out.append(n)
                    end = slot + n
            else:
                pieces = self.scattered[node]
                if n < lengths[node]:
                    pieces, _ = split_extents(pieces, n)
                if pieces[0] == end:
                    out[-1] += pieces[1]
                    pieces = pieces[2:]
                out += pieces
                end = out[-2] + out[-1]

    def path_to(self, node: int) -> list[int]:
        """The nodes from below the root down to `node`."""
        path = []
        parent = self.parent
        while parent[node]:
            path.append(node)
            node = parent[node]
        path.reverse()
        return path

    def root_of(self, node: int) -> int:
        """The root above a node."""
        parent = self.parent
        while parent[node]:
            node = parent[node]
        return node

    def place(self, node: int, tokens: bytes, at: int) -> int:
        """A number, never 0, for the place where a cached path stops: behind `node`, before tokens[at:] (bytes).

        Two places may share one.  Made of the last tokens that stay and the first that do not, which at an eviction and
        at a later look-up are the same; behind a root, where none stay, of more of those that do not.
        """
        tail = self.keys[node][-PLACE:]
        first = tokens[at : at + min(self._unit_bytes, PLACE) if tail else at + PLACE]
        return crc32(tail + first, self.depth[node] + self.length[node]) | 1 << 32

    # -- holds -------------------------------------------------------------------------------------------------

    def hold(self, node: int) -> None:
        """Keeps `node` and all above it from being evicted."""
        holds, parent = self.holds, self.parent
        before = holds[node]
        holds[node] = before + 1
        if before:
            return
        if not self.kid[node]:
            self.evictor.discard(node)
        depth, length = self.depth, self.length
        end = depth[node] + length[node]
        while not before:
            node = parent[node]
            before = holds[node]  # a root always holds itself, so this ends there at the latest
            holds[node] = before + 1
        self.evictable -= end - depth[node] - length[node]

    def unhold(self, node: int, tick: int) -> None:
        """Gives a hold back; a leaf nobody holds any longer becomes a candidate for eviction."""
        holds, parent = self.holds, self.parent
        left = holds[node] - 1
        assert left >= 0
        holds[node] = left
        self.tick[node] = tick
        if left:
            return
        if not self.kid[node]:
            self.evictor.add(node, self.length[node])
        depth, length = self.depth, self.length
        end = depth[node] + length[node]
        while not left:
            node = parent[node]
            left = holds[node] - 1
            holds[node] = left
        self.evictable += end - depth[node] - length[node]

    # -- changes -----------------------------------------------------------------------------------------------

    def add(self, parent: int, key: bytes, extents: list[int], tick: int) -> int:
        """A new leaf under `parent`; no child of it may begin with the same unit.  The leaf is held once."""
        node = self._new(parent, key, self.depth[parent] + self.length[parent], tick, parent)
        self.set_extents(node, extents)
        if not self.kid[parent]:
            if not self.holds[parent]:
                self.evictor.discard(parent)
        elif self.learns:
            self.evictor.branched(parent)
        self._link(parent, key[: self._unit_bytes], node)
        self.tokens += len(key) >> 2
        # Held from birth: the holds of the path rise as if it had been evictable a moment ago.
        self.evictable += self.length[node]
        self.hold(node)
        return node

    def split(self, node: int, at: int) -> int:
        """Splits `node` after its first `at` tokens; returns the new upper node.  Moves no data, changes no lease."""
        key = self.keys[node]
        parent = self.parent[node]
        upper = self._new(parent, key[: 4 * at], self.depth[node], self.tick[node], node)
        unit = self._unit_bytes
        first = key[:unit]
        child = self.kid[parent]
        if child > 0:
            self.kid[parent] = upper
        else:
            self.fans[-child][first] = upper
        self.kid[upper] = node
        self.parent[node] = upper
        front, back = split_extents(self.extents(node), at)
        self.keys[node] = key[4 * at :]
        self.depth[node] += at
        self.length[node] -= at
        self.set_extents(upper, front)
        self.set_extents(node, back)
        self.holds[upper] = 1 if self.holds[node] else 0
        self.flags[upper] = self.flags[node] & ~MOVING_FLAG
        self.priority[upper] = self.priority[node]
        if node in self.expiry:
            self.expiry[upper] = self.expiry[node]
        self.evictor.split(upper, node, at)
        return upper

    def remove(self, node: int) -> list[int]:
        """Removes an unheld leaf; returns its slots.  A parent left without children becomes a candidate itself."""
        assert not self.kid[node]
        assert not self.holds[node]
        parent = self.parent[node]
        extents = self.extents(node)
        length = self.length[node]
        key = self.keys[node]
        if self.learns:
            self.evictor.forget(node, parent, self.place(parent, key, 0))
        self.evictor.discard(node)
        self._unlink(parent, key[: self._unit_bytes])
        self.tokens -= length
        self.evictable -= length
        if self.tick[parent] < self.tick[node]:
            self.tick[parent] = self.tick[node]
        if not self.kid[parent] and not self.holds[parent]:
            # The last child died of age, so the parent is as old, unless it was used alone since.
            self.evictor.exposed(parent, self.length[parent], self.tick[parent] > self.tick[node])
        self.keys[node] = b""
        if self.log is not None:
            self.log.append(node)
        if self.scattered:
            self.scattered.pop(node, None)
        if self.expiry:
            self.expiry.pop(node, None)
        self.parent[node] = 0
        self.length[node] = 0
        self._vacate(node)
        self.nodes -= 1
        return extents

    def shed(self, tokens: int, short: int, slack: int, out: list[int]) -> int:
        """Removes the least recently used leaves until `tokens` tokens have gone; their slots are appended to `out`.

        Does for a whole path what `remove` and a plain `Lru` would do leaf by leaf: the parent takes its last child's
        place at the ring's old end.  Stops before a leaf of fewer than `short` tokens, and before one with more than is
        still wanted and `slack` together.  Returns the tokens that have gone.
        """
        lru = self.evictor
        assert isinstance(lru, Lru)
        older, newer = lru.older, lru.newer
        parents, kid, lengths, slots = self.parent, self.kid, self.length, self.slot
        heads, tail_slots, scattered = self.head, self.tail_slot, self.scattered
        holds, ticks, keys = self.holds, self.tick, self.keys
        unit, vacate, log = self._unit_bytes, self._vacate, self.log
        gone = count = 0
        # A child often begins in the room that its parent left behind: the two are one stretch then.
        front, below = 0, -1  # where in `out` the first slot of the child just removed stands, and that slot
        node = newer[0]
        while node and gone < tokens:
            length = lengths[node]
            if length < short or length > tokens - gone + slack:
                break
            slot = slots[node]
            if slot >= 0:
                head = heads[node]
                if head == length:
                    if slot + length == below:
                        out[front] = slot
                        out[front + 1] += length
                    else:
                        front = len(out)
                        out.append(slot)
                        out.append(length)
                else:
                    tail, n = tail_slots[node], length - head
                    if tail + n == below:
                        out[front] = tail
                        out[front + 1] += n
                        front = len(out)
                        out.append(slot)
                        out.append(head)
                    else:
                        front = len(out)
                        out += (slot, head, tail, n)
            else:
                pieces = scattered.pop(node)
                slot = pieces[0]
                if pieces[-2] + pieces[-1] == below:
                    out[front] = pieces[-2]
                    out[front + 1] += pieces[-1]
                    del pieces[-2:]
                front = len(out)
                out += pieces
            parent = parents[node]
            if kid[parent] > 0:
                kid[parent] = 0
                bare = not holds[parent]
            else:
                self._unlink(parent, keys[node][:unit])
                bare = False  # a fan has two children at least
            keys[node] = b""
            parents[node] = 0
            lengths[node] = 0
            vacate(node)
            if log is not None:
                log.append(node)
            gone += length
            count += 1
            after = newer[node]
            older[node] = -1
            age = ticks[node]
            if bare and ticks[parent] <= age:
                ticks[parent] = age
                newer[0] = older[after] = parent
                newer[parent] = after
                older[parent] = 0
                node = parent
                below = slot
                continue
            below = -1
            newer[0] = after
            older[after] = 0
            if bare:
                lru.add(parent, lengths[parent])
            elif ticks[parent] < age:
                ticks[parent] = age
            node = newer[0]
        self.nodes -= count
        self.tokens -= gone
        self.evictable -= gone
        return gone

    def trim_tail(self, node: int, tokens: int) -> list[int]:
        """Takes the last `tokens` tokens (fewer than all) off an unheld leaf; returns their slots."""
        length = self.length[node] - tokens
        assert length > 0
        key = self.keys[node]
        pieces = self.extents(node)
        self.keys[node] = key[: 4 * length]
        self.length[node] = length
        if self.learns:
            self.evictor.trimmed(node, length, self.place(node, key, 4 * length))
        self.tokens -= tokens
        self.evictable -= tokens
        front, back = split_extents(pieces, length)
        self.set_extents(node, front)
        if self.log is not None:
            self.log[-1] = -node
        return back

    def _link(self, parent: int, first: bytes, node: int) -> None:
        child = self.kid[parent]
        if not child:
            self.kid[parent] = node
        elif child > 0:
            fan = {self.keys[child][: self._unit_bytes]: child, first: node}
            if self._empty_fans:
                index = self._empty_fans.pop()
                self.fans[index] = fan
            else:
                index = len(self.fans)
                self.fans.append(fan)
            self.kid[parent] = -index
        else:
            wide = self.fans[-child]
            wide[first] = node
            if len(wide) == WIDE and isinstance(wide, dict):
                self.fans[-child] = WideFan(wide)

    def _unlink(self, parent: int, first: bytes) -> None:
        child = self.kid[parent]
        if child > 0:
            self.kid[parent] = 0
            return
        fan = self.fans[-child]
        del fan[first]
        if len(fan) == 1:
            self.kid[parent] = next(iter(fan.values()))
            self.fans[-child] = {}
            self._empty_fans.append(-child)

    # -- for tools ---------------------------------------------------------------------------------------------

    def live(self, first: int = 0, stop: int | None = None) -> Iterator[int]:
        """The live nodes with numbers in [first, stop), multiples of 16, in order, roots included; O(nodes ever)."""
        start = max(1, first >> 4)
        for cluster, bits in enumerate(self._vacant[start : None if stop is None else stop >> 4], start):
            if bits != _ALL:
                for bit in range(16):
                    if not bits >> bit & 1:
                        yield (cluster << 4) + bit

    def bytes_used(self) -> int:
        """Bytes of the columns, fans and key objects, token bytes excluded."""
        import sys

        columns = (
            self.parent, self.kid, self.depth, self.length, self.slot, self.head, self.tail_slot, self.holds, self.hits,
            self.tick, self.flags, self.priority,
        )  # fmt: skip
        size = sum(sys.getsizeof(column) for column in columns) + sys.getsizeof(self.keys)
        size += sum(sys.getsizeof(key) - len(key) for key in self.keys if key)
        for fan in self.fans:
            size += sys.getsizeof(fan) + 32 * len(fan) + (33 + self._unit_bytes) * len(fan)
        size += sum(sys.getsizeof(pieces) + 32 * len(pieces) + 100 for pieces in self.scattered.values())
        return size + self.evictor.bytes_used()


def common_prefix(tokens: bytes, at: int, key: bytes, unit: int) -> int:
    """Bytes, in whole units, that tokens[at:] and `key` have in common at the front."""
    if not tokens.startswith(key[:unit], at):
        return 0
    bound = min(len(key), len(tokens) - at)
    if bound > _NUMPY_FROM and not key.startswith(tokens[at : at + bound]):
        a = np.frombuffer(tokens, dtype=np.int32, count=bound >> 2, offset=at)
        b = np.frombuffer(key, dtype=np.int32, count=bound >> 2)
        bound = 4 * int((a != b).argmax())
        return bound - bound % unit
    low, high = 1, bound // unit
    if tokens.startswith(key[: high * unit], at):
        return high * unit
    while low < high:
        middle = (low + high + 1) >> 1
        if tokens.startswith(key[low * unit : middle * unit], at + low * unit):
            low = middle
        else:
            high = middle - 1
    return low * unit
