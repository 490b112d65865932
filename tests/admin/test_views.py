"""Every view of a daemon with something in it: its shape, its figures, and that its rows have not drifted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvslot.api.admin import ROUTES, views
from kvslot.api.wire.messages import Allocate, Commit, Extend, Free, Inspect, Namespace

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens
from .http import Client


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    """With two pools; one has a session that runs a sequence, two namespaces, and cached prefixes that were hit."""
    pools: list[dict[str, Any]] = [{}, {"name": "pages", "block_size": 8}]
    with running(pools=pools) as daemon, Wire(daemon.socket) as wire:
        space = wire.hello("engine", namespace=Namespace("a", "m", "l", "salt")).namespace
        for number, count in enumerate([40, 40, 100, 100, 100], 1):
            wire.call(Allocate, space, number, tokens(count))
            wire.call(Commit, number, count)
            wire.call(Free, number)
        wire.call(Allocate, space, 9, tokens(20, 1000))
        wire.call(Extend, 9, 20)
        yield daemon
        wire.bye()


@pytest.fixture
def client(daemon: Running) -> Iterator[Client]:
    with Client(daemon.socket.with_name("admin.sock")) as client:
        yield client


ROWS: dict[str, tuple[str, type[msgspec.Struct], set[str]]] = {
    "/v1/pool": ("pools", views.Pool, set()),
    "/v1/frag": ("frag", views.Frag, set()),
    "/v1/sessions": ("sessions", views.Session, set()),
    "/v1/namespaces": ("namespaces", views.Namespace, set()),
    "/v1/gaps": ("defrag", views.Gap, set()),
    "/v1/stats": ("status", views.Stats, set()),
    "/v1/pins": ("pins", views.Pin, set()),
}
"""By path: the kind of row that a view is made from, and what of it the view leaves out."""


@pytest.mark.parametrize("path", ROWS)
def test_a_view_has_all_that_its_row_has(daemon: Running, client: Client, path: str) -> None:
    """Whoever adds a field to a row adds it to the view: both show the same, under the same names."""
    kind, view, left_out = ROWS[path]
    with Wire(daemon.socket) as wire:
        rows: list[dict[str, Any]] = wire.call(Inspect, kind).rows
    fields = set(view.__struct_fields__)
    for row in rows:
        assert set(row) - fields == left_out
    answer = client.get(path)
    assert answer.status == 200
    shown = answer.json()
    for item in shown.get("items", [shown]):
        msgspec.convert(item, view)


def test_every_answer_is_what_its_route_says(client: Client) -> None:
    """Each view decodes as its type, with nothing beside the type's fields."""
    for route in ROUTES:
        if route.method != "GET" or route.answer is None:
            continue
        answer = client.get(route.path)
        assert answer.status == 200, (route.path, answer.body)
        assert answer.headers["content-type"] == "application/json"
        found = msgspec.json.decode(answer.body, type=route.answer)
        assert msgspec.to_builtins(found) == answer.json(), route.path


def test_pools_are_told_apart(client: Client) -> None:
    """`pool` picks one, everywhere; one that there is not is told, with those there are."""
    assert [row["pool"] for row in client.get("/v1/pool").json()["items"]] == ["default", "pages"]
    for path in ("pool", "frag", "gaps"):
        (row,) = client.get(f"/v1/{path}?pool=pages").json()["items"]
        assert row["pool"] == "pages"
    assert client.get("/v1/sessions?pool=pages").json()["items"] == []
    for path in ("pool", "frag", "gaps", "blocks", "sessions", "namespaces", "prefixes", "pins"):
        answer = client.get(f"/v1/{path}?pool=none")
        assert (answer.status, answer.code) == (404, "not_found")
        assert "default" in answer.json()["error"]["message"]


def test_prefixes_come_by_size_hits_and_age(client: Client) -> None:
    """The order is as asked, every page continues the one before, and hits are those that ended there."""
    for order, figure, rising in (("size", "tokens", False), ("hits", "hits", False), ("age", "age", False)):
        whole = client.get(f"/v1/prefixes?order={order}").json()["items"]
        figures = [row[figure] for row in whole]
        assert figures == sorted(figures, reverse=not rising)
        assert len(whole) >= 2
        paged: list[Any] = []
        cursor = ""
        while True:
            page = client.get(
                f"/v1/prefixes?order={order}&limit=1" + (f"&cursor={cursor}" if cursor else "")
            ).json()
            paged += page["items"]
            cursor = page["next"]
            if cursor is None:
                break
        assert [row["node"] for row in paged] == [row["node"] for row in whole]
    by_length = {row["depth"] + row["tokens"]: row for row in client.get("/v1/prefixes").json()["items"]}
    # The second prompt of 40 left its last token to be computed, as those of 100 did.
    assert sum(row["hits"] for row in by_length.values()) == 4
    assert by_length[100]["hits"] == 2
    assert {row["namespace"] for row in by_length.values()} == {
        row["namespace"] for row in client.get("/v1/namespaces").json()["items"]
    }
    assert b"salt" not in client.get("/v1/namespaces").body.replace(b"salted", b"")


