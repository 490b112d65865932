"""Faults that somebody found by trying to break the core, each as the example that showed it."""

import pytest

from kvslot.allocator import (
    Admitted,
    BadRequest,
    Grown,
    Later,
    Never,
    OutOfTurn,
    Pool,
    PoolConfig,
    Preempt,
    Pressure,
    Published,
    Reason,
    Space,
    UnknownHandle,
)

from .tools import admit, cache, fresh, grown, later, make, root, sound


@pytest.mark.parametrize("priority", [-1, 8, 128, 2**70])
def test_a_priority_is_checked_at_the_door(priority: int) -> None:
    """A priority out of range is refused before anything has changed."""
    pool = make()
    s = pool.open_session()
    with pytest.raises(BadRequest):
        pool.allocate(s, root(pool), fresh(4, 0), priority=priority)
    assert not pool.sequences
    sound(pool)


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_tokens_are_bytes(kind: type) -> None:
    """What is no bytes object is refused by every verb that takes tokens."""
    pool = make()
    s = pool.open_session()
    a = admit(pool, s, fresh(4, 0))
    with pytest.raises(BadRequest):
        pool.allocate(s, root(pool), kind(fresh(4, 9)))
    with pytest.raises(BadRequest):
        pool.commit(s, a.sequence, 5, kind(fresh(1, 9)))
    with pytest.raises(BadRequest):
        pool.probe(root(pool), kind(fresh(4, 9)))
    sound(pool)


def test_growth_bound_by_its_quota_comes_before_its_sessions_new_requests() -> None:
    """A session at its quota cannot let its own new requests starve the growth of its oldest sequence."""
    pool = make(blocks=40, block_size=4)
    s = pool.open_session(quota=16)
    oldest = admit(pool, s, fresh(4, 0))
    victim = admit(pool, s, fresh(8, 100))
    while isinstance(pool.extend(s, victim.sequence, tokens=1), Grown):
        pass
    waiting = later(pool.extend(s, oldest.sequence, tokens=4, now=1.0))
    assert waiting.reason == Reason.QUOTA
    pool.free(s, victim.sequence, now=1.0)
    taken = s.quota - s.charged - 4
    new = later(pool.allocate(s, root(pool), fresh(taken + 1, 900), now=1.0))
    assert new.reason == Reason.QUOTA
    assert isinstance(pool.extend(s, oldest.sequence, tokens=4, now=1.0), Grown)
    sound(pool)


def test_a_victim_alone_in_the_pool_is_let_on() -> None:
    """When those it was named for have gone, a victim past its deadline owes nothing any more."""
    pool = make(blocks=5, block_size=4, quantum=1, watermark=0.0, reclaim_patience=0.0, preempt_deadline=0.1)
    one, two = pool.open_session(), pool.open_session()
    a = admit(pool, one, fresh(6, 0))
    b = admit(pool, two, fresh(6, 100))
    for session, each in ((one, a), (two, b)):
        while isinstance(pool.extend(session, each.sequence, tokens=1), Grown):
            pass
    pool.extend(one, a.sequence, tokens=1, now=1.0)
    pool.poll(1.0)
    assert any(isinstance(push, Preempt) for push in pool.poll(1.01)) or two.owes
    pool.extend(two, b.sequence, tokens=1, now=1.02)
    pool.poll(1.3)
    pool.free(one, a.sequence, now=1.4)
    answer = pool.extend(two, b.sequence, tokens=1, now=1.5)
    assert isinstance(answer, Grown), answer
    sound(pool)


def test_a_dead_sessions_promise_holds_nobody_up() -> None:
    """Nobody waits for a prefix that a lost or stalled session was computing."""
    for stall in (False, True):
        pool = make(blocks=80, block_size=4)
        dying, s = pool.open_session(), pool.open_session()
        tokens = fresh(100, 0)
        admit(pool, dying, tokens)
        held = later(pool.allocate(s, root(pool), tokens, wait_for_commit=True))
        assert held.reason == Reason.COMMIT
        if stall:
            pool.stall(dying)
        else:
            pool.lose(dying)
        answer = pool.allocate(s, root(pool), tokens, wait_for_commit=True, ticket=held.ticket)
        assert isinstance(answer, Admitted)
        sound(pool)


def test_published_prefix_is_told() -> None:
    """Whoever waits for a prefix is told when it is there, and then finds it."""
    pool = make(blocks=80, block_size=4)
    one, two = pool.open_session(), pool.open_session()
    tokens = fresh(100, 0)
    a = admit(pool, one, tokens)
    held = later(pool.allocate(two, root(pool), tokens, wait_for_commit=True))
    pool.commit(one, a.sequence, 100)
    assert pool.poll(1.0) == [Published(two.handle, held.ticket)]
    assert admit(pool, two, tokens, wait_for_commit=True, ticket=held.ticket).hit == 99
    sound(pool)


def test_a_window_slides_past_the_size_of_the_pool() -> None:
    """Positions that a sliding window has let go of no longer count against the pool."""
    pool = Pool(PoolConfig(blocks=6, block_size=4, windowed=True, watermark=0.0))
    s = pool.open_session()
    handle = admit(pool, s, fresh(4, 0)).sequence
    for length in range(5, 200):
        while pool.sequences[handle].capacity < length:
            grown(pool.extend(s, handle))
        pool.wrote(s, handle, length)
        if length > 8:
            pool.trim(s, handle, keep_from=length - 8)
        sound(pool)


