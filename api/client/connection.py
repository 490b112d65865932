"""One blocking connection to the daemon: frames out, messages in, strictly in the order of the stream.

A blocking call is one `sendall` and, for a reply of ordinary size, one `recv`: no thread, no event loop, no poll.  The
time limits are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO), which cost no system call; past one the connection is given
up, for a late reply could be taken for another's.

A connection belongs to the process that opened it.  Children of a fork drop their copy of the socket at once, and
whoever goes around that (a fork that Python does not know of) is stopped before the first byte is written.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import stat
import struct
from collections import deque
from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec

from kvslot.api.client.errors import Closed, WrongProcess
from kvslot.api.wire import (
    FRAME_BYTES,
    Disconnected,
    KvslotError,
    PeerFault,
    Reader,
    decode_outgoing,
    encode,
    messages,
    refusal,
)

RECEIVE: Final = 1 << 16
"""Bytes asked of one recv: a reply of ordinary size comes in one.  From 128 KiB on malloc maps fresh pages for each
call, which costs seven times what the recv does."""
DESCRIPTORS: Final = 8  # most that may come with one frame; the protocol names three
NAME_IT: Final = "name its socket (--socket of a command, the first argument of a client, or KVSLOT_SOCKET)"
PATH_BYTES: Final = 107  # of a Unix socket's path, set by the kernel's sockaddr_un

M = TypeVar("M", bound=msgspec.Struct)


def default_socket() -> str:
    """Where the daemon listens unless said: $KVSLOT_SOCKET, the user's runtime directory, or the system's."""
    path = os.environ.get("KVSLOT_SOCKET", "")
    if path:
        return path
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.geteuid():
        return os.path.join(runtime, "kvslot", "kvslot.sock")
    return "/run/kvslot/kvslot.sock"


class Connection:
    """A connected socket, its reader, and what was received but not yet looked at."""

    __slots__ = (
        "descriptors",
        "fault",
        "frames_received",
        "frames_sent",
        "path",
        "pid",
        "_ready",
        "_reader",
        "_socket",
    )

    def __init__(self, path: str = "", *, timeout: float = 30.0) -> None:
        """Connects to the daemon at `path` ("": the usual place).  `timeout`: seconds any one answer may take.

        Raises Disconnected, with what to do about it.
        """
        self.path = path or default_socket()
        self.pid = os.getpid()
        self.fault: KvslotError | None = None  # why nothing more can be sent or received
        self.descriptors: list[int] = []  # came with a frame, and wait to be taken over
        self.frames_sent = 0
        self.frames_received = 0
        self._reader = Reader(FRAME_BYTES + 1024)
        self._ready: deque[messages.Outgoing] = deque()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)  # not inherited by what is executed
        try:
            self.limit(timeout)  # before connecting, which waits where too many wait at the daemon's door
            self._socket.connect(self.path)
        except OSError as error:
            self._socket.close()
            raise Disconnected(f"no daemon at {self.path}: {remedy(error, self.path)}") from error

    def limit(self, timeout: float) -> None:
        """From now on any one answer may take so many seconds."""
        limit = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, frame: bytes, frames: int = 1) -> None:
        """Sends `frame`, which may be several in a row."""
        if self.fault is not None:
            raise self.fault
        if os.getpid() != self.pid:
            raise self.forked()
        try:
            self._socket.sendall(frame)
        except OSError as error:
            raise self.lost(_send_trouble(error)) from error
        self.frames_sent += frames

    def receive(self) -> messages.Outgoing:
        """The next message of the stream; waits for it."""
        ready = self._ready
        while not ready:
            if self.fault is not None:
                raise self.fault
            try:
                data = self._socket.recv(RECEIVE)
            except OSError as error:
                raise self.lost(_receive_trouble(error)) from error
            self._take(data)
        return ready.popleft()

    def poll(self) -> messages.Outgoing | None:
        """The next message if it is here already, else None; waits for nothing."""
        ready = self._ready
        if ready:
            return ready.popleft()
        if self.fault is not None:
            raise self.fault
        try:
            data = self._socket.recv(RECEIVE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self.lost(_receive_trouble(error)) from error
        self._take(data)
        return ready.popleft() if ready else None

    def wait(self, seconds: float) -> bool:
        """Waits until there is something to receive, at most `seconds`; whether there is."""
        if self._ready:
            return True
        if self.fault is not None:
            raise self.fault
        import select

        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(max(0, int(seconds * 1000 + 0.999))))

    def call(self, request: msgspec.Struct, kind: type[M]) -> M:
        """Sends `request` and waits for its reply, which must be a `kind`; pushes in between are dropped.

        For connections that have only one request under way.  Raises what the daemon refuses with.
        """
        self.send(encode(request))
        while isinstance(answer := self.receive(), messages.Push):
            pass
        return self.expect(answer, request, kind)

    def expect(self, answer: messages.Outgoing, request: msgspec.Struct, kind: type[M]) -> M:
        """`answer` as the reply to `request`; raises what it refuses with, or PeerFault when it is no answer to it."""
        wanted = getattr(request, "id", 0)
        if isinstance(answer, messages.Error) and answer.id in (wanted, 0):
            raise refusal(answer.code, answer.message) if answer.id else self.dismissed(answer)
        if not isinstance(answer, kind) or getattr(answer, "id", 0) != wanted:
            raise self.broken(f"{type(answer).__name__} came where {kind.__name__} {wanted} was due")
        return answer

    def receive_with_descriptors(self) -> messages.Outgoing:
        """As `receive`, taking over descriptors that come with the frame's first byte (`descriptors`)."""
        room = socket.CMSG_SPACE(DESCRIPTORS * array.array("i").itemsize)
        while not self._ready:
            try:
                # A copy must not reach what this process executes: closed on exec from the first moment on.
                data, control, flags, _ = self._socket.recvmsg(RECEIVE, room, socket.MSG_CMSG_CLOEXEC)
            except OSError as error:
                raise self.lost(_receive_trouble(error)) from error
            for level, kind, payload in control:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    each = array.array("i")
                    each.frombytes(payload[: len(payload) - len(payload) % each.itemsize])
                    self.descriptors += each
            if flags & socket.MSG_CTRUNC:
                raise self.broken("descriptors were lost on the way: this process has too many open files")
            self._take(data)
        return self._ready.popleft()

    def take_descriptors(self) -> list[int]:
        """Hands over the descriptors that came; they are the caller's to close."""
        taken, self.descriptors = self.descriptors, []
        return taken

    def close(self, fault: KvslotError | None = None) -> None:
        """Ends the connection; later calls raise `fault`."""
        if self.fault is None:
            self.fault = fault or Closed("the client was closed")
        self._socket.close()
        close_all(self.take_descriptors())

    def lost(self, why: str) -> KvslotError:
        """Gives the connection up; the error to raise."""
        if self.fault is None:
            self.close(Disconnected(f"the connection to {self.path} has ended: {why}"))
        assert self.fault is not None
        return self.fault

    def broken(self, why: str) -> KvslotError:
        """Gives the connection up because the daemon broke the protocol; the error to raise."""
        fault = PeerFault(f"the daemon at {self.path} broke the protocol: {why}")
        self.close(fault)
        return fault

    def dismissed(self, why: messages.Error) -> KvslotError:
        """The daemon has ended the connection and said why, of no request in particular; the error to raise."""
        fault = Disconnected(f"the daemon at {self.path} has ended the connection: {why.message}")
        fault.__cause__ = refusal(why.code, why.message)
        self.close(fault)
        return fault

    def forked(self) -> KvslotError:
        """In a child of the fork: drops this process's copy of the socket, unused; the error to raise."""
        self.fault = WrongProcess(
            f"this client belongs to process {self.pid}; a forked process opens its own Client "
            "(or is started with the spawn method)"
        )
        self._socket.close()
        return self.fault

    def _take(self, data: bytes) -> None:
        if not data:
            raise self.lost("the daemon closed it (it may have stopped, restarted, or dropped this session)")
        if data.startswith(b"HTTP/"):
            fault = PeerFault(f"{self.path} speaks HTTP: it is an admin API's socket; {NAME_IT}")
            self.close(fault)
            raise fault
        try:
            bodies = self._reader.feed(data)
            self.frames_received += len(bodies)
            for body in bodies:
                self._ready.append(decode_outgoing(body))
        except PeerFault as error:
            self.close(error)
            raise


