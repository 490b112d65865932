"""One client's socket: frames in, frames out, and what is done with a client that floods, stalls or will not read.

    readable ──► received ──► decoded ──► (verbs.py) admitted, applied ──► encoded ──► sent
                     │                                                          │
                     └─ at most TURN_VERBS a turn, then others have theirs      └─ what the socket does not take waits
                                                                                   in `out`; past `reply_bytes` nothing
                                                                                   more is read, past `reply_seconds`
                                                                                   without progress it is dropped

Raw sockets with the loop's readiness callbacks: descriptors travel with the Welcome, which transports have no verb for,
and a saturated daemon serves half as many again (docs/decisions/0008).  Replies of a turn leave in one send.  Pushes
are kept by key, the latest of each, and go out when the socket has room: they are never lost and never pile up.
"""

from __future__ import annotations

import array
import socket
from collections import deque
from collections.abc import Hashable
from itertools import islice
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING, Final, TypeGuard

from kvslot.api.wire import BadRequest, PeerFault, Reader, Refused, decode_request, encode, messages
from kvslot.daemon.logs import asked

if TYPE_CHECKING:
    from kvslot.daemon.membership import Member, Peer
    from kvslot.daemon.server import Server

RECEIVE_BYTES: Final = 1 << 18
TURN_FRAMES: Final = 256
"""Frames that are cut out of what came at a time; a flood of tiny ones is not cut before it is served."""
TURN_VERBS: Final = 64
"""Verbs that one client is served before the others have their turn: about a millisecond."""
RECLAIM_VERBS: Final = 16
"""As so many verbs counts a Reclaim: what it names is looked at slot by slot."""
LONG_TOKENS: Final = 2048
"""Asked for at once, from which on room is made in slices first: evicting for it at once would hold up all others."""
FEW_BYTES: Final = 1 << 16
"""Frames that wait together are sent as one piece up to so many bytes, since joining them copies them."""

Long = messages.Allocate | messages.Extend


def is_long(request: messages.Request) -> TypeGuard[Long]:
    """Whether a request asks for so much that room is made for it first."""
    if type(request) is messages.Allocate:
        return len(request.tokens) > 4 * LONG_TOKENS
    return type(request) is messages.Extend and request.tokens > LONG_TOKENS


_buffer = memoryview(bytearray(RECEIVE_BYTES))  # one for all: what it holds is taken out before the next recv


