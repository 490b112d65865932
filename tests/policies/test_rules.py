"""The rules of the baseline policies, one example each: hits, rounding, refusals, eviction, preemption, counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvslot.replay.policies import Admitted, Policy, PolicyConfig, Refused, make
from kvslot.replay.policies.chained import ChainedPool, Shortage
from kvslot.replay.policies.runs import Runs
from kvslot.replay.policies.sequences import (
    EmptyPrompt,
    NotTokens,
    OutOfTurn,
    RequestIsLive,
    UnknownRequest,
    longest_run,
    picture,
)

from .life import Life, ramp, text

ALL = ("contiguous", "paged", "hashed", "token")
SHARING = ("paged", "hashed", "token")
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33)


def fill(life: Life, number: int, until: int, token: int = 7) -> None:
    """Grow a running sequence to at least `until` tokens of room."""
    while life.live[number].ask_at < until:
        assert life.grow(number, [token])


# --- Hits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ALL)
def test_a_prompt_asked_again_hits_all_but_its_last_token(name: str, length: int) -> None:
    """At most n-1 tokens are found, rounded down to whole blocks where blocks are shared."""
    life = Life(name, 1024, 16)
    assert life.serve(ramp(length)) == 0
    hit = life.serve(ramp(length))
    assert hit == {"contiguous": 0, "hashed": (length - 1) // 16 * 16}.get(name, length - 1)
    life.check()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", SHARING)
def test_a_continued_sequence_is_found_to_its_end(name: str, length: int) -> None:
    """Prompt and answer are both found by the next turn, rounded down to whole blocks where blocks are shared."""
    life = Life(name, 1024, 16)
    life.serve(ramp(length), ramp(5, 500))
    whole = length + 5
    assert life.serve(ramp(length) + ramp(5, 500) + ramp(40, 900)) == (
        whole // 16 * 16 if name == "hashed" else whole
    )


@pytest.mark.parametrize("name", SHARING)
def test_a_hit_ends_where_the_prompts_part(name: str) -> None:
    """Tokens that differ are never taken for each other, in whatever part of a block they differ."""
    for part in range(1, 40):
        life = Life(name, 1024, 16)
        life.serve(ramp(40))
        hit = life.serve(ramp(part) + ramp(20, 1000))
        assert hit == (part // 16 * 16 if name == "hashed" else part)
        life.check()


@pytest.mark.parametrize("name", SHARING)
def test_nothing_is_shared_before_it_is_written(name: str) -> None:
    """A prompt that is admitted but not yet prefilled is no hit for an equal one; prefilled, it is."""
    life = Life(name, 1024, 16)
    life.admit(ramp(40))
    answer = life.admit(ramp(40))
    assert isinstance(answer, Admitted)
    assert answer.hit == 0
    life.prefill(0)
    answer = life.admit(ramp(40))
    assert isinstance(answer, Admitted)
    assert answer.hit == (32 if name == "hashed" else 39)
    life.check()


@pytest.mark.parametrize("name", SHARING)
def test_an_aborted_output_is_not_found(name: str) -> None:
    """What was published before an abort stays; output that was never finished is gone."""
    life = Life(name, 1024, 16)
    number = life.start(ramp(32))
    fill(life, number, 64)
    life.abort(number)
    assert life.policy.gauges().cached == 32
    assert life.serve(ramp(32) + text(*[7] * 32)) == 32


def test_granularity_says_where_hits_can_end() -> None:
    """Only the policy that shares whole blocks rounds its hits."""
    assert {name: Life(name, 64, 16).policy.granularity for name in ALL} == {
        "contiguous": 1,
        "paged": 1,
        "hashed": 16,
        "token": 1,
    }


# --- Rounding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_room_is_rounded_up_to_what_is_handed_out(length: int) -> None:
    """Blocks round up to whole blocks, tokens not at all, and one run is as long as the longest sequence."""
    expected = {
        "contiguous": 64,
        "paged": -(-length // 16) * 16,
        "hashed": -(-length // 16) * 16,
        "token": length,
    }
    for name, capacity in expected.items():
        life = Life(name, 1024, 16)
        answer = life.admit(ramp(length))
        assert isinstance(answer, Admitted)
        assert answer.capacity == capacity
        gauges = life.policy.gauges()
        assert gauges.reserved == capacity
        assert gauges.free == 1024 - capacity
        assert gauges.tokens_held == 0


def test_a_finished_sequence_leaves_what_its_policy_can_share() -> None:
    """Of 37 tokens `hashed` keeps two blocks, `paged` three blocks with 11 slots lost, `token` 37 slots, and
    `contiguous` none."""
    kept = {}
    for name in ALL:
        life = Life(name, 1024, 16)
        life.serve(ramp(37))
        gauges = life.policy.gauges()
        kept[name] = (gauges.cached, gauges.blocks_in_use_slots, gauges.evictable)
    assert kept == {
        "contiguous": (0, 0, 0),
        "paged": (37, 48, 37),
        "hashed": (32, 32, 32),
        "token": (37, 37, 37),
    }


@pytest.mark.parametrize("name", ALL)
def test_progress_is_noted_every_sixteen_tokens(name: str) -> None:
    """However long its run, a sequence's written tokens count as held at most 16 tokens late."""
    life = Life(name, 8192, 2048, max_length=4096)
    number = life.start(ramp(10))
    for _ in range(20):
        assert life.grow(number, [5])
        gauges = life.policy.gauges()
        assert gauges.tokens_held == life.live[number].written
        assert life.live[number].ask_at - life.live[number].written <= 16
    life.check()


