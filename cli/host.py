"""What `kvslotctl doctor` reads on this machine: files, limits, memory, and what the daemon would be after a restart.

Nothing here changes anything, and nothing raises for what cannot be read: it is None, with a reason where that helps.
"""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
import sys
from collections.abc import Collection
from grp import getgrgid
from pathlib import Path
from typing import Any, Final, NamedTuple

Row = dict[str, Any]

CHECK_SECONDS: Final = 10.0
"""A configuration is read in a fraction of a second; a model's file on a network may take longer."""
HEALTH_SECONDS: Final = 5.0
"""/healthz answers out of what is known; after so long the admin API hangs."""
PASSED_ON: Final = (
    "--config", "--socket", "--admin-socket", "--log-level", "--log-format", "--no-prefault", "--pool-size",
    "--pool-blocks", "--block-size", "--model-config", "--dtype", "--demo",
)  # fmt: skip
"""Flags of a running daemon that its configuration is read again with; no others, whatever its command line holds."""
BARE: Final = ("--no-prefault", "--demo")


class Place(NamedTuple):
    """A file as `stat` shows it; `kind` is socket, folder, file, link, missing or hidden (may not be looked at)."""

    path: str
    kind: str
    mode: int = 0
    uid: int = -1
    gid: int = -1

    def text(self) -> str:
        """As `ls -l` would say it: kvslot:engines 0660."""
        return f"{user(self.uid)}:{group(self.gid)} {self.mode:04o}"


def place(path: str | Path) -> Place:
    """One file, links not followed."""
    try:
        told = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return Place(str(path), "missing")
    except OSError:
        return Place(str(path), "hidden")
    kind = "file"
    for test, name in ((stat.S_ISSOCK, "socket"), (stat.S_ISDIR, "folder"), (stat.S_ISLNK, "link")):
        if test(told.st_mode):
            kind = name
    return Place(str(path), kind, stat.S_IMODE(told.st_mode), told.st_uid, told.st_gid)


def folders(path: str) -> list[Place]:
    """The folders that lead to `path`, from the nearest one to the root, links resolved."""
    return [place(each) for each in (Path(os.path.realpath(os.path.dirname(path) or ".")) / "x").parents]


def may_read(file: Place, uid: int, groups: Collection[int]) -> bool:
    """Whether a user may read a file, by its mode and those of the folders that lead to it; true where none is seen."""
    for each, bit in ((file, 0o4), *((folder, 0o1) for folder in folders(file.path))):
        if uid and each.uid >= 0:
            shift = 6 if each.uid == uid else 3 if each.gid in groups else 0
            if not each.mode >> shift & bit:
                return False
    return True


def user(uid: int) -> str:
    """A user's name, or the number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def group(gid: int) -> str:
    """A group's name, or the number."""
    try:
        return getgrgid(gid).gr_name
    except (KeyError, OverflowError):
        return str(gid)


def lock_holder(socket: str) -> str:
    """What the lock beside a socket says of who serves it: "4242", "4242 draining"; "" where it cannot be read."""
    try:
        with open(f"{socket}.lock", "rb") as file:
            return file.read(64).decode(errors="replace").strip()
    except OSError:
        return ""


def lock_taker(path: str) -> int:
    """The process that holds a lock (flock) on a file, by the kernel's table; 0: none that can be seen from here."""
    try:
        told = os.stat(path)
    except OSError:
        return 0
    # Of the file system, too: another one may have a file of that number.
    file = f"{os.major(told.st_dev):02x}:{os.minor(told.st_dev):02x}:{told.st_ino}"
    for line in _read("/proc/locks").splitlines():
        words = line.split()
        # 1: FLOCK ADVISORY WRITE 4242 08:01:131090 0 EOF; those that wait have an arrow in the second place.
        if words[1:2] == ["FLOCK"] and words[5] == file and words[4].isdigit():
            return int(words[4])
    return 0


def sees_processes() -> bool:
    """Whether /proc shows the processes of others, so that one that is not there is dead."""
    return os.path.exists("/proc/1/stat")


def is_daemon(pid: int) -> bool:
    """Whether that is a kvslotd here: a number from another container's point of view is somebody else's."""
    words = _read(f"/proc/{pid}/cmdline").split("\0") if pid > 0 else []
    return any(os.path.basename(word) == "kvslotd" or word == "kvslot.daemon" for word in words)


def process_state(pid: int) -> str:
    """One letter as in `ps`: R, S, D, T, Z; "" where it cannot be read."""
    text = _read(f"/proc/{pid}/stat")
    return text.rpartition(")")[2].split()[0] if ")" in text else ""


