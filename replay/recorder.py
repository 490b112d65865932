"""Takes down what happens in one run, and turns it into rows, series and pictures (see `metrics.py` for definitions).

The engine calls in as things happen; per request a few numbers go into flat arrays, per moment of the sampling grid one
reading of the gauges goes into a bucket.  Memory: some 100 bytes a request, and a bounded number of buckets.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvslot.replay.metrics import PHASES, Picture, Quantiles, Row, Run, Series, Spread
from kvslot.replay.policies._base import UNKNOWN, Counters, Gauges

BUCKETS_MAX: Final = 1000
SAMPLES_PER_BUCKET: Final = 2
"""So that at most 2,000 samples stand behind a run's means at any time."""
STEP_S: Final = 0.25
"""First grid step, in simulated seconds; short runs still get some hundred samples."""
SERIES_MAX: Final = 500
"""Points of a series; more than that no plot shows."""
PICTURE_AT: Final = (0.02, 0.1, 0.25, 0.5, 0.75, 0.98)
"""Shares of the run at which the pool is pictured."""
HOUR_S: Final = 3600.0
DAY_S: Final = 24 * HOUR_S

_GAUGES: Final = len(Gauges._fields)
_RUN: Final = Gauges._fields.index("largest_free_run")
_USABLE: Final = Gauges._fields.index("usable_run")


def fragmentation(gauges: Gauges) -> float:
    """Share, 0..1, of the slots in blocks not wholly free, sequences' unwritten runs left out, that hold no token."""
    slots = gauges.blocks_in_use_slots - gauges.reserved
    return 1.0 - gauges.tokens_held / slots if slots > 0 else 0.0


def room(gauges: Gauges, watermark: float) -> int:
    """Slots that could be had if memory were one heap: what a refusal is judged by (pseudo-OOM)."""
    return (
        gauges.usable
        - gauges.tokens_held
        - gauges.duplicates
        - gauges.peeled
        - gauges.fenced
        - gauges.quarantined
        - gauges.moving
        - gauges.reserved
        + gauges.evictable
        - int(watermark * gauges.usable)
    )


def add_gauges(parts: Sequence[Gauges]) -> Gauges:
    """Several pools seen as one: sums, but the longest free run is the longest of any."""
    if len(parts) == 1:
        return parts[0]
    sums = [sum(values) for values in zip(*parts, strict=True)]
    sums[_RUN] = max(gauges.largest_free_run for gauges in parts)
    sums[_USABLE] = max(UNKNOWN, sums[_USABLE])
    return Gauges(*sums)


def add_counters(parts: Sequence[Counters]) -> Counters:
    return parts[0] if len(parts) == 1 else Counters(*(sum(values) for values in zip(*parts, strict=True)))


def pinned_waste(gauges: Gauges) -> int:
    """Free slots in blocks that are not wholly free."""
    return max(0, gauges.free - gauges.usable + gauges.blocks_in_use_slots)


def usable_run(gauges: Gauges) -> float:
    """Share, 0..1, of the free slots that can be had as runs of whole blocks; 1 where nothing is free."""
    return gauges.usable_run / gauges.free if gauges.free else 1.0


class Totals(NamedTuple):
    """Counts from the start of the run, as they stood at the end of a bucket."""

    prompt_tokens: int
    hit_tokens: int
    refusals: int
    pseudo_oom: int
    preemptions: int


