"""Free runs that stand aside for a long request: still free, found at once, and nobody is worse off for them."""

from __future__ import annotations

import pytest

from kvslot.allocator import Admitted, Pool

from .tools import admit, cache, fresh, later, make, root, slots, sound


def scattered(**options: object) -> Pool:
    """A pool of 40 blocks of 4, every second one cached."""
    pool = make(blocks=41, block_size=4, quantum=4, ahead=True, headroom=0.0, **options)
    session = pool.open_session()
    held = [admit(pool, session, fresh(4, 100 * index)).sequence for index in range(20)]
    for index, handle in enumerate(held):
        pool.commit(session, handle, 4)
        if index % 2:
            pool.free(session, handle)
    pool.evict(40)
    pool.runs.long = 2
    pool.many = 1
    sound(pool)
    return pool


def test_what_is_gathered_is_still_free_and_found_at_once() -> None:
    """Gathering changes no gauge, and a long request takes what was gathered, as it is."""
    pool = scattered()
    session = pool.open_session()
    free = pool.statistics().free
    while pool.gather(6, 1):
        sound(pool)
    sound(pool)
    assert pool.statistics().free == free
    assert pool.runs.stocked == 6
    mine = set(slots(pool.runs.stock))
    answer = admit(pool, session, fresh(24, 9000))
    assert mine <= set(slots(answer.extents))
    assert pool.runs.stocked == 0
    sound(pool)


def test_of_more_than_is_needed_the_rest_stays() -> None:
    """A request shorter than what was gathered cuts a piece, and what is left of it can be taken, too."""
    pool = scattered()
    session = pool.open_session()
    while pool.gather(12, 8):
        pass
    seen: set[int] = set()
    for index in range(4):
        mine = slots(admit(pool, session, fresh(9 + index, 5000 + 100 * index)).extents)
        assert not seen & set(mine)
        seen |= set(mine)
        sound(pool)


@pytest.mark.parametrize("prompt", [1, 3, 4, 7])
def test_who_finds_no_run_takes_from_the_stock(prompt: int) -> None:
    """With all that is free in stock, requests of any length are served until nothing is free."""
    pool = scattered()
    session = pool.open_session()
    while pool.gather(1 << 20, 64):
        pass
    assert not pool.runs.length_at
    count = 0
    while isinstance(pool.allocate(session, root(pool), fresh(prompt, 7000 + 100 * count)), Admitted):
        count += 1
        sound(pool)
    free = pool.runs.total
    assert free < prompt
    assert count


def test_pages_and_windows_find_what_is_in_stock() -> None:
    """Sessions that read whole pages, and requests for one extent, count on all that is free."""
    pool = scattered()
    paged, plain = pool.open_session(page=2), pool.open_session()
    while pool.gather(1 << 20, 64):
        pass
    admit(pool, paged, fresh(6, 8000))
    sound(pool)
    while pool.gather(1 << 20, 64):
        pass
    answer = later(pool.allocate(plain, root(pool), fresh(40, 8100), contiguous=True))
    assert answer.needed == 40
    assert pool.admission.window is not None
    sound(pool)
    assert not pool.gather(8), "nothing is gathered while a window is being cleared"


def test_what_a_long_request_gives_back_is_free_at_once_and_filed_later() -> None:
    """Many extents given back stand aside first, ragged ends included; filed, the pool is as if they never had."""
    pool = scattered()
    session = pool.open_session()
    before = pool.statistics().free
    answer = admit(pool, session, fresh(50, 6000))
    assert len(answer.extents) > 2
    pool.free(session, answer.sequence)
    sound(pool)
    assert pool.statistics().free == before
    assert pool.runs.stocked
    while pool.tidy(0, 1):
        sound(pool)
    assert not pool.runs.stock
    assert pool.runs.cells_free * pool.cell <= pool.runs.total == before


def test_a_large_tree_is_not_counted_over_and_over() -> None:
    """How many whole pages could be had is counted anew when it sufficed, and otherwise after a while."""
    pool = make(blocks=9000, block_size=2, quantum=2)
    owner, paged = pool.open_session(), pool.open_session(page=2)
    for index in range(8900):
        cache(pool, owner, fresh(1, 3 * index))
    pool.now = 1.0
    enough, pages = 2, pool.admission.whole_pages(2, 1 << 20, 1.0)
    assert pages
    sequence = admit(pool, paged, fresh(20, 1 << 20), now=1.0).sequence
    assert pool.admission.whole_pages(2, 1 << 20, 1.01) == pages, "believed for a while"
    pool.free(paged, sequence)
    pool.evict(1000)
    assert pool.admission.whole_pages(2, enough, 1.02) >= pages - 10, "what would suffice is counted"
    assert pool.admission.whole_pages(2, 1 << 20, 60.0) >= pages - 10