# --- Refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_an_empty_prompt_is_refused_by_name(name: str) -> None:
    """There is no first token to compute, and the error says so; the pool is as before."""
    life = Life(name, 64, 16)
    before = life.policy.gauges()
    with pytest.raises(EmptyPrompt, match="empty"):
        life.admit(b"")
    assert issubclass(EmptyPrompt, ValueError)
    assert life.policy.gauges() == before


@pytest.mark.parametrize("name", ALL)
def test_calls_out_of_turn_are_refused_by_name(name: str) -> None:
    """Ids in use, unknown ids, half a token, and steps in the wrong order raise and change nothing."""
    life = Life(name, 64, 16)
    policy = life.policy
    life.admit(ramp(3))
    before = policy.gauges()
    with pytest.raises(RequestIsLive):
        policy.admit(0, ramp(3), 0, 0.0)
    with pytest.raises(NotTokens):
        policy.admit(1, b"12345", 0, 0.0)
    with pytest.raises(OutOfTurn):
        policy.grow(0, 70, 0.0)
    with pytest.raises(OutOfTurn):
        policy.finish(0, b"", 0.0)
    for call, more in (
        (policy.prefilled, (0.0,)),
        (policy.grow, (9, 0.0)),
        (policy.finish, (b"", 0.0)),
        (policy.abort, (0.0,)),
        (policy.slots, ()),
    ):
        with pytest.raises(UnknownRequest):
            call(9, *more)
    assert policy.gauges() == before
    life.prefill(0)
    with pytest.raises(OutOfTurn):
        policy.prefilled(0, 0.0)
    with pytest.raises(OutOfTurn):
        policy.finish(0, ramp(100), 0.0)
    with pytest.raises(OutOfTurn):
        policy.grow(0, 3, 0.0)
    life.check()


@pytest.mark.parametrize("name", ALL)
def test_bigger_than_the_pool_is_never_and_as_big_is_not(name: str) -> None:
    """NEVER exactly when the prompt would not fit an empty pool, whatever runs just now."""
    life = Life(name, 64, 16, max_length=1000)
    assert life.admit(ramp(65)) == Refused(never=True, needed=65)
    life.serve(ramp(50, 1000))
    number = life.start(ramp(64))
    assert life.admit(ramp(65)) == Refused(never=True, needed=65)
    answer = life.admit(ramp(1, 9000))
    assert isinstance(answer, Refused)
    assert not answer.never
    life.finish(number)
    life.check()


@pytest.mark.parametrize("name", SHARING)
def test_a_refusal_leaves_no_trace(name: str) -> None:
    """Neither sums nor the order of eviction change: what was oldest before a refused request is oldest after it."""
    life = Life(name, 128, 16, watermark=0.0)
    life.serve(ramp(16))
    life.serve(ramp(16, 100))
    life.start(ramp(80, 1000))
    before = life.policy.gauges()
    answer = life.admit(ramp(16) + ramp(60, 5000))
    assert isinstance(answer, Refused)
    # 60 missing tokens, and 16 cached ones that would not be evictable any more.
    assert answer == Refused(never=False, needed=76)
    assert life.policy.gauges() == before
    life.abort(life.start(ramp(32, 8000)))
    assert life.serve(ramp(16, 100) + text(1)) == 16
    life.check()


