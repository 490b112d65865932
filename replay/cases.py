"""A list of runs, carried out one after the other into one `ReplayResult`.

What several runs need is made once: a trace's token ids and the nodes of its tree are cached while runs of that trace
follow each other, and a policy whose figures do not depend on the block size runs once for all of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from kvslot.replay.clairvoyant import Nodes
from kvslot.replay.engine import Outcome, ReplayConfig, max_concurrent_sessions, replay
from kvslot.replay.metrics import (
    Compacted,
    Comparison,
    Picture,
    ReplayResult,
    Row,
    Run,
    TraceMeta,
    meta,
    quiet_nights,
)
from kvslot.replay.page.findings import worth
from kvslot.replay.policies import Compaction, Shrinking
from kvslot.replay.recorder import usable_run
from kvslot.replay.traces import Expander, Trace

if TYPE_CHECKING:
    from kvslot.replay.processes import ProcessSettings

WITHOUT_BLOCKS: Final = frozenset({"contiguous", "token"})
"""Policies that hand out single slots or single runs: the block size is nothing to them."""

Report = Callable[[str, float], None]
"""Called with what is going on and the share of all work that is done, 0..1."""


COMPACTED_AT: Final = 0.6
"""Share of the slots in use in the picture of a pool before compaction: what a quiet night leaves of a full one."""


class Case(NamedTuple):
    """One run to come."""

    trace: Trace
    config: ReplayConfig
    via: Literal["inproc", "socket"] = "inproc"
    """How the policy is reached: in this process, or by real client processes of a daemon."""
    beside: bool = False
    """Via a socket: run it in this process as well, so that the figures can be compared."""
    compact: bool = False
    """In this process, `slotted` alone: picture the pool at the end before and after compaction to rest."""


def means(case: Case, compaction: Compaction) -> list[Case]:
    """The same run three times, to tell what each of the means is worth: placement alone, with eviction that prefers to
    empty blocks, and with moves on top of that."""
    return [
        case._replace(config=msgspec.structs.replace(case.config, emptying=False)),
        case._replace(compact=case.via == "inproc"),
        case._replace(config=msgspec.structs.replace(case.config, compaction=compaction)),
    ]


def clock(trace: Trace, config: ReplayConfig) -> str:
    """How requests arrive, in words."""
    if config.closed_loop or (trace.t is None and config.rate is None):
        return f"closed loop, {config.live} live"
    if config.rate is not None:
        return f"Poisson, {config.rate:g}/s"
    return "the trace's own"


def run_cases(
    cases: Sequence[Case],
    *,
    seed: int,
    settings: dict[str, float | int | str | bool | None],
    with_optimum: bool = True,
    with_max_live: bool = False,
    max_live_limit: int = 1024,
    report: Report | None = None,
    command: list[str] | None = None,
    processes: ProcessSettings | None = None,
) -> ReplayResult:
    """Run all cases in order (put those of one trace next to each other).

    Raises what `replay` raises; a case that cannot be set up (an eviction that a policy lacks, an unknown policy)
    raises before anything that follows it has run.  `processes` says how cases via a socket are carried out."""
    if any(case.via == "socket" for case in cases):
        from kvslot.replay.processes import ProcessSettings, check

        processes = processes or ProcessSettings()
        for case in cases:
            if case.via == "socket":
                check(case.config, processes)
    began = time.perf_counter()
    result = ReplayResult(
        meta=meta(seed=seed, traces=_traces(cases), settings=settings, command=command), rows=[], runs=[]
    )
    weights = [
        (sum(case.trace.prompt_len) + 2_000 * len(case.trace)) * (4 if case.via == "socket" else 1)
        for case in cases
    ]
    whole = sum(weights) or 1
    expander: Expander | None = None
    expanded: Trace | None = None
    nodes: dict[bool, Nodes] = {}
    done_before: dict[bytes, tuple[Run, list[Row]]] = {}
    done = 0
    for (trace, config, via, beside, compact), weight in zip(cases, weights, strict=True):
        share = config.engines if config.sharing == "partitioned" else 1
        words = f"{trace.name} · {config.policy} · block {config.block_size}" + (
            f" · {share} pools" if share > 1 else ""
        )
        if config.compaction != "off":
            words += f" · compaction {config.compaction}"
        if via == "socket" and processes is not None:
            words += f" · {processes.clients} processes"

        def tell(part: float, words: str = words, done: int = done, weight: int = weight) -> None:
            if report is not None:
                report(words, (done + weight * part) / whole)

        tell(0.0)
        if trace is not expanded:
            expander, expanded = Expander(trace), trace
            nodes.clear()
            done_before.clear()
            gc.collect()
        assert expander is not None
        rounds = config.hours is not None
        if with_optimum and rounds not in nodes:
            nodes[rounds] = Nodes(trace, rounds=rounds)
        key = _same(config, block_size=1) if config.policy in WITHOUT_BLOCKS else b""
        index = len(result.runs)
        if key and key in done_before:
            run, rows = done_before[key]
            run = msgspec.structs.replace(run, block_size=config.block_size)
            rows = [msgspec.structs.replace(row, block_size=config.block_size, run=index) for row in rows]
        elif via == "socket":
            from kvslot.replay.processes import replay_processes

            assert processes is not None
            run, rows, *_ = replay_processes(
                trace,
                config,
                processes,
                index=index,
                nodes=nodes[rounds] if with_optimum else None,
                progress=tell,
            )
            assert run.processes is not None
            told = run.processes
            if beside:
                alone = replay(trace, config, expander=expander)
                told = msgspec.structs.replace(told, beside=_compare(rows, alone.rows))
            result.meta.via = "socket"
            result.meta.processes.append(told)
        else:
            outcome = replay(
                trace,
                config,
                expander=expander,
                index=index,
                nodes=nodes[rounds] if with_optimum else None,
                progress=tell,
            )
            run, rows = outcome.run, outcome.rows
            if compact:
                run.compacted = compacted(outcome)
            if with_max_live:
                most = max_concurrent_sessions(trace, config, limit=max_live_limit, expander=expander)
                rows = [msgspec.structs.replace(row, max_concurrent_sessions=most) for row in rows]
            if key:
                done_before[key] = run, rows
        result.runs.append(run)
        result.rows += rows
        done += weight
        tell(0.0, done=done)
    result.meta.quiet_nights = quiet_nights(result.runs)
    result.meta.compaction = worth(result.rows)
    result.meta.wall_s = round(time.perf_counter() - began, 3)
    return result


def compacted(outcome: Outcome, share: float = COMPACTED_AT) -> Compacted | None:
    """What compaction to rest makes of the pool at a run's end, once the policy has evicted it down to `share`.

    None where there are several pools, or none that can be compacted."""
    if len(outcome.policies) != 1:
        return None
    policy = outcome.policies[0]
    if not isinstance(policy, Shrinking):
        return None
    now = outcome.recorder.end
    policy.shrink(share, now)
    before, seen = policy.gauges(), policy.blocks()
    moved = policy.counters().moved_tokens
    policy.rest(now)
    after = policy.gauges()
    size = outcome.run.block_size
    return Compacted(
        occupancy_pct=round(100 * before.tokens_held / before.usable, 3),
        before=Picture(time_s=now, progress=1.0, blocks=seen),
        after=Picture(time_s=now, progress=1.0, blocks=policy.blocks()),
        blocks_free_before=(before.usable - before.blocks_in_use_slots) // size,
        blocks_free_after=(after.usable - after.blocks_in_use_slots) // size,
        usable_run_pct_before=round(100 * usable_run(before), 3),
        usable_run_pct_after=round(100 * usable_run(after), 3),
        moved_tokens=policy.counters().moved_tokens - moved,
    )


COMPARED: Final = ("hit_tokens_pct", "internal_fragmentation_pct", "refusals_per_hour", "preemptions")
"""What a run by real processes is held against a run in one process by."""


def _compare(real: list[Row], alone: list[Row]) -> list[Comparison]:
    found: list[Comparison] = []
    if not real or not alone:
        return found
    for figure in COMPARED:
        a, b = (getattr(rows[0], figure) for rows in (real, alone))
        if figure == "internal_fragmentation_pct":
            a, b = a.mean, b.mean
        found.append(Comparison(figure=figure, socket=a, inproc=b))
    return found


def _same(config: ReplayConfig, **blind: str | int) -> bytes:
    """A key that is equal for configurations that differ in `blind` fields only."""
    return msgspec.json.encode(msgspec.to_builtins(config) | blind)


def _traces(cases: Sequence[Case]) -> list[TraceMeta]:
    seen: dict[tuple[str, int], TraceMeta] = {}
    for trace, config, *_ in cases:
        seen.setdefault(
            (trace.digest, len(trace)),
            TraceMeta(
                name=trace.name,
                kind=trace.header.kind,
                digest=trace.digest,
                requests=len(trace),
                prompt_tokens=sum(trace.prompt_len),
                output_tokens=sum(trace.total) - sum(trace.prompt_len),
                clock=clock(trace, config),
                note=trace.header.note,
            ),
        )
    return list(seen.values())
