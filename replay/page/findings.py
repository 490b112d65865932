"""What the rows say, in sentences: gains, nothings and prices alike, each worked out from the figures beside it.

A gain is ours against the policy that does without it: slots against exclusive blocks (`paged`), token-exact sharing
against full blocks (`hashed`), one pool against a pool each.  Where `slotted` was not replayed, the sentences say what
was found and judge nothing.  Half a percentage point, or a tenth of what was measured, is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, Literal, NamedTuple

from kvslot.replay.metrics import Row
from kvslot.replay.page.figures import NEVER_BEST, POINTS_NOTHING, count, micro, pct
from kvslot.replay.page.views import Group, groups_of

OURS: Final = "slotted"
MEASURED_NOTHING: Final = 0.1
SIZES_TOLD: Final = 4
"""Block sizes that a sentence names; more is what the table is for."""

Verdict = Literal["gain", "nothing", "price", "fact"]
Columns = dict[tuple[str, str], list[Row]]
"""Rows by (policy, sharing), one a block size, sizes rising."""


class Finding(NamedTuple):
    verdict: Verdict
    text: str
    """Plain text; *stars* around what is to stand out.  Holds no names from outside but policies'."""
    group: int
    """Index of the group that shows it best."""


def findings(groups: Sequence[Group]) -> list[Finding]:
    """The findings of one setup, given its groups."""
    columns: Columns = {}
    for group in groups:
        for row in group.phases.get("all", []):
            if row.means == "eviction":  # the others are told of by themselves
                columns.setdefault((row.policy, row.sharing), []).append(row)
    if not columns:
        return []
    found: list[Finding | None] = []
    shared = any(sharing == "shared" for _, sharing in columns)
    sharing = "shared" if shared else next(iter(columns))[1]
    ours = columns.get((OURS, sharing))
    rows = {policy: rows for (policy, of), rows in columns.items() if of == sharing}
    at = {row.block_size: group.index for group in groups for row in group.rows}
    if ours is None:
        found += [*_plain(rows, at)]
    else:
        found += [_waste(ours, rows.get("paged"), at), _hits(ours, rows.get("hashed"), rows.get("token"), at)]
        if len(rows) == 1:
            found += [*_plain(rows, at)]
    found += [_larger_blocks(rows, at)]
    found += [_pools(columns, at)]
    if ours is not None:
        found += [
            _refusals(ours, rows, at),
            _evicted(ours, at),
            _cpu(ours, rows, at),
            _pieces(ours, rows, at),
            *_means(ours, groups, sharing),
        ]
    return [each for each in found if each is not None]


def _listed(rows: Sequence[Row], value: Callable[[Row], float]) -> str:
    """ "6.1 % at 16, 15.9 % at 64 and 53.0 % at 528"; a few sizes stand for many."""
    told = list(rows)
    if len(told) > SIZES_TOLD:
        step = (len(told) - 1) / (SIZES_TOLD - 1)
        told = [told[round(i * step)] for i in range(SIZES_TOLD)]
    if len(told) == 1:
        return f"{pct(value(told[0]))} %"
    parts = [f"{pct(value(row))} % at {row.block_size:,}" for row in told]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _listed_short(rows: Sequence[Row], value: Callable[[Row], float]) -> str:
    """As `_listed`; values that are all but the same are told once."""
    values = [value(row) for row in rows]
    if len(rows) > 1 and max(values) - min(values) < 0.1:
        return f"{pct(max(values))} % at each"
    return _listed(rows, value)


def _matched(ours: Sequence[Row], theirs: Sequence[Row] | None) -> list[tuple[Row, Row]]:
    by_size = {row.block_size: row for row in theirs or ()}
    return [(row, by_size[row.block_size]) for row in ours if row.block_size in by_size]


def _judge(gains: Sequence[float], nothing: float) -> Verdict:
    if min(gains) <= -nothing:
        return "price" if max(gains) < nothing else "fact"
    return "gain" if max(gains) >= nothing else "nothing"


def _small(pairs: Sequence[tuple[Row, Row]], gains: Sequence[float]) -> str:
    """At which sizes the difference is nothing."""
    sizes = [a.block_size for (a, _), gain in zip(pairs, gains, strict=True) if abs(gain) < POINTS_NOTHING]
    return f" At {_and(sizes)} the difference is next to nothing." if sizes else ""


