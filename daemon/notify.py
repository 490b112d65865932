"""What is said to the service manager, and the descriptors it keeps for us: systemd's notify and FD-store protocols.

    NOTIFY_SOCKET    a datagram socket of the manager's; each message is lines of NAME=value (sd_notify(3))
    LISTEN_FDS       how many descriptors it passed, from 3 on; LISTEN_FDNAMES their names, LISTEN_PID to whom
    WATCHDOG_USEC    how often it wants to hear that we live; WATCHDOG_PID from whom

    Notifier ──► READY  STATUS  RELOADING  STOPPING  WATCHDOG  EXTEND_TIMEOUT_USEC  BARRIER
    Store    ──► FDSTORE  FDSTOREREMOVE            ◄── what was passed at start, by name

Without NOTIFY_SOCKET nothing is sent and nothing is opened; a call then costs a comparison.  A manager that does not
read must not stop the loop: only `barrier` and, at the start, `ready` wait for it, and not for long.  What has to
arrive (all but WATCHDOG and STATUS, which are said again anyway) is queued meanwhile, in order, and sent by a later
call.

The manager keeps its copy of a descriptor that was sent with FDSTORE=1 when this process ends, however it ends, and
passes it to the next one.  The names of all travel in one variable of the environment, for which the kernel has a
limit, beyond which the next process could not be started at all.  So names are short (`NAME_BYTES`) and descriptors few
(`STORED_MAX`).
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import select
import socket
import time
from collections import deque
from collections.abc import MutableMapping
from typing import Final, NamedTuple

FIRST: Final = 3
"""The number of the first descriptor that is passed."""
PASSED_MAX: Final = 1 << 16
"""More than any manager passes."""
NAME_BYTES: Final = 30
STORED_MAX: Final = 4096
"""4096 * 31 bytes of names stay below the 128 KiB that one variable of the environment may have."""
QUEUED_MAX: Final = 2 * STORED_MAX
"""Messages that wait for a manager that does not read."""
DESCRIPTORS_MAX: Final = 64
"""Of them with a descriptor, of which each has a copy meanwhile; `keep` is told that there is no room for more."""
PATIENCE_SECONDS: Final = 1.0
"""How long the first `ready` waits for room; a manager that takes longer has other troubles."""
PAUSE_SECONDS: Final = 0.005
"""Between two tries meanwhile: nothing tells when the other end of a datagram socket has room."""
STATUS_BYTES: Final = 512
UNNAMED: Final = "unknown"
"""What a manager calls a descriptor that has no name, and so do we."""


class _Message(NamedTuple):
    text: bytes
    descriptor: int  # a copy of ours, closed once it is sent; -1: none


class Notifier:
    """Tells the manager how this process is; does nothing where there is none.  Nothing the manager does raises."""

    def __init__(self, address: str = "", *, watchdog_seconds: float = 0.0) -> None:
        """`address`: a path, or `@` and an abstract name; `watchdog_seconds`: within which to be heard of, 0: never."""
        self.watchdog_seconds = watchdog_seconds
        self.problem = ""
        """Why nothing is sent although there is an address, or what the last failure was."""
        self.failures = 0
        """Messages that the manager did not get."""
        self._address = b""
        self._socket: socket.socket | None = None
        self._queue: deque[_Message] = deque()
        self._status = ""
        if address:
            self._open(address)

    @classmethod
    def take(cls, environ: MutableMapping[str, str] | None = None) -> Notifier:
        """By the environment, out of which it is taken, so that no child of ours speaks for us."""
        environ = os.environ if environ is None else environ
        address = environ.pop("NOTIFY_SOCKET", "")
        period = environ.pop("WATCHDOG_USEC", "")
        whose = environ.pop("WATCHDOG_PID", "")
        wanted = period.isdecimal() and whose in ("", str(os.getpid()))
        return cls(address, watchdog_seconds=int(period) / 1e6 if wanted else 0.0)

    def _open(self, address: str) -> None:
        name = os.fsencode(address)
        if address[0] not in "/@" or not 1 < len(name) < 108:
            self.problem = (
                f"NOTIFY_SOCKET={address!r} is neither a path nor an abstract name that a socket may have"
            )
            return
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        except OSError as error:
            self._failed(error)
            return
        self._address = b"\0" + name[1:] if address[0] == "@" else name

    @property
    def enabled(self) -> bool:
        """Whether there is a manager to tell."""
        return self._socket is not None

    # -- how this process is -----------------------------------------------------------------------------------

    def ready(self, status: str = "", patience: float = 0.0) -> None:
        """The socket accepts: what waits for us may start.  Ends what `reloading` began, too.

        Waits for a manager that does not read for `patience` seconds at most, which is for who serves nobody yet.
        """
        self._say("READY=1", status)
        self.flush(patience)

    def status(self, text: str) -> None:
        """One line for `systemctl status`; sent when it has changed.  Sends what waits in any case."""
        if self._socket is not None and self.flush() and text != self._status:
            if not self._send(_Message(f"STATUS={_line(text)}".encode(), -1)):
                self._status = text

    def reloading(self) -> None:
        """Settings are being read anew; `ready` ends it."""
        self._say(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str = "", seconds: float = 0.0) -> None:
        """This process is about to end, which may take `seconds`, even where the unit's limit is shorter."""
        self._say("STOPPING=1" + (f"\n{_extension(seconds)}" if seconds > 0 else ""), status)

    def extend(self, seconds: float, text: str = "") -> None:
        """Starting or stopping goes on (`text`: with what), and may take until `seconds` from now."""
        self._say(_extension(seconds), text)

    def watchdog(self) -> None:
        """This process is well: for whoever has proven it to say."""
        if self._socket is not None:
            self.flush()
            self._send(_Message(b"WATCHDOG=1", -1))

    def barrier(self, seconds: float = PATIENCE_SECONDS) -> bool:
        """Waits until the manager has taken all that was said; false where it has not after `seconds`, or is none."""
        if self._socket is None or not self.flush(seconds):
            return False
        readable, writable = os.pipe2(os.O_CLOEXEC)
        try:
            failure = self._send(_Message(b"BARRIER=1", writable))
            os.close(writable)
            poll = select.poll()
            poll.register(readable, 0)  # a hang-up is always told of: the manager has closed its copy
            return not failure and bool(poll.poll(seconds * 1e3))
        finally:
            os.close(readable)

    def close(self) -> None:
        """Says nothing more; what waits is dropped."""
        for message in self._queue:
            _close(message.descriptor)
        self._queue.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # -- sending -----------------------------------------------------------------------------------------------

    def post(self, text: str, descriptor: int = -1) -> bool:
        """Sends lines, with a descriptor, behind all that waits; where there is no room they wait too.

        The descriptor stays the caller's.  False where there is no manager, or it cannot be reached.
        """
        if self._socket is None:
            return False
        message = _Message(text.encode(), descriptor)
        if self.flush():
            failure = self._send(message)
            if not failure:
                return True
            if failure not in _FULL:
                return False
        if len(self._queue) >= QUEUED_MAX:
            self.failures += 1
            self.problem = f"{QUEUED_MAX} messages wait for a manager that does not read"
            return False
        if descriptor >= 0:
            if sum(each.descriptor >= 0 for each in self._queue) >= DESCRIPTORS_MAX:
                self.failures += 1
                self.problem = f"{DESCRIPTORS_MAX} descriptors wait for a manager that does not read"
                return False
            try:
                descriptor = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST)
            except OSError as error:
                self._failed(error)
                return False
        self._queue.append(message._replace(descriptor=descriptor))
        return True

    def flush(self, seconds: float = 0.0) -> bool:
        """Sends what waits, for `seconds` at most; true when nothing waits any more."""
        until = 0.0
        while self._queue:
            failure = self._send(self._queue[0])
            if failure in _FULL:
                now = time.monotonic()
                until = until or now + seconds
                if now >= until:
                    return False
                time.sleep(PAUSE_SECONDS)
                continue
            _close(self._queue.popleft().descriptor)  # sent, or the manager cannot be reached
        return True

    def _say(self, text: str, status: str = "") -> None:
        if self._socket is not None:
            if status:
                text += f"\nSTATUS={_line(status)}"
                self._status = status
            self.post(text)

    def _send(self, message: _Message) -> int:
        """Returns the error number; 0: sent."""
        if self._socket is None:
            return errno.ENOTCONN
        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        try:
            if message.descriptor < 0:
                self._socket.sendto(message.text, flags, self._address)
            else:
                # Not `send_fds`, which on some versions leaves flags and address out.
                rights = array.array("i", [message.descriptor])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                self._socket.sendmsg([message.text], ancillary, flags, self._address)
        except OSError as error:
            number = error.errno or errno.EIO
            if number not in _FULL:
                self._failed(error)
            return number
        return 0

    def _failed(self, error: OSError) -> None:
        self.failures += 1
        self.problem = f"the service manager cannot be told: {error.strerror}"


