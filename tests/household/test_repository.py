"""The repository speaks of kvslot alone, and what its documents promise is there."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from .tree import ROOT, python_files, rooms, tracked

# A path on somebody's machine means nothing on another. Each name is broken up here, or this file would report itself.
LOCAL_PATHS = re.compile(r"(?<![\w.$}~*-])/(?:w[o]rk|r[o]ot|h[o]me|f[a]rm|v[a]r/tmp|U[s]ers)/")
# Where packages come from is the business of whoever installs.
INDEX_HOSTS = re.compile(
    r"p[y]pi\.org|p[y]thonhosted\.org|registry\.n[p]mjs|d[e]b\.debian\.org|find-l[i]nks|(?:extra-)?index-u[r]l"
)
FILE_BYTES_MAX = 2 << 20
"""Larger files make every clone slow; all traces together stay below it."""


def texts() -> list[tuple[str, str]]:
    """(path, text) of each tracked file that is text; the licence, which is not ours to word, left out."""
    found = []
    for name in tracked():
        if (ROOT / name).is_symlink() or name == "LICENSE":
            continue
        content = (ROOT / name).read_bytes()
        if b"\0" not in content:
            found.append((name, content.decode()))
    return found


def documents() -> list[tuple[str, str]]:
    return [(name, text) for name, text in texts() if name.endswith(".md")]


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_local_paths() -> None:
    """No tracked file names a folder of the machine it was written on."""
    assert lines_with(LOCAL_PATHS) == []


def test_no_package_hosts() -> None:
    """No tracked file says from which host packages come."""
    assert lines_with(INDEX_HOSTS) == []


def test_no_leftovers() -> None:
    """No tracked file holds a merge's markers, trailing blanks or a missing last newline; none is huge."""
    faults = [
        f"{name}:{number}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if line.startswith(("<<<<<<< ", ">>>>>>> ")) or (line != line.rstrip() and not name.endswith(".md"))
    ]
    faults += [f"{name}: no newline at its end" for name, text in texts() if text and not text.endswith("\n")]
    faults += [name for name in tracked() if (ROOT / name).stat().st_size > FILE_BYTES_MAX]
    assert faults == []


def test_documented_targets_exist() -> None:
    """Each `make TARGET` in a document is a target of the Makefile, and `make help` tells of each target."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    told = set(re.findall(r"^([a-z]+):.*## ", makefile, re.MULTILINE))
    named = {
        (name, target)
        for name, text in documents()
        for target in re.findall(r"(?:^\s*(?:\$ )?|`)make ([a-z]+)", text, re.MULTILINE)
    }
    assert targets == told
    assert {target for name, target in named if name == "README.md"} >= {"run", "test"}
    assert [(name, target) for name, target in sorted(named) if target not in targets] == []


def links_in(text: str) -> Iterator[str]:
    """The relative links and pictures of a document, without what stands behind `#`."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", prose):
        target = (link[0] or link[1]).partition("#")[0]
        if target and not re.match(r"[a-z]+:", target):
            yield target


def test_links_in_documents_lead_somewhere() -> None:
    """Each relative link or picture in a document leads to a tracked file or a folder that holds some."""
    held = set(tracked())
    held |= {parent.as_posix() for name in held for parent in Path(name).parents}
    faults = []
    for name, text in documents():
        for target in links_in(text):
            leads_to = (ROOT / name).parent.joinpath(target).resolve()
            if not leads_to.is_relative_to(ROOT) or leads_to.relative_to(ROOT).as_posix() not in held:
                faults.append(f"{name}: {target}")
    assert faults == []


def anchors(text: str) -> set[str]:
    """What a link may say behind `#`: headings, by the rule of those who show Markdown."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in heads}


def test_links_to_sections_find_them() -> None:
    """Each `#section` of a link between documents, or within one, is a heading there."""
    held = {(ROOT / name).resolve(): anchors(text) for name, text in documents()}
    faults = []
    for name, text in documents():
        for file, anchor in re.findall(r"\]\(((?:[\w./-]+\.md)?)#([^)\s]+)\)", text):
            target = ((ROOT / name).parent / file if file else ROOT / name).resolve()
            if anchor not in held.get(target, set()):
                faults.append(f"{name}: {file}#{anchor}")
    assert faults == []


def test_every_version_is_pinned() -> None:
    """The constraints name one version of each package that the project and its `dev` extra ask for."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.partition("#")[0].strip() for line in lines if line.partition("#")[0].strip()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]

    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.!+-]+(?:\s*;.+)?", pin)] == []
    pinned = {_plain(pin) for pin in pins}
    assert [need for need in asked if _plain(need) not in pinned] == []


def _plain(requirement: str) -> str:
    """The package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()


def test_files_open_with_their_theory() -> None:
    """Each module of a room, and each file of tests, opens with a docstring that says what it holds."""
    bare = [
        path.relative_to(ROOT).as_posix()
        for path in python_files()
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert bare == []


def test_each_test_says_what_must_hold() -> None:
    """Each test function opens with one sentence."""
    mute = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.startswith("test_"):
                    if not ast.get_docstring(node):
                        mute.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    assert mute == []


def test_asserts_stay_on() -> None:
    """Nothing runs Python with -O, which would drop the asserts that guard our invariants."""
    pattern = re.compile(r"python[\d.]*\s+(?:-\w+\s+)*-\w*O|P[Y]THONOPTIMIZE")
    assert lines_with(pattern) == []
    assert rooms(), "no room found"
