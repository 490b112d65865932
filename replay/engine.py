"""Discrete-event replay of a trace through a policy: a serving engine's life without the engine.

Requests come in (by the trace's clock, by a seeded Poisson process, or as fast as `live` allows), wait in line, are
admitted, prefill, decode token by token, ask for room when their run is used up, finish, and leave their tokens to be
found again.  Time is simulated; what the policy itself costs is measured on the real clock and changes nothing.

    arrives --> [waits for what it builds on] --> queue --> admit --> prefill --> decode --> finish
                                                   ^ ^       |LATER     |            |grow refused
                                                   | +-------+          |            v
                                                   +---- front of the queue ---- victim preempted

Rules.

- At most `live` sequences run at once, all engines together.
- Causality: a request is not asked for before the earlier request of its session has finished, nor before its parent
  has, if it inherits any of the parent's output.  (A shared prompt alone makes nobody wait: the second of two requests
  that come at once finds nothing, as in life.)
- Each pool has one line, first come first served.  When its head is told LATER, the line waits until a sequence of that
  pool finishes; memory given back by a preemption belongs to the growth that forced it.
- A refused growth preempts `victim()`, again and again until it fits.  The victim goes to the front of its line and
  starts over.  A sequence that runs alone and still cannot grow is dropped as NEVER.
- `ask_at` below `capacity` is asking early: a refusal there costs nothing yet, the engine asks again at `capacity`.
- Told LATER while nothing runs in that pool, a request would wait for ever: dropped and counted as `stuck`.
- A dropped request counts as finished for those that build on it.

Closed loop (no clock in the trace and no rate, or asked for): as many requests are in the system, waiting or running,
as `live` allows; the trace's order decides which, and a request that has to wait for another is passed over.  The loop
fills up over the time that a mean request takes, one more after every live-th of it (`ramp_s`): clients that all began
in the same instant would compute their common prompt `live` times over, and would stay in step long after.

Rounds (`hours`): at the trace's end it starts again with new sessions (see `traces.py`), until that much time has gone
by; then nothing new is let in, and what is in the system ends.

Compaction (`idle` or `forced`; policies that can).  A *gap* is time in which the device computes nothing: all of it
while nothing runs, `step_gap_us` after every decode step while sequences decode, none while a prompt is computed.
`idle` hands the policy each gap as it ends, as the tokens that `copy_tokens_s` copies in it; what is not used is lost.
`forced` makes it move until nothing is left to be gained, every `REST_EVERY_S`, as if copies took no time.

Determinism: all events are ordered by (time, sequence number); chance comes from one seeded generator and from hashes
of numbers.  Same trace, settings and seed: same rows, but for measured times.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Final, Literal, NamedTuple

import msgspec

from kvslot.replay import policies as registry
from kvslot.replay.bounds import Written, Yardstick
from kvslot.replay.clairvoyant import Nodes, optimum
from kvslot.replay.metrics import Row, Run
from kvslot.replay.policies._base import (
    Admitted,
    Compacting,
    Compaction,
    Gauges,
    Policy,
    PolicyConfig,
    Refused,
)
from kvslot.replay.recorder import Event, Recorder, Schedule, add_counters, add_gauges, room, rows, series
from kvslot.replay.traces import Expander, Trace

Routing = Literal["sticky", "random"]
Sharing = Literal["shared", "partitioned"]
Progress = Callable[[float], None]
"""Called now and then with the share of the run that is done, 0..1."""

ENGINES_MAX: Final = 1024
LIVE_MAX: Final = 1_000_000
POOL_MAX: Final = 1 << 28
COLLECT_EVERY: Final = 20_000
"""Finished requests between two garbage collections, which happen outside everything measured: a pause inside a
policy's call would be charged to whoever happened to allocate."""
PROGRESS_EVERY: Final = 256
REST_EVERY_S: Final = 10.0
"""Simulated seconds between two compactions to rest."""
STEP_GAP_US: Final = 200.0
"""What a serving engine's host leaves its device idle for between two decode steps: schedule, sample, launch."""
COPY_TOKENS_S: Final = 40_000.0
"""5 GB/s, one thread's plain copy, at 128 KiB of K and V a token (32 layers, 8 heads of 128, 16 bits).  An accelerator
copies a hundred times as fast."""
_U64: Final = (1 << 64) - 1


class ReplayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One run.  Raises ValueError where a value is out of range."""

    policy: str
    block_size: int = 16
    pool_tokens: int
    live: int = 64
    hours: float | None = None
    """Simulated hours to go round the trace for; None: once through."""
    rate: float | None = None
    """Requests per second, Poisson; None: the trace's clock, or closed loop where it has none."""
    closed_loop: bool = False
    """Ignore the trace's clock."""
    engines: int = 1
    routing: Routing = "sticky"
    sharing: Sharing = "shared"
    eviction: str = "lru"
    watermark: float = 0.02
    prefill_us: float = 100.0
    """Per prompt token that was not found."""
    decode_ms: float = 20.0
    """Per output token."""
    ramp_s: float | None = None
    """Closed loop: seconds until all `live` may run; None: a mean request's time; 0: all at once."""
    seed: int = 0
    fill_holes: bool = True
    """`slotted` only; False: no piece is ever split to fill a hole."""
    page: int = 1
    """`slotted` only: slots of the pages that kernels read whole."""
    emptying: bool = True
    """`slotted` only; False: eviction takes the oldest leaf, whether or not another one's death empties a block."""
    compaction: Compaction = "off"
    """`slotted` only."""
    step_gap_us: float = STEP_GAP_US
    """Idle: microseconds after each decode step in which the device has nothing to do."""
    copy_tokens_s: float = COPY_TOKENS_S
    """Idle: tokens that can be copied in a second."""
    planner: str = "planned"
    """Who chooses the moves; "greedy" is the baseline."""
    purposes: tuple[str, ...] = ()
    """What may be moved for; (): everything."""
    append: str = "chain"
    """`slotted` only: how a sequence goes on behind a shared partial slot; or "peel", by copying that."""

    def __post_init__(self) -> None:
        def need(ok: bool, what: str) -> None:
            if not ok:
                raise ValueError(what)

        need(self.block_size >= 1, f"block_size is {self.block_size}; it must be 1 or more")
        need(1 <= self.engines <= ENGINES_MAX, f"engines is {self.engines}; it must be 1 to {ENGINES_MAX}")
        need(1 <= self.live <= LIVE_MAX, f"live is {self.live}; it must be 1 to {LIVE_MAX}")
        need(
            self.pool_tokens <= POOL_MAX,
            f"pool_tokens is {self.pool_tokens}; the baselines keep lists of blocks, so it must be at most {POOL_MAX}",
        )
        need(
            self.pool_tokens >= 2 * self.block_size * (self.engines if self.sharing == "partitioned" else 1),
            f"pool_tokens is {self.pool_tokens}; a pool has at least two blocks of {self.block_size}",
        )
        need(
            self.page >= 1 and self.block_size % self.page == 0,
            f"page is {self.page}; it must divide the block size, {self.block_size}",
        )
        need(self.hours is None or 0 < self.hours < 1e6, f"hours is {self.hours}; it must be above 0")
        need(self.rate is None or 0 < self.rate < 1e6, f"rate is {self.rate}; it must be above 0")
        need(0 <= self.watermark < 1, f"watermark is {self.watermark}; it must be 0 or more and below 1")
        need(self.step_gap_us >= 0, f"step_gap_us is {self.step_gap_us}; it must be 0 or more")
        need(self.copy_tokens_s > 0, f"copy_tokens_s is {self.copy_tokens_s}; it must be above 0")
        need(self.prefill_us >= 0 and self.decode_ms >= 0, "prefill_us and decode_ms must be 0 or more")
        need(self.ramp_s is None or 0 <= self.ramp_s < 1e9, f"ramp_s is {self.ramp_s}; it must be 0 or more")


class PolicyFault(RuntimeError):
    """A policy broke the interface's contract; the run's figures would mean nothing."""


class Outcome(NamedTuple):
    """One run done."""

    run: Run
    rows: list[Row]
    recorder: Recorder
    policies: tuple[Policy, ...] = ()
    """As the run left them, one a pool; none where they were in other processes."""


