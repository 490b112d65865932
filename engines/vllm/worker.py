"""The worker's side: the mapping of the pool, and the copies between it and vLLM's blocks.

Stores are made where vLLM waits for them, at the end of the step that computed the blocks: a block of 32 tokens is
copied in a fraction of a millisecond, which is some thousandth of what computing it took, and no block has to be kept
from being reused while it is read.  Loads are made by a thread of their own, in portions, while vLLM goes on with
other requests; or, if so configured, before the forward that needs them.

Mappings.  In the scheduler's process its client's memory is used.  In another one a client joins the scheduler's
session, so that the daemon knows which processes must be gone before the blocks can be another's.  When the
scheduler has another session, or none, the old memory is let go once no copy uses it, and the scheduler is told.

The daemon has taken the pool's pages, but a process that touches one for the first time still pays for its entry in the
page table: four times what copying the page costs.  A thread does that ahead of the stores, a piece at a time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from kvslot.api.client import Client, Token
from kvslot.api.wire import KvslotError, Refused
from kvslot.engines.vllm import link
from kvslot.engines.vllm.blocks import NULL, Array, EngineBlocks
from kvslot.engines.vllm.messages import Load, Orders, Report, Session, Store
from kvslot.engines.vllm.pages import WRITE, populate_aside
from kvslot.engines.vllm.region import RECORD_BYTES, Peers, Region, copy, read_records, write_record

PORTION_BYTES: Final = 32 << 20
"""Copied at a time: after each it is looked whether the request still wants it."""
IDLE_SECONDS: Final = 0.005
"""Longest wait for a load in a step that computes nothing.  vLLM asks again and again otherwise, at the cost of the
core that copies."""
JOIN_RETRY_SECONDS: Final = 1.0
SWEEP_SECONDS: Final = (
    5.0  # between looks for engines that have ended: their memory lasts as long as it is mapped
)

log: Final = logging.getLogger("vllm.kvslot")


@dataclass(slots=True)
class _Mapping:
    """One session's memory."""

    pool: Array | None  # (blocks, words)
    client: Client | None  # to be closed: it is this worker's own
    jobs: int = 0  # loads under way, and the thread that prepares it
    retired: bool = False
    kept: bool = False  # a view of it was alive when it was to be unmapped


@dataclass(slots=True)
class Job:
    load: Load
    mapping: _Mapping
    cancelled: bool = False
    void: bool = False  # fails, even if it is made


