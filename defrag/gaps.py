"""When may a copy run: how long the engines will stay idle, told from how long they did so before.

    engine A   ====step====|.....................|====step====|...........
    engine B   ..|==step==|......................................|==step==
                            ^ began with A's end  ^ a step begins: if a copy runs now, the step has met it
                            |<------- gap ------->|

A gap is when every engine that is not stalled is idle.  A copy that runs during [t, t + c) is met if a step begins
within; the share of step begins that meet one shall be `share` (1 %), and as much of the gaps as possible be used.

What maximises that is a threshold on the *hazard*, the rate at which steps begin now given that none has so far: each
moment of idle time has one price, the chance that a step begins in it, and the cheapest are bought first, whichever
gap they belong to (Neyman and Pearson's lemma).  A timeout can only buy what comes late in a gap, a prediction of the
gap's length only what comes early.  A threshold on the hazard buys both: what comes before the shortest of the gaps
between decode steps, and what comes after an engine has been idle for longer than those.

*Order.*  For each engine the hazard is estimated by age on a logarithmic scale (64 bins an octave), as in a life
table: of the gaps that reached a bin, which share ended in it.  Counts fade.  They are kept for all engines together,
for the engine, and for the engine by what came before the gap: the lengths of the previous gap and of the step between
(prefill, decode, the first after a night).  More telling counts lean on less telling ones where they have seen little,
octave by octave, and within an octave half by half (a Polya tree).  Four families of such counts stand side by side:
with and without what came before, and relative to a slow and a fast running mean of the engine's short gaps, which
follow a batch that grows.  In each octave of age they are mixed by how well each has told it of late.  Hazards of
several engines add up: whichever begins first ends the gap.

*Level.*  The threshold is about the `share` quantile of the hazards at which earlier steps did begin, so that, were the
future like the past, that share of begins falls into what is bought, however wrong the estimates are (conformal
prediction).  Every begin tells, whether a copy ran or not.  What was met beyond the share, or short of it, is a credit
that moves the threshold until it is made up for, the more gently the more steps have been seen (chance alone makes the
credit wander with the square root of their number), and in debt sooner than in surplus.  Two ways to move it are
looked at, and the higher threshold holds: another share's quantile, which is never off by much where the hazards lie
close together, and another price, which stays where it is worth while between the hazards of short gaps and of nights,
where a quantile would fall from one to the other.

Pure: time comes in with the events, in seconds of any clock that does not jump.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SHARE: Final = 0.01
"""Of the steps that may begin while a copy runs."""
MISSED_MOST: Final = 1 << 20
"""Steps that a page may say were missed between two looks: what is beyond is nonsense, and not counted."""
LEAST_S: Final = 80e-6
"""A chunk of 256 KiB takes that long at 3.3 GB/s; budgets are whole multiples of it."""
MOST_S: Final = 0.25
"""Of one answer; who has used it up asks again."""
AHEAD_S: Final = 2e-3
"""How far ahead is planned at the least; otherwise four times the present age."""

# Ages and lengths, on a logarithmic scale.
DEPTH: Final = 6
BINS_OCTAVE: Final = 1 << DEPTH
OCTAVES: Final = 27
"""Up to 18 minutes.  What is older stays in the last bin, whose hazard goes on falling with age."""
BINS: Final = BINS_OCTAVE * OCTAVES
FLOOR_S: Final = 8e-6
"""Where the scale begins: no chunk fits into what is shorter."""
RATIO: Final = 2.0 ** (1 / BINS_OCTAVE)
EDGES: Final[Floats] = np.asarray(FLOOR_S * RATIO ** np.arange(BINS + 1), dtype=np.float64)
OCTAVE_EDGES: Final = np.arange(0, BINS + 1, BINS_OCTAVE)
CENTRE: Final = 6 * BINS_OCTAVE + BINS_OCTAVE // 2
"""Where a relative table has the running mean: short gaps lie close to it, long ones far above."""
KERNEL: Final[Floats] = np.array([1.0, 2.0, 1.0]) / 4.0
"""How an observed length is spread over its bin and the neighbours."""
SPREAD: Final = len(KERNEL) // 2

# What is known of an engine.
COUNT_GAPS: Final = 4096.0
"""Gaps after which a count has faded to 1/e."""
LEAN: Final = 16.0
"""Most weight of less telling counts, in gaps that reached an octave."""
LEAN_HALVES: Final = 8.0
"""The same within an octave, in gaps that ended in what is halved."""
PRIOR_ENDED: Final = 0.3
"""What is believed of an octave that no gap has reached: three in thirteen end there, with the weight of one gap."""
PRIOR_REACHED: Final = 1.3
SCORE_FADE: Final = 0.99
"""Of how well a family told an octave's survival, at each gap that reached it."""
CONTEXTS_MOST: Final = 64
"""Tables of one family: 41 KB each with the curve.  The one with the least weight goes."""
PENDING_MOST: Final = 256
"""Gaps that a table has been told of and has not added up: nobody looks at it for most of them."""

