"""What the daemon asks of an accelerator: a handful of verbs, each with its preconditions.

    geometry          fixed for the device's life
    export            a descriptor that another process can map the pool by
    stream, event     where copies queue, and a mark of "up to here"
    copy              many pieces in one call; returns the event behind the last of them
    completion        of an event: pending, done or failed; never waits
    memory            what the device has and what of it is free
    clock             seconds; the only clock the daemon reads for what concerns the device
    close             gives the pool's memory back

The pool of a device is some planes of `slots` slots each: one plane a layer and K or V in a plane-major layout (and
one for the scales of each, where there are some), one plane in all for an opaque one.  A slot is as wide as its plane
says.  A copy moves the same slots in every plane, so callers name slots and never bytes.

A backend does what it is told: the daemon orders copies against each other and against readers.  Whoever breaks a
precondition gets a `DeviceFault`, which is our own fault and stops the process, or, on a backend that cannot tell,
wrong bytes.  Nothing here blocks but `export` and `close`, which the daemon calls on its device thread as all the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate
from typing import NewType, Protocol, runtime_checkable

import msgspec

Stream = NewType("Stream", int)
Event = NewType("Event", int)
Piece = tuple[int, int, int]
"""(source slot, target slot, length in slots)."""


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

    def memory(self) -> MemoryInformation:
        """Total and free memory, now."""
        ...

    def clock(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
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
    "Geometry",
    "MemoryInformation",
    "Piece",
    "Stream",
]