class Job:
    """One request from the moment it may run until it is finished or dropped."""

    __slots__ = (
        "admitted",
        "ask_at",
        "attempt",
        "base",
        "fresh",
        "capacity",
        "cpu_ns",
        "engine",
        "grow_ns",
        "key",
        "length",
        "number",
        "pool",
        "prompt",
        "refused",
        "request",
        "round",
        "running",
        "total",
    )

    def __init__(
        self, number: int, round_: int, request: int, prompt: int, total: int, engine: int, pool: Lane
    ) -> None:
        self.number = number
        self.round = round_
        self.request = request
        self.prompt = prompt
        self.total = total
        self.engine = engine
        self.pool = pool
        self.key = 0
        """Place in line over all pools."""
        self.attempt = 0
        """Events carry it: those of an attempt that was preempted are stale."""
        self.admitted = False
        self.refused = False
        self.running = False
        self.base: float | None = None
        """When the present attempt's prompt was written: decoding counts from here.  None: not yet."""
        self.fresh = 0
        """Prompt tokens being computed, until they are written."""
        self.length = 0
        self.ask_at = 0
        self.capacity = 0
        self.cpu_ns = 0
        self.grow_ns = 0


class Lane:
    """One policy instance and the line before it."""

    __slots__ = ("awaiting", "blocked", "policy", "prefilling", "queue", "running")

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.queue: deque[Job] = deque()
        self.running = 0
        self.blocked = False
        """The head of the line was refused, and nothing has finished since."""
        self.awaiting = False
        """It was refused because its prefix is being computed: a prompt that is written ends that, too."""
        self.prefilling = 0
        """Prompt tokens whose slots are taken and that are being computed."""

    def gauges(self) -> Gauges:
        """The policy's, with prompts counted as held from admission on.

        Their slots are spoken for, unlike the room that sequences have to grow into; without this `reserved_pct` would
        be about prefill times."""
        gauges, n = self.policy.gauges(), self.prefilling
        if not n:
            return gauges
        return gauges._replace(
            reserved=gauges.reserved - n, private=gauges.private + n, tokens_held=gauges.tokens_held + n
        )


class _Round:
    """Who is done in one pass over the trace, and who waits for whom."""

    __slots__ = ("done", "left", "waiting")

    def __init__(self, requests: int) -> None:
        self.done = bytearray(requests)
        self.left = requests
        self.waiting: dict[int, list[int]] = {}
        """Request -> requests parked until it is done."""


PREFILLED, ASK, FINISH, ARRIVE, RAMP = range(5)


