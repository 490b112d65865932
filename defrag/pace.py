"""When to move, for what, and when to let it be: plain sums over a few readings of the pool.

    share of the free memory that is        ___________ start ___________        begins above `start` and goes on until
    not in whole blocks / not in runs      /                             \\       `stop`, or until a pass brings nothing
                                      ____/_______________ stop __________\\____

A pass is all plans of one purpose until there is nothing more to plan.  It costs copies, so it must bring something:
one that made less than a hundredth of the loose memory whole is not repeated for a while, twice as long each time,
unless meanwhile much more memory has come loose; and not at all while nobody has used the pool.  The same is asked in
the midst of a pass, each time that as much has been moved as is free.  So moves end within a bounded number after the
load has: each pass ends, and but for those that bring something there is no next one.

Memory is loose when it is free and not in whole blocks, or not in runs of `run_blocks`.  A few slots of a large pool
are not worth a copy, whatever share of the free memory they are: `LEAST` of the pool is.  Nor are runs that nobody
asked for, while next to nothing is free.

A ticket that waits for one long run comes first.  But every `TICKETS_IN_A_ROW` plans for tickets one for the pool has
its turn, where that has begun, since it is what keeps later tickets from waiting.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from kvslot.defrag.view import Purpose

LEAST: Final = 1 / 1024
"""Of the pool's slots: less loose memory than that is left as it is.  A pool that eviction keeps full has no more free
than some thousandths, and holes take up a growing part of those for as long as nobody closes them."""
RUNS_FROM: Final = 1 / 24
"""Of the pool's slots: with less free memory than that no runs are made ahead of those who ask for one.  Where eviction
keeps the pool full, what it sets free is gone with the next request, and a run made of it as well."""
GAIN_LEAST: Final = 0.01
"""Of the loose memory: what a pass must make whole, to be repeated."""
REST_FIRST: Final = 1.0
REST_LAST: Final = 300.0
"""Seconds between passes that bring nothing: from, to, doubled each time."""
REST_MISSED: Final = 11.0
"""... from, where its moves found no gap: until then the planner leaves their blocks alone."""
GROWN: Final = 1.25
"""Times as much loose memory as when a rest began ends it early."""
JOIN_SECONDS: Final = 5.0
"""Between two passes over hot prefixes that lie in many extents."""
TICKETS_IN_A_ROW: Final = 4
TICKET_REST: Final = 0.05
"""Seconds before a ticket that moves could not help is looked at again, doubled each time."""
GAPLESS_SECONDS: Final = 0.5
"""Without a gap that could be used, from which on the duty cycle may be."""
FOLLOW_SECONDS: Final = 0.5
"""In which what is still to be taken note of must become less."""
ONCE_TIMES: Final = 10
"""Times as long, where somebody asked for it."""
AWAY_FIRST: Final = 1.0
AWAY_LAST: Final = 32.0
"""Seconds for which the pool is not followed where it does not: from, to, doubled each time."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator has set."""

    mode: str = "idle"  # "off", "idle", "forced"
    start: float = 0.25
    stop: float = 0.05
    run_blocks: int = 32
    duty: float = 0.25


