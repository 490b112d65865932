"""A client that paints what it writes into the pool's memory and looks at it again through its own mapping.

Each token of each plane has bytes of its own, drawn from the token's id and the plane's number: what stands at a wrong
place, is torn, or is another's is seen.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import struct
import time
from pathlib import Path
from typing import Any, Self

from kvslot.api.wire import messages
from kvslot.api.wire.page import BEGAN, BUSY, COMPLETED, ENDED, EPOCH, SUBMITTED, WAKE

from .wire import Wire, tokens

Extents = list[int]


def ids(prompt: bytes) -> list[int]:
    return [each[0] for each in struct.iter_unpack("<i", prompt)]


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

    def __enter__(self) -> Self:
        return self

    def close(self) -> None:
        self.memory.close()
        super().close()

    def step(self, submitted: int = 0, completed: int = 0) -> None:
        """A whole step, or the page's counters as they are given."""
        if submitted:
            super().step(submitted, completed)
        else:
            self.begin_step()
            self.end_step()

    def begin_step(self, epoch: int = 0) -> None:
        """A step begins, as the client library has it; it goes by the moves up to `epoch`."""
        assert self.page is not None
        words = self.page.words
        if epoch:
            words[EPOCH] = epoch
        words[BEGAN] = time.monotonic_ns()
        words[SUBMITTED] += 1
        words[BUSY] = 1

    def end_step(self) -> None:
        """It has ended, and the bell is rung where that was asked for."""
        assert self.page is not None
        words = self.page.words
        words[COMPLETED] = words[SUBMITTED]
        words[ENDED] = time.monotonic_ns()
        words[BUSY] = 0
        if words[WAKE]:
            assert self.welcome is not None
            os.eventfd_write(self.descriptors[self.welcome.descriptors.index("wake")], 1)

    def moved(self) -> list[messages.Moved]:
        """What it has been told of moves since the last call; asks the daemon, so that none is on its way."""
        self.call(messages.Ping)
        told = [each for each in self.pushes if isinstance(each, messages.Moved)]
        self.pushes = [each for each in self.pushes if not isinstance(each, messages.Moved)]
        return told

    def colours(self, token: int) -> list[bytes]:
        """What a token looks like in each plane."""
        found = self._paint.get(token)
        if found is None:
            found = self._paint[token] = [
                hashlib.shake_128(f"{token}:{number}".encode()).digest(plane.slot_bytes)
                for number, plane in enumerate(self.pool.planes)
            ]
        return found

    def paint(self, named: list[int], slots: list[int]) -> None:
        for token, slot in zip(named, slots, strict=True):
            for plane, colour in zip(self.pool.planes, self.colours(token), strict=True):
                at = plane.offset + slot * plane.slot_bytes
                self.memory[at : at + plane.slot_bytes] = colour

    def wrong(self, named: list[int], slots: list[int]) -> list[int]:
        """The positions at which something else stands than these tokens."""
        bad = []
        for position, (token, slot) in enumerate(zip(named, slots, strict=True)):
            for plane, colour in zip(self.pool.planes, self.colours(token), strict=True):
                at = plane.offset + slot * plane.slot_bytes
                if self.memory[at : at + plane.slot_bytes] != colour:
                    bad.append(position)
                    break
        return bad

    def begin(self, prompt: bytes) -> tuple[int, messages.Admitted] | None:
        """A sequence on a prompt, what it lacked being painted; None where there is no room for it now."""
        self._names += 1
        answer = self.call(messages.Allocate, self.namespace, self._names, prompt)
        if isinstance(answer, messages.Later):
            self.call(messages.Withdraw, answer.ticket)
            return None
        assert isinstance(answer, messages.Admitted), answer
        named, slots = ids(prompt), slots_of(answer.extents)
        self.paint(named[answer.hit :], slots[answer.hit : len(named)])
        return self._names, answer

    def cache(self, prompt: bytes) -> bool:
        """Computes a prompt, publishes it and lets it go."""
        begun = self.begin(prompt)
        if begun is None:
            return False
        self.call(messages.Commit, begun[0], len(prompt) // 4)
        self.call(messages.Free, begun[0])
        return True

    def look(self, prompt: bytes) -> int:
        """Reads what is cached of a prompt, all of which must be as it was painted; how many tokens that were."""
        self._names += 1
        answer = self.call(messages.Allocate, self.namespace, self._names, prompt + struct.pack("<i", -7))
        if isinstance(answer, messages.Later):
            self.call(messages.Withdraw, answer.ticket)
            return 0
        assert isinstance(answer, messages.Admitted), answer
        named, slots = ids(prompt), slots_of(answer.extents)
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


def scatter(painter: Painter, *, seed: int = 1, keep: float = 0.5, free: int = 64) -> list[bytes]:
    """Empties a pool, fills it with short prompts until `free` slots are left, and evicts a random part of them.

    Returns the prompts that were to be kept, of which some may have been evicted all the same.
    """
    draw = random.Random(seed)
    while painter.call(messages.Evict, 1 << 20).tokens:
        pass
    prompts: list[bytes] = []
    used = 0
    while used < painter.pool.usable - free:
        prompt = tokens(draw.randint(2, 14), 1000 * (len(prompts) + 1))
        assert painter.cache(prompt)
        prompts.append(prompt)
        used += len(prompt) // 4
    kept = [each for each in prompts if draw.random() < keep]
    for each in kept:
        painter.look(each)
    left = used - sum(len(each) // 4 for each in kept)
    while left > 0 and (gone := painter.call(messages.Evict, left).tokens):
        left -= gone
    return kept


def until_rest(painter: Painter, seconds: float = 10.0) -> messages.Compaction:
    """Waits until `once` has come to its end."""
    deadline = time.monotonic() + seconds
    while (told := painter.defrag()).once:
        assert time.monotonic() < deadline, told
        time.sleep(0.005)
    return told
