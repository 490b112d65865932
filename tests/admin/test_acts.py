"""Acts: each does what its control verb does, with the permission of who asks, and says in the log who that was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvslot.api.admin import ROUTES
from kvslot.api.wire.messages import Allocate, Commit, Free, Namespace

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens
from .http import Client


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    with running(socket_mode=0o666, admin_socket_mode=0o666) as daemon:
        daemon.log.parent.chmod(0o755)
        yield daemon


@pytest.fixture
def client(daemon: Running) -> Iterator[Client]:
    with Client(daemon.socket.with_name("admin.sock")) as client:
        yield client


def cache(daemon: Running, count: int, start: int) -> None:
    """Publishes a prompt and lets go of it."""
    with Wire(daemon.socket) as wire:
        space = wire.hello("engine", namespace=Namespace("t")).namespace
        wire.call(Allocate, space, 1, tokens(count, start))
        wire.call(Commit, 1, count)
        wire.call(Free, 1)
        wire.bye()


def logged(daemon: Running, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in daemon.text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def test_evict_pin_and_unpin(daemon: Running, client: Client) -> None:
    """What is pinned by its node stays when all else is evicted, and goes once it is unpinned."""
    cache(daemon, 50, 5000)
    cache(daemon, 30, 6000)
    rows = client.get("/v1/prefixes?order=size").json()["items"]
    row = next(each for each in rows if each["depth"] + each["tokens"] == 50)
    wrong = client.act("pin", {"node": row["node"], "depth": 0, "tokens": 49})
    assert (wrong.status, wrong.code) == (404, "not_found")
    pin = client.act("pin", {"node": row["node"], "depth": row["depth"], "tokens": row["tokens"]}).json()
    assert pin["tokens"] == 50
    (listed,) = client.get("/v1/pins").json()["items"]
    assert (listed["pin"], listed["tokens"], listed["by"]) == (pin["pin"], 50, f"uid {os.getuid()}")
    assert client.act("evict", {"tokens": 100_000}).json() == {"tokens": 30}
    assert client.act("unpin", {"pin": pin["pin"]}).json() == {"done": True}
    assert client.act("unpin", {"pin": pin["pin"]}).status == 404
    assert client.act("evict", {"tokens": 100_000}).json() == {"tokens": 50}
    assert client.get("/v1/pins").json()["items"] == []


def test_defrag_audit_level_and_reload(daemon: Running, client: Client) -> None:
    """Each answers with what came of it."""
    (gap,) = client.act("defrag", {"action": "stop"}).json()["items"]
    assert gap["mode"] == "off"
    (gap,) = client.act("defrag", {"action": "start", "pool": "default"}).json()["items"]
    assert gap["mode"] == "idle"
    assert client.act("defrag", {"action": "dance"}).status == 400
    audit = client.act("audit").json()
    assert (audit["ok"], audit["faults"]) == (True, [])
    checks = {check["name"]: check for check in client.get("/healthz").json()["checks"]}
    assert checks["audit:default"] == {
        "name": "audit:default", "ok": True, "reason": "the last audit found nothing wrong", "vital": True
    }  # fmt: skip
    assert client.act("log-level", {"level": "debug"}).json() == {"done": True}
    assert client.get("/v1/stats").json()["log_level"] == "debug"
    assert client.act("log-level", {"level": "loud"}).status == 400
    file = daemon.log.with_name("kvslot.toml")
    text = file.read_text()
    file.write_text("stall_seconds = 7.25\nsessions_max = 9\n" + text)
    assert client.act("reload").json() == {
        "changed": ["stall_seconds", "log_level"], "needs_restart": ["sessions_max"], "taken": [], "failed": []
    }  # fmt: skip
    file.write_text("nonsense = 1\n" + text)
    refused = client.act("reload")
    assert (refused.status, refused.code) == (400, "bad_request")
    assert "nonsense" in refused.json()["error"]["message"]
    file.write_text(text)


def test_an_act_is_logged_with_who_asked(daemon: Running, client: Client) -> None:
    """User and process by the kernel's word, what was asked, and what was refused."""
    client.act("evict", {"tokens": 7})
    client.act("unpin", {"pin": 123456})
    line = next(each for each in logged(daemon, "act") if each["arguments"] == {"tokens": 7, "pool": ""})
    assert (line["act"], line["uid"], line["pid"]) == ("evict", os.getuid(), os.getpid())
    line = logged(daemon, "act_refused")[-1]
    assert (line["act"], line["uid"], line["code"]) == ("unpin", os.getuid(), "not_found")


