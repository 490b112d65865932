"""Verbs against a real daemon, over raw frames."""

from __future__ import annotations

import time
import typing
from collections.abc import Iterator

import pytest

from kvslot.api.wire import errors, messages
from kvslot.api.wire.messages import (
    Admitted,
    Allocate,
    Audit,
    Audited,
    Batch,
    Bye,
    Commit,
    Committed,
    Done,
    Error,
    Evict,
    Evicted,
    Extend,
    Fork,
    Forked,
    Free,
    Grown,
    Hello,
    Inspect,
    Inspected,
    Later,
    Namespace,
    Never,
    Opened,
    OpenNamespace,
    Pin,
    Ping,
    Pinned,
    Pong,
    Probe,
    Probed,
    Ready,
    Results,
    SwapOut,
    Trim,
    Trimmed,
    Unpin,
    Withdraw,
)
from kvslot.daemon.verbs import TABLE, Permission

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    """One daemon for the tests of this module, each with sessions and namespaces of its own."""
    with running() as daemon:
        yield daemon


@pytest.fixture
def wire(daemon: Running) -> Iterator[Wire]:
    """A connection without a session; at the end the pool is sound and empty of what the test held."""
    with Wire(daemon.socket) as wire:
        yield wire
    with Wire(daemon.socket) as control:
        control.call(Evict, 1 << 20)
        audited = control.call(Audit)
        assert isinstance(audited, Audited)
        assert not audited.faults


def test_every_verb_has_a_struct_a_handler_and_a_row() -> None:
    """The requests of the wire are exactly the rows of the table, numbered below 64, and numbers are not used twice."""
    requests = set(typing.get_args(messages.Request))
    assert set(TABLE) == requests
    every = [
        each
        for each in vars(messages).values()
        if isinstance(each, type) and issubclass(each, messages.Message)
    ]
    tags = {each: each.__struct_config__.tag for each in every if each is not messages.Message}
    assert len(set(tags.values())) == len(tags)
    assert all(0 < tags[each] < 64 for each in requests)  # type: ignore[operator]
    control = set(typing.get_args(messages.ControlVerb))
    assert control == {each for each, row in TABLE.items() if row.permission is Permission.CONTROL}
    assert set(typing.get_args(messages.Batchable)) <= set(typing.get_args(messages.SessionVerb))


def test_ping_needs_no_session(wire: Wire) -> None:
    """Ping is answered before Hello, with the boot token."""
    pong = wire.call(Ping)
    assert isinstance(pong, Pong)
    assert pong.boot == wire.hello().boot


def test_a_verb_before_hello_is_out_of_turn_and_the_end(wire: Wire) -> None:
    """Nothing but Ping and control verbs may come before Hello."""
    error = wire.call(Probe, 1, tokens(4))
    assert isinstance(error, Error)
    assert error.code == errors.OutOfTurn.code
    assert wire.closed()


def test_life_of_a_sequence(wire: Wire) -> None:
    """Allocate, extend, commit, fork, trim and free do as the core does, under the client's own numbers."""
    wire.hello(namespace=Namespace(tenant="life"))
    first = wire.call(Allocate, wire.namespace, 7, tokens(20))
    assert isinstance(first, Admitted)
    assert first.hit == 0
    assert first.capacity >= 20
    assert sum(first.extents[1::2]) == first.capacity
    grown = wire.call(Extend, 7, written=20, tokens=40)
    assert isinstance(grown, Grown)
    assert grown.position == first.capacity
    assert grown.capacity == first.capacity + 40
    committed = wire.call(Commit, 7, 20)
    assert committed == Committed(committed.id, 20, 20, 0)
    assert wire.call(Probe, wire.namespace, tokens(20)).hit == 19
    forked = wire.call(Fork, 7, 8, 20)
    assert isinstance(forked, Forked)
    assert forked.length == 20
    trimmed = wire.call(Trim, 7, keep_to=25)
    assert isinstance(trimmed, Trimmed)
    second = wire.call(Allocate, wire.namespace, 9, tokens(24))
    assert second.hit == 20
    for sequence in (7, 8, 9):
        assert isinstance(wire.call(Free, sequence), Done)
    error = wire.call(Free, 7)
    assert (error.code, wire.call(Extend, 7).code) == (errors.NotFound.code, errors.NotFound.code)
    assert isinstance(wire.call(Bye), Done)
    wire.welcome = None
    assert wire.closed()


