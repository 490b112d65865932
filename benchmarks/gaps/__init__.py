"""How much idle time compaction gets, and how many steps pay for it: the predictor, a timeout, an EWMA.

    python -Im kvslot.benchmarks.gaps [--json [FILE]] [--quick] [--only SERIES] [--seed N]

One executor, the same for all, goes through a series of steps.  It hears of a gap (all engines idle) `NOTICE_S` late,
asks the policy how long it may copy, and copies chunk after chunk within that.  A step that begins during a chunk has
met a copy, and that chunk is the last of its gap.

    gap     |.......[chunk|chunk|chunk]......[chunk|ch==step====
             notice                                 ^ met

Used is the idle time spent copying.  The predictor knows nothing at the beginning and aims at 1 % by itself.  The
others are given what they could not know: of all their settings the one that uses most of *this* series while at most
1 % of its steps meet a copy (or as many as met the predictor's, where those were more).  The first tenth of a series
counts for nobody.  The predictor's constants were chosen looking at seeds 0 to 3 (0: the series as bundled); what they
are worth on others of the same kinds, `--seed 5` and higher tell.

    timeout     from one time after the gap's begin until another time after it, or until a step begins
    ewma        predicts a gap by a running mean of those before, and copies until a share of that is over
    both        an ewma's early part and a timeout's late part, tuned together

`both` is no policy known to be in use: it shows what the predictor has beside knowing two ends.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvslot.benchmarks.report import Result, result
from kvslot.benchmarks.series import Floats, Series, names, series
from kvslot.defrag.gaps import FLOOR_S, GapPredictor

Bools = npt.NDArray[np.bool_]

NOTICE_S: Final = 40e-6
"""From a step's end to the first byte of a copy: the bell, a turn of the loop, the device's queue."""
CHUNK_S: Final = 70e-6
"""256 KiB at 3.7 GB/s."""
SHARE: Final = 0.01
WARM: Final = 10
"""The first tenth of a series counts for nobody: a daemon learns once and then runs for days."""
STEPS: Final = 20_000
STEPS_QUICK: Final = 4_000


class Used(NamedTuple):
    """What came of one policy on one series, after its first tenth."""

    used: float
    """Share of the idle time."""
    met: float
    """Share of the steps that begin."""
    smallest_s: float
    """The shortest gap of which a part was used and whose step met no copy; inf: none."""
    error: float
    """Mean factor between a gap and its prediction; nan: none is made."""
    words: str
    """The setting."""


def execute(series: Series, policy: GapPredictor) -> Used:
    """Goes through a series."""
    lengths, _ = series.gaps()
    first = len(lengths) // WARM
    gap = busy = begins = met = 0
    since = math.inf  # since when all are idle
    used = idle = 0.0
    smallest = math.inf
    running = -math.inf  # until when the last chunk runs
    before = policy.statistics()
    for time, engine, begin in series.events():
        if not begin:
            busy -= 1
            policy.ended(engine, time)
            since = time
            continue
        if busy == 0 and since < time:
            if gap == first:
                before, used, idle, begins, met = policy.statistics(), 0.0, 0.0, 0, 0
                smallest = math.inf
            gap += 1
            idle += time - since
            copied = 0.0
            now = since + NOTICE_S
            while now < time:
                chunks = round(policy.budget(now) / CHUNK_S)
                if chunks:
                    # Chunks that would begin after the step has begun are not begun.
                    chunks = min(chunks, math.ceil((time - now) / CHUNK_S))
                    copied += min(chunks * CHUNK_S, time - now)
                    running = now = now + chunks * CHUNK_S
                else:
                    now += max(policy.next(now), 1e-6)
            used += copied
            if copied and running <= time:
                smallest = min(smallest, time - since)
        begins += 1
        met += time < running
        busy += 1
        policy.began(engine, time)
    after = policy.statistics()
    logs = math.log(after.surprise) * after.gaps - math.log(max(before.surprise, 1.0)) * before.gaps
    return Used(
        used / idle, met / begins, smallest, math.exp(logs / max(after.gaps - before.gaps, 1)), "adaptive"
    )


# -- the rivals -------------------------------------------------------------------------------------------------


class Tuned(NamedTuple):
    """A rival's setting on one series: seconds copied in each gap, and whether its step was met."""

    used_s: Floats
    met: Bools
    error: float
    words: str

    def better(self, other: Tuned) -> bool:
        """Whether it uses more."""
        return float(self.used_s.sum()) > float(other.used_s.sum())


