"""What outlives the daemon: pools, their journals and the proof who is there, kept by the service manager.

    pool-KEY      the pool's memory        journal-KEY     its journal        KEY: a sum of the pool's name
    session-N     a pidfd of the process of session N, a number that is never given out twice in a journal's life

A start is warm, pool by pool, where memory and journal come back and are those of this pool as it is configured now;
else it is cold, and one line of the log says why.  What comes back and belongs to nothing (of a pool that is no more,
of another size, there twice) is given up, so that it does not take memory for ever.

    former      sessions of earlier boots whose processes may live.  Those that hold anything are members like others
                that lost their connection; slots and cache wait for them.  One that returns is told, begins anew, and
                releases what it held once its steps have completed; one whose process has ended releases it by that.
    idle        those of them that held nothing: no members, but their processes are watched all the same
    strangers   session-N that no journal has an entry of.  Where a journal has entries that cannot be read, they may be
                whose: all that was set aside, and what was cached, waits for them, too

Who lives is looked at once, before the pool is filled, and through a descriptor that is kept from then on: an engine
that dies meanwhile is told of by that as soon as the loop runs.  Who cannot be watched is looked at again by `upkeep`.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import hmac
import mmap
import os
import re
import secrets
import time
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import structlog

from kvslot.allocator import Life
from kvslot.daemon.journal import columns as memory
from kvslot.daemon.journal.columns import Columns, Head
from kvslot.daemon.journal.reader import numbers
from kvslot.daemon.journal.takeover import Takeover, take_over
from kvslot.daemon.journal.writer import Session, Writer
from kvslot.daemon.logs import limited
from kvslot.daemon.membership import Member, Peer, birth_of, ended

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvslot.allocator import PoolConfig
    from kvslot.allocator import Session as Core
    from kvslot.daemon.journal.reader import Found
    from kvslot.daemon.layout import Layout
    from kvslot.daemon.notify import Store
    from kvslot.daemon.pools import HostedPool
    from kvslot.daemon.server import Server

log = structlog.stdlib.get_logger("kvslot.daemon")

SEALS: Final = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
"""That memory of ours has; without them a client could pull it from under us."""
LOOKS: Final = 16
"""At processes that cannot be watched, each time that upkeep comes: some ten microseconds each."""


_NUMBER: Final = re.compile("[1-9][0-9]{0,9}")
"""Of a session, as this daemon writes one (NUMBER_MOST): what else bears such a name is none of ours."""


class Kept(NamedTuple):
    """A pool that came back."""

    pool: int  # descriptors
    journal: int
    head: Head


class Journaled:
    """The journal of one pool that is served, and what is left of earlier boots in it."""

    def __init__(self, warm: Warm, hosted: HostedPool, writer: Writer) -> None:
        self.writer = writer
        self.everybody: Core | None = None
        """Holds what is cached, until all members of earlier boots are gone."""
        self.restored = self.missing = 0  # tokens that were cached before: those taken over, and the others
        self.torn: list[int] = []  # entries that may be of strangers who live
        self._warm = warm
        self._hosted = hosted

    def opened(self, member: Member, boot: int) -> None:
        """Before a session is told that it is one: raises LookupError where no more can be written down."""
        group = member.session.group
        # Nothing is held before the first Allocate or Pin, which say so; but in a group others do that for it.
        member.holds = group is not None
        if group is not None:
            member.engine = self._hosted.members[group.members[0].handle].engine
        member.session.mark = self.writer.session_opened(
            Session(
                number=member.number, boot=boot, pid=member.peer.pid, uid=member.peer.uid, gid=member.peer.gid,
                birth=member.birth, secret=member.secret, name=member.name, group=member.engine,
                mapped=member.mapped, holds=member.holds,
            )
        )  # fmt: skip
        store = self._warm.store
        if member.pidfd >= 0 and not store.keep(f"session-{member.number}", member.pidfd):
            limited(
                log,
                "process_not_kept",
                60.0,
                session=member.number,
                limit=store.capacity,
                remedy="FileDescriptorStoreMax= of the unit: 2 for a pool and 1 for a session, 4096 at the most",
            )

    def holds(self, member: Member) -> None:
        """A session that held nothing is about to."""
        member.holds = True
        self.writer.session_holds(member.number, True)

    def upkeep(self, member: Member) -> None:
        """Writes down that a session holds nothing, so that nothing has to wait for it after a restart."""
        session = member.session
        if session.group is None and not (
            session.sequences or session.fences or session.pins or session.moved or session.settling
        ):
            member.holds = False
            self.writer.session_holds(member.number, False)

    def over(self, member: Member) -> None:
        """A session uses nothing any more: whoever finds it here need not ask for its process."""
        self.writer.session_over(member.number)

    def forgotten(self, member: Member) -> bool:
        """A session has ended and holds nothing; true where that ends what was held for all of earlier boots."""
        self.writer.session_closed(member.number)
        if member.mapped:
            self._warm.store.forget(f"session-{member.number}")
        if member.former:
            self._warm.forgotten(member.number)
        return self.settle()

    def settle(self) -> bool:
        """Ends what was held for all of earlier boots, once the last of them is gone: true where that is now."""
        members = self._hosted.members.values()
        if self.everybody is None or self.torn or any(each.former for each in members):
            return False
        everybody, self.everybody = self.everybody, None
        assert everybody.life == Life.LOST
        self._hosted.core.gone(everybody)
        log.info("restart_settled", pool=self._hosted.name)
        return True


class Warm:
    """The pools that came back, and where those that are served are kept."""

    def __init__(self, store: Store, starting: Callable[[str], None] | None = None) -> None:
        """`starting` is told what the start is at, now and then."""
        self.store = store
        self._starting = starting
        self.enabled = store.available
        self.boot = secrets.randbits(62) + 1
        """The token of this one."""
        self.former: dict[int, tuple[Session, str]] = {}
        """Sessions of earlier boots whose processes may live, by number, with their pool's name."""
        self._found: dict[str, Kept | str] = {}
        self._pidfds: dict[int, list[int]] = {}  # as they came back
        self._watched: dict[int, int] = {}  # of sessions that live, until somebody reads them
        self._idle: dict[int, int] = {}  # of sessions that held nothing
        self._unwatched: dict[
            int, None
        ] = {}  # former ones whose processes may live, and nothing tells of their end
        self._known: set[int] = set()  # sessions that a journal has an entry of
        self._strangers: dict[int, int] = {}  # descriptors that tell of their end -> number
        self._adopted: list[tuple[HostedPool, Takeover]] = []
        self._kept: dict[str, tuple[list[int], list[int]]] = {}
        for name in list(store.inherited):
            kind, _, key = name.partition("-")
            if kind == "session" and _NUMBER.fullmatch(key):
                self._pidfds[int(key)] = store.pop(name)
            elif kind in ("pool", "journal") and key:
                both = self._kept.setdefault(key, ([], []))
                both[kind == "journal"].extend(store.pop(name))

    # -- looking -----------------------------------------------------------------------------------------------

    def find(
        self, name: str, layout: Layout, config: PoolConfig, size_bytes: int, page_bytes: int = 0
    ) -> Kept | str:
        """The pool of that name, size of memory and of its pages, or why there is none like it; asked again, the same.

        `page_bytes`: of huge pages, 0 for the system's ordinary ones.
        """
        found = self._found.get(name)
        if found is None:
            found = self._find(name, size_bytes, page_bytes or mmap.PAGESIZE)
            if isinstance(found, Kept) and (why := _difference(found.head, layout, config)):
                self._read(found.journal, found.head)
                os.close(found.pool)
                os.close(found.journal)
                self._give_up(_key(name))
                found = why
            self._found[name] = found
        return found

    def _find(self, name: str, size_bytes: int, page_bytes: int) -> Kept | str:
        if not self.enabled:
            return "no service manager keeps anything for this process"
        pools, journals = self._kept.pop(_key(name), ([], []))
        why = "nothing of an earlier daemon came back: a first start, or the unit keeps none (FileDescriptorStoreMax)"
        chosen: Kept | None = None
        for journal in journals:
            head = _head_of(journal)
            if isinstance(head, str):
                why = f"its journal: {head}"
                continue
            if head.pool != name:
                why = f"its journal is of pool {head.pool!r}"
                continue
            why = "its journal came back without the memory that it is about"
            for pool in pools:
                status = os.fstat(pool)
                if status.st_ino != head.inode:
                    continue
                pages = os.fstatvfs(pool).f_bsize
                if pages != page_bytes:
                    why = f"its memory has pages of {pages} bytes, and such of {page_bytes} are configured (huge_pages)"
                elif status.st_size != head.size_bytes or head.size_bytes != size_bytes:
                    why = f"its memory has {status.st_size} bytes, and {size_bytes} are configured"
                elif not _sealed(pool):
                    why = "its memory is not sealed"
                else:
                    chosen = Kept(pool, journal, head)
        if pools and not journals:
            why = "its memory came back without a journal"
        for each in (*pools, *journals):
            if chosen is None or each not in chosen[:2]:
                os.close(each)
        if chosen is None:
            self._give_up(_key(name))
            return why
        if len(pools) + len(journals) > 2:
            # What is there twice is kept once from here on.
            self._give_up(_key(name))
            self._keep(chosen.pool, chosen.journal, name)
        return chosen

    def _give_up(self, key: str) -> None:
        for kind in ("pool", "journal"):
            self.store.forget(f"{kind}-{key}")

    def _keep(self, pool: int, journal: int, name: str) -> None:
        for kind, descriptor in (("pool", pool), ("journal", journal)):
            if not self.store.keep(f"{kind}-{_key(name)}", descriptor):
                log.warning("descriptor_not_kept", name=f"{kind}-{_key(name)}", pool=name)

    # -- beginning ---------------------------------------------------------------------------------------------

    def begin(self, hosted: HostedPool) -> None:
        """Takes over what is in a pool that came back, or says why it begins empty; journals it from here on."""
        name, core = hosted.name, hosted.core
        kept = self._found.pop(name, "it was not looked for")
        if isinstance(kept, str):
            log.info("cold_start", pool=name, reason=kept)
            if not self.enabled:
                return
            journal = memory.make(core.slots, name)
        else:
            journal = kept.journal
        began = time.perf_counter()

        def progress(done: int, total: int) -> None:
            if self._starting is not None:
                self._starting(f"taking over pool {name}: {100 * done // total} %")

        buffer = memoryview(memory.mapped(journal))
        columns = Columns(buffer, core.slots)
        pool = hosted.device.descriptor
        head = Head(
            pool=name, slots=core.slots, block_size=core.block_size, padding=core.padding, unit=core.unit,
            fingerprint=hosted.layout.fingerprint, scrubs=core.scrubs, size_bytes=os.fstat(pool).st_size,
            inode=os.fstat(pool).st_ino, generation=hosted.description.generation, boot=self.boot,
        )  # fmt: skip
        core.ledger.journal = core.ledger.journal_all = None
        if isinstance(kept, str):
            _touch(columns)
            writer = Writer(columns, core.padding, core.ledger)
            writer.follow()
            columns.write_head(head)
            self._keep(pool, journal, name)
            os.close(journal)
            hosted.states = writer.view
            hosted.journal = Journaled(self, hosted, writer)
            return
        # All that is made here stays: the collector would go through it again and again for nothing.
        collects = gc.isenabled()
        gc.disable()
        try:
            takeover = take_over(columns, core, self._lives, self._others, progress)
        except Exception:
            # A fault of ours, which the next process would meet again, and so on for ever: that one begins empty.
            self._give_up(_key(name))
            raise
        finally:
            if collects:
                gc.enable()
        columns.write_head(head)
        os.close(journal)
        hosted.states = takeover.writer.view
        hosted.journal = journaled = Journaled(self, hosted, takeover.writer)
        self._known.update(takeover.found.entries)
        journaled.everybody = takeover.everybody
        if takeover.doubtful:
            journaled.torn = takeover.found.torn
        journaled.restored = takeover.restored.tokens
        journaled.missing = takeover.found.cached - takeover.restored.tokens
        for root in core.roots:
            hosted.users.setdefault(root, 0)
        for each in takeover.gone:
            if each.number not in takeover.restored.sessions:
                self._close(each, takeover.writer)
        for each in takeover.living:
            self.former[each.number] = (each, name)
        self._adopted.append((hosted, takeover))
        restored, found = takeover.restored, takeover.found
        log.info(
            "warm_start",
            pool=name,
            tokens=restored.tokens,
            lost=found.cached - restored.tokens,
            nodes=restored.nodes,
            aside=restored.aside,
            sessions=len(takeover.living),
            seconds=round(time.perf_counter() - began, 3),
        )
        if restored.aside and takeover.everybody is None:
            log.info("restart_settled", pool=name)

    def _others(self, found: Found) -> bool:
        """Whether a process may be there whose session has no entry, here or in any other journal."""
        self._known.update(found.entries)
        for each in self._found.values():  # those that are taken over later
            if isinstance(each, Kept):
                self._read(each.journal, each.head)
        for _, journals in self._kept.values():  # those of pools that are no more
            for journal in journals:
                head = _head_of(journal)
                if isinstance(head, Head):
                    self._read(journal, head)
        return any(
            _watches(pidfd)
            for number, kept in self._pidfds.items()
            if number not in self._known
            for pidfd in kept
        )

    def _read(self, journal: int, head: Head) -> None:
        self._known |= numbers(Columns(memoryview(memory.mapped(journal)), head.slots))

    def _lives(self, session: Session) -> bool:
        """Whether a session's process may be there: what cannot be looked at may.  It is watched from here on."""
        if not session.mapped:
            return False  # it never could touch anything
        pidfd = self._watch(session)
        if pidfd is None:
            return False
        if pidfd >= 0:
            self._watched[session.number] = pidfd
        return True

    def _watch(self, session: Session) -> int | None:
        """A descriptor that tells of the end of a session's process; -1: none, and it may live; None: it is gone."""
        gone = False
        kept = self._pidfds.get(session.number, [])
        for pidfd in kept:
            if _is_pidfd(pidfd, session.pid):
                if not ended(pidfd):
                    kept.remove(pidfd)
                    return pidfd
                gone = True
        # It has ended by what was kept; or nothing was, and the process of that number tells.
        unknown = None if gone else -1
        if session.pid <= 0:
            return unknown
        try:
            own = os.pidfd_open(session.pid)
        except ProcessLookupError:
            return None
        except OSError:
            return unknown
        birth = birth_of(session.pid)
        # Where processes of others cannot be looked at, what was kept has to do.  Nothing was: that of this number is
        # the one, or is there because that one is gone; its end proves it either way.
        lives = birth == session.birth if birth and session.birth else not gone
        if lives and not ended(own):
            self.store.keep(f"session-{session.number}", own)
            return own
        os.close(own)
        return None

    def _close(self, session: Session, writer: Writer) -> None:
        writer.session_closed(session.number)
        if session.mapped:
            self.store.forget(f"session-{session.number}")
        for descriptor in self._pidfds.pop(session.number, ()):
            os.close(descriptor)

    def join(self, server: Server) -> None:
        """Those of earlier boots who hold something become members that have lost their connection."""
        numbers = [
            hosted.journal.writer.numbers for hosted in server.pools.values() if hosted.journal is not None
        ]
        server.numbers_from(max(numbers, default=0))
        now = time.monotonic()
        for hosted, takeover in self._adopted:
            for each in takeover.found.sessions:
                pidfd = self._watched.pop(each.number, -1)
                if pidfd < 0 and each.number in self.former:
                    self._unwatched[each.number] = None
                core = takeover.restored.sessions.get(each.number)
                if core is None:
                    if pidfd >= 0:
                        self._watch_idle(server, each.number, pidfd)
                    continue
                member = Member(
                    each.number, hosted, core, Peer(each.pid, each.uid, each.gid), name=each.name,
                    secret=each.secret, since=now, mapped=True, pidfd=pidfd,
                )  # fmt: skip
                member.birth = each.birth
                member.former = each.boot
                server.adopt(member)
        torn = sum(len(hosted.journal.torn) for hosted, _ in self._adopted if hosted.journal is not None)
        for number, descriptors in self._pidfds.items():
            for descriptor in descriptors:
                if torn and number not in self._known and _watches(descriptor):
                    self._strangers[descriptor] = number
                    server.loop.add_reader(descriptor, self._stranger_ended, server, descriptor)
                else:
                    os.close(descriptor)
            if number not in self.former and number not in self._strangers.values():
                self.store.forget(f"session-{number}")
        if torn:
            log.warning("sessions_torn", entries=torn, processes=len(self._strangers))
            self._settle_torn(server)
        self._adopted.clear()
        self._pidfds.clear()
        for key, both in self._kept.items():  # of pools that are no more
            for descriptor in (*both[0], *both[1]):
                os.close(descriptor)
            self._give_up(key)
        self._kept.clear()

    # -- those of earlier boots --------------------------------------------------------------------------------

    def known(self, number: int, secret: bytes, boot: int = 0) -> Session | None:
        """The former session of that number, by its secret and (unless 0) the boot it was of."""
        session = self.former.get(number, (None, ""))[0]
        if (
            session is None
            or not hmac.compare_digest(session.secret, secret)
            or boot not in (0, session.boot)
        ):
            return None
        return session

    def mates(self, session: Session) -> bool:
        """Whether other former sessions are of the same engine: a step of theirs is no step of this one's."""
        return any(
            each.group == session.group and each is not session and name == self.former[session.number][1]
            for each, name in self.former.values()
        )

    def released(self, server: Server, session: Session) -> None:
        """A former session that held nothing is over: it says so, or its process is proven gone."""
        number = session.number
        hosted = server.pools[self.former[number][1]]
        assert hosted.journal is not None
        hosted.journal.writer.session_closed(number)
        self.store.forget(f"session-{number}")
        self.forgotten(number)
        pidfd = self._idle.pop(number, -1)
        if pidfd >= 0:
            server.loop.remove_reader(pidfd)
            os.close(pidfd)

    def forgotten(self, number: int) -> None:
        """A former session is over."""
        self.former.pop(number, None)
        self._unwatched.pop(number, None)

    def _watch_idle(self, server: Server, number: int, pidfd: int) -> None:
        self._idle[number] = pidfd
        server.loop.add_reader(pidfd, self._idle_ended, server, number)

    def _idle_ended(self, server: Server, number: int) -> None:
        pidfd = self._idle.get(number, -1)
        if pidfd >= 0 and ended(pidfd):
            self.released(server, self.former[number][0])

    def _stranger_ended(self, server: Server, pidfd: int) -> None:
        if not ended(pidfd):
            return
        server.loop.remove_reader(pidfd)
        os.close(pidfd)
        number = self._strangers.pop(pidfd)
        if number not in self._strangers.values():
            self.store.forget(f"session-{number}")
        self._settle_torn(server)

    def _settle_torn(self, server: Server) -> None:
        """Once the last stranger is gone, entries that cannot be read are nobody's."""
        if self._strangers:
            return
        for hosted in server.pools.values():
            journal = hosted.journal
            if journal is not None and journal.torn:
                for index in journal.torn:
                    journal.writer.entry_closed(index)
                journal.torn = []
                if journal.settle():
                    server.start_sweep()

    def upkeep(self, server: Server) -> None:
        """Once a second: looks again at some of those whose end nothing tells of."""
        for number in list(islice(self._unwatched, LOOKS)):
            del self._unwatched[number]
            session = self.former[number][0]
            member = server.sessions.get(number)
            pidfd = self._watch(session)
            if pidfd is None:
                if member is None:
                    self.released(server, session)
                else:
                    server.proven_gone(member)
            elif pidfd < 0:
                self._unwatched[number] = None  # behind the others
            elif member is None:
                self._watch_idle(server, number, pidfd)
            else:
                member.pidfd = pidfd
                server.watch(member)

    def close(self, server: Server) -> None:
        """Gives its descriptors back."""
        for pidfd in (*self._idle.values(), *self._strangers):
            server.loop.remove_reader(pidfd)
            os.close(pidfd)
        self._idle.clear()
        self._strangers.clear()