@pytest.mark.parametrize("name", SHARING)
def test_the_watermark_holds_back_new_requests_only(name: str) -> None:
    """With an eighth held back, growth may use what a new request may not, and the first request may use all."""
    life = Life(name, 128, 16, watermark=0.125)
    number = life.start(ramp(112))
    assert isinstance(life.admit(ramp(1, 5000)), Refused)
    assert life.grow(number, [1])
    assert life.live[number].capacity == 128
    life.finish(number)
    assert isinstance(life.admit(ramp(128, 9000)), Admitted)
    life.check()


@pytest.mark.parametrize("name", SHARING)
def test_hits_that_nobody_uses_count_as_needed(name: str) -> None:
    """A cached prefix cannot be both kept for a request and evicted for it."""
    life = Life(name, 64, 16, watermark=0.0)
    life.serve(ramp(48))
    life.start(ramp(16, 1000))
    assert isinstance(life.admit(ramp(48) + ramp(16, 500)), Refused)
    assert isinstance(life.admit(ramp(32) + ramp(16, 500)), Admitted)
    life.check()


# --- Eviction and preemption --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHARING)
def test_the_least_recently_used_goes_first(name: str) -> None:
    """A prefix that was hit since outlives one that was not."""
    life = Life(name, 96, 16, watermark=0.0)
    for start in (0, 100, 200):
        life.serve(ramp(32, start))
    assert life.serve(ramp(32)) > 0
    life.serve(ramp(32, 300))
    number = life.start(ramp(32, 400))
    life.abort(number)
    assert life.serve(ramp(32)) > 0
    assert life.serve(ramp(32, 200)) == 0
    life.check()


@pytest.mark.parametrize("name", SHARING)
def test_leaves_go_before_what_they_build_on(name: str) -> None:
    """A shared beginning is still there when its continuations were evicted."""
    life = Life(name, 160, 16, watermark=0.0)
    for start in (100, 200, 300):
        life.serve(ramp(32) + ramp(32, start))
    life.serve(ramp(112, 1000))
    hit = life.serve(ramp(32) + ramp(10, 5000))
    assert hit == 32
    life.check()


def test_hashed_gives_the_tail_back_first() -> None:
    """Of one sequence the last blocks are evicted first, so that what is left can still be hit."""
    life = Life("hashed", 64, 16, watermark=0.0)
    life.serve(ramp(64))
    life.serve(ramp(16, 1000))
    assert life.serve(ramp(64)) == 48


@pytest.mark.parametrize("name", SHARING)
def test_the_youngest_is_preempted_and_the_oldest_then_grows(name: str) -> None:
    """Refused growth changes nothing; after the victim's abort its slots serve the older sequence."""
    life = Life(name, 64, 16, watermark=0.0)
    old = life.start(ramp(16))
    young = life.start(ramp(32, 1000))
    assert life.grow(old, [3])
    before = life.policy.gauges()
    assert not life.grow(old, [3])
    assert life.policy.gauges() == before
    assert life.policy.victim() == young
    life.abort(young)
    life.check()
    room = life.policy.grow(old, life.live[old].ask_at + 1, 0.0)
    assert room is not None
    # The victim starts over and finds its prompt, as far as the growth left it.
    life.live[old].ask_at, life.live[old].capacity = room
    assert life.policy.counters().evicted_tokens > 0
    life.abort(old)
    assert life.policy.victim() is None
    life.check()


@pytest.mark.parametrize("name", ALL)
def test_all_comes_back(name: str) -> None:
    """With everything aborted and evicted, the pool is empty and in one piece or as many as were ever cut."""
    life = Life(name, 256, 16, max_length=64)
    numbers = [life.start(ramp(20, start)) for start in (0, 100, 200)]
    for number in numbers[1:]:
        life.abort(number)
    life.finish(numbers[0])
    answer = life.admit(ramp(64 if name == "contiguous" else 256, 7000))
    assert isinstance(answer, Admitted)
    life.abort(life.next - 1)
    life.check()
    gauges = life.policy.gauges()
    assert gauges.free == gauges.largest_free_run == gauges.usable
    assert gauges.blocks_in_use_slots == 0
    assert set(life.policy.blocks()) == {0}


