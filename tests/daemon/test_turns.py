"""Whose turn it is: floods, long batches, long requests inside them, and what is said before a Welcome."""

from __future__ import annotations

import contextlib
import time

import pytest

from kvslot.api.wire import VERSION, Reader, encode, errors
from kvslot.api.wire.messages import (
    Admitted,
    Allocate,
    Audit,
    Batch,
    Batchable,
    Commit,
    Done,
    Extend,
    Free,
    Grown,
    Hello,
    Inspect,
    Inspected,
    Namespace,
    Ping,
    Pong,
    Probe,
    Results,
    Welcome,
)
from kvslot.daemon.latency import SAMPLE

from ..tools.daemon import running
from ..tools.wire import Wire, tokens

LARGE = {"blocks": 4001, "block_size": 16}


def fill(wire: Wire, pieces: int, length: int) -> None:
    """Cached prompts that have nothing in common."""
    for first in range(0, pieces, 64):
        verbs: list[Batchable] = []
        for index in range(first, min(pieces, first + 64)):
            verbs += [
                Allocate(0, wire.namespace, index, tokens(length, 10_000 + 1000 * index)),
                Commit(0, index, length),
                Free(0, index),
            ]
        wire.call(Batch, verbs)


def test_a_welcome_comes_after_what_was_asked_before_it() -> None:
    """Replies keep the order of their requests, though the Welcome travels by itself, with descriptors."""
    with running() as daemon, Wire(daemon.socket) as wire:
        wire.sock.sendall(
            encode(Ping(1)) + encode(Ping(2)) + encode(Hello(3, VERSION, "late")) + encode(Ping(4))
        )
        replies = [wire.reply() for _ in range(4)]
        assert [type(each) for each in replies] == [Pong, Pong, Welcome, Pong]
        assert [each.id for each in replies] == [1, 2, 3, 4]
        wire.number, wire.welcome = 4, replies[2]
        assert len(wire.descriptors) == 3


def test_a_flood_of_tiny_frames_is_answered_in_order_and_holds_nobody_up() -> None:
    """Tens of thousands of frames in one piece: all answered, and another client is served between them."""
    with running(reply_bytes=1 << 24) as daemon, Wire(daemon.socket) as flood, Wire(daemon.socket) as other:
        flood.hello()
        other.hello()
        count = 20_000
        flood.sock.sendall(b"".join(encode(Ping(number)) for number in range(2, count + 2)))
        slowest = 0.0
        for _ in range(50):
            began = time.perf_counter()
            other.call(Ping)
            slowest = max(slowest, time.perf_counter() - began)
        assert [flood.reply().id for _ in range(count)] == list(range(2, count + 2))
        flood.number = count + 1
        assert slowest < 0.25


def test_long_requests_in_a_batch_are_answered_in_its_order() -> None:
    """Room for long Allocates and Extends is made in slices inside a Batch too; its results keep their places."""
    with running(pools=[LARGE]) as daemon, Wire(daemon.socket) as wire, Wire(daemon.socket) as other:
        wire.hello(namespace=Namespace(tenant="long"))
        other.hello()
        fill(wire, 380, 150)
        number = wire.next_id()
        verbs: list[Batchable] = [
            Allocate(0, wire.namespace, 1000, tokens(20_000, 1 << 24)),
            Extend(0, 1000, written=20_000, tokens=10_000),
            Probe(0, wire.namespace, tokens(150, 10_000)),
            Free(0, 1000),
        ]
        wire.send(Batch(number, verbs))
        assert isinstance(other.call(Ping), Pong)
        results = wire.reply()
        assert isinstance(results, Results)
        assert [type(each) for each in results.results][:2] == [Admitted, Grown]
        assert isinstance(results.results[3], Done)
        grown = results.results[1]
        assert isinstance(grown, Grown)
        assert grown.capacity - grown.position == 10_000
        with Wire(daemon.socket) as control:
            assert control.call(Audit).faults == []


def test_a_batch_beyond_any_limit_is_no_batch() -> None:
    """More verbs than any daemon takes are refused while they are read, not after."""
    with running() as daemon, Wire(daemon.socket) as wire:
        wire.hello()
        wire.send(Batch(5, [Free(0, 1)] * 70_000))
        error = wire.reply()
        assert error.code == errors.BadRequest.code
        assert wire.closed()
        wire.welcome = None


def test_copies_that_were_not_made_are_not_published() -> None:
    """What stands in targets of copies is shareable once the client says that it has made them."""
    with running() as daemon, Wire(daemon.socket) as wire:
        wire.hello(namespace=Namespace(tenant="peel"), append="peel")
        wire.call(Allocate, wire.namespace, 1, tokens(20))
        wire.call(Commit, 1, 20)
        wire.call(Free, 1)
        wire.call(Allocate, wire.namespace, 2, tokens(20) + tokens(30, 500))
        # The slots behind the shared end belong to sequence 2 now: the next one peels.
        prompt = tokens(20) + tokens(12, 900)
        peeled = wire.call(Allocate, wire.namespace, 3, prompt)
        assert isinstance(peeled, Admitted)
        assert peeled.copies
        assert wire.call(Commit, 3, 32).length <= peeled.hit
        assert wire.call(Probe, wire.namespace, prompt).hit == peeled.hit
        assert wire.call(Commit, 3, 32, copied=1).length == 32
        assert wire.call(Probe, wire.namespace, prompt).hit == 31


def test_reader_cuts_a_flood_piece_by_piece() -> None:
    """A reader that is told to stop keeps the rest as it came, and gives it in order afterwards."""
    frames = [encode(Ping(number)) for number in range(1000)]
    stream = b"".join(frames)
    for step in (7, 4096, len(stream)):
        reader = Reader()
        bodies: list[bytes] = []
        for start in range(0, len(stream), step):
            bodies += [bytes(each) for each in reader.feed(stream[start : start + step], 100)]
            while reader.uncut:
                bodies += [bytes(each) for each in reader.cut(100)]
        assert bodies == [frame[4:] for frame in frames]
        assert not reader.pending


def test_clients_that_ask_once_and_leave_are_timed_as_well() -> None:
    """One turn in so many is timed whoever's it is: a hundred connections of one request each show up."""
    with running() as daemon:
        for _ in range(100):
            with Wire(daemon.socket) as wire:
                assert isinstance(wire.call(Ping), Pong)
        with Wire(daemon.socket) as wire:
            told = wire.call(Inspect, "latency")
            assert isinstance(told, Inspected)
            (row,) = [row for row in told.rows if row["verb"] == "Ping"]
        assert row["count"] == 100
        assert 1 <= row["sampled"] <= 200 // SAMPLE


@pytest.mark.parametrize("clients", [SAMPLE, 2 * SAMPLE])
def test_clients_that_ask_by_turns_are_all_timed(clients: int) -> None:
    """Which turn is timed follows no beat: each of so many clients that ask one after another has its share."""
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(running())
        wires = [stack.enter_context(Wire(daemon.socket)) for _ in range(clients)]
        for wire in wires:
            wire.hello()
        for _ in range(10 * SAMPLE):
            for place, wire in enumerate(wires):
                if place:
                    wire.call(Ping)
                else:
                    wire.call(Probe, wire.namespace, tokens(4))
        told = wires[0].call(Inspect, "latency")
        assert isinstance(told, Inspected)
        sampled = {row["verb"]: row["sampled"] for row in told.rows}
        assert 3 <= sampled["Probe"] <= 30  # 10 is its share
        assert sampled["Probe"] + sampled["Ping"] > 5 * clients
