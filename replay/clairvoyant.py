"""The offline optimum: the same engine and pool, under an eviction that has read the rest of the trace.

`Clairvoyant` is a policy like the others, run by the same engine with the same pool, limit of sequences and watermark,
but it knows from the trace's structure which request will next use what, and it wastes nothing: tokens lie anywhere,
one by one.  When room is needed it drops the unused tokens whose next use lies furthest ahead (Belady's rule); what is
never used again it drops at once.

- No node's next use is later than its descendants', so the rule drops leaves first by itself, and what stays is a set
  of prefixes.
- Tokens are of one size and part of a node may go, so for a fixed order of admissions, and fixed times at which running
  sequences hold their own tokens, the rule is the best there is (it is the greedy rule for scheduling intervals on
  a varying number of equal machines, which drops what ends last).
- "Next" means by the trace's order.  Admissions follow it nearly, not exactly, and a policy's hits shift the times of
  what follows.  So the figure is a strong offline heuristic, called a bound because nothing online comes near beating
  it, and not a theorem about each run.

Nodes.  What a request owns (see `traces.py`) is cut wherever a prompt or an inherited prefix ends, once, beforehand:

    owned part   |----node----|--node--|------node------|
                 keep         ^ a child inherits up to here   total

A node is used as a whole by every request whose prompt reaches its end.  In later rounds of the trace nodes are told
apart by round, but for those that sessions share, which are the same in all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import ClassVar, Final

from kvslot.replay.bounds import Written
from kvslot.replay.policies._base import Admitted, Counters, Gauges, Refused, Room
from kvslot.replay.traces import Trace

QUANTUM: Final = 32
"""Tokens by which a running sequence's room grows."""
NEVER: Final = 1 << 62
"""Next use of what nobody uses again."""


class _Sequence:
    __slots__ = ("capacity", "request", "round")

    def __init__(self, round_: int, request: int, capacity: int) -> None:
        self.round = round_
        self.request = request
        self.capacity = capacity
        """Tokens in all it has room for; those past the prompt are counted apart until it finishes."""