def test_the_same_allocate_again_gives_the_same_answer(wire: Wire) -> None:
    """A number that is running is EXISTS, but for the same request again while nothing has changed (S69)."""
    wire.hello(namespace=Namespace(tenant="again"))
    first = wire.call(Allocate, wire.namespace, 7, tokens(20))
    again = wire.call(Allocate, wire.namespace, 7, tokens(20))
    assert (again.hit, again.capacity, again.extents) == (first.hit, first.capacity, first.extents)
    assert wire.call(Allocate, wire.namespace, 7, tokens(21)).code == errors.Exists.code
    wire.call(Extend, 7)
    assert wire.call(Allocate, wire.namespace, 7, tokens(20)).code == errors.Exists.code
    wire.call(Free, 7)
    assert isinstance(wire.call(Allocate, wire.namespace, 7, tokens(21)), Admitted)


def test_numbers_and_namespaces_are_their_sessions_own(daemon: Running, wire: Wire) -> None:
    """Another session's sequence, namespace, pin and ticket are refused by name and untouched (S69)."""
    wire.hello(namespace=Namespace(tenant="own"))
    wire.call(Allocate, wire.namespace, 7, tokens(20))
    wire.call(Commit, 7, 20)
    pinned = wire.call(Pin, wire.namespace, tokens(20))
    assert isinstance(pinned, Pinned)
    assert pinned.length == 20
    with Wire(daemon.socket) as other:
        other.hello(namespace=Namespace(tenant="other"))
        assert other.call(Free, 7).code == errors.NotFound.code
        assert other.call(Probe, wire.namespace, tokens(20)).code == errors.NotFound.code
        assert other.call(Unpin, pinned.pin).code == errors.Denied.code
        assert isinstance(other.call(Allocate, other.namespace, 7, tokens(20)), Admitted)
        assert other.call(Probe, other.namespace, tokens(20)).hit == 0
        # ... but who names the same namespace shares it.
        same = other.call(OpenNamespace, Namespace(tenant="own"))
        assert isinstance(same, Opened)
        assert other.call(Probe, same.namespace, tokens(20)) == Probed(other.number, 19)
    assert isinstance(wire.call(Unpin, pinned.pin), Done)
    assert isinstance(wire.call(Free, 7), Done)


def test_later_never_and_ready(daemon: Running, wire: Wire) -> None:
    """What does not fit now gets a ticket and later Ready; what never fits is told so at once, with the limit."""
    welcome = wire.hello(namespace=Namespace(tenant="later"))
    usable = welcome.pool.usable
    assert isinstance(wire.call(Allocate, wire.namespace, 1, tokens(usable)), Admitted)
    never = wire.call(Allocate, wire.namespace, 2, tokens(usable + 1))
    assert never == Never(never.id, usable + 1, usable)
    with Wire(daemon.socket) as other:
        other.hello(namespace=Namespace(tenant="waits"))
        later = other.call(Allocate, other.namespace, 1, tokens(100, 5000))
        assert isinstance(later, Later)
        assert (later.reason, later.needed) == ("memory", 100)
        wire.send(Free(0, 1))
        assert other.push(Ready).ticket == later.ticket
        assert isinstance(other.call(Allocate, other.namespace, 1, tokens(100, 5000), later.ticket), Admitted)
        late = other.call(Withdraw, later.ticket)
        assert isinstance(late, Error)


