"""Standard output for people: colours on a terminal only, and numbers as one reads them.

Piped output has no colour and a width that no terminal gives it.  NO_COLOR and COLUMNS are heeded.
"""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.table import Table

PIPED_WIDTH: Final = 120
"""Columns where standard output is no terminal, unless COLUMNS says more."""

FULL: Final = "█"
PARTS: Final = " ▏▎▍▌▋▊▉"


class _Console(Console):
    """Leaves a reader that has gone away to `ctl.main`: by itself rich would end the process with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(width: int = PIPED_WIDTH) -> Console:
    """Standard output; at least `width` columns where it is not a terminal."""
    # No markup: names come from trace files and from clients.
    out = _Console(highlight=False, markup=False)
    return out if out.is_terminal else _Console(highlight=False, markup=False, width=max(out.width, width))


def table(*columns: str, left: tuple[str, ...] = ()) -> Table:
    """An open table.  Columns are of numbers, and never cut, but for those named in `left`, which wrap."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        text = name in left
        made.add_column(name, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    return made


def coloured(out: Console) -> bool:
    """Whether the output shows colours, and more than ASCII."""
    return out.color_system is not None and not out.no_color and unicode(out)


def unicode(out: Console) -> bool:
    """Whether the output can show more than ASCII."""
    return out.encoding.lower().startswith("utf")


def words(text: str) -> str:
    """Text that a client chose, without what would steer the terminal of whoever looks."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)


def bar(out: Console, share: float, width: int) -> str:
    """`share` (0..1) of `width` columns, in eighths where the output can show them."""
    share = min(1.0, max(0.0, share))
    if not unicode(out):
        return "#" * round(share * width)
    eighths = round(share * width * 8)
    return FULL * (eighths // 8) + (PARTS[eighths % 8] if eighths % 8 else "")


def duration(seconds: float) -> str:
    """Two units at the most: 45 s, 12 min 5 s, 3 h 20 min, 5 d 7 h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def age(seconds: float) -> str:
    """One unit, where there is little room: 45 s, 12 min, 3 h, 5 d."""
    for unit, whole in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= whole:
            return f"{int(seconds // whole)} {unit}"
    return f"{int(seconds)} s"


def size(count: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def pct(value: float) -> str:
    """A percentage: no 0 and no 100 that is not one."""
    if 0 < value < 0.1:
        return "<0.1 %"
    if 99.9 < value < 100:
        return ">99.9 %"
    return f"{value:.1f} %" if value % 1 else f"{value:.0f} %"


def share(part: float, whole: float) -> str:
    """`part` of `whole` in percent."""
    return pct(100 * part / whole) if whole else "-"
