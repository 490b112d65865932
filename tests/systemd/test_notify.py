"""What daemon/notify.py says to a manager and takes from one; the manager is a datagram socket of the test's."""

from __future__ import annotations

import array
import errno
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvslot.daemon.notify import DESCRIPTORS_MAX, NAME_BYTES, STORED_MAX, Notifier, Store

from .supervisor import LAUNCH


class Manager:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, name: str | bytes) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(name)
        self.sock.settimeout(20.0)

    def heard(self) -> tuple[str, list[int]]:
        """The next message, and the descriptors with it."""
        text, ancillary, _, _ = self.sock.recvmsg(4096, socket.CMSG_SPACE(4 * 8))
        numbers = array.array("i")
        for _, _, content in ancillary:
            numbers.frombytes(content)
        return text.decode(), list(numbers)

    def says(self) -> str:
        """The next message, which must be without descriptors."""
        text, numbers = self.heard()
        assert not numbers
        return text

    def silent(self) -> bool:
        """Whether nothing waits to be heard."""
        return not select.select([self.sock], [], [], 0)[0]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvn") as name:
        yield Path(name)


@pytest.fixture
def manager(folder: Path) -> Iterator[Manager]:
    manager = Manager(str(folder / "n"))
    yield manager
    manager.sock.close()


@pytest.fixture
def notifier(folder: Path, manager: Manager) -> Iterator[Notifier]:
    notifier = Notifier(str(folder / "n"))
    yield notifier
    notifier.close()


def descriptors() -> set[str]:
    """Those this process has open."""
    return set(os.listdir("/proc/self/fd"))


def test_S71_without_a_manager_nothing_happens() -> None:
    """With no variable in the environment every call is without effect, opens nothing and raises nothing."""
    before = descriptors()
    environ = {"PATH": "/bin"}
    notifier = Notifier.take(environ)
    store = Store.take(notifier, environ)
    notifier.ready("serving")
    notifier.status("well")
    notifier.reloading()
    notifier.extend(60.0, "busy")
    notifier.stopping("ends", 5.0)
    notifier.watchdog()
    assert notifier.flush()
    assert not notifier.barrier()
    assert not store.keep("pool", 0)
    assert not store.forget("pool")
    assert not store.available
    assert not store.inherited
    assert not notifier.enabled
    assert not notifier.problem
    assert notifier.watchdog_seconds == 0.0
    assert descriptors() == before
    assert environ == {"PATH": "/bin"}


def test_each_message_is_what_systemd_reads(manager: Manager, notifier: Notifier) -> None:
    """Names and units of sd_notify(3): times in microseconds, a status beside each that has one, one message each."""
    notifier.extend(1.5, "taking memory")
    assert manager.says() == "EXTEND_TIMEOUT_USEC=1500000\nSTATUS=taking memory"
    notifier.ready("serves")
    assert manager.says() == "READY=1\nSTATUS=serves"
    notifier.watchdog()
    assert manager.says() == "WATCHDOG=1"
    notifier.reloading()
    name, _, when = manager.says().partition("\nMONOTONIC_USEC=")
    assert name == "RELOADING=1"
    assert int(when) > 0
    notifier.stopping("ends", 20.0)
    assert manager.says() == "STOPPING=1\nEXTEND_TIMEOUT_USEC=20000000\nSTATUS=ends"
    notifier.stopping()
    assert manager.says() == "STOPPING=1"
    assert manager.silent()


def test_a_status_is_one_line_and_said_when_it_changes(manager: Manager, notifier: Notifier) -> None:
    """What a client can bring into a status forges no other line, is cut to a length, and is not said twice."""
    notifier.status("a pool\nREADY=1\r\nFDSTORE=1")
    assert manager.says() == "STATUS=a pool READY=1 FDSTORE=1"
    notifier.status("a pool\nREADY=1\r\nFDSTORE=1")
    assert manager.silent()
    while not notifier._queue:
        notifier.extend(1.0)
    while not manager.silent():
        manager.says()
    notifier.status("a pool\nREADY=1\r\nFDSTORE=1")
    assert manager.says().startswith("EXTEND"), "what waits is sent, also where the status is as it was"
    assert manager.silent()
    notifier.status("é" * 10_000 + "\udc80")
    long = manager.says()
    assert 500 < len(long.encode()) < 600


