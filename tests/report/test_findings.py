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


def sized(made: ReplayResult, changes: dict[tuple[str, int], dict[str, object]]) -> ReplayResult:
    """The result with fields replaced by (policy, block size)."""
    rows: list[Row] = [
        msgspec.structs.replace(row, **changes.get((row.policy, row.block_size), {})) for row in made.rows
    ]
    return msgspec.structs.replace(made, rows=rows)


CALM = {"refusals": 0, "refusals_per_hour": 0.0, "pseudo_oom": 0}


def calm(sizes: tuple[int, ...] = (16, 2048)) -> ReplayResult:
    made = result(block_sizes=sizes)
    return msgspec.structs.replace(made, rows=[msgspec.structs.replace(row, **CALM) for row in made.rows])


def waiting(made: ReplayResult) -> Finding:
    [found] = [each for each in told(made) if "to wait" in each.text]
    return found


def test_refusals_are_judged_at_every_block_size() -> None:
    """Short of room at the larger blocks only: that is told, and who refuses how many."""
    assert "never short" in waiting(calm()).text
    made = sized(
        calm(),
        {
            ("paged", 2048): {"refusals": 900, "refusals_per_hour": 14302.0},
            ("hashed", 2048): {"refusals": 40, "refusals_per_hour": 647.0},
        },
    )
    found = waiting(made)
    assert found.verdict == "gain"
    assert "at 2,048 paged refuses 14,302 an hour, hashed 647, token none, slotted none" in found.text
    assert "None had to at 16" in found.text
    assert found.group == next(group.index for group in groups_of(made.rows) if group.block_size == 2048)


def test_refusals_of_contiguous_are_told_too() -> None:
    """Where contiguous alone makes requests wait, the pool was short for somebody."""
    refusing: dict[str, object] = {"refusals": 700, "refusals_per_hour": 11595.0}
    found = waiting(sized(calm(), {("contiguous", 16): refusing, ("contiguous", 2048): refusing}))
    assert "contiguous alone" in found.text
    assert "11,595 an hour" in found.text
    assert found.verdict == "fact"


def test_larger_blocks_that_find_more_are_no_negative_cost() -> None:
    """A gain is told as a gain."""
    made = sized(
        calm(),
        {("paged", 2048): {"hit_tokens_pct": 20.0}, ("slotted", 2048): {"hit_tokens_pct": 99.0}},
    )
    [text] = [each.text for each in told(made) if "instead of" in each.text]
    assert "cost hits*: paged" in text
    assert "slotted finds" in text
    assert "points more" in text
    assert "-" not in text.replace("\u2192", "")


def test_cpu_time_and_eviction_are_told_at_the_worst_block_size() -> None:
    """Neither looks at the smallest blocks alone."""
    made = sized(
        calm(),
        {("slotted", 2048): {"cpu_us_per_request": 5000.0, "evicted_hit_tokens": 10**9}},
    )
    texts = [each.text for each in told(made)]
    assert any("5,000 µs" in text and "blocks of 2,048" in text for text in texts)
    assert any(text.startswith("Eviction") and "blocks of 2,048" in text for text in texts)
