"""Moves: begun, copied, published or abandoned; never under a reader, never a target too early."""

import pytest

from kvslot.allocator import Committed, OutOfTurn, Pool, Session
from kvslot.allocator.results import Moved

from .tools import admit, cache, complete, fork, fresh, make, root, slots, sound, step


def node_of(pool: Pool) -> int:
    return next(node for node in pool.tree.live() if pool.tree.length[node])


def test_a_finished_move_serves_from_its_new_place() -> None:
    """After the copy the node stands at its target, and the old slots are free."""
    pool = make()
    s = pool.open_session()
    cache(pool, s, fresh(6, 0))
    move = pool.moves.begin(node_of(pool))
    assert pool.statistics().moving == 6
    assert pool.probe(root(pool), fresh(7, 0)) == 6
    sound(pool)
    assert pool.moves.finish(move.handle)
    assert slots(admit(pool, s, fresh(7, 0)).extents)[:6] == slots(move.target)
    assert pool.statistics().moved_tokens == 6
    assert pool.statistics().moving == 0
    sound(pool)


def test_a_failed_copy_changes_nothing() -> None:
    """A failed copy leaves the node where it is and frees the target."""
    pool = make()
    s = pool.open_session()
    cache(pool, s, fresh(6, 0))
    move = pool.moves.begin(node_of(pool))
    assert not pool.moves.finish(move.handle, copied=False)
    assert slots(admit(pool, s, fresh(7, 0)).extents)[:6] == slots(move.source)
    sound(pool)


def test_nothing_is_moved_from_under_a_reader() -> None:
    """A node that was leased while it was copied stays where its reader has it; so does one behind a fence."""
    for fenced in (False, True):
        pool = make()
        s = pool.open_session()
        cache(pool, s, fresh(6, 0))
        move = pool.moves.begin(node_of(pool))
        reader = admit(pool, s, fresh(7, 0))
        if fenced:
            pool.free(s, reader.sequence, fence=step(pool, s))
        assert not pool.moves.finish(move.handle)
        sound(pool)
        if not fenced:
            assert slots(pool.table(s, reader.sequence))[:6] == slots(move.source)
            pool.free(s, reader.sequence)
        complete(pool, s)
        assert pool.moves.finish(pool.moves.begin(node_of(pool)).handle)
        sound(pool)


def test_a_reader_that_left_does_not_hinder() -> None:
    """Who came and went during the copy, with nothing in flight, is no reason to give the move up."""
    pool = make()
    s = pool.open_session()
    cache(pool, s, fresh(6, 0))
    move = pool.moves.begin(node_of(pool))
    pool.free(s, admit(pool, s, fresh(7, 0)).sequence)
    assert pool.moves.finish(move.handle)
    sound(pool)


def test_an_abandoned_target_waits_for_its_copy() -> None:
    """The target of an abandoned move is nobody's until the copy has ended."""
    pool = make()
    s = pool.open_session()
    cache(pool, s, fresh(6, 0))
    move = pool.moves.begin(node_of(pool))
    pool.moves.abandon(move.handle)
    assert pool.statistics().moving == 6
    assert pool.evict(100) == 6
    got = admit(pool, s, fresh(pool.statistics().free, 500))
    assert not set(slots(got.extents)) & set(slots(move.target))
    sound(pool)
    assert not pool.moves.finish(move.handle)
    assert pool.statistics().moving == 0
    sound(pool)


def test_a_split_gives_the_move_up() -> None:
    """A node that is split while it is copied keeps its slots in both halves."""
    pool = make()
    s = pool.open_session()
    cache(pool, s, fresh(6, 0))
    move = pool.moves.begin(node_of(pool))
    other = admit(pool, s, fresh(4, 0) + fresh(4, 700))
    pool.commit(s, other.sequence, 8)
    assert not pool.moves.finish(move.handle)
    assert pool.probe(root(pool), fresh(7, 0)) == 6
    sound(pool)


def test_the_part_behind_a_split_is_not_what_was_moved() -> None:
    """A node that keeps its number after a split has other tokens at its front."""
    pool = make()
    s = pool.open_session()
    cache(pool, s, fresh(6, 0))
    move = pool.moves.begin(node_of(pool), 0, 2)
    other = admit(pool, s, fresh(3, 0) + fresh(4, 700))
    pool.commit(s, other.sequence, 7)
    pool.free(s, other.sequence)
    assert not pool.moves.finish(move.handle)
    assert pool.moves.abandoned_freed == 1
    assert pool.probe(root(pool), fresh(7, 0)) == 6
    sound(pool)


