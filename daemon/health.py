"""Whether the daemon works: named checks, each judged by what it has seen in the last seconds, with its reason.

Something is only wrong here if it is the daemon's own affair and it will not mend by itself.  That memory is short, an
engine stalls or a client misbehaves is no illness of the daemon.  A supervisor may restart the process for a check that
is `vital`; for one that is not, a restart would cost the cache and mend nothing.

    loop         the timer of a second comes in time
    device:NAME  the pool's device thread answers
    socket       the engines' socket is where it should be, ours, and accepting
    descriptors  there are some left
    audit:NAME   the last recount of the pool agreed with its counts
    admin_socket, admin_tcp   the admin API's doors are open as the settings say (not vital)
"""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from kvslot.daemon import process
from kvslot.daemon.device import Device

if TYPE_CHECKING:
    from kvslot.daemon.server import Server

LATE_SECONDS: Final = 5.0
"""Of the loop's timer; slices are below a millisecond, so that seconds are no load but something that blocks."""
ANSWER_SECONDS: Final = 10.0
"""For a device thread that may just be copying a long batch of a machine under load."""
DESCRIPTORS_LEFT: Final = 4


class Check(NamedTuple):
    """One question."""

    name: str
    ok: bool
    reason: str
    vital: bool = True
    remedy: str = ""


class _Probe:
    """Asks one device's thread for a sign of life, again and again."""

    def __init__(self, device: Device, now: float) -> None:
        self._device = device
        self._asked = 0
        self.answered = now

    def beat(self, now: float) -> None:
        if self._device.answered(self._asked):
            self.answered = now
            self._asked = self._device.ask()


class Health:
    """Looks once a second (`beat`), and tells (`checks`)."""

    def __init__(self, server: Server) -> None:
        now = time.monotonic()
        self._server = server
        self._beat = now
        self._late = 0.0
        self._probes = {name: _Probe(each.device, now) for name, each in server.pools.items()}
        self.audit_faults: dict[str, int] = {}

    def beat(self, now: float, late: float) -> None:
        """A second has passed, and `late` more."""
        self._beat, self._late = now, max(late, self._late * 0.9)
        for probe in self._probes.values():
            probe.beat(now)

    def checks(self) -> list[Check]:
        """All of them."""
        now = time.monotonic()
        found = [self._loop(now)]
        found += [self._device(name, probe, now) for name, probe in self._probes.items()]
        found += [self._socket(), self._descriptors()]
        found += [self._audit(name) for name in self._server.pools]
        if self._server.admin is not None:
            found += self._server.admin.checks()
        return found

    def _loop(self, now: float) -> Check:
        since = now - self._beat
        ok = since < LATE_SECONDS and self._late < LATE_SECONDS
        return Check(
            "loop", ok, f"last beat {since:.1f} s ago, late by {1e3 * self._late:.0f} ms at most lately"
        )

    @staticmethod
    def _device(name: str, probe: _Probe, now: float) -> Check:
        since = now - probe.answered
        return Check(f"device:{name}", since < ANSWER_SECONDS, f"its thread last answered {since:.1f} s ago")

    def _socket(self) -> Check:
        ok, reason = self._server.listening()
        return Check("socket", ok, reason)

    @staticmethod
    def _descriptors() -> Check:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = process.descriptors()
        if used is None or limit == resource.RLIM_INFINITY:
            return Check("descriptors", True, "no limit that could be told")
        return Check("descriptors", limit - used >= DESCRIPTORS_LEFT, f"{used} of {limit} are open")

    def _audit(self, name: str) -> Check:
        faults = self.audit_faults.get(name)
        if faults is None:
            return Check(f"audit:{name}", True, "not audited since the start")
        if faults:
            return Check(f"audit:{name}", False, f"the last audit found {faults} faults; the log names them")
        return Check(f"audit:{name}", True, "the last audit found nothing wrong")
