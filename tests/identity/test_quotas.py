"""Quotas of tenants against a real daemon: each refusal names quota and limit, and what never fits is NEVER."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvslot.api.client import Client
from kvslot.api.client.errors import AdmissionTimeout, NeverFits
from kvslot.api.wire import errors, messages
from kvslot.api.wire.messages import Namespace

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens
from .tools import NAMES, refused


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    """A pool with limited tenants."""
    tenants: list[dict[str, Any]] = [
        {"name": "slots", "slots": 200},
        {"name": "few", "sessions": 2},
        {"name": "runs", "reserved_runs": 2},
        {"name": "rate", "requests_per_second": 3.0},
        {"name": "spaces", "namespaces": 2},
        {"name": "pins", "pins": 20},
        {"name": "*", "slots": 300},
    ]
    with running(tenant=tenants, pools=[{"blocks": 200, "block_size": 16, "quantum": 16}]) as daemon:
        yield daemon


def test_slots_over_all_sessions(daemon: Running) -> None:
    """NEVER for what the tenant's quota can never hold; LATER, with its figures, for what it cannot hold now; Ready
    when another session of the tenant gives back; another tenant notices nothing."""
    with Wire(daemon.socket) as one, Wire(daemon.socket) as two, Wire(daemon.socket) as other:
        root = one.hello(namespace=Namespace("slots"), map=False).namespace
        salted = two.hello(namespace=Namespace("slots", salt="s"), map=False).namespace
        theirs = other.hello(namespace=Namespace("x"), map=False).namespace
        never = one.call(messages.Allocate, root, 1, tokens(201))
        assert (type(never), never.needed, never.limit, never.quota) == (messages.Never, 201, 200, "slots")
        admitted = one.call(messages.Allocate, root, 1, tokens(100))
        later = two.call(messages.Allocate, salted, 1, tokens(190))
        assert (type(later), later.reason, later.quota, later.limit) == (
            messages.Later,
            "quota",
            "slots",
            200,
        )
        assert later.free_now == 200 - admitted.capacity
        assert isinstance(other.call(messages.Allocate, theirs, 1, tokens(250)), messages.Admitted)
        one.call(messages.Free, 1)
        assert two.receive() == messages.Ready(later.ticket)
        assert isinstance(
            two.call(messages.Allocate, salted, 1, tokens(190), later.ticket), messages.Admitted
        )
        grown = two.call(messages.Extend, 1, 0, 11)
        assert (type(grown), grown.limit, grown.quota) == (messages.Never, 200, "slots")


def test_tenants_are_shown(daemon: Running) -> None:
    """Each tenant of each pool is a row with what it holds and its quotas; what it holds goes as its sessions do."""
    with Wire(daemon.socket) as wire, Wire(daemon.socket) as tool:
        root = wire.hello(namespace=Namespace("slots"), map=False).namespace
        admitted = wire.call(messages.Allocate, root, 1, tokens(100))
        rows = {row["tenant"]: row for row in tool.call(messages.Inspect, "tenants").rows}
        assert set(rows) == {"slots", "few", "runs", "rate", "spaces", "pins", "*"}
        row = rows["slots"]
        assert (row["slots"], row["charged"], row["unwritten"]) == (
            200,
            admitted.capacity,
            admitted.capacity - 100,
        )
        assert rows["runs"]["reserved"] == 32
        wire.call(messages.Free, 1)
        (row,) = (r for r in tool.call(messages.Inspect, "tenants").rows if r["tenant"] == "slots")
        assert (row["charged"], row["unwritten"], row["sessions"]) == (0, 0, 1)


def test_a_sessions_own_quota_is_named_as_such(daemon: Running) -> None:
    """Where the session's quota is the narrower one it is the one that is named."""
    with Wire(daemon.socket) as wire:
        root = wire.hello(namespace=Namespace("slots"), map=False, quota=50).namespace
        never = wire.call(messages.Allocate, root, 1, tokens(51))
        assert (never.limit, never.quota) == (50, "session")
        unlimited = wire.call(messages.OpenNamespace, Namespace("few")).namespace
        assert wire.call(messages.Allocate, unlimited, 2, tokens(4000)).quota == "session"
    with Wire(daemon.socket) as wire:
        root = wire.hello(namespace=Namespace("few"), map=False).namespace
        never = wire.call(messages.Allocate, root, 1, tokens(4000))
        assert (never.limit, never.quota) == (199 * 16, "")


