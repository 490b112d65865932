"""Pools in a stated condition: pieces stand where the free runs put them, without sessions; and what is to be seen."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from kvslot.allocator import OutOfTurn, Pool, PoolConfig, Space, audit
from kvslot.allocator.slots import CACHED, FREE
from kvslot.defrag import Plan


class Maker:
    """A pool, and the nodes that were put into it."""

    def __init__(self, blocks: int, block_size: int = 16, **options: Any) -> None:
        self.pool = Pool(PoolConfig(blocks=blocks, block_size=block_size, **options))
        self.root = self.pool.open_space(Space("a"))
        self.nodes: list[int] = []
        self._serial = 0

    def add(self, length: int, extents: list[int] | None = None) -> int:
        """A cached node of `length` tokens that nobody holds, in the best-fitting free slots or in `extents`."""
        pool, tree = self.pool, self.pool.tree
        if extents is None:
            extents = pool.runs.take_pages(length, pool.unit) if pool.unit > 1 else pool.runs.take(length)
        pool.ledger.shift_all(extents, length, FREE, CACHED)
        self._serial += 1
        key = self._serial.to_bytes(4, "little") + bytes(4 * (length - 1))
        node = tree.add(self.root, key, extents, self._serial)
        tree.unhold(node, self._serial)
        self.nodes.append(node)
        return node

    def at(self, *extents: int) -> int:
        """A cached node in these slots: slot, length, slot, length, ..., each a whole, or an end of a, free run."""
        runs = self.pool.runs
        for i in range(0, len(extents), 2):
            slot, n = extents[i], extents[i + 1]
            run = max(start for start in runs.length_at if start <= slot)
            runs.take_within(run, slot, n)
        return self.add(sum(extents[1::2]), list(extents))

    def remove(self, node: int) -> None:
        """Evicts one."""
        extents = self.pool.tree.remove(node)
        self.pool._release(extents, sum(extents[1::2]), CACHED)
        self.nodes.remove(node)

    def fill(self, lengths: Callable[[random.Random], int], rng: random.Random, occupancy: float) -> Maker:
        """Fills the pool up, then evicts at random until only `occupancy` of it is in use."""
        pool = self.pool
        while (length := lengths(rng)) + 2 * pool.block_size < pool.runs.total:
            self.add(length)
        rng.shuffle(self.nodes)
        while pool.usable - pool.runs.total > occupancy * pool.usable:
            self.remove(self.nodes[-1])
        return self


def packing(pool: Pool) -> float:
    """Slots in use / slots of the blocks that are not wholly free."""
    blocks = pool.config.blocks - -(-pool.padding // pool.block_size) - pool.runs.blocks_free
    return (pool.usable - pool.runs.total) / max(1, blocks * pool.block_size)


def in_runs(pool: Pool, blocks: int = 32) -> float:
    """The share of the free slots that lies in runs of `blocks` whole blocks."""
    size = pool.block_size
    found = sum(
        max(0, (start + n) // size + -start // size) // blocks for start, n in pool.runs.length_at.items()
    )
    return found * blocks * size / max(1, pool.runs.total)


def bound(pool: Pool, blocks: int = 32) -> float:
    """What `in_runs` can be at best with the nodes that are held where they are."""
    size, tree = pool.block_size, pool.tree
    held = [(0, pool.padding), (pool.slots, pool.slots)]
    for node in tree.live():
        if tree.length[node] and tree.holds[node]:
            extents = tree.extents(node)
            held += [(extents[i], extents[i] + extents[i + 1]) for i in range(0, len(extents), 2)]
    at = windows = 0
    for start, end in sorted(held):
        windows += max(0, start // size + -at // size) // blocks
        at = max(at, end)
    span = blocks * size
    return min(windows, pool.runs.total // span) * span / max(1, pool.runs.total)


def state(pool: Pool) -> tuple[Any, ...]:
    """All that a plan must leave as it is."""
    tree, runs = pool.tree, pool.runs
    nodes = {node: tree.extents(node) for node in tree.live() if tree.length[node]}
    return (
        dict(runs.length_at),
        dict(runs.start_at),
        runs.total,
        list(pool.ledger.counts),
        nodes,
        list(tree.flags),
    )


def carry_out(pool: Pool, plan: Plan, rng: random.Random | None = None) -> int:
    """Begins all moves of a plan, then ends them (in any order, with `rng`); how many were refused or given up."""
    begun: list[int] = []
    lost = 0
    for move in plan.moves:
        try:
            begun.append(pool.begin_move(move.node, move.at, move.length, move.target).handle)
        except OutOfTurn:
            lost += 1
    if rng is not None:
        rng.shuffle(begun)
    for handle in begun:
        lost += not pool.finish_move(handle)
    return lost


def sound(pool: Pool) -> None:
    assert audit(pool) == []
