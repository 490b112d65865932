"""The targets that `kvslotctl bench core` judges by, and the document it writes."""

import argparse
import json

import msgspec
import pytest

from kvslot import benchmarks
from kvslot.benchmarks import Document, Result, budgets, core, report
from kvslot.benchmarks.report import meta, result
from kvslot.cli import bench

DONE, MISSED, WRONG_USAGE = 0, 1, 2  # exit codes that scripts rely on

# (result, kind of bound, value): the table of budgets as it was agreed, once more and by hand.
AGREED = [
    ("allocate_300_p50", "most", 1.0),
    ("allocate_300_p99", "most", 1.5),
    ("allocate_300_us_p50", "stretch", 10),
    ("allocate_300_us_p99", "stretch", 40),
    ("allocate_8k_p50", "most", 0.4),
    ("allocate_32k_p50", "most", 0.25),
    ("probe_8k_speedup", "least", 20),
    ("probe_32k_speedup", "least", 25),
    ("free_us_p50", "stretch", 3),
    ("probe_512_us_p50", "stretch", 4),
    ("probe_8k_us_p50", "stretch", 10),
    ("probe_32k_us_p50", "stretch", 30),
    *((f"{group}_growth_{step}", "below", 2) for group in ("nodes", "blocks")
      for step in ("allocate", "commit", "free", "probe")),
    ("metadata_bytes_per_node", "most", 270),
    ("gc_full_collections", "most", 0),
    ("gc_pause_ms_max", "most", 1),
    ("packing_16", "least", 0.97),
    ("packing_528", "least", 0.96),
    ("fragmentation_pct_16", "most", 0.5),
    ("fragmentation_pct_528", "most", 2),
    ("extents_growth_16", "most", 1.3),
    ("extents_growth_528", "most", 1.3),
    ("reserved_share_16", "most", 1),
    ("reserved_share_528", "most", 1),
    ("pseudo_oom", "most", 0),
    ("pseudo_oom_72h", "most", 0),
]  # fmt: skip


def test_targets_are_those_agreed() -> None:
    """budgets.toml holds the agreed targets, no other, and none is weaker or stronger."""
    written = {
        (name, kind, getattr(budget, kind))
        for name, budget in budgets().items()
        for kind in ("most", "least", "below", "stretch")
        if getattr(budget, kind) is not None
    }
    assert written == {(name, kind, float(value)) for name, kind, value in AGREED}


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [("allocate_8k_p50", 0.4, 0.41), ("packing_16", 0.97, 0.969), ("nodes_growth_free", 1.99, 2.0)],
)
def test_a_result_is_judged_by_its_budget(name: str, good: float, bad: float) -> None:
    """At most, at least and below each mean what they say, at the edge too."""
    assert result(name, good).ok is True
    assert result(name, bad).ok is False


def test_a_stretch_goal_is_not_judged() -> None:
    """What has only a stretch goal can neither be missed nor reached."""
    slow = result("free_us_p50", 1e6)
    assert slow.ok is None
    assert (slow.target, slow.stretch) == (None, 3.0)


def test_the_document_has_the_agreed_keys() -> None:
    """Each result has name, value, unit, target, ok and ratio_to; meta says on what machine and by which command."""
    document = Document(
        meta=meta(["packing"], quick=True, seed=0, cost_ns=300, command=["kvslotctl", "bench", "core"]),
        results=[result("allocate_8k_p50", 0.3), result("free_us_p50", 2.0)],
    )
    plain = json.loads(msgspec.json.encode(document))
    assert {"name", "value", "unit", "target", "ok", "ratio_to"} <= set(plain["results"][0])
    assert plain["results"][0]["ratio_to"] == "chained"
    assert {"machine", "python", "command", "version"} <= set(plain["meta"])
    assert {"cpu", "cores", "memory_gib", "system"} <= set(plain["meta"]["machine"])


def test_unknown_groups_are_refused() -> None:
    """A group that does not exist is named, and nothing is measured."""
    with pytest.raises(ValueError, match="no group is called 'nothing'"):
        benchmarks.run(["nothing"])


def _measured(found: list[Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(groups: list[str], **_: object) -> Document:
        return Document(meta=meta(groups, quick=True, seed=0, cost_ns=1, command=["x"]), results=found)

    monkeypatch.setattr(benchmarks, "run", run)


def _arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add(parser.add_subparsers())
    return parser.parse_args(["bench", "core", *words])


def test_a_miss_changes_the_exit_code_only_under_strict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missed budget is printed as missed either way."""
    _measured([result("allocate_8k_p50", 0.9), result("packing_16", 0.99)], monkeypatch)
    assert bench.run(_arguments("--only", "packing")) == DONE
    assert bench.run(_arguments("--only", "packing", "--strict")) == MISSED
    shown = capsys.readouterr().out
    assert "missed" in shown
    assert "1 of 2 budgets reached" in shown


def test_json_on_stdout_is_nothing_but_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--json` without a file replaces the table."""
    _measured([result("packing_16", 0.99)], monkeypatch)
    assert bench.run(_arguments("--json")) == DONE
    assert json.loads(capsys.readouterr().out)["results"][0]["name"] == "packing_16"


def test_an_unknown_group_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """The command, by its whole name, names the groups there are."""
    assert bench.run(_arguments("--only", "everything")) == WRONG_USAGE
    said = capsys.readouterr().err
    assert said.startswith(
        "kvslotctl bench core: --only everything: no such group; there are packing, allocate, "
    )


def test_names_of_rows_are_never_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However long, where there is no terminal; and figures without budgets are said to be such."""
    names = [f"moved_per_given_back_servegen_m-small_chunk-12_of_many_{n}" for n in (16, 528)]
    row = result("nameless", 1.5, what="some " * 30)
    _measured([msgspec.structs.replace(row, name=name) for name in names], monkeypatch)
    assert bench.run(_arguments()) == DONE
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)
    assert "no budgets among these" in shown
    assert "0 of 0" not in shown


def test_every_budget_belongs_to_a_group() -> None:
    """No budget waits for a row that no group gives: each name appears in the code that measures."""
    from pathlib import Path

    code = "".join(path.read_text(encoding="utf-8") for path in Path(core.__file__).parent.glob("*.py"))
    for name in report.budgets():
        # Names with a variable part are built from pieces such as f"{group}_growth_{name}".
        pieces = [piece for piece in name.split("_") if piece.isalpha() and len(piece) > 3]
        assert all(piece in code for piece in pieces), name
