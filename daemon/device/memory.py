"""The device of plain memory: a sealed memfd that engines map, and one thread that copies within it.

    memfd     never grows, shrinks or takes another seal, so that no client can pull the memory from under another;
              without a name in any file system, so that nothing is left when the last holder is gone
    prefault  every page is there before the first client: a shortage shows at start, not as a SIGBUS in an engine
    copies    one thread, `kvslot-device`, started by the first copy.  A batch is joined and cut (chunks.py); a cut is
              one numpy assignment, which lets go of the interpreter lock while bytes move

                  copy() --> | lane 0: streams in order     | --> thread --> outcome, then `notify`
                             | lane 1: low priority streams |        takes lane 0 first, also between two chunks of 1
                                  ^ the gate, where there is one

    twice     sources are read through one mapping of the memfd and targets written through another.  To numpy arrays
              that span all planes overlap whatever slots they show, and it copies what overlaps twice, through memory
              of its own; in two mappings nothing overlaps

Events are numbered by lane in the order of their copies and a lane ends them in that order, so that what has ended is
one number a lane and only failures are remembered.  `completion` looks at that number; nothing waits for the thread but
`close`.

Between two chunks the thread needs the interpreter lock.  A chunk that took long by the wall is therefore taken to have
ended when its CPU time had passed: after it the thread may wait for milliseconds, in which nothing is copied.  And a
loop that is at work pays for every time that the thread takes the lock, since it has to be woken anew: chunks come up
to a millisecond apart then.

Checked as the simulated device checks it: pieces within the pool, targets apart from each other, from the sources of
their batch, and (up to `WATCHED_MAX` pieces under way) from what other copies still write.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvslot.daemon.device import (
    Completion,
    DeviceFault,
    Event,
    Export,
    GateStatistics,
    Geometry,
    MemoryInformation,
    Piece,
    Stream,
    Watch,
    huge,
)
from kvslot.daemon.device.chunks import CHUNK_BYTES, ROW_BYTES, Cut, Cutter, Group, groups, joined

SEALS: Final = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
PREFAULT_BYTES: Final = 64 << 20
"""Of prefaulting between two reports: some ten milliseconds of the kernel's work."""
WATCHED_MAX: Final = 512
"""Pieces under way up to which new ones are compared with them; beyond, the comparison would cost more than it may."""
FAILURES_MAX: Final = 65536
"""Failed copies that are remembered; older ones are forgotten, and asking for one of those is a fault."""
ORDINARY_BYTES: Final = 4 << 20
"""Of one cut without a gate: large, and a low-priority copy still gives way within a millisecond."""
WIPED_BYTES: Final = 1 << 20
"""Of one call that wipes: a tenth of a millisecond."""
SPEED_FIRST: Final = 2e9
"""Weight a second that a chunk is expected to be copied at before one was."""
NO_LIMIT: Final = 1 << 62
CALL_BYTES: Final = 8192
"""What a call costs beside its rows, in bytes of a long one."""
CUT_BYTES_MIN: Final = 4096
"""What is left of a chunk, if less, is left: a call is not worth it."""
WEIGHT_MIN: Final = 4 * 4096
"""The same of its weight; and a chunk is not made smaller than this to fit into the time that is left."""
TOUCHED_MIN: Final = 4
"""Rows of a cut from which on they are touched first."""
LOOK_SECONDS: Final = 100e-6
"""Between two looks at whether the loop is at work."""
BUSY_SHARE: Final = 0.1
"""Of the time since the look before: if the thread that allowed the copies was at work for as long, this one rests."""
REST_SECONDS_MIN: Final = 200e-6
REST_SECONDS_MAX: Final = 1e-3
"""How long: from the first doubled each time in a row.  A chunk a millisecond costs a busy loop some 5 %."""
CHUNK_SECONDS: Final = 60e-6
"""A chunk is made smaller where it is expected to take longer than this."""

_MFD_NOEXEC_SEAL: Final = 8
"""Linux 6.3: never to be run, which some machines insist on."""

Bytes = npt.NDArray[np.uint8]


