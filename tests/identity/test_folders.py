"""S63: the socket's folder as it may be found, by a daemon that is no root: served or refused with one clear line, and
members of the socket's group connect where others do not."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvslot.daemon.endpoint import Endpoint, EndpointError

from .tools import as_root, someone

pytestmark = as_root

DAEMON, ENGINES = 64201, 64202  # a user of the daemon's, and the group of those who may connect
MEMBER, STRANGER = 64203, 64204


@pytest.fixture
def folder() -> Iterator[Path]:
    """A place that everybody can enter."""
    with tempfile.TemporaryDirectory(prefix="kvs") as name:
        place = Path(name)
        place.chmod(0o755)
        yield place


def serves(path: Path, mode: int = 0o660, group: int = ENGINES) -> str:
    """What a daemon of user DAEMON says when it is to serve there; "" where it does, which it goes on doing until the
    test has ended (its listening socket is a child's, which waits to be killed)."""
    readable, writable = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(readable)
            os.setgroups([group])
            os.setresgid(DAEMON, DAEMON, DAEMON)
            os.setresuid(DAEMON, DAEMON, DAEMON)
            try:
                endpoint = Endpoint(path)
                endpoint.listen(mode, "")
                os.chown(path, -1, group)
                os.write(writable, b"\n")
                os.close(writable)
                signal_wait()
            except EndpointError as error:
                os.write(writable, str(error).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writable)
    CHILDREN.append(pid)
    with os.fdopen(readable, encoding="utf-8") as said:
        return said.readline().strip()


CHILDREN: list[int] = []


def signal_wait() -> None:
    import signal

    while True:
        signal.pause()


@pytest.fixture(autouse=True)
def reaped() -> Iterator[None]:
    """No child is left."""
    yield
    while CHILDREN:
        pid = CHILDREN.pop()
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def connects(path: Path, uid: int, *groups: int) -> bool:
    with someone(uid, uid, groups), socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except PermissionError:
            return False
    return True


def own(place: Path) -> None:
    """As the unit makes it: the daemon's, and its group may enter."""
    place.mkdir()
    os.chown(place, DAEMON, ENGINES)
    place.chmod(0o750)


def absent(place: Path) -> None:
    """Its parent is the daemon's."""
    os.chown(place.parent, DAEMON, ENGINES)
    place.parent.chmod(0o755)


@pytest.mark.parametrize("make", [own, absent])
def test_members_connect_and_strangers_do_not(folder: Path, make: Callable[[Path], None]) -> None:
    """Made beforehand or by itself: who is in the group connects, who is not is refused by the kernel."""
    place = folder / "kvslot"
    make(place)
    assert serves(place / "s") == ""
    assert connects(place / "s", MEMBER, ENGINES)
    assert connects(place / "s", DAEMON, ENGINES)
    assert not connects(place / "s", STRANGER)
    assert not connects(place / "s", STRANGER, ENGINES + 100)


def roots(place: Path) -> None:
    place.mkdir(mode=0o755)


def shut(place: Path) -> None:
    place.mkdir(mode=0o700)


def in_anothers(place: Path) -> None:
    """It is missing, and where it would be made is not ours."""
    place.parent.chmod(0o755)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (roots, ["belongs to root:root, mode 0755", f"this is {DAEMON}"]),
        (shut, ["belongs to root:root, mode 0700", f"this is {DAEMON}"]),
        (in_anothers, ["cannot make the folder", "Permission denied"]),
    ],
)
def test_a_folder_of_others_is_told_in_one_line(
    folder: Path, make: Callable[[Path], None], said: list[str]
) -> None:
    """One line with owner, mode and who was to write there; nothing is left behind."""
    place = folder / "kvslot"
    make(place)
    line = serves(place / "s")
    for each in said:
        assert each in line, line
    assert not place.exists() or not list(place.iterdir())


def test_a_group_that_cannot_enter_is_no_group_that_connects(folder: Path) -> None:
    """Where the folder lets no group in, its members are refused too: the folder counts, not only the socket."""
    place = folder / "kvslot"
    own(place)
    place.chmod(0o700)
    assert serves(place / "s") == ""
    assert not connects(place / "s", MEMBER, ENGINES)
    place.chmod(0o710)
    assert connects(place / "s", MEMBER, ENGINES)
