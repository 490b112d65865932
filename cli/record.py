"""`kvslotctl record`: a trace of what a running daemon's clients ask, for `replay` and `advise`."""

from __future__ import annotations

import argparse
import gc
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    from types import FrameType

    from kvslot.api.client import Control
    from kvslot.replay import RecordedLoad, RecordedPool, Recording, TraceFile

DESCRIPTION: Final = """\
Record what engines ask of a pool while they serve: for each request when it came, how long prompt and output are, and
which earlier request it has how many tokens in common with. That is a trace as `kvslotctl replay` and `kvslotctl
advise` take it. No token and no name or salt of a namespace is in it; --values writes the token ids to a file of their
own. Engines notice nothing, and nothing is noted in the daemon while nobody records.

It goes on until interrupted, until --for is over, until --requests have ended, or until the daemon ends; the trace
is good in each case, and can be read while it grows. What could not be kept is counted, said, and written into it."""

EXAMPLES: Final = """\
  kvslotctl record load.kvs.gz                        until ^C
  kvslotctl record load.kvs.gz --for 1h --json
  kvslotctl record load.kvs.gz --for 10m && kvslotctl advise load.kvs.gz
  kvslotctl record load.kvs.gz --pool default --requests 5000 --values tokens.gz
"""

GOOD_ENDS: Final = ("asked", "time", "requests")
"""All others are the daemon's, in its words."""
POLL_S: Final = 0.1
WARN_S: Final = 10.0
"""Between two warnings that something was lost."""
TOLD_S: Final = 0.5
"""Between two lines of progress on a terminal."""
UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
SIZES: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LEAST_BYTES: Final = 1 << 20


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    parser = _control.add_command(
        subparsers, "record", "record the live load as a trace", DESCRIPTION, EXAMPLES, run
    )
    out = parser.add_argument("out", metavar="FILE", help="the trace, by custom NAME.kvs.gz")
    _common.takes_file(out)
    parser.add_argument(
        "--for",
        dest="seconds",
        type=duration,
        metavar="TIME",
        help="how long: 90s, 10m, 2h (until interrupted)",
    )
    parser.add_argument(
        "--requests", type=_count, metavar="N", help="end once so many requests have ended (no limit)"
    )
    values = parser.add_argument(
        "--values", metavar="FILE", help="write the token ids, too: to this file, which only you can read"
    )
    _common.takes_file(values)
    parser.add_argument(
        "--wait",
        type=duration,
        default=0.0,
        metavar="TIME",
        help="when the daemon ends: how long to wait for it to come back, and then go on (not at all)",
    )
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    parser.add_argument(
        "--memory",
        type=_size,
        default=1 << 30,
        metavar="SIZE",
        help="of this command, for the tokens that later requests are compared with (1G)",
    )


