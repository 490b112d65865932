"""`kvslotctl frag`: where a pool's memory is lost, in figures whose definitions stand in the help."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    from rich.console import Console

    from kvslot.api.client import Control

DESCRIPTION: Final = """\
Where a pool's memory is lost. Definitions (names as in --json):

  internal_waste_pct     of the slots in blocks that are not wholly free, less room of running sequences that is not
                         written yet: the share that holds no token. Copies of what is cached anyway (duplicate_tokens,
                         peeled_tokens), fenced and quarantined slots hold none.
  reserved_pct           that unwritten room, as a share of the slots in blocks that are not wholly free.
  pinned_waste_tokens    free slots in blocks that something keeps from being wholly free: new pieces may take them,
                         whole blocks and long runs cannot be made of them. pinned_waste_pct: as a share of the pool.
  hole_tokens            free slots in runs without one whole cell (a cell: 32 slots, or a block if that is smaller).
  scatter_pct            1 - longest free run / free slots: 0 when all free memory is one run.
  extents_per_1k_tokens  pieces that what was handed out since the start lies in, per thousand tokens.
  lost_hit_tokens        tokens that were found cached since the start, and that whole pages or opaque blocks cut off.
  usable_run_pct         for 1, 2, 4 ... 1024 blocks: of the free slots, the share in runs that long or longer, runs
                         counted in whole cells. 100: any request of that length fits as one run wherever anything is
                         free; 0: none does, though the memory may be there in pieces."""

EXAMPLES: Final = """\
  kvslotctl frag
  kvslotctl frag --pool default --json | jq '.rows[0].usable_run_pct["64"]'
"""

BAR_WIDTH: Final = 20


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    _control.add_command(
        subparsers, "frag", "where memory is lost: waste, scatter, usable runs", DESCRIPTION, EXAMPLES, run
    )


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""

    def act(control: Control) -> int:
        rows = list(control.inspect("frag", pool=arguments.pool))
        if arguments.json is not None:
            code = _control.write(arguments, control, {"rows": rows})
            if code or arguments.json == "-":
                return code
        from kvslot.cli import _screen

        out = _screen.console()
        for row in rows:
            _print(out, row)
        return _common.OK

    return _control.ask(arguments, act)


def _print(out: Console, row: _control.Row) -> None:
    from kvslot.cli import _screen

    out.print(
        f"{row['pool']} · {_common.several(row['blocks'], 'block')} of {row['block_size']}, "
        f"{row['blocks_free']:,} wholly free · "
        f"{_common.several(row['free'], 'slot')} free in {_common.several(row['free_runs'], 'run')}",
        style="bold",
    )
    table = _screen.table("", "value", "", left=("", ""))
    table.add_row(
        "internal_waste_pct", _screen.pct(row["internal_waste_pct"]), "of used blocks holds no token"
    )
    table.add_row(
        "reserved_pct", _screen.pct(row["reserved_pct"]), f"{row['unwritten']:,} slots of room to grow"
    )
    copies = row["duplicate_tokens"] + row["peeled_tokens"]
    table.add_row("copies", f"{copies:,}", "slots hold what is cached anyway")
    table.add_row(
        "pinned_waste_tokens",
        f"{row['pinned_waste_tokens']:,}",
        f"free in blocks that are not: {_screen.pct(row['pinned_waste_pct'])} of the pool",
    )
    table.add_row("hole_tokens", f"{row['hole_tokens']:,}", "free outside whole growth runs")
    table.add_row(
        "scatter_pct",
        _screen.pct(row["scatter_pct"]),
        f"the longest free run has {row['largest_free_run']:,} slots",
    )
    table.add_row(
        "extents_per_1k_tokens", f"{row['extents_per_1k_tokens']:.1f}", "handed out since the start"
    )
    if row.get("lost_hit_tokens"):
        table.add_row("lost_hit_tokens", f"{row['lost_hit_tokens']:,}", "found, and cut off by whole pages")
    out.print(table)
    out.print("usable_run_pct: free memory in runs of at least", style="dim")
    runs = _screen.table("blocks", "share", "", left=("",))
    for blocks, share in row["usable_run_pct"].items():
        if int(blocks) > row["blocks"]:
            break  # no pool has a run longer than itself
        runs.add_row(f"{int(blocks):,}", _screen.pct(share), _screen.bar(out, share / 100, BAR_WIDTH))
    out.print(runs)
