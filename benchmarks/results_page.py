"""docs/results.md, rendered from the rows that `make results` kept and from nothing else.

The prose here is a frame: every figure, every trace that is named and every verdict comes out of the rows, so that a
sentence which the next measurement refutes changes with it.  What has not been measured is said to be missing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Final

import msgspec

from kvslot.benchmarks.report import Result
from kvslot.benchmarks.results import (
    BENCH,
    COST_POLICIES,
    COST_SEEDS,
    COSTED,
    ENGINED,
    EVICTIONS,
    HOURS,
    LIVE_LIMIT,
    POOL,
    RATE,
    SIZED,
    SIZES,
    TRACES,
    Command,
    Entry,
    listed,
)

LIVE: Final = 64
QUANTUM_MOST: Final = 32
POLICIES: Final = ("contiguous", "paged", "hashed", "token", "slotted")
POINTS: Final = 0.5
"""Differences below half a percentage point are called nothing."""
SMALL_WASTE: Final = 1.0
"""Percent; where pages waste less than this, slots have nothing to win back."""
FRAGMENTATION_MOST: Final = {16: 0.5, 528: 2.0}
"""Percent, mean; by block size."""
EXTENTS_MOST: Final = 1.3
RESERVED_QUANTA: Final = 1.25
COST_SHARE: Final = 0.15
THEIRS: Final = {
    "mix200_a": (1493.0, 1528.0),
    "sgd_a": (424.0, 1893.0),
    "mtbench101_a": (279.0, 1192.0),
    "taubench_airline_a": (2404.0, 2569.0),
    "ragpulse": (1818.0, 970.0),
}
"""CPU us a request of vLLM's block manager (blocks of 16) and SGLang's radix cache (pages of 1) on another "
"machine."""
CLAIM_PCT: Final = 5.0
SMALL_POOL: Final = 1024
"""Slots a running sequence; in smaller pools the ends of 64 sequences weigh."""
MISSING_MOST: Final = 8
"""More commands that gave nothing are counted, not listed."""


class Spread(msgspec.Struct, frozen=True):
    mean: float
    max: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What the document needs of a replay's row; names and meanings are those of `kvslot.replay.Row`."""

    trace: str
    policy: str
    block_size: int
    sharing: str
    engines: int
    phase: str
    routing: str
    eviction: str
    pool_tokens: int
    usable_tokens: int
    start_s: float
    end_s: float
    requests: int
    never: int
    stuck: int
    prompt_tokens: int
    internal_fragmentation_pct: Spread
    reserved_pct: Spread
    occupancy_pct: Spread
    hit_tokens_pct: float
    hit_tokens_pct_ideal: float
    hit_tokens_pct_optimum: float | None
    lost_hit_tokens: int
    evicted_hit_tokens: int
    refusals: int
    pseudo_oom: int
    refused_room_elsewhere: int
    preemptions: int
    max_concurrent_sessions: int | None
    cpu_us_per_request: float
    extents_per_1k_tokens: float
    duplicate_tokens: Spread

    @property
    def waste(self) -> float:
        """Mean internal fragmentation, %."""
        return self.internal_fragmentation_pct.mean

    @property
    def wasted_slots(self) -> float:
        """About how many slots that is, on average."""
        share = self.waste / 100
        return share / (1 - share) * self.occupancy_pct.mean / 100 * self.usable_tokens if share < 1 else 0.0

    @property
    def mean_prompt(self) -> float:
        return self.prompt_tokens / self.requests if self.requests else 0.0


class Kept:
    """The entries, and rows as values."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = entries
        self._rows: dict[str, list[Row]] = {}

    def rows(self, words: str) -> list[Row]:
        """Rows of `kvslotctl replay WORDS`; none where it has not been measured."""
        if words not in self._rows:
            entry = self.entries.get(f"kvslotctl replay {words}")
            raw = [] if entry is None else entry.rows
            self._rows[words] = [msgspec.json.decode(bytes(row), type=Row) for row in raw]
        return self._rows[words]

    def whole(self, words: str) -> list[Row]:
        """Those of whole runs."""
        return [row for row in self.rows(words) if row.phase == "all"]

    def one(self, words: str) -> Row | None:
        """The row of a command that replays one case."""
        return next(iter(self.whole(words)), None)

    def results(self, command: str) -> list[Result]:
        entry = self.entries.get(command)
        return [] if entry is None else [msgspec.json.decode(bytes(row), type=Result) for row in entry.rows]


# --- Words -----------------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(share: float) -> str:
    """Without decimals, and without a minus before nothing."""
    return f"{round(100 * share) or 0} %"


def signed(value: float, digits: int = 2) -> str:
    return f"{value:+,.{digits}f}"


def listing(items: Iterable[str], none: str = "none") -> str:
    found = list(items)
    return ", ".join(found) if found else none


def several(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def table(titles: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Markdown; the first `left` columns to the left, figures to the right."""
    marks = ["---"] * left + ["---:"] * (len(titles) - left)
    return [
        f"| {' | '.join(titles)} |",
        f"| {' | '.join(marks)} |",
        *(f"| {' | '.join(line)} |" for line in lines),
        "",
    ]


def prose(text: str) -> list[str]:
    """A paragraph, wrapped; whoever reads the source of the document is not made to scroll."""
    return [*textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False), ""]


def bullets(lines: Iterable[str]) -> list[str]:
    return [*(f"- {line}" for line in lines), ""]


def by_policy(rows: Iterable[Row]) -> dict[str, Row]:
    return {row.policy: row for row in rows}


# --- 1. Traces -------------------------------------------------------------------------------------------------------


