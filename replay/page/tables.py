"""The parts of the page that stand without a script: what was replayed, the findings, tables and bars, definitions.

Every table is in the page from the start.  The script hides all but what is chosen; without one, all are shown.

Ids: a view (one table) is `v<group>-<phase>`, a definition `def-<key>`.  Classes `p0`, `p1`, ... stand for policies, so
that a policy's column, bar and line are coloured and hidden together; names themselves never become classes or ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvslot.replay.metrics import ReplayResult, Row, Run
from kvslot.replay.page.figures import (
    DASH,
    FIGURES,
    POLICIES,
    SECTIONS,
    SHARINGS,
    Figure,
    best,
    count,
    pct,
    rate,
    seconds,
    worth_showing,
)
from kvslot.replay.page.findings import Verdict, findings
from kvslot.replay.page.html import Html, el, join, name
from kvslot.replay.page.packing import STATES, state_means
from kvslot.replay.page.views import Group, Setup, label, means_words

COMPARE: Final[dict[str, Callable[[Row], float]]] = {
    "hit_tokens_pct": lambda r: r.hit_tokens_pct,
    "internal_fragmentation_pct": lambda r: r.internal_fragmentation_pct.mean,
    "reserved_pct": lambda r: r.reserved_pct.mean,
    "lost_hit_tokens": lambda r: r.lost_hit_tokens,
    "refusals_per_hour": lambda r: r.refusals_per_hour,
    "preemptions": lambda r: r.preemptions,
    "extents_per_1k_tokens": lambda r: r.extents_per_1k_tokens,
    "cpu_us_per_request": lambda r: r.cpu_us_per_request,
}
"""What the tables over block sizes and pools show, as numbers."""

VIEWS_MAX: Final = 120
"""Tables in one page.  Beyond, only those of the whole run are written, and the page says so."""
TRACES_OPEN: Final = 6
"""More traces than this are folded away, so that the findings stay in sight."""

VERDICTS: Final[dict[Verdict, str]] = {
    "gain": "gain",
    "nothing": "no gain",
    "price": "price",
    "fact": "note",
}

FATES: Final = (
    ("found", "found in the cache"),
    ("rounding", "seen before, lost to block rounding"),
    ("evicted", "seen before, lost to eviction"),
    ("new", "never seen before"),
)


class Shown(NamedTuple):
    """What the page is made from."""

    result: ReplayResult
    groups: list[Group]
    setups: dict[Setup, list[Group]]
    policies: dict[str, int]
    """A policy's number, in order of appearance."""
    all_phases: bool

    def run(self, row: Row) -> Run | None:
        """The run behind a row; None if the result holds none, as one read back from JSON."""
        return self.result.runs[row.run] if 0 <= row.run < len(self.result.runs) else None

    def policy_class(self, policy: str) -> str:
        return f"p{self.policies[policy]}"

    def phases(self, group: Group) -> list[str]:
        return list(group.phases) if self.all_phases else list(group.phases)[:1]


def view_id(group: Group, phase: str) -> str:
    return f"v{group.index}-{list(group.phases).index(phase)}"


def _term(figure: Figure) -> Html:
    """A figure's name that leads to its definition; the script shows it on the spot."""
    return el(
        "a", figure.label, class_="term", href=f"#def-{figure.key}", aria_describedby=f"def-{figure.key}"
    )


def _scroll(table: Html, what: str) -> Html:
    """A table that may be wider than the screen: it scrolls by itself, and by keyboard."""
    return el("div", table, class_="scroll", role="region", aria_label=what, tabindex="0")


def _starred(text: str) -> Html:
    """*stars* become strong."""
    parts = text.split("*")
    return join(*(el("strong", part) if i % 2 else part for i, part in enumerate(parts)))


# --- What was replayed ---------------------------------------------------------------------------------------------


def title(shown: Shown) -> str:
    traces = [trace.name for trace in shown.result.meta.traces]
    return ", ".join(traces) if 0 < len(traces) <= 3 else f"{len(traces)} traces" if traces else "No traces"


