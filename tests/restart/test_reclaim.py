"""Running sequences over a restart: they go on in the same slots with the same bytes, or are told that they cannot."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvslot import Client
from kvslot.api.client import Disconnected, Lost, Sequence
from kvslot.api.client.connection import Connection
from kvslot.api.client.indices import slot_indices
from kvslot.api.wire import VERSION, Namespace, SessionPage, errors
from kvslot.api.wire.messages import (
    Admitted,
    Allocate,
    Audit,
    Commit,
    Error,
    Hello,
    Reclaim,
    Reclaimed,
    Release,
    Welcome,
)

from ..faults.actors import child, rows, until
from ..tools.wire import Wire, tokens
from .killing import Kept, kept
from .test_return import PROMPT, back, fill, lose


def write(client: Client, sequence: Sequence, start: int, colours: list[int]) -> None:
    """Writes K and V of positions from `start` on."""
    slots = slot_indices(sequence, start, start + len(colours))
    for name in client.pool.planes:
        client.pool.plane(name)[slots] = np.array(colours)[:, None, None]


def read(client: Client, sequence: Sequence) -> list[int]:
    """What stands in its slots, from its first token on."""
    slots = slot_indices(sequence, 0, sequence.length)
    found = {tuple(client.pool.plane(name)[slots, 0, 0].tolist()) for name in client.pool.planes}
    (one,) = found
    return [int(each) for each in one]


def say(client: Client, sequence: Sequence, words: list[int]) -> None:
    """A step that appends and writes."""
    with client.step():
        start = sequence.length
        sequence.append_all(words)
        write(client, sequence, start, words)


@contextmanager
def checked(daemon: Kept) -> Iterator[None]:
    """Afterwards the daemon that serves finds nothing wrong with its pool."""
    yield
    with Wire(daemon.socket) as control:
        audited = control.call(Audit)
        assert not audited.faults, audited.faults


@pytest.mark.parametrize("options", [{}, {"page": 4}, {"append": "peel"}, {"movable": True}])
def test_a_sequence_goes_on_in_the_same_slots_with_the_same_bytes(options: dict[str, Any]) -> None:
    """What was written stands, more is appended behind it, and all of it is published in the end; over two restarts."""
    with kept([{"blocks": 33}]) as daemon, checked(daemon), Client(str(daemon.socket), **options) as client:
        fill(client, PROMPT)
        prompt = [*PROMPT, 7, 8, 9]
        with client.step():
            sequence = client.admit(prompt)
            client.pool.copy(sequence.take_copies())
            write(client, sequence, sequence.hit, prompt[sequence.hit :])
        said = list(range(2000, 2030))
        say(client, sequence, said[:10])
        sequence.commit(len(prompt) + 4)
        for more in (said[10:20], said[20:]):
            slots = slot_indices(sequence).tolist()
            epoch, hit = client.epoch, sequence.hit
            daemon.manager.kill()
            back(client)
            assert client.epoch > epoch
            assert slot_indices(sequence).tolist() == slots
            assert sequence.hit == hit
            say(client, sequence, more)
        assert read(client, sequence) == prompt + said
        assert sequence.commit() == len(prompt) + len(said)
        with Client(str(daemon.socket)) as other:
            assert other.probe([*prompt, *said, 1]) == len(prompt) + len(said)
        sequence.free()
        client.settle()
        with Wire(daemon.socket) as control:
            until(lambda: len(rows(control, "sessions")) == 1, 10.0, "the session of then is left")
            until(
                lambda: rows(control, "pools")[0]["quarantined"] == 0, 10.0, "slots are set aside for nobody"
            )
            assert rows(control, "pools")[0]["private"] == 0
            assert rows(control, "totals")[0]["sequences_reclaimed"] == 1  # of this start


def test_many_go_on_in_their_namespaces_with_their_room() -> None:
    """Each is what it was, with the room it had, beside one that was ended meanwhile; new ones come between."""
    with kept([{"blocks": 129}]) as daemon, checked(daemon), Client(str(daemon.socket)) as client:
        other = client.open_namespace(Namespace(tenant="other"))
        running = {}
        for number in range(20):
            prompt = list(range(number, number + 30))
            with client.step():
                sequence = client.admit(prompt, namespace=other if number % 2 else None, priority=number % 3)
                write(client, sequence, sequence.hit, prompt[sequence.hit :])
            if number % 3 == 0:
                sequence.commit()
            running[sequence] = prompt
        ended = next(iter(running))
        del running[ended]
        ended.free()
        client.settle()
        room = [each.room for each in running]
        with Wire(daemon.socket) as control:
            before = rows(control, "pools")[0]
        daemon.manager.kill()
        back(client)
        assert [each.room for each in running] == room
        with Wire(daemon.socket) as control:
            until(
                lambda: rows(control, "pools")[0]["quarantined"] == 0, 10.0, "slots are set aside for nobody"
            )
            after = rows(control, "pools")[0]
        assert {name: after[name] for name in ("private", "cached", "free", "sequences")} == {
            name: before[name] for name in ("private", "cached", "free", "sequences")
        }
        for number, (sequence, prompt) in enumerate(running.items()):
            say(client, sequence, [5000 + number])
            assert read(client, sequence) == [*prompt, 5000 + number]
            sequence.free()


def test_what_nobody_heard_the_answer_to() -> None:
    """A commit under way changes nothing: it is said again.  What was being cut is lost: its slots may be others'."""
    with kept([{"blocks": 33}]) as daemon, checked(daemon), Client(str(daemon.socket), timeout=0.5) as client:
        sequences = []
        for start in (1000, 2000):
            prompt = list(range(start, start + 30))
            with client.step():
                sequence = client.admit(prompt)
                write(client, sequence, 0, prompt)
            say(client, sequence, [1, 2, 3])
            sequences.append(sequence)
        first, second = sequences
        first.commit()
        os.kill(daemon.manager.pid, signal.SIGSTOP)
        with pytest.raises(Disconnected):
            second.commit()
        daemon.manager.kill()
        back(client)
        assert second.commit() == 33
        assert client.probe([*range(2000, 2030), 1, 2, 3, 4]) == 33
        os.kill(daemon.manager.pid, signal.SIGSTOP)
        with pytest.raises(Disconnected):
            first.trim(keep_to=20)
        daemon.manager.kill()
        back(client)
        with pytest.raises(Lost):
            first.append(1)
        say(client, second, [4])
        assert read(client, second) == [*range(2000, 2030), 1, 2, 3, 4]


