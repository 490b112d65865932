"""Engines that follow moves and run ahead of their device, and what their steps find in the memory.

A step is submitted with the index arrays of that moment, and reads and writes through them at any moment until it is
completed, up to three steps later; the tables change meanwhile.  Every position's slot is painted with a number that
all tokens up to it decide, so whatever is read from a wrong place, or too late, shows.

    submit    tables are looked up: what each running sequence reads, and where its new tokens are written
    (execute) at any moment, in the order of the steps: writes, then reads, which must be as computed
    complete  the daemon may reuse what only steps so far could read

python -I tests/client/followers.py --minutes 5 --start SEED     longer than the tests have time for
                       ... --processes 3 --compaction forced     engines that compute at the same time; the compactor
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvslot import Client
from kvslot.api.client import Control, Later, Never, OutOfRoom, Sequence, indices
from kvslot.api.wire.messages import Preempt

if TYPE_CHECKING:
    from tests.tools.daemon import Running

AHEAD = 3  # steps under way at the most
BUSIEST = 8  # sequences of one engine
INSTALL = f"import runpy; runpy.run_path({str(Path(__file__).with_name('shuffler.py'))!r})['install']"


def marks(tokens: list[int]) -> NDArray[np.float32]:
    """For each position a number that all tokens up to it decide; exact in a float32."""
    out, mark = [], 7
    for token in tokens:
        mark = (mark * 31 + token + 1) % 16_777_213
        out.append(mark)
    return np.array(out, dtype=np.float32)


class Misread(AssertionError):
    """A slot has not what ought to stand there."""


class Request:
    """A sequence, the tokens it ought to have, and how many of them have K and V, or will when all steps have ended."""

    def __init__(self, sequence: Sequence, tokens: list[int], computed: int) -> None:
        self.sequence = sequence
        self.tokens = tokens
        self.computed = computed  # by steps that were submitted
        self.written = computed  # by steps that were completed


class Flight:
    """A step under way: what it will write and read, by the tables of the moment it was submitted."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.writes: list[tuple[NDArray[Any], NDArray[np.float32]]] = []
        self.reads: list[tuple[NDArray[Any], NDArray[np.float32]]] = []
        self.grown: list[tuple[Request, int]] = []
        self.executed = False


