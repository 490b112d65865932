"""docs/client.md against the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvslot.api import client, wire
from kvslot.api.client import indices

from ..tools.daemon import running

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text(encoding="utf-8")


def test_the_first_engine_runs(tmp_path: Path) -> None:
    """The page's program does what it says, without a warning."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "engine.py"
    file.write_text(program)
    with running() as daemon:
        command = [sys.executable, "-I", "-W", "error", str(file), str(daemon.socket)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_what_is_named_is_there() -> None:
    """Every method, error, event and index builder that the page names exists, and every builder is named."""
    sequence = re.findall(r"^\| ((?:`[a-z_]+(?:\([^`]*\))?`,? ?)+)\|", PAGE, re.MULTILINE)
    names = {name for row in sequence for name in re.findall(r"`([a-z_]+)", row)}
    functions = {
        name for name in indices.__all__ if name.islower() and name not in ("pages_of", "slots_of", "within")
    }
    assert functions <= names
    known = {*dir(client.Sequence), *functions, "copies"}
    assert names <= known, names - known
    for name in re.findall(r"`([A-Z][A-Za-z]+)(?:\(|`)", PAGE):
        there = any(hasattr(place, name) for place in (client, wire, wire.messages))
        assert there or name in ("BufferError", "ResourceWarning"), name
    for name in re.findall(r"client\.([a-z_]+)", PAGE):
        if name not in ("indices", "md"):
            assert hasattr(client.Client, name) or name == "pool", name
