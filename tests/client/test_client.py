"""The blocking client against a real daemon."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvslot import Client
from kvslot.api.client import (
    AdmissionTimeout,
    Closed,
    Control,
    Later,
    Namespace,
    Never,
    NeverFits,
    OutOfRoom,
    Sequence,
    indices,
)
from kvslot.api.client.table import Table
from kvslot.api.wire import (
    BadRequest,
    Disconnected,
    Ended,
    KvslotError,
    NotFound,
    OutOfTurn,
    ShuttingDown,
    StaleSession,
    TooLarge,
    WrongVersion,
)
from kvslot.api.wire.messages import Draining, Preempt, Pressure, Ready

from ..tools.daemon import Running, running

POOLS: list[dict[str, Any]] = [
    {"name": "big", "blocks": 2049},
    {"name": "small", "blocks": 9, "watermark": 0.0},  # 128 usable slots
    {"name": "windowed", "blocks": 65, "windowed": True},
    {"name": "blocks", "blocks": 65, "opaque_block_bytes": 4096},
]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    """One daemon for all: each test brings its own clients, and tokens of its own."""
    with running(pools=POOLS, frame_bytes=1 << 20) as it:
        yield it


@pytest.fixture
def path(daemon: Running) -> Iterator[str]:
    """The socket; when the test is over nobody holds anything, and the daemon's books are right."""
    yield str(daemon.socket)
    with Control(str(daemon.socket)) as control:
        for pool in POOLS:
            assert control.audit(pool=pool["name"]).faults == []


def numbers(sequence: Table, stop: int | None = None) -> list[int]:
    """The slot of each token."""
    slots: list[int] = indices.slot_indices(sequence, 0, stop).tolist()
    return slots


def append(sequence: Sequence, count: int) -> None:
    """Appends so many tokens, whatever they are."""
    for token in range(count):
        sequence.append(token)


def paint(client: Client, sequence: Table, start: int, mark: int) -> None:
    """Writes what tells sequence and position into the slots of positions from `start` on, in every plane."""
    for name in client.pool.planes:
        plane = client.pool.plane(name)
        for position, slot in enumerate(numbers(sequence)[start:], start):
            plane[slot] = mark * 10_000 + position


def painted(client: Client, sequence: Table, mark: int, start: int = 0) -> bool:
    """Whether every token's slot still holds what `paint` wrote."""
    wanted = np.arange(start, sequence.length) + mark * 10_000
    slots = numbers(sequence)[start:]
    return all(
        (client.pool.plane(name)[slots].reshape(len(slots), -1) == wanted[:, None]).all()
        for name in client.pool.planes
    )


def test_a_prefix_is_computed_once(path: str) -> None:
    """What one client has written and committed another finds, to the byte, and only the rest is its own to write."""
    with Client(path) as one, Client(path, name="two") as two:
        first = one.admit(range(100))
        assert (first.hit, first.length) == (0, 100)
        paint(one, first, 0, 1)
        assert first.commit() == 100
        second = two.admit([*range(100), 7, 8, 9])
        assert (second.hit, second.length) == (100, 103)
        assert numbers(second, 100) == numbers(first)
        assert not set(numbers(second)[100:]) & set(numbers(first))
        slots = numbers(second, 100)
        for name in two.pool.planes:
            assert (two.pool.plane(name)[slots].reshape(100, -1)[:, 0] == np.arange(100) + 10_000).all()


def test_decoding_says_nothing_but_one_frame_a_step(path: str) -> None:
    """64 sequences decode side by side: no call, no waiting, at most a frame a step, and no slot is given twice."""
    with Client(path) as client:
        batch = [client.admit(range(1000 * i, 1000 * i + 5 + i % 7)) for i in range(64)]
        for mark, sequence in enumerate(batch):
            paint(client, sequence, 0, mark)
        client.settle()
        before = client.statistics()
        for step in range(100):
            frames = client.statistics().frames_sent
            with client.step() as number:
                assert number == step + 1
                for mark, sequence in enumerate(batch):
                    slot = sequence.append(step)
                    for name in client.pool.planes:
                        client.pool.plane(name)[slot] = mark * 10_000 + sequence.length - 1
            assert client.statistics().frames_sent <= frames + 1
            client.settle()  # a step takes longer than an answer
        after = client.statistics()
        assert after.calls == before.calls
        assert after.waits == 0
        assert after.refills >= 64 * 100 // 32
        assert after.steps_completed == 100
        assert all(painted(client, sequence, mark) for mark, sequence in enumerate(batch))
        slots = [slot for sequence in batch for slot in numbers(sequence)]
        assert len(slots) == len(set(slots))
        for sequence in batch:
            sequence.free()
        client.settle()
        assert client.statistics().posted_errors == 0


