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
"*" stands for all others, which share its quotas, so that who invents names gains nothing; nor does who makes up
namespaces, of which there are so many for each tenant and user.  Names are compared as they
are, character by character: what looks alike is not the same.  Nobody is exempt, root neither: an engine that runs as
root by mistake reads no other tenant's prefixes by mistake.

What is refused for who somebody is, and what a control verb did, is logged with user, group, process and act: `denied`
and `privileged`.  A user who is refused again and again, or does the same again and again, fills neither the log nor
another user's lines.
"""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import structlog

from kvslot.allocator import Reason, Space
from kvslot.api.wire import Busy, Denied, messages
from kvslot.daemon.logs import leave_out, limited

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvslot.allocator import Pool
    from kvslot.api.wire.messages import Namespace
    from kvslot.daemon.config import PoolSettings, Settings, TenantSettings
    from kvslot.daemon.membership import Member, Peer
    from kvslot.daemon.pools import HostedPool

OTHERS: Final = "*"
"""The tenant of all names that no other one has."""
DENIED_SECONDS: Final = 5.0
"""Of one user's refusals of one kind: the first is logged, the next are counted for so long."""
USERS_MOST: Final = 64
"""Users whose refusals are told apart in the log; all further ones are counted together."""

ACT_SECONDS: Final = 1.0
"""The same act of the same process once more within it is counted, and told with the next line of it."""
ACT_LINES: Final = 20
"""Different acts of one user and verb that are told in that time; further ones are a number, told for each user."""
LOGGED: Final[Mapping[type, tuple[str, ...]]] = {
    messages.Inspect: (),
    messages.Evict: ("tokens", "pool"),
    messages.Defrag: ("pool", "action"),
    messages.Audit: ("pool",),
    messages.Drain: ("deadline_ms",),
    messages.SetConfig: ("name", "value"),
    messages.Record: ("action", "pool", "values"),
    messages.Keep: ("pool", "node", "length"),
    messages.Unkeep: ("pin", "pool"),
    messages.Reload: (),
}
"""Of each control verb the fields that are logged, and nothing else; of a namespace never its salt."""

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


class _Act:
    """What somebody did: when it was last told, and how often it was done since."""

    __slots__ = ("again", "fields", "when")

    def __init__(self, when: float, fields: dict[str, Any]) -> None:
        self.when = when
        self.fields = fields
        self.again = 0


class _Lines:
    """Of one user and verb: lines since `when`, and acts that got none."""

    __slots__ = ("left_out", "lines", "when")

    def __init__(self, when: float) -> None:
        self.when = when
        self.lines = self.left_out = 0


