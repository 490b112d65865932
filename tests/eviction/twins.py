"""Naive twins of the eviction policies: lists, scans and the definitions as they are read, for the machine to compare.

Each twin has the calls of `Evictor` and is asked the same.  Ghosts here are a list of entries searched from the front.
"""

from __future__ import annotations

import bisect
import math

from kvslot.allocator.eviction.gaps import (
    BINS,
    BRANCH,
    CLASSES,
    EDGES,
    LONGEST,
    MEMORY,
    PRIOR,
    USES,
    WALK,
    worths,
)


class GhostsTwin:
    def __init__(self, most: int) -> None:
        self.ring: list[list[int] | None] = [None] * most
        self.turn = 0

    def remember(self, place: int, value: int) -> None:
        for entry in self.ring:
            if entry is not None and entry[0] == place:
                entry[1] = value
                return
        self.ring[self.turn] = [place, value]
        self.turn = (self.turn + 1) % len(self.ring)

    def recall(self, place: int) -> int:
        for index, entry in enumerate(self.ring):
            if entry is not None and entry[0] == place:
                self.ring[index] = None
                return entry[1]
        return -1


class LruTwin:
    def __init__(self) -> None:
        self.queue: list[int] = []

    def add(self, node: int, length: int) -> None:
        self.queue.append(node)

    def exposed(self, node: int, length: int, used_alone: bool) -> None:
        self.queue.insert(len(self.queue) if used_alone else 0, node)

    def discard(self, node: int) -> None:
        if node in self.queue:
            self.queue.remove(node)

    def oldest(self) -> int:
        return self.queue[0] if self.queue else 0

    def candidates(self, most: int) -> list[int]:
        return self.queue[:most]

    def split(self, upper: int, lower: int, at: int) -> None: ...

    def reuse(self, node: int, whole: bool, ghost: int) -> int:
        return 0

    def created(self, node: int, parent: int, past: int, output: bool) -> None: ...

    def branched(self, node: int) -> None: ...

    def ended(self, node: int) -> None: ...

    def trimmed(self, node: int, length: int, ghost: int) -> None: ...

    def forget(self, node: int, parent: int, ghost: int) -> None: ...


class S3FifoTwin(LruTwin):
    def __init__(self, ghosts: int) -> None:
        self.queues: dict[str, list[int]] = {"small": [], "main": []}
        self.home: dict[int, str] = {}
        self.uses: dict[int, int] = {}
        self.length: dict[int, int] = {}
        self.ghosts = GhostsTwin(ghosts)

    def _home(self, node: int) -> str:
        return self.home.get(node, "small")

    def add(self, node: int, length: int) -> None:
        self.queues[self._home(node)].append(node)
        self.length[node] = length

    def exposed(self, node: int, length: int, used_alone: bool) -> None:
        queue = self.queues[self._home(node)]
        queue.insert(len(queue) if used_alone else 0, node)
        self.length[node] = length

    def discard(self, node: int) -> None:
        for queue in self.queues.values():
            if node in queue:
                queue.remove(node)

    def oldest(self) -> int:
        small, main = self.queues["small"], self.queues["main"]
        while small or main:
            in_small, in_main = sum(self.length[n] for n in small), sum(self.length[n] for n in main)
            if small and (not main or in_small > (in_small + in_main) / 10):
                node = small[0]
                if self.uses.get(node, 0) <= 1:
                    return node
                main.append(small.pop(0))
                self.home[node] = "main"
                self.uses[node] = 0
            else:
                node = main[0]
                if not self.uses.get(node, 0):
                    return node
                self.uses[node] -= 1
                main.append(main.pop(0))
        return 0

    def candidates(self, most: int) -> list[int]:
        node = self.oldest()
        home = self._home(node)
        out: list[int] = []
        for leaf in self.queues[home] if node else []:
            if len(out) == most or self.uses.get(leaf, 0) > (home == "small"):
                break
            out.append(leaf)
        return out

    def split(self, upper: int, lower: int, at: int) -> None:
        self.home[upper] = self._home(lower)
        self.uses[upper] = self.uses.get(lower, 0)
        self.length[lower] = self.length.get(lower, 0) - at

    def reuse(self, node: int, whole: bool, ghost: int) -> int:
        if ghost and self.ghosts.recall(ghost) >= 0:
            return 4
        self.uses[node] = min(3, self.uses.get(node, 0) + 1)
        return self.uses[node] + (4 if self._home(node) == "main" else 0) if whole else 0

    def created(self, node: int, parent: int, past: int, output: bool) -> None:
        self.uses[node] = past % 4
        self.home[node] = "main" if past >= 4 else "small"

    def trimmed(self, node: int, length: int, ghost: int) -> None:
        self.length[node] = length
        if self._home(node) == "small":
            self.ghosts.remember(ghost, 0)

    def forget(self, node: int, parent: int, ghost: int) -> None:
        self.home[parent] = self._home(node)
        if self._home(node) == "small":
            self.ghosts.remember(ghost, 0)


