"""`hashed`: full blocks under chained hashes, vLLM's way.

`chained.ChainedPool` is the allocator and says how it works; here it serves the life of a request:

- `admit` hits whole blocks and takes new ones for the rest of the prompt; new requests leave the watermark free while
  something runs.  Hits that nobody uses count as needed, since they are free until then.
- `prefilled` gives the prompt's full blocks their keys, `finish` those of the output.  (The engine does so as each
  block fills; a block of output that is still being generated is of use to nobody else in a replayed trace, and the
  interface does not bring its tokens earlier.)
- `grow` takes one block at each block's edge, past the watermark.  The victim is the youngest request; its blocks go
  back, those with keys stay findable until they are needed.
- A partial last block is nobody's but its sequence's, and its tokens are lost to others when the sequence ends.
"""

from __future__ import annotations

from itertools import islice
from operator import countOf, sub
from typing import ClassVar

from kvslot.replay.policies._base import Admitted, Counters, Gauges, PolicyConfig, Refused, Room
from kvslot.replay.policies.chained import ChainedPool, Shortage, Table
from kvslot.replay.policies.sequences import (
    NOTED_EVERY,
    TOKEN_BYTES,
    OutOfTurn,
    check_config,
    picture,
    prompt_length,
    unknown,
)

__all__ = ["ChainedPool", "HashedPolicy", "Shortage", "Table"]


class _Sequence:
    __slots__ = ("table", "tokens", "written")

    def __init__(self, tokens: bytes, table: Table) -> None:
        self.tokens = tokens
        self.table = table
        self.written = 0
        """Tokens known to be written, cached ones included; 0 before `prefilled`."""


