"""docs/operations.md names only what there is: commands that parse, metrics, events, settings and alerts that exist."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from kvslot.cli import checks, ctl
from kvslot.daemon import config
from kvslot.daemon.main import parser as daemon_parser

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "operations.md").read_text(encoding="utf-8")


def said(program: str) -> list[list[str]]:
    """Every call of a program in code: the words behind its name, up to what a shell takes for itself."""
    lines = [line for block in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"```\n.*?```", "", PAGE, flags=re.DOTALL))
    found = []
    for line in lines:
        for part in re.split(r"&&|\|\||;|\|", line.split("  #")[0]):
            match = re.match(rf"\s*(?:sudo -u \w+ )?(?:/\S+/)?{program}(?:\s+(.*))?$", part)
            if match and match[1]:
                found.append(shlex.split(re.sub(r"\s>.*", "", match[1])))
    return found


def test_every_command_there_can_be_typed() -> None:
    """Each `kvslotctl ...` parses; one that is only named has no arguments that would be missing."""
    top = ctl.parser()
    commands = next(each for each in top._actions if isinstance(each, argparse._SubParsersAction)).choices
    calls = said("kvslotctl")
    assert len(calls) > 40
    for words in calls:
        if words[0].startswith("-"):
            continue
        command = commands[words[0]]
        needed = [
            each for each in command._actions
            if not each.option_strings and each.nargs not in ("?", "*") and not each.choices
        ]  # fmt: skip
        if words[1:] or not needed:
            try:
                top.parse_args(words)
            except SystemExit:
                if words != ["defrag"]:
                    pytest.fail(f"kvslotctl {' '.join(words)}")
        if words[0] == "doctor":
            assert {word for word in words[1:] if not word.startswith("-") and "." not in word} <= set(
                checks.CHECKS
            )
    for words in said("kvslotd"):
        for word in words:
            if word.startswith("--"):
                assert word.partition("=")[0] in daemon_parser()._option_string_actions


def test_metrics_events_and_alerts_are_those_that_there_are() -> None:
    """Names of metrics are in metrics.md, events in events.md, and every alert has its place in the runbook."""
    metrics = (DOCS / "metrics.md").read_text(encoding="utf-8")
    for name in set(re.findall(r"\bkvslot_[a-z_]+", PAGE)):
        assert f"`{name}`" in metrics, name
    events = set(
        re.findall(r"^\| `([a-z_]+)` \|", (DOCS / "events.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    named = {
        "never", "cannot_start", "internal_fault", "watchdog_withheld", "accept_failed", "audit_failed",
        "admin_unavailable", "warm_start", "cold_start", "peer_fault", "posted_refused", "prefault",
    }  # fmt: skip
    assert named <= events
    assert all(f"`{name}`" in PAGE for name in named)
    alerts = set(re.findall(r"- alert: (\w+)", (DOCS / "alerts.yml").read_text(encoding="utf-8")))
    table = PAGE.partition("## From alert to remedy")[2]
    assert set(re.findall(r"\bKvslot\w+", table)) == alerts
    assert set(re.findall(r"\bKvslot\w+", PAGE)) == alerts


def test_settings_are_those_that_there_are() -> None:
    """What it tells to set can be set."""
    known = {*config.SETTINGS, *config.POOL, *config.LAYOUT}
    for name in re.findall(r"`([a-z_]+) = ", PAGE):
        assert name in known, name
    for name in (
        "sessions_max",
        "drain_seconds",
        "watermark",
        "quota",
        "compaction_duty",
        "admin_tcp",
        "model_config",
    ):
        assert f"`{name}`" in PAGE
        assert name in known


def test_links_within_the_page_lead_somewhere() -> None:
    """Each anchor is a heading, by the rule of those who show Markdown."""
    headings = re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", PAGE)) <= anchors
    below = PAGE.partition("## Runbook")[2].partition("\n## ")[0]
    for heading in re.findall(r"^### (.*)$", below, re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        body = below.partition(f"### {heading}\n")[2].partition("\n### ")[0]
        assert "`" in body, f"{anchor}: nothing to type"