def _waste(ours: Sequence[Row], paged: Sequence[Row] | None, at: dict[int, int]) -> Finding | None:
    pairs = _matched(ours, paged)
    if not pairs:
        return None
    gains = [b.internal_fragmentation_pct.mean - a.internal_fragmentation_pct.mean for a, b in pairs]
    verdict = _judge(gains, POINTS_NOTHING)

    def waste(row: Row) -> float:
        return row.internal_fragmentation_pct.mean

    theirs = _listed([b for _, b in pairs], waste)
    mine = _listed_short([a for a, _ in pairs], waste)
    size = f" of {pairs[0][0].block_size:,}" if len(pairs) == 1 else ""
    if verdict == "nothing":
        text = (
            f"*Slots save no memory here.* Exclusive blocks{size} leave {theirs} of the slots in used blocks empty, "
            f"slotted ones {mine}."
        )
    else:
        text = (
            f"Exclusive blocks{size} (paged) leave *{theirs}* of the slots in used blocks empty; "
            f"slotted ones *{mine}*."
        )
        text += _small(pairs, gains)
    return Finding(verdict, text, at[pairs[-1][0].block_size])


def _rounding(row: Row) -> float:
    """Prompt tokens lost to block rounding, in per cent of all."""
    return 100 * row.lost_hit_tokens / row.prompt_tokens if row.prompt_tokens else 0.0


def _hits(
    ours: Sequence[Row], hashed: Sequence[Row] | None, token: Sequence[Row] | None, at: dict[int, int]
) -> Finding | None:
    pairs = _matched(ours, hashed)
    if not pairs:
        return None
    gains = [a.hit_tokens_pct - b.hit_tokens_pct for a, b in pairs]
    verdict = _judge(gains, POINTS_NOTHING)

    def hits(row: Row) -> float:
        return row.hit_tokens_pct

    mine, theirs = _listed_short([a for a, _ in pairs], hits), _listed([b for _, b in pairs], hits)
    size = f" of {pairs[0][0].block_size:,}" if len(pairs) == 1 else ""
    if verdict == "nothing":
        text = (
            f"*Sharing to the exact token finds nothing more here*: {mine} of the prompt tokens, full blocks{size} "
            f"(hashed) {theirs}."
        )
    else:
        text = f"Sharing to the exact token finds *{mine}* of the prompt tokens; full blocks{size} (hashed) *{theirs}*."
        text += _small(pairs, gains)
        # What is gained beyond it comes of another order of eviction or of more room, not of exact sharing.
        text += f" Rounding to blocks alone costs hashed {_listed([b for _, b in pairs], _rounding)}."
    exact = _matched(ours, token)
    if exact:
        gap = max(b.hit_tokens_pct - a.hit_tokens_pct for a, b in exact)
        text += (
            f" Page size 1 (token) finds up to {pct(gap)} points more than slots."
            if gap >= POINTS_NOTHING
            else " Page size 1 (token) finds no more than slots."
        )
    return Finding(verdict, text, at[pairs[-1][0].block_size])


def _larger_blocks(rows: dict[str, list[Row]], at: dict[int, int]) -> Finding | None:
    """What going from the smallest block to the largest costs in hits, and what it buys in pieces."""
    ends = {
        policy: (sizes[0], sizes[-1])
        for policy, sizes in rows.items()
        if policy not in NEVER_BEST and policy != "token" and len(sizes) > 1
    }
    if not ends:
        return None
    small, large = next(iter(ends.values()))
    lost = {policy: a.hit_tokens_pct - b.hit_tokens_pct for policy, (a, b) in ends.items()}
    fewer = [f"{policy} {pct(points)} points" for policy, points in lost.items() if points >= POINTS_NOTHING]
    more = [
        f"{policy} finds {pct(-points)} points more"
        for policy, points in lost.items()
        if points <= -POINTS_NOTHING
    ]
    same = [policy for policy, points in lost.items() if abs(points) < POINTS_NOTHING]
    if fewer:
        cost = f"*cost hits*: {_and(fewer)}"
        cost += f"; {_and(same)} none" if same else ""
    else:
        cost = "*cost no hits*"
    cost += f"; {_and(more)}" if more else ""
    pieces = [
        f"{policy} {pct(a.extents_per_1k_tokens)} → {pct(b.extents_per_1k_tokens)}"
        for policy, (a, b) in ends.items()
    ]
    text = f"Blocks of {large.block_size:,} instead of {small.block_size:,} {cost}."
    text += f" Pieces per 1,000 tokens: {_and(pieces)}."
    return Finding("fact", text, at[large.block_size])


