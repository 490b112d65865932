"""What the daemon asks of an accelerator: a handful of verbs, each with its preconditions.

    geometry          fixed for the device's life
    export            a descriptor that another process can map the pool by
    stream, event     where copies queue, and a mark of "up to here"
    copy              many pieces in one call; returns the event behind the last of them
    completion        of an event: pending, done or failed; never waits
    memory            what the device has and what of it is free
    clock             seconds; the only clock the daemon reads for what concerns the device
    close             gives the pool's memory back

The pool of a device is `planes` planes of `slots` slots of `slot_bytes` bytes: one plane a layer and K or V in a
plane-major layout, one plane in all for an opaque one.  A copy moves the same slots in every plane, so callers name
slots and never bytes.

A backend does what it is told: the daemon orders copies against each other and against readers.  Whoever breaks a
precondition gets a `DeviceFault`, which is our own fault and stops the process, or, on a backend that cannot tell,
wrong bytes.  Nothing here blocks but `export` and `close`, which the daemon calls on its device thread as all the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NewType, Protocol, runtime_checkable

import msgspec

Stream = NewType("Stream", int)
Event = NewType("Event", int)
Piece = tuple[int, int, int]
"""(source slot, target slot, length in slots)."""


class DeviceFault(AssertionError):
    """A verb was called against its preconditions."""


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a pool's memory; `planes * slots * slot_bytes` bytes in all."""

    planes: int
    slots: int
    slot_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.planes * self.slots * self.slot_bytes


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
