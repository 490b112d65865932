"""How the process runs Python's garbage collector, so that it never pauses the hot path.

The core builds no cycles, so reference counts free all it makes; the collector is there for what others build: an
exception whose traceback holds its own frame, a task that knows itself.  Left alone it would walk every container of a
filled pool when it feels like it, for up to a quarter of a second.

    start      a full collection, then everything that exists is frozen: never walked again; automatic runs end
    serving    none, until `served` has counted FORCED_AFTER operations without an idle moment: then the young ones
    idle       the young ones, once IDLE_AFTER operations came since the last time
    deep       everything made since start; for a drained process, or on an operator's word

A collection of the young generation walks what was made since the one before it, a few containers an operation, so its
pause is bounded by the count of operations, however large the pool is.  (The collector's own count would be no such
bound: it falls when an old object dies, so a pool in steady state could gather young ones without it rising.)  What
survives moves to the middle generation, which only `deep` walks.

Checked: whatever a collection finds was a cycle, and is counted.  A count that keeps rising in `statistics()` is a leak
in the making, and the soak test looks at it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Final, Literal

import msgspec

IDLE_AFTER: Final = 256
"""Operations from which an idle moment is used: below, a collection costs more than it could find."""
FORCED_AFTER: Final = 1024
"""Operations without an idle moment from which a collection is due anyway: at up to four surviving containers each its
pause stays below half a millisecond."""


class CollectorStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since `start`."""

    young: int
    """Collections of the young generation."""
    forced: int
    """Those of them that came while serving, for want of an idle moment."""
    full: int
    """Collections of everything, `deep` ones included; those at `start` and `stop` are not counted."""
    deep: int
    """Full collections that were asked for."""
    found: int
    """Objects that were only freed by a collection: parts of cycles."""
    pause_us_last: float
    pause_us_max: float
    """Longest pause of any collection that was not asked for by `deep`."""
    pause_us_sum: float
    frozen: int
    """Objects set aside at `start`."""


class Collector:
    """Garbage collection by the daemon's own clock.  One per process, since the collector is.

    `clock` gives nanoseconds; pauses are measured with it.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._running = False
        self._was_enabled = True
        self._operations = 0
        self._asked = False
        self._began = 0
        self._young = 0
        self._forced = 0
        self._full = 0
        self._deep = 0
        self._found = 0
        self._frozen = 0
        self._pause_ns_last = 0
        self._pause_ns_max = 0
        self._pause_ns_sum = 0

    def start(self) -> None:
        """Call once everything that lasts has been made: pools, configuration, imported modules."""
        if self._running:
            raise RuntimeError("the collector has been started")
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()
        gc.freeze()
        self._frozen = gc.get_freeze_count()
        self._running = True
        gc.callbacks.append(self._called)

    def stop(self) -> None:
        """Puts Python's own ways back."""
        if not self._running:
            return
        self._running = False
        gc.callbacks.remove(self._called)
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def __enter__(self) -> Collector:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def served(self, operations: int = 1) -> None:
        """Operations were carried out; collects when too many came without an idle moment."""
        self._operations += operations
        if self._operations >= FORCED_AFTER:
            self._operations = 0
            self._forced += 1
            gc.collect(0)

    def idle(self) -> bool:
        """Nothing is waiting to be done: a moment for the young generation.  True when it was collected."""
        if self._operations < IDLE_AFTER:
            return False
        self._operations = 0
        gc.collect(0)
        return True

    def deep(self) -> int:
        """Walks everything made since `start`, which may take long; returns how many objects it freed."""
        self._operations = 0
        self._asked = True
        try:
            self._deep += 1
            return gc.collect()
        finally:
            self._asked = False

    def statistics(self) -> CollectorStatistics:
        """Counts and pauses so far."""
        return CollectorStatistics(
            young=self._young,
            forced=self._forced,
            full=self._full,
            deep=self._deep,
            found=self._found,
            pause_us_last=self._pause_ns_last / 1e3,
            pause_us_max=self._pause_ns_max / 1e3,
            pause_us_sum=self._pause_ns_sum / 1e3,
            frozen=self._frozen,
        )

    def _called(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        """Python tells of every collection, whoever asked for it: one we did not foresee shows up here too."""
        if phase == "start":
            self._began = self._clock()
            return
        pause = self._clock() - self._began
        self._found += info["collected"] + info["uncollectable"]
        self._pause_ns_last = pause
        self._pause_ns_sum += pause
        if info["generation"] == 2:
            self._full += 1
        else:
            self._young += 1
        if not self._asked and pause > self._pause_ns_max:
            self._pause_ns_max = pause
