"""Recording: what clients ask of a pool, for `kvslotctl record`, as long as somebody asks for it.

    Allocate, Commit, Trim, Fork, Free ──► events (at most RECORD_BYTES) ──fetch──► the recorder: structure, file

While nothing is recorded, nothing of this runs: the server's table of verbs is the plain one.  A recording puts
handlers in front of five of them, each of which notes a tuple that refers to the request's own tokens; no token is
copied or looked at in the verb.  Who records fetches what was noted, some at a time, so that no answer holds up the
loop.

Bounded: what is noted and not fetched takes at most RECORD_BYTES.  Beyond it new requests and tokens are passed over
and counted (`lost_requests`, `lost_tokens`), until there is room again.  The end of a request that was told of is never
passed over, and there is one of each, so that what is known of each is true.

Tokens leave the daemon blinded unless their values were asked for: each is sent through a permutation of all 32-bit
numbers, another one for each position and each key.  Equal tokens at equal positions stay equal, which is all that
prefixes are made of.  Namespaces are told as hashes under the same key; their names and salts are not told at all.

A recording belongs to the connection that began it, and ends with it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from kvslot.api.wire import BadRequest, Busy, OutOfTurn, messages

if TYPE_CHECKING:
    from kvslot.allocator import Space
    from kvslot.daemon.connection import Connection
    from kvslot.daemon.membership import Member
    from kvslot.daemon.pools import HostedPool
    from kvslot.daemon.server import Server
    from kvslot.daemon.verbs import Row

log = structlog.stdlib.get_logger("kvslot.daemon")

RECORD_BYTES: Final = 64 << 20
"""Noted and not fetched: a second or two of the heaviest load that a daemon takes; who records fetches every 0.1 s."""
EVENT_BYTES: Final = 320
"""What an event takes beside its tokens: a tuple, its numbers, its place in the queue."""
FETCH_EVENTS: Final = 128
"""Of one fetch: about 0.2 ms."""
FETCH_BYTES: Final = 1 << 18
"""Of one fetch's tokens, which are blinded and copied: about 0.2 ms."""
WAITING_MOST: Final = 1 << 16
"""Requests that were told LATER whose first asking is remembered; the core has far fewer tickets."""
LOOK_AT: Final = 256
"""Of those, looked at in one fetch."""
CLEAR_EVENTS: Final = 512
"""Of an abandoned recording, dropped in one turn of the loop."""

Event = tuple[str, int, float, int, int, int, int, bytes | memoryview]
"""What, request, at, session, space, count, hit, tokens; see `messages.Noted`."""


