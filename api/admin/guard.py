"""The door of the admin API: who is let in, and how long each may take over anything.

A web server trusts its clients' patience too much for a process that owns a GPU's memory.  So each connection is a
`Guarded` one: an HTTP protocol of aiohttp's with a clock on what it is waiting for.

    waiting   for the first byte of a request          idle_seconds       closed without a word
    reading   its head and body                        read_seconds       closed without a word
    handling  our own work                             as long as it takes; handlers have limits of their own
    sending   and the client does not read             send_seconds       cut off

The clock is looked at once a second, so nothing is set and cancelled for each request.  There is room for so many
connections; who comes beyond is told 503 and closed.  Unix sockets and TCP have a `Room` each, with its own count and
rates, so that who has no token holds up nobody on the machine.

Who comes by TCP is a stranger until it has shown a token that is known.  Strangers have a small place of their own
before the room, `STRANGERS_MOST`, with `STRANGER_SECONDS` and a rate of their like.  Where it is full the one that has
been there longest is closed for the one that comes: so many do not fit before it (ACCEPT_RATE) that who has a token,
and shows it with its first request, would not be through.  So no number of them keeps anybody out.

Accepting stops for a moment when descriptors run out, as on the engines' socket.  Nothing that a client does here ends
the process: what aiohttp raises costs that connection only.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Protocol

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from kvslot.api.admin.views import ErrorBody, Failure, Identity, SourceError

IDLE_SECONDS: Final = 60.0
"""Longer than scrapers wait between two scrapes by default, so that they keep their connection."""
READ_SECONDS: Final = 10.0
SEND_SECONDS: Final = 15.0
LINE_BYTES: Final = 4096
"""Of a request's first line, and of one header."""
HEADERS_MOST: Final = 64
BODY_BYTES: Final = 16 << 10
"""Of an act's arguments, which are a few words."""
ACCEPTS: Final = 4
"""Of one turn of the loop."""
ACCEPT_RATE: Final = 100.0
ACCEPT_BURST: Final = 100.0
"""Connections a second, and at once; who is quicker waits at the door."""
REQUEST_RATE: Final = 100.0
REQUEST_BURST: Final = 200.0
"""Requests a second, and at once, of all clients of a room together: at a fifth of a millisecond each they take a
fiftieth of the loop, whatever anybody does.  Who is quicker waits for the answer."""

STRANGER_RATE: Final = 20.0
STRANGER_BURST: Final = 60.0
"""The same, of requests without a token that is known: a page's own files are a few."""
STRANGER_SECONDS: Final = 5.0
"""To wait and to read, for who has not shown one; an answer later than that is its connection's last."""
STRANGERS_MOST: Final = 32
"""Connections over TCP that have not shown a token; at the rate of new ones each has a third of a second for it."""
WAIT_MOST: Final = 5.0
"""Seconds; what was asked by those who have gone meanwhile makes nobody wait longer."""

SO_PEERGROUPS: Final = 59
GROUPS_MOST: Final = 65536
_CREDENTIALS: Final = struct.Struct("3i")

FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b"
)
FULL_BODY: Final = (
    b'{"error":{"code":"too_many_connections","message":"all connections of the admin API are in use",'
    b'"remedy":"close some, or raise admin_connections"}}'
)


class Bucket:
    """So many a second, and so many at once."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at = now

    def take(self, now: float) -> float:
        """Takes one; returns the seconds until it may be used, each caller's behind the one before."""
        level = min(self._burst, self._level + (now - self._at) * self._rate) - 1.0
        self._level = max(level, -WAIT_MOST * self._rate)
        self._at = now
        return max(0.0, -self._level / self._rate)


class Caller(Protocol):
    """Told what goes on at the door."""

    def refused(self) -> None: ...
    def crowded(self) -> None: ...
    def unknown_token(self, peer: str) -> None: ...
    def cut(self, reason: str) -> None: ...
    def raised(self, where: str, error: BaseException) -> None: ...
    def accept_failed(self, reason: str) -> None: ...


