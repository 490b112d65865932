"""Who may connect, whose namespaces an identity may open, how much of each; and the record of who was refused what.

    socket's mode and group     who reaches the socket at all; without settings that is all
    client_uids, client_gids    who of those is let in                                     looked at when they connect
    [[pool]] users, groups      who may have a pool's memory                               Hello, resume
    [[tenant]] users, groups    who may open the namespaces of a tenant                    Hello, OpenNamespace, resume
    [[tenant]] quotas           sessions: here · slots, runs: the core's accounts · rate: here

An identity is what the kernel says of the process at the other end at the moment it connected: user, group, and
supplementary groups.  Nothing that a client says of itself counts.  A namespace is reached by a number that this
session was given when it opened it, so who may not open one can neither probe it, nor allocate in it, nor learn that
somebody computes a prefix there.

Without a [[tenant]] everybody who is let in may open every namespace.  With one, only tenants that are listed exist;
"*" stands for all others, which share its quotas, so that who invents names gains nothing.  Names are compared as they
are, character by character: what looks alike is not the same.  Nobody is exempt, root neither: an engine that runs as
root by mistake reads no other tenant's prefixes by mistake.

What is refused for who somebody is, and what is done by a control verb, is logged with user, group, process and act:
`denied` and `privileged`.  A user who is refused again and again fills neither the log nor another user's lines.
"""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import structlog

from kvslot.allocator import Reason
from kvslot.api.wire import Busy, Denied, messages
from kvslot.daemon.logs import limited

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvslot.allocator import Pool
    from kvslot.daemon.config import PoolSettings, Settings, TenantSettings
    from kvslot.daemon.membership import Member, Peer

OTHERS: Final = "*"
"""The tenant of all names that no other one has."""
DENIED_SECONDS: Final = 5.0
"""Of one user's refusals of one kind: the first is logged, the next are counted for so long."""
USERS_MOST: Final = 64
"""Users whose refusals are told apart in the log; all further ones are counted together."""

log = structlog.stdlib.get_logger("kvslot.daemon")


class Tenant:
    """One tenant's rules, and what it uses of those quotas that are no slots."""

    __slots__ = ("_at", "_level", "refused", "rules", "sessions")

    def __init__(self, rules: TenantSettings) -> None:
        self.rules = rules
        self.sessions = 0
        self.refused: Counter[str] = Counter()  # by quota
        self._level = self._at = 0.0

    def admits(self, peer: Peer) -> bool:
        """Whether this identity may open the tenant's namespaces."""
        rules = self.rules
        return not (rules.users or rules.groups) or belongs(peer, rules.users, rules.groups)

    def take(self, now: float) -> float:
        """Takes one request out of this second's; 0 where there was one, else the seconds until there is."""
        rate = self.rules.requests_per_second
        if not rate:
            return 0.0
        if not self._at:
            self._level, self._at = max(1.0, rate), now
        self._level = min(max(1.0, rate), self._level + (now - self._at) * rate)
        self._at = now
        if self._level >= 1.0:
            self._level -= 1.0
            return 0.0
        return (1.0 - self._level) / rate


def belongs(peer: Peer, users: tuple[int, ...], groups: tuple[int, ...]) -> bool:
    """Whether somebody is one of these users, or in one of these groups."""
    return peer.uid in users or peer.gid in groups or any(group in groups for group in peer.groups)


