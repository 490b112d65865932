"""Engines that outlive their daemon: they come back to the next one, and look at every byte they were promised.

What such an engine held when its connection ended is its own until it says otherwise: it looks at it when it is back,
goes on with some of its sequences as they were, begins new work, looks again, and only then releases the rest.  What it
is told is cached it compares with the colours.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kvslot.api.wire import VERSION, Ended, NotFound, SessionPage
from kvslot.api.wire.messages import (
    Done,
    Error,
    Hello,
    Namespace,
    Reclaim,
    Reclaimed,
    Release,
    Welcome,
)

from ..faults.actors import Paint
from ..faults.engines import Engine, Running, _flat
from ..tools.wire import Wire


class Past(NamedTuple):
    """What a session held when its connection ended."""

    welcome: Welcome
    paint: Paint
    wire: Wire
    running: dict[int, Running]
    fenced: list[tuple[int, bytes, list[int], set[int]]]

    def look(self) -> None:
        """At all of it, through the mapping of then."""
        for sequence in self.running.values():
            wrong = self.paint.wrong(sequence.tokens[: 4 * sequence.written], _flat(sequence.slots))
            assert not wrong, f"{sequence.number}: positions {wrong} of {sequence.written} were overwritten"
        for fence, tokens, slots, given_up in self.fenced:
            found = given_up.intersection(self.paint.wrong(tokens, _flat(slots)))
            assert not found, f"behind step {fence}: positions {found} were overwritten"


class Returning(Engine):
    """An engine that is told when its daemon is another one."""

    def __init__(self, path: Path, seed: int) -> None:
        super().__init__(path, seed)
        self.path = path
        self.returns = self.strange = self.gone_on = 0
        self.trimmed = 0  # the sequence whose trim is under way
        self.family: set[int] = set()  # sequences that have been forked, or are forks
        self.past: list[Past] = []  # not released yet
        self.over: list[Past] = []  # perhaps: nobody said so

    def live(self, tell: Callable[[Any], None]) -> None:
        """Acts until killed, over the lives of its daemons."""
        while True:
            try:
                if self.past or self.over:
                    self.come_back()
                self.act()
            except (ConnectionError, TimeoutError):
                self.lose()
            if self.acts % 20 == 0:
                assert self.wire.welcome is not None
                tell([self.acts, self.returns, self.strange, self.wire.welcome.boot, self.gone_on])

    def lose(self) -> None:
        """The connection has ended; what was held is kept in mind, and looked at."""
        assert self.wire.welcome is not None
        if self.wire.welcome not in [each.welcome for each in self.past]:
            self.past.append(Past(self.wire.welcome, self.paint, self.wire, self.running, self.fenced))
            self.running, self.fenced, self.pins = {}, [], []
            self.submitted = self.completed = 0
        for each in self.past:
            each.look()

    def trim(self, sequence: Running) -> None:
        self.trimmed = sequence.number
        super().trim(sequence)
        self.trimmed = 0

    def fork(self, sequence: Running) -> None:
        self.family |= {sequence.number, self.number + 1}
        super().fork(sequence)

    def go_on(self, past: Past) -> None:
        """With what ran in the session that this one took the place of; its device has ended with all of that."""
        for number, sequence in list(past.running.items()):
            if number == self.trimmed or not sequence.written or self.rng.random() < 0.2:
                continue
            answer = self.wire.call(
                Reclaim, past.welcome.session, past.welcome.secret, self.wire.namespace, number,
                sequence.tokens[: 4 * sequence.written], _flat(sequence.slots),
            )  # fmt: skip
            if isinstance(answer, Error):
                # What forks share only one of them can go on with; of any other all is there.
                assert answer.code == Ended.code, answer
                assert number in self.family, answer
                continue
            assert isinstance(answer, Reclaimed), answer
            del past.running[number]
            sequence.tokens = sequence.tokens[: 4 * sequence.written]
            sequence.told = sequence.written
            self.running[number] = sequence
            self.check(sequence)
            self.gone_on += 1

    def come_back(self) -> None:
        """To whoever serves now."""
        before = self.past[-1].welcome if self.past else self.over[-1].welcome
        if self.past:
            wire = Wire(self.path, timeout=30.0)
            try:
                answer = wire.call(
                    Hello, VERSION, "returning", namespace=Namespace(tenant=self.tenant), boot=before.boot,
                    resume=before.session, secret=before.secret,
                )  # fmt: skip
            except (ConnectionError, TimeoutError):
                wire.close()
                raise
            assert isinstance(answer, (Welcome, Error)), answer
            if isinstance(answer, Welcome):
                assert answer.former == before.session, answer
                assert answer.pool.generation == before.pool.generation
                wire.welcome = answer
                wire.page = SessionPage(wire.descriptors[answer.descriptors.index("page")])
            else:
                # Nothing of it is left: it says so, and does not invent anything.
                self.strange += 1
                wire.close()
                wire = Wire(self.path, timeout=30.0)
                wire.hello("anew", namespace=Namespace(tenant=self.tenant))
            self.returns += 1
            self.wire, self.paint = wire, Paint(wire, self.tenant)
            if isinstance(answer, Welcome):
                self.go_on(self.past[-1])
            self.trimmed = 0
        # New work begins while what was held is still to be looked at.
        for _ in range(4):
            self.allocate()
        for each in self.past:
            each.look()
        self.over += self.past
        self.past = []
        while self.over:
            past = self.over[-1]
            released = self.wire.call(Release, past.welcome.session, past.welcome.secret)
            assert isinstance(released, (Done, Error)), released
            assert isinstance(released, Done) or released.code == NotFound.code, released
            past.paint.memory.close()
            past.wire.close()
            self.over.pop()


def returning(path: Path, seed: int) -> Callable[[Callable[[Any], None]], None]:
    """The life of one, as `actors.child` wants it; tells [acts, returns, those to nothing, boot, reclaimed]."""

    def work(tell: Callable[[Any], None]) -> None:
        Returning(path, seed).live(tell)

    return work
