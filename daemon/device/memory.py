"""The device of plain memory: a sealed memfd that engines map, and one thread that copies within it.

    memfd     never grows, shrinks or takes another seal, so that no client can pull the memory from under another;
              without a name in any file system, so that nothing is left when the last holder is gone
    prefault  every page is there before the first client: a shortage shows at start, not as a SIGBUS in an engine
    copies    one thread, `kvslot-device`, started by the first copy.  A copy of one piece is one numpy assignment for
              each group of alike planes, which lets go of the interpreter lock while bytes move

                  copy() --> | lane 0: streams in order     | --> thread --> outcome, then `notify`
                             | lane 1: low priority streams |        takes lane 0 first, also between two pieces of 1

Events are numbered by lane in the order of their copies and a lane ends them in that order, so that what has ended is
one number a lane and only failures are remembered.  `completion` looks at that number; nothing waits for the thread but
`close`.

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
    Geometry,
    MemoryInformation,
    Piece,
    Stream,
)

SEALS: Final = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
CHUNK_BYTES: Final = 64 << 20
"""Of prefaulting between two reports: some ten milliseconds of the kernel's work."""
WATCHED_MAX: Final = 512
"""Pieces under way up to which new ones are compared with them; beyond, the comparison would cost more than it may."""
FAILURES_MAX: Final = 65536
"""Failed copies that are remembered; older ones are forgotten, and asking for one of those is a fault."""

_MFD_NOEXEC_SEAL: Final = 8
"""Linux 6.3: never to be run, which some machines insist on."""

Bytes = npt.NDArray[np.uint8]


class NoMemory(MemoryError):
    """The memory is not there.  Nothing was taken; figures in bytes."""

    def __init__(self, what: str, wanted: int, free: int, total: int) -> None:
        super().__init__(
            f"{what} wants {size_text(wanted)}, and {size_text(free)} of {size_text(total)} are free: "
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
    """A copy, or (without pieces) a mark that fails with one of the batches it stands behind."""

    __slots__ = ("behind", "event", "pieces")

    def __init__(self, event: int, pieces: list[Piece], behind: list[int]) -> None:
        self.event = event
        self.pieces = pieces
        self.behind = behind


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

    `notify`, where given, is called on the device thread whenever a batch has ended; it must be quick and not raise.
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
    ) -> None:
        """`name` shows in /proc/PID/maps; `generation` 0: drawn; `checked` False: free memory is not looked at."""
        if geometry.planes < 1 or geometry.slots < 1 or min(geometry.slot_bytes) < 1:
            raise DeviceFault(f"geometry {geometry} is empty")
        size = geometry.total_bytes
        if checked:
            have = available()
            if size > have.free_bytes:
                raise NoMemory(f"pool {name!r}", size, have.free_bytes, have.total_bytes)
        self.notify = notify
        self._geometry = geometry
        self._slot_bytes = sum(geometry.slot_bytes)
        self._generation = generation or secrets.randbits(52) + 1
        self._descriptor = _memfd(f"kvslot-{name}")
        try:
            os.ftruncate(self._descriptor, size)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
            self._map = mmap.mmap(self._descriptor, size)
        except OSError as error:
            os.close(self._descriptor)
            if error.errno in (errno.ENOMEM, errno.EFBIG, errno.ENOSPC):
                have = available()
                raise NoMemory(f"pool {name!r}", size, have.free_bytes, have.total_bytes) from error
            raise
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
            self._map.madvise(advice)
        # Of all ways to an array only `frombuffer` keeps the mapping from being closed under it.
        memory = np.frombuffer(self._map, np.uint8)
        self._planes = list(_planes(memory, geometry))
        self._groups = list(_groups(memory, geometry))
        self._lanes = (_Lane(0), _Lane(1))
        self._streams: dict[
            int, tuple[_Lane, deque[int]]
        ] = {}  # -> its lane, and its batches that may be under way
        self._failed: dict[int, None] = {}  # events, in order
        self._work = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
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
        """The memfd, which stays the device's; whoever is given it maps `geometry.total_bytes` bytes, shared."""
        self._must_be_open()
        return self._descriptor

    def export(self) -> Export:
        self._must_be_open()
        size = self._geometry.total_bytes
        return Export(kind="memfd", handle=b"", size_bytes=size, generation=self._generation)

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
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvslot-device", daemon=True)
                self._thread.start()
            self._work.notify()
        return Event(event)

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

    def memory(self) -> MemoryInformation:
        return available()

    def clock(self) -> float:
        return time.monotonic()

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
        self._groups = []
        os.close(self._descriptor)
        try:
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
        total = self._geometry.total_bytes
        for start in range(0, total, CHUNK_BYTES):
            length = min(CHUNK_BYTES, total - start)
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

    def _issue(self, lane: _Lane, recent: deque[int], pieces: list[Piece], behind: list[int]) -> int:
        while recent and recent[0] >> 1 <= lane.ended:
            recent.popleft()
        lane.issued += 1
        event = 2 * lane.issued + lane.index
        lane.queue.append(_Batch(event, pieces, behind))
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
                    while not (self._lanes[0].queue or self._lanes[1].queue or self._stopping):
                        self._work.wait()
                    lane = self._lanes[0] if self._lanes[0].queue else self._lanes[1]
                    if not lane.queue:
                        return
                self._carry_out(lane)
        except BaseException as error:  # noqa: BLE001 -- kept, and raised by the next verb
            self._broken = error

    def _carry_out(self, lane: _Lane) -> None:
        """The oldest batch of a lane, to its end."""
        batch = lane.queue[0]
        failed = any(event in self._failed for event in batch.behind)
        done = 0
        try:
            for source, target, length in batch.pieces:
                if lane.index:
                    while self._lanes[0].queue:
                        self._carry_out(self._lanes[0])
                self._move(source, target, length)
                done += length
        except Exception as error:  # noqa: BLE001 -- a copy that fails is an outcome, whatever the reason
            failed = True
            self._failures += 1
            self._failure_last = f"{type(error).__name__}: {error}"
        self._copied += done * self._slot_bytes
        with self._work:
            if failed:
                self._failed[batch.event] = None
                if len(self._failed) > FAILURES_MAX:
                    oldest = next(iter(self._failed))
                    del self._failed[oldest]
                    self._lanes[oldest & 1].forgotten = oldest >> 1
            lane.queue.popleft()
            lane.ended += 1
        if self.notify is not None:
            self.notify()

    def _move(self, source: int, target: int, length: int) -> None:
        for group in self._groups:
            group[:, target : target + length] = group[:, source : source + length]


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


def _groups(memory: Bytes, geometry: Geometry) -> Iterator[Bytes]:
    """The planes again, as [plane, slot, byte]: those of one width that lie equally far apart in one array each.

    Widths repeat layer by layer (k, v, k.scale, v.scale), so the k, the v, and so on are such a row; and where all are
    of one width, all of them are.
    """
    widths, offsets = geometry.slot_bytes, geometry.offsets
    period = next(n for n in range(1, len(widths) + 1) if widths[n:] == widths[:-n])
    if len(widths) % period:
        period = len(widths)
    stride = sum(geometry.span(plane) for plane in range(period))
    for first in range(period):
        width = widths[first]
        shape = (len(widths) // period, geometry.slots, width)
        yield np.ndarray(shape, np.uint8, memory, offsets[first], (stride, width, 1))


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


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name[:200], flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name[:200], flags)  # a kernel that does not know it


__all__ = ["MemoryDevice", "MemoryStatistics", "NoMemory", "available", "size_text"]
