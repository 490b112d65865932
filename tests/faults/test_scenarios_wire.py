"""Scenarios of the collection that show on the wire, by their numbers (tests/scenarios/README.md)."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvslot.api.wire import encode, errors, messages
from kvslot.api.wire.messages import (
    Admitted,
    Allocate,
    Batch,
    Commit,
    Committed,
    Done,
    Error,
    Evict,
    Extend,
    Fork,
    Forked,
    Free,
    Grown,
    Later,
    Namespace,
    Never,
    OpenNamespace,
    Pin,
    Ping,
    Pong,
    Probe,
    Trim,
    Withdraw,
)

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens
from .actors import Paint, audit, empty, events, rows, until

USABLE = 1024


@pytest.fixture(scope="module")
def one_daemon() -> Iterator[Running]:
    with running() as daemon:
        yield daemon


@pytest.fixture
def daemon(one_daemon: Running) -> Iterator[Running]:
    """The same for all, and empty again after each."""
    yield one_daemon
    empty(one_daemon)


@pytest.fixture
def other_daemon() -> Iterator[Running]:
    """For a test that ends it."""
    with running() as daemon:
        yield daemon


def refused(wire: Wire, verb: str) -> int:
    """How often a verb has been refused."""
    return sum(int(row["refused"]) for row in rows(wire, "latency") if row["verb"] == verb)


def test_S11_only_what_was_committed_is_found(daemon: Running) -> None:
    """Exact hits at each point, from another process's side of the wire."""
    with Wire(daemon.socket) as first, Wire(daemon.socket) as second:
        for wire in (first, second):
            wire.hello(namespace=Namespace(tenant="S11"))
        first.call(Allocate, first.namespace, 1, tokens(40))
        for length, hit in ((0, 0), (20, 20), (40, 39)):
            if length:
                first.call(Commit, 1, length)
            assert second.call(Probe, second.namespace, tokens(40)).hit == hit
        first.call(Free, 1)


def test_S44_namespaces_are_compared_as_structures(daemon: Running) -> None:
    """Eight ways to split the same letters over adapter and salt: each finds its own alone."""
    kinds = [("X", ""), ("", "X"), ("X", "X"), ("ab", "c"), ("a", "bc"), ("", "x"), ("x", ""), ("", "")]
    with Wire(daemon.socket) as wire:
        wire.hello(map=False)
        roots = [
            wire.call(OpenNamespace, Namespace(tenant="S44", adapter=adapter, salt=salt)).namespace
            for adapter, salt in kinds
        ]
        assert len(set(roots)) == len(kinds)
        for number, root in enumerate(roots):
            admitted = wire.call(Allocate, root, number, tokens(32))
            assert admitted.hit == 0, kinds[number]
            wire.call(Commit, number, 32)
            hits = [wire.call(Probe, each, tokens(32)).hit for each in roots]
            assert hits == [31] * (number + 1) + [0] * (len(kinds) - number - 1)
        for number in range(len(kinds)):
            wire.call(Free, number)
    with Wire(daemon.socket) as wire:
        wire.hello(map=False, namespace=Namespace(tenant="S44", adapter="X"))
        assert wire.call(Probe, wire.namespace, tokens(32)).hit == 31
        split = Namespace("S44", "m", "X", "")
        assert wire.call(Probe, wire.call(OpenNamespace, split).namespace, tokens(32)).hit == 0


def test_S51_nothing_is_a_bad_request(daemon: Running) -> None:
    """Empty prompts, lengths of nothing, odd bytes: refused for that caller alone, and the connection goes on."""
    with Wire(daemon.socket) as wire:
        wire.hello(map=False)
        root = wire.namespace
        wire.call(Allocate, root, 1, tokens(20))
        cases = [
            (Allocate, (root, 2, b"")),
            (Allocate, (root, 2, b"abc")),
            (Allocate, (root, 2, tokens(4) + b"a")),
            (Probe, (root, b"abc")),
            (Pin, (root, b"abc")),
            (Commit, (1, 21, tokens(20))),
            (Commit, (1, 1 << 60)),
            (Fork, (1, 2, 21)),
            (Fork, (1, 2, 1 << 60)),
            (Trim, (1, 0, 1 << 60)),
            (Trim, (1, 5)),
            (Extend, (1, 1 << 60)),
        ]
        for kind, fields in cases:
            reply = wire.call(kind, *fields)
            assert isinstance(reply, Error), (kind, fields, reply)
            assert reply.code == errors.BadRequest.code, (kind, fields, reply)
            assert reply.message
            assert isinstance(wire.call(Ping), Pong)
        for kind, fields in ((Probe, (root, b"")), (Pin, (root, b"")), (Commit, (1, 0)), (Fork, (1, 3, 0))):
            reply = wire.call(kind, *fields)
            assert not isinstance(reply, Error) or reply.code == errors.BadRequest.code, (kind, reply)
        assert wire.call(Batch, []).results == []
        audit(daemon)
        for each in (1, 3):
            wire.call(Free, each)


