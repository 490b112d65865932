"""A paged allocator with chained block hashes: vLLM's way of prefix caching, by itself.

It knows pages ("blocks") and tokens, nothing of requests, clocks or a replay; `hashed` is this pool behind the
replay's interface, and `kvslotctl bench core` measures ours against it.

    table of a sequence:   [ b7 | b3 | b9 | b4 ]        position p stands in block table[p // B] at offset p % B
                             ^----^----^               full and written: hash known, findable by everyone
                                         ^             partial: private, never findable

Rules, all of them the engine's:

- Only full blocks are shared.  A block's key is hash((key of the block before it, its token bytes)), so one key stands
  for the whole prefix up to its end.  A hit is found block by block from the start and ends at the first key that
  nobody holds.  Keys are trusted: tokens are not compared again (64 bits here, SHA-256 on request there).
- A hit covers at most n-1 tokens of an n-token prompt, rounded down to blocks.
- References are counted per block.  A block that nobody uses is *free*; if it has a key it stays findable until it is
  handed out again.  Blocks are handed out in this order: those without a key, last freed first; those never used;
  then keyed ones, least recently freed first.  A sequence frees its tail first, so leaves go before roots.
- Tables are append-only: when a block fills up whose key is held by another block already, both keep it (a duplicate).
  The older one serves hits.

Cost: a look-up is one hash and one dict probe per block hit; to take or give back a block is O(1), and many at once are
linked at once.  Nothing grows with the pool: blocks never used are a number, not a list; per-block state is four flat
lists (an ordered dict would be as fast on average, but stands still for milliseconds whenever it is resized).
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Final

import numpy as np
import numpy.typing as npt

from kvslot.replay.policies.sequences import TOKEN_BYTES, longest_run

_ROOT: Final = 0x6B76736C6F74
"""What the first block's key is chained to.  Any number does; a salt per tenant would stand here."""


class Table:
    """The blocks of one sequence, in order, and how far they are filled and published."""

    __slots__ = ("blocks", "hit", "keys", "published")

    def __init__(self, blocks: list[int], keys: list[int], hit: int) -> None:
        """`blocks` are those hit, `hit` tokens in all; the pool appends the new ones."""
        self.blocks = blocks
        self.keys = keys
        """Keys of the sequence's first full blocks, as far as anyone needed them yet."""
        self.hit = hit
        """Tokens found cached when it was allocated; a multiple of the block size."""
        self.published = len(blocks)
        """Leading blocks that have their key in the index."""


class Shortage:
    """Why `allocate` refused: what it would have taken, and what could be taken."""

    __slots__ = ("blocks", "hit", "keys", "revived")

    def __init__(self, keys: list[int], blocks: int, revived: int, hit: int) -> None:
        self.keys = keys
        self.blocks = blocks
        """New blocks it needed."""
        self.revived = revived
        """Hit blocks that nobody used, and that therefore counted as free until now."""
        self.hit = hit


