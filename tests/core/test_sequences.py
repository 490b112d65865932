"""Sequences: allocate, commit, extend, fork, trim, free; who owns which slot, and who may read it."""

import pytest

from kvslot.allocator import Admitted, BadRequest, Committed, Copy, Later, Never, Pool, Reason, UnknownHandle

from .tools import admit, cache, complete, fork, fresh, grown, make, root, slots, sound, step, toks

# -- allocate and commit ---------------------------------------------------------------------------------------------


def test_hit_ends_at_any_token() -> None:
    """A prompt that shares 5 tokens with what is cached finds 5, and reads them where they are."""
    pool = make(blocks=9, block_size=16)
    s = pool.open_session()
    first = admit(pool, s, fresh(9, 0))
    pool.commit(s, first.sequence, 9)
    second = admit(pool, s, fresh(5, 0) + fresh(6, 500))
    assert second.hit == 5
    assert slots(second.extents)[:5] == slots(first.extents)[:5]
    assert not set(slots(second.extents)[5:]) & set(slots(first.extents))
    sound(pool)


def test_nothing_is_found_before_it_is_committed() -> None:
    """Only committed ranges are found: not what was allocated, nor what was reported written."""
    pool = make(blocks=9, block_size=16)
    s = pool.open_session()
    a = admit(pool, s, fresh(40, 0))
    assert pool.probe(root(pool), fresh(41, 0)) == 0
    pool.wrote(s, a.sequence, 40)
    assert pool.probe(root(pool), fresh(41, 0)) == 0
    pool.commit(s, a.sequence, 20)
    assert pool.probe(root(pool), fresh(41, 0)) == 20
    assert pool.probe(root(pool), fresh(20, 0)) == 19
    sound(pool)


def test_commit_never_changes_a_table() -> None:
    """Of two that computed the same, the first publishes and the second keeps its copy until its free."""
    pool = make(blocks=9, block_size=4)
    s = pool.open_session()
    a, b = admit(pool, s, fresh(8, 0)), admit(pool, s, fresh(8, 0) + fresh(2, 100))
    assert pool.commit(s, a.sequence, 8) == Committed(8, 8, 0)
    before = pool.table(s, b.sequence)
    assert pool.commit(s, b.sequence, 10) == Committed(10, 2, 8)
    assert pool.table(s, b.sequence) == before
    assert pool.statistics().duplicate_tokens == 8
    assert pool.statistics().tokens_held == 10
    sound(pool)
    pool.free(s, b.sequence)
    pool.free(s, a.sequence)
    assert pool.statistics().cached == 10
    assert pool.statistics().duplicate_tokens == 0
    c = admit(pool, s, fresh(8, 0) + fresh(2, 100) + fresh(1, 900))
    assert c.hit == 10
    assert slots(c.extents)[:8] == slots(a.extents)[:8]
    assert slots(c.extents)[8:10] == slots(before)[8:10]
    sound(pool)


def test_commit_again_is_no_fault() -> None:
    """A commit to what is published already, or less, answers with what is published."""
    pool = make()
    s = pool.open_session()
    a = admit(pool, s, fresh(8, 0))
    pool.commit(s, a.sequence, 8)
    assert pool.commit(s, a.sequence, 8) == Committed(8, 0, 0)
    assert pool.commit(s, a.sequence, 3) == Committed(8, 0, 0)
    sound(pool)


def test_commit_checks_its_arguments() -> None:
    """What is malformed or beyond what is known or has room is refused with the figures, and nothing is published."""
    pool = make()
    s = pool.open_session()
    a = admit(pool, s, fresh(7, 0))
    for length, tokens in ((9, b""), (-1, b""), (7, b"abc"), (8, fresh(30, 50)), (2000, fresh(1, 50))):
        with pytest.raises(BadRequest):
            pool.commit(s, a.sequence, length, tokens)
    with pytest.raises(BadRequest):
        pool.commit(s, a.sequence, 7, priority=8)
    with pytest.raises(BadRequest):
        pool.wrote(s, a.sequence, a.capacity + 1)
    assert pool.statistics().cached == 0
    sound(pool)


