"""Moves: some of a node's slots are copied elsewhere and exchanged, under a ticket.

    begin      target slots: free -> moving; nothing of the node changes, whoever looks it up is served from where it is
    (copy)     the device copies; nothing waits for it
    finish     published: the node has the target, its old slots go free, or, where somebody reads them, are retired
               abandoned: the node keeps its slots; the target goes free, since the copy has ended
    abandon    given up beforehand: the target stays `moving` until the copy has ended

A move holds nothing.  Its node may be read, split, evicted and be somebody else's by the time the copy has ended, and
keeps its place in the order of eviction; so `finish` publishes only what is still as `begin` found it: the same life of
the node, the same slots at the same tokens.  The bytes are those of `begin` too, since published slots are not written
again before they are freed.  A completion that is late, repeated or unknown is counted and ignored.

Leased data is moved only where everybody who holds it follows: a live session that said `movable`, steps, and whose
sequences read the tree's slots by token.  Each is told by `Moved` and uses the new slots from its next step on, which
it says by the epoch on its page; the old ones are retired:

    wait      per session, until its page shows the epoch: then every step up to the last submitted may still read them
    settle    ... until that step has completed, or the session has ended; then they go free
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from kvslot.allocator.errors import OutOfTurn
from kvslot.allocator.extents import cut
from kvslot.allocator.results import Moved
from kvslot.allocator.sessions import Sequence, Session
from kvslot.allocator.slots import CACHED, FREE, MOVING
from kvslot.allocator.tree import MOVING_FLAG

if TYPE_CHECKING:
    from kvslot.allocator.placement import Placement

READERS_MAX = (
    64  # sequences that are told of a move at the most; data that more of them read stays where it is
)
FOLLOWS_FOR = 2.0  # seconds without a step from which a session is not relied upon to apply what it is told
RETIRED_SHARE = (
    32  # of the pool one part in so many: old places that readers hold up, then none is told any more
)
RETIRED_LEAST = 64  # slots; in a small pool too
RETIRED_EACH = 4  # ... and of that one part in so many by one session, which then stops only its own moves
SEQUENCES_MAX = (
    2048  # running: beyond, nothing that is held is moved, since who holds it is found by looking at all
)


class Move(msgspec.Struct, gc=False, eq=False):
    """One move: tokens [at, at + length) of `node` (0 once it was given up), as flat extents before and after."""

    handle: int
    node: int
    at: int
    depth: int  # of the node when it began: a split in front of `at` changes it, and what `at` means
    length: int
    source: list[int]
    target: list[int]


class Retired(msgspec.Struct, gc=False, eq=False):
    """Old slots that `waiting` sessions may still read."""

    number: int
    extents: list[int]
    length: int
    waiting: int


class Moves:
    """The moves of one pool that have begun and whose copies have not ended, and the old places not yet free."""

    __slots__ = (
        "_retirements",
        "abandoned_freed",
        "abandoned_leased",
        "blocks_given",
        "failed",
        "late_completions",
        "moved_tokens",
        "of_node",
        "pool",
        "published",
        "retired",
        "retired_tokens",
        "tickets",
    )

    def __init__(self, pool: Placement) -> None:
        self.pool = pool
        self.tickets: dict[int, Move] = {}
        self.of_node: dict[int, list[int]] = {}  # node -> its moves in this life of it
        self.retired: dict[int, Retired] = {}  # by a number that rises
        self._retirements = 0
        self.retired_tokens = 0
        self.blocks_given = 0  # wholly free blocks more, by all that moves took and gave back so far
        self.moved_tokens = 0
        self.published = 0
        self.abandoned_leased = 0  # somebody reads the source who cannot be told
        self.abandoned_freed = 0  # the node was split, evicted or wanted as it was
        self.failed = 0  # the copy was not made
        self.late_completions = 0

    @property
    def abandoned(self) -> int:
        """Moves whose node stayed where it was."""
        return self.abandoned_leased + self.abandoned_freed + self.failed

    def begin(self, node: int, at: int = 0, length: int = 0, target: list[int] | None = None) -> Move:
        """Starts to move tokens [at, at + length) of `node` (`length` 0: all from there on) to `target`.

        `target` is flat extents, each at the front or the end of a free run; without it the best-fitting slots are
        taken.  The caller has the copy made.  Raises OutOfTurn, with nothing changed, where that cannot be.
        """
        pool = self.pool
        tree, runs = pool.tree, pool.runs
        if not 0 < node < len(tree.keys) or not tree.parent[node]:
            raise OutOfTurn(f"no node {node} to move")
        length = length or tree.length[node] - at
        if not 0 <= at < at + length <= tree.length[node] or (at | length) % pool.unit:
            raise OutOfTurn(f"tokens [{at}, {at + length}) of node {node}, which has {tree.length[node]}")
        source = cut(tree.extents(node), at, length)
        overlapping = [
            move
            for move in (self.tickets.get(handle) for handle in self.of_node.get(node, ()))
            if move is not None and move.node == node and move.at < at + length and at < move.at + move.length
        ]
        if overlapping and tree.flags[node] & MOVING_FLAG:
            raise OutOfTurn(f"node {node} is moving")
        if tree.holds[node] and self.readers(node) is None:
            raise OutOfTurn(f"node {node} is held by somebody who cannot be told of new slots")
        before = runs.blocks_free
        if target is not None:
            if sum(target[1::2]) != length or min(target[1::2]) <= 0 or any(n % pool.unit for n in target):
                raise OutOfTurn(f"{length} tokens do not fit {target}")
            taken = runs.take_edges(target)
        elif length > runs.total:
            raise OutOfTurn(f"moving node {node} takes {length} free slots, {runs.total} are free")
        elif pool.unit > 1:
            target = runs.take_pages(length, pool.unit)
            taken = bool(target)
        else:
            target = runs.take(length)
            taken = True
        if not taken:
            raise OutOfTurn(f"no such free slots for {length} tokens of node {node}")
        self.blocks_given += runs.blocks_free - before
        pool.ledger.shift_all(target, length, FREE, MOVING)
        move = Move(pool._handle(), node, at, tree.depth[node], length, source, target)
        if tree.flags[node] & MOVING_FLAG:
            self.of_node[node].append(move.handle)
        else:
            tree.flags[node] |= MOVING_FLAG
            self.of_node[node] = [move.handle]  # those of an earlier life of this number are given up by that
        self.tickets[move.handle] = move
        return move

    def finish(self, handle: int, copied: bool = True) -> bool:
        """The copy has ended, well (`copied`) or not.  True when the node now stands in its new place."""
        move = self.tickets.pop(handle, None)
        if move is None:
            self.late_completions += 1
            return False
        pool = self.pool
        tree = pool.tree
        node = move.node
        before = pool.runs.blocks_free
        readers: list[Sequence] | None = None
        if not node or not self._is_as_it_was(move):
            self.abandoned_freed += 1
        elif not copied:
            self.failed += 1
        elif tree.holds[node] and (readers := self.readers(node)) is None:
            self.abandoned_leased += 1
        else:
            self._publish(move, readers or [])
            self._forget(move)
            self.blocks_given += pool.runs.blocks_free - before
            return True
        self._forget(move)
        pool._release(move.target, move.length, MOVING)
        self.blocks_given += pool.runs.blocks_free - before
        return False

    def abandon(self, handle: int) -> None:
        """Gives a move up before its copy has ended; its target stays set aside until `finish`."""
        move = self.tickets.get(handle)
        if move is None:
            self.late_completions += 1
            return
        self._forget(move)
        move.node = 0

    def _is_as_it_was(self, move: Move) -> bool:
        """Whether this is the life of the node that the move began in, and its tokens stand where they stood."""
        tree, node = self.pool.tree, move.node
        if not tree.parent[node] or not tree.flags[node] & MOVING_FLAG or tree.depth[node] != move.depth:
            return False
        if move.handle not in self.of_node.get(node, ()) or move.at + move.length > tree.length[node]:
            return False
        return cut(tree.extents(node), move.at, move.length) == move.source

    def _publish(self, move: Move, readers: list[Sequence]) -> None:
        pool, node = self.pool, move.node
        tree = pool.tree
        extents = tree.extents(node)
        end = move.at + move.length
        whole = cut(extents, 0, move.at)
        for part in (move.target, cut(extents, end, tree.length[node] - end)):
            for i in range(0, len(part), 2):
                if whole and whole[-2] + whole[-1] == part[i]:
                    whole[-1] += part[i + 1]
                else:
                    whole += part[i : i + 2]
        if pool.ledger.recorder is not None:
            pool.ledger.recorder.moved(move.source, move.target)
        pool.ledger.shift_all(move.target, move.length, MOVING, CACHED)
        tree.set_extents(node, whole)
        self.moved_tokens += move.length
        self.published += 1
        if not readers:
            pool._release(move.source, move.length, CACHED)
            return
        pool.ledger.shift_all(move.source, move.length, CACHED, MOVING)
        first = tree.depth[node] + move.at
        told: dict[Session, list[Moved]] = {}
        for sequence in readers:
            session = sequence.session
            for position, length in self._read_from_tree(sequence, first, first + move.length):
                session.epoch += 1  # one each: a connection may end between any two of them
                piece = cut(move.target, position - first, length)
                push = Moved(session.handle, session.epoch, sequence.handle, position, piece)
                told.setdefault(session, []).append(push)
        if not told:  # who holds it reads copies of its own
            pool._release(move.source, move.length, MOVING)
            return
        self._retirements += 1
        retired = Retired(self._retirements, move.source, move.length, len(told))
        self.retired[retired.number] = retired
        self.retired_tokens += move.length
        for session, pushes in told.items():
            session.moved.append((session.epoch, retired, pushes))
            session.retired_tokens += move.length
            pool.pushes += pushes

    def _forget(self, move: Move) -> None:
        """The move is over as far as its node goes, if that is still the node it began with."""
        tree, node = self.pool.tree, move.node
        handles = self.of_node.get(node, [])
        if not node or move.handle not in handles:
            return
        handles.remove(move.handle)
        if not handles:
            del self.of_node[node]
            tree.flags[node] &= ~MOVING_FLAG

    # -- those who read what moves -----------------------------------------------------------------------------

    def readers(self, node: int) -> list[Sequence] | None:
        """The sequences that read `node`, where that is all who hold it and each of them can be told; else None."""
        pool = self.pool
        tree = pool.tree
        holds = tree.holds
        if len(pool.sequences) > SEQUENCES_MAX:
            return None
        ends: dict[int, list[Sequence]] = {}
        pinned: dict[int, int] = {}
        for session in pool.sessions.values():
            follows = self.follows(session)
            for each in session.pins.values():
                pinned[each] = pinned.get(each, 0) + 1
            if follows:
                for sequence in session.sequences.values():
                    if not sequence.kept:
                        ends.setdefault(sequence.node, []).append(sequence)
        found: list[Sequence] = []
        below = [node]
        for each in below:
            here = ends.get(each, ())
            found += here
            left = holds[each] - len(here) - pinned.get(each, 0)
            for child in tree.children(each):
                if holds[child]:
                    below.append(child)
                    left -= 1
            if left or len(found) > READERS_MAX or len(below) > 4 * READERS_MAX:
                return None
        return found

    def follows(self, session: Session) -> bool:
        """Whether a session is told of moves and relied upon to use the new slots from its next step on."""
        pool = self.pool
        return (
            session.movable
            and not session.life
            and not session.stalled
            and session.page == 1
            and session.append == "chain"
            and session.group is None
            and pool.now - session.stepped <= FOLLOWS_FOR
            and self.retired_tokens <= (most := max(pool.usable // RETIRED_SHARE, RETIRED_LEAST))
            and session.retired_tokens <= most // RETIRED_EACH
        )

    def applied(self, session: Session, epoch: int) -> None:
        """The session's page says that its steps from the next one on use all moves up to `epoch`."""
        moved = session.moved
        while moved and moved[0][0] <= epoch:
            _, retired, _ = moved.popleft()
            session.settling.append((session.submitted, retired))
        if not session.life:
            self.settle(session, session.passed())

    def settle(self, session: Session, passed: int) -> None:
        """Steps up to `passed` have completed in all processes of the engine: what only those could read goes free."""
        settling = session.settling
        while settling and settling[0][0] <= passed:
            self._let_go(session, settling.popleft()[1])

    def ended(self, session: Session) -> None:
        """The session's process reads nothing any more."""
        for waiting in (session.moved, session.settling):
            for entry in waiting:
                self._let_go(session, entry[1])
        session.moved, session.settling = deque(), deque()

    def retell(self, session: Session) -> None:
        """A session came back: what it was told and has not applied may have been lost on the way."""
        for _, _, pushes in session.moved:
            self.pool.pushes += pushes

    def _let_go(self, session: Session, retired: Retired) -> None:
        session.retired_tokens -= retired.length
        retired.waiting -= 1
        if not retired.waiting:
            del self.retired[retired.number]
            self.retired_tokens -= retired.length
            before = self.pool.runs.blocks_free
            self.pool._release(retired.extents, retired.length, MOVING)
            self.blocks_given += self.pool.runs.blocks_free - before

    def _read_from_tree(self, sequence: Sequence, start: int, stop: int) -> list[tuple[int, int]]:
        """The stretches (position, length) of [start, stop) that a sequence reads from the tree, not its own."""
        out: list[tuple[int, int]] = []
        stop = min(stop, sequence.base)
        for piece in sequence.own:
            if piece.position >= stop:
                break
            if piece.position > start:
                out.append((start, piece.position - start))
            start = max(start, piece.position + piece.length)
        if start < stop:
            out.append((start, stop - start))
        return out
