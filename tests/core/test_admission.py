"""Admission: OK, LATER or NEVER; whose turn it is; who is asked to give way."""

import pytest

from kvslot.allocator import (
    Admitted,
    EndedHandle,
    ForeignHandle,
    Grown,
    Later,
    Never,
    Preempt,
    Pressure,
    Ready,
    Reason,
    UnknownHandle,
)

from .tools import admit, cache, complete, fresh, grown, later, make, root, sound, step

# -- three values ----------------------------------------------------------------------------------------------------


def test_watermark_holds_back_new_requests_only() -> None:
    """The watermark is kept from new requests while something runs, never from growth, and not in an idle pool."""
    pool = make(blocks=11, block_size=10, watermark=0.1)
    s = pool.open_session()
    assert isinstance(pool.allocate(s, root(pool), fresh(100, 0)), Admitted)
    pool.bye(s)
    pool.evict(100)
    s = pool.open_session()
    a = admit(pool, s, fresh(85, 0))
    room = 100 - a.capacity
    refused = later(pool.allocate(s, root(pool), fresh(room - 9, 1000)))
    assert refused.reason == Reason.MEMORY
    assert refused.needed == room - 9
    assert refused.free_now == room
    pool.admission.withdraw(s, refused.ticket)
    assert isinstance(pool.extend(s, a.sequence, tokens=room), Grown)
    sound(pool)


def test_never_names_the_limit_even_when_busy() -> None:
    """A prompt above the pool or the quota gets NEVER at once, also while the pool is full."""
    pool = make(blocks=5, block_size=4)
    s, small = pool.open_session(), pool.open_session(quota=6)
    admit(pool, s, fresh(16, 0))
    assert pool.allocate(s, root(pool), fresh(17, 100)) == Never(17, 16)
    assert pool.allocate(small, root(pool), fresh(7, 100)) == Never(7, 6, "session")
    assert isinstance(pool.allocate(s, root(pool), fresh(16, 100)), Later)
    sound(pool)


def test_fenced_memory_holds_eviction_back_for_a_while() -> None:
    """Where fenced memory would do, nothing is evicted for `fence_patience`; after it, what is needed is."""
    pool = make(blocks=5, block_size=4, fence_patience=0.05)
    s = pool.open_session()
    cache(pool, s, fresh(8, 0))
    a = admit(pool, s, fresh(8, 100))
    fence = step(pool, s)
    pool.free(s, a.sequence, fence=fence)
    refused = later(pool.allocate(s, root(pool), fresh(8, 200), now=1.0))
    assert refused.reason == Reason.FENCED
    assert refused.coming_free == 8
    assert pool.evicted_tokens == 0
    assert isinstance(pool.allocate(s, root(pool), fresh(8, 200), now=1.06, ticket=refused.ticket), Admitted)
    assert pool.evicted_tokens == 8
    sound(pool)


def test_stalled_fences_hold_nothing_back() -> None:
    """Fences of a stalled session are not coming free, so eviction does not wait for them."""
    pool = make(blocks=5, block_size=4)
    s = pool.open_session()
    cache(pool, s, fresh(8, 0))
    a = admit(pool, s, fresh(8, 100))
    pool.free(s, a.sequence, fence=step(pool, s))
    pool.stall(s)
    assert isinstance(pool.allocate(pool.open_session(), root(pool), fresh(8, 200)), Admitted)


def test_coming_free_counts_each_session_once() -> None:
    """A lost session's fenced slots are quarantined; they take nothing from what the living have coming free."""
    pool = make(blocks=9, block_size=4)
    live, lost = pool.open_session(), pool.open_session()
    for session, start in ((live, 0), (lost, 100)):
        a = admit(pool, session, fresh(8, start))
        pool.free(session, a.sequence, fence=step(pool, session))
    assert pool.admission.coming_free() >= 16
    pool.lose(lost)
    pool.sweep()
    assert pool.admission.coming_free() == live.fenced
    pool.gone(lost)
    assert pool.admission.coming_free() == live.fenced
    pool.sweep()
    sound(pool)


