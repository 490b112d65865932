"""Results for the eye: one table per trace and block size with one column a policy, and a summary in plain words."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Final

from rich.console import Console
from rich.table import Table

from kvslot.cli import _common, _screen
from kvslot.cli.summary import summary
from kvslot.replay import PHASES, CompactionReport, Quantiles, ReplayResult, Row, Spread

SPREAD_POINTS: Final = 1.0
"""How far the hits and the fragmentation of real processes may lie from those of one process, in percentage points."""

NONE: Final = "-"

LEGEND: Final = (
    "a / b: mean / max over time; alloc_us: p50 / p99 / max; extents: pieces that sequences lie in; "
    "live: most sequences at once; -: no figure"
)

LABEL_WIDTH: Final = 32
COLUMN_WIDTH: Final = 19
"""Of the widest cells, with their frame; a terminal that is too narrow for all columns gets several tables."""
FULL_WIDTH: Final = LABEL_WIDTH + 5 * COLUMN_WIDTH


def console() -> Console:
    """Standard output; wide enough for five columns where it is not a terminal."""
    return _screen.console(FULL_WIDTH)


def _pct(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _pcts(value: Spread) -> str:
    return f"{value.mean:.2f} / {value.max:.2f}"


def _slots(value: Spread) -> str:
    return f"{_short(value.mean)} / {_short(value.max)}"


def _short(value: float) -> str:
    """Three digits and a unit: enough to compare, short enough for five columns."""
    for unit in ("", "k", "M"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G"


def _us(value: Quantiles) -> str:
    return " / ".join(_short(round(each)) for each in (value.p50, value.p99, value.max))


def _int(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


BEATEN: Final = " +"


def beaten(row: Row) -> bool:
    """More was found than the optimum's part of this phase: the optimum is the best of the whole run."""
    return row.hit_tokens_pct_optimum is not None and row.hit_tokens_pct > row.hit_tokens_pct_optimum + 0.005


LINES: Final[tuple[tuple[str, Callable[[Row], str]], ...]] = (
    ("internal_fragmentation_pct ", lambda r: _pcts(r.internal_fragmentation_pct)),
    ("reserved_pct ", lambda r: _pcts(r.reserved_pct)),
    ("pinned_waste_pct ", lambda r: _pcts(r.pinned_waste_pct)),
    ("blocks_free ", lambda r: _slots(r.blocks_free)),
    ("usable_run_pct", lambda r: _pct(r.usable_run_pct)),
    ("hit_tokens_pct", lambda r: _pct(r.hit_tokens_pct)),
    ("  offline optimum", lambda r: _pct(r.hit_tokens_pct_optimum) + (BEATEN if beaten(r) else "")),
    ("  nothing ever evicted", lambda r: _pct(r.hit_tokens_pct_ideal)),
    ("lost_hit_tokens", lambda r: _int(r.lost_hit_tokens)),
    ("evicted_hit_tokens", lambda r: _int(r.evicted_hit_tokens)),
    ("usable_pct", lambda r: _pct(r.usable_pct)),
    ("refusals_per_hour", lambda r: f"{r.refusals_per_hour:,.1f}"),
    ("pseudo_oom_per_hour", lambda r: f"{r.pseudo_oom_per_hour:,.1f}"),
    ("preemptions", lambda r: _int(r.preemptions)),
    ("never", lambda r: _int(r.never)),
    ("max_concurrent_sessions", lambda r: _int(r.max_concurrent_sessions)),
    ("alloc_us", lambda r: _us(r.alloc_us)),
    ("cpu_us_per_request", lambda r: f"{r.cpu_us_per_request:,.0f}"),
    ("extents_per_1k_tokens", lambda r: f"{r.extents_per_1k_tokens:.1f}"),
    ("largest_free_run ", lambda r: _slots(r.largest_free_run)),
    ("duplicate_tokens ", lambda r: _slots(r.duplicate_tokens)),
    ("copied_tokens", lambda r: _int(r.copied_tokens)),
    ("moved_tokens", lambda r: _int(r.moved_tokens)),
    ("moves_abandoned", lambda r: _int(r.moves_abandoned)),
    ("blocks_given_back", lambda r: _int(r.blocks_given_back)),
    ("moved_per_given_back", lambda r: _pct(r.moved_per_given_back)),
    ("compaction_overtaken", lambda r: _int(r.compaction_overtaken)),
)
"""Names as `--json` has them, so that one can look up what the other says."""