def traces(kept: Kept) -> list[str]:
    titles = (
        "trace", "policy", "waste % mean", "max", "hits %", "lost hits", "evicted hits", "refusals", "pseudo-OOM",
        "preempted", "cpu us", "extents / 1k",
    )  # fmt: skip
    lines: list[Sequence[str]] = []
    found: dict[str, dict[str, Row]] = {}
    for words in TRACES:
        rows = by_policy(kept.whole(f"{words} --policy all"))
        if not rows:
            continue
        found[words] = rows
        first = next(iter(rows.values()))
        about = f"**{words}**: {first.pool_tokens:,} slots"
        for policy in POLICIES:
            if policy in rows:
                lines.append((about, *_figures(rows[policy])))
                about = ""
    said = prose(
        "The pool is 1.5 times the most distinct tokens that run at once (the figure behind the trace's "
        "name), 64 sequences live at most, blocks of 16, LRU. *Waste* is `internal_fragmentation_pct`: of "
        "the slots in blocks that are not wholly free, the share that holds no distinct token; room to "
        "grow into is left out. *Lost hits* are prompt tokens that were cached but not found because of "
        "rounding, *evicted hits* those that were gone."
    )
    return said + bullets(_trace_findings(found)) + table(titles, lines, left=2)


def _figures(row: Row) -> tuple[str, ...]:
    return (
        row.policy,
        number(row.waste),
        number(row.internal_fragmentation_pct.max),
        number(row.hit_tokens_pct),
        f"{row.lost_hit_tokens:,}",
        f"{row.evicted_hit_tokens:,}",
        f"{row.refusals:,}",
        f"{row.pseudo_oom:,}",
        f"{row.preemptions:,}",
        number(row.cpu_us_per_request, 0),
        number(row.extents_per_1k_tokens, 1),
    )


def _trace_findings(found: Mapping[str, Mapping[str, Row]]) -> Iterable[str]:
    both = {trace: rows for trace, rows in found.items() if "paged" in rows and "slotted" in rows}
    if not both:
        return
    waste = {trace: (rows["paged"].waste, rows["slotted"].waste) for trace, rows in both.items()}
    small = sorted((pair[0], trace) for trace, pair in waste.items() if pair[0] < SMALL_WASTE)
    yield (
        f"**Nothing to win back** in {several(len(small), 'trace')} of {len(both)}: plain pages already "
        f"waste less than {SMALL_WASTE:g} % there "
        f"({listing(f'{trace} {number(value)} %' for value, trace in small)}). Prompts are long or nothing "
        "is shared: half a block at the end of a long sequence is little."
    )
    large = sorted(((pair[0] - pair[1], trace) for trace, pair in waste.items()), reverse=True)
    yield (
        "**Most won back** (paged -> slotted): "
        + listing(
            f"{trace} {number(waste[trace][0])} -> {number(waste[trace][1])} %"
            for value, trace in large
            if value >= SMALL_WASTE
        )
        + "."
    )
    worse = [f"{trace} {number(a)} -> {number(b)} %" for trace, (a, b) in waste.items() if b > a + 0.005]
    yield f"Wasting more than plain pages: {listing(worse)}."
    hashed = [(rows["hashed"].waste, trace) for trace, rows in both.items() if "hashed" in rows]
    token = [rows["token"].waste for rows in both.values() if "token" in rows]
    if hashed and token:
        doubled = [
            f"{trace} {number(value)} %, {_doubled(both[trace]['hashed']):.0f} % of it duplicates"
            for value, trace in sorted(hashed, reverse=True)
            if value >= SMALL_WASTE
        ]
        yield (
            "`hashed` keeps full blocks only, so that rounding costs it hits and not slots: "
            f"{number(median(value for value, _ in hashed))} % waste on the median trace. More than "
            f"{SMALL_WASTE:g} %: {listing(doubled)}. `token` wastes {number(max(token))} % at most, since "
            "slots of one token leave nothing over; it pays in extents."
        )
    gains = {
        trace: rows["slotted"].hit_tokens_pct - rows["hashed"].hit_tokens_pct
        for trace, rows in both.items()
        if "hashed" in rows
    }
    more = sorted(((gain, trace) for trace, gain in gains.items() if gain >= POINTS), reverse=True)
    less = sorted((gain, trace) for trace, gain in gains.items() if gain <= -POINTS)
    yield (
        "**Hits** against `hashed`: "
        f"{listing((f'{trace} {signed(gain)}' for gain, trace in more), 'more nowhere')} points; less: "
        f"{listing(f'{trace} {signed(gain)}' for gain, trace in less)}; within {POINTS:g} points: "
        f"{several(len(gains) - len(more) - len(less), 'trace')}."
    )
    versus = {
        trace: rows["slotted"].hit_tokens_pct - rows["token"].hit_tokens_pct
        for trace, rows in both.items()
        if "token" in rows
    }
    # What could be found at best rises only where a request waits for what another one is computing.
    waits = {
        trace: rows["slotted"].hit_tokens_pct_ideal - rows["token"].hit_tokens_pct_ideal
        for trace, rows in both.items()
        if "token" in rows
    }
    apart = sorted(((gain, trace) for trace, gain in versus.items() if abs(gain) >= POINTS), reverse=True)
    waited = [f"{trace} {signed(gain)}" for gain, trace in apart if waits[trace] >= gain / 2 > 0]
    other = [f"{trace} {signed(gain)}" for gain, trace in apart if not waits[trace] >= gain / 2 > 0]
    yield (
        f"Against `token`, which finds every token as well: {listing(waited)} points because `slotted` lets "
        "a request wait while another one computes the same prefix (what can be found at best rises as "
        f"much; the others compute it twice); {listing(other)} because other tokens were "
        f"evicted; the rest within {POINTS:g}."
    )
    refused = [
        (policy, sum(rows[policy].refusals for rows in both.values() if policy in rows),
         sum(rows[policy].pseudo_oom for rows in both.values() if policy in rows),
         sum(rows[policy].preemptions for rows in both.values() if policy in rows))
        for policy in POLICIES
    ]  # fmt: skip
    short = [policy for policy, a, _, c in refused if a or c]
    yield (
        "Refusals / pseudo-OOM / preemptions over all these traces: "
        + listing(f"{policy} {a:,} / {b:,} / {c:,}" for policy, a, b, c in refused)
        + ". Short of memory in pools of 1.5 times the peak: "
        + listing(f"`{policy}`" for policy in short)
        + "."
    )
    stuck = sum(row.stuck + row.never for rows in both.values() for row in rows.values())
    yield f"Requests that were dropped (could never fit, or were stuck): {stuck:,}."
    high = max((rows["slotted"].internal_fragmentation_pct.max, trace) for trace, rows in both.items())
    yield (
        f"Maxima are from nearly empty moments: the highest of `slotted` is {number(high[0])} % "
        f"({high[1]}), when a few sequences have just begun or all but a few have gone, and a handful of "
        "slots is a large share. Duplicates, tokens that two requests computed at the same time, count as "
        "waste under every policy."
    )
    ratios = {
        policy: median(
            rows["slotted"].cpu_us_per_request / rows[policy].cpu_us_per_request
            for rows in both.values()
            if policy in rows and rows[policy].cpu_us_per_request
        )
        for policy in ("paged", "hashed", "token")
        if all(policy in rows for rows in both.values())
    }
    if ratios:
        yield (
            "**CPU time** of `slotted` a request, as a multiple of the baselines' in the same Python "
            "(median trace): "
            + listing(f"{policy} {value:.1f}x" for policy, value in ratios.items())
            + ". The baselines here are the bare algorithm, without the sessions, leases, fences and tickets of "
            "the core."
        )