# --- Each policy's own way ----------------------------------------------------------------------------------------


def test_hashed_keeps_late_duplicates() -> None:
    """Two equal prompts at once: both keep their full blocks, the second set counts as duplicates, one is found."""
    life = Life("hashed", 256, 16)
    life.admit(ramp(40))
    life.admit(ramp(40))
    life.prefill(0)
    life.prefill(1)
    gauges = life.policy.gauges()
    assert (gauges.cached, gauges.duplicates, gauges.private) == (32, 32, 16)
    life.finish(0)
    life.finish(1)
    life.check()
    assert life.policy.gauges().evictable == 64


def test_hashed_computes_a_whole_block_again_for_a_prompt_cached_in_full() -> None:
    """32 cached tokens asked again: 16 are hit, and the second block is kept twice."""
    life = Life("hashed", 256, 16)
    life.serve(ramp(32))
    number = life.start(ramp(32))
    assert life.live[number].hit == 16
    assert life.policy.gauges().duplicates == 16


def test_hashed_hashes_a_waiting_prompt_once_and_never_mixes_keys() -> None:
    """The keys kept for a refused prompt become its own when it is admitted: an equal prompt with another answer
    publishes its own answer."""
    life = Life("hashed", 64, 4, watermark=0.0)
    blocker = life.start(ramp(60, 1000))
    assert isinstance(life.admit(ramp(8)), Refused)
    life.abort(blocker)
    first = life.start(ramp(8))
    second = life.start(ramp(8))
    life.finish(first, ramp(8, 100))
    life.finish(second, ramp(8, 200))
    life.check()
    assert life.serve(ramp(8) + ramp(8, 100) + text(1)) == 16
    assert life.serve(ramp(8) + ramp(8, 200) + text(1)) == 16


def test_token_keeps_no_duplicates() -> None:
    """Two equal prompts at once: the second one's slots are freed when it publishes, and its row is the tree's."""
    life = Life("token", 256, 16)
    life.admit(ramp(40))
    life.admit(ramp(40))
    life.prefill(0)
    life.prefill(1)
    assert life.policy.slots(0) == life.policy.slots(1)
    assert life.policy.gauges().blocks_in_use_slots == 40
    life.check()


def test_token_takes_less_ahead_when_little_is_left() -> None:
    """Growth takes 16 slots, fewer when fewer are left, and is refused only when there is none."""
    life = Life("token", 40, 16)
    number = life.start(ramp(10))
    seen = []
    while life.grow(number, [1]):
        seen.append(life.live[number].capacity)
    assert seen == [26, 40]


def test_paged_keeps_one_node_a_turn() -> None:
    """A sequence goes on in its own last block: 20 tokens and an answer of 20 take three blocks, not four."""
    life = Life("paged", 256, 16)
    life.serve(ramp(20), ramp(20, 500))
    assert life.policy.gauges().blocks_in_use_slots == 48
    assert life.policy.counters().copied_tokens == 0
    # The next turn appends to a published partial block, so it starts a new one.
    life.serve(ramp(20) + ramp(20, 500) + ramp(4, 900))
    assert life.policy.gauges().blocks_in_use_slots == 64
    life.check()


@pytest.mark.parametrize(("cut", "copied"), [(4, 4), (12, 4), (16, 0), (20, 4), (28, 4), (36, 4)])
def test_paged_splits_at_the_token_and_copies_the_smaller_side(cut: int, copied: int) -> None:
    """A node of 40 tokens left after `cut`: the block at the cut is copied on its smaller side, none at an edge; the
    last block stays with the lower half."""
    life = Life("paged", 256, 16)
    life.serve(ramp(40))
    assert life.serve(ramp(cut) + ramp(10, 900)) == cut
    assert life.policy.counters().copied_tokens == copied
    extra = 16 if copied else 0
    assert life.policy.gauges().blocks_in_use_slots == 48 + extra + 16
    life.check()
    assert life.serve(ramp(40) + text(1)) == 40