def test_of_forks_that_share_what_neither_has_committed_one_goes_on() -> None:
    """Where a slot is two sequences' own only one can have it; with what they share committed both go on."""
    with kept([{"blocks": 33}]) as daemon, checked(daemon), Client(str(daemon.socket)) as client:
        parents = []
        for start in (1000, 2000):
            prompt = list(range(start, start + 30))
            with client.step():
                parent = client.admit(prompt)
                write(client, parent, 0, prompt)
            parents.append(parent)
        parents[0].commit()
        family = []
        for parent in parents:
            fork = parent.fork()
            assert isinstance(fork, Sequence)
            family.append((parent, fork))
        daemon.manager.kill()
        back(client)
        assert [sum(each.ended for each in both) for both in family] == [0, 1]
        for number, sequence in enumerate(family[0]):
            say(client, sequence, [number])
            assert read(client, sequence) == [*range(1000, 1030), number]


def test_a_step_that_failed_with_its_connection() -> None:
    """What it did not write is the engine's to take back: until it says that the step is over no sequence goes on."""
    with kept([{"blocks": 33}]) as daemon, checked(daemon), Client(str(daemon.socket)) as client:
        with client.step():
            sequence = client.admit(PROMPT)
            write(client, sequence, 0, PROMPT)
        for says_so in (True, False):
            with contextlib.suppress(Disconnected), client.step():
                sequence.append(77)
                daemon.manager.kill()
                client.probe(PROMPT)
                raise AssertionError("the dead answer")
            if says_so:
                sequence.trim(keep_to=len(PROMPT))
                with pytest.raises(Disconnected):
                    client.complete()
            back(client)
            assert sequence.ended is not says_so
        with Client(str(daemon.socket)) as other:
            assert other.probe([*PROMPT, 77, 78]) == 0


