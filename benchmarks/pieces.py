"""Pools in a stated condition, made without sessions, and what compaction to rest makes of them.

    half     pieces of random lengths, each in one hole, churned; then a random half of them is freed
    sixty    nodes placed in whole cells as prompts are, until the pool is full; churned; then freed at random until
             60 % of the slots are in use.  A share of the nodes may be leased, by somebody who does not follow moves

Runs.  What is usable as runs of k blocks: such runs that the free runs hold, cut at block edges.  The bound is for the
best arrangement there could be: between two things that must stay lies a stretch of whole blocks, no arrangement has
more runs than all stretches hold, nor more than all free slots would fill.

    |##|.....m..mm.|##|..m|####|.......m....|      ## leased, m movable, . free
       [ stretch  ]   [  ]      [  stretch ]
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final, NamedTuple

from kvslot.allocator import Pool, PoolConfig, Space
from kvslot.allocator.slots import CACHED, FREE
from kvslot.benchmarks.traffic import noise
from kvslot.defrag import RUN_BLOCKS, Plans, Purpose, rest

Lengths = Callable[[Random], int]

OCCUPANCY: Final = 0.6
LEASED: Final = 0.2
CHURN: Final = 3
TURNS: Final = 2
"""How often a third of the nodes is replaced before the pool is emptied to OCCUPANCY."""


class Pieces:
    """A pool whose nodes hang below one root, each of a text of its own."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.pool = Pool(PoolConfig(blocks=blocks, block_size=block_size))
        self.nodes: list[int] = []
        self._root = self.pool.open_space(Space())
        self._serial = 0

    def add(self, length: int, *, cells: bool = False) -> None:
        """Caches a node of `length` tokens: in a hole if one is long enough, or from a cell's start as prompts are."""
        pool = self.pool
        runs, cell = pool.runs, pool.cell
        count = -(-length // cell)
        if cells and length >= cell and runs.cells_free >= count:
            extents = runs.take_cells(count)
            over = count * cell - length
            if over:
                extents[-1] -= over
                runs.give(extents[-2] + extents[-1], over)
        else:
            extents = runs.take(length)
        self._cache(extents, length)

    def add_at(self, extents: list[int]) -> None:
        """Caches a node in these free slots."""
        for i in range(0, len(extents), 2):
            run = max(start for start in self.pool.runs.length_at if start <= extents[i])
            self.pool.runs.take_within(run, extents[i], extents[i + 1])
        self._cache(extents, sum(extents[1::2]))

    def _cache(self, extents: list[int], length: int) -> None:
        pool = self.pool
        pool.ledger.shift_all(extents, length, FREE, CACHED)
        self._serial += 1
        pool.tick += 1
        # Its number first, so that no two texts share a beginning.
        tokens = self._serial.to_bytes(4, "little") + noise(self._serial, 1, length)
        node = pool.tree.add(self._root, tokens, extents, pool.tick)
        pool.tree.unhold(node, pool.tick)
        self.nodes.append(node)

    def free(self, index: int) -> None:
        """Evicts the node at that place of `nodes`."""
        node = self.nodes[index]
        self.nodes[index] = self.nodes[-1]
        self.nodes.pop()
        extents = self.pool.tree.remove(node)
        self.pool.ledger.shift_all(extents, sum(extents[1::2]), CACHED, FREE)
        for i in range(0, len(extents), 2):
            self.pool.runs.give(extents[i], extents[i + 1])

    def lease(self, share: float, rng: Random) -> None:
        """Holds a share of the nodes for somebody who cannot be told of moves."""
        for node in rng.sample(self.nodes, int(share * len(self.nodes))):
            self.pool.tree.hold(node)


def half(block_size: int, longest: int, pieces: int, seed: int = 1) -> Pieces:
    """`pieces` pieces of 1..longest tokens, replaced CHURN times over, a random half of them freed."""
    rng = Random(seed)
    made = Pieces(64 + int(pieces * (longest + 1) / 2 / block_size * 1.2), block_size)
    for _ in range(pieces):
        made.add(rng.randint(1, longest))
    for _ in range(CHURN * pieces):
        made.free(rng.randrange(len(made.nodes)))
        made.add(rng.randint(1, longest))
    for _ in range(pieces // 2):
        made.free(rng.randrange(len(made.nodes)))
    return made


def sixty(
    lengths: Lengths, *, blocks: int, block_size: int = 16, leased: float = 0.0, seed: int = 1
) -> Pieces:
    """A pool that was full, has turned over, and is OCCUPANCY full."""
    rng = Random(seed)
    made = Pieces(blocks, block_size)
    pool = made.pool

    def fill() -> None:
        while True:
            length = lengths(rng)
            if length > pool.runs.total - 64 * block_size:
                return
            made.add(length, cells=True)

    fill()
    for _ in range(TURNS):
        for _ in range(len(made.nodes) // 3):
            made.free(rng.randrange(len(made.nodes)))
        fill()
    while pool.usable - pool.runs.total > OCCUPANCY * pool.usable:
        made.free(rng.randrange(len(made.nodes)))
    if leased:
        made.lease(leased, rng)
    return made


def short(rng: Random) -> int:
    return rng.randint(1, 15)


def medium(rng: Random) -> int:
    return rng.randint(64, 512)


def traced(most: int) -> Lengths:
    """What requests of the bundled traces add to a cache, in tokens, `most` at the most: a node each, one by one."""
    from kvslot import replay

    found: list[int] = []
    for path in replay.bundled().values():
        trace = replay.load(path).head(500)
        found += [
            min(total - keep, most)
            for total, keep in zip(trace.total, trace.keep, strict=True)
            if total > keep
        ]
    found.sort()

    def draw(rng: Random) -> int:
        return rng.choice(found)

    return draw


def packing(pool: Pool) -> float:
    """Slots in use / slots of the blocks in use."""
    whole = pool.config.blocks - pool.padding // pool.block_size
    return (pool.usable - pool.runs.total) / ((whole - pool.runs.blocks_free) * pool.block_size)


def in_runs(pool: Pool, blocks: int = RUN_BLOCKS) -> int:
    """Free slots that can be had as runs of so many blocks."""
    size = pool.block_size
    found = 0
    for start, length in pool.runs.length_at.items():
        whole = (start + length) // size + -start // size
        found += max(0, whole) // blocks * blocks * size
    return found


def bound(pool: Pool, blocks: int = RUN_BLOCKS) -> int:
    """Free slots that could be had as such runs at best, with all that is held where it is."""
    size, tree = pool.block_size, pool.tree
    stay = [(0, pool.padding), (pool.slots, pool.slots)]
    for node in tree.live():
        if tree.length[node] and tree.holds[node]:
            extents = tree.extents(node)
            stay += [(extents[i], extents[i] + extents[i + 1]) for i in range(0, len(extents), 2)]
    stay.sort()
    windows = at = 0
    for start, end in stay:
        if start > at:
            windows += max(0, start // size + -at // size) // blocks
        at = max(at, end)
    return min(windows, pool.runs.total // (blocks * size)) * blocks * size


class Rested(NamedTuple):
    """What compaction to rest has done to a pool; shares are 0..1."""

    packing_before: float
    packing: float
    runs_before: float
    """Of what is free."""
    runs: float
    bound: float
    """Of what is free."""
    moved_tokens: int
    given_back: int
    """Slots of whole blocks."""
    moves: int


def to_rest(pool: Pool, purposes: tuple[Purpose, ...], planner: Plans | None = None) -> Rested:
    """Compacts and tells.  A planner that is given is not closed."""
    free = pool.runs.total
    before = packing(pool), in_runs(pool) / free, pool.runs.blocks_free
    best = bound(pool) / free
    done = rest(pool, purposes, planner=planner)
    return Rested(
        before[0],
        packing(pool),
        before[1],
        in_runs(pool) / free,
        best,
        done.moved_tokens,
        (pool.runs.blocks_free - before[2]) * pool.block_size,
        done.moves,
    )
