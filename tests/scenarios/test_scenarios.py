"""Faults of systems like ours, by their number in the collection (see README.md beside this), tried on the core.

Each test carries the scenario's number and says first what must hold.  Where the tokens' places matter the test runs in
the judged world of the simulation: shadow states, twin and paint are compared after every act.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator

import pytest

from kvslot.allocator import (
    Admitted,
    BadRequest,
    EndedHandle,
    ForeignHandle,
    Later,
    Never,
    Pool,
    PoolConfig,
    Reason,
    Refusal,
    Session,
    Space,
    UnknownHandle,
    audit,
)
from kvslot.allocator.runs import FreeRuns
from kvslot.daemon.device.simulated import Schedule

from ..core.tools import (
    admit,
    cache,
    complete,
    fork,
    fresh,
    grown,
    later,
    make,
    root,
    slots,
    sound,
    step,
    toks,
)
from ..simulation.driver import Driver
from ..simulation.world import Engine, Seq, World, chain


def world(
    blocks: int = 9, block_size: int = 16, *, schedule: Schedule | None = None, **options: object
) -> World:
    options = {"watermark": 0.0, "quantum": 1, **options}
    config = PoolConfig(blocks=blocks, block_size=block_size, **options)  # type: ignore[arg-type]
    return World(config, schedule=schedule)


def start(w: World, engine: Engine, tokens: list[int]) -> Seq:
    answer = w.allocate(engine, w.root(), tokens)
    assert isinstance(answer, Seq), answer
    return answer


def write(w: World, seq: Seq, *, commit: bool = False) -> None:
    """Everything it has room for is written and completed, and maybe published."""
    w.submit(seq.engine, [(seq, 1 << 20)])
    w.settle(seq.engine)
    w.report(seq)
    if commit:
        w.commit(seq, seq.written)
    w.check()


def publish(w: World, engine: Engine, tokens: list[int]) -> None:
    """A prompt that is cached and held by nobody."""
    seq = start(w, engine, tokens)
    w.submit(engine, [(seq, len(tokens) - seq.cursor)])
    w.settle(engine)
    w.commit(seq, len(tokens))
    w.free(seq)
    w.check()


def a_node(pool: Pool) -> int:
    return next(node for node in pool.tree.live() if pool.tree.length[node])


def calls(act: Callable[[], object]) -> int:
    """How many calls, Python's and C's, an act makes: its cost, without a clock."""
    count = 0

    def hook(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(hook)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


# -- S01 to S22: references, reuse, copies ---------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["done", "never", "failed", "repeated"])
@pytest.mark.parametrize("leaving", ["free", "death"])
def test_S01_cancelled_while_a_copy_is_in_flight(ending: str, leaving: str) -> None:
    """What a copy may still touch is kept back only while it may, and freed once; late completions are counted."""
    schedule = Schedule(
        latency_min=1.0, latency_max=1.0, failures=float(ending == "failed"), never=float(ending == "never")
    )
    w = world(schedule=schedule)
    engine, other = w.engine(), w.engine()
    publish(w, engine, list(range(60)))
    handle = w.move(a_node(w.pool))
    reader = start(w, engine, list(range(61)))
    if leaving == "free":
        w.free(reader)
    else:
        w.lose(engine)
        w.pool.sweep()
        w.gone(engine)
        w.pool.sweep()
    w.check()
    w.advance(2.0)
    w.poll()
    if ending == "never":
        # Nothing but the copy's end frees its target; the daemon's deadline gives the move up, not the slots.
        w.pool.moves.abandon(handle)
        assert w.pool.statistics().moving == 60
        w.device.release()
        w.advance(0.0)
        w.poll()
    w.check()
    assert w.pool.statistics().moving == 0
    if ending == "repeated":
        assert not w.pool.moves.finish(handle)
        assert w.pool.statistics().late_completions == 1
    everything = start(w, other, [7] * w.pool.usable)
    write(w, everything)


def test_S03_twice_in_one_release() -> None:
    """A sequence is freed once: the second release is refused and changes nothing, and shared slots count holders."""
    pool = make(blocks=5)
    s = pool.open_session()
    a = admit(pool, s, fresh(4, 0))
    pool.wrote(s, a.sequence, 4)
    b = fork(pool, s, a.sequence, length=4)
    pool.free(s, a.sequence)
    free = pool.statistics().free
    for _ in range(3):
        with pytest.raises(EndedHandle):
            pool.free(s, a.sequence)
    assert pool.statistics().free == free
    pool.free(s, b.sequence)
    assert pool.statistics().free == pool.usable
    rng = random.Random(3)
    live: list[int] = []
    for i in range(2000):
        if live and rng.random() < 0.5:
            handle = rng.choice([*live, 1, 10**9, live[0]])
            try:
                pool.free(s, handle)
                live.remove(handle)
            except Refusal:
                assert handle not in live
        else:
            answer = pool.allocate(s, root(pool), fresh(rng.randint(1, 4), 10 * i))
            if isinstance(answer, Admitted):
                live.append(answer.sequence)
            else:
                pool.admission.withdraw(s, later(answer).ticket)
        sound(pool)


def test_S05_looked_up_then_evicted_before_it_was_claimed() -> None:
    """A look-up promises nothing: allocate finds what is there then, and never another's slots; 1,000 interleavings."""
    for seed in range(1000):
        rng = random.Random(seed)
        w = world(blocks=7, block_size=4)
        w.checks = False
        one, two = w.engine(), w.engine()
        prefix = list(range(12))
        publish(w, one, prefix)
        seen = w.pool.probe(w.root(), toks([*prefix, 99]))
        assert seen == 12
        acts: list[Callable[[], object]] = [
            lambda: w.allocate(one, w.root(), [*prefix, 99]),  # noqa: B023
            lambda: w.allocate(two, w.root(), [50 + i for i in range(20)]),  # noqa: B023
            lambda: w.pool.evict(rng.randrange(9)),  # noqa: B023
        ]
        rng.shuffle(acts)
        got = [act() for act in acts]
        for seq in [each for each in got if isinstance(each, Seq)]:
            w.submit(seq.engine, [(seq, 99)])
            w.settle(seq.engine)
        w.checks = True
        w.check()


