"""Each baseline policy against its naive twin, on lives drawn by Hypothesis: same hits, same refusals, same sums.

After every step the policy recounts itself, and every running sequence's bytes are read back (see `life.py`).  Pools
are small, so that eviction, splits, duplicates, shortage and preemption all happen within a few steps.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvslot.replay.policies import Admitted

from .life import Life, text
from .twins import ContiguousTwin, HashedTwin, RadixTwin

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=24)


class Model(RuleBasedStateMachine):
    name: ClassVar[str]
    twin_of: ClassVar[Any]

    def __init__(self) -> None:
        super().__init__()
        self.past: list[bytes] = [b""]
        self.life: Life | None = None

    @initialize(
        blocks=st.integers(2, 24),
        block=st.sampled_from((1, 2, 3, 4, 5, 8, 16)),
        watermark=st.sampled_from((0.0, 0.1)),
        longest=st.integers(24, 60),
    )
    def build(self, blocks: int, block: int, watermark: float, longest: int) -> None:
        pool = max(blocks * block, 24)
        self.life = Life(self.name, pool, block, watermark=watermark, max_length=longest)
        self.twin = self.twin_of(pool, block, watermark, longest)

    def pick(self, which: int, *, prefilled: bool | None = None) -> int | None:
        assert self.life is not None
        fit = [n for n, of in self.life.live.items() if prefilled is None or of.prefilled == prefilled]
        return fit[which % len(fit)] if fit else None

    @rule(base=st.integers(0, 1 << 16), share=st.floats(0, 1), fresh=TOKENS, again=st.booleans())
    def admit(self, base: int, share: float, fresh: list[int], again: bool) -> None:
        """A prompt builds on an earlier sequence, in whole or in part, or is one of them again."""
        assert self.life is not None
        old = self.past[base % len(self.past)]
        prompt = old if again and old else old[: round(share * (len(old) // 4)) * 4] + text(*fresh)
        number = self.life.next
        before = self.life.policy.gauges()
        answer = self.life.admit(prompt)
        hit = self.twin.admit(number, prompt)
        if isinstance(answer, Admitted):
            assert hit == answer.hit
        else:
            assert hit is None
            assert answer.needed > 0
            if self.name in ("hashed", "token") and not answer.never:
                # Neither leaves a hole that it could not hand out: what it refuses, one heap would refuse as well.
                held_back = self.twin.watermark * before.usable // self.twin.total if self.life.live else 0
                heap = before.usable - before.tokens_held - before.duplicates - before.reserved
                assert heap + before.evictable - held_back < answer.needed
            assert self.life.policy.gauges() == before
            self.past.append(prompt)

    @precondition(lambda self: self.life and self.life.live)
    @rule(which=st.integers(0, 99))
    def prefill(self, which: int) -> None:
        assert self.life is not None
        number = self.pick(which, prefilled=False)
        if number is not None:
            self.life.prefill(number)
            self.twin.prefilled(number)

    @precondition(lambda self: self.life and self.life.live)
    @rule(which=st.integers(0, 99), answer=TOKENS)
    def grow(self, which: int, answer: list[int]) -> None:
        """Refused growth preempts the youngest, as the engine does."""
        assert self.life is not None
        number = self.pick(which, prefilled=True)
        if number is None:
            return
        length = self.life.live[number].ask_at + 1
        before = self.life.policy.gauges()
        grown = self.life.grow(number, answer)
        assert self.twin.grow(number, length) == grown
        if not grown:
            assert self.life.policy.gauges() == before
            victim = self.life.policy.victim()
            assert victim == max(self.life.live)
            self.life.abort(victim)
            self.twin.abort(victim)

    @precondition(lambda self: self.life and self.life.live)
    @rule(which=st.integers(0, 99), answer=st.lists(st.integers(0, 2), max_size=16))
    def finish(self, which: int, answer: list[int]) -> None:
        assert self.life is not None
        number = self.pick(which, prefilled=True)
        if number is None:
            return
        running = self.life.live[number]
        fresh = text(*answer)[: (running.ask_at - running.written) * 4]
        whole = self.life.finish(number, fresh)
        self.twin.finish(number, whole[running.prompt * 4 :])
        self.past.append(whole)

    @precondition(lambda self: self.life and self.life.live)
    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        assert self.life is not None
        number = self.pick(which)
        assert number is not None
        self.life.abort(number)
        self.twin.abort(number)

    @invariant()
    def same(self) -> None:
        if self.life is None:
            return
        self.life.check()
        gauges = self.life.policy.gauges()._asdict()
        sums = self.twin.sums()
        assert sums == {name: gauges[name] for name in sums}

    def teardown(self) -> None:
        """With nothing running, nothing is held but what is cached, and a prompt as long as the pool still fits."""
        if self.life is None:
            return
        for number in list(self.life.live):
            self.life.abort(number)
        self.life.check()
        gauges = self.life.policy.gauges()
        assert gauges.private == gauges.reserved == 0
        assert gauges.evictable == gauges.cached + gauges.duplicates
        longest = self.twin.length if self.name == "contiguous" else gauges.usable
        number = self.life.start(text(*range(100, 100 + longest)))
        assert self.life.policy.counters().evicted_tokens >= gauges.cached or self.name == "contiguous"
        self.life.abort(number)
        self.life.check()


def model(name: str, twin_of: Any) -> Any:
    machine: Any = type(f"{name}_model", (Model,), {"name": name, "twin_of": staticmethod(twin_of)})
    case = machine.TestCase
    case.settings = settings(max_examples=80, stateful_step_count=40)
    return case


TestContiguous = model("contiguous", ContiguousTwin)
TestHashed = model("hashed", HashedTwin)
TestToken = model("token", partial(RadixTwin, paged=False))
TestPaged = model("paged", partial(RadixTwin, paged=True))
