"""The bench of low-priority copies: its rows are there, on a pool too small for its figures to mean anything."""

import pytest

from kvslot.benchmarks import copies
from kvslot.benchmarks.report import budgets

SMALL = 128 << 20


def test_speed_rows() -> None:
    """Each size has its ratio to one memcpy, its ratio to a loop in C, and its bandwidth."""
    rows = {row.name: row for row in copies.copy_speed(quick=True, sizes=(16,), pool_bytes=SMALL // 4)}
    assert list(rows) == ["copy_16k", "copy_16k_native", "copy_16k_gbps"]
    assert rows["copy_16k"].value > 0
    assert rows["copy_16k_gbps"].value > 0
    assert rows["copy_16k"].ok is not None, "it has a budget"


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C compiler the loop in C is left out, and nothing else."""
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", "")
    rows = {row.name: row for row in copies.copy_speed(quick=True, sizes=(4,), pool_bytes=SMALL // 4)}
    assert rows["copy_4k_native"].note == "no C compiler"
    assert rows["copy_4k"].value > 0


@pytest.mark.parametrize("loaded", [False, True])
def test_an_engine_sees_copies_end(loaded: bool) -> None:
    """Whatever an engine sees of copies, it sees them end; there are no more begins that met one than there were."""
    made = copies.stops(steps=8, loaded=loaded, pool_bytes=SMALL)
    assert made.steps == 8
    assert len(made.late) <= 8
    assert all(late > 0 for late in made.late)


def test_budgets_have_their_rows() -> None:
    """Every budget of a copy has a function here that returns its row."""
    names = {name for name in budgets("compaction") if name.startswith(("copy_", "step_to_last_byte"))}
    assert names == {"copy_16k", "copy_4k", "step_to_last_byte", "step_to_last_byte_loaded"}
