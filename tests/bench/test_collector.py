"""How the process runs the garbage collector (daemon/collector.py)."""

import gc
from collections.abc import Iterator

import pytest

from kvslot.daemon.collector import FORCED_AFTER, IDLE_AFTER, Collector


@pytest.fixture
def clock() -> Iterator[list[int]]:
    """A clock that the test sets; and Python's own collector as it was, whatever happens."""
    was = gc.isenabled()
    yield [0]
    gc.unfreeze()
    if was:
        gc.enable()


def test_nothing_is_collected_while_serving(clock: list[int]) -> None:
    """Between start and stop Python's automatic collections are off; afterwards they are as before."""
    was = gc.isenabled()
    collector = Collector(lambda: clock[0])
    with collector:
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        junk: list[list[int]] = [[] for _ in range(20_000)]
        del junk
        assert collector.statistics().young == 0
    assert gc.isenabled() == was
    assert collector.statistics().frozen > 0


def test_an_idle_moment_collects_the_young(clock: list[int]) -> None:
    """Enough operations and an idle moment: one young collection; cycles are found and counted."""
    with Collector(lambda: clock[0]) as collector:
        assert not collector.idle()
        knot: list[object] = []
        knot.append(knot)
        del knot
        collector.served(IDLE_AFTER)
        assert collector.idle()
        seen = collector.statistics()
        assert (seen.young, seen.forced, seen.full) == (1, 0, 0)
        assert seen.found >= 1
        assert not collector.idle()


def test_without_an_idle_moment_it_is_forced(clock: list[int]) -> None:
    """So many operations in a row force a young collection, never a full one."""
    with Collector(lambda: clock[0]) as collector:
        for _ in range(2 * FORCED_AFTER):
            collector.served()
        seen = collector.statistics()
        assert (seen.young, seen.forced, seen.full) == (2, 2, 0)


def test_pauses_are_measured_with_the_clock_given() -> None:
    """The longest pause is that of the clock between a collection's start and its end."""
    ticks = iter(range(0, 10_000_000, 70_000))
    with Collector(lambda: next(ticks)) as collector:
        collector.served(FORCED_AFTER)
        seen = collector.statistics()
        assert seen.pause_us_max == seen.pause_us_last == seen.pause_us_sum == 70.0


def test_deep_walks_everything_since_start(clock: list[int]) -> None:
    """A cycle that young collections let grow old is found by `deep`, whose pause is not held against serving."""
    times = iter([0, 10_000, 20_000, 30_000, 40_000, 9_000_000])
    knot: list[object] = []
    with Collector(lambda: next(times)) as collector:
        knot = [[]]
        knot.append(knot)
        for _ in range(2):
            collector.served(FORCED_AFTER)  # it survives twice: two pauses of 10 us
        del knot
        assert collector.deep() >= 1
        seen = collector.statistics()
        assert (seen.full, seen.deep) == (1, 1)
        assert seen.pause_us_max == 10.0


def test_a_collection_nobody_asked_for_is_seen(clock: list[int]) -> None:
    """Whoever calls gc.collect(), the counts show it."""
    with Collector(lambda: clock[0]) as collector:
        gc.collect()
        assert collector.statistics().full == 1
        assert collector.statistics().deep == 0


def test_started_once(clock: list[int]) -> None:
    """A second start is our own mistake."""
    with Collector(lambda: clock[0]) as collector, pytest.raises(RuntimeError, match="has been started"):
        collector.start()
