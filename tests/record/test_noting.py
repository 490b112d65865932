"""What a recording is told by the daemon, verb by verb, over raw frames."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from kvslot.api.wire import errors, messages
from kvslot.api.wire.messages import (
    Admitted,
    Allocate,
    Batch,
    Commit,
    Extend,
    Fork,
    Free,
    Later,
    Never,
    OpenNamespace,
    Record,
    Trim,
    Withdraw,
)
from kvslot.daemon.recorder import Recorders
from kvslot.daemon.verbs import TABLE

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens

SECONDS = 30.0


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    with running(pools=[{"blocks": 33}, {"name": "other"}]) as each:
        yield each


@pytest.fixture
def control(daemon: Running) -> Iterator[Wire]:
    """A connection that records the first pool, with values."""
    with Wire(daemon.socket) as wire:
        started = wire.call(Record, "start", "", True)
        assert isinstance(started, messages.Recorded), started
        yield wire
    # The next test's recording has to wait until the daemon has heard of this one's end.
    end = time.monotonic() + SECONDS
    while daemon.text().count("recording_started") != daemon.text().count("recording_ended"):
        assert time.monotonic() < end
        time.sleep(0.01)


def fetch(control: Wire) -> list[messages.Noted]:
    """All there is by now."""
    events: list[messages.Noted] = []
    while True:
        told = control.call(Record)
        events += told.events
        if not told.more:
            return events


def of(events: list[messages.Noted]) -> list[tuple[Any, ...]]:
    return [(event.what, event.count, event.hit, event.tokens) for event in events]


def test_a_request_is_told_from_its_prompt_to_its_end(daemon: Running, control: Wire) -> None:
    """Allocate, Commit, a roll-back, more, Free: prompt and hit, each token once and where it stands, the length."""
    with Wire(daemon.socket) as wire:
        wire.hello("e", namespace=messages.Namespace("one"))
        wire.call(Allocate, wire.namespace, 1, tokens(20, 100))
        wire.call(Commit, 1, 24, tokens(4, 900))
        wire.call(Trim, 1, 0, 22)
        wire.call(Commit, 1, 25, tokens(3, 800))
        wire.call(Free, 1)
        wire.call(Allocate, wire.namespace, 1, tokens(20, 100) + tokens(9, 900))
        assert of(fetch(control)) == [
            ("begun", 20, 0, tokens(20, 100)),
            ("told", 20, 0, tokens(4, 900)),
            ("cut", 22, 0, b""),
            ("told", 22, 0, tokens(3, 800)),
            ("ended", 25, 0, b""),
            # What was published before the roll-back stays cached.
            ("begun", 29, 24, tokens(20, 100) + tokens(9, 900)),
        ]
        assert control.call(Record).running == 1
    end = time.monotonic() + SECONDS
    while not (left := fetch(control)):
        assert time.monotonic() < end
    assert ([event.what for event in left], control.call(Record).running) == (["left"], 0)


def test_forks_batches_namespaces_and_other_pools(daemon: Running, control: Wire) -> None:
    """A fork names its parent, verbs of a batch are told alike, namespaces have numbers, other pools are let be."""
    with Wire(daemon.socket) as wire, Wire(daemon.socket) as beside:
        beside.hello("b", pool="other")
        beside.call(Allocate, beside.namespace, 1, tokens(20))
        beside.call(Free, 1)
        wire.hello("e", namespace=messages.Namespace("two"))
        other = wire.call(OpenNamespace, messages.Namespace("three")).namespace
        verbs = [
            Allocate(1, wire.namespace, 1, tokens(20)),
            Commit(1, 1, 20),
            Fork(1, 1, 2, 15),
            Extend(1, 2),
            Commit(1, 2, 18, tokens(3, 700)),
            Free(0, 2),
            Free(0, 1),
            Allocate(1, other, 3, tokens(20)),
            Free(0, 3),
            Free(0, 99),  # of none
        ]
        results = wire.call(Batch, verbs).results
        assert isinstance(results[0], Admitted)
        events = fetch(control)
        assert [(event.what, event.count) for event in events] == [
            ("begun", 20),
            ("forked", 15),
            ("told", 15),
            ("ended", 18),
            ("ended", 20),
            ("begun", 20),
            ("ended", 20),
        ]
        assert events[1].space == events[0].request != events[1].request
        assert events[5].space != events[0].space


def test_a_request_that_waits_came_when_it_first_asked(daemon: Running, control: Wire) -> None:
    """Told LATER and admitted after: `at` is the first asking, and so is `floor` until then; others are counted."""
    with Wire(daemon.socket) as wire:
        wire.hello("e", namespace=messages.Namespace("waits"))
        usable = 32 * 16
        wire.call(Allocate, wire.namespace, 1, tokens(usable - 40, 5000))
        before = control.call(Record).at
        later = wire.call(Allocate, wire.namespace, 2, tokens(100, 9000))
        assert isinstance(later, Later)
        told = control.call(Record)
        assert (told.waiting, before <= told.floor <= told.at) == (1, True)
        assert isinstance(wire.call(Allocate, wire.namespace, 3, tokens(2 * usable)), Never)
        gone = wire.call(Allocate, wire.namespace, 4, tokens(100, 7000))
        wire.call(Withdraw, gone.ticket)
        again = control.call(Record)
        assert (again.floor, again.waiting, again.never, again.given_up) == (told.floor, 1, 1, 1)
        wire.call(Free, 1)
        asked = control.call(Record).at
        answer = wire.call(Allocate, wire.namespace, 2, tokens(100, 9000), later.ticket)
        assert isinstance(answer, Admitted)
        wire.call(Allocate, wire.namespace, 2, tokens(100, 9000))  # the same again: it runs already
        (begun,) = [event for event in fetch(control) if event.what == "begun" and event.count == 100]
        assert begun.at == told.floor < asked
        assert control.call(Record).floor > asked


def test_what_runs_already_is_left_out(daemon: Running) -> None:
    """Sequences from before the recording, and all that becomes of them, are not told of."""
    with Wire(daemon.socket) as wire:
        wire.hello("e", namespace=messages.Namespace("before"))
        wire.call(Allocate, wire.namespace, 1, tokens(20))
        with Wire(daemon.socket) as control:
            control.call(Record, "start")
            wire.call(Allocate, wire.namespace, 1, tokens(20))
            wire.call(Commit, 1, 22, tokens(2, 50))
            wire.call(Fork, 1, 2, 10)
            wire.call(Trim, 1, 0, 21)
            wire.call(Free, 2)
            wire.call(Free, 1)
            told = control.call(Record, "stop")
            assert (told.events, told.more, told.running) == ([], False, 0)
            assert control.call(Record).code == errors.OutOfTurn.code


def test_one_records_at_a_time(daemon: Running, control: Wire) -> None:
    """A second recording of a pool is refused by name, another pool's is not; actions have an order."""
    with Wire(daemon.socket) as second:
        refused = second.call(Record, "start")
        assert refused.code == errors.Busy.code
        assert "records pool 'default'" in refused.message
    with Wire(daemon.socket) as second:
        assert isinstance(second.call(Record, "start", "other"), messages.Recorded)
        assert second.call(Record, "start", "other").code == errors.OutOfTurn.code
        assert isinstance(second.call(Record, "stop"), messages.Recorded)
        assert second.call(Record, "fetch").code == errors.OutOfTurn.code
        assert second.call(Record, "begin").code == errors.BadRequest.code
        assert second.call(Record, "start", "none").code == errors.NotFound.code


