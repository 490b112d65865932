"""The rows of `bench compaction` that a running daemon gives: who notices that it compacts.

Before every round the pool is scattered: pieces of 2 to 8 tokens are cached, one in each block, so that hardly a block
is wholly free and every other one can be emptied.  Then a round is measured with compaction or without it, by turns.

    allocate    the C load generator allocates and frees on a timetable; in every other round the daemon compacts at
                half duty (`compaction_duty`), whatever else there is to do
    steps       an engine in this process: sequences that read their K and V through the mapping, write a token each,
                and wait a little between steps, where a host would schedule, sample and launch.  One daemon compacts
                in those gaps (`compaction = idle`), another one never does; off is held against off as well.  A daemon
                has to learn an engine's gaps: those rounds are told of apart

Slots of 64 KiB in 32 planes, as a model of 16 layers has them.  Where the kernel permits it both sides run under
SCHED_FIFO during a round, the thread that copies behind all others; the pool is touched beforehand.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kvslot.api.client import Client, Control, indices
from kvslot.api.wire import Namespace, messages
from kvslot.api.wire.errors import Disconnected
from kvslot.benchmarks.report import Document, Result, result
from kvslot.benchmarks.rig import (
    ALLOCATE,
    PAUSE_S,
    Both,
    Daemon,
    Figures,
    Peer,
    Realtime,
    figures,
    first_halves,
    hello,
    middle,
    short_cycle,
)
from kvslot.benchmarks.tools import Load, Player, Unavailable, build
from kvslot.benchmarks.traffic import noise

LAYOUT: Final[dict[str, object]] = {"layers": 16, "kv_heads": 8, "head_dim": 128, "dtype": "float16"}
SLOT_BYTES: Final = 16 * 2 * 8 * 128 * 2
BLOCK: Final = 16
LONGEST: Final = 8
"""Tokens of a piece: with room to grow into it has a block to itself as long as it runs."""
VERBS_EACH: Final = 128
"""In a frame."""
CLIENTS: Final = 4
FIRSTS: Final = 8
RATE: Final = 2_000.0
"""Operations a second, all clients together."""
ROOM: Final = 9_216
"""Slots that the scattered pieces leave to others."""
DUTY: Final = 0.5
COPIES_PRIORITY: Final = 5
"""Of the daemon's threads but its loop's, which is that of `rig.Realtime`."""
SEQUENCES: Final = 8
CONTEXT: Final = 384
PLANES_READ: Final = 3
"""Of each sequence in a step: as many as make a step of some milliseconds."""
GAP_S: Final = 0.001
WARM_STEPS: Final = 50
AWAKE_S: Final = 2.5
"""Until a daemon that had nothing to do has seen that there is something."""
SUITE: Final = "compaction"

Progress = Callable[[str, float], None]


class Size(NamedTuple):
    """How much is done."""

    slots: int = 26_624
    rounds: int = 8
    seconds: float = 1.0  # a busy daemon needs a fifth of one to see what there is to move
    step_cold: int = 12
    step_rounds: int = 20
    steps: int = 250


FULL: Final = Size()
QUICK: Final = Size(slots=16_384, rounds=4, step_cold=4, step_rounds=4, steps=150)


class Desk:
    """An operator's requests, each on a connection of its own: one that says nothing for long is closed."""

    def __init__(self, daemon: Daemon) -> None:
        self._path = str(daemon.socket)

    def evict(self, tokens: int) -> None:
        with Control(self._path) as control:
            control.evict(tokens)

    def defrag(self, action: str) -> messages.Compaction:
        with Control(self._path) as control:
            return control.defrag(action)[0]


