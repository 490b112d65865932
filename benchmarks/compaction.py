"""`kvslotctl bench compaction`: what moves are worth, what they cost, and who notices.

    packing   pieces of which a random half was freed, compacted to rest, see pieces.py
    runs      the same for free memory in runs of 32 blocks, without leases and with a fifth of the nodes leased
    moved     every bundled trace replayed with compaction, then emptied night by night: bytes moved per byte of whole
              blocks given back, by the planner and by two greedy ones (defrag/greedy.py), one that moves whole nodes
              and one that moves parts; in total, and for as many blocks
    slices    a pool of 1,000,000 blocks: the longest time that the planner takes at a stretch
    gaps      idle time that the predictor uses on recorded and made-up series, see gaps.py
    copies    the device's low-priority copies against memcpy, see copies.py
    stop      from the begin of a step to the last byte copied, see copies.py
    allocate  requests of others while a daemon compacts at half duty, and while it does not, see compacting.py
    steps     an engine's steps on a pool that is compacted in its gaps, and on the same pool at rest, see compacting.py
    hours     72 simulated hours of every trace; takes hours, so that it runs only where it is asked for

Ratios are taken within one run: both planners have the same traces, both sides of a loop take turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import Final, NamedTuple

import msgspec

from kvslot import replay
from kvslot.allocator import OutOfTurn
from kvslot.benchmarks import copies, gaps, pieces
from kvslot.benchmarks.measure import clock, clock_cost_ns, quiet_collector
from kvslot.benchmarks.report import Document, Result, check_groups, meta, result
from kvslot.benchmarks.rig import Realtime
from kvslot.defrag import Planner, Purpose
from kvslot.replay import policies
from kvslot.replay.policies.slotted import SlottedPolicy

GROUPS: Final = ("packing", "runs", "moved", "slices", "gaps", "copies", "stop", "allocate", "steps", "hours")
"""In the order they run."""
USUAL: Final = GROUPS[:-1]
"""Without what takes hours."""

LIVE: Final = 64
POOL_FACTOR: Final = 1.5
BLOCK_SIZES: Final = (16, 528)
NIGHTS: Final = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
"""Shares of the slots in use to which a pool is emptied after a replay, one after the other."""
TOKENS_MAX: Final = 1_500_000
"""Prompt tokens of a trace that are replayed: the pool has turned over by then, and both planners take seconds."""
QUICK: Final = ("sgd_a", "mtbench101_a", "taubench_airline_a")
QUICK_REQUESTS: Final = 1_000
PLAN_TOKENS: Final = 2_048
"""Of a plan, where a slice is timed: a megabyte to a quarter of a gigabyte, several gaps' worth."""
FEED: Final = 64
"""Changes that the planner takes note of between two looks at the time, as in the daemon."""
PLANS: Final = 400
HOURS: Final = 72.0
HOURS_REQUESTS = 150_000
"""Of a trace without a clock in all its hours: it comes at a rate of so many then.  At full load some would be asked
tens of millions of times."""
BASELINES: Final = {"greedy": "", "greedy_parts": "_parts"}
"""Planners that are compared with, and what their rows' names have in addition.  The budgets are those of the first."""
MATCHED: Final = "slotted, as much as another"
SUITE: Final = "compaction"

Progress = Callable[[str, float], None]


class Size(NamedTuple):
    """How much is done."""

    pieces: int = 60_000
    pieces_large: int = 20_000
    blocks: int = 40_000
    blocks_large: int = 1_000_000


FULL: Final = Size()
SMALL: Final = Size(pieces=10_000, pieces_large=4_000, blocks=10_000, blocks_large=100_000)


def row(name: str, value: float, samples: int | None = None, note: str = "", **words: str) -> Result:
    """A row of this suite; `words` (unit, what, ratio_to) where it has no budget."""
    return result(name, value, samples=samples, note=note, suite=SUITE, **words)


# -- to rest ----------------------------------------------------------------------------------------------------------


def measure_packing(size: Size, report: Progress) -> list[Result]:
    """Blocks of 16 and 528 slots."""
    results = []
    cases = ((16, 15, size.pieces), (528, 500, size.pieces_large))
    for nth, (block_size, longest, count) in enumerate(cases):
        report(f"packing, block {block_size}", nth / len(cases))
        made = pieces.half(block_size, longest, count)
        done = pieces.to_rest(made.pool, (Purpose.FREE_BLOCKS,))
        note = f"{done.packing_before:.3f} before; {done.moves:,} moves, {_price(done)}"
        results.append(row(f"packing_{block_size}", done.packing, count, note))
    return results


