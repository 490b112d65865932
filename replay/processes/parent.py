"""A replay by real processes: one daemon, several clients, and this one, which samples and puts the parts together.

         parent ── Control ──► kvslotd ◄── Client ── client 0 .. n-1
           │                                             │
           └────────────── board: clocks, news ──────────┘

The parent takes part in the clocks: it reads the pool's gauges at every moment of the sampling grid, and nobody gets
further past that moment than the window before it has.  When all have ended it has the daemon's books recounted, merges
what the clients took down by simulated time, and works out the figures exactly as for a run in one process.

Compaction.  A replay goes as fast as it can: simulated hours pass in seconds, and a daemon that compacts by itself may
not be able to follow a pool that changes so fast.  So under `forced` everybody stands still every `REST_EVERY_S`
simulated seconds, as in one process: the parent holds its clock, the clients stop at most a window later, between two
steps and with their sequences running; the daemon is asked to compact to rest; then all go on.  Sequences follow what
was moved under them, and read it back where it lies now.  A pause ends after `REST_S` real seconds, rest or not, as
clients that have not stepped for longer would not be relied upon to follow.
"""

from __future__ import annotations

import math
import secrets
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec
import numpy as np

from kvslot.api.client import Control
from kvslot.api.wire.messages import Compaction
from kvslot.replay.bounds import Written
from kvslot.replay.clairvoyant import Nodes, optimum
from kvslot.replay.engine import REST_EVERY_S, Outcome, Progress, ReplayConfig, distinct
from kvslot.replay.metrics import ClientReport, CompactionReport, ProcessReport, Quantiles, Run
from kvslot.replay.policies import Counters, Gauges
from kvslot.replay.processes import board as boards
from kvslot.replay.processes import daemon
from kvslot.replay.processes.board import Board
from kvslot.replay.processes.client import TASK, Notes, Task, Trouble
from kvslot.replay.recorder import PICTURE_AT, Event, Recorder, Sampler, Schedule, Totals, rows, series
from kvslot.replay.traces import Trace

CLIENT: Final = "kvslot.replay.processes.client"
CLIENTS_MAX: Final = 64
POLL_S: Final = 0.1
SETTLE_S: Final = 5.0
"""How long the daemon may take to clean up after clients that have ended or died."""
PICTURE_MAX: Final = 4096
REST_S: Final = 1.5
"""Real seconds that everybody stands still for compaction, at the most; the core relies on who stepped 2 s ago."""
REST_POLL_S: Final = 0.02
"""A daemon leaves the processor to those who ask it something: who looks too often makes it slow."""


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a replay by real processes is carried out."""

    clients: int = 4
    socket: str = ""
    """Of a daemon that runs already; empty: one is started."""
    window_s: float = boards.WINDOW_S
    """Simulated seconds that one process may be ahead of another."""
    night: float | None = None
    """Share of the slots down to which the cache is evicted before each compaction to rest, as in a quiet night: then
    there is something to move."""
    rest_every_s: float = REST_EVERY_S
    """Simulated seconds between two of them."""
    kill: tuple[int, float] | None = None
    """For tests: this client is killed once this share of the requests has been admitted."""
    plant: tuple[int, int, int] = (-1, 0, 0)
    """For tests: client, admission, slots by which its first extent is moved."""


class ProcessFault(RuntimeError):
    """Real processes did what they must not: a wrong slot, an audit that fails, something left behind, a death."""


class _Child:
    """A client process."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.number = number
        self.process = process
        self.log = log
        self.killed = False


