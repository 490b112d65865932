"""Logs: one event a line, for machines or people; repeated warnings are counted; a lost reader costs only lines."""

import io
import json
import logging
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from kvslot.daemon import logs


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Whatever a test sets up is taken back."""
    root, show = logging.getLogger(), warnings.showwarning
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    warnings.showwarning = show
    structlog.reset_defaults()
    logs.tell_suppressed(structlog.wrap_logger(None, processors=[_drop]))


def _drop(*_: Any) -> Any:
    raise structlog.DropEvent


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines() -> None:
    """An event is one line of JSON: name, fields, level and time; what JSON has no word for is shown as text."""
    out = io.StringIO()
    logs.set_up("json", "info", out)
    log = structlog.get_logger()
    log.debug("hidden")
    log.info("ready", pools=["a"], size=3, what={1, 2}, text="two\nlines", raw=b"\xff")
    log.warning("odd", value=object(), key=float("nan"))
    first, second = lines(out)
    assert first.pop("time").endswith("Z")
    assert next(iter(first)) == "event"
    assert first["event"] == "ready"
    assert first["level"] == "info"
    assert first["pools"] == ["a"]
    assert first["text"] == "two\nlines"
    assert second["event"] == "odd"
    assert "object object" in second["value"]


def test_exceptions_are_on_the_same_line() -> None:
    """A traceback is a field of its event."""
    out = io.StringIO()
    logs.set_up("json", "info", out)
    try:
        raise LookupError("gone")
    except LookupError:
        structlog.get_logger().exception("internal_fault")
    (line,) = lines(out)
    assert line["level"] == "error"
    assert "LookupError: gone" in line["exception"]


def test_console_and_auto() -> None:
    """On no terminal `auto` is JSON; `console` is for people, without colours where no terminal is."""
    out = io.StringIO()
    logs.set_up("auto", "info", out)
    structlog.get_logger().info("ready", pools=3)
    assert lines(out)[0]["pools"] == 3
    out = io.StringIO()
    logs.set_up("console", "info", out)
    structlog.get_logger().info("ready", pools=3)
    assert "ready" in out.getvalue()
    assert "pools=3" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_level_can_be_changed() -> None:
    """A level set later holds for loggers that were made before."""
    out = io.StringIO()
    logs.set_up("json", "error", out)
    log = structlog.get_logger()
    log.info("one")
    logs.set_level("debug")
    log.debug("two")
    logs.set_level("warning")
    log.info("three")
    assert [line["event"] for line in lines(out)] == ["two"]
    with pytest.raises(KeyError):
        logs.set_level("loud")


def test_libraries_log_along() -> None:
    """What a library logs, or warns of, comes out as an event with the library's name."""
    out = io.StringIO()
    logs.set_up("json", "info", out)
    logging.getLogger("asyncio").warning("slow %d", 5)
    logging.getLogger("asyncio").info("chatter")
    (line,) = lines(out)
    assert (line["event"], line["logger"], line["message"], line["level"]) == (
        "library",
        "asyncio",
        "slow 5",
        "warning",
    )


def test_repeated_warnings_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning comes once a period, then with how many were left out; what is left at the end is told too."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    out = io.StringIO()
    logs.set_up("json", "info", out)
    log = structlog.get_logger()
    assert logs.limited(log, "flood", 10.0, who=1)
    assert not logs.limited(log, "flood", 10.0, who=2)
    assert logs.limited(log, "other", 10.0)
    now[0] += 9
    assert not logs.limited(log, "flood", 10.0, who=3)
    now[0] += 1
    assert logs.limited(log, "flood", 10.0, who=4)
    assert not logs.limited(log, "flood", 10.0, who=5)
    logs.tell_suppressed(log)
    logs.tell_suppressed(log)
    told = [
        (line["event"], line.get("who"), line.get("suppressed"), line.get("flood")) for line in lines(out)
    ]
    assert told == [
        ("flood", 1, None, None),
        ("other", None, None, None),
        ("flood", 4, 2, None),
        ("suppressed", None, None, 1),
    ]