class Follower:
    """One client that does as its generator says."""

    def __init__(self, path: str, seed: int, *, families: int = 3, **options: Any) -> None:
        self.random = random.Random(seed)
        self.families = families  # of prompts that begin alike
        self.client = Client(path, **{"movable": True, **options})
        self.planes = [self.client.pool.plane(name) for name in self.client.pool.planes]
        self.running: list[Request] = []
        self.flights: deque[Flight] = deque()
        self.done: dict[str, int] = {}

    def count(self, what: str, times: int = 1) -> None:
        self.done[what] = self.done.get(what, 0) + times

    # -- its device ------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        """A step for all sequences: their last tokens are written, all of them are read."""
        rng = self.random
        epoch = self.client.epoch
        number = self.client.submit()
        flight = Flight(number)
        self.count("applied", self.client.epoch - epoch)
        for each in self.running:
            for _ in range(rng.choice((0, 1, 1, 1, 7))):
                token = rng.randrange(5)
                try:
                    each.sequence.append(token)
                except OutOfRoom:
                    self.count("out of room")
                    break
                each.tokens.append(token)
            length = len(each.tokens)
            assert each.sequence.length == length
            values = marks(each.tokens)
            slots = indices.slot_indices(each.sequence)
            if len(set(slots.tolist())) < length:
                raise Misread(f"sequence {each.sequence.id} has a slot twice: epoch {self.client.epoch}")
            flight.writes.append((slots[each.computed :], values[each.computed :]))
            flight.reads.append((slots, values))
            flight.grown.append((each, length))
            each.computed = length
        self.flights.append(flight)
        self.count("stepped")

    def execute(self, flight: Flight) -> None:
        """What the step was submitted with is done now, whatever has been said since."""
        for each in self.flights:
            if not each.executed:
                for slots, values in each.writes:
                    for plane in self.planes:
                        plane[slots] = values.reshape(-1, 1, 1)
                for slots, values in each.reads:
                    self.compare(slots, values, f"step {each.number}")
                each.executed = True
            if each is flight:
                return

    def complete(self) -> None:
        """The oldest step ends."""
        flight = self.flights[0]
        self.execute(flight)
        self.flights.popleft()
        for each, length in flight.grown:
            each.written = max(each.written, min(length, len(each.tokens)))
        self.client.complete(flight.number)

    def compare(self, slots: NDArray[Any], values: NDArray[np.float32], who: str) -> None:
        """Every plane has what was computed."""
        for plane in self.planes:
            wrong = (plane[slots].reshape(len(slots), 8) != values[:, None]).any(1)
            if wrong.any():
                at = int(np.argmax(wrong))
                raise Misread(f"{who} misreads position {at} in slot {slots[at]}: epoch {self.client.epoch}")
        self.count("read", len(slots))

    def check(self) -> None:
        """Between steps, too, tables lead to what the executed ones have written."""
        executed: dict[int, int] = {}
        for flight in self.flights:
            if not flight.executed:
                for each, _ in flight.grown:
                    executed.setdefault(id(each), each.written)
        for each in self.running:
            until = min(executed.get(id(each), each.computed), len(each.tokens))
            slots = indices.slot_indices(each.sequence, 0, until)
            self.compare(slots, marks(each.tokens)[:until], f"sequence {each.sequence.id}")

    # -- what it does ------------------------------------------------------------------------------------------------

    def act(self) -> None:
        """One thing, at random."""
        rng = self.random
        for event in self.client.events() if rng.random() < 0.3 else ():
            if isinstance(event, Preempt):
                for each in [each for each in self.running if each.sequence.id == event.sequence]:
                    self.free(each)
                    self.count("preempted")
        what = rng.random()
        if what < 0.35:
            if len(self.flights) == AHEAD:
                self.complete()
            self.submit()
        elif what < 0.55 and self.flights:
            self.complete()
        elif what < 0.65 and self.flights:
            self.execute(rng.choice(self.flights))
        elif what < 0.75 or not self.running:
            self.start()
        elif what < 0.76:
            self.lose()
        elif what < 0.80:
            self.check()
        else:
            each = rng.choice(self.running)
            if what < 0.86:
                self.commit(each)
            elif what < 0.91:
                self.fork(each)
            elif what < 0.96:
                self.trim(each)
            else:
                self.free(each)

    def start(self) -> None:
        rng = self.random
        if len(self.running) >= BUSIEST:
            return
        family, length = rng.randrange(self.families), rng.randint(1, 120)
        tokens = [family * 1000 + i for i in range(length)]
        if rng.random() < 0.5:
            tokens[rng.randrange(length) :] = [rng.randrange(5)]
        answer = self.client.allocate(tokens)
        if isinstance(answer, Later):
            self.client.withdraw(answer.ticket)
            self.count("later")
        elif not isinstance(answer, Never):
            each = Request(answer, tokens, answer.hit)
            self.running.append(each)
            self.count("hit" if answer.hit else "missed")

    def commit(self, each: Request) -> None:
        if each.sequence._spoiled is None and each.written:
            each.sequence.commit(each.written, wait=self.random.random() < 0.5)
            self.count("committed")

    def fork(self, each: Request) -> None:
        if not each.written or len(self.running) >= BUSIEST:
            return
        length = self.random.choice((each.written, self.random.randint(1, each.written)))
        pending = bool(each.sequence._moved)
        child = each.sequence.fork(length)
        if isinstance(child, Sequence):
            self.running.append(Request(child, each.tokens[:length], length))
            self.count("forked")
            self.count("forked with moves pending", pending or bool(child._moved))

    def trim(self, each: Request) -> None:
        keep = max(1, len(each.tokens) - self.random.choice((1, 2, 20, 100)))
        self.count("trimmed with moves pending", bool(each.sequence._moved))
        each.sequence.trim(keep_to=keep)
        del each.tokens[keep:]
        each.computed = min(each.computed, keep)
        each.written = min(each.written, keep)
        for flight in self.flights:  # what it writes beyond is of tokens that are no more
            flight.grown = [(one, min(n, keep) if one is each else n) for one, n in flight.grown]
        self.count("trimmed")

    def free(self, each: Request) -> None:
        if self.random.random() < 0.7:
            self.commit(each)
        each.sequence.free()
        self.running.remove(each)

    def lose(self) -> None:
        """The connection ends, with whatever is under way, and is taken up again."""
        self.client.flush()
        if self.random.random() < 0.5:
            self.client._connection.wait(0.01)
        self.client._connection.lost("a test cut it")
        self.client.reconnect()
        self.count("reconnected")
        assert not any(each.sequence.ended for each in self.running)

    def leave(self) -> None:
        """The end: all that was under way, then all that runs."""
        while self.flights:
            self.complete()
        self.check()
        for each in list(self.running):
            self.free(each)
        self.planes.clear()
        self.client.settle()
        assert self.client.last_error is None
        self.count("moved", self.client.statistics().moves)
        self.client.close()

    def abandon(self) -> None:
        """The end in the middle of anything."""
        self.planes.clear()
        try:
            self.client.close()
        except BufferError:  # the traceback has views
            self.client._end(bye=False)


