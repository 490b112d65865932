"""What a trace allows at best: the ideal hit, and how many distinct tokens run at once.

Both walk the prefix tree that a trace's owners form (see `traces.py`); none looks at a token.

*Ideal* (`Written`): the longest prefix of a prompt that any request has written before, however long ago.  A cache that
never evicts and rounds nothing finds exactly this.

*Yardstick* (`Yardstick`): a policy with room for everything, which counts the distinct tokens of running requests.  Its
peak gives pools a size that means the same on every trace.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import ClassVar

from kvslot.replay.policies._base import Admitted, Counters, Gauges, Refused, Room
from kvslot.replay.traces import Trace


class Written:
    """What has been written so far, by whomever, and how much of a prompt that covers.

    `reach[j]` is the position up to which the part that request j owns has been written; 0: nothing of it.  Whoever
    wrote a position wrote all before it, so the first owner on the way up that has anything tells the whole answer."""

    def __init__(self, trace: Trace, *, rounds: bool = False) -> None:
        self._keep: Sequence[int] = trace.keep
        self._owner: Sequence[int] = trace.owner
        self._prompt_len: Sequence[int] = trace.prompt_len
        self._reach: dict[int, list[int]] = {}
        # Over rounds only what sessions share stays the same; it is followed apart, once for all rounds.
        self._shared: list[int] | None = trace.shared() if rounds else None
        self._reach_shared = [0] * len(trace) if rounds else []

    def ideal(self, request: int, round_: int = 0) -> int:
        """Tokens of the prompt, at most all but the last, that have been written."""
        reach = self._reach.get(round_)
        found = 0 if reach is None else self._look(reach, request)
        if self._shared is not None:
            found = max(found, self._look(self._reach_shared, request))
        return min(found, self._prompt_len[request] - 1)

    def write(self, request: int, length: int, round_: int = 0) -> None:
        """The first `length` tokens of this request's sequence are written."""
        reach = self._reach.get(round_)
        if reach is None:
            reach = self._reach[round_] = [0] * len(self._keep)
        self._push(reach, request, length)
        if self._shared is not None:
            self._push(self._reach_shared, request, min(length, self._look(self._shared, request)))

    def forget(self, round_: int) -> None:
        """No request of that round will be asked about again; frees its memory."""
        self._reach.pop(round_, None)

    def _look(self, reach: Sequence[int], request: int) -> int:
        keep, owner = self._keep, self._owner
        if reach[request] > keep[request]:
            return reach[request]
        end, j = keep[request], owner[request]
        while j >= 0:
            if reach[j] > keep[j]:
                return min(end, reach[j])
            end, j = keep[j], owner[j]
        return 0

    def _push(self, reach: list[int], request: int, length: int) -> None:
        keep, owner = self._keep, self._owner
        end, j = length, request
        while j >= 0 and end > 0:
            start = keep[j]
            if end > start:
                if reach[j] >= end:
                    return  # whoever came this far has been here, and further up too
                reach[j] = end
                end = start
            j = owner[j]


class Yardstick:
    """A policy that holds everything and evicts nothing, to learn what a trace needs at `live` sequences at once.

    It takes request numbers as the engine gives them (round * len(trace) + request) and never looks at tokens.
    Sequences count with their full length from the start: a little more than they hold at any moment."""

    name: ClassVar[str] = "yardstick"

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._written = Written(trace)
        # Per owner: how far each running request reaches into what it owns, sorted.
        self._reaches: dict[int, list[int]] = {}
        self._running: dict[int, int] = {}
        self._distinct = 0
        self.distinct_max = 0
        """Most distinct tokens that running requests held at once."""

    @property
    def granularity(self) -> int:
        return 1

    def admit(self, request: int, tokens: bytes, engine: int, now: float) -> Admitted | Refused:
        round_, index = divmod(request, len(self._trace))
        total = self._trace.total[index]
        self._running[request] = index
        for part, start, end in self._parts(round_, index):
            reaches = self._reaches.setdefault(part, [])
            before = reaches[-1] if reaches else start
            insort(reaches, end)
            self._distinct += reaches[-1] - before
        self.distinct_max = max(self.distinct_max, self._distinct)
        return Admitted(self._written.ideal(index, round_), total, total)

    def prefilled(self, request: int, now: float) -> None:
        round_, index = divmod(request, len(self._trace))
        self._written.write(index, self._trace.prompt_len[index], round_)

    def grow(self, request: int, length: int, now: float) -> Room | None:
        raise AssertionError("a sequence that has all its room never asks for more")

    def finish(self, request: int, output: bytes, now: float) -> None:
        round_, index = divmod(request, len(self._trace))
        self._written.write(index, self._trace.total[index], round_)
        self.abort(request, now)

    def abort(self, request: int, now: float) -> None:
        round_, index = divmod(request, len(self._trace))
        del self._running[request]
        for part, start, end in self._parts(round_, index):
            reaches = self._reaches[part]
            before = reaches[-1]
            del reaches[bisect_left(reaches, end)]
            self._distinct -= before - (reaches[-1] if reaches else start)
            if not reaches:
                del self._reaches[part]

    def victim(self) -> int | None:
        return next(reversed(self._running), None)

    def gauges(self) -> Gauges:
        held = self._distinct
        return Gauges(1 << 40, held, held, held, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, len(self._running))

    def counters(self) -> Counters:
        return Counters(0, 0, 0, 0, 0)

    def blocks(self) -> bytes:
        return b""

    def _parts(self, round_: int, index: int) -> list[tuple[int, int, int]]:
        """(owner's number, start, end) of each part of the sequence.  What rounds share is taken as distinct."""
        keep, owner = self._trace.keep, self._trace.owner
        base = round_ * len(self._trace)
        parts: list[tuple[int, int, int]] = []
        end, j = self._trace.total[index], index
        while j >= 0:
            if end > keep[j]:
                parts.append((base + j, keep[j], end))
                end = keep[j]
            j = owner[j]
        return parts