class ChainedPool:
    """`blocks` pages of `block_size` tokens under one index of chained hashes."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.total = blocks
        self.block_size = block_size
        self._stride = block_size * TOKEN_BYTES
        self._cut = Struct(
            f"{self._stride}s"
        ).iter_unpack  # cuts tokens into blocks, faster than slicing does
        self._references = [0] * blocks
        self._key: list[int | None] = [None] * blocks
        self._index: dict[int, int | list[int]] = {}
        """Key -> block, or the blocks that hold it, oldest first.  Lists only for duplicates: they are rare, and a
        list per block would give the garbage collector as many objects as there are blocks."""
        self._bare: list[int] = []
        """Free blocks without a key; a stack."""
        self._fresh = 0
        """Blocks fresh..total-1 were never handed out."""
        self.idle = 0
        """Free blocks that still have their key."""
        self._after = [blocks] * (blocks + 1)
        self._before = [blocks] * (blocks + 1)
        """Links between the idle blocks, next to be evicted first; place `blocks` is before the first, after the last.
        Of the others' links nothing is promised."""
        self.keyed = 0
        self.duplicates = 0
        """Keyed blocks whose key an older block holds as well."""
        self.evicted = 0
        """Keyed blocks handed out again, from the start."""
        self.empties_changed = 0
        """Rises whenever the set of empty blocks changes."""

    @property
    def free(self) -> int:
        """Blocks that could be handed out now: empty ones and idle keyed ones."""
        return len(self._bare) + self.total - self._fresh + self.idle

    @property
    def empty(self) -> int:
        """Free blocks that hold nothing."""
        return len(self._bare) + self.total - self._fresh

    def probe(self, tokens: bytes) -> int:
        """Tokens of this prompt that are cached; no side effects."""
        return len(self._match(tokens)[1]) * self.block_size

    def allocate(self, tokens: bytes, keep_free: int = 0, keys: list[int] | None = None) -> Table | Shortage:
        """A table for the whole prompt: cached blocks where there are any, new ones for the rest; all or nothing.

        `keep_free` blocks must remain free afterwards.  `keys`: those that an earlier try for this prompt worked out
        (`Shortage.keys`), as an engine keeps them with a request that waits."""
        keys, hits = self._match(tokens, keys)
        hit = len(hits)
        new = -(-len(tokens) // self._stride) - hit
        references = self._references
        revived = [block for block in hits if not references[block]]
        if new + len(revived) + keep_free > len(self._bare) + self.total - self._fresh + self.idle:
            return Shortage(keys, new, len(revived), hit * self.block_size)
        if revived:
            after = self._after
            before = self._before
            self.idle -= len(revived)
            for block in revived:
                following = after[block]
                leading = before[block]
                after[leading] = following
                before[following] = leading
        for block in hits:
            references[block] += 1
        table = Table(hits, keys, hit * self.block_size)
        hits += self._take(new)
        return table

    def extend(self, table: Table, blocks: int = 1) -> bool:
        """Append new blocks; False, with nothing changed, if there are too few."""
        if blocks > self.free:
            return False
        table.blocks.extend(self._take(blocks))
        return True

    def publish(self, table: Table, tokens: bytes) -> None:
        """All of `tokens` (from the sequence's start) is written: make its full blocks findable."""
        first = table.published
        keys = table.keys
        full = len(tokens) // self._stride
        if full <= first:
            return
        self._chain(keys, tokens, full)
        index = self._index
        key_of = self._key
        for block, key in zip(table.blocks[first:full], keys[first:full], strict=True):
            key_of[block] = key
            held = index.setdefault(key, block)
            if held is not block:  # it was there before
                self.duplicates += 1
                if isinstance(held, int):
                    index[key] = [held, block]
                else:
                    held.append(block)
        self.keyed += full - first
        table.published = full

    def release(self, table: Table) -> None:
        """Give the table's blocks back, the last one first."""
        references = self._references
        key_of = self._key
        bare = self._bare
        after = self._after
        before = self._before
        end = self.total
        last = before[end]
        idle = 0
        for block in reversed(table.blocks):
            left = references[block] - 1
            references[block] = left
            if left:
                continue
            if key_of[block] is None:
                bare.append(block)
                self.empties_changed += 1
            else:
                after[last] = block
                before[block] = last
                last = block
                idle += 1
        after[last] = end
        before[end] = last
        self.idle += idle
        table.blocks = []
        table.published = 0

    def slots_held(self) -> npt.NDArray[np.int64]:
        """Tokens of keyed blocks, block by block: the block size or 0."""
        return np.fromiter((0 if key is None else self.block_size for key in self._key), np.int64, self.total)

    def longest_empty_run(self) -> int:
        """Consecutive empty blocks, at the most.  O(k log k) in the k blocks that came back without a key."""
        return longest_run(self._bare, self._fresh, self.total)

    def audit(self, tables: Iterable[Table]) -> None:
        """Recount from the tables in use: every block is empty, idle or in some table, and keys and counts agree."""
        references = [0] * self.total
        for table in tables:
            for place, block in enumerate(table.blocks):
                references[block] += 1
                assert (self._key[block] is not None) == (place < table.published)
                assert place >= table.published or self._key[block] == table.keys[place]
        assert references == self._references
        used = [block for block, count in enumerate(references) if count]
        idle: list[int] = []
        block = self._after[self.total]
        while block != self.total and len(idle) <= self.total:
            assert self._before[self._after[block]] == block
            idle.append(block)
            block = self._after[block]
        assert len(idle) == self.idle
        seen = used + self._bare + list(range(self._fresh, self.total)) + idle
        assert sorted(seen) == list(range(self.total))
        assert all(self._key[block] is None for block in self._bare)
        assert all(self._key[block] is not None for block in idle)
        held: dict[int, set[int]] = {}
        for block, key in enumerate(self._key):
            if key is not None:
                held.setdefault(key, set()).add(block)
        index = {key: {of} if isinstance(of, int) else set(of) for key, of in self._index.items()}
        assert held == index
        assert self.keyed == sum(map(len, held.values()))
        assert self.duplicates == self.keyed - len(held)

    # --- inside -----------------------------------------------------------------------------------------------

    def _match(self, tokens: bytes, keys: list[int] | None = None) -> tuple[list[int], list[int]]:
        """-> keys of leading blocks, as far as they were worked out (one past the hits), and the blocks hit.

        Keys past the first miss are left to `publish`: a prompt that is refused or new costs one hash here."""
        stride = self._stride
        find = self._index.get
        hits: list[int | list[int]] = []
        if keys is None:
            keys = []
        # The last token is always computed anew, so only blocks that end before it can be hit.
        most = (len(tokens) - TOKEN_BYTES) // stride
        for key in keys[:most]:
            found = find(key)
            if found is None:
                most = 0
                break
            hits.append(found)
        key = keys[-1] if keys else _ROOT
        for (chunk,) in self._cut(memoryview(tokens)[len(keys) * stride : most * stride]):
            key = hash((key, chunk))
            keys.append(key)
            found = find(key)
            if found is None:
                break
            hits.append(found)
        return keys, [block if isinstance(block, int) else block[0] for block in hits]

    def _chain(self, keys: list[int], tokens: bytes, full: int) -> None:
        """Bring `keys` up to `full` blocks."""
        stride = self._stride
        known = len(keys)
        key = keys[-1] if known else _ROOT
        chunks = self._cut(memoryview(tokens)[known * stride : full * stride])
        keys += [key := hash((key, chunk)) for (chunk,) in chunks]

    def _take(self, count: int) -> list[int]:
        """`count` blocks with one reference each; the caller has checked that there are so many."""
        bare = self._bare
        taken: list[int] = []
        self.empties_changed += 1
        if bare and count:
            taken = bare[-count:]
            del bare[-count:]
        short = count - len(taken)
        if short:
            fresh = min(short, self.total - self._fresh)
            if fresh:
                taken += range(self._fresh, self._fresh + fresh)
                self._fresh += fresh
                short -= fresh
            if short:
                self._evict(short, taken)
        references = self._references
        for block in taken:
            references[block] = 1
        return taken

    def _evict(self, count: int, into: list[int]) -> None:
        """Hand out the `count` idle blocks that were freed longest ago, and forget their keys."""
        index = self._index
        key_of = self._key
        after = self._after
        end = self.total
        block = after[end]
        for _ in range(count):
            assert block != end
            key = key_of[block]
            assert key is not None
            key_of[block] = None
            held = index.pop(key)
            if not isinstance(held, int):
                self.duplicates -= 1
                held.remove(block)
                index[key] = held if len(held) > 1 else held[0]
            into.append(block)
            block = after[block]
        after[end] = block
        self._before[block] = end
        self.idle -= count
        self.keyed -= count
        self.evicted += count