def _doubled(row: Row) -> float:
    """Percent of the wasted slots that are duplicates."""
    return min(100.0, 100 * row.duplicate_tokens.mean / row.wasted_slots) if row.wasted_slots else 0.0


# --- 2. Block sizes --------------------------------------------------------------------------------------------------


def sizes(kept: Kept) -> list[str]:
    steps = [int(size) for size in SIZES.split()]
    lines: list[Sequence[str]] = []
    waste: dict[tuple[str, int], list[tuple[float, str]]] = {}
    hits: dict[tuple[str, int], list[tuple[str, float]]] = {}
    for trace in SIZED:
        rows = kept.whole(f"{trace} --policy paged hashed slotted --block-size {SIZES} --no-optimum")
        for policy in ("paged", "hashed", "slotted"):
            mine = {row.block_size: row for row in rows if row.policy == policy}
            if not mine:
                continue
            for size, row in mine.items():
                waste.setdefault((policy, size), []).append((row.waste, trace))
                hits.setdefault((policy, size), []).append((trace, row.hit_tokens_pct))
            lines.append(
                (
                    f"**{trace}**" if policy == "paged" else "",
                    policy,
                    *(number(mine[size].waste) if size in mine else "-" for size in steps),
                )
            )
            lines.append(
                (
                    "",
                    "hits %",
                    *(number(mine[size].hit_tokens_pct) if size in mine else "-" for size in steps),
                )
            )
    said = prose(
        "An often-read claim says that blocks of 16 to 64 waste less than 5 %, and that waste grows above "
        "512. Waste in %, mean, and below it the hits, by block size; pools as above."
    )
    return (
        said
        + bullets(_size_findings(waste, hits, steps))
        + table(["trace", "", *map(str, steps)], lines, left=2)
    )


def _size_findings(
    waste: Mapping[tuple[str, int], list[tuple[float, str]]],
    hits: Mapping[tuple[str, int], list[tuple[str, float]]],
    steps: list[int],
) -> Iterable[str]:
    for policy in ("paged", "hashed", "slotted"):
        small = [
            (value, trace, size)
            for size in steps
            if size <= 64
            for value, trace in waste.get((policy, size), [])
        ]
        if not small:
            continue
        true = [each for each in small if each[0] < CLAIM_PCT]
        false = sorted((each for each in small if each[0] >= CLAIM_PCT), reverse=True)
        yield (
            f"`{policy}`, 16 to 64: below {CLAIM_PCT:g} % in {len(true)} of {len(small)} cases"
            + (
                "; not in "
                + listing(f"{trace} at {size} ({number(value, 1)} %)" for value, trace, size in false)
                if false
                else ", so that the claim holds"
            )
            + "."
        )
    for policy in ("paged", "hashed", "slotted"):
        at = {
            size: {trace: value for value, trace in waste.get((policy, size), [])} for size in (16, 512, 2048)
        }
        if not at[2048] or not at[512]:
            continue
        grows = [trace for trace in at[2048] if at[2048][trace] > at[512].get(trace, 0.0)]
        found = {size: dict(hits.get((policy, size), [])) for size in (16, 2048)}
        fall = [found[16][trace] - found[2048][trace] for trace in at[2048] if trace in found[16]]
        low, high = min(at[2048].values()), max(at[2048].values())
        yield (
            f"`{policy}`, above 512: waste grows from 512 to 2048 on {len(grows)} of {len(at[2048])} "
            f"traces, and at 2048 is {number(low, 1)} to {number(high, 1)} % (at 16: "
            f"{number(min(at[16].values()), 1)} to {number(max(at[16].values()), 1)} %); hits fall by "
            f"{number(min(fall), 1)} to {number(max(fall), 1)} points from 16 to 2048."
        )


# --- 3. Cost ---------------------------------------------------------------------------------------------------------


