"""`kvslotctl top`: what a daemon does now, on a terminal as a picture that stays, elsewhere as a line an interval.

    look ── interval ── look ── measure ──► picture, lines, or JSON          the daemon is asked once an interval

A daemon that goes away is waited for: whoever watches a restart wants to see it come back.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    from types import FrameType

    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from kvslot.api.client import Control
    from kvslot.cli.rates import Look

DESCRIPTION: Final = """\
Watch a daemon: what each pool holds, what is asked of it a second, how long that takes, and who asks. On a terminal a
picture that is made anew each interval; elsewhere a line a pool and interval, without end unless --count says so; with
--json one document a line (one in all, unless --count says so). Rates and percentiles are of the interval.

Keys: q ends, space stops the picture and lets it go on, s sorts sessions by the next column (r the other way round),
p shows the next pool only, then all, 1 2 3 hide and show history, verbs and sessions, + and - change the interval,
arrows (or j, k) go through the sessions, ? shows the keys."""

EXAMPLES: Final = """\
  kvslotctl top
  kvslotctl top --interval 5 --pool default
  kvslotctl top | tee watch.txt                a line a pool and second
  kvslotctl top --json | jq '.pools[] | {pool, used_pct, hit_pct}'
  kvslotctl top --json --count 3600 > hour.ndjson
