"""Alerts and dashboard on a live scrape: all that they name is there, nothing fires when all is well, each can fire.

Checked with promtool, which Debian has in its package `prometheus`.  The rules see the series of a real scrape, as they
are, for a day; then, for each alert, what it is for.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvslot.api.wire import messages

from ..household.tree import ROOT
from ..tools.daemon import running
from ..tools.wire import Wire, tokens
from .scraping import Scrape, scrape
from .test_pages import served

ALERTS = ROOT / "docs/alerts.yml"
DASHBOARD = ROOT / "docs/grafana/kvslot.json"
SCRAPED = {"job": "kvslot", "instance": "host:9477"}
"""Labels that Prometheus adds."""
STANDARD = {
    "up", "process_cpu_seconds_total", "process_max_fds", "process_open_fds", "process_start_time_seconds",
}  # fmt: skip
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


@pytest.fixture(scope="module")
def live() -> Iterator[Scrape]:
    """A scrape of a daemon that has been asked a few things."""
    with running() as daemon:
        with Wire(daemon.socket) as wire:
            wire.hello()
            for number in range(1, 41):
                wire.call(messages.Allocate, namespace=wire.namespace, sequence=number, tokens=tokens(9))
                wire.call(messages.Free, sequence=number)
        yield scrape(daemon.socket)


# -- what they name ---------------------------------------------------------------------------------------------------


def rules() -> dict[str, str]:
    """Expressions of the alerts, by name.  The file is flat enough to be read without a library for YAML."""
    text = ALERTS.read_text(encoding="utf-8")
    found = {}
    for block in text.split("- alert: ")[1:]:
        name, _, rest = block.partition("\n")
        match = re.search(r"\n +expr: (?:>-\n((?:           .*\n)+)|(.*)\n)", "\n" + rest)
        assert match is not None, name
        found[name] = " ".join((match[1] or match[2]).split())
    return found


def panels() -> list[dict[str, Any]]:
    """Of the dashboard."""
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return found


def queries() -> list[str]:
    """What the dashboard asks, with its variables filled in."""
    filled = []
    for panel in panels():
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in (
                ("$__rate_interval", "5m"),
                ("$instance", ".*"),
                ("$job", ".*"),
                ("$pool", ".*"),
            ):
                text = text.replace(name, value)
            assert "$" not in text, text
            filled.append(text)
    return filled


def unknown(expression: str) -> list[str]:
    """Metrics, labels and labels' values of an expression that there are not."""
    known: dict[str, set[str]] = {}
    for name, (kind, labels, _) in served().items():
        known[name] = set(labels)
        if kind == "histogram":
            known |= {
                f"{name}_bucket": known[name] | {"le"},
                f"{name}_sum": known[name],
                f"{name}_count": known[name],
            }
    known |= {name: set() for name in STANDARD}
    wrong = []
    used: set[str] = set()
    for name, selector in re.findall(r"\b(up|(?:kvslot|process)_\w+)(\{[^}]*\})?", expression):
        if name not in known:
            wrong.append(name)
            continue
        has = known[name] | set(SCRAPED)
        used |= has
        wrong += [
            f"{name}{{{label}}}"
            for label in re.findall(r"(\w+)(?:=~|!~|!=|=)\"", selector)
            if label not in has
        ]
    for words in re.findall(r"\b(?:by|without|on|ignoring) \(([^)]*)\)", expression):
        wrong += [f"label {word}" for word in re.findall(r"\w+", words) if word not in used]
    return wrong


def test_alerts_and_dashboard_name_what_there_is() -> None:
    """Every metric and label in them is served; each alert has a severity, a summary and a remedy."""
    for name, expression in rules().items():
        assert not unknown(expression), name
    for expression in queries():
        assert not unknown(expression), expression
    text = ALERTS.read_text(encoding="utf-8")
    for word in ("severity: ", "summary: ", "remedy: "):
        assert text.count(word) >= len(rules()), f"an alert without {word}"
    assert unknown('sum by (pol) (rate(kvslot_pool_slots{state="x",nothing="y"}[5m])) + kvslot_none') == [
        'kvslot_pool_slots{nothing}', "kvslot_none", "label pol",
    ]  # fmt: skip