def test_S53_never_is_not_later(daemon: Running) -> None:
    """More than the pool: NEVER with the limit, whether it is busy or not; up to the pool: LATER, then OK."""
    with Wire(daemon.socket) as wire, Wire(daemon.socket) as other:
        assert wire.hello(namespace=Namespace(tenant="S53")).pool.usable == USABLE
        other.hello(namespace=Namespace(tenant="other"))
        with Paint(other, "other") as paint:
            most = tokens(USABLE, 9000)
            held = other.call(Allocate, other.namespace, 1, tokens(100, 9000))
            paint.write(tokens(100, 9000), held.extents)
            assert isinstance(wire.call(Allocate, wire.namespace, 1, tokens(USABLE + 1)), Never)
            later = wire.call(Allocate, wire.namespace, 1, tokens(USABLE))
            assert isinstance(later, Later)
            wire.call(Withdraw, later.ticket)
            never = wire.call(Allocate, wire.namespace, 1, tokens(USABLE + 1))
            assert (never.needed, never.limit) == (USABLE + 1, USABLE)
            assert not paint.wrong(tokens(100, 9000), held.extents)
            other.call(Free, 1)
            assert isinstance(wire.call(Allocate, wire.namespace, 1, tokens(USABLE)), Admitted)
            assert isinstance(wire.call(Extend, 1, tokens=1), Never)
            assert isinstance(wire.call(Commit, 1, USABLE), Committed)
            wire.call(Free, 1)
            assert isinstance(other.call(Allocate, other.namespace, 1, most), Admitted)
            other.call(Free, 1)


def test_S65_a_hundred_thousand_refusals(other_daemon: Running) -> None:
    """LATER, NEVER, BAD_REQUEST and posted ones that fail: a handful of lines, with the count of what was left out."""
    daemon = other_daemon
    with Wire(daemon.socket) as wire, Wire(daemon.socket) as other:
        wire.hello(namespace=Namespace(tenant="S65"))
        other.hello(namespace=Namespace(tenant="other"))
        other.call(Allocate, other.namespace, 1, tokens(USABLE))
        later = wire.call(Allocate, wire.namespace, 1, tokens(500))
        assert isinstance(later, Later)
        lines = len(events(daemon))
        rss = 0
        verbs = [
            Allocate(0, wire.namespace, 1, tokens(500), later.ticket),
            Extend(0, 77),
            Free(0, 78),
            Probe(0, 999, b""),
        ]
        for batch in range(25):
            results = wire.call(Batch, verbs * 1000).results
            assert all(isinstance(each, Later | Error) for each in results)
            if batch == 2:
                rss = daemon.rss_kib()  # buffers are as large by now as they will be
        for _ in range(2000):
            wire.sock.sendall(encode(Free(0, 12345)) * 5)
        assert isinstance(wire.call(Ping), Pong)
        assert len(events(daemon)) - lines <= 20
        assert daemon.rss_kib() - rss < 6 << 10  # the ring of events that the admin API replays has 2 MiB
        assert refused(wire, "Free") >= 10_000 + 25_000
        other.call(Free, 1)
    time.sleep(0.05)
    daemon.stop()
    told = [event for event in events(daemon) if event["event"] in ("posted_refused", "suppressed")]
    left_out = sum(
        each.get("suppressed", 0) if each["event"] == "posted_refused" else each.get("posted_refused", 0)
        for each in told
    )
    assert left_out + sum(each["event"] == "posted_refused" for each in told) == 10_000


