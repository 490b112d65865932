"""How long the steps of the data path take, by verb: one turn in so many is timed, and all are counted.

    received ─ decoded ─ admitted + applied ─ encoded ─ sent

`admitted` and `applied` are one step to the clock: the core decides and acts in one call.  Each step has a histogram of
powers of two of nanoseconds, so that a percentile is known to a factor of two, and its sum, so that the mean is exact.
"""

from __future__ import annotations

from random import Random
from typing import Any, Final

SAMPLE: Final = 17
"""One turn in so many is timed step by step, whoever's it is: who connects, asks once and goes is timed as often as the
others.  Which one is drawn by lot, since clients ask by turns, and each of them the same few things again and again."""
STEPS: Final = ("received", "decoded", "applied", "encoded", "sent", "all")
CLASSES: Final = 40  # up to 2^40 ns, a quarter of an hour


class Latency:
    """Counts and sampled times."""

    def __init__(self) -> None:
        self.skip = 0  # turns, of all connections, until the next one that is timed
        self._random = Random(SAMPLE).random
        self.counts: dict[type, int] = {}
        self.refused: dict[type, int] = {}
        self._sums: dict[type, list[int]] = {}
        self._histograms: dict[type, list[list[int]]] = {}

    def draw(self) -> None:
        """A turn is timed: which is the next one?  Each distance up to 2 SAMPLE - 1 is as likely."""
        self.skip = int(self._random() * (2 * SAMPLE - 1))

    def sample(
        self, verb: type, began: int, received: int, decoded: int, applied: int, encoded: int, sent: int
    ) -> None:
        """The times (ns) at which a verb's steps were done; of the first verb where several came at once."""
        sums = self._sums.get(verb)
        if sums is None:
            sums = self._sums[verb] = [0] * (len(STEPS) + 1)
            self._histograms[verb] = [[0] * CLASSES for _ in STEPS]
        histograms = self._histograms[verb]
        sums[-1] += 1
        for step, ns in enumerate(
            (
                received - began,
                decoded - received,
                applied - decoded,
                encoded - applied,
                sent - encoded,
                sent - began,
            )
        ):
            sums[step] += ns
            histograms[step][ns.bit_length()] += 1

    def rows(self) -> dict[str, dict[str, Any]]:
        """By verb: how many, how many refused, and of the sampled ones mean and percentiles in microseconds."""
        rows: dict[str, dict[str, Any]] = {}
        for verb, count in sorted(self.counts.items(), key=lambda item: item[0].__name__):
            if not count:
                continue
            row: dict[str, Any] = {"count": count, "refused": self.refused.get(verb, 0), "sampled": 0}
            sums = self._sums.get(verb)
            if sums is not None:
                row["sampled"] = sums[-1]
                for step, name in enumerate(STEPS):
                    row[f"{name}_us_mean"] = sums[step] / sums[-1] / 1e3
                histogram = self._histograms[verb][-1]
                row["all_us_p50"] = _percentile(histogram, 0.5)
                row["all_us_p99"] = _percentile(histogram, 0.99)
            rows[verb.__name__] = row
        return rows

    def steps(self) -> list[dict[str, Any]]:
        """Of every verb that was sampled, each step: how often, seconds in all, and the histogram.

        `classes[k]` counts times below 2^k ns that are at least half as long; trailing zeros are left out.
        """
        found = []
        for verb, histograms in sorted(self._histograms.items(), key=lambda item: item[0].__name__):
            sums = self._sums[verb]
            for step, name in enumerate(STEPS):
                classes = list(histograms[step])
                while classes and not classes[-1]:
                    classes.pop()
                found.append(
                    {"verb": verb.__name__, "step": name, "sampled": sums[-1], "seconds": sums[step] / 1e9,
                     "classes": classes}
                )  # fmt: skip
        return found


def _percentile(histogram: list[int], share: float) -> float:
    """The upper edge of the class that the percentile falls in, in microseconds."""
    left = share * sum(histogram)
    for power, count in enumerate(histogram):
        left -= count
        if count and left <= 0:
            return (1 << power) / 1e3
    return 0.0
