"""What each eviction policy is for, what it costs, and what bounds it; and that the tree tells it what it promises."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvslot.allocator import Admitted, BadRequest, Forked, Grown, Pool, PoolConfig, Session, Space, audit
from kvslot.allocator.eviction import EVICTIONS, POLICIES, Gaps, Ghosts, Lru, S3Fifo, make
from kvslot.allocator.eviction.gaps import BINS, PRIOR, worths

from .twins import GhostsTwin, worths_of


def text(*tokens: int) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


# --- In the pool ---------------------------------------------------------------------------------------------------


def life(pool: Pool, draw: random.Random, steps: int) -> None:
    """Sequences of two sessions come, grow, publish, fork, roll back and end; priorities now and then."""
    root = pool.open_space(Space())
    sessions = [pool.open_session(), pool.open_session()]
    live: list[tuple[Session, int, list[int]]] = []
    for step in range(steps):
        now = step / 100
        act = draw.random()
        if act < 0.4 or not live:
            session = draw.choice(sessions)
            like = draw.choice(
                ([1] * 40, [1, 2] * 20, [1, 1, 2, 3] * 10, [draw.randint(1, 3) for _ in range(40)])
            )
            tokens = like[: draw.randint(1, 24)]
            answer = pool.allocate(
                session, root, text(*tokens), now=now, priority=draw.choice((0, 0, 0, 0, 2))
            )
            if isinstance(answer, Admitted):
                live.append((session, answer.sequence, tokens))
        else:
            session, handle, tokens = draw.choice(live)
            sequence = pool.sequences[handle]
            told = sequence.tokens_from + len(sequence.tokens) // 4
            if act < 0.6:
                pool.free(session, handle, now=now)
                live.remove((session, handle, tokens))
            elif act < 0.8:
                pool.commit(session, handle, len(tokens), text(*tokens[told:]))
            elif act < 0.9:
                grown = pool.extend(session, handle, now=now)
                if isinstance(grown, Grown):
                    tokens += [draw.randint(1, 3) for _ in range(min(grown.capacity - len(tokens), 5))]
                    pool.wrote(session, handle, len(tokens))
            elif act < 0.95 and sequence.written + sequence.base:
                forked = pool.fork(session, handle)
                assert isinstance(forked, Forked)
                live.append((session, forked.sequence, tokens[: forked.length]))
            else:
                del tokens[draw.randint(1, len(tokens)) :]
                pool.trim(session, handle, keep_to=len(tokens), now=now)
        assert audit(pool) == [], step
    for session in sessions:
        pool.bye(session)
    assert audit(pool) == []
    pool.evict(pool.usable)
    assert audit(pool) == []
    assert pool.tree.tokens == 0


@pytest.mark.parametrize("options", [{"block_size": 4}, {"block_size": 1}, {"block_size": 4, "opaque": True}])
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_the_audit_agrees_after_every_step(eviction: str, options: dict[str, Any]) -> None:
    """Whatever happens in a pool, exactly the leaves that nobody holds are queued, and all of them can be evicted."""
    for seed in range(12):
        blocks = 12 if options["block_size"] > 1 else 40
        life(Pool(PoolConfig(blocks=blocks, eviction=eviction, **options)), random.Random(seed), 150)


class Deaf(Lru):
    """An Lru that must not be told any history."""

    __slots__ = ()

    def _told(self, *_: object) -> Any:
        raise AssertionError("told, and does not learn")

    reuse = created = branched = ended = trimmed = forget = _told  # type: ignore[assignment]


def test_a_policy_that_does_not_learn_is_told_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default pays for no call that it would only ignore."""
    monkeypatch.setitem(POLICIES, "lru", Deaf)
    life(Pool(PoolConfig(blocks=12, block_size=4)), random.Random(1), 400)


class Listener(Gaps):
    """A Gaps that keeps what it was told."""

    __slots__ = ("told",)

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        super().__init__()

    def reuse(self, node: int, whole: bool, ghost: int) -> int:
        self.told.append(("reuse", ghost))
        return super().reuse(node, whole, ghost)

    def trimmed(self, node: int, length: int, ghost: int) -> None:
        self.told.append(("cut", ghost))
        super().trimmed(node, length, ghost)

    def forget(self, node: int, parent: int, ghost: int) -> None:
        self.told.append(("cut", ghost))
        super().forget(node, parent, ghost)


def listening(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Pool, Listener, Session, int]:
    monkeypatch.setitem(POLICIES, "gaps", Listener)
    pool = Pool(PoolConfig(blocks=80, block_size=4, eviction="gaps", **options))
    assert isinstance(pool.evictor, Listener)
    return pool, pool.evictor, pool.open_session(), pool.open_space(Space())


