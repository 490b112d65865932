"""Where the socket lies, who owns the path, and what happens when descriptors run out (S59, S61, S63)."""

from __future__ import annotations

import grp
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvslot.api.wire import errors
from kvslot.api.wire.messages import Allocate, Error, Evict, Hello, Ping, Pong

from ..admin.http import Client
from ..tools.daemon import configuration, running
from ..tools.wire import Wire, tokens
from .actors import child, cpu_seconds, empty, events, stay, until

ROOT = os.geteuid() == 0
NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short name: paths of sockets have 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="kvs"))
    folder.chmod(0o755)
    yield folder
    for each in folder.rglob("*"):
        if each.is_dir() and not each.is_symlink():
            each.chmod(0o755)
    shutil.rmtree(folder)


def start(folder: Path, path: Path, *, user: int = 0) -> tuple[int, str]:
    """Starts a daemon that will not come up, perhaps as another user; returns its exit code, and what it says why."""
    file = folder / "kvslot.toml"
    file.write_text(configuration(path, [{}], {"log_format": "json"}))
    file.chmod(0o644)
    program = "from kvslot.daemon.main import main; raise SystemExit(main())"
    if user:
        # All is imported and read before: another user may have no right to read where it lies.
        program = (
            "import os, sys; from kvslot.daemon import config, logs, server; settings = config.load(sys.argv[2]);"
            f"logs.set_up('json'); os.setgroups([]); os.setgid({user}); os.setuid({user});"
            "raise SystemExit(server.serve(settings))"
        )
    done = subprocess.run(
        [sys.executable, "-Ic", program, "--config", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=30,
        check=False,
    )
    text = done.stdout.decode()
    assert "Traceback" not in text, text
    return done.returncode, text


def reason(text: str) -> str:
    """The one line that says why there is no daemon."""
    told = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    lines = [each["reason"] for each in told if each["event"] == "cannot_start"]
    assert len(lines) == 1, text
    return str(lines[0])


def alive(path: Path) -> bool:
    with Wire(path) as wire:
        return isinstance(wire.call(Ping), Pong)


def test_S59_second_daemon_leaves_the_first_alone(folder: Path) -> None:
    """It says who serves the path, and ends; the first serves throughout, its clients too."""
    with running(socket=folder / "s") as first, Wire(first.socket) as client:
        client.hello()
        code, text = start(folder, first.socket)
        assert code == 3
        assert str(first.pid) in reason(text)
        assert isinstance(client.call(Ping), Pong)
        assert alive(first.socket)
    assert not (folder / "s").exists()


def test_S59_stale_socket_of_a_killed_daemon_is_replaced(folder: Path) -> None:
    """SIGKILL leaves the file; the next daemon sees that nobody listens."""
    for _ in range(2):
        with running(socket=folder / "s", code=None) as first:
            first.process.kill()
            first.process.wait()
        assert stat.S_ISSOCK(os.lstat(folder / "s").st_mode)
        with pytest.raises(ConnectionRefusedError):
            Wire(folder / "s")
    with running(socket=folder / "s") as second:
        assert alive(second.socket)
        assert "stale_socket_replaced" in second.text()
    assert not (folder / "s").exists()


@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling", "fifo", "listener"])
@pytest.mark.parametrize("name", ["s", "s.new", "s.lock"])
def test_S59_what_is_not_ours_is_left_as_it_is(folder: Path, kind: str, name: str) -> None:
    """A file, folder, link, pipe, or a socket that somebody else listens on: refused in one line, and not touched."""
    path = folder / name
    target = folder / "target"
    listener = None
    match kind:
        case "file":
            path.write_text("precious")
        case "folder":
            path.mkdir()
        case "link":
            target.write_text("precious")
            path.symlink_to(target)
        case "dangling":
            path.symlink_to(folder / "nowhere")
        case "fifo":
            os.mkfifo(path)
        case _:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            listener.listen()
    before = os.lstat(path)
    if (name, kind) in (("s.lock", "file"), ("s.new", "listener")):
        # A lock's file may have been there before us; and a socket half made may be left of a daemon that was killed.
        with running(socket=folder / "s") as daemon:
            assert alive(daemon.socket)
    else:
        code, text = start(folder, folder / "s")
        assert code == 3, text
        assert str(path) in reason(text)
        after = os.lstat(path)
        assert (after.st_ino, after.st_mode, after.st_size) == (before.st_ino, before.st_mode, before.st_size)
        assert not (folder / "nowhere").exists()
    if kind == "link":
        assert target.read_text() == "precious"
    if listener is not None:
        listener.close()


def test_S59_only_the_own_socket_is_removed_at_the_end(folder: Path) -> None:
    """Somebody who moved another socket to the path meanwhile keeps it."""
    with running(socket=folder / "s") as daemon:
        (folder / "s").unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(folder / "s"))
            assert daemon.stop() == 0
        assert stat.S_ISSOCK(os.lstat(folder / "s").st_mode)


@pytest.mark.parametrize("length", [104, 108, 120, 300])
def test_S59_path_too_long(folder: Path, length: int) -> None:
    """One clear line with the limit, before anything is made."""
    path = folder / ("x" * (length - len(os.fsencode(folder)) - 1))
    code, text = start(folder, path)
    assert code in (2, 3), text
    assert "103" in text
    assert [each.name for each in folder.iterdir()] == ["kvslot.toml"]