def replayed(shown: Shown) -> Html:
    meta, runs = shown.result.meta, shown.result.runs
    machine = meta.machine
    facts: list[tuple[str, Html]] = [
        ("Command", el("code", meta.command or DASH)),
        ("kvslot", join(meta.version, f" · seed {meta.seed}")),
        (
            "Run",
            join(meta.started.replace("T", " ").replace("+00:00", " UTC"), f" · took {seconds(meta.wall_s)}"),
        ),
        ("On", join(f"{machine.processor}, {machine.cpus} CPUs, {machine.system}, Python {machine.python}")),
    ]
    settings = ", ".join(f"{key}={value}" for key, value in meta.settings.items() if value is not None)
    if settings:
        facts.append(("Settings", el("code", settings)))
    number = len(runs) or len({row.run for row in shown.result.rows})
    what = f"{_plural(number, 'run')} of {_plural(len(meta.traces), 'trace')}"
    policies = f"under {_plural(len(shown.policies), 'policy', 'policies')}"
    return join(
        el("h1", name(title(shown)) if len(meta.traces) <= 3 else title(shown)),
        el(
            "p",
            f"{what} {policies}: recorded requests through real code for managing a KV cache, on a simulated clock.",
            class_="lead",
        ),
        el("dl", *(el("div", el("dt", key), el("dd", value)) for key, value in facts), class_="facts"),
        _traces(shown),
    )


def _plural(number: int, word: str, plural: str = "") -> str:
    return f"{number:,} {word if number == 1 else plural or word + 's'}"


def _traces(shown: Shown) -> Html:
    traces = shown.result.meta.traces
    if not traces:
        return Html("")
    numbers = ("Requests", "Prompt tokens", "Output tokens")
    body: list[Html] = []
    for trace in traces:
        setups = [setup for setup in shown.setups if setup.trace == trace.name]
        source = el("small", trace.note) if trace.note else Html("")
        body.append(
            el(
                "tr",
                el(
                    "th",
                    name(trace.name),
                    el("small", trace.kind),
                    source,
                    el("small", "SHA-256 ", el("code", trace.digest[:12], title=trace.digest)),
                    scope="row",
                ),
                el("td", count(trace.requests), class_="n"),
                el("td", count(trace.prompt_tokens), class_="n"),
                el("td", count(trace.output_tokens), class_="n"),
                el("td", trace.clock),
                el("td", *(el("div", setup.words()) for setup in setups)),
            )
        )
    table = el(
        "table",
        el(
            "thead",
            el(
                "tr",
                el("th", "Trace", scope="col"),
                *(el("th", each, scope="col", class_="n") for each in numbers),
                el("th", "Arrivals", scope="col"),
                el("th", "Replayed with", scope="col"),
            ),
        ),
        el("tbody", *body),
        class_="traces",
    )
    return el(
        "details",
        el("summary", "The traces"),
        _scroll(table, "Traces that were replayed"),
        open=len(traces) <= TRACES_OPEN,
    )


# --- Findings ------------------------------------------------------------------------------------------------------


def found(shown: Shown) -> Html:
    parts: list[Html] = []
    for setup, groups in shown.setups.items():
        items = [
            el(
                "li",
                el("span", VERDICTS[each.verdict], class_=f"verdict {each.verdict}"),
                el(
                    "span",
                    _starred(each.text),
                    " ",
                    el("a", "Show", class_="show", href=f"#{_first_view(shown, each.group)}"),
                ),
            )
            for each in findings(groups)
        ]
        if items:
            parts.append(
                el(
                    "div",
                    el("h3", name(setup.trace), el("small", setup.words())),
                    el("ul", *items, class_="findings"),
                    class_="found",
                )
            )
    if not parts:
        return el("p", "No run gave a row, so there is nothing to say.")
    return join(*parts)


def _first_view(shown: Shown, index: int) -> str:
    group = shown.groups[index]
    return view_id(group, "all" if "all" in group.phases else next(iter(group.phases)))


# --- One view: bars and table --------------------------------------------------------------------------------------


def views(shown: Shown) -> Html:
    return join(*(_view(shown, group, phase) for group in shown.groups for phase in shown.phases(group)))


