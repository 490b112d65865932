"""docs/client.md against the code."""

from __future__ import annotations

import builtins
import inspect
import re
import subprocess
import sys
import textwrap
import typing
from pathlib import Path

from kvslot.allocator.results import Reason
from kvslot.api import client, wire
from kvslot.api.client import indices

from ..tools.daemon import Running, running

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_first_engine_runs(tmp_path: Path) -> None:
    """The page's program does what it says, without a warning."""
    _, program, *_ = PROGRAMS
    promised = re.findall(r"^\d+ of 100 tokens were cached$", PAGE, re.MULTILINE)
    with running() as daemon:
        told = [run(program, daemon, tmp_path) for _ in range(2)]
    assert [each.strip() for each in told] == promised


def test_the_tools_run(tmp_path: Path) -> None:
    """So do one that reads events, one that follows moves, AsyncClient and Control, behind the first engine."""
    names, engine, events, following, coroutines, control = PROGRAMS
    inside = "".join(f"    {line}\n" for line in coroutines.splitlines())
    asynchronous = (
        "import asyncio, sys\nfrom kvslot.api.client import AsyncClient\n"
        f"async def main():\n{inside}    print(found)\nasyncio.run(main())\n"
    )
    with running() as daemon:
        run(engine, daemon, tmp_path)
        run("import sys\n" + names + events, daemon, tmp_path)
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


def test_events_are_matched_as_the_page_does() -> None:
    """The page's `match` frees the victim that the event names, and only if it still runs."""
    names, _, events, *_ = PROGRAMS
    body = events.split("range(100))]\n", 1)[1]
    freed: list[int] = []

    class Victim:
        def free(self) -> None:
            freed.append(7)

    class Fake:
        def events(self) -> list[object]:
            return [client.Preempt(7, 100), client.Preempt(8, 100), client.Draining(500), client.Pressure(1)]

        def sequence(self, number: int) -> Victim | None:
            return victim if number == 7 else None

    victim = Victim()
    running_now = [victim]
    exec(names + textwrap.dedent(body), {"client": Fake(), "running": running_now})
    assert freed == [7]
    assert running_now == []


def test_errors_and_events_come_from_one_place() -> None:
    """Every error of the wire, every code's and every event is to be had from the client's face, under its own name."""
    events = typing.get_args(client.Event)
    errors = [
        each for each in vars(wire).values() if isinstance(each, type) and issubclass(each, wire.KvslotError)
    ]
    for each in (*events, *errors, *wire.CODES.values()):
        assert each.__name__ in client.__all__
        assert getattr(client, each.__name__) is each


def test_every_reason_to_wait_is_explained() -> None:
    """The page has a row for each reason of Later, and no other; so has the protocol's."""
    table = PAGE.split("## Reasons to wait", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `([a-z_]+)` \|", table, re.MULTILINE)
    assert set(rows) == {str(each) for each in Reason}
    protocol = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
    told = protocol.split("Reasons of Later", 1)[1].split("\n\n", 1)[0]
    assert set(rows) <= set(re.findall(r"`([a-z_]+)`", told))


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
    arguments.update(Reason)
    known = {*dir(client.Sequence), *dir(client.Client), *functions, *arguments, "copies"}
    assert names <= known, names - known
    for name in re.findall(r"`([A-Z][A-Za-z]+)(?:\(|`)", PAGE):
        there = any(hasattr(place, name) for place in (client, wire, wire.messages))
        assert there or hasattr(builtins, name), name
    for name in re.findall(r"client\.([a-z_]+)", PAGE):
        if name not in ("indices", "md"):
            assert hasattr(client.Client, name) or name == "pool", name
