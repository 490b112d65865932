"""What the daemon shows of itself: rows of plain values, page by page.

    rows(kind, view, cursor, limit, pool="") -> (rows, cursor of the next page, 0 after the last)

Pure functions over a `View`, which the server is.  They run on its event loop, between two clients' verbs, so a page is
bounded in work: at most `limit` owners of slots, nodes or rows, well below a millisecond each, whatever the pool's
size.  A listing of many pages is therefore a picture taken over some time: what changes meanwhile may be missing or be
listed in both its places.  Cursors only ever rise, so every listing ends.

    one row each    status · process · pools · sessions · tenants · namespaces · tickets · pins · frag · defrag ·
                    lengths · latency · steps · totals · config · settings
    columns         tree    a row is a stretch of nodes: {"node": [...], "parent": [...], ...}, all of one length
                    map     a row is a state: {"state": "cached", "extents": [slot, length, slot, length, ...]}

`tree` and `map` can have a row for every few tokens of the pool; as columns they cost a tenth in time and bytes.  `map`
goes by owners (nodes, sequences, fences), since nothing in the core is ordered by address: slots that no page names are
free.  Tokens and salts are never shown, by any kind.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from kvslot.allocator import Life, Session
from kvslot.allocator import Pool as Core
from kvslot.allocator.extents import split_extents
from kvslot.allocator.runs import EXACT
from kvslot.api.wire import BadRequest, NotFound
from kvslot.api.wire.messages import Compaction
from kvslot.api.wire.messages import Pool as Description
from kvslot.daemon.config import CHANGEABLE, SETTINGS
from kvslot.daemon.keeper import Keeper
from kvslot.daemon.lengths import Lengths

Row = dict[str, Any]
Page = tuple[list[Row], int]

ROWS: Final = 256  # of a page, unless the caller wants fewer: about half a millisecond
OWNERS: Final = 2048  # nodes of a page of `tree` and `map`, whose columns are cut out as they are
NUMBERS: Final = 16384  # of nodes that such a page looks through: up to 16 in 16 are not in use
SEQUENCES: Final = 128  # of a page of `map`: each may lie in many extents
EXTENTS: Final = 4096  # after which a page of `map` ends
BEYOND: Final = 1 << 60  # above every cursor, and what a C integer holds
RUN_BLOCKS: Final = tuple(1 << n for n in range(11))  # lengths of the usable-run index: 1..1024 blocks
LENGTHS: Final = 2  # pools of a page of `lengths`: a fifth of a millisecond each
LONG_RUNS: Final = 256  # of one class looked at one by one; there are few beyond 512 cells

MAP_STATES: Final = (
    "free", "cached", "leased", "private", "room", "fenced", "moving", "reserved", "quarantined", "padding",
)  # fmt: skip
"""What a map tells apart: the core's states, cached ones that somebody reads, and private ones not written yet."""


# -- what is looked at ------------------------------------------------------------------------------------------------


class PeerView(Protocol):
    """The process at the other end, by the kernel's word."""

    @property
    def pid(self) -> int: ...
    @property
    def uid(self) -> int: ...


class PoolView(Protocol):
    """A pool: its core, and how it was described to clients."""

    @property
    def name(self) -> str: ...
    @property
    def core(self) -> Core: ...
    @property
    def description(self) -> Description: ...
    @property
    def settings(self) -> msgspec.Struct: ...  # as configured
    @property
    def members(self) -> Mapping[int, MemberView]: ...  # by their handles in the core
    @property
    def keeper(self) -> Keeper: ...  # operators' pins
    @property
    def lengths(self) -> Lengths: ...  # of the sequences that ended