@pytest.mark.parametrize("seed", range(20))
def test_S07_split_or_released_while_a_copy_runs(seed: int) -> None:
    """A split keeps holds on both parts; nothing in use is reused before the copy has ended; both parts still hit."""
    w = world(schedule=Schedule(latency_min=0.5, latency_max=2.0), blocks=12)
    rng = random.Random(seed)
    engine, other = w.engine(append="peel"), w.engine()
    publish(w, engine, list(range(64)))
    w.move(a_node(w.pool))
    publish(w, other, [*range(32), *range(500, 520)])
    w.pool.evict(rng.randrange(20))
    w.check()
    # The partial-slot copy: its source is let go while the copy waits in its step.
    a = start(w, engine, list(range(20)))
    write(w, a)
    child = w.fork(a, 20)
    w.extend(child, 4)
    w.submit(engine, [(child, 1)])
    w.free(a)
    w.pool.evict(999)
    filler = w.allocate(other, w.root(), [rng.randrange(9) for _ in range(30)])
    if isinstance(filler, Seq):
        write(w, filler)
    w.check()
    w.settle(engine)
    w.check()
    w.advance(3.0)
    w.poll()
    w.check()
    for prompt in (range(65), [*range(32), *range(500, 521)]):
        assert w.pool.probe(w.root(), toks(prompt)) == w.expected_hit(chain(w.root(), list(prompt)), 1)


