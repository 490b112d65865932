"""Slow and hostile HTTP clients: each costs itself its connection, and nobody else notices.

The daemon's patience is cut down to a second for these tests, by what its interpreter does before it is a daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvslot.api.admin import guard
from kvslot.api.admin.guard import Bucket, Guarded
from kvslot.api.wire.messages import Allocate, Ping, Pong
from kvslot.daemon.admin import AdminService

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens
from .http import Client, connect, gone

IMPATIENT = """
from kvslot.api.admin import app, guard
for name in ("read_seconds", "send_seconds"):
    guard.Door.__init__.__kwdefaults__[name] = 1.0
guard.Door.__init__.__kwdefaults__["idle_seconds"] = 2.0
app.BODY_SECONDS = 1.0
"""
HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    with running(first=IMPATIENT, admin_connections=12) as daemon:
        yield daemon


@pytest.fixture
def admin(daemon: Running) -> Iterator[Path]:
    """Its socket; at the end it serves as if nothing had been, and has no connection left but what is asked by."""
    path = daemon.socket.with_name("admin.sock")
    yield path
    deadline = time.monotonic() + 20
    while True:
        with contextlib.suppress(ConnectionError), Client(path) as client:
            if client.get("/healthz").status == 200:
                break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with Wire(daemon.socket) as wire:
        assert isinstance(wire.call(Ping), Pong)


def test_a_request_that_never_ends_is_cut_off(daemon: Running, admin: Path) -> None:
    """Half a request line, a head byte by byte, a body that does not come: each is closed within its time."""
    half = connect(admin)
    half.sendall(b"GET /hea")
    body = connect(admin)
    body.sendall(
        b"POST /v1/acts/evict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{"
    )
    drip = connect(admin)
    deadline = time.monotonic() + 20
    with contextlib.suppress(OSError):  # a broken pipe or a reset, by who is quicker
        while True:
            for byte in HEAD:
                drip.sendall(bytes([byte]))
                assert time.monotonic() < deadline
                time.sleep(0.02)
    assert gone(half) == b""
    assert gone(body).startswith(b"HTTP/1.1 408 ")
    for sock in (half, body, drip):
        sock.close()
    assert '"has not sent a whole request"' in daemon.text()


def test_idle_connections_are_closed(admin: Path) -> None:
    """One that never said anything, and one that had its answer: after their time, without a word."""
    silent = connect(admin)
    kept = connect(admin)
    kept.sendall(HEAD + b"\r\n")
    assert gone(silent) == b""
    assert gone(kept).count(b"HTTP/1.1 200") == 1
    silent.close()
    kept.close()


def test_a_client_that_does_not_read_is_cut_off(daemon: Running, admin: Path) -> None:
    """One that asks and asks and reads nothing: what waits for it is bounded, then it is closed."""
    sock = connect(admin)
    before = daemon.rss_kib()
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    sock.settimeout(0.5)
    deadline = time.monotonic() + 30
    while True:
        assert time.monotonic() < deadline
        try:
            sock.sendall(request * 50)
        except TimeoutError:
            continue
        except OSError:
            break
    sock.close()
    assert daemon.rss_kib() < before + 20_000
    assert '"does not read an answer"' in daemon.text()


def test_too_many_connections_are_told(daemon: Running, admin: Path) -> None:
    """Beyond the most there may be each gets 503 at once; those inside go on, engines too, and later there is room."""
    inside: list[Client] = []
    deadline = time.monotonic() + 20
    while len(inside) < 12:
        client = Client(admin)
        try:
            assert client.get("/healthz").status == 200
        except (AssertionError, OSError):  # those of earlier tests have not all been closed yet
            client.close()
            assert time.monotonic() < deadline
        else:
            inside.append(client)
    with connect(admin) as late:
        said = gone(late)
    assert said.startswith(b"HTTP/1.1 503 ")
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
    with Wire(daemon.socket) as wire:
        assert isinstance(wire.call(Ping), Pong)
    assert inside[0].get("/healthz").status == 200
    for client in inside:
        client.close()


GARBAGE = [
    b"\x00" * 100, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x11" * 200, b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n", b"G\xc3\xa9T / HTTP/1.1\r\n\r\n", b"GET " + b"/" * 100_000,
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 500 + b"\r\n", b"GET / HTTP/1.1\r\nA: " + b"x" * 50_000 + b"\r\n\r\n",
    b"POST /v1/acts/evict HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/acts/evict HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    b"POST /v1/acts/evict HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
    b"POST /v1/acts/evict HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/acts/evict HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFF\r\n",
    b"POST /v1/acts/audit HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n\r\n" + b"x" * 5000,
    b"CONNECT evil.example:80 HTTP/1.1\r\nHost: evil.example:80\r\n\r\n", b"GET http://evil.example/ HTTP/1.1\r\n\r\n",
    b"GET /%ff%fe%00 HTTP/1.1\r\n\r\n", b"GET //v1//stats HTTP/1.1\r\n\r\n", b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
    b"GET /v1/pool?pool=%ff&%00=\xff HTTP/1.1\r\n\r\n", b"OPTIONS * HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\nHost: \x01\x02\r\n\r\n",
    b"GET / HTTP/1.1\r\n folded: x\r\n\r\n",
    b"GET /v1/stats HTTP/1.1\r\nExpect: 100-continue\r\n\r\n", b"HEAD /v1/events HTTP/1.0\r\n\r\n",
]  # fmt: skip


def test_garbage_ends_its_own_connection_only(daemon: Running, admin: Path) -> None:
    """None of it gets a 2xx for what it should not, none ends or stops the daemon, and no traceback is logged."""
    for each in GARBAGE:
        sock = connect(admin)
        with contextlib.suppress(OSError):
            sock.sendall(each)
            sock.shutdown(socket.SHUT_WR)
        answer = gone(sock)
        sock.close()
        if answer:
            assert answer.startswith(b"HTTP/1."), (each[:60], answer[:100])
            status = int(answer.split(b" ", 2)[1])
            assert 200 <= status < 500, (each[:60], answer[:300])
            if each.startswith(b"POST"):
                assert status >= 400, (each[:60], answer[:300])
        with Client(admin) as client:
            assert client.get("/healthz").status == 200
    text = daemon.text()
    assert "Traceback" not in text
    assert '"admin_fault"' not in text


def test_pipelined_requests_are_answered_in_order(admin: Path) -> None:
    """A hundred requests in one go get a hundred answers, in their order."""
    with connect(admin) as sock:
        paths = ["/v1/stats", "/readyz", "/nope", "/v1/pool"] * 25
        sock.sendall(b"".join(f"GET {each} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for each in paths))
        sock.shutdown(socket.SHUT_WR)
        found = gone(sock)
    statuses = [int(each[:3]) for each in found.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200, 200, 404, 200] * 25


def test_compressed_bodies_are_not_unpacked(admin: Path) -> None:
    """A body that would grow a thousandfold is refused by its header."""
    with Client(admin) as client:
        answer = client.ask("POST", "/v1/acts/evict", b"\x1f\x8b" + b"\0" * 500, {"Content-Encoding": "gzip"})
        assert answer.status == 415


def test_out_of_descriptors_the_api_goes_on() -> None:
    """S61: with all engines' connections taken, the API answers, and says what it knows; the log stays short."""
    first = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))"
    with running(first=first) as daemon:
        engines: list[socket.socket] = []
        for _ in range(120):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(5)
            with contextlib.suppress(OSError):
                sock.connect(str(daemon.socket))
            engines.append(sock)
        with Client(daemon.socket.with_name("admin.sock")) as client:
            for _ in range(5):
                assert client.get("/v1/stats").status == 200
                assert client.get("/metrics").status == 200
            assert client.get("/healthz").json()["checks"]
        for sock in engines:
            sock.close()
        assert len(daemon.text().splitlines()) < 60


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_drain_waits_for_no_http_client(loop: str) -> None:
    """S57: the daemon ends within its limit with code 0, everybody sees the end, and no task is destroyed.

    Idle engines, half a frame, keep-alive connections, a scrape that is not read, a stream, half a request.
    """
    first = "import sys; sys.modules['uvloop'] = None" if loop == "asyncio" else ""
    with running(first=first) as daemon:
        admin = daemon.socket.with_name("admin.sock")
        wires = [Wire(daemon.socket) for _ in range(3)]
        for wire in wires:
            wire.hello()
        half_frame = connect(daemon.socket)
        half_frame.sendall(b"\x10\x00\x00\x00\x01")
        clients = [Client(admin) for _ in range(3)]
        for client in clients:
            assert client.get("/healthz").status == 200
        others: list[socket.socket] = [connect(admin) for _ in range(4)]
        others[1].sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")  # and does not read it
        others[2].sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        others[3].sendall(HEAD)
        assert others[2].recv(4096).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        assert daemon.stop(20) == 0
        assert time.monotonic() - began < 2.0 + 2.0
        assert not admin.exists()
        assert not daemon.socket.exists()
        for sock in [half_frame, *others, *[client.sock for client in clients]]:
            gone(sock)
            sock.close()
        for wire in wires:
            wire.close()
        text = daemon.text()
        assert f'"loop":"{loop}"' in text
        for said in ("destroyed", "Traceback", "never retrieved", "CancelledError"):
            assert said not in text