def replay_processes(
    trace: Trace,
    config: ReplayConfig,
    settings: ProcessSettings,
    *,
    index: int = 0,
    nodes: Nodes | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Runs a trace through a daemon with several client processes; `Outcome.run.processes` tells of them.

    With `nodes` of the trace the run's offline optimum is found, too.
    Raises ValueError for settings that do not fit, ProcessFault where something was found wrong, DaemonFault."""
    check(config, settings)
    began = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(_orderly())
        where = stack.enter_context(daemon.folder())
        socket = settings.socket or stack.enter_context(daemon.running(where, config))
        control = stack.enter_context(Control(socket))
        pool = _pool(control, config, settings)
        board = boards.make(settings.clients, trace.sessions, len(trace), settings.window_s)
        stack.callback(boards.unmake, board)
        if (trace.t is not None or config.rate is not None) and not config.closed_loop:
            for session in range(trace.sessions):
                board.owner[session] = session % settings.clients + 1
        task = Task(
            trace=trace,
            config=config,
            clients=settings.clients,
            socket=socket,
            salt=secrets.token_hex(16),
            window_s=settings.window_s,
            with_schedule=nodes is not None,
            plant=settings.plant,
        )
        (where / TASK).write_bytes(msgspec.msgpack.encode(task))
        children = stack.enter_context(_children(where, board, settings.clients))
        moves = _Moves(control, pool["pool"], config, settings)
        watch = _Watch(trace, config, settings, control, board, children, moves, progress)
        watch.run(where)
        if board.in_system:
            raise ProcessFault(f"{board.in_system} requests hold a place in the system that nobody runs")
        notes = _notes(where, children)
        audit = _audit(control, settings)
        latency = [row for row in control.inspect("latency") if row["count"]]
    recorder = _together(trace, config, notes, watch)
    report = _report(trace, config, settings, notes, children, audit, latency)
    if moves.on:
        ranges = sum(each.moved_ranges for each in report.clients)
        report = msgspec.structs.replace(report, compaction=moves.report(ranges))
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
        usable_tokens=pool["usable"],
        wall_s=round(time.perf_counter() - began, 3),
        series=series(recorder),
        pictures=recorder.pictures,
        via="socket",
        processes=report,
        compaction=moves.mode,
    )
    best = None if nodes is None else optimum(nodes, _schedule(notes), config.pool_tokens)
    if best is not None:
        # Who is ahead by less than the window found what by its clock was still to be written: as in `_ideal`.
        for number, hit in zip(recorder.number, recorder.hit, strict=True):
            best[number] = max(hit, best.get(number, 0))
    return Outcome(run, rows(recorder, run, index, hits_optimum=best), recorder)


def check(config: ReplayConfig, settings: ProcessSettings) -> None:
    """Raises ValueError where a run cannot be done by real processes."""

    def need(ok: bool, what: str) -> None:
        if not ok:
            raise ValueError(what)

    need(
        config.policy == "slotted", f"{config.policy} has no daemon: only slotted can be reached via a socket"
    )
    need(
        1 <= settings.clients <= CLIENTS_MAX, f"clients is {settings.clients}; it must be 1 to {CLIENTS_MAX}"
    )
    need(
        settings.clients <= config.live,
        f"{settings.clients} clients cannot share {config.live} live sequences",
    )
    need(config.hours is None, "via a socket a trace is gone through once: --hours is for --via inproc")
    need(config.sharing == "shared", "via a socket all clients share one pool: --sharing shared")
    need(config.engines == 1, "via a socket each client is an engine: say --clients, not --engines")
    need(config.fill_holes, "--unsplit is not a daemon's setting: --via inproc")
    need(
        settings.night is None or config.compaction == "forced",
        "a quiet night is for --compaction forced: what it leaves is compacted",
    )
    need(settings.window_s > 0, f"window_s is {settings.window_s}; it must be above 0")


def _pool(control: Control, config: ReplayConfig, settings: ProcessSettings) -> dict[str, Any]:
    """The daemon's first pool, which must be the size that the run is about."""
    pool = next(control.inspect("pools"))
    blocks = config.pool_tokens // config.block_size
    if (pool["block_size"], pool["blocks"]) != (config.block_size, blocks):
        size = pool["block_size"] * pool["blocks"]
        raise ValueError(
            f"the pool at {settings.socket} has {size} slots in blocks of {pool['block_size']}: "
            f"say --block-size {pool['block_size']} --pool-tokens {size}"
        )
    if pool["granularity"] != "token":
        raise ValueError(f"the pool at {settings.socket} is opaque: it has no slots for single tokens")
    return pool


# -- processes --------------------------------------------------------------------------------------------------------


@contextmanager
def _orderly() -> Iterator[None]:
    """SIGTERM ends this process as an interrupt does, so that nothing is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def told(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, told)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _children(where: Path, board: Board, clients: int) -> Iterator[list[_Child]]:
    """The client processes; none is left afterwards."""
    children: list[_Child] = []
    shared = [board.descriptor, *board.bells]
    try:
        for number in range(clients):
            log = where / f"client-{number}.log"
            with log.open("wb") as out:
                process = subprocess.Popen(
                    [sys.executable, "-Im", CLIENT, str(where), str(number), *map(str, shared)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    pass_fds=shared,
                    start_new_session=True,
                )  # fmt: skip
            children.append(_Child(number, process, log))
        yield children
    finally:
        board.stop()
        for child in children:
            if child.process.poll() is None:
                child.process.kill()
        for child in children:
            child.process.wait()


class _Moves:
    """What the daemon's compaction does meanwhile, and the pauses in which it is asked for."""

    def __init__(self, control: Control, pool: str, config: ReplayConfig, settings: ProcessSettings) -> None:
        self._control = control
        self._pool = pool
        self._night = settings.night
        self._every_s = settings.rest_every_s
        self._base = self._last = self._status()
        asked = config.compaction
        self.mode = self._base.mode if asked == "off" else asked
        """What the run is told to be: what was asked for, else what the daemon does by itself."""
        self.on = self.mode != "off"
        self.rest_at = self._every_s if asked == "forced" else math.inf
        self._rests = self._cut = 0
        self._rests_s = 0.0

    def _status(self) -> Compaction:
        return self._control.defrag("status", pool=self._pool)[0]

    def look(self) -> Counters:
        """What has been moved since the run began."""
        self._last = self._status()
        since = self._since()
        return Counters(
            copied_tokens=0,
            moved_tokens=since["moved_tokens"],
            extents=0,
            extent_tokens=0,
            evicted_tokens=0,
            moves=since["published"],
            moves_abandoned=since["abandoned_leased"] + since["abandoned_freed"],
            given_back=since["blocks_given"],
            overtaken=since["overtaken"],
        )

    def rest(self, now: float) -> None:
        """Everybody stands still: everything is moved that gains something, or as much as there is time for."""
        began = time.monotonic()
        if self._night is not None:
            self._evict(self._night)
        self._control.defrag("once", pool=self._pool)
        while (told := self._status()).once and time.monotonic() - began < REST_S:
            time.sleep(REST_POLL_S)
        self._rests += 1
        self._cut += told.once
        self._rests_s += time.monotonic() - began
        self.rest_at = now + self._every_s

    def _evict(self, share: float) -> None:
        """The cache, as far as nobody holds it, until no more than that share of the slots is in use."""
        row = next(self._control.inspect("pools", limit=1))
        left = row["usable"] - row["free"] - int(share * row["usable"])
        while left > 0 and (
            gone := self._control.evict(left, pool=self._pool)
        ):  # no more at once than others can wait
            left -= gone

    def _since(self) -> dict[str, int]:
        return {name: getattr(self._last, name) - getattr(self._base, name) for name in COUNTED}

    def report(self, ranges: int) -> CompactionReport:
        """What came of it; `ranges` of running sequences were moved."""
        since = self._since()
        since["blocks_given_back"] = since.pop("blocks_given")
        return CompactionReport(
            mode=self._last.mode,
            rests=self._rests,
            rests_cut=self._cut,
            rests_s=round(self._rests_s, 3),
            moved_ranges=ranges,
            too_short=not self._rests and self.rest_at < math.inf,
            **since,
        )


COUNTED: Final = (
    "plans",
    "planned",
    "published",
    "abandoned_leased",
    "abandoned_freed",
    "deferred",
    "over_budget",
    "failed",
    "moved_tokens",
    "blocks_given",
    "overtaken",
)
"""Of what a daemon tells of its compaction: counts since it was started."""


class _Watch:
    """Samples, shows progress and looks after the clients until all have ended."""

    def __init__(
        self,
        trace: Trace,
        config: ReplayConfig,
        settings: ProcessSettings,
        control: Control,
        board: Board,
        children: list[_Child],
        moves: _Moves,
        progress: Progress | None,
    ) -> None:
        self._trace = trace
        self._config = config
        self._kill = settings.kill
        self._control = control
        self._board = board
        self._children = children
        self._moves = moves
        self._progress = progress
        self.sampler: Sampler | None = None
        self.recorder = Recorder(expected=len(trace), horizon_s=None)

    def run(self, where: Path) -> None:
        """Until the last client has ended; raises ProcessFault where one of them found something wrong."""
        board = self._board
        told = 0.0
        while True:
            slowest = board.slowest()
            self._sample(slowest)
            now = time.monotonic()
            if now - told > POLL_S:
                told = now
                self._tell()
                if self._look_after(where):
                    break
            need = board.clock(board.me)
            board.await_(need)
            if board.slowest() < need or math.isinf(board.slowest()):
                board.nap(POLL_S / 2)
        self._sample_now(max((board.news_at(), 0.0)))
        if self.sampler is not None:
            self.sampler.finish(self._counters, self._totals())

    def _sample(self, slowest: float) -> None:
        board = self._board
        if self.sampler is None:
            first = board.first_at()
            if math.isinf(first):
                if not math.isinf(slowest):
                    board.promise(slowest + board.window_s)
                return
            self.sampler = Sampler(first)
        if slowest >= self.sampler.next and not math.isinf(slowest):
            self._sample_now(slowest)
        moves = self._moves
        if slowest >= moves.rest_at and not math.isinf(slowest):
            moves.rest(slowest)
        board.promise(min(self.sampler.next, moves.rest_at))

    def _sample_now(self, until: float) -> None:
        if self.sampler is None:
            first = self._board.first_at()
            if math.isinf(first):
                return
            self.sampler = Sampler(first)
        gauges, self._counters = _reading(next(self._control.inspect("pools", limit=1)))
        if self._moves.on:
            told = self._moves.look()
            self._counters = self._counters._replace(
                moved_tokens=told.moved_tokens,
                moves=told.moves,
                moves_abandoned=told.moves_abandoned,
                given_back=told.given_back,
                overtaken=told.overtaken,
            )
        self.sampler.reading(until, gauges, self._counters, self._totals())
        taken = len(self.recorder.pictures)
        share = self._share()
        if taken < len(PICTURE_AT) and share >= PICTURE_AT[taken]:
            blocks = _picture(self._control, self._config)
            self.recorder.picture(until, blocks, share)

    def _totals(self) -> Totals:
        board = self._board
        return Totals(
            *(
                board.sum(what)
                for what in (boards.PROMPT, boards.HIT, boards.REFUSALS, boards.PSEUDO, boards.PREEMPTED)
            )
        )

    def _share(self) -> float:
        return self._board.sum(boards.ADMITTED) / max(1, len(self._trace))

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(min(1.0, self._share()))

    def _look_after(self, where: Path) -> bool:
        """Whether all have ended."""
        board = self._board
        if self._kill is not None and self._share() >= self._kill[1]:
            child = self._children[self._kill[0]]
            self._kill = None
            child.killed = True
            child.process.kill()
        over = True
        for child in self._children:
            code = child.process.poll()
            if code is None:
                over = False
            elif board.state(child.number) != boards.DEAD and code:
                if not child.killed:
                    raise _trouble(where, child)
                board.bury(child.number)
        return over


def _trouble(where: Path, child: _Child) -> Exception:
    file = where / f"trouble-{child.number}"
    if file.exists():
        trouble = msgspec.msgpack.decode(file.read_bytes(), type=Trouble)
        if trouble.kind == "slot":
            return ProcessFault(trouble.text)
        return ProcessFault(f"client {child.number} failed: {trouble.text}")
    text = child.log.read_text(encoding="utf-8", errors="replace")[-2000:].strip()
    return ProcessFault(
        f"client {child.number} ended with {child.process.returncode}: {text or 'it said nothing'}"
    )


# -- what the daemon shows --------------------------------------------------------------------------------------------


def _reading(row: dict[str, Any]) -> tuple[Gauges, Counters]:
    """The pool's row of `inspect` in the replay's terms."""
    unwritten = row["unwritten"]
    padding = row["padding"]
    gauges = Gauges(
        usable=row["usable"],
        blocks_in_use_slots=(row["blocks"] - row["blocks_free"]) * row["block_size"] - padding,
        tokens_held=row["cached"]
        + row["private"]
        - unwritten
        - row["duplicate_tokens"]
        - row["peeled_tokens"],
        private=row["private"] - unwritten,
        cached=row["cached"],
        reserved=unwritten,
        duplicates=row["duplicate_tokens"],
        peeled=row["peeled_tokens"],
        fenced=row["fenced"],
        quarantined=row["quarantined"],
        moving=row["moving"],
        free=row["free"],
        evictable=row["evictable"],
        largest_free_run=row["largest_free_run"],
        live_sequences=row["sequences"],
    )
    counters = Counters(
        copied_tokens=row["copied_tokens"],
        moved_tokens=row["moved_tokens"],
        extents=row["extents_given"],
        extent_tokens=row["extent_tokens"],
        evicted_tokens=row["evicted_tokens"],
    )
    return gauges, counters


def _picture(control: Control, config: ReplayConfig) -> bytes:
    """One byte a block or bucket of blocks: how much of it the map names as not free."""
    blocks = config.pool_tokens // config.block_size
    edges = np.zeros(blocks * config.block_size + 1, dtype=np.int32)
    for row in control.inspect("map"):
        if row["state"] == "free":
            continue
        extents = np.array(row["extents"], dtype=np.int64).reshape(-1, 2)
        np.add.at(edges, extents[:, 0], 1)
        np.add.at(edges, extents.sum(axis=1), -1)
    taken = np.concatenate(([0], np.cumsum(np.minimum(np.cumsum(edges[:-1]), 1))))
    buckets = min(blocks, PICTURE_MAX)
    at = np.arange(buckets + 1, dtype=np.int64) * blocks // buckets * config.block_size
    return (np.diff(taken[at]) * 255 // np.diff(at)).astype(np.uint8).tobytes()


def _audit(control: Control, settings: ProcessSettings) -> float:
    """Nothing of ours is left in the daemon, and its books are right; milliseconds that recounting took."""
    end = time.monotonic() + SETTLE_S
    while True:
        pool = next(control.inspect("pools"))
        left = {what: pool[what] for what in ("sequences", "private", "fenced", "quarantined") if pool[what]}
        if not left or settings.socket:
            break  # in a daemon that was there before, others may run
        if time.monotonic() > end:
            raise ProcessFault(f"all clients have ended, and the daemon still holds {left}")
        time.sleep(0.02)
    audited = control.audit()
    if audited.faults:
        raise ProcessFault("the daemon's books are wrong: " + "; ".join(audited.faults[:5]))
    return audited.milliseconds


# -- putting it together ----------------------------------------------------------------------------------------------


def _notes(where: Path, children: list[_Child]) -> dict[int, Notes]:
    """What the clients took down, by number; a killed one took nothing down."""
    return {
        child.number: msgspec.msgpack.decode((where / f"notes-{child.number}").read_bytes(), type=Notes)
        for child in children
        if not child.killed
    }


def _array(notes: dict[int, Notes], name: str, like: str) -> np.ndarray[tuple[int], np.dtype[Any]]:
    parts = [np.frombuffer(each.arrays[name], dtype=np.dtype(like)) for each in notes.values()]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.dtype(like))


def _together(trace: Trace, config: ReplayConfig, notes: dict[int, Notes], watch: _Watch) -> Recorder:
    """One recorder as a run in one process would have left it."""
    recorder = watch.recorder
    recorder.sampler = watch.sampler
    recorder.end = max((each.end_s for each in notes.values()), default=0.0)
    at = _array(notes, "admitted_at", "d")
    order = np.argsort(at, kind="stable")
    groups: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("admitted_at", ("number", "prompt", "hit", "fresh")),
        ("alloc_at", ("alloc_ns",)),
        ("finished_at", ("cpu_ns", "grow_ns")),
        ("refused_at", ()),
        ("pseudo_oom_at", ()),
        ("preempted_at", ()),
        ("never_at", ()),
        ("stuck_at", ()),
    )
    for key, others in groups:
        order = np.argsort(_array(notes, key, "d"), kind="stable")
        for name in (key, *others):
            target: array[Any] = getattr(recorder, name)
            target.frombytes(_array(notes, name, target.typecode)[order].tobytes())
    _ideal(trace, notes, recorder)
    if recorder.refused_at:
        recorder.held_at_first_refusal = _held(trace, config, notes, recorder.refused_at[0])
    return recorder


