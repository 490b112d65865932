"""The admin API: one table of routes, from which requests are answered and the OpenAPI document is made.

    request ─► guard (time, room) ─► who asks ─► route ─► parameters ─► Source ─► view ─► JSON

A route says what it is for, which parameters it takes, and the type that it answers with; a handler gets parsed and
bounded values and returns a view.  What goes wrong is a `Failure`, with a code for programs and a remedy for people,
and the same for paths that there are not and for our own faults.  Nothing here knows the daemon but by the `Source`
protocol, and no handler keeps anything of it.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from aiohttp import web

from kvslot.api.admin import auth, views
from kvslot.api.admin.events import KINDS, Entry, Reader, Ring
from kvslot.api.admin.guard import BODY_BYTES, HEADERS_MOST, LINE_BYTES, Caller, Door, Guarded
from kvslot.api.admin.views import DEFINITIONS, Failure, Identity, Source, SourceError

BODY_SECONDS: Final = 5.0
"""For an act's arguments to arrive."""
STREAMS_MOST: Final = 8
"""Of /v1/events at a time: each costs an encoding of nothing and a write a second, and keeps its connection."""
FRAMES: Final = 128
"""Events sent in one go."""
PIECE: Final = 1 << 17
"""Bytes of a map sent in one go."""
LIMIT_MOST: Final = 256
"""Rows of a page, as the daemon's own pages."""
BLOCKS_MOST: Final = 1024
"""Blocks of a page: more JSON would take too long in one piece."""

OCTETS: Final = "application/octet-stream"
JSON: Final = "application/json"
STREAM: Final = "text/event-stream"

HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "kvslot",
}
"""Of every answer."""


class Parameter(NamedTuple):
    """One in the query."""

    name: str
    text: str
    schema: Mapping[str, Any]


POOL: Final = Parameter(
    "pool", "name of a pool; without it all, or the first", {"type": "string", "maxLength": 256}
)
CURSOR: Final = Parameter(
    "cursor", "`next` of the page before", {"type": "string", "pattern": "^[0-9]{1,18}$"}
)
LIMIT: Final = Parameter(
    "limit", "rows of the page at most", {"type": "integer", "minimum": 1, "maximum": LIMIT_MOST}
)
BLOCKS_LIMIT: Final = Parameter(
    "limit", "blocks of the page at most", {"type": "integer", "minimum": 1, "maximum": BLOCKS_MOST}
)
SINCE: Final = Parameter(
    "since",
    f"sequence number (ETag) of a map that the caller has: what changed since comes, as {OCTETS}",
    {"type": "integer", "minimum": 0, "maximum": 2**53},
)
ORDER: Final = Parameter(
    "order",
    "largest, most often hit, or least recently used first",
    {"type": "string", "enum": list(views.ORDERS)},
)
PREFIX_CURSOR: Final = Parameter(
    "cursor", "`next` of the page before", {"type": "string", "pattern": "^[0-9]{1,18}-[0-9]{1,18}$"}
)
FROM: Final = Parameter(
    "from",
    "number of the first event wanted, 0 for all that are kept; without it those to come. Header Last-Event-ID, "
    "which browsers send when they come back, means the one behind it",
    {"type": "integer", "minimum": 0, "maximum": 2**53},
)
ONLY: Final = Parameter("only", "one kind of events", {"type": "string", "enum": list(KINDS)})


class Call(NamedTuple):
    """What a handler gets."""

    request: web.BaseRequest
    identity: Identity
    query: Mapping[str, Any]
    """By parameter: text, or an int where the schema says so; only those given."""
    body: Any

    @property
    def pool(self) -> str:
        return str(self.query.get("pool", ""))


Handler = Callable[["Admin", Call], Awaitable[Any]]


class Route(NamedTuple):
    """A method and path."""

    method: str
    path: str
    summary: str
    handler: Handler
    answer: Any
    """Type of the JSON; None where the handler makes the response by itself."""
    parameters: tuple[Parameter, ...] = ()
    body: type[views.View] | None = None
    media: Mapping[str, Mapping[str, Any]] = {}
    """Kinds of content beside or instead of JSON, with their schemas."""
    failures: tuple[int, ...] = ()
    """Statuses of failures that only this route has."""

    @property
    def act(self) -> bool:
        return self.method == "POST"


class Fault(Protocol):
    """Told of our own faults."""

    def __call__(self, path: str, error: BaseException) -> None: ...


