"""Results made up for the page's tests: plausible, the same each time, and as strange as a test asks for."""

from __future__ import annotations

from collections.abc import Sequence

from kvslot.replay.metrics import (
    PHASES,
    Machine,
    Meta,
    Picture,
    Quantiles,
    ReplayResult,
    Row,
    Run,
    Series,
    Spread,
    TraceMeta,
)

POOL = 30_000
POLICIES = ("contiguous", "paged", "hashed", "token", "slotted")


def series(points: int, waste: float = 0.0) -> Series:
    """A pool that fills up, then stays full; `waste`: share of it that is stranded."""
    made = Series(**{name: [] for name in Series.__struct_fields__})
    for i in range(points):
        full = min(1.0, (i + 1) / (points / 4))
        held = int(POOL * full * (1 - waste))
        made.time_s.append(2.0 * (i + 1))
        made.internal_fragmentation_pct.append(100 * waste)
        made.private.append(held // 10)
        made.cached.append(held - held // 10)
        made.reserved.append(0)
        for name in ("duplicates", "peeled", "fenced", "quarantined", "moving"):
            getattr(made, name).append(0)
        made.free.append(POOL - int(POOL * full))
        made.tokens_held.append(held)
        made.evictable.append(held // 2)
        made.blocks_in_use_slots.append(int(POOL * full))
        made.live_sequences.append(64)
        made.largest_free_run.append(500)
        made.hit_tokens_pct.append(None if i % 7 == 0 else 50.0)
        made.refusals.append(i % 3)
        made.pseudo_oom.append(0)
        made.preemptions.append(0)
    return made


def run(
    policy: str, block_size: int, *, trace: str, points: int, cells: int, sharing: str, engines: int
) -> Run:
    waste = 0.1 if policy == "paged" else 0.0
    # Fills that look random and are the same each time: a picture must not pack better than a real one.
    blocks = bytes((i * i * 7 + i * 31 + block_size) % 256 for i in range(cells))
    return Run(
        trace=trace,
        policy=policy,
        block_size=block_size,
        sharing=sharing,
        engines=engines,
        routing="random",
        eviction="lru",
        live=64,
        pool_tokens=POOL,
        usable_tokens=POOL,
        wall_s=0.1,
        series=series(points, waste),
        pictures=[Picture(time_s=10.0 * k, progress=k / 6, blocks=blocks) for k in range(6)] if cells else [],
    )


def row(index: int, of: Run, phase: str = "all", **changes: object) -> Row:
    """A row whose figures differ from run to run and from field to field, so that each can be looked for."""
    base = 1_000_000 + 1009 * index + (0 if phase == "all" else 500_000)
    rank = POLICIES.index(of.policy) if of.policy in POLICIES else 0
    values: dict[str, object] = {
        "run": index,
        "trace": of.trace,
        "policy": of.policy,
        "block_size": of.block_size,
        "sharing": of.sharing,
        "engines": of.engines,
        "phase": phase,
        "routing": of.routing,
        "eviction": of.eviction,
        "live": of.live,
        "pool_tokens": of.pool_tokens,
        "usable_tokens": of.usable_tokens,
        "start_s": 0.0,
        "end_s": 7200.0,
        "requests": 1996,
        "finished": base + 1,
        "never": base + 2,
        "stuck": 0,
        "prompt_tokens": 10_000_000,
        "hit_tokens": base + 3,
        "internal_fragmentation_pct": Spread(8.0 if of.policy == "paged" else 0.5, 33.25),
        "reserved_pct": Spread(3.25, 60.5),
        "occupancy_pct": Spread(81.5, 97.25),
        "hit_tokens_pct": 40.0 + 5 * rank,
        "hit_tokens_pct_ideal": 90.125,
        "hit_tokens_pct_optimum": 80.5,
        "lost_hit_tokens": base + 4,
        "evicted_hit_tokens": base + 5,
        "usable_pct": 55.5,
        "refusals": base + 6,
        "refusals_per_hour": 123.45,
        "pseudo_oom": base + 7,
        "pseudo_oom_per_hour": 12.5,
        "refused_room_elsewhere": base + 8,
        "preemptions": base + 9,
        "max_concurrent_sessions": base + 10,
        "alloc_us": Quantiles(4.5, 40.25, 1234.0),
        "cpu_us_per_request": 20.0 + 10 * rank,
        "grow_us_per_request": 7.5,
        "extents_per_1k_tokens": 3.5 + rank,
        "largest_free_run": Spread(base + 11.0, base + 12.0),
        "largest_free_run_min": base + 13,
        "copied_tokens": base + 14,
        "moved_tokens": base + 15,
        "evicted_tokens": base + 16,
        "duplicate_tokens": Spread(base + 17.0, base + 18.0),
    }
    return Row(**(values | changes))  # type: ignore[arg-type]


def result(
    *,
    traces: Sequence[str] = ("chat",),
    policies: Sequence[str] = POLICIES,
    block_sizes: Sequence[int] = (16, 528),
    sharings: Sequence[str] = ("shared",),
    phases: Sequence[str] = ("all", "cold"),
    points: int = 300,
    cells: int = 1875,
    command: str = "kvslotctl replay chat",
    note: str = "made up",
) -> ReplayResult:
    """All combinations, in the order in which the command replays them."""
    made = ReplayResult(
        meta=Meta(
            schema=1,
            version="9.8.7",
            command=command,
            seed=4711,
            started="2026-01-02T03:04:05+00:00",
            wall_s=12.5,
            machine=Machine(system="Linux x86_64", processor="A processor", cpus=2, python="3.11.9"),
            traces=[
                TraceMeta(
                    name=name,
                    kind="made up",
                    digest="ab" * 32,
                    requests=1996,
                    prompt_tokens=1_332_773,
                    output_tokens=49_058,
                    clock="closed loop, 64 live",
                    note=note,
                )
                for name in traces
            ],
            phases=PHASES,
            settings={"live": 64, "rate": None},
        ),
        rows=[],
        runs=[],
    )
    engines = 4 if len(sharings) > 1 else 1
    for trace in traces:
        for block_size in block_sizes:
            for sharing in sharings:
                for policy in policies:
                    one = run(
                        policy,
                        block_size,
                        trace=trace,
                        points=points,
                        cells=cells,
                        sharing=sharing,
                        engines=engines,
                    )
                    made.rows += [row(len(made.runs), one, phase) for phase in phases]
                    made.runs.append(one)
    return made