def duration(text: str) -> float:
    """Seconds of "90", "90s", "10m", "2h", "1d"."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?) ?([a-z]*)", text.strip())
    if found is None or found[2] not in UNITS or not 0 < (seconds := float(found[1]) * UNITS[found[2]]) < 1e8:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 90s, 10m or 2h")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return int(text)


def _size(text: str) -> int:
    found = re.fullmatch(r"([0-9]+)([KMG]?)(?:i?B)?", text.strip())
    if found is None or (size := int(found[1]) * SIZES[found[2]]) < LEAST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 512M or 2G")
    return size


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""
    return _control.ask(arguments, lambda control: _record(control, arguments))


def _record(control: Control, arguments: argparse.Namespace) -> int:
    from kvslot.replay import TraceFile

    pool = pool_of(control, arguments.pool)
    path = Path(arguments.out)
    values = Path(arguments.values) if arguments.values else None
    try:
        for each in (path, values):
            _common.check_writable(str(each) if each is not None else None)
        file = TraceFile(path, values, replace=arguments.force)
    except FileExistsError as error:
        return _control.fail(
            arguments, f"{error.filename} is there already; --force replaces it", _common.BAD_INPUT
        )
    except OSError as error:
        return _control.fail(arguments, f"cannot write {error.filename}: {error.strerror}", _common.BAD_INPUT)
    with file:
        try:
            load, ended = record(
                control,
                pool,
                seconds=arguments.seconds,
                requests=arguments.requests,
                memory_bytes=arguments.memory,
                values=values is not None,
                wait=arguments.wait,
                file=file,
                report=_teller(),
            )
        except OSError as error:
            return _control.fail(
                arguments,
                f"cannot write {error.filename or path}: {error.strerror}; what was written before is good",
                _common.BAD_INPUT,
            )
    code = _common.OK if ended in GOOD_ENDS else _common.UNREACHABLE
    if not load.requests:
        file.abandon()
        return _control.fail(
            arguments,
            f"nothing was asked of pool {pool.name!r}"
            + (f" before {ended}" if code else f" in {load.seconds:.0f} s")
            + "; no trace was written",
            code or _common.FAILED,
        )
    if arguments.json is not None:
        import msgspec

        row = {"file": str(path), "ended": ended, **msgspec.to_builtins(load)}
        code = _control.write(arguments, control, {"rows": [row]}) or code
    if arguments.json != "-":
        _print(load, str(path), arguments.values or "", ended)
    return code


def pool_of(control: Control, name: str) -> RecordedPool:
    """The pool that is meant, as it is now.  NotFound, with the names that there are, where it is not clear."""
    from kvslot.api.wire import NotFound
    from kvslot.replay import RecordedPool

    rows = _control.pools(control, name)
    if len(rows) > 1:
        names = ", ".join(row["pool"] for row in rows)
        raise NotFound(f"which pool? name it with --pool; there are {names}")
    row = rows[0]
    return RecordedPool(
        name=row["pool"],
        granularity=row["granularity"],
        blocks=row["blocks"],
        block_size=row["block_size"],
        usable=row["usable"],
        quantum=row["quantum"],
        watermark=row["watermark"],
        eviction=row["eviction"],
        append=row["append"],
        compaction=next((each.mode for each in control.defrag(pool=row["pool"])), "off"),
        slot_bytes=row["slot_bytes"],
    )


def record(
    control: Control,
    pool: RecordedPool,
    *,
    seconds: float | None,
    requests: int | None = None,
    memory_bytes: int = 1 << 30,
    values: bool = False,
    wait: float = 0.0,
    file: TraceFile,
    report: Callable[[Recording, float], None] | None = None,
) -> tuple[RecordedLoad, str]:
    """Records until told to end: what came of it, and why it ended: "asked", "time", "requests", or the daemon's end.

    `wait`: seconds that the daemon may take to come back, to go on then.  `report` is called a few times a second with
    the recording and the seconds so far.
    """
    import msgspec

    from kvslot.api.wire import Disconnected, Refused
    from kvslot.replay import Recording, load_of

    recording = Recording(memory_bytes=memory_bytes, values=values)
    key = secrets.token_bytes(32)
    until = _Until(time.monotonic(), seconds, requests)
    pages: set[int] = set()
    with _interruptible() as until.interrupted, _uncollected(), ExitStack() as others:
        while True:
            try:
                told = control.record("start", pool=pool.name, values=values, key=key)
                recording.begin(told.at, time.monotonic())
                file.add(recording.feed(told))
                ended = _follow(control, recording, pool.name, until, pages, file, report)
                told = control.record("stop")
                file.add(recording.feed(told))
                while told.more:
                    told = control.record("fetch")
                    file.add(recording.feed(told))
            except Disconnected as error:
                ended = str(error)
            except Refused as error:
                if not recording.boots:
                    raise
                ended, wait = f"it came back, and refuses: {error}", 0.0
            file.add(recording.end())
            file.flush()
            if ended in GOOD_ENDS or (again := _back(control.socket, wait, until)) is None:
                break
            control = others.enter_context(again)
        load = load_of(recording, msgspec.structs.replace(pool, pages=sorted(pages)), complete=True)
        file.close(load)
    return load, until.ended or ended


class _Until:
    """When a recording ends."""

    def __init__(self, began: float, seconds: float | None, requests: int | None) -> None:
        self.began = began
        self.seconds = seconds
        self.requests = requests
        self.interrupted: list[int] = []
        self.ended = ""

    def over(self, recording: Recording | None = None) -> str:
        """Why it is over; "" while it is not."""
        if self.interrupted:
            self.ended = "asked"
        elif self.seconds is not None and time.monotonic() - self.began >= self.seconds:
            self.ended = "time"
        elif self.requests is not None and recording is not None and recording.requests >= self.requests:
            self.ended = "requests"
        return self.ended

    def nap(self, seconds: float) -> None:
        """Sleeps, no longer than the recording lasts."""
        if self.seconds is not None:
            seconds = min(seconds, self.began + self.seconds - time.monotonic())
        time.sleep(max(0.0, seconds))


def _follow(
    control: Control,
    recording: Recording,
    pool: str,
    until: _Until,
    pages: set[int],
    file: TraceFile,
    report: Callable[[Recording, float], None] | None,
) -> str:
    """Fetches what one boot of the daemon tells, until it is over; why."""
    engines, warned, warned_at, told_at = 0, 0, -WARN_S, time.monotonic()
    while not (ended := until.over(recording)):
        now = time.monotonic()
        told = control.record("fetch")
        file.add(recording.feed(told))
        if engines != len(recording.engines):
            engines = len(recording.engines)
            pages |= {each["page"] for each in control.inspect("sessions", pool=pool)}
        lost = recording.lost_requests + recording.lost_tokens
        if lost > warned and now - warned_at >= WARN_S:
            warned, warned_at = lost, now
            print(
                f"{_line_clear()}kvslotctl: warning: the recorder cannot keep up: {recording.lost_requests:,} "
                f"requests and {recording.lost_tokens:,} tokens are lost so far",
                file=sys.stderr,
            )
        if report is not None and now - told_at > TOLD_S:
            told_at = now
            report(recording, now - until.began)
        if not told.more:
            until.nap(POLL_S)
    return ended


def _back(socket: str, wait: float, until: _Until) -> Control | None:
    """A connection to the daemon that has come back; None where that did not happen in time."""
    from kvslot.api.client import Control
    from kvslot.api.wire import Disconnected

    end = time.monotonic() + wait
    if wait:
        print(f"{_line_clear()}kvslotctl: the daemon ended; waiting for it to come back", file=sys.stderr)
    while time.monotonic() < end and not until.over():
        try:
            control = Control(socket)
        except Disconnected:
            until.nap(POLL_S)
            continue
        try:
            control.ping()
        except Disconnected:
            control.close()
            until.nap(POLL_S)
            continue
        return control
    return None


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection: there is none, and looking for it in millions of nodes takes seconds."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """^C, SIGTERM and SIGHUP only add their number, so that the end is a good one; a second ^C interrupts at once."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if number in asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    wanted = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup's are left alone
        wanted.append(signal.SIGHUP)
    before = {each: signal.signal(each, ask) for each in wanted}
    try:
        yield asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _line_clear() -> str:
    """On a terminal: takes the line of progress away."""
    return "\r\x1b[K" if sys.stderr.isatty() else ""


