"""The session page: 128 bytes of shared memory through which engine and daemon see each other's progress.

    word   0  submitted     the client's half: steps handed to the device so far
           1  completed     ... and ended on it; both only rise, completed <= submitted
           2  epoch         the last Moved it has applied, and all before it: steps submitted from now on go by them
           3  busy          1 from the begin of a step until all that were submitted have ended
           4  began         when a step last began with none under way, in nanoseconds of CLOCK_MONOTONIC
           5  ended         ... and when the last one under way ended
           8  pushes        the daemon's half: rises with every push that went to the socket
           9  wake          1: the daemon waits on this page, and wants the eventfd written after `completed` has been

Words are aligned, 8 bytes, little endian, each written by one side only.  All of it is a hint: a page full of nonsense
costs the session that wrote it, and nobody else.

The order of the client's stores is part of the protocol.

    a step begins    epoch, began, submitted, busy = 1     who reads epoch before submitted knows of every step that
                                                           may still go by what was there before
    a step ends      completed, ended, busy = 0, bell      who sees busy fall finds the time of it; the daemon
                                                           goes by submitted and completed, which it can check
"""

from __future__ import annotations

import mmap
from typing import Final

PAGE_BYTES: Final = 4096
SUBMITTED: Final = 0
COMPLETED: Final = 1
EPOCH: Final = 2
BUSY: Final = 3
BEGAN: Final = 4
ENDED: Final = 5
PUSHES: Final = 8
WAKE: Final = 9


class SessionPage:
    """One side's view of a page; `words[n]` loads or stores one word."""

    __slots__ = ("_map", "words")

    def __init__(self, descriptor: int) -> None:
        """Maps the page behind `descriptor`, which may be closed afterwards."""
        self._map = mmap.mmap(descriptor, PAGE_BYTES)
        self.words = memoryview(self._map).cast("B").cast("Q")

    def keep_from_children(self) -> None:
        """A process forked from this one will not have the mapping."""
        self._map.madvise(mmap.MADV_DONTFORK)

    def close(self) -> None:
        """Ends the mapping."""
        self.words.release()
        self._map.close()
