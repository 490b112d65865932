"""The figures: samples, means, phases and bounds against cases worked out by hand or by brute force."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvslot.replay import Expander, Nodes, ReplayConfig, Trace, replay
from kvslot.replay.bounds import Written
from kvslot.replay.policies import Counters, Gauges
from kvslot.replay.recorder import (
    SAMPLES_PER_BUCKET,
    Sampler,
    Totals,
    add_gauges,
    fragmentation,
    room,
)

from .test_traces import common, requests
from .tiny import Line, trace


def gauges(**values: int) -> Gauges:
    return Gauges(*(values.get(name, 0) for name in Gauges._fields))


NO_COUNTERS = Counters(0, 0, 0, 0, 0)
NO_TOTALS = Totals(0, 0, 0, 0, 0)


def test_fragmentation_leaves_out_what_is_reserved_only() -> None:
    """Of 100 slots in used blocks, 20 unwritten run and 60 tokens: a quarter of the other 80 holds nothing, whatever
    it is called."""
    assert fragmentation(gauges(blocks_in_use_slots=100, reserved=20, tokens_held=60)) == pytest.approx(0.25)
    assert fragmentation(gauges(blocks_in_use_slots=100, reserved=20, tokens_held=60, duplicates=20)) == 0.25
    assert fragmentation(gauges(blocks_in_use_slots=32, reserved=32)) == 0.0
    assert fragmentation(gauges()) == 0.0


def test_room_is_the_formula_of_pseudo_oom() -> None:
    """Slots holding no token, less all that is set aside, plus what can be evicted, less the watermark."""
    pool = gauges(
        usable=1000,
        tokens_held=500,
        duplicates=1,
        peeled=2,
        fenced=4,
        quarantined=8,
        moving=16,
        reserved=32,
        evictable=300,
    )
    assert room(pool, 0.0) == 1000 - 500 - 63 + 300
    assert room(pool, 0.02) == 737 - 20


def test_several_pools_add_up_but_their_longest_run_does_not() -> None:
    """A run of free slots does not reach from one engine's memory into another's."""
    both = add_gauges([gauges(usable=10, largest_free_run=4), gauges(usable=20, largest_free_run=3)])
    assert both == gauges(usable=30, largest_free_run=4)


def test_means_are_weighted_by_time() -> None:
    """A state that stood for 9 s counts nine times as much as one that stood for 1 s; the highest is kept as it is."""
    sampler = Sampler(100.0, step=0.5)
    # Until 109: a quarter empty; from there to 110: all full but reserved.
    sampler.reading(108.9, gauges(usable=100, blocks_in_use_slots=80, tokens_held=60), NO_COUNTERS, NO_TOTALS)
    sampler.reading(109.9, gauges(usable=100, blocks_in_use_slots=80, tokens_held=80), NO_COUNTERS, NO_TOTALS)
    sampler.finish(NO_COUNTERS, NO_TOTALS)
    samples = sum(bucket.samples for bucket in sampler.buckets)
    assert samples == 20  # 100.0, 100.5, ... 109.5
    assert sum(bucket.fragmentation[0] for bucket in sampler.buckets) / samples == pytest.approx(
        0.25 * 18 / 20
    )
    assert max(bucket.fragmentation[1] for bucket in sampler.buckets) == pytest.approx(0.25)
    assert (
        sum(bucket.sums[Gauges._fields.index("tokens_held")] for bucket in sampler.buckets)
        == 18 * 60 + 2 * 80
    )


@given(
    stretches=st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 100)), min_size=1, max_size=30),
)
def test_halving_the_grid_keeps_mean_and_maximum(stretches: list[tuple[int, int]]) -> None:
    """However long a run gets, the buckets stay within their bound, the mean stays within a grid step's error of the
    true one, and no maximum that was sampled is forgotten."""
    sampler = Sampler(0.0, step=1.0, buckets_max=64)
    now, integral, seen = 0.0, 0.0, 0
    for seconds, held in stretches:
        now += seconds
        integral += seconds * held
        if sampler.next <= now - 1e-9:
            seen = max(seen, held)
        sampler.reading(now - 1e-9, gauges(usable=100, tokens_held=held), NO_COUNTERS, NO_TOTALS)
    sampler.finish(NO_COUNTERS, NO_TOTALS)
    assert len(sampler.buckets) <= 64
    samples = sum(bucket.samples for bucket in sampler.buckets)
    mean = 100 * sum(bucket.occupancy[0] for bucket in sampler.buckets) / samples
    worst = 100 * sampler.step * len(stretches) * 2 / now
    assert mean == pytest.approx(integral / now, abs=worst + 1e-6)
    assert max(100 * bucket.occupancy[1] for bucket in sampler.buckets) == pytest.approx(seen)
    covered = sampler.bucket_s * len(sampler.buckets)
    assert now <= covered + sampler.step * SAMPLES_PER_BUCKET


def test_counts_of_phases_add_up(tmp_path: Path) -> None:
    """Cold, warm and steady follow each other without gap or overlap, so that their counts add up to the whole."""
    lines: list[Line] = [(i * 1.0, i % 7, 0, -1, 0, 50 + i % 9, 20) for i in range(300)]
    made = trace(tmp_path / "long.kvs.gz", lines)
    outcome = replay(made, ReplayConfig(policy="token", block_size=16, pool_tokens=2000, live=4))
    rows = {row.phase: row for row in outcome.rows}
    assert list(rows) == ["all", "cold", "warm", "steady"]
    parts = [rows["cold"], rows["warm"], rows["steady"]]
    for name in ("requests", "finished", "prompt_tokens", "hit_tokens", "refusals", "preemptions", "never"):
        assert sum(getattr(part, name) for part in parts) == getattr(rows["all"], name), name
    assert [part.start_s for part in parts[1:]] == [part.end_s for part in parts[:-1]]
    # 2,000 slots at some 74 tokens a request: full once after 27, three times after 81.
    assert rows["cold"].requests == 27
    assert rows["warm"].requests in (53, 54, 55)


def test_hours_have_phases_of_their_own(tmp_path: Path) -> None:
    """A run of three hours has a first and a last one, which hold what was admitted in them."""
    lines: list[Line] = [(i * 60.0, i, 0, -1, 0, 50, 20) for i in range(180)]
    made = trace(tmp_path / "long.kvs.gz", lines)
    outcome = replay(made, ReplayConfig(policy="token", block_size=16, pool_tokens=100_000, live=4))
    rows = {row.phase: row for row in outcome.rows}
    assert rows["first_hour"].requests == 60
    assert rows["last_hour"].requests == 60
    assert rows["last_hour"].end_s - rows["last_hour"].start_s == pytest.approx(3600)
    assert rows["last_hour"].occupancy_pct.mean > rows["first_hour"].occupancy_pct.mean
    assert "full_hour" not in rows


def test_the_first_hour_of_a_full_pool_is_a_phase(tmp_path: Path) -> None:
    """Where the pool was filled three times over before the last two hours, the hour from then on is told apart."""
    lines: list[Line] = [(i * 60.0, i, 0, -1, 0, 50, 20) for i in range(240)]
    made = trace(tmp_path / "long.kvs.gz", lines)
    outcome = replay(made, ReplayConfig(policy="token", block_size=16, pool_tokens=1_000, live=4))
    rows = {row.phase: row for row in outcome.rows}
    assert rows["full_hour"].start_s == rows["steady"].start_s
    assert rows["full_hour"].end_s - rows["full_hour"].start_s == pytest.approx(3600)
    assert rows["full_hour"].end_s < rows["last_hour"].start_s
    assert "full_day" not in rows


def test_days_have_phases_of_their_own(tmp_path: Path) -> None:
    """A pool that is full for two days has a first one and a last, and they do not overlap."""
    lines: list[Line] = [(i * 600.0, i, 0, -1, 0, 50, 20) for i in range(360)]
    made = trace(tmp_path / "long.kvs.gz", lines)
    outcome = replay(made, ReplayConfig(policy="token", block_size=16, pool_tokens=1_000, live=4))
    rows = {row.phase: row for row in outcome.rows}
    assert rows["full_day"].start_s == rows["steady"].start_s
    assert rows["full_day"].end_s <= rows["last_day"].start_s
    assert [rows[day].end_s - rows[day].start_s for day in ("full_day", "last_day")] == pytest.approx(
        [86_400] * 2
    )


@given(lines=requests(), writes=st.data())
def test_ideal_hits_are_the_longest_common_prefixes(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Line], writes: st.DataObject
) -> None:
    """Whatever was written in whatever order and round, the ideal hit is the longest prefix in common with any of it,
    found here by comparing ids."""
    made = trace(tmp_path_factory.mktemp("trace") / "any.kvs.gz", lines)
    expander = Expander(made)
    rounds = writes.draw(st.sampled_from([1, 2]))
    written = Written(made, rounds=rounds > 1)
    held: list[list[int]] = []
    everyone = list(itertools.product(range(rounds), range(len(lines))))
    for round_, request in writes.draw(st.permutations(everyone)):
        ids = expander.sequence(request, round_).tolist()
        best = max((common(ids, other) for other in held), default=0)
        assert written.ideal(request, round_) == min(best, made.prompt_len[request] - 1)
        length = writes.draw(st.sampled_from([made.prompt_len[request], made.total[request]]))
        written.write(request, length, round_)
        held.append(ids[:length])


@given(lines=requests(), pool=st.sampled_from([51, 60, 75, 110]))
def test_the_optimum_is_belady_token_by_token(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Line], pool: int
) -> None:
    """With one sequence at a time, the optimum finds what Belady's rule finds that follows every single token."""
    made = trace(tmp_path_factory.mktemp("trace") / "any.kvs.gz", lines)
    config = ReplayConfig(policy="token", block_size=1, pool_tokens=pool, live=1, watermark=0.0)
    outcome = replay(made, config, nodes=Nodes(made))
    order = list(outcome.recorder.number)
    best = outcome.rows[0].hit_tokens_pct_optimum if outcome.rows else None
    if best is None or outcome.rows[0].preemptions or outcome.rows[0].never or outcome.rows[0].stuck:
        return
    assert best == pytest.approx(100 * _belady(made, pool, order) / outcome.rows[0].prompt_tokens, abs=1e-5)