def test_values_of_labels_in_them_are_served(live: Scrape) -> None:
    """A label's value that is asked for by name is one that a scrape can have."""
    values: dict[str, set[str]] = {}
    for _, labels in live.values:
        for label, value in labels:
            values.setdefault(label, set()).add(value)
    for expression in [*rules().values(), *queries()]:
        for label, value in re.findall(r'(\w+)(?:=|!=)"([^"]*)"', expression):
            if label not in SCRAPED:
                assert value in values[label], f"{label}={value}: {expression}"


def test_panels_lie_side_by_side() -> None:
    """No panel covers another or reaches beyond the 24 columns; numbers are used once; each says what it shows."""
    taken: set[tuple[int, int]] = set()
    numbers = [panel["id"] for panel in panels()]
    assert len(numbers) == len(set(numbers))
    for panel in panels():
        at = panel["gridPos"]
        assert 0 <= at["x"] <= at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            assert panel["targets"], panel["title"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


# -- promtool ---------------------------------------------------------------------------------------------------------


def promtool(*words: str, text: str = "") -> str:
    """Runs it; what it says, which must be that all is well."""
    command = ["promtool", *words]
    done = subprocess.run(command, check=False, input=text, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_promtool
def test_a_live_scrape_passes_promtool(live: Scrape) -> None:
    """Names, types, units and helps are as Prometheus would have them."""
    assert promtool("check", "metrics", text=live.text) == ""


@needs_promtool
def test_rules_and_queries_pass_promtool(tmp_path: Path) -> None:
    """Alerts are valid rules, and every query of the dashboard is one that Prometheus can parse."""
    assert f"{len(rules())} rules found" in promtool("check", "rules", str(ALERTS))
    groups = [{"name": "q", "rules": [{"record": f"q{n}", "expr": each} for n, each in enumerate(queries())]}]
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": groups}))  # JSON is YAML
    assert f"{len(queries())} rules found" in promtool("check", "rules", str(file))


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    """An input of promtool's."""
    whole = {**labels, **SCRAPED}
    return {
        "series": name + "{" + ",".join(f"{key}={json.dumps(value)}" for key, value in whole.items()) + "}",
        "values": values,
    }


POOL = {"pool": "default"}
PLANTED: dict[str, tuple[str, list[dict[str, str]]]] = {
    "KvslotDown": ("10m", [series("up", "0x60")]),
    "KvslotRestarts": ("14m", [series("process_start_time_seconds", "1 1 1 5 5 9 9 13 13 13 17x20")]),
    "KvslotUnhealthy": ("5m", [series("kvslot_health_check", "0x60", check="device")]),
    "KvslotMiscounts": ("30m", [series("kvslot_audit_faults_total", "0x10 1x60")]),
    "KvslotDrainsLong": ("10m", [series("kvslot_draining", "1x60")]),
    "KvslotRequestsWait": ("10m", [series("kvslot_pool_oldest_wait_seconds", "11x60", **POOL)]),
    "KvslotNoRoom": ("20m", [
        series("kvslot_pool_slots", "10x60", state="free", **POOL),
        series("kvslot_pool_evictable_tokens", "30x60", **POOL),
        series("kvslot_pool_usable_slots", "1000x60", **POOL),
    ]),
    "KvslotNeverFits": ("20m", [series("kvslot_pool_never_total", "0x15 1x60", **POOL)]),
    "KvslotQuarantine": ("20m", [
        series("kvslot_pool_slots", "60x60", state="quarantined", **POOL),
        series("kvslot_pool_usable_slots", "1000x60", **POOL),
    ]),
    "KvslotUnsettled": ("20m", [series("kvslot_pool_unsettled", "1x60", **POOL)]),
    "KvslotRunsMissing": ("60m", [
        series("kvslot_pool_later_total", "0+1x90", reason="run", **POOL),
        series("kvslot_pool_usable_run_ratio", "0.05x90", blocks="32", **POOL),
    ]),
    "KvslotHitRateFell": ("4h", [
        series("kvslot_pool_prompt_tokens_total", "0+60000x260", **POOL),
        series("kvslot_pool_hit_tokens_total", "0+50000x120 6000000+1000x140", **POOL),
    ]),
    "KvslotSessionStalled": ("10m", [series("kvslot_stalled_sessions", "1x60")]),
    "KvslotSessionsLost": ("20m", [series("kvslot_sessions_lost_total", "0+1x60")]),
    "KvslotSessionsNearlyAll": ("20m", [
        series("kvslot_sessions", "95x60", state="live"),
        series("kvslot_sessions", "0x60", state="lost"),
        series("kvslot_sessions_limit", "100x60"),
    ]),
    "KvslotConnectionsRefused": ("20m", [series("kvslot_connections_refused_total", "0x10 1x60")]),
    "KvslotPeerFaults": ("20m", [series("kvslot_peer_faults_total", "0x10 1x60")]),
    "KvslotPostedErrors": ("20m", [series("kvslot_posted_errors_total", "0x10 1x60")]),
    "KvslotAllocateSlow": ("30m", [
        series("kvslot_request_step_seconds_bucket", f"0+{count}x60", le=edge, step="all", verb="Allocate")
        for edge, count in (("0.001048576", "1"), ("0.004194304", "1"), ("0.016777216", "9"), ("+Inf", "10"))
    ]),
    "KvslotLoopLate": ("20m", [series("kvslot_loop_late_seconds_total", "0+6x60")]),
    "KvslotCopiesMeetSteps": ("60m", [
        series("kvslot_compaction_collisions_total", "0+60x90", **POOL),
        series("kvslot_compaction_steps_total", "0+600x90", **POOL),
    ]),
    "KvslotCopiesFail": ("30m", [
        series("kvslot_compaction_moves_total", "0x10 3x60", outcome="failed", **POOL)
    ]),
    "KvslotDescriptors": ("20m", [series("process_open_fds", "900x60"), series("process_max_fds", "1000x60")]),
    "KvslotLogLost": ("20m", [series("kvslot_log_lost_lines_total", "0x10 2x60")]),
    "KvslotErrorsLogged": ("20m", [series("kvslot_log_events_total", "0x10 2x60", level="error")]),
}  # fmt: skip
"""For each alert what makes it fire, and when to look."""


def of_scrape(found: Scrape) -> list[dict[str, str]]:
    """The series of a scrape, as they are for two hours."""
    inputs = [series("up", "1x120")]
    for (name, labels), value in found.values.items():
        inputs.append(series(name, f"{value:.17g}x120".replace("inf", "Inf"), **dict(labels)))
    return inputs


def rule_tests(tmp_path: Path, tests: list[dict[str, Any]]) -> str:
    """Runs them against the alerts; what promtool says."""
    file = tmp_path / "tests.yml"
    whole = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}
    file.write_text(json.dumps(whole))
    command = ["promtool", "test", "rules", str(file)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def expects_nothing(
    inputs: list[dict[str, str]], names: list[str], when: str, interval: str = "1m"
) -> dict[str, Any]:
    """A test of promtool's: with these series, none of the alerts is raised at that time."""
    quiet = [{"alertname": name, "eval_time": when, "exp_alerts": []} for name in names]
    return {"interval": interval, "input_series": inputs, "alert_rule_test": quiet}


@needs_promtool
def test_nothing_fires_on_a_daemon_that_is_well(live: Scrape, tmp_path: Path) -> None:
    """The series of a live scrape, as they are for two hours, raise no alert."""
    told = rule_tests(tmp_path, [expects_nothing(of_scrape(live), [*rules()], "2h")])
    assert "SUCCESS" in told, told


@needs_promtool
def test_each_alert_fires_at_what_it_is_for(tmp_path: Path) -> None:
    """For every alert there is a course of its series that raises it, and its texts have no gaps."""
    assert set(PLANTED) == set(rules())
    tests = [expects_nothing(inputs, [name], when) for name, (when, inputs) in PLANTED.items()]
    told = rule_tests(tmp_path, tests)
    # What is told is how it differs from the nothing that was expected: each that is told of fired.
    fired = set(re.findall(r"alertname: (\w+), time", told))
    assert fired == set(rules()), told
    assert told.count("summary=") == len(fired)
    assert "no value" not in told
    assert "error executing" not in told
