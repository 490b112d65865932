"""Seeded histories: engines that allocate, step, commit, fork, trim, die and come back, in an order nobody planned.

A seed decides everything: the pool, the engines, the latencies, each act and each token.  After every act the judge
(`world.World`) compares all it knows.  At the end everybody leaves, and nothing may be left.

    python tests/simulation --seed 4711        replays one, naming each act
"""

from __future__ import annotations

import random
from collections.abc import Callable

from kvslot.allocator import (
    UNLIMITED,
    Abandoned,
    Later,
    Life,
    Never,
    Pool,
    PoolConfig,
    Preempt,
    Pressure,
    Published,
    Ready,
    Refusal,
)
from kvslot.allocator import tables as core
from kvslot.daemon.device.simulated import Schedule
from kvslot.defrag import Greedy, Planner, Plans, Purpose

from .world import Engine, Fault, Seq, World, require

STEPS = 120
core.PROMISE_LEAST = 4  # prompts are short here, and shall wait for each other all the same


class Driver:
    """One history."""

    def __init__(
        self,
        seed: int,
        *,
        steps: int = STEPS,
        make_pool: Callable[[PoolConfig], Pool] = Pool,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.steps = steps
        self.say = say
        self.config = self.configure(rng, seed)
        schedule = Schedule(
            latency_max=rng.choice((0.0, 0.1, 1.0)),
            notice_max=rng.choice((0.0, 0.1)),
            failures=rng.choice((0.0, 0.2)),
            never=rng.choice((0.0, 0.1)),
        )
        self.world = World(
            self.config, seed=rng.randrange(1 << 30), schedule=schedule, pool=make_pool(self.config),
            vocabulary=rng.choice((2, 2, 3, 50)),
        )  # fmt: skip
        if self.config.ahead:
            # What only long requests do elsewhere.
            self.world.pool.runs.long = self.world.pool.many = 1
        if seed % 5 == 4:
            # Off the generator's path, as in `configure`.
            usable = self.world.pool.usable
            self.world.pool.limit("a", slots=1 + usable * (1 + seed % 7) // 8, runs=1 + seed % 4)
        self.roots = [self.world.root(tenant) for tenant in "ab"]
        self.prompts: list[list[int]] = []
        self.tickets: dict[int, tuple[Engine, int, list[int], bool]] = {}
        self.polls = 0
        self.planner: Plans | None = None
        self.careful = rng.random() < 0.8  # engines answer Preempt and Pressure
        for _ in range(rng.randrange(1, 4)):
            self.open()
        self.acts: list[tuple[int, Callable[[], object]]] = [
            (16, self.allocate), (12, self.serve), (14, self.step), (6, self.execute), (20, self.complete),
            (10, self.extend), (3, self.report), (12, self.commit), (5, self.fork), (5, self.trim), (9, self.free),
            (2, self.pin), (2, self.unpin), (6, self.move), (4, self.compact), (6, self.poll), (1, self.evict),
            (8, self.advance),
            (1, self.lose), (2, self.back), (2, self.die), (4, self.sweep), (1, self.bye), (2, self.open),
            (1, self.stall), (4, self.pump), (1, self.withdraw), (1, self.abandon), (2, self.misuse),
        ]  # fmt: skip
        self.weights = [weight for weight, _ in self.acts]

    def configure(self, rng: random.Random, seed: int) -> PoolConfig:
        block_size = rng.choice((1, 2, 4, 4, 8, 8, 16))
        least = 3 if block_size == 1 else 2
        return PoolConfig(
            blocks=least + rng.randrange(0, max(2, 96 // block_size)),
            block_size=block_size,
            opaque=rng.random() < 0.12,
            windowed=rng.random() < 0.2,
            watermark=rng.choice((0.0, 0.02, 0.1)),
            quantum=rng.choice((0, 0, 1, 2, 4)),
            fence_patience=rng.choice((0.0, 0.05)),
            ticket_grace=rng.choice((0.1, 1.0)),
            preempt_deadline=rng.choice((0.05, 0.5)),
            reclaim_patience=rng.choice((0.0, 0.02)),
            peel_max=rng.choice((2, 64)),
            append=rng.choice(("chain", "peel")),
            # Off the generator's path: who adds a draw has other histories.
            ahead=not seed % 3,
            scrubs=seed % 7 == 6,
            headroom=0.003 if seed % 3 else 0.2,
        )

    def run(self) -> World:
        for number in range(self.steps):
            act = self.rng.choices(self.acts, self.weights)[0][1]
            told = act()
            if self.say is not None and told is not False:
                self.say(f"{number:4d} t={self.world.now:.3f} {act.__name__} {told or ''}")
            self.world.check()
            self.answer()
        self.leave()
        return self.world

    # -- choosing ----------------------------------------------------------------------------------------------

    def live(self) -> list[Engine]:
        return [engine for engine in self.world.engines if engine.life == "live"]

    def an_engine(self) -> Engine | None:
        live = self.live()
        return self.rng.choice(live) if live else None

    def a_seq(self) -> Seq | None:
        seqs = [seq for engine in self.live() for seq in engine.seqs.values()]
        return self.rng.choice(seqs) if seqs else None

    def a_prompt(self) -> list[int]:
        rng, world = self.rng, self.world
        tokens: list[int] = []
        if self.prompts and rng.random() < 0.75:
            tokens = list(rng.choice(self.prompts))
            if rng.random() < 0.5:
                tokens = tokens[: rng.randrange(len(tokens)) + 1]
        if not tokens or rng.random() < 0.6:
            tokens += [rng.randrange(world.vocabulary) for _ in range(rng.choice((1, 2, 5, 9, 17)))]
        if rng.random() < 0.9:
            tokens = tokens[
                : rng.choice((world.pool.usable, world.pool.usable // 2, world.pool.usable // 4)) or 1
            ]
        self.prompts.append(tokens)
        del self.prompts[:-12]
        return tokens

    # -- acts: each returns False when there was nothing to do, or something to say ----------------------------

    def open(self) -> object:
        rng, world = self.rng, self.world
        if len(world.engines) >= 4:
            return False
        pages = [page for page in (1, 1, 1, 2, 4, 8) if self.config.block_size % page == 0]
        follows = rng.random() < 0.4 and not self.config.windowed
        engine = world.engine(
            page=1 if follows else rng.choice(pages),
            quota=UNLIMITED if rng.random() < 0.7 else rng.randrange(1, 2 * world.pool.usable),
            append="chain" if follows else rng.choice(("", "chain", "peel")),
            peel_max=rng.choice((-1, -1, 1, 3)),
            workers=int(rng.random() < 0.2 and not follows),
            movable=follows,
        )
        kind = " follows" if follows else ""
        return f"session {engine.session.handle} page {engine.page} of {len(engine.sessions)}{kind}"

    def allocate(self) -> object:
        engine, rng, world = self.an_engine(), self.rng, self.world
        if engine is None:
            return False
        mine = [t for t, (owner, *_) in self.tickets.items() if owner is engine]
        ticket = 0
        if mine and rng.random() < 0.6:
            ticket = rng.choice(mine)
            _, root, tokens, contiguous = self.tickets[ticket]
        else:
            root, tokens, contiguous = rng.choice(self.roots), self.a_prompt(), rng.random() < 0.1
        answer = world.allocate(
            engine, root, tokens, ticket=ticket, contiguous=contiguous and engine.page == 1,
            priority=rng.choice((0, 0, 0, 1, 3)), wait_for_commit=rng.random() < 0.2,
        )  # fmt: skip
        self.tickets.pop(ticket, None)
        if isinstance(answer, Later):
            self.tickets[answer.ticket] = (engine, root, tokens, contiguous)
        elif isinstance(answer, Seq):
            answer.goal = len(tokens) + rng.choice((0, 1, 4, 12, 30))
            return f"{len(tokens)} tokens -> {answer.handle}: {answer.table}"
        return f"{len(tokens)} tokens of {engine.session.handle}: {answer}"

    def step(self) -> object:
        engine, rng = self.an_engine(), self.rng
        if engine is None or len(engine.flight) > 4:
            return False
        work = [(seq, rng.choice((0, 1, 1, 3, 40))) for seq in engine.seqs.values() if rng.random() < 0.7]
        step = self.world.submit(engine, work)
        return f"{step.number} of {engine.session.handle}: writes {[slot for slot, _ in step.writes]}"

    def serve(self) -> object:
        """What a healthy engine does most of the time: one sequence written, completed and committed."""
        seq, rng, world = self.a_seq(), self.rng, self.world
        if seq is None or seq.engine.stuck or seq.cursor < seq.kept_from:
            return False
        world.submit(seq.engine, [(seq, rng.choice((1, 4, 40)))])
        world.settle(seq.engine)
        if rng.random() < 0.7:
            return f"{seq.handle} {world.commit(seq, max(seq.written, seq.base))}"
        return f"{seq.handle} written {seq.written}"

    def execute(self) -> object:
        engines = [engine for engine in self.world.engines if engine.flight]
        return self.world.execute(self.rng.choice(engines)) if engines else False

    def complete(self) -> object:
        engines = [e for e in self.world.engines if e.flight and not e.stuck]
        if not engines:
            return False
        engine = self.rng.choice(engines)
        return (
            self.world.complete(engine, self.rng.randrange(len(engine.sessions)))
            and f"of {engine.session.handle}"
        )

    def extend(self) -> object:
        seq, rng = self.a_seq(), self.rng
        if seq is None or (seq.capacity - seq.cursor > 2 * self.world.pool.quantum and rng.random() < 0.9):
            return False
        answer = self.world.extend(
            seq, rng.choice((0, 0, 0, 1, 5)), ticket=seq.ticket if rng.random() < 0.8 else 0
        )
        return f"{seq.handle}: {answer}"

    def report(self) -> object:
        seq = self.a_seq()
        if seq is None or seq.written <= seq.reported:
            return False
        self.world.report(seq)
        return f"{seq.handle} written {seq.written}"

    def commit(self) -> object:
        seq, rng = self.a_seq(), self.rng
        if seq is None:
            return False
        most = max(seq.written, seq.base)
        length = most if rng.random() < 0.7 else rng.randint(seq.base, most)
        if length < 1:
            return False
        told = min(len(seq.tokens), seq.capacity) if rng.random() < 0.2 else 0
        priority = rng.choice((None, None, None, 0, 2))
        expiry = self.world.now + 0.2 if rng.random() < 0.1 else 0.0
        return f"{seq.handle} {self.world.commit(seq, length, told=told, priority=priority, expiry=expiry)}"

    def fork(self) -> object:
        seq, rng = self.a_seq(), self.rng
        if seq is None or seq.kept_from or len(seq.engine.seqs) > 6:
            return False
        if rng.random() < 0.5 and seq.written > seq.reported:
            self.world.report(seq)
        most = min(max(seq.reported, seq.base), self.world.copied(seq))
        if not most:
            return False
        child = self.world.try_fork(seq, most if rng.random() < 0.7 else rng.randint(1, most))
        if child is None:
            return f"{seq.handle} may not: its engine owes"
        child.goal = child.capacity + rng.choice((1, 4, 12))
        return f"{seq.handle} -> {child.handle} at {child.capacity}"

    def trim(self) -> object:
        seq, rng, world = self.a_seq(), self.rng, self.world
        if seq is None:
            return False
        if self.config.windowed and rng.random() < 0.6:
            most = min(max(seq.reported, seq.base), seq.cursor)
            if most <= seq.kept_from:
                return False
            keep = rng.randint(seq.kept_from, most)
            return f"{seq.handle} from {keep}: {world.trim(seq, keep_from=keep, extra=rng.random() < 0.3)}"
        keep = seq.cursor if rng.random() < 0.3 else rng.randint(max(1, seq.kept_from), seq.capacity)
        if keep < max(1, seq.kept_from):
            return False
        return (
            f"{seq.handle} to {keep}: {world.trim(seq, keep_to=keep, extra=rng.random() < 0.3)} {seq.table}"
        )

    def free(self) -> object:
        seq = self.a_seq()
        if seq is None or (seq.cursor < seq.goal and self.rng.random() < 0.7):
            return False
        self.world.free(seq, extra=self.rng.random() < 0.2)
        return f"{seq.handle}"

    def pin(self) -> object:
        engine = self.an_engine()
        if engine is None or not self.prompts or len(engine.pins) > 3:
            return False
        try:
            return f"{self.world.pin(engine, self.rng.choice(self.roots), self.rng.choice(self.prompts))}"
        except Refusal as refusal:
            return f"refused: {refusal}"

    def unpin(self) -> object:
        engine = self.an_engine()
        if engine is None or not engine.pins:
            return False
        handle = self.rng.choice(list(engine.pins))
        self.world.unpin(engine, handle)
        return f"{handle}"

    def move(self) -> object:
        nodes = self.world.movable()
        if not nodes or len(self.world.moves) > 3:
            return False
        rng, pool = self.rng, self.world.pool
        node = rng.choice(nodes)
        at = length = 0
        target: list[int] | None = None
        if rng.random() < 0.5:
            units = pool.tree.length[node] // pool.unit
            at = rng.randrange(units)
            length = rng.randint(1, units - at) * pool.unit
            at *= pool.unit
        moved = length or pool.tree.length[node] - at
        if pool.unit == 1 and rng.random() < 0.5:
            run = rng.choice([*pool.runs.length_at, pool.padding])
            target = [run, moved]
            if rng.random() < 0.5:
                target = [run + pool.runs.length_at.get(run, moved) - moved, moved]
        try:
            told = f"node {node} {pool.tree.extents(node)} from {at}"
            return f"{told}: {self.world.move(node, at, length, target)}"
        except Refusal as refusal:
            return f"refused: {refusal}"

    def compact(self) -> object:
        """A plan for some purpose, of which as much begins as may; now and then it is switched off, to begin afresh."""
        rng, world = self.rng, self.world
        if self.planner is not None and rng.random() < 0.1:
            self.planner.close()
            self.planner = None
            for handle in list(world.moves):
                world.pool.moves.abandon(handle)
            return "off"
        if len(world.moves) > 8:
            return False
        if self.planner is None:
            self.planner = (Planner if rng.random() < 0.5 else Greedy)(world.pool)
        if rng.random() < 0.2:
            self.planner.feed(1)
            return "is told of a change"
        while self.planner.feed(64):
            pass
        purpose = rng.choice(list(Purpose))
        plan = self.planner.plan(rng.choice((3, 30, 300)), purpose, world.now, blocks=rng.choice((1, 2, 4)))
        begun = 0
        for move in plan.moves:
            try:
                world.move(move.node, move.at, move.length, move.target)
                begun += 1
            except Refusal as refusal:
                self.world.tally[f"planned and refused: {refusal}"[:40]] += 1
        world.tally["planned"] += begun
        return f"{purpose} {begun} of {len(plan.moves)}" if plan.moves else False

    def abandon(self) -> object:
        if not self.world.moves:
            return False
        handle = self.rng.choice(list(self.world.moves))
        self.world.pool.moves.abandon(handle)
        return f"{handle}"

    def poll(self) -> object:
        self.world.poll()
        if self.config.scrubs:
            self.polls += 1
            self.world.scrub(1 + 7 * self.polls % 30, end=bool(self.polls % 3))
        if self.config.ahead:
            self.polls += 1
            self.world.pool.replenish(self.world.now, 1 + self.polls % 3)
            self.world.pool.gather(self.polls % 7, 1 + self.polls % 2)
            if self.polls % 3:
                self.world.pool.tidy(self.polls % 4, 1)
        return False

    def evict(self) -> object:
        asked = self.rng.randrange(1, 12)
        gone = self.world.pool.evict(asked, now=self.world.now)
        require(gone < asked + self.world.unit, "evicted", gone, "where", asked, "were asked")
        return f"{gone}"

    def advance(self) -> object:
        self.world.advance(self.rng.choice((0.001, 0.03, 0.3)))
        return False

    def lose(self) -> object:
        engine = self.an_engine()
        if engine is None:
            return False
        self.forget(engine)
        self.world.lose(engine)
        return f"{engine.session.handle}"

    def back(self) -> object:
        lost = [engine for engine in self.world.engines if engine.life == "lost"]
        if not lost:
            return False
        engine = self.rng.choice(lost)
        self.world.resume(engine)
        return f"{engine.session.handle}"

    def die(self) -> object:
        lost = [engine for engine in self.world.engines if engine.life == "lost"]
        if not lost:
            return False
        engine = self.rng.choice(lost)
        self.world.gone(engine)
        return f"{engine.session.handle}"

    def sweep(self) -> object:
        self.world.pool.sweep(self.rng.choice((1, 2, 256)))
        return False

    def bye(self) -> object:
        engine = self.an_engine()
        if engine is None or len(self.live()) < 2 or engine.stuck:
            return False
        self.forget(engine)
        self.world.bye(engine)
        return f"{engine.session.handle}"

    def stall(self) -> object:
        engine = self.an_engine()
        if engine is None:
            return False
        engine.stuck = not engine.stuck
        self.world.pool.stall(engine.session, engine.stuck)
        return f"{engine.session.handle} {engine.stuck}"

    def pump(self) -> object:
        pool, now = self.world.pool, self.world.now
        pool.admission.pump(now)
        grace = pool.config.ticket_grace
        for ticket in (*pool.admission.waiting.values(), *pool.admission.growth.values()):
            require(not 0 <= ticket.ready < now - grace, "a ticket outlives its grace")
        return False

    def withdraw(self) -> object:
        if not self.tickets:
            return False
        ticket = self.rng.choice(list(self.tickets))
        engine = self.tickets.pop(ticket)[0]
        try:
            self.world.pool.admission.withdraw(engine.session, ticket)
        except Refusal:
            return f"{ticket} had ended"
        return f"{ticket}"

    def misuse(self) -> object:
        """Wrong handles, lengths and fences are refused and change nothing."""
        engine, rng, world, pool = self.an_engine(), self.rng, self.world, self.world.pool
        if engine is None:
            return False
        session = engine.session
        others = [s.handle for e in world.engines for s in e.seqs.values() if e is not engine]
        handle = rng.choice([0, -1, 1 << 40, world.handles, *others])
        if handle in engine.seqs or handle in engine.pins:
            return False
        mine = next(iter(engine.seqs.values()), None)
        tries: list[Callable[[], object]] = [
            lambda: pool.free(session, handle),
            lambda: pool.extend(session, handle),
            lambda: pool.commit(session, handle, 1),
            lambda: pool.fork(session, handle),
            lambda: pool.trim(session, handle, keep_to=1),
            lambda: pool.wrote(session, handle, 1),
            lambda: pool.table(session, handle),
            lambda: pool.unpin(session, handle),
            lambda: pool.allocate(session, self.roots[0], b""),
            lambda: pool.allocate(session, self.roots[0], b"abc"),
            lambda: pool.allocate(session, 1 << 20, b"abcd"),
        ]
        if mine is not None:
            seq = mine
            tries += [
                lambda: pool.free(session, seq.handle, fence=engine.submitted + 1),
                lambda: pool.trim(session, seq.handle, keep_to=seq.capacity + 1),
                lambda: pool.trim(session, seq.handle, keep_to=1, fence=engine.submitted + 1),
                lambda: pool.trim(
                    session, seq.handle, keep_from=1 if not self.config.windowed else seq.capacity + 1
                ),
                lambda: pool.commit(session, seq.handle, seq.capacity + 1),
                lambda: pool.commit(session, seq.handle, seq.told, b"abc"),
                lambda: pool.fork(session, seq.handle, length=seq.capacity + 1),
                lambda: pool.wrote(session, seq.handle, seq.capacity + 1),
                lambda: pool.extend(session, seq.handle, tokens=-1),
                lambda: pool.progress(session, engine.submitted, engine.submitted + 1),
                lambda: pool.progress(session, engine.submitted - 1, engine.completed[0]),
            ]
        before = (bytes(world.shadow), pool.tree.tokens, pool.tree.evictable, len(pool.sequences))
        try:
            rng.choice(tries)()
        except Refusal:
            require(before == (bytes(world.shadow), pool.tree.tokens, pool.tree.evictable, len(pool.sequences)),
                    "a refusal changed something")  # fmt: skip
            return False
        raise Fault("misuse was not refused")

    # -- answering, leaving ------------------------------------------------------------------------------------

    def forget(self, engine: Engine) -> None:
        self.tickets = {t: v for t, v in self.tickets.items() if v[0] is not engine}

    def answer(self) -> None:
        """Engines read their pushes; careful ones do as asked, soon."""
        world, pool = self.world, self.world.pool
        pushes, pool.pushes = pool.pushes, []
        by_session = {engine.session.handle: engine for engine in world.engines}
        for push in pushes:
            engine = by_session.get(push.session)
            if self.say is not None:
                self.say(f"     push {push}")
            if engine is None or engine.life != "live":
                continue
            world.tally[type(push).__name__] += 1
            if isinstance(push, Ready | Published | Abandoned):
                if push.ticket in self.tickets and self.rng.random() < 0.7:
                    _, root, tokens, contiguous = self.tickets.pop(push.ticket)
                    got = world.allocate(
                        engine, root, tokens, ticket=push.ticket, contiguous=contiguous and engine.page == 1
                    )
                    if isinstance(got, Later):
                        self.tickets[got.ticket] = (engine, root, tokens, contiguous)
                    elif isinstance(got, Seq):
                        got.goal = len(tokens) + 4
            elif isinstance(push, Pressure):
                for seq in list(engine.seqs.values()) if self.careful else []:
                    if 0 < seq.cursor < seq.capacity and seq.cursor >= seq.kept_from:
                        world.trim(seq, keep_to=seq.cursor)
            else:
                assert isinstance(push, Preempt)
                if self.careful and push.sequence in engine.seqs:
                    world.free(engine.seqs[push.sequence])
            world.check()

    def leave(self) -> None:
        """Everybody goes, one way or another; then nothing may be held, and all can be evicted."""
        world, pool, rng = self.world, self.world.pool, self.rng
        for engine in list(world.engines):
            if engine.life == "lost" or engine.stuck or rng.random() < 0.3:
                if engine.life == "live":
                    world.lose(engine)
                    if rng.random() < 0.5:
                        pool.sweep()
                    world.check()
                world.gone(engine)
                world.check()
            else:
                world.bye(engine)
                world.check()
        if self.planner is not None:
            self.planner.close()
        while not pool.sweep(2):
            world.check()
        world.device.release()
        world.device.settle()
        world.advance(1.0)
        world.poll()
        pool.admission.pump(world.now)
        world.clean()
        world.check()
        require(not pool.sessions and not pool.sequences, "sessions or sequences are left")
        require(not pool.admission.waiting and not pool.admission.growth, "tickets are left")
        require(all(session.life == Life.ENDED for session in pool.sessions.values()), "a session lives on")
        usable = pool.usable
        while pool.tidy():
            world.check()
        require(pool.runs.total + pool.tree.tokens == usable, "slots are held by nobody")
        require(pool.tree.evictable == pool.tree.tokens, "cached tokens are held by nobody")
        pool.evict(usable, now=world.now)
        world.clean()
        pool.runs.unstock()
        world.check()
        require(pool.runs.total == usable == pool.runs.longest(), "the pool is not whole again")


def simulate(seed: int, **options: object) -> World:
    """Runs one history; raises what went wrong."""
    return Driver(seed, **options).run()  # type: ignore[arg-type]


__all__ = ["Driver", "Never", "simulate"]