class Store:
    """The descriptors that outlive this process, by name; several may have one name."""

    def __init__(
        self, notifier: Notifier, inherited: dict[str, list[int]] | None = None, *, capacity: int = STORED_MAX
    ) -> None:
        """`inherited`: what was passed at start; `capacity`: how many the manager keeps, as far as it is known."""
        self.inherited: dict[str, list[int]] = inherited if inherited is not None else {}
        """By name, in the order of their numbers.  Who takes some removes them here; `close` closes the others."""
        self.capacity = capacity
        self._notifier = notifier
        self._kept = {name: len(found) for name, found in self.inherited.items()}
        self._count = sum(self._kept.values())

    @classmethod
    def take(cls, notifier: Notifier, environ: MutableMapping[str, str] | None = None) -> Store:
        """What the manager passed to this very process.  Close-on-exec from here on, and out of the environment."""
        environ = os.environ if environ is None else environ
        whose = environ.pop("LISTEN_PID", "")
        number = environ.pop("LISTEN_FDS", "")
        names = environ.pop("LISTEN_FDNAMES", "")
        environ.pop("LISTEN_PIDFDID", None)
        # Since systemd 254 it tells how many it keeps, if any.
        told = environ.pop("FDSTORE", "")
        capacity = min(int(told), STORED_MAX) if told.isdecimal() else STORED_MAX
        inherited: dict[str, list[int]] = {}
        if whose == str(os.getpid()) and number.isdecimal():
            count = min(int(number), PASSED_MAX)
            named = names.split(":") if names else []
            for index in range(count):
                descriptor = FIRST + index
                try:
                    fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
                except OSError:
                    continue  # it says so, but there is none
                name = named[index] if index < len(named) else ""
                inherited.setdefault(name or UNNAMED, []).append(descriptor)
        return cls(notifier, inherited, capacity=capacity)

    @property
    def available(self) -> bool:
        """Whether the manager keeps descriptors, as far as it says."""
        return self._notifier.enabled and self.capacity > 0

    def keep(self, name: str, descriptor: int, *, poll: bool = False) -> bool:
        """Has the manager keep a copy under a name; false where it does not.

        What the manager has already, under whatever name, it does not take twice.  `poll`: it lets go of the
        descriptor by itself once that shows a hang-up or an error; only for those that can (sockets, pipes, pidfds).
        Beyond its capacity the manager would drop what comes, and not say so: what is kept is counted here.
        """
        _check_name(name)
        if not self.available or self._count >= self.capacity:
            return False
        if not self._notifier.post(f"FDSTORE=1\nFDNAME={name}" + ("" if poll else "\nFDPOLL=0"), descriptor):
            return False
        self._count += 1
        self._kept[name] = self._kept.get(name, 0) + 1
        return True

    def forget(self, name: str) -> bool:
        """Has the manager let go of all that it keeps under a name; false where it cannot be told."""
        _check_name(name)
        self._count -= self._kept.pop(name, 0)
        return self.available and self._notifier.post(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def pop(self, name: str) -> list[int]:
        """The inherited descriptors of a name, which are the caller's from now on."""
        return self.inherited.pop(name, [])

    def close(self) -> list[str]:
        """Closes what nobody took, and returns its names; what the manager keeps it keeps."""
        left = list(self.inherited)
        for descriptors in self.inherited.values():
            for descriptor in descriptors:
                os.close(descriptor)
        self.inherited.clear()
        return left


_FULL: Final = (errno.EAGAIN, errno.ENOBUFS, errno.EINTR)
"""No room now."""


def _check_name(name: str) -> None:
    if not 0 < len(name) <= NAME_BYTES or ":" in name or not name.isascii() or not name.isprintable():
        raise ValueError(
            f"{name!r} is no name for a stored descriptor: 1 to {NAME_BYTES} plain characters, no colon"
        )


def _line(text: str) -> str:
    """One line, not too long, whatever was in it."""
    return " ".join(text.split()).encode(errors="replace")[:STATUS_BYTES].decode(errors="ignore")


def _extension(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={max(1, round(seconds * 1e6))}"


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


__all__ = ["NAME_BYTES", "STORED_MAX", "Notifier", "Store"]