@dataclass(slots=True)
class _Results:
    """Of loads, for vLLM."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)


class Worker:
    """Carries out orders."""

    def __init__(
        self, engine: EngineBlocks | None, *, asynchronous: bool = True, timeout: float = 1.0
    ) -> None:
        """`engine`: None where its tensors are of no use to a pool; then nothing is loaded and nothing stored.

        `asynchronous`: loads by a thread.  `timeout`: seconds that the daemon may take to let this process join.
        """
        self._engine = engine
        self._asynchronous = asynchronous
        self._timeout = timeout
        self._mappings: dict[int, _Mapping] = {}
        self._join_at = 0.0
        # Sessions of this process that may have been lost, and are of no more use.
        self._over: list[Token] = []
        self._poisoned = False  # a load of this step failed: what the step computed may be wrong
        self._report = Report()
        self._results = _Results()
        self._jobs: deque[Job] = deque()
        self._running: dict[int, Job] = {}  # by entry
        self._made: list[Load] = []  # of which vLLM has not been told
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.copy_seconds = 0.0
        """Spent on stores and loads."""
        self.copied_bytes = 0

    def prepare(self, orders: Orders) -> None:
        """Before anything of the step is written."""

    def begin(self, orders: Orders) -> None:
        """Starts the loads; in a step that needs them at once, makes them."""
        self._poisoned = False
        if orders.void:
            self._fail_all()
        if orders.session is not None and orders.session.generation not in self._mappings:
            self._map(orders.session)
        for load in orders.loads:
            mapping = self._mappings.get(load.generation)
            if mapping is None or mapping.pool is None or orders.void:
                with self._changed:
                    self._loaded(load, good=False)
            elif self._asynchronous:
                self._queue(Job(load, mapping))
            else:
                good = self._load(Job(load, mapping))
                with self._changed:
                    self._loaded(load, good=good)
        present = orders.session.generation if orders.session is not None else 0
        if len(self._mappings) > (present in self._mappings):
            self._retire(present)
        if self._over and (mapping := self._mappings.get(present)) is not None and mapping.client is not None:
            self._release(mapping.client)

    def end(self, orders: Orders) -> None:
        """Makes the stores: the step's forward has ended."""
        for store in orders.stores:
            mapping = self._mappings.get(store.generation)
            if (
                self._poisoned
                or mapping is None
                or mapping.pool is None
                or not self._store(store, mapping.pool)
            ):
                self._report.dropped.append(store.entry)
            else:
                self._report.stored.append((store.entry, store.first, store.end))

    def results(self, finished: set[str], *, idle: bool = False) -> _Results:
        """Loads that have ended since the last call.  `finished` requests want theirs no more."""
        if finished and self._running:
            for job in list(self._running.values()):
                job.cancelled = job.cancelled or job.load.request in finished
        if idle and self._running:
            with self._changed:
                if not self._results.received:
                    self._changed.wait(IDLE_SECONDS)
        elif not self._running and not self._results.received:
            return _Results()
        with self._changed:
            results, self._results = self._results, _Results(bad_blocks=self._results.bad_blocks)
            self._made.clear()
        return results

    def bad_blocks(self) -> set[int]:
        """Engine blocks that were to be loaded and hold nothing of use; each is told once."""
        with self._changed:
            bad, self._results.bad_blocks = self._results.bad_blocks, set()
        return bad

    def report(self) -> Report | None:
        """For the scheduler's side; None when there is nothing to say."""
        if not self._report:
            return None
        with self._changed:
            report, self._report = self._report, Report()
        return report

    def close(self) -> None:
        """Ends the thread and the mappings."""
        with self._changed:
            self._stopping = True
            for job in self._running.values():
                job.cancelled = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        with self._changed:
            for mapping in self._mappings.values():
                mapping.retired = True
            self._changed.wait_for(
                lambda: not any(each.jobs for each in self._mappings.values()), timeout=1.0
            )
        for mapping in self._mappings.values():
            self._unmap(mapping)
        self._mappings.clear()

    # -- mappings ----------------------------------------------------------------------------------------------------

    def _map(self, session: Session) -> None:
        engine = self._engine
        client = link.local.get(session.token)
        own: Client | None = None
        if client is None:
            now = time.monotonic()
            if now < self._join_at:
                return
            try:
                client = own = Client(
                    session.socket,
                    name="vllm worker",
                    pool=session.pool,
                    group=session.token,
                    timeout=self._timeout,
                )
            except KvslotError as error:
                self._join_at = now + JOIN_RETRY_SECONDS
                log.warning("kvslot: the worker has no memory yet: %s", error)
                return
        pool = None
        if engine is not None:
            memory = client.pool
            width = memory.planes["blocks"].slot_bytes * memory.block_size
            try:
                pool = self._view(engine, memory.plane("blocks"), width)
            except ValueError as error:
                log.error("kvslot: not used: %s", error)
        mapping = self._mappings[session.generation] = _Mapping(pool, own)
        if pool is not None:
            mapping.jobs += 1
            populate_aside(pool, WRITE, lambda: mapping.retired, lambda: self._populated(mapping))

    def _release(self, client: Client) -> None:
        """Ends sessions of this process that lost their connection: the daemon keeps slots aside for them."""
        with contextlib.suppress(KvslotError):  # lost again: through the next one
            while self._over:
                # Refused: it was ended in good order, or the daemon knows nothing of it.
                with contextlib.suppress(Refused):
                    client.release(self._over[-1])
                self._over.pop()

    def _populated(self, mapping: _Mapping) -> None:
        with self._changed:
            mapping.jobs -= 1
            self._changed.notify_all()

    def _view(self, engine: EngineBlocks, plane: Array, width: int) -> Array:
        """The pool's plane as the copies see it; raises ValueError where they cannot."""
        return engine.pool_view(plane, width)

    def _retire(self, present: int) -> None:
        """Lets go of what is not the `present` generation and not in use."""
        with self._changed:
            for generation, mapping in list(self._mappings.items()):
                if generation == present:
                    continue
                mapping.retired = True
                if not mapping.jobs and self._unmap(mapping):
                    del self._mappings[generation]
                    self._report.closed.append(generation)

    def _unmap(self, mapping: _Mapping) -> bool:
        """Whether this process can reach that memory no more.  While a view is alive it can: to be tried again."""
        mapping.pool = None
        if mapping.client is not None:
            token = mapping.client.token
            try:
                mapping.client.close()
            except BufferError:
                if not mapping.kept:
                    log.warning(
                        "kvslot: memory of an earlier session is still in use, and is kept until it is not"
                    )
                mapping.kept = True
                return False
            mapping.client = None
            self._over.append(token)
        return True

    # -- copies ------------------------------------------------------------------------------------------------------

    def _store(self, store: Store, pool: Array) -> bool:
        assert self._engine is not None
        start = time.perf_counter()
        try:
            self._engine.store(pool, store.pool, store.engine)
        except (IndexError, ValueError) as error:
            log.error("kvslot: a store was not made: %s", error)
            return False
        self.copy_seconds += time.perf_counter() - start
        self.copied_bytes += len(store.pool) * self._engine.block_bytes
        return True

    def _load(self, job: Job) -> bool:
        engine, pool, load = self._engine, job.mapping.pool, job.load
        assert engine is not None
        assert pool is not None
        start = time.perf_counter()
        portion = max(1, PORTION_BYTES // engine.block_bytes)
        try:
            for i in range(0, len(load.pool), portion):
                if job.cancelled:
                    return False
                part = slice(i, i + portion)
                engine.load(pool, load.pool[part], [table[part] for table in load.engine])
        except (IndexError, ValueError) as error:
            log.error("kvslot: a load was not made: %s", error)
            return False
        self.copy_seconds += time.perf_counter() - start
        self.copied_bytes += len(load.pool) * engine.block_bytes
        return True

    def _queue(self, job: Job) -> None:
        with self._changed:
            job.mapping.jobs += 1
            self._running[job.load.entry] = job
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kvslot-load", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
                job = self._jobs.popleft()
            try:
                good = self._load(job)
            except Exception:
                # A fault of ours; but a load that is never reported would keep its request waiting for good.
                log.exception("kvslot: a load was not made")
                good = False
            with self._changed:
                job.mapping.jobs -= 1
                del self._running[job.load.entry]
                self._loaded(job.load, good=good and not job.void)
                self._changed.notify_all()

    def _fail_all(self) -> None:
        """Loads that are under way, and those that vLLM has not been told of, are failures."""
        with self._changed:
            for job in self._running.values():
                job.cancelled = job.void = True
            made, self._made = self._made, []
            for load in made:
                if load.entry in self._report.loaded:
                    self._report.loaded.remove(load.entry)
                self._loaded(load, good=False)

    def _loaded(self, load: Load, *, good: bool) -> None:
        """A load has ended.  Called with the condition held."""
        if good:
            self._report.loaded.append(load.entry)
            if self._asynchronous:
                self._made.append(load)
        else:
            self._report.failed.append(load.entry)
            self._results.failed.add(load.request)
            self._results.bad_blocks.update(
                block for table in load.engine for block in table if block != NULL
            )
            if not self._asynchronous:
                self._poisoned = self._report.poisoned = True
        if self._asynchronous:
            self._results.received.add(load.request)


class RegionWorker(Worker):
    """The second form: vLLM's memory is a region that others read, and the pool is a directory of records."""

    def __init__(
        self,
        engine: EngineBlocks | None,
        own: Region | None,
        *,
        asynchronous: bool = True,
        timeout: float = 1.0,
    ) -> None:
        """`own`: the region in which the engine's blocks lie; None: nothing is stored and nothing loaded."""
        if engine is not None and own is not None:
            try:
                own.describe(engine)
            except ValueError as error:
                log.error("kvslot: not used: %s", error)
                own = None
        super().__init__(engine if own is not None else None, asynchronous=asynchronous, timeout=timeout)
        self._own = own
        self._peers = Peers(populate=True)
        self._reading = threading.Lock()  # of peers: the thread's while it loads
        self._sweep_at = 0.0

    def prepare(self, orders: Orders) -> None:
        """What others know of the blocks that this step writes ends now."""
        if self._own is not None:
            for block in orders.writes:
                self._own.revoke(block)
        now = time.monotonic()
        if now >= self._sweep_at and self._reading.acquire(blocking=False):
            self._sweep_at = now + SWEEP_SECONDS
            try:
                self._peers.sweep()
            finally:
                self._reading.release()

    def close(self) -> None:
        """Ends all entries, too."""
        super().close()
        self._peers.close()
        if self._own is not None:
            self._own.close()

    def _view(self, engine: EngineBlocks, plane: Array, width: int) -> Array:
        if width < RECORD_BYTES:
            raise ValueError(f"blocks of {width} bytes hold no records")
        flat = plane.reshape(-1)
        return flat[: len(flat) // width * width].reshape(-1, width)

    def _store(self, store: Store, pool: Array) -> bool:
        assert self._own is not None
        (table,) = store.engine
        for target, block in zip(store.pool, table, strict=True):
            write_record(pool, target, self._own.settle(block))
        return True

    def _load(self, job: Job) -> bool:
        engine, pool, load = self._engine, job.mapping.pool, job.load
        assert engine is not None
        assert pool is not None
        start = time.perf_counter()
        portion = max(1, PORTION_BYTES // engine.block_bytes)
        (table,) = load.engine
        for i in range(0, len(load.pool), portion):
            records = read_records(pool, load.pool[i : i + portion])
            with self._reading:
                if job.cancelled or not copy(self._peers, records, engine, table[i : i + portion]):
                    return False
        self.copy_seconds += time.perf_counter() - start
        self.copied_bytes += len(load.pool) * engine.block_bytes
        return True
