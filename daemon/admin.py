"""The daemon as the admin API sees it: views of copies, acts through the control door, and the sockets it is served on.

    aiohttp ─► api/admin ─► Views (rows of inspection.py, as structs)      ─► JSON
                       └──► act ─► Asker ─► Server.answer ─► verbs.TABLE       the same door as for control verbs

It all runs on the daemon's loop, between clients' verbs, so it is done in pieces of half a millisecond at most, by the
clock (maps, evicting) or by count (rows of a page, nodes looked through): what looks at a whole pool lets the others
have their turn again and again, and says what it saw over some milliseconds.

An act is answered by `Server.answer` like a control verb of a client, with the permission of the user who asks; what it
changes is logged with who that was, and what it is refused, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec
import numpy as np
import structlog

from kvslot.api.admin import (
    Admin,
    Identity,
    Mounted,
    Ring,
    SourceError,
    TokenError,
    metrics,
    now_text,
    page,
    views,
)
from kvslot.api.admin.auth import Tokens
from kvslot.api.admin.guard import STRANGERS_MOST, Guarded
from kvslot.api.wire import CODES, Refused, decode_outgoing, messages
from kvslot.daemon import config, doors, inspection, logs
from kvslot.daemon.blocks import BlockMaps
from kvslot.daemon.endpoint import Endpoint
from kvslot.daemon.health import Check
from kvslot.daemon.logs import limited, sparing
from kvslot.daemon.membership import Peer
from kvslot.daemon.scrape import Scraped

if TYPE_CHECKING:
    from kvslot.daemon.compactor import Compactor
    from kvslot.daemon.connection import Connection
    from kvslot.daemon.pools import HostedPool
    from kvslot.daemon.server import Server

CLOSE_SECONDS: Final = 1.0
"""For answers under way when the daemon ends."""
TOKEN_LINES: Final = 10
"""Of tokens that are not known, in ten seconds; the others are counted."""
ACT_LINES: Final = 20
"""Of refused acts a second; the others are counted."""
AUDIT_SECONDS: Final = 600.0
EVICT_TURNS: Final = 500_000
"""Of one act: each is a slice of the verb's (`verbs.EVICT_NS`)."""

log = structlog.stdlib.get_logger("kvslot.daemon")

Shown = TypeVar("Shown", bound=msgspec.Struct)


def shown(row: Mapping[str, Any], kind: type[Shown], **more: Any) -> Shown:
    """A row of inspection as a view; ValidationError where they have drifted apart."""
    return msgspec.convert({**row, **more}, kind)


# -- views ------------------------------------------------------------------------------------------------------------


