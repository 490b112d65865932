"""docs/metrics.md, the dashboard and the alerts use the metrics that there are, in both directions."""

import functools
import re

from kvslot.api.admin import metrics
from kvslot.daemon import config

from ..household.tree import ROOT
from . import samples

ROW = re.compile(r"^\| `(kvslot_\w+)` \| (\w+) \| ([^|]*) \| (.*) \|$", re.MULTILINE)


def told() -> dict[str, tuple[str, frozenset[str], str]]:
    """The page's tables: by name, what it is, its labels, its text."""
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    rows = {
        name: (kind, frozenset(re.findall(r"`(\w+)`", labels)), means)
        for name, kind, labels, means in ROW.findall(text)
    }
    assert len(rows) == len(ROW.findall(text)), "a metric has two rows"
    return rows


@functools.cache
def served() -> dict[str, tuple[str, frozenset[str], str]]:
    """The same of the code."""
    found = {}
    for family in samples.families():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = {key for each in family.samples for key in each.labels} - {"le"}
        kind = "gauge" if family.type == "info" else family.type
        found[family.name + suffix] = (kind, frozenset(labels), family.documentation)
    return found


def test_the_page_has_every_metric_and_no_other() -> None:
    """Name, type, labels and text of docs/metrics.md are those that a scrape gives."""
    assert told() == served()


def test_other_pages_name_metrics_that_there_are() -> None:
    """Whatever a page calls a metric is one, a histogram's parts included."""
    known = set(served())
    for name, (kind, _, _) in served().items():
        if kind == "histogram":
            known |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        for name in re.findall(r"`(kvslot_[a-z_]+)[`{\[]", path.read_text(encoding="utf-8")):
            assert name in known, f"{path.name}: {name}"


def test_states_and_modes_are_those_of_the_compactor() -> None:
    """Whatever state compaction is in has a series, so that one of them is always 1."""
    source = (ROOT / "daemon/compactor.py").read_text(encoding="utf-8")
    assert set(re.findall(r"\.state = \"([a-z ]+)\"", source)) <= set(metrics.COMPACTION_STATES)
    assert set(metrics.MODES) == set(config.SETTINGS["compaction"].choices)