def test_nothing_stands_in_the_verbs_way_while_nobody_records() -> None:
    """The table of verbs is the plain one before and after; during a recording five rows of it differ, and no other."""
    hosted: Any = Mock()
    hosted.name = "default"
    owner: Any = SimpleNamespace(peer=SimpleNamespace(pid=1))
    server: Any = SimpleNamespace(table=TABLE, hosted=lambda name: hosted, loop=None)
    recorders = Recorders(server)
    assert server.table is TABLE
    recorders.act(owner, Record(1, "start"), 1.0)
    changed = {kind for kind, row in TABLE.items() if server.table[kind] != row}
    assert changed == {Allocate, Commit, Trim, Fork, Free}
    recorders.act(owner, Record(1, "stop"), 2.0)
    assert server.table is TABLE
    recorders.act(owner, Record(1, "start"), 3.0)
    recorders.disconnected(owner)
    assert server.table is TABLE


def test_a_recorder_that_does_not_fetch_costs_no_more_than_agreed() -> None:
    """Beyond the limit requests and tokens are counted and not kept; ends are kept; once there is room it goes on."""
    limit = 20_000
    first = f"import kvslot.daemon.recorder as r; r.RECORD_BYTES = {limit}"
    with running(pools=[{"blocks": 601}], first=first) as daemon, Wire(daemon.socket) as control:
        control.call(Record, "start", "", True)
        with Wire(daemon.socket) as wire:
            wire.hello("e")
            for number in range(20):
                wire.call(Allocate, wire.namespace, number, tokens(300, number * 1000))
            for number in range(20):
                wire.call(Commit, number, 302, tokens(2, 70_000))
                wire.call(Trim, number, 0, 301)
            for number in range(20):
                wire.call(Free, number)
            events = fetch(control)
            begun = [event.request for event in events if event.what == "begun"]
            assert begun
            assert sum(len(event.tokens) for event in events) <= limit
            # Each that was told of has its one end.
            assert sorted(event.request for event in events if event.what == "ended") == sorted(begun)
            told = control.call(Record)
            assert told.lost_requests >= 20 - len(begun) > 0
            assert told.lost_tokens >= 300 * (20 - len(begun))
            wire.call(Allocate, wire.namespace, 50, tokens(300))
            assert [event.what for event in fetch(control)] == ["begun"]


