"""What each verb does: one row a verb, with who may say it and the function that answers it.

A handler is a plain function of the server, the connection, the message and the time.  It returns the reply, or raises
a refusal, which becomes an Error reply; anything else that it raises is our own fault and ends the process.  All is
checked, then all is done, and nothing waits in between, so a verb is atomic.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Callable
from enum import IntEnum
from itertools import chain
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog

from kvslot import __version__
from kvslot import allocator as core
from kvslot.allocator.extents import join
from kvslot.allocator.results import UNLIMITED
from kvslot.allocator.sessions import PEELED
from kvslot.allocator.slots import FENCED
from kvslot.api.wire import (
    PUSHES,
    VERSION,
    BadRequest,
    Busy,
    Denied,
    Ended,
    Exists,
    NotFound,
    OutOfTurn,
    Refused,
    ShuttingDown,
    StaleSession,
    TooLarge,
    Unsupported,
    WrongVersion,
    encode,
    messages,
)
from kvslot.daemon import inspection
from kvslot.daemon.journal.writer import Session as Former
from kvslot.daemon.logs import limited
from kvslot.daemon.membership import Entry, Member, Peer, birth_of, watch

if TYPE_CHECKING:
    from kvslot.daemon.connection import Connection
    from kvslot.daemon.pools import HostedPool
    from kvslot.daemon.server import Server

log = structlog.stdlib.get_logger("kvslot.daemon")

Handler = Callable[["Server", "Connection", Any, float], "messages.Reply | None"]

REFUSALS: Final[dict[type[core.Refusal], type[Refused]]] = {
    core.BadRequest: BadRequest,
    core.UnknownHandle: NotFound,
    core.EndedHandle: Ended,
    core.ForeignHandle: Denied,
    core.OutOfTurn: OutOfTurn,
}
"""The core's refusals in the words of the wire."""


class Permission(IntEnum):
    """Who may say a verb."""

    ANYONE = 0
    SESSION = 1  # after Hello
    CONTROL = 2  # the daemon's own user, root, and those configured


class Row(NamedTuple):
    """A verb's row."""

    permission: Permission
    handler: Handler


def member_of(connection: Connection) -> Member:
    """The session that a verb of permission SESSION belongs to; checked before the handler is called."""
    member = connection.member
    assert member is not None
    return member


def _entry(member: Member, sequence: int) -> Entry:
    entry = member.sequences.get(sequence)
    if entry is None:
        raise NotFound(f"no sequence {sequence} is running in this session")
    return entry


def _changed(member: Member, sequence: int) -> int:
    """The core's handle of a sequence that a verb is about to change: its Allocate can be repeated no longer."""
    entry = _entry(member, sequence)
    if entry.request is not None:
        entry.request = entry.answer = None
    return entry.handle


def _root(member: Member, namespace: int) -> int:
    if namespace not in member.roots:
        raise NotFound(f"no namespace {namespace} was opened by this session")
    return namespace


def _later(server: Server, hosted: HostedPool, answer: core.Later, number: int) -> messages.Later:
    members = hosted.members
    _note_later(server, hosted, answer)
    return messages.Later(
        number, answer.ticket, str(answer.reason), answer.needed, answer.free_now, answer.coming_free,
        answer.evictable, answer.retry_after_ms, [members[each].number for each in answer.stalled if each in members],
        answer.quota, answer.limit,
    )  # fmt: skip


def _note_later(server: Server, hosted: HostedPool, answer: core.Later | messages.Later) -> None:
    server.totals.later[hosted.name][answer.reason] += 1
    limited(
        log, "later", LATER_SECONDS, level="info", kind=hosted.name, pool=hosted.name, reason=str(answer.reason),
        needed=answer.needed, free_now=answer.free_now, coming_free=answer.coming_free,
        evictable=answer.evictable, quota=str(answer.quota),
    )  # fmt: skip


def _never(server: Server, hosted: HostedPool, answer: core.Never, number: int) -> messages.Never:
    server.totals.never[hosted.name] += 1
    limited(
        log, "never", LATER_SECONDS, kind=hosted.name, pool=hosted.name, needed=answer.needed,
        limit=answer.limit, quota=str(answer.quota),
    )  # fmt: skip
    return messages.Never(number, answer.needed, answer.limit, answer.quota)


