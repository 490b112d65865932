"""`kvslotctl tickets`: which requests wait, for how much, and how long already."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    from kvslot.api.client import Control

DESCRIPTION: Final = """\
Which requests were told LATER and wait, in the order in which they are served: growth of what runs, then new requests,
then those that wait for a prefix that somebody else is computing. `needed` are slots; notes: `ready` (its turn has
come, and it keeps its place for ticket_grace_ms), `one run` (it wants its slots in one piece)."""

EXAMPLES: Final = """\
  kvslotctl tickets                            of the first pool
  kvslotctl tickets --pool default --json
"""


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    _control.add_command(subparsers, "tickets", "which requests wait for memory", DESCRIPTION, EXAMPLES, run)


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""

    def act(control: Control) -> int:
        rows = list(control.inspect("tickets", pool=arguments.pool))
        if arguments.json is not None:
            code = _control.write(arguments, control, {"rows": rows})
            if code or arguments.json == "-":
                return code
        from kvslot.cli import _screen

        out = _screen.console()
        if not rows:
            out.print("nobody waits")
            return _common.OK
        table = _screen.table("ticket", "session", "needed", "for", "what", "notes", left=("what", "notes"))
        for row in rows:
            kind = "growth" if row["growth"] else "a prefix" if row["awaits_commit"] else "a new request"
            notes = [word for key, word in (("ready", "ready"), ("contiguous", "one run")) if row[key]]
            table.add_row(
                str(row["ticket"]),
                str(row["session"]),
                f"{row['needed']:,}",
                _screen.duration(row["age_s"]),
                kind,
                ", ".join(notes),
            )
        out.print(table)
        return _common.OK

    return _control.ask(arguments, act)
