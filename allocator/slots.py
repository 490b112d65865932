"""Slot states, and the one place where a slot changes state.

Every slot of a pool is in exactly one state.  What owns a slot (a sequence's range, a tree node, a ticket) is written
where the owner lives; this module only keeps the sums, and they always satisfy

    free + private + cached + fenced + moving + reserved + quarantined + padding = slots

`audit()` recounts both sides from the owners.  A journal, when one is hooked in, sees every change as
(slot, length, source, target): tests keep a shadow map with it.

A recorder is told what a change of state does not tell: what cached slots hold.  It is told first, so that whoever
reads what both have written finds no slot cached without what it holds:

    publish    the columns of the slots, then private -> cached         moved    copies of them, then moving -> cached
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvslot.allocator.results import Space

Journal = Callable[[int, int, int, int], None]
JournalAll = Callable[[list[int], int, int], None]


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


class Recorder(Protocol):
    """Who keeps what is cached where for a later life of the pool; extents are flat."""

    def publish(
        self, extents: list[int], tokens: bytes, before: int, root: int, priority: int, expiry: float
    ) -> None:
        """Private slots are about to be cached: `tokens`, behind the one in slot `before` (-1: behind the root)."""

    def moved(self, source: list[int], target: list[int]) -> None:
        """The slots of `target`, as many as those of `source`, are about to be cached in their place."""

    def owned(self, extents: list[int], mark: int) -> None:
        """From here on these slots are the session's of that mark; 0: nobody's in particular.

        Beside those that turn from free to private, which `Ledger.holder` tells: what is reclaimed from an earlier
        life, and what waits to be wiped, whose session may have ended and its mark be another's.
        """

    def opened(self, root: int, space: Space) -> None:
        """A namespace has this root from now on."""

    def closed(self, root: int) -> None:
        """... and nothing is cached in it any more."""


class Ledger:
    """Sums of slots per state, kept incrementally."""

    __slots__ = ("counts", "holder", "journal", "journal_all", "recorder", "slots")

    def __init__(self, slots: int, padding: int) -> None:
        self.slots = slots
        self.counts = [slots - padding, 0, 0, 0, 0, 0, 0, padding]
        self.journal: Journal | None = None
        self.journal_all: JournalAll | None = None  # the same for many stretches at once
        self.recorder: Recorder | None = None
        self.holder = 0  # whose the slots are that turn from free to private: the `mark` of their session

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
        if self.journal_all is not None:
            self.journal_all(extents, source, target)
        elif self.journal is not None:
            for i in range(0, len(extents), 2):
                self.journal(extents[i], extents[i + 1], source, target)
