"""`kvslotctl bench rpc`: what a client sees of the daemon, beside what it would see of a C echo server.

One daemon, its pool filled over with chats until it evicts, and on it one after the other:

    one         one blocking client
    python      one client of the Python library, beside the same echo
    append      tokens appended in the Python library, which asks the daemon for room ahead of need
    open        8 clients on a timetable of 10,000 operations a second
    saturated   8 clients, each sending the next operation as soon as the last was answered
    record      the same with and without a recording of it, by turns
    page        8 clients on the timetable, with and without somebody at the live page and a scraper, by turns
    large       7 clients on a timetable, with and without another that allocates 128k tokens
    batch       8 clients, 16 operations a frame
    death       another daemon: 1,000,000 nodes, of which a client that holds 200,000 is killed

An operation is one verb.  A client's are Allocate (300 tokens, the first half cached, the rest new, so that a full
pool evicts), Commit, Free, and again.  The timetable and operations/s count all three; the first and the last are
samples.  Without Commit nothing would be evicted: what is freed unpublished is free again.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from kvslot.api.client import Client
from kvslot.api.wire import Namespace
from kvslot.benchmarks.paths import hold
from kvslot.benchmarks.report import Document, Meta, Result, check_groups, meta, result
from kvslot.benchmarks.rig import (
    ALLOCATE,
    BATCH,
    COMMIT,
    FIRSTS,
    MANY_ALLOCATE,
    MANY_COMMIT,
    MANY_FREE,
    PAUSE_S,
    SAMPLED,
    Both,
    Daemon,
    Figures,
    Peer,
    Realtime,
    batch_cycle,
    cpu_s,
    figures,
    first_halves,
    hello,
    inspect,
    middle,
    play_once,
    race,
    reply_sizes,
    short_cycle,
)
from kvslot.benchmarks.tools import Echo, Load, Player, Process, Unavailable, build
from kvslot.benchmarks.traffic import Shape, noise, text, turns

GROUPS: Final = (
    "one",
    "python",
    "append",
    "open",
    "saturated",
    "record",
    "journal",
    "page",
    "large",
    "batch",
    "death",
)
"""In the order they run; the later ones leave the pool more broken up than chats do."""
CLIENTS: Final = 8
OPEN_RATE: Final = 10_000.0
"""Operations a second, all clients together."""
LARGE_TOKENS: Final = 131_072
LARGE_EVERY_S: Final = 0.25
"""Half of each is new: four a second keep eight accelerators busy that compute 32k tokens a second each."""
EAGER_ROUNDS: Final = 2
"""Of long prompts one after the other, which nothing could compute: to see the worst of it, not judged."""
APPENDS: Final = 10_000
STEP_S: Final = 0.001
"""Of an engine: shorter than any real one, so that answers have less time to come."""
PYTHON_TOGETHER: Final = 300
"""Requests of the Python client before the echo has its turn."""
SEQUENCES: Final = 64
OTHERS: Final = CLIENTS - 1
DEATH_WATCH_S: Final = 2.5
WATCH_EVERY_S: Final = 0.01
RECORDER_START_S: Final = 30.0
VIEWER_SETTLES_S: Final = 0.5
"""After its first map, which is a whole one."""
TURNOVER: Final = 1.15
"""How often the pool is filled over before anything is measured."""
CHATS: Final = Shape(turns_least=2, turns_most=12, long_share=0.0)

Progress = Callable[[str, float], None]


class Size(NamedTuple):
    """How much is done."""

    nodes: int = 60_000
    rounds: int = 15
    seconds: float = 0.6
    large_rounds: int = 9
    large_seconds: float = 2.0
    death_paths: int = 100_000
    death_depth: int = 10
    deaths: int = 7
    python_samples: int = 6_000
    steps: int = 400


FULL: Final = Size()
QUICK: Final = Size(
    nodes=5_000,
    rounds=3,
    seconds=0.3,
    large_rounds=3,
    large_seconds=1.0,
    death_paths=5_000,
    deaths=2,
    python_samples=1_500,
    steps=100,
)


class Bench(NamedTuple):
    """What the groups share."""

    tools: dict[str, Path]
    folder: Path
    daemon: Daemon
    peers: list[Peer]
    size: Size
    realtime: Realtime


def conversations(tokens: int) -> Iterator[bytes]:
    """Prompts of interleaved chats, each its whole history, until so many tokens of them were new."""
    histories: dict[int, bytes] = {}
    new = 0
    for turn in turns(CHATS):
        history = histories.get(turn.chat, b"") + text(CHATS, turn.chat, turn.start, turn.stop)
        if turn.last:
            histories.pop(turn.chat, None)
        else:
            histories[turn.chat] = history
        yield history
        new += turn.stop - turn.start
        if new >= tokens:
            return


def fill(daemon: Daemon, size: Size, report: Progress) -> None:
    """Chats until the pool is full and has turned over a little."""
    total = int(daemon.slots * TURNOVER)
    wanted = total / 512

    def told(count: int) -> None:
        report(f"filling a pool of {size.nodes:,} nodes", min(1.0, count / wanted))

    with Peer(daemon.socket, namespace="chats") as peer:
        peer.cache(conversations(total), told)


def short_players(bench: Bench, count: int, rate: float = 0.0, *, batched: bool = False) -> list[Player]:
    """`count` clients, `rate` operations a second each (0: closed loop)."""
    make = batch_cycle if batched else short_cycle
    return [
        Player([hello(f"client {index}")], make(bench.peers[index].namespace, seed(index)), rate)
        for index in range(count)
    ]


def seed(client: int) -> int:
    """Of a client's prompts."""
    return (1 << 24) + client * FIRSTS


