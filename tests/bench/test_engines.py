"""`kvslotctl bench engines`: targets as agreed, each engine measured by its own Python, and what is not there named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvslot import benchmarks
from kvslot.benchmarks import engines
from kvslot.benchmarks.report import budgets

TARGETS = {
    "hf_decode_write_through": 1.02,
    "hf_decode_gather": 1.25,
    "hf_ttft_warm": 0.10,
    "hf_share_pct": 1.0,
    "hf_round_trips": 0.0,
    "vllm_overhead": 1.02,
    "vllm_ttft_warm": 0.15,
}


@pytest.mark.parametrize("name", TARGETS)
def test_targets_are_as_agreed(name: str) -> None:
    """A budget is not moved by accident."""
    assert budgets("engines")[name].most == TARGETS[name]


def python(path: Path, body: str) -> str:
    """A program that is called as a Python with an engine would be."""
    path.write_text(f"#!{sys.executable}\nimport sys\nwords = sys.argv[1:]\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_rows_of_an_engine_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine's benchmark writes becomes results with targets; one that fails, or is not there, is skipped."""
    good = python(
        tmp_path / "good",
        """
if words[0] == "-Im":
    assert words[1] == "kvslot.engines.hf.bench" and "--quick" in words
    rows = '[{"name": "hf_ttft_warm", "value": 0.07}, {"name": "x", "value": 2, "unit": "ms", "what": "y"}]'
    open(words[words.index("--json") + 1], "w").write(rows)
""",
    )
    bad = python(tmp_path / "bad", "if words[0] == '-Im':\n    sys.exit('it broke')")
    monkeypatch.setenv("KVSLOT_HF_PYTHON", good)
    monkeypatch.setenv("KVSLOT_VLLM_PYTHON", bad)
    document = benchmarks.run_engines(quick=True)
    assert [(each.name, each.ok) for each in document.results] == [("hf_ttft_warm", True), ("x", None)]
    assert "it broke" in document.meta.skipped["vllm"]
    monkeypatch.setenv("KVSLOT_HF_PYTHON", python(tmp_path / "none", "sys.exit('No module named torch')"))
    document = benchmarks.run_engines(["hf"])
    assert "No module named torch" in document.meta.skipped["hf"]
    assert "KVSLOT_HF_PYTHON" in document.meta.skipped["hf"]
    monkeypatch.setenv("KVSLOT_HF_PYTHON", str(tmp_path / "nowhere"))
    assert "nowhere" in engines.missing("hf")
    with pytest.raises(ValueError, match="no group"):
        benchmarks.run_engines(["sglang"])
