"""`kvslotctl replay --html`: everything that one command replayed, as one page that needs nothing else.

The page is for a capacity planner: what was replayed, what came of it in sentences, the table, what another block size
or one shared pool would have changed, plots over simulated time, and pictures of the pool's blocks.

    frame (page.html)  =  style (page.css)  +  parts that stand without a script (page/tables.py)
                          +  data: series and pictures, packed (page/packing.py)  +  script (page.js)

It loads nothing: style, script and data are inline, and its content policy forbids all else.  The same result gives the
same page.  It works from a file, in light and dark, printed, on a phone, by keyboard; without a script, tables,
findings and definitions remain.  Size: the packed data has a budget, and many runs get fewer tables (`VIEWS_MAX`).
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Final

import msgspec

from kvslot.replay.cases import WITHOUT_BLOCKS
from kvslot.replay.metrics import ReplayResult
from kvslot.replay.page import compaction, tables
from kvslot.replay.page.figures import POLICIES
from kvslot.replay.page.html import Html, clean, el, script_json, text
from kvslot.replay.page.packing import STATES, pack
from kvslot.replay.page.views import by_setup, groups_of, label

PARTS: Final = "kvslot.replay.page"


def write_html(path: Path, result: ReplayResult) -> None:
    """Write the page; the folder exists.  Raises OSError where it cannot be written."""
    path.write_text(render(result), encoding="utf-8")


def render(result: ReplayResult) -> str:
    """The page as text.  A result without rows, series or pictures gives a page without those."""
    shown = _shown(result)
    return Template(_part("page.html")).substitute(
        title=text(f"{tables.title(shown)} · kvslot replay"),
        style=_part("page.css") + _policy_styles(shown) + "\n" + compaction.styles(),
        script=_part("page.js"),
        replayed=tables.replayed(shown),
        findings=tables.found(shown),
        views=tables.views(shown),
        sizes=tables.sizes(shown),
        pools=tables.pools(shown),
        compaction=_compaction(shown),
        definitions=tables.definitions(shown),
        limits=text(tables.limits(shown)),
        version=text(result.meta.version),
        data=script_json(msgspec.json.encode(_data(shown))),
    )


def _part(name: str) -> Html:
    return Html(files(PARTS).joinpath(name).read_text(encoding="utf-8"))


def _compaction(shown: tables.Shown) -> Html:
    """The pictures before and after, a section of their own; empty where no run has any."""
    body = compaction.section(shown.result.runs)
    return el("section", body, id="compaction", aria_labelledby="compaction-h") if body else Html("")


def _policy_styles(shown: tables.Shown) -> str:
    """Each policy's colour, and what hides it.  Names from outside get a spare colour and never stand in a style."""
    rules = []
    for policy, number in shown.policies.items():
        colour = policy if policy in POLICIES else "other"
        rules.append(
            f".p{number} {{ --c: var(--{colour}); }} .hide-p{number} .p{number}:not(.keep) {{ display: none; }}"
        )
    return "\n".join(rules)


def _shown(result: ReplayResult) -> tables.Shown:
    groups = groups_of(result.rows)
    policies = {row.policy: 0 for row in result.rows}
    return tables.Shown(
        result=result,
        groups=groups,
        setups=by_setup(groups),
        policies={policy: number for number, policy in enumerate(policies)},
        all_phases=sum(len(group.phases) for group in groups) <= tables.VIEWS_MAX,
    )


def _data(shown: tables.Shown) -> dict[str, Any]:
    """What the script draws from.  Runs come in the order of the groups' columns."""
    wanted: list[int] = []
    groups: list[dict[str, Any]] = []
    setups = list(shown.setups)
    for group in shown.groups:
        both = len({row.sharing for row in group.rows}) > 1
        columns = []
        for row in group.rows:
            known = shown.run(row) is not None
            if known:
                wanted.append(row.run)
            columns.append(
                {
                    "policy": shown.policies[row.policy],
                    "label": clean(label(row, both)),
                    "dashed": tables.dashed(row, both),
                    "run": len(wanted) - 1 if known else -1,
                    "waste": round(row.internal_fragmentation_pct.mean, 3),
                    "hits": round(row.hit_tokens_pct, 3),
                }
            )
        groups.append(
            {
                "setup": setups.index(group.setup),
                "block": group.block_size,
                "columns": columns,
                "phases": [
                    [
                        tables.view_id(group, phase),
                        clean(tables.phase_words(phase)),
                        clean(shown.result.meta.phases.get(phase, "")),
                    ]
                    for phase in shown.phases(group)
                ],
            }
        )
    packed = pack([shown.result.runs[index] for index in wanted])
    return {
        "setups": [[clean(setup.trace), clean(setup.words())] for setup in setups],
        "policies": [clean(policy) for policy in shown.policies],
        "without_blocks": [n for policy, n in shown.policies.items() if policy in WITHOUT_BLOCKS],
        "groups": groups,
        "states": [[key, word] for key, word, _ in STATES],
        "series": packed.series,
        "series_of": packed.series_of,
        "pictures": packed.pictures,
        "pictures_of": packed.pictures_of,
    }


__all__ = ["render", "write_html"]