def test_the_same_key_blinds_alike(daemon: Running) -> None:
    """Two recordings with one key tell the same prompt and namespace alike, with another key or none they do not."""
    seen: list[tuple[int, bytes]] = []
    with Wire(daemon.socket) as wire:
        wire.hello("e", namespace=messages.Namespace("key"))
        for number, key in enumerate((b"one", b"one", b"two", b"", b"")):
            with Wire(daemon.socket) as control:
                control.call(Record, "start", "", False, key)
                wire.call(Allocate, wire.namespace, number, tokens(50))
                (begun, *_) = control.call(Record, "stop").events
                seen.append((begun.space, begun.tokens))
    assert seen[0] == seen[1]
    spaces, prompts = zip(*seen[1:], strict=True)
    assert len(set(spaces)) == len(set(prompts)) == 4


def test_long_prompts_come_in_pieces(daemon: Running) -> None:
    """A prompt longer than an answer may be is told piece by piece, each where it stands, blinded as one."""
    first = "import kvslot.daemon.recorder as r; r.FETCH_BYTES = 4096; r.Blind.STEP = 700"
    with running(pools=[{"blocks": 513}], first=first) as daemon, Wire(daemon.socket) as control:
        control.call(Record, "start")
        with Wire(daemon.socket) as wire:
            wire.hello("e")
            wire.call(Allocate, wire.namespace, 1, tokens(3000, 100))
            wire.call(Allocate, wire.namespace, 2, tokens(1500, 100) + tokens(1500, 8000))
            pieces: dict[int, bytes] = {}
            largest = 0
            while True:
                answer = control.call(Record)
                largest = max(largest, sum(len(event.tokens) for event in answer.events))
                for event in answer.events:
                    have = pieces.setdefault(event.request, b"")
                    assert event.what == "begun" or event.count == len(have) >> 2
                    pieces[event.request] = have + event.tokens
                if not answer.more:
                    break
            assert largest <= 4096
            one, two = pieces.values()
            assert len(one) == len(two) == 12_000
            assert one[:6000] == two[:6000]
            assert all(one[at : at + 4] != two[at : at + 4] for at in range(6000, 12_000, 4))
