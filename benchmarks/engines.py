"""`kvslotctl bench engines`: real engines on the pool, against the same engines with their own cache.

    hf      transformers' generate on a `PoolCache`, against DynamicCache
    vllm    vLLM with the connector, against vLLM without it

Each group is measured by a process of its own, `python -Im kvslot.engines.GROUP.bench --json FILE`, under the Python
that has that engine: this one, or the one that KVSLOT_HF_PYTHON or KVSLOT_VLLM_PYTHON names.  Engines pin what they
depend on, so two of them seldom share an environment.  A group whose engine is not there is skipped, and
`meta.skipped` says what would help.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvslot.benchmarks.report import Document, Result, check_groups, meta, result

GROUPS: Final = ("hf", "vllm")
NEEDS: Final = {"hf": "torch, transformers", "vllm": "vllm"}
"""What has to be importable."""
PATIENCE_S: Final = 3600.0
PROBE_S: Final = 120.0
"""Importing vLLM takes half a minute on a loaded machine."""

Progress = Callable[[str, float], None]


class Row(msgspec.Struct, frozen=True):
    """What an engine's own benchmark writes."""

    name: str
    value: float
    unit: str = ""
    what: str = ""
    note: str = ""
    samples: int | None = None


def python_of(group: str) -> str:
    """The Python that measures a group."""
    return os.environ.get(f"KVSLOT_{group.upper()}_PYTHON") or sys.executable


def missing(group: str) -> str:
    """Why a group cannot be measured; "" where it can."""
    python = python_of(group)
    words = f"import {NEEDS[group]}, kvslot.engines.{group}.bench"
    try:
        done = subprocess.run(
            [python, "-Ic", words], capture_output=True, text=True, timeout=PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python}: {error}"
    if not done.returncode:
        return ""
    last = (done.stderr.strip().splitlines() or ["it does not import"])[-1]
    return f"{last} ({python}); install kvslot[{group}], or name a Python that has it in KVSLOT_{group.upper()}_PYTHON"


def measure(group: str, *, quick: bool) -> list[Result]:
    """The rows of one group.  Raises RuntimeError where its benchmark fails."""
    with tempfile.TemporaryDirectory(prefix="kvslot-") as folder:
        out = Path(folder) / "rows.json"
        words = [python_of(group), "-Im", f"kvslot.engines.{group}.bench", "--json", str(out)]
        words += ["--quick"] if quick else []
        try:
            done = subprocess.run(
                words,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the benchmark of {group} did not end within {PATIENCE_S:.0f} s") from None
        if done.returncode or not out.exists():
            lines = done.stderr.strip().splitlines()[-5:]
            raise RuntimeError(f"the benchmark of {group} ended with {done.returncode}: {' | '.join(lines)}")
        rows = msgspec.json.decode(out.read_bytes(), type=list[Row])
    return [
        result(
            each.name,
            each.value,
            unit=each.unit,
            what=each.what,
            note=each.note,
            samples=each.samples,
            suite="engines",
        )
        for each in rows
    ]


def run(
    groups: Sequence[str] = GROUPS,
    *,
    quick: bool = False,
    seed: int = 0,
    command: Sequence[str] | None = None,
    report: Progress | None = None,
) -> Document:
    """Measures the groups; raises ValueError for an unknown one."""
    check_groups(groups, GROUPS)
    began = time.monotonic()
    about = meta(
        list(groups), quick=quick, seed=seed, cost_ns=0, command=command, suite="engines",
        clock="wall clock (CLOCK_MONOTONIC)",
    )  # fmt: skip
    document = Document(meta=about, results=[])
    for index, group in enumerate(groups):
        if report is not None:
            report(group, index / len(groups))
        why = missing(group)
        if not why:
            try:
                document.results += measure(group, quick=quick)
                continue
            except RuntimeError as error:
                why = str(error)
        about.skipped[group] = why
    about.wall_s = round(time.monotonic() - began, 1)
    return document