def _pools(columns: Columns, at: dict[int, int]) -> Finding | None:
    """One pool against a pool each, by every policy that was replayed both ways; ours first, and judged."""
    policies = dict.fromkeys(policy for policy, _ in columns if policy not in NEVER_BEST)
    both: list[tuple[Row, Row]] = []
    for policy in sorted(policies, key=lambda policy: policy != OURS):
        both += _matched(columns.get((policy, "shared"), []), columns.get((policy, "partitioned")))[:1]
    if not both or both[0][0].engines < 2:
        return None
    one, each = both[0]
    pairs = _matched(columns[one.policy, "shared"], columns[one.policy, "partitioned"])
    gains = [a.hit_tokens_pct - b.hit_tokens_pct for a, b in pairs]
    verdict = _judge(gains, POINTS_NOTHING)
    told = _and(
        [f"{a.policy} {pct(a.hit_tokens_pct)} and {pct(b.hit_tokens_pct)} %" for a, b in both[1:]] or [""]
    )
    others = f" ({told})" if told else ""
    if verdict == "nothing":
        text = f"*One pool for {one.engines} engines finds nothing more*:"
    else:
        word = {"gain": "more", "price": "LESS"}.get(verdict, "more at some block sizes and LESS at others")
        text = f"*One pool for {one.engines} engines finds {word}*:"
    if len(pairs) > 1:
        text += f" {_listed([a for a, _ in pairs], lambda row: row.hit_tokens_pct)}; a pool each"
        text += f" {_listed([b for _, b in pairs], lambda row: row.hit_tokens_pct)}. In blocks of {one.block_size:,}:"
    text += (
        f" {pct(one.hit_tokens_pct)} % of the prompt tokens under {one.policy}, a pool each "
        f"{pct(each.hit_tokens_pct)} %{others}."
    )
    if one.refusals or each.refusals:
        text += f" Under {one.policy}, {count(one.refusals)} requests had to wait instead of {count(each.refusals)}"
        other = each.refused_room_elsewhere
        text += f", {count(other)} of those while another engine's pool had the room." if other else "."
    return Finding(verdict, text, at[one.block_size])


def _refusals(ours: Sequence[Row], rows: dict[str, list[Row]], at: dict[int, int]) -> Finding | None:
    """Who made requests wait, at every block size."""
    if len(rows) < 2:
        return None
    sizes = [row.block_size for row in ours]
    here: dict[int, dict[str, Row]] = {
        size: {name: row for name, each in rows.items() for row in each if row.block_size == size}
        for size in sizes
    }
    apart = {size: _policies(found, NEVER_BEST) for size, found in here.items()}
    short = [size for size, found in apart.items() if any(row.refusals for row in found.values())]
    fixed = [row for found in here.values() for name, row in found.items() if name in NEVER_BEST]
    if not short:
        if not any(row.refusals for row in fixed):
            return Finding("nothing", "*No request had to wait*: the pool was never short.", at[sizes[0]])
        row = max(fixed, key=lambda row: row.refusals_per_hour)
        return Finding(
            "fact", f"*Requests had to wait under {row.policy} alone*: {_an_hour(row)}.", at[row.block_size]
        )
    gains: list[float] = []
    slack = 1.0
    for size in short:
        mine = apart[size][OURS]
        slack = max(slack, MEASURED_NOTHING * mine.refusals)
        gains += [float(row.refusals - mine.refusals) for name, row in apart[size].items() if name != OURS]
    worst = max(short, key=lambda size: max(row.refusals_per_hour for row in apart[size].values()))
    verdict: Verdict = "fact"
    if not gains or all(abs(gain) < slack for gain in gains):
        verdict = "nothing" if gains else "fact"
    elif min(gains) > -slack:
        verdict = "gain"
    elif max(gains) < slack:
        verdict = "price"
    named = short if len(short) <= SIZES_TOLD else [*short[: SIZES_TOLD - 1], short[-1]]
    parts: list[str] = []
    for size in named:
        found = sorted(apart[size].values(), key=lambda row: -row.refusals_per_hour)
        first, rest = found[0], found[1:]
        words = [f"{first.policy} refuses {_an_hour(first)}"]
        words += [f"{row.policy} {_an_hour(row).removesuffix(' an hour')}" for row in rest]
        parts.append(f"at {size:,} {', '.join(words)}")
    text = f"*Requests had to wait*: {'; '.join(parts)}."
    if len(short) > len(named):
        text += f" Requests waited at {len(short) - len(named)} more block sizes."
    calm = [size for size in sizes if size not in short]
    text += f" None had to at {_and(calm)}." if calm else ""
    if any(row.refusals for row in fixed):
        row = max(fixed, key=lambda row: row.refusals_per_hour)
        text += f" {row.policy.capitalize()} refuses {_an_hour(row)}."
    false: dict[str, int] = {}
    for judged in here.values():
        for name, row in judged.items():
            # What knows no blocks stands at every size with the same figures.
            before = 0 if name in (*NEVER_BEST, "token") else false.get(name, 0)
            false[name] = before + row.pseudo_oom
    wrong = [f"{count(most)} of {name}'s" for name, most in false.items() if most]
    text += f" Refused although there was room: {_and(wrong)}." if wrong else " None although there was room."
    return Finding(verdict, text, at[worst])


