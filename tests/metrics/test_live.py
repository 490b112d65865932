"""Metrics of a real daemon under load: every scrape parses, no counter falls, gauges are what a recount finds."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack, closing
from typing import Any

import pytest

from kvslot import Client
from kvslot.api.client.control import Control
from kvslot.api.wire import VERSION, messages

from ..faults.actors import Child, child
from ..faults.engines import engine
from ..restart.killing import kept
from ..restart.test_return import PROMPT, back, fill
from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens
from .scraping import Scrape, fallen, recount, scrape, until_still

LABELS = {"slots": "state", "usable_run_ratio": "blocks", "waiting_requests": "kind"}
OF_TIME = {"oldest_wait_seconds", "restored_tokens", "unrestored_tokens", "unsettled"}
"""What the clock or the start decides, and no recount."""


def compare(found: Scrape, counted: dict[str, Any]) -> None:
    """Each gauge of a pool is what the recount says; none is left out but those that are of no state."""
    for name, value in counted.items():
        if name in LABELS:
            assert found.of(f"kvslot_pool_{name}", LABELS[name]) == pytest.approx(value), name
        else:
            assert found[f"kvslot_pool_{name}"] == pytest.approx(value), name
    gauges = {name.removeprefix("kvslot_pool_") for name, _ in found.gauges("kvslot_pool_")}
    assert gauges == set(counted) | OF_TIME


def sums(found: Scrape) -> None:
    """What docs/metrics.md says adds up."""
    slots = found.of("kvslot_pool_slots", "state")
    block = found["kvslot_pool_block_slots"]
    assert sum(slots.values()) == found["kvslot_pool_blocks"] * block
    assert sum(slots.values()) - slots["padding"] == found["kvslot_pool_usable_slots"]
    assert found["kvslot_pool_evictable_tokens"] + found["kvslot_pool_leased_tokens"] == slots["cached"]
    left_out = sum(
        found[f"kvslot_pool_{each}"] for each in ("unwritten_slots", "duplicate_tokens", "peeled_tokens")
    )
    assert found["kvslot_pool_held_tokens"] == slots["cached"] + slots["private"] - left_out
    assert found["kvslot_pool_pinned_waste_slots"] == slots["free"] - found["kvslot_pool_free_blocks"] * block
    came = found["kvslot_sessions_opened_total"] + found["kvslot_sessions_adopted_total"]
    assert came - found["kvslot_sessions_gone_total"] == sum(found.of("kvslot_sessions", "state").values())


class Load:
    """Engines that do anything, killed and replaced; stopped when something is to be looked at."""

    def __init__(self, daemon: Running, stack: ExitStack, engines: int) -> None:
        self._daemon = daemon
        self._lives = 0
        self._stacks = [stack.enter_context(closing(ExitStack())) for _ in range(engines)]
        self.engines: list[Child] = [self._one(each) for each in self._stacks]

    def _one(self, stack: ExitStack) -> Child:
        self._lives += 1
        return stack.enter_context(child(engine(self._daemon.socket, self._lives)))

    def replace(self, place: int) -> None:
        """One is killed, and another comes."""
        self._stacks[place].close()
        self._stacks[place] = ExitStack()
        self.engines[place] = self._one(self._stacks[place])

    def signal(self, number: int) -> None:
        for each in self.engines:
            each.signal(number)


def test_under_load_no_counter_falls_and_every_gauge_is_what_a_recount_finds() -> None:
    """Engines work, are killed and replaced while compaction moves: scrapes agree with a recount."""
    pool = {"blocks": 65, "quantum": 8}
    with running(stall_seconds=60.0, compaction="forced", pools=[pool]) as daemon, ExitStack() as stack:
        control = stack.enter_context(Control(str(daemon.socket)))
        load = Load(daemon, stack, 3)
        last = scrape(daemon.socket)
        for place in (0, 1, 2, 0):
            asked = last["kvslot_frames_total"]
            while True:
                found = scrape(daemon.socket)
                assert not fallen(last, found)
                sums(found)
                last = found
                if found["kvslot_frames_total"] > asked + 400:
                    break
                time.sleep(0.01)
            load.signal(signal.SIGSTOP)
            control.defrag("stop")
            last, counted = until_still(daemon.socket, control, "default")
            compare(last, counted)
            sums(last)
            assert not control.audit().faults
            control.defrag("start")
            load.signal(signal.SIGCONT)
            load.replace(place)
        deadline = time.monotonic() + 30
        while (found := scrape(daemon.socket))["kvslot_audits_total"] < 4:
            assert time.monotonic() < deadline, "four audits were asked for"
            time.sleep(0.05)
        assert not fallen(last, found)
        assert found["kvslot_audits_total"] == 4
        assert found["kvslot_sessions_lost_total"] >= 2, "engines that were killed"
        assert found["kvslot_audit_faults_total"] == 0
        assert found["kvslot_pool_moved_tokens_total"] > 0, "the recount is to see moves, too"
        assert found["kvslot_pool_evicted_tokens_total"] > 0


def test_a_recount_that_differs_is_found() -> None:
    """The comparison itself can fail: a scrape from before a change is not what a recount after it finds."""
    with running() as daemon, Control(str(daemon.socket)) as control:
        before, counted = until_still(daemon.socket, control, "default")
        compare(before, counted)
        with Wire(daemon.socket) as wire:
            wire.hello()
            wire.call(messages.Allocate, namespace=wire.namespace, sequence=1, tokens=tokens(5))
            with pytest.raises(AssertionError):
                compare(before, recount(control, "default")[0])
            after, counted = until_still(daemon.socket, control, "default")
            compare(after, counted)


def test_tenants_are_told_with_what_they_hold_and_which_quota_turned_them_away() -> None:
    """Of each listed tenant, and of all others together: sessions, slots charged, quotas, refusals at the door."""
    tenants: list[dict[str, Any]] = [
        {"name": 'a "b"', "sessions": 1, "slots": 200},
        {"name": "slow", "requests_per_second": 0.001},
        {"name": "*"},
    ]
    with running(tenant=tenants) as daemon, ExitStack() as stack:
        wires = [stack.enter_context(Wire(daemon.socket)) for _ in range(4)]
        for wire, tenant in zip(wires, ('a "b"', "slow", "other", "another"), strict=True):
            wire.hello(namespace=messages.Namespace(tenant=tenant))
            wire.call(messages.Allocate, namespace=wire.namespace, sequence=1, tokens=tokens(20))
        late = wires[1].call(messages.Allocate, namespace=wires[1].namespace, sequence=2, tokens=tokens(20))
        assert isinstance(late, messages.Later)
        with Wire(daemon.socket) as refused:
            again = refused.call(
                messages.Hello, VERSION, "again", namespace=messages.Namespace(tenant='a "b"')
            )
            assert isinstance(again, messages.Error)
        found = scrape(daemon.socket)
        with Control(str(daemon.socket)) as control:
            charged = [each["charged"] for each in control.inspect("sessions")]
        assert found.of("kvslot_tenant_slots", "tenant") == {
            'a "b"': charged[0], "slow": charged[1], "*": charged[2] + charged[3],
        }  # fmt: skip
        assert found.of("kvslot_tenant_slots_limit", "tenant") == {'a "b"': 200}
        assert found.of("kvslot_tenant_sessions", "tenant") == {'a "b"': 1, "slow": 1, "*": 2}
        assert found.of("kvslot_tenant_sessions_limit", "tenant") == {'a "b"': 1}
        assert found.of("kvslot_tenant_refused_total", "tenant") == {'a "b"': 1, "slow": 1}
        assert found.of("kvslot_pool_later_total", "reason")["rate"] == 1


def test_gauges_tell_what_was_done() -> None:
    """Step by step: what a client did is what the gauges say, for those that no listing shows as well."""
    with (
        running(stall_seconds=60.0, compaction="off", pools=[{"blocks": 33}]) as daemon,
        ExitStack() as stack,
    ):
        control = stack.enter_context(Control(str(daemon.socket)))
        one, other = (stack.enter_context(Wire(daemon.socket)) for _ in range(2))
        for wire in (one, other):
            wire.hello(append="peel")
        prompt, spaces = tokens(20), one.namespace

        def looked() -> Scrape:
            found, counted = until_still(daemon.socket, control, "default")
            compare(found, counted)
            sums(found)
            return found

        began = one.call(messages.Allocate, namespace=spaces, sequence=1, tokens=prompt)
        twice = other.call(messages.Allocate, namespace=spaces, sequence=1, tokens=prompt)
        found = looked()
        assert found["kvslot_pool_unwritten_slots"] == began.capacity + twice.capacity - 40
        assert (found["kvslot_pool_sequences"], found["kvslot_pool_held_tokens"]) == (2, 40)
        grown = one.call(messages.Extend, sequence=1, written=20)
        one.call(messages.Commit, sequence=1, length=20)
        other.call(messages.Extend, sequence=1, written=20)
        other.call(messages.Commit, sequence=1, length=20)
        found = looked()
        assert found.of("kvslot_pool_slots", "state")["cached"] == 20
        assert (found["kvslot_pool_duplicate_tokens"], found["kvslot_pool_held_tokens"]) == (20, 20)
        pin = one.call(messages.Pin, namespace=spaces, tokens=prompt)
        assert pin.length == 20
        peeled = other.call(messages.Allocate, namespace=spaces, sequence=2, tokens=prompt + tokens(1, 77))
        found = looked()
        assert found["kvslot_pool_pinned_tokens"] == 20
        assert found["kvslot_pool_peeled_tokens"] == sum(peeled.copies[2::3]) > 0
        assert found["kvslot_pool_leased_tokens"] == 20
        # A step runs: what is freed behind it waits for its end.
        one.step(1, 0)
        one.call(messages.Free, sequence=1, fence=1)
        assert looked().of("kvslot_pool_slots", "state")["fenced"] == grown.capacity - 20
        one.step(1, 1)
        assert looked().of("kvslot_pool_slots", "state")["fenced"] == 0
        # A connection that ends without goodbye while its process lives: what it held is kept aside.
        lost = Wire(daemon.socket)
        lost.hello()
        held = lost.call(messages.Allocate, namespace=lost.namespace, sequence=1, tokens=tokens(10, 500))
        secret = lost.welcome
        lost.close()
        found = looked()
        assert found.of("kvslot_pool_slots", "state")["quarantined"] == held.capacity
        assert found.of("kvslot_sessions", "state") == {"live": 2, "lost": 1, "ending": 0}
        assert found["kvslot_sessions_lost_total"] == 1
        assert secret is not None
        one.call(messages.Release, session=secret.session, secret=secret.secret)
        found = looked()
        assert found.of("kvslot_pool_slots", "state")["quarantined"] == 0
        assert found.of("kvslot_sessions", "state") == {"live": 2, "lost": 0, "ending": 0}
        # More than there is room for has to wait.
        room = int(found["kvslot_pool_usable_slots"])
        full = one.call(messages.Allocate, namespace=spaces, sequence=3, tokens=tokens(room - 200, 9000))
        assert isinstance(full, messages.Admitted)
        later = other.call(messages.Allocate, namespace=spaces, sequence=4, tokens=tokens(400, 99_000))
        assert isinstance(later, messages.Later)
        found = looked()
        assert found.of("kvslot_pool_waiting_requests", "kind") == {"new": 1, "growth": 0, "commit": 0}
        assert found["kvslot_pool_oldest_wait_seconds"] > 0
        other.call(messages.Withdraw, ticket=later.ticket)
        assert looked().of("kvslot_pool_waiting_requests", "kind")["new"] == 0


def test_a_restart_begins_new_counters_and_tells_what_it_took_over() -> None:
    """After kill -9, the next process's scrape adds up, says what survived, and when nobody of before is left."""
    with kept([{"blocks": 65}], settings={"admin": True}) as daemon:
        with Client(str(daemon.socket)) as client:
            fill(client, PROMPT)
            before = scrape(daemon.socket)
            assert (before["kvslot_pool_restored_tokens"], before["kvslot_pool_unsettled"]) == (0, 0)
            daemon.manager.kill()
            found = scrape(daemon.socket)
            sums(found)
            assert found["kvslot_pool_restored_tokens"] == len(PROMPT)
            assert found["kvslot_pool_unrestored_tokens"] == 0
            assert found["kvslot_pool_unsettled"] == 1, "the client's process lives"
            assert found["kvslot_sessions_opened_total"] == 0
            assert found["process_start_time_seconds"] >= before["process_start_time_seconds"]
            back(client)
        with Control(str(daemon.socket)) as control:
            deadline = time.monotonic() + 20
            while (found := scrape(daemon.socket))["kvslot_pool_unsettled"]:
                assert time.monotonic() < deadline, "all of before are gone"
                time.sleep(0.1)
            sums(found)
            found, counted = until_still(daemon.socket, control, "default")
            compare(found, counted)