class Identity:
    """All rules of one daemon; looked at when somebody comes, so that a reload holds for who comes next."""

    def __init__(self, settings: Settings) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._users: set[int] = set()
        self._acts: dict[tuple[object, ...], _Act] = {}  # by who, what and outcome; for a second
        self._lines: dict[tuple[int, str], _Lines] = {}  # by user and verb; for a second
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
        self._namespaces = settings.namespaces_per_user
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

    def check_space(self, tenant: Tenant, hosted: HostedPool, peer: Peer, space: Space) -> None:
        """Raises Busy where a namespace of the tenant's is one more than the tenant or the user may have."""
        core, rules = hosted.core, tenant.rules
        root = core.spaces.get(space)
        over = "one ends when no session has it open and nothing of it is cached (kvslotctl evict)"
        if root is None and rules.namespaces:
            there = core.accounts.get(rules.name, core.everyone).spaces
            if there >= rules.namespaces:
                tenant.refused["namespaces"] += 1
                raise Busy(
                    f"tenant {rules.name!r} has all namespaces of pool {hosted.name!r} that it may: its quota "
                    f"namespaces is {rules.namespaces}, and {there} are there; {over}, or an operator may raise it"
                )
        most, has = self._namespaces, hosted.owned[peer.uid]
        if root not in hosted.owners and most and has >= most:
            raise Busy(
                f"user {peer.uid} was the first to open {has} namespaces of pool {hosted.name!r} that are there: "
                f"namespaces_per_user is {most}; {over}, or an operator may raise it"
            )

    def open(self, member: Member, name: Namespace) -> int:
        """A session opens another namespace.  Raises Denied, or Busy where its tenant or user may have no more."""
        tenant = self.check(member.peer, name.tenant)
        joins = tenant not in member.tenants
        if joins:
            self.check_session(tenant)
        root = self.space(tenant, member.hosted, member.peer, name)
        if joins:
            self.join(member, tenant)
        return root

    def space(self, tenant: Tenant, hosted: HostedPool, peer: Peer, name: Namespace) -> int:
        """The namespace, for a session that is about to enter it; raises Busy."""
        space = Space(name.tenant, name.model, name.adapter, name.salt)
        self.check_space(tenant, hosted, peer, space)
        return hosted.open(space, peer.uid)

    def join(self, member: Member, tenant: Tenant) -> None:
        """A session counts as one of the tenant's from now on, until it has ended."""
        member.tenants.append(tenant)
        tenant.sessions += 1

    def recount(self, members: Mapping[int, Member]) -> Iterator[None]:
        """Who is in after a reload: each session is one of those tenants' that its namespaces belong to by now.

        A session at a time; those that come or go between two steps count as they should by themselves.
        """
        for number in list(members):
            member = members.get(number)
            if member is None:
                continue
            roots = member.hosted.core.roots
            names = {roots[root].tenant for root in member.roots}
            its = {id(tenant): tenant for name in names if (tenant := self.tenant(name)) is not None}
            was = {id(tenant) for tenant in member.tenants}
            if was != its.keys():
                self.leave(member)
                for tenant in its.values():
                    self.join(member, tenant)
            yield

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
        """LATER for a new request beyond the tenant's rate.  One that comes back with its own ticket was counted."""
        if m.namespace not in member.roots:
            return None
        queue = member.hosted.core.admission
        ticket = queue.waiting.get(m.ticket) or queue.awaiting.get(m.ticket)
        if ticket is not None and ticket.session is member.session:
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
                        "pinned": account.pinned,
                        "pins": rules.pins,
                        "namespaces": account.spaces,
                        "namespaces_max": rules.namespaces,
                        "requests_per_second": rules.requests_per_second,
                        "refused_sessions": tenant.refused["sessions"],
                        "refused_namespaces": tenant.refused["namespaces"],
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

    def note(self, peer: Peer, request: messages.Request, outcome: str, now: float) -> None:
        """Notes an act that was permitted, once it is done or has failed: `outcome` is "done", or the error's name."""
        what = type(request).__name__
        if outcome == "done":
            self.privileged += 1
        arguments = _arguments(request)
        key = (peer.uid, peer.pid, what, outcome, *map(str, arguments.values()))
        act = self._acts.get(key)
        if act is not None:
            act.again += 1
            if now - act.when >= ACT_SECONDS:
                self._tell(act, now)
            return
        lines = self._lines.get((peer.uid, what))
        if lines is None:
            lines = self._lines[peer.uid, what] = _Lines(now)
        elif now - lines.when >= ACT_SECONDS:
            self._tell_left_out(peer.uid, lines, what)
            lines.when, lines.lines = now, 0
        lines.lines += 1
        if lines.lines > ACT_LINES:
            lines.left_out += 1
            leave_out()
            return
        fields = {
            "what": what, "arguments": arguments, "outcome": outcome,
            "uid": peer.uid, "gid": peer.gid, "pid": peer.pid,
        }  # fmt: skip
        act = self._acts[key] = _Act(now, fields)
        act.again = 1
        self._tell(act, now)

    def tell(self, now: float) -> None:
        """Tells what was done again, or left out, in a second that is over; to be called each second and at the end."""
        for key, act in [each for each in self._acts.items() if now - each[1].when >= ACT_SECONDS]:
            del self._acts[key]
            if act.again:
                self._tell(act, now)
        for at, lines in [each for each in self._lines.items() if now - each[1].when >= ACT_SECONDS]:
            del self._lines[at]
            self._tell_left_out(at[0], lines, at[1])

    def _tell(self, act: _Act, now: float) -> None:
        told = act.fields
        log.info(
            "privileged", what=told["what"], arguments=told["arguments"], outcome=told["outcome"], count=act.again,
            uid=told["uid"], gid=told["gid"], pid=told["pid"],
        )  # fmt: skip
        act.when, act.again = now, 0

    def _tell_left_out(self, uid: int, lines: _Lines, what: str) -> None:
        if lines.left_out:
            log.warning("privileged_left_out", what=what, count=lines.left_out, uid=uid)
            lines.left_out = 0

    def _near(self, name: str) -> str:
        """Says so where a name only looks like one that is configured."""
        folded = unicodedata.normalize("NFKC", name).casefold().strip()
        for known in self._tenants:
            if unicodedata.normalize("NFKC", known).casefold().strip() == folded:
                return f"; {known!r} is, whose characters are others though they may look the same ({_points(name)})"
        return "; an operator adds it as a [[tenant]], or one named '*' for all others"


def is_act(request: messages.Request) -> bool:
    """Whether a control verb changes something or starts something; the others only look."""
    match request:
        case messages.Inspect():
            return False
        case messages.Defrag(action=action):
            return action != "status"
        case messages.Record(action=action):
            return action != "fetch"  # many times a second, of a recording whose start was noted
        case _:
            return True


def _arguments(request: messages.Request) -> dict[str, Any]:
    """What is logged of a control verb: what LOGGED names, and of a Keep by tokens whose they are and how many."""
    found = {name: getattr(request, name) for name in LOGGED[type(request)]}
    if type(request) is messages.Keep and request.tokens:
        space = request.namespace
        found.update(
            tenant=space.tenant, model=space.model, adapter=space.adapter, salted=bool(space.salt),
            tokens=len(request.tokens) >> 2,
        )  # fmt: skip
    return found


def _points(name: str) -> str:
    """The characters of a name by number."""
    shown = " ".join(f"U+{ord(each):04X}" for each in name[:32])
    return shown + (" ..." if len(name) > 32 else "")


__all__ = ["LOGGED", "OTHERS", "Identity", "Tenant", "belongs", "is_act"]
