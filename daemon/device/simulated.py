"""A device of plain memory and virtual time, strict about its preconditions.

It is a real backend: bytes lie in planes and copies move them.  But time passes only by `advance`, and a batch takes as
long, fails as often and lands in such an order as a seeded schedule says:

    queued ---(start)--- pieces land one by one, at drawn times ---(end)--- completion is seen, later still
                           a failing batch leaves some pieces undone and scribbles over the others' targets

With a gate, batches of low-priority streams land plane by plane and in time that passes only while the gate is open:
they are put off by every second in which it is shut.  `watch` is asked at every such landing, and shuts the gate there.
A dropped batch lands no more of its pieces.

Streams are in order within themselves and not against each other.  Every write is checked against the targets of
pending copies, which would overwrite it.  Their sources may be written: then the copy holds nobody knows what, which is
well where it was given up.  Whatever is done to a closed device is a fault.  Nothing here sleeps, and the same seed and
calls give the same bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

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
)
from kvslot.daemon.device.chunks import Cut, Cutter, groups, joined, size_bytes

SCRIBBLE = 0xA5


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """How late copies are.  Times in virtual seconds."""

    latency_min: float = 0.0  # from queued (or the end of the batch before, if that is later) to landed
    latency_max: float = 0.0
    notice_max: float = 0.0  # from landed to seen by `completion`
    failures: float = 0.0  # share of batches that fail
    never: float = 0.0  # share of batches whose completion never comes, until `release`


class _Batch(msgspec.Struct, eq=False):
    event: int
    stream: int
    pieces: list[Piece]
    cuts: list[Cut]  # with a gate: of one plane each
    landings: list[float]  # when each cut, or else each piece, lands; rising
    end: float
    seen: float
    fails: bool
    landed: int = 0
    dropped: bool = False


class _Gate(msgspec.Struct, eq=False):
    watch: Watch
    began: Callable[[], float] | None
    open: bool = False
    deadline: float = 0.0
    bytes_left: float = 0.0


class SimulatedDevice:
    """A `Device` (see there) over `bytearray` planes."""

    def __init__(
        self,
        geometry: Geometry,
        *,
        seed: int = 0,
        schedule: Schedule | None = None,
        memory_bytes: int = 0,
        generation: int = 1,
    ) -> None:
        if geometry.planes < 1 or geometry.slots < 1 or min(geometry.slot_bytes) < 1:
            raise DeviceFault(f"geometry {geometry} is empty")
        self._total = memory_bytes or 2 * geometry.total_bytes
        if geometry.total_bytes > self._total:
            raise DeviceFault(f"a pool of {geometry.total_bytes} bytes on a device of {self._total}")
        self._geometry = geometry
        self._random = random.Random(seed)
        self.schedule = schedule or Schedule()
        self._now = 0.0
        self._planes = [bytearray(geometry.slots * size) for size in geometry.slot_bytes]
        self._pending: list[_Batch] = []
        self._targets: set[int] = set()
        self._outcomes: dict[int, Completion] = {}
        self._waits: dict[int, list[int]] = {}  # an event of `event()` -> the batches before it
        self._streams: dict[
            int, tuple[float, float]
        ] = {}  # stream -> end of its last batch, and when it is seen
        self._low: set[int] = set()  # streams behind the gate
        self._gate: _Gate | None = None
        self._parts = groups(geometry)
        self._counts: dict[str, int] = dict.fromkeys(
            ("allowances", "pauses", "watched", "spent", "chunks", "copied_bytes", "failures"), 0
        )
        self._failure_last = ""
        self._copying = 0.0
        self._serial = 0
        self._generation = generation
        self._open = True

    # -- the verbs ---------------------------------------------------------------------------------------------

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    def export(self) -> Export:
        self._must_be_open()
        size = self._geometry.total_bytes
        return Export(kind="simulated", handle=b"", size_bytes=size, generation=self._generation)

    def stream(self, *, low_priority: bool = False) -> Stream:
        self._must_be_open()
        self._serial += 1
        self._streams[self._serial] = (self._now, self._now)
        if low_priority:
            self._low.add(self._serial)
        return Stream(self._serial)

    def copy(self, stream: Stream, pieces: Sequence[Piece]) -> Event:
        self._must_be_open()
        if stream not in self._streams:
            raise DeviceFault(f"no stream {stream}")
        if not pieces:
            raise DeviceFault("a batch of no pieces")
        sources: list[int] = []
        targets: list[int] = []
        for source, target, length in pieces:
            self._must_be_inside(source, length)
            self._must_be_inside(target, length)
            sources += range(source, source + length)
            targets += range(target, target + length)
        target_set = set(targets)
        if len(target_set) != len(targets) or not target_set.isdisjoint(sources):
            raise DeviceFault("a target overlaps another target or a source of its batch")
        mine = {slot for batch in self._pending if batch.stream == stream for slot in _targets(batch)}
        for slot in target_set:
            if slot in self._targets:
                raise DeviceFault(f"copy into slot {slot}, which a pending copy writes")
        for slot in sources:
            # Behind its writer in the same stream a source may be read; the stream keeps the order.
            if slot in self._targets and slot not in mine:
                raise DeviceFault(f"copy from slot {slot}, which a pending copy of another stream writes")
        draw, schedule = self._random, self.schedule
        self._serial += 1
        last_end, last_seen = self._streams[stream]
        for each in self._pending:
            if each.stream == stream:  # which may have been put off since
                last_end, last_seen = max(last_end, each.end), max(last_seen, each.seen)
        start = max(self._now, last_end)
        end = start + draw.uniform(schedule.latency_min, schedule.latency_max)
        never = draw.random() < schedule.never
        cuts = self._cuts(pieces) if self._gate is not None and stream in self._low else []
        batch = _Batch(
            event=self._serial,
            stream=stream,
            pieces=list(pieces),
            cuts=cuts,
            landings=sorted(draw.uniform(start, end) for _ in cuts or pieces),
            end=end,
            seen=float("inf") if never else max(last_seen, end + draw.uniform(0, schedule.notice_max)),
            fails=draw.random() < schedule.failures,
        )
        self._streams[stream] = (end, batch.seen)
        self._pending.append(batch)
        self._targets |= target_set
        return Event(batch.event)

    def event(self, stream: Stream) -> Event:
        self._must_be_open()
        if stream not in self._streams:
            raise DeviceFault(f"no stream {stream}")
        self._serial += 1
        self._waits[self._serial] = [batch.event for batch in self._pending if batch.stream == stream]
        return Event(self._serial)

    def completion(self, event: Event) -> Completion:
        self._must_be_open()
        if event in self._waits:
            outcomes = [self._outcomes.get(batch, Completion.PENDING) for batch in self._waits[event]]
            # As a stream in order knows no other: what stands behind a failed copy has failed.
            for outcome in (Completion.PENDING, Completion.FAILED):
                if outcome in outcomes:
                    return outcome
            return Completion.DONE
        if event in self._outcomes:
            return self._outcomes[event]
        if any(batch.event == event for batch in self._pending):
            return Completion.PENDING
        raise DeviceFault(f"no event {event}")

    def drop(self, event: Event) -> None:
        self._must_be_open()
        for batch in self._pending:
            if batch.event == event:
                batch.dropped = True
                return
        if event not in self._outcomes:
            raise DeviceFault(f"event {event} is no copy")

    def gate(self, watch: Watch | None, *, began: Callable[[], float] | None = None) -> None:
        self._must_be_open()
        self._gate = None if watch is None else _Gate(watch, began)

    def allow(self, seconds: float, *, size_bytes: int | None = None) -> None:
        self._must_be_open()
        gate = self._gate
        if gate is None:
            raise DeviceFault("an allowance without a gate")
        if seconds < 0 or (size_bytes is not None and size_bytes < 0):
            raise DeviceFault(f"an allowance of {seconds} s, {size_bytes} bytes")
        if seconds == 0 or size_bytes == 0:
            if gate.open:
                self._shut(gate, "")
            return
        self._counts["allowances"] += 1
        gate.open = True
        gate.deadline = self._now + seconds
        gate.bytes_left = float("inf") if size_bytes is None else size_bytes

    def gated(self) -> GateStatistics:
        counts = self._counts
        return GateStatistics(
            open=self._gate is not None and self._gate.open,
            allowances=counts["allowances"],
            pauses=counts["pauses"],
            watched=counts["watched"],
            spent=counts["spent"],
            chunks=counts["chunks"],
            copied_bytes=counts["copied_bytes"],
            copying_seconds=self._copying,
            bandwidth_lately=counts["copied_bytes"] / self._copying if self._copying else 0.0,
            met=0,  # a landing takes no time, so that none is under way when a step begins
            closing_seconds=0.0,
            closing_seconds_last=0.0,
            closing_seconds_max=0.0,
            watch_failures=counts["failures"],
            watch_failure_last=self._failure_last,
        )

    def memory(self) -> MemoryInformation:
        used = self._geometry.total_bytes if self._open else 0
        return MemoryInformation(total_bytes=self._total, free_bytes=self._total - used)

    def clock(self) -> float:
        return self._now

    def ask(self) -> int:
        return 1

    def answered(self, asked: int) -> bool:
        return True

    def close(self) -> None:
        self._must_be_open()
        if self._pending:
            raise DeviceFault(f"closed while {len(self._pending)} copies are pending")
        self._open = False
        self._planes = []

    # -- what only a simulation has ----------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Lets time pass; what is due lands, in order of its time."""
        if seconds < 0:
            raise DeviceFault(f"time does not go back by {seconds} s")
        end = self._now + seconds
        while self._now < end or seconds == 0:
            # Up to the moment at which the gate shuts, and from there on with what is behind it put off.
            gate = self._gate
            until = end
            if gate is not None and gate.open and gate.deadline < end:
                until = max(self._now, gate.deadline)
            self._pass(until)
            if gate is not None and gate.open and gate.deadline <= self._now:
                self._shut(gate, "spent")
            if seconds == 0:
                break

    def settle(self) -> None:
        """Lets pass what time every pending copy needs, those excepted that wait for the gate
        or whose completion never comes."""
        ends = [batch.seen for batch in self._pending if batch.seen != float("inf") and not self._held(batch)]
        if ends:
            self.advance(max(0.0, max(ends) - self._now))

    def release(self) -> None:
        """Completions that never came come with the next `advance`."""
        for batch in self._pending:
            if batch.seen == float("inf"):
                batch.seen = max(batch.end, self._now)
        for stream, (end, seen) in self._streams.items():
            if seen == float("inf"):
                self._streams[stream] = (end, max(end, self._now))

    def pending(self) -> int:
        """Batches whose completion has not been seen."""
        return len(self._pending)

    def write(self, plane: int, slot: int, data: bytes) -> None:
        """Writes whole slots from `slot` on, as a kernel would; a fault where a pending copy writes them."""
        self._must_be_open()
        size = self._geometry.slot_bytes[plane]
        length, rest = divmod(len(data), size)
        if rest:
            raise DeviceFault(f"{len(data)} bytes are no whole slots of {size}")
        self._must_be_inside(slot, length)
        if self._pending:
            for each in range(slot, slot + length):
                if each in self._targets:
                    raise DeviceFault(f"write into slot {each}, the target of a pending copy")
        self._planes[plane][slot * size : (slot + length) * size] = data

    def read(self, plane: int, slot: int, length: int) -> bytes:
        """Whole slots, as a kernel would read them; a fault where a pending copy writes them."""
        self._must_be_open()
        self._must_be_inside(slot, length)
        if self._targets and not self._targets.isdisjoint(range(slot, slot + length)):
            raise DeviceFault(f"read of slots {slot}..{slot + length - 1}, some the target of a pending copy")
        size = self._geometry.slot_bytes[plane]
        return bytes(self._planes[plane][slot * size : (slot + length) * size])

    def plane(self, plane: int) -> memoryview:
        """A plane's bytes as they are, unchecked: for whoever judges the simulation."""
        self._must_be_open()
        return memoryview(self._planes[plane])

    # -- inside ------------------------------------------------------------------------------------------------

    def _must_be_open(self) -> None:
        if not self._open:
            raise DeviceFault("the device is closed")

    def _must_be_inside(self, slot: int, length: int) -> None:
        if length < 1 or slot < 0 or slot + length > self._geometry.slots:
            raise DeviceFault(
                f"slots {slot}..{slot + length - 1} are not within 0..{self._geometry.slots - 1}"
            )

    def _cuts(self, pieces: Sequence[Piece]) -> list[Cut]:
        """Each plane of each piece, as few pieces as they come to."""
        cutter = Cutter(self._parts, joined(pieces))
        cuts: list[Cut] = []
        while not cutter.ended():
            group, first, beyond, source, target, length = cutter.next(1 << 62)
            cuts += ((group, plane, plane + 1, source, target, length) for plane in range(first, beyond))
        return cuts

    def _held(self, batch: _Batch) -> bool:
        """Whether it waits for the gate."""
        gate = self._gate
        if gate is None or gate.open or batch.stream not in self._low:
            return False
        return batch.landed < len(batch.landings) and not batch.dropped

    def _pass(self, until: float) -> None:
        """Time passes without the gate being allowed or used up; it may be shut on the way."""
        while True:
            due: tuple[float, int, int] | None = None
            found: _Batch | None = None
            for batch in self._pending:
                index = batch.landed
                if index == len(batch.landings) or batch.dropped or self._held(batch):
                    continue
                key = (batch.landings[index], batch.event, index)
                if key[0] <= until and (due is None or key < due):
                    due, found = key, batch
            if due is None or found is None:
                break
            self._elapse(max(self._now, due[0]))
            if self._passes(found):
                self._land(found, found.landed)
        self._elapse(until)
        for batch in [batch for batch in self._pending if batch.seen <= until and not self._held(batch)]:
            self._end(batch)

    def _elapse(self, until: float) -> None:
        """What waits for the gate is put off by the time that passes."""
        passed = until - self._now
        self._now = until
        if passed <= 0:
            return
        gate = self._gate
        if gate is not None and gate.open:
            self._copying += passed
        for batch in self._pending:
            if self._held(batch):
                batch.landings = [when + passed for when in batch.landings]
                batch.end += passed
                batch.seen += passed

    def _passes(self, batch: _Batch) -> bool:
        """Whether the gate lets the next cut of a batch through; it may shut now."""
        gate = self._gate
        if gate is None or batch.stream not in self._low:
            return True
        size = self._size(batch, batch.landed)
        if size > gate.bytes_left:
            self._shut(gate, "spent")
            return False
        try:
            watched = gate.watch()
        except Exception as error:  # noqa: BLE001 -- whatever is wrong with it, somebody's step may have begun
            watched = True
            self._counts["failures"] += 1
            self._failure_last = f"{type(error).__name__}: {error}"
        if watched:
            self._shut(gate, "watched")
            return False
        gate.bytes_left -= size
        self._counts["chunks"] += 1
        self._counts["copied_bytes"] += size
        return True

    def _shut(self, gate: _Gate, reason: str) -> None:
        gate.open = False
        if reason:
            self._counts[reason] += 1
        self._counts["pauses"] += any(self._held(batch) for batch in self._pending)

    def _size(self, batch: _Batch, index: int) -> int:
        if batch.cuts:
            return size_bytes(batch.cuts[index])
        return batch.pieces[index][2] * sum(self._geometry.slot_bytes)

    def _land(self, batch: _Batch, index: int) -> None:
        spoilt = batch.fails and self._random.random() < 0.7
        batch.landed = index + 1
        if batch.cuts:
            number, nth, _, source, target, length = batch.cuts[index]
            group = self._parts[number]
            self._write(group.first + nth * group.every, source, target, length, spoilt)
            return
        source, target, length = batch.pieces[index]
        for plane, size in enumerate(self._geometry.slot_bytes):
            self._write(plane, source * size, target * size, length * size, spoilt)

    def _write(self, plane: int, source: int, target: int, length: int, spoilt: bool) -> None:
        memory = self._planes[plane]
        memory[target : target + length] = (
            bytes((SCRIBBLE,)) * length if spoilt else memory[source : source + length]
        )

    def _end(self, batch: _Batch) -> None:
        self._pending.remove(batch)
        whole = batch.landed == len(batch.landings) and not batch.fails
        self._outcomes[batch.event] = Completion.DONE if whole else Completion.FAILED
        self._targets.difference_update(_targets(batch))


def _targets(batch: _Batch) -> list[int]:
    return [slot for _, target, length in batch.pieces for slot in range(target, target + length)]