class Bucket:
    """A stretch of the grid: sums of what was sampled in it, extremes, and the counts at its end."""

    __slots__ = (
        "counters",
        "duplicates",
        "fragmentation",
        "occupancy",
        "pinned",
        "reserved",
        "run",
        "runs",
        "samples",
        "sums",
        "totals",
        "whole",
    )

    def __init__(self) -> None:
        self.samples = 0
        self.sums: list[float] = [0.0] * _GAUGES
        # (sum, max) of shares; (sum, max, min) of the longest free run
        self.fragmentation = [0.0, 0.0]
        self.reserved = [0.0, 0.0]
        self.occupancy = [0.0, 0.0]
        self.duplicates = [0.0, 0.0]
        self.run = [0.0, 0.0, float("inf")]
        self.whole = [0.0, 0.0]
        """Slots of wholly free blocks."""
        self.pinned = [0.0, 0.0]
        self.runs = [0.0, 0.0]
        """Share of the free slots in long runs; below 0 where the policy does not know."""
        self.totals = Totals(0, 0, 0, 0, 0)
        self.counters = Counters(0, 0, 0, 0, 0)

    def add(self, gauges: Gauges, times: int) -> None:
        """The same reading stood for `times` moments of the grid."""
        self.samples += times
        sums = self.sums
        for i, value in enumerate(gauges):
            sums[i] += value * times
        usable = gauges.usable or 1
        values: tuple[tuple[list[float], float], ...] = (
            (self.fragmentation, fragmentation(gauges)),
            (self.reserved, gauges.reserved / usable),
            (self.occupancy, gauges.tokens_held / usable),
            (self.duplicates, gauges.duplicates),
            (self.run, gauges.largest_free_run),
            (self.whole, gauges.usable - gauges.blocks_in_use_slots),
            (self.pinned, pinned_waste(gauges) / usable),
            (self.runs, usable_run(gauges) if gauges.usable_run >= 0 else -1.0),
        )
        for pair, reading in values:
            pair[0] += reading * times
            if reading > pair[1]:
                pair[1] = reading
        self.run[2] = min(self.run[2], gauges.largest_free_run)

    def merge(self, later: Bucket) -> None:
        """Take in the bucket that follows."""
        self.samples += later.samples
        self.sums = [a + b for a, b in zip(self.sums, later.sums, strict=True)]
        for mine, other in (
            (self.fragmentation, later.fragmentation),
            (self.reserved, later.reserved),
            (self.occupancy, later.occupancy),
            (self.duplicates, later.duplicates),
            (self.run, later.run),
            (self.whole, later.whole),
            (self.pinned, later.pinned),
            (self.runs, later.runs),
        ):
            mine[0] += other[0]
            mine[1] = max(mine[1], other[1])
        self.run[2] = min(self.run[2], later.run[2])
        self.totals, self.counters = later.totals, later.counters


class Sampler:
    """Readings on a regular grid of simulated time whose step doubles when the buckets run out."""

    def __init__(self, start: float, step: float = STEP_S, buckets_max: int = BUCKETS_MAX) -> None:
        assert buckets_max % 2 == 0
        self.start = start
        self.step = step
        self.next = start
        """The grid's next moment; a reading is due once time has come there."""
        self.buckets: list[Bucket] = []
        self._open = Bucket()
        self._buckets_max = buckets_max

    @property
    def bucket_s(self) -> float:
        return self.step * SAMPLES_PER_BUCKET

    def reading(self, now: float, gauges: Gauges, counters: Counters, totals: Totals) -> None:
        """The gauges as they have stood since the last event; they count for every moment of the grid before `now`,
        and for `now` itself."""
        while self.next <= now:
            times = min(int((now - self.next) / self.step) + 1, SAMPLES_PER_BUCKET - self._open.samples)
            self._open.add(gauges, times)
            self.next += times * self.step
            if self._open.samples == SAMPLES_PER_BUCKET:
                self._close(counters, totals)

    def finish(self, counters: Counters, totals: Totals) -> None:
        """No more readings: what is open becomes the last, shorter bucket."""
        if self._open.samples:
            self._close(counters, totals)
        elif self.buckets:
            self.buckets[-1].counters, self.buckets[-1].totals = counters, totals

    def _close(self, counters: Counters, totals: Totals) -> None:
        self._open.counters, self._open.totals = counters, totals
        self.buckets.append(self._open)
        self._open = Bucket()
        if len(self.buckets) == self._buckets_max:
            pairs = zip(self.buckets[::2], self.buckets[1::2], strict=True)
            merged = []
            for first, second in pairs:
                first.merge(second)
                first.samples = SAMPLES_PER_BUCKET  # from here on a sample stands for twice the time ...
                _halve(first)  # ... so that weights stay equal along the run
                merged.append(first)
            self.buckets = merged
            self.step *= 2


