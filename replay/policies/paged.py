"""`paged`: a token-exact prefix tree in which every node has blocks of its own: what slots are held against.

    node "abc…" (37 tokens, block 16):   [ 16 ][ 16 ][ 5 ···········]      11 slots that nobody else may use

A hit may end at any token, as in `token`; blocks are exclusive, as in `hashed`.  What is lost is the unfilled rest of
each node's last block, about half a block a node.

Choices, each the better one for this policy that its rule (one block, one node) allows:

- *Append.*  A sequence that has published its prompt goes on writing in its own last block, behind what it published:
  readers see a node only to its end.  If at the end nobody else holds or continues the node, the answer becomes part
  of it in place: one node a turn.  Any other appender finds a shared partial block and starts a new block at offset 0.
- *Split.*  A node that is left in mid-block is split at the exact token, and the block at the cut is copied: both
  halves keep the offsets they had, the smaller side is copied, and the other keeps the block (the lower half keeps its
  last block always, since its author may be writing there).  Splitting at the block's edge instead would save the copy
  and lose up to block_size - 1 tokens of every such hit; it is what happens when there is no block for the copy.
- *Late duplicates.*  What the tree has when a sequence publishes stays the tree's; the sequence's own whole blocks of
  it are freed.  A prompt that ends inside a node of the tree is not worth a split: its copy counts as a duplicate until
  the sequence ends.
- *Growth* takes a block at each block's edge.  *Eviction* takes whole leaves, least recently used first.
- *Progress.*  A path of many short nodes may need more blocks than the prompt alone.  If nothing runs and the rest
  does not fit beside the hit, the prompt is admitted without it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import islice
from operator import countOf, sub
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvslot.replay.policies._base import Admitted, Counters, Gauges, PolicyConfig, Refused, Room
from kvslot.replay.policies.radix import Match, Node, Tree
from kvslot.replay.policies.sequences import (
    NOTED_EVERY,
    TOKEN_BYTES,
    OutOfTurn,
    check_config,
    longest_run,
    picture,
    prompt_length,
    unknown,
)

Copier = Callable[[int, int, int], None]
"""(source slot, target slot, tokens): the copy a device would make."""


class _Sequence:
    """A running request: what it holds of the tree, and its own run behind it.

    Position p >= start lies at slot (offset + p - start) of `blocks`, laid end to end.  The own run begins where the
    part held in the tree ends, or one token before when the prompt was cached whole."""

    __slots__ = ("blocks", "borrowed", "copies", "held", "node", "offset", "start", "tokens", "written")

    def __init__(self, tokens: bytes, node: Node, held: int, start: int, blocks: array[int]) -> None:
        self.tokens = tokens
        self.node = node
        """Deepest node it has locked."""
        self.held = held
        """Tokens up to the end of `node`."""
        self.start = start
        self.offset = 0
        self.blocks = blocks
        self.borrowed = False
        """blocks[0] is `node`'s last block, in which this sequence goes on writing."""
        self.written = 0
        """Tokens known to be written, cached ones included; 0 before `prefilled`."""
        self.copies = 0
        """Tokens of the own run that the tree holds as well."""