def _view(shown: Shown, group: Group, phase: str) -> Html:
    rows = group.phases[phase]
    head = f"Blocks of {group.block_size:,}"
    what = shown.result.meta.phases.get(phase, "")
    first = rows[0]
    spans = sorted({seconds(row.end_s - row.start_s) for row in rows})
    ends = sorted(row.end_s - row.start_s for row in rows)
    lasted = spans[0] if len(spans) == 1 else f"{seconds(ends[0])} to {seconds(ends[-1])}"
    caption = (
        f"{_plural(first.requests, 'request')}, {_plural(first.prompt_tokens, 'prompt token')}, "
        f"{lasted} of simulated time"
    )
    usable = sorted({row.usable_tokens for row in rows})
    caption += f"; {' to '.join(count(each) for each in dict.fromkeys((usable[0], usable[-1])))} usable slots"
    ident = view_id(group, phase)
    return el(
        "article",
        el(
            "h3",
            name(group.setup.trace),
            el(
                "small",
                f"{head} · {group.setup.words()}"
                + (f" · {phase_words(phase)}: {what}" if phase != "all" else ""),
            ),
            id=f"{ident}-h",
        ),
        _fates(shown, rows),
        _slots(shown, rows),
        _table(shown, rows, f"{head}, {phase_words(phase)}", caption),
        class_="view",
        id=ident,
        aria_labelledby=f"{ident}-h",
    )


def phase_words(phase: str) -> str:
    return "whole run" if phase == "all" else phase.replace("_", " ")


def _column(shown: Shown, row: Row, both: bool) -> Html:
    return join(
        el(
            "span",
            class_="swatch" + (" dashed" if dashed(row, both) else ""),
            aria_hidden="true",
        ),
        el("bdi", row.policy, title=POLICIES.get(row.policy)),
        el("small", SHARINGS.get(row.sharing, row.sharing)) if both else Html(""),
        el("small", means_words(row)) if row.means != "eviction" else Html(""),
    )


def dashed(row: Row, both: bool) -> bool:
    """Whether a run is drawn beside another one of the same colour."""
    return (both and row.sharing == "partitioned") or row.means != "eviction"


def _table(shown: Shown, rows: Sequence[Row], what: str, caption: str) -> Html:
    both = len({row.sharing for row in rows}) > 1
    head = el(
        "tr",
        el("td"),
        *(
            el("th", _column(shown, row, both), scope="col", class_=f"n {shown.policy_class(row.policy)}")
            for row in rows
        ),
    )
    bodies: list[Html] = []
    for section, figures in SECTIONS:
        lines: list[Html] = []
        for figure in figures:
            if not worth_showing(figure, rows):
                continue
            marked = best(figure, rows)
            cells = [
                _cell(figure, row, shown.policy_class(row.policy), marked=i in marked)
                for i, row in enumerate(rows)
            ]
            lines.append(el("tr", el("th", _term(figure), el("small", figure.unit), scope="row"), *cells))
        bodies.append(
            el(
                "tbody",
                el("tr", el("th", section, scope="rowgroup", colspan=len(rows) + 1), class_="section"),
                *lines,
            )
        )
    table = el("table", el("caption", el("span", caption)), el("thead", head), *bodies, class_="figures")
    return _scroll(table, f"Figures: {what}")


def _cell(figure: Figure, row: Row, classes: str, *, marked: bool) -> Html:
    cell = figure.cell(row)
    return el(
        "td",
        el("b", cell.value, el("span", " (best)", class_="aside")) if marked else cell.value,
        el("small", cell.note) if cell.note else Html(""),
        class_=f"n {classes}" + (" best" if marked else ""),
    )


def _legend(kind: str, words: Sequence[tuple[str, str]]) -> Html:
    return el(
        "ul",
        *(el("li", el("i", class_=f"{kind}-{key}", aria_hidden="true"), word) for key, word in words),
        class_="legend",
    )


def _bar(
    shown: Shown, row: Row, both: bool, kind: str, parts: Sequence[tuple[str, str, float]], value: str
) -> Html:
    """One line of bars; `parts`: key, word, share 0..1."""
    told = ", ".join(f"{word} {pct(100 * part)} %" for _, word, part in parts if part > 0)
    return el(
        "div",
        el("span", label(row, both), class_="who"),
        el(
            "span",
            *(
                el(
                    "i",
                    class_=f"{kind}-{key}",
                    style=f"width:{100 * part:.3f}%",
                    title=f"{word}: {pct(100 * part)} %",
                )
                for key, word, part in parts
                if part > 0
            ),
            class_="bar",
            role="img",
            aria_label=f"{label(row, both)}: {told or 'nothing'}",
        ),
        el("span", value, class_="value"),
        class_=f"line {shown.policy_class(row.policy)}",
    )


