"""Commands that wait: a bar on a terminal for what tells of no progress, and a drain that is waited for."""

from __future__ import annotations

import io
import itertools
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvslot.allocator import Pool
from kvslot.api.wire import messages
from kvslot.cli import ctl

from ..tools.daemon import running
from ..tools.wire import Wire, tokens
from . import control
from .control import FakeDaemon, served
from .views import made, view_of


class Screen(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with served(tmp_path / "k.sock", view_of(default=made())) as each:
        yield each


def test_what_tells_of_no_progress_is_waited_for_with_a_bar(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal something moves while a recount lasts; its result comes all the same, and so does a refusal."""
    monkeypatch.setattr("kvslot.cli._common.BAR_AFTER_S", 0.0)
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)

    def slow(pool: object) -> list[str]:
        deadline = time.monotonic() + 30
        while "recounting default" not in screen.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return []

    monkeypatch.setattr(control, "audit", slow)
    assert ctl.main(["audit", "--socket", daemon.path]) == 0
    assert "default: sound" in capsys.readouterr().out
    daemon.denies = True
    assert ctl.main(["audit", "--socket", daemon.path]) == 5
    assert "control_uids" in screen.getvalue()


def test_without_a_terminal_there_is_neither_bar_nor_thread(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script's command runs in its own thread, and standard error stays empty."""
    monkeypatch.setattr("kvslot.cli._common.BAR_AFTER_S", 0.0)
    before = threading.active_count()

    def counts(pool: object) -> list[str]:
        assert threading.active_count() == before
        return []

    monkeypatch.setattr(control, "audit", counts)
    assert ctl.main(["audit", "--socket", daemon.path]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("step", "least", "most"), [(0.01, 0, 0), (1.0, 5, 10), (10.0, 25, 60)])
def test_without_a_terminal_there_is_a_line_now_and_then(
    step: float, least: int, most: int,
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """On standard error, of how far it is: none for ten seconds, then one as often, and seldomer when it takes long."""
    from kvslot.cli import evict

    clock = itertools.count(1000.0, step)  # a step at each look at it, so at each report
    monkeypatch.setattr("kvslot.cli._common.time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(evict, "EACH", 1)
    monkeypatch.setattr(Pool, "evict", lambda pool, tokens: tokens)
    assert ctl.main(["evict", "90", "--socket", daemon.path]) == 0
    told = capsys.readouterr()
    assert "evicting" not in told.out
    lines = told.err.splitlines()
    assert least <= len(lines) <= most
    assert all(re.fullmatch(r" *\d+%  +\d+:\d\d  evicting", line) for line in lines)


def test_a_drain_is_waited_for_where_that_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """--wait comes back when the last sequence has ended and the daemon with it, and not before."""
    with running(drain_seconds=30.0) as daemon:
        codes: list[int] = []
        with Wire(daemon.socket) as wire:
            wire.hello()
            wire.call(messages.Allocate, wire.namespace, 1, tokens(10))
            waits = threading.Thread(
                target=lambda: codes.append(ctl.main(["drain", "--wait", "--socket", str(daemon.socket)]))
            )
            waits.start()
            while '"draining"' not in daemon.text():
                assert waits.is_alive()
            assert waits.is_alive()
            wire.call(messages.Free, 1)
            waits.join(60)
        assert codes == [0]
        assert daemon.process.wait(30) == 0
    assert "draining: 1 sequence running" in capsys.readouterr().out
