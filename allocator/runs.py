"""Free space: maximal runs of free slots, found by size in O(1).

A run is a stretch of free slots with no free neighbour on either side, so runs coalesce across block edges and a
piece of any length up to the pool's size may be one extent.

    cell       `cell` consecutive slots, aligned; sequences take whole cells and fill them from the front
    hole       a run without a whole cell: what is left behind a sequence's last token

    slots      |....|aaaa|aaa.|....|....|.bbb|          cell = 4, '.' free
                hole?       [----- run -----]           the run from slot 11 to 20 has 2 whole cells

Handing out single slots to the last one would grind a full pool to dust: every eviction frees a little, every request
takes a little of it, and pieces only get smaller.  Cells keep that from happening, and holes are used up on purpose
(`take_hole`), so little is lost to them.

Each run stands in three places: `length_at[start]`, `start_at[end]` (both for coalescing) and the container of its
class: holes by size, others by their number of whole cells, exact below 512 and within 1/16 above.  `occupied` has bit
c set when class c has a run, so the best fit is one shift and one lowest-set-bit (two-level classes with a bitmap:
TLSF, Masmano et al., ECRTS 2004).  Containers are dicts used as ordered sets: `popitem` takes the newest in amortised
O(1), a run that coalesces is removed by key.

With `total` free slots every `take` of up to `total` slots succeeds: free memory is never unusable for being scattered.

A request that needs hundreds of runs would take a millisecond for them, and one that gives so many back as long again.
`stock` splits that into slices: whole cells that stand in no class and do not coalesce, but are free and counted as
such.  What a long request will need is sorted out into it beforehand (`gather`), what it gives back is put there first
(`put_aside`) and filed among the runs afterwards (`unstock`).  Who finds no run takes from the stock.

Blocks.  A block is wholly free when one run covers it.  `blocks_free` counts those, and a block's generation rises when
it goes from wholly free to used (maps and snapshots tell by it whether a block is still the one they saw).
"""

from __future__ import annotations

from array import array
from itertools import islice

import numpy as np

from kvslot.allocator.extents import joined

LONG = 64  # cells from which a request is served from the stock first
EXACT = 512  # cell counts below have a class each
CELL_CLASSES = EXACT + 22 * 16 + 1
CANDIDATES = (
    8  # equal runs looked at for the nearest lifetime; more buys little and costs a dict operation each
)

# Expected lifetimes: what stands together in a block should die together, since a block is free only when its last
# slot is.  Neighbouring values are nearest.
EPHEMERAL, FRESH, REUSED = range(
    3
)  # a growth run, a prompt with nothing cached, one that goes on from a cached prefix


def size_class(cells: int) -> int:
    """The class, among those of whole cells, of a run of `cells` of them."""
    if cells < EXACT:
        return cells
    e = cells.bit_length()
    return EXACT + ((e - 10) << 4) + ((cells >> (e - 5)) & 15)


def _newest(runs: dict[int, None]) -> int:
    """The run added last.  `popitem` and back, since iterating would walk over all that was deleted behind it."""
    run = runs.popitem()[0]
    runs[run] = None
    return run