def test_running_work_is_waited_for_and_views_go_on() -> None:
    """While a drain waits for an engine the API tells who holds the end up; its answers are each connection's last."""
    with running(drain_seconds=30.0) as daemon:
        admin = daemon.socket.with_name("admin.sock")
        with Wire(daemon.socket) as wire:
            space = wire.hello("holder").namespace
            wire.call(Allocate, space, 1, tokens(5))
            daemon.process.terminate()
            deadline = time.monotonic() + 10
            while True:
                with Client(admin) as client:
                    if client.get("/readyz").status == 503:
                        break
                assert time.monotonic() < deadline
            rows: list[dict[str, Any]] = []
            with Client(admin) as client:
                answer = client.get("/v1/sessions")
                rows = answer.json()["items"]
            assert [row["name"] for row in rows] == ["holder"]
            wire.bye()
        assert daemon.process.wait(20) == 0


def test_a_bucket_gives_so_many_a_second_and_so_many_at_once() -> None:
    """The burst is free, what comes beyond waits for its turn each behind the other, and a pause fills it up again."""
    bucket = Bucket(10.0, 5.0, 100.0)
    assert [bucket.take(100.0) for _ in range(5)] == [0.0] * 5
    assert [round(bucket.take(100.0), 6) for _ in range(3)] == [0.1, 0.2, 0.3]
    assert bucket.take(100.3) == pytest.approx(0.1)
    assert [bucket.take(200.0) for _ in range(6)][:5] == [0.0] * 5


