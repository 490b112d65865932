"""The sentences of "In short": they say what the rows say, and call a nothing a nothing."""

from __future__ import annotations

import msgspec

from kvslot.replay.metrics import ReplayResult, Row, Spread
from kvslot.replay.page.findings import Finding, findings
from kvslot.replay.page.views import groups_of

from .synthetic import result


def told(made: ReplayResult) -> list[Finding]:
    return findings(groups_of(made.rows))


def changed(made: ReplayResult, policy: str, **changes: object) -> ReplayResult:
    """The result with fields of one policy's rows replaced."""
    rows: list[Row] = [
        msgspec.structs.replace(row, **changes) if row.policy == policy else row for row in made.rows
    ]
    return msgspec.structs.replace(made, rows=rows)


def test_a_gain_is_told_with_both_figures() -> None:
    """Where exclusive blocks waste more than slots, the sentence is a gain and names both shares."""
    [first, *_] = told(result(block_sizes=(16,)))
    assert first.verdict == "gain"
    assert "8.00 %" in first.text
    assert "0.50 %" in first.text


def test_nothing_is_called_nothing() -> None:
    """Where slots save nothing, or exact sharing finds nothing more, the sentence says so."""
    made = changed(result(block_sizes=(16,)), "paged", internal_fragmentation_pct=Spread(0.6, 1.0))
    made = changed(made, "hashed", hit_tokens_pct=59.9)
    waste, hits, *_ = told(made)
    assert (waste.verdict, hits.verdict) == ("nothing", "nothing")
    assert "save no memory" in waste.text
    assert "nothing more" in hits.text


def test_a_loss_is_not_hidden() -> None:
    """Where ours finds less, wastes more or costs more, the sentence is a price."""
    made = changed(result(block_sizes=(16,)), "slotted", hit_tokens_pct=10.0, cpu_us_per_request=900.0)
    made = changed(made, "slotted", internal_fragmentation_pct=Spread(30.0, 40.0))
    prices = [each.text for each in told(made) if each.verdict == "price"]
    assert len(prices) >= 3
    assert any("10.0 %" in text for text in prices)
    assert any("900 µs" in text for text in prices)
    assert any("30.0 %" in text for text in prices)


def test_a_mixed_outcome_is_neither() -> None:
    """Better at one block size and worse at another is a note, not a gain."""
    made = result(block_sizes=(16, 528))
    rows = [
        msgspec.structs.replace(row, hit_tokens_pct=10.0 if row.block_size == 16 else 60.0)
        if row.policy == "slotted"
        else row
        for row in made.rows
    ]
    hits = told(msgspec.structs.replace(made, rows=rows))[1]
    assert hits.verdict == "fact"


def test_one_pool_is_compared_with_a_pool_each() -> None:
    """With both sharings replayed, one sentence compares them and counts the refusals that had room elsewhere."""
    made = result(sharings=("partitioned", "shared"), block_sizes=(16,), phases=("all",))
    made = msgspec.structs.replace(
        made,
        rows=[
            msgspec.structs.replace(row, hit_tokens_pct=20.0) if row.sharing == "partitioned" else row
            for row in made.rows
        ],
    )
    [pools] = [each for each in told(made) if "One pool for 4 engines" in each.text]
    assert pools.verdict == "gain"
    assert "20.0 %" in pools.text
    assert "room" in pools.text


def test_without_ours_nothing_is_judged() -> None:
    """Where slotted was not replayed, figures are told and no verdict is given."""
    found = told(result(policies=("paged", "hashed")))
    assert found
    assert {each.verdict for each in found} == {"fact"}


def test_no_rows_no_sentences() -> None:
    """Nothing replayed, or no whole run, gives no finding and no error."""
    assert findings([]) == []
    assert told(result(phases=("steady",))) == []


def test_every_finding_points_at_a_group() -> None:
    """`Show` leads to a group that exists, whatever was replayed."""
    for made in (result(), result(policies=("slotted",)), result(policies=("token",), block_sizes=(1,))):
        groups = groups_of(made.rows)
        assert all(0 <= each.group < len(groups) for each in findings(groups))
