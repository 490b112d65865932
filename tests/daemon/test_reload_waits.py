"""Settings are read beside the loop; what any task of the daemon raises ends it with a line that says so."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvslot.api.client import Control
from kvslot.api.wire.messages import Ping, Pong

from ..tools.daemon import running
from ..tools.wire import Wire

SLOW = """
import os, time
from kvslot.daemon import config
load = config.load
def slow(*arguments):
    until = time.monotonic() + 20
    while not os.path.exists({go!r}) and time.monotonic() < until:
        time.sleep(0.005)
    with open({count!r}, "a") as file:
        file.write("x")
    return load(*arguments)
config.load = slow
"""


def test_engines_are_served_while_settings_are_read(tmp_path: Path) -> None:
    """A reading that takes long holds nobody up; all who ask get what was taken, and readings are one at a time."""
    go, count = tmp_path / "go", tmp_path / "count"
    with running(first=SLOW.format(go=str(go), count=str(count))) as daemon:
        file = daemon.log.with_name("kvslot.toml")
        file.write_text("stall_seconds = 7.25\n" + file.read_text())
        found: list[list[str]] = []

        def ask() -> None:
            with Control(str(daemon.socket)) as control:
                found.append(control.reload().changed)

        askers = [threading.Thread(target=ask) for _ in range(3)]
        for each in askers:
            each.start()
        try:
            with Wire(daemon.socket) as wire:
                for _ in range(20):
                    assert isinstance(wire.call(Ping), Pong)
            assert not found
        finally:
            go.touch()
        for each in askers:
            each.join(20)
        assert ["stall_seconds"] in found
        assert len(found) == 3
        assert len(count.read_text()) <= 3


@pytest.mark.parametrize(
    ("place", "what"), [("server.Server.upkeep", "upkeep"), ("service.Service.watch", "the watch")]
)
def test_a_fault_of_any_task_has_a_last_line(place: str, what: str) -> None:
    """Exit code 70, and `internal_fault` says where."""
    module, kind, name = place.split(".")
    kept = "async " if name == "watch" else ""
    fault = f"""
from kvslot.daemon import {module}
{kept}def boom(*_):
    raise KeyError("boom")
{module}.{kind}.{name} = boom
"""
    with running(first=fault, code=None, faulty=True) as daemon:
        assert daemon.process.wait(20) == 70
        (line,) = [each for each in daemon.text().splitlines() if '"internal_fault"' in each]
        assert what in line
        assert "ExceptionGroup" not in daemon.text()
