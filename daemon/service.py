"""The daemon under a service manager: what is said to it when, and the proof behind each sign of life.

    starting   the limit for it is extended by each step that goes on, with what goes on as the status
    ready      once the socket accepts, not before
    serving    WATCHDOG at half the period that the manager asks for, and a line of status every few seconds
    draining   STOPPING, and the limit for it extended to what the drain may take

WATCHDOG is sent by a task of the loop, so that a loop that hangs sends none; and only after each pool's device thread
has answered what the task asked it the time before, so that a thread that hangs sends none either.  Whoever does not
answer is asked more often from then on: a busy machine is forgiven a late answer, a dead thread is not.

Without a manager (see notify.py) all this is a task that ends at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Final

import structlog

from kvslot.allocator.slots import CACHED, FREE
from kvslot.daemon.device.memory import size_text
from kvslot.daemon.logs import limited
from kvslot.daemon.notify import PATIENCE_SECONDS, Notifier, Store

if TYPE_CHECKING:
    from kvslot.daemon.server import Server

START_SECONDS: Final = 60.0
"""By which each step of the start extends its limit: longer than any takes between two reports."""
REPORT_SECONDS: Final = 1.0
"""Between two extensions."""
STOP_SECONDS: Final = 5.0
"""Beside the drain, for giving everything back."""
STATUS_SECONDS: Final = 5.0
"""Between two looks at whether the status has changed."""
ASK_AGAIN: Final = 8
"""Part of the period after which somebody who did not answer is asked again."""
PERIOD_MIN: Final = 0.02
"""Seconds; a shorter period asks for more than a loop can do."""

log = structlog.stdlib.get_logger("kvslot.daemon")


class Service:
    """This process as the manager sees it."""

    def __init__(self, notifier: Notifier | None = None, store: Store | None = None) -> None:
        """Without arguments: there is no manager."""
        self.notifier = notifier if notifier is not None else Notifier()
        self.store = store if store is not None else Store(self.notifier)
        self.withheld = 0
        """Signs of life that were due and not given."""
        self._extended = -REPORT_SECONDS
        self._asked: dict[str, int] = {}  # by pool

    @classmethod
    def take(cls, environ: MutableMapping[str, str] | None = None) -> Service:
        """By the environment, out of which it is taken."""
        notifier = Notifier.take(environ)
        if notifier.problem:
            log.warning("notify_failed", reason=notifier.problem)
        return cls(notifier, Store.take(notifier, environ))

    # -- before and after it serves ----------------------------------------------------------------------------

    def starting(self, text: str, *, begins: bool = False) -> None:
        """A step of the start `begins`, or goes on (which may be said as often as one likes); `text` says which."""
        if self.notifier.enabled:
            now = time.monotonic()
            if begins or now - self._extended >= REPORT_SECONDS:
                self._extended = now
                self.notifier.extend(START_SECONDS, text)

    def ready(self, server: Server) -> None:
        """The socket accepts.  What the manager passed and nobody took is closed."""
        for name in self.store.close():
            log.warning("descriptor_unknown", name=name)
        if self.notifier.enabled:
            self.notifier.ready(_status(server), PATIENCE_SECONDS)
            if self.notifier.failures:
                log.warning("notify_failed", reason=self.notifier.problem)

    def draining(self, seconds: float) -> None:
        """The end has begun, and takes so long at the most."""
        if self.notifier.enabled:
            self.notifier.stopping(f"draining, for {seconds:g} s at most", seconds + STOP_SECONDS)

    def reloading(self) -> None:
        """Settings are read anew, until `reloaded`."""
        self.notifier.reloading()

    def reloaded(self, server: Server) -> None:
        """They have been, or are as they were."""
        if self.notifier.enabled:
            self.notifier.ready(_status(server))

    def close(self) -> None:
        """The process ends."""
        self.notifier.flush(PATIENCE_SECONDS)
        self.store.close()
        self.notifier.close()

    # -- while it serves ---------------------------------------------------------------------------------------

    async def watch(self, server: Server) -> None:
        """Signs of life and the status, for as long as the task runs."""
        if not self.notifier.enabled:
            return
        period = self.notifier.watchdog_seconds
        if not period:
            while True:
                self.notifier.status(_status(server))
                await asyncio.sleep(STATUS_SECONDS)
        period = max(period, PERIOD_MIN)
        told = 0.0
        while True:
            silent = self.silent(server)
            if not silent:
                self.notifier.watchdog()
                pause = period / 2
            else:
                self.withheld += 1
                limited(log, "watchdog_withheld", 1.0, level="error", pools=silent, period_seconds=period)
                pause = period / ASK_AGAIN
            now = time.monotonic()
            if now - told >= STATUS_SECONDS:
                told = now
                self.notifier.status(_status(server))
            await asyncio.sleep(pause)

    def silent(self, server: Server) -> list[str]:
        """The pools whose device thread has not answered what it was asked the last time; asks the others anew."""
        silent = []
        for name, hosted in server.pools.items():
            if hosted.device.answered(self._asked.get(name, 0)):
                self._asked[name] = hosted.device.ask()
            else:
                silent.append(name)
        return silent


def _status(server: Server) -> str:
    """One line for `systemctl status`."""
    parts = []
    for name, hosted in server.pools.items():
        counts, usable = hosted.core.ledger.counts, hosted.core.usable
        cached = 100 * counts[CACHED] / usable
        held = 100 * (usable - counts[FREE] - counts[CACHED]) / usable
        size = size_text(hosted.layout.size_bytes(hosted.core.slots))
        parts.append(f"{name} ({size}) {held:.0f}% held, {cached:.0f}% cached")
    sessions = len(server.sessions)
    said = f"{sessions} session{'' if sessions == 1 else 's'}; {'; '.join(parts)}"
    left = server.drain_left(time.monotonic())
    return said if left is None else f"draining, {left:.0f} s left; {said}"
