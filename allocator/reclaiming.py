"""Sequences that go on in a later life of the pool, where their process lived on and says where their tokens stand.

The pool of then is gone, and with it all it knew of sequences.  Their engine still has its tables, and what is cached
and what is set aside for it were taken over (restore.py).  So it names a sequence's tokens and slots, and every slot is
looked at here before anything is believed:

    position   0 ................ hit ................ capacity
    slot       cached, in this    set aside for this
               very place, or     engine's session of
               set aside for it   then, and no other's

A slot that is neither may hold anything by now: the sequence has ended, and nothing changes.  What is taken out of what
is set aside is private again, charged to the session that goes on with it and to the account of its namespace.

To be asked for only once every step of then has completed: from here on those slots are fenced like any others.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import NamedTuple

from kvslot.allocator.config import check_priority
from kvslot.allocator.errors import BadRequest, EndedHandle, OutOfTurn
from kvslot.allocator.extents import append
from kvslot.allocator.pool import Pool
from kvslot.allocator.sessions import DUPLICATE, OWN, Fenced, Life, Range, Sequence, Session
from kvslot.allocator.slots import PRIVATE, QUARANTINED


class Reclaimed(NamedTuple):
    """A sequence that goes on."""

    sequence: int
    length: int
    """Positions [0, length) are cached."""


class Piece(NamedTuple):
    """Positions of a table that stand in slots set aside."""

    position: int
    slot: int
    length: int


def reclaim(
    pool: Pool,
    session: Session,
    aside: Aside,
    root: int,
    tokens: bytes,
    extents: list[int],
    *,
    priority: int = 0,
) -> Reclaimed:
    """Makes `session` go on with a sequence of a former one, whose slots set aside are `aside`.

    `tokens`: all of its tokens, little-endian int32.  `extents`: flat slot, length, ...: where its positions from 0 on
    stand, with the room behind its last token.

    Raises EndedHandle where the former session was released, where a slot is neither cached for that position nor set
    aside for it, and where the session's quota has no room for what would be its own: the sequence cannot go on.
    BadRequest for tokens, extents or a priority that are none, UnknownHandle for a namespace, OutOfTurn where either
    session is not what it must be.
    """
    former = aside.former
    n = pool._count(root, tokens)
    if priority:
        check_priority(priority)
    if session.life:
        raise OutOfTurn("the session is not live")
    if former.life == Life.LIVE or former.sequences:
        raise OutOfTurn("only from a session of an earlier life of the pool can be reclaimed")
    if former.life != Life.LOST or former.proven:
        raise EndedHandle("the session of then was released: nothing of it is left")
    if former.group is not None:
        raise OutOfTurn("of a group: steps of others of its engine may be under way")
    capacity = _size(pool, extents)
    if capacity < n:
        raise BadRequest(f"{n} tokens, and slots for {capacity}")
    tree = pool.tree
    path: list[int] = []
    hit = tree.match(root, tokens, path)
    cached: list[int] = []
    tree.path_extents(path, hit, cached)
    own = _divide(session, extents, cached, hit, aside)
    count = sum(piece.length for piece in own)
    if session.charged + count > session.quota:
        raise EndedHandle(
            f"it has {count} slots of its own, and the session's quota has {session.quota_left()} left"
        )
    # Nothing is refused from here on.
    flat: list[int] = []
    for piece in own:
        append(flat, piece.slot, piece.length)
    ledger = pool.ledger
    if ledger.recorder is not None:
        ledger.recorder.owned(flat, session.mark)
    ledger.shift_all(flat, count, QUARANTINED, PRIVATE)
    aside.take(own)
    node = path[-1] if path else root
    tree.hold(node)
    if path:
        pool.loose = True
    account = pool.account_of[root]
    pool.serial = handle = pool.serial + 1
    sequence = Sequence(
        handle, session, account, root, node, hit, n, capacity, tokens[4 * hit :], hit, _ranges(own, hit), priority, n
    )  # fmt: skip
    if tree.learns:
        sequence.prompt = n
    session.sequences[handle] = pool.sequences[handle] = sequence
    session.charged += count
    account.charged += count
    account.unwritten += capacity - n
    # It was admitted once: a limit takes nothing away.
    account.ceiling = max(account.ceiling, account.charged)
    pool.unwritten += capacity - n
    pool.duplicates += sum(each.length for each in sequence.own if each.kind == DUPLICATE)
    return Reclaimed(handle, hit)


def _size(pool: Pool, extents: list[int]) -> int:
    """The positions that a table has; raises BadRequest for what is none."""
    if not extents or len(extents) & 1:
        raise BadRequest(f"{len(extents)} numbers of extents: they are slot, length, slot, length, ...")
    for i in range(0, len(extents), 2):
        slot, length = extents[i], extents[i + 1]
        if length < 1 or slot < pool.padding or slot + length > pool.slots:
            raise BadRequest(
                f"an extent of {length} from slot {slot} on: slots are {pool.padding}..{pool.slots - 1}"
            )
    return sum(extents[1::2])


class Aside:
    """What is set aside for a session of an earlier life, by slot: its runs in order, and the range that each is of.

    Made once for all of its sequences; nothing but `reclaim` takes anything out as long as the session is lost.
    """

    def __init__(self, former: Session) -> None:
        self.former = former
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._entries: list[Fenced] = []
        for _, _, entry in sorted(former.fences, key=_serial):
            for piece in entry.ranges:
                extents = piece.extents
                for i in range(0, len(extents), 2):
                    self._starts.append(extents[i])
                    self._ends.append(extents[i] + extents[i + 1])
                    self._entries.append(entry)

    def run(self, slot: int) -> tuple[bool, int]:
        """Whether a slot is set aside, and the slot where that changes (far away: it does not)."""
        index = bisect_right(self._starts, slot) - 1
        if index >= 0 and slot < self._ends[index]:
            return True, self._ends[index]
        return False, self._starts[index + 1] if index + 1 < len(self._starts) else 1 << 62

    def take(self, own: list[Piece]) -> None:
        """Takes slots out, all of which are set aside."""
        former = self.former
        emptied = False
        for _, slot, length in own:
            entry = self._cut(slot, slot + length)
            (whole,) = entry.ranges
            whole.extents = _without(whole.extents, slot, slot + length)
            whole.length -= length
            for owner in (former, entry.account):
                owner.charged -= length
                owner.fenced -= length
            former.swept_fenced -= length
            if not whole.length:
                del former.swept[id(whole)]
                emptied = True
        if emptied:
            # What is left is in the order of its serials, and so a heap still: all wait for the same step.
            former.fences = [each for each in sorted(former.fences, key=_serial) if each[2].ranges[0].length]

    def _cut(self, slot: int, end: int) -> Fenced:
        """Takes [slot, end) out of the run that it lies in; returns what that is of."""
        starts, ends, entries = self._starts, self._ends, self._entries
        index = bisect_right(starts, slot) - 1
        assert starts[index] <= slot < end <= ends[index]
        entry, stop = entries[index], ends[index]
        if starts[index] == slot:
            if stop == end:
                del starts[index], ends[index], entries[index]
            else:
                starts[index] = end
            return entry
        ends[index] = slot
        if end < stop:
            starts.insert(index + 1, end)
            ends.insert(index + 1, stop)
            entries.insert(index + 1, entry)
        return entry


def _serial(each: tuple[int, int, Fenced]) -> int:
    return each[1]


def _without(extents: list[int], slot: int, end: int) -> list[int]:
    """Extents without [slot, end), which lies in one of them."""
    out: list[int] = []
    for i in range(0, len(extents), 2):
        start, stop = extents[i], extents[i] + extents[i + 1]
        if start <= slot < stop:
            if start < slot:
                out += (start, slot - start)
            if end < stop:
                out += (end, stop - end)
        else:
            out += (start, stop - start)
    return out


def _divide(session: Session, extents: list[int], cached: list[int], hit: int, aside: Aside) -> list[Piece]:
    """The parts of a table that are set aside; raises EndedHandle unless all others are what is cached."""
    page = session.page
    own: list[Piece] = []
    position = 0
    index = start = 0  # of `cached`, and the position that its extent begins with
    for i in range(0, len(extents), 2):
        slot, end = extents[i], extents[i] + extents[i + 1]
        if (slot - position) % page:
            raise BadRequest(
                f"position {position} in slot {slot}: in pages of {page} it would stand elsewhere"
            )
        while slot < end:
            is_aside, until = aside.run(slot)
            length = min(end, until) - slot
            if is_aside:
                own.append(Piece(position, slot, length))
            else:
                while index < len(cached) and start + cached[index + 1] <= position:
                    start += cached[index + 1]
                    index += 2
                if position + length > hit or not (
                    cached[index] + position - start == slot
                    and position + length <= start + cached[index + 1]
                ):
                    raise EndedHandle(
                        f"positions {position}..{position + length - 1} in slots {slot}..{slot + length - 1} are "
                        "neither cached there nor set aside for the session of then"
                    )
            slot += length
            position += length
    slots = sorted((piece.slot, piece.length) for piece in own)
    for (slot, length), (following, _) in pairwise(slots):
        if slot + length > following:
            raise BadRequest(f"slot {following} stands for two positions")
    return own


def _ranges(own: list[Piece], hit: int) -> list[Range]:
    """The pieces as a sequence has them: what is cached, too, apart from what is not."""
    out: list[Range] = []
    for piece in own:
        position, slot, length = piece
        while length:
            below = position < hit
            some = min(length, hit - position) if below else length
            kind = DUPLICATE if below else OWN
            last = out[-1] if out else None
            if last is not None and last.kind == kind and last.position + last.length == position:
                append(last.extents, slot, some)
                last.length += some
            else:
                out.append(Range(position, [slot, some], some, kind))
            position += some
            slot += some
            length -= some
    return out
