"""Least recently used: the default.

One ring in two flat columns: `newer[0]` is the oldest leaf, `older[0]` the newest, -1 in `older` means not queued.
"""

from __future__ import annotations

from array import array


class Lru:
    """Least recently used.  Exact but for one case: a node exposed after it was used alone counts as used now."""

    __slots__ = ("newer", "older")

    def __init__(self) -> None:
        self.older = array("i", [0])
        self.newer = array("i", [0])

    @property
    def name(self) -> str:
        return "lru"

    @property
    def learns(self) -> bool:
        return False

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

    def oldest(self) -> int:
        return self.newer[0]

    def candidates(self, most: int) -> list[int]:
        newer = self.newer
        out: list[int] = []
        node = newer[0]
        while node and len(out) < most:
            out.append(node)
            node = newer[node]
        return out

    victims = candidates

    def clock(self, now: float) -> None:
        pass

    def split(self, upper: int, lower: int, at: int) -> None:
        pass

    def bytes_used(self) -> int:
        return 8 * len(self.older)

    # -- history, which it is not told ---------------------------------------------------------------------------

    def reuse(self, node: int, whole: bool, ghost: int) -> int:
        return 0

    def created(self, node: int, parent: int, past: int, output: bool) -> None:
        pass

    def branched(self, node: int) -> None:
        pass

    def ended(self, node: int) -> None:
        pass

    def trimmed(self, node: int, length: int, ghost: int) -> None:
        pass

    def forget(self, node: int, parent: int, ghost: int) -> None:
        pass