def _first_copied(pool: core.Pool, handle: int) -> int:
    """The first position of a new sequence that stands in a copy's target."""
    return next(piece.position for piece in pool.sequences[handle].own if piece.kind == PEELED)


def _flat(copies: list[core.Copy]) -> list[int]:
    return (
        [*chain.from_iterable((each.source, each.target, each.length) for each in copies)] if copies else []
    )


# -- sessions ---------------------------------------------------------------------------------------------------------


def hello(server: Server, connection: Connection, m: messages.Hello, now: float) -> messages.Reply | None:
    """Opens a session, or takes one up again."""
    if connection.member is not None:
        raise OutOfTurn("this connection has a session already")
    if m.version != VERSION:
        raise WrongVersion(f"protocol version {m.version}: this daemon speaks {VERSION}")
    former = _former(server, connection, m) if m.resume and m.boot and m.boot != server.boot else None
    if m.resume and former is None:
        return _resume(server, connection, m, now)
    left = server.drain_left(now)
    if left is not None:
        raise ShuttingDown(
            f"the daemon is draining and takes no new sessions: it ends in {left:.0f} s at most"
        )
    peer = connection.peer
    # Those of earlier boots are none of these: to say what becomes of them, their process has to come in first.
    here = [each for each in server.sessions.values() if not each.former]
    lost = sum(each.peer.pid == peer.pid and each.session.life == core.Life.LOST for each in here)
    if lost >= max(LOST_LEAST, server.sessions_max // 8):
        # Each is kept aside as long as the process lives; one process shall not keep all that there may be.
        raise Busy(
            f"process {peer.pid} has lost {lost} sessions: take them up again (resume), or release them"
        )
    if len(here) >= server.sessions_max:
        raise Busy(
            f"all sessions that there may be are open: {len(here)} (sessions_max, or what descriptors allow)"
        )
    tenant = server.identity.check(peer, m.namespace.tenant)
    server.identity.check_session(tenant)
    hosted = server.hosted(m.pool)
    server.identity.check_pool(peer, hosted.settings)
    if m.group and not m.map:
        raise BadRequest("a session without memory has no steps, so it cannot be one of a group")
    description = hosted.description
    if m.fingerprint and m.fingerprint != description.fingerprint:
        raise WrongVersion(
            f"pool {hosted.name!r} has the layout {description.fingerprint}, not {m.fingerprint}"
        )
    # One descriptor less for those who cannot hold anything beyond their connection.
    pidfd = watch(connection.sock, peer) if m.map else -1
    root = 0
    try:
        if m.map and pidfd < 0:
            raise Denied(
                f"process {peer.pid} cannot be watched (pidfd), so it cannot be given the pool's memory: its death "
                "would not be noticed; a session without memory is opened with map=False"
            )
        group = None
        if m.group:
            first = server.sessions.get(m.group)
            if first is None or not hmac.compare_digest(first.secret, m.secret):
                _guessed(server, connection, first, "group")
                raise NotFound(f"no session {m.group} with this secret is open, to be joined")
            server.identity.check_group(first, peer)
            if first.hosted is not hosted:
                raise BadRequest(f"session {m.group} is of pool {first.hosted.name!r}, not {hosted.name!r}")
            group = first.session
        quota = min(hosted.settings.quota or UNLIMITED, m.quota or UNLIMITED)
        root = server.identity.space(tenant, hosted, peer, m.namespace)
        session = hosted.core.open_session(
            page=m.page,
            quota=quota,
            append=m.append,
            peel_max=m.peel_max,
            movable=m.movable,
            group=group,
        )
        member = Member(
            server.number(), hosted, session, peer, name=m.name, secret=secrets.token_bytes(16), since=now,
            mapped=m.map, pidfd=pidfd,
        )  # fmt: skip
        member.progressed = now
        journal = hosted.journal
        if journal is not None:
            try:
                journal.opened(member, server.boot)
            except LookupError as full:
                hosted.core.bye(session)
                raise Busy(f"no more sessions: {full}") from None
        if m.map:
            try:
                member.make_page()
            except OSError as error:
                hosted.core.bye(session)
                if journal is not None:
                    journal.forgotten(member)
                raise Busy(f"no page for the session: {error.strerror}") from None
    except BaseException:
        if pidfd >= 0:
            os.close(pidfd)
        if root:
            hosted.close_if_idle(root)
        raise
    member.roots[root] = None
    hosted.enter(root)
    server.identity.join(member, tenant)
    server.joined(connection, member)
    return _welcome(server, connection, member, m.id, root, former)


def _former(server: Server, connection: Connection, m: messages.Hello) -> Former:
    """The session of an earlier boot that a client comes back from, to begin anew."""
    former = server.warm.known(m.resume, m.secret, m.boot) if server.warm is not None else None
    if former is None:
        raise StaleSession(f"session {m.resume} was of an earlier boot of the daemon: nothing of it is left")
    _check_former(former, connection.peer)
    if server.warm is not None and server.warm.mates(former):
        raise StaleSession(
            f"session {m.resume} was of an earlier boot of the daemon, and one of a group: open the group anew, then "
            "release it"
        )
    return former


def _check_former(former: Former, peer: Peer) -> None:
    if peer.pid != former.pid or birth_of(peer.pid) != former.birth or peer.uid != former.uid:
        raise Denied(f"session {former.number} is of process {former.pid}")


def _guessed(server: Server, connection: Connection, member: Member | None, what: str) -> None:
    """Somebody named a session that there is, without its secret."""
    if member is not None:
        server.identity.deny(connection.peer, what, f"session {member.number} was named with a wrong secret")


def _resume(server: Server, connection: Connection, m: messages.Hello, now: float) -> messages.Reply | None:
    if m.boot and m.boot != server.boot:
        raise StaleSession(f"session {m.resume} was of an earlier boot of the daemon: nothing of it is left")
    member = server.sessions.get(m.resume)
    peer = connection.peer
    if member is None or not hmac.compare_digest(member.secret, m.secret):
        _guessed(server, connection, member, "resume")
        raise StaleSession(f"no session {m.resume} with this secret is left")
    if member.former:
        raise StaleSession(f"session {m.resume} was of an earlier boot of the daemon: its sequences are lost")
    if peer.pid != member.peer.pid or birth_of(peer.pid) != member.birth:
        raise Denied(
            f"session {m.resume} is of process {member.peer.pid}, and only that can take it up again"
        )
    server.identity.recheck(member, peer)
    if member.connection is not None:
        # The process knows better than we do that the old connection is dead.
        member.connection.end("taken up by another connection")
    try:
        member.hosted.core.resume(member.session)
    except core.Refusal as refused:
        raise StaleSession(f"session {m.resume}: {refused}") from None
    member.progressed = now
    server.rejoined(connection, member, now)
    welcome = _welcome(server, connection, member, m.id, next(iter(member.roots)))
    if welcome is None and not connection.closed:
        # What it may not have heard of moves comes before any other reply: a fork behind this already knows of them.
        server.deliver(member.hosted, now)
    return welcome


def _welcome(
    server: Server,
    connection: Connection,
    member: Member,
    number: int,
    root: int,
    former: Former | None = None,
) -> messages.Welcome | None:
    """Sends the Welcome itself where descriptors go with it."""
    settings = server.settings
    names = ["pool", "page", "wake"] if member.mapped else []
    if member.page is not None:
        member.page.words[PUSHES] = 0  # from here on it counts what the client will read behind this Welcome
    welcome = messages.Welcome(
        id=number,
        version=VERSION,
        server=f"kvslot {__version__}",
        boot=server.boot,
        session=member.number,
        secret=member.secret,
        namespace=root,
        pool=member.hosted.description,
        limits=messages.Limits(
            frame_bytes=settings.frame_bytes,
            reply_bytes=settings.reply_bytes,
            reply_seconds=settings.reply_seconds,
            sequences=settings.sequences_max,
            batch=settings.batch_max,
        ),
        descriptors=names,
        former=former.number if former is not None else 0,
    )
    if not names:
        return welcome
    connection.send_with_descriptors(
        encode(welcome), [member.hosted.device.descriptor, member.page_descriptor, member.wake]
    )
    return None


def open_namespace(
    server: Server, connection: Connection, m: messages.OpenNamespace, now: float
) -> messages.Reply:
    """Another namespace for this session."""
    member = member_of(connection)
    if len(member.roots) >= NAMESPACES:
        raise TooLarge(f"{len(member.roots)} namespaces are open in this session, which is the most")
    root = server.identity.open(member, m.namespace)
    if root not in member.roots:
        member.roots[root] = None
        member.hosted.enter(root)
    return messages.Opened(m.id, root)


def release(server: Server, connection: Connection, m: messages.Release, now: float) -> messages.Reply:
    """A dead session of this process ends: it says that nothing of it is in use."""
    member = server.sessions.get(m.session)
    if member is None and server.warm is not None:
        former = server.warm.known(m.session, m.secret)
        if former is not None:
            _check_former(former, connection.peer)
            server.warm.released(server, former)
            return messages.Done(m.id)
    if member is None or not hmac.compare_digest(member.secret, m.secret):
        _guessed(server, connection, member, "release")
        raise NotFound(f"no session {m.session} with this secret is left")
    peer = connection.peer
    if peer.pid != member.peer.pid or birth_of(peer.pid) != member.birth:
        raise Denied(f"session {m.session} is of process {member.peer.pid}")
    if member.connection is not None:
        if member.connection is connection:
            raise OutOfTurn("this is the session's own connection: it ends with Bye")
        member.connection.end("released by another connection")
    server.proven_gone(member)
    return messages.Done(m.id)


def reclaim(server: Server, connection: Connection, m: messages.Reclaim, now: float) -> messages.Reply:
    """A sequence of a session of before the restart goes on in this one."""
    member = member_of(connection)
    former = server.sessions.get(m.session)
    if former is None or not hmac.compare_digest(former.secret, m.secret):
        _guessed(server, connection, former, "reclaim")
        raise Ended(f"session {m.session} has ended, or nothing of it is left")
    peer = connection.peer
    if peer.pid != former.peer.pid or birth_of(peer.pid) != former.birth or peer.uid != former.peer.uid:
        raise Denied(f"session {m.session} is of process {former.peer.pid}")
    if not former.former or former.hosted is not member.hosted:
        raise OutOfTurn(f"session {m.session} is not one of before a restart, in the pool of this session")
    if m.sequence in member.sequences:
        raise Exists(f"sequence {m.sequence} is running")
    if len(member.sequences) >= server.settings.sequences_max:
        raise TooLarge(
            f"this session runs all sequences that it may: {len(member.sequences)} (sequences_max)"
        )
    hosted = member.hosted
    if not member.holds and hosted.journal is not None:
        hosted.journal.holds(member)
    if former.aside is None:
        former.aside = core.Aside(former.session)
    answer = core.reclaim(
        hosted.core, member.session, former.aside, _root(member, m.namespace), m.tokens, m.extents,
        priority=m.priority,
    )  # fmt: skip
    member.sequences[m.sequence] = Entry(answer.sequence, None, None)
    member.by_handle[answer.sequence] = m.sequence
    server.totals.reclaimed += 1
    return messages.Reclaimed(m.id, answer.length)


def bye(server: Server, connection: Connection, m: messages.Bye, now: float) -> messages.Reply:
    """The session ends in good order."""
    member = member_of(connection)
    member.sync(now)
    member.hosted.core.bye(member.session, sliced=True)
    server.left(connection, member)
    return messages.Done(m.id)


def ping(server: Server, connection: Connection, m: messages.Ping, now: float) -> messages.Reply:
    """Alive."""
    return messages.Pong(m.id, server.boot)


# -- sequences --------------------------------------------------------------------------------------------------------


def probe(server: Server, connection: Connection, m: messages.Probe, now: float) -> messages.Reply:
    """How much is cached."""
    member = member_of(connection)
    if server.identity.rated:
        server.identity.check_rate(member, _root(member, m.namespace), now)
    return messages.Probed(m.id, member.hosted.core.probe(_root(member, m.namespace), m.tokens))


def allocate(server: Server, connection: Connection, m: messages.Allocate, now: float) -> messages.Reply:
    """Starts a sequence."""
    member = member_of(connection)
    sequences = member.sequences
    if m.sequence in sequences:
        return _again(sequences[m.sequence], m)
    if server.draining:
        raise ShuttingDown("the daemon is draining and starts no new sequences")
    if len(sequences) >= server.settings.sequences_max:
        raise TooLarge(f"this session runs all sequences that it may: {len(sequences)} (sequences_max)")
    if m.namespace not in member.roots:
        _root(member, m.namespace)
    if server.identity.rated and (late := server.identity.late(member, m, now)) is not None:
        _note_later(server, member.hosted, late)
        return late
    hosted = member.hosted
    pool = hosted.core
    if not member.holds and hosted.journal is not None:
        hosted.journal.holds(member)
    answer = pool.allocate(
        member.session, m.namespace, m.tokens, now=now, ticket=m.ticket, priority=m.priority,
        contiguous=m.contiguous, wait_for_commit=m.wait_for_commit,
    )  # fmt: skip
    if type(answer) is core.Later and pool.ledger.counts[FENCED] and server.sync_fences(hosted, now):
        # Steps have completed that nobody had told us of.
        answer = pool.allocate(
            member.session, m.namespace, m.tokens, now=now, ticket=answer.ticket, priority=m.priority,
            contiguous=m.contiguous, wait_for_commit=m.wait_for_commit,
        )  # fmt: skip
    if type(answer) is core.Admitted:
        handle = answer.sequence
        copies = answer.copies
        reply = messages.Admitted(
            m.id, answer.hit, answer.capacity, answer.extents, _flat(copies) if copies else []
        )
        entry = sequences[m.sequence] = Entry(handle, m, reply)
        if copies:
            entry.given = [_first_copied(pool, handle)]
        member.by_handle[handle] = m.sequence
        return reply
    if type(answer) is core.Later:
        server.waits(hosted)
        if answer.reason is core.Reason.RUN:
            server.compactors[hosted.name].poke()  # moves may make one
        return _later(server, hosted, answer, m.id)
    assert type(answer) is core.Never
    return _never(server, hosted, answer, m.id)


def _again(entry: Entry, m: messages.Allocate) -> messages.Reply:
    """The id is running: the same answer for the same request, as long as nothing has changed since."""
    request, answer = entry.request, entry.answer
    if request is None or answer is None:
        raise Exists(f"sequence {m.sequence} is running, and has changed since it was allocated")
    if (request.namespace, request.priority, request.contiguous, request.tokens) != (
        m.namespace, m.priority, m.contiguous, m.tokens,
    ):  # fmt: skip
        raise Exists(f"sequence {m.sequence} is running, with other tokens or other options")
    return messages.Admitted(m.id, answer.hit, answer.capacity, answer.extents, answer.copies)


def extend(server: Server, connection: Connection, m: messages.Extend, now: float) -> messages.Reply:
    """Room to grow."""
    member = member_of(connection)
    hosted = member.hosted
    pool, session = hosted.core, member.session
    handle = _changed(member, m.sequence)
    if m.written:
        pool.wrote(session, handle, m.written)
    answer = pool.extend(session, handle, tokens=m.tokens, now=now, ticket=m.ticket)
    if type(answer) is core.Later and pool.ledger.counts[FENCED] and server.sync_fences(hosted, now):
        answer = pool.extend(session, handle, tokens=m.tokens, now=now, ticket=answer.ticket)
    if type(answer) is core.Grown:
        if answer.copies:
            entry = member.sequences[m.sequence]
            entry.given = [*entry.given, answer.position]
        return messages.Grown(m.id, answer.position, answer.capacity, answer.extents, _flat(answer.copies))
    if type(answer) is core.Later:
        server.waits(hosted)
        return _later(server, hosted, answer, m.id)
    assert type(answer) is core.Never
    return _never(server, hosted, answer, m.id)


def commit(server: Server, connection: Connection, m: messages.Commit, now: float) -> messages.Reply:
    """Publishes what has been written."""
    member = member_of(connection)
    handle, length = _changed(member, m.sequence), m.length
    waiting = member.sequences[m.sequence].given[m.copied :]
    if waiting:
        # Those slots hold nobody knows what until the client has made the copies, which it may not even know of.
        length = min(length, *waiting)
    answer = member.hosted.core.commit(
        member.session,
        handle,
        length,
        m.tokens,
        priority=None if m.priority < 0 else m.priority,
        expiry=now + m.expiry_ms / 1e3 if m.expiry_ms else 0.0,
    )
    return messages.Committed(m.id, answer.length, answer.published, answer.duplicates)


def fork(server: Server, connection: Connection, m: messages.Fork, now: float) -> messages.Reply:
    """A child on the same slots."""
    member = member_of(connection)
    if m.child in member.sequences:
        raise Exists(f"sequence {m.child} is running")
    if server.draining:
        raise ShuttingDown("the daemon is draining and starts no new sequences")
    if len(member.sequences) >= server.settings.sequences_max:
        raise TooLarge(
            f"this session runs all sequences that it may: {len(member.sequences)} (sequences_max)"
        )
    pool, session = member.hosted.core, member.session
    handle = _changed(member, m.sequence)
    waiting = member.sequences[m.sequence].given[m.copied :]
    if waiting and (m.length < 0 or min(waiting) < m.length):
        raise OutOfTurn(
            f"fork of sequence {m.sequence}: copies from position {min(waiting)} on have been listed and not been made "
            f"(copied {m.copied}); the child would read what is not there"
        )
    if m.written:
        pool.wrote(session, handle, m.written)
    answer = pool.fork(session, handle, length=m.length, now=now, ticket=m.ticket)
    if type(answer) is core.Later:
        server.waits(member.hosted)
        return _later(server, member.hosted, answer, m.id)
    assert type(answer) is core.Forked
    member.sequences[m.child] = Entry(answer.sequence, None, None)
    member.by_handle[answer.sequence] = m.child
    return messages.Forked(m.id, answer.length)


def trim(server: Server, connection: Connection, m: messages.Trim, now: float) -> messages.Reply:
    """Cuts a sequence at either end."""
    member = member_of(connection)
    if m.fence:
        member.sync(now)
    session, pool = member.session, member.hosted.core
    handle = _changed(member, m.sequence)
    if m.written:
        pool.wrote(session, handle, m.written)
    capacity = pool.trim(session, handle, keep_from=m.keep_from, keep_to=m.keep_to, fence=m.fence, now=now)
    if session.fences:
        server.fence_waits(member)
    room: list[int] = []
    if m.keep_to >= 0:
        entry = member.sequences[m.sequence]
        if entry.given:
            # What is cut off is written anew; nobody waits for those copies any more.
            entry.given = [position if position < m.keep_to else UNLIMITED for position in entry.given]
        for piece in pool.sequences[handle].own:
            if piece.position >= m.keep_to:
                join(room, piece.extents)
    return messages.Trimmed(m.id, capacity, room)


def free(server: Server, connection: Connection, m: messages.Free, now: float) -> messages.Reply:
    """Ends a sequence."""
    member = member_of(connection)
    if m.fence:
        member.sync(now)
    session = member.session
    entry = member.sequences.get(m.sequence)
    if entry is None:
        raise NotFound(f"no sequence {m.sequence} is running in this session")
    hosted = member.hosted
    ending = hosted.core.sequences.get(entry.handle)
    hosted.core.free(session, entry.handle, fence=m.fence, now=now)
    if ending is not None:
        hosted.lengths.add(ending.length)
    del member.sequences[m.sequence]
    del member.by_handle[entry.handle]
    connection.unpush(("preempt", m.sequence))
    if session.fences:
        server.fence_waits(member)
    return messages.Done(m.id)


def pin(server: Server, connection: Connection, m: messages.Pin, now: float) -> messages.Reply:
    """Keeps a prefix."""
    member = member_of(connection)
    if len(member.session.pins) >= server.settings.sequences_max:
        raise TooLarge(f"this session has all pins that it may: {len(member.session.pins)} (sequences_max)")
    if server.identity.rated:
        server.identity.check_rate(member, _root(member, m.namespace), now)
    if not member.holds and member.hosted.journal is not None:
        member.hosted.journal.holds(member)
    handle, length = member.hosted.core.pin(member.session, _root(member, m.namespace), m.tokens)
    return messages.Pinned(m.id, handle, length)


def unpin(server: Server, connection: Connection, m: messages.Unpin, now: float) -> messages.Reply:
    """Ends a pin."""
    member = member_of(connection)
    member.hosted.core.unpin(member.session, m.pin)
    return messages.Done(m.id)


def withdraw(server: Server, connection: Connection, m: messages.Withdraw, now: float) -> messages.Reply:
    """Gives a ticket up."""
    member = member_of(connection)
    if not m.ticket:
        return messages.Done(m.id)  # that of a Later which gave no place in line
    member.hosted.core.withdraw(member.session, m.ticket)
    for kind in ("ready", "published", "abandoned"):
        connection.unpush((kind, m.ticket))
    return messages.Done(m.id)


def unsupported(server: Server, connection: Connection, m: Any, now: float) -> messages.Reply:
    """Known, and not in this version."""
    raise Unsupported(f"{type(m).__name__} is not supported by this version")


def batch(server: Server, connection: Connection, m: messages.Batch, now: float) -> messages.Reply:
    """All in order, each as if alone."""
    server.check_batch(m)
    return messages.Results(m.id, [server.answer_in_batch(connection, verb, now) for verb in m.verbs])


# -- control ----------------------------------------------------------------------------------------------------------


def inspect(server: Server, connection: Connection, m: messages.Inspect, now: float) -> messages.Reply:
    """A page of what is."""
    rows, cursor = inspection.rows(m.kind, server.view(), m.cursor, m.limit, pool=m.pool)
    return messages.Inspected(m.id, m.kind, rows, cursor)


def evict(server: Server, connection: Connection, m: messages.Evict, now: float) -> messages.Reply:
    """Empties the cache, or some of it; no more at a time than the others can wait for."""
    pool = server.hosted(m.pool).core
    until = perf_counter_ns() + EVICT_NS
    left = m.tokens
    while left > 0 and perf_counter_ns() < until:
        gone = pool.evict(min(left, EVICT_STEP), now=now)
        left -= gone
        if not gone:
            break
    return messages.Evicted(m.id, m.tokens - max(left, 0))


def defrag(server: Server, connection: Connection, m: messages.Defrag, now: float) -> messages.Reply:
    """Compaction: on, off, once, or just how it stands."""
    pools = [server.hosted(m.pool)] if m.pool else list(server.pools.values())
    if m.action not in messages.ACTIONS:
        raise BadRequest(f"no action {m.action!r} of Defrag; there are {', '.join(messages.ACTIONS)}")
    compactors = [server.compactors[each.name] for each in pools]
    for compactor in compactors:
        match m.action:
            case "start":
                compactor.start()
            case "stop":
                compactor.stop()
            case "once":
                compactor.once()
            case _:
                pass
    if m.action != "status":
        log.info("compaction", action=m.action, pools=[each.name for each in pools], pid=connection.peer.pid)
    return messages.Defragged(m.id, [each.status() for each in compactors])


def audit(server: Server, connection: Connection, m: messages.Audit, now: float) -> messages.Reply | None:
    """Recounts a pool, in a copy of the process, and replies when that is done."""
    server.audit(connection, m.id, server.hosted(m.pool), now)
    return None


def drain(server: Server, connection: Connection, m: messages.Drain, now: float) -> messages.Reply:
    """As SIGTERM does."""
    server.drain(f"asked for by process {connection.peer.pid}", m.deadline_ms / 1e3 or None)
    return messages.Done(m.id)


def set_config(server: Server, connection: Connection, m: messages.SetConfig, now: float) -> messages.Reply:
    """Changes a setting for as long as this process runs."""
    server.set_config(m.name, m.value)
    return messages.Done(m.id)


def keep(server: Server, connection: Connection, m: messages.Keep, now: float) -> messages.Reply:
    """A prefix that stays until it is let go."""
    hosted = server.hosted(m.pool)
    by = f"uid {connection.peer.uid}"
    if m.tokens:
        space = core.Space(m.namespace.tenant, m.namespace.model, m.namespace.adapter, m.namespace.salt)
        kept = hosted.keeper.pin_tokens(space, m.tokens, by)
    else:
        kept = hosted.keeper.pin_node(m.node, m.length, by)
    log.info("prefix_pinned", pool=hosted.name, pin=kept.pin, namespace=kept.namespace, tokens=kept.tokens)
    return messages.Pinned(m.id, kept.pin, kept.tokens)


def unkeep(server: Server, connection: Connection, m: messages.Unkeep, now: float) -> messages.Reply:
    """... and is let go."""
    hosted = server.hosted(m.pool)
    kept = hosted.keeper.unpin(m.pin)
    log.info("prefix_unpinned", pool=hosted.name, pin=kept.pin, namespace=kept.namespace, tokens=kept.tokens)
    return messages.Done(m.id)


def reload(server: Server, connection: Connection, m: messages.Reload, now: float) -> messages.Reply | None:
    """As SIGHUP does; replies when the settings have been read."""
    server.reload(connection, m.id)
    return None


def record(server: Server, connection: Connection, m: messages.Record, now: float) -> messages.Reply:
    """What clients ask of a pool, for one who records it."""
    return server.recorders.act(connection, m, now)


LATER_SECONDS: Final = 10.0
"""Between two lines that say that a pool makes its clients wait, or turns them away."""
NAMESPACES: Final = 1024
"""Namespaces of one session: one a tenant and adapter it serves, and not one a request."""
LOST_LEAST: Final = 4
"""Lost sessions that a process may have in any case; beyond, an eighth of all that there may be."""
EVICT_NS: Final = 400_000
"""Of one Evict.  Who wants more asks again."""
EVICT_STEP: Final = 512
"""Tokens between two looks at the time."""

TABLE: Final[dict[type, Row]] = {
    messages.Hello: Row(Permission.ANYONE, hello),
    messages.Ping: Row(Permission.ANYONE, ping),
    messages.OpenNamespace: Row(Permission.SESSION, open_namespace),
    messages.Probe: Row(Permission.SESSION, probe),
    messages.Allocate: Row(Permission.SESSION, allocate),
    messages.Extend: Row(Permission.SESSION, extend),
    messages.Commit: Row(Permission.SESSION, commit),
    messages.Fork: Row(Permission.SESSION, fork),
    messages.Trim: Row(Permission.SESSION, trim),
    messages.Free: Row(Permission.SESSION, free),
    messages.SwapOut: Row(Permission.SESSION, unsupported),
    messages.SwapIn: Row(Permission.SESSION, unsupported),
    messages.Prefetch: Row(Permission.SESSION, unsupported),
    messages.Pin: Row(Permission.SESSION, pin),
    messages.Unpin: Row(Permission.SESSION, unpin),
    messages.Withdraw: Row(Permission.SESSION, withdraw),
    messages.Release: Row(Permission.SESSION, release),
    messages.Reclaim: Row(Permission.SESSION, reclaim),
    messages.Bye: Row(Permission.SESSION, bye),
    messages.Batch: Row(Permission.SESSION, batch),
    messages.Inspect: Row(Permission.CONTROL, inspect),
    messages.Evict: Row(Permission.CONTROL, evict),
    messages.Defrag: Row(Permission.CONTROL, defrag),
    messages.Audit: Row(Permission.CONTROL, audit),
    messages.Drain: Row(Permission.CONTROL, drain),
    messages.SetConfig: Row(Permission.CONTROL, set_config),
    messages.Record: Row(Permission.CONTROL, record),
    messages.Keep: Row(Permission.CONTROL, keep),
    messages.Unkeep: Row(Permission.CONTROL, unkeep),
    messages.Reload: Row(Permission.CONTROL, reload),
}
"""Every request's row; a test finds the one that lacks any."""

POSTED: Final = (messages.Free, messages.Trim)
"""Verbs that may have id 0."""

__all__ = ["POSTED", "REFUSALS", "TABLE", "Permission", "Row"]