def _halve(bucket: Bucket) -> None:
    bucket.sums = [value / 2 for value in bucket.sums]
    for pair in (
        bucket.fragmentation,
        bucket.reserved,
        bucket.occupancy,
        bucket.duplicates,
        bucket.run,
        bucket.whole,
        bucket.pinned,
        bucket.runs,
    ):
        pair[0] /= 2


class Event(IntEnum):
    """What a schedule tells of a request."""

    ADMITTED = 0
    PREFILLED = 1
    DECODED = 2
    """It has come to a length, and its tokens are in the pool."""
    FINISHED = 3
    STOPPED = 4


class Schedule:
    """Who ran when, in order: 16 bytes an event."""

    def __init__(self) -> None:
        self._notes = array("q")

    def note(self, event: Event, number: int, length: int = 0) -> None:
        """`length` in tokens, for DECODED."""
        self._notes.append(number << 3 | event)
        self._notes.append(length)

    def events(self) -> Iterator[tuple[int, int, int]]:
        """(event, request number, length), in the order in which it happened."""
        notes = self._notes
        for at in range(0, len(notes), 2):
            what = notes[at]
            yield what & 7, what >> 3, notes[at + 1]


class Recorder:
    """The notes of one run."""

    def __init__(self, *, expected: int | None, horizon_s: float | None) -> None:
        """`expected`: requests to come, if known; `horizon_s`: simulated seconds to come, if that is the limit."""
        self._expected = expected
        self._horizon_s = horizon_s
        self.sampler: Sampler | None = None
        # Per request, at its first admission.
        self.admitted_at = array("d")
        self.number = array("q")
        self.prompt = array("I")
        self.hit = array("I")
        self.ideal = array("I")
        self.rounding = array("I")
        """Ideal hit less what is left of it after rounding down to the policy's granularity."""
        self.fresh = array("I")
        """Tokens of the request, output included, that it does not inherit: what it adds to a cache."""
        # Per admission, restarts included.
        self.alloc_at = array("d")
        self.alloc_ns = array("Q")
        # Per finished request.
        self.finished_at = array("d")
        self.cpu_ns = array("q")
        self.grow_ns = array("q")
        # Moments.
        self.refused_at = array("d")
        self.pseudo_oom_at = array("d")
        self.elsewhere_at = array("d")
        self.preempted_at = array("d")
        self.never_at = array("d")
        self.stuck_at = array("d")
        self.held_at_first_refusal: int | None = None
        self.end = 0.0
        self.pictures: list[Picture] = []
        self.schedule: Schedule | None = None
        """Kept where the offline optimum is asked for."""
        self._prompt_tokens = 0
        self._hit_tokens = 0

    def start(self, now: float) -> None:
        """The first admission: sampling starts here."""
        self.sampler = Sampler(now)

    def admitted(
        self, now: float, number: int, prompt: int, fresh: int, hit: int, ideal: int, granularity: int
    ) -> None:
        self.admitted_at.append(now)
        self.number.append(number)
        self.prompt.append(prompt)
        self.fresh.append(fresh)
        self.hit.append(hit)
        self.ideal.append(ideal)
        self.rounding.append(ideal % granularity)
        self._prompt_tokens += prompt
        self._hit_tokens += hit

    def totals(self) -> Totals:
        return Totals(
            self._prompt_tokens,
            self._hit_tokens,
            len(self.refused_at),
            len(self.pseudo_oom_at),
            len(self.preempted_at),
        )

    def progress(self, now: float) -> float:
        """Share of the run, 0..1."""
        if self._horizon_s is not None:
            return min(1.0, now / self._horizon_s)
        return len(self.admitted_at) / max(1, self._expected or 1)

    def picture_due(self, now: float) -> bool:
        taken = len(self.pictures)
        return taken < len(PICTURE_AT) and self.progress(now) >= PICTURE_AT[taken]

    def picture(self, now: float, blocks: bytes, share: float | None = None) -> None:
        """`share` of the run, where the caller knows it and this recorder does not."""
        if share is None:
            share = self.progress(now)
        while len(self.pictures) < len(PICTURE_AT) and share >= PICTURE_AT[len(self.pictures)]:
            self.pictures.append(Picture(time_s=now, progress=share, blocks=blocks))


