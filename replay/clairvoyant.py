"""The offline optimum: what the best eviction could have found in one run, given everything that happened in it.

A run leaves a schedule: who was admitted, whose prompt was written, who had come how far, who finished or was stopped,
in the order in which it happened.  Whatever the policy, at each moment the pool must hold the distinct tokens of the
running sequences; what is left may be spent on tokens that nobody uses just then.  `optimum` spends it in the best way
there is: with the whole schedule known, it drops the unused tokens whose next use lies furthest ahead (Belady's rule),
and at once what is of no use to anybody any more.

    a token:   written ... used -------- idle -------- used ------ idle ----> never again
                                 keep it: one hit              drop it

It is a bound: no policy finds more in the run it is computed from.

- A hit is a token kept over one idle stretch.  Stretches are intervals, each worth one token, and the room for them
  varies in time but is given: keeping what ends soonest is the greedy rule for scheduling intervals on a varying number
  of equal machines, and that rule is optimal.
- It may do more than a policy can: tokens lie anywhere, one by one, nothing is held twice, no room is reserved, a
  sequence's output counts only as far as it is known to have come, and a hit needs no unbroken prefix.
- What is worth nothing is not kept: a prompt's last token, which is always computed; a stretch that ends in the second
  admission of a preempted request, whose hits count once; tokens nobody had finished computing.

It bounds the whole run, not each part of it: the best for the whole may give up a hit early for two later ones.  And it
belongs to its run: with other admissions (a request that waits until its prefix is written, a pool too small to let
many in at once) other tokens can be found, so each column has an optimum of its own.

Nodes.  What a request owns (see `traces.py`) is cut wherever a prompt, all of a prompt but its last token, or an
inherited prefix ends, once, beforehand:

    owned part   |----node----|--node--|------node------|
                 keep         ^ a child inherits up to here   total

A node is used as a whole by every request whose prompt reaches its end, and written as a whole.  In later rounds of the
trace nodes are told apart by round, but for those that sessions share, which are the same in all.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import pairwise
from typing import Final

from kvslot.replay.recorder import Event, Schedule
from kvslot.replay.traces import Trace

NEVER: Final = 1 << 62
"""Next use of what nobody gains by any more."""


class Nodes:
    """A trace's sequences as paths of nodes."""

    def __init__(self, trace: Trace, *, rounds: bool = False) -> None:
        self.trace = trace
        self._rounds = rounds
        n = len(trace)
        keep, owner, total, prompt_len = trace.keep, trace.owner, trace.total, trace.prompt_len
        shared = trace.shared() if rounds else [0] * n
        edges: list[set[int]] = [set() for _ in range(n)]
        for i in range(n):
            edges[i] |= {keep[i], total[i]}
            if keep[i] < shared[i]:
                edges[i].add(shared[i])
            for limit in {keep[i], prompt_len[i], prompt_len[i] - 1}:
                j = i
                while j >= 0 and keep[j] >= limit:
                    j = owner[j]
                if j >= 0:
                    edges[j].add(limit)
        self._first: list[int] = []
        """Per request: its first node; its others follow."""
        self.start: list[int] = []
        self.length: list[int] = []
        self._common: list[bool] = []
        """Shared between sessions: the same in every round."""
        for i, cuts in enumerate(edges):
            self._first.append(len(self.start))
            marks = sorted(cuts)
            self.start += marks[:-1]
            self.length += [end - start for start, end in pairwise(marks)]
            self._common += [end <= shared[i] for end in marks[1:]]
        self._first.append(len(self.start))

    def path(self, number: int, start: int, end: int) -> Iterator[int]:
        """Keys of the nodes of a sequence that lie in start..end (both are edges), the deepest owner's first."""
        round_, j = divmod(number, len(self.trace))
        base = round_ * len(self.start)
        keep, owner, first, starts = self.trace.keep, self.trace.owner, self._first, self.start
        common = self._common
        while j >= 0 and end > start:
            node, last = first[j], first[j + 1]
            while node < last and starts[node] < end:
                if starts[node] >= start:
                    yield node if common[node] else base + node
                node += 1
            end = min(end, keep[j])
            j = owner[j]


def optimum(nodes: Nodes, schedule: Schedule, pool_tokens: int) -> dict[int, int]:
    """Hit tokens by request number, at first admission; their sum is the bound.

    `schedule` is what a run of `nodes.trace` left (`Recorder.schedule`), `pool_tokens` the slots it had in all."""
    return _Optimum(nodes, schedule, pool_tokens).run()


