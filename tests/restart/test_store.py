"""What the service manager passes back is looked at: what is torn, foreign, stale or there twice is recognised."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from kvslot import Client
from kvslot.api.wire.messages import Audit, Evict
from kvslot.daemon.journal.columns import (
    HEAD,
    SESSION_BYTES,
    SESSIONS,
    SESSIONS_USED,
    SPACE_BYTES,
    SPACES,
    WORDS,
    Head,
    read_head,
)
from kvslot.daemon.journal.writer import HOLDS, SUM

from ..faults.actors import Child, child, rows, stay, until
from ..systemd.supervisor import Supervisor
from ..tools.wire import Wire
from .killing import Kept, kept
from .test_return import PROMPT, back, fill


def _of(manager: Supervisor, kind: str) -> tuple[str, int, bool]:
    return next(each for each in manager.store if each[0].startswith(kind))


def _torn(manager: Supervisor) -> None:
    os.pwrite(_of(manager, "journal")[1], b"\xff" * 8, 40)


def _foreign(manager: Supervisor) -> None:
    entry = _of(manager, "journal")
    manager.store.remove(entry)
    manager.store.append((entry[0], os.memfd_create("foreign"), False))
    os.close(entry[1])


def _without_memory(manager: Supervisor) -> None:
    entry = _of(manager, "pool")
    manager.store.remove(entry)
    os.close(entry[1])


def _without_journal(manager: Supervisor) -> None:
    entry = _of(manager, "journal")
    manager.store.remove(entry)
    os.close(entry[1])


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_torn, "torn"),
        (_foreign, "not sealed"),
        (_without_memory, "without the memory"),
        (_without_journal, "without a journal"),
    ],
)
def test_what_does_not_belong_together_is_not_taken_over(
    spoil: Callable[[Supervisor], None], why: str
) -> None:
    """A start with half of what it needs is cold, says why, and keeps nothing of it."""
    with kept([{"blocks": 33}]) as daemon:
        with Client(str(daemon.socket)) as client:
            fill(client, PROMPT)
        manager = daemon.manager
        manager.wait(lambda: len(manager.store) == 2)
        spoil(manager)
        manager.kill()
        told = daemon.events("cold_start", "warm_start")
        assert [each["event"] for each in told] == ["cold_start", "cold_start"]
        assert why in told[1]["reason"], told
        with Client(str(daemon.socket)) as client:
            assert client.probe(PROMPT) == 0
            fill(client, PROMPT)
        manager.wait(lambda: sorted(manager.stored.values()) == [1, 1])
        manager.kill()
        with Client(str(daemon.socket)) as client:
            assert client.probe(PROMPT) == len(PROMPT) - 1


def test_what_is_there_twice_is_kept_once() -> None:
    """Beside the memory that its journal names another one of that name changes nothing, and is let go."""
    with kept([{"blocks": 33}]) as daemon:
        with Client(str(daemon.socket)) as client:
            fill(client, PROMPT)
        manager = daemon.manager
        manager.wait(lambda: len(manager.store) == 2)
        manager.store.insert(0, (_of(manager, "pool")[0], os.memfd_create("other"), False))
        manager.store.append((_of(manager, "journal")[0], os.memfd_create("other"), False))
        manager.kill()
        with Client(str(daemon.socket)) as client:
            assert client.probe(PROMPT) == len(PROMPT) - 1
        manager.wait(lambda: sorted(manager.stored.values()) == [1, 1])


@pytest.mark.parametrize("name", ["session-" + "9" * 24, "session-\u0663", "pool-", "x"])
def test_a_name_that_is_none_of_ours_ends_no_start(name: str) -> None:
    """Whatever else is in the store, what is ours is taken over."""
    with kept([{"blocks": 33}]) as daemon:
        with Client(str(daemon.socket)) as client:
            fill(client, PROMPT)
        manager = daemon.manager
        manager.wait(lambda: len(manager.store) == 2)
        manager.store.append((name, os.memfd_create("stray"), False))
        manager.kill()
        with Client(str(daemon.socket)) as client:
            assert client.probe(PROMPT) == len(PROMPT) - 1


def test_another_process_proves_nothing() -> None:
    """A pidfd that is another process's, dead as that may be, does not say that a living engine is gone."""
    with kept([{"blocks": 33}]) as daemon, Client(str(daemon.socket)) as client:
        held_by = client.admit(PROMPT)
        manager = daemon.manager
        manager.wait(lambda: any(each[0].startswith("session") for each in manager.store))
        entry = _of(manager, "session")
        dead = os.fork()
        if not dead:
            os._exit(0)
        descriptor = os.pidfd_open(dead)
        os.waitpid(dead, 0)
        manager.store.remove(entry)
        os.close(entry[1])
        manager.store.append((entry[0], descriptor, False))
        manager.kill()
        with Wire(daemon.socket) as control:
            assert [row["state"] for row in rows(control, "sessions")] == ["lost"]
            assert rows(control, "pools")[0]["quarantined"] == held_by.capacity


