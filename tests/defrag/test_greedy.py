"""The plain planner: the measure for the other."""

import random

from kvslot.defrag import Greedy, Purpose, rest

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


def test_it_comes_to_rest_and_leaves_the_pool_sound() -> None:
    """It ends, gains blocks, and plans for nothing but those."""
    maker = Maker(800).fill(lambda rng: rng.randint(1, 15), random.Random(1), 0.5)
    before = packing(maker.pool)
    planner = Greedy(maker.pool)
    assert rest(maker.pool, planner=planner).gain > 0
    assert packing(maker.pool) > before
    assert not rest(maker.pool, (Purpose.RUN, Purpose.JOIN), planner=planner).moves
    planner.close()
    sound(maker.pool)


def test_held_nodes_stay() -> None:
    """What somebody holds is not moved, nor what shares a block with it."""
    maker = Maker(40)
    held = maker.at(64, 5)
    maker.at(71, 3)
    maker.at(160, 12)
    maker.pool.tree.hold(held)
    assert not any(move.source[0] < 80 for move in Greedy(maker.pool).plan(1000).moves)
