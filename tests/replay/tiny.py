"""A policy small enough to be right by reading it, and traces made by hand, for tests of the engine around them."""

import gzip
import json
from pathlib import Path
from typing import ClassVar

from kvslot.replay import Trace, load
from kvslot.replay.policies import Admitted, Counters, Gauges, PolicyConfig, Refused, Room

Line = tuple[float | None, int, int, int, int, int, int]


def write(path: Path, lines: list[Line], **header: object) -> Path:
    """A trace file of these requests."""
    head = {"format": "kvstruct-1", "name": path.name.split(".")[0]} | header
    with gzip.open(path, "wt", encoding="utf-8") as out:
        out.write(json.dumps(head) + "\n")
        for line in lines:
            out.write(json.dumps(list(line)) + "\n")
    return path


def trace(path: Path, lines: list[Line]) -> Trace:
    return load(write(path, lines))


def common_bytes(a: bytes, b: bytes) -> int:
    """Length of the common prefix."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class TinyPolicy:
    """Counts slots and nothing else: every sequence holds its own tokens, finished ones stay whole until evicted,
    oldest first.  Grows by `block_size`.  Keeps a log of all calls."""

    name: ClassVar[str] = "tiny"
    log: ClassVar[list[tuple[str, int, float]]] = []
    engines: ClassVar[set[int]] = set()

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.usable = config.pool_tokens
        self.running: dict[int, tuple[bytes, int, int]] = {}
        """Request -> tokens, capacity, written."""
        self.published: list[bytes] = []
        self.evicted = 0

    @property
    def granularity(self) -> int:
        return 1

    def _cached(self) -> int:
        return sum(len(tokens) // 4 for tokens in self.published)

    def _taken(self) -> int:
        return sum(capacity for _, capacity, _ in self.running.values())

    def _make_room(self, more: int, limit: int) -> bool:
        if self._taken() + more > limit:
            return False
        while self._taken() + self._cached() + more > self.usable:
            self.evicted += len(self.published.pop(0)) // 4
        return True

    def admit(self, request: int, tokens: bytes, engine: int, now: float) -> Admitted | Refused:
        self.log.append(("admit", request, now))
        self.engines.add(engine)
        assert request not in self.running
        n = len(tokens) // 4
        if n + 1 > self.usable:
            return Refused(True, n)
        held_back = int(self.config.watermark * self.usable) if self.running else 0
        hit = max((common_bytes(tokens, old) // 4 for old in self.published), default=0)
        if not self._make_room(n, self.usable - held_back):
            return Refused(False, n)
        self.running[request] = (tokens, n, 0)
        return Admitted(min(hit, n - 1), n, n)

    def prefilled(self, request: int, now: float) -> None:
        self.log.append(("prefilled", request, now))
        tokens, capacity, _ = self.running[request]
        self.running[request] = (tokens, capacity, len(tokens) // 4)

    def grow(self, request: int, length: int, now: float) -> Room | None:
        tokens, capacity, _ = self.running[request]
        assert length == capacity + 1
        more = min(self.config.block_size, self.usable - self._taken())
        if more < 1 or not self._make_room(more, self.usable):
            return None
        self.running[request] = (tokens, capacity + more, capacity)
        return Room(capacity + more, capacity + more)

    def finish(self, request: int, output: bytes, now: float) -> None:
        self.log.append(("finish", request, now))
        tokens, capacity, _ = self.running.pop(request)
        assert len(tokens) + len(output) <= 4 * capacity
        self.published.append(tokens + output)

    def abort(self, request: int, now: float) -> None:
        self.log.append(("abort", request, now))
        del self.running[request]

    def victim(self) -> int | None:
        return next(reversed(self.running), None)

    def gauges(self) -> Gauges:
        private = sum(written for _, _, written in self.running.values())
        cached = self._cached()
        taken = self._taken()
        return Gauges(
            usable=self.usable,
            blocks_in_use_slots=taken + cached,
            tokens_held=private + cached,
            private=private,
            cached=cached,
            reserved=taken - private,
            duplicates=0,
            peeled=0,
            fenced=0,
            quarantined=0,
            moving=0,
            free=self.usable - taken - cached,
            evictable=cached,
            largest_free_run=self.usable - taken - cached,
            live_sequences=len(self.running),
        )

    def counters(self) -> Counters:
        return Counters(0, 0, 0, 0, self.evicted)

    def blocks(self) -> bytes:
        return bytes([255 * (self._cached() + self._taken()) // self.usable])