class HashedPolicy:
    """One pool of blocks, one index of keys.  All requests of all engines share it."""

    name: ClassVar[str] = "hashed"

    def __init__(self, config: PolicyConfig) -> None:
        check_config(config)
        self._size = config.block_size
        self._pool = ChainedPool(config.pool_tokens // config.block_size, config.block_size)
        self._usable = self._pool.total * self._size
        self._watermark = int(config.watermark * self._pool.total)
        self._live: dict[int, _Sequence] = {}
        self._private = 0
        self._reserved = 0
        self._extents = 0
        self._extent_tokens = 0
        self._waiting: tuple[bytes, list[int]] = (b"", [])
        """The prompt refused last, and its keys."""
        self._run = 0
        self._run_empty = -1

    @property
    def granularity(self) -> int:
        return self._size

    # --- the life of a request --------------------------------------------------------------------------------

    def admit(self, request: int, tokens: bytes, engine: int, now: float) -> Admitted | Refused:
        length = prompt_length(request, tokens, self._live)
        if length > self._usable:
            return Refused(True, length)
        # An engine hashes a request once, however often it has to wait; the head of the line is who asks again.
        keys = self._waiting[1] if self._waiting[0] == tokens else None
        table = self._pool.allocate(tokens, self._watermark if self._live else 0, keys)
        if isinstance(table, Shortage):
            self._waiting = (tokens, table.keys)
            return Refused(False, length - table.hit + table.revived * self._size)
        if keys is not None:
            self._waiting = (b"", [])  # the keys are the table's now, which will append to them
        self._live[request] = _Sequence(tokens, table)
        blocks = table.blocks
        capacity = len(blocks) * self._size
        self._reserved += capacity - table.hit
        self._extents += len(blocks) - countOf(map(sub, islice(blocks, 1, None), blocks), 1)
        self._extent_tokens += capacity
        return Admitted(table.hit, capacity, min(capacity, length + NOTED_EVERY))

    def prefilled(self, request: int, now: float) -> None:
        sequence = self._get(request)
        if sequence.written:
            raise OutOfTurn(f"request {request} was prefilled before")
        length = len(sequence.tokens) // TOKEN_BYTES
        fresh = length - sequence.table.hit
        self._private += fresh
        self._reserved -= fresh
        sequence.written = length
        self._publish(sequence, sequence.tokens)

    def grow(self, request: int, length: int, now: float) -> Room | None:
        sequence = self._get(request)
        if not sequence.written or length <= sequence.written:
            raise OutOfTurn(f"request {request} cannot grow to {length} tokens now")
        blocks = sequence.table.blocks
        size = self._size
        capacity = len(blocks) * size
        if length > capacity:
            count = -(-(length - capacity) // size)
            last = len(blocks)
            if not self._pool.extend(sequence.table, count):
                return None
            capacity += count * size
            self._reserved += count * size
            self._extents += sum(blocks[at] != blocks[at - 1] + 1 for at in range(last, last + count))
            self._extent_tokens += count * size
        fresh = length - 1 - sequence.written
        sequence.written += fresh
        self._private += fresh
        self._reserved -= fresh
        return Room(capacity, min(capacity, length - 1 + NOTED_EVERY))

    def finish(self, request: int, output: bytes, now: float) -> None:
        sequence = self._get(request)
        if not sequence.written:
            raise OutOfTurn(f"request {request} finishes before its prompt was written")
        tokens = sequence.tokens + output
        length = len(tokens) // TOKEN_BYTES
        capacity = len(sequence.table.blocks) * self._size
        if not sequence.written <= length <= capacity:
            raise OutOfTurn(f"request {request} ends with {length} tokens, but has room for {capacity}")
        fresh = length - sequence.written
        sequence.written = length
        self._private += fresh
        self._reserved -= fresh
        self._publish(sequence, tokens)
        self._release(request, sequence)

    def abort(self, request: int, now: float) -> None:
        self._release(request, self._get(request))

    def victim(self) -> int | None:
        return next(reversed(self._live), None)

    # --- what one can see -------------------------------------------------------------------------------------

    def gauges(self) -> Gauges:
        pool = self._pool
        size = self._size
        free = pool.empty * size
        duplicates = pool.duplicates * size
        cached = pool.keyed * size - duplicates
        if self._run_empty != pool.empties_changed:
            self._run = pool.longest_empty_run() * size
            self._run_empty = pool.empties_changed
        return Gauges(
            usable=self._usable,
            blocks_in_use_slots=self._usable - free,
            tokens_held=cached + self._private,
            private=self._private,
            cached=cached,
            reserved=self._reserved,
            duplicates=duplicates,
            peeled=0,
            fenced=0,
            quarantined=0,
            moving=0,
            free=free,
            evictable=pool.idle * size,
            largest_free_run=self._run,
            live_sequences=len(self._live),
        )

    def counters(self) -> Counters:
        return Counters(
            copied_tokens=0,
            moved_tokens=0,
            extents=self._extents,
            extent_tokens=self._extent_tokens,
            evicted_tokens=self._pool.evicted * self._size,
        )

    def blocks(self) -> bytes:
        size = self._size
        held = self._pool.slots_held()
        for sequence in self._live.values():
            table = sequence.table
            left = sequence.written - table.published * size
            for block in table.blocks[table.published :]:
                held[block] = max(0, min(left, size))
                left -= size
        return picture(held, size)

    def slots(self, request: int) -> list[int]:
        """The slot of each position a live request has room for: what its kernels would be given."""
        size = self._size
        return [slot for b in self._get(request).table.blocks for slot in range(b * size, b * size + size)]

    def audit(self) -> None:
        """Recount everything and compare: free + cached + duplicates + private + reserved = usable."""
        size = self._size
        self._pool.audit(sequence.table for sequence in self._live.values())
        private = reserved = 0
        for sequence in self._live.values():
            published = sequence.table.published * size
            written = max(sequence.written - published, 0)
            private += written
            reserved += len(sequence.table.blocks) * size - published - written
        assert (private, reserved) == (self._private, self._reserved)
        gauges = self.gauges()
        assert min(gauges._replace(usable_run=0)) >= 0  # not all have that
        assert gauges.free + gauges.tokens_held + gauges.duplicates + gauges.reserved == gauges.usable

    # --- inside -----------------------------------------------------------------------------------------------

    def _get(self, request: int) -> _Sequence:
        sequence = self._live.get(request)
        if sequence is None:
            raise unknown(request)
        return sequence

    def _publish(self, sequence: _Sequence, tokens: bytes) -> None:
        before = sequence.table.published
        self._pool.publish(sequence.table, tokens)
        self._private -= (sequence.table.published - before) * self._size

    def _release(self, request: int, sequence: _Sequence) -> None:
        """Give its blocks back, the last one first."""
        published = sequence.table.published * self._size
        written = max(sequence.written - published, 0)
        self._private -= written
        self._reserved -= len(sequence.table.blocks) * self._size - published - written
        self._pool.release(sequence.table)
        del self._live[request]