def test_a_window_trimmed_away_ends_what_can_be_published() -> None:
    """Where the front was dropped unpublished, nothing behind it can be found, so nothing is published."""
    pool = make(windowed=True)
    s = pool.open_session()
    a = admit(pool, s, fresh(12, 0))
    pool.wrote(s, a.sequence, 12)
    pool.trim(s, a.sequence, keep_from=5)
    assert pool.commit(s, a.sequence, 12) == Committed(0, 0, 0)
    assert pool.statistics().cached == 0
    # Unless somebody else publishes that front: then what is ours can follow.
    b = admit(pool, s, fresh(8, 0))
    pool.commit(s, b.sequence, 8)
    assert pool.commit(s, a.sequence, 12) == Committed(12, 4, 3)
    sound(pool)


# -- growth ----------------------------------------------------------------------------------------------------------


def test_growth_is_adjacent_where_it_can_be() -> None:
    """Free slots behind the last one are taken first, so that a table stays one extent."""
    pool = make(blocks=9, block_size=16, quantum=4)
    s = pool.open_session()
    a = admit(pool, s, fresh(16, 0))
    for _ in range(4):
        grown(pool.extend(s, a.sequence))
    assert len(pool.table(s, a.sequence)) == 2
    sound(pool)


def test_growth_over_the_limit_is_never_and_changes_nothing() -> None:
    """Growth beyond pool or quota is NEVER for that call; the sequence stays as it was."""
    pool = make(blocks=5, block_size=4)
    s = pool.open_session(quota=12)
    a = admit(pool, s, fresh(10, 0))
    before = pool.table(s, a.sequence)
    assert pool.extend(s, a.sequence, tokens=12) == Never(a.capacity + 12, 12, "session")
    assert pool.table(s, a.sequence) == before
    sound(pool)


def test_chain_copies_nothing_and_peel_copies_the_tail() -> None:
    """Appending behind a published partial slot links new slots (chain) or copies the partial ones (peel)."""
    for append, copied in (("chain", 0), ("peel", 6)):
        pool = make(blocks=9, block_size=16, quantum=1)
        s = pool.open_session(append=append)
        blocker = admit(pool, s, fresh(2, 900))
        a = admit(pool, s, fresh(22 - 2, 0))
        pool.commit(s, a.sequence, 20)
        behind = admit(pool, s, fresh(pool.statistics().largest_free_run - 17, 500))
        pool.free(s, blocker.sequence)
        b = admit(pool, s, fresh(20, 0) + fresh(1, 700))
        assert b.hit == 20
        pool.wrote(s, b.sequence, b.capacity)
        c = fork(pool, s, b.sequence)
        answer = grown(pool.extend(s, c.sequence, tokens=2))
        assert sum(copy.length for copy in answer.copies) <= copied
        assert answer.position == b.capacity - sum(copy.length for copy in answer.copies)
        assert sum(copy.length for copy in b.copies) == copied
        assert pool.statistics().copied_tokens == sum(copy.length for copy in (*b.copies, *answer.copies))
        for copy in answer.copies:
            assert copy.source in slots(pool.table(s, b.sequence))
        pool.free(s, behind.sequence)
        sound(pool)


def test_peel_max_bounds_the_copy() -> None:
    """A longer partial slot than `peel_max` is chained."""
    pool = make(blocks=9, block_size=16)
    s = pool.open_session(append="peel", peel_max=3)
    a = admit(pool, s, fresh(6, 0))
    pool.wrote(s, a.sequence, a.capacity)
    child = fork(pool, s, a.sequence)
    assert grown(pool.extend(s, child.sequence, tokens=1)).copies == []
    sound(pool)


# -- forks -----------------------------------------------------------------------------------------------------------