# The threshold.
LEVEL_BINS: Final = 16  # an octave of hazard
LEVEL_FLOOR: Final = 2.0**-16  # per second
LEVEL_SPAN: Final = 40 * LEVEL_BINS
LEVEL_FIRST: Final = 200.0
"""Steps that are remembered at the beginning, when hazards are told poorly and are soon told better ..."""
LEVEL_REST: Final = 0.25
"""... of all the steps later ..."""
LEVEL_GAPS: Final = 20_000.0
"""... and at the most."""
LEVEL_PARTS: Final = (0.33, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0)
"""The threshold is the geometric mean of the quantiles at these parts of the share: where hazards lie far apart around
it, as between those of long gaps and of short ones, one quantile alone jumps from one side to the other."""
LEVEL_EVERY: Final = 8
"""Steps for which a threshold holds."""
LEVEL_START: Final = 0.3
"""Hazard per second up to which copies run before anything is known."""
LEVEL_LOAN: Final = 1.0
"""Steps that may be met before others have earned it."""
LEVEL_MARGIN: Final = 3.0
"""So many times what the loan needs is put there, so that the first few steps do not move the threshold away."""
CREDIT_RESERVE: Final = 1.0
"""Steps: of what the share allows, kept back."""
CREDIT_SLOW: Final = 0.6
"""The scale of the credit: this times the root of the steps that might have been met so far ..."""
CREDIT_SLOWEST: Final = 8.0
"""... at least 1 and at most this many steps; ..."""
CREDIT_DEBT: Final = 1.5
"""... and of a debt, at most this many."""
CREDIT_CAP: Final = 2.0
"""What a time without a usable gap saves up, in scales beyond the reserve."""
QUANTILE_GAIN: Final = 0.5
"""A credit of one scale multiplies the share, whose quantile is looked at, by e to this ..."""
QUANTILE_LOW: Final = 0.2
"""... down to this part: a debt is paid back slowly, since most idle time lies in few long gaps, and one missed for
the sake of the last ten minutes' bad luck is dear ..."""
QUANTILE_HIGH: Final = 3.0
"""... and up to this part."""
PRICE_LOW: Final = 0.02
"""The same credit multiplies the hazard at the share's own quantile by e, down to this part ..."""
PRICE_HIGH: Final = 10.0
"""... and up to this part."""


class GapStatistics(msgspec.Struct, frozen=True):
    """What `GapPredictor.statistics` tells; counts since it was made."""

    engines: int
    stalled: int
    idle: bool
    """A gap goes on."""
    steps: int
    """Steps that began."""
    gaps: int
    """Gaps that ended."""
    met: int
    """Steps that began within an answered budget."""
    threshold: float
    """Hazard per second up to which copies may run."""
    idle_s: float
    """Sum of the gaps that ended."""
    granted_s: float
    """Of those, what was answered as budget."""
    surprise: float
    """Mean factor between an ended gap and its median as predicted at its beginning: 1 would be exact."""


class _Table:
    """How many gaps ended in which bin of age."""

    __slots__ = ("_bins", "_counts", "_weights", "weight")

    def __init__(self) -> None:
        self._counts: Floats = np.zeros(BINS)
        self._bins: list[int] = []
        self._weights: list[float] = []
        self.weight = 0.0

    @property
    def counts(self) -> Floats:
        """Weight of the gaps that ended in each bin."""
        if self._bins:
            at = np.clip(self._bins, SPREAD, BINS - 1 - SPREAD)
            weights = np.array(self._weights)
            for offset, part in enumerate(KERNEL.tolist(), -SPREAD):
                self._counts += np.bincount(at + offset, weights * part, BINS)
            self._bins.clear()
            self._weights.clear()
        return self._counts

    def add(self, at: int, weight: float) -> None:
        """A gap ended in bin `at`."""
        self._bins.append(at)
        self._weights.append(weight)
        self.weight += weight
        if len(self._bins) >= PENDING_MOST:
            _ = self.counts

    def scale(self, factor: float) -> None:
        self._counts = self.counts * factor
        self.weight *= factor


