"""Which room may import which, read off the syntax trees; and that every room is known wherever rooms are listed.

    cli, engines ---> client (api), replay      faces only
    replay       ---> allocator, defrag, api
    daemon       ---> allocator, defrag, api
    defrag       ---> allocator
    allocator, api's wire and client ---> nothing of ours
    benchmarks   ---> what they measure, so all but cli
    systemd      ---> nothing of ours: files, and what puts them in their places

A room hands on its face in `__init__.py`, and so does a folder within it that has one; what starts with an underscore
stays inside. Rooms that see only faces import what a face's `__all__` names.
"""

import ast
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from .tree import ROOT, python_files, rooms

ARROWS: dict[str, set[str]] = {
    "allocator": set(),
    "api": set(),
    "defrag": {"allocator"},
    "daemon": {"allocator", "defrag", "api"},
    "replay": {"allocator", "defrag", "api"},
    "engines": {"api", "replay"},
    "cli": {"api", "replay", "benchmarks"},
    "benchmarks": {"allocator", "defrag", "api", "daemon", "replay"},
    "systemd": set(),
}
PAGES = ["docs", "examples"]
"""No rooms, but in the wheel as well: for who has nothing else on the host."""
FACES_ONLY = {"engines", "cli"}

# The core answers at once and the same way each time: it reads no clock, draws no number, logs, opens and waits for
# nothing.
OUT_OF_THE_CORE = frozenset(
    "aiohttp asyncio concurrent datetime io logging multiprocessing os pathlib queue random secrets selectors signal "
    "socket structlog subprocess tempfile threading time uuid uvloop".split()
)


class Import(NamedTuple):
    """One import: by whom (path and line), and which module, absolute (`kvslot.replay.report`).

    `names` holds what a `from` import takes out of it, which may be modules again.
    """

    at: str
    module: str
    names: tuple[str, ...]


def imports_in(source: str, path: str) -> Iterator[Import]:
    """Every import in `source`: inside functions too, under TYPE_CHECKING, by import_module, by attribute of kvslot.

    `path` is relative to the root and tells the package that relative imports start from.
    """
    parts = Path(path).with_suffix("").parts
    inside = () if parts[0] == "tests" else ("kvslot",)
    package = (*inside, *parts[:-1])  # a module and an __init__ count from the same folder
    for node in ast.walk(ast.parse(source, path)):
        at = f"{path}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.Import(names=names):
                for each in names:
                    yield Import(at, each.name, ())
            case ast.ImportFrom(module=module, names=names, level=level):
                head = package[: len(package) - level + 1] if level else ()
                full = ".".join([*head, *([module] if module else [])])
                yield Import(at, full, tuple(each.name for each in names))
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module")
            ):
                if node.args and (text := _literal_head(node.args[0])) and not text.startswith("."):
                    yield Import(at, text.rstrip("."), ())
            case ast.Attribute(value=ast.Name(id="kvslot"), attr=attr):
                yield Import(at, f"kvslot.{attr}", ())


def _literal_head(node: ast.expr) -> str:
    """The text, or what an f-string or a sum begins with; empty if that is not written down."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            return text
        case ast.BinOp(left=left):
            return _literal_head(left)
    return ""


def face_of(target: str) -> frozenset[str] | None:
    """What a room, or a folder within it (`replay.policies`), shows to those who see only faces; None for a module.

    That is what its `__all__` names, and the folders within it.
    """
    folder = ROOT.joinpath(*target.split("."))
    if not (folder / "__init__.py").exists():
        return None
    names = {each.parent.name for each in folder.glob("*/__init__.py")}
    for node in ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(to, ast.Name) and to.id == "__all__" for to in node.targets
        ):
            names |= set(ast.literal_eval(node.value))
    return frozenset(names)


def wrong_arrows(source: str, path: str) -> list[str]:
    """What `source`, as the file at `path`, imports from rooms it may not know, or from behind another room's face."""
    known = set(ARROWS)
    room = Path(path).parts[0] if Path(path).parts[0] in known else None
    faults = []
    for each in imports_in(source, path):
        top, _, rest = each.module.partition(".")
        if top in known or top == "src":
            faults.append(
                f"{each.at} imports {each.module}: say kvslot.{each.module}, or it loads as a second copy"
            )
        if top != "kvslot":
            continue
        targets = [rest] if rest else [name for name in each.names if name in known]
        for target in targets:
            other, _, inner = target.partition(".")
            if other not in known or other == room:
                continue
            if room is not None and other not in ARROWS[room]:
                faults.append(f"{each.at}: {room} may not import {other}")
            hidden = [
                name
                for name in (*inner.split("."), *each.names)
                if name.startswith("_") and name != "__version__"
            ]
            if hidden:
                faults.append(f"{each.at}: {hidden[0]} stays inside {other}")
            if room in FACES_ONLY:
                taken = each.names if rest else ()
                face = face_of(target)
                if face is None:
                    faults.append(f"{each.at}: {room} sees only the face of {other}, not {target}")
                else:
                    faults += [
                        f"{each.at}: {name} is not on the face of {target}"
                        for name in taken
                        if name not in face
                    ]
    return faults


def test_rooms_import_only_what_they_may() -> None:
    """No file imports a room that lies outwards of its own, a room's private part, or a room by its bare name."""
    faults = [fault for path in python_files() for fault in _wrong_in(path)]
    assert not faults, "\n" + "\n".join(faults)