def close_all(descriptors: Iterable[int]) -> None:
    """Closes descriptors, whatever state they are in."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def remedy(error: OSError, path: str) -> str:
    """What is wrong when a daemon's socket cannot be connected to, and what to do about it."""
    match error:
        case FileNotFoundError():
            return f"there is no such socket; start kvslotd, or {NAME_IT}"
        case ConnectionRefusedError() if not _is_socket(path):
            return f"that is no socket; {NAME_IT}"
        case ConnectionRefusedError():
            return "the socket is left over from a daemon that has ended; start kvslotd"
        case NotADirectoryError():
            return f"a part of that path is no folder; {NAME_IT}"
        case BlockingIOError():
            return "it lets nobody in: so many wait already that it must have been stopped, or hangs"
        case PermissionError():
            return "this user may not open the socket; see socket_group and socket_mode of the daemon's configuration"
    if len(os.fsencode(path)) > PATH_BYTES:
        return f"the path has {len(os.fsencode(path))} bytes and the kernel allows {PATH_BYTES}; use a shorter one"
    return str(error)


def _is_socket(path: str) -> bool:
    """Whether a socket lies there; what cannot be looked at may be one."""
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return True


def _send_trouble(error: OSError) -> str:
    if isinstance(error, BlockingIOError):
        return "it read nothing within the time limit"
    return str(error)


def _receive_trouble(error: OSError) -> str:
    if isinstance(error, BlockingIOError):
        return "it did not answer within the time limit"
    return str(error)
