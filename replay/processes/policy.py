"""`slotted` by way of a running daemon: one client's sequences, appended to token by token, painted and read back.

    admit      Allocate, one round trip                     then what was hit is read back and compared
    prefilled  the rest of the prompt is painted; Commit leaves with that step's frame
    grow       tokens are appended and painted; the client library asks for the next run by itself, half a run ahead
    finish     the last tokens; the whole table is read back; Commit and Free leave with that step's frame, fenced by it

All of this happens in steps of the engine (`client.submit`, `client.complete`): what decodes within STEP_S shares one,
so that the questions of several sequences leave in one frame; whatever others have to hear of ends it.  What is freed
is freed behind the fence of its step.  Token ids come from the trace, as the engine's own do.
"""

from __future__ import annotations

import time
from array import array
from contextlib import suppress
from typing import ClassVar, Final, Protocol

import numpy as np

from kvslot.api.client import Client, Event, Later, Never, OutOfRoom, Sequence
from kvslot.api.wire import Refused as Denial
from kvslot.api.wire.messages import Preempt
from kvslot.replay.policies import Admitted, Counters, Gauges, Refused, Room
from kvslot.replay.processes.painting import Painter, Values, slots_of

STEP_S: Final = 0.05
"""Simulated seconds: two or three tokens of each sequence."""
PATIENCE_S: Final = 0.25
"""How long growth for which a victim of this client was freed waits to be told that it may go on."""


class Ids(Protocol):
    """Where token ids come from: a trace's Expander."""

    def sequence(self, request: int, round_: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int32]]: ...


class _Live:
    """A running request."""

    __slots__ = ("capacity", "ids", "length", "mark", "prompt", "sequence", "values", "written")

    def __init__(
        self, sequence: Sequence, ids: np.ndarray[tuple[int], np.dtype[np.int32]], prompt: int
    ) -> None:
        self.sequence = sequence
        self.ids = ids
        self.values: Values | None = None
        self.prompt = prompt
        self.length = prompt
        """Tokens that have a slot."""
        self.written = sequence.hit
        """Tokens that are painted, the hit among them."""
        self.capacity = 0
        self.mark = 0
        self.look(prompt)

    def look(self, before: int) -> None:
        """Where to ask next, after the capacity rose from `before`: once half of what was added is used."""
        self.capacity = capacity = self.sequence.capacity
        self.mark = capacity - ((capacity - before + 1) >> 1)


