"""docs/measured.md says what is kept, and only whole runs are kept, without anybody's paths."""

from pathlib import Path

import msgspec
import pytest

from kvslot.benchmarks import keep
from kvslot.benchmarks.report import Document, Meta, Result


def document(**changes: object) -> Document:
    meta = Meta(
        suite="rpc", version="1", command=["kvslotctl", "bench", "rpc", "--json", "out/mine.json"],
        started="2026-01-01", python="CPython", machine={"cpu": "x", "cores": 1, "memory_gib": 1.0},
        groups=[], quick=False, seed=0, clock="", clock_cost_ns=0,
    )  # fmt: skip
    rows = [Result(name="one", value=1234.5, unit="x", target=2.0, ok=False, sense="<=", what="a | b")]
    return Document(meta=msgspec.structs.replace(meta, **changes), results=rows)


def written(folder: Path, made: Document) -> Path:
    path = folder / "out.json"
    path.write_bytes(msgspec.json.encode(made))
    return path


@pytest.mark.skipif(not keep.PAGE.exists(), reason="a built package has no docs")
def test_the_page_is_what_is_kept() -> None:
    """Rendering what is kept gives the page in the repository, to the letter."""
    assert keep.PAGE.read_text(encoding="utf-8") == keep.render(keep.kept())


def test_what_is_kept_names_no_file_of_who_measured(tmp_path: Path) -> None:
    """A document is kept under its suite, without the file it was written to, and missed budgets stay missed."""
    assert keep.take(written(tmp_path, document()), tmp_path / "kept") == "rpc"
    kept = keep.kept(tmp_path / "kept")
    assert kept["rpc"].meta.command == ["kvslotctl", "bench", "rpc"]
    page = keep.render(kept)
    assert "mine.json" not in page
    assert "**no**" in page
    assert "Missed, `one`" in page


@pytest.mark.parametrize("changes", [{"quick": True}, {"suite": "core"}])
def test_what_should_not_be_kept_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    """Quick runs and suites that stand elsewhere are refused, as is what is no document."""
    with pytest.raises(ValueError, match=r"quick|suite"):
        keep.take(written(tmp_path, document(**changes)), tmp_path / "kept")
    other = tmp_path / "other.json"
    other.write_text("[]")
    with pytest.raises(ValueError, match="no document"):
        keep.take(other, tmp_path / "kept")
    with pytest.raises(SystemExit):
        keep.main([str(other)])
    assert not (tmp_path / "kept").exists()