def forked(append: str = "peel") -> tuple[Pool, object, int, int]:
    pool = make(blocks=9, block_size=16)
    s = pool.open_session(append=append)
    a = admit(pool, s, fresh(20, 0))
    pool.wrote(s, a.sequence, 20)
    child = fork(pool, s, a.sequence, length=20)
    return pool, s, a.sequence, child.sequence


def test_fork_shares_what_is_written() -> None:
    """A child reads its parent's slots and holds none of its own; unwritten tokens cannot be forked."""
    pool = make(blocks=9, block_size=16)
    s = pool.open_session()
    a = admit(pool, s, fresh(20, 0))
    with pytest.raises(BadRequest):
        pool.fork(s, a.sequence)
    pool.wrote(s, a.sequence, 20)
    free = pool.statistics().free
    child = fork(pool, s, a.sequence)
    assert slots(pool.table(s, child.sequence)) == slots(a.extents)[:20]
    assert pool.statistics().free == free
    assert pool.probe(root(pool), fresh(21, 0)) == 0
    sound(pool)


def test_last_holder_of_a_fork_owns_it_alone() -> None:
    """Shared slots are freed by the last holder, in either order."""
    for first in (0, 1):
        pool, s, *both = forked()
        pool.free(s, both[first])  # type: ignore[arg-type]
        assert pool.statistics().private >= 20
        sound(pool)
        pool.free(s, both[1 - first])  # type: ignore[arg-type]
        assert pool.statistics().free == pool.usable
        sound(pool)


def test_shared_slots_wait_for_the_latest_fence_of_all() -> None:
    """A fork that let go while its step is in flight still counts when the last holder frees without a fence."""
    pool = make(blocks=9, block_size=16)
    s = pool.open_session()
    a = admit(pool, s, fresh(20, 0))
    pool.wrote(s, a.sequence, 20)
    child = fork(pool, s, a.sequence, length=20)
    fence = step(pool, s)
    pool.free(s, child.sequence, fence=fence)
    pool.free(s, a.sequence)
    assert pool.statistics().fenced == 20
    complete(pool, s)
    assert pool.statistics().free == pool.usable
    sound(pool)


def test_fence_of_a_fork_outlives_publication() -> None:
    """Slots a fork may still read are leased until its step has completed, though another published them meanwhile."""
    pool = make(blocks=9, block_size=16)
    s = pool.open_session()
    a = admit(pool, s, fresh(20, 0))
    pool.wrote(s, a.sequence, 20)
    child = fork(pool, s, a.sequence, length=20)
    pool.free(s, child.sequence, fence=step(pool, s))
    pool.commit(s, a.sequence, 20)
    pool.free(s, a.sequence)
    assert pool.statistics().evictable == 0
    assert pool.evict(100) == 0
    complete(pool, s)
    assert pool.statistics().evictable == 20
    sound(pool)


def test_publication_by_one_fork_is_read_by_all() -> None:
    """When one fork publishes the shared part, the others read it from the tree and hold a lease of it."""
    pool, s, a, child = forked("chain")
    grown(pool.extend(s, child, tokens=4))  # type: ignore[arg-type]
    before = pool.table(s, a)  # type: ignore[arg-type]
    pool.commit(s, child, 20)  # type: ignore[arg-type]
    assert pool.table(s, a) == before  # type: ignore[arg-type]
    pool.free(s, child)  # type: ignore[arg-type]
    assert pool.evict(100) == 0
    assert pool.commit(s, a, 20) == Committed(20, 0, 0)  # type: ignore[arg-type]
    sound(pool)


def test_forks_of_opaque_blocks_may_break_one() -> None:
    """A fork within a published block goes its own way from there, in blocks of its own."""
    pool = make(blocks=9, block_size=4, opaque=True)
    s = pool.open_session()
    a = admit(pool, s, fresh(8, 0))
    pool.commit(s, a.sequence, 8)
    child = fork(pool, s, a.sequence, length=6)
    answer = grown(pool.extend(s, child.sequence, tokens=2))
    assert answer.position == 4
    assert [copy.length for copy in answer.copies] == [2]
    pool.wrote(s, child.sequence, 8)
    assert (
        pool.commit(s, child.sequence, 8, fresh(2, 500)) == Committed(8, 4, 0)
        or pool.statistics().cached == 12
    )
    sound(pool)
    assert pool.probe(root(pool), fresh(9, 0)) == 8
    sound(pool)


