"""What the service manager passes back is looked at: what is torn, foreign, stale or there twice is recognised."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from kvslot import Client

from ..faults.actors import rows
from ..systemd.supervisor import Supervisor
from ..tools.wire import Wire
from .killing import kept
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
