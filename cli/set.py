"""`kvslotctl set`: changes a setting of a running daemon."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    from kvslot.api.client import Control

DESCRIPTION: Final = """\
Change a setting of the running daemon, until it ends or its file is read again with SIGHUP; in the file it stays.
`kvslotctl settings` shows all settings, and marks those that can be changed so. Nobody is disturbed."""

EXAMPLES: Final = """\
  kvslotctl set log_level debug
  kvslotctl set drain_seconds 120 --socket /run/kvslot/kvslot.sock
  kvslotctl set slice_us 200 --json
"""

NAMES: Final = (
    "log_level", "stall_seconds", "reply_seconds", "idle_hello_seconds", "drain_seconds", "slice_us",
    "compaction", "compaction_start", "compaction_stop", "compaction_run_blocks", "compaction_duty",
    "compaction_collisions",
)  # fmt: skip
"""For completion: this room does not load the daemon's, which is who decides.  A test compares."""


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    parser = _control.add_command(
        subparsers, "set", "change a setting of the running daemon", DESCRIPTION, EXAMPLES, run, pool=False
    )
    parser.add_argument(
        "name", metavar="NAME", choices=_common.Suggested(lambda: NAMES), help=f"one of {', '.join(NAMES)}"
    )
    parser.add_argument("value", metavar="VALUE", help="as it would stand in the environment: 120, debug")


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""

    def act(control: Control) -> int:
        name = arguments.name.replace("-", "_")
        before = _value(control, name)
        control.set_config(name, arguments.value)
        row = {"name": name, "value": _value(control, name), "before": before}
        code = _common.OK
        if arguments.json is not None:
            code = _control.write(arguments, control, {"rows": [row]})
        if arguments.json != "-" and not code:
            print(f"{name} is {row['value']} (was {before}) until the daemon ends or reads its file again")
        return code

    return _control.ask(arguments, act)


def _value(control: Control, name: str) -> object:
    """What a setting is now; None for one that there is not, which the daemon refuses to set with a word on why."""
    return next((row["value"] for row in control.inspect("settings") if row["name"] == name), None)
