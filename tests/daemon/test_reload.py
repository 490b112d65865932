"""SIGHUP: what may be changed while running is, and the rest is named."""

import signal
import time

from kvslot.api.wire.messages import Inspect, Ping, Pong

from ..tools.daemon import Running, running
from ..tools.wire import Wire


def wait_for(daemon: Running, text: str, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while text not in daemon.text():
        assert time.monotonic() < deadline, daemon.text()
        time.sleep(0.01)


def test_sighup_reads_the_file_again() -> None:
    """A changed file is read; a broken one changes nothing; sessions go on either way."""
    with running() as daemon, Wire(daemon.socket) as wire:
        wire.hello()
        file = daemon.log.with_name("kvslot.toml")
        text = file.read_text()
        file.write_text("stall_seconds = 7.25\nsessions_max = 9\n" + text)
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(daemon, '"reloaded"')
        line = next(each for each in daemon.text().splitlines() if '"reloaded"' in each)
        assert "stall_seconds" in line
        assert '"needs_restart":["sessions_max"]' in line.replace(" ", "")
        with Wire(daemon.socket) as control:
            settings = {row["name"]: row["value"] for row in control.call(Inspect, "settings").rows}
        assert settings["stall_seconds"] == 7.25
        file.write_text("nonsense = 1\n" + text)
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(daemon, '"reload_failed"')
        assert isinstance(wire.call(Ping), Pong)