OPTIONAL: Final = frozenset(
    {
        "max_concurrent_sessions",
        "never",
        "usable_pct",
        "copied_tokens",
        "moved_tokens",
        "moves_abandoned",
        "blocks_given_back",
        "moved_per_given_back",
        "compaction_overtaken",
    }
)
"""Lines left out where they say nothing for any policy."""
OF_COMPACTION: Final = frozenset({"pinned_waste_pct ", "blocks_free ", "usable_run_pct"})
"""Lines shown where means are compared."""
OF_MOVES: Final = frozenset({"moved_tokens", "moves_abandoned", "blocks_given_back", "moved_per_given_back"})
"""Lines shown there even where they say nothing: that nothing moved is what one wants to know."""
MEANS: Final = {"placement": "placement", "eviction": "+ eviction", "moves": "+ moves"}
"""A column's second line where the means are told apart."""


def print_tables(out: Console, result: ReplayResult, *, all_phases: bool = False) -> None:
    """One table per trace, block size, number of engines and pool; and per phase if asked."""
    groups: dict[tuple[str, int, int, int, str], list[Row]] = {}
    for row in result.rows:
        if all_phases or row.phase == "all":
            key = (row.trace, row.block_size, row.engines, row.pool_tokens, row.phase)
            groups.setdefault(key, []).append(row)
    for (trace, block_size, engines, pool, phase), rows in groups.items():
        title = f"{trace} · blocks of {block_size} · {pool:,} slots · {rows[0].live} live"
        if engines > 1:
            title += f" · {engines} engines, {rows[0].routing} routing"
        if phase != "all":
            title += f" · {phase}: {PHASES[phase]}"
        both = len({row.sharing for row in rows}) > 1
        if both:
            # What is to be compared stands side by side, and a table fits 120 columns.
            order = {row.policy: at for at, row in reversed(list(enumerate(rows)))}
            rows = sorted(rows, key=lambda row: (order[row.policy], row.sharing))
        width = max(1, (out.width - LABEL_WIDTH) // COLUMN_WIDTH)
        width = width - width % 2 if both and width > 1 else width
        out.print(f"\n{title}", style="bold")
        for first in range(0, len(rows), width):
            out.print(_table(rows[first : first + width], both=both))
        out.print(_caption(rows), style="dim")
    if groups:
        out.print(LEGEND, style="dim")
    if any(beaten(row) for rows in groups.values() for row in rows):
        out.print(
            f"{BEATEN.strip()}: more was found than this part of what is best for the whole run", style="dim"
        )


def _table(rows: list[Row], *, both: bool) -> Table:
    table = Table()
    table.add_column("", no_wrap=True)
    mixed = len({row.eviction for row in rows}) > 1
    compared = any(row.means != "eviction" for row in rows)
    for row in rows:
        name = f"{row.policy}\n{row.sharing}" if both else row.policy
        if mixed:
            name += f"\n{row.eviction}"
        if compared and row.policy == "slotted":
            name += f"\n{MEANS[row.means]}" + (f", {row.compaction}" if row.means == "moves" else "")
        table.add_column(name, justify="right", no_wrap=True, style="bold" if row.policy == "slotted" else "")
    for name, value in LINES:
        cells = [value(row) for row in rows]
        if name in OF_COMPACTION and not compared:
            continue
        if (
            name not in OPTIONAL
            or (compared and name in OF_MOVES)
            or any(cell not in (NONE, "0") for cell in cells)
        ):
            table.add_row(name, *cells)
    return table


def _caption(rows: list[Row]) -> str:
    spans = sorted(row.end_s - row.start_s for row in rows)
    first, last = _time(spans[0]), _time(spans[-1])
    # Who refuses and finds less takes longer over the same requests.
    took = first if first == last else f"{first} to {last}"
    requests = _common.several(rows[0].requests, "request")
    words = f"{requests}, {_common.several(rows[0].prompt_tokens, 'prompt token')}, {took} simulated"
    return words + (" · slotted by real processes" if any(row.via == "socket" for row in rows) else "")


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.2f} h"


def print_comparison(out: Console, result: ReplayResult) -> None:
    """Real processes against one process: a line for each run that was done both ways."""
    for told in result.meta.processes:
        if not told.beside:
            continue
        figures = {each.figure: each for each in told.beside}
        hit, waste = figures["hit_tokens_pct"], figures["internal_fragmentation_pct"]
        refusals = figures["refusals_per_hour"]
        apart = max(abs(each.socket - each.inproc) for each in (hit, waste))
        line = (
            f"{told.trace}, blocks of {told.block_size}: {len(told.clients)} client processes of a daemon against one "
            f"process: hits {hit.socket:.2f} / {hit.inproc:.2f} %, fragmentation {waste.socket:.2f} / "
            f"{waste.inproc:.2f} %, refusals an hour {refusals.socket:,.0f} / {refusals.inproc:,.0f}; at most "
            f"{apart:.2f} points apart (stated: {SPREAD_POINTS:g}). K and V of {told.painted_tokens:,} tokens were "
            f"painted and {told.verified_tokens:,} read back, all right; audit clean."
        )
        out.print(textwrap.fill(line, out.width - 2), style="" if apart <= SPREAD_POINTS else "bold")


