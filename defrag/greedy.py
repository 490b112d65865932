"""The plain planners: what stands in the emptiest block goes to the best-fitting free runs, again and again.

    greedy         nodes go whole, as is commonly done: one of many blocks is moved for the sake of one of them
    greedy parts   of each node only what stands in the block goes; it goes on until nothing fits any more

The measures for the planner that does better.  Both move some tokens twice, since the block that they go to may be the
next to be emptied, and neither minds in how many pieces a node comes to lie.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from kvslot.defrag.index import Index
from kvslot.defrag.view import RUN_BLOCKS, Plan, PlannedMove, Purpose

if TYPE_CHECKING:
    from kvslot.allocator.pool import Pool

EACH = 64  # runs looked at for one that takes up no wholly free block
BACK_OFF = 10.0  # seconds for which a block that could not be emptied is left alone

Content = tuple[int, int, int, list[int]]
"""A node, the first of its tokens that go, how many, and where they stand."""


class Greedy:
    """Has the face of a `Planner`; plans for `free_blocks` only."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.index = Index(pool)
        self._taken: set[int] = set()  # runs that something is planned to go to in this plan

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
        """Moves of at most `budget` tokens together."""
        plan = Plan(purpose, [])
        if purpose is not Purpose.FREE_BLOCKS or self.pool.unit > 1:
            return plan
        fills, parked = self.index.fills, self.index.levels
        self._taken.clear()
        self.index.begin_plan(now)
        moving: set[int] = set()
        while sources := fills.occupied & ((1 << parked) - 1):
            block = fills.first((sources & -sources).bit_length() - 1)
            self.index.park(block, now + BACK_OFF)
            moves = self._empty(block, moving)
            if moves:
                plan.moves += moves
                plan.cost += sum(move.length for move in moves)
                plan.gain += self.index.size
                plan.settled = False
                moving |= {move.node for move in moves}
                if plan.cost >= budget:
                    break
        return plan

    def _empty(self, block: int, moving: set[int]) -> list[PlannedMove]:
        index = self.index
        size = index.size
        nodes = {index.entry_node[entry] for entry in index.entries(block)}
        if nodes & moving or index.used[block] + index.gaps(block)[1] != size:
            return []
        for node in nodes:
            if not index.movable(node):
                return []
        moves: list[PlannedMove] = []
        taken: list[int] = []
        for node, at, length, source in sorted(self._contents(block, nodes), key=_by_length):
            run = self._fit(length, block * size, (block + 1) * size)
            if run < 0:
                self._taken.difference_update(taken)
                return []
            self._taken.add(run)
            taken.append(run)
            moves.append(PlannedMove(node, at, length, source, [run, length]))
        return moves

    def _contents(self, block: int, nodes: set[int]) -> list[Content]:
        """What is to go so that `block` is empty."""
        tree = self.pool.tree
        return [(node, 0, tree.length[node], tree.extents(node)) for node in nodes]

    def _fit(self, n: int, low: int, high: int) -> int:
        """The shortest run of `n` slots, among a few, whose front takes up no wholly free block, out of [low, high)."""
        runs, size = self.pool.runs, self.index.size
        cells = n // runs.cell - 1
        c = n if n < runs.holes else 0
        if not c:
            c = runs.class_of(0, max(cells, 1) * runs.cell)
        occupied = runs.occupied >> c
        looks = EACH
        while occupied and looks > 0:
            skip = (occupied & -occupied).bit_length() - 1
            c += skip
            occupied >>= skip + 1
            best = -1
            for start in islice(reversed(runs.classes[c]), EACH):
                looks -= 1
                length = runs.length_at[start]
                if length < n or start in self._taken or (start < high and start + length > low):
                    continue
                whole = start + -start % size
                if whole + size <= start + length and start + n > whole:
                    continue
                if best < 0 or length < runs.length_at[best]:
                    best = start
            if best >= 0:
                return best
            c += 1
        return -1


class GreedyParts(Greedy):
    """The same, but that of a node only what stands in the block goes."""

    def _contents(self, block: int, nodes: set[int]) -> list[Content]:
        low, high = block * self.index.size, (block + 1) * self.index.size
        found: list[Content] = []
        for node in nodes:
            extents = self.pool.tree.extents(node)
            at = 0
            for i in range(0, len(extents), 2):
                slot, stop = max(low, extents[i]), min(high, extents[i] + extents[i + 1])
                if slot < stop:
                    found.append((node, at + slot - extents[i], stop - slot, [slot, stop - slot]))
                at += extents[i + 1]
        return found


def _by_length(content: Content) -> int:
    return -content[2]
