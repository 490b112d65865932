"""`kvslotctl bench`: measured budgets, each beside its target, as a table or JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvslot.cli import _common

if TYPE_CHECKING:
    from kvslot.benchmarks import Document, Meta, Progress, Result

DESCRIPTION: Final = """\
Measure what kvslot promises. Budgets gate on ratios taken in one interleaved run; times are printed too."""

CORE: Final = """\
Measure the budgets of the core: allocate, probe, free, growth with the pool, memory, garbage collection, packing, and
what a replay of recorded traces shows. The baseline is a plain paged allocator with chained hashing in the same
Python, on the same prompts, in the same loop. Times are CPU time of the measuring thread."""

RPC: Final = """\
Measure what clients see of a daemon that is started for this: round trips, a timetable of 10,000 operations a second,
saturation, a recording, batches, appended tokens, long prompts and a large client's death. The baseline is a C echo
server that answers frames of the same sizes, driven by the same C load generator, in the same interleaved run, or the
same daemon without what is measured. Needs a C compiler; servers and load run under SCHED_FIFO where that is permitted
(as root, or with CAP_SYS_NICE)."""

MEMORY: Final = """\
Measure the memory that a daemon takes beside its pool, with 200,000 nodes of 512 tokens in its prefix tree."""

COMPACTION: Final = """\
Measure what compaction is worth and what it costs: pools compacted to rest, recorded traces with moves, the planner on
a pool of a million blocks, copies, and a daemon that compacts while others use it. The baselines are a greedy planner,
one large memcpy, and the same daemon at rest. The group hours runs 72 simulated hours of every trace, and only where it
is asked for."""

ENGINES: Final = """\
Measure real engines on a pool, against the same engines with their own cache: decode steps, time to first token with
and without a prefix that another process computed, what the client costs, memory. Each engine is measured in a process
of its own, under this Python or the one that KVSLOT_HF_PYTHON or KVSLOT_VLLM_PYTHON names. Needs the engine and a
model."""

EXAMPLES: Final = {
    "core": """\
  kvslotctl bench core --quick                 small pools, a few traces: about two minutes
  kvslotctl bench core --only allocate --only probe
  kvslotctl bench core --json core.json        everything; needs 4 GiB and about a quarter of an hour
  kvslotctl bench core --strict > /dev/null || echo "a budget was missed"
""",
    "rpc": """\
  kvslotctl bench rpc --quick                  a small pool and short rounds: under a minute
  kvslotctl bench rpc --only one --only open
""",
    "memory": """\
  kvslotctl bench memory                       needs 2 GiB
  kvslotctl bench memory --quick
""",
    "compaction": """\
  kvslotctl bench compaction --quick --only packing    one group, small: seconds
  kvslotctl bench compaction                           all but hours: needs 4 GiB and five minutes or more
  kvslotctl bench compaction --only steps --json steps.json
  kvslotctl bench compaction --only hours              every trace for 72 simulated hours; takes hours
""",
    "engines": """\
  kvslotctl bench engines --only hf            needs kvslot[hf]; the model is fetched once
""",
}
"""Of each suite."""

EPILOG: Final = f"""\
examples:
  kvslotctl bench core --quick                         small pools, a few traces: about two minutes
  kvslotctl bench rpc --only one --only open
  kvslotctl bench memory                               needs 2 GiB
  kvslotctl bench compaction --quick --only packing    one group, small: seconds
  kvslotctl bench engines --only hf                    needs kvslot[hf]; the model is fetched once
  kvslotctl bench SUITE --help                         what a suite measures, its groups, more examples

