"""The example engine, as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..tools.daemon import Running, running

ENGINE = Path(__file__).parents[2] / "examples" / "engine.py"
PROMPTS = ["Once upon a time", "Once upon a midnight dreary"]


def engine(daemon: Running, *arguments: str) -> list[tuple[str, int]]:
    """Runs it; what it said to each prompt, and how many tokens were cached."""
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", str(ENGINE), "--socket", str(daemon.socket), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(
        r"^.*?: (['\"].*['\"]) \((\d+) of \d+ tokens were cached\)$", done.stdout, re.MULTILINE
    )
    return [(text, int(hit)) for text, hit in found]


@pytest.mark.parametrize(
    "pool", [{}, {"append": "peel"}, {"block_size": 4}], ids=["chain", "peel", "small blocks"]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_example_says_the_same_whatever_is_cached(pool: dict[str, Any], dtype: str) -> None:
    """Fresh, from half a prompt's cache, from all of it, and in another tenant's empty one: the same words."""
    layout = {"layers": 3, "kv_heads": 2, "head_dim": 8, "dtype": dtype}
    with running(pools=[{"layout": layout, "blocks": 257, **pool}]) as daemon:
        first = engine(daemon, "--tokens", "40", *PROMPTS)
        again = engine(daemon, "--tokens", "40", *PROMPTS)
        apart = engine(daemon, "--tokens", "40", "--tenant", "b", *reversed(PROMPTS))
    assert [hit for _, hit in first] == [0, 12]
    assert [hit for _, hit in again] == [15, 26]  # all but the last, which has to be computed
    assert [hit for _, hit in apart] == [0, 12]
    assert [text for text, _ in first] == [text for text, _ in again] == [text for text, _ in reversed(apart)]
    assert len({text for text, _ in first}) == 2
