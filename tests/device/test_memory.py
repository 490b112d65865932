"""The device of plain memory: sealed, shared by descriptor, copied within by one thread, and given back whole."""

import errno
import fcntl
import gc
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvslot.daemon.device import Completion, Device, DeviceFault, Event, Geometry, Stream
from kvslot.daemon.device.chunks import Cut
from kvslot.daemon.device.memory import MemoryDevice, NoMemory, available, size_text

GEOMETRY = Geometry(slots=64, slot_bytes=(8, 8, 4, 4) * 3, alignment=4096)


class Held(MemoryDevice):
    """A device whose copies wait for `go`, and fail where `fails` says."""

    def __init__(self, geometry: Geometry = GEOMETRY) -> None:
        self.go = threading.Event()
        self.moving = threading.Event()
        self.fails = False
        self.order: list[tuple[int, int, int]] = []
        super().__init__(geometry)

    def _copy(self, cut: Cut) -> None:
        self.moving.set()
        assert self.go.wait(30)
        group, _, _, source, target, length = cut
        if group == 0:
            width = self.geometry.slot_bytes[0]
            self.order.append((source // width, target // width, length // width))
        if self.fails:
            raise RuntimeError("out of order")
        super()._copy(cut)

    def finish(self) -> None:
        """Lets all copies go, and closes."""
        self.go.set()
        settle(self)
        self.close()


def settle(device: MemoryDevice) -> None:
    """Until nothing is pending."""
    deadline = time.monotonic() + 30
    while device.pending():
        assert time.monotonic() < deadline, "a copy does not end"
        time.sleep(0.0005)


def paint(device: MemoryDevice) -> None:
    """Slot n of plane p holds n + p in each byte."""
    for plane, size in enumerate(device.geometry.slot_bytes):
        for slot in range(device.geometry.slots):
            device.write(plane, slot, bytes(((slot + plane) % 256,)) * size)


@pytest.fixture
def device() -> Iterator[MemoryDevice]:
    made = MemoryDevice(GEOMETRY)
    yield made
    settle(made)
    made.close()


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.finish()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def settled_and_closed() -> tuple[MemoryDevice, Stream, Event]:
    """A device that has copied once, closed."""
    device = MemoryDevice(GEOMETRY)
    stream = device.stream()
    event = device.copy(stream, [(1, 10, 2)])
    settle(device)
    device.close()
    return device, stream, event


# -- memory -------------------------------------------------------------------------------------------------------


def test_is_a_device(device: MemoryDevice) -> None:
    """It has every verb of the protocol, and says what it exports."""
    assert isinstance(device, Device)
    assert device.export().kind == "memfd"
    assert device.export().size_bytes == GEOMETRY.total_bytes == os.fstat(device.descriptor).st_size
    assert device.clock() <= device.clock()
    assert device.memory().total_bytes >= device.memory().free_bytes > 0


def test_sealed(device: MemoryDevice) -> None:
    """Nobody who has the descriptor can grow, shrink or seal the memory further; it is closed by exec."""
    wanted = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    assert fcntl.fcntl(device.descriptor, fcntl.F_GET_SEALS) & wanted == wanted
    for size in (0, 4096, GEOMETRY.total_bytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(device.descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(device.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert fcntl.fcntl(device.descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_shared_by_descriptor(device: MemoryDevice) -> None:
    """Whoever maps the descriptor sees each plane where the geometry says, both ways."""
    with mmap.mmap(device.descriptor, GEOMETRY.total_bytes) as other:
        for plane, (offset, size) in enumerate(zip(GEOMETRY.offsets, GEOMETRY.slot_bytes, strict=True)):
            other[offset + 5 * size : offset + 6 * size] = bytes((plane + 1,)) * size
            assert device.read(plane, 5, 1) == bytes((plane + 1,)) * size
            device.write(plane, 6, b"\xee" * size)
            assert other[offset + 6 * size : offset + 7 * size] == b"\xee" * size
            assert bytes(device.plane(plane)[5 * size : 6 * size]) == bytes((plane + 1,)) * size


def test_starts_as_zeros(device: MemoryDevice) -> None:
    """A new pool is all zero, so that slot 0 is read padding."""
    assert not any(any(device.plane(plane)) for plane in range(GEOMETRY.planes))


def test_prefault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page exists afterwards, with progress to the end and no byte changed."""
    monkeypatch.setattr("kvslot.daemon.device.memory.PREFAULT_BYTES", 1 << 20)
    device = MemoryDevice(Geometry(slots=1024, slot_bytes=(5000,), alignment=4096))
    device.write(0, 700, b"x" * 5000)
    size = device.geometry.total_bytes
    assert os.fstat(device.descriptor).st_blocks * 512 < size // 2
    told: list[tuple[int, int]] = []
    device.prefault(lambda done, total: told.append((done, total)))
    assert os.fstat(device.descriptor).st_blocks * 512 >= size
    assert told == [(min(done, size), size) for done in range(1 << 20, size + (1 << 20), 1 << 20)]
    assert device.read(0, 700, 1) == b"x" * 5000
    device.close()


def test_prefault_without_memory(monkeypatch: pytest.MonkeyPatch, device: MemoryDevice) -> None:
    """A kernel that has no memory left is reported with figures; the device can be closed all the same."""

    def fails(descriptor: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fails)
    with pytest.raises(NoMemory, match="are free"):
        device.prefault()


def test_memory_that_is_not_there() -> None:
    """A pool larger than what is free is refused before anything is made, with what was wanted, free and there."""
    before = open_descriptors()
    with pytest.raises(
        NoMemory, match=r"pool 'big' wants 64 TiB, and .* of .* are free: make it smaller"
    ) as refused:
        MemoryDevice(Geometry(slots=1 << 30, slot_bytes=(1 << 16,)), name="big")
    assert refused.value.wanted == 1 << 46
    assert 0 < refused.value.free <= refused.value.total
    assert isinstance(refused.value, MemoryError)
    assert open_descriptors() == before


def test_failed_mapping_gives_the_descriptor_back() -> None:
    """Where memory cannot be mapped nothing is left open."""
    before = open_descriptors()
    with pytest.raises(NoMemory):
        MemoryDevice(Geometry(slots=1 << 40, slot_bytes=(1 << 20,)), checked=False)
    assert open_descriptors() == before


def test_empty_geometry_is_a_fault() -> None:
    """A pool of nothing is a mistake of ours."""
    for geometry in (
        Geometry(slots=0, slot_bytes=(4,)),
        Geometry(slots=4, slot_bytes=()),
        Geometry(slots=4, slot_bytes=(4, 0)),
    ):
        with pytest.raises(DeviceFault, match="empty"):
            MemoryDevice(geometry)


def test_close_gives_everything_back() -> None:
    """No descriptor and no thread is left, and every verb is a fault afterwards, a second close included."""
    gc.collect()
    descriptors, threads = open_descriptors(), threading.active_count()
    for _ in range(2):
        settled_and_closed()
    device, stream, event = settled_and_closed()
    assert open_descriptors() == descriptors
    assert threading.active_count() == threads
    for verb in (
        device.close,
        device.export,
        device.stream,
        device.prefault,
        lambda: device.descriptor,
        lambda: device.read(0, 0, 1),
        lambda: device.write(0, 0, bytes(8)),
        lambda: device.copy(stream, [(1, 2, 1)]),
        lambda: device.event(stream),
        lambda: device.completion(event),
        lambda: device.plane(0),
    ):
        with pytest.raises(DeviceFault, match="closed"):
            verb()


def test_close_under_a_view() -> None:
    """A view that outlives the device is a fault, and not a crash at its next touch."""
    device = MemoryDevice(GEOMETRY)
    before = open_descriptors()
    view = device.plane(0)
    with pytest.raises(DeviceFault, match="under a view"):
        device.close()
    view[0] = 7
    assert view[0] == 7
    view.release()
    del view, device
    gc.collect()
    assert open_descriptors() == before - 3, "the memfd, and both mappings' copies of it"


def test_a_device_without_copies_has_no_thread() -> None:
    """The thread is started by the first copy."""
    threads = threading.active_count()
    device = MemoryDevice(GEOMETRY)
    assert device.completion(device.event(device.stream())) == Completion.DONE
    assert threading.active_count() == threads
    device.close()


# -- copies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "slot_bytes",
    [(8,), (8,) * 6, (8, 4) * 3, (8, 8, 4, 4) * 3, (8, 8, 4), (4, 8, 4, 8, 4), (3, 5, 7, 11)],
)
def test_copy_moves_all_planes(slot_bytes: tuple[int, ...]) -> None:
    """A copy moves its slots in every plane, whatever their widths, and nothing else."""
    device = MemoryDevice(Geometry(slots=64, slot_bytes=slot_bytes, alignment=4096))
    paint(device)
    event = device.copy(device.stream(), [(1, 10, 2), (5, 20, 1), (40, 50, 10)])
    settle(device)
    assert device.completion(event) == Completion.DONE
    came_from = {10: 1, 11: 2, 20: 5} | {50 + n: 40 + n for n in range(10)}
    for plane, size in enumerate(slot_bytes):
        expected = b"".join(bytes((came_from.get(slot, slot) + plane,)) * size for slot in range(64))
        assert bytes(device.plane(plane)) == expected
    assert device.statistics().copied_bytes == 13 * sum(slot_bytes)
    device.close()


def test_copy_never_waits(held: Held) -> None:
    """A copy is pending while the thread is at it, and neither copy, event nor completion waits for it."""
    stream = held.stream()
    first = held.copy(stream, [(1, 10, 1)])
    second = held.copy(stream, [(2, 20, 1)])
    mark = held.event(stream)
    assert held.moving.wait(30)
    assert [held.completion(each) for each in (first, second, mark)] == [Completion.PENDING] * 3
    assert held.pending() == 3
    with pytest.raises(DeviceFault, match="3 copies are pending"):
        held.close()
    held.go.set()
    settle(held)
    assert [held.completion(each) for each in (first, second, mark)] == [Completion.DONE] * 3


def test_low_priority_gives_way(held: Held) -> None:
    """Copies of ordinary streams are made first, even between two chunks of a low one; each lane keeps its order."""
    low, ordinary = held.stream(low_priority=True), held.stream()
    held.copy(low, [(1, 10, 1), (3, 11, 1)])
    assert held.moving.wait(30)
    held.copy(low, [(2, 12, 1)])
    held.copy(ordinary, [(4, 20, 1)])
    held.copy(ordinary, [(20, 21, 1)])
    held.go.set()
    settle(held)
    assert [target for _, target, _ in held.order] == [10, 20, 21, 11, 12]


def test_failure_is_an_outcome(held: Held) -> None:
    """A copy that raises has failed, and so has what stands behind it in its stream; the device goes on."""
    stream, other = held.stream(), held.stream()
    held.fails = True
    event = held.copy(stream, [(1, 10, 1)])
    behind, beside = held.event(stream), held.event(other)
    held.go.set()
    settle(held)
    assert held.completion(event) == held.completion(behind) == Completion.FAILED
    assert held.completion(beside) == Completion.DONE
    assert held.statistics().failures == 1
    assert held.statistics().failure_last == "RuntimeError: out of order"
    held.fails = False
    again = held.copy(stream, [(1, 10, 1)])
    settle(held)
    assert held.completion(again) == Completion.DONE
    assert held.completion(held.event(stream)) == Completion.DONE


def test_notify() -> None:
    """The hook is called, on the device thread, after each batch whose completion can then be seen."""
    seen: list[tuple[str, Completion]] = []
    events: list[Event] = []
    told = threading.Event()

    def notify() -> None:
        seen.append((threading.current_thread().name, made.completion(events[len(seen)])))
        told.set()

    made = MemoryDevice(GEOMETRY, notify=notify)
    stream = made.stream()
    for target in (10, 20):
        told.clear()
        events.append(Event(2 * (len(events) + 1)))  # what the copy is about to return
        assert made.copy(stream, [(1, target, 1)]) == events[-1]
        assert told.wait(30)
    assert seen == [("kvslot-device", Completion.DONE)] * 2
    made.close()


def test_hook_that_raises_is_told_at_the_next_verb() -> None:
    """A hook that raises ends the device thread, and the next verb says so instead of waiting for ever."""
    raised = threading.Event()

    def notify() -> None:
        raised.set()
        raise LookupError("no loop")

    device = MemoryDevice(GEOMETRY, notify=notify)
    stream = device.stream()
    device.copy(stream, [(1, 10, 1)])
    assert raised.wait(30)
    deadline = time.monotonic() + 30
    while device._broken is None:
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    with pytest.raises(DeviceFault, match="device thread has ended") as fault:
        device.copy(stream, [(1, 10, 1)])
    assert isinstance(fault.value.__cause__, LookupError)
    device.close()


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [(4, 5, 2)],  # target over source
        [(4, 20, 1), (5, 20, 1)],  # target over target
        [(4, 20, 2), (5, 21, 1)],
        [(63, 20, 2)],
        [(4, 63, 2)],
        [(4, 20, 0)],
        [(-1, 20, 1)],
        [(4, -1, 1)],
        [(30, 10, 1)],  # what a pending copy writes
    ],
)
def test_misuse_is_a_fault(held: Held, pieces: list[tuple[int, int, int]]) -> None:
    """A batch against the preconditions is a fault and queues nothing."""
    stream = held.stream()
    held.copy(stream, [(1, 10, 1)])
    with pytest.raises(DeviceFault):
        held.copy(stream, pieces)
    assert held.pending() == 1
    with pytest.raises(DeviceFault, match="another stream"):
        held.copy(held.stream(), [(10, 40, 1)])
    held.copy(stream, [(10, 41, 1)])  # in its own stream a copy may read what the one before wrote


def test_unknown_streams_and_events_are_faults(device: MemoryDevice) -> None:
    """A stream or an event that was never given out is a fault."""
    stream = device.stream()
    event = device.copy(stream, [(1, 10, 1)])
    for misuse in (
        lambda: device.copy(Stream(99), [(1, 2, 1)]),
        lambda: device.event(Stream(99)),
        lambda: device.completion(Event(event + 2)),
        lambda: device.completion(Event(event + 1)),
        lambda: device.completion(Event(0)),
        lambda: device.completion(Event(-2)),
        lambda: device.write(0, 0, bytes(7)),
        lambda: device.read(0, 63, 2),
    ):
        with pytest.raises(DeviceFault):
            misuse()


@given(
    st.lists(st.tuples(st.integers(0, 31), st.integers(0, 31), st.integers(1, 6), st.booleans()), max_size=12)
)
def test_copies_in_one_stream_are_as_if_in_order(batches: list[tuple[int, int, int, bool]]) -> None:
    """Whatever is queued in one stream, the memory ends as if each copy had been made at once."""
    device = MemoryDevice(Geometry(slots=32, slot_bytes=(2, 1), alignment=64))
    paint(device)
    stream = device.stream()
    model = list(range(32))
    for source, target, length, wait in batches:
        try:
            device.copy(stream, [(source, target, length)])
        except DeviceFault:
            continue
        model[target : target + length] = model[source : source + length]
        if wait:
            settle(device)
    settle(device)
    for plane, size in enumerate((2, 1)):
        assert bytes(device.plane(plane)) == b"".join(bytes((slot + plane,)) * size for slot in model)
    device.close()


# -- what is free -------------------------------------------------------------------------------------------------


def machine(
    folder: Path, total: int = 8 << 20, free: int = 6 << 20, group: str = "0::/a/b\n"
) -> tuple[Path, Path]:
    """Files as the kernel has them, in KiB."""
    proc, control = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(
        f"MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {free} kB\nHugePages_Free: 0\n"
    )
    (proc / "self" / "cgroup").write_text(group)
    return proc, control


def test_available_without_limits(tmp_path: Path) -> None:
    """Without a control group's limit the machine's figures hold."""
    proc, control = machine(tmp_path)
    have = available(proc, control)
    assert (have.total_bytes, have.free_bytes) == (8 << 30, 6 << 30)
    (control / "a" / "b").mkdir(parents=True)
    (control / "a" / "b" / "memory.max").write_text("max\n")
    (control / "a" / "b" / "memory.current").write_text("5\n")
    assert available(proc, control) == have


def test_available_under_a_limit(tmp_path: Path) -> None:
    """The tightest limit on the way up holds, less what is in use there and is no droppable cache."""
    proc, control = machine(tmp_path)
    inner = control / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text(f"{5 << 30}\n")
    (inner / "memory.current").write_text("0\n")
    (control / "a" / "memory.max").write_text(f"{4 << 30}\n")
    (control / "a" / "memory.current").write_text(f"{3 << 30}\n")
    (control / "a" / "memory.stat").write_text(f"anon 5\ninactive_file {1 << 30}\n")
    have = available(proc, control)
    assert (have.total_bytes, have.free_bytes) == (4 << 30, 2 << 30)


def test_available_in_a_container(tmp_path: Path) -> None:
    """A group path that is not there means that the group itself is what is mounted."""
    proc, control = machine(tmp_path, group="0::/of/the/host\n")
    control.mkdir()
    (control / "memory.max").write_text(f"{1 << 30}\n")
    (control / "memory.current").write_text(f"{1 << 20}\n")
    assert available(proc, control).free_bytes == (1 << 30) - (1 << 20)


def test_available_under_version_one(tmp_path: Path) -> None:
    """The older control groups are read too, and their word for no limit."""
    proc, control = machine(tmp_path, group="5:cpu:/\n4:memory:/a\n0::/\n")
    folder = control / "memory" / "a"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{2 << 30}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{1 << 30}\n")
    assert available(proc, control).free_bytes == 1 << 30
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert available(proc, control).free_bytes == 6 << 30


def test_size_text() -> None:
    """Sizes are said in the largest unit that leaves a whole number before the point."""
    assert [size_text(n) for n in (312, 1024, 1536, 8 << 30, 3 << 39)] == [
        "312 bytes", "1 KiB", "1.5 KiB", "8 GiB", "1.5 TiB",
    ]  # fmt: skip