def test_growth_beside_somebody_elses_pin_is_later() -> None:
    """What another session's pin keeps comes back: growth that it blocks is LATER, not NEVER."""
    pool = make(blocks=11, block_size=4, watermark=0.0, quantum=1)
    s, keeper = pool.open_session(), pool.open_session()
    cache(pool, s, fresh(20, 0))
    assert pool.pin(keeper, root(pool), fresh(20, 0))[1] == 20
    a = admit(pool, s, fresh(10, 500))
    answer: object = None
    while isinstance(answer := pool.extend(s, a.sequence, tokens=1), Grown):
        pass
    assert isinstance(answer, Later)
    assert isinstance(pool.extend(s, a.sequence, tokens=40), Never)
    sound(pool)


def test_running_sequences_grow_whatever_tickets_wait() -> None:
    """A session with as many tickets as it may have can still grow what runs."""
    pool = make(blocks=11, block_size=4, quantum=1)
    s, other = pool.open_session(), pool.open_session()
    a, b = admit(pool, s, fresh(18, 0)), admit(pool, other, fresh(18, 300))
    refused = 0
    for i in range(2000):
        try:
            later(pool.allocate(s, root(pool), fresh(30, 1000 + 40 * i)))
        except BadRequest:
            refused += 1
    assert refused
    answer: object = None
    while isinstance(answer := pool.extend(s, a.sequence, tokens=1), Grown):
        pass
    assert isinstance(answer, Later)
    pool.free(other, b.sequence)
    assert isinstance(pool.extend(s, a.sequence, tokens=1), Grown)
    sound(pool)


def test_namespaces_end() -> None:
    """An empty namespace can be closed; one with a prefix or a reader cannot; a closed one is unknown."""
    pool = make()
    s = pool.open_session()
    space = pool.open_space(Space(salt="once"))
    a = pool.allocate(s, space, fresh(5, 0))
    assert isinstance(a, Admitted)
    with pytest.raises(OutOfTurn):
        pool.close_space(space)
    pool.commit(s, a.sequence, 5)
    pool.free(s, a.sequence)
    with pytest.raises(OutOfTurn):
        pool.close_space(space)
    pool.evict(pool.usable)
    pool.close_space(space)
    sound(pool)
    with pytest.raises(UnknownHandle):
        pool.probe(space, fresh(5, 0))
    assert pool.open_space(Space(salt="once")) in pool.roots
    sound(pool)


def test_a_fork_waits_for_the_answer_its_session_owes() -> None:
    """Past a Preempt's deadline a session forks no more than it allocates."""
    pool = make(blocks=5, block_size=4, quantum=1, watermark=0.0, reclaim_patience=0.0, preempt_deadline=0.1)
    one, two = pool.open_session(), pool.open_session()
    a = admit(pool, one, fresh(6, 0))
    b = admit(pool, two, fresh(6, 100))
    pool.wrote(two, b.sequence, 6)
    for session, each in ((one, a), (two, b)):
        while isinstance(pool.extend(session, each.sequence, tokens=1), Grown):
            pass
    pool.extend(one, a.sequence, tokens=1, now=1.0)
    assert two.owes
    answer = pool.fork(two, b.sequence, now=2.0)
    assert later(answer).reason == Reason.PREEMPT_FIRST
    sound(pool)


def test_a_dead_member_of_a_group_is_not_waited_for() -> None:
    """When one process of an engine is proven gone, the fences of the others pass without it."""
    pool = make()
    first = pool.open_session()
    second = pool.open_session(group=first)
    a = admit(pool, first, fresh(8, 0))
    pool.progress(first, 1, 0)
    pool.free(first, a.sequence, fence=1)
    pool.progress(first, 1, 1)
    assert pool.statistics().fenced == a.capacity, "the second has not completed the step"
    pool.lose(second)
    assert pool.statistics().fenced == a.capacity, "it may be alive"
    pool.gone(second)
    assert pool.statistics().fenced == 0
    b = admit(pool, first, fresh(8, 100))
    pool.progress(first, 2, 1)
    pool.free(first, b.sequence, fence=2)
    pool.progress(first, 2, 2)
    assert pool.statistics().fenced == 0
    sound(pool)


def test_a_trim_under_pressure_gives_back_second_runs() -> None:
    """Whoever is asked for second runs and trims to what is written keeps one run at the most."""
    pool = make(blocks=9, block_size=4, quantum=4)
    s = pool.open_session()
    a, b = admit(pool, s, fresh(4, 0)), admit(pool, s, fresh(4, 100))
    grown = pool.extend(s, a.sequence, tokens=8)
    assert isinstance(grown, Grown)
    pool.extend(s, b.sequence, tokens=pool.statistics().free)
    pool.wrote(s, b.sequence, pool.sequences[b.sequence].capacity)
    later = pool.extend(s, b.sequence, tokens=1)
    assert isinstance(later, Later)
    assert Pressure(s.handle) in pool.pushes
    pool.trim(s, a.sequence, keep_to=pool.sequences[a.sequence].length)
    kept = pool.sequences[a.sequence]
    assert kept.capacity - kept.length <= 4
    assert pool.statistics().free >= 1
    sound(pool)
