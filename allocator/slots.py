"""Slot states, and the one place where a slot changes state.

Every slot of a pool is in exactly one state.  What owns a slot (a sequence's range, a tree node, a ticket) is written
where the owner lives; this module only keeps the sums, and they always satisfy

    free + private + cached + fenced + moving + reserved + quarantined + padding = slots

`audit()` recounts both sides from the owners.  A journal, when one is hooked in, sees every change as
(slot, length, source, target): tests keep a shadow map with it, a later crash journal can do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

Journal = Callable[[int, int, int, int], None]


class State(IntEnum):
    """The state of a slot.  Values are stable: maps and snapshots carry them."""

    FREE = 0  # in the free structures
    PRIVATE = 1  # a live sequence's, written or not; forks may share it
    CACHED = 2  # a tree node's: published, never written again
    FENCED = 3  # given back, but a submitted step may still touch it
    MOVING = 4  # the target of a move whose copy has not ended, or an old place that is still read
    RESERVED = 5  # set aside for a waiting ticket
    QUARANTINED = 6  # a lost session's, its process not yet proven gone
    PADDING = 7  # never handed out: slot 0 is read padding, the last of them write padding


# Plain integers for the hot paths: an enum member costs an attribute look-up on a class.
FREE, PRIVATE, CACHED, FENCED, MOVING, RESERVED, QUARANTINED, PADDING = range(8)


class Ledger:
    """Sums of slots per state, kept incrementally."""

    __slots__ = ("counts", "journal", "slots")

    def __init__(self, slots: int, padding: int) -> None:
        self.slots = slots
        self.counts = [slots - padding, 0, 0, 0, 0, 0, 0, padding]
        self.journal: Journal | None = None

    def shift(self, slot: int, length: int, source: int, target: int) -> None:
        """Turns `length` slots from `slot` on from state `source` into `target`."""
        counts = self.counts
        counts[source] -= length
        counts[target] += length
        if self.journal is not None:
            self.journal(slot, length, source, target)

    def shift_all(self, extents: list[int], length: int, source: int, target: int) -> None:
        """The same for the `length` slots of a flat list slot, length, slot, length, ..."""
        counts = self.counts
        counts[source] -= length
        counts[target] += length
        if self.journal is not None:
            for i in range(0, len(extents), 2):
                self.journal(extents[i], extents[i + 1], source, target)
