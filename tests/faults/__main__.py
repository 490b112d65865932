"""Longer searches than the tests have time for, against a live daemon.

python -I tests/faults --minutes 10 --start SEED     a quarter of the time each: frames no client would send; a
                                                     client killed at every byte of each verb's frame; compaction
                                                     switched in the midst of moves; engines that do anything and
                                                     die at any moment
python -I tests/faults --seed 4711                   one seed of frames again
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import time
import types
from pathlib import Path

BLOCK = 2_000
GROWTH_KIB = 5 << 10
TELL_S = 10.0
_told = [time.monotonic()]


def _tell(words: str) -> None:
    """How far it is, now and then."""
    if time.monotonic() - _told[0] >= TELL_S:
        _told[0] = time.monotonic()
        print(f"  {words}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    if "tests" not in sys.modules:
        # Not the repository's root: from there rooms would load a second time under their short names.
        tests = types.ModuleType("tests")
        tests.__path__ = [str(Path(__file__).resolve().parents[1])]
        sys.modules["tests"] = tests
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--start", type=int, default=1_000_000, help="first seed (default %(default)s)")
    parser.add_argument("--seed", type=int, help="one seed of frames, and no more")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        print(f"{_frames(options.seed, 0.0)} connections ended")
        return 0
    seconds = 60 * options.minutes
    began = time.monotonic()
    seeds = _frames(options.start, seconds / 4)
    print(f"{seeds * BLOCK} frames from seed {options.start} on: the daemon is as it was", flush=True)
    kills, verbs = _kills(began + 2 * seconds / 4, options.start)
    print(
        f"{kills} clients killed, at every byte of {verbs} verbs' frames: nothing is left of them", flush=True
    )
    moved = _moves(began + 3 * seconds / 4, options.start)
    print(
        f"{moved} moves while compaction was switched, from seed {options.start} on: every byte was right",
        flush=True,
    )
    seed, lives = options.start, 0
    while time.monotonic() < began + seconds:
        lives += _soak(seed)
        _tell(f"engines: seed {seed}, {lives} lives")
        seed += 1
    print(f"{lives} engines that lived and died, from seed {options.start} on: every byte was right")
    return 0


def _frames(start: int, seconds: float) -> int:
    """Seeds from `start` on for so long, one at least; how many."""
    actors = importlib.import_module("tests.faults.actors")
    fuzzing = importlib.import_module("tests.faults.fuzzing")
    running = importlib.import_module("tests.tools.daemon").running
    with running(code=0) as daemon:

        def work(tell: object) -> None:
            for seed in range(-20, 0):
                fuzzing.flood(daemon.socket, seed, 200)
            seed = start
            while True:
                fuzzing.flood(daemon.socket, seed, BLOCK)
                tell(seed)  # type: ignore[operator]
                seed += 1

        rss = 0
        until = time.monotonic() + seconds
        with actors.child(work, seconds=int(seconds) + 120) as sender:
            seed = start - 1
            while seed < start or time.monotonic() < until:
                try:
                    seed = sender.heard(120.0)
                    rss = rss or daemon.rss_kib()
                    assert daemon.rss_kib() - rss < GROWTH_KIB, f"{daemon.rss_kib() - rss} KiB more"
                    actors.audit(daemon)
                    _tell(f"frames: seed {seed}")
                except BaseException:
                    print(
                        f"FAILED after seed {seed}; replay the next: python -I tests/faults --seed {seed + 1}"
                    )
                    print(daemon.text()[-4000:], flush=True)
                    raise
        actors.empty(daemon)
    return int(seed) - start + 1


def _moves(until: float, start: int) -> int:
    """Seeds from `start` on for so long, one at least; how many moves were published."""
    moving = importlib.import_module("tests.faults.moving")
    running = importlib.import_module("tests.tools.daemon").running
    published, seed = 0, start
    while True:
        pool = {
            **moving.SMALL,
            "blocks": (65, 33, 129, 257)[seed % 4],
            "block_size": (16, 8, 32, 4)[seed % 4],
        }
        with running(pools=[pool], compaction_chunk_bytes=4096, **moving.AT_ONCE) as daemon:
            try:
                published += int(moving.switch(daemon, seed, 250).published)
            except BaseException:
                print(f"FAILED at seed {seed}; replay it: python -I tests/faults --minutes 0 --start {seed}")
                print(daemon.text()[-4000:], flush=True)
                raise
        _tell(f"moves: seed {seed}, {published} moves")
        seed += 1
        if time.monotonic() >= until:
            return published


def _kills(until: float, start: int) -> tuple[int, int]:
    """Every byte of one verb's frame after the other, another first one each time; how many kills, and verbs."""
    killing = importlib.import_module("tests.faults.killing")
    running = importlib.import_module("tests.tools.daemon").running
    kills = verbs = 0
    steps = list(killing.STEPS)
    with running(code=0) as daemon:
        witness = killing.Witness(daemon)
        for offset in range(len(steps)):
            last = (start + offset) % len(steps)
            cut, length = 1, 2
            while cut <= length:
                if time.monotonic() > until:
                    witness.close()
                    return kills, verbs
                try:
                    length = witness.kill(last, -cut)
                except BaseException:
                    print(f"FAILED at byte {cut} of {steps[last]!r}\n{daemon.text()[-4000:]}", flush=True)
                    raise
                cut += 1
                kills += 1
                _tell(f"kills: {kills}")
            verbs += 1
        witness.close()
    return kills, verbs


def _soak(seed: int) -> int:
    soaking = importlib.import_module("tests.faults.soaking")
    rng = random.Random(seed)
    pool = {
        "append": rng.choice(["chain", "peel"]),
        "eviction": rng.choice(["lru", "s3fifo"]),
        "block_size": (size := rng.choice([4, 16, 16, 32])),
        "blocks": rng.choice([400, 800]) // size + 1,
        "peel_max": rng.choice([3, 64]),
    }
    try:
        return int(soaking.soak(seed, 10.0, **pool))
    except BaseException:
        print(f"FAILED soak(seed={seed}, seconds=10.0, **{pool})", flush=True)
        raise


if __name__ == "__main__":
    sys.exit(main())