class Room:
    """What the connections of one kind of listening sockets share."""

    def __init__(self, now: float, *, tokens: bool) -> None:
        """`tokens`: who comes is a stranger until it has shown one."""
        self.tokens = tokens
        self.requests = Bucket(REQUEST_RATE, REQUEST_BURST, now)
        self.strangers = Bucket(STRANGER_RATE, STRANGER_BURST, now)
        self.accepts = Bucket(ACCEPT_RATE, ACCEPT_BURST, now)


class Door:
    """All connections of one listening socket, or of several."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        server: web.Server,
        caller: Caller,
        *,
        most: int,
        options: Mapping[str, Any],
        idle_seconds: float = IDLE_SECONDS,
        read_seconds: float = READ_SECONDS,
        send_seconds: float = SEND_SECONDS,
    ) -> None:
        self.loop = loop
        self.server = server
        self.caller = caller
        self.most = most
        self.options = options
        self.idle_seconds = idle_seconds
        self.read_seconds = read_seconds
        self.send_seconds = send_seconds
        self.draining = False
        now = loop.time()
        self._unix, self._tcp = Room(now, tokens=False), Room(now, tokens=True)
        self.connections: dict[Any, Guarded] = {}  # by aiohttp's protocol, as requests know it
        self._listeners: dict[int, socket.socket] = {}
        self._joining: dict[asyncio.Task[Any], Room] = {}
        self._closed = False

    def listen(self, listener: socket.socket) -> None:
        """Accepts connections of a listening, non-blocking socket."""
        self._listeners[listener.fileno()] = listener
        self.loop.add_reader(listener.fileno(), self._accept, listener)

    def forget(self, listener: socket.socket) -> None:
        """Accepts no more there; the socket is the caller's to close, behind this."""
        if self._listeners.pop(listener.fileno(), None) is not None:
            self.loop.remove_reader(listener.fileno())

    def turn_out(self, known: Collection[str] = ()) -> None:
        """Over TCP only these tokens hold any more: who follows events by another one, or waits by none, is closed.

        Others that came in by another one are strangers again, with a stranger's time to show one that holds.
        """
        for connection in tuple(self.connections.values()):
            if connection.room is not self._tcp:
                continue
            gone = connection.known and connection.token not in known
            if (gone and connection.streaming) or (not known and connection.waiting):
                connection.abort()
            elif gone:
                connection.put_out()

    def full(self, room: Room) -> bool:
        """Whether nobody else fits; strangers stand before the room, not in it."""
        inside = sum(each.room is room and each.known for each in self.connections.values())
        return inside + sum(each is room and not room.tokens for each in self._joining.values()) >= self.most

    def _make_place(self, room: Room) -> None:
        """For one more stranger: the one that has been there longest goes."""
        strangers = [
            each
            for each in self.connections.values()
            if each.room is room and not each.known and not each.aborted
        ]
        if (
            len(strangers) + sum(each is room for each in self._joining.values()) >= STRANGERS_MOST
            and strangers
        ):
            self.caller.crowded()
            strangers[0].abort()  # they are in the order in which they came

    def _accept(self, listener: socket.socket) -> None:
        room = self._unix if listener.family == socket.AF_UNIX else self._tcp
        for _ in range(ACCEPTS):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors or memory: trying again at once would only say so again.
                self.caller.accept_failed(error.strerror or type(error).__name__)
                self.loop.remove_reader(listener.fileno())
                self.loop.call_later(0.5, self._accept_again, listener)
                return
            sock.setblocking(False)
            wait = room.accepts.take(self.loop.time())
            if wait:
                # This one comes in; the next ones wait in the socket's backlog.
                self.loop.remove_reader(listener.fileno())
                self.loop.call_later(wait, self._accept_again, listener)
            if not room.tokens and self.full(room):
                self.caller.refused()
                _turn_away(sock)
            else:
                if room.tokens:
                    self._make_place(room)
                task = self.loop.create_task(self._join(sock, room))
                self._joining[task] = room
                task.add_done_callback(self._joined)
            if wait:
                return

    def _accept_again(self, listener: socket.socket) -> None:
        if listener.fileno() in self._listeners and not self._closed:
            self.loop.add_reader(listener.fileno(), self._accept, listener)

    async def _join(self, sock: socket.socket, room: Room) -> None:
        try:
            await self.loop.connect_accepted_socket(lambda: Guarded(self, room, known=not room.tokens), sock)
        except OSError:
            sock.close()

    def _joined(self, task: asyncio.Task[Any]) -> None:
        self._joining.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            self.caller.raised("accept", task.exception() or RuntimeError())

    def look(self, now: float) -> None:
        """Once a second: closes what has taken too long."""
        for connection in tuple(self.connections.values()):
            connection.look(now)

    def drain(self) -> None:
        """From now on every answer is a connection's last, and those without a request are closed."""
        self.draining = True
        for connection in tuple(self.connections.values()):
            if connection.waiting:
                connection.abort()

    def stop_listening(self) -> None:
        """Accepts no more; the listening sockets are the caller's to close, behind this."""
        self._closed = True
        for number in self._listeners:
            self.loop.remove_reader(number)
        self._listeners.clear()

    async def close(self, seconds: float) -> None:
        """Accepts no more; what is being answered has `seconds`, all else none."""
        self.stop_listening()
        for task in tuple(self._joining):
            task.cancel()
        self.drain()
        try:
            async with asyncio.timeout(seconds):
                await self.server.shutdown(seconds / 2)
        except TimeoutError:
            pass
        for connection in tuple(self.connections.values()):
            connection.abort()


