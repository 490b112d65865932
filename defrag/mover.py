"""Carries plans out: begins moves, has them copied, publishes or gives up.  Knows no device, no clock and no task.

    take(plan) ──► queue ──► pump() begins moves ──► submit(pieces) ──► the device copies ──► completed(token, ok)
                     │           │                                                               │
                     │           └─ what cannot begin now: deferred                              ├─ published
                     └─ dropped when the time for it is over: over budget                        ├─ abandoned: leased
                                                                                                 ├─ abandoned: freed
                                                                                                 └─ failed

A batch is what is copied by one call of the device, and what is published together; several may be under way.  Their
number is bounded in moves and in tokens, since every move under way has its target set aside.  `stop` leaves the pool
as if the moves had never been planned, as soon as the copies that run have ended: until then their targets stay set
aside, because they are being written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from kvslot.allocator.errors import OutOfTurn
from kvslot.allocator.extents import cut
from kvslot.allocator.moves import Move

if TYPE_CHECKING:
    from kvslot.allocator.pool import Pool
    from kvslot.defrag.view import PlannedMove

Piece = tuple[int, int, int]
"""(source slot, target slot, length in slots)."""

MOVES_MAX: Final = 64
"""Under way at a time: some tenths of a millisecond of begin and finish, and as many targets that wait."""
BATCH_MOVES: Final = 8
"""Of one copy: what is published together, in about a hundred microseconds."""
TRAIL: Final = 128
"""Moves of which it is kept where they went, for whoever draws the pool."""


class Outcomes(msgspec.Struct, gc=False):
    """What became of the moves that were planned, by name; `moved_tokens` of those published."""

    planned: int = 0
    published: int = 0
    abandoned_leased: int = 0
    abandoned_freed: int = 0
    deferred: int = 0
    over_budget: int = 0
    failed: int = 0
    moved_tokens: int = 0

    @property
    def settled(self) -> int:
        """Moves that have had their outcome; the rest of `planned` waits or is under way."""
        lost = self.abandoned_leased + self.abandoned_freed + self.deferred + self.over_budget + self.failed
        return self.published + lost


class Mover:
    """The executor of one pool's plans.

    `submit` is given pieces that touch no two moves' targets, and returns a token that `completed` is called with once
    the copy has ended, well or not.  `tokens_max` bounds what is under way, `batch_tokens` one copy.  `ready`, where
    given, says of a move whose copy has ended whether it may be published at this moment; if not it is deferred.
    """

    def __init__(
        self,
        pool: Pool,
        submit: Callable[[list[Piece]], int],
        *,
        tokens_max: int,
        batch_tokens: int,
        moves_max: int = MOVES_MAX,
        ready: Callable[[Move], bool] | None = None,
    ) -> None:
        self.outcomes = Outcomes()
        self.moves_in_flight = 0
        self.tokens_in_flight = 0
        self.trail: deque[tuple[int, int, int]] = deque(maxlen=TRAIL)
        """Of the latest that were published: first slot before, first slot after, and tokens."""
        self._pool = pool
        self._submit = submit
        self._ready = ready
        self._moves_max = moves_max
        self._tokens_max = tokens_max
        self._batch_tokens = batch_tokens
        self._queue: deque[PlannedMove] = deque()
        self._batches: dict[int, list[Move]] = {}

    @property
    def queued(self) -> int:
        """Moves that have not begun."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Nothing is queued and no copy is under way."""
        return not (self._queue or self._batches)

    def take(self, moves: Iterable[PlannedMove]) -> int:
        """Queues a plan's moves, behind those that wait; how many."""
        before = len(self._queue)
        self._queue.extend(moves)
        more = len(self._queue) - before
        self.outcomes.planned += more
        return more

    def pump(self, batches: int = 1 << 30) -> int:
        """Begins what may be under way now, in at most `batches` copies; the tokens that were handed to be copied."""
        begun = 0
        while self._queue and batches > 0:
            batch: list[Move] = []
            size = 0
            while self._queue and len(batch) < BATCH_MOVES and size < self._batch_tokens:
                planned = self._queue[0]
                if self.moves_in_flight and (
                    self.moves_in_flight >= self._moves_max
                    or self.tokens_in_flight + planned.length > self._tokens_max
                ):
                    break
                self._queue.popleft()
                move = self._begin(planned)
                if move is None:
                    self.outcomes.deferred += 1
                    continue
                batch.append(move)
                size += move.length
                self.moves_in_flight += 1
                self.tokens_in_flight += move.length
            if not batch:
                break
            self._batches[self._submit(pieces_of(batch))] = batch
            begun += size
            batches -= 1
        return begun

    def _begin(self, planned: PlannedMove) -> Move | None:
        pool = self._pool
        tree, node = pool.tree, planned.node
        # A number that is used again is another node, and a split one may lie elsewhere: only what was planned moves.
        if not 0 < node < len(tree.keys) or not tree.parent[node]:
            return None
        if planned.at + planned.length > tree.length[node]:
            return None
        if cut(tree.extents(node), planned.at, planned.length) != planned.source:
            return None
        try:
            return pool.begin_move(node, planned.at, planned.length, planned.target)
        except OutOfTurn:
            return None

    def completed(self, token: int, ok: bool = True) -> int:
        """A copy has ended, well (`ok`) or not: its moves are published or given up.  The tokens now in new places.

        A token that is unknown, or told twice, changes nothing.
        """
        batch = self._batches.pop(token, None)
        if batch is None:
            return 0
        pool, outcomes, ready = self._pool, self.outcomes, self._ready
        counts = pool.moves
        moved = 0
        for move in batch:
            self.moves_in_flight -= 1
            self.tokens_in_flight -= move.length
            if not move.node:  # `stop`
                pool.finish_move(move.handle, ok)
                outcomes.deferred += 1
                continue
            if ok and ready is not None and not ready(move):
                pool.abandon_move(move.handle)
                pool.finish_move(move.handle)
                outcomes.deferred += 1
                continue
            leased, failed = counts.abandoned_leased, counts.failed
            if pool.finish_move(move.handle, ok):
                outcomes.published += 1
                outcomes.moved_tokens += move.length
                moved += move.length
                self.trail.append((move.source[0], move.target[0], move.length))
            elif counts.abandoned_leased > leased:
                outcomes.abandoned_leased += 1
            elif counts.failed > failed:
                outcomes.failed += 1
            else:
                outcomes.abandoned_freed += 1
        return moved

    def drop(self) -> int:
        """Forgets what has not begun, its time being over; how many moves."""
        left = len(self._queue)
        self._queue.clear()
        self.outcomes.over_budget += left
        return left

    def stop(self) -> None:
        """Forgets what has not begun and gives up what has: of that, only copies that run are left to end."""
        self.drop()
        for batch in self._batches.values():
            for move in batch:
                if move.node:
                    self._pool.abandon_move(move.handle)


def pieces_of(moves: Iterable[Move]) -> list[Piece]:
    """What is to be copied for these moves, by rising source; neighbours on both sides are one piece."""
    single: list[Piece] = []
    for move in moves:
        source, target = move.source, move.target
        at = to = 0
        slot, left = source[0], source[1]
        goal, room = target[0], target[1]
        while True:
            length = min(left, room)
            single.append((slot, goal, length))
            left -= length
            room -= length
            slot += length
            goal += length
            if not left:
                at += 2
                if at == len(source):
                    break
                slot, left = source[at], source[at + 1]
            if not room:
                to += 2
                goal, room = target[to], target[to + 1]
    single.sort()
    pieces: list[Piece] = []
    for slot, goal, length in single:
        if pieces:
            first, onto, size = pieces[-1]
            if first + size == slot and onto + size == goal:
                pieces[-1] = (first, onto, size + length)
                continue
        pieces.append((slot, goal, length))
    return pieces
