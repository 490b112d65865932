"""`kvslotctl bench core`: every budget of the core, measured.

Ours and the baseline do the same work on the same prompts in one loop, by turns (A B, B A, A B, ...), so that whatever
else the machine does hits both alike; the result is the ratio of medians.  What is timed is one call each: the
publication and the release that follow it, so that the pool stays full and turns over, are timed apart.

    allocate    300 / 8k / 32k tokens, half of them cached, against `ChainedPool` of as many slots in the same traffic
    probe       whole prompts that are cached, against the same
    nodes       one life of a short request in a tree of 2,000 and one of 2,000,000 nodes
    blocks      one life of a 300-token request in 4,000 and in 4,000,000 blocks
    gc          the filling itself, served by daemon/collector.py
    metadata    a process of its own, see footprint.py
    packing     free runs alone, see packing.py
    replay      recorded traces through the `slotted` policy, see replays.py
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from kvslot.allocator import Admitted
from kvslot.benchmarks.measure import Quantiles, clock, clock_cost_ns, quantiles, quiet_collector
from kvslot.benchmarks.packing import pack
from kvslot.benchmarks.report import Document, Result, budgets, check_groups, meta, result
from kvslot.benchmarks.traffic import Chained, Filling, Ours, Shape, Short, branch, noise, text
from kvslot.daemon.collector import Collector, CollectorStatistics
from kvslot.replay.policies.hashed import Shortage

__all__ = ["FULL", "GROUPS", "QUICK", "Progress", "Size", "budgets", "run"]

GROUPS: Final = ("packing", "allocate", "probe", "gc", "nodes", "blocks", "metadata", "replay")
"""In the order they run; `allocate`, `probe` and `gc` share one pair of filled pools."""

TURNOVER: Final = 1.2
"""How often a pool is filled over again before anything is measured."""
BASELINE: Final = "chained"
GROWTH_ROUNDS = 2_000
"""Requests whose lives are compared between a small and a large pool."""
HEADROOM_LEAST: Final = 1_024
"""Slots kept free in pools that are compared for growth: the default share of a small pool is less than one request
takes, so that its free space would be more broken up than a large pool's, and growth would look better than it is."""

Progress = Callable[[str, float], None]
"""Called with what is going on and the share of all work that is done, 0..1."""


class Size(NamedTuple):
    """How much is done."""

    nodes: int = 200_000
    nodes_large: int = 2_000_000
    nodes_small: int = 2_000
    blocks_large: int = 4_000_000
    blocks_small: int = 4_000
    rounds_300: int = 6_000
    rounds_8k: int = 1_000
    rounds_32k: int = 300
    footprint: int = 200_000
    pieces: int = 60_000


FULL: Final = Size()
QUICK: Final = Size(
    nodes=20_000,
    nodes_large=100_000,
    blocks_large=400_000,
    rounds_300=1_500,
    rounds_8k=200,
    rounds_32k=50,
    footprint=10_000,
    pieces=10_000,
)


class Pair(NamedTuple):
    """The two pools that are compared, filled alike."""

    ours: Ours
    chained: Chained
    filling: Filling
    shape: Shape
    collector: CollectorStatistics
    """Of the filling of ours, which was served as the daemon serves."""


class Times(NamedTuple):
    """Samples in nanoseconds, the clock's own cost included."""

    allocate: list[int]
    publish: list[int]
    release: list[int]

    @classmethod
    def none(cls) -> Times:
        return cls([], [], [])