def _hazards(shells: list[Floats]) -> Floats:
    """Chance to end in each bin, for those that reached it, from disjoint counts, the most telling last.

    Octaves first: in each, of the gaps that reached it, how many ended in it.  Then every octave is halved, and its
    halves, down to single bins: of those that ended in it, how many did in the first half.  Wherever the more telling
    counts have seen little, the less telling ones stand in, with a weight of `LEAN` gaps at the most; where all have
    seen nothing, one octave is as good as the next, and both halves of it are.  So a sharp edge among thousands of
    gaps is seen sharply, and three gaps of some seconds make no island of safety between them.
    """
    ended: Floats = np.full(OCTAVES, PRIOR_ENDED)
    reached: Floats = np.full(OCTAVES, PRIOR_REACHED)
    first = [np.full(OCTAVES << depth, 0.5) for depth in range(DEPTH)]
    whole = [np.full(OCTAVES << depth, 1.0) for depth in range(DEPTH)]
    for counts in shells:
        level = counts
        sums = [level]
        for _ in range(DEPTH):
            level = level[0::2] + level[1::2]
            sums.append(level)
        keep = np.minimum(1.0, LEAN / reached)
        ended = keep * ended + level
        reached = keep * reached + np.cumsum(level[::-1])[::-1]
        for depth in range(DEPTH):
            below, above = sums[DEPTH - depth - 1], sums[DEPTH - depth]
            keep = np.minimum(1.0, LEAN_HALVES / whole[depth])
            first[depth] = keep * first[depth] + below[0::2]
            whole[depth] = keep * whole[depth] + above
    part: Floats = np.ones(OCTAVES)
    for depth in range(DEPTH):
        share = first[depth] / whole[depth]
        finer: Floats = np.empty(len(part) * 2)
        finer[0::2] = part * share
        finer[1::2] = part * (1.0 - share)
        part = finer
    chance = np.minimum(ended / reached, 1 - 1e-6)
    parts = part.reshape(OCTAVES, BINS_OCTAVE)
    before = np.cumsum(parts, axis=1) - parts
    out: Floats = (chance[:, None] * parts / (1.0 - chance[:, None] * before)).reshape(BINS)
    return np.minimum(np.maximum(out, 1e-12), 1 - 1e-6)


class _Curve:
    """What one family of tables says in one context, by bin: chance to end in it, log chance to reach it."""

    __slots__ = ("chance", "due", "reach")

    def __init__(self, chance: Floats, due: float) -> None:
        self.chance = chance
        self.reach: Floats = np.zeros(BINS)
        np.cumsum(np.log1p(-chance[:-1]), out=self.reach[1:])
        self.due = due
        """When the leaf's weight has come to this, the curve is made anew."""


class _Family:
    """Tables of one way to count ages: absolute, or relative to a running mean."""

    __slots__ = ("curves", "gain", "mean", "placed", "score", "tables")

    def __init__(self, gain: float, placed: bool) -> None:
        """`gain` of the running mean; 0: ages are absolute.  `placed`: what came before the gap is looked at."""
        self.gain = gain
        self.placed = placed
        self.score: Floats = np.zeros(OCTAVES)  # log likelihood of late, by octave of age
        self.mean = 0.0  # in bins
        self.tables: dict[tuple[int, ...], _Table] = {}
        self.curves: dict[tuple[int, ...], _Curve] = {}

    def room(self, key: tuple[int, ...]) -> _Table:
        """A table for a context that had none."""
        if len(self.tables) >= CONTEXTS_MOST:
            least = min(self.tables, key=lambda each: self.tables[each].weight)
            del self.tables[least]
            self.curves.pop(least, None)
        table = self.tables[key] = _Table()
        return table

    @property
    def shift(self) -> int:
        """What is added to a bin of age to find its bin in the tables."""
        return CENTRE - round(self.mean) if self.gain else 0


def _bin(seconds: float) -> int:
    """The bin of a length or an age."""
    if seconds < EDGES[1]:
        return 0
    return min(int(math.log2(seconds / FLOOR_S) * BINS_OCTAVE), BINS - 1)