"""

INTERVAL_S: Final = 1.0
LEAST_S: Final = 0.1
MOST_S: Final = 3600.0
LOOK_S: Final = 0.25
"""Between two looks at keys and at the size of the window."""
HISTORY: Final = 240
"""Intervals that are kept for the curves; a wide terminal shows so many."""
HEADER_EVERY: Final = 20
"""Lines between two headers, where nobody can scroll them into view."""
WIDE: Final = 110
NARROW: Final = 64
"""Columns of the terminal, below which some of ours are left out, and below which more."""
SPARKS: Final = "▁▂▃▄▅▆▇█"
SORTS: Final = ("charged", "sequences", "frames_s", "fenced", "age_s", "pid", "name")
STATES: Final = (
    ("private", "cyan"), ("leased", "green"), ("evictable", "bright_black"), ("coming", "yellow"),
    ("reserved", "magenta"),
)  # fmt: skip
"""Of the bar of a pool, in its order, with their colours."""
KEYS: Final = (
    ("q", "end"), ("space", "stop, go on"), ("s", "sort sessions by the next column"), ("r", "... the other way round"),
    ("p", "next pool only, then all"), ("1 2 3", "history, verbs, sessions: hide, show"),
    ("+ -", "longer, shorter interval"), ("j k, arrows", "through the sessions"), ("?", "this"),
)  # fmt: skip


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    parser = _control.add_command(
        subparsers, "top", "watch it: pools, verbs, sessions, live", DESCRIPTION, EXAMPLES, run
    )
    parser.add_argument(
        "--interval", type=_interval, default=INTERVAL_S, metavar="SECONDS", help="between two looks (1)"
    )
    parser.add_argument(
        "--count", type=_count, default=None, metavar="N", help="end after so many intervals; 0: never"
    )
    parser.add_argument("--lines", action="store_true", help="lines, also on a terminal")


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not LEAST_S <= seconds <= MOST_S:
        raise argparse.ArgumentTypeError(f"{text} is not from {LEAST_S:g} to {MOST_S:g} seconds")
    return seconds


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of intervals")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""
    live = sys.stdout.isatty() and not arguments.lines and os.environ.get("TERM", "dumb") != "dumb"
    if arguments.json == "-":
        return _control.ask(arguments, lambda control: _json(arguments, control))
    if live:
        return _control.ask(arguments, lambda control: _live(arguments, control))
    return _control.ask(arguments, lambda control: _lines(arguments, control))


# -- JSON and lines ---------------------------------------------------------------------------------------------------


def _document(arguments: argparse.Namespace, socket: str, told: _control.Row, at: float) -> bytes:
    import msgspec

    from kvslot import __version__

    meta = {"command": "top", "version": __version__, "socket": socket, "time": round(at, 3)}
    return msgspec.json.encode({"meta": meta, **told}) + b"\n"


@contextlib.contextmanager
def _file(arguments: argparse.Namespace) -> Iterator[IO[bytes] | None]:
    """The file that --json names, for a line an interval; None where it names none."""
    if arguments.json in (None, "-"):
        yield None
        return
    with Path(arguments.json).open("wb") as out:
        yield out


def _intervals(arguments: argparse.Namespace, control: Control) -> Iterator[tuple[Look, _control.Row]]:
    """A measurement an interval, as many as are asked for, on a grid that does not drift."""
    from kvslot.cli import rates

    before = rates.look(control, arguments.pool)
    begun, number = before.at, 0
    while not arguments.count or number < arguments.count:
        number += 1
        time.sleep(max(0.0, begun + number * arguments.interval - time.monotonic()))
        after = rates.look(control, arguments.pool)
        yield after, rates.measure(before, after)
        before = after


def _json(arguments: argparse.Namespace, control: Control) -> int:
    if arguments.count is None:
        arguments.count = 1
    for look, told in _intervals(arguments, control):
        _common.write_json(_document(arguments, control.socket, told, look.time), "-")
    return _common.OK


COLUMNS: Final = (
    ("time", 8), ("pool", 10), ("used", 6), ("evict", 6), ("free", 6), ("seqs", 6), ("wait", 5), ("hit", 6),
    ("prompt/s", 9), ("evict/s", 8), ("moved/s", 8), ("verbs/s", 8), ("ref/s", 6), ("p50us", 7), ("p99us", 7),
)  # fmt: skip


def _lines(arguments: argparse.Namespace, control: Control) -> int:
    printed = 0
    with _file(arguments) as out:
        for look, told in _intervals(arguments, control):
            if out is not None:
                out.write(_document(arguments, control.socket, told, look.time))
                out.flush()
            for pool in told["pools"]:
                if printed % HEADER_EVERY == 0:
                    print(_row([name for name, _ in COLUMNS]))
                print(_row(line(look.time, pool, told)), flush=True)
                printed += 1
    return _common.OK


def _row(words: list[str]) -> str:
    cells = [
        word.ljust(width) if name in ("time", "pool") else word.rjust(width)
        for word, (name, width) in zip(words, COLUMNS, strict=True)
    ]
    return " ".join(cells).rstrip()


def line(at: float, pool: _control.Row, told: _control.Row) -> list[str]:
    """A pool's columns; shares are of the usable slots, times those of Allocate."""
    from kvslot.cli import _screen

    usable = max(1, pool["usable"])
    allocate: _control.Row = next((row for row in told["verbs"] if row["verb"] == "Allocate"), {})
    return [
        time.strftime("%H:%M:%S", time.localtime(at)),
        _screen.words(pool["pool"]),
        f"{pool['used_pct']:.1f}%",
        f"{100 * pool['evictable'] / usable:.1f}%",
        f"{100 * pool['free'] / usable:.1f}%",
        _short(pool["sequences"]),
        _short(pool["tickets"]),
        "-" if pool["hit_pct"] is None else f"{pool['hit_pct']:.1f}%",
        _short(pool["prompt_tokens_s"]),
        _short(pool["evicted_tokens_s"]),
        _short(pool["moved_tokens_s"]),
        _short(told["verbs_s"]),
        _short(told["refused_s"]),
        _time(allocate.get("us_p50")),
        _time(allocate.get("us_p99")),
    ]


def _short(number: float) -> str:
    """Four digits and a unit at the most."""
    for unit in ("", "k", "M"):
        if abs(number) < 9999.5:
            return f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.0f}G"


def _time(us: float | None) -> str:
    return "-" if us is None else f"{us:,.0f}" if us < 99_999 else f"{us / 1000:,.0f}ms"


# -- live -------------------------------------------------------------------------------------------------------------


