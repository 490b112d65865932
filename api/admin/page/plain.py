"""The page for browsers without scripts: what there is to see at this moment, as tables.

Made from the same views as the answers of /v1, a table a turn of the loop.  All text is escaped here, in one place;
bars are `meter` elements, which need neither script nor style.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final, NamedTuple

import msgspec

from kvslot.api.admin import views
from kvslot.api.admin.events import Ring
from kvslot.api.admin.views import Source

STATES: Final = ("cached", "private", "reserved", "fenced", "moving", "quarantined", "free", "padding")
"""Of slots, in the order they are shown."""
REFRESH_SECONDS: Final = 5
SESSIONS_MOST: Final = 64
EVENTS_MOST: Final = 40
LOOKED_AT: Final = 2000
"""Of the latest events, to find so many that are no ticks."""


class Bar(NamedTuple):
    """A share in percent, to be drawn as well as said."""

    percent: float


Cell = str | int | float | Bar | None
"""None: a number that nobody knows."""


def _cell(value: Cell) -> str:
    match value:
        case Bar(percent):
            return f'<td class="number"><meter max="100" value="{percent:.2f}"></meter> {percent:.1f} %</td>'
        case str():
            return f"<td>{escape(value)}</td>"
        case int():
            return f'<td class="number">{grouped(value)}</td>'
        case None:
            return '<td class="number">–</td>'
        case float():
            return f'<td class="number">{value:,.1f}</td>'.replace(",", "\u202f")


def grouped(value: int) -> str:
    """With thin spaces between thousands."""
    return f"{value:,}".replace(",", "\u202f")


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[Cell]], nothing: str = "none") -> str:
    """A table, or its caption and a word where it has no rows."""
    rows = list(rows)
    if not rows:
        return f"<h3>{escape(caption)}</h3><p>{escape(nothing)}</p>"
    numbers = [not isinstance(each, str) for each in rows[0]]
    head = "".join(
        f'<th scope="col"{" class=number" if number else ""}>{escape(each)}</th>'
        for each, number in zip(heads, numbers, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    caption = f"<caption>{escape(caption)}</caption>"
    return (
        f"<div class=scroll><table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


async def render(source: Source, ring: Ring) -> bytes:
    """The whole document."""
    parts = [await _daemon(source)]
    pools = await source.pools("")
    for pool in pools:
        parts.append(await _pool(source, pool))
        await asyncio.sleep(0)
    parts.append(await _sessions(source))
    parts.append(await _latency(source))
    await asyncio.sleep(0)
    parts.append(_events(ring))
    return PAGE.format(refresh=REFRESH_SECONDS, body="\n".join(parts)).encode()


async def _daemon(source: Source) -> str:
    stats, health, ready = await source.stats(), await source.health(), await source.ready()
    rows: list[Sequence[Cell]] = [
        ("state", f"{stats.state}, {ready.reason}"),
        ("version", stats.version),
        ("socket", stats.socket),
        ("up", _time(stats.uptime_s)),
        ("sessions", stats.sessions),
        ("sequences", stats.sequences),
        ("requests answered", stats.requests),
        ("of those refused", stats.refused),
        *(
            ("recorded", f"pool {each.pool}, by process {each.pid}, since {_time(each.age_s)}")
            for each in stats.recordings
        ),
    ]
    checks = [("ok" if each.ok else "FAILS", each.name, each.reason) for each in health.checks]
    verdict = "All checks are ok" if all(each.ok for each in health.checks) else "A check fails"
    return "\n".join(
        (
            table("Daemon", ("what", "value"), rows),
            table(f"Health: {verdict}", ("", "check", "reason"), sorted(checks)),
        )
    )


async def _pool(source: Source, pool: views.Pool) -> str:
    (frag,) = await source.frag(pool.pool)
    (gap,) = await source.gaps(pool.pool)
    slots = sum(getattr(pool, state) for state in STATES)
    occupancy: list[Sequence[Cell]] = [
        (state, getattr(pool, state), Bar(100 * getattr(pool, state) / max(slots, 1))) for state in STATES
    ]
    asked = pool.prompt_tokens
    sums: list[Sequence[Cell]] = [
        ("prompt tokens found cached", Bar(100 * pool.hit_tokens / asked if asked else 0.0)),
        ("wholly free blocks", pool.blocks_free),
        ("of blocks", pool.blocks),
        ("waiting requests", pool.tickets),
        ("cached tokens that could go now", pool.evictable),
        ("evicted tokens, since the start", pool.evicted_tokens),
    ]
    waste = [
        (name, float(value) if isinstance(value, float) else int(value), views.DEFINITIONS[name])
        for name, value in msgspec.structs.asdict(frag).items()
        if name in views.DEFINITIONS and name != "usable_run_pct"
    ]
    runs = [(int(length), Bar(share)) for length, share in frag.usable_run_pct.items()]
    gaps: list[Sequence[Cell]] = [
        ("mode", gap.mode),
        ("state", f"{gap.state}: {gap.reason}" if gap.reason else gap.state),
        ("gaps seen", gap.gaps),
        ("seconds of those", gap.idle_s),
        ("seconds given to copies", gap.granted_s),
        ("moves published", gap.published),
        ("moved tokens", gap.moved_tokens),
        ("whole blocks won", gap.blocks_given),
        ("begins that met a running copy", gap.collisions),
    ]
    return "\n".join(
        (
            f"<h2>Pool {escape(pool.pool)}</h2>",
            table("Occupancy", ("state", "slots", "share"), occupancy),
            table("Sums", ("what", "value"), sums),
            table(
                "Free memory in runs of so many blocks or more (usable-run index)", ("blocks", "share"), runs
            ),
            table("Fragmentation", ("figure", "value", "what it is"), waste),
            table("Idle gaps and compaction", ("what", "value"), gaps),
        )
    )


async def _sessions(source: Source) -> str:
    page = await source.sessions("", 0, SESSIONS_MOST)
    rows = [
        (
            each.session,
            each.name,
            each.pool,
            each.pid,
            "stalled" if each.stalled else each.state,
            each.charged,
            Bar(100 * each.charged / each.quota if each.quota else 0.0),
            each.sequences,
            each.fenced,
            each.pins,
            _time(each.age_s),
        )
        for each in sorted(page.items, key=lambda each: -each.charged)
    ]
    heads = ("session", "name", "pool", "pid", "state", "holds, slots", "of its quota", "sequences", "fenced")
    more = "" if page.next is None else f"<p>{SESSIONS_MOST} are shown; /v1/sessions has all.</p>"
    return "<h2>Sessions</h2>" + table("Who holds what", (*heads, "pins", "age"), rows) + more


async def _latency(source: Source) -> str:
    rows = []
    for each in await source.latency():
        steps = {step.step: step for step in each.steps}
        whole = steps.get("all")
        rows.append(
            (
                each.verb,
                each.count,
                each.refused,
                *((whole.mean_us, whole.p50_us, whole.p99_us) if whole and each.sampled else (None,) * 3),
            )
        )
    heads = ("verb", "answered", "refused", "mean µs", "half below µs", "99 of 100 below µs")
    return "<h2>Latencies</h2>" + table("Since the start", heads, rows)


def _events(ring: Ring) -> str:
    entries = [each for each in ring.take(ring.last - LOOKED_AT, LOOKED_AT) if each.kind == "log"]
    rows: list[Sequence[Cell]] = []
    for entry in reversed(entries[-EVENTS_MOST:]):
        fields: dict[str, Any] = msgspec.json.decode(entry.data)
        time, level, event = (str(fields.pop(name, "")) for name in ("time", "level", "event"))
        told = "  ".join(f"{name}={_brief(value)}" for name, value in fields.items())
        rows.append((time[11:23] or time, level, event, told))
    return "<h2>Events</h2>" + table("The latest first", ("time", "level", "event", "fields"), rows)


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= 200 else text[:199] + "…"


def _time(seconds: float) -> str:
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="refresh" content="{refresh}">
<title>kvslot, plain</title>
<link rel="stylesheet" href="page/page.css">
</head>
<body class="plain">
<header><h1>kvslot</h1><p>As it is now; made anew every {refresh} seconds. <a href="./">The live page</a> needs
JavaScript.</p></header>
<main>
{body}
</main>
</body>
</html>
"""