class Scatter:
    """A session that leaves a piece in every block, and new ones each time."""

    def __init__(self, daemon: Daemon, control: Desk, size: Size) -> None:
        self._peer = Peer(daemon.socket, namespace="scatter")
        self._control = control
        self._slots = size.slots
        self._rng = random.Random(1)
        self._count = (size.slots - ROOM) // BLOCK
        self._serial = 0

    def evict(self) -> None:
        """Everything that nobody holds, so that all blocks are there to be had."""
        self._control.evict(self._slots)

    def __call__(self) -> None:
        """Scatters."""
        verbs: list[messages.Batchable] = []
        for sequence in range(1, 1 + self._count):
            self._serial += 1
            length = self._rng.randint(2, LONGEST)
            tokens = self._serial.to_bytes(4, "little") + noise(self._serial, 1, length)
            verbs += (
                messages.Allocate(1, self._peer.namespace, sequence, tokens),
                messages.Commit(1, sequence, length),
            )
        # Freed only together: what is freed before gives the next piece a place in the same block.
        verbs += [messages.Free(1, sequence) for sequence in range(1, 1 + self._count)]
        for start in range(0, len(verbs), VERBS_EACH):
            self._peer.batch(verbs[start : start + VERBS_EACH])

    def close(self) -> None:
        self._peer.close()


@contextlib.contextmanager
def realtime_of(realtime: Realtime, daemon: Daemon, *pids: int) -> Iterator[None]:
    """SCHED_FIFO for a daemon's loop and these processes, and for what copies, behind both."""
    with realtime(daemon.pid, *pids):
        others = [int(each.name) for each in Path(f"/proc/{daemon.pid}/task").iterdir()]
        others.remove(daemon.pid)
        if not realtime.why_not:
            for thread in others:
                os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(COPIES_PRIORITY))
        try:
            yield
        finally:
            for thread in others:
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


@contextlib.contextmanager
def compacted(
    size: Size, compaction: str, duty: float = DUTY
) -> Iterator[tuple[Daemon, Desk, Scatter, Path]]:
    """A daemon with a pool to scatter, its control, and what scatters it."""
    with (
        tempfile.TemporaryDirectory(prefix="kvslot-bench-") as name,
        Daemon(
            Path(name),
            slots=size.slots,
            layout=LAYOUT,
            prefault=True,
            compaction=compaction,
            compaction_duty=duty,
        ) as daemon,
    ):
        control = Desk(daemon)
        scatter = Scatter(daemon, control, size)
        try:
            yield daemon, control, scatter, Path(name)
        except (OSError, Disconnected) as error:
            raise RuntimeError(f"{error}; the daemon's last words:\n{daemon.words()}") from error
        finally:
            scatter.close()


def status(control: Desk) -> messages.Compaction:
    return control.defrag("status")


def row(name: str, value: float, samples: int | None = None, note: str = "", **words: str) -> Result:
    return result(name, value, samples=samples, note=note, suite=SUITE, **words)


# -- others' requests -------------------------------------------------------------------------------------------------


def measure_allocate(
    *, document: Document, quick: bool, report: Progress, realtime: Realtime
) -> list[Result]:
    """Allocate and Free of others, while the daemon compacts at half duty and while it does not."""
    size = QUICK if quick else FULL
    found: dict[bool, list[Figures]] = {True: [], False: []}
    duty: list[float] = []
    moved = 0
    with tempfile.TemporaryDirectory(prefix="kvslot-bench-") as folder:
        try:
            tools = build(Path(folder))
        except Unavailable as error:
            document.meta.skipped["allocate"] = str(error)
            return []
        with compacted(size, "off") as (daemon, control, scatter, where):
            document.meta.loop = daemon.loop()
            players = []
            peers = []
            for index in range(CLIENTS):
                peer = Peer(daemon.socket, namespace=f"client {index}")
                peers.append(peer)
                cycle = short_cycle(peer.namespace, 1 << 20 | index << 8, firsts=FIRSTS)
                # Nothing is published, or the pool would be full of it, and whole blocks free, before a round ends.
                cycle = [each for each in cycle if each.kind != 3]
                players.append(Player([hello(f"client {index}")], cycle, RATE / CLIENTS))
            with Load(tools, daemon.socket, players, where) as load:
                load.run(0.1)
                for nth in range(size.rounds):
                    for on in (True, False) if nth & 1 else (False, True):
                        report("others' requests", (nth + 0.5 * (on == bool(nth & 1))) / size.rounds)
                        scatter.evict()
                        for index, peer in enumerate(peers):
                            peer.cache(first_halves(1 << 20 | index << 8, firsts=FIRSTS))
                        scatter()
                        time.sleep(PAUSE_S)
                        before = status(control)
                        with realtime_of(realtime, daemon, load.pid):
                            if on:
                                control.defrag("once")
                            began = time.monotonic()
                            round_ = load.run(size.seconds)
                            took = time.monotonic() - began
                        control.defrag("stop")
                        after = status(control)
                        found[on].append(figures(round_, [ALLOCATE]))
                        if on:
                            duty.append((after.copy_seconds - before.copy_seconds) / took)
                            moved += after.moved_bytes - before.moved_bytes
            for peer in peers:
                peer.close()
    pairs = Both(found[True], found[False])
    samples = sum(each.samples for each in found[True])
    note = f"copying {100 * statistics.median(duty):.0f} % of the time, {moved / 1e6:,.0f} MB in {len(duty)} rounds"
    results = [
        row("allocate_p50", pairs.ratio("p50"), samples, f"{note}; {pairs.spread('p50')}"),
        row("allocate_p99", pairs.ratio("p99"), samples, pairs.spread("p99")),
    ]
    for side, words in ((True, "compacting"), (False, "not compacting")):
        for at in ("p50", "p99"):
            results.append(
                row(
                    f"allocate_{'on' if side else 'off'}_us_{at}", middle(found[side], at), samples,
                    unit="us", what=f"foreground Allocate, {words}: {at}",
                )
            )  # fmt: skip
    return results


