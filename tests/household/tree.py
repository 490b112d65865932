"""The repository as the household's tests see it: where it lies, what git tracks, and which folders are rooms.

A room is a folder at the top that holds an `__init__.py`. Everything else about rooms (links, packaging, type checkers)
is derived from that and checked against it.
"""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def rooms() -> list[str]:
    """Names of the rooms, sorted."""
    return sorted(each.parent.name for each in ROOT.glob("*/__init__.py"))


def tracked() -> list[str]:
    """Paths that git tracks and that are still there, relative to the root, with `/`; a link counts as a file.

    Skips the test where there is no git or no repository, as in an unpacked source distribution.
    """
    # The clone may belong to somebody else than who runs the tests.
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "ls-files", "-z"]
    try:
        answer = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git repository, or no git")
    names = [name for name in answer.stdout.decode().split("\0") if name]
    return sorted(name for name in names if (ROOT / name).is_symlink() or (ROOT / name).exists())


def python_files() -> list[Path]:
    """All Python files of rooms, tests, examples and docs, sorted; the links under src/ are not followed."""
    tops = [*rooms(), "tests", "examples", "docs"]
    found = [path for top in tops for path in (ROOT / top).rglob("*.py")]
    return sorted([*found, ROOT / "src/kvslot/__init__.py"])
