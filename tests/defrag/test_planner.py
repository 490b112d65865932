"""Plans: what they gain, what they cost, and what they leave alone."""

import random
from collections.abc import Callable

import pytest

from kvslot.allocator import EVICTIONS, Admitted, OutOfTurn, Pool, PoolConfig, Session, Space
from kvslot.defrag import Greedy, Plan, Planner, Purpose, rest
from kvslot.defrag.index import CROWDED, Index, check
from kvslot.defrag.planner import STEPS_SHIFT, WORK
from kvslot.defrag.windows import EXTENTS, Holes, extents_most

from .pools import Maker, bound, carry_out, in_runs, packing, sound, state

Lengths = Callable[[random.Random], int]


def short(rng: random.Random) -> int:
    return rng.randint(1, 15)


def long(rng: random.Random) -> int:
    return rng.randint(64, 512)


def mixed(rng: random.Random) -> int:
    return min(4000, max(1, int(rng.lognormvariate(4.5, 1.3))))


def planner_of(pool: Pool) -> Planner:
    planner = Planner(pool)
    while planner.feed(1 << 16):
        pass
    return planner


def ask(
    planner: Planner, purpose: Purpose, budget: int = 1 << 16, now: float = 0.0, blocks: int = 32
) -> Plan:
    """The next plan with moves, or the one that says there is none."""
    for _ in range(10_000):
        while planner.feed(1 << 16, now):
            pass
        plan = planner.plan(budget, purpose, now, blocks=blocks)
        if plan.moves or plan.settled:
            return plan
    raise AssertionError("a planner without an end")


def places(pool: Pool) -> dict[int, list[int]]:
    return {node: pool.tree.extents(node) for node in pool.tree.live() if pool.tree.length[node]}


