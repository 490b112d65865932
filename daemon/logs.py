"""What the daemon says of itself: one event name per fact, its figures as fields beside it.

    json      one line each, for journald and collectors: {"event": "ready", "level": "info", "time": "...", ...}
    console   aligned and coloured, for people
    auto      console where standard error is a terminal, else json

Lines go to standard error at once, and never wait for a reader that does not read: where there is no room the line is
lost and counted (what is an error waits a moment first), and the daemon goes on.  What libraries log by the standard
module comes out as event "library".

A warning that may come a thousand times a second goes through `limited`: once a period, with the number left out since.

What is logged while a request is answered says whose it is: `session`, `request`, `verb`, and its `pid`, `uid`.
A verb never waits, so one place, `asked`, says which request that is; only a line that is written pays for more.  What
waits (a task of an HTTP request) binds its own with structlog's context variables.  docs/events.md has every event.
"""

from __future__ import annotations

import datetime
import logging
import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TextIO

import msgspec
import structlog

if TYPE_CHECKING:
    from kvslot.daemon.connection import Connection

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_PRIORITIES: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3, "exception": 3, "critical": 2}
"""By syslog, as journald reads them from a "<4>" before the line."""

CHUNK_BYTES: Final = 4096
"""PIPE_BUF: what a pipe with room takes whole."""
PATIENCE_MS: Final = 200
"""How long an error waits for room; longer than a busy collector takes, short enough for those we keep waiting."""

KEYS_MAX: Final = 1024
"""Events that `limited` keeps count of: names in the code, so that this is never met."""


def set_up(log_format: str = "auto", log_level: str = "info", stream: TextIO | None = None) -> None:
    """Configures structlog and `logging` for the process.  `stream`: standard error unless given."""
    out = stream if stream is not None else sys.stderr
    terminal = out is not None and out.isatty()
    console = log_format == "console" or (log_format == "auto" and terminal)
    lines = _Lines(out)
    shared: list[Any] = [structlog.contextvars.merge_contextvars, _bind, _level, _time, _tap]
    if console:
        colours = terminal and "NO_COLOR" not in os.environ
        renderers: list[Any] = [structlog.dev.ConsoleRenderer(colors=colours, timestamp_key="time")]
    else:
        renderers = [structlog.processors.format_exc_info, _Json(_is_journal(out))]
    structlog.configure(
        processors=[*shared, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[log_level]),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=False,  # `set_level` holds for loggers that exist
    )
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _Library):
            root.removeHandler(handler)
    root.addHandler(_Library())
    root.setLevel(max(LEVELS[log_level], logging.WARNING))
    logging.captureWarnings(True)


