"""The socket file: who owns the path, what is done with what lies there, and who may connect.

A lock beside the socket (`<socket>.lock`, flock) decides who owns the path; the kernel drops it with the process,
however that ends.  So a socket file without a lock-holder is stale, and replaced; one that a living process listens on
without our lock, and anything that is no socket, is left alone and the start refused.  The new socket is bound under
another name, given its mode and group, and only then moved to the path: nobody ever meets it half made.

A socket that the service manager made and passed (`passed`) is served as it is: its path, mode and group are the socket
unit's, and the file stays when we end, so that whoever connects meanwhile waits for the next of us.  The lock is taken
all the same, where its folder lets us, since a manager takes a path from whoever serves it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import socket
import stat
from pathlib import Path
from typing import Final

from kvslot.daemon.notify import UNNAMED, Store

PATH_BYTES: Final = 107
"""Of a Unix socket's path, by the kernel."""
BACKLOG: Final = 256


class EndpointError(Exception):
    """The path cannot be served; the message says why and what to do."""


class Endpoint:
    """A listening socket at a path, and the lock on it."""

    def __init__(self, path: Path, passed: socket.socket | None = None) -> None:
        """Takes the lock; EndpointError when the path is another's or cannot be used.

        `passed`: the socket that listens at that path already, of `passed`; ours from here on, unless this raises.
        """
        self.path = path
        self.passed = passed is not None
        self.socket: socket.socket | None = passed
        self.stale = False  # whether a socket lay there that nobody serves, to be replaced
        self._lock = -1
        self._inode = (0, 0)
        if passed is not None:
            with contextlib.suppress(OSError):
                self._take_lock()
            self.note()
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                self._inode = (status.st_dev, status.st_ino)
            return
        # The name it is bound under first is longer.
        if len(os.fsencode(path)) > PATH_BYTES - len(".new"):
            raise EndpointError(
                f"{path} is {len(os.fsencode(path))} bytes long; the path of a socket may have {PATH_BYTES - 4}"
            )
        self._check_folder()
        try:
            self._take_lock()
        except OSError as error:
            raise EndpointError(f"cannot open the lock {self._lock_path}: {error.strerror}") from None
        self.note()
        try:
            self._check_path()
        except EndpointError:
            self.close()
            raise

    @property
    def _lock_path(self) -> Path:
        return self.path.with_name(self.path.name + ".lock")

    def _take_lock(self) -> None:
        """EndpointError where another has it; OSError where there can be none."""
        lock = self._lock_path
        self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not stat.S_ISREG(os.fstat(self._lock).st_mode):
            self.close()
            raise EndpointError(f"the lock {lock} is no plain file; it is left as it is: move it away")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder, _, state = os.pread(self._lock, 64, 0).decode(errors="replace").strip().partition(" ")
            self.close()
            raise EndpointError(
                f"{self.path} is served by another kvslotd"
                + (f" (process {holder})" if holder else "")
                + (f", which is {state}" if state else "")
            ) from None

    def _check_folder(self) -> None:
        folder = self.path.parent
        try:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise EndpointError(f"cannot make the folder {folder} of the socket: {error.strerror}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            status = folder.stat()
            raise EndpointError(
                f"cannot write in {folder}: it belongs to {_user(status.st_uid)}:{_group(status.st_gid)}, mode "
                f"{stat.S_IMODE(status.st_mode):04o}, and this is {_user(os.geteuid())}"
            )

    def _check_path(self) -> None:
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise EndpointError(f"cannot look at {self.path}: {error.strerror}") from None
        if not stat.S_ISSOCK(status.st_mode):
            raise EndpointError(f"{self.path} exists and is no socket; it is left as it is: move it away")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.path))
            except OSError as error:
                if error.errno == errno.ECONNREFUSED:
                    self.stale = True  # nobody listens: a daemon that was killed left it
                    return
                raise EndpointError(f"cannot tell whether {self.path} is in use: {error.strerror}") from None
        raise EndpointError(f"{self.path} is in use by another process, which holds no lock of ours")

    def listen(self, mode: int, group: str) -> socket.socket:
        """Puts the listening socket at the path, replacing a stale one; one that was passed stays as it is."""
        if self.socket is not None:
            self.socket.setblocking(False)
            return self.socket
        bound = self.path.with_name(self.path.name + ".new")
        listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            if bound.is_symlink() or (bound.exists() and not bound.is_socket()):
                raise EndpointError(
                    f"{bound} is in the way and is no socket; it is left as it is: move it away"
                )
            bound.unlink(missing_ok=True)
            listener.bind(str(bound))
            if group:
                try:
                    os.chown(bound, -1, grp.getgrnam(group).gr_gid)
                except KeyError:
                    raise EndpointError(f"socket_group: there is no group {group!r}") from None
            os.chmod(bound, mode)
            listener.listen(BACKLOG)
            status = os.lstat(bound)
            os.rename(bound, self.path)
        except (OSError, EndpointError) as error:
            listener.close()
            if bound.is_socket():
                bound.unlink(missing_ok=True)
            if isinstance(error, EndpointError):
                raise
            raise EndpointError(f"cannot serve {self.path}: {error.strerror}") from None
        self._inode = (status.st_dev, status.st_ino)
        self.socket = listener
        return listener

    def in_place(self) -> tuple[bool, str]:
        """Whether the socket's file is the one that was put there, in words."""
        try:
            status = os.lstat(self.path)
        except OSError as error:
            return False, f"{self.path}: {error.strerror}: nobody can connect any more; restart the daemon"
        if (status.st_dev, status.st_ino) != self._inode:
            return False, f"{self.path} is not our socket any more; somebody put another file there"
        return True, f"accepting at {self.path}"

    def note(self, state: str = "") -> None:
        """Writes into the lock whose it is, for whoever finds it taken; `state`: what that one is doing."""
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()} {state}".strip().encode() + b"\n", 0)

    def close_socket(self) -> None:
        """Nobody is let in any more; the file goes, if it is still ours, and no manager's."""
        if self.socket is None:
            return
        self.socket.close()
        self.socket = None
        if self.passed:
            return
        try:
            status = os.lstat(self.path)
            if (status.st_dev, status.st_ino) == self._inode:
                os.unlink(self.path)
        except OSError:
            pass

    def close(self) -> None:
        """Gives path and lock back.  The lock's file stays: removing it would race with the next to take it."""
        self.close_socket()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def claim(store: Store, kind: str, path: str) -> list[Endpoint]:
    """Where to serve: what the service manager passed, wherever that is, else `path`.  EndpointError as it comes."""
    waiting = passed(store, kind)
    if not waiting:
        return [Endpoint(Path(path))]
    claimed: list[Endpoint] = []
    try:
        while waiting:
            sock = waiting.pop()
            claimed.insert(0, Endpoint(Path(sock.getsockname()), sock))
    except EndpointError:
        for sock in waiting:
            sock.close()
        for endpoint in claimed:
            endpoint.close()
        raise
    return claimed


