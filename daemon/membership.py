"""Sessions as processes: who is connected, whose page says what, and when a process is proven gone.

    connection ends ──► lost ── process ends (pidfd) ──► gone ── swept in slices ──► nothing left
          │               │
          │               └── the same process returns with the secret ──► live again
          └── Bye, or never mapped anything ──► swept at once

A member is one session of one process.  Its page is read when a frame of it comes, when something waits on it, and when
it rings; what it says is clamped by the core to what may be, and nonsense ends that connection alone.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kvslot.allocator import Aside, Life, Session
from kvslot.allocator import BadRequest as CoreBadRequest
from kvslot.allocator.extents import cut, join
from kvslot.api.wire import COMPLETED, PAGE_BYTES, PUSHES, SUBMITTED, WAKE, PeerFault, SessionPage, messages
from kvslot.api.wire.page import EPOCH

if TYPE_CHECKING:
    from kvslot.daemon.connection import Connection
    from kvslot.daemon.identity import Tenant
    from kvslot.daemon.pools import HostedPool

SO_PEERPIDFD: Final = (
    77  # since Linux 6.5: the very process that connected, even if its number was given away since
)
SO_PEERGROUPS: Final = 59
GROUPS_MAX: Final = 65536
"""Of a process, by the kernel."""
_credentials = struct.Struct("3i")


class Peer(NamedTuple):
    """Who connected, by the kernel's word."""

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...] = ()  # supplementary ones


def peer_of(sock: socket.socket) -> Peer:
    """Process, user and groups at the other end, as they were when it connected."""
    pid, uid, gid = _credentials.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _credentials.size)
    )
    return Peer(pid, uid, gid, groups_of(sock))


def groups_of(sock: socket.socket) -> tuple[int, ...]:
    """The supplementary groups of the process at the other end, as they were when it connected."""
    for room in (256, GROUPS_MAX):
        try:
            told = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 4 * room)
        except OSError as error:
            if error.errno != errno.ERANGE:
                return ()  # before Linux 4.13
        else:
            return struct.unpack(f"{len(told) // 4}I", told)
    return ()


def watch(sock: socket.socket, peer: Peer) -> int:
    """A descriptor that becomes readable when the peer's process ends; -1 where it is gone or cannot be watched."""
    try:
        descriptor = int(struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4))[0])
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            return -1  # it is gone; by now its number may be another's
        try:
            descriptor = os.pidfd_open(peer.pid) if peer.pid > 0 else -1
        except OSError:
            return -1
    if descriptor >= 0 and ended(descriptor):
        # Newer kernels have one for the dead, too; who speaks is a child that inherited the socket.
        os.close(descriptor)
        return -1
    return descriptor


def birth_of(pid: int) -> int:
    """When the process began, in clock ticks since boot; 0: cannot be read.  Tells owners of a number apart."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def ended(descriptor: int) -> bool:
    """Whether the process behind a descriptor of `watch` has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


class Entry(msgspec.Struct, eq=False):
    """A running sequence: the core's handle, and while nothing has changed it the request and answer it began with."""

    handle: int
    request: messages.Allocate | None
    answer: messages.Admitted | None
    given: list[int] = []  # of each reply with copies: the first position that it moved

    def moved(self, position: int, extents: list[int]) -> None:
        """Positions from `position` on lie elsewhere: the answer it began with says so, if it is asked for again."""
        answer = self.answer
        if answer is not None:
            end = position + sum(extents[1::2])
            whole = cut(answer.extents, 0, position)
            for part in (extents, cut(answer.extents, end, max(0, answer.capacity - end))):
                join(whole, part)
            self.answer = msgspec.structs.replace(answer, extents=whole)


