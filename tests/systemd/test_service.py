"""A real kvslotd under a manager: what it is told when, and what becomes of daemon and clients (S57, S63, S71)."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from kvslot.api.wire import encode
from kvslot.api.wire.messages import Allocate, Draining, Hello, Ping, Pong
from kvslot.daemon import server as server_module
from kvslot.daemon.device import Geometry
from kvslot.daemon.device.memory import MemoryDevice
from kvslot.daemon.endpoint import EndpointError, claim
from kvslot.daemon.notify import Notifier, Store
from kvslot.daemon.service import START_SECONDS, STOP_SECONDS, Service

from ..admin.http import Client
from ..tools.daemon import configuration
from ..tools.wire import Wire, tokens
from .supervisor import LONG, Supervisor

MAIN = "from kvslot.daemon.main import main; raise SystemExit(main())"


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short name: paths of sockets have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvs", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def supervised(
    folder: Path, *, first: str = "", passed: bool = True, settings: dict[str, Any] | None = None, **how: Any
) -> Iterator[Supervisor]:
    """A daemon under a manager that has made its socket (`passed`), not started yet; it must not have faulted."""
    path = folder / "s"
    file = folder / "kvslot.toml"
    # With a socket that was passed the configured one is not used.
    said = {"log_format": "json", "drain_seconds": 0.5, **(settings or {})}
    file.write_text(configuration(folder / "other" if passed else path, [{}], said))
    program = ["-Ic", f"{first}\n{MAIN}"] if first else ["-Im", "kvslot.daemon"]
    with Supervisor(
        [sys.executable, *program, "--config", str(file)],
        sockets={"kvslot": path} if passed else {},
        log=folder / "log",
        **how,
    ) as supervisor:
        yield supervisor
        text = supervisor.text()
        assert "Traceback" not in text, text
        assert "internal_fault" not in text, text
        assert not supervisor.ignored, "a child speaks for the daemon"


def events(supervisor: Supervisor, name: str) -> list[dict[str, Any]]:
    """Its log's events of a name."""
    lines = [json.loads(line) for line in supervisor.text().splitlines() if line.startswith("{")]
    return [each for each in lines if each["event"] == name]


# -- its life ---------------------------------------------------------------------------------------------------------


def test_S71_a_whole_life(folder: Path) -> None:
    """Each step is told: what the start is at, READY once it serves, reloads, the end and the time it may take."""
    with supervised(folder, watchdog_seconds=LONG) as manager:
        waiting = Wire(folder / "s")  # nobody serves yet
        manager.start()
        said = manager.messages
        first = manager.said("EXTEND_TIMEOUT_USEC")[0]
        assert first.fields["EXTEND_TIMEOUT_USEC"] == str(round(START_SECONDS * 1e6))
        assert "memory of pool default" in first.fields["STATUS"]
        ready = next(index for index, each in enumerate(said) if "READY" in each.fields)
        assert first in said[:ready]
        assert all("WATCHDOG" not in each.fields for each in said[:ready])
        assert "0 sessions; default" in manager.status
        waiting.hello("early")

        file = folder / "kvslot.toml"
        file.write_text(file.read_text().replace("drain_seconds = 0.5", "drain_seconds = 0.75"))
        manager.reload()
        manager.wait(lambda: manager.history[-2:] == ["reloading", "ready"])
        (reloaded,) = events(manager, "reloaded")
        assert reloaded["changed"] == {"drain_seconds": 0.75}
        assert reloaded["needs_restart"] == [], "the socket is the manager's, whatever the file says"
        file.write_text("drain_seconds = -1\n")
        manager.reload()
        manager.wait(lambda: manager.history.count("reloading") == 2 and manager.history[-1] == "ready")
        assert len(events(manager, "reload_failed")) == 1

        assert manager.stop() == 0
        (stopping,) = manager.said("STOPPING")
        assert stopping.fields["EXTEND_TIMEOUT_USEC"] == str(round((0.75 + STOP_SECONDS) * 1e6))
        assert isinstance(waiting.push(Draining), Draining)
        waiting.close()
        assert manager.history == ["started", "ready", *["reloading", "ready"] * 2, "stopping", "exited"]


class SlowDevice:
    """A device whose memory takes 200 s, by a clock that this drives."""

    def __init__(self, clock: list[float]) -> None:
        self.geometry = Geometry(slots=16, slot_bytes=(1,), alignment=1)
        self._clock = clock

    def prefault(self, progress: Any) -> None:
        for done in range(1, 2001):
            self._clock[0] += 0.1
            progress(done, 2000)


