"""How long sequences are when they end: the first ones of a daemon's life, and the last ones.

A block size was once chosen for some load.  What is kept here tells whether the load of now still resembles that of the
start, and what other block sizes would cost it.  1024 lengths of either kind and no more, so that nothing grows; noting
one is an item of a list, and all sums are made when somebody asks.

    drift        Kolmogorov and Smirnov's: the largest distance between the two shares "no longer than n", 0 to 1
    waste_pct    of whole blocks for each of the last sequences alone, the share of slots behind its last token
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

Ascending = np.ndarray[Any, np.dtype[np.int64]]

KEPT: Final = 1024
"""Lengths of either kind, a power of two: chance moves `drift` by less than 0.1, and a summary takes a fifth of a
millisecond."""
BLOCK_SIZES: Final = (1, 4, 8, 16, 32, 64, 128, 256)
"""For which the waste is told, beside the pool's own."""


class Lengths:
    """Tokens of sequences that were freed, in one pool."""

    __slots__ = ("_first", "_last", "ended")

    def __init__(self) -> None:
        self.ended = 0  # so far
        self._first: list[int] = []
        self._last = [0] * KEPT

    def add(self, length: int) -> None:
        """One more has ended, `length` tokens long."""
        ended = self.ended
        self._last[ended & (KEPT - 1)] = length
        if ended < KEPT:
            self._first.append(length)
        self.ended = ended + 1

    def row(self, block_size: int) -> dict[str, Any]:
        """The summary of a pool with blocks of `block_size` slots.

        `first` and `last` do not share a sequence, so there is no `drift` (None) before there are two of each.
        """
        known = min(self.ended, KEPT)
        last = np.array(self._last[:known], dtype=np.int64)
        # While few have ended the same ones are in both: the first half of them is the start then.
        early = min(len(self._first), self.ended // 2)
        late = min(known, self.ended - early)
        first = np.sort(np.array(self._first[:early], dtype=np.int64))
        if self.ended > known:
            last = np.roll(last, -(self.ended % KEPT))
        last = np.sort(last[known - late :])
        return {
            "block_size": block_size,
            "ended": self.ended,
            "first": _summary(first),
            "last": _summary(last),
            "drift": _distance(first, last) if early >= 2 else None,
            "waste_pct": {str(size): _waste(last, size) for size in sorted({*BLOCK_SIZES, block_size})},
        }


def _summary(ascending: Ascending) -> dict[str, float]:
    """Percentiles are lengths that there were: the least that so many are no longer than."""
    count = len(ascending)
    if not count:
        return {"count": 0, "mean": 0.0, "p10": 0, "p50": 0, "p90": 0, "p99": 0}
    places = {f"p{share}": max(0, -(-count * share // 100) - 1) for share in (10, 50, 90, 99)}
    return {
        "count": count,
        "mean": float(ascending.mean()),
        **{name: int(ascending[place]) for name, place in places.items()},
    }


def _distance(first: Ascending, last: Ascending) -> float:
    edges = np.concatenate((first, last))
    apart = first.searchsorted(edges, side="right") / len(first) - last.searchsorted(
        edges, side="right"
    ) / len(last)
    return float(np.abs(apart).max())


def _waste(lengths: Ascending, size: int) -> float:
    taken = int((-(-lengths // size)).sum()) * size
    return 100 * (taken - int(lengths.sum())) / taken if taken else 0.0