def set_level(log_level: str) -> None:
    """Changes what is logged from now on; raises KeyError for a level there is not."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(LEVELS[log_level]))
    logging.getLogger().setLevel(max(LEVELS[log_level], logging.WARNING))


def lost() -> int:
    """Lines that could not be written since the start."""
    return _lost[0]


def counted() -> dict[str, int]:
    """Events logged since the start, by level."""
    return dict(_counted)


def left_out() -> int:
    """Events that `limited` and `sparing` did not log, since the start."""
    return _left_out[0]


def leave_out() -> None:
    """Counts one that somebody else did not log, for the same reason."""
    _left_out[0] += 1


taps: Final[list[Callable[[Mapping[str, Any]], None]]] = []
"""Are shown every event that is logged, with its fields, which are not to be kept or changed."""


def _tap(_: Any, __: str, fields: Any) -> Any:
    for tap in taps:
        tap(fields)
    return fields


# -- whose request it is ---------------------------------------------------------------------------------------------


class Asked:
    """The request that is being answered at this moment; without a connection: none is."""

    __slots__ = ("connection", "request", "verb")

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.request = 0  # its id, 0 of one that was posted; of a verb in a Batch, the Batch's
        self.verb: type = object


asked: Final = Asked()


def _bind(_: Any, __: str, fields: Any) -> Any:
    """Adds whose request an event belongs to; what the event says itself goes before.

    An event about another session than the one that asked is no event of that request's session: it says `by_session`.
    """
    connection = asked.connection
    if connection is None:
        return fields
    fields.setdefault("verb", asked.verb.__name__)
    fields.setdefault("request", asked.request)
    member, peer = connection.member, connection.peer
    number = member.number if member is not None else 0
    # Who has no session any more has just said goodbye.
    if not number or fields.get("session", number) == number:
        if number:
            fields["session"] = number
        fields.setdefault("pid", peer.pid)
        fields.setdefault("uid", peer.uid)
    else:
        fields["by_session"], fields["by_pid"] = number, peer.pid
    return fields


# -- warnings that repeat --------------------------------------------------------------------------------------------


class _Told:
    """When an event was last logged, and how often it has come since."""

    __slots__ = ("count", "event", "level", "period", "suppressed", "when")

    def __init__(self, event: str, when: float, period: float) -> None:
        self.event = event
        self.level = "info"  # of the last that was left out
        self.when = when
        self.period = period
        self.count = 0
        self.suppressed = 0


_told: dict[str, _Told] = {}


def limited(
    logger: Any, event: str, period_s: float, *, level: str = "warning", kind: str = "", **fields: Any
) -> bool:
    """Logs `event` at most once in `period_s` seconds; `suppressed` says how many were left out.  True if logged.

    `kind`: each has its own count of the period; never what a client chose, of which there may be any number.
    """
    now = time.monotonic()
    key = event + kind
    told = _told.get(key)
    if told is not None and now - told.when < period_s:
        told.suppressed += 1
        told.level = level
        _left_out[0] += 1
        return False
    if told is None:
        if len(_told) >= KEYS_MAX:
            tell_suppressed(logger)
        told = _told[key] = _Told(event, now, period_s)
    suppressed, told.suppressed, told.when = told.suppressed, 0, now
    if suppressed:
        fields["suppressed"] = suppressed
    getattr(logger, level)(event, **fields)
    return True


def sparing(
    logger: Any, event: str, most: int, period_s: float = 1.0, *, level: str = "info", **fields: Any
) -> bool:
    """Logs `event` at most `most` times in `period_s` seconds, for facts that are one each; otherwise as `limited`."""
    now = time.monotonic()
    told = _told.get(event)
    if told is None:
        if len(_told) >= KEYS_MAX:
            tell_suppressed(logger)
        told = _told[event] = _Told(event, now, period_s)
    told.period = period_s
    if now - told.when >= period_s:
        told.when, told.count = now, 0
    told.count += 1
    if told.count > most:
        told.suppressed += 1
        told.level = level
        _left_out[0] += 1
        return False
    if told.suppressed:
        fields["suppressed"], told.suppressed = told.suppressed, 0
    getattr(logger, level)(event, **fields)
    return True


def tell_suppressed(logger: Any) -> None:
    """What was left out and has not been told, as one event a level; for the end of the process."""
    _tell_left_out(logger, list(_told.values()))
    _told.clear()


def tell_overdue(logger: Any) -> None:
    """As `tell_suppressed`, of what has not come for a period after some were left out; to be called now and then.

    A storm that ends leaves its number in the log, and not only when the next one comes.
    """
    now = time.monotonic()
    _tell_left_out(
        logger, [told for told in _told.values() if told.suppressed and now - told.when >= told.period]
    )


def _tell_left_out(logger: Any, those: list[_Told]) -> None:
    """One line for each level, so that who wants no facts is told of none that were left out."""
    by_level: dict[str, dict[str, int]] = {}
    for told in those:
        if told.suppressed:
            left = by_level.setdefault(told.level, {})
            left[told.event] = left.get(told.event, 0) + told.suppressed
            told.suppressed = 0
    for level, left in by_level.items():
        getattr(logger, level)("suppressed", **left)


# -- inside -----------------------------------------------------------------------------------------------------------

_lost = [0]
_left_out = [0]
_counted = dict.fromkeys(LEVELS, 0)


class _Lines:
    """What structlog calls a logger: takes rendered lines.

    A pipe or socket that says it has room takes `CHUNK_BYTES` without waiting, so that much is written at a time.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._torn = False  # the last line was cut off
        self._room: select.poll | None = None
        try:
            self._descriptor = stream.fileno() if stream is not None else -1
        except (OSError, ValueError, AttributeError):
            self._descriptor = -1  # a stream of no file
        if self._descriptor >= 0:
            self._room = select.poll()
            self._room.register(self._descriptor, select.POLLOUT)

    def _soon(self, line: str | bytes) -> None:
        self._write(line, 0)

    def _surely(self, line: str | bytes) -> None:
        self._write(line, PATIENCE_MS)

    msg = log = debug = info = warning = warn = _soon
    error = critical = fatal = failure = err = exception = _surely

    def _write(self, line: str | bytes, patience_ms: int) -> None:
        if self._stream is None:
            return
        text = line if isinstance(line, bytes) else line.encode(errors="backslashreplace")
        try:
            if self._room is None:
                self._stream.write(text.decode(errors="backslashreplace") + "\n")
                self._stream.flush()
                return
            data = memoryview(b"\n" * self._torn + text + b"\n")
            whole = len(data)
            while data:
                if not self._room.poll(patience_ms):
                    raise BlockingIOError
                data = data[os.write(self._descriptor, data[:CHUNK_BYTES]) :]
                self._torn = 0 < len(data) < whole or (self._torn and len(data) == whole)
        except (OSError, ValueError):
            _lost[0] += 1


class _Json:
    """Renders an event as one line of JSON, its name first."""

    def __init__(self, journal: bool) -> None:
        self._journal = journal
        self._encoder = msgspec.json.Encoder(enc_hook=repr)

    def __call__(self, _: Any, method: str, fields: Any) -> bytes:
        event = {"event": fields.pop("event", ""), **fields}
        try:
            line = self._encoder.encode(event)
        except Exception:  # noqa: BLE001 -- a field that cannot be shown must not cost the event
            line = self._encoder.encode({str(key): repr(value) for key, value in event.items()})
        return b"<%d>%b" % (_PRIORITIES.get(method, 6), line) if self._journal else line


def _level(_: Any, method: str, fields: Any) -> Any:
    level = fields["level"] = "error" if method == "exception" else method
    _counted[level] = _counted.get(level, 0) + 1
    return fields


def _time(_: Any, __: str, fields: Any) -> Any:
    now = datetime.datetime.now(datetime.UTC)
    fields["time"] = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return fields


def _is_journal(stream: TextIO | None) -> bool:
    """Whether the stream is the connection to journald that systemd says it made."""
    told = os.environ.get("JOURNAL_STREAM", "")
    if not told or stream is None:
        return False
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return told == f"{status.st_dev}:{status.st_ino}"


class _Library(logging.Handler):
    """Passes what libraries log on to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger()
        level = "error" if record.levelno >= 40 else "warning" if record.levelno >= 30 else "info"
        fields = {"exc_info": record.exc_info} if record.exc_info else {}
        getattr(log, level)("library", logger=record.name, message=record.getMessage(), **fields)


__all__ = [
    "LEVELS",
    "asked",
    "counted",
    "leave_out",
    "left_out",
    "limited",
    "lost",
    "set_level",
    "set_up",
    "sparing",
    "tell_overdue",
    "taps",
    "tell_suppressed",
]
