"""`kvslotctl defrag`: how compaction stands; on, off, or once to rest."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any, Final

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    from rich.console import Console

    from kvslot.api.client import Control

DESCRIPTION: Final = """\
Compaction moves cached data together, so that the free memory comes in whole blocks and long runs.

  status    how it stands, and what came of the moves so far
  start     goes on: as the setting compaction says, or in gaps between the engines' steps where that is off
  stop      gives up what is under way, and moves nothing of the pool until start
  once      gains now what can be gained, whatever the settings say, and waits for it; ^C leaves it to go on by itself

Moves, by what became of them (names as in --json):

  published          the data is in its new place
  abandoned_leased   a sequence took it up meanwhile whose engine does not follow moves: it stays where that reads it
  abandoned_freed    it was evicted, split or moved meanwhile
  deferred           it could not begin, or not be told to its readers, just then
  over_budget        the time for it was over before it began
  failed             the device could not copy it

Free memory: unpacked_pct of it is not in whole free blocks, unusable_pct not in runs of compaction_run_blocks. Both
count what cannot be had by moves, too: who reads data that may not be moved keeps its place."""

EXAMPLES: Final = """\
  kvslotctl defrag status
  kvslotctl map; kvslotctl defrag once; kvslotctl map
  kvslotctl defrag status --watch              a line a second
  kvslotctl defrag stop --pool default
  kvslotctl defrag once --json | jq '.rows[] | .blocks_free_after - .blocks_free_before'
"""

ACTIONS: Final = ("status", "start", "stop", "once")
POLL_S: Final = 0.1
WATCH_S: Final = 1.0


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    parser = _control.add_command(
        subparsers, "defrag", "compaction: how it stands, on, off, once", DESCRIPTION, EXAMPLES, run
    )
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=f"one of {', '.join(ACTIONS)}")
    parser.add_argument("--watch", action="store_true", help="status: a line a second, until interrupted")


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""
    if arguments.watch and (arguments.action != "status" or arguments.json is not None):
        return _control.fail(arguments, "--watch is for status, and not for --json", _common.USAGE)

    def act(control: Control) -> int:
        if arguments.watch:
            return _watch(control, arguments.pool)
        if arguments.action == "once":
            rows = _once(control, arguments.pool)
        else:
            rows = _rows(control, arguments.action, arguments.pool)
        if arguments.json is not None:
            code = _control.write(arguments, control, {"rows": rows})
            if code or arguments.json == "-":
                return code
        from kvslot.cli import _screen

        out = _screen.console()
        for row in rows:
            _print(out, row, arguments.action)
        return _common.OK

    return _control.ask(arguments, act)


def _rows(control: Control, action: str, pool: str) -> list[dict[str, Any]]:
    import msgspec

    return [msgspec.structs.asdict(each) for each in control.defrag(action, pool=pool)]


def _once(control: Control, pool: str) -> list[dict[str, Any]]:
    """Asks for it, waits until it has come to rest, and adds what it changed."""
    before = {each["pool"]: each for each in _control.pools(control, pool)}
    began = time.monotonic()
    asked = {each["pool"]: each for each in _rows(control, "once", pool)}
    with _common.Bar() as bar:
        while True:
            rows = _rows(control, "status", pool)
            left = [each for each in rows if each["once"]]
            if not left:
                break
            share = sum(1.0 if not each["once"] else each["progress"] for each in rows) / len(rows)
            bar.report(f"{left[0]['pool']}: {left[0]['purpose'] or left[0]['state']}", share)
            time.sleep(POLL_S)
    after = {each["pool"]: each for each in _control.pools(control, pool)}
    for row in rows:
        name = row["pool"]
        row["seconds"] = round(time.monotonic() - began, 3)
        row["moved_tokens_now"] = row["moved_tokens"] - asked[name]["moved_tokens"]
        row["blocks_free_before"] = before[name]["blocks_free"]
        row["blocks_free_after"] = after[name]["blocks_free"]
        row["largest_free_run_before"] = before[name]["largest_free_run"]
        row["largest_free_run_after"] = after[name]["largest_free_run"]
    return rows


def _watch(control: Control, pool: str) -> int:
    while True:
        for row in _rows(control, "status", pool):
            print(
                f"{row['pool']}: {row['state']}, {row['published']:,} of {row['planned']:,} moves published, "
                f"{row['moved_tokens']:,} tokens, {row['blocks_given']:,} blocks given back, "
                f"{row['unpacked_pct']:.1f} % unpacked; {row['reason']}",
                flush=True,
            )
        time.sleep(WATCH_S)


def _print(out: Console, row: dict[str, Any], action: str) -> None:
    from kvslot.cli import _screen

    out.print(f"{row['pool']} · {row['mode']} · {row['state']} · {row['reason']}", style="bold")
    if action == "once":
        gained = row["blocks_free_after"] - row["blocks_free_before"]
        out.print(
            f"moved {_common.several(row['moved_tokens_now'], 'token')} in {row['seconds']:.1f} s: "
            f"{row['blocks_free_before']:,} -> {row['blocks_free_after']:,} blocks wholly free ({gained:+,}), "
            f"longest free run {row['largest_free_run_before']:,} -> {row['largest_free_run_after']:,} slots"
        )
    elif row["purpose"]:
        out.print(
            f"{row['purpose']}: {_screen.pct(100 * row['progress'])} of its moves, "
            f"{row['moves_in_flight']:,} being copied"
        )
    table = _screen.table("moves", "", "", left=("moves", ""))
    lost = ("abandoned_leased", "abandoned_freed", "deferred", "over_budget", "failed")
    table.add_row(
        "published",
        f"{row['published']:,}",
        f"of {row['planned']:,} in {_common.several(row['plans'], 'plan')}",
    )
    for name in lost:
        if row[name]:
            table.add_row(name, f"{row[name]:,}", _screen.share(row[name], row["planned"]))
    table.add_row("moved", _screen.size(row["moved_bytes"]), _common.several(row["moved_tokens"], "token"))
    table.add_row("blocks_given", f"{row['blocks_given']:,}", "whole free blocks more, by moves")
    if row["retired_tokens"]:
        table.add_row("retired_tokens", f"{row['retired_tokens']:,}", "old places that steps may still read")
    if row["copy_bytes_per_second"]:
        speed = f"{_screen.size(row['copy_bytes_per_second'])}/s"
        table.add_row("copying", speed, f"{row['copy_seconds']:.3f} s together")
    if row["overtaken"]:
        table.add_row(
            "let be",
            _common.several(row["overtaken"], "time"),
            "as it changed faster than it could be followed",
        )
    if row["steps"]:
        table.add_row("collisions", f"{row['collisions']:,}", f"of {row['steps']:,} step begins met a copy")
    table.add_row(
        "unpacked_pct", _screen.pct(row["unpacked_pct"]), "of the free memory, not in whole free blocks"
    )
    table.add_row("unusable_pct", _screen.pct(row["unusable_pct"]), "of it, not in long runs")
    out.print(table)
