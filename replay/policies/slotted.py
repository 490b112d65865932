"""`slotted`: kvslot's own core, driven as its client library drives it.

    row of a request:   [ the tree's extents | own extents ........ | growth run ]
                          hit, any token        prompt's rest         asked for once half of the last is used

Slots are handed out by run: a piece may begin at any slot and end at any slot, so several short pieces share a block,
and a prompt of 30,000 tokens is one extent where the free space allows.  Hits end at any token.  Nothing is copied to
append, unless `peel` is asked for.  This module only translates; all rules are the core's, and all moves those of
`replay/compaction.py`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec
import numpy as np

from kvslot.allocator import (
    EVICTIONS,
    BadRequest,
    EndedHandle,
    Grown,
    Never,
    Pool,
    PoolConfig,
    Reason,
    Session,
    Space,
)
from kvslot.allocator import Admitted as Ok
from kvslot.allocator.runs import EXACT, FreeRuns, size_class
from kvslot.allocator.slots import CACHED, FENCED, FREE, MOVING, PRIVATE, QUARANTINED
from kvslot.replay.policies._base import (
    RUN_BLOCKS,
    Admitted,
    Counters,
    Gauges,
    PolicyConfig,
    Refused,
    Room,
)
from kvslot.replay.policies.sequences import check_config, prompt_length, unknown

if TYPE_CHECKING:
    from kvslot.replay.compaction import Compactor

PICTURE_MAX: Final = 4096


class SlottedPolicy:
    """One pool with one namespace; each engine is a session of it."""

    name: ClassVar[str] = "slotted"

    def __init__(self, config: PolicyConfig) -> None:
        check_config(config, evictions=EVICTIONS)
        blocks = config.pool_tokens // config.block_size
        try:
            core = PoolConfig(
                blocks=blocks,
                block_size=config.block_size,
                watermark=config.watermark,
                eviction=config.eviction,
                fill_holes=config.fill_holes,
                append=config.append,
            )
            self.pool = Pool(core if config.emptying else msgspec.structs.replace(core, emptying=1))
        except BadRequest as error:
            raise ValueError(str(error)) from None
        self._root = self.pool.open_space(Space())
        self._sessions = [self.pool.open_session(page=config.page) for _ in range(config.engine_count)]
        self._live: dict[int, tuple[Session, int, int]] = {}
        self._requests: dict[int, int] = {}
        """Sequence -> request."""
        self._computing: dict[int, int] = {}
        """Sequence -> prompt tokens that are being computed; the core counts them as held from the start."""
        self._unwritten = 0
        """The sum of those."""
        self._ahead = self.pool.quantum - self.pool.quantum // 2
        """How far into its last run a sequence is when it asks for the next."""
        self._refused = (0, 0, self._sessions[0])
        """Request, ticket and session of the last LATER."""
        self._config = config
        self.compactor = None if config.compaction == "off" else self._compactor(config)

    def _compactor(self, config: PolicyConfig) -> Compactor:
        from kvslot.replay.compaction import Compactor

        return Compactor(self.pool, config.planner, config.purposes)

    def gap(self, tokens: float, now: float) -> None:
        if self.compactor is not None:
            self.compactor.gap(tokens, now)

    def rest(self, now: float) -> None:
        if self.compactor is None:
            self.compactor = self._compactor(self._config)
        self.compactor.rest(now)

    def shrink(self, share: float, now: float) -> None:
        pool = self.pool
        gauges = self.gauges()
        self.pool.evict(max(0, gauges.tokens_held - int(share * pool.usable)), now=now)

    @property
    def granularity(self) -> int:
        return 1

    def admit(self, request: int, tokens: bytes, engine: int, now: float) -> Admitted | Refused:
        length = prompt_length(request, tokens, self._live)
        pool = self.pool
        session = self._sessions[engine]
        refused, ticket, asked = self._refused
        if ticket:
            if refused != request:
                # The line moved on without it (dropped, or a preempted one came first): give its place up.
                with suppress(EndedHandle):  # its grace may have run out
                    pool.admission.withdraw(asked, ticket)
                ticket = 0
            self._refused = (0, 0, session)
        answer = pool.allocate(session, self._root, tokens, now=now, ticket=ticket, wait_for_commit=True)
        if isinstance(answer, Ok):
            handle = answer.sequence
            self._live[request] = (session, handle, length)
            self._requests[handle] = request
            self._computing[handle] = length - answer.hit
            self._unwritten += length - answer.hit
            capacity = answer.capacity
            return Admitted(answer.hit, capacity, self._ask_at(length, capacity))
        if isinstance(answer, Never):
            return Refused(True, answer.needed)
        self._refused = (request, answer.ticket, session)
        if answer.reason == Reason.COMMIT:
            return Refused(False, 0)
        # Cached tokens it would have held itself were not evictable for it, though they are again now.
        return Refused(False, answer.needed + pool.tree.evictable - answer.evictable)

    def prefilled(self, request: int, now: float) -> None:
        session, handle, length = self._get(request)
        self.pool.commit(session, handle, length)
        self._unwritten -= self._computing.pop(handle)

    def grow(self, request: int, length: int, now: float) -> Room | None:
        session, handle, _ = self._get(request)
        pool = self.pool
        pool.wrote(session, handle, length - 1)
        capacity = pool.sequences[handle].capacity
        while capacity - length < self._ahead:
            answer = pool.extend(session, handle, now=now)
            if not isinstance(answer, Grown):
                return None
            capacity = answer.capacity
        return Room(capacity, self._ask_at(length, capacity))

    def finish(self, request: int, output: bytes, now: float) -> None:
        session, handle, length = self._get(request)
        if output:
            self.pool.commit(session, handle, length + (len(output) >> 2), output)
        self._release(request, session, handle, now)

    def abort(self, request: int, now: float) -> None:
        session, handle, _ = self._get(request)
        self._release(request, session, handle, now)

    def _release(self, request: int, session: Session, handle: int, now: float) -> None:
        self.pool.free(session, handle, now=now)
        del self._live[request], self._requests[handle]
        self._unwritten -= self._computing.pop(handle, 0)
        self.pool.pushes.clear()  # the engine reads none: it asks again by itself, and names its victims by `victim`

    def _get(self, request: int) -> tuple[Session, int, int]:
        try:
            return self._live[request]
        except KeyError:
            raise unknown(request) from None

    def _ask_at(self, length: int, capacity: int) -> int:
        # Half of the last run; and every half run it says how far it has come, as the client does with each step.
        early = capacity - self._ahead
        return min(early, length + self._ahead) if early > length else capacity

    def victim(self) -> int | None:
        return self._requests[max(self._requests)] if self._requests else None

    def gauges(self) -> Gauges:
        pool = self.pool
        counts = pool.ledger.counts
        unwritten = pool.unwritten + self._unwritten
        return Gauges(
            usable=pool.usable,
            blocks_in_use_slots=pool.usable - pool.runs.blocks_free * pool.block_size,
            tokens_held=counts[CACHED] + counts[PRIVATE] - unwritten - pool.duplicates - pool.peeled,
            private=counts[PRIVATE] - unwritten,
            cached=counts[CACHED],
            reserved=unwritten,
            duplicates=pool.duplicates,
            peeled=pool.peeled,
            fenced=counts[FENCED],
            quarantined=counts[QUARANTINED],
            moving=counts[MOVING],
            free=counts[FREE],
            evictable=pool.tree.evictable,
            largest_free_run=pool.runs.longest(),
            live_sequences=len(self._live),
            usable_run=usable_run(pool.runs),
        )

    def counters(self) -> Counters:
        pool = self.pool
        return Counters(
            copied_tokens=pool.copied_tokens,
            moved_tokens=pool.moves.moved_tokens,
            extents=pool.extents_given,
            extent_tokens=pool.extent_tokens,
            evicted_tokens=pool.evicted_tokens,
            moves=pool.moves.published,
            moves_abandoned=pool.moves.abandoned,
            given_back=0 if self.compactor is None else self.compactor.given_back,
        )

    def blocks(self) -> bytes:
        pool = self.pool
        blocks = pool.config.blocks
        buckets = min(blocks, PICTURE_MAX)
        edges = np.arange(buckets + 1, dtype=np.int64) * blocks // buckets * pool.block_size
        runs = pool.runs.length_at
        starts = np.fromiter(runs, dtype=np.int64, count=len(runs))
        order = np.argsort(starts)
        starts = starts[order]
        lengths = np.fromiter(runs.values(), dtype=np.int64, count=len(runs))[order]
        free_before = np.concatenate(([0], np.cumsum(lengths)))
        # Free slots before each edge: whole runs, and the part of the one that the edge cuts.
        index = np.searchsorted(starts, edges, side="left")
        cut = np.zeros(len(edges), dtype=np.int64)
        if len(runs):
            last = np.maximum(index - 1, 0)
            cut = np.where(index > 0, np.maximum(starts[last] + lengths[last] - edges, 0), 0)
        free = np.diff(free_before[index] - cut)
        size = np.diff(edges)
        return ((size - free) * 255 // size).astype(np.uint8).tobytes()


def usable_run(runs: FreeRuns, blocks: int = RUN_BLOCKS) -> int:
    """Free slots that can be had as runs of `blocks` whole blocks; only long runs are looked at.

    A free run of 70 whole blocks holds two runs of 32: what is left over is no run for whoever needs 32."""
    size = runs.block_size
    # A run of whole blocks has at least so many whole cells: a cell is no longer than a block, but need not divide it.
    least = max(1, blocks * size // runs.cell - 1)
    first = runs.holes + (least if least < EXACT else size_class(least))
    found = 0
    rest = runs.occupied >> first
    while rest:
        low = (rest & -rest).bit_length() - 1
        rest &= rest - 1
        for start in runs.classes[first + low]:
            whole = (start + runs.length_at[start]) // size + -start // size
            found += whole // blocks * blocks
    return found * size
