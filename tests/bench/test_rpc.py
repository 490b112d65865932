"""`kvslotctl bench rpc`, `bench memory` and the soak: targets as agreed, no row missing, and creeps are seen."""

import pytest

from kvslot import benchmarks
from kvslot.benchmarks import memory, rpc, soak
from kvslot.benchmarks.report import budgets, meta, result
from kvslot.cli import bench, ctl

from ..tools.compiler import needs_compiler

# (suite, result, kind of bound, value): the tables of budgets as they were agreed, once more and by hand.
AGREED = [
    ("rpc", "one_p50", "most", 2.5),
    ("rpc", "one_p50", "stretch", 2.0),
    ("rpc", "one_p99", "most", 2.5),
    ("rpc", "one_p99", "stretch", 2.0),
    ("rpc", "open_p99", "most", 3.0),
    ("rpc", "open_us_p999", "stretch", 1000.0),
    ("rpc", "page_p99", "most", 1.2),
    ("rpc", "saturated_rate", "least", 0.22),
    ("rpc", "saturated_rate", "stretch", 0.28),
    ("rpc", "saturated_ops", "stretch", 40_000.0),
    ("rpc", "batch_speedup", "least", 2.5),
    ("rpc", "batch_ops", "stretch", 150_000.0),
    ("rpc", "append_us", "most", 1.0),
    ("rpc", "append_round_trips", "most", 0.0),
    ("rpc", "frames_per_step", "most", 1.0),
    ("rpc", "large_others_p99", "most", 1.5),
    ("rpc", "death_others_p99", "most", 2.0),
    ("rpc", "death_hello_ms", "most", 100.0),
]
PRINTED = [("memory", "rss_mib"), ("memory", "rss_bytes_per_token")]

TINY = rpc.Size(
    nodes=2_000,
    rounds=2,
    seconds=0.1,
    large_rounds=1,
    large_seconds=0.3,
    death_paths=500,
    deaths=1,
    python_samples=300,
    steps=20,
)


@pytest.mark.parametrize("suite", ["rpc", "memory"])
def test_targets_are_those_agreed(suite: str) -> None:
    """budgets.toml holds the agreed targets, no other, and none is weaker or stronger."""
    written = {
        (suite, name, kind, getattr(budget, kind))
        for name, budget in budgets(suite).items()
        for kind in ("most", "least", "below", "stretch")
        if getattr(budget, kind) is not None
    }
    assert written == {each for each in AGREED if each[0] == suite}
    named = {(of, name) for of, name, *_ in (*AGREED, *PRINTED)}
    assert {name for of, name in named if of == suite} == set(budgets(suite))


@needs_compiler
@pytest.mark.slow
def test_every_budget_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of all groups against a live daemon gives a row for each budget, and says what it ran under."""
    monkeypatch.setattr(rpc, "QUICK", TINY)
    monkeypatch.setattr(rpc, "DEATH_WATCH_S", 1.0)
    document = benchmarks.run_rpc(quick=True, fifo=False)
    names = [each.name for each in document.results]
    assert set(budgets("rpc")) <= set(names)
    assert len(names) == len(set(names))
    assert document.meta.loop in ("asyncio", "uvloop")
    assert document.meta.priority.startswith("normal")
    assert all(each.value >= 0 for each in document.results)


@pytest.mark.slow
def test_memory_counts_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both rows are there; a token costs at least its four bytes, and the pool's own pages are not among them."""
    monkeypatch.setattr(memory, "NODES_QUICK", 2_000)
    rows = {each.name: each for each in benchmarks.run_memory(quick=True).results}
    assert set(budgets("memory")) <= set(rows)
    assert rows["rss_bytes_per_token"].samples == 2_000 * memory.TOKENS
    assert 4 < rows["grown_bytes_per_token"].value < 50
    assert rows["rss_mib"].value > rows["rss_empty_mib"].value


@pytest.mark.slow
def test_a_short_soak_is_clean() -> None:
    """Engines, deaths and rude clients for some seconds: nothing left over, nothing wrong."""
    said: list[str] = []
    document = soak.soak(9.0, seed=1, workers=3, say=said.append)
    # So short a run sees buffers grow to what they will be, such as the ring of events that the admin API replays.
    assert not [each for each in document.missed if each.name != "memory_growth"], said
    assert {each.name for each in document.results} == set(budgets("soak"))


def test_creeping_memory_fails_the_soak() -> None:
    """Two megabytes in sixty may be chance, five are not; one descriptor is one too many."""

    def rows(grown_mib: float, descriptors: int) -> dict[str, bool | None]:
        samples = [
            soak.Sample(float(at), 60 + grown_mib * at / 99, 16 + descriptors * at // 50) for at in range(100)
        ]
        found = soak.judge(samples, samples, 0.0, 10, 3, [], 0, 0, "")
        return {each.name: each.ok for each in found}

    assert all(rows(2.0, 0).values())
    assert rows(5.0, 0)["memory_growth"] is False
    assert rows(0.0, 1)["descriptors_growth"] is False


def test_painted_values_depend_on_the_whole_prefix() -> None:
    """The same token at the same place is painted otherwise after another beginning."""
    a, b = bytes([1, 0, 0, 0] * 20), bytes([2, 0, 0, 0] + [1, 0, 0, 0] * 19)
    assert (soak.painted(a) != soak.painted(b)).all()
    assert (soak.painted(a)[:7] == soak.painted(a[:28])).all()


def test_stretch_of_a_rate_is_reached_from_above() -> None:
    """More operations a second than wished for is reached, fewer is not; for times it is the other way round."""
    words = [
        bench._verdict(result(name, value, suite="rpc"))
        for name, value in (("saturated_ops", 50_000), ("saturated_ops", 30_000), ("open_us_p999", 900))
    ]
    assert words == ["reached", "not reached", "reached"]


def test_strict_fails_where_nothing_could_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler no budget is missed and none is reached: --strict says so."""
    document = benchmarks.Document(
        meta=meta(["one"], quick=True, seed=0, cost_ns=0, command=["x"], suite="rpc"), results=[]
    )
    document.meta.skipped = {"one": "no compiler"}
    monkeypatch.setattr(benchmarks, "run_rpc", lambda groups, **_: document)
    assert ctl.main(["bench", "rpc", "--only", "one"]) == 0
    assert ctl.main(["bench", "rpc", "--only", "one", "--strict"]) == 1
    assert ctl.main(["bench", "memory", "--only", "everything"]) == 2