class Screen:
    """What is shown, and how: changed by keys, drawn from the last measurement."""

    def __init__(self, interval: float, pool: str) -> None:
        self.interval = interval
        self.pool = pool  # "" is all
        self.sort = SORTS[0]
        self.ascending = False
        self.hidden: set[str] = set()
        self.first = 0  # of the sessions shown
        self.stopped = False
        self.help = False
        self.trouble = ""
        self.told: _control.Row | None = None
        self.at = 0.0
        self.history: dict[str, deque[float]] = {}

    def take(self, at: float, told: _control.Row) -> None:
        """A new measurement."""
        self.at, self.told, self.trouble = at, told, ""
        self._note("verbs/s", told["verbs_s"])
        for pool in told["pools"]:
            self._note(f"used {pool['pool']}", pool["used_pct"])
            if pool["hit_pct"] is not None:
                self._note(f"hit {pool['pool']}", pool["hit_pct"])
        p99 = [row["us_p99"] for row in told["verbs"] if row["verb"] == "Allocate" and row["us_p99"]]
        if p99:
            self._note("p99 us", p99[0])

    def _note(self, name: str, value: float) -> None:
        self.history.setdefault(name, deque(maxlen=HISTORY)).append(value)

    def key(self, key: str) -> bool:
        """What a key does; false: the end."""
        match key:
            case "q" | "\x03" | "\x04":
                return False
            case " ":
                self.stopped = not self.stopped
            case "s":
                self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
            case "r":
                self.ascending = not self.ascending
            case "p":
                self._next_pool()
            case "1" | "2" | "3":
                self.hidden ^= {("history", "verbs", "sessions")[int(key) - 1]}
            case "+" | "=":
                self.interval = min(60.0, self.interval * 2)
            case "-":
                self.interval = max(LEAST_S, self.interval / 2)
            case "j" | "down":
                self.first += 1
            case "k" | "up":
                self.first = max(0, self.first - 1)
            case "pagedown":
                self.first += 20
            case "pageup":
                self.first = max(0, self.first - 20)
            case "?" | "h":
                self.help = not self.help
            case _:
                pass
        return True

    def _next_pool(self) -> None:
        names = ["", *(pool["pool"] for pool in (self.told or {}).get("pools", ()))]
        place = names.index(self.pool) if self.pool in names else 0
        self.pool = names[(place + 1) % len(names)]
        self.first = 0

    def sessions(self) -> list[_control.Row]:
        """Those to be shown, in their order."""
        assert self.told is not None
        rows = [row for row in self.told["sessions"] if self.pool in ("", row["pool"])]
        rows.sort(key=lambda row: row["session"])
        # Numbers come largest first, names as in a book, until r turns it round.
        rows.sort(key=lambda row: row[self.sort], reverse=(self.sort != "name") != self.ascending)
        return rows

    def picture(self, out: Console, height: int) -> RenderableType:
        """All of it, for so many lines."""
        from rich.console import Group
        from rich.text import Text

        if self.told is None:
            return Text(self.trouble or "looking ...", style="yellow" if self.trouble else "dim")
        parts: list[RenderableType] = [*self._head(), self._pools(out)]
        used = 3 + len(self.told["pools"]) + 1
        if self.help:
            return Group(*parts, Text(""), _keys())
        if "history" not in self.hidden:
            curves = self._curves(out)
            parts += curves
            used += len(curves)
        if "verbs" not in self.hidden:
            verbs, lines = self._verbs(out)
            parts += [Text(""), verbs]
            used += lines + 1
        if "sessions" not in self.hidden and height - used > 3:
            parts += [Text(""), self._sessions(out, height - used - 3)]
        return Group(*parts)

    def _head(self) -> list[Text]:
        from rich.text import Text

        from kvslot.cli import _screen

        assert self.told is not None
        status = self.told["status"]
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(f"kvslotd {status['version']}", style="bold")
        draining = status["state"] == "draining"
        state = f" {status['state']}"
        if draining:
            state += f", {_screen.duration(status['drain_left_s'])} left"
        text.append(state, style="yellow" if draining else "green")
        text.append(f", up {_screen.duration(status['uptime_s'])} · ")
        text.append(f"{_common.several(status['sessions'], 'session')}")
        if status["sessions_lost"]:
            text.append(f" ({status['sessions_lost']} lost)", style="yellow")
        text.append(f", {_common.several(status['sequences'], 'sequence')} · ")
        text.append(f"{self.told['verbs_s']:,.0f} verbs/s", style="bold")
        if self.told["refused_s"]:
            text.append(f", {self.told['refused_s']:,.1f} refused/s", style="yellow")
        if status.get("recordings"):
            text.append(" · recorded")
        clock = Text(no_wrap=True, overflow="ellipsis", style="dim")
        clock.append(time.strftime("%H:%M:%S", time.localtime(self.at)))
        clock.append(f" · every {self.interval:g} s · ? shows the keys")
        if self.stopped:
            clock.append(" · stopped", style="yellow")
        if self.trouble:
            clock = Text(f"{self.trouble}; trying again", style="bold red", no_wrap=True, overflow="ellipsis")
        return [text, clock, Text("")]

    def _pools(self, out: Console) -> Table:
        from kvslot.cli import _screen

        assert self.told is not None
        names = ["pool", "used", "", "waiting", "hit"]
        names += ["evictable", "coming", "prompt/s"] if out.width >= NARROW else []
        names += ["longest run", "evicted/s", "moved/s", "compaction"] if out.width >= WIDE else []
        table = _table(names, left=("pool", "", "compaction"))
        beside = 105 if out.width >= WIDE else 62 if out.width >= NARROW else 34
        width = max(4, min(40, out.width - beside))
        for pool in self.told["pools"]:
            if self.pool not in ("", pool["pool"]):
                continue
            usable = max(1, pool["usable"])
            coming = pool["fenced"] + pool["quarantined"] + pool["moving"]
            cells: list[str | Text] = [
                _screen.words(pool["pool"]),
                f"{pool['used_pct']:.1f} %",
                stacked(out, pool, width),
                f"{pool['tickets']:,}",
                "-" if pool["hit_pct"] is None else f"{pool['hit_pct']:.1f} %",
                _screen.share(pool["evictable"], usable),
                _screen.share(coming, usable),
                _short(pool["prompt_tokens_s"]),
                f"{pool['largest_free_run']:,}",
                _short(pool["evicted_tokens_s"]),
                _short(pool["moved_tokens_s"]),
                pool["compaction"],
            ]
            table.add_row(*cells[: len(names)], style="yellow" if pool["tickets"] else "")
        return table

    def _curves(self, out: Console) -> list[Text]:
        from rich.text import Text

        shown: list[Text] = [Text("")]
        names = [
            name
            for name in self.history
            if not self.pool or name.partition(" ")[2] in (self.pool, "", "us") or "/" in name
        ]
        label = max((len(name) for name in names), default=0)
        for name in names[:6]:
            values = self.history[name]
            whole = name.startswith(("used ", "hit "))
            top = 100.0 if whole else max(values) or 1.0
            width = max(10, min(HISTORY, out.width - label - 14))
            text = Text(no_wrap=True, overflow="crop")
            text.append(f"{name:<{label}} ", style="dim")
            text.append(sparks(out, list(values)[-width:], top), style="cyan")
            text.append(f" {values[-1]:,.1f} %" if whole else f" {_short(values[-1])}")
            shown.append(text)
        return shown

    def _verbs(self, out: Console) -> tuple[Table, int]:
        assert self.told is not None
        rows = [row for row in self.told["verbs"] if row["per_s"] > 0 and row["verb"] != "Inspect"]
        rows.sort(key=lambda row: -row["per_s"])
        names = ["verb", "/s", "p50 us", "p99 us"]
        names += ["refused/s", "in all"] if out.width >= NARROW else []
        table = _table(names, left=("verb",))
        for row in rows[:8]:
            cells = [
                row["verb"],
                f"{row['per_s']:,.0f}",
                _time(row["us_p50"]),
                _time(row["us_p99"]),
                f"{row['refused_s']:,.1f}" if row["refused_s"] else "",
                f"{row['count']:,}",
            ]
            table.add_row(*cells[: len(names)])
        return table, 1 + min(8, len(rows))

    def _sessions(self, out: Console, most: int) -> Table:
        from kvslot.cli import _screen

        rows = self.sessions()
        self.first = max(0, min(self.first, len(rows) - most))
        shown = rows[self.first : self.first + most]
        titles = {"session": "session", "name": "name", "pid": "pid", "pool": "pool", "sequences": "sequences",
                  "charged": "own"}  # fmt: skip
        if out.width < NARROW:
            titles = {"session": "session", "name": "name", "charged": "own"}
        if out.width >= WIDE:
            titles |= {"age_s": "for", "fenced": "fenced", "frames_s": "frames/s"}
        mark = "^" if self.ascending != (self.sort == "name") else "v"
        names = [f"{title} {mark}" if key == self.sort else title for key, title in titles.items()]
        left = (*(each for each in names if each.partition(" ")[0] in ("name", "pool")), "notes")
        names += ["steps", "notes"] if out.width >= NARROW else ["notes"]
        table = _table(names, left=left)
        from kvslot.cli.clients import notes

        for row in shown:
            words = {
                "name": _screen.words(row["name"]) or "-",
                "age_s": _screen.duration(row["age_s"]),
                "frames_s": _short(row["frames_s"]),
                "pool": _screen.words(row["pool"]),
                **{key: f"{row[key]:,}" for key in ("sequences", "charged", "fenced")},
            }
            steps = [f"{row['completed']} / {row['submitted']}"] if out.width >= NARROW else []
            table.add_row(
                *(words.get(key, str(row[key])) for key in titles),
                *steps,
                notes(row),
                style="yellow" if row["stalled"] or row["state"] != "live" or row["owes"] else "",
            )
        if len(rows) > len(shown):
            table.caption = f"{self.first + 1} to {self.first + len(shown)} of {len(rows)}"
        return table


