"""Moves in a replay: what they leave of the pool, what they are paid with, and how the means are told apart."""

import random
import re
from pathlib import Path

import msgspec
import pytest

from kvslot.allocator import audit
from kvslot.cli import ctl
from kvslot.replay import Case, Outcome, ReplayConfig, Trace, find, load, means, replay, run_cases
from kvslot.replay.compaction import Compactor
from kvslot.replay.policies import Admitted, PolicyConfig
from kvslot.replay.policies.slotted import SlottedPolicy, usable_run
from kvslot.replay.report import render

from .tiny import Line, trace

BLOCK = 16


def config(**changes: object) -> ReplayConfig:
    return msgspec.structs.replace(
        ReplayConfig(policy="slotted", pool_tokens=40_000, block_size=BLOCK), **changes
    )


def sgd(requests: int = 400) -> Trace:
    return load(find("sgd_a")).head(requests)


def policy_of(outcome: Outcome) -> SlottedPolicy:
    policy = outcome.policies[0]
    assert isinstance(policy, SlottedPolicy)
    return policy


def scattered(**changes: object) -> SlottedPolicy:
    """A pool in which short prompts lie in blocks of their own, every other one evicted again."""
    settings = msgspec.structs.replace(PolicyConfig(pool_tokens=200 * BLOCK, block_size=BLOCK), **changes)
    policy = SlottedPolicy(settings)
    rng = random.Random(3)
    for request in range(120):
        tokens = request.to_bytes(4, "little") * rng.randint(2, 8)
        assert isinstance(policy.admit(request, tokens, 0, 0.0), Admitted)
    for request in range(120):
        if request % 2:
            policy.prefilled(request, 0.0)
        policy.abort(request, 0.0)
    return policy


def test_off_moves_nothing_and_changes_nothing() -> None:
    """Without compaction no planner listens to the pool, and rows say so."""
    outcome = replay(sgd(), config())
    assert policy_of(outcome).compactor is None
    assert policy_of(outcome).pool.tree.log is None
    row = outcome.rows[0]
    assert (row.compaction, row.moves, row.moved_tokens, row.blocks_given_back) == ("off", 0, 0, 0)
    assert row.moved_per_given_back is None


def test_rest_gives_blocks_back_and_is_rest() -> None:
    """Compaction to rest frees blocks, as many as it counts; a second time it does nothing; the books are right."""
    policy = scattered(compaction="forced")
    before = policy.gauges()
    free = policy.pool.runs.blocks_free
    policy.rest(1.0)
    after, counted = policy.gauges(), policy.counters()
    assert after.tokens_held == before.tokens_held
    assert policy.pool.runs.blocks_free - free == counted.given_back > 10
    assert counted.moves > 0
    policy.rest(2.0)
    assert policy.counters().moved_tokens == counted.moved_tokens
    audit(policy.pool)


def test_a_gap_pays_for_what_is_copied_in_it() -> None:
    """Moves are published once their tokens are paid for: never more than all gaps so far were worth, and in the end as
    many as compaction to rest would have found worthwhile."""
    policy = scattered(compaction="idle")
    spent = 0.0
    for step in range(4_000):
        spent += 3.5
        policy.gap(3.5, 0.01 * step)
        assert policy.counters().moved_tokens <= spent
    free = policy.pool.runs
    assert policy.counters().moved_tokens > 0
    assert free.total - free.blocks_free * BLOCK <= 0.3 * free.total
    audit(policy.pool)


def test_what_is_evicted_on_the_move_is_abandoned() -> None:
    """Pieces whose copies are under way can be evicted; then the idle time is lost, and nothing else."""
    policy = scattered(compaction="idle")
    policy.gap(0.5, 0.0)
    assert policy.gauges().moving > 0
    policy.shrink(0.0, 1.0)
    policy.gap(10_000.0, 1.0)
    counted = policy.counters()
    assert counted.moves_abandoned > 0
    assert policy.gauges().moving == 0
    assert policy.gauges().free == policy.pool.usable
    audit(policy.pool)


@pytest.mark.parametrize("planner", ["planned", "greedy"])
def test_both_planners_come_to_rest(planner: str) -> None:
    """The baseline, too, ends: with a plan that gave nothing back."""
    policy = scattered(compaction="forced", planner=planner, purposes=("free_blocks",))
    policy.rest(0.0)
    assert policy.counters().given_back > 0
    audit(policy.pool)


def test_wrong_words_are_refused() -> None:
    """A planner or a purpose that does not exist is named."""
    pool = scattered().pool
    with pytest.raises(ValueError, match="planner is 'best'"):
        Compactor(pool, "best")
    with pytest.raises(ValueError, match="purpose is 'order'"):
        Compactor(pool, purposes=("order",))


@pytest.mark.parametrize("mode", ["idle", "forced"])
def test_a_run_with_moves_repeats_itself(mode: str) -> None:
    """Same trace, settings and seed: the same moves."""
    runs = [replay(sgd(250), config(compaction=mode, pool_tokens=8_000, block_size=64)) for _ in range(2)]
    rows = [msgspec.structs.asdict(outcome.rows[0]) for outcome in runs]
    for row in rows:
        for measured in ("alloc_us", "cpu_us_per_request", "grow_us_per_request"):
            del row[measured]
    assert rows[0] == rows[1]
    audit(policy_of(runs[0]).pool)