class Counted(NamedTuple):
    """The gaps of a series of which `first` and later ones count, and how many may be met."""

    gaps: Floats
    first: int
    allowed: int

    def tried(self, used_s: Floats, met: Bools, error: float, words: str) -> Tuned | None:
        """What a setting comes to; None if too many are met."""
        used_s, met = used_s[self.first :], met[self.first :]
        return Tuned(used_s, met, error, words) if int(met.sum()) <= self.allowed else None

    def never(self) -> Tuned:
        """A rival that copies nothing."""
        count = len(self.gaps) - self.first
        return Tuned(np.zeros(count), np.zeros(count, dtype=np.bool_), math.nan, "never")


def windows(gaps: Floats, start: Floats | float, stop: Floats | float) -> tuple[Floats, Bools]:
    """Whole chunks within [start, stop) of each gap: seconds copied, and whether the step met one."""
    start = np.maximum(start, NOTICE_S)
    room = np.floor(np.maximum(stop - start, 0.0) / CHUNK_S) * CHUNK_S
    used: Floats = np.clip(gaps - start, 0.0, room)
    return used, (gaps > start) & (gaps - start < room)


def candidates(values: Floats, count: int) -> Floats:
    """Where an end of a window may matter: just below and above some of the values, most of them the extreme ones."""
    ordered = np.sort(values)
    extreme = np.geomspace(1, len(values), count).astype(np.int64)
    even = np.linspace(0, len(values) - 1, count).astype(np.int64)
    ranks = np.unique(np.concatenate((extreme - 1, len(values) - extreme, even)))
    found: Floats = np.unique(np.concatenate((ordered[ranks] * (1 - 1e-9), ordered[ranks] * (1 + 1e-9))))
    return found


def furthest(counted: Counted, start: float, ends: Sequence[Floats | float], allowed: int) -> int:
    """The last of the ends, each beyond those before it, up to which at most `allowed` steps are met; -1: none.

    The further the end, the more is used and the more are met: it is found by halving.
    """
    low, high = 0, len(ends) - 1
    while low <= high:
        middle = (low + high) // 2
        met = windows(counted.gaps, start, ends[middle])[1][counted.first :]
        if int(met.sum()) > allowed:
            high = middle - 1
        else:
            low = middle + 1
    return high


def timeout(counted: Counted) -> Tuned:
    """The best window."""
    gaps, best = counted.gaps, counted.never()
    ends: list[float] = [NOTICE_S, *candidates(gaps, 60).tolist(), math.inf]
    for start in ends[:-1]:
        at = furthest(counted, start, ends, counted.allowed)
        if at >= 0:
            used, met = windows(gaps, start, ends[at])
            tried = counted.tried(used, met, math.nan, f"{words(start)} to {words(ends[at])}")
            if tried is not None and tried.better(best):
                best = tried
    return best


def predictions(gaps: Floats) -> Iterator[tuple[str, Floats]]:
    """Running means of many kinds: what each says of a gap before it is seen."""
    for gain in (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0):
        for kind in ("mean", "log", "clipped log"):
            values = gaps if kind == "mean" else np.log(gaps)
            mean = float(values[0])
            out: Floats = np.empty(len(gaps))
            for index, value in enumerate(values.tolist()):
                out[index] = mean
                change = value - mean
                # Clipped: one long gap does not make the next hundred look long.
                mean += gain * (min(max(change, -0.7), 0.7) if kind == "clipped log" else change)
            yield f"{kind}, gain {gain:g}", (out if kind == "mean" else np.exp(out))


def ewmas(counted: Counted, parts: Sequence[float] = (1.0,)) -> Iterator[Tuned]:
    """Of all running means, the largest share of them that is allowed, or that parts of what is allowed allow."""
    gaps = counted.gaps
    starts = [NOTICE_S, *np.maximum(np.quantile(gaps, (0.5, 0.9, 0.98)), NOTICE_S).tolist()]
    for name, told in predictions(gaps):
        error = factor(gaps[counted.first :], told[counted.first :])
        shares = candidates(gaps / told, 40).tolist()
        ends = [told * share for share in shares]
        for start in starts:
            for part in parts:
                at = furthest(counted, start, ends, int(part * counted.allowed))
                if at >= 0:
                    text = f"{name}: {words(start)} to {shares[at]:.3g} of it"
                    tried = counted.tried(*windows(gaps, start, ends[at]), error, text)
                    if tried is not None:
                        yield tried


