"""Pools as maps of blocks, two bytes each, with what has changed since an earlier look.

    states (a byte a slot, kept by the ledger) ──► copy ──► block: the state most of its slots have, and how full it is
                        chunk by chunk: only where the copy differs          └─► version of its chunk

A map is kept while somebody asks for it, and brought up to date when asked for: a chunk that is as it was costs one
comparison of memory, one that has changed ten times that.  A new map is made in slices with pauses between, in half a
second for a million blocks, and the others have the loop most of it.  From then on a look has a share of the time since
the last one, and goes on where that ended: a large pool of which all changes is followed over some seconds, and no
engine notices who looks on.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kvslot.api.admin import BlockMap

if TYPE_CHECKING:
    from kvslot.daemon.pools import HostedPool

STATES: Final = 8
CHUNK_SLOTS: Final = 1 << 14
"""Looked at in one go: a tenth of a millisecond where something has changed."""
NEVER: Final = -1
"""Version of a chunk that has not been looked at."""
COPIED: Final = 1 << 16
"""Bytes in one go."""
KEPT_SECONDS: Final = 60.0
SLICE_NS: Final = 100_000
PAUSE_SECONDS: Final = 0.0005
"""Between two slices."""
SHARE: Final = 0.004
LONGEST: Final = 2.0
"""Seconds since the last look that count."""
HEAD: Final = np.dtype([("start", "<u4"), ("length", "<u4")])
"""Before the bytes of each stretch of a map of changes: first block, and how many."""

Bytes = npt.NDArray[np.uint8]


class _Map:
    """One pool's."""

    def __init__(self, hosted: HostedPool, now: float) -> None:
        self.size = hosted.core.block_size
        self.blocks = hosted.core.config.blocks
        self.step = max(1, CHUNK_SLOTS // self.size)  # blocks of a chunk
        # As last looked at; what has never been is nobody knows what.  Memory is taken as it is written, so in slices.
        self.states: Bytes = np.empty(self.blocks * self.size, dtype=np.uint8)
        self.cells: Bytes = np.empty((self.blocks, 2), dtype=np.uint8)
        self.versions = [NEVER] * -(-self.blocks // self.step)
        self.base = np.arange(self.step, dtype=np.int32)[:, None] * STATES
        self.fills = (-(-(self.size - np.arange(self.size + 1)) * 255 // self.size)).astype(np.uint8)
        self.at = 0  # the chunk to be looked at next
        self.made = False  # all have been looked at
        self.asked = now
        self.looked = now
        self.lock = asyncio.Lock()

    def look(self, chunk: int, now: memoryview, version: int) -> bool:
        """Brings a chunk up to date; whether any of its cells has changed."""
        first = chunk * self.step
        last = min(first + self.step, self.blocks)
        fresh = np.frombuffer(now[first * self.size : last * self.size], dtype=np.uint8)
        kept = self.states[first * self.size : last * self.size]
        never = self.versions[chunk] == NEVER
        if not never and np.array_equal(fresh, kept):
            return False
        kept[:] = fresh
        blocks = last - first
        index = kept.reshape(blocks, self.size) + self.base[:blocks]
        counts = np.bincount(index.ravel(), minlength=blocks * STATES).reshape(blocks, STATES)
        cells = np.empty((blocks, 2), dtype=np.uint8)
        cells[:, 1] = self.fills[counts[:, 0]]
        # Of what is not free, most: a block with one private slot is no free block to look at.
        counts[:, 0] = 0
        cells[:, 0] = counts.argmax(axis=1)
        if not never and np.array_equal(cells, self.cells[first:last]):
            return False
        self.cells[first:last] = cells
        self.versions[chunk] = version
        return True


class BlockMaps:
    """The maps that are asked for."""

    def __init__(self, share: float = SHARE) -> None:
        """`share`: of the time, for keeping one map up to date."""
        self._share = share
        self._maps: dict[str, _Map] = {}
        # By chance, so that nobody takes a map of before a restart for one of now; below what JavaScript counts to.
        self._sequence = secrets.randbits(50)
        self._first = self._sequence

    def look(self, now: float) -> None:
        """Once a second: forgets those that nobody has asked for lately."""
        for name in [name for name, each in self._maps.items() if now - each.asked > KEPT_SECONDS]:
            del self._maps[name]

    async def read(self, hosted: HostedPool, since: int) -> BlockMap:
        """The whole map, or with `since`, a sequence that it had, the stretches of blocks that have changed."""
        now = asyncio.get_running_loop().time()
        found = self._maps.get(hosted.name)
        if found is None:
            found = self._maps[hosted.name] = _Map(hosted, now)
            since = -1
        found.asked = now
        async with found.lock:
            await self._update(found, hosted)
            whole = not self._first <= since <= self._sequence
            data = await (self._all(found) if whole else self._changes(found, since))
            return BlockMap(
                pool=hosted.name, block_size=found.size, blocks=found.blocks, sequence=self._sequence,
                whole=whole, data=data,
            )  # fmt: skip

    async def _update(self, found: _Map, hosted: HostedPool) -> None:
        version = self._sequence + 1
        changed = False
        clock = time.perf_counter_ns
        now = asyncio.get_running_loop().time()
        left = int(min(now - found.looked, LONGEST) * self._share * 1e9)
        found.looked = now
        chunks = len(found.versions)
        until = clock() + SLICE_NS
        for _ in range(chunks):
            began = clock()
            changed |= found.look(found.at, hosted.states, version)
            found.at = (found.at + 1) % chunks
            found.made = found.made or not found.at
            ended = clock()
            left -= ended - began
            if left < 0 and found.made:
                break
            if ended >= until:
                await asyncio.sleep(PAUSE_SECONDS)
                until = clock() + SLICE_NS
        if changed:
            self._sequence = max(self._sequence, version)

    async def _all(self, found: _Map) -> memoryview:
        data = np.empty(2 * found.blocks, dtype=np.uint8)
        await _copy(found.cells, data, 0)
        return data.data

    async def _changes(self, found: _Map, since: int) -> memoryview:
        """Stretches: first block and length, u32 little endian each, then two bytes a block."""
        stretches: list[tuple[int, int]] = []  # first block, and behind the last
        for chunk, version in enumerate(found.versions):
            if version > since:
                first = chunk * found.step
                last = min(first + found.step, found.blocks)
                if stretches and stretches[-1][1] == first:
                    first, _ = stretches.pop()
                stretches.append((first, last))
        size = sum(HEAD.itemsize + 2 * (last - first) for first, last in stretches)
        data = np.empty(size, dtype=np.uint8)
        at = 0
        for first, last in stretches:
            head = np.array([(first, last - first)], dtype=HEAD).view(np.uint8)
            data[at : at + HEAD.itemsize] = head
            at = await _copy(found.cells[first:last], data, at + HEAD.itemsize)
        return data.data


async def _copy(cells: Bytes, data: Bytes, at: int) -> int:
    """Copies cells to `data` from `at` on, in slices; where it ended."""
    source = cells.reshape(-1)
    for start in range(0, len(source), COPIED):
        piece = source[start : start + COPIED]
        data[at : at + len(piece)] = piece
        at += len(piece)
        if len(piece) == COPIED:
            await asyncio.sleep(0)
    return at