def turn(pool: Pool, session: Session, root: int, prompt: bytes, answer: bytes = b"") -> Admitted:
    admitted = pool.allocate(session, root, prompt)
    assert isinstance(admitted, Admitted)
    pool.commit(session, admitted.sequence, len(prompt) // 4)
    length = (len(prompt) + len(answer)) // 4
    while pool.sequences[admitted.sequence].capacity < length:
        assert isinstance(pool.extend(session, admitted.sequence), Grown)
    pool.commit(session, admitted.sequence, length, answer)
    pool.free(session, admitted.sequence)
    return admitted


@pytest.mark.parametrize("cut", [3, 20, 25, 60])
@pytest.mark.parametrize("opaque", [False, True])
def test_a_later_turn_stops_at_the_very_place_that_was_cut(
    monkeypatch: pytest.MonkeyPatch, cut: int, opaque: bool
) -> None:
    """An eviction and the look-up that misses what it took make the same place of it, in an answer or a prompt."""
    pool, listener, session, root = listening(monkeypatch, opaque=opaque)
    prompt, answer = text(*range(100, 140)), text(*range(200, 220))
    turn(pool, session, root, prompt, answer)
    pool.evict(cut)
    places = {place for what, place in listener.told if what == "cut"}
    listener.told.clear()
    turn(pool, session, root, prompt + answer + text(*range(300, 310)))
    assert listener.told[0][0] == "reuse"
    assert listener.told[0][1] in places


def test_a_prompt_that_goes_on_differently_stops_at_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a hit ends within a node, or with the prompt, nothing was cut."""
    pool, listener, session, root = listening(monkeypatch)
    prompt = text(*range(100, 140))
    turn(pool, session, root, prompt)
    listener.told.clear()
    turn(pool, session, root, prompt)
    turn(pool, session, root, prompt[:80] + text(1, 2, 3))
    assert [told for told in listener.told if told[0] == "reuse"] == [("reuse", 0)] * 2


# --- What each is for ------------------------------------------------------------------------------------------------


def hits(eviction: str, prompts: list[bytes], slots: int) -> list[int]:
    """Tokens found cached, per prompt, when each is computed, answered with one token and ended before the next."""
    pool = Pool(
        PoolConfig(blocks=slots // 4 + 1, block_size=4, eviction=eviction, watermark=0.0, headroom=0.0)
    )
    root, session = pool.open_space(Space()), pool.open_session()
    return [turn(pool, session, root, prompt).hit for prompt in prompts]


def prompt_of(number: int, length: int = 32) -> bytes:
    return text(*range(1000 * number, 1000 * number + length))


def test_gaps_keeps_a_part_of_a_loop_that_does_not_fit() -> None:
    """Of 40 prompts in turn in a pool for 30, LRU finds none; once the length of the loop is known, gaps finds most."""
    prompts = [prompt_of(1 + i % 40) for i in range(2000)]
    assert sum(hits("lru", prompts, 30 * 32)) == 0
    late = hits("gaps", prompts, 30 * 32)[1000:]
    assert sum(late) > 0.55 * 31 * len(late)


def test_gaps_is_lru_while_nothing_is_known() -> None:
    """Before any gap was seen the oldest goes first, so that a cold cache does what everybody expects."""
    policy = Gaps()
    policy.resize(64)
    for node in range(1, 60):
        policy.reuse(0, False, 0)
        policy.created(node, 0, 0, False)
        policy.ended(node)
        policy.add(node, 8)
    for node in range(1, 60):
        assert policy.oldest() == node
        policy.forget(node, 0, node)
        policy.discard(node)


def test_gaps_lets_sessions_go_that_are_over() -> None:
    """Where all gaps are short, a leaf that is older than any of them goes before one in the midst of its session."""
    rng = random.Random(3)
    prompts: list[bytes] = []
    for start in range(1, 300):
        prompts += [prompt_of(start, 16 * k) for k in (1, 2, 3)] + [prompt_of(1000 + rng.randrange(5000), 16)]
    assert sum(hits("gaps", prompts, 256)) >= sum(hits("lru", prompts, 256))


def test_s3fifo_does_not_let_a_scan_push_out_what_is_used() -> None:
    """Prompts that come again and again survive twice a pool of prompts that come once; under LRU they do not."""
    often = [prompt_of(1 + i % 8) for i in range(64)]
    scan = [prompt_of(100 + i) for i in range(60)]
    assert sum(hits("s3fifo", often + scan + often[:8], 30 * 32)[-8:]) == 8 * 31
    assert sum(hits("lru", often + scan + often[:8], 30 * 32)[-8:]) == 0


def test_s3fifo_takes_what_it_evicted_too_early_into_main() -> None:
    """A tail that was evicted from small and asked for again has a ghost, and its session's next leaf lives in main."""
    policy = S3Fifo()
    policy.resize(8)
    policy.created(1, 0, 0, False)
    policy.add(1, 4)
    assert policy.oldest() == 1
    policy.forget(1, 0, 77)
    policy.discard(1)
    past = policy.reuse(0, False, 77)
    policy.created(2, 0, past, False)
    policy.created(3, 0, policy.reuse(0, False, 0), False)
    policy.add(2, 4)
    policy.add(3, 4)
    assert policy.victims(8) == [3, 2]


def test_s3fifo_counts_a_queued_leaf_without_what_was_split_off() -> None:
    """A new leaf of 20 tokens is more than a tenth beside 100 in main; with its first 15 split off it is not."""
    policy = S3Fifo()
    policy.resize(8)
    policy.created(1, 0, 4, False)
    policy.created(2, 0, 0, False)
    policy.add(1, 100)
    policy.add(2, 20)
    assert policy.oldest() == 2
    policy.split(3, 2, 15)
    assert policy.oldest() == 1


def test_gaps_follows_a_session_up_its_path_as_it_is_cut() -> None:
    """The place of the latest cut knows the session, however many of its nodes went before."""
    policy = Gaps()
    policy.resize(8)
    policy.created(1, 0, 0, False)
    policy.created(2, 1, 0, True)
    policy.ended(2)
    policy.add(2, 4)
    policy.forget(2, 1, 71)
    policy.discard(2)
    policy.exposed(1, 4, False)
    policy.forget(1, 0, 72)
    policy.discard(1)
    assert policy.reuse(0, False, 72) == 1
    assert policy.reuse(0, False, 72) == 0


def test_an_unknown_policy_is_refused_by_name() -> None:
    """The message says what there is."""
    with pytest.raises(BadRequest, match="lru"):
        make("mru")


# --- Bounds --------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 6), st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(0, 99)), max_size=80)
)
def test_ghosts_are_their_naive_twin_and_never_more_than_they_may_be(
    most: int, calls: list[tuple[bool, int, int]]
) -> None:
    """Whatever is remembered and recalled, answers are a plain list's, and the table never outgrows its bound."""
    real, twin = Ghosts(most), GhostsTwin(most)
    for remember, place, value in calls:
        if remember:
            real.remember(place, value)
            twin.remember(place, value)
        else:
            assert real.recall(place) == twin.recall(place)
        assert len(real) == sum(entry is not None for entry in twin.ring) <= most


