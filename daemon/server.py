"""The daemon: one loop, one thread, all clients.

    socket ──► Connection ──► answer() ──► verbs.TABLE ──► core        a verb is one call and atomic
                                 │
                               after()  ── tells sessions what the core wants told (Ready, Preempt, ...)

    ticks      every 5 ms while a fence waits or while anybody waits for memory, else none
    sweep      after a session's end, in slices of `slice_us` between two rounds of the loop
    upkeep     once a second: deadlines, stalled sessions, namespaces nobody uses, an idle moment for the collector

Whatever a client sends is answered, refused or ends its connection.  What a handler raises beyond a refusal is our own
fault: the process says so and ends, and the kernel takes back what it held.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import math
import os
import resource
import secrets
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from kvslot import __version__
from kvslot import allocator as core
from kvslot.allocator import Life
from kvslot.allocator.moves import FOLLOWS_FOR
from kvslot.allocator.results import Moved
from kvslot.allocator.slots import FENCED
from kvslot.api.wire import (
    BadRequest,
    Busy,
    Denied,
    NotFound,
    OutOfTurn,
    PeerFault,
    Refused,
    ShuttingDown,
    TooLarge,
    encode,
    messages,
)
from kvslot.api.wire.errors import CODES
from kvslot.daemon import config, inspection, logs, process
from kvslot.daemon.collector import Collector
from kvslot.daemon.compactor import Compactor
from kvslot.daemon.config import CHANGEABLE, RELOADABLE, RETRIED
from kvslot.daemon.connection import LONG_TOKENS, Connection, Long
from kvslot.daemon.device import huge
from kvslot.daemon.device.memory import MemoryDevice, NoMemory
from kvslot.daemon.endpoint import Endpoint, EndpointError, claim
from kvslot.daemon.health import Health
from kvslot.daemon.hub import Hub
from kvslot.daemon.identity import Identity, is_act
from kvslot.daemon.journal.warm import Kept, Warm
from kvslot.daemon.latency import Latency
from kvslot.daemon.logs import asked, limited, sparing
from kvslot.daemon.membership import Member, Peer, ended, peer_of
from kvslot.daemon.pools import HostedPool
from kvslot.daemon.recorder import Recorders
from kvslot.daemon.scrub import Scrubber
from kvslot.daemon.service import Service
from kvslot.daemon.totals import Totals
from kvslot.daemon.verbs import POSTED, REFUSALS, TABLE, Permission, Row

if TYPE_CHECKING:
    from kvslot.daemon.admin import AdminService

TICK_SECONDS: Final = 0.005
UPKEEP_SECONDS: Final = 1.0
REPLENISH_NS: Final = 50_000
"""Of evicting ahead, between two rounds of the hub."""
SWEEP_PAUSE: Final = 4
"""Times as long as a slice of cleaning up took, the others have the processor."""
RINGS_MOST: Final = 32
RING_SECONDS: Final = 0.01
"""Bells of one client that are heard in so long, then none for as long: else one could keep the daemon busy with it."""
PROGRESS_SECONDS: Final = 2.0
DESCRIPTORS_EACH: Final = 5
"""Of a session: socket, page and its mapping, bell, process."""
DESCRIPTORS_SPARE: Final = 32
"""For all else: pools, lock, log, libraries."""
TOOLS: Final = 32
"""Connections beyond `sessions_max`: those who have said nothing yet, and tools, which have no session."""
ADMIN_STRANGERS: Final = 32
"""Connections to the admin API that have not shown a token (api/admin/guard.py, which is not loaded without it)."""
DESCRIPTORS_ALL: Final = 1 << 20
"""Beyond any number that is in use; closing a range is one system call."""
SESSION_LINES: Final = 50
"""Of one kind a second: a client that comes and goes all the time fills no disk."""
MESSAGE_MOST: Final = 240
"""Characters of a refusal that are logged: a name that a client chose may be as long as a frame."""
ACCEPTS: Final = 16
"""Of one turn, so that a crowd at the door does not hold up those inside."""

log = structlog.stdlib.get_logger("kvslot.daemon")


class Server:
    """All that one daemon process knows."""

    def __init__(
        self, settings: config.Settings, pools: list[HostedPool], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.settings = settings
        self.loop = loop
        self.pools = {pool.name: pool for pool in pools}
        self.first = pools[0]
        self.boot = secrets.randbits(62) + 1
        self.started = time.monotonic()
        self.version = __version__
        self.reread: Callable[[], config.Settings] | None = None  # reads the settings anew
        self.latency = Latency()
        self.totals = Totals(self.pools)
        self.collector = Collector()
        self.health = Health(self)
        self.admin: AdminService | None = None
        self.hub = Hub(loop, self.replenish)
        self.connections: set[Connection] = set()
        self.sessions: dict[int, Member] = {}  # by their number, the lost among them
        self.draining = False
        self.stopped = asyncio.Event()
        self.exit_code = 0
        self.accepted = 0
        self.refused_connections = 0
        self.peer_faults = 0
        self._numbers = 0
        self.service = Service()
        self.warm: Warm | None = None
        self._listeners: list[socket.socket] = []
        self._endpoints: list[Endpoint] = []
        self._accepting = False
        self._ticking = False
        self._sweeping = False
        self._swept_round = 0
        self._replenishing = False
        self._graves: list[dict[int, Any]] = []  # of ended sessions, emptied in slices too
        self._looking = False
        self._drain_deadline = 0.0
        self._audits: dict[
            int, tuple[Connection, int, float, int, str]
        ] = {}  # pipe: who asked, id, when, pid, pool
        self.compactors = {pool.name: Compactor(self, pool) for pool in pools}
        self._reload_asked: list[tuple[Connection | None, int]] = []  # and the request's number
        self._reloading: asyncio.Task[None] | None = None
        self.table: Mapping[type, Row] = TABLE
        self.recorders = Recorders(self)
        self._uids, self._gids = _controllers(settings)
        self.identity = Identity(settings)
        for pool in pools:
            for _ in pool.limit(settings.tenants):
                pass
            if pool.core.scrubs:
                pool.scrubber = Scrubber(pool, loop, self.deliver)
        self._counts = self.latency.counts
        self._counts.update(dict.fromkeys(TABLE, 0))
        limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Over TCP, which a reload may open, there are as many, and those that have not shown a token.
        admin = settings.admin_connections * 2 + ADMIN_STRANGERS if settings.admin else 0
        wanted = DESCRIPTORS_EACH * settings.sessions_max + TOOLS + DESCRIPTORS_SPARE + admin
        if limit < wanted:
            limit = min(wanted, hard) if hard != resource.RLIM_INFINITY else wanted
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        # What the descriptors suffice for: beyond it a client is told, rather than the process running dry.
        left = limit - DESCRIPTORS_SPARE - min(admin, limit // 8)
        self._connections_max = min(settings.sessions_max + TOOLS, max(2, left // DESCRIPTORS_EACH))
        # A session whose connection is lost keeps the others for as long as its process lives.
        self.sessions_max = min(
            settings.sessions_max, max(1, (left - self._connections_max) // (DESCRIPTORS_EACH - 1))
        )

    def number(self) -> int:
        """Of a session; never used again in this boot."""
        self._numbers += 1
        return self._numbers

    def hosted(self, name: str) -> HostedPool:
        """A pool by name, "" for the first."""
        if not name:
            return self.first
        pool = self.pools.get(name)
        if pool is None:
            raise NotFound(f"no pool {name!r}; there are {', '.join(self.pools)}")
        return pool

    def listening(self) -> tuple[bool, str]:
        """Whether clients can connect, and how it is known."""
        if not self._listeners:
            return False, "not opened yet, or closed"
        if not self._accepting:
            return False, "no connections are taken for a moment: descriptors or memory ran out"
        found = [endpoint.in_place() for endpoint in self._endpoints]
        return all(well for well, _ in found), "; ".join(text for _, text in found)

    def may_control(self, peer: Peer) -> bool:
        """Whether this user may say control verbs."""
        return peer.uid in self._uids or peer.gid in self._gids or not self._gids.isdisjoint(peer.groups)

    # -- answering ---------------------------------------------------------------------------------------------

    def answer(self, connection: Connection, request: messages.Request, now: float) -> messages.Reply | None:
        """One request: the reply, or none where none is due."""
        kind = type(request)
        self._counts[kind] += 1
        row = self.table[kind]
        member = connection.member
        number = request.id
        asked.connection, asked.request, asked.verb = connection, number, kind
        act, outcome = False, "fault"
        try:
            if row.permission is Permission.SESSION:
                if member is None:
                    raise OutOfTurn(f"{kind.__name__} before Hello")
                member.frames += 1
            elif row.permission is Permission.CONTROL:
                self._check_control(connection, kind.__name__)
                act = is_act(request)
            if not number and kind not in POSTED:
                raise BadRequest(f"{kind.__name__} with id 0: only Free and Trim may be posted")
            reply = row.handler(self, connection, request, now)
            outcome = "done"
            act = act and kind is not messages.Reload  # which is told when it is done
        except Refused as refused:
            outcome = type(refused).__name__
            return self._refused(connection, kind, number, refused.code, str(refused))
        except core.Refusal as refusal:
            outcome = REFUSALS[type(refusal)].__name__
            return self._refused(connection, kind, number, REFUSALS[type(refusal)].code, str(refusal))
        except PeerFault as fault:
            connection.fault(fault)
            return None
        finally:
            if act:
                self.identity.note(connection.peer, request, outcome, now)
            asked.connection = None
        return reply if number else None

    def answer_in_batch(
        self, connection: Connection, request: messages.Batchable, now: float
    ) -> messages.BatchReply:
        """One verb of a Batch: always a reply, since its place tells what it belongs to."""
        kind = type(request)
        self._counts[kind] += 1
        if connection.member is None:
            # A verb before it in the same batch found the session's page lying.
            return messages.Error(0, OutOfTurn.code, "the session has ended")
        asked.connection, asked.verb = connection, kind  # `asked.request` is the Batch
        try:
            reply = self.table[kind].handler(self, connection, request, now)
        except Refused as refused:
            return self._count_refused(kind, refused.code, str(refused))
        except core.Refusal as refusal:
            return self._count_refused(kind, REFUSALS[type(refusal)].code, str(refusal))
        except PeerFault as fault:
            connection.fault(fault)
            return self._count_refused(kind, BadRequest.code, str(fault))
        else:
            return reply  # type: ignore[return-value]  # a handler's type covers all verbs; a Batchable one's reply is this
        finally:
            asked.connection = None

    def _count_refused(self, kind: type, code: int, message: str, number: int = 0) -> messages.Error:
        """Notes a refusal, and makes its reply; one of a verb in a Batch has no id of its own."""
        refused = self.latency.refused
        refused[kind] = refused.get(kind, 0) + 1
        self.totals.refuse(kind, code)
        if code == Denied.code and asked.connection is not None:
            self.identity.deny(asked.connection.peer, kind.__name__, message)
        limited(
            log, "refused", 10.0, level="info", kind=f"{kind.__name__}{code}",
            code=CODES[code].__name__, message=message[:MESSAGE_MOST],
        )  # fmt: skip
        return messages.Error(number, code, message)

    def _refused(
        self, connection: Connection, kind: type, number: int, code: int, message: str
    ) -> messages.Error | None:
        if number:
            if connection.member is None and not connection.used:
                # Nothing but a session or a control verb can follow, and neither was granted.
                self.loop.call_soon(connection.finish)
            return self._count_refused(kind, code, message, number)
        self.latency.refused[kind] = self.latency.refused.get(kind, 0) + 1
        self.totals.refuse(kind, code)
        if connection.member is not None:
            connection.member.posted_errors += 1
        limited(log, "posted_refused", 10.0, verb=kind.__name__, code=code, message=message)
        return None

    def _check_control(self, connection: Connection, verb: str) -> None:
        if not connection.control:
            raise Denied(
                f"{verb} is a control verb: user {connection.peer.uid} is neither the daemon's own nor root nor one of "
                "control_uids, and its group not one of control_gids"
            )
        connection.used = True

    def check_batch(self, request: messages.Batch) -> None:
        """Whether a Batch may be so long."""
        if len(request.verbs) > self.settings.batch_max:
            raise TooLarge(f"a batch of {len(request.verbs)} verbs: {self.settings.batch_max} are allowed")

    def takes_batch(self, connection: Connection, request: messages.Batch) -> bool:
        """Whether a Batch may be answered in turns: it is in order, and from a session."""
        if connection.member is None or not request.id or len(request.verbs) > self.settings.batch_max:
            return False  # `answer` says why not
        connection.member.frames += 1
        self._counts[messages.Batch] += 1
        return True

    def after(self, connection: Connection, now: float) -> None:
        """After the verbs of a turn: what has become possible is told to whom it concerns."""
        member = connection.member
        if member is not None:
            pool = member.hosted.core
            if pool.pushes or pool.admission.busy:
                self.deliver(member.hosted, now)
        self.collector.served()

    def replenish(self) -> None:
        """After a round of the hub: what requests took of the headroom is evicted, some now, some a little later.

        What a long request gave back, or did not need of what was sorted out for it, is filed among the free runs.
        """
        until = 0
        now = time.monotonic()
        for hosted in self.pools.values():
            pool = hosted.core
            if hosted.scrubber is not None:
                hosted.scrubber.poke()
            low = pool.runs.cells_free < pool.headroom and not pool.scrubs
            if low or pool.runs.stocked > hosted.gathering:
                until = until or time.perf_counter_ns() + REPLENISH_NS
                while (low and pool.replenish(now)) or pool.tidy(hosted.gathering):
                    if time.perf_counter_ns() >= until:
                        if not self._replenishing:
                            self._replenishing = True
                            self.loop.call_soon(self._replenish_more)
                        return

    def _replenish_more(self) -> None:
        self._replenishing = False
        self.replenish()

    def makes_room(self, connection: Connection, request: Long, now: float) -> bool:
        """Whether room is made for a long request first, in slices; `connection.go_on` is called when that is done.

        Only what the verb would evict at once anyway, and what it will find is used first, so that this does not go.
        Where there is room enough, it is gathered out of the free runs, of which a long request may take hundreds.
        """
        member = connection.member
        if (
            member is None
            or member.session.life
            or member.session.owes
            or not (request.id or connection.in_batch)
        ):
            return False  # the verb says what is wrong
        pool = member.hosted.core
        runs, cell = pool.runs, pool.cell
        if pool.admission.busy:
            ticket = pool.admission.waiting.get(request.ticket)
            if ticket is None or ticket.ready < 0:
                return False  # others come first
        if isinstance(request, messages.Extend):
            if request.sequence not in member.sequences:
                return False
            need = request.tokens
            account = pool.sequences[member.sequences[request.sequence].handle].account
        elif (
            self.draining
            or request.namespace not in member.roots
            or len(request.tokens) & 3
            or request.sequence in member.sequences
            or len(member.sequences) >= self.settings.sequences_max
        ):
            return False
        else:
            need = len(request.tokens) >> 2
            account = pool.account_of[request.namespace]
        if need > pool.usable:
            return False
        if isinstance(request, messages.Allocate):
            need -= pool.touch(request.namespace, request.tokens)
        if need <= LONG_TOKENS or need > min(member.session.quota_left(), account.left()):
            return False  # nobody else's cache is emptied for what will be refused
        cells = need // cell + 2
        missing = need > runs.cells_free * cell and need > runs.total + pool.ledger.counts[FENCED]
        if missing:
            if need + pool.watermark > runs.total + pool.tree.evictable:
                return False  # it would wait anyway
        elif runs.cells_free < cells or runs.in_one(cells):
            return False
        hosted = member.hosted
        # Pages of other sizes than a cell are looked for in the runs themselves.
        gathered = cells if member.session.page in (1, cell) else 0
        if not missing and not gathered:
            return False
        hosted.gathering += gathered
        self.loop.call_soon(self._make_room, connection, hosted, cells, need if missing else 0, gathered)
        return True

    def _make_room(
        self, connection: Connection, hosted: HostedPool, cells: int, left: int, gathered: int
    ) -> None:
        """A slice of making room: until `cells` cells are free, `left` tokens gone for them at most, and gathered."""
        pool = hosted.core
        if not connection.closed:
            now = time.monotonic()
            until = time.perf_counter_ns() + REPLENISH_NS
            before = pool.evicted_tokens
            while (before + left > pool.evicted_tokens and pool.replenish(now, goal=cells)) or pool.gather(
                hosted.gathering
            ):
                if time.perf_counter_ns() >= until:
                    left -= pool.evicted_tokens - before
                    self.loop.call_soon(self._make_room, connection, hosted, cells, left, gathered)
                    return
        hosted.gathering -= gathered
        connection.go_on()

    def deliver(self, hosted: HostedPool, now: float) -> None:
        """Tells sessions what the core wants told."""
        members = hosted.members
        for push in hosted.core.poll(now):
            member = members.get(push.session)
            connection = member.connection if member is not None else None
            if member is None or connection is None:
                continue
            self.totals.pushes[type(push)] += 1
            match push:
                case core.Ready(ticket=ticket):
                    connection.push(("ready", ticket), messages.Ready(ticket))
                case core.Published(ticket=ticket):
                    connection.push(("published", ticket), messages.Published(ticket))
                case core.Abandoned(ticket=ticket):
                    connection.push(("abandoned", ticket), messages.Abandoned(ticket))
                case core.Pressure():
                    connection.push("pressure", messages.Pressure(1))
                case core.Preempt(sequence=handle, deadline=deadline):
                    name = member.by_handle.get(handle)
                    if name is not None:
                        left = max(0, int((deadline - now) * 1e3))
                        connection.push(("preempt", name), messages.Preempt(name, left))
                case Moved(sequence=handle, epoch=epoch, position=position, extents=extents):
                    # One that has ended meanwhile is told as number 0 with no extents: the epoch counts all the same.
                    name = member.by_handle.get(handle)
                    if name is not None:
                        member.sequences[name].moved(position, extents)
                        connection.push_in_turn(messages.Moved(epoch, name, position, extents))
                    else:
                        connection.push_in_turn(messages.Moved(epoch, 0, 0, []))
                    self._waits_for_page(member)

    # -- waiting -----------------------------------------------------------------------------------------------

    def fence_waits(self, member: Member) -> None:
        """A session has fences that have not passed: its page is looked at until they have."""
        member.hosted.fencing.add(member)
        self._start_ticking()

    def _waits_for_page(self, member: Member) -> None:
        if member.waits:
            self.fence_waits(member)

    def waits(self, hosted: HostedPool) -> None:
        """Somebody was told LATER: deadlines pass by time alone."""
        for member in hosted.fencing:
            member.ask_to_ring(True)
        self._start_ticking()

    def sync_fences(self, hosted: HostedPool, now: float) -> bool:
        """Reads the pages of all whose fences wait; true when any step has completed."""
        moved = False
        for member in tuple(hosted.fencing):
            group = member.session.group
            if group is None:
                moved |= self.sync(member, now)
            else:
                for other in tuple(group.members):
                    known = hosted.members.get(other.handle)
                    if known is not None:
                        moved |= self.sync(known, now)
            if not member.waits:
                hosted.fencing.discard(member)
                member.ask_to_ring(False)
        return moved

    def sync(self, member: Member, now: float) -> bool:
        """Takes over what a session's page says; true when a step has completed since."""
        try:
            return member.sync(now)
        except PeerFault as fault:
            if member.connection is not None:
                member.connection.fault(fault)
            return False

    def _start_ticking(self) -> None:
        if not self._ticking:
            self._ticking = True
            self.loop.call_later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        now = time.monotonic()
        again = False
        for hosted in self.pools.values():
            if hosted.fencing:
                self.sync_fences(hosted, now)
            pool = hosted.core
            busy = pool.admission.busy
            if pool.pushes or busy:
                self.deliver(hosted, now)
            again = again or busy or bool(pool.admission.awaiting)
            # One that has been told of moves and does not step is left to `upkeep`: it may idle for hours.
            again = again or any(
                each.session.fences or each.session.settling or now - each.session.stepped < FOLLOWS_FOR
                for each in hosted.fencing
            )
        if again:
            self._start_ticking()

    def _rung(self, member: Member) -> None:
        """A client wrote its bell: its page has changed."""
        if not member.take_ring():
            return
        now = time.monotonic()
        if now - member.rings_since > RING_SECONDS:
            member.rings_since, member.rings = now, 0
        member.rings += 1
        if member.rings == RINGS_MOST:
            # No engine steps that often.  What it rings meanwhile is heard as one.
            self.loop.remove_reader(member.wake)
            self.loop.call_later(RING_SECONDS, self._hear_again, member)
        self.compactors[member.hosted.name].rung()
        if self.sync(member, now):
            pool = member.hosted.core
            if pool.pushes or pool.admission.busy:
                self.deliver(member.hosted, now)

    def _hear_again(self, member: Member) -> None:
        if member.wake >= 0:
            self.loop.add_reader(member.wake, self._rung, member)

    # -- coming and going --------------------------------------------------------------------------------------

    def listen(self, *endpoints: Endpoint) -> None:
        """Opens the doors: one, but for a manager that passed several."""
        for endpoint in endpoints:
            self._endpoints.append(endpoint)
            self._listeners.append(endpoint.listen(self.settings.socket_mode, self.settings.socket_group))
            endpoint.note()  # it is not starting any more
        self._accept_again()

    def _accept_again(self) -> None:
        if not self._accepting:
            self._accepting = True
            for listener in self._listeners:
                self.loop.add_reader(listener.fileno(), self._accept, listener)

    def _accept_no_more(self) -> None:
        if self._accepting:
            self._accepting = False
            for listener in self._listeners:
                self.loop.remove_reader(listener.fileno())

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors or memory: trying again at once would only say so again.
                limited(log, "accept_failed", 10.0, reason=error.strerror)
                self._accept_no_more()
                self.loop.call_later(0.5, self._accept_again)
                return
            sock.setblocking(False)
            now = time.monotonic()
            try:
                peer = peer_of(sock)
            except (OSError, struct.error):
                sock.close()
                continue
            connection = Connection(self, sock, peer, now)
            self.accepted += 1
            self.connections.add(connection)
            if len(self.connections) > self._connections_max:
                self.refused_connections += 1
                limited(log, "connection_refused", 10.0, connections=len(self.connections) - 1)
                connection.refuse(
                    Busy(f"{self._connections_max} connections are open, which is the most (sessions_max)")
                )
                continue
            try:
                self.identity.check_connect(peer)
            except Denied as denied:
                self.identity.deny(peer, "connect", str(denied))
                connection.refuse(denied)

    def joined(self, connection: Connection, member: Member) -> None:
        """A session has been opened."""
        connection.member = member
        connection.used = True
        member.connection = connection
        self.sessions[member.number] = member
        self.totals.opened += 1
        member.hosted.members[member.session.handle] = member
        self.watch(member)
        if member.wake >= 0:
            self.loop.add_reader(member.wake, self._rung, member)
        sparing(
            log,
            "session_opened",
            SESSION_LINES,
            session=member.number,
            name=member.name,
            pool=member.hosted.name,
            pid=member.peer.pid,
            uid=member.peer.uid,
            mapped=member.mapped,
        )

    def numbers_from(self, number: int) -> None:
        """Sessions up to that number were of earlier boots; what those left that are gone is swept."""
        self._numbers = max(self._numbers, number)
        self.start_sweep()

    def adopt(self, member: Member) -> None:
        """A session of an earlier boot, which may still use what it held then."""
        self.totals.adopted += 1
        self.sessions[member.number] = member
        member.hosted.members[member.session.handle] = member
        self.watch(member)
        self.start_sweep()

    def watch(self, member: Member) -> None:
        """Hears of the end of its process, where there is a descriptor that tells."""
        if member.pidfd >= 0:
            self.loop.add_reader(member.pidfd, self._process_ended, member)

    def rejoined(self, connection: Connection, member: Member, now: float) -> None:
        """A lost session's process has come back.  It owes nothing any more: it gave way by being lost."""
        connection.member = member
        connection.used = True
        member.connection = connection
        self.totals.resumed += 1
        self._waits_for_page(member)
        self.loop.call_soon(self._tell_draining, connection)  # behind the Welcome
        sparing(log, "session_resumed", SESSION_LINES, session=member.number, pid=member.peer.pid)

    def left(self, connection: Connection, member: Member) -> None:
        """Bye: nothing more comes from this connection."""
        connection.member = None
        member.connection = None
        if member.hosted.journal is not None:
            member.hosted.journal.over(member)
        self.totals.left += 1
        sparing(log, "session_ended", SESSION_LINES, session=member.number, reason="bye")
        self.start_sweep()
        self.loop.call_soon(connection.finish)

    def disconnected(self, connection: Connection, reason: str) -> None:
        """The socket is closed."""
        self.connections.discard(connection)
        self.recorders.disconnected(connection)
        member = connection.member
        if member is not None:
            connection.member = None
            member.connection = None
            self._lost(member, reason)
        self._look_whether_drained()

    def _lost(self, member: Member, reason: str) -> None:
        session = member.session
        if session.life != Life.LIVE:
            return
        member.hosted.core.lose(session)
        self.totals.lost += 1
        member.lost_at = time.monotonic()
        member.hosted.fencing.discard(member)
        proven = not member.mapped or member.process_ended()
        sparing(
            log,
            "session_lost",
            SESSION_LINES,
            level="warning",
            session=member.number,
            name=member.name,
            pid=member.peer.pid,
            reason=reason,
            sequences=len(member.sequences),
            quarantined=not proven,
        )
        if proven:
            self.proven_gone(member)
        else:
            self.start_sweep()

    def proven_gone(self, member: Member) -> None:
        """Nothing of the session's process can touch the pool any more."""
        if member.session.life == Life.LOST and not member.session.proven:
            if member.hosted.journal is not None:
                member.hosted.journal.over(member)
            member.hosted.core.gone(member.session)
        self.start_sweep()

    def _process_ended(self, member: Member) -> None:
        """The kernel says that a session's process is no more."""
        if member.pidfd < 0 or not ended(member.pidfd):
            return
        self.loop.remove_reader(member.pidfd)
        if member.connection is not None:
            # A child may still hold the socket open.
            member.connection.end("its process has ended")
        else:
            sparing(log, "process_ended", SESSION_LINES, session=member.number, pid=member.peer.pid)
            self.proven_gone(member)

    def start_sweep(self) -> None:
        """Sessions that have ended are cleaned up, slice by slice."""
        if not self._sweeping:
            self._sweeping = True
            self.loop.call_soon(self._sweep)

    def _sweep(self) -> None:
        """A slice of cleaning up after ended sessions.

        At once again while nobody wants anything; else the others have the processor for several times as long first.
        """
        self._sweeping = False
        began = time.perf_counter_ns()
        until = began + self.settings.slice_us * 1000
        again = False
        for hosted in self.pools.values():
            while not (done := hosted.core.sweep(1)):
                if time.perf_counter_ns() >= until:
                    break
            again = again or not done
            if hosted.core.pushes or hosted.core.admission.busy:
                self.deliver(hosted, time.monotonic())
        for member in [each for each in self.sessions.values() if each.session.life == Life.ENDED]:
            self._forget(member)
        graves = self._graves
        while graves and time.perf_counter_ns() < until:
            grave = graves[-1]
            for _ in range(min(len(grave), 32)):
                grave.popitem()
            if not grave:
                graves.pop()
        if again or graves:
            self._sweeping = True
            if self.hub.rounds == self._swept_round:
                self.loop.call_soon(self._sweep)
            else:
                self._swept_round = self.hub.rounds
                took = (time.perf_counter_ns() - began) / 1e9
                self.loop.call_later(SWEEP_PAUSE * took, self._sweep)

    def _forget(self, member: Member) -> None:
        """The session has ended and holds nothing."""
        self.recorders.left(member, time.monotonic())
        del self.sessions[member.number]
        self.totals.forget(member)
        hosted = member.hosted
        del hosted.members[member.session.handle]
        hosted.fencing.discard(member)
        if hosted.journal is not None and hosted.journal.forgotten(member):
            self.start_sweep()
        hosted.leave(member.roots)
        self.identity.leave(member)
        for descriptor in (member.pidfd, member.wake):
            if descriptor >= 0:
                self.loop.remove_reader(descriptor)
        member.close()
        self._graves += [member.sequences, member.by_handle]
        member.sequences, member.by_handle = {}, {}
        sparing(log, "session_gone", SESSION_LINES, session=member.number)
        self._look_whether_drained()

    def faulted(self, connection: Connection, fault: PeerFault) -> None:
        """A client broke the protocol."""
        self.peer_faults += 1
        member = connection.member
        limited(
            log,
            "peer_fault",
            1.0,
            pid=connection.peer.pid,
            session=member.number if member else 0,
            reason=str(fault),
        )

    # -- once a second -----------------------------------------------------------------------------------------

    def upkeep(self) -> None:
        """Deadlines, stalls, namespaces, the collector."""
        now = time.monotonic()
        settings = self.settings
        for connection in tuple(self.connections):
            if connection.waiting_bytes and now - connection.stuck_since > settings.reply_seconds:
                connection.end(f"has not read its replies for {settings.reply_seconds} s")
            elif not connection.used and now - connection.since > settings.idle_hello_seconds:
                connection.refuse(OutOfTurn(f"no Hello within {settings.idle_hello_seconds} s"))
        for member in tuple(self.sessions.values()):
            if member.session.life != Life.LIVE:
                continue
            self.sync(member, now)
            session = member.session
            if member.holds and member.hosted.journal is not None:
                member.hosted.journal.upkeep(member)
            if session.completed == session.submitted:
                member.progressed = now
            elif not session.stalled and now - member.progressed > settings.stall_seconds:
                member.hosted.core.stall(session)
                self.totals.stalls += 1
                sparing(
                    log,
                    "session_stalled",
                    SESSION_LINES,
                    level="warning",
                    session=member.number,
                    name=member.name,
                    pid=member.peer.pid,
                    submitted=session.submitted,
                    completed=session.completed,
                )
        for hosted in self.pools.values():
            self.deliver(hosted, now)
            hosted.close_idle_spaces()
            if hosted.scrubber is not None:
                hosted.scrubber.poke()
            self.compactors[hosted.name].upkeep(now)
            if hosted.fencing:
                self._start_ticking()
        if self.warm is not None:
            self.warm.upkeep(self)
        self.collector.idle()
        self.identity.tell(now)
        logs.tell_overdue(log)
        self._look_whether_drained()
        if self.draining and now >= self._drain_deadline:
            for connection in tuple(self.connections):
                connection.refuse(ShuttingDown("the daemon ends"))
            self.stop(0)

    async def run(self) -> int:
        """Serves until stopped; returns the exit code."""
        with self.collector:
            async with asyncio.TaskGroup() as tasks:
                work = [
                    ("upkeep", self._keep()),
                    ("the watch for the service manager", self.service.watch(self)),
                ]
                work += [
                    (f"compaction of pool {name!r}", each.run()) for name, each in self.compactors.items()
                ]
                if self.admin is not None:
                    work.append(("the admin API", self.admin.run()))
                running = [tasks.create_task(self._guard(what, each)) for what, each in work]
                await self.stopped.wait()
                for task in running:
                    task.cancel()
        return self.exit_code

    async def _guard(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        """A task of ours: what it raises ends the process, with a last line that says so."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 -- whatever it is, the process must end with it
            self.failed(self.loop, {"message": f"{what} failed", "exception": error})

    async def _keep(self) -> None:
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(UPKEEP_SECONDS)
            now = time.monotonic()
            self.totals.woke(now - asleep - UPKEEP_SECONDS)
            self.health.beat(now, now - asleep - UPKEEP_SECONDS)
            self.upkeep()

    # -- the end -----------------------------------------------------------------------------------------------

    def drain(self, reason: str, seconds: float | None = None) -> None:
        """No new work; running sequences have `seconds` to end (None: as is configured by now).

        The door stays open: who lost its connection may come back for what it runs, and an operator sees who holds
        the end up.  A second call ends at once.
        """
        if self.draining:
            self.stop(0)
            return
        if seconds is None:
            seconds = self.settings.drain_seconds
        self.draining = True
        self._drain_deadline = time.monotonic() + seconds
        log.info("draining", reason=reason, seconds=seconds, connections=len(self.connections))
        self.service.draining(seconds)
        for endpoint in self._endpoints:
            endpoint.note("draining")
        for connection in tuple(self.connections):
            self._tell_draining(connection)
        self.loop.call_later(seconds, self.upkeep)
        self._look_whether_drained()

    def drain_left(self, now: float) -> float | None:
        """Seconds until a drain ends whatever still runs; None where there is none."""
        return max(0.0, self._drain_deadline - now) if self.draining else None

    def _tell_draining(self, connection: Connection) -> None:
        left = self.drain_left(time.monotonic())
        if left is not None and not connection.closed:
            self.totals.pushes[messages.Draining] += 1
            connection.push("draining", messages.Draining(int(left * 1e3)))

    def _works(self, member: Member) -> bool:
        """Whether a drain waits for a session: for its sequences, and for answers that it has not fetched.

        One that lost its connection counts while its process lives, since that may come back.
        """
        if member.session.life not in (Life.LIVE, Life.LOST) or member.session.proven:
            return False
        return bool(member.sequences) or (member.connection is not None and not member.connection.idle)

    def _look_whether_drained(self) -> None:
        if self.draining and not self._looking:
            # In a turn of its own: each connection that this ends asks for it again.
            self._looking = True
            self.loop.call_soon(self._end_idle)

    def _end_idle(self) -> None:
        self._looking = False
        if self.stopped.is_set() or any(self._works(member) for member in self.sessions.values()):
            return
        # All at once: until then they may look, and see what is waited for.  Tools are not waited for.
        for connection in tuple(self.connections):
            connection.finish()
        self.stop(0)

    def stop(self, code: int) -> None:
        """Ends `run`."""
        self.exit_code = code or self.exit_code
        self.stopped.set()

    def close(self) -> None:
        """Gives everything back."""
        self._accept_no_more()
        self._listeners.clear()
        for endpoint in self._endpoints:
            endpoint.close_socket()
        for connection in tuple(self.connections):
            connection.refuse(ShuttingDown("the daemon ends"))
        for member in self.sessions.values():
            for descriptor in (member.pidfd, member.wake):
                if descriptor >= 0:
                    self.loop.remove_reader(descriptor)
            member.close()
        self.sessions.clear()
        if self.warm is not None:
            self.warm.close(self)
        for descriptor, (_, _, _, pid, _) in self._audits.items():
            self.loop.remove_reader(descriptor)
            os.close(descriptor)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._audits.clear()
        self.hub.close()
        for compactor in self.compactors.values():
            compactor.close()
        for hosted in self.pools.values():
            if hosted.scrubber is not None:
                hosted.scrubber.close()
            hosted.device.close()

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Something of ours raised: the last line of the log says what, and the process ends."""
        error = context.get("exception")
        if self.admin is not None and self.admin.caused(context):
            return
        log.critical(
            "internal_fault",
            reason=str(context.get("message")),
            exc_info=error if error is not None else False,
        )
        self.stop(70)

    # -- looking at it -----------------------------------------------------------------------------------------

    def door(self) -> dict[str, int]:
        """Connections: open, the most, and what became of those that came."""
        return {
            "connections": len(self.connections),
            "connections_max": self._connections_max,
            "sessions_max": self.sessions_max,
            "accepted": self.accepted,
            "refused_connections": self.refused_connections,
            "peer_faults": self.peer_faults,
        }

    def view(self) -> inspection.View:
        """What inspection.py looks at."""
        return _View(self)

    def set_config(self, name: str, value: str) -> None:
        """Changes what may be changed while running, for as long as the process runs."""
        try:
            config.check_changeable(name)
            self.settings = config.changed(self.settings, name, value)
        except config.ConfigError as error:
            raise (BadRequest if name in config.SETTINGS or name in config.POOL else NotFound)(
                str(error)
            ) from None
        if name == "log_level":
            logs.set_level(value)
        if name == "compaction":
            for compactor in self.compactors.values():
                compactor.set_again()
        log.info("setting_changed", name=name, value=value)
        self._settings_changed()

    def hup(self) -> None:
        """SIGHUP: as `reload`; what is wrong is in the log."""
        with contextlib.suppress(BadRequest):
            self.reload(None, 0)

    def reload(self, connection: Connection | None, number: int) -> None:
        """Takes over what may be changed while running, and says then to who asked what has been.

        Settings are read in a thread, as users and groups may be looked up far away; one reading at a time.  Who asks
        meanwhile has the answer of the next one, which begins after that.
        """
        if self.reread is None:
            raise BadRequest("this daemon was not started from settings that could be read again")
        self._reload_asked.append((connection, number))
        if self._reloading is None:
            self._reloading = self.loop.create_task(self._guard("a reload", self._reload(self.reread)))

    async def _reload(self, reread: Callable[[], config.Settings]) -> None:
        try:
            while self._reload_asked:
                asked_for, self._reload_asked = self._reload_asked, []
                self.service.reloading()
                try:
                    changed, needs_restart = await self._take(await asyncio.to_thread(reread))
                    taken, failed = await self._beside_settings()
                except config.ConfigError as error:
                    log.error("reload_failed", reason=str(error))
                    told = f"settings stay as they are: {error}"
                    outcome = BadRequest.__name__
                    replies: list[messages.Reply] = [
                        self._count_refused(messages.Reload, BadRequest.code, told, number)
                        for _, number in asked_for
                    ]
                else:
                    outcome = "done"
                    replies = [
                        messages.Reloaded(number, changed, needs_restart, taken, failed)
                        for _, number in asked_for
                    ]
                finally:
                    self.service.reloaded(self)
                for (connection, _), reply in zip(asked_for, replies, strict=True):
                    if connection is not None:
                        self.identity.note(
                            connection.peer, messages.Reload(reply.id), outcome, time.monotonic()
                        )
                        if not connection.closed:
                            connection.send(encode(reply))
        finally:
            self._reloading = None

    async def _take(self, settings: config.Settings) -> tuple[list[str], list[str]]:
        """Settings that have changed and hold from now on, and those that need a restart."""
        if self._endpoints and self._endpoints[0].passed:
            settings = msgspec.structs.replace(
                settings, socket=self.settings.socket
            )  # it is not the file's to say
        changed = [
            name
            for name in type(settings).__struct_fields__
            if getattr(settings, name) != getattr(self.settings, name)
        ]
        retried = RETRIED if self.admin is not None and not self.admin.has_socket else ()
        now = CHANGEABLE + RELOADABLE + retried
        taken = {name: getattr(settings, name) for name in changed if name in now}
        self.settings = msgspec.structs.replace(self.settings, **taken)
        self.identity.change(self.settings)
        self._uids, self._gids = _controllers(self.settings)
        for connection in self.connections:
            connection.control = self.may_control(connection.peer)
        if "log_level" in taken:
            logs.set_level(settings.log_level)
        if "compaction" in taken:
            for compactor in self.compactors.values():
                compactor.set_again()
        self._settings_changed()
        if "tenants" in taken:
            await self._paced(self.identity.recount(self.sessions))
            for hosted in self.pools.values():
                await self._paced(hosted.limit(self.settings.tenants))
        needs_restart = [name for name in changed if name not in taken]
        told = {name: len(value) if name == "tenants" else value for name, value in taken.items()}
        log.info("reloaded", changed=told, needs_restart=needs_restart)
        return list(taken), needs_restart

    async def _paced(self, steps: Iterable[None]) -> None:
        """Takes them as background work, with everything else in between."""
        began = time.perf_counter()
        for _ in steps:
            if time.perf_counter() - began >= self.settings.slice_us / 1e6:
                await asyncio.sleep(0)
                began = time.perf_counter()

    async def _beside_settings(self) -> tuple[list[str], list[str]]:
        """What settings name and hold not themselves, looked at again: what is new, and what cannot be had."""
        return await self.admin.reload(self.settings) if self.admin is not None else ([], [])

    def _settings_changed(self) -> None:
        for compactor in self.compactors.values():
            compactor.poke()

    def audit(self, connection: Connection, number: int, hosted: HostedPool, now: float) -> None:
        """Has a forked copy of this process recount a pool as it is at this moment, while we go on serving.

        Recounting takes seconds for a large pool, and its answer is only true of one moment; a copy has both.
        """
        if self._audits:
            raise Busy("an audit is running already")
        try:
            readable, writable = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise Busy(f"no audit now: {error.strerror}") from None
        try:
            pid = os.fork()
        except OSError as error:
            os.close(readable)
            os.close(writable)
            raise Busy(f"no audit now: {error.strerror}") from None
        if not pid:
            status = 1
            try:
                # Nothing of ours stays open here: clients must see their connections end when we end them.
                signal.set_wakeup_fd(-1)
                for each in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(each, signal.SIG_DFL)
                os.closerange(3, writable)
                os.closerange(writable + 1, DESCRIPTORS_ALL)
                faults = core.audit(hosted.core)
                os.set_blocking(writable, True)
                left = memoryview(json.dumps(faults[:100]).encode())
                while left:
                    left = left[os.write(writable, left) :]
                status = 0  # the pipe is left to be closed with the process: who reads its end finds that gone, too
            except BaseException:  # noqa: BLE001 -- nothing may leave this copy of the process but by _exit
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writable)
        self._audits[readable] = (connection, number, time.perf_counter(), pid, hosted.name)
        chunks: list[bytes] = []
        self.loop.add_reader(readable, self._audited, readable, chunks)

    def _audited(self, readable: int, chunks: list[bytes]) -> None:
        try:
            chunk = os.read(readable, 1 << 16)
        except BlockingIOError:
            return
        if chunk:
            chunks.append(chunk)
            return
        self.loop.remove_reader(readable)
        os.close(readable)
        connection, number, began, pid, pool = self._audits.pop(readable)
        self._reap(pid)
        try:
            faults = [str(each) for each in json.loads(b"".join(chunks))]
        except ValueError:
            faults = ["the audit itself failed; the log has its traceback"]
        self.totals.audited(len(faults), time.perf_counter() - began)
        self.health.audit_faults[pool] = len(faults)
        if faults:
            log.error("audit_failed", faults=faults[:10], count=len(faults))
        if not connection.closed:
            connection.send(encode(messages.Audited(number, faults, (time.perf_counter() - began) * 1e3)))

    def _reap(self, pid: int) -> None:
        """Takes note of a copy's end, which may be a moment away, without waiting for it."""
        if not os.waitpid(pid, os.WNOHANG)[0]:
            self.loop.call_later(0.05, self._reap, pid)


