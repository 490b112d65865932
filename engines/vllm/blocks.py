"""Copies between a pool of whole blocks and an engine's tensors: one strided copy for each run, all layers at once.

The engine has, for each layer, a tensor whose first dimension is its blocks.  On CPU all of them are views of one
allocation, layer l's block b at `offset + l * layer_stride + b * block_stride`, so that all layers are one array of
three dimensions.  The pool has the layers of a block one after the other:

    engine   layer 0: [b0 b1 b2 ...]  layer 1: [b0 b1 b2 ...]  ...
    pool     block 0: [layer 0 | layer 1 | ...]  block 1: [layer 0 | ...]  ...

What is inside a layer's block is the engine's own affair (vLLM on CPU keeps K transposed in it): bytes are moved, never
looked at.  A run of blocks that follow each other on both sides is one `numpy.copyto`, which lets other threads run
meanwhile.  A model with several groups of layers that have block tables of their own (sliding windows beside full
attention) has all groups in each pool block, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]

NULL: Final = 0
"""The block that vLLM never hands out: where a table has it, there is nothing (before a sliding window)."""


@dataclass(frozen=True, slots=True)
class Placed:
    """One layer's tensor as bytes: `blocks` blocks of `width` bytes, `stride` apart, the first at `address`."""

    address: int
    blocks: int
    width: int
    stride: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers that lie evenly apart: `view` is (layers, blocks, words), in the pool block from word `first` on."""

    view: Array
    first: int

    @property
    def words(self) -> int:
        """Of a pool block that it fills."""
        return int(self.view.shape[0] * self.view.shape[2])


class EngineBlocks:
    """An engine's K and V, as blocks."""

    def __init__(self, groups: Sequence[Sequence[Placed]], memory: dict[int, Array]) -> None:
        """`groups`: the layers of each group, in the order they have in the pool.

        `memory`: each allocation that they lie in, as bytes (uint8, one dimension), by its first address.  It is kept.
        """
        layers = [each for group in groups for each in group]
        if not layers:
            raise ValueError("no layers")
        every = {number for each in layers for number in (each.width, each.stride, each.address)}
        self.word: Final = 8 if all(number % 8 == 0 for number in every) else 1
        self.groups: list[list[Piece]] = []
        first = 0
        for group in groups:
            pieces: list[Piece] = []
            for run in _even(group):
                view = self._view(run, memory)
                piece = Piece(view, first)
                first += piece.words
                pieces.append(piece)
            self.groups.append(pieces)
        self.block_bytes: Final = first * self.word
        """Of a pool block."""
        self.blocks: Final = min(each.blocks for each in layers)

    def _view(self, run: Sequence[Placed], memory: dict[int, Array]) -> Array:
        base, step = run[0], run[1].address - run[0].address if len(run) > 1 else 0
        end = run[-1].address + (base.blocks - 1) * base.stride + base.width
        for start, array in memory.items():
            if start <= base.address and end <= start + array.nbytes:
                dtype = np.dtype(np.uint64 if self.word == 8 else np.uint8)
                return np.ndarray(
                    (len(run), base.blocks, base.width // self.word),
                    dtype,
                    array.data,
                    offset=base.address - start,
                    strides=(step, base.stride, self.word),
                )
        raise ValueError(f"the layer at {base.address:#x} lies in none of the allocations")

    def pool_view(self, plane: Array, block_bytes: int) -> Array:
        """A pool's plane of bytes as (blocks, words of a block)."""
        if block_bytes != self.block_bytes:
            raise ValueError(f"the pool's blocks have {block_bytes} bytes, the engine's {self.block_bytes}")
        flat = plane.reshape(-1)
        return (
            flat[: len(flat) // block_bytes * block_bytes]
            .view(np.uint64 if self.word == 8 else np.uint8)
            .reshape(-1, block_bytes // self.word)
        )

    def store(self, pool: Array, targets: Sequence[int], sources: Sequence[Sequence[int]]) -> None:
        """Copies engine blocks into pool blocks: `sources` has for each group the block behind each target."""
        self._check(pool)
        for pieces, table in zip(self.groups, sources, strict=True):
            for target, source, count in runs(targets, table):
                for piece in pieces:
                    ours, theirs = _sides(pool, piece, target, source, count)
                    np.copyto(ours, theirs)

    def load(self, pool: Array, sources: Sequence[int], targets: Sequence[Sequence[int]]) -> None:
        """Copies pool blocks into engine blocks: `targets` has for each group the block of each source; NULL: none."""
        self._check(pool)
        for pieces, table in zip(self.groups, targets, strict=True):
            for source, target, count in runs(sources, table):
                for piece in pieces:
                    ours, theirs = _sides(pool, piece, source, target, count)
                    np.copyto(theirs, ours)

    def _check(self, pool: Array) -> None:
        if (
            pool.ndim != 2
            or pool.dtype.itemsize != self.word
            or pool.shape[1] * self.word != self.block_bytes
        ):
            raise ValueError("the pool is not seen as this engine sees it: use pool_view")


def _sides(pool: Array, piece: Piece, ours: int, theirs: int, count: int) -> tuple[Array, Array]:
    """The same blocks in the pool and in the engine, as arrays of one shape."""
    layers, blocks, words = piece.view.shape
    if not 0 <= theirs <= blocks - count or not 0 <= ours <= len(pool) - count:
        raise IndexError(f"blocks {theirs} and {ours}, {count} of them, are not there")
    inside = pool[ours : ours + count, piece.first : piece.first + piece.words]
    return inside.reshape(count, layers, words), piece.view[:, theirs : theirs + count].transpose(1, 0, 2)


def runs(first: Sequence[int], second: Sequence[int]) -> Iterable[tuple[int, int, int]]:
    """Pairs of blocks as (first, second, count) where both go on by one; pairs with a NULL second are left out."""
    i, end = 0, len(first)
    if len(second) != end:
        raise ValueError(f"{end} blocks against {len(second)}")
    while i < end:
        if second[i] == NULL:
            i += 1
            continue
        j = i + 1
        while j < end and second[j] - second[j - 1] == 1 == first[j] - first[j - 1]:
            j += 1
        yield first[i], second[i], j - i
        i = j


def _even(group: Sequence[Placed]) -> Iterable[Sequence[Placed]]:
    """The layers of a group cut where their distance or shape changes."""
    i = 0
    while i < len(group):
        j = i + 1
        while j < len(group):
            a, b = group[j - 1], group[j]
            if (a.blocks, a.width, a.stride) != (b.blocks, b.width, b.stride) or b.address < a.address:
                break
            if j - i > 1 and b.address - a.address != a.address - group[j - 2].address:
                break
            j += 1
        yield group[i:j]
        i = j
