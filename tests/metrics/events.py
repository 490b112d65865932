"""Which events the code logs, read off its syntax trees: name, levels and fields of each call that logs.

log.warning("session_stalled", session=..., ...)
limited(log, "peer_fault", 1.0, pid=..., ...)          a warning unless `level` says otherwise; adds `suppressed`
sparing(log, "session_gone", 50, ...)                  info unless `level` says otherwise; adds `suppressed`
getattr(log, level)("library", ...)                    any level
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.household.tree import ROOT

LEVELS = ("debug", "info", "warning", "error", "critical", "exception")
RATIONED = {"limited": "warning", "sparing": "info"}
OF_THE_RATION = {"level", "kind"}
"""Arguments that say how an event is logged, and are none of its fields."""
LOGGERS = ("log", "logger")
"""Names of loggers; as an attribute, `logger` is a library's own, whose lines come out as event `library`."""
ROOMS = ("allocator", "api", "daemon", "defrag")
"""What runs in the daemon's process."""
NOT_EVENTS = ("api/client/",)


class Logged(NamedTuple):
    """One call that logs."""

    at: str
    event: str
    level: str
    fields: frozenset[str]
    rationed: bool
    open: bool
    """It passes fields on whose names are not written down there (`**fields`)."""


def files() -> Iterator[Path]:
    """The files of the daemon's process."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if not path.relative_to(ROOT).as_posix().startswith(NOT_EVENTS):
                yield path


def logged(source: str, path: str) -> Iterator[Logged]:
    """Every call in `source` that logs an event."""
    for node in ast.walk(ast.parse(source, path)):
        if not isinstance(node, ast.Call):
            continue
        level, rationed, place = "", False, 0
        match node.func:
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if attr in LEVELS and name in LOGGERS:
                level = "error" if attr == "exception" else attr
            case ast.Attribute(value=ast.Attribute(attr="log" | "_log"), attr=attr) if attr in LEVELS:
                level = "error" if attr == "exception" else attr
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="logs"), attr=name) if name in RATIONED:
                level, rationed, place = RATIONED[name], True, 1
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id=name), _]) if name in LOGGERS:
                level = "any"
                if not (node.args and isinstance(node.args[0], ast.Constant)):
                    continue  # `limited` itself, which is told the name
            case _:
                continue
        if len(node.args) <= place:
            continue
        at = f"{path}:{node.lineno}"
        event = node.args[place]
        if not (isinstance(event, ast.Constant) and isinstance(event.value, str)):
            raise AssertionError(f"{at}: an event's name is written down where it is logged")
        fields = {each.arg for each in node.keywords if each.arg is not None}
        for each in node.keywords:
            if rationed and each.arg == "level":
                assert isinstance(each.value, ast.Constant), (
                    f"{at}: a level is written down where it is logged"
                )
                level = str(each.value.value)
        yield Logged(
            at,
            event.value,
            level,
            frozenset(fields - OF_THE_RATION if rationed else fields),
            rationed,
            any(each.arg is None for each in node.keywords),
        )


def all_logged() -> list[Logged]:
    """Of every file of the daemon's process."""
    found: list[Logged] = []
    for path in files():
        found += logged(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    return found
