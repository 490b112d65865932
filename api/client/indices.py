"""From extents to the index arrays that kernels want.

    slot_indices     the slot of each position                    int32   (tokens,)          SGLang, any gather
    slot_mapping     where each new token is written              int64   (new tokens,)      vLLM's reshape_and_cache
    block_table      the pages of each sequence, a row each       int32   (rows, columns)    vLLM, paged attention
    flashinfer       kv_indptr, kv_indices, kv_last_page_len      int32   CSR                FlashInfer, page 1 or n
    read_index       where each position is read from             int64   (rows, tokens)     HF transformers
    write_index      where each new token is written              int64   (rows, tokens)     HF transformers

A *placed* is whatever has `extents` (flat slot, length, ...) and `length`: a Sequence, or anything like one.  Pages
are `page` slots at multiples of `page`; a table of pages needs every position to have its place modulo the page, which
holds in a session that was opened with that page size, and is checked.

Padding: what a row lacks is read from `read_pad` (slot or page 0: zero, never written) and written to `write_pad`
(`client.pool.write_padding`: written by anybody, read by nobody).  The two are never the same slot.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvslot.api.wire import BadRequest

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


class Placed(Protocol):
    """What has its tokens in extents."""

    @property
    def extents(self) -> list[int]: ...
    @property
    def length(self) -> int: ...


class Csr(NamedTuple):
    """FlashInfer's paged table: row i has pages `kv_indices[kv_indptr[i]:kv_indptr[i + 1]]`."""

    kv_indptr: Ints  # (rows + 1,)
    kv_indices: Ints  # (pages,)
    kv_last_page_len: Ints  # (rows,): tokens in each row's last page, 1..page; 0 for a row without tokens


def within(extents: list[int], start: int, stop: int) -> list[int]:
    """The part of flat extents that places positions [start, stop)."""
    if not 0 <= start <= stop:
        raise BadRequest(
            f"positions [{start}, {stop}): a range begins at 0 or later, and ends where it began or later"
        )
    out: list[int] = []
    position = 0
    for i in range(0, len(extents), 2):
        if position >= stop:
            break
        length = extents[i + 1]
        low, high = max(start - position, 0), min(stop - position, length)
        if low < high:
            out += (extents[i] + low, high - low)
        position += length
    if stop > max(position, start):
        raise BadRequest(f"positions up to {stop} of a table of {position}")
    return out


def slots_of(extents: list[int], dtype: DTypeLike = np.int32) -> NDArray[Any]:
    """Every slot of flat extents, in order."""
    pairs = np.asarray(extents, dtype=np.int64).reshape(-1, 2)
    lengths = pairs[:, 1]
    if len(lengths) == 1:
        return np.arange(pairs[0, 0], pairs[0, 0] + pairs[0, 1], dtype=dtype)
    before = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    slots: NDArray[Any] = np.arange(total, dtype=np.int64)
    slots += np.repeat(pairs[:, 0] - before, lengths)
    return slots.astype(dtype, copy=False)


def slot_indices(
    placed: Placed, start: int = 0, stop: int | None = None, dtype: DTypeLike = np.int32
) -> NDArray[Any]:
    """The slots of positions [start, stop) (all tokens, unless said), in order."""
    return slots_of(within(placed.extents, start, placed.length if stop is None else stop), dtype)


