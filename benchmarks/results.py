"""`make results`: everything that docs/results.md says, measured anew and written down.

    LIST of commands  ->  one process each, the longest last  ->  results/SECTION.json  ->  docs/results.md

Each entry of the list is a command that anybody can type.  What it printed as JSON is kept beside the command, the
version, the machine and a digest of the code that gave it (`--stale` lists what other code gave); the document is
rendered from what is kept and from nothing else (`results_page.py`), so that figures and prose cannot drift from the
rows.

A run can be stopped and taken up again: commands that are kept for this version are passed over.  `--changed` measures
again what other code gave.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from kvslot import __version__
from kvslot.benchmarks.report import machine

FOLDER: Final = Path(__file__).resolve().parent / "results"
ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "results.md"
CODE: Final = ("allocator/**/*.py", "replay/*.py", "replay/policies/*.py")
"""What figures depend on; the page that `--html` writes does not count."""
NICENESS: Final = 5
PATIENCE_S: Final = 1800.0
"""A command that takes longer is stopped, and the document says so."""

TRACES: Final = (
    "dynamo_pi_agent",
    "lmcache_miniswe",
    "swe_agent_demos",
    "llmservingsim_llama31",
    "oasst_trees",
    "sgd_a",
    "mtbench101_a",
    "taubench_airline_a",
    "servegen_m-small_chunk-12",
    "servegen_m-small_chunk-18",
    "servegen_m-large_chunk-104",
    "servegen_m-large_chunk-143",
    "servegen_deepseek-r1_chunk-35",
    "ragpulse",
    "azure2023_conv",
    "sharegpt_a",
    "mix200_a",
    "mooncake_conversation_a",
    "kvtester_a",
)
"""All bundled traces, quickest first."""
GIANT: Final = "kvtester_a"
"""Its prompts have 149,000 tokens on average: some minutes each, so these come last."""
SIZED: Final = ("mix200_a", "sgd_a", "mtbench101_a", "sharegpt_a", "taubench_airline_a")
SIZES: Final = "16 32 64 128 256 512 528 2048"
COSTED: Final = ("sgd_a", "mtbench101_a", "taubench_airline_a", "ragpulse", "mix200_a")
COST_POLICIES: Final = "paged hashed token slotted"
COST_SEEDS: Final = (0, 1, 2)
"""The seed changes nothing in these runs but the moment they are made: three measurements of the same work."""
ENGINED: Final = ("sgd_a", "mtbench101_a", "taubench_airline_a", "sharegpt_a", "mix200_a")
EVICTIONS: Final = ("lru", "s3fifo", "gaps")
POOL: Final = 400_000
HOURS: Final = (25.2, 72.0)
"""The shorter one tells whether what rises has levelled off.  Both end at the same point of the trace, which at RATE
takes 2.6 hours a round: its parts differ."""
RATE: Final = 1.0
LIVE_LIMIT: Final = 256
BENCH: Final = ("packing", "allocate", "probe", "gc", "metadata", "blocks", "nodes")


class Command(NamedTuple):
    """One entry of the list."""

    section: str
    words: tuple[str, ...]
    """What follows `kvslotctl`, `--json` left out."""
    phases: frozenset[str] = frozenset({"all"})
    """Rows that are kept."""
    slow: int = 0
    """Higher ones run later."""

    @property
    def text(self) -> str:
        return " ".join(("kvslotctl", *self.words))


class Entry(msgspec.Struct, kw_only=True):
    """What one command gave.  Rows are kept as they were printed."""

    command: str
    version: str
    code: str
    """Digest of the sources in CODE."""
    started: str
    wall_s: float
    machine: dict[str, Any]
    failed: str = ""
    """Why there is nothing, in words; tried again by the next run."""
    rows: list[msgspec.Raw] = []


class File(msgspec.Struct, kw_only=True):
    """One section's file."""

    section: str
    entries: list[Entry]