def open_peers(daemon: Daemon) -> list[Peer]:
    """Sessions that hold the clients' namespaces open, with the first halves of their prompts cached."""
    peers = []
    for index in range(CLIENTS):
        peer = Peer(daemon.socket, namespace=f"client {index}")
        peer.cache(first_halves(seed(index)))
        peers.append(peer)
    return peers


# -- groups -----------------------------------------------------------------------------------------------------------


def us(name: str, what: str, value: float, samples: int, note: str = "") -> Result:
    """A row in microseconds."""
    return result(name, value, unit="us", what=what, samples=samples, note=note, suite="rpc")


def row(name: str, value: float, samples: int | None = None, note: str = "") -> Result:
    """A row with a budget."""
    return result(name, value, samples=samples, note=note, suite="rpc")


def absolutes(name: str, both: Both, what: str) -> list[Result]:
    """Medians over rounds of the times of both."""
    samples = sum(each.samples for each in both.daemon)
    return [
        us(f"{name}_{whose}us_{at_}", f"{what}, {words}: {label}", middle(rounds, at_), samples)
        for whose, words, rounds in (("", "kvslotd", both.daemon), ("echo_", "echo", both.echo))
        for at_, label in (("p50", "median"), ("p99", "99th percentile"), ("p999", "99.9th percentile"))
        if not (name == "open" and whose == "" and at_ == "p999")
    ] + [
        us(
            f"{name}_cpu_us",
            f"{what}: CPU time of kvslotd by operation",
            middle(both.daemon, "cpu_us"),
            samples,
        ),
        us(
            f"{name}_echo_cpu_us",
            f"{what}: CPU time of the echo by operation",
            middle(both.echo, "cpu_us"),
            samples,
        ),
    ]


def measure_one(bench: Bench) -> list[Result]:
    """One blocking client."""
    both = _race(bench, short_players(bench, 1))
    samples = sum(each.samples for each in both.daemon)
    return [
        row("one_p50", both.ratio("p50"), samples, both.spread("p50")),
        row("one_p99", both.ratio("p99"), samples, both.spread("p99")),
        *absolutes("one", both, "one client"),
    ]


def measure_open(bench: Bench) -> list[Result]:
    """Eight clients on a timetable."""
    both = _race(bench, short_players(bench, CLIENTS, OPEN_RATE / CLIENTS))
    samples = sum(each.samples for each in both.daemon)
    return [
        row("open_p99", both.ratio("p99"), samples, both.spread("p99")),
        row("open_us_p999", middle(both.daemon, "p999"), samples),
        *absolutes("open", both, "8 clients, 10k/s"),
    ]


def measure_saturated(bench: Bench) -> list[Result]:
    """Eight clients that never pause."""
    both = _race(bench, short_players(bench, CLIENTS))
    samples = sum(each.samples for each in both.daemon)
    return [
        row("saturated_rate", both.ratio("rate"), samples, both.spread("rate")),
        row("saturated_ops", middle(both.daemon, "rate"), samples),
        result(
            "saturated_echo_ops", middle(both.echo, "rate"), unit="/s", what="the echo's", samples=samples
        ),
        *absolutes("saturated", both, "8 clients saturated"),
    ]


