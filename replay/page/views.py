"""Rows sorted into what is looked at together.

    Setup   trace, pool, engines, routing, eviction, limit on live sequences: what an operator has
      Group   one block size of it: what stands side by side, one column per policy and sharing
        View    one phase of that: one table

A result may hold the same run twice (asked for twice); then both columns are shown.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvslot.replay.metrics import Row
from kvslot.replay.page.figures import SHARINGS


class Setup(NamedTuple):
    trace: str
    pool_tokens: int
    engines: int
    routing: str
    eviction: str
    live: int

    def words(self) -> str:
        """What was set up, the trace aside."""
        engines = f" · {self.engines} engines, {self.routing} routing" if self.engines > 1 else ""
        return f"{self.pool_tokens:,} slots · {self.live:,} live{engines} · {self.eviction}"


class Group(msgspec.Struct, kw_only=True):
    """One block size of a setup: `phases` maps a phase to its rows, in the order of the columns."""

    index: int
    setup: Setup
    block_size: int
    phases: dict[str, list[Row]]

    @property
    def rows(self) -> list[Row]:
        """The whole run, or the first phase there is."""
        return self.phases.get("all") or next(iter(self.phases.values()))

    def columns(self) -> list[str]:
        """Labels of the rows' columns."""
        both = len({row.sharing for row in self.rows}) > 1
        return [label(row, both) for row in self.rows]


def label(row: Row, with_sharing: bool) -> str:
    words = [row.policy]
    if with_sharing:
        words.append(SHARINGS.get(row.sharing, row.sharing))
    if row.means != "eviction":
        words.append(means_words(row))
    return ", ".join(words)


def means_words(row: Row) -> str:
    """What kept the pool of a run in order, where the means are told apart."""
    return {"placement": "placement alone", "eviction": "and eviction", "moves": f"moves {row.compaction}"}[
        row.means
    ]


def setup_of(row: Row) -> Setup:
    return Setup(
        row.trace,
        row.pool_tokens,
        row.engines,
        row.routing if row.engines > 1 else "sticky",
        row.eviction,
        row.live,
    )


def groups_of(rows: list[Row]) -> list[Group]:
    """All groups, setups in order of appearance, block sizes rising; columns as they came, sharing side by side."""
    by_setup: dict[Setup, dict[int, dict[str, list[Row]]]] = {}
    for row in rows:
        sizes = by_setup.setdefault(setup_of(row), {})
        sizes.setdefault(row.block_size, {}).setdefault(row.phase, []).append(row)
    groups: list[Group] = []
    for setup, sizes in by_setup.items():
        for block_size, phases in sorted(sizes.items()):
            for phase, found in phases.items():
                order = {row.policy: at for at, row in reversed(list(enumerate(found)))}
                phases[phase] = sorted(found, key=lambda row: (order[row.policy], row.sharing))
            groups.append(Group(index=len(groups), setup=setup, block_size=block_size, phases=phases))
    return groups


def by_setup(groups: list[Group]) -> dict[Setup, list[Group]]:
    found: dict[Setup, list[Group]] = {}
    for group in groups:
        found.setdefault(group.setup, []).append(group)
    return found