def _price(done: pieces.Rested) -> str:
    if not done.given_back:
        return "no block given back"
    return f"{done.moved_tokens / done.given_back:.2f} tokens moved for each slot of the blocks given back"


def measure_runs(size: Size, report: Progress) -> list[Result]:
    """Free memory in runs of 32 blocks."""
    kinds: dict[str, pieces.Lengths] = {
        "short": pieces.short,
        "medium": pieces.medium,
        "traces": pieces.traced(4096),
    }
    results: list[Result] = []
    free: dict[str, pieces.Rested] = {}
    for nth, (name, lengths) in enumerate(kinds.items()):
        report(f"runs of 32 blocks, {name}", nth / len(kinds))
        # Blocks first: whole blocks are what runs are made of.
        free[name] = pieces.to_rest(
            pieces.sixty(lengths, blocks=size.blocks).pool, (Purpose.FREE_BLOCKS, Purpose.RUN)
        )
        report(f"runs of 32 blocks, {name}, leases", (nth + 0.5) / len(kinds))
        leased = pieces.to_rest(
            pieces.sixty(lengths, blocks=size.blocks, leased=pieces.LEASED).pool,
            (Purpose.FREE_BLOCKS, Purpose.RUN),
        )
        results.append(
            row(
                f"usable_runs_leased_{name}",
                leased.runs / leased.bound if leased.bound else 1.0,
                note=f"bound: {100 * leased.bound:.1f} % of what is free; {100 * leased.runs_before:.1f} % before, "
                f"{100 * leased.runs:.1f} % after; {leased.moves:,} moves",
            )
        )
    worst = min(free.values(), key=lambda each: each.runs)
    note = "; ".join(
        f"{name} {100 * each.runs_before:.1f} -> {100 * each.runs:.1f} % (bound {100 * each.bound:.1f})"
        for name, each in free.items()
    )
    return [row("usable_runs", worst.runs, len(free), note), *results]


# -- what moves cost --------------------------------------------------------------------------------------------------


class Trade(NamedTuple):
    """Tokens moved, and slots of whole blocks that they gave back."""

    moved: int
    given_back: int

    @property
    def price(self) -> float:
        return self.moved / self.given_back if self.given_back > 0 else float("inf")


def bundled(*, quick: bool, skipped: dict[str, str]) -> Iterator[replay.Trace]:
    """The traces, cut to TOKENS_MAX tokens; says what is not replayed in whole."""
    for name, path in replay.bundled().items():
        if quick and name not in QUICK:
            continue
        trace = replay.load(path)
        tokens = count = 0
        for length in trace.prompt_len:
            tokens += length
            if tokens > TOKENS_MAX or (quick and count == QUICK_REQUESTS):
                break
            count += 1
        if count < len(trace):
            skipped[f"rest of {name}"] = f"the first {count:,} of {len(trace):,} requests were replayed"
            trace = trace.head(max(1, count))
        yield trace


def sized(trace: replay.Trace, block_size: int, seed: int, **changes: object) -> replay.ReplayConfig:
    """A replay of `slotted` in a pool of POOL_FACTOR times what runs at once."""
    config = replay.ReplayConfig(
        policy="slotted", block_size=block_size, pool_tokens=1 << 26, live=LIVE, seed=seed
    )
    pool_tokens = max(int(POOL_FACTOR * replay.peak_live_tokens(trace, config)), 4 * block_size)
    return msgspec.structs.replace(config, pool_tokens=pool_tokens, **changes)


def trade(config: replay.ReplayConfig, trace: replay.Trace, expander: replay.Expander) -> Trade:
    """Replays with moves for whole blocks, then empties the pool night by night, with compaction to rest each time."""
    return _trade(config, trace, expander)[0]