def test_a_manager_that_does_not_read_holds_nothing_up(manager: Manager, notifier: Notifier) -> None:
    """Calls return while its queue is full; what must arrive comes later, in order, and nothing stays open."""
    before = descriptors()
    store = Store(notifier)
    descriptor = os.memfd_create("kept", os.MFD_CLOEXEC)
    sent = 0
    while not notifier._queue:
        notifier.extend(1 + sent)
        sent += 1
        assert sent < 10_000, "the queue of the socket has no end"
    assert store.keep("pool", descriptor)
    os.close(descriptor)  # the caller's; what waits has its own
    notifier.watchdog()
    notifier.status("full")
    assert not notifier.flush(0.02)
    assert not notifier.barrier(0.02)
    heard = [manager.says()]
    while not notifier.flush():
        heard.append(manager.says())
    while not manager.silent():
        text, numbers = manager.heard()
        heard.append(text)
        for number in numbers:
            os.close(number)
    times = [text for text in heard if text.startswith("EXTEND")]
    assert times == [f"EXTEND_TIMEOUT_USEC={(1 + n) * 1_000_000}" for n in range(sent)]
    assert heard[-1] == "FDSTORE=1\nFDNAME=pool\nFDPOLL=0"
    assert len(heard) == sent + 1, "WATCHDOG and STATUS are not queued"
    assert notifier.failures == 0
    assert descriptors() == before


def test_a_manager_that_has_gone_is_counted_and_no_fault(manager: Manager, notifier: Notifier) -> None:
    """Nothing raises, and what was not heard is counted with its reason."""
    manager.sock.close()
    notifier.ready("serves")
    notifier.watchdog()
    assert not Store(notifier).keep("pool", 0)
    assert notifier.failures == 3
    assert os.strerror(errno.ECONNREFUSED) in notifier.problem


@pytest.mark.parametrize("address", ["run/notify", "vsock:2:1234", "/", "@", "/" + "x" * 120])
def test_an_address_that_is_none_is_said(address: str) -> None:
    """An address that no socket can have is named, and is as good as none."""
    notifier = Notifier(address)
    assert not notifier.enabled
    assert repr(address) in notifier.problem
    notifier.ready()


def test_an_abstract_address() -> None:
    """`@name`, as containers have it, is a socket without a file."""
    name = f"kvslot-test-{os.getpid()}"
    manager = Manager(b"\0" + name.encode())
    notifier = Notifier(f"@{name}")
    notifier.ready()
    assert manager.says() == "READY=1"
    notifier.close()
    manager.sock.close()


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [
        ("2000000", "", 2.0),
        ("30000000", "me", 30.0),
        ("2000000", "1", 0.0),
        ("", "me", 0.0),
        ("-5", "", 0.0),
        ("soon", "me", 0.0),
    ],
)
def test_S71_the_watchdog_is_asked_for_by_period_and_process(usec: str, pid: str, seconds: float) -> None:
    """WATCHDOG_USEC counts when it is a number and for this process, and leaves the environment in any case."""
    environ = {"WATCHDOG_USEC": usec, "WATCHDOG_PID": str(os.getpid()) if pid == "me" else pid}
    assert Notifier.take(environ).watchdog_seconds == seconds
    assert not environ


def test_a_barrier_ends_when_the_manager_has_read(manager: Manager, notifier: Notifier) -> None:
    """It returns true once the manager has taken the message before it and let go of the descriptor."""
    heard: list[str] = []

    def read() -> None:
        for _ in range(2):
            text, numbers = manager.heard()
            heard.append(text)
            for number in numbers:
                os.close(number)

    reader = threading.Thread(target=read)
    reader.start()
    notifier.ready()
    assert notifier.barrier(20.0)
    reader.join()
    assert heard == ["READY=1", "BARRIER=1"]


