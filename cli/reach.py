"""Why nobody answers at a daemon's socket, as far as it can be seen from outside: files, the lock, and the process.

    <socket>.lock   names the process that serves the socket, and what it is doing ("4242 starting")
    /proc/locks     ... for those who may not read that file
    /proc/PID/stat  whether it is there, was stopped, hangs in the kernel, or is dead

The first answer of a daemon comes in milliseconds.  Who has none within `SOON_S` looks at the process: what is stopped
or dead will not answer, and is told at once; one that runs has `LATE_S` more.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final, NamedTuple

from kvslot.api.client import Control, Disconnected, default_socket
from kvslot.cli import host

SOON_S: Final = 2.0
LATE_S: Final = 4.0
"""A loop that has not come round in so long hangs: its slices are below a millisecond."""
TWICE_S: Final = 0.2
"""Between two looks at a state that may be a moment's."""
HTTP_S: Final = 2.0
HTTP_BYTES: Final = 1 << 16
PRIVILEGED: Final = frozenset(
    ("root", "wheel", "sudo", "admin", "adm", "shadow", "disk", "kmem", "docker", "lxd", "systemd-journal")
)
"""Groups that open far more than a socket: nobody is told to join them."""


class Why(NamedTuple):
    """What is wrong, by what it is known, and what to do."""

    finding: str
    reason: str
    remedy: str

    def text(self) -> str:
        """In one line."""
        return "; ".join(each for each in self if each)


class Silent(Disconnected):
    """Nobody answers, and `why` is known."""

    def __init__(self, path: str, why: Why) -> None:
        super().__init__(f"no answer from {path}: {why.text()}")
        self.why = why


class Holder(NamedTuple):
    """The process that holds the lock beside a socket."""

    pid: int
    doing: str
    state: str
    """One letter as in `ps`; "" of one that is not there."""

    def text(self) -> str:
        return f"process {self.pid}" + (f" ({self.doing})" if self.doing else "")

    @property
    def foreign(self) -> bool:
        """Whether its number is another process's by now, or from here: nobody is to be sent after that one.

        Not asked of a dead one, whose command line is gone, nor in state D: to read it may take as long as that lasts.
        """
        return self.state not in ("", "D", "X", "Z") and not host.is_daemon(self.pid)


def connected(socket: str, patience: float) -> Control:
    """Connects and has a first answer, soon or not at all; from then on an answer may take `patience` seconds.

    Raises Disconnected, and Silent where it is known why.
    """
    for limit in (SOON_S, LATE_S):
        control: Control | None = None
        try:
            control = Control(socket, timeout=min(limit, patience))
            control.ping()
        except BaseException as error:
            if control is not None:
                control.close()
            if not isinstance(error, Disconnected) or not isinstance(error.__cause__, BlockingIOError):
                raise
            path = socket or default_socket()
            why = halted(path)
            if why is None and limit == LATE_S:
                why = silent(path)
            if why is not None:
                raise Silent(path, why) from error
        else:
            control.limit(patience)
            return control
    raise AssertionError("the last one raises")


def holder(path: str) -> Holder | None:
    """Who holds the lock beside a socket, or held it last; None where that cannot be seen."""
    pid, _, doing = host.lock_holder(path).partition(" ")
    number = int(pid) if pid.isdigit() and len(pid) < 10 else host.lock_taker(f"{path}.lock")
    return Holder(number, doing, host.process_state(number)) if number else None


def halted(path: str) -> Why | None:
    """Why the process that serves a socket cannot answer, if it is one that will not by itself."""
    held = holder(path)
    if held is None:
        return None
    if held.state == "D":
        # For a moment anybody is in that state who reads a file.
        time.sleep(TWICE_S)
        held = held._replace(state=host.process_state(held.pid))
    if held.foreign:
        return None
    match held.state:
        case "T" | "t":
            traced = " by a debugger" if held.state == "t" else ""
            return Why(
                f"{held.text()} serves it, and does not answer", f"it is stopped{traced} (state {held.state})",
                "end the debugger" if traced else f"kill -CONT {held.pid}",
            )  # fmt: skip
        case "D":
            return Why(
                f"{held.text()} serves it, and does not answer",
                "it waits inside the kernel for a disk or device (state D), and cannot even be killed until that ends",
                f"dmesg | tail, and cat /proc/{held.pid}/stack as root: the storage or the device is what to mend",
            )  # fmt: skip
        case "Z" | "X":
            return Why(
                f"{held.text()} served it, and is dead (state {held.state})",
                "its parent has not taken note of its end, and has not started it again",
                "restart it by what started it: systemctl restart 'kvslotd@*', or the container",
            )  # fmt: skip
        case "":
            return Why(
                f"the lock names process {held.pid}, which is dead",
                "who lets clients in is a service manager that waits for the next one, or the daemon runs in another "
                "container",
                "systemctl restart 'kvslotd@*'; or look in the container that the daemon runs in",
            ) if host.sees_processes() else None  # fmt: skip
    return None


def silent(path: str) -> Why:
    """Of a socket that lets us in and does not answer, whose process runs or is not known."""
    held = holder(path)
    if held is None:
        return Why(
            "somebody serves it, and does not answer", "the lock beside it names nobody",
            f"fuser {path} as root says which process; its log says what it does",
        )  # fmt: skip
    if not host.is_daemon(held.pid):
        return Why(
            "somebody serves it, and does not answer",
            f"the lock names process {held.pid}, which is no kvslotd here: another container's number, or an old one",
            "look in the container that the daemon runs in",
        )  # fmt: skip
    if held.doing == "starting":
        return Why(
            f"{held.text()} does not answer yet", "it makes its pools, or takes over what was cached",
            "its log says how far it is; clients that wait are answered then",
        )  # fmt: skip
    return Why(
        f"{held.text()} serves it, and does not answer",
        f"it runs (state {held.state}), and its loop hangs: no answer in {SOON_S + LATE_S:.0f} s",
        f"its log says what it does; py-spy dump --pid {held.pid}; in the last resort kill -ABRT {held.pid}",
    )


def engines_socket(path: str) -> str:
    """Of a socket that speaks HTTP: where the engines' one is, as an admin API says; "" where it is none."""
    import http.client
    import socket

    import msgspec

    class Local(http.client.HTTPConnection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(path)

    connection = Local("localhost", timeout=HTTP_S)
    try:
        connection.request("GET", "/v1/stats")
        told: Any = msgspec.json.decode(connection.getresponse().read(HTTP_BYTES))
        return str(told["socket"])
    except (OSError, http.client.HTTPException, msgspec.DecodeError, LookupError, TypeError):
        return ""
    finally:
        connection.close()


def is_admin(path: str) -> Why:
    """Of the admin API's socket, given where the engines' is needed."""
    other = engines_socket(path)
    return Why(
        f"{path} is the socket of the admin API, which speaks HTTP" if other else f"{path} speaks HTTP",
        "kvslotctl asks at the engines' socket",
        f"--socket {other}" if other else "name that one: the admin API's stands beside it unless configured otherwise",
    )  # fmt: skip


def admission(gid: int, mode: int, why: str) -> str:
    """How a user may be let into a socket or folder: by its group, where that opens nothing else, or otherwise."""
    name, me = host.group(gid), host.user(os.geteuid())
    if gid and mode and name not in PRIVILEGED:
        return f"usermod -aG {name} {me}, then log in anew; or run this as root"
    return f"run this as root (sudo), or {why}"
