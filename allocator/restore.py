"""A pool taken over from an earlier life: what was cached is cached again, what somebody may still use is set aside.

Whoever kept a journal hands over, in its words, what it found there:

    codes        of every slot: 0 may be handed out · CACHED where `at` names a token · anything else: set aside
    stretches    what was published at a time, as columns over all their tokens, parents before children
    holders      who of then may still read or write slots: those set aside by holder, 0 for nobody in particular

                 stretch 0              stretch 1       behind token 2 of stretch 0
    tokens       a  b  c  d  e          x  y
    slots        7  8  9 30 31         12 13
    nodes        [a  b  c][d  e]       [x  y]           cut where another stretch begins

What is set aside belongs to sessions that are lost: released like those of this life, when their processes are proven
gone, or by their own word.  What is cached is held by one session that stands for all of them (`everybody`), so that
no node is evicted, moved or reused before the last has gone.  Nothing is restored that is not wholly said: where a
token is missing its stretch ends, and all that stood behind it is set aside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvslot.allocator.accounts import Account
from kvslot.allocator.errors import OutOfTurn
from kvslot.allocator.pool import Pool
from kvslot.allocator.results import Space
from kvslot.allocator.runs import FreeRuns
from kvslot.allocator.sessions import NO_STEP, Fenced, Group, Life, Range, Session
from kvslot.allocator.slots import CACHED, FENCED, FREE, PADDING, QUARANTINED

Slots = npt.NDArray[np.int32]

PIECES = 64  # extents of one range that is set aside: what is released in one go

NO_SPACE = -1

TOLD_EACH = 8192  # nodes, some fifty milliseconds


class Stretches(NamedTuple):
    """What was published, one row a stretch, parents before their children; tokens in order behind one another."""

    first: npt.NDArray[
        np.int64
    ]  # by stretch: its first token's place in the columns below; one more, for the end
    parent: npt.NDArray[
        np.int64
    ]  # by stretch: the place of the token that it follows, or -1: it begins a namespace
    space: npt.NDArray[np.int64]  # by stretch: the number of that namespace, NO_SPACE where it has a parent
    priority: npt.NDArray[np.int64]  # by stretch
    slots: Slots  # by token
    tokens: npt.NDArray[np.int32]


class Restored(NamedTuple):
    """What came of it."""

    roots: dict[int, int]  # number of a namespace -> its root
    sessions: dict[int, Session]
    """By holder."""
    everybody: Session | None
    """Holds what is cached, and what nobody in particular may use."""
    nodes: int
    tokens: int  # cached again
    aside: int  # slots
    left: Slots  # of those that nobody in particular may use
    cached: npt.NDArray[np.bool_]  # by slot


def restore(
    pool: Pool,
    free: npt.NDArray[np.bool_],
    stretches: Stretches,
    spaces: Mapping[int, Space],
    holders: Mapping[int, Slots],
    groups: list[list[int]],
    progress: Callable[[int, int], None] | None = None,
) -> Restored:
    """Fills a new pool; the ledger's journal and recorder are not told, and are to be hooked in afterwards.

    `free`: slots that may be handed out.  `holders`: who may still use slots, with those that only they may; what
    else is neither free nor cached is set aside for all of them together.  `groups`: holders of one engine each, whose
    slots come back when all of them are gone.  Who of all these is gone already is for the caller to say (`gone`), and
    `sweep` then gives back what they had, as it does with that of others.  `progress` is told of nodes made, of all,
    now and then.
    """
    if pool.sessions or pool.roots or pool.tree.nodes:
        raise OutOfTurn("only a new pool can be filled with what an earlier one held")
    assert pool.ledger.journal is None
    assert pool.ledger.recorder is None
    roots = {number: pool.open_space(space) for number, space in spaces.items()}
    leaves, cached = _plant(pool, stretches, roots, progress)
    aside = ~free & ~cached
    aside[: pool.padding] = False
    counts = pool.ledger.counts
    counts[FREE] = int(np.count_nonzero(free[pool.padding :]))
    counts[CACHED] = int(np.count_nonzero(cached))
    counts[QUARANTINED] = int(np.count_nonzero(aside))
    assert sum(counts) == pool.slots
    assert counts[PADDING] == pool.padding
    free = free.copy()
    free[: pool.padding] = False
    _clear(pool, free)
    account = Account("")  # of no tenant of this life, and so bounded by none
    sessions: dict[int, Session] = {}
    for number, slots in holders.items():
        slots = slots[aside[slots]]
        aside[slots] = False
        sessions[number] = _lost(pool, account, slots)
    for members in groups:
        group = Group()
        for number in members:
            sessions[number].group = group
            group.members.append(sessions[number])
    left = np.flatnonzero(aside).astype(np.int32)
    everybody = None
    if leaves or len(left):
        everybody = _lost(pool, account, left)
        everybody.kept = leaves
        leaves.reverse()  # they are released from the end: what was published first is the oldest
    return Restored(
        roots,
        sessions,
        everybody,
        pool.tree.nodes - len(roots),
        counts[CACHED],
        counts[QUARANTINED],
        left,
        cached,
    )


def _plant(
    pool: Pool,
    stretches: Stretches,
    roots: Mapping[int, int],
    progress: Callable[[int, int], None] | None,
) -> tuple[list[int], npt.NDArray[np.bool_]]:
    """Makes the nodes, each held once if it is a leaf; returns those, and which slots are cached."""
    tree, unit = pool.tree, pool.unit
    first, parent = stretches.first, stretches.parent
    total = int(first[-1])
    cached = np.zeros(pool.slots, np.bool_)
    if not total:
        return [], cached
    slots = stretches.slots
    # Nodes begin where stretches do, and behind tokens that others follow; pieces where slots do not go on, too.
    begins = np.zeros(total + 1, np.bool_)
    begins[first] = True
    begins[parent[parent >= 0] + 1] = True
    breaks = begins.copy()
    breaks[1:total] |= slots[1:] != slots[:-1] + 1
    starts = np.flatnonzero(begins)
    pieces = np.flatnonzero(breaks)
    piece_of = np.searchsorted(pieces, starts).tolist()
    lengths = np.diff(pieces)
    flat = np.empty(2 * len(lengths), np.int64)
    flat[::2] = slots[pieces[:-1]]
    flat[1::2] = lengths
    extents = flat.tolist()
    tokens = stretches.tokens.astype("<i4", copy=False).tobytes()
    row_of = dict(zip(first.tolist(), range(len(first) - 1), strict=False))
    parents, spaces = parent.tolist(), stretches.space.tolist()
    priorities = stretches.priority.tolist()
    planted: dict[int, int] = {}  # place of a node's last token -> node
    learns = tree.learns
    inner: set[int] = set()
    places = starts.tolist()
    kept: list[int] = []  # places of nodes that were planted
    node = priority = 0
    for index in range(len(places) - 1):
        if progress is not None and not index % TOLD_EACH:
            progress(index, len(places) - 1)
        at, end = places[index], places[index + 1]
        row = row_of.get(at)
        if row is not None:
            priority = priorities[row]
            before = parents[row]
            above = roots.get(spaces[row], 0) if before < 0 else planted.get(before, 0)
        else:
            above = node
        node = 0
        key = tokens[4 * at : 4 * end]
        if not above or (end - at) % unit or tree.child(above, key, 0):
            continue  # what it follows is not there, or something else is in its place
        pool.tick += 1
        node = tree.add(above, key, extents[2 * piece_of[index] : 2 * piece_of[index + 1]], pool.tick)
        if learns:
            tree.evictor.created(node, above, 0, False)
        if priority:
            pool._prioritise(node, priority, 0.0)
        planted[end - 1] = node
        inner.add(above)
        kept.append(index)
    leaves: list[int] = []
    for each in planted.values():
        if each in inner:
            tree.holds[each] -= 1  # its children hold it
        else:
            leaves.append(each)
    whole = np.zeros(total, np.bool_)
    if kept:
        chosen = np.zeros(len(places) - 1, np.bool_)
        chosen[kept] = True
        whole = np.repeat(chosen, np.diff(starts))
    cached[slots[whole]] = True
    return leaves, cached


def _clear(pool: Pool, free: npt.NDArray[np.bool_]) -> None:
    """The free runs are those of `free`."""
    runs = FreeRuns(pool.config.blocks, pool.block_size, pool.padding, pool.cell)
    runs.take_within(pool.padding, pool.padding, pool.usable)
    for slot, length in _runs(np.flatnonzero(free)):
        runs.give(slot, length)
    pool.runs = runs


def _lost(pool: Pool, account: Account, slots: Slots) -> Session:
    """A session of then, which has lost its connection, with slots set aside for it."""
    session = pool.open_session()
    session.life = Life.LOST
    flat: list[int] = []
    for slot, length in _runs(slots):
        flat += (slot, length)
    for i in range(0, len(flat), 2 * PIECES):
        extents = flat[i : i + 2 * PIECES]
        piece = Range(0, extents, sum(extents[1::2]))
        session.fence(NO_STEP, Fenced([piece], 0, account))
        for owner in (session, account):
            owner.charged += piece.length
            owner.fenced += piece.length
        session.swept[id(piece)] = (piece, FENCED)
        session.swept_fenced += piece.length
    return session


def _runs(slots: npt.NDArray[np.integer]) -> list[tuple[int, int]]:
    """Stretches (slot, length) of ascending slots."""
    if not len(slots):
        return []
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [len(slots)]))
    return list(zip(slots[starts].tolist(), (ends - starts).tolist(), strict=True))
