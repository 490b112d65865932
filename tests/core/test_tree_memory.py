"""How many numbers the prefix tree makes for the nodes it has: what a node costs in memory."""

from kvslot.allocator.tree import SPARSE

from .tools import cache, fresh, make, sound


def test_many_short_paths_share_their_clusters() -> None:
    """Prompts that have nothing in common, one node each, do not take a cluster of numbers each."""
    pool = make(blocks=2001, block_size=16)
    session = pool.open_session()
    for index in range(8000):
        cache(pool, session, fresh(3, 10 * index))
    assert pool.tree.nodes > 8000
    assert len(pool.tree.keys) < 1.5 * SPARSE * pool.tree.nodes
    pool.evict(1 << 30)
    for index in range(8000):
        cache(pool, session, fresh(3, 10 * index))
    assert len(pool.tree.keys) < 1.5 * SPARSE * pool.tree.nodes
    sound(pool)
