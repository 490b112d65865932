"""Engines that do anything there is to do with sequences, paint what they write and check what they read, until killed.

Every position's colour follows from tenant and tokens, so that engines check one another's work: what is a hit was
painted by somebody else.  Steps complete late, and what was freed behind one is read until it has.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvslot.api.wire import errors
from kvslot.api.wire.messages import (
    Admitted,
    Allocate,
    Commit,
    Committed,
    Done,
    Error,
    Extend,
    Fork,
    Forked,
    Free,
    Grown,
    Later,
    Namespace,
    Never,
    Pin,
    Pinned,
    Trim,
    Trimmed,
    Unpin,
    Withdraw,
)

from ..tools.wire import Wire
from .actors import SLOT_BYTES, Paint

ALPHABET = [n.to_bytes(4, "little") for n in range(3)]


def _expand(extents: list[int]) -> list[int]:
    return [slot for at, n in zip(extents[::2], extents[1::2], strict=True) for slot in range(at, at + n)]


def _flat(slots: list[int]) -> list[int]:
    return [each for slot in slots for each in (slot, 1)]


class Running:
    """A sequence as its engine knows it."""

    def __init__(self, number: int, tokens: bytes, slots: list[int], written: int) -> None:
        self.number = number
        self.tokens = tokens
        self.slots = slots
        self.written = written
        self.told = len(tokens) // 4  # of the tokens, to the daemon


class Engine:
    """One process's life."""

    def __init__(self, path: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.wire = Wire(path, timeout=30.0)
        self.tenant = self.rng.choice("ab")
        page = self.rng.choice([1, 1, 4])
        append = self.rng.choice(["chain", "peel"])
        self.wire.hello(f"soak{seed}", namespace=Namespace(tenant=self.tenant), page=page, append=append)
        self.paint = Paint(self.wire, self.tenant)
        self.running: dict[int, Running] = {}
        self.fenced: list[
            tuple[int, bytes, list[int], set[int]]
        ] = []  # step, tokens, slots, positions given up
        self.pins: list[int] = []
        self.submitted = self.completed = 0
        self.acts = 0
        self.number = 0

    def prompt(self) -> bytes:
        """Of few different tokens, so that prompts share beginnings."""
        root = random.Random(self.rng.randrange(4))
        shared = b"".join(root.choice(ALPHABET) for _ in range(self.rng.randrange(90)))
        return (shared + b"".join(self.rng.choice(ALPHABET) for _ in range(self.rng.randrange(1, 12))))[:400]

    def check(self, sequence: Running) -> None:
        wrong = self.paint.wrong(sequence.tokens[: 4 * sequence.written], _flat(sequence.slots))
        assert not wrong, f"{sequence.number}: positions {wrong} of {sequence.written} read otherwise"

    def fill(self, sequence: Running, copies: list[int]) -> None:
        """Copies first, then writes what is not written."""
        memory = self.paint.memory
        for source, target, length in zip(copies[::3], copies[1::3], copies[2::3], strict=True):
            for plane in self.paint.planes:
                start, size = plane.offset + source * SLOT_BYTES, length * SLOT_BYTES
                goal = plane.offset + target * SLOT_BYTES
                memory[goal : goal + size] = memory[start : start + size]
        length = min(len(sequence.tokens) // 4, len(sequence.slots))
        self.paint.write(sequence.tokens[: 4 * length], _flat(sequence.slots), sequence.written)
        sequence.written = max(sequence.written, length)
        self.check(sequence)

    def act(self) -> None:
        """One thing."""
        self.acts += 1
        rng = self.rng
        choice = rng.random()
        if choice < 0.25 and len(self.running) < 6:
            self.allocate()
        elif not self.running or choice < 0.32:
            self.step()
        else:
            sequence = rng.choice(list(self.running.values()))
            rng.choice(
                [
                    self.extend,
                    self.extend,
                    self.commit,
                    self.commit,
                    self.fork,
                    self.trim,
                    self.free,
                    self.free,
                    self.pin,
                ]
            )(sequence)
        self.wire.pushes.clear()

    def allocate(self) -> None:
        wire = self.wire
        prompt = self.prompt()
        self.number += 1
        answer = wire.call(Allocate, wire.namespace, self.number, prompt)
        if isinstance(answer, Later):
            assert isinstance(wire.call(Withdraw, answer.ticket), Done)
            if self.running:
                self.free(self.rng.choice(list(self.running.values())))
            return
        assert isinstance(answer, Admitted), answer
        slots = _expand(answer.extents)
        assert len(slots) == answer.capacity >= len(prompt) // 4
        sequence = self.running[self.number] = Running(self.number, prompt, slots, answer.hit)
        # A hit is another's work, but for what is to be copied first.
        self.fill(sequence, answer.copies)

    def extend(self, sequence: Running) -> None:
        sequence.tokens += b"".join(self.rng.choice(ALPHABET) for _ in range(self.rng.randrange(1, 9)))
        if len(sequence.tokens) // 4 > len(sequence.slots):
            answer = self.wire.call(
                Extend, sequence.number, written=sequence.written, tokens=self.rng.choice([0, 8, 16])
            )
            if isinstance(answer, Later):
                sequence.tokens = sequence.tokens[: 4 * sequence.written]
                self.free(sequence)
                return
            assert isinstance(answer, Grown), answer
            sequence.slots = sequence.slots[: answer.position] + _expand(answer.extents)
            assert len(sequence.slots) == answer.capacity
            self.fill(sequence, answer.copies)
        else:
            self.fill(sequence, [])

    def commit(self, sequence: Running) -> None:
        length = self.rng.randrange(sequence.written + 1)
        news = sequence.tokens[4 * sequence.told : 4 * sequence.written]
        answer = self.wire.call(Commit, sequence.number, length, news)
        if isinstance(answer, Committed):
            sequence.told = max(sequence.told, sequence.written)
        assert isinstance(answer, (Committed, Error)), answer
        self.check(sequence)

    def fork(self, sequence: Running) -> None:
        length = self.rng.randrange(1, sequence.written + 1)
        self.number += 1
        answer = self.wire.call(Fork, sequence.number, self.number, length, sequence.written)
        if isinstance(answer, Forked):
            slots = sequence.slots[:length]
            self.running[self.number] = Running(self.number, sequence.tokens[: 4 * length], slots, length)
            self.running[self.number].told = min(sequence.told, length)
            self.check(self.running[self.number])
        else:
            assert isinstance(answer, (Later, Error)), answer
            if isinstance(answer, Later):
                self.wire.call(Withdraw, answer.ticket)

    def trim(self, sequence: Running) -> None:
        keep = self.rng.randrange(sequence.written + 1)
        fence = self.submitted if self.rng.random() < 0.5 else 0
        before = (sequence.tokens[: 4 * sequence.written], list(sequence.slots))
        answer = self.wire.call(Trim, sequence.number, keep_to=keep, fence=fence)
        if isinstance(answer, Error):
            assert answer.code == errors.BadRequest.code, answer
            return
        assert isinstance(answer, Trimmed)
        room = _expand(answer.extents)
        if fence > self.completed:
            # What it keeps behind the new end is its own to write.
            given_up = {place for place in range(keep, sequence.written) if before[1][place] not in room}
            self.fenced.append((fence, *before, given_up))
        sequence.slots = sequence.slots[: answer.capacity - len(room)] + room
        assert len(sequence.slots) == answer.capacity
        sequence.written = min(sequence.written, keep)
        sequence.tokens = sequence.tokens[: 4 * sequence.written]
        sequence.told = min(sequence.told, keep)
        self.check(sequence)

    def free(self, sequence: Running) -> None:
        self.check(sequence)
        fence = self.submitted if self.rng.random() < 0.6 else 0
        del self.running[sequence.number]
        if self.rng.random() < 0.5:
            self.wire.send(Free(0, sequence.number, fence))
        else:
            assert isinstance(self.wire.call(Free, sequence.number, fence), Done)
        if fence > self.completed:
            tokens = sequence.tokens[: 4 * sequence.written]
            self.fenced.append((fence, tokens, sequence.slots, set(range(sequence.written))))

    def pin(self, sequence: Running) -> None:
        if self.pins and self.rng.random() < 0.6:
            assert isinstance(self.wire.call(Unpin, self.pins.pop()), Done)
            return
        answer = self.wire.call(Pin, self.wire.namespace, sequence.tokens)
        assert isinstance(answer, (Pinned, Error)), answer
        if isinstance(answer, Pinned) and answer.pin:
            self.pins.append(answer.pin)

    def step(self) -> None:
        """A step begins, or the device is done with some; what it still reads is checked."""
        if self.rng.random() < 0.5:
            self.submitted += 1
        else:
            done = self.rng.randrange(self.completed, self.submitted + 1)
            for fence, tokens, slots, given_up in self.fenced:
                wrong = given_up.intersection(self.paint.wrong(tokens, _flat(slots)))
                assert not wrong, f"behind step {fence} at {self.completed}: positions {wrong} read otherwise"
            self.completed = done
            self.fenced = [each for each in self.fenced if each[0] > done]
        self.wire.step(self.submitted, self.completed)

    def leave(self) -> None:
        """In good order."""
        self.completed = self.submitted
        self.wire.step(self.submitted, self.completed)
        self.paint.memory.close()
        self.wire.bye()
        self.wire.close()


def engine(path: Path, seed: int) -> Callable[[Callable[[Any], None]], None]:
    """Lives of so many acts one after the other; tells how many after each."""

    def work(tell: Callable[[Any], None]) -> None:
        number = 0
        while True:
            one = Engine(path, seed * 1000 + number)
            for _ in range(one.rng.randrange(20, 300)):
                one.act()
            one.leave()
            number += 1
            tell(one.acts)
            time.sleep(0)

    return work


__all__ = ["Engine", "Never", "engine"]