def test_who_said_goodbye_is_not_waited_for() -> None:
    """A daemon that dies before it has put away what a session held still knows that it was over."""
    with kept([{"blocks": 33}]) as daemon:
        manager = daemon.manager
        command = manager.command[1:3]
        manager.command[1:3] = ["-Ic", UNSWEPT]
        manager.kill()
        with Client(str(daemon.socket)) as client:
            fill(client, PROMPT)
            client.admit(list(range(500, 600)))
        manager.command[1:3] = command
        manager.kill()
        _nothing_is_held(daemon)


def test_an_engine_that_never_asked_holds_nothing_up() -> None:
    """A session that was opened, and perhaps never heard of it, is not waited for after a start."""
    with kept([{"blocks": 33}]) as daemon, Wire(daemon.socket) as wire:
        wire.hello("silent")
        daemon.manager.kill()
        with Wire(daemon.socket) as control:
            assert not rows(control, "sessions")


def test_an_idle_engine_holds_nothing_up() -> None:
    """The journal says that a session holds nothing, and so nothing has to wait for it after a start."""
    with kept([{"blocks": 33}]) as daemon, Client(str(daemon.socket)) as client:
        fill(client, PROMPT)
        pause = 1.2
        while True:
            # It is written down once a second.
            time.sleep(pause)
            daemon.manager.kill()
            with Wire(daemon.socket) as control:
                if not rows(control, "sessions"):
                    break
            pause *= 2
            assert pause < 30.0, "an idle engine is waited for"
            back(client)
        back(client)
        assert client.probe(PROMPT) == len(PROMPT) - 1


def test_a_takeover_that_fails_is_not_tried_again() -> None:
    """A fault in taking over ends the process once; the next one finds nothing to take over, and begins empty."""
    with kept([{"blocks": 33}]) as daemon:
        with Client(str(daemon.socket)) as client:
            fill(client, PROMPT)
        manager = daemon.manager
        manager.command[1:3] = ["-Ic", BROKEN]
        manager.kill(ready=False)
        manager.wait(lambda: manager.state == "running")
        told = daemon.events("cold_start", "warm_start")
        assert [each["event"] for each in told] == ["cold_start", "cold_start"]
        assert manager.codes[1] == 1
        daemon.faulty = True


def _holding(path: Path) -> Callable[[Callable[[Any], None]], None]:
    """An engine that has published a prompt, and uses slots of its own."""

    def work(tell: Callable[[Any], None]) -> None:
        client = Client(str(path))
        fill(client, PROMPT)
        client.admit(list(range(500, 600)))
        tell("there")
        stay()  # a client that is collected says goodbye

    return work


def _nothing_is_held(daemon: Kept) -> None:
    """What an engine of before the restart had, and what was cached, comes back."""
    with Wire(daemon.socket) as control:
        until(lambda: not rows(control, "sessions"), 20.0, "a dead one's session is left")
        until(lambda: rows(control, "pools")[0]["quarantined"] == 0, 20.0, "its slots are set aside")
        until(lambda: control.call(Evict, 1 << 20).tokens > 0, 20.0, "what is cached is held for it")
    daemon.manager.wait(lambda: not any(each.startswith("session") for each in daemon.manager.stored))


def _entry(daemon: Kept) -> tuple[int, int]:
    """The journal, and where in it the one session stands."""
    journal = _of(daemon.manager, "journal")[1]
    end = os.fstat(journal).st_size - SPACES * SPACE_BYTES
    table = os.pread(journal, SESSIONS * SESSION_BYTES, end - SESSIONS * SESSION_BYTES)
    (at,) = (i for i in range(0, len(table), SESSION_BYTES) if any(table[i : i + 8]))
    return journal, end - len(table) + at


def _flip(daemon: Kept, at: int) -> None:
    journal, entry = _entry(daemon)
    (byte,) = os.pread(journal, 1, entry + at)
    os.pwrite(journal, bytes([byte ^ 1]), entry + at)


