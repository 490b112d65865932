"""The index of who lives in which block agrees with the tree, whatever happened between two looks."""

import random

import pytest

from kvslot.allocator import Admitted, Pool, Space
from kvslot.allocator.slots import CACHED
from kvslot.defrag import Purpose, rest
from kvslot.defrag.index import HOLE_CLASSES, Index, Rings, check, hole_class
from kvslot.defrag.planner import Planner

from .pools import Maker, sound


def fed(index: Index) -> Index:
    while index.feed(1 << 16):
        pass
    return index


def test_rings_hold_their_members_in_order() -> None:
    """A member is in one ring at most; the first is the one that has been there longest; empty rings are known."""
    rings = Rings(8, 3)
    for member in (3, 1, 2):
        rings.put(member, 1)
    assert rings.first(1) == 3
    rings.put(3, 2)
    assert (rings.first(1), rings.first(2), rings.occupied, rings.count) == (1, 3, 0b110, [0, 2, 1])
    rings.put(1, 1)
    assert rings.first(1) == 2
    for member in (1, 2, 3, 7):
        rings.drop(member)
    assert (rings.occupied, rings.count, rings.first(1)) == (0, [0, 0, 0], -1)


def test_longer_holes_have_higher_classes() -> None:
    """Classes rise with the length and never beyond the last one."""
    classes = [hole_class(n) for n in range(1, 3 * 8192)]
    assert classes == sorted(classes)
    assert classes[-1] < HOLE_CLASSES
    assert classes[:63] == list(range(1, 64))


@pytest.mark.parametrize("block_size", [1, 4, 16, 100])
def test_an_index_is_first_filled_from_what_there_is(block_size: int) -> None:
    """Nodes that were there before the index are in it, also when they are taken in a few at a time."""
    maker = Maker(4000 // block_size + 8, block_size).fill(
        lambda rng: rng.randint(1, 90), random.Random(1), 0.6
    )
    index = Index(maker.pool)
    slices = 0
    while index.feed(16):
        slices += 1
        assert not index.complete or slices > len(maker.nodes) // 16
    assert check(index) == []
    index.close()
    assert maker.pool.tree.log is None


