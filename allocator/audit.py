"""The audit: recounts a pool from its owners and compares.

    every slot has exactly one owner      ranges, nodes, fences, moves' targets, the window, free runs, padding
    owners' sums = the ledger's counts    per state
    references = holders found by walking ranges' counts, nodes' holds
    tree: keys, parents, children, depths, extents agree; evictable = the recount; leaves nobody holds are queued
    free runs: maximal, in the right class, counted
    gauges = the recount; nothing is negative; with no sessions nothing is held

Returns what is wrong as sentences; an empty list means that all of it holds.  O(slots / run length + nodes); for tests
after every step, and for a live daemon on demand.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvslot.allocator.sessions import DUPLICATE, PEELED, Life, Range, Sequence
from kvslot.allocator.slots import (
    CACHED,
    FENCED,
    FREE,
    MOVING,
    PADDING,
    PRIVATE,
    QUARANTINED,
    RESERVED,
    State,
)
from kvslot.allocator.tree import MOVING_FLAG

if TYPE_CHECKING:
    from kvslot.allocator.pool import Pool

Owned = list[tuple[int, int, int, str]]  # slot, length, state, who


def audit(pool: Pool) -> list[str]:
    """All disagreements found, as sentences."""
    wrong: list[str] = []
    owned = owned_slots(pool, wrong)
    owned.sort()
    counts = [0] * len(State)
    at = 0
    for slot, length, state, who in owned:
        if length <= 0:
            wrong.append(f"{who} holds {length} slots at {slot}")
        if slot < at:
            wrong.append(f"{who} overlaps the owner before it at slot {slot}")
        elif slot > at:
            wrong.append(f"slots {at}..{slot - 1} have no owner")
        at = max(at, slot + length)
        counts[state] += length
    if at != pool.slots:
        wrong.append(f"owners end at slot {at} of {pool.slots}")
    for state in State:
        if counts[state] != pool.ledger.counts[state]:
            wrong.append(
                f"{state.name.lower()}: the ledger says {pool.ledger.counts[state]}, owners hold {counts[state]}"
            )
    _audit_runs(pool, wrong)
    _audit_tree(pool, wrong)
    _audit_sequences(pool, wrong)
    return wrong


def ranges_of(pool: Pool) -> dict[int, tuple[Range, list[Sequence]]]:
    """Every range in a table, with the sequences that hold it."""
    found: dict[int, tuple[Range, list[Sequence]]] = {}
    for sequence in pool.sequences.values():
        for piece in (*sequence.own, *(sequence.sources or ())):
            found.setdefault(id(piece), (piece, []))[1].append(sequence)
    return found


def owned_slots(pool: Pool, wrong: list[str]) -> Owned:
    """Every slot's owner, from the owners."""
    owned: Owned = [(0, pool.padding, PADDING, "padding")]
    quarantined: dict[int, int] = {}
    for session in pool.sessions.values():
        for key, (_, state) in session.swept.items():
            quarantined[key] = state
        for _, _, fenced in session.fences:
            for piece in fenced.ranges:
                state = QUARANTINED if id(piece) in quarantined else FENCED
                owned += _pieces(piece.extents, state, f"a fence of session {session.handle}")
    for piece, holders in ranges_of(pool).values():
        state = QUARANTINED if id(piece) in quarantined else PRIVATE
        owned += _pieces(piece.extents, state, f"sequence {holders[0].handle}")
        if sum(piece.extents[1::2]) != piece.length:
            wrong.append(f"a range of {piece.length} slots has {sum(piece.extents[1::2])} in its extents")
    tree = pool.tree
    for node in tree.live():
        if tree.length[node]:
            extents = tree.extents(node)
            if sum(extents[1::2]) != tree.length[node]:
                wrong.append(f"node {node} has {tree.length[node]} tokens in {sum(extents[1::2])} slots")
            owned += _pieces(extents, CACHED, f"node {node}")
    for move in pool.moves.tickets.values():
        owned += _pieces(move.target, MOVING, f"move {move.handle}")
    for extents, length in (*pool.dirt, *pool.wiping.values()):
        owned += _pieces(extents, FENCED, "what is to be wiped")
        if sum(extents[1::2]) != length:
            wrong.append(f"{length} slots to be wiped have {sum(extents[1::2])} in their extents")
    dirty = sum(length for _, length in (*pool.dirt, *pool.wiping.values()))
    if dirty != pool.dirty:
        wrong.append(f"{dirty} slots are to be wiped, the count says {pool.dirty}")
    for retired in pool.moves.retired.values():
        owned += _pieces(retired.extents, MOVING, "what a move left behind")
    window = pool.admission.window
    if window is not None:
        owned += ((slot, length, RESERVED, "the window") for slot, length in window.stretches)
        if sum(length for _, length in window.stretches) != window.held:
            wrong.append("the window's held slots are not the sum of its stretches")
    owned += ((slot, length, FREE, "a free run") for slot, length in pool.runs.length_at.items())
    owned += _pieces(pool.runs.stock, FREE, "the stock")
    return owned


