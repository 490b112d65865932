"""Processes that are killed, and painted memory: what all tests of this folder need.

A child is a fork that keeps nothing of its parent's but a pipe: a copied socket would hold a dead session's connection
open and hide its end.  Everything a child has to tell goes through that pipe as a JSON line.

Paint: each slot's bytes are a digest of tenant and all tokens up to and including its own.  A foreign, stale, shifted
or torn slot reads otherwise.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvslot.api.wire.messages import Audit, Audited, Evict, Inspect

from ..tools.daemon import Running
from ..tools.wire import Wire

SLOT_BYTES = 32
"""Painted of each slot: what tests.tools.daemon.LAYOUT gives a plane."""


class Child:
    """A process of ours that does `work(tell)`."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self._pipe = pipe
        self._text = b""
        self._status: int | None = None

    def heard(self, seconds: float = 20.0) -> Any:
        """The next thing it tells."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._text:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"a child told nothing in {seconds} s"
            data = os.read(self._pipe, 1 << 16)
            assert data, "a child ended without a word"
            self._text += data
        line, _, self._text = self._text.partition(b"\n")
        told = json.loads(line)
        assert not (isinstance(told, dict) and "failed" in told), told["failed"]
        return told

    def told(self) -> Any:
        """The next thing it has told already; None if there is none."""
        ready, _, _ = select.select([self._pipe], [], [], 0)
        return self.heard() if ready or b"\n" in self._text else None

    def signal(self, number: int) -> None:
        """Sends it a signal, if it is there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        if self._status is None:
            self.signal(signal.SIGKILL)
            _, self._status = os.waitpid(self.pid, 0)

    def close(self) -> None:
        """Ends it."""
        self.kill()
        os.close(self._pipe)


@contextmanager
def child(work: Callable[[Callable[[Any], None]], None], *, seconds: int = 120) -> Iterator[Child]:
    """A process that does `work`, and stays until it is killed: when the block ends, or at last by an alarm."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        _be(work, write, seconds)
    os.close(write)
    one = Child(pid, read)
    try:
        yield one
    finally:
        one.close()


def _be(work: Callable[[Callable[[Any], None]], None], pipe: int, seconds: int) -> None:
    # Nothing a child does may reach the test runner's own code.
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        os.dup2(pipe, 3)
        os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])

        def tell(what: Any) -> None:
            os.write(3, json.dumps(what).encode() + b"\n")

        try:
            work(tell)
        except BaseException:  # noqa: BLE001  whatever it is, the parent is told
            tell({"failed": traceback.format_exc()})
        stay()
    finally:
        os._exit(1)


def stay() -> None:
    """Does nothing until killed, with all that it has open."""
    while True:
        signal.pause()


# -- painted memory ---------------------------------------------------------------------------------------------------


class Paint:
    """The mapped pool of a session, painted and read slot by slot in every plane."""

    def __init__(self, wire: Wire, tenant: str) -> None:
        assert wire.welcome is not None
        welcome = wire.welcome
        self.tenant = tenant.encode()
        self.planes = welcome.pool.planes
        assert all(plane.slot_bytes == SLOT_BYTES for plane in self.planes)
        descriptor = wire.descriptors[welcome.descriptors.index("pool")]
        self.memory = mmap.mmap(descriptor, welcome.pool.size_bytes)

    def __enter__(self) -> Paint:
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.close()

    def _colours(self, tokens: bytes) -> Iterator[bytes]:
        running = hashlib.blake2b(self.tenant, digest_size=SLOT_BYTES)
        for at in range(0, len(tokens), 4):
            running.update(tokens[at : at + 4])
            yield running.digest()

    def _places(self, extents: list[int]) -> Iterator[int]:
        for slot, length in zip(extents[::2], extents[1::2], strict=True):
            yield from range(slot, slot + length)

    def write(self, tokens: bytes, extents: list[int], start: int = 0) -> None:
        """Paints positions [start, len(tokens) / 4)."""
        memory = self.memory
        for position, (slot, colour) in enumerate(
            zip(self._places(extents), self._colours(tokens), strict=False)
        ):
            if position >= start:
                for plane in self.planes:
                    at = plane.offset + slot * SLOT_BYTES
                    memory[at : at + SLOT_BYTES] = colour

    def wrong(self, tokens: bytes, extents: list[int], stop: int = -1) -> list[int]:
        """Positions of `tokens` that read otherwise; up to `stop`."""
        memory = self.memory
        return [
            position
            for position, (slot, colour) in enumerate(
                zip(self._places(extents), self._colours(tokens), strict=False)
            )
            if (stop < 0 or position < stop)
            and any(
                memory[plane.offset + slot * SLOT_BYTES : plane.offset + (slot + 1) * SLOT_BYTES] != colour
                for plane in self.planes
            )
        ]


# -- what the daemon says of itself ------------------------------------------------------------------------------------


def rows(control: Wire, kind: str) -> list[dict[str, Any]]:
    """All rows of an Inspect."""
    found: list[dict[str, Any]] = []
    cursor = 0
    while True:
        page = control.call(Inspect, kind, cursor=cursor)
        found += page.rows
        cursor = page.cursor
        if not cursor:
            return found


def audit(daemon: Running) -> None:
    """The pool of a daemon is sound."""
    with Wire(daemon.socket) as control:
        audited = control.call(Audit)
        assert isinstance(audited, Audited), audited
        assert not audited.faults, audited.faults


def empty(daemon: Running, seconds: float = 10.0) -> None:
    """When all clients have gone nothing is held: no session, no slot but free ones and padding; and audit is clean."""
    with Wire(daemon.socket) as control:
        until(lambda: not rows(control, "sessions"), seconds, "sessions are left")
        while control.call(Evict, 1 << 20).tokens:
            pass  # a part at a time
        states = {row["state"] for row in rows(control, "map")}
        assert states <= {"free", "padding"}, states
        audited = control.call(Audit)
        assert not audited.faults, audited.faults


def until(true: Callable[[], Any], seconds: float, what: str) -> None:
    """Waits for something to become true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"after {seconds} s: {what}"
        time.sleep(0.005)


def cpu_seconds(pid: int) -> float:
    """Processor time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def events(daemon: Running) -> list[dict[str, Any]]:
    """The log, line by line."""
    return [json.loads(line) for line in daemon.text().splitlines() if line.startswith("{")]
