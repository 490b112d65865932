"""Engines that are killed, stopped and replaced at random moments."""

from __future__ import annotations

import random
import signal
import time
from contextlib import ExitStack, closing

from ..tools.daemon import running
from .actors import Child, audit, child, empty
from .engines import engine


def soak(seed: int, seconds: float, **pool: object) -> int:
    """How many engines lived and died."""
    rng = random.Random(seed)
    lives = 0
    with running(stall_seconds=0.5, pools=[{"blocks": 33, **pool}]) as daemon, ExitStack() as stack:
        engines: list[Child] = []
        stacks: list[ExitStack] = []
        for _ in range(6):
            stacks.append(stack.enter_context(closing(ExitStack())))
            engines.append(stacks[-1].enter_context(child(engine(daemon.socket, seed * 100 + lives))))
            lives += 1
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(rng.random() * 0.05)
            place = rng.randrange(6)
            one = engines[place]
            fate = rng.random()
            if fate < 0.6:
                while one.told():
                    pass
                stacks[place].close()
                engines[place] = stacks[place].enter_context(child(engine(daemon.socket, seed * 100 + lives)))
                lives += 1
            elif fate < 0.8:
                one.signal(signal.SIGSTOP)
                time.sleep(rng.random() * 0.1)
                one.signal(signal.SIGCONT)
            if rng.random() < 0.1:
                audit(daemon)
        for one in engines:
            while one.told():
                pass
        stack.pop_all().close()
        empty(daemon)
    return lives
