"""docs/protocol.md against the code: whoever changes a message changes the page."""

from __future__ import annotations

import inspect
import re
import types
import typing
from pathlib import Path
from typing import Any

import msgspec

from kvslot.allocator.config import MAX_PRIORITY
from kvslot.api.wire import CODES, messages, page
from kvslot.daemon import compactor, inspection, recorder
from kvslot.daemon.config import CHANGEABLE, Settings
from kvslot.daemon.connection import LONG_TOKENS, TURN_VERBS
from kvslot.daemon.recorder import RECORD_BYTES
from kvslot.daemon.verbs import EVICT_NS, NAMESPACES, TABLE

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()


def section(title: str) -> list[list[str]]:
    """Rows of the first table under a heading."""
    text = PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def kind_of(hint: Any) -> str:
    """The kind of a field, by the words of the page; "" for an integer, which is said of none."""
    while typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is list:
        (inside,) = typing.get_args(hint)
        if typing.get_origin(inside) is typing.Annotated:
            inside = typing.get_args(inside)[0]
        if typing.get_origin(inside) in (typing.Union, types.UnionType):
            return "replies" if messages.Done in typing.get_args(inside) else "requests"
        return LISTS.get(inside, "maps")
    return KINDS[hint]


LISTS = {
    int: "integers",
    str: "texts",
    messages.Compaction: "array",
    messages.Noted: "array",
    messages.Plane: "array",
}
KINDS = {
    int: "",
    bool: "flag",
    str: "text",
    bytes: "bytes",
    float: "real",
    messages.Namespace: "names",
    messages.Pool: "array",
    messages.Limits: "array",
    tuple[int, ...]: "integers",
}


def shown(field: msgspec.structs.FieldInfo) -> str:
    """A field as the page has it: its name, its kind where it is no integer, its default."""
    kind = kind_of(field.type)
    name = f"{field.name}: {kind}" if kind else field.name
    default: Any = field.default
    if default is msgspec.NODEFAULT:
        if field.default_factory is msgspec.NODEFAULT:
            return name
        default = field.default_factory()
    match default:
        case messages.Namespace():
            text = "four empty names"
        case [] | ():
            text = "none"
        case "" | b"":
            text = "empty"
        case bool():
            text = str(default).lower()
        case _:
            text = str(default)
    return f"{name} ({text})"


def of(kind: Any) -> list[str]:
    """Number, name and fields of a message."""
    fields = ", ".join(shown(each) for each in msgspec.structs.fields(kind))
    return [str(kind.__struct_config__.tag), kind.__name__, fields]


def test_messages_are_listed_with_their_numbers_fields_and_permissions() -> None:
    """Every request, reply and push is on the page: fields in order, with kinds and defaults, and its permission."""
    for title, union in (
        ("Requests", messages.Request),
        ("Replies", messages.Reply),
        ("Pushes", messages.Push),
    ):
        kinds = sorted(typing.get_args(union), key=lambda kind: int(kind.__struct_config__.tag))
        rows = section(title)
        assert [row[:3] for row in rows] == [of(kind) for kind in kinds]
        if title == "Requests":
            assert [row[3] for row in rows] == [TABLE[kind].permission.name.lower() for kind in kinds]


def test_what_welcome_says_is_listed_field_by_field() -> None:
    """Pool, plane and limits are on the page with their fields in order, and so are the four texts of a namespace."""
    text = PAGE.split("\n## What Welcome says\n", 1)[1].split("\n## ", 1)[0]
    tables = [
        [row.strip("| ").split(" | ")[:2] for row in table.splitlines()[2:]]
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    ]
    kinds = (messages.Pool, messages.Plane, messages.Limits)
    assert tables == [
        [[each.name, kind_of(each.type) or "integer"] for each in msgspec.structs.fields(kind)]
        for kind in kinds
    ]
    parts = ", ".join(each.name for each in msgspec.structs.fields(messages.Namespace))
    assert f"({parts})" in PAGE
    assert f"array of four texts, a namespace: {parts}." in PAGE
    assert f"`priority` is 0 to {MAX_PRIORITY}" in PAGE
    assert f"more than {LONG_TOKENS:,} new tokens" in PAGE


def test_compaction_is_listed_field_by_field() -> None:
    """What Defragged says of a pool, and every action of Defrag, is on the page."""
    text = PAGE.split("**Defrag.**", 1)[1].split("\n\n", 1)[0]
    assert all(f"`{each}`" in text for each in messages.ACTIONS)
    rows = section("How compaction stands")
    fields = msgspec.structs.fields(messages.Compaction)
    assert [row[:2] for row in rows] == [[each.name, kind_of(each.type) or "integer"] for each in fields]
    states = re.findall(r'"([a-z ]+)"', next(row[2] for row in rows if row[0] == "state"))
    source = inspect.getsource(compactor)
    assert states == ["off", "settled", "backed off", "planning", "waiting", "moving", "stopping"]
    assert set(re.findall(r'self\.state = "([a-z ]+)"', source)) <= set(states)
    assert all(f'"{each}"' in source for each in states)


def test_a_recording_is_listed_field_by_field() -> None:
    """Every action of Record and every field and kind of what it says is on the page."""
    text = PAGE.split("**Record.**", 1)[1].split("\n\n", 1)[0]
    assert all(f"`{each}`" in text for each in messages.RECORDINGS)
    assert f"at most {RECORD_BYTES >> 20} MiB" in text
    rows = section("What a recording says")
    fields = msgspec.structs.fields(messages.Noted)
    assert [row[:2] for row in rows] == [[each.name, kind_of(each.type) or "integer"] for each in fields]
    said = set(re.findall(r'"([a-z]+)"', rows[0][2]))
    assert said == set(re.findall(r'"([a-z]+)", (?:handle|child|0),', inspect.getsource(recorder))) | {"cut"}


def test_errors_are_listed() -> None:
    """Every code of an Error is on the page under its name."""
    assert {int(row[0]): row[1] for row in section("Errors")} == {
        code: kind.__name__ for code, kind in CODES.items()
    }


def test_session_page_is_as_described() -> None:
    """The words of the session page stand where the page says."""
    rows = section("The session page")
    assert {row[1]: int(row[0]) for row in rows} == {
        name: getattr(page, name)
        for name in ("SUBMITTED", "COMPLETED", "EPOCH", "BUSY", "BEGAN", "ENDED", "PUSHES", "WAKE")
    }


def test_limits_are_as_described() -> None:
    """Settings named as limits exist, with the default that the page gives; so do the fixed ones."""
    text = PAGE.split("\n## Limits\n", 1)[1]
    defaults = Settings()
    named = re.findall(r"`([a-z_]+)` \(([0-9.]+)(?: (MiB))?\)", text)
    assert len(named) >= 7
    for name, figure, unit in named:
        assert getattr(defaults, name) == float(figure) * (1 << 20 if unit else 1), name
    assert f"| verbs of one client in a turn | {TURN_VERBS} |" in text
    assert f"| namespaces of a session | {NAMESPACES} |" in text
    assert f"| time of one Evict | {EVICT_NS / 1e6:g} ms |" in text


def test_kinds_and_settings_are_as_described() -> None:
    """What can be inspected and what can be changed is listed in full."""
    for kind in inspection.KINDS:
        assert f"`{kind}`" in PAGE.split("**Inspect.**", 1)[1].split("\n\n", 1)[0]
    for name in CHANGEABLE:
        assert f"`{name}`" in PAGE.split("**SetConfig.**", 1)[1].split("\n\n", 1)[0]
