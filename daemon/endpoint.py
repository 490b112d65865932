"""The socket file: who owns the path, what is done with what lies there, and who may connect.

A lock beside the socket (`<socket>.lock`, flock) decides who owns the path; the kernel drops it with the process,
however that ends.  So a socket file without a lock-holder is stale, and replaced; one that a living process listens on
without our lock, and anything that is no socket, is left alone and the start refused.  The new socket is bound under
another name, given its mode and group, and only then moved to the path: nobody ever meets it half made.
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

PATH_BYTES: Final = 107
"""Of a Unix socket's path, by the kernel."""
BACKLOG: Final = 256


class EndpointError(Exception):
    """The path cannot be served; the message says why and what to do."""


class Endpoint:
    """A listening socket at a path, and the lock on it."""

    def __init__(self, path: Path) -> None:
        """Takes the lock; EndpointError when the path is another's or cannot be used."""
        self.path = path
        self.socket: socket.socket | None = None
        self.stale = False  # whether a socket lay there that nobody serves, to be replaced
        self._lock = -1
        self._inode = (0, 0)
        # The name it is bound under first is longer.
        if len(os.fsencode(path)) > PATH_BYTES - len(".new"):
            raise EndpointError(
                f"{path} is {len(os.fsencode(path))} bytes long; the path of a socket may have {PATH_BYTES - 4}"
            )
        self._check_folder()
        lock = path.with_name(path.name + ".lock")
        try:
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise EndpointError(f"cannot open the lock {lock}: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(self._lock).st_mode):
            self.close()
            raise EndpointError(f"the lock {lock} is no plain file; it is left as it is: move it away")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder, _, state = os.pread(self._lock, 64, 0).decode(errors="replace").strip().partition(" ")
            self.close()
            raise EndpointError(
                f"{path} is served by another kvslotd"
                + (f" (process {holder})" if holder else "")
                + (f", which is {state}" if state else "")
            ) from None
        self.note()
        try:
            self._check_path()
        except EndpointError:
            self.close()
            raise

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
        """Puts the listening socket at the path, replacing a stale one."""
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

    def note(self, state: str = "") -> None:
        """Writes into the lock whose it is, for whoever finds it taken; `state`: what that one is doing."""
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()} {state}".strip().encode() + b"\n", 0)

    def close_socket(self) -> None:
        """Nobody connects any more; the file goes, if it is still ours."""
        if self.socket is None:
            return
        self.socket.close()
        self.socket = None
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
