"""S3-FIFO on the leaves of a prefix tree (Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache
eviction", SOSP 2023).

    small    new tails, a tenth of the tokens      uses > 1: goes to main      else evicted, and remembered as a ghost
    main     the rest                              uses > 0: round again       else evicted
    ghosts   places evicted from small             a prompt that stops at one: its session belongs to main

What the paper calls an object is here the cached tail of a session: a turn publishes a new leaf below the one that it
went on from, and hands it that one's uses and queue.  Two departures, both forced by the tree: a leaf that is held is
in no queue, so it comes back at the new end (the paper leaves it where it is); and a parent laid bare takes its child's
place at the old end, as the rest of the same tail.

A use pays for at most one move each, up to 3 per leaf, so `oldest` is O(1) amortised.  Two rings in flat columns:
entries 0 and 1 are the ends of small and main, node n is entry n + 1.
"""

from __future__ import annotations

from array import array
from typing import Final

from kvslot.allocator.eviction.ghosts import Ghosts

SMALL, MAIN = 0, 1
SHARE: Final = 10  # small holds one token in so many of those queued; the paper's tenth
MOST_USES: Final = 3  # two bits, as in the paper
GHOSTS: Final = (
    4096  # the paper keeps as many as main has objects; a constant bounds the memory of a large pool
)
_SHIFT: Final = 1


class S3Fifo:
    """See the module.  19 bytes a node, and at most `ghosts` ghosts."""

    __slots__ = ("_ghosts", "_home", "_length", "_newer", "_older", "_tokens", "_uses")

    def __init__(self, ghosts: int = GHOSTS) -> None:
        self._older = array("i", [SMALL, MAIN])
        self._newer = array("i", [SMALL, MAIN])
        self._length = array("i", [0])  # as queued
        self._home = bytearray(1)
        self._uses = bytearray(1)
        self._tokens = [0, 0]  # queued in small, in main
        self._ghosts = Ghosts(ghosts)
        self.resize(1)

    @property
    def name(self) -> str:
        return "s3fifo"

    @property
    def learns(self) -> bool:
        return True

    def resize(self, nodes: int) -> None:
        more = nodes + _SHIFT - len(self._older)
        self._older.frombytes(b"\xff" * (4 * more))
        self._newer.frombytes(b"\xff" * (4 * more))
        more = nodes - len(self._length)
        self._length.frombytes(bytes(4 * more))
        self._home.extend(bytes(more))
        self._uses.extend(bytes(more))

    # -- the queue ---------------------------------------------------------------------------------------------

    def add(self, node: int, length: int) -> None:
        self._push(node, self._home[node])
        self._length[node] = length
        self._tokens[self._home[node]] += length

    def exposed(self, node: int, length: int, used_alone: bool) -> None:
        if used_alone:
            self.add(node, length)
            return
        older, newer = self._older, self._newer
        home = self._home[node]
        entry = node + _SHIFT
        first = newer[home]
        newer[entry] = first
        older[entry] = home
        older[first] = entry
        newer[home] = entry
        self._length[node] = length
        self._tokens[home] += length

    def discard(self, node: int) -> None:
        if self._older[node + _SHIFT] >= 0:
            self._unlink(node)
            self._tokens[self._home[node]] -= self._length[node]

    def _push(self, node: int, home: int) -> None:
        """To the new end of a queue."""
        older, newer = self._older, self._newer
        entry = node + _SHIFT
        last = older[home]
        older[entry] = last
        newer[entry] = home
        newer[last] = entry
        older[home] = entry

    def _unlink(self, node: int) -> None:
        older, newer = self._older, self._newer
        entry = node + _SHIFT
        before, after = older[entry], newer[entry]
        newer[before] = after
        older[after] = before
        older[entry] = -1

    def oldest(self) -> int:
        newer, uses, tokens = self._newer, self._uses, self._tokens
        while True:
            first = newer[MAIN]
            if first == MAIN or tokens[SMALL] * SHARE > tokens[SMALL] + tokens[MAIN]:
                entry = newer[SMALL]
                if entry == SMALL:
                    if first == MAIN:
                        return 0
                else:
                    node = entry - _SHIFT
                    if uses[node] <= 1:
                        return node
                    self._unlink(node)
                    tokens[SMALL] -= self._length[node]
                    tokens[MAIN] += self._length[node]
                    self._home[node] = MAIN
                    uses[node] = 0
                    self._push(node, MAIN)
                    continue
            node = first - _SHIFT
            if not uses[node]:
                return node
            uses[node] -= 1
            self._unlink(node)
            self._push(node, MAIN)

    def candidates(self, most: int) -> list[int]:
        node = self.oldest()
        if not node:
            return []
        home = self._home[node]
        newer, uses = self._newer, self._uses
        spared = 1 if home == SMALL else 0
        out: list[int] = []
        entry = node + _SHIFT
        while entry != home and len(out) < most and uses[entry - _SHIFT] <= spared:
            out.append(entry - _SHIFT)
            entry = newer[entry]
        return out

    def victims(self, most: int) -> list[int]:
        node = self.oldest()
        home = self._home[node] if node else SMALL
        newer = self._newer
        out: list[int] = []
        for queue in (home, 1 - home):
            entry = newer[queue]
            while entry != queue and len(out) < most:
                out.append(entry - _SHIFT)
                entry = newer[entry]
        return out

    def clock(self, now: float) -> None:
        pass

    def bytes_used(self) -> int:
        return 8 * len(self._older) + 6 * len(self._length) + self._ghosts.bytes_used()

    # -- history -----------------------------------------------------------------------------------------------

    def split(self, upper: int, lower: int, at: int) -> None:
        home = self._home[lower]
        self._home[upper] = home
        self._uses[upper] = self._uses[lower]
        if self._older[lower + _SHIFT] >= 0:
            self._length[lower] -= at
            self._tokens[home] -= at

    def reuse(self, node: int, whole: bool, ghost: int) -> int:
        """The past is the uses of what the sequence goes on from, and its queue (4: main)."""
        if ghost and self._ghosts.recall(ghost) >= 0:
            return MAIN << 2
        uses = self._uses[node]
        if uses < MOST_USES:
            self._uses[node] = uses = uses + 1
        return self._home[node] << 2 | uses if whole else 0

    def created(self, node: int, parent: int, past: int, output: bool) -> None:
        self._uses[node] = past & 3
        self._home[node] = past >> 2

    def branched(self, node: int) -> None:
        pass

    def ended(self, node: int) -> None:
        pass

    def trimmed(self, node: int, length: int, ghost: int) -> None:
        home = self._home[node]
        if self._older[node + _SHIFT] >= 0:
            self._tokens[home] -= self._length[node] - length
            self._length[node] = length
        if home == SMALL:
            self._ghosts.remember(ghost, 0)

    def forget(self, node: int, parent: int, ghost: int) -> None:
        home = self._home[node]
        self._home[parent] = home
        if home == SMALL:
            self._ghosts.remember(ghost, 0)