def _wrong_in(path: Path) -> list[str]:
    return wrong_arrows(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("allocator/tree.py", "import kvslot.replay"),
        ("allocator/tree.py", "from kvslot import replay"),
        ("allocator/tree.py", "from .. import daemon"),
        ("allocator/deep/tree.py", "from ...daemon import device"),
        ("allocator/tree.py", "if TYPE_CHECKING:\n    from kvslot.daemon.device import Device"),
        ("allocator/tree.py", "def late():\n    from kvslot.replay import play"),
        ("allocator/tree.py", "importlib.import_module('kvslot.replay.engine')"),
        ("allocator/tree.py", "import_module(f'kvslot.replay.{name}')"),
        ("allocator/tree.py", "import kvslot\nkvslot.replay.play()"),
        ("allocator/tree.py", "import kvslot.allocator\nimport allocator"),
        ("defrag/plan.py", "from kvslot.daemon import device"),
        ("daemon/main.py", "from kvslot.cli import ctl"),
        ("daemon/main.py", "from kvslot.allocator._tree import Node"),
        ("daemon/main.py", "from kvslot.allocator import _tree"),
        ("replay/engine.py", "from kvslot.daemon import device"),
        ("replay/engine.py", "from daemon import device"),
        ("replay/engine.py", "from src.kvslot.allocator import Pool"),
        ("cli/ctl.py", "from kvslot.allocator import Pool"),
        ("cli/ctl.py", "from kvslot.replay.engine import Engine"),
        ("cli/ctl.py", "from kvslot.replay import engine"),
        ("cli/ctl.py", "from kvslot.replay.policies import slotted"),
        ("engines/vllm.py", "from kvslot.daemon import device"),
        ("benchmarks/core.py", "from kvslot.cli import ctl"),
        ("tests/core/test_pool.py", "from allocator import Pool"),
        ("tests/core/test_pool.py", "from kvslot.allocator._tree import Node"),
    ],
)  # fmt: skip
def test_a_wrong_import_is_seen(path: str, source: str) -> None:
    """Each way of importing what one may not is reported, so that the test above can fail."""
    assert wrong_arrows(source, path)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("allocator/tree.py", "from ._pool import Pool\nfrom . import _tree\nimport array"),
        ("allocator/__init__.py", "from ._pool import Pool\nfrom kvslot.allocator._tree import Node"),
        (
            "replay/engine.py",
            "from kvslot.allocator import Pool\nimport_module(f'kvslot.replay.policies.{name}')",
        ),
        ("replay/policies/ours.py", "from ._base import Policy\nfrom ..traces import read"),
        ("cli/ctl.py", "from kvslot import __version__\nfrom kvslot.replay import load, policies"),
        ("cli/ctl.py", "from kvslot.replay.policies import NAMES\nfrom . import _common"),
        ("daemon/main.py", "import kvslot\nkvslot.__version__"),
        ("tests/core/test_pool.py", "from kvslot.allocator import Pool\nfrom .naive import Twin"),
    ],
)
def test_a_right_import_passes(path: str, source: str) -> None:
    """What the arrows allow is not reported."""
    assert wrong_arrows(source, path) == []


def test_the_core_answers_at_once() -> None:
    """Nothing in `allocator` waits, reads a clock, draws a random number, logs or opens anything."""
    faults = []
    for path in sorted((ROOT / "allocator").rglob("*.py")):
        name, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        faults += [
            f"{each.at} imports {each.module}"
            for each in imports_in(source, name)
            if each.module.partition(".")[0] in OUT_OF_THE_CORE
        ]
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
                    faults.append(f"{name}:{node.lineno} waits")
                case ast.Call(func=ast.Name(id="open" | "print" | "input" as what)):
                    faults.append(f"{name}:{node.lineno} calls {what}()")
    assert not faults, "\n" + "\n".join(faults)


def test_every_room_is_linked_packaged_and_checked() -> None:
    """A room has a relative link in src/kvslot, a line in `sources`, in `only-include` and in pyright's `include`."""
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    there = rooms()
    links = {each.name: os.readlink(each) for each in (ROOT / "src/kvslot").iterdir() if each.is_symlink()}
    include = settings["tool"]["pyright"]["include"]

    assert links == {room: f"../../{room}" for room in there}
    assert sorted(each for each in wheel["only-include"] if not each.startswith("src/")) == sorted(
        [*there, *PAGES]
    )
    assert {each: to for each, to in wheel["sources"].items() if not each.startswith("src/")} == {
        each: f"kvslot/{each}" for each in (*there, *PAGES)
    }
    assert sorted(each for each in include if each.startswith("src/kvslot/")) == [
        f"src/kvslot/{room}" for room in there
    ]
    assert set(there) <= set(ARROWS), "a new room needs its arrows"


def test_rooms_import_under_one_name() -> None:
    """`kvslot.<room>` loads for every room, and no room can be imported by its bare name."""
    import importlib
    import importlib.util

    for room in rooms():
        assert importlib.import_module(f"kvslot.{room}").__name__ == f"kvslot.{room}"
        assert importlib.util.find_spec(room) is None, (
            f"`import {room}` works: run tests as `python -Im pytest`"
        )


def test_the_package_itself_stays_light() -> None:
    """`import kvslot` loads no other module: who wants one room pays for that room alone."""
    import subprocess
    import sys

    code = "import sys; before = set(sys.modules); import kvslot; print(*sorted(set(sys.modules) - before))"
    answer = subprocess.run([sys.executable, "-Ic", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["kvslot"]
