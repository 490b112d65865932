"""`kvslotctl bench compaction`: its targets as they were agreed, its pools as they are described, its rows in small."""

import argparse
import random

import pytest

from kvslot import benchmarks
from kvslot.allocator import audit
from kvslot.benchmarks import Document, compacting, compaction, pieces
from kvslot.benchmarks.report import budgets, meta, result
from kvslot.cli import bench
from kvslot.defrag import Greedy, Purpose

SUITE = "compaction"

# (result, kind of bound, value): the table of budgets as it was agreed, once more and by hand.
AGREED = [
    ("packing_16", "least", 0.95),
    ("packing_528", "least", 0.95),
    ("usable_runs", "least", 0.98),
    ("usable_runs_leased_short", "least", 0.95),
    ("usable_runs_leased_medium", "least", 0.95),
    ("usable_runs_leased_traces", "least", 0.95),
    ("copy_16k", "least", 0.75),
    ("copy_4k", "least", 0.45),
    ("step_to_last_byte", "most", 100),
    ("step_to_last_byte_loaded", "most", 100),
    ("allocate_p50", "most", 1.1),
    ("allocate_p99", "most", 2),
    ("step_p50", "most", 1.02),
    ("step_collisions_pct", "most", 1),
    ("moved_per_given_back_worst", "most", 1),
    ("moved_per_given_back", "most", 0.95),
    ("slice_ms_max", "most", 2),
    ("last_hour_fragmentation", "most", 1),
    ("last_hour_fragmentation_full", "most", 1),
    ("last_day_fragmentation_full", "most", 1),
]


def quiet(words: str, share: float) -> None:
    """Nobody watches."""


def test_targets_are_those_agreed() -> None:
    """budgets.toml holds the agreed targets, no other, and none is weaker or stronger."""
    written = {
        (name, kind, getattr(budget, kind))
        for name, budget in budgets(SUITE).items()
        for kind in ("most", "least", "below", "stretch")
        if getattr(budget, kind) is not None
    }
    assert written == {(name, kind, float(value)) for name, kind, value in AGREED}


def test_packing_is_what_it_is_said_to_be() -> None:
    """Half of the pieces is gone, the pool's books are right before and after, and compaction packs what is left."""
    made = pieces.half(16, 15, 1_500)
    assert len(made.nodes) == 750
    audit(made.pool)
    before = pieces.packing(made.pool)
    assert before < 0.75
    done = pieces.to_rest(made.pool, (Purpose.FREE_BLOCKS,))
    audit(made.pool)
    assert done.packing_before == before
    assert done.packing == pieces.packing(made.pool) > 0.93
    assert done.given_back > done.moved_tokens > 0


def test_a_leased_node_stays_and_bounds_what_can_be_had() -> None:
    """What is leased stands where it stood after compaction, and free runs are no longer than the bound between."""
    made = pieces.sixty(pieces.medium, blocks=1_200, leased=pieces.LEASED)
    pool = made.pool
    held = {node: pool.tree.extents(node) for node in made.nodes if pool.tree.holds[node]}
    assert len(held) == int(0.2 * len(made.nodes))
    done = pieces.to_rest(pool, (Purpose.FREE_BLOCKS, Purpose.RUN))
    assert {node: pool.tree.extents(node) for node in held} == held
    assert done.runs_before <= done.runs <= done.bound


def test_the_bound_is_that_of_the_best_arrangement() -> None:
    """Three pieces that stay leave four stretches, each of which holds so many whole runs and no more."""
    made = pieces.Pieces(101, 16)
    pool = made.pool
    at = {1: 16 * 40, 2: 16 * 75, 3: 16 * 76 + 8}  # slots at which pieces of four tokens stay
    for slot in at.values():
        made.add_at([slot, 4])
    made.lease(1.0, random.Random(0))
    # Stretches: blocks 1..39, 41..74, none between 75 and 76, 77..100: one run of 32 in each of the first two.
    assert pieces.bound(pool) == 2 * 32 * 16
    assert pieces.bound(pool, 20) == (1 + 1 + 1) * 20 * 16
    assert pieces.in_runs(pool) == pieces.bound(pool)