def test_quota_figures_are_the_callers() -> None:
    """LATER for a quota says what is free under that quota, and evicts nothing."""
    pool = make(blocks=9, block_size=4)
    s = pool.open_session(quota=10)
    a = admit(pool, s, fresh(8, 0))
    refused = later(pool.allocate(s, root(pool), fresh(8, 100)))
    assert refused.reason == Reason.QUOTA
    assert refused.free_now == 10 - a.capacity
    pool.free(s, a.sequence)
    assert isinstance(pool.allocate(s, root(pool), fresh(8, 100), ticket=refused.ticket), Admitted)
    sound(pool)


# -- tickets ---------------------------------------------------------------------------------------------------------


def test_oldest_ticket_is_served_before_later_requests() -> None:
    """While an old ticket waits for a lot, small requests leave it what it needs; it is not starved."""
    pool = make(blocks=11, block_size=4)
    s = pool.open_session()
    running = [admit(pool, s, fresh(8, 100 * i)).sequence for i in range(4)]
    big = later(pool.allocate(s, root(pool), fresh(24, 1000)))
    for i in range(20):
        # Small ones come all the time; each that gets in runs until the next one came.
        answer = pool.allocate(s, root(pool), fresh(4, 2000 + 10 * i), now=float(i))
        if isinstance(answer, Admitted):
            running.append(answer.sequence)
        else:
            assert later(answer).reason in (Reason.TURN, Reason.MEMORY)
            pool.admission.withdraw(s, answer.ticket) if isinstance(answer, Later) else None
        if running:
            pool.free(s, running.pop(0), now=float(i))
        if any(isinstance(push, Ready) and push.ticket == big.ticket for push in pool.pushes):
            break
    else:
        pytest.fail("the big request was starved")
    assert isinstance(pool.allocate(s, root(pool), fresh(24, 1000), ticket=big.ticket), Admitted)
    sound(pool)


def test_ticket_ends_after_grace() -> None:
    """A ticket that was told Ready and not used for `ticket_grace` ends, and holds nothing back any more."""
    pool = make(blocks=5, block_size=4, ticket_grace=1.0)
    s, other = pool.open_session(), pool.open_session()
    a = admit(pool, s, fresh(16, 0))
    waiting = later(pool.allocate(other, root(pool), fresh(16, 100)))
    pool.free(s, a.sequence, now=1.0)
    assert pool.pushes == [Ready(other.handle, waiting.ticket)]
    assert later(pool.allocate(s, root(pool), fresh(4, 200), now=1.5)).reason == Reason.TURN
    pool.admission.pump(2.5)
    with pytest.raises(EndedHandle):
        pool.admission.withdraw(other, waiting.ticket)
    sound(pool)


def test_tickets_are_their_sessions_own() -> None:
    """A ticket of another session is refused; one of a session that ended is gone."""
    pool = make(blocks=5, block_size=4)
    s, other = pool.open_session(), pool.open_session()
    admit(pool, s, fresh(16, 0))
    waiting = later(pool.allocate(other, root(pool), fresh(16, 100)))
    with pytest.raises(ForeignHandle):
        pool.allocate(s, root(pool), fresh(4, 200), ticket=waiting.ticket)
    with pytest.raises(ForeignHandle):
        pool.admission.withdraw(s, waiting.ticket)
    for never_given in (-1, waiting.ticket + 1, 2**40):
        with pytest.raises(UnknownHandle):
            pool.allocate(s, root(pool), fresh(4, 200), ticket=never_given)
    sound(pool)
    pool.lose(other)
    assert not pool.admission.waiting
    sound(pool)


def test_ticket_of_a_growth_is_no_ticket_of_a_request() -> None:
    """A growth's ticket shown with a new request buys nothing and takes the growth's place from nobody."""
    pool = make(blocks=5, block_size=4)
    s = pool.open_session()
    a, b = admit(pool, s, fresh(7, 0)), admit(pool, s, fresh(7, 100))
    pool.extend(s, a.sequence, tokens=16 - a.capacity - b.capacity or 1)
    growth = later(pool.extend(s, a.sequence, tokens=1))
    for contiguous in (False, True):
        answer = later(
            pool.allocate(s, root(pool), fresh(4, 200), ticket=growth.ticket, contiguous=contiguous)
        )
        assert answer.ticket != growth.ticket
    pool.free(s, b.sequence)
    assert Ready(s.handle, growth.ticket) in pool.pushes
    sound(pool)


