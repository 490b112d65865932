"""How a daemon ends, and what its clients see of it (S24, S41, S57)."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvslot.api.wire import encode, errors
from kvslot.api.wire.messages import (
    Admitted,
    Allocate,
    Commit,
    Done,
    Drain,
    Draining,
    Error,
    Free,
    Hello,
    Inspect,
    Ping,
    Pong,
    Probe,
    Ready,
    SetConfig,
)
from kvslot.daemon.endpoint import Endpoint, EndpointError

from ..tools.daemon import running
from ..tools.wire import Wire, tokens
from .actors import Paint, child, empty, events, stay
from .test_offenders import FLOODS, flooding


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_S57_idle_half_and_silent_clients_hold_nothing_up(number: int) -> None:
    """Idle sessions, tools, half a frame, nothing said at all: all are closed at once, with no need to wait."""
    with running(drain_seconds=10.0) as daemon, ExitStack() as stack:
        wires = [stack.enter_context(Wire(daemon.socket)) for _ in range(6)]
        for wire in wires[:3]:
            wire.hello()
        wires[3].sock.sendall(encode(Hello(1, 1, "half"))[:7])
        wires[1].sock.sendall(encode(Allocate(1, 1, 1, tokens(20)))[:9])
        wires[4].call(Ping)
        began = time.monotonic()
        daemon.process.send_signal(number)
        assert daemon.process.wait(5.0) == 0
        assert time.monotonic() - began < 3.0
        assert not daemon.socket.exists()
        assert isinstance(wires[0].receive(), Draining)
        for wire in wires:
            assert wire.closed()


def test_S57_busy_clients_are_told_and_have_until_the_deadline() -> None:
    """Draining says how long; new work is refused, running sequences may go on and end; who ends them is let go."""
    with running(drain_seconds=20.0) as daemon, Wire(daemon.socket) as wire, Wire(daemon.socket) as late:
        wire.hello(map=False)
        wire.call(Allocate, wire.namespace, 1, tokens(20))
        late.sock.sendall(encode(Hello(1, 1, "half"))[:5])
        daemon.process.send_signal(signal.SIGTERM)
        assert 0 < wire.push(Draining).deadline_ms <= 20_000
        with Wire(daemon.socket) as stranger:
            refused = stranger.call(Hello, 1, "new")
            assert refused.code == errors.ShuttingDown.code
            assert re.search(r"ends in (19|20) s at most", refused.message)
            assert stranger.closed()
        assert wire.call(Allocate, wire.namespace, 2, tokens(20)).code == errors.ShuttingDown.code
        assert wire.call(Commit, 1, 20).length == 20
        assert isinstance(wire.call(Free, 1), Done)
        began = time.monotonic()
        assert wire.closed()
        assert daemon.process.wait(5.0) == 0
        assert time.monotonic() - began < 4.0


def test_S57_who_holds_a_drain_up_can_be_seen_and_may_come_back() -> None:
    """While draining the socket is there: tools look and change, a lost session is taken up and ends in order."""
    with running(drain_seconds=60.0) as daemon, Wire(daemon.socket) as idle, Wire(daemon.socket) as tool:
        idle.hello("idle", map=False)
        assert tool.call(Inspect, "status").rows[0]["drain_left_s"] is None
        lost = Wire(daemon.socket)
        welcome = lost.hello("busy")
        lost.call(Allocate, lost.namespace, 1, tokens(20))
        daemon.process.send_signal(signal.SIGTERM)
        lost.push(Draining)
        lost.close()
        with Wire(daemon.socket) as late:
            status = late.call(Inspect, "status").rows[0]
            assert (status["state"], status["sequences"]) == ("draining", 1)
            assert 0 < status["drain_left_s"] <= 60
            rows = {row["name"]: row for row in late.call(Inspect, "sessions").rows}
            assert rows["busy"]["state"] == "lost"
            assert rows["busy"]["sequences"] == 1
            assert isinstance(late.call(SetConfig, "log_level", "debug"), Done)
        assert isinstance(idle.call(Ping), Pong), "who has nothing running is not hurried"
        assert isinstance(tool.call(Ping), Pong)
        with Wire(daemon.socket) as back:
            again = back.call(
                Hello, 1, "busy", boot=welcome.boot, resume=welcome.session, secret=welcome.secret
            )
            assert again.session == welcome.session
            assert 0 < back.push(Draining).deadline_ms <= 60_000
            assert isinstance(back.call(Free, 1), Done)
            began = time.monotonic()
            assert back.closed()
        assert daemon.process.wait(5.0) == 0
        assert time.monotonic() - began < 4.0
        assert idle.closed()
        assert tool.closed()
        assert not daemon.socket.exists()


def test_S57_a_lost_session_holds_a_drain_up_no_longer_than_its_process_lives() -> None:
    """Its sequences may be taken up again until then, and never after."""
    with running(drain_seconds=60.0) as daemon:

        def leave(tell: Callable[[Any], None]) -> None:
            wire = Wire(daemon.socket)
            wire.hello("leaves")
            wire.call(Allocate, wire.namespace, 1, tokens(20))
            wire.close()
            tell("lost")
            stay()

        with child(leave) as one:
            assert one.heard() == "lost"
            daemon.process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                daemon.process.wait(0.3)
        assert daemon.process.wait(5.0) == 0


def test_S57_what_is_configured_when_the_signal_comes_is_what_counts() -> None:
    """drain_seconds that was changed while running, by file or by verb, is how long a signal waits."""
    for by_file in (True, False):
        with running(drain_seconds=60.0) as daemon, Wire(daemon.socket) as wire:
            wire.hello(map=False)
            wire.call(Allocate, wire.namespace, 1, tokens(20))
            if by_file:
                file = daemon.log.with_name("kvslot.toml")
                file.write_text(file.read_text().replace("drain_seconds = 60.0", "drain_seconds = 0.5"))
                daemon.process.send_signal(signal.SIGHUP)
                while '"reloaded"' not in daemon.text():
                    time.sleep(0.01)
            else:
                assert isinstance(wire.call(SetConfig, "drain_seconds", "0.5"), Done)
            daemon.process.send_signal(signal.SIGTERM)
            assert 0 < wire.push(Draining).deadline_ms <= 500
            assert daemon.process.wait(5.0) == 0


def test_S57_the_next_daemon_is_told_that_the_last_one_is_draining() -> None:
    """A start that comes too early names the process, and that it is about to end."""
    with running(drain_seconds=60.0) as daemon, Wire(daemon.socket) as wire:
        wire.hello(map=False)
        wire.call(Allocate, wire.namespace, 1, tokens(20))
        with pytest.raises(EndpointError, match=rf"another kvslotd \(process {daemon.pid}\)$"):
            Endpoint(daemon.socket)
        daemon.process.send_signal(signal.SIGTERM)
        wire.push(Draining)
        with pytest.raises(EndpointError, match=rf"\(process {daemon.pid}\), which is draining$"):
            Endpoint(daemon.socket)
        wire.call(Free, 1)


def test_S57_clients_that_go_on_are_cut_off_at_the_deadline() -> None:
    """Running sequences that nobody ends, and one that never reads: exit 0 within the limit and two seconds."""
    with running(drain_seconds=1.0) as daemon, Wire(daemon.socket) as wire:
        wire.hello(map=False)
        wire.call(Allocate, wire.namespace, 1, tokens(20))
        with child(flooding(daemon, FLOODS["listings"], session=True)) as flooder:
            assert flooder.heard() == "full"
            began = time.monotonic()
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.process.wait(10.0) == 0
            assert 0.9 < time.monotonic() - began < 3.0
        said = []
        try:
            while True:
                said.append(wire.receive())
        except ConnectionError:
            pass
        assert isinstance(said[0], Draining)
        assert isinstance(said[-1], Error)
        assert said[-1].code == errors.ShuttingDown.code


def test_S57_second_signal_ends_at_once() -> None:
    """Whoever is in a hurry sends it twice."""
    with running(drain_seconds=60.0) as daemon, Wire(daemon.socket) as wire:
        wire.hello(map=False)
        wire.call(Allocate, wire.namespace, 1, tokens(20))
        daemon.process.send_signal(signal.SIGTERM)
        wire.push(Draining)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(5.0) == 0


def test_S57_hundreds_of_idle_sessions() -> None:
    """Their end is not a recursion, and no audit that runs meanwhile holds it up."""
    with running(sessions_max=700, drain_seconds=5.0) as daemon:
        with ExitStack() as stack:
            wires = []
            for _ in range(500):
                wires.append(stack.enter_context(Wire(daemon.socket)))
                wires[-1].hello(map=False)
            assert daemon.stop(10.0) == 0
            assert wires[-1].closed()
        assert [event["event"] for event in events(daemon)][-1] == "ended"


def test_S57_drain_by_verb() -> None:
    """As by signal, with a deadline of its own."""
    with running(drain_seconds=60.0) as daemon, Wire(daemon.socket) as wire, Wire(daemon.socket) as control:
        wire.hello(map=False)
        wire.call(Allocate, wire.namespace, 1, tokens(20))
        assert isinstance(control.call(Drain, 500), Done)
        assert wire.push(Draining).deadline_ms <= 500
        assert daemon.process.wait(5.0) == 0


def test_S41_killed_daemon_and_the_next() -> None:
    """Clients see the end at once and keep their memory; of the next daemon they are strangers, whatever they show."""
    with running(code=None) as daemon:
        folder = daemon.socket.parent
        with Wire(daemon.socket) as wire:
            welcome = wire.hello("old")
            with Paint(wire, "old") as paint:
                prompt = tokens(80)
                admitted = wire.call(Allocate, wire.namespace, 1, prompt)
                paint.write(prompt, admitted.extents)
                wire.call(Commit, 1, 80)
                os.kill(daemon.pid, signal.SIGKILL)
                assert wire.closed(1.0)
                with running(socket=folder / "s") as second:
                    with Wire(second.socket) as again:
                        stale = again.call(
                            Hello, 1, "old", boot=welcome.boot, resume=welcome.session, secret=welcome.secret
                        )
                        assert isinstance(stale, Error)
                        assert stale.code == errors.StaleSession.code
                    with Wire(second.socket) as again:
                        new = again.hello("old", boot=welcome.boot)
                        assert new.boot != welcome.boot
                        assert new.pool.generation != welcome.pool.generation
                        assert again.call(Probe, again.namespace, prompt).hit == 0, "nothing of then is known"
                        with Paint(again, "new") as theirs:
                            most = tokens(new.pool.usable)
                            other = again.call(Allocate, again.namespace, 1, most)
                            assert isinstance(other, Admitted)
                            theirs.write(most, other.extents)
                            assert not paint.wrong(prompt, admitted.extents), (
                                "the old memory is the old client's own"
                            )
                            assert not theirs.wrong(most, other.extents)
                wire.welcome = None


def _seal(descriptor: int, seal: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seal)


def test_S24_the_pool_is_the_daemons_alone() -> None:
    """It has no name to be removed by; it cannot be shrunk, grown or unsealed; clients' ends leave it as it is."""
    names = set(os.listdir("/dev/shm"))
    with running() as daemon:

        def attach(tell: Callable[[Any], None]) -> None:
            wire = Wire(daemon.socket)
            wire.hello("attaches", map=True)
            pool, page = wire.descriptors[0], wire.descriptors[1]
            refused = 0
            for descriptor in (pool, page):
                size = os.fstat(descriptor).st_size
                for act, value in (
                    (os.ftruncate, 0),
                    (os.ftruncate, size + 4096),
                    (_seal, fcntl.F_SEAL_WRITE),
                ):
                    try:
                        act(descriptor, value)
                    except OSError:
                        refused += 1
            mmap.mmap(pool, 0)
            tell(refused)
            stay()

        with Wire(daemon.socket) as wire:
            wire.hello("writer")
            with Paint(wire, "writer") as paint:
                prompt = tokens(100)
                admitted = wire.call(Allocate, wire.namespace, 1, prompt)
                paint.write(prompt, admitted.extents)
                wire.call(Commit, 1, 100)
                for _ in range(3):
                    with child(attach) as one:
                        assert one.heard() == 6
                        assert set(os.listdir("/dev/shm")) == names
                    assert not paint.wrong(prompt, admitted.extents)
                with Wire(daemon.socket) as third:
                    third.hello("reader")
                    hit = third.call(Allocate, third.namespace, 1, prompt)
                    assert hit.hit == 99
                    with Paint(third, "writer") as same:
                        assert not same.wrong(prompt, hit.extents, 99)
        empty(daemon)
    assert set(os.listdir("/dev/shm")) == names


