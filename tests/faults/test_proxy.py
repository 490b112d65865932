"""A proxy between client and daemon that cuts at any byte, stalls and dribbles.

No descriptors come through it, so its sessions have no memory: what they lose with their connection is free at once.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvslot.api.wire import PeerFault
from kvslot.api.wire.messages import (
    Admitted,
    Allocate,
    Batch,
    Commit,
    Extend,
    Free,
    Inspect,
    Namespace,
    Ping,
    Pong,
    Probe,
)

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens
from .actors import empty


class Proxy:
    """One connection through: pieces of `piece` bytes after `pause` seconds, cut after `up` or `down` bytes.

    `stall_up` and `stall_down`: after so many bytes nothing more goes that way, and nothing is closed.
    """

    def __init__(
        self,
        daemon: Path,
        folder: Path,
        *,
        up: int = -1,
        down: int = -1,
        stall_up: int = -1,
        stall_down: int = -1,
        piece: int = 1 << 16,
        pause: float = 0.0,
    ) -> None:
        self.path = folder / f"p{random.randrange(10**9)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._daemon = daemon
        self._limits = {True: (up, stall_up), False: (down, stall_down)}
        self._piece, self._pause = piece, pause
        self._ended = threading.Event()
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            server = socket.socket(socket.AF_UNIX)
            self._sockets += [client, server]
            server.connect(str(self._daemon))
            for up in (True, False):
                ends = (client, server) if up else (server, client)
                thread = threading.Thread(target=self._forward, args=(*ends, *self._limits[up]))
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, target: socket.socket, cut: int, stall: int) -> None:
        passed = 0
        try:
            while not self._ended.is_set():
                room = min((limit - passed for limit in (cut, stall) if limit >= 0), default=self._piece)
                if not room:
                    if passed == stall:
                        self._ended.wait()
                    return
                data = source.recv(min(room, self._piece))
                if not data:
                    return
                if self._pause:
                    time.sleep(self._pause)
                target.sendall(data)
                passed += len(data)
        except OSError:
            pass
        finally:
            for each in (source, target):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()
        for each in self._sockets:
            each.close()
        self.path.unlink()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    with running() as daemon:
        yield daemon


def script(wire: Wire) -> None:
    """A session's life in a few verbs."""
    wire.hello("proxied", map=False, namespace=Namespace(tenant="proxied"))
    admitted = wire.call(Allocate, wire.namespace, 1, tokens(40))
    assert isinstance(admitted, Admitted)
    wire.call(Extend, 1, written=40, tokens=16)
    assert wire.call(Commit, 1, 40).length == 40
    results = wire.call(Batch, [Probe(0, wire.namespace, tokens(40)), Free(0, 1)])
    assert [type(each).__name__ for each in results.results] == ["Probed", "Done"]
    assert results.results[0].hit == 39
    wire.bye()


def _attempt(path: Path) -> bool:
    """Whether the script went through; what else it may be is the end of the connection."""
    try:
        wire = Wire(path)
    except OSError:
        return False
    try:
        script(wire)
    except (ConnectionError, PeerFault):
        return False
    finally:
        wire.close()
    return True


@pytest.mark.parametrize("up", [True, False])
def test_cut_at_any_byte(daemon: Running, up: bool) -> None:
    """Of what the client says, and of what it hears: the daemon goes on, and nothing of that session stays."""
    rng = random.Random(up)
    folder = daemon.socket.parent
    ended = 0
    cuts = sorted(rng.sample(range(420), 60)) if up else sorted(rng.sample(range(250), 60))
    with Wire(daemon.socket) as other:
        other.hello("other", map=False)
        for cut in cuts:
            with Proxy(daemon.socket, folder, **({"up": cut} if up else {"down": cut})) as proxy:
                ended += not _attempt(proxy.path)
            assert isinstance(other.call(Ping), Pong)
    assert ended > 30
    empty(daemon)


@pytest.mark.parametrize("piece", [1, 3, 7])
def test_dribbled(daemon: Running, piece: int) -> None:
    """A byte at a time, either way: the same answers."""
    with Proxy(daemon.socket, daemon.socket.parent, piece=piece) as proxy:
        assert _attempt(proxy.path)
    empty(daemon)


def test_slow(daemon: Running) -> None:
    """Slow by a hundredth of a second a piece: the others do not wait for it."""
    with Proxy(daemon.socket, daemon.socket.parent, piece=40, pause=0.01) as proxy:
        done: list[bool] = []
        thread = threading.Thread(target=lambda: done.append(_attempt(proxy.path)))
        thread.start()
        calls = 0
        with Wire(daemon.socket) as other:
            other.hello("other", map=False)
            while thread.is_alive():
                other.call(Ping)
                calls += 1
        thread.join()
        assert done == [True]
        assert calls > 20
    empty(daemon)


def test_stalled_request_is_waited_for(daemon: Running) -> None:
    """Half a frame that does not go on costs the daemon nothing but those bytes, for as long as it takes."""
    with (
        Proxy(daemon.socket, daemon.socket.parent, stall_up=200) as proxy,
        Wire(proxy.path, timeout=0.5) as wire,
    ):
        with pytest.raises(TimeoutError):
            script(wire)
        with Wire(daemon.socket) as other:
            script(other)
        wire.welcome = None
    empty(daemon)


def test_stalled_replies_end_the_session() -> None:
    """Replies that nobody takes: past the limit in bytes it is not read any more, past that in time it is dropped."""
    with running(reply_bytes=1 << 16, reply_seconds=0.5) as daemon:
        with (
            Proxy(daemon.socket, daemon.socket.parent, stall_down=2000) as proxy,
            Wire(proxy.path, timeout=0.2) as wire,
        ):
            wire.hello("stalled", map=False)
            wire.call(Allocate, wire.namespace, 1, tokens(100))
            with contextlib.suppress(OSError):
                for number in range(100, 3000):
                    wire.send(Inspect(number, "config"))
            began = time.monotonic()
            while "session_lost" not in daemon.text():
                assert time.monotonic() - began < 10.0
                time.sleep(0.02)
            wire.welcome = None
        empty(daemon)