CHILD = """
import http.client, os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for method, path, body in [("GET", "/v1/stats", None)] + [("POST", f"/v1/acts/{each}", "{}") for each in sys.argv[2:]]:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(sys.argv[1])
    connection = http.client.HTTPConnection("localhost")
    connection.sock = sock
    connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
    response = connection.getresponse()
    print(response.status, path, response.read().decode())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")
def test_who_may_connect_may_look_and_not_act(daemon: Running) -> None:
    """Another user than those of control verbs gets the views, and 403 with a remedy for every act."""
    acts = [route.path.rpartition("/")[2] for route in ROUTES if route.act]
    done = subprocess.run(
        [sys.executable, "-Ic", CHILD, str(daemon.socket.with_name("admin.sock")), *acts],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    first, *rest = done.stdout.splitlines()
    assert first.startswith("200 ")
    assert len(rest) == len(acts)
    for line in rest:
        status, _, body = line.split(" ", 2)
        assert status == "403", line  # also where the arguments are wrong
        error = json.loads(body)["error"]
        assert error["code"] == "denied"
        assert "control_uids" in error["remedy"]
    assert daemon.process.poll() is None
    denied = [line for line in logged(daemon, "act_refused") if line["code"] == "denied"]
    assert {line["act"] for line in denied} == set(acts)
    assert all(line["uid"] == 65534 for line in denied)


def test_arguments_that_cannot_be(client: Client, daemon: Running) -> None:
    """Not JSON, unknown names, wrong types, out of range, too much, another kind: told, and nothing is done."""
    cases: list[tuple[str, Any, dict[str, str], int]] = [
        ("evict", b"{", {}, 400), ("evict", b"", {}, 400), ("evict", b"[]", {}, 400), ("evict", {}, {}, 400),
        ("evict", {"tokens": 0}, {}, 400), ("evict", {"tokens": -1}, {}, 400), ("evict", {"tokens": 2**60}, {}, 400),
        ("evict", {"tokens": "9"}, {}, 400), ("evict", {"tokens": 1.5}, {}, 400),
        ("evict", {"tokens": 1, "pools": ""}, {}, 400), ("evict", {"tokens": 1, "pool": "none"}, {}, 404),
        ("evict", {"tokens": 1}, {"Content-Type": "text/plain"}, 415),
        ("evict", {"tokens": 1}, {"Content-Encoding": "gzip"}, 415),
        ("evict", b"{" + b" " * 20_000 + b"}", {}, 413),
        ("evict", b"[" * 10_000, {}, 400), ("drain", {"deadline_ms": 10**9}, {}, 400),
        ("pin", {"node": 0, "depth": 0, "tokens": 1}, {}, 400), ("dance", {}, {}, 404),
        ("evict", {"tokens": 1}, {"Origin": "http://evil.example"}, 403),
        ("evict", {"tokens": 1}, {"Sec-Fetch-Site": "cross-site"}, 403),
        ("evict", {"tokens": 1}, {"Origin": "null"}, 403), ("evict", {"tokens": 1}, {"Origin": "http://[x"}, 403),
    ]  # fmt: skip
    for name, content, headers, status in cases:
        with Client(daemon.socket.with_name("admin.sock")) as client:
            answer = client.ask("POST", f"/v1/acts/{name}", content, headers)
        assert answer.status == status, (name, content, answer)
        assert answer.json()["error"]["message"]


def test_drain_is_an_act() -> None:
    """It ends the daemon once nothing runs; until then it is said to be draining, and views go on."""
    with running(drain_seconds=20.0) as daemon:
        admin = daemon.socket.with_name("admin.sock")
        with Wire(daemon.socket) as wire:
            space = wire.hello("engine").namespace
            wire.call(Allocate, space, 1, tokens(5))
            with Client(admin) as client:
                assert client.get("/readyz").json() == {"ready": True, "reason": "serving"}
                assert client.act("drain").json() == {"done": True}
            with Client(admin) as client:
                answer = client.get("/readyz")
                assert (answer.status, answer.json()["ready"]) == (503, False)
            with Client(admin) as client:
                assert client.get("/healthz").status == 200
            with Client(admin) as client:
                stats = client.get("/v1/stats").json()
                assert stats["state"] == "draining"
                assert 0 < stats["drain_left_s"] <= 20
            wire.call(Free, 1)
            wire.bye()
        assert daemon.process.wait(20) == 0
        assert not admin.exists()


def test_every_act_has_a_verb_of_control() -> None:
    """The document's acts are those of the issue, each with arguments that have no unknown names."""
    acts = {route.path.rpartition("/")[2]: route for route in ROUTES if route.act}
    assert set(acts) == {"defrag", "evict", "pin", "unpin", "audit", "drain", "log-level", "reload"}
    for route in acts.values():
        assert route.body is not None
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(b'{"strange": 1}', type=route.body)


def wait_until(true: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
