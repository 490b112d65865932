"""`kvslotctl map`: a pool's blocks as a picture, by what they hold and how full they are.

    lines of cells, in order of address     a cell is one block, or as many as make the picture fit
    colour (piped: letter)                  what most of the cell's slots in use are
    height (piped: capital from a half on)  how many of its slots are in use

The picture is put together from what the daemon says of its owners, page by page, while it goes on serving: what
changes in those milliseconds may be shown as it was or as it has become.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from kvslot.api.client import Control

DESCRIPTION: Final = """\
A pool's blocks in order of address, by what they hold and how full they are. A cell is one block, or as many as make
the picture fit; it has the colour (piped: the letter) of what most of its slots in use are, and is as high as the share
of its slots in use (piped: a capital from a half on)."""

EXAMPLES: Final = """\
  kvslotctl map                                the first pool
  kvslotctl map --pool long --lines 60         in more detail
  kvslotctl map --blocks 4096:8192             only these blocks
  NO_COLOR=1 kvslotctl map                     letters instead of colours
  kvslotctl map --json | jq '.rows[] | select(.slots.quarantined)'
"""

LINES: Final = 24
"""Of the picture; with its legend it fits a terminal of 30."""
CELLS: Final = 128
"""Of a line at most: beyond it nobody can count any more."""
LEAST_CELLS: Final = 8


class Kind(NamedTuple):
    """How a state is shown."""

    state: str
    letter: str
    colour: str
    words: str


KINDS: Final = (
    Kind("free", ".", "bright_black", "free"),
    Kind("cached", "c", "blue", "cached, nobody reads it: goes when memory is wanted"),
    Kind("leased", "l", "cyan", "cached and read by a sequence, or pinned"),
    Kind("private", "p", "green", "a running sequence's own"),
    Kind("room", "r", "bright_green", "a running sequence's room to grow"),
    Kind("fenced", "f", "yellow", "given back, a step of a device has still to end"),
    Kind("moving", "m", "magenta", "being copied to"),
    Kind("reserved", "w", "bright_magenta", "set aside for a request that waits"),
    Kind("quarantined", "q", "red", "of a lost process"),
    Kind("padding", "#", "white", "padding, never handed out"),
)
"""In the order of the daemon's states; the first is what nothing is said of."""

HEIGHTS: Final = "▁▂▃▄▅▆▇█"
FREE_CELL: Final = "·"


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    parser = _control.add_command(
        subparsers, "map", "a pool's blocks as a picture, by state and fill", DESCRIPTION, EXAMPLES, run
    )
    parser.add_argument(
        "--lines", type=_lines, default=LINES, metavar="N", help=f"lines of the picture at most ({LINES})"
    )
    parser.add_argument(
        "--blocks", type=_span, default=None, metavar="FIRST:STOP", help="only blocks FIRST to STOP - 1 (all)"
    )