class Engine:
    def __init__(
        self,
        trace: Trace,
        config: ReplayConfig,
        instances: list[Policy],
        expander: Expander | None,
        progress: Progress | None,
    ) -> None:
        self.trace = trace
        self.config = config
        self.pools = [Lane(policy) for policy in instances]
        self.expander = expander
        self.progress = progress
        self.clock: Callable[[], int] = time.thread_time_ns
        """What a policy's calls are measured with, in ns."""
        self.horizon = math.inf if config.hours is None else config.hours * 3600.0
        self.recorder = Recorder(
            expected=len(trace) if config.hours is None else None,
            horizon_s=None if config.hours is None else self.horizon,
        )
        self.written = Written(trace, rounds=config.hours is not None)
        self.clocked = (trace.t is not None or config.rate is not None) and not config.closed_loop
        self.random = random.Random(config.seed)
        self.events: list[tuple[float, int, int, Job | None, int]] = []
        self.ticks = 0
        self.lines = 0
        self.jobs: dict[int, Job] = {}
        """In the system: waiting in line or running."""
        self.running = 0
        self.rounds: dict[int, _Round] = {0: _Round(len(trace))}
        self.cursor = (0, 0)
        self.arrival_s = 0.0
        self.allowed = config.live
        """Requests that may be in the system, in closed loop."""
        self.ramp_gap_s = 0.0
        self.freed: list[tuple[int, int]] = []
        """Heap of (round, request) that were passed over in closed loop and may run now."""
        self.parked: set[int] = set()
        """Arrived, but what they build on has not finished."""
        self.finished = 0
        self.compacting: list[Compacting] = [
            policy for policy in instances if config.compaction != "off" and isinstance(policy, Compacting)
        ]
        self.rest_at = REST_EVERY_S
        step_s = config.decode_ms * 1e-3
        gap_s = min(config.step_gap_us * 1e-6, step_s)
        self.idle_share = gap_s / step_s if step_s else 0.0
        """Of the time in which sequences decode and no prompt is computed."""
        # A round lasts as long as the recording, and the mean gap between requests more.
        if trace.t is not None:
            span = trace.t[-1] - trace.t[0]
            self.round_s = span + span / max(1, len(trace) - 1)
            if self.round_s <= 0:
                self.round_s = 1.0
        else:
            self.round_s = 0.0

    # --- The loop ---

    def run(self) -> Recorder:
        recorder = self.recorder
        events = self.events
        now = 0.0
        if self.clocked:
            self._plan_arrival()
        else:
            ramp = (
                mean_request_s(self.trace, self.config) if self.config.ramp_s is None else self.config.ramp_s
            )
            self.ramp_gap_s = ramp / self.config.live
            if self.ramp_gap_s > 0:
                self.allowed = 1
                self._at(self.ramp_gap_s, RAMP, None)
            self._fill(now)
        handled = 0
        while events:
            at, _, kind, job, attempt = heappop(events)
            if job is not None and (job.attempt != attempt):
                continue
            if kind == RAMP and not self.jobs and self._exhausted():
                continue  # the trace is over before the loop was full
            if recorder.sampler is not None and recorder.sampler.next < at:
                self._read(at)
            if self.compacting:
                self._compact(now, at)
            now = at
            self._happen(kind, job, now)
            self._fill(now)
            handled += 1
            if self.progress is not None and handled % PROGRESS_EVERY == 0:
                self.progress(recorder.progress(now))
        assert not self.jobs, "events ran out with requests in the system"
        recorder.end = now
        if recorder.sampler is not None:
            self._read(now)
            recorder.sampler.finish(
                add_counters([pool.policy.counters() for pool in self.pools]), recorder.totals()
            )
        return recorder

    def _happen(self, kind: int, job: Job | None, now: float) -> None:
        """What was planned for this moment."""
        if kind == RAMP:
            self._ramp(now)
        elif job is None:
            self._arrive(now)
        elif kind == PREFILLED:
            self._prefilled(job, now)
        elif kind == ASK:
            self._ask(job, now)
        else:
            self._finish(job, now)

    def _read(self, until: float) -> None:
        """Bring the samples up to `until`; nothing has changed since the last event."""
        sampler = self.recorder.sampler
        assert sampler is not None
        sampler.reading(
            until,
            add_gauges([pool.gauges() for pool in self.pools]),
            add_counters([pool.policy.counters() for pool in self.pools]),
            self.recorder.totals(),
        )

    def _compact(self, start: float, now: float) -> None:
        """Hands on what the device left idle from `start` to `now`, in which nothing has happened."""
        if self.config.compaction == "forced":
            if now >= self.rest_at:
                self.rest_at = now + REST_EVERY_S
                for policy in self.compacting:
                    policy.rest(now)
            return
        # One device: while it computes anybody's prompt nobody's pool has a gap.
        if any(pool.prefilling for pool in self.pools):
            return
        tokens = (now - start) * self.config.copy_tokens_s * (self.idle_share if self.running else 1.0)
        if tokens > 0:
            for policy in self.compacting:
                policy.gap(tokens / len(self.compacting), now)

    def _at(self, when: float, kind: int, job: Job | None) -> None:
        self.ticks += 1
        heappush(self.events, (when, self.ticks, kind, job, 0 if job is None else job.attempt))

    # --- Arrival ---

    def _next(self) -> tuple[int, int]:
        """The next request of the trace, round after round."""
        round_, request = self.cursor
        self.cursor = (round_, request + 1) if request + 1 < len(self.trace) else (round_ + 1, 0)
        if request == 0 and round_:
            self.rounds[round_] = _Round(len(self.trace))
        return round_, request

    def _exhausted(self) -> bool:
        return self.cursor[0] > 0 and self.config.hours is None

    def _plan_arrival(self) -> None:
        """Put the next arrival into the future, if there is one."""
        if self._exhausted():
            return
        round_, request = self.cursor
        if self.config.rate is not None:
            self.arrival_s += self.random.expovariate(self.config.rate)
        else:
            assert self.trace.t is not None
            self.arrival_s = round_ * self.round_s + self.trace.t[request] - self.trace.t[0]
        if self.arrival_s < self.horizon:
            self._at(self.arrival_s, ARRIVE, None)

    def _arrive(self, now: float) -> None:
        round_, request = self._next()
        if not self._park(round_, request):
            self._enqueue(round_, request)
        self._plan_arrival()

    def _park(self, round_: int, request: int) -> bool:
        """True if the request has to wait for another one; it is then kept under that one."""
        state = self.rounds[round_]
        trace = self.trace
        before = trace.previous[request]
        if before < 0 or state.done[before]:
            parent = trace.parent[request]
            if parent < 0 or state.done[parent] or trace.keep[request] <= trace.prompt_len[parent]:
                return False
            before = parent
        state.waiting.setdefault(before, []).append(request)
        return True

    def _done(self, job: Job) -> None:
        """The request is finished or dropped: whoever waited for it may come."""
        del self.jobs[job.number]
        round_ = job.round
        state = self.rounds[round_]
        state.done[job.request] = 1
        state.left -= 1
        for request in state.waiting.pop(job.request, ()):
            if self._park(round_, request):
                continue
            if self.clocked:
                self._enqueue(round_, request)
            else:
                heappush(self.freed, (round_, request))
        if not state.left:
            del self.rounds[round_]
            self.written.forget(round_)

    def _enqueue(self, round_: int, request: int) -> None:
        trace = self.trace
        number = round_ * len(trace) + request
        if self.config.engines == 1:
            engine = 0
        elif self.config.routing == "sticky":
            engine = (
                _scatter(round_ * trace.sessions + trace.session[request], self.config.seed)
                % self.config.engines
            )
        else:
            engine = _scatter(number, self.config.seed + 1) % self.config.engines
        pool = self.pools[engine % len(self.pools)]
        job = Job(number, round_, request, trace.prompt_len[request], trace.total[request], engine, pool)
        self.lines += 1
        job.key = self.lines
        self.jobs[number] = job
        pool.queue.append(job)

    def _ramp(self, now: float) -> None:
        """Closed loop: one more may be in the system."""
        self.allowed += 1
        if self.allowed < self.config.live and now < self.horizon:
            self._at(self.allowed * self.ramp_gap_s, RAMP, None)

    def _pull(self, now: float) -> bool:
        """Closed loop: bring one more request into the system, if any may come."""
        if self.freed and now < self.horizon:
            self._enqueue(*heappop(self.freed))
            return True
        # Ends: each round holds requests that wait for none, and those before it are passed over once.
        while not self._exhausted() and now < self.horizon:
            round_, request = self._next()
            if not self._park(round_, request):
                self._enqueue(round_, request)
                return True
        return False

    # --- Admission ---

    def _fill(self, now: float) -> None:
        """Admit while there is room for one more, the longest waiting first."""
        live = self.config.live
        pools = self.pools
        while self.running < live:
            best: Lane | None = None
            for pool in pools:
                if (
                    pool.queue
                    and not pool.blocked
                    and (best is None or pool.queue[0].key < best.queue[0].key)
                ):
                    best = pool
            if best is not None:
                self._admit(best, now)
            elif self.clocked or len(self.jobs) >= self.allowed or not self._pull(now):
                return

    def _admit(self, pool: Lane, now: float) -> None:
        job = pool.queue[0]
        recorder = self.recorder
        tokens = b"" if self.expander is None else self.expander.prompt(job.request, job.round)
        engine = job.engine if len(self.pools) == 1 else 0
        clock = self.clock
        began = clock()
        answer = pool.policy.admit(job.number, tokens, engine, now)
        took = clock() - began
        job.cpu_ns += took
        if isinstance(answer, Refused):
            self._refused(pool, job, answer, now)
            return
        pool.queue.popleft()
        self._check_admitted(pool, job, answer)
        self._note(Event.ADMITTED, job)
        job.running = True
        job.base = None
        job.fresh = job.prompt - answer.hit
        pool.prefilling += job.fresh
        pool.running += 1
        self.running += 1
        recorder.alloc_at.append(now)
        recorder.alloc_ns.append(took)
        if not job.admitted:
            job.admitted = True
            if recorder.sampler is None:
                recorder.start(now)
            ideal = self.written.ideal(job.request, job.round)
            recorder.admitted(
                now,
                job.number,
                job.prompt,
                job.total - self.trace.keep[job.request],
                answer.hit,
                ideal,
                pool.policy.granularity,
            )
            if recorder.picture_due(now):
                recorder.picture(now, b"".join(each.policy.blocks() for each in self.pools))
        job.length, job.capacity, job.ask_at = job.prompt, answer.capacity, answer.ask_at
        self._at(now + (job.prompt - answer.hit) * self.config.prefill_us * 1e-6, PREFILLED, job)

    def _note(self, event: Event, job: Job) -> None:
        if self.recorder.schedule is not None:
            self.recorder.schedule.note(event, job.number, job.length)

    def _check_admitted(self, pool: Lane, job: Job, answer: Admitted) -> None:
        if not 0 <= answer.hit < job.prompt:
            raise PolicyFault(f"{pool.policy.name}: hit of {answer.hit} for a prompt of {job.prompt} tokens")
        if not job.prompt <= answer.ask_at <= answer.capacity:
            raise PolicyFault(f"{pool.policy.name}: {answer} for a prompt of {job.prompt} tokens")

    def _refused(self, pool: Lane, job: Job, answer: Refused, now: float) -> None:
        recorder = self.recorder
        if answer.never:
            recorder.never_at.append(now)
            self._drop(pool, now)
            return
        if not answer.needed and self._others_run(pool):
            # Somebody is computing the same prefix: it is asked for again when that is written.
            pool.blocked = pool.awaiting = True
            return
        if not job.refused:
            job.refused = True
            recorder.refused_at.append(now)
            self._judge(pool, answer.needed, now)
            if recorder.held_at_first_refusal is None:
                recorder.held_at_first_refusal = self._distinct_live(now)
        if self._others_run(pool):
            pool.blocked = True
        else:
            recorder.stuck_at.append(now)
            self._drop(pool, now)

    def _others_run(self, pool: Lane) -> bool:
        """Whether anybody runs whose end, or whose prompt, would change the answer that the line's head got."""
        return pool.running > 0

    def _judge(self, pool: Lane, needed: int, now: float) -> None:
        """Was the refusal a pseudo-OOM, and had another engine's pool what was needed?"""
        watermark = self.config.watermark
        if room(pool.gauges(), watermark) >= needed:
            self.recorder.pseudo_oom_at.append(now)
        if any(each is not pool and room(each.gauges(), watermark) >= needed for each in self.pools):
            self.recorder.elsewhere_at.append(now)

    def _distinct_live(self, now: float) -> int:
        """Distinct tokens of running requests: prompts in whole, outputs as far as they have come."""
        ends: list[tuple[int, int, int]] = []
        for job in self.jobs.values():
            if not job.running:
                continue
            end = job.prompt
            if job.base is not None:
                written = (
                    int((now - job.base) / (self.config.decode_ms * 1e-3)) if self.config.decode_ms else 0
                )
                end = min(job.total, job.prompt + written)
            ends.append((job.round, job.request, end))
        return distinct(self.trace, ends)

    def _drop(self, pool: Lane, now: float) -> None:
        """The head of the line leaves without having run."""
        job = pool.queue.popleft()
        self._done(job)

    # --- Running ---

    def _prefilled(self, job: Job, now: float) -> None:
        clock = self.clock
        began = clock()
        job.pool.policy.prefilled(job.number, now)
        job.cpu_ns += clock() - began
        job.pool.prefilling -= job.fresh
        job.fresh = 0
        self._note(Event.PREFILLED, job)
        self.written.write(job.request, job.prompt, job.round)
        if job.pool.awaiting:
            job.pool.blocked = job.pool.awaiting = False
        job.base = now
        self._plan(job)

    def _plan(self, job: Job) -> None:
        """The job decodes up to where it must ask, or to its end."""
        assert job.base is not None
        to = min(job.ask_at, job.total)
        when = job.base + (to - job.prompt) * self.config.decode_ms * 1e-3
        # Asking is for the next token: a sequence that ends exactly there has nothing to ask.
        self._at(when, FINISH if to == job.total else ASK, job)

    def _ask(self, job: Job, now: float) -> None:
        job.length = job.ask_at
        self._note(Event.DECODED, job)
        pool, policy = job.pool, job.pool.policy
        clock = time.perf_counter_ns
        began = clock()
        answer = policy.grow(job.number, job.length + 1, now)
        job.grow_ns += clock() - began
        if answer is None and job.length < job.capacity:
            job.ask_at = job.capacity
            self._plan(job)
            return
        if answer is None:
            self._judge(pool, job.length + 1 - job.capacity, now)
        while answer is None:
            number = policy.victim()
            victim = None if number is None else self.jobs.get(number)
            if victim is None or victim.pool is not pool:
                raise PolicyFault(f"{policy.name}: victim() named {number}, which does not run here")
            if victim is job and self._hopeless(pool):
                # Alone, and the whole pool is too small for it.
                self._stop(job, now)
                self.recorder.never_at.append(now)
                self._done(job)
                return
            self.recorder.preempted_at.append(now)
            self._stop(victim, now)
            # Its place in line stays, which is before all that have not run yet.
            pool.queue.appendleft(victim)
            if victim is job:
                return
            began = clock()
            answer = policy.grow(job.number, job.length + 1, now)
            job.grow_ns += clock() - began
        if not job.length < answer.ask_at <= answer.capacity:
            raise PolicyFault(f"{policy.name}: {answer} for growth beyond {job.length} tokens")
        job.ask_at, job.capacity = answer.ask_at, answer.capacity
        self._plan(job)

    def _hopeless(self, pool: Lane) -> bool:
        """Whether nobody's end could make room for the growth that was just refused."""
        return pool.running == 1

    def _stop(self, job: Job, now: float) -> None:
        """Take a running job off the pool."""
        began = time.perf_counter_ns()
        job.pool.policy.abort(job.number, now)
        self._note(Event.STOPPED, job)
        job.grow_ns += time.perf_counter_ns() - began
        job.pool.prefilling -= job.fresh
        job.fresh = 0
        job.attempt += 1
        job.running = False
        job.pool.running -= 1
        self.running -= 1
        # Room that a preemption made is for the growth that forced it: the line waits for somebody to finish.
        job.pool.blocked = job.pool.running > 0

    def _finish(self, job: Job, now: float) -> None:
        pool = job.pool
        output = b"" if self.expander is None else self.expander.output(job.request, job.round)
        clock = self.clock
        began = clock()
        pool.policy.finish(job.number, output, now)
        job.cpu_ns += clock() - began
        self._note(Event.FINISHED, job)
        self.written.write(job.request, job.total, job.round)
        pool.running -= 1
        self.running -= 1
        pool.blocked = False
        recorder = self.recorder
        recorder.finished_at.append(now)
        recorder.cpu_ns.append(job.cpu_ns)
        recorder.grow_ns.append(job.grow_ns)
        self._done(job)
        self.finished += 1
        if self.finished % COLLECT_EVERY == 0:
            gc.collect()


