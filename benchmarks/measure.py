"""Thread CPU time of single calls, and what many of them come to.

The clock itself is a system call of a few hundred nanoseconds: what two readings in a row differ by is measured first
and taken off every sample.  Calls far below a microsecond are to be timed in batches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

clock: Final = time.thread_time_ns


def clock_cost_ns() -> int:
    """What two readings of the clock in a row differ by (median)."""
    gaps = []
    before = clock()
    for _ in range(4001):
        after = clock()
        gaps.append(after - before)
        before = after
    gaps.sort()
    return gaps[len(gaps) // 2]


class Quantiles(NamedTuple):
    """Of one series, in microseconds."""

    p50: float
    p99: float
    mean: float
    best: float
    samples: int


def quantiles(samples_ns: Sequence[int], cost_ns: int, batch: int = 1) -> Quantiles:
    """Quantiles of samples in nanoseconds that each took one pair of readings and `batch` calls."""
    ordered = sorted(samples_ns)
    count = len(ordered)
    scale = 1e-3 / batch

    def at(share: float) -> float:
        return max(0.0, (ordered[min(count - 1, int(share * count))] - cost_ns) * scale)

    mean = max(0.0, (sum(ordered) / count - cost_ns) * scale)
    return Quantiles(at(0.5), at(0.99), mean, at(0.0), count)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """No garbage collection inside: it would be charged to whichever call happened to allocate."""
    import gc

    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
