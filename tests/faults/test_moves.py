"""Moves that are cut off: clients killed, slow or gone; compaction switched, stopped or failing in the midst of them.

What is cached, and what is read, is painted, and looked at through the readers' own mappings.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvslot.api.wire import messages
from kvslot.api.wire.page import BEGAN, BUSY, COMPLETED, ENDED, SUBMITTED

from ..tools.daemon import Running, running
from ..tools.painting import Painter, scatter, until_rest
from ..tools.wire import tokens
from .actors import child, empty, until
from .moving import AT_ONCE, SMALL, apply, follower, hold, right, switch


@pytest.fixture(scope="module")
def quiet() -> Iterator[Running]:
    """A daemon that moves when it is asked to, in small chunks; its pool is anew for each who scatters it."""
    with running(pools=[SMALL], compaction_chunk_bytes=4096, **AT_ONCE) as daemon:
        yield daemon


def test_S19_an_engine_killed_between_moved_and_its_applying(quiet: Running) -> None:
    """kill -9 of an engine that was told and has not applied: its old places are kept while it lives, then free."""
    with Painter(quiet.socket) as painter:
        kept = scatter(painter)
        prompts = [list(each) for each in kept[::2]]

        def engine(tell: Callable[[Any], None]) -> None:
            mine = follower(quiet)
            held = hold(mine, [bytes(each) for each in prompts])
            mine.begin_step()
            tell(len(held))
            # It reads what it is told, and never applies it; nor does its step end.
            while True:
                moved = mine.moved()
                right(mine, held)
                if moved:
                    tell(len(moved))
                time.sleep(0.01)

        with child(engine) as victim:
            assert victim.heard() > 5
            painter.defrag("once")
            assert victim.heard() > 0
            until_rest(painter)
            retired = painter.defrag().retired_tokens
            assert retired > 0
            while painter.cache(tokens(20, 700_000 + painter.number)):
                if painter.call(messages.Inspect, "pools").rows[0]["evicted_tokens"] > 1500:
                    break
            assert painter.defrag().retired_tokens == retired
            victim.kill()
        until(lambda: painter.defrag().retired_tokens == 0, 5, "old places were kept for the dead")
        for prompt in kept:
            painter.look(prompt)
        painter.sound()
    empty(quiet)


def test_S19_an_engine_that_never_applies_stops_its_own_moves_only(quiet: Running) -> None:
    """Its old places stay as it reads them, within a bound; others go on, and all is free once it has ended."""
    with Painter(quiet.socket) as painter:
        kept = scatter(painter)
        engine = follower(quiet)
        held = hold(engine, kept[::2])
        engine.begin_step()
        told = 0
        for round_ in range(6):
            painter.defrag("once")
            until_rest(painter)
            told += sum(sum(each.extents[1::2]) for each in engine.moved())
            right(engine, held)
            # Others come and go, so that there is something to gain again.
            for number in range(20):
                painter.cache(tokens(9, 100_000 * (round_ + 2) + 100 * number))
            painter.call(messages.Evict, 90)
            right(engine, held)
        assert 0 < told == painter.defrag().retired_tokens <= 64 + 16 * 14
        engine.end_step()
        right(engine, held)
        assert painter.defrag().retired_tokens == told
        engine.bye()
        engine.close()
        until(lambda: painter.defrag().retired_tokens == 0, 5, "old places of an engine that has ended")
        painter.sound()
    empty(quiet)


def test_moves_are_told_again_to_an_engine_that_lost_its_connection(quiet: Running) -> None:
    """What was pushed into a connection that broke comes again, in order, before any other answer than Welcome."""
    with Painter(quiet.socket) as painter:
        kept = scatter(painter)
        engine = follower(quiet)
        assert engine.welcome is not None
        welcome, page = engine.welcome, engine.page
        assert page is not None
        held = hold(engine, kept[::2])
        painter.defrag("once")
        until_rest(painter)
        retired = painter.defrag().retired_tokens
        assert retired
        engine.sock.close()  # with all that was pushed
        again = Painter(quiet.socket, resume=welcome.session, secret=welcome.secret, boot=welcome.boot)
        sequence = next(iter(held))
        forked = again.call(messages.Fork, sequence, 77_777, -1, len(held[sequence][0]) + 1)
        assert isinstance(forked, messages.Forked)
        told = [each for each in again.pushes if isinstance(each, messages.Moved)]
        assert [each.epoch for each in told] == list(range(1, len(told) + 1))
        assert sum(sum(each.extents[1::2]) for each in told) == retired
        right(again, held)
        apply(held, told)
        right(again, held)
        again.begin_step(told[-1].epoch)
        again.end_step()
        until(lambda: painter.defrag().retired_tokens == 0, 5, "applied after a reconnect")
        right(again, held)
        painter.sound()
        again.bye()
        again.close()


@pytest.mark.parametrize("lie", ["busy", "future", "stuck"])
def test_a_page_full_of_nonsense_costs_nobody_else(quiet: Running, lie: str) -> None:
    """A session that says it is busy, or began next year, or submits and never completes: others' gaps are used."""
    with Painter(quiet.socket) as painter:
        scatter(painter)
        liar = follower(quiet)
        page = liar.page
        assert page is not None
        words = page.words
        if lie == "busy":
            words[BUSY] = 1
        elif lie == "future":
            words[BEGAN] = words[ENDED] = 1 << 62
        before = painter.defrag().published
        painter.call(messages.SetConfig, "stall_seconds", "0.5")
        painter.call(messages.SetConfig, "compaction", "idle")
        painter.defrag("start")

        def moved() -> bool:
            if lie == "stuck":
                words[SUBMITTED] += 1
            return painter.defrag().published > before

        until(moved, 10, "gaps are used")
        painter.call(messages.SetConfig, "compaction", "off")
        painter.call(messages.SetConfig, "stall_seconds", "30")
        painter.sound()
        words[COMPLETED] = words[SUBMITTED]
        liar.bye()
        liar.close()


