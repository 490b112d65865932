"""The daemon as /metrics sees it: the rows of inspection.py, as the figures that the metrics are made from.

Each call is a copy made at once, in well under a millisecond: a pool's figures are of one moment, and no figure is read
in two ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvslot.allocator import Pool as Core
from kvslot.api.admin import metrics
from kvslot.daemon import inspection
from kvslot.daemon.identity import OTHERS

if TYPE_CHECKING:
    from kvslot.daemon.identity import Tenant
    from kvslot.daemon.server import Server

TENANTS_MOST: Final = 256
"""Told of, in the order of the configuration."""


class Scraped:
    """What `metrics.Exposition` asks; see there."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def daemon(self) -> metrics.Daemon:
        """Of the process."""
        server = self._server
        view = server.view()
        facts = dict(view.process)
        sessions: dict[str, int] = dict.fromkeys(("live", "lost", "ending"), 0)
        stalled = 0
        for member in server.sessions.values():
            sessions[member.state] += 1
            stalled += member.session.stalled
        requests = {verb.__name__: count for verb, count in server.latency.counts.items()}
        return msgspec.convert(
            {
                **facts,
                **view.totals,
                "version": server.version,
                "draining": server.draining,
                "sessions": sessions,
                "stalled": stalled,
                "requests": requests,
                "admin": msgspec.structs.asdict(server.admin.statistics())
                if server.admin is not None
                else {},
                "checks": {each.name: each.ok for each in server.health.checks()},
                "denied": server.identity.denied,
                "privileged": server.identity.privileged,
                "tenants": [
                    {
                        "tenant": each.rules.name,
                        "sessions": each.sessions,
                        "sessions_max": each.rules.sessions,
                        "refused": dict(each.refused),
                    }
                    for each in self._tenants()
                ],
            },
            metrics.Daemon,
        )

    def _tenants(self) -> list[Tenant]:
        """Those that are configured, up to so many: each is a few series."""
        identity = self._server.identity
        return identity.tenants[:TENANTS_MOST] if identity.limited else []

    async def steps(self) -> Sequence[metrics.Step]:
        """Of the data path."""
        return msgspec.convert(self._server.latency.steps(), list[metrics.Step])

    async def pool_names(self) -> Sequence[str]:
        """All that there are."""
        return list(self._server.pools)

    async def pool(self, name: str) -> metrics.Pool:
        """Of one pool, at this moment."""
        server = self._server
        view = server.view()
        row = _row("pools", view, name)
        row.update(_row("frag", view, name))
        hosted, compactor = server.pools[name], server.compactors[name]
        waiting, oldest = waits(hosted.core, view.now)
        journal = hosted.journal
        # What earlier boots cached is held by a session of the core's that is nobody's, and operators' pins by another.
        unsettled = journal is not None and journal.everybody is not None
        row.update(
            waiting=waiting,
            oldest_wait_s=oldest,
            later=[
                {"reason": str(reason), "count": count} for reason, count in server.totals.later[name].items()
            ],
            never=server.totals.never[name],
            restored=journal.restored if journal is not None else 0,
            missing=journal.missing if journal is not None else 0,
            unsettled=unsettled,
            sessions=row["sessions"] - unsettled - hosted.keeper.open,
            accounts=[_account(hosted.core, each) for each in self._tenants()],
            compaction={**msgspec.structs.asdict(compactor.status()), **compactor.gap_totals()._asdict()},
        )
        return msgspec.convert(row, metrics.Pool)


def waits(core: Core, now: float) -> tuple[Mapping[str, int], float]:
    """How many requests wait, by kind, and the age (seconds) of the oldest; each queue has its oldest first."""
    admission = core.admission
    queues = {"growth": admission.growth, "new": admission.waiting, "commit": admission.awaiting}
    began = [next(iter(each.values())).created for each in queues.values() if each]
    return {kind: len(each) for kind, each in queues.items()}, max(0.0, now - min(began, default=now))


def _account(core: Core, tenant: Tenant) -> dict[str, Any]:
    name = tenant.rules.name
    account = core.everyone if name == OTHERS else core.accounts.get(name)
    return {
        "tenant": name,
        "charged": account.charged if account is not None else 0,
        "unwritten": account.unwritten if account is not None else 0,
        "slots_max": tenant.rules.slots,
    }


def _row(kind: str, view: inspection.View, pool: str) -> dict[str, Any]:
    (row,), _ = inspection.rows(kind, view, pool=pool)
    return row


__all__ = ["Scraped", "waits"]