def test_quota_of_one_holds_back_nobody_else() -> None:
    """A ticket that waits for its own session's quota reserves nothing from other sessions."""
    pool = make(blocks=26, block_size=4)
    bound, other = pool.open_session(quota=50), pool.open_session()
    admit(pool, bound, fresh(40, 0))
    assert later(pool.allocate(bound, root(pool), fresh(30, 100))).reason == Reason.QUOTA
    assert isinstance(pool.allocate(other, root(pool), fresh(40, 200)), Admitted)
    sound(pool)


def test_growth_waiting_for_its_quota_holds_back_nobody_else() -> None:
    """The same for growth."""
    pool = make(blocks=26, block_size=4)
    bound, other = pool.open_session(quota=50), pool.open_session()
    a = admit(pool, bound, fresh(24, 0))
    admit(pool, bound, fresh(23, 100))
    assert later(pool.extend(bound, a.sequence, tokens=20)).reason == Reason.QUOTA
    assert isinstance(pool.allocate(other, root(pool), fresh(40, 200)), Admitted)
    sound(pool)


# -- growth ----------------------------------------------------------------------------------------------------------


def test_growth_comes_before_new_requests() -> None:
    """A new request leaves what a waiting growth needs."""
    pool = make(blocks=5, block_size=4)
    s = pool.open_session()
    a, b = admit(pool, s, fresh(4, 0)), admit(pool, s, fresh(8, 100))
    pool.extend(s, a.sequence, tokens=16 - a.capacity - b.capacity or 1)
    growth = later(pool.extend(s, a.sequence, tokens=6))
    pool.free(s, b.sequence)
    assert later(pool.allocate(s, root(pool), fresh(6, 200))).reason in (Reason.TURN, Reason.MEMORY)
    assert isinstance(pool.extend(s, a.sequence, tokens=6, ticket=growth.ticket), Grown)
    sound(pool)


def test_pressure_comes_first_and_is_given_time() -> None:
    """Growth that starves asks for second runs first; nobody is named before `reclaim_patience` is over."""
    pool = make(blocks=9, block_size=4, quantum=4, reclaim_patience=0.02)
    s, other = pool.open_session(), pool.open_session()
    a = admit(pool, s, fresh(8, 0))
    b = admit(pool, other, fresh(8, 100))
    pool.extend(other, b.sequence, tokens=32 - a.capacity - b.capacity)
    later(pool.extend(s, a.sequence, tokens=4, now=1.0))
    assert pool.pushes == [Pressure(other.handle)]
    later(pool.extend(s, a.sequence, tokens=4, now=1.0))
    later(pool.extend(s, a.sequence, tokens=4, now=1.01))
    assert pool.pushes == [Pressure(other.handle)]
    later(pool.extend(s, a.sequence, tokens=4, now=1.03))
    assert pool.pushes[1:] == [Preempt(other.handle, b.sequence, 1.03 + pool.config.preempt_deadline)]
    sound(pool)


def test_victims_are_low_priority_then_young_never_the_oldest() -> None:
    """Victims are named one by one: lowest priority, then youngest; the oldest is never named."""
    pool = make(blocks=5, block_size=4, preempt_deadline=1.0)
    s = pool.open_session()
    oldest = admit(pool, s, fresh(3, 0), priority=0).sequence
    important = admit(pool, s, fresh(3, 100), priority=3).sequence
    young = admit(pool, s, fresh(3, 200), priority=1).sequence
    youngest = admit(pool, s, fresh(3, 300), priority=1).sequence
    while isinstance(pool.extend(s, oldest, tokens=1), Grown):
        pass
    named = [push.sequence for push in pool.pushes if isinstance(push, Preempt)]
    now = 0.0
    for _ in range(8):
        now += 1.5
        pool.extend(s, oldest, tokens=1, now=now)
        named = [push.sequence for push in pool.pushes if isinstance(push, Preempt)]
    assert named == [youngest, young, important]
    stalled = later(pool.extend(s, oldest, tokens=1, now=now))
    assert stalled.reason in (Reason.STALLED, Reason.PREEMPT_FIRST)
    sound(pool)