def _ideal(trace: Trace, notes: dict[int, Notes], recorder: Recorder) -> None:
    """What each admission could have found at best: all that anybody had written by then."""
    written = Written(trace)
    lines = zip(
        _array(notes, "written_at", "d").tolist(),
        _array(notes, "written_number", "q").tolist(),
        _array(notes, "written_length", "q").tolist(),
        strict=True,
    )
    queue = sorted(lines)
    place = 0
    for when, number, hit in zip(recorder.admitted_at, recorder.number, recorder.hit, strict=True):
        while place < len(queue) and queue[place][0] <= when:
            written.write(queue[place][1], queue[place][2])
            place += 1
        # Who is ahead by less than the window may find what by its clock is still to be written.
        recorder.ideal.append(max(hit, written.ideal(number)))
        recorder.rounding.append(0)


def _schedule(notes: dict[int, Notes]) -> Schedule:
    """Who ran when, of all clients; each client's own order is kept."""
    schedule = Schedule()
    at = _array(notes, "event_at", "d")
    columns = [_array(notes, name, "q") for name in ("event", "event_number", "event_length")]
    for place in np.argsort(at, kind="stable"):
        event, number, length = (int(column[place]) for column in columns)
        schedule.note(Event(event), number, length)
    return schedule


def _held(trace: Trace, config: ReplayConfig, notes: dict[int, Notes], when: float) -> int:
    """Distinct tokens of the requests that ran at that time, prompts in whole, outputs as far as they had come."""
    ends: list[tuple[int, int, int]] = []
    for number, start, base, stop in zip(
        _array(notes, "span_number", "q").tolist(),
        _array(notes, "span_from", "d").tolist(),
        _array(notes, "span_written", "d").tolist(),
        _array(notes, "span_to", "d").tolist(),
        strict=True,
    ):
        if start <= when < stop:
            done = int((when - base) / (config.decode_ms * 1e-3)) if base <= when and config.decode_ms else 0
            ends.append((0, number, min(trace.total[number], trace.prompt_len[number] + done)))
    return distinct(trace, ends)


