"""Where nobody answers: what files, the lock and /proc tell is said soon, and with what to do."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvslot.api.client import Control
from kvslot.api.wire import Reader, decode_request, encode, messages
from kvslot.cli import ctl, doctor, host, reach

from ..tools.daemon import Running, running

Said = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """What a command says on either stream; its exit code is to be 5."""
    monkeypatch.setattr(reach, "SOON_S", 0.3)
    monkeypatch.setattr(reach, "LATE_S", 0.3)

    def run(command: str, path: Path, *argv: str) -> str:
        assert ctl.main([command, "--socket", str(path), *argv]) == 5
        out, err = capsys.readouterr()
        return " ".join((out + err).split())

    return run


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    with running() as each:
        yield each


@pytest.fixture
def stopped(daemon: Running) -> Iterator[Running]:
    """By SIGSTOP, as far as that takes."""
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, daemon.pid, os.WSTOPPED | os.WNOWAIT)
        yield daemon
    finally:
        daemon.process.send_signal(signal.SIGCONT)


@pytest.fixture
def mute(tmp_path: Path) -> Iterator[Path]:
    """A socket that lets in and answers nothing; the lock beside it is the tests' to write."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(8)
        yield path


def lock(path: Path, text: str) -> None:
    path.with_name(path.name + ".lock").write_text(text)


@pytest.mark.parametrize("command", ["status", "doctor", "clients"])
def test_a_stopped_daemon_is_told_at_once(stopped: Running, said: Said, command: str) -> None:
    """Whoever asks hears that the process is stopped, which one it is, and how it goes on."""
    text = said(command, stopped.socket)
    assert f"process {stopped.pid} serves it, and does not answer" in text
    assert "it is stopped (state T)" in text
    assert f"kill -CONT {stopped.pid}" in text


def test_on_a_terminal_doctor_says_what_it_waits_for(
    stopped: Running, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something moves while nobody answers yet."""

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr("kvslot.cli._common.BAR_AFTER_S", 0.0)
    monkeypatch.setattr("kvslot.cli._common.BAR_EVERY_S", 0.05)
    monkeypatch.setattr(sys, "stderr", screen)
    said("doctor", stopped.socket)
    assert "connecting" in screen.getvalue()


def test_a_recount_is_not_waited_for_where_the_daemon_is_stopped(
    stopped: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its limit: it is looked whether there is anybody to wait for."""
    monkeypatch.setattr(doctor, "LOOK_S", 0.05)
    row = doctor.recount(str(stopped.socket), "default", stopped.pid)
    assert f"kill -CONT {stopped.pid}" in row["why"]


def test_one_that_was_stopped_while_it_was_asked_is_told_too(
    daemon: Running, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the wait for an answer that had begun."""

    def inspect(control: Control, *_: object, **__: object) -> object:
        daemon.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, daemon.pid, os.WSTOPPED | os.WNOWAIT)
        control.limit(0.1)
        return control.ping()

    monkeypatch.setattr(Control, "inspect", inspect)
    try:
        assert f"kill -CONT {daemon.pid}" in said("status", daemon.socket)
    finally:
        daemon.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("state", ["D", "t", "X"])
def test_other_states_have_their_own_remedy(
    mute: Path, said: Said, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Waiting in the kernel, held by a debugger, dead."""
    lock(mute, f"{os.getpid()}\n")
    monkeypatch.setattr(host, "process_state", lambda pid: state)
    monkeypatch.setattr(host, "is_daemon", lambda pid: True)
    text = said("status", mute)
    assert f"state {state}" in text
    assert {"D": "dmesg", "t": "end the debugger", "X": "restart"}[state] in text


def test_a_zombie_is_told(mute: Path, said: Said) -> None:
    """Its parent has not noticed that it has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        lock(mute, f"{child.pid}\n")
        text = said("status", mute)
    assert f"process {child.pid} served it, and is dead (state Z)" in text


def gone() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    return child.pid


def test_a_dead_process_in_the_lock_is_called_dead(mute: Path, said: Said) -> None:
    """Behind a manager's socket that lets in, where a socket was left, and where none is."""
    pid = gone()
    lock(mute, f"{pid}\n")
    assert f"the lock names process {pid}, which is dead" in said("status", mute)
    left = mute.with_name("left")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(left))
    lock(left, f"{pid} draining\n")
    assert f"names process {pid}, which is dead" in said("doctor", left)
    none = mute.with_name("none")
    lock(none, f"{pid}\n")
    assert f"names process {pid}, which is dead" in said("doctor", none)


@pytest.mark.parametrize("doing", ["", " starting"])
def test_a_process_that_has_the_number_of_one_that_is_gone_is_left_alone(
    mute: Path, said: Said, doing: str
) -> None:
    """Whatever state it is in: nobody is told to signal or look into what is no kvslotd, or that it serves anything."""
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        )
        stack.callback(other.kill)
        other.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
        left, none = mute.with_name("left"), mute.with_name("none")
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(left))
        for path in (mute, left, none):
            lock(path, f"{other.pid}{doing}\n")
            for command in ("status", "doctor"):
                text = said(command, path)
                for word in (
                    "kill -",
                    "py-spy",
                    f"process {other.pid} serves",
                    "which is there",
                    "holds its lock",
                ):
                    assert word not in text
                if path == mute:
                    assert f"process {other.pid}, which is no kvslotd here" in text
        assert "nobody listens" in said("doctor", left)
        assert "there is no such socket" in said("doctor", none)


