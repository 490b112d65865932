"""Drives a policy as the engine does, paints every slot with what was written there, and reads it back.

The paint of a slot is the whole prefix up to its token: K and V of a token depend on all tokens before it, so two
slots hold the same bytes exactly if their prefixes are equal.  After every step each running sequence must find its
own paint at every position it counts as written, wherever the policy says that position lies.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from kvslot.replay.policies import Admitted, PolicyConfig, Refused, make
from kvslot.replay.policies.paged import PagedPolicy


def text(*tokens: int) -> bytes:
    """Tokens as they travel: little-endian int32."""
    return array("i", tokens).tobytes()


def ramp(count: int, start: int = 0) -> bytes:
    """`count` different tokens."""
    return text(*range(start, start + count))


class Running:
    """What the engine knows of one request."""

    def __init__(self, prompt: bytes, answer: Admitted) -> None:
        self.prompt = len(prompt) // 4
        self.tokens = prompt
        self.written = answer.hit
        self.hit = answer.hit
        self.ask_at = answer.ask_at
        self.capacity = answer.capacity

    @property
    def prefilled(self) -> bool:
        return self.written >= self.prompt


class Life:
    """One policy, the requests that run on it and the paint in its pool."""

    def __init__(self, name: str, pool: int, block: int, **more: Any) -> None:
        more.setdefault("max_length", 64)
        config = PolicyConfig(pool_tokens=pool, block_size=block, **more)
        self.policy: Any = PagedPolicy(config, self._copied) if name == "paged" else make(name, config)
        self.name = name
        self.paint: dict[int, bytes] = {}
        self.live: dict[int, Running] = {}
        self.next = 0

    def _copied(self, source: int, target: int, count: int) -> None:
        for at in range(count):
            self.paint[target + at] = self.paint[source + at]

    def admit(self, prompt: bytes) -> Admitted | Refused:
        number = self.next
        answer: Admitted | Refused = self.policy.admit(number, prompt, 0, 0.0)
        if isinstance(answer, Admitted):
            self.next += 1
            length = len(prompt) // 4
            assert 0 <= answer.hit < length <= answer.ask_at <= answer.capacity
            self.live[number] = Running(prompt, answer)
            assert len(self.policy.slots(number)) == answer.capacity
        return answer

    def start(self, prompt: bytes) -> int:
        """Admit and prefill; -> the request.  Must not be refused."""
        answer = self.admit(prompt)
        assert isinstance(answer, Admitted), answer
        self.prefill(self.next - 1)
        return self.next - 1

    def write(self, number: int, tokens: bytes, end: int) -> None:
        """Positions up to `end` are computed; `tokens` is the sequence to there at least."""
        running = self.live[number]
        slots = self.policy.slots(number)
        for at in range(running.written, end):
            self.paint[slots[at]] = tokens[: 4 * at + 4]
        running.written = end
        running.tokens = tokens[: 4 * end]

    def prefill(self, number: int) -> None:
        running = self.live[number]
        self.write(number, running.tokens, running.prompt)
        self.policy.prefilled(number, 0.0)
        assert len(self.policy.slots(number)) == running.capacity

    def grow(self, number: int, answer: Sequence[int]) -> bool:
        """Decode to `ask_at` with tokens taken from `answer` in turn, then ask for room; -> was there any?"""
        running = self.live[number]
        more = running.ask_at - running.written
        fresh = [answer[at % len(answer)] for at in range(more)]
        self.write(number, running.tokens + text(*fresh), running.ask_at)
        room = self.policy.grow(number, running.ask_at + 1, 0.0)
        if room is None:
            return False
        assert running.ask_at < room.ask_at <= room.capacity
        running.ask_at, running.capacity = room.ask_at, room.capacity
        assert len(self.policy.slots(number)) == room.capacity
        return True

    def finish(self, number: int, fresh: bytes = b"") -> bytes:
        """End with the tokens written so far and `fresh` ones; -> the whole sequence."""
        running = self.live[number]
        whole = running.tokens + fresh
        while running.ask_at < len(whole) // 4:
            self.write(number, whole, running.ask_at)
            room = self.policy.grow(number, running.ask_at + 1, 0.0)
            assert room is not None
            running.ask_at, running.capacity = room
        self.write(number, whole, len(whole) // 4)
        self.policy.finish(number, whole[4 * running.prompt :], 0.0)
        del self.live[number]
        return whole

    def abort(self, number: int) -> None:
        self.policy.abort(number, 0.0)
        del self.live[number]

    def serve(self, prompt: bytes, output: bytes = b"") -> int:
        """A whole life; -> the hit."""
        number = self.start(prompt)
        hit = self.live[number].hit
        self.finish(number, output)
        return hit

    def check(self) -> None:
        """Audit, sums, and every running sequence's bytes."""
        policy = self.policy
        policy.audit()
        gauges = policy.gauges()
        assert min(gauges._replace(usable_run=0)) >= 0  # not all have that
        assert min(policy.counters()) >= 0
        assert gauges.tokens_held == gauges.private + gauges.cached
        assert gauges.blocks_in_use_slots <= gauges.usable
        assert gauges.largest_free_run <= gauges.free
        assert gauges.live_sequences == len(self.live)
        # What a sequence reads must be its own.
        owners: dict[int, bytes] = {}
        for number, running in self.live.items():
            slots = policy.slots(number)
            assert len(set(slots)) == len(slots)
            assert max(slots, default=0) < gauges.usable
            for at in range(running.written):
                assert self.paint[slots[at]] == running.tokens[: 4 * at + 4], (number, at)
            # And no slot may be promised to two different contents.
            for at, slot in enumerate(slots):
                mine = running.tokens[: 4 * at + 4] if at < running.written else b"of %d" % number
                assert owners.setdefault(slot, mine) == mine, (number, at, slot)
