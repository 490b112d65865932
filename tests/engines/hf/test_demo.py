"""`make demo` shows what it says: the second and third engine find what the first computed, and outlive it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="the engines' environment has it: make test-engines")
pytest.importorskip("transformers", reason="the engines' environment has it: make test-engines")

from kvslot.engines.hf import model


@pytest.mark.slow
def test_the_story_goes_as_it_is_told() -> None:
    """Three engines, one killed: found prompts, a sound audit, exit code 0; and nothing of it is left."""
    folder = model.cached()
    if folder is None:
        pytest.skip(f"{model.NAME} is not in {model.models()}: python -m kvslot.engines.hf.model")
    done = subprocess.run(
        [sys.executable, "-Im", "kvslot.engines.hf.demo", "--model", str(folder)],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [int(n) for n in re.findall(r"(\d+) of \d+ prompt tokens found", done.stdout)]
    assert found[0] == 0
    assert len(found) == 3, "the first's second answer was killed"
    assert all(n > 600 for n in found[1:])
    assert "Audit of the pool: sound" in done.stdout
    assert "killed with -9" in done.stdout


def test_an_engine_that_cannot_start_is_told(tmp_path: object) -> None:
    """A folder that is no model ends the demo with the engine's own words."""
    done = subprocess.run(
        [sys.executable, "-Im", "kvslot.engines.hf.demo", "--model", str(tmp_path)],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "demo:" in done.stderr
