"""What a pool's settings would better be for a recorded load: replays, compared one by one, and what follows from them.

    present settings ─► replay ─┬─ block sizes ─┬─ one setting changed at a time, ─► advice ─► all advised together
                                ├─ eviction     │   the others as they are
                                ├─ append       │
                                ├─ pool size    │
                                ├─ watermark    │
                                ├─ compaction   │
                                └─ other ways of managing the cache, for comparison

Every replay is of the same requests in the same order.  Hits are compared request by request: a difference counts where
it is worth something (`HITS`) and more than twice its standard error over `BATCHES` stretches of the trace, so that one
lucky conversation decides nothing.  What the settings cannot change, or the load does not tell, is said instead of
guessed.  The rule for each setting stands in its function below, and in docs/replay.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvslot.replay.engine import Outcome, ReplayConfig, peak_live_tokens, replay
from kvslot.replay.metrics import Row, machine
from kvslot.replay.policies import evictions
from kvslot.replay.traces import Expander, Trace

BLOCK_SIZES: Final = (8, 16, 32, 64, 128, 256)
POOL_FACTORS: Final = (0.5, 0.75, 1.5, 2.0)
OTHERS: Final = ("hashed", "token", "paged")
"""Ways of managing the cache beside kvslot's own."""
HITS: Final = 0.5
"""Percentage points of prompt tokens found that a change has to be worth."""
NO_LOSS: Final = 0.1
"""Points that a change for another reason may cost."""
WASTE: Final = 0.5
"""Percent of the pool that another block size has to give back."""
GROW: Final = 1.0
"""Points of hits that more memory has to be worth."""
FEWER_EXTENTS: Final = 0.1
"""Share of the pieces of sequences that copying has to save."""
COPIES: Final = 0.01
"""Share of the prompt tokens that may be copied for it."""
RUNS: Final = 5.0
"""Points of the free memory in long runs that moves have to be worth."""
TROUBLE: Final = 0.01
"""Share of requests that wait for memory or are preempted, from which on memory is short."""
BATCHES: Final = 20
REQUESTS: Final = 20_000
"""Replayed of a trace unless said otherwise: some seconds a run."""
LIVE_CLOCKED: Final = 4096
"""With a clock, the pool and not a number limits what runs."""
ENGINES_MOST: Final = 16
FEW: Final = 200
"""Requests below which advice is a guess."""

Report = Callable[[str, float], None]
Figures = dict[str, float | int | str | None]


class Present(msgspec.Struct, frozen=True, kw_only=True):
    """The settings to judge.  Sizes in slots."""

    block_size: int
    pool_tokens: int
    eviction: str = "lru"
    append: str = "chain"
    compaction: str = "idle"
    watermark: float = 0.02
    page: int = 1
    slot_bytes: int = 0
    engines: int = 1
    opaque: bool = False
    assumed: tuple[str, ...] = ()
    """Settings of which nothing was known."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What to do about one setting."""

    setting: str
    now: str
    advised: str
    change: bool
    reason: str
    figures: Figures = {}


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One replay, beside that of the present settings."""

    what: str
    gain: float
    """Hits more than with the present settings, in percentage points."""
    gain_error: float
    """Its standard error."""
    row: Row


class AdviceResult(msgspec.Struct, frozen=True, kw_only=True):
    """All that `advise` found."""

    meta: dict[str, Any]
    advice: list[Advice]
    tried: list[Tried]

    def to_builtins(self) -> dict[str, Any]:
        """For JSON: `meta`, `advice` and `tried`, whose rows are those of `kvslotctl replay`."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def present_of(trace: Trace, **said: int | float | str | None) -> Present:
    """The settings of the pool that a trace was recorded from; what is `said` goes before; the rest is assumed."""
    load = trace.header.recorded
    pool = load.pool if load is not None else None
    known: dict[str, Any] = {}
    if pool is not None and load is not None:
        known = {
            "block_size": pool.block_size,
            "pool_tokens": pool.blocks * pool.block_size,
            "eviction": pool.eviction,
            "append": pool.append,
            "compaction": pool.compaction,
            "watermark": round(pool.watermark / pool.usable, 4) if pool.usable else 0.02,
            "page": math.lcm(*pool.pages) if pool.pages else 1,
            "slot_bytes": pool.slot_bytes,
            "engines": load.engines,
            "opaque": pool.granularity == "opaque",
        }
    known |= {name: value for name, value in said.items() if value is not None}
    assumed = tuple(
        name
        for name in ("block_size", "pool_tokens", "eviction", "append", "compaction", "watermark")
        if name not in known
    )
    known.setdefault("block_size", 16)
    if "pool_tokens" not in known:
        endless = ReplayConfig(policy="slotted", block_size=known["block_size"], pool_tokens=1 << 28)
        peak = peak_live_tokens(trace, endless)
        known["pool_tokens"] = max(int(1.5 * peak), 4 * known["block_size"])
    if known["block_size"] % known.get("page", 1):
        known["page"] = 1  # of engines that were gone, and not of this pool
    return Present(assumed=assumed, **known)


