"""Engines that follow moves, and a daemon whose compaction is switched in the midst of them."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

from kvslot.api.wire import messages

from ..tools.daemon import Running
from ..tools.painting import Painter, ids, scatter, slots_of
from ..tools.wire import tokens
from .actors import empty, until

AT_ONCE: dict[str, Any] = {"compaction": "off", "compaction_duty": 1.0}
SMALL: dict[str, Any] = {"blocks": 65, "headroom": 0.0}

Held = dict[int, tuple[list[int], list[int]]]
"""Sequences: what they read, and where."""


def follower(daemon: Running) -> Painter:
    """An engine that is told of moves."""
    engine = Painter(daemon.socket, movable=True, append="chain")
    engine.step()
    return engine


def hold(engine: Painter, prompts: list[bytes]) -> Held:
    """Reads all these."""
    held: Held = {}
    for prompt in prompts:
        begun = engine.begin(prompt + tokens(1, 7))
        if begun is not None:
            hit = begun[1].hit
            held[begun[0]] = (ids(prompt)[:hit], slots_of(begun[1].extents)[:hit])
    return held


def apply(held: Held, moved: list[messages.Moved]) -> None:
    """Tables after moves."""
    for each in moved:
        if each.sequence in held:
            slots = held[each.sequence][1]
            new = slots_of(each.extents)[: max(0, len(slots) - each.position)]
            slots[each.position : each.position + len(new)] = new


def right(engine: Painter, held: Held) -> None:
    """What is read is what was painted."""
    for sequence, (named, slots) in held.items():
        assert engine.wrong(named, slots) == [], sequence


def switch(quiet: Running, seed: int, rounds: int) -> messages.Compaction:
    """Stops, starts and changes settings at random while clients come, go and die; all bytes must be right."""
    draw = random.Random(seed)
    with Painter(quiet.socket) as painter:
        kept = scatter(painter)
        engine = follower(quiet)
        held: Held = {}
        number = 50_000
        for _ in range(rounds):
            match draw.randrange(9):
                case 0:
                    painter.defrag("once")
                case 1:
                    painter.defrag("stop")
                case 2:
                    painter.defrag("start")
                case 3:
                    painter.call(messages.SetConfig, "compaction", draw.choice(("off", "idle", "forced")))
                case 4:
                    painter.call(messages.SetConfig, "compaction_duty", draw.choice(("0.05", "0.5", "1")))
                case 5:
                    os.kill(quiet.pid, signal.SIGHUP)
                case 6:
                    painter.call(messages.Evict, draw.randint(1, 60))
                case 7:
                    held |= hold(engine, draw.sample(kept, 3))
                case _:
                    with Painter(quiet.socket) as other:
                        hold(other, draw.sample(kept, 2))
            for _ in range(draw.randrange(4)):
                number += 100
                prompt = tokens(draw.randint(2, 14), number)
                if painter.cache(prompt):
                    kept.append(prompt)
            painter.look(draw.choice(kept))
            right(engine, held)
            if draw.random() < 0.3:
                moved = engine.moved()
                apply(held, moved)
                engine.begin_step(moved[-1].epoch if moved else 0)
                right(engine, held)
                engine.end_step()
            while len(held) > 12:
                engine.call(messages.Free, next(iter(held)))
                del held[next(iter(held))]
            if draw.random() < 0.1:
                time.sleep(0.01)
        painter.defrag("stop")
        until(lambda: painter.defrag().state == "off", 5, "it was stopped")
        told = painter.defrag()
        assert told.moves_in_flight == 0
        assert told.planned == sum(
            (
                told.published, told.abandoned_leased, told.abandoned_freed, told.deferred,
                told.over_budget, told.failed,
            )
        )  # fmt: skip
        right(engine, held)
        for prompt in kept:
            painter.look(prompt)
        painter.sound()
        engine.bye()
        engine.close()
    empty(quiet)
    return told