def test_what_is_kept_and_forgotten(manager: Manager, notifier: Notifier) -> None:
    """A descriptor travels with its name; it is polled only where that was asked for."""
    store = Store(notifier)
    assert store.available
    descriptor = os.memfd_create("kept", os.MFD_CLOEXEC)
    os.write(descriptor, b"bytes")
    assert store.keep("pool.chat", descriptor)
    text, (copy,) = manager.heard()
    assert text == "FDSTORE=1\nFDNAME=pool.chat\nFDPOLL=0"
    assert os.pread(copy, 9, 0) == b"bytes"
    os.close(copy)
    assert store.keep("door", descriptor, poll=True)
    text, (copy,) = manager.heard()
    assert text == "FDSTORE=1\nFDNAME=door"
    os.close(copy)
    os.close(descriptor)
    assert store.forget("pool.chat")
    assert manager.says() == "FDSTOREREMOVE=1\nFDNAME=pool.chat"
    assert not Store(notifier, capacity=0).keep("pool", 0), "a manager that says it keeps none is not asked"
    full = Store(notifier, {"page": [0]}, capacity=3)
    assert [full.keep("pool", 0) for _ in range(3)] == [True, True, False]
    assert full.forget("pool")
    assert [full.keep("pool", 0) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("name", ["", "a:b", "a\nb", "ü", "x" * (NAME_BYTES + 1)])
def test_a_name_that_would_not_come_back_is_our_fault(name: str, notifier: Notifier) -> None:
    """A name with a colon, a line's end or too many bytes would spoil all others, and is refused."""
    store = Store(notifier)
    with pytest.raises(ValueError, match="no name"):
        store.keep(name, 0)
    with pytest.raises(ValueError, match="no name"):
        store.forget(name)


def test_the_names_of_a_full_store_fit_into_the_environment() -> None:
    """A process can be started with as many names as the store may hold, each as long as it may be."""
    names = ":".join(["x" * NAME_BYTES] * STORED_MAX)
    subprocess.run(["/bin/true"], env={"LISTEN_FDNAMES": names}, check=True)
    with pytest.raises(OSError, match=os.strerror(errno.E2BIG)):
        subprocess.run(["/bin/true"], env={"LISTEN_FDNAMES": names + names[: NAME_BYTES * 200]}, check=True)


TAKE = """\
import fcntl, json, os, sys
from kvslot.daemon.notify import Notifier, Store
os.environ.update(json.loads(sys.argv[1]))
store = Store.take(Notifier.take())
print(json.dumps({
    "inherited": dict(store.inherited),
    "inodes": {name: [os.fstat(each).st_ino for each in found] for name, found in store.inherited.items()},
    "exec": [each for found in store.inherited.values() for each in found if not fcntl.fcntl(each, fcntl.F_GETFD)],
    "left": [name for name in os.environ if name.startswith(("LISTEN", "NOTIFY", "WATCHDOG", "FDSTORE"))],
    "capacity": store.capacity,
    "unused": store.close(),
}))
"""


def taken(names: str, numbers: list[int], **environ: str) -> dict[str, object]:
    """What a process takes that is started with these descriptors and names, its environment changed by `environ`."""
    told = subprocess.run(
        [
            *(sys.executable, "-ISc", LAUNCH, names, ",".join(map(str, numbers))),
            *(sys.executable, "-Ic", TAKE, json.dumps(environ)),
        ],
        stdout=subprocess.PIPE,
        pass_fds=numbers,
        check=True,
        timeout=30,
    )
    answer: dict[str, object] = json.loads(told.stdout)
    return answer


def test_what_was_passed_is_taken_by_name() -> None:
    """Descriptors come by name in their order, without one as `unknown`; no child inherits them, or is told of them."""
    made = [os.memfd_create(name, os.MFD_CLOEXEC) for name in "abc"]
    inodes = [os.fstat(each).st_ino for each in made]
    answer = taken("pool:door:pool", made, FDSTORE="7")
    assert answer == {
        "inherited": {"pool": [3, 5], "door": [4]},
        "inodes": {"pool": [inodes[0], inodes[2]], "door": [inodes[1]]},
        "exec": [],
        "left": [],
        "capacity": 7,
        "unused": ["pool", "door"],
    }
    answer = taken(":door", made)
    assert answer["inherited"] == {"unknown": [3, 5], "door": [4]}
    assert answer["capacity"] == STORED_MAX
    for each in made:
        os.close(each)


@pytest.mark.parametrize(
    "environ", [{"LISTEN_PID": "1"}, {"LISTEN_FDS": "-1"}, {"LISTEN_FDS": "many"}, {"LISTEN_PID": ""}]
)
def test_what_was_passed_to_others_is_not_taken(environ: dict[str, str]) -> None:
    """Variables meant for another process, or that say nothing, are as good as none, and are gone afterwards."""
    made = os.memfd_create("a", os.MFD_CLOEXEC)
    answer = taken("pool", [made], **environ)
    assert answer["inherited"] == {}
    assert answer["left"] == []
    os.close(made)


def test_more_promised_than_passed() -> None:
    """A number beyond what is open costs nothing: only what is there is taken."""
    made = os.memfd_create("a", os.MFD_CLOEXEC)
    answer = taken("pool", [made], LISTEN_FDS="40")
    assert answer["inherited"] == {"pool": [3]}
    os.close(made)


def full(notifier: Notifier) -> None:
    """From here on the manager has no room."""
    while not notifier._queue:
        notifier.extend(1.0)


def test_only_the_first_ready_waits(
    manager: Manager, notifier: Notifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a manager does not read, the end of a reload is queued at once; nothing sleeps on the loop."""
    full(notifier)

    def slept(seconds: float) -> None:
        raise AssertionError(seconds)

    monkeypatch.setattr("time.sleep", slept)
    notifier.reloading()
    notifier.ready("serves")
    assert [each.text.partition(b"\n")[0] for each in notifier._queue][-2:] == [b"RELOADING=1", b"READY=1"]
    with pytest.raises(AssertionError):
        notifier.ready("serves", 1.0)


def test_descriptors_that_wait_are_few(manager: Manager, notifier: Notifier) -> None:
    """A manager that does not read makes us keep copies of a few descriptors; beyond, who wants more is told no."""
    full(notifier)
    store = Store(notifier)
    before = descriptors()
    kept = sum(store.keep(f"s{number}", 0) for number in range(200))
    assert kept == DESCRIPTORS_MAX
    assert len(descriptors()) <= len(before) + DESCRIPTORS_MAX
    assert notifier.failures == 200 - kept
    assert "wait for a manager" in notifier.problem