class _Runs:
    """Replays of one trace, each made once."""

    def __init__(self, trace: Trace, base: ReplayConfig, report: Report | None, planned: int) -> None:
        self.trace = trace
        self.base = base
        self.tried: list[Tried] = []
        self._expander = Expander(trace)
        self._report = report
        self._planned = planned
        self._done: dict[bytes, tuple[Row, npt.NDArray[np.int64]]] = {}
        self.now, self._hits = self._run("the present settings", base)
        self.tried.append(Tried(what="now", gain=0.0, gain_error=0.0, row=self.now))

    def _run(self, words: str, config: ReplayConfig) -> tuple[Row, npt.NDArray[np.int64]]:
        key = msgspec.json.encode(config)
        if key not in self._done:
            done = len(self._done)

            def tell(share: float) -> None:
                if self._report is not None:
                    self._report(words, min(1.0, (done + share) / self._planned))

            tell(0.0)
            outcome = replay(self.trace, config, expander=self._expander, progress=tell)
            if not outcome.rows:
                raise ValueError("no request of the trace fits this pool")
            self._done[key] = outcome.rows[0], self._found(outcome)
        return self._done[key]

    def _found(self, outcome: Outcome) -> npt.NDArray[np.int64]:
        """Hit tokens by request; none of those that were dropped."""
        hits = np.zeros(len(self.trace), dtype=np.int64)
        hits[np.frombuffer(outcome.recorder.number, dtype=np.int64)] = np.frombuffer(
            outcome.recorder.hit, dtype=np.uint32
        )
        return hits

    def try_(self, what: str, **changes: Any) -> Tried | None:
        """A replay with these settings changed; None where they cannot be."""
        try:
            config = msgspec.structs.replace(self.base, **changes)
            row, hits = self._run(what, config)
        except ValueError:
            return None
        prompts = max(1, sum(self.trace.prompt_len))
        parts = np.array([part.sum() for part in np.array_split(hits - self._hits, BATCHES)])
        error = 100 * math.sqrt(BATCHES) * float(parts.std(ddof=1)) / prompts
        tried = Tried(
            what=what,
            gain=round(100 * float(parts.sum()) / prompts, 4),
            gain_error=round(error, 4),
            row=row,
        )
        self.tried.append(tried)
        return tried


def sure(tried: Tried, least: float) -> bool:
    """Whether a gain is worth something and no chance."""
    return tried.gain >= least and tried.gain > 2 * tried.gain_error


def wasted(row: Row) -> float:
    """Slots inside blocks in use that hold nothing, in percent of the pool."""
    share = min(0.99, row.internal_fragmentation_pct.mean / 100)
    return row.occupancy_pct.mean * share / (1 - share)


def trouble(row: Row) -> float:
    """Share of the requests that had to wait for memory, were preempted or dropped."""
    return (row.refusals + row.preemptions + row.never + row.stuck) / max(1, row.requests)


