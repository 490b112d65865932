"""Compaction of one pool while it serves: a task that plans, moves in gaps between engines' steps, and publishes.

    nothing to gain                                 asleep: no timer, no look at a page; `upkeep` asks once a second
    something to gain   pace.py  which purpose      the planner begins to listen to the pool, and is fed in slices;
                                                    where the pool changes faster than that, it is let be for a while
                        planner  which moves
                        mover.py begins them        copies wait in the device's low lane, behind its gate
                        gaps.py  when               the gate opens for as long as no step is expected;
                                                    the device shuts it by itself as one begins
                        mover.py publishes          sessions that follow are told in the same turn

    idle      copies run in gaps only; for those the clients' bells are asked for (WAKE), and only while there is work.
              Where somebody waits for memory and no gap comes, at `compaction_duty` all the same
    forced    at any time, at `compaction_duty`
    off       nothing, and what is under way is given up: it ends as soon as the running chunk has

A turn takes about `slice_us`, and when clients were served meanwhile they have the processor for several times as long
before the next.  The predictor is asked, and pages are read, only while copies wait for a gap.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import structlog

from kvslot.allocator.moves import Move
from kvslot.allocator.runs import EXACT, FreeRuns
from kvslot.api.wire import messages
from kvslot.api.wire.page import BEGAN, COMPLETED, ENDED, SUBMITTED
from kvslot.daemon.device import Completion, Event
from kvslot.daemon.logs import sparing
from kvslot.defrag import Planner
from kvslot.defrag.gaps import GapPredictor, GapStatistics
from kvslot.defrag.mover import Mover, Outcomes, Piece
from kvslot.defrag.pace import FOLLOW_SECONDS, ONCE_TIMES, Following, Order, Pace, Reading, Rules, pause
from kvslot.defrag.windows import LONGEST

if TYPE_CHECKING:
    from kvslot.daemon.config import Settings
    from kvslot.daemon.pools import HostedPool
    from kvslot.daemon.server import Server

IN_FLIGHT_BYTES: Final = 8 << 20
"""Whose targets are set aside, at the most: two milliseconds of copying."""
IN_FLIGHT_SHARE: Final = 64
"""... and of a small pool no more than one part in so many, or a block."""
BATCH_BYTES: Final = 1 << 19
"""Copied by one call and published together."""
PLAN_TOKENS: Final = 16384
"""Of one plan at the most."""
PLAN_BLOCKS: Final = 2
PLAN_LEAST: Final = 32
"""... and at the least what so many blocks hold, or so many tokens: for less than a block's no block is emptied."""
PLAN_SECONDS: Final = 0.0002
"""What making a plan should take: the next one's budget is halved or doubled for that."""
PLAN_LAST: Final = 8
"""Times as much is allowed, before it is believed that there is nothing."""
IN_VAIN: Final = 4096
"""Plans one after the other that have only looked at a part of the pool; then it is as if there were nothing."""
FEED: Final = 16
"""Changes that the planner takes note of between two looks at the time."""
DUTY_SECONDS: Final = 0.002
"""Of copying at a time where it is not in a gap."""
POLL_FIRST: Final = 0.005
POLL_LAST: Final = 0.05
"""Seconds between two looks at the pages while copies wait for a gap: a bell may be missed (a store and a load may pass
each other)."""
MARGIN: Final = 50e-6
"""Seconds before the end of what may be copied, by which the last chunk has ended: it takes as long, and errs."""
PATIENCE: Final = 1.0
"""Seconds that moves wait for a gap; then they are given up, and their targets are free again."""
SEARCH: Final = 2.0
"""Seconds that a gap is looked for, at the price of a bell for each step; without any it is let be for a while ..."""
PAUSE_FIRST: Final = 1.0
PAUSE_LAST: Final = 32.0
"""... in seconds, doubled each time until one is found."""
SOUGHT: Final = 0.25
"""Seconds that what is to be planned is not thought about anew, while a gap is looked for."""
KEEP: Final = 10.0
"""Seconds that the planner goes on listening after there was nothing more to do."""
TICKET_PATIENCE: Final = 0.1
"""Seconds that a ticket for a run waits for moves before a window is evicted for it."""
REST: Final = 8
"""Times as long as a turn took, clients have the processor, if any were served meanwhile: at the most a ninth of the
loop's time goes into it while others use it."""
BURY_SECONDS: Final = 0.005
"""Between two parts of a planner's memory that are given back."""
LOG_MOST: Final = 1 << 16
"""Changes, or as many as there are nodes, that wait for the planner at the most; then it begins anew."""
FEED_REST: Final = 24
"""... and after one in which the planner took note of what they had changed, which is most of what it costs them."""
AHEAD: Final = 1.0
"""Seconds beyond now from which the times of a page are nonsense."""
LONG_TURN: Final = 0.001
"""Seconds: after a longer one bells have to wait as well; many engines' pages take that long to look at."""
LONG_RUNS: Final = 64
"""Of one class of sizes looked at one by one, where it is not exact."""
CLOSE_SECONDS: Final = 5.0
"""For a running chunk to end with the process: it takes a hundred microseconds."""
FRUITLESS_SECONDS: Final = 30.0
"""Between two lines of a kind while plans come to nothing."""
LINES: Final = 4
"""Of one kind a second."""