def test_paged_falls_back_to_the_blocks_edge() -> None:
    """Without a block for the copy, the hit ends at the edge of the block before, and nothing is copied."""
    life = Life("paged", 64, 16, watermark=0.0)
    life.serve(ramp(40))
    number = life.start(ramp(20) + ramp(28, 900))
    assert life.live[number].hit == 16
    assert life.policy.counters().copied_tokens == 0
    life.check()


def test_paged_drops_a_hit_that_leaves_no_room() -> None:
    """A prompt that fits an empty pool runs when nothing else does, even if its cached pieces take too many blocks."""
    life = Life("paged", 64, 16, watermark=0.0)
    life.serve(text(1))
    life.serve(text(1, 2))
    life.serve(text(1, 2, 3))
    assert life.policy.gauges().blocks_in_use_slots == 48
    number = life.start(text(1, 2, 3) + ramp(60, 100))
    assert life.live[number].hit == 0
    life.check()


def test_paged_counts_a_copy_that_is_not_worth_a_split() -> None:
    """Of two equal prompts at once the later one, which ends inside the other's node by then, keeps a duplicate."""
    life = Life("paged", 256, 16)
    life.admit(ramp(20))
    life.admit(ramp(20))
    life.prefill(0)
    life.finish(0, ramp(10, 500))
    life.prefill(1)
    gauges = life.policy.gauges()
    assert (gauges.cached, gauges.duplicates, gauges.private) == (30, 20, 0)
    life.check()
    life.finish(1, ramp(10, 700))
    life.check()
    assert life.policy.gauges().cached == 40


def test_paged_moves_an_answer_out_of_a_block_that_others_continue() -> None:
    """When another sequence has continued the node, the answer begun in its last block is copied to a block of its
    own, at the same offset."""
    life = Life("paged", 256, 16)
    author = life.start(ramp(20))
    reader = life.start(ramp(20) + ramp(4, 900))
    assert life.live[reader].hit == 20
    life.finish(author, ramp(6, 500))
    assert life.policy.counters().copied_tokens == 6
    life.check()
    assert life.serve(ramp(20) + ramp(6, 500) + text(1)) == 26


def test_contiguous_needs_to_know_the_longest_sequence() -> None:
    """Without a maximal length nothing can be set aside; and a prompt beyond it is NEVER."""
    with pytest.raises(ValueError, match="max_length"):
        make("contiguous", PolicyConfig(pool_tokens=64, block_size=16))
    life = Life("contiguous", 256, 16, max_length=40)
    assert life.admit(ramp(41)) == Refused(never=True, needed=41)
    number = life.start(ramp(40))
    assert life.policy.grow(number, 41, 0.0) is None


def test_contiguous_fills_the_pool_with_runs_and_refuses_with_most_of_it_unwritten() -> None:
    """Three runs of 40 fit 128 slots; the fourth is refused although 24 tokens are all that was written."""
    life = Life("contiguous", 128, 16, max_length=40)
    for start in (0, 100, 200):
        life.start(ramp(8, start))
    assert life.admit(ramp(8, 300)) == Refused(never=False, needed=8)
    gauges = life.policy.gauges()
    assert (gauges.tokens_held, gauges.reserved, gauges.free, gauges.largest_free_run) == (24, 96, 8, 8)
    life.finish(1, b"")
    assert life.policy.gauges().largest_free_run == 40
    life.check()


# --- Settings and pictures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "wrong", [{"block_size": 0}, {"pool_tokens": 8}, {"watermark": 2.0}, {"eviction": "random"}]
)
def test_settings_out_of_range_are_refused(name: str, wrong: dict[str, Any]) -> None:
    """A size, share or order of eviction that makes no sense is a ValueError at the start, not a surprise later."""
    given: dict[str, Any] = {"pool_tokens": 64, "block_size": 16, "max_length": 32}
    with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0]):
        make(name, PolicyConfig(**{**given, **wrong}))


@pytest.mark.parametrize("name", SHARING)
def test_an_order_of_eviction_that_is_not_offered_is_refused(name: str) -> None:
    """The baselines evict as their engines do; asked for another order they say so."""
    with pytest.raises(ValueError, match="s3fifo"):
        make(name, PolicyConfig(pool_tokens=64, block_size=16, eviction="s3fifo"))


