"""A journal may end at any store of any verb; what is made of it then is right."""

from typing import Any

import numpy as np
import pytest

from kvslot.allocator import Admitted, Aside, PoolConfig, Space, audit, reclaiming
from kvslot.daemon.journal.writer import Writer

from .histories import UNTOLD, History, cached, free, reborn

TOKENS = [np.arange(start, start + 40, dtype="<i4").tobytes() for start in (0, 1000)]

CONFIGS = {
    "tokens": PoolConfig(blocks=17, block_size=16, quantum=4),
    "small": PoolConfig(blocks=9, block_size=8, quantum=4, eviction="s3fifo"),
    "opaque": PoolConfig(blocks=33, block_size=4, opaque=True),
    "wiped": PoolConfig(blocks=17, block_size=16, quantum=4, scrubs=True),
}

DIVIDE = reclaiming._divide


def _all_cached(session: Any, extents: list[int], cached: list[int], hit: int, aside: Any) -> Any:
    """Whatever stands below the hit is taken to be what is cached."""
    table = extents.copy()
    return DIVIDE(session, extents, table, hit, aside)


FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "every slot is taken to be set aside": (Aside, "run", lambda self, slot: (True, 1 << 62), ""),
    "what is taken out stays set aside": (Aside, "take", lambda self, own: None, "overlaps the owner"),
    "slots below the hit are not looked at": (reclaiming, "_divide", _all_cached, ""),
    "the journal is not told whose they are": (Writer, "owned", lambda *_: None, ""),
    "a table has a slot less than it says": (
        reclaiming, "_size", lambda pool, extents: sum(extents[1::2]) + 1, "its capacity is",
    ),
}  # fmt: skip
"""What is planted, and what is said of it."""


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("seed", range(2))
def test_a_journal_cut_at_any_store_gives_nothing_wrong(kind: str, seed: int) -> None:
    """Whatever store was the last, what is cached afterwards is what its slots hold, and nobody's slots are free."""
    history = History(seed, CONFIGS[kind])
    due = 0
    for number in range(60):
        history.act()
        due += number % 20 == 19
        if due and any(colour[0] != UNTOLD for colour in cached(history.pool).values()):
            history.die()
            due = 0
    assert history.restored == history.cached > 0
    assert history.idled, "no session ever held nothing"
    assert history.gone_on, "no sequence ever went on"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_reclaiming_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These histories find out what a slot that was not looked at comes to."""
    owner, name, planted, said = FAULTS[fault]
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises((AssertionError, IndexError), match=said or None):
        _lives(20)


def _lives(seeds: int) -> None:
    for seed in range(seeds):
        history = History(seed, CONFIGS["tokens"])
        for number in range(60):
            history.act()
            if number % 20 == 19:
                history.die()


def test_only_who_may_use_slots_is_waited_for() -> None:
    """What is cached is held for a session from before its first request until it is said to use nothing."""
    history = History(1, CONFIGS["tokens"])
    pool = history.pool
    one, _ = history.live()
    root = pool.open_space(Space("t", "0"))

    def waited_for() -> bool:
        takeover = reborn(bytes(history.buffer), history.config, lambda entry: True)[1]
        return takeover.everybody is not None

    history.holds(one)
    wrote = pool.allocate(one, root, TOKENS[0])
    assert isinstance(wrote, Admitted)
    pool.commit(one, wrote.sequence, 40)
    history.idle()
    assert waited_for()
    pool.free(one, wrote.sequence)
    assert waited_for()
    history.idle()
    assert not waited_for()
    history.holds(one)
    assert waited_for()


def test_private_slots_come_back_with_their_own_session() -> None:
    """What one session had is free once it is gone, while what another one has stays aside."""
    history = History(1, CONFIGS["tokens"])
    pool = history.pool
    one, other = history.live()
    root = pool.open_space(Space("t", "0"))
    history.holds(one)
    history.holds(other)
    ours, theirs = (pool.allocate(session, root, TOKENS[index]) for index, session in enumerate((one, other)))
    assert isinstance(ours, Admitted)
    assert isinstance(theirs, Admitted)
    before = free(pool)
    pool, takeover, _ = reborn(bytes(history.buffer), history.config, lambda entry: entry.number != 1)
    while not pool.sweep():
        pass
    assert takeover.restored.sessions.keys() == {1, 2}
    assert free(pool) == before | slots(ours.extents)
    assert not audit(pool)


def test_what_anybody_may_read_waits_for_all_even_over_two_starts() -> None:
    """Slots that were cached, and are not any more, are not free because the one who wrote them is gone."""
    history = History(1, CONFIGS["tokens"])
    pool = history.pool
    one, other = history.live()
    history.holds(one)
    history.holds(other)
    untold = pool.open_space(Space("t", str(UNTOLD), salt="long" * 2000))
    wrote = pool.allocate(one, untold, TOKENS[0])
    assert isinstance(wrote, Admitted)
    pool.commit(one, wrote.sequence, 40)
    pool.free(one, wrote.sequence)
    assert isinstance(pool.allocate(other, untold, TOKENS[0]), Admitted)
    shared = {slot for slot, colour in cached(pool).items() if colour[0] == UNTOLD}
    assert len(shared) == 40
    pool, _, buffer = reborn(bytes(history.buffer), history.config, lambda entry: True)
    assert not shared & free(pool)
    pool, _, _ = reborn(bytes(buffer), history.config, lambda entry: entry.number != 1)
    while not pool.sweep():
        pass
    assert not shared & free(pool)
    pool, _, _ = reborn(bytes(buffer), history.config, lambda entry: False)
    while not pool.sweep():
        pass
    assert shared < free(pool)
    assert not audit(pool)


def slots(extents: list[int]) -> set[int]:
    return {s for i in range(0, len(extents), 2) for s in range(extents[i], extents[i] + extents[i + 1])}
