"""Moved: tables change when a step begins, all at once, and whatever was kept back, cut or forked changes with them."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvslot import Client
from kvslot.api.client import Sequence, indices
from kvslot.api.client.session import Session
from kvslot.api.client.table import Table
from kvslot.api.wire import BEGAN, BUSY, COMPLETED, ENDED, EPOCH, SUBMITTED, BadRequest, PeerFault
from kvslot.api.wire.messages import (
    Admitted,
    Allocate,
    Batch,
    BatchReply,
    Extend,
    Fork,
    Forked,
    Grown,
    Hello,
    Later,
    Moved,
    Namespace,
    Results,
    Trim,
    Trimmed,
)

from ..tools.painting import Painter, ids, scatter
from .fake import Answer, fake, polite, welcome
from .followers import Misread, audit, compacted, live, marks, shuffled
from .test_table import Asking, expanded

ROOM = 8


class Telling:
    """A daemon that admits on slots 100, 200, ... and says what the test has put down ahead of its next reply."""

    def __init__(self) -> None:
        self.said: list[Moved] = []
        self.number = 0
        self.later = 0  # times that there is no room
        self.epoch = 0

    def say(self, sequence: int, position: int, extents: list[int], epoch: int = 0) -> None:
        self.epoch = epoch or self.epoch + 1
        self.said.append(Moved(self.epoch, sequence, position, extents))

    def __call__(self, request: Any) -> Iterator[Answer]:
        said, self.said = self.said, []
        yield from said
        match request:
            case Allocate() if self.later:
                self.later -= 1
                yield Later(request.id, 7, "memory", 1, 0, 0, 0, 1)
            case Allocate():
                self.number += 100
                capacity = len(request.tokens) // 4 + ROOM
                yield Admitted(request.id, 0, capacity, [self.number, capacity])
            case Batch(verbs=[Fork() as fork, Extend()]):
                results: list[BatchReply] = [
                    Forked(1, fork.length),
                    Grown(1, fork.length, fork.length + ROOM, [5000, ROOM]),
                ]
                yield Results(request.id, results)
            case Trim():
                yield Trimmed(request.id, request.keep_to + ROOM, [7000, ROOM])
            case Hello() if request.resume:
                yield welcome(request.id)
                self.said = []
            case _:
                yield from polite(request)


def hear(client: Client) -> None:
    """Has the client read what the daemon has said."""
    client.probe([1])


# -- when a step begins ---------------------------------------------------------------------------------------------


def test_a_table_changes_when_a_step_begins() -> None:
    """Until then, and whatever else is read meanwhile, it leads to the old slots; then to the new ones, joined."""
    daemon = Telling()
    with fake(daemon) as (path, _), Client(path, movable=True) as client:
        sequence = client.admit(range(10))
        daemon.say(sequence.id, 2, [40, 3, 50, 1])
        daemon.say(sequence.id, 6, [51, 2])
        hear(client)
        assert sequence.extents == [100, 18]
        assert client.epoch == client._words[EPOCH] == 0
        with client.step():
            assert sequence.extents == [100, 2, 40, 3, 50, 3, 108, 10]
            assert client.epoch == client._words[EPOCH] == 2
            assert sequence.append(7) == 110
        assert sequence.slot_of(5) == 50
        daemon.say(sequence.id, 2, [102, 6])
        hear(client)
        with client.step():
            assert sequence.extents == [100, 18]
        assert client.statistics().moves == 3


def test_the_stores_of_a_step_are_in_order() -> None:
    """Tables, EPOCH, BEGAN, SUBMITTED, BUSY; COMPLETED, ENDED, BUSY: what the daemon reads of a step holds for it."""
    daemon = Telling()
    with fake(daemon) as (path, _), Client(path, movable=True) as client:
        sequence = client.admit(range(10))
        stores: list[tuple[int, list[int]]] = []

        class Words(list[int]):
            def __setitem__(self, at: Any, value: Any) -> None:
                stores.append((at, list(sequence.extents)))
                super().__setitem__(at, value)

        client._words = Words([0] * 16)  # type: ignore[assignment]
        daemon.say(sequence.id, 0, [40, 10])
        hear(client)
        client.submit()
        moved = [40, 10, 110, 8]
        assert stores == [(EPOCH, moved), (BEGAN, moved), (SUBMITTED, moved), (BUSY, moved)]
        stores.clear()
        client.complete()
        assert [at for at, _ in stores] == [COMPLETED, ENDED, BUSY]


def test_busy_times_are_of_the_whole_stretch() -> None:
    """With steps that overlap BUSY rises once and falls once, and BEGAN and ENDED are when it did."""
    with fake(polite) as (path, _), Client(path, movable=True) as client:
        words = client._words
        client.submit()
        began = words[BEGAN]
        client.submit()
        client.complete(1)
        assert words[BUSY] == 1
        assert words[BEGAN] == began
        assert words[ENDED] == 0
        client.complete(2)
        assert words[BUSY] == 0
        ended = words[ENDED]
        assert ended >= began > 0
        client.complete(2)  # of no step: nothing has ended
        assert words[ENDED] == ended
        client.submit()
        assert words[BEGAN] >= ended
        client.complete()


def test_an_interrupt_leaves_nothing_unapplied() -> None:
    """A step that was interrupted while it took over what moved has told nothing; the next one takes over all of it."""
    daemon = Telling()
    with fake(daemon) as (path, _), Client(path, movable=True) as client:
        both = [client.admit(range(10)) for _ in range(2)]
        for each in both:
            daemon.say(each.id, 0, [40 * each.id % 1000, 10])
        hear(client)
        wanted = [[40 * each.id % 1000, 10, each.extents[0] + 10, 8] for each in both]
        replace, left = Table._replace, 2

        def interrupted(table: Table, position: int, moved: list[int]) -> None:
            nonlocal left
            left -= 1
            replace(table, position, moved)
            if not left:
                raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Table, "_replace", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.submit()
            assert client._words[EPOCH] == client._words[SUBMITTED] == 0
            client.submit()
        assert [each.extents for each in both] == wanted
        assert client._words[EPOCH] == 2
        client.complete()


def test_who_waits_for_room_gives_old_places_back() -> None:
    """`admit` takes over what moved while it waits between steps: else it might wait for what it keeps itself."""
    daemon = Telling()
    with fake(daemon) as (path, _), Client(path, movable=True) as client:
        sequence = client.admit(range(10))
        daemon.later = 2
        daemon.say(sequence.id, 0, [40, 10])
        client.admit([1])
        assert sequence.extents == [40, 10, 110, 8]
        assert client.epoch == client._words[EPOCH] == 1
        assert client._words[SUBMITTED] == 0
        with client.step():  # while one is under way its tables are what they are
            daemon.later = 2
            daemon.say(sequence.id, 0, [70, 10])
            client.admit([1])
            assert sequence.extents == [40, 10, 110, 8]
        with client.step():
            assert sequence.extents == [70, 10, 110, 8]


# -- whose it is ----------------------------------------------------------------------------------------------------


def test_what_has_ended_counts_all_the_same() -> None:
    """Moves of sequences that were freed, or are not known, change no table, and their epoch is told."""
    daemon = Telling()
    with fake(daemon) as (path, _), Client(path, movable=True) as client:
        first, second = client.admit(range(10)), client.admit(range(10))
        daemon.say(first.id, 0, [40, 5])
        hear(client)
        first.free()
        daemon.say(first.id, 5, [45, 5])
        daemon.say(0, 0, [])
        hear(client)
        with client.step():
            assert client._words[EPOCH] == 3
        assert second.extents == [200, 18]


def test_a_fork_takes_along_what_its_parent_was_told() -> None:
    """What is pending for the parent when Forked comes holds for the child, up to where it begins to be itself."""
    daemon = Telling()
    with fake(daemon) as (path, _), Client(path, movable=True) as client:
        parent = client.admit(range(10))
        daemon.say(parent.id, 1, [40, 3])
        hear(client)
        daemon.say(parent.id, 4, [50, 4])  # heard on the way to Forked
        child = parent.fork(6)
        assert isinstance(child, Sequence)
        assert child.extents == [100, 6, 5000, 8]
        with client.step():
            assert child.extents == [100, 1, 40, 3, 50, 2, 5000, 8]
            assert parent.extents == [100, 1, 40, 3, 50, 4, 108, 10]
            assert [child.append(1), parent.append(1)] == [5000, 110]


def test_a_trim_cuts_what_is_pending() -> None:
    """What comes to stand where a roll-back cut is not what was moved."""
    daemon = Telling()
    with fake(daemon) as (path, _), Client(path, movable=True) as client:
        sequence = client.admit(range(10))
        daemon.say(sequence.id, 2, [40, 6])
        daemon.say(sequence.id, 8, [60, 2])
        hear(client)
        sequence.trim(keep_to=5)
        assert sequence.extents == [100, 5, 7000, 8]
        with client.step():
            assert sequence.extents == [100, 2, 40, 3, 7000, 8]
            assert sequence.append(1) == 7000


def test_what_is_said_again_is_known() -> None:
    """After a reconnect the daemon repeats itself: what was heard before changes nothing, the rest is taken over."""
    daemon = Telling()
    with fake(daemon) as (path, _), Client(path, movable=True) as client:
        sequence = client.admit(range(10))
        daemon.say(sequence.id, 2, [40, 2])
        hear(client)
        with client.step():
            pass
        daemon.say(sequence.id, 2, [60, 2])
        hear(client)
        client._connection.lost("a test cut it")
        client.reconnect()
        for epoch, at in enumerate((40, 60, 80), start=1):
            daemon.say(sequence.id, 2, [at, 2], epoch)
        hear(client)
        with client.step():
            assert sequence.extents == [100, 2, 80, 2, 104, 14]
            assert client.epoch == 3


@pytest.mark.parametrize(
    "moved",
    [
        Moved(3, 1, 0, [40, 5]),
        Moved(1, 1, -1, [40, 5]),
        Moved(1, 1, 0, [40, 5, 50]),
        Moved(1, 1, 0, [40, 0]),
        Moved(1, 1, 0, [-40, 5]),
    ],
)
def test_what_cannot_be_ends_the_connection(moved: Moved) -> None:
    """A gap is a move that was lost, and reading on would be reading what is another's; so is nonsense."""
    daemon = Telling()
    with fake(daemon) as (path, _), Client(path, movable=True) as client:
        assert client.admit(range(10)).id == 1
        daemon.said.append(moved)
        with pytest.raises(PeerFault):
            hear(client)
        with pytest.raises(PeerFault):
            client.submit()