def test_a_storm_that_ends_leaves_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was left out is told once a period has passed without another; each kind of an event has its own period."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    out = io.StringIO()
    logs.set_up("json", "info", out)
    log, before = structlog.get_logger(), logs.left_out()
    assert logs.limited(log, "flood", 10.0, kind="a", who=1)
    assert logs.limited(log, "flood", 10.0, kind="b", who=2)
    for _ in range(5):
        assert not logs.limited(log, "flood", 10.0, kind="a", who=3)
    assert not logs.limited(log, "flood", 10.0, kind="b", who=4)
    assert logs.sparing(log, "fact", 1, 30.0)
    assert not logs.sparing(log, "fact", 1, 30.0)
    logs.tell_overdue(log)
    now[0] += 10
    logs.tell_overdue(log)
    logs.tell_overdue(log)
    now[0] += 20
    logs.tell_overdue(log)
    told = [line for line in lines(out) if line["event"] == "suppressed"]
    assert [(line["level"], line.get("flood"), line.get("fact")) for line in told] == [
        ("warning", 6, None),
        ("info", None, 1),
    ]
    assert logs.left_out() - before == 7
    assert logs.limited(log, "flood", 10.0, kind="a")
    assert "suppressed" not in lines(out)[-1]


def test_what_was_left_out_has_the_level_of_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for each level; who wants warnings only is told of no facts that were left out."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    for level, told in (("info", ["info", "warning"]), ("warning", ["warning"])):
        out = io.StringIO()
        logs.set_up("json", level, out)
        log = structlog.get_logger()
        for _ in range(3):
            logs.sparing(log, "fact", 1)
            logs.limited(log, "flood", 10.0)
        logs.tell_suppressed(log)
        left = [line for line in lines(out) if line["event"] == "suppressed"]
        assert [line["level"] for line in left] == told
        assert left[-1]["flood"] == 2
        assert "fact" not in left[-1]


def test_a_reader_that_goes_costs_lines_only() -> None:
    """Writing into a full pipe, or a closed one, loses the line, counts it, and neither waits nor raises."""
    read, write = os.pipe()
    with open(write, "w") as stream:
        logs.set_up("json", "info", stream)
        log, before = structlog.get_logger(), logs.lost()
        for _ in range(30):
            log.info("long", text="x" * 10_000)
        assert logs.lost() > before
        os.close(read)
        before = logs.lost()
        log.info("gone")
        assert logs.lost() == before + 1


def test_a_full_pipe_keeps_lines_whole() -> None:
    """What does come through a pipe that fills up is lines that can be read, each by itself."""
    read, write = os.pipe()
    with open(write, "w") as stream, open(read, "rb", buffering=0) as reader:
        logs.set_up("json", "info", stream)
        log = structlog.get_logger()
        for _ in range(30):
            log.info("long", text="x" * 10_000)
        first = reader.read(1 << 20)
        began = time.monotonic()
        log.info("after")
        rest = reader.read(1 << 20)
        assert time.monotonic() - began < 10
    assert first is not None
    assert rest is not None
    texts = (first + rest).decode().splitlines()
    assert json.loads(texts[-1])["event"] == "after"
    for text in texts[:-2]:
        assert json.loads(text)["event"] == "long"


def test_priorities_for_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where standard error is journald's, lines begin with the priority that it reads; nowhere else."""
    read, write = os.pipe()
    with open(write, "w") as stream, open(read, "rb", buffering=0) as reader:
        status = os.fstat(write)
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        logs.set_up("auto", "info", stream)
        structlog.get_logger().warning("odd")
        line = reader.read(4096)
    assert line is not None
    assert line.startswith(b'<4>{"event":"odd"')
    out = io.StringIO()
    logs.set_up("auto", "info", out)
    structlog.get_logger().warning("odd")
    assert out.getvalue().startswith("{")


def test_without_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process started with standard error closed logs nowhere, and lives."""
    monkeypatch.setattr("sys.stderr", None)
    logs.set_up()
    structlog.get_logger().info("nobody hears")
