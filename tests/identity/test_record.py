"""The record of acts: each is there with its outcome, no secret is, and a reload changes who may act and how much."""

from __future__ import annotations

from typing import Any, get_type_hints

from kvslot.api.wire import errors, messages
from kvslot.api.wire.messages import Namespace
from kvslot.daemon.identity import LOGGED
from kvslot.daemon.verbs import TABLE, Permission

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens
from .tools import OTHER, as_root, connect, refused, told

MARK = "SECRETMARK"
SECRET: dict[type, dict[str, Any]] = {
    messages.Record: {"key": MARK.encode(), "action": "start"},
    messages.Keep: {"namespace": Namespace("t", salt=MARK), "tokens": (MARK + "==").encode()},
    messages.Evict: {"tokens": 0},
    messages.Unkeep: {"pin": 1},
    messages.SetConfig: {"name": "stall_seconds", "value": "5"},
}
"""What each control verb is said with: a mark in all that is secret."""


def test_each_control_verb_has_its_row_of_what_is_logged() -> None:
    """No verb is logged but by its own list, and no list names a field that carries bytes or a namespace."""
    control = {kind for kind, row in TABLE.items() if row.permission is Permission.CONTROL}
    assert set(LOGGED) == control
    for kind, names in LOGGED.items():
        kinds = get_type_hints(kind)
        for name in names:
            assert kinds[name] not in (bytes, Namespace), (kind, name)


def test_no_secret_of_any_control_verb_is_logged() -> None:
    """A mark in every salt, key and token of every control verb is in no line; a salt is told as `salted`."""
    with running() as daemon:
        with Wire(daemon.socket) as tool:
            for kind in LOGGED:
                if kind not in (messages.Drain, messages.Inspect):
                    tool.call(kind, **SECRET.get(kind, {}))
            tool.call(messages.Drain)
        daemon.process.wait(20)
        text = daemon.text()
        acts = {each["what"]: each for each in told(daemon, "privileged")}
    assert set(acts) == {kind.__name__ for kind in LOGGED} - {"Inspect", "Defrag"}
    assert acts["Keep"]["arguments"]["salted"] is True
    assert MARK not in text
    assert repr(MARK.encode())[2:-1] not in text


@as_root
def test_each_act_is_told_after_it_with_its_outcome_and_repeats_are_counted() -> None:
    """One user's repeats cost another's act no line; the counts add up; a failed act says how; looking is none."""
    with running(control_uids=[OTHER, OTHER + 1], socket_mode="0666") as daemon:
        with connect(daemon, OTHER) as one, connect(daemon, OTHER + 1) as two:
            for _ in range(40):
                one.call(messages.Evict, 1)
            two.call(messages.Evict, 1 << 20)
            for _ in range(40):
                one.call(messages.Evict, 1)
            assert isinstance(refused(two, messages.Unkeep, 99), messages.Error)
            one.call(messages.Inspect, "status")
            for number in range(100):
                one.call(
                    messages.Drain if number < 0 else messages.SetConfig, "stall_seconds", f"{number + 1}"
                )
        daemon.stop()
        acts = told(daemon, "privileged")
        beyond = told(daemon, "privileged_left_out")
    assert sum(each["count"] for each in acts if each["uid"] == OTHER and each["what"] == "Evict") == 80
    assert [(each["what"], each["outcome"]) for each in acts if each["uid"] == OTHER + 1] == [
        ("Evict", "done"),
        ("Unkeep", "NotFound"),
    ]
    told_of = sum(each["count"] for each in acts if each["what"] == "SetConfig")
    assert told_of + sum(each["count"] for each in beyond) == 100
    assert not any(each["what"] == "Inspect" for each in acts)


def rewritten(daemon: Running, old: str, new: str) -> None:
    """The configuration says something else, and is read again."""
    file = daemon.socket.parent / "kvslot.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with Wire(daemon.socket) as tool:
        assert isinstance(tool.call(messages.Reload), messages.Reloaded)


@as_root
def test_a_reload_takes_control_away_and_gives_it() -> None:
    """Who is in control_uids no longer may not control, over the open connection neither; who is by now may."""
    with (
        running(control_uids=[OTHER], socket_mode="0666") as daemon,
        connect(daemon, OTHER) as before,
        connect(daemon, OTHER + 1) as after,
    ):
        after.hello(map=False)
        assert isinstance(before.call(messages.Inspect, "status"), messages.Inspected)
        rewritten(daemon, f"control_uids = [{OTHER}]", f"control_uids = [{OTHER + 1}]")
        assert refused(before, messages.Inspect, "status").code == errors.Denied.code
        assert isinstance(after.call(messages.Inspect, "status"), messages.Inspected)
        with connect(daemon, OTHER) as again:
            assert refused(again, messages.Evict, 1).code == errors.Denied.code


def test_a_reload_bounds_namespaces_that_are_open() -> None:
    """New quotas of slots and sessions hold for who is in; what is held counts, and nothing is taken away."""
    with running(pools=[{"blocks": 129}], tenant=[{"name": "*"}]) as daemon, Wire(daemon.socket) as wire:
        root = wire.hello(namespace=Namespace("chat"), map=False).namespace
        assert isinstance(wire.call(messages.Allocate, root, 1, tokens(100)), messages.Admitted)
        rewritten(
            daemon,
            'tenant = [{ name = "*" }]',
            'tenant = [{ name = "*" }, { name = "chat", slots = 64, sessions = 1 }]',
        )
        never = wire.call(messages.Allocate, root, 2, tokens(500, 9000))
        assert (type(never), never.limit, never.quota) == (messages.Never, 64, "slots")
        assert wire.call(messages.Allocate, root, 2, tokens(10, 9000)).quota == "slots", (
            "what it held is forgotten"
        )
        with Wire(daemon.socket) as second:
            error = refused(second, messages.Hello, 1, "x", namespace=Namespace("chat"), map=False)
            assert error.code == errors.Busy.code
        with Wire(daemon.socket) as tool:
            rows = {row["tenant"]: row for row in tool.call(messages.Inspect, "tenants").rows}
            assert (rows["chat"]["sessions"], rows["*"]["sessions"], rows["*"]["charged"]) == (1, 0, 0)
            assert rows["chat"]["charged"] >= 100
            assert not tool.call(messages.Audit).faults


def test_another_sessions_ticket_skips_no_rate() -> None:
    """Only one's own ticket is a request that was counted already."""
    tenants = [{"name": "hog"}, {"name": "slow", "requests_per_second": 1.0}]
    with running(tenant=tenants) as daemon, Wire(daemon.socket) as hog, Wire(daemon.socket) as slow:
        theirs = hog.hello(namespace=Namespace("hog"), map=False).namespace
        hog.call(messages.Allocate, theirs, 1, tokens(1000))
        ticket = hog.call(messages.Allocate, theirs, 2, tokens(900, 5000)).ticket
        assert ticket
        mine = slow.hello(namespace=Namespace("slow"), map=False).namespace
        said = [slow.call(messages.Allocate, mine, 9, tokens(4), ticket) for _ in range(8)]
        assert any(isinstance(each, messages.Later) and each.reason == "rate" for each in said), said