class Views:
    """`Source` over a server."""

    def __init__(self, server: Server, ring: Ring) -> None:
        self._server = server
        self._health = server.health
        self._ring = ring
        self.maps = BlockMaps()
        self.admin: Callable[[], views.AdminStats] = views.AdminStats
        self._counts: dict[str, tuple[int, int]] = {}  # by verb, at the last tick
        self._classes: dict[str, list[int]] = {}

    def _rows(
        self, kind: str, pool: str = "", cursor: int = 0, limit: int = 0
    ) -> tuple[list[dict[str, Any]], str | None]:
        try:
            rows, after = inspection.rows(kind, self._server.view(), cursor, limit, pool=pool)
        except Refused as refused:
            raise _as_source_error(refused.code, str(refused)) from None
        return rows, str(after) if after else None

    def _hosted(self, pool: str) -> HostedPool:
        try:
            return self._server.hosted(pool)
        except Refused as refused:
            raise _as_source_error(refused.code, str(refused)) from None

    async def health(self) -> views.Health:
        """Every check; none of them waits."""
        checks = [
            views.Check(
                name=each.name,
                ok=each.ok,
                vital=each.vital,
                reason=f"{each.reason}; {each.remedy}" if each.remedy else each.reason,
            )
            for each in self._health.checks()
        ]
        return views.Health(ok=all(each.ok for each in checks if each.vital), checks=checks)

    async def ready(self) -> views.Readiness:
        server = self._server
        if server.stopped.is_set():
            return views.Readiness(ready=False, reason="ending")
        if server.draining:
            return views.Readiness(ready=False, reason="draining: no new sessions and sequences are taken")
        return views.Readiness(ready=True, reason="serving")

    async def stats(self) -> views.Stats:
        server = self._server
        (row,), _ = self._rows("status")
        latency = server.latency
        return shown(
            row, views.Stats, admin=self.admin(), pid=os.getpid(), connections=len(server.connections),
            accepted=server.accepted, refused_connections=server.refused_connections, peer_faults=server.peer_faults,
            requests=sum(latency.counts.values()), refused=sum(latency.refused.values()),
            log_level=server.settings.log_level, log_lines_lost=logs.lost(), events_last=self._ring.last,
        )  # fmt: skip

    async def pools(self, pool: str) -> list[views.Pool]:
        rows, _ = self._rows("pools", pool)
        return [shown(row, views.Pool) for row in rows]

    async def frag(self, pool: str) -> list[views.Frag]:
        rows, _ = self._rows("frag", pool)
        return [shown(row, views.Frag) for row in rows]

    async def sessions(self, pool: str, cursor: int, limit: int) -> views.Page[views.Session]:
        rows, after = self._rows("sessions", pool, cursor, limit)
        return views.Page(items=[shown(row, views.Session) for row in rows], next=after)

    async def namespaces(self, pool: str, cursor: int, limit: int) -> views.Page[views.Namespace]:
        rows, after = self._rows("namespaces", pool, cursor, limit)
        return views.Page(items=[shown(row, views.Namespace) for row in rows], next=after)

    async def pins(self, pool: str) -> list[views.Pin]:
        found: list[views.Pin] = []
        for hosted in [self._hosted(pool)] if pool else self._server.pools.values():
            cursor = 0
            while True:
                rows, after = self._rows("pins", hosted.name, cursor)
                found += [shown(row, views.Pin, pool=hosted.name) for row in rows]
                if after is None:
                    break
                cursor = int(after)
                await asyncio.sleep(0)
        return found

    async def latency(self) -> list[views.Latency]:
        steps: dict[str, list[views.Step]] = {}
        for row in self._server.latency.steps():
            steps.setdefault(row["verb"], []).append(_step(row))
        rows, _ = self._rows("latency", limit=inspection.ROWS)
        return [
            views.Latency(
                verb=row["verb"], count=row["count"], refused=row["refused"], sampled=row["sampled"],
                steps=steps.get(row["verb"], []),
            )
            for row in rows
        ]  # fmt: skip

    async def gaps(self, pool: str) -> list[views.Gap]:
        rows, _ = self._rows("defrag", pool)
        return [_gap(row, self._server.compactors[row["pool"]]) for row in rows]

    # -- whole pools, in slices --------------------------------------------------------------------------------

    async def blocks(self, pool: str, cursor: int, limit: int) -> views.Blocks:
        hosted = self._hosted(pool)
        core = hosted.core
        size, blocks = core.block_size, core.config.blocks
        stop = min(cursor + limit, blocks)
        items: list[views.Block] = []
        step = max(1, 8192 // size)
        while cursor < stop:
            end = min(cursor + step, stop, cursor + 128)
            states = np.frombuffer(hosted.states[cursor * size : end * size], dtype=np.uint8)
            table = states.reshape(-1, size)
            sums = [np.count_nonzero(table == state, axis=1).tolist() for state in range(8)]
            for index, (free, private, cached, fenced, moving, reserved, quarantined, padding) in enumerate(
                zip(*sums, strict=True)
            ):
                items.append(
                    views.Block(
                        block=cursor + index, free=free, private=private, cached=cached, fenced=fenced,
                        moving=moving, reserved=reserved, quarantined=quarantined, padding=padding,
                    )
                )  # fmt: skip
            cursor = end
            await asyncio.sleep(0)
        return views.Blocks(
            pool=hosted.name, block_size=size, blocks=blocks, items=items,
            next=str(stop) if stop < blocks else None,
        )  # fmt: skip

    async def block_map(self, pool: str, since: int) -> views.BlockMap:
        return await self.maps.read(self._hosted(pool), since)

    async def prefixes(self, pool: str, order: str, cursor: str, limit: int) -> views.Page[views.Prefix]:
        hosted = self._hosted(pool)
        return await prefixes(hosted, order, cursor, limit)

    # -- once a second -----------------------------------------------------------------------------------------

    async def tick(self) -> views.Tick:
        server = self._server
        return views.Tick(
            time=now_text(),
            uptime_s=round(time.monotonic() - server.started, 3),
            sessions=len(server.sessions),
            sequences=sum(len(each.core.sequences) for each in server.pools.values()),
            connections=len(server.connections),
            draining=server.draining,
            pools=[self._pool_tick(each) for each in server.pools.values()],
            verbs=self._verb_ticks(),
            recordings=[
                msgspec.convert(each, views.Recording) for each in server.recorders.rows(time.monotonic())
            ],
        )

    def _pool_tick(self, hosted: HostedPool) -> views.PoolTick:
        told = hosted.core.statistics()
        compactor = self._server.compactors[hosted.name]
        gaps, totals = compactor.gaps(), compactor.gap_totals()
        size, trail = hosted.core.block_size, compactor.mover.trail
        moved = [[source // size, target // size, tokens] for source, target, tokens in trail]
        trail.clear()
        row = msgspec.structs.asdict(told)
        row["internal_fragmentation_pct"] = 100 * row.pop("internal_fragmentation")
        return shown(
            row, views.PoolTick, pool=hosted.name,
            scatter_pct=100 * (1 - told.largest_free_run / told.free) if told.free else 0.0,
            compaction=compactor.state, gap=gaps is not None and gaps.idle,
            gap_s=totals.idle_s, granted_s=totals.granted_s, moved=moved,
        )  # fmt: skip

    def _verb_ticks(self) -> list[views.VerbTick]:
        """What was asked since the last tick."""
        latency = self._server.latency
        found = []
        classes = {row["verb"]: row["classes"] for row in latency.steps() if row["step"] == "all"}
        for kind, count in latency.counts.items():
            verb, refused = kind.__name__, latency.refused.get(kind, 0)
            count_before, refused_before = self._counts.get(verb, (0, 0))
            if count == count_before:
                continue
            self._counts[verb] = count, refused
            now, before = classes.get(verb, []), self._classes.get(verb, [])
            fresh = [each - (before[index] if index < len(before) else 0) for index, each in enumerate(now)]
            self._classes[verb] = now
            found.append(
                views.VerbTick(
                    verb=verb, count=count - count_before, refused=refused - refused_before,
                    p50_us=_percentile(fresh, 0.5), p99_us=_percentile(fresh, 0.99),
                )
            )  # fmt: skip
        return found

    # -- acts --------------------------------------------------------------------------------------------------

    async def allow(self, name: str, identity: Identity) -> None:
        """Whether the door is open for who asks; it is asked again by the act itself."""
        asker = Asker(self._server, identity)
        if not asker.control:
            error = asker.denied(name)
            self._refused(name, error, identity)
            raise error

    def _refused(self, name: str, error: SourceError, identity: Identity) -> None:
        sparing(
            log, "act_refused", ACT_LINES, level="warning", act=name, by=identity.text(), how=identity.how,
            code=error.code, reason=error.message[:240], pid=identity.pid, uid=identity.uid,
        )  # fmt: skip

    async def act(self, name: str, arguments: Any, identity: Identity) -> msgspec.Struct:
        """Through the control door, with the asker's permission; logged either way."""
        asker = Asker(self._server, identity)
        try:
            answer = await self._acts(name, arguments, asker)
        except SourceError as error:
            self._refused(name, error, identity)
            raise
        log.info(
            "act", act=name, by=identity.text(), how=identity.how, pid=identity.pid, uid=identity.uid,
            arguments=msgspec.to_builtins(arguments),
        )  # fmt: skip
        return answer

    async def _acts(self, name: str, arguments: Any, asker: Asker) -> msgspec.Struct:
        match arguments:
            case views.DefragAct(action=action, pool=pool):
                told = await asker.ask(messages.Defrag(1, pool, action), messages.Defragged)
                gaps = [
                    _gap(msgspec.structs.asdict(each), self._server.compactors[each.pool])
                    for each in told.pools
                ]
                return views.Defragged(items=gaps)
            case views.EvictAct(tokens=tokens, pool=pool):
                return views.Evicted(tokens=await self._evict(tokens, pool, asker))
            case views.PinAct(node=node, depth=depth, tokens=tokens, pool=pool):
                pinned = await asker.ask(messages.Keep(1, pool, node, depth + tokens), messages.Pinned)
                return views.Pinned(pin=pinned.pin, tokens=pinned.length)
            case views.UnpinAct(pin=pin, pool=pool):
                await asker.ask(messages.Unkeep(1, pin, pool), messages.Done)
            case views.AuditAct(pool=pool):
                audited = await asker.ask(messages.Audit(1, pool), messages.Audited)
                return views.Audited(
                    ok=not audited.faults, faults=audited.faults, milliseconds=audited.milliseconds
                )
            case views.DrainAct(deadline_ms=deadline_ms):
                await asker.ask(messages.Drain(1, deadline_ms), messages.Done)
            case views.LogLevelAct(level=level):
                await asker.ask(messages.SetConfig(1, "log_level", level), messages.Done)
            case views.ReloadAct():
                reloaded = await asker.ask(messages.Reload(1), messages.Reloaded)
                return views.Reloaded(
                    changed=reloaded.changed, needs_restart=reloaded.needs_restart, taken=reloaded.taken,
                    failed=reloaded.failed,
                )  # fmt: skip
            case _:
                raise SourceError(404, "not_found", f"there is no act {name!r}")
        return views.Done()

    async def _evict(self, tokens: int, pool: str, asker: Asker) -> int:
        """In turns, as `kvslotctl` asks for them: a verb evicts for less than half a millisecond."""
        gone = 0
        for _ in range(EVICT_TURNS):
            some = (await asker.ask(messages.Evict(1, tokens - gone, pool), messages.Evicted)).tokens
            gone += some
            if not some or gone >= tokens:
                break
            await asyncio.sleep(0.002)
        return gone


def _step(row: Mapping[str, Any]) -> views.Step:
    classes = row["classes"]
    return views.Step(
        step=row["step"],
        mean_us=row["seconds"] / row["sampled"] * 1e6 if row["sampled"] else 0.0,
        p50_us=_percentile(classes, 0.5),
        p99_us=_percentile(classes, 0.99),
        max_us=(1 << len(classes) - 1) / 1e3 if classes else 0.0,
    )


def _percentile(classes: list[int], share: float) -> float:
    """The upper edge, in microseconds, of the class that the percentile falls in; 0 of none."""
    left = share * sum(classes)
    for power, count in enumerate(classes):
        left -= count
        if count and left <= 0:
            return (1 << power) / 1e3
    return 0.0


def _gap(row: Mapping[str, Any], compactor: Compactor) -> views.Gap:
    """How compaction stands, and what it has seen of gaps, whether it is looking at them just now or not."""
    gaps, totals = compactor.gaps(), compactor.gap_totals()
    found = {
        "watched": gaps is not None,
        "engines": gaps.engines if gaps else 0,
        "stalled": gaps.stalled if gaps else 0,
        "idle": gaps is not None and gaps.idle,
        "gaps": totals.gaps,
        "idle_s": totals.idle_s,
        "granted_s": totals.granted_s,
        "surprise": gaps.surprise if gaps else 1.0,
    }
    return shown({**row, **found}, views.Gap)


# -- prefixes ---------------------------------------------------------------------------------------------------------

CHUNK: Final = 8192
"""Node numbers looked through at a time."""
NODE_BITS: Final = 31
NODE_MOST: Final = (1 << NODE_BITS) - 1
FIGURE_MOST: Final = (1 << 31) - 1
"""Figures beyond are one to the order."""
WALK: Final = 4096
"""Nodes up to a root that are followed to find a prefix's namespace."""


async def prefixes(hosted: HostedPool, order: str, cursor: str, limit: int) -> views.Page[views.Prefix]:
    """Nodes by size or hits (most first) or age (oldest first), then by number.

    The cursor is the last one's figure and number: a page holds those behind it in the order as it is then, so that
    what does not change is listed once.  All are looked through for each page, some thousand at a time.
    """
    core = hosted.core
    tree = core.tree
    after = 1 << 62
    if cursor:
        figure, _, number = cursor.partition("-")
        after = min(int(figure), FIGURE_MOST) << NODE_BITS | max(0, NODE_MOST - int(number))
    best: list[
        int
    ] = []  # of what has been looked at, the first `limit` and one more, as figure and number in one
    for start in range(0, len(tree.keys), CHUNK):
        stop = min(start + CHUNK, len(tree.keys))
        live = np.frombuffer(tree.parent[start:stop], dtype=np.int32).nonzero()[0]
        if order == "age":
            figures = core.tick - np.frombuffer(tree.tick[start:stop], dtype=np.int64)[live]
        elif order == "hits":
            figures = np.frombuffer(tree.hits[start:stop], dtype=np.int64)[live]
        else:
            figures = np.frombuffer(tree.length[start:stop], dtype=np.int32)[live].astype(np.int64)
        keys = np.minimum(figures, FIGURE_MOST) << NODE_BITS | (NODE_MOST - start - live)
        keys = keys[keys < after]
        if len(keys) > limit + 1:
            keys = np.partition(keys, len(keys) - limit - 1)[-limit - 1 :]
        best = sorted([*best, *keys.tolist()], reverse=True)[: limit + 1]
        await asyncio.sleep(0)
    items = []
    for index, key in enumerate(best[:limit]):
        if not index % 16:
            await asyncio.sleep(0)
        node = NODE_MOST - (key & NODE_MOST)
        if node < len(tree.keys) and tree.parent[node]:
            items.append(_prefix(hosted, node))
    if len(best) <= limit:
        return views.Page(items=items)
    last = best[limit - 1]
    return views.Page(items=items, next=f"{last >> NODE_BITS}-{NODE_MOST - (last & NODE_MOST)}")


def _prefix(hosted: HostedPool, node: int) -> views.Prefix:
    core = hosted.core
    tree = core.tree
    root = node
    for _ in range(WALK):
        if not tree.parent[root]:
            break
        root = tree.parent[root]
    scattered = tree.slot[node] < 0
    return views.Prefix(
        node=node,
        namespace=root if not tree.parent[root] else 0,
        parent=tree.parent[node],
        depth=tree.depth[node],
        tokens=tree.length[node],
        extents=len(tree.scattered[node]) >> 1 if scattered else 1 + (tree.head[node] != tree.length[node]),
        hits=tree.hits[node],
        age=core.tick - tree.tick[node],
        holds=tree.holds[node],
        priority=tree.priority[node],
        leaf=not tree.kid[node],
    )


# -- acts through the control door -----------------------------------------------------------------------------------

STATUSES: Final[Mapping[str, tuple[int, str]]] = {
    "BadRequest": (400, "bad_request"),
    "Denied": (403, "denied"),
    "NotFound": (404, "not_found"),
    "TooLarge": (413, "too_large"),
    "Busy": (503, "busy"),
    "ShuttingDown": (503, "shutting_down"),
}
"""By the wire's refusals; all others are conflicts."""


def _snake(name: str) -> str:
    """OutOfTurn -> out_of_turn."""
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in name).lstrip("_")


def _as_source_error(code: int, message: str) -> SourceError:
    name = CODES[code].__name__
    status, word = STATUSES.get(name, (409, _snake(name)))
    remedy = ""
    if name == "Denied":
        remedy = "ask as the daemon's own user, root, or one of control_uids and control_gids; on TCP, with a token of "
        remedy += "admin_act_token_file"
    return SourceError(status, word, message, remedy)


DENIED: Final = next(code for code, kind in CODES.items() if kind.__name__ == "Denied")
Told = TypeVar("Told", bound=messages.Message)


class Asker:
    """What `Server.answer` takes for a connection: one that says control verbs for an HTTP request."""

    def __init__(self, server: Server, identity: Identity) -> None:
        self._server = server
        self._identity = identity
        self._sent: asyncio.Future[bytes] | None = None
        if identity.how == "token":
            self.peer = Peer(-1, -1, -1)
            self.control = identity.acts
        else:
            self.peer = Peer(identity.pid, identity.uid, identity.gid, identity.groups)
            self.control = server.may_control(self.peer)
        self.member = None
        self.used = True
        self.closed = False
        self.in_batch = False

    async def ask(self, request: messages.Request, kind: type[Told]) -> Told:
        """The verb's reply; a refusal of any kind becomes a SourceError."""
        if not self.control:
            raise self.denied(type(request).__name__)
        self._sent = self._server.loop.create_future()
        reply = self._server.answer(cast("Connection", self), request, time.monotonic())
        if reply is None:
            try:
                async with asyncio.timeout(AUDIT_SECONDS):
                    reply = cast("messages.Reply", decode_outgoing(await self._sent))
            except TimeoutError:
                raise SourceError(503, "busy", f"no answer within {AUDIT_SECONDS:.0f} s") from None
            finally:
                self.closed = True
        if isinstance(reply, messages.Error):
            raise _as_source_error(reply.code, reply.message)
        assert isinstance(reply, kind)
        return reply

    def denied(self, what: str) -> SourceError:
        """What is to be said to one who may not."""
        if self._identity.how == "token":
            return _as_source_error(DENIED, f"{what}: token {self._identity.token} may look, and not act")
        uid = self._identity.uid
        return _as_source_error(DENIED, f"{what}: user {uid} may look, and not act")

    def send(self, frame: bytes) -> None:
        """A reply that comes later: a frame, with its length."""
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(bytes(frame[4:]))

    def finish(self) -> None:
        """Nothing to end."""

    def fault(self, fault: BaseException) -> None:
        """Acts are made here: one that breaks the protocol is our own fault."""
        raise fault


# -- being served ----------------------------------------------------------------------------------------------------


class AdminService:
    """The admin API of one server: made before it is ready, run in its task group, closed with it.

    A door that cannot be had (doors.py) is no reason not to serve engines: that is told, and tried again at a reload.
    """

    def __init__(self, server: Server, settings: config.Settings) -> None:
        self._server = server
        self.ring = Ring()
        self.views = Views(server, self.ring)
        self._endpoints: list[Endpoint] = []
        self._tcp: socket.socket | None = None
        self._tcp_for = ""  # the setting that it was opened for
        self._address = ""
        self._shut: dict[str, doors.Shut] = {}
        """By door; a TCP that is served with tokens of before, or where it was before, among them."""
        self._closed = False
        self.api = Admin(
            self.views, self.ring, server.loop, self, connections=settings.admin_connections,
            mounted=self._mounted(), version=server.version,
        )  # fmt: skip
        self.refused_connections = 0
        self.cut_connections = 0
        self.faults = 0
        self.views.admin = self.statistics

    def statistics(self) -> views.AdminStats:
        """What the API counts of itself."""
        api = self.api
        return views.AdminStats(
            connections=len(api.door.connections), streams=api.streams, requests=api.requests,
            failures=sum(api.failures.values()), refused_connections=self.refused_connections,
            cut_connections=self.cut_connections, dropped_streams=self.ring.dropped, faults=self.faults,
        )  # fmt: skip

    def _mounted(self) -> tuple[Mounted, ...]:
        exposition = metrics.Exposition(Scraped(self._server))
        scraped = Mounted("/metrics", metrics.CONTENT_TYPE, "For Prometheus", exposition.render)
        return (scraped, *page.mounted(self.views, self.ring))

    def listen(self, settings: config.Settings) -> None:
        """Opens what can be had of the sockets."""
        logs.taps.append(self._logged)
        self._take_socket(
            doors.open_socket(settings, self._server.service.store), asked=settings.admin_socket
        )
        if settings.admin_tcp:
            tokens = doors.read(settings)
            self._take_tcp(doors.open_tcp(settings, tokens), tokens, settings)
        self._say_ready()

    def _take_socket(self, found: list[doors.Listener] | doors.Shut, *, asked: str) -> None:
        if isinstance(found, doors.Shut):
            self._say_shut(found, "error" if asked else "warning")
            return
        self._shut.pop("admin_socket", None)
        self._endpoints = [endpoint for endpoint, _ in found]
        for _, listening in found:
            self.api.listen(listening)

    def _take_tcp(
        self, found: socket.socket | doors.Shut, tokens: Tokens | TokenError, settings: config.Settings
    ) -> None:
        if isinstance(found, doors.Shut):
            self._say_shut(found, "error")
            return
        assert isinstance(tokens, Tokens)
        self._shut.pop("admin_tcp", None)
        self.api.tokens = tokens
        self._tcp, self._tcp_for = found, settings.admin_tcp
        host, port = found.getsockname()[:2]
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.api.listen(found)

    def _say_shut(self, shut: doors.Shut, level: str) -> None:
        self._shut[shut.door] = shut
        getattr(log, level)(
            "admin_unavailable", door=shut.door, where=shut.where, reason=shut.reason, remedy=shut.remedy
        )

    def _say_ready(self) -> None:
        if self._endpoints or self._tcp is not None:
            path = str(self._endpoints[0].path) if self._endpoints else ""
            log.info("admin_ready", socket=path, tcp=self.address)

    @property
    def has_socket(self) -> bool:
        """Whether the Unix socket is served."""
        return bool(self._endpoints)

    def checks(self) -> list[Check]:
        """Of /healthz: each door that the settings ask for."""
        found = []
        asked = {"admin_socket": True, "admin_tcp": bool(self._server.settings.admin_tcp)}
        served = {
            "admin_socket": str(self._endpoints[0].path) if self._endpoints else "", "admin_tcp": self.address
        }  # fmt: skip
        for door in (name for name, wanted in asked.items() if wanted):
            shut = self._shut.get(door)
            if shut is None:
                found.append(Check(door, ok=True, reason=f"served at {served[door]}", vital=False))
                continue
            reason = f"{self._how(shut)}: {shut.reason}"
            found.append(Check(door, ok=False, reason=reason, vital=False, remedy=shut.remedy))
        return found

    def _how(self, shut: doors.Shut) -> str:
        """What is served at a door that is not as its settings say."""
        if shut.door == "admin_socket" or self._tcp is None:
            return f"{shut.where} is not served"
        if self._tcp_for == shut.where:
            return f"{shut.where} is served with the tokens of before"
        return f"{shut.where} is not served, {self.address} is served as before"

    @property
    def address(self) -> str:
        """Of TCP, as bound; empty without it."""
        return self._address

    async def run(self) -> None:
        """Once a second: looks at connections, and tells what there is to tell."""
        loop = self._server.loop
        drained = False
        while True:
            await asyncio.sleep(1.0)
            try:
                self.api.look(loop.time())
                self.views.maps.look(loop.time())
                self.ring.add("tick", await self.views.tick())
                if self._server.draining and not drained:
                    drained = True
                    self.api.drain()
            except Exception as error:  # noqa: BLE001 -- engines are served all the same
                self.raised("tick", error)

    async def reload(self, settings: config.Settings) -> tuple[list[str], list[str]]:
        """The settings have been read again: tokens are, and doors that are shut are tried; in sentences.

        What is new, and what cannot be had.  Tokens stay as they were where files cannot be used; TCP stays where it
        is as long as the new address cannot be had, unless settings no longer allow the old one.
        """
        taken: list[str] = []
        failed: list[str] = []
        if self._tcp is not None and not _allowed(settings, self._tcp):
            taken.append(f"admin_tcp: {self.address} is closed")
            self._close_tcp()
        if not settings.admin_tcp:
            self._shut.pop("admin_tcp", None)
        else:
            tokens = await asyncio.to_thread(doors.read, settings)
            if self._tcp is not None and isinstance(tokens, Tokens):
                taken += self._change_tokens(tokens)
            elif self._tcp is not None and isinstance(tokens, TokenError):
                log.error("admin_tokens_kept", reason=tokens.reason, remedy=tokens.remedy)
                self._shut["admin_tcp"] = doors.Shut(
                    "admin_tcp", settings.admin_tcp, tokens.reason, f"{tokens.remedy}, {doors.AGAIN}"
                )
                failed.append(f"tokens: those of before hold on, {_of_tokens(self.api.tokens)}: {tokens}")
            if self._tcp_for != settings.admin_tcp and not self._closed:
                taken += await self._move_tcp(settings, tokens)
            if self._closed:
                return taken, failed
        if not self._endpoints:
            found = await asyncio.to_thread(doors.open_socket, settings, self._server.service.store)
            if self._closed:
                for endpoint, _ in found if not isinstance(found, doors.Shut) else ():
                    endpoint.close()
                return taken, failed
            self._take_socket(found, asked=settings.admin_socket)
            if self._endpoints:
                taken.append(f"admin_socket: served at {self._endpoints[0].path} from now on")
        if any(" from now on" in each for each in taken):
            self._say_ready()
        failed += [
            f"{each.door}: {self._how(each)}: {each.reason}: {each.remedy}"
            for each in self._shut.values()
            if each.door == "admin_socket" or self._tcp_for != settings.admin_tcp
        ]
        return taken, failed

    async def _move_tcp(self, settings: config.Settings, tokens: Tokens | TokenError) -> list[str]:
        """Serves TCP at another address than before, or none; where that cannot be had all is as before."""
        old, before, kept = self._tcp, self.address, None
        if old is None:
            opened = await asyncio.to_thread(doors.open_tcp, settings, tokens)
        else:
            self.api.door.forget(old)  # who connects meanwhile waits in its backlog
            opened, kept = await asyncio.to_thread(doors.move_tcp, settings, tokens, old)
        if self._closed:
            for each in (opened, kept):
                if isinstance(each, socket.socket):
                    each.close()
            return []
        taken = []
        if kept is not None and isinstance(opened, doors.Shut):
            self._tcp = kept
            self.api.listen(kept)
        elif old is not None:
            taken.append(f"admin_tcp: {before} is closed")
            self._close_tcp()
        self._take_tcp(opened, tokens, settings)
        if not isinstance(opened, doors.Shut):
            taken.append(f"admin_tcp: served at {self.address} from now on")
        return taken

    def _change_tokens(self, tokens: Tokens) -> list[str]:
        """Those of the files hold from now on, and who is connected with another one is not any more."""
        self._shut.pop("admin_tcp", None)
        before = self.api.tokens.names if self.api.tokens is not None else {}
        self.api.tokens = tokens
        if before == tokens.names:
            return []
        self.api.door.turn_out(tokens.names)
        new = sorted(tokens.names.keys() - before.keys())
        gone = sorted(before.keys() - tokens.names.keys())
        log.info("admin_tokens", look=_look(tokens), act=_act(tokens), new=new, gone=gone)
        said = f"tokens: {_of_tokens(tokens)} hold from now on"
        said += f"; new: {', '.join(new)}" if new else ""
        return [said + (f"; no longer: {', '.join(gone)}" if gone else "")]

    def _close_tcp(self) -> None:
        if self._tcp is not None:
            self.api.door.forget(self._tcp)
            self._tcp.close()
            self._tcp, self._tcp_for, self._address = None, "", ""
        self.api.door.turn_out()
        self.api.tokens = None

    def caused(self, context: Mapping[str, Any]) -> bool:
        """Whether what the loop's handler of exceptions was told of is one HTTP connection's affair."""
        protocol = context.get("protocol")
        task = context.get("task") or context.get("future")
        ours = isinstance(protocol, Guarded)
        if isinstance(task, asyncio.Task):
            code = getattr(task.get_coro(), "cr_code", None)
            ours = ours or (code is not None and "aiohttp" in code.co_filename)
        if ours:
            error = context.get("exception")
            self.raised(
                str(context.get("message"))[:100], error if isinstance(error, BaseException) else OSError()
            )
        return ours

    async def close(self) -> None:
        """Ends all connections, and gives the sockets back."""
        if self._logged in logs.taps:
            logs.taps.remove(self._logged)
        await self.api.close(CLOSE_SECONDS)
        self.close_sockets()

    def close_sockets(self) -> None:
        """Gives the sockets back."""
        self._closed = True
        self.api.door.stop_listening()
        if self._tcp is not None:
            self._tcp.close()
        for endpoint in self._endpoints:
            endpoint.close()

    def _logged(self, fields: Mapping[str, Any]) -> None:
        event = {name: value for name, value in fields.items() if name not in ("exc_info", "stack_info")}
        with contextlib.suppress(
            Exception
        ):  # whatever is wrong with this copy, the line itself is to be written
            error = fields.get("exc_info")
            if isinstance(error, BaseException):
                event["exception"] = "".join(traceback.format_exception(error)).rstrip()
            self.ring.add("log", event)

    # -- told by the door --------------------------------------------------------------------------------------

    def refused(self) -> None:
        """Too many connections."""
        self.refused_connections += 1
        limited(log, "admin_refused", 10.0, connections=self._server.settings.admin_connections)

    def crowded(self) -> None:
        """Too many over TCP that show no token: the one that has been there longest was closed."""
        self.cut_connections += 1
        limited(log, "admin_crowded", 10.0, connections=STRANGERS_MOST)

    def unknown_token(self, peer: str) -> None:
        """Somebody showed a token that is none of ours, or no longer."""
        sparing(log, "admin_token_unknown", TOKEN_LINES, 10.0, level="warning", peer=peer)

    def cut(self, reason: str) -> None:
        """A client was too slow."""
        self.cut_connections += 1
        limited(log, "admin_cut", 10.0, level="info", kind=reason, reason=reason)

    def raised(self, where: str, error: BaseException) -> None:
        """A fault of ours, or of the HTTP server; it cost one answer."""
        self.faults += 1
        limited(
            log, "admin_fault", 10.0, level="error", where=where, reason=repr(error)[:240], exc_info=error
        )

    def accept_failed(self, reason: str) -> None:
        """Out of descriptors, most likely."""
        limited(log, "accept_failed", 10.0, reason=reason)


def start(server: Server, settings: config.Settings) -> AdminService:
    """Opens the admin API, as far as it can be had."""
    service = AdminService(server, settings)
    service.listen(settings)
    return service


def _allowed(settings: config.Settings, tcp: socket.socket) -> bool:
    """Whether TCP may be served where it is, by settings that may want it elsewhere."""
    host = tcp.getsockname()[0]
    return bool(settings.admin_tcp) and (settings.admin_tcp_any or ipaddress.ip_address(host).is_loopback)


def _look(tokens: Tokens | None) -> list[str]:
    return [name for name, acts in (tokens.names if tokens is not None else {}).items() if not acts]


def _act(tokens: Tokens | None) -> list[str]:
    return [name for name, acts in (tokens.names if tokens is not None else {}).items() if acts]


def _of_tokens(tokens: Tokens | None) -> str:
    """How many there are of either kind."""
    return f"{len(_look(tokens))} that may look and {len(_act(tokens))} that may act"
