"""`contiguous`: one run of slots per sequence, long enough for all it may ever hold: the world before paging.

    pool    [ A: prompt | written | reserved ....... ][ B: prompt | reserved ............. ][   hole   ]

A kernel that wants K and V in one piece needs the whole run at the start, and nobody knows how long the answer will
be; so every sequence gets room for the longest prompt and output that the service admits (`max_length`, capped by the
pool).  Nothing is shared, nothing cached, nothing grows, so nothing is ever preempted, and there is no watermark.

Runs are best fit with coalescing.  There are no blocks: a run stands for one in the gauge of blocks in use, and nothing
is rounded.  So the waste is all in what is reserved, and in the last hole, too short for one more run.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvslot.replay.policies._base import Admitted, Counters, Gauges, PolicyConfig, Refused, Room
from kvslot.replay.policies.runs import Runs
from kvslot.replay.policies.sequences import (
    NOTED_EVERY,
    TOKEN_BYTES,
    OutOfTurn,
    check_config,
    picture,
    prompt_length,
    unknown,
)


class _Sequence:
    __slots__ = ("prompt", "start", "written")

    def __init__(self, prompt: int, start: int) -> None:
        self.prompt = prompt
        self.start = start
        self.written = 0
        """Tokens known to be written; 0 before `prefilled`."""


class ContiguousPolicy:
    """One stretch of slots, cut into runs of one length.  Raises ValueError if `max_length` is not known."""

    name: ClassVar[str] = "contiguous"

    def __init__(self, config: PolicyConfig) -> None:
        check_config(config)
        if config.max_length < 1:
            raise ValueError("contiguous sets max_length slots aside for each sequence: it must be given")
        self._usable = config.pool_tokens
        self._size = config.block_size
        self._length = min(config.max_length, self._usable)
        self._runs = Runs(self._usable)
        self._live: dict[int, _Sequence] = {}
        self._private = 0
        self._extents = 0

    @property
    def granularity(self) -> int:
        return 1

    def admit(self, request: int, tokens: bytes, engine: int, now: float) -> Admitted | Refused:
        length = prompt_length(request, tokens, self._live)
        if length > self._length:
            return Refused(True, length)
        start = self._runs.take(self._length)
        if start is None:
            return Refused(False, length)
        self._live[request] = _Sequence(length, start)
        self._extents += 1
        return Admitted(0, self._length, min(self._length, length + NOTED_EVERY))

    def prefilled(self, request: int, now: float) -> None:
        sequence = self._get(request)
        if sequence.written:
            raise OutOfTurn(f"request {request} was prefilled before")
        self._private += sequence.prompt
        sequence.written = sequence.prompt

    def grow(self, request: int, length: int, now: float) -> Room | None:
        """Notes how far the sequence is; its run is as long as it will ever be."""
        sequence = self._get(request)
        if not sequence.written or length <= sequence.written:
            raise OutOfTurn(f"request {request} cannot grow to {length} tokens now")
        if length > self._length:
            return None
        self._private += length - 1 - sequence.written
        sequence.written = length - 1
        return Room(self._length, min(self._length, length - 1 + NOTED_EVERY))

    def finish(self, request: int, output: bytes, now: float) -> None:
        sequence = self._get(request)
        length = sequence.prompt + len(output) // TOKEN_BYTES
        if not sequence.written:
            raise OutOfTurn(f"request {request} finishes before its prompt was written")
        if not sequence.written <= length <= self._length:
            raise OutOfTurn(f"request {request} ends with {length} tokens, but has room for {self._length}")
        self._release(request, sequence)

    def abort(self, request: int, now: float) -> None:
        self._release(request, self._get(request))

    def victim(self) -> int | None:
        return next(reversed(self._live), None)

    def gauges(self) -> Gauges:
        taken = len(self._live) * self._length
        return Gauges(
            usable=self._usable,
            blocks_in_use_slots=taken,
            tokens_held=self._private,
            private=self._private,
            cached=0,
            reserved=taken - self._private,
            duplicates=0,
            peeled=0,
            fenced=0,
            quarantined=0,
            moving=0,
            free=self._runs.free,
            evictable=0,
            largest_free_run=self._runs.largest,
            live_sequences=len(self._live),
        )

    def counters(self) -> Counters:
        return Counters(
            copied_tokens=0,
            moved_tokens=0,
            extents=self._extents,
            extent_tokens=self._extents * self._length,
            evicted_tokens=0,
        )

    def blocks(self) -> bytes:
        size = self._size
        held = np.zeros(-(-self._usable // size) * size, dtype=np.int64)
        for sequence in self._live.values():
            held[sequence.start : sequence.start + sequence.written] = 1
        return picture(held.reshape(-1, size).sum(axis=1), size)

    def slots(self, request: int) -> list[int]:
        """The slot of each position a live request has room for: what its kernels would be given."""
        start = self._get(request).start
        return list(range(start, start + self._length))

    def audit(self) -> None:
        """Recount everything and compare: runs and holes cover the pool once; free + private + reserved = usable."""
        parts = [(sequence.start, self._length) for sequence in self._live.values()] + self._runs.holes
        at = 0
        for start, length in sorted(parts):
            assert start == at
            assert length > 0
            at += length
        assert at == self._usable
        gauges = self.gauges()
        assert gauges.private == sum(sequence.written for sequence in self._live.values())
        assert gauges.free == sum(length for _, length in self._runs.holes)
        assert gauges.largest_free_run == max((length for _, length in self._runs.holes), default=0)
        assert gauges.free + gauges.private + gauges.reserved == gauges.usable
        assert min(gauges._replace(usable_run=0)) >= 0  # not all have that

    # --- inside -----------------------------------------------------------------------------------------------

    def _get(self, request: int) -> _Sequence:
        sequence = self._live.get(request)
        if sequence is None:
            raise unknown(request)
        return sequence

    def _release(self, request: int, sequence: _Sequence) -> None:
        self._private -= sequence.written
        self._runs.give(sequence.start, self._length)
        del self._live[request]
