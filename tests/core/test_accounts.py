"""What a tenant holds over all its sessions, and the limits on it: who is refused, what is named, who waits."""

from __future__ import annotations

import pytest

from kvslot.allocator import (
    UNLIMITED,
    Admitted,
    BadRequest,
    Later,
    Never,
    Pool,
    Preempt,
    Pressure,
    Quota,
    Ready,
    Reason,
    Space,
)

from .tools import admit, complete, fresh, grown, later, make, root, sound, step


def limited(*, slots: int = UNLIMITED, runs: int = UNLIMITED, blocks: int = 26, quantum: int = 1) -> Pool:
    """A pool in which tenant "a" is limited."""
    pool = make(blocks=blocks, block_size=4, quantum=quantum, reclaim_patience=0.0)
    pool.limit("a", slots=slots, runs=runs)
    return pool


def took(answer: object) -> Admitted:
    assert isinstance(answer, Admitted), answer
    return answer


def test_what_never_fits_under_a_tenants_quota_is_never() -> None:
    """A prompt above it gets NEVER with that limit and its name, one of that size is let in; growth likewise."""
    pool = limited(slots=20)
    s = pool.open_session()
    assert pool.allocate(s, root(pool), fresh(21, 0)) == Never(21, 20, Quota.SLOTS)
    a = admit(pool, s, fresh(20, 0))
    assert pool.extend(s, a.sequence, tokens=1) == Never(21, 20, Quota.SLOTS)
    assert isinstance(pool.allocate(s, root(pool, "b"), fresh(60, 100)), Admitted)
    sound(pool)


@pytest.mark.parametrize(("session", "slots", "named"), [(12, 20, Quota.SESSION), (20, 12, Quota.SLOTS)])
def test_the_narrowest_limit_is_named(session: int, slots: int, named: Quota) -> None:
    """Of a session's quota and its tenant's the smaller one refuses, by its own name, for now and for good."""
    pool = limited(slots=slots)
    s = pool.open_session(quota=session)
    assert pool.allocate(s, root(pool), fresh(13, 0)) == Never(13, 12, named)
    admit(pool, s, fresh(10, 0))
    told = later(pool.allocate(s, root(pool), fresh(3, 100)))
    assert (told.reason, told.quota, told.limit, told.free_now) == (Reason.QUOTA, named, 12, 2)
    sound(pool)


def test_one_tenant_is_one_however_many_sessions_and_salts_it_has() -> None:
    """Sessions, models, adapters and salts of a tenant draw on one account; another tenant's do not."""
    pool = limited(slots=20)
    one, two = pool.open_session(), pool.open_session()
    salted = pool.open_space(Space("a", salt="s"))
    admit(pool, one, fresh(12, 0))
    told = later(pool.allocate(two, salted, fresh(9, 0)))
    assert (told.quota, told.limit, told.free_now, told.evictable) == (Quota.SLOTS, 20, 8, 0)
    assert isinstance(pool.allocate(two, salted, fresh(8, 0)), Admitted)
    assert isinstance(pool.allocate(two, root(pool, "b"), fresh(12, 0)), Admitted)
    sound(pool)


def test_tenants_without_an_account_share_one() -> None:
    """Who invents names gets no more by it: all that are not listed are limited together."""
    pool = make(blocks=26, block_size=4)
    pool.limit(None, slots=10)
    pool.limit("listed", slots=30)
    s = pool.open_session()
    assert isinstance(pool.allocate(s, root(pool, "x"), fresh(6, 0)), Admitted)
    told = later(pool.allocate(s, root(pool, "y"), fresh(6, 0)))
    assert (told.quota, told.limit, told.free_now) == (Quota.SLOTS, 10, 4)
    assert isinstance(pool.allocate(s, root(pool, "listed"), fresh(12, 0)), Admitted)
    sound(pool)


