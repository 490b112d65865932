"""Where moves buy something: blocks given back, runs, and nodes in one piece.

free_blocks.  Blocks are emptied, the emptiest first, into the holes of fuller ones.  Where the two meet is known
beforehand from how many blocks there are of each fill:

    blocks   |.|.|.|:|:|||||||        by fill; `level` is the one up to which what is used fits the free slots above it
             sources ^ targets

so nothing is moved into a block that is emptied next.  A block that costs more than it holds, since an extent goes from
it as a whole, has its turn among those that hold as much.  Every move goes to a block that is at least as full, so the
sum of the squares of all fills only rises and there is no way back.  A block is emptied altogether or not at all: all
of it must be cached and movable or free.  Of an extent that reaches over the block's edge only the part inside goes, as
long as the node stays in few extents (`extents_most`).  Pieces take the hole that fits exactly, else best; one that is
long enough may be cut once and fill a hole up.

    cost of a block   tokens moved + EXTENT_COST for each extent more;  gain  its slots
    cost <= gain * COST_MOST

run.  See `windows`.  Where somebody waits for one run that there is none of, the cheapest stretch as long; else as many
runs as there can be.

join.  A node that was used lately and lies in far more extents than moves make goes to one free run, unless that is so
long that it is worth more as it is.  Not twice in JOIN_BACK_OFF.  It takes up no more wholly free blocks than it gives
back, and every extent less is to be had for at most EXTENT_WORTH tokens moved.  Where eviction goes on, what
is older than the younger half will be gone before it has paid, and so will most of what is read once: a node goes when
it has been read again since it was first seen in pieces.

What was looked at in vain waits until it changes or BACK_OFF has passed, so a settled pool is asked nothing.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvslot.allocator.errors import OutOfTurn
from kvslot.defrag.index import GROUP, IN_PIECES, Index, hole_class
from kvslot.defrag.view import RUN_BLOCKS, Plan, PlannedMove, Purpose
from kvslot.defrag.windows import LONGEST, Piece, Windows, extents_most, piece_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvslot.allocator.pool import Pool

WORK = 240  # for a plan: about 2 us each
STEPS_SHIFT = (
    3  # eight extents of a block that is looked at for holes are as much work as one block of a few extents
)
WIDE = 16  # extents that a block is looked at for at a time, from which on its holes are at hand during the plan ...
WIDE_MOST = 4  # ... of so many blocks
EXTENT_COST = 1  # tokens that one extent more is held to be worth
# Of the slots given back: what may be paid for them.  In a pool that eviction keeps full a block costs nearly that, and
# nothing less closes the holes that are left behind there day by day.
COST_MOST = 0.9
PART = 128  # of a block: the shortest part that a piece is cut into, 2 tokens at the least
EACH = 8  # ... and of those whose longest holes are about equal
LOOKS = 96  # blocks looked at for one hole
BACK_OFF = 10.0  # seconds for which a block that could not be emptied is left alone
PASS_GAIN = 100  # 1/100 of what is free outside whole blocks: a pass that gained more is followed by another
# Times as many extents as a node may come to stand in by other moves: from there on it is gathered.
SCATTERED = 2
EXTENT_WORTH = 16  # tokens that may be moved for each extent that a hot node will have fewer
EXTENTS_MOST = 512  # half as many extents: a node in more is not asked which blocks it gives back
HOT = 1024  # ticks since its last use for which a node is hot, or as many as there are nodes
JOIN_BACK_OFF = 300.0  # seconds in which a node is not gathered a second time
JOINED_MOST = 4096  # nodes remembered for that, or as seen in pieces
SHORT_SHIFT = 4  # with less than 1/16 of the pool free, eviction goes on, and ...
VICTIMS = 32  # ... so many of the next victims are not moved
LATER = -2
STUCK = 1 << 14  # plans without a move after which `rest` gives up


class Plans(Protocol):
    """What answers with plans."""

    pool: Pool

    def feed(self, budget: int = 128, now: float = 0.0) -> bool:
        """Takes note of what has changed, `budget` changes at the most; True: there are more."""
        ...

    def plan(
        self,
        budget: int,
        purpose: Purpose = Purpose.FREE_BLOCKS,
        now: float = 0.0,
        *,
        blocks: int = RUN_BLOCKS,
    ) -> Plan:
        """Moves of at most `budget` tokens together."""
        ...

    def close(self) -> None:
        """Ends the listening to the pool."""
        ...


class Planner:
    """Plans for one pool, which it listens to until it is closed.  One planner a pool at a time."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.index = Index(pool)
        self._windows: Windows | None = None
        self._scattered = 0  # nodes that are still to be looked at
        self._joined: dict[int, float] = {}  # nodes that are left alone, and until when
        self._seen: dict[
            int, tuple[int, int]
        ] = {}  # nodes in pieces: their first slot, and their tick when seen first
        self._blocks_free = pool.runs.blocks_free  # when this pass began
        self._doomed: set[int] = set()
        self._last = 0  # the ring up to which blocks are emptied by this plan
        self._work = 0  # left to this plan
        self._part = max(2, pool.block_size // PART)
        # Holes of blocks in many extents, and of those beside them, that were looked at in this plan.
        self._wide: dict[int, list[tuple[int, int]]] = {}

    def feed(self, budget: int = 128, now: float = 0.0) -> bool:
        """Takes note of what has changed, `budget` changes at the most; True: there are more."""
        return self.index.feed(budget, now)

    def close(self) -> None:
        """Ends the listening to the pool."""
        self.index.close()

    def plan(
        self,
        budget: int,
        purpose: Purpose = Purpose.FREE_BLOCKS,
        now: float = 0.0,
        *,
        blocks: int = RUN_BLOCKS,
    ) -> Plan:
        """Moves of at most `budget` tokens together, at `now` (seconds, any origin, not going back).

        What cannot be had for that little, one block or one piece, is planned all the same where it is the first.
        `blocks`: the length of the run wanted, for the purpose `run` only.  A plan without moves that is not `settled`
        has used up its time by looking: ask again.  Changes nothing of the pool.
        """
        self.index.begin_plan(now)
        if purpose is Purpose.FREE_BLOCKS:
            return self._free_blocks(budget, now)
        plan = Plan(purpose, [])
        if purpose is Purpose.RUN:
            # Somebody waits for a run that there is none of, or free memory is to be had in many of that length.
            many = blocks == RUN_BLOCKS or self.pool.runs.longest() >= blocks * self.pool.block_size
            if many and not 1 < blocks <= LONGEST:
                return plan
            windows = self._windows
            if windows is None or (many and windows.group != blocks):
                windows = self._windows = Windows(self.index, blocks if many else RUN_BLOCKS)
            if many:
                windows.plan(plan, budget, now, WORK)
            else:
                windows.plan_one(plan, budget, now, WORK, blocks)
        else:
            self._join(plan, budget, now)
        return plan

    # -- free_blocks -------------------------------------------------------------------------------------------

    def _level(self) -> int:
        """The fill up to which blocks are emptied: what they hold fits into what is free in fuller ones."""
        index = self.index
        levels, size, count = index.levels, index.size, index.fills.count
        room = index.parked_free
        for level in range(levels):
            room += count[level] * (size - level * size // levels)
        used = 0
        for level in range(levels):
            each = level * size // levels
            room -= count[level] * (size - each)
            used += count[level] * each
            if used >= room:
                return level
        return levels - 1

    def _free_blocks(self, budget: int, now: float) -> Plan:
        plan = Plan(Purpose.FREE_BLOCKS, [])
        index = self.index
        if self.pool.unit > 1:
            return plan
        self._wide.clear()
        fills = index.fills
        self._last = most = min(self._level(), int(COST_MOST * index.levels))
        self._work = WORK
        # What is evicted next anyway is not worth a copy.
        short = self.pool.runs.total << SHORT_SHIFT < self.pool.usable
        self._doomed = set(self.pool.tree.evictor.victims(VICTIMS)) if short else set()
        while sources := fills.occupied & ((2 << most) - 1):
            block = fills.first((sources & -sources).bit_length() - 1)
            before = self._work
            gain = self._empty(block, budget - plan.cost, plan, now)
            if gain == LATER:
                if self._work > 0:
                    continue
                plan.settled = False
                break
            if gain < 0 or index.starved or (not gain and self._work <= 0 and before < WORK):
                plan.settled = False  # too much for this plan
                break
            index.park(block, now + BACK_OFF)
            plan.gain += gain
            if plan.cost >= budget or self._work <= 0:
                plan.settled = False
                break
        if not sources and plan.settled and not plan.moves:
            # The end of a pass.  One more, if this one was worth its while.
            blocks = self.pool.runs.blocks_free
            waste = self.pool.runs.total - blocks * index.size
            gained = (blocks - self._blocks_free) * index.size
            self._blocks_free = blocks
            if gained * PASS_GAIN > waste and index.unpark_all():
                plan.settled = False
        for move in plan.moves:
            for i in range(0, len(move.target), 2):
                for block in {
                    move.target[i] // index.size,
                    (move.target[i] + move.target[i + 1] - 1) // index.size,
                }:
                    if block in index.remaining:
                        index.park(block, now + BACK_OFF)
        return plan

    def _empty(self, block: int, budget: int, plan: Plan, now: float) -> int:
        """Plans to empty a block; returns the slots gained, 0 where that cannot be, -1 where it costs too much now.

        LATER where it costs more than was to be seen from its fill: it has been filed among those that hold as much.
        """
        index = self.index
        size = index.size
        low = block * size
        high = low + size
        pieces: list[Piece] = []
        cost = 0
        steps = index.steps
        spans = index.spans(block)
        self._work -= 4 + ((index.steps - steps) >> STEPS_SHIFT)
        if self._work < len(spans):
            self._work = min(self._work, 0)
            return 0
        for slot, end, entry in spans:
            node = index.entry_node[entry]
            if node in self._doomed:
                return 0
            piece = piece_of(index, node, max(slot, low), min(end, high), slot, end)
            if piece is None:
                return 0
            pieces.append(piece)
            self._work -= 1
            cost += piece.length + EXTENT_COST * piece.cuts
        if cost > COST_MOST * size:
            return 0
        dear = min(cost * index.levels // size, self._last)
        if dear > index.fills.ring_of(block):
            index.fills.put(block, dear)
            return LATER
        used = index.used[block]
        if index.gaps(block)[1] + used != size:
            return 0
        tokens = sum(piece.length for piece in pieces)
        if tokens > budget and plan.moves:
            return -1
        if len(pieces) > 1:
            pieces.sort(key=_by_length)
        # An extent that goes as a whole leaves other blocks too: what is free there will not be what it is now.
        others = {b for p in pieces for b in (p.slot // size, (p.slot + p.length - 1) // size)} - {block}
        # Nor may anything be on its way into one of them.
        if block in index.remaining or not others.isdisjoint(index.remaining):
            return 0
        undo: dict[int, list[tuple[int, int]] | None] = {}
        moves: list[PlannedMove] = []
        others.add(block)
        index.emptied |= others
        for piece in pieces:
            target = self._place(piece, used, undo)
            if not target:
                self._undo(undo)
                index.emptied -= others
                return 0
            source = [piece.slot, piece.length]
            moves.append(PlannedMove(piece.node, piece.at, piece.length, source, target))
        for each in others:
            index.holes.drop(each)
            if each != block and 0 < index.used[each] < size:
                index.park(each, now + BACK_OFF)
        plan.moves += moves
        plan.cost += tokens
        return size

    def _place(self, piece: Piece, used: int, undo: dict[int, list[tuple[int, int]] | None]) -> list[int]:
        """Slots for a piece in blocks at least `used` full, as flat extents; [] when there are none."""
        n = piece.length
        hole = self._find(n, used, piece.phase)
        if hole is not None:
            return [self._take(*hole, n, undo), n]
        part = self._part
        if n < 2 * part or piece.spare <= 0:
            return []
        hole = self._longest(n - part, used)
        if hole is None or hole[1] < part:
            return []
        most = min(hole[1], n - part)
        first = self._take(*hole, most, undo)
        hole = self._find(n - most, used, -1)
        if hole is None:
            return []
        return [first, most, self._take(*hole, n - most, undo), n - most]

    def _at_hand(self, n: int, used: int, phase: int) -> tuple[int, int] | None:
        """A hole that fits `n` tokens exactly, among those of the blocks in many extents that have been looked at."""
        remaining, page = self.index.remaining, self.index.page
        for block, found in self._wide.items():
            if not self._is_target(block, used):
                continue
            holes = remaining.get(block, found)
            self._work -= len(holes) >> 5
            for hole in holes:
                if hole[1] == n and (phase < 0 or hole[0] % page == phase):
                    return hole
        return None

    def _longest(self, most: int, used: int) -> tuple[int, int] | None:
        """About the longest hole of at most `most` slots, or the part of one, among a few."""
        index = self.index
        holes = index.holes
        after, members = holes.after, holes.members
        looks = min(LOOKS, self._work)
        occupied = holes.occupied & ((2 << hole_class(most)) - 1)
        while occupied and looks > 0:
            c = occupied.bit_length() - 1
            occupied ^= 1 << c
            block = after[members + c]
            best: tuple[int, int] | None = None
            for _ in range(min(holes.count[c], EACH)):
                following = after[block]
                looks -= 1
                hit = False
                for hole in self._within(block, used):
                    if hole[1] <= most and (best is None or hole[1] > best[1]):
                        best, hit = hole, True
                if not hit:
                    holes.put(block, c)
                elif best is not None and hole_class(best[1]) >= c:
                    return best
                if self._work <= 0:
                    return best
                block = following
            if best is not None:
                return best
        return None

    def _find(self, n: int, used: int, phase: int) -> tuple[int, int] | None:
        """The hole (slot, length) that fits `n` tokens best, among a few; in pages they begin at `phase` (-1: any)."""
        index = self.index
        size, page = index.size, index.page
        holes = index.holes
        after, members = holes.after, holes.members
        self._work -= 2
        if self._wide:
            at_hand = self._at_hand(n, used, phase)
            if at_hand is not None:
                return at_hand
        looks = min(LOOKS, self._work)
        c = hole_class(n)
        occupied = holes.occupied >> c
        while occupied and looks > 0:
            skip = (occupied & -occupied).bit_length() - 1
            c += skip
            occupied >>= skip + 1
            block = after[members + c]
            best: tuple[int, int] | None = None
            best_left = 1 << 30
            for _ in range(min(holes.count[c], EACH)):
                following = after[block]
                looks -= 1
                hit = False
                for hole in self._within(block, used):
                    left = hole[1] - n
                    if 0 <= left < best_left:
                        if phase >= 0 and (hole[0] if hole[0] % size else hole[0] + left) % page != phase:
                            continue
                        best, best_left = hole, left
                        hit = True
                if not best_left:
                    return best
                if not hit:
                    holes.put(block, c)  # at the end: the next search looks at others first
                if self._work <= 0:
                    return best
                block = following
            if best is not None:
                return best
            c += 1
        return None

    def _within(self, block: int, used: int) -> list[tuple[int, int]]:
        """The holes of a target block, with what of them lies in the next block on either side if that is one too."""
        self._work -= 1
        if not self._is_target(block, used):
            return []
        index = self.index
        size, steps = index.size, index.steps
        low = block * size
        high = low + size
        own = self._wide.get(block) if block not in index.remaining else None
        found = own = index.left(block) if own is None else own
        if not found:
            self._work -= (index.steps - steps) >> STEPS_SHIFT
            return found
        slot, n = found[-1]
        if slot + n == high and self._is_target(block + 1, used):
            beside = index.left(block + 1)
            if beside and beside[0][0] == high:
                found = [*found[:-1], (slot, n + beside[0][1])]
        slot, n = found[0]
        if slot == low and self._is_target(block - 1, used):
            beside = index.left(block - 1)
            if beside and sum(beside[-1]) == low:
                found = [(beside[-1][0], n + beside[-1][1]), *found[1:]]
        if index.steps - steps > WIDE and block not in index.remaining:
            if len(self._wide) == WIDE_MOST:
                del self._wide[next(iter(self._wide))]
            self._wide[block] = own
        self._work -= (index.steps - steps) >> STEPS_SHIFT
        return found

    def _is_target(self, block: int, used: int) -> bool:
        index = self.index
        count = index.used[block] if block < len(index.used) else 0
        return used <= count < index.size and block not in index.emptied

    def _take(self, slot: int, length: int, n: int, undo: dict[int, list[tuple[int, int]] | None]) -> int:
        """Plans `n` slots of a hole, or of the part [slot, slot + length) of one; returns the first of them.

        They lie beside what the target block holds, not beside an edge behind which a block is being emptied: what
        comes free there would make the hole longer than the move was told.
        """
        index = self.index
        size = index.size
        start = slot if slot % size else slot + length - n
        stop = start + n
        for block in range(start // size, (stop - 1) // size + 1):
            if block not in undo:
                undo[block] = index.remaining.get(block)
            rest: list[tuple[int, int]] = []
            for each, many in index.left(block):
                end = each + many
                if each < stop and start < end:
                    if start > each:
                        rest.append((each, start - each))
                    if stop < end:
                        rest.append((stop, end - stop))
                else:
                    rest.append((each, many))
            index.remaining[block] = rest
            self._file(block, rest)
        return start

    def _file(self, block: int, holes: list[tuple[int, int]]) -> None:
        if holes:
            self.index.holes.put(block, hole_class(max(n for _, n in holes)))
        else:
            self.index.holes.drop(block)

    def _undo(self, undo: dict[int, list[tuple[int, int]] | None]) -> None:
        index = self.index
        for block, holes in undo.items():
            if holes is None:
                del index.remaining[block]
                holes = index.left(block)
            else:
                index.remaining[block] = holes
            self._file(block, holes)

    # -- join --------------------------------------------------------------------------------------------------

    def _join(self, plan: Plan, budget: int, now: float) -> None:
        """Nodes in many extents that have been read lately go to one run each, no longer than need be."""
        pool = self.pool
        tree = pool.tree
        scattered = self.index.scattered
        if not self._scattered:
            self._joined = {node: until for node, until in self._joined.items() if until > now}
            self._scattered = len(scattered)
            if len(self._seen) > JOINED_MOST:
                self._seen.clear()
        hot = pool.tick - max(HOT, tree.nodes)
        short = pool.runs.total << SHORT_SHIFT < pool.usable
        if short:
            for oldest in tree.evictor.victims(1):
                hot = max(hot, (pool.tick + tree.tick[oldest]) >> 1)
        longest = GROUP * pool.block_size  # a longer run is worth more as it is
        used: set[int] = set()  # runs
        taken: set[int] = set()  # blocks that something is to go to
        work = WORK
        while self._scattered:
            work -= 3
            if work <= 0 or plan.cost >= budget:
                plan.settled = False
                return
            self._scattered -= 1
            node = scattered[0]
            extents = tree.scattered.get(node)
            if extents is None or len(extents) < 2 * IN_PIECES:
                self.index.no_more_scattered()
                continue
            scattered.rotate(-1)
            if tree.flags[node]:
                continue
            length = tree.length[node]
            if (
                len(extents) >> 1 <= SCATTERED * extents_most(length, pool.block_size)
                or length > longest
                or length > EXTENT_WORTH * ((len(extents) >> 1) - 1)
                or node in self._joined
            ):
                continue
            tick = tree.tick[node]
            if short:
                seen = self._seen.setdefault(node, (extents[0], tick))
                if seen[0] != extents[0]:
                    seen = self._seen[node] = (extents[0], tick)  # another node by now
                if seen[1] == tick:
                    continue
            if tick < hot:
                continue
            if plan.moves and plan.cost + length > budget:
                self._scattered += 1
                scattered.rotate(1)
                plan.settled = False
                return
            if len(self._joined) < JOINED_MOST:
                self._joined[node] = now + JOIN_BACK_OFF
            if not self.index.movable(node):
                continue
            work -= 8 + (len(extents) >> 2)
            emptied = self._emptied_by(extents, taken) if len(extents) < EXTENTS_MOST else 0
            target = self._run_for(length, longest, used, emptied)
            if target < 0:
                continue
            taken.update(range(target // pool.block_size, (target + length - 1) // pool.block_size + 1))
            plan.moves.append(PlannedMove(node, 0, length, list(extents), [target, length]))
            plan.cost += length
            plan.gain += (len(extents) >> 1) - 1
        if plan.moves:
            plan.settled = False

    def _emptied_by(self, extents: list[int], taken: set[int]) -> int:
        """Blocks but those `taken` that become wholly free when what stands in `extents` has gone."""
        index, size = self.index, self.index.size
        own: dict[int, int] = {}
        for i in range(0, len(extents), 2):
            slot, end = extents[i], extents[i] + extents[i + 1]
            for block in range(slot // size, (end - 1) // size + 1):
                own[block] = own.get(block, 0) + min(end, (block + 1) * size) - max(slot, block * size)
        emptied = 0
        for block, n in own.items():
            if (
                block not in taken
                and n == index.used[block]
                and (n == size or index.gaps(block)[1] + n == size)
            ):
                emptied += 1
        return emptied

    def _run_for(self, n: int, longest: int, used: set[int], most: int) -> int:
        """Where `n` slots stand at an end of the shortest free run, among a few, that has room for them without
        taking up more than `most` wholly free blocks, and is not worth more as it is; -1 if there is none."""
        runs, unit, size = self.pool.runs, self.pool.unit, self.index.size
        cells = n // runs.cell
        c = runs.class_of(0, cells * runs.cell) if cells > 1 else min(n, runs.holes)
        occupied = runs.occupied >> c << c
        looks = LOOKS
        while occupied and looks > 0:
            c = (occupied & -occupied).bit_length() - 1
            occupied ^= 1 << c
            best = at = -1
            for start in islice(reversed(runs.classes[c]), EACH):
                length = runs.length_at[start]
                looks -= 1
                if length < n or start in used or (0 <= best and runs.length_at[best] <= length):
                    continue
                stop = start + length
                allowed = most if length <= longest else 0  # a longer run is worth more as it is
                for slot in (start, stop - n):
                    # Whole blocks of the run that the slots touch.
                    first = max(-(-start // size), slot // size)
                    last = min(stop // size, -(-(slot + n) // size))
                    if last - first <= allowed and not slot % unit:
                        best, at = start, slot
                        break
            if best >= 0:
                used.add(best)
                return at
        return -1


def _by_length(piece: Piece) -> int:
    return -piece.length


class Rest(msgspec.Struct, gc=False):
    """What was done until nothing was left to do."""

    plans: int = 0
    moves: int = 0
    refused: int = 0  # moves that could not begin or were not published
    moved_tokens: int = 0
    gain: int = 0  # as planned


def rest(
    pool: Pool,
    purposes: Sequence[Purpose] = (Purpose.FREE_BLOCKS,),
    *,
    planner: Plans | None = None,
    budget: int = 1 << 16,
    plans: int = 1 << 20,
    now: float = 0.0,
    blocks: int = RUN_BLOCKS,
) -> Rest:
    """Plans and moves at once, as if copies took no time, until every purpose's plan is empty (or after `plans`).

    With no `planner` given one is made and closed.  Nothing is copied: for replays, measurements and tests.
    """
    mine = planner if planner is not None else Planner(pool)
    done = Rest()
    while pool.tidy():
        pass
    for purpose in purposes:
        stuck = 0
        while done.plans < plans:
            while mine.feed(1 << 16, now):
                pass
            plan = mine.plan(budget, purpose, now, blocks=blocks)
            done.plans += 1
            done.gain += plan.gain
            moved = False
            for move in plan.moves:
                try:
                    begun = pool.begin_move(move.node, move.at, move.length, move.target)
                except OutOfTurn:
                    done.refused += 1
                    continue
                if pool.finish_move(begun.handle):
                    moved = True
                    done.moves += 1
                    done.moved_tokens += move.length
                else:
                    done.refused += 1
            stuck = 0 if moved else stuck + 1
            if stuck and (plan.settled or stuck > STUCK):
                break
    if planner is None:
        mine.close()
    return done
