"""Sessions, groups, fences and deaths: what is given back when."""

import pytest

from kvslot.allocator import (
    BadRequest,
    EndedHandle,
    ForeignHandle,
    Grown,
    Later,
    Life,
    OutOfTurn,
    UnknownHandle,
)

from .tools import admit, cache, complete, fresh, later, make, root, slots, sound, step


def test_free_waits_for_its_fence() -> None:
    """Slots and the hold of a freed sequence stay untouchable until the fence's step has completed, no longer."""
    pool = make()
    s = pool.open_session()
    cache(pool, s, fresh(6, 0))
    a = admit(pool, s, fresh(10, 0))
    assert a.hit == 6
    first, second = step(pool, s), step(pool, s)
    pool.free(s, a.sequence, fence=first)
    assert pool.statistics().fenced == a.capacity - 6
    assert pool.statistics().leased == 6
    pool.progress(s, second, first)
    assert pool.statistics().fenced == pool.statistics().leased == 0
    sound(pool)


def test_fence_beyond_submitted_is_refused() -> None:
    """A fence names a step that was submitted; one beyond is refused and frees nothing."""
    pool = make()
    s = pool.open_session()
    a = admit(pool, s, fresh(10, 0))
    with pytest.raises(BadRequest, match="fence 1"):
        pool.free(s, a.sequence, fence=1)
    with pytest.raises(BadRequest, match="fence 1"):
        pool.trim(s, a.sequence, keep_to=3, fence=1)
    assert slots(pool.table(s, a.sequence)) == slots(a.extents)
    sound(pool)


def test_progress_only_rises() -> None:
    """A page whose steps fall, or complete before they were submitted, is a peer fault and changes nothing."""
    pool = make()
    s = pool.open_session()
    pool.progress(s, 5, 3)
    for submitted, completed in ((4, 3), (5, 2), (5, 6)):
        with pytest.raises(BadRequest):
            pool.progress(s, submitted, completed)
    assert (s.submitted, s.completed) == (5, 3)


def test_group_fence_waits_for_every_member() -> None:
    """A fence has passed when all processes of the engine have passed it."""
    pool = make()
    scheduler = pool.open_session()
    worker = pool.open_session(group=scheduler)
    a = admit(pool, scheduler, fresh(8, 0))
    for session in (scheduler, worker):
        pool.progress(session, 1, 0)
    pool.free(scheduler, a.sequence, fence=1)
    complete(pool, scheduler)
    assert pool.statistics().fenced == a.capacity
    complete(pool, worker)
    assert pool.statistics().fenced == 0
    sound(pool)


def test_late_member_starts_where_the_group_stands() -> None:
    """A worker that joins later has no part in the steps before it."""
    pool = make()
    scheduler = pool.open_session()
    pool.progress(scheduler, 5, 5)
    worker = pool.open_session(group=scheduler)
    assert worker.completed == 5
    a = admit(pool, scheduler, fresh(8, 0))
    pool.free(scheduler, a.sequence, fence=4)
    assert pool.statistics().fenced == 0
    sound(pool)


def test_bye_waits_for_all_steps_of_the_group() -> None:
    """Bye while a step is in flight anywhere is refused: a worker may still be reading."""
    pool = make()
    scheduler = pool.open_session()
    worker = pool.open_session(group=scheduler)
    admit(pool, scheduler, fresh(8, 0))
    for session in (scheduler, worker):
        pool.progress(session, 1, 0)
    complete(pool, scheduler)
    with pytest.raises(OutOfTurn):
        pool.bye(scheduler)
    assert pool.statistics().private > 0
    complete(pool, worker)
    pool.bye(scheduler)
    assert pool.statistics().private == 0
    with pytest.raises(EndedHandle):
        pool.bye(scheduler)
    sound(pool)