def cost(kept: Kept) -> list[str]:
    lines: list[Sequence[str]] = []
    verdicts: list[str] = []
    ratios: dict[str, float] = {}
    for trace in COSTED:
        found: dict[str, list[float]] = {}
        prompts = 0.0
        for seed in COST_SEEDS:
            for row in kept.whole(
                f"{trace} --policy {COST_POLICIES} --pool-tokens {POOL} --no-optimum --seed {seed}"
            ):
                found.setdefault(row.policy, []).append(row.cpu_us_per_request)
                prompts = row.mean_prompt
        if "slotted" not in found:
            continue
        middle = {policy: median(values) for policy, values in found.items()}
        theirs = THEIRS[trace]
        most = COST_SHARE * min(theirs)
        ours = middle["slotted"]
        lines.append(
            (
                trace,
                f"**{number(ours, 0)}**",
                *(number(middle.get(policy), 0) for policy in ("paged", "hashed", "token")),
                *(number(value, 0) for value in theirs),
                number(most, 0),
                f"{ours / min(theirs):.3f}x",
                "held" if ours <= most else f"missed by {number(ours - most, 1)} us",
            )
        )
        if ours > most:
            verdicts.append(
                f"{trace} ({ours / min(theirs):.3f}x, prompts of {prompts:,.0f} tokens on average)"
            )
        if "hashed" in middle:
            ratios[trace] = ours / middle["hashed"]
    said = prose(
        f"{POOL:,} slots, 64 live, blocks of 16; thread CPU time of admit, publication and release "
        "together, a finished request, the median of three runs. The figures of vLLM and SGLang were taken "
        f"on another machine by others: the comparison is indicative. The budget is {COST_SHARE:g} of the "
        "cheaper of the two."
    )
    finding: list[str] = []
    if lines:
        finding.append(
            f"Budget held on {len(lines) - len(verdicts)} of {len(lines)} traces; missed on: {listing(verdicts)}."
        )
    if ratios:
        finding.append(
            "Against the same way of hashing blocks in this repository, in the same process, with nothing around it: "
            + listing(f"{trace} {ratio:.2f}x" for trace, ratio in ratios.items())
            + "."
        )
    if verdicts:
        finding.append(
            "Where it is missed, prompts are short: what remains is the fixed cost of a request (a "
            "session's, a lease's and a node's bookkeeping in Python), which a block manager without those "
            "does not have. The longer the prompt, the better the ratio, since the work goes by extents "
            "and not by blocks."
        )
    titles = (
        "trace", "slotted", "paged here", "hashed here", "token here", "vLLM", "SGLang", "budget",
        "of the cheaper", "",
    )  # fmt: skip
    return said + bullets(finding) + table(titles, lines)


# --- 4. Engines ------------------------------------------------------------------------------------------------------


def engines(kept: Kept) -> list[str]:
    lines: list[Sequence[str]] = []
    gains: dict[str, list[tuple[float, str]]] = {"sticky": [], "random": []}
    elsewhere = 0
    for trace in ENGINED:
        pool = f" --pool-tokens {POOL}" if trace == "mix200_a" else ""
        title = f"**{trace}**"
        for routing in ("sticky", "random"):
            words = f"{trace} --policy hashed slotted{pool} --engines 4 --routing {routing} --sharing both --no-optimum"
            rows = kept.whole(words)
            hits: dict[str, float] = {}
            for policy in ("hashed", "slotted"):
                for sharing in ("partitioned", "shared"):
                    for row in rows:
                        if row.policy != policy or row.sharing != sharing:
                            continue
                        lines.append(
                            (
                                title, routing, policy, sharing, number(row.hit_tokens_pct), number(row.waste),
                                f"{row.refusals:,}", f"{row.refused_room_elsewhere:,}", f"{row.pseudo_oom:,}",
                                f"{row.preemptions:,}", f"{row.never:,}",
                            )
                        )  # fmt: skip
                        title = ""
                        elsewhere += row.refused_room_elsewhere
                        if policy == "slotted":
                            hits[sharing] = row.hit_tokens_pct
            if len(hits) == 2:
                gains[routing].append((hits["shared"] - hits["partitioned"], trace))
    said = prose(
        "Four engines with a fourth of the memory each (`partitioned`, as engines have it today) against "
        "four engines on one pool of as many slots (`shared`). 64 live in all, 1.5 times the peak "
        f"({POOL:,} for mix200_a). `sticky`: a session stays with its engine; `random`: a balancer that "
        "knows nothing."
    )
    findings = []
    for routing, found in gains.items():
        if found:
            findings.append(
                f"`{routing}`: one pool finds more prompt tokens than four, in points: "
                + listing(f"{trace} {signed(gain, 1)}" for gain, trace in sorted(found, reverse=True))
                + "."
            )
    if lines:
        findings.append(
            f"Refusals in one engine's pool while another's had the room: {elsewhere:,} over all these runs."
        )
    titles = (
        "trace", "routing", "policy", "sharing", "hits %", "waste %", "refusals", "room elsewhere", "pseudo-OOM",
        "preempted", "never fit",
    )  # fmt: skip
    return said + bullets(findings) + table(titles, lines, left=4)


# --- 5. Eviction -----------------------------------------------------------------------------------------------------


