"""How densely the free runs pack short pieces into blocks, by themselves.

Pieces of random sizes are placed, then each is replaced ten times on average by one of another random size, in random
order, as tails of sequences come and go.  Every piece stands in one hole (unsplit): there is always more free room
than any piece needs, and best fit has to keep it in whole blocks.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from kvslot.allocator.runs import FreeRuns


class Packed(NamedTuple):
    """What became of it; shares are tokens held / slots of the blocks in use."""

    filled: float
    churned: float
    paged: float
    """A paged allocator's share for the same pieces: every piece in blocks of its own."""
    pieces: int
    split: int
    """Pieces that took more than one extent; 0."""


def pack(block_size: int, longest: int, pieces: int = 60_000, churn: int = 10, seed: int = 1) -> Packed:
    """Places `pieces` pieces of 1..longest tokens and replaces `churn` times as many."""
    rng = random.Random(seed)
    padding = block_size if block_size > 1 else 2
    blocks = 2 + 2 * pieces * (longest // block_size + 1)
    runs = FreeRuns(blocks, block_size, padding)
    whole = runs.blocks_free
    placed: list[tuple[int, int]] = []
    split = tokens = 0

    def place() -> tuple[int, int]:
        nonlocal split, tokens
        size = rng.randint(1, longest)
        tokens += size
        extents = runs.take(size)
        split += len(extents) > 2
        return extents[0], size

    def share() -> float:
        return tokens / ((whole - runs.blocks_free) * block_size)

    for _ in range(pieces):
        placed.append(place())
    filled = share()
    for _ in range(churn * pieces):
        index = rng.randrange(pieces)
        slot, size = placed[index]
        runs.give(slot, size)
        tokens -= size
        placed[index] = place()
    paged = tokens / sum(-(-size // block_size) * block_size for _, size in placed)
    return Packed(filled, share(), paged, pieces, split)