@pytest.mark.parametrize("told", [True, False])
def test_S71_a_slow_start_is_not_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    """200 s of taking memory under a limit of 90 s: the limit is always extended before it ends; else it would end."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    limit, late = clock[0] + 90.0, False
    texts: list[str] = []

    class Told(Notifier):
        def extend(self, seconds: float, text: str = "") -> None:
            nonlocal limit, late
            late = late or clock[0] > limit
            limit = max(limit, clock[0] + seconds)
            texts.append(text)

    door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    door.bind(str(folder / "n"))
    service = Service(Told(str(folder / "n")) if told else Notifier())
    server_module._prefault("chat", cast("MemoryDevice", SlowDevice(clock)), service)
    assert (late or clock[0] > limit) is not told
    if told:
        assert 100 <= len(texts) <= 210, "about one a second, however often it is reported"
        assert texts[-1].startswith("taking the memory of pool chat: ")
        assert texts[-1].endswith(" %")
    service.close()
    door.close()


# -- the watchdog -----------------------------------------------------------------------------------------------------


def test_S71_a_loop_that_hangs_gives_no_sign_of_life(folder: Path) -> None:
    """A blocked loop sends no WATCHDOG, is killed and says where it hung; the next one serves who waits at the door."""
    block = "import signal, time\ndef hangs(*_): time.sleep(600)\nsignal.signal(signal.SIGUSR1, hangs)"
    with supervised(folder, first=block, watchdog_seconds=4.0) as manager:
        manager.start()
        manager.wait(lambda: bool(manager.said("WATCHDOG")))
        manager.send(signal.SIGUSR1)
        with Wire(folder / "s", timeout=LONG) as waiting:
            manager.wait(lambda: manager.starts == 2 and manager.state == "running")
            assert manager.codes == [-signal.SIGABRT]
            assert isinstance(waiting.call(Ping), Pong)
        assert manager.history == ["started", "ready", "watchdog", "exited", "started", "ready"]
        assert "Fatal Python error: Aborted" in manager.text()
        assert "in hangs" in manager.text(), "the log does not say where it hung"
        assert manager.stop() == 0


def test_S71_signs_of_life_come_at_half_the_period(folder: Path) -> None:
    """The period is the manager's: signs come at half of it, by the daemon's own clock."""
    sleeps: list[float] = []

    async def look() -> None:
        service = Service(Notifier(str(folder / "n"), watchdog_seconds=2.0))
        task = asyncio.create_task(service.watch(cast("Any", _Server([]))))
        await _meanwhile(lambda: len(sleeps) >= 5, 0)
        task.cancel()
        service.close()

    door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    door.bind(str(folder / "n"))
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds:
            sleeps.append(seconds)
        await real(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "sleep", sleep)
        asyncio.run(look())
    assert set(sleeps) == {1.0}
    door.close()


class _Server:
    """As much of a server as the watchdog looks at."""

    def __init__(self, devices: list[Any]) -> None:
        self.devices = devices
        self.sessions: dict[int, object] = {}

    @property
    def pools(self) -> dict[str, Any]:
        return {f"pool{n}": _Hosted(device) for n, device in enumerate(self.devices)}

    def drain_left(self, now: float) -> None:
        return None


class _Hosted:
    def __init__(self, device: Any) -> None:
        self.device = device


def test_S71_a_device_thread_that_hangs_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread stuck in a copy gives no sign, one that idles or works does, and one that has ended never again."""
    device = MemoryDevice(Geometry(slots=64, slot_bytes=(64,), alignment=64), checked=False)
    assert device.answered(device.ask()), "without a thread there is none to hang"
    stream = device.stream()
    device.copy(stream, [(1, 2, 1)])
    _until(lambda: not device.statistics().pending)
    for _ in range(5):
        first, second = device.ask(), device.ask()
        _until(partial(device.answered, second))
        assert device.answered(first)

    stuck, go = threading.Event(), threading.Event()
    real = device._copy

    def hang(cut: Any) -> None:
        stuck.set()
        assert go.wait(LONG)
        real(cut)

    monkeypatch.setattr(device, "_copy", hang)
    device.copy(stream, [(3, 4, 1)])
    assert stuck.wait(LONG)
    asked = device.ask()
    assert not any(device.answered(asked) for _ in range(20))
    monkeypatch.setattr(device, "_copy", real)
    go.set()
    _until(lambda: device.answered(asked))
    _until(lambda: not device.statistics().pending)

    monkeypatch.setattr(device, "_next", lambda: 1 / 0)
    device.copy(stream, [(5, 6, 1)])
    assert device._thread is not None
    device._thread.join(LONG)
    assert not device.answered(device.ask())
    assert not device.answered(asked), "what has ended gives no sign of life, whatever it said once"
    device.close()