def test_a_tenant_is_charged_until_its_slots_can_be_used_again() -> None:
    """Fenced and quarantined slots are still its own, published ones are nobody's; then it may have them again."""
    pool = limited(slots=16)
    s, other = pool.open_session(), pool.open_session()
    account = pool.accounts["a"]
    a = admit(pool, s, fresh(8, 0))
    b = admit(pool, other, fresh(8, 100))
    fence = step(pool, s)
    pool.free(s, a.sequence, fence=fence)
    told = later(pool.allocate(other, root(pool), fresh(4, 200)))
    assert (told.quota, told.coming_free) == (Quota.SLOTS, 8)
    complete(pool, s)
    assert account.charged == 8
    assert Ready(other.handle, told.ticket) in pool.poll(1.0)
    pool.lose(other)
    pool.sweep()
    assert account.charged == 8
    pool.gone(other)
    while not pool.sweep():
        pass
    assert (account.charged, account.fenced, account.unwritten) == (0, 0, 0)
    c = admit(pool, s, fresh(12, 300))
    pool.commit(s, c.sequence, 12)
    assert account.charged == c.capacity - 12
    assert b.sequence
    sound(pool)


def test_a_tenants_growth_comes_before_its_new_requests() -> None:
    """A tenant at its quota cannot starve the growth of its oldest sequence by requests of another session."""
    pool = limited(slots=16)
    s, other = pool.open_session(), pool.open_session()
    oldest = admit(pool, s, fresh(4, 0))
    second = admit(pool, other, fresh(12, 100))
    assert later(pool.extend(s, oldest.sequence, tokens=4, now=1.0)).quota == Quota.SLOTS
    pool.free(other, second.sequence, now=1.0)
    assert later(pool.allocate(other, root(pool), fresh(9, 200), now=1.0)).quota == Quota.SLOTS
    assert isinstance(pool.allocate(other, root(pool), fresh(8, 300), now=1.0), Admitted)
    grown(pool.extend(s, oldest.sequence, tokens=4, now=1.0))
    sound(pool)


def test_who_waits_for_a_tenants_quota_holds_nobody_back() -> None:
    """Neither a new request nor growth that its tenant's quota refuses reserves anything from other tenants."""
    pool = limited(slots=50)
    s, other = pool.open_session(), pool.open_session()
    a = admit(pool, s, fresh(24, 0))
    admit(pool, s, fresh(23, 100))
    assert later(pool.extend(s, a.sequence, tokens=20)).quota == Quota.SLOTS
    assert later(pool.allocate(s, root(pool), fresh(30, 200))).quota == Quota.SLOTS
    assert not [push for push in pool.poll(9.0) if isinstance(push, Ready)]
    assert isinstance(pool.allocate(other, root(pool, "b"), fresh(40, 300)), Admitted)
    sound(pool)


def test_victims_for_a_tenants_quota_are_its_own() -> None:
    """Growth at a tenant's quota asks that tenant's sessions for room, youngest first, and nobody else's."""
    pool = limited(slots=16)
    one, two, other = pool.open_session(), pool.open_session(), pool.open_session()
    a = admit(pool, one, fresh(8, 0))
    b = admit(pool, two, fresh(8, 100))
    assert isinstance(pool.allocate(other, root(pool, "b"), fresh(8, 200)), Admitted)
    later(pool.extend(one, a.sequence, tokens=1, now=1.0))
    named = [push for push in pool.poll(1.0) if isinstance(push, Preempt)]
    assert [(push.session, push.sequence) for push in named] == [(two.handle, b.sequence)]
    pool.free(two, b.sequence, now=1.1)
    grown(pool.extend(one, a.sequence, tokens=1, now=1.1))
    sound(pool)


