"""Windows: stretches of so many whole blocks that can be cleared, so that free memory is usable as long runs.

    blocks     |x.|.x|..|xx|##|.x|..|x.|..|xx|##|          # cannot be moved: leased, running, padding
    windows    [ clear it ] [..] slack [ keep it ] slack

Windows do not overlap and have nothing in them that cannot be moved.  They lie on multiples of their length, and
between two obstacles where that costs one from the first block on.  What is in the way is not known beforehand: a
window that turns out to have something in it is taken up again around it.

As many windows can be clear as fit into what is free; so the emptiest are cleared until there are as many, into the
slack, which is no use as runs anyway, and into the others, the fullest first.  Nothing goes to a window that is to be
cleared.  Pieces take the hole that fits best, and fill holes up in parts where none is long enough.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

import msgspec
import numpy as np

from kvslot.defrag.index import GROUP, Index, Rings, hole_class
from kvslot.defrag.view import Plan, PlannedMove

LEVELS = 64  # of fill
CLEAR, FULL, KEPT, LEAVING = LEVELS, LEVELS + 1, LEVELS + 2, LEVELS + 3  # further rings of windows
LONGEST = 254  # blocks
NONE = 255  # no window begins in this group
BACK_OFF = 60.0  # seconds after which what was in the way is looked at again ...
BACK_OFF_WAITING = 2.0  # ... and where somebody waits for a run
PASS_GAIN = 1000  # 1/1000 of what is free: a pass that cleared more is followed by another
OPENED_AHEAD = 16  # groups of holes looked at for one that takes a piece whole, before it is cut
PLACING = 240  # work that the pieces of a window are always given, however many there were to be looked at
EXTENTS = 256  # looked at together: of a window in more, or of a group of holes, the rest has its turn later
LOOKED = 10.0  # seconds for which it is believed that nothing in such a window stays
TAKEN = 4096  # slots in use and not cached, one after the other, from which on nobody looks where they end
STRIDE = 4096  # blocks: what a search for one window looks at together
IMPOSSIBLE = 1 << 40
_ZERO = np.zeros(1, dtype=np.int64)
SPARE = 8  # cuts that what goes from a window may always have, one for CUT_LEAST tokens of it at the most
CUT_LEAST = 16
PART_SHIFT = 14  # slots of a part of the pool whose holes are told apart together, in bits
# Tokens of a node for each extent that it may have beyond two: half a block, so that a table of extents comes to twice
# as many as one of blocks has; or CUTS_PER, since extents of so many are long enough to be read and copied well.
CUTS_PER = 64


def extents_most(length: int, size: int) -> int:
    """The extents that a node of `length` tokens may come to stand in by moves, in blocks of `size` slots."""
    return 2 + length // min(CUTS_PER, size // 2 + 1)


class Piece(msgspec.Struct, gc=False):
    """Part of an extent that is to go: tokens [at, at + length) of `node`, which stand from `slot` on."""

    node: int
    at: int
    slot: int
    length: int
    cuts: int  # extents that the node has more without it
    spare: int  # ... and may have beyond that
    phase: int  # where in a page it must begin, for whoever reads it by pages; -1: anywhere


def piece_of(index: Index, node: int, slot: int, end: int, first: int, stop: int) -> Piece | None:
    """What is to go of the extent [first, stop) of `node` so that [slot, end) of it goes; None if it may not."""
    tree = index.pool.tree
    if not index.movable(node):
        return None
    extents = tree.extents(node)
    cuts = (slot > first) + (end < stop)
    spare = extents_most(tree.length[node], index.size) - (len(extents) >> 1) - cuts
    if cuts and spare < 0:
        slot, end, spare, cuts = first, stop, spare + cuts, 0
    at = 0
    for i in range(0, len(extents), 2):
        if extents[i] == first:
            at += slot - first
            page = index.page
            if page > 1 and index.pool.unit % page and (tree.depth[node] + at - slot) % page == 0:
                return Piece(node, at, slot, end - slot, cuts, 0, slot % page)
            return Piece(node, at, slot, end - slot, cuts, spare, -1)
        at += extents[i + 1]
    return None  # the index has not heard of a change yet


class Holes:
    """Free stretches that something may go to, by length.  Each is taken from one end, which is an end of its run."""

    def __init__(self) -> None:
        self.classes: dict[int, list[tuple[int, int, bool]]] = {}
        self.occupied = 0
        # The end that each is taken from -> its length, by part of the pool, since a large dictionary takes long to
        # grow and to go.  What else stands in a class has become part of another hole.
        self.lengths: dict[int, dict[int, int]] = {}

    def add(self, slot: int, n: int, front: bool) -> None:
        """[slot, slot + n), to be taken from its `front` or else from its end."""
        c = hole_class(n)
        members = self.classes.get(c)
        if members is None:
            members = self.classes[c] = []
        members.append((slot, n, front))
        self.occupied |= 1 << c
        end = slot if front else slot + n
        part = self.lengths.get(end >> PART_SHIFT)
        if part is None:
            part = self.lengths[end >> PART_SHIFT] = {}
        part[end if front else ~end] = n

    def give_back(self, slot: int, n: int, front: bool) -> None:
        """Undoes that [slot, slot + n) was taken: it is one hole again with what was left of that."""
        if front:
            self.add(slot, n + self._pop(slot + n, slot + n), True)
        else:
            left = self._pop(slot, ~slot)
            self.add(slot - left, left + n, False)

    def _pop(self, end: int, key: int) -> int:
        part = self.lengths.get(end >> PART_SHIFT)
        return part.pop(key, 0) if part is not None else 0

    def best(self, n: int) -> tuple[int, int, bool] | None:
        """Takes out the shortest of at least `n` slots, or of a few nearly as short."""
        occupied = self.occupied >> hole_class(n) << hole_class(n)
        while occupied:
            c = (occupied & -occupied).bit_length() - 1
            occupied ^= 1 << c
            members = self.classes[c]
            found = -1
            for i in range(len(members) - 1, max(len(members) - 17, -1), -1):
                if members[i][1] >= n and (found < 0 or members[i][1] < members[found][1]):
                    found = i
            if found >= 0:
                hole = self._out(c, found)
                if hole is not None:
                    return hole
                occupied |= self.occupied & (1 << c)
        return None

    def longest(self, most: int) -> tuple[int, int, bool] | None:
        """Takes out about the longest of at most `most` slots."""
        occupied = self.occupied & ((2 << hole_class(most)) - 1)
        while occupied:
            c = occupied.bit_length() - 1
            occupied ^= 1 << c
            members = self.classes[c]
            for i in range(len(members) - 1, max(len(members) - 17, -1), -1):
                if members[i][1] <= most:
                    hole = self._out(c, i)
                    if hole is not None:
                        return hole
                    occupied |= self.occupied & (1 << c)
                    break
        return None

    def _out(self, c: int, i: int) -> tuple[int, int, bool] | None:
        """Takes one out of its class; None where it is none any more."""
        members = self.classes[c]
        members[i], members[-1] = members[-1], members[i]
        hole = members.pop()
        if not members:
            self.occupied ^= 1 << c
        slot, n, front = hole
        end = slot if front else slot + n
        key = end if front else ~end
        part = self.lengths.get(end >> PART_SHIFT)
        if part is None or part.get(key) != n:
            return None
        del part[key]
        return hole


class Windows:
    """The windows of one pool, kept up to date from the index."""

    def __init__(self, index: Index, blocks: int) -> None:
        """`blocks`: how many a window has, up to LONGEST."""
        self.index = index
        self.group = blocks
        self.aligned_from = 32 * blocks  # blocks between obstacles from which a window less is nothing
        self.pool = index.pool
        blocks = self.pool.config.blocks
        self.blocks = blocks
        self.groups = -(-blocks // self.group)
        self.span = self.group * index.size  # slots
        self.stuck = bytearray(blocks)
        for block in range(-(-self.pool.padding // index.size)):
            self.stuck[block] = 1
        self.offset = bytearray(b"\xff" * self.groups)  # of the window that begins in the group
        self.windows = Rings(self.groups, LEVELS + 4)
        self.fills = Rings(self.groups, LEVELS + 1)  # groups by fill; none: full or empty
        self._changed: list[int] = []
        # (until, window looked at in vain, blocks stuck)
        self._later: deque[tuple[float, int, list[int]]] = deque()
        self._build = 0
        self._holes = Holes()
        self._old: list[list[tuple[int, int, bool]]] = []  # forgotten, which takes time too
        self._parts: list[dict[int, int]] = []
        self._opened: set[int] = set()  # groups whose holes are known
        # Windows that were to be cleared when their groups were opened, and whose holes are known all the same.
        self._whole: set[int] = set()
        self._level = -1
        self._fresh = True  # whether this plan has not looked at any window yet
        self._source = -1  # the window that is being cleared
        self._cleared = 0  # windows, when this pass began
        self._one_more = False  # a pass that was worth little has been followed by another
        self._again = 0  # windows that were looked at in vain and are to be looked at again
        self._apart = (0, 0)  # blocks of the one window that is being cleared for somebody who waits
        self._used: set[int] = set()  # runs taken from by this plan although they are long
        # Where something was planned up to in this plan -> the end of the free run that it was taken from.
        self._planned: dict[int, int] = {}
        self._search: Search | None = None
        # A window in too many extents to be looked at together: its first block, the one up to which it has been, and
        # until when that is believed.
        self._looked = (0, 0, 0.0)
        self._opening: list[tuple[int, int]] = []  # blocks whose holes are still to be added
        self._part = max(2, self.pool.unit)
        self.work = 0

    # -- what there is -----------------------------------------------------------------------------------------

    def refresh(self, now: float) -> bool:
        """Takes in what the index heard, as long as there is work left; True: there is more."""
        later = self._later
        while later and later[0][0] <= now and self.work > 0:
            _, window, stuck = later.popleft()
            if stuck:
                for block in stuck:
                    self.stuck[block] = 0
                self._lay(stuck[0], stuck[-1])
            if window >= 0:
                self._file(window)
                self.work -= 1
            self._one_more = False
        while self._old and self.work > 0:
            self.work -= 8
            del self._old[-1][-256:]
            if not self._old[-1]:
                del self._old[-1]
        while self._parts and self.work > 0:
            self.work -= 4 + (len(self._parts.pop()) >> 5)
        while self._again and self.work > 0:
            self._again -= 1
            self.work -= 1
            group = self.windows.first(KEPT)
            if group >= 0:
                self._file(group)
        while self._build < self.groups and self.work > 0:
            group = self._build
            self._build += 1
            self._lay_group(group)
            self._fill(group)
            self._file(group)
            self.work -= 3
        changed = self._changed
        heard, is_heard = self.index.groups_changed, self.index.group_is_changed
        while heard and self.work > 0:
            each = heard.pop()
            is_heard[each] = 0
            first, last = each * GROUP // self.group, (each * GROUP + GROUP - 1) // self.group
            for group in range(first, min(last + 1, self.groups)):
                self._refresh(group)
        while changed and self.work > 0:
            self._refresh(changed.pop())
        return bool(changed or heard or self._old or self._parts or self._again or self._build < self.groups)

    def _refresh(self, group: int) -> None:
        self.work -= 2
        if group >= self._build:
            return
        self._fill(group)
        for each in (group, group - 1):
            if each >= 0 and self.windows.ring_of(each) != KEPT:  # what is being filled is no source at once
                self._file(each)

    def _fill(self, group: int) -> None:
        used = sum(self.index.used[group * self.group : (group + 1) * self.group])
        if 0 < used < self.span and group not in self._opened:
            self.fills.put(group, used * LEVELS // self.span)
        else:
            self.fills.drop(group)

    def _file(self, group: int) -> None:
        """Puts the window that begins in `group` where it belongs."""
        offset = self.offset[group]
        if offset == NONE:
            self.windows.drop(group)
            return
        start = group * self.group + offset
        used = sum(self.index.used[start : start + self.group])
        ring = CLEAR if not used else FULL if used == self.span else used * LEVELS // self.span
        self.windows.put(group, ring)

    def _lay_group(self, group: int) -> bool:
        """Where a window begins in `group`, if anywhere; True when that is not where it was."""
        find, rfind = self.stuck.find, self.stuck.rfind
        first = group * self.group
        found = NONE
        block = first
        last = min(first + self.group, self.blocks)
        while block < last:
            # The stretch [low, high) without an obstacle that `block` is in, or enough of it to know that it is long.
            high = find(1, block, block + self.aligned_from)
            if high == block:
                block += 1
                continue
            if high < 0:
                high = min(block + self.aligned_from, self.blocks)
            low = rfind(1, max(0, block - self.aligned_from), block) + 1 or max(0, block - self.aligned_from)
            start = first
            if (
                high - low < self.aligned_from
                and (high - -(-low // self.group) * self.group) // self.group < (high - low) // self.group
            ):
                start += low % self.group
            if low <= start and start + self.group <= high:
                found = start - first
                break
            block = high + 1
        if self.offset[group] == found:
            return False
        self.offset[group] = found
        return True

    def _lay(self, low: int, high: int) -> None:
        """Obstacles have come or gone among the blocks from `low` to `high`."""
        self.work -= 120
        first = max(0, low - self.aligned_from - self.group) // self.group
        last = min(self.blocks - 1, high + self.aligned_from + self.group) // self.group
        for group in range(first, last + 1):
            if self._lay_group(group):
                self._file(group)

    def window_of(self, block: int) -> int:
        """The group in which the window begins that `block` is in, or -1."""
        group = block // self.group
        offset = self.offset[group]
        if offset != NONE and block >= group * self.group + offset:
            return group
        if group:
            offset = self.offset[group - 1]
            if offset != NONE and block < group * self.group + offset:
                return group - 1
        return -1

    # -- plans -------------------------------------------------------------------------------------------------

    def plan(self, plan: Plan, budget: int, now: float, work: int) -> None:
        """Adds moves that clear windows to `plan`."""
        self.work = work
        self._fresh = True
        self._planned.clear()
        self._begin(0, 0)
        if self.refresh(now):
            plan.settled = False
            return
        rings = self.windows
        self._level = level = self._threshold()
        while level >= 0:
            sources = rings.occupied & ((2 << level) - 1)
            if not sources:
                break
            group = rings.first((sources & -sources).bit_length() - 1)
            if self.work <= 0 or plan.cost >= budget or not self._clear(group, budget - plan.cost, plan, now):
                plan.settled = False
                return
        if plan.moves:
            plan.settled = False
            return
        # The end of a pass: the next one looks for holes afresh, and at once if this one was worth its while.
        gained = rings.count[CLEAR] - self._cleared
        self._cleared = rings.count[CLEAR]
        much = gained * self.span * PASS_GAIN > self.pool.runs.total
        if much or (gained > 0 and not self._one_more):
            self._one_more = not much
            self._again = rings.count[KEPT]
            plan.settled = False
        self._end()

    def _begin(self, start: int, stop: int) -> None:
        """Holes are looked for outside the blocks [start, stop) from here on."""
        if self._apart != (start, stop):
            self._end()
            self._apart = (start, stop)

    def _end(self) -> None:
        """Forgets all holes."""
        self._changed += self._opened
        self._opened.clear()
        self._opening.clear()
        self._whole.clear()
        self._old += self._holes.classes.values()
        self._parts += self._holes.lengths.values()
        self._holes = Holes()

    def _threshold(self) -> int:
        """The fill up to which windows are to be cleared, -1 for none: as many as what is free has room for."""
        count = self.windows.count
        wanted = self.pool.runs.total // self.span - count[CLEAR] - count[LEAVING]
        for level in range(LEVELS):
            if wanted <= 0:
                return level - 1
            wanted -= count[level]
        return LEVELS - 1

    def _clear(self, group: int, budget: int, plan: Plan, now: float) -> bool:
        """Plans to clear a window, or part of it where all is too much for now; False: that is all for this plan."""
        first = group * self.group + self.offset[group]
        self._source = group
        pieces, stuck, busy, whole = self._look(first, first + self.group, now)
        if self.index.starved:
            return False
        if stuck:
            for block in stuck:
                self.stuck[block] = 1
            self._later.append((now + BACK_OFF, -1, stuck))
            self._lay(stuck[0], stuck[-1])
            return True
        if busy:
            self._wait(group, LEAVING, now)
            return True
        if self._fresh:
            self.work = max(self.work, PLACING)
            self._fresh = False
        elif self.work <= 0:
            return False
        if not pieces and not whole:
            return False
        pieces.sort(key=_by_length)
        undo: list[tuple[int, int, bool]] = []
        targets: list[list[int]] = []
        for piece in pieces:
            if (budget < piece.length and (plan.moves or targets)) or (self.work <= 0 and targets):
                break
            target = self._place(piece, undo)
            if target is None:
                if self.work <= 0 and targets:
                    break  # the holes that were looked at are known from now on
                self._give_back(undo)
                if self.work <= 0:
                    return False
                self._keep_one(group, now)
                return True
            budget -= piece.length
            targets.append(target)
        for piece, target in zip(pieces, targets, strict=False):
            plan.moves.append(
                PlannedMove(piece.node, piece.at, piece.length, [piece.slot, piece.length], target)
            )
            plan.cost += piece.length
        whole = whole and len(targets) == len(pieces)
        if whole:
            plan.gain += self.span
        self._wait(group, LEAVING, now)
        return whole

    def plan_one(self, plan: Plan, budget: int, now: float, work: int, blocks: int) -> None:
        """Adds moves that clear the cheapest stretch of `blocks` whole blocks to `plan`."""
        self.work = work
        self._used.clear()
        self._planned.clear()
        if self.refresh(now + BACK_OFF - BACK_OFF_WAITING):
            plan.settled = False
            return
        if blocks > self.blocks or self.pool.runs.longest() >= blocks * self.index.size:
            self._search = None
            return
        search = self._search
        if search is None or search.blocks != blocks:
            search = self._search = Search(self, blocks)
        while self.work > 0:
            if search.more():
                continue
            found = search.best()
            if found is None:
                self._search = None
                return
            start = found
            pieces, stuck, busy, whole = self._look(start, start + blocks, now)
            if not whole and not pieces and not stuck and not busy:
                break  # not all of it has been looked at
            if not pieces and not stuck and not busy:
                stuck = self._taken(start, start + blocks)
            if busy or self.index.starved:
                break
            if stuck:
                for block in stuck:
                    self.stuck[block] = 1
                self._later.append((now + BACK_OFF, -1, stuck))
                self._lay(stuck[0], stuck[-1])
                search.changed(stuck[0], stuck[-1])
                continue
            if blocks * self.index.size > self.pool.runs.total:
                self._search = None  # what is there now fits nowhere else
                return
            self._begin(start, start + blocks)
            self._level = -1
            pieces.sort(key=_by_length)
            self.work = max(self.work, PLACING)
            undo: list[tuple[int, int, bool]] = []
            targets: list[list[int]] = []
            for piece in pieces:
                if (budget < piece.length or self.work <= 0) and targets:
                    break
                target = self._place(piece, undo) or (self._anywhere(piece.length) if self.work > 0 else None)
                if target is None:
                    break
                budget -= piece.length
                targets.append(target)
            if len(targets) < len(pieces) and budget >= pieces[len(targets)].length and self.work > 0:
                # There is no room for all of it, so none of it need go.
                self._end()
                self._search = None
                return
            for piece, target in zip(pieces, targets, strict=False):
                plan.moves.append(
                    PlannedMove(piece.node, piece.at, piece.length, [piece.slot, piece.length], target)
                )
                plan.cost += piece.length
            if whole and len(targets) == len(pieces):
                plan.gain = blocks * self.index.size
            break
        plan.settled = False

    def _taken(self, first: int, last: int) -> list[int]:
        """Which of these blocks, in which nothing is cached, are not free."""
        runs, size = self.pool.runs, self.index.size
        low, high = first * size, last * size
        stuck: list[int] = []
        slot = at = low
        while slot < high and slot - at < TAKEN:
            n = runs.length_at.get(slot, 0)
            if n:
                stuck += range(at // size, (slot - 1) // size + 1) if slot > at else ()
                slot = at = slot + n
                self.work -= 1
                continue
            if slot > at and runs.start_at.get(slot, slot) <= low:
                at = slot  # free from before the first of them
            slot += 1
        if at < high:
            stuck += range(at // size, (min(slot, high) - 1) // size + 1)
            self.work -= (slot - at) >> 3
        return sorted(set(stuck))

    def _anywhere(self, n: int) -> list[int] | None:
        """The last `n` slots of a free run outside the window, even of one that is no use but as a run."""
        runs, size = self.pool.runs, self.index.size
        low, high = self._apart[0] * size, self._apart[1] * size
        occupied = runs.occupied >> runs.holes << runs.holes
        while occupied:
            c = (occupied & -occupied).bit_length() - 1
            occupied ^= 1 << c
            for start in islice(reversed(runs.classes[c]), 8):
                self.work -= 1
                stop = start + runs.length_at[start]
                if stop - start >= n and (start >= high or stop <= low) and start not in self._used:
                    self._used.add(start)
                    return [stop - n, n]
        return None

    def _keep_one(self, group: int, now: float) -> None:
        """There is no room for what is in `group`'s window: the fullest that was to be cleared is filled instead."""
        rings = self.windows
        level = (rings.occupied & ((2 << self._level) - 1)).bit_length() - 1
        kept = rings.before[rings.members + level]
        self._wait(kept, KEPT, now)
        if kept != group and kept not in self._whole:
            self._whole.add(kept)
            first = kept * self.group + self.offset[kept]
            self._opening.append((first, first + self.group))

    def _wait(self, group: int, ring: int, now: float) -> None:
        self.windows.put(group, ring)
        self._later.append((now + BACK_OFF, group, []))

    def _look(self, first: int, last: int, now: float) -> tuple[list[Piece], list[int], bool, bool]:
        """As `pieces`, and whether that is all there is in the blocks [first, last).

        Where there is too much to be looked at together all of it is first looked at part by part, one in each plan,
        and nothing is to go; then what is in front is, as long as that is believed.
        """
        start, reached, until = self._looked
        known = start == first and now <= until
        seen = known and reached >= last
        begin = reached if known and not seen else first
        pieces, stuck, busy, end = self.pieces(begin, last)
        if stuck or busy or self.index.starved:
            self._looked = (0, 0, 0.0)
        elif not seen and not begin == first < end == last:
            self._looked = (first, end, until if known else now + LOOKED)
            return [], [], False, False
        return pieces, stuck, busy, end == last

    def pieces(self, first: int, last: int) -> tuple[list[Piece], list[int], bool, int]:
        """What is to go from the blocks [first, last), those that something stands in which cannot, whether anything
        there is moving already, and the block up to which that was looked at."""
        index, pool = self.index, self.pool
        size = index.size
        length_at, start_at = pool.runs.length_at, pool.runs.start_at
        pieces: list[Piece] = []
        stuck: set[int] = set()
        busy = False
        spans, last = self.spans(first, last)
        low, high = first * size, last * size
        at = low
        for slot, end, entry in spans:
            if slot > at:
                begin = start_at.get(slot, -1)
                if begin != at and not (at == low and 0 <= begin <= low):
                    n = length_at.get(at, 0)
                    stop = begin if begin > at else slot
                    stuck.update(range((at + n) // size, (stop - 1) // size + 1))
            node = index.entry_node[entry]
            piece = piece_of(index, node, max(slot, low), min(end, high), slot, end)
            if piece is not None:
                pieces.append(piece)
            elif index.starved:
                busy = True
                break
            elif pool.tree.flags[node]:
                busy = True
            else:
                stuck.update(range(max(slot, low) // size, (min(end, high) - 1) // size + 1))
            at = end
        if low < at < high and not index.starved:
            n = length_at.get(at, 0)
            if at + n < high:
                stuck.update(range((at + n) // size, last))
        self.work -= 2 * len(pieces)
        return pieces, sorted(stuck), busy, last

    def spans(self, first: int, last: int) -> tuple[list[tuple[int, int, int]], int]:
        """(slot, end, entry) of the extents that touch the blocks [first, last), in order, and the block up to which
        those are: there may be too many to be looked at together.  Crowded blocks are left out."""
        index = self.index
        size, used, crowded = index.size, index.used, index.crowded
        found: list[tuple[int, int, int]] = []
        block = first
        while block < last and len(found) < EXTENTS:
            if used[block] and block not in crowded:
                spans = index.spans(block)
                if found and spans[0][2] == found[-1][2]:
                    del spans[0]
                found += spans
                if found[-1][1] > (block + 1) * size:
                    block = found[-1][1] // size  # it covers all in between
                    continue
            block += 1
        block = min(block, last)
        self.work -= 4 + ((block - first) >> 1) + len(found)
        return found, block

    # -- targets -----------------------------------------------------------------------------------------------

    def _place(self, piece: Piece, undo: list[tuple[int, int, bool]]) -> list[int] | None:
        """Slots for a piece, as flat extents; None: there are none, or, with no work left, none yet."""
        holes = self._holes
        n = piece.length
        self.work -= 3
        ahead = OPENED_AHEAD
        phase, page = piece.phase, self.index.page
        out_of_phase: list[tuple[int, int, bool]] = []
        found: list[int] = []
        while True:
            hole = holes.best(n)
            if hole is not None:
                if phase >= 0 and (hole[0] if hole[2] else hole[0] + hole[1] - n) % page != phase:
                    out_of_phase.append(hole)
                    self.work -= 1
                elif self._is_good(hole):
                    found = self._take(hole, n, undo)
                    break
                continue
            if self.work <= 0 or not ahead or not self._open():
                break
            ahead -= 1
        for each in out_of_phase:
            holes.add(*each)
        if found:
            return found
        if self.work <= 0 or phase >= 0:
            return None
        # In parts: as long ones as there are.
        out: list[int] = []
        spare, part, unit = max(piece.spare, min(SPARE, n // CUT_LEAST)), self._part, self.pool.unit
        taken: list[tuple[int, int, bool]] = []
        while n:
            hole = holes.best(n)
            many = n
            if hole is None and spare > 0 and n >= 2 * part:
                hole = holes.longest(n - part)
                many = hole[1] // unit * unit if hole is not None else 0
                if hole is not None and many < part:
                    holes.add(*hole)
                    hole = None
            if hole is None:
                if self.work > 0 and self._open():
                    continue
                self._give_back(taken)
                return None
            if self._is_good(hole):
                out += self._take(hole, many, taken)
                n -= many
                spare -= 1
        undo += taken
        return out

    def _is_good(self, hole: tuple[int, int, bool]) -> bool:
        """Whether a hole is still free and where nothing is to be cleared."""
        slot, n, front = hole
        runs = self.pool.runs
        if front:
            start = self._planned.get(slot, slot)
            if runs.length_at.get(start, 0) < slot + n - start:
                return False
        elif runs.start_at.get(self._planned.get(~(slot + n), slot + n), slot + 1) > slot:
            return False
        size = self.index.size
        return self._is_target(slot // size) and self._is_target((slot + n - 1) // size)

    def _take(self, hole: tuple[int, int, bool], n: int, undo: list[tuple[int, int, bool]]) -> list[int]:
        """Plans the first or last `n` slots of a hole that was taken out."""
        slot, length, front = hole
        planned = self._planned
        if front:
            undo.append((slot, n, True))
            planned[slot + n] = planned.get(slot, slot)
            if length > n:
                self._holes.add(slot + n, length - n, True)
            return [slot, n]
        stop = slot + length
        undo.append((stop - n, n, False))
        planned[~(stop - n)] = planned.get(~stop, stop)
        if length > n:
            self._holes.add(slot, length - n, False)
        return [stop - n, n]

    def _give_back(self, taken: list[tuple[int, int, bool]]) -> None:
        """Undoes what `_take` did, the latest first."""
        for slot, n, front in reversed(taken):
            self._planned.pop(slot + n if front else ~slot, None)
            self._holes.give_back(slot, n, front)
        taken.clear()

    def _is_target(self, block: int) -> bool:
        start, stop = self._apart
        if start <= block < stop:
            return False
        window = self.window_of(block)
        if window < 0:
            return True
        ring = self.windows.ring_of(window)
        return ring > self._level and ring not in (CLEAR, LEAVING)

    def _open(self) -> bool:
        """Adds the holes of the fullest group that has not been, or of the next part of one; False: there is none."""
        while self._opening:
            first, last = self._opening.pop()
            if first < last:
                reached = self._stretches(first, last)
                if reached < last:
                    self._opening.append((reached, last))
                return True
        occupied = self.fills.occupied
        if not occupied:
            return False
        group = self.fills.first(occupied.bit_length() - 1)
        self.fills.drop(group)
        self._opened.add(group)
        self.work -= 4
        first = group * self.group
        last = min(first + self.group, self.blocks)
        block = first
        while block < last:
            window = self.window_of(block)
            stop = last
            if window >= 0:
                stop = min(last, window * self.group + self.offset[window] + self.group)
            elif self.offset[group] != NONE:
                stop = first + self.offset[group]
            if window not in (-1, self._source) and self.windows.ring_of(window) == self._level:
                self._wait(window, KEPT, self.index.now)  # where sources and targets meet: this one is filled
            if window < 0 or (window not in self._whole and self._is_target(block)):
                self._opening.append((block, stop))
            block = stop
        return True

    def _stretches(self, first: int, last: int) -> int:
        """Adds what is free in the blocks [first, last), or in as many as may be looked at together; up to which."""
        size = self.index.size
        length_at, start_at = self.pool.runs.length_at, self.pool.runs.start_at
        unit = self.pool.unit
        spans, last = self.spans(first, last)
        low, high = first * size, last * size
        at = low
        add = self._holes.add
        for slot, end, _ in spans:
            if slot > at:
                begin = start_at.get(slot, -1)
                if begin >= 0 and begin <= at:
                    # From the front where that lies beside something that stays.
                    if slot - at >= unit:
                        add(at, slot - at, begin == at and at > low)
                else:
                    n = length_at.get(at, 0)
                    if n >= unit and at + n <= slot:
                        add(at, n, True)
                    if begin > at + n and slot - begin >= unit:
                        add(begin, slot - begin, False)
            at = end
        if low < at < high:
            n = min(length_at.get(at, 0), high - at)
            if n >= unit:
                add(at, n, True)
        return last


class Search:
    """The cheapest stretch of `blocks` blocks without an obstacle, looked for a stride at a time."""

    def __init__(self, windows: Windows, blocks: int) -> None:
        self.windows = windows
        self.blocks = blocks
        self.used = np.frombuffer(windows.index.used, dtype=np.int32)
        self.stuck = np.frombuffer(windows.stuck, dtype=np.uint8)
        strides = -(-windows.blocks // STRIDE)
        self.costs: list[int] = [-1] * strides  # of the cheapest stretch that begins in each; -1: not known
        self.starts = [0] * strides
        self.unknown = list(range(strides))

    def more(self) -> bool:
        """Looks at one more stride; False: all have been."""
        if not self.unknown:
            return False
        stride = self.unknown.pop()
        first = stride * STRIDE
        last = min(first + STRIDE + self.blocks - 1, self.windows.blocks)
        self.windows.work -= 16 + ((last - first) >> 8)
        if last - first < self.blocks:
            self.costs[stride] = IMPOSSIBLE
            return True
        cost = self.used[first:last] + self.stuck[first:last].astype(np.int64) * IMPOSSIBLE
        sums = np.concatenate((_ZERO, np.cumsum(cost)))
        sums = sums[self.blocks :] - sums[: -self.blocks]
        least = int(sums.argmin())
        self.costs[stride] = int(sums[least])
        self.starts[stride] = first + least
        return True

    def best(self) -> int | None:
        """The first block of the cheapest stretch, None when each has something in it that cannot go."""
        while True:
            cost = min(self.costs)
            self.windows.work -= 1 + (len(self.costs) >> 6)
            if cost >= IMPOSSIBLE:
                return None
            stride = self.costs.index(cost)
            start = self.starts[stride]
            if sum(self.windows.index.used[start : start + self.blocks]) == cost:
                return start
            self.unknown.append(stride)  # it has changed
            self.more()

    def changed(self, low: int, high: int) -> None:
        """There are obstacles among the blocks from `low` to `high`."""
        for stride in range(max(0, low - self.blocks + 1) // STRIDE, high // STRIDE + 1):
            if self.costs[stride] >= 0:
                self.costs[stride] = -1
                self.unknown.append(stride)


def _by_length(piece: Piece) -> int:
    return -piece.length