def _controllers(settings: config.Settings) -> tuple[set[int], set[int]]:
    """Users and groups that may say control verbs."""
    return {0, os.geteuid(), *settings.control_uids}, set(settings.control_gids)


class _View:
    """The server as inspection.py sees it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.version = server.version
        self.boot = server.boot
        self.started = server.started
        self.now = time.monotonic()
        self.drain_left = server.drain_left(self.now)
        self.settings: msgspec.Struct = server.settings
        self.pools: Mapping[str, HostedPool] = server.pools

    @property
    def members(self) -> Iterable[Member]:
        return self._server.sessions.values()

    @property
    def compaction(self) -> Mapping[str, messages.Compaction]:
        return {name: each.status() for name, each in self._server.compactors.items()}

    @property
    def recordings(self) -> Sequence[Mapping[str, Any]]:
        return self._server.recorders.rows(self.now)

    @property
    def latency(self) -> Mapping[str, Mapping[str, Any]]:
        return self._server.latency.rows()

    @property
    def process(self) -> Mapping[str, Any]:
        store = self._server.service.store
        kept = {
            "socket_passed": any(each.passed for each in self._server._endpoints),
            "store": store.available,
            "store_max": store.capacity if store.available else 0,
            # Pools of which sessions of before the start may read: nothing that was cached then is evicted.
            "unsettled": [
                each.name
                for each in self._server.pools.values()
                if each.journal is not None and each.journal.everybody is not None
            ],
            "admin": [each._asdict() for each in self._server.admin.checks()]
            if self._server.admin is not None
            else [],
        }
        return {**process.facts(), **kept, **self._server.door()}

    @property
    def totals(self) -> Mapping[str, Any]:
        server = self._server
        return server.totals.row(server.sessions.values(), server.collector.statistics())

    @property
    def steps(self) -> Sequence[Mapping[str, Any]]:
        return self._server.latency.steps()

    @property
    def tenants(self) -> Sequence[Mapping[str, Any]]:
        return self._server.identity.rows({name: each.core for name, each in self.pools.items()})


# -- the process ------------------------------------------------------------------------------------------------------


def serve(settings: config.Settings, reload: Callable[[], config.Settings] | None = None) -> int:
    """Runs the daemon until it is told to end; returns the process's exit code.

    `reload` reads the settings anew, for SIGHUP.
    """
    if settings.admin:
        # It takes a third of a second, most of which pools are made meanwhile; whoever needs it waits for it.
        threading.Thread(target=importlib.import_module, args=("kvslot.daemon.admin",), daemon=True).start()
    service = Service.take()
    endpoints: list[Endpoint] = []
    try:
        try:
            endpoints = claim(service.store, "kvslot", settings.socket)
            for endpoint in endpoints:
                endpoint.note("starting")  # a manager's socket lets clients in, who wait meanwhile
            if endpoints[0].passed:
                settings = msgspec.structs.replace(settings, socket=str(endpoints[0].path))
        except EndpointError as error:
            log.error("cannot_start", reason=str(error))
            return 3
        try:
            warm = Warm(service.store, service.starting)
            chunk = settings.compaction_chunk_bytes
            found = {each.name: _find(warm, each) for each in settings.pools}
            config.check_memory(
                [config.pool_sum(each) for each in settings.pools if isinstance(found[each.name], str)]
            )
            pools = [
                _host(each, service, warm, prefault=settings.prefault, chunk_bytes=chunk)
                for each in settings.pools
            ]
        except (config.ConfigError, NoMemory, OSError) as error:
            log.error("cannot_start", reason=str(error))
            return 2
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(settings, pools, endpoints, service, warm, reload))
    finally:
        for endpoint in endpoints:
            endpoint.close()
        service.close()


async def _serve(
    settings: config.Settings,
    pools: list[HostedPool],
    endpoints: list[Endpoint],
    service: Service,
    warm: Warm,
    reload: Callable[[], config.Settings] | None,
) -> int:
    loop = asyncio.get_running_loop()
    for pool in pools:
        for _ in pool.limit(settings.tenants):
            pass  # so that namespaces that come back are under their tenants' accounts
        service.starting(f"taking over what pool {pool.name} cached", begins=True)
        warm.begin(pool)
    server = Server(settings, pools, loop)
    server.service, server.warm, server.boot = service, warm, warm.boot
    warm.join(server)
    loop.set_exception_handler(server.failed)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.drain, signal.Signals(number).name)
    server.reread = reload
    loop.add_signal_handler(signal.SIGHUP, server.hup)
    try:
        try:
            server.listen(*endpoints)
            if endpoints[0].stale:
                log.warning("stale_socket_replaced", socket=settings.socket)
        except EndpointError as error:
            log.error("cannot_start", reason=str(error))
            return 3
        if settings.admin:
            from kvslot.daemon import admin

            server.admin = admin.start(server, settings)
        log.info(
            "ready",
            socket=settings.socket,
            pools=list(server.pools),
            version=__version__,
            loop=type(loop).__module__.split(".")[0],
            pid=os.getpid(),
        )
        service.ready(server)
        code = await server.run()
    finally:
        if server.admin is not None:
            await server.admin.close()
        server.close()
        _end_signals(loop)
    server.identity.tell(math.inf)
    logs.tell_suppressed(log)
    log.info("ended", code=code)
    return code


def _end_signals(loop: asyncio.AbstractEventLoop) -> None:
    """Who says it once more to a daemon that has ended gets its exit code, not a process killed on its way out.

    The loop's end would give the signals back to what kills; none may come between that and this.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def _find(warm: Warm, settings: config.PoolSettings) -> Kept | str:
    layout = config.pool_layout(settings)
    pool_config = config.pool_config(settings, layout)
    size = layout.geometry(pool_config.blocks * pool_config.block_size).total_bytes
    pages = huge.SIZES[settings.huge_pages]
    return warm.find(settings.name, layout, pool_config, huge.whole(size, pages), pages)