def ewma(counted: Counted) -> Tuned:
    """The best running mean."""
    best = counted.never()
    for tried in ewmas(counted):
        if tried.better(best):
            best = tried
    return best


def both(counted: Counted) -> Tuned:
    """The best pair of an early part, by a running mean, and a late part, by a timeout."""
    front: dict[int, Tuned] = {}  # of those that as many steps met, what uses most
    for tried in ewmas(counted, (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)):
        key = int(tried.met.sum())
        if key not in front or tried.better(front[key]):
            front[key] = tried
    best, gaps = counted.never(), counted.gaps
    for start in candidates(gaps, 60).tolist():
        late = counted.tried(*windows(gaps, start, math.inf), math.nan, "")
        if late is None:
            continue
        for early in front.values():
            met = early.met | late.met
            if int(met.sum()) > counted.allowed:
                continue
            # What the early part copies beyond the late part's begin counts once.
            used: Floats = late.used_s + np.minimum(early.used_s, max(start - NOTICE_S, 0.0))
            pair = Tuned(used, met, early.error, f"{early.words}, and from {words(start)}")
            if pair.better(best):
                best = pair
    return best


def factor(gaps: Floats, told: Floats) -> float:
    """Mean factor between gaps and predictions of them, both taken as no shorter than the predictor's scale."""
    logs = np.log(np.maximum(gaps, FLOOR_S) / np.maximum(told, FLOOR_S))
    return float(np.exp(np.abs(logs).mean()))


def words(seconds: float) -> str:
    """A time, short."""
    if math.isinf(seconds):
        return "the step"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


# -- the table ----------------------------------------------------------------------------------------------------

