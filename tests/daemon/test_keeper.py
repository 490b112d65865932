"""Pins that operators ask for: they outlive the connection that asked, and are the core's pins in all else."""

from __future__ import annotations

import pytest

from kvslot.api.client.control import Control
from kvslot.api.wire import NotFound
from kvslot.api.wire.messages import Allocate, Audit, Bye, Commit, Evict, Free, Inspect, Namespace

from ..admin.http import Client
from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens


def cached(daemon: Running, prompt: bytes) -> None:
    """An engine that computed this, published it, and has gone."""
    with Wire(daemon.socket) as wire:
        welcome = wire.hello("engine", namespace=Namespace(tenant="a"))
        wire.call(Allocate, welcome.namespace, 1, prompt)
        wire.call(Commit, 1, len(prompt) // 4, b"")
        wire.call(Free, 1)
        wire.call(Bye)


def test_a_kept_prefix_stays_until_it_is_let_go() -> None:
    """Evicting everything spares what is kept, by tokens or by node; afterwards it goes like all else."""
    prompt = tokens(100)
    with running() as daemon:
        cached(daemon, prompt)
        with Control(str(daemon.socket)) as control:
            pinned = control.keep(namespace=Namespace(tenant="a"), tokens=prompt[: 4 * 40])
            assert pinned.length == 40
        with Control(str(daemon.socket)) as control:
            assert control.evict(1000) == 60
            (row,) = control.inspect("pins")
            assert (row["pin"], row["tokens"]) == (pinned.pin, 40)
            (tree,) = control.inspect("tree")
            (node,) = tree["node"]
            with pytest.raises(NotFound):
                control.keep(node=node, length=39)
            second = control.keep(node=node, length=40)
            control.unkeep(pinned.pin)
            with pytest.raises(NotFound):
                control.unkeep(pinned.pin)
            assert control.evict(1000) == 0
            control.unkeep(second.pin)
            assert control.evict(1000) == 40
            assert next(control.inspect("pools"))["sessions"] == 0
            assert not control.audit().faults
        with Wire(daemon.socket) as wire:
            assert not wire.call(Inspect, "pins").rows
            assert not wire.call(Audit).faults
            wire.call(Evict, 1)


def test_the_keepers_own_session_is_none_of_the_gauge() -> None:
    """`kvslot_pool_sessions` counts clients' sessions: one that holds operators' pins is nobody's."""
    prompt = tokens(40)
    with running() as daemon:
        cached(daemon, prompt)
        with Control(str(daemon.socket)) as control:
            control.keep(namespace=Namespace(tenant="a"), tokens=prompt)
        with Client(daemon.socket.with_name("admin.sock")) as client:
            told = client.get("/metrics").body.decode()
        assert 'kvslot_pool_sessions{pool="default"} 0.0' in told
