"""Units for systemd, users and folders, as files beside this one, and where on a machine each of them goes.

    kvslotd.socket     the door of the host's first pool, /run/kvslot/kvslot.sock; starts kvslotd@default.service
    kvslotd@.socket    the door of the pool NAME, /run/kvslot/NAME/kvslot.sock
    kvslotd@.service   one daemon for one device, its settings in /etc/kvslot/NAME.toml
    kvslot.sysusers    kvslot, kvslot-engine, kvslot-admin
    kvslot.tmpfiles    /run/kvslot, /etc/kvslot
    default.toml       settings to begin with
    gpu.conf, admin-tcp.conf   what an instance may need beyond its unit: files for kvslotd@NAME.service.d

`python -m kvslot.systemd` puts them there; see README.md.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final, NamedTuple

PROGRAM: Final = "/opt/kvslot/bin/kvslotd"
"""As the unit has it; whoever installs elsewhere has it replaced."""


class File(NamedTuple):
    """A file and its place, relative to the root of the machine."""

    name: str
    target: str
    kept: bool = False
    """Whether the place belongs to the operator: what is there stays, and is not removed."""


FILES: Final = (
    File("kvslotd.socket", "etc/systemd/system/kvslotd.socket"),
    File("kvslotd@.socket", "etc/systemd/system/kvslotd@.socket"),
    File("kvslotd@.service", "etc/systemd/system/kvslotd@.service"),
    File("kvslot.sysusers", "etc/sysusers.d/kvslot.conf"),
    File("kvslot.tmpfiles", "etc/tmpfiles.d/kvslot.conf"),
    File("default.toml", "etc/kvslot/default.toml", kept=True),
)
DROP_INS: Final = ("gpu", "admin-tcp")
"""Names of what `kvslotd@NAME.service.d` may hold; files with `.conf`."""


def drop_in(name: str, instance: str) -> File:
    """A drop-in for one instance; ValueError where there is none of that name, or the instance's is none."""
    if name not in DROP_INS:
        raise ValueError(f"there is no drop-in {name!r}; there are {', '.join(DROP_INS)}")
    if not instance or not all(each.isascii() and (each.isalnum() or each in "_.:-") for each in instance):
        raise ValueError(f"{instance!r} is no name of an instance: letters, digits, and _ . : -")
    return File(f"{name}.conf", f"etc/systemd/system/kvslotd@{instance}.service.d/{name}.conf")


def text(name: str, program: str = PROGRAM) -> str:
    """What a file says, with the daemon at `program` (a path without spaces)."""
    return (files(__name__) / name).read_text(encoding="utf-8").replace(PROGRAM, program)


__all__ = ["DROP_INS", "FILES", "PROGRAM", "File", "drop_in", "text"]
