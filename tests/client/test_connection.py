"""The client against a daemon that misbehaves: each fault is one clear error, nothing is taken for what it is not."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvslot import Client
from kvslot.api.client import Control, Sequence
from kvslot.api.wire import (
    BadRequest,
    Disconnected,
    KvslotError,
    OutOfTurn,
    PeerFault,
    ShuttingDown,
    encode,
    messages,
)
from kvslot.api.wire.messages import (
    Admitted,
    Allocate,
    Batch,
    Done,
    Free,
    Grown,
    Hello,
    Later,
    Probe,
    Probed,
    Ready,
)

from .fake import Answer, fake, polite, welcome


def on(kind: type, *answers: Callable[[Any], Answer]) -> Callable[[Any], Iterator[Answer]]:
    """Polite, but for requests of one kind."""

    def answering(request: Any) -> Iterator[Answer]:
        if type(request) is kind:
            for answer in answers:
                yield answer(request)
        else:
            yield from polite(request)

    return answering


def opened(path: str, **options: Any) -> Client:
    return Client(path, map=False, **options)


@pytest.mark.parametrize(
    "answer",
    [
        lambda r: Probed(r.id + 1, 0),
        lambda r: Done(r.id),
        lambda r: encode(Probed(r.id, 0))[:-1] + b"\xc1",
        lambda r: b"\0\0\0\0",
        lambda r: b"\xff\xff\xff\xff",
        lambda r: messages.Results(r.id, []),
        lambda r: encode(Hello(r.id, 1, "a request")),
    ],
    ids=["wrong id", "wrong kind", "garbage", "length 0", "length beyond", "results of nothing", "a request"],
)
def test_an_answer_that_is_none_ends_the_connection(answer: Callable[[Any], Answer]) -> None:
    """Whatever comes in place of the reply is a PeerFault, and stays the reason for every later call."""
    with fake(on(Probe, answer)) as (path, _), opened(path) as client:
        for _ in range(2):
            with pytest.raises(PeerFault):
                client.probe([1])


def test_a_reply_in_pieces_with_pushes_before_it() -> None:
    """A reply that comes byte by byte behind pushes is the reply; the pushes are events, the last of each kind."""
    frames = b"".join(map(encode, (Ready(5), Ready(6), Ready(5))))
    pieces = [
        lambda r, i=i: (frames + encode(Probed(r.id, 3)))[i : i + 1]
        for i in range(len(frames) + len(encode(Probed(2, 3))))
    ]
    with fake(on(Probe, *pieces)) as (path, _), opened(path) as client:
        assert client.probe([1]) == 3
        assert client.events() == [Ready(5), Ready(6)]
        assert client.statistics().pushes == 3


def test_the_end_in_the_middle_of_a_reply() -> None:
    """A daemon that goes after half a reply is Disconnected, not half an answer."""
    with (
        fake(on(Probe, lambda r: encode(Probed(r.id, 3))[:5], lambda r: None)) as (path, _),
        opened(path) as client,
        pytest.raises(Disconnected, match="has ended"),
    ):
        client.probe([1])


def test_an_error_about_nothing_in_particular() -> None:
    """Error with id 0 is about the connection, which is over: Disconnected, for the reason that the daemon gave."""
    with (
        fake(on(Probe, lambda r: messages.Error(0, 11, "the daemon ends"))) as (path, _),
        opened(path) as client,
    ):
        for _ in range(2):
            with pytest.raises(Disconnected, match="the daemon ends") as error:
                client.probe([1])
            assert isinstance(error.value.__cause__, ShuttingDown)


def test_an_error_of_a_later_version() -> None:
    """A code that this version does not know is a plain refusal with its message."""
    with (
        fake(on(Probe, lambda r: messages.Error(r.id, 99, "too green"))) as (path, _),
        opened(path) as client,
    ):
        with pytest.raises(KvslotError, match="too green"):
            client.probe([1])
        assert client.statistics().calls == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda r: messages.Error(r.id, 1, "no"), BadRequest),
        (lambda r: Done(r.id), PeerFault),
        (lambda r: welcome(r.id, descriptors=["pool"]), PeerFault),
        (lambda r: None, Disconnected),
    ],
    ids=["refused", "no Welcome", "a descriptor that did not come", "gone"],
)
def test_a_session_that_does_not_open(answer: Callable[[Any], Answer], error: type[Exception]) -> None:
    """No client comes of a Hello that is not answered by a good Welcome."""
    with fake(on(Hello, answer)) as (path, _), pytest.raises(error):
        opened(path)


def test_a_daemon_that_does_not_answer() -> None:
    """After the time limit the connection is given up: a late reply must not be taken for another's."""
    with fake(on(Probe)) as (path, _), opened(path, timeout=0.05) as client:
        with pytest.raises(Disconnected, match="did not answer within the time limit"):
            client.probe([1])
        with pytest.raises(Disconnected):
            client.probe([1])
    silent = on(messages.Ping)
    with (
        fake(silent) as (path, _),
        Control(path, timeout=0.05) as control,
        pytest.raises(Disconnected, match="limit"),
    ):
        control.ping()


class Interrupt(Exception):
    """What a signal handler raises."""


def interrupted(call: Callable[[], Any]) -> None:
    """Runs `call`, which does not return, and interrupts it."""

    def handler(number: int, frame: Any) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(Interrupt):
            call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_call_leaves_the_stream_in_step() -> None:
    """The reply to a call that was interrupted is not taken for the next one's, and what it gave is given back."""
    late: list[Allocate] = []

    def slow(request: Any) -> Iterator[Answer]:
        if isinstance(request, Allocate) and not late:
            late.append(request)
            return
        if late and isinstance(request, Probe):
            yield from polite(late[0])
        yield from polite(request)

    with fake(slow) as (path, requests), opened(path) as client:
        interrupted(lambda: client.allocate([1, 2, 3]))
        assert client.probe([1]) == 0
        client.settle()
        freed = [verb for request in requests if isinstance(request, Batch) for verb in request.verbs]
        assert freed == [Free(0, late[0].sequence)]
        assert client.sequences == []


