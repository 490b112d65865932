"""Copies between pool blocks and an engine's tensors: bytes, strides, runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvslot.engines.vllm.blocks import EngineBlocks, Placed, runs


def engine(
    layers: int, blocks: int, width: int, groups: int = 1, gap: int = 0
) -> tuple[EngineBlocks, np.ndarray]:
    """Blocks of `groups` that overlay each other in one allocation, as vLLM places them."""
    memory = np.random.default_rng(0).integers(0, 255, layers * (blocks * width + gap), np.uint8)
    start = memory.ctypes.data
    placed = [Placed(start + i * (blocks * width + gap), blocks, width, width) for i in range(layers)]
    return EngineBlocks([placed] * groups, {start: memory}), memory


def test_runs_join_what_goes_on_on_both_sides() -> None:
    """A run ends where either side jumps, and what has no block (before a window) is left out."""
    assert list(runs([5, 6, 7, 9, 10], [1, 2, 3, 4, 5])) == [(5, 1, 3), (9, 4, 2)]
    assert list(runs([5, 6, 7], [2, 4, 5])) == [(5, 2, 1), (6, 4, 2)]
    assert list(runs([5, 6, 7], [0, 0, 3])) == [(7, 3, 1)]
    assert list(runs([], [])) == []
    with pytest.raises(ValueError, match="3 blocks against 2"):
        list(runs([1, 2, 3], [1, 2]))


@given(st.data())
def test_a_store_and_a_load_elsewhere_bring_the_same_bytes(data: st.DataObject) -> None:
    """Whatever the widths, gaps between layers and the order of blocks: what is loaded is what was stored."""
    layers = data.draw(st.integers(1, 5))
    width = data.draw(st.sampled_from([1, 8, 12, 64]))
    ours, memory = engine(layers, 12, width, gap=data.draw(st.sampled_from([0, 8, 3])))
    plane = np.zeros((10, layers * width), np.uint8)
    pool = ours.pool_view(plane, layers * width)
    count = data.draw(st.integers(0, 6))
    sources = data.draw(st.permutations(range(1, 12)))[:count]
    middle = data.draw(st.permutations(range(10)))[:count]
    before = memory.copy()
    ours.store(pool, middle, [sources])
    assert np.array_equal(memory, before), "a store writes nothing into the engine"
    theirs, other = engine(layers, 12, width)
    other[:] = 0
    targets = data.draw(st.permutations(range(1, 12)))[:count]
    theirs.load(theirs.pool_view(plane, layers * width), middle, [targets])
    want, got = ours.groups[0], theirs.groups[0]
    for source, target in zip(sources, targets, strict=True):
        for a, b in zip(_layers(want, source), _layers(got, target), strict=True):
            assert a == b
    for block in set(range(12)) - set(targets):
        assert not any(b"".join(_layers(got, block))), "no other block is written"


def _layers(pieces: list, block: int) -> list[bytes]:  # type: ignore[type-arg]
    return [each.view[layer, block].tobytes() for each in pieces for layer in range(each.view.shape[0])]


def test_groups_have_a_place_each_in_a_pool_block() -> None:
    """Groups overlay the same engine blocks; in the pool they stand side by side, so that no key needs to name them."""
    ours, _ = engine(2, 8, 16, groups=3)
    assert ours.block_bytes == 3 * 2 * 16
    pool = ours.pool_view(np.zeros((4, ours.block_bytes), np.uint8), ours.block_bytes)
    ours.store(pool, [1, 2], [[1, 2], [3, 4], [5, 6]])
    theirs, memory = engine(2, 8, 16, groups=3)
    memory[:] = 0
    theirs.load(
        pool, [1, 2], [[0, 7], [1, 2], [3, 4]]
    )  # the first group's window begins with the second block
    for group, (source, target) in enumerate(((2, 7), (3, 1), (5, 3))):
        assert _layers(theirs.groups[group], target) == _layers(ours.groups[group], source)
    assert not any(b"".join(_layers(theirs.groups[0], 0))), "block 0 is never written"


def test_what_is_not_there_is_refused() -> None:
    """Blocks outside either side, and pools of other blocks, are errors before a byte is written."""
    ours, _ = engine(2, 8, 16)
    with pytest.raises(ValueError, match="the pool's blocks have 48 bytes, the engine's 32"):
        ours.pool_view(np.zeros((4, 48), np.uint8), 48)
    pool = ours.pool_view(np.zeros((4, 32), np.uint8), 32)
    for pair in ((4, 1), (3, 8), (-1, 1)):
        with pytest.raises(IndexError):
            ours.store(pool, [pair[0]], [[pair[1]]])
    with pytest.raises(ValueError, match="use pool_view"):
        ours.store(pool.view(np.uint8), [1], [[1]])
    assert not pool.any()
