"""A client of raw frames: what tests of the daemon speak, so that a fault of the client library hides nothing."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from kvslot.api.wire import SUBMITTED, VERSION, Reader, SessionPage, decode_outgoing, encode, messages
from kvslot.api.wire.page import COMPLETED


def tokens(count: int, start: int = 0) -> bytes:
    """`count` token ids from `start` on."""
    return struct.pack(f"<{count}i", *range(start, start + count))


class Wire:
    """One connection.  `call` sends a request and waits for its reply; pushes on the way are kept in `pushes`."""

    def __init__(self, path: Path, *, timeout: float = 10.0) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(timeout)
        try:
            self.sock.connect(str(path))
        except OSError:
            self.sock.close()
            raise
        self.reader = Reader(1 << 28)
        self.bodies: list[bytes | memoryview] = []
        self.pushes: list[messages.Push] = []
        self.descriptors: list[int] = []
        self.welcome: messages.Welcome | None = None
        self.page: SessionPage | None = None
        self.number = 0

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.welcome is not None and error is None:
            self.bye()
        self.close()

    def bye(self) -> None:
        """Ends the session in good order, if it is still there: without that a living process's slots stay aside."""
        with contextlib.suppress(OSError):
            self.call(messages.Bye)

    def close(self) -> None:
        """Just closes the socket, as a dying process would."""
        self.sock.close()
        if self.page is not None:
            self.page.close()
            self.page = None
        while self.descriptors:
            os.close(self.descriptors.pop())

    def send(self, request: messages.Message) -> None:
        self.sock.sendall(encode(request))

    def next_id(self) -> int:
        self.number += 1
        return self.number

    def receive(self) -> Any:
        """The next message, reply or push; ConnectionError when there is none any more."""
        while not self.bodies:
            data, rights, _, _ = self.sock.recvmsg(1 << 16, 256, socket.MSG_CMSG_CLOEXEC)
            for level, kind, content in rights:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    found = array.array("i")
                    found.frombytes(content[: len(content) - len(content) % found.itemsize])
                    self.descriptors += found
            if not data:
                raise ConnectionError("closed by the daemon")
            self.bodies = self.reader.feed(data)
        return decode_outgoing(self.bodies.pop(0))

    def reply(self) -> Any:
        """The next reply."""
        while isinstance(message := self.receive(), messages.Push):
            self.pushes.append(message)
        return message

    def call(self, kind: Any, *fields: Any, **named: Any) -> Any:
        """Sends a request with an id of its own, and waits for the reply to it."""
        number = self.next_id()
        self.send(kind(number, *fields, **named))
        reply = self.reply()
        assert reply.id in (number, 0), (reply, number)
        return reply

    def hello(self, name: str = "test", **fields: Any) -> messages.Welcome:
        """Opens the session."""
        welcome = self.call(messages.Hello, VERSION, name, **fields)
        assert isinstance(welcome, messages.Welcome), welcome
        self.welcome = welcome
        if welcome.descriptors:
            assert len(self.descriptors) == len(welcome.descriptors)
            self.page = SessionPage(self.descriptors[welcome.descriptors.index("page")])
        return welcome

    @property
    def namespace(self) -> int:
        assert self.welcome is not None
        return self.welcome.namespace

    def push(self, kind: type, seconds: float = 5.0) -> Any:
        """The next push of a kind, waiting for it."""
        for index, message in enumerate(self.pushes):
            if isinstance(message, kind):
                return self.pushes.pop(index)
        deadline = time.monotonic() + seconds
        while True:
            self.sock.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                message = self.receive()
            finally:
                self.sock.settimeout(10.0)
            assert isinstance(message, messages.Push), message
            if isinstance(message, kind):
                return message
            self.pushes.append(message)

    def closed(self, seconds: float = 5.0) -> bool:
        """Whether the daemon ends the connection; what it says before that is thrown away."""
        self.sock.settimeout(seconds)
        try:
            while True:
                self.receive()
        except (ConnectionError, BrokenPipeError):
            return True
        except TimeoutError:
            return False

    def step(self, submitted: int, completed: int) -> None:
        """Says in the session page how far the device is."""
        assert self.page is not None
        self.page.words[SUBMITTED] = submitted
        self.page.words[COMPLETED] = completed