class NoMemory(MemoryError):
    """The memory is not there.  Nothing was taken; figures in bytes.  `why`: in other words than these."""

    def __init__(self, what: str, wanted: int, free: int, total: int, why: str = "") -> None:
        super().__init__(
            why
            or f"{what} wants {size_text(wanted)}, and {size_text(free)} of {size_text(total)} are free: "
            "make it smaller, or free memory first"
        )
        self.wanted = wanted
        self.free = free
        self.total = total


class MemoryStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the device was made."""

    batches: int
    pieces: int
    copied_bytes: int
    failures: int
    failure_last: str
    """The text of the last failure; empty without one."""
    pending: int
    """Batches that have not ended."""


class _Batch:
    """A copy and where it has come to, or (without pieces) a mark that fails with one of the batches it is behind."""

    __slots__ = ("behind", "cutter", "dropped", "event", "failed", "pieces", "wipes")

    def __init__(
        self,
        event: int,
        pieces: list[Piece],
        behind: list[int],
        parts: Sequence[Group],
        *,
        wipes: bool = False,
    ) -> None:
        self.event = event
        self.pieces = pieces
        self.behind = behind
        self.cutter = Cutter(parts, joined(pieces))
        self.dropped = False
        self.failed = False
        self.wipes = wipes  # zeros into the targets; sources mean nothing


class _Allowance:
    """What is allowed until another one is, or none.  The device thread alone takes from `bytes_left`."""

    __slots__ = ("bytes_left", "deadline", "moving", "shut_at")

    def __init__(self, deadline: float, size_bytes: int) -> None:
        self.deadline = deadline
        self.bytes_left = size_bytes
        self.moving = False  # a chunk may be under way
        self.shut_at = 0.0  # when `allow(0)` came while one was; else 0


class _Gate:
    """Open while it has an allowance."""

    __slots__ = ("allowance", "began", "caller", "watch")

    def __init__(self, watch: Watch, began: Callable[[], float] | None) -> None:
        self.watch = watch
        self.began = began
        self.caller = time.pthread_getcpuclockid(threading.get_ident())
        self.allowance: _Allowance | None = None


class _Counts:
    """Of the gate; see GateStatistics.  Changed by the device thread, but for `allowances`."""

    __slots__ = ("allowances", "bandwidth", "chunks", "closing", "closing_last", "closing_max", "copied",
                 "failure_last", "failures", "met", "pauses", "seconds", "spent", "watched")  # fmt: skip

    def __init__(self) -> None:
        self.allowances = self.pauses = self.watched = self.spent = self.met = 0
        self.chunks = self.copied = self.failures = 0
        self.bandwidth = self.seconds = self.closing = self.closing_last = self.closing_max = 0.0
        self.failure_last = ""

    def closed(self, seconds: float) -> None:
        """The gate shut that long before the last byte."""
        self.closing += seconds
        self.closing_last = seconds
        self.closing_max = max(self.closing_max, seconds)


class _Lane:
    """Batches that run in order.  `issued` and `ended` count; event = 2 * count + lane."""

    __slots__ = ("ended", "forgotten", "index", "issued", "queue")

    def __init__(self, index: int) -> None:
        self.index = index
        self.issued = 0
        self.ended = 0
        self.forgotten = 0  # up to here failures are not remembered
        self.queue: deque[_Batch] = deque()  # those that have not ended, the running one included


class MemoryDevice:
    """A `Device` (see there) whose pool is a memfd.

    `notify`, where given, is called on the device thread whenever a batch has ended, and whenever the gate has shut by
    itself; it must be quick and not raise.
    Raises NoMemory, with nothing taken, where the pool does not fit in what is free now.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        name: str = "pool",
        generation: int = 0,
        notify: Callable[[], None] | None = None,
        checked: bool = True,
        chunk_bytes: int = CHUNK_BYTES,
        descriptor: int = -1,
        page_bytes: int = 0,
    ) -> None:
        """`name` shows in /proc/PID/maps; `generation` 0: drawn; `checked` False: free memory is not looked at.

        `chunk_bytes` is the most that passes the gate between two looks.  `descriptor`: memory of an earlier device of
        this geometry, sealed as this one's would be, which is taken over with what is in it.  `page_bytes`: of huge
        pages that the memory is made of (huge.py), 0 for the ordinary ones.
        """
        if geometry.planes < 1 or geometry.slots < 1 or min(geometry.slot_bytes) < 1:
            raise DeviceFault(f"geometry {geometry} is empty")
        self._size = size = huge.whole(geometry.total_bytes, page_bytes)
        if descriptor < 0 and page_bytes:
            if why := huge.shortage(name, size, page_bytes):
                total, free = (pages * page_bytes for pages in huge.count(page_bytes))
                raise NoMemory(f"pool {name!r}", size, free, total, why)
        elif checked and descriptor < 0:
            have = available()
            if size > have.free_bytes:
                raise NoMemory(f"pool {name!r}", size, have.free_bytes, have.total_bytes)
        self.notify = notify
        self._geometry = geometry
        self._generation = generation or secrets.randbits(52) + 1
        self._descriptor = descriptor if descriptor >= 0 else _memfd(f"kvslot-{name}", page_bytes)
        try:
            if descriptor < 0:
                os.ftruncate(self._descriptor, size)
                fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
            self._map = mmap.mmap(self._descriptor, size)
        except OSError as error:
            os.close(self._descriptor)
            if error.errno in (errno.ENOMEM, errno.EFBIG, errno.ENOSPC):
                have = available()
                why = (
                    huge.shortage(name, size, page_bytes) if page_bytes else ""
                )  # others took them meanwhile
                raise NoMemory(f"pool {name!r}", size, have.free_bytes, have.total_bytes, why) from error
            raise
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
            self._map.madvise(advice)
        # Of all ways to an array only `frombuffer` keeps the mapping from being closed under it.
        memory = np.frombuffer(self._map, np.uint8)
        self._planes = list(_planes(memory, geometry))
        self._parts = groups(geometry)
        self._sources = list(_rows(memory, geometry, self._parts))
        # The mapping that targets are written through.  Made now, so that the first copy adds no descriptor.
        self._alias = mmap.mmap(self._descriptor, size)
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
            self._alias.madvise(advice)
        self._targets = list(_rows(np.frombuffer(self._alias, np.uint8), geometry, self._parts))
        self.chunk_bytes = chunk_bytes
        self._gate: _Gate | None = None
        self._counts = _Counts()
        self._speed = SPEED_FIRST  # weight a second, lately
        self._allowance: _Allowance | None = None  # the last that a chunk was copied under
        self._rest = 0.0  # the last one, if it was called for
        self._worked = self._worked_at = 0.0  # CPU time of the gate's caller as of then
        self._ran = False  # a chunk was copied since the gate last shut
        self._last = 0.0  # when the last gated byte was copied
        self._lanes = (_Lane(0), _Lane(1))
        self._streams: dict[
            int, tuple[_Lane, deque[int]]
        ] = {}  # -> its lane, and its batches that may be under way
        self._failed: dict[int, None] = {}  # events, in order
        self._work = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._asked = self._answered = 0  # whether the thread comes round: see `ask`
        self._broken: BaseException | None = None
        self._open = True
        self._batches = 0
        self._pieces = 0
        self._copied = 0
        self._failures = 0
        self._failure_last = ""

    # -- the verbs ---------------------------------------------------------------------------------------------

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def descriptor(self) -> int:
        """The memfd, which stays the device's; whoever is given it maps what `export` says, shared."""
        self._must_be_open()
        return self._descriptor

    def export(self) -> Export:
        self._must_be_open()
        return Export(kind="memfd", handle=b"", size_bytes=self._size, generation=self._generation)

    def stream(self, *, low_priority: bool = False) -> Stream:
        self._must_be_open()
        number = len(self._streams) + 1
        self._streams[number] = (self._lanes[1 if low_priority else 0], deque())
        return Stream(number)

    def copy(self, stream: Stream, pieces: Sequence[Piece]) -> Event:
        self._must_be_open()
        lane, recent = self._stream(stream)
        if not pieces:
            raise DeviceFault("a batch of no pieces")
        for source, target, length in pieces:
            self._must_be_inside(source, length)
            self._must_be_inside(target, length)
        with self._work:
            self._must_be_apart(pieces, set(recent))
            event = self._issue(lane, recent, list(pieces), [])
            self._batches += 1
            self._pieces += len(pieces)
            self._go()
        return Event(event)

    def wipe(self, stream: Stream, stretches: Sequence[tuple[int, int]]) -> Event:
        """Queues zeros for (slot, length) stretches; as `copy`, with no sources.  For streams of ordinary priority."""
        self._must_be_open()
        lane, recent = self._stream(stream)
        if lane is not self._lanes[0] or not stretches:
            raise DeviceFault("wiping nothing, or with low priority")
        for slot, length in stretches:
            self._must_be_inside(slot, length)
        pieces = [(slot, slot, length) for slot, length in stretches]
        with self._work:
            pending = [
                (target, target + length)
                for each in self._lanes
                for batch in each.queue
                for _, target, length in batch.pieces[:WATCHED_MAX]
            ]
            _apart(
                pending[:WATCHED_MAX] + [(slot, slot + length) for slot, length in stretches],
                [],
                "wiping slots that a pending copy writes",
            )
            event = self._issue(lane, recent, pieces, [], wipes=True)
            self._batches += 1
            self._go()
        return Event(event)

    def _go(self) -> None:
        """There is work for the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvslot-device", daemon=True)
            self._thread.start()
        self._work.notify()

    def event(self, stream: Stream) -> Event:
        self._must_be_open()
        lane, recent = self._stream(stream)
        with self._work:
            behind = [event for event in recent if event >> 1 > lane.ended]
            if not lane.queue:
                lane.issued += 1  # nothing to stand behind: it has ended as it is made
                lane.ended += 1
                return Event(2 * lane.issued + lane.index)
            event = self._issue(lane, recent, [], behind)
            self._work.notify()
        return Event(event)

    def completion(self, event: Event) -> Completion:
        self._must_be_open()
        lane, count = self._lanes[event & 1], event >> 1
        if not 0 < count <= lane.issued:
            raise DeviceFault(f"no event {event}")
        if count > lane.ended:
            return Completion.PENDING
        if event in self._failed:
            return Completion.FAILED
        if count <= lane.forgotten:
            raise DeviceFault(f"event {event} is older than the last {FAILURES_MAX} failures")
        return Completion.DONE

    def drop(self, event: Event) -> None:
        self._must_be_open()
        lane, count = self._lanes[event & 1], event >> 1
        if not 0 < count <= lane.issued:
            raise DeviceFault(f"no event {event}")
        with self._work:
            for batch in lane.queue:
                if batch.event == event:
                    if not batch.pieces:
                        raise DeviceFault(f"event {event} is no copy")
                    batch.dropped = True
                    self._work.notify()
                    return

    def gate(self, watch: Watch | None, *, began: Callable[[], float] | None = None) -> None:
        self._must_be_open()
        with self._work:
            self._gate = None if watch is None else _Gate(watch, began)
            self._work.notify()

    def allow(self, seconds: float, *, size_bytes: int | None = None) -> None:
        self._must_be_open()
        gate = self._gate
        if gate is None:
            raise DeviceFault("an allowance without a gate")
        if seconds < 0 or (size_bytes is not None and size_bytes < 0):
            raise DeviceFault(f"an allowance of {seconds} s, {size_bytes} bytes")
        now = time.monotonic()
        with self._work:
            if seconds > 0 and size_bytes != 0:
                self._counts.allowances += 1
                gate.allowance = _Allowance(now + seconds, NO_LIMIT if size_bytes is None else size_bytes)
                if self._lanes[1].queue:
                    self._work.notify()
            elif (before := gate.allowance) is not None:
                gate.allowance = None
                self._counts.pauses += bool(self._lanes[1].queue)
                if before.moving:
                    before.shut_at = now
                else:
                    self._counts.closed(0.0)

    def gated(self) -> GateStatistics:
        counts, gate = self._counts, self._gate
        allowance = None if gate is None else gate.allowance
        return GateStatistics(
            open=allowance is not None and time.monotonic() < allowance.deadline,
            allowances=counts.allowances,
            pauses=counts.pauses,
            watched=counts.watched,
            spent=counts.spent,
            chunks=counts.chunks,
            copied_bytes=counts.copied,
            copying_seconds=counts.seconds,
            bandwidth_lately=counts.bandwidth,
            met=counts.met,
            closing_seconds=counts.closing,
            closing_seconds_last=counts.closing_last,
            closing_seconds_max=counts.closing_max,
            watch_failures=counts.failures,
            watch_failure_last=counts.failure_last,
        )

    def memory(self) -> MemoryInformation:
        return available()

    def clock(self) -> float:
        return time.monotonic()

    def ask(self) -> int:
        self._asked += 1
        self._wake()
        return self._asked

    def answered(self, asked: int) -> bool:
        thread = self._thread
        if thread is None:
            return True  # nothing was ever to be copied
        if self._broken is not None or not thread.is_alive():
            return False
        if self._answered >= asked:
            return True
        self._wake()
        return False

    def _wake(self) -> None:
        # The thread has this lock for microseconds at a time.  If that is now, it may not see what was asked before it
        # waits; whoever looks for the answer wakes it again.
        if self._work.acquire(blocking=False):
            self._work.notify()
            self._work.release()

    def close(self) -> None:
        if not self._open:
            raise DeviceFault("the device is closed")
        with self._work:
            pending = self._pending()
            if pending and self._broken is None:
                raise DeviceFault(f"closed while {pending} copies are pending")
            self._open = False
            self._stopping = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()
        self._planes = []
        self._sources = []
        self._targets = []
        os.close(self._descriptor)
        try:
            self._alias.close()
            self._map.close()
        except BufferError:
            raise DeviceFault(
                "closed under a view of a plane: the memory goes back when the view is dropped"
            ) from None

    # -- what only plain memory has ----------------------------------------------------------------------------

    def prefault(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Makes every page exist, without changing a byte; `progress(done, total)` in bytes after each chunk.

        Takes a quarter of a second to two seconds a GiB, without holding the interpreter lock: call it before there is
        anybody to keep waiting.  Raises NoMemory when the kernel cannot.

        Pages are allocated, and enter no page table of ours: that would take three times as long, and whoever uses a
        page has a table of its own to fill anyway.
        """
        self._must_be_open()
        total = self._size
        for start in range(0, total, PREFAULT_BYTES):
            length = min(PREFAULT_BYTES, total - start)
            try:
                os.posix_fallocate(self._descriptor, start, length)
            except OSError as error:
                have = available()
                raise NoMemory("the pool's memory", total, have.free_bytes, have.total_bytes) from error
            if progress is not None:
                progress(start + length, total)

    def write(self, plane: int, slot: int, data: bytes) -> None:
        """Whole slots from `slot` on.  Requires that no copy writes them."""
        self._must_be_open()
        size = self._geometry.slot_bytes[plane]
        length, rest = divmod(len(data), size)
        if rest:
            raise DeviceFault(f"{len(data)} bytes are no whole slots of {size}")
        self._must_be_inside(slot, length)
        self._planes[plane][slot : slot + length] = np.frombuffer(data, np.uint8).reshape(length, size)

    def read(self, plane: int, slot: int, length: int) -> bytes:
        """Whole slots, as they are."""
        self._must_be_open()
        self._must_be_inside(slot, length)
        return self._planes[plane][slot : slot + length].tobytes()

    def plane(self, plane: int) -> memoryview:
        """A plane's bytes, writable; to be released before `close`."""
        self._must_be_open()
        return self._planes[plane].reshape(-1).data

    def pending(self) -> int:
        """Batches and marks that have not ended."""
        return self._pending()

    def statistics(self) -> MemoryStatistics:
        return MemoryStatistics(
            batches=self._batches,
            pieces=self._pieces,
            copied_bytes=self._copied,
            failures=self._failures,
            failure_last=self._failure_last,
            pending=self._pending(),
        )

    # -- inside, on the caller's side --------------------------------------------------------------------------

    def _issue(
        self, lane: _Lane, recent: deque[int], pieces: list[Piece], behind: list[int], *, wipes: bool = False
    ) -> int:
        while recent and recent[0] >> 1 <= lane.ended:
            recent.popleft()
        lane.issued += 1
        event = 2 * lane.issued + lane.index
        lane.queue.append(_Batch(event, pieces, behind, self._parts, wipes=wipes))
        if pieces:
            recent.append(event)
        return event

    def _pending(self) -> int:
        return sum(lane.issued - lane.ended for lane in self._lanes)

    def _stream(self, stream: Stream) -> tuple[_Lane, deque[int]]:
        found = self._streams.get(stream)
        if found is None:
            raise DeviceFault(f"no stream {stream}")
        return found

    def _must_be_open(self) -> None:
        if not self._open:
            raise DeviceFault("the device is closed")
        if self._broken is not None:
            raise DeviceFault("the device thread has ended") from self._broken

    def _must_be_inside(self, slot: int, length: int) -> None:
        if length < 1 or slot < 0 or slot + length > self._geometry.slots:
            raise DeviceFault(
                f"slots {slot}..{slot + length - 1} are not within 0..{self._geometry.slots - 1}"
            )

    def _must_be_apart(self, pieces: Sequence[Piece], mine: set[int]) -> None:
        """Targets from all else, and sources from what is still being written, but for the same stream's targets."""
        writes = [(target, target + length) for _, target, length in pieces]
        reads = [(source, source + length) for source, _, length in pieces]
        _apart(writes, reads, "a target overlaps another target or a source of its batch")
        others: list[tuple[int, int]] = []
        ours: list[tuple[int, int]] = []
        for lane in self._lanes:
            for batch in lane.queue:
                ranges = ours if batch.event in mine else others
                ranges += [(target, target + length) for _, target, length in batch.pieces]
                if len(ours) + len(others) > WATCHED_MAX:
                    return
        if ours or others:
            _apart(writes + ours + others, [], "copy into slots that a pending copy writes")
        if others:
            _apart(others, reads, "copy from slots that a pending copy of another stream writes")

    # -- inside, on the device thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._work:
                    while (lane := self._next()) is None:
                        self._answered = self._asked
                        if self._stopping:
                            return
                        self._work.wait()
                self._carry_out(lane)
        except BaseException as error:  # noqa: BLE001 -- kept, and raised by the next verb
            self._broken = error

    def _next(self) -> _Lane | None:
        """The lane whose turn it is; None if there is nothing that may run."""
        ordinary, low = self._lanes
        if ordinary.queue:
            return ordinary
        if low.queue:
            gate, batch = self._gate, low.queue[0]
            if gate is None or gate.allowance is not None or batch.dropped or not batch.pieces:
                return low
        return None

    def _carry_out(self, lane: _Lane) -> None:
        """The oldest batch of a lane, to its end or until the gate is shut."""
        batch = lane.queue[0]
        batch.failed = batch.failed or any(event in self._failed for event in batch.behind)
        cutter, ordinary = batch.cutter, self._lanes[0]
        try:
            while not (cutter.ended() or batch.dropped):
                if batch.wipes:
                    self._wipe(cutter.next(WIPED_BYTES))
                    continue
                if lane is ordinary:
                    self._copy(cutter.next(ORDINARY_BYTES))
                    continue
                while ordinary.queue:
                    self._carry_out(ordinary)
                if (gate := self._gate) is None:
                    self._copy(cutter.next(self.chunk_bytes))
                elif not self._chunks(gate, batch):
                    return
        except Exception as error:  # noqa: BLE001 -- a copy that fails is an outcome, whatever the reason
            batch.failed = True
            self._failures += 1
            self._failure_last = f"{type(error).__name__}: {error}"
        with self._work:
            if batch.failed or not batch.cutter.ended():
                self._failed[batch.event] = None
                if len(self._failed) > FAILURES_MAX:
                    oldest = next(iter(self._failed))
                    del self._failed[oldest]
                    self._lanes[oldest & 1].forgotten = oldest >> 1
            lane.queue.popleft()
            lane.ended += 1
        notify = self.notify  # it may be taken away meanwhile
        if notify is not None:
            notify()

    def _wipe(self, cut: Cut) -> None:
        self._answered = self._asked
        group, first, beyond, _, target, length = cut
        self._targets[group][first:beyond, target : target + length] = 0

    def _copy(self, cut: Cut) -> None:
        self._answered = self._asked
        group, first, beyond, source, target, length = cut
        sources, targets = self._sources[group], self._targets[group]
        if beyond - first >= TOUCHED_MIN:
            # One byte of each row first: the machine looks up many pages at a time here, and below one after the other.
            # It holds the interpreter lock for a microsecond or two and saves up to a sixth of the copy.
            sources[first:beyond, source].copy()
            targets[first:beyond, target].copy()
        targets[first:beyond, target : target + length] = sources[first:beyond, source : source + length]
        self._copied += (beyond - first) * length

    def _chunks(self, gate: _Gate, batch: _Batch) -> bool:
        """Chunks of a batch while the gate lets them; False if it is shut now, True if there is something else to do.

        What is between two chunks holds the interpreter lock, which the loop may be waiting for: it is kept short.
        """
        counts, ordinary, cutter, move, monotonic = (
            self._counts,
            self._lanes[0],
            batch.cutter,
            self._copy,
            time.monotonic,
        )
        # The thread's clock costs as much as all else here, so that it is read only after a chunk that took long.
        cpu, accounted, start = time.thread_time(), 0.0, monotonic()
        rested = False
        while not (cutter.ended() or batch.dropped or ordinary.queue):
            if self._gate is not gate:
                return True
            allowance = gate.allowance
            if allowance is None:
                return False
            if allowance is not self._allowance:
                # Whatever the loop did before it allowed this, the first chunk comes at once: the gap may be short.
                self._allowance = allowance
                self._must_rest(gate)
                self._rest = 0.0
            elif not rested and start - self._worked_at > LOOK_SECONDS and self._must_rest(gate):
                time.sleep(self._rest)
                cpu, accounted, start = time.thread_time(), 0.0, monotonic()
                rested = True
                continue
            # From here on `allow(0)` takes it that a chunk is under way.
            allowance.moving = True
            room = self.chunk_bytes
            if allowance.bytes_left < room:
                room = allowance.bytes_left
            seconds = allowance.deadline - start
            weight = (CHUNK_SECONDS if seconds > CHUNK_SECONDS else seconds) * self._speed
            if room <= 0 or (seconds < CHUNK_SECONDS and weight < WEIGHT_MIN):
                return self._shut(gate, allowance, 0.0, watched=False)
            step = 0.0
            try:
                watched = gate.watch()
                if watched and gate.began is not None:
                    step = gate.began()
            except Exception as error:  # noqa: BLE001 -- whatever is wrong with it, somebody's step may have begun
                watched = True
                counts.failures += 1
                counts.failure_last = f"{type(error).__name__}: {error}"
            if watched:
                return self._shut(gate, allowance, step, watched=True)
            if gate.allowance is not allowance:
                allowance.moving = False  # allowed anew or shut meanwhile: look again
                continue
            self._ran = True
            size, weighed, left = 0, 0, int(weight)
            while True:
                cut = cutter.next(room - size, left - weighed)
                move(cut)
                rows = cut[2] - cut[1]
                size += rows * cut[5]
                weighed += rows * (cut[5] + ROW_BYTES) + CALL_BYTES
                now = monotonic()
                if cutter.ended() or room - size < CUT_BYTES_MIN or left - weighed < WEIGHT_MIN:
                    break
                if now - start > CHUNK_SECONDS:
                    break  # it had to wait between two cuts, and somebody's step may have begun
            took = now - start
            if took > CHUNK_SECONDS:
                took = max(1e-6, min(took, time.thread_time() - cpu - accounted))
            accounted += took
            self._last = start + took
            start, rested = now, False
            counts.chunks += 1
            counts.copied += size
            counts.seconds += took
            counts.bandwidth += (size / took - counts.bandwidth) / min(16, counts.chunks)
            # Follows quickly what slows down and slowly what speeds up: rather an allowance not used up than late.
            speed = weighed / took
            self._speed += (speed - self._speed) * (0.25 if speed < self._speed else 0.0625)
            allowance.bytes_left -= size
            allowance.moving = False
            if allowance.shut_at:
                counts.closed(max(0.0, self._last - allowance.shut_at))
        return True

    def _must_rest(self, gate: _Gate) -> bool:
        """Whether the loop is at work: then the next chunk comes after a rest.

        Whenever this thread takes the interpreter lock while the loop runs, the loop has to be woken anew.
        """
        try:
            worked, at = time.clock_gettime(gate.caller), time.monotonic()
        except OSError:
            return False  # the thread that set the gate is no more
        busy = worked - self._worked >= BUSY_SHARE * (at - self._worked_at)
        self._rest = min(max(2 * self._rest, REST_SECONDS_MIN), REST_SECONDS_MAX) if busy else 0.0
        self._worked, self._worked_at = worked, at
        return busy

    def _shut(self, gate: _Gate, allowance: _Allowance, began: float, *, watched: bool) -> bool:
        """Shuts the gate unless it was allowed anew meanwhile; whether copies may go on.  `began`: the step, or 0."""
        with self._work:
            allowance.moving = False
            if gate.allowance is not allowance:
                return gate.allowance is not None
            gate.allowance = None
            counts = self._counts
            counts.pauses += 1
            late = 0.0
            if watched:
                counts.watched += 1
                if began and self._ran:
                    late = max(0.0, self._last - began)
                    counts.met += late > 0
            else:
                counts.spent += 1
                if self._ran:
                    late = max(0.0, self._last - allowance.deadline)
            counts.closed(late)
            self._ran = False
        notify = self.notify  # it may be taken away meanwhile
        if notify is not None:
            notify()
        return False


