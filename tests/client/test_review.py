"""What an engine relies on without a thought: no unwritten slot is published, no answer is lost, no step ends early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvslot import Client
from kvslot.api.client import AsyncClient, Connection, Lost, Sequence, indices
from kvslot.api.client.table import Table
from kvslot.api.wire import COMPLETED, PUSHES, BadRequest, Disconnected, Ended, OutOfTurn
from kvslot.api.wire.messages import (
    Admitted,
    Allocate,
    Batch,
    Commit,
    Committed,
    Done,
    Extend,
    Fork,
    Forked,
    Free,
    Grown,
    Later,
    Ready,
    Results,
    Trim,
    Trimmed,
)

from ..tools.daemon import Running, running
from .fake import Answer, fake, polite
from .test_table import Asking

ROOM = 8
PEELED: list[int] = [27, 600, 2]
"""The copies of a Grown that moves a sequence's last two tokens."""


class Peeling:
    """A daemon that admits on slots from 16 on with room for 8 more, and moves the last two tokens when it grows."""

    def __init__(self, *, admit_with: list[int] | None = None) -> None:
        self.commits: list[Commit] = []
        self.verbs: list[Any] = []
        self.capacity: dict[int, int] = {}
        self.admit_with = admit_with or []
        self.mute: Callable[[Any], bool] = lambda _: False
        """Whether the reply to a request is lost, and the connection with it."""

    def __call__(self, request: Any) -> Iterator[Answer]:
        verbs = request.verbs if isinstance(request, Batch) else [request]
        self.verbs += verbs
        results = [self.answer(verb) for verb in verbs]
        if any(self.mute(verb) for verb in verbs):
            yield None
        elif isinstance(request, Batch):
            yield Results(request.id, results)
        elif results[0] is not None:
            yield results[0]
        else:
            yield from polite(request)

    def answer(self, verb: Any) -> Any:
        match verb:
            case Allocate():
                n = self.capacity[verb.sequence] = len(verb.tokens) // 4 + ROOM
                return Admitted(verb.id, 0, n, [16, n], [*self.admit_with])
            case Extend():
                before = self.capacity[verb.sequence]
                self.capacity[verb.sequence] = before + 20
                return Grown(verb.id, before - 2, before + 20, [600, 22], [*PEELED])
            case Commit():
                self.commits.append(verb)
                return Committed(verb.id, verb.length, 0, 0)
            case Fork():
                self.capacity[verb.child] = verb.length
                return Forked(verb.id, verb.length)
            case Trim():
                if verb.keep_to >= 0:
                    self.capacity[verb.sequence] = verb.keep_to
                return Trimmed(verb.id, self.capacity[verb.sequence])
            case Free():
                return Done(verb.id)
            case _:
                return None

    def asked(self, kind: type) -> list[Any]:
        return [verb for verb in self.verbs if isinstance(verb, kind)]


def admitted(client: Client, tokens: int = 4) -> Sequence:
    sequence = client.allocate(range(tokens))
    assert isinstance(sequence, Sequence)
    return sequence


def appended(sequence: Sequence, count: int) -> None:
    for token in range(count):
        sequence.append(token)


def cut(client: Client) -> None:
    """The connection is lost with the reply that has come, and nobody has read."""
    assert client._connection.wait(5)
    client._connection.lost("a test cut it")


# -- copies and commits ----------------------------------------------------------------------------------------------


def test_a_waiting_commit_does_not_publish_what_its_own_frame_moved() -> None:
    """A commit that finds more room being asked for waits for the answer, and for its copies."""
    daemon = Peeling()
    with fake(daemon) as (path, _), Client(path, map=False, append="peel") as client:
        sequence = admitted(client)
        appended(sequence, ROOM)  # past half of its room: more is asked for with the next frame
        with pytest.raises(OutOfTurn, match="take_copies"):
            sequence.commit()
        assert not daemon.commits
        assert client.take_copies() == PEELED
        sequence.commit()
        assert [each.copied for each in daemon.commits] == [1]