def _pieces(extents: list[int], state: int, who: str) -> Owned:
    return [(extents[i], extents[i + 1], state, who) for i in range(0, len(extents), 2)]


def _audit_runs(pool: Pool, wrong: list[str]) -> None:
    runs, block_size = pool.runs, pool.block_size
    total = whole = cells = 0
    for start, length in runs.length_at.items():
        total += length
        whole += max(0, (start + length) // block_size - -(-start // block_size))
        if runs.start_at.get(start + length) != start:
            wrong.append(f"free run {start} is not found by its end")
        cells += max(0, (start + length) // runs.cell - -(-start // runs.cell))
        if start not in runs.classes[runs.class_of(start, length)]:
            wrong.append(f"free run {start} of {length} is not in its class")
        if start in runs.start_at:
            wrong.append(f"free run {start} was not merged with the one before it")
    for start, length in zip(runs.stock[::2], runs.stock[1::2], strict=True):
        if length <= 0 or start % runs.cell or length % runs.cell:
            wrong.append(f"{length} slots in stock from {start} on are not whole cells")
        total += length
    stocked = sum(runs.stock[1::2]) // runs.cell
    cells += stocked
    if stocked != runs.stocked:
        wrong.append(f"{stocked} cells are in stock, the count says {runs.stocked}")
    if len(runs.start_at) != len(runs.length_at) or sum(map(len, runs.classes)) != len(runs.length_at):
        wrong.append("free runs, their ends and their classes differ in number")
    occupied = sum(1 << c for c, holes in enumerate(runs.classes) if holes)
    if occupied != runs.occupied:
        wrong.append("the bitmap of occupied classes is wrong")
    if total != runs.total:
        wrong.append(f"free runs hold {total} slots, their sum says {runs.total}")
    if cells != runs.cells_free:
        wrong.append(f"{cells} cells are wholly free, the count says {runs.cells_free}")
    if whole != runs.blocks_free:
        wrong.append(f"{whole} blocks are wholly free, the count says {runs.blocks_free}")


def _audit_tree(pool: Pool, wrong: list[str]) -> None:
    tree = pool.tree
    unit = 4 * tree.unit
    nodes = list(tree.live())
    children: Counter[int] = Counter()
    holds: Counter[int] = Counter()
    for sequence in pool.sequences.values():
        holds[sequence.node] += 1
        for node in sequence.kept or ():
            holds[node] += 1
    for session in pool.sessions.values():
        for node in (*session.pins.values(), *session.kept):
            holds[node] += 1
        for _, _, fenced in session.fences:
            if fenced.node:
                holds[fenced.node] += 1
    moving = {
        move.node
        for move in pool.moves.tickets.values()
        if move.node and move.handle in pool.moves.of_node.get(move.node, ())
    }
    tokens = evictable = 0
    queued = set(tree.evictor.victims(len(nodes) + 1))
    for node in nodes:
        parent = tree.parent[node]
        key = tree.keys[node]
        tokens += tree.length[node]
        if len(key) != 4 * tree.length[node]:
            wrong.append(f"node {node} has a key of {len(key)} bytes and a length of {tree.length[node]}")
        # A number that was given out again may still be that of a move which has not ended, and is not flagged.
        if tree.flags[node] & MOVING_FLAG and node not in moving:
            wrong.append(f"node {node} and the moves disagree on whether it moves")
        if not parent:
            if node not in pool.roots:
                wrong.append(f"node {node} has no parent and is no root")
            holds[node] += 1
            continue
        children[parent] += 1
        if not tree.length[node] or tree.length[node] % tree.unit:
            wrong.append(f"node {node} has a length of {tree.length[node]}")
        if tree.depth[node] != tree.depth[parent] + tree.length[parent]:
            wrong.append(f"node {node} begins at {tree.depth[node]}, its parent ends elsewhere")
        if tree.child(parent, key, 0) != node:
            wrong.append(f"node {node} is not found under its parent by {key[:unit]!r}")
        if tree.holds[node] > 0:
            holds[parent] += 1
    for node in nodes:
        if len(tree.children(node)) != children[node]:
            wrong.append(f"node {node} lists {len(tree.children(node))} children, {children[node]} name it")
        if tree.holds[node] != holds[node]:
            wrong.append(f"node {node} counts {tree.holds[node]} holds, {holds[node]} were found")
        if tree.holds[node] == 0:
            evictable += tree.length[node]
        leaf = not tree.holds[node] and not children[node]
        if leaf != (node in queued):
            wrong.append(
                f"node {node} is {'' if leaf else 'not '}an evictable leaf and the evictor disagrees"
            )
    if not queued <= set(nodes):
        wrong.append("the evictor lists nodes that do not exist")
    for name, is_, says in (
        ("nodes", len(nodes), tree.nodes),
        ("tokens", tokens, tree.tokens),
        ("evictable", evictable, tree.evictable),
    ):
        if is_ != says:
            wrong.append(f"tree {name}: counted {is_}, kept {says}")


def _audit_sequences(pool: Pool, wrong: list[str]) -> None:
    unwritten = 0
    accounts = {id(each): each for each in (pool.everyone, *pool.accounts.values())}
    sums: Counter[tuple[str, int]] = Counter()  # of each account
    charged: Counter[int] = Counter()
    fenced: Counter[int] = Counter()
    kinds: Counter[int] = Counter()
    for piece, holders in ranges_of(pool).values():
        ends = map(sum, zip(piece.extents[::2], piece.extents[1::2], strict=True))
        if any(end == start for end, start in zip(ends, piece.extents[2::2], strict=False)):
            wrong.append(
                f"range {piece.extents} of sequence {holders[0].handle} has neighbours that are not joined"
            )
        kinds[piece.kind] += piece.length
        charged[holders[0].session.handle] += piece.length
        sums["charged", id(holders[0].account)] += piece.length
        if piece.refs != len(holders):
            wrong.append(
                f"the range at slot {piece.extents[0]} counts {piece.refs} holders, {len(holders)} were found"
            )
        if len(holders) > 1 or piece.holders is not None:
            if sorted(h.handle for h in piece.holders or ()) != sorted(h.handle for h in holders):
                wrong.append(f"the range at slot {piece.extents[0]} lists other holders than hold it")
    for sequence in pool.sequences.values():
        who = f"sequence {sequence.handle}"
        if sequence.session.sequences.get(sequence.handle) is not sequence:
            wrong.append(f"{who} and its session do not know each other")
        unwritten += sequence.capacity - sequence.length
        accounts[id(sequence.account)] = sequence.account
        sums["unwritten", id(sequence.account)] += sequence.capacity - sequence.length
        if sequence.account is not pool.account_of.get(sequence.root):
            wrong.append(f"{who} is under another account than its namespace")
        if (
            not 0 <= sequence.base <= sequence.length <= sequence.capacity
            or sequence.written > sequence.length
        ):
            wrong.append(f"{who}: base {sequence.base}, written {sequence.written}, length {sequence.length}, "
                         f"capacity {sequence.capacity} are out of order")  # fmt: skip
        at = sequence.kept_from
        position = 0
        for piece in sequence.own:
            if piece.position < position:
                wrong.append(f"{who}: ranges overlap at position {piece.position}")
            if piece.position > max(position, sequence.base, at):
                wrong.append(f"{who}: no slot for position {position}")
            position = piece.position + piece.length
        if max(position, sequence.base, min(at, sequence.capacity)) != sequence.capacity:
            wrong.append(f"{who}: ranges end at {position}, its capacity is {sequence.capacity}")
        tree = pool.tree
        if tree.depth[sequence.node] + tree.length[sequence.node] < sequence.base:
            wrong.append(f"{who}: holds node {sequence.node}, which ends before its base {sequence.base}")
        if sequence.tokens_from > sequence.base:
            wrong.append(f"{who}: tokens are kept from {sequence.tokens_from}, its base is {sequence.base}")
    for promised, sequence in pool.promised.items():
        if pool.sequences.get(sequence.handle) is not sequence or sequence.promised != promised:
            wrong.append(f"a promise names sequence {sequence.handle}, which does not make it")
    for ticket in pool.admission.awaiting.values():
        if ticket.awaits and ticket.awaits not in pool.sequences:
            wrong.append(f"ticket {ticket.handle} waits for sequence {ticket.awaits}, which has ended")
    for handle in pool.admission.named:
        if handle not in pool.sequences:
            wrong.append(f"sequence {handle} is named a victim and has ended")
    pinned = 0
    for session in pool.sessions.values():
        if session.group is not None and session not in session.group.members:
            wrong.append(f"session {session.handle} is not among its group's members")
        for handle in session.owes:
            if handle not in session.sequences:
                wrong.append(f"session {session.handle} owes sequence {handle}, which has ended")
        for _, _, entry in session.fences:
            length = sum(piece.length for piece in entry.ranges)
            fenced[session.handle] += length
            accounts[id(entry.account)] = entry.account
            sums["fenced", id(entry.account)] += length
            sums["charged", id(entry.account)] += length
        for node in session.pins.values():
            kept = pool.tree.depth[node] + pool.tree.length[node]
            pinned += kept
            sums["pinned", id(pool.account_of[pool.tree.root_of(node)])] += kept
        swept = sum(piece.length for piece, state in session.swept.values() if state == FENCED)
        if session.swept_fenced != swept:
            wrong.append(
                f"session {session.handle} counts {session.swept_fenced} quarantined fenced slots, {swept} were found"
            )
        if session.fenced != fenced[session.handle]:
            wrong.append(
                f"session {session.handle} counts {session.fenced} fenced slots, {fenced[session.handle]} were found"
            )
        expected = charged[session.handle] + fenced[session.handle]
        if session.charged != expected:
            wrong.append(f"session {session.handle} is charged {session.charged} slots, holds {expected}")
        if session.life == Life.ENDED:
            wrong.append(f"session {session.handle} has ended and is still listed")
        retired = sum(entry[1].length for waiting in (session.moved, session.settling) for entry in waiting)
        if session.retired_tokens != retired:
            wrong.append(
                f"session {session.handle} holds up {retired} slots, {session.retired_tokens} are kept"
            )
        if session.charged > session.quota:
            wrong.append(
                f"session {session.handle} is charged {session.charged} slots over its quota {session.quota}"
            )
    spaces = Counter(id(each) for each in pool.account_of.values())
    for key, account in accounts.items():
        for name, says in (
            ("charged", account.charged), ("fenced", account.fenced), ("unwritten", account.unwritten),
            ("pinned", account.pinned),
        ):  # fmt: skip
            if sums[name, key] != says:
                wrong.append(f"account {account.name!r}: {name} is {says}, {sums[name, key]} were found")
        if account.spaces != spaces[key]:
            wrong.append(f"account {account.name!r}: spaces is {account.spaces}, {spaces[key]} were found")
        if account.charged > account.ceiling:
            wrong.append(
                f"account {account.name!r} is charged {account.charged} slots over its limit {account.ceiling}"
            )
    if pool.account_of.keys() != pool.roots.keys():
        wrong.append("namespaces and their accounts differ")
    admission = pool.admission
    for name, is_, says in (
        ("unwritten", unwritten, pool.unwritten),
        ("duplicates", kinds[DUPLICATE], pool.duplicates),
        ("peeled", kinds[PEELED], pool.peeled),
        ("pinned", pinned, pool.pinned),
        ("busy", bool(admission.waiting or admission.growth), admission.busy),
    ):
        if is_ != says:
            wrong.append(f"{name}: counted {is_}, kept {says}")
    for handle in admission.growth:
        if handle not in pool.sequences:
            wrong.append(f"growth ticket of sequence {handle}, which has ended")
    if not pool.sessions:
        for state in (PRIVATE, FENCED, QUARANTINED, RESERVED):
            if pool.ledger.counts[state] > (pool.dirty if state == FENCED else 0):
                wrong.append(
                    f"no session is left, yet {pool.ledger.counts[state]} slots are {State(state).name.lower()}"
                )
        leased = pool.tree.tokens - pool.tree.evictable
        moving = sum(pool.tree.length[n] for n in pool.tree.live() if pool.tree.flags[n] & MOVING_FLAG)
        if leased and not moving:
            wrong.append(f"no session is left, yet {leased} cached tokens are leased")
    if (
        min(pool.ledger.counts) < 0
        or min(unwritten, pool.duplicates, pool.peeled, pool.pinned, pool.tree.evictable) < 0
    ):
        wrong.append("a gauge is negative")