class _Optimum:
    def __init__(self, nodes: Nodes, schedule: Schedule, pool_tokens: int) -> None:
        self._nodes = nodes
        self._schedule = schedule
        self._usable = pool_tokens
        self._uses = self._list_uses()
        # By key.  A node without an entry holds nothing.
        self._resident: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._next: dict[int, int] = {}
        """Next use of the nodes that hold tokens and that nobody holds."""
        self._furthest: list[tuple[int, int, int]] = []
        """Heap of (-next use, -start, key); an entry counts while `_next` agrees."""
        self._written: set[int] = set()
        self._held = 0
        """Tokens, held or idle."""
        self._ahead: dict[int, int] = {}
        """Running sequences that decode: tokens past their prompts."""
        self._loose = 0
        """The sum of those."""
        self._now = 0
        """Admissions so far, those of preempted requests included."""

    def _list_uses(self) -> dict[int, array[int]]:
        """Per node, the admissions that use it, in order: twice the admission's number, and 1 more if it gains."""
        nodes, prompt_len = self._nodes, self._nodes.trace.prompt_len
        n = len(prompt_len)
        uses: dict[int, array[int]] = {}
        before: set[int] = set()
        now = 0
        for event, number, _ in self._schedule.events():
            if event != Event.ADMITTED:
                continue
            now += 1
            again = number in before
            before.add(number)
            prompt = prompt_len[number % n]
            last = prompt - 1
            size = len(nodes.start)
            for key in nodes.path(number, 0, prompt):
                gains = not again and nodes.start[key % size] < last
                uses.setdefault(key, array("q")).append(2 * now + gains)
        return uses

    def run(self) -> dict[int, int]:
        hits: dict[int, int] = {}
        for event, number, length in self._schedule.events():
            if event == Event.ADMITTED:
                found = self._admit(number)
                hits.setdefault(number, found)
            elif event == Event.PREFILLED:
                self._written.update(self._prompt(number))
            elif event == Event.DECODED:
                self._come_to(number, length - self._prompt_length(number))
            elif event == Event.FINISHED:
                self._finish(number)
            else:
                self._release(number, ())
            self._make_room()
        return hits

    def _prompt_length(self, number: int) -> int:
        return self._nodes.trace.prompt_len[number % len(self._nodes.trace)]

    def _prompt(self, number: int) -> Iterator[int]:
        return self._nodes.path(number, 0, self._prompt_length(number))

    def _admit(self, number: int) -> int:
        self._now += 1
        resident, holders, written, upcoming = self._resident, self._holders, self._written, self._next
        starts, lengths = self._nodes.start, self._nodes.length
        size = len(starts)
        last = self._prompt_length(number) - 1
        found = 0
        for key in self._prompt(number):
            have = resident.get(key, 0)
            node = key % size
            if key in written and starts[node] < last:
                found += have
            if key in holders:
                holders[key] += 1
                continue
            holders[key] = 1
            upcoming.pop(key, None)
            self._held += lengths[node] - have
            resident[key] = lengths[node]
        return found

    def _come_to(self, number: int, ahead: int) -> None:
        self._loose += ahead - self._ahead.get(number, 0)
        self._ahead[number] = ahead

    def _finish(self, number: int) -> None:
        trace = self._nodes.trace
        output = list(self._nodes.path(number, self._prompt_length(number), trace.total[number % len(trace)]))
        size = len(self._nodes.start)
        for key in output:
            length = self._nodes.length[key % size]
            self._held += length - self._resident.get(key, 0)
            self._resident[key] = length
            self._next.pop(key, None)
            self._holders[key] = self._holders.get(key, 0) + 1
        self._written.update(output)
        self._come_to(number, 0)
        self._make_room()  # it had all of it before it left
        self._release(number, output)

    def _release(self, number: int, output: Iterator[int] | list[int] | tuple[()]) -> None:
        self._loose -= self._ahead.pop(number, 0)
        for path in (self._prompt(number), output):
            for key in path:
                self._holders[key] -= 1
                if not self._holders[key]:
                    self._leave(key)

    def _leave(self, key: int) -> None:
        """Nobody holds the node any more: it can be dropped from now on, and is if nobody gains by it."""
        del self._holders[key]
        later = self._next_use(key) if key in self._written else NEVER
        if later == NEVER:
            self._held -= self._resident.pop(key)
            return
        self._next[key] = later
        heappush(self._furthest, (-later, -self._nodes.start[key % len(self._nodes.start)], key))

    def _next_use(self, key: int) -> int:
        uses = self._uses.get(key)
        if uses is None:
            return NEVER
        at = bisect_right(uses, 2 * self._now + 1)
        # Whoever uses it without gain brings it back for nothing: no need to keep it until then.
        return uses[at] if at < len(uses) and uses[at] & 1 else NEVER

    def _make_room(self) -> None:
        """Drop what is wanted last until all that is held fits."""
        while self._held + self._loose > self._usable and self._furthest:
            later, _, key = self._furthest[0]
            if self._next.get(key) != -later:
                heappop(self._furthest)
                continue
            gone = min(self._held + self._loose - self._usable, self._resident[key])
            self._held -= gone
            self._resident[key] -= gone
            if not self._resident[key]:
                heappop(self._furthest)
                del self._resident[key], self._next[key]
