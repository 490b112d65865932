"""What happens to a pool, written as it happens: a `Journal` and a `Recorder` of the core's ledger, and who is there.

Every call is a few stores into shared memory (columns.py says which, and in what order), made before the reply goes out
that tells anybody.  Nothing here waits, fails or is flushed: memory of a memfd needs no flush to outlive a process.
"""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Final
from zlib import crc32

import msgspec
import numpy as np

from kvslot.allocator import Space
from kvslot.allocator.extents import cut
from kvslot.allocator.slots import FREE, PRIVATE, Ledger
from kvslot.daemon.journal.columns import (
    LIMIT,
    MARKS,
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
)
from kvslot.daemon.journal.states import FILLS, READY, States

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvslot.daemon.journal.reader import Found

AHEAD: Final = 1 << 20
"""Serials by which the limit is raised: so seldom that it costs nothing."""
PLACE_MOST: Final = 1 << PLACES
ENTRY: Final = struct.Struct("<QQQQqIIII16s24s")
"""number, boot, birth, group, pid, uid, gid, mapped, mark, secret, name; a word `holds`; the sum of all before that."""
HOLDS: Final = ENTRY.size // 8
HELD: Final = 1
NOTHING: Final = 0x5A5A5A5A5A5A5A5A
OVER: Final = 0xA5A5A5A5A5A5A5A5
"""What `holds` says of a session that holds nothing, and of one that is over, while what it held is being put away and
after that.  Anything else says that it holds something, so that no few bits that flip say that it does not."""
SUM: Final = ENTRY.size + 8

MARKED: Final = tuple(bytes([mark]) for mark in range(MARKS))

_PLACES: Final = np.arange(PLACE_MOST, dtype="<u4").tobytes()
_READY: Final = tuple(_PLACES[: 4 * n] for n in range(READY + 1))


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
    mark: int = 0  # in `whose`, given by the journal
    mapped: bool = True  # whether it has ever been given the pool's memory
    holds: bool = True  # whether it may use slots, of its own or cached
    over: bool = False  # it said so, or its process was proven gone: it uses nothing any more, living or not