def test_debtor_gets_preempt_first_until_it_answers() -> None:
    """Past its deadline a victim's session gets no new work, but may free, trim and commit; answering ends it."""
    pool = make(blocks=5, block_size=4, preempt_deadline=1.0)
    s, debtor = pool.open_session(), pool.open_session()
    a = admit(pool, s, fresh(8, 0))
    cache_me = admit(pool, debtor, fresh(4, 100))
    b = admit(pool, debtor, fresh(2, 200))
    room = 16 - a.capacity - b.capacity - cache_me.capacity
    assert grown(pool.extend(s, a.sequence, tokens=room)).capacity == a.capacity + room
    pool.wrote(s, a.sequence, a.capacity + room)
    later(pool.extend(s, a.sequence, tokens=3, now=0.0))
    assert [p for p in pool.pushes if isinstance(p, Preempt)] == [Preempt(debtor.handle, b.sequence, 1.0)]
    assert later(pool.allocate(debtor, root(pool), fresh(1, 900), now=1.5)).reason == Reason.PREEMPT_FIRST
    pool.commit(debtor, cache_me.sequence, 4)
    pool.free(debtor, cache_me.sequence, now=1.6)
    pool.free(debtor, b.sequence, now=1.6)
    assert isinstance(pool.extend(s, a.sequence, tokens=3, now=1.7), Grown)
    assert debtor.owes == {}
    sound(pool)


def test_debts_end_with_the_shortage() -> None:
    """When the growth that named a victim is given up, the victim owes nothing any more."""
    pool = make(blocks=5, block_size=4, ticket_grace=1.0)
    s, other = pool.open_session(), pool.open_session()
    a = admit(pool, s, fresh(7, 0))
    admit(pool, other, fresh(3, 100))
    c = admit(pool, other, fresh(1, 200))
    while isinstance(answer := pool.extend(s, a.sequence, tokens=1), Grown):
        pool.wrote(s, a.sequence, answer.capacity)
    assert isinstance(answer, Later)
    assert other.owes
    pool.admission.withdraw(s, answer.ticket)
    assert not other.owes
    assert isinstance(pool.allocate(other, root(pool), fresh(4, 300), now=99.0), Later)
    pool.free(other, c.sequence, now=99.0)
    sound(pool)


def test_last_sequence_gets_never() -> None:
    """Growth of the only sequence left that cannot be had is NEVER, and the sequence stays as it is."""
    pool = make(blocks=5, block_size=4)
    s = pool.open_session()
    a = admit(pool, s, fresh(16, 0))
    before = pool.table(s, a.sequence)
    assert pool.extend(s, a.sequence, tokens=1) == Never(17, 16)
    assert pool.table(s, a.sequence) == before
    pool.commit(s, a.sequence, 16)
    sound(pool)


def test_last_sequence_waits_for_what_comes_back() -> None:
    """While memory of stalled, lost or moving things is to come back, the last sequence gets LATER and not NEVER."""
    pool = make(blocks=5, block_size=4)
    s, other = pool.open_session(), pool.open_session()
    a = admit(pool, s, fresh(4, 0))
    b = admit(pool, other, fresh(8, 100))
    pool.free(other, b.sequence, fence=step(pool, other))
    pool.stall(other)
    assert isinstance(pool.extend(s, a.sequence, tokens=10), Later)
    complete(pool, other)
    assert isinstance(pool.extend(s, a.sequence, tokens=10), Grown)
    sound(pool)


def test_last_sequence_waits_for_a_move() -> None:
    """The target of a move that is still being copied comes back when the copy has ended."""
    pool = make(blocks=5, block_size=4)
    s = pool.open_session()
    cache(pool, s, fresh(4, 500))
    a = admit(pool, s, fresh(4, 0))
    node = next(n for n in pool.tree.live() if pool.tree.length[n])
    move = pool.moves.begin(node)
    pool.moves.abandon(move.handle)
    room = pool.usable - a.capacity
    assert isinstance(pool.extend(s, a.sequence, tokens=room), Later)
    pool.moves.finish(move.handle)
    assert isinstance(pool.extend(s, a.sequence, tokens=room), Grown)
    sound(pool)


