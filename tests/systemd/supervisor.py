"""A service manager in a few hundred lines: what systemd does for one service that has Type=notify, and nothing else.

    sockets    made here, passed by LISTEN_FDS with names, and kept over restarts: who connects meanwhile waits
    notify     READY, STATUS, RELOADING, STOPPING, WATCHDOG, EXTEND_TIMEOUT_USEC, BARRIER; from the main process alone
    FD store   FDSTORE with FDNAME and FDPOLL, FDSTOREREMOVE; passed back behind the sockets when it starts again
    limits     of start, watchdog (SIGABRT) and stop (SIGTERM), past them SIGKILL; EXTEND_TIMEOUT_USEC extends them
    restart    after a failure; not after the exit codes of `no_restart`, nor after an end in good order

    dead ── start ──► starting ── READY ──► running ── STOPPING, stop() ──► stopping ── exit ──► dead
                         ▲                     │
                         └──── `pause` s ──────┴── failure

As with systemd, the FD store lives through restarts (`restart`, crashes, watchdog), and ends where none follows: with
`stop`, with an end in good order, and with a failure that is not retried.

A thread does the manager's work, so that a test goes on with its own.  `wait` waits for what a test is after; `history`
has what happened, in order; `messages` what was said and when.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import platform
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

LAUNCH: Final = """\
import fcntl, os, sys
names, numbers, program = sys.argv[1], [int(each) for each in sys.argv[2].split(",") if each], sys.argv[3:]
beyond = 3 + len(numbers)
high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, max(beyond, *numbers) + 1) for each in numbers]
for index, each in enumerate(high):
    os.dup2(each, 3 + index)
os.closerange(beyond, 1 << 16)
environ = dict(os.environ)
if numbers:
    environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(numbers)), "LISTEN_FDNAMES": names}
