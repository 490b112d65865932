"""Every place where a session enters, asked by somebody who may not: connect, Hello, resume, groups, OpenNamespace,
and the numbers of namespaces that others have opened, in every verb that takes one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvslot.api.wire import errors, messages
from kvslot.api.wire.messages import Namespace

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens
from .tools import ME, NAMES, OTHER, as_root, connect, refused, told

DENIED = errors.Denied.code


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    """Tenant "mine" for who runs the tests, "theirs" for another user, "ours" for a group, "any" for everybody."""
    tenants: list[dict[str, Any]] = [
        {"name": "mine", "users": [ME]},
        {"name": "theirs", "users": [OTHER]},
        {"name": "ours", "groups": [65010]},
        {"name": "any"},
    ]
    with running(tenant=tenants, socket_mode="0666") as daemon:
        yield daemon


def test_hello_opens_only_ones_own(daemon: Running) -> None:
    """Hello in another's namespace, or one that is not listed, is Denied with who and what, and leaves no session."""
    with Wire(daemon.socket) as wire:
        error = refused(wire, messages.Hello, 1, "x", namespace=Namespace("theirs"), map=False)
        assert error.code == DENIED
        assert f"user {ME} " in error.message
        assert "'theirs'" in error.message
    for name in ("", "Mine", "mine ", "*", "min\u0435"):  # the last with a Cyrillic letter
        with Wire(daemon.socket) as wire:
            assert refused(wire, messages.Hello, 1, "x", namespace=Namespace(name), map=False).code == DENIED
    with Wire(daemon.socket) as tool:
        rows = tool.call(messages.Inspect, "sessions").rows
        assert not rows
        assert {row["tenant"] for row in tool.call(messages.Inspect, "namespaces").rows} <= {"mine", "any"}
    with Wire(daemon.socket) as wire:
        wire.hello(namespace=Namespace("mine"), map=False)
    denied = [each for each in told(daemon, "denied") if each["what"] == "Hello"]
    assert denied
    assert all(each["uid"] == ME and each["pid"] == os.getpid() and "gid" in each for each in denied)


def test_a_session_opens_only_its_own_namespaces(daemon: Running) -> None:
    """OpenNamespace follows the same rules; a salt, model or adapter of a tenant's is the tenant's."""
    with Wire(daemon.socket) as wire:
        wire.hello(namespace=Namespace("mine"), map=False)
        for name in ("theirs", "ours", "", "x"):
            error = refused(wire, messages.OpenNamespace, Namespace(name, salt="mine"))
            assert error.code == DENIED, error
        opened = wire.call(messages.OpenNamespace, Namespace("any", "model", "adapter", "salt"))
        assert isinstance(opened, messages.Opened)
        assert isinstance(wire.call(messages.Probe, opened.namespace, tokens(4)), messages.Probed)


def test_s46_names_reach_no_line_as_they_came(daemon: Running) -> None:
    """S46: names with quotes, newlines, escapes and marks that turn text are refused and told on one line each."""
    for name in NAMES:
        with Wire(daemon.socket) as wire:
            error = refused(wire, messages.Hello, 1, "x", namespace=Namespace(name), map=False)
            assert error.code == DENIED
            assert error.message.isprintable(), error.message
    for line in daemon.text().splitlines():
        assert line.startswith("{"), line


