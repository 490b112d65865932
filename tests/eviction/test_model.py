"""Each eviction policy against its naive twin, on lives of a small tree drawn by Hypothesis: same victims and answers.

The machine plays the tree: nodes are held, queued or gone, and every call keeps the protocol's promises.  After each
step both are asked for the next victim, for the candidates and for all leaves.
"""

from __future__ import annotations

from array import array
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvslot.allocator.eviction import Gaps, Lru, S3Fifo, Tiers

from .twins import GapsTwin, LruTwin, S3FifoTwin, TiersTwin

NODES = 24
GHOSTS = 4
PICK = st.integers(0, NODES)


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.free = list(range(1, NODES))
        self.length = array("i", bytes(4 * NODES))
        self.held: list[int] = []
        self.queued: list[int] = []
        self.real: Any = None
        self.twin: Any = None

    @initialize(policy=st.sampled_from(("lru", "s3fifo", "gaps")), tiers=st.booleans())
    def build(self, policy: str, tiers: bool) -> None:
        if policy == "lru":
            self.real, self.twin = Lru(), LruTwin()
        elif policy == "s3fifo":
            self.real, self.twin = S3Fifo(ghosts=GHOSTS), S3FifoTwin(GHOSTS)
        else:
            self.real, self.twin = Gaps(ghosts=GHOSTS, refresh=3), GapsTwin(GHOSTS, refresh=3)
        self.real.resize(NODES)
        self.priority = array("b", bytes(NODES))
        if tiers:
            self.real = Tiers(self.real, self.priority, {}, self.length)
            self.twin = TiersTwin(self.twin, [0] * NODES)

    def both(self, call: str, *arguments: Any) -> Any:
        answer = getattr(self.real, call)(*arguments)
        assert answer == getattr(self.twin, call)(*arguments)
        return answer

    def take(self, nodes: list[int], pick: int) -> int:
        return nodes.pop(pick % len(nodes))

    @precondition(lambda self: self.free)
    @rule(
        pick=PICK,
        past=st.integers(0, 2),
        output=st.booleans(),
        length=st.integers(1, 40),
        level=st.sampled_from((0, 0, 1, 3)),
    )
    def create(self, pick: int, past: int, output: bool, length: int, level: int) -> None:
        node = self.free.pop()
        parent = self.held[pick % len(self.held)] if self.held else 0
        self.length[node] = length
        self.both("created", node, parent, past, output)
        if isinstance(self.twin, TiersTwin):
            self.priority[node] = self.twin.priority[node] = level
        self.held.append(node)

    @precondition(lambda self: self.held)
    @rule(pick=PICK, end=st.booleans())
    def let_go(self, pick: int, end: bool) -> None:
        node = self.take(self.held, pick)
        if end:
            self.both("ended", node)
        self.both("add", node, self.length[node])
        self.queued.append(node)

    @precondition(lambda self: self.queued)
    @rule(pick=PICK)
    def hold(self, pick: int) -> None:
        node = self.take(self.queued, pick)
        self.both("discard", node)
        self.held.append(node)

    @rule(pick=PICK, whole=st.booleans(), ghost=st.integers(0, 9), times=st.integers(1, 40))
    def reuse(self, pick: int, whole: bool, ghost: int, times: int) -> None:
        """A hit is held before it is told; nothing is hit in the other admissions."""
        node = self.held[pick % len(self.held)] if self.held else 0
        self.both("reuse", node, whole and bool(node), ghost if whole or not node else 0)
        for _ in range(times - 1):
            self.both("reuse", 0, False, 0)

    @precondition(lambda self: self.held)
    @rule(pick=PICK)
    def branch(self, pick: int) -> None:
        self.both("branched", self.held[pick % len(self.held)])

    @precondition(lambda self: self.free and self.queued + self.held)
    @rule(pick=PICK)
    def split(self, pick: int) -> None:
        nodes = self.queued + self.held
        lower = nodes[pick % len(nodes)]
        if self.length[lower] < 2:
            return
        upper = self.free.pop()
        at = 1 + pick % (self.length[lower] - 1)
        self.length[upper] = at
        self.length[lower] -= at
        self.priority[upper] = self.priority[lower]
        self.both("split", upper, lower, at)
        self.held.append(upper)

    @precondition(lambda self: self.queued)
    @rule(parent=PICK, alone=st.booleans(), ghost=st.integers(1, 9), whole=st.booleans())
    def evict(self, parent: int, alone: bool, ghost: int, whole: bool) -> None:
        node = self.both("oldest")
        if not whole and self.length[node] > 1:
            self.length[node] -= 1
            self.both("trimmed", node, self.length[node], ghost)
            return
        above = self.held[parent % len(self.held)] if self.held else 0
        self.both("forget", node, above, ghost)
        self.both("discard", node)
        self.queued.remove(node)
        self.free.append(node)
        if above and alone:
            self.held.remove(above)
            self.both("exposed", above, self.length[above], alone)
            self.queued.append(above)

    @rule(node=st.integers(1, NODES - 1))
    def discard_what_is_not_queued(self, node: int) -> None:
        if node not in self.queued and not self.priority[node]:
            self.both("discard", node)

    @invariant()
    def same_victims(self) -> None:
        if self.real is None:
            return
        assert bool(self.both("oldest")) == bool(self.queued)
        first = self.both("candidates", 3)
        assert first[:1] == ([self.both("oldest")] if self.queued else [])
        victims = self.real.victims(NODES)
        assert sorted(victims) == sorted(self.queued)
        assert victims[: len(first)] == first
        assert self.real.victims(2) == victims[:2]


Model.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
TestModel = Model.TestCase
