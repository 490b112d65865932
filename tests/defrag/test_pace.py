"""When there is something to move, and when it is let be: thresholds, rests, tickets, the duty cycle."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from kvslot.defrag import Purpose
from kvslot.defrag.pace import (
    JOIN_SECONDS,
    REST_LAST,
    TICKETS_IN_A_ROW,
    Following,
    Order,
    Pace,
    Reading,
    Rules,
    pause,
)

USABLE = 16_000


def seen(blocks: float = 1.0, runs: float = 1.0, free: int = 4000, **more: Any) -> Reading:
    """A pool of which these shares of the free memory are in whole blocks and in runs."""
    return Reading(
        usable=USABLE,
        block_size=16,
        free=free,
        in_blocks=int(blocks * free),
        in_runs=int(runs * free),
        **more,
    )


def given(order: Order | None) -> Order:
    assert order is not None
    return order


def test_it_begins_above_one_threshold_and_ends_below_another() -> None:
    """Between the thresholds it goes on where it has begun, and does not begin where it has not."""
    pace = Pace(Rules(start=0.3, stop=0.1))
    assert pace.order(seen(blocks=0.75, tick=1), 0.0) is None
    assert given(pace.order(seen(blocks=0.65, tick=2), 1.0)).purpose is Purpose.FREE_BLOCKS
    assert given(pace.order(seen(blocks=0.75, tick=3), 2.0)).purpose is Purpose.FREE_BLOCKS
    assert pace.order(seen(blocks=0.95, tick=4), 3.0) is None
    assert pace.order(seen(blocks=0.75, tick=5), 9.0) is None
    assert pace.passes == 1
    assert pace.rests == 0


def test_whole_blocks_come_before_runs() -> None:
    """Free memory is made whole first, then brought together; runs that cannot be made are not wished for."""
    pace = Pace(Rules())
    assert given(pace.order(seen(blocks=0.5, runs=0.0), 0.0)).purpose is Purpose.FREE_BLOCKS
    assert given(pace.order(seen(blocks=0.98, runs=0.0), 1.0)).purpose is Purpose.RUN
    for free in (500, USABLE // 25):
        pace = Pace(Rules())
        assert pace.order(seen(blocks=1.0, runs=0.0, free=free), 0.0) is None
        assert given(pace.order(seen(blocks=1.0, runs=0.0, free=free, run_wanted=8), 0.0)).ticket


def test_little_memory_is_not_worth_a_copy() -> None:
    """A few slots are let be, though they are all that is free."""
    pace = Pace(Rules())
    assert pace.order(seen(blocks=0.0, runs=0.0, free=12), 0.0) is None
    assert not pace.worth(seen(blocks=0.0, runs=0.0, free=12), 0.0)


def test_looking_changes_nothing() -> None:
    """`worth` may be asked any number of times."""
    pace = Pace(Rules())
    reading = seen(blocks=0.2, run_wanted=4)
    for _ in range(3 * TICKETS_IN_A_ROW):
        assert pace.worth(reading, 0.0)
    assert given(pace.order(reading, 0.0)).ticket


def test_a_pass_that_brings_nothing_is_not_repeated_at_once() -> None:
    """S47: rests double up to five minutes, a pass that brings something ends that, and so does much looser memory."""
    pace = Pace(Rules())
    now, waits = 0.0, []
    for tick in range(14):
        reading = seen(blocks=0.5, tick=tick)
        began = now
        while (order := pace.order(reading, now)) is None:
            assert pace.wake(now) < math.inf
            now += pace.wake(now)
        waits.append(now - began)
        pace.planned(order, 0, reading, now)
    assert waits[:5] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert waits[-1] == REST_LAST
    assert pace.rests == 14
    assert pace.order(seen(blocks=0.5, tick=20), now) is None
    assert pace.order(seen(blocks=0.1, tick=20), now) is not None
    pace.planned(Order(Purpose.FREE_BLOCKS, 32), 3, seen(blocks=0.1, tick=20), now)
    assert pace.order(seen(blocks=0.99, tick=20), now) is None
    assert pace.wake(now) == 1.0


def test_without_use_of_the_pool_moves_end() -> None:
    """S47: when the load has stopped, a pass that brought little is the last, however long one waits."""
    pace = Pace(Rules())
    reading = seen(blocks=0.5, runs=0.0, scattered=3, tick=7)
    orders = 0
    for second in range(100_000):
        order = pace.order(reading, float(second))
        if order is not None:
            orders += 1
            pace.planned(order, 0, reading, float(second))
    assert orders == 3  # one for each purpose


@pytest.mark.parametrize(
    ("outcome", "word"),
    [({"missed": 10}, "found no gap"), ({"deferred": 10}, "had moves that could not begin")],
    ids=["no gap", "deferred"],
)
def test_moves_that_did_not_come_about_are_tried_again_though_nobody_uses_the_pool(
    outcome: dict[str, int], word: str
) -> None:
    """A pass whose moves found no gap, or could not begin, ends in a rest, longer each time, and not for good."""
    pace = Pace(Rules())
    reading = seen(blocks=0.5, tick=7)
    begun = []
    now = 0.0
    while now < 400.0:
        order = pace.order(reading, now)
        if order is None:
            now += 0.5
            continue
        begun.append(now)
        pace.planned(order, 10, reading, now)
        pace.moved(order, 0, reading, now, **outcome)
        pace.planned(given(pace.order(reading, now)), 0, reading, now)
        assert pace.order(reading, now) is None
        assert word in pace.reason
    rests = [later - earlier for earlier, later in itertools.pairwise(begun)]
    assert rests == [11.0, 22.0, 44.0, 88.0, 176.0]
    # Once its moves find gaps and it brings nothing all the same, that was the last one.
    pace.planned(given(pace.order(reading, 1000.0)), 0, reading, 1000.0)
    assert pace.order(reading, 100_000.0) is None
    assert "at rest" in pace.reason


def test_a_pass_that_moves_much_and_brings_nothing_is_broken_off() -> None:
    """Each time that as much has been moved as is free, a hundredth of the loose memory must have become whole."""
    pace = Pace(Rules())
    moved = plans = 0
    reading = seen(blocks=0.5, tick=1)
    while (order := pace.order(reading, 0.0)) is not None:
        plans += 1
        pace.planned(order, 10, reading, 0.0)
        pace.moved(order, 500, reading, 0.0)
        moved += 500
    assert moved == 4000
    pace, moved = Pace(Rules()), 0
    blocks = 0.5
    while moved < 40_000:
        reading = seen(blocks=blocks, tick=1)
        order = given(pace.order(reading, 0.0))
        pace.moved(order, 500, reading, 0.0)
        moved += 500
        blocks += 0.002
    assert pace.rests == 0


def test_tickets_come_first_and_starve_nobody() -> None:
    """A run that is waited for has the next plans, and every few of them one is for the pool."""
    pace = Pace(Rules())
    reading = seen(blocks=0.3, run_wanted=8)
    kinds = [given(pace.order(reading, 0.0)).ticket for _ in range(2 * TICKETS_IN_A_ROW + 2)]
    assert kinds == [*[True] * TICKETS_IN_A_ROW, False] * 2
    settled = seen(run_wanted=8)
    assert all(given(pace.order(settled, 1.0)).ticket for _ in range(3 * TICKETS_IN_A_ROW))
    assert pace.order(seen(), 1.0) is None


def test_a_ticket_that_moves_cannot_help_is_asked_about_less_and_less() -> None:
    """A plan for a ticket that is empty is not asked for again at once."""
    pace = Pace(Rules())
    reading = seen(run_wanted=8)
    now = 0.0
    rests = []
    for _ in range(4):
        pace.planned(given(pace.order(reading, now)), 0, reading, now)
        assert pace.order(reading, now) is None
        rests.append(round(pace.wake(now), 6))
        now += pace.wake(now)
    assert rests == [0.05, 0.1, 0.2, 0.4]


def test_hot_prefixes_are_joined_when_all_else_is_well() -> None:
    """Joining comes last, and not all the time."""
    pace = Pace(Rules())
    assert given(pace.order(seen(blocks=0.3, scattered=2, tick=1), 0.0)).purpose is Purpose.FREE_BLOCKS
    order = given(pace.order(seen(scattered=2, tick=1), 0.0))
    assert order.purpose is Purpose.JOIN
    pace.moved(order, 100, seen(scattered=1, tick=1), 0.0)
    pace.planned(given(pace.order(seen(scattered=1, tick=1), 0.0)), 0, seen(scattered=1, tick=1), 0.0)
    assert pace.order(seen(scattered=1, tick=2), JOIN_SECONDS - 0.1) is None
    assert pace.order(seen(scattered=1, tick=2), JOIN_SECONDS) is not None


def test_once_goes_through_everything_and_ends() -> None:
    """Asked for once, each purpose is planned for until there is nothing more, even where it is switched off."""
    pace = Pace(Rules(mode="off"))
    reading = seen(blocks=0.9)
    assert pace.order(reading, 0.0) is None
    pace.begin_once()
    done = []
    while (order := pace.order(reading, 0.0)) is not None:
        assert pace.at_duty(reading, 0.0, 0.0)
        pace.planned(order, 2, reading, 0.0)
        pace.moved(order, 50, reading, 0.0)
        pace.planned(given(pace.order(reading, 0.0)), 0, reading, 0.0)
        done.append(order.purpose)
    assert done == [Purpose.FREE_BLOCKS, Purpose.RUN, Purpose.JOIN]
    assert not pace.once
    assert pace.reason == "switched off" or pace.order(reading, 0.0) is None


def test_outside_gaps_it_works_only_where_it_must() -> None:
    """Forced it always may; else only while somebody waits for memory and no gap came for half a second."""
    waits = seen(blocks=0.2, waiting=True)
    assert Pace(Rules(mode="forced")).at_duty(seen(), 0.0, 0.0)
    pace = Pace(Rules())
    assert not pace.at_duty(seen(blocks=0.2), 100.0, 0.0)
    assert not pace.at_duty(waits, 100.0, 99.8)
    assert pace.at_duty(waits, 100.0, 99.0)
    assert not Pace(Rules(mode="off")).at_duty(waits, 100.0, 0.0)


def test_the_duty_cycle_is_what_was_set() -> None:
    """After each copy comes a pause, so that copies take that share of the time."""
    assert pause(0.001, 0.5) == 0.001
    assert math.isclose(pause(0.001, 0.1), 0.009)
    assert pause(0.001, 1.0) == 0.0


def fed(following: Following, left: int, start: float, stop: float, *, built: bool = True) -> bool:
    """Looks in between, at each of which as much is left."""
    steps = math.ceil((stop - start) / 0.05)
    return all(
        following.fed(left, built, start + (stop - start) * each / steps) for each in range(1, steps + 1)
    )


def test_what_cannot_be_followed_is_let_be_for_longer_and_longer() -> None:
    """Changes that do not become less end it, for 1, 2, 4, ... seconds; a plan that was made begins that afresh."""
    following = Following()
    for away in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0):
        following.begin(100.0)
        assert following.fed(50, True, 100.0)
        assert fed(following, 70, 100.0, 100.5)
        assert not following.fed(60, True, 100.55)
        assert following.until == 100.55 + away
    following.planned()
    following.begin(0.0)
    assert following.fed(50, True, 0.0)
    assert not fed(following, 50, 0.0, 0.6)
    assert 1.5 < following.until <= 1.6


def test_what_becomes_less_is_followed_to_its_end() -> None:
    """A backlog may be as long as it likes while it shrinks, and what comes after none has its time anew."""
    following = Following()
    following.begin(0.0)
    for step in range(1000):
        assert following.fed(10_000 - step, False, 0.09 * step)
    assert following.fed(90_000, True, 90.0)  # all is known: what is left is counted otherwise
    for step in range(1000):
        assert following.fed(80_000 - step, True, 90.0 + 0.09 * step)
    assert fed(following, 0, 180.0, 182.0)
    assert fed(following, 5_000, 182.0, 182.4)
    assert following.fed(9_000, True, 200.0, again=True)  # what was planned has been moved meanwhile
    assert fed(following, 9_000, 200.0, 200.4)
    assert not fed(following, 9_000, 200.4, 200.6)