def _fates(shown: Shown, rows: Sequence[Row]) -> Html:
    """Where the prompt tokens went."""
    both = len({row.sharing for row in rows}) > 1
    lines: list[Html] = []
    for row in rows:
        whole = row.prompt_tokens or 1
        known = (row.hit_tokens / whole, row.lost_hit_tokens / whole, row.evicted_hit_tokens / whole)
        shares = (*known, max(0.0, 1 - sum(known)) if row.prompt_tokens else 0.0)
        parts = [(key, word, part) for (key, word), part in zip(FATES, shares, strict=True)]
        lines.append(_bar(shown, row, both, "fate", parts, f"{pct(row.hit_tokens_pct)} %"))
    told = next((row for row in rows if row.policy == "slotted"), rows[0])
    optimum = told.hit_tokens_pct_optimum
    note = "Right: found in the cache."
    if optimum is not None:
        note += f" An eviction that knew the future would find {pct(optimum)} % under {told.policy}."
    return el(
        "section",
        el("h4", "Where the prompt tokens went"),
        el("div", *lines, class_="lines"),
        _legend("fate", FATES),
        el("p", note, class_="note"),
        class_="bars",
    )


def _slots(shown: Shown, rows: Sequence[Row]) -> Html:
    """Where the pool's slots went, on average over the phase."""
    both = len({row.sharing for row in rows}) > 1
    means: list[tuple[Row, dict[str, float]]] = []
    for row in rows:
        run = shown.run(row)
        if run is not None and (states := state_means(run, row.start_s, row.end_s)):
            means.append((row, states))
    if not means:
        return Html("")
    present = [(key, word) for key, word, _ in STATES if any(states[key] > 0 for _, states in means)]
    lines = [
        _bar(
            shown,
            row,
            both,
            "state",
            [(key, word, states[key]) for key, word in present],
            f"{pct(row.occupancy_pct.mean)} %",
        )
        for row, states in means
    ]
    return el(
        "section",
        el("h4", "Where the slots went, on average"),
        el("div", *lines, class_="lines"),
        _legend("state", present),
        el("p", "Right: slots that hold distinct tokens.", class_="note"),
        class_="bars",
    )


# --- Block sizes, pools ----------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A line that recurs under each figure of a comparison."""

    policy: str
    words: str
    rows: list[Row | None]
    """One a column."""


def sizes(shown: Shown) -> Html:
    """What another block size costs: per setup, policies down and block sizes across."""
    parts: list[Html] = []
    for number, (setup, groups) in enumerate(shown.setups.items()):
        columns = [group.block_size for group in groups]
        if len(columns) < 2:
            body = el(
                "p",
                f"Only blocks of {columns[0]:,} were replayed. To compare: ",
                el("code", "kvslotctl replay TRACE --block-size 16 32 64 128 --html FILE"),
                class_="note",
            )
        else:
            both = len({row.sharing for group in groups for row in group.rows}) > 1
            found: dict[tuple[str, str, str], dict[int, Row]] = {}
            for group in groups:
                for row in group.rows:
                    found.setdefault((row.policy, row.sharing, row.means), {})[group.block_size] = row
            lines = [
                Line(
                    policy, label(next(iter(by_size.values())), both), [by_size.get(size) for size in columns]
                )
                for (policy, *_), by_size in found.items()
            ]
            heads = [f"{size:,}" for size in columns]
            body = join(
                el("div", class_="size-plots", data_setup=number),
                _matrices(shown, "Block size", heads, lines, difference=False),
            )
        parts.append(_comparison("What another block size costs", setup, body, "sizes", number))
    return join(*parts)


def pools(shown: Shown) -> Html:
    """What one pool for all engines is worth: per setup that was replayed both ways."""
    parts: list[Html] = []
    for number, (setup, groups) in enumerate(shown.setups.items()):
        lines: list[Line] = []
        for group in groups:
            by_policy: dict[str, dict[str, Row]] = {}
            for row in group.rows:
                if row.means == "eviction":
                    by_policy.setdefault(row.policy, {})[row.sharing] = row
            lines += [
                Line(
                    policy,
                    policy if len(groups) == 1 else f"{policy}, blocks of {group.block_size:,}",
                    [ways["partitioned"], ways["shared"]],
                )
                for policy, ways in by_policy.items()
                if {"partitioned", "shared"} <= ways.keys()
            ]
        if lines and setup.engines > 1:
            heads = ["A pool each", "One pool"]
            body = _matrices(shown, "", heads, lines, difference=True)
        else:
            body = el(
                "p",
                "To compare several engines with a pool each against one pool: ",
                el("code", "kvslotctl replay TRACE --engines 4 --routing random --sharing both --html FILE"),
                class_="note",
            )
        parts.append(_comparison("What one shared pool gives", setup, body, "pools", number))
    return join(*parts)