def _key(name: str) -> str:
    """As much of a sum of it as a descriptor's name has room for: the names of two pools never have the same."""
    return hashlib.blake2b(name.encode(), digest_size=11).hexdigest()


def _head_of(descriptor: int) -> Head | str:
    try:
        if not _sealed(descriptor):
            return "it is not sealed"
        buffer = os.pread(descriptor, memory.HEAD, 0)
        head = memory.read_head(memoryview(buffer))
        if isinstance(head, Head) and os.fstat(descriptor).st_size != memory.size_of(head.slots):
            return "it has another size than it says"
        return head
    except OSError as error:
        return str(error.strerror)


def _sealed(descriptor: int) -> bool:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        return False


def _is_pidfd(descriptor: int, pid: int) -> bool:
    """Whether a descriptor is of that process, dead or alive: a foreign one proves nothing."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/self/fdinfo/{descriptor}") as file:
        for line in file:
            if line.startswith("Pid:"):
                return int(line.split()[1]) in (pid, -1)
    return False


def _watches(descriptor: int) -> bool:
    """Whether a descriptor is of a process that lives."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/self/fdinfo/{descriptor}") as file:
        return any(line.startswith("Pid:") for line in file) and not ended(descriptor)
    return False


def _touch(columns: Columns) -> None:
    """Makes the columns exist now, rather than page by page on the way of a reply."""
    for column in (columns.whose, columns.stretch, columns.place, columns.token, columns.link):
        np.frombuffer(column, np.uint8)[:] = 0


def _difference(head: Head, layout: Layout, config: PoolConfig) -> str:
    """In what a journal is of another pool than the one that is configured; "": in nothing."""
    now = {
        "slots": config.blocks * config.block_size,
        "block_size": config.block_size,
        "unit": config.block_size if config.opaque else 1,
        "fingerprint": layout.fingerprint,
    }
    if config.scrubs and not head.scrubs:
        return "what is free was not wiped then, and is to be now"
    for name, is_ in now.items():
        was = getattr(head, name)
        if was != is_:
            return f"{name}: {was} then, {is_} now"
    return ""


__all__ = ["Journaled", "Kept", "Warm"]
