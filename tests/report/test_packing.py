"""Series and pictures survive being made small: values to the precision stated, kinds of cells exactly."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvslot.replay.metrics import Picture
from kvslot.replay.page.packing import (
    LEVELS,
    NO_VALUE,
    STATES,
    levels,
    numbers,
    pack,
    pack_pictures,
    pack_series,
    state_means,
)

from .synthetic import POOL, run


def unpack(packed: list[Any]) -> list[float | None]:
    """As the page's script does it."""
    largest, text = packed
    raw = np.frombuffer(base64.b64decode(text), dtype="<u2")
    return [None if value == NO_VALUE else value / (NO_VALUE - 1) * largest for value in raw.tolist()]


def one(points: int = 300, cells: int = 100, policy: str = "slotted") -> Any:
    return run(policy, 16, trace="t", points=points, cells=cells, sharing="shared", engines=1)


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e9)), max_size=50))
def test_numbers_come_back(values: list[float | None]) -> None:
    """A list comes back within a 60,000th of its largest value, and gaps stay gaps."""
    packed = numbers(np.array([np.nan if value is None else value for value in values], dtype=np.float64))
    back = unpack(packed)
    top = max((value for value in values if value is not None), default=0.0)
    assert len(back) == len(values)
    for before, after in zip(values, back, strict=True):
        if before is None:
            assert after is None
        else:
            assert after == pytest.approx(before, abs=top / 60_000 + 1e-6)


@pytest.mark.parametrize("points", [1, 59, 60, 61, 299, 600, 1000])
def test_thinning_keeps_ends_means_and_sums(points: int) -> None:
    """However few points are kept, the run ends when it ended, and refusals add up to what was refused."""
    whole = one(points)
    for limit in (600, 60, 7):
        packed = pack_series(whole, limit)
        assert 0 < packed["n"] <= limit
        assert unpack(packed["time"])[-1] == pytest.approx(whole.series.time_s[-1], rel=1e-4)
        assert unpack(packed["refusals"])[-1] == pytest.approx(sum(whole.series.refusals), abs=0.01)


def test_states_fill_the_pool() -> None:
    """The states of every point add up to the pool, stranded slots included."""
    whole = one(policy="paged")
    packed = pack_series(whole, 100)
    total = [
        sum(column) for column in zip(*(unpack(each) for each in packed["states"].values()), strict=True)
    ]
    assert total == pytest.approx([POOL] * packed["n"], abs=20)
    assert "stranded" in packed["states"]
    means = state_means(whole, 0.0, 1e9)
    assert list(means) == [key for key, _, _ in STATES]
    assert sum(means.values()) == pytest.approx(1.0, abs=1e-3)


def test_only_empty_is_empty_and_only_full_is_full() -> None:
    """Of 256 fills, exactly one is drawn as empty and one as full; the rest rise evenly in between."""
    found = levels(bytes(range(256))).tolist()
    assert found == sorted(found)
    assert found.count(0) == found.count(15) == 1
    assert {found.count(level) for level in range(1, 15)} <= {18, 19}


@pytest.mark.parametrize("cells", [1, 2, 3, 511, 512, 513, 4095, 4096])
def test_pictures_keep_their_cells(cells: int) -> None:
    """As many cells as blocks, or as the level allows; a joined cell with one token in it is not empty."""
    blocks = bytes([1] + [0] * (cells - 1))
    for level in (LEVELS[0], LEVELS[-1]):
        [[_, _, count, joined, text]] = pack_pictures(
            [Picture(time_s=1.0, progress=0.5, blocks=blocks)], level
        )
        assert count <= level.cells
        assert (count - 1) * joined < cells <= count * joined
        raw = base64.b64decode(text)
        assert len(raw) == -(-count // 2)
        assert raw[0] >> 4 == 1


def test_what_is_equal_is_stored_once() -> None:
    """Two runs with the same course share it, though their block sizes differ."""
    packed = pack([one(), one(), one(policy="paged")])
    assert packed.series_of == [0, 0, 1]
    assert packed.pictures_of == [0, 0, 0]


def test_budget_is_kept() -> None:
    """Runs that do not fit get fewer points and cells, until they fit."""
    runs = [one(points=500 + i, cells=4096) for i in range(12)]
    packed = pack(runs, budget=100_000)
    assert packed.level != LEVELS[0]
    assert len(str(packed.series)) + len(str(packed.pictures)) < 110_000


def test_uneven_series_are_left_out() -> None:
    """Lists that do not belong together are not drawn, rather than drawn wrong."""
    broken = one()
    broken.series.cached.pop()
    assert pack_series(broken, 100) == {}
    assert state_means(broken, 0.0, 10.0) == {}
