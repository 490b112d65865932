"""Lengths of what ended: percentiles, drift and waste are those of a naive recount, and memory does not grow."""

from __future__ import annotations

import math
import random

import pytest

from kvslot.daemon import process
from kvslot.daemon.lengths import KEPT, Lengths


def naive_drift(first: list[int], last: list[int]) -> float:
    return max(
        abs(sum(a <= n for a in first) / len(first) - sum(b <= n for b in last) / len(last))
        for n in {*first, *last}
    )


def naive_waste(lengths: list[int], size: int) -> float:
    taken = sum(math.ceil(n / size) * size for n in lengths)
    return 100 * (taken - sum(lengths)) / taken


@pytest.mark.parametrize("number", [4, 5, 100, KEPT, KEPT + 7, 2 * KEPT, 3 * KEPT + 11])
def test_it_says_what_a_recount_says(number: int) -> None:
    """Whatever the number that have ended: first and last share none, and each figure is that of its list."""
    rng = random.Random(number)
    all_of_them = [rng.randrange(1, 400 + 3 * n // 8) for n in range(number)]
    kept = Lengths()
    for each in all_of_them:
        kept.add(each)
    row = kept.row(24)
    early = min(KEPT, number // 2)
    first, last = all_of_them[:early], all_of_them[early:][-KEPT:]
    assert (row["ended"], row["first"]["count"], row["last"]["count"]) == (number, len(first), len(last))
    assert row["drift"] == (pytest.approx(naive_drift(first, last)) if early >= 2 else None)
    assert set(row["waste_pct"]) >= {"1", "16", "24", "256"}
    for size, waste in row["waste_pct"].items():
        assert waste == pytest.approx(naive_waste(last, int(size)))
    for told, lengths in ((row["first"], sorted(first)), (row["last"], sorted(last))):
        assert told["mean"] == pytest.approx(sum(lengths) / len(lengths))
        for share in (10, 50, 90, 99):
            assert told[f"p{share}"] == lengths[math.ceil(len(lengths) * share / 100) - 1]


def test_before_anything_has_ended_there_is_nothing_to_tell() -> None:
    """No sequence, one, and no drift of one against one."""
    kept = Lengths()
    assert kept.row(16)["drift"] is None
    assert kept.row(16)["waste_pct"]["16"] == 0.0
    kept.add(10)
    row = kept.row(16)
    assert (row["first"]["count"], row["last"]["count"], row["drift"]) == (0, 1, None)
    assert row["waste_pct"]["16"] == pytest.approx(37.5)


def test_a_load_like_that_of_the_start_drifts_little_and_another_much() -> None:
    """What doctor calls a drift (0.25) is far from chance, and near to any other load."""
    rng = random.Random(7)
    same, other = Lengths(), Lengths()
    for n in range(4 * KEPT):
        length = round(rng.lognormvariate(6, 1)) + 1
        same.add(length)
        other.add(length if n < KEPT else length // 3 + 1)
    assert same.row(16)["drift"] < 0.1
    assert other.row(16)["drift"] > 0.3


def test_the_process_knows_its_limits_and_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors are counted, and the configuration is found however it was given."""
    row = process.facts()
    assert 3 <= row["descriptors"] <= row["descriptors_max"]
    with open("/dev/null"):
        assert process.facts()["descriptors"] == row["descriptors"] + 1
    monkeypatch.setenv("KVSLOT_CONFIG", "/etc/a.toml")
    assert process.config_file(["kvslotd"]) == "/etc/a.toml"
    assert process.config_file(["kvslotd", "--config", "/etc/b.toml"]) == "/etc/b.toml"
    assert process.config_file(["kvslotd", "--config=/etc/c.toml", "--demo"]) == "/etc/c.toml"
    monkeypatch.delenv("KVSLOT_CONFIG")
    assert process.config_file(["kvslotd", "--demo"]) == ""
