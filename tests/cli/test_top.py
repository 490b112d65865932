"""`kvslotctl top`: rates between two looks, the picture at any width, keys, lines, JSON, and a terminal given back."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvslot.api.wire import messages
from kvslot.cli import ctl, host, rates, top

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens
from .control import FakeDaemon, served
from .views import made, view_of

POOL = {
    **dict.fromkeys(rates.HELD, 0), **dict.fromkeys(rates.COUNTED, 0),
    "pool": "chat", "block_size": 16, "usable": 1000, "free": 400, "cached": 300, "private": 200, "evictable": 100,
    "fenced": 100,
}  # fmt: skip
SESSION = {
    "session": 1, "name": "a", "pid": 10, "pool": "chat", "state": "live", "stalled": False, "owes": 0, "pins": 0,
    "page": 1, "group": 1, "posted_errors": 0, "outbox_bytes": 0, "age_s": 5.0, "sequences": 2, "charged": 30,
    "fenced": 0, "submitted": 4, "completed": 4, "frames": 100,
}  # fmt: skip
STATUS = {
    "version": "1.0", "boot": 5, "state": "running", "uptime_s": 10.0, "drain_left_s": None, "sessions": 1,
    "sessions_lost": 0, "sequences": 2,
}  # fmt: skip


def look(at: float, **changes: Any) -> rates.Look:
    """A look at a pool with one session, `at` seconds."""
    plain: dict[str, Any] = {
        "status": STATUS,
        "pools": [POOL],
        "sessions": [SESSION],
        "verbs": {"Allocate": {"verb": "Allocate", "count": 10, "refused": 1}},
        "steps": {"Allocate": [0, 0, 4, 4]},
        "compaction": {"chat": {"state": "settled", "unpacked_pct": 1.0}},
    }
    return rates.Look(at=at, time=1e9 + at, **{**plain, **changes})


def later(seconds: float = 2.0, **pool: Any) -> rates.Look:
    """The same `seconds` after `look(1.0)`, with what a little work changes."""
    return look(
        1.0 + seconds,
        pools=[{**POOL, "prompt_tokens": 400, "hit_tokens": 300, "evicted_tokens": 50, **pool}],
        sessions=[{**SESSION, "frames": 150}, {**SESSION, "session": 2, "name": "b", "charged": 90}],
        verbs={"Allocate": {"verb": "Allocate", "count": 30, "refused": 3}},
        steps={"Allocate": [0, 0, 4, 5, 0, 0, 0, 0, 0, 0, 2]},
    )


# -- rates ------------------------------------------------------------------------------------------------------------


def test_rates_are_differences_over_the_time_between() -> None:
    """Counters become rates a second, shares of hits are of the interval, what is held is that of the later look."""
    told = rates.measure(look(1.0), later())
    (pool,) = told["pools"]
    assert (pool["prompt_tokens_s"], pool["evicted_tokens_s"], pool["hit_pct"]) == (200.0, 25.0, 75.0)
    assert pool["used_pct"] == 60.0
    (verb,) = told["verbs"]
    assert (verb["per_s"], verb["refused_s"], verb["count"]) == (10.0, 1.0, 30)
    assert (told["verbs_s"], told["refused_s"]) == (10.0, 1.0)
    one, other = told["sessions"]
    assert (one["frames_s"], other["frames_s"]) == (25.0, 0.0)


def test_percentiles_are_of_the_interval_alone() -> None:
    """Times of before are taken out: three were sampled since, one in class 3 and two in class 10."""
    (verb,) = rates.measure(look(1.0), later())["verbs"]
    assert (verb["us_p50"], verb["us_p99"]) == (1.024, 1.024)
    assert rates.percentile([0, 4, 0, 1], 0.5) == 0.002
    assert rates.percentile([0, 0], 0.5) is None
    (idle,) = rates.measure(look(1.0), look(2.0))["verbs"]
    assert idle["us_p50"] is None


def test_nothing_asked_is_no_share_of_hits() -> None:
    """An idle pool has no hit rate, rather than one of nought."""
    assert rates.measure(look(1.0), look(2.0))["pools"][0]["hit_pct"] is None


def test_two_daemons_are_not_compared() -> None:
    """After a restart counters begin again: there is nothing to tell until the next look."""
    other = look(2.0, status={**STATUS, "boot": 6})
    assert not rates.same_daemon(look(1.0), other)
    assert not rates.same_daemon(look(1.0), look(1.0))
    assert rates.same_daemon(look(1.0), look(2.0))


# -- the picture ------------------------------------------------------------------------------------------------------


def screen(**changes: Any) -> top.Screen:
    made = top.Screen(1.0, "")
    made.take(1e9, rates.measure(look(1.0), later(**changes)))
    return made


def drawn(made: top.Screen, width: int = 140, height: int = 40, *, fine: bool = True) -> str:
    """The picture as text."""
    # As `ctl.main` makes standard output.
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8" if fine else "ascii", errors="replace")
    console = Console(
        file=out, width=width, height=height, color_system=None, highlight=False, markup=False, legacy_windows=False
    )  # fmt: skip
    console.print(made.picture(console, height))
    out.flush()
    buffer = out.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode()


def test_the_picture_shows_pools_verbs_curves_and_sessions() -> None:
    """All that is measured has its place, and the largest holder comes first."""
    text = drawn(screen())
    assert "kvslotd 1.0 running, up 10 s · 1 session, 2 sequences · 10 verbs/s, 1.0 refused/s" in text
    assert re.search(r"chat +60.0 % +█+░+ +0 +75.0 % +10 % +10 %", text)
    assert re.search(r"Allocate +10 +1 +1 +1.0 +30", text)
    assert re.search(r"^used chat +.+60.0 %", text, re.MULTILINE)
    names = re.findall(r"^ +[12] +([ab]) ", text, re.MULTILINE)
    assert names == ["b", "a"]


@pytest.mark.parametrize("width", [20, 40, 80, 109, 110, 200])
@pytest.mark.parametrize("fine", [True, False])
def test_no_width_breaks_the_picture(width: int, fine: bool) -> None:
    """It fits, in ASCII where the terminal knows no more, and never takes more lines than there are."""
    made = screen()
    made.told["sessions"] *= 40  # type: ignore[index]
    text = drawn(made, width, 24, fine=fine)
    lines = text.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    assert len(lines) <= 25
    assert fine or text.isascii()


def test_keys_change_what_is_shown() -> None:
    """Each key does what the help says, and unknown ones do nothing."""
    made = screen()
    assert "sequences v" not in drawn(made)
    assert made.key("s")
    assert "sequences v" in drawn(made)
    made.key("r")
    assert "sequences ^" in drawn(made)
    made.key("1")
    made.key("2")
    made.key("3")
    text = drawn(made)
    assert "Allocate" not in text
    assert "used chat" not in text
    assert "frames/s" not in text
    made.key("?")
    assert "this" in drawn(made)
    made.key("?")
    made.key(" ")
    assert made.stopped
    assert "stopped" in drawn(made)
    made.key("+")
    assert made.interval == 2.0
    for _ in range(9):
        made.key("-")
    assert made.interval == top.LEAST_S
    made.key("p")
    assert made.pool == "chat"
    made.key("p")
    assert made.pool == ""
    assert made.key("x")
    assert not made.key("q")


def test_sessions_are_gone_through_and_never_past_the_end() -> None:
    """Arrows and pages move the list; it says where it stands."""
    made = screen()
    assert made.told is not None
    made.told["sessions"] = [{**made.told["sessions"][0], "session": n} for n in range(1, 61)]
    made.key("3")
    made.key("3")
    assert "1 to " in drawn(made)
    for key in top.keys_of(b"jj\x1b[B\x1b[6~k\x1b[A"):
        made.key(key)
    assert made.first == 21
    assert re.search(r"22 to \d+ of 60", drawn(made))
    for _ in range(9):
        made.key("pagedown")
    assert re.search(r"to 60 of 60", drawn(made))


def test_names_of_clients_do_not_steer_the_terminal() -> None:
    """Escape sequences in a name are shown as question marks."""
    made = screen()
    assert made.told is not None
    made.told["sessions"][0]["name"] = "a\x1b[2Jb"
    text = drawn(made)
    assert "a?[2Jb" in text
    assert "\x1b[2J" not in text


def test_keys_are_read_as_terminals_send_them() -> None:
    """Arrows by name, letters as they are, and what is no key of ours as nothing."""
    assert top.keys_of(b"q") == ["q"]
    assert top.keys_of(b"\x1b[A\x1bOBs") == ["up", "down", "s"]
    assert top.keys_of(b"\x1b[99~") == []
    assert top.keys_of("ü".encode()) == ["ü"]


# -- lines and JSON ---------------------------------------------------------------------------------------------------


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with served(tmp_path / "k.sock", view_of(default=made(), other=made())) as each:
        yield each


def run(daemon: FakeDaemon, *argv: str) -> int:
    return ctl.main(["top", "--socket", daemon.path, "--interval", "0.1", *argv])


def test_on_a_pipe_it_is_a_line_a_pool_and_interval(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    """No escape sequence, a header now and then, columns that stay where they are."""
    assert run(daemon, "--count", "12") == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if line.startswith("time")]
    assert len(heads) == 2
    rows = [line for line in lines if not line.startswith("time")]
    assert len(rows) == 24
    assert {row.split()[1] for row in rows} == {"default", "other"}
    assert {len(row) for row in rows} == {len(heads[0])}
    assert not any("\x1b" in line for line in lines)


def test_json_is_one_document_a_line(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    """One by itself, as many as are asked for, each with the same keys; of one pool where that is named."""
    assert run(daemon, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == [
        "meta", "seconds", "status", "verbs_s", "refused_s", "pools", "verbs", "sessions",
    ]  # fmt: skip
    assert set(document["pools"][0]) == {
        *rates.HELD, *(f"{name}_s" for name in rates.COUNTED), "used_pct", "hit_pct", "compaction", "unpacked_pct",
    }  # fmt: skip
    assert set(document["verbs"][0]) == {"verb", "count", "per_s", "refused_s", "us_p50", "us_p99"}
    assert run(daemon, "--json", "--count", "3", "--pool", "other") == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["pools"][0]["pool"] for each in documents] == ["other"] * 3


def test_a_file_takes_the_documents_while_lines_are_shown(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """--json FILE writes beside what is shown."""
    file = tmp_path / "top.ndjson"
    assert run(daemon, "--count", "2", f"--json={file}") == 0
    assert len(file.read_text().splitlines()) == 2
    assert capsys.readouterr().out.startswith("time")


def test_a_reader_that_goes_away_ends_it(daemon: FakeDaemon) -> None:
    """`kvslotctl top | head -3` ends by itself, without a word on standard error."""
    command = [sys.executable, "-Im", "kvslot.cli.ctl", "top", "--socket", daemon.path, "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 0


# -- on a terminal ----------------------------------------------------------------------------------------------------


class Terminal:
    """`kvslotctl top` on a terminal of its own."""

    def __init__(self, socket: Path, *argv: str, columns: int = 120) -> None:
        self.controller, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (30, columns))
        self.before = termios.tcgetattr(terminal)
        self.terminal = terminal
        environ = {
            key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-Im",
                "kvslot.cli.ctl",
                "top",
                "--socket",
                str(socket),
                "--interval",
                "0.1",
                *argv,
            ],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**environ, "TERM": "xterm-256color", "PYTHONUTF8": "1"},
            process_group=0,  # a group without a parent in the session would not be stopped by SIGTSTP
        )
        self.text = ""

    def until(self, pattern: str, seconds: float = 60.0) -> None:
        """Reads on until it has shown this, from here on."""
        deadline = time.monotonic() + seconds
        seen = ""
        while not re.search(pattern, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {seen[-2000:]!r}"
            assert self.process.poll() is None, seen
            ready, _, _ = select.select([self.controller], [], [], 0.2)
            if ready:
                seen += os.read(self.controller, 1 << 16).decode(errors="replace")
        self.text += seen

    def press(self, keys: str) -> None:
        os.write(self.controller, keys.encode())

    def ends(self) -> int:
        """Its exit code, once it has ended; what it still writes is read."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            ready, _, _ = select.select([self.controller], [], [], 0.05)
            if ready:
                with contextlib.suppress(OSError):
                    self.text += os.read(self.controller, 1 << 16).decode(errors="replace")
        ready, _, _ = select.select([self.controller], [], [], 0)
        if ready:
            self.text += os.read(self.controller, 1 << 16).decode(errors="replace")
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.controller)
        os.close(self.terminal)