def test_late_and_unknown_completions_are_counted() -> None:
    """A completion that comes twice, or for what never was, is counted and changes nothing."""
    pool = make()
    s = pool.open_session()
    cache(pool, s, fresh(6, 0))
    move = pool.moves.begin(node_of(pool))
    pool.moves.finish(move.handle)
    for handle in (move.handle, 999):
        assert not pool.moves.finish(handle)
        pool.moves.abandon(handle)
    assert pool.statistics().late_completions == 4
    sound(pool)


def test_only_what_nobody_reads_is_moved() -> None:
    """Held or moving nodes, roots and what is not there cannot be moved, nor what finds no room."""
    pool = make(blocks=5)
    s = pool.open_session()
    a = admit(pool, s, fresh(6, 0))
    pool.commit(s, a.sequence, 6)
    node = node_of(pool)
    for bad in (node, root(pool), 0, -3, 100000):
        with pytest.raises(OutOfTurn):
            pool.moves.begin(bad)
    pool.free(s, a.sequence)
    pool.moves.begin(node)
    with pytest.raises(OutOfTurn):
        pool.moves.begin(node)
    sound(pool)
    full = make(blocks=5)
    s = full.open_session()
    cache(full, s, fresh(12, 0))
    with pytest.raises(OutOfTurn, match="12 free slots"):
        full.moves.begin(node_of(full))
    sound(full)


def test_opaque_moves_are_whole_blocks() -> None:
    """Blocks whose inside is not known are moved to whole blocks."""
    pool = make(blocks=9, block_size=4, opaque=True)
    s = pool.open_session()
    cache(pool, s, fresh(8, 0))
    move = pool.moves.begin(node_of(pool))
    assert all(
        start % 4 == 0 and length % 4 == 0
        for start, length in zip(move.target[::2], move.target[1::2], strict=True)
    )
    assert pool.moves.finish(move.handle)
    sound(pool)


def test_a_part_of_a_node_is_moved() -> None:
    """Tokens in the middle of a node go elsewhere, to a target that the caller names; the rest stays."""
    pool = make()
    s = pool.open_session()
    cache(pool, s, fresh(6, 0))
    node = node_of(pool)
    before = slots(pool.tree.extents(node))
    run, length = max(pool.runs.length_at.items(), key=lambda item: item[1])
    move = pool.moves.begin(node, 2, 3, [run + length - 3, 3])
    other = pool.moves.begin(node, 5, 1, [run, 1])
    sound(pool)
    with pytest.raises(OutOfTurn, match="is moving"):
        pool.moves.begin(node, 4, 1)
    assert pool.moves.finish(other.handle)
    assert pool.moves.finish(move.handle)
    after = slots(pool.tree.extents(node))
    assert after == [*before[:2], *range(run + length - 3, run + length), run]
    assert slots(admit(pool, s, fresh(7, 0)).extents)[:6] == after
    sound(pool)


def test_a_target_that_is_not_free_is_refused() -> None:
    """A target is free slots at the edge of a free run, as many as move; anything else changes nothing."""
    pool = make()
    s = pool.open_session()
    cache(pool, s, fresh(6, 0))
    node = node_of(pool)
    run, length = next(iter(pool.runs.length_at.items()))
    held = pool.tree.extents(node)[0]
    for at, n, target in (
        (0, 6, [run, 5]),
        (0, 6, [run + 1, 6]),
        (0, 6, [held, 6]),
        (0, 6, [run, 3, held, 3]),
        (0, 6, [run, 6, run, 0]),
        (0, 6, [run + length - 5, 6]),
        (0, 6, [run, length + 6, run, -length]),
        (4, 3, [run, 3]),
        (-1, 3, [run, 3]),
        (0, 6, [pool.slots, 6]),
    ):
        with pytest.raises(OutOfTurn):
            pool.moves.begin(node, at, n, target)
        assert not pool.moves.tickets
        sound(pool)
    pool = make()
    s = pool.open_session()
    cache(pool, s, fresh(20, 0))
    run, length = next(iter(pool.runs.length_at.items()))
    assert length == 12
    for target in ([run, 20], [run, 12, run + 12, 8], [run, 6, run + 6, 14]):
        with pytest.raises(OutOfTurn, match="no such free slots"):
            pool.moves.begin(node_of(pool), 0, 20, target)
        sound(pool)


