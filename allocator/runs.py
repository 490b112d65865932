"""Free space: maximal runs of free slots, found by size in O(1).

A run is a stretch of free slots with no free neighbour on either side, so runs coalesce across block edges and a
piece of any length up to the pool's size may be one extent.  Each run stands in three places: `length_at[start]`,
`start_at[end]` (both for coalescing) and the container of its size class.

    sizes 1 .. 511        one class a size: best fit is exact
    sizes from 512 on     16 classes a doubling: within 1/16 of best fit

`occupied` has bit c set when class c has a run, so the best fit for n is one shift and one lowest-set-bit.  Two-level
classes with a bitmap are the idea of TLSF (Masmano et al., ECRTS 2004).  Containers are dicts used as ordered sets:
`popitem` takes the newest in amortised O(1), a run that coalesces is removed by key.

Best fit keeps long runs long; a request no single run can hold is served from the largest runs down, which needs the
fewest extents.  With `total` free slots every request of up to `total` slots succeeds: free memory is never unusable
here for being scattered.

Blocks.  A block is wholly free when one run covers it.  `blocks_free` counts those, and a block's generation rises when
it goes from wholly free to used (maps and snapshots tell by it whether a block is still the one they saw).
"""

from __future__ import annotations

from array import array

import numpy as np

EXACT = 512  # sizes below have a class each; 512 classes are 17 machine digits of bitmap, still cheap to shift
_CLASSES = EXACT + 22 * 16 + 1
_BIT = [1 << c for c in range(_CLASSES)]
CANDIDATES = 8  # equal holes looked at for the nearest lifetime; more buys little and costs a dict operation each

# Expected lifetimes: what stands together in a block should die together, since a block is free only when its last
# slot is.  Neighbouring values are nearest.
EPHEMERAL, FRESH, REUSED, PINNED = range(4)


def size_class(size: int) -> int:
    """The class of a run of `size` slots."""
    if size < EXACT:
        return size
    e = size.bit_length()
    return EXACT + ((e - 10) << 4) + ((size >> (e - 5)) & 15)


