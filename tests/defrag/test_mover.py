"""The mover: what is planned is copied and published, or has a named outcome; of what is stopped nothing is left."""

from __future__ import annotations

import random
from itertools import pairwise

from kvslot.allocator import Admitted, Pool, PoolConfig, Session, Space, audit
from kvslot.defrag import Plan, Planner, Purpose
from kvslot.defrag.mover import Mover, Piece, pieces_of


def toks(n: int, start: int) -> bytes:
    return b"".join(each.to_bytes(4, "little") for each in range(start, start + n))


class Bench:
    """A pool in which short prefixes were cached and every other one was freed; its slots' contents; and a mover."""

    def __init__(self, blocks: int = 40, seed: int = 1) -> None:
        self.pool = Pool(
            PoolConfig(blocks=blocks, block_size=8, watermark=0.0, quantum=1, headroom=0.0, emptying=1)
        )
        self.session: Session = self.pool.open_session()
        self.root = self.pool.open_space(Space("a"))
        draw = random.Random(seed)
        self.prompts: list[bytes] = []
        start = 0
        while self.pool.runs.total > 16:
            n = draw.randint(2, 7)
            self.cache(toks(n, start))
            start += 100
        self.memory = list(range(self.pool.slots))
        self.copies: dict[int, list[Piece]] = {}
        self.tokens = 0
        self.allowed = True
        self.mover = Mover(
            self.pool, self.submit, tokens_max=64, batch_tokens=16, moves_max=8, ready=lambda _: self.allowed
        )
        for prompt in self.prompts[1::2]:
            self.read(prompt)
        self.pool.evict(sum(len(each) // 4 for each in self.prompts[::2]))
        self.kept = {node: self.contents(node) for node in self.pool.tree.live()}

    def cache(self, prompt: bytes) -> None:
        answer = self.pool.allocate(self.session, self.root, prompt)
        if isinstance(answer, Admitted):
            self.pool.commit(self.session, answer.sequence, len(prompt) // 4)
            self.pool.free(self.session, answer.sequence)
            self.prompts.append(prompt)

    def read(self, prompt: bytes) -> int:
        """A sequence that reads a prefix, and ends; how much of it was there."""
        answer = self.pool.allocate(self.session, self.root, prompt + toks(1, 9))
        assert isinstance(answer, Admitted)
        self.pool.free(self.session, answer.sequence)
        return answer.hit

    def contents(self, node: int) -> list[int]:
        extents = self.pool.tree.extents(node)
        return [
            self.memory[slot]
            for i in range(0, len(extents), 2)
            for slot in range(extents[i], extents[i] + extents[i + 1])
        ]

    def submit(self, pieces: list[Piece]) -> int:
        self.tokens += 1
        self.copies[self.tokens] = pieces
        return self.tokens

    def end(self, token: int, ok: bool = True) -> int:
        if ok:
            for source, target, length in self.copies[token]:
                self.memory[target : target + length] = self.memory[source : source + length]
        del self.copies[token]
        return self.mover.completed(token, ok)

    def plan(self) -> Plan:
        planner = Planner(self.pool)
        while planner.feed():
            pass
        plan = planner.plan(1 << 16, Purpose.FREE_BLOCKS)
        planner.close()
        return plan

    def sound(self) -> None:
        assert audit(self.pool) == []
        outcomes, mover = self.mover.outcomes, self.mover
        assert outcomes.planned == outcomes.settled + mover.queued + mover.moves_in_flight
        assert mover.moves_in_flight == sum(1 for _ in self.pool.moves.tickets)
        for node in self.pool.tree.live():
            if node in self.kept:
                assert self.contents(node) == self.kept[node]


def test_a_plan_is_carried_out_in_bounded_batches() -> None:
    """Never more moves or tokens under way than allowed; moves are published, and whole blocks come free.

    A target may have to wait for another plan: what came free beside it is one run with it by then.
    """
    bench = Bench()
    mover, pool = bench.mover, bench.pool
    before = pool.runs.blocks_free
    moves = bench.plan().moves
    assert mover.take(moves) == len(moves) > 8
    while not mover.idle:
        mover.pump()
        assert 0 < mover.moves_in_flight <= 8
        assert mover.tokens_in_flight <= 64
        bench.sound()
        bench.end(min(bench.copies))
    bench.sound()
    outcomes = mover.outcomes
    assert outcomes.published + outcomes.deferred == len(moves)
    assert outcomes.published > 0.7 * len(moves)
    assert 0 < outcomes.moved_tokens == pool.moves.moved_tokens
    assert pool.runs.blocks_free > before


def test_a_copy_that_failed_moves_nothing() -> None:
    """The moves of a batch that the device could not copy stay where they were, and are counted as failed."""
    bench = Bench()
    bench.mover.take(bench.plan().moves)
    bench.mover.pump(batches=1)
    count = bench.mover.moves_in_flight
    assert bench.end(1, ok=False) == 0
    assert bench.mover.outcomes.failed == count > 1
    assert bench.mover.completed(1) == bench.mover.completed(77) == 0  # told twice, and unknown
    bench.sound()


def test_what_is_read_meanwhile_is_left() -> None:
    """A node that a sequence took up before its move began is deferred; one taken up since is abandoned: leased."""
    for since in (False, True):
        bench = Bench()
        mover, pool = bench.mover, bench.pool
        plan = bench.plan()
        mover.take(plan.moves)
        if since:
            mover.pump()
        node = plan.moves[0].node
        reader = pool.allocate(bench.session, bench.root, pool.tree.keys[node] + toks(1, 9))
        assert isinstance(reader, Admitted)
        place = list(pool.tree.extents(node))
        while not mover.idle:
            mover.pump()
            bench.end(min(bench.copies))
        assert mover.outcomes.abandoned_leased == since
        assert mover.outcomes.deferred >= (not since)
        assert pool.tree.extents(node) == place
        bench.sound()


def test_what_is_evicted_meanwhile_is_given_up() -> None:
    """A node that is evicted while it is copied is abandoned: freed, and a number used again is not mistaken for it."""
    bench = Bench()
    bench.mover.take(bench.plan().moves)
    bench.mover.pump()
    under_way = bench.mover.moves_in_flight
    bench.pool.evict(1 << 20)
    bench.kept.clear()
    for start in range(0, 20_000, 1000):
        bench.cache(toks(5, start))
    while not bench.mover.idle:
        while bench.copies:
            bench.end(min(bench.copies))
        bench.mover.pump()
    assert bench.mover.outcomes.abandoned_freed == under_way
    assert bench.mover.outcomes.published == 0
    bench.sound()


def test_a_move_is_put_off_where_its_readers_cannot_be_told_now() -> None:
    """Where `ready` says no, the copy is thrown away and the node stays; the move counts as deferred."""
    bench = Bench()
    bench.mover.take(bench.plan().moves)
    bench.mover.pump(batches=1)
    bench.allowed = False
    count = bench.mover.moves_in_flight
    bench.end(1)
    assert bench.mover.outcomes.deferred == count
    bench.sound()


def test_stopping_leaves_nothing_but_copies_that_run() -> None:
    """S55: after `stop` at any point, once the copies have ended, all is as if nothing had been planned."""
    draw = random.Random(5)
    for seed in range(12):
        bench = Bench(seed=seed)
        mover, pool = bench.mover, bench.pool
        for _ in range(4):
            mover.take(bench.plan().moves)
            mover.pump(batches=draw.randint(0, 3))
            for token in draw.sample(sorted(bench.copies), draw.randint(0, len(bench.copies))):
                bench.end(token, ok=draw.random() < 0.8)
            mover.stop()
            bench.sound()
            places = {node: list(pool.tree.extents(node)) for node in pool.tree.live()}
            if draw.random() < 0.5:
                mover.take(bench.plan().moves)  # on again while copies of before still run
                mover.pump(batches=1)
                mover.stop()
            while bench.copies:
                bench.end(draw.choice(sorted(bench.copies)), ok=draw.random() < 0.8)
            assert mover.idle
            assert not pool.moves.tickets
            assert {node: pool.tree.extents(node) for node in pool.tree.live()} == places
            bench.sound()
        mover.take(bench.plan().moves)
        while not mover.idle:
            mover.pump()
            bench.end(min(bench.copies))
        bench.sound()


def test_what_has_no_time_left_is_over_budget() -> None:
    """Moves that are dropped before they began are counted so, and their targets were never taken."""
    bench = Bench()
    free = bench.pool.runs.total
    count = bench.mover.take(bench.plan().moves)
    assert bench.mover.drop() == bench.mover.outcomes.over_budget == count
    assert bench.pool.runs.total == free
    bench.sound()


def test_neighbours_are_copied_as_one_piece() -> None:
    """Pieces that follow each other at both ends are merged, and each token goes where its move says."""
    bench = Bench()
    pool = bench.pool
    moves = [pool.begin_move(each.node, each.at, each.length, each.target) for each in bench.plan().moves[:6]]
    pieces = pieces_of(moves)
    wanted = {
        source: target
        for move in moves
        for source, target in zip(
            (
                s
                for i in range(0, len(move.source), 2)
                for s in range(move.source[i], sum(move.source[i : i + 2]))
            ),
            (
                s
                for i in range(0, len(move.target), 2)
                for s in range(move.target[i], sum(move.target[i : i + 2]))
            ),
            strict=True,
        )
    }
    assert {s + i: t + i for s, t, n in pieces for i in range(n)} == wanted
    for (s, t, n), (after, to, _) in pairwise(pieces):
        assert (s + n, t + n) != (after, to)
