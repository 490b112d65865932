"""Scrubbing: slots that somebody has used are filled with zeros before they are free for the next.

    given back, evicted ──► `pool.dirt` ──► device thread: zeros ──► free
                            fenced: counted as coming free, handed to nobody

Where it is on (`scrub` of a pool), nothing is handed out that holds what another tenant, or the same one, has left
there.  No step waits for it: engines hold their next run before they need it, and a request that finds too little that
is clean gets LATER (fenced) and a push when it is.  Requests evict nothing themselves, since they could not have it at
once: that is done here, ahead of them, for the headroom and for who waits.

It costs the device thread the time to write every slot once more, and memory bandwidth that engines on the same machine
share.  It protects against what is left behind, not against who maps the pool meanwhile: docs/security.md.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kvslot.daemon.device import Completion, Event

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from kvslot.daemon.pools import HostedPool

BATCH_BYTES: Final = 8 << 20
"""Wiped between two looks at what has ended: about a millisecond."""
AT_A_TIME: Final = 2
"""Batches under way, so that the thread need not wait for us."""
PAUSE_SECONDS: Final = 0.0005
"""Until the first look at a batch; each look that finds nothing doubles it."""
PAUSE_MOST: Final = 0.004


class Scrubber:
    """Wipes what one pool gives back."""

    def __init__(
        self,
        hosted: HostedPool,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[HostedPool, float], None],
    ) -> None:
        self._hosted = hosted
        self._loop = loop
        self._deliver = deliver
        device = hosted.device
        slot_bytes = sum(device.geometry.slot_bytes)
        self._most = max(hosted.core.unit, BATCH_BYTES // slot_bytes)
        self._stream = device.stream()
        self._running: list[tuple[Event, int, int]] = []  # event, the core's handle, slots
        self._next: asyncio.TimerHandle | None = None
        self._pause = PAUSE_SECONDS
        self.wiped_slots = 0

    def poke(self) -> None:
        """There may be something to wipe, or somebody who waits."""
        if self._next is None:
            self._turn()

    def _turn(self) -> None:
        """A look at what has ended, and the next batches; a fraction of a millisecond."""
        self._next = None
        hosted = self._hosted
        core, device = hosted.core, hosted.device
        ended = False
        while self._running and device.completion(self._running[0][0]) is not Completion.PENDING:
            event, handle, slots = self._running.pop(0)
            if device.completion(event) is not Completion.DONE:
                raise AssertionError(f"slots of pool {hosted.name!r} could not be wiped")
            core.wiped(handle)
            self.wiped_slots += slots
            ended = True
        now = time.monotonic()
        more = core.shed(now)
        while len(self._running) < AT_A_TIME:
            handle, extents = core.wipe(self._most)
            if not handle:
                break
            event = device.wipe(self._stream, list(zip(extents[::2], extents[1::2], strict=True)))
            self._running.append((event, handle, sum(extents[1::2])))
        if ended and (core.pushes or core.admission.busy):
            self._deliver(hosted, now)
        if self._running or more or core.dirt:
            self._pause = PAUSE_SECONDS if ended or more else min(2 * self._pause, PAUSE_MOST)
            self._next = self._loop.call_later(self._pause, self._turn)
        else:
            self._pause = PAUSE_SECONDS

    def close(self) -> None:
        """Waits for what is under way, a millisecond or two; nothing begins any more."""
        if self._next is not None:
            self._next.cancel()
        until = time.monotonic() + 1.0
        while self._running and time.monotonic() < until:
            if self._hosted.device.completion(self._running[0][0]) is not Completion.PENDING:
                self._running.pop(0)


__all__ = ["Scrubber"]