def eviction(kept: Kept) -> list[str]:
    lines: list[Sequence[str]] = []
    closed: dict[str, list[tuple[float, str]]] = {}
    worse: dict[str, list[str]] = {}
    large = [f"mix200_a --policy slotted --pool-tokens {POOL} --eviction {each}" for each in EVICTIONS]
    cases: list[tuple[str, list[Row | None]]] = [("mix200_a", [kept.one(words) for words in large])]
    for words in TRACES:
        lru = by_policy(kept.whole(f"{words} --policy all")).get("slotted")
        others = [
            kept.one(f"{words} --policy slotted --eviction {each} --no-optimum") for each in EVICTIONS[1:]
        ]
        cases.append((words, [lru, *others]))
    quiet: list[str] = []
    for trace, rows in cases:
        base = rows[0]
        if base is None:
            continue
        if base.evicted_hit_tokens < 0.005 * base.prompt_tokens:
            quiet.append(trace)
            continue
        best = base.hit_tokens_pct_optimum
        beaten = "†" if best is not None and base.hit_tokens_pct > best + 0.005 else ""
        title = f"{trace}, {base.pool_tokens:,} slots"
        cells = []
        for policy, row in zip(EVICTIONS[1:], rows[1:], strict=True):
            if row is None:
                cells += ["-", "-"]
                continue
            over = "†" if best is not None and row.hit_tokens_pct > best + 0.005 else ""
            gain = row.hit_tokens_pct - base.hit_tokens_pct
            room = None if best is None else best - base.hit_tokens_pct
            share = gain / room if room and room >= POINTS else None
            if share is not None:
                closed.setdefault(policy, []).append((share, title))
            if gain <= -0.1:
                worse.setdefault(policy, []).append(f"{title} {signed(gain)}")
            cells += [f"{number(row.hit_tokens_pct)}{over}", "-" if share is None else percent(share)]
        lines.append(
            (
                title,
                number(base.hit_tokens_pct_ideal),
                number(best),
                number(base.hit_tokens_pct) + beaten,
                *cells,
            )
        )
    findings: list[str] = []
    first = cases[0][1][0]
    if first is not None and first.prompt_tokens:
        gone = 100 * first.evicted_hit_tokens / first.prompt_tokens
        findings.append(
            f"mix200_a at {POOL:,} slots: plain LRU loses {number(gone, 1)} % of all prompt tokens to "
            f"eviction and {number(100 * first.lost_hit_tokens / first.prompt_tokens, 1)} % to rounding; "
            f"the optimum finds {number(first.hit_tokens_pct_optimum, 1)} %, LRU "
            f"{number(first.hit_tokens_pct, 1)} %."
        )
    for policy, shares in closed.items():
        findings.append(
            f"`{policy}` closes {percent(median(share for share, _ in shares))} of the gap between LRU "
            f"and the optimum on the median of {several(len(shares), 'case')} with a gap of {POINTS:g} "
            f"points or more (from {percent(min(shares)[0])} on {min(shares)[1]} to "
            f"{percent(max(shares)[0])} on {max(shares)[1]}); it finds less than LRU on: "
            f"{listing(worse.get(policy, []))}."
        )
    if quiet:
        findings.append(
            f"Not listed, since eviction costs them less than 0.5 % of the prompt tokens: {listing(quiet)}."
        )
    said = prose(
        "Hits in % under `slotted`, by order of eviction. *Ideal* never evicts; the *optimum* knows all that "
        "is to come, in a pool of the same size and with the admissions of the run under LRU: a bound for LRU, "
        "and nearly one for the other orders, which admit a little differently (figures above it are marked †). "
        "*Closed*: how much of the way from LRU to the optimum."
    )
    titles = ["trace, pool", "ideal", "optimum", "lru"]
    for policy in EVICTIONS[1:]:
        titles += [policy, "closed"]
    return said + bullets(findings) + table(titles, lines)


# --- 6. Budgets ------------------------------------------------------------------------------------------------------


def _budget_rows(kept: Kept, words: str) -> dict[int, tuple[Row, Row]]:
    """By block size: as it is, and unsplit."""
    plain = {
        16: by_policy(kept.whole(f"{words} --policy all")).get("slotted"),
        528: kept.one(f"{words} --policy slotted --block-size 528 --no-optimum"),
    }
    found: dict[int, tuple[Row, Row]] = {}
    for size, row in plain.items():
        other = kept.one(f"{words} --policy slotted --block-size {size} --unsplit --no-optimum")
        if row is not None and other is not None:
            found[size] = (row, other)
    return found


def _reserved_limit(row: Row) -> float:
    return 100 * LIVE * RESERVED_QUANTA * min(QUANTUM_MOST, row.block_size) / row.usable_tokens


def budgets(kept: Kept) -> list[str]:
    lines: list[Sequence[str]] = []
    misses: list[str] = []
    tallies: dict[str, list[bool]] = {}
    for words in TRACES:
        rows = _budget_rows(kept, words)
        if not rows:
            continue
        cells: list[str] = []
        for size in (16, 528):
            if size not in rows:
                cells += ["-"] * 4
                continue
            row, whole = rows[size]
            growth = row.extents_per_1k_tokens / (whole.extents_per_1k_tokens or 1.0)
            limit = _reserved_limit(row)
            checks = (
                (f"waste, block {size}", row.waste <= FRAGMENTATION_MOST[size]),
                (f"extents, block {size}", growth <= EXTENTS_MOST),
                (f"reserved, block {size}", row.reserved_pct.mean <= limit),
                (f"pseudo-OOM, block {size}", row.pseudo_oom == 0),
            )
            texts = (
                number(row.waste),
                f"{growth:.2f}x",
                f"{number(row.reserved_pct.mean)} / {number(limit)}",
                f"{row.pseudo_oom:,}",
            )
            for (budget, ok), text in zip(checks, texts, strict=True):
                tallies.setdefault(budget, []).append(ok)
                cells.append(text if ok else f"**{text}**")
            if not checks[0][1]:
                misses.append(_waste_miss(words, row, whole))
            if not checks[1][1]:
                misses.append(_extents_miss(words, row, whole, growth))
            if not checks[2][1]:
                misses.append(
                    f"reserved, block {size}, {words}: {number(row.reserved_pct.mean)} % for "
                    f"{number(limit)} %, that is {row.reserved_pct.mean / limit:.2f} of the budget."
                )
            if not checks[3][1]:
                misses.append(f"pseudo-OOM, block {size}, {words}: {row.pseudo_oom:,} for 0.")
        pool = next(iter(rows.values()))[0].pool_tokens
        lines.append((words, f"{pool:,}", *cells))
    said = prose(
        "`slotted`, pool of 1.5 times the peak, 64 live. Budgets: waste of 0.5 % at blocks of 16 and 2 % "
        "at 528; extents per 1,000 tokens within 1.3 times of the same run with `--unsplit`, where no "
        "piece is ever split to fill a hole; reserved slots within 64 x 1.25 growth runs (of 16 slots at "
        "blocks of 16, of 32 above), as a share of the pool; no refusal for want of memory that was there. "
        "Missed ones are bold."
    )
    findings = [
        f"{budget}: held on {sum(oks)} of {several(len(oks), 'trace')}." for budget, oks in tallies.items()
    ]
    titles = (
        "trace", "pool", "16: waste %", "extents", "reserved % / budget", "pseudo-OOM", "528: waste %", "extents",
        "reserved % / budget", "pseudo-OOM",
    )  # fmt: skip
    out = said + bullets(findings) + table(titles, lines)
    if misses:
        out += ["Each miss, its distance and its cause:", "", *bullets(misses)]
    return out


