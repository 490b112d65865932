"""Longer than the tests have time for: dialogues with a real model on a pool that is too small, and killings.

python -I tests/engines/hf --dialogues 50 --kills 200 --start SEED
python -I tests/engines/hf --dialogues 5 --model tiny

Without arguments 50 dialogues and 200 kills, an hour or so.  Ends with a line of counts; 0: nothing was wrong, 1: what
was is listed, 2: the model cannot be had.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import types
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    if "tests" not in sys.modules:
        # Not the repository's root: from there rooms would load a second time under their short names.
        tests = types.ModuleType("tests")
        tests.__path__ = [str(Path(__file__).resolve().parents[2])]
        sys.modules["tests"] = tests
    parser = argparse.ArgumentParser(
        prog="engines/hf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dialogues", type=int, default=50, help="of several turns each (default %(default)s)"
    )
    parser.add_argument("--model", choices=["smollm2", "tiny"], default="smollm2", help="that holds them")
    parser.add_argument("--new", type=int, default=24, help="tokens of an answer (default %(default)s)")
    parser.add_argument("--kills", type=int, default=200, help="of engines (default %(default)s)")
    parser.add_argument("--start", type=int, default=1, help="first seed (default %(default)s)")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    importlib.import_module("torch").set_num_threads(1)
    if options.dialogues and options.model != "tiny":
        made = importlib.import_module("kvslot.engines.hf.model")
        try:
            made.smollm2(lambda text: print(text, file=sys.stderr, flush=True))
        except made.ModelMissing as missing:
            print(f"{missing}\n--model tiny does without", file=sys.stderr)
            return 2
    wrong: list[str] = []
    counted = {"dialogues": 0, "kills": 0, "answers": 0, "hits": 0, "compared": 0}
    began = time.monotonic()

    told = began

    def tell(text: str) -> None:
        nonlocal told
        if sys.stderr.isatty():
            print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - told >= 10.0:
            told = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    if options.dialogues:
        talk = importlib.import_module("tests.engines.hf.dialogues").dialogues
        for number, append in enumerate(("chain", "peel")):
            count = (options.dialogues + 1 - number) // 2
            if count:
                done = talk(
                    count,
                    model=options.model,
                    append=append,
                    seed=options.start + number,
                    new=options.new,
                    tell=tell,
                )
                wrong += done.wrong
                counted["dialogues"] += done.dialogues
                counted["answers"] += done.turns
                counted["hits"] += done.hits
                counted["compared"] += done.checked
                print(
                    f"\r{done.dialogues} dialogues, append {append}: {done.turns} answers, each as without kvslot but "
                    f"{len(done.wrong)}; {done.hits:,} of {done.tokens:,} tokens were hits, {done.evicted:,} evicted",
                    flush=True,
                )
    if options.kills:
        kills = importlib.import_module("tests.engines.hf.killing").kills
        for number, append in enumerate(("chain", "peel")):
            count = (options.kills + 1 - number) // 2
            if count:
                died = kills(
                    count,
                    seed=options.start + number,
                    append=append,
                    tell=lambda report: tell(f"{report.killed} killed, {len(report.wrong)} wrong"),
                )
                wrong += died.wrong
                counted["kills"] += died.killed
                counted["answers"] += died.generations
                counted["hits"] += died.hits
                counted["compared"] += died.checked
                print(
                    f"\r{died.killed} engines killed, append {append}: {died.generations} answers beside them, each "
                    f"right but {len(died.wrong)}; {died.hits:,} tokens were hits; no slot lost",
                    flush=True,
                )
    for each in wrong:
        print(f"WRONG {each}")
    print(
        "{dialogues:,} dialogues, {kills:,} kills: {answers:,} answers, {hits:,} tokens hit, K and V of {compared:,} "
        "tokens compared; ".format(**counted)
        + f"{len(wrong)} wrong, no slot lost, {time.monotonic() - began:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