@pytest.mark.parametrize("opaque", [False, True])
def test_S09_same_hash_different_tokens(opaque: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit is equality of tokens: under a constant hash, and for values whose Python hashes collide, others miss."""
    from kvslot.allocator import tree

    monkeypatch.setattr(tree, "hash", lambda key: 0, raising=False)
    monkeypatch.setattr(tree, "WIDE", 4)
    pool = make(blocks=60, block_size=16, opaque=opaque)
    s = pool.open_session()
    blocks = [
        [-1] * 16,
        [-2] * 16,
        [0] * 16,
        [2**31 - 1] * 16,
        [0] * 15 + [1],
        [1] + [0] * 15,
        [-1] * 15 + [-2],
        [7] * 16,
    ]
    for block in blocks:
        cache(pool, s, toks(block))
    for block in blocks:
        assert pool.probe(root(pool), toks([*block, 5])) == 16
    assert pool.probe(root(pool), toks([3] * 17)) == 0
    assert pool.probe(root(pool), toks([-2] * 15 + [-1] * 2)) == (0 if opaque else 15)
    assert pool.statistics().cached == (16 * 8 if opaque else 16 * 8 - 15 - 15)
    sound(pool)


def test_S11_offered_before_it_was_filled() -> None:
    """Only committed ranges are found; a writer that dies before its commit leaves nothing to find."""
    pool = make(blocks=12, block_size=16)
    s, other = pool.open_session(), pool.open_session()
    prompt = fresh(40, 0)
    a = admit(pool, s, prompt)
    assert pool.probe(root(pool), prompt) == 0
    pool.commit(s, a.sequence, 20)
    assert pool.probe(root(pool), prompt) == 20
    b = admit(pool, other, prompt)
    assert b.hit == 20
    pool.commit(other, b.sequence, 40)
    pool.commit(s, a.sequence, 40)
    assert pool.probe(root(pool), prompt) == 39
    assert pool.statistics().cached == 40
    dying = pool.open_session()
    admit(pool, dying, fresh(40, 1000))
    pool.lose(dying)
    pool.sweep()
    pool.gone(dying)
    pool.sweep()
    assert pool.probe(root(pool), fresh(40, 1000)) == 0
    for session, sequence in ((s, a), (other, b)):
        pool.free(session, sequence.sequence)
    assert pool.statistics().duplicate_tokens == 0
    sound(pool)


@pytest.mark.parametrize(("length", "copies"), [(20, 2), (16, 0), (17, 2)])
def test_S13_fork_then_append(length: int, copies: int) -> None:
    """Of three forks two copy their partial tail, the one with room writes in place; full slots are never copied."""
    for appends, frees in itertools.product(
        itertools.permutations(range(3)), itertools.permutations(range(3))
    ):
        w = world(append="peel", quantum=4)
        engine = w.engine()
        first = start(w, engine, list(range(length)))
        w.submit(engine, [(first, length)])
        w.settle(engine)
        w.report(first, length)
        seqs = [first, w.fork(first, length), w.fork(first, length)]
        blocker = start(w, engine, [900]) if first.table[-1] + 1 in w.pool.runs.length_at else None
        before = w.pool.statistics().copied_tokens
        for index in appends:
            seq = seqs[index]
            if seq.capacity == length:
                w.extend(seq, 2)
            seq.tokens.append(100 + index)
            seq.values[:] = chain(w.root(), seq.tokens)
            w.submit(engine, [(seq, 1)])
        w.settle(engine)
        w.check()
        copied = w.pool.statistics().copied_tokens - before
        assert copied == copies * (length % 16)
        assert len({seq.table[length] for seq in seqs}) == 3
        for index in frees:
            w.free(seqs[index])
            w.check()
        if blocker is not None:
            w.free(blocker)
        assert w.pool.statistics().free == w.pool.usable


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 31, 32, 33])
def test_S15_everything_cached_leaves_one_token(n: int) -> None:
    """However much is cached, one token is left to compute, and computing it again makes no second node."""
    pool = make(blocks=12, block_size=16)
    s = pool.open_session()
    cache(pool, s, fresh(n, 0))
    nodes, cached = pool.statistics().nodes, pool.statistics().cached
    for _ in range(20):
        a = admit(pool, s, fresh(n, 0))
        assert a.hit == n - 1
        pool.commit(s, a.sequence, n)
        pool.free(s, a.sequence)
        assert pool.statistics().cached == cached
        assert pool.statistics().nodes <= nodes + 1
        sound(pool)


def test_S15_long_and_often() -> None:
    """7,681 tokens at block 64 twice, and one prompt a thousand times: always n - 1, never a second copy kept."""
    pool = Pool(PoolConfig(blocks=300, block_size=64))
    s = pool.open_session()
    for expected in (0, 7680):
        a = admit(pool, s, fresh(7681, 0))
        assert a.hit == expected
        pool.commit(s, a.sequence, 7681)
        pool.free(s, a.sequence)
    for _ in range(1000):
        a = admit(pool, s, fresh(100, 0))
        assert a.hit == 99
        pool.commit(s, a.sequence, 100)
        pool.free(s, a.sequence)
    assert pool.statistics().cached == 7681
    sound(pool)


def test_S17_victims_that_cannot_give_memory_back_now() -> None:
    """Only memory that can be handed out counts: what is fenced is waited for, and nobody is evicted in vain."""
    pool = make(blocks=11, block_size=16)
    s = pool.open_session()
    held = []
    for i in range(5):
        a = admit(pool, s, fresh(32, 100 * i))
        pool.commit(s, a.sequence, 32)
        held.append(a)
    fence = step(pool, s)
    for a in held[:4]:
        pool.free(s, a.sequence, fence=fence)
    pool.free(s, held[4].sequence)
    first = admit(pool, s, fresh(32, 5000))
    assert pool.evicted_tokens == 32
    refused = later(pool.allocate(s, root(pool), fresh(64, 6000)))
    assert pool.evicted_tokens == 32
    assert all(pool.probe(root(pool), fresh(33, 100 * i)) == 32 for i in range(4))
    complete(pool, s)
    assert isinstance(pool.allocate(s, root(pool), fresh(64, 6000), ticket=refused.ticket), Admitted)
    assert pool.evicted_tokens == 96
    pool.free(s, first.sequence)
    sound(pool)


@pytest.mark.parametrize("case", ["late", "never", "killed"])
def test_S19_a_table_captured_before_the_move(case: str) -> None:
    """While a table names a place it is not reused; a holder that never lets go stops that move, nothing else."""
    w = world(blocks=9, schedule=Schedule(latency_min=1.0, latency_max=1.0))
    one, two = w.engine(), w.engine()
    publish(w, one, list(range(40)))
    handle = w.move(a_node(w.pool))
    reader = start(w, one, list(range(41)))
    w.submit(one, [(reader, 1)])
    old = reader.table[:40]
    w.advance(2.0)
    assert not w.finish(handle, True)
    assert w.pool.moves.abandoned == 1
    w.check()
    filler = w.allocate(two, w.root(), [5] * w.pool.runs.total)
    assert isinstance(filler, Seq)
    assert not set(filler.table) & set(old)
    write(w, filler)
    if case == "late":
        w.settle(one)
        w.free(reader)
    elif case == "killed":
        w.lose(one)
        w.pool.sweep()
        w.check()
        assert not w.movable()
        w.gone(one)
        while not w.pool.sweep(1):
            pass
    w.free(filler)
    w.check()
    if case == "never":
        assert not w.movable()
    else:
        w.move(w.movable()[0])
        w.advance(2.0)
        w.poll()
        assert w.pool.moves.published == 1
    w.check()


def test_S22_no_copy_into_what_is_still_read() -> None:
    """A copy's target is never fenced memory, whatever the order of frees, moves and completions."""
    for seed in range(300):
        rng = random.Random(seed)
        w = world(blocks=8, block_size=8, schedule=Schedule(latency_max=1.0))
        one, two = w.engine(), w.engine()
        publish(w, one, [rng.randrange(5) for _ in range(12)])
        readers = [w.allocate(two, w.root(), [100 + i, *range(8)]) for i in range(3)]
        w.submit(two, [(seq, 9) for seq in readers if isinstance(seq, Seq)])
        for seq in readers:
            if isinstance(seq, Seq):
                w.free(seq)
                nodes = w.movable()
                if nodes:
                    w.move(nodes[0])
                    fenced = {s for guard in two.guards for s in guard.slots}
                    assert not fenced & {s for _, target in w.move_slots.values() for s in target}
                    w.advance(rng.random())
                    w.poll()
                w.check()
        w.settle(two)
        w.check()


# -- S31 to S55 ------------------------------------------------------------------------------------------------------


def dying_steps(pool: Pool, s: Session) -> Iterator[None]:
    """A session's life, one act at a time."""
    a = admit(pool, s, fresh(20, 0))
    yield
    pool.wrote(s, a.sequence, 10)
    yield
    pool.commit(s, a.sequence, 10)
    yield
    pool.extend(s, a.sequence, tokens=3)
    yield
    pool.wrote(s, a.sequence, 23)
    child = fork(pool, s, a.sequence)
    yield
    pool.extend(s, child.sequence, tokens=2)
    yield
    pool.trim(s, child.sequence, keep_to=5)
    yield
    pool.pin(s, root(pool), fresh(10, 0))
    yield
    pool.free(s, a.sequence, fence=step(pool, s))
    yield
    later(pool.allocate(s, root(pool), fresh(pool.usable, 800)))
    yield


@pytest.mark.parametrize("alive", range(11))
def test_S31_killed_after_any_step(alive: int) -> None:
    """Whatever a session had begun goes with it; others of the same prompt are never blocked, before or after."""
    pool = make(blocks=12, block_size=16)
    dying, s = pool.open_session(append="peel"), pool.open_session()
    for _ in itertools.islice(dying_steps(pool, dying), alive):
        sound(pool)
    pool.lose(dying)
    sound(pool)
    a = admit(pool, s, fresh(20, 0))
    pool.commit(s, a.sequence, 20)
    pool.sweep()
    sound(pool)
    pool.gone(dying)
    while not pool.sweep(1):
        sound(pool)
    assert pool.probe(root(pool), fresh(21, 0)) == 20
    pool.free(s, a.sequence)
    pool.bye(s)
    sound(pool)
    assert pool.statistics().leased == pool.statistics().pinned == pool.statistics().private == 0


def test_S33_cleaning_up_after_the_dead_costs_what_they_held() -> None:
    """Clean-up is sliced and costs what the dead session held, whatever else there is; others go on between slices."""
    costs = []
    for others in (100, 10_000):
        pool = Pool(PoolConfig(blocks=others + 200, block_size=16))
        s, dead = pool.open_session(), pool.open_session()
        for i in range(others):
            cache(pool, s, toks([i, 1, 2, 3, 4, 5, 6, 7]))
        for i in range(10):
            a = admit(pool, dead, toks([10**6 + i, 1, 2, 3]))
            pool.commit(dead, a.sequence, 4)
        cost = calls(functools.partial(pool.lose, dead)) + calls(pool.sweep)
        cost += calls(functools.partial(pool.gone, dead)) + calls(pool.sweep)
        assert not dead.sequences
        costs.append(cost)
    assert costs[1] < 2 * costs[0]
    pool = Pool(PoolConfig(blocks=3000, block_size=16))
    s, dead = pool.open_session(), pool.open_session()
    for i in range(1000):
        admit(pool, dead, toks([i, 1, 2, 3]))
    pool.lose(dead)
    pool.sweep()
    pool.gone(dead)
    slices = 0
    while dead.sequences:
        before = len(dead.sequences)
        pool.sweep(7)
        assert before - len(dead.sequences) <= 7
        assert isinstance(pool.allocate(s, root(pool), toks([slices, 9])), Admitted)
        assert pool.open_session().page == 1
        slices += 1
    assert slices >= 1000 // 7
    sound(pool)


@pytest.mark.parametrize("seed", range(10))
def test_S39_no_gauge_is_ever_negative(seed: int) -> None:
    """At every moment the states sum to the pool, no gauge is negative, and no total falls."""
    driver = Driver(seed, steps=150)
    pool = driver.world.pool
    totals = (
        "evicted_tokens",
        "copied_tokens",
        "moved_tokens",
        "hit_tokens",
        "prompt_tokens",
        "bad_handles",
        "late_completions",
    )
    before = dict.fromkeys(totals, 0)
    check = driver.world.check

    def scrape() -> None:
        check()
        now = pool.statistics()
        states = (now.free, now.private, now.cached, now.fenced, now.moving, now.reserved, now.quarantined)
        assert sum(states) == now.usable
        assert min(states) >= 0
        assert (
            min(now.tokens_held, now.unwritten, now.evictable, now.leased, now.pinned, now.blocks_free) >= 0
        )
        assert 0 <= now.internal_fragmentation <= 1
        assert now.evictable + now.leased == now.cached
        for name in totals:
            assert getattr(now, name) >= before[name]
            before[name] = getattr(now, name)

    driver.world.check = scrape  # type: ignore[method-assign]
    driver.run()


def test_S44_namespaces_are_structures() -> None:
    """Adapter and salt never run into each other: of eight namespaces each finds its own tokens and nobody else's."""
    pool = make(blocks=80, block_size=16)
    s = pool.open_session()
    spaces = [
        Space(salt="X"), Space(adapter="X"), Space(salt="X", adapter="X"), Space(salt="ab", adapter="c"),
        Space(salt="a", adapter="bc"), Space(adapter="x"), Space(salt="x"), Space(),
    ]  # fmt: skip
    prompt = fresh(32, 0)
    found = []
    for space in spaces:
        here = pool.open_space(space)
        found.append([pool.probe(pool.open_space(other), prompt) for other in spaces])
        a = pool.allocate(s, here, prompt)
        assert isinstance(a, Admitted)
        assert a.hit == 0
        pool.commit(s, a.sequence, 32)
        pool.free(s, a.sequence)
        assert pool.open_space(Space(space.tenant, space.model, space.adapter, space.salt)) == here
    for i, row in enumerate(found):
        assert row == [31 if j < i else 0 for j in range(8)]
    assert [pool.probe(pool.open_space(space), prompt) for space in spaces] == [31] * 8
    assert len({pool.open_space(space) for space in spaces}) == 8
    sound(pool)


def test_S47_days_of_churn() -> None:
    """Over days of changing sizes and tenants waste stays bounded, and nothing is refused while memory is there."""
    rng = random.Random(47)
    pool = Pool(PoolConfig(blocks=600, block_size=16, watermark=0.0))
    sessions = [pool.open_session() for _ in range(4)]
    roots = [pool.open_space(Space(f"tenant{i}")) for i in range(20)]
    running: list[tuple[Session, int, int]] = []
    worst = []
    for day in range(6):
        for i in range(4000):
            night = i > 2500
            while running and (len(running) > (4 if night else 24) or rng.random() < 0.3):
                s, handle, n = running.pop(rng.randrange(len(running)))
                pool.commit(s, handle, n)
                pool.free(s, handle)
            n = rng.choice((1, 3, 7, 15) if rng.random() < 0.7 else (40, 90, 200 - 20 * day))
            s, space = rng.choice(sessions), rng.choice(roots)
            tokens = toks([rng.randrange(4), *(rng.randrange(1000) for _ in range(n - 1))])
            answer = pool.allocate(s, space, tokens, now=day * 86400.0 + i)
            statistics = pool.statistics() if isinstance(answer, Later) else None
            assert statistics is None or statistics.free + statistics.evictable < n, (
                "refused though memory was there"
            )
            if isinstance(answer, Admitted):
                running.append((s, answer.sequence, n))
            elif isinstance(answer, Later):
                pool.admission.withdraw(s, answer.ticket)
        statistics = pool.statistics()
        used = pool.usable - 16 * statistics.blocks_free
        worst.append((used - statistics.tokens_held - statistics.unwritten) / used)
        sound(pool)
    assert max(worst) < 0.06, worst
    assert worst[-1] < 1.5 * max(worst[0], 0.02), worst


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("watermark", [0.0, 0.01, 0.05])
def test_S49_one_number_is_usable(block_size: int, watermark: float) -> None:
    """On an empty pool what is usable is OK and one more is NEVER; what is reported is the largest OK request."""
    for blocks in range(3, 21):
        for opaque in (False, True):
            pool = make(blocks=blocks, block_size=block_size, watermark=watermark, opaque=opaque)
            usable = pool.statistics().usable
            assert usable == (blocks - (1 if block_size > 1 else 2)) * block_size
            for n in {
                usable - block_size,
                usable - 1,
                usable,
                usable + 1,
                blocks * block_size,
                usable + block_size,
            }:
                if n < 1:
                    continue
                s = pool.open_session()
                answer = pool.allocate(s, root(pool), fresh(n, 0))
                assert isinstance(answer, Admitted if n <= usable else Never), (blocks, n, answer)
                pool.bye(s)
            sound(pool)


def test_S51_empty_prompts() -> None:
    """No tokens is a bad request for that call alone; nothing with an empty key comes to be."""
    pool = make()
    s = pool.open_session()
    a = admit(pool, s, fresh(5, 0))
    before = pool.statistics()
    for verb in (
        lambda: pool.probe(root(pool), b""),
        lambda: pool.allocate(s, root(pool), b""),
        lambda: pool.pin(s, root(pool), b""),
        lambda: pool.fork(s, a.sequence),
        lambda: pool.trim(s, a.sequence, keep_to=0),
        lambda: pool.extend(s, a.sequence, tokens=-1),
    ):
        with pytest.raises(BadRequest):
            verb()
    assert pool.commit(s, a.sequence, 0).published == 0
    assert pool.evict(0) == 0
    assert pool.statistics() == before
    pool.commit(s, a.sequence, 5)
    sound(pool)


def test_S53_never_and_not_later() -> None:
    """Above the usable NEVER at once; up to it LATER while busy; growth over the edge is NEVER for itself alone."""
    pool = make(blocks=64, block_size=16)
    s, other = pool.open_session(), pool.open_session()
    usable = pool.usable
    assert usable == 63 * 16
    assert pool.allocate(s, root(pool), fresh(64 * 16, 0)) == Never(64 * 16, usable)
    small = admit(pool, other, fresh(16, 9000))
    assert isinstance(pool.allocate(s, root(pool), fresh(64 * 16, 0)), Never)
    waiting = later(pool.allocate(s, root(pool), fresh(usable, 0)))
    pool.free(other, small.sequence)
    a = pool.allocate(s, root(pool), fresh(usable, 0), ticket=waiting.ticket)
    assert isinstance(a, Admitted)
    before = pool.table(s, a.sequence)
    assert isinstance(pool.extend(s, a.sequence, tokens=1), Never)
    assert pool.table(s, a.sequence) == before
    pool.free(s, a.sequence)
    assert isinstance(pool.allocate(s, root(pool), fresh(60 * 16, 50000)), Admitted)
    sound(pool)


@pytest.mark.parametrize("seed", range(10))
def test_S55_moves_stopped_at_any_moment(seed: int) -> None:
    """Moves can be begun, given up, failed and begun again at any moment, and leave no state and no hold behind."""
    rng = random.Random(seed)
    w = world(blocks=10, block_size=8, schedule=Schedule(latency_max=0.5, failures=0.2))
    engine = w.engine()
    for _ in range(100):
        roll = rng.random()
        if roll < 0.3 and w.movable():
            try:
                w.move(rng.choice(w.movable()))
            except Refusal:
                assert len(w.moves) > 0 or w.pool.runs.total < 64
        elif roll < 0.45:
            for handle in list(w.moves):
                w.pool.moves.abandon(handle)
            assert not any(w.pool.tree.flags[n] & 1 for n in w.pool.tree.live())
        elif roll < 0.7:
            answer = w.allocate(engine, w.root(), [rng.randrange(3) for _ in range(rng.randint(1, 20))])
            if isinstance(answer, Seq):
                w.submit(engine, [(answer, 99)])
                w.settle(engine)
                w.commit(answer, answer.written)
                w.free(answer)
            elif isinstance(answer, Later):
                w.pool.admission.withdraw(engine.session, answer.ticket)
        elif roll < 0.8:
            w.pool.evict(rng.randrange(10))
        w.advance(rng.random() / 5)
        w.poll()
        w.check()
    for handle in list(w.moves):
        w.pool.moves.abandon(handle)
    w.device.settle()
    w.poll()
    assert w.pool.statistics().moving == 0
    assert w.pool.statistics().leased == 0
    w.check()


# -- S67, S69 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [5_000, 50_000])
def test_S67_a_deep_chain(depth: int) -> None:
    """No act's stack grows with the tree's depth: a chain grown by tokens is found, counted, audited and evicted."""
    assert sys.getrecursionlimit() <= 10_000
    pool = Pool(PoolConfig(blocks=depth // 16 + 20, block_size=16, quantum=16, watermark=0.0))
    s = pool.open_session()
    a = admit(pool, s, toks([0]))
    pool.commit(s, a.sequence, 1)
    capacity, length = a.capacity, 1
    while length < depth:
        if length == capacity:
            capacity = grown(pool.extend(s, a.sequence)).capacity
        length += 1
        pool.commit(s, a.sequence, length, toks([length & 3]))
    assert pool.statistics().nodes >= depth
    prompt = toks([0, *(i & 3 for i in range(2, depth + 1)), 7])
    assert pool.probe(root(pool), prompt) == depth
    b = admit(pool, s, prompt)
    assert b.hit == depth
    assert len(slots(pool.table(s, a.sequence))) == capacity
    pool.pin(s, root(pool), prompt[: 4 * 100])
    pool.free(s, b.sequence)
    sound(pool)
    pool.bye(s)
    assert pool.evict(pool.usable) == depth
    assert pool.statistics().free == pool.usable
    sound(pool)


def test_S69_the_same_id_twice() -> None:
    """A handle is given out once; what ended cannot be meant again, also while something of it is still in flight."""
    pool = make()
    s, other = pool.open_session(), pool.open_session()
    seen: set[int] = set()
    for i in range(50):
        a = admit(pool, s, fresh(4, 0))
        assert a.sequence not in seen
        seen.add(a.sequence)
        pool.free(s, a.sequence, fence=step(pool, s))
        with pytest.raises(EndedHandle):
            pool.commit(s, a.sequence, 4)
        if i % 3 == 0:
            complete(pool, s)
    for handle in (0, 2**63, -1):
        with pytest.raises(UnknownHandle):
            pool.free(s, handle)
    b = admit(pool, other, fresh(4, 0))
    with pytest.raises(ForeignHandle):
        pool.free(s, b.sequence)
    complete(pool, s)
    sound(pool)


# -- P: latent faults of the two published prototypes ----------------------------------------------------------------


def test_P01_a_hole_in_the_middle() -> None:
    """After a middle piece was freed a new one gets slots that nobody holds."""
    pool = make(blocks=2, block_size=16)
    s = pool.open_session()
    a, b, c = (admit(pool, s, fresh(4, 100 * i), contiguous=True) for i in range(3))
    pool.free(s, b.sequence)
    d = admit(pool, s, fresh(4, 900), contiguous=True)
    held = [set(slots(each.extents)) for each in (a, c, d)]
    assert len(set().union(*held)) == 12
    for seed in range(50):
        rng = random.Random(seed)
        w = world(blocks=6, block_size=16)
        engine = w.engine()
        for i in range(60):
            if engine.seqs and rng.random() < 0.45:
                w.free(rng.choice(list(engine.seqs.values())))
            else:
                answer = w.allocate(
                    engine, w.root(), [i, *(rng.randrange(3) for _ in range(rng.randrange(16)))]
                )
                if isinstance(answer, Seq):
                    w.submit(engine, [(answer, 99)])
                    w.settle(engine)
                elif isinstance(answer, Later):
                    w.pool.admission.withdraw(engine.session, answer.ticket)
        w.check()


def test_P03_an_emptied_block_is_in_one_list_only() -> None:
    """A block that was shared and emptied is handed out once."""
    pool = make(blocks=3, block_size=16)
    s = pool.open_session()
    for i in range(2):
        a, b = admit(pool, s, fresh(8, 0), contiguous=True), admit(pool, s, fresh(8, 100), contiguous=True)
        pool.free(s, (a, b)[i].sequence)
        pool.free(s, (b, a)[i].sequence)
        sound(pool)
    got: list[set[int]] = []
    for n in (8, 8, 16):
        got.append(set(slots(admit(pool, s, fresh(n, 1000 * (len(got) + 1)), contiguous=True).extents)))
        sound(pool)
    assert len(set().union(*got)) == 32
    assert isinstance(pool.allocate(s, root(pool), fresh(16, 9000)), Later)


def churn(runs: FreeRuns) -> None:
    for _ in range(200):
        start, length = runs.take(16)
        runs.give(start, length)


def test_P07_a_block_costs_the_same_in_any_pool() -> None:
    """Taking and giving back a block makes no more calls in a pool of 10^5 blocks than in one of 10^3, within 2."""
    costs = []
    for blocks in (1_000, 100_000):
        pool = Pool(PoolConfig(blocks=blocks, block_size=16))
        runs = pool.runs
        taken = [runs.take(16) for _ in range(900)]
        costs.append(calls(lambda: churn(runs)))  # noqa: B023
        for start_, length in taken:
            runs.give(start_, length)
        assert audit(pool) == []
    assert costs[1] < 2 * costs[0]


def test_P08_free_of_an_unknown_node() -> None:
    """Wrong, repeated and foreign releases have their own answers, are counted, and change nothing."""
    pool = make()
    s, other = pool.open_session(), pool.open_session()
    a, b = admit(pool, s, fresh(4, 0)), admit(pool, other, fresh(4, 100))
    pool.free(s, a.sequence)
    before = pool.statistics()
    for handle, kind in (
        (a.sequence, EndedHandle),
        (b.sequence, ForeignHandle),
        (777, UnknownHandle),
        (0, UnknownHandle),
    ):
        with pytest.raises(kind):
            pool.free(s, handle)
    after = pool.statistics()
    assert after.bad_handles == before.bad_handles + 4
    assert (after.free, after.private, after.sequences) == (before.free, before.private, before.sequences)
    sound(pool)


def test_P09_nothing_is_freed_below_zero() -> None:
    """A second release of the same block is refused, and two allocations after it get two blocks."""
    pool = make(blocks=5, block_size=4)
    s = pool.open_session()
    a = admit(pool, s, fresh(4, 0))
    pool.free(s, a.sequence)
    with pytest.raises(EndedHandle):
        pool.free(s, a.sequence)
    assert pool.statistics().free == 16
    b, c = admit(pool, s, fresh(4, 0)), admit(pool, s, fresh(4, 100))
    assert not set(slots(b.extents)) & set(slots(c.extents))
    assert later(pool.allocate(s, root(pool), fresh(16, 900))).reason in (Reason.MEMORY, Reason.TURN)
    sound(pool)
