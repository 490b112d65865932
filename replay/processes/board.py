"""What the processes of one replay share: their virtual clocks, who has which session, and what has happened.

One page of memory (a sealed-off memfd, no name, nothing to clean up) and one eventfd each, its bell.

    participant   0 .. n-1 the clients, n the parent, who samples
    clock         what its owner will not act before; the others' clocks say how far it may go itself
    window        nobody acts at a time more than a window past the slowest clock
    news          a count each of what it has released, published, dealt: only its owner writes it, all compare the sums

Rules that exclude a deadlock.  Whoever has something planned has a finite clock, and the one with the lowest clock may
always go on.  Whoever has nothing planned, since it waits for room, for a prefix or for another's answer, sets its
clock to infinity and holds nobody back; news rings its bell.  When the last one that acts has become idle too and no
news is to come, whoever waits is told so (`stranded`).  The parent takes the clock of a dead one away.

No lock but for dealing out sessions; every other word has one writer.  A bell that is missed, since two processes
looked past each other, costs NAP_S once.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

WINDOW_S: Final = 0.25
"""Simulated seconds that one process may be ahead of another: as far as one step of the sampling grid."""
NAP_S: Final = 0.05

_WORDS: Final = 32  # of a participant: two of them never share a cache line
_HEAD: Final = 32
_CURSOR, _STOP, _IN_SYSTEM = range(3)
_CLOCK, _NEED, _NEWS_AT, _FIRST_AT, _GIVEN_AT = range(5)
(
    _STATE, _ALERT, FREED, WRITTEN, DEALT, ADMITTED, PROMPT, HIT, REFUSALS, PSEUDO, PREEMPTED, FINISHED, PAINTED,
    VERIFIED, _GIVEN, _JOBS, _READY,
) = range(8, 25)  # fmt: skip
"""Words of a participant that count; the parent reads them while things go on."""
ACTS, IDLE, ENDED, DEAD = range(4)


class Stopped(Exception):
    """The parent has told everybody to end."""


class Board:
    """The shared page as one participant sees it."""

    def __init__(
        self,
        descriptor: int,
        bells: list[int],
        me: int,
        sessions: int,
        requests: int,
        window_s: float = WINDOW_S,
    ) -> None:
        """`bells` has one eventfd a participant; `me` is this one's number."""
        self.descriptor = descriptor
        self.bells = bells
        self.me = me
        self.window_s = window_s
        self.others = [each for each in range(len(bells)) if each != me]
        self._map = mmap.mmap(descriptor, size_bytes(len(bells), sessions, requests))
        whole = memoryview(self._map)
        words = (_HEAD + len(bells) * _WORDS) * 8
        self._times = whole[:words].cast("d")
        self._counts = whole[:words].cast("q")
        self.owner = whole[words : words + sessions]
        """Per session: 0 nobody yet, else the client's number + 1."""
        self.done = whole[words + sessions : words + sessions + requests]
        """Per request: 1 once it has finished or was dropped."""
        self.granted = whole[words + sessions + requests : words + sessions + 2 * requests]
        """Per request (closed loop): 1 once it may run."""
        self._base = _HEAD + me * _WORDS
        self._bases = [_HEAD + each * _WORDS for each in range(len(bells))]
        self._other_bases = [self._bases[each] for each in self.others]
        self._poll = select.poll()
        self._poll.register(bells[me], select.POLLIN)

    def close(self) -> None:
        """Ends the mapping."""
        for view in (self._times, self._counts, self.owner, self.done, self.granted):
            view.release()
        self._map.close()

    # -- time --------------------------------------------------------------------------------------------------

    def promise(self, at: float) -> None:
        """This participant does nothing before `at`."""
        times = self._times
        mine = self._base + _CLOCK
        before = times[mine]
        times[mine] = at
        for other in self.others:
            if before < times[self._bases[other] + _NEED] <= at:  # never, where it is not a number
                self.ring(other)

    def turn_now(self, at: float) -> bool:
        """Whether this participant, which acts at `at` next, may do so now."""
        self.promise(at)
        return not self._behind(at - self.window_s)

    def turn(self, at: float, *, alert: bool, seen: int, given: int) -> bool:
        """Waits until this participant may act at `at`.

        False: it was given something to do that `given` does not count, or there is news (`alert`) beyond `seen`."""
        need = at - self.window_s
        counts, times, base = self._counts, self._times, self._base
        times[base + _NEED] = need
        counts[base + _ALERT] = alert
        try:
            while self._behind(need):
                if self.given() != given or (alert and self.news() != seen):
                    return False
                self.nap(NAP_S)
        finally:
            times[base + _NEED] = math.nan
            counts[base + _ALERT] = 0
        return True

    def idle(self, seconds: float, *, seen: int, given: int) -> bool:
        """Waits for news with nothing planned, holding nobody back; false where none came in `seconds`."""
        counts, base = self._counts, self._base
        counts[base + _ALERT] = 1
        counts[base + _STATE] = IDLE
        self.promise(math.inf)
        try:
            if self.news() == seen and self.given() == given:
                self.nap(seconds)
            if self.news() == seen and self.given() == given:
                return False
            self.promise(self.told_at())
            return True
        finally:
            counts[base + _STATE] = ACTS
            counts[base + _ALERT] = 0

    def end(self) -> None:
        """This participant does nothing any more."""
        self._counts[self._base + _STATE] = ENDED
        self.promise(math.inf)

    def bury(self, client: int) -> None:
        """The parent's word that a client's process is no more."""
        base = self._bases[client]
        self._counts[base + _STATE] = DEAD
        self._times[base + _CLOCK] = math.inf
        self._times[base + _NEED] = math.nan
        with self.dealing():
            self._counts[_IN_SYSTEM] -= self._counts[base + _JOBS]
            self._counts[base + _JOBS] = 0
        self.tell(FREED, self.slowest(), everybody=True)

    def stranded(self) -> bool:
        """Whether no other client acts."""
        return all(
            self._counts[self._bases[other] + _STATE] != ACTS
            for other in self.others
            if other != len(self.bells) - 1
        )

    def slowest(self) -> float:
        """The lowest clock of the others."""
        times = self._times
        return min(times[self._bases[other] + _CLOCK] for other in self.others)

    def clock(self, of: int) -> float:
        """One participant's clock."""
        return self._times[self._bases[of] + _CLOCK]

    def state(self, of: int) -> int:
        """One participant's state."""
        return self._counts[self._bases[of] + _STATE]

    def await_(self, need: float) -> None:
        """From now on a clock that comes to `need` rings (the parent, between two samples)."""
        self._times[self._base + _NEED] = need

    def _behind(self, need: float) -> bool:
        times = self._times
        return any(times[base + _CLOCK] < need for base in self._other_bases)

    # -- news --------------------------------------------------------------------------------------------------

    def tell(self, what: int, now: float, *, everybody: bool = False) -> None:
        """Something was released, published or dealt: whoever waits for that looks again."""
        counts, times = self._counts, self._times
        times[self._base + _NEWS_AT] = now
        counts[self._base + what] += 1
        for other in self.others:
            if everybody or counts[self._bases[other] + _ALERT]:
                self.ring(other)

    def news(self) -> int:
        """How much news the others have told."""
        counts = self._counts
        total = 0
        for other in self.others:
            base = self._bases[other]
            total += counts[base + FREED] + counts[base + WRITTEN] + counts[base + DEALT]
        return total

    def sum(self, what: int) -> int:
        """A count over the others."""
        counts = self._counts
        return sum(counts[self._bases[other] + what] for other in self.others)

    def news_at(self) -> float:
        """When the last news of anybody was."""
        return max(self._times[self._bases[other] + _NEWS_AT] for other in self.others)

    def told_at(self) -> float:
        """When the last news of anybody was, or the last thing was given to this participant."""
        return max(self.news_at(), self._times[self._base + _GIVEN_AT])

    def add(self, what: int, amount: int) -> None:
        """Counts something of this participant's."""
        self._counts[self._base + what] += amount

    def count(self, of: int, what: int) -> int:
        """What a participant has counted."""
        return self._counts[self._bases[of] + what]

    def begin(self, now: float) -> None:
        """This participant's first admission."""
        self._times[self._base + _FIRST_AT] = now

    def first_at(self) -> float:
        """The first admission of anybody; infinity: none yet."""
        return min(self._times[base + _FIRST_AT] for base in self._bases)

    # -- dealing -----------------------------------------------------------------------------------------------

    @property
    def cursor(self) -> int:
        """Requests of the trace that have been looked at (closed loop)."""
        return self._counts[_CURSOR]

    @cursor.setter
    def cursor(self, value: int) -> None:
        self._counts[_CURSOR] = value

    @contextmanager
    def dealing(self) -> Iterator[None]:
        """Nobody else deals meanwhile.  The kernel's lock: it goes with a process that dies holding it."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    @property
    def in_system(self) -> int:
        """Requests that wait or run, of all clients (closed loop)."""
        return self._counts[_IN_SYSTEM]

    def least(self) -> int:
        """The client with the fewest of them, the dead left out."""
        counts = self._counts
        bases = self._bases[:-1]
        alive = [each for each, base in enumerate(bases) if counts[base + _STATE] != DEAD]
        return min(alive, key=lambda each: counts[bases[each] + _JOBS])

    def grant(self, request: int, client: int) -> None:
        """The request may run (under `dealing`, and before the cursor passes it: its client looks without the lock)."""
        base = self._bases[client]
        self.granted[request] = 1
        self._counts[_IN_SYSTEM] += 1
        self._counts[base + _JOBS] += 1

    def ready(self, count: int) -> None:
        """So many requests of this client, passed over before, wait for nothing but a place in the system."""
        self._counts[self._base + _READY] = count

    def pass_on(self, now: float) -> bool:
        """A place is free and another client has a request that was passed over: it is told, as that comes first."""
        counts = self._counts
        for other in self.others:
            base = self._bases[other]
            if counts[base + _READY] and counts[base + _STATE] != DEAD:
                self.give(other, now)
                return True
        return False

    def give(self, client: int, now: float) -> None:
        """There is something to do for a client: it is told (under `dealing`)."""
        base = self._bases[client]
        self._times[base + _GIVEN_AT] = now
        self._counts[base + _GIVEN] += 1
        self.ring(client)

    def leave(self) -> None:
        """One of this client's requests has left the system (under `dealing`)."""
        self._counts[_IN_SYSTEM] -= 1
        self._counts[self._base + _JOBS] -= 1

    def given(self) -> int:
        """How often another client has given this one something to do."""
        return self._counts[self._base + _GIVEN]

    # -- bells -------------------------------------------------------------------------------------------------

    def ring(self, other: int) -> None:
        """Wakes a participant."""
        os.eventfd_write(self.bells[other], 1)

    def nap(self, seconds: float) -> None:
        """Sleeps until somebody rings, or so long.  Stopped where the parent wants everybody to end."""
        if self._poll.poll(int(seconds * 1000)):
            os.eventfd_read(self.bells[self.me])
        if self._counts[_STOP]:
            raise Stopped

    def stop(self) -> None:
        """Everybody is to end."""
        self._counts[_STOP] = 1
        for other in self.others:
            self.ring(other)

    @property
    def stopped(self) -> bool:
        """Whether everybody is to end."""
        return bool(self._counts[_STOP])

    def clear(self) -> None:
        """As it is before anybody has begun."""
        for base in self._bases:
            self._times[base + _NEED] = math.nan
            self._times[base + _FIRST_AT] = math.inf


def size_bytes(participants: int, sessions: int, requests: int) -> int:
    """Bytes that a board takes."""
    return (_HEAD + participants * _WORDS) * 8 + sessions + 2 * requests


def make(clients: int, sessions: int, requests: int, window_s: float = WINDOW_S) -> Board:
    """A new board, seen by the parent; its descriptors are to be closed by `unmake`."""
    descriptor = os.memfd_create("kvslot-replay", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes(clients + 1, sessions, requests))
    bells = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(clients + 1)]
    board = Board(descriptor, bells, clients, sessions, requests, window_s)
    board.clear()
    return board


def unmake(board: Board) -> None:
    """Gives back what `make` took."""
    board.close()
    for descriptor in (board.descriptor, *board.bells):
        os.close(descriptor)
