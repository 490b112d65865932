"""`kvslotctl audit`: has every pool recounted from nothing, and says what does not agree."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Final

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    from kvslot.api.client import Control

DESCRIPTION: Final = """\
Has the daemon recount each pool from nothing: every slot has one owner, references equal the holders found, tokens,
keys and parents of the prefix tree agree, sums equal the recount. Exit code 1 if anything does not: that is a fault of
kvslot, so please report what is printed. A copy of the daemon counts, as of one moment, while it goes on serving."""

EXAMPLES: Final = """\
  kvslotctl audit                              all pools
  kvslotctl audit --pool default --json
  kvslotctl audit > /dev/null || echo "look at this daemon"
"""

PATIENCE_S: Final = 600.0
"""A recount of millions of slots may take seconds; one that never ends is what this command is for."""


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    _control.add_command(
        subparsers,
        "audit",
        "have the pools recounted, and every disagreement named",
        DESCRIPTION,
        EXAMPLES,
        run,
    )


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""

    def act(control: Control) -> int:
        rows = []
        with _common.Bar() as bar:
            for name in [pool["pool"] for pool in _control.pools(control, arguments.pool)]:
                told = bar.during(f"recounting {name}", partial(control.audit, pool=name))
                rows.append(
                    {
                        "pool": name,
                        "sound": not told.faults,
                        "faults": list(told.faults),
                        "milliseconds": told.milliseconds,
                    }
                )
        code = _common.OK
        if arguments.json is not None:
            code = _control.write(arguments, control, {"rows": rows})
        if arguments.json != "-" and not code:
            for row in rows:
                _print(row)
        return code or (_common.OK if all(row["sound"] for row in rows) else _common.FAILED)

    return _control.ask(arguments, act, patience=PATIENCE_S)


def _print(row: _control.Row) -> None:
    faults = row["faults"]
    verdict = "sound" if row["sound"] else f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
    print(f"{row['pool']}: {verdict} ({row['milliseconds']:.1f} ms)")
    for fault in faults:
        print(f"  {fault}")