def test_a_step_that_ended_without_its_connection() -> None:
    """A step whose work was done is over, though nobody could be told."""
    with kept([{"blocks": 33}]) as daemon, checked(daemon), Client(str(daemon.socket)) as client:
        with client.step():
            sequence = client.admit(PROMPT)
            write(client, sequence, 0, PROMPT)
        numbers = [client.submit(), client.submit()]
        daemon.manager.kill()
        lose(client)
        for number in numbers:
            with pytest.raises(Disconnected):
                client.complete(number)
        client.reconnect()
        say(client, sequence, [5])
        assert read(client, sequence) == [*PROMPT, 5]


def used(daemon: Kept) -> tuple[int, int]:
    """Sequences and private slots of the pool."""
    with Wire(daemon.socket) as control:
        row = rows(control, "pools")[0]
        return row["sequences"], row["private"]


def some(client: Client, count: int) -> list[Sequence]:
    """Running sequences, written and not committed."""
    out = []
    for number in range(count):
        prompt = [number, *range(30)]
        with client.step():
            sequence = client.admit(prompt)
            write(client, sequence, 0, prompt)
        out.append(sequence)
    return out


def test_what_a_finalizer_frees_while_its_daemon_is_away() -> None:
    """It neither goes on nor breaks the return of the others, whether the collector came before or in the middle."""
    with kept([{"blocks": 65}]) as daemon, checked(daemon), Client(str(daemon.socket)) as client:
        sequences = some(client, 4)
        fork = sequences[3].fork()
        assert isinstance(fork, Sequence)
        daemon.manager.kill()
        lose(client)
        client.defer(sequences[0].free)
        client.defer(fork.free)
        asked = client._call

        def call(request: Any, kind: Any) -> Any:
            if isinstance(request, Reclaim) and request.sequence == sequences[1].id:
                client.defer(sequences[1].free)
                client.defer(sequences[2].free)
            return asked(request, kind)

        client._call = call  # type: ignore[method-assign]
        client.reconnect()
        del client._call
        client.settle()
        assert [each.ended for each in sequences] == [True, True, True, False]
        say(client, sequences[3], [5])
        assert used(daemon)[0] == 1
        sequences[3].free()
        client.settle()
        assert used(daemon) == (0, 0)


@pytest.mark.parametrize("how", ["lost", "interrupted"])
def test_a_sequence_whose_answer_nobody_heard_is_freed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon goes on with it, and its client was told that it ended: it is not left there."""
    with kept([{"blocks": 33}]) as daemon, checked(daemon), Client(str(daemon.socket)) as client:
        (sequence,) = some(client, 1)
        daemon.manager.kill()
        lose(client)
        receive = Connection.receive

        def unheard(self: Connection) -> Any:
            if how == "interrupted":
                raise KeyboardInterrupt
            receive(self)
            raise self.lost("planted")

        asked = client._call

        def call(request: Any, kind: Any) -> Any:
            with monkeypatch.context() as patch:
                if isinstance(request, Reclaim):
                    patch.setattr(Connection, "receive", unheard)
                return asked(request, kind)

        client._call = call  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt if how == "interrupted" else Disconnected):
            client.reconnect()
        del client._call
        assert sequence.ended
        if how == "lost":
            client.reconnect()
        client.settle()
        client.settle()
        assert used(daemon) == (0, 0)


def test_no_memory_for_the_new_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a page no step would be seen: the client stays without a connection, and has one with the next try."""
    with kept([{"blocks": 33}]) as daemon, checked(daemon), Client(str(daemon.socket)) as client:
        (sequence,) = some(client, 1)
        daemon.manager.kill()
        lose(client)

        def refuse(descriptor: int) -> SessionPage:
            raise OSError(errno.ENOMEM, "planted")

        with monkeypatch.context() as patch:
            patch.setattr("kvslot.api.client.client.SessionPage", refuse)
            with pytest.raises(OSError, match="planted"):
                client.reconnect()
        assert sequence.ended
        with pytest.raises(Disconnected, match="page"):
            client.submit()
        client.reconnect()
        step = client.submit()
        other = client.admit([1, 2, 3])
        other.free()
        client.settle()
        assert used(daemon) == (0, 0)
        with Wire(daemon.socket) as control:
            assert rows(control, "pools")[0]["fenced"] > 0, "nobody sees that a step is under way"
        client.complete(step)