def test_prices_are_compared_on_the_same_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """All planners see each trace, and a row says what was moved for what, in total and for as many blocks."""
    monkeypatch.setattr(compaction, "QUICK", ("sgd_a",))
    monkeypatch.setattr(compaction, "QUICK_REQUESTS", 150)
    monkeypatch.setattr(compaction, "NIGHTS", (0.6, 0.4))
    skipped: dict[str, str] = {}
    rows = {
        each.name: each
        for each in compaction.measure_moved(quick=True, seed=0, report=quiet, skipped=skipped)
    }
    for name in ("moved_per_given_back", "moved_for_as_much"):
        assert {name, f"{name}_worst", f"{name}_parts", f"{name}_parts_worst"} <= set(rows)
    assert "moved_per_given_back_sgd_a_16" in rows
    assert rows["moved_per_given_back"].ok is not None
    assert "rest of sgd_a" in skipped


def test_slices_are_timed_for_every_purpose() -> None:
    """The planner is fed and asked for all purposes, and the longest slice is told."""
    size = compaction.Size(blocks_large=1_000)
    (row,) = compaction.measure_slices(size, 0, quiet)
    assert row.name == "slice_ms_max"
    assert all(word in row.note for word in ("feed", "free_blocks", "run", "join"))


def test_hours_hold_the_last_against_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trace is one row, and the worst of them is judged."""
    monkeypatch.setattr(compaction, "HOURS_REQUESTS", 400)
    rows = compaction.measure_hours(seed=0, report=quiet, hours=1.1, names=("sgd_a",), block_size=64)
    # It was not full for long enough to be held against an hour of that.
    assert [row.name for row in rows] == ["last_hour_fragmentation", "last_hour_fragmentation_sgd_a"]
    assert rows[0].ok is not None
    assert rows[0].value == rows[1].value


def test_steps_are_judged_by_their_medians() -> None:
    """On against off, round by round; off against off stands beside it; collisions are a share of all begins."""
    rounds = {
        "on": [[1.01e-3] * 10, [1.03e-3] * 10, [1.02e-3] * 10],
        "off": [[1e-3] * 10] * 3,
        "again": [[1e-3] * 10] * 3,
    }
    cold, warm = compacting.Seen(100, 20, 5, 0.1), compacting.Seen(300, 3, 10**9, 0.5)
    rows = {row.name: row for row in compacting._steps(rounds, cold, warm)}
    assert rows["step_p50"].value == 1.02
    assert rows["step_p50"].ok is True
    assert rows["step_collisions_pct"].value == 1.0
    assert rows["step_collisions_pct"].ok is True
    assert rows["step_collisions_cold_pct"].value == 20.0
    assert "off against off: 1.000" in rows["step_p99"].note


def test_the_command_leaves_the_hours_out_unless_they_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --only everything runs but what takes hours; with it whatever is named."""
    asked: list[list[str]] = []

    def run(groups: list[str], **_: object) -> Document:
        asked.append(list(groups))
        found = [result("packing_16", 0.99, suite=SUITE)]
        return Document(
            meta=meta(groups, quick=True, seed=0, cost_ns=1, command=["x"], suite=SUITE), results=found
        )

    monkeypatch.setattr(benchmarks, "run_compaction", run)
    parser = argparse.ArgumentParser()
    bench.add(parser.add_subparsers())
    for words in ([], ["--only", "hours"]):
        assert bench.run_compaction(parser.parse_args(["bench", "compaction", *words])) == 0
    assert asked == [list(compaction.USUAL), ["hours"]]
    assert "hours" not in compaction.USUAL
    assert "packing_16" in capsys.readouterr().out


def test_the_greedy_planner_is_no_straw_man() -> None:
    """The baseline, too, packs better than nothing at all, and ends."""
    made = pieces.half(16, 15, 1_000)
    done = pieces.to_rest(made.pool, (Purpose.FREE_BLOCKS,), Greedy(made.pool))
    assert done.packing > done.packing_before + 0.1
    assert done.given_back > 0