RIVALS: Final = {"timeout": timeout, "ewma": ewma, "both": both}
JUDGED: Final = ("timeout", "ewma")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One series."""

    series: str
    kind: str
    steps: int
    gaps: int
    idle_s: float
    policies: dict[str, dict[str, float | str | None]]
    """By policy: `used_pct` of the idle time, `met_pct` of the steps, `error` (mean factor between a gap and its
    prediction), `smallest_us` (shortest gap used without a meeting), `setting`."""

    def used(self, policy: str) -> float:
        """Per cent of the idle time."""
        value = self.policies[policy]["used_pct"]
        assert isinstance(value, float)
        return value

    @property
    def ratio(self) -> float:
        """Idle time that the predictor used, of what the better of timeout and EWMA did."""
        return self.used("predictor") / max(1e-9, *(self.used(name) for name in JUDGED))


def shown(used: Used) -> dict[str, float | str | None]:
    """As it stands in a row."""
    return {
        "used_pct": round(100 * used.used, 3),
        "met_pct": round(100 * used.met, 3),
        "error": None if math.isnan(used.error) else round(used.error, 3),
        "smallest_us": None if math.isinf(used.smallest_s) else round(used.smallest_s * 1e6, 1),
        "setting": used.words,
    }


def measure_one(one: Series, rivals: Sequence[str] = tuple(RIVALS)) -> Row:
    """The predictor and `rivals` on one series."""
    lengths, numbers = one.gaps()
    first = len(lengths) // WARM
    steps = sum(len(each) for each in one.engines)
    counting = steps - int(numbers[first])
    ours = execute(one, GapPredictor(share=SHARE, least=CHUNK_S))
    allowed = max(int(SHARE * counting), round(ours.met * counting))
    counted = Counted(lengths, first, allowed)
    idle = lengths[first:]
    policies = {"predictor": shown(ours)}
    for name in rivals:
        best = RIVALS[name](counted)
        clean = idle[(best.used_s > 0) & ~best.met]
        smallest = float(clean.min()) if len(clean) else math.inf
        policies[name] = shown(
            Used(
                float(best.used_s.sum() / idle.sum()),
                float(best.met.sum() / counting),
                smallest,
                best.error,
                best.words,
            )
        )
    return Row(
        series=one.name, kind=one.kind, steps=steps, gaps=len(lengths), idle_s=round(float(lengths.sum()), 3),
        policies=policies,
    )  # fmt: skip


def measure(
    only: Sequence[str] = (),
    *,
    quick: bool = False,
    seed: int = 0,
    report: Callable[[str, float], None] | None = None,
) -> list[Row]:
    """A row for each series, of all or of those in `only`.  Raises ValueError for one that is not known."""
    known = names(seed)
    for name in only:
        if name not in known:
            raise ValueError(f"no series is called {name!r}; there are {', '.join(known)}")
    chosen = list(only) or known
    rows: list[Row] = []
    for index, name in enumerate(chosen):
        if report is not None:
            report(name, index / len(chosen))
        rows.append(measure_one(series(name, STEPS_QUICK if quick else STEPS, seed)))
    return rows


def table(rows: Sequence[Row]) -> str:
    """For reading."""
    lines = [
        f"{'':30}{'steps':>7}{'idle s':>9}  " + "".join(f"{name:^33}" for name in ("predictor", *RIVALS)),
        f"{'':46}  " + f"{'used %':>8}{'met %':>7}{'error':>7}{'least':>9}  " * (1 + len(RIVALS)),
    ]
    for row in rows:
        line = f"{row.series:30}{row.steps:7}{row.idle_s:9.1f}  "
        for policy in row.policies.values():
            error, least = policy["error"], policy["smallest_us"]
            line += f"{policy['used_pct']:8.2f}{policy['met_pct']:7.2f}"
            line += f"{error:7.2f}" if isinstance(error, float) else f"{'':7}"
            line += f"{words(least * 1e-6):>9}" if isinstance(least, float) else f"{'-':>9}"
            line += "  "
        lines.append(line + ("" if row.ratio > 1 else "<"))
    lines.append(
        "used: of the idle time · met: of the steps · error: mean factor between gap and prediction · "
        "least: shortest gap used without being met · <: not more than both timeout and ewma"
    )
    ahead = sum(row.ratio > 1 for row in rows)
    mean = math.exp(sum(math.log(max(row.ratio, 1e-9)) for row in rows) / max(len(rows), 1))
    lines.append(
        f"more than both on {ahead} of {len(rows)} series; geometric mean {mean:.3f}x of the better one"
    )
    return "\n".join(lines)


def results(rows: Sequence[Row]) -> list[Result]:
    """The rows of the suite `compaction`: the worst series and the mean."""
    worst = min(rows, key=lambda row: row.ratio)
    met = max(rows, key=lambda row: float(row.policies["predictor"]["met_pct"] or 0.0))
    ahead = sum(row.ratio > 1 for row in rows)
    mean = math.exp(sum(math.log(max(row.ratio, 1e-9)) for row in rows) / len(rows))
    return [
        result(
            "gaps_used", mean, unit="x", suite="compaction", samples=len(rows), ratio_to="best timeout or EWMA",
            what="idle time used, against the better of a timeout and an EWMA tuned on each series",
            note=f"more on {ahead} of {len(rows)} series; least {worst.ratio:.3f}x on {worst.series}",
        ),
        result(
            "gaps_met", float(met.policies["predictor"]["met_pct"] or 0.0), unit="%", suite="compaction",
            samples=met.steps, what="steps that began during a copy, worst series", note=met.series,
        ),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m kvslot.benchmarks.gaps",
        description="Idle time used for copies at 1 % of steps met: the predictor, a timeout, an EWMA.",
        epilog="example: python -Im kvslot.benchmarks.gaps --only hf_chat --only night",
    )
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write JSON (to stdout without FILE)"
    )
    parser.add_argument("--quick", action="store_true", help=f"the first {STEPS_QUICK} steps of each series")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="others of the same kinds; 0: as bundled"
    )
    parser.add_argument("--only", action="append", default=[], metavar="SERIES", help=", ".join(names()))
    arguments = parser.parse_args(argv)

    told = ""

    def report(name: str, _share: float) -> None:
        nonlocal told
        if sys.stderr.isatty():
            print(f"\r{name:40}", end="", file=sys.stderr, flush=True)
        elif name != told:
            told = name
            print(name, file=sys.stderr, flush=True)

    try:
        rows = measure(arguments.only, quick=arguments.quick, seed=arguments.seed, report=report)
    except ValueError as error:
        parser.error(str(error))
    if sys.stderr.isatty():
        print(f"\r{'':40}\r", end="", file=sys.stderr)
    if arguments.json is not None:
        text = json.dumps(
            [msgspec.to_builtins(row) | {"ratio": round(row.ratio, 4)} for row in rows], indent=1
        )
        if arguments.json == "-":
            print(text)
            return 0
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    print(table(rows))
    return 0