def listed() -> list[Command]:
    """The list, in the order in which it runs."""

    def replay(section: str, words: str, slow: int = 0, phases: Sequence[str] = ("all",)) -> Command:
        slow = 4 if words.startswith(GIANT) else slow
        return Command(section, ("replay", *words.split()), frozenset(phases), slow)

    found = [replay("traces", f"{trace} --policy all") for trace in TRACES]
    for trace in SIZED:
        found.append(
            replay("sizes", f"{trace} --policy paged hashed slotted --block-size {SIZES} --no-optimum", 1)
        )
    for seed in COST_SEEDS:
        for trace in COSTED:
            found.append(
                replay(
                    "cost",
                    f"{trace} --policy {COST_POLICIES} --pool-tokens {POOL} --no-optimum --seed {seed}",
                    seed,
                )
            )
    for trace in ENGINED:
        pool = f" --pool-tokens {POOL}" if trace == "mix200_a" else ""
        for routing in ("sticky", "random"):
            words = f"{trace} --policy hashed slotted{pool} --engines 4 --routing {routing} --sharing both"
            found.append(replay("engines", words + " --no-optimum", 1))
    for eviction in EVICTIONS:
        words = f"mix200_a --policy slotted --pool-tokens {POOL} --eviction {eviction}"
        found.append(replay("eviction", words))
        if eviction == "lru":
            continue  # among the traces already
        for trace in TRACES:
            found.append(
                replay("eviction", f"{trace} --policy slotted --eviction {eviction} --no-optimum", 1)
            )
    for trace in TRACES:
        for words in ("--block-size 16 --unsplit", "--block-size 528", "--block-size 528 --unsplit"):
            found.append(replay("budgets", f"{trace} --policy slotted {words} --no-optimum", 1))
    for hours in HOURS:
        words = f"mix200_a --policy slotted --hours {hours:g} --rate {RATE:g} --no-optimum"
        found.append(replay("long", words, 3, ("all", "first_hour", "last_hour")))
    search = f"mix200_a --policy all --pool-tokens {POOL} --max-live-search {LIVE_LIMIT} --no-optimum"
    found.append(replay("sessions", search, 3))
    only = " ".join(f"--only {group}" for group in BENCH)
    found.append(Command("core", ("bench", "core", *only.split()), slow=2))
    return sorted(found, key=lambda command: command.slow)


# --- Kept ------------------------------------------------------------------------------------------------------------


def load(folder: Path = FOLDER) -> dict[str, Entry]:
    """All entries by command.  Raises msgspec.ValidationError for a file that is none of ours."""
    found: dict[str, Entry] = {}
    for path in sorted(folder.glob("*.json")):
        for entry in msgspec.json.decode(path.read_bytes(), type=File).entries:
            found[entry.command] = entry
    return found


def save(section: str, entries: Sequence[Entry], folder: Path = FOLDER) -> None:
    """Write a section's file, one row a line: small, and a changed row is one changed line."""
    folder.mkdir(parents=True, exist_ok=True)
    text = b'{"section":' + msgspec.json.encode(section) + b',"entries":['
    for number, entry in enumerate(entries):
        head = msgspec.json.encode(msgspec.structs.replace(entry, rows=[]))
        assert head.endswith(b'"rows":[]}')
        rows = b",\n".join(bytes(row) for row in entry.rows)
        text += (b",\n" if number else b"\n") + head[:-2] + b"\n" * bool(rows) + rows + b"]}"
    text += b"\n]}\n"
    path = folder / f"{section}.json"
    fresh = path.with_suffix(".new")
    fresh.write_bytes(text)
    fresh.replace(path)


def digest() -> str:
    """Of the code that figures depend on."""
    whole = hashlib.sha256()
    for path in sorted({path for pattern in CODE for path in ROOT.glob(pattern)}):
        whole.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return whole.hexdigest()[:12]


# --- Running ---------------------------------------------------------------------------------------------------------