@pytest.mark.parametrize("options", [{"page": 16}, {"append": "peel"}, {"map": False}])
def test_who_cannot_follow_is_told(options: dict[str, Any]) -> None:
    """Pages, peels and sessions without steps cannot follow moves, and are told before anything is opened."""
    with pytest.raises(BadRequest, match="movable needs"):
        Client("/nowhere", movable=True, **options)


def test_chain_is_what_movable_means() -> None:
    """The daemon is asked for chains, whatever the pool says, since nothing else is moved."""
    with fake(Telling()) as (path, requests), Client(path, movable=True):
        hello = requests[0]
        assert isinstance(hello, Hello)
        assert (hello.movable, hello.append) == (True, "chain")


# -- at random ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_a_table_leads_where_a_map_of_its_positions_would(seed: int) -> None:
    """Whatever is moved, cut, grown, forked and appended: each position's slot is the last that was said of it."""
    rng = random.Random(seed)
    fresh = iter(range(0, 10**9, 1000))
    tables: list[tuple[Asking, list[int], dict[int, int]]] = []  # a table, its slots, and those it will have

    def extents(count: int) -> list[int]:
        out: list[int] = []
        while count:
            n = rng.randint(1, count)
            at = next(fresh) if not out or rng.random() < 0.7 else out[-2] + out[-1]
            out += (at, n)
            count -= n
        return out

    for _ in range(3):
        length, table = rng.randint(1, 40), Asking()
        given = extents(length + rng.randint(0, 9))
        table._begin(length, Admitted(1, 0, sum(given[1::2]), given.copy()))
        tables.append((table, expanded(given), {}))
    for _ in range(120):
        index = rng.randrange(len(tables))
        table, have, will = tables[index]
        length = table.length
        match rng.randrange(6):
            case 0 | 1 if length:
                at = rng.randrange(length)
                moved = extents(rng.randint(1, length - at))
                table._will_move(at, moved)
                will.update(zip(range(at, length), expanded(moved), strict=False))
            case 2:
                table._follow()
                for position, slot in will.items():
                    have[position] = slot
                will.clear()
            case 3:
                keep = rng.randint(1, length)
                more = extents(rng.randint(1, 9))
                table._trimmed(keep, keep + sum(more[1::2]), more.copy())
                have[keep:] = expanded(more)
                for position in [position for position in will if position >= keep]:
                    del will[position]
            case 4 if len(tables) < 6:
                child, at = Asking(), rng.randint(1, length)
                child._fork_from(table, at)
                tables.append(
                    (child, have[:at], {position: slot for position, slot in will.items() if position < at})
                )
            case _:
                if not table.room:
                    more = extents(rng.randint(1, 9))
                    table._grown(Grown(1, table.capacity, table.capacity + sum(more[1::2]), more))
                    have += expanded(more)
                for token in range(rng.randint(1, table.room)):
                    slot = table.append(token)
                    assert slot == have[table.length - 1]
        assert expanded(table.extents) == have
        assert table.capacity == len(have)


