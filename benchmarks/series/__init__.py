"""Series of steps: when the steps of one or more engines began and ended.

recorded     steps of real engines on a pool; README.md says which, where and how
arrivals     recorded arrivals and lengths of the bundled traces, served by a modelled engine
synthetic    made-up arrivals, served by a modelled engine

The model is an engine with continuous batching: a step takes in what prompts fit (a long one in parts), computes one
token for each running sequence, and is followed by what the host does between steps.  That lasts some hundred
microseconds, longer with more sequences and after prefills, varies by the step and slowly with the machine, and now
and then is interrupted for milliseconds.  Without requests the engine waits for the next.
"""

from __future__ import annotations

import gzip
import math
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvslot import replay

Floats = npt.NDArray[np.float64]
Kind = Literal["recorded", "arrivals", "synthetic"]

FOLDER: Final = Path(__file__).parent
SUFFIX: Final = ".steps.gz"


class Series(NamedTuple):
    """(begin, end) rows in seconds, an array for each engine."""

    name: str
    kind: Kind
    engines: list[Floats]

    def events(self) -> list[tuple[float, int, bool]]:
        """(time, engine, whether a step begins), in order; a step that ends is told before one that begins."""
        out = [
            (float(time), index, which == 0)
            for index, steps in enumerate(self.engines)
            for row in steps
            for which, time in enumerate(row)
        ]
        out.sort(key=lambda event: (event[0], event[2]))
        return out

    def gaps(self) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Lengths of the times when all engines are idle, in order, and the number of the step that ends each.

        Steps are numbered from 0 in the order in which they begin, whichever engine's they are.
        """
        lengths: list[float] = []
        numbers: list[int] = []
        begins = 0
        busy = 0
        since = math.inf
        for time, _, begin in self.events():
            if begin:
                if busy == 0 and since < time:
                    lengths.append(time - since)
                    numbers.append(begins)
                begins += 1
                busy += 1
            else:
                busy -= 1
                since = time
        return np.array(lengths), np.array(numbers, dtype=np.int64)


def load(path: Path, steps: int = 0) -> Series:
    """A recorded series: lines `engine gap step` in microseconds, after comments; the first `steps` lines if given."""
    now: dict[int, float] = {}
    rows: dict[int, list[tuple[float, float]]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        found = (line for line in lines if not line.startswith("#"))
        for line in islice(found, steps or None):
            engine, gap, step = (int(word) for word in line.split())
            begin = now.get(engine, 0.0) + gap * 1e-6
            end = now[engine] = begin + step * 1e-6
            rows.setdefault(engine, []).append((begin, end))
    return Series(path.name.removesuffix(SUFFIX), "recorded", [np.array(rows[each]) for each in sorted(rows)])


class Load(NamedTuple):
    """A request: when it comes, how many tokens it has, how many it asks for."""

    at: float
    prompt: int
    output: int


class Host(NamedTuple):
    """The modelled engine."""

    step_us: float = 7000.0
    row_us: float = 60.0
    """For each running sequence."""
    token_us: float = 45.0
    """For each token of a prompt."""
    between_us: float = 180.0
    """Between steps."""
    between_row_us: float = 6.0
    between_token_us: float = 0.04
    spread: float = 0.2
    """Of the logarithm of what lies between."""
    pause_every: int = 400
    """Steps between pauses of milliseconds: a collection of garbage, a log, a page fault."""
    rows: int = 32
    prefill: int = 2048
    """Prompt tokens of one step."""


def served(loads: Iterator[Load], steps: int, seed: int, host: Host | None = None) -> Floats:
    """The first `steps` steps of an engine that serves `loads`, (begin, end) rows."""
    host = host or Host()
    rng = random.Random(seed)
    gauss = rng.gauss
    out: list[tuple[float, float]] = []
    running: list[int] = []  # tokens to go
    waiting: list[list[int]] = []  # tokens of the prompt to go, tokens to answer
    coming = next(loads, None)
    now = drift = 0.0
    while len(out) < steps:
        while coming is not None and coming.at <= now:
            waiting.append([coming.prompt, max(coming.output, 1)])
            coming = next(loads, None)
        if not running and not waiting:
            if coming is None:
                break
            now = coming.at
            # To take a request in takes as long as anything else that the host does.
            now += host.between_us * 1e-6 * math.exp(host.spread * gauss(0, 1))
            continue
        tokens = 0
        while waiting and tokens < host.prefill and len(running) < host.rows:
            part = min(waiting[0][0], host.prefill - tokens)
            tokens += part
            waiting[0][0] -= part
            if waiting[0][0]:
                break
            running.append(waiting.pop(0)[1])
        length = host.step_us + host.row_us * len(running) + host.token_us * tokens
        end = now + length * 1e-6 * math.exp(0.03 * gauss(0, 1))
        out.append((now, end))
        between = host.between_us + host.between_row_us * len(running) + host.between_token_us * tokens
        drift = 0.98 * drift + 0.2 * host.spread * gauss(0, 1)
        now = end + between * 1e-6 * math.exp(drift + 0.5 * host.spread * gauss(0, 1))
        if rng.random() * host.pause_every < 1:
            now += rng.uniform(1e-3, 12e-3)
        running = [left - 1 for left in running if left > 1]
    return np.array(out).reshape(-1, 2)


def steady(rng: random.Random) -> Iterator[Load]:
    """There is always something running, sometimes more and sometimes less."""
    at = 0.0
    while True:
        yield Load(at, rng.randint(20, 200), rng.randint(200, 1200))
        at += rng.expovariate(2.0)


def bursts(rng: random.Random) -> Iterator[Load]:
    """A few requests at once, then nothing for seconds, or for a minute."""
    at = 0.0
    while True:
        at += rng.paretovariate(1.3) * 1.5
        for _ in range(rng.randint(1, 8)):
            at += rng.expovariate(20.0)
            yield Load(at, rng.randint(50, 600), rng.randint(10, 160))


def storms(rng: random.Random) -> Iterator[Load]:
    """Chats, and now and then a dozen long prompts at once."""
    at, storm = 0.0, 6.0
    while True:
        at += rng.expovariate(0.7)
        while at > storm:
            for _ in range(rng.randint(6, 16)):
                yield Load(storm, rng.randint(3000, 12000), rng.randint(20, 60))
            storm += rng.uniform(15, 40)
        yield Load(at, rng.randint(20, 200), rng.randint(60, 200))


def night(rng: random.Random) -> Iterator[Load]:
    """A request every few minutes, often with another soon after."""
    at = 0.0
    while True:
        at += rng.expovariate(1 / 150 if rng.random() < 0.6 else 1 / 8)
        yield Load(at, rng.randint(50, 1500), rng.randint(20, 200))


def days(rng: random.Random) -> Iterator[Load]:
    """Arrivals rise and fall with a period of ten minutes."""
    at = 0.0
    while True:
        at += rng.expovariate(0.01 + 0.6 * max(0.0, math.sin(at * 2 * math.pi / 600)) ** 2)
        yield Load(at, rng.randint(50, 900), rng.randint(20, 220))


def calls(rng: random.Random) -> Iterator[Load]:
    """A program that asks for one token at a time, in a loop with work of its own between, and pauses for seconds."""
    at = 0.0
    while True:
        for _ in range(rng.randint(5, 200)):
            yield Load(at, rng.randint(100, 300), 1)
            at += 0.03 + 0.02 * math.exp(0.4 * rng.gauss(0, 1))
        at += rng.paretovariate(1.5)


MADE: Final[dict[str, tuple[Callable[[random.Random], Iterator[Load]], int]]] = {
    "steady_decode": (steady, 1),
    "bursty": (bursts, 1),
    "bursty_pair": (bursts, 2),
    "prefill_storms": (storms, 1),
    "night": (night, 1),
    "night_trio": (night, 3),
    "day_and_night": (days, 2),
    "api_calls": (calls, 1),
}
"""How requests come, and to how many engines."""

ARRIVALS: Final = {
    "azure2023_conv": 12,
    "mooncake_conversation_a": 24,
    "ragpulse": 1,
    "servegen_deepseek-r1_chunk-35": 96,
    "servegen_m-large_chunk-143": 1,
    "servegen_m-small_chunk-12": 1,
}
"""Bundled traces with real arrivals, and how many engines share the load, in turn; the series has the steps of one."""


def arrivals(name: str, share: int, first: int = 0) -> Iterator[Load]:
    """Every `share`-th request of a bundled trace, from the `first` one on."""
    trace = replay.load(replay.find(name))
    times = trace.t
    if times is None:
        raise ValueError(f"{name} does not tell when requests came")
    for row in range(first, len(trace), share):
        yield Load(
            times[row] - (times[first] if first else 0.0),
            trace.prompt_len[row],
            trace.total[row] - trace.prompt_len[row],
        )


def made(name: str, steps: int, seed: int = 0) -> Series:
    """A synthetic series with up to `steps` steps in all."""
    source, count = MADE[name]
    more = f" {seed}" if seed else ""
    engines = [
        served(source(random.Random(f"{name} {each}{more}")), steps // count, each + 1000 * seed)
        for each in range(count)
    ]
    # Engines of one series are seen over the same time.
    until = min(float(each[-1, 1]) for each in engines)
    return Series(name, "synthetic", [each[each[:, 1] <= until] for each in engines])


def recorded() -> dict[str, Path]:
    """The recorded series by name."""
    return {path.name.removesuffix(SUFFIX): path for path in sorted(FOLDER.glob("*" + SUFFIX))}


def series(name: str, steps: int, seed: int = 0) -> Series:
    """The series of that name, about `steps` steps of it.  Raises KeyError where there is none.

    Another `seed` draws others of the same kind: synthetic ones anew, of a shared trace another engine's part.
    """
    if name in MADE:
        return made(name, steps, seed)
    if name in ARRIVALS:
        share = ARRIVALS[name]
        engine = 5 * seed % share
        return Series(name, "arrivals", [served(arrivals(name, share, engine), steps, seed)])
    return load(recorded()[name], steps)


def names(seed: int = 0) -> list[str]:
    """All there are; with a `seed`, those of which it makes others."""
    if seed:
        return [*(name for name, share in ARRIVALS.items() if share > 1), *MADE]
    return [*recorded(), *ARRIVALS, *MADE]
