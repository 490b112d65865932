"""The asyncio client, for tools: the verbs of `Client` as coroutines, over a Protocol rather than streams.

It maps nothing and has no page: its fences are 0, and that a reply has come is all the completion there is.  Requests
of several tasks go out as they are made, and replies come in that order.  Engines use `Client`, which is faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from kvslot.api.client.client import _program
from kvslot.api.client.connection import default_socket, remedy
from kvslot.api.client.errors import AdmissionTimeout, Closed, NeverFits, OutOfRoom, WrongProcess
from kvslot.api.client.session import Event, Session, Statistics
from kvslot.api.client.table import SENT, SETTLED, Table, Tokens, freed, token_bytes
from kvslot.api.wire import (
    FRAME_BYTES,
    VERSION,
    BadRequest,
    Disconnected,
    KvslotError,
    Namespace,
    OutOfTurn,
    PeerFault,
    Reader,
    Refused,
    decode_outgoing,
    encode,
    messages,
    refusal,
)
from kvslot.api.wire.messages import (
    Admitted,
    Allocate,
    Batch,
    Commit,
    Committed,
    Done,
    Extend,
    Fork,
    Forked,
    Free,
    Grown,
    Later,
    Never,
    Results,
    Trim,
    Trimmed,
)

M = TypeVar("M", bound=msgspec.Struct)


class AsyncSequence(Table):
    """One running request of an AsyncClient."""

    __slots__ = ("_client", "_lock")

    def __init__(self, client: AsyncClient, number: int, namespace: int, priority: int) -> None:
        super().__init__(number, namespace, priority)
        self._client = client
        self._lock = asyncio.Lock()

    async def append(self, token: int) -> int:
        """The slot for `token`, which becomes the sequence's last; waits only where no room has come in time."""
        if self._slot == self._stop:
            async with self._lock:
                self._check()
                if self._slot + self._base == self.capacity:
                    await self._client._make_room(self, 1)
                if self._slot == self._stop:
                    self._advance()
        slot = self._slot
        self._tell(token)
        self._slot = slot + 1
        return slot

    async def reserve(self, tokens: int) -> None:
        """Sees to it that `tokens` more can be appended without waiting.  Raises OutOfRoom."""
        async with self._lock:
            self._check()
            if tokens > self.room:
                await self._client._make_room(self, tokens)

    async def commit(self, length: int | None = None, *, priority: int = -1, expiry_ms: int = 0) -> int:
        """Publishes positions [0, length) (all, unless said), which are written; how many are shareable now."""
        self._check()
        client = self._client
        if client._copying:
            await client._settle(self)  # what comes with more room may have to be copied first
        if self._spoiled is not None:
            raise self._spoiled
        self._check_copies()
        if length is None:
            length = self.length
        if not 0 <= length <= self.length:
            raise BadRequest(f"commit to {length}: the sequence has {self.length} tokens")
        number = client._session.next_id()
        request = Commit(number, self.id, length, self._untold(length), priority, expiry_ms, self._taken)
        self._was_told(length)  # before others of our tasks go on: what they tell comes after it
        try:
            return (await client._call(request, Committed)).length
        except Refused as error:
            self._spoiled = error
            raise

    async def fork(self, length: int | None = None, *, ticket: int = 0) -> AsyncSequence | Later:
        """A sequence of its own that shares the first `length` tokens (all, unless said) without a copy."""
        self._check()
        length = self.length if length is None else length
        if not 0 < length <= self.length:
            raise BadRequest(f"fork at {length}: the sequence has {self.length} tokens")
        async with self._lock:
            return await self._client._fork(self, length, ticket)

    async def trim(self, *, keep_from: int = 0, keep_to: int | None = None) -> int:
        """Drops positions before `keep_from` (sliding window) and from `keep_to` on (roll-back); the capacity then."""
        async with self._lock:
            self._check()
            length = self.length
            keep_to = length if keep_to is None else keep_to
            if not 0 <= keep_from <= keep_to or not 0 < keep_to <= length:
                raise BadRequest(f"keep [{keep_from}, {keep_to}) of a sequence of {length} tokens")
            client = self._client
            if keep_to < length:
                if keep_to >= self._own_from and keep_to >= self._told:
                    self._roll_back(keep_to)
                else:
                    await client._settle(self)
                    self._check_copies()
                    request = Trim(client._session.next_id(), self.id, 0, keep_to)
                    self._asked = SENT  # nothing else about its room, as long as this is under way
                    try:
                        answer = await client._call(request, Trimmed)
                    except Refused:
                        self._asked = SETTLED
                        raise
                    self._trimmed(keep_to, answer.capacity, answer.extents)
            if keep_from > self.kept_from:
                request = Trim(client._session.next_id(), self.id, keep_from, written=self.length)
                await client._call(request, Trimmed)
                self.kept_from = keep_from
            return self.capacity

    async def free(self) -> None:
        """Ends the sequence.  The object is of no use afterwards."""
        self._check()
        client = self._client
        request = Free(client._session.next_id(), self.id)
        client._session.forget(self, freed(self.id))
        await client._call(request, Done)

    def _check_copies(self) -> None:
        if self._copies:
            raise OutOfTurn(f"sequence {self.id} has copies that are still to be made: see take_copies")

    def _ask(self) -> None:
        self._client._session.ask(self)
        self._client._say_soon()


