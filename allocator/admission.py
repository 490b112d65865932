"""Who gets memory next: OK, LATER with a ticket, or NEVER; growth before new requests; pressure before preemption.

    new request    need + held back <= free + evictable, where held back = the oldest ticket's need
                       + the watermark, or what waiting growth needs if that is more: it is kept back for growth
    growth         need + what older growth needs <= free + evictable

Only memory that can be handed out now counts.  Fenced memory is coming free: where it would do, nothing is evicted for
`fence_patience` seconds of the ticket's age.  Every LATER carries a ticket; it keeps its age until its session ends or
withdraws it, or until `ticket_grace` after Ready was pushed.

When growth cannot be served and nothing is coming free, Pressure asks all sessions for their second runs; after
`reclaim_patience` victims are named one at a time among the sequences under the limit that binds: lowest priority
first, then youngest, never the oldest.  A session that has not answered by the deadline gets LATER(preempt_first) for
new work and the next victim is named.  So the oldest sequence goes on as long as it fits alone and the others answer or
die.

A request for one long run that finds memory scattered gets a window: the stretch of the pool with the least in its way
is set aside (state reserved) as it becomes free, evicting what nobody holds.  One window per pool at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvslot.allocator.accounts import Account, Quota, left_under, narrowest
from kvslot.allocator.errors import BadRequest, ForeignHandle
from kvslot.allocator.results import Abandoned, Later, Never, Preempt, Pressure, Published, Ready, Reason
from kvslot.allocator.sessions import Life, Sequence, Session
from kvslot.allocator.slots import CACHED, FENCED, FREE, RESERVED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvslot.allocator.placement import Placement

TICKETS_PER_SESSION = 1024  # a session that asks more often without coming back is using tickets wrongly
NO_HANDLE = 2**63  # above every handle
REPLAN_AFTER = 0.05  # seconds between two looks for a window or for whole pages, which cost O(nodes) ...
REPLAN_NODES = 4096  # ... and of a tree of more nodes than this so many for each
REPLAN_EACH = 20e-6  # of them, some twenty times what looking at it takes


class Ticket(msgspec.Struct, gc=False, eq=False):
    """A place in the queue."""

    handle: int
    session: Session
    account: Account
    need: int
    created: float
    sequence: Sequence | None = None  # of a growth ticket
    contiguous: bool = False
    ready: float = -1.0  # when Ready was pushed
    taken: int = 0  # tokens of its hit that could be evicted while it waits: others leave them, too
    pages: bool = False  # it lacked whole pages, not slots
    looked: float = -1.0  # when whole pages were last counted for it
    awaits: int = 0  # the sequence whose commit it waits for; then it holds nothing back
    root: int = 0  # its namespace; 0 of a growth ticket, whose sequence says it


class Window(msgspec.Struct, gc=False, eq=False):
    """Slots [start, stop) being cleared for a ticket; `held` of them are reserved."""

    ticket: Ticket
    start: int
    stop: int
    blockers: list[int]  # nodes inside
    held: int = 0
    stretches: list[tuple[int, int]] = []  # the reserved (slot, length), as they came

    def hold(self, slot: int, length: int) -> None:
        self.held += length
        self.stretches.append((slot, length))


def _within_quota(ticket: Ticket) -> bool:
    need, account = ticket.need, ticket.account
    return (
        ticket.session.charged + need <= ticket.session.quota
        and account.charged + need <= account.slots
        and (ticket.sequence is None or account.unwritten + need <= account.room)
    )


class Admission:
    """The queue of one pool.  `busy` is true while anybody waits."""

    __slots__ = (
        "_counted",
        "_planned",
        "awaiting",
        "busy",
        "growth",
        "move_patience",
        "named",
        "patient",
        "pool",
        "pressed",
        "waiting",
        "window",
    )

    def __init__(self, pool: Placement) -> None:
        self.pool = pool
        self.busy = False
        self.waiting: OrderedDict[int, Ticket] = OrderedDict()  # new requests, oldest first
        self.awaiting: dict[int, Ticket] = {}  # those that wait for another sequence's commit, not for memory
        self.growth: dict[int, Ticket] = {}  # sequence handle -> its growth ticket; few, so scanned
        self.window: Window | None = None
        self.pressed = -1.0  # when the present shortage began
        self.patient = -1.0  # until when those whom Pressure was pushed to have time to give runs back
        self.named: dict[int, float] = {}  # victims named in it: sequence -> deadline
        self.move_patience = (
            0.0  # seconds that a ticket for a run waits for moves before a window is evicted for it
        )
        self._planned = -1.0
        self._counted: dict[int, tuple[float, int]] = {}  # by page: until when it is believed, and the count

    # -- new requests ------------------------------------------------------------------------------------------

    def admit(
        self,
        session: Session,
        account: Account,
        need: int,
        taken: int,
        now: float,
        ticket: int,
        contiguous: bool,
        root: int,
    ) -> Later | None:
        """None when the request may take `need` slots now (evicting what is missing), else the refusal.

        Its hit is held already; `taken` of those tokens could have been evicted before.
        """
        later = self._admit(session, account, need, now, ticket, contiguous)
        if later is not None and later.ticket in self.waiting:
            mine = self.waiting[later.ticket]
            mine.taken = max(0, taken)  # a move given up for it may have freed more
            mine.root = root
        return later

    def _admit(
        self, session: Session, account: Account, need: int, now: float, ticket: int, contiguous: bool
    ) -> Later | None:
        pool = self.pool
        mine = self._mine(session, ticket)
        if self._overdue(session, now):
            return self.refuse(session, account, need, now, ticket, Reason.PREEMPT_FIRST)
        if session.charged + need + self._growth_of(session) > session.quota:
            return self.refuse(session, account, need, now, ticket, Reason.QUOTA, quota=Quota.SESSION)
        if account.charged + need + self._growth_under(account) > account.slots:
            return self.refuse(session, account, need, now, ticket, Reason.QUOTA, quota=Quota.SLOTS)
        if session.page > 1 and self.runs_wanted(account, session.page - 1):
            # What rounds its last page up would be taken from growth that waits for as much.
            return self.refuse(session, account, need, now, ticket, Reason.QUOTA, quota=Quota.RUNS)
        if any(waiting.contiguous for waiting in self.growth.values()):
            # Growth that wants whole pages and finds none: what a new request takes might be one of them.
            return self.refuse(session, account, need, now, ticket, Reason.TURN, contiguous=contiguous)
        free, evictable = pool.runs.total, pool.yields
        own_window = self.window if self.window is not None and self.window.ticket is mine else None
        if own_window is not None:
            free += own_window.held
        watermark = self._for_growth()
        held = self._held(mine) + watermark
        coming = self._coming_later()
        if need + held > free + evictable and self._older_than_window(mine):
            self.drop_window()  # else the two would wait for each other
            free = pool.runs.total
        if need + held > free + evictable and pool.tighten():
            evictable = pool.yields
        if need + held > free + evictable:
            if need + watermark <= free + evictable:
                reason = Reason.TURN
            elif need + held <= free + evictable + coming:
                reason = Reason.FENCED
            else:
                reason = Reason.MEMORY
            return self.refuse(session, account, need, now, ticket, reason, contiguous=contiguous)
        patience = pool.config.fence_patience
        if need > free and free + coming >= need and (mine is None or now - mine.created < patience):
            return self.refuse(session, account, need, now, ticket, Reason.FENCED, contiguous=contiguous)
        if own_window is not None and own_window.stop - own_window.start != need:
            self.drop_window()  # the request needs more or less than then, its hit being another
            own_window = None
        if contiguous and pool.runs.longest() < need:
            if self._older_than_window(mine):
                self.drop_window()  # the older of two that need a window has it
            if own_window is None or own_window.held < need:
                later = self.refuse(session, account, need, now, ticket, Reason.RUN, contiguous=True)
                mine = self.waiting[later.ticket]
                self._clear(mine, now)
                if self.window is None or self.window.ticket is not mine or self.window.held < need:
                    return later
            self.drop_window()
        if mine is not None:
            self._remove(mine)
        return None

    def admit_fork(self, parent: Sequence, now: float, ticket: int) -> Later | None:
        """None when a session may fork: it owes no answer to Preempt."""
        session = parent.session
        mine = self._mine(session, ticket)
        if self._overdue(session, now):
            later = self.refuse(session, parent.account, 0, now, ticket, Reason.PREEMPT_FIRST)
            self.waiting[later.ticket].root = parent.root
            return later
        if mine is not None:
            self._remove(mine)
        return None

    def _overdue(self, session: Session, now: float) -> bool:
        """Whether a session has let a Preempt's deadline pass for which somebody else's growth still waits."""
        if not session.owes:
            return False
        if all(handle in self.named for handle in self.growth):
            # Only victims are left to wait: the shortage they were named for is over, and theirs is a new one.
            self._relax()
            return False
        return any(deadline < now for deadline in session.owes.values())

    def refuse(
        self,
        session: Session,
        account: Account,
        need: int,
        now: float,
        ticket: int,
        reason: Reason,
        sequence: Sequence | None = None,
        contiguous: bool = False,
        quota: Quota = Quota.NONE,
    ) -> Later:
        """LATER with the figures of the limit that binds; makes the ticket where there is none yet."""
        pool = self.pool
        mine = self._mine(session, ticket) if sequence is None else self.growth.get(sequence.handle)
        if mine is None:
            if sequence is None:
                self._check_tickets(session)
            mine = Ticket(pool._handle(), session, account, need, now, sequence, contiguous)
            if sequence is None:
                self.waiting[mine.handle] = mine
            else:
                self.growth[sequence.handle] = mine
        elif mine.handle in self.awaiting:
            # What it waited for is settled; now it waits for memory.
            del self.awaiting[mine.handle]
            mine.need, mine.awaits, mine.contiguous = need, 0, contiguous
            self.waiting[mine.handle] = mine
        else:
            mine.need, mine.contiguous = need, contiguous
        mine.account = account
        mine.ready = -1.0
        mine.pages = reason == Reason.RUN and session.page > 1
        self.busy = True
        coming = self.coming_free()
        free, evictable = pool.runs.total, pool.tree.evictable
        limit = 0
        if quota:
            free, coming, limit = left_under(session, account, quota)
            evictable = 0
        retry = pool.config.fence_patience if reason == Reason.FENCED else 0.1
        stalled: tuple[int, ...] = ()
        if reason == Reason.STALLED:
            stalled = tuple(self._stalled_sessions(now))
        retry_ms = max(1, int(retry * 1000))
        return Later(mine.handle, reason, need, free, coming, evictable, retry_ms, stalled, quota, limit)

    def wait_for(self, session: Session, need: int, now: float, ticket: int, sequence: Sequence) -> Later:
        """LATER until `sequence` has committed its prompt or ended."""
        mine = self._mine(session, ticket)
        grace = self.pool.config.ticket_grace
        for settled in [t for t in self.awaiting.values() if not t.awaits and t.ready < now - grace]:
            if settled is not mine:
                del self.awaiting[settled.handle]
        if mine is None:
            self._check_tickets(session)
            mine = Ticket(self.pool._handle(), session, sequence.account, need, now)
        else:
            self._remove(mine)
        mine.awaits, mine.ready, mine.root = sequence.handle, -1.0, sequence.root
        self.awaiting[mine.handle] = mine
        pool = self.pool
        return Later(
            mine.handle, Reason.COMMIT, need, pool.runs.total, self.coming_free(), pool.tree.evictable, 100
        )  # fmt: skip

    def settle(self, sequence: Sequence, published: bool) -> None:
        """`sequence` has committed what others waited for, or never will."""
        for ticket in [t for t in self.awaiting.values() if t.awaits == sequence.handle]:
            ticket.awaits, ticket.ready = 0, self.pool.now
            push = Published if published else Abandoned
            self.pool.pushes.append(push(ticket.session.handle, ticket.handle))

    def resettle(self, moved: Mapping[int, Account]) -> None:
        """Namespaces have come under other accounts, and so does who waits in them."""
        for ticket in (*self.waiting.values(), *self.awaiting.values(), *self.growth.values()):
            root = ticket.root if ticket.sequence is None else ticket.sequence.root
            ticket.account = moved.get(root, ticket.account)

    def _check_tickets(self, session: Session) -> None:
        if len(self.waiting) + len(self.awaiting) < TICKETS_PER_SESSION:
            return
        waiting = sum(t.session is session for t in (*self.waiting.values(), *self.awaiting.values()))
        if waiting >= TICKETS_PER_SESSION:
            raise BadRequest(f"{waiting} tickets are waiting for this session; come back with one of them")

    def coming_free(self) -> int:
        """Fenced slots of sessions whose steps still complete."""
        fenced = self.pool.ledger.counts[FENCED]
        if fenced:
            # What the sweep has quarantined is no longer among the fenced.
            fenced -= sum(
                s.fenced - s.swept_fenced for s in self.pool.sessions.values() if s.stalled or s.life
            )
        return fenced

    def _coming_later(self) -> int:
        """Slots that can be handed out later, without anybody's giving them back: fenced, or yet to be wiped."""
        pool = self.pool
        return self.coming_free() + (pool.tree.evictable if pool.scrubs else 0)

    def wanted(self) -> int:
        """Slots that are to be free for who waits, within their quotas."""
        if not self.busy:
            return 0
        slots = sum(t.need for t in (*self.growth.values(), *self.waiting.values()) if _within_quota(t))
        if slots and any(t.pages or t.contiguous for t in (*self.growth.values(), *self.waiting.values())):
            slots += self.pool.runs.total  # those that are free lie wrong
        return slots + self._for_growth()

    def _older_than_window(self, mine: Ticket | None) -> bool:
        window = self.window
        return window is not None and mine is not None and mine.handle < window.ticket.handle

    def held_back(self) -> int:
        """Slots a new request must leave."""
        return self._for_growth() + self._held(None)

    def _for_growth(self) -> int:
        """What new requests leave to running sequences; nothing while nothing runs, so that progress is guaranteed."""
        pool = self.pool
        if not pool.sequences:
            return 0
        return max(pool.watermark, self._growth_held(NO_HANDLE)) if self.growth else pool.watermark

    def _held(self, mine: Ticket | None) -> int:
        """What requests leave to the oldest one that waits for memory."""
        held = 0
        if self.waiting:
            # One that waits for its own session's quota reserves nothing from the others.
            oldest = next((t for t in self.waiting.values() if _within_quota(t)), None)
            if oldest is not None and oldest is not mine:
                window = self.window
                held += (
                    oldest.need
                    + oldest.taken
                    - (window.held if window is not None and window.ticket is oldest else 0)
                )
        return held

    def _growth_of(self, session: Session) -> int:
        """Slots that this session's own waiting growth needs: its quota's watermark."""
        if not self.growth:
            return 0
        return sum(t.need for t in self.growth.values() if t.session is session)

    def _growth_under(self, account: Account) -> int:
        """The same of all sessions under an account."""
        if not self.growth:
            return 0
        return sum(t.need for t in self.growth.values() if t.account is account)

    def runs_wanted(self, account: Account, more: int) -> bool:
        """Whether a new request with `more` slots in reserve takes them from growth that waits under its account."""
        if not self.growth:
            return False
        needs = self._growth_under(account)
        return needs > 0 and account.unwritten + more + needs > account.room

    def _growth_held(self, before: int) -> int:
        """Slots that waiting growth of sequences older than handle `before` needs and its quota permits."""
        return sum(t.need for handle, t in self.growth.items() if handle < before and _within_quota(t))

    # -- growth ------------------------------------------------------------------------------------------------

    def grow(self, sequence: Sequence, need: int, now: float, ticket: int) -> Later | Never | None:
        """None when a running sequence may take `need` slots now; else LATER, or NEVER when it is the last one left."""
        pool = self.pool
        session, account = sequence.session, sequence.account
        if ticket:
            self._mine(session, ticket)
        mine = self.growth.get(sequence.handle)
        deadline = session.owes.get(sequence.handle)
        if deadline is not None and deadline < now and self._overdue(session, now):
            return self.refuse(session, account, need, now, ticket, Reason.PREEMPT_FIRST, sequence)
        if session.charged + need > session.quota:
            return self.starve(sequence, need, now, ticket, Reason.QUOTA, Quota.SESSION)
        if account.charged + need > account.slots:
            return self.starve(sequence, need, now, ticket, Reason.QUOTA, Quota.SLOTS)
        if account.unwritten + need > account.room:
            return self.starve(sequence, need, now, ticket, Reason.QUOTA, Quota.RUNS)
        older = self._growth_held(sequence.handle) if self.growth else 0
        if self.window is not None and need + older > pool.runs.total + pool.yields:
            self.drop_window()  # growth comes first; the window's ticket keeps its age
        if need + older > pool.runs.total + pool.yields:
            pool.tighten()
        free, evictable = pool.runs.total, pool.yields
        coming = self._coming_later()
        if need + older > free + evictable:
            if coming and need + older <= free + evictable + coming:
                return self.refuse(session, account, need, now, ticket, Reason.FENCED, sequence)
            return self.starve(sequence, need, now, ticket, Reason.MEMORY)
        patience = pool.config.fence_patience
        if need > free and free + coming >= need and (mine is None or now - mine.created < patience):
            return self.refuse(session, account, need, now, ticket, Reason.FENCED, sequence)
        return None

    def grown(self, sequence: Sequence) -> None:
        """A running sequence has got its slots: it waits no longer, and neither may the shortage."""
        mine = self.growth.get(sequence.handle)
        if mine is not None:
            self._remove(mine)
        if not self.growth:
            self._relax()

    def starve(
        self,
        sequence: Sequence,
        need: int,
        now: float,
        ticket: int,
        reason: Reason,
        quota: Quota = Quota.NONE,
    ) -> Later | Never:
        """Growth that neither free, evictable nor coming memory serves: ask for runs back, then name victims."""
        session, account = sequence.session, sequence.account
        whole = reason == Reason.RUN
        if whole and self.pool.scrubs and not self.lack_pages(need, session.page, now):
            # They are being evicted and wiped.
            return self.refuse(session, account, need, now, ticket, reason, sequence, whole)
        scope = self._scope(sequence, quota)
        limit, narrow = narrowest(session, account, self.pool.usable)
        if len(scope) == 1 and (
            (whole and self._hopeless(session.page, need)) or self._occupied(sequence) + need > limit
        ):
            mine = self.growth.get(sequence.handle)
            if mine is not None:
                self._remove(mine)
            return Never(self._occupied(sequence) + need, limit, narrow)
        self.refuse(session, account, need, now, ticket, reason, sequence, whole, quota)
        self._escalate(scope, now)
        if self._stuck(scope, sequence, now) and self._stalled_sessions(now):
            reason = Reason.STALLED
        return self.refuse(session, account, need, now, ticket, reason, sequence, whole, quota)

    def _occupied(self, sequence: Sequence) -> int:
        """Slots that a sequence keeps from all others: its own, copies included, and what it leases."""
        tree = self.pool.tree
        nodes = {sequence.node, *(sequence.kept or ())}
        leased: set[int] = set()
        for node in nodes:
            while tree.parent[node] and node not in leased:
                leased.add(node)
                node = tree.parent[node]
        own: int = sum(piece.length for piece in (*sequence.own, *(sequence.sources or ())))
        return own + sum(tree.length[node] for node in leased)

    def _coming(self) -> bool:
        """Whether memory will come back that no sequence holds: fences, moves, pins, what the sweep will release."""
        pool = self.pool
        return bool(pool.moves.tickets or pool.moves.retired or pool.dirty) or any(
            s.fences or s.life or s.pins for s in pool.sessions.values()
        )

    def _hopeless(self, page: int, need: int) -> bool:
        """Whether nothing will come free that could make whole pages for `need` slots; counted anew."""
        if self._coming():
            return False
        if whole_pages(self.pool, page) * page >= need:
            self._counted.pop(page, None)
            return False
        return True

    def _scope(self, sequence: Sequence, quota: Quota) -> list[Sequence]:
        """The sequences under the limit that binds, oldest first."""
        if quota is Quota.SESSION:
            return list(sequence.session.sequences.values())
        if quota:
            return [each for each in self.pool.sequences.values() if each.account is sequence.account]
        return list(self.pool.sequences.values())

    def _escalate(self, scope: list[Sequence], now: float) -> None:
        pool = self.pool
        if self.pressed < 0:
            self.pressed = self.patient = now
            asked: set[int] = set()
            for sequence in scope:
                session = sequence.session
                second = sequence.capacity - sequence.length > pool.quantum
                if second and session.life == Life.LIVE and session.handle not in asked:
                    asked.add(session.handle)
                    pool.pushes.append(Pressure(session.handle))
            if asked:
                self.patient = now + pool.config.reclaim_patience
        if now < self.patient:
            return
        if any(deadline >= now and handle in pool.sequences for handle, deadline in self.named.items()):
            return  # a victim still has time to answer
        victim: Sequence | None = None
        # The oldest is never a victim: the oldest whose session is there to go on with it.
        spared = next((s for s in scope if not s.session.life), None)
        for sequence in scope:
            if sequence is spared or sequence.handle in self.named or sequence.session.life != Life.LIVE:
                continue
            if victim is None or (sequence.priority, -sequence.handle) < (victim.priority, -victim.handle):
                victim = sequence
        if victim is None:
            return
        deadline = now + pool.config.preempt_deadline
        self.named[victim.handle] = deadline
        victim.session.owes[victim.handle] = deadline
        pool.pushes.append(Preempt(victim.session.handle, victim.handle, deadline))

    def _stuck(self, scope: list[Sequence], sequence: Sequence, now: float) -> bool:
        """Whether all others of the scope are past their deadline, stalled or lost."""
        return all(
            self.named.get(s.handle, now) < now or s.session.stalled or s.session.life != Life.LIVE
            for s in scope
            if s is not sequence
        )

    def _stalled_sessions(self, now: float) -> list[int]:
        pool = self.pool
        stalled = {s.session.handle for s in pool.sequences.values() if self.named.get(s.handle, now) < now}
        for session in pool.sessions.values():
            if (session.stalled or session.life) and (session.sequences or session.fences):
                stalled.add(session.handle)
        return sorted(stalled)

    def _relax(self) -> None:
        """The shortage is over: victims not taken are spared."""
        if self.pressed < 0:
            return
        self.pressed = -1.0
        for handle in self.named:
            sequence = self.pool.sequences.get(handle)
            if sequence is not None:
                sequence.session.owes.pop(handle, None)
        self.named.clear()

    # -- tickets -----------------------------------------------------------------------------------------------

    def withdraw(self, session: Session, ticket: int) -> None:
        """Gives a ticket up."""
        mine = self._mine(session, ticket, growth=True)
        if mine is None:
            raise self.pool.bad_handle(ticket, "ticket")
        self._remove(mine)

    def pump(self, now: float) -> None:
        """After memory came back or time went by: pushes Ready, ends unused tickets, names the next victim."""
        pool = self.pool
        grace = pool.config.ticket_grace
        for held in [
            t for t in (*self.growth.values(), *self.waiting.values()) if 0 <= t.ready < now - grace
        ]:
            self._remove(held)
        if self.window is not None:
            if not self.window.blockers and now - self._planned >= self._patience():
                # What stood in the way has been published, split or moved since.
                self._planned = now
                self.window.blockers = _blockers(pool, self.window.start, self.window.stop)
            self._evict_blockers(self.window)
        free, evictable = pool.runs.total, pool.yields
        left = free + evictable
        for handle in sorted(self.growth):
            ticket = self.growth[handle]
            if not _within_quota(ticket):
                continue
            left -= ticket.need
            if left < 0 and self.window is not None:
                left += self.window.held
                self.drop_window()
                free, evictable = pool.runs.total, pool.yields
            if left < 0 and pool.scrubs and left + self._coming_later() >= 0:
                break  # it is being evicted and wiped
            if left < 0:
                self.starve(pool.sequences[handle], ticket.need, now, ticket.handle, Reason.MEMORY)
                break
            if self._lacks_pages(ticket, now):
                self.starve(pool.sequences[handle], ticket.need, now, ticket.handle, Reason.RUN)
            elif ticket.ready < 0 and not self._waits_for_fences(ticket, free, now):
                ticket.ready = now
                pool.pushes.append(Ready(ticket.session.handle, ticket.handle))
        if any(ticket.contiguous for ticket in self.growth.values()):
            return
        for ticket in self.waiting.values():
            # Only the head of the queue, but for those who wait for their own quota or own window.
            window = self.window
            mine = window is not None and (window.ticket is ticket or self._older_than_window(ticket))
            reserved = window.held if window is not None and mine else 0
            fits = ticket.need + ticket.taken + self._for_growth() <= free + evictable + reserved
            fits = fits and _within_quota(ticket) and not self._overdue(ticket.session, now)
            fits = fits and not self._waits_for_fences(ticket, free + reserved, now)
            fits = fits and not self._lacks_pages(ticket, now)
            page = ticket.session.page
            fits = fits and not (page > 1 and self.runs_wanted(ticket.account, page - 1))
            if fits and ticket.contiguous and pool.runs.longest() < ticket.need:
                self._clear(ticket, now)
                fits = (
                    self.window is not None
                    and self.window.ticket is ticket
                    and self.window.held >= ticket.need
                )
            if fits and ticket.ready < 0:
                ticket.ready = now
                pool.pushes.append(Ready(ticket.session.handle, ticket.handle))
            if _within_quota(ticket):
                break

    def wanted_run(self) -> int:
        """Slots of the run that the oldest ticket for one waits for, where no free run is as long; else 0."""
        if self.waiting and self.window is None:
            longest = self.pool.runs.longest()
            for ticket in self.waiting.values():
                if ticket.contiguous and ticket.need > longest and _within_quota(ticket):
                    return ticket.need
        return 0

    def _waits_for_fences(self, ticket: Ticket, free: int, now: float) -> bool:
        """Whether nothing is evicted for a ticket yet, since what is coming free would do."""
        if ticket.need <= free or now - ticket.created >= self.pool.config.fence_patience:
            return False
        coming = self.coming_free()
        return coming > 0 and free + coming >= ticket.need

    def _lacks_pages(self, ticket: Ticket, now: float) -> bool:
        """Whether a ticket that was refused for want of whole pages still lacks them; counted now and then."""
        if not ticket.pages:
            return False
        if 0 <= ticket.looked and now - ticket.looked < REPLAN_AFTER:
            return True
        ticket.looked = now
        if self.lack_pages(ticket.need, ticket.session.page, now):
            return True
        ticket.pages = False
        return False

    def lack_pages(self, need: int, page: int, now: float) -> bool:
        """Whether free and evictable slots make too few whole pages for `need` slots."""
        return self.whole_pages(page, need, now) * page < need

    def whole_pages(self, page: int, need: int, now: float) -> int:
        """Pages as `whole_pages` counts them, which takes the longer the larger the tree is.

        Of a large tree a count that did not suffice for `need` is believed for a while.
        """
        until, pages = self._counted.get(page, (-1.0, 0))
        if now >= until or pages * page >= need:
            pages = whole_pages(self.pool, page)
            patience = self._patience()
            self._counted[page] = (now + patience if patience > REPLAN_AFTER else now, pages)
        return pages

    def _patience(self) -> float:
        """Seconds between two looks at every node."""
        nodes = self.pool.tree.nodes
        return REPLAN_AFTER if nodes < REPLAN_NODES else nodes * REPLAN_EACH

    def forget_session(self, session: Session) -> None:
        """A session ended or was lost: its tickets and debts go."""
        tickets = (*self.growth.values(), *self.waiting.values(), *self.awaiting.values())
        for ticket in [t for t in tickets if t.session is session]:
            self._remove(ticket)
        session.owes.clear()

    def forget_sequence(self, handle: int) -> None:
        """A sequence ended: its growth ticket and its place among the victims go."""
        ticket = self.growth.get(handle)
        if ticket is not None:
            self._remove(ticket)
        self.named.pop(handle, None)
        if not self.growth:
            self._relax()

    def requeue(self, ticket: Ticket) -> None:
        """Puts a ticket back that was taken for served, where its age belongs."""
        self.waiting[ticket.handle] = ticket
        self.waiting = OrderedDict(sorted(self.waiting.items()))
        self.busy = True

    def _mine(self, session: Session, handle: int, *, growth: bool = False) -> Ticket | None:
        if not handle:
            return None
        ticket = self.waiting.get(handle) or self.awaiting.get(handle)
        if ticket is None:
            ticket = next((t for t in self.growth.values() if t.handle == handle), None)
        if ticket is None and not 0 < handle <= self.pool.serial:
            raise self.pool.bad_handle(handle, "ticket")
        if ticket is not None and ticket.session is not session:
            raise ForeignHandle(f"ticket {handle} belongs to another session")
        if ticket is not None and ticket.sequence is not None and not growth:
            return None  # a growth's place is no new request's
        return ticket  # an ended ticket is none: the request simply queues anew

    def _remove(self, ticket: Ticket) -> None:
        if ticket.sequence is not None:
            self.growth.pop(ticket.sequence.handle, None)
            if not self.growth:
                self._relax()
        else:
            self.waiting.pop(ticket.handle, None)
            self.awaiting.pop(ticket.handle, None)
        if self.window is not None and self.window.ticket is ticket:
            self.drop_window()
        self.busy = bool(self.waiting or self.growth)

    # -- windows -----------------------------------------------------------------------------------------------

    def drop_window(self) -> None:
        """Reserved slots go back to the free runs."""
        window = self.window
        if window is None:
            return
        self.window = None
        pool = self.pool
        for start, length in window.stretches:
            pool.ledger.shift(start, length, RESERVED, FREE)
            pool.runs.give(start, length)

    def _clear(self, ticket: Ticket, now: float) -> None:
        """Plans a window for `ticket` where none is open, and sets aside what can be had of it at once."""
        if self.window is not None or (0 <= self._planned and now - self._planned < self._patience()):
            return
        if now - ticket.created < self.move_patience:
            return
        self._planned = now
        window = plan_window(self.pool, ticket)
        if window is None:
            return
        self.window = window
        pool = self.pool
        for run in [
            r for r in pool.runs.length_at if window.start - pool.runs.length_at[r] < r < window.stop
        ]:
            start = max(run, window.start)
            length = min(run + pool.runs.length_at[run], window.stop) - start
            if length > 0:
                pool.runs.take_within(run, start, length)
                pool.ledger.shift(start, length, FREE, RESERVED)
                window.hold(start, length)
        self._evict_blockers(window)

    def _evict_blockers(self, window: Window) -> None:
        """Evicts the nodes in a window's way that nobody holds, with all below them."""
        pool = self.pool
        tree = pool.tree
        left = []
        for blocker in window.blockers:
            if not tree.parent[blocker] or not _overlaps(tree.extents(blocker), window.start, window.stop):
                continue
            if tree.holds[blocker]:
                left.append(blocker)
                continue
            below = [blocker]
            for node in below:
                below.extend(tree.children(node))
            for node in reversed(below):
                length = tree.length[node]
                extents = tree.remove(node)
                pool._release(extents, length, CACHED)
                pool.evicted_tokens += length
        window.blockers = left


