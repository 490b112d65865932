"""A client that paints what it writes into the pool's memory and looks at it again through its own mapping.

Each token of each plane has bytes of its own, drawn from the token's id and the plane's number: what stands at a wrong
place, is torn, or is another's is seen.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from pathlib import Path
from typing import Any

from kvslot.api.wire import messages

from .wire import Wire

Extents = list[int]


def ids(tokens: bytes) -> list[int]:
    return [each[0] for each in struct.iter_unpack("<i", tokens)]


def slots_of(extents: Extents) -> list[int]:
    return [
        slot for i in range(0, len(extents), 2) for slot in range(extents[i], extents[i] + extents[i + 1])
    ]


class Painter(Wire):
    """A session with the pool's memory mapped.  Prompts are bytes of tokens, as on the wire."""

    def __init__(self, path: Path, *, timeout: float = 10.0, **fields: Any) -> None:
        super().__init__(path, timeout=timeout)
        welcome = self.hello("painter", **fields)
        self.pool = welcome.pool
        self.memory = mmap.mmap(
            self.descriptors[welcome.descriptors.index("pool")], welcome.pool.size_bytes, mmap.MAP_SHARED
        )
        self._paint: dict[int, list[bytes]] = {}
        self._names = 0

    def close(self) -> None:
        self.memory.close()
        super().close()

    def colours(self, token: int) -> list[bytes]:
        """What a token looks like in each plane."""
        found = self._paint.get(token)
        if found is None:
            found = self._paint[token] = [
                hashlib.shake_128(f"{token}:{number}".encode()).digest(plane.slot_bytes)
                for number, plane in enumerate(self.pool.planes)
            ]
        return found

    def paint(self, tokens: list[int], slots: list[int]) -> None:
        for token, slot in zip(tokens, slots, strict=True):
            for plane, colour in zip(self.pool.planes, self.colours(token), strict=True):
                at = plane.offset + slot * plane.slot_bytes
                self.memory[at : at + plane.slot_bytes] = colour

    def wrong(self, tokens: list[int], slots: list[int]) -> list[int]:
        """The positions at which something else stands than these tokens."""
        bad = []
        for position, (token, slot) in enumerate(zip(tokens, slots, strict=True)):
            for plane, colour in zip(self.pool.planes, self.colours(token), strict=True):
                at = plane.offset + slot * plane.slot_bytes
                if self.memory[at : at + plane.slot_bytes] != colour:
                    bad.append(position)
                    break
        return bad

    def begin(self, tokens: bytes) -> tuple[int, messages.Admitted] | None:
        """A sequence on a prompt, what it lacked being painted; None where there is no room for it now."""
        self._names += 1
        answer = self.call(messages.Allocate, self.namespace, self._names, tokens)
        if isinstance(answer, messages.Later):
            self.call(messages.Withdraw, answer.ticket)
            return None
        assert isinstance(answer, messages.Admitted), answer
        named, slots = ids(tokens), slots_of(answer.extents)
        self.paint(named[answer.hit :], slots[answer.hit : len(named)])
        return self._names, answer

    def cache(self, tokens: bytes) -> bool:
        """Computes a prompt, publishes it and lets it go."""
        begun = self.begin(tokens)
        if begun is None:
            return False
        self.call(messages.Commit, begun[0], len(tokens) // 4)
        self.call(messages.Free, begun[0])
        return True

    def look(self, tokens: bytes) -> int:
        """Reads what is cached of a prompt, all of which must be as it was painted; how many tokens that were."""
        self._names += 1
        answer = self.call(messages.Allocate, self.namespace, self._names, tokens + struct.pack("<i", -7))
        if isinstance(answer, messages.Later):
            self.call(messages.Withdraw, answer.ticket)
            return 0
        assert isinstance(answer, messages.Admitted), answer
        named, slots = ids(tokens), slots_of(answer.extents)
        bad = self.wrong(named[: answer.hit], slots[: answer.hit])
        assert not bad, f"positions {bad[:10]} of {len(named)} hold something else"
        self.call(messages.Free, self._names)
        return answer.hit

    def defrag(self, action: str = "status", pool: str = "") -> messages.Compaction:
        """Compaction of the first (or only) pool."""
        answer = self.call(messages.Defrag, pool, action)
        assert isinstance(answer, messages.Defragged), answer
        return answer.pools[0]

    def sound(self) -> None:
        """The daemon finds nothing wrong with its pool."""
        audited = self.call(messages.Audit)
        assert isinstance(audited, messages.Audited), audited
        assert audited.faults == []