def test_growth_waits_for_runs_in_reserve() -> None:
    """Room that stands ready and unwritten is bounded; what is written makes way, prompts are not held up by it."""
    pool = limited(runs=2, quantum=4)
    pool.limit("b", runs=1)
    s = pool.open_session()
    account = pool.accounts["a"]
    a = admit(pool, s, fresh(3, 0))
    grown(pool.extend(s, a.sequence, tokens=8 - account.unwritten))
    assert account.unwritten == 8
    b = admit(pool, s, fresh(30, 100))
    assert b.capacity == 30, "a growth run beyond the limit was added"
    told = later(pool.extend(s, b.sequence, now=1.0))
    assert (told.reason, told.quota, told.limit, told.free_now) == (Reason.QUOTA, Quota.RUNS, 8, 0)
    assert pool.extend(s, b.sequence, tokens=9, now=1.0) == Never(9, 8, Quota.RUNS)
    pool.wrote(s, a.sequence, 6)
    assert Ready(s.handle, told.ticket) not in pool.poll(1.0)
    pool.wrote(s, a.sequence, 7)
    assert Ready(s.handle, told.ticket) in pool.poll(1.0)
    more = grown(pool.extend(s, b.sequence, now=1.0, ticket=told.ticket))
    assert more.capacity - 30 == 4
    less = later(pool.extend(s, b.sequence, now=1.0))
    assert less.quota == Quota.RUNS
    sound(pool)


def test_new_requests_take_no_runs_from_growth_that_waits() -> None:
    """Whoever starts over in a loop must not take the room that a growth waits for by a run of its own."""
    start_over(page=1)


def test_new_requests_take_no_runs_from_growth_that_waits_in_pages() -> None:
    """Nor by what rounds its last page up."""
    start_over(page=4)


def start_over(page: int) -> None:
    pool = limited(runs=1, quantum=4)
    s = pool.open_session(page=page)
    a, b = admit(pool, s, fresh(4, 0)), admit(pool, s, fresh(4, 100))
    account = pool.accounts["a"]
    grown(pool.extend(s, a.sequence, tokens=4 - account.unwritten))
    waiting = later(pool.extend(s, b.sequence, tokens=4))
    assert waiting.quota == Quota.RUNS
    pool.wrote(s, a.sequence, 4)
    for each in (a, b):
        pool.wrote(s, each.sequence, pool.sequences[each.sequence].capacity)
    assert account.unwritten == 0
    new = pool.allocate(s, root(pool), fresh(5, 200))
    if page > 1:
        told = later(new)
        assert (told.reason, told.quota) == (Reason.QUOTA, Quota.RUNS)
    else:
        assert isinstance(new, Admitted)
        assert new.capacity == 5
    grown(pool.extend(s, b.sequence, tokens=4, ticket=waiting.ticket))
    sound(pool)


def test_less_than_a_run_is_better_than_a_refusal() -> None:
    """Where part of a run is left under the limit, growth gets that."""
    pool = limited(runs=2, quantum=4)
    s = pool.open_session()
    a = admit(pool, s, fresh(4, 0))
    grown(pool.extend(s, a.sequence, tokens=7 - pool.accounts["a"].unwritten))
    b = admit(pool, s, fresh(4, 100))
    assert grown(pool.extend(s, b.sequence)).capacity - b.capacity == 1
    sound(pool)


def test_idle_runs_are_asked_back() -> None:
    """When all runs a tenant may reserve stand idle, Pressure asks for them, so that no engine waits for itself."""
    pool = limited(runs=2, quantum=4)
    s = pool.open_session()
    a = admit(pool, s, fresh(4, 0))
    grown(pool.extend(s, a.sequence, tokens=8 - pool.accounts["a"].unwritten))
    b = admit(pool, s, fresh(4, 100))
    told = later(pool.extend(s, b.sequence, now=1.0))
    assert [push for push in pool.poll(1.0) if isinstance(push, Pressure)]
    pool.trim(s, a.sequence, keep_to=4, now=1.0)
    grown(pool.extend(s, b.sequence, now=1.0, ticket=told.ticket))
    sound(pool)


