"""Time to serve again, what is kept and what goes on: python -m tests.restart.measure [nodes]."""

from __future__ import annotations

import contextlib
import sys
import time

import numpy as np

from kvslot.api.client import Client
from kvslot.api.wire import Disconnected
from kvslot.api.wire.messages import Allocate, Batch, Commit, Free, Inspect, Probe

from ..tools.wire import Wire
from .killing import kept

MOST = 900  # tokens of a chat
LAYOUT = {"layers": 1, "kv_heads": 1, "head_dim": 1, "dtype": "float16"}


def fill(wire: Wire, nodes: int) -> list[bytes]:
    """Chats that go on, each turn a node more, a batch of them at a time; some of their prompts."""
    draw = np.random.default_rng(1)
    chats: list[bytes] = []
    while True:
        pool = next(row for row in wire.call(Inspect, "pools").rows)
        if pool["nodes"] >= nodes:
            return chats
        for _ in range(20):
            verbs: list[Allocate | Commit | Free] = []
            for number in range(64):
                turn = draw.integers(0, 50_000, int(draw.integers(8, 60)), dtype=np.int32).tobytes()
                index = int(draw.integers(len(chats))) if chats and draw.random() < 0.7 else -1
                if index < 0 or len(chats[index]) > 4 * MOST:
                    chats.append(turn)
                    index = len(chats) - 1
                else:
                    chats[index] += turn
                prompt = chats[index]
                verbs += [
                    Allocate(0, wire.namespace, number, prompt),
                    Commit(0, number, len(prompt) // 4),
                    Free(0, number),
                ]
            wire.call(Batch, verbs)


def main(nodes: int) -> None:
    """Fills, kills, and looks three times."""
    with kept([{"blocks": nodes * 4 + 1, "block_size": 16, "layout": LAYOUT}]) as daemon:
        wire = Wire(daemon.socket, timeout=60.0)
        wire.hello("filler")
        chats = fill(wire, nodes)
        before = next(row for row in wire.call(Inspect, "pools").rows)
        wire.bye()
        wire.close()
        print(f"{before['nodes']} nodes, {before['cached']} tokens cached of {before['usable']}")
        for _ in range(3):
            began = time.monotonic()
            daemon.manager.kill()
            ready = time.monotonic()
            wire = Wire(daemon.socket, timeout=60.0)
            wire.hello("again")
            answer = wire.call(Probe, wire.namespace, chats[0])
            served = time.monotonic()
            after = next(row for row in wire.call(Inspect, "pools").rows)
            told = daemon.events("warm_start")[-1]
            share = 100 * after["cached"] / before["cached"]
            print(
                f"kill to ready {ready - began:.2f} s, to the first answer {served - began:.2f} s (taking over "
                f"{told['seconds']:.2f} s); {share:.2f} % of the cache, hit {answer.hit}"
            )
            wire.bye()
            wire.close()


def go_on(sequences: int) -> None:
    """Engines' own: running sequences of 3,000 tokens each, and the time until the last of them goes on."""
    pool = {"blocks": sequences * 200 + 1, "block_size": 16, "layout": LAYOUT}
    with kept([pool]) as daemon, Client(str(daemon.socket)) as client:
        draw = np.random.default_rng(1)
        shared = draw.integers(0, 50_000, 1000, dtype=np.int32)
        running = []
        with client.step():
            for _ in range(sequences):
                own = draw.integers(0, 50_000, 2000, dtype=np.int32)
                running.append(client.admit(np.concatenate((shared, own))))
        for sequence in running:
            sequence.commit(2000)
        for _ in range(3):
            daemon.manager.kill()
            with contextlib.suppress(Disconnected):
                client.settle()
                client.probe([1])
            began = time.monotonic()
            client.reconnect()
            took = time.monotonic() - began
            on = sum(not each.ended for each in running)
            print(f"{on} of {sequences} sequences go on {1000 * took:.0f} ms after the engine came back")


if __name__ == "__main__":
    go_on(128)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200_000)
