"""`kvslotctl bench`: measured budgets, each beside its target, as a table or JSON."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

from kvslot.cli import _common

if TYPE_CHECKING:
    from kvslot.benchmarks import Document, Result

DESCRIPTION: Final = """\
Measure what kvslot promises. Budgets gate on ratios taken in one interleaved run; times are printed too."""

CORE: Final = """\
Measure the budgets of the core: allocate, probe, free, growth with the pool, memory, garbage collection, packing, and
what a replay of recorded traces shows. The baseline is a plain paged allocator with chained hashing in the same
Python, on the same prompts, in the same loop. Times are CPU time of the measuring thread."""

EPILOG: Final = f"""\
examples:
  kvslotctl bench core --quick                 small pools, a few traces: about two minutes
  kvslotctl bench core --only allocate --only probe
  kvslotctl bench core --json core.json        everything; needs 4 GiB and about a quarter of an hour
  kvslotctl bench core --strict > /dev/null || echo "a budget was missed"

{_common.EXIT_CODES}"""


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure kvslot against its budgets",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    suites = parser.add_subparsers(title="suites", dest="suite", metavar="SUITE", required=True)
    core = suites.add_parser(
        "core",
        help="the allocator and its prefix tree",
        description=CORE,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    core.set_defaults(handler=run)
    _common.add_json(core)
    core.add_argument("--strict", action="store_true", help="exit with 1 if a budget is missed")
    core.add_argument(
        "--quick", action="store_true", help="small pools and few traces: a look, not the result"
    )
    core.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="one group of rows (may be repeated): packing, allocate, probe, gc, nodes, blocks, metadata, replay",
    )
    core.add_argument("--seed", type=int, default=0, metavar="N", help="for the replayed traces (0)")


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""
    import msgspec

    from kvslot import benchmarks

    groups = arguments.only or list(benchmarks.GROUPS)
    wrong = [name for name in groups if name not in benchmarks.GROUPS]
    if wrong:
        print(f"--only {wrong[0]}: there are {', '.join(benchmarks.GROUPS)}", file=sys.stderr)
        return _common.USAGE
    with _common.Bar() as bar:
        document = benchmarks.run(groups, quick=arguments.quick, seed=arguments.seed, report=bar.report)
    if arguments.json is not None:
        encoded = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
        _common.write_json(encoded, arguments.json)
    if arguments.json != "-":
        _print(document)
    return _common.FAILED if arguments.strict and document.missed else _common.OK


def _print(document: Document) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(console.width, 132))
    meta = document.meta
    box = meta.machine
    console.print(
        f"kvslot {meta.version} · {meta.python} · {box['cpu']}, {box['cores']} cores, {box['memory_gib']} GiB, "
        f"load {box['load_1m']} · {meta.wall_s:.0f} s{' · quick: a look, not the result' if meta.quick else ''}"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("result")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    table.add_column("")
    table.add_column("what")
    for each in document.results:
        table.add_row(each.name, _value(each), _target(each), _verdict(each), _words(each))
    console.print(table)
    judged = [each for each in document.results if each.ok is not None]
    missed = document.missed
    console.print(
        f"{len(judged) - len(missed)} of {len(judged)} budgets reached"
        + (f"; missed: {', '.join(each.name for each in missed)}" if missed else "")
    )
    for group, why in meta.skipped.items():
        console.print(f"not measured: {group}: {why}")


def _value(result: Result) -> str:
    shown = f"{result.value:,.0f}" if abs(result.value) >= 1000 else f"{result.value:.3g}"
    return f"{shown} {result.unit}".rstrip()


def _target(result: Result) -> str:
    if result.target is not None:
        return f"{result.sense} {result.target:g}"
    return "" if result.stretch is None else f"stretch {result.stretch:g}"


def _verdict(result: Result) -> str:
    if result.ok is not None:
        return "ok" if result.ok else "[bold red]missed[/]"
    if result.stretch is not None:
        return "reached" if result.value <= result.stretch else "not reached"
    return ""


def _words(result: Result) -> str:
    words = result.what
    if result.ratio_to and result.ok is not None:
        words += f", against {result.ratio_to}"
    return f"{words} ({result.note})" if result.note else words
