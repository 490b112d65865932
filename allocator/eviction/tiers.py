"""Priorities over any policy: each priority above 0 has a queue of its own, and lower ones are emptied first."""

from __future__ import annotations

import heapq
from array import array

from kvslot.allocator.eviction.lru import Lru
from kvslot.allocator.eviction.protocol import Evictor


class Tiers:
    """Leaves of priority 0 are the base policy's; each other priority is least recently used among its own.

    A node whose priority has expired counts as one of priority 0, at the old end of its queue.
    """

    __slots__ = ("_base", "_due", "_expiry", "_length", "_level", "_noted", "_now", "_priority", "_tiers")

    def __init__(
        self, base: Evictor, priority: array[int], expiry: dict[int, float], length: array[int]
    ) -> None:
        """The columns are the tree's, by node, and are only read."""
        self._base = base
        self._priority = priority
        self._expiry = expiry
        self._length = length
        self._tiers: dict[int, Lru] = {}
        self._level: dict[int, int] = {}  # queued nodes of priority > 0
        self._due: list[tuple[float, int]] = []
        self._noted: dict[int, float] = {}  # what of `_due` is still to come: one entry a node and expiry
        self._now = 0.0

    @property
    def name(self) -> str:
        return self._base.name

    @property
    def learns(self) -> bool:
        return self._base.learns

    def resize(self, nodes: int) -> None:
        self._base.resize(nodes)
        for tier in self._tiers.values():
            tier.resize(nodes)

    def _tier(self, node: int) -> Lru | None:
        level = self._priority[node]
        if not level:
            return None
        expiry = self._expiry.get(node, 0.0)
        if expiry:
            if expiry <= self._now:
                return None
            if self._noted.get(node) != expiry:
                self._noted[node] = expiry
                heapq.heappush(self._due, (expiry, node))
        tier = self._tiers.get(level)
        if tier is None:
            tier = self._tiers[level] = Lru()
        if len(tier.older) <= node:
            tier.resize(max(node + 1, len(self._priority)))
        self._level[node] = level
        return tier

    def add(self, node: int, length: int) -> None:
        tier = self._tier(node)
        (self._base if tier is None else tier).add(node, length)

    def exposed(self, node: int, length: int, used_alone: bool) -> None:
        tier = self._tier(node)
        (self._base if tier is None else tier).exposed(node, length, used_alone)

    def discard(self, node: int) -> None:
        level = self._level.pop(node, 0)
        if level:
            self._tiers[level].discard(node)
        else:
            self._base.discard(node)

    def oldest(self) -> int:
        node = self._base.oldest()
        if node or not self._level:
            return node
        return next(tier.oldest() for _, tier in sorted(self._tiers.items()) if tier.oldest())

    def candidates(self, most: int) -> list[int]:
        candidates = self._base.candidates(most)
        if candidates or not self._level:
            return candidates
        return next(tier.candidates(most) for _, tier in sorted(self._tiers.items()) if tier.oldest())

    def victims(self, most: int) -> list[int]:
        victims = self._base.victims(most)
        for _, tier in sorted(self._tiers.items()):
            victims += tier.victims(most - len(victims))
        return victims

    def clock(self, now: float) -> None:
        self._now = now
        self._base.clock(now)
        while self._due and self._due[0][0] <= now:
            expiry, node = heapq.heappop(self._due)
            if self._noted.get(node) == expiry:
                del self._noted[node]
            if node in self._level and self._expiry.get(node, 0.0) == expiry:
                self.discard(node)
                self._base.exposed(node, self._length[node], False)

    def split(self, upper: int, lower: int, at: int) -> None:
        self._base.split(upper, lower, at)

    def bytes_used(self) -> int:
        tiers = sum(tier.bytes_used() for tier in self._tiers.values())
        return self._base.bytes_used() + tiers + 200 * len(self._level)

    # -- history: the base's, whatever the priority ---------------------------------------------------------------

    def reuse(self, node: int, whole: bool, ghost: int) -> int:
        return self._base.reuse(node, whole, ghost)

    def created(self, node: int, parent: int, past: int, output: bool) -> None:
        self._base.created(node, parent, past, output)

    def branched(self, node: int) -> None:
        self._base.branched(node)

    def ended(self, node: int) -> None:
        self._base.ended(node)

    def trimmed(self, node: int, length: int, ghost: int) -> None:
        self._base.trimmed(node, length, ghost)

    def forget(self, node: int, parent: int, ghost: int) -> None:
        self._base.forget(node, parent, ghost)