# -- views ------------------------------------------------------------------------------------------------------------


async def _healthz(admin: Admin, call: Call) -> Any:
    health = await admin.source.health()
    return health if health.ok else admin.json(health, 503)


async def _readyz(admin: Admin, call: Call) -> Any:
    ready = await admin.source.ready()
    return ready if ready.ready else admin.json(ready, 503)


async def _stats(admin: Admin, call: Call) -> Any:
    return await admin.source.stats()


async def _pool(admin: Admin, call: Call) -> Any:
    return views.Page(items=await admin.source.pools(call.pool))


async def _frag(admin: Admin, call: Call) -> Any:
    return views.Frags(items=await admin.source.frag(call.pool), definitions=dict(DEFINITIONS))


async def _blocks(admin: Admin, call: Call) -> Any:
    since = int(call.query.get("since", -1))
    if since >= 0 or _wants_octets(call.request):
        return await _octets(call.request, await admin.source.block_map(call.pool, since))
    return await admin.source.blocks(
        call.pool, int(call.query.get("cursor", 0)), int(call.query.get("limit", BLOCKS_MOST))
    )


def _wants_octets(request: web.BaseRequest) -> bool:
    accept = request.headers.get("Accept", "")
    return any(part.partition(";")[0].strip().lower() == OCTETS for part in accept.split(","))


async def _octets(request: web.BaseRequest, found: views.BlockMap) -> web.StreamResponse:
    """Sent in pieces, so that a map of megabytes holds up nobody."""
    response = web.StreamResponse(
        headers={
            **HEADERS,
            "Cache-Control": "no-cache",
            "Content-Type": OCTETS,
            "Content-Length": str(len(found.data)),
            "ETag": f'"{found.sequence}"',
            "X-Kvslot-Pool": found.pool,
            "X-Kvslot-Blocks": str(found.blocks),
            "X-Kvslot-Block-Size": str(found.block_size),
            "X-Kvslot-Sequence": str(found.sequence),
            "X-Kvslot-Whole": "1" if found.whole else "0",
            "Vary": "Accept",
        }
    )
    await response.prepare(request)
    if request.method != "HEAD":
        for start in range(0, len(found.data), PIECE):
            await response.write(found.data[start : start + PIECE])
            await asyncio.sleep(0)
    await response.write_eof()
    return response


async def _sessions(admin: Admin, call: Call) -> Any:
    return await admin.source.sessions(call.pool, *_page(call))


async def _namespaces(admin: Admin, call: Call) -> Any:
    return await admin.source.namespaces(call.pool, *_page(call))


def _page(call: Call) -> tuple[int, int]:
    return int(call.query.get("cursor", 0)), int(call.query.get("limit", LIMIT_MOST))


async def _prefixes(admin: Admin, call: Call) -> Any:
    return await admin.source.prefixes(
        call.pool,
        call.query.get("order", "size"),
        call.query.get("cursor", ""),
        int(call.query.get("limit", 50)),
    )


async def _pins(admin: Admin, call: Call) -> Any:
    return views.Page(items=await admin.source.pins(call.pool))


async def _latency(admin: Admin, call: Call) -> Any:
    return views.Page(items=await admin.source.latency())


async def _gaps(admin: Admin, call: Call) -> Any:
    return views.Page(items=await admin.source.gaps(call.pool))


async def _openapi(admin: Admin, call: Call) -> Any:
    return web.Response(body=admin.document, content_type=JSON, headers=HEADERS)


# -- events -----------------------------------------------------------------------------------------------------------


async def _events(admin: Admin, call: Call) -> Any:
    return await admin.stream(call)


# -- acts -------------------------------------------------------------------------------------------------------------


def _act(name: str) -> Handler:
    async def handler(admin: Admin, call: Call) -> Any:
        return await admin.source.act(name, call.body, call.identity)

    return handler


