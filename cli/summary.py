"""What slots, exact sharing and one pool were worth in a replay, in sentences; gains, nothings and prices alike."""

from __future__ import annotations

from typing import Final

from kvslot.replay import ReplayResult, Row

NOTHING_POINTS: Final = 0.5
"""Differences below half a percentage point are called nothing."""

NOTHING_SHARE: Final = 0.1
"""And what is measured or counted is called the same within a tenth."""


def summary(result: ReplayResult) -> list[str]:
    """The sentences of the summary, in the order of the tables."""
    rows = {
        (row.trace, row.block_size, row.engines, row.pool_tokens, row.sharing, row.policy): row
        for row in result.rows
        if row.phase == "all"
    }
    lines: list[str] = []
    for (trace, block_size, engines, pool, sharing, policy), ours in rows.items():
        if policy != "slotted":
            continue
        where = f"{trace}, blocks of {block_size}"

        def other(
            name: str,
            of: str = sharing,
            key: tuple[str, int, int, int] = (trace, block_size, engines, pool),
        ) -> Row | None:
            return rows.get((*key, of, name))

        if engines > 1:
            apart = other("slotted", "partitioned")
            if sharing == "shared" and apart is not None:
                lines.append(f"{where}, {engines} engines: {_pools(ours, apart)}")
            continue
        paged, hashed = other("paged"), other("hashed")
        if paged is not None:
            lines.append(f"{where}: {_waste(ours, paged)}")
        if hashed is not None:
            lines.append(f"{where}: {_hits(ours, hashed)}")
        prices = [_cpu(ours, [paged, hashed, other("token")]), _pieces(ours, [paged, hashed])]
        lines += [f"{where}: {price}" for price in prices if price]
    gaps: dict[str, Row] = {}
    for row in result.rows:
        bound = row.hit_tokens_pct_optimum
        if row.policy == "slotted" and row.phase == "all" and row.engines == 1 and bound:
            before = gaps.get(row.trace)
            if before is None or bound - row.hit_tokens_pct > _gap(before):
                gaps[row.trace] = row
    for trace, row in gaps.items():
        if _gap(row) >= NOTHING_POINTS:
            lines.append(
                f"{trace}, blocks of {row.block_size}: an eviction that knew the future would find "
                f"{row.hit_tokens_pct_optimum:.1f} % of the prompt tokens, {row.eviction} with slots finds "
                f"{row.hit_tokens_pct:.1f} %."
            )
    return lines


def _gap(row: Row) -> float:
    return (row.hit_tokens_pct_optimum or 0.0) - row.hit_tokens_pct


def _cpu(ours: Row, others: list[Row | None]) -> str:
    """Bookkeeping against the cheapest other policy that shares; "" where it is no price."""
    known = [row for row in others if row is not None and row.cpu_us_per_request > 0]
    if not known:
        return ""
    best = min(known, key=lambda row: row.cpu_us_per_request)
    if ours.cpu_us_per_request < best.cpu_us_per_request * (1 + NOTHING_SHARE):
        return ""
    how = " of the clients, the socket included" if ours.via == "socket" else ""
    return (
        f"PRICE: bookkeeping takes {ours.cpu_us_per_request:,.0f} us of CPU time a request{how}, "
        f"{best.policy} {best.cpu_us_per_request:,.0f} us."
    )


def _pieces(ours: Row, others: list[Row | None]) -> str:
    """Pieces that sequences lie in, against the policy with the fewest; "" where it is no price."""
    known = [row for row in others if row is not None and row.extents_per_1k_tokens > 0]
    if not known:
        return ""
    best = min(known, key=lambda row: row.extents_per_1k_tokens)
    if ours.extents_per_1k_tokens < best.extents_per_1k_tokens * (1 + NOTHING_SHARE):
        return ""
    return (
        f"PRICE: sequences lie in {ours.extents_per_1k_tokens:.1f} pieces per 1,000 tokens, under {best.policy} "
        f"in {best.extents_per_1k_tokens:.1f}."
    )


def _waste(ours: Row, paged: Row) -> str:
    a, b = ours.internal_fragmentation_pct.mean, paged.internal_fragmentation_pct.mean
    if b - a < NOTHING_POINTS:
        return (
            f"exclusive blocks leave only {b:.1f} % of the used slots empty, slots {a:.1f} %: nothing gained."
        )
    return f"exclusive blocks leave {b:.1f} % of the used slots empty, slots {a:.1f} %."


def _hits(ours: Row, hashed: Row) -> str:
    a, b = ours.hit_tokens_pct, hashed.hit_tokens_pct
    rounding = 100 * hashed.lost_hit_tokens / max(1, hashed.prompt_tokens)
    tail = f"(full blocks only: {rounding:.1f} % of the prompt tokens lost to rounding)"
    if abs(a - b) < NOTHING_POINTS:
        return f"token-exact sharing finds {a:.1f} %, full blocks {b:.1f} %: nothing gained."
    word = "more" if a > b else "LESS"
    return f"token-exact sharing finds {word}: {a:.1f} % of the prompt tokens against {b:.1f} % {tail}."


def _pools(shared: Row, apart: Row) -> str:
    a, b = shared.hit_tokens_pct, apart.hit_tokens_pct
    refused = f"; refusals an hour {shared.refusals_per_hour:,.0f} against {apart.refusals_per_hour:,.0f}"
    if abs(a - b) < NOTHING_POINTS:
        return f"one shared pool finds {a:.1f} %, a pool each {b:.1f} %: nothing gained{refused}."
    return f"one shared pool finds {a:.1f} % of the prompt tokens, a pool each {b:.1f} %{refused}."
