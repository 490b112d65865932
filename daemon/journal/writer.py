"""What happens to a pool, written as it happens: a `Journal` and a `Recorder` of the core's ledger, and who is there.

Every call is a few stores into shared memory (columns.py says which, and in what order), made before the reply goes out
that tells anybody.  Nothing here waits, fails or is flushed: memory of a memfd needs no flush to outlive a process.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final
from zlib import crc32

import msgspec
import numpy as np

from kvslot.allocator import Space
from kvslot.allocator.extents import cut
from kvslot.allocator.slots import FREE, PRIVATE, Ledger
from kvslot.daemon.journal.columns import (
    HELD,
    LIMIT,
    NUMBERS,
    PLACES,
    PRIORITY,
    ROOT,
    SERIAL_MOST,
    SESSION_BYTES,
    SESSIONS,
    SESSIONS_USED,
    SPACE,
    SPACE_BYTES,
    SPACES,
    SPACES_USED,
    Columns,
    held,
)
from kvslot.daemon.journal.states import FILLS, READY, States

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvslot.daemon.journal.reader import Found

AHEAD: Final = 1 << 20
"""Serials by which the limit is raised: so seldom that it costs nothing."""
PLACE_MOST: Final = 1 << PLACES
ENTRY: Final = struct.Struct("<QQQQqIIII16s24s")
"""number, boot, birth, group, pid, uid, gid, mapped, 0, secret, name; a word `holds`; the sum of all before that."""
HOLDS: Final = ENTRY.size // 8
SUM: Final = ENTRY.size + 8

_PLACES: Final = memoryview(np.arange(PLACE_MOST, dtype="<u4").tobytes())
_FIRST: Final = tuple(bytes(_PLACES[: 4 * n]) for n in range(READY))


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A session as a later boot needs to know it."""

    number: int
    boot: int
    pid: int
    uid: int
    gid: int
    birth: int  # of its process, in clock ticks since the machine's boot
    secret: bytes
    name: str
    group: int = 0  # the number of another session of its engine
    mapped: bool = True  # whether it has ever been given the pool's memory
    holds: bool = True  # whether it may use slots, of its own or cached