def phases(recorder: Recorder, pool_tokens: int) -> dict[str, tuple[float, float]]:
    """Phase -> (start, end) in simulated seconds, for the phases this run has (see PHASES)."""
    admitted = np.frombuffer(recorder.admitted_at, dtype=np.float64)
    if not len(admitted):
        return {}
    start, end = float(admitted[0]), recorder.end
    found = {"all": (start, end)}
    fresh = np.cumsum(_ints(recorder.fresh))
    once, thrice = (
        int(np.searchsorted(fresh, limit, side="right")) for limit in (pool_tokens, 3 * pool_tokens)
    )
    edges = [0, once, thrice, len(admitted)]
    for name, first, last in zip(("cold", "warm", "steady"), edges[:-1], edges[1:], strict=True):
        if last > first:
            stop = end if last == len(admitted) else float(admitted[last])
            found[name] = (float(admitted[first]), stop)
    if end - start > HOUR_S:
        found["first_hour"] = (start, start + HOUR_S)
        full = found.get("steady", (end, end))[0]
        if full + 2 * HOUR_S <= end:
            found["full_hour"] = (full, full + HOUR_S)
        found["last_hour"] = (end - HOUR_S, end)
        # One hour differs from the next by what happens to run in it; a day evens that out.
        if full + 2 * DAY_S <= end:
            found["full_day"] = (full, full + DAY_S)
            found["last_day"] = (end - DAY_S, end)
    assert found.keys() <= PHASES.keys()
    return found


