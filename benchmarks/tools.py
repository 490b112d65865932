"""The C tools of `bench rpc`: an echo server as the floor, and the load generator that drives it and the daemon alike.

    native/echo.c    answers every frame at once with as many bytes as the daemon would
    native/load.c    plays a script of frames over many connections and takes the time of every reply

They are compiled when first needed, with the machine's own compiler, into a cache folder whose name is a digest of the
sources: another version compiles anew, the same one does not.  Timed in C, so that what is compared is the servers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

NATIVE: Final = Path(__file__).with_name("native")
TOOLS: Final = ("echo", "load")
FLAGS: Final = ("-std=gnu11", "-O2", "-Wall")
MAGIC: Final = 0x474C564B
SAMPLE: Final = np.dtype(
    [("at_ns", "<u8"), ("latency_ns", "<u4"), ("client", "<u2"), ("kind", "u1"), ("number", "u1")]
)
"""What load.c writes for each reply."""
START_S: Final = 60.0
"""Patience with a tool that is to say it is ready: setting up a session takes milliseconds, a loaded machine longer."""


class Unavailable(Exception):
    """What a measurement needs is not on this machine; the message says what would help."""


class Frame(NamedTuple):
    """One request of a script."""

    kind: int  # 1..15; also the frame's own id, by which the echo knows it
    frame: bytes
    patches: tuple[int, ...] = ()  # where four bytes are made new each time


class Player(NamedTuple):
    """What one connection does."""

    setup: Sequence[Frame]
    cycle: Sequence[Frame]
    rate: float = 0.0  # frames a second on a fixed timetable; 0: the next when the reply is there


def write_script(players: Sequence[Player], path: Path) -> None:
    """The file that load.c reads."""
    out = [struct.pack("<II", MAGIC, len(players))]
    for player in players:
        out.append(struct.pack("<dII", player.rate, len(player.setup), len(player.cycle)))
        for kind, frame, patches in (*player.setup, *player.cycle):
            head = (kind, len(patches), len(frame), *patches)
            out += struct.pack(f"<{len(head)}I", *head), frame
    path.write_bytes(b"".join(out))


def compiler() -> str:
    """The machine's C compiler; raises Unavailable without one."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise Unavailable(
        "the load generator is C and there is no C compiler (cc, gcc, clang, or $CC); Debian and Ubuntu: "
        "apt-get install gcc libc6-dev"
    )


def cache_folders() -> Iterable[Path]:
    """Where compiled tools may be kept, best first; the last is a fresh temporary folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):
        yield Path(home) / "kvslot"
    yield Path(tempfile.mkdtemp(prefix="kvslot-bench-"))


def build(folder: Path | None = None) -> dict[str, Path]:
    """The compiled tools by name; compiles what is missing.  Raises Unavailable where that cannot be done."""
    sources = sorted(NATIVE.glob("*.[ch]"))
    command = compiler()
    digest = hashlib.sha256(" ".join((command, *FLAGS)).encode())
    for source in sources:
        digest.update(source.read_bytes())
    problem: OSError | None = None
    for base in (folder,) if folder is not None else cache_folders():
        home = base / f"bench-{digest.hexdigest()[:16]}"
        try:
            home.mkdir(parents=True, exist_ok=True)
            return {name: _compile(command, name, home) for name in TOOLS}
        except OSError as error:
            problem = error
    raise Unavailable(f"the C tools cannot be compiled: {problem}")


def _compile(command: str, name: str, home: Path) -> Path:
    tool = home / name
    if os.access(tool, os.X_OK):
        return tool
    # Under another name first: a run beside this one finds it whole or not at all.
    fresh = home / f"{name}.{os.getpid()}"
    words = [command, *FLAGS, "-o", str(fresh), str(NATIVE / f"{name}.c")]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{' '.join(words)} failed:\n{done.stderr.strip()[:2000]}")
    fresh.replace(tool)
    return tool


class Process:
    """A child that says "ready" on its standard output, and is killed at the end."""

    def __init__(self, words: Sequence[str]) -> None:
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        try:
            self.ready = self.line()
            if not self.ready.startswith("ready"):
                raise RuntimeError(f"{Path(words[0]).name} said {self.ready!r}")
        except BaseException:
            self.close()
            raise

    def line(self) -> str:
        """The next line it prints; RuntimeError if it has ended."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            raise RuntimeError(f"{self.process.args!r} ended with {self.process.wait()}")
        return text.strip()

    def say(self, text: str) -> None:
        """One line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Echo(Process):
    """A running echo server."""

    def __init__(self, tools: dict[str, Path], socket: Path, sizes: dict[int, int]) -> None:
        """`sizes`: bytes of the whole reply by kind of request."""
        self.socket = socket
        named = ",".join(f"{kind}:{size}" for kind, size in sorted(sizes.items()))
        super().__init__([str(tools["echo"]), str(socket), named])


class Round(NamedTuple):
    """What one round of load gave."""

    samples: npt.NDArray[np.void]
    seconds: float
    errors: int
    laters: int
    pushes: int
    began_ns: int
    reply_bytes: dict[int, float]  # mean by kind

    def latencies_us(
        self, kinds: Sequence[int], clients: Sequence[int] | None = None
    ) -> npt.NDArray[np.float64]:
        """Of replies to requests of these kinds, sorted."""
        keep = np.isin(self.samples["kind"], kinds)
        if clients is not None:
            keep &= np.isin(self.samples["client"], clients)
        return np.sort(self.samples["latency_ns"][keep]) / 1e3

    @property
    def rate(self) -> float:
        """Replies a second, of every kind."""
        return len(self.samples) / self.seconds


class Load(Process):
    """A running load generator, its connections set up."""

    def __init__(self, tools: dict[str, Path], socket: Path, players: Sequence[Player], folder: Path) -> None:
        """`folder` is where script and samples go for as long as it runs."""
        handle, name = tempfile.mkstemp(prefix="load-", dir=folder)
        os.close(handle)
        self._samples = Path(name)
        script = Path(name + ".script")
        write_script(players, script)
        try:
            super().__init__([str(tools["load"]), str(socket), str(script)])
        finally:
            script.unlink()
        errors, laters = map(int, self.ready.split()[1:])
        if errors or laters:
            self.close()
            raise RuntimeError(f"setting up was refused {errors} times and put off {laters} times")

    def start(self, seconds: float) -> None:
        """Begins a round; `finish` must follow."""
        self.say(f"run {seconds:.6f} {self._samples}")

    def finish(self) -> Round:
        """Waits for the end of the round."""
        head, _, kinds = self.line().partition("|")
        _, replies, seconds, errors, laters, pushes, began = head.split()
        samples = np.fromfile(self._samples, dtype=SAMPLE)
        assert len(samples) == int(replies)
        sizes = {}
        for each in kinds.split():
            kind, count, total = map(int, each.split(":"))
            sizes[kind] = total / count
        return Round(samples, float(seconds), int(errors), int(laters), int(pushes), int(began), sizes)

    def run(self, seconds: float) -> Round:
        """One round."""
        self.start(seconds)
        return self.finish()

    def close(self) -> None:
        super().close()
        self._samples.unlink(missing_ok=True)
