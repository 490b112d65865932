"""What the daemon knows of its own process: limits, descriptors, memory.  Read when somebody asks, in microseconds.

Who looks for what is wrong may not read another user's /proc; the daemon may read its own.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from typing import Any, Final

from kvslot.api.wire import VERSION

LIMITS: Final = {
    "descriptors": resource.RLIMIT_NOFILE,
    "locked_bytes": resource.RLIMIT_MEMLOCK,
    "file_bytes": resource.RLIMIT_FSIZE,  # holds for a memfd as for a file
    "address_bytes": resource.RLIMIT_AS,
    "core_bytes": resource.RLIMIT_CORE,
}
"""As rows of `process` name them, with `_max` (the soft limit) and `_max_hard` behind; None: no limit."""


def facts() -> dict[str, Any]:
    """A row of plain values.  Sizes are bytes; what this kernel does not tell is None."""
    row: dict[str, Any] = {
        "pid": os.getpid(),
        "uid": os.geteuid(),
        "gid": os.getegid(),
        "protocol": VERSION,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "loop": "uvloop" if "uvloop" in sys.modules else "asyncio",
        "config": config_file(sys.argv),
        "supervised": "INVOCATION_ID" in os.environ,  # systemd gives each start of a unit a number
        "descriptors": descriptors(),
    }
    for name, number in LIMITS.items():
        for suffix, value in zip(("_max", "_max_hard"), resource.getrlimit(number), strict=True):
            row[name + suffix] = None if value == resource.RLIM_INFINITY else value
    row.update(_status())
    return row


def config_file(argv: list[str]) -> str:
    """The configuration's absolute path, by how the daemon was started; "" where it has none."""
    given = os.environ.get("KVSLOT_CONFIG", "")
    for number, word in enumerate(argv):
        if word == "--config" and number + 1 < len(argv):
            given = argv[number + 1]
        elif word.startswith("--config="):
            given = word.partition("=")[2]
    return os.path.abspath(given) if given else ""


def descriptors() -> int | None:
    """How many are open."""
    try:
        # Since Linux 6.2 the folder's size says how many it holds; before that it is 0.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        return None


def _status() -> dict[str, int | None]:
    """Memory, as the kernel counts it for this process: the pools' pages are in none of `anonymous` and `swapped`."""
    names = {
        b"VmRSS": "resident_bytes",
        b"RssAnon": "anonymous_bytes",
        b"VmLck": "locked_bytes",
        b"VmSwap": "swapped_bytes",
    }
    found: dict[str, int | None] = dict.fromkeys(names.values())
    try:
        with open("/proc/self/status", "rb") as file:
            for line in file:
                name, _, value = line.partition(b":")
                if name in names:
                    found[names[name]] = int(value.split()[0]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return found