def test_what_a_client_sees_of_a_daemon_that_is_stopped() -> None:
    """SIGSTOP: nothing is lost, requests wait in the socket, and are answered when it goes on."""
    with running() as daemon, Wire(daemon.socket) as wire:
        wire.hello()
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            wire.send(Ping(5))
            wire.sock.settimeout(0.3)
            with pytest.raises(TimeoutError):
                wire.receive()
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        wire.sock.settimeout(10.0)
        assert isinstance(wire.reply(), Pong)


def test_no_clock_that_jumps_decides_anything() -> None:
    """With a wall clock that leaps back and forth by a year, fences, stalls and deadlines go on as they do."""
    jumps = (
        "import itertools, time; real = time.time; leap = itertools.cycle([0, 3e7, -3e7, 1e6]);\n"
        "time.time = lambda: real() + next(leap); ns = time.time_ns;\n"
        "time.time_ns = lambda: ns() + int(next(leap) * 1e9)"
    )
    with (
        running(first=jumps, stall_seconds=0.5, idle_hello_seconds=1.0) as daemon,
        Wire(daemon.socket) as wire,
    ):
        usable = wire.hello().pool.usable
        wire.call(Allocate, wire.namespace, 1, tokens(usable))
        wire.step(1, 0)
        wire.call(Free, 1, 1)
        later = wire.call(Allocate, wire.namespace, 2, tokens(100, 5000))
        began = time.monotonic()
        with Wire(daemon.socket) as silent:
            assert silent.closed(5.0)
        assert 0.9 < time.monotonic() - began < 4.0
        with Wire(daemon.socket) as control:
            row = control.call(Inspect, "sessions").rows[0]
            assert row["stalled"]
            assert 0 <= row["age_s"] < 60
            assert 0 <= control.call(Inspect, "status").rows[0]["uptime_s"] < 60
        wire.step(1, 1)
        assert wire.push(Ready).ticket == later.ticket


def test_client_that_closes_one_half() -> None:
    """shutdown() of the writing half is the end, as close() is: what it asked before is answered as far as it goes."""
    with running() as daemon:
        with Wire(daemon.socket) as wire:
            wire.hello(map=False)
            wire.send(Ping(9))
            wire.sock.shutdown(socket.SHUT_WR)
            assert isinstance(wire.receive(), Pong)
            assert wire.closed()
            wire.welcome = None
        empty(daemon)


def test_nothing_asks_what_time_it_is_but_the_log() -> None:
    """The wall clock is read where lines are stamped for people, and nowhere else in daemon and core."""
    import kvslot.allocator
    import kvslot.daemon

    asked = [
        f"{file.name}:{number}"
        for room in (kvslot.daemon, kvslot.allocator)
        for folder in room.__path__
        for file in sorted(Path(folder).rglob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if re.search(r"\btime\.time\(|time_ns\(|datetime\.now|CLOCK_REALTIME", line)
        and "monotonic_ns" not in line
    ]
    assert [each.split(":")[0] for each in asked] == ["logs.py"], asked