def _acts() -> list[Route]:
    table: list[tuple[str, str, type[views.View], type[views.View]]] = [
        ("defrag", "Compaction: on, off, or once to rest", views.DefragAct, views.Defragged),
        ("evict", "Evicts cached tokens that nobody holds", views.EvictAct, views.Evicted),
        ("pin", "Keeps a cached prefix", views.PinAct, views.Pinned),
        ("unpin", "Ends a pin", views.UnpinAct, views.Done),
        ("audit", "Recounts a pool from nothing", views.AuditAct, views.Audited),
        ("drain", "Ends the daemon when what runs has ended", views.DrainAct, views.Done),
        ("log-level", "Changes what is logged", views.LogLevelAct, views.Done),
        ("reload", "Reads the settings again", views.ReloadAct, views.Reloaded),
    ]
    return [
        Route("POST", f"/v1/acts/{name}", summary, _act(name), answer, body=body, failures=ACT_FAILURES)
        for name, summary, body, answer in table
    ]


ACT_FAILURES: Final = (403, 404, 408, 409, 411, 413, 415)

ROUTES: Final[tuple[Route, ...]] = (
    Route("GET", "/healthz", "Whether the daemon works, check by check", _healthz, views.Health),
    Route("GET", "/readyz", "Whether it takes new work", _readyz, views.Readiness),
    Route("GET", "/openapi.json", "This document", _openapi, dict[str, Any]),
    Route("GET", "/v1/stats", "The daemon in one row", _stats, views.Stats),
    Route(
        "GET", "/v1/pool", "Pools, with every slot by its state", _pool, views.Page[views.Pool], (POOL,),
        failures=(404,),
    ),
    Route(
        "GET", "/v1/blocks", "Blocks with the states of their slots", _blocks, views.Blocks,
        (POOL, CURSOR, BLOCKS_LIMIT, SINCE), media={OCTETS: {"type": "string", "format": "binary"}}, failures=(404,),
    ),
    Route("GET", "/v1/frag", "Fragmentation, and what its figures are", _frag, views.Frags, (POOL,), failures=(404,)),
    Route(
        "GET", "/v1/sessions", "Engines' sessions and what they hold", _sessions, views.Page[views.Session],
        (POOL, CURSOR, LIMIT), failures=(404,),
    ),
    Route(
        "GET", "/v1/namespaces", "Roots of prefix trees", _namespaces, views.Page[views.Namespace],
        (POOL, CURSOR, LIMIT), failures=(404,),
    ),
    Route(
        "GET", "/v1/prefixes", "Cached prefixes by size, hits or age", _prefixes, views.Page[views.Prefix],
        (POOL, ORDER, PREFIX_CURSOR, LIMIT), failures=(404,),
    ),
    Route("GET", "/v1/pins", "Prefixes that operators keep", _pins, views.Page[views.Pin], (POOL,), failures=(404,)),
    Route("GET", "/v1/latency", "Verbs and how long their steps take", _latency, views.Page[views.Latency]),
    Route(
        "GET", "/v1/gaps", "Idle gaps, and what compaction did with them", _gaps, views.Page[views.Gap], (POOL,),
        failures=(404,),
    ),
    Route(
        "GET", "/v1/events", "What happens, as it happens: log events, and a tick each second", _events, None,
        (FROM, ONLY), media={STREAM: {"type": "string"}},
    ),
    *_acts(),
)  # fmt: skip
"""All there is, but for what the daemon mounts beside it (/metrics, the page)."""


class Mounted(NamedTuple):
    """Something served as it is: a path, its kind, and who makes it."""

    path: str
    content_type: str
    summary: str
    make: Callable[[], Awaitable[bytes]]
    headers: Mapping[str, str] = {}
    open: bool = False
    """It holds nothing of the daemon: on TCP it is served without a token, too, and the document leaves it out."""


# -- the application --------------------------------------------------------------------------------------------------