def test_bye_leaves_other_sweeps_alone() -> None:
    """Nobody's Bye pays for cleaning up after somebody else."""
    pool = make(blocks=40)
    dead, s = pool.open_session(), pool.open_session()
    for i in range(20):
        admit(pool, dead, fresh(4, 100 * i))
    pool.lose(dead)
    pool.sweep()
    pool.gone(dead)
    pool.bye(s)
    assert dead.life == Life.GONE
    assert len(dead.sequences) == 20
    while not pool.sweep(3):
        sound(pool)
    assert not pool.sessions


def test_lost_session_is_quarantined_slot_by_slot() -> None:
    """A lost session's slots are quarantined, not their blocks; its leases stay; the others go on."""
    pool = make(blocks=5, block_size=16, quantum=1)
    dead, s = pool.open_session(), pool.open_session()
    cache(pool, s, fresh(5, 0))
    a = admit(pool, dead, fresh(9, 0))
    pool.lose(dead)
    assert pool.sweep()
    counts = pool.statistics()
    assert counts.quarantined == a.capacity - 5
    assert counts.leased == 5
    with pytest.raises(OutOfTurn):
        pool.free(dead, a.sequence)
    with pytest.raises(OutOfTurn):
        pool.allocate(dead, root(pool), fresh(2, 900))
    room = counts.free
    b = admit(pool, s, fresh(room, 1000))
    assert not set(slots(b.extents)) & set(slots(a.extents)[5:])
    sound(pool)


def test_resume_gives_everything_back() -> None:
    """A live process that returns holds again what it held, at the same places, and its fences pass."""
    pool = make()
    s = pool.open_session()
    a, b = admit(pool, s, fresh(7, 0)), admit(pool, s, fresh(7, 100))
    pool.free(s, b.sequence, fence=step(pool, s))
    pool.lose(s)
    pool.sweep()
    sound(pool)
    pool.progress(s, 1, 1)
    pool.resume(s)
    sound(pool)
    assert slots(pool.table(s, a.sequence)) == slots(a.extents)
    assert pool.statistics().fenced == pool.statistics().quarantined == 0
    pool.commit(s, a.sequence, 7)
    assert pool.probe(root(pool), fresh(8, 0)) == 7


def test_gone_only_after_lost_and_with_the_group() -> None:
    """A live session cannot be gone, and one keeps its slots until its engine's other processes are gone too."""
    pool = make()
    scheduler = pool.open_session()
    worker = pool.open_session(group=scheduler)
    with pytest.raises(OutOfTurn):
        pool.gone(scheduler)
    answer = admit(pool, scheduler, fresh(7, 0))
    pool.lose(scheduler)
    pool.gone(scheduler)
    assert pool.sweep()
    assert pool.statistics().quarantined == answer.capacity
    with pytest.raises(OutOfTurn):
        pool.resume(scheduler)
    pool.lose(worker)
    assert pool.sweep()
    assert pool.statistics().quarantined == answer.capacity
    pool.gone(worker)
    while not pool.sweep(1):
        sound(pool)
    sound(pool)
    assert not pool.sessions


def test_both_of_a_group_gone_while_fenced() -> None:
    """When the last process of an engine is gone its quarantined fences are released once."""
    pool = make()
    scheduler = pool.open_session()
    worker = pool.open_session(group=scheduler)
    for session in (scheduler, worker):
        a = admit(pool, session, fresh(7, session.handle * 100))
        for other in (scheduler, worker):
            step(pool, other)
        pool.free(session, a.sequence, fence=session.submitted)
    for session in (scheduler, worker):
        pool.lose(session)
    pool.sweep()
    for session in (scheduler, worker):
        pool.gone(session)
        sound(pool)
    while not pool.sweep(1):
        sound(pool)
    assert pool.statistics().free == pool.usable