def _report(
    trace: Trace,
    config: ReplayConfig,
    settings: ProcessSettings,
    notes: dict[int, Notes],
    children: list[_Child],
    audit_ms: float,
    latency: list[dict[str, Any]],
) -> ProcessReport:
    clients: list[ClientReport] = []
    for child in children:
        each = notes.get(child.number)
        if each is None:
            clients.append(ClientReport(client=child.number, pid=child.process.pid, killed=True))
            continue
        told = each.statistics
        trips = np.frombuffer(each.arrays["round_trips_ns"], dtype=np.uint64) / 1000
        p50, p99, top = np.percentile(trips, (50, 99, 100)) if len(trips) else (0.0, 0.0, 0.0)
        clients.append(
            ClientReport(
                client=child.number,
                pid=child.process.pid,
                requests=len(each.arrays["admitted_at"]) // 8,
                finished=len(each.arrays["finished_at"]) // 8,
                round_trips=told.calls,
                waits=told.waits,
                frames_sent=told.frames_sent,
                frames_received=told.frames_received,
                refills=told.refills,
                refused=told.refused,
                steps=told.steps_submitted,
                appended_tokens=each.appended,
                painted_tokens=each.painted,
                verified_tokens=each.verified,
                allocate_us=Quantiles(round(float(p50), 1), round(float(p99), 1), round(float(top), 1)),
                moved_ranges=told.moves,
            )
        )
    return ProcessReport(
        trace=trace.name,
        block_size=config.block_size,
        pool_tokens=config.pool_tokens,
        window_s=settings.window_s,
        clients=clients,
        painted_tokens=sum(each.painted_tokens for each in clients),
        verified_tokens=sum(each.verified_tokens for each in clients),
        audit_ms=round(audit_ms, 3),
        daemon=latency,
    )
