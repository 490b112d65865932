"""`kvslotctl status`: is the daemon there, what does it host, and how full is it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    from rich.console import Console

    from kvslot.api.client import Control

DESCRIPTION: Final = """\
Is the daemon there, what does it host, and how full is it: one line a pool. `used` is what tokens stand in or running
sequences hold; of that, `evictable` goes when memory is wanted. `coming` waits for a device's step or a lost process;
`hit` is the share of prompt tokens found cached since the daemon began; `waiting` requests were told LATER. A
recording in progress (kvslotctl record) has a line below."""

EXAMPLES: Final = """\
  kvslotctl status                             all pools of the daemon in its usual place
  kvslotctl status --socket /tmp/k.sock --json
  kvslotctl status > /dev/null && echo up      exit code 5: no daemon there
"""


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    _control.add_command(
        subparsers, "status", "is the daemon there, and how full are its pools", DESCRIPTION, EXAMPLES, run
    )


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""

    def act(control: Control) -> int:
        pools = _control.pools(control, arguments.pool)
        (status,) = control.inspect("status")
        if arguments.json is not None:
            code = _control.write(arguments, control, {"status": status, "pools": pools})
            if code or arguments.json == "-":
                return code
        from kvslot.cli import _screen

        _print(_screen.console(), control.socket, status, pools)
        return _common.OK

    return _control.ask(arguments, act)


def _print(out: Console, socket: str, status: _control.Row, pools: list[_control.Row]) -> None:
    from kvslot.cli import _screen

    lost = f", {status['sessions_lost']} of them lost" if status["sessions_lost"] else ""
    sessions = _common.several(status["sessions"], "session")
    holds = f"{sessions}{lost}, {_common.several(status['sequences'], 'sequence')}"
    up = _screen.duration(status["uptime_s"])
    if status["state"] == "draining":
        left = _screen.duration(status["drain_left_s"])
        out.print(
            f"kvslotd {status['version']} at {socket}: draining, ends in {left} at most, or when all sequences have "
            f"ended; up for {up}, {holds}",
            style="yellow",
        )
    else:
        out.print(f"kvslotd {status['version']} at {socket}: {status['state']} for {up}, {holds}")
    table = _screen.table(
        "pool", "memory", "block", "slots", "used", "", "evictable", "coming", "free", "hit", "waiting",
        left=("pool", ""),
    )  # fmt: skip
    for pool in pools:
        usable = pool["usable"]
        used = usable - pool["free"]
        coming = pool["fenced"] + pool["quarantined"] + pool["moving"]
        table.add_row(
            pool["pool"],
            _screen.size(pool["size_bytes"]),
            str(pool["block_size"]),
            f"{usable:,}",
            _screen.share(used, usable),
            _screen.bar(out, used / usable, 10),
            _screen.share(pool["evictable"], usable),
            _screen.share(coming, usable),
            _screen.share(pool["free"], usable),
            _screen.share(pool["hit_tokens"], pool["prompt_tokens"]),
            str(pool["tickets"]),
        )
    out.print(table)
    for each in status.get("recordings", ()):  # an older daemon tells of none
        lost = f", {each['lost_requests']:,} passed over" if each["lost_requests"] else ""
        out.print(
            f"pool {_screen.words(each['pool'])} is recorded by process {each['pid']}, since "
            f"{_screen.duration(each['age_s'])}: {_common.several(each['requests'], 'request')}{lost}"
            + (", with their tokens" if each["values"] else "")
        )