class Identity:
    """All rules of one daemon; looked at when somebody comes, so that a reload holds for who comes next."""

    def __init__(self, settings: Settings) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._users: set[int] = set()
        self.denied = 0
        self.privileged = 0
        self.change(settings)

    def change(self, settings: Settings) -> None:
        """Takes over other settings; what a tenant of the same name uses goes on being counted."""
        from kvslot.daemon.config import TenantSettings

        before = self._tenants
        tables = settings.tenants or (TenantSettings(name=OTHERS),)
        self._tenants = {each.name: before.get(each.name) or Tenant(each) for each in tables}
        for each in tables:
            self._tenants[each.name].rules = each
        self._others = self._tenants.get(OTHERS)
        self.limited = bool(settings.tenants)  # whether there are tenants to tell apart
        self.rated = any(each.requests_per_second for each in tables)
        self._closed = bool(settings.client_uids or settings.client_gids)
        users, groups = (
            [*settings.client_uids, *settings.control_uids, 0, os.geteuid()],
            [*settings.client_gids],
        )
        groups += settings.control_gids
        both: list[TenantSettings | PoolSettings] = [*settings.tenants, *settings.pools]
        for table in both:
            users += table.users
            groups += table.groups
        self._clients = (tuple(users), tuple(groups))

    @property
    def tenants(self) -> list[Tenant]:
        """Those that are listed; the one for everybody where none is."""
        return list(self._tenants.values())

    # -- who comes in ------------------------------------------------------------------------------------------

    def check_connect(self, peer: Peer) -> None:
        """Raises Denied for who may not be here at all."""
        if self._closed and not belongs(peer, *self._clients):
            raise Denied(
                f"user {peer.uid} (group {peer.gid}) may not connect: it is not one of client_uids, and none of its "
                "groups is one of client_gids"
            )

    def check_pool(self, peer: Peer, pool: PoolSettings) -> None:
        """Raises Denied for who may not have this pool's memory, and nothing of its index."""
        if (pool.users or pool.groups) and not belongs(peer, pool.users, pool.groups):
            raise Denied(
                f"user {peer.uid} (group {peer.gid}) may not use pool {pool.name!r}: it is not one of its users, and "
                "none of its groups is one of its groups"
            )

    def tenant(self, name: str) -> Tenant | None:
        """The tenant whose rules hold for namespaces of this name."""
        return self._tenants.get(name) or self._others

    def check(self, peer: Peer, name: str) -> Tenant:
        """The tenant, where this identity may open its namespaces; raises Denied."""
        tenant = self.tenant(name)
        if tenant is None:
            raise Denied(f"no tenant {name!r} is configured here{self._near(name)}")
        if not tenant.admits(peer):
            raise Denied(
                f"user {peer.uid} (group {peer.gid}) may not open namespaces of tenant {name!r}: it is not one of its "
                "users, and none of its groups is one of its groups"
            )
        return tenant

    def check_session(self, tenant: Tenant) -> None:
        """Raises Busy where the tenant has all sessions that it may."""
        most = tenant.rules.sessions
        if most and tenant.sessions >= most:
            tenant.refused["sessions"] += 1
            raise Busy(
                f"tenant {tenant.rules.name!r} has all sessions that it may: its quota sessions is {most}, and "
                f"{tenant.sessions} are open or not yet cleaned up"
            )

    def open(self, member: Member, name: str) -> None:
        """A session opens another namespace.  Raises Denied, or Busy where its tenant may have no more sessions."""
        tenant = self.check(member.peer, name)
        if tenant not in member.tenants:
            self.check_session(tenant)
            self.join(member, tenant)

    def join(self, member: Member, tenant: Tenant) -> None:
        """A session counts as one of the tenant's from now on, until it has ended."""
        member.tenants.append(tenant)
        tenant.sessions += 1

    def leave(self, member: Member) -> None:
        """A session has ended."""
        for tenant in member.tenants:
            tenant.sessions -= 1
        member.tenants.clear()

    def recheck(self, member: Member, peer: Peer) -> None:
        """For who takes a session up again: the same user, who may still open what it has open; raises Denied."""
        if peer.uid != member.peer.uid:
            raise Denied(
                f"session {member.number} is of user {member.peer.uid}, and user {peer.uid} asks for it"
            )
        self.check_pool(peer, member.hosted.settings)
        if self.limited:
            roots = member.hosted.core.roots
            for root in member.roots:
                self.check(peer, roots[root].tenant)

    def check_group(self, first: Member, peer: Peer) -> None:
        """For who joins an engine of several processes: all of them are one user's; raises Denied."""
        if peer.uid != first.peer.uid:
            raise Denied(
                f"session {first.number} is of user {first.peer.uid}: a process of user {peer.uid} is not of its engine"
            )

    # -- how often ---------------------------------------------------------------------------------------------

    def wait(self, member: Member, root: int, now: float) -> tuple[float, Tenant | None]:
        """Seconds until a request in this namespace is due, 0: now; and whose quota says so."""
        tenant = self.tenant(member.hosted.core.roots[root].tenant)
        seconds = tenant.take(now) if tenant is not None else 0.0
        if seconds and tenant is not None:
            tenant.refused["requests_per_second"] += 1
        return seconds, tenant

    def late(self, member: Member, m: messages.Allocate, now: float) -> messages.Later | None:
        """LATER for a new request beyond the tenant's rate.  One that comes back with its ticket was counted."""
        queue = member.hosted.core.admission
        if m.namespace not in member.roots or m.ticket in queue.waiting or m.ticket in queue.awaiting:
            return None
        seconds, tenant = self.wait(member, m.namespace, now)
        if not seconds or tenant is None:
            return None
        rate = tenant.rules.requests_per_second
        return messages.Later(
            m.id,
            0,
            Reason.RATE,
            0,
            0,
            0,
            0,
            max(1, round(seconds * 1e3)),
            [],
            "requests_per_second",
            int(rate),
        )

    def check_rate(self, member: Member, root: int, now: float) -> None:
        """The same for verbs that have no LATER: raises Busy."""
        seconds, tenant = self.wait(member, root, now)
        if seconds and tenant is not None:
            raise Busy(
                f"tenant {tenant.rules.name!r} has made all requests of this second: its quota requests_per_second is "
                f"{tenant.rules.requests_per_second:g}; ask again in {max(1, round(seconds * 1e3))} ms"
            )

    # -- to be seen --------------------------------------------------------------------------------------------

    def rows(self, cores: Mapping[str, Pool]) -> list[dict[str, Any]]:
        """What each tenant holds of each pool, in slots, with its quotas; a quota of 0 is none."""
        rows: list[dict[str, Any]] = []
        for pool, core in cores.items():
            for tenant in self._tenants.values():
                rules = tenant.rules
                account = core.accounts.get(rules.name, core.everyone)
                rows.append(
                    {
                        "pool": pool,
                        "tenant": rules.name,
                        "charged": account.charged,
                        "fenced": account.fenced,
                        "slots": rules.slots,
                        "unwritten": account.unwritten,
                        "reserved": rules.reserved_runs * core.quantum,
                        "sessions": tenant.sessions,
                        "sessions_max": rules.sessions,
                        "requests_per_second": rules.requests_per_second,
                        "refused_sessions": tenant.refused["sessions"],
                        "refused_requests": tenant.refused["requests_per_second"],
                    }
                )
        return rows

    # -- the record --------------------------------------------------------------------------------------------

    def deny(self, peer: Peer, what: str, reason: str) -> None:
        """Notes an act that was refused for who asked."""
        self.denied += 1
        user = peer.uid
        if user not in self._users:
            if len(self._users) >= USERS_MOST:
                user = -1
            else:
                self._users.add(user)
        limited(
            log, "denied", DENIED_SECONDS, kind=f"{what}/{user}", what=what, reason=reason[:240],
            uid=peer.uid, gid=peer.gid, pid=peer.pid,
        )  # fmt: skip

    def note(self, peer: Peer, request: messages.Request) -> None:
        """Notes a control verb that was permitted, with all that it said but tokens."""
        if type(request) is messages.Record and request.action == "fetch":
            return  # many times a second, of a recording whose start was noted
        self.privileged += 1
        what = type(request).__name__
        arguments: dict[str, Any] = {
            name: value
            for name in request.__struct_fields__[1:]
            if type(value := getattr(request, name)) is not bytes
        }
        limited(
            log, "privileged", 0.05, level="info", kind=what, what=what, arguments=arguments,
            uid=peer.uid, gid=peer.gid, pid=peer.pid,
        )  # fmt: skip

    def _near(self, name: str) -> str:
        """Says so where a name only looks like one that is configured."""
        folded = unicodedata.normalize("NFKC", name).casefold().strip()
        for known in self._tenants:
            if unicodedata.normalize("NFKC", known).casefold().strip() == folded:
                return f"; {known!r} is, whose characters are others though they may look the same ({_points(name)})"
        return "; an operator adds it as a [[tenant]], or one named '*' for all others"


def _points(name: str) -> str:
    """The characters of a name by number."""
    shown = " ".join(f"U+{ord(each):04X}" for each in name[:32])
    return shown + (" ..." if len(name) > 32 else "")


__all__ = ["OTHERS", "Identity", "Tenant", "belongs"]
