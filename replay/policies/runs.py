"""Free runs of any length over one stretch of slots: best fit, with coalescing.

    slots   0 ............................................... total
            [ run ][  hole  ][ run ][ run ][     hole      ]

Holes are kept three ways: by first slot, by the slot behind their end (so that a run that is given back finds both its
neighbours in O(1)), and as pairs of (length, start) in order, where the best fit is one bisection away.  Two holes
never touch, so there are at most as many as there are runs in use, plus one; the ordered list is short and an
insertion moves a few pointers.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class Runs:
    """`total` slots, all free at first."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._holes: list[tuple[int, int]] = [(total, 0)] if total else []
        """(length, start), shortest first, and the lowest of equally long ones first."""
        self._by_start: dict[int, int] = {0: total} if total else {}
        self._by_end: dict[int, int] = {total: 0} if total else {}

    @property
    def largest(self) -> int:
        """Slots in the longest hole."""
        return self._holes[-1][0] if self._holes else 0

    @property
    def holes(self) -> list[tuple[int, int]]:
        """(start, length) of every hole, in order of place."""
        return sorted(self._by_start.items())

    def take(self, length: int) -> int | None:
        """First slot of a run of `length`, cut from the start of the shortest hole that has room; None if none has."""
        holes = self._holes
        at = bisect_left(holes, (length, 0))
        if at == len(holes):
            return None
        size, start = holes.pop(at)
        del self._by_start[start]
        if size == length:
            del self._by_end[start + size]
        else:
            self._by_start[start + length] = size - length
            self._by_end[start + size] = start + length
            insort(holes, (size - length, start + length))
        self.free -= length
        return start

    def give(self, start: int, length: int) -> None:
        """Return a run; it joins the holes on both sides."""
        end = start + length
        self.free += length
        after = self._by_start.pop(end, 0)
        if after:
            self._forget(after, end)
            end += after
        before = self._by_end.pop(start, -1)
        if before >= 0:
            self._forget(start - before, before)
            start = before
        self._by_start[start] = end - start
        self._by_end[end] = start
        insort(self._holes, (end - start, start))

    def _forget(self, length: int, start: int) -> None:
        at = bisect_left(self._holes, (length, start))
        assert self._holes[at] == (length, start)
        del self._holes[at]