def _belady(made: Trace, pool: int, order: list[int]) -> int:
    """Hits in all.  The pool is a set of tokens, each known by all that comes before it."""
    expander = Expander(made)
    tokens: list[list[tuple[int, ...]]] = []
    for i in order:
        ids = expander.sequence(i).tolist()
        tokens.append([tuple(ids[: at + 1]) for at in range(len(ids))])
    uses: dict[tuple[int, ...], list[int]] = {}
    for at, i in enumerate(order):
        for token in tokens[at][: made.prompt_len[i]]:
            uses.setdefault(token, []).append(at)
    cached: set[tuple[int, ...]] = set()
    hits = 0
    for at, i in enumerate(order):

        def later(token: tuple[int, ...], at: int = at) -> float:
            use = next((j for j in uses.get(token, ()) if j > at), -1)
            # A prompt's last token is computed all the same.
            return use if use >= 0 and len(token) < made.prompt_len[order[use]] else float("inf")

        path = tokens[at]
        hits += sum(token in cached for token in path[: made.prompt_len[i] - 1])
        cached -= set(path)
        while len(cached) > pool - len(path):
            cached.remove(max(cached, key=lambda token: (later(token), len(token))))
        cached = {token for token in cached | set(path) if later(token) < float("inf")}
    return hits