def _table(names: list[str], left: tuple[str, ...]) -> Table:
    """A table of which no row takes two lines."""
    from kvslot.cli import _screen

    table = _screen.table(*names, left=left)
    for column in table.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    return table


def stacked(out: Console, pool: _control.Row, width: int) -> Text:
    """A pool as one bar: what runs, what is read, what can go, what is coming; the rest is free."""
    from rich.text import Text

    from kvslot.cli import _screen

    usable = max(1, pool["usable"])
    parts = {
        "private": pool["private"],
        "leased": pool["cached"] - pool["evictable"],
        "evictable": pool["evictable"],
        "coming": pool["fenced"] + pool["moving"] + pool["quarantined"],
        "reserved": pool["reserved"],
    }
    fine = _screen.unicode(out)
    text = Text(no_wrap=True)
    drawn, total = 0, 0.0
    for name, colour in STATES:
        total += parts[name]
        upto = min(width, round(width * total / usable))
        text.append(("█" if fine else name[0].upper()) * (upto - drawn), style=colour)
        drawn = upto
    text.append(("░" if fine else ".") * (width - drawn), style="dim")
    return text


def sparks(out: Console, values: list[float], top: float) -> str:
    """A curve of one line, 0 to `top`."""
    from kvslot.cli import _screen

    marks = SPARKS if _screen.unicode(out) else "_.-=*#"
    last = len(marks) - 1
    return "".join(marks[min(last, max(0, round(value / top * last)))] for value in values)