class SocketPolicy:
    """One client's part of a pool behind a socket."""

    name: ClassVar[str] = "slotted"

    def __init__(
        self, client: Client, ids: Ids, painter: Painter, requests: int, plant: tuple[int, int] = (0, 0)
    ) -> None:
        """`requests` of the trace; `plant` (n, by), for tests: the n-th admission's first extent is moved by `by`."""
        self.client = client
        self.painter = painter
        self.ticket = 0
        """Of the head of the line, which was told LATER."""
        self.later: Later | None = None
        self.appended = 0
        self.round_trips_ns = array("Q")
        """Of Allocate, the answer taken in."""
        self._ids = ids
        self._requests = requests
        self._live: dict[int, _Live] = {}
        self._by_sequence: dict[int, int] = {}
        self._refused = 0
        self._gave = False
        self._step_ends = 0.0
        self._in_step = False
        self._aside_ns = 0
        self._plant = plant
        self._admissions = 0
        self._events: list[Event] = []

    def clock(self) -> int:
        """CPU time of this thread, painting and comparing left out: what the pool itself costs an engine (ns)."""
        return time.thread_time_ns() - self._aside_ns

    @property
    def granularity(self) -> int:
        return 1

    # -- the interface of policies -----------------------------------------------------------------------------

    def admit(self, request: int, tokens: bytes, engine: int, now: float) -> Admitted | Refused:
        self.end_step()
        client = self.client
        ticket = self.ticket
        if ticket and self._refused != request:
            # The line moved on without it: its place is given up.
            with suppress(Denial):  # its grace may have run out
                client.withdraw(ticket)
            ticket = 0
        self.ticket = 0
        began = time.perf_counter_ns()
        answer = client.allocate(tokens, ticket=ticket, wait_for_commit=True)
        self.round_trips_ns.append(time.perf_counter_ns() - began)
        if isinstance(answer, Sequence):
            aside = time.thread_time_ns()
            round_, index = divmod(request, self._requests)
            live = _Live(answer, self._ids.sequence(index, round_), len(tokens) >> 2)
            self._live[request] = live
            self._by_sequence[answer.id] = request
            self._admissions += 1
            if self._admissions == self._plant[0]:
                answer.extents[0] += self._plant[1]
            self._aside_ns += time.thread_time_ns() - aside
            return Admitted(answer.hit, live.capacity, self._ask_at(live, live.length))
        if isinstance(answer, Never):
            return Refused(True, answer.needed)
        self.later = answer
        self.ticket, self._refused = answer.ticket, request
        return Refused(False, 0 if answer.reason == "commit" else max(1, answer.needed))

    def check_hit(self, request: int) -> None:
        """Reads back what was found cached, before it is used; raises WrongSlot."""
        live = self._live[request]
        sequence = live.sequence
        live.values = self.painter.values(live.ids)
        if sequence.copies:
            self.client.pool.copy(sequence.take_copies())
        if sequence.hit:
            self._compare(live, 0, sequence.hit, "a hit, read back before its use")

    def prefilled(self, request: int, now: float) -> None:
        live = self._live[request]
        self._begin_step(now)
        self._paint(live, slots_of(live.sequence.extents, live.written, live.prompt), live.prompt)
        live.sequence.commit(live.prompt, wait=False)
        self.end_step()

    def grow(self, request: int, length: int, now: float) -> Room | None:
        live = self._live[request]
        self._begin_step(now)
        sequence = live.sequence
        if not self._append(live, length - 1) or (sequence.room == 0 and not self._room(sequence, 1)):
            return None
        ask_at = self._ask_at(live, length - 1)
        return Room(live.capacity, ask_at)

    def write(self, request: int, length: int) -> bool:
        """Sees to it that there is room for the sequence's first `length` tokens; false where the daemon has none."""
        live = self._live[request]
        missing = length - live.sequence.length
        return missing <= live.sequence.room or self._room(live.sequence, missing)

    def finish(self, request: int, output: bytes, now: float) -> None:
        live = self._live[request]
        total = live.prompt + (len(output) >> 2)
        sequence = live.sequence
        self._begin_step(now)
        if not self._append(live, total):
            raise AssertionError("room that `write` made is gone")
        self._compare(live, 0, total, "its own table, before it was freed")
        sequence.commit(total, wait=False)
        self._free(request, sequence)
        self.end_step()

    def abort(self, request: int, now: float) -> None:
        live = self._live[request]
        self._begin_step(now)
        if live.written >= live.prompt:
            self._compare(live, 0, live.written, "its own table, before it was preempted")
        self._free(request, live.sequence)
        self.end_step()
        self._gave = True

    def victim(self) -> int | None:
        return next(reversed(self._live), None)

    def gauges(self) -> Gauges:
        return Gauges(*[0] * len(Gauges._fields))  # the parent reads them from the daemon

    def counters(self) -> Counters:
        return Counters(*[0] * len(Counters._fields))

    def blocks(self) -> bytes:
        return b""

    # -- what the daemon says by itself ------------------------------------------------------------------------

    def heed(self) -> tuple[bool, list[int]]:
        """Whether the ticket of the line's head was called, and the requests that are to be preempted."""
        called = False
        preempted: list[int] = []
        for event in (*self._events, *self.client.events()):
            if isinstance(event, Preempt):
                number = self._by_sequence.get(event.sequence)
                if number is not None and number not in preempted:
                    preempted.append(number)
            elif getattr(event, "ticket", 0) == self.ticket and self.ticket:
                called = True
        self._events.clear()
        return called, preempted

    # -- steps -------------------------------------------------------------------------------------------------

    def _begin_step(self, now: float) -> None:
        """The engine computes at `now`: within the present step, if there is one and it has not lasted too long."""
        if self._in_step and now >= self._step_ends:
            self.end_step()
        if not self._in_step:
            self._in_step = True
            self._step_ends = now + STEP_S
            self.client.submit()

    def end_step(self) -> None:
        """What the present step did is done, and what it has to say leaves."""
        if self._in_step:
            self._in_step = False
            self.client.complete()

    # -- inside ------------------------------------------------------------------------------------------------

    def _ask_at(self, live: _Live, length: int) -> int:
        """The next length at which the engine comes back: where more room gets asked for, or where there is no more."""
        sequence = live.sequence
        if sequence.capacity != live.capacity:
            live.look(live.capacity if sequence.capacity > live.capacity else length)
        # Crossing the mark is what makes the library ask, so it is crossed by one.
        asking = live.mark + 1
        return asking if length < asking < live.capacity else live.capacity

    def _append(self, live: _Live, length: int) -> bool:
        """Appends tokens up to `length` and paints them."""
        first = live.sequence.length
        if first == length:
            return True
        sequence = live.sequence
        if length - first > sequence.room and not self._room(sequence, length - first):
            return False
        append = sequence.append
        slots = [append(token) for token in live.ids[first:length].tolist()]
        self.appended += len(slots)
        live.length = length
        self._paint(live, np.array(slots, dtype=np.int64), length)
        return True

    def _paint(self, live: _Live, slots: np.ndarray[tuple[int], np.dtype[np.int64]], stop: int) -> None:
        began = time.thread_time_ns()
        if live.sequence.copies:
            self.client.pool.copy(live.sequence.take_copies())
        assert live.values is not None
        self.painter.paint(slots, live.values[live.written : stop])
        live.written = stop
        self._aside_ns += time.thread_time_ns() - began

    def _compare(self, live: _Live, start: int, stop: int, what: str) -> None:
        began = time.thread_time_ns()
        assert live.values is not None
        sequence = live.sequence
        self.painter.verify(
            slots_of(sequence.extents, start, stop), live.values[start:stop], start, sequence.id, what
        )
        self._aside_ns += time.thread_time_ns() - began

    def _room(self, sequence: Sequence, tokens: int) -> bool:
        """Waits for the daemon's word on room for so many more tokens."""
        if self._reserved(sequence, tokens):
            self._gave = False
            return True
        end = time.monotonic() + PATIENCE_S
        # Something of this client was freed for it just now: the answer stands until the daemon has seen that.
        while self._gave and time.monotonic() < end:
            self._events += self.client.events(0.001)
            if self._reserved(sequence, tokens):
                self._gave = False
                return True
        self._gave = False
        return False

    def _free(self, request: int, sequence: Sequence) -> None:
        del self._live[request], self._by_sequence[sequence.id]
        sequence.free()

    def _reserved(self, sequence: Sequence, tokens: int) -> bool:
        try:
            sequence.reserve(tokens)
        except OutOfRoom as full:
            if isinstance(full.answer, Later):
                self.later = full.answer
            return False
        return True