@settings(max_examples=40)
@given(
    lines=requests(),
    policy=st.sampled_from(["paged", "hashed", "token", "slotted"]),
    block_size=st.sampled_from([1, 4, 16]),
    pool=st.sampled_from([96, 128, 256, 512]),
    live=st.sampled_from([1, 3, 8]),
    engines=st.sampled_from([1, 2]),
    hours=st.sampled_from([None, 0.003]),
    ramp=st.sampled_from([None, 0.0]),
)
def test_no_policy_finds_more_than_its_optimum(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[Line],
    policy: str,
    block_size: int,
    pool: int,
    live: int,
    engines: int,
    hours: float | None,
    ramp: float | None,
) -> None:
    """Whatever waits, is refused or preempted: hits <= optimum <= what a cache without limits would have found."""
    made = trace(tmp_path_factory.mktemp("trace") / "any.kvs.gz", lines)
    config = ReplayConfig(
        policy=policy,
        block_size=block_size,
        pool_tokens=pool * engines,
        live=live,
        engines=engines,
        sharing="partitioned",
        hours=hours,
        ramp_s=ramp,
    )
    for row in replay(made, config, nodes=Nodes(made, rounds=hours is not None)).rows[:1]:
        assert row.hit_tokens_pct_optimum is not None
        assert row.hit_tokens_pct <= row.hit_tokens_pct_optimum + 1e-6
        assert row.hit_tokens_pct_optimum <= row.hit_tokens_pct_ideal + 1e-6