def test_every_byte_is_right_while_all_of_it_moves() -> None:
    """Engines that run ahead, in a daemon that moves whatever can be moved, at any moment, and spoils free memory."""
    done: dict[str, int] = {}
    for seed in range(2):
        with shuffled(seed) as daemon:
            for what, count in live(str(daemon.socket), seed, 450).items():
                done[what] = done.get(what, 0) + count
            audit(str(daemon.socket))
    assert done["applied"] > 100, done
    assert {"forked with moves pending", "trimmed with moves pending", "reconnected", "hit", "read"} <= set(
        done
    ), done


def test_every_byte_is_right_beside_the_compactor() -> None:
    """The same with the daemon's own compactor, which moves what running sequences read, too."""
    holes = Namespace(tenant="holes")
    with (
        compacted(1) as daemon,
        Painter(daemon.socket, namespace=holes) as painter,
        Client(str(daemon.socket), namespace=holes, movable=True) as reader,
    ):
        # Short prompts all over the pool, of which one half is read and the other is not.
        kept = [ids(each) for each in scatter(painter, keep=0.3)]
        with reader.step():
            pass
        held = [
            (each, sequence) for each in kept[::2] if (sequence := reader.admit([*each, 7])).hit == len(each)
        ]
        assert len(held) > 20

        def look() -> None:
            reader.events(0.0)
            with reader.step():
                for tokens, sequence in held:
                    slots = [int(slot) for slot in indices.slot_indices(sequence)[: len(tokens)]]
                    assert painter.wrong(tokens, slots) == []

        live(str(daemon.socket), 1, 600, compacting=25, evicting=60, beside=look)
        look()
        audit(str(daemon.socket))
        assert reader.epoch > 2