def test_S55_switched_off_and_on_in_the_midst_of_moves(quiet: Running) -> None:
    """Random stops, starts and settings, with traffic, evictions and deaths between: all bytes right, nothing left."""
    before = published(quiet)
    # On a busy machine nothing may be published between two switches for a while.
    assert any(switch(quiet, seed, 150).published > before for seed in range(7, 12))


def published(quiet: Running) -> int:
    """Moves so far."""
    with Painter(quiet.socket) as painter:
        return painter.defrag().published


FAILING_TASK = """
from kvslot.defrag.mover import Mover
real, calls = Mover.completed, []
def completed(self, token, ok=True):
    calls.append(token)
    if len(calls) == 2:
        raise RuntimeError("planted")
    return real(self, token, ok)
Mover.completed = completed
"""


def test_a_task_that_fails_in_the_midst_of_moves_ends_the_process_and_no_byte() -> None:
    """The log's last word says what it was, the code is that of a fault, and what engines read is still there."""
    with running(pools=[SMALL], first=FAILING_TASK, code=None, faulty=True, **AT_ONCE) as daemon:
        painter = Painter(daemon.socket)
        kept = scatter(painter)
        held = hold(painter, kept[::4])
        painter.defrag("once")
        assert daemon.process.wait(10) == 70
        text = daemon.text()
        assert '"internal_fault"' in text
        assert "planted" in text
        assert '"ended"' in text.splitlines()[-1]
        right(painter, held)
        painter.close()


FAILING_DEVICE = """
import random
from kvslot.daemon.device.memory import MemoryDevice
real, draw = MemoryDevice._copy, random.Random(3)
def copy(self, cut):
    if draw.random() < 0.1:
        raise OSError("planted")
    real(self, cut)
MemoryDevice._copy = copy
"""


def test_copies_that_fail_leave_their_data_where_it_was() -> None:
    """A device that fails now and then costs moves, and not a byte."""
    with running(pools=[SMALL], first=FAILING_DEVICE, **AT_ONCE) as daemon:
        with Painter(daemon.socket) as painter:
            kept = scatter(painter)
            for _ in range(8):
                painter.defrag("once")
                until_rest(painter)
                for prompt in kept:
                    painter.look(prompt)
                painter.sound()
            told = painter.defrag()
            assert told.failed > 0
            assert told.published > 0
        empty(daemon)


def test_S47_moves_end_when_the_load_has() -> None:
    """However it churned before, once nobody uses the pool no more is moved than it has pieces, and then nothing."""
    with (
        running(pools=[SMALL], compaction="idle", compaction_duty=1.0) as daemon,
        Painter(daemon.socket) as painter,
    ):
        kept = scatter(painter)
        draw = random.Random(3)
        for number in range(300):
            painter.cache(tokens(draw.randint(2, 14), 60_000 + 100 * number))
            if draw.random() < 0.3:
                painter.call(messages.Evict, draw.randint(1, 40))
            painter.look(draw.choice(kept))
        painter.call(messages.Evict, 300)
        at_stop = painter.defrag()
        nodes = painter.call(messages.Inspect, "pools").rows[0]["nodes"]
        time.sleep(1.5)
        told = painter.defrag()
        assert told.state in ("settled", "backed off"), told
        assert told.published > 0
        assert told.published - at_stop.published <= nodes
        time.sleep(1.2)
        assert painter.defrag().planned == told.planned
        painter.sound()


def test_the_daemon_ends_in_the_midst_of_moves() -> None:
    """SIGTERM while copies are under way, and while they wait for a gap: it ends in good order."""
    for busy in (False, True):
        with running(pools=[SMALL], compaction_chunk_bytes=4096, compaction_duty=0.01) as daemon:
            painter = Painter(daemon.socket)
            painter.step()
            scatter(painter)
            if busy:
                painter.begin_step()
            painter.defrag("once")
            assert daemon.stop() == 0
            painter.close()