def rows(recorder: Recorder, run: Run, index: int, *, hits_optimum: Mapping[int, int] | None) -> list[Row]:
    """One row per phase.  `hits_optimum`: hit tokens by request number; None: not computed."""
    sampler = recorder.sampler
    if sampler is None:
        return []
    admitted = np.frombuffer(recorder.admitted_at, dtype=np.float64)
    alloc_at = np.frombuffer(recorder.alloc_at, dtype=np.float64)
    alloc_ns = _ints(recorder.alloc_ns)
    finished = np.frombuffer(recorder.finished_at, dtype=np.float64)
    prompt, hit, ideal = _ints(recorder.prompt), _ints(recorder.hit), _ints(recorder.ideal)
    lost = np.minimum(np.maximum(ideal - hit, 0), _ints(recorder.rounding))
    evicted = np.maximum(ideal - hit, 0) - lost
    optimum = (
        None
        if hits_optimum is None
        else np.array([hits_optimum.get(n, 0) for n in recorder.number], dtype=np.int64)
    )
    made: list[Row] = []
    for name, (start, end) in phases(recorder, run.pool_tokens).items():
        last = end >= recorder.end
        # Phases follow each other without gap or overlap: what happens on an edge belongs to the later one.
        mine = _between(admitted, start, end, last)
        done = _between(finished, start, end, last)
        alloc = alloc_ns[_between(alloc_at, start, end, last)] / 1000
        tokens = int(prompt[mine].sum())
        hours = max(end - start, 1e-9) / HOUR_S
        buckets = _buckets(sampler, start, end)
        before = _before(sampler, start)
        after = buckets[-1].counters if buckets else before
        delta = Counters(*(b - a for a, b in zip(before, after, strict=True)))
        # What was refused before anything was admitted belongs to the phase that begins with that.
        since = start if start > admitted[0] else -np.inf
        refusals = _count(recorder.refused_at, since, end, last)
        pseudo = _count(recorder.pseudo_oom_at, since, end, last)
        finished_count = int(done.sum())
        held = recorder.held_at_first_refusal
        made.append(
            Row(
                run=index,
                trace=run.trace,
                policy=run.policy,
                block_size=run.block_size,
                sharing=run.sharing,
                engines=run.engines,
                phase=name,
                routing=run.routing,
                eviction=run.eviction,
                live=run.live,
                pool_tokens=run.pool_tokens,
                usable_tokens=run.usable_tokens,
                start_s=_round(start),
                end_s=_round(end),
                requests=int(mine.sum()),
                finished=finished_count,
                never=_count(recorder.never_at, since, end, last),
                stuck=_count(recorder.stuck_at, since, end, last),
                prompt_tokens=tokens,
                hit_tokens=int(hit[mine].sum()),
                internal_fragmentation_pct=_spread(
                    [bucket.fragmentation for bucket in buckets], buckets, 100.0
                ),
                reserved_pct=_spread([bucket.reserved for bucket in buckets], buckets, 100.0),
                occupancy_pct=_spread([bucket.occupancy for bucket in buckets], buckets, 100.0),
                hit_tokens_pct=_pct(int(hit[mine].sum()), tokens),
                hit_tokens_pct_ideal=_pct(int(ideal[mine].sum()), tokens),
                hit_tokens_pct_optimum=None if optimum is None else _pct(int(optimum[mine].sum()), tokens),
                lost_hit_tokens=int(lost[mine].sum()),
                evicted_hit_tokens=int(evicted[mine].sum()),
                usable_pct=None if held is None else _pct(held, run.pool_tokens),
                refusals=refusals,
                refusals_per_hour=_round(refusals / hours),
                pseudo_oom=pseudo,
                pseudo_oom_per_hour=_round(pseudo / hours),
                refused_room_elsewhere=_count(recorder.elsewhere_at, since, end, last),
                preemptions=_count(recorder.preempted_at, since, end, last),
                max_concurrent_sessions=None,
                alloc_us=_quantiles(alloc),
                cpu_us_per_request=_mean_us(recorder.cpu_ns, done),
                grow_us_per_request=_mean_us(recorder.grow_ns, done),
                extents_per_1k_tokens=_round(1000 * delta.extents / max(1, delta.extent_tokens)),
                largest_free_run=_spread([bucket.run for bucket in buckets], buckets, 1.0),
                largest_free_run_min=int(min((bucket.run[2] for bucket in buckets), default=0)),
                copied_tokens=delta.copied_tokens,
                moved_tokens=delta.moved_tokens,
                evicted_tokens=delta.evicted_tokens,
                duplicate_tokens=_spread([bucket.duplicates for bucket in buckets], buckets, 1.0),
                via=run.via,
                compaction=run.compaction,
                emptying=run.emptying,
                blocks_free=_spread([bucket.whole for bucket in buckets], buckets, 1 / run.block_size),
                pinned_waste_pct=_spread([bucket.pinned for bucket in buckets], buckets, 100.0),
                usable_run_pct=_known(_spread([bucket.runs for bucket in buckets], buckets, 100.0).mean),
                moves=delta.moves,
                moves_abandoned=delta.moves_abandoned,
                blocks_given_back=delta.given_back,
                moved_per_given_back=_round(delta.moved_tokens / (delta.given_back * run.block_size))
                if delta.given_back > 0
                else None,
                compaction_overtaken=delta.overtaken,
            )
        )
    return made


