"""Runs the simulation from the command line: many seeds until one fails, or one seed act by act.

python -I tests/simulation --seeds 0:2000          a range; prints counts, and each failing seed
python -I tests/simulation --minutes 30 --start 1000000
python -I tests/simulation --seed 4711             replays one, naming each act
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
import types
from collections import Counter
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    if "tests" not in sys.modules:
        # Not the repository's root: from there rooms would load a second time under their short names.
        tests = types.ModuleType("tests")
        tests.__path__ = [str(Path(__file__).resolve().parents[1])]
        sys.modules["tests"] = tests
    histories = importlib.import_module("tests.simulation.histories")
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--kind", choices=sorted(histories.KINDS), nargs="+", help="these histories only")
    parser.add_argument("--seed", type=int, help="replay one seed, naming each act")
    parser.add_argument("--seeds", default="0:200", help="first:stop (default %(default)s)")
    parser.add_argument("--minutes", type=float, help="instead of --seeds: from --start on for this long")
    parser.add_argument("--start", type=int, default=1_000_000)
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    options = parser.parse_args(arguments)
    kinds = options.kind or sorted(histories.KINDS)
    if options.seed is not None:
        for kind in kinds:
            print(f"{kind} {options.seed}")
            histories.KINDS[kind](options.seed, say=print)
        return 0
    if options.minutes is not None:
        seed, stop = options.start, 1 << 62
        until = time.monotonic() + 60 * options.minutes
    else:
        seed, stop = map(int, options.seeds.split(":"))
        until = float("inf")
    first = seed
    failed = 0
    told = time.monotonic()
    tally: Counter[str] = Counter()
    while seed < stop and time.monotonic() < until:
        for kind in kinds:
            try:
                tally.update(histories.KINDS[kind](seed))
            except Exception:  # noqa: BLE001  whatever it is, it is told with its seed
                failed += 1
                print(
                    f"FAILED {kind} seed {seed}; replay: python -I tests/simulation --kind {kind} --seed {seed}"
                )
                print("".join(traceback.format_exc().splitlines(keepends=True)[-9:]), flush=True)
                if not options.keep_going:
                    return 1
        seed += 1
        if time.monotonic() - told >= 10.0:
            told = time.monotonic()
            print(f"  {seed - first} seeds, {failed} failed", file=sys.stderr, flush=True)
    print(f"{seed - first} seeds of {', '.join(kinds)}; {failed} failed")
    print(", ".join(f"{name} {count}" for name, count in sorted(tally.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