def test_appending_waits_when_the_daemon_is_behind(path: str) -> None:
    """An engine that appends faster than answers come waits for them, gets right slots, and the waits are counted."""
    with Client(path) as client:
        sequence = client.admit(range(20))
        slots = [sequence.append(i) for i in range(200)]
        assert slots == numbers(sequence)[20:]
        assert 0 < client.statistics().waits <= 200 // 4
        more = sequence.append_all(range(300))
        assert sum(more[1::2]) == 300
        assert sequence.length == 520
        assert numbers(sequence)[220:] == [
            s for i in range(0, len(more), 2) for s in range(more[i], more[i] + more[i + 1])
        ]
        assert sequence.commit() == 520
        assert client.probe([*range(20), *range(200), *range(300), 1]) == 520


def test_never_and_later_and_how_one_waits(path: str) -> None:
    """What cannot fit is refused at once with the limit; what does not fit now waits, until it does or time is up."""
    with Client(path, pool="small") as one, Client(path, pool="small") as two:
        with pytest.raises(NeverFits, match="128 is all") as never:
            one.admit(range(200))
        assert (never.value.needed, never.value.limit) == (200, 128)
        assert isinstance(one.allocate(range(200)), Never)
        held = one.admit(range(100))
        later = two.allocate(range(500, 600))
        assert isinstance(later, Later)
        two.withdraw(later.ticket)
        with pytest.raises(AdmissionTimeout, match=r"no room within 0\.05 s") as late:
            two.admit(range(500, 600), timeout=0.05)
        assert isinstance(late.value, TimeoutError)
        with pytest.raises(Ended):
            two.withdraw(late.value.answer.ticket)
        answers: list[Sequence] = []
        waiter = threading.Thread(target=lambda: answers.append(two.admit(range(500, 600), timeout=20)))
        waiter.start()
        held.free()
        one.flush()
        waiter.join()
        assert answers[0].length == 100
        answers[0].free()


def test_ready_tells_when_to_ask_again(path: str) -> None:
    """Who asks by `allocate` gets Ready for its ticket as an event, and what it waited for with the next try."""
    with Client(path, pool="small") as one, Client(path, pool="small") as two:
        held = one.admit(range(100))
        later = two.allocate(range(500, 600))
        assert isinstance(later, Later)
        held.free()
        one.settle()
        assert [type(each) for each in two.events(timeout=20)] == [Ready]
        assert isinstance(two.allocate(range(500, 600), ticket=later.ticket), Sequence)


def test_out_of_room_and_on_again(path: str) -> None:
    """A sequence that cannot grow says what is needed and free; it is intact, and goes on when there is room again."""
    with Client(path, pool="small") as client:
        other = client.admit(range(1000, 1060))
        sequence = client.admit(range(30))
        with pytest.raises(OutOfRoom, match="slots are needed") as full:
            append(sequence, 128)
        assert isinstance(full.value.answer, Later)
        length = sequence.length
        assert length == sequence.capacity
        with pytest.raises(OutOfRoom):
            sequence.append(0)
        other.free()
        client.settle()
        deadline = 200
        while deadline:
            try:
                assert sequence.append(5) not in numbers(sequence, length)
                break
            except OutOfRoom:
                client.events(timeout=0.02)
                deadline -= 1
        assert sequence.length == length + 1
        with pytest.raises(OutOfRoom, match="is the limit"):
            append(sequence, 128)
        with pytest.raises(OutOfRoom):
            sequence.reserve(10)
        sequence.free()


