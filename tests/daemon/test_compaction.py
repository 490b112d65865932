"""Compaction in a real daemon: what it gains, what it leaves alone, and what its clients see of it.

Everything cached is painted, and looked at again through the client's own mapping after it was moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvslot.api.wire import messages
from kvslot.api.wire.page import WAKE

from ..tools.daemon import Running, running
from ..tools.painting import Painter, ids, scatter, slots_of, until_rest
from ..tools.wire import tokens

SMALL: dict[str, Any] = {"blocks": 65, "headroom": 0.0}
AT_ONCE: dict[str, Any] = {"compaction_duty": 1.0}


@pytest.fixture(scope="module")
def quiet() -> Iterator[Running]:
    """A daemon that moves only when it is asked to; its pool is anew for each who scatters it."""
    with running(pools=[SMALL], compaction="off", **AT_ONCE) as daemon:
        yield daemon


def wait(what: Callable[[], bool], seconds: float = 5.0) -> None:
    """Until something holds."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_once_gathers_what_is_scattered_and_every_byte_is_right(quiet: Running) -> None:
    """Asked for once, whole blocks come free, all that was cached reads as it was painted, and it is off again."""
    with Painter(quiet.socket) as painter:
        kept = scatter(painter)
        before = painter.defrag()
        assert (before.mode, before.state) == ("off", "off")
        assert before.unpacked_pct > 25
        painter.defrag("once")
        after = until_rest(painter)
        assert after.published == after.planned - after.deferred > 5
        assert after.blocks_given > 5
        assert after.unpacked_pct < 15
        assert after.moved_bytes == after.moved_tokens * sum(each.slot_bytes for each in painter.pool.planes)
        assert sum(painter.look(each) for each in kept) > 100
        wait(lambda: painter.defrag().state == "off")
        painter.sound()
        assert '"compaction_planned"' in quiet.text()
        assert '"compaction_moved"' in quiet.text()


def test_it_begins_by_itself_and_ends_by_itself() -> None:
    """Above the threshold it begins within moments, comes to rest, and then asks nothing of anybody."""
    with running(pools=[SMALL], compaction="idle", **AT_ONCE) as daemon, Painter(daemon.socket) as painter:
        kept = scatter(painter)
        wait(lambda: painter.defrag().published > 0)
        wait(lambda: painter.defrag().state in ("settled", "backed off"))
        told = painter.defrag()
        assert told.unpacked_pct < 25
        assert sum(painter.look(each) for each in kept) > 100
        wait(lambda: painter.defrag().state in ("settled", "backed off"))
        assert painter.page is not None
        assert painter.page.words[WAKE] == 0
        painter.sound()


def test_it_is_switched_off_and_on_while_running() -> None:
    """`stop` and the setting end it, `start` and the setting begin it; nothing of it is left meanwhile."""
    with running(pools=[SMALL], compaction="idle", **AT_ONCE) as daemon, Painter(daemon.socket) as painter:
        assert painter.defrag("stop").mode == "off"
        scatter(painter)
        time.sleep(1.1)
        told = painter.defrag()
        assert (told.planned, told.moves_in_flight, told.state) == (0, 0, "off")
        assert painter.defrag("start").mode == "idle"
        wait(lambda: painter.defrag().published > 0)
        painter.call(messages.SetConfig, "compaction", "off")
        wait(lambda: painter.defrag().state == "off")
        assert painter.call(messages.SetConfig, "compaction", "sometimes").code
        assert painter.call(messages.SetConfig, "compaction_stop", "0.9").code
        painter.call(messages.SetConfig, "compaction", "forced")
        assert painter.defrag().mode == "forced"
        painter.call(messages.SetConfig, "compaction", "off")
        assert painter.defrag("start").mode == "idle"
        painter.sound()


