"""The scheduler's side: what to load and to store, and when to commit and to free.  Knows nothing of vLLM's classes.

    matched    a waiting request: one Allocate, whose answer is kept            hit = whole blocks that the pool has
    allocated  it got engine blocks: a Load for those that are only in the pool
    step       every step: Stores for blocks that this step completes           Orders to the worker
    report     what the worker has done: stored blocks are committed            ... in one frame
    finished   the request has ended: its sequence is freed once no copy uses it

An entry is a request's sequence in the pool.  It lives as long as the request, preemptions included: what was stored
before one is in the pool, so that the request resumes by a load.  The daemon hears of a request twice in all, if its
output fills no block: when it is admitted (a call), and when its prompt has been stored (a posted Commit).  Frames
leave when there is something to say, at most one a step; while decoding that is one for each block filled.

    copies     nothing is freed or committed while a copy of it is under way: the worker reports each, once.  Reports
               name entries, so that one of a request that ended meanwhile does no harm
    published  blocks follow each other: what was stored is committed up to the first block that was not, and where a
               store was dropped, or a load failed that stores may have been computed on, nothing more of it is
    last token at most (n-1) // block_size blocks of an n-token prompt are used: one token is left to compute
    refused    Later and Never do not hold vLLM up: the request may still read what is cached, and stores nothing
    lost       without a daemon every request is computed by vLLM alone; those running go on without an entry
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvslot.api.client import Client, Later, Namespace, Never, OutOfRoom
from kvslot.api.client import Sequence as PoolSequence
from kvslot.api.wire import KvslotError, Refused, messages
from kvslot.engines.vllm.blocks import NULL
from kvslot.engines.vllm.link import Link
from kvslot.engines.vllm.messages import Load, Orders, Report, Store

LISTEN_SECONDS: Final = 0.02  # between looks at what the daemon has pushed
DISTRUST_FIRST: Final = (
    0.05  # seconds without loads after one that failed: half of it, then twice as long each time
)
DISTRUST_MOST: Final = 30.0

log: Final = logging.getLogger("vllm.kvslot")


class Request(Protocol):
    """What is read of a request of vLLM's."""

    request_id: str
    num_computed_tokens: int

    @property
    def num_tokens(self) -> int: ...

    @property
    def all_token_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of a planner since it was made.  Tokens are in whole blocks."""

    requests: int
    bypassed: int  # requests that may not use the pool: images, embeddings, unknown adapters, ...
    hit_tokens: int  # found in the pool when requests were admitted
    loaded_tokens: int  # of those, copied into vLLM's blocks: the others it had itself
    stored_tokens: int
    refused: int  # Later and Never
    load_failures: int
    late: int  # reports of entries that are no more
    preempted: int  # sequences given back because the daemon asked
    losses: int  # of the connection


@dataclass(slots=True)
class Entry:
    """A request's sequence in the pool."""

    number: int
    generation: int  # of the connection
    request: Request
    sequence: PoolSequence
    there: int  # blocks that may be loaded: the hit, and what was stored since
    storing: bool  # whether more is stored
    usable: int = 0  # blocks that vLLM was last told of
    committed: int = 0  # blocks that were published, or asked to be
    ordered: int = 0  # blocks that are in the pool when all stores that were ordered have been made
    loading: bool = False
    loadable: bool = True  # no more after a failure
    stores: int = 0  # ordered, and not yet reported
    ended: bool = False
    spoiled: bool = False  # nothing more of it may be published


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    bypassed: int = 0
    hit_tokens: int = 0
    loaded_tokens: int = 0
    stored_tokens: int = 0
    refused: int = 0
    load_failures: int = 0
    late: int = 0
    preempted: int = 0
    said: set[str] = field(default_factory=set)  # reasons that were logged