class MemberView(Protocol):
    """A session as the server knows it; what the core knows of it is asked there."""

    @property
    def number(self) -> int: ...  # as clients and the log know it; in the whole daemon one session has it
    @property
    def session(self) -> Session: ...
    @property
    def hosted(self) -> PoolView: ...
    @property
    def name(self) -> str: ...  # of the client, for people
    @property
    def peer(self) -> PeerView: ...
    @property
    def since(self) -> float: ...  # of its Hello, on the clock of `View.now`
    @property
    def state(self) -> str: ...  # "live", "lost" or "ending"
    @property
    def lost_at(self) -> float: ...  # when its connection was lost, if it was
    @property
    def progressed(self) -> float: ...  # when a step last completed, or there was none to complete
    @property
    def outbox(self) -> int: ...  # bytes of replies it has not read
    @property
    def frames(self) -> int: ...  # received
    @property
    def posted_errors(self) -> int: ...  # of what it asked no reply to: how much was refused


class View(Protocol):
    """The daemon."""

    @property
    def version(self) -> str: ...
    @property
    def boot(self) -> int: ...
    @property
    def started(self) -> float: ...  # on the clock of `now`
    @property
    def now(self) -> float: ...  # seconds
    @property
    def drain_left(
        self,
    ) -> float | None: ...  # seconds until a drain ends whatever still runs; None: no drain
    @property
    def settings(self) -> msgspec.Struct: ...
    @property
    def pools(self) -> Mapping[str, PoolView]: ...
    @property
    def members(self) -> Iterable[MemberView]: ...
    @property
    def compaction(self) -> Mapping[str, Compaction]: ...  # by pool
    @property
    def recordings(self) -> Sequence[Mapping[str, Any]]: ...  # in progress
    @property
    def latency(self) -> Mapping[str, Mapping[str, Any]]: ...  # by verb: plain counters
    @property
    def process(self) -> Mapping[str, Any]: ...  # the daemon's own: limits, descriptors, memory, connections
    @property
    def totals(self) -> Mapping[str, Any]: ...  # counts since the process began
    @property
    def steps(self) -> Sequence[Mapping[str, Any]]: ...  # by verb and step of the data path: a histogram each
    @property
    def tenants(self) -> Sequence[Mapping[str, Any]]: ...  # of each pool: what they hold, and their quotas


# -- the one entry ----------------------------------------------------------------------------------------------------


def rows(kind: str, view: View, cursor: int = 0, limit: int = 0, *, pool: str = "") -> Page:
    """A page of `kind`, and the cursor of the next one (0: that was the last).

    `limit` bounds the rows (`tree`, `map`: the nodes) of the page; 0: as many as are quick.  `pool` names one; "" is
    all of them for pools, sessions, frag, defrag and config, and the first for namespaces, tickets, tree and map.
    Raises NotFound for a kind or pool that there is not, BadRequest for a negative cursor.
    """
    if not 0 <= cursor < BEYOND or limit < 0:
        raise BadRequest(
            f"cursor {cursor}, limit {limit}: no page ends with such a cursor, or asks for so many"
        )
    if kind in _PAGED:
        return _PAGED[kind](_pool(view, pool), cursor, limit)
    try:
        listing = _WHOLE[kind]
    except KeyError:
        raise NotFound(f"nothing to inspect is called {kind!r}; there are {', '.join(KINDS)}") from None
    if pool:
        _pool(view, pool)
    return listing(view, cursor, min(limit or ROWS, ROWS), pool)


def _pool(view: View, name: str) -> PoolView:
    if not name:
        return next(iter(view.pools.values()))
    try:
        return view.pools[name]
    except KeyError:
        raise NotFound(f"no pool {name!r}; there are {', '.join(view.pools)}") from None


def _pools(view: View, name: str) -> list[PoolView]:
    return [_pool(view, name)] if name else list(view.pools.values())


def _cut(found: Sequence[Row], cursor: int, limit: int) -> Page:
    """A page of a listing that is short and made whole each time."""
    stop = cursor + limit
    return list(found[cursor:stop]), stop if stop < len(found) else 0


# -- one row each -----------------------------------------------------------------------------------------------------