def test_batch_is_answered_in_order_each_on_its_own(wire: Wire) -> None:
    """A Batch gives one result a verb, in order; one that is refused stops none of the others."""
    wire.hello(namespace=Namespace(tenant="batch"))
    results = wire.call(
        Batch,
        [
            Allocate(0, wire.namespace, 1, tokens(20)),
            Extend(0, 1, written=20),
            Free(0, 99),
            Commit(0, 1, 20),
            Probe(0, wire.namespace, tokens(20)),
            Free(0, 1),
        ],
    )
    assert isinstance(results, Results)
    kinds = [type(each) for each in results.results]
    assert kinds == [Admitted, Grown, Error, Committed, Probed, Done]
    many = wire.call(Batch, [Probe(0, wire.namespace, tokens(20))] * 1000)
    assert [each.hit for each in many.results] == [19] * 1000
    assert wire.call(Batch, [Free(0, 1)] * 5000).code == errors.TooLarge.code
    assert wire.call(Batch, []) == Results(wire.number, [])


def test_posted_verbs_have_no_reply_and_others_may_not_be_posted(daemon: Running, wire: Wire) -> None:
    """Id 0 gets no reply, for Free and Trim alone; what is wrong with a posted one is counted and logged."""
    wire.hello(namespace=Namespace(tenant="posted"))
    wire.call(Allocate, wire.namespace, 1, tokens(20))
    wire.send(Trim(0, 1, keep_to=20))
    wire.send(Free(0, 1))
    wire.send(Free(0, 1))
    assert isinstance(wire.call(Ping), Pong)
    assert "posted_refused" in daemon.text()
    with Wire(daemon.socket) as control:
        rows = control.call(Inspect, "sessions").rows
    assert wire.welcome is not None
    assert [row["posted_errors"] for row in rows if row["session"] == wire.welcome.session] == [1]
    wire.send(Probe(0, wire.namespace, tokens(2)))
    assert isinstance(wire.call(Ping), Pong)


def test_fence_waits_for_the_page(daemon: Running, wire: Wire) -> None:
    """What is freed behind a step is free once the session page says that it has completed, within a few ms."""
    welcome = wire.hello(namespace=Namespace(tenant="fence"))
    usable = welcome.pool.usable
    wire.call(Allocate, wire.namespace, 1, tokens(usable))
    assert wire.call(Free, 1, 1).code == errors.BadRequest.code, "a fence beyond the last step submitted"
    wire.step(1, 0)
    assert isinstance(wire.call(Free, 1, 1), Done)
    later = wire.call(Allocate, wire.namespace, 2, tokens(usable, 9000))
    assert isinstance(later, Later)
    assert later.coming_free == usable
    wire.step(1, 1)
    assert wire.push(Ready).ticket == later.ticket
    assert isinstance(wire.call(Allocate, wire.namespace, 2, tokens(usable, 9000), later.ticket), Admitted)


def test_what_is_not_built_yet_says_so(wire: Wire) -> None:
    """Verbs of a later version are UNSUPPORTED, not a broken connection."""
    wire.hello()
    assert wire.call(SwapOut, 1).code == errors.Unsupported.code


def test_wrong_version_pool_layout_and_options_are_refused(daemon: Running) -> None:
    """A Hello that cannot be served says which limit it met."""
    cases: list[tuple[dict[str, object], type[errors.Refused]]] = [
        ({"pool": "nowhere"}, errors.NotFound),
        ({"fingerprint": "f00"}, errors.WrongVersion),
        ({"page": 3}, errors.BadRequest),
        ({"append": "sideways"}, errors.BadRequest),
        ({"group": 99}, errors.NotFound),
        ({"resume": 99}, errors.StaleSession),
    ]
    for fields, code in cases:
        with Wire(daemon.socket) as wire:
            error = wire.call(Hello, messages.VERSION, "test", **fields)
            assert isinstance(error, Error), fields
            assert error.code == code.code, error
            assert error.message
    with Wire(daemon.socket) as wire:
        assert wire.call(Hello, 99, "test").code == errors.WrongVersion.code
        assert wire.closed()