def worths_of(gaps: list[float], births: float) -> list[float]:
    """The definition: per bin, of all later points at which one may give up, the one with the best rate of hits."""
    leaves = max(births, sum(gaps)) + PRIOR
    edges = [*EDGES, EDGES[-1] + LONGEST]
    padded = [gaps[1], gaps[0], *gaps, gaps[-1], gaps[-2]]
    octaves = [math.log2((edges[b + 1] + 1) / (edges[b] + 1)) for b in range(BINS)]
    shares, waits, idle = [], [], 1.0
    for b in range(BINS):
        smooth = sum(padded[b + k] * weight for k, weight in enumerate((1, 4, 6, 4, 1))) / 16
        shares.append((smooth + PRIOR / 2 * octaves[b] / sum(octaves)) / leaves)
        waits.append((idle - shares[b] / 2) * (edges[b + 1] - edges[b]))
        idle -= shares[b]
    worths = []
    for start in range(BINS):
        best = chance = waited = 0.0
        for b in range(start, BINS):
            chance += shares[b]
            waited += waits[b]
            best = max(best, chance / waited)
        worths.append(best)
    return worths


class GapsTwin(LruTwin):
    """Its tables of worths are the policy's, which a test of their own holds against `worths_of`: where two classes are
    worth the same, as they often are by theory, rounding decides who goes first, and must decide alike."""

    def __init__(self, ghosts: int, refresh: int) -> None:
        self.rings: list[list[int]] = [[] for _ in range(CLASSES)]
        self.used: dict[int, int] = {}
        self.kind: dict[int, int] = {}
        self.tips: set[int] = set()
        self.gaps = [[0.0] * BINS for _ in range(CLASSES)]
        self.births = [0.0] * CLASSES
        self.halved = [0] * CLASSES
        self.share = [1.0] * USES
        self.worths = [worths([0.0] * BINS, 0)] * CLASSES
        self.ghosts = GhostsTwin(ghosts)
        self.refresh = refresh
        self.now = self.rebuild_at = self.turn = 0
        self.found: tuple[int, bool, float] | None = None  # class, newest end, worth when found

    def _bin(self, gap: int) -> int:
        return bisect.bisect_right(EDGES, gap) - 1

    def _worth(self, ring: int, node: int) -> float:
        return self.worths[ring][self._bin(self.now - self.used.get(node, 0))]

    def add(self, node: int, length: int) -> None:
        kind, tick = self.kind.get(node, 0), self.used.get(node, 0)
        ring = self.rings[kind]
        at = len(ring)
        if ring and tick < self.used[ring[-1]]:
            at = self._place(ring, tick)
        ring.insert(at, node)
        self.used[node] = tick
        if self.found is not None and self._worth(kind, node) < self.found[2]:
            self.found = (kind, at == len(ring) - 1, self._worth(kind, node))

    def _place(self, ring: list[int], tick: int) -> int:
        """Searched from both ends at once, at most `WALK` steps; then the end that is nearer in time."""
        ticks = [self.used[node] for node in ring]
        low, high = 0, len(ring) - 1
        for _ in range(WALK):
            if low == len(ring) or ticks[low] >= tick:
                return low
            high -= 1
            if high < 0 or ticks[high] <= tick:
                return high + 1
            low += 1
        return low if 2 * tick < ticks[low] + ticks[high] else high + 1

    def exposed(self, node: int, length: int, used_alone: bool) -> None:
        self.add(node, length)

    def discard(self, node: int) -> None:
        for ring in self.rings:
            if node in ring:
                ring.remove(node)

    def oldest(self) -> int:
        if self.found is not None:
            kind, newest, low = self.found
            ring = self.rings[kind]
            if ring:
                node = ring[-1 if newest else 0]
                if self._worth(kind, node) <= low * 1.05:
                    return node
        ends = [
            (k, end, ring[-1 if end else 0])
            for k, ring in enumerate(self.rings)
            if ring
            for end in (False, True)
        ]
        if not ends:
            self.found = None
            return 0
        kind, newest, node = min(ends, key=lambda end: self._worth(end[0], end[2]))
        self.found = (kind, newest, self._worth(kind, node))
        return node

    def candidates(self, most: int) -> list[int]:
        node = self.oldest()
        if not node:
            return []
        assert self.found is not None
        kind, newest, low = self.found
        ring = self.rings[kind][::-1] if newest else self.rings[kind]
        out = [node]
        for node in ring[1:most]:
            if self._worth(kind, node) > low * 1.1:
                break
            out.append(node)
        return out

    def split(self, upper: int, lower: int, at: int) -> None:
        self.kind[upper] = self.kind.get(lower, 0)
        self.used[upper] = self.used.get(lower, 0)
        self.tips.discard(upper)

    def reuse(self, node: int, whole: bool, ghost: int) -> int:
        self.now += 1
        if self.now >= self.rebuild_at:
            self._learn()
        seen = self.ghosts.recall(ghost) if ghost else -1
        if seen >= 0:
            self.used[node] = self.now
            last, kind = divmod(seen, 8)
            at = self._bin(self.now - last)
            self.gaps[kind % USES][at] += 1
            self.gaps[kind % USES + USES][at] += 1 if kind >= USES else self.share[kind]
            return min(kind % USES + 1, USES - 1)
        if not node:
            return 0
        kind, at = self.kind.get(node, 0), self._bin(self.now - self.used.get(node, 0))
        self.used[node] = self.now
        if kind == BRANCH:
            self.gaps[BRANCH][at] += 1
            self.births[BRANCH] += 1
            return 0
        self.gaps[kind % USES][at] += 1
        if not whole or (kind < USES and node not in self.tips):
            return 0
        self.gaps[kind % USES + USES][at] += 1
        return min(kind % USES + 1, USES - 1)

    def created(self, node: int, parent: int, past: int, output: bool) -> None:
        self.kind[node] = past + USES * output
        self.tips.discard(node)
        self.used[node] = self.now
        if output:
            self.used[parent] = self.now

    def branched(self, node: int) -> None:
        self.kind[node] = BRANCH

    def ended(self, node: int) -> None:
        self.used[node] = self.now
        kind = self.kind.get(node, 0)
        if kind != BRANCH and node not in self.tips:
            self.tips.add(node)
            self.births[kind % USES] += 1
            self.births[kind % USES + USES] += 1

    def trimmed(self, node: int, length: int, ghost: int) -> None:
        if self.kind.get(node, 0) != BRANCH and node in self.tips:
            self.ghosts.remember(ghost, self.used.get(node, 0) * 8 + self.kind.get(node, 0))

    def forget(self, node: int, parent: int, ghost: int) -> None:
        self.used[parent] = max(self.used.get(parent, 0), self.used.get(node, 0))
        kind, above = self.kind.get(node, 0), self.kind.get(parent, 0)
        if kind == BRANCH:
            return
        if node in self.tips:
            self.ghosts.remember(ghost, self.used.get(node, 0) * 8 + kind)
        if above != BRANCH:
            self.kind[parent] = kind % USES + USES * (above >= USES)
            if node in self.tips:
                self.tips.add(parent)

    def _learn(self) -> None:
        self.turn = turn = (self.turn + 1) % CLASSES
        self.rebuild_at = self.now + min(self.refresh, 2 + self.now // 32)
        if self.now >= self.halved[turn] + MEMORY:
            self.halved[turn] = self.now
            self.births[turn] /= 2
            self.gaps[turn] = [count / 2 for count in self.gaps[turn]]
        if USES <= turn < BRANCH:
            self.share[turn - USES] = (1 + sum(self.gaps[turn])) / (1 + sum(self.gaps[turn - USES]))
        self.worths[turn] = worths(self.gaps[turn], self.births[turn])
        self.found = None


class TiersTwin(LruTwin):
    """The leaves of each priority in a list of their own, over a twin of the base."""

    def __init__(self, base: LruTwin, priority: list[int]) -> None:
        self.base = base
        self.priority = priority
        self.tiers: dict[int, LruTwin] = {level: LruTwin() for level in range(1, 8)}

    def _of(self, node: int) -> LruTwin:
        return self.tiers[self.priority[node]] if self.priority[node] else self.base

    def add(self, node: int, length: int) -> None:
        self._of(node).add(node, length)

    def exposed(self, node: int, length: int, used_alone: bool) -> None:
        self._of(node).exposed(node, length, used_alone)

    def discard(self, node: int) -> None:
        self._of(node).discard(node)

    def oldest(self) -> int:
        return next((node for queue in (self.base, *self.tiers.values()) if (node := queue.oldest())), 0)

    def candidates(self, most: int) -> list[int]:
        return next((c for queue in (self.base, *self.tiers.values()) if (c := queue.candidates(most))), [])

    def split(self, upper: int, lower: int, at: int) -> None:
        self.priority[upper] = self.priority[lower]
        self.base.split(upper, lower, at)

    def reuse(self, node: int, whole: bool, ghost: int) -> int:
        return self.base.reuse(node, whole, ghost)

    def created(self, node: int, parent: int, past: int, output: bool) -> None:
        self.base.created(node, parent, past, output)

    def branched(self, node: int) -> None:
        self.base.branched(node)

    def ended(self, node: int) -> None:
        self.base.ended(node)

    def trimmed(self, node: int, length: int, ghost: int) -> None:
        self.base.trimmed(node, length, ghost)

    def forget(self, node: int, parent: int, ghost: int) -> None:
        self.base.forget(node, parent, ghost)
