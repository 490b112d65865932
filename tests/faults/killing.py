"""A client killed at a byte of a verb's frame, and what the others see of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvslot.api.wire import VERSION, SessionPage, encode, messages
from kvslot.api.wire.messages import (
    Admitted,
    Allocate,
    Batch,
    Bye,
    Commit,
    Committed,
    Evict,
    Extend,
    Fork,
    Free,
    Hello,
    Later,
    Message,
    Namespace,
    OpenNamespace,
    Pin,
    Ping,
    Pong,
    Probe,
    Ready,
    Release,
    Trim,
    Unpin,
    Withdraw,
)

from ..tools.daemon import Running
from ..tools.wire import Wire, tokens
from .actors import Paint, child, rows, until

PROMPT = tokens(20, 500)
HELD = 240  # slots the victim holds besides, so that the one who waits has to
WANTED = 800
KEPT = tokens(48, 9000)
CUTS = 8  # places in each verb's frame, and its two ends

Step = Callable[[Wire, dict[str, int]], Message]

STEPS: dict[str, Step] = {
    "Hello": lambda wire, seen: Hello(1, VERSION, "victim", namespace=Namespace(tenant="shared")),
    "Ping": lambda wire, seen: Ping(1),
    "OpenNamespace": lambda wire, seen: OpenNamespace(1, Namespace(tenant="victim's")),
    "Probe": lambda wire, seen: Probe(1, wire.namespace, PROMPT),
    "Allocate": lambda wire, seen: Allocate(1, wire.namespace, 1, PROMPT),
    "Allocate more": lambda wire, seen: Allocate(1, wire.namespace, 2, tokens(HELD, 3000)),
    "Extend": lambda wire, seen: Extend(1, 1, written=20, tokens=16),
    "Commit": lambda wire, seen: Commit(1, 1, 20),
    "Fork": lambda wire, seen: Fork(1, 1, 3, 20),
    "Trim": lambda wire, seen: Trim(1, 3, keep_to=10),
    "Pin": lambda wire, seen: Pin(1, wire.namespace, PROMPT),
    "Batch": lambda wire, seen: Batch(
        1,
        [
            Extend(0, 1, written=21),
            Probe(0, wire.namespace, PROMPT),
            Trim(0, 1, keep_to=21),
            Commit(0, 1, 20),
        ],
    ),
    "Allocate too much": lambda wire, seen: Allocate(1, wire.namespace, 4, tokens(900, 7000)),
    "Withdraw": lambda wire, seen: Withdraw(1, seen["ticket"]),
    "Unpin": lambda wire, seen: Unpin(1, seen["pin"]),
    "Release": lambda wire, seen: Release(1, 1, b"not its secret"),
    "Free": lambda wire, seen: Free(1, 1),
    "Free, posted": lambda wire, seen: Free(0, 3),
    "Free behind a step": lambda wire, seen: Free(1, 2, 1),
    "Bye": lambda wire, seen: Bye(1),
}
"""What the victim does, in this order; each may be its last."""


def _victim(path: Path, last: int, cut: int) -> Callable[[Callable[[Any], None]], None]:
    """Does all steps before `last`, sends a part of that one's frame, and tells how long it was."""

    def work(tell: Callable[[Any], None]) -> None:
        wire = Wire(path)
        seen: dict[str, int] = {}
        paint: Paint | None = None
        for number, (name, step) in enumerate(STEPS.items()):
            if name == "Free behind a step":
                wire.step(1, 0)
            data = encode(step(wire, seen))
            if number == last:
                inside = random.Random(last).sample(range(1, len(data)), min(CUTS, len(data) - 1))
                places = [0, *sorted(inside), len(data)]
                at = places[min(cut, len(places) - 1)] if cut >= 0 else -cut
                wire.sock.sendall(data[:at])
                tell([at, len(data)])
                while True:
                    time.sleep(60)
            wire.sock.sendall(data)
            if name == "Free, posted":
                continue
            reply = wire.reply()
            assert not isinstance(reply, messages.Error) or name == "Release", (name, reply)
            if isinstance(reply, messages.Welcome):
                wire.welcome = reply
                wire.page = SessionPage(wire.descriptors[reply.descriptors.index("page")])
                paint = Paint(wire, "shared")
            elif name == "Allocate":
                assert paint is not None
                assert isinstance(reply, Admitted)
                paint.write(PROMPT, reply.extents, reply.hit)
            elif isinstance(reply, messages.Pinned):
                seen["pin"] = reply.pin
            elif isinstance(reply, Later):
                seen["ticket"] = reply.ticket

    return work


