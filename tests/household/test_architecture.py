"""docs/architecture.md against the tree: every room, and every file of the daemon, stands in its table."""

from __future__ import annotations

import re

from .test_layout import ARROWS
from .tree import ROOT, rooms

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_room_has_its_row() -> None:
    """Rooms that exist are listed; the picture names them all, but for none that does not exist."""
    text = PAGE.split("\n## Rooms and arrows\n", 1)[1].split("\n## ", 1)[0]
    listed = set(re.findall(r"^\| `([a-z]+)` \|", text, re.MULTILINE))
    assert listed == set(rooms())
    picture = text.split("```", 2)[1]
    assert all(room in picture for room in listed)
    missing = set(ARROWS) - set(rooms())
    assert not missing or f"does not exist yet (`{'`, `'.join(sorted(missing))}`)" in text


def test_every_file_of_the_daemon_has_its_row() -> None:
    """Whoever looks for something in the daemon finds the file that knows it."""
    text = PAGE.split("\n## The daemon\n", 1)[1].split("\n## ", 1)[0]
    told = set(
        re.findall(r"`([a-z]+\.py)`", "\n".join(row for row in text.splitlines() if row.startswith("|")))
    )
    there = {file.name for file in (ROOT / "daemon").glob("*.py")} - {"__init__.py", "__main__.py"}
    assert told == there