class Recorder:
    """One recording of one pool."""

    def __init__(
        self, server: Server, hosted: HostedPool, owner: Connection, now: float, *, values: bool, key: bytes
    ) -> None:
        self.hosted = hosted
        self.owner = owner
        self.began = now
        self.values = values
        self.stopped = False
        self.noted = 0
        self.requests = 0
        self.lost_requests = 0
        self.lost_tokens = 0
        self.never = 0
        self.given_up = 0
        self.bytes = 0
        self._loop = server.loop
        self._events: deque[Event] = deque()
        self._running: dict[int, set[int]] = {}  # by session: those told of that have not ended
        self._waiting: dict[int, float] = {}  # ticket -> when it was first asked for
        self._roots: dict[int, tuple[Space, int]] = {}  # as many as there are
        self._key = key or secrets.token_bytes(32)
        self._blind: Blind | None = None if values else Blind(self._key)

    # -- noting: on the verbs' way --------------------------------------------------------------------------------

    def asked(self, member: Member, m: messages.Allocate, reply: object, now: float) -> None:
        """After an Allocate."""
        if isinstance(reply, messages.Later):
            if len(self._waiting) < WAITING_MOST:
                self._waiting.setdefault(reply.ticket, now)
            return
        at = self._waiting.pop(m.ticket, now) if m.ticket else now
        if isinstance(reply, messages.Never):
            self.never += 1
            return
        assert isinstance(reply, messages.Admitted)
        entry = member.sequences[m.sequence]
        if entry.request is not m:
            return  # the same request again: it runs already
        tokens = m.tokens
        size = len(tokens) + EVENT_BYTES
        if self.bytes + size > RECORD_BYTES:
            self.lost_requests += 1
            self.lost_tokens += len(tokens) >> 2
            return
        self.bytes += size
        self.requests += 1
        number = member.number
        handle = entry.handle
        running = self._running.get(number)
        if running is None:
            running = self._running[number] = set()
        running.add(handle)
        self._events.append(
            ("begun", handle, at, number, self._space(m.namespace), len(tokens) >> 2, reply.hit, tokens)
        )

    def told(self, member: Member, m: messages.Commit) -> None:
        """After a Commit that told of tokens."""
        handle = member.sequences[m.sequence].handle
        running = self._running.get(member.number)
        if running is None or handle not in running:
            return
        tokens = m.tokens
        size = len(tokens) + EVENT_BYTES
        if self.bytes + size > RECORD_BYTES:
            self.lost_tokens += len(tokens) >> 2
            return
        self.bytes += size
        sequence = self.hosted.core.sequences[handle]
        known = sequence.tokens_from + (len(sequence.tokens) >> 2)
        self._events.append(("told", handle, 0.0, member.number, 0, known - (len(tokens) >> 2), 0, tokens))

    def cut(self, member: Member, m: messages.Trim, now: float) -> None:
        """After a Trim that rolled back."""
        handle = member.sequences[m.sequence].handle
        running = self._running.get(member.number)
        if running is None or handle not in running:
            return
        what, at = "cut", 0.0
        if self.bytes + EVENT_BYTES > RECORD_BYTES:
            # Passed over, it would leave what was told before for true: the request ends here instead.
            running.discard(handle)
            self.lost_requests += 1
            what, at = "ended", now
        self.bytes += EVENT_BYTES
        self._events.append((what, handle, at, member.number, 0, m.keep_to, 0, b""))

    def forked(self, member: Member, m: messages.Fork, length: int, now: float) -> None:
        """After a Fork."""
        parent, child = member.sequences[m.sequence].handle, member.sequences[m.child].handle
        running = self._running.get(member.number)
        if running is None or parent not in running:
            return
        if self.bytes + EVENT_BYTES > RECORD_BYTES:
            self.lost_requests += 1
            return
        self.bytes += EVENT_BYTES
        self.requests += 1
        running.add(child)
        self._events.append(("forked", child, now, member.number, parent, length, 0, b""))

    def length(self, member: Member, sequence: int) -> tuple[int, int]:
        """Of a sequence that may be about to end: its handle and length, or (0, 0) for one that was not told of."""
        entry = member.sequences.get(sequence)
        running = self._running.get(member.number)
        if entry is None or running is None or entry.handle not in running:
            return 0, 0
        return entry.handle, self.hosted.core.sequences[entry.handle].length

    def ended(self, member: Member, handle: int, length: int, now: float) -> None:
        """After a Free."""
        self._running[member.number].discard(handle)
        self.bytes += EVENT_BYTES
        self._events.append(("ended", handle, now, member.number, 0, length, 0, b""))

    def left(self, member: Member, now: float) -> None:
        """A session is over, and all that it ran."""
        if self._running.pop(member.number, None):
            self.bytes += EVENT_BYTES
            self._events.append(("left", 0, now, member.number, 0, 0, 0, b""))

    def _space(self, root: int) -> int:
        """A number for a namespace: of its structure, since a root is used again."""
        space = self.hosted.core.roots[root]
        known = self._roots.get(root)
        if known is not None and known[0] is space:
            return known[1]
        text = json.dumps(msgspec.structs.astuple(space)).encode()
        digest = hashlib.blake2b(text, digest_size=8, key=self._key).digest()
        number = int.from_bytes(digest, "little") >> 1
        self._roots[root] = (space, number)
        return number

    # -- fetching: for the one who records -------------------------------------------------------------------------

    def fetch(self, number: int, now: float) -> messages.Recorded:
        """Some of what was noted, the oldest first; the rest with the next fetch."""
        events, room = self._events, FETCH_BYTES
        taken: list[Event] = []
        while events and len(taken) < FETCH_EVENTS and room > 0:
            event = events.popleft()
            what, request, at, session, space, count, hit, tokens = event
            size = len(tokens)
            if size <= room:
                self.bytes -= size + EVENT_BYTES
                room -= size
                taken.append(event)
                continue
            # The rest of a long one follows as if it had been told of later.
            first = 0 if what == "begun" else count
            view = memoryview(tokens)
            events.appendleft(("told", request, 0.0, session, 0, first + (room >> 2), 0, view[room:]))
            self.bytes -= room
            taken.append((what, request, at, session, space, count, hit, view[:room]))
            room = 0
        pieces = [(tokens, count if what == "told" else 0) for what, *_, count, _, tokens in taken if tokens]
        blind = self._blind
        out = iter([bytes(tokens) for tokens, _ in pieces] if blind is None else blind(pieces))
        found = [
            messages.Noted(what, request, at, session, space, count, hit, next(out) if tokens else b"")
            for what, request, at, session, space, count, hit, tokens in taken
        ]
        self.noted += len(found)
        return messages.Recorded(
            id=number,
            at=now,
            floor=self._floor(now),
            more=bool(events),
            running=sum(map(len, self._running.values())),
            waiting=len(self._waiting),
            lost_requests=self.lost_requests,
            lost_tokens=self.lost_tokens,
            never=self.never,
            given_up=self.given_up,
            events=found,
        )

    def _floor(self, now: float) -> float:
        """No request will be told of that was asked for earlier.

        `_waiting` is in the order of time, so its first one that still waits says it.  Few are all looked at.
        """
        waiting = self._waiting
        if not waiting:
            return now
        admission = self.hosted.core.admission
        few = len(waiting) <= LOOK_AT
        gone: list[int] = []
        floor = now
        for ticket, at in waiting.items():
            if ticket in admission.waiting or ticket in admission.awaiting:
                floor = min(floor, at)
                if not few:
                    break
            elif len(gone) < LOOK_AT:
                gone.append(ticket)  # withdrawn, its session has ended, or its grace is over
            else:
                floor = min(floor, at)  # it may wait; the next fetch goes on from here
                break
        for ticket in gone:
            del waiting[ticket]
        self.given_up += len(gone)
        return floor

    def stop(self) -> None:
        """Notes nothing more."""
        self.stopped = True

    def clear(self) -> None:
        """Forgets what was not fetched, some at a time."""
        for _ in range(min(len(self._events), CLEAR_EVENTS)):
            self._events.pop()
        if self._events:
            self._loop.call_soon(self.clear)


