"""Events: the ring that numbers and keeps them, and the stream that shows them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvslot.api.admin import Ring, views
from kvslot.api.wire.messages import Allocate, Free, SetConfig

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens
from .http import Client, Stream, connect, gone

# -- the ring ---------------------------------------------------------------------------------------------------------


def test_numbers_have_no_holes_and_the_oldest_go() -> None:
    """A ring of 5 keeps the last 5 of 12, and hands out any stretch of them by number."""
    ring = Ring(events_most=5, first=100)
    assert (ring.first, ring.last) == (100, 99)
    for index in range(12):
        assert ring.add("log", {"event": str(index)}) == 100 + index
    assert (ring.first, ring.last) == (107, 111)
    assert [each.number for each in ring.take(0, 99)] == [107, 108, 109, 110, 111]
    assert [each.number for each in ring.take(109, 2)] == [109, 110]
    assert ring.take(112, 5) == []


def test_a_ring_is_bounded_in_bytes() -> None:
    """Long events push out more of the old ones; one that is too long is cut down to its name."""
    ring = Ring(events_most=1000, bytes_most=10_000, first=1)
    for _ in range(100):
        ring.add("log", {"event": "e", "text": "x" * 990})
    assert 5 < ring.last - ring.first + 1 <= 10
    ring.add("log", {"event": "long", "text": "x" * (1 << 20)})
    (entry,) = ring.take(ring.last, 1)
    assert json.loads(entry.data)["event"] == "long"
    assert len(entry.data) < 100


def test_what_cannot_be_shown_costs_no_event() -> None:
    """Fields of any kind are shown somehow, and line ends stay inside the JSON."""
    ring = Ring(first=1)
    ring.add(
        "log",
        {"event": "odd", "path": Path("/x"), "text": "a\nb\r\nc", "set": {1}, "bytes": b"\xff", 3: object()},
    )
    (entry,) = ring.take(1, 1)
    assert b"\n" not in entry.data
    assert b"\r" not in entry.data
    assert json.loads(entry.data)["event"] == "odd"


def test_numbers_go_on_over_a_restart() -> None:
    """A ring made later begins higher than an earlier one got to."""
    first = Ring()
    for _ in range(3):
        first.add("log", {})
    time.sleep(0.005)
    assert Ring().first > first.last


def test_readers_wait_fall_behind_and_end() -> None:
    """A reader sleeps until there is something, knows what it missed, and ends with the ring."""

    async def follow() -> None:
        ring = Ring(events_most=3, first=1)
        reader = ring.follow(1)
        waiting = asyncio.ensure_future(reader.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        ring.add("log", {})
        assert await waiting
        assert [each.number for each in reader.take(10)] == [1]
        for _ in range(7):
            ring.add("log", {})
        assert reader.missed == 4
        reader.skip_missed()
        assert [each.number for each in reader.take(10)] == [6, 7, 8]
        assert ring.follow(1000).number == 9
        ring.close()
        assert not await reader.wait()

    asyncio.run(follow())


# -- the stream -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    with running() as daemon:
        yield daemon


def test_log_events_and_ticks_come_as_they_happen(daemon: Running) -> None:
    """What is logged is streamed with the same name and fields, a tick comes each second, and numbers rise by one."""
    admin = daemon.socket.with_name("admin.sock")
    with Stream(admin) as stream:
        assert stream.status == 200
        with Wire(daemon.socket) as wire:
            space = wire.hello("engine").namespace
            wire.call(Allocate, space, 1, tokens(40))
            found = stream.until("tick") + stream.until("tick")
            wire.call(Free, 1)
            wire.bye()
        numbers = [number for number, _, _ in found]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        (opened,) = [
            content for _, kind, content in found if kind == "log" and content["event"] == "session_opened"
        ]
        line = json.loads(next(each for each in daemon.text().splitlines() if '"session_opened"' in each))
        assert opened == line
        ticks = [msgspec.convert(content, views.Tick) for _, kind, content in found if kind == "tick"]
        assert ticks[-1].sessions == 1
        (pool,) = ticks[-1].pools
        assert 40 <= pool.private <= 64
        assert pool.free + pool.private + pool.padding == 65 * 16
        told = {each.verb: each.count for tick in ticks for each in tick.verbs}
        assert told["Allocate"] == 1


def test_a_stream_is_replayed_from_a_number(daemon: Running) -> None:
    """`from` and Last-Event-ID continue where another stream ended; a number of long ago is told what is missing."""
    admin = daemon.socket.with_name("admin.sock")
    with Wire(daemon.socket) as wire:
        for level in ("debug", "info", "warning", "info"):
            wire.call(SetConfig, "log_level", level)
    with Stream(admin, "?from=0&only=log") as stream:
        first = [next(stream.events()) for _ in range(3)]
    # What was logged before the API was there is not in it.
    assert [content["event"] for _, _, content in first][:1] == ["admin_ready"]
    number = first[1][0]
    with Stream(admin, f"?from={number}") as stream:
        assert next(stream.events()) == first[1]
    with Stream(admin, Last_Event_ID=str(number)) as stream:
        again = next(stream.events())
        assert again[0] == number + 1
    with Stream(admin, "?from=5") as stream:
        at, kind, content = next(stream.events())
        assert kind == "missed"
        assert content["from"] == 5
        assert at == content["first"] - 1
        assert next(stream.events())[0] == content["first"]
    with Stream(admin, f"?from={2**52}&only=tick") as stream:
        assert next(stream.events())[1] == "tick"


def test_a_reader_that_does_not_read_is_dropped_with_a_word() -> None:
    """It is told so in its last event; others are answered meanwhile, and the daemon keeps no more for it."""
    first = "from kvslot.api.admin import guard; guard.Door.__init__.__kwdefaults__['send_seconds'] = 1.0"
    with running(first=first) as daemon:
        admin = daemon.socket.with_name("admin.sock")
        slow = connect(admin)
        slow.sendall(b"GET /v1/events?from=0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with Client(admin) as client, Wire(daemon.socket) as wire:
            deadline = time.monotonic() + 60
            while '"admin_cut"' not in daemon.text():
                assert time.monotonic() < deadline
                for _ in range(200):
                    wire.call(SetConfig, "drain_seconds", "3")
            assert client.get("/healthz").status == 200
        last = gone(slow).split(b"event: ")[-1]
        slow.close()
        assert last.startswith(b"dropped\n")
        assert b'"reason":"too slow"' in last
        assert daemon.rss_kib() < 400_000


def test_streams_are_few_and_end_with_the_daemon() -> None:
    """Beyond the most there may be one is refused; at the end each gets a last event, and the daemon does not wait."""
    with running() as daemon:
        admin = daemon.socket.with_name("admin.sock")
        streams = [Stream(admin) for _ in range(8)]
        with Client(admin) as client:
            answer = client.get("/v1/events")
            assert (answer.status, answer.code) == (503, "too_many_streams")
            streams.pop().close()
            deadline = time.monotonic() + 10
            while True:
                with Stream(admin) as stream:
                    if stream.status == 200:
                        break
                assert time.monotonic() < deadline
                time.sleep(0.02)
        began = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - began < 2.0 + 2.0
        for stream in streams:
            *_, (_, kind, content) = stream.events()
            assert kind == "end"
            assert content["reason"]
            stream.close()


def test_token_ids_are_in_no_event() -> None:
    """Whatever clients do, what they said in tokens and salts is not shown."""
    with running(log_level="debug") as daemon:
        admin = daemon.socket.with_name("admin.sock")
        with Wire(daemon.socket) as wire:
            space = wire.hello("engine").namespace
            wire.call(Allocate, space, 1, tokens(64, 1_234_567))
            wire.call(Allocate, space, 1, tokens(64, 1_234_568))
            wire.call(Allocate, space, 2, tokens(5000, 1_234_567))
            wire.bye()
        with Stream(admin, "?from=0") as stream:
            text = json.dumps(stream.until("tick"))
        assert "12345" not in text


def test_a_strange_last_event_id_is_no_number(daemon: Running) -> None:
    """It is as if there were none: the stream begins with what comes."""
    for header in ("x", "-1", "1e3", "9" * 40, ""):
        with Stream(daemon.socket.with_name("admin.sock"), Last_Event_ID=header) as stream:
            assert stream.status == 200
            if header == "x":
                assert next(stream.events())[1] in ("log", "tick")