@pytest.mark.parametrize("options", [{"append": "peel"}, {"page": 4}, {}], ids=str)
def test_a_question_under_way_is_settled_before_a_commit(options: dict[str, Any]) -> None:
    """Wherever the session may be given copies, a commit waits for answers that may bring some."""
    daemon = Peeling()
    with fake(daemon) as (path, _), Client(path, map=False, **options) as client:
        sequence = admitted(client)
        appended(sequence, ROOM)
        client.flush()  # asked, not answered
        with pytest.raises(OutOfTurn, match="take_copies"):
            sequence.commit()
        assert sequence.take_copies() == PEELED
        assert sequence.commit() == 4 + ROOM


def test_in_chains_a_commit_is_one_round_trip() -> None:
    """A session that is never given copies sends its commit behind the question, in one go."""
    with fake(chained) as (path, requests), Client(path, map=False, append="chain") as client:
        sequence = admitted(client, 4)
        appended(sequence, 9)
        calls = client.statistics().calls
        sequence.commit()
        assert client.statistics().calls == calls + 1
        assert [type(each) for each in requests[-2:]] == [Batch, Commit]


def chained(request: Any) -> Iterator[Answer]:
    """A daemon that adds room behind what is there."""
    match request:
        case Batch():
            yield Results(
                request.id,
                [
                    Grown(1, 20, 36, [36, 16]) if isinstance(verb, Extend) else Done(0)
                    for verb in request.verbs
                ],
            )
        case Commit():
            yield Committed(request.id, request.length, 0, 0)
        case _:
            yield from polite(request)


def test_a_posted_commit_counts_only_copies_that_are_made() -> None:
    """`commit(wait=False)` tells of no copies that nobody knew of when it was said."""
    daemon = Peeling(admit_with=[900, 16, 2])
    with fake(daemon) as (path, _), Client(path, map=False, append="peel") as client:
        sequence = admitted(client)
        assert sequence.take_copies() == [900, 16, 2]
        appended(sequence, ROOM)
        client.flush()
        sequence.commit(wait=False)
        client.settle()
        assert client.take_copies() == PEELED
        sequence.commit(wait=False)
        client.settle()
        assert [each.copied for each in daemon.commits] == [1, 2]


def test_copies_of_a_step_under_way_are_not_made_yet() -> None:
    """Copies taken in a step count for a commit without a length once that step has completed."""
    daemon = Peeling(admit_with=[900, 16, 2])
    with fake(daemon) as (path, _), Client(path, map=False, append="peel") as client:
        sequence = admitted(client)
        client.submit()
        client.take_copies()
        client.submit()
        sequence.commit(wait=False)
        client.complete(1)
        sequence.commit(2, wait=False)  # who names a length says that it is there
        client.submit()
        client.complete(2)
        sequence.commit(wait=False)
        client.complete()
        client.settle()
        assert [each.copied for each in daemon.commits] == [0, 1, 1]


def test_a_fork_shares_nothing_that_was_moved_and_not_copied() -> None:
    """A parent whose ticket gets Ready while it settles is not moved between its copies and the fork."""
    daemon = Peeling()
    tickets = iter([7])

    def answering(request: Any) -> Iterator[Answer]:
        if isinstance(request, Batch) and isinstance(request.verbs[0], Extend) and next(tickets, 0):
            # Ready comes ahead of the last answer under way, so that the parent would be asked for again.
            yield Results(request.id, [Later(1, 7, "memory", 8, 0, 0, 0, 60_000)])
            yield Ready(7)
        else:
            yield from daemon(request)

    with fake(answering) as (path, requests), Client(path, map=False, append="peel") as client:
        sequence = admitted(client)
        appended(sequence, ROOM)
        client.flush()
        client.settle()
        deadline = time.monotonic() + 5
        while sequence._asked != 1:  # Ready: due again
            client.events(0.01)
            assert time.monotonic() < deadline
        child = sequence.fork(6)
        assert isinstance(child, Sequence)
        last = requests[-1]
        assert isinstance(last, Batch)
        assert [type(verb) for verb in last.verbs] == [Fork, Extend]
        assert last.verbs[1].sequence == child.id  # type: ignore[union-attr]
        assert not [verb for verb in daemon.asked(Extend) if verb.sequence == sequence.id]
        child.take_copies()
        child.commit(wait=False)
        client.settle()
        assert [each.copied for each in daemon.commits] == [1]


