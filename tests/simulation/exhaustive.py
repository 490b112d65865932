"""All histories of a tiny pool, to a stated depth.

Three blocks, of which two are usable, and two engines.  From every state every act of an alphabet is tried; states that
differ in nothing that a later act could tell are followed once.  What may tell is all of it but counters: tables, tree
and its order of eviction, free runs and their order, holders, fences, steps, tickets.

A state is kept as the history that led to it and made again by replaying it: slower than copying it, and exact.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

from kvslot.allocator import PoolConfig, Refusal

from .world import Engine, Seq, World

Act = tuple[str, int, int]
PROMPTS = ([0, 1], [0, 1, 1], [1, 0, 0])


class Tiny:
    """A world of two engines, and the acts by name."""

    def __init__(self, block_size: int, append: str, opaque: bool) -> None:
        config = PoolConfig(
            blocks=3, block_size=block_size, quantum=1, watermark=0.0, append=append, opaque=opaque, headroom=0.0
        )  # fmt: skip
        self.world = World(config, vocabulary=1)
        self.root = self.world.root()
        self.engines = [self.world.engine(), self.world.engine()]

    def do(self, act: Act) -> bool:
        """Does one act; false when there is nothing to do, or it was refused, so that it leads nowhere new."""
        name, which, what = act
        done: bool = getattr(self, name)(self.engines[which], what)
        return done

    def seq(self, engine: Engine, index: int) -> Seq | None:
        seqs = list(engine.seqs.values())
        return seqs[index] if engine.life == "live" and index < len(seqs) else None

    def allocate(self, engine: Engine, prompt: int) -> bool:
        if engine.life != "live" or len(engine.seqs) == 2:
            return False
        self.world.allocate(engine, self.root, PROMPTS[prompt])
        return True

    def serve(self, engine: Engine, index: int) -> bool:
        """All it has room for is written, and completed."""
        seq = self.seq(engine, index)
        if seq is None or seq.cursor == seq.capacity:
            return False
        self.world.submit(engine, [(seq, 99)])
        self.world.settle(engine)
        return True

    def submit(self, engine: Engine, what: int) -> bool:
        """A step that reads all its sequences and writes a token of each stays in flight."""
        if engine.life != "live" or len(engine.flight) == 2 or not engine.seqs:
            return False
        self.world.submit(engine, [(seq, 1) for seq in engine.seqs.values()])
        return True

    def complete(self, engine: Engine, what: int) -> bool:
        return self.world.complete(engine)

    def commit(self, engine: Engine, index: int) -> bool:
        seq = self.seq(engine, index)
        if seq is None or max(seq.written, seq.base) == 0:
            return False
        self.world.commit(seq, max(seq.written, seq.base))
        return True

    def extend(self, engine: Engine, index: int) -> bool:
        seq = self.seq(engine, index)
        if seq is None or seq.capacity > seq.cursor:
            return False
        self.world.extend(seq)
        return True

    def fork(self, engine: Engine, index: int) -> bool:
        seq = self.seq(engine, index)
        if seq is None or len(engine.seqs) == 2:
            return False
        if not max(seq.written, seq.base):
            return False
        self.world.report(seq)
        length = min(max(seq.reported, seq.base), self.world.copied(seq))
        if not length:
            return False
        self.world.try_fork(seq, length)
        return True

    def trim(self, engine: Engine, index: int) -> bool:
        """One token back."""
        seq = self.seq(engine, index)
        if seq is None or seq.cursor < 2:
            return False
        self.world.trim(seq, keep_to=seq.cursor - 1)
        return True

    def free(self, engine: Engine, index: int) -> bool:
        seq = self.seq(engine, index)
        if seq is None:
            return False
        self.world.free(seq)
        return True

    def evict(self, engine: Engine, what: int) -> bool:
        return self.world.pool.evict(1) > 0

    def lose(self, engine: Engine, what: int) -> bool:
        if engine.life != "live":
            return False
        self.world.lose(engine)
        self.world.pool.sweep()
        return True

    def resume(self, engine: Engine, what: int) -> bool:
        if engine.life != "lost":
            return False
        self.world.resume(engine)
        return True

    def gone(self, engine: Engine, what: int) -> bool:
        if engine.life != "lost":
            return False
        self.world.gone(engine)
        while not self.world.pool.sweep(1):
            pass
        return True

    def move(self, engine: Engine, what: int) -> bool:
        nodes = self.world.movable()
        if not nodes or self.world.moves:
            return False
        try:
            self.world.move(nodes[0])
        except Refusal:
            return False
        return True

    def moved(self, engine: Engine, copied: int) -> bool:
        if not self.world.moves:
            return False
        self.world.advance(1.0)
        self.world.finish(next(iter(self.world.moves)), bool(copied))
        return True

    def key(self) -> Hashable:
        """All that a later act could tell."""
        pool, world = self.world.pool, self.world
        tree, runs, admission = pool.tree, pool.runs, pool.admission
        nodes = sorted(
            tree.live(), key=lambda node: b"".join(tree.keys[n] for n in [*tree.path_to(node), node])
        )
        names = {node: i for i, node in enumerate(nodes)}
        ticks = sorted({tree.tick[node] for node in nodes})
        shape = tuple(
            (
                names.get(tree.parent[n], -1), tree.keys[n], tuple(tree.extents(n)), tree.holds[n], tree.flags[n],
                ticks.index(tree.tick[n]),
            )
            for n in nodes
        )  # fmt: skip
        order = tuple(names[n] for n in pool.tree.evictor.victims(99))
        free = tuple(
            tuple((start, runs.length_at[start]) for start in runs_) for runs_ in runs.classes if runs_
        )
        marks = bytes(runs.block_kind), bytes(runs.block_group)
        engines = []
        for engine in self.engines:
            session = engine.session
            behind = engine.completed[0]
            seqs = []
            for seq in engine.seqs.values():
                sequence = pool.sequences[seq.handle]
                pieces = tuple(
                    (p.position, tuple(p.extents), p.length, p.kind, p.refs, max(0, p.fence - behind))
                    for p in (*sequence.own, *(sequence.sources or ()))
                )
                seqs.append((
                    tuple(seq.tokens), seq.cursor, seq.written, seq.reported, seq.told, max(0, seq.last_step - behind),
                    sequence.base, sequence.length, sequence.capacity, names.get(sequence.node, -1), pieces,
                    tuple(names.get(n, -1) for n in sequence.kept or ()), seq.handle in admission.growth,
                ))  # fmt: skip
            fences = tuple(
                sorted(
                    (step - behind, names.get(f.node, -1), tuple(tuple(r.extents) for r in f.ranges))
                    for step, _, f in session.fences
                )
            )
            flight = tuple((step.executed, tuple(step.reads), tuple(step.writes)) for step in engine.flight)
            waiting = sum(t.session is session for t in admission.waiting.values())
            engines.append((engine.life, tuple(seqs), fences, flight, waiting, len(session.owes)))
        handles = sorted((h, i) for i, e in enumerate(self.engines) for h in e.seqs)
        moving = tuple((names.get(m.node, -1), tuple(m.target)) for m in pool.moves.tickets.values())
        first = next((t.session is self.engines[0].session for t in admission.waiting.values()), None)
        return (
            shape, order, free, marks, tuple(engines), tuple(i for _, i in handles), moving, first,
            bool(world.pool.admission.pressed >= 0),
        )  # fmt: skip


def alphabet(names: str) -> list[Act]:
    """Acts by name: those of a sequence for both sequences of both engines, others as they need."""
    acts: list[Act] = []
    for name in names.split():
        if name == "allocate":
            acts += [(name, which, prompt) for which in (0, 1) for prompt in range(len(PROMPTS))]
        elif name in ("serve", "commit", "extend", "fork", "trim", "free"):
            acts += [(name, which, index) for which in (0, 1) for index in (0, 1)]
        elif name in ("submit", "complete", "lose", "resume", "gone"):
            acts += [(name, which, 0) for which in (0, 1)]
        elif name == "moved":
            acts += [(name, 0, 1), (name, 0, 0)]
        else:
            acts.append((name, 0, 0))
    return acts


ALPHABETS = {
    "sharing": "allocate serve commit extend fork trim free evict",
    "fences": "allocate submit complete commit free evict move moved",
    "deaths": "allocate serve commit submit free lose resume gone evict",
}


def explore(make: Callable[[], Tiny], acts: list[Act], depth: int) -> Iterator[tuple[int, int, int]]:
    """Follows all histories; yields (depth, new states, histories tried) for each depth."""
    seen: set[Hashable] = {make().key()}
    edge: list[list[Act]] = [[]]
    for level in range(1, depth + 1):
        tried = 0
        following: list[list[Act]] = []
        for history in edge:
            tiny: Tiny | None = None
            for act in acts:
                if tiny is None:
                    tiny = make()
                    tiny.world.checks = False
                    for each in history:
                        tiny.do(each)
                try:
                    tried += 1
                    if not tiny.do(act):
                        continue
                    state = tiny.key()
                    if state not in seen:
                        seen.add(state)
                        following.append([*history, act])
                        tiny.world.checks = True
                        tiny.world.check()
                    tiny = None
                except Exception as fault:
                    fault.add_note(f"after {[*history, act]}")
                    raise
        yield level, len(following), tried
        edge = following
