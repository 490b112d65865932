"""How fast low-priority copies are, and how quickly they stop: rows for `kvslotctl bench compaction`.

    copy_16k, copy_4k   a batch of random pieces, 64 planes, through the open gate, looked at before every chunk: bytes
                        a second of CPU time of the device's thread, all that it does included, against one memcpy of
                        as many bytes within the same memory.  Rounds alternate; the ratio is the median of the rounds'.
                        Where there is a C compiler, a loop of memcpy over the same pieces runs in turns with both
    step_to_last_byte   another process plays an engine: it stores "busy" into a page, as `step()` does, while copies
                        run whenever it does not, and then looks at the target of the cut under way until its last bytes
                        have come and no other cut begins.  From the store to then
    paced_p50           a loop that wakes a thousand times a second and works, with copies at half duty and without, in
                        turns, under SCHED_FIFO where that is permitted: lateness plus work

The memory is as the daemon has it: a sealed memfd, plane-major.  The device's own count of steps that met a chunk goes
by its thread's CPU time, since after a chunk the thread may wait for the interpreter lock with nothing copied
meanwhile; it is printed beside what the engine saw.  Engine and device thread run under SCHED_FIFO where that is
permitted: else what is measured on a busy machine is how long the kernel lets others run in the middle of a copy.

Run by itself: `python -Ic 'from kvslot.benchmarks.copies import main; main()' [--quick] [--json]`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import mmap
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast

import msgspec
import numpy as np

from kvslot.benchmarks.report import Result, result
from kvslot.benchmarks.rig import Realtime
from kvslot.benchmarks.tools import NATIVE, Unavailable, compiler
from kvslot.daemon.device import Geometry, Piece, Stream
from kvslot.daemon.device.chunks import Cut
from kvslot.daemon.device.memory import MemoryDevice

Progress = Callable[[str, float], None]

SUITE: Final = "compaction"
PLANES: Final = 64
"""Of 32 layers, K and V."""
BLOCK: Final = 16
"""Slots of a piece."""
POOL_BYTES: Final = 512 << 20
BATCH_BYTES: Final = 64 << 20
"""Copied in a round: more than the cache of most machines, and a tenth of a second's work at the most."""
ROUNDS: Final = 15
ROUNDS_QUICK: Final = 5
LONG: Final = 1e6


class Speed(NamedTuple):
    """Of one round, in bytes a second of CPU time."""

    memcpy: float
    copies: float
    floor: float
    """Of a loop in C; 0 where it could not be compiled."""


# -- speed --------------------------------------------------------------------------------------------------------