class Reading(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What there is to be seen of a pool, in slots unless said."""

    usable: int
    block_size: int
    free: int
    in_blocks: int  # of these, in whole free blocks
    in_runs: int  # ... and in runs of `run_blocks` of them
    run_wanted: int = 0  # blocks that the oldest ticket waits for as one run; 0: none does
    waiting: bool = False  # somebody waits for memory
    scattered: int = 0  # nodes in three or more extents
    tick: int = 0  # rises with use of the pool: the same as before, and nothing has changed but by moves

    def loose(self, purpose: Purpose) -> int:
        """Free slots that are no use to it as they lie."""
        return self.free - (self.in_blocks if purpose is Purpose.FREE_BLOCKS else self.in_runs)


class Order(msgspec.Struct, frozen=True, gc=False):
    """What to plan next."""

    purpose: Purpose
    blocks: int  # of the run, for `run`
    ticket: bool = False  # for one who waits


class _Pass:
    """One purpose's hysteresis and rest."""

    __slots__ = (
        "began",
        "deferred",
        "going",
        "judged",
        "loose",
        "missed",
        "moved",
        "rest",
        "tick",
        "until",
        "why",
    )

    def __init__(self) -> None:
        self.going = False
        self.began = 0  # loose memory at the pass's begin
        self.judged = 0  # ... and when the pass was last asked what it brings
        self.moved = 0  # tokens since then
        self.missed = 0  # moves of the pass that found no gap
        self.deferred = 0  # ... and that could not begin, or be published, just then
        self.why = "brought little"
        self.loose = 0  # loose memory when the rest began
        self.rest = 0.0  # its length
        self.tick = -1  # of the pool, when a pass ended that brought little
        self.until = -math.inf


class Pace:
    """The next purpose, and whether there is any; one for each pool.  Times in seconds of any one clock."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.once = False
        self.passes = 0  # that have ended
        self.rests = 0  # of them, those that brought too little
        self.reason = "nothing has been looked at yet"
        self._free = _Pass()
        self._runs = _Pass()
        self._join = _Pass()
        self._in_a_row = 0
        self._ticket_until = -math.inf
        self._ticket_rest = 0.0
        self.once_left: list[Purpose] = []

    def begin_once(self) -> None:
        """Goes through every purpose once, to its end, whatever the thresholds and rests say."""
        self.once = True
        self.once_left = [Purpose.FREE_BLOCKS, Purpose.RUN, Purpose.JOIN]

    def end_once(self) -> None:
        """What was asked for once cannot be had."""
        self.once = False
        self.once_left = []

    def reset(self) -> None:
        """Begins afresh: no pass under way, no rest kept."""
        self._free, self._runs, self._join = _Pass(), _Pass(), _Pass()
        self.once = False
        self.once_left = []
        self._in_a_row = 0
        self._ticket_until, self._ticket_rest = -math.inf, 0.0

    # -- what next ---------------------------------------------------------------------------------------------

    def worth(self, reading: Reading, now: float) -> bool:
        """Whether `order` would give one: to be asked once in a while, while nothing moves."""
        return self._choose(reading, now, look=True) is not None

    def order(self, reading: Reading, now: float) -> Order | None:
        """What to plan now; None: rest, `reason` says why, and `wake` when to ask again."""
        return self._choose(reading, now, look=False)

    def _choose(self, reading: Reading, now: float, *, look: bool) -> Order | None:
        rules = self.rules
        if rules.mode == "off" and not self.once:
            self.reason = "switched off"
            return None
        wanted = reading.run_wanted
        ticket = wanted > 0 and now >= self._ticket_until
        others = self._background(reading, now, look=look)
        if ticket and (others is None or self._in_a_row < TICKETS_IN_A_ROW):
            if not look:
                self._in_a_row += 1
            self.reason = f"a ticket waits for {wanted} blocks in one run"
            return Order(Purpose.RUN, wanted, True)
        if others is not None and not look:
            self._in_a_row = 0
        return others

    def _background(self, reading: Reading, now: float, *, look: bool) -> Order | None:
        rules = self.rules
        if self.once:
            if self.once_left:
                self.reason = "asked to go on to rest"
                return Order(self.once_left[0], rules.run_blocks)
            if not look:
                self.once = False
            if rules.mode == "off":
                self.reason = "switched off"
                return None
        self.reason = "what is free lies together"
        for purpose, each in ((Purpose.FREE_BLOCKS, self._free), (Purpose.RUN, self._runs)):
            if self._starts(reading, purpose, each, now, look=look):
                return Order(purpose, rules.run_blocks)
        each = self._join
        if reading.scattered and now >= each.until and each.tick != reading.tick:
            if not look and not each.going:
                each.going = True
                each.moved = 0
            self.reason = f"{reading.scattered} prefixes lie in many extents"
            return Order(Purpose.JOIN, rules.run_blocks)
        return None

    def _starts(self, reading: Reading, purpose: Purpose, each: _Pass, now: float, *, look: bool) -> bool:
        rules = self.rules
        loose = reading.loose(purpose)
        if purpose is Purpose.RUN:
            least_free = max(rules.run_blocks * reading.block_size, RUNS_FROM * reading.usable)
            if reading.free < least_free:
                loose = 0
        share = loose / reading.free if reading.free else 0.0
        least = max(LEAST * reading.usable, reading.block_size)
        what = "whole blocks" if purpose is Purpose.FREE_BLOCKS else f"runs of {rules.run_blocks} blocks"
        if each.going:
            if share > rules.stop and loose >= least:
                self.reason = f"{100 * share:.0f} % of the free memory is not in {what}"
                return True
            if not look:
                self._end(each, loose, reading, now)
            return False
        if share <= rules.start or loose < least:
            return False
        if each.tick == reading.tick:
            self.reason = f"at rest: nothing has changed since the last pass for {what}"
            return False
        if now < each.until and loose < GROWN * each.loose:
            self.reason = f"for {each.until - now:.1f} s: the last pass for {what} {each.why}"
            return False
        if not look:
            each.going = True
            each.began = each.judged = loose
            each.moved = 0
        self.reason = f"{100 * share:.0f} % of the free memory is not in {what}"
        return True

    def wake(self, now: float) -> float:
        """Seconds until time alone may make `worth` true; infinite where only changes of the pool can."""
        until = [each.until for each in (self._free, self._runs, self._join) if each.until > now]
        if self._ticket_until > now:
            until.append(self._ticket_until)
        return min(until) - now if until else math.inf

    # -- what came of it ---------------------------------------------------------------------------------------

    def planned(self, order: Order, moves: int, reading: Reading, now: float) -> None:
        """A plan was made for `order`, of so many moves."""
        if moves:
            if order.ticket:
                self._ticket_rest = 0.0
            return
        if order.ticket:
            self._ticket_rest = min(max(TICKET_REST, 2 * self._ticket_rest), REST_LAST)
            self._ticket_until = now + self._ticket_rest
            return
        each = self._pass(order.purpose)
        if self.once and self.once_left and self.once_left[0] is order.purpose:
            del self.once_left[0]
            self.passes += 1
            return
        if order.purpose is Purpose.JOIN:
            self.passes += 1
            each.rest = JOIN_SECONDS if each.moved else min(max(JOIN_SECONDS, 2 * each.rest), REST_LAST)
            each.tick = reading.tick
            each.until = now + each.rest
            each.going = False
        else:
            self._end(each, reading.loose(order.purpose), reading, now)

    def moved(
        self, order: Order, tokens: int, reading: Reading, now: float, *, missed: int = 0, deferred: int = 0
    ) -> None:
        """So many tokens of a plan for `order` have found new places; some found no gap, or could not begin."""
        if order.ticket:
            return
        each = self._pass(order.purpose)
        each.moved += tokens
        each.missed += missed
        each.deferred += deferred
        if order.purpose is Purpose.JOIN or self.once or not each.going:
            return
        if each.moved >= max(reading.free, reading.block_size):
            loose = reading.loose(order.purpose)
            if each.judged - loose < GAIN_LEAST * max(each.judged, 1):
                self._end(each, loose, reading, now, little=True)
            else:
                each.judged = loose
                each.moved = 0

    def _end(self, each: _Pass, loose: int, reading: Reading, now: float, *, little: bool = False) -> None:
        """The pass is over; what it brought decides how soon there may be another."""
        self.passes += 1
        each.going = False
        each.loose = loose
        each.tick = -1
        if little or each.began - loose < GAIN_LEAST * max(each.began, 1):
            self.rests += 1
            # Moves that did not come about would have brought something: they are tried again though nobody used the
            # pool.
            failed = each.missed or each.deferred
            first = REST_MISSED if failed else REST_FIRST
            each.rest = min(max(first, 2 * each.rest), REST_LAST)
            if not failed:
                each.tick = reading.tick
        else:
            each.rest = REST_FIRST
        each.why = "brought little"
        if each.missed or each.deferred:
            each.why = "found no gap" if each.missed else "had moves that could not begin"
        each.missed = each.deferred = 0
        each.until = now + each.rest

    def _pass(self, purpose: Purpose) -> _Pass:
        if purpose is Purpose.FREE_BLOCKS:
            return self._free
        return self._runs if purpose is Purpose.RUN else self._join

    # -- when --------------------------------------------------------------------------------------------------

    def at_duty(self, reading: Reading, now: float, gap_last: float) -> bool:
        """Whether copies may run outside gaps, for `rules.duty` of the time.  `gap_last`: when a gap was last used.

        Always where forced or asked to go on to rest; else where memory is short, and no gap came that could be used.
        """
        if self.once or self.rules.mode == "forced":
            return True
        return (
            self.rules.mode == "idle"
            and (reading.waiting or bool(reading.run_wanted))
            and now - gap_last >= GAPLESS_SECONDS
        )


class Following:
    """Whether what changes in a pool can be taken note of as fast as it changes; times in seconds of any one clock.

    Clients that fill and empty a pool some thousand times a second leave no time for that, and what was planned would
    not be there any more.  Then nothing is followed for a while, which costs nobody anything, and it is tried anew.
    """

    def __init__(self) -> None:
        self.until = -math.inf  # when the pool may be followed again
        self._away = 0.0
        self._least = self._since = 0.0
        self._built = False

    def begin(self, now: float) -> None:
        """The planner begins to listen."""
        self._least, self._since, self._built = math.inf, now, False

    def fed(
        self, left: int, built: bool, now: float, *, again: bool = False, patience: float = FOLLOW_SECONDS
    ) -> bool:
        """So many changes are left, all there was before being known (`built`) or not; False: it is let be.

        `again`: since the last look there was something else to do, so the seconds begin anew.
        """
        if not left or left < self._least or built != self._built or again:
            self._least, self._since, self._built = left, now, built
        if now - self._since <= patience:
            return True
        self._away = min(max(AWAY_FIRST, 2 * self._away), AWAY_LAST)
        self.until = now + self._away
        return False

    def planned(self) -> None:
        """All was known, and a plan was made."""
        self._away = 0.0


def pause(copied_seconds: float, duty: float) -> float:
    """How long to let be after copying for so long, so that copies take `duty` of the time."""
    return copied_seconds * (1 - duty) / duty
