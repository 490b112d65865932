"""Moves: a node's slots are copied elsewhere and exchanged, under a ticket.

    begin      target slots: free -> moving; the node is held, so nothing evicts it meanwhile
    (copy)     the device copies; the node is served from its old place at once, nothing waits
    finish     published: the node has the target, its old slots go free
               abandoned: the node keeps its slots; the target goes free, since the copy has ended
    abandon    the node was split or is wanted as it is: the target stays `moving` until the copy has ended

A move is published only when nobody but the move itself holds the node at that moment: a reader's table names slots,
and nobody has told it of new ones.  A completion that is late, repeated or unknown is counted and ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvslot.allocator.errors import OutOfTurn
from kvslot.allocator.slots import CACHED, FREE, MOVING
from kvslot.allocator.tree import MOVING_FLAG

if TYPE_CHECKING:
    from kvslot.allocator.placement import Placement


class Move(msgspec.Struct, gc=False, eq=False):
    """One move: `source` and `target` are flat extents of the same length; `node` is 0 once it was abandoned."""

    handle: int
    node: int
    source: list[int]
    target: list[int]


class Moves:
    """The moves of one pool that have begun and whose copies have not ended."""

    __slots__ = ("abandoned", "late_completions", "moved_tokens", "pool", "published", "tickets")

    def __init__(self, pool: Placement) -> None:
        self.pool = pool
        self.tickets: dict[int, Move] = {}
        self.moved_tokens = 0
        self.published = 0
        self.abandoned = 0
        self.late_completions = 0

    def begin(self, node: int) -> Move:
        """Starts to move an unheld node into the best-fitting free slots; the caller has the copy made."""
        pool = self.pool
        tree = pool.tree
        if not 0 < node < len(tree.keys) or not tree.parent[node]:
            raise OutOfTurn(f"no node {node} to move")
        if tree.holds[node] or tree.flags[node] & MOVING_FLAG:
            raise OutOfTurn(f"node {node} is held or moving; only cached data that nobody reads is moved")
        length = tree.length[node]
        if length > pool.runs.total:
            raise OutOfTurn(f"moving node {node} takes {length} free slots, {pool.runs.total} are free")
        target = pool.runs.take_pages(length, pool.unit) if pool.unit > 1 else pool.runs.take(length)
        if not target:
            raise OutOfTurn(f"no whole free blocks for the {length} slots of node {node}")
        pool.ledger.shift_all(target, length, FREE, MOVING)
        tree.hold(node)
        tree.flags[node] |= MOVING_FLAG
        move = Move(pool._handle(), node, list(tree.extents(node)), target)
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
        publish = bool(copied and node and tree.holds[node] == 1)
        if publish:
            pool.ledger.shift_all(move.target, tree.length[node], MOVING, CACHED)
            tree.set_extents(node, move.target)
            pool._release(move.source, tree.length[node], CACHED)
            self.moved_tokens += tree.length[node]
            self.published += 1
        else:
            pool._release(move.target, sum(move.target[1::2]), MOVING)
        if node:
            tree.flags[node] &= ~MOVING_FLAG
            tree.unhold(node, tree.tick[node])
            self.abandoned += not publish
        return publish

    def abandon(self, handle: int) -> None:
        """Gives a move up before its copy has ended; its target stays set aside until `finish`."""
        move = self.tickets.get(handle)
        if move is None:
            self.late_completions += 1
            return
        self._let_go(move)

    def abandon_node(self, node: int) -> None:
        """Gives up the move of a node that is about to change."""
        for move in self.tickets.values():
            if move.node == node:
                self._let_go(move)
                return

    def _let_go(self, move: Move) -> None:
        node, tree = move.node, self.pool.tree
        if not node:
            return
        move.node = 0
        self.abandoned += 1
        tree.flags[node] &= ~MOVING_FLAG
        tree.unhold(node, tree.tick[node])