class Blind:
    """A permutation of all 32-bit numbers for each position, by a key."""

    STEP: Final = 1 << 14

    def __init__(self, key: bytes) -> None:
        self._key = int.from_bytes(hashlib.blake2b(b"tokens", digest_size=16, key=key).digest(), "little")
        self._keys: list[npt.NDArray[np.uint32]] = []

    def __call__(self, pieces: Sequence[tuple[bytes | memoryview, int]]) -> list[bytes]:
        """Tokens, and the position from which on they stand; all at once, as one array."""
        if not pieces:
            return []
        out = np.frombuffer(b"".join([tokens for tokens, _ in pieces]), dtype="<u4").copy()
        keys = [key for tokens, position in pieces for key in self._keys_of(position, len(tokens) >> 2)]
        before, behind = np.concatenate(keys, axis=1)
        out ^= before
        out *= np.uint32(0x9E3779B1)
        out ^= out >> np.uint32(15)
        out += behind
        out *= np.uint32(0x85EBCA77)
        out ^= out >> np.uint32(13)
        whole = out.tobytes()
        cut: list[bytes] = []
        at = 0
        for tokens, _ in pieces:
            cut.append(whole[at : at + len(tokens)])
            at += len(tokens)
        return cut

    def _keys_of(self, position: int, count: int) -> Iterator[npt.NDArray[np.uint32]]:
        """Two keys for each of `count` positions, in stretches."""
        step = self.STEP
        while count > 0:
            page, first = divmod(position, step)
            while len(self._keys) <= page:
                self._keys.append(self._page(len(self._keys)))
            part = min(count, step - first)
            yield self._keys[page][:, first : first + part]
            position += part
            count -= part

    def _page(self, number: int) -> npt.NDArray[np.uint32]:
        draw = np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, 0, number]))
        return draw.integers(0, 1 << 32, size=(2, self.STEP), dtype=np.uint32)


# -- the server's side ------------------------------------------------------------------------------------------------