def test_handles_are_told_apart() -> None:
    """Unknown, ended and foreign handles have an answer each, are counted, and change nothing."""
    pool = make()
    s, other = pool.open_session(), pool.open_session()
    mine, theirs = admit(pool, s, fresh(4, 0)), admit(pool, other, fresh(4, 100))
    pool.free(s, mine.sequence)
    for handle, kind in (
        (mine.sequence, EndedHandle),
        (theirs.sequence, ForeignHandle),
        (999, UnknownHandle),
    ):
        for verb in (
            lambda: pool.free(s, handle),  # noqa: B023
            lambda: pool.extend(s, handle),  # noqa: B023
            lambda: pool.commit(s, handle, 1),  # noqa: B023
            lambda: pool.fork(s, handle),  # noqa: B023
            lambda: pool.trim(s, handle, keep_to=1),  # noqa: B023
            lambda: pool.table(s, handle),  # noqa: B023
            lambda: pool.unpin(s, handle),  # noqa: B023
        ):
            with pytest.raises(kind):
                verb()
    assert pool.statistics().bad_handles == 21
    assert pool.statistics().sequences == 1
    sound(pool)


def test_handles_are_never_used_again() -> None:
    """Every handle of whatever kind is above all before it."""
    pool = make()
    last = 0
    for i in range(50):
        s = pool.open_session()
        assert s.handle > last
        a = admit(pool, s, fresh(4, i))
        assert a.sequence > s.handle
        last = a.sequence
        pool.bye(s)


def test_quota_charges_what_is_private_fenced_or_quarantined() -> None:
    """A quota counts private slots until they are really free, and nothing that was published."""
    pool = make(blocks=9)
    s = pool.open_session(quota=12)
    a = admit(pool, s, fresh(8, 0))
    charged = s.charged
    assert charged == a.capacity
    pool.commit(s, a.sequence, 8)
    assert s.charged == charged - 8
    b = admit(pool, s, fresh(8, 100))
    pool.free(s, b.sequence, fence=step(pool, s))
    assert s.charged == charged - 8 + b.capacity
    assert isinstance(pool.allocate(s, root(pool), fresh(8, 200)), Later)
    complete(pool, s)
    assert s.charged == charged - 8
    sound(pool)


def test_pins_keep_and_are_bounded() -> None:
    """A pinned prefix is not evicted; pins past their share are refused; a session's pins end with it."""
    pool = make(blocks=9, block_size=4, pin_share=0.5)
    s = pool.open_session()
    cache(pool, s, fresh(12, 0))
    handle, kept = pool.pin(s, root(pool), fresh(10, 0))
    assert kept == 10
    assert pool.evict(100) == 2
    assert pool.probe(root(pool), fresh(20, 0)) == 10
    cache(pool, s, fresh(12, 100))
    nodes = pool.statistics().nodes
    with pytest.raises(BadRequest, match="limit of 16"):
        pool.pin(s, root(pool), fresh(7, 100))
    assert pool.statistics().nodes == nodes
    sound(pool)
    pool.unpin(s, handle)
    with pytest.raises(EndedHandle):
        pool.unpin(s, handle)
    assert pool.pin(s, root(pool), fresh(9, 500)) == (0, 0)
    pool.pin(s, root(pool), fresh(10, 0))
    pool.bye(s)
    assert pool.evict(100) == 22
    sound(pool)


def test_stalled_then_moving_again() -> None:
    """A step that completes ends the stall."""
    pool = make()
    s = pool.open_session()
    step(pool, s)
    pool.stall(s)
    complete(pool, s)
    assert not s.stalled


def test_growth_of_a_lost_session_holds_nobody_back() -> None:
    """A lost session's tickets go at once, and so do the debts it was owed."""
    pool = make(blocks=5, block_size=4)
    s, other = pool.open_session(), pool.open_session()
    a, b = admit(pool, s, fresh(7, 0)), admit(pool, other, fresh(7, 100))
    while isinstance(pool.extend(s, a.sequence, tokens=1), Grown):
        pass
    pool.lose(s)
    assert not pool.admission.growth
    assert not other.owes
    assert later(pool.extend(other, b.sequence, tokens=1)).stalled == (s.handle,)
    pool.sweep()
    pool.gone(s)
    pool.sweep()
    assert isinstance(pool.extend(other, b.sequence, tokens=1), Grown)
    sound(pool)
