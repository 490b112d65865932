"""Batches joined and cut: every byte once, in every plane, in chunks no larger than asked for."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvslot.daemon.device import Geometry, Piece
from kvslot.daemon.device.chunks import ROW_BYTES, Cut, Cutter, Group, groups, joined, size_bytes

WIDTHS = ((8,), (8,) * 6, (8, 4) * 3, (8, 8, 4, 4) * 3, (8, 8, 4), (4, 8, 4, 8, 4), (3, 5, 7, 11), (5000, 1))


def cuts(parts: Sequence[Group], pieces: Sequence[Piece], room: int, weight: int = 1 << 62) -> list[Cut]:
    cutter = Cutter(parts, pieces)
    result = []
    while not cutter.ended():
        result.append(cutter.next(room, weight))
    return result


def moved(geometry: Geometry, made: Sequence[Cut]) -> dict[int, int]:
    """Byte of the pool -> the byte it was copied from; no byte may be written twice."""
    parts = groups(geometry)
    result: dict[int, int] = {}
    for group, first, beyond, source, target, length in made:
        part = parts[group]
        assert 0 <= first < beyond <= part.planes
        for plane in range(first, beyond):
            base = part.offset + plane * part.stride
            for byte in range(length):
                assert base + target + byte not in result
                result[base + target + byte] = base + source + byte
    return result


def test_groups_are_the_planes() -> None:
    """Each plane is in one group, where the geometry says it is and as wide."""
    for widths in WIDTHS:
        geometry = Geometry(slots=10, slot_bytes=widths, alignment=64)
        found = {
            part.first + nth * part.every: (part.offset + nth * part.stride, part.width)
            for part in groups(geometry)
            for nth in range(part.planes)
        }
        assert found == dict(enumerate(zip(geometry.offsets, widths, strict=True)))
    assert len(groups(Geometry(slots=10, slot_bytes=(8, 8, 4, 4) * 30))) == 4, "few calls for many planes"


def test_joined() -> None:
    """Pieces are joined where both ends follow each other, in whatever order they come, and nowhere else."""
    assert joined([(1, 11, 2), (5, 15, 1), (3, 13, 2)]) == [(1, 11, 5)]
    assert joined([(1, 11, 2), (3, 14, 2)]) == [(1, 11, 2), (3, 14, 2)]
    assert joined([(1, 11, 2), (4, 13, 2)]) == [(1, 11, 2), (4, 13, 2)]
    assert joined([(7, 30, 1), (3, 20, 4)]) == [(3, 20, 4), (7, 30, 1)]


@given(
    st.sampled_from(WIDTHS),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.one_of(st.integers(1, 200), st.integers(4000, 70000)),
    st.one_of(st.just(1 << 62), st.integers(1, 30000)),
)
def test_every_byte_is_copied_once(
    widths: tuple[int, ...], lengths: list[int], room: int, weight: int
) -> None:
    """Whatever the pieces, the planes and the room, the cuts are exactly the batch, none larger than the room."""
    if max(widths) > 1000:
        lengths, room = lengths[:2], max(room, 500)
    geometry = Geometry(slots=80, slot_bytes=widths, alignment=64)
    pieces, at = [], 0
    for nth, length in enumerate(lengths):
        pieces.append((at, 40 + at, length))
        at += length + nth % 2
    made = cuts(groups(geometry), joined(pieces), room, weight)
    assert all(0 < size_bytes(cut) <= room for cut in made)
    expected = {
        offset + target * width + byte: offset + source * width + byte
        for offset, width in zip(geometry.offsets, widths, strict=True)
        for source, target, length in pieces
        for byte in range(length * width)
    }
    assert moved(geometry, made) == expected


def test_cuts_by_plane() -> None:
    """Room is spent on as many planes of a piece as it holds, and only then on part of a row."""
    parts = groups(Geometry(slots=1 << 16, slot_bytes=(256,) * 64, alignment=4096))
    row, bytes_ = 16 * 256, (0, 32 * 256, 16 * 256)
    assert cuts(parts, [(0, 32, 16)], 256 << 10) == [(0, 0, 64, *bytes_)]
    assert cuts(parts, [(0, 32, 16)], 40 * row + 5) == [(0, 0, 40, *bytes_), (0, 40, 64, *bytes_)]
    by_weight = cuts(parts, [(0, 32, 16)], 256 << 10, 40 * (row + ROW_BYTES))
    assert by_weight == [(0, 0, 40, *bytes_), (0, 40, 64, *bytes_)]
    assert cuts(parts, [(0, 32, 16)], 256 << 10, 5)[:2] == [(0, 0, 1, *bytes_), (0, 1, 2, *bytes_)]
    long = cuts(parts, [(0, 8192, 4096)], 256 << 10)
    assert len(long) == 64 * 4
    assert {size_bytes(cut) for cut in long} == {256 << 10}


def test_rows_are_cut_at_pages() -> None:
    """A row longer than the room is cut at whole pages from its start, so that no line is copied in two halves."""
    parts = groups(Geometry(slots=64, slot_bytes=(100_000,), alignment=4096))
    made = cuts(parts, [(0, 32, 1)], 30_000)
    assert [length for *_, length in made] == [28672, 28672, 28672, 13984]
    assert [target - 3_200_000 for *_, target, _ in made] == [0, 28672, 57344, 86016]
