"""Where clients' sockets are looked at: one epoll of our own, whose descriptor is the only one that the loop knows.

When several clients have sent something, all are received and answered first and their replies are sent afterwards,
back to back: each `send` wakes a process, and the first to be woken would take the processor from those still waiting
to be answered.  One client alone is answered at once.  A round looks again a few times before it goes back to the loop,
which costs more than an epoll of a few sockets does.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvslot.daemon.connection import Connection

MOST: Final = 64
"""Sockets of one look."""
LOOKS: Final = 4
"""In one round of the loop: at MOST clients each, all else waits a few milliseconds at the worst."""


class Hub:
    """The sockets that are being read."""

    def __init__(self, loop: asyncio.AbstractEventLoop, after: Callable[[], None]) -> None:
        """`after` is called at the end of each round in which anybody was served."""
        self.rounds = 0  # in which anybody was served
        self._loop = loop
        self._after = after
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        loop.add_reader(self._epoll.fileno(), self._ready)

    def add(self, number: int, connection: Connection) -> None:
        """Begins to read from a socket."""
        self._epoll.register(number, select.EPOLLIN)
        self._connections[number] = connection

    def remove(self, number: int) -> None:
        """Ends reading from it."""
        del self._connections[number]
        self._epoll.unregister(number)

    def close(self) -> None:
        """Ends all."""
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _ready(self) -> None:
        poll, connections = self._epoll.poll, self._connections
        for _ in range(LOOKS):
            events = poll(0, MOST)
            if not events:
                return
            self.rounds += 1
            if len(events) == 1:
                connection = connections.get(events[0][0])
                if connection is not None:
                    connection.readable()
                self._after()
                continue
            held: list[Connection] = []
            for number, _ in events:
                connection = connections.get(number)
                if connection is not None:  # or it was ended by what another of them asked
                    connection.hold()
                    held.append(connection)
                    connection.readable()
            for connection in held:
                connection.release()
            self._after()
