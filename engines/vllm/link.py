"""The scheduler's connection to the daemon, which may be absent, end, and come again; vLLM never waits for that.

The first attempt is made at once, so that the first request finds what is cached.  Later ones are made by a thread
of their own, `RETRY_FIRST` seconds after a loss and twice as long after each failure, up to `RETRY_MOST`: opening a
session waits for the daemon's answer, and a scheduler has no time for that.  The thread ends when it has an answer; the
client that it made is the scheduler's from then on.

A connection that is lost leaves a session behind, whose slots the daemon keeps aside while this process lives.  When
the worker says that it has let go of that session's memory, the old client is closed, and the session released through
the new one.  A view of that memory that is alive somewhere in this process puts that off until it is gone.

A pool that is not made for this engine is looked at again every `RETRY_MOST` seconds: the daemon may be started anew
with another.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from kvslot.api.client import Client, Token
from kvslot.api.wire import KvslotError, Refused
from kvslot.engines.vllm.messages import Session

RETRY_FIRST: Final = 0.5
RETRY_MOST: Final = 30.0
LEAVE_RETRY: Final = 1.0

log: Final = logging.getLogger("vllm.kvslot")  # below vLLM's own, so that its lines go where vLLM's go

local: Final[dict[Token, Client]] = {}
"""The clients of this process's links: a worker in the same process uses that one's memory."""


class Unfit(Exception):
    """The pool is not made for this engine: the message says how."""


class Link:
    """At most one live client."""

    def __init__(
        self,
        open_client: Callable[[], Client],
        check: Callable[[Client], None],
        socket: str = "",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_client` makes a client or raises KvslotError; `check` raises Unfit for a pool of no use.

        `socket`: where the worker finds the daemon, too.
        """
        self._open = open_client
        self._socket = socket
        self._check = check
        self._clock = clock
        self._client: Client | None = None
        self._pause = RETRY_FIRST
        self._retry_at = 0.0
        self._thread: threading.Thread | None = None
        self._made: list[Client | Exception] = []  # by the thread: one
        self._old: dict[int, Client] = {}  # lost, and their memory may still be in use
        self._leaving: set[int] = set()  # of those, what the worker has let go of
        self._leave_at = 0.0
        self._release: list[Token] = []
        self._closed = False
        self.session: Session | None = None
        """Of the live client."""
        self.generation = 0
        self.attempts = 0
        self.losses = 0
        self.unfit = ""
        """What is wrong with the pool that was found last; "" where nothing is."""
        self._attempt()
        self._take()

    @property
    def client(self) -> Client | None:
        """The live client.  Costs nothing while there is one."""
        if self._leaving and self._clock() >= self._leave_at:
            self._leave()
        if self._client is None and not self._closed:
            self._poll()
        return self._client

    def lost(self, error: Exception) -> None:
        """The live client is of no use any more."""
        if self._client is None:
            return
        log.warning("kvslot: going on without the daemon: %s", error)
        self._old[self.generation] = self._client
        self._client = self.session = None
        self.losses += 1
        self._pause = RETRY_FIRST
        self._retry_at = self._clock() + self._pause

    def let_go(self, generation: int) -> None:
        """The worker uses that generation's memory no more."""
        if generation in self._old:
            self._leaving.add(generation)
            self._leave()

    def close(self) -> None:
        """Ends everything."""
        if self._thread is not None:
            self._thread.join()
            self._take()
        self._closed = True
        clients = [*self._old.values(), *([self._client] if self._client else [])]
        self._old.clear()
        self._leaving.clear()
        self._client = self.session = None
        for client in clients:
            local.pop(client.token, None)
            with contextlib.suppress(BufferError):
                client.close()

    def _leave(self) -> None:
        """Closes lost clients whose memory the worker has let go of."""
        for generation in sorted(self._leaving):
            client = self._old[generation]
            local.pop(client.token, None)
            try:
                client.close()
            except BufferError:
                # A view is alive somewhere in this process: its slots stay aside as long as that.
                if not self._leave_at:
                    log.warning(
                        "kvslot: memory of an earlier session is still in use, and is kept until it is not"
                    )
                self._leave_at = self._clock() + LEAVE_RETRY
                continue
            self._leaving.discard(generation)
            del self._old[generation]
            self._release.append(client.token)
        self._released()

    def _poll(self) -> None:
        if self._thread is not None:
            if not self._made:
                return
            self._thread.join()
            self._thread = None
            self._take()
        elif self._clock() >= self._retry_at:
            self._thread = threading.Thread(target=self._attempt, name="kvslot-connect", daemon=True)
            self._thread.start()

    def _attempt(self) -> None:
        self.attempts += 1
        try:
            self._made.append(self._open())
        except Exception as error:  # noqa: BLE001 - whatever it is, vLLM goes on without
            self._made.append(error)

    def _take(self) -> None:
        made = self._made.pop() if self._made else None
        if isinstance(made, Client):
            try:
                self._check(made)
            except Unfit as error:
                if self.unfit != str(error):
                    self.unfit = str(error)
                    log.error("kvslot: not used: %s", error)
                made.close()
                self._pause = RETRY_MOST
                self._retry_at = self._clock() + self._pause
                return
            self.unfit = ""
            self._client = made
            self.generation += 1
            token = made.token
            local[token] = made
            self.session = Session(self.generation, self._socket, made.pool.name, token)
            self._pause = RETRY_FIRST
            log.info("kvslot: session %d with %s", token.session, self.session.socket)
            self._released()
        elif made is not None:
            if self.attempts == 1:
                log.warning("kvslot: no daemon yet, going on without: %s", made)
            self._retry_at = self._clock() + self._pause
            self._pause = min(2 * self._pause, RETRY_MOST)

    def _released(self) -> None:
        """Ends sessions that were lost and are of no more use: what is left of them, a restarted daemon keeps, too."""
        client = self._client
        try:
            while client is not None and self._release:
                with contextlib.suppress(Refused):  # of a daemon that started anew
                    client.release(self._release[-1])
                self._release.pop()
        except KvslotError as error:
            self.lost(error)
