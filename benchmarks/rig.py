"""A daemon of its own to measure, sessions that fill it, and the rounds in which it and the echo take turns.

    kvslotd  <── load.c        Hello, then Allocate, Commit, Free over and over; Allocate and Free are samples
    echo.c   <── load.c        the same frames, and replies of the same lengths

The daemon is a real process on a socket in a temporary folder, started as a user starts it.  Its pool's memory is never
touched: what is measured is who answers, not who copies.  Both servers are driven by turns in short rounds, and what
counts is the median over rounds of the ratio of what they took, so that whatever else the machine does hits both.

Where the kernel permits it, both servers and the load run under SCHED_FIFO during a round: at normal priority a 99th
percentile is some other process's time slice, even that of the echo.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvslot.api.wire import VERSION, Namespace, Reader, decode_outgoing, encode, messages
from kvslot.benchmarks.tools import Echo, Frame, Load, Player, Round
from kvslot.benchmarks.traffic import noise

HELLO, ALLOCATE, COMMIT, FREE = 1, 2, 3, 4
MANY_ALLOCATE, MANY_COMMIT, MANY_FREE = 5, 6, 7
"""Kinds of frames in scripts."""

SAMPLED: Final = (ALLOCATE, FREE)
BATCH: Final = 16
"""Verbs in a frame where a row says that many."""
FIRSTS: Final = 64
"""Prompts' first halves that a connection goes through; they stay cached, since all are used all the time."""
FILL_BATCH: Final = 48
"""Verbs a frame while a pool is filled."""
COMMAND: Final = [sys.executable, "-Im", "kvslot.daemon"]
PRIORITY: Final = 10
START_S: Final = 60.0
PAUSE_S: Final = 0.05
"""Between rounds: others on the machine get their turn, and what the kernel owes them does not fall into ours."""

M = TypeVar("M", bound=msgspec.Struct)


class Manager:
    """A service manager that reads what it is told, and keeps nothing: enough for a daemon that journals for one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._thread = threading.Thread(target=self._read, name="manager", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            text, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 64)
            for each in descriptors:
                os.close(each)
            if text == b"END":
                return

    def close(self) -> None:
        """Ends it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.sendto(b"END", str(self.path))
        self._thread.join()
        self._socket.close()