def _policies(found: dict[str, Row], without: Collection[str]) -> dict[str, Row]:
    return {name: row for name, row in found.items() if name not in without}


def _an_hour(row: Row) -> str:
    """Refusals: "none", or "14,302 an hour"."""
    if not row.refusals:
        return "none"
    rate = row.refusals_per_hour
    return (
        f"{rate:,.0f} an hour"
        if rate >= 10
        else f"{rate:,.1f} an hour"
        if rate >= 0.1
        else "under 0.1 an hour"
    )


def _evicted(ours: Sequence[Row], at: dict[int, int]) -> Finding | None:
    def lost(row: Row) -> float:
        return 100 * row.evicted_hit_tokens / row.prompt_tokens if row.prompt_tokens else 0.0

    row = max(ours, key=lost)
    where = f" in blocks of {row.block_size:,}" if len(ours) > 1 else ""
    bound = row.hit_tokens_pct_optimum
    if lost(row) < POINTS_NOTHING:
        return Finding(
            "fact",
            f"The pool is large enough: eviction costs slotted {pct(lost(row))} % of the prompt tokens"
            f"{' at most' if len(ours) > 1 else ''}.",
            at[row.block_size],
        )
    text = f"Eviction ({row.eviction}) loses *{pct(lost(row))} %* of the prompt tokens under slotted{where}"
    if bound is None:
        return Finding("fact", f"{text}.", at[row.block_size])
    text += f": {pct(row.hit_tokens_pct)} % are found. An eviction that knew the future"
    if bound - row.hit_tokens_pct < POINTS_NOTHING:
        text += f" is worth nothing here: it would find {pct(bound)} %."
    else:
        text += f" would find {pct(bound)} % with the same pool and admissions."
    return Finding("fact", text, at[row.block_size])


def _cpu(ours: Sequence[Row], rows: dict[str, list[Row]], at: dict[int, int]) -> Finding | None:
    """Against the cheapest policy that shares, at the block size where that comes out worst."""
    cases: list[tuple[float, Row, Row]] = []
    for mine in ours:
        others = [
            row
            for name, each in rows.items()
            if name != OURS and name not in NEVER_BEST
            for row in each
            if row.block_size == mine.block_size and row.cpu_us_per_request > 0
        ]
        if others and mine.cpu_us_per_request > 0:
            other = min(others, key=lambda row: row.cpu_us_per_request)
            cases.append((mine.cpu_us_per_request / other.cpu_us_per_request, mine, other))
    if not cases:
        return None
    ratio, mine, other = max(cases, key=lambda case: case[0])
    verdict = _judge([1 - each for each, _, _ in cases], MEASURED_NOTHING)
    words = "as much as" if abs(1 - ratio) < MEASURED_NOTHING else f"{ratio:.2f} times"
    text = (
        f"Bookkeeping takes slotted *{micro(mine.cpu_us_per_request)} µs* of CPU time a request in blocks of "
        f"{mine.block_size:,}, {words} {other.policy}, the cheapest other policy that shares "
        f"({micro(other.cpu_us_per_request)} µs)."
    )
    least = min(each for each, _, _ in cases)
    if ratio - least >= MEASURED_NOTHING:
        text += f" At other block sizes {least:.2f} times and more."
    return Finding(verdict, text, at[mine.block_size])


