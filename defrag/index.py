"""Who lives in which block: kept up to date from what has changed, for whoever asks where moves buy something.

    block      |..aa|aaaa|aabb|....|ccc.|
    first        a    -a   a    0    c         the head of the list of the extents that begin or end in the block;
                                               negative: the one that covers it all
    used         2    4    4    0    3         slots of it that are cached

An extent stands in two lists at most, of the block it begins in and of the one it ends in, so a node of 10,000 tokens
costs as much as one of ten (and a slice of two flat arrays).  Entries remember what was last seen of a node, so that a
number that has been given out again takes away exactly what its former life had brought.

Blocks that are neither full nor empty stand in two families of rings (circular lists in flat arrays):

    fills    by how full they are: the emptiest are found in O(1); those looked at in vain wait in a ring of their own
             until they change or some time has passed
    holes    by the longest free stretch that takes up no wholly free block; it may reach over an edge into the next

Leases and running sequences come and go without a change of the tree, so none of this is believed: what is found here
is looked at once more, in the pool, before a move is planned.  A block costs about 36 bytes, an extent 24.
"""

from __future__ import annotations

import mmap
import struct
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

if TYPE_CHECKING:
    from kvslot.allocator.pool import Pool

GROUP = 32  # blocks of a group: groups are told to be looked at again as a whole
READ = 500  # sequences that are looked at in a plan, about, to know who reads the nodes that are held
BELIEVED = 1.0  # seconds for which it is believed that a held node may be moved or may not
ANSWERS_MOST = 4096
BUILT = 256  # numbers of nodes that are gone through at a time, at first
TAKEN = 256  # changes of the pool that are taken over at a time
WARMED = 1 << 19  # bytes that are touched for the first time in one call
MAP_NORESERVE: Final = 0x4000  # of Linux; memory that is not touched is not counted either
IN_PIECES = (
    5  # extents from which on a node may be worth gathering: twice as many as moves leave it in, and one
)
CROWDED = 256  # extents in a block from which on it is left as it is: to look at it once would take too long
LEVELS = 64  # of fill; a block of fewer slots has one for each
EXACT = 64  # holes of fewer slots have a class each, longer ones share it with those within 1/8
HOLE_CLASSES = EXACT + 8 * 10 + 1


def hole_class(n: int) -> int:
    """The class of a hole of `n` slots."""
    if n < EXACT:
        return n
    e = n.bit_length()
    return EXACT + ((e - 7) << 3) + ((n >> (e - 4)) & 7)


def zeros(n: int, code: Literal["i", "H", "B"] = "i") -> memoryview[int]:
    """`n` numbers of 0 (int32, or as `code` of the module array), made at once however many: memory comes as touched.

    In pages of 4 KiB: numpy asks for large ones, of which each takes up to milliseconds where memory is in pieces.
    """
    size = max(1, n) * struct.calcsize(code)
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memoryview(memory).cast(code)[:n]


class Rings:
    """Members 0..n-1, each in one of a few circular lists or in none."""

    __slots__ = ("_ring", "after", "before", "count", "members", "occupied")

    def __init__(self, members: int, rings: int) -> None:
        self.members = members
        # Ring r begins and ends at the mark members + r.
        self.after, self.before = zeros(members + rings), zeros(members + rings)
        for mark in range(members, members + rings):
            self.after[mark] = self.before[mark] = mark
        self._ring = zeros(members, "H")  # one more than the ring's number, 0 for none
        self.count = [0] * rings
        self.occupied = 0  # bit r is set when ring r has a member

    def put(self, member: int, ring: int) -> None:
        """At the end of `ring`, out of the one it was in."""
        if self._ring[member]:
            self.drop(member)
        after, before = self.after, self.before
        mark = self.members + ring
        last = before[mark]
        after[last] = member
        before[member] = last
        after[member] = mark
        before[mark] = member
        self._ring[member] = ring + 1
        if not self.count[ring]:
            self.occupied |= 1 << ring
        self.count[ring] += 1

    def drop(self, member: int) -> None:
        """Out of the ring it is in, if any."""
        ring = self._ring[member] - 1
        if ring < 0:
            return
        after, before = self.after, self.before
        left, right = before[member], after[member]
        after[left] = right
        before[right] = left
        self._ring[member] = 0
        self.count[ring] -= 1
        if not self.count[ring]:
            self.occupied ^= 1 << ring

    def ring_of(self, member: int) -> int:
        """The ring that `member` is in, or -1."""
        return self._ring[member] - 1

    def first(self, ring: int) -> int:
        """The member that has been longest in `ring`, or -1."""
        member = self.after[self.members + ring]
        return member if member < self.members else -1