def _status(view: View, cursor: int, limit: int, pool: str) -> Page:
    states = [member.state for member in view.members]
    row = {
        "version": view.version,
        "boot": view.boot,
        "uptime_s": max(0.0, view.now - view.started),
        "state": "running" if view.drain_left is None else "draining",
        "drain_left_s": view.drain_left,
        "socket": str(getattr(view.settings, "socket", "")),
        "pools": len(view.pools),
        "sessions": len(states),
        "sessions_lost": states.count("lost"),
        "sequences": sum(len(each.core.sequences) for each in view.pools.values()),
        "size_bytes": sum(each.description.size_bytes for each in view.pools.values()),
        "recordings": list(view.recordings),
    }
    return [row], 0


def _pool_rows(view: View, cursor: int, limit: int, pool: str) -> Page:
    found = _pools(view, pool)
    page = [_pool_row(each) for each in found[cursor : cursor + limit]]
    return page, cursor + limit if cursor + limit < len(found) else 0


def _pool_row(view: PoolView) -> Row:
    core, told = view.core, view.description
    row: Row = {
        "pool": view.name,
        "granularity": told.granularity,
        "block_size": told.block_size,
        "quantum": core.quantum,
        "watermark": core.watermark,
        "eviction": core.config.eviction,
        "append": core.config.append,
        "size_bytes": told.size_bytes,
        "slot_bytes": told.size_bytes // core.slots,
        "planes": len(told.planes),
        "kind": told.kind,
        "fingerprint": told.fingerprint,
        "generation": told.generation,
        "namespaces": len(core.roots),
    }
    row.update(msgspec.structs.asdict(core.statistics()))
    row["internal_fragmentation_pct"] = 100 * row.pop("internal_fragmentation")
    return row


def _sessions(view: View, cursor: int, limit: int, pool: str) -> Page:
    """By number, so that a session that ends between two pages hides no other."""
    found = sorted(
        (each for each in view.members if each.number > cursor and (not pool or each.hosted.name == pool)),
        key=attrgetter("number"),
    )
    page = found[:limit]
    return [_session(view, each) for each in page], page[-1].number if len(found) > limit else 0


def _session(view: View, member: MemberView) -> Row:
    session = member.session
    return {
        "session": member.number,
        "name": member.name,
        "pid": member.peer.pid,
        "uid": member.peer.uid,
        "pool": member.hosted.name,
        "state": member.state,
        "stalled": session.stalled,
        "age_s": max(0.0, view.now - member.since),
        "page": session.page,
        "sequences": len(session.sequences),
        "charged": session.charged,
        "quota": min(session.quota, member.hosted.core.usable),
        "fenced": session.fenced,
        "pins": len(session.pins),
        "submitted": session.submitted,
        "completed": session.completed,
        "behind_s": max(0.0, view.now - member.progressed) if session.completed < session.submitted else 0.0,
        # One of a boot before this one is lost from this one's start on.
        "lost_s": max(0.0, view.now - (member.lost_at or member.since)) if member.state != "live" else 0.0,
        "owes": len(session.owes),
        "group": len(session.group.members) if session.group else 1,
        "movable": session.movable,
        "follows": member.hosted.core.moves.follows(session),
        "retired_tokens": session.retired_tokens,
        "outbox_bytes": member.outbox,
        "frames": member.frames,
        "posted_errors": member.posted_errors,
    }


def _frag(view: View, cursor: int, limit: int, pool: str) -> Page:
    found = _pools(view, pool)
    page = [_frag_row(each) for each in found[cursor : cursor + limit]]
    return page, cursor + limit if cursor + limit < len(found) else 0


