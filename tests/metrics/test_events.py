"""docs/events.md and the code that logs say the same, in both directions; lines say whose request they belong to."""

import json
import re
from typing import Any, NamedTuple

import pytest

from kvslot.api.wire import messages
from kvslot.defrag.mover import Outcomes

from ..household.tree import ROOT
from ..tools.daemon import running
from ..tools.wire import Wire, tokens
from .events import all_logged, logged

OPEN = {
    "compaction_moved": set(Outcomes.__struct_fields__) - {"planned"},
    "library": set[str](),  # an exception, as in any event
    "suppressed": set[str](),  # events, each with its number
}
"""Events that pass on fields by a name for all: what those are."""
ALWAYS = {"event", "level", "time", "exception", "suppressed"}
BOUND = {"session", "request", "verb", "pid", "uid", "by_session", "by_pid"}


class Told(NamedTuple):
    """A row of the page's table."""

    levels: set[str]
    rationed: bool
    fields: set[str]
    means: str


def page() -> dict[str, Told]:
    """The table of docs/events.md, by event."""
    text = (ROOT / "docs/events.md").read_text(encoding="utf-8").partition("\n## The table\n")[2]
    rows: dict[str, Told] = {}
    for line in text.splitlines():
        if not line.startswith("| `"):
            continue
        event, level, fields, *rest = (cell.strip() for cell in line.strip("|").split(" | "))
        name = event.strip(" `")
        assert name not in rows, f"{name} has two rows"
        levels = set(re.findall(r"[a-z]+", level.partition("≤")[0])) - {"or"}
        # What stands in brackets explains the names, and may quote others.
        plain = re.sub(r"\([^)]*\)", "", fields)
        rows[name] = Told(levels, "≤" in level, set(re.findall(r"`([^`]+)`", plain)), rest[0])
    return rows


def test_every_event_of_the_code_is_on_the_page_as_it_is_logged() -> None:
    """Each call that logs has its row, with its level, every field, and whether it is rationed."""
    rows, wrong = page(), []
    for each in all_logged():
        row = rows.get(each.event)
        if row is None:
            wrong.append(f"{each.at}: {each.event} is not in docs/events.md")
            continue
        if each.level not in (*row.levels, "any"):
            wrong.append(f"{each.at}: {each.event} is logged as {each.level}, the page says {row.levels}")
        if not each.fields <= row.fields:
            wrong.append(f"{each.at}: {each.event}: the page lacks {sorted(each.fields - row.fields)}")
        if each.rationed != row.rationed:
            wrong.append(f"{each.at}: {each.event}: the page says rationed: {row.rationed}")
        assert not each.open or each.event in OPEN, f"{each.at}: say in OPEN what `**` holds"
    assert not wrong, "\n".join(wrong)


def test_every_row_of_the_page_is_in_the_code() -> None:
    """No row, level or field of the page is of an event that the code does not log so."""
    calls = all_logged()
    for name, row in page().items():
        of_it = [each for each in calls if each.event == name]
        assert of_it, f"docs/events.md: nothing logs {name}"
        levels = {each.level for each in of_it}
        assert "any" in levels or row.levels == levels, f"docs/events.md: {name} is logged as {levels}"
        fields = set().union(*(each.fields for each in of_it)) | OPEN.get(name, set())
        assert row.fields == fields, f"docs/events.md: {name} has {fields}, not {row.fields}"
        assert row.means, f"docs/events.md: {name} says nothing of what it means"


@pytest.mark.parametrize(
    ("line", "event", "level", "fields"),
    [
        ('log.info("a", x=1, y=2)', "a", "info", {"x", "y"}),
        ('self.log.exception("a")', "a", "error", set[str]()),
        ('limited(log, "a", 1.0, x=1)', "a", "warning", {"x"}),
        ('logs.sparing(log, "a", 5, level="error", kind="k", x=1)', "a", "error", {"x"}),
        ('getattr(log, level)("a", x=1)', "a", "any", {"x"}),
    ],
)
def test_the_reader_of_the_code_knows_every_way_of_logging(
    line: str, event: str, level: str, fields: set[str]
) -> None:
    """What the two tests above compare is found in whichever form it is written."""
    (found,) = logged(line, "x.py")
    assert (found.event, found.level, set(found.fields)) == (event, level, fields)


def test_an_event_without_a_written_name_is_refused() -> None:
    """A name put together at run time could not be looked up on the page."""
    with pytest.raises(AssertionError, match="written down"):
        list(logged("log.info(name)", "x.py"))


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_lines_say_whose_request_they_belong_to_and_have_the_fields_of_the_page() -> None:
    """A refusal names session, request, verb, process and user; in a Batch the Batch; a tool has no session."""
    prompt = tokens(4000, 987_650_000)
    with running() as daemon:
        with Wire(daemon.socket) as engine:
            welcome = engine.hello()
            assert isinstance(welcome, messages.Welcome)
            number = welcome.session
            engine.call(messages.Commit, sequence=4711, length=1)
            batch = engine.call(messages.Batch, verbs=[messages.Commit(0, 4711, 1), messages.Extend(0, 4711)])
            asked = engine.call(messages.Allocate, namespace=welcome.namespace, sequence=1, tokens=prompt)
            assert isinstance(asked, messages.Never)
        with Wire(daemon.socket) as tool:
            tool.call(messages.SetConfig, name="stall_seconds", value="nonsense")
        daemon.stop()
        told = lines(daemon.text())
    refused = {each["verb"]: each for each in told if each["event"] == "refused"}
    assert set(refused) == {"Commit", "Extend", "SetConfig"}
    assert refused["Commit"]["session"] == refused["Extend"]["session"] == number
    assert "session" not in refused["SetConfig"]
    assert all(each["pid"] and "uid" in each and each["request"] for each in refused.values())
    assert refused["Extend"]["request"] == batch.id
    (ended,) = (each for each in told if each["event"] == "session_ended")
    assert (ended["session"], ended["verb"], "by_session" in ended) == (number, "Bye", False)
    (never,) = (each for each in told if each["event"] == "never")
    assert (never["session"], never["request"], never["verb"]) == (number, asked.id, "Allocate")
    rows = page()
    for each in told:
        row = rows[each["event"]]
        unknown = set(each) - row.fields - ALWAYS - (BOUND if "verb" in each else set())
        assert not unknown or each["event"] == "suppressed", f"{each}: {unknown}"
        assert each["level"] in row.levels
        assert "98765" not in json.dumps(each), "tokens are in no event"
