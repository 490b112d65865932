"""Moves: begun, copied, published or abandoned; never under a reader, never a target too early."""

import pytest

from kvslot.allocator import OutOfTurn, Pool

from .tools import admit, cache, complete, fresh, make, root, slots, sound, step


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
