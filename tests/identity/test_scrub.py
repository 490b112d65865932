"""Scrubbing against a real daemon: nothing is handed out with what somebody left in it, and nobody waits for ever."""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Iterator
from typing import Self

import numpy as np
import pytest

from kvslot.api.wire import messages
from kvslot.api.wire.messages import Namespace
from kvslot.daemon.device import Completion, DeviceFault, Geometry
from kvslot.daemon.device.memory import MemoryDevice

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens

LAYOUT = {"layers": 2, "kv_heads": 1, "head_dim": 8, "dtype": "float32"}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    """A daemon whose pools are scrubbed: one with headroom, one with none."""
    pool = {"blocks": 33, "block_size": 16, "layout": LAYOUT, "scrub": True}
    pools = [
        {"name": "used", **pool, "headroom": 0.05},
        {"name": "full", **pool, "headroom": 0.0, "watermark": 0.0},
    ]
    with running(pools=pools) as daemon:
        yield daemon


class Dirty(Wire):
    """An engine that leaves its slots full of its own bytes."""

    def __enter__(self) -> Self:
        return self

    def begin(self, tenant: str, byte: int) -> None:
        self.byte = byte
        self.welcome = self.hello(namespace=Namespace(tenant))
        pool = self.welcome.pool
        descriptor = self.descriptors[self.welcome.descriptors.index("pool")]
        self.map = mmap.mmap(descriptor, pool.size_bytes)
        memory = np.frombuffer(self.map, np.uint8)
        self.planes = [
            memory[plane.offset : plane.offset + plane.slot_bytes * pool.blocks * pool.block_size].reshape(
                -1, plane.slot_bytes
            )
            for plane in pool.planes
        ]

    def use(self, extents: list[int]) -> int:
        """How many bytes of these slots were not zero; then they are not."""
        left = 0
        for plane in self.planes:
            for i in range(0, len(extents), 2):
                part = plane[extents[i] : extents[i] + extents[i + 1]]
                left += int(np.count_nonzero(part))
                part[:] = self.byte
        return left


def own(admitted: messages.Admitted) -> list[int]:
    """The slots behind the hit."""
    skip, out = admitted.hit, []
    for i in range(0, len(admitted.extents), 2):
        slot, length = admitted.extents[i], admitted.extents[i + 1]
        cut = min(skip, length)
        skip -= cut
        if length > cut:
            out += [slot + cut, length - cut]
    return out


def test_nothing_is_handed_out_as_it_was_left(daemon: Running) -> None:
    """Two tenants take, publish, evict and free a small pool many times over: every slot comes with zeros, whatever
    way it came back; who is told LATER is told Ready; the audit is clean, and all is free in the end."""
    rng = random.Random(7)
    with Dirty(daemon.socket) as one, Dirty(daemon.socket) as two:
        one.begin("a", 0x11)
        two.begin("b", 0x22)
        running_now: dict[Dirty, list[int]] = {one: [], two: []}
        handed = waited = 0
        for number in range(1, 301):
            wire = rng.choice((one, two))
            mine = running_now[wire]
            while len(mine) > 2:
                wire.call(messages.Free, mine.pop(0))
            root = wire.welcome.namespace if wire.welcome else 0
            prompt = tokens(rng.choice((5, 40, 100, 150)), rng.randrange(12) * 1000)
            answer = wire.call(messages.Allocate, root, number, prompt)
            deadline = time.monotonic() + 20
            while isinstance(answer, messages.Later):
                waited += 1
                if answer.reason in {"memory", "turn"} and mine:
                    wire.call(messages.Free, mine.pop(0))
                elif answer.reason in {"memory", "turn"}:
                    other = two if wire is one else one
                    for each in running_now[other]:
                        other.call(messages.Free, each)
                    running_now[other].clear()
                assert time.monotonic() < deadline, answer
                answer = wire.call(messages.Allocate, root, number, prompt, answer.ticket)
            assert isinstance(answer, messages.Admitted), answer
            slots = own(answer)
            handed += sum(slots[1::2])
            assert wire.use(slots) == 0, f"request {number} was given slots with bytes in them"
            mine.append(number)
            grown = wire.call(messages.Extend, number, answer.capacity)
            if isinstance(grown, messages.Grown):
                assert wire.use(grown.extents) == 0
            if rng.random() < 0.7:
                wire.call(messages.Commit, number, len(prompt) // 4)
        assert handed > 10 * 32 * 16, "the pool was not gone through many times"
        for wire, mine in running_now.items():
            for each in mine:
                wire.call(messages.Free, each)
            wire.planes.clear()
        with Wire(daemon.socket) as tool:
            assert tool.call(messages.Audit).faults == []
            tool.call(messages.Evict, 1 << 20)
            deadline = time.monotonic() + 20
            row = tool.call(messages.Inspect, "pools").rows[0]
            while row["free"] != row["usable"] and time.monotonic() < deadline:
                time.sleep(0.01)
                row = tool.call(messages.Inspect, "pools").rows[0]
            assert row["free"] == row["usable"]
            assert tool.call(messages.Audit).faults == []


def test_who_waits_is_told_when_it_is_clean(daemon: Running) -> None:
    """A full pool of cached data: a request evicts nothing and is LATER(fenced); a push comes when room was wiped."""
    pool = {
        "blocks": 33,
        "block_size": 16,
        "layout": LAYOUT,
        "scrub": True,
        "headroom": 0.0,
        "watermark": 0.0,
    }
    with running(pools=[pool]) as daemon, Wire(daemon.socket) as wire:
        root = wire.hello(namespace=Namespace("a"), map=False).namespace
        for number in range(1, 5):
            wire.call(messages.Allocate, root, number, tokens(120, 1000 * number))
            wire.call(messages.Commit, number, 120)
            wire.call(messages.Free, number)
        later = wire.call(messages.Allocate, root, 9, tokens(200, 90000))
        assert (type(later), later.reason) == (messages.Later, "fenced")
        assert later.evictable > 0
        assert wire.receive() == messages.Ready(later.ticket)
        assert isinstance(
            wire.call(messages.Allocate, root, 9, tokens(200, 90000), later.ticket), messages.Admitted
        )


def test_the_device_wipes() -> None:
    """Zeros in every plane of the slots named, nothing beside them; what a copy still writes is not wiped under it."""
    device = MemoryDevice(Geometry(slots=64, slot_bytes=(5, 4096, 5), alignment=64))
    for plane in range(3):
        size = device.geometry.slot_bytes[plane]
        device.write(plane, 0, b"\xff" * (64 * size))
    stream = device.stream()
    event = device.wipe(stream, [(3, 2), (10, 1), (63, 1)])
    deadline = time.monotonic() + 20
    while device.completion(event) is Completion.PENDING and time.monotonic() < deadline:
        time.sleep(0.001)
    assert device.completion(event) is Completion.DONE
    for plane in range(3):
        size = device.geometry.slot_bytes[plane]
        for slot in range(64):
            wanted = b"\0" if slot in {3, 4, 10, 63} else b"\xff"
            assert device.read(plane, slot, 1) == wanted * size, (plane, slot)
    for bad in ([], [(64, 1)], [(0, 0)]):
        try:
            device.wipe(stream, bad)
        except DeviceFault:
            continue
        raise AssertionError(bad)
    device.close()
