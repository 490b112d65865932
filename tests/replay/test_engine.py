"""The engine: who runs when, who is refused, preempted and dropped, and that it comes out the same each time."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvslot.replay import (
    Nodes,
    Outcome,
    PolicyFault,
    ReplayConfig,
    Trace,
    find,
    load,
    max_concurrent_sessions,
    peak_live_tokens,
    policies,
    replay,
)
from kvslot.replay.policies import Admitted, Refused, Room

from .tiny import Line, TinyPolicy, trace

MEASURED = ("alloc_us", "cpu_us_per_request", "grow_us_per_request")


def tiny(**changes: object) -> ReplayConfig:
    return msgspec.structs.replace(ReplayConfig(policy="tiny", pool_tokens=100_000, ramp_s=0.0), **changes)


@st.composite
def traces(draw: st.DrawFn) -> list[Line]:
    """Small traces with sessions of several turns, branches, and inherited outputs."""
    lines: list[Line] = []
    clock = draw(st.booleans())
    t = 0.0
    for i in range(draw(st.integers(1, 25))):
        t += draw(st.sampled_from([0.0, 0.01, 0.5, 3.0]))
        prompt_len, output_len = draw(st.integers(1, 60)), draw(st.integers(0, 40))
        parent = draw(st.integers(-1, i - 1))
        most = 0 if parent < 0 else min(lines[parent][5] + lines[parent][6], prompt_len + output_len)
        keep = draw(st.sampled_from([0, most, most // 2]))
        lines.append((t if clock else None, draw(st.integers(0, 5)), 0, parent, keep, prompt_len, output_len))
    return lines


def configs() -> st.SearchStrategy[ReplayConfig]:
    return st.builds(
        tiny,
        block_size=st.sampled_from([1, 4, 16]),
        pool_tokens=st.sampled_from([150, 300, 2000]),
        live=st.sampled_from([1, 3, 8]),
        rate=st.sampled_from([None, 2.0]),
        closed_loop=st.booleans(),
        engines=st.sampled_from([1, 3]),
        routing=st.sampled_from(["sticky", "random"]),
        sharing=st.sampled_from(["shared", "partitioned"]),
        hours=st.sampled_from([None, 0.003]),
        ramp_s=st.sampled_from([None, 0.0, 5.0]),
        seed=st.integers(0, 3),
    )


def run(path: Path, lines: list[Line], config: ReplayConfig) -> tuple[Trace, Outcome]:
    TinyPolicy.log = []
    made = trace(path / "any.kvs.gz", lines)
    return made, replay(made, config)


@settings(max_examples=80)
@given(lines=traces(), config=configs())
def test_every_request_comes_to_one_end_and_none_before_what_it_builds_on(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Line], config: ReplayConfig
) -> None:
    """Whatever the trace and the settings: each request is finished, or dropped and counted so, exactly once; none is
    asked for before its session's earlier request, or the parent whose output it inherits, has ended; and no more than
    `live` run at once."""
    folder = tmp_path_factory.mktemp("run")
    made, outcome = run(folder, lines, config)
    n = len(made)
    ended: dict[int, int] = {}
    for at, (call, request, _) in enumerate(TinyPolicy.log):
        if call == "finish":
            assert request not in ended
            ended[request] = at
    recorder = outcome.recorder
    seen = {request for _, request, _ in TinyPolicy.log}
    assert len(ended) == len(recorder.finished_at)
    assert len(ended) + len(recorder.never_at) + len(recorder.stuck_at) == len(seen)
    if config.hours is None:
        assert seen == set(range(n))
    else:
        assert set(range(min(seen) // n, max(seen) // n + 1)) >= {request // n for request in seen}
    row = outcome.rows[0] if outcome.rows else None
    if row is not None:
        assert row.finished == len(ended)
        assert row.never == len(recorder.never_at)
        assert row.requests == len(set(recorder.number)) == len(recorder.number)

    # A dropped request has ended with its last admission.
    last_call = {request: at for at, (_, request, _) in enumerate(TinyPolicy.log)}
    running: set[int] = set()
    for at, (call, request, _) in enumerate(TinyPolicy.log):
        round_, index = divmod(request, n)
        if call == "admit":
            needs = [made.previous[index]]
            parent = made.parent[index]
            if parent >= 0 and made.keep[index] > made.prompt_len[parent]:
                needs.append(parent)
            for need in needs:
                if need >= 0:
                    assert ended.get(round_ * n + need, last_call[round_ * n + need]) < at
        elif call == "prefilled":
            running.add(request)
            assert len(running) <= config.live
        else:
            running.discard(request)


@settings(max_examples=25)
@given(lines=traces(), config=configs())
def test_same_seed_same_rows(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Line], config: ReplayConfig
) -> None:
    """Two runs with one seed agree in every row and series, but for measured times."""
    folder = tmp_path_factory.mktemp("run")
    (_, first), (_, second) = run(folder, lines, config), run(folder, lines, config)
    assert [_unmeasured(row) for row in first.rows] == [_unmeasured(row) for row in second.rows]
    assert first.run.series == second.run.series
    assert first.run.pictures == second.run.pictures


def _unmeasured(row: object) -> dict[str, object]:
    plain = msgspec.to_builtins(row)
    assert isinstance(plain, dict)
    return {key: value for key, value in plain.items() if key not in MEASURED}


def test_a_bundled_trace_comes_out_the_same_twice() -> None:
    """A real policy on a real trace, with routing by chance and Poisson arrivals, is repeated by its seed."""
    made = load(find("mtbench101_a")).head(600)
    config = ReplayConfig(policy="token", pool_tokens=20_000, engines=3, routing="random", rate=30.0, seed=7)
    first, second = replay(made, config), replay(made, config)
    assert [_unmeasured(row) for row in first.rows] == [_unmeasured(row) for row in second.rows]
    other = replay(made, msgspec.structs.replace(config, seed=8))
    assert _unmeasured(first.rows[0]) != _unmeasured(other.rows[0])


def test_time_passes_as_stated(tmp_path: Path) -> None:
    """Prefill takes its time per token that was not found, decode its time per token, and the next turn follows."""
    lines: list[Line] = [(5.0, 0, 0, -1, 0, 100, 10), (5.0, 0, 1, 0, 110, 150, 4)]
    made, outcome = run(tmp_path, lines, tiny(prefill_us=1000.0, decode_ms=100.0))
    assert made.t == [5.0, 5.0]
    when = {(call, request): at for call, request, at in TinyPolicy.log}
    assert when["admit", 0] == 0.0  # the clock starts with the first request
    assert when["prefilled", 0] == pytest.approx(0.1)
    assert when["finish", 0] == pytest.approx(1.1)
    assert when["admit", 1] == pytest.approx(1.1)
    assert when["prefilled", 1] == pytest.approx(1.1 + 0.040)
    assert when["finish", 1] == pytest.approx(1.14 + 0.4)
    (row, *_) = outcome.rows
    assert (row.prompt_tokens, row.hit_tokens) == (250, 110)
    assert row.end_s == pytest.approx(1.54)
    assert row.hit_tokens_pct_ideal == row.hit_tokens_pct == 44.0


def test_the_trace_clock_and_hours_go_round(tmp_path: Path) -> None:
    """With hours the trace starts again, a round apart, with new ids; nothing is let in after the time is up."""
    lines: list[Line] = [(10.0, 0, 0, -1, 0, 5, 1), (20.0, 1, 0, -1, 0, 5, 1)]
    run(tmp_path, lines, tiny(hours=60 / 3600))
    admitted = [(request, at) for call, request, at in TinyPolicy.log if call == "admit"]
    # The round lasts 10 s and the mean gap of 10 s more.
    assert admitted == [(0, 0.0), (1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0), (5, 50.0)]


def test_a_closed_loop_fills_up_step_by_step(tmp_path: Path) -> None:
    """Four clients that start over a second begin a quarter of a second apart; then each ends before the next comes."""
    lines: list[Line] = [(None, i, 0, -1, 0, 1, 100) for i in range(9)]
    run(tmp_path, lines, tiny(live=4, ramp_s=1.0, prefill_us=0.0))
    admitted = [at for call, _, at in TinyPolicy.log if call == "admit"]
    assert admitted == pytest.approx([0.0, 0.25, 0.5, 0.75, 2.0, 2.25, 2.5, 2.75, 4.0])


def test_refused_requests_wait_in_line_and_count_once(tmp_path: Path) -> None:
    """The head of the line waits for a release, others wait behind it, and its refusal counts once however often
    it asks."""
    # Two long ones fill the pool; the third, then the small fourth, have to wait, in this order.
    lines: list[Line] = [
        (0.0, 0, 0, -1, 0, 40, 18),
        (0.1, 1, 0, -1, 0, 40, 20),
        (0.2, 2, 0, -1, 0, 60, 1),
        (0.3, 3, 0, -1, 0, 2, 1),
    ]
    _, outcome = run(tmp_path, lines, tiny(pool_tokens=120, block_size=1, watermark=0.0))
    assert list(outcome.recorder.number) == [0, 1, 2, 3]
    row = outcome.rows[0]
    assert row.refusals == 1
    assert row.preemptions == row.never == row.stuck == 0
    # At the refusal 0 and 1 held their prompts and what they had decoded by then.
    assert row.usable_pct is not None
    assert 80 / 1.2 <= row.usable_pct < 100


def test_what_never_fits_is_dropped_and_others_follow(tmp_path: Path) -> None:
    """A prompt beyond the pool, and one that outgrows it alone, are counted NEVER; who builds on them still runs."""
    lines: list[Line] = [
        (None, 0, 0, -1, 0, 500, 1),
        (None, 0, 1, 0, 20, 30, 1),
        (None, 1, 0, -1, 0, 50, 300),
        (None, 2, 0, -1, 0, 10, 2),
    ]
    _, outcome = run(tmp_path, lines, tiny(pool_tokens=100, block_size=4))
    row = outcome.rows[0]
    assert (row.never, row.finished, row.stuck) == (2, 2, 0)
    assert len(outcome.recorder.number) == 3


def test_a_growth_that_does_not_fit_preempts_the_youngest(tmp_path: Path) -> None:
    """The victim gives up its room, goes to the front of the line, and finishes later; nothing is lost."""
    lines: list[Line] = [(0.0, 0, 0, -1, 0, 40, 50), (0.5, 1, 0, -1, 0, 40, 50), (0.6, 2, 0, -1, 0, 5, 1)]
    _, outcome = run(tmp_path, lines, tiny(pool_tokens=110, block_size=2, live=2, watermark=0.0))
    assert [request for call, request, _ in TinyPolicy.log if call == "abort"][:1] == [1]
    row = outcome.rows[0]
    assert row.preemptions >= 1
    assert row.finished == 3
    # Hits and prompts count once, at the first admission, however often a request starts over.
    assert row.prompt_tokens == 85
    calls = [(call, request) for call, request, _ in TinyPolicy.log]
    after = calls[calls.index(("finish", 0)) :]
    assert after.index(("admit", 1)) < after.index(("admit", 2))


class Stubborn(TinyPolicy):
    """Says LATER to everybody although it has room."""

    def admit(self, request: int, tokens: bytes, engine: int, now: float) -> Admitted | Refused:
        self.log.append(("admit", request, now))
        return Refused(False, len(tokens) // 4)


class Wasteful(TinyPolicy):
    """Refuses when more than one runs, although it has room: a pseudo-OOM each time."""

    def admit(self, request: int, tokens: bytes, engine: int, now: float) -> Admitted | Refused:
        if self.running:
            return Refused(False, len(tokens) // 4)
        return super().admit(request, tokens, engine, now)


def test_pseudo_oom_is_a_refusal_that_memory_did_not_call_for(tmp_path: Path) -> None:
    """Refused with room: counted; refused without: not; and the watermark and reserved slots are no room."""
    lines: list[Line] = [(None, i, 0, -1, 0, 40, 8) for i in range(4)]
    policies.register("wasteful", Wasteful)
    try:
        _, outcome = run(tmp_path, lines, tiny(policy="wasteful", pool_tokens=1000))
        assert (outcome.rows[0].refusals, outcome.rows[0].pseudo_oom) == (3, 3)
        _, outcome = run(
            tmp_path, lines, tiny(policy="wasteful", pool_tokens=82, block_size=1, watermark=0.0)
        )
        assert (outcome.rows[0].refusals, outcome.rows[0].pseudo_oom) == (3, 3)
        # 40 are taken by the first; of the other 42 slots two or three are held back, or less is left than asked for.
        _, outcome = run(
            tmp_path, lines, tiny(policy="wasteful", pool_tokens=82, block_size=1, watermark=0.04)
        )
        assert (outcome.rows[0].refusals, outcome.rows[0].pseudo_oom) == (3, 0)
        _, outcome = run(tmp_path, lines, tiny(pool_tokens=79, block_size=1, watermark=0.0))
        assert (outcome.rows[0].refusals, outcome.rows[0].pseudo_oom) == (3, 0)
    finally:
        policies.unregister("wasteful")


def test_a_policy_that_refuses_an_empty_pool_is_found_out(tmp_path: Path) -> None:
    """LATER while nothing runs would wait for ever: dropped and counted as stuck."""
    policies.register("stubborn", Stubborn)
    try:
        _, outcome = run(tmp_path, [(None, 0, 0, -1, 0, 4, 1)] * 3, tiny(policy="stubborn"))
    finally:
        policies.unregister("stubborn")
    assert len(outcome.recorder.stuck_at) == 3
    assert outcome.rows == []


def test_a_pool_each_against_one_pool(tmp_path: Path) -> None:
    """Partitioned, a prompt that another engine has computed is not found, and memory elsewhere is of no use; shared,
    both are."""
    lines: list[Line] = [(float(i), i, 0, 0 if i else -1, 100 if i else 0, 101, 1) for i in range(40)]
    config = tiny(engines=4, routing="random", sharing="shared", pool_tokens=4000, block_size=1)
    _, shared = run(tmp_path, lines, config)
    assert TinyPolicy.engines == {0, 1, 2, 3}
    TinyPolicy.engines = set()
    _, apart = run(tmp_path, lines, msgspec.structs.replace(config, sharing="partitioned"))
    assert TinyPolicy.engines == {0}  # each pool has one engine, and counts from 0
    assert shared.rows[0].hit_tokens == 39 * 100
    assert apart.rows[0].hit_tokens == 36 * 100
    assert apart.rows[0].evicted_hit_tokens == 3 * 100
    assert shared.run.usable_tokens == apart.run.usable_tokens == 4000
    assert shared.rows[0].refused_room_elsewhere == 0

    # All at once: one pool has room for all, an N-th of it does not.
    together: list[Line] = [(0.0, i, 0, -1, 0, 90, 2) for i in range(16)]
    config = tiny(engines=4, routing="random", pool_tokens=1600, block_size=1, watermark=0.0)
    _, shared = run(tmp_path, together, config)
    _, apart = run(tmp_path, together, msgspec.structs.replace(config, sharing="partitioned"))
    assert shared.rows[0].refusals == 0
    assert apart.rows[0].refusals > 0
    assert apart.rows[0].finished == 16


def test_sticky_routing_keeps_a_session_on_its_engine(tmp_path: Path) -> None:
    """With a pool each, later turns of a session find the earlier ones under sticky routing, and rarely by chance."""
    lines: list[Line] = []
    for turn in range(6):
        for session in range(8):
            parent = (turn - 1) * 8 + session if turn else -1
            lines.append((None, session, turn, parent, 20 * turn, 20 * turn + 15, 5))
    config = tiny(engines=4, sharing="partitioned", pool_tokens=40_000)
    _, sticky = run(tmp_path, lines, config)
    _, scattered = run(tmp_path, lines, msgspec.structs.replace(config, routing="random"))
    assert sticky.rows[0].hit_tokens_pct == sticky.rows[0].hit_tokens_pct_ideal
    assert scattered.rows[0].hit_tokens < sticky.rows[0].hit_tokens


@pytest.mark.parametrize(
    "answer", [Admitted(5, 5, 5), Admitted(-1, 5, 5), Admitted(0, 4, 4), Admitted(0, 9, 4)]
)
def test_an_impossible_admission_stops_the_run(tmp_path: Path, answer: Admitted) -> None:
    """A hit of the whole prompt, or less room than the prompt needs, is a fault of the policy, named as such."""

    class Liar(TinyPolicy):
        def admit(self, request: int, tokens: bytes, engine: int, now: float) -> Admitted | Refused:
            return answer

    policies.register("liar", Liar)
    try:
        with pytest.raises(PolicyFault):
            run(tmp_path, [(None, 0, 0, -1, 0, 5, 3)], tiny(policy="liar"))
    finally:
        policies.unregister("liar")


def test_growth_that_gives_nothing_stops_the_run(tmp_path: Path) -> None:
    """A `Room` that does not reach beyond the present length would be asked for without end."""

    class Miser(TinyPolicy):
        def grow(self, request: int, length: int, now: float) -> Room | None:
            return Room(length - 1, length - 1)

    policies.register("miser", Miser)
    try:
        with pytest.raises(PolicyFault):
            run(tmp_path, [(None, 0, 0, -1, 0, 5, 3)], tiny(policy="miser"))
    finally:
        policies.unregister("miser")


def test_asking_early_costs_nothing_when_refused(tmp_path: Path) -> None:
    """A growth refused while there is room left is asked again at the end of that room, and preempts nobody before."""
    asked: list[int] = []

    class Early(TinyPolicy):
        def admit(self, request: int, tokens: bytes, engine: int, now: float) -> Admitted | Refused:
            return Admitted(0, 10, 6)

        def prefilled(self, request: int, now: float) -> None:
            pass

        def grow(self, request: int, length: int, now: float) -> Room | None:
            asked.append(length)
            return None if length <= 10 else Room(40, 40)

        def finish(self, request: int, output: bytes, now: float) -> None:
            pass

    policies.register("early", Early)
    try:
        _, outcome = run(tmp_path, [(None, 0, 0, -1, 0, 5, 20)], tiny(policy="early"))
    finally:
        policies.unregister("early")
    assert asked == [7, 11]
    assert outcome.rows[0].preemptions == 0
    assert outcome.rows[0].finished == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 0},
        {"engines": 0},
        {"live": 0},
        {"pool_tokens": 10},
        {"hours": 0.0},
        {"rate": -1.0},
        {"watermark": 1.0},
        {"decode_ms": -1.0},
        {"pool_tokens": 100, "engines": 8, "sharing": "partitioned"},
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, object]) -> None:
    """Each setting has its range, and the message names setting and value."""
    with pytest.raises(ValueError, match=next(iter(changes))):
        ReplayConfig(**({"policy": "tiny", "pool_tokens": 1000} | changes))  # type: ignore[arg-type]


def test_live_is_searched_by_bisection(tmp_path: Path) -> None:
    """The largest number of sequences that run without preemption and refusals is what the pool has room for."""
    made = trace(tmp_path / "even.kvs.gz", [(None, i, 0, -1, 0, 50, 50) for i in range(60)])
    config = tiny(pool_tokens=1000, block_size=50, watermark=0.0)
    assert max_concurrent_sessions(made, config, limit=64) == 10
    assert max_concurrent_sessions(made, config, limit=4) == 4
    assert max_concurrent_sessions(made, tiny(pool_tokens=90, block_size=45), limit=64) == 0


def test_peak_live_tokens_counts_what_is_shared_once(tmp_path: Path) -> None:
    """Three requests that run together on one prompt of 100 tokens count it once, and their own ends each."""
    lines: list[Line] = [
        (0.0, 0, 0, -1, 0, 110, 10),
        (0.0, 1, 0, 0, 100, 120, 10),
        (0.0, 2, 0, 1, 115, 130, 0),
    ]
    made = trace(tmp_path / "together.kvs.gz", lines)
    assert peak_live_tokens(made, tiny()) == 120 + 30 + 15
    assert peak_live_tokens(made, tiny(live=1)) == 130


def test_the_optimum_is_found_where_lru_fails(tmp_path: Path) -> None:
    """A loop over one prompt more than fits: LRU finds nothing, the optimum all but the last prompt's place."""
    lines: list[Line] = [
        (None, i, 0, i - 5 if i >= 5 else -1, 100 if i >= 5 else 0, 101, 1) for i in range(50)
    ]
    made = trace(tmp_path / "loop.kvs.gz", lines)
    config = tiny(policy="token", block_size=1, pool_tokens=450, live=1)
    outcome = replay(made, config, nodes=Nodes(made))
    assert outcome.rows[0].hit_tokens == 0
    best = outcome.rows[0].hit_tokens_pct_optimum
    assert best is not None
    assert best >= 100 * 0.7 * 45 * 100 / (50 * 101)
