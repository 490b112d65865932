"""What is counted since the process began, and no shorter-lived object keeps: what a session did outlives it here.

    counter     only ever rises; whoever reads it twice takes the difference
    gauge       is derived where it is asked for (inspection.py), and never kept here

Every key is ours (a verb, a code, a reason, a pool that was configured), never what a client chose, so no table here
grows with the clients that come and go.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from kvslot.allocator.results import Abandoned, Moved, Preempt, Pressure, Published, Ready, Reason
from kvslot.api.wire import messages
from kvslot.api.wire.errors import CODES
from kvslot.daemon import logs

if TYPE_CHECKING:
    from kvslot.daemon.collector import CollectorStatistics
    from kvslot.daemon.membership import Member

PUSHES: Final = (Ready, Published, Abandoned, Pressure, Preempt, Moved, messages.Draining)
"""What a client is told unasked: the core's own, and that the daemon ends."""


class Totals:
    """Counts since the process began."""

    __slots__ = (
        "adopted", "audit_faults", "audit_seconds", "audits", "frames", "gone", "late_max_s", "late_s", "later", "left",
        "lost", "never", "opened", "posted_errors", "pushes", "reclaimed", "refused", "resumed", "stalls",
    )  # fmt: skip

    def __init__(self, pools: Iterable[str]) -> None:
        self.opened = self.adopted = self.resumed = self.left = self.lost = self.gone = self.stalls = (
            0  # sessions
        )
        self.reclaimed = 0  # sequences of sessions of an earlier start
        self.frames = self.posted_errors = 0  # of sessions that are gone
        self.audits = self.audit_faults = 0
        self.audit_seconds = 0.0
        self.late_s = self.late_max_s = 0.0  # by how much the loop's timer of a second was late
        self.refused: dict[tuple[str, int], int] = {}  # by verb and code
        self.never = dict.fromkeys(pools, 0)
        self.later: dict[str, dict[str, int]] = {name: dict.fromkeys(Reason, 0) for name in self.never}
        self.pushes: dict[type, int] = dict.fromkeys(PUSHES, 0)

    def refuse(self, verb: type, code: int) -> None:
        """A request of this verb has been refused."""
        key = verb.__name__, code
        self.refused[key] = self.refused.get(key, 0) + 1

    def forget(self, member: Member) -> None:
        """A session is gone: what it did is kept."""
        self.gone += 1
        self.frames += member.frames
        self.posted_errors += member.posted_errors

    def audited(self, faults: int, seconds: float) -> None:
        """An audit has ended."""
        self.audits += 1
        self.audit_faults += faults
        self.audit_seconds += seconds

    def woke(self, late_s: float) -> None:
        """The timer of a second came so much later than it was to."""
        if late_s > 0:
            self.late_s += late_s
            self.late_max_s = max(self.late_max_s, late_s)

    def row(self, live: Iterable[Member], collector: CollectorStatistics) -> dict[str, Any]:
        """All of it as plain values; `live`: the sessions that are not gone."""
        members = list(live)
        return {
            "sessions_opened": self.opened,
            "sessions_adopted": self.adopted,
            "sessions_resumed": self.resumed,
            "sequences_reclaimed": self.reclaimed,
            "sessions_left": self.left,
            "sessions_lost": self.lost,
            "sessions_gone": self.gone,
            "sessions_stalled": self.stalls,
            "frames": self.frames + sum(each.frames for each in members),
            "posted_errors": self.posted_errors + sum(each.posted_errors for each in members),
            "audits": self.audits,
            "audit_faults": self.audit_faults,
            "audit_seconds": self.audit_seconds,
            "loop_late_seconds": self.late_s,
            "loop_late_seconds_max": self.late_max_s,
            "refused": [
                {"verb": verb, "code": CODES[code].__name__, "count": count}
                for (verb, code), count in self.refused.items()
            ],
            "later": [
                {"pool": pool, "reason": str(reason), "count": count}
                for pool, reasons in self.later.items()
                for reason, count in reasons.items()
            ],
            "never": [{"pool": pool, "count": count} for pool, count in self.never.items()],
            "pushes": {kind.__name__.lower(): count for kind, count in self.pushes.items()},
            "log_events": logs.counted(),
            "log_left_out": logs.left_out(),
            "log_lost": logs.lost(),
            "collections": collector.young + collector.full,
            "collection_seconds": collector.pause_us_sum / 1e6,
            "collection_seconds_max": collector.pause_us_max / 1e6,
            "cycles_found": collector.found,
        }


__all__ = ["PUSHES", "Totals"]