class Member:
    """One session of one process."""

    def __init__(
        self,
        number: int,
        hosted: HostedPool,
        session: Session,
        peer: Peer,
        *,
        name: str,
        secret: bytes,
        since: float,
        mapped: bool,
        pidfd: int,
    ) -> None:
        self.number = number  # of the session on the wire, one of its own in the whole daemon
        self.hosted = hosted
        self.session = session
        self.peer = peer
        self.birth = birth_of(peer.pid)
        self.aside: Aside | None = None  # of a former one: what its sequences are reclaimed from
        self.former = 0  # the boot that it is of, where that is not this one: its sequences are lost
        self.holds = True  # whether it may use any slot, as the journal has it
        self.engine = number  # the first of its group's members
        self.name = name
        self.secret = secret
        self.since = since
        self.mapped = mapped  # whether it has ever been given the pool's memory
        self.pidfd = pidfd
        self.page: SessionPage | None = None
        self.page_descriptor = -1
        self.wake = -1
        self.connection: Connection | None = None
        self.sequences: dict[int, Entry] = {}
        self.by_handle: dict[int, int] = {}
        self.roots: dict[int, None] = {}  # namespaces it has opened
        self.tenants: list[Tenant] = []  # whose those are
        self.frames = 0
        self.posted_errors = 0
        self.rings, self.rings_since = 0, since  # of its bell, and from when on they are counted
        self._rings_for_fences = self._rings_for_gaps = False
        self.progressed = since  # when its page last changed, or there was nothing to complete
        self.lost_at = 0.0  # when its connection was lost, if it was

    # -- its page ----------------------------------------------------------------------------------------------

    def make_page(self) -> list[int]:
        """Makes page and bell; returns their descriptors, which stay ours."""
        descriptor = os.memfd_create("kvslot-session", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, PAGE_BYTES)
            _seal(descriptor)
            self.page = SessionPage(descriptor)
            # One that joins a group begins where that stands.
            self.page.words[SUBMITTED] = self.session.submitted
            self.page.words[COMPLETED] = self.session.completed
            self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            os.close(descriptor)
            raise
        self.page_descriptor = descriptor
        return [descriptor, self.wake]

    def sync(self, now: float) -> bool:
        """Takes over what the page says; true when a step has completed since.  PeerFault where it says nonsense."""
        page = self.page
        session = self.session
        if page is None or session.life:
            return False
        words = page.words
        # The client writes epoch, submitted, completed in this order.  The epoch is read first: every step that began
        # before it was applied is then among those read as submitted.  And completed before submitted, so that what
        # is submitted meanwhile makes no lie of it.
        epoch = words[EPOCH]
        completed = words[COMPLETED]
        submitted = words[SUBMITTED]
        if completed == session.completed and submitted == session.submitted and not session.moved:
            return False
        before = session.completed
        # What is submitted while nothing completes is no sign of life.
        changed = completed != before or session.submitted == before
        try:
            self.hosted.core.progress(session, submitted, completed, epoch=epoch, now=now)
        except CoreBadRequest as refused:
            raise PeerFault(f"its session page: {refused}") from None
        if changed:
            self.progressed = now
        return completed != before

    @property
    def waits(self) -> bool:
        """Whether something of the pool's comes free by what its page will say: fences, or the old places of moves."""
        session = self.session
        return not session.life and bool(session.fences or session.moved or session.settling)

    def pushed(self) -> None:
        """A push has gone to the socket: the page says so, for clients that look there first."""
        if self.page is not None:
            words = self.page.words
            words[PUSHES] = (words[PUSHES] + 1) & (2**64 - 1)

    def take_ring(self) -> bool:
        """Whether the bell rang.  Never waits, though the client may have emptied it, and made it one that waits."""
        try:
            os.preadv(self.wake, [bytearray(8)], -1, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:  # Linux before 5.13
                raise
            os.set_blocking(self.wake, False)
            try:
                os.eventfd_read(self.wake)
            except BlockingIOError:
                return False
        return True

    def ask_to_ring(self, wanted: bool, *, for_gaps: bool = False) -> None:
        """Whether the client should write the eventfd after its next step: for fences, or `for_gaps` of its steps."""
        if for_gaps:
            self._rings_for_gaps = wanted
        else:
            self._rings_for_fences = wanted
        if self.page is not None:
            self.page.words[WAKE] = int(self._rings_for_fences or self._rings_for_gaps)

    # -- its end -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """For people."""
        if self.session.life == Life.LIVE:
            return "live"
        return "lost" if self.session.life == Life.LOST else "ending"

    @property
    def outbox(self) -> int:
        """Bytes of replies it has not read."""
        return self.connection.waiting_bytes if self.connection is not None else 0

    def process_ended(self) -> bool:
        """Whether its process is proven gone."""
        return self.pidfd < 0 or ended(self.pidfd)

    def close(self) -> None:
        """Gives its descriptors back; the session has ended, or is held by nothing of ours any more."""
        if self.page is not None:
            self.page.close()
            self.page = None
        for descriptor in self.descriptors():
            os.close(descriptor)
        self.page_descriptor = self.wake = self.pidfd = -1

    def descriptors(self) -> Iterator[int]:
        """Those it has now."""
        for descriptor in (self.page_descriptor, self.wake, self.pidfd):
            if descriptor >= 0:
                yield descriptor


def _seal(descriptor: int) -> None:
    import fcntl

    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