def _trade(
    config: replay.ReplayConfig, trace: replay.Trace, expander: replay.Expander
) -> tuple[Trade, list[int]]:
    """Also what had been given back at the end of each rest."""
    outcome = replay.replay(trace, config, expander=expander)
    policy = outcome.policies[0]
    assert isinstance(policy, SlottedPolicy)
    assert policy.compactor is not None
    for share in NIGHTS:
        policy.shrink(share, outcome.recorder.end)
        policy.rest(outcome.recorder.end)
    counted = policy.counters()
    return Trade(counted.moved_tokens, counted.given_back * config.block_size), policy.compactor.rests


def trade_for(
    goals: list[int], config: replay.ReplayConfig, trace: replay.Trace, expander: replay.Expander
) -> Trade:
    """As `trade`, but each rest ends once as much has been given back as `goals` says."""

    def make(settings: policies.PolicyConfig) -> policies.Policy:
        policy = SlottedPolicy(settings)
        assert policy.compactor is not None
        policy.compactor.goals = goals
        return policy

    policies.register(MATCHED, make)
    try:
        return trade(msgspec.structs.replace(config, policy=MATCHED), trace, expander)
    finally:
        policies.unregister(MATCHED)


class Pair(NamedTuple):
    """The planner and a greedy one on the same trace."""

    ours: Trade
    greedy: Trade

    @property
    def ratio(self) -> float:
        """Of prices; 0 where there is nothing to compare."""
        if self.ours.given_back <= 0 or self.greedy.given_back <= 0 or not self.greedy.moved:
            return 0.0
        return self.ours.price / self.greedy.price

    def __str__(self) -> str:
        ours, greedy = self
        return (
            f"{ours.moved:,} tokens for {ours.given_back:,} slots, "
            f"greedy {greedy.moved:,} for {greedy.given_back:,}"
        )


def measure_moved(*, quick: bool, seed: int, report: Progress, skipped: dict[str, str]) -> list[Result]:
    """The planner and both greedy ones on every trace.

    Where one gives back more blocks than the other its last ones were the dearest.  So both are also compared where
    each ends, time by time, with as many blocks as the other one has: with the lesser of what the two gave back.
    """
    in_total: dict[str, dict[tuple[str, int], Pair]] = {each: {} for each in BASELINES}
    for_as_much: dict[str, dict[tuple[str, int], Pair]] = {each: {} for each in BASELINES}
    names = [name for name in replay.bundled() if not quick or name in QUICK]
    for nth, trace in enumerate(bundled(quick=quick, skipped=skipped)):
        expander = replay.Expander(trace)
        for at, size in enumerate(BLOCK_SIZES):
            report(f"moved for blocks, {trace.name}, block {size}", (nth + at / 2) / len(names))
            config = sized(trace, size, seed, compaction="forced", purposes=("free_blocks",))
            key = trace.name, size
            ours, our_rests = _trade(config, trace, expander)
            for baseline in BASELINES:
                plain = msgspec.structs.replace(config, planner=baseline)
                greedy, rests = _trade(plain, trace, expander)
                in_total[baseline][key] = Pair(ours, greedy)
                goals = list(map(min, our_rests, rests))
                if goals[-1] > 0:
                    for_as_much[baseline][key] = Pair(
                        trade_for(goals, config, trace, expander), trade_for(goals, plain, trace, expander)
                    )
    results: list[Result] = []
    for baseline, suffix in BASELINES.items():
        results += _judged("moved_per_given_back", "", baseline, suffix, in_total[baseline])
        results += _judged(
            "moved_for_as_much", ", for as many blocks", baseline, suffix, for_as_much[baseline]
        )
    for (name, size), pair in in_total["greedy"].items():
        results.append(
            row(
                f"moved_per_given_back_{name}_{size}",
                pair.ratio,
                unit="x",
                what=f"bytes moved per byte of whole blocks given back, blocks of {size}",
                ratio_to="greedy",
                note=str(pair) + ("" if pair.ratio else "; nothing to compare"),
            )
        )
    return results


