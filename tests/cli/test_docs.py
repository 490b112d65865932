"""`kvslotctl docs`: whoever has the installation alone finds the pages, what they say of a word, and the files."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from kvslot.cli import ctl, docs

DOCS = Path(__file__).resolve().parents[2] / "docs"


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints; it succeeds."""
    assert ctl.main(["docs", *words]) == 0
    out, err = capsys.readouterr()
    assert not err
    return out


def test_the_list_has_every_page_rules_and_dashboard(capsys: pytest.CaptureFixture[str]) -> None:
    """Every page that there is has its row with a title, and its file is where the row says."""
    rows = json.loads(said(capsys, "--json"))["rows"]
    names = [row["name"] for row in rows]
    assert names[:3] == ["operations", "events", "metrics"]
    assert {"admin", "security", "restart", "systemd", "daemon", "alerts", "dashboard", "units"} <= set(names)
    assert {each.stem for each in DOCS.glob("*.md")} <= set(names)
    assert all(row["title"] and Path(row["path"]).is_file() for row in rows)
    shown = said(capsys)
    assert all(name in shown for name in names)
    assert said(capsys, "--path").strip() == str(docs.FOLDER)


def test_a_page_is_printed_as_its_file_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    """By its name, its file's name, or as a link names it; so are rules and dashboard, ready to be copied."""
    for name, file in (
        ("operations", "operations.md"),
        ("events.md", "events.md"),
        ("integrations/vllm.md", "integrations/vllm.md"),
        ("alerts", "alerts.yml"),
        ("dashboard", "grafana/kvslot.json"),
        ("grafana/kvslot.json", "grafana/kvslot.json"),
        ("../systemd/README.md", "../systemd/README.md"),
    ):
        assert said(capsys, name) == (DOCS / file).read_text(encoding="utf-8")
        assert Path(said(capsys, name, "--path").strip()).samefile(DOCS / file)


def test_every_link_of_the_runbook_leads_to_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    """What a link within a page says can be typed, and shows what stands below that heading and no more."""
    import re

    page = (DOCS / "operations.md").read_text(encoding="utf-8")
    anchors = set(re.findall(r"\]\((\w+\.md)?#([^)]*)\)", page))
    assert len(anchors) > 20
    for file, anchor in anchors:
        assert said(capsys, f"{file or 'operations'}#{anchor}").startswith("#")
    section = said(capsys, "operations#requests-wait")
    assert section.startswith("### Requests wait\n")
    assert "### " not in section[3:]
    # A heading of the text, and not the comment in a shell's example.
    assert said(capsys, "operations", "woken", "by").startswith("## Woken by it\n")


def test_a_word_shows_what_is_said_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Sections by their heading; else rows with the head of their table, and paragraphs."""
    assert said(capsys, "operations", "requests", "wait") == said(capsys, "operations#requests-wait")
    head, rule, row = said(capsys, "events", "Watchdog_Withheld").strip().splitlines()
    assert head.startswith("| event |")
    assert rule.startswith("| ---")
    assert row.startswith("| `watchdog_withheld` |")
    assert "KvslotNeverFits" in said(capsys, "operations", "KvslotNeverFits")
    within = said(capsys, "operations#from-alert-to-remedy", "KvslotNeverFits").strip().splitlines()
    assert len(within) == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["operation"], "did you mean operations?"),
        (["nothing-like-it"], "kvslotctl docs lists them"),
        (["../../../etc/passwd"], "there is no page"),
        (["page-dark.png"], "is no text"),
        (["operations", "xyzzy"], "nothing about 'xyzzy'"),
        (["operations#xyzzy"], "nothing about '#xyzzy'"),
    ],
)
def test_what_there_is_not_is_said(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line on standard error, with 2."""
    assert ctl.main(["docs", *words]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert told in err
    assert err.count("\n") == 1


def test_an_installation_without_them_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A packager may leave them out: that is no fault with a traceback."""
    monkeypatch.setattr(docs, "FOLDER", tmp_path / "docs")
    assert ctl.main(["docs"]) == 3
    assert "has no" in capsys.readouterr().err


def test_on_a_terminal_a_page_goes_through_the_pager() -> None:
    """Laid out, with its table's rules drawn, and handed to $PAGER; one that leaves early is no fault."""
    for pager, expected in (("cat", "─"), ("head -c 0", ""), ("/nowhere/pager", "─")):
        controller, terminal = pty.openpty()
        environ = {**os.environ, "PAGER": pager, "TERM": "dumb", "COLUMNS": "100", "LC_ALL": "C.UTF-8"}
        command = [sys.executable, "-Im", "kvslot.cli.ctl", "docs", "events", "accept_failed"]
        with subprocess.Popen(command, stdout=terminal, stderr=subprocess.PIPE, env=environ) as process:
            os.close(terminal)
            shown = b""
            while True:
                try:
                    more = os.read(controller, 1 << 16)
                except OSError:
                    break
                if not more:
                    break
                shown += more
            assert process.stderr is not None
            assert process.stderr.read() == b""
        os.close(controller)
        assert process.returncode == 0
        assert expected in shown.decode()
        assert "| --- |" not in shown.decode()