class Recorders:
    """The recordings of a server, and the table of verbs that goes with them."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._plain = server.table
        self._of: dict[HostedPool, Recorder] = {}

    def act(self, connection: Connection, m: messages.Record, now: float) -> messages.Recorded:
        """The Record verb."""
        server = self._server
        mine = next((each for each in self._of.values() if each.owner is connection), None)
        if m.action == "start":
            if mine is not None:
                raise OutOfTurn(f"this connection records pool {mine.hosted.name!r} already")
            hosted = server.hosted(m.pool)
            other = self._of.get(hosted)
            if other is not None:
                raise Busy(
                    f"process {other.owner.peer.pid} records pool {hosted.name!r}: one recording at a time"
                )
            mine = self._of[hosted] = Recorder(server, hosted, connection, now, values=m.values, key=m.key)
            server.table = self._with_notes()
            log.info("recording_started", pool=hosted.name, pid=connection.peer.pid, values=m.values)
        elif m.action not in ("fetch", "stop"):
            raise BadRequest(f"no action {m.action!r} of Record; there are {', '.join(messages.RECORDINGS)}")
        elif mine is None:
            raise OutOfTurn("this connection records nothing: Record begins with action start")
        elif m.action == "stop" and not mine.stopped:
            mine.stop()
            server.table = self._with_notes()
        answer = mine.fetch(m.id, now)
        if mine.stopped and not answer.more:
            self._end(mine, "stopped")
        return answer

    def rows(self, now: float) -> list[dict[str, Any]]:
        """What is being recorded, for whoever looks."""
        return [
            {
                "pool": each.hosted.name,
                "pid": each.owner.peer.pid,
                "uid": each.owner.peer.uid,
                "age_s": max(0.0, now - each.began),
                "values": each.values,
                "requests": each.requests,
                "lost_requests": each.lost_requests,
                "lost_tokens": each.lost_tokens,
                "waiting_bytes": each.bytes,
            }
            for each in self._of.values()
        ]

    def disconnected(self, connection: Connection) -> None:
        """A connection has ended, and with it what it records."""
        for each in [each for each in self._of.values() if each.owner is connection]:
            self._end(each, "connection closed")

    def left(self, member: Member, now: float) -> None:
        """A session is over."""
        recorder = self._of.get(member.hosted)
        if recorder is not None:
            recorder.left(member, now)

    def _end(self, recorder: Recorder, reason: str) -> None:
        del self._of[recorder.hosted]
        self._server.table = self._with_notes()
        recorder.clear()
        log.info(
            "recording_ended",
            pool=recorder.hosted.name,
            pid=recorder.owner.peer.pid,
            reason=reason,
            requests=recorder.requests,
            lost_requests=recorder.lost_requests,
            lost_tokens=recorder.lost_tokens,
        )

    def _with_notes(self) -> Mapping[type, Row]:
        """The server's table of verbs: the plain one while nothing is recorded."""
        of = {hosted: each for hosted, each in self._of.items() if not each.stopped}
        if not of:
            return self._plain
        plain = self._plain
        noting = {
            messages.Allocate: _allocate,
            messages.Commit: _commit,
            messages.Trim: _trim,
            messages.Fork: _fork,
            messages.Free: _free,
        }
        return {
            **plain,
            **{
                kind: plain[kind]._replace(handler=make(of, plain[kind].handler))
                for kind, make in noting.items()
            },
        }


Handler = Callable[["Server", "Connection", Any, float], "messages.Reply | None"]
Of = dict["HostedPool", Recorder]


def _allocate(of: Of, inner: Handler) -> Handler:
    def allocate(server: Server, connection: Connection, m: Any, now: float) -> messages.Reply | None:
        reply = inner(server, connection, m, now)
        member = connection.member
        if member is not None:
            recorder = of.get(member.hosted)
            if recorder is not None:
                recorder.asked(member, m, reply, now)
        return reply

    return allocate


def _commit(of: Of, inner: Handler) -> Handler:
    def commit(server: Server, connection: Connection, m: Any, now: float) -> messages.Reply | None:
        reply = inner(server, connection, m, now)
        member = connection.member
        if m.tokens and member is not None:
            recorder = of.get(member.hosted)
            if recorder is not None:
                recorder.told(member, m)
        return reply

    return commit


def _trim(of: Of, inner: Handler) -> Handler:
    def trim(server: Server, connection: Connection, m: Any, now: float) -> messages.Reply | None:
        reply = inner(server, connection, m, now)
        member = connection.member
        if m.keep_to >= 0 and member is not None:
            recorder = of.get(member.hosted)
            if recorder is not None:
                recorder.cut(member, m, now)
        return reply

    return trim


def _fork(of: Of, inner: Handler) -> Handler:
    def fork(server: Server, connection: Connection, m: Any, now: float) -> messages.Reply | None:
        reply = inner(server, connection, m, now)
        member = connection.member
        if type(reply) is messages.Forked and member is not None:
            recorder = of.get(member.hosted)
            if recorder is not None:
                recorder.forked(member, m, reply.length, now)
        return reply

    return fork


def _free(of: Of, inner: Handler) -> Handler:
    def free(server: Server, connection: Connection, m: Any, now: float) -> messages.Reply | None:
        member = connection.member
        recorder = of.get(member.hosted) if member is not None else None
        handle, length = recorder.length(member, m.sequence) if recorder and member else (0, 0)
        reply = inner(server, connection, m, now)
        if handle and recorder is not None and member is not None:
            recorder.ended(member, handle, length, now)
        return reply

    return free