{_common.EXIT_CODES}"""


BESIDE_NAMES: Final = 90
"""Columns of the table beside its first, so that what was measured is told in a few lines."""


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
    core = _suite(
        suites, "core", "the allocator and its prefix tree", CORE,
        "packing, allocate, probe, gc, nodes, blocks, metadata, replay",
    )  # fmt: skip
    core.add_argument("--seed", type=int, default=0, metavar="N", help="for the replayed traces (0)")
    core.set_defaults(handler=run)
    rpc = _suite(
        suites, "rpc", "the daemon behind its socket", RPC,
        "one, python, append, open, saturated, record, large, batch, death",
    )  # fmt: skip
    rpc.add_argument(
        "--no-fifo",
        dest="fifo",
        action="store_false",
        help="leave all priorities as they are (tails mean less then)",
    )
    rpc.set_defaults(handler=run_rpc)
    memory = _suite(suites, "memory", "the daemon's memory beside its pool", MEMORY, "daemon")
    memory.set_defaults(handler=run_memory)
    compaction = _suite(
        suites, "compaction", "moves: what they buy, cost and disturb", COMPACTION,
        "packing, runs, moved, slices, gaps, copies, stop, allocate, steps, hours",
    )  # fmt: skip
    compaction.add_argument("--seed", type=int, default=0, metavar="N", help="for the replayed traces (0)")
    compaction.add_argument(
        "--no-fifo", dest="fifo", action="store_false", help="leave all priorities as they are"
    )
    compaction.set_defaults(handler=run_compaction)
    engines = _suite(suites, "engines", "real engines on a pool", ENGINES, "hf, vllm")
    engines.set_defaults(handler=run_engines)


def _suite(
    suites: _common.Subparsers, name: str, words: str, description: str, groups: str
) -> argparse.ArgumentParser:
    suite = suites.add_parser(
        name,
        help=words,
        description=description,
        epilog=f"examples:\n{EXAMPLES[name]}\n{_common.EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _common.add_json(suite)
    suite.add_argument("--strict", action="store_true", help="exit with 1 if a budget is missed")
    suite.add_argument(
        "--quick", action="store_true", help="small pools and short rounds: a look, not the result"
    )
    suite.add_argument(
        "--only", action="append", metavar="NAME", help=f"one group of rows (may be repeated): {groups}"
    )
    return suite


def run(arguments: argparse.Namespace) -> int:
    """`bench core`: exit code."""
    from kvslot import benchmarks

    def measure(groups: Sequence[str], report: Progress) -> Document:
        return benchmarks.run(groups, quick=arguments.quick, seed=arguments.seed, report=report)

    return _run(arguments, benchmarks.GROUPS, measure)


def run_rpc(arguments: argparse.Namespace) -> int:
    """`bench rpc`: exit code."""
    from kvslot import benchmarks

    def measure(groups: Sequence[str], report: Progress) -> Document:
        return benchmarks.run_rpc(groups, quick=arguments.quick, report=report, fifo=arguments.fifo)

    return _run(arguments, benchmarks.RPC_GROUPS, measure)


def run_memory(arguments: argparse.Namespace) -> int:
    """`bench memory`: exit code."""
    from kvslot import benchmarks

    def measure(groups: Sequence[str], report: Progress) -> Document:
        return benchmarks.run_memory(groups, quick=arguments.quick, report=report)

    return _run(arguments, benchmarks.MEMORY_GROUPS, measure)


def run_compaction(arguments: argparse.Namespace) -> int:
    """`bench compaction`: exit code."""
    from kvslot import benchmarks

    def measure(groups: Sequence[str], report: Progress) -> Document:
        return benchmarks.run_compaction(
            groups, quick=arguments.quick, seed=arguments.seed, report=report, fifo=arguments.fifo
        )

    return _run(arguments, benchmarks.COMPACTION_GROUPS, measure, benchmarks.COMPACTION_USUAL)


def run_engines(arguments: argparse.Namespace) -> int:
    """`bench engines`: exit code."""
    from kvslot import benchmarks

    def measure(groups: Sequence[str], report: Progress) -> Document:
        return benchmarks.run_engines(groups, quick=arguments.quick, report=report)

    return _run(arguments, benchmarks.ENGINES_GROUPS, measure)


def _run(
    arguments: argparse.Namespace,
    known: Sequence[str],
    measure: Callable[[Sequence[str], Progress], Document],
    usual: Sequence[str] = (),
) -> int:
    """`usual`: what runs where nothing is named; all that is known if empty."""
    import msgspec

    command = f"kvslotctl bench {arguments.suite}"
    groups = arguments.only or list(usual or known)
    wrong = [name for name in groups if name not in known]
    if wrong:
        print(
            f"{command}: --only {wrong[0]}: no such group; there are {', '.join(known)}\nSee {command} --help",
            file=sys.stderr,
        )
        return _common.USAGE
    try:
        _common.check_writable(arguments.json)
    except OSError as error:
        print(f"{command}: cannot write {arguments.json}: {error.strerror}", file=sys.stderr)
        return _common.BAD_INPUT
    with _common.Bar() as bar:
        document = measure(groups, bar.report)
    if arguments.json is not None:
        encoded = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
        _common.write_json(encoded, arguments.json)
    if arguments.json != "-":
        _print(document)
    if not arguments.strict:
        return _common.OK
    # What could not be measured at all has not been reached either.
    return _common.FAILED if document.missed or not document.results else _common.OK


def _print(document: Document) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        names = max((len(each.name) for each in document.results), default=0)
        console = Console(highlight=False, width=max(console.width, 132, names + BESIDE_NAMES))
    meta = document.meta
    box = meta.machine
    console.print(
        f"kvslot {meta.version} · {meta.python} · {box['cpu']}, {box['cores']} cores, {box['memory_gib']} GiB, "
        f"load {box['load_1m']} · {meta.wall_s:.0f} s{_how(meta)}"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("result", overflow="fold")  # names differ in their last letters, too
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    table.add_column("")
    table.add_column("what")
    for each in document.results:
        table.add_row(each.name, _value(each), _target(each), _verdict(each), _words(each))
    console.print(table)
    judged = [each for each in document.results if each.ok is not None]
    missed = document.missed
    reached = f"{len(judged) - len(missed)} of {len(judged)} budgets reached"
    console.print(
        (reached if judged else "no budgets among these: figures to compare with another run's")
        + (f"; missed: {', '.join(each.name for each in missed)}" if missed else "")
    )
    for group, why in meta.skipped.items():
        console.print(f"not measured: {group}: {why}")


def _how(meta: Meta) -> str:
    """How it was measured."""
    quick = "quick: a look, not the result" if meta.quick else ""
    words = [each for each in (meta.loop, meta.priority, quick) if each]
    return f" · {' · '.join(words)}" if words else ""


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
        reached = result.value >= result.stretch if result.sense == ">=" else result.value <= result.stretch
        return "reached" if reached else "not reached"
    return ""


def _words(result: Result) -> str:
    words = result.what
    if result.ratio_to and result.ok is not None:
        words += f", against {result.ratio_to}"
    return f"{words} ({result.note})" if result.note else words