def _teller() -> Callable[[Recording, float], None]:
    """A line on the terminal, in place of the one before; elsewhere a line now and then."""
    from kvslot.cli import _screen

    lines = None if sys.stderr.isatty() else _common.Lines()

    def tell(recording: Recording, seconds: float) -> None:
        lost = f" · {recording.lost_requests:,} LOST" if recording.lost_requests else ""
        words = (
            f"{_common.several(recording.begun, 'request')}, {recording.running:,} running, "
            f"{recording.waiting:,} waiting{lost}"
        )
        if lines is not None:
            lines.report(words)
            return
        print(f"{_line_clear()}{_screen.duration(seconds)} · {words}", end="", file=sys.stderr, flush=True)

    return tell


def _print(load: RecordedLoad, path: str, values: str, ended: str) -> None:
    from kvslot.cli import _screen

    print(_line_clear(), end="", file=sys.stderr, flush=True)
    if ended not in GOOD_ENDS:
        print(f"the daemon ended: {ended}")
    print(
        f"{path}: {_common.several(load.requests, 'request')} of {_common.several(load.engines, 'engine')} in "
        f"{_screen.duration(load.seconds)}, {load.prompt_tokens:,} prompt tokens of which "
        f"{_screen.share(load.hit_tokens, load.prompt_tokens)} were found cached, {load.output_tokens:,} output tokens"
    )
    if values:
        print(f"{values}: their token ids")
    for lack in load.lacks():
        print(f"  {lack}")
    print(f"Next: kvslotctl advise {path}")


__all__ = ["add", "duration", "pool_of", "record", "run"]
