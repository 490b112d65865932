"""Whatever bytes come, the daemon answers or closes, and nobody else notices (S37)."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from kvslot.api.wire import encode, errors, messages
from kvslot.api.wire.messages import (
    Admitted,
    Committed,
    Error,
    Free,
    Inspect,
    Inspected,
    Namespace,
    Ping,
    Pong,
    Probe,
)

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens
from . import fuzzing
from .actors import child, empty, events

FRAMES = 100_000
BLOCK = 2_000  # frames of one seed
GROWTH_KIB = 5 << 10


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    with running() as daemon:
        yield daemon


@contextmanager
def bystander(daemon: Running) -> Iterator[Wire]:
    """A session that must not notice; afterwards its cached prompt is still there and still its own."""
    with Wire(daemon.socket) as wire:
        wire.hello("bystander", namespace=Namespace(tenant="bystander"), map=False)
        assert isinstance(wire.call(messages.Allocate, wire.namespace, 1, tokens(64)), Admitted)
        assert isinstance(wire.call(messages.Commit, 1, 64), Committed)
        yield wire
        assert wire.call(Probe, wire.namespace, tokens(64)).hit == 63
        wire.call(Free, 1)


def test_S37_a_hundred_thousand_frames(daemon: Running) -> None:
    """Mutated frames over many connections: typed answers or a closed connection; the daemon stays as it was."""

    def work(tell: Callable[[Any], None]) -> None:
        for seed in range(-10, 0):
            fuzzing.flood(daemon.socket, seed, 300)  # what a daemon keeps once it has served anything
        tell(0)
        for seed in range(FRAMES // BLOCK):
            tell(fuzzing.flood(daemon.socket, seed, BLOCK))

    # A process of its own: sessions with memory that it leaves behind last as long as it does.
    with bystander(daemon) as wire, child(work) as sender:
        sender.heard()
        rss = daemon.rss_kib()
        began = time.monotonic()
        closed = 0
        for _ in range(FRAMES // BLOCK):
            closed += sender.heard()
            assert wire.call(Probe, wire.namespace, tokens(64)).hit == 63
    seconds = time.monotonic() - began
    assert closed > 1000, "too few frames were bad"
    assert daemon.rss_kib() - rss < GROWTH_KIB
    empty(daemon)
    lines = Counter(event["event"] for event in events(daemon))
    assert lines["peer_fault"] <= seconds + 5
    assert lines["posted_refused"] <= seconds / 10 + 2
    told = sum(event.get("suppressed", 0) + 1 for event in events(daemon) if event["event"] == "peer_fault")
    assert told >= closed / 2, "the count of what was left out"
    assert not lines["internal_fault"]


def _truncations() -> list[bytes]:
    """A request of every kind."""
    return [
        encode(messages.Hello(1, 1, "cut", secret=b"x" * 16)),
        encode(messages.Allocate(2, 1, 7, tokens(20), contiguous=True)),
        encode(messages.Batch(3, [Free(0, 7), Probe(0, 1, tokens(3))])),
    ]


def test_S37_a_body_cut_short_at_every_byte(daemon: Running) -> None:
    """With a length that is true to what is left of it: refused, never read as something else that is not there."""
    for whole in _truncations():
        for stop in range(5, len(whole)):
            body = whole[4:stop]
            with Wire(daemon.socket) as wire:
                wire.sock.sendall(fuzzing.frame(body))
                error = wire.reply()
                assert isinstance(error, Error), (body, error)
                assert error.code == errors.BadRequest.code, (body, error)
                assert wire.closed()


def test_S37_a_stream_cut_at_every_byte(daemon: Running) -> None:
    """The daemon waits for the rest, and forgets the half with the connection; byte by byte is as good as whole."""
    whole = b"".join([encode(messages.Hello(1, 1, "cut", map=False)), encode(Ping(2))])
    for stop in range(len(whole)):
        with Wire(daemon.socket) as wire:
            wire.sock.sendall(whole[:stop])
    with Wire(daemon.socket) as wire:
        for each in whole:
            wire.sock.sendall(bytes([each]))
        assert isinstance(wire.reply(), messages.Welcome)
        assert isinstance(wire.reply(), Pong)
        wire.bye()
    empty(daemon)


@pytest.mark.parametrize("length", [0, fuzzing.LIMIT + 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_S37_lying_lengths(daemon: Running, length: int) -> None:
    """A length of nothing or beyond the limit ends the connection at once, at the cost of four bytes."""
    rss = daemon.rss_kib()
    with Wire(daemon.socket) as wire:
        wire.hello(map=False)
        wire.sock.sendall(length.to_bytes(4, "little") + b"x" * 100)
        error = wire.reply()
        assert error.code == errors.BadRequest.code
        assert str(fuzzing.LIMIT) in error.message
        assert wire.closed()
    assert daemon.rss_kib() - rss < GROWTH_KIB


@pytest.mark.parametrize("bomb", range(len(fuzzing.depth_bombs())))
def test_S37_depth_bombs(daemon: Running, bomb: int) -> None:
    """Nests without end are refused, also where the version that wrote them put them behind what we know."""
    rss = daemon.rss_kib()
    with bystander(daemon) as other:
        for _ in range(3):
            with Wire(daemon.socket) as wire:
                wire.hello(map=False)
                wire.sock.sendall(fuzzing.depth_bombs()[bomb])
                error = wire.reply()
                assert isinstance(error, Error), error
                assert error.code == errors.BadRequest.code
                assert wire.closed()
            assert isinstance(other.call(Ping), Pong)
    # What the frame itself took was given back, or is there for the next.
    assert daemon.rss_kib() - rss < GROWTH_KIB + (fuzzing.LIMIT >> 9)


@pytest.mark.parametrize("body", fuzzing.RAW)
def test_S37_what_is_no_message(daemon: Running, body: bytes) -> None:
    """Headers that announce gigabytes, wrong types, numbers of no verb, replies sent as requests, keys twice."""
    with Wire(daemon.socket) as wire:
        wire.hello(map=False)
        began = time.monotonic()
        wire.sock.sendall(fuzzing.frame(body))
        error = wire.reply()
        assert isinstance(error, Error), error
        assert (error.id, error.code) == (0, errors.BadRequest.code), error
        assert wire.closed()
        assert time.monotonic() - began < 1.0


@pytest.mark.parametrize("value", [1.0, True, -1, 2**63, 2**64 - 1, float("nan"), None, "7", b"7", [7]])
def test_S37_numbers_that_are_none(daemon: Running, value: object) -> None:
    """Floats, booleans, negatives and what is beyond 2^63-1 are not numbers of sequences, lengths or fences (S69)."""
    for fields in (
        [9, 1, value],
        [5, 1, value],
        [5, 1, 2, value],
        [6, 1, 2, value],
        [4, 1, 1, value, tokens(4)],
    ):
        with Wire(daemon.socket) as wire:
            wire.hello(map=False)
            wire.sock.sendall(fuzzing.frame(fuzzing._pack(fields)))
            error = wire.reply()
            assert (error.id, error.code) == (0, errors.BadRequest.code), (fields, error)
            assert wire.closed()


def test_S37_more_fields_than_we_know_are_left_alone(daemon: Running) -> None:
    """A later version's request: fields behind the known ones are skipped, whatever they hold."""
    extra: list[object] = [1.5, None, {"a": [1, {"b": b"c"}]}, 2**64 - 1, -1, "x" * 1000, [[]]]
    with Wire(daemon.socket) as wire:
        wire.hello(map=False)
        wire.sock.sendall(fuzzing.frame(fuzzing._pack([18, 77, *extra])))
        assert wire.reply() == Pong(77, wire.welcome.boot if wire.welcome else 0)


def test_other_connections_are_served_meanwhile(daemon: Running) -> None:
    """While three processes send rubbish, another's requests are all answered, each well within a second."""

    def rubbish(tell: Callable[[Any], None]) -> None:
        tell("ready")
        for seed in count(1000 * os.getpid()):
            fuzzing.flood(daemon.socket, seed, 200)

    with child(rubbish) as one, child(rubbish) as two, child(rubbish) as three, bystander(daemon) as wire:
        assert [one.heard(), two.heard(), three.heard()] == ["ready"] * 3
        slowest = 0.0
        for _ in range(200):
            began = time.monotonic()
            assert isinstance(wire.call(Inspect, "status"), Inspected)
            assert wire.call(Probe, wire.namespace, tokens(64)).hit == 63
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 1.0
    empty(daemon)