def test_copies_that_were_taken_are_made_by_the_end_of_a_step() -> None:
    """Until then their sources may be needed, and would be another's once the session of then is released."""
    with (
        kept([{"blocks": 33}]) as daemon,
        checked(daemon),
        Client(str(daemon.socket), append="peel") as client,
    ):
        parents = some(client, 2)
        forks = []
        for made, parent in zip((True, False), parents, strict=True):
            fork = parent.fork()
            assert isinstance(fork, Sequence)
            copies = fork.take_copies()
            assert copies
            if made:
                with client.step():
                    client.pool.copy(copies)
            parent.free()
            forks.append(fork)
        client.settle()
        daemon.manager.kill()
        back(client)
        assert [each.ended for each in forks] == [False, True]
        assert read(client, forks[0]) == [0, *range(30)]


class Lived:
    """A session that outlived its daemon, with one sequence of its own, by the wire."""

    def __init__(self, daemon: Kept) -> None:
        self.then = Wire(daemon.socket)
        self.before = self.then.hello("then", namespace=Namespace(tenant="t"))
        answer = self.then.call(Allocate, self.before.namespace, 1, tokens(40))
        assert isinstance(answer, Admitted)
        self.then.call(Commit, 1, 20)
        self.extents = answer.extents
        daemon.manager.kill()
        self.wire = Wire(daemon.socket)
        welcome = self.wire.call(
            Hello, VERSION, "again", namespace=Namespace(tenant="t"), boot=self.before.boot,
            resume=self.before.session, secret=self.before.secret,
        )  # fmt: skip
        assert isinstance(welcome, Welcome)
        assert welcome.former == self.before.session
        self.wire.welcome = welcome
        self.wire.page = SessionPage(self.wire.descriptors[welcome.descriptors.index("page")])

    def __enter__(self) -> Lived:
        return self

    def __exit__(self, *_: object) -> None:
        self.then.close()
        self.wire.close()

    def reclaim(self, wire: Wire | None = None, **changes: Any) -> Any:
        wire = wire or self.wire
        said: dict[str, Any] = {
            "session": self.before.session, "secret": self.before.secret, "namespace": wire.namespace, "sequence": 1,
            "tokens": tokens(40), "extents": self.extents, **changes,
        }  # fmt: skip
        return wire.call(Reclaim, **said)