def test_the_last_word_counts(quiet: Running) -> None:
    """`start` and `stop` hold until the setting is set again, be it to what it was; status says whose word it is."""
    with Painter(quiet.socket) as painter:

        def set_to(value: str) -> None:
            painter.call(messages.SetConfig, "compaction", value)

        set_to("off")
        assert "setting" in painter.defrag().reason
        started = painter.defrag("start")
        assert (started.mode, started.state) == ("idle", "planning")
        assert "the setting is off" in started.reason
        set_to("off")
        told = painter.defrag()
        assert (told.mode, told.state) == ("off", "off")
        scatter(painter)
        before = painter.defrag().published
        time.sleep(1.2)
        assert painter.defrag().published == before
        set_to("idle")
        stopped = painter.defrag("stop")
        assert (stopped.mode, stopped.reason) == ("off", "by `defrag stop`")
        set_to("idle")
        assert painter.defrag().mode == "idle"
        set_to("off")


OVERTAKEN = """
from kvslot.defrag.pace import Following
Following.fed = lambda self, *words, **named: False
"""


def test_once_ends_where_it_cannot_follow_and_it_is_off_again_as_before() -> None:
    """Asked for in a pool that changes too fast, it gives up, tells so in the log, and nothing of it is left."""
    with (
        running(pools=[SMALL], compaction="off", first=OVERTAKEN) as daemon,
        Painter(daemon.socket) as painter,
    ):
        scatter(painter)
        painter.defrag("once")
        assert until_rest(painter).published == 0
        wait(lambda: painter.defrag().state == "off")
        assert painter.defrag().reason == "by the setting `compaction`"
        assert '"compaction_overtaken"' in daemon.text()
        assert '"compaction_off"' in daemon.text()
        painter.sound()


def test_blocks_given_are_those_that_are_there(quiet: Running) -> None:
    """Taken and given back together: in a pool that nobody else uses it is the change of what is wholly free."""
    with Painter(quiet.socket) as painter, Painter(quiet.socket, movable=True, append="chain") as reader:
        kept = scatter(painter, keep=0.3)
        reader.step()
        held = [begun for each in kept[::4] if (begun := reader.begin(each + tokens(1, 7))) is not None]

        def free() -> int:
            count = painter.call(messages.Inspect, "pools").rows[0]["blocks_free"]
            assert isinstance(count, int)
            return count

        blocks, given = free(), painter.defrag().blocks_given
        reader.begin_step()
        painter.defrag("once")
        told = until_rest(painter)
        assert free() - blocks == told.blocks_given - given > 0
        moved = reader.moved()
        reader.end_step()
        if moved:
            reader.begin_step(moved[-1].epoch)
            reader.end_step()
            wait(lambda: painter.defrag().retired_tokens == 0)
        assert free() - blocks == painter.defrag().blocks_given - given
        for number, _ in held:
            reader.call(messages.Free, number)


def test_readers_that_do_not_follow_keep_their_place(quiet: Running) -> None:
    """What a session reads that is not movable stays where it is, whatever else is moved around it."""
    with Painter(quiet.socket) as painter, Painter(quiet.socket) as reader:
        kept = scatter(painter)
        held = []
        for prompt in kept[::5]:
            begun = reader.begin(prompt + tokens(1, 7))
            assert begun is not None
            held.append((prompt, begun[1]))
        painter.defrag("once")
        told = until_rest(painter)
        assert told.published > 0
        assert not any(isinstance(each, messages.Moved) for each in reader.pushes)
        for prompt, answer in held:
            slots = slots_of(answer.extents)[: answer.hit]
            assert reader.wrong(ids(prompt)[: answer.hit], slots) == []
        assert sum(painter.look(each) for each in kept) > 100
        painter.sound()


