"""Scrapes as Prometheus makes them, and a recount of the gauges from what the daemon lists of its owners."""

from __future__ import annotations

import socket
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from kvslot.api.client.control import Control

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and labels."""
CODES = {
    "private": 1, "room": 1, "cached": 2, "leased": 3, "fenced": 4, "moving": 5, "reserved": 6, "quarantined": 7,
    "padding": 8,
}  # fmt: skip
"""What the map tells apart, as far as a recount does."""
SHARED = (CODES["private"], CODES["quarantined"])
"""What forks hold together is listed with each."""
RISING = ("counter", "histogram")


class _Unix(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=20)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(20)
        self.sock.connect(str(self._path))


def scrape_text(daemon: Path) -> str:
    """The text of /metrics, of the daemon at this socket."""
    http = _Unix(daemon.with_name("admin.sock"))
    try:
        http.request("GET", "/metrics")
        answer = http.getresponse()
        body = answer.read()
        assert answer.status == 200, body
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return body.decode("utf-8")
    finally:
        http.close()


class Scrape:
    """What the reference parser makes of a text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = list(text_string_to_metric_families(text))
        self.values: dict[Series, float] = {}
        self.rising: set[Series] = set()
        names = [family.name for family in self.families]
        assert len(names) == len(set(names)), "a family comes in two places"
        for family in self.families:
            for sample in family.samples:
                series = sample.name, tuple(sorted(sample.labels.items()))
                assert series not in self.values, f"{series} comes twice"
                self.values[series] = sample.value
                if family.type in RISING:
                    self.rising.add(series)

    def __getitem__(self, name: str) -> float:
        """The only series of this name."""
        (value,) = (value for (each, _), value in self.values.items() if each == name)
        return value

    def of(self, name: str, label: str) -> dict[str, float]:
        """The series of this name, by a label."""
        return {dict(labels)[label]: value for (each, labels), value in self.values.items() if each == name}

    def gauges(self, prefix: str) -> dict[Series, float]:
        """What neither rises nor is of another kind of name."""
        return {
            series: value
            for series, value in self.values.items()
            if series[0].startswith(prefix) and series not in self.rising
        }


def scrape(daemon: Path) -> Scrape:
    """One scrape of the daemon at this socket."""
    return Scrape(scrape_text(daemon))


def fallen(before: Scrape, after: Scrape) -> list[str]:
    """Counters and histograms that are less than they were, or no longer there."""
    return [
        f"{series}: {before.values[series]} -> {after.values.get(series)}"
        for series in sorted(before.rising)
        if after.values.get(series, -1.0) < before.values[series]
    ]


def recount(control: Control, pool: str) -> tuple[dict[str, Any], int]:
    """The gauges of a pool, from its owners' slots one by one; nothing may change meanwhile.

    Keys are metrics' names behind `kvslot_pool_`; `slots` is by state.  What forks share is listed with each of them,
    as room where it is behind a child's end: so private and room are one here, and unwritten room is the audit's.
    What no listing shows is taken from the pool's row, of which an audit in the same state says whether it is right.
    The second value: slots that are listed under two owners, which only happens while something changes.
    """
    (row,) = control.inspect("pools", pool=pool)
    size, blocks = row["block_size"], row["blocks"]
    owners = np.zeros(size * blocks, dtype=np.int32)
    twice = 0
    for stretch in control.inspect("map", pool=pool):
        state = CODES[stretch["state"]]
        for at, length in zip(stretch["extents"][::2], stretch["extents"][1::2], strict=True):
            before = owners[at : at + length]
            twice += int(((before != 0) & ((before != state) | (state not in SHARED))).sum())
            owners[at : at + length] = state
    counts = {state: int((owners == code).sum()) for state, code in CODES.items()}
    free = owners == 0
    whole = int(free.reshape(blocks, size).all(axis=1).sum())
    edges = np.flatnonzero(np.diff(np.concatenate(([0], free.astype(np.int8), [0]))))
    runs = (edges[1::2] - edges[::2]).tolist()
    total = int(free.sum())
    # Of a run what lies in whole cells (growth runs), all of it where there is none.
    cell = row["quantum"]
    whole_cells = [
        max(0, end // cell - -(-start // cell)) * cell
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    ]
    # Below 512 cells the daemon knows exactly which runs have most of them.
    _, longest = max(zip(whole_cells, runs, strict=True), default=(0, 0))
    of_use = [cells or length for cells, length in zip(whole_cells, runs, strict=True)]
    in_use = (blocks - row["padding"] // size - whole) * size - row["unwritten"]
    sessions = [each for each in control.inspect("sessions") if each["pool"] == pool]
    nodes = sum(len(each["node"]) for each in control.inspect("tree", pool=pool))
    tickets = list(control.inspect("tickets", pool=pool))
    namespaces = len(list(control.inspect("namespaces", pool=pool)))
    return {
        "slots": {
            "free": total,
            "cached": counts["cached"] + counts["leased"],
            **{
                state: counts[state]
                for state in ("private", "fenced", "moving", "reserved", "quarantined", "padding")
            },
        },
        "usable_slots": size * blocks - counts["padding"],
        "blocks": blocks,
        "block_slots": size,
        "free_blocks": whole,
        "evictable_tokens": counts["cached"],
        "leased_tokens": counts["leased"],
        "pinned_waste_slots": total - whole * size,
        "free_runs": len(runs),
        "largest_free_run_slots": longest,
        "scatter_ratio": 1 - longest / total if total else 0.0,
        "sequences": sum(each["sequences"] for each in sessions),
        "sessions": len(sessions),
        "nodes": nodes + namespaces,
        "namespaces": namespaces,
        "hole_slots": total - sum(whole_cells),
        "usable_run_ratio": {
            str(1 << power): sum(each for each in of_use if each >= size << power) / total if total else 1.0
            for power in range(11)
        },
        "internal_waste_ratio": max(0.0, 1 - row["tokens_held"] / in_use) if in_use > 0 else 0.0,
        "waiting_requests": {
            "growth": sum(each["growth"] for each in tickets),
            "commit": sum(each["awaits_commit"] for each in tickets),
            "new": sum(not (each["growth"] or each["awaits_commit"]) for each in tickets),
        },
        "size_bytes": row["size_bytes"],
        "watermark_slots": row["watermark"],
        "held_tokens": row["tokens_held"],
        "unwritten_slots": row["unwritten"],
        "duplicate_tokens": row["duplicate_tokens"],
        "peeled_tokens": row["peeled_tokens"],
        "pinned_tokens": row["pinned"],
        "moves": row["moves"],
    }, twice


def until_still(
    daemon: Path, control: Control, pool: str, seconds: float = 30.0
) -> tuple[Scrape, dict[str, Any]]:
    """A scrape and a recount between two scrapes that agree: of one state of the pool."""
    deadline = time.monotonic() + seconds
    moving = {"kvslot_pool_oldest_wait_seconds"}
    before = scrape(daemon)
    while True:
        counted, twice = recount(control, pool)
        time.sleep(0.3)  # beyond what a text serves for
        after = scrape(daemon)
        one, other = before.gauges("kvslot_pool_"), after.gauges("kvslot_pool_")
        changed = {series for series in one if one[series] != other.get(series) and series[0] not in moving}
        if not changed and not twice:
            return after, counted
        assert time.monotonic() < deadline, f"the pool does not come to rest: {changed}, {twice} slots twice"
        before = after