def test_roll_back_over_what_nobody_saw_is_free(path: str) -> None:
    """Speculative tokens go without a word, others by a round trip; the kept tokens keep their bytes."""
    with Client(path) as client:
        sequence = client.admit(range(2000, 2050))
        paint(client, sequence, 0, 3)
        for i in range(10):
            sequence.append(i)
        calls = client.statistics().calls
        assert sequence.trim(keep_to=53) == sequence.capacity
        assert client.statistics().calls == calls
        assert sequence.length == 53
        assert sequence.append(77) == numbers(sequence)[53]
        sequence.commit()
        assert client.probe([*range(2000, 2050), 0, 1, 2, 77, 5]) == 54
        sequence.trim(keep_to=20)
        assert client.statistics().calls > calls
        assert sequence.length == 20
        slots = numbers(sequence)
        assert not {sequence.append(i) for i in range(60)} & set(
            slots
        )  # what was published is written by nobody
        assert numbers(sequence)[:20] == slots
        wanted = np.arange(20) + 30_000
        assert (client.pool.plane("0.k")[slots].reshape(20, -1)[:, 0] == wanted).all()
        for wrong in ({"keep_to": 0}, {"keep_to": 1000}, {"keep_from": 90}, {"keep_from": -1}):
            with pytest.raises(BadRequest, match="keep"):
                sequence.trim(**wrong)
        with pytest.raises(BadRequest, match="fence 1 "):
            sequence.trim(keep_to=10, fence=1)


def test_a_window_gives_its_front_back(path: str) -> None:
    """Where all layers are windowed the front goes with the next frame; elsewhere that is refused, and seen."""
    with Client(path, pool="windowed") as client:
        sequence = client.admit(range(100))
        sequence.trim(keep_from=50)
        client.settle()
        assert sequence.kept_from == 50
        assert client.last_error is None
    with Client(path) as client:
        sequence = client.admit(range(3000, 3100))
        sequence.trim(keep_from=50)
        client.settle()
        assert client.statistics().posted_errors == 1
        assert isinstance(client.last_error, BadRequest)


@pytest.mark.parametrize("append", ["chain", "peel"])
def test_forks_share_and_part(path: str, append: str) -> None:
    """A fork reads its parent's slots and appends to its own; neither sees what the other writes."""
    with Client(path, append=append) as client:
        parent = client.admit(range(4000, 4041))
        paint(client, parent, 0, 1)
        child = parent.fork()
        assert isinstance(child, Sequence)
        assert child.room > 0  # in the same round trip
        client.pool.copy(client.take_copies())
        assert numbers(child)[:32] == numbers(parent)[:32]
        assert painted(client, child, 1)
        for i in range(40):
            parent.append(i)
            child.append(100 + i)
        client.pool.copy(client.take_copies())
        paint(client, parent, 41, 1)
        paint(client, child, 41, 2)
        assert painted(client, parent, 1)
        assert painted(client, child, 2, 41)
        early = parent.fork(10)
        assert isinstance(early, Sequence)
        assert append == "peel" or numbers(early) == numbers(parent)[:10]
        assert child.commit() == 81
        assert parent.commit() == 81
        assert client.probe([*range(4000, 4041), *range(100, 140), 0]) == 81
        assert client.probe([*range(4000, 4041), *range(40), 0]) == 81
        for wrong in (0, -1, 82):
            with pytest.raises(BadRequest, match="fork at"):
                parent.fork(wrong)
        for each in (parent, child, early):
            each.free()
        client.settle()
        assert client.statistics().posted_errors == 0