@pytest.mark.parametrize("name", ALL)
def test_each_baseline_is_a_policy(name: str) -> None:
    """The registry finds it under its name, and it has all the calls of the interface."""
    policy = make(name, PolicyConfig(pool_tokens=64, block_size=16, max_length=32))
    assert isinstance(policy, Policy)
    assert policy.name == name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("contiguous", [255, 255, 63, 0, 0, 0, 0, 0]),
        ("paged", [255, 255, 63, 255, 31, 0, 0, 0]),
        ("hashed", [255, 255, 0, 255, 31, 0, 0, 0]),
        ("token", [255, 255, 255, 127, 0, 0, 0, 0]),
    ],
)
def test_the_picture_shows_the_share_of_each_block_that_holds_tokens(name: str, expected: list[int]) -> None:
    """One byte a block: a finished sequence of 36 tokens, then a running one of 18."""
    life = Life(name, 128, 16, max_length=128)
    life.serve(ramp(36))
    if name == "contiguous":
        life.start(ramp(36))
    else:
        # `hashed` frees the third block of the first one and hands it out again first.
        life.start(ramp(18, 1000) if name != "token" else ramp(20, 1000))
    shown = list(life.policy.blocks())
    if name == "hashed":
        assert sorted(shown) == sorted(expected)
    else:
        assert shown == expected


def test_a_long_picture_is_cut_into_equal_buckets() -> None:
    """10,000 blocks give at most 4,096 bytes, and the last, shorter bucket is judged by its own size."""
    held = np.full(10_000, 16, dtype=np.int64)
    shown = picture(held, 16)
    assert len(shown) == 3334
    assert set(shown) == {255}
    assert picture(held[:0], 16) == b""


def test_extents_count_runs_of_consecutive_slots() -> None:
    """A fresh pool gives one extent a prompt; runs that touch count as one."""
    for name in SHARING:
        life = Life(name, 1024, 16)
        life.start(ramp(40))
        counters = life.policy.counters()
        assert counters.extents == 1
        assert counters.extent_tokens == (40 if name == "token" else 48)


def test_the_longest_free_run_joins_what_came_back_to_what_was_never_used() -> None:
    """Numbers 5..9 of 10 never used: 4 back makes 6, 0 and 1 back do not."""
    assert longest_run([], 5, 10) == 5
    assert longest_run([4], 5, 10) == 6
    assert longest_run([1, 0], 5, 10) == 5
    assert longest_run([3, 0, 2, 1], 8, 10) == 4
    assert longest_run([3, 2], 4, 4) == 2


# --- The parts by themselves --------------------------------------------------------------------------------------


def test_the_chained_pool_stands_by_itself() -> None:
    """Allocate, publish, probe, extend, release: the baseline of the benchmark, without a policy around it."""
    pool = ChainedPool(4, 4)
    table = pool.allocate(ramp(10))
    assert not isinstance(table, Shortage)
    assert (len(table.blocks), table.hit) == (3, 0)
    pool.publish(table, ramp(10))
    assert pool.probe(ramp(10)) == 8
    assert pool.probe(ramp(8)) == 4
    assert pool.probe(b"") == 0
    assert pool.extend(table)
    assert not pool.extend(table)
    short = pool.allocate(ramp(9))
    assert isinstance(short, Shortage)
    assert (short.blocks, short.revived, short.hit) == (1, 0, 8)
    pool.release(table)
    pool.audit([])
    assert (pool.free, pool.empty, pool.idle) == (4, 2, 2)
    everything = pool.allocate(ramp(16, 100))
    assert not isinstance(everything, Shortage)
    assert pool.evicted == 2
    assert pool.probe(ramp(10)) == 0
    pool.audit([everything])


def test_runs_are_best_fit_and_coalesce() -> None:
    """The shortest hole that has room is cut, and neighbours join on both sides when a run comes back."""
    runs = Runs(100)
    starts = [runs.take(size) for size in (10, 20, 10, 30)]
    assert starts == [0, 10, 30, 40]
    runs.give(0, 10)
    runs.give(30, 10)
    assert runs.take(10) == 0
    assert runs.take(5) == 30
    runs.give(30, 5)
    runs.give(10, 20)
    assert runs.holes == [(10, 30), (70, 30)]
    assert runs.take(31) is None
    runs.give(40, 30)
    runs.give(0, 10)
    assert runs.holes == [(0, 100)]
    assert runs.largest == runs.free == 100
