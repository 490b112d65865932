"""What the daemon asks of an accelerator: a handful of verbs, each with its preconditions.

    geometry          fixed for the device's life
    export            a descriptor that another process can map the pool by
    stream, event     where copies queue, and a mark of "up to here"
    copy              many pieces in one call; returns the event behind the last of them
    drop              a copy that nobody wants any more
    gate, allow       low-priority copies run only while they are allowed to, and stop when somebody's step begins
    gated             what went through the gate, and how quickly it shut
    completion        of an event: pending, done or failed; never waits
    memory            what the device has and what of it is free
    clock             seconds; the only clock the daemon reads for what concerns the device
    close             gives the pool's memory back

The pool of a device is some planes of `slots` slots each: one plane a layer and K or V in a plane-major layout (and
one for the scales of each, where there are some), one plane in all for an opaque one.  A slot is as wide as its plane
says.  A copy moves the same slots in every plane, so callers name slots and never bytes.

Copies of low-priority streams are made of chunks of at most 256 KiB.  With a gate before them a chunk begins only
while the gate is open:

    gate(watch) ........... shut
    allow(seconds, bytes)   open --- watch() says that a step has begun, or the allowance is used up ---> shut
                            chunk | chunk | chunk |                                                         ...

The device thread shuts it, between two chunks, without asking anybody.  What was under way goes on at the next
allowance, from where it stopped: nothing fails for having waited.  Its sources and targets stay as they are meanwhile,
which whoever queued the copy sees to anyway.

A backend does what it is told: the daemon orders copies against each other and against readers.  Whoever breaks a
precondition gets a `DeviceFault`, which is our own fault and stops the process, or, on a backend that cannot tell,
wrong bytes.  Nothing here blocks but `export` and `close`, which the daemon calls on its device thread as all the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import NewType, Protocol, runtime_checkable

import msgspec

Stream = NewType("Stream", int)
Event = NewType("Event", int)
Piece = tuple[int, int, int]
"""(source slot, target slot, length in slots)."""


Watch = Callable[[], bool]
"""Says whether a step runs now.  Called by the device thread before every chunk: about a microsecond, never waits."""


class DeviceFault(AssertionError):
    """A verb was called against its preconditions."""


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a pool's memory: planes one behind the other, each from a multiple of `alignment` on.

        | plane 0: slots * slot_bytes[0] | gap | plane 1: slots * slot_bytes[1] | gap | ...

    Slot n of plane p lies at `offsets[p] + n * slot_bytes[p]`; every gap is shorter than `alignment`.
    """

    slots: int
    slot_bytes: tuple[int, ...]
    """Of each plane."""
    alignment: int = 1

    @property
    def planes(self) -> int:
        """How many there are."""
        return len(self.slot_bytes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each plane begins, in bytes from the pool's start."""
        spans = (self.span(plane) for plane in range(self.planes))
        return tuple(accumulate(spans, initial=0))[:-1]

    @property
    def total_bytes(self) -> int:
        """Of the whole pool, gaps included."""
        return sum(self.span(plane) for plane in range(self.planes))

    def span(self, plane: int) -> int:
        """Bytes from a plane's start to the next one's."""
        return -(-self.slots * self.slot_bytes[plane] // self.alignment) * self.alignment


class Completion(IntEnum):
    """How far the work before an event has come."""

    PENDING = 0
    DONE = 1
    FAILED = 2  # ended, and the targets hold nobody knows what


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """One descriptor for the whole pool: importers add offsets themselves and check them against `size_bytes`."""

    kind: str  # "memfd", "cuda", "simulated"
    handle: bytes  # opaque; a file descriptor travels beside it
    size_bytes: int
    generation: int  # differs for every pool a device ever made: a handle of an earlier one is refused by it


class MemoryInformation(msgspec.Struct, frozen=True, kw_only=True):
    """In bytes.  `free_bytes` is a reading, not a promise: another process may take it a moment later."""

    total_bytes: int
    free_bytes: int


class GateStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the device was made, of what went through the gate.  Times in seconds of `clock`.

    A closing is a gate that shuts: by `watch` (since the step's begin, where that is known), by the end of its
    allowance, or by `allow(0)` (since that call).  Its time is what passed from then to the last byte that was copied;
    0 where no chunk was under way.
    """

    open: bool
    allowances: int
    pauses: int
    """Times that the gate shut, whatever the reason, and left copies waiting."""
    watched: int
    """Closings because `watch` said so."""
    spent: int
    """Closings at the end of an allowance."""
    chunks: int
    copied_bytes: int
    copying_seconds: float
    """Spent in copies: `copied_bytes / copying_seconds` is the bandwidth, whatever the thread waited for besides."""
    bandwidth_lately: float
    """Bytes a second of copying over the last chunks, some sixteen; 0 before the first."""
    met: int
    """Closings by `watch` that came upon a chunk under way as the step began."""
    closing_seconds: float
    """Of all closings together."""
    closing_seconds_last: float
    closing_seconds_max: float
    watch_failures: int
    """Times that `watch` raised, which shuts the gate as if it had said so."""
    watch_failure_last: str

    @property
    def bandwidth(self) -> float:
        """Bytes a second of copying so far; 0 before the first."""
        return self.copied_bytes / self.copying_seconds if self.copying_seconds else 0.0


@runtime_checkable
class Device(Protocol):
    """One accelerator (or plain memory) with one pool on it."""

    @property
    def geometry(self) -> Geometry:
        """The pool's shape; the same for the device's life."""
        ...

    def export(self) -> Export:
        """The pool's descriptor.  Requires an open device."""
        ...

    def stream(self, *, low_priority: bool = False) -> Stream:
        """A new queue of copies, which run in order within it and in no order against other queues."""
        ...

    def copy(self, stream: Stream, pieces: Sequence[Piece]) -> Event:
        """Queues a batch; returns the event behind it.

        Requires: an open device; every piece within the pool and not empty; no target overlaps another target or a
        source of this batch; nobody else touches the targets until completion.  Where the sources are written before
        it, the targets hold nobody knows what: whoever lets that happen gives the copy up.
        """
        ...

    def event(self, stream: Stream) -> Event:
        """An event behind all that the stream has been given so far."""
        ...

    def completion(self, event: Event) -> Completion:
        """Whether all before the event has ended; FAILED once a copy it was returned or waits for has."""
        ...

    def drop(self, event: Event) -> None:
        """The copy behind this event is not wanted: no chunk of it begins from now on, and it ends as FAILED (or DONE,
        if it had been about to), whether the gate is open or shut, and no later than what its stream was given next.

        Until it has ended its targets may still be written.  Does nothing afterwards.  Requires an event of `copy`.
        """
        ...

    def gate(self, watch: Watch | None, *, began: Callable[[], float] | None = None) -> None:
        """Puts a gate, shut, before every low-priority copy, or takes it away (None), whereupon they all go on.

        `began`, where given, says when the step that `watch` saw began, by `clock`; it is asked after `watch` said yes.
        A second call replaces the first one's functions and shuts the gate.
        """
        ...

    def allow(self, seconds: float, *, size_bytes: int | None = None) -> None:
        """Opens the gate for so long from now, and for so many bytes at the most; 0 of either shuts it.

        Replaces what was left of the allowance before.  A chunk begins only if it is expected to end in time, by the
        speed of those before it, and is made smaller for that.  Requires a gate; neither negative.
        """
        ...

    def gated(self) -> GateStatistics:
        """Counts of the gate, now; readable without one."""
        ...

    def memory(self) -> MemoryInformation:
        """Total and free memory, now."""
        ...

    def clock(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def ask(self) -> int:
        """Asks what carries out the copies for a sign of life; returns the number to look for the answer with.

        Several may ask.  Never waits.
        """
        ...

    def answered(self, asked: int) -> bool:
        """Whether it has given a sign of life since `ask` returned this number; false for good where it has ended.

        Between two chunks of a copy it answers, within one it does not.  Never waits.
        """
        ...

    def close(self) -> None:
        """Gives the pool's memory back.  Requires that no copy is pending; closing twice is a fault."""
        ...


__all__ = [
    "Completion",
    "Device",
    "DeviceFault",
    "Event",
    "Export",
    "GateStatistics",
    "Geometry",
    "MemoryInformation",
    "Piece",
    "Stream",
    "Watch",
]
