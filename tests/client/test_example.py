"""The example engine, as a user runs it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvslot.daemon.main import DEMO

from ..tools.daemon import Running, running

ENGINE = Path(__file__).parents[2] / "examples" / "engine.py"
DEMO_LAYOUT: Any = DEMO["pool_layout"]
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


SPOIL = """
import sys
import numpy
from kvslot import Client
with Client(sys.argv[1], name="spoiler") as client:
    rng, padding = numpy.random.default_rng(7), client.pool.description.padding
    for name in client.pool.planes:
        plane = client.pool.plane(name)
        bits = (rng.standard_normal(plane.shape).astype(numpy.float32).view(numpy.uint32) >> 16).astype(plane.dtype)
        plane[padding:] = bits[padding:]
        del plane
"""


def test_what_the_cache_holds_decides_what_the_example_says() -> None:
    """In the demo's shape: another text where others wrote over K and V, the same where a cached prompt is read."""
    with running(pools=[{"layout": {**DEMO_LAYOUT, "model": ""}, "blocks": 65}]) as daemon:
        fresh = engine(daemon, *PROMPTS)
        cached = engine(daemon, *PROMPTS)
        subprocess.run([sys.executable, "-Ic", SPOIL, str(daemon.socket)], check=True, timeout=60)
        spoiled = engine(daemon, *PROMPTS)
    assert [text for text, _ in fresh] == [text for text, _ in cached]
    assert [hit for _, hit in cached] == [hit for _, hit in spoiled] == [15, 26]
    for (said, _), (other, _) in zip(fresh, spoiled, strict=True):
        assert said != other
        assert len(set(said)) > 4, "what it says is worth looking at"


def test_the_example_is_as_short_as_it_says() -> None:
    """Sixty lines of code at most, docstrings and blank lines not counted."""
    source = ENGINE.read_text()
    words: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            words.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = [line for n, line in enumerate(source.splitlines(), 1) if line.strip() and n not in words]
    assert len(lines) <= 60
    assert "sixty lines of code" in source


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