def series(recorder: Recorder) -> Series:
    """The run over time, in at most SERIES_MAX points."""
    sampler = recorder.sampler
    out = Series(**{name: [] for name in Series.__struct_fields__})
    if sampler is None or not sampler.buckets:
        return out
    stride = -(-len(sampler.buckets) // SERIES_MAX)
    before = Totals(0, 0, 0, 0, 0)
    for first in range(0, len(sampler.buckets), stride):
        group = sampler.buckets[first : first + stride]
        samples = sum(bucket.samples for bucket in group)
        means = Gauges(
            *(round(sum(v) / samples) for v in zip(*(bucket.sums for bucket in group), strict=True))
        )
        totals = group[-1].totals
        end = sampler.start + (first + len(group)) * sampler.bucket_s
        out.time_s.append(_round(min(end, max(recorder.end, sampler.start))))
        share = sum(bucket.fragmentation[0] for bucket in group) / samples
        out.internal_fragmentation_pct.append(_round(100 * share))
        for name in (
            "private",
            "cached",
            "reserved",
            "duplicates",
            "peeled",
            "fenced",
            "quarantined",
            "moving",
            "free",
            "tokens_held",
            "evictable",
            "blocks_in_use_slots",
            "live_sequences",
            "largest_free_run",
        ):
            getattr(out, name).append(getattr(means, name))
        tokens = totals.prompt_tokens - before.prompt_tokens
        out.hit_tokens_pct.append(_pct(totals.hit_tokens - before.hit_tokens, tokens) if tokens else None)
        out.refusals.append(totals.refusals - before.refusals)
        out.pseudo_oom.append(totals.pseudo_oom - before.pseudo_oom)
        out.preemptions.append(totals.preemptions - before.preemptions)
        before = totals
    return out


def _ints(values: array[int]) -> npt.NDArray[np.int64]:
    return np.frombuffer(values, dtype=np.dtype(values.typecode)).astype(np.int64)


def _between(at: npt.NDArray[np.float64], start: float, end: float, last: bool) -> npt.NDArray[np.bool_]:
    return (at >= start) & ((at <= end) if last else (at < end))


def _count(at: array[float], start: float, end: float, last: bool) -> int:
    return int(_between(np.frombuffer(at, dtype=np.float64), start, end, last).sum()) if at else 0


def _buckets(sampler: Sampler, start: float, end: float) -> list[Bucket]:
    """The buckets whose middle lies in the phase; the nearest one if the phase is shorter than a bucket."""
    size = sampler.bucket_s
    first = round((start - sampler.start) / size)
    stop = round((end - sampler.start) / size)
    if end - sampler.start > (len(sampler.buckets) - 1) * size:
        stop = len(sampler.buckets)  # the last bucket may be cut short
    first = min(max(first, 0), max(len(sampler.buckets) - 1, 0))
    return sampler.buckets[first : max(stop, first + 1)]


def _before(sampler: Sampler, start: float) -> Counters:
    first = round((start - sampler.start) / sampler.bucket_s)
    first = min(first, len(sampler.buckets) - 1)
    return sampler.buckets[first - 1].counters if first > 0 else Counters(0, 0, 0, 0, 0)


def _spread(pairs: list[list[float]], buckets: list[Bucket], scale: float) -> Spread:
    samples = sum(bucket.samples for bucket in buckets)
    if not samples:
        return Spread(0.0, 0.0)
    mean = sum(pair[0] for pair in pairs) / samples
    return Spread(_round(scale * mean), _round(scale * max(pair[1] for pair in pairs)))


def _known(value: float) -> float | None:
    """A share that was sampled as less than nothing is not known."""
    return None if value < 0 else value


def _quantiles(values: npt.NDArray[np.float64]) -> Quantiles:
    if not len(values):
        return Quantiles(0.0, 0.0, 0.0)
    p50, p99, top = np.percentile(values, (50, 99, 100))
    return Quantiles(_round(float(p50)), _round(float(p99)), _round(float(top)))


def _mean_us(ns: array[int], mine: npt.NDArray[np.bool_]) -> float:
    return _round(float(_ints(ns)[mine].mean()) / 1000) if mine.any() else 0.0


def _pct(part: int, whole: int) -> float:
    return _round(100 * part / whole) if whole else 0.0


def _round(value: float) -> float:
    """Six digits after the point: more than any figure here deserves, and the JSON stays readable."""
    return round(value, 6)