@contextmanager
def shuffled(seed: int, first: str = "", code: int | None = 0) -> Iterator[Running]:
    """A small pool in a real daemon that moves whatever can be moved, all the time; `first` is run in it before."""
    with _daemon(f"{first}\n{INSTALL}({seed})", code, compaction="off") as daemon:
        yield daemon


@contextmanager
def compacted(seed: int, mode: str = "forced") -> Iterator[Running]:
    """The same with the daemon's own compactor, at any time, as long as there is anything to gain."""
    settings = {
        "compaction_start": 0.01,
        "compaction_stop": 0.0,
        "compaction_duty": 1.0,
        "compaction_run_blocks": 8,
    }
    with _daemon(f"{INSTALL}({seed}, moves=0)", 0, 256, compaction=mode, **settings) as daemon:
        yield daemon


@contextmanager
def _daemon(first: str, code: int | None, blocks: int = 64, **settings: Any) -> Iterator[Running]:
    import importlib

    running = importlib.import_module("tests.tools.daemon").running
    pools = [{"blocks": blocks, "preempt_deadline_ms": 20, "reclaim_patience_ms": 5}]
    with running(pools=pools, first=first, code=code, **settings) as daemon:
        yield daemon


def live(
    path: str,
    seed: int,
    turns: int,
    engines: int = 3,
    *,
    compacting: int = 0,
    evicting: int = 1500,
    families: int = 0,
    beside: Callable[[], None] | None = None,
) -> dict[str, int]:
    """Engines that live for so many turns; what they did together.

    `compacting`: turns between two demands on the daemon to gain by moves what it can (0: none), before each of which
    fewer than `evicting` tokens are evicted; `beside` is called before each, and after each that has come to rest.
    """
    rng = random.Random(seed)
    done: dict[str, int] = {}
    families = families or (40 if compacting else 3)
    all_of_them = [Follower(path, 10 * seed + i, families=families) for i in range(engines)]
    try:
        for turn in range(turns):
            if compacting and not turn % compacting:
                if beside is not None:
                    beside()
                with Control(path) as control:
                    control.evict(rng.randrange(1, evicting))  # holes
                    told = control.defrag("once")[0]
                    # Every other time it has come to rest before anybody goes on.
                    while told.once and turn // compacting % 2:
                        time.sleep(0.002)
                        told = control.defrag("status")[0]
            rng.choice(all_of_them).act()
            if not turn % 50:
                for each in all_of_them:
                    each.check()
        for each in all_of_them:
            each.leave()
            for what, count in each.done.items():
                done[what] = done.get(what, 0) + count
    except BaseException:
        for each in all_of_them:
            each.abandon()
        raise
    return done


def audit(path: str) -> None:
    """The pool is what it says."""
    with Control(path) as control:
        faults = control.audit().faults
        assert faults == [], faults


def side_by_side(path: str, seed: int, turns: int, processes: int, compacting: int) -> dict[str, int]:
    """As `live`, by processes that each have engines of their own; what the first did, which is this one."""
    children = []
    for number in range(1, processes):
        child = os.fork()
        if not child:
            code = 1
            try:
                live(path, seed + 100_000 * number, turns, 2, families=40 if compacting else 3)
                code = 0
            except BaseException:  # noqa: BLE001 - told on the way out
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    try:
        return live(path, seed, turns, compacting=compacting)
    finally:
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert not any(codes), codes


def main(arguments: list[str] | None = None) -> int:
    """Seeds until the time is over."""
    parser = argparse.ArgumentParser(prog="followers", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--start", type=int, default=1_000)
    parser.add_argument("--turns", type=int, default=2_000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--compaction", choices=("idle", "forced"), help="the daemon's own, instead of the shuffler"
    )
    options = parser.parse_args(arguments)
    seed, until = options.start, time.monotonic() + 60 * options.minutes
    total: dict[str, int] = {}
    while time.monotonic() < until:
        there = compacted(seed, options.compaction) if options.compaction else shuffled(seed)
        with there as daemon:
            compacting = 40 if options.compaction else 0
            done = side_by_side(str(daemon.socket), seed, options.turns, options.processes, compacting)
            for what, count in done.items():
                total[what] = total.get(what, 0) + count
            audit(str(daemon.socket))
        seed += 1
    print(f"{seed - options.start} seeds from {options.start} on: every byte was right")
    print(", ".join(f"{count:,} {what}" for what, count in sorted(total.items())))
    return 0


if __name__ == "__main__":
    if "tests" not in sys.modules:
        package = types.ModuleType("tests")
        package.__path__ = [str(Path(__file__).resolve().parents[1])]
        sys.modules["tests"] = package
    raise SystemExit(main())
