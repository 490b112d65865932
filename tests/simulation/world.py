"""A pool under observation: engines that know only what replies told them, and a judge that knows everything.

Three records are kept beside the pool, each as naive as can be, and compared with it after every act:

    shadow   the state of every slot, moved by the ledger's journal: each change must start from the state it names
    twin     what is cached, as a dict from "namespace and all tokens up to here" to the slots that hold them
    paint    the device's memory, where each written slot holds a number derived from namespace and tokens up to it

An engine submits steps: each runs its copies, reads every slot of its sequences and writes the next ones.  A step
executes at any moment between its submission and its completion, so whatever is handed out too early is overwritten
or misread, and the paint shows it.  Copies of moves run on the simulated device, late.  An engine that follows moves is
told of them and goes by its old tables until it submits its next step.

Slots that a step in flight, a copy or a fence still covers are counted; the pool must not let go of them.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from kvslot.allocator import (
    UNLIMITED,
    Admitted,
    Committed,
    Copy,
    Grown,
    Later,
    Never,
    Pool,
    PoolConfig,
    Quota,
    Reason,
    Session,
    Space,
    State,
    audit,
)
from kvslot.allocator.admission import Ticket
from kvslot.allocator.results import Moved
from kvslot.daemon.device import Completion, Event, Geometry
from kvslot.daemon.device.simulated import Schedule, SimulatedDevice

MASK = (1 << 64) - 1
FREE, PRIVATE, CACHED, FENCED, MOVING, RESERVED, QUARANTINED, PADDING = range(8)
EXCESS_CELLS = 4
ALLOWED = {
    (FREE, PRIVATE), (FREE, MOVING), (FREE, RESERVED), (FREE, FREE),
    (PRIVATE, CACHED), (PRIVATE, FENCED), (PRIVATE, FREE), (PRIVATE, RESERVED), (PRIVATE, QUARANTINED),
    (CACHED, FREE), (CACHED, RESERVED), (CACHED, MOVING), (CACHED, FENCED),
    (FENCED, FREE), (FENCED, RESERVED), (FENCED, QUARANTINED),
    (MOVING, CACHED), (MOVING, FREE), (MOVING, RESERVED), (MOVING, FENCED),
    (RESERVED, FREE),
    (QUARANTINED, PRIVATE), (QUARANTINED, FENCED),
}  # fmt: skip
"""Every change of state there is.  Nothing goes back from cached, nothing is handed out but from free."""


class Fault(AssertionError):
    """The judge found something wrong."""


def require(condition: bool, *what: object) -> None:
    if not condition:
        raise Fault(" ".join(map(str, what)))


def chain(root: int, tokens: list[int]) -> list[int]:
    """For each position a number that stands for the namespace and all tokens up to and including it."""
    value = (root * 0x9E3779B97F4A7C15 + 1) & MASK
    out = []
    for token in tokens:
        value = (value ^ (token + 0x5851F42D4C957F2D)) * 0xD6E8FEB86659FD93 & MASK
        value ^= value >> 32
        out.append(value)
    return out


def pack(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)


def expand(extents: list[int]) -> list[int]:
    """Flat extents, slot by slot."""
    return [
        slot for i in range(0, len(extents), 2) for slot in range(extents[i], extents[i] + extents[i + 1])
    ]


def _within_quota(ticket: Ticket) -> bool:
    account = ticket.account
    return (
        ticket.session.charged + ticket.need <= ticket.session.quota
        and account.charged + ticket.need <= account.slots
        and (ticket.sequence is None or account.unwritten + ticket.need <= account.room)
    )


@dataclass(eq=False)
class Seq:
    """A sequence as its engine knows it: tokens, and the table built from replies alone."""

    engine: Engine
    handle: int
    root: int
    tokens: list[int]
    values: list[int]
    table: list[int]
    told: int  # tokens the pool was told of
    ready: int  # positions whose slots hold their values (where no queued write says otherwise)
    cursor: int  # positions that submitted steps have written or will
    written: int  # positions that completed steps have written
    born: int = 0
    reported: int = 0  # what the pool was told is written
    base: int = 0  # published as far as commits and hits said
    kept_from: int = 0
    last_step: int = 0
    ticket: int = 0
    goal: int = 0  # length at which the driver lets it finish
    preempt: float | None = None
    ended: bool = False
    leased: list[int] = field(default_factory=list)  # published slots before its window

    @property
    def capacity(self) -> int:
        return len(self.table)

    def token(self, rng: random.Random, vocabulary: int) -> None:
        """One more token, as if sampled."""
        self.tokens.append(rng.randrange(vocabulary))
        self.values.append(chain_next(self.values[-1], self.tokens[-1]))


def chain_next(value: int, token: int) -> int:
    value = (value ^ (token + 0x5851F42D4C957F2D)) * 0xD6E8FEB86659FD93 & MASK
    return value ^ (value >> 32)


@dataclass(eq=False)
class Step:
    number: int
    copies: list[Copy]
    reads: list[tuple[int, int]]
    writes: list[tuple[int, int]]
    advances: list[list[object]]  # [Seq, positions written once this has completed]
    uses: list[int]
    executed: bool = False


@dataclass(eq=False)
class Guard:
    """Slots given back behind a fence."""

    step: int
    slots: list[int]


@dataclass(eq=False)
class Engine:
    """One engine: a session per process, steps in flight."""

    sessions: list[Session]
    page: int
    submitted: int = 0
    completed: list[int] = field(default_factory=list)
    flight: deque[Step] = field(default_factory=deque)
    queued: list[tuple[Seq, Copy]] = field(default_factory=list)  # copies no step has taken yet
    seqs: dict[int, Seq] = field(default_factory=dict)
    pins: dict[int, list[int]] = field(default_factory=dict)
    guards: list[Guard] = field(default_factory=list)
    life: str = "live"
    stuck: bool = False  # its steps do not complete
    movable: bool = False
    epoch: int = 0  # of the last move it has applied
    heard: int = 0  # ... and that it was told of
    told: list[tuple[int, Seq, int, list[int]]] = field(
        default_factory=list
    )  # (epoch, sequence, position, slots)
    missed: list[Moved] = field(default_factory=list)  # pushes that went with its connection

    @property
    def session(self) -> Session:
        return self.sessions[0]

    @property
    def passed(self) -> int:
        return min(self.completed)


class World:
    """One pool, its device, its engines and the judge."""

    def __init__(
        self,
        config: PoolConfig,
        *,
        seed: int = 0,
        schedule: Schedule | None = None,
        pool: Pool | None = None,
        vocabulary: int = 3,
        checks: bool = True,
    ) -> None:
        self.rng = random.Random(seed)
        self.pool = pool or Pool(config)
        self.config = config
        self.unit = self.pool.unit
        self.vocabulary = vocabulary
        self.checks = checks
        self.now = 0.0
        slots = self.pool.slots
        self.device = SimulatedDevice(
            Geometry(slots=slots, slot_bytes=(8,)), seed=seed, schedule=schedule or Schedule()
        )
        self.mover = self.device.stream(low_priority=True)
        self.memory = self.device.plane(0).cast("Q")
        self.shadow = bytearray([PADDING] * self.pool.padding + [FREE] * (slots - self.pool.padding))
        self.pool.ledger.journal = self._journal
        self.engines: list[Engine] = []
        self.cached: dict[int, tuple[int, ...]] = {}  # value at a unit's end -> its slots
        self.parent: dict[int, int] = {}  # the same -> value at the end of the unit before, 0 at the front
        self.value_of: dict[int, int] = {}  # cached slot -> its paint
        self.end_of: dict[int, int] = {}  # cached slot -> value at its unit's end
        self.in_use: Counter[int] = Counter()  # slots of steps in flight, queued copies and fences
        self.pending: Counter[int] = Counter()  # slots that a queued or submitted write will fill
        self.in_tables: Counter[int] = Counter()
        self.pinned: Counter[int] = Counter()  # unit values under pins
        self.moves: dict[int, Event] = {}
        self.move_slots: dict[int, tuple[list[int], list[int]]] = {}
        self.moving_now: set[int] = set()  # sources that a move being published gives up
        self.duplicates: set[int] = set()
        self.peeled: set[int] = set()
        self.handles = 0
        self.events: list[tuple[int, int, int]] = []
        self.evicted = 0
        self.tally: Counter[str] = Counter()

    # -- the judge ---------------------------------------------------------------------------------------------

    def _journal(self, slot: int, length: int, source: int, target: int) -> None:
        require((source, target) in ALLOWED, "a slot goes from", State(source).name, "to", State(target).name)
        shadow = self.shadow
        require(length > 0, "a change of", length, "slots")
        for each in range(slot, slot + length):
            if shadow[each] != source:
                raise Fault(f"slot {each} is {State(shadow[each]).name}, said to be {State(source).name}")
            shadow[each] = target
            if source == FREE and self.pool.scrubs and target == PRIVATE:
                require(not self.memory[each], "slot", each, "was handed out with what somebody left in it")
            if target in (FREE, RESERVED):
                if self.in_use[each]:
                    raise Fault(f"slot {each} became {State(target).name} while a step or fence covers it")
                if self.in_tables[each] and each not in self.moving_now:
                    raise Fault(f"slot {each} became {State(target).name} while a table holds it")
            if source in (PRIVATE, QUARANTINED) and target != QUARANTINED and target != PRIVATE:
                self.duplicates.discard(each)
                self.peeled.discard(each)
            if source == CACHED:
                self._uncache(each)
            if target == CACHED:
                self.events.append((each, source, target))

    def _uncache(self, slot: int) -> None:
        """One slot of a unit leaves the tree; the unit leaves the twin with its first slot."""
        value = self.end_of.pop(slot, None)
        require(value is not None, "slot", slot, "was cached, but the twin does not know it")
        assert value is not None
        self.value_of.pop(slot)
        if slot in self.moving_now:
            return
        self.evicted += 1
        if value in self.cached:
            require(not self.pinned[value], "slot", slot, "was evicted though pinned")
            for each in self.cached[value]:
                require(not self.in_use[each], "slot", each, "was evicted while a step or fence covers it")
                require(not self.in_tables[each], "slot", each, "was evicted while a table holds it")
            del self.cached[value]
            del self.parent[value]

    def _published(self, values: list[int], first: int, last: int, table: list[int]) -> None:
        """Positions [first, last) were published from `table`; the journal must have said the same."""
        unit = self.unit
        said = sorted(slot for slot, source, _ in self.events if source == PRIVATE)
        require(said == sorted(table[first:last]), "published", said, "instead of", sorted(table[first:last]))
        self.events.clear()
        for start in range(first, last, unit):
            end = values[start + unit - 1]
            require(end not in self.cached, "a cached token was published again")
            before = values[start - 1] if start else 0
            require(not before or before in self.cached, "published behind what is not cached")
            slots = tuple(table[start : start + unit])
            self.cached[end] = slots
            self.parent[end] = before
            for i, slot in enumerate(slots):
                self.value_of[slot] = values[start + i]
                self.end_of[slot] = end

    def lcp(self, values: list[int]) -> int:
        """Tokens of the longest cached prefix, in whole units."""
        n = 0
        while n + self.unit <= len(values) and values[n + self.unit - 1] in self.cached:
            n += self.unit
        return n

    def expected_hit(self, values: list[int], page: int) -> int:
        """What an allocation of this prompt must find."""
        n = len(values)
        hit = self.lcp(values)
        if hit >= n:
            hit = (n - 1) // self.unit * self.unit
        if page > 1:
            for position, slot in enumerate(self.cached_slots(values, hit)):
                if (slot - position) % page:
                    hit = position
                    break
            hit -= hit % self.unit
        return hit

    def broken_pages(self, values: list[int], hit: int, page: int) -> set[int]:
        """Where pages begin that the tree has in more than one physical page."""
        slots = self.cached_slots(values, hit)
        return {at - at % page for at in range(hit) if at % page and slots[at] != slots[at - 1] + 1}

    def cached_slots(self, values: list[int], length: int) -> list[int]:
        """The tree's slots of the first `length` tokens."""
        out: list[int] = []
        for end in range(self.unit, length + self.unit, self.unit):
            if len(out) < length:
                out += self.cached[values[end - 1]]
        return out[:length]

    def check(self) -> None:
        """Compares everything."""
        if not self.checks:
            return
        pool = self.pool
        wrong = audit(pool)
        if wrong:
            raise Fault("audit: " + "; ".join(wrong[:6]))
        require(not self.events, "slots became cached unasked:", self.events)
        counts = Counter(self.shadow)
        for state in State:
            require(counts[state] == pool.ledger.counts[state], "the ledger's sum of", state.name, "is off")
        memory = self.memory
        value_of = self.value_of
        require(counts[CACHED] == len(value_of), counts[CACHED], "slots cached, the twin has", len(value_of))
        for slot, value in value_of.items():
            if memory[slot] != value:
                raise Fault(f"cached slot {slot} does not read as its tokens")
        for value, before in self.parent.items():
            require(not before or before in self.cached, "a token was evicted before those behind it")
            require(self.shadow[self.cached[value][0]] == CACHED, "the twin's slot is not cached")
        require(pool.duplicates == len(self.duplicates), "duplicates:", pool.duplicates, self.duplicates)
        require(pool.peeled == len(self.peeled), "peeled:", pool.peeled, self.peeled)
        own: dict[int, set[int]] = {}  # by namespace: what its sequences have that nobody else can use
        for engine in self.engines:
            if engine.life in ("live", "lost"):
                for seq in engine.seqs.values():
                    self.check_seq(seq)
                    mine = own.setdefault(seq.root, set())
                    mine.update(
                        s for s in seq.table[seq.kept_from :] if self.shadow[s] in (PRIVATE, QUARANTINED)
                    )
        for root, slots in own.items():
            account = pool.account_of[root]
            require(
                len(slots) <= account.slots, "tenant", account.name, "has", len(slots), "of", account.slots
            )
            require(len(slots) <= account.charged, "tenant", account.name, "is charged", account.charged)

    def check_seq(self, seq: Seq) -> None:
        """A sequence's table is what its engine believes, and reads as its own tokens."""
        pool, table = self.pool, seq.table
        sequence = pool.sequences.get(seq.handle)
        require(sequence is not None, "sequence", seq.handle, "vanished")
        assert sequence is not None
        require(sequence.capacity == len(table), "capacity", sequence.capacity, "table", len(table))
        kept = seq.kept_from
        listed = expand(pool.table_of(sequence))
        listed = listed[len(listed) - (len(table) - kept) :]
        now = self.table_to_come(seq)
        if listed != now[kept:]:
            raise Fault(f"sequence {seq.handle}: the pool lists {listed}, the engine has {now[kept:]}")
        memory, pending, values, shadow = self.memory, self.pending, seq.values, self.shadow
        for position in range(kept, min(seq.ready, len(table))):
            slot = table[position]
            if memory[slot] != values[position] and not pending[slot]:
                raise Fault(f"sequence {seq.handle} misreads position {position} in slot {slot}")
        allowed = (
            (PRIVATE, CACHED, QUARANTINED, MOVING) if now is not table else (PRIVATE, CACHED, QUARANTINED)
        )
        for slot in table[kept:]:
            if shadow[slot] not in allowed:
                raise Fault(f"sequence {seq.handle} has slot {slot}, which is {State(shadow[slot]).name}")

    def table_to_come(self, seq: Seq) -> list[int]:
        """Its table once it has applied all that it was told, or would have been told had its connection held."""
        engine = seq.engine
        told = [(position, slots) for _, each, position, slots in engine.told if each is seq]
        told += [
            (each.position, expand(each.extents)) for each in engine.missed if each.sequence == seq.handle
        ]
        table = list(seq.table) if told else seq.table
        for position, slots in told:
            table[position : position + len(slots)] = slots
        return table

    def tell(self, engine: Engine, push: Moved) -> None:
        """An engine reads of a move; what it has heard already is said again after a broken connection."""
        engine.missed = [each for each in engine.missed if each != push]
        seq = engine.seqs.get(push.sequence)
        if push.epoch >= engine.heard and seq is not None:
            said = (push.epoch, seq, push.position, expand(push.extents))
            if said not in engine.told and push.epoch > engine.epoch:
                engine.told.append(said)
        engine.heard = max(engine.heard, push.epoch)

    def apply(self, engine: Engine) -> None:
        """The engine's next step goes by what it was told."""
        for _, seq, position, slots in engine.told:
            if not seq.ended:
                table = list(seq.table)
                table[position : position + len(slots)] = slots
                self._retable(seq, table)
        engine.told.clear()
        if engine.heard > engine.epoch:
            engine.epoch = engine.heard
            self.tally["epochs applied"] += 1
            if engine.life == "live" and self.rng.random() < 0.5:
                # The daemon reads the page between the two stores: the epoch is there, the step is not yet.
                session = engine.session
                self.pool.progress(session, engine.submitted, engine.completed[0], epoch=engine.epoch)

    def _handle(self, handle: int) -> None:
        require(handle > self.handles, "handle", handle, "was given out before")
        self.handles = handle

    # -- engines -----------------------------------------------------------------------------------------------

    def root(self, tenant: str = "a") -> int:
        return self.pool.open_space(Space(tenant))

    def limit_of(self, engine: Engine, root: int) -> tuple[int, Quota]:
        """The most that a sequence may have, in whole pages, and which quota says so."""
        limits = [
            (self.pool.usable, Quota.NONE),
            (engine.session.quota, Quota.SESSION),
            (self.pool.account_of[root].slots, Quota.SLOTS),
        ]
        limit, quota = min(limits, key=lambda each: each[0])
        return limit // engine.page * engine.page, quota

    def engine(
        self,
        *,
        page: int = 1,
        quota: int = UNLIMITED,
        append: str = "",
        peel_max: int = -1,
        workers: int = 0,
        movable: bool = False,
    ) -> Engine:
        pool = self.pool
        first = pool.open_session(page=page, quota=quota, append=append, peel_max=peel_max, movable=movable)
        sessions = [first, *(pool.open_session(page=page, group=first) for _ in range(workers))]
        engine = Engine(sessions, first.page, completed=[0] * len(sessions), movable=movable)
        self.engines.append(engine)
        return engine

    def allocate(
        self,
        engine: Engine,
        root: int,
        tokens: list[int],
        *,
        ticket: int = 0,
        priority: int = 0,
        contiguous: bool = False,
        wait_for_commit: bool = False,
    ) -> Seq | Later | Never:
        pool = self.pool
        values = chain(root, tokens)
        n, page = len(tokens), engine.page
        expected = self.expected_hit(values, page)
        broken = self.broken_pages(values, expected, page) if page > 1 else set()
        pages = -(-n // page) * page
        limit, quota = self.limit_of(engine, root)
        free, evicted = pool.runs.total, self.evicted
        window = pool.admission.window
        idle = self._idle()
        running = bool(pool.sequences)
        oldest = next((t for t in pool.admission.waiting.values() if _within_quota(t)), None)
        mine = ticket in pool.admission.waiting or ticket in pool.admission.awaiting
        due = oldest.need if oldest is not None and not (mine and ticket <= oldest.handle) else 0
        held_before = ticket in pool.admission.waiting
        answer = pool.allocate(
            engine.session, root, pack(tokens), now=self.now, ticket=ticket, priority=priority, contiguous=contiguous,
            wait_for_commit=wait_for_commit,
        )  # fmt: skip
        require(isinstance(answer, Never) == (pages > limit), "NEVER for", pages, "under", limit, answer)
        if isinstance(answer, Never):
            require((answer.limit, answer.quota) == (limit, quota), "the limit named is", answer)
            self.tally["never"] += 1
            return answer
        if isinstance(answer, Later):
            require(contiguous or evicted == self.evicted, "evicted for a request that was refused")
            require(not idle or page > 1 or contiguous, "LATER in an idle pool for", n, "of", limit, answer)
            require(not held_before or answer.ticket == ticket, "ticket", ticket, "became", answer.ticket)
            self._figures(answer)
            self.tally[f"later {answer.reason}"] += 1
            return answer
        assert isinstance(answer, Admitted)
        self._handle(answer.sequence)
        self._left_enough(engine, answer.capacity - n, running, due)
        if answer.hit != expected and answer.hit in {expected - expected % page, *broken}:
            # Where copies of broken pages have no room it is computed again from there on.
            self.tally["pages cut"] += 1
            expected = answer.hit
        require(answer.hit == expected, "hit", answer.hit, "where the twin has", expected)
        table = expand(answer.extents)
        require(len(table) == answer.capacity >= n, "capacity", answer.capacity, "extents", len(table))
        copied = sum(copy.length for copy in answer.copies)
        own = answer.capacity - answer.hit + copied
        if page == 1 and window is None and not contiguous:
            # Room is taken by whole cells; how much more than is missing may go for that is bounded.
            excess = self.evicted - evicted - max(0, own - free)
            most = own + EXCESS_CELLS * pool.quantum + 2 * pool.block_size  # short leaves go whole
            most += pool.headroom * pool.quantum  # and of a long one as much as leaves that, too
            require(excess < most, "evicted", excess, "more than", own, "needs")
            self.tally["evicted beyond need"] += max(0, excess)
        if contiguous and page == 1:
            require(
                table[answer.hit :] == list(range(table[answer.hit], table[answer.hit] + own)), "not one run"
            )
        targets = {copy.target + i for copy in answer.copies for i in range(copy.length)}
        require(len(targets) == copied, "two copies into one slot")
        for at, slot in enumerate(self.cached_slots(values, answer.hit)):
            require(
                table[at] == slot or table[at] in targets, "position", at, "is neither the tree's nor a copy"
            )
        for at in range(len(table) if page > 1 else 0):
            whole = table[at] % page == 0 if at % page == 0 else table[at] == table[at - 1] + 1
            require(whole, "position", at, "does not stand in its page")
        seq = Seq(
            engine=engine, handle=answer.sequence, root=root, tokens=list(tokens), values=values, table=table,
            told=n, ready=answer.hit, cursor=answer.hit, written=0, base=answer.hit,
        )  # fmt: skip
        for slot in table:
            self.in_tables[slot] += 1
        engine.seqs[seq.handle] = seq
        self._queue(seq, answer.copies)
        self.tally["admitted"] += 1
        self.tally["hit"] += answer.hit > 0
        return seq

    def _idle(self) -> bool:
        """Nothing runs, nothing is coming back, nobody waits: whatever fits must be let in."""
        pool = self.pool
        waiting = (
            pool.admission.waiting or pool.admission.growth or pool.admission.window
            or pool.moves.tickets or pool.moves.retired
        )  # fmt: skip
        held = any(s.fences or s.pins or s.owes or s.life for s in pool.sessions.values())
        held = held or (pool.scrubs and bool(pool.dirty or pool.tree.evictable))
        return not pool.sequences and not waiting and not held

    def _left_enough(self, engine: Engine, room: int, running: bool, due: int) -> None:
        """A new request, its growth room aside, has left what growth, the oldest ticket and the watermark are due."""
        pool = self.pool
        admission = pool.admission
        require(
            not any(deadline < self.now for deadline in engine.session.owes.values()), "a debtor was let in"
        )
        left = pool.runs.total + pool.tree.evictable + room
        growth = sum(t.need for t in admission.growth.values() if _within_quota(t))
        require(left >= growth, "left", left, "where growth needs", growth)
        if running:
            require(left >= pool.watermark, "left", left, "of a watermark of", pool.watermark)
        window = admission.window.held if admission.window else 0
        require(left + window >= due, "left", left, "where the oldest ticket needs", due)

    def _figures(self, later: Later) -> None:
        require(
            min(later.needed, later.free_now, later.coming_free, later.evictable) >= 0,
            "negative figures",
            later,
        )
        require(later.ticket > 0 and later.retry_after_ms > 0, "no ticket or no time", later)
        require((later.reason == Reason.QUOTA) <= bool(later.quota), "a quota that is not named", later)
        require(bool(later.quota) == bool(later.limit), "a quota without a limit", later)

    def _queue(self, seq: Seq, copies: list[Copy]) -> None:
        for copy in copies:
            seq.engine.queued.append((seq, copy))
            for i in range(copy.length):
                self.in_use[copy.source + i] += 1
                self.in_use[copy.target + i] += 1
                self.pending[copy.target + i] += 1
                self.peeled.add(copy.target + i)

    def extend(self, seq: Seq, tokens: int = 0, *, ticket: int = 0) -> Grown | Later | Never:
        pool, engine = self.pool, seq.engine
        before = seq.capacity
        evicted = self.evicted
        answer = pool.extend(engine.session, seq.handle, tokens=tokens, now=self.now, ticket=ticket)
        if isinstance(answer, Later):
            require(evicted == self.evicted, "evicted for growth that was refused")
            self._figures(answer)
            seq.ticket = answer.ticket
            self.tally[f"grow later {answer.reason}"] += 1
            return answer
        if isinstance(answer, Never):
            if answer.quota == Quota.RUNS:
                room = pool.account_of[seq.root].room
                require(answer.limit == room < answer.needed, "NEVER for", answer, "of", room)
                self.tally["grow never runs"] += 1
                return answer
            limit, quota = self.limit_of(engine, seq.root)
            account = pool.account_of[seq.root]
            alone = len(pool.sequences) == 1 or (engine.session.quota < pool.usable and len(engine.seqs) == 1)
            fellows = [each for each in pool.sequences.values() if each.account is account]
            alone = alone or (account.slots < pool.usable and len(fellows) == 1)
            require(answer.needed > limit or alone, "NEVER with others running:", answer)
            require((answer.limit, answer.quota) == (limit, quota) or answer.limit >= limit, "limit", answer)
            coming = (
                pool.moves.tickets
                or pool.moves.retired
                or pool.dirty
                or any(s.fences or s.life for s in pool.sessions.values())
            )
            require(
                answer.needed > limit or len(pool.sequences) > 1 or not coming,
                "NEVER with memory coming back",
            )
            self.tally["grow never"] += 1
            return answer
        seq.ticket = 0
        require(answer.position <= before and answer.capacity > before, "grown from", before, "to", answer)
        require(not tokens or answer.capacity >= before + tokens, "grown by less than asked", answer)
        slots = expand(answer.extents)
        require(len(slots) == answer.capacity - answer.position, "extents and capacity differ", answer)
        self._retable(seq, seq.table[: answer.position] + slots)
        copied = sum(copy.length for copy in answer.copies)
        # What a window has dropped of a page is not there to be copied.
        needed = max(0, before - max(answer.position, seq.kept_from))
        require(copied == needed, "copies", answer.copies, "for", before, answer.position, seq.kept_from)
        self.peeled.update(slots[: before - answer.position])
        # What was copied is written only once the copy has run; until then it must not be published.
        seq.written = min(seq.written, answer.position)
        for step in engine.flight:
            for advance in step.advances:
                if advance[0] is seq:
                    assert isinstance(advance[1], int)
                    advance[1] = min(advance[1], answer.position)
        self._queue(seq, answer.copies)
        self.tally["grown"] += 1
        self.tally["grown peeled"] += copied > 0
        return answer

    def _retable(self, seq: Seq, table: list[int]) -> None:
        for slot in seq.table[seq.kept_from :]:
            self.in_tables[slot] -= 1
        seq.table = table
        for slot in table[seq.kept_from :]:
            self.in_tables[slot] += 1

    def submit(self, engine: Engine, work: list[tuple[Seq, int]]) -> Step:
        """A step: queued copies, then each sequence reads all it has and writes the next `n` tokens it has room for."""
        self.apply(engine)
        engine.submitted += 1
        step = Step(engine.submitted, [copy for _, copy in engine.queued], [], [], [], [])
        for seq, _ in engine.queued:
            seq.last_step = step.number
            step.advances.append([seq, seq.cursor])
        engine.queued = []
        for copy in step.copies:
            step.uses += range(copy.source, copy.source + copy.length)
            step.uses += range(copy.target, copy.target + copy.length)
        for seq, n in work:
            require(seq.kept_from <= seq.cursor, "cursor before the window")
            first, last = seq.cursor, min(seq.cursor + n, seq.capacity)
            while len(seq.tokens) < last:
                seq.token(self.rng, self.vocabulary)
            table, values = seq.table, seq.values
            step.reads += [(table[i], values[i]) for i in range(seq.kept_from, first)]
            for i in range(first, last):
                step.writes.append((table[i], values[i]))
                self.pending[table[i]] += 1
            seq.cursor = last
            seq.last_step = step.number
            step.advances.append([seq, last])
            uses = table[seq.kept_from : last]
            step.uses += uses
            for slot in uses:
                self.in_use[slot] += 1
        engine.flight.append(step)
        for index, session in enumerate(engine.sessions):
            # A worker's page may be read late; a lost session's is not.
            if engine.life == "live" and (index == 0 or self.rng.random() < 0.5):
                self.pool.progress(
                    session, engine.submitted, engine.completed[index], epoch=engine.epoch, now=self.now
                )
        return step

    def execute(self, engine: Engine) -> bool:
        """The oldest step that has not run, runs."""
        step = next((step for step in engine.flight if not step.executed), None)
        if step is None:
            return False
        step.executed = True
        device, pending, memory = self.device, self.pending, self.memory
        for copy in step.copies:
            device.write(0, copy.target, device.read(0, copy.source, copy.length))
            for slot in range(copy.target, copy.target + copy.length):
                pending[slot] -= 1
        for slot, value in step.reads:
            if memory[slot] != value:
                raise Fault(f"step {step.number} misreads slot {slot}")
        for slot, value in step.writes:
            device.write(0, slot, value.to_bytes(8, "little"))
            pending[slot] -= 1
        for seq, upto in step.advances:
            assert isinstance(seq, Seq)
            assert isinstance(upto, int)
            if not seq.ended:
                seq.ready = max(seq.ready, upto)
        return True

    def complete(self, engine: Engine, member: int = 0) -> bool:
        """One process of the engine completes its oldest step; with the last of them the step is over."""
        number = engine.completed[member] + 1
        if number > engine.submitted:
            return False
        others = [done for index, done in enumerate(engine.completed) if index != member]
        last = all(done >= number for done in others)
        if last:
            while not engine.flight[0].executed:
                self.execute(engine)
        engine.completed[member] = number
        if last:
            self._retire(engine)
        if engine.life == "live":
            self.pool.progress(engine.sessions[member], engine.submitted, number, epoch=engine.epoch)
        return True

    def _retire(self, engine: Engine) -> None:
        passed = engine.passed
        while engine.flight and engine.flight[0].number <= passed:
            step = engine.flight.popleft()
            for slot in step.uses:
                self.in_use[slot] -= 1
            for seq, upto in step.advances:
                assert isinstance(seq, Seq)
                assert isinstance(upto, int)
                if not seq.ended:
                    seq.written = max(seq.written, upto)
        for guard in [guard for guard in engine.guards if guard.step <= passed]:
            self._unguard(engine, guard)

    def _unguard(self, engine: Engine, guard: Guard) -> None:
        engine.guards.remove(guard)
        for slot in guard.slots:
            self.in_use[slot] -= 1

    def settle(self, engine: Engine) -> None:
        """All its steps complete."""
        if engine.queued:
            self.submit(engine, [])
        while engine.passed < engine.submitted:
            for member in range(len(engine.sessions)):
                self.complete(engine, member)

    def report(self, seq: Seq, length: int = -1) -> None:
        """Tells the pool what is written, without publishing it."""
        length = seq.written if length < 0 else length
        self.pool.wrote(seq.engine.session, seq.handle, length)
        seq.reported = max(seq.reported, length)

    def commit(
        self, seq: Seq, length: int, *, told: int = 0, priority: int | None = None, expiry: float = 0.0
    ) -> Committed:
        """Publishes the first `length` tokens, which completed steps have written; tells tokens up to `told`."""
        pool, unit = self.pool, self.unit
        require(length <= max(seq.written, seq.base), "the engine commits what is not written")
        upto = max(length, told, seq.told)
        values, table = seq.values, seq.table
        whole = length - length % unit
        before = self.lcp(values[:whole])
        target = before
        # What it owns of the rest, from where the tree ends.
        while target < whole:
            part = range(target, target + unit)
            if any(i < seq.kept_from or self.shadow[table[i]] != PRIVATE for i in part):
                break
            target += unit
        # A fork of ours may have published for us.
        seq.base = base = pool.sequences[seq.handle].base
        floor = base - base % unit
        marked = 0
        if whole > seq.base:
            for i in range(max(floor, seq.kept_from), before):
                slot = table[i]
                if self.shadow[slot] == PRIVATE and slot not in self.duplicates | self.peeled:
                    self.duplicates.add(slot)
                    marked += 1
        answer = pool.commit(
            seq.engine.session,
            seq.handle,
            length,
            pack(seq.tokens[seq.told : upto]),
            priority=priority,
            expiry=expiry,
        )
        seq.told = upto
        seq.reported = max(seq.reported, length)
        if whole <= seq.base:
            require(
                answer.published == 0 and answer.length == seq.base, "published what was published", answer
            )
            self._published(values, 0, 0, table)
            return answer
        require(
            answer.length == max(target, seq.base),
            "committed to",
            answer.length,
            "where the twin says",
            target,
        )
        require(answer.published == max(0, target - before), "published", answer, "expected", target - before)
        require(answer.duplicates == marked, "duplicates", answer, "expected", marked)
        self._published(values, before, max(target, before), table)
        seq.base = answer.length
        self.tally["committed"] += 1
        self.tally["duplicated"] += marked > 0
        return answer

    def copied(self, seq: Seq) -> int:
        """Up to which position no copy into its table is still to be made: a daemon refuses to fork beyond it."""
        return next((i for i, slot in enumerate(seq.table) if self.pending[slot]), len(seq.table))

    def fork(self, seq: Seq, length: int) -> Seq:
        """A child of what the pool knows to be written, of an engine that owes nothing."""
        child = self.try_fork(seq, length)
        require(child is not None, "an engine that owes nothing may not fork")
        assert child is not None
        return child

    def try_fork(self, seq: Seq, length: int) -> Seq | None:
        """The same for any engine; None where it owes an answer to Preempt."""
        engine = seq.engine
        if engine.queued:
            self.submit(engine, [])
        answer = self.pool.fork(engine.session, seq.handle, length=length, now=self.now)
        if isinstance(answer, Later):
            require(answer.reason == Reason.PREEMPT_FIRST, "a fork was told", answer.reason)
            require(
                any(deadline < self.now for deadline in engine.session.owes.values()), "nothing is overdue"
            )
            self.pool.admission.withdraw(engine.session, answer.ticket)
            return None
        require(not any(deadline < self.now for deadline in engine.session.owes.values()), "a debtor forked")
        self._handle(answer.sequence)
        require(answer.length == length, "forked at", answer.length, "instead of", length)
        child = Seq(
            engine=engine, handle=answer.sequence, root=seq.root, tokens=seq.tokens[:length],
            values=seq.values[:length], table=seq.table[:length], told=min(seq.told, length),
            ready=min(seq.ready, length), cursor=length, written=length, reported=length,
            base=min(seq.base, length),
        )  # fmt: skip
        for slot in child.table:
            self.in_tables[slot] += 1
        engine.seqs[child.handle] = child
        engine.told += [
            (epoch, child, position, slots[: length - position])
            for epoch, each, position, slots in engine.told
            if each is seq and position < length
        ]
        self.tally["forked"] += 1
        return child

    def _fence(self, seq: Seq, extra: bool) -> int:
        """The step behind which the engine gives slots back: the last that touched them, or one after it."""
        engine = seq.engine
        fence = seq.last_step if seq.last_step > engine.passed else 0
        return engine.submitted if extra else fence

    def trim(self, seq: Seq, *, keep_from: int = 0, keep_to: int = -1, extra: bool = False) -> int:
        engine, pool = seq.engine, self.pool
        if engine.queued:
            self.submit(engine, [])
        fence = self._fence(seq, extra)
        old = seq.table[seq.kept_from :]
        room = 2 * max(pool.quantum, engine.page)
        before = seq.kept_from
        after = before if keep_from < before else keep_from
        guard = Guard(fence, old)
        self._guard(engine, guard)
        for slot in old:
            self.in_tables[slot] -= 1
        capacity = pool.trim(
            engine.session, seq.handle, keep_from=keep_from, keep_to=keep_to, fence=fence, now=self.now
        )
        if keep_to < 0:
            keep_to = seq.capacity
        require(
            keep_to <= capacity <= min(seq.capacity, keep_to + room), "trimmed to", capacity, "keep", keep_to
        )
        sequence = pool.sequences[seq.handle]
        listed = expand(pool.table_of(sequence))
        front = listed[len(listed) - (capacity - after) :]
        engine.told = [
            (epoch, each, position, slots[: keep_to - position] if each is seq else slots)
            for epoch, each, position, slots in engine.told
            if each is not seq or position < keep_to
        ]
        kept_table = self.table_to_come(seq)[after:keep_to] if engine.told else seq.table[after:keep_to]
        require(front[: keep_to - after] == kept_table, "a trim changed what it kept")
        front[: keep_to - after] = seq.table[after:keep_to]
        seq.kept_from = after
        seq.table = [-1] * after + front
        for slot in front:
            self.in_tables[slot] += 1
        for slot in front[keep_to - after :]:
            self.duplicates.discard(slot)
            self.peeled.discard(slot)
        # What stays in its table is not behind the fence: it will be written again, in the order of its stream.
        # Published slots before a window stay leased until Free.
        leased = [s for s in old[: max(0, after - before)] if self.shadow[s] == CACHED]
        seq.leased += leased
        for slot in leased:
            self.in_tables[slot] += 1
        kept = {*front, *leased}
        for slot in [slot for slot in guard.slots if slot in kept]:
            guard.slots.remove(slot)
            self.in_use[slot] -= 1
        if guard.step <= engine.passed:
            self._unguard(engine, guard)
        for name in ("told", "ready", "cursor", "written", "reported", "base"):
            setattr(seq, name, min(getattr(seq, name), keep_to))
        del seq.tokens[keep_to:]
        del seq.values[keep_to:]
        for step in engine.flight:
            for advance in step.advances:
                if advance[0] is seq:
                    assert isinstance(advance[1], int)
                    advance[1] = min(advance[1], keep_to)
        self.tally["trimmed"] += 1
        return capacity

    def _guard(self, engine: Engine, guard: Guard) -> None:
        engine.guards.append(guard)
        if guard.step > engine.passed:
            for slot in guard.slots:
                self.in_use[slot] += 1
        else:
            guard.slots = []

    def free(self, seq: Seq, *, extra: bool = False) -> None:
        engine = seq.engine
        if engine.queued:
            self.submit(engine, [])
        fence = self._fence(seq, extra)
        self._drop(seq)
        self._guard(engine, Guard(fence, seq.table[seq.kept_from :]))
        self.pool.free(engine.session, seq.handle, fence=fence, now=self.now)
        if fence <= engine.passed:
            engine.guards.pop()
        self.tally["freed"] += 1
        self.tally["freed fenced"] += fence > engine.passed

    def _drop(self, seq: Seq) -> None:
        seq.ended = True
        del seq.engine.seqs[seq.handle]
        seq.engine.told = [each for each in seq.engine.told if each[1] is not seq]
        for slot in (*seq.table[seq.kept_from :], *seq.leased):
            self.in_tables[slot] -= 1

    # -- pins, moves, deaths -----------------------------------------------------------------------------------

    def pin(self, engine: Engine, root: int, tokens: list[int]) -> int:
        values = chain(root, tokens)
        expected = self.lcp(values)
        handle, kept = self.pool.pin(engine.session, root, pack(tokens))
        require(kept == expected, "pinned", kept, "where", expected, "are cached")
        if handle:
            self._handle(handle)
            engine.pins[handle] = values[self.unit - 1 : kept : self.unit]
            self.pinned.update(engine.pins[handle])
        self.tally["pinned"] += handle > 0
        return handle

    def unpin(self, engine: Engine, handle: int) -> None:
        self.pinned.subtract(engine.pins.pop(handle))
        self.pool.unpin(engine.session, handle)

    def movable(self) -> list[int]:
        """Nodes that a compactor might move now."""
        tree = self.pool.tree
        return [
            n
            for n in tree.live()
            if tree.length[n]
            and tree.length[n] <= self.pool.runs.total
            and (not tree.holds[n] or self.pool.moves.readers(n) is not None)
        ]

    def move(self, node: int, at: int = 0, length: int = 0, target: list[int] | None = None) -> int:
        """Begins a move and queues its copy."""
        move = self.pool.moves.begin(node, at, length, target)
        self._handle(move.handle)
        source, target = expand(move.source), expand(move.target)
        require(len(source) == len(target), "a move of", len(source), "slots to", len(target))
        pieces = [(s, t, 1) for s, t in zip(source, target, strict=True)]
        self.moves[move.handle] = self.device.copy(self.mover, pieces)
        self.move_slots[move.handle] = (source, target)
        self.tally["moves"] += 1
        return move.handle

    def poll(self) -> None:
        """Moves whose copies have ended are finished."""
        for handle, event in list(self.moves.items()):
            completion = self.device.completion(event)
            if completion != Completion.PENDING:
                self.finish(handle, completion == Completion.DONE)

    def finish(self, handle: int, copied: bool) -> bool:
        source, target = self.move_slots.pop(handle)
        del self.moves[handle]
        before = [(self.end_of.get(slot), self.value_of.get(slot)) for slot in source]
        self.moving_now = set(source)
        leased: list[int] = []
        for engine in self.engines:
            if not engine.movable or engine.life != "live":
                for seq in engine.seqs.values():
                    leased += self.moving_now.intersection(seq.table[seq.kept_from :] + seq.leased)
                for step in engine.flight:
                    leased += self.moving_now.intersection(step.uses)
            for guard in engine.guards:
                leased += self.moving_now.intersection(guard.slots)
        try:
            published = self.pool.moves.finish(handle, copied)
        finally:
            self.moving_now = set()
        if not published:
            require(not self.events, "an abandoned move published")
            self.tally["moves abandoned"] += 1
            return False
        require(copied, "published a copy that failed")
        require(not leased, "moved from under a reader:", leased)
        require(
            sorted(target) == sorted(slot for slot, _, _ in self.events),
            "published other slots than it copied",
        )
        self.events.clear()
        pushes = self.pool.pushes
        self.pool.pushes = [push for push in pushes if not isinstance(push, Moved)]
        for push in pushes:
            if isinstance(push, Moved):
                engine = next(each for each in self.engines if push.session == each.session.handle)
                require(engine.movable and engine.life == "live", "told who does not follow of", push)
                self.tell(engine, push)
                self.tally["told"] += 1
        at = dict(zip(source, target, strict=True))
        for (end, value), slot in zip(before, target, strict=True):
            require(end is not None and value is not None, "moved what is not cached")
            assert end is not None
            assert value is not None
            self.end_of[slot] = end
            self.value_of[slot] = value
        for end in {end for end, _ in before if end is not None}:
            self.cached[end] = tuple(at.get(slot, slot) for slot in self.cached[end])
        self.tally["moves published"] += 1
        return True

    def lose(self, engine: Engine) -> None:
        """The connections break; the processes may live on."""
        engine.life = "lost"
        if engine.told and self.rng.random() < 0.5:
            # Some of what it was told never reached it.
            epoch = self.rng.choice([epoch for epoch, *_ in engine.told])
            engine.heard = epoch - 1
            for at, seq, position, slots in engine.told:
                if at >= epoch:
                    pieces = [each for slot in slots for each in (slot, 1)]
                    engine.missed.append(Moved(engine.session.handle, at, seq.handle, position, pieces))
            engine.told = [each for each in engine.told if each[0] < epoch]
        for session in engine.sessions:
            self.pool.lose(session)
        for seq in engine.seqs.values():
            seq.ticket = 0
            seq.preempt = None
        self.tally["lost"] += 1

    def resume(self, engine: Engine) -> None:
        engine.life = "live"
        for index, session in enumerate(engine.sessions):
            self.pool.resume(session)
            self.pool.progress(session, engine.submitted, engine.completed[index], epoch=engine.epoch)
        pushes = self.pool.pushes
        self.pool.pushes = [push for push in pushes if not isinstance(push, Moved)]
        engine.missed.clear()
        for push in pushes:
            if isinstance(push, Moved):
                self.tell(engine, push)
        self.tally["resumed"] += 1

    def gone(self, engine: Engine) -> None:
        """Its processes are dead, and with them all they had in flight."""
        self._forget(engine)
        for session in engine.sessions:
            self.pool.gone(session)
        self.tally["gone"] += 1

    def bye(self, engine: Engine) -> None:
        self.settle(engine)
        self._forget(engine)
        for session in engine.sessions:
            self.pool.bye(session)
        self.tally["bye"] += 1

    def _forget(self, engine: Engine) -> None:
        engine.life = "gone"
        for seq in list(engine.seqs.values()):
            self._drop(seq)
        for _, copy in engine.queued:
            for i in range(copy.length):
                self.in_use[copy.source + i] -= 1
                self.in_use[copy.target + i] -= 1
                self.pending[copy.target + i] -= 1
        engine.queued = []
        for step in engine.flight:
            for slot in step.uses:
                self.in_use[slot] -= 1
            if not step.executed:
                for slot, _ in step.writes:
                    self.pending[slot] -= 1
                for copy in step.copies:
                    for slot in range(copy.target, copy.target + copy.length):
                        self.pending[slot] -= 1
        engine.flight.clear()
        for guard in list(engine.guards):
            self._unguard(engine, guard)
        for handle in list(engine.pins):
            self.pinned.subtract(engine.pins.pop(handle))
        self.engines.remove(engine)

    def scrub(self, most: int, *, end: bool = True) -> None:
        """What the daemon does where slots are wiped: evicts ahead, and wipes some; not `end`: that takes a while."""
        pool = self.pool
        pool.shed(self.now)
        for handle in [*pool.wiping] if end else []:
            for slot in expand(pool.wiping[handle][0]):
                require(not self.in_use[slot], "slot", slot, "is wiped while a step or fence covers it")
                require(not self.in_tables[slot], "slot", slot, "is wiped while a table holds it")
                self.memory[slot] = 0
            pool.wiped(handle)
            self.tally["wiped"] += 1
        pool.wipe(most)

    def clean(self) -> None:
        """All that is to be wiped is."""
        while self.pool.dirty:
            self.scrub(64)

    def advance(self, seconds: float) -> None:
        """Time passes, for the device too."""
        self.now += seconds
        self.device.advance(seconds)