def test_an_interrupted_commit_is_told_once() -> None:
    """Tokens of a commit that was interrupted are not told again, once its reply shows that they were taken."""
    late: list[messages.Commit] = []

    def slow(request: Any) -> Iterator[Answer]:
        if isinstance(request, messages.Commit):
            late.append(request)
            return
        if late and isinstance(request, Probe):
            first = late.pop()
            yield messages.Committed(first.id, first.length, 1, 0)
        yield from polite(request)

    with fake(slow) as (path, requests), opened(path) as client:
        sequence = client.allocate([1, 2, 3])
        assert isinstance(sequence, Sequence)
        sequence.append(4)
        interrupted(sequence.commit)
        assert client.probe([1]) == 0
        sequence.append(5)
        sequence.commit(wait=False)
        client.flush()
        client.probe([1])
        told = [
            v.tokens
            for r in requests
            if isinstance(r, Batch)
            for v in r.verbs
            if isinstance(v, messages.Commit)
        ]
        assert told == [(5).to_bytes(4, "little")]


def test_no_more_verbs_in_a_frame_than_allowed() -> None:
    """What is posted in one go is cut into frames as the daemon's limits say, in order."""
    with fake(polite) as (path, requests), opened(path) as client:
        sequences = [client.allocate([1, 2]) for _ in range(150)]
        commits = sequences[:3]
        for each in commits:
            assert isinstance(each, Sequence)
            each.append_all(range(16))
            each.commit(wait=False)
        for each in sequences:
            assert isinstance(each, Sequence)
            each.free()
        client.settle()
        batches = [request.verbs for request in requests if isinstance(request, Batch)]
        assert max(map(len, batches)) <= 64
        assert [type(verb).__name__ for verbs in batches for verb in verbs] == ["Commit"] * 3 + ["Free"] * 150
        assert client.statistics().batches == len(batches)


def test_refills_are_asked_again_when_their_time_is_over() -> None:
    """A LATER for a refill is asked again with its ticket: after its time, or at once when Ready comes."""
    extends: list[messages.Extend] = []

    def short(request: Any) -> Iterator[Answer]:
        if isinstance(request, Batch):
            results: list[messages.BatchReply] = []
            for verb in request.verbs:
                assert isinstance(verb, messages.Extend)
                extends.append(verb)
                if len(extends) < 3:
                    results.append(Later(0, 9, "memory", 16, 0, 0, 0, 1 if len(extends) == 1 else 1_000_000))
                else:
                    results.append(Grown(0, 26, 42, [42, 16]))
            yield messages.Results(request.id, results)
            if len(extends) == 2:
                yield Ready(9)
        else:
            yield from polite(request)

    with fake(short) as (path, _), opened(path) as client:
        sequence = client.allocate(range(10))
        assert isinstance(sequence, Sequence)
        sequence.append_all(range(9))
        for _ in range(200):
            with client.step():
                pass
            client.settle()
            if len(extends) >= 3:
                break
            client.events(timeout=0.01)
        assert [extend.ticket for extend in extends] == [0, 9, 9]
        assert sequence.room == 23
        assert client.statistics().refused == 2
        assert client.statistics().waits == 0


def test_answers_of_the_wrong_shape_to_a_batch() -> None:
    """Too few results, results of another frame, or growth from nowhere end the connection."""
    wrong: list[Callable[[Any], Answer]] = [
        lambda r: messages.Results(r.id, []),
        lambda r: messages.Results(r.id + 1, [Done(0)]),
        lambda r: messages.Results(r.id, [Grown(0, 99, 120, [1, 2])]),
        lambda r: messages.Results(r.id, [Probed(0, 1)]),
        lambda r: Done(r.id),
    ]
    for answer in wrong:
        with fake(on(Batch, answer)) as (path, _), opened(path) as client:
            sequence = client.allocate(range(10))
            assert isinstance(sequence, Sequence)
            sequence.append_all(range(16))
            with pytest.raises(PeerFault):
                sequence.append(1)


def test_an_admission_that_does_not_add_up() -> None:
    """Extents that do not place what was asked for are no sequence."""
    with fake(on(Allocate, lambda r: Admitted(r.id, 0, 30, [16, 10]))) as (path, _), opened(path) as client:
        with pytest.raises(PeerFault, match="do not place"):
            client.allocate(range(10))
        assert client.sequences == []


def test_control_skips_pushes() -> None:
    """What the daemon pushes on a connection of control does not disturb its replies."""
    with fake(on(messages.Ping, lambda r: messages.Draining(5), lambda r: messages.Pong(r.id, 7))) as (
        path,
        _,
    ):
        with Control(path) as control:
            assert control.ping().boot == 7
        with pytest.raises(Disconnected, match="was closed"):
            control.ping()


def test_nothing_is_published_before_it_is_copied() -> None:
    """Where the client cannot make the copies itself, commit, fork and trim wait for whoever can."""
    copying = on(Allocate, lambda r: Admitted(r.id, 0, 20, [16, 20], [40, 16, 3]))
    with fake(copying) as (path, _), opened(path) as client:
        sequence = client.allocate(range(10))
        assert isinstance(sequence, Sequence)
        for use in (sequence.commit, sequence.fork, lambda: sequence.trim(keep_to=5)):
            with pytest.raises(OutOfTurn, match="take_copies"):
                use()
        assert client.take_copies() == [40, 16, 3]
        sequence.commit(wait=False)
