"""The plain planner: whole nodes of the emptiest block go to the best-fitting free runs, again and again.

What is commonly done, and the measure for the planner that does better: it moves a node of many blocks for the sake of
one, and some nodes twice, since a target may be the next to be emptied.  Looks at the whole pool in every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvslot.defrag.view import RUN_BLOCKS, Plan, PlannedMove, Purpose

if TYPE_CHECKING:
    from kvslot.allocator.pool import Pool


class Greedy:
    """Has the face of a `Planner`; plans for `free_blocks` only."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def feed(self, budget: int = 0) -> bool:
        """Nothing to be fed: False."""
        return False

    def close(self) -> None:
        """Nothing to be undone."""

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
        pool = self.pool
        if purpose is not Purpose.FREE_BLOCKS or pool.unit > 1:
            return plan
        tree, size = pool.tree, pool.block_size
        used = np.zeros(pool.config.blocks, dtype=np.int64)
        inside: dict[int, list[int]] = {}
        for node in tree.live():
            if not tree.length[node]:
                continue
            extents = tree.extents(node)
            for i in range(0, len(extents), 2):
                slot, end = extents[i], extents[i] + extents[i + 1]
                first, last = slot // size, (end - 1) // size
                used[first + 1 : last] = size
                used[first] += min(end, (first + 1) * size) - slot
                if last > first:
                    used[last] += end - last * size
                for block in (first, last) if last > first else (first,):
                    inside.setdefault(block, []).append(node)
        free = _Holes(pool.runs.length_at)
        moved: set[int] = set()
        order = sorted((int(used[block]), block) for block in inside if used[block] < size)
        for fill, block in order:
            nodes = set(inside[block])
            if nodes & moved or not self._movable(block, fill, nodes):
                continue
            begun = len(plan.moves)
            cost = plan.cost
            for node in sorted(nodes, key=lambda node: -tree.length[node]):
                length = tree.length[node]
                target = free.take(length, block * size, (block + 1) * size, size)
                if target < 0 or cost + length > budget:
                    break
                cost += length
                plan.moves.append(PlannedMove(node, 0, length, tree.extents(node), [target, length]))
            else:
                moved |= nodes
                plan.cost = cost
                plan.gain += size
                continue
            for move in plan.moves[begun:]:
                free.give(move.target[0], move.length)
            del plan.moves[begun:]
            if cost + length > budget:
                plan.settled = False
                break
        if plan.moves:
            plan.settled = False
        return plan

    def _movable(self, block: int, fill: int, nodes: set[int]) -> bool:
        """Whether all that stands in a block is cached and may be moved, and all else of it is free."""
        pool = self.pool
        size, runs = pool.block_size, pool.runs
        low, high = block * size, (block + 1) * size
        if low < pool.padding:
            return False
        for node in nodes:
            if pool.tree.holds[node] and pool.moves.readers(node) is None:
                return False
            if pool.tree.flags[node]:
                return False
        slot = low
        free = 0
        while slot < high:
            n = runs.length_at.get(slot, 0)
            free += min(n, high - slot)
            slot += n or 1
        if runs.length_at.get(low, 0) == 0:
            for end in range(low + 1, high + 1):
                start = runs.start_at.get(end, low)
                if start < low:
                    free += end - low
                    break
                if start > low or end in runs.length_at:
                    break
        return free + fill == size


class _Holes:
    """The free runs by length: best fit, without the wholly free blocks of none."""

    def __init__(self, length_at: dict[int, int]) -> None:
        self.by_length: dict[int, list[int]] = {}
        for start, length in length_at.items():
            self.by_length.setdefault(length, []).append(start)
        self.lengths = sorted(self.by_length)

    def take(self, n: int, low: int, high: int, size: int) -> int:
        """The front of the shortest run of `n` slots that uses up no wholly free block and is not in [low, high)."""
        from bisect import bisect_left

        for length in self.lengths[bisect_left(self.lengths, n) :]:
            starts = self.by_length[length]
            for i in range(len(starts) - 1, max(len(starts) - 9, -1), -1):
                start = starts[i]
                if start < high and start + length > low:
                    continue
                whole = start + -start % size
                if whole + size <= start + length and start + n > whole:
                    continue
                del starts[i]
                if length > n:
                    self.give(start + n, length - n)
                return start
        return -1

    def give(self, start: int, length: int) -> None:
        """Slots are free again; they do not coalesce before the next call."""
        from bisect import insort

        if length not in self.by_length:
            self.by_length[length] = []
            insort(self.lengths, length)
        self.by_length[length].append(start)
