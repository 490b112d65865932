"""What a journal says, read after the process that wrote it has died at any moment.

    tokens     cached slots, by (stretch, place); of two for one place one counts, for both hold the same
    stretches  as far as their places are there without a gap from 0 on; in order of their serials, so parents first
    aside      slots neither free nor among those; by session where they are private to one that is still in the table
    torn       entries of that table that cannot be read: somebody may stand there who uses any of what is aside

Everything is done on whole columns by numpy.  What does not agree is dropped, and its slots are set aside.
"""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt

from kvslot.allocator import Space
from kvslot.allocator.restore import NO_SPACE, Slots, Stretches
from kvslot.allocator.slots import CACHED, FENCED, FREE, PRIVATE, QUARANTINED
from kvslot.daemon.journal.columns import (
    MARKS,
    PLACES,
    PRIORITY,
    ROOT,
    SERIAL_MOST,
    SESSION_BYTES,
    SPACE_BYTES,
    SPACES,
    SPACES_USED,
    Columns,
)
from kvslot.daemon.journal.writer import ENTRY, HOLDS, NOTHING, OVER, SUM, Session


class Found(NamedTuple):
    """All that a journal says."""

    free: npt.NDArray[np.bool_]
    stretches: Stretches
    spaces: dict[int, Space]  # by number
    cells: dict[int, int]  # ... where they stand
    sessions: list[Session]
    entries: dict[int, int]  # number -> where it stands
    torn: list[int]  # where entries stand that cannot be read
    private: dict[int, Slots]  # session -> slots that only it may use
    cached: int  # slots that were cached, of which `stretches` may have fewer


def read(columns: Columns, unit: int) -> Found:
    """Reads all; changes nothing."""
    sessions, entries, torn = _sessions(columns)
    spaces, cells = _spaces(columns)
    state = np.frombuffer(columns.state, np.uint8)
    stretches, cached = _stretches(columns, state, unit, spaces)
    # What a move has left is read by others than those whose it was, and is nobody's in particular.
    theirs = (state == PRIVATE) | (state == FENCED) | (state == QUARANTINED)
    aside = np.flatnonzero(theirs).astype(np.int32)
    marks = np.frombuffer(columns.whose, np.uint8)[aside]
    order = np.argsort(marks, kind="stable")
    bounds = np.searchsorted(marks[order], np.arange(MARKS + 1))
    private: dict[int, Slots] = {}
    for each in sessions:
        start, end = bounds[each.mark], bounds[each.mark + 1]
        if each.mark and start < end:
            private[each.number] = aside[order[start:end]]
    return Found(state == FREE, stretches, spaces, cells, sessions, entries, torn, private, cached)


def numbers(columns: Columns) -> set[int]:
    """Sessions that have an entry."""
    return set(_sessions(columns)[1])