class Admin:
    """Answers requests; `open` it on sockets, `look` at it once a second, `close` it at the end.  All on one loop."""

    def __init__(
        self,
        source: Source,
        ring: Ring,
        loop: asyncio.AbstractEventLoop,
        caller: Caller,
        *,
        connections: int,
        tokens: auth.Tokens | None = None,
        mounted: tuple[Mounted, ...] = (),
        version: str = "",
        **seconds: float,
    ) -> None:
        """`tokens`: for TCP, which is refused without any.  `seconds`: `idle_seconds` ... of `Door`."""
        from kvslot.api.admin import openapi

        self.source = source
        self.ring = ring
        self.tokens = tokens
        self._caller = caller
        self._encoder = msgspec.json.Encoder()
        self._routes: dict[str, dict[str, Route | Mounted]] = {}
        for route in ROUTES:
            self._routes.setdefault(route.path, {})[route.method] = route
        for each in mounted:
            self._routes.setdefault(each.path, {})["GET"] = each
        self.document = msgspec.json.encode(
            openapi.document(ROUTES, [each for each in mounted if not each.open], version)
        )
        self._queries = {route.path: _query_of(route) for route in ROUTES}
        self._decoder = msgspec.json.Decoder(float_hook=_whole)
        self.streams = 0
        self.requests = 0
        self.failures: dict[int, int] = {}
        # Requests are decompressed by nobody: an act's arguments are some bytes, and a bomb is some bytes, too.
        options = {
            "access_log": None, "keepalive_timeout": 86400.0, "tcp_keepalive": False, "lingering_time": 0.0,
            "max_line_size": LINE_BYTES, "max_field_size": LINE_BYTES, "max_headers": HEADERS_MOST,
            "read_bufsize": BODY_BYTES, "auto_decompress": False,
        }  # fmt: skip
        server = web.Server(self._handle, handler_cancellation=True)
        self.door = Door(loop, server, caller, most=connections, options=options, **seconds)

    def listen(self, listener: socket.socket) -> None:
        """Serves a listening socket: a Unix one, or TCP, which needs tokens."""
        if listener.family != socket.AF_UNIX and not self.tokens:
            raise ValueError("TCP is not served without tokens")
        self.door.listen(listener)

    def look(self, now: float) -> None:
        """Once a second, with the loop's time."""
        self.door.look(now)

    def drain(self) -> None:
        """The daemon is about to end: keep-alive connections are not kept, views go on."""
        self.door.drain()

    async def close(self, seconds: float = 1.0) -> None:
        """Ends all; followers of events are told."""
        self.ring.close()
        await self.door.close(seconds)

    # -- one request -------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        guarded = self.door.connections.get(request.protocol)
        if guarded is None:
            raise ConnectionResetError("the connection has gone")
        guarded.began()
        self.requests += 1
        try:
            identity = self._who(request, guarded)
            wait = guarded.charge(self.door.loop.time(), known=isinstance(identity, Identity))
            if wait:
                await asyncio.sleep(wait)
                if isinstance(identity, Identity):
                    identity = self._who(request, guarded)  # a reload may have taken its token away
            response = await self._answer(request, guarded, identity)
            last = self.door.draining or (guarded.ended_by_peer and not guarded.inner.queued)
            last = last or guarded.overstayed(self.door.loop.time())
            last = last or (isinstance(identity, SourceError) and identity.status == 503)  # there is no room
            if last or not await _read_off(request):
                response.force_close()
            return response
        finally:
            guarded.ended()

    async def _answer(
        self, request: web.BaseRequest, guarded: Guarded, identity: Identity | SourceError
    ) -> web.StreamResponse:
        try:
            return await self._respond(request, guarded, identity)
        except SourceError as error:
            return self.failure(error.status, error.code, error.message, error.remedy, request)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001 -- our own fault; it costs this answer, and is told
            self._caller.raised(request.path[:100], error)
            return self.failure(500, "internal", "the daemon failed to answer; its log says why", "", request)

    async def _respond(
        self, request: web.BaseRequest, guarded: Guarded, identity: Identity | SourceError
    ) -> web.StreamResponse:
        shown = self._routes.get(request.path, {}).get("GET")
        if isinstance(shown, Mounted) and shown.open and request.method in ("GET", "HEAD"):
            return await self._as_it_is(shown)
        if isinstance(identity, SourceError):
            raise identity
        methods = self._routes.get(request.path)
        if methods is None:
            raise SourceError(
                404, "not_found", f"there is nothing at {request.path[:100]!r}", "see /openapi.json"
            )
        method = "GET" if request.method == "HEAD" else request.method
        route = methods.get(method)
        if route is None:
            response = self.failure(
                405, "method_not_allowed", f"{request.path} is for {', '.join(methods)}", "", request
            )
            response.headers["Allow"] = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
            return response
        if isinstance(route, Mounted):
            return await self._as_it_is(route)
        query = self._queries[route.path](request)
        content = None
        if route.act:
            auth.check_origin(request.headers)
            await self.source.allow(route.path.rpartition("/")[2], identity)
            content = await self._body(request, route)
            identity = self._identify(request, guarded)  # the arguments may have come behind a reload
        answer = await route.handler(self, Call(request, identity, query, content))
        return answer if isinstance(answer, web.StreamResponse) else self.json(answer)

    async def _as_it_is(self, shown: Mounted) -> web.Response:
        headers = {**HEADERS, "Content-Type": shown.content_type, **shown.headers}
        return web.Response(body=await shown.make(), headers=headers)

    def _who(self, request: web.BaseRequest, guarded: Guarded) -> Identity | SourceError:
        try:
            return self._identify(request, guarded)
        except SourceError as error:
            return error

    def _identify(self, request: web.BaseRequest, guarded: Guarded) -> Identity:
        transport = request.transport
        sock = transport.get_extra_info("socket") if transport is not None else None
        if sock is None:
            raise ConnectionResetError("the connection has gone")
        if sock.family == socket.AF_UNIX:
            auth.check_host(request.headers.get("Host"))
            return guarded.identity(sock)
        authorization = request.headers.get("Authorization")
        try:
            identity = auth.by_token(self.tokens, authorization)
        except SourceError:
            if authorization:
                self._caller.unknown_token(_address(sock))
            raise
        guarded.enter(identity)
        return identity

    async def _body(self, request: web.BaseRequest, route: Route) -> Any:
        if not request.body_exists or request.content_length == 0:
            return self._decoded(b"{}", route)  # as `curl -X POST` sends it
        if request.content_type != JSON:
            raise SourceError(
                415, "unsupported_media_type", f"arguments are JSON, not {request.content_type[:100]!r}",
                f"send Content-Type: {JSON}",
            )  # fmt: skip
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise SourceError(415, "unsupported_media_type", "arguments are not to be compressed")
        length = request.content_length
        if length is None:
            raise SourceError(411, "length_required", "arguments come with a Content-Length")
        if length > BODY_BYTES:
            raise SourceError(413, "too_large", f"{length} bytes of arguments, and {BODY_BYTES} are the most")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                content = await request.content.readexactly(length)
        except (TimeoutError, asyncio.IncompleteReadError, web.PayloadAccessError):
            raise SourceError(
                408, "timeout", f"the arguments did not arrive within {BODY_SECONDS:.0f} s"
            ) from None
        return self._decoded(content, route)

    def _decoded(self, content: bytes, route: Route) -> Any:
        try:
            return msgspec.convert(self._decoder.decode(content), route.body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise SourceError(400, "bad_request", f"arguments: {error}") from None

    # -- answers -----------------------------------------------------------------------------------------------

    def json(self, content: Any, status: int = 200) -> web.Response:
        """An answer of JSON."""
        return web.Response(
            body=self._encoder.encode(content), status=status, content_type=JSON, headers=HEADERS
        )

    def failure(
        self, status: int, code: str, message: str, remedy: str, request: web.BaseRequest
    ) -> web.Response:
        """What was not done, and why."""
        self.failures[status] = self.failures.get(status, 0) + 1
        error = views.ErrorBody(code=code, message=message, remedy=remedy)
        response = self.json(Failure(error=error), status)
        if status == 401:
            # The second makes browsers ask for it.
            response.headers.add("WWW-Authenticate", 'Bearer realm="kvslot"')
            response.headers.add("WWW-Authenticate", 'Basic realm="kvslot", charset="UTF-8"')
        return response

    # -- events ------------------------------------------------------------------------------------------------

    async def stream(self, call: Call) -> web.StreamResponse:
        """/v1/events: what was, from a number on if that is asked for, and then what comes."""
        if self.streams >= STREAMS_MOST:
            raise SourceError(
                503,
                "too_many_streams",
                f"{STREAMS_MOST} follow events already, which is the most",
                "close one",
            )
        request = call.request
        response = web.StreamResponse(
            headers={**HEADERS, "Content-Type": f"{STREAM}; charset=utf-8", "X-Accel-Buffering": "no"}
        )
        response.force_close()
        self.streams += 1
        reader = self.ring.follow(self._first(call))
        try:
            await response.prepare(request)
            if request.method != "HEAD":
                await self._follow(reader, response, request, call.query.get("only", ""))
        finally:
            self.ring.leave(reader)
            self.streams -= 1
        return response

    def _first(self, call: Call) -> int:
        number = call.query.get("from")
        if number is not None:
            return int(number) or self.ring.first
        last = call.request.headers.get("Last-Event-ID", "")
        if last.isascii() and last.isdigit() and len(last) <= 16:
            return int(last) + 1
        return self.ring.last + 1

    async def _follow(
        self, reader: Reader, response: web.StreamResponse, request: web.BaseRequest, only: str
    ) -> None:
        guarded = self.door.connections.get(request.protocol)
        assert guarded is not None
        guarded.streaming = True
        await response.write(b"retry: 2000\n\n")
        while True:
            if reader.missed:
                said = {"from": reader.number, "first": self.ring.first}
                reader.skip_missed()
                await response.write(_frame(self.ring.first - 1, "missed", said))
            if not await reader.wait():
                await response.write(_frame(self.ring.last, "end", {"reason": "the daemon ends"}))
                return
            if guarded.stuck_for(self.door.loop.time()) > self.door.send_seconds:
                break
            entries = reader.take(FRAMES)
            frames = b"".join([each.frame() for each in entries if not only or each.kind == only])
            if frames and not await self._send(response, frames, guarded):
                break
        # Not waited for: it lies behind what the client has not read, and is cut off with it after a while.
        self.ring.dropped += 1
        self._caller.cut("does not read its events")
        note = {"reason": "too slow", "next": reader.number}
        transport = request.transport
        if transport is not None:
            frame = _frame(reader.number - 1, "dropped", note)
            transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(frame), frame))
            transport.close()

    async def _send(self, response: web.StreamResponse, frames: bytes, guarded: Guarded) -> bool:
        """Whether the client took it, or will; false once it has not read for too long."""
        try:
            async with asyncio.timeout(self.door.send_seconds):
                await response.write(frames)
        except TimeoutError:
            return False
        return True


