"""The lines of the table: what each figure is called, its unit, its definition, and which way is better.

A value is marked as best only where that means something: at least two policies to compare, all of them with a
value, a difference that is more than noise (`nothing`, in the figure's own unit, or a tenth for what was measured in
CPU time), and never `contiguous`, which shares nothing and so is cheap at what the others are there to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvslot.replay.metrics import Row

POINTS_NOTHING: Final = 0.5
"""Differences below half a percentage point are called nothing, as in the command's summary."""
NEVER_BEST: Final = frozenset({"contiguous"})
DASH: Final = "–"

POLICIES: Final[dict[str, str]] = {
    "contiguous": "One unbroken run per sequence, as long as the longest request allowed. Nothing is shared: the world "
    "before paging.",
    "paged": "A prefix tree whose every node has whole blocks of its own. A hit may end at any token, but the rest of "
    "a node's last block is lost to others.",
    "hashed": "Full blocks only, found by chained hashes: vLLM's way.",
    "token": "Page size 1 under a radix tree: SGLang's way. Nothing is lost inside blocks, as there are none.",
    "slotted": "kvslot's way: a token-exact prefix tree over blocks whose slots may belong to several holders.",
}
SHARINGS: Final[dict[str, str]] = {"shared": "one pool", "partitioned": "a pool each"}


class Cell(NamedTuple):
    """A figure as it is shown: the value, and what stands smaller beneath it."""

    value: str
    note: str = ""


class Figure(NamedTuple):
    """One line of the table."""

    key: str
    """As in the JSON."""
    label: str
    unit: str
    meaning: str
    cell: Callable[[Row], Cell]
    rank: Callable[[Row], float | None] | None = None
    """What is compared; None: no value is better than another."""
    higher: bool = False
    nothing: float = 0.0
    nothing_share: float = 0.0
    optional: bool = False
    """Left out where no policy has anything but 0 or no value."""


def count(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}"


def pct(value: float | None) -> str:
    """Two digits below ten, one above: more is noise.  Exactly nothing is "0"."""
    if not value:
        return DASH if value is None else "0"
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}"


def micro(value: float) -> str:
    return f"{value:,.1f}" if value < 99.95 else f"{value:,.0f}"


def rate(value: float) -> str:
    return f"{value:,.1f}" if 0 < value < 99.95 else f"{value:,.0f}"


def share(part: float, whole: float) -> str:
    """`part` of `whole`; empty where it is nothing."""
    return f"{pct(100 * part / whole)} %" if whole and part else ""


def peak(value: float, words: Callable[[float], str]) -> str:
    """The highest value; empty where it is nothing."""
    return f"peak {words(value)}" if value else ""


def in_all(number: int) -> str:
    """A count beside its rate; empty where it is nothing."""
    return f"{count(number)} in all" if number else ""


def seconds(value: float) -> str:
    """A stretch of simulated time, in the unit a person would use."""
    if value < 120:
        return f"{value:.1f} s"
    if value < 7200:
        return f"{value / 60:.1f} min"
    if value < 48 * 3600:
        return f"{value / 3600:.1f} h"
    return f"{value / 86400:.1f} days"