def measure_record(bench: Bench) -> list[Result]:
    """Eight clients on a timetable; in every other round `kvslotctl record` is at work."""
    size = bench.size
    without: list[Figures] = []
    beside: list[Figures] = []
    told: list[dict[str, Any]] = []
    taken: list[float] = []
    with Load(
        bench.tools, bench.daemon.socket, short_players(bench, CLIENTS, OPEN_RATE / CLIENTS), bench.folder
    ) as load:
        load.run(min(size.seconds, 0.3))
        for index in range(size.rounds):
            for turn in ("wr", "rw")[index & 1]:
                with ExitStack() as stack:
                    recorder = stack.enter_context(_Recorder(bench)) if turn == "r" else None
                    time.sleep(PAUSE_S)
                    with bench.realtime(bench.daemon.pid, load.pid):
                        before = cpu_s(bench.daemon.pid)
                        of_recorder = cpu_s(recorder.process.pid) if recorder else 0.0
                        found = load.run(size.seconds)
                        seen = figures(found, SAMPLED, cpu_s(bench.daemon.pid) - before)
                    if recorder is not None:
                        taken.append((cpu_s(recorder.process.pid) - of_recorder) / size.seconds)
                        told.append(recorder.end())
                (without if recorder is None else beside).append(seen)
    lost = sum(each["lost_requests"] for each in told)
    recorded = sum(each["requests"] for each in told)
    return [
        *_beside("record", "while recorded", "without a recording", beside, without),
        result(
            "record_recorder_cpu", 100 * statistics.median(taken), unit="%", what="of a processor, for the recorder",
            samples=len(taken), note=f"{recorded:,} requests recorded, {lost:,} lost",
        ),
    ]  # fmt: skip


def _beside(
    group: str, how: str, versus: str, with_it: list[Figures], without: list[Figures]
) -> list[Result]:
    """Eight clients on a timetable with something beside them and without it: ratios, and what they are of."""
    both = Both(with_it, without)
    samples = sum(each.samples for each in with_it)
    shown = (("p50", "median"), ("p99", "99th percentile"), ("cpu_us", "CPU time of kvslotd by operation"))
    return [
        *(
            result(
                f"{group}_{name.removesuffix('_us')}_ratio", both.ratio(name), unit="x", ratio_to=versus,
                what=f"8 clients, 10k/s, {how}: {label}", samples=samples, note=both.spread(name),
            )
            for name, label in shown
        ),
        us(f"{group}_us_p99", f"8 clients, 10k/s, {how}: 99th percentile", middle(with_it, "p99"), samples),
        us(f"{group}_without_us_p99", "... and without", middle(without, "p99"), samples),
        us(f"{group}_cpu_us", f"CPU time of kvslotd by operation, {how}", middle(with_it, "cpu_us"), samples),
        us(f"{group}_without_cpu_us", "... and without", middle(without, "cpu_us"), samples),
    ]  # fmt: skip


def measure_journal(bench: Bench) -> list[Result]:
    """Eight clients on a timetable, and the same at another daemon that journals what a next start would take over."""
    size = bench.size
    plain: list[Figures] = []
    journaled: list[Figures] = []
    folder = bench.folder / "journal"
    folder.mkdir()
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(folder, slots=size.nodes * 512, journaled=True))
        fill(daemon, size, lambda words, share: None)
        peers = [stack.enter_context(peer) for peer in open_peers(daemon)]
        other = bench._replace(daemon=daemon, peers=peers, folder=folder)
        sides = [
            (
                each.daemon.pid,
                stack.enter_context(
                    Load(
                        bench.tools, each.daemon.socket, short_players(each, CLIENTS, OPEN_RATE / CLIENTS), each.folder
                    )
                ),
                rounds,
            )
            for each, rounds in ((bench, plain), (other, journaled))
        ]  # fmt: skip
        for _, load, _ in sides:
            load.run(min(size.seconds, 0.3))
        for index in range(size.rounds):
            for pid, load, rounds in sides if index & 1 else sides[::-1]:
                time.sleep(PAUSE_S)
                with bench.realtime(pid, load.pid):
                    before = cpu_s(pid)
                    found = load.run(size.seconds)
                    rounds.append(figures(found, SAMPLED, cpu_s(pid) - before))
    return _beside("journal", "journaled", "without a journal", journaled, plain)


