"""Evict the leaf whose slots earn least, judged by the gaps after which leaves of its kind were used again.

Theory.  A cached leaf was last used `age` ticks ago; a tick is one admitted sequence, so that rates of arrival cancel
out.  Its slots can be kept until some later age T and then given up.  The best rate of hits that this can earn is

    worth(age) = max over T > age of  P(used again in (age, T] | not used until age)  /  E[ticks until used or T]

hits per slot and tick.  This is the Gittins index of a renewal process (Gittins: "Bandit processes and dynamic
allocation indices", J. R. Stat. Soc. B 41, 1979; as a rank for jobs of unknown length: Aalto, Ayesta, Righter: "On the
Gittins index in the M/G/1 queue", Queueing Systems 63, 2009), and the victim is the leaf of the lowest.  Where chances
only fall with age this is LRU.  Where gaps are regular and the working set does not fit (a loop, of which LRU keeps
nothing that is used in time) it evicts the newest, and still first of all what is older than any gap ever seen, since
those sessions are over.

What is learned.  One histogram of gaps per class, 4 bins to an octave.  A class is (prompt, output) x (0, 1, more
earlier uses along the session), and one for nodes at which paths part.  Prompt and output differ because another answer
to the same prompt uses the first and not the second.  A chance needs a denominator: `births`, the sequences that ended
on a leaf of that class.  Gaps longer than the cache's memory are seen through ghosts, the places where a session's
cached part was cut, with its last use; without them a cache that thrashes could not learn how long the loop is.  What
was learned counts half after `MEMORY` ticks; before anything was, a weak prior (half of all leaves used again, equally
likely in each octave) makes the order LRU.

How it stays O(1).  Each class has one ring in order of last use.  With age the worth rises and then falls, so the
lowest of a class is at one of its two ends: 2 x 7 comparisons find the victim, and the end it was found at is kept
until its worth has grown by a twentieth or a poorer leaf was queued.  Every `REFRESH` ticks one class's table of worths
is made anew, in one pass over 59 bins.  A leaf that comes back old is put in its place by at most `WALK` steps from
each end.

    class    0 1 2 prompt, by uses · 3 4 5 output, by uses · 6 branch
    rings    entry c is both ends of class c · node n is entry n + 6 · `newer[c]` the oldest · `older[c]` the newest
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from math import log
from typing import Final

from kvslot.allocator.eviction.ghosts import Ghosts

OCTAVE: Final = 4  # bins to an octave
LONGEST: Final = 1 << 16  # ticks; longer gaps share the last bin
USES: Final = 3  # 0, 1, 2 or more
BRANCH: Final = 2 * USES
CLASSES: Final = BRANCH + 1
GHOSTS: Final = 4096
REFRESH: Final = 128  # ticks between two rebuilds, of one class in turn
PRIOR: Final = 16.0  # leaves that the prior weighs
MEMORY: Final = 4096  # ticks
WALK: Final = 64  # steps from each end; past them a leaf joins the ring a little out of order
_KEPT: Final = 1.05  # the remembered end serves until its worth has grown by so much
_NEAR: Final = 1.10  # a candidate is worth at most so much more than the victim
_SHIFT: Final = CLASSES - 1

EDGES: Final = sorted({0} | {int(2 ** (i / OCTAVE)) for i in range(16 * OCTAVE)})
"""The least gap of each bin."""
BINS: Final = len(EDGES)
_BIN: Final = bytes(b for b in range(BINS - 1) for _ in range(EDGES[b + 1] - EDGES[b]))
_LAST: Final = len(_BIN)  # the least gap of the last bin
_WIDTH: Final = [*(after - edge for edge, after in pairwise(EDGES)), LONGEST]
_LOGS: Final = [log((edge + width + 1) / (edge + 1)) for edge, width in zip(EDGES, _WIDTH, strict=True)]
_PRIORS: Final = [0.5 * PRIOR * part / sum(_LOGS) for part in _LOGS]  # a hazard of about 1 / age


class Gaps:
    """See the module.  18 bytes a node, and at most `ghosts` ghosts."""

    __slots__ = (
        "_births",
        "_class",
        "_gaps",
        "_ghosts",
        "_halved",
        "_low",
        "_newer",
        "_newest",
        "_now",
        "_older",
        "_rebuild_at",
        "_refresh",
        "_ring",
        "_share",
        "_tip",
        "_turn",
        "_used",
        "_worth",
    )

    def __init__(self, ghosts: int = GHOSTS, refresh: int = REFRESH) -> None:
        self._older = array("i", range(CLASSES))
        self._newer = array("i", range(CLASSES))
        self._used = array("q", [0])  # tick of the last use, as far as it is known
        self._class = bytearray(1)
        self._tip = bytearray(1)  # 1: a sequence that has ended left its cached part's end here
        self._gaps = [[0.0] * BINS for _ in range(CLASSES)]
        self._births = [0.0] * CLASSES
        self._halved = [0] * CLASSES
        self._share = [1.0] * USES  # of the gaps of prompts, those that used the output behind the prompt too
        self._worth = [worths(self._gaps[c], 0.0) for c in range(CLASSES)]
        self._ghosts = Ghosts(ghosts)
        self._refresh = refresh
        self._now = 0
        self._rebuild_at = 0
        self._turn = 0
        self._ring = -1  # class where the last victim was found; -1: look anew
        self._newest = False  # at the newest end
        self._low = -1.0  # worth of that victim
        self.resize(1)

    @property
    def name(self) -> str:
        return "gaps"

    @property
    def learns(self) -> bool:
        return True

    def resize(self, nodes: int) -> None:
        more = nodes - len(self._class)
        self._older.frombytes(b"\xff" * (4 * more))
        self._newer.frombytes(b"\xff" * (4 * more))
        self._used.frombytes(bytes(8 * more))
        self._class.extend(bytes(more))
        self._tip.extend(bytes(more))

    # -- the queue ---------------------------------------------------------------------------------------------

    def add(self, node: int, length: int) -> None:
        older, newer, used = self._older, self._newer, self._used
        ring = self._class[node]
        tick = used[node]
        entry = node + _SHIFT
        before, after = older[ring], ring
        if before != ring and tick < used[before - _SHIFT]:
            before, after = self._place(ring, tick)
        older[entry] = before
        newer[entry] = after
        newer[before] = entry
        older[after] = entry
        age = self._now - tick
        worth = self._worth[ring][_BIN[age] if age < _LAST else BINS - 1]
        if worth < self._low:
            self._ring, self._newest, self._low = ring, after == ring, worth

    def exposed(self, node: int, length: int, used_alone: bool) -> None:
        self.add(node, length)

    def _place(self, ring: int, tick: int) -> tuple[int, int]:
        """The entries between which a leaf last used at `tick` belongs in a ring that has a newer one."""
        older, newer, used = self._older, self._newer, self._used
        low, high = newer[ring], older[ring]  # used[high] > tick
        for _ in range(WALK):
            if low == ring or used[low - _SHIFT] >= tick:
                return older[low], low
            high = older[high]
            if high == ring or used[high - _SHIFT] <= tick:
                return high, newer[high]
            low = newer[low]
        if 2 * tick < used[low - _SHIFT] + used[high - _SHIFT]:
            return older[low], low
        return high, newer[high]

    def discard(self, node: int) -> None:
        older, newer = self._older, self._newer
        entry = node + _SHIFT
        before = older[entry]
        if before < 0:
            return
        after = newer[entry]
        newer[before] = after
        older[after] = before
        older[entry] = -1

    def oldest(self) -> int:
        ring = self._ring
        if ring >= 0:
            entry = self._older[ring] if self._newest else self._newer[ring]
            if entry != ring:
                node = entry - _SHIFT
                age = self._now - self._used[node]
                if self._worth[ring][_BIN[age] if age < _LAST else BINS - 1] <= self._low * _KEPT:
                    return node
        return self._choose()

    def _choose(self) -> int:
        """Compares both ends of every ring and remembers where the poorest leaf was; at a tie the older one."""
        now, used, older, newer = self._now, self._used, self._older, self._newer
        poorest, low = 0, 1e30
        for ring in range(CLASSES):
            entry = newer[ring]
            if entry == ring:
                continue
            table = self._worth[ring]
            node = entry - _SHIFT
            age = now - used[node]
            worth = table[_BIN[age] if age < _LAST else BINS - 1]
            if worth < low:
                poorest, low, self._ring, self._newest = node, worth, ring, False
            node = older[ring] - _SHIFT
            age = now - used[node]
            worth = table[_BIN[age] if age < _LAST else BINS - 1]
            if worth < low:
                poorest, low, self._ring, self._newest = node, worth, ring, True
        if poorest:
            self._low = low
        else:
            self._ring, self._low = -1, -1.0
        return poorest

    def candidates(self, most: int) -> list[int]:
        node = self.oldest()
        if not node:
            return []
        ring = self._ring
        step = self._older if self._newest else self._newer
        table, bound, now, used = self._worth[ring], self._low * _NEAR, self._now, self._used
        out = [node]
        entry = step[node + _SHIFT]
        while entry != ring and len(out) < most:
            node = entry - _SHIFT
            age = now - used[node]
            if table[_BIN[age] if age < _LAST else BINS - 1] > bound:
                break
            out.append(node)
            entry = step[entry]
        return out

    def victims(self, most: int) -> list[int]:
        out = self.candidates(most)
        first = set(out)
        for ring in range(CLASSES):
            entry = self._newer[ring]
            while entry != ring and len(out) < most:
                if entry - _SHIFT not in first:
                    out.append(entry - _SHIFT)
                entry = self._newer[entry]
        return out

    def clock(self, now: float) -> None:
        pass

    def split(self, upper: int, lower: int, at: int) -> None:
        self._class[upper] = self._class[lower]
        self._used[upper] = self._used[lower]
        self._tip[upper] = 0

    def bytes_used(self) -> int:
        return 8 * len(self._older) + 10 * len(self._class) + self._ghosts.bytes_used() + 48 * CLASSES * BINS

    # -- history -----------------------------------------------------------------------------------------------

    def reuse(self, node: int, whole: bool, ghost: int) -> int:
        """The past is how often the session that this sequence goes on with was used again, at most USES - 1."""
        self._now = now = self._now + 1
        if now >= self._rebuild_at:
            self._learn(now)
        used = self._used
        seen = self._ghosts.recall(ghost) if ghost else -1
        if seen >= 0:
            # What followed is cached no more, but now its gap is known.
            used[node] = now
            kind = seen & 7
            uses = kind % USES
            gap = now - (seen >> 3)
            at = _BIN[gap] if gap < _LAST else BINS - 1
            self._gaps[uses][at] += 1.0
            # A cut in the prompt does not tell whether the output behind it would have been used: its usual share.
            self._gaps[uses + USES][at] += 1.0 if kind >= USES else self._share[uses]
            return uses + 1 if uses < USES - 1 else uses
        if not node:
            return 0
        gap = now - used[node]
        used[node] = now
        at = _BIN[gap] if gap < _LAST else BINS - 1
        kind = self._class[node]
        self._gaps[kind if kind == BRANCH else kind % USES][at] += 1.0
        if kind == BRANCH:
            self._births[BRANCH] += 1.0
            return 0
        if not whole or (kind < USES and not self._tip[node]):
            return 0  # the prompt went on differently
        uses = kind % USES
        self._gaps[uses + USES][at] += 1.0
        return uses + 1 if uses < USES - 1 else uses

    def created(self, node: int, parent: int, past: int, output: bool) -> None:
        self._class[node] = past + USES if output else past
        self._tip[node] = 0
        self._used[node] = self._now
        if output:
            self._used[parent] = self._now  # the prompt's end was in use until its answer was done

    def branched(self, node: int) -> None:
        self._class[node] = BRANCH

    def ended(self, node: int) -> None:
        self._used[node] = self._now
        kind = self._class[node]
        if kind != BRANCH and not self._tip[node]:
            self._tip[node] = 1
            self._births[kind % USES] += 1.0
            self._births[kind % USES + USES] += 1.0

    def trimmed(self, node: int, length: int, ghost: int) -> None:
        kind = self._class[node]
        if kind != BRANCH and self._tip[node]:
            self._ghosts.remember(ghost, self._used[node] << 3 | kind)

    def forget(self, node: int, parent: int, ghost: int) -> None:
        used = self._used
        if used[parent] < used[node]:
            used[parent] = used[node]
        kind = self._class[node]
        if kind == BRANCH:
            return
        above = self._class[parent]
        if above != BRANCH:
            # The session's cached part now ends with its parent, which is worth what the session is.
            self._class[parent] = kind % USES + USES if above >= USES else kind % USES
        if self._tip[node]:
            self._ghosts.remember(ghost, used[node] << 3 | kind)
            if above != BRANCH:
                self._tip[parent] = 1

    # -- learning ----------------------------------------------------------------------------------------------

    def _learn(self, now: int) -> None:
        """Makes the next class's table anew; more often at the start, while little is known."""
        self._turn = turn = (self._turn + 1) % CLASSES
        self._rebuild_at = now + min(self._refresh, 2 + (now >> 5))
        gaps = self._gaps[turn]
        if now >= self._halved[turn] + MEMORY:
            self._halved[turn] = now
            self._births[turn] *= 0.5
            gaps[:] = [count * 0.5 for count in gaps]
        if USES <= turn < BRANCH:
            self._share[turn - USES] = (1.0 + sum(gaps)) / (1.0 + sum(self._gaps[turn - USES]))
        self._worth[turn] = worths(gaps, self._births[turn])
        self._ring, self._low = -1, -1.0