def _judged(
    name: str, words: str, baseline: str, suffix: str, found: dict[tuple[str, int], Pair]
) -> list[Result]:
    """The worst trace, and all of them together."""
    traces: dict[str, list[Pair]] = {}
    for (trace, _), pair in found.items():
        traces.setdefault(trace, []).append(pair)
    ratios = {trace: each.ratio for trace, each in zip(traces, map(_together, traces.values()), strict=True)}
    if not any(ratios.values()):
        return []
    worst = max(ratios, key=lambda trace: ratios[trace])
    above = ", ".join(
        f"{trace} {ratio:.2f}" for trace, ratio in ratios.items() if ratio > 1 and trace != worst
    )
    both = _together(list(found.values()))
    what = f"bytes moved per byte of whole blocks given back{words}"
    sizes = " and ".join(map(str, BLOCK_SIZES))
    told: dict[str, str] = {"unit": "x", "ratio_to": baseline.replace("_", " ")}
    if (name, suffix) == ("moved_per_given_back", ""):
        told = {}  # budgets, which have their words
    return [
        row(
            f"{name}{suffix}_worst",
            ratios[worst],
            sum(ratio > 0 for ratio in ratios.values()),
            f"worst: {worst} ({_together(traces[worst])}); "
            + (f"others above 1: {above}; " if above else "no other above 1; ")
            + f"of {len(traces)} traces, blocks of {sizes} together",
            **(told and {**told, "what": f"{what}, worst trace"}),
        ),
        row(
            f"{name}{suffix}",
            both.ratio,
            len(found),
            f"{both.ours.price:.3f} bytes a byte, greedy {both.greedy.price:.3f}; {both}",
            **(told and {**told, "what": f"{what}, over all traces"}),
        ),
    ]


def _together(pairs: Sequence[Pair]) -> Pair:
    """Sums of both sides."""
    ours, greedy = zip(*pairs, strict=True)
    return Pair(Trade(*map(sum, zip(*ours, strict=True))), Trade(*map(sum, zip(*greedy, strict=True))))


def measure_slices(size: Size, cost: int, report: Progress) -> list[Result]:
    """The planner on a large pool: what it takes note of, and what it plans, in slices of thread CPU time."""
    report(f"filling a pool of {size.blocks_large:,} blocks", 0.0)

    def lengths(rng: Random) -> int:
        return pieces.short(rng) if rng.random() < 0.8 else pieces.medium(rng)

    made = pieces.sixty(lengths, blocks=size.blocks_large)
    pool = made.pool
    report("planning", 0.7)
    slices: dict[str, list[int]] = {"feed": []}
    planner = Planner(pool)

    def feed() -> None:
        more = True
        while more:
            began = clock()
            more = planner.feed(FEED)
            slices["feed"].append(clock() - began)

    feed()
    for purpose in Purpose:
        times = slices.setdefault(purpose.value, [])
        for _ in range(PLANS):
            began = clock()
            plan = planner.plan(PLAN_TOKENS, purpose)
            times.append(clock() - began)
            begun = []
            for each in plan.moves:
                with suppress(OutOfTurn):  # an earlier one took what it was to have
                    begun.append(pool.begin_move(each.node, each.at, each.length, each.target).handle)
            for handle in begun:
                pool.finish_move(handle)
            feed()
            if not plan.moves and plan.settled:
                break
    planner.close()
    worst = {name: max(0, max(times) - cost) / 1e6 for name, times in slices.items()}
    note = "; ".join(
        f"{name} {each:.2f} ms of {len(slices[name]):,} (99 %: {_share(slices[name], 0.99) / 1e6:.2f})"
        for name, each in worst.items()
    )
    return [
        row(
            "slice_ms_max",
            max(worst.values()),
            sum(map(len, slices.values())),
            f"{pool.tree.nodes:,} nodes; longest: {note}; a feed of {FEED} changes, a plan of {PLAN_TOKENS:,} tokens",
        )
    ]


def _share(times: Sequence[int], share: float) -> int:
    return sorted(times)[int(share * (len(times) - 1))]


# -- hours ------------------------------------------------------------------------------------------------------------