@as_root
def test_numbers_of_others_namespaces_mean_nothing(daemon: Running) -> None:
    """A namespace's number that another session was given is NotFound to every verb, in a Batch as well, long or short;
    so nobody learns what is cached, or being computed, where they may not look."""
    prompt = tokens(200)
    with connect(daemon, OTHER) as theirs:
        root = theirs.hello(namespace=Namespace("theirs"), map=False).namespace
        computing = theirs.call(messages.Allocate, root, 1, prompt)
        assert isinstance(computing, messages.Admitted)
        with Wire(daemon.socket) as wire:
            mine = wire.hello(namespace=Namespace("mine"), map=False).namespace
            assert root != mine
            long = tokens(5000)
            asked: list[Any] = [
                messages.Probe(1, root, prompt),
                messages.Allocate(1, root, 7, prompt),
                messages.Allocate(1, root, 7, prompt, wait_for_commit=True),
                messages.Allocate(1, root, 7, long),
                messages.Pin(1, root, prompt),
            ]
            for each in asked:
                wire.send(each)
                reply = wire.reply()
                assert isinstance(reply, messages.Error), reply
                assert reply.code == errors.NotFound.code, reply
            batch = wire.call(messages.Batch, asked)
            assert [each.code for each in batch.results] == [errors.NotFound.code] * len(asked)
            waiting = wire.call(messages.Allocate, mine, 8, prompt, wait_for_commit=True)
            assert isinstance(waiting, messages.Admitted), (
                "who computes in another namespace is no reason to wait"
            )
            assert waiting.hit == 0


@as_root
def test_a_group_is_its_users(daemon: Running) -> None:
    """A tenant of a group is open to who has it as the primary or a supplementary group when connecting."""
    for gid, groups, well in ((65010, (), True), (65000, (1, 65010), True), (65000, (65011,), False)):
        with connect(daemon, OTHER + 1, gid, groups) as wire:
            reply = wire.call(messages.Hello, 1, "x", namespace=Namespace("ours"), map=False)
            assert isinstance(reply, messages.Welcome) == well, reply
            if well:
                wire.bye()


@as_root
def test_a_session_is_taken_up_by_its_user_only(daemon: Running) -> None:
    """Resume from the same process and with the secret, but as another user: Denied, and the session is as it was."""
    wire = connect(daemon, OTHER)
    welcome = wire.hello(namespace=Namespace("theirs"))
    wire.close()
    _until_lost(daemon, welcome.session)
    fields: dict[str, Any] = {
        "resume": welcome.session,
        "secret": welcome.secret,
        "namespace": Namespace("theirs"),
    }
    with Wire(daemon.socket) as mine:
        error = refused(mine, messages.Hello, 1, "x", **fields)
        assert error.code == DENIED, error
        assert f"user {OTHER}" in error.message
    with connect(daemon, OTHER) as again:
        assert again.hello(**fields).session == welcome.session


@as_root
def test_an_engine_is_one_users(daemon: Running) -> None:
    """A session joins another's group only as the same user, and with the secret; a wrong secret is noted."""
    with connect(daemon, OTHER) as first:
        welcome = first.hello(namespace=Namespace("theirs"))
        with Wire(daemon.socket) as mine:
            error = refused(
                mine,
                messages.Hello,
                1,
                "x",
                group=welcome.session,
                secret=welcome.secret,
                namespace=Namespace("mine"),
            )
            assert error.code == DENIED, error
        with Wire(daemon.socket) as mine:
            error = refused(
                mine,
                messages.Hello,
                1,
                "x",
                group=welcome.session,
                secret=b"0" * 16,
                namespace=Namespace("mine"),
            )
            assert error.code == errors.NotFound.code
        with connect(daemon, OTHER) as second:
            second.hello(group=welcome.session, secret=welcome.secret, namespace=Namespace("theirs"))
    guesses = [each for each in told(daemon, "denied") if each["what"] == "group"]
    assert guesses
    assert guesses[0]["uid"] == ME
    assert "secret" in guesses[0]["reason"]


@as_root
def test_who_is_not_listed_may_not_connect() -> None:
    """With client_uids others get Denied at the door, whatever they ask; who may is served; each is noted once."""
    with running(client_uids=[OTHER], client_gids=[65020], socket_mode="0666") as daemon:
        for _ in range(5):
            with connect(daemon, OTHER + 1) as wire:
                error = wire.receive()
                assert (error.code, error.id) == (DENIED, 0)
                assert f"user {OTHER + 1} " in error.message
                with pytest.raises((ConnectionError, OSError)):
                    wire.call(messages.Ping)
        for uid, gid, groups in (
            (OTHER, 1, ()),
            (OTHER + 2, 65020, ()),
            (OTHER + 2, 1, (65020,)),
            (ME, 0, ()),
        ):
            with connect(daemon, uid, gid, groups) as wire:
                wire.hello(map=False)
        denied = told(daemon, "denied")
        assert [(each["what"], each["uid"], each["gid"]) for each in denied] == [
            ("connect", OTHER + 1, 65000)
        ]
        assert "suppressed" not in denied[0]