class Connection:
    """A client's connection, with or without a session."""

    def __init__(self, server: Server, sock: socket.socket, peer: Peer, now: float) -> None:
        self.server = server
        self.sock = sock
        self.peer = peer
        self.control = server.may_control(peer)
        self.member: Member | None = None
        self.used = False  # has sent a Hello or a control verb that was accepted
        self.since = now
        self.closed = False
        self.closing = False  # ends once `out` is empty
        self.stuck_since = 0.0  # when `out` last moved, while it is not empty
        self._reader = Reader(server.settings.frame_bytes)
        self._backlog: deque[bytes | memoryview] = deque()
        self._batch: _Batch | None = None
        self._postponed: Long | None = None  # room is being made for it, a little at a time
        self._out = bytearray()
        self._held: bytearray | None = None  # replies, while the hub answers several clients
        self._pushes: dict[Hashable, messages.Push] = {}
        self._reading = False
        self._writing = False
        self._scheduled = False
        self._latency = server.latency
        self.resume_reading()

    # -- in ----------------------------------------------------------------------------------------------------

    def readable(self) -> None:
        """The socket has something: one recv, and what it completes is served."""
        latency = self._latency
        began = 0 if latency.skip else perf_counter_ns()
        try:
            size = self.sock.recv_into(_buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.end(str(error))
            return
        if not size:
            self.end("connection closed")
            return
        if began:
            latency.draw()
        else:
            latency.skip -= 1
        try:
            bodies = self._reader.feed(bytes(_buffer[:size]), TURN_FRAMES)
        except PeerFault as fault:
            self.fault(fault)
            return
        if not bodies:
            return
        if len(bodies) == 1 and not self._backlog and self._batch is None:
            self._serve_one(bodies[0], began)
            return
        self._backlog.extend(bodies)
        self._turn(began)

    def _serve_one(self, body: bytes | memoryview, began: int) -> None:
        """What is nearly always so: one frame, answered at once."""
        server = self.server
        received = perf_counter_ns() if began else 0
        try:
            request = decode_request(body)
        except PeerFault as fault:
            self.fault(fault)
            return
        kind = type(request)
        in_turns = kind is messages.Hello and bool(self._out)
        if type(request) is messages.Batch:
            in_turns = len(request.verbs) > TURN_VERBS or len(body) > 4 * LONG_TOKENS
        if in_turns:
            self._backlog.append(body)
            self._turn()
            return
        decoded = perf_counter_ns() if began else 0
        now = monotonic()
        if is_long(request) and server.makes_room(self, request, now):
            self._postponed = request
            self.pause_reading()
            return
        reply = server.answer(self, request, now)
        applied = perf_counter_ns() if began else 0
        if reply is not None:
            frame = encode(reply)
            encoded = perf_counter_ns() if began else 0
            if not self.closed:
                self.send(frame)
            if began:
                self._latency.sample(kind, began, received, decoded, applied, encoded, perf_counter_ns())
        server.after(self, now)

    def _turn(self, began: int = 0) -> None:
        """Serves what has come, up to TURN_VERBS; the rest waits until the others have been served.

        `began`: when the socket was looked at, where the first frame of this turn is to be timed.
        """
        self._scheduled = False
        if self.closed:
            return
        server, backlog = self.server, self._backlog
        now = monotonic()
        received = perf_counter_ns() if began else 0
        timed: tuple[type, int, int, int] | None = None
        left = TURN_VERBS
        frames: list[bytes] = []
        size = 0
        while left > 0 and not self._over():
            if size > FEW_BYTES:
                self._send_all(frames)
                frames, size = [], 0
                if len(self._out) > server.settings.reply_bytes:
                    break
            batch = self._batch
            if batch is not None:
                asked.request = batch.id
                for verb in islice(batch.verbs, left):
                    left -= 1
                    if is_long(verb) and server.makes_room(self, verb, now):
                        self._postponed = verb
                        break
                    batch.results.append(server.answer_in_batch(self, verb, now))
                if len(batch.results) < batch.size:
                    break
                self._batch = None
                frames.append(encode(messages.Results(batch.id, batch.results)))
                size += len(frames[-1])
                continue
            if not backlog:
                try:
                    backlog.extend(self._reader.cut(TURN_FRAMES))
                except PeerFault as fault:
                    self._send_all(frames)
                    self.fault(fault)
                    return
                if not backlog:
                    break
            body = backlog.popleft()
            try:
                request = decode_request(body)
            except PeerFault as fault:
                self._send_all(frames)
                self.fault(fault)
                return
            left -= 1
            decoded = perf_counter_ns() if began else 0
            if is_long(request) and server.makes_room(self, request, now):
                self._postponed = request
                break
            if type(request) is messages.Hello:
                # The Welcome goes out by itself, with descriptors: after all that was said before.
                self._send_all(frames)
                frames, size = [], 0
                if self._out:
                    backlog.appendleft(body)
                    break
            if type(request) is messages.Batch and server.takes_batch(self, request):
                self._batch = _Batch(request)
                continue
            reply = server.answer(self, request, now)
            applied = perf_counter_ns() if began else 0
            if type(request) is messages.Reclaim:
                left -= RECLAIM_VERBS - 1
            if reply is not None:
                frames.append(encode(reply))
                size += len(frames[-1])
                if began and timed is None:
                    timed = (type(request), decoded, applied, perf_counter_ns())
        self._send_all(frames)
        if timed is not None:
            kind, decoded, applied, encoded = timed
            self._latency.sample(kind, began, received, decoded, applied, encoded, perf_counter_ns())
        server.after(self, now)
        if self._over():
            return
        if self._batch is None:
            self._flush_pushes()
        if self._postponed is not None:
            self.pause_reading()
        elif self._batch is not None or backlog or self._reader.uncut:
            self.pause_reading()
            if not self._scheduled and not self._writing:
                self._scheduled = True
                server.loop.call_soon(self._turn)
        elif not self._writing:
            self.resume_reading()

    def go_on(self) -> None:
        """There is room for the request that was postponed, or there will be none."""
        request, self._postponed = self._postponed, None
        if request is None or self._over():
            return
        now = monotonic()
        if self._batch is not None:
            asked.request = self._batch.id
            self._batch.results.append(self.server.answer_in_batch(self, request, now))
        else:
            reply = self.server.answer(self, request, now)
            if reply is not None and not self.closed:
                self.send(encode(reply))
        self.server.after(self, now)
        self._read_on()

    def _read_on(self) -> None:
        """After the socket took all, or a request that was postponed: what has come is served, or more is read."""
        if self._over() or self._writing or self._postponed is not None:
            return
        if self._batch is not None or self._backlog or self._reader.uncut:
            if not self._scheduled:
                self._scheduled = True
                self.server.loop.call_soon(self._turn)
        else:
            self.resume_reading()

    def _over(self) -> bool:
        return self.closed or self.closing

    def pause_reading(self) -> None:
        """The client has to wait: with its replies, or for its turn."""
        if self._reading:
            self._reading = False
            self.server.hub.remove(self.sock.fileno())

    def resume_reading(self) -> None:
        """Ready for more."""
        if not self._reading and not self.closed and not self.closing:
            self._reading = True
            self.server.hub.add(self.sock.fileno(), self)

    # -- out ---------------------------------------------------------------------------------------------------

    def send(self, frame: bytes | bytearray) -> None:
        """Sends what the socket takes now, and keeps the rest."""
        if self._held is not None:
            self._held += frame
            return
        if self._out:
            self._out += frame
        else:
            try:
                sent = self.sock.send(frame)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as error:
                self.end(str(error))
                return
            if sent == len(frame):
                return
            self._out += memoryview(frame)[sent:]
            self.stuck_since = monotonic()
        if not self._writing:
            self._writing = True
            self.server.loop.add_writer(self.sock.fileno(), self._writable)
        if len(self._out) > self.server.settings.reply_bytes:
            self.pause_reading()

    def hold(self) -> None:
        """Replies wait until `release`."""
        self._held = bytearray()

    def release(self) -> None:
        """What was held is sent."""
        held, self._held = self._held, None
        if held and not self.closed:
            self.send(held)

    def _send_all(self, frames: list[bytes]) -> None:
        if frames and not self.closed:
            self.send(frames[0] if len(frames) == 1 else b"".join(frames))

    def send_with_descriptors(self, frame: bytes, descriptors: list[int]) -> None:
        """The Welcome: descriptors travel with its first byte, which the socket has room for."""
        self.release()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        try:
            sent = self.sock.sendmsg([frame], rights)
        except OSError as error:
            self.end(f"cannot pass descriptors: {error}")
            return
        if sent < len(frame):
            self.send(frame[sent:])

    def _writable(self) -> None:
        try:
            sent = self.sock.send(self._out)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.end(str(error))
            return
        del self._out[:sent]
        self.stuck_since = monotonic()
        if self._out:
            return
        self._writing = False
        self.server.loop.remove_writer(self.sock.fileno())
        if self.closing:
            self.end("done")
            return
        self._flush_pushes()
        self._read_on()

    def push(self, key: Hashable, message: messages.Push) -> None:
        """Tells the client, now or when its socket has room; of the same key only the latest."""
        self._pushes[key] = message
        # Not between the turns of a batch: it may be about a ticket that only the batch's results will name.
        if not self._out and self._batch is None:
            self._flush_pushes()

    def push_in_turn(self, message: messages.Push) -> None:
        """Tells the client behind the replies given so far and before those to come, whatever its socket takes now.

        What changes a table has to: a reply given later already knows of it.  Requires that `settled` holds.
        """
        if not self.closed:
            self.send(encode(message))
            if self.member is not None:
                self.member.pushed()

    def unpush(self, key: Hashable) -> None:
        """What has not been told yet need not be told any more."""
        self._pushes.pop(key, None)

    def _flush_pushes(self) -> None:
        while self._pushes and not self._out and not self.closed:
            key = next(iter(self._pushes))
            message = self._pushes.pop(key)
            self.send(encode(message))
            if self.member is not None:
                self.member.pushed()

    @property
    def waiting_bytes(self) -> int:
        """Replies that the client has not read."""
        return len(self._out)

    @property
    def in_batch(self) -> bool:
        """Verbs of a Batch are being answered, whose own ids mean nothing."""
        return self._batch is not None

    @property
    def settled(self) -> bool:
        """All that was answered is with the client, or in its socket; so what it is told now comes in order."""
        return not (self.closed or self._out or self._batch is not None)

    @property
    def idle(self) -> bool:
        """Nothing has been asked that is not answered, and nothing answered that is not sent."""
        return not (
            self._out or self._backlog or self._batch or self._postponed is not None or self._reader.uncut
        )

    # -- the end -----------------------------------------------------------------------------------------------

    def fault(self, fault: PeerFault) -> None:
        """The client broke the protocol: it is told, and the connection ends."""
        self.server.faulted(self, fault)
        self.refuse(BadRequest(str(fault)))

    def refuse(self, refused: Refused) -> None:
        """Says why, as far as the socket takes it, and ends the connection."""
        if not self.closed:
            self.release()
            self.send(encode(messages.Error(0, refused.code, str(refused))))
            self.end(str(refused))

    def finish(self) -> None:
        """Ends the connection once everything said has been taken."""
        self.release()
        if self.closed:
            return
        if self._out:
            self.closing = True
            self.pause_reading()
        else:
            self.end("done")

    def end(self, reason: str) -> None:
        """Closes the socket; what its session held is dealt with as membership.py says."""
        if self.closed:
            return
        self.closed = True
        loop, number = self.server.loop, self.sock.fileno()
        if self._reading:
            self.server.hub.remove(number)
        if self._writing:
            loop.remove_writer(number)
        self._reading = self._writing = False
        self.sock.close()
        self._backlog.clear()
        self._batch = self._postponed = None
        self._pushes.clear()
        self._out.clear()
        self.server.disconnected(self, reason)


class _Batch:
    """A Batch that is being answered."""

    __slots__ = ("id", "results", "size", "verbs")

    def __init__(self, request: messages.Batch) -> None:
        self.id = request.id
        self.size = len(request.verbs)
        self.verbs = iter(request.verbs)
        self.results: list[messages.BatchReply] = []