class _Engine:
    """One engine's history, and where it is now."""

    __slots__ = (
        "began", "busy", "ended", "families", "gap", "stalled", "step", "steps", "told", "weight",
    )  # fmt: skip

    def __init__(self, at: float, kinds: tuple[tuple[float, bool], ...]) -> None:
        self.busy = False
        self.stalled = False
        self.began = at
        self.ended = at
        self.gap = -1  # bin of the last gap; -1: none yet
        self.step = -1  # bin of the last step
        self.families = [_Family(gain, placed) for gain, placed in kinds]
        self.weight = 1.0
        self.told: list[tuple[Floats, _Curve, int]] | None = None
        self.steps = 0


class GapPredictor:
    """Where in time copies may run.  One engine is one session that steps; it is known by any number.

    Feed it with `joined`, `began`, `ended` (or `seen`, which takes what a session page says), `stalled`, `forget`;
    ask it `budget` and `next`.  Times must not run backwards by more than the reading of a clock may differ.
    """

    __slots__ = (
        "_asked", "_busy", "_credit", "_engines", "_gaps", "_granted_s", "_idle_s", "_least", "_level", "_level_due",
        "_level_weight",
        "_met", "_most", "_plan", "_since", "_share", "_steps", "_surprise", "_threshold", "_until", "_roots",
        "_root_weight",
    )  # fmt: skip

    kinds: tuple[tuple[float, bool], ...] = ((0.0, False), (0.0, True), (0.05, True), (0.3, True))

    def __init__(self, share: float = SHARE, least: float = LEAST_S, most: float = MOST_S) -> None:
        """`share` of step begins may meet a copy; budgets are from `least` to `most` seconds."""
        if not 0 < share < 1:
            raise ValueError(f"share {share}: between 0 and 1")
        if not 0 < least <= most:
            raise ValueError(
                f"budgets from {least} to {most} s: the least must be above 0, and not above the most"
            )
        self._share = share
        self._least = least
        self._most = most
        self._engines: dict[int, _Engine] = {}
        self._busy = 0  # engines that are busy and not stalled
        self._since = -math.inf  # since when all are idle
        self._roots = [_Table() for _ in self.kinds]
        self._root_weight = 1.0
        # Steps by the hazard at which they began; the last counts those that no copy could meet.
        self._level: Floats = np.zeros(LEVEL_SPAN + 1)
        self._level_weight = 1.0
        self._level_due = 0
        self._level[_level(LEVEL_START)] += LEVEL_MARGIN * LEVEL_LOAN
        self._level[-1] += LEVEL_LOAN * (1.0 / share - 1.0)
        self._credit = 0.0  # steps that may be met, by what has been seen, less those that were
        self._asked = False
        self._threshold = LEVEL_START
        self._plan: tuple[float, float, list[tuple[float, float]]] | None = None
        self._until = -math.inf
        self._steps = self._gaps = self._met = 0
        self._idle_s = self._granted_s = self._surprise = 0.0

    # -- events -------------------------------------------------------------------------------------------------

    def joined(self, engine: int, at: float) -> None:
        """A new engine is there, idle; nothing happens to a known one."""
        if engine not in self._engines:
            self._engines[engine] = _Engine(at, self.kinds)
            self._plan = None
            if self._busy == 0:
                self._since = max(self._since, at)

    def began(self, engine: int, at: float) -> None:
        """A step of `engine` began.  An engine not heard of joins."""
        self.joined(engine, at)
        one = self._engines[engine]
        if not one.busy:
            self._begin(one, at, known=True)

    def ended(self, engine: int, at: float) -> None:
        """The step of `engine` ended."""
        self.joined(engine, at)
        one = self._engines[engine]
        if not one.busy:
            return
        one.busy = False
        one.step = _bin(at - one.began)
        one.told = None
        one.ended = at
        if not one.stalled:
            self._busy -= 1
            if self._busy == 0:
                self._since = at
        self._plan = None

    def seen(self, engine: int, steps: int, began: float, ended: float, busy: bool) -> None:
        """What a session page says: `steps` begun so far, when the last one began and the last one ended.

        Pages are looked at now and then.  Of steps in between nothing is known, and nothing is learnt of the gaps
        around them; an engine that hands on a step before the last one has ended is busy all that time.
        """
        one = self._engines.get(engine)
        if one is None:
            self.joined(engine, ended)
            one = self._engines[engine]
            one.steps = steps
            if busy:
                self._begin(one, began, known=False)
            return
        missed = max(steps - one.steps - 1, 0)
        one.steps = max(steps, one.steps)
        if began <= one.began:  # no step since, or more of the same
            if one.busy and not busy:
                self.ended(engine, ended)
            return
        known = not missed or busy  # of a step that goes on, the page tells the gap before it
        if one.busy:
            known = busy
            self.ended(engine, ended if busy and one.began <= ended <= began else began)
        elif missed and busy and one.ended <= ended <= began:
            one.ended = ended
        if missed:
            one.gap = one.step = -1  # what came before this gap was not seen
            one.told = None
            self._steps += min(missed, MISSED_MOST)
        self._begin(one, began, known=known)
        if not busy:
            self.ended(engine, ended)

    def stalled(self, engine: int, yes: bool = True) -> None:
        """A stalled engine's step does not keep copies back; no effect on an engine not heard of."""
        one = self._engines.get(engine)
        if one is not None and one.stalled != yes:
            one.stalled = yes
            if one.busy:
                self._count(-1 if yes else 1)
            self._plan = None

    def forget(self, engine: int) -> None:
        """The engine is gone; what it taught about engines in general stays."""
        one = self._engines.pop(engine, None)
        if one is not None:
            if one.busy and not one.stalled:
                self._count(-1)
            self._plan = None

    # -- answers ------------------------------------------------------------------------------------------------

    def budget(self, now: float) -> float:
        """Seconds that may be copied from `now` on; 0: not now."""
        if self._busy:
            return 0.0
        self._asked = True
        for start, stop in self._runs(now):
            if stop > now:
                if start > now or stop - now < self._least:
                    return 0.0
                granted = int(min(stop - now, self._most) / self._least) * self._least
                self._granted_s += granted - max(0.0, min(self._until, now + granted) - now)
                self._until = now + granted
                return granted
        return 0.0

    def next(self, now: float) -> float:
        """Seconds from `now` until `budget` may be above 0, if no step begins or ends before; inf: not before one
        has ended.
        """
        if self._busy:
            return math.inf
        for start, stop in self._runs(now):
            if stop - max(start, now) >= self._least:
                return max(start - now, 0.0)
        assert self._plan is not None
        return max(self._plan[1] - now, self._least)

    def statistics(self) -> GapStatistics:
        """Counts and the present threshold."""
        return GapStatistics(
            engines=len(self._engines),
            stalled=sum(one.stalled for one in self._engines.values()),
            idle=self._busy == 0,
            steps=self._steps,
            gaps=self._gaps,
            met=self._met,
            threshold=self._threshold,
            idle_s=self._idle_s,
            granted_s=self._granted_s,
            surprise=2.0 ** (self._surprise / max(self._gaps, 1) / BINS_OCTAVE),
        )

    # -- inside -------------------------------------------------------------------------------------------------

    def _begin(self, one: _Engine, at: float, *, known: bool) -> None:
        """A step begins; `known`: nothing was missed between it and the end before."""
        self._steps += 1
        if self._busy or one.stalled or not known:
            self._note(LEVEL_SPAN)
        else:
            self._end_gap(at)
        if known:
            self._learn(one, max(at - one.ended, 0.0))
        one.busy = True
        one.began = at
        one.told = None
        if not one.stalled:
            self._busy += 1
        self._until = -math.inf
        self._plan = None

    def _count(self, change: int) -> None:
        """The number of busy engines changes by other means than a step."""
        self._busy += change
        if self._busy == 0:
            live = [one.ended for one in self._engines.values() if not one.stalled]
            self._since = max(live, default=self._since)

    def _end_gap(self, at: float) -> None:
        """All were idle until `at`; which hazard was it that has come true?"""
        self._gaps += 1
        self._idle_s += max(at - self._since, 0.0)
        if at < self._until:
            self._met += 1
            self._credit -= 1.0
            self._granted_s -= self._until - at
        rate = 0.0
        for one in self._engines.values():
            if not one.stalled:
                rate += self._rate(one, at - one.ended)
        self._note(_level(rate))

    def _note(self, level: int) -> None:
        """A step began at a hazard of this level."""
        self._level_weight *= 1 + 1 / min(LEVEL_GAPS, LEVEL_FIRST + LEVEL_REST * self._steps)
        self._level[level] += self._level_weight
        if self._level_weight > 1e9:
            self._level /= self._level_weight
            self._level_weight = 1.0
        if self._asked:
            self._credit += self._share
        self._level_due -= 1
        if self._level_due <= 0:
            self._level_due = LEVEL_EVERY
            self._set_threshold()

    def _set_threshold(self) -> None:
        """From the hazards at which steps began, and from the credit."""
        scale = min(max(CREDIT_SLOW * math.sqrt(self._steps * self._share), 1.0), CREDIT_SLOWEST)
        self._credit = min(self._credit, CREDIT_RESERVE + CREDIT_CAP * scale)
        over = self._credit - CREDIT_RESERVE if self._asked else 0.0  # who has copied nothing owes nothing
        over /= scale if over > 0 else min(scale, CREDIT_DEBT)
        urge = min(max(_exp(over * QUANTILE_GAIN), QUANTILE_LOW), QUANTILE_HIGH)
        price = min(max(_exp(over), PRICE_LOW), PRICE_HIGH)
        below = np.cumsum(self._level)
        by_quantile = self._quantile(below, self._share * urge)
        by_price = self._quantile(below, self._share) + LEVEL_BINS * math.log2(price)
        self._threshold = LEVEL_FLOOR * 2.0 ** (max(by_quantile, by_price) / LEVEL_BINS)

    def _quantile(self, below: Floats, share: float) -> float:
        """The level of hazard, in bins, below which about that share of the steps began."""
        total = float(below[-1])
        mean = 0.0
        for part in LEVEL_PARTS:
            wanted = min(share * part, 1.0) * total
            index = min(int(np.searchsorted(below, wanted, side="right")), LEVEL_SPAN)
            start = float(below[index - 1]) if index else 0.0
            mean += index + min((wanted - start) / max(float(self._level[index]), 1e-300), 1.0)
        return mean / len(LEVEL_PARTS)

    def _learn(self, one: _Engine, gap: float) -> None:
        """A gap of this engine has ended."""
        at = _bin(gap)
        contexts = self._contexts(one)
        one.weight *= 1 + 1 / COUNT_GAPS
        self._root_weight *= 1 + 1 / COUNT_GAPS
        surprise = 0.0
        best = 1 if one.gap >= 0 else 0
        for index, family in enumerate(one.families):
            bin_at = at + family.shift
            bin_at = min(max(bin_at, 0), BINS - 1)
            curve = self._curve(one, index, contexts[index])
            # What each octave that the gap has reached was said to be survived by, and the last one's end.
            octave = at // BINS_OCTAVE
            edges = OCTAVE_EDGES[: octave + 1] + family.shift
            logs = curve.reach.take(edges, mode="clip")
            score = family.score[: octave + 1]
            score *= SCORE_FADE
            score[:-1] += logs[1:] - logs[:-1]
            score[-1] += float(curve.reach[bin_at] - logs[-1]) + math.log(float(curve.chance[bin_at]))
            if index == best:
                median = int(np.searchsorted(-curve.reach, math.log(2)))
                surprise = abs(median - bin_at)
            self._roots[index].add(bin_at, self._root_weight)
            for key in contexts[index]:
                table = family.tables.get(key)
                if table is None:
                    table = family.room(key)
                table.add(bin_at, one.weight)
            if family.gain:
                if one.gap < 0:
                    family.mean = float(at)
                else:
                    step = min(max(at - family.mean, -BINS_OCTAVE), BINS_OCTAVE)
                    family.mean += family.gain * step
        self._surprise += surprise
        if self._root_weight > 1e9:
            for table in self._roots:
                table.scale(1 / self._root_weight)
            self._root_weight = 1.0
        if one.weight > 1e9:
            for family in one.families:
                for table in family.tables.values():
                    table.scale(1 / one.weight)
                family.curves.clear()
            one.weight = 1.0
        one.gap = at

    def _contexts(self, one: _Engine) -> list[tuple[tuple[int, ...], ...]]:
        """The tables of each family that tell of the present gap, coarse to fine."""
        out: list[tuple[tuple[int, ...], ...]] = []
        for family in one.families:
            if one.gap < 0 or not family.placed:
                out.append(((),))
                continue
            if family.gain:
                past = round((one.gap - family.mean) / BINS_OCTAVE * 2)
                past = min(max(past, -2), 2)
            else:
                past = one.gap // BINS_OCTAVE
            out.append(((), (past, one.step // (2 * BINS_OCTAVE))))
        return out

    def _curve(self, one: _Engine, index: int, context: tuple[tuple[int, ...], ...]) -> _Curve:
        """The hazards that one family of tables sees in this context."""
        family = one.families[index]
        leaf = context[-1]
        table = family.tables.get(leaf)
        weight = table.weight if table is not None else 0.0
        curve = family.curves.get(leaf)
        if curve is not None and weight < curve.due:
            return curve
        root = self._roots[index].counts / self._root_weight
        shells: list[Floats] = []
        outer: Floats = root
        for key in context:
            found = family.tables.get(key)
            inner: Floats = found.counts / one.weight if found is not None else np.zeros(BINS)
            shells.append(np.maximum(outer - inner, 0.0))
            outer = inner
        shells.append(outer)
        step = min(max(weight / one.weight / 8, 1.0), 64.0)
        curve = family.curves[leaf] = _Curve(_hazards(shells), weight + step * one.weight)
        return curve

    def _told(self, one: _Engine) -> list[tuple[Floats, _Curve, int]]:
        """What the families say of the present gap: weight by octave of age, curve, shift of its bins."""
        if one.told is None:
            contexts = self._contexts(one)
            scores = np.stack([family.score for family in one.families])
            scores -= scores.max(axis=0)
            weights = np.exp(scores)
            weights /= weights.sum(axis=0)
            one.told = [
                (weight, self._curve(one, index, contexts[index]), family.shift)
                for index, (family, weight) in enumerate(zip(one.families, weights, strict=True))
            ]
        return one.told

    def _rate(self, one: _Engine, age: float) -> float:
        """The hazard of one engine at one age, per second."""
        at = _bin(age)
        chance = 0.0
        for weights, curve, shift in self._told(one):
            chance += float(weights[at // BINS_OCTAVE]) * float(
                curve.chance[min(max(at + shift, 0), BINS - 1)]
            )
        return -math.log1p(-chance) / (max(age, FLOOR_S) * (RATIO - 1))

    def _rates(self, one: _Engine, bins: npt.NDArray[np.int64], ages: Floats) -> Floats:
        """The hazards of one engine by age, whose bins are given, per second."""
        octaves = bins // BINS_OCTAVE
        chance: Floats = np.zeros(len(bins))
        for weights, curve, shift in self._told(one):
            chance += weights.take(octaves) * curve.chance.take(bins + shift if shift else bins, mode="clip")
        rates: Floats = np.log1p(-chance) / (np.maximum(ages, FLOOR_S) * (1 - RATIO))
        return rates

    def _runs(self, now: float) -> list[tuple[float, float]]:
        """When copies may run, from `now` on if nothing happens: times of start and stop, in order."""
        plan = self._plan
        if plan is not None and plan[0] <= now < plan[1]:
            return plan[2]
        live = [one for one in self._engines.values() if not one.stalled]
        if not live:
            self._plan = (now, now + self._most, [(now, now + 2 * self._most)])
            return self._plan[2]
        youngest = max(one.ended for one in live)
        age = max(now - youngest, 0.0)
        horizon = 4 * age + AHEAD_S
        first, last = _bin(age), _bin(horizon)
        edges = EDGES[first : last + 2].copy()
        edges[0] = age
        if last == BINS - 1:
            edges[-1] = max(horizon, edges[-2])
        middle = np.sqrt(np.maximum(edges[:-1], FLOOR_S / 2) * edges[1:])
        total: Floats = np.zeros(len(middle))
        for one in live:
            ages = middle + (youngest - one.ended)
            if one.ended == youngest:
                bins = np.arange(first, last + 1)
            else:
                bins = np.minimum(np.log2(np.maximum(ages / FLOOR_S, 1.0)) * BINS_OCTAVE, BINS - 1).astype(
                    np.int64
                )
            total += self._rates(one, bins, ages)
        free = np.concatenate(([False], total <= self._threshold, [False]))
        turns = np.flatnonzero(free[1:] != free[:-1])
        times = (edges[turns] + youngest).tolist()
        stop = float(edges[-1]) + youngest
        self._plan = (now, stop, list(zip(times[::2], times[1::2], strict=True)))
        return self._plan[2]


def _exp(value: float) -> float:
    """The exponential of what is within reason."""
    return math.exp(min(max(value, -50.0), 50.0))


def _level(rate: float) -> int:
    """The bin of a hazard per second."""
    if rate <= LEVEL_FLOOR:
        return 0
    return min(int(math.log2(rate / LEVEL_FLOOR) * LEVEL_BINS), LEVEL_SPAN - 1)
