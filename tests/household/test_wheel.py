"""What is built is what git tracks: wheel, source distribution, and a wheel made from that source distribution.

Builds happen in a copy of the tracked files, so that what lies about in a working tree neither helps nor disturbs.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from kvslot import __version__

from .test_layout import PAGES
from .test_repository import links_in
from .tree import ROOT, rooms, tracked


@pytest.fixture(scope="module")
def clean_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files, links as links."""
    target = tmp_path_factory.mktemp("tree")
    for name in tracked():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


@pytest.fixture(scope="module")
def built(clean_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`wheel` built from the tree, `sdist` from the tree, and `wheel_of_sdist`."""
    straight, through = tmp_path_factory.mktemp("straight"), tmp_path_factory.mktemp("through")
    build(clean_tree, straight, "--wheel")
    build(clean_tree, through)
    (wheel,), (sdist,), (wheel_of_sdist,) = (
        straight.glob("*.whl"),
        through.glob("*.tar.gz"),
        through.glob("*.whl"),
    )
    return {"wheel": wheel, "sdist": sdist, "wheel_of_sdist": wheel_of_sdist}


def build(tree: Path, target: Path, *options: str) -> None:
    """Builds without a network: the backend is the one that is installed."""
    command = [sys.executable, "-Im", "build", "--no-isolation", "--outdir", str(target), *options, str(tree)]
    answer = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"}
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if ".dist-info/" not in name)


def shared() -> dict[str, str]:
    """Folders whose tracked files are installed as data, and where below the prefix those go."""
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders: dict[str, str] = settings["tool"]["hatch"]["build"]["targets"]["wheel"].get("shared-data", {})
    return folders


def expected_in_wheel() -> list[str]:
    tops = (*rooms(), *PAGES)
    apart = ("docs/man/", "docs/manuals.py")
    inside = [
        f"kvslot/{name}"
        for name in tracked()
        if name.partition("/")[0] in tops and not name.startswith(apart)
    ]
    data = [
        f"kvslot-{__version__}.data/data/{to}{name.removeprefix(folder)}"
        for folder, to in shared().items()
        for name in tracked()
        if name.startswith(f"{folder}/") or name == folder
    ]
    return sorted([*inside, *data, "kvslot/__init__.py", "kvslot/py.typed"])


def test_the_wheel_holds_what_git_tracks(built: dict[str, Path]) -> None:
    """The wheel holds every tracked file of rooms and pages under kvslot/, what is shared as data, and nothing else."""
    assert names_in(built["wheel"]) == expected_in_wheel()


def test_links_lead_somewhere_within_the_wheel(built: dict[str, Path]) -> None:
    """Who has the wheel alone can follow every link of every page in it, pictures and examples included."""
    with zipfile.ZipFile(built["wheel"]) as archive:
        held = set(archive.namelist())
        held |= {parent.as_posix() for name in held for parent in PurePosixPath(name).parents}
        pages = {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".md")}
    assert {"kvslot/docs/operations.md", "kvslot/systemd/README.md"} <= set(pages)
    faults = [
        f"{name}: {target}"
        for name, text in pages.items()
        for target in links_in(text)
        if os.path.normpath(PurePosixPath(name).parent / target) not in held
    ]
    assert faults == []


def test_a_wheel_from_the_source_distribution_is_the_same(built: dict[str, Path]) -> None:
    """Who builds from the source distribution gets the same files with the same bytes."""
    with zipfile.ZipFile(built["wheel"]) as one, zipfile.ZipFile(built["wheel_of_sdist"]) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
        for name in names_in(built["wheel"]):
            assert one.read(name) == other.read(name), name


def test_the_source_distribution_is_complete(built: dict[str, Path]) -> None:
    """The source distribution holds what git tracks, so that tests and docs travel with it."""
    with tarfile.open(built["sdist"]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {name for name in tracked() if not (ROOT / name).is_symlink()}
    assert wanted - held == set()


def test_the_wheel_adds_one_name_to_site_packages(built: dict[str, Path]) -> None:
    """Nothing called `api`, `daemon` or the like lands beside other people's packages; the licence comes along."""
    with zipfile.ZipFile(built["wheel"]) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
        licences = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
        scripts = [
            archive.read(name).decode() for name in archive.namelist() if name.endswith("entry_points.txt")
        ]
    apart = {"kvslot", f"kvslot-{__version__}.dist-info", f"kvslot-{__version__}.data"}
    assert tops == (apart if shared() else apart - {f"kvslot-{__version__}.data"})
    assert len(licences) == 1
    assert ["kvslotctl = kvslot.cli.ctl:main" in text for text in scripts] == [True]