def _keys() -> Table:
    from kvslot.cli import _screen

    table = _screen.table("key", "", left=("key", ""))
    for key, words in KEYS:
        table.add_row(key, words)
    return table


class Keyboard:
    """Keys one by one, without Enter and without showing them; nothing where standard input is no terminal.

    Stopped by ^Z the terminal is as it was, and back again afterwards.
    """

    ARROWS: Final = {"[A": "up", "[B": "down", "[5~": "pageup", "[6~": "pagedown", "OA": "up", "OB": "down"}

    def __init__(self) -> None:
        self._terminal = sys.stdin is not None and sys.stdin.isatty()
        self._saved: list[Any] = []

    def __enter__(self) -> Keyboard:
        if self._terminal:
            import termios
            import tty

            self._saved = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """The terminal as it was."""
        if self._saved:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._saved)

    def again(self) -> None:
        """Takes it once more, after a stop."""
        if self._terminal:
            import tty

            tty.setcbreak(sys.stdin)

    def wait(self, seconds: float) -> list[str]:
        """Keys that come within so long; at once when there is one."""
        if not self._terminal:
            time.sleep(seconds)
            return []
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        if not ready:
            return []
        data = os.read(sys.stdin.fileno(), 64)
        return keys_of(data) if data else ["q"]  # the terminal has gone


