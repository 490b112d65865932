"""The simulated device: bytes move late, out of order, or not at all, and misuse is a fault."""

import pytest

from kvslot.daemon.device import Completion, Device, DeviceFault, Geometry
from kvslot.daemon.device.simulated import Schedule, SimulatedDevice

LATE = Schedule(latency_min=1.0, latency_max=2.0, notice_max=1.0)


def make(*, seed: int = 0, schedule: Schedule = LATE, planes: int = 2, slots: int = 32) -> SimulatedDevice:
    """A device whose slot n holds n in each of its 4 bytes, plane p adding 100 p."""
    device = SimulatedDevice(Geometry(slots=slots, slot_bytes=(4,) * planes), seed=seed, schedule=schedule)
    for plane in range(planes):
        for slot in range(slots):
            device.write(plane, slot, bytes((slot + 100 * plane,)) * 4)
    return device


def test_is_a_device() -> None:
    """The simulated device has every verb of the protocol."""
    device: Device = make()
    assert isinstance(device, Device)
    assert device.geometry.total_bytes == 2 * 32 * 4
    assert device.export().size_bytes == device.geometry.total_bytes


def test_copy_moves_all_planes_and_is_late() -> None:
    """A copy is pending until its time has come, then every plane has its bytes."""
    device = make()
    event = device.copy(device.stream(), [(1, 10, 2), (5, 20, 1)])
    device.advance(0.5)
    assert device.completion(event) == Completion.PENDING
    device.advance(4)
    assert device.completion(event) == Completion.DONE
    assert device.read(0, 10, 2) == bytes((1,)) * 4 + bytes((2,)) * 4
    assert device.read(1, 20, 1) == bytes((105,)) * 4


def test_streams_are_in_order_within_and_not_between() -> None:
    """A stream keeps its order; over some seeds a later copy of another stream ends first."""
    overtaken = False
    for seed in range(20):
        device = make(seed=seed)
        one, two = device.stream(), device.stream(low_priority=True)
        first, second = device.copy(one, [(1, 10, 1)]), device.copy(one, [(10, 11, 1)])
        other = device.copy(two, [(2, 20, 1)])
        behind = device.event(one)
        for _ in range(100):
            device.advance(0.1)
            done = device.completion
            assert not (done(second) == Completion.DONE and device.read(0, 11, 1) != bytes((1,)) * 4)
            assert not (done(second) == Completion.DONE and done(first) == Completion.PENDING)
            overtaken |= done(other) == Completion.DONE and done(first) == Completion.PENDING
        assert device.completion(behind) == Completion.DONE
    assert overtaken


def test_failed_copy_spoils_its_target_only() -> None:
    """A failed batch says so, and touches nothing but its targets."""
    device = make(schedule=Schedule(latency_max=1.0, failures=1.0))
    stream = device.stream()
    event = device.copy(stream, [(slot, slot + 10, 1) for slot in range(8)])
    behind = device.event(stream)
    assert device.completion(behind) == Completion.PENDING
    device.advance(2)
    assert device.completion(event) == Completion.FAILED
    assert device.completion(behind) == Completion.FAILED, "what stands behind a failed copy is not done"
    assert [device.read(0, slot, 1)[0] for slot in range(10)] == list(range(10))
    assert [device.read(0, slot, 1)[0] for slot in range(10, 18)] != list(range(8))


def test_completion_that_never_comes() -> None:
    """A batch whose completion is lost stays pending through any time, until it is released."""
    device = make(schedule=Schedule(latency_max=1.0, never=1.0))
    event = device.copy(device.stream(), [(1, 10, 1)])
    device.advance(1e6)
    device.settle()
    assert device.completion(event) == Completion.PENDING
    device.release()
    device.advance(0)
    assert device.completion(event) == Completion.DONE


@pytest.mark.parametrize(
    "misuse",
    [
        lambda d, s: d.write(0, 10, bytes(4)),
        lambda d, s: d.read(0, 10, 1),
        lambda d, s: d.copy(s, [(3, 10, 1)]),
        lambda d, s: d.copy(d.stream(), [(10, 20, 1)]),
        lambda d, s: d.copy(s, [(4, 5, 2)]),
        lambda d, s: d.copy(s, [(4, 20, 1), (5, 20, 1)]),
        lambda d, s: d.copy(s, [(31, 20, 2)]),
        lambda d, s: d.copy(s, [(4, 20, 0)]),
        lambda d, s: d.copy(s, []),
        lambda d, s: d.copy(99, [(4, 20, 1)]),
        lambda d, s: d.completion(99),
        lambda d, s: d.write(0, 4, bytes(3)),
        lambda d, s: d.advance(-1),
        lambda d, s: d.close(),
    ],
)  # fmt: skip
def test_misuse_is_a_fault(misuse: object) -> None:
    """Touching what a pending copy uses, or what is not there, is a fault and not a wrong byte."""
    device = make()
    stream = device.stream()
    device.copy(stream, [(1, 10, 1)])
    assert callable(misuse)
    with pytest.raises(DeviceFault):
        misuse(device, stream)


def test_closed_device_refuses_everything() -> None:
    """After close the memory is free again and every verb is a fault, a second close included."""
    device = make()
    stream = device.stream()
    before = device.memory()
    device.close()
    assert device.memory().free_bytes == before.free_bytes + device.geometry.total_bytes
    for verb in (
        device.close,
        device.export,
        device.stream,
        lambda: device.read(0, 0, 1),
        lambda: device.write(0, 0, bytes(4)),
        lambda: device.copy(stream, [(1, 2, 1)]),
        lambda: device.plane(0),
    ):
        with pytest.raises(DeviceFault):
            verb()


def test_same_seed_same_bytes() -> None:
    """Two devices of one seed hold the same bytes at every moment."""
    schedule = Schedule(latency_min=0.1, latency_max=3, notice_max=1, failures=0.3)
    one, two = make(seed=7, schedule=schedule), make(seed=7, schedule=schedule)
    for device in (one, two):
        stream = device.stream()
        for slot in range(8):
            device.copy(stream, [(slot, 16 + slot, 1)])
    for _ in range(50):
        one.advance(0.3)
        two.advance(0.3)
        assert bytes(one.plane(0)) == bytes(two.plane(0))


def test_pool_larger_than_the_device() -> None:
    """A pool that the device cannot hold is refused at once, with figures."""
    with pytest.raises(DeviceFault, match="1280 bytes on a device of 1000"):
        SimulatedDevice(Geometry(slots=320, slot_bytes=(4,)), memory_bytes=1000)