# -- windows ---------------------------------------------------------------------------------------------------------


def scattered(blocks: int = 9) -> tuple:  # type: ignore[type-arg]
    """A pool whose every second block is free and the others cached and held by nobody but a few sequences."""
    pool = make(blocks=blocks, block_size=4)
    s = pool.open_session()
    held = [admit(pool, s, fresh(3, 100 * i)) for i in range(blocks - 1)]
    return pool, s, held


def test_long_run_gets_a_window() -> None:
    """A long run that finds memory scattered gets a window cleared and held, and in the end one extent."""
    pool, s, held = scattered()
    for a in held[::2]:
        pool.free(s, a.sequence)
    for a in held[1::2]:
        pool.commit(s, a.sequence, 3)
    refused = later(pool.allocate(s, root(pool), fresh(12, 5000), contiguous=True))
    assert refused.reason == Reason.RUN
    assert pool.statistics().reserved > 0
    sound(pool)
    for now, a in enumerate(held[1::2]):
        pool.free(s, a.sequence, now=float(now))
        sound(pool)
    answer = pool.allocate(s, root(pool), fresh(12, 5000), contiguous=True, ticket=refused.ticket, now=9.0)
    assert isinstance(answer, Admitted)
    assert len(answer.extents) == 2
    assert pool.statistics().reserved == 0
    sound(pool)


def test_a_run_is_moved_for_before_anything_is_evicted() -> None:
    """With patience for moves a ticket for a run waits for them; nothing is evicted for it unless they do not come."""
    for moved in (True, False):
        pool, s, held = scattered()
        pool.admission.move_patience = 0.1
        for index, a in enumerate(held):
            if index % 2:
                pool.commit(s, a.sequence, 3)
            pool.free(s, a.sequence)
        cached = pool.statistics().cached
        refused = later(pool.allocate(s, root(pool), fresh(12, 5000), contiguous=True))
        assert refused.reason == Reason.RUN
        assert pool.admission.wanted_run() == 12
        assert pool.admission.window is None
        assert pool.statistics().cached == cached
        if moved:
            while pool.runs.longest() < 12:
                # The first node in the way goes behind the last free run.
                node = min(
                    (n for n in pool.tree.live() if pool.tree.length[n]),
                    key=lambda n: pool.tree.extents(n)[0],
                )
                run = max(pool.runs.length_at)
                end = run + pool.runs.length_at[run]
                n = pool.tree.length[node]
                assert pool.finish_move(pool.begin_move(node, target=[end - n, n]).handle)
            assert pool.admission.wanted_run() == 0
        now = 0.05 if moved else 0.2
        pushes = pool.poll(now)
        assert any(isinstance(push, Ready) and push.ticket == refused.ticket for push in pushes)
        answer = pool.allocate(
            s, root(pool), fresh(12, 5000), contiguous=True, ticket=refused.ticket, now=now
        )
        assert isinstance(answer, Admitted)
        assert len(answer.extents) == 2
        assert (pool.statistics().cached == cached) == moved
        sound(pool)


def test_eviction_into_a_window_still_serves() -> None:
    """Slots evicted inside a window are set aside; whoever evicts still gets what it was promised."""
    pool, s, held = scattered()
    for a in held[::2]:
        pool.free(s, a.sequence)
    for a in held[1::2]:
        pool.commit(s, a.sequence, 3)
    runner = admit(pool, s, fresh(1, 9000))
    refused = later(pool.allocate(s, root(pool), fresh(12, 5000), contiguous=True))
    window = pool.admission.window
    assert window is not None
    assert window.ticket.handle == refused.ticket
    for a in held[1::2]:
        # Not `free`, which would clear the window at once: the nodes in it become evictable behind a fence.
        pool.free(s, a.sequence, fence=step(pool, s))
    complete(pool, s)
    sound(pool)
    need = pool.runs.total + pool.tree.evictable
    grown(pool.extend(s, runner.sequence, tokens=need))
    sound(pool)