def worths(gaps: list[float], births: float) -> list[float]:
    """The worth at the start of each bin, from the gaps seen and the leaves born; one pass from the right.

    With F the chance of a use and M the expected ticks waited until the start of a bin, the worth there is the steepest
    line from (M, F) to any later point: the tangent to the upper hull of the points on its right, kept on a stack.
    """
    leaves = max(births, sum(gaps)) + PRIOR
    padded = [gaps[1], gaps[0], *gaps, gaps[-1], gaps[-2]]
    waited, chance, idle = 0.0, 0.0, 1.0
    points = [(waited, chance)]
    for b, width in enumerate(_WIDTH):
        # A gap says much the same of the bins beside its own: kernel 1 4 6 4 1, mirrored at the ends.
        beside, next_but_one = padded[b + 1] + padded[b + 3], padded[b] + padded[b + 4]
        share = (0.375 * padded[b + 2] + 0.25 * beside + 0.0625 * next_but_one + _PRIORS[b]) / leaves
        waited += (idle - 0.5 * share) * width
        chance += share
        idle -= share
        points.append((waited, chance))
    hull = [points[-1]]
    out = [0.0] * BINS
    for b in range(BINS - 1, -1, -1):
        waited, chance = points[b]
        later, more = hull[-1]
        slope = (more - chance) / (later - waited)
        while len(hull) > 1:
            later, more = hull[-2]
            further = (more - chance) / (later - waited)
            if further < slope:
                break
            slope = further
            hull.pop()
        out[b] = slope
        hull.append((waited, chance))
    return out