def keys_of(data: bytes) -> list[str]:
    """What was typed: letters as they are, arrows by name, other sequences as nothing."""
    text = data.decode(errors="ignore")
    found = []
    while text:
        if text[0] != "\x1b":
            found.append(text[0])
            text = text[1:]
            continue
        for code, name in Keyboard.ARROWS.items():
            if text.startswith(code, 1):
                found.append(name)
                text = text[1 + len(code) :]
                break
        else:
            text = ""
    return found


def _live(arguments: argparse.Namespace, control: Control) -> int:
    from rich.live import Live

    from kvslot.api.client import KvslotError
    from kvslot.cli import _screen, rates

    out = _screen.console()
    screen = Screen(arguments.interval, arguments.pool)
    # What is there at the start is shown at once, with rates of a tenth of a second.
    _control.pools(control, arguments.pool)  # or there is none of that name
    before = rates.look(control)
    due = before.at + min(0.1, screen.interval)
    shown = 0
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_file(arguments))
        keyboard = stack.enter_context(Keyboard())
        live = stack.enter_context(Live(console=out, screen=True, auto_refresh=False, transient=True))
        stops = stack.enter_context(Stops(keyboard, live))
        asked: Any = control
        size = (0, 0)
        try:
            while True:
                drawn = False
                if time.monotonic() >= due:
                    due = time.monotonic() + screen.interval
                    if not screen.stopped:
                        try:
                            after = rates.look(asked)
                            if rates.same_daemon(before, after):
                                told = rates.measure(before, after)
                                screen.take(after.time, told)
                                shown += 1
                                if file is not None:
                                    file.write(_document(arguments, control.socket, told, after.time))
                                    file.flush()
                            before = after
                        except KvslotError as error:
                            screen.trouble = str(error)
                            fresh = _again(arguments)
                            if fresh is not None:
                                asked.close()
                                asked = fresh
                        drawn = True
                keys = keyboard.wait(max(0.0, min(LOOK_S, due - time.monotonic())))
                for key in keys:
                    if not screen.key(key):
                        return _common.OK
                    due = min(due, time.monotonic() + screen.interval)
                if stops.heed() or drawn or keys or size != (out.width, out.height):
                    size = (out.width, out.height)
                    live.update(screen.picture(out, out.height), refresh=True)
                if arguments.count and shown >= arguments.count:
                    return _common.OK
                if stops.ended:
                    return _common.INTERRUPTED
        except KeyboardInterrupt:
            return _common.OK  # ^C is how one leaves
        finally:
            asked.close()


def _again(arguments: argparse.Namespace) -> Control | None:
    """Another connection, if anybody answers again."""
    from kvslot.api.client import Control, KvslotError

    try:
        return Control(arguments.socket, timeout=_control.PATIENCE_S)
    except KvslotError:
        return None


class Stops:
    """^Z: the terminal is given back first, and taken again afterwards.  SIGTERM and SIGHUP: it is given back.

    The signals only leave a note: they may come in the middle of a write, and are heeded between two pictures.
    """

    def __init__(self, keyboard: Keyboard, live: Live) -> None:
        self._keyboard, self._live = keyboard, live
        self._asked = False
        self.ended = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stops:
        for number in (signal.SIGTSTP, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTSTP:
            self._asked = True
        else:
            self.ended = True

    def heed(self) -> bool:
        """Stops where that was asked for; true when it goes on after that."""
        if not self._asked:
            return False
        self._asked = False
        self._live.stop()
        self._keyboard.give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # Here it goes on.
        signal.signal(signal.SIGTSTP, self._note)
        self._keyboard.again()
        self._live.start(refresh=True)
        return True