def _waste_miss(trace: str, row: Row, whole: Row) -> str:
    """One sentence on a miss; the cause is what the row itself shows to weigh most."""
    size = row.block_size
    most = FRAGMENTATION_MOST[size]
    wasted = row.wasted_slots
    doubles = row.duplicate_tokens.mean
    allowed = most / (100 - most) * row.occupancy_pct.mean / 100 * row.usable_tokens
    blocks = row.usable_tokens // size
    if row.requests < 2 * LIVE:
        high = row.internal_fragmentation_pct.max
        return (
            f"waste, block {size}, {trace}: {number(row.waste)} % for {most:g} %: "
            f"{several(row.requests, 'request')} in all, so the mean is made of nearly empty moments; being "
            f"{100 * row.waste / high:.0f} % of the time at its maximum of {number(high)} %, one short prompt alone "
            f"in its block, gives as much. Unsplit it would be {number(whole.waste)} %."
        )
    causes: list[str] = []
    if wasted and doubles >= wasted / 3:
        causes.append(
            f"{doubles:,.0f} of them are duplicates, which requests that began together computed each for itself"
        )
    if blocks < 2 * LIVE:
        causes.append(
            f"the pool has {several(blocks, 'block')} for 64 sequences, so most blocks are shared and half full"
        )
    each = row.usable_tokens / LIVE
    if each < SMALL_POOL:
        causes.append(
            f"the pool is small, {each:,.0f} slots a sequence that may run, and what is over comes to "
            f"{wasted / LIVE:.1f} slots each, against growth runs of {min(QUANTUM_MOST, size)}"
        )
    if not causes and row.occupancy_pct.mean < 70:
        causes.append(
            f"the pool is {row.occupancy_pct.mean:.0f} % full on average, so that few slots are a large share"
        )
    return (
        f"waste, block {size}, {trace}: {number(row.waste)} % for {most:g} %, about {wasted:,.0f} slots "
        f"where {allowed:,.0f} are allowed"
        + (": " + "; ".join(causes) if causes else "")
        + f". Unsplit it would be {number(whole.waste)} %."
    )


def _extents_miss(trace: str, row: Row, whole: Row, growth: float) -> str:
    return (
        f"extents, block {row.block_size}, {trace}: {growth:.3f}x for {EXTENTS_MOST:g}x, "
        f"{number(row.extents_per_1k_tokens, 1)} per 1,000 tokens for "
        f"{number(whole.extents_per_1k_tokens, 1)}: an extent has {1000 / row.extents_per_1k_tokens:,.0f} "
        f"slots on average and prompts {row.mean_prompt:,.0f} tokens, so that each hole that is filled "
        f"weighs; splitting buys {number(whole.waste)} -> {number(row.waste)} % of waste."
    )


# --- 7. Days ---------------------------------------------------------------------------------------------------------


def long(kept: Kept) -> list[str]:
    phases: dict[tuple[float, str], Row] = {}
    for hours in HOURS:
        for row in kept.rows(f"mix200_a --policy slotted --hours {hours:g} --rate {RATE:g} --no-optimum"):
            phases[hours, row.phase] = row
    shown = [
        ("hour 1", phases.get((HOURS[-1], "first_hour"))),
        *((f"hour {hours:.0f}", phases.get((hours, "last_hour"))) for hours in HOURS),
        ("all", phases.get((HOURS[-1], "all"))),
    ]
    lines = [
        (
            name, f"{row.requests:,}", number(row.waste, 3), number(row.internal_fragmentation_pct.max),
            number(row.occupancy_pct.mean, 1), number(row.hit_tokens_pct), number(row.hit_tokens_pct_ideal),
            f"{row.refusals:,}", f"{row.pseudo_oom:,}", f"{row.preemptions:,}",
            number(row.extents_per_1k_tokens, 1), number(row.cpu_us_per_request, 0),
        )
        for name, row in shown
        if row is not None
    ]  # fmt: skip
    last_hours = HOURS[-1]
    said = prose(
        f"mix200_a, round and round with new sessions for {last_hours:g} simulated hours, a rate of {RATE:g} a second "
        "(Poisson), 64 live at most, pool of 1.5 times the peak of that load, blocks of 16, `slotted`."
    )
    findings = []
    every = phases.get((last_hours, "all"))
    if every is not None:
        findings.append(
            f"Pseudo-OOM: {every.pseudo_oom:,} in {every.requests:,} requests (budget: 0, "
            f"{'held' if not every.pseudo_oom else 'missed'})."
        )
        findings.append(
            f"Hits are few, {number(every.hit_tokens_pct, 1)} % where a cache without end would find "
            f"{number(every.hit_tokens_pct_ideal, 1)} %: at this rate the pool has {every.pool_tokens:,} slots, "
            "and a session's next turn comes after more than that has passed through. So nearly every request evicts: "
            "the hard case for fragmentation."
        )
    first, last = phases.get((last_hours, "first_hour")), phases.get((last_hours, "last_hour"))
    day = phases.get((HOURS[0], "last_hour"))
    if first is not None and last is not None:
        findings.append(
            f"Waste in the first hour {number(first.waste, 3)} %, in the last {number(last.waste, 3)} %: it "
            + ("does not grow with age." if last.waste <= first.waste + 0.05 else "grows with age.")
        )
        if day is not None:
            growth = last.extents_per_1k_tokens / day.extents_per_1k_tokens
            findings.append(
                f"Extents per 1,000 tokens: {number(first.extents_per_1k_tokens, 1)} in the first hour, when the "
                f"pool is filled for the first time, {number(day.extents_per_1k_tokens, 1)} in hour {HOURS[0]:.0f}, "
                f"{number(last.extents_per_1k_tokens, 1)} in hour {last_hours:.0f}: "
                + (
                    "levelled off after a day."
                    if growth <= 1.05
                    else f"still {100 * (growth - 1):.0f} % more after a day."
                )
            )
    titles = (
        "phase", "requests", "waste %", "max", "full %", "hits %", "ideal", "refusals", "pseudo-OOM", "preempted",
        "extents / 1k", "cpu us",
    )  # fmt: skip
    return said + bullets(findings) + table(titles, lines)