class Witness:
    """Two sessions that live through it all: one holds painted memory, the other waits for what the victim holds."""

    def __init__(self, daemon: Running) -> None:
        self.daemon = daemon
        self.keeper, self.waiter, self.control = (Wire(daemon.socket) for _ in range(3))
        self.keeper.hello("keeper", namespace=Namespace(tenant="keeper"))
        self.waiter.hello("waiter", namespace=Namespace(tenant="shared"))
        self.paint = Paint(self.keeper, "keeper")
        self.shared = Paint(self.waiter, "shared")
        kept = self.keeper.call(Allocate, self.keeper.namespace, 1, KEPT)
        self.kept = kept.extents
        self.paint.write(KEPT, self.kept)
        assert isinstance(self.keeper.call(Commit, 1, 48), Committed)
        self.descriptors = daemon.descriptors()

    def close(self) -> None:
        self.paint.memory.close()
        self.shared.memory.close()
        self.keeper.call(Free, 1)
        for wire in (self.keeper, self.waiter):
            wire.bye()
            wire.close()
        self.control.close()

    def kill(self, last: int, cut: int) -> int:
        """One victim's life and death; returns how long its last frame would have been."""
        waiter, name = self.waiter, list(STEPS)[last]
        with child(_victim(self.daemon.socket, last, cut)) as victim:
            at, length = victim.heard()
            if name != "Hello":
                # Whatever the daemon has seen of the frame's part, this is in its queue behind it.
                asked = waiter.call(Allocate, waiter.namespace, 9, tokens(WANTED, 20_000))
            else:
                asked = waiter.call(Ping)
            victim.kill()
        where = (name, at, length)
        steps = list(STEPS)
        if steps.index("Allocate more") < last < steps.index("Bye"):
            assert isinstance(asked, Later), "the victim holds too little for anybody to wait"
        if isinstance(asked, Later):
            # Who waited is served once the dead one's memory is back.
            assert waiter.push(Ready).ticket == asked.ticket, where
            asked = waiter.call(Allocate, waiter.namespace, 9, tokens(WANTED, 20_000), asked.ticket)
        assert isinstance(asked, (Admitted, Pong)), (where, asked)
        if isinstance(asked, Admitted):
            waiter.call(Free, 9)
        until(
            lambda: len(rows(self.control, "sessions")) == 2, 5.0, f"{where}: the dead one's session is left"
        )
        # What it was half through blocks nobody: the same prompt is written and published by another, or was by it.
        again = waiter.call(Allocate, waiter.namespace, 1, PROMPT)
        assert isinstance(again, Admitted), (where, again)
        assert not self.shared.wrong(PROMPT, again.extents, again.hit), where
        self.shared.write(PROMPT, again.extents, again.hit)
        assert waiter.call(Commit, 1, 20).length == 20, where
        assert waiter.call(Probe, waiter.namespace, PROMPT).hit == 19, where
        assert not self.shared.wrong(PROMPT, again.extents), where
        waiter.call(Free, 1)
        assert not self.paint.wrong(KEPT, self.kept), where
        audited = self.control.call(messages.Audit)
        assert not audited.faults, (where, audited.faults)
        while self.control.call(Evict, 1 << 20).tokens:
            pass  # a part at a time
        assert waiter.call(Probe, waiter.namespace, PROMPT).hit == 0, where
        until(lambda: self.daemon.descriptors() == self.descriptors, 5.0, f"{where}: descriptors are left")
        return int(length)