def _lines(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 10_000:
        raise argparse.ArgumentTypeError(f"{text} is not 1 to 10000")
    return value


def _span(text: str) -> tuple[int, int]:
    first, colon, stop = text.partition(":")
    try:
        span = int(first or 0), int(stop) if stop else 2**31
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:STOP, two block numbers") from None
    if not colon or not 0 <= span[0] < span[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:STOP with FIRST below STOP")
    return span


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""

    def act(control: Control) -> int:
        pool = _control.pools(control, arguments.pool)[0]
        blocks = pool["blocks"]
        first, stop = arguments.blocks or (0, blocks)
        if first >= blocks:
            return _control.fail(
                arguments, f"--blocks {first}: the pool has blocks 0 to {blocks - 1}", _common.USAGE
            )
        counts = read(control, pool)[first:stop]
        if arguments.json is not None:
            code = _control.write(arguments, control, document(pool, counts, first))
            if code or arguments.json == "-":
                return code
        from kvslot.cli import _screen

        _print(_screen.console(), pool, counts, first, arguments.lines)
        return _common.OK

    return _control.ask(arguments, act)


def read(control: Control, pool: _control.Row) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Slots of each block by state: an array of (blocks, kinds)."""
    import numpy as np

    blocks, block_size = pool["blocks"], pool["block_size"]
    number = {kind.state: index for index, kind in enumerate(KINDS)}
    slots = np.zeros(blocks * block_size, dtype=np.uint8)
    taken = max(1, pool["usable"] - pool["free"])
    seen = 0
    with _common.Bar() as bar:
        for row in control.inspect("map", pool=pool["pool"]):
            # A state of a later daemon's is shown as something that is not free.
            state = number.get(row["state"], number["private"])
            extents = row["extents"]
            for at in range(0, len(extents), 2):
                slots[extents[at] : extents[at] + extents[at + 1]] = state
            seen += sum(extents[1::2])
            bar.report("reading the map", min(1.0, seen / taken))
    by_block = slots.reshape(blocks, block_size)
    return np.stack([(by_block == index).sum(axis=1) for index in range(len(KINDS))], axis=1)


def document(pool: _control.Row, counts: np.ndarray[Any, np.dtype[np.int64]], first: int) -> dict[str, Any]:
    """The map for --json: neighbours that are alike make one row."""
    rows: list[dict[str, Any]] = []
    last: list[int] | None = None
    for block, each in enumerate(counts.tolist(), first):
        if each == last:
            rows[-1]["blocks"] += 1
            continue
        last = each
        rows.append(
            {
                "block": block,
                "blocks": 1,
                "slots": {kind.state: n for kind, n in zip(KINDS, each, strict=True) if n},
            }
        )
    totals = counts.sum(axis=0).tolist()
    return {
        "pool": {"pool": pool["pool"], "blocks": pool["blocks"], "block_size": pool["block_size"]},
        "totals": {kind.state: n for kind, n in zip(KINDS, totals, strict=True)},
        "rows": rows,
    }


def _print(
    out: Console,
    pool: _control.Row,
    counts: np.ndarray[Any, np.dtype[np.int64]],
    first: int,
    lines: int,
) -> None:
    from rich.text import Text

    from kvslot.cli import _screen

    blocks, block_size = len(counts), pool["block_size"]
    label = len(f"{first + blocks - 1:,}") + 2
    each, across = layout(blocks, out.width - label, lines)
    title = f"{pool['pool']} · {_common.several(pool['blocks'], 'block')} of {block_size} · "
    out.print(title + (f"a cell is {each:,} blocks" if each > 1 else "a cell is a block"), style="bold")
    cells = gather(counts, each)
    coloured = _screen.coloured(out)
    size = each * block_size
    for at in range(0, len(cells), across):
        line = Text(f"{first + at * each:>{label - 2},}  ", style="dim", no_wrap=True, overflow="crop")
        drawn = [_cell(cell, size, coloured=coloured) for cell in cells[at : at + across]]
        for style, alike in groupby(drawn, key=itemgetter(1)):
            line.append("".join(character for character, _ in alike), style)
        out.print(line)
    totals = counts.sum(axis=0).tolist()
    whole = sum(totals)
    legend = _screen.table(" ", "slots", "share", "", left=("",))
    for kind, total in zip(KINDS, totals, strict=True):
        if total:
            sign = Text(FREE_CELL if kind.state == "free" else HEIGHTS[-1], style=kind.colour)
            letter = kind.letter if kind.state == "free" else f"{kind.letter} {kind.letter.upper()}"
            legend.add_row(
                sign if coloured else letter, f"{total:,}", _screen.share(total, whole), kind.words
            )
    out.print(legend)


def layout(blocks: int, width: int, lines: int) -> tuple[int, int]:
    """Blocks of a cell, a power of two, and cells of a line, so that the picture has `lines` lines at most."""
    across = min(CELLS, max(LEAST_CELLS, width))
    across -= across % 8 if across < 32 else across % 16
    each = 1
    while -(-blocks // each) > across * lines:
        each *= 2
    return each, across


def gather(counts: np.ndarray[Any, np.dtype[np.int64]], each: int) -> list[list[int]]:
    """Slots by state of every `each` blocks together."""
    import numpy as np

    if each > 1:
        counts = np.add.reduceat(counts, np.arange(0, len(counts), each), axis=0)
    cells: list[list[int]] = counts.tolist()
    return cells


def _cell(counts: list[int], size: int, *, coloured: bool) -> tuple[str, str]:
    """A cell's character and style."""
    used = sum(counts[1:])
    if not used:
        return (FREE_CELL if coloured else KINDS[0].letter), KINDS[0].colour
    kind = KINDS[max(range(1, len(KINDS)), key=counts.__getitem__)]
    share = used / size  # the last cell may have fewer blocks, and is shown lower for it
    if coloured:
        return HEIGHTS[min(7, int(share * 8))], kind.colour
    return (kind.letter.upper() if share >= 0.5 else kind.letter), ""