def _sessions(columns: Columns) -> tuple[list[Session], dict[int, int], list[int]]:
    """All of the table is looked at, whatever the head says of how much is used."""
    words = np.frombuffer(columns.sessions, np.uint64).reshape(-1, SESSION_BYTES // 8)
    over = (words[:, 0] == 0) & (words[:, HOLDS] == np.uint64(OVER))
    sessions: list[Session] = []
    entries: dict[int, int] = {}
    torn: list[int] = []
    for index in np.flatnonzero(words.any(axis=1) & ~over).tolist():
        entry = bytes(columns.sessions[SESSION_BYTES * index : SESSION_BYTES * (index + 1)])
        body = entry[: ENTRY.size]
        number, boot, birth, group, pid, uid, gid, maps, mark, secret, name = ENTRY.unpack(body)
        if (
            not number
            or crc32(body) != int.from_bytes(entry[SUM : SUM + 4], "little")
            or number in entries
            or mark >= MARKS
        ):
            torn.append(index)
            continue
        entries[number] = index
        holds = int.from_bytes(entry[8 * HOLDS : 8 * HOLDS + 8], "little")
        sessions.append(
            Session(
                number=number, boot=boot, pid=pid, uid=uid, gid=gid, birth=birth, secret=secret,
                name=name.rstrip(b"\0").decode(errors="ignore"), group=group, mapped=bool(maps), mark=mark,
                holds=holds not in (NOTHING, OVER), over=holds == OVER,
            )
        )  # fmt: skip
    sessions.sort(key=lambda each: each.number)
    return sessions, entries, torn


def _spaces(columns: Columns) -> tuple[dict[int, Space], dict[int, int]]:
    words = np.frombuffer(columns.spaces, np.uint64)
    spaces: dict[int, Space] = {}
    cells: dict[int, int] = {}
    known: set[Space] = set()
    for index in range(min(columns.words[SPACES_USED], SPACES)):
        number = int(words[SPACE_BYTES // 8 * index])
        if not number:
            continue
        at = SPACE_BYTES * index
        length = int.from_bytes(columns.spaces[at + 8 : at + 12], "little")
        body = bytes(columns.spaces[at + 16 : at + 16 + length]) if length <= SPACE_BYTES - 16 else b""
        if crc32(body, number & 0xFFFFFFFF) != int.from_bytes(columns.spaces[at + 12 : at + 16], "little"):
            continue
        try:
            space = Space(*msgspec.msgpack.decode(body, type=tuple[str, str, str, str]))
        except msgspec.DecodeError:
            continue
        if number in spaces or space in known:
            continue
        known.add(space)
        spaces[number] = space
        cells[number] = index
    return spaces, cells


def _stretches(
    columns: Columns,
    state: npt.NDArray[np.uint8],
    unit: int,
    spaces: dict[int, Space],
) -> tuple[Stretches, int]:
    stretch, place = np.frombuffer(columns.stretch, np.uint64), np.frombuffer(columns.place, np.uint32)
    link = np.frombuffer(columns.link, np.uint64)
    slots = np.flatnonzero(state == CACHED)
    cached = len(slots)
    serials = stretch[slots]
    slots = slots[(serials > 0) & (serials <= SERIAL_MOST)]
    # In order of stretch and place; what is there twice counts once.
    words, index = np.unique(stretch[slots] << np.uint64(PLACES) | place[slots], return_index=True)
    slots = slots[index]
    serials, places = words >> np.uint64(PLACES), (words & np.uint64((1 << PLACES) - 1)).astype(np.int64)
    # Places rise within a stretch, so the first that is not where it would be without a gap ends it.
    begins = np.flatnonzero(np.diff(serials, prepend=np.uint64(0)))
    counts = np.diff(begins, append=len(words))
    whole = places == np.arange(len(words)) - np.repeat(begins, counts)
    if unit > 1:  # and of the rest only whole units
        lengths = np.add.reduceat(whole, begins, dtype=np.int64) if len(begins) else counts
        whole &= places < np.repeat(lengths - lengths % unit, counts)
    words, slots, serials, places = words[whole], slots[whole], serials[whole], places[whole]
    first = np.flatnonzero(places == 0)
    links = link[slots[first]]
    root = links >= np.uint64(ROOT)
    targets = links & np.uint64((1 << PRIORITY) - 1)
    priority = (links >> np.uint64(PRIORITY)) & np.uint64(7)
    # What it follows is a token that is there, of a stretch before it.
    parent = np.searchsorted(words, targets)
    there = (parent < first) & (words[np.minimum(parent, max(0, len(words) - 1))] == targets)
    numbers = targets.astype(np.int64)
    known = np.isin(numbers, np.fromiter(spaces, np.int64, len(spaces)))
    return Stretches(
        first=np.append(first, len(words)).astype(np.int64),
        parent=np.where(~root & there, parent, -1).astype(np.int64),
        space=np.where(root & known, numbers, NO_SPACE).astype(np.int64),
        priority=priority.astype(np.int64),
        slots=slots.astype(np.int32),
        tokens=np.frombuffer(columns.token, "<i4")[slots],
    ), cached