# -- trim ------------------------------------------------------------------------------------------------------------


def test_roll_back_keeps_the_slots_that_are_its_own() -> None:
    """Rolled back within its own slots a sequence writes them again, and old tokens are not published."""
    pool = make(blocks=9, block_size=16)
    s = pool.open_session()
    a = admit(pool, s, fresh(10, 0))
    pool.trim(s, a.sequence, keep_to=6)
    pool.commit(s, a.sequence, 8, fresh(2, 500))
    assert pool.probe(root(pool), fresh(11, 0)) == 6
    assert pool.probe(root(pool), fresh(6, 0) + fresh(2, 500) + fresh(1, 0)) == 8
    sound(pool)


def test_roll_back_forgets_tokens_told_ahead() -> None:
    """Tokens told before they were written do not come back after a roll-back to between the two."""
    pool = make(blocks=9, block_size=16)
    s = pool.open_session()
    a = admit(pool, s, fresh(8, 0))
    grown(pool.extend(s, a.sequence, tokens=8))
    pool.commit(s, a.sequence, 8, fresh(6, 100))
    pool.trim(s, a.sequence, keep_to=10)
    pool.commit(s, a.sequence, 12, fresh(2, 700))
    assert pool.probe(root(pool), fresh(8, 0) + fresh(6, 100) + toks([1])) == 10
    assert pool.probe(root(pool), fresh(8, 0) + fresh(2, 100) + fresh(2, 700) + toks([1])) == 12
    sound(pool)


def test_roll_back_below_the_published_end_detaches() -> None:
    """Below what is published a sequence appends to slots of its own; what is published stays as it is."""
    pool = make(blocks=9, block_size=16)
    s = pool.open_session()
    a = admit(pool, s, fresh(10, 0))
    pool.commit(s, a.sequence, 10)
    pool.trim(s, a.sequence, keep_to=6)
    grown(pool.extend(s, a.sequence, tokens=4))
    assert not set(slots(pool.table(s, a.sequence))[6:]) & set(slots(a.extents)[6:10])
    pool.commit(s, a.sequence, 8, fresh(2, 500))
    assert pool.probe(root(pool), fresh(11, 0)) == 10
    sound(pool)


def test_roll_back_never_reuses_what_a_fork_reads() -> None:
    """The part a fork shares is given up, not written again."""
    pool = make(blocks=9, block_size=16)
    s = pool.open_session()
    a = admit(pool, s, fresh(10, 0))
    pool.wrote(s, a.sequence, 10)
    child = fork(pool, s, a.sequence, length=10)
    pool.trim(s, a.sequence, keep_to=4)
    shared = set(slots(pool.table(s, child.sequence)))
    assert not shared & set(slots(pool.table(s, a.sequence))[4:])
    sound(pool)


def test_window_drops_private_slots_only() -> None:
    """A sliding window gives private slots back at once; what is published stays leased until Free."""
    pool = make(blocks=9, block_size=4, windowed=True)
    s = pool.open_session()
    cache(pool, s, fresh(6, 0))
    a = admit(pool, s, fresh(16, 0))
    pool.wrote(s, a.sequence, 16)
    free = pool.statistics().free
    pool.trim(s, a.sequence, keep_from=10)
    assert pool.statistics().free == free + 4
    assert pool.evict(100) == 0
    sound(pool)
    with pytest.raises(BadRequest):
        pool.fork(s, a.sequence)
    with pytest.raises(BadRequest):
        pool.trim(s, a.sequence, keep_to=9)


def test_window_needs_a_windowed_layout() -> None:
    """Where a layer reads everything, nothing of the front may be dropped."""
    pool = make()
    s = pool.open_session()
    a = admit(pool, s, fresh(16, 0))
    pool.wrote(s, a.sequence, 16)
    with pytest.raises(BadRequest, match="sliding window"):
        pool.trim(s, a.sequence, keep_from=4)
    sound(pool)