def advise(
    trace: Trace,
    present: Present,
    *,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    live: int | None = None,
    rate: float | None = None,
    prefill_us: float | None = None,
    decode_ms: float | None = None,
    seed: int = 0,
    report: Report | None = None,
) -> AdviceResult:
    """Replays `trace` and says what would be better than `present`.

    `live`, `rate`, `prefill_us`, `decode_ms`: as of `replay`; None: what the recording tells, else what `replay` takes.
    Raises ValueError where the present settings cannot be replayed."""
    load = trace.header.recorded
    clocked = trace.t is not None or rate is not None
    prefill = prefill_us or (load.prefill_us if load is not None else None) or 100.0
    decode = decode_ms or (load.decode_ms if load is not None else None) or 20.0
    base = ReplayConfig(
        policy="slotted",
        block_size=present.block_size,
        pool_tokens=present.pool_tokens,
        live=live or (LIVE_CLOCKED if clocked else 64),
        rate=rate,
        eviction=present.eviction,
        watermark=present.watermark,
        append=present.append,
        page=present.page,
        prefill_us=prefill,
        decode_ms=decode,
        seed=seed,
    )
    sizes = [] if present.opaque else [size for size in sorted({*block_sizes}) if size % present.page == 0]
    planned = 1 + len(sizes) + 2 + 1 + len(POOL_FACTORS) + 2 + len(OTHERS) + 1
    runs = _Runs(trace, base, report, planned)
    advice = [
        _block_size(runs, present, sizes),
        _eviction(runs, present),
        _append(runs, present),
        _pool(runs, present),
        _watermark(runs, present),
        _compaction(runs, present),
    ]
    if present.engines > 1:
        advice.append(_sharing(runs, present))
    _others(runs, present)
    together = _together(runs, present, advice)
    if together is not None:
        advice.append(together)
    if report is not None:
        report("", 1.0)
    return AdviceResult(
        meta={
            "trace": trace.name,
            "digest": trace.digest,
            "requests": len(trace),
            "prompt_tokens": sum(trace.prompt_len),
            "output_tokens": sum(trace.total) - sum(trace.prompt_len),
            "clock": "order only" if not clocked else "Poisson" if rate is not None else "the trace's own",
            "live": base.live,
            "prefill_us": prefill,
            "decode_ms": decode,
            "seed": seed,
            "present": msgspec.to_builtins(present),
            "recorded": None if load is None else msgspec.to_builtins(load),
            "live_hit_tokens_pct": _live_hits(trace),
            "cautions": _cautions(trace, present, runs.now),
            "machine": msgspec.to_builtins(machine()),
        },
        advice=advice,
        tried=runs.tried,
    )


def _live_hits(trace: Trace) -> float | None:
    """What the daemon found when it was recorded, if the whole recording is replayed."""
    load = trace.header.recorded
    if load is None or not load.prompt_tokens or load.requests != len(trace):
        return None
    return round(100 * load.hit_tokens / load.prompt_tokens, 4)


def _cautions(trace: Trace, present: Present, now: Row) -> list[str]:
    """What to know before one acts on it."""
    found: list[str] = []
    if present.assumed:
        found.append(
            f"the trace does not say and was not told, so it is assumed: {', '.join(present.assumed)}"
        )
    if present.opaque:
        found.append(
            "an opaque pool finds whole blocks only: `hashed` in the table is nearer to it than the replays"
        )
    if len(trace) < FEW:
        found.append(f"{len(trace)} requests are few: record longer before you act on this")
    if trace.t is None:
        found.append(
            "the trace knows the order of its requests only, so nothing here is about load over the day"
        )
    if not now.evicted_tokens:
        found.append("nothing was evicted: the pool never ran full, or the recording is short against it")
    load = trace.header.recorded
    if load is not None:
        if not load.complete:
            found.append("the recorder was killed: what it said last is missing")
        if load.lost_requests:
            found.append(f"the recorder lost {load.lost_requests:,} requests")
        if load.hit_tokens_before > 0.05 * max(1, load.hit_tokens):
            share = 100 * load.hit_tokens_before / load.hit_tokens
            found.append(f"{share:.0f} % of the hits were cached before the recording: replays begin empty")
    return found


def _advice(setting: str, now: str, advised: str, reason: str, figures: Figures | None = None) -> Advice:
    return Advice(
        setting=setting, now=now, advised=advised, change=advised != now, reason=reason, figures=figures or {}
    )


def _pct(value: float) -> str:
    return f"{value:.2f} %"


