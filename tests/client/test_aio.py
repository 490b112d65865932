"""The asyncio client, against a real daemon and against one that misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from kvslot.api.client import (
    AdmissionTimeout,
    AsyncClient,
    AsyncSequence,
    Closed,
    Control,
    Later,
    Namespace,
    NeverFits,
    OutOfRoom,
    indices,
)
from kvslot.api.wire import BadRequest, Disconnected, Ended, NotFound, PeerFault, messages
from kvslot.api.wire.messages import Draining, Probe, Ready

from ..tools.daemon import Running, running
from .fake import Answer, fake, polite


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    """One daemon for all."""
    small = {"name": "small", "blocks": 9, "watermark": 0.0}  # 128 usable slots
    with running(pools=[{"name": "big", "blocks": 513}, small]) as it:
        yield it


@pytest.fixture
def path(daemon: Running) -> Iterator[str]:
    """The socket; when the test is over the daemon's books are right."""
    yield str(daemon.socket)
    with Control(str(daemon.socket)) as control:
        assert [control.audit(pool=name).faults for name in ("big", "small")] == [[], []]


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs `main`; a callback that is slow, or an error that nobody took, fails the test."""
    troubles: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: troubles.append(context))
        async with asyncio.timeout(30):
            await main

    asyncio.run(watched())
    assert troubles == []


def test_a_sequence_lives_as_with_the_blocking_client(path: str) -> None:
    """Admission, appends over many runs, commit, fork, roll-back and free, each with the same outcome."""

    async def main() -> None:
        async with AsyncClient(path, name="tool") as client:
            sequence = await client.admit(range(30))
            slots = [await sequence.append(i) for i in range(200)]
            assert slots == indices.slot_indices(sequence)[30:].tolist()
            assert await sequence.commit() == 230
            assert await client.probe([*range(30), *range(200), 1]) == 230
            child = await sequence.fork(100)
            assert isinstance(child, AsyncSequence)
            assert child.room > 0
            apart = [await child.append(7) for _ in range(50)]
            assert not set(apart) & set(indices.slot_indices(sequence).tolist())
            await sequence.append(5)
            assert await sequence.trim(keep_to=230) == sequence.capacity
            await sequence.trim(keep_to=40)
            assert sequence.length == 40
            await sequence.reserve(60)
            assert sequence.room >= 60
            assert await sequence.append(1) not in slots
            await sequence.free()
            for use in (
                sequence.append(1),
                sequence.commit(),
                sequence.fork(),
                sequence.free(),
                sequence.reserve(9),
            ):
                with pytest.raises(Ended):
                    await use
            await child.free()
            assert client.statistics().sequences == 0
            assert client.statistics().posted_errors == 0
        with pytest.raises(Closed):
            await client.probe([1])
        await client.close()

    run(main())


def test_many_tasks_share_a_client(path: str) -> None:
    """Requests of many tasks go out as they come and every task gets its own answers."""

    async def one(client: AsyncClient, number: int) -> set[int]:
        sequence = await client.admit(range(10_000 * number, 10_000 * number + number + 1))
        slots = [await sequence.append(i) for i in range(50)]
        assert await sequence.commit() == sequence.length
        assert await client.probe(range(10_000 * number, 10_000 * number + number + 2)) == number + 1
        return set(slots)

    async def main() -> None:
        async with AsyncClient(path) as client:
            found = await asyncio.gather(*(one(client, number) for number in range(1, 40)))
            assert len(set().union(*found)) == 39 * 50

    run(main())


def test_waiting_for_memory(path: str) -> None:
    """`admit` waits until another frees, gives its ticket back when its time is up, and refuses what never fits."""

    async def main() -> None:
        async with AsyncClient(path, pool="small") as one, AsyncClient(path, pool="small") as two:
            held = await one.admit(range(100))
            with pytest.raises(NeverFits):
                await two.admit(range(200))
            with pytest.raises(AdmissionTimeout):
                await two.admit(range(500, 600), timeout=0.05)
            waiting = asyncio.ensure_future(two.admit(range(500, 600), timeout=20))
            await asyncio.sleep(0)
            await held.free()
            got = await waiting
            assert got.length == 100
            later = await one.allocate(range(100))
            assert isinstance(later, Later)
            await got.free()
            async for event in one.events():
                assert event == Ready(later.ticket)
                break
            again = await one.allocate(range(100), ticket=later.ticket)
            assert isinstance(again, AsyncSequence)
            with pytest.raises(OutOfRoom):
                await again.reserve(100)
            await again.free()
            with pytest.raises(NotFound):
                await one.withdraw(12345)

    run(main())


def test_namespaces_and_pins(path: str) -> None:
    """As with the blocking client."""

    async def main() -> None:
        tenant = Namespace("a tenant")
        async with AsyncClient(path, namespace=Namespace("mine")) as client:
            sequence = await client.admit(range(50), namespace=tenant)
            await sequence.commit(priority=2, expiry_ms=50)
            assert await client.open_namespace(tenant) != client.namespace
            assert await client.probe(range(60), namespace=tenant) == 50
            assert await client.probe(range(60)) == 0
            pin, kept = await client.pin(range(50), namespace=tenant)
            assert kept == 50
            await client.unpin(pin)
            with pytest.raises(BadRequest, match="commit to 51"):
                await sequence.commit(51)
            with pytest.raises(BadRequest, match="keep"):
                await sequence.trim(keep_to=0)

    run(main())


def test_a_cancelled_call_leaves_the_stream_in_step(path: str) -> None:
    """A task that is cancelled while it waits for a reply loses nothing but that: what it was given goes back."""

    async def main() -> None:
        async with AsyncClient(path, pool="small") as client:
            for _ in range(5):
                task = asyncio.ensure_future(client.allocate(range(100)))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert await client.probe([1, 2]) == 0
            assert (await client.admit(range(100), timeout=10)).length == 100

    run(main())


def test_the_daemon_ends() -> None:
    """Draining is heard of, and whoever waits for anything is told that the connection has ended."""

    async def main(daemon: Running) -> None:
        client = await AsyncClient(str(daemon.socket)).open()
        sequence = await client.admit(range(10))
        daemon.process.terminate()
        seen: list[type] = []

        async def listen() -> None:
            async for event in client.events():
                seen.append(type(event))

        with pytest.raises(Disconnected, match="has ended"):
            await listen()
        assert seen == [Draining]
        with pytest.raises(Disconnected):
            await client.probe([1])
        with pytest.raises(Disconnected):
            await sequence.commit()
        await client.close()
        with pytest.raises(Disconnected, match="start kvslotd"):
            await AsyncClient("/tmp/kvs-none").open()

    with running(code=None) as daemon:
        run(main(daemon))


def test_a_daemon_that_misbehaves() -> None:
    """What is no answer ends the connection with PeerFault, for the one who asked and for all others."""

    def wrong(request: Any) -> Iterator[Answer]:
        if isinstance(request, Probe):
            yield messages.Probed(request.id + 7, 0)
        else:
            yield from polite(request)

    async def main(path: str) -> None:
        async with AsyncClient(path) as client:
            both = await asyncio.gather(client.probe([1]), client.probe([2]), return_exceptions=True)
            assert [type(each) for each in both] == [PeerFault, PeerFault]
            with pytest.raises(PeerFault):
                await client.probe([1])

    with fake(wrong) as (path, _):
        run(main(path))


def test_a_session_that_is_refused(path: str) -> None:
    """A Hello that is refused raises why, and leaves nothing open."""

    async def main() -> None:
        with pytest.raises(NotFound):
            async with AsyncClient(path, pool="nowhere"):
                pass
        client = AsyncClient(path)
        with pytest.raises(Closed, match="not been opened"):
            await client.probe([1])

    run(main())
