"""A pool before and after compaction to rest, drawn without a script.

A cell is a block, or a stretch of as many blocks for all cells; cells go line by line.  All cells of one level make one
path, so a picture of a thousand cells is some kilobytes.  Levels and colours are those of the other pictures.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvslot.replay.metrics import Compacted, Picture, Run, quiet_nights
from kvslot.replay.page.figures import count, pct
from kvslot.replay.page.html import Html, el, join, name
from kvslot.replay.page.packing import levels

CELLS_MAX: Final = 1024
ACROSS: Final = 64
PICTURES_MAX: Final = 12
"""Pairs in one page."""
FULL: Final = 15


def section(runs: list[Run]) -> Html:
    """The pairs of all runs that have one; empty where none has."""
    shown = [run for run in runs if run.compacted is not None]
    if not shown:
        return Html("")
    parts = [_pair(run, run.compacted) for run in shown[:PICTURES_MAX] if run.compacted is not None]
    left = len(shown) - len(parts)
    if left:
        parts.append(el("p", f"{left} more are left out to keep the page small.", class_="note"))
    return join(
        el("h2", "Compaction, before and after", id="compaction-h"),
        el(
            "p",
            "The pool at the end of the run in which nothing was moved, part of it then evicted as in a quiet night, "
            "and the same pool once every move that gains something has been made. Light: nearly empty; dark: full.",
            class_="note",
        ),
        *parts,
    )


def _pair(run: Run, told: Compacted) -> Html:
    per_cell = -(-len(told.before.blocks) // CELLS_MAX) if told.before.blocks else 1
    blocks = run.usable_tokens / run.block_size / max(1, -(-len(told.before.blocks) // per_cell))
    cell = "a block" if blocks < 1.5 else f"about {count(blocks)} blocks"
    words = (
        f"{pct(told.occupancy_pct)} % of the slots hold tokens. {count(told.moved_tokens)} tokens were moved: wholly "
        f"free blocks {count(told.blocks_free_before)} → {count(told.blocks_free_after)}; free memory usable as runs "
        f"of 32 blocks {pct(told.usable_run_pct_before)} → {pct(told.usable_run_pct_after)} %. A cell is {cell}."
    )
    (night,) = quiet_nights([run])
    if night.moved_per_given_back is not None:
        words += f" That is {night.moved_per_given_back:.2f} tokens moved a slot given back."
    return el(
        "article",
        el("h3", name(run.trace), el("small", f"blocks of {run.block_size:,} · {run.pool_tokens:,} slots")),
        el(
            "div",
            _figure("Before", told.before, per_cell),
            _figure("After", told.after, per_cell),
            class_="stacks",
        ),
        el("p", words, class_="note"),
        class_="compacted",
    )


def _figure(title: str, picture: Picture, per_cell: int) -> Html:
    cells = _cells(picture.blocks, per_cell)
    empty, full = cells.count(0), cells.count(FULL)
    told = (
        f"{title}: {count(full)} full, {count(len(cells) - full - empty)} partly filled, {count(empty)} empty"
    )
    down = -(-len(cells) // ACROSS)
    paths: list[Html] = []
    for level in range(FULL + 1):
        data = "".join(f"M{at % ACROSS} {at // ACROSS}h{n}v1h-{n}z" for at, n in _stretches(cells, level))
        if data:
            paths.append(el("path", d=data, class_=f"fill-{level}"))
    return el(
        "figure",
        el("figcaption", title),
        el(
            "svg",
            *paths,
            viewBox=f"0 0 {ACROSS} {down}",
            role="img",
            aria_label=told,
            preserveAspectRatio="xMinYMin meet",
        ),
        class_="plot pool still",
    )


def _cells(blocks: bytes, per_cell: int) -> list[int]:
    """Levels 0..15; the mean of a cell's blocks, and only what is wholly empty or full counts as that."""
    values = np.frombuffer(blocks, dtype=np.uint8).astype(np.float64)
    if not len(values):
        return []
    edges = np.arange(0, len(values), per_cell)
    means = np.add.reduceat(values, edges) / np.diff(np.append(edges, len(values)))
    rounded = np.where(means <= 0, 0, np.where(means >= 255, 255, np.clip(np.rint(means), 1, 254)))
    return [int(each) for each in levels(rounded.astype(np.uint8).tobytes())]


def _stretches(cells: list[int], level: int) -> list[tuple[int, int]]:
    """(first cell, how many) of this level, none across a line's end."""
    found: list[tuple[int, int]] = []
    for at, each in enumerate(cells):
        if each != level:
            continue
        if found and sum(found[-1]) == at and at % ACROSS:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((at, 1))
    return found


def styles() -> str:
    """The levels' colours."""
    rules = [
        "#compaction svg { display: block; width: 100%; margin-top: .5rem; }",
        ".fill-0 { fill: var(--cell-0); }",
    ]
    for level in range(1, FULL + 1):
        at = (level - 1) / (FULL - 1) * 2
        low, share = (1, at) if at < 1 else (2, at - 1)
        mixed = f"color-mix(in srgb, var(--cell-{low + 1}) {100 * share:.0f}%, var(--cell-{low}))"
        rules.append(f".fill-{level} {{ fill: {mixed}; }}")
    return "\n".join(rules)
