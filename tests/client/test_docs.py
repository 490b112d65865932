"""docs/client.md against the code."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

from kvslot.api import client, wire
from kvslot.api.client import indices

from ..tools.daemon import Running, running

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_first_engine_runs(tmp_path: Path) -> None:
    """The page's program does what it says, without a warning."""
    program, *_ = PROGRAMS
    promised = re.findall(r"^\d+ of 100 tokens were cached$", PAGE, re.MULTILINE)
    with running() as daemon:
        told = [run(program, daemon, tmp_path) for _ in range(2)]
    assert [each.strip() for each in told] == promised


def test_the_tools_run(tmp_path: Path) -> None:
    """So do a client that follows moves, AsyncClient and Control, behind the first engine."""
    engine, following, coroutines, control = PROGRAMS
    inside = "".join(f"    {line}\n" for line in coroutines.splitlines())
    asynchronous = (
        "import asyncio, sys\nfrom kvslot.api.client import AsyncClient\n"
        f"async def main():\n{inside}    print(found)\nasyncio.run(main())\n"
    )
    with running() as daemon:
        run(engine, daemon, tmp_path)
        imports = "import sys\nfrom kvslot import Client\nfrom kvslot.api.client import indices\n"
        run(imports + following, daemon, tmp_path)
        assert run(asynchronous, daemon, tmp_path) == "99\n"
        with client.Client(str(daemon.socket), name="looked-at", map=False):
            head = "import sys\nfrom kvslot.api.client import Control\n"
            assert run(head + control, daemon, tmp_path) == "looked-at 0\n"


def run(program: str, daemon: Running, folder: Path) -> str:
    """What a program of the page prints."""
    file = folder / "engine.py"
    file.write_text(program)
    command = [sys.executable, "-I", "-W", "error", str(file), str(daemon.socket)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_arguments_are_those_of_the_client() -> None:
    """Every argument has its row, with its default, in the order of the signature."""
    table = PAGE.split("| argument | default | |", 1)[1].split("\n\n", 1)[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    told = [
        pair
        for row in rows
        for pair in zip(re.findall(r"`([^`]+)`", row[0]), re.findall(r"`([^`]+)`", row[1]), strict=True)
    ]
    known = list(inspect.signature(client.Client).parameters.values())
    assert told == [(each.name, repr(each.default).replace("'", '"')) for each in known]


def test_what_is_named_is_there() -> None:
    """Every method, error, event and index builder that the page names exists, and every builder is named."""
    sequence = re.findall(r"^\| ((?:`[a-z_]+(?:\([^`]*\))?`,? ?)+)\|", PAGE, re.MULTILINE)
    names = {name for row in sequence for name in re.findall(r"`([a-z_]+)", row)}
    functions = {
        name for name in indices.__all__ if name.islower() and name not in ("pages_of", "slots_of", "within")
    }
    assert functions <= names
    arguments: set[str] = set()
    for call in (client.Client.__init__, client.Client.allocate):
        arguments.update(inspect.signature(call).parameters)
    known = {*dir(client.Sequence), *dir(client.Client), *functions, *arguments, "copies"}
    assert names <= known, names - known
    for name in re.findall(r"`([A-Z][A-Za-z]+)(?:\(|`)", PAGE):
        there = any(hasattr(place, name) for place in (client, wire, wire.messages))
        assert there or name in ("BufferError", "ResourceWarning", "None", "True", "False"), name
    for name in re.findall(r"client\.([a-z_]+)", PAGE):
        if name not in ("indices", "md"):
            assert hasattr(client.Client, name) or name == "pool", name