class FreeRuns:
    """The free slots of a pool of `blocks` blocks of `block_size` slots; the first `padding` slots are never free."""

    __slots__ = (
        "_bit",
        "_generation_view",
        "_stamp",
        "block_group",
        "block_kind",
        "block_size",
        "blocks",
        "blocks_free",
        "cell",
        "cells_free",
        "classes",
        "generation",
        "holes",
        "length_at",
        "long",
        "occupied",
        "padding",
        "start_at",
        "stock",
        "stocked",
        "total",
    )

    def __init__(self, blocks: int, block_size: int, padding: int, cell: int = 16) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.padding = padding
        self.cell = cell
        self.holes = 2 * cell - 1  # classes below it are holes: the longest hole has 2 * cell - 2 slots
        self.length_at: dict[int, int] = {}
        self.start_at: dict[int, int] = {}
        self.classes: list[dict[int, None]] = [{} for _ in range(self.holes + CELL_CLASSES)]
        self._bit = [1 << c for c in range(len(self.classes))]
        self.occupied = 0
        self.long = LONG
        self.stock: list[int] = []  # flat extents
        self.stocked = 0  # its cells
        self.total = 0
        self.cells_free = 0
        self.blocks_free = 0
        self._stamp = 0
        self.generation = array("I", bytes(4 * blocks))
        self._generation_view = np.frombuffer(self.generation, dtype=np.uint32)
        # Last piece placed in a block: its expected lifetime and whose it was.
        self.block_kind = array("B", bytes(blocks))
        self.block_group = array("i", bytes(4 * blocks))
        slots = blocks * block_size
        if slots > padding:
            self.give(padding, slots - padding)

    # -- taking ------------------------------------------------------------------------------------------------

    def take_cells(self, cells: int, kind: int = FRESH, group: int = 0) -> list[int]:
        """Takes `cells` whole cells (no more than `cells_free`) as few extents: flat slot, length, slot, length, ..."""
        cell, base, classes, bits = self.cell, self.holes, self.classes, self._bit
        length_at, start_at, block_size = self.length_at, self.start_at, self.block_size
        occupied = self.occupied
        self.total -= cells * cell
        self.cells_free -= cells
        out: list[int] = []
        if self.stocked and cells >= self.long:
            cells -= self._from_stock(cells, out)
            out = joined(out)
            if not cells:
                self._placed(out, kind, group)
                return out
        while True:
            c = base + (cells if cells < EXACT else size_class(cells))
            rest = occupied >> c
            run = -1
            if rest:
                c += (rest & -rest).bit_length() - 1
                if cells < EXACT:
                    run = classes[c].popitem()[0]
                else:
                    run = self._long_enough(c, cells)
                    if run >= 0:
                        del classes[c][run]
                    elif rest > 1:
                        rest >>= (rest & -rest).bit_length()
                        if rest:
                            c += (rest & -rest).bit_length()
                            run = classes[c].popitem()[0]
            if run < 0:
                # No run has them all: the longest ones first need the fewest extents.
                c = occupied.bit_length() - 1
                if c < base:
                    self.occupied = occupied
                    self._from_stock(cells, out)  # whole cells are nowhere else
                    self._placed(out, kind, group)
                    return joined(out)
                run = classes[c].popitem()[0]
            # The cut of `take_within`, written out: in a full pool a long prompt takes one run after the other.
            if not classes[c]:
                occupied ^= bits[c]
            size = length_at.pop(run)
            end = run + size
            start = run + -run % cell
            got = (end - start) // cell
            kept = got - cells
            if kept > 0:
                got = cells
            length = got * cell
            tail = start + length
            if start != run:
                left = start - run
                length_at[run] = left
                start_at[start] = run
                members = classes[left]
                if not members:
                    occupied |= bits[left]
                members[run] = None
            if tail == end:
                del start_at[end]
            else:
                left = end - tail
                length_at[tail] = left
                start_at[end] = tail
                c = left if kept <= 0 else base + (kept if kept < EXACT else size_class(kept))
                members = classes[c]
                if not members:
                    occupied |= bits[c]
                members[tail] = None
            if size >= block_size:
                self._used(run, end, start, tail)
            last = (tail - 1) // block_size
            self.block_kind[last] = kind
            self.block_group[last] = group
            if out and out[-2] + out[-1] == start:
                out[-1] += length
            else:
                out.append(start)
                out.append(length)
            cells -= got
            if not cells:
                self.occupied = occupied
                return out

    def take_hole(self, most: int, least: int, kind: int, group: int, out: list[int]) -> int:
        """Takes the longest hole of `least` to `most` slots and appends it to `out`; returns its length, 0 for none.

        Of holes of one length the one whose block lives about as long is taken.
        """
        if most >= self.holes:
            most = self.holes - 1
        size = (self.occupied & (self._bit[most + 1] - 1)).bit_length() - 1
        if size < least:
            return 0
        holes = self.classes[size]
        run = self._nearest(holes, kind, group)
        del holes[run]
        if not holes:
            self.occupied ^= self._bit[size]
        del self.length_at[run]
        del self.start_at[run + size]
        self.total -= size
        block_size = self.block_size
        if size >= block_size:
            self._used(run, run + size, run, run + size)
        block = run // block_size
        self.block_kind[block] = kind
        self.block_group[block] = group
        out.append(run)
        out.append(size)
        return size

    def take(self, n: int, kind: int = FRESH, group: int = 0) -> list[int]:
        """Takes any `n` free slots (no more than `total`) as few extents: best fit, else the longest runs first."""
        out: list[int] = []
        while True:
            run = self._fit(n, kind, group)
            got = n
            if run < 0:
                if not self.occupied:
                    self.unstock(1)
                c = self.occupied.bit_length() - 1
                run = _newest(self.classes[c])
                got = min(n, self.length_at[run])
            self.take_within(run, run, got)
            last = (run + got - 1) // self.block_size
            self.block_kind[last] = kind
            self.block_group[last] = group
            if out and out[-2] + out[-1] == run:  # only what was in stock has a free neighbour
                out[-1] += got
            else:
                out.append(run)
                out.append(got)
            n -= got
            if not n:
                return out

    def _fit(self, n: int, kind: int, group: int) -> int:
        """A best-fitting run of `n` slots, or -1 when none is long enough (or only one that is hard to find)."""
        base = self.holes
        if n < base:
            rest = (self.occupied & (self._bit[base] - 1)) >> n
            if rest:
                runs = self.classes[n + (rest & -rest).bit_length() - 1]
                return _newest(runs) if len(runs) == 1 else self._nearest(runs, kind, group)
        # A run of k cells may hold up to two cells less a slot more: look at a few of those before the sure ones.
        k = -(-n // self.cell)
        for few in range(max(k - 2, 1), k + 1):
            c = base + size_class(few)
            if self.classes[c]:
                run = self._long_enough(c, 0, n)
                if run >= 0:
                    return run
        c = base + size_class(k) + (k >= EXACT)
        rest = self.occupied >> c
        return _newest(self.classes[c + (rest & -rest).bit_length() - 1]) if rest else -1

    def take_run(self, n: int, kind: int = FRESH, group: int = 0) -> list[int]:
        """Takes `n` slots (no more than `longest()`) as one extent, looking at every run if it must."""
        run = self._fit(n, kind, group)
        if run < 0:
            run = min((length, start) for start, length in self.length_at.items() if length >= n)[1]
        self.take_within(run, run, n)
        block = (run + n - 1) // self.block_size
        self.block_kind[block] = kind
        self.block_group[block] = group
        return [run, n]

    def gather(self, cells: int, pieces: int) -> bool:
        """Sorts out runs, the longest first and `pieces` at most, until `cells` cells are in stock; True: not yet."""
        base, cell, classes, length_at = self.holes, self.cell, self.classes, self.length_at
        while self.stocked < cells and pieces:
            pieces -= 1
            missing = cells - self.stocked
            c = base + size_class(missing)
            rest = self.occupied >> c
            c = c + (rest & -rest).bit_length() - 1 if rest else self.occupied.bit_length() - 1
            if c < base:
                return False
            run = _newest(classes[c])
            start = run + -run % cell
            found = min((run + length_at[run] - start) // cell, missing)
            self.take_within(run, start, found * cell)
            self.total += found * cell
            self.cells_free += found
            self.stock += (start, found * cell)
            self.stocked += found
        return self.stocked < cells

    def put_aside(self, extents: list[int]) -> None:
        """Gives many extents (flat) back at once: their whole cells go into the stock."""
        cell, stock = self.cell, self.stock
        cells = 0
        for i in range(0, len(extents), 2):
            slot = extents[i]
            end = slot + extents[i + 1]
            start = slot + -slot % cell
            length = (end - start) // cell * cell
            if length <= 0:
                self.give(slot, end - slot)
                continue
            stock.append(start)
            stock.append(length)
            cells += length // cell
            if start > slot:
                self.give(slot, start - slot)
            if start + length < end:
                self.give(start + length, end - start - length)
        self.stocked += cells
        self.cells_free += cells
        self.total += cells * cell

    def unstock(self, pieces: int = 1 << 30, keep: int = 0) -> bool:
        """Files what is in stock beyond `keep` cells, `pieces` extents at most, among the runs; True: more is left."""
        stock, cell = self.stock, self.cell
        while stock and pieces and self.stocked > keep:
            pieces -= 1
            length, start = stock.pop(), stock.pop()
            self.stocked -= length // cell
            self.cells_free -= length // cell
            self.total -= length
            self.give(start, length)
        return self.stocked > keep

    def _from_stock(self, most: int, out: list[int]) -> int:
        """Moves up to `most` cells of the stock onto `out`; returns how many.  They count as taken already."""
        stock, cell = self.stock, self.cell
        if self.stocked <= most:
            out += stock
            stock.clear()
            found, self.stocked = self.stocked, 0
            return found
        left = most * cell
        i = len(stock)
        while left > 0:
            i -= 2
            left -= stock[i + 1]
        if left:  # of the last one only the front
            out.append(stock[i])
            out.append(stock[i + 1] + left)
            stock[i] += stock[i + 1] + left
            stock[i + 1] = -left
            i += 2
        out += stock[i:]
        del stock[i:]
        self.stocked -= most
        return most

    def _placed(self, out: list[int], kind: int, group: int) -> None:
        last = (out[-2] + out[-1] - 1) // self.block_size
        self.block_kind[last] = kind
        self.block_group[last] = group

    def take_at(self, start: int, n: int) -> bool:
        """Takes the `n` slots from `start` on if a run begins there and is long enough; growth in place."""
        if self.length_at.get(start, 0) < n:
            return False
        self.take_within(start, start, n)
        return True

    def take_edges(self, extents: list[int]) -> bool:
        """Takes these extents (flat), each at the front or the end of a run, or returns False and takes nothing."""
        length_at = self.length_at
        for i in range(0, len(extents), 2):
            slot, n = extents[i], extents[i + 1]
            run = slot if slot in length_at else self.start_at.get(slot + n, -1)
            if run < 0 or slot < run or run + length_at[run] < slot + n:
                for j in range(0, i, 2):
                    self.give(extents[j], extents[j + 1])
                return False
            self.take_within(run, slot, n)
        return True

    def take_pages(self, n: int, page: int) -> list[int]:
        """Takes `n` slots in whole aligned pages (n a multiple of `page`), or returns [] and takes nothing."""
        if page == self.cell:
            return self.take_cells(n // page) if self.cells_free * page >= n else []
        if self.stock:
            self.unstock()
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
        """A run with whole aligned pages: the best fit for all `n`, else the one with the most of them.

        Walks the runs class by class: pages that are not cells are rare, and a page must be found where there is one.
        """
        best: tuple[int, int, int] | None = None
        occupied = self.occupied >> min(page, self.holes)
        c = min(page, self.holes)
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

    def _long_enough(self, c: int, cells: int, n: int = 0) -> int:
        """The shortest of a few runs of class `c` with `cells` whole cells and `n` slots, or -1; nothing changes."""
        runs = self.classes[c]
        length_at, cell = self.length_at, self.cell
        seen = [runs.popitem()[0] for _ in range(min(CANDIDATES, len(runs)))]
        best = -1
        for start in reversed(seen):
            runs[start] = None
            size = length_at[start]
            fits = size >= n and (start + size) // cell + -start // cell >= cells
            if fits and (best < 0 or size < length_at[best]):
                best = start
        return best

    def _nearest(self, runs: dict[int, None], kind: int, group: int) -> int:
        """Of at most CANDIDATES equal holes the one whose block lives about as long."""
        block_size = self.block_size
        kinds, groups = self.block_kind, self.block_group
        seen: list[int] = []
        best, best_score = -1, 99
        for _ in range(min(CANDIDATES, len(runs))):
            start = runs.popitem()[0]
            seen.append(start)
            block = start // block_size
            score = abs(kinds[block] - kind) * 2 + (groups[block] != group)
            if score < best_score:
                best, best_score = start, score
                if not score:
                    break
        for start in reversed(seen):
            runs[start] = None
        return best

    # -- the two changes ---------------------------------------------------------------------------------------

    def take_within(self, run: int, start: int, n: int) -> None:
        """Takes [start, start + n) out of the run that begins at `run`."""
        length_at, start_at, classes, cell = self.length_at, self.start_at, self.classes, self.cell
        size = length_at.pop(run)
        end = run + size
        cells = end // cell + -run // cell
        c = size if cells <= 0 else self.holes + (cells if cells < EXACT else size_class(cells))
        members = classes[c]
        del members[run]
        if not members:
            self.occupied ^= self._bit[c]
        tail = start + n
        if cells < 0:
            cells = 0
        if tail == end:
            del start_at[end]
        else:
            left = end - tail
            length_at[tail] = left
            start_at[end] = tail
            kept = end // cell + -tail // cell
            if kept <= 0:
                c = left
            else:
                c = self.holes + (kept if kept < EXACT else size_class(kept))
                cells -= kept
            members = classes[c]
            if not members:
                self.occupied |= self._bit[c]
            members[tail] = None
        if start != run:
            left = start - run
            length_at[run] = left
            start_at[start] = run
            kept = start // cell + -run // cell
            if kept <= 0:
                c = left
            else:
                c = self.holes + (kept if kept < EXACT else size_class(kept))
                cells -= kept
            members = classes[c]
            if not members:
                self.occupied |= self._bit[c]
            members[run] = None
        self.total -= n
        self.cells_free -= cells
        if size >= self.block_size:
            self._used(run, end, start, tail)

    def give(self, start: int, n: int) -> None:
        """Gives [start, start + n) back; merges with free neighbours."""
        length_at, start_at, classes, cell = self.length_at, self.start_at, self.classes, self.cell
        block_size = self.block_size
        end = start + n
        self.total += n
        cells = freed = (
            0  # whole cells and wholly free blocks gained: those of the merged run less those of the parts
        )
        left = start_at.pop(start, -1)
        if left >= 0:
            size = start - left
            kept = start // cell + -left // cell
            if kept <= 0:
                c = size
            else:
                c = self.holes + (kept if kept < EXACT else size_class(kept))
                cells -= kept
            members = classes[c]
            del members[left]
            if not members:
                self.occupied ^= self._bit[c]
            if size >= block_size:
                whole = start // block_size + -left // block_size
                if whole > 0:
                    freed -= whole
            start = left
        size = length_at.pop(end, 0)
        if size:
            right = end
            end += size
            kept = end // cell + -right // cell
            if kept <= 0:
                c = size
            else:
                c = self.holes + (kept if kept < EXACT else size_class(kept))
                cells -= kept
            members = classes[c]
            del members[right]
            if not members:
                self.occupied ^= self._bit[c]
            if size >= block_size:
                whole = end // block_size + -right // block_size
                if whole > 0:
                    freed -= whole
        size = end - start
        length_at[start] = size
        start_at[end] = start
        kept = end // cell + -start // cell
        if kept <= 0:
            c = size
        else:
            c = self.holes + (kept if kept < EXACT else size_class(kept))
            cells += kept
        members = classes[c]
        if not members:
            self.occupied |= self._bit[c]
        members[start] = None
        self.cells_free += cells
        if size >= block_size:
            whole = end // block_size + -start // block_size
            if whole > 0:
                freed += whole
            self.blocks_free += freed

    def _used(self, run: int, end: int, start: int, tail: int) -> None:
        """Counts the blocks of the free run [run, end) that taking [start, tail) has put to use."""
        block_size = self.block_size
        first = start // block_size
        if first * block_size < run:
            first += 1
        stop = -(-tail // block_size)
        if stop * block_size > end:
            stop -= 1
        used = stop - first
        if used > 0:
            self.blocks_free -= used
            # A stamp that only rises: writing is less than half the work of reading, adding and writing.
            self._stamp = stamp = (self._stamp + 1) & 0xFFFFFFFF
            if used == 1:
                self.generation[first] = stamp
            else:
                self._generation_view[first:stop] = stamp

    def handed_on(self, extents: list[int], kind: int, group: int) -> None:
        """Slots (flat) that were taken from one holder go to the next without having been free in between."""
        block_size, generations = self.block_size, self._generation_view
        self._stamp = stamp = (self._stamp + 1) & 0xFFFFFFFF
        end = 0
        for i in range(0, len(extents), 2):
            start = extents[i]
            end = start + extents[i + 1]
            generations[-(-start // block_size) : end // block_size] = stamp
        last = (end - 1) // block_size
        self.block_kind[last] = kind
        self.block_group[last] = group

    # -- asking ------------------------------------------------------------------------------------------------

    def hole_slots(self) -> int:
        """Free slots outside whole cells."""
        return self.total - self.cells_free * self.cell

    def class_of(self, start: int, size: int) -> int:
        """The class that the run [start, start + size) belongs to."""
        cells = (start + size) // self.cell + -start // self.cell
        return size if cells <= 0 else self.holes + size_class(cells)

    def in_one(self, cells: int) -> bool:
        """Whether a run is sure to have so many whole cells."""
        return bool(self.occupied >> (self.holes + size_class(cells) + (cells >= EXACT)))

    def longest(self) -> int:
        """The length of the longest run, or within 1/16 of it: looks at 64 runs of the top class only."""
        if not self.occupied:
            return 0
        top = self.occupied.bit_length() - 1
        return top if top < self.holes else max(self.length_at[s] for s in islice(self.classes[top], 64))

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