def speeds(piece_bytes: int, *, rounds: int, seed: int = 0, pool_bytes: int = POOL_BYTES) -> list[Speed]:
    """Copies of random pieces of so many bytes a plane, and one memcpy each time, in turns."""
    slot_bytes = piece_bytes // BLOCK
    slots = pool_bytes // (PLANES * slot_bytes)
    ended = threading.Semaphore(0)
    draw = random.Random(seed)
    device = MemoryDevice(
        Geometry(slots=slots, slot_bytes=(slot_bytes,) * PLANES, alignment=4096),
        name="bench",
        notify=ended.release,
    )
    device.prefault()
    low = device.stream(low_priority=True)
    words = memoryview(bytearray(64)).cast("Q")
    device.gate(lambda: words[3] == 1)
    loop = _loop()
    # Not closed but dropped: arrays show it.
    memory = np.frombuffer(mmap.mmap(device.descriptor, device.geometry.total_bytes), np.uint8)
    half = len(memory) // 2
    batch = min(BATCH_BYTES, half)
    count = batch // (PLANES * piece_bytes)

    def memcpy() -> float:
        at = draw.randrange(0, half - batch + 1, 4096)
        began = time.thread_time()
        memory[half : half + batch] = memory[at : at + batch]
        return batch / (time.thread_time() - began)

    def pieces() -> list[Piece]:
        blocks = draw.sample(range(slots // BLOCK), 2 * count)
        return [(one * BLOCK, two * BLOCK, BLOCK) for one, two in zip(blocks[::2], blocks[1::2], strict=True)]

    def copies(batch: list[Piece]) -> float:
        device.allow(0)
        device.copy(low, batch)
        clock = _thread_clock("kvslot-device")
        began = time.clock_gettime(clock)
        device.allow(LONG)
        ended.acquire()
        return len(batch) * PLANES * piece_bytes / (time.clock_gettime(clock) - began)

    def floor(batch: list[Piece]) -> float:
        if loop is None:
            return 0.0
        ends = np.array(batch, np.int64)[:, :2].T * slot_bytes
        source, target = (np.ascontiguousarray(end) for end in ends)
        span = device.geometry.span(0)
        began = time.thread_time()
        loop(
            memory.ctypes.data, span, PLANES, source.ctypes.data, target.ctypes.data, len(batch), piece_bytes
        )
        return len(batch) * PLANES * piece_bytes / (time.thread_time() - began)

    # Every page is to be in every page table first: a fault costs as much as the copy of a page.
    memory[::4096] += np.uint8(0)
    _settle_in(device, low)
    while ended.acquire(blocking=False):
        pass
    results = []
    for nth in range(rounds):
        if nth % 2:
            results.append(Speed(memcpy(), copies(pieces()), floor(pieces())))
        else:
            low_priority, native = copies(pieces()), floor(pieces())
            results.append(Speed(memcpy(), low_priority, native))
    device.close()
    return results


def _loop() -> Callable[..., object] | None:
    """native/rows.c, compiled; None where it cannot be."""
    with tempfile.TemporaryDirectory(prefix="kvslot-") as folder:
        made = Path(folder) / "rows.so"
        flags = ("-std=gnu11", "-O2", "-shared", "-fPIC")
        try:
            command = [compiler(), *flags, "-o", str(made), str(NATIVE / "rows.c")]
            subprocess.run(command, check=True, capture_output=True)
            function = ctypes.CDLL(str(made)).rows
        except (Unavailable, OSError, subprocess.CalledProcessError):
            return None
    pointer, number = ctypes.c_void_p, ctypes.c_long
    function.argtypes = (pointer, number, number, pointer, pointer, number, number)
    return cast("Callable[..., object]", function)


def _thread_clock(name: str) -> int:
    found = next(thread for thread in threading.enumerate() if thread.name == name)
    assert found.ident is not None
    return time.pthread_getcpuclockid(found.ident)


def copy_speed(
    *,
    quick: bool = False,
    seed: int = 0,
    report: Progress | None = None,
    sizes: Sequence[int] = (16, 4),
    pool_bytes: int = POOL_BYTES,
) -> list[Result]:
    """Rows `copy_16k` and `copy_4k` (and so on, by `sizes` in KiB), and their bandwidths."""
    rows = []
    rounds = ROUNDS_QUICK if quick else ROUNDS
    for nth, size in enumerate(sizes):
        if report is not None:
            report(f"copies of {size} KiB pieces", nth / len(sizes))
        made = speeds(size << 10, rounds=rounds, seed=seed, pool_bytes=pool_bytes)
        ratio = statistics.median(each.copies / each.memcpy for each in made)
        floor = statistics.median(each.floor / each.memcpy for each in made)
        best = max(each.copies for each in made) / max(each.memcpy for each in made)
        rows += [
            result(
                f"copy_{size}k",
                ratio,
                unit="x",
                ratio_to="memcpy",
                what=f"copy speed on the CPU pool, pieces of {size} KiB in {PLANES} planes",
                samples=len(made),
                note=f"best of both sides: {best:.2f}; a loop of memcpy in C: "
                + (f"{floor:.2f}" if floor else "not compiled"),
                suite=SUITE,
            ),
            result(
                f"copy_{size}k_native",
                statistics.median(each.copies / each.floor for each in made) if floor else 0.0,
                unit="x",
                ratio_to="a loop of memcpy in C",
                what="the same against what the machine allows for such pieces",
                samples=len(made),
                note="" if floor else "no C compiler",
                suite=SUITE,
            ),
            result(
                f"copy_{size}k_gbps",
                statistics.median(each.copies for each in made) / 1e9,
                unit="GB/s",
                what="the same, absolute",
                samples=len(made),
                note=f"one memcpy: {statistics.median(each.memcpy for each in made) / 1e9:.2f} GB/s",
                suite=SUITE,
            ),
        ]
    return rows


def copy_16k(*, quick: bool = False, seed: int = 0, report: Progress | None = None) -> list[Result]:
    """The row of 16 KiB pieces."""
    return copy_speed(quick=quick, seed=seed, report=report, sizes=(16,))


def copy_4k(*, quick: bool = False, seed: int = 0, report: Progress | None = None) -> list[Result]:
    """The row of 4 KiB pieces."""
    return copy_speed(quick=quick, seed=seed, report=report, sizes=(4,))


# -- stopping -----------------------------------------------------------------------------------------------------

_ENGINE: Final = """
import json, mmap, random, sys, time
page, pool, seed, steps = map(int, sys.argv[1:])
words = memoryview(mmap.mmap(page, 4096)).cast("Q")
memory = memoryview(mmap.mmap(pool, 0, prot=mmap.PROT_READ)).cast("Q")
sum(memory[::512])
draw = random.Random(seed)
late = []
for step in range(steps):
    time.sleep(draw.uniform(0.001, 0.004))
    began = time.monotonic_ns()
    words[1] = began
    words[0] = 1
    last = now = time.monotonic_ns()
    stored, met = now, 0
    seen = words[4]
    while now - stored < 1_000_000:
        count, source, target = words[4], words[5], words[6]
        if count == words[4] and (count != seen or memory[source] != memory[target]):
            if count != seen:
                seen = count  # another cut began: a look at the page from before the store
                met += 1
            last = time.monotonic_ns()
        now = time.monotonic_ns()
    if last > stored:
        late.append((last - began, met))
    words[0] = 0
    words[2] = step + 1
print(json.dumps(late))
"""
"""An engine.  Words: 0 busy, 1 the last begin, 2 steps that have ended; of the device: 4 cuts begun, and of the last
one's last 8 bytes the source (5) and the target (6), in words of the pool."""


class _Device(MemoryDevice):
    """Tells where its copies are."""

    words: memoryview | None = None

    def _copy(self, cut: Cut) -> None:
        if self.words is not None:
            group, _, beyond, source, target, length = cut
            part = self._parts[group]
            end = part.offset + (beyond - 1) * part.stride + length - 8
            self.words[5], self.words[6] = (end + source) // 8, (end + target) // 8
            self.words[4] += 1
        super()._copy(cut)


class _Supply:
    """Keeps two batches queued: sources in the lower half of the pool, targets in either quarter of the upper one."""

    def __init__(self, device: MemoryDevice, stream: Stream, seed: int, pieces: int = 32) -> None:
        self.device = device
        self.stream = stream
        self.pieces = pieces
        self._draw = random.Random(seed)
        self._quarter = device.geometry.slots // BLOCK // 4
        self._turn = 0

    def __call__(self) -> None:
        while self.device.pending() < 2:
            first = (2 + self._turn % 2) * self._quarter
            self._turn += 1
            sources = self._draw.sample(range(2 * self._quarter), self.pieces)
            targets = self._draw.sample(range(first, first + self._quarter), self.pieces)
            batch = [(one * BLOCK, two * BLOCK, BLOCK) for one, two in zip(sources, targets, strict=True)]
            self.device.copy(self.stream, batch)


def _settle_in(device: MemoryDevice, stream: Stream) -> None:
    """Copies each half of the pool into the other one, so that every page is in the page tables."""
    half = device.geometry.slots // 2
    device.allow(LONG)
    for source, target in ((0, half), (half, 0)):
        device.copy(stream, [(source, target, half)])
        while device.pending():
            time.sleep(0.001)
    device.allow(0)


class Stops(NamedTuple):
    """Of the step begins that met a cut under way."""

    late: list[float]
    """Seconds to the last byte."""
    met: int
    """How many there were by the device's own count."""
    begun: int
    """Cuts that began after the store: the page was looked at before it."""
    steps: int


def stops(
    *, steps: int, loaded: bool, seed: int = 0, piece_bytes: int = 16 << 10, pool_bytes: int = POOL_BYTES // 2
) -> Stops:
    """Plays `steps` steps of an engine against copies that run whenever it does not."""
    slot_bytes = piece_bytes // BLOCK
    slots = pool_bytes // (PLANES * slot_bytes)
    told = os.eventfd(0, os.EFD_NONBLOCK)
    device = _Device(
        Geometry(slots=slots, slot_bytes=(slot_bytes,) * PLANES, alignment=4096),
        name="bench",
        notify=lambda: os.eventfd_write(told, 1),
    )
    device.prefault()
    filler = np.random.default_rng(seed)
    for plane in range(PLANES):
        device.write(plane, 0, filler.bytes(slots * slot_bytes))
    descriptor = os.memfd_create("page")
    os.ftruncate(descriptor, 4096)
    page = mmap.mmap(descriptor, 4096)
    words = memoryview(page).cast("B").cast("Q")
    low = device.stream(low_priority=True)
    device.gate(lambda: words[0] == 1, began=lambda: words[1] * 1e-9)
    decode, encode = msgspec.msgpack.Decoder(), msgspec.msgpack.Encoder()
    frame = encode.encode([[number, number + 1, 16] for number in range(400)])
    realtime = Realtime()
    with realtime(0):  # the device's thread is started here, and keeps the priority
        _settle_in(device, low)
    more = _Supply(device, low, seed)
    device.words = words
    before = device.gated().met
    command = [sys.executable, "-Ic", _ENGINE, str(descriptor), str(device.descriptor), str(seed), str(steps)]
    engine = subprocess.Popen(command, pass_fds=[descriptor, device.descriptor], stdout=subprocess.PIPE)
    try:
        with realtime(engine.pid):
            while words[2] < steps and engine.poll() is None:
                more()
                if not words[0] and not device.gated().open:
                    device.allow(LONG)
                until = time.monotonic() + 0.0008
                while loaded and time.monotonic() < until:
                    encode.encode(decode.decode(frame))
                select.select([told], [], [], 0 if loaded else 0.0005)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(told)
        answer, _ = engine.communicate(timeout=60)
        seen = msgspec.json.decode(answer, type=list[tuple[int, int]])
        met = device.gated().met - before
    finally:
        engine.kill()
        engine.wait()
        device.gate(None)
        while device.pending():
            time.sleep(0.001)
        device.words = None
        device.close()
        words.release()
        page.close()
        os.close(descriptor)
        os.close(told)
    return Stops([late * 1e-9 for late, _ in seen], met, sum(begun for _, begun in seen), steps)


def step_to_last_byte(*, quick: bool = False, seed: int = 0, report: Progress | None = None) -> list[Result]:
    """Rows `step_to_last_byte` (loop idle) and `step_to_last_byte_loaded`, medians in us; p99 in rows beside them."""
    rows = []
    steps = 200 if quick else 1000
    for nth, loaded in enumerate((False, True)):
        if report is not None:
            report(f"step begins under copies, loop {'loaded' if loaded else 'idle'}", nth / 2)
        made = stops(steps=steps, loaded=loaded, seed=seed + nth)
        if not made.late:
            raise RuntimeError("no step began while a chunk was copied")
        name = "step_to_last_byte" + ("_loaded" if loaded else "")
        words = "the loop four fifths busy" if loaded else "loop idle"
        rows += [
            result(
                name,
                _at(made.late, 0.5),
                unit="us",
                what=f"from an engine's step-begin store to the last byte copied, {words}",
                samples=len(made.late),
                note=f"{len(made.late)} of {made.steps} begins met a cut (by the device's count {made.met}); "
                f"{made.begun} cuts began after the store",
                suite=SUITE,
            ),
            result(
                f"{name}_p99",
                _at(made.late, 0.99),
                unit="us",
                what="the same, 99th percentile",
                samples=len(made.late),
                note=f"longest {max(made.late) * 1e6:.0f} us",
                suite=SUITE,
            ),
        ]
    return rows


# -- a loop beside it ---------------------------------------------------------------------------------------------


def paced(
    *, quick: bool = False, seed: int = 0, report: Progress | None = None, pool_bytes: int = POOL_BYTES // 2
) -> list[Result]:
    """Rows `paced_p50` and `paced_p99`: a loop's wake and work, copies at half duty against none."""
    slot_bytes, slots = 1024, pool_bytes // (PLANES * 1024)
    device = MemoryDevice(
        Geometry(slots=slots, slot_bytes=(slot_bytes,) * PLANES, alignment=4096), name="bench"
    )
    device.prefault()
    low = device.stream(low_priority=True)
    device.gate(lambda: False)
    decode, encode = msgspec.msgpack.Decoder(), msgspec.msgpack.Encoder()
    frame = encode.encode([[number, number + 1, 16] for number in range(20)])
    ends = os.pipe()
    period = 0.001

    def turn(wakes: int, *, copying: bool) -> Iterator[float]:
        next_at = time.perf_counter() + period
        for nth in range(wakes):
            if copying and nth % 4 == 0:
                device.allow(2 * period)
            while (left := next_at - time.perf_counter()) > 0:
                select.select([], [], [], left)
            for _ in range(4):
                os.write(ends[1], encode.encode(decode.decode(frame)))
                os.read(ends[0], 65536)
            yield time.perf_counter() - next_at
            if copying:
                more()
            next_at += period

    realtime = Realtime()
    with realtime(0):  # the device's thread is started here, and has the same priority
        _settle_in(device, low)
    more = _Supply(device, low, seed)
    rounds, wakes = (4, 250) if quick else (12, 400)
    without: list[list[float]] = []
    beside: list[list[float]] = []
    before = device.gated()
    began = time.monotonic()
    for nth in range(rounds):
        if report is not None:
            report("a paced loop beside copies", nth / rounds)
        for copying in (False, True) if nth % 2 else (True, False):
            with realtime(0):
                (beside if copying else without).append(list(turn(wakes, copying=copying)))
            device.allow(0)
    wall = (time.monotonic() - began) / 2
    after = device.gated()
    duty = (after.copying_seconds - before.copying_seconds) / wall
    device.gate(None)
    while device.pending():
        time.sleep(0.001)
    device.close()
    for end in ends:
        os.close(end)
    rows = []
    for name, share in (("paced_p50", 0.5), ("paced_p99", 0.99)):
        ratios = [_at(one, share) / _at(two, share) for one, two in zip(beside, without, strict=True)]
        values = [statistics.median(_at(each, share) for each in side) for side in (without, beside)]
        rows.append(
            result(
                name,
                statistics.median(ratios),
                unit="x",
                ratio_to="no copies",
                what=f"a loop paced at 1 kHz beside copies at half duty, {name[-3:]}",
                samples=rounds * wakes,
                note=f"{values[0]:.0f} us without, {values[1]:.0f} us beside; bytes moved {duty:.0%} of the time; "
                f"{realtime.words}",
                suite=SUITE,
            )
        )
    return rows


def _at(values: Sequence[float], share: float) -> float:
    """A quantile, in microseconds."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))] * 1e6


def main() -> None:
    """All rows, as a table or JSON."""
    parser = argparse.ArgumentParser(description="speed of low-priority copies, and how quickly they stop")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows: list[Result] = copy_speed(quick=options.quick, seed=options.seed, sizes=(64, 32, 16, 8, 4))
    rows += step_to_last_byte(quick=options.quick, seed=options.seed)
    rows += paced(quick=options.quick, seed=options.seed)
    if options.json:
        print(json.dumps([msgspec.to_builtins(row) for row in rows], indent=1))
        return
    for row in rows:
        print(f"{row.name:28} {row.value:8.4g} {row.unit:5} {row.what}\n{'':43}{row.note}")


if __name__ == "__main__":
    main()
