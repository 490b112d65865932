"""Results, their targets, and the document they go into.

    {"meta": {...}, "results": [{"name", "value", "unit", "target", "ok", "ratio_to", ...}, ...]}

Targets stand in budgets.toml beside this file.  A result without a target has `ok` null.  A budget that this run has
not measured is not in `results`; `meta.groups` says what was asked for.
"""

from __future__ import annotations

import os
import platform
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

import kvslot

BUDGETS_FILE = Path(__file__).with_name("budgets.toml")

Sense = Literal["<=", ">=", "<", ""]


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """One table of budgets.toml; at most one of `most`, `least` and `below`."""

    what: str
    unit: str
    ratio_to: str | None = None
    most: float | None = None
    least: float | None = None
    below: float | None = None
    stretch: float | None = None
    more_is_better: bool = False
    """Where there is only a stretch goal, which says nothing of its direction."""

    @property
    def target(self) -> float | None:
        for bound in (self.most, self.least, self.below):
            if bound is not None:
                return bound
        return None

    @property
    def sense(self) -> Sense:
        if self.most is not None:
            return "<="
        if self.below is not None:
            return "<"
        return ">=" if self.least is not None or self.more_is_better else ""

    def holds(self, value: float) -> bool | None:
        """Whether `value` reaches the target; None where there is none."""
        if self.most is not None:
            return value <= self.most
        if self.below is not None:
            return value < self.below
        return None if self.least is None else value >= self.least


class Result(msgspec.Struct, kw_only=True):
    """One measured figure."""

    name: str
    value: float
    unit: str
    target: float | None = None
    ok: bool | None = None
    ratio_to: str | None = None
    sense: Sense = ""
    stretch: float | None = None
    what: str = ""
    samples: int | None = None
    note: str = ""
    """How the figure came about, where the numbers alone would mislead."""


class Meta(msgspec.Struct, kw_only=True):
    """Where the results come from."""

    suite: str
    version: str
    command: list[str]
    started: str
    python: str
    machine: dict[str, str | int | float]
    groups: list[str]
    quick: bool
    seed: int
    clock: str
    clock_cost_ns: int
    loop: str = ""
    """The daemon's event loop, where one was measured."""
    priority: str = ""
    """What the servers and the load ran under."""
    wall_s: float = 0.0
    skipped: dict[str, str] = {}
    """Groups that were asked for and could not run, and why."""


class Document(msgspec.Struct, kw_only=True):
    """What `--json` writes."""

    meta: Meta
    results: list[Result]

    @property
    def missed(self) -> list[Result]:
        return [result for result in self.results if result.ok is False]


def check_groups(groups: Sequence[str], known: Sequence[str]) -> None:
    """Raises ValueError for a group that a suite does not have."""
    for group in groups:
        if group not in known:
            raise ValueError(f"no group is called {group!r}; there are {', '.join(known)}")


@cache
def budgets(suite: str = "core") -> dict[str, Budget]:
    """The budgets of a suite by result name."""
    raw = tomllib.loads(BUDGETS_FILE.read_text(encoding="utf-8"))
    return msgspec.convert(raw[suite], dict[str, Budget])


def result(
    name: str,
    value: float,
    *,
    unit: str = "",
    what: str = "",
    ratio_to: str | None = None,
    samples: int | None = None,
    note: str = "",
    suite: str = "core",
) -> Result:
    """A result, judged by its budget if its suite has one; unit and words come from there then."""
    value = float(f"{value:.4g}")
    budget = budgets(suite).get(name)
    if budget is None:
        return Result(
            name=name, value=value, unit=unit, what=what, ratio_to=ratio_to, samples=samples, note=note
        )
    return Result(
        name=name,
        value=value,
        unit=budget.unit,
        target=budget.target,
        ok=budget.holds(value),
        ratio_to=budget.ratio_to,
        sense=budget.sense,
        stretch=budget.stretch,
        what=budget.what,
        samples=samples,
        note=note,
    )


def machine() -> dict[str, str | int | float]:
    """The machine in a few words."""
    cpu = platform.processor()
    memory_gib = 0.0
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemTotal"):
                memory_gib = round(int(line.split()[1]) / 2**20, 1)
    except OSError:
        pass
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "memory_gib": memory_gib,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_1m": round(os.getloadavg()[0], 2),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
    }


def meta(
    groups: Sequence[str],
    *,
    quick: bool,
    seed: int,
    cost_ns: int,
    command: Sequence[str] | None,
    suite: str = "core",
    clock: str = "thread CPU time",
) -> Meta:
    """`command` is what the user typed; this process's own arguments if None."""
    from datetime import UTC, datetime

    if command is None:
        command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return Meta(
        suite=suite,
        version=kvslot.__version__,
        command=list(command),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        machine=machine(),
        groups=list(groups),
        quick=quick,
        seed=seed,
        clock=clock,
        clock_cost_ns=cost_ns,
    )