def whole_pages(pool: Placement, page: int) -> int:
    """Aligned pages that free and evictable slots would fill, a window's left out; O(n log n), for refusals only."""
    tree, window = pool.tree, pool.admission.window
    pool.runs.unstock()
    stretches = list(pool.runs.length_at.items())
    for node in tree.live():
        if tree.length[node] and not tree.holds[node]:
            extents = tree.extents(node)
            stretches += zip(extents[::2], extents[1::2], strict=True)
    stretches.sort()
    pages = begin = end = 0
    for start, length in stretches:
        if window is not None and start < window.stop and start + length > window.start:
            continue
        if start != end:
            pages += max(0, end // page - -(-begin // page))
            begin = start
        end = start + length
    return pages + max(0, end // page - -(-begin // page))


def _blockers(pool: Placement, start: int, stop: int) -> list[int]:
    tree = pool.tree
    return [n for n in tree.live() if tree.length[n] and _overlaps(tree.extents(n), start, stop)]


def _overlaps(extents: list[int], start: int, stop: int) -> bool:
    return any(extents[i] < stop and extents[i] + extents[i + 1] > start for i in range(0, len(extents), 2))


def plan_window(pool: Placement, ticket: Ticket) -> Window | None:
    """The stretch of `ticket.need` slots with the fewest immovable and then the fewest cached slots; O(n log n)."""
    need = ticket.need
    tree = pool.tree
    pool.runs.unstock()
    starts, lengths, owners = [], [], []
    for run, length in pool.runs.length_at.items():
        starts.append(run)
        lengths.append(length)
        owners.append(0)
    for node in tree.live():
        if tree.length[node]:
            extents = tree.extents(node)
            for i in range(0, len(extents), 2):
                starts.append(extents[i])
                lengths.append(extents[i + 1])
                owners.append(node)
    if not starts:
        return None
    order = np.argsort(np.array(starts, dtype=np.int64))
    start = np.array(starts, dtype=np.int64)[order]
    stop = start + np.array(lengths, dtype=np.int64)[order]
    owner = np.array(owners, dtype=np.int64)[order]
    held = np.frombuffer(tree.holds, dtype=np.int32)[owner] > 0
    held = held & (owner > 0)
    # A window may begin at any interval; what none covers (private, fenced, ...) is in the way as held nodes are.
    clear = np.concatenate(([0], np.cumsum(np.where(held, 0, stop - start))))
    cached = np.concatenate(([0], np.cumsum(np.where((owner > 0) & ~held, stop - start, 0))))
    begins = np.unique(np.clip(np.concatenate((start, stop - need)), pool.padding, pool.slots - need))

    def covered(total: np.ndarray, kind: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Slots of a kind in [0, at)."""
        index = np.searchsorted(start, at, side="right") - 1
        last = np.maximum(index, 0)
        inside = np.where((index >= 0) & kind[last], np.minimum(at, stop[last]) - start[last], 0)
        return np.where(index >= 0, total[last] + inside, 0)

    clearable = covered(clear, ~held, begins + need) - covered(clear, ~held, begins)
    loses = (owner > 0) & ~held
    lost = covered(cached, loses, begins + need) - covered(cached, loses, begins)
    best = int(np.lexsort((lost, need - clearable))[0])
    low = int(begins[best])
    inside = (start < low + need) & (stop > low) & (owner > 0)
    blockers = sorted({int(node) for node in owner[inside]})
    return Window(ticket, low, low + need, blockers)