def measure(command: Command, patience_s: float = PATIENCE_S) -> Entry:
    """Run one command in a process of its own."""
    began = time.monotonic()
    entry = Entry(
        command=command.text,
        version=__version__,
        code=digest(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        wall_s=0.0,
        machine=dict(machine()),
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        words = [sys.executable, "-Im", "kvslot.cli.ctl", *command.words, f"--json={out}"]
        try:
            done = subprocess.run(
                words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=patience_s, check=False
            )
        except subprocess.TimeoutExpired:
            entry.failed = f"stopped after {patience_s / 60:g} minutes"
        else:
            if done.returncode or not out.exists():
                lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
                entry.failed = f"exit code {done.returncode}: {lines[-1]}"
            else:
                entry.rows = list(_rows(out.read_bytes(), command))
    entry.wall_s = round(time.monotonic() - began, 1)
    return entry


def _rows(text: bytes, command: Command) -> Iterator[msgspec.Raw]:
    document = msgspec.json.decode(text)
    for row in document["rows" if "rows" in document else "results"]:
        if "phase" not in row or row["phase"] in command.phases:
            yield msgspec.Raw(msgspec.json.encode(row))


def run(wanted: Sequence[Command], *, changed: bool, most_s: float, patience_s: float) -> int:
    """Measure what is not kept; how many commands gave nothing."""
    kept = load()
    code = digest()
    failures = 0
    for number, command in enumerate(wanted, 1):
        known = kept.get(command.text)
        if known is not None and known.version == __version__ and not known.failed:
            if not changed or known.code == code or known.wall_s > most_s:
                continue
        print(f"{number:4}/{len(wanted)} begins    {command.text}", flush=True)
        entry = measure(command, patience_s)
        failures += bool(entry.failed)
        print(f"{number:4}/{len(wanted)} {entry.wall_s:7.1f} s  {command.text}  {entry.failed}", flush=True)
        if known is not None and not known.failed and entry.failed:
            continue  # an older result is better than none
        kept[command.text] = entry
        # In the list's order; what is no longer in the list goes.
        mine = [each.text for each in listed() if each.section == command.section]
        save(command.section, [kept[text] for text in mine if text in kept])
    return failures


def stale(kept: Mapping[str, Entry], code: str) -> dict[str, list[str]]:
    """Section -> what there is to measure again, as "COMMAND (why)", for all sections, in the list's order."""
    found: dict[str, list[str]] = {}
    for command in listed():
        lines = found.setdefault(command.section, [])
        entry = kept.get(command.text)
        if entry is None:
            lines.append(f"{command.text} (not measured)")
        elif entry.failed:
            lines.append(f"{command.text} (failed: {entry.failed})")
        elif entry.version != __version__:
            lines.append(f"{command.text} (version {entry.version})")
        elif entry.code != code:
            lines.append(f"{command.text} (code {entry.code})")
    return found


def tell_stale(kept: Mapping[str, Entry], *, commands: bool) -> int:
    """Print which sections are not of today's code, with their commands if asked for; how many sections."""
    code = digest()
    found = stale(kept, code)
    whole = dict.fromkeys(found, 0)
    for command in listed():
        whole[command.section] += 1
    print(f"code {code}, version {__version__}")
    for section, lines in found.items():
        state = f"STALE: {len(lines)} of {whole[section]} commands" if lines else "up to date"
        print(f"  {section:10} {state}")
        if commands:
            print("".join(f"    {line}\n" for line in lines), end="")
    again = [section for section, lines in found.items() if lines]
    if again:
        print(f"again: python -Im kvslot.benchmarks.results --changed --only {' '.join(again)}")
    return len(again)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    from kvslot.benchmarks.results_page import render

    parser = argparse.ArgumentParser(
        prog="kvslot.benchmarks.results", description="Measure what docs/results.md says, and write it."
    )
    parser.add_argument("--list", action="store_true", help="print the commands and leave")
    parser.add_argument(
        "--stale",
        action="store_true",
        help="print what other code gave, or nothing has, and leave; exit code 1 if there is such a thing",
    )
    parser.add_argument("--render", action="store_true", help="only write the document from what is kept")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="traces, sizes, cost, ...")
    parser.add_argument("--changed", action="store_true", help="again what other code gave")
    parser.add_argument(
        "--seconds", type=float, default=1e9, metavar="S", help="with --changed: no command that took longer"
    )
    parser.add_argument(
        "--patience", type=float, default=PATIENCE_S, metavar="S", help="stop a command after S"
    )
    arguments = parser.parse_args(argv)
    wanted = [each for each in listed() if not arguments.only or each.section in arguments.only]
    if arguments.list:
        print("\n".join(command.text for command in wanted))
        return 0
    if arguments.stale:
        return 1 if tell_stale(load(), commands=True) else 0
    failures = 0
    if not arguments.render:
        os.nice(NICENESS)
        failures = run(
            wanted, changed=arguments.changed, most_s=arguments.seconds, patience_s=arguments.patience
        )
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(load()), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")
    tell_stale(load(), commands=False)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
