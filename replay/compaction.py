"""Moves in a replay: the planner's choices, carried out in simulated time.

    gap      the device is idle for so many tokens' worth of copying: moves begin, are paid for token by token, and are
             published when they are paid; a move that a gap is too short for goes on in the next one.  When to begin
             and for what is the daemon's own judgement (`defrag/pace.py`, with its default thresholds).
    rest     moves are begun and published at once, until the planner has none left: what compaction could gain at most

A move holds nothing.  What it was to move may be read, split or evicted before its copy has ended; then it is abandoned
and the idle time it took is lost, as in life.  Blocks given back are counted around each step of a move: the target's
blocks that it takes into use are taken off what the source's death gives.

At rest purposes come in the order in which they pay: whole blocks first, then runs of RUN_BLOCKS blocks for whoever
needs one, then prefixes that lie in many pieces.  `greedy` and `greedy_parts` are the plain ways of the baselines (see
`defrag/greedy.py`): one block after the other, since planned together they would move things into what is emptied next.
They end where no block can be emptied any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from kvslot.allocator import OutOfTurn, Pool
from kvslot.defrag import RUN_BLOCKS, Greedy, GreedyParts, Planner, Plans, Purpose
from kvslot.defrag.pace import Order, Pace, Reading, Rules
from kvslot.replay.policies.slotted import usable_run

PURPOSES: Final = ("free_blocks", "run", "join")
"""In the order in which they are planned for."""
PLANNERS: Final[dict[str, Callable[[Pool], Plans]]] = {
    "planned": Planner,
    "greedy": Greedy,
    "greedy_parts": GreedyParts,
}
PLAN_TOKENS: Final = 4096
"""Planned at a time: enough to choose well among, little enough to be still right when its turn comes."""
REST_TOKENS: Final = 1 << 16
"""The same where no time passes between planning and moving."""
FEED: Final = 4096
"""Changes that the planner takes in at a time."""
LOOK_EVERY_S: Final = 0.25
"""Simulated seconds between two looks at a pool in which nothing was worth moving."""
REST_ROUNDS: Final = 1 << 15
"""Plans until rest; a planner that has not come to rest by then never does, which is a fault."""
LOOKS: Final = 256
"""Plans one after the other that find no move and yet are to be gone on with."""


class Restless(RuntimeError):
    """The planner found moves for ever."""


class Compactor:
    """The moves of one pool.  Raises ValueError for a purpose or a planner that does not exist."""

    def __init__(self, pool: Pool, planner: str = "planned", purposes: tuple[str, ...] = ()) -> None:
        if planner not in PLANNERS:
            raise ValueError(f"planner is {planner!r}; there are {', '.join(PLANNERS)}")
        for each in purposes:
            if each not in PURPOSES:
                raise ValueError(f"purpose is {each!r}; there are {', '.join(PURPOSES)}")
        self.pool = pool
        self._greedy = planner != "planned"
        self.planner: Plans = PLANNERS[planner](pool)
        self.purposes = [Purpose(each) for each in purposes or PURPOSES]
        self.given_back = 0
        self._at_once = 0
        """Moves of the last plan that were over as soon as they began."""
        self.rests: list[int] = []
        """Blocks given back so far, at the end of each rest."""
        self.goals: list[int] = []
        """Where a rest ends early: once so many blocks have been given back, rest by rest."""
        self.pace = Pace(Rules())
        self._order: Order | None = None
        """What the moves under way are for."""
        self._under_way: deque[list[float]] = deque()
        """Moves that have begun, oldest first: [handle, tokens still to be copied]."""
        self._look_at = 0.0

    def gap(self, tokens: float, now: float) -> None:
        """The device had time for `tokens` tokens."""
        while tokens > 0:
            if not self._under_way:
                if now < self._look_at:
                    return
                if not self._next(now):
                    self._look_at = now + LOOK_EVERY_S
                    return
            first = self._under_way[0]
            if first[1] > tokens:
                first[1] -= tokens
                return
            tokens -= first[1]
            self._under_way.popleft()
            moved = -self.pool.moves.moved_tokens
            self._finish(int(first[0]))
            moved += self.pool.moves.moved_tokens
            if self._order is not None and moved:
                self.pace.moved(self._order, moved, self.reading(), now)

    def rest(self, now: float) -> None:
        """Everything that is to be gained (but see `goals`), at once.  Raises Restless."""
        self._rest(now)
        self.rests.append(self.given_back)

    def _rest(self, now: float) -> None:
        self._drain()
        at = len(self.rests)
        goal = self.goals[at] if at < len(self.goals) else None
        # One block at a time where more than was wanted would be given back.
        budget = 1 if self._greedy or goal is not None else REST_TOKENS
        left = list(self.purposes)
        moved = False
        for _ in range(REST_ROUNDS):
            if goal is not None and self.given_back >= goal:
                return
            self._feed(now)
            before = self.given_back
            settled = self._begin(budget, left[0], now)
            if self._under_way or self._at_once:
                moved = True
                self._drain()
                if not self._greedy or self.given_back > before:
                    continue
            elif not settled:
                continue
            # What one purpose has moved may give another one more to do.
            del left[0]
            if not left:
                if self._greedy or not moved:
                    return
                left, moved = list(self.purposes), False
        raise Restless(f"no rest after {REST_ROUNDS:,} plans")

    def _feed(self, now: float) -> None:
        while self.planner.feed(FEED, now):
            pass

    def reading(self) -> Reading:
        """The pool as the pace sees it."""
        pool = self.pool
        return Reading(
            usable=pool.usable,
            block_size=pool.block_size,
            free=pool.runs.total,
            in_blocks=pool.runs.blocks_free * pool.block_size,
            in_runs=usable_run(pool.runs),
            scattered=len(pool.tree.scattered),
            tick=pool.tick,
        )

    def _next(self, now: float) -> bool:
        """Begins what the pace wants done next, if anything; False: nothing for now."""
        for _ in self.purposes:
            self._order = self.pace.order(self.reading(), now)
            if self._order is None:
                return False
            if self._order.purpose not in self.purposes:
                self.pace.planned(self._order, 0, self.reading(), now)
                continue
            self._feed(now)
            for _ in range(LOOKS):
                if self._begin(PLAN_TOKENS, self._order.purpose, now) or self._under_way:
                    break
            self.pace.planned(self._order, len(self._under_way), self.reading(), now)
            if self._under_way:
                return True
        return False

    def _begin(self, budget: int, purpose: Purpose, now: float) -> bool:
        """Plans for `purpose` and begins what was planned; False where the planner is to be asked again."""
        pool = self.pool
        before = pool.runs.blocks_free
        self._at_once = 0
        plan = self.planner.plan(budget, purpose, now, blocks=RUN_BLOCKS)
        for each in plan.moves:
            try:
                move = pool.begin_move(each.node, each.at, each.length, each.target)
            except OutOfTurn:
                continue  # an earlier move of the plan took what this one was to have
            if self._greedy:
                # One by one, as is commonly done: where pieces change places between sparse blocks, planned together
                # nothing would be gained.
                pool.finish_move(move.handle)
                self._at_once += 1
            else:
                self._under_way.append([move.handle, move.length])
        self.given_back += pool.runs.blocks_free - before
        return plan.settled

    def _finish(self, handle: int) -> None:
        before = self.pool.runs.blocks_free
        self.pool.finish_move(handle)
        self.given_back += self.pool.runs.blocks_free - before

    def _drain(self) -> None:
        while self._under_way:
            self._finish(int(self._under_way.popleft()[0]))