def test_sessions_of_a_tenant(daemon: Running) -> None:
    """A session more than the quota is Busy, with its name and limit, by Hello and by OpenNamespace; one that has ended
    makes way, and one that opened two namespaces of a tenant is one."""
    few, x = Namespace("few"), Namespace("x")
    with Wire(daemon.socket) as one:
        one.hello(namespace=few, map=False)
        one.call(messages.OpenNamespace, Namespace("few", salt="another"))
        with Wire(daemon.socket) as two:
            two.hello(namespace=x, map=False)
            assert isinstance(two.call(messages.OpenNamespace, few), messages.Opened)
            with Wire(daemon.socket) as three:
                error = refused(three, messages.Hello, 1, "x", namespace=few, map=False)
                assert error.code == errors.Busy.code
                assert "'few'" in error.message
                assert "quota sessions is 2" in error.message
            with Wire(daemon.socket) as four:
                four.hello(namespace=x, map=False)
                error = refused(four, messages.OpenNamespace, few)
                assert error.code == errors.Busy.code
        replies: list[object] = []
        while not any(isinstance(each, messages.Welcome) for each in replies):
            assert len(replies) < 1000, "the place of a session that ended is not given on"
            with Wire(daemon.socket) as five:
                replies.append(five.call(messages.Hello, 1, "x", namespace=few, map=False))


def test_namespaces_of_a_tenant(daemon: Running) -> None:
    """A namespace more than the quota is Busy, by Hello and OpenNamespace, with its name, limit and remedy; one that
    is there may be opened by more, and one that is over makes way; who was refused is no session of the tenant."""
    salted = [Namespace("spaces", salt=each) for each in "abc"]
    with (
        Wire(daemon.socket) as one, Wire(daemon.socket) as two, Wire(daemon.socket) as new, Wire(daemon.socket) as tool
    ):  # fmt: skip
        one.hello(namespace=salted[0], map=False)
        two.hello(namespace=Namespace("x"), map=False)
        with Wire(daemon.socket) as three:
            three.hello(namespace=salted[1], map=False)
            for wire, asked in ((two, (messages.OpenNamespace,)), (new, (messages.Hello, 1, "x"))):
                error = refused(wire, *asked, namespace=salted[2])
                assert error.code == errors.Busy.code
                for words in ("'spaces'", "quota namespaces is 2", "nothing of it is cached"):
                    assert words in error.message
            (row,) = (r for r in tool.call(messages.Inspect, "tenants").rows if r["tenant"] == "spaces")
            assert (row["namespaces"], row["namespaces_max"], row["refused_namespaces"]) == (2, 2, 2)
            assert row["sessions"] == 2
            assert isinstance(two.call(messages.OpenNamespace, salted[1]), messages.Opened)
            assert isinstance(one.call(messages.OpenNamespace, salted[1]), messages.Opened)
        two.call(messages.Bye)
        root = one.call(messages.OpenNamespace, salted[1]).namespace
        one.call(messages.Allocate, root, 1, tokens(20))
        one.call(messages.Commit, 1, 20)
        one.call(messages.Free, 1)
        one.call(messages.Bye)
    # What is cached keeps a namespace: the other one has made way, and only that.
    replies: list[object] = []
    while not any(isinstance(each, messages.Welcome) for each in replies):
        assert len(replies) < 1000, "the place of a namespace that is over is not given on"
        with Wire(daemon.socket) as wire:
            replies.append(wire.call(messages.Hello, 1, "x", namespace=salted[2], map=False))
            if isinstance(replies[-1], messages.Welcome):
                assert refused(wire, messages.OpenNamespace, salted[0]).code == errors.Busy.code