def test_S71_no_sign_of_life_for_a_device_that_gives_none(folder: Path) -> None:
    """While a device does not answer no WATCHDOG is sent, and the log says whose it is; once it does, it is again."""

    class Device:
        well = True

        def ask(self) -> int:
            return 1

        def answered(self, asked: int) -> bool:
            return self.well

    door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    door.bind(str(folder / "n"))
    door.setblocking(False)
    device = Device()

    def signs() -> int:
        count = 0
        while True:
            try:
                count += door.recv(4096) == b"WATCHDOG=1"
            except BlockingIOError:
                return count

    async def look() -> None:
        service = Service(Notifier(str(folder / "n"), watchdog_seconds=0.04))
        task = asyncio.create_task(service.watch(cast("Any", _Server([Device(), device]))))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvslot.daemon.service._status", lambda _: "")
            await _meanwhile(lambda: signs() > 0)
            device.well = False
            await _meanwhile(lambda: service.withheld >= 2)
            signs()
            before = service.withheld
            await _meanwhile(lambda: service.withheld >= before + 3)
            assert not signs()
            device.well = True
            await _meanwhile(lambda: signs() > 0)
        task.cancel()
        service.close()

    asyncio.run(asyncio.wait_for(look(), LONG))
    door.close()


async def _meanwhile(holds: Callable[[], bool], pause: float = 0.005) -> None:
    """Lets other tasks run until something holds; who calls it says for how long at the most."""
    while not holds():  # noqa: ASYNC110 -- what is waited for is another process's, or a count
        await asyncio.sleep(pause)


def _until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


# -- doors ------------------------------------------------------------------------------------------------------------


def test_a_socket_that_was_passed_outlives_the_daemon(folder: Path) -> None:
    """Its file, mode and owner stay the manager's; whoever connects between two daemons is served by the second."""
    with supervised(folder) as manager, ExitStack() as stack:
        path = folder / "s"
        path.chmod(0o640)
        before = path.lstat()
        manager.start()
        manager.kill()
        assert manager.stop() == 0
        after = path.lstat()
        assert (before.st_ino, stat.S_IMODE(after.st_mode)) == (after.st_ino, 0o640)
        between = [stack.enter_context(Wire(path, timeout=LONG)) for _ in range(20)]
        manager.start()
        assert all(isinstance(wire.call(Ping), Pong) for wire in between)
        assert not (folder / "other").exists()
        (ready, *_) = events(manager, "ready")
        assert ready["socket"] == str(path)


def test_several_doors_and_one_for_the_admin_api(folder: Path) -> None:
    """Engines are served at two paths, the admin API at its own; what this version does not know is closed."""
    with supervised(folder) as manager:
        more = {"kvslotd@gpu0.socket": folder / "t", "admin": folder / "a"}
        for name, path in more.items():
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            listener.listen()
            manager._listeners[name] = listener
        manager.store.append(("of.tomorrow", os.memfd_create("x", os.MFD_CLOEXEC), False))
        manager.start()
        (unknown,) = events(manager, "descriptor_unknown")
        assert unknown["name"] == "of.tomorrow"
        links = [os.readlink(each) for each in Path(f"/proc/{manager.pid}/fd").iterdir()]
        assert not any("memfd:x" in each for each in links)
        for path in (folder / "s", folder / "t"):
            with Wire(path) as wire:
                wire.hello(path.name)
        client = Client(folder / "a")
        assert client.get("/healthz").status == 200
        client.close()
        assert not (folder / "admin.sock").exists()
        assert manager.stop() == 0
        assert all(path.exists() for path in more.values())


def test_S71_S59_ready_means_that_it_accepts_and_its_door_is_its_own(folder: Path) -> None:
    """Whoever connects when READY is heard is served; a second daemon that is passed the same path ends with 3."""
    # Listening takes a while, so that a READY before it would be found out.
    slow = (
        "import time; from kvslot.daemon.endpoint import Endpoint; real = Endpoint.listen\n"
        "Endpoint.listen = lambda *all: (time.sleep(0.3), real(*all))[1]"
    )
    with supervised(folder, first=slow, passed=False) as first, ExitStack() as stack:
        served: list[Wire] = []

        def at_once() -> None:
            first.wait(lambda: bool(first.said("READY")))
            served.append(stack.enter_context(Wire(folder / "s", timeout=LONG)))

        thread = threading.Thread(target=at_once)
        thread.start()
        first.start()
        thread.join(LONG)
        served[0].hello("first")

        # A manager takes a path from whoever serves it; the lock says that somebody does.
        (folder / "s").unlink()
        with supervised(folder) as second:
            second.start(ready=False)
            second.wait(lambda: second.state == "dead")
            assert (second.codes, second.starts) == ([3], 1)
            (refused,) = events(second, "cannot_start")
            assert f"served by another kvslotd (process {first.pid})" in refused["reason"]
            assert isinstance(served[0].call(Ping), Pong)