def _unused(daemon: Kept) -> None:
    os.pwrite(_entry(daemon)[0], bytes(8), WORDS + 8 * SESSIONS_USED)


@pytest.mark.parametrize(
    ("spoil", "listed"),
    [
        (lambda daemon: _flip(daemon, 0), False),  # its number, which is 0 then: as if nobody stood there
        (lambda daemon: _flip(daemon, 17), False),
        (lambda daemon: _flip(daemon, SUM), False),
        (lambda daemon: _flip(daemon, 8 * HOLDS), True),
        (_unused, True),
    ],
    ids=["number", "birth", "sum", "holds", "used"],
)
def test_a_living_session_whose_entry_is_spoilt_keeps_what_it_held(
    spoil: Callable[[Kept], None], listed: bool
) -> None:
    """What it used and what is cached is given to nobody while its process lives, over starts, and comes back when it
    has ended; what was spoilt is forgotten by then."""
    with kept([{"blocks": 33}]) as daemon, child(_holding(daemon.socket)) as engine:
        engine.heard()
        manager = daemon.manager
        manager.wait(lambda: any(each.startswith("session") for each in manager.stored))
        spoil(daemon)
        for _ in range(2):
            manager.kill()
            with Wire(daemon.socket) as control:
                assert len(rows(control, "sessions")) == listed
                assert rows(control, "pools")[0]["quarantined"] >= 100
                assert control.call(Evict, 1 << 20).tokens == 0
                audited = control.call(Audit)
                assert not audited.faults
        assert len(daemon.events("sessions_torn")) == (0 if listed else 2)
        engine.kill()
        _nothing_is_held(daemon)
        manager.kill()
        assert len(daemon.events("sessions_torn")) == (0 if listed else 2)
        _, last = daemon.events("restart_settled")[-1], daemon.events("warm_start")[-1]
        assert (last["sessions"], last["aside"]) == (0, 0)


def test_an_entry_that_was_spoilt_holds_nothing_up_when_all_processes_are_known() -> None:
    """It is nobody's where every process that is kept has an entry, or has ended."""
    with kept([{"blocks": 33}]) as daemon:
        manager = daemon.manager
        with child(_holding(daemon.socket)) as engine:
            engine.heard()
            manager.wait(lambda: any(each.startswith("session") for each in manager.stored))
            _flip(daemon, 17)
            _dies_meanwhile(daemon, engine)


@pytest.mark.parametrize("after", [["a", "b"], ["b", "a"], ["a"]])
def test_an_entry_that_was_spoilt_makes_nobody_of_another_pool_a_stranger(after: list[str]) -> None:
    """Who has an entry in any journal is known, that of a pool that is taken over later or no more among them; so what
    ran in the pool with the spoilt one goes on."""
    pools = {name: {"name": name, "blocks": 33} for name in "ab"}
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(kept([pools["a"], pools["b"]]))
        client, other = (stack.enter_context(Client(str(daemon.socket), pool=name)) for name in "ab")
        sequence = client.admit(PROMPT)
        other.admit(PROMPT)
        manager = daemon.manager
        manager.wait(lambda: sum(each.startswith("session") for each in manager.stored) == 2)
        journals = [each[1] for each in manager.store if each[0].startswith("journal")]
        heads = [read_head(memoryview(os.pread(each, HEAD, 0))) for each in journals]
        (journal,) = (
            each
            for each, head in zip(journals, heads, strict=True)
            if isinstance(head, Head) and head.pool == "a"
        )
        nobody = os.fstat(journal).st_size - SPACES * SPACE_BYTES - SESSION_BYTES
        os.pwrite(journal, b"\xff" * SESSION_BYTES, nobody)
        daemon.configure([pools[name] for name in after])
        manager.kill()
        back(client)
        sequence.append(7)
        assert not daemon.events("sessions_torn")


def _dies_meanwhile(daemon: Kept, engine: Child) -> None:
    """The daemon is killed, and the engine while the next one takes over: nothing is held for it."""
    manager = daemon.manager
    manager.command[1:3] = ["-Ic", SLOW]
    manager.kill(ready=False)
    until(lambda: daemon.events("warm_start"), 30.0, "no second start")
    engine.kill()
    manager.wait(lambda: manager.state == "running")
    _nothing_is_held(daemon)