@pytest.fixture(scope="module")
def live() -> Iterator[Running]:
    with running() as each:
        yield each


def test_a_terminal_shows_a_living_picture_and_is_given_back(live: Running) -> None:
    """What clients do appears, keys act, and q leaves the terminal as it was."""
    terminal = Terminal(live.socket)
    try:
        terminal.until("0 sessions")
        with Wire(live.socket) as wire:
            wire.hello("engine-x")
            wire.call(messages.Allocate, wire.namespace, 1, tokens(40))
            terminal.until("1 session, 1 sequence")
            terminal.until("engine-x")
            terminal.press("?")
            terminal.until("sort sessions")
        terminal.press("q")
        assert terminal.ends() == 0
        assert termios.tcgetattr(terminal.terminal) == terminal.before
        assert terminal.text.count("\x1b[?1049h") == terminal.text.count("\x1b[?1049l") == 1
        assert terminal.text.rstrip().endswith("\x1b[?25h") or "\x1b[?25h" in terminal.text[-40:]
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 130), (signal.SIGHUP, 130)]
)
def test_interrupted_it_gives_the_terminal_back(live: Running, number: signal.Signals, code: int) -> None:
    """^C is how one leaves, exit code 0; whoever ends it otherwise finds the terminal as it was, too."""
    terminal = Terminal(live.socket)
    try:
        terminal.until("0 sessions")
        terminal.process.send_signal(number)
        assert terminal.ends() == code
        assert termios.tcgetattr(terminal.terminal) == terminal.before
    finally:
        terminal.close()