def passed(store: Store, kind: str) -> list[socket.socket]:
    """The listening sockets that the service manager passed, out of the store; EndpointError for what is none.

    `kind` is what a socket unit calls them (FileDescriptorName=): "kvslot", for engines, or "admin".  Without a name of
    its own a descriptor has its unit's ("kvslotd.socket", "kvslotd-admin@gpu0.socket"), and from other managers none.
    """
    found: list[socket.socket] = []
    try:
        for name in [each for each in store.inherited if _kind_of(each) == kind]:
            for descriptor in store.pop(name):
                try:
                    # Asks the descriptor what it is.
                    sock = socket.socket(fileno=descriptor)
                except OSError:
                    os.close(descriptor)
                    raise EndpointError(f"the descriptor {name!r} that was passed is no socket") from None
                found.append(sock)
                address = sock.getsockname() if sock.family == socket.AF_UNIX else ""
                if (
                    sock.type != socket.SOCK_STREAM
                    or not isinstance(address, str)
                    or not address.startswith("/")
                    or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                ):
                    raise EndpointError(
                        f"the socket {name!r} that was passed does not listen at a path of a file system, for streams: "
                        "ListenStream=/run/kvslot/NAME.sock is what is needed"
                    )
    except EndpointError:
        for sock in found:
            sock.close()
        raise
    return found


def _kind_of(name: str) -> str:
    """What a passed descriptor is for, by its name; "" for what is no listening socket."""
    if name in ("kvslot", "admin"):
        return name
    if name == UNNAMED or name.endswith(".socket"):
        return "admin" if "admin" in name.partition("@")[0] else "kvslot"
    return ""


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
