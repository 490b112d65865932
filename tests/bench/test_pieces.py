"""The benchmark's pieces compute what they say: traffic, clock, packing, footprint."""

import itertools

import pytest

from kvslot.allocator import audit
from kvslot.benchmarks import core, footprint
from kvslot.benchmarks.measure import quantiles
from kvslot.benchmarks.packing import pack
from kvslot.benchmarks.traffic import Chained, Filling, Ours, Shape, Short, branch, noise, text, turns

SMALL = Shape(
    system=32, turn_least=24, turn_most=40, chats_open=8, turns_least=2, turns_most=6, turns_long=12
)


def test_any_part_of_a_text_can_be_made_again() -> None:
    """Tokens depend on chat and position alone, and chats under one system prompt begin alike and part after it."""
    whole = text(SMALL, 3, 0, 200)
    assert text(SMALL, 3, 10, 90) == whole[40:360]
    assert text(SMALL, 3, 90, 200) == whole[360:]
    other = text(SMALL, 3 + 8, 0, 200)
    assert other[: 4 * 32] == whole[: 4 * 32]
    assert other[4 * 32 : 4 * 33] != whole[4 * 32 : 4 * 33]


def test_tokens_are_what_a_vocabulary_holds() -> None:
    """int32, not negative, below 2^17."""
    import numpy as np

    tokens = np.frombuffer(noise(7, 0, 10_000), dtype="<i4")
    assert tokens.min() >= 0
    assert tokens.max() < 1 << 17
    assert len(set(tokens.tolist())) > 9_000


def test_turns_of_a_chat_follow_each_other() -> None:
    """Each turn of a chat starts where the one before it stopped, and the last one is marked."""
    at: dict[int, int] = {}
    ended: set[int] = set()
    for turn in itertools.islice(turns(SMALL), 2_000):
        assert turn.chat not in ended
        assert turn.start == at.get(turn.chat, 0)
        assert SMALL.turn_least <= turn.stop - (turn.start or SMALL.system) <= SMALL.turn_most
        at[turn.chat] = turn.stop
        if turn.last:
            ended.add(turn.chat)
    assert len(at) - len(ended) <= SMALL.chats_open
    assert ended


def test_both_pools_are_filled_alike() -> None:
    """After the same turns both hold nearly the same prompts, both are full, and both are sound."""
    slots = 16 * 512
    ours, chained = Ours(slots), Chained(slots)
    fillings = [Filling(SMALL) for _ in range(2)]
    assert fillings[0].run(ours, 2 * slots) == fillings[1].run(chained, 2 * slots)
    chained.close()
    assert audit(ours.pool) == []
    chained.pool.audit([])
    assert fillings[0].ended == fillings[1].ended
    assert ours.evicted_tokens() > slots // 2
    assert chained.evicted_tokens() > slots // 2
    for chat in fillings[0].recent(100, 10, slots // 4):
        prompt = text(SMALL, chat, 0, 100)
        assert ours.pool.probe(ours.root, prompt) == 99
        assert chained.pool.probe(prompt) == 96


def test_measured_prompts_are_half_cached() -> None:
    """Second turns of short chats, and branches off older ones, find exactly their first half."""
    slots = 16 * 512
    ours = Ours(slots)
    filling = Filling(SMALL)
    filling.run(ours, 2 * slots)
    prompts = core.short_prompts((ours,), SMALL, 60, 5)
    for _ in range(20):
        prompt = next(prompts)
        assert len(prompt) == 4 * 120
        assert ours.pool.probe(ours.root, prompt) == 60
        ours.cache(prompt)
    chat = filling.recent(120, 1, slots // 4)[0]
    assert ours.pool.probe(ours.root, branch(SMALL, chat, 60, 1)) == 60
    assert branch(SMALL, chat, 60, 1) != branch(SMALL, chat, 60, 2)


def test_short_chats_come_back_after_the_delay() -> None:
    """The second turn of a chat comes once so many others have begun, and starts with its first."""
    short = Short(SMALL, 30, 2)
    firsts = []
    for index in range(6):
        firsts.append(short.first())
        second = short.second()
        assert (second is None) == (index < 2)
        if second is not None:
            assert second.startswith(firsts[index - 2])
            assert len(second) == 2 * len(firsts[index - 2])


def test_lives_are_timed_step_by_step() -> None:
    """One life gives one sample of each step and leaves nothing held."""
    side = Ours(16 * 64)
    times = core.Times.none()
    core.life_ours(side, noise(1, 0, 50), times)
    assert [len(samples) for samples in times] == [1, 1, 1]
    assert not side.pool.sequences
    assert side.pool.tree.tokens == 50
    chained = Chained(16 * 64)
    core.life_chained(chained, noise(1, 0, 50), times)
    assert [len(samples) for samples in times] == [2, 2, 2]
    assert chained.pool.probe(noise(1, 0, 60)) == 48


def test_quantiles_take_the_clock_off() -> None:
    """The clock's own cost is taken off every sample, and no time is below nothing."""
    found = quantiles([1_000 * n for n in range(1, 101)], 500)
    assert found.p50 == pytest.approx(50.5)
    assert found.p99 == pytest.approx(99.5)
    assert found.best == pytest.approx(0.5)
    assert found.samples == 100
    assert quantiles([100, 100, 100], 500).p50 == 0.0
    assert quantiles([64_500], 500, batch=64).p50 == pytest.approx(1.0)


@pytest.mark.parametrize(("block_size", "longest"), [(16, 15), (528, 500)])
def test_packing_counts_whole_pieces(block_size: int, longest: int) -> None:
    """No piece is split, and no block holds more than it has slots for."""
    packed = pack(block_size, longest, pieces=400, churn=3)
    assert packed.split == 0
    assert packed.paged < packed.churned <= 1.0
    assert packed.paged < packed.filled <= 1.0


def test_the_footprint_counts_what_the_core_allocated() -> None:
    """Bytes per node lie between what the columns alone need and what objects per node would."""
    found = footprint.measure(600, 0.5)
    assert 400 < found.nodes < 1200
    assert found.tokens > 100 * found.nodes
    assert 60 < found.per_node < 1000


@pytest.mark.slow
def test_a_whole_quick_run_has_a_row_for_its_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group but the replay runs on tiny pools and gives all the rows that have a budget."""
    tiny = core.Size(
        nodes=3_000, nodes_large=1_500, nodes_small=500, blocks_large=20_000, blocks_small=8_000,
        rounds_300=40, rounds_8k=4, rounds_32k=2, footprint=300, pieces=300,
    )  # fmt: skip
    monkeypatch.setattr(core, "QUICK", tiny)
    monkeypatch.setattr(core, "GROWTH_ROUNDS", 40)
    groups = [group for group in core.GROUPS if group != "replay"]
    document = core.run(groups, quick=True)
    got = {result.name for result in document.results}
    of_replay = ("fragmentation", "extents_growth", "reserved", "pseudo")
    assert {name for name in core.budgets() if not name.startswith(of_replay)} <= got
    assert all(result.value >= 0 for result in document.results)
