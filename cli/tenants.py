"""`kvslotctl tenants`: what each tenant holds and may hold, and what was refused for it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    from kvslot.api.client import Control

DESCRIPTION: Final = """\
What each tenant of the configuration holds of each pool, over all its sessions, beside what it may: `own` slots are
private, fenced or quarantined (what is published is nobody's own), `ready` slots stand in growth runs that nothing is
written to yet. `refused` counts what its quotas turned away since the start: sessions, and requests beyond its rate. A
tenant called * is all those together that have no table of their own; - is no quota."""

EXAMPLES: Final = """\
  kvslotctl tenants
  kvslotctl tenants --pool default --json | jq '.rows[] | select(.slots > 0 and .charged > 0.9 * .slots) | .tenant'
"""


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    _control.add_command(subparsers, "tenants", "what each tenant holds, and may", DESCRIPTION, EXAMPLES, run)


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""

    def act(control: Control) -> int:
        rows = list(control.inspect("tenants", pool=arguments.pool))
        if arguments.json is not None:
            code = _control.write(arguments, control, {"rows": rows})
            if code or arguments.json == "-":
                return code
        from kvslot.cli import _screen

        table = _screen.table(
            "tenant", "pool", "own", "of quota", "fenced", "ready", "of quota", "sessions", "of quota", "namespaces",
            "of quota", "requests/s",
            "refused", left=("tenant", "pool"),
        )  # fmt: skip
        for row in rows:
            full = row["slots"] and row["charged"] > 0.9 * row["slots"]
            table.add_row(
                _screen.words(row["tenant"]) or "''",
                row["pool"],
                f"{row['charged']:,}",
                _screen.share(row["charged"], row["slots"]),
                f"{row['fenced']:,}",
                f"{row['unwritten']:,}",
                _screen.share(row["unwritten"], row["reserved"]),
                f"{row['sessions']:,}",
                _screen.share(row["sessions"], row["sessions_max"]),
                f"{row.get('namespaces', 0):,}",
                _screen.share(row.get("namespaces", 0), row.get("namespaces_max", 0)),
                f"{row['requests_per_second']:g}" if row["requests_per_second"] else "-",
                f"{row['refused_sessions'] + row.get('refused_namespaces', 0) + row['refused_requests']:,}",
                style="yellow" if full else "",
            )
        _screen.console().print(table)
        return _common.OK

    return _control.ask(arguments, act)