# -- what is reached -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_size", "longest"), [(16, 15), (528, 500)])
def test_what_a_load_drop_leaves_behind_is_packed(block_size: int, longest: int) -> None:
    """Half of the pieces are freed at random; at rest the blocks in use are 95 % full."""
    rng = random.Random(1)
    pieces = 2000
    maker = Maker(pieces * (longest + 1) // 2 // block_size, block_size)
    maker.fill(lambda r: r.randint(1, longest), rng, 0.5)
    assert packing(maker.pool) < 0.75
    done = rest(maker.pool)
    assert packing(maker.pool) >= 0.95
    assert done.refused <= done.moves // 100
    sound(maker.pool)


def test_large_blocks_are_filled_up_with_parts_of_a_few_tokens() -> None:
    """Pieces in large blocks may be cut to fill short holes up too, and leave blocks that are 96 % full."""
    maker = Maker(4000 * 501 // 2 // 528, 528).fill(lambda r: r.randint(1, 500), random.Random(1), 0.5)
    rest(maker.pool)
    assert packing(maker.pool) >= 0.96
    sound(maker.pool)


@pytest.mark.parametrize("lengths", [short, long, mixed])
@pytest.mark.parametrize("leased", [0.0, 0.2])
def test_free_memory_becomes_runs(lengths: Lengths, leased: float) -> None:
    """At 60 % occupancy nearly all free memory is in runs of 32 blocks at rest, or what held nodes leave of that."""
    rng = random.Random(2)
    maker = Maker(2500 if lengths is short else 6000).fill(lengths, rng, 0.6)
    pool = maker.pool
    held = rng.sample(maker.nodes, int(leased * len(maker.nodes)))
    for node in held:
        pool.tree.hold(node)
    before = {node: pool.tree.extents(node) for node in held}
    rest(pool, (Purpose.RUN,))
    assert {node: pool.tree.extents(node) for node in held} == before
    assert in_runs(pool) >= 0.95 * bound(pool)
    if not leased:
        assert in_runs(pool) >= 0.95  # one window more or less is a hundredth in so small a pool
        sound(pool)


@pytest.mark.parametrize(
    ("blocks", "block_size", "lengths"), [(480, 528, mixed), (600, 64, mixed), (1000, 528, long)]
)
def test_small_pools_become_runs_too(blocks: int, block_size: int, lengths: Lengths) -> None:
    """Of the runs that there can be in a pool of few windows all but one are made, for one whole block at the most."""
    maker = Maker(blocks, block_size).fill(lengths, random.Random(15), 0.6)
    pool = maker.pool
    planner = Planner(pool)
    rest(pool, (Purpose.FREE_BLOCKS,), planner=planner)
    before = pool.runs.blocks_free
    assert in_runs(pool) < 0.3
    done = rest(pool, (Purpose.RUN,), planner=planner)
    planner.close()
    assert done.refused <= done.moves // 100
    window = 32 * block_size
    assert round(in_runs(pool) * pool.runs.total / window) >= pool.runs.total // window - 1
    assert pool.runs.blocks_free >= before - 1
    sound(pool)


def test_holes_that_were_given_back_are_whole_again() -> None:
    """What is taken off either end of a hole and given back can be taken as one."""
    for front in (True, False):
        holes = Holes()
        holes.add(100, 50, front)
        hole = holes.best(50)
        assert hole == (100, 50, front)
        left = (120, 30, front) if front else (100, 30, front)
        holes.add(*left)
        holes.give_back(*((100, 20, front) if front else (130, 20, front)))
        assert holes.best(1) == (100, 50, front)
        assert holes.best(1) is None
        assert holes.longest(1000) is None


@pytest.mark.parametrize(
    ("lengths", "block_size"), [(short, 16), (mixed, 16), (mixed, 64), (short, 528), (long, 528)]
)
def test_a_block_costs_less_than_with_the_plain_planner(lengths: Lengths, block_size: int) -> None:
    """Tokens moved for each slot of the blocks given back: no more than emptiest first with whole nodes."""
    cost: dict[str, float] = {}
    given: dict[str, int] = {}
    for kind in (Planner, Greedy):
        maker = Maker(30_000 // block_size, block_size).fill(lengths, random.Random(3), 0.55)
        pool = maker.pool
        before = pool.runs.blocks_free
        planner = kind(pool)
        done = rest(pool, planner=planner)
        planner.close()
        given[kind.__name__] = (pool.runs.blocks_free - before) * block_size
        cost[kind.__name__] = done.moved_tokens / max(1, given[kind.__name__])
        sound(pool)
    assert given["Planner"] >= given["Greedy"]
    assert cost["Planner"] <= cost["Greedy"] or not given["Greedy"]


@pytest.mark.parametrize("blocks", [5, 40, 100, 300])
@pytest.mark.parametrize("lengths", [short, mixed])
def test_a_run_is_cleared_for_one_who_waits(blocks: int, lengths: Lengths) -> None:
    """Where there is no run of as many blocks as were asked for, the cheapest stretch is cleared and nothing else."""
    maker = Maker(1500).fill(lengths, random.Random(4), 0.5)
    pool = maker.pool
    wanted = blocks * 16
    planner = planner_of(pool)
    moved = 0
    while pool.runs.longest() < wanted:
        plan = ask(planner, Purpose.RUN, blocks=blocks)
        assert plan.moves
        assert carry_out(pool, plan) == 0
        moved += plan.cost
    assert moved <= wanted
    planner.close()
    sound(pool)


@pytest.mark.parametrize("blocks", [2, 8, 100])
def test_runs_may_be_of_another_length(blocks: int) -> None:
    """Free memory becomes runs of any length that was asked for, once there is one."""
    maker = Maker(3000).fill(mixed, random.Random(4), 0.5)
    planner = Planner(maker.pool)
    for _ in range(2):
        rest(maker.pool, (Purpose.RUN,), blocks=blocks, planner=planner)
    assert in_runs(maker.pool, blocks) >= 0.93
    planner.close()
    sound(maker.pool)


def test_no_run_is_begun_that_there_is_no_room_for() -> None:
    """A stretch longer than all that is free, or than the pool, is not cleared in part."""
    maker = Maker(400).fill(short, random.Random(5), 0.9)
    for blocks in (100, 399, 4000):
        assert not rest(maker.pool, (Purpose.RUN,), blocks=blocks).moves


def test_a_hot_node_is_gathered() -> None:
    """A node in many extents that was used lately goes to one run, once."""
    maker = Maker(100, 64)
    pool = maker.pool
    node = maker.at(*(n for i in range(12) for n in (64 + 5 * i, 3)))
    for i in range(11):
        maker.at(67 + 5 * i, 2)
    for i in range(12):
        maker.at(144 + 45 * i, 5)
    assert len(pool.tree.extents(node)) == 24
    planner = planner_of(pool)
    plan = ask(planner, Purpose.JOIN)
    assert [(move.node, move.length) for move in plan.moves] == [(node, 36)]
    assert (plan.gain, plan.cost) == (11, 36)
    assert carry_out(pool, plan) == 0
    assert len(pool.tree.extents(node)) == 2
    assert not ask(planner, Purpose.JOIN).moves
    sound(pool)


def test_a_cold_node_is_not_gathered() -> None:
    """What has not been used for long is left where it is."""
    maker = Maker(100)
    maker.at(*(n for i in range(12) for n in (64 + 5 * i, 3)))
    maker.pool.tick += 1_000_000
    assert not rest(maker.pool, (Purpose.JOIN,)).moves


def scattered(maker: Maker, first: int, count: int, each: int) -> int:
    """A node in `count` extents of `each` tokens from slot `first` on, with something of others between them."""
    node = maker.at(*(n for i in range(count) for n in (first + (each + 2) * i, each)))
    for i in range(count - 1):
        maker.at(first + each + (each + 2) * i, 2)
    return node


def test_a_join_breaks_no_free_block_that_it_does_not_give_back() -> None:
    """Nodes stay in many extents where the only runs for them are of wholly free blocks; what gives back as many as it
    takes up is gathered there."""
    maker = Maker(60)
    pool = maker.pool
    scattered(maker, 64, 20, 3)
    for i in range(10):
        maker.at(320 + 64 * i, 16)  # runs of three blocks between
    assert not rest(pool, (Purpose.JOIN,)).moves
    alone = maker.at(*(n for i in range(15) for n in (192 + 2 * i, 1)))
    before = pool.runs.blocks_free
    assert rest(pool, (Purpose.JOIN,)).moves == 1
    assert len(pool.tree.extents(alone)) == 2
    assert pool.runs.blocks_free >= before
    sound(pool)


def test_a_join_costs_no_more_than_it_is_worth() -> None:
    """A node in extents that are long is not moved to make few of them, however many there are."""
    for each in (8, 30):
        maker = Maker(10, 4096)
        node = scattered(maker, 4096, 30, each)
        assert rest(maker.pool, (Purpose.JOIN,)).moves == (each == 8)
        assert (len(maker.pool.tree.extents(node)) == 2) == (each == 8)


@pytest.mark.parametrize("state", ["full", "full, read again", "full, read again, but old", "loose"])
def test_where_eviction_goes_on_only_what_is_read_again_is_gathered(state: str) -> None:
    """In a full pool a node is gathered once it has been read again and is not about to go; in a loose one at once."""
    maker = Maker(12, 256)
    pool = maker.pool
    node = scattered(maker, 256, 20, 3)
    maker.at(512, 140)
    maker.at(728, 40)
    while state != "loose" and pool.runs.total > 150:
        maker.add(min(100, pool.runs.longest(), pool.runs.total - 100))
    pool.tick = maker.nodes[-1] + 100
    planner = planner_of(pool)
    moves = ask(planner, Purpose.JOIN).moves
    assert bool(moves) == (state == "loose")
    if state == "loose":
        return
    if "again" in state:
        tree = pool.tree
        tree.hold(node)
        tree.unhold(node, 1 + tree.tick[node] if "old" in state else pool.tick)
    assert [move.node for move in ask(planner, Purpose.JOIN).moves] == [node] * (state == "full, read again")


def test_pools_of_whole_blocks_gain_runs() -> None:
    """Where blocks are exclusive only whole ones move: no block can be won, runs can."""
    rng = random.Random(6)
    maker = Maker(2000, opaque=True).fill(lambda r: 16 * r.randint(1, 20), rng, 0.6)
    pool = maker.pool
    assert not rest(pool, (Purpose.FREE_BLOCKS,)).moves
    rest(pool, (Purpose.RUN,))
    assert in_runs(pool) >= 0.95
    assert all(
        slot % 16 == 0 and n % 16 == 0
        for e in places(pool).values()
        for slot, n in zip(e[::2], e[1::2], strict=True)
    )
    sound(pool)


# -- what is left alone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("purpose", list(Purpose))
def test_a_plan_changes_nothing(purpose: Purpose) -> None:
    """Before a move is begun the pool is what it was."""
    maker = Maker(800).fill(mixed, random.Random(7), 0.5)
    pool = maker.pool
    planner = planner_of(pool)
    before = state(pool)
    for now in range(20):
        planner.plan(5000, purpose, float(now))
        planner.feed(100)
    assert state(pool) == before


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("purpose", [Purpose.FREE_BLOCKS, Purpose.RUN])
def test_moves_of_a_plan_may_end_in_any_order(purpose: Purpose, seed: int) -> None:
    """All of a plan can begin before any has ended, none is refused, and the plan gains what it said."""
    rng = random.Random(seed)
    maker = Maker(1500).fill(rng.choice((short, mixed)), rng, 0.5)
    pool = maker.pool
    planner = planner_of(pool)
    refused = moves = 0
    for _ in range(40):
        plan = ask(planner, purpose, rng.choice((50, 1000, 20_000)))
        blocks = pool.runs.blocks_free
        refused += carry_out(pool, plan, rng)
        moves += len(plan.moves)
        assert sum(move.length for move in plan.moves) == plan.cost
        assert all(sum(move.target[1::2]) == sum(move.source[1::2]) == move.length for move in plan.moves)
        if purpose is Purpose.FREE_BLOCKS and not refused:
            assert (pool.runs.blocks_free - blocks) * 16 >= plan.gain
        if not plan.moves:
            break
    assert moves
    assert refused <= moves // 50
    sound(pool)
    while planner.feed(1 << 16):
        pass
    assert check(planner.index) == []


@pytest.mark.parametrize("purpose", [Purpose.FREE_BLOCKS, Purpose.RUN])
def test_what_cannot_go_stays_and_so_does_what_stands_beside_it(purpose: Purpose) -> None:
    """A block with a held node or a running sequence in it is not emptied of the rest."""
    maker = Maker(100)
    pool = maker.pool
    held = maker.at(34, 2)
    maker.at(40, 2)
    pool.tree.hold(held)
    session = pool.open_session()
    answer = pool.allocate(session, maker.root, bytes(range(40)), contiguous=True)
    assert isinstance(answer, Admitted)
    full = [maker.at(160 + 32 * i, 12) for i in range(5)]
    assert full
    before = places(pool)
    rest(pool, (purpose,))
    assert places(pool)[held] == before[held]
    if purpose is Purpose.FREE_BLOCKS:
        assert before == places(pool)


def test_the_cheapest_block_is_taken_first_not_the_emptiest() -> None:
    """A block with one token in it, of an extent that must go as a whole, comes after those of four tokens."""
    maker = Maker(60)
    maker.at(64, 5)
    dear = maker.at(69, 12, 240, 1, 242, 1)  # 11 of them stand in the block before
    maker.at(241, 1)
    for first, n in ((243, 13), (160, 4), (320, 4), (336, 12), (352, 12), (368, 13)):
        maker.at(first, n)
    planner = planner_of(maker.pool)
    plan = ask(planner, Purpose.FREE_BLOCKS, 1)
    assert (plan.cost, plan.gain) == (4, 16)
    assert all(move.node != dear for move in plan.moves)
    assert carry_out(maker.pool, plan) == 0
    sound(maker.pool)


def test_a_settled_pool_gets_an_empty_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """At rest nothing is planned any more, nor looked at: not one block is asked who lives in it."""
    maker = Maker(1000).fill(short, random.Random(8), 0.5)
    pool = maker.pool
    planner = Planner(pool)
    purposes = (Purpose.FREE_BLOCKS, Purpose.RUN, Purpose.JOIN)
    rounds = 0
    while rest(pool, purposes, planner=planner).moves:
        rounds += 1
        assert rounds < 20
    looked: list[int] = []
    spans = Index.spans

    def spy(index: Index, block: int) -> list[tuple[int, int, int]]:
        looked.append(block)
        return spans(index, block)

    monkeypatch.setattr(Index, "spans", spy)
    for purpose in purposes:
        plan = planner.plan(1000, purpose, 0.0)
        assert plan.settled
        assert not plan.moves
    assert not looked


@pytest.mark.parametrize(
    ("blocks", "block_size", "lengths"),
    [(1500, 16, short), (80, 528, short), (60, 8192, mixed), (8, 4096, short)],
)
def test_a_plan_looks_at_few_extents_however_many_there_are(
    blocks: int, block_size: int, lengths: Lengths
) -> None:
    """What a plan or a feed looks at is bounded, whatever the size of the blocks and whatever is in them."""
    maker = Maker(blocks, block_size).fill(lengths, random.Random(16), 0.6)
    planner = Planner(maker.pool)
    index = planner.index

    def feed(now: float) -> None:
        more = True
        while more:
            before = index.steps
            more = planner.feed(64, now)
            assert index.steps - before <= 64 * 16 + CROWDED + 1

    feed(0.0)
    for purpose in Purpose:
        for nth in range(40):
            before = index.steps
            plan = planner.plan(2048, purpose, 0.1 * nth)
            assert index.steps - before <= (WORK << STEPS_SHIFT) + 4 * CROWDED
            assert len(plan.moves) <= WORK
            assert carry_out(maker.pool, plan) == 0
            feed(0.1 * nth)
    assert check(index) == []
    planner.close()


@pytest.mark.parametrize("held", [False, True])
def test_a_window_in_very_many_extents_is_looked_through_before_it_is_cleared(held: bool) -> None:
    """Where not all of a window can be looked at together nothing of it is moved before all has been, and then all is;
    what stands far behind in it and may not go keeps the rest where it is."""
    maker = Maker(36, 528)
    nodes = [maker.at(528 * block + 3 * i, 1) for block in range(1, 33) for i in range(20)]
    for block in range(33, 36):
        maker.at(528 * block, 200)
    pool = maker.pool
    assert len(nodes) > 2 * EXTENTS
    if held:
        pool.tree.hold(nodes[-1])
    done = rest(pool, (Purpose.RUN,))
    assert done.moves == (0 if held else len(nodes))
    assert (in_runs(pool) > 0.9) != held
    if not held:
        sound(pool)


def test_blocks_in_very_many_extents_are_left_as_they_are() -> None:
    """A crowded block is neither emptied nor filled up; one that is no more is."""
    maker = Maker(12, 1024)
    pool = maker.pool
    crowd = [maker.at(1024 + 3 * i, 1) for i in range(CROWDED + 1)]
    maker.at(3 * 1024, 900)
    lonely = maker.at(5 * 1024, 20)
    planner = planner_of(pool)
    assert planner.index.crowded == {1}
    moves = ask(planner, Purpose.FREE_BLOCKS).moves
    assert [move.node for move in moves] == [lonely]
    assert all(slot // 1024 == 3 for move in moves for slot in move.target[::2])
    maker.remove(crowd[0])
    planner.feed()
    assert not planner.index.crowded
    planner.close()


@pytest.mark.parametrize(
    ("length", "size", "most"), [(64, 16, 9), (64, 64, 3), (640, 528, 12), (640, 8192, 12)]
)
def test_extents_that_a_node_may_come_to_lie_in(length: int, size: int, most: int) -> None:
    """About twice as many as it fills blocks, or one for each 64 tokens, and two."""
    assert extents_most(length, size) == most


def test_S47_nothing_is_moved_back_and_forth() -> None:
    """S47: passes of all purposes, one after the other for an hour, end; later rounds of them move next to nothing."""
    maker = Maker(1500).fill(mixed, random.Random(9), 0.6)
    pool = maker.pool
    planner = Planner(pool)
    purposes = (Purpose.FREE_BLOCKS, Purpose.RUN, Purpose.JOIN)
    moved = [rest(pool, purposes, planner=planner, now=60.0 * minute).moved_tokens for minute in range(60)]
    assert moved[0] > 0
    assert sum(moved[10:]) <= moved[0] // 10
    assert moved[-1] == 0
    planner.close()
    sound(pool)


def test_S47_churn_does_not_make_a_compactor_run_for_ever() -> None:
    """S47: in a steady state what is moved in an hour does not grow, and no node is moved more than a few times."""
    rng = random.Random(10)
    maker = Maker(1000).fill(mixed, rng, 0.7)
    pool = maker.pool
    planner = Planner(pool)
    hours: list[int] = []
    for hour in range(6):
        hours.append(0)
        times: dict[int, int] = {}
        for minute in range(30):
            for node in rng.sample(maker.nodes, max(1, len(maker.nodes) // 30)):
                times.pop(node, None)
                maker.remove(node)
            while pool.usable - pool.runs.total < 0.7 * pool.usable:
                maker.add(mixed(rng))
            before = places(pool)
            now = 3600.0 * hour + 120 * minute
            hours[-1] += rest(pool, (Purpose.FREE_BLOCKS, Purpose.RUN), planner=planner, now=now).moved_tokens
            for node, extents in places(pool).items():
                if extents != before[node]:
                    times[node] = times.get(node, 0) + 1
        assert max(times.values()) <= 20
    assert hours[-1] <= 1.5 * hours[0]
    planner.close()
    sound(pool)


def test_S55_a_planner_that_was_closed_leaves_nothing() -> None:
    """S55: off and on at any point; the next planner begins afresh and finds what is to be done."""
    rng = random.Random(11)
    maker = Maker(600).fill(short, rng, 0.5)
    pool = maker.pool
    for _ in range(100):
        planner = Planner(pool)
        for _ in range(rng.randint(0, 40)):
            planner.feed(rng.randint(1, 50))
        for purpose in rng.sample(list(Purpose), 2):
            carry_out(pool, planner.plan(200, purpose, 0.0))
        planner.close()
        assert pool.tree.log is None
    rest(pool)
    assert packing(pool) >= 0.93
    sound(pool)


def test_refused_moves_are_planned_anew_later() -> None:
    """A plan that nobody carries out is forgotten after a while, and its blocks are planned for again."""
    maker = Maker(300).fill(short, random.Random(12), 0.5)
    pool = maker.pool
    planner = planner_of(pool)
    while ask(planner, Purpose.FREE_BLOCKS).moves:
        pass  # nothing is carried out
    assert ask(planner, Purpose.FREE_BLOCKS, now=3600.0).moves
    done = rest(pool, planner=planner, now=7200.0)
    assert done.moves
    assert packing(pool) >= 0.93


# -- who reads it ----------------------------------------------------------------------------------------------


def cached(pool: Pool, session: Session, length: int, kind: int) -> None:
    """A prompt of its own that was computed, published and freed."""
    tokens = kind.to_bytes(4, "little") * length
    answer = pool.allocate(session, pool.open_space(Space("a")), tokens)
    assert isinstance(answer, Admitted)
    pool.commit(session, answer.sequence, length)
    pool.free(session, answer.sequence)


def test_what_followers_read_is_moved_and_what_others_read_is_not() -> None:
    """Leased nodes are planned for where all who read them are told of new slots, and left alone where one is not."""
    for movable in (True, False):
        maker = Maker(60, watermark=0.0)
        pool = maker.pool
        alone = maker.at(75, 5)  # what is appended stands in the next block
        maker.at(320, 9)
        session = pool.open_session(movable=movable)
        pool.progress(session, 1, 1, now=0.0)
        prompt = pool.tree.keys[alone] + bytes(4)
        answer = pool.allocate(session, maker.root, prompt)
        assert isinstance(answer, Admitted)
        moves = ask(planner_of(pool), Purpose.FREE_BLOCKS).moves
        assert [move.node for move in moves if move.node == alone] == ([alone] if movable else [])


def test_pages_keep_their_place_in_a_page() -> None:
    """Where somebody reads by pages, what begins at its place in a page does so after every move."""
    rng = random.Random(13)
    maker = Maker(1500, 32).fill(lambda r: r.randint(1, 60), rng, 0.5)
    pool = maker.pool
    session = pool.open_session(page=8)
    for kind in range(40):
        cached(pool, session, rng.randint(1, 100), 1_000_000 + kind)

    def in_phase() -> set[tuple[int, int]]:
        found: set[tuple[int, int]] = set()
        for node, extents in places(pool).items():
            position = pool.tree.depth[node]
            for slot, n in zip(extents[::2], extents[1::2], strict=True):
                found |= {(node, position + i) for i in range(n) if (position - slot) % 8 == 0}
                position += n
        return found

    before = in_phase()
    assert rest(pool, (Purpose.FREE_BLOCKS, Purpose.RUN)).moves
    assert before <= in_phase()
    sound(pool)


def test_what_is_evicted_next_is_not_moved_first() -> None:
    """In a pool that is nearly full the next victims stay where they are."""
    maker = Maker(80)
    pool = maker.pool
    victims = [maker.at(64 + 32 * i, 4) for i in range(20)]
    while pool.runs.total > 60:
        maker.add(min(16, pool.runs.longest()))
    rest(pool)
    assert all(pool.tree.extents(node) == [64 + 32 * i, 4] for i, node in enumerate(victims))
    sound(pool)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_a_plan_on_old_news_leaves_out_what_has_gone(purpose: Purpose) -> None:
    """A node that was evicted since the index was fed is not planned for, though it stands in the emptiest block."""
    maker = Maker(60)
    gone = maker.at(64, 3, 70, 3, 76, 3)
    for i in range(3):
        maker.at(160 + 16 * i, 10)
    planner = planner_of(maker.pool)
    maker.remove(gone)
    assert all(move.node != gone for move in planner.plan(1000, purpose).moves)
    planner.close()
    sound(maker.pool)


@pytest.mark.parametrize("seed", range(8))
def test_plans_in_the_midst_of_any_life(seed: int) -> None:
    """Random requests, leases, steps, evictions and plans, fed or not, whose moves end late, out of order or badly."""
    moves, refused = live(random.Random(seed), 250)
    assert refused <= 2 + moves // 20


def live(rng: random.Random, steps: int) -> tuple[int, int]:
    """One life of a pool with a planner that comes and goes; how many moves were begun, and how many could not be."""
    size = rng.choice((1, 4, 16, 64))
    pool = Pool(
        PoolConfig(
            blocks=max(6, 3000 // size),
            block_size=size,
            opaque=size > 1 and rng.random() < 0.15,
            watermark=0.0,
            eviction=rng.choice(EVICTIONS),
            ahead=rng.random() < 0.3,
        )
    )
    pages = [page for page in (1, 1, 2, 4) if size % page == 0]
    sessions = [pool.open_session(movable=rng.random() < 0.6, page=rng.choice(pages)) for _ in range(3)]
    root = pool.open_space(Space("b"))
    prompts = [bytes(rng.randrange(3) for _ in range(4 * 300)) for _ in range(8)]
    planner: Planner | None = None
    running: list[tuple[Session, int, int]] = []
    flight: list[int] = []
    begun = refused = 0
    now = 0.0
    for step in range(steps):
        now += rng.choice((0.001, 0.1, 3.0))
        act = rng.random()
        session = rng.choice(sessions)
        if act < 0.4:
            length = rng.randint(2, 300)
            answer = pool.allocate(session, root, rng.choice(prompts)[: 4 * length], now=now)
            if isinstance(answer, Admitted):
                running.append((session, answer.sequence, length))
        elif act < 0.6 and running:
            session, sequence, length = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.8:
                pool.commit(session, sequence, length)
            pool.free(session, sequence)
        elif act < 0.64:
            pool.evict(rng.randint(1, 400))
        elif act < 0.7:
            pool.progress(session, session.submitted + 1, session.submitted, epoch=session.epoch, now=now)
        elif act < 0.72 and planner is not None:
            for handle in flight:
                pool.finish_move(handle, rng.random() < 0.9)
            flight.clear()
            planner.close()
            planner = None
        else:
            planner = planner or Planner(pool)
            fully = rng.random() < 0.7
            while planner.feed(rng.randint(1, 200), now) and fully:
                pass
            before = state(pool)
            plan = planner.plan(
                rng.choice((10, 100, 5000)),
                rng.choice(list(Purpose)),
                now,
                blocks=rng.choice((32, 32, 1, 3, 20)),
            )
            assert state(pool) == before
            for move in plan.moves:
                try:
                    flight.append(pool.begin_move(move.node, move.at, move.length, move.target).handle)
                    begun += 1
                except OutOfTurn:
                    refused += fully
            rng.shuffle(flight)
            for _ in range(rng.randint(0, len(flight))):
                pool.finish_move(flight.pop(), rng.random() < 0.95)
        if len(running) > 6:
            session, sequence, _ = running.pop(0)
            pool.free(session, sequence)
        pool.poll(now)
        if rng.random() < 0.3:
            pool.tidy()
        if step % 50 == 0:
            sound(pool)
            if planner is not None:
                while planner.feed(1000, now):
                    pass
                assert check(planner.index) == []
    return begun, refused