def _block_size(runs: _Runs, present: Present, sizes: Sequence[int]) -> Advice:
    """Among the sizes that find nearly as much as the best and make nobody wait more, the one that wastes least.

    Less than WASTE percent of the pool is no reason to change.
    """
    name = "block_size"
    if present.opaque:
        reason = (
            "an opaque layout's block is what the engine reads and writes: its size is the engine's to choose"
        )
        return _advice(name, str(present.block_size), str(present.block_size), reason)
    rows = {present.block_size: runs.now}
    for size in sizes:
        if size != present.block_size:
            tried = runs.try_(f"block_size {size}", block_size=size)
            if tried is not None:
                rows[size] = tried.row
    calm = min(trouble(row) for row in rows.values()) + TROUBLE / 2
    good = {size: row for size, row in rows.items() if trouble(row) <= calm}
    best = max(row.hit_tokens_pct for row in good.values())
    good = {size: row for size, row in good.items() if row.hit_tokens_pct >= best - NO_LOSS}
    waste = {size: wasted(row) for size, row in good.items()}
    least = min(waste.values())
    fine = [size for size in good if waste[size] <= least + WASTE]
    now = runs.now
    said = str(present.block_size)
    figures: Figures = {}
    for size, row in sorted(rows.items()):
        figures[f"hit_tokens_pct_{size}"] = row.hit_tokens_pct
        figures[f"wasted_pool_pct_{size}"] = round(wasted(row), 4)
    if present.block_size in fine:
        wastes, hits = [wasted(row) for row in rows.values()], [row.hit_tokens_pct for row in rows.values()]
        reason = (
            f"blocks of {min(rows)} to {max(rows)} strand {_pct(min(wastes))} to {_pct(max(wastes))} of the pool and "
            f"find {_pct(min(hits))} to {_pct(max(hits))}; {said} strands {_pct(wasted(now))} and finds "
            f"{_pct(now.hit_tokens_pct)}"
        )
        return _advice(name, said, said, reason, figures)
    # Of those that are as good the largest: fewer blocks to keep books on.
    size = max(fine)
    row = rows[size]
    reason = (
        f"strands {_pct(wasted(row))} of the pool inside blocks where {said} strands {_pct(wasted(now))}, finds "
        f"{_pct(row.hit_tokens_pct)} against {_pct(now.hit_tokens_pct)}, and {100 * trouble(row):.1f} % of requests "
        f"had to wait against {100 * trouble(now):.1f} %"
    )
    return _advice(name, said, str(size), reason, figures)


def _eviction(runs: _Runs, present: Present) -> Advice:
    """The order that finds most, where it is HITS points more and no chance."""
    name = "eviction"
    if not runs.now.evicted_tokens:
        reason = "nothing was evicted in this replay, so the order made no difference"
        return _advice(name, present.eviction, present.eviction, reason)
    figures: Figures = {f"hit_tokens_pct_{present.eviction}": runs.now.hit_tokens_pct}
    best: Tried | None = None
    for order in evictions("slotted"):
        if order == present.eviction:
            continue
        tried = runs.try_(f"eviction {order}", eviction=order)
        if tried is None:
            continue
        figures[f"hit_tokens_pct_{order}"] = tried.row.hit_tokens_pct
        if best is None or tried.gain > best.gain:
            best = tried
    if best is None or not sure(best, HITS):
        reason = f"no other order finds {HITS:g} points more with certainty"
        if best is not None:
            reason += f": {best.row.eviction}, the best of them, {best.gain:+.2f} ± {best.gain_error:.2f}"
        return _advice(name, present.eviction, present.eviction, reason, figures)
    reason = (
        f"finds {_pct(best.row.hit_tokens_pct)} of the prompt tokens where {present.eviction} finds "
        f"{_pct(runs.now.hit_tokens_pct)} ({best.gain:+.2f} ± {best.gain_error:.2f} points)"
    )
    return _advice(name, present.eviction, best.row.eviction, reason, figures)


def _append(runs: _Runs, present: Present) -> Advice:
    """Copying has to save a tenth of the pieces that sequences lie in, for a hundredth of the prompt tokens."""
    name = "append"
    now = present.append
    if present.page > 1 or present.opaque:
        reason = "engines that read whole pages copy what a page needs, whatever this says"
        return _advice(name, now, now, reason)
    other = "peel" if present.append == "chain" else "chain"
    tried = runs.try_(f"append {other}", append=other)
    if tried is None:
        return _advice(name, now, now, "the other way cannot be replayed")
    chain, peel = (runs.now, tried.row) if other == "peel" else (tried.row, runs.now)
    loss = tried.gain if other == "peel" else -tried.gain
    copied = peel.copied_tokens / max(1, peel.prompt_tokens)
    fewer = (
        1 - peel.extents_per_1k_tokens / chain.extents_per_1k_tokens if chain.extents_per_1k_tokens else 0.0
    )
    figures: Figures = {
        "extents_per_1k_tokens_chain": chain.extents_per_1k_tokens,
        "extents_per_1k_tokens_peel": peel.extents_per_1k_tokens,
        "copied_tokens_peel": peel.copied_tokens,
        "hit_tokens_pct_chain": chain.hit_tokens_pct,
        "hit_tokens_pct_peel": peel.hit_tokens_pct,
    }
    better = "peel" if fewer >= FEWER_EXTENTS and copied <= COPIES and loss >= -NO_LOSS else "chain"
    reason = (
        f"with peel, sequences lie in {peel.extents_per_1k_tokens:.1f} pieces per 1,000 tokens, with chain in "
        f"{chain.extents_per_1k_tokens:.1f}; peel copies {peel.copied_tokens:,} tokens "
        f"({100 * copied:.2f} % of the prompts) and finds {loss:+.2f} points"
    )
    return _advice(name, present.append, better, reason, figures)


