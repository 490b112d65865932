"""A pool made from what a journal says, and the journal made to say what has come of it.

    read ──► who of then is proven gone? ──► restore ──► columns as the pool is now ──► the writer goes on

What the columns said stays true until they say something else, store by store, so that dying in between costs nothing
but time: slots turn to quarantined, those that are nobody's in particular after that has been said of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from kvslot.allocator import Pool
from kvslot.allocator import Session as Core
from kvslot.allocator.restore import Restored, restore
from kvslot.allocator.slots import CACHED, FREE, PADDING, QUARANTINED
from kvslot.daemon.journal.columns import LIVES, Columns
from kvslot.daemon.journal.reader import Found, read
from kvslot.daemon.journal.writer import Session, Writer

HANDLE_BITS: Final = 42
"""Of handles given out in one life; so many lives that there are until 2^63."""


class Takeover(NamedTuple):
    """What was taken over; sessions that have ended are swept by the next calls of the core's `sweep`."""

    writer: Writer
    restored: Restored
    found: Found
    everybody: Core | None
    """Holds what is cached until all of then are gone; None: they are."""
    doubtful: bool
    """Somebody may live who is none of `found.sessions`, and is one of then all the same."""
    living: list[Session]
    """Sessions of then whose processes may live."""
    gone: list[Session]


def take_over(
    columns: Columns,
    pool: Pool,
    lives: Callable[[Session], bool],
    others: Callable[[Found], bool] = lambda _: False,
    progress: Callable[[int, int], None] | None = None,
) -> Takeover:
    """Fills a new pool with what its journal says, and has the journal go on.

    `lives`: whether a session's process may still be there; False is proof that it is not.  `others`: whether a process
    may be whose session has no entry: asked only where there are some that cannot be read.  It may use whatever is set
    aside, and be of anybody's engine, so that all of it waits for everybody then.
    """
    found = read(columns, pool.unit)
    doubtful = bool(found.torn) and others(found)
    if doubtful:
        found = found._replace(private={})
    living = [each for each in found.sessions if not each.over and lives(each)]
    alive = {each.number for each in living}
    known = {each.number: each for each in found.sessions}
    groups: dict[int, list[int]] = {}
    for each in found.sessions:
        groups.setdefault(each.group or each.number, []).append(each.number)
    holders = {}
    for members in groups.values():
        used = {number: found.private.get(number) for number in members}
        held = doubtful or any(known[number].holds or used[number] is not None for number in members)
        for number, slots in used.items():
            if slots is not None or (held and alive.intersection(members)):
                holders[number] = slots if slots is not None else np.zeros(0, np.int32)
    engines = [
        [each for each in members if each in holders] for members in groups.values() if len(members) > 1
    ]
    restored = restore(pool, found.free, found.stretches, found.spaces, holders, engines, progress)
    for number, session in restored.sessions.items():
        if number not in alive:
            pool.gone(session)  # where others of its engine live its slots wait for them
    everybody = restored.everybody
    doubtful = doubtful and everybody is not None
    if everybody is not None and not doubtful and not alive.intersection(holders):
        pool.gone(everybody)
        everybody = None
    _settle(columns, pool, found, restored)
    # Handles of an earlier life (pins, tickets) are none of this one's.
    columns.words[LIVES] = lives_before = columns.words[LIVES] + 1
    pool.serial += lives_before << HANDLE_BITS
    writer = Writer(columns, pool.padding, pool.ledger, new=False)
    writer.go_on(found, restored.roots)
    writer.follow()
    gone = [each for each in found.sessions if each not in living]
    if not doubtful:
        for index in found.torn:
            writer.entry_closed(index)
    return Takeover(writer, restored, found, everybody, doubtful, living, gone)


def _settle(columns: Columns, pool: Pool, found: Found, restored: Restored) -> None:
    """The columns say what the pool is now."""
    whose = np.frombuffer(columns.whose, np.uint8)
    state = np.frombuffer(columns.state, np.uint8)
    whose[restored.left] = 0
    new = np.full(pool.slots, QUARANTINED, np.uint8)
    new[found.free] = FREE
    new[restored.cached] = CACHED
    new[: pool.padding] = PADDING
    state[:] = new


__all__ = ["Core", "Takeover", "take_over"]