def measure_page(bench: Bench) -> list[Result]:
    """Eight clients on a timetable; in every other round somebody has the live page open, and a scraper scrapes."""
    size = bench.size
    without: list[Figures] = []
    beside: list[Figures] = []
    answers = failures = 0
    with Load(
        bench.tools, bench.daemon.socket, short_players(bench, CLIENTS, OPEN_RATE / CLIENTS), bench.folder
    ) as load:
        load.run(min(size.seconds, 0.3))
        for index in range(size.large_rounds):
            for turn in ("wp", "pw")[index & 1]:
                with ExitStack() as stack:
                    viewer = stack.enter_context(_Viewer(bench)) if turn == "p" else None
                    time.sleep(VIEWER_SETTLES_S)
                    with bench.realtime(bench.daemon.pid, load.pid):
                        before = cpu_s(bench.daemon.pid)
                        found = load.run(size.large_seconds)
                        seen = figures(found, SAMPLED, cpu_s(bench.daemon.pid) - before)
                    if viewer is not None:
                        told = viewer.end()
                        answers += told["answers"]
                        failures += told["failures"]
                (without if viewer is None else beside).append(seen)
    both = Both(beside, without)
    samples = sum(each.samples for each in beside)
    return [
        row("page_p99", both.ratio("p99"), samples, both.spread("p99")),
        result(
            "page_p50_ratio", both.ratio("p50"), unit="x", ratio_to="without the page",
            what="8 clients, 10k/s, page open: median", samples=samples, note=both.spread("p50"),
        ),
        us("page_us_p99", "8 clients, 10k/s, page open: 99th percentile", middle(beside, "p99"), samples),
        us("page_without_us_p99", "... and without", middle(without, "p99"), samples),
        us("page_us_p999", "8 clients, 10k/s, page open: 99.9th percentile", middle(beside, "p999"), samples),
        us("page_without_us_p999", "... and without", middle(without, "p999"), samples),
        us("page_cpu_us", "CPU time of kvslotd by operation, page open", middle(beside, "cpu_us"), samples),
        us("page_without_cpu_us", "... and without", middle(without, "cpu_us"), samples),
        result(
            "page_failures", float(failures), unit="", what="answers to the page that were none",
            samples=answers,
        ),
    ]  # fmt: skip


