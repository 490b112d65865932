"""Seeded histories of engines under more load than the pool bears: everybody must get through.

Requests arrive faster than memory allows, grow while they run, and are long and short.  Engines read their pushes and
answer: a victim is freed and starts over, second runs are given back.  Some engines stop answering or stepping, and die
later on.  What is proved, for every seed:

    the oldest running sequence is never named a victim and, as it fits alone, finishes
    every request of an engine that lives finishes: none starves, neither the long behind the short nor the reverse
    nobody is told NEVER who fits, and nothing is held when all have gone
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvslot.allocator import Later, Never, Pool, PoolConfig, Preempt, Pressure, Ready

from .world import Engine, Fault, Seq, World, require

TICK = 0.005  # seconds of virtual time
TICKS_MAX = 2000
CHECK_EACH = 8  # ticks between two audits; the journal and the paint watch all the time


@dataclass(eq=False)
class Request:
    tokens: list[int]
    goal: int
    arrival: float
    contiguous: bool
    ticket: int = 0
    retry: float = 0.0
    running: Seq | None = None
    starts: int = 0


@dataclass(eq=False)
class Server:
    """An engine and what it has to do."""

    engine: Engine
    deaf_from: float  # answers no push from then on
    frozen: tuple[float, float]  # its steps do not complete within
    dies_at: float
    queue: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    resubmit: float = 0.0


class Load:
    """One history."""

    def __init__(
        self,
        seed: int,
        *,
        make_pool: Callable[[PoolConfig], Pool] = Pool,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.say = say
        block_size = rng.choice((1, 4, 8, 16))
        blocks = rng.randrange(40, 160) // block_size + (2 if block_size == 1 else 1)
        self.config = PoolConfig(
            blocks=max(blocks, 4), block_size=block_size, watermark=rng.choice((0.0, 0.02, 0.1)),
            quantum=rng.choice((0, 1, 2, 4)), ticket_grace=rng.choice((0.05, 1.0)),
            preempt_deadline=0.05, reclaim_patience=rng.choice((0.0, 0.02)),
            fence_patience=rng.choice((0.0, 0.05)), append=rng.choice(("chain", "peel")), peel_max=4,
            scrubs=seed % 7 == 6,  # off the generator's path, as the limits below
        )  # fmt: skip
        self.world = World(
            self.config, seed=rng.randrange(1 << 30), pool=make_pool(self.config), vocabulary=50
        )
        usable = self.world.pool.usable
        self.limited = seed % 5 == 4
        if self.limited:
            self.world.pool.limit("a", slots=max(2, usable * 17 // 20), runs=(4, 16, 1 << 20)[seed % 3])
        self.root = self.world.root()
        most = max(2, int(usable * 0.7) - 8)
        self.servers: list[Server] = []
        troubled = rng.random() < 0.4
        for index in range(rng.randrange(1, 4)):
            pages = [page for page in (1, 1, 2, 4) if block_size % page == 0]
            # Whole pages of one engine among the odd slots of another need windows; here engines are of one kind.
            page = rng.choice(pages) if index == 0 else self.servers[0].engine.page
            bad = troubled and index > 0
            freeze = rng.uniform(0, 1.0) if bad and rng.random() < 0.5 else 1e9
            self.servers.append(
                Server(
                    self.world.engine(page=page),
                    deaf_from=rng.uniform(0, 1.0) if bad and rng.random() < 0.7 else 1e9,
                    frozen=(freeze, freeze + rng.uniform(0.1, 2)),
                    dies_at=rng.uniform(1.0, 3.0) if bad else 1e9,
                )
            )
        shared = [rng.randrange(50) for _ in range(most)]
        for _ in range(rng.randrange(6, 24)):
            server = rng.choice(self.servers)
            n = max(1, min(most - 1, rng.choice((1, 3, 8, most // 3, most // 2, most - 2))))
            fork = rng.randrange(n + 1) if rng.random() < 0.5 else 0
            tokens = shared[:fork] + [rng.randrange(50) for _ in range(n - fork)]
            goal = min(most, n + rng.choice((0, 2, 10, most // 3)))
            contiguous = rng.random() < 0.15 and server.engine.page == 1
            server.queue.append(Request(tokens, goal, rng.uniform(0, 0.6), contiguous))
        for server in self.servers:
            server.queue = deque(sorted(server.queue, key=lambda request: request.arrival))
        self.stalled: set[int] = set()
        self.oldest = 0  # the oldest sequence when the tick began, the oldest until it ends

    def tell(self, *what: object) -> None:
        if self.say is not None:
            self.say(f"t={self.world.now:.3f} " + " ".join(map(str, what)))

    def run(self) -> World:
        for tick in range(TICKS_MAX):
            if not any(server.queue or server.running for server in self.servers):
                break
            self.oldest = min(self.world.pool.sequences, default=0)
            for server in list(self.servers):
                self.turn(server)
            self.world.pool.sweep(2)
            self.world.pool.admission.pump(self.world.now)
            self.pushes()
            if self.config.scrubs:
                self.world.scrub(32)
            self.world.advance(TICK)
            if tick % CHECK_EACH == 0:
                self.world.check()
        else:
            waiting = [
                (r.ticket, len(r.tokens), r.goal, r.running)
                for s in self.servers
                for r in (*s.queue, *s.running)
            ]
            raise Fault(f"{len(waiting)} requests did not finish: {waiting[:5]}")
        for server in self.servers:
            self.world.bye(server.engine)
        while not self.world.pool.sweep():
            pass
        pool = self.world.pool
        self.world.clean()
        self.world.check()
        require(
            pool.runs.total + pool.tree.evictable == pool.usable, "something is held though all have left"
        )
        return self.world

    def turn(self, server: Server) -> None:
        """What one engine does in a tick."""
        world, engine, now = self.world, server.engine, self.world.now
        if now >= server.dies_at:
            self.tell("dies", engine.session.handle)
            world.lose(engine)
            world.gone(engine)
            self.servers.remove(server)
            return
        frozen = server.frozen[0] <= now < server.frozen[1]
        if frozen != (engine.session.handle in self.stalled):
            self.stalled ^= {engine.session.handle}
            world.pool.stall(engine.session, frozen)
        if frozen:
            return
        while engine.passed < engine.submitted - 1:
            world.complete(engine)
        for request in list(server.running):
            seq = request.running
            assert seq is not None
            if seq.written >= request.goal:
                world.commit(seq, seq.written)
                world.free(seq)
                server.running.remove(request)
                self.tell("finished", seq.handle)
                continue
            if self.limited and seq.written > seq.reported:
                world.report(seq)
            if seq.cursor >= seq.capacity and now >= request.retry:
                answer = world.extend(seq, ticket=request.ticket)
                self.tell("extend", seq.handle, answer)
                if isinstance(answer, Never):
                    raise Fault(f"NEVER for growth to {answer.needed} of {answer.limit}, which fits alone")
                if isinstance(answer, Later):
                    request.ticket, request.retry = answer.ticket, now + answer.retry_after_ms / 1000
                else:
                    request.ticket = 0
        work = [
            (r.running, min(9, r.goal - r.running.cursor)) for r in server.running if r.running is not None
        ]
        if any(n > 0 and seq.cursor < seq.capacity for seq, n in work):
            world.submit(engine, work)
        elif engine.passed < engine.submitted:
            world.complete(engine)
        tried = 0
        for request in list(server.queue):
            if request.arrival > now or tried >= 3:
                break
            tried += 1
            if now < request.retry or len(server.running) >= 6:
                continue
            got = world.allocate(
                engine, self.root, request.tokens, ticket=request.ticket, contiguous=request.contiguous
            )  # fmt: skip
            if isinstance(got, Never):
                raise Fault(f"NEVER for a prompt of {len(request.tokens)}")
            if isinstance(got, Later):
                request.ticket, request.retry = got.ticket, now + got.retry_after_ms / 1000
                continue
            self.tell("admitted", len(request.tokens), "to", request.goal, "as", got.handle, got.table)
            request.ticket, request.retry, request.running = 0, 0.0, got
            request.starts += 1
            server.queue.remove(request)
            server.running.append(request)

    def pushes(self) -> None:
        world = self.world
        pushes, world.pool.pushes = world.pool.pushes, []
        for push in pushes:
            server = next((s for s in self.servers if s.engine.session.handle == push.session), None)
            if isinstance(push, Preempt):
                require(
                    push.sequence != self.oldest, "the oldest sequence", self.oldest, "was named a victim"
                )
                world.tally["preempted"] += 1
            self.tell(push)
            if server is None or world.now >= server.deaf_from:
                continue
            if isinstance(push, Ready):
                for request in (*server.queue, *server.running):
                    if request.ticket == push.ticket:
                        request.retry = 0.0
            elif isinstance(push, Pressure):
                for request in server.running:
                    seq = request.running
                    if seq is not None and 0 < seq.cursor < seq.capacity:
                        world.trim(seq, keep_to=seq.cursor)
            elif isinstance(push, Preempt):
                for request in list(server.running):
                    seq = request.running
                    if seq is not None and seq.handle == push.sequence:
                        # It starts over with what it had, before all others of its engine.
                        request.tokens = seq.tokens[: max(seq.written, len(request.tokens))]
                        world.free(seq)
                        request.running, request.ticket, request.retry = None, 0, 0.0
                        server.running.remove(request)
                        server.queue.appendleft(request)