def test_pages_are_whole(path: str) -> None:
    """With paged kernels every position has its place in its page, through growth and forks."""
    with Client(path, page=16) as client:
        first = client.admit(range(5000, 5040))
        paint(client, first, 0, 1)
        first.commit()
        batch = [first, client.admit([*range(5000, 5040), 1, 2, 3])]
        fork = first.fork()
        assert isinstance(fork, Sequence)
        batch.append(fork)
        for _ in range(50):
            for each in batch:
                each.append(1)
        client.pool.copy(client.take_copies())
        for each in batch:
            table = indices.block_table([each], 16)
            assert [int(table[0, p // 16]) * 16 + p % 16 for p in range(each.length)] == numbers(each)
            assert (
                client.pool.plane("1.v")[numbers(each)[:40]].reshape(40, -1)[:, 0] == np.arange(40) + 10_000
            ).all()


def test_opaque_blocks(path: str) -> None:
    """An opaque pool is one plane of bytes, in whole blocks."""
    with Client(path, pool="blocks") as client:
        sequence = client.admit(range(40))
        assert client.pool.plane("blocks").shape == (65 * 16, 256)
        assert client.pool.plane("blocks").dtype == np.uint8
        assert indices.block_table([sequence], 16).shape == (1, 3)
        assert sequence.commit() == 32


def test_a_freed_sequence_is_of_no_use(path: str) -> None:
    """Every method of a freed sequence raises Ended, and a second free does not free another's."""
    with Client(path) as client:
        sequence = client.admit(range(6000, 6010))
        with client.step():
            sequence.append(1)
            sequence.free()
        assert client.sequences == []
        uses: list[Callable[[], object]] = [
            partial(sequence.append, 1),
            partial(sequence.append_all, [1]),
            partial(sequence.reserve, 1),
            partial(sequence.trim, keep_to=1),
            sequence.commit,
            sequence.fork,
            sequence.free,
        ]
        for use in uses:
            with pytest.raises(Ended, match="was freed"):
                use()
        client.settle()
        assert client.statistics().posted_errors == 0
        client.close()
        with pytest.raises(Closed):
            client.admit([1])
        client.close()


def test_memory_comes_back_when_the_fence_has_passed(path: str) -> None:
    """What is freed while a step runs is given to nobody before that step has completed."""
    with Client(path, pool="small") as one, Client(path, pool="small") as two:
        sequence = one.admit(range(100))
        one.submit()
        sequence.free()
        one.flush()
        with pytest.raises(AdmissionTimeout):
            two.admit(range(500, 600), timeout=0.2)
        one.complete()
        assert two.admit(range(500, 600), timeout=20).length == 100
        with pytest.raises(BadRequest, match="step 5 completed"):
            one.complete(5)
        assert [one.submit(), one.submit(), one.submit()] == [2, 3, 4]
        one.complete(3)
        assert one.statistics().steps_completed == 3
        one.complete()


def test_processes_of_one_engine_share_fences(path: str) -> None:
    """A fence has passed when all of a group have completed it; the token survives pickling, and hides its secret."""
    with Client(path, pool="small") as one:
        token = pickle.loads(pickle.dumps(one.group))
        assert token == one.token
        assert token.secret.hex() not in repr(token)
        assert repr(token.secret) not in repr(token)
        with Client(path, pool="small", group=token) as worker, Client(path, pool="small") as other:
            sequence = one.admit(range(100))
            with one.step():
                sequence.free()
            with pytest.raises(AdmissionTimeout):
                other.admit(range(500, 600), timeout=0.2)
            with worker.step():
                pass
            assert other.admit(range(500, 600), timeout=20).length == 100
    with pytest.raises(BadRequest, match="name one of them"):
        Client(path, group=token, resume=token)


def test_namespaces_pins_and_probes(path: str) -> None:
    """A prefix is seen in its namespace alone; a pin keeps it; a probe changes nothing."""
    tenant = Namespace("tenant")
    with Client(path) as client:
        sequence = client.admit(range(7000, 7100), namespace=tenant)
        sequence.commit()
        sequence.free()
        assert client.probe(range(7000, 7100), namespace=tenant) == 99
        assert client.probe(range(7000, 7100)) == 0
        number = client.open_namespace(tenant)
        assert client.open_namespace(tenant) == number != client.namespace
        assert client.probe(range(7000, 7200), namespace=number) == 100
        pin, kept = client.pin(range(7000, 7100), namespace=tenant)
        assert kept == 100
        client.unpin(pin)
        assert client.pin([9, 9, 9]) == (0, 0)
        with pytest.raises(Ended):
            client.unpin(pin)


def test_commit_says_what_is_known(path: str) -> None:
    """Commits go by steps: what a step under way may still write is not published; told tokens are told once."""
    with Client(path) as client:
        sequence = client.admit(range(8000, 8030))
        sequence.commit()
        with client.step():
            for i in range(5):
                sequence.append(i)
            assert sequence.commit() == 30
        assert sequence.commit(32) == 32
        assert sequence.commit(33, wait=False) == 33
        with client.step():
            pass
        assert sequence.commit(priority=3, expiry_ms=1000) == 35
        assert client.probe([*range(8000, 8030), *range(5), 1]) == 35
        with pytest.raises(BadRequest, match="commit to 36"):
            sequence.commit(36)
        with pytest.raises(BadRequest, match="priority"):
            sequence.commit(priority=99)
        assert sequence.commit() == 35


def test_closing_under_a_live_view_is_refused(path: str) -> None:
    """While an array on the pool's memory lives the client stays open, and the array stays good."""
    client = Client(path)
    row = client.pool.plane("0.k")[16:20]
    with pytest.raises(BufferError, match="still alive"):
        client.close()
    row[:] = 5.0
    assert client.probe([1]) == 0
    del row
    client.close()
    with pytest.raises(BadRequest, match="not mapped"):
        client.pool.plane("0.k")


def test_the_pool_is_in_no_core_dump_of_an_engine(path: str) -> None:
    """Its memory is everybody's: a crash of one engine writes down none of it, and a fork does not take it along."""
    with Client(path) as client:
        assert client.pool.mapped
        after = Path("/proc/self/smaps").read_text().split(f"memfd:kvslot-{client.pool.name} ")[1:]
        flags = [set(each.split("VmFlags:", 1)[1].splitlines()[0].split()) for each in after]
        assert flags
        assert all({"dd", "dc"} <= each for each in flags), flags


def test_an_error_is_not_hidden_by_a_live_view(path: str) -> None:
    """What went wrong in the block comes out of it, although the block's variables still hold a view."""

    def engine() -> None:
        with Client(path) as client:
            row = client.pool.plane("0.k")[16:20]
            raise ZeroDivisionError(row.shape)

    with pytest.raises(ZeroDivisionError) as error:
        engine()
    assert "still alive" in error.value.__notes__[0]
    del error
    gc.collect()


def test_torch_sees_the_same_memory(path: str) -> None:
    """Tensors are views of the mapping, in the layout's real dtype, and keep it from being closed."""
    torch = pytest.importorskip("torch")
    with Client(path) as client:
        tensor = client.pool.tensor("0.k")
        assert tensor.dtype == torch.float32
        client.pool.plane("0.k")[20] = 3.0
        assert (tensor[20] == 3.0).all()
        with pytest.raises(BufferError):
            client.close()
        del tensor


def test_a_client_that_was_not_closed_is_told_of(path: str) -> None:
    """The finalizer warns, and ends the session all the same."""

    def forget() -> None:
        client = Client(path, name="forgotten")
        client.admit(range(9000, 9010))
        del client
        gc.collect()

    with pytest.warns(ResourceWarning, match="was not closed"):
        forget()
    with Control(path) as control:
        deadline = time.monotonic() + 20
        while "forgotten" in [row["name"] for row in control.inspect("sessions")]:
            assert time.monotonic() < deadline


def test_a_client_without_memory(path: str) -> None:
    """map=False: no descriptors, no views, fences 0; all verbs work, steps too."""
    before = len(os.listdir("/proc/self/fd"))
    with Client(path, map=False) as client:
        assert len(os.listdir("/proc/self/fd")) == before + 1
        sequence = client.admit(range(9100, 9110))
        for i in range(40):
            with client.step():
                sequence.append(i)
        assert sequence.commit() == 50
        sequence.free()
        with pytest.raises(BadRequest, match="not mapped"):
            client.pool.plane("0.k")
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_descriptor_stays_or_is_passed_on(path: str) -> None:
    """All descriptors are closed on exec, and none is left after close."""
    before = set(os.listdir("/proc/self/fd"))
    with Client(path) as client:
        client.admit([1])
        listing = """
            import os
            numbers = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
            print([os.readlink(n) for n in numbers if os.path.islink(n)])
        """
        seen = subprocess.run(
            [sys.executable, "-Ic", textwrap.dedent(listing)],
            capture_output=True,
            text=True,
            close_fds=False,
            check=True,
        ).stdout
        assert "memfd" not in seen
        assert "eventfd" not in seen
        assert "socket" not in seen
    assert set(os.listdir("/proc/self/fd")) == before


def test_what_a_daemon_refuses_at_the_door(path: str) -> None:
    """Another layout, an unknown pool, a bad page size or a wrong secret: each its own error, and nothing left open."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WrongVersion, match="has the layout"):
        Client(path, fingerprint="0123")
    with pytest.raises(NotFound):
        Client(path, pool="nowhere")
    with pytest.raises(BadRequest, match="page size 3"):
        Client(path, page=3)
    with Client(path) as client, pytest.raises(KvslotError):
        Client(path, group=type(client.token)(client.token.session, b"wrong"))
    with Client(path) as client:
        good = client.pool.description.fingerprint
    with Client(path, fingerprint=good):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_too_large_is_stopped_here(path: str) -> None:
    """A frame beyond the daemon's limit is refused by the client; the connection lives on."""
    with Client(path) as client:
        with pytest.raises(TooLarge, match="frame_bytes"):
            client.allocate(bytes(2 << 20))
        assert client.probe([1, 2]) == 0


def test_pressure_and_preemption_reach_the_engine(path: str) -> None:
    """When growth starves, the youngest is named: the engine hears of it, frees it, and the oldest goes on."""
    with Client(path, pool="small", name="old") as old, Client(path, pool="small", name="young") as young:
        oldest = old.admit(range(40))
        youngest = young.admit(range(500, 560))
        with pytest.raises(OutOfRoom):
            append(oldest, 80)
        seen: list[type] = []
        for _ in range(100):
            for event in young.events(timeout=0.05):
                seen.append(type(event))
                if isinstance(event, Preempt):
                    assert young.sequence(event.sequence) is youngest
                    assert youngest.preempt_by > 0
                    youngest.free()
                    young.flush()
            try:
                oldest.append(0)
                break
            except OutOfRoom:
                old.events(timeout=0.01)
        assert Preempt in seen
        assert set(seen) <= {Preempt, Pressure}
        assert oldest.append(1) >= 0


def test_second_runs_go_back_under_pressure(path: str) -> None:
    """Pressure makes the client cut its sequences back to what they use; they append on with right slots."""
    with Client(path, pool="small") as old, Client(path, pool="small") as young:
        oldest = old.admit(range(30))
        wide = young.admit(range(500, 510))
        wide.reserve(60)
        paint(young, wide, 0, 4)
        with pytest.raises(OutOfRoom):
            append(oldest, 80)
        capacity = wide.capacity
        assert Pressure in [type(event) for event in young.events(timeout=20)]
        with young.step():
            pass
        young.settle()
        assert wide.capacity < capacity
        wide.append(3)
        paint(young, wide, 10, 4)
        assert painted(young, wide, 4)
        for _ in range(200):
            try:
                oldest.append(0)
                break
            except OutOfRoom:
                old.events(timeout=0.02)
        else:
            raise AssertionError("the room given back did not reach the one that waits")


def test_a_roll_back_needs_no_connection(path: str) -> None:
    """What nobody was told of goes while the reply to a call is lost; what a lost call may have told waits for it."""
    with Client(path) as client:
        sequence = client.admit(range(9300, 9330))
        other = client.admit(range(9400, 9430))
        for i in range(5):
            sequence.append(i)
            other.append(i)
        client._connection._socket.shutdown(socket.SHUT_RD)
        with pytest.raises(Disconnected):
            other.commit()
        sequence.trim(keep_to=31)
        assert sequence.length == 31
        with pytest.raises(Disconnected):
            other.trim(keep_to=31)  # it may be published
        client.reconnect()
        assert [sequence.length, other.length] == [31, 35]
        sequence.append(50)
        assert sequence.commit() == 32
        assert client.probe([*range(9300, 9330), 0, 50, 1]) == 32


def test_what_a_finalizer_leaves_to_the_next_use(path: str) -> None:
    """Deferred calls are made once, at the beginning of a call, and what they post leaves with it."""
    with Client(path) as client:
        sequences = [client.admit(range(9700 + 10 * n, 9710 + 10 * n)) for n in range(3)]
        uses: list[Callable[[], object]] = [client.flush, client.submit, lambda: client.probe([1])]
        for use, sequence in zip(uses, sequences, strict=True):
            client.defer(sequence.free)
            assert not sequence.ended
            use()
            assert sequence.ended
        client.complete()
        assert client.sequences == []


def test_waiting_leaves_events_to_their_reader(path: str) -> None:
    """`wait` returns when something was pushed, or in time, and takes nothing away."""
    with Client(path) as client:
        client.wait(0.01)
        assert client.events() == []
        client._session._push(Draining(5))
        client.wait(0.01)
        assert client.events() == [Draining(5)]


def test_a_lost_connection_is_taken_up_again(path: str) -> None:
    """After a cut the same client goes on with its sequences: what was under way is settled, bytes are as they were."""
    with Client(path) as client:
        sequence = client.admit(range(9500, 9530))
        paint(client, sequence, 0, 1)
        gone = client.admit(range(9600, 9610))
        for i in range(sequence.room):
            sequence.append(i)
        length = sequence.length
        paint(client, sequence, 30, 1)
        client.settle()
        sequence.append(1)  # asks for more ...
        gone.free()  # ... and with this leaves for a daemon that may or may not hear it
        client._connection._socket.shutdown(2)  # as if the kernel had cut it: there is no other way from here
        with pytest.raises(Disconnected, match="has ended"):
            client.probe([1])
        with pytest.raises(Disconnected):
            client.submit()
        client.reconnect()
        with pytest.raises(OutOfTurn, match="is there"):
            client.reconnect()
        assert client.probe([1, 2]) == 0
        assert sequence.length == length + 1
        for i in range(100):
            sequence.append(i)
        paint(client, sequence, length, 1)
        assert painted(client, sequence, 1)
        assert sequence.commit() == length + 101
        with client.step():
            pass
        assert client.statistics().posted_errors == 0


def test_a_commit_nobody_heard_of_is_not_repeated(path: str) -> None:
    """A sequence whose commit was under way at the cut publishes no more: its tokens may be told already."""
    with Client(path) as client:
        sequence = client.admit(range(9700, 9720))
        other = client.admit(range(9720, 9730))
        sequence.append(1)
        sequence.commit(wait=False)
        client.flush()
        client._connection._socket.shutdown(2)
        with pytest.raises(Disconnected):
            client.probe([1])
        client.reconnect()
        with pytest.raises(Disconnected, match="nobody knows"):
            sequence.commit()
        assert sequence.append(2) > 0
        assert other.commit() == 10


def test_another_process_cannot_take_a_session(path: str) -> None:
    """A token resumes its own process's session; with a wrong secret, or once it has ended, it is stale."""
    with Client(path) as client:
        token = client.token
        with pytest.raises(StaleSession):
            Client(path, resume=type(token)(token.session, b"wrong", token.boot))
        with pytest.raises(StaleSession, match="boot"):
            Client(path, resume=type(token)(token.session, token.secret, token.boot ^ 1))
        script = f"""
            from kvslot import Client
            from kvslot.api.client import Token
            from kvslot.api.wire import Denied
            try:
                Client({path!r}, resume=Token({token.session}, {token.secret!r}, {token.boot}))
            except Denied as error:
                print("denied", error)
        """
        assert "denied" in run(script)
    with pytest.raises(StaleSession):
        Client(path, resume=token)


def test_a_dead_session_is_released_by_its_process(path: str) -> None:
    """A client whose connection ended leaves its slots aside; the process says that they are free, and they are."""
    first = Client(path, pool="small")
    first.admit(range(100))
    first._connection._socket.shutdown(2)
    with Client(path, pool="small") as second:
        with pytest.raises(AdmissionTimeout):
            second.admit(range(500, 600), timeout=0.1)
        with pytest.raises(Disconnected):
            first.probe([1])
        first.pool.close()
        second.release(first.token)
        assert second.admit(range(500, 600), timeout=20).length == 100
    first.close()


def run(script: str) -> str:
    """Runs `script` in a Python of its own, in which warnings are errors; what it printed."""
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def test_a_forked_child_keeps_its_hands_off(path: str) -> None:
    """Everything a child of a fork does with its parent's client raises WrongProcess; the parent does not notice."""
    out = run(f"""
        import os
        from kvslot import Client
        from kvslot.api.client import WrongProcess
        with Client({path!r}) as client:
            sequence = client.admit(range(50))
            room = sequence.room
            client.pool.plane("0.k")[sequence.append(1)] = 7
            frames = client.statistics().frames_sent
            child = os.fork()
            if not child:
                uses = [
                    lambda: client.admit([1]), lambda: client.probe([1]), lambda: sequence.append(1), client.submit,
                    client.complete, client.events, client.flush, client.settle, client.reconnect, sequence.commit,
                    sequence.fork, sequence.free,
                ]
                wrong = 0
                for i, use in enumerate(uses):
                    try:
                        use()
                    except WrongProcess as error:
                        assert str(os.getppid()) in str(error)
                        wrong += 1
                    except BaseException as error:
                        print(i, repr(error), flush=True)
                assert wrong == len(uses), wrong
                client.close()
                with Client({path!r}) as own:
                    assert own.admit(range(10)).length == 10
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            with client.step():
                sequence.append(2)
            assert client.probe([1]) == 0
            assert client.pool.plane("0.k")[sequence.slot_of(50), 0, 0] == 7
            sequence.commit()
        print("good")
    """)
    assert out.strip() == "good"


def test_a_spawned_process_opens_its_own(path: str) -> None:
    """A client cannot be sent to another process; the error says what to do."""
    with Client(path) as client, pytest.raises(TypeError, match="group"):
        pickle.dumps(client)


def test_importing_stays_light() -> None:
    """`from kvslot import Client` loads neither numpy nor torch nor aiohttp nor asyncio."""
    heavy = ("numpy", "torch", "aiohttp", "asyncio", "structlog", "rich", "kvslot.allocator", "kvslot.daemon")
    out = run(f"import sys; from kvslot import Client; print([m for m in {heavy} if m in sys.modules])")
    assert out.strip() == "[]"


def test_a_daemon_that_ends() -> None:
    """Draining is heard of; then calls say that the daemon is gone, and another one knows nothing of before."""
    with running(code=None) as daemon:
        client = Client(str(daemon.socket))
        sequence = client.admit(range(10))
        daemon.process.send_signal(signal.SIGTERM)
        events = client.events(timeout=20)
        assert [type(event) for event in events] == [Draining]
        with pytest.raises(ShuttingDown):
            client.admit([1, 2])
        daemon.process.wait(20)
        slots = [sequence.append(i) for i in range(sequence.room)]  # what it has, it has
        assert len(set(slots)) == len(slots)
        with pytest.raises(Disconnected):
            sequence.append(1)
        with pytest.raises(Disconnected, match="start kvslotd"):
            client.reconnect()
        with running(socket=daemon.socket), pytest.raises(StaleSession):
            client.reconnect()
        client.close()


def test_a_draining_daemon_takes_back_who_lost_its_connection() -> None:
    """While it drains a client may reconnect and finish what it runs, hears of the drain, and nobody new comes in."""
    with running(code=None, drain_seconds=60.0) as daemon, Client(str(daemon.socket)) as client:
        sequence = client.admit(range(10))
        daemon.process.send_signal(signal.SIGTERM)
        assert [type(event) for event in client.events(timeout=20)] == [Draining]
        client._connection._socket.shutdown(2)
        with pytest.raises(Disconnected):
            client.probe([1])
        with pytest.raises(ShuttingDown, match=r"ends in .* s at most"):
            Client(str(daemon.socket))
        client.reconnect()
        assert [type(event) for event in client.events(timeout=20)] == [Draining]
        sequence.append(1)
        assert sequence.commit() == 11
        sequence.free()
        client.settle()
        assert daemon.process.wait(5) == 0


def test_a_killed_daemon_is_a_clear_error() -> None:
    """A killed daemon is Disconnected with the path in it, wherever the client notices; views stay good."""
    with running(code=None) as daemon, warnings.catch_warnings():
        client = Client(str(daemon.socket))
        sequence = client.admit(range(10))
        row = client.pool.plane("0.k")[16:20]
        daemon.process.kill()
        daemon.process.wait()
        for use in (partial(client.probe, [1]), client.submit, client.events):
            with pytest.raises(Disconnected, match=str(daemon.socket)):
                use()
        row[:] = 1.0
        assert (row == 1.0).all()
        assert sequence.append(1) >= 0
        del row
        client.close()


def test_control_looks_and_acts(path: str) -> None:
    """Control pings, pages through rows, evicts, audits and sets; what it may not or cannot is a typed error."""
    with Control(path) as control, Client(path) as client:
        assert control.ping().boot == client.token.boot
        for i in range(5):
            sequence = client.admit(range(100_000 + 100 * i, 100_000 + 100 * i + 50))
            sequence.commit()
            sequence.free()
        client.settle()
        rows = list(control.inspect("tree", pool="big", limit=2))
        assert len(rows) >= 5
        assert control.evict(64, pool="big") >= 64
        assert control.audit(pool="big").faults == []
        with pytest.raises(KvslotError):
            control.set_config("no_such_setting", "1")
        with pytest.raises(KvslotError):
            list(control.inspect("no_such_kind"))
        with pytest.raises(NotFound):
            control.evict(1, pool="nowhere")
        assert control.socket == path


def test_there_is_no_daemon(tmp_path: Any) -> None:
    """A missing, dead, forbidden or too long socket path each says what to do."""
    import socket

    with pytest.raises(Disconnected, match="start kvslotd"):
        Client(str(tmp_path / "none"))
    with pytest.raises(Disconnected, match="107"):
        Client("/" + "x" * 200)
    name = f"/tmp/kvs-dead-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(name)
    try:
        with pytest.raises(Disconnected, match="left over"):
            Control(name)
    finally:
        os.unlink(name)


def test_where_the_daemon_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """$KVSLOT_SOCKET, else the user's runtime directory, else the system's."""
    from kvslot.api.client import default_socket

    monkeypatch.setenv("KVSLOT_SOCKET", "/a/b")
    assert default_socket() == "/a/b"
    monkeypatch.delenv("KVSLOT_SOCKET")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    assert default_socket() == "/run/user/7/kvslot/kvslot.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_socket() == "/run/kvslot/kvslot.sock"