@pytest.mark.parametrize("policy", [S3Fifo, Gaps])
def test_a_policy_takes_no_more_memory_however_long_it_runs(policy: Any) -> None:
    """After ten times as many evictions as there are ghosts its size is what it was when the ghosts were full."""
    evictor = policy(ghosts=50)
    evictor.resize(4)
    sizes = []
    for step in range(1, 501):
        evictor.created(1, 0, evictor.reuse(0, False, 0), False)
        evictor.ended(1)
        evictor.add(1, 4)
        evictor.forget(1, 0, step)
        evictor.discard(1)
        sizes.append(evictor.bytes_used())
    assert sizes[60] == sizes[-1]


@given(
    st.lists(st.sampled_from((0.0, 0.0, 1.0, 7.0, 300.0)), min_size=BINS, max_size=BINS), st.integers(0, 3000)
)
def test_worth_is_the_index_as_defined(gaps: list[float], births: int) -> None:
    """The one pass over the hull finds, for every bin, the best of all later points to give up at."""
    assert worths(gaps, births) == pytest.approx(worths_of(gaps, births), rel=1e-9)


def test_worth_before_anything_was_seen_only_falls_with_age() -> None:
    """The prior alone makes the oldest the poorest."""
    table = worths([0.0] * BINS, 0.0)
    assert PRIOR > 0
    assert table == sorted(table, reverse=True)


class Counted(list[int]):
    """A column that counts how often it is read and written."""

    __slots__ = ()
    uses = 0

    def __getitem__(self, index: Any) -> Any:
        Counted.uses += 1
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        Counted.uses += 1
        super().__setitem__(index, value)


COLUMNS = ("_older", "_newer", "older", "newer", "_used", "_class", "_tip", "_length", "_home", "_uses")


def work(policy: Any, leaves: int) -> tuple[float, int]:
    """Column accesses of one use of a cache of so many leaves: mean and most of 2,000 rounds."""
    draw = random.Random(5)
    policy.resize(leaves + 8)
    for name in COLUMNS:
        column = getattr(policy, name, None)
        if isinstance(column, (array, bytearray)):
            setattr(policy, name, Counted(column))
    queued = list(range(1, leaves + 1))
    for node in queued:
        policy.reuse(0, False, 0)
        policy.created(node, 0, node % 3, bool(node & 1))
        policy.ended(node)
        policy.add(node, 8)
    spent = []
    for step in range(2000):
        before = Counted.uses
        node = draw.choice(queued)
        policy.discard(node)
        past = policy.reuse(node, True, 0)
        if step % 2:
            policy.ended(node)
        policy.add(node, 8)
        victim = policy.oldest()
        policy.candidates(8)
        policy.forget(victim, 0, step + 1)
        policy.discard(victim)
        policy.created(victim, 0, past, False)
        policy.split(leaves + 1, victim, 4)
        policy.ended(victim)
        policy.add(victim, 8)
        spent.append(Counted.uses - before)
    return sum(spent) / len(spent), max(spent)


@pytest.mark.parametrize("policy", [Lru, S3Fifo, Gaps])
def test_a_use_costs_as_much_among_many_leaves_as_among_few(policy: Any) -> None:
    """The mean number of column accesses is the same at 100 times as many leaves, and the most of gaps is bounded."""
    few, _ = work(policy(), 200)
    many, most = work(policy(), 20_000)
    assert many < 1.5 * few + 10
    if policy is not S3Fifo:  # whose `oldest` is amortised: a use pays for what it will make somebody skip
        assert most < 600