# -- pages -----------------------------------------------------------------------------------------------------------


def aligned(extents: list[int], page: int) -> bool:
    """Every page of positions lies in one page of slots, in order."""
    table = slots(extents)
    return all(slot % page == position % page for position, slot in enumerate(table)) and all(
        table[i] + 1 == table[i + 1] for i in range(len(table) - 1) if (i + 1) % page
    )


def test_pages_are_whole_and_exclusive() -> None:
    """A session of pages gets whole ones, keeps position and slot equal modulo the page, and copies a partial hit."""
    pool = make(blocks=9, block_size=16)
    odd, s = pool.open_session(), pool.open_session(page=8)
    cache(pool, odd, fresh(3, 900))
    a = admit(pool, s, fresh(13, 0))
    assert aligned(a.extents, 8)
    assert a.capacity == 16
    pool.commit(s, a.sequence, 13)
    b = admit(pool, s, fresh(13, 0) + fresh(9, 100))
    assert b.hit == 13
    assert aligned(b.extents, 8)
    assert b.copies == [Copy(slots(a.extents)[8], slots(b.extents)[8], 5)]
    assert slots(b.extents)[:8] == slots(a.extents)[:8]
    assert pool.statistics().peeled_tokens == 5
    sound(pool)
    pool.wrote(s, b.sequence, 22)
    child = fork(pool, s, b.sequence, length=21)
    assert grown(pool.extend(s, child.sequence)).copies
    assert aligned(pool.table(s, child.sequence), 8)
    sound(pool)


def test_a_hit_out_of_place_is_no_hit_for_pages() -> None:
    """What another session's tokens left at odd slots is not found by a session of pages."""
    pool = make(blocks=9, block_size=16)
    odd, s = pool.open_session(), pool.open_session(page=8)
    cache(pool, odd, fresh(3, 900))
    first = admit(pool, odd, fresh(13, 0))
    pool.commit(odd, first.sequence, 13)
    expected = 13 if aligned(first.extents[:2], 8) else 0
    assert admit(pool, s, fresh(13, 0) + fresh(9, 100)).hit == expected
    sound(pool)


def test_pages_that_cannot_be_had_cost_nothing() -> None:
    """Where no eviction would make a whole page, LATER evicts nothing."""
    pool = make(blocks=5, block_size=4)
    odd, s = pool.open_session(), pool.open_session(page=4)
    kept = [admit(pool, odd, fresh(2, 100 * i)) for i in range(8)]
    assert pool.statistics().free == 0 or kept
    for a in kept[::2]:
        pool.commit(odd, a.sequence, 2)
        pool.free(odd, a.sequence)
    cached = pool.statistics().cached
    answer = pool.allocate(s, root(pool), fresh(4, 5000))
    if isinstance(answer, Later):
        assert answer.reason in (Reason.RUN, Reason.MEMORY)
        assert pool.statistics().cached == cached
    sound(pool)


def test_a_page_run_may_be_shorter_near_the_limit() -> None:
    """A growth run that does not fit whole is cut to the pages that do; NEVER only when not one does."""
    pool = make(blocks=5, block_size=16, quantum=16)
    s = pool.open_session(page=8)
    a = admit(pool, s, fresh(56, 0))
    assert grown(pool.extend(s, a.sequence)).capacity == 64
    assert isinstance(pool.extend(s, a.sequence), Never)
    sound(pool)


def test_large_opaque_blocks() -> None:
    """Blocks of hundreds of tokens (hybrid models) are found, handed out and given back like small ones."""
    for block_size in (528, 1024, 7808):
        pool = make(blocks=5, block_size=block_size, opaque=True)
        s = pool.open_session()
        a = admit(pool, s, fresh(block_size + 1, 0))
        assert a.capacity == 2 * block_size
        pool.commit(s, a.sequence, block_size + 1)
        assert pool.probe(root(pool), fresh(block_size + 1, 0)) == block_size
        pool.free(s, a.sequence)
        sound(pool)
        assert isinstance(pool.allocate(s, root(pool), fresh(4 * block_size, 9000)), Admitted)
        sound(pool)