# -- an engine's steps ------------------------------------------------------------------------------------------------


class Engine:
    """A loop that reads and writes the pool as an engine does."""

    def __init__(self, daemon: Daemon) -> None:
        self.client = Client(
            str(daemon.socket), namespace=Namespace(tenant="engine"), name="engine", movable=True
        )
        pool = self.client.pool
        self._planes = [pool.plane(name) for name in list(pool.planes)[:PLANES_READ]]
        self._sequences = [
            self.client.admit(noise(1 << 26 | index, 0, CONTEXT)) for index in range(SEQUENCES)
        ]
        self.checksum = 0.0
        with self.client.step():
            for sequence in self._sequences:
                sequence.commit(wait=False)
        self._appended = 0

    def steps(self, count: int) -> list[float]:
        """Seconds of each step, gaps between."""
        times = []
        for _ in range(count):
            began = time.perf_counter()
            with self.client.step():
                self._step()
            times.append(time.perf_counter() - began)
            time.sleep(GAP_S)
        self._trim()
        return times

    def _step(self) -> None:
        self._appended += 1
        for sequence in self._sequences:
            sequence.append(1 + self._appended % 1000)
            slots = indices.slot_indices(sequence)
            for plane in self._planes:
                read = plane[slots]
                plane[slots[-1]] = read[0]
                self.checksum += float(read[-1, 0, 0])

    def _trim(self) -> None:
        """Rolls back to the prompt, so that every round has the same to read."""
        for sequence in self._sequences:
            sequence.trim(keep_to=CONTEXT)
        self.client.settle()
        self._appended = 0

    def close(self) -> None:
        self._planes = []
        for sequence in self._sequences:
            sequence.free()
        self.client.settle()
        self.client.close()


class Seen(NamedTuple):
    """What a daemon counted while an engine ran its steps."""

    steps: int
    collisions: int
    moved_bytes: int
    copy_s: float


class Side:
    """A daemon, and the one engine on its pool."""

    def __init__(self, daemon: Daemon, control: Desk, scatter: Scatter, realtime: Realtime) -> None:
        self._daemon = daemon
        self._control = control
        self._scatter = scatter
        self._realtime = realtime
        self._engine = Engine(daemon)
        self._engine.steps(WARM_STEPS)

    def round(self, steps: int, rounds: list[list[float]]) -> Seen:
        """Scatters the pool, then appends the times of so many steps."""
        self._scatter.evict()
        self._scatter()
        # The daemon looks once a second whether there is anything to do; what it does then is not at its first moment.
        until = time.monotonic() + AWAKE_S
        while status(self._control).state in ("settled", "backed off") and time.monotonic() < until:
            self._engine.steps(10)
        before = status(self._control)
        with realtime_of(self._realtime, self._daemon, os.getpid()):
            rounds.append(self._engine.steps(steps))
        after = status(self._control)
        return Seen(
            steps,
            after.collisions - before.collisions,
            after.moved_bytes - before.moved_bytes,
            after.copy_seconds - before.copy_seconds,
        )

    def close(self) -> None:
        self._engine.close()