def test_tickets_have_an_end(daemon: Running) -> None:
    """Who asks again and again without coming back with its ticket fills its own quota of tickets, and no more."""
    with Wire(daemon.socket) as wire, Wire(daemon.socket) as other:
        wire.hello(namespace=Namespace(tenant="asks"))
        other.hello(namespace=Namespace(tenant="other"))
        other.call(Allocate, other.namespace, 1, tokens(1000))
        kinds = [type(wire.call(Allocate, wire.namespace, 1, tokens(500))).__name__ for _ in range(1500)]
        assert kinds[0] == "Later"
        assert kinds[-1] == "Error"
        assert kinds.count("Later") <= 1024
        # The others have their turn as before.
        assert isinstance(other.call(Extend, 1, tokens=1), (Grown, Later))
        other.call(Free, 1)


def test_pins_namespaces_and_sequences_have_an_end() -> None:
    """Each is bounded for a session: past it TOO_LARGE, and what there is stays."""
    with running(sequences_max=50) as daemon:
        with Wire(daemon.socket) as wire:
            wire.hello(map=False)
            wire.call(Allocate, wire.namespace, 0, tokens(8))
            wire.call(Commit, 0, 8)
            pins = [wire.call(Pin, wire.namespace, tokens(8)) for _ in range(60)]
            assert [type(each).__name__ for each in pins].count("Pinned") == 50
            assert pins[-1].code == errors.TooLarge.code
            forks = [wire.call(Fork, 0, n, 8) for n in range(1, 60)]
            assert [type(each).__name__ for each in forks].count("Forked") == 49
            assert forks[-1].code == errors.TooLarge.code
            assert isinstance(forks[0], Forked)
            opened = [wire.call(OpenNamespace, Namespace(tenant=f"{n}")) for n in range(1100)]
            assert opened[-1].code == errors.TooLarge.code
        empty(daemon)
        with Wire(daemon.socket) as control:
            until(lambda: rows(control, "pools")[0]["namespaces"] == 0, 5.0, "a namespace is left")


def test_namespaces_of_refused_hellos_are_not_kept() -> None:
    """One client that is refused again and again cannot use up the namespaces there may be."""
    with running() as daemon:
        for n in range(300):
            with Wire(daemon.socket) as wire:
                error = wire.call(messages.Hello, 1, "x", page=3, namespace=Namespace(tenant=f"{n}"))
                assert error.code == errors.BadRequest.code
        with Wire(daemon.socket) as control:
            assert rows(control, "pools")[0]["namespaces"] == 0


def _slots(extents: list[int]) -> set[int]:
    return {
        slot
        for start, length in zip(extents[::2], extents[1::2], strict=True)
        for slot in range(start, start + length)
    }


def test_S69_numbers_of_sequences(daemon: Running) -> None:
    """EXISTS for a live one with other tokens; sessions apart; a freed one again at once, its fence still to pass."""
    with Wire(daemon.socket) as wire, Wire(daemon.socket) as other:
        for each in (wire, other):
            each.hello(namespace=Namespace(tenant="S69"))
        with Paint(wire, "S69") as paint:
            old = wire.call(Allocate, wire.namespace, 7, tokens(30))
            paint.write(tokens(30), old.extents)
            assert wire.call(Allocate, wire.namespace, 7, tokens(31)).code == errors.Exists.code
            assert wire.call(Fork, 7, 7, 10).code == errors.Exists.code
            assert isinstance(other.call(Allocate, other.namespace, 7, tokens(30)), Admitted)
            wire.step(1, 0)
            assert isinstance(wire.call(Free, 7, 1), Done)
            new = wire.call(Allocate, wire.namespace, 7, tokens(30, 500))
            assert isinstance(new, Admitted)
            slots = [_slots(each.extents) for each in (old, new)]
            assert not slots[0] & slots[1], "the old one's slots are behind a step that has not completed"
            paint.write(tokens(30, 500), new.extents)
            assert not paint.wrong(tokens(30), old.extents)
            wire.step(1, 1)
            assert not paint.wrong(tokens(30, 500), new.extents)
        for number in (0, 2**62, 2**63 - 1):
            assert isinstance(wire.call(Allocate, wire.namespace, number, tokens(4)), Admitted)
            assert isinstance(wire.call(Free, number), Done)
        for each in (wire, other):
            each.call(Free, 7)
    audit(daemon)