def test_pages_keep_to_the_limits_in_whole_pages() -> None:
    """Sessions of whole pages: NEVER names the limit in whole pages, growth in reserve is at least one."""
    pool = limited(slots=18, runs=8)
    s = pool.open_session(page=4)
    assert pool.allocate(s, root(pool), fresh(17, 0)) == Never(20, 16, Quota.SLOTS)
    a = admit(pool, s, fresh(8, 0))
    assert grown(pool.extend(s, a.sequence)).capacity == 12
    pool.limit("a", slots=18, runs=3)
    assert pool.extend(s, a.sequence) == Never(4, 3, Quota.RUNS)
    sound(pool)


def test_a_lowered_limit_takes_nothing_away() -> None:
    """Who holds more than a new limit allows keeps it and gets no more; the audit does not take it for a fault."""
    pool = limited(slots=40)
    s = pool.open_session()
    a = admit(pool, s, fresh(30, 0))
    pool.limit("a", slots=20)
    sound(pool)
    assert later(pool.allocate(s, root(pool), fresh(4, 100))).limit == 20
    pool.free(s, a.sequence)
    assert isinstance(pool.allocate(s, root(pool), fresh(20, 100)), Admitted)
    assert pool.allocate(s, root(pool), fresh(21, 200)) == Never(21, 20, Quota.SLOTS)
    pool.limit("a", slots=60)
    assert isinstance(pool.allocate(s, root(pool), fresh(40, 300)), Admitted)
    sound(pool)


def test_a_tenant_that_is_listed_no_longer_is_one_of_all_others() -> None:
    """What it has open goes on without limits; what it opens then is bounded with all the others."""
    pool = limited(slots=12)
    s = pool.open_session()
    a = admit(pool, s, fresh(10, 0))
    pool.limit(None, slots=20)
    pool.unlimit("a")
    assert isinstance(pool.allocate(s, root(pool), fresh(10, 100)), Admitted)
    salted = pool.open_space(Space("a", salt="s"))
    assert pool.allocate(s, salted, fresh(21, 0)) == Never(21, 20, Quota.SLOTS)
    assert isinstance(pool.allocate(s, root(pool, "b"), fresh(15, 0)), Admitted)
    assert later(pool.allocate(s, salted, fresh(6, 0))).limit == 20
    sound(pool)
    pool.free(s, a.sequence)
    sound(pool)
    pool.unlimit(None)
    assert isinstance(pool.allocate(s, salted, fresh(30, 200)), Admitted)
    sound(pool)


def test_open_namespaces_come_under_the_account_that_their_tenant_has_by_now() -> None:
    """What sequences hold goes with them, shared ranges once, and those who wait too; fenced slots stay until free."""
    pool = limited(quantum=4, blocks=52)
    s = pool.open_session()
    theirs, others = root(pool, "chat"), root(pool, "x")
    parent = took(pool.allocate(s, theirs, fresh(20, 0)))
    pool.wrote(s, parent.sequence, 20)
    pool.fork(s, parent.sequence)
    kept = took(pool.allocate(s, others, fresh(10, 500)))
    step(pool, s)
    gone = took(pool.allocate(s, theirs, fresh(6, 900)))
    pool.free(s, gone.sequence, fence=1)
    pool.limit(None, slots=pool.everyone.charged + 4)
    waits = later(pool.allocate(s, theirs, fresh(30, 2000)))
    pool.limit("chat", slots=24)
    pool.resettle()
    sound(pool)
    chat = pool.accounts["chat"]
    assert pool.everyone.charged == kept.capacity + pool.everyone.fenced
    assert pool.everyone.fenced > 0
    assert chat.charged == parent.capacity
    assert pool.admission.waiting[waits.ticket].account is chat
    assert pool.allocate(s, theirs, fresh(25, 3000)) == Never(25, 24, Quota.SLOTS)
    complete(pool, s)
    sound(pool)
    assert (pool.everyone.charged, pool.everyone.fenced) == (kept.capacity, 0)
    pool.limit("chat", slots=8)
    pool.unlimit("chat")
    pool.limit("chat", slots=8)  # another account of the same name: more is held than it allows
    pool.resettle()
    sound(pool)
    assert pool.allocate(s, theirs, fresh(9, 4000)) == Never(9, 8, Quota.SLOTS)
    for sequence in list(s.sequences):
        pool.free(s, sequence)
    sound(pool)
    assert pool.accounts["chat"].charged == chat.charged == 0


