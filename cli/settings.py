"""`kvslotctl settings`: what the running daemon goes by."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    from kvslot.api.client import Control

DESCRIPTION: Final = """\
The settings that the running daemon goes by, with what each may be; a `*` marks those that `kvslotctl set` can change.
Settings of pools stand in --json only, under `pools`: as configured, and as the core has them."""

EXAMPLES: Final = """\
  kvslotctl settings
  kvslotctl settings --json | jq '.rows[] | select(.name == "drain_seconds") | .value'
"""


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    _control.add_command(
        subparsers, "settings", "what the running daemon goes by", DESCRIPTION, EXAMPLES, run, pool=False
    )


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""

    def act(control: Control) -> int:
        rows = list(control.inspect("settings"))
        if arguments.json is not None:
            document = {"rows": rows, "pools": list(control.inspect("config"))}
            code = _control.write(arguments, control, document)
            if code or arguments.json == "-":
                return code
        from kvslot.cli import _screen

        table = _screen.table("setting", "", "value", "allowed", left=("value", "allowed"))
        table.columns[0].justify = "left"
        for row in rows:
            value = ", ".join(map(str, row["value"])) if isinstance(row["value"], list) else str(row["value"])
            if row["allowed"].startswith("permission bits"):
                value = f"0o{row['value']:o}"
            elif isinstance(row["value"], bool):
                value = value.lower()
            elif "iB to " in row["allowed"] and isinstance(row["value"], int):
                value = _screen.size(row["value"])
            table.add_row(
                row["name"], "*" if row["changeable"] else "", _screen.words(value) or "-", row["allowed"]
            )
        _screen.console().print(table)
        return _common.OK

    return _control.ask(arguments, act)