# --- 8. Sessions -----------------------------------------------------------------------------------------------------


def sessions(kept: Kept) -> list[str]:
    search = f"mix200_a --policy all --pool-tokens {POOL} --max-live-search {LIVE_LIMIT} --no-optimum"
    rows = by_policy(kept.whole(search))
    lines = [
        (
            policy,
            (
                f"{rows[policy].max_concurrent_sessions:,}"
                + (" or more" if rows[policy].max_concurrent_sessions == LIVE_LIMIT else "")
                if rows[policy].max_concurrent_sessions is not None
                else "-"
            ),
        )
        for policy in POLICIES
        if policy in rows
    ]
    said = prose(
        "The largest number of sequences running at once with no preemption and at most 1 % of requests "
        f"refused: mix200_a, {POOL:,} slots, blocks of 16, searched for up to {LIVE_LIMIT}."
    )
    findings = []
    most = {policy: rows[policy].max_concurrent_sessions or 0 for policy in rows}
    if "slotted" in most and "paged" in most:
        others = {policy: value for policy, value in most.items() if policy in ("paged", "hashed", "token")}
        findings.append(
            f"`slotted` {most['slotted']:,}; of the other paged ones the best reaches "
            f"{max(others.values()):,}. What counts here is running sequences, whose blocks are nearly all "
            "full: at blocks of 16 there is little to win."
        )
    return said + bullets(findings) + table(("policy", "max_concurrent_sessions"), lines)


# --- 9. Core ---------------------------------------------------------------------------------------------------------


def core(kept: Kept) -> list[str]:
    only = " ".join(f"--only {group}" for group in BENCH)
    results = kept.results(f"kvslotctl bench core {only}")
    judged = [each for each in results if each.target is not None]
    missed = [each for each in judged if not each.ok]
    said = prose(
        "`kvslotctl bench core`: CPU time of one call each, ours and the baseline by turns in one process. "
        "Ratios gate; the microseconds are this machine's."
    )
    findings = []
    if judged:
        findings.append(
            f"{len(judged) - len(missed)} of {len(judged)} budgets held. Missed: "
            + listing(
                f"{each.name} {each.value:g} {each.unit} for {each.sense} {each.target:g}" for each in missed
            )
            + "."
        )
    lines = [
        (
            each.what or each.name,
            f"{each.value:,.4g} {each.unit}".strip(),
            "" if each.target is None else f"{each.sense} {each.target:g}",
            "" if each.stretch is None else f"{each.stretch:g}",
            "" if each.target is None else "held" if each.ok else "**missed**",
        )
        for each in results
        if each.target is not None or each.stretch is not None
    ]
    return said + bullets(findings) + table(("what", "measured", "budget", "wished", ""), lines)


# --- In short --------------------------------------------------------------------------------------------------------


def in_short(kept: Kept) -> list[str]:
    """What a reader with one minute should know: gains, nothings and misses alike."""
    pairs: dict[str, tuple[Row, Row, Row]] = {}
    for trace in TRACES:
        mine = by_policy(kept.whole(f"{trace} --policy all"))
        if {"paged", "hashed", "slotted"} <= set(mine):
            pairs[trace] = mine["paged"], mine["hashed"], mine["slotted"]
    if not pairs:
        return []
    count = len(pairs)
    won = sum(paged.waste - ours.waste >= SMALL_WASTE for paged, _, ours in pairs.values())
    found = sum(ours.hit_tokens_pct - hashed.hit_tokens_pct >= POINTS for _, hashed, ours in pairs.values())
    neither = [
        trace
        for trace, (paged, hashed, ours) in pairs.items()
        if paged.waste - ours.waste < SMALL_WASTE and ours.hit_tokens_pct - hashed.hit_tokens_pct < POINTS
    ]
    lines: list[str] = []
    lines.append(
        f"At blocks of 16, slots win back {SMALL_WASTE:g} % of waste or more against plain pages on {won} of "
        f"{several(count, 'trace')} and find {POINTS:g} points more of the prompts than hashed blocks on {found}. "
        f"On {len(neither)} they bring neither: {listing(neither)}."
    )
    large = []
    for trace in SIZED:
        rows = kept.whole(f"{trace} --policy paged hashed slotted --block-size {SIZES} --no-optimum")
        at = {row.policy: row for row in rows if row.block_size == 528}
        if len(at) == 3:
            large.append(
                f"{trace} {number(at['paged'].waste, 1)} -> {number(at['slotted'].waste, 1)} % waste, hits "
                f"{number(at['hashed'].hit_tokens_pct, 1)} -> {number(at['slotted'].hit_tokens_pct, 1)} %"
            )
    if large:
        lines.append(
            f"At blocks of 528, as hybrid models have them (hits against hashed blocks): {'; '.join(large)}."
        )
    verdicts = [
        (row.waste <= FRAGMENTATION_MOST[size], row.extents_per_1k_tokens <= EXTENTS_MOST * whole.extents_per_1k_tokens,
         row.pseudo_oom == 0)
        for trace in TRACES
        for size, (row, whole) in _budget_rows(kept, trace).items()
    ]  # fmt: skip
    if verdicts:
        waste, extents, refused = (sum(column) for column in zip(*verdicts, strict=True))
        total = len(verdicts)
        lines.append(
            f"Budgets over all traces at blocks of 16 and 528: waste held in {waste} of {total} cases, extents in "
            f"{extents}, no pseudo-OOM in {refused}; each miss stands in section 6 with its cause."
        )
    costs: list[float] = []
    dearer = 0
    for trace in COSTED:
        times: dict[str, list[float]] = {}
        for seed in COST_SEEDS:
            for row in kept.whole(
                f"{trace} --policy {COST_POLICIES} --pool-tokens {POOL} --no-optimum --seed {seed}"
            ):
                times.setdefault(row.policy, []).append(row.cpu_us_per_request)
        if "slotted" in times and "paged" in times:
            costs.append(median(times["slotted"]) / min(THEIRS[trace]))
            dearer += median(times["slotted"]) > median(times["paged"])
    if costs:
        lines.append(
            f"CPU time a request is {min(costs):.2f} to {max(costs):.2f} times what the cheaper of vLLM's and "
            "SGLang's managers needed on another machine (indicative; the budget is "
            f"{COST_SHARE:g}). It is more than that of a bare page allocator in this repository on {dearer} of "
            f"{several(len(costs), 'trace')}: slots cost bookkeeping, most visibly where prompts are short."
        )
    return ["## In short", "", *bullets(lines)]


