"""The state of every slot, one byte each, in a column that the core's ledger keeps up to date.

    column[slot] = a value of `State`, for every slot, after every change

The core knows its slots by owner (a node's, a sequence's), and nothing in it is ordered by address.  A map of the pool
needs just that, and so does whoever takes the pool over when this process has died; both read this column.  It is one
store for every stretch of slots that changes state: copies of a byte, made beforehand up to `READY` of them, are laid
over the slots by one slice assignment of a memoryview, a third of what numpy takes for it.
"""

from __future__ import annotations

from typing import Final

from kvslot.allocator import State

READY: Final = 512
"""Slots of a stretch up to which the bytes to be laid over it are made beforehand."""

FILLS: Final = tuple(tuple(bytes([state]) * n for n in range(READY + 1)) for state in State)


class States:
    """The column of one pool: in memory of its own, or laid over `buffer`, of a byte a slot at least."""

    def __init__(self, slots: int, padding: int, buffer: memoryview | None = None) -> None:
        """A new pool: the first `padding` slots are padding, all others free."""
        self.view = memoryview(bytearray(slots)) if buffer is None else buffer[:slots]
        """The states by slot; not to be written to by others."""
        self.shift(0, padding, State.FREE, State.PADDING)

    def shift(self, slot: int, length: int, source: int, target: int) -> None:
        """A `Journal` of the core's ledger: `length` slots from `slot` on are in state `target` now."""
        if length <= READY:
            self.view[slot : slot + length] = FILLS[target][length]
        else:
            self.view[slot : slot + length] = FILLS[target][1] * length

    def shift_all(self, extents: list[int], source: int, target: int) -> None:
        """A `JournalAll` of it: the same for flat extents."""
        view, fills = self.view, FILLS[target]
        for i in range(0, len(extents), 2):
            slot, length = extents[i], extents[i + 1]
            view[slot : slot + length] = fills[length] if length <= READY else fills[1] * length