def machine() -> Row:
    """Memory of the machine, and the file systems that engines share memory through.  Bytes."""
    found: Row = {"total": None, "available": None, "swap_total": None, "swap_free": None}
    names = {
        "MemTotal": "total",
        "MemAvailable": "available",
        "SwapTotal": "swap_total",
        "SwapFree": "swap_free",
    }
    for line in _read("/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name in names:
            found[names[name]] = int(value.split()[0]) << 10
    for name in ("shm_total", "shm_free"):
        found[name] = None
    try:
        told = os.statvfs("/dev/shm")
        found["shm_total"], found["shm_free"] = told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize
    except OSError:
        pass
    return found


def control_group(pid: int) -> Row | None:
    """Limits of a process's control group (version 2), the tightest on the way up; None where there are none."""
    line = next((each for each in _read(f"/proc/{pid}/cgroup").splitlines() if each.startswith("0::")), "")
    if not line:
        return None
    base, name = Path("/sys/fs/cgroup"), line.removeprefix("0::").strip().lstrip("/")
    here = base / name
    found: Row = {
        "name": "/" + name,
        "current": _number(here / "memory.current"),
        "max": None,
        "swap_current": _number(here / "memory.swap.current"),
        "oom_kills": None,
    }
    for line in _read(here / "memory.events").splitlines():
        if line.startswith("oom_kill "):
            found["oom_kills"] = int(line.split()[1])
    for each in (here, *here.parents):
        if each == base or base not in each.parents:
            break
        limit = _number(each / "memory.max")
        if limit is not None and (found["max"] is None or limit < found["max"]):
            found["max"] = limit
    return found if found["current"] is not None else None


def effective(pid: int) -> tuple[Row | None, str]:
    """What the daemon's settings would be if it were started again now, as `kvslotd --check-config --json` says.

    Its own command line and environment are used, and its own user where we are root.  None, and why, where it cannot
    be found out.
    """
    try:
        owner = owner_of(pid)
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
        environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
        folder = os.readlink(f"/proc/{pid}/cwd")
    except OSError as error:
        return None, f"how process {pid} was started cannot be read: {error.strerror}"
    kept = {
        name: value
        for name, _, value in (each.partition("=") for each in environ)
        if name.startswith("KVSLOT_") or name == "XDG_RUNTIME_DIR"
    }
    command = [sys.executable, "-Im", "kvslot.daemon", *passed_on(words), "--check-config", "--json"]
    drop: dict[str, Any] = {}
    if os.geteuid() == 0 and owner != (0, 0):
        drop = {"user": owner[0], "group": owner[1], "extra_groups": []}
    try:
        answer = subprocess.run(
            command, cwd=folder, env=kept, capture_output=True, timeout=CHECK_SECONDS, check=False, **drop
        )
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"its configuration cannot be read again: {error}"
    import msgspec

    try:
        found = msgspec.json.decode(answer.stdout, type=dict[str, Any])
    except msgspec.DecodeError:
        words = answer.stderr.decode(errors="replace").strip().splitlines() or ["it says nothing"]
        return None, f"its configuration cannot be read again: {words[-1]}"
    return found, ""


def groups_of(pid: int) -> set[int]:
    """All groups of a process; none where it cannot be seen."""
    found: set[int] = set()
    for line in _read(f"/proc/{pid}/status").splitlines():
        name, _, value = line.partition(":")
        if name in ("Gid", "Groups"):
            found.update(int(each) for each in value.split())
    return found


def owner_of(pid: int) -> tuple[int, int]:
    """User and group that a process runs as.  The folder in /proc may say root for one that hides its memory.

    Raises OSError where there is no such process.
    """
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name in ("Uid", "Gid"):
            found[name] = int(value.split()[1])
    return found["Uid"], found["Gid"]


def passed_on(words: list[str]) -> list[str]:
    """Of a daemon's command line, the flags that settings come from."""
    found: list[str] = []
    takes = False
    for word in words:
        if takes:
            found.append(word)
            takes = False
            continue
        name, equals, _ = word.partition("=")
        if name in PASSED_ON:
            found.append(word)
            takes = not equals and name not in BARE
    return found


def health(path: str) -> tuple[Row | None, str]:
    """What /healthz of the admin API at a Unix socket says; None, and why, where it cannot be asked."""
    import http.client
    import socket

    import msgspec

    class Local(http.client.HTTPConnection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(path)

    connection = Local("localhost", timeout=HEALTH_SECONDS)
    try:
        connection.request("GET", "/healthz")
        return msgspec.json.decode(connection.getresponse().read(), type=dict[str, Any]), ""
    except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
        return None, f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def unit_of(pid: int) -> str:
    """The systemd unit that a process runs in: kvslotd@0.service; "" where it is none of a service."""
    name = _read(f"/proc/{pid}/cgroup").strip().rpartition("/")[2]
    return name if name.endswith(".service") else ""


def stop_seconds(unit: str) -> float | None:
    """How long systemd waits for a unit to stop before it kills it; None where it does not tell."""
    command = ["systemctl", "show", "--property=TimeoutStopUSec", "--value", unit]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=False
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return seconds_of(answer)


def seconds_of(text: str) -> float | None:
    """A span as systemd prints it: "1min 30s", "500ms"; None for "infinity" and for what is none."""
    units = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800}
    total = 0.0
    for word in text.split():
        digits = word.rstrip("abcdefghijklmnopqrstuvwxyz")
        unit = word[len(digits) :]
        if unit not in units or not digits.replace(".", "", 1).isdigit():
            return None
        total += float(digits) * units[unit]
    return total if text else None


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None
