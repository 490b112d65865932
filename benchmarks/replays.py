"""The rows of `bench core` that recorded traces give: fragmentation, extents, reserved room, pseudo-OOM.

Each trace is replayed once at block 16 and once at block 528 through `slotted`, with a pool of 1.5 times the most
distinct tokens that run at once and 64 sequences live at most.  A row shows the worst trace, and its note which it was.

Unsplit: the same run with `fill_holes` off, so that no piece is split to fill a hole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from kvslot import replay
from kvslot.benchmarks.report import Result, result
from kvslot.replay import policies

BLOCK_SIZES: Final = (16, 528)
LIVE: Final = 64
POOL_FACTOR: Final = 1.5
QUICK: Final = ("sgd_a", "mtbench101_a", "taubench_airline_a")
LONG_TRACE: Final = "mix200_a"
LONG_HOURS: Final = 72.0
MOST_TOKENS: Final = 200_000_000
"""Prompt tokens from which a trace is left to `kvslotctl replay`: it alone would take half an hour."""

Progress = Callable[[str, float], None]


class Seen(NamedTuple):
    """What one replay showed."""

    trace: str
    fragmentation_pct: float
    extents_per_1k: float
    extents_unsplit: float
    reserved_pct: float
    reserved_limit_pct: float
    """64 x 1.25 quanta, of the pool."""
    pseudo_oom: int


def whole_run(rows: list[replay.Row]) -> replay.Row:
    """The row of the phase that covers everything."""
    return next(row for row in rows if row.phase == "all")


def look(trace: replay.Trace, block_size: int, seed: int, expander: replay.Expander) -> Seen:
    """Replays `trace`, twice: as it is, and unsplit."""
    config = replay.ReplayConfig(
        policy="slotted", block_size=block_size, pool_tokens=1 << 20, live=LIVE, seed=seed
    )
    pool_tokens = int(POOL_FACTOR * replay.peak_live_tokens(trace, config))
    # Padding takes a block, and a pool has at least one block to give.
    pool_tokens = max(pool_tokens, 3 * block_size)
    config = msgspec.structs.replace(config, pool_tokens=pool_tokens)
    row = whole_run(replay.replay(trace, config, expander=expander).rows)
    unsplit = msgspec.structs.replace(config, fill_holes=False)
    whole = whole_run(replay.replay(trace, unsplit, expander=expander).rows)
    quantum = min(32, block_size)
    return Seen(
        trace.name,
        row.internal_fragmentation_pct.mean,
        row.extents_per_1k_tokens,
        whole.extents_per_1k_tokens,
        row.reserved_pct.mean,
        100 * LIVE * 1.25 * quantum / row.usable_tokens,
        row.pseudo_oom,
    )


def measure_replays(*, quick: bool, seed: int, report: Progress, skipped: dict[str, str]) -> list[Result]:
    """All rows; a trace or a policy that is not installed is named in `skipped`."""
    if not policies.available("slotted"):
        skipped["replay"] = "the policy `slotted` is not installed"
        return []
    names = [name for name in replay.bundled() if not quick or name in QUICK]
    if not names:
        skipped["replay"] = "no recorded traces are installed"
        return []
    seen: dict[int, list[Seen]] = {size: [] for size in BLOCK_SIZES}
    traces = [replay.load(replay.find(name)) for name in names]
    for trace in traces:
        if sum(trace.prompt_len) > MOST_TOKENS:
            skipped[f"replay of {trace.name}"] = (
                f"more than {MOST_TOKENS:,} prompt tokens; see docs/results.md"
            )
    traces = [trace for trace in traces if sum(trace.prompt_len) <= MOST_TOKENS]
    names = [trace.name for trace in traces]
    weights = [sum(trace.prompt_len) + 2_000 * len(trace) for trace in traces]
    long = [] if quick else [LONG_TRACE]
    total = sum(weights) * (2 if long else 1)
    done = 0
    for trace, weight in zip(traces, weights, strict=True):
        expander = replay.Expander(trace)
        for size in BLOCK_SIZES:
            report(f"replay {trace.name}, block {size}", done / total)
            seen[size].append(look(trace, size, seed, expander))
            done += weight // 2
    results = []
    for size in BLOCK_SIZES:
        found = seen[size]
        runs = f"{len(found)} traces"
        worst = max(found, key=lambda each: each.fragmentation_pct)
        results.append(
            result(
                f"fragmentation_pct_{size}",
                worst.fragmentation_pct,
                samples=len(found),
                note=f"{runs}, worst: {worst.trace}",
            )
        )
        worst = max(found, key=lambda each: each.extents_per_1k / each.extents_unsplit)
        results.append(
            result(
                f"extents_growth_{size}",
                worst.extents_per_1k / worst.extents_unsplit,
                samples=len(found),
                note=f"{runs}, worst: {worst.trace}, {worst.extents_per_1k:.2f} per 1k tokens "
                f"against {worst.extents_unsplit:.2f}",
            )
        )
        worst = max(found, key=lambda each: each.reserved_pct / each.reserved_limit_pct)
        results.append(
            result(
                f"reserved_share_{size}",
                worst.reserved_pct / worst.reserved_limit_pct,
                samples=len(found),
                note=f"{runs}, worst: {worst.trace}, {worst.reserved_pct:.3f} % of the pool",
            )
        )
    for size in BLOCK_SIZES:
        for each in seen[size]:
            results.append(
                result(
                    f"fragmentation_pct_{size}_{each.trace}",
                    each.fragmentation_pct,
                    unit="%",
                    what=f"internal fragmentation, mean; extents per 1k tokens {each.extents_per_1k:.2f}",
                )
            )
    refused = [each for size in BLOCK_SIZES for each in seen[size] if each.pseudo_oom]
    results.append(
        result(
            "pseudo_oom",
            sum(each.pseudo_oom for each in refused),
            samples=sum(map(len, seen.values())),
            note=", ".join(sorted({each.trace for each in refused})) or f"{len(names)} traces, none had any",
        )
    )
    for name in long:
        if name not in names:
            skipped[f"replay of {name} for {LONG_HOURS:g} hours"] = "the trace is not installed"
            continue
        trace = traces[names.index(name)]

        def tell(share: float, name: str = name) -> None:
            report(f"replay {name} for {LONG_HOURS:g} simulated hours", 0.5 + 0.5 * share)

        results.append(long_run(trace, seed, tell))
    return results


def long_run(trace: replay.Trace, seed: int, tell: Callable[[float], None]) -> Result:
    """Goes round the trace for simulated days."""
    config = replay.ReplayConfig(policy="slotted", pool_tokens=1 << 20, live=LIVE, seed=seed)
    pool_tokens = int(POOL_FACTOR * replay.peak_live_tokens(trace, config))
    config = msgspec.structs.replace(config, pool_tokens=pool_tokens, hours=LONG_HOURS)
    row = whole_run(replay.replay(trace, config, progress=tell).rows)
    note = (
        f"{row.requests:,} requests, {row.refusals:,} told LATER, "
        f"fragmentation {row.internal_fragmentation_pct.mean:.3f} %, "
        f"{row.extents_per_1k_tokens:.1f} extents per 1k tokens"
    )
    return result("pseudo_oom_72h", row.pseudo_oom, samples=row.requests, note=note)