# -- what is free -------------------------------------------------------------------------------------------------


def available(proc: Path = Path("/proc"), control: Path = Path("/sys/fs/cgroup")) -> MemoryInformation:
    """Memory of this machine, or of the control group that this process is in where that has less.

    Free is what can be taken without swapping: MemAvailable; of a group, its limit less what it uses and cannot drop.
    """
    fields = {}
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0]) << 10
    total = fields["MemTotal"]
    free = fields.get("MemAvailable", fields.get("MemFree", total))
    for limit, used in _groups_of_control(proc, control):
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return MemoryInformation(total_bytes=total, free_bytes=free)


def _groups_of_control(proc: Path, control: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be dropped) of this process's groups that have a limit, inner ones first."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = control, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = control / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's, and what is mounted here is the group itself.
        folder = top / path.lstrip("/")
        for each in (folder, *folder.parents) if folder.is_dir() else (top,):
            limit, used, cache = _group(each, *names)
            if limit is not None and used is not None:
                yield limit, max(0, used - cache)
            if each == top:
                break


def _group(folder: Path, limit: str, used: str, cache: str) -> tuple[int | None, int | None, int]:
    dropped = 0
    try:
        for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == cache:
                dropped = int(value)
    except (OSError, ValueError):
        pass
    return _figure(folder / limit), _figure(folder / used), dropped