def test_what_cannot_be_reclaimed_is_refused_and_changes_nothing() -> None:
    """Every slot is looked at, and who asks for it; afterwards the sequence itself goes on all the same."""
    with kept([{"blocks": 33}]) as daemon, checked(daemon), Lived(daemon) as lived:
        slot, length = lived.extents
        none = 33 * 16
        wrong: list[tuple[dict[str, Any], type[errors.Refused]]] = [
            ({"secret": b"guess"}, errors.Ended),
            ({"session": 99}, errors.Ended),
            ({"namespace": 12345}, errors.NotFound),
            ({"tokens": b""}, errors.BadRequest),
            ({"tokens": b"123"}, errors.BadRequest),
            ({"tokens": tokens(length + 1)}, errors.BadRequest),
            ({"extents": []}, errors.BadRequest),
            ({"extents": [slot]}, errors.BadRequest),
            ({"extents": [slot, 0]}, errors.BadRequest),
            ({"extents": [0, length]}, errors.BadRequest),
            ({"extents": [none - 1, length]}, errors.BadRequest),
            ({"extents": [1 << 62, 1 << 62]}, errors.BadRequest),
            ({"extents": [slot, length, slot, length]}, errors.Ended),
            ({"extents": [slot, 30, slot + 25, 15]}, errors.BadRequest),
            ({"extents": [slot + 1, length - 1, slot, 1]}, errors.Ended),
            ({"extents": [none - 100, length]}, errors.Ended),
            ({"tokens": tokens(40, 1)}, errors.Ended),
            ({"priority": 8}, errors.BadRequest),
        ]
        for changes, code in wrong:
            answer = lived.reclaim(**changes)
            assert isinstance(answer, Error), changes
            assert answer.code == code.code, (changes, answer)
            with Wire(daemon.socket) as control:
                assert not control.call(Audit).faults
                assert rows(control, "pools")[0]["sequences"] == 0
        assert isinstance(lived.reclaim(), Reclaimed)
        assert lived.reclaim().code == errors.Exists.code
        assert lived.reclaim(sequence=2).code == errors.Ended.code, "it was given out twice"
        own = lived.wire.welcome
        assert own is not None
        assert lived.reclaim(session=own.session, secret=own.secret).code in (
            errors.OutOfTurn.code, errors.Exists.code,
        )  # fmt: skip
        assert lived.reclaim(sequence=2, session=own.session, secret=own.secret).code == errors.OutOfTurn.code
        lived.wire.call(Release, lived.before.session, lived.before.secret)
        assert lived.reclaim(sequence=2).code == errors.Ended.code


def test_nobody_else_can_reclaim() -> None:
    """Not another process, not another session's slots, not under another namespace's name."""

    def work(tell: Any) -> None:
        with Wire(daemon.socket) as wire:
            wire.hello("stranger", namespace=Namespace(tenant="t"))
            tell(lived.reclaim(wire).code)

    with kept([{"blocks": 33}]) as daemon, checked(daemon), Lived(daemon) as lived:
        with child(work) as stranger:
            assert stranger.heard() == errors.Denied.code
        with Wire(daemon.socket) as wire:
            wire.hello("another session of ours", namespace=Namespace(tenant="u"))
            # What is cached is cached for the other namespace only, and is not set aside.
            assert lived.reclaim(wire).code == errors.Ended.code
        assert isinstance(lived.reclaim(), Reclaimed)


def test_a_daemon_that_dies_while_sequences_come_back() -> None:
    """Those that were back go on once more; of the others each is told."""
    with kept([{"blocks": 129}]) as daemon, checked(daemon), Client(str(daemon.socket)) as client:
        running = {}
        for number in range(8):
            prompt = [number, *range(30)]
            with client.step():
                sequence = client.admit(prompt)
                write(client, sequence, 0, prompt)
            running[sequence] = prompt
        daemon.manager.kill()
        lose(client)
        asked = client._call
        left = 5

        def call(request: Any, kind: Any) -> Any:
            nonlocal left
            if isinstance(request, Reclaim):
                left -= 1
                if not left:
                    daemon.manager.kill()
            return asked(request, kind)

        client._call = call  # type: ignore[method-assign]
        with pytest.raises(Disconnected):
            client.reconnect()
        del client._call
        assert sum(each.ended for each in running) == 4
        back(client)
        on = [each for each in running if not each.ended]
        assert len(on) == 4
        for sequence in on:
            say(client, sequence, [77])
            assert read(client, sequence) == [*running[sequence], 77]
        with Wire(daemon.socket) as control:
            until(lambda: len(rows(control, "sessions")) == 1, 10.0, "a session of then is left")
            until(
                lambda: rows(control, "pools")[0]["quarantined"] == 0, 10.0, "slots are set aside for nobody"
            )