def _host(
    settings: config.PoolSettings, service: Service, warm: Warm, *, prefault: bool, chunk_bytes: int
) -> HostedPool:
    layout = config.pool_layout(settings)
    pool_config = config.pool_config(settings, layout)
    kept = _find(warm, settings)
    device = MemoryDevice(
        layout.geometry(pool_config.blocks * pool_config.block_size),
        name=settings.name,
        generation=kept.head.generation if isinstance(kept, Kept) else 0,
        chunk_bytes=chunk_bytes,
        descriptor=kept.pool if isinstance(kept, Kept) else -1,
        page_bytes=huge.SIZES[settings.huge_pages],
    )
    if prefault and not isinstance(kept, Kept):
        _prefault(settings.name, device, service)
    return HostedPool(settings, layout, pool_config, device)


def _prefault(name: str, device: MemoryDevice, service: Service) -> None:
    """Takes all of a pool's memory now, and says how far it is every few seconds."""
    began = told = time.monotonic()
    log.info("prefault_started", pool=name, bytes=device.geometry.total_bytes)

    def progress(done: int, total: int) -> None:
        nonlocal told
        service.starting(f"taking the memory of pool {name}: {100 * done // total} %")
        now = time.monotonic()
        if now - told > PROGRESS_SECONDS and done < total:
            told = now
            log.info("prefault", pool=name, percent=round(100 * done / total, 1))

    device.prefault(progress)
    log.info("prefault_done", pool=name, seconds=round(time.monotonic() - began, 3))


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