def measure_steps(*, document: Document, quick: bool, report: Progress, realtime: Realtime) -> list[Result]:
    """Steps on a pool that is compacted in their gaps, and twice on one that never is."""
    size = QUICK if quick else FULL
    rounds: dict[str, list[list[float]]] = {"on": [], "off": [], "again": []}
    cold: list[Seen] = []
    warm: list[Seen] = []
    with (
        compacted(size, "idle") as (daemon, control, scatter, _),
        compacted(size, "off") as (daemon_off, control_off, scatter_off, _),
    ):
        document.meta.loop = daemon.loop()
        with (
            contextlib.closing(Side(daemon, control, scatter, realtime)) as on,
            contextlib.closing(Side(daemon_off, control_off, scatter_off, realtime)) as off,
        ):
            for nth in range(size.step_cold):
                report("an engine's first steps", 0.3 * nth / size.step_cold)
                cold.append(on.round(size.steps, []))
            for nth in range(size.step_rounds):
                report("an engine's steps", 0.3 + 0.7 * nth / size.step_rounds)
                for at in range(3):
                    side = ("on", "off", "again")[(nth + at) % 3]
                    seen = (on if side == "on" else off).round(size.steps, rounds[side])
                    if side == "on":
                        warm.append(seen)
    return _steps(rounds, Seen(*map(sum, zip(*cold, strict=True))), Seen(*map(sum, zip(*warm, strict=True))))


def _steps(rounds: dict[str, list[list[float]]], cold: Seen, warm: Seen) -> list[Result]:
    """The rows, from times by side and round."""

    def at(share: float, side: str) -> list[float]:
        return [sorted(each)[int(share * len(each))] for each in rounds[side]]

    def against(share: float, side: str) -> list[float]:
        return [a / b for a, b in zip(at(share, side), at(share, "off"), strict=True)]

    samples = sum(map(len, rounds["on"]))
    off = [statistics.median(against(share, "again")) for share in (0.5, 0.99)]
    results = [
        row(
            "step_p50", statistics.median(against(0.5, "on")), samples,
            f"off against off: {off[0]:.3f}; {warm.moved_bytes / 1e6:,.0f} MB moved in {len(rounds['on'])} rounds, "
            f"{warm.moved_bytes / 1e9 / max(warm.copy_s, 1e-9):.1f} GB/s",
        ),
        row(
            "step_collisions_pct", 100 * warm.collisions / warm.steps, warm.steps,
            f"the daemon knew the engine for {cold.steps:,} steps",
        ),
        row(
            "step_collisions_cold_pct", 100 * cold.collisions / cold.steps, cold.steps,
            f"{cold.moved_bytes / 1e6:,.0f} MB moved, {cold.moved_bytes / 1e9 / max(cold.copy_s, 1e-9):.1f} GB/s",
            unit="%", what="the same while the daemon learned this engine's gaps",
        ),
        row(
            "step_p99", statistics.median(against(0.99, "on")), samples,
            f"off against off: {off[1]:.3f}, from {min(against(0.99, 'again')):.2f} to "
            f"{max(against(0.99, 'again')):.2f}",
            unit="x", what="the same, 99th percentile", ratio_to="off",
        ),
    ]  # fmt: skip
    for side, words in (("on", "on"), ("off", "off")):
        for share, name in ((0.5, "p50"), (0.99, "p99")):
            results.append(
                row(
                    f"step_{side}_us_{name}", 1e6 * statistics.median(at(share, side)), samples,
                    unit="us", what=f"engine step, compaction {words}: {name}",
                )
            )  # fmt: skip
    return results