# --- The document ----------------------------------------------------------------------------------------------------

SECTIONS: Final[tuple[tuple[str, str, Callable[[Kept], list[str]]], ...]] = (
    ("traces", "Every trace, five policies", traces),
    ("sizes", "Block sizes", sizes),
    ("cost", "CPU time a request", cost),
    ("engines", "Four engines: one pool or four", engines),
    ("eviction", "Order of eviction", eviction),
    ("budgets", "Budgets of fragmentation, trace by trace", budgets),
    ("long", "Three days", long),
    ("sessions", "How many sequences fit", sessions),
    ("core", "Budgets of the core's speed", core),
)


def render(entries: Mapping[str, Entry]) -> str:
    """The document.  The same entries give the same text."""
    kept = Kept(entries)
    commands = listed()
    out = [
        "# Results",
        "",
        *prose(
            "Written by `make results` from the rows in [benchmarks/results](../benchmarks/results): do "
            "not edit. What a figure means is said where it first stands; `kvslotctl replay --help` tells "
            "of the switches. Everything but CPU time is simulated and comes out the same on any machine."
        ),
        *_origin(entries, commands),
    ]
    out += in_short(kept)
    codes = _codes(entries[command.text] for command in commands if command.text in entries)
    for index, (section, title, page) in enumerate(SECTIONS, 1):
        out += [f"## {index}. {title}", ""]
        mine = [command for command in commands if command.section == section]
        out += _missing(mine, entries)
        out += _code(mine, entries, several_codes=len(codes) > 1)
        out += page(kept)
    out += _commands(commands, entries)
    return "\n".join(out).rstrip("\n") + "\n"


def _origin(entries: Mapping[str, Entry], commands: Sequence[Command]) -> list[str]:
    mine = [entries[command.text] for command in commands if command.text in entries]
    if not mine:
        return ["Nothing has been measured yet.", ""]
    machines = {
        f"{e.machine.get('cpu')}, {e.machine.get('cores')} cores, {e.machine.get('memory_gib')} GiB"
        for e in mine
    }
    codes = _codes(mine)
    versions = listing(sorted({entry.version for entry in mine}))
    digests = _digests(codes)
    if len(codes) > 1:
        digests += (
            ". **Not all of it was measured with the same code**: each section says which, and where two sections "
            "tell of the same run their figures may differ"
        )
    minutes = sum(entry.wall_s for entry in mine) / 60
    return bullets(
        (
            f"Version {versions}; digest of the measured code {digests}.",
            f"Machine: {listing(sorted(machines))}. It did other work at the same time: CPU times are a little high.",
            f"{several(len(mine), 'command')}, {minutes:,.0f} minutes, one at a time.",
            f"Measured {min(entry.started for entry in mine)[:10]}.",
        )
    )


def _codes(entries: Iterable[Entry]) -> dict[str, int]:
    """Digest of the measured code -> commands, most first."""
    codes: dict[str, int] = {}
    for entry in entries:
        codes[entry.code] = codes.get(entry.code, 0) + 1
    return dict(sorted(codes.items(), key=lambda item: (-item[1], item[0])))


def _digests(codes: Mapping[str, int]) -> str:
    return listing(f"{code} ({several(count, 'command')})" for code, count in codes.items())


def _code(commands: Sequence[Command], entries: Mapping[str, Entry], *, several_codes: bool) -> list[str]:
    """What code the section was measured with, where that is not the same everywhere."""
    mine = _codes(entries[command.text] for command in commands if command.text in entries)
    return [f"*Measured with code {_digests(mine)}.*", ""] if several_codes and mine else []


def _missing(commands: Sequence[Command], entries: Mapping[str, Entry]) -> list[str]:
    lines = []
    for command in commands:
        entry = entries.get(command.text)
        if entry is None:
            lines.append(f"Not measured: `{command.text}`")
        elif entry.failed:
            lines.append(f"No result, {entry.failed}: `{command.text}`")
    if len(lines) > MISSING_MOST:
        lines = [f"Not measured yet: {len(lines)} of {several(len(commands), 'command')}"]
    return bullets(lines) if lines else []


def _commands(commands: Sequence[Command], entries: Mapping[str, Entry]) -> list[str]:
    out = [
        "## The commands",
        "",
        *prose(
            "Each with `--json=FILE`, and the seconds it took. `python -m kvslot.benchmarks.results --only "
            "SECTION` makes one section, `--changed` what other code gave."
        ),
    ]
    for section, _, _ in SECTIONS:
        out += [f"{section}:", "", "```"]
        for command in commands:
            if command.section == section:
                entry = entries.get(command.text)
                out.append(f"{'-' if entry is None else format(entry.wall_s, '.1f'):>7}  {command.text}")
        out += ["```", ""]
    return out