SECTIONS: Final[tuple[tuple[str, tuple[Figure, ...]], ...]] = (
    (
        "What is found again",
        (
            Figure(
                "hit_tokens_pct",
                "Prompt tokens found cached",
                "%",
                "Of all prompt tokens, the share that was in the cache when its request was first admitted. At most "
                "all but the last token of a prompt counts: that one must be computed anew.",
                lambda r: Cell(
                    pct(r.hit_tokens_pct), f"{count(r.hit_tokens)} tokens" if r.hit_tokens else ""
                ),
                lambda r: r.hit_tokens_pct,
                higher=True,
                nothing=POINTS_NOTHING,
            ),
            Figure(
                "hit_tokens_pct_optimum",
                "… if eviction knew the future",
                "%",
                "What the best eviction, one that knows all that is to come, would have found in a pool of this size "
                "with the very admissions of this run: a bound, computed offline. It is for the whole run; a phase "
                "shows its part of it, which the policy may exceed there. Runs admit in different orders: each has "
                "its own.",
                lambda r: Cell(
                    pct(r.hit_tokens_pct_optimum),
                    "less than was found"
                    if r.hit_tokens_pct_optimum is not None
                    and r.hit_tokens_pct > r.hit_tokens_pct_optimum + 0.005
                    else "",
                ),
                optional=True,
            ),
            Figure(
                "hit_tokens_pct_ideal",
                "… if nothing were evicted",
                "%",
                "What a cache that never evicts would have found: all that some request had written by then.",
                lambda r: Cell(pct(r.hit_tokens_pct_ideal)),
            ),
            Figure(
                "lost_hit_tokens",
                "Hits lost to block rounding",
                "tokens",
                "Tokens that were written before, yet not found because hits end at the edge of a block.",
                lambda r: Cell(count(r.lost_hit_tokens), share(r.lost_hit_tokens, r.prompt_tokens)),
            ),
            Figure(
                "evicted_hit_tokens",
                "Hits lost to eviction",
                "tokens",
                "The rest of what a cache that never evicts would have found: evicted, never kept, or kept in another "
                "engine's pool.",
                lambda r: Cell(count(r.evicted_hit_tokens), share(r.evicted_hit_tokens, r.prompt_tokens)),
            ),
        ),
    ),
    (
        "What the memory holds",
        (
            Figure(
                "internal_fragmentation_pct",
                "Empty slots in used blocks",
                "%, mean over time",
                "Of the slots in blocks that are not wholly free, the share that holds no token, whether others may "
                "use it or not. Peeled copies, duplicates, fenced and quarantined slots hold none. Unwritten slots of "
                "running sequences are left out: see the reserved slots.",
                lambda r: Cell(
                    pct(r.internal_fragmentation_pct.mean),
                    peak(r.internal_fragmentation_pct.max, pct),
                ),
                lambda r: r.internal_fragmentation_pct.mean,
                nothing=POINTS_NOTHING,
            ),
            Figure(
                "reserved_pct",
                "Reserved, not yet written",
                "%, mean over time",
                "Slots given to running sequences to grow into and not written yet, as a share of the pool.",
                lambda r: Cell(pct(r.reserved_pct.mean), peak(r.reserved_pct.max, pct)),
            ),
            Figure(
                "occupancy_pct",
                "Pool holding distinct tokens",
                "%, mean over time",
                "Slots that hold a token held nowhere else, as a share of the usable pool.",
                lambda r: Cell(pct(r.occupancy_pct.mean), peak(r.occupancy_pct.max, pct)),
            ),
            Figure(
                "usable_pct",
                "In use at the first refusal",
                "% of the pool",
                "Distinct tokens in use by running requests when a request was refused for the first time. "
                f"{DASH}: nothing was refused.",
                lambda r: Cell(pct(r.usable_pct)),
                lambda r: r.usable_pct,
                higher=True,
                nothing=2.0,
                optional=True,
            ),
            Figure(
                "duplicate_tokens",
                "Tokens held twice",
                "slots, mean over time",
                "Written slots whose tokens are also held elsewhere.",
                lambda r: Cell(
                    count(r.duplicate_tokens.mean),
                    peak(r.duplicate_tokens.max, count),
                ),
                optional=True,
            ),
            Figure(
                "pinned_waste_pct",
                "Free slots in blocks in use",
                "% of the pool, mean over time",
                "Slots that hold nothing in blocks that something keeps from being wholly free. New pieces may take "
                "them; whole blocks and long runs cannot be made of them.",
                lambda r: Cell(pct(r.pinned_waste_pct.mean), peak(r.pinned_waste_pct.max, pct)),
                optional=True,
            ),
            Figure(
                "blocks_free",
                "Blocks wholly free",
                "blocks, mean over time",
                "Blocks in which no slot is in use.",
                lambda r: Cell(count(r.blocks_free.mean), peak(r.blocks_free.max, count)),
                optional=True,
            ),
            Figure(
                "usable_run_pct",
                "Free memory usable as runs of 32 blocks",
                "%, mean over time",
                "Of the free slots, the share that can be had as runs of 32 whole consecutive blocks. A pool kept full "
                f"of cached prefixes has few. {DASH}: the policy does not know its free runs.",
                lambda r: Cell(pct(r.usable_run_pct)),
                optional=True,
            ),
            Figure(
                "largest_free_run",
                "Longest free run",
                "slots, mean over time",
                "The most consecutive slots that hold nothing. A pool kept full of cached prefixes has short ones.",
                lambda r: Cell(count(r.largest_free_run.mean), f"least {count(r.largest_free_run_min)}"),
            ),
        ),
    ),
    (
        "What is refused",
        (
            Figure(
                "refusals_per_hour",
                "Requests told to wait",
                "per simulated hour",
                "Requests that were refused for want of memory and tried again later, each counted once.",
                lambda r: Cell(rate(r.refusals_per_hour), in_all(r.refusals)),
                lambda r: r.refusals_per_hour,
                nothing_share=0.05,
            ),
            Figure(
                "pseudo_oom_per_hour",
                "… although there was room",
                "per simulated hour",
                "Pseudo-OOM: refusals while slots holding no token plus evictable ones, less the watermark and "
                "less all that is fenced, quarantined, moving, duplicate, peeled or reserved, would have been "
                "enough. One formula for all policies.",
                lambda r: Cell(rate(r.pseudo_oom_per_hour), in_all(r.pseudo_oom)),
                lambda r: r.pseudo_oom_per_hour,
                nothing_share=0.05,
            ),
            Figure(
                "refused_room_elsewhere",
                "… with room in another pool",
                "requests",
                "Refusals in one engine's pool while another engine's pool had what was needed.",
                lambda r: Cell(count(r.refused_room_elsewhere)),
                optional=True,
            ),
            Figure(
                "preemptions",
                "Preemptions",
                "requests",
                "Running requests stopped to make room for others' growth; they start over.",
                lambda r: Cell(count(r.preemptions)),
                lambda r: float(r.preemptions),
                nothing_share=0.05,
            ),
            Figure(
                "never",
                "Dropped as too large",
                "requests",
                "Requests that could not fit even an empty pool.",
                lambda r: Cell(count(r.never)),
                optional=True,
            ),
            Figure(
                "stuck",
                "Stuck (a fault)",
                "requests",
                "Requests told to wait although nothing ran. Anything but 0 is a fault of the policy.",
                lambda r: Cell(count(r.stuck)),
                optional=True,
            ),
            Figure(
                "max_concurrent_sessions",
                "Most sessions at once",
                "sequences",
                "The largest limit on running sequences with no preemption and at most 1 % of requests refused, found "
                f"by bisection. {DASH}: not searched for.",
                lambda r: Cell(count(r.max_concurrent_sessions)),
                lambda r: r.max_concurrent_sessions,
                higher=True,
                nothing_share=0.05,
                optional=True,
            ),
        ),
    ),
    (
        "What it costs",
        (
            Figure(
                "cpu_us_per_request",
                "CPU time per request",
                "µs",
                "Measured thread CPU time of admitting (refused tries included), publishing and releasing, per "
                "finished request. This and the other times differ from run to run.",
                lambda r: Cell(micro(r.cpu_us_per_request)),
                lambda r: r.cpu_us_per_request,
                nothing_share=0.1,
            ),
            Figure(
                "alloc_us",
                "CPU time of one admission",
                "µs, median",
                "Measured thread CPU time of one admission: look-up, eviction and allocation.",
                lambda r: Cell(
                    micro(r.alloc_us.p50), f"p99 {micro(r.alloc_us.p99)} · max {micro(r.alloc_us.max)}"
                ),
            ),
            Figure(
                "grow_us_per_request",
                "Time spent growing",
                "µs per request",
                "Measured wall time of all growth calls, per finished request.",
                lambda r: Cell(micro(r.grow_us_per_request)),
            ),
            Figure(
                "extents_per_1k_tokens",
                "Pieces per 1,000 tokens",
                "extents",
                "Runs of consecutive slots handed out per 1,000 tokens: what a sequence's index is made of. Fewer "
                "is better for kernels and for the index.",
                lambda r: Cell(pct(r.extents_per_1k_tokens)),
                lambda r: r.extents_per_1k_tokens,
                nothing_share=0.1,
            ),
            Figure(
                "evicted_tokens",
                "Tokens evicted",
                "tokens",
                "Cached tokens that gave way to new ones.",
                lambda r: Cell(count(r.evicted_tokens)),
            ),
            Figure(
                "copied_tokens",
                "Tokens copied to append",
                "tokens",
                "Copied inside the pool so that a sequence may go on writing behind a shared part.",
                lambda r: Cell(count(r.copied_tokens)),
                optional=True,
            ),
            Figure(
                "moved_tokens",
                "Tokens moved",
                "tokens",
                "Moved by compaction.",
                lambda r: Cell(count(r.moved_tokens), f"{count(r.moves)} moves" if r.moves else ""),
                optional=True,
            ),
            Figure(
                "blocks_given_back",
                "Blocks given back by moves",
                "blocks",
                "Whole blocks that moves made free, less those that they took into use.",
                lambda r: Cell(
                    count(r.blocks_given_back),
                    f"{r.moved_per_given_back:.2f} tokens moved a slot"
                    if r.moved_per_given_back is not None
                    else "",
                ),
                optional=True,
            ),
            Figure(
                "moves_abandoned",
                "Moves abandoned",
                "moves",
                "Moves whose piece was split, evicted or read by somebody before its copy had ended: idle time lost, "
                "and nothing else.",
                lambda r: Cell(count(r.moves_abandoned)),
                optional=True,
            ),
            Figure(
                "compaction_overtaken",
                "Compaction overtaken",
                "times",
                "Times that the daemon let the pool be for a while, since it changed faster than it can be followed: a "
                "replay by real processes goes as fast as it can.",
                lambda r: Cell(count(r.compaction_overtaken)),
                optional=True,
            ),
            Figure(
                "finished",
                "Requests finished",
                "requests",
                "Requests that ran to their end.",
                lambda r: Cell(count(r.finished)),
            ),
        ),
    ),
)