def slot_mapping(
    batch: Ordered[Placed], new: int | Ordered[int] = 1, *, pad_to: int = 0, write_pad: int | None = None
) -> Longs:
    """Where the last `new` tokens of each sequence (a number, or one for each) are written, one after the other.

    With `pad_to` the result has that length, and `write_pad` stands for what is missing.
    """
    counts = _counts(batch, new)
    parts = [
        slot_indices(each, each.length - n, dtype=np.int64) for each, n in zip(batch, counts, strict=True)
    ]
    if pad_to:
        missing = pad_to - sum(counts)
        if missing < 0:
            raise BadRequest(f"pad_to {pad_to}: there are {sum(counts)} new tokens")
        if missing and write_pad is None:
            raise BadRequest("pad_to needs write_pad: the pool's `write_padding`, never a slot that is read")
        parts.append(np.full(missing, write_pad if missing else 0, dtype=np.int64))
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def pages_of(extents: list[int], page: int) -> Ints:
    """The pages in which flat extents stand, one for every `page` positions; the last may be there in part.

    Raises BadRequest where a position has not its place modulo the page, or a page is not whole: those tokens lie
    for kernels of single slots only.
    """
    if page < 1:
        raise BadRequest(f"page {page}: a page has at least one slot")
    if page == 1:
        return slots_of(extents)
    pairs = np.asarray(extents, dtype=np.int64).reshape(-1, 2)
    starts, lengths = pairs[:, 0], pairs[:, 1]
    positions = np.cumsum(lengths) - lengths
    wrong = (starts - positions) % page != 0
    if wrong.any():
        at = int(np.argmax(wrong))
        raise BadRequest(
            f"position {int(positions[at])} stands in slot {int(starts[at])}: not the same place in pages of {page}; "
            "open the client with that page size, or index single slots"
        )
    slots = slots_of(extents, np.int64)
    firsts = slots[::page]
    # Where one page goes on in another extent, that must be the same page.
    inner = positions[1:][positions[1:] % page != 0]
    if inner.size:
        torn = slots[inner] // page != firsts[inner // page] // page
        if torn.any():
            at = int(inner[int(np.argmax(torn))])
            raise BadRequest(
                f"the page of positions {at - at % page} to {at - at % page + page - 1} is torn at {at}: "
                "open the client with that page size, or index single slots"
            )
    return (firsts // page).astype(np.int32)


def block_table(batch: Ordered[Placed], page: int, *, width: int = 0, read_pad: int = 0) -> Ints:
    """The pages of each sequence, a row each, filled up with `read_pad`; `width` columns (0: as many as needed)."""
    rows = [pages_of(within(each.extents, 0, each.length), page) for each in batch]
    longest = max((len(row) for row in rows), default=0)
    if width and longest > width:
        raise BadRequest(f"width {width}: a sequence has {longest} pages of {page}")
    table = np.full((len(rows), width or longest), read_pad, dtype=np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table


def flashinfer(batch: Ordered[Placed], page: int = 1) -> Csr:
    """FlashInfer's `kv_indptr`, `kv_indices` and `kv_last_page_len`, at page size 1 or any other."""
    rows = [pages_of(within(each.extents, 0, each.length), page) for each in batch]
    indptr = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=indptr[1:])
    last = [each.length - max(len(row) - 1, 0) * page for each, row in zip(batch, rows, strict=True)]
    indices = np.concatenate(rows) if rows else np.empty(0, dtype=np.int32)
    return Csr(indptr, indices, np.asarray(last, dtype=np.int32))


def read_index(batch: Ordered[Placed], *, width: int = 0, read_pad: int = 0, left: bool = False) -> Longs:
    """Where each position is read from, a row each, filled up with `read_pad` (`left`: in front, as HF generates)."""
    rows = [slot_indices(each, dtype=np.int64) for each in batch]
    return _rows(rows, width, read_pad, left)


def write_index(
    batch: Ordered[Placed],
    new: int | Ordered[int] = 1,
    *,
    width: int = 0,
    write_pad: int | None = None,
    left: bool = False,
) -> Longs:
    """Where the last `new` tokens of each sequence are written, a row each, filled up with `write_pad`."""
    counts = _counts(batch, new)
    rows = [
        slot_indices(each, each.length - n, dtype=np.int64) for each, n in zip(batch, counts, strict=True)
    ]
    if write_pad is None:
        if len(set(counts)) > 1 or (width and counts and width != counts[0]):
            raise BadRequest(
                "rows of different length need write_pad: the pool's `write_padding`, never a slot that is read"
            )
        write_pad = 0
    return _rows(rows, width, write_pad, left)


def _rows(rows: list[NDArray[Any]], width: int, pad: int, left: bool) -> Longs:
    longest = max((len(row) for row in rows), default=0)
    if width and longest > width:
        raise BadRequest(f"width {width}: a row has {longest} tokens")
    table = np.full((len(rows), width or longest), pad, dtype=np.int64)
    for i, row in enumerate(rows):
        if left:
            table[i, table.shape[1] - len(row) :] = row
        else:
            table[i, : len(row)] = row
    return table


def _counts(batch: Ordered[Placed], new: int | Ordered[int]) -> list[int]:
    counts = [new] * len(batch) if isinstance(new, int) else [int(n) for n in new]
    if len(counts) != len(batch):
        raise BadRequest(f"{len(counts)} counts of new tokens for {len(batch)} sequences")
    for each, n in zip(batch, counts, strict=True):
        if not 0 <= n <= each.length:
            raise BadRequest(f"{n} new tokens of a sequence of {each.length}")
    return counts


__all__ = [
    "Csr",
    "Placed",
    "block_table",
    "flashinfer",
    "pages_of",
    "read_index",
    "slot_indices",
    "slot_mapping",
    "slots_of",
    "within",
    "write_index",
]