def fill_pair(size: Size, report: Progress) -> Pair:
    """Fills both with the same turns."""
    shape = Shape(chats_open=max(4, min(256, size.nodes // 64)))
    slots = size.nodes * (shape.turn_least + shape.turn_most) // 2
    ours = Ours(slots)
    filling = Filling(shape)
    collector = Collector(clock)
    collector.start()
    try:
        total = int(slots * (1 + TURNOVER))
        part = slots // 50
        while filling.tokens < total:
            filling.run(ours, part, collector.served)
            report(f"filling a pool of {size.nodes:,} nodes", 0.5 * filling.tokens / total)
    finally:
        collector.stop()
    gc.disable()
    chained = Chained(slots)
    again = Filling(shape)
    while again.tokens < total:
        again.run(chained, part)
        report("filling the baseline's pool", 0.5 + 0.5 * again.tokens / total)
    chained.close()
    return Pair(ours, chained, filling, shape, collector.statistics())


def life_ours(side: Ours, prompt: bytes, times: Times) -> None:
    """One request's life, each step timed."""
    pool, session, root = side.pool, side.session, side.root
    length = len(prompt) >> 2
    t0 = clock()
    admitted = pool.allocate(session, root, prompt)
    t1 = clock()
    assert isinstance(admitted, Admitted), admitted
    t2 = clock()
    pool.commit(session, admitted.sequence, length)
    t3 = clock()
    pool.free(session, admitted.sequence)
    t4 = clock()
    times.allocate.append(t1 - t0)
    times.publish.append(t3 - t2)
    times.release.append(t4 - t3)


def life_chained(side: Chained, prompt: bytes, times: Times) -> None:
    """The same for the baseline."""
    pool = side.pool
    t0 = clock()
    table = pool.allocate(prompt)
    t1 = clock()
    assert not isinstance(table, Shortage)
    t2 = clock()
    pool.publish(table, prompt)
    t3 = clock()
    pool.release(table)
    t4 = clock()
    times.allocate.append(t1 - t0)
    times.publish.append(t3 - t2)
    times.release.append(t4 - t3)


def race(pair: Pair, prompts: Iterator[bytes], rounds: int, warm: int) -> tuple[Times, Times, float, float]:
    """Both sides live through `rounds` prompts by turns; also returns the tokens each evicted per request."""
    ours, theirs = Times.none(), Times.none()
    evicted = evicted_theirs = 0
    for index in range(-warm, rounds):
        prompt = next(prompts)
        if index == 0:
            ours, theirs = Times.none(), Times.none()
            evicted = evicted_theirs = 0
        evicted -= pair.ours.evicted_tokens()
        evicted_theirs -= pair.chained.evicted_tokens()
        if index & 1:
            life_ours(pair.ours, prompt, ours)
            life_chained(pair.chained, prompt, theirs)
        else:
            life_chained(pair.chained, prompt, theirs)
            life_ours(pair.ours, prompt, ours)
        evicted += pair.ours.evicted_tokens()
        evicted_theirs += pair.chained.evicted_tokens()
    return ours, theirs, evicted / rounds, evicted_theirs / rounds


def short_prompts(sides: Sequence[Ours | Chained], shape: Shape, half: int, delay: int) -> Iterator[bytes]:
    """Second turns of short chats, whose first turns are cached on all sides some requests before."""
    short = Short(shape, half, delay)
    while True:
        first = short.first()
        for side in sides:
            side.cache(first)
        second = short.second()
        if second is not None:
            yield second


def long_prompts(pair: Pair, half: int) -> Iterator[bytes]:
    """Older chats that go another way from `half` tokens on."""
    within = int(0.4 * pair.ours.pool.usable)
    chats = pair.filling.recent(half, 4096, within)
    if not chats:
        raise ValueError(f"no recent chat has {half} tokens; the pool is too small")
    serial = 0
    while True:
        for chat in chats:
            serial += 1
            yield branch(pair.shape, chat, half, serial)


def measure_allocate(pair: Pair, size: Size, cost: int, report: Progress) -> list[Result]:
    """The rows of `allocate` and `free`."""
    results: list[Result] = []
    sides = (pair.ours, pair.chained)
    cases = (
        ("300", short_prompts(sides, pair.shape, 150, min(1000, size.nodes // 100)), size.rounds_300),
        ("8k", long_prompts(pair, 4096), size.rounds_8k),
        ("32k", long_prompts(pair, 16384), size.rounds_32k),
    )
    for index, (name, prompts, rounds) in enumerate(cases):
        report(f"allocate {name}", index / len(cases))
        ours, theirs, evicted, evicted_theirs = race(pair, prompts, rounds, max(20, rounds // 20))
        a, b = quantiles(ours.allocate, cost), quantiles(theirs.allocate, cost)
        lives = [quantiles([sum(x) for x in zip(*t, strict=True)], 3 * cost) for t in (ours, theirs)]
        note = f"evicted per request: ours {evicted:,.0f}, baseline {evicted_theirs:,.0f} tokens"
        results.append(ratio(f"allocate_{name}_p50", a.p50, b.p50, rounds, note))
        if name == "300":
            results.append(ratio("allocate_300_p99", a.p99, b.p99, rounds))
            results.append(result("allocate_300_us_p50", a.p50, samples=rounds))
            results.append(result("allocate_300_us_p99", a.p99, samples=rounds))
        else:
            results.append(us(f"allocate_{name}_us_p50", f"allocate {name}, absolute", a.p50, rounds))
        results.append(us(f"allocate_{name}_{BASELINE}_us_p50", "the baseline's", b.p50, rounds))
        if name == "300":
            results.append(us(f"allocate_300_{BASELINE}_us_p99", "the baseline's", b.p99, rounds))
        results.append(
            ratio(
                f"life_{name}_p50",
                lives[0].p50,
                lives[1].p50,
                rounds,
                what=f"allocate, publish and free {name} tokens: a request's whole life",
                note="the baseline works out the keys of new blocks when it publishes",
            )
        )
        c, d = quantiles(ours.publish, cost), quantiles(theirs.publish, cost)
        results.append(us(f"commit_{name}_us_p50", f"commit of the new half of {name}", c.p50, rounds))
        results.append(us(f"commit_{name}_{BASELINE}_us_p50", "the baseline's", d.p50, rounds))
        e, f = quantiles(ours.release, cost), quantiles(theirs.release, cost)
        free = "free_us_p50" if name == "300" else f"free_{name}_us_p50"
        results.append(us(free, f"free of a sequence of {name} tokens", e.p50, rounds))
        results.append(us(f"free_{name}_{BASELINE}_us_p50", "the baseline's", f.p50, rounds))
    statistics = pair.ours.pool.statistics()
    results.append(
        result(
            "extents_per_node",
            extents_per_node(pair.ours),
            what="stretches of slots a node of the filled pool is scattered over",
            note=f"{statistics.nodes:,} nodes after {TURNOVER:g} turnovers",
        )
    )
    return results


def measure_probe(pair: Pair, size: Size, cost: int, report: Progress) -> list[Result]:
    """Probes of whole cached prompts."""
    results: list[Result] = []
    within = int(0.4 * pair.ours.pool.usable)
    for index, (name, length, most) in enumerate(
        (("512", 512, 2000), ("8k", 8192, 1000), ("32k", 32768, 300))
    ):
        report(f"probe {name}", index / 4)
        chats = pair.filling.recent(length + 640, max(8, most * size.nodes // FULL.nodes), within)
        if length == 512:
            # A system prompt is 512 tokens, so a prompt of this length with a path of its own is a short chat's.
            prompts = [noise((1 << 29) + i, 0, 512) for i in range(len(chats))]
            for prompt in prompts:
                pair.ours.cache(prompt)
                pair.chained.cache(prompt)
        else:
            prompts = [text(pair.shape, chat, 0, length) for chat in chats]
            # The requests before may have pushed some out of a small pool.
            ours_has, chained_has, root = pair.ours.pool.probe, pair.chained.pool.probe, pair.ours.root
            prompts = [
                p for p in prompts if ours_has(root, p) == length - 1 and chained_has(p) >= length - 16
            ]
        ours, theirs = probe_race(pair.ours, pair.chained, prompts, cost)
        samples = ours.samples
        few = prompts[:4] * 50
        warm, warm_theirs = probe_race(pair.ours, pair.chained, few, cost)
        if name != "512":
            results.append(ratio(f"probe_{name}_speedup", theirs.p50, ours.p50, samples))
            results.append(
                ratio(
                    f"probe_{name}_warm_speedup",
                    warm_theirs.p50,
                    warm.p50,
                    warm.samples,
                    what="the same, of four prompts again and again: what both read is in the processor's caches",
                    unit="x faster",
                )
            )
        results.append(us(f"probe_{name}_us_p50", f"probe {name}", ours.p50, samples))
        results.append(us(f"probe_{name}_{BASELINE}_us_p50", "the baseline's", theirs.p50, samples))
    report("probe of a tree with a branch every 16 tokens", 0.75)
    return results + measure_branches(size, cost)


def probe_race(
    ours: Ours, chained: Chained, prompts: Sequence[bytes], cost: int
) -> tuple[Quantiles, Quantiles]:
    """Both probe all prompts, by turns, three times; all of a prompt must be cached on both sides."""
    if not prompts:
        raise ValueError("no prompt of this length is cached; the pool is too small")
    a: list[int] = []
    b: list[int] = []
    probe, probe_chained, root = ours.pool.probe, chained.pool.probe, ours.root
    for turn in range(3):
        for index, prompt in enumerate(prompts):
            # As a prompt that has just come in: in the cache for whoever is first to read it.
            prompt = bytes(bytearray(prompt))
            if (turn + index) & 1:
                t0 = clock()
                hit = probe(root, prompt)
                t1 = clock()
                hit_chained = probe_chained(prompt)
                t2 = clock()
                a.append(t1 - t0)
                b.append(t2 - t1)
            else:
                t0 = clock()
                hit_chained = probe_chained(prompt)
                t1 = clock()
                hit = probe(root, prompt)
                t2 = clock()
                b.append(t1 - t0)
                a.append(t2 - t1)
            whole = len(prompt) >> 2
            assert hit == whole - 1, (hit, whole)
            assert hit_chained >= whole - 16, (hit_chained, whole)
    return quantiles(a, cost), quantiles(b, cost)


def measure_branches(size: Size, cost: int) -> list[Result]:
    """The worst tree for a radix index: prompts that somebody left at every 16th token."""
    results = []
    count = 4 if size is FULL else 1
    slots = count * 48 * 1024
    ours, chained = Ours(slots), Chained(slots)
    prompts = [noise((1 << 29) + 4096 + i, 0, 32768) for i in range(count)]
    for index, prompt in enumerate(prompts):
        ours.cache(prompt)
        chained.cache(prompt)
        for at in range(16, 32768, 16):
            ours.cache(prompt[: 4 * at] + noise(index, at, at + 1))
    for name, length in (("8k", 8192), ("32k", 32768)):
        a, b = probe_race(ours, chained, [prompt[: 4 * length] for prompt in prompts] * 10, cost)
        results.append(
            ratio(
                f"probe_{name}_branches_speedup",
                b.p50,
                a.p50,
                a.samples,
                what=f"probe {name} in a tree with a branch every 16 tokens",
                unit="x faster",
            )
        )
        results.append(us(f"probe_{name}_branches_us_p50", "the same, absolute", a.p50, a.samples))
    return results


def measure_growth(group: str, size: Size, cost: int, report: Progress) -> list[Result]:
    """One request's life in a small and in a large pool, by turns, after as many to get both into their stride."""
    if group == "nodes":
        small_count, large_count, half = size.nodes_small, size.nodes_large, 12
    else:
        small_count, large_count, half = size.blocks_small, size.blocks_large, 150

    def filled(count: int) -> tuple[Ours, Filling]:
        # A node of the short chats is 8 tokens, a block 16.
        slots = count * 8 if group == "nodes" else count * 16
        chats_open = max(4, min(256, count // 64 if group == "nodes" else slots // 32768))
        shape = (
            Shape(8, 4, 12, chats_open, 4, 24, 0.0, 24) if group == "nodes" else Shape(chats_open=chats_open)
        )
        side, filling = Ours(slots, headroom=HEADROOM_LEAST), Filling(shape)
        total = int(slots * 1.25)
        while filling.tokens < total:
            filling.run(side, max(1, slots // 50))
            report(f"filling a pool of {count:,} {group}", 0.9 * filling.tokens / total)
        return side, filling

    pools = [filled(large_count), filled(small_count)]
    sides = [side for side, _ in pools]
    prompts = short_prompts(sides, pools[0][1].shape, half, 40)
    times = [Times.none(), Times.none()]
    probes: tuple[list[int], list[int]] = ([], [])
    for index in range(-GROWTH_ROUNDS // 4, GROWTH_ROUNDS):
        if not index:
            times = [Times.none(), Times.none()]
            probes = ([], [])
        prompt = next(prompts)
        for which in (0, 1) if index & 1 else (1, 0):
            life_ours(sides[which], prompt, times[which])
        for which in (0, 1) if index & 2 else (1, 0):
            probe, root = sides[which].pool.probe, sides[which].root
            t0 = clock()
            probe(root, prompt)
            t1 = clock()
            probes[which].append(t1 - t0)
        report(f"{group}: requests", 0.9 + 0.1 * max(0, index) / GROWTH_ROUNDS)
    results = []
    large, small = times
    steps = (
        ("allocate", small.allocate, large.allocate),
        ("commit", small.publish, large.publish),
        ("free", small.release, large.release),
        ("probe", probes[1], probes[0]),
    )
    for name, few, many in steps:
        a, b = quantiles(few, cost), quantiles(many, cost)
        results.append(ratio(f"{group}_growth_{name}", b.p50, a.p50, GROWTH_ROUNDS))
        results.append(
            us(f"{group}_large_{name}_us_p50", f"{name}, {large_count:,} {group}", b.p50, GROWTH_ROUNDS)
        )
        results.append(
            us(f"{group}_small_{name}_us_p50", f"{name}, {small_count:,} {group}", a.p50, GROWTH_ROUNDS)
        )
    results.append(
        result(
            f"{group}_extents_per_node",
            extents_per_node(sides[0]),
            what="stretches of slots a node of the large pool is scattered over",
            note=f"{sides[0].pool.tree.nodes - 1:,} nodes; small pool: {extents_per_node(sides[1]):.2f}, "
            f"{sides[1].pool.tree.nodes - 1:,} nodes",
        )
    )
    return results


def extents_per_node(side: Ours) -> float:
    """Mean over all live nodes."""
    tree = side.pool.tree
    return sum(len(tree.extents(node)) >> 1 for node in tree.live()) / tree.nodes


def measure_gc(pair: Pair) -> list[Result]:
    """What the collector did while the pool was filled, with no idle moment at all."""
    seen = pair.collector
    note = f"{seen.young} young collections, no idle moment given; {seen.found} objects found in cycles"
    return [
        result("gc_full_collections", seen.full, note=note),
        result("gc_pause_ms_max", seen.pause_us_max / 1e3, samples=seen.young, note=note),
    ]


def measure_metadata(size: Size) -> list[Result]:
    """Runs footprint.py and waits for it."""
    command = [sys.executable, "-Im", "kvslot.benchmarks.footprint", str(size.footprint), str(TURNOVER)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    note = (
        f"{found['nodes']:,} nodes, {found['scattered']:,} of several extents, after {TURNOVER:g} turnovers; "
        f"the tree's own estimate: {found['estimate']:.0f}"
    )
    return [result("metadata_bytes_per_node", found["per_node"], samples=found["nodes"], note=note)]


def measure_packing(size: Size, report: Progress) -> list[Result]:
    """Blocks of 16 and 528 slots."""
    results = []
    for index, (block_size, longest) in enumerate(((16, 15), (528, 500))):
        report(f"packing, block {block_size}", index / 2)
        packed = pack(block_size, longest, size.pieces)
        assert not packed.split
        note = f"{packed.filled:.4f} before the churn; plain pages: {packed.paged:.3f}"
        results.append(result(f"packing_{block_size}", packed.churned, samples=packed.pieces, note=note))
    return results


def ratio(
    name: str, over: float, under: float, samples: int, note: str = "", what: str = "", unit: str = "x"
) -> Result:
    """A result that divides two times of one interleaved run."""
    return result(
        name, over / max(under, 1e-9), unit=unit, what=what, ratio_to=BASELINE, samples=samples, note=note
    )


def us(name: str, what: str, value: float, samples: int) -> Result:
    """A result in microseconds."""
    return result(name, value, unit="us", what=what, samples=samples)


def run(
    groups: Sequence[str] = GROUPS,
    *,
    quick: bool = False,
    seed: int = 0,
    command: Sequence[str] | None = None,
    report: Progress | None = None,
) -> Document:
    """Measures the budgets of `groups`, in order of GROUPS.  Raises ValueError for an unknown group."""
    check_groups(groups, GROUPS)
    wanted = [group for group in GROUPS if group in groups]
    began = time.monotonic()
    size = QUICK if quick else FULL
    cost = clock_cost_ns()
    document = Document(meta=meta(wanted, quick=quick, seed=seed, cost_ns=cost, command=command), results=[])
    pair: Pair | None = None
    with quiet_collector():
        for index, group in enumerate(wanted):

            def tell(words: str, share: float, index: int = index) -> None:
                if report is not None:
                    report(words, (index + share) / len(wanted))

            tell(group, 0.0)
            if group in ("allocate", "probe", "gc") and pair is None:
                pair = fill_pair(size, tell)
            if group == "allocate":
                assert pair is not None
                found = measure_allocate(pair, size, cost, tell)
            elif group == "probe":
                assert pair is not None
                found = measure_probe(pair, size, cost, tell)
            elif group == "gc":
                assert pair is not None
                found = measure_gc(pair)
                pair = None
            elif group in ("nodes", "blocks"):
                pair = None
                found = measure_growth(group, size, cost, tell)
            elif group == "metadata":
                pair = None
                found = measure_metadata(size)
            elif group == "packing":
                found = measure_packing(size, tell)
            else:
                from kvslot.benchmarks.replays import measure_replays

                found = measure_replays(quick=quick, seed=seed, report=tell, skipped=document.meta.skipped)
            document.results += found
    document.meta.wall_s = round(time.monotonic() - began, 1)
    return document