def test_a_move_neither_holds_nor_refreshes() -> None:
    """A node on the move is evicted in its turn: the copy's target is set aside, and nothing is published."""
    pool = make()
    s = pool.open_session()
    cache(pool, s, fresh(4, 0))
    first = node_of(pool)
    cache(pool, s, fresh(4, 100))
    move = pool.moves.begin(first)
    assert pool.tree.evictable == 8
    pool.evict(4)
    assert pool.probe(root(pool), fresh(5, 0)) == 0
    assert pool.probe(root(pool), fresh(5, 100)) == 4
    assert not pool.moves.finish(move.handle)
    assert pool.moves.abandoned_freed == 1
    sound(pool)
    # And a published one is still the first to go.
    cache(pool, s, fresh(4, 200))
    oldest = next(n for n in pool.tree.live() if pool.tree.keys[n] == fresh(4, 100))
    assert pool.moves.finish(pool.moves.begin(oldest).handle)
    pool.evict(4)
    assert pool.probe(root(pool), fresh(5, 100)) == 0
    sound(pool)


def test_a_number_that_is_used_again_is_another_node() -> None:
    """The node was evicted and its number and slots went to another prefix: the copy is of what was there before."""
    pool = make(blocks=5)
    s = pool.open_session()
    cache(pool, s, fresh(4, 0))
    node = node_of(pool)
    where = pool.tree.extents(node)
    move = pool.moves.begin(
        node, 0, 4, [max(pool.runs.length_at) + pool.runs.length_at[max(pool.runs.length_at)] - 4, 4]
    )
    pool.evict(4)
    got = admit(pool, s, fresh(4, 900))
    pool.commit(s, got.sequence, 4)
    pool.free(s, got.sequence)
    assert node_of(pool) == node
    assert pool.tree.extents(node) == where
    assert not pool.moves.finish(move.handle)
    assert slots(admit(pool, s, fresh(5, 900)).extents)[:4] == slots(where)
    sound(pool)


def told(pool: Pool) -> list[Moved]:
    return [push for push in pool.poll(pool.now) if isinstance(push, Moved)]


def follower(pool: Pool) -> Session:
    """A session that follows moves: it has stepped."""
    session = pool.open_session(movable=True, append="chain")
    step(pool, session)
    complete(pool, session)
    return session


def test_who_follows_is_told() -> None:
    """A leased node moves where its readers follow: each sequence is told which of its positions stand where."""
    pool = make(blocks=17)
    s = follower(pool)
    cache(pool, s, fresh(8, 0))
    long = admit(pool, s, fresh(9, 0))
    short = admit(pool, s, fresh(6, 0))
    move = pool.moves.begin(node_of(pool), 2, 6)
    assert pool.moves.finish(move.handle)
    where = slots(move.target)
    pushes = told(pool)
    assert [push.epoch for push in pushes] == [1, 2], "a number each: a connection may end between any two"
    assert {push.sequence: (push.position, slots(push.extents)) for push in pushes} == {
        long.sequence: (2, where),
        short.sequence: (2, where[:3]),
    }
    for each in (long, short):
        table = slots(each.extents)
        push = next(push for push in pushes if push.sequence == each.sequence)
        moved = slots(push.extents)
        table[2 : 2 + len(moved)] = moved
        assert slots(pool.table(s, each.sequence)) == table
    sound(pool)


def test_old_slots_wait_for_the_step_that_applies_the_move() -> None:
    """The old place is free once the steps before the one that applied the move have completed, not sooner."""
    pool = make(blocks=17)
    s = follower(pool)
    cache(pool, s, fresh(8, 0))
    admit(pool, s, fresh(9, 0))
    reading = step(pool, s)
    move = pool.moves.begin(node_of(pool))
    old = slots(move.source)
    assert pool.moves.finish(move.handle)

    def is_free() -> bool:
        runs = pool.runs.length_at.items()
        return all(any(start <= slot < start + length for start, length in runs) for slot in old)

    assert not is_free()
    pool.progress(s, s.submitted + 1, reading)
    complete(pool, s)
    assert not is_free(), "it has stepped, but not with the new slots"
    reading = step(pool, s)
    # Between the two stores of a client that begins a step.
    pool.progress(s, s.submitted, s.completed, epoch=1)
    assert not is_free()
    pool.progress(s, s.submitted + 1, s.completed, epoch=1)
    assert not is_free()
    assert pool.statistics().moving == 8
    sound(pool)
    pool.progress(s, s.submitted, reading, epoch=1)
    assert is_free()
    assert pool.statistics().moving == 0
    sound(pool)


def test_old_slots_wait_for_every_session() -> None:
    """Where two engines read, the old place waits for both; who lags keeps it."""
    pool = make(blocks=17)
    a, b = follower(pool), follower(pool)
    cache(pool, a, fresh(8, 0))
    admit(pool, a, fresh(9, 0))
    admit(pool, b, fresh(9, 0))
    assert pool.moves.finish(pool.moves.begin(node_of(pool)).handle)
    assert {push.session for push in told(pool)} == {a.handle, b.handle}
    pool.progress(a, a.submitted + 1, a.submitted + 1, epoch=1)
    assert pool.statistics().moving == 8
    sound(pool)
    pool.progress(b, b.submitted + 1, b.submitted + 1, epoch=1)
    assert pool.statistics().moving == 0
    sound(pool)