class Clairvoyant:
    """Takes request numbers as the engine gives them (round * len(trace) + request) and never looks at tokens."""

    name: ClassVar[str] = "optimum"

    def __init__(
        self, trace: Trace, pool_tokens: int, *, watermark: float = 0.02, rounds: bool = False
    ) -> None:
        self._trace = trace
        self._n = len(trace)
        self._rounds = rounds
        self._usable = pool_tokens
        self._watermark = int(watermark * pool_tokens)
        self._written = Written(trace, rounds=rounds)
        self._cut()
        # By key: see `_key`.  A node without an entry holds nothing.
        self._resident: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._next: dict[int, int] = {}
        """Next use of the nodes that hold tokens and that nobody holds."""
        self._furthest: list[tuple[int, int, int]] = []
        """Heap of (-next use, -start, key); an entry counts while `_next` agrees."""
        self._held = 0
        self._evictable = 0
        self._loose = 0
        """Room of running sequences past their prompts."""
        self._running: dict[int, _Sequence] = {}
        self._started: set[int] = set()
        self._low = 0
        """All requests below this number have started."""
        self._evicted = 0

    def _cut(self) -> None:
        """Cut owned parts into nodes, and list each node's uses."""
        trace = self._trace
        keep, owner, total, prompt_len = trace.keep, trace.owner, trace.total, trace.prompt_len
        shared = trace.shared() if self._rounds else [0] * self._n
        edges: list[set[int]] = [set() for _ in range(self._n)]
        for i in range(self._n):
            edges[i] |= {keep[i], total[i]}
            if keep[i] < shared[i]:
                edges[i].add(shared[i])
            for limit in {keep[i], prompt_len[i]}:
                j = i
                while j >= 0 and keep[j] >= limit:
                    j = owner[j]
                if j >= 0:
                    edges[j].add(limit)
        self._first: list[int] = []
        """Per request: its first node; its others follow."""
        self._start: list[int] = []
        self._end: list[int] = []
        self._common: list[bool] = []
        """Shared between sessions: the same in every round."""
        for i, cuts in enumerate(edges):
            self._first.append(len(self._start))
            marks = sorted(cuts)
            self._start += marks[:-1]
            self._end += marks[1:]
            self._common += [end <= shared[i] for end in marks[1:]]
        self._first.append(len(self._start))
        self._uses: list[list[int]] = [[] for _ in self._start]
        for i in range(self._n):
            for node in self._path(i, 0, prompt_len[i]):
                self._uses[node].append(i)

    def _path(self, request: int, start: int, end: int) -> Iterator[int]:
        """The nodes of a sequence that lie in start..end (both are edges), the deepest owner's first."""
        keep, owner, first, starts = self._trace.keep, self._trace.owner, self._first, self._start
        j = request
        while j >= 0 and end > start:
            node, last = first[j], first[j + 1]
            while node < last and starts[node] < end:
                if starts[node] >= start:
                    yield node
                node += 1
            end = min(end, keep[j])
            j = owner[j]

    def _key(self, round_: int, node: int) -> int:
        return node if self._common[node] else round_ * len(self._start) + node

    def _next_use(self, key: int) -> int:
        """Number of the first request that has not started and uses this node."""
        round_, node = divmod(key, len(self._start))
        uses = self._uses[node]
        n = self._n
        if not uses:
            return NEVER
        if self._common[node] and self._rounds:
            round_ = self._low // n
        while True:
            base = round_ * n
            for use in uses[bisect_left(uses, self._low - base) :]:
                if base + use not in self._started:
                    return base + use
            if not (self._common[node] and self._rounds):
                return NEVER
            round_ += 1

    # --- Policy ---

    @property
    def granularity(self) -> int:
        return 1

    def admit(self, request: int, tokens: bytes, engine: int, now: float) -> Admitted | Refused:
        round_, index = divmod(request, self._n)
        prompt = self._trace.prompt_len[index]
        if prompt + 1 > self._usable:
            return Refused(True, prompt)
        keys = [self._key(round_, node) for node in self._path(index, 0, prompt)]
        resident, holders = self._resident, self._holders
        had = sum(resident.get(key, 0) for key in keys)
        idle = sum(resident.get(key, 0) for key in keys if key not in holders)
        spare = self._usable - self._held - self._loose + self._evictable - idle
        if prompt - had > spare - (self._watermark if self._running else 0):
            return Refused(False, prompt)
        self._start_request(request)
        hit = min(self._hit(keys), self._written.ideal(index, round_))
        for key in keys:
            if key not in holders:
                holders[key] = 0
                if key in self._next:
                    del self._next[key]
                    self._evictable -= resident[key]
            holders[key] += 1
            node = key % len(self._start)
            length = self._end[node] - self._start[node]
            self._held += length - resident.get(key, 0)
            resident[key] = length
        self._running[request] = _Sequence(round_, index, prompt)
        self._make_room()
        return Admitted(hit, prompt, prompt)

    def _hit(self, keys: list[int]) -> int:
        """Tokens that stand in one piece from the root on."""
        found = 0
        size = len(self._start)
        for key in sorted(keys, key=lambda key: self._start[key % size]):
            node = key % size
            here = self._resident.get(key, 0)
            found += here
            if here < self._end[node] - self._start[node]:
                break
        return found

    def _start_request(self, number: int) -> None:
        self._started.add(number)
        while self._low in self._started:
            self._started.remove(self._low)
            self._low += 1

    def prefilled(self, request: int, now: float) -> None:
        sequence = self._running[request]
        self._written.write(sequence.request, self._trace.prompt_len[sequence.request], sequence.round)

    def grow(self, request: int, length: int, now: float) -> Room | None:
        sequence = self._running[request]
        spare = self._usable - self._held - self._loose + self._evictable
        if length - sequence.capacity > spare:
            return None
        # It knows where the sequence will end, and drops nothing for room that will not be used.
        left = self._trace.total[sequence.request] - sequence.capacity
        more = min(max(QUANTUM, length - sequence.capacity), spare, left)
        sequence.capacity += more
        self._loose += more
        self._make_room()
        return Room(sequence.capacity, sequence.capacity)

    def finish(self, request: int, output: bytes, now: float) -> None:
        sequence = self._running[request]
        index, round_ = sequence.request, sequence.round
        total, prompt = self._trace.total[index], self._trace.prompt_len[index]
        self._written.write(index, total, round_)
        for node in self._path(index, prompt, total):
            key = self._key(round_, node)
            length = self._end[node] - self._start[node]
            have = self._resident.get(key, 0)
            if key in self._next:
                self._evictable += length - have
            elif key not in self._holders:
                self._holders[key] = 0
            self._resident[key] = length
            self._held += length - have
        self._release(request, whole=True)

    def abort(self, request: int, now: float) -> None:
        self._release(request, whole=False)

    def _release(self, request: int, *, whole: bool) -> None:
        sequence = self._running.pop(request)
        index, round_ = sequence.request, sequence.round
        prompt = self._trace.prompt_len[index]
        self._loose -= sequence.capacity - prompt
        for node in self._path(index, 0, prompt):
            key = self._key(round_, node)
            self._holders[key] -= 1
            self._leave(key)
        if whole:
            for node in self._path(index, prompt, self._trace.total[index]):
                self._leave(self._key(round_, node))
        self._make_room()

    def _leave(self, key: int) -> None:
        """If nobody holds the node any more, it can be evicted from now on, or is dropped if nobody will want it."""
        if self._holders.get(key) != 0:
            return
        del self._holders[key]
        later = self._next_use(key)
        if later == NEVER:
            self._held -= self._resident.pop(key)
            return
        self._next[key] = later
        self._evictable += self._resident[key]
        heappush(self._furthest, (-later, -self._start[key % len(self._start)], key))

    def _make_room(self) -> None:
        """Drop what is wanted last until all that is held fits."""
        while self._held + self._loose > self._usable:
            later, _, key = self._furthest[0]
            if self._next.get(key) != -later:
                heappop(self._furthest)
                continue
            excess = self._held + self._loose - self._usable
            gone = min(excess, self._resident[key])
            self._held -= gone
            self._evictable -= gone
            self._evicted += gone
            self._resident[key] -= gone
            if not self._resident[key]:
                heappop(self._furthest)
                del self._resident[key], self._next[key]

    def victim(self) -> int | None:
        return next(reversed(self._running), None)

    def gauges(self) -> Gauges:
        held, loose = self._held, self._loose
        return Gauges(
            usable=self._usable,
            blocks_in_use_slots=held + loose,
            tokens_held=held,
            private=0,
            cached=held,
            reserved=loose,
            duplicates=0,
            peeled=0,
            fenced=0,
            quarantined=0,
            moving=0,
            free=self._usable - held - loose,
            evictable=self._evictable,
            largest_free_run=self._usable - held - loose,
            live_sequences=len(self._running),
        )

    def counters(self) -> Counters:
        return Counters(0, 0, 0, 0, self._evicted)

    def blocks(self) -> bytes:
        return b""
