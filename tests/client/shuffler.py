"""What a daemon does to its pools in a test: it moves anything that can be, at any moment, and spoils what is free.

Run inside the daemon's own process before it starts (`first=` of `running`).  Beside the real server, core and sockets
there is no compactor, no plan and no pause: moves of random parts of random nodes begin, are copied early, late or not
at all, and are published or given up, after requests and between them.  Free memory is overwritten all the time, so
whoever reads a slot that is no longer his finds bytes that nobody ever computed.
"""

from __future__ import annotations

import contextlib
import mmap
import random
import time
from typing import Any

import numpy as np

from kvslot.allocator import OutOfTurn

SPOILT = 0xFF
MOVES = 24  # under way at a time


class Shuffler:
    """One pool's moves."""

    def __init__(self, server: Any, hosted: Any, seed: int, most: int) -> None:
        self.server = server
        self.hosted = hosted
        self.most = most
        self.rng = random.Random(seed)
        self.under_way: list[tuple[Any, bool]] = []  # a move, and whether its bytes are there
        description = hosted.description
        memory = np.frombuffer(mmap.mmap(hosted.device.descriptor, description.size_bytes), np.uint8)
        slots = description.blocks * description.block_size
        self.planes = [
            memory[plane.offset : plane.offset + slots * plane.slot_bytes].reshape(slots, plane.slot_bytes)
            for plane in description.planes
        ]

    def act(self) -> None:
        """Ends some moves, begins others, spoils what is free."""
        rng, pool, moves = self.rng, self.hosted.core, self.under_way
        members = tuple(self.hosted.members.values())
        if rng.random() < 0.5:
            for each in members:
                self.server.sync(each, time.monotonic())  # who steps follows
        # What is told of a move stands in the stream between replies, so none may be half given.
        settled = all(each.connection is None or each.connection.settled for each in members)
        most = self.most if members else 0  # where nobody is, everything comes to rest
        while moves and settled and (not most or rng.random() < 0.7):
            move, copied = moves.pop(rng.randrange(len(moves)))
            if not copied and rng.random() < 0.9:
                self.copy(move)
                copied = True
            pool.finish_move(move.handle, copied)
            self.server.deliver(self.hosted, time.monotonic())
        while len(moves) < most and rng.random() < 0.9:
            nodes = [node for node in pool.tree.live() if pool.tree.length[node] and pool.tree.parent[node]]
            if not nodes:
                break
            node = rng.choice(nodes)
            whole = pool.tree.length[node]
            at = rng.choice((0, rng.randrange(whole)))
            length = rng.choice((whole - at, rng.randint(1, whole - at)))
            # It may be held by somebody who does not follow, or there is no room.
            with contextlib.suppress(OutOfTurn):
                move = pool.begin_move(node, at, length)
                early = rng.random() < 0.5
                if early:
                    self.copy(move)
                moves.append((move, early))
        if moves and rng.random() < 0.1:
            pool.abandon_move(rng.choice(moves)[0].handle)
        for start, length in pool.runs.length_at.items():
            for plane in self.planes:
                plane[start : start + length] = SPOILT

    def copy(self, move: Any) -> None:
        """Its bytes, if they are still there: what was freed meanwhile is somebody else's, and so is the move."""
        sources = np.concatenate(
            [np.arange(a, a + n) for a, n in zip(move.source[::2], move.source[1::2], strict=True)]
        )
        targets = np.concatenate(
            [np.arange(a, a + n) for a, n in zip(move.target[::2], move.target[1::2], strict=True)]
        )
        for plane in self.planes:
            plane[targets] = plane[sources]


def install(seed: int, *, moves: int = MOVES) -> None:
    """Has every server of this process shuffle its pools, with so many moves at a time (0: it spoils what is free)."""
    from kvslot.daemon.server import Server

    after = Server.after
    rng = random.Random(seed)
    shufflers: dict[str, Shuffler] = {}

    def everywhere(server: Any) -> None:
        for name, hosted in server.pools.items():
            if name not in shufflers:
                shufflers[name] = Shuffler(server, hosted, seed, moves)
            shufflers[name].act()

    def between(server: Any) -> None:
        everywhere(server)
        server.loop.call_later(rng.random() * 0.002, between, server)

    def shuffling(server: Any, connection: Any, now: float) -> None:
        after(server, connection, now)
        if not shufflers:
            between(server)
        elif rng.random() < 0.3:
            everywhere(server)

    setattr(Server, "after", shuffling)  # noqa: B010 - a method may not be assigned, for the checkers
