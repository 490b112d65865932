"""The column of states that the journal and the map of blocks are made from."""

import random

import numpy as np

from kvslot.allocator import Admitted, Pool, PoolConfig, Space, State
from kvslot.daemon.journal.states import READY, States


def counted(states: States) -> list[int]:
    return [int(n) for n in np.bincount(np.frombuffer(states.view, np.uint8), minlength=8)]


def test_a_new_column_is_padding_and_free() -> None:
    """A column begins as a new pool does: its padding, and everything else free."""
    states = States(64, 16)
    assert bytes(states.view) == bytes([State.PADDING]) * 16 + bytes(48)


def test_short_and_long_stretches_are_set_and_nothing_beside_them() -> None:
    """A change sets exactly its slots, whether its bytes stand ready or are made for it."""
    for length in (0, 1, READY, READY + 1, 3 * READY):
        states = States(4 * READY, 1)
        states.shift(2, length, State.FREE, State.CACHED)
        assert bytes(states.view[:2]) == bytes([State.PADDING, State.FREE])
        assert bytes(states.view[2 : 2 + length]) == bytes([State.CACHED]) * length
        assert not any(states.view[2 + length :])


def test_the_column_counts_what_the_ledger_counts() -> None:
    """After every verb of a life of allocations, commits and frees the column has as many slots of each state."""
    pool = Pool(PoolConfig(blocks=64, block_size=16))
    states = States(pool.slots, pool.padding)
    pool.ledger.journal = states.shift
    session = pool.open_session()
    root = pool.open_space(Space("", "m", "", ""))
    draw = random.Random(7)
    running: list[tuple[int, int]] = []
    for number in range(300):
        tokens = np.arange(draw.randrange(1, 90), dtype="<i4") // 3 + number % 5
        answer = pool.allocate(session, root, tokens.tobytes(), now=float(number))
        if isinstance(answer, Admitted):
            running.append((answer.sequence, len(tokens)))
        if running and draw.random() < 0.7:
            handle, length = running.pop(draw.randrange(len(running)))
            if draw.random() < 0.8:
                pool.commit(session, handle, length)
            pool.free(session, handle)
        assert counted(states) == pool.ledger.counts