def _pieces(ours: Sequence[Row], rows: dict[str, list[Row]], at: dict[int, int]) -> Finding | None:
    """Only where it is a price: finer pieces make longer index tables."""
    worst: tuple[float, Row, Row] | None = None
    for name in ("paged", "hashed"):
        for mine, other in _matched(ours, rows.get(name)):
            if other.extents_per_1k_tokens > 0:
                ratio = mine.extents_per_1k_tokens / other.extents_per_1k_tokens
                if worst is None or ratio > worst[0]:
                    worst = ratio, mine, other
    if worst is None or worst[0] <= 1 + MEASURED_NOTHING:
        return None
    _, mine, other = worst
    return Finding(
        "price",
        f"Slotted sequences lie in more pieces: in blocks of {mine.block_size:,}, *{mine.extents_per_1k_tokens:,.1f}* "
        f"per 1,000 tokens against {other.extents_per_1k_tokens:,.1f} under {other.policy}.",
        at[mine.block_size],
    )


def _means(ours: Sequence[Row], groups: Sequence[Group], sharing: str) -> list[Finding | None]:
    """What eviction that empties blocks, and moves, bought and cost: one sentence a block size."""
    found: list[Finding | None] = []
    for row in ours:
        group = next(group for group in groups if group.block_size == row.block_size)
        others = {
            each.means: each
            for each in group.phases.get("all", [])
            if each.policy == OURS and each.sharing == sharing and each is not row
        }
        plain, moved = others.get("placement"), others.get("moves")
        if plain is None or moved is None:
            continue
        steps = [f"{pct(each.pinned_waste_pct.mean)} %" for each in (plain, row, moved)]
        text = (
            f"Free slots in blocks that something keeps in use, in blocks of {row.block_size:,}: *{steps[0]}* of the "
            f"pool with placement alone, {steps[1]} with eviction that prefers to empty blocks, *{steps[2]}* with "
            f"moves ({moved.compaction})."
        )
        if moved.moved_tokens:
            text += f" {count(moved.moved_tokens)} tokens were moved"
            each = moved.moved_per_given_back
            text += (
                f", {each:.2f} for each slot of the {count(moved.blocks_given_back)} blocks that this gave back."
                if each is not None
                else " and gave no block back."
            )
        else:
            text += " Nothing was worth moving; no more than that was to be gained."
        bought = row.pinned_waste_pct.mean - moved.pinned_waste_pct.mean
        found.append(Finding("gain" if bought >= POINTS_NOTHING else "nothing", text, group.index))
    return found


def worth(rows: list[Row]) -> list[str]:
    """What eviction that empties blocks, and moves, bought and cost: as on the page, a sentence a trace and size."""
    told: list[str] = []
    for group in groups_of(rows):
        by_sharing: dict[str, list[Row]] = {}
        for row in group.phases.get("all", []):
            if row.policy == OURS and row.means == "eviction":
                by_sharing.setdefault(row.sharing, []).append(row)
        for sharing, ours in by_sharing.items():
            for finding in _means(ours[:1], [group], sharing):
                if finding is not None:
                    told.append(f"{group.setup.trace}: {finding.text.replace('*', '')}")
    return told


def _plain(rows: dict[str, list[Row]], at: dict[int, int]) -> list[Finding]:
    """What was found and left empty, without a verdict."""
    return [
        Finding(
            "fact",
            f"Under {policy}, *{_listed_short(each, lambda row: row.hit_tokens_pct)}* of the prompt tokens are found "
            f"cached ({pct(each[0].hit_tokens_pct_ideal)} % if nothing were evicted); empty stay "
            f"{_listed_short(each, lambda row: row.internal_fragmentation_pct.mean)} of the slots in used blocks.",
            at[each[-1].block_size],
        )
        for policy, each in rows.items()
    ]


def _and(parts: Sequence[object]) -> str:
    words = [f"{part:,}" if isinstance(part, int) else str(part) for part in parts]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
