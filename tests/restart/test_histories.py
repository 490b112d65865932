"""A journal may end at any store of any verb; what is made of it then is right."""

import pytest

from kvslot.allocator import PoolConfig

from .histories import History

CONFIGS = {
    "tokens": PoolConfig(blocks=17, block_size=16, quantum=4),
    "small": PoolConfig(blocks=9, block_size=8, quantum=4, eviction="s3fifo"),
    "opaque": PoolConfig(blocks=33, block_size=4, opaque=True),
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("seed", range(2))
def test_a_journal_cut_at_any_store_gives_nothing_wrong(kind: str, seed: int) -> None:
    """Whatever store was the last, what is cached afterwards is what its slots hold, and nobody's slots are free."""
    history = History(seed, CONFIGS[kind])
    for number in range(90):
        history.act()
        if number % 30 == 29:
            history.die()
    assert history.restored == history.cached > 0