class _Viewer:
    """Somebody at the page, and a scraper, beside a round."""

    def __init__(self, bench: Bench) -> None:
        admin = bench.daemon.socket.with_name("admin.sock")
        words = ["kvslot.benchmarks.viewer", str(admin), "5"]
        self.process = subprocess.Popen([sys.executable, "-Im", *words], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "begun\n":
            raise RuntimeError(f"the viewer did not begin ({self.process.wait()})")

    def end(self) -> dict[str, int]:
        """Ends it; what it had."""
        self.process.terminate()
        said, _ = self.process.communicate(timeout=RECORDER_START_S)
        told: dict[str, int] = json.loads(said)
        return told

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


class _Recorder:
    """`kvslotctl record` at work beside a round."""

    def __init__(self, bench: Bench) -> None:
        trace = bench.folder / "record.kvs.gz"
        self._json = bench.folder / "record.json"
        trace.unlink(missing_ok=True)
        words = ["record", str(trace), "--socket", str(bench.daemon.socket), "--json", str(self._json)]
        self.process = subprocess.Popen(
            [sys.executable, "-Im", "kvslot.cli.ctl", *words], stdout=subprocess.DEVNULL
        )
        until = time.monotonic() + RECORDER_START_S
        while not trace.exists():
            if self.process.poll() is not None or time.monotonic() > until:
                self.process.kill()
                raise RuntimeError(f"the recorder did not begin ({self.process.wait()})")
            time.sleep(0.01)

    def end(self) -> dict[str, Any]:
        """Ends it in good order; what it says of its trace."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(RECORDER_START_S)
        if code:
            raise RuntimeError(f"the recorder ended with {code}")
        (told,) = json.loads(self._json.read_text())["rows"]
        return dict(told)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _race(bench: Bench, players: Sequence[Player]) -> Both:
    size = bench.size
    return race(
        bench.daemon, bench.tools, players, bench.folder,
        rounds=size.rounds, seconds=size.seconds, kinds=SAMPLED, realtime=bench.realtime,
    )  # fmt: skip


def measure_batch(bench: Bench) -> list[Result]:
    """Frames of one and of sixteen operations, by turns; and the same without Commit."""
    for index, peer in enumerate(bench.peers):
        play_once(peer, batch_cycle(peer.namespace, seed(index)))
    size = bench.size
    many = (MANY_ALLOCATE, MANY_FREE)
    found: dict[str, list[Figures]] = {
        name: [] for name in ("single", "batched", "single plain", "batched plain")
    }
    with ExitStack() as stack:
        loads = {
            name: stack.enter_context(Load(bench.tools, bench.daemon.socket, players, bench.folder))
            for name, players in (
                ("single", short_players(bench, CLIENTS)),
                ("batched", short_players(bench, CLIENTS, batched=True)),
                ("single plain", plain(short_players(bench, CLIENTS))),
                ("batched plain", plain(short_players(bench, CLIENTS, batched=True))),
            )
        }
        loads["batched"].run(0.2)
        for index in range(size.rounds):
            for name, load in list(loads.items())[:: 1 if index & 1 else -1]:
                with bench.realtime(bench.daemon.pid, load.pid):
                    before = bench.daemon.cpu_s()
                    round_ = load.run(size.seconds)
                kinds = many if name.startswith("batched") else SAMPLED
                found[name].append(figures(round_, kinds, bench.daemon.cpu_s() - before))
                time.sleep(PAUSE_S)
    single, batched, plain_single, plain_batched = found.values()
    pairs, plain_pairs = Both(batched, single), Both(plain_batched, plain_single)
    samples = sum(each.samples for each in batched)
    without = "Allocate and Free alone, nothing published or evicted"
    return [
        row("batch_speedup", BATCH * pairs.ratio("rate"), samples, pairs.spread("rate", BATCH)),
        row("batch_ops", BATCH * middle(batched, "rate"), samples),
        us("batch_us_p50", "a frame of 16: median", middle(batched, "p50"), samples),
        us("batch_us_p99", "a frame of 16: 99th percentile", middle(batched, "p99"), samples),
        us(
            "batch_cpu_us", "16 a frame: CPU time of kvslotd by operation",
            middle(batched, "cpu_us") / BATCH, samples,
        ),
        result(
            "batch_plain_speedup", BATCH * plain_pairs.ratio("rate"), unit="x", ratio_to="single", suite="rpc",
            what=f"16 operations a frame, {without}", note=plain_pairs.spread("rate", BATCH),
        ),
        result(
            "batch_plain_ops", BATCH * middle(plain_batched, "rate"), unit="/s", suite="rpc",
            what="the same, absolute",
        ),
        result(
            "saturated_plain_ops", middle(plain_single, "rate"), unit="/s", suite="rpc",
            what=f"one operation a frame, {without}",
        ),
    ]  # fmt: skip


def plain(players: Sequence[Player]) -> list[Player]:
    """The same clients without their Commits."""
    return [
        Player(setup, [each for each in cycle if each.kind not in (COMMIT, MANY_COMMIT)], rate)
        for setup, cycle, rate in players
    ]


def measure_large(bench: Bench) -> list[Result]:
    """Seven on a timetable; in every other round an eighth allocates long prompts."""
    size = bench.size
    firsts = 2
    pace = 3 / LARGE_EVERY_S  # its operations come in threes
    without: list[Figures] = []
    paced: list[Figures] = []
    eager: list[Figures] = []
    itself: list[float] = []
    with ExitStack() as stack:
        peer = stack.enter_context(Peer(bench.daemon.socket, namespace="long"))
        peer.cache(first_halves(1 << 23, LARGE_TOKENS, firsts))
        cycle = short_cycle(peer.namespace, 1 << 23, LARGE_TOKENS, firsts)

        def load(players: Sequence[Player]) -> Load:
            return stack.enter_context(Load(bench.tools, bench.daemon.socket, players, bench.folder))

        others = load(short_players(bench, OTHERS, OPEN_RATE / CLIENTS))
        slow = load([Player([hello("long")], cycle, pace)])
        fast = load([Player([hello("long")], cycle)])
        for index in range(size.large_rounds + EAGER_ROUNDS):
            for turn in (("wp", "pw") if index < size.large_rounds else ("we", "ew"))[index & 1]:
                beside = {"w": None, "p": slow, "e": fast}[turn]
                pids = [bench.daemon.pid, others.pid] + ([beside.pid] if beside else [])
                # Eager ones keep the daemon busy all the time: at that priority the kernel would stop it now and then.
                with bench.realtime(*(pids if index < size.large_rounds else ())):
                    if beside:
                        beside.start(size.large_seconds)
                    found = others.run(size.large_seconds)
                    of_large = beside.finish() if beside else None
                {"w": without, "p": paced, "e": eager}[turn].append(figures(found, SAMPLED))
                if turn == "p" and of_large is not None:
                    figures(of_large, [ALLOCATE])
                    itself += [*of_large.latencies_us([ALLOCATE])]
    pairs = Both(paced, without[: len(paced)])
    samples = sum(each.samples for each in paced)
    worst = Both(eager, without[len(paced) :])
    itself.sort()
    return [
        row(
            "large_others_p99", pairs.ratio("p99"), samples,
            f"{1 / LARGE_EVERY_S:.0f} such prompts a second, half cached; {pairs.spread('p99')}",
        ),
        result(
            "large_others_p99_eager", worst.ratio("p99"), unit="x", ratio_to="without it",
            what="the same, long prompts one after the other without a pause", note=worst.spread("p99"),
        ),
        us("large_others_us_p99", "the others' 99th percentile beside it", middle(paced, "p99"), samples),
        us("large_others_us_p999", "... 99.9th percentile", middle(paced, "p999"), samples),
        us("large_without_us_p99", "... and without it", middle(without, "p99"), samples),
        us("large_us_p50", "the long Allocate itself: median", itself[len(itself) // 2], len(itself)),
    ]  # fmt: skip


# -- the Python client ------------------------------------------------------------------------------------------------


def measure_python(bench: Bench) -> list[Result]:
    """Round trips of the library's blocking client, in this process; the echo as in `one`."""
    size = bench.size
    half = 150
    times: dict[str, list[int]] = {"allocate": [], "commit": []}
    floors: list[Figures] = []
    clock = time.perf_counter_ns
    count = 0
    with (
        Client(str(bench.daemon.socket), namespace=Namespace(tenant="client 0"), map=False) as client,
        Load(bench.tools, bench.daemon.socket, short_players(bench, 1), bench.folder) as load,
        Echo(bench.tools, bench.folder / "echo.sock", reply_sizes(load.run(0.1))) as echo,
        Load(bench.tools, echo.socket, short_players(bench, 1), bench.folder) as same,
    ):
        while count < size.python_samples:
            with bench.realtime(bench.daemon.pid, os.getpid()):
                for _ in range(PYTHON_TOGETHER):
                    count += 1
                    first = noise(seed(0) + count % FIRSTS, 0, half)
                    prompt = first + noise((1 << 28) + count, half, 2 * half)
                    t0 = clock()
                    sequence = client.admit(prompt)
                    t1 = clock()
                    sequence.commit(2 * half)
                    t2 = clock()
                    sequence.free()
                    client.flush()
                    times["allocate"].append(t1 - t0)
                    times["commit"].append(t2 - t1)
            with bench.realtime(echo.pid, same.pid):
                floors.append(figures(same.run(0.1), SAMPLED))
            time.sleep(PAUSE_S)
    rows = []
    floor = middle(floors, "p50")
    for name, found in times.items():
        found.sort()
        p50, p99 = (found[int(share * len(found))] / 1e3 for share in (0.5, 0.99))
        note = f"{p50 / floor:.2f}x the echo under the C load generator"
        rows.append(us(f"python_{name}_us_p50", f"Python client, {name}: median", p50, len(found), note))
        rows.append(us(f"python_{name}_us_p99", f"Python client, {name}: 99th percentile", p99, len(found)))
    return rows


class Appending(NamedTuple):
    """What so many steps of a client cost."""

    whole_us: float  # CPU time by token
    append_us: float  # ... of the append calls alone
    daemon_us: float
    trips: int
    waits: int
    frames: int
    refills: int


def measure_append(bench: Bench) -> list[Result]:
    """64 sequences of a client, each with a token more at every step.

    The mean has everything in it that the client does for a token: the append, crossing into the next run, asking for
    runs ahead of need, both ends of a step, and the answers it reads there.  The device's time is spun away, as CUDA
    does where a process waits for it; a process that sleeps instead finds its caches cold after each step, which is
    measured beside it.
    """
    steps = max(bench.size.steps, -(-APPENDS // SEQUENCES))
    with Client(str(bench.daemon.socket), namespace=Namespace(tenant="append")) as client:
        spun = _append(bench, client, steps, _spin)
        slept = _append(bench, client, steps, time.sleep)
    tokens = steps * SEQUENCES
    note = f"{spun.refills} runs asked for, {steps} steps of {SEQUENCES} sequences; CPU time, all of a step included"
    return [
        row("append_us", spun.whole_us, tokens, note),
        row(
            "append_round_trips", spun.trips + slept.trips, 2 * tokens,
            f"{spun.waits + slept.waits} of them waits for room",
        ),
        row("frames_per_step", max(spun.frames, slept.frames) / steps, steps),
        us("append_alone_us", "the append calls alone", spun.append_us, tokens),
        us("append_asleep_us", "as append_us, the process asleep while the device computes", slept.whole_us, tokens),
        us("append_daemon_us", "CPU time of kvslotd for it, by token", spun.daemon_us, tokens),
    ]  # fmt: skip


def _append(bench: Bench, client: Client, steps: int, wait: Callable[[float], None]) -> Appending:
    clock = time.thread_time_ns
    whole = appends = 0
    # Of different lengths, so that they do not all come to the end of a run in the same step.
    sequences = [client.admit(noise((1 << 27) + index, 0, 200 + 7 * index)) for index in range(SEQUENCES)]
    began = client.statistics()
    before = bench.daemon.cpu_s()
    with bench.realtime(bench.daemon.pid, os.getpid()):
        for step in range(steps):
            t0 = clock()
            with client.step():
                t1 = clock()
                for sequence in sequences:
                    sequence.append(step)
                t2 = clock()
            whole += clock() - t0
            appends += t2 - t1
            wait(STEP_S)
    daemon = bench.daemon.cpu_s() - before
    ended = client.statistics()
    for sequence in sequences:
        sequence.free()
    client.settle()
    tokens = steps * SEQUENCES
    waits = ended.waits - began.waits
    return Appending(
        whole / tokens / 1e3,
        appends / tokens / 1e3,
        daemon * 1e6 / tokens,
        ended.calls - began.calls + waits,
        waits,
        ended.frames_sent - began.frames_sent,
        ended.refills - began.refills,
    )


def _spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


# -- death ------------------------------------------------------------------------------------------------------------


class Death(NamedTuple):
    """What one death looked like to the others."""

    before: Figures
    during: Figures
    hello_ms: float  # slowest while it was cleaned up
    hello_before_ms: float
    clean_ms: float  # from the kill until nothing of the session was left


def measure_death(
    tools: dict[str, Path], folder: Path, size: Size, realtime: Realtime, report: Progress
) -> list[Result]:
    """A daemon of many nodes, and a client with a fifth of them that is killed, again and again."""
    depth = size.death_depth
    victims = size.death_paths // 5
    nodes = size.death_paths * depth
    # Room for the victim's own slots and growth runs too: what is measured is its death, not a pool that is short.
    slots = nodes + victims * 48 + (1 << 19)
    deaths: list[Death] = []
    with Daemon(folder, slots=slots) as daemon, Peer(daemon.socket, namespace="paths") as peer:
        for start in range(victims, size.death_paths, 4096):
            hold(peer, start, min(4096, size.death_paths - start), depth, keep=False)
            report(f"a tree of {nodes:,} nodes", 0.6 * start / size.death_paths)
        peers = open_peers(daemon)
        bench = Bench(tools, folder, daemon, peers, size, realtime)
        # They publish nothing, so that the tree stays as it is.
        others = plain(short_players(bench, OTHERS, OPEN_RATE / CLIENTS))
        with Load(tools, daemon.socket, others, folder) as load:
            load.run(0.2)
            for index in range(size.deaths):
                report("deaths", 0.6 + 0.4 * index / size.deaths)
                deaths.append(_die(bench, load, victims, depth))
        held = inspect(daemon.socket, "pools")[0]
        for each in peers:
            each.close()
    note = f"{victims * depth:,} of {nodes:,} nodes; {held['nodes']:,} in the tree; {len(deaths)} deaths"
    ratios = [each.during.p99 / each.before.p99 for each in deaths]
    samples = sum(each.during.samples for each in deaths)
    slowest = max(each.hello_ms for each in deaths)
    return [
        row("death_others_p99", statistics.median(ratios), samples, f"{min(ratios):.2f} to {max(ratios):.2f}; {note}"),
        row("death_hello_ms", slowest, len(deaths)),
        result(
            "death_clean_ms", statistics.median(each.clean_ms for each in deaths), unit="ms", suite="rpc",
            what="from the kill until nothing of the session was left",
        ),
        result(
            "death_hello_before_ms", statistics.median(each.hello_before_ms for each in deaths), unit="ms",
            suite="rpc", what="slowest Hello in as much time before",
        ),
        us("death_others_us_p99", "the others' 99th percentile during clean-up",
           middle([each.during for each in deaths], "p99"), samples),
        us("death_before_us_p99", "... and before", middle([each.before for each in deaths], "p99"), samples),
    ]  # fmt: skip


def _die(bench: Bench, load: Load, victims: int, depth: int) -> Death:
    """One victim is started, holds its share, and is killed while the others go on."""
    socket = bench.daemon.socket
    words = [
        sys.executable,
        "-Im",
        "kvslot.benchmarks.victim",
        str(socket),
        "paths",
        "0",
        str(victims),
        str(depth),
    ]
    with Process(words) as victim:
        time.sleep(0.2)
        with bench.realtime(bench.daemon.pid, load.pid):
            load.start(2 * DEATH_WATCH_S)
            start = time.monotonic()
            before = _watch(socket, start + DEATH_WATCH_S, gone=False)
            killed_ns = time.monotonic_ns()
            victim.process.kill()
            after = _watch(socket, start + 2 * DEATH_WATCH_S - 0.05, gone=True)
            found = load.finish()
    if not after.ended_ns:
        raise RuntimeError(f"a session was not cleaned up within {DEATH_WATCH_S} s")
    times = found.samples["at_ns"]
    begun = found.began_ns + 200_000_000
    parts = [
        found._replace(samples=found.samples[(times >= low) & (times < high)])
        for low, high in ((begun, killed_ns), (killed_ns, after.ended_ns))
    ]
    return Death(
        figures(parts[0], SAMPLED),
        figures(parts[1], SAMPLED),
        after.hello_ms,
        before.hello_ms,
        (after.ended_ns - killed_ns) / 1e6,
    )


class Watched(NamedTuple):
    """What somebody saw who kept opening sessions."""

    hello_ms: float
    ended_ns: int  # when the victim was gone; 0: never


def _watch(socket: Path, until: float, *, gone: bool) -> Watched:
    """Opens a session every so often and looks whether the victim is there, until it is not (`gone`) or time is up."""
    slowest = 0.0
    while (now := time.monotonic()) < until:
        with Peer(socket, namespace="watch", name="watch"):
            slowest = max(slowest, 1e3 * (time.monotonic() - now))
        if gone and all(each["name"] != "victim" for each in inspect(socket, "sessions")):
            return Watched(slowest, time.monotonic_ns())
        time.sleep(WATCH_EVERY_S)
    return Watched(slowest, 0)


# -- all --------------------------------------------------------------------------------------------------------------


def run(
    groups: Sequence[str] = GROUPS,
    *,
    quick: bool = False,
    seed: int = 0,
    command: Sequence[str] | None = None,
    report: Progress | None = None,
    fifo: bool = True,
) -> Document:
    """Measures the budgets of `groups`, in order of GROUPS.  Raises ValueError for an unknown group.

    Without a C compiler nothing is measured, and `meta.skipped` says why.  `fifo` asks for SCHED_FIFO in rounds.
    """
    check_groups(groups, GROUPS)
    wanted = [group for group in GROUPS if group in groups]
    began = time.monotonic()
    realtime = Realtime(fifo)
    document = Document(meta=_meta(wanted, quick, seed, command, realtime), results=[])
    size = QUICK if quick else FULL

    def tell(words: str, share: float) -> None:
        if report is not None:
            report(words, share)

    try:
        tools = build()
    except Unavailable as missing:
        document.meta.skipped = dict.fromkeys(wanted, str(missing))
        return document
    shared = [group for group in wanted if group != "death"]
    steps = len(shared) + ("death" in wanted) + bool(shared)
    with tempfile.TemporaryDirectory(prefix="kvslot-") as name:
        if shared:
            document.results += _on_one_daemon(
                shared, tools, Path(name), size, realtime, tell, steps, document.meta
            )
        if "death" in wanted:
            document.results += measure_death(
                tools, Path(name), size, realtime,
                lambda words, share: tell(words, (steps - 1 + share) / steps),
            )  # fmt: skip
    document.meta.wall_s = round(time.monotonic() - began, 1)
    return document


def _on_one_daemon(
    groups: Sequence[str],
    tools: dict[str, Path],
    folder: Path,
    size: Size,
    realtime: Realtime,
    tell: Progress,
    steps: int,
    about: Meta,
) -> list[Result]:
    """The groups that share a filled pool."""
    measures: dict[str, Callable[[Bench], list[Result]]] = {
        "one": measure_one,
        "open": measure_open,
        "saturated": measure_saturated,
        "record": measure_record,
        "journal": measure_journal,
        "page": measure_page,
        "batch": measure_batch,
        "python": measure_python,
        "append": measure_append,
        "large": measure_large,
    }
    results: list[Result] = []
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(folder, slots=size.nodes * 512))
        fill(daemon, size, lambda words, share: tell(words, share / steps))
        about.loop = daemon.loop()
        peers = [stack.enter_context(peer) for peer in open_peers(daemon)]
        bench = Bench(tools, folder, daemon, peers, size, realtime)
        for index, group in enumerate(groups):
            tell(group, (1 + index) / steps)
            results += measures[group](bench)
    return results


def _meta(
    groups: Sequence[str], quick: bool, seed: int, command: Sequence[str] | None, realtime: Realtime
) -> Meta:
    about = meta(
        groups,
        quick=quick,
        seed=seed,
        cost_ns=0,
        command=command,
        suite="rpc",
        clock="wall clock (CLOCK_MONOTONIC)",
    )
    about.priority = realtime.words
    return about
