"""Places where something was evicted, remembered for a while: a cache with hindsight.

    keys, values    a ring of `most` entries, overwritten in turn        where    key -> entry

`len(where) <= most` always, so a table takes a fixed number of bytes for ever.  Keys are hashes: a ghost may lie, and
so may only guide a choice of victims, never vouch for content.
"""

from __future__ import annotations

from array import array


class Ghosts:
    """At most `most` places with a value each (0 or more); the oldest makes room.  All O(1)."""

    __slots__ = ("_keys", "_most", "_next", "_values", "_where")

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys = array("q", bytes(8 * most))
        self._values = array("q", bytes(8 * most))
        self._where: dict[int, int] = {}
        self._next = 0

    def remember(self, place: int, value: int) -> None:
        """Keeps `value` (0 or more) for `place` (not 0); a place known already keeps its turn to go."""
        where = self._where
        entry = where.get(place, -1)
        if entry < 0:
            entry = self._next
            self._next = (entry + 1) % self._most
            before = self._keys[entry]
            # The entry may have been recalled since, and its place remembered anew elsewhere.
            if where.get(before, -1) == entry:
                del where[before]
            self._keys[entry] = place
            where[place] = entry
        self._values[entry] = value

    def recall(self, place: int) -> int:
        """The value kept for `place`, which is forgotten with that; -1 when there is none."""
        entry = self._where.pop(place, -1)
        return -1 if entry < 0 else self._values[entry]

    def __len__(self) -> int:
        return len(self._where)

    def bytes_used(self) -> int:
        """Bytes of the ring and of its index."""
        return 16 * self._most + 120 * len(self._where)