def test_the_asynchronous_client_counts_copies_too() -> None:
    """AsyncClient's commit waits for answers under way, and says of how many the copies were taken."""
    daemon = Peeling(admit_with=[900, 16, 2])

    async def main(path: str) -> None:
        async with AsyncClient(path, append="peel") as client:
            sequence = await client.admit(range(4))
            sequence.take_copies()
            for token in range(ROOM):
                await sequence.append(token)
            with pytest.raises(OutOfTurn, match="take_copies"):
                await sequence.commit()
            assert sequence.take_copies() == PEELED
            await sequence.commit()
            assert [each.copied for each in daemon.commits] == [2]

    with fake(daemon) as (path, _):
        asyncio.run(main(path))


def test_copies_that_a_roll_back_drops_are_waited_for_by_nobody() -> None:
    """Cut off with their positions, they count as done: the daemon writes them off at the same time."""
    table = Asking()
    table._begin(4, Admitted(1, 0, 12, [16, 12], [900, 16, 2]))
    table.take_copies()
    table._seat(12)
    table._grown(Grown(1, 10, 32, [600, 22], [26, 600, 2]))
    assert table._copied(0, 0) == 1
    table._trimmed(8, 8, [])
    assert table.copies == []
    assert table._copied(0, 0) == 2


# -- lost connections ------------------------------------------------------------------------------------------------


def test_a_sequence_that_may_have_been_moved_is_lost() -> None:
    """Where an answer that may have moved a sequence is lost, its next use says so, and its memory went back."""
    daemon = Peeling()
    with fake(daemon) as (path, _), Client(path, map=False, append="peel") as client:
        sequence, other = admitted(client), admitted(client)
        appended(sequence, ROOM)
        client.settle()
        sequence.take_copies()
        appended(sequence, sequence.room)  # half used: due
        assert (
            sequence.commit(wait=False) == sequence.capacity
        )  # published to its end: the next Grown may copy its tail
        daemon.mute = lambda verb: isinstance(verb, Extend)
        client.flush()
        with pytest.raises(Disconnected):
            client.settle()
        daemon.mute = lambda _: False
        client.reconnect()
        for use in (sequence.commit, sequence.fork, lambda: sequence.append(1), lambda: sequence.reserve(1)):
            with pytest.raises(Lost, match="start it over"):
                use()
        with pytest.raises(Ended):
            sequence.trim(keep_to=1)
        sequence.free()  # nothing, and no error: it was freed
        assert [each.sequence for each in daemon.asked(Free)] == [sequence.id]
        assert client.sequences == [other]
        assert other.commit() == 4


@pytest.mark.parametrize(("page", "prompt", "lost"), [(4, 5, True), (4, 4, False)])
def test_pages_are_moved_only_where_one_is_begun(page: int, prompt: int, lost: bool) -> None:
    """A sequence of whole pages goes on after a lost answer; one whose last page has only begun may have been moved."""
    daemon = Peeling()
    with fake(daemon) as (path, _), Client(path, map=False, page=page) as client:
        sequence = admitted(client, prompt)  # room for 8 more: two pages
        appended(sequence, ROOM)
        daemon.mute = lambda verb: isinstance(verb, Extend)
        client.flush()
        with pytest.raises(Disconnected):
            client.settle()
        daemon.mute = lambda _: False
        client.reconnect()
        assert sequence.ended is lost
        if not lost:
            assert daemon.asked(Trim)[-1].keep_to == sequence.length == sequence.capacity
            # What comes after it begins where the sequence ends, and is counted from one.
            daemon.answer = lambda verb, own=daemon.answer: (  # type: ignore[method-assign,misc]
                Grown(verb.id, 12, 20, [700, 8]) if isinstance(verb, Extend) else own(verb)
            )
            assert sequence.append(1) == 700
            sequence.commit()
            assert daemon.commits[-1].copied == 0