def test_pins_of_a_tenant(daemon: Running) -> None:
    """What its pins keep over all sessions is bounded; the refusal names the quota, and the row says how much it is."""
    prompts = [tokens(16, each) for each in (0, 500)]
    with Wire(daemon.socket) as one, Wire(daemon.socket) as two, Wire(daemon.socket) as tool:
        root = one.hello(namespace=Namespace("pins"), map=False).namespace
        theirs = two.hello(namespace=Namespace("pins"), map=False).namespace
        for number, prompt in enumerate(prompts, 1):
            one.call(messages.Allocate, root, number, prompt)
            one.call(messages.Commit, number, 16)
        assert one.call(messages.Pin, root, prompts[0]).length == 16
        assert "quota pins of 20" in refused(two, messages.Pin, theirs, prompts[1]).message
        (row,) = (r for r in tool.call(messages.Inspect, "tenants").rows if r["tenant"] == "pins")
        assert (row["pinned"], row["pins"]) == (16, 20)


def test_namespaces_of_a_user() -> None:
    """What one user was the first to open is bounded whatever its tenants are called; a reload changes that, and what
    ends makes way."""
    with running(namespaces_per_user=2) as daemon, Wire(daemon.socket) as one, Wire(daemon.socket) as two:
        one.hello(namespace=Namespace("a"), map=False)
        two.hello(namespace=Namespace("b"), map=False)
        error = refused(two, messages.OpenNamespace, Namespace("c"))
        assert error.code == errors.Busy.code
        for words in (f"user {os.getuid()}", "namespaces_per_user is 2", "raise it"):
            assert words in error.message
        assert isinstance(two.call(messages.OpenNamespace, Namespace("a")), messages.Opened)
        two.call(messages.Bye)
        replies: list[object] = []
        while not any(isinstance(each, messages.Opened) for each in replies):
            assert len(replies) < 1000, "the place of a namespace that is over is not given on"
            replies.append(one.call(messages.OpenNamespace, Namespace("c")))
        assert refused(one, messages.OpenNamespace, Namespace("d")).code == errors.Busy.code
        file = daemon.log.with_name("kvslot.toml")
        file.write_text(file.read_text().replace("namespaces_per_user = 2", "namespaces_per_user = 3"))
        with Wire(daemon.socket) as tool:
            assert tool.call(messages.Reload).changed == ["namespaces_per_user"]
        assert isinstance(one.call(messages.OpenNamespace, Namespace("d")), messages.Opened)


def test_runs_in_reserve(daemon: Running) -> None:
    """Growth runs that stand unwritten are bounded over the tenant's sequences; the answer names the quota."""
    with Wire(daemon.socket) as wire:
        root = wire.hello(namespace=Namespace("runs"), map=False).namespace
        admitted = [wire.call(messages.Allocate, root, n, tokens(20, n * 1000)) for n in range(1, 5)]
        assert sum(each.capacity - 20 for each in admitted) <= 32
        answers = [wire.call(messages.Extend, n) for n in itertools.islice(itertools.cycle(range(1, 5)), 12)]
        later = next(each for each in answers if isinstance(each, messages.Later))
        assert (later.reason, later.quota, later.limit) == ("quota", "reserved_runs", 32)
        never = wire.call(messages.Extend, 1, 0, 33)
        assert (type(never), never.limit, never.quota) == (messages.Never, 32, "reserved_runs")


