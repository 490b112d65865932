"""A sequence's table and cursor against the plainest twin: a list of slots, one for each position."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvslot.api.client.table import SENT, SETTLED, Table, freed, token_bytes
from kvslot.api.wire import BadRequest, Ended, PeerFault
from kvslot.api.wire.messages import Admitted, Grown, Later


class Asking(Table):
    """A table whose questions are only counted."""

    __slots__ = ("questions",)

    def __init__(self) -> None:
        super().__init__(1, 0, 0)
        self.questions = 0

    def append(self, token: int) -> int:
        """As Sequence does."""
        slot = self._slot
        if slot == self._stop:
            self._check()
            assert self.room
            slot = self._advance()
        self._tell(token)
        self._slot = slot + 1
        return slot

    def _ask(self) -> None:
        self.questions += 1
        if self._asked == SETTLED:
            self._asked = SENT


def expanded(extents: list[int]) -> list[int]:
    return [s for i in range(0, len(extents), 2) for s in range(extents[i], extents[i] + extents[i + 1])]


class Life(RuleBasedStateMachine):
    """Appends, grows, peels, rolls back and forks; slots and tokens are compared with lists after every step."""

    @initialize(prompt=st.integers(1, 40), room=st.integers(0, 20), seed=st.integers(0, 1 << 30))
    def begin(self, prompt: int, room: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.fresh = 16
        self.table = Asking()
        extents = self.extents(prompt + room)
        self.places = expanded(extents)
        self.tokens = list(range(prompt))
        self.told = self.shared = prompt
        self.table._begin(prompt, Admitted(1, 0, prompt + room, extents), array("i", self.tokens).tobytes())

    def extents(self, total: int) -> list[int]:
        """Slots never used before, in pieces that sometimes touch."""
        out: list[int] = []
        while total:
            run = self.random.randint(1, total)
            self.fresh += self.random.choice((0, 0, 3))
            out += (self.fresh, run)
            self.fresh += run
            total -= run
        return out

    @precondition(lambda self: self.table.room)
    @rule(count=st.integers(1, 20))
    def append(self, count: int) -> None:
        for _ in range(min(count, self.table.room)):
            token = self.random.randint(-(2**31), 2**31 - 1)
            assert self.table.append(token) == self.places[len(self.tokens)]
            self.tokens.append(token)

    @rule(run=st.integers(1, 40))
    def grow(self, run: int) -> None:
        extents = self.extents(run)
        before = self.table.capacity
        self.places += expanded(extents)
        self.table._grown(Grown(1, before, before + run, extents))

    @precondition(lambda self: not self.table.room)
    @rule(run=st.integers(1, 20), peel=st.integers(1, 8))
    def peel(self, run: int, peel: int) -> None:
        before = self.table.capacity
        peel = min(peel, before)
        extents = self.extents(peel + run)
        copies = [self.places[before - peel], extents[0], 1]
        self.places[before - peel :] = expanded(extents)
        self.table._grown(Grown(1, before - peel, before + run, extents, copies))
        assert self.table.take_copies()[-3:] == copies
        assert not self.table.copies

    @rule(share=st.floats(0, 1))
    def commit(self, share: float) -> None:
        length = int(share * len(self.tokens))
        untold = self.table._untold(length)
        assert list(array("i", untold)) == self.tokens[self.told : length]
        self.table._was_told(length)
        self.told = max(self.told, length)
        self.shared = max(self.shared, length)

    @rule(back=st.integers(0, 12))
    def roll_back(self, back: int) -> None:
        keep = len(self.tokens) - back
        if keep < max(self.told, self.shared):
            return
        self.table._roll_back(keep)
        del self.tokens[keep:]

    @rule(share=st.floats(0.01, 1), room=st.integers(0, 10))
    def trim(self, share: float, room: int) -> None:
        keep = max(1, int(share * len(self.tokens)))
        extents = self.extents(room)
        self.places[keep:] = expanded(extents)
        self.table._trimmed(keep, keep + room, extents)
        del self.tokens[keep:]
        self.told = min(self.told, keep)
        self.shared = min(self.shared, keep)

    @rule(share=st.floats(0.01, 1))
    def fork(self, share: float) -> None:
        """The child goes on; the parent's table must not notice."""
        length = max(1, int(share * len(self.tokens)))
        parent, before = self.table, expanded(self.table.extents)
        child = Asking()
        child._fork_from(parent, length)
        assert child.room == 0
        self.table = child
        del self.tokens[length:], self.places[length:]
        self.told, self.shared = min(self.told, length), length
        self.grow(3)
        self.append(2)
        assert expanded(parent.extents) == before

    @rule()
    def restart(self) -> None:
        """The next daemon goes on with it, and has been told of all."""
        self.table._goes_on()
        self.told = self.shared = len(self.tokens)

    @invariant()
    def agrees(self) -> None:
        table, length = self.table, len(self.tokens)
        assert list(array("i", table._all_tokens())) == self.tokens
        assert table.length == length
        assert table.capacity == len(self.places)
        assert table.room == len(self.places) - length
        assert expanded(table.extents) == self.places
        assert list(table._pending) == self.tokens[self.told :]
        for position in {0, length - 1, length // 2}:
            assert table.slot_of(position) == self.places[position]
        # Neighbours are one extent: kernels and indices are paid by the extent.
        starts, sizes = table.extents[::2], table.extents[1::2]
        assert all(size > 0 for size in sizes)
        assert len(starts) == len(sizes)


TestLife = Life.TestCase
TestLife.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


def test_more_is_asked_for_once_when_half_a_run_is_used() -> None:
    """Each run leads to one question, put when its second half is begun."""
    table = Asking()
    table._begin(10, Admitted(1, 0, 42, [16, 42]))
    asked = []
    for i in range(32):
        table.append(i)
        asked.append(table.questions)
    assert asked == [0] * 16 + [1] * 16
    table._grown(Grown(1, 42, 74, [58, 32]))
    for i in range(32):
        table.append(i)
    assert table.questions == 2
    assert table.extents == [16, 74 - 10 + 10]


def test_an_answer_that_does_not_add_up_is_a_fault() -> None:
    """Growth from beyond the end, or extents that place fewer positions than said, end the connection."""
    table = Asking()
    with pytest.raises(PeerFault, match="do not place"):
        table._begin(4, Admitted(1, 0, 8, [16, 7]))
    table._begin(4, Admitted(1, 0, 8, [16, 8]))
    with pytest.raises(PeerFault, match="grew from 9, but ends at 8"):
        table._grown(Grown(1, 9, 10, [99, 1]))
    with pytest.raises(PeerFault, match="cut to 4"):
        table._trimmed(4, 5, [99, 2])


def test_copies_into_what_was_given_back_are_not_made() -> None:
    """After a roll-back only copies to slots that the sequence still has are left: others may be another's by now."""
    table = Asking()
    table._begin(8, Admitted(1, 0, 8, [16, 8]))
    table._grown(Grown(1, 4, 20, [40, 2, 60, 14], [20, 40, 2, 22, 60, 2]))
    assert table.copies == [20, 40, 2, 22, 60, 2]
    table._trimmed(5, 5, [])
    assert table.take_copies() == [20, 40, 1]
    table._trimmed(3, 3, [])
    assert table.copies == []


def test_an_ended_table_gives_no_slot() -> None:
    """However much room there was, an ended sequence has none, and says that it was freed."""
    table = Asking()
    table._begin(4, Admitted(1, 0, 8, [16, 8]))
    table.append(1)
    table._end(freed(1))
    assert table.ended
    assert table.length == 5
    with pytest.raises(Ended, match="sequence 1 was freed"):
        table.append(2)
    assert "ended" in repr(table)


def test_what_is_surely_written() -> None:
    """All tokens, when no step is under way; while some are, those of before a step that has completed since."""
    table = Asking()
    table._begin(4, Admitted(1, 0, 100, [16, 100]))
    assert table._finished(0, 0) == 4
    assert table._finished(1, 0) == 0  # asked for the first time: nothing is known of steps before
    table.append(1)
    assert table._finished(2, 0) == 0
    assert table._finished(3, 2) == 4  # step 2, of which the first answer was to be sure, has completed
    assert table._finished(4, 3) == 0
    assert table._finished(4, 4) == 5


def test_a_refusal_is_kept_until_room_comes() -> None:
    """What the daemon said of a refill stands with the sequence until it has room again."""
    table = Asking()
    table._begin(4, Admitted(1, 0, 8, [16, 8]))
    later = Later(1, 7, "memory", 16, 0, 0, 0, 100)
    table._refused(later, 50.0)
    assert table._answer is later
    assert table._retry_at == pytest.approx(50.1)
    table._grown(Grown(1, 8, 16, [99, 8]))
    assert table._answer is None


def test_a_token_that_is_none_changes_nothing() -> None:
    """A number beyond int32, or no number, is an error and takes no slot."""
    table = Asking()
    table._begin(4, Admitted(1, 0, 8, [16, 8]))
    wrong: list[tuple[Any, type[Exception]]] = [(2**31, OverflowError), ("a", TypeError), (1.5, TypeError)]
    for token, error in wrong:
        with pytest.raises(error):
            table.append(token)
    assert table.length == 4
    assert table.append(5) == 20


NUMBERS = [0, 1, -1, 2**31 - 1, -(2**31)]
PACKED = array("i", NUMBERS).tobytes()


@pytest.mark.parametrize(
    "tokens",
    [
        PACKED,
        bytearray(PACKED),
        memoryview(PACKED),
        NUMBERS,
        tuple(NUMBERS),
        array("i", NUMBERS),
        array("q", NUMBERS),
        np.array(NUMBERS, dtype=np.int32),
        np.array(NUMBERS, dtype=np.int64),
        np.repeat(np.array(NUMBERS, dtype=np.int32), 2)[::2],
        dict.fromkeys(NUMBERS),
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{getattr(tokens, 'dtype', getattr(tokens, 'typecode', ''))}",
)
def test_tokens_in_any_form(tokens: Any) -> None:
    """Whatever holds int32 numbers becomes the same bytes."""
    assert token_bytes(tokens) == PACKED


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        (b"12345", "4 bytes each"),
        ([2**31], "whole numbers"),
        ([1.5], "whole numbers"),
        ("text", "whole numbers"),
        (7, "whole numbers"),
        (np.zeros((2, 2), dtype=np.int32), "2 dimensions"),
        (np.array([2**40]), "whole numbers"),
        (np.array([1.5]), "whole numbers"),
    ],
    ids=str,
)
def test_what_is_no_tokens_is_refused(tokens: Any, why: str) -> None:
    """What cannot be int32 without loss is refused, with what tokens are."""
    with pytest.raises(BadRequest, match=why):
        token_bytes(tokens)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_tokens_come_back_as_they_were(tokens: list[int]) -> None:
    """Numbers survive the way into bytes and back."""
    assert list(array("i", token_bytes(tokens))) == tokens
    assert token_bytes(np.array(tokens, dtype=np.int64)) == token_bytes(tokens)