def print_compaction(out: Console, result: ReplayResult) -> None:
    """What each of the means was worth, and what moves make of the same pools after a quiet night."""
    lines = list(result.meta.compaction)
    for told in result.meta.quiet_nights:
        each = told.moved_per_given_back
        lines.append(
            f"{told.trace}, blocks of {told.block_size:,}, at the end evicted to {told.occupancy_pct:.1f} % as in a "
            f"quiet night, then compacted to rest: wholly free blocks {told.blocks_free_before:,} -> "
            f"{told.blocks_free_after:,} of {told.usable_blocks:,}, free memory in runs of 32 blocks "
            f"{told.usable_run_pct_before:.1f} -> {told.usable_run_pct_after:.1f} %; "
            f"{_common.several(told.moved_tokens, 'token')} moved, "
            + (f"{each:.2f} a slot given back." if each is not None else "no block given back.")
        )
    if lines:
        out.print("\nCompaction", style="bold")
    for line in lines:
        out.print(textwrap.fill(line, out.width - 2, initial_indent="  · ", subsequent_indent="    "))


def _moved(told: CompactionReport) -> str:
    """What the daemon of a run by real processes says of its compaction."""
    several = _common.several
    words = (
        f"compaction {told.mode}: {several(told.moved_tokens, 'token')} moved in {several(told.published, 'move')} of "
        f"{told.planned:,} planned, {several(told.blocks_given_back, 'block')} given back; with them moved "
        f"{several(told.moved_ranges, 'range')} of the tables of sequences that ran, which followed. Abandoned "
        f"{told.abandoned_leased + told.abandoned_freed:,}, put off {told.deferred + told.over_budget:,}, failed "
        f"{told.failed:,}."
    )
    if told.rests:
        words += f" All stood still for it {several(told.rests, 'time')}, {told.rests_s:.1f} s in all"
        words += f", {several(told.rests_cut, 'time')} not long enough." if told.rests_cut else "."
    if told.overtaken:
        words += (
            f" {several(told.overtaken, 'time')} the daemon let the pool be for a while, as it changed faster than it "
            "can be followed: a replay goes as fast as it can."
        )
    elif told.rests and not told.planned:
        words += " Nothing was worth moving."
    if told.too_short:
        words += " The run was over before all would have stood still for it."
    return words


def print_processes(out: Console, result: ReplayResult) -> None:
    """What the clients of each run via a socket did, and how long the daemon took over each verb."""
    for told in result.meta.processes:
        out.print(
            f"\n{told.trace} · blocks of {told.block_size} · {len(told.clients)} client processes of a daemon",
            style="bold",
        )
        table = Table()
        for title in (
            "client",
            "requests",
            "round trips",
            "frames",
            "appended",
            "painted",
            "read back",
            "Allocate us",
        ):
            table.add_column(title, justify="right", no_wrap=True)
        for each in told.clients:
            if each.killed:
                table.add_row(str(each.client), "killed, as asked for", *[NONE] * 6)
                continue
            table.add_row(
                str(each.client),
                f"{each.requests:,}",
                f"{each.round_trips:,}",
                f"{each.frames_sent:,}",
                f"{each.appended_tokens:,}",
                f"{each.painted_tokens:,}",
                f"{each.verified_tokens:,}",
                _us(each.allocate_us),
            )
        out.print(table)
        table = Table()
        for title in ("daemon", "count", "refused", "us, mean", "p50 <", "p99 <"):
            table.add_column(title, justify="left" if title == "daemon" else "right", no_wrap=True)
        for row in told.daemon:
            times = [row.get(name) for name in ("all_us_mean", "all_us_p50", "all_us_p99")]
            cells = [NONE if value is None else f"{value:,.0f}" for value in times]
            table.add_row(str(row["verb"]), f"{row['count']:,}", f"{row['refused']:,}", *cells)
        out.print(table)
        out.print(
            f"painted {told.painted_tokens:,} tokens, read back {told.verified_tokens:,}, all right; "
            f"audit clean in {told.audit_ms:.0f} ms",
            style="dim",
        )
        if told.compaction is not None:
            out.print(textwrap.fill(_moved(told.compaction), out.width - 2))


def print_summary(out: Console, result: ReplayResult) -> None:
    """What slots, exact sharing and one pool were worth, in sentences; gains and nothings alike."""
    lines = summary(result)
    if lines:
        out.print("\nIn short", style="bold")
        for line in lines:
            out.print(textwrap.fill(line, out.width - 2, initial_indent="  · ", subsequent_indent="    "))