class Daemon:
    """A running kvslotd with one pool of token slots, and nobody else's."""

    def __init__(
        self,
        folder: Path,
        *,
        slots: int,
        block_size: int = 16,
        dtype: str = "float16",
        layout: dict[str, object] | None = None,
        journaled: bool = False,
        **settings: object,
    ) -> None:
        """Starts it and waits for its socket.  `journaled`: as under a service manager, for the next start to go on.

        `dtype` is that of the one K and the one V of a slot, unless there is a `layout`; `settings` are top-level ones
        of the configuration.
        """
        self.socket = folder / "kvslot.sock"
        self.slots = slots
        self.log = folder / "kvslotd.log"
        config = folder / "kvslotd.toml"
        config.write_text(
            configuration(self.socket, slots, block_size, layout or one_number(dtype), settings),
            encoding="utf-8",
        )
        self._log = self.log.open("wb")
        command = [*COMMAND, "--config", str(config)]
        self._manager = Manager(folder) if journaled else None
        environ = dict(os.environ)
        if self._manager is not None:
            environ["NOTIFY_SOCKET"] = str(self._manager.path)
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=environ
        )
        self.pid = self.process.pid
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        until = time.monotonic() + START_S
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"the daemon ended with {self.process.returncode}:\n{self.words()}")
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(self.socket))
                return
            if time.monotonic() > until:
                raise RuntimeError(f"the daemon did not listen within {START_S:.0f} s:\n{self.words()}")
            time.sleep(0.02)

    def words(self) -> str:
        """The end of its log."""
        return self.log.read_bytes()[-2000:].decode(errors="replace")

    def loop(self) -> str:
        """The event loop it runs on, by its own word."""
        for line in self.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                if "loop" in (said := json.loads(line)):
                    return str(said["loop"])
        return ""

    def cpu_s(self) -> float:
        """CPU seconds it has used."""
        return cpu_s(self.pid)

    def close(self) -> None:
        """Ends it, by force if it will not."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        self._log.close()
        if self._manager is not None:
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def one_number(dtype: str) -> dict[str, object]:
    """The smallest layout: a K and a V of one number each."""
    return {"layers": 1, "kv_heads": 1, "head_dim": 1, "dtype": dtype}


def configuration(
    path: Path, slots: int, block_size: int, layout: dict[str, object], settings: dict[str, object]
) -> str:
    """The daemon's TOML: one pool of `slots` slots that can be handed out."""
    padding = 1 if block_size > 1 else 2
    pool = {
        "name": "bench",
        "blocks": -(-slots // block_size) + padding,
        "block_size": block_size,
    }
    top: dict[str, object] = {
        "socket": str(path),
        "prefault": False,
        "log_format": "json",
    }
    lines = [f"{name} = {_toml(value)}" for name, value in (top | settings).items()]
    lines += ["[[pool]]", *(f"{name} = {_toml(value)}" for name, value in pool.items())]
    lines.append(
        "layout = { " + ", ".join(f"{name} = {_toml(value)}" for name, value in layout.items()) + " }"
    )
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else f'"{value}"'


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used; all of its threads."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


class Peer:
    """A blocking session without the pool's memory: the wire and nothing else."""

    def __init__(self, path: Path, *, namespace: str = "", name: str = "bench", mapped: bool = False) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._reader = Reader(64 << 20)
        self._waiting: list[bytes | memoryview] = []
        hello = messages.Hello(1, VERSION, name, namespace=Namespace(tenant=namespace), map=mapped)
        self.welcome = self.call(hello, messages.Welcome)
        self.namespace = self.welcome.namespace

    def call(self, request: msgspec.Struct, kind: type[M]) -> M:
        """The reply to `request`, which must be a `kind`."""
        self.send(request)
        return self.receive(kind)

    def send(self, request: msgspec.Struct) -> None:
        """Sends it; `receive` must follow."""
        self._socket.sendall(encode(request))

    def receive(self, kind: type[M]) -> M:
        """The next reply; pushes are dropped."""
        while True:
            while not self._waiting:
                data = self._socket.recv(1 << 18)
                if not data:
                    raise RuntimeError("the daemon closed the connection")
                self._waiting += self._reader.feed(data)
            answer = decode_outgoing(self._waiting.pop(0))
            if isinstance(answer, messages.Push):
                continue
            if not isinstance(answer, kind):
                raise RuntimeError(f"{answer!r} came where {kind.__name__} was due")
            return answer

    def batch(self, verbs: Sequence[messages.Batchable]) -> list[messages.BatchReply]:
        """Their replies, none of which may be a refusal."""
        found = self.call(messages.Batch(1, list(verbs)), messages.Results).results
        for each in found:
            if isinstance(each, messages.Error | messages.Later | messages.Never):
                raise RuntimeError(f"{each!r} came in a batch")
        return found

    def cache(self, prompts: Iterator[bytes], told: Callable[[int], None] | None = None) -> int:
        """Each prompt is computed, published and released; returns how many.  Some frames are under way at a time."""
        count = 0
        ahead = 0
        frame: list[messages.Batchable] = []

        def collect() -> None:
            for each in self.receive(messages.Results).results:
                if isinstance(each, messages.Error | messages.Later | messages.Never):
                    raise RuntimeError(f"{each!r} came while filling")

        for prompt in prompts:
            sequence = count + 1
            frame += (
                messages.Allocate(1, self.namespace, sequence, prompt),
                messages.Commit(1, sequence, len(prompt) >> 2),
                messages.Free(1, sequence),
            )
            count += 1
            if len(frame) >= FILL_BATCH:
                self.send(messages.Batch(1, frame))
                frame = []
                ahead += 1
                if ahead > 2:
                    collect()
                    ahead -= 1
                if told is not None:
                    told(count)
        if frame:
            self.send(messages.Batch(1, frame))
            ahead += 1
        for _ in range(ahead):
            collect()
        return count

    def abandon(self) -> None:
        """Leaves without a word."""
        self._socket.close()

    def close(self) -> None:
        """Ends the session in good order, if the daemon is still there."""
        with contextlib.suppress(OSError, RuntimeError), self._socket:
            self.call(messages.Bye(1), messages.Done)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def inspect(path: Path, kind: str, pool: str = "") -> list[dict[str, Any]]:
    """The first page of what the daemon tells of `kind`."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        sock.sendall(encode(messages.Inspect(1, kind, pool)))
        reader = Reader(64 << 20)
        while not (bodies := reader.feed(sock.recv(1 << 18))):
            pass
    answer = decode_outgoing(bodies[0])
    if not isinstance(answer, messages.Inspected):
        raise RuntimeError(f"inspect {kind}: {answer!r}")
    return answer.rows


def hello(name: str) -> Frame:
    """The first frame of a connection of a script; its namespace is the tenant of that name."""
    return Frame(
        HELLO, encode(messages.Hello(HELLO, VERSION, name, namespace=Namespace(tenant=name), map=False))
    )


def short_cycle(namespace: int, seed: int, tokens: int = 300, firsts: int = FIRSTS) -> list[Frame]:
    """Allocate, Commit, Free of prompts whose first half is one of `firsts` and whose second half is new each time."""
    frames = []
    for index in range(firsts):
        prompt = noise(seed + index, 0, tokens)
        frame = encode(messages.Allocate(ALLOCATE, namespace, index + 1, prompt))
        frames += [
            Frame(ALLOCATE, frame, (frame.index(prompt) + 4 * (tokens // 2),)),
            Frame(COMMIT, encode(messages.Commit(COMMIT, index + 1, tokens))),
            Frame(FREE, encode(messages.Free(FREE, index + 1))),
        ]
    return frames


def batch_cycle(namespace: int, seed: int, tokens: int = 300, firsts: int = FIRSTS) -> list[Frame]:
    """The same with BATCH verbs a frame: Allocates of BATCH prompts, then their Commits, then their Frees."""
    frames = []
    for start in range(0, firsts - BATCH + 1, BATCH):
        prompts = {index + 1: noise(seed + index, 0, tokens) for index in range(start, start + BATCH)}
        allocates = [messages.Allocate(1, namespace, name, prompt) for name, prompt in prompts.items()]
        frame = encode(messages.Batch(MANY_ALLOCATE, [*allocates]))
        patches = tuple(frame.index(prompt) + 4 * (tokens // 2) for prompt in prompts.values())
        commits = [messages.Commit(1, name, tokens) for name in prompts]
        frees = [messages.Free(1, name) for name in prompts]
        frames += [
            Frame(MANY_ALLOCATE, frame, patches),
            Frame(MANY_COMMIT, encode(messages.Batch(MANY_COMMIT, [*commits]))),
            Frame(MANY_FREE, encode(messages.Batch(MANY_FREE, [*frees]))),
        ]
    return frames


def first_halves(seed: int, tokens: int = 300, firsts: int = FIRSTS) -> Iterator[bytes]:
    """What must be cached before a cycle with the same numbers runs."""
    return (noise(seed + index, 0, tokens // 2) for index in range(firsts))


def play_once(peer: Peer, cycle: Sequence[Frame]) -> None:
    """Sends a cycle's frames through a session of the same namespace and reads every reply: none may be a refusal.

    The load generator looks at a reply's number alone, so what is inside a batch is looked at here, once.
    """
    from kvslot.api.wire import HEAD, decode_request

    for each in cycle:
        request = decode_request(each.frame[HEAD:])
        if isinstance(request, messages.Batch):
            peer.batch(request.verbs)
        else:
            # A union is no class to a type checker, though `isinstance` and `call` take it for one.
            peer.call(request, messages.Admitted | messages.Committed | messages.Done)  # type: ignore[arg-type]


# -- rounds -----------------------------------------------------------------------------------------------------------


class Realtime:
    """SCHED_FIFO for some processes while a round runs, where the kernel permits it.

    Rounds of two benchmarks at once wait for each other: at that priority either would be all the other one sees.
    """

    def __init__(self, wanted: bool = True) -> None:
        self.why_not = "" if wanted else "not wanted"
        if wanted:
            policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
            try:
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
                os.sched_setscheduler(0, policy, parameter)
            except OSError as error:
                self.why_not = error.strerror or str(error)

    @property
    def words(self) -> str:
        """For meta."""
        return f"normal ({self.why_not})" if self.why_not else f"SCHED_FIFO {PRIORITY}"

    @contextlib.contextmanager
    def __call__(self, *pids: int) -> Iterator[None]:
        if self.why_not:
            yield
            return
        with _turn():
            try:
                for pid in pids:
                    os.sched_setscheduler(pid, os.SCHED_FIFO, os.sched_param(PRIORITY))
                yield
            finally:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Ours among all that measure on this machine, as far as they share a folder for temporary files."""
    try:
        lock = os.open(
            Path(tempfile.gettempdir()) / "kvslot-bench.lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
    except OSError:
        yield  # somebody else's file: better crowded than not at all
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


class Figures(NamedTuple):
    """One round of one server; times in microseconds."""

    p50: float
    p99: float
    p999: float
    rate: float  # replies a second, of every kind
    cpu_us: float  # of the server, by reply
    samples: int


def figures(
    found: Round, kinds: Sequence[int], cpu: float = 0.0, clients: Sequence[int] | None = None
) -> Figures:
    """Of the replies to requests of these kinds; raises RuntimeError where any was refused."""
    if found.errors or found.laters:
        raise RuntimeError(f"{found.errors} requests were refused and {found.laters} put off")
    latencies = found.latencies_us(kinds, clients)
    if not len(latencies):
        raise RuntimeError("a round without a reply")
    count = max(1, len(found.samples))
    p50, p99, p999 = at(latencies, 0.5, 0.99, 0.999)
    return Figures(p50, p99, p999, found.rate, cpu * 1e6 / count, len(latencies))


def at(ordered: npt.NDArray[np.float64], *shares: float) -> list[float]:
    """Quantiles of sorted samples."""
    return [float(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) for share in shares]


class Both(NamedTuple):
    """Rounds of two sides, by turns; ratios are of those that were run one after the other."""

    daemon: list[Figures]
    echo: list[Figures]

    def ratios(self, name: str) -> list[float]:
        """Daemon / echo of one figure, round by round."""
        return [figure(a, name) / figure(b, name) for a, b in zip(self.daemon, self.echo, strict=True)]

    def ratio(self, name: str) -> float:
        """Median over rounds."""
        return statistics.median(self.ratios(name))

    def spread(self, name: str, scale: float = 1.0) -> str:
        """Least and largest ratio of a round, for a note."""
        each = [scale * ratio for ratio in self.ratios(name)]
        return f"{min(each):.2f} to {max(each):.2f} over {len(each)} rounds"


def figure(of: Figures, name: str) -> float:
    """One figure by its name."""
    return float(getattr(of, name))


def middle(rounds: Sequence[Figures], name: str) -> float:
    """Median over rounds of one figure."""
    return statistics.median(figure(each, name) for each in rounds)


def reply_sizes(found: Round) -> dict[int, int]:
    """What an echo is to answer: as many bytes as the daemon did on average, by kind."""
    return {kind: max(8, round(size)) for kind, size in found.reply_bytes.items()}


def race(
    daemon: Daemon,
    tools: dict[str, Path],
    players: Sequence[Player],
    folder: Path,
    *,
    rounds: int,
    seconds: float,
    kinds: Sequence[int],
    realtime: Realtime,
) -> Both:
    """Plays the same script to the daemon and to an echo with its reply sizes, by turns."""
    result = Both([], [])
    with Load(tools, daemon.socket, players, folder) as load:
        warm = load.run(min(seconds, 0.3))
        sizes = {kind: max(8, round(size)) for kind, size in warm.reply_bytes.items()}
        with (
            Echo(tools, folder / "echo.sock", sizes) as echo,
            Load(tools, echo.socket, players, folder) as same,
        ):
            same.run(0.05)
            for index in range(rounds):
                for turn in ("de", "ed")[index & 1]:
                    time.sleep(PAUSE_S)
                    server, generator = (daemon.pid, load) if turn == "d" else (echo.pid, same)
                    with realtime(server, generator.pid):
                        before = cpu_s(server)
                        found = generator.run(seconds)
                    seen = figures(found, kinds, cpu_s(server) - before)
                    (result.daemon if turn == "d" else result.echo).append(seen)
    return result