def distinct(trace: Trace, ends: Iterable[tuple[int, int, int]]) -> int:
    """Distinct tokens in the first `end` of each of these sequences, given as (round, request, end)."""
    keep, owner = trace.keep, trace.owner
    reach: dict[tuple[int, int], int] = {}
    for round_, j, end in ends:
        while j >= 0:
            if end > keep[j]:
                part = (round_, j)
                reach[part] = max(reach.get(part, 0), end)
                end = keep[j]
            j = owner[j]
    return sum(end - keep[j] for (_, j), end in reach.items())


def mean_request_s(trace: Trace, config: ReplayConfig) -> float:
    """Time of a request on average, if all that it inherits is found."""
    fresh = sum(max(1, prompt - keep) for prompt, keep in zip(trace.prompt_len, trace.keep, strict=True))
    output = sum(trace.total) - sum(trace.prompt_len)
    return (fresh * config.prefill_us * 1e-6 + output * config.decode_ms * 1e-3) / len(trace)


def _scatter(number: int, seed: int) -> int:
    """A well-mixed 64-bit value of both (SplitMix64)."""
    x = (number * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _U64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _U64
    return x ^ (x >> 31)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """No garbage collection inside measured calls; see COLLECT_EVERY."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def replay(
    trace: Trace,
    config: ReplayConfig,
    *,
    expander: Expander | None = None,
    index: int = 0,
    nodes: Nodes | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Run a trace through a policy.

    `expander` may be shared between runs of the same trace (it caches); `index` is the run's number in the result;
    with `nodes` of the trace (its rounds told apart if `hours` are asked for) the run's offline optimum is found, too.
    Raises ValueError for settings that do not fit, PolicyFault where a policy breaks its contract."""
    count = config.engines if config.sharing == "partitioned" else 1
    share = config.pool_tokens // count
    instances = [
        registry.make(
            config.policy,
            PolicyConfig(
                pool_tokens=share - share % config.block_size,
                block_size=config.block_size,
                eviction=config.eviction,
                watermark=config.watermark,
                max_length=trace.max_length,
                engine_count=config.engines if count == 1 else 1,
                fill_holes=config.fill_holes,
                page=config.page,
                emptying=config.emptying,
                compaction=config.compaction,
                planner=config.planner,
                purposes=config.purposes,
                append=config.append,
            ),
        )
        for _ in range(count)
    ]
    began = time.perf_counter()
    with quiet_collector():
        engine = Engine(trace, config, instances, expander or Expander(trace), progress)
        engine.recorder.schedule = None if nodes is None else Schedule()
        recorder = engine.run()
    run = Run(
        trace=trace.name,
        policy=config.policy,
        block_size=config.block_size,
        sharing=config.sharing,
        engines=config.engines,
        routing=config.routing,
        eviction=config.eviction,
        live=config.live,
        pool_tokens=config.pool_tokens,
        usable_tokens=sum(instance.gauges().usable for instance in instances),
        wall_s=round(time.perf_counter() - began, 3),
        series=series(recorder),
        pictures=recorder.pictures,
        compaction=config.compaction,
        emptying=config.emptying,
    )
    best: dict[int, int] | None = None
    if nodes is not None and recorder.schedule is not None:
        with quiet_collector():
            best = optimum(nodes, recorder.schedule, config.pool_tokens)
    return Outcome(run, rows(recorder, run, index, hits_optimum=best), recorder, tuple(instances))


def peak_live_tokens(trace: Trace, config: ReplayConfig) -> int:
    """Most distinct tokens that running sequences hold at once, once through the trace, in a pool without limits."""
    yardstick = Yardstick(trace)
    endless = msgspec.structs.replace(config, policy="yardstick", hours=None, engines=1, sharing="shared")
    with quiet_collector():
        Engine(trace, endless, [yardstick], None, None).run()
    return yardstick.distinct_max


def max_concurrent_sessions(
    trace: Trace, config: ReplayConfig, *, limit: int = 1024, expander: Expander | None = None
) -> int:
    """Largest `live`, up to `limit`, with no preemption and at most 1 % of requests refused; 0 if even 1 has some.

    Closed loop, once through the trace: about log2(limit) runs."""
    trial = msgspec.structs.replace(config, hours=None, rate=None, closed_loop=True)
    expander = expander or Expander(trace)

    def fits(live: int) -> bool:
        recorder = replay(trace, msgspec.structs.replace(trial, live=live), expander=expander).recorder
        refused = len(recorder.refused_at) + len(recorder.never_at)
        return not recorder.preempted_at and refused <= 0.01 * len(trace)

    good, bad = 0, limit + 1
    if fits(limit):
        return limit
    bad = limit
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good
