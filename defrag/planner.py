"""Where moves buy something."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from kvslot.allocator.errors import OutOfTurn
from kvslot.defrag.greedy import Greedy
from kvslot.defrag.view import RUN_BLOCKS, Plan, Purpose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvslot.allocator.pool import Pool


class Plans(Protocol):
    """What answers with plans."""

    pool: Pool

    def feed(self, budget: int = 0) -> bool:
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
    """Plans for one pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._greedy = Greedy(pool)

    def feed(self, budget: int = 512) -> bool:
        """Takes note of what has changed, `budget` changes at the most; True: there are more."""
        return False

    def plan(
        self,
        budget: int,
        purpose: Purpose = Purpose.FREE_BLOCKS,
        now: float = 0.0,
        *,
        blocks: int = RUN_BLOCKS,
    ) -> Plan:
        """Moves of at most `budget` tokens together, at `now` (seconds, any origin, not going back).

        `blocks`: the length of the run wanted, for the purpose `run` only.  Changes nothing of the pool.
        """
        return self._greedy.plan(budget, purpose, now, blocks=blocks)

    def close(self) -> None:
        """Ends the listening to the pool."""
        self.pool.tree.log = None


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
        while done.plans < plans:
            while mine.feed(1 << 16):
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
            if not moved and (plan.settled or not plan.moves):
                break
    if planner is None:
        mine.close()
    return done
