"""The map of blocks: against a naive one, and put together from changes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from kvslot.api.wire.messages import Allocate, Commit, Evict, Free
from kvslot.daemon.blocks import BlockMaps

from ..tools.daemon import running
from ..tools.wire import Wire, tokens
from .http import Answer, Client

OCTETS = "application/octet-stream"
STATES = ("free", "private", "cached", "fenced", "moving", "reserved", "quarantined", "padding")


class Hosted:
    """As much of a pool as a map looks at."""

    def __init__(self, name: str, blocks: int, size: int) -> None:
        self.name = name
        self.states = memoryview(bytearray(blocks * size))
        self.core: Any = type(
            "Core", (), {"block_size": size, "config": type("Config", (), {"blocks": blocks})}
        )


def naive(hosted: Hosted) -> bytes:
    """Two bytes a block, by the words of the documentation."""
    size = hosted.core.block_size
    cells = bytearray()
    for start in range(0, len(hosted.states), size):
        states = list(hosted.states[start : start + size])
        taken = [each for each in states if each]
        cells.append(max(sorted(set(taken)), key=taken.count) if taken else 0)
        cells.append(-(-len(taken) * 255 // size))
    return bytes(cells)


def apply(map_: bytes, changes: bytes) -> bytes:
    """A map, with stretches of changes laid over it."""
    cells = bytearray(map_)
    at = 0
    while at < len(changes):
        start, length = np.frombuffer(changes, "<u4", 2, at).tolist()
        cells[2 * start : 2 * (start + length)] = changes[at + 8 : at + 8 + 2 * length]
        at += 8 + 2 * length
    return bytes(cells)


@pytest.mark.parametrize("size", [1, 3, 16, 128])
def test_changes_lead_from_any_map_to_the_present_one(size: int) -> None:
    """Whatever map a caller has, with what changed since laid over it it is the map that a naive look makes."""

    async def run() -> None:
        rng = random.Random(size)
        maps = BlockMaps(share=1e6)
        pools = [Hosted("a", 3000, size), Hosted("b", 500, size)]
        known: dict[str, list[tuple[int, bytes]]] = {"a": [], "b": []}
        for _ in range(60):
            hosted = rng.choice(pools)
            for _ in range(rng.choice([0, 1, 3, 30])):
                start = rng.randrange(len(hosted.states))
                length = min(rng.choice([1, 5, 200, 20_000]), len(hosted.states) - start)
                hosted.states[start : start + length] = bytes([rng.randrange(8)]) * length
            mine = known[hosted.name]
            since, had = rng.choice([*mine, (-1, b"")])
            found = await maps.read(hosted, since)  # type: ignore[arg-type]
            assert found.whole or since >= 0
            now = bytes(found.data) if found.whole else apply(had, bytes(found.data))
            assert now == naive(hosted)
            if had == now and not found.whole and mine[-1][0] == since:
                assert not len(found.data)
            mine.append((found.sequence, now))
            if rng.random() < 0.1:
                maps.look(1e12)  # a minute without anybody

    asyncio.run(run())


def test_numbers_of_another_start_get_a_whole_map() -> None:
    """A sequence that this daemon never gave, of before or of nowhere, is answered with everything."""

    async def run() -> None:
        hosted = Hosted("a", 10, 4)
        maps = BlockMaps(share=1e6)
        first = await maps.read(hosted, -1)  # type: ignore[arg-type]
        for since in (0, 5, first.sequence - 10**6, first.sequence + 1, 2**53):
            assert (await maps.read(hosted, since)).whole  # type: ignore[arg-type]
        assert not (await maps.read(hosted, first.sequence)).whole  # type: ignore[arg-type]

    asyncio.run(run())


def test_a_pool_as_a_map_over_http() -> None:
    """The octets agree with the paged blocks, in a pool that lives; changes come with their number as ETag."""
    with (
        running(pools=[{"blocks": 257}]) as daemon,
        Client(daemon.socket.with_name("admin.sock")) as client,
        Wire(daemon.socket) as wire,
    ):
        space = wire.hello("engine").namespace
        map_, since = b"", -1
        for step in range(12):
            wire.call(Allocate, space, step, tokens(50 + 7 * step, 1000 * step))
            if step % 3:
                wire.call(Commit, step, 50)
            if step % 4:
                wire.call(Free, step)
            if step == 8:
                wire.call(Evict, 60)
            answer = octets(client, since)
            whole = answer.headers["x-kvslot-whole"] == "1"
            assert whole == (since < 0)
            map_ = answer.body if whole else apply(map_, answer.body)
            since = int(answer.headers["x-kvslot-sequence"])
            assert answer.headers["etag"] == f'"{since}"'
            assert (answer.headers["x-kvslot-blocks"], answer.headers["x-kvslot-block-size"]) == ("257", "16")
            assert map_ == paged(client)
        assert octets(client, since).body == b""
        wire.bye()


def octets(client: Client, since: int) -> Answer:
    path = "/v1/blocks" if since < 0 else f"/v1/blocks?since={since}"
    answer = client.get(path, Accept=OCTETS)
    assert (answer.status, answer.headers["content-type"]) == (200, OCTETS)
    return answer


def paged(client: Client) -> bytes:
    """The same from the blocks as JSON."""
    cells = bytearray()
    for row in client.get("/v1/blocks?limit=1024").json()["items"]:
        taken = {state: row[state] for state in STATES[1:] if row[state]}
        cells.append(STATES.index(max(taken, key=lambda state: taken[state])) if taken else 0)
        cells.append(-(-sum(taken.values()) * 255 // 16))
    return bytes(cells)