def test_clients_that_never_pause_have_a_small_part_of_the_loop(daemon: Running, admin: Path) -> None:
    """Six that ask without end are held to the rate together; an engine is answered meanwhile."""
    ended = threading.Event()
    answers = [0] * 6

    def hammer(index: int) -> None:
        with contextlib.suppress(OSError, AssertionError), Client(admin) as client:
            while not ended.is_set():
                assert client.get("/readyz").status == 200
                answers[index] += 1

    threads = [threading.Thread(target=hammer, args=(index,)) for index in range(6)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    with Wire(daemon.socket) as wire:
        while time.monotonic() - began < 3.0:
            assert isinstance(wire.call(Ping), Pong)
    ended.set()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    assert sum(answers) <= guard.REQUEST_BURST + guard.REQUEST_RATE * seconds + 20


def test_faults_of_http_connections_do_not_end_the_daemon() -> None:
    """What the loop tells of such a connection, or of a task of aiohttp's, is noted; by all else the daemon ends."""
    noted: list[str] = []

    class Service(AdminService):
        def __init__(self) -> None:
            pass

        def raised(self, where: str, error: BaseException) -> None:
            noted.append(where)

    async def run() -> None:
        service = Service()
        error = ValueError("x")
        protocol = object.__new__(Guarded)
        assert service.caused({"message": "Fatal error", "exception": error, "protocol": protocol})
        theirs = asyncio.ensure_future(web.Response().prepare(object()))  # type: ignore[arg-type]
        assert service.caused({"message": "never retrieved", "exception": error, "future": theirs})
        ours = asyncio.ensure_future(asyncio.sleep(0))
        assert not service.caused({"message": "never retrieved", "exception": error, "future": ours})
        assert not service.caused({"message": "Exception in callback", "exception": error})
        await asyncio.gather(theirs, ours, return_exceptions=True)

    asyncio.run(run())
    assert noted == ["Fatal error", "never retrieved"]
