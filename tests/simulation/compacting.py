"""Histories of a pool that has room, many short prefixes, and is compacted all the time, at every phase of a move.

cache      a prompt is computed, published and freed: a piece that nobody reads
thin       some pieces go: holes
compact    a plan for some purpose begins; its copies end late, out of order, or fail
else       what engines do: read what moves, split it, let it be evicted, follow it, die over it
"""

from __future__ import annotations

import random
from collections.abc import Callable

from kvslot.allocator import PoolConfig

from .driver import Driver
from .world import Seq

STEPS = 160


class Compacting(Driver):
    """One such history."""

    def __init__(self, seed: int, *, say: Callable[[str], None] | None = None) -> None:
        super().__init__(seed, steps=STEPS, say=say)
        self.acts = [
            (30, self.cache), (8, self.thin), (8, self.allocate), (8, self.serve), (10, self.step), (10, self.complete),
            (4, self.extend), (6, self.commit), (3, self.fork), (3, self.trim), (8, self.free), (2, self.pin),
            (2, self.unpin), (4, self.move), (24, self.compact), (16, self.poll), (8, self.advance), (1, self.lose),
            (2, self.back), (1, self.die), (3, self.sweep), (2, self.open), (1, self.abandon), (2, self.pump),
        ]  # fmt: skip
        self.weights = [weight for weight, _ in self.acts]
        for _ in range(60):
            self.cache()

    def configure(self, rng: random.Random, seed: int) -> PoolConfig:
        """Blocks of a few sizes, some hundreds of slots in all."""
        block_size = rng.choice((1, 4, 8, 16, 16, 33))
        return PoolConfig(
            blocks=rng.randrange(200, 500) // block_size + 3,
            block_size=block_size,
            opaque=rng.random() < 0.1,
            quantum=rng.choice((0, 0, 1, 4)),
            eviction=rng.choice(("lru", "lru", "s3fifo")),
            ahead=not seed % 2,
        )

    def cache(self) -> object:
        engine, rng, world = self.an_engine(), self.rng, self.world
        if engine is None or engine.stuck:
            return False
        n = rng.choice((1, 2, 3, 5, 8, 13, 15, 20, 40))
        tokens = (
            [rng.randrange(1000) for _ in range(n)]
            if rng.random() < 0.7 or not self.prompts
            else self.a_prompt()
        )
        answer = world.allocate(engine, rng.choice(self.roots), tokens)
        if not isinstance(answer, Seq):
            return False
        world.submit(engine, [(answer, len(tokens))])
        world.settle(engine)
        world.commit(answer, max(answer.written, answer.base))
        world.free(answer)
        self.prompts.append(tokens)
        del self.prompts[:-12]
        return f"{len(tokens)} tokens"

    def thin(self) -> object:
        gone = self.world.pool.evict(self.rng.choice((1, 7, 30, 80)), now=self.world.now)
        return f"{gone} tokens" if gone else False
