"""What a planner answers: moves, each with its gain and its cost, and what they are for.

    cost    tokens that are copied
    gain    slots: of blocks that become wholly free (free_blocks), of the stretch that is cleared (run); for join the
            extents that a look-up of the node will find fewer

A plan is a wish.  By the time a move is begun its node may have gone and its target may be taken; `begin_move` says so
and nothing is lost but that plan's gain.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

RUN_BLOCKS = 32  # blocks of a run that free memory is hoped to be usable in


class Purpose(StrEnum):
    """What a move buys."""

    FREE_BLOCKS = "free_blocks"  # whole blocks given back
    RUN = "run"  # consecutive whole blocks
    JOIN = "join"  # fewer extents of a node that is often read


class PlannedMove(msgspec.Struct, gc=False, frozen=True):
    """Tokens [at, at + length) of `node` are to go from `source` to `target` (flat extents, slots).

    Every extent of `target` is at the front or the end of a free run once the moves before it in the plan have begun.
    """

    node: int
    at: int
    length: int
    source: list[int]
    target: list[int]


class Plan(msgspec.Struct, gc=False):
    """Moves in the order in which they are to begin.  `settled`: there was nothing more to be found for now."""

    purpose: Purpose
    moves: list[PlannedMove]
    gain: int = 0
    cost: int = 0
    settled: bool = True
