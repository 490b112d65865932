"""Index builders against the plainest reference there is: a list of slots, one for each position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvslot.api.client import indices
from kvslot.api.wire import BadRequest


@dataclass
class Table:
    """A placed that is only that."""

    extents: list[int]
    length: int


def expanded(extents: list[int]) -> list[int]:
    return [s for i in range(0, len(extents), 2) for s in range(extents[i], extents[i] + extents[i + 1])]


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Extents anywhere, as many as there are, and a length within them."""
    pairs = draw(st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 40)), min_size=1, max_size=8))
    extents = [number for pair in pairs for number in pair]
    return Table(extents, draw(st.integers(0, sum(extents[1::2]))))


@st.composite
def paged(draw: st.DrawFn) -> tuple[Table, int]:
    """Extents in which every position has its place modulo the page, and pages are whole."""
    page = draw(st.sampled_from([1, 2, 4, 16]))
    extents: list[int] = []
    for first, pages in draw(
        st.lists(st.tuples(st.integers(1, 500), st.integers(1, 4)), min_size=1, max_size=6)
    ):
        extents += (first * page, pages * page)
        # A piece may end inside a page and the next go on there, as behind a shared prefix.
        if page > 1 and draw(st.booleans()):
            cut = draw(st.integers(1, page - 1))
            extents[-1] -= page - cut
            extents += (extents[-2] + extents[-1], page - cut)
    return Table(extents, draw(st.integers(0, sum(extents[1::2])))), page


@given(tables(), st.data())
def test_slots_are_those_of_each_position(table: Table, data: st.DataObject) -> None:
    """For any extents and any range of positions the slots come in order, one for each."""
    slots = expanded(table.extents)
    start = data.draw(st.integers(0, len(slots)))
    stop = data.draw(st.integers(start, len(slots)))
    got = indices.slot_indices(table, start, stop)
    assert got.dtype == np.int32
    assert got.tolist() == slots[start:stop]
    assert indices.slot_indices(table).tolist() == slots[: table.length]


@given(st.lists(tables(), max_size=5), st.data())
def test_new_tokens_are_written_where_they_stand(batch: list[Table], data: st.DataObject) -> None:
    """slot_mapping and write_index name the slots of the last tokens; what is filled up goes to the write padding."""
    counts = [data.draw(st.integers(0, table.length)) for table in batch]
    rows = [expanded(t.extents)[t.length - n : t.length] for t, n in zip(batch, counts, strict=True)]
    flat = [slot for row in rows for slot in row]
    mapping = indices.slot_mapping(batch, counts)
    assert mapping.dtype == np.int64
    assert mapping.tolist() == flat
    assert indices.slot_mapping(batch, counts, pad_to=len(flat) + 3, write_pad=7).tolist() == [*flat, 7, 7, 7]
    width = max(counts, default=0) + 1
    table = indices.write_index(batch, counts, width=width, write_pad=7)
    assert table.tolist() == [row + [7] * (width - len(row)) for row in rows]


@given(st.lists(tables(), max_size=5), st.booleans())
def test_rows_are_read_in_order_of_position(batch: list[Table], left: bool) -> None:
    """read_index has each sequence's slots in its row, filled up with read padding on the side that was asked for."""
    rows = [expanded(t.extents)[: t.length] for t in batch]
    width = max((len(row) for row in rows), default=0)
    pad = [[0] * (width - len(row)) for row in rows]
    wanted = [p + row if left else row + p for row, p in zip(rows, pad, strict=True)]
    assert indices.read_index(batch, left=left).tolist() == wanted


@given(st.lists(paged(), min_size=1, max_size=5))
def test_pages_find_every_token(batch: list[tuple[Table, int]]) -> None:
    """By block table as by CSR, page and place within it lead from every position to its slot."""
    page = batch[0][1]
    placed = [table for table, size in batch if size == page]
    table = indices.block_table(placed, page)
    csr = indices.flashinfer(placed, page)
    assert (
        table.dtype == csr.kv_indptr.dtype == csr.kv_indices.dtype == csr.kv_last_page_len.dtype == np.int32
    )
    assert csr.kv_indptr[0] == 0
    assert csr.kv_indptr[-1] == len(csr.kv_indices)
    for i, each in enumerate(placed):
        slots = expanded(each.extents)[: each.length]
        row = csr.kv_indices[csr.kv_indptr[i] : csr.kv_indptr[i + 1]]
        assert [int(table[i, p // page]) * page + p % page for p in range(len(slots))] == slots
        assert [int(row[p // page]) * page + p % page for p in range(len(slots))] == slots
        assert max(len(row) - 1, 0) * page + int(csr.kv_last_page_len[i]) == each.length
        assert not table[i, len(row) :].any()  # filled up with page 0, which nobody writes


@given(tables(), st.sampled_from([2, 4, 16]))
def test_pages_are_refused_where_kernels_would_read_others(table: Table, page: int) -> None:
    """Extents that do not stand in whole pages give an error, never a table that leads elsewhere."""
    slots = expanded(table.extents)[: table.length]
    right = all(
        slots[p] == slots[p - p % page] + p % page and slots[p] % page == p % page for p in range(len(slots))
    )
    if right:
        assert indices.flashinfer([table], page).kv_indices.tolist() == [s // page for s in slots[::page]]
    else:
        with pytest.raises(BadRequest):
            indices.flashinfer([table], page)


@given(tables())
def test_flashinfer_at_page_one_is_the_slots(table: Table) -> None:
    """At page size 1 pages are slots, and a last page has one token."""
    csr = indices.flashinfer([table])
    assert csr.kv_indices.tolist() == expanded(table.extents)[: table.length]
    assert csr.kv_last_page_len.tolist() == [min(table.length, 1)]


def test_what_does_not_fit_is_refused_with_the_number() -> None:
    """Positions beyond the table, rows wider than asked, and padding that nobody named are errors that say so."""
    table = Table([16, 4], 4)
    with pytest.raises(BadRequest, match="5 of a table of 4"):
        indices.slot_indices(table, 0, 5)
    with pytest.raises(BadRequest, match="begins at 0"):
        indices.slot_indices(table, 3, 2)
    with pytest.raises(BadRequest, match="width 1"):
        indices.block_table([table], 2, width=1)
    with pytest.raises(BadRequest, match="write_pad"):
        indices.slot_mapping([table], 1, pad_to=2)
    with pytest.raises(BadRequest, match="write_pad"):
        indices.write_index([table, Table([32, 4], 4)], [1, 2])
    with pytest.raises(BadRequest, match="5 new tokens"):
        indices.slot_mapping([table], 5)
    with pytest.raises(BadRequest, match="2 counts"):
        indices.slot_mapping([table], [1, 1])
    with pytest.raises(BadRequest, match="pad_to 1"):
        indices.slot_mapping([table], 2, pad_to=1, write_pad=0)
    with pytest.raises(BadRequest, match="at least one slot"):
        indices.pages_of([16, 4], 0)