# -- the door --------------------------------------------------------------------------------------------------------


def test_malformed_prompts_are_refused() -> None:
    """No tokens, half tokens and unknown namespaces are refused at the door."""
    pool = make()
    s = pool.open_session()
    for tokens in (b"", b"abc"):
        for verb in (pool.probe, lambda r, t: pool.allocate(s, r, t), lambda r, t: pool.pin(s, r, t)):
            with pytest.raises(BadRequest):
                verb(root(pool), tokens)
    with pytest.raises(UnknownHandle):
        pool.probe(77, fresh(3, 0))
    sound(pool)


def test_wait_for_commit_computes_nothing_twice() -> None:
    """A request that asks to wait for a prefix being computed gets LATER(commit), then Published, then the hit."""
    from kvslot.allocator import Abandoned, Published

    pool = make(blocks=40, block_size=16)
    s, other = pool.open_session(), pool.open_session()
    first = admit(pool, s, fresh(100, 0))
    answer = pool.allocate(other, root(pool), fresh(120, 0), wait_for_commit=True)
    assert isinstance(answer, Later)
    assert answer.reason == Reason.COMMIT
    sound(pool)
    pool.commit(s, first.sequence, 100)
    assert pool.pushes == [Published(other.handle, answer.ticket)]
    got = pool.allocate(other, root(pool), fresh(120, 0), wait_for_commit=True, ticket=answer.ticket)
    assert isinstance(got, Admitted)
    assert got.hit == 100
    again = pool.allocate(s, root(pool), fresh(120, 0) + fresh(90, 700), wait_for_commit=True)
    assert not isinstance(again, Never)
    pool.pushes.clear()
    pool.lose(other)
    pool.sweep()
    pool.gone(other)
    pool.sweep()
    assert not pool.admission.awaiting or any(isinstance(push, Abandoned) for push in pool.pushes)
    sound(pool)


def test_a_fork_that_others_published_for_tells_from_where_it_was() -> None:
    """A fork may be published further than it has told tokens; after a roll-back it still tells from where it was."""
    pool = make(blocks=9, block_size=16)
    s = pool.open_session()
    a = admit(pool, s, fresh(1, 0))
    grown(pool.extend(s, a.sequence, tokens=9))
    pool.wrote(s, a.sequence, 8)
    child = fork(pool, s, a.sequence, length=8)
    pool.commit(s, a.sequence, 8, fresh(7, 1))
    pool.trim(s, child.sequence, keep_to=4)
    grown(pool.extend(s, child.sequence, tokens=4))
    assert pool.commit(s, child.sequence, 6, fresh(3, 1) + fresh(2, 500)) == Committed(6, 2, 0)
    assert pool.probe(root(pool), fresh(4, 0) + fresh(2, 500) + toks([7])) == 6
    sound(pool)


def test_what_a_window_dropped_is_neither_copied_nor_published() -> None:
    """The page a window cut into is copied from what is left of it, and none of it can be published."""
    pool = make(blocks=9, block_size=8, windowed=True)
    s = pool.open_session(page=8)
    a = admit(pool, s, fresh(8, 0))
    pool.wrote(s, a.sequence, 8)
    child = fork(pool, s, a.sequence, length=6)
    pool.trim(s, child.sequence, keep_from=3)
    answer = grown(pool.extend(s, child.sequence, tokens=2))
    new = slots(answer.extents)
    assert answer.copies == [Copy(slots(a.extents)[3], new[3], 3)]
    pool.wrote(s, child.sequence, 8)
    assert pool.commit(s, child.sequence, 8, fresh(2, 500)) == Committed(0, 0, 0)
    assert pool.probe(root(pool), fresh(6, 0) + toks([9])) == 0
    sound(pool)