os.execvpe(program[0], program, environ)
"""
"""Between fork and the program: puts descriptors in their places, and says for whom they are."""
LONG: Final = 30.0
"""How long a test waits for what must come; a slow machine takes its time."""
ABORT_SECONDS: Final = 10.0
"""From SIGABRT to SIGKILL."""
MESSAGE_BYTES: Final = 4096
DESCRIPTORS_MAX: Final = 253
"""Of one message, by the kernel."""
_KCMP: Final = {"x86_64": 312, "aarch64": 272}


class Message(NamedTuple):
    """What was said: when (`time.monotonic`), its lines, and the process that said it."""

    when: float
    fields: dict[str, str]
    pid: int


class Supervisor:
    """One service.  Use it in a `with`; at its end everything is killed and closed."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        sockets: Mapping[str, Path] | None = None,
        environ: Mapping[str, str] | None = None,
        log: Path | None = None,
        watchdog_seconds: float = 0.0,
        start_seconds: float = LONG,
        stop_seconds: float = LONG,
        store_max: int = 4096,
        restarts: bool = True,
        pause: float = 0.0,
        no_restart: Sequence[int] = (2, 3),
    ) -> None:
        """`sockets`: by FileDescriptorName, paths to listen at; `log`: where standard output and error are appended."""
        self.folder = Path(tempfile.mkdtemp(prefix="kvm"))
        self.command = list(command)
        self.environ = dict(environ or {})
        self.log = log or self.folder / "log"
        self.watchdog_seconds = watchdog_seconds
        self.start_seconds = start_seconds
        self.stop_seconds = stop_seconds
        self.store_max = store_max
        self.restarts = restarts
        self.pause = pause
        self.no_restart = tuple(no_restart)
        self.state = "dead"
        self.status = ""
        self.starts = 0
        self.codes: list[int] = []
        """How each process ended: its exit code, or minus the signal."""
        self.history: list[str] = []
        """started, ready, reloading, stopping, late (a limit has passed), watchdog (missed), exited."""
        self.messages: list[Message] = []
        self.ignored: list[Message] = []
        """Of processes other than the main one."""
        self.dropped = 0
        """Descriptors for which the store had no room."""
        self.store: list[tuple[str, int, bool]] = []
        """Name, descriptor, and whether it goes once it hangs up."""
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._deadline = 0.0  # of the state: start, stop
        self._alive_until = 0.0  # by the watchdog
        self._again_at = 0.0  # when a failed one is started again
        self._asked = ""  # "stop" or "restart", while it is being stopped
        self._holding = False
        self._closing = False
        self._changed = threading.Condition()
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._notify.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._notify.bind(str(self.folder / "notify"))
        self._listeners: dict[str, socket.socket] = {}
        for name, path in (sockets or {}).items():
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            listener.bind(str(path))
            listener.listen(128)
            self._listeners[name] = listener
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what an operator does ---------------------------------------------------------------------------------

    def start(self, *, ready: bool = True) -> None:
        """`systemctl start`: returns once it is ready, or (`ready` false) has been started."""
        with self._changed:
            assert self.state == "dead", self.state
            self._start()
        if ready:
            self.wait_ready()

    def stop(self, seconds: float = LONG) -> int:
        """`systemctl stop`: ends it and forgets its descriptors; returns how it ended."""
        return self._end("stop", seconds)

    def restart(self, seconds: float = LONG) -> int:
        """`systemctl restart`: ends it, keeps its descriptors, starts it again; returns how the old one ended."""
        before = self.starts
        code = self._end("restart", seconds)
        self.wait(lambda: self.starts > before and self.state == "running", seconds)
        return code

    def reload(self) -> None:
        """`systemctl reload`, without waiting."""
        self.send(signal.SIGHUP)

    def send(self, number: int) -> None:
        """A signal to the main process, as from anybody."""
        with self._changed:
            assert self._process is not None
            self._process.send_signal(number)

    def kill(self, number: int = signal.SIGKILL, *, ready: bool = True) -> None:
        """A crash; returns once the next one is ready (`ready` false: once this one has ended)."""
        with self._changed:
            ended, started = len(self.codes), self.starts
        self.send(number)
        self.wait(lambda: len(self.codes) > ended)
        if ready:
            self.wait(lambda: self.starts > started and self.state == "running")

    def hold(self, holding: bool = True) -> None:
        """A manager that does not read what it is told, until `hold(False)`."""
        with self._changed:
            self._holding = holding
            self._ring()

    def close(self) -> None:
        """Kills what is left, and gives everything back."""
        with self._changed:
            self._closing = True
            self._ring()
        self._thread.join()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            os.close(self._pidfd)
            self._process = None
        self._forget()
        for listener in self._listeners.values():
            listener.close()
        self._notify.close()
        os.close(self._bell)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- what a test looks at ----------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Of the main process."""
        assert self._process is not None
        return self._process.pid

    @property
    def stored(self) -> dict[str, int]:
        """How many descriptors are kept, by name."""
        with self._changed:
            names = [name for name, _, _ in self.store]
        return {name: names.count(name) for name in dict.fromkeys(names)}

    def text(self) -> str:
        """What the service has written so far, over all its starts."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def said(self, field: str) -> list[Message]:
        """The messages with a field, in order."""
        with self._changed:
            return [each for each in self.messages if field in each.fields]

    def wait(self, until: Callable[[], bool], seconds: float = LONG) -> None:
        """Returns once `until` holds; AssertionError, with all that happened, where it does not within `seconds`."""
        with self._changed:
            if not self._changed.wait_for(until, seconds):
                raise AssertionError(
                    f"not within {seconds} s; {self.state}, {self.history}, {self.codes}:\n{self.text()[-4000:]}"
                )

    def wait_ready(self, seconds: float = LONG) -> None:
        """Returns once it is running."""
        self.wait(lambda: self.state == "running" or (self.state == "dead" and not self._again_at), seconds)
        assert self.state == "running", f"{self.history}, {self.codes}:\n{self.text()[-4000:]}"

    # -- the manager's work; all of it under the lock ------------------------------------------------------------

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _happened(self, what: str) -> None:
        self.history.append(what)
        self._changed.notify_all()

    def _end(self, how: str, seconds: float) -> int:
        with self._changed:
            self._again_at = 0.0
            if self._process is None:
                self._forget()
                return self.codes[-1] if self.codes else 0
            ended = len(self.codes)
            self._asked = how
            self._stopping()
            self._tell(signal.SIGTERM)
            self._ring()
        self.wait(lambda: len(self.codes) > ended, seconds)
        return self.codes[ended]

    def _tell(self, number: int) -> None:
        """Also to one that is stopped, as systemd does."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.send_signal(signal.SIGCONT)

    def _stopping(self) -> None:
        if self.state != "stopping":
            self.state = "stopping"
            self._deadline = time.monotonic() + self.stop_seconds
            self._happened("stopping")

    def _start(self) -> None:
        passed = [(name, each.fileno()) for name, each in self._listeners.items()]
        passed += [(name, descriptor) for name, descriptor, _ in self.store]
        environ = {
            name: value
            for name, value in os.environ.items()
            if name not in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
            and not name.startswith("LISTEN_")
        }
        environ |= {**self.environ, "NOTIFY_SOCKET": str(self.folder / "notify")}
        if self.store_max:
            environ["FDSTORE"] = str(self.store_max)
        if self.watchdog_seconds:
            environ["WATCHDOG_USEC"] = str(round(self.watchdog_seconds * 1e6))
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-ISc", LAUNCH),
                    ":".join(name for name, _ in passed),
                    ",".join(str(number) for _, number in passed),
                    *self.command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environ,
                pass_fds=[number for _, number in passed],
            )
        self._pidfd = os.pidfd_open(self._process.pid)
        self.starts += 1
        self._again_at = self._alive_until = 0.0
        self.state = "starting"
        self.status = ""
        self._deadline = time.monotonic() + self.start_seconds
        self._happened("started")
        self._ring()

    def _run(self) -> None:
        while True:
            poll = select.poll()
            with self._changed:
                if self._closing:
                    return
                poll.register(self._bell, select.POLLIN)
                if not self._holding:
                    poll.register(self._notify, select.POLLIN)
                if self._process is not None:
                    poll.register(self._pidfd, select.POLLIN)
                for _, descriptor, polled in self.store:
                    if polled:
                        with contextlib.suppress(OSError):
                            poll.register(descriptor, 0)
                timers = [each for each in (self._deadline, self._alive_until, self._again_at) if each]
                pause = max(0.0, min(timers) - time.monotonic()) * 1e3 + 1 if timers else None
            ready = dict(poll.poll(pause))
            with self._changed:
                if self._bell in ready:
                    os.eventfd_read(self._bell)
                # What was said is heard before an end is, as systemd does it.
                while not self._holding and self._hear():
                    pass
                self._let_go(ready)
                if self._process is not None and self._pidfd in ready:
                    self._exited()
                self._look(time.monotonic())

    def _hear(self) -> bool:
        """One message; false where there is none."""
        room = socket.CMSG_SPACE(4 * DESCRIPTORS_MAX) + socket.CMSG_SPACE(12)
        try:
            data, ancillary, _, _ = self._notify.recvmsg(
                MESSAGE_BYTES, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        descriptors, pid = array.array("i"), 0
        for _, kind, content in ancillary:
            if kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % 4])
            elif kind == socket.SCM_CREDENTIALS:
                pid = struct.unpack("3i", content)[0]
        fields: dict[str, str] = {}
        for line in data.decode().splitlines():
            name, _, value = line.partition("=")
            fields[name] = value
        message = Message(time.monotonic(), fields, pid)
        if self._process is None or pid != self._process.pid:
            self.ignored.append(message)
        else:
            self.messages.append(message)
            self._heed(message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._changed.notify_all()
        return True

    def _heed(self, message: Message, descriptors: array.array[int]) -> None:
        now, fields = message.when, message.fields
        if "STATUS" in fields:
            self.status = fields["STATUS"]
        if fields.get("RELOADING") == "1":
            self._happened("reloading")
        if fields.get("READY") == "1":
            if self.state == "starting":
                self.state = "running"
                self._deadline = 0.0
                self._alive_until = now + self.watchdog_seconds if self.watchdog_seconds else 0.0
            self._happened("ready")
        if fields.get("STOPPING") == "1":
            self._alive_until = 0.0
            self._stopping()
        if fields.get("WATCHDOG") == "1" and self._alive_until:
            self._alive_until = now + self.watchdog_seconds
        if (more := fields.get("EXTEND_TIMEOUT_USEC", "")) and self._deadline:
            self._deadline = max(self._deadline, now + int(more) / 1e6)
        name = fields.get("FDNAME", "stored")
        if fields.get("FDSTOREREMOVE") == "1":
            for each in [each for each in self.store if each[0] == name]:
                self.store.remove(each)
                os.close(each[1])
        elif fields.get("FDSTORE") == "1":
            for descriptor in descriptors:
                if any(_same(descriptor, kept) for _, kept, _ in self.store):
                    continue
                if len(self.store) >= self.store_max:
                    self.dropped += 1
                    continue
                self.store.append((name, os.dup(descriptor), fields.get("FDPOLL") != "0"))

    def _let_go(self, ready: Mapping[int, int]) -> None:
        """Of what has hung up."""
        for each in [each for each in self.store if each[2]]:
            if ready.get(each[1], 0) & (select.POLLHUP | select.POLLERR):
                self.store.remove(each)
                os.close(each[1])
                self._changed.notify_all()

    def _look(self, now: float) -> None:
        """What is due."""
        if self._process is not None:
            if self._alive_until and now >= self._alive_until:
                self._alive_until = 0.0
                self._tell(signal.SIGABRT)
                self._deadline = now + ABORT_SECONDS
                self._happened("watchdog")
            elif self._deadline and now >= self._deadline:
                self._deadline = 0.0
                self._process.kill()
                self._happened("late")
        elif self._again_at and now >= self._again_at:
            self._start()

    def _exited(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        os.close(self._pidfd)
        self._process, self._pidfd = None, -1
        self.state = "dead"
        self._deadline = self._alive_until = 0.0
        self.codes.append(code)
        late = self.history[-1] in ("late", "watchdog")
        self._happened("exited")
        asked, self._asked = self._asked, ""
        if asked == "restart":
            self._start()
        elif asked == "stop" or (code == 0 and not late) or code in self.no_restart or not self.restarts:
            self._forget()
        else:
            self._again_at = time.monotonic() + self.pause

    def _forget(self) -> None:
        for _, descriptor, _ in self.store:
            os.close(descriptor)
        self.store.clear()


def _same(one: int, other: int) -> bool:
    """Whether two descriptors are one open file (kcmp(2)); false where that cannot be asked."""
    number = _KCMP.get(platform.machine())
    if number is None:
        return False
    libc, pid = ctypes.CDLL(None, use_errno=True), os.getpid()
    return int(libc.syscall(number, pid, pid, 0, one, other)) == 0
