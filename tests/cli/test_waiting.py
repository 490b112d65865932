"""Commands that wait: a bar on a terminal for what tells of no progress, and a drain that is waited for."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from kvslot.api.wire import messages
from kvslot.cli import _common, ctl

from ..tools.daemon import running
from ..tools.wire import Wire, tokens


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_tells_of_no_progress_is_waited_for_with_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal something moves while it lasts; its result, or what it raised, comes back all the same."""
    monkeypatch.setattr(_common, "BAR_AFTER_S", 0.0)
    monkeypatch.setattr(_common, "BAR_EVERY_S", 0.01)
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    shown = threading.Event()

    class Bar(_common.Bar):
        def report(self, words: str, share: float | None) -> None:
            super().report(words, share)
            assert share is None
            shown.set()

    def slow() -> int:
        assert shown.wait(30)
        return 7

    def fails() -> int:
        raise LookupError("no")

    with Bar() as bar:
        assert bar.during("counting", slow) == 7
        with pytest.raises(LookupError):
            bar.during("failing", fails)
    assert "counting" in screen.getvalue()


def test_without_a_terminal_there_is_neither_bar_nor_thread(capsys: pytest.CaptureFixture[str]) -> None:
    """A script's command runs in its own thread, and standard error stays empty."""
    with _common.Bar() as bar:
        assert bar.during("counting", threading.current_thread) is threading.current_thread()
    assert capsys.readouterr().err == ""


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
