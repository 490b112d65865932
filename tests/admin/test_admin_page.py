"""docs/admin.md against the code: paths, acts and their arguments, statuses, limits."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from kvslot.api.admin import ROUTES, app, events, guard
from kvslot.api.admin.openapi import FAILURES
from kvslot.daemon.blocks import SHARE

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "admin.md").read_text()


def column(first: str, number: int = 1) -> list[str]:
    """A column's cells of the table whose header begins with `first`."""
    lines = PAGE.split(f"\n| {first} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [line.split("|")[number].strip() for line in lines]


def test_every_path_is_told() -> None:
    """The table of views has every one; beside them the page and the metrics, and the document itself above."""
    told = set(re.findall(r"`(/[^`]*)`", " ".join(column("GET"))))
    assert told | {"/openapi.json"} == {route.path for route in ROUTES if not route.act} | {
        "/",
        "/metrics",
    } | {"/openapi.json"}


def test_every_act_is_told_with_its_arguments() -> None:
    """Names of acts and of all their arguments."""
    acts = {route.path.removeprefix("/v1/acts/"): route for route in ROUTES if route.act}
    told = {
        cell.strip("`"): arguments
        for cell, arguments in zip(
            column("POST `/v1/acts/...`"), column("POST `/v1/acts/...`", 2), strict=True
        )
    }
    assert set(told) == set(acts)
    for name, route in acts.items():
        assert route.body is not None
        for field in msgspec.structs.fields(route.body):
            assert f"`{field.name}`" in told[name], (name, field.name)


def test_every_status_is_told() -> None:
    """All that any answer can have, beside 200."""
    told = {int(each) for cell in column("status") for each in cell.split(", ")}
    assert told == set(FAILURES)


def test_limits_are_those_of_the_code() -> None:
    """Figures of the page are constants of the code."""
    for text in (
        f"| between requests | {guard.IDLE_SECONDS:.0f} s |",
        f"| an answer that is not read | {guard.SEND_SECONDS:.0f} s |",
        f"{guard.READ_SECONDS:.0f} s to arrive; {guard.LINE_BYTES >> 10} KiB a line, {guard.HEADERS_MOST} headers; ",
        f"arguments {app.BODY_SECONDS:.0f} s and {guard.BODY_BYTES >> 10} KiB",
        f"| requests of all clients together | {guard.REQUEST_RATE:.0f} a second, and {guard.REQUEST_BURST:.0f}",
        f"| new connections | {guard.ACCEPT_RATE:.0f} a second, and {guard.ACCEPT_BURST:.0f} at once",
        f"| rows of a page | {app.LIMIT_MOST}; blocks {app.BLOCKS_MOST} |",
        f"The last {events.EVENTS_MOST}\nevents are kept, in {events.BYTES_MOST >> 20} MiB",
        f"There is room for {app.STREAMS_MOST} readers; one that has not read for {guard.SEND_SECONDS:.0f} seconds",
        f"for {100 * SHARE:.1f} % of the time",
    ):
        assert text in PAGE, text