class Planner:
    """The requests that vLLM's scheduler knows, and what of them is in the pool."""

    def __init__(
        self,
        link: Link,
        namespace_of: Callable[[Any], Namespace | str],
        block_size: int,
        *,
        store_output: bool = True,
        valid: Callable[[Client, Sequence[int]], int] | None = None,
        writes: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`namespace_of` a request says whose prefixes it may share, or, as text, why none.

        `block_size`: tokens.  `store_output`: whether blocks that decoding fills are stored, too.  `valid`: how many of
        these pool blocks, from the first on, may be loaded now (None: all that are leased).  `writes`: whether the
        worker is told which engine blocks a step writes into.
        """
        self._link = link
        self._namespace_of = namespace_of
        self._size = block_size
        self._store_output = store_output
        self._valid = valid
        self._requests: dict[str, Request] | None = {} if writes else None
        self._fresh: set[str] = set()  # requests that got their blocks since they were last computed
        self._clock = clock
        self._entries: dict[str, Entry | None] = {}  # by request; None: it goes without
        self._numbers: dict[int, Entry] = {}  # until nothing of them is under way
        self._loading: dict[
            int, str
        ] = {}  # requests by entry, until their load is reported, though the session be lost
        self._suspects: set[str] = set()  # requests whose blocks vLLM shares out and has not computed yet
        self._last = 0
        self._loads: list[Load] = []
        self._void = False  # whether the worker is to be told of a reset
        self._counts = _Counts()
        self._full_until = 0.0  # memory was short: until then no room is asked for
        self._listen_at = 0.0
        self._failed = 0  # loads in a row
        self._distrust_until = 0.0  # loads failed: until then none is promised

    # -- what vLLM's scheduler asks ----------------------------------------------------------------------------------

    def matched(self, request: Request, local: int) -> int:
        """Tokens beyond the `local` ones, which vLLM has itself, that can be loaded.

        Asked again and again while the request waits: only the first time speaks to the daemon.
        """
        name = request.request_id
        entry = self._entries.get(name)
        if entry is None:
            if name in self._entries:
                return 0
            entry = self._entries[name] = self._admit(request, local)
            if entry is None:
                return 0
        if not entry.loadable or (self._distrust_until and self._clock() < self._distrust_until):
            return 0
        if self._valid is not None:
            self._look(entry)
        usable = min(entry.there, (request.num_tokens - 1) // self._size)
        entry.usable = usable
        return max(0, usable * self._size - local)

    def allocated(
        self, request: Request, tables: Callable[[], Sequence[Sequence[int]]], external: int
    ) -> None:
        """The request got blocks; `external` tokens are to be loaded into them.  `tables`: one for each group."""
        if self._requests is not None:
            self._requests[request.request_id] = request
            self._fresh.add(request.request_id)
        if external <= 0:
            return
        entry = self._entries.get(request.request_id)
        assert entry is not None, "nothing was promised for this request"
        last = entry.usable
        first = last - external // self._size
        pool = self._blocks(entry, first, last)
        self._loads.append(
            Load(
                entry.number,
                entry.generation,
                request.request_id,
                pool,
                [list(table[first:last]) for table in tables()],
            )
        )
        entry.loading = True
        self._loading[entry.number] = request.request_id
        self._counts.loaded_tokens += external

    def step(
        self,
        scheduled: Mapping[str, int],
        drafts: Mapping[str, Sequence[int]],
        tables_of: Callable[[str], Sequence[Sequence[int]]],
    ) -> Orders:
        """The orders of a step: `scheduled` tokens of each request are computed in it, `drafts` among them.

        Called again and again while vLLM waits for loads: costs a microsecond when there is nothing to do.
        """
        link = self._link
        orders = Orders(link.session, self._loads, void=self._void, idle=not scheduled)
        self._void = False
        if self._loads:
            self._loads = []
        if self._requests is not None:
            self._note_writes(orders, scheduled, tables_of)
        client = link.client
        if client is None:
            return orders
        try:
            if self._clock() >= self._listen_at:
                self._listen(client)
            for name, count in scheduled.items():
                entry = self._entries.get(name)
                if entry is None or not entry.storing:
                    continue
                drafted = drafts.get(name)
                done = entry.request.num_computed_tokens + count - (len(drafted) if drafted else 0)
                if done // self._size > entry.ordered:
                    self._order(entry, done // self._size, tables_of, orders.stores)
            client.flush()
        except Refused as error:
            self._say(f"refused: {error}")
        except KvslotError as error:
            self._lost(error)
        return orders

    def report(self, report: Report) -> None:
        """What the worker has done."""
        if report.poisoned:
            # vLLM gives blocks to other requests before they are loaded, and a scheduler that is ahead has had them
            # read by now: nothing that is computed while one of them is being put right is published.
            for each in self._numbers.values():
                self._spoil(each)
        for number in report.failed:
            entry = self._numbers.get(number)
            name = self._loading.pop(number, "")
            if report.poisoned and name in self._entries:
                self._suspects.add(name)
            if entry is None or not entry.ended:  # else the copy may have stopped because nobody wanted it
                self._counts.load_failures += 1
                self._failed += 1
                self._distrust_until = self._clock() + min(DISTRUST_MOST, DISTRUST_FIRST * 2**self._failed)
            if entry is not None:
                entry.loadable = False
                if entry.stores:  # ordered before this was known
                    self._spoil(entry)
                if self._valid is not None:
                    entry.there = entry.ordered = 0  # they were revoked: what is computed instead is stored
                self._copied(entry, load=True)
            else:
                self._counts.late += 1
        for number in report.loaded:
            entry = self._numbers.get(number)
            self._loading.pop(number, None)
            self._failed = 0
            if entry is not None:
                self._copied(entry, load=True)
            else:
                self._counts.late += 1
        for number in report.dropped:  # before those that were stored, which may lie behind them
            entry = self._numbers.get(number)
            if entry is not None:
                self._spoil(entry)
        for number, first, end in report.stored:
            entry = self._numbers.get(number)
            if entry is None:
                self._counts.late += 1
                continue
            self._commit(entry, first, end)
            self._copied(entry, load=False)
        for number in report.dropped:
            entry = self._numbers.get(number)
            if entry is not None:
                self._copied(entry, load=False)
        for generation in report.closed:
            self._link.let_go(generation)
        self._flush()

    def finished(self, request: Request) -> None:
        """The request has ended, in whatever way."""
        if self._requests is not None:
            self._requests.pop(request.request_id, None)
            self._fresh.discard(request.request_id)
        self._suspects.discard(request.request_id)
        entry = self._entries.pop(request.request_id, None)
        if entry is not None:
            entry.ended = True
            entry.storing = False
            self._settle(entry)
        if not self._entries:
            self._flush()  # there may be no step to come that would say it

    def reset(self) -> None:
        """What is cached belongs to a model that is no more: running requests load and publish nothing further.

        Loads that are under way become failures, those of lost sessions, too, so that vLLM computes their blocks and
        does not keep them for later requests.
        """
        self._void = True
        for entry in self._numbers.values():
            entry.loadable = False
            self._spoil(entry)

    def close(self) -> None:
        """The engine ends."""
        self._link.close()

    def statistics(self) -> Statistics:
        """What was found, loaded and stored."""
        c = self._counts
        return Statistics(
            c.requests, c.bypassed, c.hit_tokens, c.loaded_tokens, c.stored_tokens, c.refused, c.load_failures, c.late,
            c.preempted, self._link.losses,
        )  # fmt: skip

    # -- inside ------------------------------------------------------------------------------------------------------

    def _admit(self, request: Request, local: int) -> Entry | None:
        self._counts.requests += 1
        client = self._link.client
        if client is None:
            return None
        where = self._namespace_of(request)
        if isinstance(where, str):
            self._counts.bypassed += 1
            self._say(f"requests go without: {where}")
            return None
        tokens = array("i", request.all_token_ids).tobytes()
        try:
            root = client.open_namespace(where)
            sequence, storing = self._allocate(client, tokens, root, local)
        except Refused as error:
            self._counts.refused += 1
            self._say(f"refused: {error}")
            return None
        except KvslotError as error:
            self._lost(error)
            return None
        if sequence is None:
            return None
        self._last += 1
        there = sequence.hit // self._size
        entry = Entry(self._last, self._link.generation, request, sequence, there, storing, ordered=there)
        self._numbers[entry.number] = entry
        if self._suspects:
            self._spoil(entry)
        if self._valid is not None:
            self._look(entry)
            there = entry.there
        self._counts.hit_tokens += there * self._size
        return entry

    def _look(self, entry: Entry) -> None:
        """Where blocks can be revoked: how many of them are still there.  The others are stored again."""
        client = self._link.client
        if client is None or self._valid is None or entry.stores or entry.loading:
            return
        known = max(entry.there, entry.committed, entry.sequence.hit // self._size)
        entry.there = self._valid(client, self._blocks(entry, 0, known))
        entry.ordered = min(entry.ordered, entry.there)

    def _note_writes(
        self,
        orders: Orders,
        scheduled: Mapping[str, int],
        tables_of: Callable[[str], Sequence[Sequence[int]]],
    ) -> None:
        """The engine blocks into which this step writes for the first time."""
        assert self._requests is not None
        for load in orders.loads:
            for targets in load.engine:
                orders.writes += targets
        for name, count in scheduled.items():
            request = self._requests.get(name)
            if request is None:  # whose blocks were given out unseen: any of them may be written
                for table in tables_of(name):
                    orders.writes += table
                continue
            first, end = request.num_computed_tokens, request.num_computed_tokens + count
            if (
                first % self._size
                and (end - 1) // self._size == first // self._size
                and name not in self._fresh
            ):
                continue  # within a block that an earlier step began
            self._fresh.discard(name)
            for table in tables_of(name):
                orders.writes += table[first // self._size : (end - 1) // self._size + 1]

    def _allocate(
        self, client: Client, tokens: bytes, root: int, local: int
    ) -> tuple[PoolSequence | None, bool]:
        """A sequence for the prompt, and whether it has room for all of it; else one for what is cached alone."""
        if self._clock() >= self._full_until:
            answer = client.allocate(tokens, namespace=root)
            if isinstance(answer, PoolSequence):
                return answer, True
            self._counts.refused += 1
            if isinstance(answer, Later):
                client.withdraw(answer.ticket)
                self._full_until = self._clock() + answer.retry_after_ms / 1e3
        hit = client.probe(tokens, namespace=root) // self._size * self._size
        if hit <= local:
            return None, False
        answer = client.allocate(tokens[: 4 * (hit + 1)], namespace=root)
        if isinstance(answer, PoolSequence):
            return answer, False
        if not isinstance(answer, Never):
            client.withdraw(answer.ticket)
        return None, False

    def _order(
        self, entry: Entry, ready: int, tables_of: Callable[[str], Sequence[Sequence[int]]], out: list[Store]
    ) -> None:
        """A store for the blocks up to `ready`, as far as their tokens are known and there is room for them."""
        sequence, size = entry.sequence, self._size
        if sequence.copies:
            self._moved(entry)
            return
        missing = ready * size - sequence.length
        if missing > 0:
            if not self._store_output:
                ready -= -(-missing // size)
            else:
                tokens = entry.request.all_token_ids
                known = len(tokens) // size  # with asynchronous scheduling the last ones come a step later
                ready = min(ready, known)
                if ready * size > sequence.length:
                    try:
                        sequence.append_all(array("i", tokens[sequence.length : ready * size]).tobytes())
                    except OutOfRoom:
                        entry.storing = False
                        ready = sequence.length // size
        first = entry.ordered
        if ready <= first:
            return
        tables = [list(table[first:ready]) for table in tables_of(entry.request.request_id)]
        whole = min(table.index(NULL) if NULL in table else len(table) for table in tables)
        if whole < ready - first:
            # A block that vLLM has no more, or never had: what comes after it could not be found without it.
            entry.storing = False
            ready = first + whole
            tables = [table[:whole] for table in tables]
        if whole:
            out.append(
                Store(entry.number, entry.generation, first, ready, self._blocks(entry, first, ready), tables)
            )
            entry.ordered = ready
            entry.stores += 1

    def _commit(self, entry: Entry, first: int, end: int) -> None:
        """The sequence's blocks [first, end) are in the pool."""
        if entry.sequence.copies:
            self._moved(entry)
        if first > entry.there:  # blocks before them are not: what would be published is what stood there
            self._spoil(entry)
        if entry.spoiled:
            return
        self._counts.stored_tokens += max(0, end - entry.there) * self._size
        entry.there = max(entry.there, end)
        try:
            entry.committed = max(entry.committed, entry.there)
            entry.sequence.commit(entry.committed * self._size, wait=False)
        except Refused as error:
            entry.storing = False
            self._say(f"a commit was refused: {error}")
        except KvslotError as error:
            self._lost(error)

    def _spoil(self, entry: Entry) -> None:
        """Nothing more of it is stored, and of what was ordered nothing is published."""
        entry.storing = False
        entry.spoiled = True

    def _moved(self, entry: Entry) -> None:
        """Blocks stand elsewhere than they were stored.  A session of whole pages has no reason to meet this."""
        entry.loadable = False
        self._spoil(entry)
        self._say("a sequence was moved: nothing more of it is stored")

    def _blocks(self, entry: Entry, first: int, last: int) -> list[int]:
        """The pool blocks that hold the sequence's blocks [first, last)."""
        out: list[int] = []
        size = self._size
        at = 0
        extents = entry.sequence.extents
        for i in range(0, len(extents), 2):
            start, count = extents[i] // size, extents[i + 1] // size
            low, high = max(first, at), min(last, at + count)
            if low < high:
                out += range(start + low - at, start + high - at)
            at += count
        assert len(out) == last - first, f"blocks {first} to {last} of a sequence of {at}"
        return out

    def _copied(self, entry: Entry, *, load: bool) -> None:
        """A copy has ended."""
        if load:
            entry.loading = False
        else:
            entry.stores -= 1
        self._settle(entry)

    def _settle(self, entry: Entry) -> None:
        """Frees the entry's sequence if the entry has ended and nothing of it is under way."""
        if not entry.ended or entry.loading or entry.stores:
            return
        if self._numbers.pop(entry.number, None) is None or entry.sequence.ended:
            return
        try:
            # No step is named: whatever copies there were have ended.
            entry.sequence.free(fence=0)
        except Refused as error:
            self._say(f"a sequence could not be freed: {error}")
        except KvslotError as error:
            self._lost(error)

    def _listen(self, client: Client) -> None:
        """Takes in what the daemon has said."""
        self._listen_at = self._clock() + LISTEN_SECONDS
        for event in client.events():
            if isinstance(event, messages.Preempt):
                for entry in self._numbers.values():
                    if entry.sequence.id == event.sequence:
                        self._counts.preempted += 1
                        self._give_back(entry)
                        break

    def _give_back(self, entry: Entry) -> None:
        """The daemon wants the sequence's memory: vLLM has all it needs in its own blocks."""
        name = entry.request.request_id
        if self._entries.get(name) is entry:
            self._entries[name] = None
        entry.ended = True
        entry.storing = entry.loadable = False
        self._settle(entry)

    def _flush(self) -> None:
        client = self._link.client
        if client is None:
            return
        try:
            client.flush()
        except KvslotError as error:
            self._lost(error)

    def _lost(self, error: KvslotError) -> None:
        """The connection has ended: so have all sequences.  Copies that are under way end by themselves."""
        self._link.lost(error)
        for name in self._entries:
            self._entries[name] = None
        self._numbers.clear()

    def _say(self, what: str) -> None:
        """A line in the log, once for each thing to say."""
        if what not in self._counts.said and len(self._counts.said) < 100:
            self._counts.said.add(what)
            log.info("kvslot: %s", what)