class Http(RequestHandler):
    """aiohttp's protocol, which tells how far it is, and says in JSON what it cannot read."""

    began = 0
    """Requests whose handler has been called."""

    @property
    def queued(self) -> bool:
        """Another request has been read and is to be answered."""
        return self._request_count > self.began

    @property
    def busy(self) -> bool:
        """A request is being answered, or has been read and is to be."""
        return self.queued or self._request_in_progress

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is no request of HTTP (400), and to what our own handler should not have raised (500)."""
        if status >= 500 and exc is not None and not isinstance(exc, ConnectionError):
            self.logger.error("request failed", exc_info=exc)
        text = "this is no request of HTTP" if status == 400 else "the daemon failed to answer"
        error = ErrorBody(code="bad_request" if status == 400 else "internal", message=text)
        response = web.Response(
            body=msgspec.json.encode(Failure(error=error)), status=status, content_type="application/json"
        )
        response.force_close()
        return response


class Guarded(asyncio.Protocol):
    """One connection: passes all on to aiohttp's protocol, and knows what it waits for."""

    def __init__(self, door: Door, room: Room, *, known: bool) -> None:
        self.door = door
        self.room = room
        self.known = known
        self.made = door.loop.time()
        self.inner = Http(door.server, loop=door.loop, **door.options)
        self.ended_by_peer = False
        self.transport: asyncio.Transport | None = None
        self.handling = 0
        self.streaming = False
        self._since = door.loop.time()
        self._reading = False
        self._stuck_since = 0.0
        self._closing_since = 0.0
        self._identity: Identity | None = None
        self.aborted = False
        self.token = ""
        """That it has shown, as logs call it."""

    @property
    def waiting(self) -> bool:
        """No request of it is being read or answered."""
        return not self.handling and not self._reading

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "abort")
        self.transport = transport  # type: ignore[assignment]  # uvloop's is none of asyncio's classes
        self.door.connections[self.inner] = self
        self._call("connection_made", self.inner.connection_made, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.door.connections.pop(self.inner, None)
        self.transport = None
        self._call("connection_lost", self.inner.connection_lost, exc)

    def data_received(self, data: bytes) -> None:
        if self.waiting:
            self._reading, self._since = True, self.door.loop.time()
        self._call("data_received", self.inner.data_received, data)

    def eof_received(self) -> bool:
        # Whoever has said all that it had to say may still want the answers; the last one closes.
        self.ended_by_peer = True
        return self.inner.busy

    def pause_writing(self) -> None:
        self._stuck_since = self.door.loop.time()
        self._call("pause_writing", self.inner.pause_writing)

    def resume_writing(self) -> None:
        self._stuck_since = 0.0
        self._call("resume_writing", self.inner.resume_writing)

    def _call(self, where: str, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 -- a client may not end the process
            self.door.caller.raised(where, error)
            self.abort()

    def identity(self, sock: socket.socket) -> Identity:
        """Who connected to a Unix socket, by the kernel's word."""
        if self._identity is None:
            raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, uid, gid = _CREDENTIALS.unpack(raw)
            self._identity = Identity(how="unix", pid=pid, uid=uid, gid=gid, groups=_groups_of(sock))
        return self._identity

    def enter(self, identity: Identity) -> None:
        """It is known who that is; SourceError 503 where the room has no place for one more."""
        if not self.known and self.door.full(self.room):
            self.door.caller.refused()
            error = msgspec.json.decode(FULL_BODY, type=Failure).error
            raise SourceError(503, error.code, error.message, error.remedy)
        self.known, self.token = True, identity.token

    def put_out(self) -> None:
        """Its token holds no more: it has no place in the room, and is to show another one."""
        self.known, self.token = False, ""
        self.made = self.door.loop.time()

    def charge(self, now: float, *, known: bool) -> float:
        """Of a request by one that is known, or is not: seconds until it may be answered."""
        return (self.room.requests if known else self.room.strangers).take(now)

    def overstayed(self, now: float) -> bool:
        """It has been here for a while, and not said who it is."""
        return not self.known and now - self.made > STRANGER_SECONDS

    def began(self) -> None:
        """A request's head has been read, and its handler runs."""
        self.handling += 1
        self.inner.began += 1
        self._reading = False

    def ended(self) -> None:
        """Its handler is done; the answer is sent behind this."""
        self.handling -= 1
        self._since = self.door.loop.time()

    def abort(self) -> None:
        """Ends it at once."""
        self.aborted = True
        if self.transport is not None:
            self.transport.abort()

    @property
    def stuck(self) -> bool:
        """The client does not read, and enough of an answer waits for it."""
        return self._stuck_since > 0

    def stuck_for(self, now: float) -> float:
        """Seconds that the client has not read what waits for it."""
        return now - self._stuck_since if self._stuck_since else 0.0

    def look(self, now: float) -> None:
        """Cuts it off where it has taken too long."""
        door, transport = self.door, self.transport
        most = door.idle_seconds if self.known else STRANGER_SECONDS
        if transport is None:
            return
        if transport.is_closing():
            self._closing_since = self._closing_since or now
            if now - self._closing_since > door.send_seconds:
                self._cut("does not read the last of an answer")
        elif self.stuck_for(now) > (2 * door.send_seconds if self.streaming else door.send_seconds):
            self._cut("does not read an answer")
        elif self.handling:
            return
        elif self.ended_by_peer and not self.inner.busy:
            transport.close()
        elif self._reading and now - self._since > min(door.read_seconds, most):
            self._cut("has not sent a whole request")
        elif not self._reading and now - self._since > most:
            self.abort()

    def _cut(self, reason: str) -> None:
        self.door.caller.cut(reason)
        self.abort()


def _groups_of(sock: socket.socket) -> tuple[int, ...]:
    """The supplementary groups of who connected, as they were then."""
    for room in (256, GROUPS_MOST):
        try:
            told = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 4 * room)
        except OSError:
            continue  # more than fit; a kernel that does not know fails both times
        return struct.unpack(f"{len(told) // 4}I", told)
    return ()


def _turn_away(sock: socket.socket) -> None:
    """Says why, as far as that fits without waiting, and closes."""
    try:
        sock.send(FULL % (len(FULL_BODY), FULL_BODY))
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass
    sock.close()