@pytest.mark.parametrize("kept_by_number", [False, True])
def test_an_engine_that_dies_while_its_pool_is_taken_over_holds_nothing(kept_by_number: bool) -> None:
    """Its end between the look at who lives and the first round of the loop is noticed like any other."""
    with kept([{"blocks": 33}]) as daemon, child(_holding(daemon.socket)) as engine:
        engine.heard()
        manager = daemon.manager
        manager.wait(lambda: any(each.startswith("session") for each in manager.stored))
        if kept_by_number:
            entry = _of(manager, "session")
            manager.store.remove(entry)
            os.close(entry[1])
        _dies_meanwhile(daemon, engine)


def test_an_engine_that_cannot_be_watched_is_looked_at_again() -> None:
    """Where no descriptor of its process can be had at the start, its end is found out by looking now and then."""
    with kept([{"blocks": 33}]) as daemon, child(_holding(daemon.socket)) as engine:
        engine.heard()
        manager = daemon.manager
        manager.wait(lambda: any(each.startswith("session") for each in manager.stored))
        entry = _of(manager, "session")
        manager.store.remove(entry)
        os.close(entry[1])
        manager.command[1:3] = ["-Ic", BLIND]
        manager.kill()
        with Wire(daemon.socket) as control:
            assert [row["state"] for row in rows(control, "sessions")] == ["lost"]
        engine.kill()
        _nothing_is_held(daemon)


def test_an_idle_engine_that_dies_after_the_restart_leaves_nothing() -> None:
    """Who held nothing is no session of the next daemon, and what is kept of it goes with its process all the same."""

    def work(tell: Callable[[Any], None]) -> None:
        client = Client(str(daemon.socket))
        tell(client.token.session)
        stay()

    with kept([{"blocks": 33}]) as daemon, child(work) as engine:
        name = f"session-{engine.heard()}"
        manager = daemon.manager
        manager.wait(lambda: name in manager.stored)
        manager.kill()
        with Wire(daemon.socket) as control:
            assert not rows(control, "sessions")
        assert name in manager.stored
        engine.kill()
        manager.wait(lambda: name not in manager.stored)
        # Nor does the journal know of it any more.
        manager.kill()
        assert [each["sessions"] for each in daemon.events("warm_start")] == [1, 0]


def test_pools_whose_names_have_the_same_checksum_are_told_apart() -> None:
    """plumless and buckeroo have the same CRC-32: each of them comes back as itself."""
    assert crc32(b"plumless") == crc32(b"buckeroo")
    with kept([{"name": "plumless", "blocks": 33}, {"name": "buckeroo", "blocks": 33}]) as daemon:
        daemon.manager.kill()
        told = daemon.events("cold_start", "warm_start")
        assert [each["event"] for each in told] == ["cold_start"] * 2 + ["warm_start"] * 2


def test_a_store_without_room_for_a_process_says_so_once() -> None:
    """Where the manager keeps no more descriptors one line tells its limit, and who dies is noticed without."""
    with kept([{"blocks": 33}], store_max=3) as daemon, contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(Wire(daemon.socket)).hello("one")
        (told,) = daemon.events("process_not_kept")
        assert (told["level"], told["limit"]) == ("warning", 3)
        assert "FileDescriptorStoreMax=" in told["remedy"]


SLOW = """
import os, sys, time
from kvslot.daemon.journal import warm

join = warm.Warm.join

def slow(self, server):
    for _, takeover in self._adopted:
        for each in takeover.living:
            while os.path.exists(f"/proc/{each.pid}"):
                time.sleep(0.01)
    join(self, server)

warm.Warm.join = slow
sys.argv[0] = "kvslotd"
from kvslot.daemon.main import main
raise SystemExit(main())
"""
"""A start that has filled its pools, and goes on once all those that lived then are dead."""

UNSWEPT = """
import sys
from kvslot.daemon.server import Server

Server._sweep = lambda self: None
sys.argv[0] = "kvslotd"
from kvslot.daemon.main import main
raise SystemExit(main())
"""
"""One that puts nothing away of sessions that are over."""

BLIND = """
import errno, os, sys

opened = os.pidfd_open

def refuse(pid, flags=0):
    os.close(opened(pid, flags))
    raise OSError(errno.EMFILE, "planted")

os.pidfd_open = refuse
sys.argv[0] = "kvslotd"
from kvslot.daemon.main import main
raise SystemExit(main())
"""
"""One that never has a descriptor left to watch a living process by."""

BROKEN = """
import sys
from kvslot.daemon.journal import warm

def broken(*_):
    raise RuntimeError("planted")

warm.take_over = broken
sys.argv[0] = "kvslotd"
from kvslot.daemon.main import main
raise SystemExit(main())
"""