def _address(sock: Any) -> str:
    """Of who is connected by TCP."""
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _read_off(request: web.BaseRequest) -> bool:
    """Whether another request can follow on the connection: what came with this one is little, and has been read.

    A connection that is closed with something unread may lose its answer on the way.
    """
    content = request.content
    if not request.body_exists or content.at_eof():
        return True
    if request.content_length is None or request.content_length > BODY_BYTES:
        return False
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while not content.at_eof():
                await content.readany()
    except (TimeoutError, web.PayloadAccessError, ConnectionError):
        return False
    return True


def _whole(text: str) -> int | float:
    """A number of JSON, whose whole numbers may be written 5.0, too."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) <= 2**53 else number


def _frame(number: int, kind: str, content: Any) -> bytes:
    return Entry(number, kind, msgspec.json.encode(content)).frame()


def _query_of(route: Route) -> Callable[[web.BaseRequest], dict[str, Any]]:
    """What reads the query of a route: one value for each name, of the kind and within the bounds of its schema."""
    import re

    known = {each.name: each for each in route.parameters}
    patterns = {
        name: re.compile(each.schema["pattern"]) for name, each in known.items() if "pattern" in each.schema
    }

    def read(request: web.BaseRequest) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, text in request.query.items():
            parameter = known.get(name)
            if parameter is None:
                there = f"there are {', '.join(known)}" if known else "there are none"
                raise SourceError(400, "bad_request", f"no parameter {name[:100]!r}; {there}")
            if name in found:
                raise SourceError(400, "bad_request", f"parameter {name} was given twice")
            found[name] = _value(parameter, text, patterns.get(name))
        return found

    return read


def _value(parameter: Parameter, text: str, pattern: Any) -> Any:
    schema = parameter.schema
    name = parameter.name
    if schema["type"] == "integer":
        if not (text.isascii() and text.removeprefix("-").isdigit()) or len(text) > 20:
            raise SourceError(400, "bad_request", f"{name} is a whole number")
        number = int(text)
        if not schema.get("minimum", -math.inf) <= number <= schema.get("maximum", math.inf):
            raise SourceError(
                400,
                "bad_request",
                f"{name} {number}: from {schema['minimum']} to {schema['maximum']} is allowed",
            )
        return number
    if "enum" in schema and text not in schema["enum"]:
        raise SourceError(400, "bad_request", f"{name} is one of {', '.join(schema['enum'])}")
    if pattern is not None and not pattern.fullmatch(text):
        raise SourceError(400, "bad_request", f"{name} is no such value as `next` has")
    if len(text) > schema.get("maxLength", 256):
        raise SourceError(400, "bad_request", f"{name} is longer than {schema['maxLength']} characters")
    return text


def now_text() -> str:
    """The time as events have it."""
    seconds = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds * 1000) % 1000:03d}Z"