def test_control_verbs(daemon: Running, wire: Wire) -> None:
    """Control verbs need no session, only the right user."""
    inspected = wire.call(Inspect, "status")
    assert isinstance(inspected, Inspected)
    assert inspected.rows[0]["version"]
    assert isinstance(wire.call(Evict, 100), Evicted)
    assert wire.call(Inspect, "nonsense").code in (errors.NotFound.code, errors.BadRequest.code)
    assert isinstance(wire.call(messages.SetConfig, "stall_seconds", "7.5"), Done)
    answer = wire.call(messages.Defrag)
    assert isinstance(answer, messages.Defragged)
    assert [each.pool for each in answer.pools] == ["default"]
    assert wire.call(messages.Defrag, "", "sideways").code == errors.BadRequest.code
    assert wire.call(messages.Defrag, "nowhere").code == errors.NotFound.code
    assert wire.call(messages.SetConfig, "stall_seconds", "-7").code == errors.BadRequest.code
    assert wire.call(messages.SetConfig, "socket", "/elsewhere").code == errors.BadRequest.code


def test_room_for_a_long_prompt_is_made_in_slices() -> None:
    """A long prompt that has to evict is answered in order, finds what is cached of it, and others go on meanwhile."""
    with running(pools=[{"blocks": 4001, "block_size": 16}]) as daemon:
        with Wire(daemon.socket) as wire, Wire(daemon.socket) as other:
            wire.hello(namespace=Namespace(tenant="long"))
            other.hello(namespace=Namespace(tenant="short"))
            half = tokens(20_000, 1 << 20)
            wire.call(Allocate, wire.namespace, 1, half)
            wire.call(Commit, 1, 20_000)
            wire.call(Free, 1)
            for index in range(2, 250):
                verbs = [
                    Allocate(0, wire.namespace, index, tokens(150, 1000 * index)),
                    Commit(0, index, 150),
                    Free(0, index),
                ]
                wire.call(Batch, verbs)
            number = wire.next_id()
            wire.send(Allocate(number, wire.namespace, 1, half + tokens(20_000, 1 << 24)))
            wire.send(Probe(number + 1, wire.namespace, half))
            assert other.call(Probe, other.namespace, tokens(5)).hit == 0
            admitted, probed = wire.reply(), wire.reply()
            assert isinstance(admitted, Admitted)
            assert (admitted.id, admitted.hit) == (number, 20_000)
            assert sum(admitted.extents[1::2]) == admitted.capacity
            assert probed == Probed(number + 1, 19_999)
            wire.number = number + 1
            # Closed while room is being made: nothing is left of it.
            wire.call(Free, 1)
            assert isinstance(wire.call(Allocate, wire.namespace, 5, tokens(60_000, 1 << 26)), Admitted)
            wire.call(Free, 5)
        with Wire(daemon.socket) as control:
            assert control.call(Audit).faults == []


def test_scattered_room_is_gathered_and_given_back_in_slices() -> None:
    """A long prompt that needs hundreds of free runs gets them, and when it goes they are free runs again."""
    with running(pools=[{"blocks": 4001, "block_size": 16}]) as daemon:
        with Wire(daemon.socket) as wire, Wire(daemon.socket) as other:
            wire.hello(namespace=Namespace(tenant="long"), map=False)
            for index in range(380):
                wire.call(Allocate, wire.namespace, index + 1, tokens(150, 1000 * index))
            for index in range(380):
                if index % 2:
                    wire.call(Commit, index + 1, 150)
                wire.call(Free, index + 1)

            def runs() -> int:
                return int(other.call(Inspect, "frag").rows[0]["free_runs"])

            before = runs()
            assert before > 150
            for last in (False, True):
                number = wire.next_id()
                wire.send(Allocate(number, wire.namespace, 1, tokens(25_000, 1 << 20)))
                wire.send(Probe(number + 1, wire.namespace, tokens(5)))
                if not last:
                    admitted, probed = wire.reply(), wire.reply()
                    assert isinstance(admitted, Admitted)
                    assert len(admitted.extents) > 100
                    assert probed == Probed(number + 1, 0)
                    wire.number = number + 1
                    wire.call(Free, 1)
            wire.close()  # before, while or after it is gathered for: runs mean something once the daemon has seen it
            until = time.monotonic() + 10
            while any(row["state"] == "live" for row in other.call(Inspect, "sessions").rows):
                assert time.monotonic() < until
                time.sleep(0.01)
            while (left := runs()) != before:
                assert time.monotonic() < until, (left, before)
                time.sleep(0.01)
        with Wire(daemon.socket) as control:
            assert control.call(Audit).faults == []