class AsyncClient(asyncio.Protocol):
    """A session with the daemon on an event loop: `async with AsyncClient(...) as client`."""

    def __init__(
        self,
        socket: str = "",
        *,
        name: str = "",
        pool: str = "",
        namespace: Namespace | None = None,
        page: int = 1,
        append: str = "",
        peel_max: int = -1,
        quota: int = 0,
        fingerprint: str = "",
    ) -> None:
        """As `Client`, without the memory; connects with `open` or at the head of the `async with`."""
        self.path = socket or default_socket()
        self._pid = os.getpid()
        self._hello = messages.Hello(
            1, VERSION, name or _program(), pool, namespace or Namespace(), fingerprint, page, append, peel_max, False,
            False, quota,
        )  # fmt: skip
        self._copying = False  # whether more room may come with copies; known with the Welcome
        self._transport: asyncio.Transport | None = None
        self._reader = Reader(FRAME_BYTES + 1024)
        self._replies: deque[tuple[msgspec.Struct, asyncio.Future[messages.Outgoing]]] = deque()
        self._fault: KvslotError | None = Closed("the client has not been opened")
        self._writable = asyncio.Event()
        self._writable.set()
        self._news = asyncio.Event()
        self._gone: asyncio.Future[None] | None = None
        self._due: asyncio.Handle | None = None
        self._again: asyncio.Handle | None = None
        self._frames_sent = self._frames_received = 0
        self._namespaces: dict[Namespace, int] = {}

    async def open(self) -> Self:
        """Connects and opens the session; raises as `Client` does."""
        loop = asyncio.get_running_loop()
        self._gone = loop.create_future()
        try:
            await loop.create_unix_connection(lambda: self, self.path)
        except OSError as error:
            raise Disconnected(f"no daemon at {self.path}: {remedy(error, self.path)}") from error
        self._fault = None
        try:
            answer = await self._send(self._hello)
            if not isinstance(answer, messages.Welcome):
                raise self._broken(f"{type(answer).__name__} came where Welcome was due")
        except BaseException:
            self._drop(Closed("the client could not be opened"))
            raise
        self.description = answer.pool
        """The pool."""
        self.namespace = answer.namespace
        """The number of the namespace that requests go to unless they say otherwise."""
        self.limits = answer.limits
        """What the daemon allows one session."""
        self._namespaces[self._hello.namespace] = answer.namespace
        self._copying = self._hello.page > 1 or (self._hello.append or answer.pool.append) != "chain"
        self._session = Session(answer.limits, answer.pool.quantum, 0)
        return self

    async def close(self) -> None:
        """Ends the session; all that it holds goes back at once."""
        if self._transport is None or self._gone is None:
            return
        if self._fault is None:
            with contextlib.suppress(KvslotError):
                await self._call(messages.Bye(self._session.next_id()), Done)
        self._drop(Closed("the client was closed"))
        await self._gone

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- verbs -----------------------------------------------------------------------------------------------------

    async def allocate(
        self,
        tokens: Tokens,
        *,
        namespace: int | Namespace | None = None,
        ticket: int = 0,
        priority: int = 0,
        contiguous: bool = False,
        wait_for_commit: bool = False,
    ) -> AsyncSequence | Later | Never:
        """Starts a sequence, if there is room now; see `Client.allocate`."""
        data, root = token_bytes(tokens), await self._root(namespace)
        session = self._session
        sequence = AsyncSequence(self, session.next_sequence(), root, priority)
        request = Allocate(
            session.next_id(), root, sequence.id, data, ticket, priority, contiguous, wait_for_commit
        )
        answer = await self._ask(request)
        if isinstance(answer, Admitted):
            sequence._begin(len(data) >> 2, answer)
            session.sequences[sequence.id] = sequence
            return sequence
        if isinstance(answer, Later | Never):
            return answer
        raise self._broken(f"{type(answer).__name__} is no answer to Allocate")

    async def admit(
        self,
        tokens: Tokens,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the ticket has to be withdrawn, by us
        namespace: int | Namespace | None = None,
        priority: int = 0,
        contiguous: bool = False,
        wait_for_commit: bool = False,
    ) -> AsyncSequence:
        """As `allocate`, waiting until there is room.  Raises NeverFits, and AdmissionTimeout (a TimeoutError)."""
        data, root = token_bytes(tokens), await self._root(namespace)
        end = None if timeout is None else time.monotonic() + timeout
        ticket = 0
        while True:
            answer = await self.allocate(
                data, namespace=root, ticket=ticket, priority=priority, contiguous=contiguous,
                wait_for_commit=wait_for_commit,
            )  # fmt: skip
            if isinstance(answer, AsyncSequence):
                return answer
            if isinstance(answer, Never):
                raise NeverFits(answer)
            ticket = answer.ticket
            if not await self._wait_for(ticket, time.monotonic() + answer.retry_after_ms / 1e3, end):
                with contextlib.suppress(Refused):
                    await self.withdraw(ticket)
                raise AdmissionTimeout(timeout or 0.0, answer)

    async def probe(self, tokens: Tokens, *, namespace: int | Namespace | None = None) -> int:
        """How many tokens of this prompt a sequence would find cached now; changes nothing."""
        data, root = token_bytes(tokens), await self._root(namespace)
        return (await self._call(messages.Probe(self._session.next_id(), root, data), messages.Probed)).hit

    async def pin(self, tokens: Tokens, *, namespace: int | Namespace | None = None) -> tuple[int, int]:
        """Keeps what is cached of a prefix: the pin's number, and how many tokens it keeps; 0, 0 where none are."""
        data, root = token_bytes(tokens), await self._root(namespace)
        answer = await self._call(messages.Pin(self._session.next_id(), root, data), messages.Pinned)
        return answer.pin, answer.length

    async def unpin(self, pin: int) -> None:
        """Ends a pin."""
        await self._call(messages.Unpin(self._session.next_id(), pin), Done)

    async def withdraw(self, ticket: int) -> None:
        """Gives a ticket up."""
        await self._call(messages.Withdraw(self._session.next_id(), ticket), Done)

    async def open_namespace(self, namespace: Namespace) -> int:
        """The number of a namespace, for the calls that take one.  Known ones cost nothing."""
        number = self._namespaces.get(namespace)
        if number is None:
            request = messages.OpenNamespace(self._session.next_id(), namespace)
            number = self._namespaces[namespace] = (await self._call(request, messages.Opened)).namespace
        return number

    async def events(self) -> AsyncIterator[Event]:
        """What the daemon pushes, as it comes; ends with Disconnected."""
        while True:
            while self._session.events:
                key = next(iter(self._session.events))
                yield self._session.events.pop(key)
            if self._fault is not None:
                raise self._fault
            self._news.clear()
            await self._news.wait()

    def statistics(self) -> Statistics:
        """What this client has done."""
        return self._session.statistics(self._frames_sent, self._frames_received)

    # -- asyncio's side ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._drop(Disconnected(f"the connection to {self.path} has ended: {exc or 'the daemon closed it'}"))
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)

    def pause_writing(self) -> None:
        """Called by the loop."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Called by the loop."""
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        try:
            bodies = self._reader.feed(data)
            self._frames_received += len(bodies)
            for body in bodies:
                self._take(decode_outgoing(body))
        except PeerFault as fault:
            self._drop(PeerFault(f"the daemon at {self.path} broke the protocol: {fault}"))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _take(self, message: messages.Outgoing) -> None:
        """One message, in the order of the stream."""
        number = getattr(message, "id", -1)
        session = getattr(self, "_session", None)
        if isinstance(message, messages.Error) and not number:
            why: KvslotError = refusal(message.code, message.message)
            if session is not None:
                why = Disconnected(f"the daemon at {self.path} has ended the connection: {message.message}")
            self._drop(why)
            return
        if self._replies and number == getattr(self._replies[0][0], "id", 0):
            request, waiting = self._replies.popleft()
            if not waiting.cancelled():
                waiting.set_result(message)
            elif session is not None:
                session.given_up += 1
                session.given_up_reply(request, message)
                self._say_soon()
        elif session is None or not session.apply(message):
            raise PeerFault(f"{type(message).__name__} came, and nothing like it was asked")
        elif session.due:
            self._say_soon()
        if session is not None and session.waiting and self._again is None:
            wait = min(table._retry_at for table in session.waiting.values()) - time.monotonic()
            self._again = asyncio.get_running_loop().call_later(max(wait, 0.001), self._ask_again)
        self._news.set()

    def _drop(self, fault: KvslotError) -> None:
        """The connection is over: whoever waits is told."""
        if self._fault is None or isinstance(fault, Closed):
            self._fault = fault
        for handle in (self._due, self._again):
            if handle is not None:
                handle.cancel()
        self._due = self._again = None
        if self._transport is not None:
            if isinstance(fault, PeerFault):
                self._transport.abort()
            else:
                self._transport.close()
        while self._replies:
            _, waiting = self._replies.popleft()
            if not waiting.done():
                waiting.set_exception(self._fault)
        session = getattr(self, "_session", None)
        if session is not None:
            for table in list(session.sequences.values()):
                session.forget(table, self._fault)
        self._news.set()
        self._writable.set()

    def _broken(self, why: str) -> KvslotError:
        self._drop(PeerFault(f"the daemon at {self.path} broke the protocol: {why}"))
        assert self._fault is not None
        return self._fault

    def _say_soon(self) -> None:
        """What is due leaves in this turn of the loop, all in one frame."""
        if self._due is None and self._fault is None:
            self._due = asyncio.get_running_loop().call_soon(self._say)

    def _say(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._fault is None and self._transport is not None:
            for frame in self._session.pack(0, 0, 0):
                self._frames_sent += 1
                self._transport.write(frame)

    def _ask_again(self) -> None:
        """The time of a LATER is over."""
        self._again = None
        self._session.retry(time.monotonic())
        self._say()

    def _check(self) -> None:
        if self._fault is not None:
            raise self._fault
        if os.getpid() != self._pid:
            raise WrongProcess(f"this client belongs to process {self._pid}; a forked process opens its own")

    async def _send(self, request: msgspec.Struct) -> messages.Outgoing:
        await self._writable.wait()
        self._check()
        assert self._transport is not None
        session = getattr(self, "_session", None)
        frame = encode(request)
        if session is not None:
            session.fits(frame)
            session.calls += 1
            if session.due:
                self._say()
        waiting: asyncio.Future[messages.Outgoing] = asyncio.get_running_loop().create_future()
        self._replies.append((request, waiting))
        self._frames_sent += 1
        self._transport.write(frame)
        answer = await waiting
        if isinstance(answer, messages.Error):
            raise refusal(answer.code, answer.message)
        return answer

    async def _ask(self, request: msgspec.Struct) -> messages.Outgoing:
        return await self._send(request)

    async def _call(self, request: msgspec.Struct, kind: type[M]) -> M:
        answer = await self._send(request)
        if type(answer) is not kind:
            raise self._broken(f"{type(answer).__name__} came where {kind.__name__} was due")
        return answer

    async def _fork(self, parent: AsyncSequence, length: int, ticket: int) -> AsyncSequence | Later:
        session = self._session
        await self._settle(parent)
        parent._check_copies()
        child = AsyncSequence(self, session.next_sequence(), parent.namespace, parent.priority)
        batch = Batch(
            session.next_id(),
            [Fork(1, parent.id, child.id, length, length, ticket, parent._taken), Extend(1, child.id)],
        )
        parent._asked = SENT  # the parent stays where it is, as long as this is under way
        try:
            forked, grown = (await self._call(batch, Results)).results
        finally:
            if parent._fault is None:
                parent._asked = SETTLED
                parent._note_run(parent.room)
                parent._seat(parent.length)
        if isinstance(forked, Later):
            return forked
        if isinstance(forked, messages.Error):
            raise refusal(forked.code, forked.message)
        if not isinstance(forked, Forked):
            raise self._broken(f"{type(forked).__name__} is no answer to Fork")
        child._fork_from(parent, forked.length)
        parent._own_from = max(parent._own_from, forked.length)
        session.sequences[child.id] = child
        session.first_room(child, grown)
        return child

    async def _make_room(self, table: AsyncSequence, tokens: int) -> None:
        session = self._session
        session.waits += 1
        if table._asked != SETTLED:
            await self._settle(table)
            if table.room >= tokens:
                return
        if (table._answer is not None or table._error is not None) and time.monotonic() < table._retry_at:
            raise OutOfRoom(table.id, table.length, table._answer) from table._error
        answer = table._answer
        ticket = 0
        if isinstance(answer, Later):
            ticket = answer.ticket
            session.waiting.pop(ticket, None)
        missing = tokens - table.room if tokens > 1 else 0
        table._asked = SENT  # nothing else about its room, as long as this is under way
        try:
            reply = await self._ask(Extend(session.next_id(), table.id, table.length, missing, ticket))
        except Refused:
            table._asked = SETTLED
            raise
        if isinstance(reply, Grown):
            table._grown(reply)
            if table.room < tokens:
                raise OutOfRoom(table.id, table.length, None)
        elif isinstance(reply, Later | Never):
            session.denied(table, reply)
            raise OutOfRoom(table.id, table.length, reply)
        else:
            raise self._broken(f"{type(reply).__name__} is no answer to Extend")

    async def _settle(self, table: AsyncSequence) -> None:
        """Waits until nothing about the sequence's room is under way."""
        while table._asked != SETTLED:
            self._check()
            if self._session.due:
                self._say()
            self._news.clear()
            await self._news.wait()
            table._check()

    async def _wait_for(self, ticket: int, until: float, end: float | None) -> bool:
        """Waits for a push about `ticket`, or `until`; False when `end` has come."""
        tickets = self._session.tickets
        tickets[ticket] = False
        try:
            while not tickets[ticket]:
                self._check()
                now = time.monotonic()
                if end is not None and now >= end:
                    return False
                if now >= until:
                    return True
                self._news.clear()
                limit = until if end is None else min(until, end)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), limit - now)
            return True
        finally:
            del tickets[ticket]

    async def _root(self, namespace: int | Namespace | None) -> int:
        self._check()
        if namespace is None:
            return self.namespace
        return await self.open_namespace(namespace) if isinstance(namespace, Namespace) else namespace


__all__ = ["AsyncClient", "AsyncSequence"]