log = structlog.stdlib.get_logger("kvslot.daemon")


class GapTotals(NamedTuple):
    """Counts of what predictors of gaps have seen."""

    steps: int = 0
    gaps: int = 0
    idle_s: float = 0.0
    granted_s: float = 0.0


class Compactor:
    """Compaction of one pool; `run` is its task."""

    def __init__(self, server: Server, hosted: HostedPool) -> None:
        self.server = server
        self.hosted = hosted
        self.override = ""  # by Defrag, whatever the settings say: "off", "idle"
        self.pace = Pace(Rules(mode="off"))
        device = hosted.device
        slot_bytes = sum(device.geometry.slot_bytes)
        pool = hosted.core
        self._slot_bytes = slot_bytes
        self._in_flight = max(
            pool.block_size, min(IN_FLIGHT_BYTES // slot_bytes, pool.usable // IN_FLIGHT_SHARE), 1
        )
        self.mover = Mover(
            pool, self._submit, tokens_max=self._in_flight, batch_tokens=max(1, BATCH_BYTES // slot_bytes),
            ready=self._may_publish,
        )  # fmt: skip
        self._settings: Settings | None = None
        self._stream = device.stream(low_priority=True)
        self._gated = False
        self._flying: deque[int] = deque()
        self._planner: Planner | None = None
        self._graves: list[memoryview[int]] = []  # memory of planners that are no more
        self._following = Following()
        self._overtaken = 0
        self._given_up = False  # what was under way when it was switched off
        self._on = False  # there may be something to wind down
        self._fed_before = False  # and the turn before, too
        self._feeding = False  # this turn went into that
        self._predictor: GapPredictor | None = None
        self._known: set[int] = set()  # sessions that the predictor has heard of
        self._words: tuple[memoryview[int], ...] = ()
        self._any_time = False  # copies do not wait for gaps
        self._order: Order | None = None
        self._before = Outcomes()  # when the present plan began
        self._waiting_since = 0.0
        self._copied = 0  # bytes, when it was last looked whether moves only wait
        self._allowed_until = self._paused_until = self._gap_last = 0.0
        self._poll = POLL_FIRST
        self._sought: Order | None = None  # what a gap is looked for, since, and until when that is believed
        self._sought_since = self._sought_until = 0.0
        self._search_from = 0.0
        self._pause = PAUSE_FIRST
        self._budget = self._budget_least = max(PLAN_BLOCKS * pool.block_size, PLAN_LEAST)
        self._budget_last = PLAN_LAST * self._budget_least
        self._idle_since = 0.0
        self._in_vain = 0  # plans one after the other that were not finished
        self._loose: dict[str, int] = {}  # when `once` began
        self._round = 0
        self._ringing = False
        self.plans = 0
        self._fruitless = 0  # plans in a row of which nothing was published
        self._seen = GapTotals()  # of predictors that are no more
        self.state = "off"
        self._awake = asyncio.Event()
        self._closed = False
        device.notify = self._noticed

    # -- from outside ------------------------------------------------------------------------------------------

    def poke(self) -> None:
        """Something has happened that may make a difference."""
        self._awake.set()

    def gaps(self) -> GapStatistics | None:
        """What is known of the gaps between steps; None while none is looked for."""
        return self._predictor.statistics() if self._predictor is not None else None

    def _noticed(self) -> None:
        # On the device thread: a batch has ended, or the gate has shut by itself.
        self.server.loop.call_soon_threadsafe(self._awake.set)

    def upkeep(self, now: float) -> None:
        """Once a second: whether there is anything to gain, at the price of a few sums."""
        tree = self.hosted.core.tree
        if tree.log is not None and len(tree.log) > max(LOG_MOST, tree.nodes):
            self._close_planner()  # nobody has asked it for long: a device that does not end a copy, for instance
        if self._planner is not None or self._flying or self.pace.once:
            self._awake.set()
        elif self.mode != "off" and now >= self._following.until:
            self._take_settings()
            if self.pace.worth(self.reading(), now):
                self._awake.set()

    @property
    def mode(self) -> str:
        """What is asked for."""
        return self.override or self.server.settings.compaction

    def start(self) -> None:
        """Goes by the settings again, or in gaps where those say off."""
        self._say("idle" if self.server.settings.compaction == "off" else "")

    def stop(self) -> None:
        """Gives up what is under way, and does nothing until `start`, or until the setting is set again."""
        self._say("off")

    def set_again(self) -> None:
        """The setting has been set: the last word counts, whatever `start` or `stop` said before."""
        self._say("")

    def _say(self, override: str) -> None:
        self.override = override
        self.pace.reset()
        self._following = Following()
        if self.mode == "off":
            self.state = "off" if self.mover.idle and not self._flying else "stopping"
        elif self.state in ("off", "stopping"):
            self.state = "planning"
            self.pace.reason = "just switched on"
        self._awake.set()

    def once(self) -> None:
        """Gains what can be gained now, whatever the settings say, and is then as before."""
        if not self.pace.once:
            reading = self.reading()
            self._loose = {
                "free_blocks": reading.free - reading.in_blocks,
                "run": reading.free - reading.in_runs,
            }
            self.pace.begin_once()
            self._awake.set()

    # -- the task ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled.  What is raised in here is a fault of ours, and ends the process."""
        awake, loop = self._awake, self.server.loop
        while True:
            awake.clear()
            began = time.perf_counter()
            delay = self.turn(time.monotonic())
            if delay <= 0:
                if self._round != self.server.hub.rounds:
                    self._round = self.server.hub.rounds
                    rest = FEED_REST if self._feeding else REST
                    await asyncio.sleep(rest * (time.perf_counter() - began))
                else:
                    await asyncio.sleep(0)
                continue
            took = time.perf_counter() - began
            timer = loop.call_later(delay, awake.set) if delay < math.inf else None
            await awake.wait()
            if timer is not None:
                timer.cancel()
            if took > LONG_TURN:
                await asyncio.sleep(REST * took)

    def turn(self, now: float) -> float:
        """One slice of work; the seconds until the next one, unless poked: 0 for at once, inf for not at all."""
        self._take_settings()
        self._fed_before, self._feeding = self._feeding, False
        if self._reap(now):
            return 0.0
        if self.mode == "off" and not self.pace.once:
            return self._wind_down()
        self._on, self._given_up = True, False
        if not self.mover.idle:
            return self._go_on(now)
        if self._order is not None:
            self._end_plan(now)
        return self._begin_plan(now)

    def _take_settings(self) -> None:
        settings = self.server.settings
        mode = self.mode
        if settings is self._settings and self.pace.rules.mode == mode:
            return
        if (
            self._settings is not None
            and settings.compaction_collisions != self._settings.compaction_collisions
        ):
            self._forget_gaps()
        self._settings = settings
        self.pace.rules = Rules(
            mode=mode,
            start=settings.compaction_start,
            stop=settings.compaction_stop,
            run_blocks=settings.compaction_run_blocks,
            duty=settings.compaction_duty,
        )
        self.hosted.core.admission.move_patience = 0.0 if mode == "off" else TICKET_PATIENCE

    # -- plans -------------------------------------------------------------------------------------------------

    def reading(self) -> Reading:
        """The pool as it is; some tens of microseconds."""
        pool = self.hosted.core
        runs, size = pool.runs, pool.block_size
        settings = self.server.settings
        wanted = -(-pool.admission.wanted_run() // size)
        if wanted > LONGEST:
            wanted = 0  # eviction serves it: moves for so much would take longer than it waits for them
        return Reading(
            usable=pool.usable,
            block_size=size,
            free=runs.total,
            in_blocks=runs.blocks_free * size,
            in_runs=slots_in_runs(runs, settings.compaction_run_blocks * size),
            run_wanted=wanted,
            waiting=pool.admission.busy,
            scattered=len(pool.tree.scattered),
            tick=pool.tick + pool.evicted_tokens,
        )

    def _begin_plan(self, now: float) -> float:
        """There is nothing under way: what comes next, if anything."""
        pace = self.pace
        if self._planner is None and now < self._following.until and not pace.once:
            if self.hosted.core.admission.wanted_run():
                self._let_evict(now)
            return math.inf  # `upkeep` looks once a second
        if self._feed():
            self._feeding = True
            # `once` where it is off otherwise has then ended, and is to be wound up.
            return 0.0 if self._keeps_up(now) or self.mode == "off" else math.inf
        if self._sought is not None and now < self._sought_until and not (pace.once or self._busy):
            delay = self._seek(now)
            if delay:
                return delay
        reading = self.reading()
        order = pace.order(reading, now)
        if order is None:
            self._sought = None
            return 0.0 if self.mode == "off" else self._rest(now)  # `once` has come to its end
        self._idle_since = now
        if self._planner is None:
            self._planner = Planner(self.hosted.core)
            self._following.begin(now)
            self.state = "planning"
            return 0.0
        if not pace.at_duty(reading, now, self._gap_last):
            if self._sought is None:
                self._sought_since = now
            self._sought, self._sought_until = order, now + SOUGHT
            delay = self._seek(now)
            if delay:
                return delay
        self._sought = None
        self.state = "planning"
        self._look_who_follows(now)
        began = time.perf_counter()
        budget = self._budget
        plan = self._planner.plan(budget, order.purpose, now, blocks=order.blocks)
        took = time.perf_counter() - began
        self._following.planned()
        if took > PLAN_SECONDS:
            self._budget = max(self._budget_least, self._budget // 2)
        elif took < PLAN_SECONDS / 2:
            self._budget = min(PLAN_TOKENS, 2 * self._budget)
        self.plans += bool(plan.moves)
        if not (plan.moves or plan.settled) and self._in_vain < IN_VAIN:
            self._in_vain += 1
            return 0.0  # it has only looked at a part
        self._in_vain = 0
        if not plan.moves and budget < self._budget_last:
            self._budget = self._budget_last  # what little was allowed may have been too little for anything
            return 0.0
        pace.planned(order, len(plan.moves), reading, now)
        if not plan.moves:
            if order.ticket:
                self._let_evict(now)
            return 0.0
        self._order = order
        self._before = msgspec.structs.replace(self.mover.outcomes)
        self._waiting_since = now
        self._poll = POLL_FIRST
        self.mover.take(plan.moves)
        sparing(
            log, "compaction_planned", *self._lines, pool=self.hosted.name, purpose=str(order.purpose),
            moves=len(plan.moves), tokens=plan.cost, gain=plan.gain, ticket=order.ticket, reason=pace.reason,
        )  # fmt: skip
        return 0.0

    @property
    def _busy(self) -> bool:
        return self.hosted.core.admission.busy

    def _let_evict(self, now: float) -> None:
        """Moves cannot make the run that a ticket waits for: it waits for them no longer."""
        admission = self.hosted.core.admission
        admission.move_patience, patience = 0.0, admission.move_patience
        self.server.deliver(self.hosted, now)
        admission.move_patience = patience

    def _feed(self) -> bool:
        """A slice of what the planner is to take note of; true when there is more."""
        if self._planner is None:
            return False
        began = time.perf_counter()
        until = began + self.server.settings.slice_us / 1e6
        while self._planner.feed(FEED):
            if time.perf_counter() >= until:
                return True
        # The plan has a turn of its own, where this one has been used up.
        return time.perf_counter() - began > PLAN_SECONDS / 4

    def _keeps_up(self, now: float) -> bool:
        """Whether the planner is told of changes at least as fast as they come; where not, it is closed for a while."""
        planner, following = self._planner, self._following
        if planner is None:
            return True
        patience = FOLLOW_SECONDS * (ONCE_TIMES if self.pace.once else 1)
        index, again = planner.index, not self._fed_before
        if following.fed(index.behind, index.complete, now, again=again, patience=patience):
            return True
        self._close_planner()
        self._shut()
        self._sought = None
        self._overtaken += 1
        self.pace.end_once()
        away = following.until - now
        self.state = "backed off"
        self.pace.reason = f"the pool changes faster than it can be followed: looking again in {away:.0f} s"
        sparing(log, "compaction_overtaken", LINES, pool=self.hosted.name, seconds=away)
        if self.hosted.core.admission.wanted_run():
            self._let_evict(now)
        return False

    def _close_planner(self) -> None:
        if self._planner is not None:
            self._graves += self._planner.index.flats()
            self._planner.close()
            self._planner = None
            self._bury()

    def _bury(self) -> None:
        # A flat at a time, since the kernel takes milliseconds to take back all.
        if self._graves and not self._closed:
            self._graves.pop()
            self.server.loop.call_later(BURY_SECONDS, self._bury)

    def _seek(self, now: float) -> float:
        """Seconds to wait until a plan can be carried out, 0 for now: until then engines go on changing the pool."""
        self.state = "waiting"
        paused = now < self._search_from
        delay = self._look_for_gap(now, ring=not paused)
        if paused and delay > POLL_FIRST:
            return self._search_from - now  # or `upkeep`, which looks once a second
        if delay <= POLL_FIRST:
            self._pause = PAUSE_FIRST
            return 0.0
        if now - max(self._sought_since, self._gap_last) > SEARCH:
            # Engines that leave no gap are not asked for a bell after every step for ever.
            self.pace.reason = f"no gap between steps: looking again in {self._pause:.0f} s"
            self._ring(False)
            self._search_from = self._sought_since = now + self._pause
            self._pause = min(2 * self._pause, PAUSE_LAST)
            return self._search_from - now
        return self._wait(delay)

    @property
    def _lines(self) -> tuple[int, float]:
        """How many lines of a kind, in how many seconds: a few once plan after plan comes to nothing."""
        return (1, FRUITLESS_SECONDS) if self._fruitless > LINES else (LINES, 1.0)

    def _end_plan(self, now: float) -> None:
        order, outcomes = self._order, self.mover.outcomes
        assert order is not None
        self._order = None
        was = msgspec.structs.asdict(self._before)
        of_plan = {
            name: value - was[name]
            for name, value in msgspec.structs.asdict(outcomes).items()
            if name != "planned"
        }
        self.pace.moved(
            order, of_plan["moved_tokens"], self.reading(), now,
            missed=of_plan["over_budget"], deferred=of_plan["deferred"],
        )  # fmt: skip
        self._fruitless = 0 if of_plan["published"] else self._fruitless + 1
        sparing(
            log, "compaction_moved", *self._lines, pool=self.hosted.name, purpose=str(order.purpose), **of_plan,
            blocks_free=self.hosted.core.runs.blocks_free,
        )  # fmt: skip

    def _rest(self, now: float) -> float:
        """Nothing to do: nothing is asked of anybody, and after a while nothing is kept."""
        pace = self.pace
        self.state = "backed off" if pace.wake(now) < math.inf else "settled"
        self._shut()
        if self._planner is not None and now - self._idle_since > KEEP:
            self._close_planner()
            self._words = ()  # what is known of gaps is kept: it takes some hundred steps to learn
        delay = pace.wake(now)
        return delay if delay < 1.0 else math.inf  # `upkeep` looks once a second

    # -- moves -------------------------------------------------------------------------------------------------

    def _go_on(self, now: float) -> float:
        """Moves are under way, or wait to be."""
        if self.mover.queued and self.mover.pump(batches=1):
            # More may begin in the next turn; meanwhile those may be copied already.
            self._permit(time.monotonic())
            return 0.0
        if self.mover.idle:
            return 0.0  # none of them could begin
        return self._permit(time.monotonic())

    def _submit(self, pieces: list[Piece]) -> int:
        device = self.hosted.device
        if not self._gated:
            self._gated = True
            device.gate(self._watch, began=self._began)
        event = int(device.copy(self._stream, pieces))
        self._flying.append(event)
        return event

    def _reap(self, now: float) -> bool:
        """What the device has ended is published or given up, a batch a turn; true when there was one."""
        if not self._flying:
            return False
        device, pool = self.hosted.device, self.hosted.core
        event = self._flying[0]
        done = device.completion(Event(event))
        if done is Completion.PENDING:
            return False
        self._flying.popleft()
        self._look_who_follows(now)
        moved = self.mover.completed(event, done is Completion.DONE)
        if moved:
            self._waiting_since = now
        if pool.pushes or pool.admission.busy:
            self.server.deliver(self.hosted, now)
        return True

    def _look_who_follows(self, now: float) -> None:
        """Sessions that are movable follow as long as they step, which their pages say."""
        for member in tuple(self.hosted.members.values()):
            if member.session.movable and not member.session.life:
                self.server.sync(member, now)
        self.server.deliver(self.hosted, now)  # also tells the core what time it is

    def _may_publish(self, move: Move) -> bool:
        """Whether all who read a node can be told at this moment, in order with what they have been answered."""
        pool = self.hosted.core
        if not pool.tree.holds[move.node]:
            return True
        for sequence in pool.moves.readers(move.node) or ():
            member = self.hosted.members.get(sequence.session.handle)
            if member is None or member.connection is None or not member.connection.settled:
                return False
        return True

    def _wind_down(self) -> float:
        """Switched off: what is under way ends, and then there is nothing of it any more."""
        if not self.mover.idle:
            self.state = "stopping"
            if not self._given_up:
                self._given_up = True
                self._give_up()
            return 0.0 if not self._flying else math.inf
        if self._on:
            self._on = False
            self.state = "off"
            self._order = None
            self._shut()
            self._close_planner()
            self._forget_gaps()
            log.info("compaction_off", pool=self.hosted.name)
        return math.inf

    def _give_up(self) -> None:
        """Moves that have begun are abandoned, and their copies are not wanted any more."""
        self.mover.stop()
        for event in self._flying:
            self.hosted.device.drop(Event(event))

    # -- when --------------------------------------------------------------------------------------------------

    def _permit(self, now: float) -> float:
        """Opens the gate if copies may run now; the seconds until it is to be asked again."""
        device = self.hosted.device
        pool = self.hosted.core
        if self.pace.once or self.pace.rules.mode == "forced" or self._short(now):
            self._any_time = True
            self.state = "moving"
            if now < self._paused_until:
                return self._paused_until - now
            device.allow(DUTY_SECONDS)
            self._allowed_until = now + DUTY_SECONDS
            self._paused_until = self._allowed_until + pause(DUTY_SECONDS, self.pace.rules.duty)
            return self._paused_until - now
        if self._any_time:
            self._any_time = False
            device.allow(0)
            self._allowed_until = 0.0
        if now < self._allowed_until and device.gated().open:
            return self._allowed_until - now
        delay = self._look_for_gap(now)
        if not delay:
            assert self._predictor is not None
            seconds = self._predictor.budget(now)
            if seconds > 0:
                # Counted from when it was asked: telling it takes as long as a copy does.
                left = now + seconds - time.monotonic() - MARGIN
                if left > MARGIN:
                    device.allow(left)
                    self.state = "moving"
                    self._allowed_until = now + seconds
                    self._gap_last = now
                    self._poll = POLL_FIRST
                    return seconds
            delay = self._predictor.next(now)
        self.state = "waiting"
        copied = device.gated().copied_bytes
        if copied != self._copied:
            self._copied = copied
            self._waiting_since = now
        if now - self._waiting_since > PATIENCE or (
            pool.admission.busy and now - self._waiting_since > POLL_LAST
        ):
            # What waits keeps its targets from others, and may be copied in vain.
            self._waiting_since = now
            self._give_up()
            return 0.0
        return self._wait(delay)

    def _short(self, now: float) -> bool:
        pool = self.hosted.core
        if not pool.admission.busy:
            return False
        return self.pace.at_duty(self.reading(), now, self._gap_last)

    def _look_for_gap(self, now: float, *, ring: bool = True) -> float:
        """Reads the pages; seconds until copies may run, as far as can be told, 0 for now."""
        predictor = self._predictor
        if predictor is None:
            share = self.server.settings.compaction_collisions
            predictor = self._predictor = GapPredictor(share=share)
        words: list[memoryview[int]] = []
        here: set[int] = set()
        for member in tuple(self.hosted.members.values()):
            page, session = member.page, member.session
            if page is None or session.life:
                continue
            self.server.sync(member, now)
            if not session.submitted or session.life:
                continue
            seen = page.words
            if max(seen[BEGAN], seen[ENDED]) / 1e9 > now + AHEAD:
                continue  # nothing is learnt from it, and nobody waits for it
            here.add(member.number)
            # By the counts alone, of which a lie is a fault or a stall: a page that only says busy is not believed.
            busy = session.submitted != session.completed
            # A step that began between `now` and here is not of the future; a page that says more is not believed.
            began, ended = min(seen[BEGAN] / 1e9, now), min(seen[ENDED] / 1e9, now)
            if ended < began and not busy:
                ended = now  # it has completed a moment ago, and the time of that is not on the page yet
            predictor.seen(member.number, session.submitted, began, ended, busy)
            predictor.stalled(member.number, session.stalled)
            if not session.stalled:
                words.append(seen)
        for number in self._known - here:
            predictor.forget(number)
        self._known = here
        self._words = tuple(words)
        self._ring(ring)
        return predictor.next(now)

    def _wait(self, delay: float) -> float:
        """No gap now: a bell, or this long."""
        wait = min(delay, self._poll)
        self._poll = min(2 * self._poll, POLL_LAST)
        return max(wait, 0.0001)

    def rung(self) -> None:
        """A bell that was asked for: a step has ended, and with the last one that runs a gap has begun."""
        if self._ringing and not (self._words and self._watch()):
            self._awake.set()

    def _ring(self, wanted: bool) -> None:
        if wanted or self._ringing:
            self._ringing = wanted
            for member in self.hosted.members.values():
                member.ask_to_ring(wanted, for_gaps=True)

    def gap_totals(self) -> GapTotals:
        """What has been seen of gaps since the start, whichever predictor saw it."""
        seen = self._seen
        if self._predictor is None:
            return seen
        now = self._predictor.statistics()
        return GapTotals(
            seen.steps + now.steps,
            seen.gaps + now.gaps,
            seen.idle_s + now.idle_s,
            seen.granted_s + now.granted_s,
        )

    def _shut(self) -> None:
        self._ring(False)
        if self._gated and not self._flying:
            self.hosted.device.allow(0)
            self._allowed_until = 0.0

    def _forget_gaps(self) -> None:
        if self._predictor is not None:
            self._seen = self.gap_totals()
            self._predictor = None
            self._known = set()
            self._words = ()

    def _watch(self) -> bool:
        # On the device thread, before every chunk.
        if self._any_time:
            return False
        try:
            for words in self._words:
                if words[SUBMITTED] != words[COMPLETED]:
                    return True
        except ValueError:
            return True  # a session has just ended, and its page is gone
        return False

    def _began(self) -> float:
        # On the device thread, after `_watch` said yes.
        try:
            running = (words[BEGAN] for words in self._words if words[SUBMITTED] != words[COMPLETED])
            return max(running, default=0) / 1e9
        except ValueError:
            return 0.0

    # -- the end, and how it looks -----------------------------------------------------------------------------

    def close(self) -> None:
        """Ends with the process: waits for a running chunk, and leaves no copy with the device."""
        if self._closed:
            return
        self._closed = True
        device = self.hosted.device
        device.notify = None
        for event in self._flying:
            device.drop(Event(event))
        until = time.monotonic() + CLOSE_SECONDS
        while device.pending() and time.monotonic() < until:
            time.sleep(0.0002)

    def status(self) -> messages.Compaction:
        """As it stands now."""
        mover, pace, pool = self.mover, self.pace, self.hosted.core
        outcomes = mover.outcomes
        reading = self.reading()
        gated = self.hosted.device.gated()
        free = reading.free or 1
        order = self._order
        return messages.Compaction(
            pool=self.hosted.name,
            mode=self.mode,
            state=self.state,
            reason=self._reason(),
            once=pace.once,
            purpose=str(order.purpose) if order is not None else "",
            progress=self._progress(reading),
            moves_in_flight=mover.moves_in_flight,
            passes=pace.passes,
            plans=self.plans,
            planned=outcomes.planned,
            published=outcomes.published,
            abandoned_leased=outcomes.abandoned_leased,
            abandoned_freed=outcomes.abandoned_freed,
            deferred=outcomes.deferred,
            over_budget=outcomes.over_budget,
            failed=outcomes.failed,
            moved_tokens=outcomes.moved_tokens,
            moved_bytes=outcomes.moved_tokens * self._slot_bytes,
            blocks_given=pool.moves.blocks_given,
            retired_tokens=pool.moves.retired_tokens,
            unpacked_pct=100 * (reading.free - reading.in_blocks) / free,
            unusable_pct=100 * (reading.free - reading.in_runs) / free,
            copy_seconds=gated.copying_seconds,
            copy_bytes_per_second=gated.bandwidth,
            steps=self.gap_totals().steps,
            collisions=gated.met,
            overtaken=self._overtaken,
        )

    def _reason(self) -> str:
        if self.mode == "off" and not self.pace.once:
            return "by `defrag stop`" if self.override else "by the setting `compaction`"
        if self.override == "idle":
            return f"{self.pace.reason}; by `defrag start`: the setting is {self.server.settings.compaction}"
        return self.pace.reason

    def _progress(self, reading: Reading) -> float:
        """Of `once`: a third for each purpose, and of that how much of the loose memory is whole."""
        if self.pace.once:
            left = self.pace.once_left
            purpose = left[0] if left else None
            part = 0.0
            if purpose is not None and (began := self._loose.get(str(purpose), 0)):
                part = min(0.99, max(0.0, 1 - reading.loose(purpose) / began))
            return min(1.0, (3 - len(left) + part) / 3)
        settled = self._before.settled
        planned = self.mover.outcomes.planned - settled
        if self._order is None or not planned:
            return 0.0
        return min(1.0, (self.mover.outcomes.settled - settled) / planned)


def slots_in_runs(runs: FreeRuns, least: int) -> int:
    """Free slots in runs of `least` slots or more, a run counted with its whole cells; O(classes of sizes)."""
    cell, holes = runs.cell, runs.holes
    found = sum(slots for slots in runs.stock[1::2] if slots >= least)
    occupied = runs.occupied >> max(0, holes)
    index = 0
    while occupied:
        skip = (occupied & -occupied).bit_length()
        occupied >>= skip
        index += skip
        cells = index - 1
        members = runs.classes[holes + cells]
        if cells < EXACT:
            if cells * cell >= least:
                found += cells * cell * len(members)
            continue
        for start in islice(members, LONG_RUNS):
            end = start + runs.length_at[start]
            slots = end // cell * cell - -(-start // cell) * cell
            if slots >= least:
                found += slots
        if len(members) > LONG_RUNS:
            sixteenths = cells - EXACT
            slots = ((16 + (sixteenths & 15)) << ((sixteenths >> 4) + 5)) * cell
            if slots >= least:
                found += slots * (len(members) - LONG_RUNS)
    return found