def test_readers_that_follow_are_told_and_keep_the_old_place_until_their_step_has_ended() -> None:
    """Moved comes in order; both places hold the bytes until the step before has ended; then the old one is free."""
    # Large and loose enough that what is read has to move as well, wherever the prompts happen to lie.
    with (
        running(pools=[{**SMALL, "blocks": 257}], compaction="off", **AT_ONCE) as daemon,
        Painter(daemon.socket) as painter,
        Painter(daemon.socket, movable=True, append="chain") as reader,
    ):
        kept = scatter(painter, keep=0.3)
        reader.begin_step()
        reader.end_step()
        tables: dict[int, tuple[list[int], list[int]]] = {}
        for prompt in kept[::2]:
            begun = reader.begin(prompt + tokens(1, 7))
            assert begun is not None
            tables[begun[0]] = (ids(prompt)[: begun[1].hit], slots_of(begun[1].extents)[: begun[1].hit])
        reader.begin_step()
        painter.defrag("once")
        told = until_rest(painter)
        moved = reader.moved()
        assert len(moved) > 3, told
        assert [each.epoch for each in moved] == list(range(1, len(moved) + 1))
        assert told.retired_tokens == sum(sum(each.extents[1::2]) for each in moved)
        for named, slots in tables.values():
            assert reader.wrong(named, slots) == []
        # All that can be had is taken and painted over, while the step that reads the old places still runs.
        room = tokens(painter.call(messages.Inspect, "pools").rows[0]["free"], 900_000)
        filled = painter.begin(room)
        for named, slots in tables.values():
            assert reader.wrong(named, slots) == []
        reader.end_step()
        for each in moved:
            slots = tables[each.sequence][1]
            slots[each.position : each.position + sum(each.extents[1::2])] = slots_of(each.extents)
        reader.begin_step(moved[-1].epoch)
        for named, slots in tables.values():
            assert reader.wrong(named, slots) == []
        reader.end_step()
        wait(lambda: painter.defrag().retired_tokens == 0)
        if filled is not None:
            painter.call(messages.Free, filled[0])
        for named, slots in tables.values():
            assert reader.wrong(named, slots) == []
        painter.sound()


def test_copies_wait_for_a_gap() -> None:
    """While an engine's step runs nothing is copied; the bell of its end is asked for, and then it goes on."""
    with (
        running(pools=[SMALL], compaction="idle", compaction_collisions=0.3) as daemon,
        Painter(daemon.socket) as painter,
        Painter(daemon.socket) as engine,
    ):
        engine.begin_step()
        engine.call(messages.Ping)
        scatter(painter)
        assert engine.page is not None
        wait(lambda: engine.page is not None and engine.page.words[WAKE] == 1)
        time.sleep(0.2)
        told = painter.defrag()
        assert told.published == 0
        assert told.state == "waiting"
        engine.end_step()
        wait(lambda: painter.defrag().published > 0, 20)
        painter.sound()


def test_a_run_is_made_by_moves_before_anything_is_evicted_for_it() -> None:
    """A request for one long run is served though free memory is scattered, and the cache is still there."""
    with (
        running(
            pools=[{**SMALL, "watermark": 0.0}], compaction="idle", compaction_start=1.0, **AT_ONCE
        ) as daemon,
        Painter(daemon.socket) as painter,
    ):
        kept = scatter(painter)
        before = painter.call(messages.Inspect, "pools").rows[0]
        long = tokens(max(200, before["largest_free_run"] + 64), 500_000)
        answer = painter.call(messages.Allocate, painter.namespace, 999_999, long, contiguous=True)
        if isinstance(answer, messages.Later):
            assert painter.push(messages.Ready).ticket == answer.ticket
            answer = painter.call(
                messages.Allocate, painter.namespace, 999_999, long, answer.ticket, contiguous=True
            )
        assert isinstance(answer, messages.Admitted), answer
        assert len(answer.extents) == 2
        after = painter.call(messages.Inspect, "pools").rows[0]
        assert after["evicted_tokens"] == before["evicted_tokens"]
        assert sum(painter.look(each) for each in kept) > 100
        painter.sound()
