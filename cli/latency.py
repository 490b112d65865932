"""`kvslotctl latency`: how often each verb was said, and how long the steps of the data path took."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    from kvslot.api.client import Control

DESCRIPTION: Final = """\
How often each verb was said since the daemon began, how often it was refused, and how long it took inside the daemon,
in microseconds: `p50` and `p99` of the whole (upper edges of classes, so good to a factor of two), and the mean of each
step: received (one recv), decoded, applied (admitted and applied: the core's call), encoded, sent. Of the turns of all
clients one in 17 is timed; verbs inside a Batch count, and their times are the Batch's. Waiting in the socket is left
out."""

EXAMPLES: Final = """\
  kvslotctl latency
  kvslotctl latency --json | jq '.rows[] | select(.verb == "Allocate") | .all_us_p99'
"""

STEPS: Final = ("received", "decoded", "applied", "encoded", "sent")


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    _control.add_command(
        subparsers,
        "latency",
        "how long the daemon takes, verb by verb",
        DESCRIPTION,
        EXAMPLES,
        run,
        pool=False,
    )


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""

    def act(control: Control) -> int:
        rows = list(control.inspect("latency"))
        if arguments.json is not None:
            code = _control.write(arguments, control, {"rows": rows})
            if code or arguments.json == "-":
                return code
        from kvslot.cli import _screen

        out = _screen.console()
        unit = "µs" if _screen.unicode(out) else "us"
        heads = [f"{name}\n{unit}" for name in ("p50", "p99", "mean", *STEPS)]
        table = _screen.table("verb", "count", "refused", "timed", *heads, left=("verb",))
        for row in rows:
            times = [row.get(key) for key in ("all_us_p50", "all_us_p99", "all_us_mean")]
            times += [row.get(f"{step}_us_mean") for step in STEPS]
            table.add_row(
                row["verb"],
                f"{row['count']:,}",
                f"{row.get('refused', 0):,}",
                f"{row.get('sampled', 0):,}",
                *("-" if time is None else f"{time:,.1f}" for time in times),
            )
        out.print(table)
        return _common.OK

    return _control.ask(arguments, act)