@pytest.mark.parametrize("seed", range(6))
def test_an_index_follows_sequences_and_evictions(seed: int) -> None:
    """After any requests, commits, splits, evictions and moves a fed index agrees with a recount."""
    rng = random.Random(seed)
    block_size = rng.choice((4, 16, 24))
    maker = Maker(1200 // block_size, block_size, watermark=0.0)
    pool = maker.pool
    session = pool.open_session()
    root = pool.open_space(Space("b"))
    planner = Planner(pool)
    prompts = [bytes(rng.randrange(3) for _ in range(4 * 120)) for _ in range(6)]
    running: list[tuple[int, int]] = []
    for step in range(400):
        act = rng.random()
        if act < 0.5:
            length = rng.randint(2, 120)
            tokens = rng.choice(prompts)[: 4 * length]
            answer = pool.allocate(session, root, tokens)
            if isinstance(answer, Admitted):
                running.append((answer.sequence, length))
        elif act < 0.85 and running:
            sequence, length = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.8:
                pool.commit(session, sequence, length)
            pool.free(session, sequence)
        elif act < 0.9:
            pool.evict(rng.randint(1, 200))
        elif act < 0.95:
            while planner.feed(64):
                pass
            for purpose in Purpose:
                for move in planner.plan(200, purpose, now=float(step)).moves[:3]:
                    pool.finish_move(pool.begin_move(move.node, move.at, move.length, move.target).handle)
        else:
            planner.feed(rng.randint(1, 8))
        if len(running) > 5:
            pool.free(session, running.pop(0)[0])
        pool.poll(0.0)
        if not step % 20:
            fed(planner.index)
            assert check(planner.index) == []
    sound(pool)
    planner.close()


def test_the_log_is_taken_in_as_it_stands_at_the_end() -> None:
    """Nodes that change places while the index is not looking are each found in their new one."""
    maker = Maker(40)
    pool = maker.pool
    index = Index(pool)
    rng = random.Random(2)
    for _ in range(50):
        for _ in range(rng.randint(1, 12)):
            if maker.nodes and rng.random() < 0.5:
                maker.remove(rng.choice(maker.nodes))
            elif pool.runs.total > 200:
                maker.add(rng.randint(1, 100))
        index.feed(rng.randint(1, 6))
    fed(index)
    assert check(index) == []


@pytest.mark.parametrize("budget", [1, 7, 1 << 16])
def test_long_nodes_are_taken_in_by_parts(budget: int) -> None:
    """Nodes of many extents that grow, are cut, moved, split and evicted in the midst of being taken in are right."""
    rng = random.Random(budget)
    maker = Maker(600)
    pool, tree = maker.pool, maker.pool.tree
    index = Index(pool)
    for round_ in range(60):
        while len(maker.nodes) < 6:
            # Singles beside each other, in an order in which no two of them are one extent.
            single = [maker.pool.runs.take(1)[0] for _ in range(rng.randint(40, 200))]
            rng.shuffle(single)
            for slot in single:
                pool.runs.give(slot, 1)
            maker.at(*(value for slot in single for value in (slot, 1)))
        node = rng.choice(maker.nodes)
        act = rng.random()
        if act < 0.3:
            maker.remove(node)
        elif tree.length[node] > 2:
            n = rng.randint(1, tree.length[node] - 1)
            for _ in range(rng.randint(1, 3)):
                if tree.length[node] > 1:
                    back = tree.trim_tail(node, min(n, tree.length[node] - 1))
                    pool._release(back, sum(back[1::2]), CACHED)
            if act > 0.7 and pool.runs.total:
                pool.finish_move(pool.begin_move(node, rng.randrange(tree.length[node]), 1).handle)
        for _ in range(rng.randint(0, 30)):
            index.feed(budget)
        if not round_ % 5:
            while index.feed(budget):
                pass
            assert index.behind == 0
            assert check(index) == []
            sound(pool)
    index.close()


def test_what_one_feed_takes_is_bounded_for_the_longest_node() -> None:
    """A node of thousands of extents is entered and left in as many parts as it takes."""
    maker = Maker(1000)
    slots = list(range(maker.pool.padding, 8000, 2))
    node = maker.at(*(value for slot in slots for value in (slot, 1)))
    index = Index(maker.pool)
    known = [0]
    while index.feed(16):
        known.append(index._node_count[node])
        assert known[-1] - known[-2] <= 16
    assert known[-1] == len(slots)
    maker.remove(node)
    while index.feed(16):
        known.append(index._node_count[node])
        assert known[-2] - known[-1] <= 16
    assert index._node_count[node] == 0
    assert check(index) == []


def test_a_number_that_comes_back_in_the_same_slots_is_still_in_pieces() -> None:
    """Dropped from those in pieces before the index has heard of its end, it is among them again."""
    maker = Maker(40)
    single = [maker.pool.padding + 2 * each for each in range(6)]
    extents = [value for slot in single for value in (slot, 1)]
    node = maker.at(*extents)
    index = fed(Index(maker.pool))
    maker.remove(node)
    index.no_more_scattered()
    assert maker.at(*extents) == node
    assert check(fed(index)) == []


def test_a_log_of_any_length_is_taken_in_parts() -> None:
    """Changes wait in the order they came, and count as behind until they are taken note of."""
    maker = Maker(300)
    for _ in range(1000):
        maker.add(2)
    index = fed(Index(maker.pool))
    for node in list(maker.nodes):
        maker.remove(node)
    left = [index.behind]
    assert left[0] >= 1000
    while index.feed(8) and index.behind > 300:
        left.append(index.behind)
    assert left == sorted(left, reverse=True)
    assert len(left) > 50
    fed(index)
    assert index.behind == 0
    assert check(index) == []


def test_a_recount_finds_a_planted_fault() -> None:
    """An index that has not heard of a node is found out."""
    maker = Maker(20)
    index = fed(Index(maker.pool))
    maker.pool.tree.log = None
    maker.add(5)
    assert check(index)


def test_parked_blocks_come_back_in_time_or_when_they_change() -> None:
    """A block that was looked at in vain is a source again after its time, or once its nodes have changed."""
    maker = Maker(20)
    node = maker.at(33, 5)
    index = fed(Index(maker.pool))
    level = index.fills.ring_of(2)
    index.park(2, until=10.0)
    assert index.fills.ring_of(2) == index.levels
    assert index.parked_free == 11
    index.feed(100, now=9.0)
    assert index.fills.ring_of(2) == index.levels
    index.feed(100, now=11.0)
    assert index.fills.ring_of(2) == level
    assert index.parked_free == 0
    index.park(2, until=20.0)
    maker.remove(node)
    fed(index)
    assert index.fills.ring_of(2) == -1
    assert check(index) == []


def test_rest_leaves_an_index_of_its_own_behind_nowhere() -> None:
    """`rest` without a planner listens to the pool no longer than it works."""
    maker = Maker(60).fill(lambda rng: rng.randint(1, 15), random.Random(3), 0.5)
    rest(maker.pool)
    assert maker.pool.tree.log is None
    sound(maker.pool)


def test_index_of_an_untouched_pool_is_empty() -> None:
    """Nothing cached, nothing in any ring."""
    pool: Pool = Maker(10).pool
    index = fed(Index(pool))
    assert check(index) == []
    assert index.fills.occupied == index.holes.occupied == 0