def test_blocks_are_paged_and_add_up(client: Client) -> None:
    """All blocks come once, each with all its slots, and their sums are the pool's."""
    (pool, *_) = client.get("/v1/pool").json()["items"]
    found: list[dict[str, int]] = []
    cursor = ""
    while True:
        page = client.get("/v1/blocks?limit=10" + (f"&cursor={cursor}" if cursor else "")).json()
        assert (page["blocks"], page["block_size"]) == (pool["blocks"], pool["block_size"])
        found += page["items"]
        cursor = page["next"]
        if cursor is None:
            break
    assert [row["block"] for row in found] == list(range(pool["blocks"]))
    for state in ("free", "private", "cached", "fenced", "moving", "reserved", "quarantined", "padding"):
        assert sum(row[state] for row in found) == pool[state]
    assert all(sum(row.values()) - row["block"] == pool["block_size"] for row in found)


def test_fragmentation_says_what_its_figures_are(client: Client) -> None:
    """Every figure of /v1/frag has its definition, the run index goes from 1 to 1024 blocks, lost hits are told."""
    answer = client.get("/v1/frag").json()
    for row in answer["items"]:
        assert set(row) - set(answer["definitions"]) == {"pool", "block_size", "blocks"}
        assert list(row["usable_run_pct"]) == [str(1 << n) for n in range(11)]


def test_latency_has_every_step(client: Client) -> None:
    """A verb that was asked is counted; one that was sampled has all steps of the data path."""
    rows = {row["verb"]: row for row in client.get("/v1/latency").json()["items"]}
    assert rows["Allocate"]["count"] == 6
    for row in rows.values():
        if row["sampled"]:
            names = ["received", "decoded", "applied", "encoded", "sent", "all"]
            assert [step["step"] for step in row["steps"]] == names
            assert all(step["p50_us"] <= step["p99_us"] <= step["max_us"] for step in row["steps"])


def test_what_cannot_be_is_told(client: Client) -> None:
    """Wrong paths, methods and parameters are failures with a code, and the connection goes on."""
    cases = [
        ("GET", "/nothing", 404), ("GET", "/v1", 404), ("GET", "/v1/pool/", 404), ("POST", "/v1/pool", 405),
        ("DELETE", "/healthz", 405), ("GET", "/v1/acts/evict", 405), ("GET", "/v1/pool?limit=1", 400),
        ("GET", "/v1/sessions?limit=0", 400), ("GET", "/v1/sessions?limit=257", 400),
        ("GET", "/v1/sessions?limit=1&limit=2", 400), ("GET", "/v1/sessions?cursor=x", 400),
        ("GET", "/v1/sessions?limit=1e2", 400), ("GET", "/v1/prefixes?order=name", 400),
        ("GET", "/v1/prefixes?cursor=5", 400), ("GET", "/v1/blocks?since=-3", 400), ("GET", "/v1/pool?pool=a%00b", 404),
        ("GET", f"/v1/pool?pool={'x' * 300}", 400), ("GET", "/v1/events?from=-1", 400),
    ]  # fmt: skip
    for method, path, status in cases:
        answer = client.ask(method, path)
        assert answer.status == status, (path, answer.body)
        assert msgspec.json.decode(answer.body, type=views.Failure).error.message
        if status == 405:
            assert answer.headers["allow"]
    assert client.get("/healthz").status == 200


def test_head_is_a_get_without_its_body(client: Client) -> None:
    """Whoever only wants to know whether something is there may ask so."""
    for path in ("/healthz", "/v1/stats", "/metrics", "/openapi.json"):
        answer = client.ask("HEAD", path)
        assert (answer.status, answer.body) == (200, b"")


def test_the_socket_is_where_it_is_expected(daemon: Running) -> None:
    """Beside the engines' socket, with the mode that is configured."""
    path: Path = daemon.socket.with_name("admin.sock")
    assert path.is_socket()
    assert path.stat().st_mode & 0o777 == 0o660
