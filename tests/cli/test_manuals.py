"""The manual pages in docs/man are what the parsers say now, and what `man` can show."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from kvslot.cli import ctl
from kvslot.daemon import config

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(ROOT.glob("docs/man/man?/*"))


def tool() -> ModuleType:
    """docs/manuals.py, which no package holds."""
    spec = importlib.util.spec_from_file_location("manuals", ROOT / "docs/manuals.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_what_the_parsers_say() -> None:
    """Who changes an option, a setting or a word writes the pages anew: python docs/manuals.py."""
    made = tool().pages()
    there = {
        page.relative_to(ROOT / "docs/man").as_posix(): page.read_text(encoding="utf-8") for page in PAGES
    }
    assert set(made) == set(there)
    stale = [name for name, text in made.items() if there[name] != text]
    assert not stale, "python docs/manuals.py"


def test_there_is_a_page_for_every_command_and_every_setting() -> None:
    """man kvslotctl-NAME for each, and in kvslot.toml(5) each setting with its default and range."""
    names = {page.name for page in PAGES}
    assert {f"kvslotctl-{name}.1" for name in ctl.COMMANDS} <= names
    assert {"kvslotctl.1", "kvslotd.8", "kvslot.toml.5"} <= names
    text = (ROOT / "docs/man/man5/kvslot.toml.5").read_text(encoding="utf-8")
    for key in (*config.SETTINGS, *config.POOL, *config.LAYOUT):
        assert re.search(rf"^\\fB{re.escape(key)}\b", text, re.MULTILINE), key


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_a_page_is_sound_in_the_eyes_of_a_formatter(page: Path) -> None:
    """mandoc's lint has nothing to say of it, but that it carries no date."""
    if shutil.which("mandoc") is None:
        pytest.skip("no mandoc here")
    done = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning", str(page)], capture_output=True, text=True, check=False
    )
    said = [line for line in done.stdout.splitlines() if "missing date" not in line]
    assert not said


def test_man_shows_what_help_says() -> None:
    """The words of a command's help stand in its page as `man` lays it out; so do its options and examples."""
    formatter = shutil.which("mandoc") or shutil.which("groff")
    if formatter is None:
        pytest.skip("neither mandoc nor groff here")
    how = [formatter, "-Tascii"] if formatter.endswith("mandoc") else [formatter, "-Tascii", "-man"]
    done = subprocess.run(
        [*how, str(ROOT / "docs/man/man1/kvslotctl-doctor.1")], capture_output=True, text=True, check=True
    )
    plain = re.sub(r".\x08", "", done.stdout)
    shown = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", plain).split())
    for words in (
        "kvslotctl doctor [OPTION]... [CHECK]...",
        "--skip CHECK",
        "kvslotctl doctor --list",
        "Is what runs what its configuration says by now?",
    ):
        assert words in shown
