"""Eviction: which leaf, how much of it, and never what somebody holds."""

import pytest

from kvslot.allocator import BadRequest, Pool, PoolConfig

from .tools import admit, cache, fresh, make, root, sound, toks


def cached(pool: Pool, n: int, start: int) -> int:
    return pool.probe(root(pool), fresh(n, start) + toks([99999]))


def test_the_least_recently_used_goes_first() -> None:
    """Of three cached prompts the one used longest ago goes first; a use makes it the newest."""
    pool = make(blocks=9)
    s = pool.open_session()
    for start in (0, 100, 200):
        cache(pool, s, fresh(4, start))
    pool.free(s, admit(pool, s, fresh(4, 0) + toks([7])).sequence)
    pool.evict(4)
    assert [cached(pool, 4, start) for start in (0, 100, 200)] == [4, 0, 4]
    pool.evict(4)
    assert [cached(pool, 4, start) for start in (0, 100, 200)] == [4, 0, 0]
    sound(pool)


def test_of_a_large_leaf_only_the_tail_goes() -> None:
    """What is evicted of a long leaf is its end, and no more than was asked."""
    pool = make(blocks=17)
    s = pool.open_session()
    cache(pool, s, fresh(40, 0))
    assert pool.evict(3) == 3
    assert cached(pool, 40, 0) == 37
    sound(pool)


def test_leaves_go_before_their_parents() -> None:
    """A shared prefix outlives what was built on it."""
    pool = make(blocks=17)
    s = pool.open_session()
    cache(pool, s, fresh(8, 0))
    for start in (100, 200):
        cache(pool, s, fresh(8, 0) + fresh(4, start))
    assert pool.evict(8) == 8
    assert cached(pool, 8, 0) == 8
    pool.evict(100)
    assert pool.statistics().nodes == 1
    sound(pool)


def test_what_is_leased_stays() -> None:
    """Neither a reader's prefix nor what is above it is evicted, however much is asked."""
    pool = make(blocks=17)
    s = pool.open_session()
    cache(pool, s, fresh(8, 0))
    cache(pool, s, fresh(8, 0) + fresh(4, 100))
    a = admit(pool, s, fresh(8, 0) + fresh(2, 100) + fresh(1, 800))
    assert a.hit == 10
    assert pool.evict(100) <= 2
    assert cached(pool, 10, 0) == 8
    assert pool.probe(root(pool), fresh(8, 0) + fresh(4, 100)) >= 10
    sound(pool)


def test_a_request_evicts_about_what_it_takes() -> None:
    """A full pool of short pieces loses no more than a few of them to one request of their size."""
    for block_size, length in ((16, 15), (16, 9), (64, 20), (528, 20)):
        pool = Pool(PoolConfig(blocks=4096 // block_size + 4, block_size=block_size))
        s = pool.open_session()
        start = 0
        while not pool.evicted_tokens:
            start += 1000
            cache(pool, s, fresh(length, start))
        for _ in range(50):
            start += 1000
            before = pool.evicted_tokens
            cache(pool, s, fresh(length, start))
            assert pool.evicted_tokens - before <= 8 * max(length, pool.quantum), (block_size, length)
        assert pool.statistics().cached > pool.usable // 2
        sound(pool)


def test_scattered_leaves_are_not_all_given_up_for_a_cell() -> None:
    """Where every second piece is in use no victim makes a whole cell free, and a request takes loose slots instead."""
    pool = Pool(PoolConfig(blocks=130, block_size=32))
    s = pool.open_session()
    kept = []
    start = 0
    while pool.runs.total > 200:
        start += 1000
        kept.append(admit(pool, s, fresh(20, start), contiguous=True).sequence)
    for sequence in kept[::2]:
        pool.commit(s, sequence, 20)
        pool.free(s, sequence)
    for _ in range(10):
        before = pool.evicted_tokens
        start += 1000
        admit(pool, s, fresh(20, start))
        assert pool.evicted_tokens - before <= 8 * pool.quantum
    assert pool.evicted_tokens > 0
    sound(pool)


def test_priority_outlives_age_until_it_expires() -> None:
    """A higher priority is evicted after all lower ones, and counts as none from its expiry on."""
    pool = make(blocks=17)
    s = pool.open_session()
    a = admit(pool, s, fresh(4, 0))
    pool.commit(s, a.sequence, 4, priority=3, expiry=10.0)
    pool.free(s, a.sequence)
    b = admit(pool, s, fresh(4, 50))
    pool.commit(s, b.sequence, 4, priority=1)
    pool.free(s, b.sequence)
    for start in (100, 200):
        cache(pool, s, fresh(4, start))
    pool.evict(8, now=1.0)
    assert [cached(pool, 4, start) for start in (0, 50, 100, 200)] == [4, 4, 0, 0]
    pool.evict(4, now=1.0)
    assert [cached(pool, 4, start) for start in (0, 50)] == [4, 0]
    cache(pool, s, fresh(4, 300))
    pool.evict(4, now=11.0)
    assert [cached(pool, 4, start) for start in (0, 300)] == [0, 4]
    sound(pool)


def test_a_split_keeps_priority_and_age() -> None:
    """Both halves of a split node keep what the whole had."""
    pool = make(blocks=17)
    s = pool.open_session()
    a = admit(pool, s, fresh(8, 0))
    pool.commit(s, a.sequence, 8, priority=3)
    pool.free(s, a.sequence)
    cache(pool, s, fresh(4, 0) + fresh(4, 100))
    cache(pool, s, fresh(4, 200))
    pool.evict(8)
    assert cached(pool, 8, 0) == 8
    sound(pool)


def test_hits_in_a_flood_of_strangers() -> None:
    """Every policy of the configuration keeps its books right under churn, and evicts all when asked."""
    from kvslot.allocator.eviction import POLICIES

    for policy in POLICIES:
        pool = Pool(PoolConfig(blocks=33, block_size=8, eviction=policy))
        s = pool.open_session()
        for i in range(300):
            cache(pool, s, fresh(6, 10 * (i % 7)) + fresh(i % 11 + 1, 1000 + 20 * i), now=float(i))
            sound(pool)
        pool.evict(pool.usable)
        assert pool.statistics().free == pool.usable
        sound(pool)


def test_an_unknown_policy_is_refused_by_name() -> None:
    """A policy that does not exist is refused with the names of those that do."""
    with pytest.raises(BadRequest, match="lru"):
        Pool(PoolConfig(blocks=4, eviction="fifo-ish"))