def test_the_dead_do_not_keep_old_slots() -> None:
    """A reader that died before it applied a move keeps the old place until its process is proven gone."""
    pool = make(blocks=17)
    s = follower(pool)
    cache(pool, s, fresh(8, 0))
    admit(pool, s, fresh(9, 0))
    assert pool.moves.finish(pool.moves.begin(node_of(pool)).handle)
    pool.lose(s)
    pool.sweep()
    assert pool.statistics().moving == 8
    sound(pool)
    pool.gone(s)
    pool.sweep()
    assert pool.statistics().moving == 0
    sound(pool)


def test_who_returns_is_told_again() -> None:
    """Pushes go with a broken connection: who comes back hears of the moves it has not applied."""
    pool = make(blocks=17)
    s = follower(pool)
    cache(pool, s, fresh(8, 0))
    admit(pool, s, fresh(9, 0))
    assert pool.moves.finish(pool.moves.begin(node_of(pool)).handle)
    first = told(pool)
    pool.lose(s)
    pool.resume(s)
    assert told(pool) == first != []
    pool.progress(s, s.submitted + 1, s.submitted, epoch=1)
    pool.lose(s)
    pool.resume(s)
    assert told(pool) == []
    sound(pool)


def test_a_fork_reads_where_its_parent_will() -> None:
    """A fork made after a move stands in the new place; both are told of the next one."""
    pool = make(blocks=17)
    s = follower(pool)
    cache(pool, s, fresh(8, 0))
    parent = admit(pool, s, fresh(9, 0))
    assert pool.moves.finish(pool.moves.begin(node_of(pool)).handle)
    told(pool)
    child = fork(pool, s, parent.sequence, length=8)
    move = pool.moves.begin(node_of(pool))
    assert pool.moves.finish(move.handle)
    pushes = told(pool)
    assert {push.sequence for push in pushes} == {parent.sequence, child.sequence}
    assert [push.epoch for push in pushes] == [2, 3]
    sound(pool)


def test_a_readers_own_copies_are_left_out() -> None:
    """A sequence that computed what the tree has too reads its own slots, and is not told to read the tree's."""
    pool = make(blocks=17)
    s = follower(pool)
    one, two = admit(pool, s, fresh(8, 0)), admit(pool, s, fresh(8, 0))
    pool.commit(s, one.sequence, 8)
    assert pool.commit(s, two.sequence, 4) == Committed(4, 0, 4)
    assert pool.moves.finish(pool.moves.begin(node_of(pool)).handle)
    assert [push.sequence for push in told(pool)] == [one.sequence]
    sound(pool)


def test_who_does_not_follow_is_not_relied_upon() -> None:
    """Sessions that did not say so, read whole pages, copy tails, have not stepped lately or lag are left alone."""
    for movable, page, append in ((False, 1, "chain"), (True, 4, "chain"), (True, 1, "peel")):
        pool = make(blocks=17)
        s = pool.open_session(movable=movable, page=page, append=append)
        step(pool, s)
        complete(pool, s)
        cache(pool, s, fresh(8, 0))
        admit(pool, s, fresh(9, 0))
        with pytest.raises(OutOfTurn, match="cannot be told"):
            pool.moves.begin(node_of(pool))
    pool = make(blocks=17)
    s = follower(pool)
    cache(pool, s, fresh(8, 0))
    admit(pool, s, fresh(9, 0))
    for _ in range(2):
        assert pool.moves.readers(node_of(pool)) is not None
        pool.stall(s)
        assert pool.moves.readers(node_of(pool)) is None
        pool.stall(s, False)
    pool.poll(60.0)
    assert pool.moves.readers(node_of(pool)) is None, "it has not stepped for a minute"
    pool.progress(s, s.submitted + 1, s.submitted, now=60.0)
    pool.moves.retired_tokens += 10_000
    assert pool.moves.readers(node_of(pool)) is None, "more old places are held up than may be"
    pool.moves.retired_tokens -= 10_000
    sound(pool)