def test_namespaces_come_under_their_accounts_one_by_one() -> None:
    """Those named and no others; what was closed meanwhile is left alone; accounts count what they have."""
    pool = limited(quantum=4, blocks=52)
    s = pool.open_session()
    roots = [pool.open_space(Space("chat", salt=str(each))) for each in range(4)]
    took(pool.allocate(s, roots[1], fresh(20, 0)))
    pool.limit("chat", slots=30)
    assert [pool.unsettled(each) for each in (*roots, 4711)] == [True] * 4 + [False]
    pool.close_space(roots[0])
    pool.resettle(roots[:2])
    sound(pool)
    assert [pool.unsettled(each) for each in roots] == [False, False, True, True]
    assert (pool.accounts["chat"].spaces, pool.everyone.spaces) == (1, 2)
    assert pool.accounts["chat"].charged > 0
    assert pool.open_space(Space("chat", salt="new")) not in roots[1:]
    pool.resettle()
    sound(pool)
    assert (pool.accounts["chat"].spaces, pool.everyone.spaces) == (4, 0)


def test_pins_of_a_tenant_are_bounded() -> None:
    """What its pins keep, over all sessions; operators' pins count and are not refused; another tenant's do not; a
    reload moves them, and a session that ends gives them back."""
    pool = limited(blocks=52)
    pool.limit("a", pins=30)
    one, two = pool.open_session(), pool.open_session()
    theirs, others = root(pool, "a"), root(pool, "x")
    prompts = [fresh(16, 100 * each) for each in range(3)]
    for at in (theirs, others):
        for prompt in prompts:
            answer = took(pool.allocate(one, at, prompt))
            pool.commit(one, answer.sequence, 16)
            pool.free(one, answer.sequence)
    handle, kept = pool.pin(one, theirs, prompts[0])
    assert kept == 16
    with pytest.raises(
        BadRequest, match=r"tenant 'a' keep 16 tokens and 16 more would pass its quota pins of 30"
    ):
        pool.pin(two, theirs, prompts[1])
    assert pool.pin(two, others, prompts[1])[1] == 16
    assert pool.pin(two, theirs, prompts[2][:56])[1] == 14
    assert pool.pin(two, theirs, prompts[1], bounded=False)[1] == 16
    sound(pool)
    assert (pool.accounts["a"].pinned, pool.everyone.pinned) == (46, 16)
    pool.unpin(one, handle)
    pool.unlimit("a")
    pool.resettle()
    sound(pool)
    assert pool.everyone.pinned == 46
    pool.bye(two)
    while not pool.sweep():
        pass
    sound(pool)
    assert pool.everyone.pinned == 0


def test_a_limit_is_at_least_one() -> None:
    """Zero or fewer slots or runs is refused and changes nothing."""
    pool = limited(slots=9)
    for bad in ({"slots": 0}, {"runs": 0}, {"slots": -1}):
        with pytest.raises(BadRequest):
            pool.limit("a", **bad)
    assert pool.accounts["a"].slots == 9


def test_nobody_waits_for_a_commit_that_could_never_serve_it() -> None:
    """A prompt that cannot fit under the quota is NEVER at once, also where another computes it already."""
    pool = limited(slots=80, blocks=60)
    s, other = pool.open_session(), pool.open_session()
    pool.limit(None, slots=UNLIMITED)
    admit(pool, s, fresh(80, 0))
    answer = pool.allocate(other, root(pool), fresh(81, 0), wait_for_commit=True)
    assert answer == Never(81, 80, Quota.SLOTS)
    told = pool.allocate(other, root(pool), fresh(80, 0), wait_for_commit=True)
    assert isinstance(told, Later)
    assert told.reason == Reason.COMMIT
    sound(pool)
