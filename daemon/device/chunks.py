"""A batch of pieces, joined where they touch and cut into chunks that a copy can be stopped between.

    pieces    (source slot, target slot, length): those whose sources and whose targets both follow each other are one
    groups    planes of one width that lie equally far apart: a copy of the same bytes in some of them is one call
    cut       bytes [source, source + length) of planes [first, beyond) of a group, to the same planes at `target`

        plane 0 | ....ssss........tttt...  \
        plane 1 | ....ssss........tttt...   > one cut: rows of `length` bytes
        plane 2 | ....ssss........tttt...  /

A row costs more than its bytes: the first lines of each come from memory with nothing to hide behind.  `ROW_BYTES` is
what that is worth (4 KiB rows were measured at 0.55 of the speed of one long row, rows of 16 KiB at 0.7), so that cuts
of equal weight take about the same time whatever their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvslot.daemon.device import Geometry, Piece

CHUNK_BYTES: Final = 256 << 10
"""The most that is copied without a look at the gate: 30 to 80 us."""
PAGE_BYTES: Final = 4096
"""A row that is cut is cut at whole pages from its start, if it can be."""
ROW_BYTES: Final = 2048
"""What the start of a row costs, in bytes of a long one."""


class Group(NamedTuple):
    """Planes `first`, `first + every`, ... (`planes` of them), all `width` bytes a slot and `stride` bytes apart."""

    first: int
    every: int
    planes: int
    width: int
    offset: int
    stride: int


Cut = tuple[int, int, int, int, int, int]
"""(group, first, beyond, source, target, length); see above.  `first` and `beyond` count planes within the group,
`source`, `target` and `length` are bytes of a plane."""


def size_bytes(cut: Cut) -> int:
    """What a cut copies."""
    return (cut[2] - cut[1]) * cut[5]


def groups(geometry: Geometry) -> list[Group]:
    """The planes by groups.

    Widths repeat layer by layer (k, v, k.scale, v.scale), so the k, the v, and so on are a group each; and where all
    are of one width, all of them are one.
    """
    widths, offsets = geometry.slot_bytes, geometry.offsets
    period = next(n for n in range(1, len(widths) + 1) if widths[n:] == widths[:-n])
    if len(widths) % period:
        period = len(widths)
    stride = sum(geometry.span(plane) for plane in range(period))
    count = len(widths) // period
    return [Group(first, period, count, widths[first], offsets[first], stride) for first in range(period)]


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same copies in order of their sources, in as few pieces as may be.  Requires that they do not depend on
    each other, as pieces of one batch never do."""
    result: list[Piece] = []
    for source, target, length in sorted(pieces):
        if result:
            source_last, target_last, length_last = result[-1]
            if source == source_last + length_last and target == target_last + length_last:
                result[-1] = (source_last, target_last, length_last + length)
                continue
        result.append((source, target, length))
    return result


class Cutter:
    """Where a batch has come to: `next` hands out one cut after the other, piece by piece and plane by plane."""

    __slots__ = ("_byte", "_group", "_groups", "_index", "_pieces", "_plane")

    def __init__(self, parts: Sequence[Group], pieces: Sequence[Piece]) -> None:
        self._groups = parts
        self._pieces = pieces
        self._index = 0
        self._group = 0
        self._plane = 0
        self._byte = 0  # of the present row, where it is cut

    def ended(self) -> bool:
        """Whether all has been handed out."""
        return self._index == len(self._pieces)

    def next(self, room: int, weight: int = 1 << 62) -> Cut:
        """The next cut: at most `room` (>= 1) bytes in rows of at most that `weight`, but for one row, which is as
        long as either lets it be (and a page at least, where `room` has one).  Requires that it has not ended."""
        source, target, length = self._pieces[self._index]
        number = self._group
        group = self._groups[number]
        width, plane, byte = group.width, self._plane, self._byte
        row = length * width
        if byte == 0 and row <= room and row <= weight:
            beyond = plane + (min(room // row, weight // (row + ROW_BYTES)) or 1)
            if beyond >= group.planes:
                beyond, self._plane = group.planes, 0
            else:
                self._plane = beyond
            cut = (number, plane, beyond, source * width, target * width, row)
            if self._plane:
                return cut
        else:
            size = min(row - byte, room, max(weight, PAGE_BYTES))
            if size > PAGE_BYTES and byte + size < row:
                size -= size % PAGE_BYTES
            cut = (number, plane, plane + 1, source * width + byte, target * width + byte, size)
            if byte + size < row:
                self._byte = byte + size
                return cut
            self._byte = 0
            self._plane = plane + 1
            if self._plane < group.planes:
                return cut
            self._plane = 0
        self._group = number + 1
        if self._group == len(self._groups):
            self._group = 0
            self._index += 1
        return cut


__all__ = ["CHUNK_BYTES", "ROW_BYTES", "Cut", "Cutter", "Group", "groups", "joined", "size_bytes"]