def test_a_tail_of_ones_own_is_not_moved() -> None:
    """A sequence that ends in slots nobody else reads survives a lost answer: there was nothing to be copied."""
    daemon = Peeling()
    with fake(daemon) as (path, _), Client(path, map=False, append="peel") as client:
        sequence = admitted(client)
        appended(sequence, ROOM)
        daemon.mute = lambda verb: isinstance(verb, Extend)
        client.flush()
        with pytest.raises(Disconnected):
            client.settle()
        daemon.mute = lambda _: False
        client.reconnect()
        assert sequence.commit() == 4 + ROOM
        assert daemon.commits[-1].copied == 0


def test_a_trim_nobody_heard_of_is_made() -> None:
    """After a cut in the middle of a roll-back the sequence is as short as was asked, here as there."""
    daemon = Peeling()
    with fake(daemon) as (path, _), Client(path, map=False, append="chain") as client:
        sequence = admitted(client, 10)
        daemon.mute = lambda verb: isinstance(verb, Trim)
        with pytest.raises(Disconnected):
            sequence.trim(keep_to=6)
        daemon.mute = lambda _: False
        client.reconnect()
        assert (sequence.length, sequence.capacity) == (6, 6)
        assert [each.keep_to for each in daemon.asked(Trim)] == [6, 6]


def test_a_roll_back_never_writes_over_a_lost_commit() -> None:
    """Tokens of a commit that nobody heard of may be published: cutting into them is asked of the daemon."""
    daemon = Peeling()
    with fake(daemon) as (path, _), Client(path, map=False, append="chain") as client:
        sequence = admitted(client, 4)
        appended(sequence, 2)
        daemon.mute = lambda verb: isinstance(verb, Commit)
        with pytest.raises(Disconnected):
            sequence.commit()
        daemon.mute = lambda _: False
        client.reconnect()
        sequence.trim(keep_to=5)
        assert [each.keep_to for each in daemon.asked(Trim)][-1:] == [5]


def test_what_is_to_be_said_again_outlives_a_second_cut() -> None:
    """A free that is said again while the connection is lost once more is said by the next reconnect."""
    daemon = Peeling()
    with fake(daemon) as (path, _), Client(path, map=False) as client:
        first, second = admitted(client), admitted(client)
        numbers = [first.id, second.id]
        first.free()
        second.free()
        daemon.mute = lambda verb: isinstance(verb, Free)
        client.flush()
        for attempt in (client.settle, client.reconnect):
            with pytest.raises(Disconnected):
                attempt()
        daemon.mute = lambda _: False
        daemon.verbs.clear()
        client.reconnect()
        assert {each.sequence for each in daemon.asked(Free)} == set(numbers)


# -- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trim", [Table._roll_back, lambda table, to: table._trimmed(to, 200, [118, 200 - to])]
)
def test_what_was_rolled_back_counts_as_written_no_more(trim: Callable[[Table, int], None]) -> None:
    """Tokens that take the place of others after a roll-back are written when their own steps have completed."""
    table = Asking()
    table._begin(100, Admitted(1, 0, 200, [16, 200]))
    for token in range(10):
        table._pending.append(token)
        table._slot += 1
    table._finished(1, 0)  # in step 1 there are 110, surely written once step 2 has completed
    trim(table, 102)
    for token in range(2):  # in steps 3 and 4
        table._pending.append(token)
        table._slot += 1
    assert table.length == 104
    assert table._finished(4, 2) == 102


# -- steps and fences ------------------------------------------------------------------------------------------------


def test_a_fence_needs_a_page() -> None:
    """Who names a step that the daemon cannot see is told so, and nothing is given back."""
    daemon = Peeling()
    with fake(daemon) as (path, _), Client(path, map=False) as client:
        sequence = admitted(client)
        with client.step() as step:
            for use in (lambda: sequence.free(fence=step), lambda: sequence.trim(keep_to=2, fence=step)):
                with pytest.raises(BadRequest, match="map=False"):
                    use()
            assert sequence.length == 4
        sequence.trim(keep_to=2, fence=0)
        sequence.free(fence=0)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    """A real one, for what goes through the page."""
    with running(pools=[{"blocks": 257, "append": "peel"}]) as it:
        yield it