def test_requests_a_second(daemon: Running) -> None:
    """Beyond the rate Allocate is LATER and Probe Busy, both with the quota, its limit and a time; what goes on with
    running work, or comes back with its ticket, is not counted, and after that time a request is served."""
    with Wire(daemon.socket) as wire:
        root = wire.hello(namespace=Namespace("rate"), map=False).namespace
        other = wire.call(messages.OpenNamespace, Namespace("x")).namespace
        answers: list[Any] = []
        while not answers or not isinstance(answers[-1], messages.Later):
            answers.append(
                wire.call(messages.Allocate, root, len(answers) + 1, tokens(8, 100 * len(answers)))
            )
            assert len(answers) < 1000
        later = answers[-1]
        assert (later.reason, later.quota, later.limit, later.ticket) == (
            "rate", "requests_per_second", 3, 0,
        )  # fmt: skip
        assert 0 < later.retry_after_ms <= 334
        assert isinstance(wire.call(messages.Withdraw, later.ticket), messages.Done)
        busy = wire.call(messages.Probe, root, tokens(4))
        while isinstance(busy, messages.Probed):
            busy = wire.call(messages.Probe, root, tokens(4))
        assert busy.code == errors.Busy.code
        assert "requests_per_second is 3" in busy.message
        assert isinstance(wire.call(messages.Extend, 1), messages.Grown)
        assert isinstance(wire.call(messages.Free, 1), messages.Done)
        assert isinstance(wire.call(messages.Allocate, other, 50, tokens(8)), messages.Admitted)
    with Client(str(daemon.socket), namespace=Namespace("rate")) as client:
        for n in range(6):
            client.admit(range(n * 50, n * 50 + 8), timeout=30).free()


def test_clients_are_told_in_words(daemon: Running) -> None:
    """The errors of the client library name the quota and its limit."""
    with Client(str(daemon.socket), namespace=Namespace("slots")) as client:
        with pytest.raises(NeverFits, match=r"200 .*quota slots"):
            client.admit(range(201))
        kept = client.admit(range(150))
        with pytest.raises(AdmissionTimeout, match=r"quota slots, 200"):
            client.admit(range(500, 600), timeout=0.05)
        kept.free()


# -- names ------------------------------------------------------------------------------------------------------------


def test_s44_no_two_names_meet(daemon: Running) -> None:
    """S44: whatever part of a namespace a name stands in, only the same structure finds what was cached; names that
    look alike, or run together when they are joined, are others."""
    parts: set[tuple[str, str, str, str]] = {
        ("", "", "", "X"), ("", "", "X", ""), ("", "", "X", "X"), ("", "X", "", ""), ("X", "", "", ""),
        ("", "", "", ""), ("", "", "ab", "c"), ("", "", "a", "bc"), ("", "", "", "x"), ("", "", "x", ""),
        ("ab", "c", "", ""),
        ("a", "bc", "", ""), ("a", "b", "c", ""), ("abc", "", "", ""),
    }  # fmt: skip
    parts |= {("", "", "", name) for name in NAMES} | {
        (name, "", "", "") for name in NAMES if name != "slots"
    }
    prompt = tokens(17)
    with Wire(daemon.socket) as wire:
        wire.hello(namespace=Namespace("x"), map=False)
        roots = {
            each: wire.call(messages.OpenNamespace, Namespace(*each)).namespace for each in sorted(parts)
        }
        assert len(set(roots.values())) == len(parts)
        for number, root in enumerate(roots.values(), 1):
            found = wire.call(messages.Probe, root, prompt)
            assert found.hit == 0, [each for each, it in roots.items() if it == root]
            assert isinstance(wire.call(messages.Allocate, root, number, prompt), messages.Admitted)
            wire.call(messages.Commit, number, 17)
            wire.call(messages.Free, number)
            assert wire.call(messages.Probe, root, prompt).hit == 16, "the control: the same key hits"


def test_a_name_that_is_no_text_is_refused(daemon: Running) -> None:
    """A lone surrogate's bytes, or more than 256 characters, end the connection and nothing else."""
    body = b"\x94\x01\x01\x01\xa3\xed\xa0\x80"
    with Wire(daemon.socket) as wire:
        wire.sock.sendall(len(body).to_bytes(4, "little") + body)
        assert wire.receive().code == errors.BadRequest.code
    with Wire(daemon.socket) as wire:
        wire.hello(namespace=Namespace("x"), map=False)
        wire.send(messages.OpenNamespace(9, Namespace("z" * 257)))
        assert wire.receive().code == errors.BadRequest.code
    with Wire(daemon.socket) as wire:
        wire.hello(namespace=Namespace("x"), map=False)