class Writer(States):
    """The journal of one pool, open for writing.  States are as the columns have them, or those of a new pool."""

    def __init__(self, columns: Columns, padding: int, ledger: Ledger, *, new: bool = True) -> None:
        """`ledger`: whose holder new private slots are; `new` False: the columns are those of an earlier life."""
        self.columns = columns
        self._ledger = ledger
        self._holder, self._held = 0, held(0).to_bytes(8, "little")
        if new:
            super().__init__(columns.slots, padding, columns.state)
        else:
            self.view = columns.state
        self._owner, self._place, self._token = columns.owner, columns.place, columns.token
        self._link = columns.link
        self._owners = columns.owner.cast("Q")
        self._places = columns.place.cast("I")
        words = columns.words
        # What was promised to the one before is not given out again.
        self._serial = self._limit = max(1, words[LIMIT])
        self._space_of: dict[int, int] = {}  # root -> number, none where it could not be written
        self._cell_of: dict[int, int] = {}  # number of a namespace -> where it stands
        self._cells = _Vacant(SPACES)
        self._entry_of: dict[int, int] = {}  # session -> where it stands
        self._entries = _Vacant(SESSIONS)
        self._session_words = columns.sessions.cast("Q")

    def follow(self) -> None:
        """From here on all that happens to the pool is written."""
        ledger = self._ledger
        ledger.journal, ledger.journal_all, ledger.recorder = self.shift, self.shift_all, self

    # -- slots -------------------------------------------------------------------------------------------------

    def shift(self, slot: int, length: int, source: int, target: int) -> None:
        """A `Journal` of the core's ledger."""
        if target == PRIVATE and source == FREE:
            holder = self._ledger.holder
            if holder != self._holder:
                self._holder, self._held = holder, held(holder).to_bytes(8, "little")
            self._owner[8 * slot : 8 * (slot + length)] = self._held * length
        super().shift(slot, length, source, target)

    def shift_all(self, extents: list[int], source: int, target: int) -> None:
        """A `JournalAll` of it."""
        if target == PRIVATE and source == FREE:
            holder = self._ledger.holder
            if holder != self._holder:
                self._holder, self._held = holder, held(holder).to_bytes(8, "little")
            word, owner = self._held, self._owner
            for i in range(0, len(extents), 2):
                slot, length = extents[i], extents[i + 1]
                owner[8 * slot : 8 * (slot + length)] = word * length
        view, fills = self.view, FILLS[target]
        for i in range(0, len(extents), 2):
            slot, length = extents[i], extents[i + 1]
            view[slot : slot + length] = fills[length] if length <= READY else fills[1] * length

    def publish(
        self, extents: list[int], tokens: bytes, before: int, root: int, priority: int, expiry: float
    ) -> None:
        """As `Recorder` has it."""
        if before >= 0:
            owner = self._owners[before]
            if owner & HELD:
                return  # what it follows is not told either
            link = owner << PLACES | self._places[before]
        else:
            number = self._space_of.get(root)
            if number is None:
                return
            link = ROOT | number
        if priority and not expiry:
            link |= priority << PRIORITY
        serial = self._serial
        if len(extents) == 2 and extents[1] < READY and serial < self._limit:
            # As `_stretch` does it; most prompts stand in one piece.
            self._serial = serial + 1
            slot, n = extents
            self._place[4 * slot : 4 * (slot + n)] = _FIRST[n]
            self._token[4 * slot : 4 * (slot + n)] = tokens
            self._link[slot] = link
            self._owner[8 * slot : 8 * (slot + n)] = serial.to_bytes(8, "little") * n
            return
        while len(tokens) > 4 * PLACE_MOST:
            link = self._stretch(cut(extents, 0, PLACE_MOST), tokens[: 4 * PLACE_MOST], link) << PLACES | (
                PLACE_MOST - 1
            )
            if priority and not expiry:
                link |= priority << PRIORITY
            extents, tokens = cut(extents, PLACE_MOST, 1 << 40), tokens[4 * PLACE_MOST :]
        self._stretch(extents, tokens, link)

    def _stretch(self, extents: list[int], tokens: bytes, link: int) -> int:
        serial = self._serial
        if serial >= self._limit:
            if serial > SERIAL_MOST - AHEAD:
                return 0  # after years; what is published from now on does not outlive this process
            self._limit = self.columns.words[LIMIT] = serial + AHEAD
        self._serial = serial + 1
        places, column, told = self._place, self._token, memoryview(tokens)
        at = 0
        for i in range(0, len(extents), 2):
            slot, n = 4 * extents[i], 4 * extents[i + 1]
            places[slot : slot + n] = _PLACES[at : at + n]
            column[slot : slot + n] = told[at : at + n]
            at += n
        self._link[extents[0]] = link
        word = serial.to_bytes(8, "little")
        owner = self._owner
        for i in range(0, len(extents), 2):
            slot, n = extents[i], extents[i + 1]
            owner[8 * slot : 8 * (slot + n)] = word * n
        return serial

    def moved(self, source: list[int], target: list[int]) -> None:
        """As `Recorder` has it."""
        owner, place, token = self._owner, self._place, self._token
        link = self._link
        left = [*reversed(target)]
        for i in range(0, len(source), 2):
            slot, n = source[i], source[i + 1]
            while n:
                goal, length = left.pop(), left.pop()
                some = min(n, length)
                if some < length:
                    left += (length - some, goal + some)
                place[4 * goal : 4 * (goal + some)] = place[4 * slot : 4 * (slot + some)]
                token[4 * goal : 4 * (goal + some)] = token[4 * slot : 4 * (slot + some)]
                link[goal : goal + some] = link[slot : slot + some]
                owner[8 * goal : 8 * (goal + some)] = owner[8 * slot : 8 * (slot + some)]
                slot += some
                n -= some

    # -- namespaces --------------------------------------------------------------------------------------------

    def opened(self, root: int, space: Space) -> None:
        """As `Recorder` has it.  One whose names are too long is not told, nor what is cached in it."""
        body = msgspec.msgpack.encode((space.tenant, space.model, space.adapter, space.salt))
        if len(body) > SPACE_BYTES - 16:
            return
        index = self._cells.take()
        words = self.columns.words
        number = words[SPACE] + 1
        words[SPACE] = number  # before it is used: what refers to it must never mean another one
        words[SPACES_USED] = max(words[SPACES_USED], index + 1)
        at = SPACE_BYTES * index
        cell = self.columns.spaces
        cell[at : at + 8] = bytes(8)
        cell[at + 16 : at + 16 + len(body)] = body
        cell[at + 8 : at + 16] = struct.pack("<II", len(body), crc32(body, number & 0xFFFFFFFF))
        cell[at : at + 8] = number.to_bytes(8, "little")
        self._space_of[root] = number
        self._cell_of[number] = index

    def closed(self, root: int) -> None:
        """As `Recorder` has it."""
        number = self._space_of.pop(root, 0)
        if number:
            index = self._cell_of.pop(number)
            self.columns.spaces[SPACE_BYTES * index : SPACE_BYTES * index + 8] = bytes(8)
            self._cells.give(index)

    # -- sessions ----------------------------------------------------------------------------------------------

    def session_opened(self, session: Session) -> None:
        """Somebody is about to be given the pool.  Raises LookupError where no more can be told."""
        index = self._entries.take()
        body = ENTRY.pack(
            session.number, session.boot, session.birth, session.group, session.pid, session.uid, session.gid,
            session.mapped, 0, session.secret, session.name.encode()[:24],
        )  # fmt: skip
        at = SESSION_BYTES * index
        table, words = self.columns.sessions, self.columns.words
        words[NUMBERS] = max(words[NUMBERS], session.number)
        words[SESSIONS_USED] = max(words[SESSIONS_USED], index + 1)
        table[at : at + 8] = bytes(8)
        table[at + 8 : at + len(body)] = body[8:]
        self._session_words[at // 8 + HOLDS] = int(session.holds)
        table[at + SUM : at + SUM + 4] = crc32(body).to_bytes(4, "little")
        table[at : at + 8] = body[:8]
        self._entry_of[session.number] = index

    def session_holds(self, number: int, holds: bool) -> None:
        """Whether a session may use slots from here on: to be said before it is told of any."""
        index = self._entry_of.get(number)
        if index is not None:
            self._session_words[SESSION_BYTES * index // 8 + HOLDS] = int(holds)

    def session_closed(self, number: int) -> None:
        """It has ended, and all that it held is free."""
        index = self._entry_of.pop(number, None)
        if index is not None:
            self._session_words[SESSION_BYTES * index // 8] = 0
            self._entries.give(index)

    @property
    def numbers(self) -> int:
        """The last number that was given to a session, in any boot."""
        return int(self.columns.words[NUMBERS])

    def go_on(self, found: Found, roots: Mapping[int, int]) -> None:
        """Takes over the tables of an earlier life; `roots`: of its namespaces, by number."""
        for number, index in found.cells.items():
            self._cells.use(index)
            self._cell_of[number] = index
            self._space_of[roots[number]] = number
        for number, index in found.entries.items():
            self._entries.use(index)
            self._entry_of[number] = index


class _Vacant:
    """Places of a table, the lowest first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._end = 0
        self._given: list[int] = []
        self._used: set[int] = set()  # at start

    def take(self) -> int:
        if self._given:
            return self._given.pop()
        while self._end in self._used:
            self._end += 1
        if self._end >= self._size:
            raise LookupError("the journal's table is full")
        self._end += 1
        return self._end - 1

    def give(self, index: int) -> None:
        self._given.append(index)

    def use(self, index: int) -> None:
        self._used.add(index)