def _frag_row(view: PoolView) -> Row:
    core = view.core
    told = core.statistics()
    runs = core.runs
    in_blocks = (told.blocks - told.padding // core.block_size - told.blocks_free) * core.block_size
    return {
        "pool": view.name,
        "block_size": core.block_size,
        "blocks": told.blocks,
        "blocks_free": told.blocks_free,
        "free": told.free,
        "internal_waste_pct": 100 * told.internal_fragmentation,
        "reserved_pct": 100 * told.unwritten / in_blocks if in_blocks else 0.0,
        "unwritten": told.unwritten,
        "duplicate_tokens": told.duplicate_tokens,
        "peeled_tokens": told.peeled_tokens,
        "pinned_waste_tokens": told.pinned_waste_tokens,
        "pinned_waste_pct": 100 * told.pinned_waste_tokens / core.usable,
        "free_runs": len(runs.length_at) + (len(runs.stock) >> 1),
        "hole_tokens": runs.hole_slots(),
        "largest_free_run": told.largest_free_run,
        "scatter_pct": 100 * (1 - told.largest_free_run / told.free) if told.free else 0.0,
        "extents_per_1k_tokens": 1000 * told.extents_given / told.extent_tokens
        if told.extent_tokens
        else 0.0,
        "usable_run_pct": usable_runs(core),
        "lost_hit_tokens": told.lost_hit_tokens,
    }


def _defrag(view: View, cursor: int, limit: int, pool: str) -> Page:
    told = view.compaction
    found = [told[each.name] for each in _pools(view, pool) if each.name in told]
    return _cut([msgspec.structs.asdict(each) for each in found], cursor, limit)


def usable_runs(core: Core) -> dict[str, float]:
    """For 1, 2, 4 ... 1024 blocks: the share (percent) of the free slots in runs that long or longer; O(size classes).

    A run counts with its whole cells, a hole (a run without one) with all its slots: what a request of that length
    could be given out of it.  100 where nothing is free.
    """
    runs = core.runs
    cell, holes = runs.cell, runs.holes
    sizes: list[tuple[int, int]] = []  # slots of a run, and how many runs have so many
    occupied = runs.occupied
    while occupied:
        index = (occupied & -occupied).bit_length() - 1
        occupied &= occupied - 1
        members = runs.classes[index]
        cells = index - holes
        if cells < 0:
            sizes.append((index, len(members)))
        elif cells < EXACT:
            sizes.append((cells * cell, len(members)))
        else:
            for start in islice(members, LONG_RUNS):
                end = start + runs.length_at[start]
                sizes.append((end // cell * cell - -(-start // cell) * cell, 1))
            if len(members) > LONG_RUNS:
                sizes.append((_least_cells(cells) * cell, len(members) - LONG_RUNS))
    sizes += [(slots, 1) for slots in runs.stock[1::2]]
    shares: dict[str, float] = {}
    for blocks in RUN_BLOCKS:
        least = blocks * core.block_size
        found = sum(slots * count for slots, count in sizes if slots >= least)
        shares[str(blocks)] = 100.0 if not runs.total else 100 * found / runs.total
    return shares


def _least_cells(size_class: int) -> int:
    """The fewest cells of a run in a class that is not exact; see `runs.size_class`."""
    sixteenths = size_class - EXACT
    return (16 + (sixteenths & 15)) << ((sixteenths >> 4) + 5)


def _latency(view: View, cursor: int, limit: int, pool: str) -> Page:
    return _cut([{"verb": verb, **counters} for verb, counters in view.latency.items()], cursor, limit)


def _totals(view: View, cursor: int, limit: int, pool: str) -> Page:
    return [dict(view.totals)], 0


def _steps(view: View, cursor: int, limit: int, pool: str) -> Page:
    return _cut([dict(each) for each in view.steps], cursor, limit)


def _tenants(view: View, cursor: int, limit: int, pool: str) -> Page:
    return _cut([dict(each) for each in view.tenants if pool in ("", each["pool"])], cursor, limit)


def _process(view: View, cursor: int, limit: int, pool: str) -> Page:
    return [dict(view.process)], 0


def _lengths(view: View, cursor: int, limit: int, pool: str) -> Page:
    found = _pools(view, pool)[cursor:]
    page = [{"pool": each.name, **each.lengths.row(each.core.block_size)} for each in found[:LENGTHS]]
    return page, cursor + LENGTHS if len(found) > LENGTHS else 0


def _settings(view: View, cursor: int, limit: int, pool: str) -> Page:
    found = []
    for name, value in _plain(view.settings).items():
        rule = SETTINGS.get(name)
        if rule is not None:  # `pools` has none, and is `config`
            found.append(
                {
                    "name": name,
                    "value": value,
                    "changeable": name in CHANGEABLE,
                    "allowed": rule.allowed(),
                    "meaning": rule.text,
                }
            )
    return _cut(found, cursor, limit)


def _config(view: View, cursor: int, limit: int, pool: str) -> Page:
    """What was configured for each pool, and what the core made of it."""
    found = [
        {"pool": each.name, "settings": _plain(each.settings), "core": _plain(each.core.config)}
        for each in _pools(view, pool)[cursor : cursor + limit + 1]
    ]
    return found[:limit], cursor + limit if len(found) > limit else 0


def _plain(settings: msgspec.Struct) -> Row:
    plain: Row = msgspec.to_builtins(settings, enc_hook=str)
    return plain


# -- of one pool ------------------------------------------------------------------------------------------------------


def _namespaces(view: PoolView, cursor: int, limit: int) -> Page:
    core = view.core
    limit = min(limit or ROWS, ROWS)
    tree = core.tree
    page: list[Row] = [
        {
            "namespace": root,
            "tenant": space.tenant,
            "model": space.model,
            "adapter": space.adapter,
            "salted": bool(space.salt),
            "in_use": tree.holds[root] > 1,
            "empty": not tree.kid[root],
        }
        for root, space in islice(core.roots.items(), cursor, cursor + limit)
    ]
    return page, cursor + limit if cursor + limit < len(core.roots) else 0


def _tickets(view: PoolView, cursor: int, limit: int) -> Page:
    """Who waits: growth, then new requests, then those that wait for a commit; each oldest first."""
    core = view.core
    limit = min(limit or ROWS, ROWS)
    queue = core.admission
    waiting = len(queue.growth) + len(queue.waiting) + len(queue.awaiting)
    page: list[Row] = [
        {
            "ticket": ticket.handle,
            "session": view.members[ticket.session.handle].number
            if ticket.session.handle in view.members
            else 0,
            "needed": ticket.need,
            "age_s": max(0.0, core.now - ticket.created),
            "growth": ticket.sequence is not None,
            "contiguous": ticket.contiguous,
            "ready": ticket.ready >= 0,
            "awaits_commit": bool(ticket.awaits),
        }
        for ticket in islice(
            chain(queue.growth.values(), queue.waiting.values(), queue.awaiting.values()),
            cursor,
            cursor + limit,
        )
    ]
    return page, cursor + limit if cursor + limit < waiting else 0


def _pins(view: PoolView, cursor: int, limit: int) -> Page:
    """Of operators; a session's are counted with it."""
    limit = min(limit or ROWS, ROWS)
    handles = list(view.keeper.pins)  # which only rise
    first = bisect_right(handles, cursor)
    page: list[Row] = [
        {
            "pin": kept.pin,
            "namespace": kept.namespace,
            "tokens": kept.tokens,
            "age_s": max(0.0, view.core.now - kept.since),
            "by": kept.by,
        }
        for kept in (view.keeper.pins[each] for each in handles[first : first + limit])
    ]
    return page, handles[first + limit - 1] if first + limit < len(handles) else 0


def _live(core: Core, cursor: int, limit: int) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int, int]:
    """The nodes of a page that begins with number `cursor`, less the cursor; where it stops; and the next cursor."""
    tree = core.tree
    end = len(tree.keys)
    stop = min(cursor + NUMBERS, end)
    most = min(limit or OWNERS, OWNERS)
    (live,) = _column(tree.parent, cursor, stop).nonzero()  # roots have no parent, and no tokens
    if len(live) > most:
        live = live[:most]
        stop = cursor + int(live[-1]) + 1
    return live, stop, stop if stop < end else 0


def _tree(view: PoolView, cursor: int, limit: int) -> Page:
    """Nodes by number; the cursor is the next one to look at."""
    core = view.core
    tree = core.tree
    live, stop, following = _live(core, cursor, limit)
    length = _column(tree.length, cursor, stop)[live]
    slot = _column(tree.slot, cursor, stop)[live]
    extents = 1 + (_column(tree.head, cursor, stop)[live] != length)
    nodes = live + cursor
    for at in (slot < 0).nonzero()[0].tolist():
        extents[at] = len(tree.scattered[int(nodes[at])]) >> 1
    page: list[Row] = []
    if len(live):
        page.append(
            {
                "node": nodes.tolist(),
                "parent": _column(tree.parent, cursor, stop)[live].tolist(),
                "depth": _column(tree.depth, cursor, stop)[live].tolist(),
                "tokens": length.tolist(),
                "extents": extents.tolist(),
                "holds": _column(tree.holds, cursor, stop)[live].tolist(),
                "age": (
                    core.tick - np.frombuffer(tree.tick[cursor:stop], dtype=np.int64)[live]
                ).tolist(),  # verbs
                "priority": np.frombuffer(tree.priority[cursor:stop], dtype=np.int8)[live].tolist(),
            }
        )
    return page, following


def _column(column: Any, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """A copy of a stretch of a tree's column: the array itself could not grow while numpy looks at it."""
    return np.frombuffer(column[start:stop], dtype=np.int32)


# -- the map: by owners -----------------------------------------------------------------------------------------------
#
#     cursor = stage << 56 | place      stage 0  nodes        place: the next node's number
#                                             1  sequences    the last handle listed
#                                             2  fences       position of the session << 24 | of its fence
#                                             3  moves        padding, moves, old places: the last of those listed
#                                             4  the window   the next stretch
#                                             5  to be wiped  the next of those waiting

_STAGES: Final = 6
_STAGE_SHIFT: Final = 56
_FENCE_BITS: Final = 24


def _map(view: PoolView, cursor: int, limit: int) -> Page:
    core = view.core
    stage, place = cursor >> _STAGE_SHIFT, cursor & ((1 << _STAGE_SHIFT) - 1)
    if stage >= _STAGES:
        raise BadRequest(f"cursor {cursor} is none that a page of the map ended with")
    found: dict[str, list[int]] = {}
    listers = (_map_nodes, _map_sequences, _map_fences, _map_moves, _map_window, _map_dirt)
    place = listers[stage](core, place, limit, found)
    if place:
        cursor = stage << _STAGE_SHIFT | place
    else:
        cursor = stage + 1 << _STAGE_SHIFT if stage + 1 < _STAGES else 0
    return [{"state": state, "extents": extents} for state, extents in found.items() if extents], cursor


def _map_nodes(core: Core, place: int, limit: int, found: dict[str, list[int]]) -> int:
    tree = core.tree
    live, stop, following = _live(core, place, limit)
    length = _column(tree.length, place, stop)[live]
    slot = _column(tree.slot, place, stop)[live]
    head = _column(tree.head, place, stop)[live]
    tail = _column(tree.tail_slot, place, stop)[live]
    held = _column(tree.holds, place, stop)[live] > 0
    simple = slot >= 0
    for state, these in (("cached", ~held), ("leased", held)):
        first = these & simple
        second = first & (head != length)
        out: list[int] = np.stack((slot[first], head[first]), 1).ravel().tolist()
        out += np.stack((tail[second], (length - head)[second]), 1).ravel().tolist()
        for at in (these & ~simple).nonzero()[0].tolist():
            out += tree.scattered[place + int(live[at])]
        found[state] = out
    return following


def _map_sequences(core: Core, place: int, limit: int, found: dict[str, list[int]]) -> int:
    # Handles only rise, and a dict keeps the order of insertion: copying its keys takes nanoseconds each.
    handles = list(core.sequences)
    first = bisect_right(handles, place)
    private = found["private"] = []
    room = found["room"] = []
    quarantined = found["quarantined"] = []
    stop = first + min(limit or SEQUENCES, SEQUENCES)
    for handle in handles[first:stop]:
        sequence = core.sequences[handle]
        swept = sequence.session.swept if sequence.session.life else ()
        for piece in (*sequence.own, *(sequence.sources or ())):
            # What forks share is listed once.
            if piece.holders is not None and piece.holders[0] is not sequence:
                continue
            if swept and id(piece) in swept:
                quarantined += piece.extents
            elif piece.position + piece.length > sequence.length:
                written, rest = split_extents(piece.extents, max(0, sequence.length - piece.position))
                private += written
                room += rest
            else:
                private += piece.extents
        if len(private) + len(room) + len(quarantined) > 2 * EXTENTS:
            return handle if handle != handles[-1] else 0
    return handles[stop - 1] if stop < len(handles) else 0


def _map_fences(core: Core, place: int, limit: int, found: dict[str, list[int]]) -> int:
    sessions = list(core.sessions.values())
    fenced = found["fenced"] = []
    quarantined = found["quarantined"] = []
    at, index = place >> _FENCE_BITS, place & ((1 << _FENCE_BITS) - 1)
    left = min(limit or ROWS, ROWS)
    while at < len(sessions):
        session = sessions[at]
        for _, _, each in session.fences[index : index + left]:
            for piece in each.ranges:
                lost = session.life != Life.LIVE and id(piece) in session.swept
                (quarantined if lost else fenced).extend(piece.extents)
            index += 1
            left -= 1
            if len(fenced) + len(quarantined) > 2 * EXTENTS:
                left = 0
                break
        if not left:
            return at << _FENCE_BITS | index
        at, index = at + 1, 0
    return 0


def _map_moves(core: Core, place: int, limit: int, found: dict[str, list[int]]) -> int:
    moves = core.moves
    moving = found["moving"] = []
    if not place:
        found["padding"] = [0, core.padding]
        moving += [slot for move in moves.tickets.values() for slot in move.target]
    # Numbers only rise, as handles do.
    numbers = list(moves.retired)
    first = bisect_right(numbers, place)
    stop = first + min(limit or OWNERS, OWNERS)
    for number in numbers[first:stop]:
        moving += moves.retired[number].extents
        if len(moving) > 2 * EXTENTS:
            return number if number != numbers[-1] else 0
    return numbers[stop - 1] if stop < len(numbers) else 0


def _map_window(core: Core, place: int, limit: int, found: dict[str, list[int]]) -> int:
    window = core.admission.window
    if window is None:
        return 0
    stop = place + min(limit or OWNERS, OWNERS)
    found["reserved"] = [slot for stretch in window.stretches[place:stop] for slot in stretch]
    return stop if stop < len(window.stretches) else 0


def _map_dirt(core: Core, place: int, limit: int, found: dict[str, list[int]]) -> int:
    stop = place + min(limit or ROWS, ROWS)
    waiting = islice(chain(core.wiping.values(), core.dirt), place, stop)
    found["fenced"] = [slot for extents, _ in waiting for slot in extents]
    return stop if stop < len(core.wiping) + len(core.dirt) else 0


_WHOLE: Final[dict[str, Callable[[View, int, int, str], Page]]] = {
    "status": _status,
    "pools": _pool_rows,
    "sessions": _sessions,
    "frag": _frag,
    "defrag": _defrag,
    "lengths": _lengths,
    "latency": _latency,
    "process": _process,
    "totals": _totals,
    "steps": _steps,
    "tenants": _tenants,
    "settings": _settings,
    "config": _config,
}
_PAGED: Final[dict[str, Callable[[PoolView, int, int], Page]]] = {
    "namespaces": _namespaces,
    "tickets": _tickets,
    "pins": _pins,
    "tree": _tree,
    "map": _map,
}
KINDS: Final = (*_WHOLE, *_PAGED)
"""All there is to inspect."""