def test_S59_longest_path_there_may_be(folder: Path) -> None:
    """At the limit it works."""
    path = folder / ("x" * (103 - len(os.fsencode(folder)) - 1))
    with running(socket=path) as daemon:
        assert alive(daemon.socket)


def test_S63_folder_is_made(folder: Path) -> None:
    """Where it is absent, parents too."""
    with running(socket=folder / "a" / "b" / "s") as daemon:
        assert alive(daemon.socket)


def test_S63_folder_that_is_a_file(folder: Path) -> None:
    """Refused in a line that names it."""
    (folder / "a").write_text("x")
    for path in (folder / "a" / "s", folder / "a" / "b" / "s"):
        code, text = start(folder, path)
        assert code == 3, text
        assert str(folder / "a") in reason(text)


@pytest.mark.skipif(not ROOT, reason="only root can start a daemon as somebody else")
@pytest.mark.parametrize(("owner", "mode"), [(0, 0o755), (0, 0o700), (NOBODY, 0o500), (0, 0o775)])
def test_S63_folder_of_somebody_else(folder: Path, owner: int, mode: int) -> None:
    """Owner, mode and who we are stand in one line; the exit code is its own, and nothing is left behind."""
    place = folder / "run"
    place.mkdir()
    os.chown(place, owner, 0)
    place.chmod(mode)
    code, text = start(folder, place / "s", user=NOBODY)
    assert code == 3, text
    told = reason(text)
    assert f"{mode:04o}" in told or "cannot" in told
    assert not list(place.iterdir())


@pytest.mark.skipif(not ROOT, reason="only root can connect as somebody else")
def test_S63_who_may_connect(folder: Path) -> None:
    """The socket's mode and group decide: a member of its group connects, an outsider does not."""
    with running(socket=folder / "s", socket_mode=0o660, socket_group="daemon") as daemon:
        group = grp.getgrnam("daemon").gr_gid
        assert os.stat(daemon.socket).st_gid == group
        assert stat.S_IMODE(os.stat(daemon.socket).st_mode) == 0o660

        def connect(groups: list[int]) -> object:
            def work(tell: Callable[[Any], None]) -> None:
                os.setgroups(groups)
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                try:
                    wire = Wire(daemon.socket)
                    wire.hello()
                except PermissionError:
                    tell("refused")
                    return
                # A member, but not one who may say control verbs.
                tell(wire.call(Evict, 1).code)

            with child(work) as one:
                return one.heard()

        assert connect([group]) == errors.Denied.code
        assert connect([]) == "refused"


@pytest.mark.parametrize("limit", [64, 128])
def test_S61_out_of_descriptors(limit: int) -> None:
    """Who comes beyond what descriptors allow is told BUSY; sessions and scrapes go on, the log is quiet, it mends."""
    lower = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))"
    with ExitStack() as stack:
        daemon = stack.enter_context(running(sessions_max=64, first=lower))
        client = stack.enter_context(Wire(daemon.socket))
        client.hello("first")
        assert client.call(Allocate, client.namespace, 1, tokens(20)).capacity
        crowd: list[Wire] = []
        busy = 0
        for _ in range(200):
            wire = Wire(daemon.socket, timeout=3.0)
            crowd.append(wire)
            try:
                reply = wire.call(Hello, 1, "crowd", map=len(crowd) % 2 == 0)
            except (ConnectionError, BrokenPipeError):
                busy += 1
                continue
            if isinstance(reply, Error):
                assert reply.code == errors.Busy.code
                busy += 1
            else:
                wire.welcome = reply
        assert busy > 150
        assert daemon.descriptors() < limit
        began = cpu_seconds(daemon.pid)
        time.sleep(0.5)
        assert cpu_seconds(daemon.pid) - began < 0.3, "spins"
        for n in range(50):
            assert isinstance(client.call(Ping), Pong), n
        with Client(daemon.socket.with_name("admin.sock")) as scraper:
            assert b"kvslot_sessions" in scraper.get("/metrics").body
        for wire in crowd:
            if wire.welcome is not None:
                wire.bye()
            wire.close()
        late = stack.enter_context(Wire(daemon.socket))
        until(lambda: _gets_in(late), 2.0, "nobody gets in afterwards")
        told = [event["event"] for event in events(daemon)]
        assert told.count("connection_refused") + told.count("accept_failed") < 10


def _gets_in(wire: Wire) -> bool:
    if wire.welcome is None:
        wire.hello("late")
    return True


def test_more_sessions_than_descriptors_allow_without_a_single_accept_error() -> None:
    """With the limits as they are by default the daemon raises its own, and 200 sessions with memory fit."""
    with running(sessions_max=300) as daemon:

        def many(tell: Callable[[Any], None]) -> None:
            wires = [Wire(daemon.socket) for _ in range(200)]
            for wire in wires:
                wire.hello()
            tell("all")
            stay()

        with child(many) as one:
            assert one.heard() == "all"
        empty(daemon)
        assert "accept_failed" not in daemon.text()


def test_sigkill_of_the_daemon_leaves_no_process_and_no_lock(folder: Path) -> None:
    """The lock goes with the process, so that the next start needs nobody's help."""
    with running(socket=folder / "s", code=None) as daemon:
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.process.wait()
        with running(socket=folder / "s") as next_one:
            assert alive(next_one.socket)
