"""The tests' own manager keeps, returns and drops as systemd does: what other tests show with it rests on that."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from .supervisor import Supervisor

SERVICE = """\
import os, signal, sys
from kvslot.daemon.notify import Notifier, Store
notifier = Notifier.take()
store = Store.take(notifier)
def on(number, act):
    signal.signal(number, lambda *_: act())
on(signal.SIGTERM, lambda: sys.exit(0))
"""
"""What each service here begins with."""
SERVE = """
notifier.ready(" ".join(f"{name}={len(found)}" for name, found in sorted(store.inherited.items())) or "nothing")
while True:
    signal.pause()
"""


@contextmanager
def service(code: str, **how: object) -> Iterator[Supervisor]:
    """A service that does `code`."""
    with Supervisor([sys.executable, "-Ic", SERVICE + code], **how) as manager:  # type: ignore[arg-type]
        yield manager


def test_what_is_stored_comes_back_until_the_service_is_stopped() -> None:
    """Kept descriptors return, by name and the same files, after a crash and a restart; after a stop they are gone."""
    code = """
if not store.inherited:
    for name in ("pool", "pool", "page"):
        store.keep(name, os.memfd_create(name))
    once = os.memfd_create("once")
    for _ in range(3):
        store.keep("once", once)
on(signal.SIGUSR1, lambda: store.forget("pool"))
"""
    with service(code + SERVE, store_max=4) as manager:
        manager.start()
        assert manager.status == "nothing"
        assert manager.stored == {"pool": 2, "page": 1, "once": 1}, "the same file is kept once"
        inodes = [os.fstat(each).st_ino for _, each, _ in manager.store]
        manager.kill()
        assert manager.status == "once=1 page=1 pool=2"
        assert manager.restart() == 0
        assert manager.status == "once=1 page=1 pool=2"
        assert [os.fstat(each).st_ino for _, each, _ in manager.store] == inodes
        manager.send(signal.SIGUSR1)
        manager.wait(lambda: manager.stored == {"page": 1, "once": 1})
        manager.kill()
        assert manager.status == "once=1 page=1"
        assert manager.stop() == 0
        assert manager.stored == {}
        manager.start()
        assert manager.status == "nothing"


def test_what_hangs_up_or_is_too_much_is_let_go() -> None:
    """A polled descriptor goes once its other end has; beyond the limit nothing is kept; unpolled ones stay."""
    code = """
readable, writable = os.pipe()
store.keep("polled", readable, poll=True)
store.keep("unpolled", os.dup(os.pipe()[0]))
for index in range(5):
    notifier.post("FDSTORE=1\\nFDNAME=more", os.memfd_create(str(index)))
on(signal.SIGUSR1, lambda: os.close(writable))
"""
    with service(code + SERVE, store_max=4) as manager:
        manager.start()
        manager.wait(lambda: manager.dropped == 3)
        assert manager.stored == {"polled": 1, "unpolled": 1, "more": 2}
        manager.send(signal.SIGUSR1)
        manager.wait(lambda: manager.stored == {"unpolled": 1, "more": 2})


def test_limits_are_kept_and_extended() -> None:
    """Who is not ready in time is killed, unless it says that it goes on; who gives no sign of life is aborted."""
    with service("signal.pause()", start_seconds=0.3, restarts=False) as manager:
        manager.start(ready=False)
        manager.wait(lambda: manager.state == "dead")
        assert manager.history == ["started", "late", "exited"]
        assert manager.codes == [-signal.SIGKILL]
    code = """
import time
told = []
on(signal.SIGUSR1, lambda: told.append(1))
notifier.extend(600)
while not told:
    time.sleep(0.01)
"""
    with service(code + SERVE, watchdog_seconds=0.3, restarts=False) as manager:
        manager.start(ready=False)
        manager.wait(lambda: manager._deadline > time.monotonic() + 2 * manager.start_seconds)
        manager.send(signal.SIGUSR1)
        manager.wait(lambda: manager.state == "dead")
        assert manager.history == ["started", "ready", "watchdog", "exited"]
        assert manager.codes == [-signal.SIGABRT]


def test_only_the_main_process_is_heard() -> None:
    """What a child says is not heeded (NotifyAccess=main)."""
    code = """
if not os.fork():
    notifier.post("STATUS=from a child\\nWATCHDOG=1")
    os._exit(0)
os.wait()
"""
    with service(code + SERVE) as manager:
        manager.start()
        assert manager.status == "nothing"
        assert [each.fields["STATUS"] for each in manager.ignored] == ["from a child"]


def test_a_failure_is_tried_again_but_for_some() -> None:
    """After a failure it is started again, after the codes of RestartPreventExitStatus and a good end it is not."""
    for code, starts in ((70, 2), (2, 1), (3, 1), (0, 1)):

        def done(manager: Supervisor, wanted: int = starts) -> bool:
            return manager.starts == wanted and len(manager.codes) == 1

        text = f"if os.path.exists(sys.argv[1]): signal.pause()\nopen(sys.argv[1], 'w')\nsys.exit({code})"
        with service(text) as manager:
            manager.command.append(str(manager.folder / "there"))
            manager.start(ready=False)
            manager.wait(partial(done, manager))
            assert manager.state == ("starting" if starts == 2 else "dead")