def _pool(runs: _Runs, present: Present) -> Advice:
    """The smallest pool that is as good; or the smallest larger one that is GROW points better, or ends waiting."""
    name = "pool size"
    now = runs.now
    tried: dict[float, Tried] = {}
    for factor in POOL_FACTORS:
        slots = int(factor * present.pool_tokens) // present.block_size * present.block_size
        found = runs.try_(f"pool {factor:g}x", pool_tokens=slots)
        if found is not None:
            tried[factor] = found
    figures: Figures = {"hit_tokens_pct_1x": now.hit_tokens_pct}
    for factor, each in tried.items():
        figures[f"hit_tokens_pct_{factor:g}x"] = each.row.hit_tokens_pct
        figures[f"waiting_pct_{factor:g}x"] = round(100 * trouble(each.row), 3)
    said = _slots(present, present.pool_tokens)
    short = trouble(now) > TROUBLE
    known = "pool_tokens" not in present.assumed  # else there is no present size to be larger than
    for factor in sorted(each for each in tried if each > 1 and known):
        each = tried[factor]
        relief = short and trouble(each.row) <= trouble(now) / 2
        if sure(each, GROW) or relief:
            reason = (
                f"{factor:g} times the memory finds {_pct(each.row.hit_tokens_pct)} instead of "
                f"{_pct(now.hit_tokens_pct)} ({each.gain:+.2f} ± {each.gain_error:.2f} points); requests that "
                f"waited or were preempted: {100 * trouble(each.row):.1f} % instead of {100 * trouble(now):.1f} %"
            )
            return _advice(name, said, _slots(present, each.row.pool_tokens), reason, figures)
    for factor in sorted(each for each in tried if each < 1 and known):
        each = tried[factor]
        if each.gain >= -NO_LOSS and trouble(each.row) <= trouble(now) + TROUBLE / 10:
            reason = (
                f"{factor:g} times the memory does as well: {_pct(each.row.hit_tokens_pct)} found instead of "
                f"{_pct(now.hit_tokens_pct)}, {100 * trouble(each.row):.1f} % of requests waited or were preempted. "
                "The rest is reserve for what the recording has not seen"
            )
            figures["enough_slots"] = each.row.pool_tokens
            return _advice(name, said, said, reason, figures)
    parts = [f"{factor:g}x {each.gain:+.2f}" for factor, each in sorted(tried.items())]
    reason = (
        f"hits against now, in points: {', '.join(parts)}; requests that waited or were preempted: "
        f"{100 * trouble(now):.1f} %"
    )
    return _advice(name, said, said, reason, figures)