class PagedPolicy:
    """One pool of blocks, one radix tree.  All requests of all engines share it."""

    name: ClassVar[str] = "paged"

    def __init__(self, config: PolicyConfig, copier: Copier | None = None) -> None:
        """`copier` is told of every copy inside the pool, before the source can be reused."""
        check_config(config)
        self._size = config.block_size
        self._total = config.pool_tokens // config.block_size
        self._usable = self._total * self._size
        self._watermark = int(config.watermark * self._total)
        self._copier = copier
        self._tree = Tree()
        self._fresh = 0
        self._returned: array[int] = array("i")
        """Blocks given back, a stack.  Blocks fresh..total-1 were never handed out."""
        self._live: dict[int, _Sequence] = {}
        self._private = 0
        self._reserved = 0
        self._duplicates = 0
        self._copied = 0
        self._evicted = 0
        self._extents = 0
        self._extent_tokens = 0
        self._run = 0
        self._run_changed = 1 << 62

    @property
    def granularity(self) -> int:
        return 1

    # --- the life of a request --------------------------------------------------------------------------------

    def admit(self, request: int, tokens: bytes, engine: int, now: float) -> Admitted | Refused:
        length = prompt_length(request, tokens, self._live)
        if length > self._usable:
            return Refused(True, length)
        tree = self._tree
        size = self._size
        match = tree.match(tokens)
        held_back = self._watermark if self._live else 0
        for path, cut in self._ways(match):
            held = match.end if path is match.path and cut == match.inside else _length(path, cut)
            hit = min(held // TOKEN_BYTES, length - 1)
            new = -(-(length - hit) // size)
            copy = cut and (path[-1].offset + cut // TOKEN_BYTES) % size
            # Blocks that count as evictable until this request locks them.  A node to be split counts in full if its
            # block must be copied first, for it may not be evicted meanwhile.
            kept = 0
            for node in reversed(path):
                if node.locks:
                    break
                kept += len(node.places)
            if cut and not copy and not path[-1].locks:
                kept -= len(path[-1].places) - (path[-1].offset + cut // TOKEN_BYTES) // size
            if new + (1 if copy else 0) + kept + held_back <= self._free + tree.idle_places:
                break
        else:
            return Refused(False, self._needed(match, length))
        if cut:
            tree.lock(path[:-1])
            last = self._split(path[-1], cut)
            assert last is not None
        else:
            tree.lock(path)
            last = path[-1] if path else tree.root
        blocks = self._take(new)
        self._live[request] = _Sequence(tokens, last, held // TOKEN_BYTES, hit, blocks)
        capacity = hit + new * size
        self._reserved += capacity - hit
        extents = len(path) + 1
        for node in path[:-1]:
            extents += _breaks(node.places)
        self._extents += extents + _breaks(last.places) + _breaks(blocks)
        self._extent_tokens += capacity
        return Admitted(hit, capacity, min(capacity, length + NOTED_EVERY))

    def prefilled(self, request: int, now: float) -> None:
        sequence = self._get(request)
        if sequence.written:
            raise OutOfTurn(f"request {request} was prefilled before")
        length = len(sequence.tokens) // TOKEN_BYTES
        self._write(sequence, length)
        self._publish(sequence, sequence.tokens)

    def grow(self, request: int, length: int, now: float) -> Room | None:
        sequence = self._get(request)
        if not sequence.written or length <= sequence.written:
            raise OutOfTurn(f"request {request} cannot grow to {length} tokens now")
        blocks = sequence.blocks
        size = self._size
        capacity = sequence.start - sequence.offset + len(blocks) * size
        if length > capacity:
            count = -(-(length - capacity) // size)
            if count > self._free + self._tree.idle_places:
                return None
            last = blocks[-1] if blocks else -2
            taken = self._take(count)
            self._extents += _breaks(taken) + (taken[0] != last + 1)
            self._extent_tokens += count * size
            blocks += taken
            capacity += count * size
            self._reserved += count * size
        self._write(sequence, length - 1)
        return Room(capacity, min(capacity, length - 1 + NOTED_EVERY))

    def finish(self, request: int, output: bytes, now: float) -> None:
        sequence = self._get(request)
        if not sequence.written:
            raise OutOfTurn(f"request {request} finishes before its prompt was written")
        tokens = sequence.tokens + output
        length = len(tokens) // TOKEN_BYTES
        capacity = sequence.start - sequence.offset + len(sequence.blocks) * self._size
        if not sequence.written <= length <= capacity:
            raise OutOfTurn(f"request {request} ends with {length} tokens, but has room for {capacity}")
        self._write(sequence, length)
        if length > sequence.held:
            self._publish(sequence, tokens)
        self._release(request, sequence)

    def abort(self, request: int, now: float) -> None:
        self._release(request, self._get(request))

    def victim(self) -> int | None:
        return next(reversed(self._live), None)

    # --- what one can see -------------------------------------------------------------------------------------

    def gauges(self) -> Gauges:
        tree = self._tree
        free = self._free * self._size
        return Gauges(
            usable=self._usable,
            blocks_in_use_slots=self._usable - free,
            tokens_held=tree.tokens + self._private,
            private=self._private,
            cached=tree.tokens,
            reserved=self._reserved,
            duplicates=self._duplicates,
            peeled=0,
            fenced=0,
            quarantined=0,
            moving=0,
            free=free,
            evictable=tree.idle_tokens,
            largest_free_run=self._largest_free_run() * self._size,
            live_sequences=len(self._live),
        )

    def counters(self) -> Counters:
        return Counters(
            copied_tokens=self._copied,
            moved_tokens=0,
            extents=self._extents,
            extent_tokens=self._extent_tokens,
            evicted_tokens=self._evicted,
        )

    def blocks(self) -> bytes:
        size = self._size
        held = np.zeros(self._total, dtype=np.int64)
        for node in self._tree.nodes():
            _fill(held, node.places, node.offset, node.tokens, size)
        for sequence in self._live.values():
            written = max(0, sequence.written - sequence.start)
            _fill(held, sequence.blocks, sequence.offset, written, size)
        return picture(held, size)

    def slots(self, request: int) -> list[int]:
        """The slot of each position a live request has room for: what its kernels would be given."""
        sequence = self._get(request)
        size = self._size
        path: list[Node] = []
        node = sequence.node
        while node.parent is not None:
            path.append(node)
            node = node.parent
        found: list[int] = []
        for node in reversed(path):
            found += _slots(node.places, node.offset, node.tokens, size)
        del found[sequence.start :]
        count = len(sequence.blocks) * size - sequence.offset
        found += _slots(sequence.blocks, sequence.offset, count, size)
        return found

    def audit(self) -> None:
        """Recount everything and compare: each block is free, one node's or one sequence's; no sum is off."""
        tree = self._tree
        size = self._size
        nodes = tree.nodes()
        idle = tree.idle()
        assert {id(node) for node in idle} == {id(node) for node in nodes if not node.locks}
        seen = list(range(self._fresh, self._total)) + list(self._returned)
        assert len(seen) == self._free
        for node in nodes:
            assert 0 <= node.offset < size
            assert node.tokens > 0
            assert len(node.places) == -(-(node.offset + node.tokens) // size)
            assert node.parent is not None
            assert node.parent.kids[node.key[:TOKEN_BYTES]] is node
            assert node.locks >= sum(kid.locks for kid in node.kids.values())
            seen += node.places
        locks = {id(node): 0 for node in nodes}
        private = reserved = duplicates = 0
        for sequence in self._live.values():
            walk = sequence.node
            while walk is not tree.root:
                locks[id(walk)] += 1
                assert walk.parent is not None
                walk = walk.parent
            written = max(0, sequence.written - sequence.start)
            private += written - sequence.copies
            duplicates += sequence.copies
            reserved += len(sequence.blocks) * size - sequence.offset - written
            if sequence.borrowed:
                assert sequence.blocks[0] == sequence.node.places[-1]
                assert sequence.offset == (sequence.node.offset + sequence.node.tokens) % size
            seen += sequence.blocks[sequence.borrowed :]
        assert all(locks[id(node)] == node.locks for node in nodes)
        assert sorted(seen) == list(range(self._total))
        assert (private, reserved, duplicates) == (self._private, self._reserved, self._duplicates)
        assert sum(node.tokens for node in nodes) == tree.tokens
        assert sum(node.tokens for node in idle) == tree.idle_tokens
        assert sum(len(node.places) for node in idle) == tree.idle_places
        gauges = self.gauges()
        assert min(gauges._replace(usable_run=0)) >= 0  # not all have that
        assert gauges.free + gauges.tokens_held + gauges.duplicates + gauges.reserved <= gauges.usable

    # --- inside -----------------------------------------------------------------------------------------------

    def _get(self, request: int) -> _Sequence:
        sequence = self._live.get(request)
        if sequence is None:
            raise unknown(request)
        return sequence

    @property
    def _free(self) -> int:
        return len(self._returned) + self._total - self._fresh

    def _ways(self, match: Match) -> Iterator[tuple[list[Node], int]]:
        """Ways to use a match, the best first: nodes to hold, and bytes of the last one if not all of it."""
        path, inside = match.path, match.inside
        yield path, inside
        if inside:
            into = (path[-1].offset + inside // TOKEN_BYTES) % self._size
            edge = inside - into * TOKEN_BYTES
            if into:
                yield (path, edge) if edge > 0 else (path[:-1], 0)
        if path and not self._live:
            yield [], 0

    def _needed(self, match: Match, length: int) -> int:
        """Slots a refused request needed: its missing tokens, and cached ones that would be evictable no more."""
        needed = max(1, length - match.end // TOKEN_BYTES)
        for node in reversed(match.path):
            if node.locks:
                break
            needed += node.tokens
        if match.inside and not match.path[-1].locks:
            needed -= (len(match.path[-1].key) - match.inside) // TOKEN_BYTES
        return needed

    def _write(self, sequence: _Sequence, length: int) -> None:
        """`length` tokens of the sequence are written now."""
        fresh = length - max(sequence.written, sequence.start)
        self._private += fresh
        self._reserved -= fresh
        sequence.written = length

    def _split(self, node: Node, cut: int) -> Node | None:
        """Cut `node` at byte `cut` and lock the upper half, what is above being held.  None: no block for the copy."""
        size = self._size
        tokens = cut // TOKEN_BYTES
        index, into = divmod(node.offset + tokens, size)
        places = node.places
        if not into:
            return self._tree.split(node, cut, places[:index], places[index:])
        if not self._free:
            if self._tree.oldest(node) is None:
                return None
            self._evict(node)
        block = self._take(1)
        first = node.offset if not index else 0
        behind = min(size - into, node.tokens - tokens)
        if index < len(places) - 1 and behind < into - first:
            self._copy(places[index], block[0], into, behind)
            return self._tree.split(node, cut, places[: index + 1], block + places[index + 1 :], into)
        self._copy(places[index], block[0], first, into - first)
        return self._tree.split(node, cut, places[:index] + block, places[index:], into)

    def _copy(self, source: int, target: int, offset: int, count: int) -> None:
        """Copy `count` slots from `offset` on, to the same place in another block."""
        self._copied += count
        if self._copier is not None:
            self._copier(source * self._size + offset, target * self._size + offset, count)

    def _publish(self, sequence: _Sequence, tokens: bytes) -> None:
        """Enter the written tokens past `held` into the tree, and hold it as far as it then goes.

        Without a block for a copy that this takes, the rest stays the sequence's own."""
        tree = self._tree
        size = self._size
        end = len(tokens) // TOKEN_BYTES
        self._duplicates -= sequence.copies
        self._private += sequence.copies
        sequence.copies = 0
        match = tree.match(tokens, sequence.node, sequence.held * TOKEN_BYTES)
        path, found = match.path, match.end // TOKEN_BYTES
        node = sequence.node
        if not path and sequence.borrowed and not node.kids and node.locks == 1:
            # Nobody else reads this node or goes on from it: the answer becomes part of it, where it stands.
            used = -(-(sequence.offset + end - sequence.start) // size)
            node.key += tokens[found * TOKEN_BYTES :]
            node.places += sequence.blocks[1:used]
            tree.tokens += end - found
            self._private -= end - sequence.start
            self._advance(sequence, end)
            sequence.held = end
            return
        closed = False  # nothing can be attached at `found`
        if match.inside:
            node = path.pop()
            tree.lock(path)
            upper = self._split(node, match.inside) if found < end else None
            if upper is None:
                closed = True
                found -= match.inside // TOKEN_BYTES
                sequence.copies = match.end // TOKEN_BYTES - max(found, sequence.start)
            else:
                path.append(upper)
        else:
            tree.lock(path)
        if path:
            sequence.node = path[-1]
        sequence.held = max(sequence.held, found)
        if found > sequence.start:
            self._private -= found - sequence.start
            self._drop(sequence, found)
        self._private -= sequence.copies
        self._duplicates += sequence.copies
        if closed or found == end:
            return
        if sequence.borrowed:
            # The first of these tokens stand in a block that another node owns.
            if not self._free:
                if tree.oldest() is None:
                    return
                self._evict(None)
            block = self._take(1)
            count = min(size - sequence.offset, end - found)
            self._copy(sequence.blocks[0], block[0], sequence.offset, count)
            sequence.blocks[0] = block[0]
            sequence.borrowed = False
        used = -(-(sequence.offset + end - found) // size)
        sequence.node = tree.attach(
            sequence.node, tokens[found * TOKEN_BYTES :], sequence.blocks[:used], sequence.offset
        )
        sequence.held = end
        self._private -= end - found
        self._advance(sequence, end)

    def _drop(self, sequence: _Sequence, found: int) -> None:
        """The tree holds the own run up to position `found`: free the blocks that lie wholly before it."""
        blocks = sequence.blocks
        whole, offset = divmod(sequence.offset + found - sequence.start, self._size)
        if whole:
            self._give(blocks[sequence.borrowed : whole])
            del blocks[:whole]
            sequence.borrowed = False
        sequence.offset = offset
        sequence.start = found

    def _advance(self, sequence: _Sequence, end: int) -> None:
        """The own run up to `end` became `sequence.node`: go on behind it, in its last block if that has room."""
        whole, offset = divmod(sequence.offset + end - sequence.start, self._size)
        del sequence.blocks[:whole]
        sequence.offset = offset
        sequence.start = end
        sequence.borrowed = offset > 0

    def _release(self, request: int, sequence: _Sequence) -> None:
        """Give its own blocks back and let go of its path."""
        written = max(0, sequence.written - sequence.start)
        self._private -= written - sequence.copies
        self._duplicates -= sequence.copies
        self._reserved -= len(sequence.blocks) * self._size - sequence.offset - written
        self._give(sequence.blocks[sequence.borrowed :])
        self._tree.unlock(sequence.node)
        del self._live[request]

    def _take(self, count: int) -> array[int]:
        """`count` blocks; the caller has checked that free and evictable ones suffice."""
        while count > self._free:
            self._evict(None)
        self._run_changed += count
        returned = self._returned
        at = max(0, len(returned) - count)
        taken = returned[at:]
        del returned[at:]
        short = count - len(taken)
        if short:
            taken.extend(range(self._fresh, self._fresh + short))
            self._fresh += short
        return taken

    def _evict(self, but: Node | None) -> None:
        node = self._tree.evict(but)
        self._evicted += node.tokens
        self._give(node.places)

    def _give(self, blocks: array[int]) -> None:
        self._returned += blocks
        self._run_changed += len(blocks)

    def _largest_free_run(self) -> int:
        """Blocks.  Exact while few are free; else counted again when an eighth of the free ones has changed."""
        if self._run_changed > len(self._returned) >> 3 or len(self._returned) <= 256:
            self._run = longest_run(
                np.frombuffer(self._returned, dtype=np.int32).copy(), self._fresh, self._total
            )
            self._run_changed = 0
        return self._run


def _length(path: list[Node], cut: int) -> int:
    """Bytes that these nodes hold, of the last one only `cut` if that is not 0."""
    total = sum(len(node.key) for node in path)
    return total - len(path[-1].key) + cut if cut else total


def _breaks(blocks: array[int]) -> int:
    """How often a block does not follow the one before it: extents, less one."""
    if len(blocks) < 2:
        return 0
    return len(blocks) - 1 - countOf(map(sub, islice(blocks, 1, None), blocks), 1)


def _slots(blocks: array[int], offset: int, count: int, size: int) -> list[int]:
    return [blocks[at // size] * size + at % size for at in range(offset, offset + count)]


def _fill(held: npt.NDArray[np.int64], blocks: array[int], offset: int, count: int, size: int) -> None:
    """Add `count` tokens from slot `offset` of `blocks` on to the tokens held per block."""
    if not count:
        return
    end = offset + count
    used = blocks[: -(-end // size)]
    held[np.array(used, dtype=np.int64)] += size
    held[used[0]] -= offset
    held[used[-1]] -= len(used) * size - end