def test_nothing_moves_while_a_prompt_is_computed(tmp_path: Path) -> None:
    """A device that computes prompts all the time has no gap; one that rests for a minute has."""
    lines: list[Line] = [(0.0, i, 0, -1, 0, 40, 1) for i in range(40)]
    busy = trace(tmp_path / "busy.kvs.gz", lines)
    late = trace(tmp_path / "late.kvs.gz", [*lines, (60.0, 99, 0, -1, 0, 40, 1)])
    seen: dict[str, list[float]] = {}

    class Watched(SlottedPolicy):
        def gap(self, tokens: float, now: float) -> None:
            seen[where].append(tokens)
            super().gap(tokens, now)

    from kvslot.replay import policies

    policies.register("watched", Watched)
    try:
        for where, made in (("busy", busy), ("late", late)):
            seen[where] = []
            settings = config(
                policy="watched", compaction="idle", step_gap_us=0.0, pool_tokens=2_000, live=1,
                copy_tokens_s=1_000.0, prefill_us=1_000.0, decode_ms=1.0,
            )  # fmt: skip
            replay(made, settings)
    finally:
        policies.unregister("watched")
    assert seen["busy"] == []
    assert sum(seen["late"]) == pytest.approx(1_000 * (60 - 40 * 0.041), rel=0.01)


def test_means_are_three_runs_of_one_case() -> None:
    """Placement alone, eviction on top, moves on top of that; the rows tell which, and one run has a picture."""
    cases = means(Case(sgd(300), config(block_size=64, pool_tokens=9_000)), "forced")
    result = run_cases(cases, seed=0, settings={}, with_optimum=False)
    rows = [row for row in result.rows if row.phase == "all"]
    assert [row.means for row in rows] == ["placement", "eviction", "moves"]
    assert [row.compaction for row in rows] == ["off", "off", "forced"]
    assert [run.compacted is not None for run in result.runs] == [False, True, False]
    told = result.runs[1].compacted
    assert told is not None
    assert told.blocks_free_after >= told.blocks_free_before
    assert len(told.before.blocks) == len(told.after.blocks)
    assert told.occupancy_pct <= 62.0
    page = render(result)
    assert 'id="compaction"' in page
    assert page.count("<svg") == 3  # the mark, before and after
    assert "placement alone" in page
    for words in ("Tokens moved", "Blocks given back by moves", "Moves abandoned"):
        assert words in page  # though some of them are 0


def test_the_quiet_nights_of_the_documentation_are_those_of_the_command_beside_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """docs/compaction.md names the command that gives its table; here it gives the cheapest line.  Where the planner's
    choices have changed, all lines are to be made anew by that command."""
    text = (Path(__file__).parents[2] / "docs" / "compaction.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"`kvslotctl (replay TRACE --policy slotted .*?)`", text)
    (line,) = re.findall(r"^\| `mtbench101_a` \| 64 \|.*$", text, re.MULTILINE)
    argv = command.replace("TRACE", "mtbench101_a").replace("BLOCK", "64").split()
    assert ctl.main([*argv, "--json"]) == 0
    (told,) = msgspec.json.decode(capsys.readouterr().out)["meta"]["quiet_nights"]
    assert line == (
        f"| `mtbench101_a` | 64 | {told['blocks_free_before']:,} → {told['blocks_free_after']:,} of "
        f"{told['usable_blocks']:,} | {told['usable_run_pct_before']:.0f} → {told['usable_run_pct_after']:.0f} % | "
        f"{told['moved_tokens']:,} | {told['moved_per_given_back']:.2f} |"
    )


def test_that_nothing_was_worth_moving_is_said() -> None:
    """A pool that holds everything has nothing to move: the sentence says so, and what was to be gained at most."""
    cases = means(Case(sgd(60), config(pool_tokens=200_000)), "idle")
    (said,) = run_cases(cases, seed=0, settings={}, with_optimum=False).meta.compaction
    assert said.startswith("sgd_a: Free slots in blocks that something keeps in use, in blocks of 16: ")
    assert said.endswith("Nothing was worth moving; no more than that was to be gained.")


def test_a_page_without_moves_has_no_section_for_them() -> None:
    """What nobody asked for is not there."""
    result = run_cases([Case(sgd(100), config())], seed=0, settings={}, with_optimum=False)
    assert 'id="compaction"' not in render(result)


def test_usable_runs_are_counted_by_whole_runs() -> None:
    """A free run of 70 whole blocks holds two runs of 32; blocks that stick out on either side count for nothing."""
    policy = SlottedPolicy(PolicyConfig(pool_tokens=101 * BLOCK, block_size=BLOCK))
    runs = policy.pool.runs
    assert usable_run(runs) == 96 * BLOCK  # all 100 are free
    runs.take_within(BLOCK, BLOCK * 1, 30 * BLOCK + 1)  # 69 whole blocks are left, and a part
    assert usable_run(runs) == 64 * BLOCK
    assert usable_run(runs, 70) == 0
    assert usable_run(runs, 69) == 69 * BLOCK
    brute = sum(
        max(0, (start + length) // BLOCK + -start // BLOCK) // 32 * 32 * BLOCK
        for start, length in runs.length_at.items()
    )
    assert usable_run(runs) == brute


@pytest.mark.parametrize("name", ["sgd_a", "mtbench101_a"])
def test_an_hour_of_moves_leaves_the_pool_as_good_as_it_was(name: str) -> None:
    """With moves in its gaps the pool of the second half hour is no worse than that of the first, bounded here; the
    same for 72 hours of every trace is `kvslotctl bench compaction --only hours`.  (S47)"""
    made = load(find(name)).head(150)
    settings = config(pool_tokens=9_000, block_size=64, compaction="idle", hours=1.05, rate=0.2)
    rows = {row.phase: row for row in replay(made, settings).rows}
    first, last = rows["first_hour"], rows["last_hour"]
    assert last.internal_fragmentation_pct.mean <= 1.05 * first.internal_fragmentation_pct.mean + 0.05
    assert last.moved_tokens <= 1.2 * first.moved_tokens + 1_000