def test_S19_an_old_place_is_read_until_the_last_step_that_may() -> None:
    """What was moved stands in its old slots, too, until it is applied and all steps of before have ended; then not."""
    prompt = list(range(100))
    with shuffled(1) as daemon, Client(str(daemon.socket), movable=True) as client:
        sequence = client.admit(prompt)
        with client.step():
            client.pool.plane("0.k")[indices.slot_indices(sequence)] = marks(prompt).reshape(-1, 1, 1)
        sequence.commit()

        def greedy() -> None:
            """Another client takes all the memory there is, and writes to it."""
            with Client(str(daemon.socket)) as other:
                while isinstance(taken := other.allocate([-1] * 40), Sequence):
                    with other.step():
                        other.pool.plane("0.k")[indices.slot_indices(taken, taken.hit)] = -1

        def reads(slots: Any) -> bool:
            return bool(
                (client.pool.plane("0.k")[slots].reshape(len(prompt), 8) == marks(prompt)[:, None]).all()
            )

        deadline = time.monotonic() + 30
        while True:
            client.submit()
            before = indices.slot_indices(
                sequence
            )  # as a captured graph would: of the step that is under way
            patience = time.monotonic() + 1
            while not sequence._moved and time.monotonic() < patience:
                client.events(0.01)
            if sequence._moved:
                break
            # Who has not stepped for two seconds is told of nothing.
            client.complete()
            assert time.monotonic() < deadline
        greedy()
        assert reads(before)  # told, and not applied
        client.submit()
        after = indices.slot_indices(sequence)
        assert (before != after).any()
        greedy()
        assert reads(before)  # applied, and the step of before is under way
        assert reads(after)
        client.complete()
        while reads(before) and time.monotonic() < deadline:
            client.events(0.01)
        assert not reads(before)  # ... and over: the old place is somebody else's
        with client.step():
            assert reads(indices.slot_indices(sequence))


def _nothing(table: Table) -> None:
    table._moved = []


def _no_legacy(table: Table, parent: Table, length: int) -> None:
    FORK_FROM(table, parent, length)
    table._moved = []


def _uncut(table: Table, capacity: int) -> None:
    moved, table._moved = table._moved, []
    CUT(table, capacity)
    table._moved = moved


def _a_step_late(session: Session) -> None:
    late = session.moved[:]
    session.moved.clear()
    if late:
        session.moved.append(late[0])
        FOLLOW(session)
        session.moved += late[1:]


FORK_FROM, CUT, FOLLOW = Table._fork_from, Table._cut, Session.follow
FAULTS = [
    (Table, "_follow", _nothing),
    (Table, "_fork_from", _no_legacy),
    (Table, "_cut", _uncut),
    (Session, "follow", _a_step_late),
]


@pytest.mark.parametrize(("kind", "name", "fault"), FAULTS)
def test_that_search_finds_what_it_looks_for(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, fault: Any
) -> None:
    """A client that tells what it has not applied, forgets a fork, or moves what was cut is found to misread."""
    monkeypatch.setattr(kind, name, fault)
    found = ""
    for seed in range(40):
        with shuffled(seed, code=None) as daemon, contextlib.suppress(PeerFault):
            try:
                live(str(daemon.socket), seed, 600)
            except Misread as misread:
                found = str(misread)
        if found:
            return
    raise AssertionError("a client that misreads was not found")