def test_an_error_completes_no_step_that_is_under_way(daemon: Running) -> None:
    """A block left by an error completes its own step, and only where none before it is still under way."""
    with Client(str(daemon.socket)) as client:
        with pytest.raises(ZeroDivisionError), client.step():
            raise ZeroDivisionError
        assert client._words[COMPLETED] == 1
        ahead = client.submit()
        with pytest.raises(ZeroDivisionError), client.step():
            raise ZeroDivisionError
        assert client._words[COMPLETED] == 1
        client.complete(ahead)
        with pytest.raises(ZeroDivisionError), client.step():
            raise ZeroDivisionError
        assert client._words[COMPLETED] == ahead
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the engine runs ahead within its block
            client.complete(client.submit())
            with client.step():
                client.submit()
                raise ZeroDivisionError
        assert client._words[COMPLETED] == client._submitted - 1
        with client.step() as number:
            client.submit()
        assert client._words[COMPLETED] == number
        client.complete()


def polls(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """From here on there is nothing to be read; who looked all the same."""
    looked: list[Connection] = []

    def poll(connection: Connection) -> None:
        looked.append(connection)

    monkeypatch.setattr(Connection, "poll", poll)
    return looked


def test_a_push_that_came_with_the_welcome_is_read(monkeypatch: pytest.MonkeyPatch, daemon: Running) -> None:
    """What is pushed before the client looks at its page for the first time is taken in by the next step."""
    opened: Callable[..., None] = Client._listen

    def late(client: Client) -> None:
        client._words[PUSHES] += 1  # as the daemon does when it pushes
        opened(client)

    monkeypatch.setattr(Client, "_listen", late)
    with Client(str(daemon.socket)) as client:
        looked = polls(monkeypatch)
        client.submit()
        assert looked
        client.complete()


def test_pushes_of_a_lost_connection_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, daemon: Running
) -> None:
    """After a reconnect the page's count begins anew on both sides: a step that was told nothing looks at no socket."""
    with Client(str(daemon.socket)) as client:
        client._words[PUSHES] = 5  # of which two were lost with the connection
        client._session.pushes = 3
        client._connection.lost("a test cut it")
        client.reconnect()
        looked = polls(monkeypatch)
        client.submit()
        assert not looked
        client._words[PUSHES] += 1
        client.submit()
        assert looked
        client._words[PUSHES] -= 1
        client.complete()


def test_a_lost_grown_of_a_real_daemon_publishes_nothing(daemon: Running) -> None:
    """Whatever is lost, what another client then finds cached reads as it was computed."""
    with Client(str(daemon.socket), append="peel") as client, Client(str(daemon.socket)) as other:
        name = next(iter(client.pool.planes))
        plane = client.pool.plane(name)
        prompt = list(range(1000, 1021))
        first = client.admit(prompt)
        plane[indices.slot_indices(first)] = 7
        first.commit()
        child = first.fork()
        assert isinstance(child, Sequence)
        client.pool.copy(client.take_copies())
        neighbour = client.admit([5, 6, 7])
        for token in range(child.room):
            plane[child.append(token)] = 7
        child.commit(wait=False)  # to its end, and behind it in the frame leaves the question for more
        client.flush()
        cut(client)
        client.reconnect()
        assert child.ended
        child.free()
        tokens = prompt + list(range(200))
        found = other.admit(tokens)
        assert found.hit >= 20
        theirs = other.pool.plane(name)
        assert (np.asarray(theirs[indices.slot_indices(found, 0, found.hit)]) == 7).all()
        neighbour.free()
        del plane, theirs


def test_a_fork_of_what_can_be_committed_no_further_cannot_be_either() -> None:
    """Where a commit was lost, the daemon may know fewer tokens than were told, of a fork as of its parent."""
    with fake(Peeling()) as (path, _), Client(path, append="chain") as client:
        sequence = client.admit(range(10))
        sequence.append(7)
        sequence.commit(wait=False)
        client.flush()
        client._connection.lost("a test cut it")
        client.reconnect()
        child = sequence.fork()
        assert isinstance(child, Sequence)
        for each in (sequence, child):
            with pytest.raises(Disconnected, match="nobody knows"):
                each.commit()
