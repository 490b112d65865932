"""The pool and a naive twin side by side, driven by Hypothesis, which shrinks whatever goes wrong.

The twin is `simulation/world.py`: token lists, a dict from each cached prefix to its slots, a map of slot states moved
by the journal, and painted memory.  Here every act and argument is drawn; the seeds of the simulation search wider,
this search explains itself: a failure comes as the shortest list of calls that shows it.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvslot.allocator import UNLIMITED, Grown, Later, PoolConfig, Preempt, Pressure, Refusal
from kvslot.daemon.device.simulated import Schedule

from ..simulation.world import Engine, Seq, World, require

SHORT = st.integers(0, 12)
PICK = st.integers(0, 1 << 16)
FLAG = st.booleans()


class PoolMachine(RuleBasedStateMachine):
    """Up to three engines on one small pool."""

    world: World
    roots: list[int]
    tickets: dict[int, tuple[Engine, int, list[int], bool]]

    @initialize(
        block_size=st.sampled_from((1, 2, 4, 8)),
        extra=st.integers(0, 10),
        opaque=st.sampled_from((False, False, False, True)),
        windowed=FLAG,
        watermark=st.sampled_from((0.0, 0.1)),
        quantum=st.sampled_from((0, 1, 3)),
        append=st.sampled_from(("chain", "peel")),
        ahead=FLAG,
        scrubs=st.sampled_from((False, False, True)),
        limits=st.sampled_from((None, None, (7, 1), (UNLIMITED, 2), (13, UNLIMITED))),
        seed=PICK,
    )
    def begin(
        self,
        block_size: int,
        extra: int,
        opaque: bool,
        windowed: bool,
        watermark: float,
        quantum: int,
        append: str,
        ahead: bool,
        scrubs: bool,
        limits: tuple[int, int] | None,
        seed: int,
    ) -> None:
        config = PoolConfig(
            blocks=(3 if block_size == 1 else 2) + extra + 16 // block_size,
            block_size=block_size, opaque=opaque, windowed=windowed, watermark=watermark, quantum=quantum,
            append=append, ahead=ahead, scrubs=scrubs, ticket_grace=0.5, preempt_deadline=0.2,
        )  # fmt: skip
        schedule = Schedule(latency_max=0.1, notice_max=0.1, failures=0.2)
        self.world = World(config, seed=seed, schedule=schedule, vocabulary=2)
        self.world.pool.runs.long, self.world.pool.many = 1, 1  # what only long requests do elsewhere
        if limits is not None:
            self.world.pool.limit("a", slots=limits[0], runs=limits[1])
        self.roots = [self.world.root(tenant) for tenant in "ab"]
        self.tickets = {}
        self.world.engine()

    # -- choosing ----------------------------------------------------------------------------------------------

    def live(self) -> list[Engine]:
        return [engine for engine in self.world.engines if engine.life == "live"]

    def an_engine(self, pick: int) -> Engine | None:
        live = self.live()
        return live[pick % len(live)] if live else None

    def a_seq(self, pick: int) -> Seq | None:
        seqs = [seq for engine in self.live() for seq in engine.seqs.values()]
        return seqs[pick % len(seqs)] if seqs else None

    def any_seq(self) -> bool:
        return any(engine.seqs for engine in self.live())

    # -- engines -----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.world.engines) < 3)
    @rule(
        pick=PICK,
        quota=st.sampled_from((UNLIMITED, UNLIMITED, 9, 17)),
        workers=st.integers(0, 1),
        append=FLAG,
    )
    def open(self, pick: int, quota: int, workers: int, append: bool) -> None:
        pages = [page for page in (1, 2, 4, 8) if self.world.config.block_size % page == 0]
        self.world.engine(
            page=pages[pick % len(pages)], quota=quota, workers=workers, append="peel" if append else ""
        )

    @precondition(lambda self: len(self.live()) > 1 or self.any_seq())
    @rule(pick=PICK, sweep=FLAG)
    def lose(self, pick: int, sweep: bool) -> None:
        engine = self.an_engine(pick)
        if engine is not None:
            self.tickets = {t: v for t, v in self.tickets.items() if v[0] is not engine}
            self.world.lose(engine)
            if sweep:
                self.world.pool.sweep()

    @precondition(
        lambda self: (
            len(self.live()) < len(self.world.engines)
            or any(s.life for s in self.world.pool.sessions.values())
        )
    )
    @rule(back=FLAG, budget=st.integers(1, 4))
    def decide(self, back: bool, budget: int) -> None:
        """A lost engine returns or is proven gone; the sweep goes on."""
        lost = next((engine for engine in self.world.engines if engine.life == "lost"), None)
        if lost is not None:
            if back:
                self.world.resume(lost)
            else:
                self.world.gone(lost)
        self.world.pool.sweep(budget)

    @precondition(lambda self: len(self.live()) > 1)
    @rule(pick=PICK)
    def bye(self, pick: int) -> None:
        engine = self.an_engine(pick)
        if engine is not None:
            self.tickets = {t: v for t, v in self.tickets.items() if v[0] is not engine}
            self.world.bye(engine)

    @rule(cells=st.integers(0, 6), keep=st.integers(0, 3), pieces=st.integers(1, 3))
    def tidy(self, cells: int, keep: int, pieces: int) -> None:
        """What is done between requests: free runs are sorted out for a long one, and filed again."""
        self.world.pool.gather(cells, pieces)
        self.world.pool.tidy(keep, pieces)

    @precondition(lambda self: self.world.pool.scrubs)
    @rule(most=st.integers(1, 40), end=FLAG)
    def scrub(self, most: int, end: bool) -> None:
        """Some of what was in use is wiped."""
        self.world.scrub(most, end=end)

    @rule(pick=PICK, amount=st.integers(0, 20))
    def submit(self, pick: int, amount: int) -> None:
        engine = self.an_engine(pick)
        if engine is not None and len(engine.flight) < 4:
            self.world.submit(engine, [(seq, amount) for seq in engine.seqs.values()])

    @rule(pick=PICK)
    def execute(self, pick: int) -> None:
        if self.world.engines:
            self.world.execute(self.world.engines[pick % len(self.world.engines)])

    @rule(pick=PICK, member=st.integers(0, 1))
    def complete(self, pick: int, member: int) -> None:
        if self.world.engines:
            engine = self.world.engines[pick % len(self.world.engines)]
            self.world.complete(engine, member % len(engine.sessions))

    @rule(pick=PICK, stalled=FLAG)
    def stall(self, pick: int, stalled: bool) -> None:
        engine = self.an_engine(pick)
        if engine is not None:
            self.world.pool.stall(engine.session, stalled)

    # -- sequences ---------------------------------------------------------------------------------------------

    @rule(
        pick=PICK,
        space=st.integers(0, 1),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        contiguous=st.sampled_from((False, False, False, True)),
        priority=st.sampled_from((0, 0, 2)),
    )
    def allocate(self, pick: int, space: int, tokens: list[int], contiguous: bool, priority: int) -> None:
        engine = self.an_engine(pick)
        if engine is None:
            return
        contiguous = contiguous and engine.page == 1
        answer = self.world.allocate(
            engine, self.roots[space], tokens, contiguous=contiguous, priority=priority
        )  # fmt: skip
        if isinstance(answer, Later):
            self.tickets[answer.ticket] = (engine, self.roots[space], tokens, contiguous)

    @precondition(lambda self: self.tickets)
    @rule(pick=PICK)
    def ask_again(self, pick: int) -> None:
        ticket = sorted(self.tickets)[pick % len(self.tickets)]
        engine, root, tokens, contiguous = self.tickets.pop(ticket)
        answer = self.world.allocate(engine, root, tokens, ticket=ticket, contiguous=contiguous)
        if isinstance(answer, Later):
            self.tickets[answer.ticket] = (engine, root, tokens, contiguous)

    @precondition(lambda self: self.tickets)
    @rule(pick=PICK)
    def withdraw(self, pick: int) -> None:
        ticket = sorted(self.tickets)[pick % len(self.tickets)]
        engine = self.tickets.pop(ticket)[0]
        if ticket in self.world.pool.admission.waiting:
            self.world.pool.admission.withdraw(engine.session, ticket)

    @precondition(lambda self: self.any_seq())
    @rule(pick=PICK, amount=st.integers(1, 24), publish=FLAG)
    def serve(self, pick: int, amount: int, publish: bool) -> None:
        """Written and completed, maybe published: the usual life."""
        seq = self.a_seq(pick)
        if seq is not None:
            self.world.submit(seq.engine, [(seq, amount)])
            self.world.settle(seq.engine)
            if publish:
                self.world.commit(seq, max(seq.written, seq.base))

    @precondition(lambda self: self.any_seq())
    @rule(pick=PICK, amount=SHORT)
    def extend(self, pick: int, amount: int) -> None:
        seq = self.a_seq(pick)
        if seq is not None:
            answer = self.world.extend(seq, amount, ticket=seq.ticket)
            require(isinstance(answer, Grown) or seq.capacity == len(seq.table), "a refusal changed a table")

    @precondition(lambda self: self.any_seq())
    @rule(pick=PICK)
    def report(self, pick: int) -> None:
        seq = self.a_seq(pick)
        if seq is not None:
            self.world.report(seq)

    @precondition(lambda self: self.any_seq())
    @rule(pick=PICK, back=SHORT, ahead=FLAG, priority=st.sampled_from((None, None, 1)))
    def commit(self, pick: int, back: int, ahead: bool, priority: int | None) -> None:
        seq = self.a_seq(pick)
        if seq is not None:
            length = max(seq.written, seq.base) - back
            if length >= max(seq.base, 1):
                told = min(len(seq.tokens), seq.capacity) if ahead else 0
                self.world.commit(seq, length, told=told, priority=priority, expiry=self.world.now + 0.3)

    @precondition(lambda self: self.any_seq())
    @rule(pick=PICK, back=SHORT)
    def fork(self, pick: int, back: int) -> None:
        seq = self.a_seq(pick)
        if seq is not None and not seq.kept_from and len(seq.engine.seqs) < 6:
            length = max(seq.reported, seq.base) - back
            if length > 0:
                self.world.try_fork(seq, length)

    @precondition(lambda self: self.any_seq())
    @rule(pick=PICK, back=SHORT, extra=FLAG)
    def roll_back(self, pick: int, back: int, extra: bool) -> None:
        seq = self.a_seq(pick)
        if seq is not None and seq.capacity - back >= max(1, seq.kept_from):
            self.world.trim(seq, keep_to=seq.capacity - back, extra=extra)

    @precondition(lambda self: self.world.config.windowed and self.any_seq())
    @rule(pick=PICK, back=SHORT, extra=FLAG)
    def slide(self, pick: int, back: int, extra: bool) -> None:
        seq = self.a_seq(pick)
        if seq is not None:
            keep = min(max(seq.reported, seq.base), seq.cursor) - back
            if keep > seq.kept_from:
                self.world.trim(seq, keep_from=keep, extra=extra)

    @precondition(lambda self: self.any_seq())
    @rule(pick=PICK, extra=FLAG)
    def free(self, pick: int, extra: bool) -> None:
        seq = self.a_seq(pick)
        if seq is not None:
            self.world.free(seq, extra=extra)

    # -- pins, eviction, moves, time ---------------------------------------------------------------------------

    @rule(pick=PICK, space=st.integers(0, 1), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def pin(self, pick: int, space: int, tokens: list[int]) -> None:
        engine = self.an_engine(pick)
        if engine is not None:
            try:
                self.world.pin(engine, self.roots[space], tokens)
            except Refusal:
                self.world.tally["pin refused"] += 1

    @precondition(lambda self: any(engine.pins for engine in self.live()))
    @rule(pick=PICK)
    def unpin(self, pick: int) -> None:
        engine = self.an_engine(pick)
        if engine is not None and engine.pins:
            self.world.unpin(engine, sorted(engine.pins)[pick % len(engine.pins)])

    @rule(tokens=SHORT)
    def evict(self, tokens: int) -> None:
        require(
            self.world.pool.evict(tokens, now=self.world.now) <= tokens + self.world.unit,
            "evicted more than asked",
        )

    @precondition(lambda self: self.world.movable())
    @rule(pick=PICK)
    def move(self, pick: int) -> None:
        nodes = self.world.movable()
        if nodes:
            try:
                self.world.move(nodes[pick % len(nodes)])
            except Refusal:
                self.world.tally["move refused"] += 1

    @rule(milliseconds=st.sampled_from((1, 30, 300)))
    def wait(self, milliseconds: int) -> None:
        self.world.advance(milliseconds / 1000)
        self.world.poll()
        self.world.pool.admission.pump(self.world.now)

    @precondition(lambda self: self.world.pool.pushes)
    @rule(answer=FLAG)
    def read_pushes(self, answer: bool) -> None:
        pool = self.world.pool
        pushes, pool.pushes = pool.pushes, []
        for push in pushes if answer else []:
            engine = next((e for e in self.live() if e.session.handle == push.session), None)
            if engine is None:
                continue
            if isinstance(push, Preempt) and push.sequence in engine.seqs:
                self.world.free(engine.seqs[push.sequence])
            elif isinstance(push, Pressure):
                for seq in list(engine.seqs.values()):
                    if 0 < seq.cursor < seq.capacity and seq.cursor >= seq.kept_from:
                        self.world.trim(seq, keep_to=seq.cursor)

    @invariant()
    def all_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world, pool = self.world, self.world.pool
        for engine in list(world.engines):
            if engine.life == "lost":
                world.gone(engine)
            else:
                world.bye(engine)
        while not pool.sweep(3):
            pass
        world.device.settle()
        world.advance(1.0)
        world.poll()
        world.check()
        self.world.clean()
        require(
            pool.runs.total + pool.tree.evictable == pool.usable, "something is held though all have left"
        )


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
