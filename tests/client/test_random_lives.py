"""Seeded engines on one small pool: whatever they do, each token's slot holds what that token and all before it make.

Every slot is painted with a number that follows from the tokens up to its position, as K and V do.  So what another
engine has cached can be checked, too: a hit must read as if this engine had computed it itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvslot import Client
from kvslot.api.client import Control, Later, Never, OutOfRoom, Sequence, indices
from kvslot.api.wire.messages import Preempt

from ..tools.daemon import Running, running

ENGINES: list[dict[str, Any]] = [
    {"append": "chain"},
    {"append": "peel"},
    {"page": 16},
    {"page": 4},
]


@pytest.fixture
def daemon() -> Iterator[Running]:
    """A pool of 1,008 usable slots, so that memory is always short."""
    with running(pools=[{"blocks": 64, "preempt_deadline_ms": 20, "reclaim_patience_ms": 5}]) as it:
        yield it


def marks(tokens: list[int]) -> list[int]:
    """For each position a number that all tokens up to it decide; exact in a float32."""
    out, mark = [], 7
    for token in tokens:
        mark = (mark * 31 + token + 1) % 16_777_213
        out.append(mark)
    return out


class Request:
    """A sequence and the tokens it ought to have."""

    def __init__(self, sequence: Sequence, tokens: list[int]) -> None:
        self.sequence = sequence
        self.tokens = tokens
        self.computed = sequence.hit


class Engine:
    """One client that does as its generator says."""

    def __init__(self, path: str, seed: int, options: dict[str, Any]) -> None:
        self.random = random.Random(seed)
        self.client = Client(path, **options)
        self.page = options.get("page", 1)
        self.running: list[Request] = []
        self.planes = [self.client.pool.plane(name) for name in self.client.pool.planes]
        self.done: dict[str, int] = {}

    def count(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1

    def check(self, each: Request) -> None:
        """All that was computed, or found cached, is what it should be."""
        sequence = each.sequence
        self.client.pool.copy(sequence.take_copies())
        assert sequence.length == len(each.tokens)
        slots = indices.slot_indices(sequence, 0, each.computed)
        assert len(set(slots.tolist())) == len(slots)
        if self.page > 1:
            indices.block_table([sequence], self.page)
        wanted = np.array(marks(each.tokens)[: each.computed], dtype=np.float32)
        for plane in self.planes:
            assert (plane[slots].reshape(len(slots), 8) == wanted[:, None]).all()

    def compute(self, each: Request) -> None:
        """Paints what is not computed yet."""
        self.client.pool.copy(self.client.take_copies())
        slots = indices.slot_indices(each.sequence, each.computed, len(each.tokens))
        values = np.array(marks(each.tokens)[each.computed :], dtype=np.float32)
        for plane in self.planes:
            plane[slots] = values.reshape(-1, 1, 1)
        each.computed = len(each.tokens)

    def act(self) -> None:
        """One thing, at random."""
        rng = self.random
        for event in self.client.events():
            if isinstance(event, Preempt):
                victim = self.client.sequence(event.sequence)
                for each in [each for each in self.running if each.sequence is victim]:
                    self.free(each)
                    self.count("preempted")
        self.client.flush()
        what = rng.random()
        if what > 0.98:
            self.lose()
        elif what < 0.25 or not self.running:
            self.start()
        elif what < 0.7:
            self.step()
        else:
            each = rng.choice(self.running)
            if what < 0.78:
                self.trim(each)
            elif what < 0.84:
                self.fork(each)
            elif what < 0.92:
                self.commit(each, wait=rng.random() < 0.5)
            else:
                self.free(each)

    def start(self) -> None:
        rng = self.random
        # Prompts of few families, so that they meet; none is longer than a fifth of the pool.
        family, length = rng.randrange(3), rng.randint(1, 200)
        tokens = [family * 1000 + i for i in range(length)]
        if rng.random() < 0.5:
            tokens[rng.randrange(length) :] = [rng.randrange(5)]
        answer = self.client.allocate(tokens, contiguous=self.page == 1 and rng.random() < 0.1)
        if isinstance(answer, Later):
            self.count("later")
            self.client.withdraw(answer.ticket)
        elif not isinstance(answer, Never):
            each = Request(answer, tokens)
            self.count("hit" if answer.hit else "missed")
            with self.client.step():
                self.client.pool.copy(self.client.take_copies())
                self.check(each)
                self.compute(each)
            self.running.append(each)

    def step(self) -> None:
        rng = self.random
        batch = rng.sample(self.running, rng.randint(1, len(self.running)))
        with self.client.step():
            for each in batch:
                for _ in range(rng.choice((1, 1, 5, 30))):
                    token = rng.randrange(5)
                    try:
                        each.sequence.append(token)
                    except OutOfRoom:
                        self.count("out of room")
                        break
                    each.tokens.append(token)
                self.compute(each)
        self.count("stepped")

    def trim(self, each: Request) -> None:
        keep = max(1, len(each.tokens) - self.random.choice((1, 2, 20, 100)))
        each.sequence.trim(keep_to=keep)
        del each.tokens[keep:]
        each.computed = min(each.computed, keep)
        self.count("trimmed")

    def fork(self, each: Request) -> None:
        length = self.random.choice((len(each.tokens), self.random.randint(1, len(each.tokens))))
        child = each.sequence.fork(length)
        if isinstance(child, Sequence):
            twin = Request(child, each.tokens[:length])
            twin.computed = length
            self.client.pool.copy(self.client.take_copies())
            self.check(twin)
            self.running.append(twin)
            self.count("forked")

    def free(self, each: Request) -> None:
        self.check(each)
        if self.random.random() < 0.7:
            self.commit(each, wait=False)
        each.sequence.free()
        self.running.remove(each)

    def commit(self, each: Request, *, wait: bool) -> None:
        if each.sequence._spoiled is None:  # after a lost commit there are no more
            each.sequence.commit(wait=wait)
            self.count("committed")

    def lose(self) -> None:
        """The connection ends, with whatever is under way, and is taken up again."""
        self.client.flush()
        if self.random.random() < 0.5:
            self.client._connection.wait(
                0.01
            )  # what was asked is likely to be done, and its answer to be lost
        self.client._connection.lost("a test cut it")
        self.client.reconnect()
        self.count("reconnected")
        for each in list(self.running):
            if each.sequence.ended:
                self.running.remove(each)
                self.count("lost")
            else:
                self.check(each)

    def leave(self) -> None:
        for each in list(self.running):
            self.free(each)
        self.planes.clear()
        self.client.settle()
        assert self.client.last_error is None
        self.client.close()


@pytest.mark.parametrize("seed", range(6))
def test_every_slot_reads_as_it_was_computed(daemon: Running, seed: int) -> None:
    """Four engines of different kernels do all there is to do, and lose their connections: no byte is another's."""
    engines = [Engine(str(daemon.socket), 10 * seed + i, options) for i, options in enumerate(ENGINES)]
    rng = random.Random(seed)
    for turn in range(600):
        rng.choice(engines).act()
        if not turn % 20:
            for engine in engines:
                for each in engine.running:
                    engine.check(each)
    done: dict[str, int] = {}
    for engine in engines:
        for what, count in engine.done.items():
            done[what] = done.get(what, 0) + count
        engine.leave()
    assert {"hit", "missed", "stepped", "trimmed", "forked", "committed", "reconnected"} <= set(done), done
    with Control(str(daemon.socket)) as control:
        assert control.audit().faults == []
