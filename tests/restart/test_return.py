"""What clients see of a daemon that was restarted, and what it says of its start."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from kvslot import Client
from kvslot.api.client import Disconnected, Lost, StaleSession
from kvslot.api.client.errors import OutOfRoom
from kvslot.api.client.indices import slot_indices
from kvslot.api.wire import VERSION, Namespace, NotFound, OutOfTurn
from kvslot.api.wire.messages import Admitted, Allocate, Evict, Extend, Hello, Release

from ..faults.actors import Paint, child, rows, stay, until
from ..tools.wire import Wire, tokens
from .killing import kept

PROMPT = list(range(100, 140))


def lose(client: Client) -> None:
    """The client notices that its daemon has ended."""
    with contextlib.suppress(Disconnected):
        while client.probe(PROMPT) >= 0:
            pass


def back(client: Client) -> None:
    """Loses its daemon, and comes back to the next one."""
    lose(client)
    client.reconnect()


def fill(client: Client, tokens: list[int], namespace: int | None = None, colour: int = 0) -> np.ndarray:
    """Has a prompt written and published; returns its slots."""
    with client.step():
        sequence = client.admit(tokens, namespace=namespace)
        slots = slot_indices(sequence, 0, len(tokens))
        for name in client.pool.planes:
            client.pool.plane(name)[slots] = (np.array(tokens) + colour)[:, None, None]
    sequence.commit()
    sequence.free()
    client.settle()
    return slots


def test_a_client_comes_back_to_the_next_daemon_and_finds_what_it_had_published() -> None:
    """Prefixes are there with the same bytes, namespaces keep their numbers."""
    with kept([{"blocks": 65}]) as daemon, Client(str(daemon.socket), name="returning") as client:
        other = client.open_namespace(Namespace(tenant="other"))
        slots = fill(client, PROMPT)
        elsewhere = fill(client, PROMPT, other, 1000)
        daemon.manager.kill()
        lose(client)
        client.reconnect()
        assert client.probe(PROMPT) == len(PROMPT) - 1
        assert client.probe(PROMPT, namespace=other) == len(PROMPT) - 1
        with client.step():
            again = client.admit(PROMPT)
            there = client.admit(PROMPT, namespace=other)
        assert again.hit == there.hit == len(PROMPT) - 1
        assert list(slot_indices(again, 0, again.hit)) == list(slots[: again.hit])
        assert list(slot_indices(there, 0, there.hit)) == list(elsewhere[: there.hit])
        for name in client.pool.planes:
            assert (client.pool.plane(name)[slots, 0, 0] == PROMPT).all()
            assert (client.pool.plane(name)[elsewhere, 0, 0] == np.array(PROMPT) + 1000).all()
        third = client.open_namespace(Namespace(tenant="third"))
        assert third not in (client.namespace, other)
        assert client.probe(PROMPT, namespace=third) == 0
        for sequence in (again, there):
            sequence.free()
        client.settle()


def test_what_a_step_under_way_uses_stays_until_it_has_completed() -> None:
    """A client is back before its device is: what it held is neither given to others nor evicted until it has ended."""
    with (
        kept([{"blocks": 17}]) as daemon,
        Client(str(daemon.socket)) as client,
        Wire(daemon.socket) as control,
    ):
        fill(client, PROMPT)
        step = client.submit()
        held = client.admit(list(range(1000, 1100)))
        slots = set(slot_indices(held).tolist())
        daemon.manager.kill()
        lose(client)
        client.reconnect()
        control = Wire(daemon.socket)
        with pytest.raises(Lost, match="restarted"):
            held.append(1)
        held.free()  # says nothing any more
        assert {row["state"] for row in rows(control, "sessions")} == {"live", "lost"}
        assert not control.call(Evict, 1 << 20).tokens, "what the step may read was evicted"
        other = client.admit(list(range(2000, 2030)))
        with contextlib.suppress(OutOfRoom):
            while True:
                other.append(7)
        assert not slots & set(slot_indices(other).tolist())
        client.complete(step)
        until(lambda: len(rows(control, "sessions")) == 1, 10.0, "the session of then is left")
        other.free()
        client.settle()
        until(lambda: control.call(Evict, 1 << 20).tokens > 0, 10.0, "what is cached is held for nobody")
        control.close()


@pytest.mark.parametrize("restarted", [True, False])
def test_a_client_that_is_closed_without_a_connection_holds_nothing_up(restarted: bool) -> None:
    """Nobody heard its goodbye: the next client of the process says it, and what was held and cached can go."""
    with kept([{"blocks": 33}]) as daemon:
        client = Client(str(daemon.socket))
        fill(client, PROMPT)
        client.admit(list(range(500, 560)))
        if restarted:
            daemon.manager.kill()
        else:
            client._connection.lost("a test cut it")
        client.close()
        with Wire(daemon.socket) as control:
            until(
                lambda: [row["state"] for row in rows(control, "sessions")] == ["lost"],
                10.0,
                "it is not lost",
            )
            with Client(str(daemon.socket)) as other:
                until(lambda: len(rows(control, "sessions")) == 1, 10.0, "the session of then is left")
                until(lambda: rows(control, "pools")[0]["quarantined"] == 0, 10.0, "its slots are set aside")
                assert other.probe(PROMPT) == len(PROMPT) - 1
                until(
                    lambda: control.call(Evict, 1 << 20).tokens > 0, 10.0, "what is cached is held for nobody"
                )


def test_an_engine_of_several_processes_opens_its_group_anew() -> None:
    """Its sessions of before hold what they held until each of them was released, and nothing afterwards."""
    with kept([{"blocks": 33}]) as daemon:
        path = str(daemon.socket)
        old = [Client(path)]
        old.append(Client(path, group=old[0].group))
        fill(old[0], PROMPT)
        held = old[0].admit(list(range(500, 560)))
        daemon.manager.kill()
        for client in old:
            lose(client)
            with pytest.raises(StaleSession, match="group"):
                client.reconnect()
        with Client(path) as first, Client(path, group=first.group) as second, Wire(daemon.socket) as control:
            assert first.probe(PROMPT) == len(PROMPT) - 1
            assert not control.call(Evict, 1 << 20).tokens, "what it may read was evicted"
            first.release(old[0].token)
            assert rows(control, "pools")[0]["quarantined"] >= held.capacity
            second.release(old[1].token)
            until(lambda: len(rows(control, "sessions")) == 2, 10.0, "a session of then is left")
            until(lambda: rows(control, "pools")[0]["quarantined"] == 0, 10.0, "its slots are set aside")
            until(lambda: control.call(Evict, 1 << 20).tokens > 0, 10.0, "what is cached is held for nobody")
        for client in old:
            client.close()


def test_a_dead_engine_holds_nothing_after_the_next_start() -> None:
    """Who died while there was no daemon is proven gone by it; who dies later is noticed then."""

    def work(tell: object) -> None:
        client = Client(str(path))
        fill(client, PROMPT)
        client.admit(list(range(500, 600)))
        tell(list(client.token.secret))  # type: ignore[operator]
        stay()  # a client that is collected says goodbye

    with kept([{"blocks": 33}]) as daemon:
        path = daemon.socket
        with child(work) as first, child(work) as second:
            first.heard()
            second.heard()
            os.kill(daemon.manager.pid, signal.SIGSTOP)
            first.kill()
            daemon.manager.kill()
            with Wire(path) as control:
                until(lambda: len(rows(control, "sessions")) == 1, 10.0, "who died before is left")
                assert rows(control, "sessions")[0]["state"] == "lost"
                second.kill()
                until(lambda: not rows(control, "sessions"), 10.0, "a dead one's session is left")
                until(lambda: rows(control, "pools")[0]["quarantined"] == 0, 10.0, "its slots are set aside")
                until(lambda: control.call(Evict, 1 << 20).tokens > 0, 10.0, "its leases are left")
        manager = daemon.manager
        manager.wait(lambda: not any(each[0].startswith("session") for each in manager.store))


def test_what_the_dead_had_is_wiped_before_it_is_free() -> None:
    """Where freed slots are wiped, those of engines that died with their daemon are, too."""

    def work(tell: object) -> None:
        client = Client(str(path))
        sequence = client.admit(list(range(500, 600)))
        slots = slot_indices(sequence)
        for name in client.pool.planes:
            client.pool.plane(name)[slots] = 7
        tell(slots.tolist())  # type: ignore[operator]
        stay()

    with kept([{"blocks": 33, "scrub": True}]) as daemon:
        path = daemon.socket
        with child(work) as engine:
            slots = engine.heard()
            os.kill(daemon.manager.pid, signal.SIGSTOP)
            engine.kill()
            daemon.manager.kill()
        with Client(str(daemon.socket)) as client, Wire(daemon.socket) as control:
            until(lambda: rows(control, "pools")[0]["free"] == 32 * 16, 10.0, "its slots are not free")
            for name in client.pool.planes:
                assert not client.pool.plane(name)[slots].any()


def test_a_restart_in_good_order_keeps_the_cache() -> None:
    """Over `systemctl restart` what is cached stays, as over a crash."""
    with kept([{"blocks": 33}]) as daemon:
        with Client(str(daemon.socket)) as client:
            fill(client, PROMPT)
        assert daemon.manager.restart() == 0
        with Client(str(daemon.socket)) as client:
            assert client.probe(PROMPT) == len(PROMPT) - 1


def test_a_start_without_a_store_is_cold_and_says_so() -> None:
    """Where nothing is kept one line says why, and a client hears that nothing is left."""
    with kept([{"blocks": 33}], store_max=0) as daemon, Client(str(daemon.socket)) as client:
        fill(client, PROMPT)
        daemon.manager.kill()
        lose(client)
        with pytest.raises(StaleSession):
            client.reconnect()
        told = daemon.events("cold_start", "warm_start")
        assert [each["event"] for each in told] == ["cold_start", "cold_start"]
        assert "came back" in told[1]["reason"]


@pytest.mark.parametrize(
    ("change", "why"), [({"block_size": 8}, "bytes"), ({"blocks": 34}, "now"), ({"name": "new"}, "nothing")]
)
def test_another_pool_is_not_filled_with_what_the_old_one_held(change: dict[str, object], why: str) -> None:
    """A pool that is configured otherwise begins empty; the memory of the old one is not kept for ever."""
    with kept([{"blocks": 33}]) as daemon:
        with Client(str(daemon.socket)) as client:
            fill(client, PROMPT)
        daemon.configure([{"blocks": 33, **change}])
        daemon.manager.kill()
        told = daemon.events("cold_start", "warm_start")
        assert [each["event"] for each in told] == ["cold_start", "cold_start"]
        assert why in told[1]["reason"], told
        with Client(str(daemon.socket)) as client:
            assert client.probe(PROMPT) == 0
        daemon.manager.wait(lambda: sum(daemon.manager.stored.values()) == 2)


@pytest.mark.parametrize("saved", [True, False])
def test_S41_who_lives_on_while_the_daemon_is_restarted_is_not_written_over(saved: bool) -> None:
    """With saved state and without: no byte that an engine still uses changes, and who goes on as before is told."""
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(kept([{"blocks": 17}], store_max=4096 if saved else 0))
        first, second = (stack.enter_context(_Engine(daemon.socket, name)) for name in ("c1", "c2"))
        daemon.manager.kill()
        lines = [each["event"] for each in daemon.events("cold_start", "warm_start", "ready")]
        assert lines == ["cold_start", "ready", "warm_start" if saved else "cold_start", "ready"]
        # A third one takes all that it can get, and writes to it.
        with _Engine(daemon.socket, "c3", room=0) as third:
            taken: set[int] = set()
            number = 10
            while isinstance(
                given := third.wire.call(Allocate, third.wire.namespace, number, tokens(16)), Admitted
            ):
                third.paint.write(tokens(16), given.extents)
                taken |= set(range(given.extents[0], given.extents[0] + given.extents[1]))
                number += 1
            assert 0 < len(taken) <= 16 * 16 - 2 * 80 if saved else len(taken) > 2 * 80
            for engine in (first, second):
                assert not engine.paint.wrong(engine.prompt, engine.extents)
            # The first one goes on with its old session, and then as a new one; the second one claims what was its.
            old = first.wire.welcome
            assert old is not None
            resumed = {"boot": old.boot, "resume": old.session}
            with Wire(daemon.socket) as stranger:
                assert stranger.call(Extend, 1).code == OutOfTurn.code
            with Wire(daemon.socket) as stranger:
                guessed = stranger.call(Hello, VERSION, "c1", secret=b"guess", **resumed)
                assert guessed.code == StaleSession.code
            with Wire(daemon.socket) as again:
                answer = again.call(Hello, VERSION, "c1", secret=old.secret, **resumed)
                if saved:
                    again.welcome = answer
                    assert answer.former == old.session
                    assert again.call(Extend, 1).code == NotFound.code
                    free = rows(again, "pools")[0]["free"]
                    again.call(Release, old.session, old.secret)
                    until(lambda: rows(again, "pools")[0]["free"] >= free + 80, 10.0, "nothing was released")
                else:
                    assert answer.code == StaleSession.code
            with Wire(daemon.socket) as anew:
                anew.hello("c1")
            assert not second.paint.wrong(second.prompt, second.extents)


class _Engine:
    """One that holds five blocks of painted, unpublished slots."""

    def __init__(self, path: Path, name: str, room: int = 80) -> None:
        self.wire = Wire(path)
        self.wire.hello(name)
        self.paint = Paint(self.wire, name)
        self.prompt = tokens(room, 1)
        self.extents: list[int] = []
        if room:
            given = self.wire.call(Allocate, self.wire.namespace, 1, self.prompt, contiguous=True)
            assert given.capacity == room
            self.extents = given.extents
            self.paint.write(self.prompt, self.extents)

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.paint.memory.close()
        self.wire.close()