FIGURES: Final[dict[str, Figure]] = {figure.key: figure for _, figures in SECTIONS for figure in figures}


OF_MOVES: Final = frozenset({"moved_tokens", "moves_abandoned", "blocks_given_back"})


def worth_showing(figure: Figure, rows: Sequence[Row]) -> bool:
    """Whether any policy has something to say on this line; of moves, none is something, where they were asked for."""
    if figure.key in OF_MOVES and any(row.means != "eviction" for row in rows):
        return True
    return not figure.optional or any(figure.cell(row).value not in (DASH, "0") for row in rows)


def best(figure: Figure, rows: Sequence[Row]) -> frozenset[int]:
    """Indexes of the rows to be marked; empty where a mark would mean nothing."""
    if figure.rank is None:
        return frozenset()
    values = {i: figure.rank(row) for i, row in enumerate(rows) if row.policy not in NEVER_BEST}
    known = {i: value for i, value in values.items() if value is not None}
    if len(known) < 2 or len(known) < len(values):
        return frozenset()
    top = max(known.values()) if figure.higher else min(known.values())
    slack = max(figure.nothing, figure.nothing_share * abs(top))
    near = frozenset(i for i, value in known.items() if abs(value - top) <= slack)
    return frozenset() if len(near) == len(known) else near