class FreeRuns:
    """The free slots of a pool of `blocks` blocks of `block_size` slots; the first `padding` slots are never free."""

    __slots__ = (
        "block_group",
        "block_kind",
        "block_size",
        "blocks",
        "blocks_free",
        "classes",
        "generation",
        "length_at",
        "occupied",
        "padding",
        "start_at",
        "total",
        "_generation_view",
    )

    def __init__(self, blocks: int, block_size: int, padding: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.padding = padding
        self.length_at: dict[int, int] = {}
        self.start_at: dict[int, int] = {}
        self.classes: list[dict[int, None]] = [{} for _ in range(_CLASSES)]
        self.occupied = 0
        self.total = 0
        self.blocks_free = 0
        self.generation = array("I", bytes(4 * blocks))
        self._generation_view = np.frombuffer(self.generation, dtype=np.uint32)
        # Last piece placed in a block: its expected lifetime and whose it was.
        self.block_kind = array("B", bytes(blocks))
        self.block_group = array("i", bytes(4 * blocks))
        slots = blocks * block_size
        if slots > padding:
            self.give(padding, slots - padding)

    # -- taking ------------------------------------------------------------------------------------------------

    def take(self, n: int, kind: int = FRESH, group: int = 0) -> list[int]:
        """Takes `n` slots; returns a flat list slot, length, slot, length, ... of as few extents as the runs allow.

        The caller has checked n <= total.
        """
        out: list[int] = []
        while True:
            start = self._fit(n, kind, group)
            if start >= 0:
                out.append(start)
                out.append(n)
                return out
            start, size = self._largest()
            self._cut(start, size, start, size)
            out.append(start)
            out.append(size)
            n -= size

    def _fit(self, n: int, kind: int, group: int) -> int:
        """Takes a best-fitting run of `n` and returns its start, or -1 when no single run is long enough."""
        classes = self.classes
        if n < EXACT:
            rest = self.occupied >> n
            if not rest:
                return -1
            c = n + (rest & -rest).bit_length() - 1
        else:
            # The class of n itself may hold runs shorter than n: look at a few before going one class up.
            c = size_class(n)
            if classes[c]:
                start = self._long_enough(c, n)
                if start >= 0:
                    self._cut(start, self.length_at[start], start, n)
                    return start
            rest = self.occupied >> (c + 1)
            if not rest:
                # Only this class can still hold one; a pool that nearly fills a request is worth the walk.
                start = self._long_enough(c, n, len(classes[c])) if classes[c] else -1
                if start >= 0:
                    self._cut(start, self.length_at[start], start, n)
                return start
            c += (rest & -rest).bit_length()
        holes = classes[c]
        block_size = self.block_size
        if n >= block_size or len(holes) == 1:
            start, _ = holes.popitem()
        else:
            start = self._nearest(holes, kind, group)
        if not holes:
            self.occupied ^= _BIT[c]
        # The cut of `_cut`, written out: this is the allocator's innermost step.
        size = self.length_at.pop(start)
        end = start + size
        if size == n:
            del self.start_at[end]
        else:
            head = start + n
            size_left = size - n
            self.length_at[head] = size_left
            self.start_at[end] = head
            c = size_left if size_left < EXACT else size_class(size_left)
            holes = classes[c]
            if not holes:
                self.occupied |= _BIT[c]
            holes[head] = None
        self.total -= n
        if size >= block_size:
            self._used(start, end, start, start + n)
        last = (start + n - 1) // block_size
        self.block_kind[last] = kind
        self.block_group[last] = group
        return start

    def take_at(self, start: int, n: int) -> bool:
        """Takes the `n` slots from `start` on if a run begins there and is long enough; growth in place."""
        size = self.length_at.get(start, 0)
        if size < n:
            return False
        self._cut(start, size, start, n)
        return True

    def take_within(self, run: int, start: int, n: int) -> None:
        """Takes [start, start + n) out of the run that begins at `run`."""
        self._cut(run, self.length_at[run], start, n)

    def take_pages(self, n: int, page: int) -> list[int]:
        """Takes `n` slots in whole aligned pages (n a multiple of `page`), or returns [] and takes nothing."""
        out: list[int] = []
        missing = n
        while missing:
            found = self._aligned(missing, page)
            if found is None:
                for i in range(0, len(out), 2):
                    self.give(out[i], out[i + 1])
                return []
            run, start, length = found
            self.take_within(run, start, length)
            out.append(start)
            out.append(length)
            missing -= length
        return out

    def _aligned(self, n: int, page: int) -> tuple[int, int, int] | None:
        """A run with whole aligned pages: the best fit for all `n`, else the one with the most of them."""
        best: tuple[int, int, int] | None = None
        occupied = self.occupied >> page
        c = page
        while occupied:
            skip = (occupied & -occupied).bit_length()
            c += skip - 1
            occupied >>= skip
            for run in self.classes[c]:
                start = run + -run % page
                whole = (run + self.length_at[run] - start) // page * page
                if whole >= n:
                    return run, start, n
                if whole > 0 and (best is None or whole > best[2]):
                    best = run, start, whole
            c += 1
        return best

    def _long_enough(self, c: int, n: int, tries: int = CANDIDATES) -> int:
        """The shortest of a few runs of class `c` that hold `n`, or -1; the class is left as it was."""
        holes = self.classes[c]
        length_at = self.length_at
        seen = [holes.popitem()[0] for _ in range(min(tries, len(holes)))]
        best = -1
        for start in seen:
            holes[start] = None
            size = length_at[start]
            if size >= n and (best < 0 or size < length_at[best]):
                best = start
        return best

    def _nearest(self, holes: dict[int, None], kind: int, group: int) -> int:
        """Of at most CANDIDATES equal holes the one whose block lives about as long; it is removed from `holes`."""
        block_size = self.block_size
        kinds, groups = self.block_kind, self.block_group
        seen = [holes.popitem()[0] for _ in range(min(CANDIDATES, len(holes)))]
        best, best_score = -1, 99
        for start in seen:
            # A hole's neighbours are in the block of its first slot, or, when that slot opens a block, in its last.
            block = start // block_size
            score = abs(kinds[block] - kind) * 2 + (groups[block] != group)
            if score < best_score:
                best, best_score = start, score
                if not score:
                    break
        for start in seen:
            if start != best:
                holes[start] = None
        return best

    def _largest(self) -> tuple[int, int]:
        c = self.occupied.bit_length() - 1
        holes = self.classes[c]
        start, _ = holes.popitem()
        holes[start] = None
        return start, self.length_at[start]

    # -- the two changes ---------------------------------------------------------------------------------------

    def _cut(self, run: int, size: int, start: int, n: int) -> None:
        """Takes [start, start + n) out of the run [run, run + size)."""
        length_at, start_at, classes = self.length_at, self.start_at, self.classes
        end = run + size
        c = size if size < EXACT else size_class(size)
        holes = classes[c]
        del holes[run]
        if not holes:
            self.occupied ^= _BIT[c]
        del length_at[run]
        tail = start + n
        if tail == end:
            del start_at[end]
        else:
            size_left = end - tail
            length_at[tail] = size_left
            start_at[end] = tail
            c = size_left if size_left < EXACT else size_class(size_left)
            holes = classes[c]
            if not holes:
                self.occupied |= _BIT[c]
            holes[tail] = None
        if start != run:
            size_left = start - run
            length_at[run] = size_left
            start_at[start] = run
            c = size_left if size_left < EXACT else size_class(size_left)
            holes = classes[c]
            if not holes:
                self.occupied |= _BIT[c]
            holes[run] = None
        self.total -= n
        if size >= self.block_size:
            self._used(run, end, start, tail)

    def give(self, start: int, n: int) -> None:
        """Gives [start, start + n) back; merges with free neighbours."""
        length_at, start_at, classes = self.length_at, self.start_at, self.classes
        end = start + n
        self.total += n
        left = start_at.get(start, -1)
        block_size = self.block_size
        freed = 0  # wholly free blocks gained: those of the merged run less those of the parts
        if left >= 0:
            size = start - left
            del start_at[start]
            c = size if size < EXACT else size_class(size)
            holes = classes[c]
            del holes[left]
            if not holes:
                self.occupied ^= _BIT[c]
            if size >= block_size:
                whole = start // block_size + -left // block_size
                if whole > 0:
                    freed -= whole
            start = left
        right = length_at.pop(end, 0)
        if right:
            c = right if right < EXACT else size_class(right)
            holes = classes[c]
            del holes[end]
            if not holes:
                self.occupied ^= _BIT[c]
            if right >= block_size:
                whole = (end + right) // block_size + -end // block_size
                if whole > 0:
                    freed -= whole
            end += right
        size = end - start
        length_at[start] = size
        start_at[end] = start
        c = size if size < EXACT else size_class(size)
        holes = classes[c]
        if not holes:
            self.occupied |= _BIT[c]
        holes[start] = None
        if size >= block_size:
            whole = end // block_size + -start // block_size
            if whole > 0:
                freed += whole
            self.blocks_free += freed

    def _used(self, run: int, end: int, start: int, tail: int) -> None:
        """Counts the blocks of the free run [run, end) that taking [start, tail) has put to use."""
        block_size = self.block_size
        first = max(-(-run // block_size), start // block_size)
        stop = min(end // block_size, -(-tail // block_size))
        used = stop - first
        if used > 0:
            self.blocks_free -= used
            if used == 1:
                self.generation[first] = (self.generation[first] + 1) & 0xFFFFFFFF
            else:
                self._generation_view[first:stop] += 1

    # -- asking ------------------------------------------------------------------------------------------------

    def longest(self) -> int:
        """The length of the longest run; walks the top class only."""
        if not self.occupied:
            return 0
        top = self.occupied.bit_length() - 1
        return top if top < EXACT else max(self.length_at[s] for s in self.classes[top])

    def would_free_blocks(self, start: int, n: int) -> bool:
        """Whether giving [start, start + n) back would leave a block wholly free that is not now."""
        block_size = self.block_size
        end = start + n
        left = self.start_at.get(start, start)
        right = end + self.length_at.get(end, 0)
        # Blocks whole in [left, right) that touch [start, end).
        first = max(-(-left // block_size), start // block_size)
        stop = min(right // block_size, -(-end // block_size))
        return stop > first