def test_P08_free_of_what_is_not_there(daemon: Running) -> None:
    """Never used, freed before, another session's: each refused by name and counted, and nothing changes."""
    with Wire(daemon.socket) as wire, Wire(daemon.socket) as other:
        for each in (wire, other):
            each.hello(namespace=Namespace(tenant="P08"))
        wire.call(Allocate, wire.namespace, 1, tokens(20))
        other.call(Allocate, other.namespace, 2, tokens(20, 100))
        wire.call(Allocate, wire.namespace, 3, tokens(20, 200))
        wire.call(Free, 3)
        before = refused(wire, "Free")
        pool = rows(wire, "pools")[0]
        for number in (99, 3, 2, 2**63 - 1):
            assert wire.call(Free, number).code == errors.NotFound.code
            wire.send(Free(0, number))
        assert wire.call(Free, 1, 5).code == errors.BadRequest.code, "a fence beyond what was submitted"
        assert refused(wire, "Free") == before + 9
        after = rows(wire, "pools")[0]
        assert {key: after[key] for key in ("free", "private", "cached", "fenced")} == {
            key: pool[key] for key in ("free", "private", "cached", "fenced")
        }
        wire.call(Free, 1)
        other.call(Free, 2)


def test_S05_looked_up_then_evicted(daemon: Running) -> None:
    """A Probe holds nothing: what was evicted meanwhile is a smaller hit, never another's slots."""
    with Wire(daemon.socket) as wire, Wire(daemon.socket) as other:
        wire.hello(namespace=Namespace(tenant="S05"))
        other.hello(namespace=Namespace(tenant="other"))
        prompt, most = tokens(100), tokens(USABLE, 5000)
        with Paint(wire, "S05") as mine, Paint(other, "other") as theirs:
            for order in (True, False):
                first = wire.call(Allocate, wire.namespace, 1, prompt)
                mine.write(prompt, first.extents, first.hit)
                wire.call(Commit, 1, 100)
                wire.call(Free, 1)
                assert wire.call(Probe, wire.namespace, prompt).hit == 99
                if order:
                    taken = other.call(Allocate, other.namespace, 1, most)
                    theirs.write(most, taken.extents)
                    later = wire.call(Allocate, wire.namespace, 1, prompt)
                    assert isinstance(later, Later)
                    wire.call(Withdraw, later.ticket)
                    other.call(Free, 1)
                    again = wire.call(Allocate, wire.namespace, 1, prompt)
                    assert again.hit == 0
                else:
                    again = wire.call(Allocate, wire.namespace, 1, prompt)
                    assert again.hit == 99
                    assert isinstance(other.call(Allocate, other.namespace, 1, most), Later)
                    assert not mine.wrong(prompt, again.extents, 99)
                wire.call(Free, 1)
        while wire.call(Evict, 1 << 20).tokens:
            pass  # a part at a time


def test_S65_clients_that_come_and_go_fill_no_disk(other_daemon: Running) -> None:
    """A thousand short sessions: so many lines a second of each kind, and how many were left out."""
    daemon = other_daemon
    began = time.monotonic()
    for _ in range(1000):
        with Wire(daemon.socket) as wire:
            wire.hello(map=False)
    seconds = time.monotonic() - began
    daemon.stop()
    told = [event for event in events(daemon) if event["event"] == "session_opened"]
    assert len(told) <= 50 * (seconds + 2)
    left_out = sum(each.get("suppressed", 0) for each in told)
    left_out += sum(each.get("session_opened", 0) for each in events(daemon) if each["event"] == "suppressed")
    assert len(told) + left_out == 1000


def test_a_quota_empties_nobodys_cache() -> None:
    """A long prompt beyond its session's quota is refused before anything is evicted for it; so is one that runs."""
    with (
        running(pools=[{"blocks": 2049}]) as daemon,
        Wire(daemon.socket) as wire,
        Wire(daemon.socket) as small,
    ):
        wire.hello(map=False)
        prompt = tokens(30_000)
        wire.call(Allocate, wire.namespace, 1, prompt)
        wire.call(Commit, 1, 30_000)
        wire.call(Free, 1)
        small.hello(map=False, quota=100, namespace=Namespace(tenant="small"))
        assert isinstance(small.call(Allocate, small.namespace, 1, tokens(20_000, 50_000)), Never)
        assert isinstance(small.call(Allocate, small.namespace, 1, tokens(20)), Admitted)
        assert small.call(Allocate, small.namespace, 1, tokens(20_000, 50_000)).code == errors.Exists.code
        assert wire.call(Probe, wire.namespace, prompt).hit == 29_999
