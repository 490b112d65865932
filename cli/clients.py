"""`kvslotctl clients`: who is connected, what each of them holds, and who does not get on."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    from rich.console import Console

    from kvslot.api.client import Control

DESCRIPTION: Final = """\
Who is connected and what each holds, the largest holder first. `own` slots are private to it and count against its
quota; what it has published is everybody's. `fenced` ones were given back and wait for a step of its device. `steps`
are completed / submitted. Notes: `stalled` (steps submitted and none completes, for so long), `lost` (the connection
ended so long ago, the process may live: its slots are set aside until it is gone), `owes n` (it was asked to give n
sequences up), `unread` (bytes of answers it has not fetched), `posted refused` (of the frees and trims that it asked
no reply to), `follows` (it said movable, and its steps show that it uses new places in time: what it reads may be
moved), `movable` (it said so, and is not relied upon now: no step for two seconds, or too many old places not let go
of), `old places` (slots that were moved, and wait for its steps)."""

EXAMPLES: Final = """\
  kvslotctl clients
  kvslotctl clients --pool default --json | jq '.rows[] | select(.stalled) | .pid'
  kvslotctl clients --json | jq '.rows[] | {name, movable, follows}'
"""


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    _control.add_command(
        subparsers, "clients", "who is connected, and what each of them holds", DESCRIPTION, EXAMPLES, run
    )


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""

    def act(control: Control) -> int:
        rows = list(control.inspect("sessions", pool=arguments.pool))
        rows.sort(key=lambda row: (-row["charged"], row["session"]))
        if arguments.json is not None:
            code = _control.write(arguments, control, {"rows": rows})
            if code or arguments.json == "-":
                return code
        from kvslot.cli import _screen

        _print(_screen.console(), rows)
        return _common.OK

    return _control.ask(arguments, act)


def _print(out: Console, rows: list[_control.Row]) -> None:
    from kvslot.cli import _screen

    if not rows:
        out.print("nobody is connected")
        return
    table = _screen.table(
        "session", "name", "pid", "user", "pool", "for", "sequences", "own", "of quota", "fenced", "steps", "notes",
        left=("name", "pool", "notes"),
    )  # fmt: skip
    for row in rows:
        table.add_row(
            str(row["session"]),
            _screen.words(row["name"]) or "-",
            str(row["pid"]),
            _user(row["uid"]),
            row["pool"],
            _screen.duration(row["age_s"]),
            f"{row['sequences']:,}",
            f"{row['charged']:,}",
            _screen.share(row["charged"], row["quota"]),
            f"{row['fenced']:,}",
            f"{row['completed']} / {row['submitted']}",
            notes(row),
            style="yellow" if row["stalled"] or row["state"] != "live" or row["owes"] else "",
        )
    out.print(table)


def notes(row: _control.Row) -> str:
    """What is to be said of a session, in a few words; "" for one that gets on."""
    from kvslot.cli import _screen

    notes = []
    if row["state"] != "live":
        lost = row.get("lost_s", 0.0)
        notes.append(f"{row['state']} {_screen.age(lost)}" if lost >= 1 else row["state"])
    if row["stalled"]:
        behind = row.get("behind_s", 0.0)
        notes.append(f"stalled {_screen.age(behind)}" if behind >= 1 else "stalled")
    if row["owes"]:
        notes.append(f"owes {row['owes']}")
    if row["pins"]:
        notes.append(_common.several(row["pins"], "pin"))
    if row["page"] > 1:
        notes.append(f"pages of {row['page']}")
    if row["group"] > 1:
        notes.append(f"one of {row['group']} processes")
    if row.get("movable"):  # a daemon of before does not tell
        notes.append("follows" if row["follows"] else "movable")
    if row.get("retired_tokens"):
        notes.append(f"{row['retired_tokens']:,} old places")
    if row["posted_errors"]:
        notes.append(f"{row['posted_errors']:,} posted refused")
    if row["outbox_bytes"]:
        notes.append(f"{_screen.size(row['outbox_bytes'])} unread")
    return ", ".join(notes)


def _user(uid: int) -> str:
    """A name where this machine has one for it."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)