@pytest.mark.parametrize("kind", ["datagram", "connected", "file", "internet"])
def test_what_is_no_door_is_refused(folder: Path, kind: str) -> None:
    """A descriptor named as a door that is none is refused with one line, and closed."""
    if kind == "file":
        descriptor = os.memfd_create("x", os.MFD_CLOEXEC)
    elif kind == "connected":
        one, other = socket.socketpair()
        descriptor = one.detach()
        other.close()
    elif kind == "internet":
        descriptor = socket.create_server(("127.0.0.1", 0)).detach()
    else:
        door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        door.bind(str(folder / "d"))
        descriptor = door.detach()
    store = Store(Notifier(), {"kvslotd.socket": [descriptor], "pool.chat": [0]})
    with pytest.raises(EndpointError, match=r"'kvslotd\.socket' that was passed"):
        claim(store, "kvslot", str(folder / "s"))
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(descriptor)
    assert store.inherited == {"pool.chat": [0]}, "what is stored is not taken for a door"


def test_no_door_was_passed(folder: Path) -> None:
    """With none passed, or only one for others, the configured path is served."""
    for passed in ({}, {"pool.chat": [0]}):
        (endpoint,) = claim(Store(Notifier(), passed), "kvslot", str(folder / "s"))
        assert (endpoint.path, endpoint.passed) == (folder / "s", False)
        endpoint.close()


# -- the end ----------------------------------------------------------------------------------------------------------


def test_S57_nobody_holds_a_stop_up(folder: Path) -> None:
    """Idle sessions, half a frame, HTTP that is kept, or streams, or is cut short: with a drain of 10 min it ends."""
    with supervised(folder, settings={"drain_seconds": 600.0}) as manager, ExitStack() as stack:
        manager.start()
        wires = [stack.enter_context(Wire(folder / "s", timeout=LONG)) for _ in range(3)]
        for wire in wires:
            wire.hello()
        wires[0].sock.sendall(encode(Allocate(1, 1, 1, tokens(20)))[:9])
        half = stack.enter_context(Wire(folder / "s", timeout=LONG))
        half.sock.sendall(encode(Hello(1, 1, "half"))[:7])
        kept, streams, scrapes = (Client(folder / "admin.sock") for _ in range(3))
        assert kept.get("/healthz").status == 200
        streams.sock.sendall(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n")
        assert streams.sock.recv(64).startswith(b"HTTP/1.1 200")
        scrapes.sock.sendall(b"GET /metrics HTTP/1.1\r\nHo")
        assert manager.stop() == 0
        assert "late" not in manager.history
        for wire in (*wires, half):
            assert wire.closed()
        for client in (kept, streams, scrapes):
            while client.sock.recv(65536):
                pass
            client.close()
        assert not (folder / "admin.sock").exists()


def test_S57_a_drain_has_the_time_that_it_was_given(folder: Path) -> None:
    """A drain longer than the manager's limit extends that limit, and whoever works until then is not cut off."""
    with supervised(folder, stop_seconds=0.2, settings={"drain_seconds": 600.0}) as manager:
        manager.start()
        with Wire(folder / "s", timeout=LONG) as wire:
            wire.hello(map=False)
            wire.call(Allocate, wire.namespace, 1, tokens(20))
            manager.send(signal.SIGTERM)
            wire.push(Draining)
            manager.wait(lambda: bool(manager.said("STOPPING")))
            until = time.monotonic() + 0.5
            while time.monotonic() < until:  # beyond the unit's own limit
                assert isinstance(wire.call(Ping), Pong)
            assert manager.state == "stopping"
        manager.wait(lambda: manager.state == "dead")
        assert manager.codes == [0]
        assert manager.history == ["started", "ready", "stopping", "exited"]


@pytest.mark.parametrize("wrong", ["settings", "folder"])
def test_S63_what_cannot_start_is_not_tried_again(folder: Path, wrong: str) -> None:
    """Settings or a folder that cannot be used end one start with one clear line, and no storm of others."""
    with supervised(folder, passed=False) as manager:
        file = folder / "kvslot.toml"
        if wrong == "settings":
            file.write_text("drain_seconds = -1\n")
        else:
            (folder / "f").write_text("")
            file.write_text(configuration(folder / "f" / "s", [{}], {"log_format": "json"}))
        manager.start(ready=False)
        manager.wait(lambda: manager.state == "dead")
        assert manager.codes == [2 if wrong == "settings" else 3]
        assert manager.starts == 1
        assert not manager.said("READY")
        assert "drain_seconds" in manager.text() if wrong == "settings" else "folder" in manager.text()