def _comparison(head: str, setup: Setup, body: Html, classes: str, number: int) -> Html:
    return el(
        "article",
        el("h3", head, el("small", name(setup.trace), f" · {setup.words()}")),
        body,
        class_=classes,
        data_setup=number,
    )


def _matrices(
    shown: Shown, corner: str, heads: Sequence[str], lines: Sequence[Line], *, difference: bool
) -> Html:
    """One small table a figure: a line a policy, and across what is compared."""
    every = [row for line in lines for row in line.rows if row is not None]
    columns = [*heads, "Difference"] if difference else list(heads)
    head = el("tr", el("td", corner), *(el("th", each, scope="col", class_="n") for each in columns))
    swatch = el("span", class_="swatch", aria_hidden="true")
    parts: list[Html] = []
    for key in COMPARE:
        figure = FIGURES[key]
        if all(COMPARE[key](row) == 0 for row in every):
            continue
        body: list[Html] = []
        for line in lines:
            cells = [
                el("td", DASH if row is None else figure.cell(row).value, class_="n") for row in line.rows
            ]
            if difference:
                cells.append(el("td", _difference(figure, line.rows), class_="n"))
            who = el("th", swatch, el("bdi", line.words), scope="row")
            body.append(el("tr", who, *cells, class_=shown.policy_class(line.policy)))
        caption = el("caption", _term(figure), el("small", figure.unit))
        table = el("table", caption, el("thead", head), el("tbody", *body), class_="matrix")
        parts.append(_scroll(table, figure.label))
    return el("div", *parts, class_="matrices")


def _difference(figure: Figure, rows: Sequence[Row | None]) -> str:
    """Second less first, with its sign."""
    if len(rows) != 2 or rows[0] is None or rows[1] is None:
        return DASH
    value = COMPARE[figure.key]
    change = value(rows[1]) - value(rows[0])
    words = pct if figure.unit.startswith("%") else count if figure.unit == "tokens" else rate
    digits = words(abs(change))
    return "±0" if float(digits.replace(",", "")) == 0 else f"{'+' if change > 0 else '−'}{digits}"


# --- Definitions -----------------------------------------------------------------------------------------------------


def definitions(shown: Shown) -> Html:
    names: dict[str, str] = {}
    before = ""
    for figure in FIGURES.values():
        # In the table a label may go on from the one above it; here it stands alone.
        goes_on = figure.label.startswith("… ")
        names[figure.key] = f"{before} {figure.label[2:]}" if goes_on else figure.label
        before = before if goes_on else figure.label
    figures = [
        el(
            "div",
            el("dt", names[figure.key], " ", el("small", figure.unit), " ", el("code", figure.key)),
            el("dd", figure.meaning, id=f"def-{figure.key}"),
        )
        for figure in FIGURES.values()
    ]
    policies = [
        el("div", el("dt", el("bdi", policy)), el("dd", POLICIES[policy]))
        for policy in shown.policies
        if policy in POLICIES
    ]
    states = [
        el("div", el("dt", word), el("dd", f"{meaning[0].upper()}{meaning[1:]}."))
        for _, word, meaning in STATES
    ]
    phases = [
        el("div", el("dt", phase_words(phase)), el("dd", f"{meaning[0].upper()}{meaning[1:]}."))
        for phase, meaning in shown.result.meta.phases.items()
        if meaning
    ]
    return join(
        *(
            join(el("h3", head), el("dl", *items, class_="terms"))
            for head, items in (
                ("Policies", policies),
                ("Figures", figures),
                ("States of a slot", states),
                ("Phases", phases),
            )
            if items
        )
    )


def limits(shown: Shown) -> str:
    """What was left out to keep the page small; empty if nothing was."""
    if shown.all_phases:
        return ""
    return "There are many runs, so this page has the tables of whole runs only; the JSON has all phases."
