"""Engines of the client library that outlive their daemons: python -m tests.restart.lives [first seed] [seeds].

They do all there is to do on one small pool, as tests/client/test_random_lives.py has it.  The daemon is killed under
them at any moment, stopped before so that answers are lost, or killed again while they come back; what they go on with
reads as it was computed, and so does what they find cached.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from typing import Any

from kvslot.api.client import Client, Control, Disconnected

from ..client.test_random_lives import ENGINES, Engine
from ..faults.actors import until
from .killing import Kept, kept

TURNS = 120
KINDS: list[dict[str, Any]] = [*ENGINES, {"movable": True}]


class Survivor(Engine):
    """One that comes back."""

    def act(self) -> None:
        """As the others do; without a daemon nothing."""
        with contextlib.suppress(Disconnected):
            super().act()

    def lose(self) -> None:
        """Daemons see to that here."""

    def come_back(self, kill: Any) -> None:
        """To the next daemon; `kill` is called in between, and may end that one, too."""
        # The device ends what it had begun, and the engine what was left to do of its step.
        self.client.pool.copy(self.client.take_copies())
        for each in self.running:
            assert each.sequence.length == len(each.tokens)
            self.compute(each)
        with contextlib.suppress(Disconnected):
            self.client.complete()
        asked = self.client._call

        def call(request: Any, kind: Any) -> Any:
            kill()
            return asked(request, kind)

        while True:
            try:
                if self.client._connection.fault is None:
                    self.client.settle()
                    break
            except Disconnected:
                pass
            self.client._call = call  # type: ignore[method-assign]
            try:
                with contextlib.suppress(Disconnected):
                    self.client.reconnect()
            finally:
                del self.client._call
        for each in list(self.running):
            if each.sequence.ended:
                self.running.remove(each)
                self.count("lost")
            else:
                self.check(each)
                self.count("went on")


def live(seed: int, pools: list[dict[str, Any]]) -> dict[str, int]:
    """One history; what was done in it."""
    rng = random.Random(seed)
    with kept(pools) as daemon, contextlib.ExitStack() as stack:
        kinds = KINDS if "opaque_block_bytes" not in pools[0] else [{}, {}]
        engines = [
            Survivor(str(daemon.socket), 10 * seed + i, {**kind, "timeout": 0.5})
            for i, kind in enumerate(kinds)
        ]
        for engine in engines:
            stack.callback(engine.client.close)
        for _ in range(TURNS):
            rng.choice(engines).act()
            if rng.random() < 0.06:
                _restart(daemon, engines, rng)
        done: dict[str, int] = {}
        for engine in engines:
            for what, count in engine.done.items():
                done[what] = done.get(what, 0) + count
            while True:
                try:
                    engine.leave()
                    break
                except Disconnected:
                    engine.come_back(lambda: None)
        stack.pop_all()
        Client(str(daemon.socket)).close()  # goodbyes that nobody heard are said by it
        with Control(str(daemon.socket)) as control:

            def held() -> tuple[int, ...]:
                (row,) = control.inspect("pools")
                return tuple(
                    row[name] for name in ("sequences", "private", "fenced", "quarantined", "moving")
                )

            until(lambda: not any(held()), 20.0, f"slots are set aside for nobody: {held()}")
            assert control.audit().faults == []
    return done


def _restart(daemon: Kept, engines: list[Survivor], rng: random.Random) -> None:
    """The daemon is killed, perhaps after some of its answers were lost, and perhaps once more."""
    if rng.random() < 0.4:
        os.kill(daemon.manager.pid, signal.SIGSTOP)
        for engine in rng.sample(engines, 2):
            engine.act()  # what it asks is not answered
        if rng.random() < 0.5:
            # It is done all the same, and nobody hears of it.
            for engine in engines:
                engine.client._connection.lost("a test cut it")
            os.kill(daemon.manager.pid, signal.SIGCONT)
            time.sleep(0.02)
    daemon.manager.kill()
    left = rng.choice((0, 0, 1, 3, 6))

    def kill() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            daemon.manager.kill()

    for engine in engines:
        engine.come_back(kill)
    for engine in engines:
        engine.come_back(lambda: None)


if __name__ == "__main__":
    first, count = (int(each) for each in [*sys.argv[1:], "0", "20"][:2])
    for number in range(first, first + count):
        print(number, live(number, [{"blocks": 64, "scrub": number % 3 == 0}]), flush=True)
