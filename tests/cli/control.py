"""A control server for tests: answers control verbs about real pools on a real socket, from a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvslot.allocator import audit
from kvslot.api.wire import BadRequest, Denied, NotFound, Reader, Refused, decode_request, encode, messages
from kvslot.daemon import inspection

from .views import View


class FakeDaemon:
    """Serves one connection after the other.  `denies`: nobody may ask; `faults`: what every audit finds."""

    def __init__(self, path: Path, view: View) -> None:
        self.view = view
        self.denies = False
        self.garbage = b""
        self.faults: list[str] = []
        self.limit = 0  # rows of a page; 0: as many as are asked for
        self.asked: list[messages.Request] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self.path = str(path)
        self._socket.listen(8)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                reader = Reader()
                while data := connection.recv(1 << 16):
                    for body in reader.feed(data):
                        connection.sendall(self.garbage or encode(self._answer(decode_request(body))))

    def _answer(self, request: messages.Request) -> messages.Reply:
        self.asked.append(request)
        try:
            if self.denies and not isinstance(request, messages.Ping):
                raise Denied("user 1000 is not among those who may")
            return self._act(request)
        except Refused as error:
            return messages.Error(request.id, error.code, str(error))

    def _act(self, request: messages.Request) -> messages.Reply:
        pools = self.view.pools
        match request:
            case messages.Inspect():
                rows, cursor = inspection.rows(
                    request.kind, self.view, request.cursor, self.limit or request.limit, pool=request.pool
                )
                return messages.Inspected(request.id, request.kind, rows, cursor)
            case messages.Ping():
                return messages.Pong(request.id, self.view.boot)
            case messages.Evict():
                return messages.Evicted(request.id, pools[request.pool].core.evict(request.tokens))
            case messages.Defrag():
                if request.action != "status":
                    self.view.act(request.action, request.pool)
                found = self.view.compaction
                if request.pool and request.pool not in pools:
                    raise NotFound(f"no pool {request.pool!r}; there are {', '.join(pools)}")
                return messages.Defragged(
                    request.id, [found[each] for each in pools if request.pool in ("", each)]
                )
            case messages.Audit():
                faults = self.faults or audit(pools[request.pool].core)
                return messages.Audited(request.id, faults, 1.5)
            case messages.SetConfig():
                try:
                    self.view.settings = msgspec.structs.replace(
                        self.view.settings, **{request.name: request.value}
                    )
                except TypeError:
                    raise BadRequest(f"{request.name!r} cannot be changed while running") from None
                return messages.Done(request.id)
            case messages.Drain():
                self.view.drain_left = request.deadline_ms / 1000
                return messages.Done(request.id)
            case _:
                raise AssertionError(request)


@contextmanager
def served(path: Path, view: View) -> Iterator[FakeDaemon]:
    """A fake daemon at `path` while the block runs."""
    daemon = FakeDaemon(path, view)
    try:
        yield daemon
    finally:
        daemon.close()