@as_root
def test_a_pool_is_its_users() -> None:
    """A session in a pool of others is Denied, with memory or without, new or taken up, and another pool is open to it;
    users of a pool may connect where clients are listed."""
    theirs = {"name": "theirs", "users": [OTHER], "groups": [65040]}
    with running(pools=[{"name": "open"}, theirs], client_uids=[ME], socket_mode="0666") as daemon:
        for uid, gid, well in ((ME, 0, False), (OTHER, 1, True), (OTHER + 1, 65040, True)):
            for mapped in (True, False):
                with connect(daemon, uid, gid) as wire:
                    reply = wire.call(messages.Hello, 1, "x", pool="theirs", map=mapped)
                    assert isinstance(reply, messages.Welcome) == well, reply
                    if well:
                        wire.bye()
                    else:
                        assert reply.code == DENIED
                        assert "pool 'theirs'" in reply.message
                        assert not wire.descriptors
        with Wire(daemon.socket) as wire:
            wire.hello(pool="open")
        with connect(daemon, OTHER + 2) as wire:
            assert wire.receive().code == DENIED


@as_root
def test_control_is_denied_and_noted_by_user() -> None:
    """A control verb of who may not is Denied and logged with who it was; one that is done, with what it said."""
    with running(socket_mode="0666", control_gids=[65030]) as daemon:
        with connect(daemon, OTHER) as wire:
            assert refused(wire, messages.Evict, 5).code == DENIED
        with connect(daemon, OTHER, 65000, (65030,)) as wire:
            assert isinstance(wire.call(messages.Evict, 5), messages.Evicted)
        (denied,) = told(daemon, "denied")
        assert (denied["what"], denied["uid"], denied["gid"]) == ("Evict", OTHER, 65000)
        (done,) = told(daemon, "privileged")
        assert (done["what"], done["uid"], done["arguments"]["tokens"]) == ("Evict", OTHER, 5)


def test_a_reload_holds_for_who_comes_next() -> None:
    """SIGHUP takes tenants and clients over: a session that is there stays, another namespace is by the new rules."""
    with running(tenant=[{"name": "a"}, {"name": "b"}]) as daemon, Wire(daemon.socket) as wire:
        root = wire.hello(namespace=Namespace("a"), map=False).namespace
        file = daemon.socket.parent / "kvslot.toml"
        text = file.read_text()
        assert "tenant = " in text
        changed = f'tenant = [{{ name = "a", users = [{OTHER}] }}, {{ name = "c", slots = 50 }}]'
        file.write_text(
            "\n".join(changed if line.startswith("tenant") else line for line in text.splitlines())
        )
        daemon.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 20
        while not told(daemon, "reloaded") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "tenants" in told(daemon, "reloaded")[0]["changed"]
        assert isinstance(wire.call(messages.Probe, root, tokens(4)), messages.Probed)
        assert refused(wire, messages.OpenNamespace, Namespace("b")).code == DENIED
        assert refused(wire, messages.OpenNamespace, Namespace("a", salt="x")).code == DENIED
        opened = wire.call(messages.OpenNamespace, Namespace("c"))
        never = wire.call(messages.Allocate, opened.namespace, 1, tokens(51))
        assert (never.limit, never.quota) == (50, "slots")
        with Wire(daemon.socket) as late:
            assert refused(late, messages.Hello, 1, "x", namespace=Namespace("a"), map=False).code == DENIED


def _until_lost(daemon: Running, number: int) -> None:
    deadline = time.monotonic() + 20
    with Wire(daemon.socket) as tool:
        while time.monotonic() < deadline:
            rows = tool.call(messages.Inspect, "sessions").rows
            if any(row["session"] == number and row["state"] == "lost" for row in rows):
                return
            time.sleep(0.01)
    raise AssertionError(f"session {number} was not lost")
