"""docs/measured.md: the latest kept run of each suite that needs a daemon or an engine, with command and machine.

    kvslotctl bench SUITE --json FILE  ->  python -m kvslot.benchmarks.keep FILE...  ->  kept/SUITE.json  ->  the page

The page is rendered from what is kept and from nothing else.  Only the reasons of missed budgets are written by hand,
below, and stand on the page for as long as the budget is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvslot.benchmarks.report import Document, Result
from kvslot.benchmarks.results_page import prose, table

FOLDER: Final = Path(__file__).resolve().parent / "kept"
PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "measured.md"

SUITES: Final = {
    "rpc": "What a client sees of the daemon",
    "memory": "Memory beside the pool",
    "soak": "An hour of mixed load, deaths included",
    "compaction": "Compaction",
    "engines": "Real engines",
}
"""Title by suite, in the page's order."""

INTRODUCTION: Final = (
    "Rows with a target are budgets. Ratios were taken within one run, in short rounds that take turns, and are what "
    "counts: microseconds are good to about a factor of two on shared processors. A missed budget says by how much, "
    "and why. Written by `python -m kvslot.benchmarks.keep`; figures of the core stand in [results.md](results.md)."
)

REASONS: Final = {
    "saturated_rate": (
        "the echo does nothing, in C, and answers twice as many operations a second here as on the machine that the "
        "budget was set on, while Python runs no faster; the rate itself comes near the 40,000/s wished for. "
        "Replies of a round are sent together and an epoll of our own stands before the loop. Half of what is left is "
        "the core, the other half system calls and codec."
    ),
    "batch_speedup": (
        "sixteen verbs in a frame save system calls and the loop, not the core, and the core is now most of it: in a "
        "pool that has turned over a request takes two holes and three or four extents, and gives them back. Where "
        "single frames got faster, this ratio fell."
    ),
    "moved_per_given_back_worst": (
        "the greedy planner gives back few blocks, the cheapest ones, and ends; its average price is lower where it "
        "gives back a tenth of what the planner does. For as many blocks the planner pays less on every trace "
        "(`moved_for_as_much_worst`); what both pay over all traces stands beside it."
    ),
    "copy_16k": (
        "a loop of memcpy in C over the same pieces comes to little more on this machine; see `copy_16k_native`."
    ),
    "copy_4k": (
        "0.53 and 0.59 in runs on another day; in this one a loop of memcpy in C came to little more as well, see "
        "`copy_4k_native`."
    ),
    "slice_ms_max": ("one plan of 400; in ten runs of this group alone the longest took 1.2 to 1.8 ms."),
    "allocate_p50": (
        "begin, publication and plans run on the loop that serves, in turns of a tenth of a millisecond; a request "
        "that comes in such a turn waits for its end."
    ),
    "step_p50": (
        "no step met a copy; engine and copies share the processor's caches here, which is the likely cause."
    ),
}
"""By name of a result; looked up when it misses its target."""


def kept(folder: Path = FOLDER) -> dict[str, Document]:
    """What is kept, by suite."""
    return {
        path.stem: msgspec.json.decode(path.read_bytes(), type=Document)
        for path in sorted(folder.glob("*.json"))
    }


def take(path: Path, folder: Path = FOLDER) -> str:
    """Keeps a document that `--json` has written; its suite.  Raises ValueError for what should not be kept."""
    try:
        document = msgspec.json.decode(path.read_bytes(), type=Document)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no document of a benchmark: {error}") from None
    meta = document.meta
    if meta.suite not in SUITES:
        raise ValueError(f"{path} has suite {meta.suite!r}; kept are {', '.join(SUITES)}")
    if meta.quick:
        raise ValueError(f"{path} is of a quick run, whose figures are not kept")
    meta.command = _without_json(meta.command)
    folder.mkdir(exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(document), indent=1)
    (folder / f"{meta.suite}.json").write_bytes(text + b"\n")
    return meta.suite


def _without_json(words: Sequence[str]) -> list[str]:
    """A command as others would type it, without the file that it was told to write."""
    out: list[str] = []
    skip = False
    if words and words[0].endswith(".py"):  # a module that was run as a program
        words = ["python", "-Im", f"kvslot.benchmarks.{Path(words[0]).stem}", *words[1:]]
    for word in words:
        if skip:
            skip = False
        elif word == "--json":
            skip = True
        elif not word.startswith("--json="):
            out.append(word)
    return out


def render(documents: dict[str, Document]) -> str:
    """The page."""
    lines = ["# Measured: the daemon and its engines", "", *prose(INTRODUCTION)]
    for suite, title in SUITES.items():
        if suite in documents:
            lines += section(title, documents[suite])
    return "\n".join(lines).rstrip() + "\n"


def section(title: str, document: Document) -> Iterable[str]:
    """One suite's part."""
    meta = document.meta
    machine = meta.machine
    about = (
        f"`{' '.join(meta.command)}`, kvslot {meta.version}, {meta.python}, {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB"
        + (f", {meta.loop}" if meta.loop else "")
        + (f", {meta.priority}" if meta.priority else "")
        + f", {meta.started[:10]}, {meta.wall_s:.0f} s."
    )
    yield from (f"## {title}", "")
    yield from prose(about)
    yield from table(
        ("result", "what", "measured", "target", ""), (_line(each) for each in document.results), left=2
    )
    missed = document.missed
    for each in missed:
        yield from prose(f"Missed, `{each.name}`: {REASONS.get(each.name, 'no reason is known yet.')}")


def _line(each: Result) -> tuple[str, ...]:
    note = f" ({each.note})" if each.note else ""
    target = f"{each.sense.replace('<', '&lt;')} {each.target:g}" if each.target is not None else ""
    if each.stretch is not None:
        target = f"{target}; wished {each.stretch:g}".removeprefix("; ")
    verdict = "" if each.ok is None else "yes" if each.ok else "**no**"
    against = f" of {each.ratio_to}" if each.ratio_to else ""
    return (
        f"`{each.name}`",
        f"{each.what}{note}".replace("|", "/"),
        f"{each.value:,g} {each.unit}{against}",
        target,
        verdict,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m kvslot.benchmarks.keep",
        description="Keeps what benchmarks have written with --json, and writes docs/measured.md from it.",
    )
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="of `kvslotctl bench ... --json FILE`"
    )
    arguments = parser.parse_args(argv)
    for path in arguments.files:
        try:
            print(f"kept: {take(path)}")
        except (OSError, ValueError) as error:
            parser.error(str(error))
    PAGE.write_text(render(kept()), encoding="utf-8")
    print(f"written: docs/{PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
