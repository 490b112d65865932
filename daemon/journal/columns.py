"""The journal's memory: a head that says what it is, columns by slot, a table of sessions, and one of namespaces.

    head        4096 bytes; what it describes (pool, layout, memory, boot), checked by a sum; then words that change
    state       u8  by slot: the core's states
    whose       u8  by slot: the mark of the session that it is or was private to; 0: nobody in particular
    stretch     u64 by slot: the serial number of what its token was published in; 0: it is not known
    place       u32 by slot: which token of that stretch it is
    token       i32 by slot
    link        u64 by slot, of a stretch's first token: stretch and place of the one that it follows
    sessions    SESSIONS entries of 128 bytes: who may use slots that are not free
    spaces      SPACES entries of 4096 bytes, hardly any of them ever touched: namespaces by number

A slot is cached, for whoever reads this after the process has died, exactly where `state` says so and all tokens of its
stretch up to this one are there, too.  Nothing else is written when memory is evicted: the change of its state is the
record that it no longer holds what it held.  Everything is stored by the one thread that replies, in the order of the
program, so whoever was told something finds it here; a store into shared memory is there for others at once, and a
process that is killed between two of them leaves what the first has written.

    publish    place, token, link, stretch, then state = cached     dying in between leaves private slots; a number that
                                                                    is half written is in a slot that is not cached yet
    move       the target's columns, then its state, then the source's      both hold the same bytes in between
    allocate   whose, then state = private                                  a free slot was promised to nobody

A slot that becomes cached has had its stretch written since it was last free, if with 0; so nothing of an earlier life
of the slot counts.  A serial number of a stretch is never used again in a journal's life, so that a link cannot lead to
another than it was made for.  `LIMIT` in the head is above every serial there is; it is raised by many at a time.
"""

from __future__ import annotations

import mmap
import os
from typing import Final
from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt

MAGIC: Final = b"kvslotj2"
HEAD: Final = 4096
SESSIONS: Final = 65536
"""As many as the settings allow."""
SESSION_BYTES: Final = 128
SPACES: Final = 65536
SPACE_BYTES: Final = 4096
WORDS: Final = HEAD // 2
"""Where in the head its words stand."""
LIMIT, SPACE, NUMBERS, SESSIONS_USED, SPACES_USED, LIVES = range(6)
"""Words: above every serial · the last number of a namespace · of a session · entries ever used of either table ·
how often it was taken over"""

MARKS: Final = 256
"""Of sessions that are told apart, 0 is none: `whose` has a byte."""
ROOT: Final = 1 << 63
"""In `link`: begins the namespace whose number the other bits are."""
PRIORITY: Final = 60
"""In `link`: the three bits from there on are the priority."""
PLACES: Final = 18
"""Bits of a place: tokens of one stretch.  A longer one is published as several."""
SERIAL_MOST: Final = (1 << PRIORITY - PLACES) - 1
PAGE: Final = 4096


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal belongs to: all of it must agree, or what it says is about something else."""

    pool: str
    slots: int
    block_size: int
    padding: int
    unit: int
    fingerprint: str  # of the layout
    scrubs: bool  # whether what is free has been wiped
    size_bytes: int  # of the pool's memory
    inode: int  # of the pool's memory
    generation: int  # ... as clients are told of it
    boot: int  # of the daemon that wrote it last


def _aligned(size: int) -> int:
    return -(-size // PAGE) * PAGE


def size_of(slots: int) -> int:
    """Bytes of the journal of a pool; what is not written takes none."""
    return Columns.end(slots)


class Columns:
    """Views of a journal's memory, for who writes it and for who reads it."""

    def __init__(
        self, buffer: memoryview, slots: int, *, sessions: int = SESSIONS, spaces: int = SPACES
    ) -> None:
        """`sessions`, `spaces`: entries of the tables."""
        self.buffer = buffer
        self.slots = slots
        self.words = buffer[WORDS:HEAD].cast("Q")
        at = HEAD
        self.state = buffer[at : at + slots]
        at += _aligned(slots)
        self.whose = buffer[at : at + slots]
        at += _aligned(slots)
        self.stretch = buffer[at : at + 8 * slots]
        at += _aligned(8 * slots)
        self.place = buffer[at : at + 4 * slots]
        at += _aligned(4 * slots)
        self.token = buffer[at : at + 4 * slots]
        at += _aligned(4 * slots)
        self.link = buffer[at : at + 8 * slots].cast("Q")
        at += _aligned(8 * slots)
        self.sessions = buffer[at : (at := at + sessions * SESSION_BYTES)]
        self.spaces = buffer[at : at + spaces * SPACE_BYTES]

    @staticmethod
    def end(slots: int) -> int:
        """Bytes of all of it."""
        columns = 2 * (_aligned(slots) + _aligned(4 * slots) + _aligned(8 * slots))
        return HEAD + SESSIONS * SESSION_BYTES + SPACES * SPACE_BYTES + columns

    def write_head(self, head: Head) -> None:
        """Says what this is; a reader that finds half of it finds nothing."""
        body = msgspec.msgpack.encode(head)
        assert len(body) <= WORDS - 16
        self.buffer[:8] = bytes(8)
        self.buffer[16 : 16 + len(body)] = body
        self.buffer[8:16] = crc32(body).to_bytes(4, "little") + len(body).to_bytes(4, "little")
        self.buffer[:8] = MAGIC

    def array(self, column: memoryview, dtype: type[np.generic]) -> npt.NDArray[np.generic]:
        """A column for numpy."""
        return np.frombuffer(column, dtype)


def read_head(buffer: memoryview) -> Head | str:
    """What a journal says that it is, or why it is none."""
    if len(buffer) < HEAD:
        return "it is too short to be a journal"
    if bytes(buffer[:8]) != MAGIC:
        return "it is no journal of this version"
    length = int.from_bytes(buffer[12:16], "little")
    body = bytes(buffer[16 : 16 + length])
    if length > WORDS - 16 or crc32(body) != int.from_bytes(buffer[8:12], "little"):
        return "its head is torn"
    try:
        return msgspec.msgpack.decode(body, type=Head)
    except msgspec.DecodeError as error:
        return f"its head cannot be read: {error}"


def make(slots: int, name: str) -> int:
    """A memfd for a journal, sealed against growing and shrinking; the descriptor is the caller's."""
    import fcntl

    descriptor = os.memfd_create(f"kvslot-journal-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_of(slots))
        fcntl.fcntl(
            descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        )
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def mapped(descriptor: int) -> mmap.mmap:
    """A journal's memory."""
    memory = mmap.mmap(descriptor, 0)
    memory.madvise(mmap.MADV_DONTDUMP)
    return memory