def test_a_daemon_that_hangs_and_one_that_starts_are_told_apart(
    mute: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the lock says of it; a number that is somebody else's is nobody's fault."""
    lock(mute, f"{os.getpid()}\n")
    assert "no kvslotd here" in said("status", mute)
    monkeypatch.setattr(host, "is_daemon", lambda pid: True)
    assert f"py-spy dump --pid {os.getpid()}" in said("status", mute)
    lock(mute, f"{os.getpid()} starting\n")
    assert "its log says how far it is" in said("status", mute)
    lock(mute, "")
    assert "fuser" in said("status", mute)


def test_a_crowd_at_the_door_of_a_stopped_daemon_is_no_endless_wait(tmp_path: Path, said: Said) -> None:
    """Where nobody is let in any more, connecting has its limit, too."""
    path = tmp_path / "s"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        while True:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.setblocking(False)
            try:
                sock.connect(str(path))
            except BlockingIOError:
                break
        assert "no answer" in said("status", path)


def test_the_kernel_says_who_holds_a_lock_that_may_not_be_read(tmp_path: Path) -> None:
    """For users who may not open it."""
    file = tmp_path / "s.lock"
    assert host.lock_taker(str(file)) == 0
    with file.open("w") as held:
        assert host.lock_taker(str(file)) == 0
        fcntl.flock(held, fcntl.LOCK_EX)
        if not os.path.exists("/proc/locks") or not Path("/proc/locks").read_text():
            pytest.skip("this kernel shows no locks")
        assert host.lock_taker(str(file)) == os.getpid()
        assert reach.holder(str(tmp_path / "s")) == reach.Holder(os.getpid(), "", "R")


def test_a_lock_on_another_file_system_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file may have the same number there: of two containers' /run that is to be expected."""
    file = tmp_path / "s.lock"
    file.touch()
    told = file.stat()
    line = "1: FLOCK  ADVISORY  WRITE {} {:02x}:{:02x}:{} 0 EOF\n"
    major, minor = os.major(told.st_dev), os.minor(told.st_dev)
    theirs = line.format(4711, major, minor + 1, told.st_ino)
    monkeypatch.setattr(host, "_read", lambda path: theirs)
    assert host.lock_taker(str(file)) == 0
    ours = line.format(4712, major, minor, told.st_ino)
    monkeypatch.setattr(host, "_read", lambda path: theirs + ours)
    assert host.lock_taker(str(file)) == 4712


@pytest.mark.parametrize("command", ["status", "doctor", "top"])
def test_the_admin_apis_socket_is_told_from_the_engines(daemon: Running, said: Said, command: str) -> None:
    """Who names that one is told which it is, and which is meant."""
    text = said(command, daemon.socket.with_name("admin.sock"))
    assert "is the socket of the admin API, which speaks HTTP" in text
    assert f"--socket {daemon.socket}" in text


def test_nobody_is_told_to_join_a_group_that_opens_more() -> None:
    """Of a socket or folder of root's group, or of a group that may not enter, another way is said."""
    assert reach.admission(54321, 0o060, "x").startswith("usermod -aG 54321 ")
    for gid, mode in ((0, 0o060), (54321, 0)):
        assert reach.admission(gid, mode, "x") == "run this as root (sudo), or x"


def test_who_does_not_answer_soon_is_asked_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that runs has more time than the first look."""
    monkeypatch.setattr(reach, "SOON_S", 0.05)
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(8)
        lock(path, f"{os.getpid()}\n")

        def answer() -> None:
            first, _ = listener.accept()
            second, _ = listener.accept()
            with first, second:
                reader, bodies = Reader(), list[bytes | memoryview]()
                while not bodies:
                    bodies += reader.feed(second.recv(1 << 16))
                second.sendall(encode(messages.Pong(decode_request(bodies[0]).id, 7)))

        daemon = threading.Thread(target=answer)
        daemon.start()
        reach.connected(str(path), 30.0).close()
        daemon.join()
