"""Series and pictures made small enough to travel inside the page.

A list of numbers becomes `[largest, text]`: base64 of little-endian 16-bit numbers, 0..65534 for 0..largest, 65535 for
"no value".  A picture of blocks becomes base64 of 4-bit levels, the first cell in the high half of a byte: 0 is exactly
empty, 15 exactly full, 1..14 share the rest evenly.  What two runs have in common (a policy that knows no block size)
is stored once.  If all runs together do not fit the budget, all get fewer points and cells: `LEVELS`, coarser
downwards.

Thinning joins neighbouring buckets: gauges keep their mean, counts their sum; peaks survive in the table.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvslot.replay.metrics import Picture, Run, Series

BUDGET_BYTES: Final = 1_300_000
"""For all series and pictures: with the tables of the demo, the page stays below 2 MB."""
NO_VALUE: Final = 65535

STATES: Final[tuple[tuple[str, str, str], ...]] = (
    ("cached", "cached", "in the shared prefix tree, in use by somebody or not"),
    ("private", "private", "written by a running sequence, not shareable yet"),
    ("duplicates", "duplicate", "written, but the same tokens are also held elsewhere"),
    ("peeled", "peeled", "copies made to append after a shared partial slot"),
    ("fenced", "fenced", "given back, not reusable before a step has completed"),
    ("quarantined", "quarantined", "of a lost session whose process may still run"),
    ("moving", "moving", "source or target of a move under way"),
    ("reserved", "reserved", "given to a running sequence to grow into, not written yet"),
    ("stranded", "stranded", "empty, in a block that nobody else may use"),
    ("free", "free", "holds nothing and can be handed out"),
)
"""Key, word, meaning; in the order in which they are stacked.  `stranded` is what the others leave of the pool."""


class Level(NamedTuple):
    points: int
    cells: int
    pictures: int


LEVELS: Final = (
    Level(600, 4096, 6),
    Level(400, 4096, 6),
    Level(300, 2048, 6),
    Level(200, 2048, 4),
    Level(150, 1024, 4),
    Level(100, 1024, 3),
    Level(60, 512, 2),
)

Floats = npt.NDArray[np.float64]


class Packed(NamedTuple):
    """Ready to become JSON.  `series_of` and `pictures_of`: per run an index, -1 for none."""

    series: list[Any]
    series_of: list[int]
    pictures: list[Any]
    pictures_of: list[int]
    level: Level


def pack(runs: Sequence[Run], budget: int = BUDGET_BYTES) -> Packed:
    """All runs at the finest level that fits the budget; at the coarsest if none does."""
    packed = _pack(runs, LEVELS[0])
    for level in LEVELS[1:]:
        if _size(packed) <= budget:
            break
        packed = _pack(runs, level)
    return packed


def _size(packed: Packed) -> int:
    return len(msgspec.json.encode((packed.series, packed.pictures)))


def _pack(runs: Sequence[Run], level: Level) -> Packed:
    packed = Packed([], [], [], [], level)
    known: dict[bytes, int] = {}
    for run in runs:
        for made, store, places in (
            (pack_series(run, level.points), packed.series, packed.series_of),
            (pack_pictures(run.pictures, level), packed.pictures, packed.pictures_of),
        ):
            if not made:
                places.append(-1)
                continue
            key = msgspec.json.encode(made)
            if key not in known:
                known[key] = len(store)
                store.append(made)
            places.append(known[key])
    return packed


def numbers(values: Floats) -> list[Any]:
    """`[largest, base64]`; negative values count as 0, NaN as no value."""
    known = values[np.isfinite(values)]
    top = float(known.max()) if len(known) else 0.0
    scaled = np.full(len(values), NO_VALUE, dtype="<u2")
    fine = np.isfinite(values)
    scaled[fine] = np.rint(np.clip(values[fine], 0.0, None) / top * (NO_VALUE - 1)) if top > 0 else 0
    return [round(top, 6), base64.b64encode(scaled.tobytes()).decode()]


def _even(series: Series) -> bool:
    """Whether anything was sampled, and all lists belong together."""
    lengths = {len(getattr(series, key)) for key in Series.__struct_fields__}
    return len(lengths) == 1 and lengths != {0}


def pack_series(run: Run, points: int) -> dict[str, Any]:
    """A run over time; {} where nothing was sampled or the lists do not belong together."""
    series = run.series
    total = len(series.time_s)
    if not _even(series):
        return {}
    edges = np.arange(0, total, -(-total // points))
    sizes = np.diff(np.append(edges, total))

    def array(key: str) -> Floats:
        return np.array(
            [np.nan if value is None else value for value in getattr(series, key)], dtype=np.float64
        )

    def mean(values: Floats) -> Floats:
        """Of what is known in each stretch; NaN where nothing is."""
        fine = np.isfinite(values)
        sums = np.add.reduceat(np.where(fine, values, 0.0), edges)
        seen = np.add.reduceat(fine.astype(np.float64), edges)
        means: Floats = np.where(seen > 0, sums / np.maximum(seen, 1.0), np.nan)
        return means

    states = {key: mean(array(key)) for key, _, _ in STATES if key != "stranded"}
    rest = run.usable_tokens - sum(states.values())
    # Gauges are rounded before they get here: a slot or two is no state.
    states["stranded"] = np.where(rest > len(states), rest, 0.0)
    return {
        "n": len(edges),
        "usable": run.usable_tokens,
        "time": numbers(array("time_s")[edges + sizes - 1]),
        "fragmentation": numbers(mean(array("internal_fragmentation_pct"))),
        "hits": numbers(mean(array("hit_tokens_pct"))),
        "live": numbers(mean(array("live_sequences"))),
        "refusals": numbers(np.cumsum(np.add.reduceat(array("refusals"), edges))),
        "pseudo": numbers(np.cumsum(np.add.reduceat(array("pseudo_oom"), edges))),
        "states": {key: numbers(states[key]) for key, _, _ in STATES if states[key].max(initial=0.0) > 0},
    }


def state_means(run: Run, start_s: float, end_s: float) -> dict[str, float]:
    """Mean share, 0..1, of the pool in each state between two moments; {} where nothing was sampled then."""
    series, usable = run.series, run.usable_tokens
    if usable <= 0 or not _even(series):
        return {}
    inside = [i for i, time in enumerate(series.time_s) if start_s < time <= end_s] or [
        min(range(len(series.time_s)), key=lambda i: abs(series.time_s[i] - end_s))
    ]
    means = {
        key: sum(getattr(series, key)[i] for i in inside) / len(inside) / usable
        for key, _, _ in STATES
        if key != "stranded"
    }
    rest = 1.0 - sum(means.values())
    means["stranded"] = rest if rest * usable > len(means) else 0.0
    return {key: means[key] for key, _, _ in STATES}


def levels(blocks: bytes) -> npt.NDArray[np.uint8]:
    """One byte a block (0..255) to one level (0..15); only 0 becomes 0 and only 255 becomes 15."""
    values = np.frombuffer(blocks, dtype=np.uint8).astype(np.int64)
    middle = 1 + (values - 1) * 14 // 254
    return np.where(values == 0, 0, np.where(values == 255, 15, middle)).astype(np.uint8)


def pack_pictures(pictures: Sequence[Picture], level: Level) -> list[Any]:
    """`[[time_s, progress, cells, joined, base64], ...]`; `joined`: how many of the run's cells one cell stands for."""
    chosen = list(pictures)
    if len(chosen) > level.pictures:
        step = (len(chosen) - 1) / (level.pictures - 1)
        chosen = [chosen[round(i * step)] for i in range(level.pictures)]
    made: list[Any] = []
    for picture in chosen:
        blocks = picture.blocks
        if not blocks:
            continue
        joined = -(-len(blocks) // level.cells)
        if joined > 1:
            values = np.frombuffer(blocks, dtype=np.uint8).astype(np.float64)
            edges = np.arange(0, len(values), joined)
            means = np.add.reduceat(values, edges) / np.diff(np.append(edges, len(values)))
            # A mean that is neither empty nor full must not be rounded to either.
            rounded = np.where(means <= 0, 0, np.where(means >= 255, 255, np.clip(np.rint(means), 1, 254)))
            blocks = rounded.astype(np.uint8).tobytes()
        cells = levels(blocks)
        halves = np.append(cells, np.uint8(0)) if len(cells) % 2 else cells
        text = base64.b64encode((halves[0::2] << 4 | halves[1::2]).astype(np.uint8).tobytes()).decode()
        made.append([round(picture.time_s, 3), round(picture.progress, 4), len(cells), joined, text])
    return made