def _figure(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    if not text.isdigit():
        return None  # "max"
    value = int(text)
    return value if value < 1 << 60 else None  # version 1 says "no limit" by a number near 2^63


def size_text(size: int) -> str:
    """Bytes for people: "8 GiB", "1.5 MiB", "312 bytes"."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{size} bytes"


# -- inside -------------------------------------------------------------------------------------------------------


def _planes(memory: Bytes, geometry: Geometry) -> Iterator[Bytes]:
    """Each plane as [slot, byte]."""
    for offset, size in zip(geometry.offsets, geometry.slot_bytes, strict=True):
        yield np.ndarray((geometry.slots, size), np.uint8, memory, offset)


def _rows(memory: Bytes, geometry: Geometry, parts: Sequence[Group]) -> Iterator[Bytes]:
    """The planes again, as [plane of the group, byte]."""
    for part in parts:
        shape = (part.planes, geometry.slots * part.width)
        yield np.ndarray(shape, np.uint8, memory, part.offset, (part.stride, 1))


def _apart(writes: list[tuple[int, int]], reads: list[tuple[int, int]], fault: str) -> None:
    """A fault if a write overlaps a write or a read; ranges [first, beyond)."""
    marks = sorted([(first, beyond, True) for first, beyond in writes] + [(a, b, False) for a, b in reads])
    end_write = end_read = 0
    for first, beyond, is_write in marks:
        if first < end_write or (is_write and first < end_read):
            raise DeviceFault(f"{fault}: slots {first}..{beyond - 1}")
        if is_write:
            end_write = max(end_write, beyond)
        else:
            end_read = max(end_read, beyond)


def _memfd(name: str, page_bytes: int = 0) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | huge.flags_of(page_bytes)
    try:
        return os.memfd_create(name[:200], flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name[:200], flags)  # a kernel that does not know it


__all__ = ["MemoryDevice", "MemoryStatistics", "NoMemory", "available", "size_text"]