def _slots(present: Present, slots: int) -> str:
    if not present.slot_bytes:
        return f"{slots:,} slots"
    size = float(slots * present.slot_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{slots:,} slots ({size:.3g} {unit})"
        size /= 1024
    return f"{slots:,} slots ({size:.3g} TiB)"


def _watermark(runs: _Runs, present: Present) -> Advice:
    """More is held back where running sequences are preempted, less where nobody ever is and others wait."""
    name = "watermark"
    now = runs.now
    said = f"{present.watermark:g}"
    preempted = now.preemptions / max(1, now.requests)
    waiting = now.refusals / max(1, now.requests)
    figures: Figures = {"preemptions": now.preemptions, "refusals": now.refusals}
    if preempted <= TROUBLE / 2 and not (
        now.preemptions == 0 and waiting > TROUBLE and present.watermark > 0.01
    ):
        reason = (
            f"{now.preemptions:,} preemptions and {now.refusals:,} requests told to wait, of {now.requests:,}"
        )
        return _advice(name, said, said, reason, figures)
    other = min(0.2, 2 * max(present.watermark, 0.01)) if now.preemptions else present.watermark / 2
    tried = runs.try_(f"watermark {other:g}", watermark=other)
    if tried is None:
        return _advice(name, said, said, "no other can be replayed")
    row = tried.row
    figures |= {f"preemptions_{other:g}": row.preemptions, f"refusals_{other:g}": row.refusals}
    if now.preemptions:
        better = row.preemptions <= 0.7 * now.preemptions and tried.gain >= -HITS
    else:
        better = row.refusals <= 0.7 * now.refusals and not row.preemptions
    reason = (
        f"{other:g}: {row.preemptions:,} preemptions instead of {now.preemptions:,}, {row.refusals:,} requests told to "
        f"wait instead of {now.refusals:,}, {tried.gain:+.2f} points of hits"
    )
    return _advice(name, said, f"{other:g}" if better else said, reason, figures)


def _compaction(runs: _Runs, present: Present) -> Advice:
    """On where moves in idle gaps make RUNS points more of the free memory usable in long runs."""
    name = "compaction"
    tried = runs.try_("compaction idle", compaction="idle")
    now = runs.now
    if tried is None or tried.row.usable_run_pct is None or now.usable_run_pct is None:
        return _advice(name, present.compaction, present.compaction, "moves cannot be replayed here")
    row = tried.row
    more = (row.usable_run_pct or 0.0) - now.usable_run_pct
    figures: Figures = {
        "usable_run_pct_off": now.usable_run_pct,
        "usable_run_pct_idle": row.usable_run_pct,
        "blocks_free_off": now.blocks_free.mean,
        "blocks_free_idle": row.blocks_free.mean,
        "moved_tokens_idle": row.moved_tokens,
    }
    reason = (
        f"moves in idle gaps bring the free memory in runs of 32 blocks from {_pct(now.usable_run_pct)} to "
        f"{_pct(row.usable_run_pct or 0.0)}, for {row.moved_tokens:,} tokens moved"
    )
    better = "idle" if present.compaction == "off" and more >= RUNS else present.compaction
    if better == "off":
        reason += ": too little to switch it on for"
    return _advice(name, present.compaction, better, reason, figures)


def _sharing(runs: _Runs, present: Present) -> Advice:
    """One pool is what there is; a pool for each engine, of its share of the memory, is the comparison."""
    engines = min(present.engines, ENGINES_MOST)
    tried = runs.try_(f"{engines} pools of a {engines}th", engines=engines, sharing="partitioned")
    name, now = "sharing", "one pool"
    if tried is None:
        return _advice(name, now, now, f"a {engines}th of the memory would be too small for any of this")
    reason = (
        f"{engines} pools of a {engines}th of the memory each would find {_pct(tried.row.hit_tokens_pct)} instead of "
        f"{_pct(runs.now.hit_tokens_pct)}; {100 * trouble(tried.row):.1f} % of requests would wait instead of "
        f"{100 * trouble(runs.now):.1f} %"
    )
    figures: Figures = {"hit_tokens_pct_partitioned": tried.row.hit_tokens_pct, "engines": engines}
    return _advice(name, now, now, reason, figures)


def _others(runs: _Runs, present: Present) -> None:
    for policy in OTHERS:
        order = evictions(policy)[0] if present.eviction not in evictions(policy) else present.eviction
        runs.try_(policy, policy=policy, eviction=order, append="chain", page=1)


def _together(runs: _Runs, present: Present, advice: Sequence[Advice]) -> Advice | None:
    """All that was advised, at once: gains need not add up."""
    changes: dict[str, Any] = {}
    for each in advice:
        if not each.change:
            continue
        match each.setting:
            case "block_size":
                changes["block_size"] = int(each.advised)
            case "watermark":
                changes["watermark"] = float(each.advised)
            case "eviction" | "append":
                changes[each.setting] = each.advised
            case "pool size":
                changes["pool_tokens"] = int(each.advised.split()[0].replace(",", ""))
            case _:
                pass  # compaction changes no hit
    if len(changes) < 2:
        return None
    tried = runs.try_("all advised", **changes)
    if tried is None:
        return None
    reason = (
        f"{', '.join(changes)} changed at once: {_pct(tried.row.hit_tokens_pct)} found instead of "
        f"{_pct(runs.now.hit_tokens_pct)}, {_pct(tried.row.internal_fragmentation_pct.mean)} wasted inside blocks "
        f"instead of {_pct(runs.now.internal_fragmentation_pct.mean)}, {100 * trouble(tried.row):.1f} % of requests "
        f"waited instead of {100 * trouble(runs.now):.1f} %"
    )
    return _advice(
        "together",
        "as it is",
        "all of the above",
        reason,
        {"gain": tried.gain, "gain_error": tried.gain_error},
    )