def measure_hours(
    *, seed: int, report: Progress, hours: float = HOURS, names: Sequence[str] = (), block_size: int = 16
) -> list[Result]:
    """Each trace round and round, with moves in its gaps: is the last hour's pool as good as an early one's?

    Held against the first hour, in most of which a pool is still being filled, and against the first hour after it was
    full.  An hour differs from the next by what happens to run in it, so the last day is told beside
    the first full one.
    """
    against = {
        "first_hour": ("last_hour", "last_hour_fragmentation", "the first"),
        "full_hour": ("last_hour", "last_hour_fragmentation_full", "the first of the full pool"),
        "full_day": ("last_day", "last_day_fragmentation_full", "the first of the full pool"),
    }
    results = []
    seen: dict[str, list[tuple[float, str]]] = {key: [] for _, key, _ in against.values()}
    found = replay.bundled()
    names = names or list(found)
    for nth, name in enumerate(names):

        def tell(share: float, name: str = name, nth: int = nth) -> None:
            report(f"{name} for {hours:g} simulated hours", (nth + share) / len(names))

        trace = replay.load(found[name])
        # At its own rate, or so many requests in all: some traces have a million an hour.
        rate = None
        own = (
            math.inf
            if trace.t is None
            else len(trace.t) / max(float(trace.t[-1] - trace.t[0]), 1.0) * hours * 3600
        )
        if own > HOURS_REQUESTS:
            rate = HOURS_REQUESTS / (hours * 3600)
        config = sized(trace, block_size, seed, compaction="idle", hours=hours, rate=rate)
        rows = {each.phase: each for each in replay.replay(trace, config, progress=tell).rows}
        for phase, (end, key, versus) in against.items():
            if phase not in rows:
                continue
            first, last = rows[phase], rows[end]
            a, b = first.internal_fragmentation_pct.mean, last.internal_fragmentation_pct.mean
            span = end.removeprefix("last_")
            ratio = b / a if a else float(b > 0)
            seen[key].append((ratio, name))
            results.append(
                row(
                    f"{key}_{name}",
                    ratio,
                    unit="x",
                    what=f"internal fragmentation of the last {span}",
                    ratio_to=versus,
                    note=f"{a:.3f} % -> {b:.3f} %; {rows['all'].moved_tokens:,} tokens moved, "
                    f"{first.moved_tokens:,} in the one {span}, {last.moved_tokens:,} in the last",
                )
            )
    judged = [
        row(key, max(pairs)[0], len(pairs), f"worst: {max(pairs)[1]}; {hours:g} hours each")
        for key, pairs in seen.items()
        if pairs
    ]
    return [*judged, *results]


# -- the suite --------------------------------------------------------------------------------------------------------


def run(
    groups: Sequence[str] = USUAL,
    *,
    quick: bool = False,
    seed: int = 0,
    command: Sequence[str] | None = None,
    report: Progress | None = None,
    fifo: bool = True,
) -> Document:
    """Measures the budgets of `groups`, in order of GROUPS.  Raises ValueError for an unknown group."""
    check_groups(groups, GROUPS)
    wanted = [group for group in GROUPS if group in groups]
    began = time.monotonic()
    size = SMALL if quick else FULL
    cost = clock_cost_ns()
    document = Document(
        meta=meta(wanted, quick=quick, seed=seed, cost_ns=cost, command=command, suite=SUITE), results=[]
    )
    realtime = Realtime(fifo)
    document.meta.priority = realtime.words if {"allocate", "steps"} & set(wanted) else ""
    with quiet_collector():
        for index, group in enumerate(wanted):

            def tell(words: str, share: float, index: int = index) -> None:
                if report is not None:
                    report(words, (index + share) / len(wanted))

            tell(group, 0.0)
            document.results += _measure(group, size, quick, seed, cost, tell, document, realtime)
    document.meta.wall_s = round(time.monotonic() - began, 1)
    return document


def _measure(
    group: str,
    size: Size,
    quick: bool,
    seed: int,
    cost: int,
    tell: Progress,
    document: Document,
    realtime: Realtime,
) -> list[Result]:
    match group:
        case "packing":
            return measure_packing(size, tell)
        case "runs":
            return measure_runs(size, tell)
        case "moved":
            return measure_moved(quick=quick, seed=seed, report=tell, skipped=document.meta.skipped)
        case "slices":
            return measure_slices(size, cost, tell)
        case "gaps":
            return gaps.results(gaps.measure(quick=quick, report=tell))
        case "copies":
            return copies.copy_speed(quick=quick, seed=seed, report=tell)
        case "stop":
            return copies.step_to_last_byte(quick=quick, seed=seed, report=tell)
        case "hours":
            return measure_hours(seed=seed, report=tell, names=QUICK if quick else ())
        case _:
            from kvslot.benchmarks import compacting

            measure = compacting.measure_allocate if group == "allocate" else compacting.measure_steps
            return measure(document=document, quick=quick, report=tell, realtime=realtime)
