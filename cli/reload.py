"""`kvslotctl reload`: has the daemon read its settings again, and says what came of it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    from kvslot.api.client import Control

DESCRIPTION: Final = """\
Have the daemon read its configuration again, as SIGHUP and `systemctl reload` do, and say which settings hold from now
on and which differ and need a restart. Token files of the admin API are read again and its sockets tried that could not
be had; where one cannot be used, what held before holds on, a TCP address that works and is still allowed among it, and
that is told (exit code 1). Engines are not disturbed. A file with an error changes nothing, and is told (exit code 2).
What `kvslotctl set` changed is as the file says again."""

EXAMPLES: Final = """\
  kvslotctl reload
  kvslotctl reload --json | jq -e '.rows[0].needs_restart == []'
exit codes of reload: 1 where token files or sockets of the admin API cannot be had, 2 for settings with an error
"""


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    _control.add_command(
        subparsers, "reload", "have the settings read again", DESCRIPTION, EXAMPLES, run, pool=False
    )


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""

    def act(control: Control) -> int:
        told = control.reload()
        code = _common.OK
        row = {
            "changed": list(told.changed), "needs_restart": list(told.needs_restart), "taken": list(told.taken),
            "failed": list(told.failed),
        }  # fmt: skip
        if arguments.json is not None:
            code = _control.write(arguments, control, {"rows": [row]})
        if arguments.json != "-" and not code:
            print(f"from now on: {', '.join(told.changed)}" if told.changed else "nothing changed")
            if told.needs_restart:
                print(f"needs a restart: {', '.join(told.needs_restart)}")
            for each in told.taken:
                print(each)
        for each in told.failed:
            _control.fail(arguments, each, code)
        return code or (_common.FAILED if told.failed else code)

    return _control.ask(arguments, act)
