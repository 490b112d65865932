"""Which leaf goes first.

The tree tells an evictor when a leaf can be evicted (`add`), no longer can (`discard`), was split, or stands bare
because its last child died (`exposed`); the evictor answers with victims in order.  Everything is O(1) on two flat
columns that make each queue a ring: `newer[0]` is the oldest, `older[0]` the newest.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from typing import Protocol

from kvslot.allocator.errors import BadRequest


class Evictor(Protocol):
    """What the tree and the pool ask of an eviction policy.  Node numbers index flat columns of the policy."""

    @property
    def name(self) -> str:
        """As in the configuration."""

    def resize(self, nodes: int) -> None:
        """Room for node numbers below `nodes`."""

    def add(self, node: int, length: int) -> None:
        """`node` became an evictable leaf because its last lease ended: it was used just now."""

    def exposed(self, node: int, length: int, used_alone: bool) -> None:
        """`node` became an evictable leaf because its last child was evicted; `used_alone`: it was used since that child."""

    def discard(self, node: int) -> None:
        """`node` is no evictable leaf any more, if it was one: held, given a child, or removed."""

    def split(self, upper: int, lower: int) -> None:
        """`lower` keeps its place; `upper` was cut off its top and inherits its history."""

    def forget(self, node: int, key: bytes) -> None:
        """`node` is about to be evicted; a policy with ghosts remembers its key."""

    def reuse(self, node: int) -> None:
        """A new sequence hit `node` or something below it."""

    def oldest(self) -> int:
        """The next victim, or 0 when no leaf can be evicted."""

    def victims(self, most: int) -> list[int]:
        """The next victims, first to go first; at most `most`."""

    def clock(self, now: float) -> None:
        """The time, told before victims are asked for; for policies whose priorities expire."""

    def bytes_used(self) -> int:
        """Bytes of the columns."""


class Lru:
    """Least recently used.  Exact but for one case: a node exposed after it was used alone counts as used now."""

    __slots__ = ("newer", "older")

    @property
    def name(self) -> str:
        return "lru"

    def __init__(self) -> None:
        self.older = array("i", [0])
        self.newer = array("i", [0])

    def resize(self, nodes: int) -> None:
        more = nodes - len(self.older)
        self.older.frombytes(b"\xff" * (4 * more))
        self.newer.frombytes(b"\xff" * (4 * more))

    def add(self, node: int, length: int) -> None:
        older, newer = self.older, self.newer
        last = older[0]
        older[node] = last
        newer[node] = 0
        newer[last] = node
        older[0] = node

    def exposed(self, node: int, length: int, used_alone: bool) -> None:
        if used_alone:
            self.add(node, length)
            return
        older, newer = self.older, self.newer
        first = newer[0]
        newer[node] = first
        older[node] = 0
        older[first] = node
        newer[0] = node

    def discard(self, node: int) -> None:
        older, newer = self.older, self.newer
        before = older[node]
        if before < 0:
            return
        after = newer[node]
        newer[before] = after
        older[after] = before
        older[node] = -1

    def split(self, upper: int, lower: int) -> None:
        pass

    def forget(self, node: int, key: bytes) -> None:
        pass

    def reuse(self, node: int) -> None:
        pass

    def oldest(self) -> int:
        return self.newer[0]

    def victims(self, most: int) -> list[int]:
        newer = self.newer
        out: list[int] = []
        node = newer[0]
        while node and len(out) < most:
            out.append(node)
            node = newer[node]
        return out

    def clock(self, now: float) -> None:
        pass

    def bytes_used(self) -> int:
        return 8 * len(self.older)


class Tiers:
    """Priorities over a policy: each priority above 0 has a queue of its own, lower ones are emptied first.

    A node whose priority has expired counts as one of priority 0, at the old end of its queue.
    """

    __slots__ = ("_base", "_due", "_expiry", "_level", "_now", "_priority", "_tiers")

    def __init__(self, base: Evictor, priority: array[int], expiry: dict[int, float]) -> None:
        self._base = base
        self._priority = priority
        self._expiry = expiry
        self._tiers: dict[int, Lru] = {}
        self._level: dict[int, int] = {}  # queued nodes of priority > 0
        self._due: list[tuple[float, int]] = []
        self._now = 0.0

    @property
    def name(self) -> str:
        return self._base.name

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

    def split(self, upper: int, lower: int) -> None:
        self._base.split(upper, lower)

    def forget(self, node: int, key: bytes) -> None:
        self._base.forget(node, key)

    def reuse(self, node: int) -> None:
        self._base.reuse(node)

    def clock(self, now: float) -> None:
        self._now = now
        self._base.clock(now)
        while self._due and self._due[0][0] <= now:
            expiry, node = heapq.heappop(self._due)
            if node in self._level and self._expiry.get(node, 0.0) == expiry:
                self.discard(node)
                self._base.exposed(node, 0, False)

    def oldest(self) -> int:
        node = self._base.oldest()
        if node or not self._level:
            return node
        return next(tier.oldest() for _, tier in sorted(self._tiers.items()) if tier.oldest())

    def victims(self, most: int) -> list[int]:
        victims = self._base.victims(most)
        if victims or not self._level:
            return victims
        return next(tier.victims(most) for _, tier in sorted(self._tiers.items()) if tier.oldest())

    def bytes_used(self) -> int:
        return self._base.bytes_used() + sum(tier.bytes_used() for tier in self._tiers.values()) + 200 * len(self._level)


POLICIES: dict[str, Callable[[], Evictor]] = {"lru": Lru}


def make(name: str) -> Evictor:
    """The eviction policy of this name."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise BadRequest(f"eviction policy {name!r} is none of {', '.join(sorted(POLICIES))}") from None