class Index:
    """The blocks of one pool.  `feed` first fills it, then follows the changes; nothing else changes it but `park`."""

    __slots__ = (
        "_again",
        "_answers",
        "_asked_at",
        "_asks",
        "_at",
        "_build",
        "_building",
        "_cold",
        "_coming",
        "_dirty",
        "_entries",
        "_entries_free",
        "_first_view",
        "_followed",
        "_is_dirty",
        "_is_scattered",
        "_keep",
        "_log",
        "_node_count",
        "_node_entry",
        "_origin",
        "_parked_free",
        "_taken",
        "_taken_at",
        "_until",
        "_used_view",
        "_walk",
        "crowded",
        "emptied",
        "entry_length",
        "entry_more",
        "entry_next",
        "entry_node",
        "entry_slot",
        "entry_tail",
        "fills",
        "first",
        "group_is_changed",
        "groups_changed",
        "holes",
        "levels",
        "now",
        "page",
        "parked_free",
        "pool",
        "remaining",
        "scattered",
        "size",
        "starved",
        "steps",
        "used",
    )

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.size = pool.block_size
        blocks = pool.config.blocks
        self.used, self.first = zeros(blocks), zeros(blocks)
        self._used_view = np.frombuffer(self.used, dtype=np.int32)
        self._first_view = np.frombuffer(self.first, dtype=np.int32)
        self.levels = min(self.size, LEVELS)
        self.fills = Rings(blocks, self.levels + 1)  # the last ring: those looked at in vain
        self.holes = Rings(blocks, HOLE_CLASSES)
        self.parked_free = 0  # free slots of the blocks looked at in vain
        self._parked_free = zeros(blocks, "H")  # of each, when it was parked
        self._until = zeros(blocks)  # ... and until when it is, in tenths of a second: enough for years
        self._origin: float | None = None
        # There are no more extents than slots.  Memory of those that there are not is never touched; and nothing is
        # copied as they become more, which would take milliseconds.
        most = pool.slots + 1
        # Entries, from 1 on: an extent of a node.  `next` goes on in the list of the block it begins in, `tail` in that
        # of the block it ends in if that is another, `more` to the extent of the node before it: nodes grow and are cut
        # at their ends.
        self.entry_node = zeros(most)
        self.entry_slot = zeros(most)
        self.entry_length = zeros(most)
        self.entry_next = zeros(most)
        self.entry_tail = zeros(most)
        self.entry_more = zeros(most)
        self._entries = 1  # that were ever in use, with the one that is none
        self._entries_free = 0
        nodes = len(pool.tree.keys) + 1024
        self._node_entry = zeros(max(nodes, most))  # the last of a node's entries
        self._node_count = zeros(max(nodes, most))  # ... and how many there are
        # Nodes in `IN_PIECES` extents or more, each once, in no order; some may be in fewer again.
        self.scattered: deque[int] = deque()
        self._is_scattered = zeros(len(self._node_entry), "B")
        self._dirty: list[int] = []
        self._is_dirty = zeros(blocks, "B")
        self.groups_changed: list[int] = []
        self.group_is_changed = bytearray(-(-blocks // GROUP))
        # Blocks in whose holes something is planned to go -> the holes that are left until that has happened or not.
        self.remaining: dict[int, list[tuple[int, int]]] = {}
        # Blocks that are planned to be emptied, until that has happened or not.
        self.emptied: set[int] = set()
        self.crowded: set[int] = set()  # blocks in more than CROWDED extents
        self.steps = 0  # extents that were looked at so far, in lists of blocks
        self.now = 0.0  # the latest time told
        self.page = 1  # slots of the longest page that a session reads by
        self.starved = False
        self._followed = False  # whether any session is told of moves
        self._asks = (
            0  # times that who reads a node may still be asked in this plan, which looks at all sequences
        )
        self._answers: dict[int, bool] = {}
        self._asked_at = 0.0
        self._log: list[int] = []
        self._taken: list[int] = []  # ... out of this, from `_taken_at` on
        self._taken_at = 0
        # Of the node at `_at`, where it is half done: the entry and twice the number of the extent up to which it has
        # been compared, from its end, and how many stay known as far as was seen; then, while it leaves, just those.
        self._walk: tuple[int, int, int] | None = None
        self._keep = -1
        # Nodes that have left where they were, and are to be entered where they are.
        self._coming: list[int] = []
        self._at = 0
        self._again = 0  # parked blocks that are to be looked at although their time has not come
        rings = (self.fills, self.holes)
        flats = [self.used, self.first, self._is_dirty, self._parked_free, self._until]
        flats += [flat for each in rings for flat in (each.before, each.after, each._ring)]
        # What is still to be touched for the first time: bytes of the members' part of the flat arrays.
        self._cold = [(np.frombuffer(flat, np.uint8)[: blocks * flat.itemsize], 0) for flat in flats]
        columns = (self._node_entry, self._node_count)
        self._cold += [(np.frombuffer(each[:nodes], np.uint8), 0) for each in columns]
        pool.tree.log = []
        self._build = 0  # nodes from this number on have not been looked at; -1: all have
        self._building: list[int] = []  # ... and of those before it these

    # -- following ---------------------------------------------------------------------------------------------

    def feed(self, budget: int, now: float = 0.0) -> bool:
        """Looks at up to about `budget` extents and blocks that changed; True: there are more.  About 5 us for each."""
        if now > self.now:
            self.now = now
        if self._cold:
            # Memory is given as it is first touched, in pages that may be large: not all of that within one call.
            flat, at = self._cold[-1]
            flat[at : at + WARMED] = 0
            if at + WARMED < len(flat):
                self._cold[-1] = (flat, at + WARMED)
            else:
                del self._cold[-1]
            return True
        tree = self.pool.tree
        # All that has changed leaves before anything comes in: what stands where something else stood is then the only
        # one there.
        while budget > 0:
            if self._at == len(self._log):
                if self._taken_at >= len(self._taken) and not tree.log:
                    break
                if self._taken_at >= len(self._taken):
                    self._taken, tree.log, self._taken_at = tree.log or [], [], 0
                # A node that was cut again and again is looked at once.
                part = self._taken[self._taken_at : self._taken_at + TAKEN]
                self._taken_at += TAKEN
                self._log, self._at = list(dict.fromkeys(part)), 0
            log, at = self._log, self._at
            while at < len(log) and budget > 0:
                budget -= self._leave(log[at], budget)
                if self._walk is None and self._keep < 0:
                    at += 1
            self._at = at
        if self._at < len(self._log) or self._taken_at < len(self._taken) or tree.log:
            return True
        coming = self._coming
        while coming and budget > 0:
            budget -= self._enter(coming.pop(), budget)
        building = self._building
        while self._build >= 0:
            if budget <= 0:
                return True
            if building:
                budget -= self._enter(building.pop(), budget)
            elif self._build < len(tree.keys):
                building += tree.live(self._build, self._build + BUILT)
                self._build += BUILT
                budget -= 1
            else:
                self._build = -1
        if self.fills.count[self.levels]:
            self.unpark(self.now, budget)
        dirty, is_dirty, survey = self._dirty, self._is_dirty, self.survey
        while dirty and budget > 0:
            block = dirty.pop()
            is_dirty[block] = 0
            steps = self.steps
            survey(block, self.now)
            budget -= 1 + ((self.steps - steps) >> 4)
        return bool(dirty or coming or self._again)

    @property
    def complete(self) -> bool:
        """Whether every node has been seen once."""
        return self._build < 0

    def close(self) -> None:
        """Listens no longer."""
        self.pool.tree.log = None

    @property
    def behind(self) -> int:
        """Changes that are still to be taken note of: of nodes while it is not `complete`, then of blocks too.

        A node that is taken in by parts counts with what is left of it.  0 while memory is touched first.
        """
        if self._cold:
            return 0
        left = len(self._log) - self._at + max(0, len(self._taken) - self._taken_at)
        left += len(self.pool.tree.log or ()) + len(self._coming)
        counts = self._node_count
        if self._keep >= 0:
            left += counts[abs(self._log[self._at])] - self._keep
        if self._coming and (node := self._coming[-1]) < len(counts):
            left += max(0, (len(self._extents(node)) >> 1) - counts[node])
        return left if self._build >= 0 else left + len(self._dirty)

    def flats(self) -> list[memoryview[int]]:
        """Its memory, for whoever gives it back bit by bit: megabytes at once take milliseconds."""
        found = [self.used, self.first, self._is_dirty, self._parked_free, self._until]
        found += [self._node_entry, self._node_count, self._is_scattered]
        found += [self.entry_node, self.entry_slot, self.entry_length]
        found += [self.entry_next, self.entry_tail, self.entry_more]
        for each in (self.fills, self.holes):
            found += [each.before, each.after, each._ring]
        return found

    def _grow(self, nodes: int) -> None:
        """Room for that many nodes and as many again: there were more than slots, which is hardly ever so."""
        for name in ("_node_entry", "_node_count", "_is_scattered"):
            old = getattr(self, name)
            new = zeros(2 * nodes, "i" if old.itemsize == 4 else "B")
            new[: len(old)] = old
            setattr(self, name, new)

    def _leave(self, node: int, budget: int) -> int:
        """A node's slots may have changed: where it is known elsewhere, it is not any more.  Returns what that cost.

        Negative: they were cut at the end, and are otherwise what they were.  What costs more than `budget` is left
        half done, `_walk` or `_keep` say how far: the same is to be asked again before anything else.
        """
        tree = self.pool.tree
        cut = node < 0
        if cut:
            node = -node
        if node >= len(self._node_entry):
            self._grow(len(tree.keys))
        heads, counts, more = self._node_entry, self._node_count, self.entry_more
        entry, count = heads[node], counts[node]
        cost = 0
        keep = self._keep
        if keep < 0:
            extents = self._extents(node)
            n = len(extents) >> 1
            # Where it was left half done it may have changed since: then it comes once more.
            each, i, keep = self._walk or (entry, 2 * count, count)
            self._walk = None
            if keep > n:
                keep = n
            slots, lengths = self.entry_slot, self.entry_length
            least = max(0, 2 * min(n, count) - 2) if cut else 0
            last = 2 * n
            stop = max(least, i - (budget << 5))
            while i > stop:
                i -= 2
                if i < last and (slots[each] != extents[i] or lengths[each] != extents[i + 1]):
                    keep = i >> 1
                each = more[each]
            cost = 1 + ((2 * count - i) >> 5)
            if i > least:
                self._walk = each, i, keep
                return budget
            if keep < n:
                self._coming.append(node)
            if n >= IN_PIECES and not self._is_scattered[node]:
                self._is_scattered[node] = 1
                self.scattered.append(node)
        while count > keep:
            if cost >= budget:
                self._keep = keep
                break
            self._remove(entry)
            cost += 1
            count -= 1
            before = more[entry]
            more[entry] = self._entries_free
            self._entries_free = entry
            entry = before
        else:
            self._keep = -1
        heads[node] = entry
        counts[node] = count
        return cost

    def _enter(self, node: int, budget: int) -> int:
        """A node is known where it is now, of which the front may be known already.  Returns what that cost.

        What costs more than `budget` is to come once more.
        """
        tree = self.pool.tree
        if node >= len(self._node_entry):
            self._grow(len(tree.keys))
        extents = self._extents(node)
        counts = self._node_count
        known = counts[node]
        count = min(len(extents) >> 1, known + max(budget, 1))
        if count <= known:
            return 1
        entry = self._node_entry[node]
        for i in range(2 * known, 2 * count, 2):
            entry = self._insert(node, extents[i], extents[i + 1], entry)
        self._node_entry[node] = entry
        counts[node] = count
        if count >= IN_PIECES and not self._is_scattered[node]:
            self._is_scattered[node] = 1
            self.scattered.append(node)
        if 2 * count < len(extents):
            self._coming.append(node)
        return count - known

    def no_more_scattered(self) -> None:
        """The first of those in pieces is in pieces no more."""
        self._is_scattered[self.scattered.popleft()] = 0

    def _extents(self, node: int) -> list[int]:
        """Where a node is now, to be read only; nowhere if there is none."""
        tree = self.pool.tree
        if not tree.parent[node] or not tree.length[node]:
            return []
        return tree.scattered[node] if tree.slot[node] < 0 else tree.extents(node)

    def _insert(self, node: int, slot: int, length: int, more: int) -> int:
        entry = self._entries_free
        if entry:
            self._entries_free = self.entry_more[entry]
        else:
            entry = self._entries
            self._entries += 1
        self.entry_node[entry] = node
        self.entry_slot[entry] = slot
        self.entry_length[entry] = length
        self.entry_more[entry] = more
        size, first, used = self.size, self.first, self.used
        end = slot + length
        low, high = slot // size, (end - 1) // size
        self.entry_next[entry] = first[low]
        first[low] = entry
        if low == high:
            used[low] += length
        else:
            used[low] += (low + 1) * size - slot
            used[high] += end - high * size
            self.entry_tail[entry] = first[high]
            first[high] = entry
            if high - low > 1:
                self._first_view[low + 1 : high] = -entry
                self._used_view[low + 1 : high] = size
        self._changed(low, high)
        return entry

    def _remove(self, entry: int) -> None:
        size, first, used = self.size, self.first, self.used
        slots, following, tails = self.entry_slot, self.entry_next, self.entry_tail
        slot, length = slots[entry], self.entry_length[entry]
        end = slot + length
        low, high = slot // size, (end - 1) // size
        for block in (low, high) if high > low else (low,):
            start = block * size
            each, last = first[block], 0
            while each != entry:
                last = each
                each = following[each] if slots[each] >= start else tails[each]
            rest = following[entry] if block == low else tails[entry]
            if not last:
                first[block] = rest
            elif slots[last] >= start:
                following[last] = rest
            else:
                tails[last] = rest
        if low == high:
            used[low] -= length
        else:
            used[low] -= (low + 1) * size - slot
            used[high] -= end - high * size
            if high - low > 1:
                self._first_view[low + 1 : high] = 0
                self._used_view[low + 1 : high] = 0
        self._changed(low, high)

    def _changed(self, low: int, high: int) -> None:
        """The blocks from `low` to `high` have changed; those in between are full or free, so they stand in no ring."""
        is_dirty = self._is_dirty
        if not is_dirty[low]:
            is_dirty[low] = 1
            self._dirty.append(low)
        if not is_dirty[high]:
            is_dirty[high] = 1
            self._dirty.append(high)
        is_changed = self.group_is_changed
        for group in range(low // GROUP, high // GROUP + 1):
            if not is_changed[group]:
                is_changed[group] = 1
                self.groups_changed.append(group)

    # -- blocks ------------------------------------------------------------------------------------------------

    def entries(self, block: int) -> list[int]:
        """The extents that touch a block, in no order; of a crowded one, some."""
        entry = self.first[block]
        if entry <= 0:
            return [-entry] if entry else []
        start = block * self.size
        slots, following, tails = self.entry_slot, self.entry_next, self.entry_tail
        found: list[int] = []
        while entry and len(found) <= CROWDED:
            found.append(entry)
            entry = following[entry] if slots[entry] >= start else tails[entry]
        self.steps += len(found)
        return found

    def spans(self, block: int) -> list[tuple[int, int, int]]:
        """(slot, end, entry) of the extents that touch a block, in order, not cut at its edges."""
        slots, lengths = self.entry_slot, self.entry_length
        found = [(slots[entry], slots[entry] + lengths[entry], entry) for entry in self.entries(block)]
        if len(found) > 1:
            found.sort()
        return found

    def survey(self, block: int, now: float) -> None:
        """Puts a block into the rings where it belongs now."""
        used, size = self.used[block], self.size
        self._unpark(block)
        self.remaining.pop(block, None)
        self.emptied.discard(block)
        if size > CROWDED:
            if len(self.entries(block)) > CROWDED:
                self.crowded.add(block)
                self.fills.drop(block)
                self.holes.drop(block)
                return
            self.crowded.discard(block)
        if not 0 < used < size or (block + 1) * size <= self.pool.padding:
            self.fills.drop(block)
            self.holes.drop(block)
            return
        found, free, over = self.gaps(block)
        if found:
            self.holes.put(block, hole_class(max(over, *(n for _, n in found))))
        else:
            self.holes.drop(block)
        if used + free == size:
            self.fills.put(block, used * self.levels // size)
        else:
            self.park(block, now + RECHECK)

    def gaps(self, block: int) -> tuple[list[tuple[int, int]], int, int]:
        """The free stretches (slot, length) of a used block, in order; how many slots that are; and the longest hole.

        A hole may reach over an edge into the next used block; a wholly free block ends it.
        """
        size = self.size
        runs = self.pool.runs
        length_at, start_at = runs.length_at, runs.start_at
        low = block * size
        high = low + size
        found: list[tuple[int, int]] = []
        free = longest = 0
        at = low
        for slot, end, _ in self.spans(block):
            if slot > at:
                begin = start_at.get(slot, -1)
                if begin < 0 or begin > at:
                    # Something else stands there: what is free in front of it counts too.
                    n = length_at.get(at, 0)
                    if n and at + n <= slot:
                        found.append((at, n))
                        free += n
                if begin >= 0:
                    over = low - begin
                    if 0 < over < size:
                        longest = slot - begin
                    if begin < at:
                        begin = at
                    found.append((begin, slot - begin))
                    free += slot - begin
            at = end
        if at < high:
            n = length_at.get(at, 0)
            if n:
                over = at + n - high
                if 0 < over < size and n > longest:
                    longest = n
                if over > 0:
                    n -= over
                found.append((at, n))
                free += n
        return found, free, longest

    def left(self, block: int) -> list[tuple[int, int]]:
        """The free stretches of a used block that nothing is planned for, in order; none of a crowded one."""
        if block in self.crowded:
            return []
        found = self.remaining.get(block)
        return self.gaps(block)[0] if found is None else found

    # -- who may go --------------------------------------------------------------------------------------------

    def begin_plan(self, now: float) -> None:
        """Before anything is asked by `movable`: what was answered a while ago is not believed any more."""
        pool = self.pool
        if now > self.now:
            self.now = now
        if self.now - self._asked_at > BELIEVED or len(self._answers) > ANSWERS_MOST:
            self._answers.clear()
            self._asked_at = self.now
        self.starved = False
        self.page = max((session.page for session in pool.sessions.values()), default=1)
        self._followed = any(pool.moves.follows(session) for session in pool.sessions.values())
        self._asks = 1 + READ // (1 + len(pool.sequences))

    def movable(self, node: int) -> bool:
        """Whether a node may be moved.  `starved` is set where that was not asked, since asking takes too long."""
        tree = self.pool.tree
        # It moves, or it has gone and the index has not heard of it yet.
        if tree.flags[node] or not tree.length[node]:
            return False
        if not tree.holds[node]:
            return True
        if not self._followed:
            return False
        answer = self._answers.get(node)
        if answer is None:
            if not self._asks:
                self.starved = True
                return False
            self._asks -= 1
            answer = self._answers[node] = self.pool.moves.readers(node) is not None
        return answer

    # -- looked at in vain -------------------------------------------------------------------------------------

    def park(self, block: int, until: float) -> None:
        """Nothing to be had from this block as a source before it changes, or `until`."""
        if self._origin is None:
            self._origin = until
        fills = self.fills
        self._unpark(block)
        self._parked_free[block] = free = self.size - self.used[block]
        self.parked_free += free
        fills.put(block, self.levels)
        self._until[block] = int(10 * (until - self._origin))

    def unpark_all(self) -> bool:
        """All that are parked now are to be looked at again, a few with each `feed`; False: there are none."""
        self._again = self.fills.count[self.levels]
        return bool(self._again)

    def unpark(self, now: float, most: int = 1 << 30) -> None:
        """Blocks that were parked until now are to be looked at again."""
        fills, parked = self.fills, self.levels
        due = int(10 * (now - (self._origin or 0.0)))
        while most > 0:
            block = fills.first(parked)
            if block < 0 or (self._until[block] > due and not self._again):
                return
            most -= 1
            self._again -= self._again > 0
            self.fills.put(block, parked)  # at the end, until it has been surveyed
            self._until[block] = due + int(10 * RECHECK)
            if not self._is_dirty[block]:
                self._is_dirty[block] = 1
                self._dirty.append(block)

    def _unpark(self, block: int) -> None:
        if self.fills.ring_of(block) == self.levels:
            self.parked_free -= self._parked_free[block]
            self.fills.drop(block)


RECHECK = 5.0  # seconds after which a block with slots of running sequences in it is looked at again


def check(index: Index) -> list[str]:
    """What of a fully fed index does not agree with the tree, recounted from nothing: for tests."""
    pool, size = index.pool, index.size
    tree = pool.tree
    used = [0] * pool.config.blocks
    touching: list[set[tuple[int, int, int]]] = [set() for _ in used]
    for node in tree.live():
        if not tree.length[node]:
            continue
        extents = tree.extents(node)
        for i in range(0, len(extents), 2):
            slot, end = extents[i], extents[i] + extents[i + 1]
            for block in range(slot // size, (end - 1) // size + 1):
                used[block] += min(end, (block + 1) * size) - max(slot, block * size)
                touching[block].add((slot, end, node))
    wrong = []
    for block, count in enumerate(used):
        if index.used[block] != count:
            wrong.append(f"block {block}: {index.used[block]} used, {count} are")
        if (block in index.crowded) != (len(touching[block]) > CROWDED):
            wrong.append(f"block {block}: in {len(touching[block])} extents")
        if block in index.crowded:
            continue
        seen = {(slot, end, index.entry_node[entry]) for slot, end, entry in index.spans(block)}
        if seen != touching[block]:
            wrong.append(f"block {block}: holds {seen}, not {touching[block]}")
        if (0 < count < size) != (index.fills.ring_of(block) >= 0):
            wrong.append(f"block {block}, {count} used, stands in ring {index.fills.ring_of(block)}")
    pieces = {node for node, extents in tree.scattered.items() if len(extents) >= 2 * IN_PIECES}
    if not pieces <= set(index.scattered) or len(set(index.scattered)) != len(index.scattered):
        wrong.append(f"in pieces are {sorted(pieces)}, not {sorted(index.scattered)}")
    free = sum(index._parked_free[b] for b in range(len(used)) if index.fills.ring_of(b) == index.levels)
    if free != index.parked_free:
        wrong.append(f"{index.parked_free} free slots in parked blocks, {free} are")
    return wrong