def test_window_gives_way_to_growth() -> None:
    """What a window has set aside serves growth, which comes before new requests, when nothing else does."""
    pool, s, held = scattered()
    for a in held[::2]:
        pool.free(s, a.sequence)
    for a in held[1:-1:2]:
        pool.commit(s, a.sequence, 3)
    last = held[-1]
    later(pool.allocate(s, root(pool), fresh(12, 5000), contiguous=True))
    assert pool.statistics().reserved > 0
    for a in held[1:-1:2]:
        pool.free(s, a.sequence)
    room = pool.usable - last.capacity
    grown(pool.extend(s, last.sequence, tokens=room))
    sound(pool)


def test_window_clears_what_was_published_in_it_later() -> None:
    """Private slots in a window that are published and then held by nobody are cleared as well."""
    pool, s, held = scattered()
    for a in held[::2]:
        pool.free(s, a.sequence)
    refused = later(pool.allocate(s, root(pool), fresh(12, 5000), contiguous=True))
    for now, a in enumerate(held[1::2]):
        pool.commit(s, a.sequence, 3)
        pool.free(s, a.sequence, now=float(now))
    for now in range(10, 13):
        pool.admission.pump(float(now))
        sound(pool)
    assert isinstance(
        pool.allocate(s, root(pool), fresh(12, 5000), contiguous=True, ticket=refused.ticket, now=20.0),
        Admitted,
    )
    sound(pool)


def test_growth_in_whole_pages_is_given_up_only_after_a_count() -> None:
    """The last one left waits on where whole pages have come free since they were counted, and is told so."""
    pool = make(blocks=6, block_size=4, quantum=1)
    paged, s = pool.open_session(page=4), pool.open_session()
    grows = admit(pool, paged, fresh(4, 900), now=1.0)
    held = {a.extents[0]: a for a in (admit(pool, s, fresh(1, 100 * i), now=1.0) for i in range(16))}
    for slot, a in held.items():
        if slot % 4:
            pool.free(s, a.sequence)
    refused = later(pool.extend(paged, grows.sequence, now=1.0))
    assert refused.reason == Reason.RUN
    pool.poll(1.0)
    for slot, a in held.items():
        if not slot % 4:
            pool.free(s, a.sequence)
    pool.poll(1.01)
    assert pool.admission.growth, "it waits, or has been told"
    pushes = [*pool.poll(2.0), *pool.pushes]
    assert Ready(paged.handle, refused.ticket) in pushes
    assert isinstance(pool.extend(paged, grows.sequence, now=2.0, ticket=refused.ticket), Grown)
    sound(pool)


def test_window_goes_with_its_ticket() -> None:
    """A withdrawn ticket gives its window back at once."""
    pool, s, held = scattered()
    for a in held[::2]:
        pool.free(s, a.sequence)
    refused = later(pool.allocate(s, root(pool), fresh(12, 5000), contiguous=True))
    assert pool.statistics().reserved > 0
    pool.admission.withdraw(s, refused.ticket)
    assert pool.statistics().reserved == 0
    sound(pool)


def test_a_window_gives_way_to_an_older_ticket() -> None:
    """Where the oldest ticket needs what a younger one's window holds, the two do not wait for each other."""
    pool = make(blocks=14, block_size=4)
    bound, s = pool.open_session(quota=20), pool.open_session()
    running = admit(pool, bound, fresh(4, 900))
    held = [admit(pool, s, fresh(4, 100 * i)) for i in range(12)]
    elder = later(pool.allocate(bound, root(pool), fresh(19, 7000)))
    assert elder.reason == Reason.QUOTA
    for a in held[::2]:
        pool.free(s, a.sequence)
    younger = later(pool.allocate(s, root(pool), fresh(12, 5000), contiguous=True))
    assert younger.reason == Reason.RUN
    assert pool.statistics().reserved > 0
    pool.free(bound, running.sequence)
    assert Ready(bound.handle, elder.ticket) in pool.pushes
    assert isinstance(pool.allocate(bound, root(pool), fresh(19, 7000), ticket=elder.ticket), Admitted)
    assert younger.ticket in pool.admission.waiting
    sound(pool)