class Writer(States):
    """The journal of one pool, open for writing.  States are as the columns have them, or those of a new pool."""

    def __init__(self, columns: Columns, padding: int, ledger: Ledger, *, new: bool = True) -> None:
        """`ledger`: whose holder new private slots are; `new` False: the columns are those of an earlier life."""
        self.columns = columns
        self._ledger = ledger
        if new:
            super().__init__(columns.slots, padding, columns.state)
        else:
            self.view = columns.state
        self._whose, self._stretch, self._place = columns.whose, columns.stretch, columns.place
        self._token, self._link = columns.token, columns.link
        self._serials, self._places = columns.stretch.cast("Q"), columns.place.cast("I")
        self._marks = _Vacant(MARKS)
        self._marks.use(0)
        self._mark_of: dict[int, int] = {}  # session -> its mark
        words = columns.words
        # What was promised to the one before is not given out again.
        self._serial = self._limit = max(1, words[LIMIT])
        self._space_of: dict[int, int] = {}  # root -> the link to it, none where it could not be written
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
            self._whose[slot : slot + length] = MARKED[self._ledger.holder] * length
        super().shift(slot, length, source, target)

    def shift_all(self, extents: list[int], source: int, target: int) -> None:
        """A `JournalAll` of it."""
        if target == PRIVATE and source == FREE:
            whose, mark = self._whose, MARKED[self._ledger.holder]
            for i in range(0, len(extents), 2):
                slot, length = extents[i], extents[i + 1]
                whose[slot : slot + length] = mark * length
        view, fills = self.view, FILLS[target]
        for i in range(0, len(extents), 2):
            slot, length = extents[i], extents[i + 1]
            view[slot : slot + length] = fills[length] if length <= READY else fills[1] * length

    def publish(
        self, extents: list[int], tokens: bytes, before: int, root: int, priority: int, expiry: float
    ) -> None:
        """As `Recorder` has it."""
        # What it follows; 0: that is not told either.
        if before < 0:
            link = self._space_of.get(root, 0)
        else:
            serial = self._serials[before]
            link = serial << PLACES | self._places[before] if serial else 0
        if link and priority and not expiry:
            link |= priority << PRIORITY
        while link and len(tokens) > 4 * PLACE_MOST:
            link = self._publish(cut(extents, 0, PLACE_MOST), tokens[: 4 * PLACE_MOST], link)
            if link and priority and not expiry:
                link |= priority << PRIORITY
            extents, tokens = cut(extents, PLACE_MOST, 1 << 40), tokens[4 * PLACE_MOST :]
        if link:
            link = self._publish(extents, tokens, link)
        if not link:
            for i in range(0, len(extents), 2):
                slot, n = extents[i], extents[i + 1]
                self._stretch[8 * slot : 8 * (slot + n)] = bytes(8 * n)

    def _publish(self, extents: list[int], tokens: bytes, link: int) -> int:
        """Writes a stretch; returns the link to its last token, 0 where it could not be written."""
        serial = self._serial
        if serial >= self._limit:
            if serial > SERIAL_MOST - AHEAD:
                return 0  # after years; what is published from now on does not outlive this process
            self._limit = self.columns.words[LIMIT] = serial + AHEAD
        self._serial = serial + 1
        count = len(tokens) >> 2
        places, column, stretch = self._place, self._token, self._stretch
        word = serial.to_bytes(8, "little")
        if len(extents) == 2:
            slot = extents[0]
            first, end = 4 * slot, 4 * (slot + count)
            places[first:end] = _READY[count] if count <= READY else _PLACES[: 4 * count]
            column[first:end] = tokens
            self._link[slot] = link
            stretch[2 * first : 2 * end] = word * count
            return serial << PLACES | (count - 1)
        at = 0
        for i in range(0, len(extents), 2):
            first, size = 4 * extents[i], 4 * extents[i + 1]
            places[first : first + size] = _PLACES[at : at + size]
            column[first : first + size] = tokens[at : at + size]
            at += size
        self._link[extents[0]] = link
        for i in range(0, len(extents), 2):
            slot, n = extents[i], extents[i + 1]
            stretch[8 * slot : 8 * (slot + n)] = word * n
        return serial << PLACES | (count - 1)

    def moved(self, source: list[int], target: list[int]) -> None:
        """As `Recorder` has it."""
        stretch, place, token, link = self._stretch, self._place, self._token, self._link
        left = [*reversed(target)]
        for i in range(0, len(source), 2):
            slot, n = source[i], source[i + 1]
            while n:
                goal, length = left.pop(), left.pop()
                some = min(n, length)
                if some < length:
                    left += (length - some, goal + some)
                token[4 * goal : 4 * (goal + some)] = token[4 * slot : 4 * (slot + some)]
                link[goal : goal + some] = link[slot : slot + some]
                place[4 * goal : 4 * (goal + some)] = place[4 * slot : 4 * (slot + some)]
                stretch[8 * goal : 8 * (goal + some)] = stretch[8 * slot : 8 * (slot + some)]
                slot += some
                n -= some

    def owned(self, extents: list[int], mark: int) -> None:
        """As `Recorder` has it."""
        whose = self._whose
        for i in range(0, len(extents), 2):
            slot, length = extents[i], extents[i + 1]
            whose[slot : slot + length] = MARKED[mark] * length

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
        self._space_of[root] = ROOT | number
        self._cell_of[number] = index

    def closed(self, root: int) -> None:
        """As `Recorder` has it."""
        number = self._space_of.pop(root, 0) & ~ROOT
        if number:
            index = self._cell_of.pop(number)
            self.columns.spaces[SPACE_BYTES * index : SPACE_BYTES * index + 8] = bytes(8)
            self._cells.give(index)

    # -- sessions ----------------------------------------------------------------------------------------------

    def session_opened(self, session: Session) -> int:
        """Somebody is about to be given the pool: returns the mark of its slots, 0 where all marks are given.

        Raises LookupError where no more sessions can be told.
        """
        index = self._entries.take()
        mark = 0
        if session.mapped:
            with contextlib.suppress(LookupError):
                mark = self._mark_of[session.number] = self._marks.take()
        body = ENTRY.pack(
            session.number, session.boot, session.birth, session.group, session.pid, session.uid, session.gid,
            session.mapped, mark, session.secret, session.name.encode()[:24],
        )  # fmt: skip
        at = SESSION_BYTES * index
        table, words = self.columns.sessions, self.columns.words
        words[NUMBERS] = max(words[NUMBERS], session.number)
        words[SESSIONS_USED] = max(words[SESSIONS_USED], index + 1)
        table[at : at + 8] = bytes(8)
        table[at + 8 : at + len(body)] = body[8:]
        self._session_words[at // 8 + HOLDS] = HELD if session.holds else NOTHING
        table[at + SUM : at + SUM + 4] = crc32(body).to_bytes(4, "little")
        table[at : at + 8] = body[:8]
        self._entry_of[session.number] = index
        return mark

    def session_holds(self, number: int, holds: bool) -> None:
        """Whether a session may use slots from here on: to be said before it is told of any."""
        index = self._entry_of.get(number)
        if index is not None:
            self._session_words[SESSION_BYTES * index // 8 + HOLDS] = HELD if holds else NOTHING

    def session_over(self, number: int) -> None:
        """It uses nothing any more, whatever it still holds: to be said before it is told so."""
        index = self._entry_of.get(number)
        if index is not None:
            self._session_words[SESSION_BYTES * index // 8 + HOLDS] = OVER

    def session_closed(self, number: int) -> None:
        """It has ended, and all that it held is free."""
        index = self._entry_of.pop(number, None)
        if index is not None:
            self.entry_closed(index)
            mark = self._mark_of.pop(number, 0)
            if mark:
                self._marks.give(mark)

    def entry_closed(self, index: int) -> None:
        """Nothing stands here any more: it says so in two words, of which one may flip."""
        at = SESSION_BYTES * index // 8
        self._session_words[at + HOLDS] = OVER
        self._session_words[at] = 0
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
            self._space_of[roots[number]] = ROOT | number
        for number, index in found.entries.items():
            self._entries.use(index)
            self._entry_of[number] = index
        for index in found.torn:
            self._entries.use(index)
        for each in found.sessions:
            if each.mark:
                self._marks.use(each.mark)
                self._mark_of[each.number] = each.mark


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