def test_a_worker_that_joins_keeps_old_slots() -> None:
    """A process that joined after a move was told may still go by the old table: its steps are waited for, too."""
    pool = make(blocks=33)
    s = follower(pool)
    cache(pool, s, fresh(8, 0))
    admit(pool, s, fresh(9, 0))
    assert pool.moves.finish(pool.moves.begin(node_of(pool)).handle)
    worker = pool.open_session(group=s)
    n = s.submitted + 1
    pool.progress(worker, n, n - 1)
    pool.progress(s, n, n)
    pool.progress(s, n + 1, n + 1, epoch=1)
    assert pool.statistics().moving == 8
    pool.progress(worker, n + 1, n + 1)
    assert pool.statistics().moving == 0
    sound(pool)


def test_other_tokens_in_the_same_slots_are_not_what_was_copied() -> None:
    """A node was split, its front moved away and its rear into the front's old slots: the copy is of the front."""
    pool = make(blocks=33)
    s = pool.open_session()
    cache(pool, s, fresh(12, 0))
    node = node_of(pool)
    move = pool.moves.begin(node, 0, 2)
    front = pool.tree.split(node, 2)
    assert pool.moves.finish(pool.moves.begin(front, 0, 2).handle)
    assert pool.moves.finish(pool.moves.begin(node, 4, 2, list(move.source)).handle)
    pool.tree.split(node, 4)
    assert not pool.moves.finish(move.handle)
    sound(pool)


def test_old_slots_are_bounded_in_all() -> None:
    """However many readers lag, and whether they apply or do not complete, old places are a share of the pool."""
    for idle in (True, False):
        pool = make(blocks=1025, block_size=16)
        readers = [follower(pool) for _ in range(8)]
        for index, s in enumerate(readers):
            cache(pool, s, fresh(400, 1000 * index))
            admit(pool, s, fresh(401, 1000 * index))
        nodes = [node for node in pool.tree.live() if pool.tree.length[node]]
        for turn in range(40):
            if pool.moves.readers(nodes[turn % 8]) is None:
                break
            assert pool.moves.finish(pool.moves.begin(nodes[turn % 8]).handle)
            for s in readers if not idle else ():
                pool.progress(s, s.submitted + 1, s.completed, epoch=s.epoch)
        assert 0 < pool.moves.retired_tokens <= pool.usable // 32 + 400
        sound(pool)


def test_a_session_that_never_applies_stops_its_own_moves_only() -> None:
    """One that steps and does not apply holds up a part of what all may; the others' data goes on moving."""
    pool = make(blocks=1025, block_size=16)
    stuck, sound_one = follower(pool), follower(pool)
    of = []
    for index, s in enumerate((stuck, sound_one)):
        cache(pool, s, fresh(40, 1000 * index))
        admit(pool, s, fresh(41, 1000 * index))
        of.append(next(node for node in pool.tree.live() if pool.tree.length[node] and node not in of))
    most = pool.usable // 32
    for _ in range(100):
        if pool.moves.readers(of[0]) is None:
            break
        assert pool.moves.finish(pool.moves.begin(of[0]).handle)
        pool.progress(stuck, stuck.submitted + 1, stuck.submitted + 1, epoch=0)
    assert most // 4 < stuck.retired_tokens <= most // 4 + 40
    for _ in range(100):
        assert pool.moves.finish(pool.moves.begin(of[1]).handle)
        step = sound_one.submitted + 1
        pool.progress(sound_one, step, step, epoch=sound_one.epoch)
    assert sound_one.retired_tokens <= 40
    sound(pool)
    pool.lose(stuck)
    pool.gone(stuck)
    while not pool.sweep():
        pass
    assert pool.moves.retired_tokens == sound_one.retired_tokens
    sound(pool)


def test_targets_of_whole_blocks_are_whole_blocks() -> None:
    """Where only whole blocks are held, a target that is none is refused."""
    pool = make(blocks=9, block_size=4, opaque=True)
    s = pool.open_session()
    cache(pool, s, fresh(4, 0))
    run = next(iter(pool.runs.length_at))
    for target in ([run, 1, run + 1, 3], [run + 1, 4], [run, 2, run + 2, 2]):
        with pytest.raises(OutOfTurn):
            pool.moves.begin(node_of(pool), 0, 4, target)
    sound(pool)


def test_what_stands_elsewhere_by_now_is_not_published() -> None:
    """Whoever changes where a node's tokens stand while they are copied: the copy is not of them any more."""
    pool = make(blocks=9)
    s = pool.open_session()
    cache(pool, s, fresh(6, 0))
    node = node_of(pool)
    slot, length = pool.tree.extents(node)
    move = pool.moves.begin(node, 0, 2)
    pool.tree.set_extents(node, [slot + 2, length - 2, slot, 2])
    assert not pool.moves.finish(move.handle)
    assert pool.moves.abandoned_freed == 1
    sound(pool)
