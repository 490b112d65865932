"""The plain planners: the measures for the other."""

import random
from collections.abc import Callable

import pytest

from kvslot.allocator import Pool
from kvslot.defrag import Greedy, GreedyParts, Plans, Purpose, rest

from .pools import Maker, packing, sound, state


def test_it_empties_the_emptiest_block_into_a_hole_that_fits() -> None:
    """A node alone in its block goes, whole, to the shortest run that has room for it."""
    maker = Maker(40)
    alone = maker.at(64, 5)
    maker.at(160, 10)
    maker.at(176, 16)
    maker.at(320, 4)
    maker.at(331, 5)
    planner = Greedy(maker.pool)
    while planner.feed():
        pass
    before = state(maker.pool)
    plan = planner.plan(1000)
    assert state(maker.pool) == before
    assert (plan.moves[0].node, plan.moves[0].target) == (alone, [170, 5])
    assert plan.gain >= 16
    planner.close()


def test_parts_of_a_node_go_where_the_whole_node_would_not() -> None:
    """Of a node that stands in two blocks only what is in the emptier one goes, as far as there is room for that."""
    for kind, target in ((Greedy, []), (GreedyParts, [170, 5])):
        maker = Maker(40)
        long = maker.at(65, 20)
        maker.at(160, 10)
        maker.at(175, 17)
        planner: Plans = kind(maker.pool)
        while planner.feed():
            pass
        plan = planner.plan(1)
        assert [(move.node, move.at, move.source, move.target) for move in plan.moves] == (
            [(long, 15, [80, 5], target)] if target else []
        )
        planner.close()


@pytest.mark.parametrize("kind", [Greedy, GreedyParts])
def test_it_comes_to_rest_and_leaves_the_pool_sound(kind: Callable[[Pool], Plans]) -> None:
    """It ends, gains blocks, and plans for nothing but those."""
    maker = Maker(800).fill(lambda rng: rng.randint(1, 15), random.Random(1), 0.5)
    before = packing(maker.pool)
    planner = kind(maker.pool)
    assert rest(maker.pool, planner=planner).gain > 0
    assert packing(maker.pool) > before
    assert not rest(maker.pool, (Purpose.RUN, Purpose.JOIN), planner=planner).moves
    planner.close()
    sound(maker.pool)


@pytest.mark.parametrize("kind", [Greedy, GreedyParts])
def test_held_nodes_stay(kind: Callable[[Pool], Plans]) -> None:
    """What somebody holds is not moved, nor what shares a block with it."""
    maker = Maker(40)
    held = maker.at(64, 5)
    maker.at(71, 3)
    maker.at(160, 12)
    maker.pool.tree.hold(held)
    assert not any(move.source[0] < 80 for move in kind(maker.pool).plan(1000).moves)