def test_stopped_it_lends_the_terminal_back_and_takes_it_again(live: Running) -> None:
    """^Z shows the shell's screen as it was, and after fg the picture is there again."""
    terminal = Terminal(live.socket)
    try:
        terminal.until("0 sessions")
        terminal.process.send_signal(signal.SIGTSTP)
        deadline = time.monotonic() + 60
        while host.process_state(terminal.process.pid) != "T":
            assert time.monotonic() < deadline
            if select.select([terminal.controller], [], [], 0.05)[0]:
                terminal.text += os.read(terminal.controller, 1 << 16).decode(errors="replace")
        assert termios.tcgetattr(terminal.terminal) == terminal.before
        terminal.process.send_signal(signal.SIGCONT)
        terminal.until("0 sessions")
        terminal.press("q")
        assert terminal.ends() == 0
        assert termios.tcgetattr(terminal.terminal) == terminal.before
    finally:
        terminal.close()


def test_a_restart_is_waited_for() -> None:
    """While no daemon answers the picture says so; with the next one it goes on."""
    with running() as first:
        socket = first.socket
        terminal = Terminal(socket)
        try:
            terminal.until("up ")
            assert first.stop() == 0
            terminal.until("trying again")
            with running(socket=socket):
                terminal.until(r"every 0.1 s · \?")
                terminal.press("q")
                assert terminal.ends() == 0
        finally:
            terminal.close()


def test_it_ends_after_as_many_intervals_as_are_asked_for(live: Running) -> None:
    """--count holds for the picture, too."""
    terminal = Terminal(live.socket, "--count", "2")
    try:
        assert terminal.ends() == 0
        assert "running" in terminal.text
    finally:
        terminal.close()
