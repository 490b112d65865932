"""Page table entries, made before they are needed.

Shared memory whose pages are there already costs a process a fault for each page that it touches for the first time:
several times what copying the page does.  The kernel makes the entries of many pages at once far cheaper.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np

READ: Final = 22  # of madvise, since Linux 5.14; Python has no names for them
WRITE: Final = 23  # takes pages that are not there yet, too
PIECE_BYTES: Final = 8 << 20  # at a time: some 4 ms, in which the process can map nothing


def populate(memory: np.ndarray[Any, Any], how: int, stop: Callable[[], bool]) -> None:
    """Makes the entries for an array, piece by piece, until `stop`.  Where the kernel cannot, nothing happens."""
    first = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = memory.ctypes.data + memory.nbytes
    madvise = ctypes.CDLL(None).madvise
    for at in range(first, end, PIECE_BYTES):
        length = min(PIECE_BYTES, (end - at) // mmap.PAGESIZE * mmap.PAGESIZE)
        if stop() or (length and madvise(ctypes.c_void_p(at), ctypes.c_size_t(length), how)):
            return


def populate_aside(
    memory: np.ndarray[Any, Any], how: int, stop: Callable[[], bool], done: Callable[[], None] = lambda: None
) -> None:
    """`populate` by a thread of its own, which keeps the memory for as long; `done` is called at its end."""

    def work(memory: list[np.ndarray[Any, Any]]) -> None:
        try:
            populate(memory.pop(), how, stop)
        finally:
            done()

    threading.Thread(target=work, args=([memory],), name="kvslot-populate", daemon=True).start()
