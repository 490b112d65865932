"""`kvslotctl drain`: ends the daemon in good order, as SIGTERM does."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Final

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    from kvslot.api.client import Control

DESCRIPTION: Final = """\
End the daemon as SIGTERM does: no new sessions and no new work, clients are told, and when the last running sequence
has ended, or the time is over, the daemon ends. Meanwhile `kvslotctl status` says how long is left and `kvslotctl
clients` who still runs what. This command comes back at once, or with --wait when the daemon has ended. What is cached
is lost with it: of a daemon that ended as told to nothing is kept. `systemctl restart` keeps it."""

EXAMPLES: Final = """\
  kvslotctl drain                              running sequences have drain_seconds
  kvslotctl drain --seconds 120
  kvslotctl drain --wait && echo gone
  kvslotctl drain --now                        or, where it is draining already: end at once
"""


POLL_S: Final = 0.1


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    parser = _control.add_command(
        subparsers, "drain", "end the daemon in good order", DESCRIPTION, EXAMPLES, run, pool=False
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--seconds", type=_seconds, metavar="N", help="that running sequences have (drain_seconds)"
    )
    how.add_argument("--now", action="store_true", help="wait for nobody")
    parser.add_argument("--wait", action="store_true", help="come back when the daemon has ended")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not 0 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 86400 seconds")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""

    def act(control: Control) -> int:
        (status,) = control.inspect("status")
        already = status["state"] == "draining"
        left = status["drain_left_s"]
        asked = not already or arguments.now
        if not already:
            # What was configured may be changed between question and answer, so it is told as it is asked for.
            left = 0.0 if arguments.now else arguments.seconds
            if left is None:
                left = next(
                    row["value"] for row in control.inspect("settings") if row["name"] == "drain_seconds"
                )
            control.drain(deadline_ms=max(1, round(left * 1000)))
        elif arguments.now:
            left = 0.0
            control.drain()
        row = {"asked": asked, "drain_left_s": left, "sequences": status["sequences"]}
        code = _common.OK
        if arguments.json is not None:
            code = _control.write(arguments, control, {"rows": [row]})
        if arguments.json != "-" and not code:
            running = _common.several(status["sequences"], "sequence")
            if not asked:
                print(
                    f"it is draining already, {running} running, ends in {left:.0f} s at most; --now ends it at once"
                )
            elif not left or not status["sequences"]:
                print(f"the daemon ends now; {running} running")
            else:
                print(f"draining: {running} running, ends in {left:g} s at most", flush=True)
        if arguments.wait and not code:
            _wait(control, left or 0.0)
        return code

    return _control.ask(arguments, act)


def _wait(control: Control, seconds: float) -> None:
    """Until the daemon has ended, which it says by closing the connection, or by being another one now."""
    from kvslot.api.client import Disconnected, ShuttingDown

    began = time.monotonic()
    try:
        boot = control.ping().boot
        with _common.Bar() as bar:
            while control.ping().boot == boot:
                bar.report("draining", min(1.0, (time.monotonic() - began) / max(seconds, 0.1)))
                time.sleep(POLL_S)
    except (Disconnected, ShuttingDown):
        return
