"""Being somebody else for the moment of connecting: the kernel notes who that was, and the daemon goes by it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvslot.api.wire import messages

from ..tools.daemon import Running
from ..tools.wire import Wire

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can connect as somebody else")

ME = os.geteuid()
OTHER = ME + 4711  # no user of this machine need have that number


NAMES = (
    "x", "X", "ab", "a", "", "b", "\u00e9", "e\u0301", "\u212a", "K", "\u03c3", "\u03c2", "\ud7ff", "\U0001f512",
    "\u200bx", "x\u200b", "x ", " x", "a\nb", 'a"b', "a\\b", "\u202ex", "\u0000", "\ufeffx", "y" * 256,
)  # fmt: skip
"""That look alike, run together, or do something to a terminal."""


@contextmanager
def someone(uid: int, gid: int = 65000, groups: Sequence[int] = ()) -> Iterator[None]:
    """This process is another user, for the kernel; needs root."""
    before = os.getgroups()
    os.setgroups(list(groups))
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)


def connect(daemon: Running, uid: int, gid: int = 65000, groups: Sequence[int] = ()) -> Wire:
    """A connection that another user made."""
    daemon.socket.parent.chmod(0o711)
    with someone(uid, gid, groups):
        return Wire(Path(daemon.socket))


def refused(wire: Wire, kind: Any, *fields: Any, **named: Any) -> messages.Error:
    """What a request is refused with."""
    reply = wire.call(kind, *fields, **named)
    assert isinstance(reply, messages.Error), reply
    return reply


def told(daemon: Running, event: str) -> list[dict[str, Any]]:
    """The events of a name that the daemon has logged so far."""
    lines = (line for line in daemon.text().splitlines() if line.startswith("{"))
    return [each for line in lines if (each := msgspec.json.decode(line))["event"] == event]
