"""`make soak`: hours of mixed load from real processes, deaths included, and whether anything of it stays behind.

    python -m kvslot.benchmarks.soak --seconds 3600

One daemon with a small pool that is always full, and at any time some clients of these kinds, each for a few seconds:

    engine       admits prompts of shared chats, writes and reads painted K and V through the mapping, appends with
                 steps, commits, forks, rolls back, frees, answers Preempt; ends with Bye, by leaving, or killed
    namespaces   opens namespaces that nobody uses again
    rude         breaks off in the middle of a frame, sends what is no frame, asks and never reads, holds and leaves

The daemon's private memory is sampled all along, and its descriptors whenever all clients have been killed for a
moment, which happens some dozen times.  What fails the run: medians of the last quarter (after the warm-up) above
those of the first by more than the margins below, wrong bytes in a slot, a daemon that ended, a client that ended in a
way it should not, anything left over once all clients are gone, a fault found by the audit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvslot.api.client import AdmissionTimeout, Client, Control, OutOfRoom
from kvslot.api.client import Sequence as Running
from kvslot.api.client.indices import slot_indices
from kvslot.api.wire import VERSION, Disconnected, Namespace, encode, messages
from kvslot.benchmarks.report import Document, Result, meta, result
from kvslot.benchmarks.rig import Daemon, Peer
from kvslot.benchmarks.traffic import noise

DESCRIPTION: Final = (
    "Mixed load from real processes, deaths included, and whether anything of it stays behind."
)
SECONDS: Final = 3600.0
SLOTS: Final = 48 * 1024
WORKERS: Final = 5
KINDS: Final = ("engine",) * 6 + ("namespaces", "rude", "rude")
LIFE_S: Final = (1.0, 12.0)
WARM_SHARE: Final = 0.2
"""Of the whole time, and at most WARM_S: the pool fills, free lists and caches of the interpreter reach their size."""
WARM_S: Final = 300.0
MARGIN_MIB: Final = 2.0
"""Medians of a quarter differ by that much with what happens to be cached."""
PAUSES: Final = 24
PAUSE_LEAST_S: Final = 4.0
"""All clients are killed so often, and not more often than this."""
SETTLE_S: Final = 30.0
RUNNING_MOST: Final = 6
CHATS: Final = 40
LONGEST: Final = 1500
WRONG: Final = 7
"""Exit code of a client that found bytes which are not its prompt's."""

Values = npt.NDArray[np.uint32]


# -- clients ----------------------------------------------------------------------------------------------------------


def painted(tokens: bytes) -> Values:
    """What the K of each token holds: a sum over all tokens up to it, so that another prefix shows another value."""
    ids = np.frombuffer(tokens, dtype="<u4")
    mixed = (ids + np.uint32(1)) * np.uint32(2654435761) ^ np.arange(len(ids), dtype=np.uint32)
    return np.cumsum(mixed, dtype=np.uint32)


class Engine:
    """A client with the pool mapped, which believes nothing it reads."""

    def __init__(self, path: str, rng: random.Random) -> None:
        self.rng = rng
        self.client = Client(
            path,
            name="soak engine",
            namespace=Namespace(tenant=f"shared {rng.randrange(4)}"),
            page=rng.choice((1, 1, 16)),
            append=rng.choice(("chain", "peel")),
        )
        self.planes = [self._words("0.k"), self._words("0.v")]
        self.running: dict[int, tuple[Running, int]] = {}  # by sequence: which chat it is

    def _words(self, plane: str) -> Values:
        words: Values = self.client.pool.plane(plane).reshape(-1).view(np.uint32)
        return words

    def admit(self) -> None:
        """One more prompt: what is cached of it must read back as it was painted."""
        chat, length = self.rng.randrange(CHATS), self.rng.randint(40, LONGEST)
        try:
            sequence = self.client.admit(
                noise(chat, 0, length),
                timeout=0.3,
                priority=self.rng.choice((0, 0, 1)),
                wait_for_commit=self.rng.random() < 0.1,
            )
        except AdmissionTimeout:
            self.let_go()
            return
        self._copy()
        self.check(sequence, chat, sequence.hit)
        with self.client.step():
            self.paint(sequence, chat, sequence.hit)
        if self.rng.random() < 0.9:
            sequence.commit()
        self.running[sequence.id] = (sequence, chat)

    def _copy(self) -> None:
        copies = self.client.take_copies()
        if copies:
            self.client.pool.copy(copies)

    def check(self, sequence: Running, chat: int, stop: int) -> None:
        """Positions [0, stop) hold what they should."""
        if not stop:
            return
        slots = slot_indices(sequence, 0, stop)
        wanted = painted(noise(chat, 0, stop))
        for plane, want in zip(self.planes, (wanted, ~wanted), strict=True):
            found = plane[slots]
            if not np.array_equal(found, want):
                where = int(np.argmax(found != want))
                print(
                    f"wrong bytes: chat {chat}, position {where} of {stop}, hit {sequence.hit}, slot {slots[where]}",
                    file=sys.stderr,
                )
                sys.stderr.flush()
                os._exit(WRONG)

    def paint(self, sequence: Running, chat: int, start: int) -> None:
        """Writes positions from `start` on."""
        slots = slot_indices(sequence, start)
        values = painted(noise(chat, 0, sequence.length))[start:]
        for plane, each in zip(self.planes, (values, ~values), strict=True):
            plane[slots] = each

    def decode(self) -> None:
        """A step: a token more for each."""
        with self.client.step():
            for sequence, chat in list(self.running.values()):
                at = sequence.length
                try:
                    sequence.append(int.from_bytes(noise(chat, at, at + 1), "little"))
                except OutOfRoom:
                    self.end(sequence)
                    continue
                self._copy()
                self.paint(sequence, chat, at)
        for event in self.client.events():
            if isinstance(event, messages.Preempt) and event.sequence in self.running:
                self.end(self.running[event.sequence][0])

    def end(self, sequence: Running) -> None:
        """Reads it all back and frees it."""
        _, chat = self.running.pop(sequence.id)
        if self.rng.random() < 0.5:
            self.check(sequence, chat, sequence.length)
        sequence.free()

    def let_go(self) -> None:
        """Frees one, so that others can go on."""
        if self.running:
            self.end(self.rng.choice(list(self.running.values()))[0])

    def turn(self) -> None:
        """Something an engine may do."""
        rng = self.rng
        if len(self.running) < RUNNING_MOST:
            self.admit()
        for _ in range(rng.randint(1, 24)):
            self.decode()
        if not self.running:
            return
        sequence, chat = rng.choice(list(self.running.values()))
        what = rng.random()
        if what < 0.3:
            self.end(sequence)
        elif what < 0.5:
            sequence.commit(wait=rng.random() < 0.5)
        elif what < 0.6 and len(self.running) < RUNNING_MOST:
            child = sequence.fork(rng.randint(1, sequence.length))
            if isinstance(child, Running):
                self._copy()
                self.running[child.id] = (child, chat)
        elif what < 0.7 and sequence.length > 80:
            sequence.trim(keep_to=rng.randint(sequence.length - 30, sequence.length))


def engine(path: str, rng: random.Random, until: float) -> None:
    """Lives its time, and ends in one of several ways; being killed is another, which comes from outside."""
    it = Engine(path, rng)
    while time.monotonic() < until:
        it.turn()
    if rng.random() < 0.3:
        os._exit(0)  # no Bye
    for sequence, chat in list(it.running.values()):
        it.check(sequence, chat, sequence.length)
    del it.planes
    it.client.close()


def namespaces(path: str, rng: random.Random, until: float) -> None:
    """Opens one namespace after the other."""
    while time.monotonic() < until:
        with Peer(Path(path), namespace=f"once {rng.getrandbits(64)}", name="soak namespaces") as peer:
            peer.cache(noise(1000 + index, 0, 50) for index in range(3))
            for _ in range(8):
                opened = peer.call(
                    messages.OpenNamespace(1, Namespace(salt=str(rng.getrandbits(64)))), messages.Opened
                )
                peer.call(messages.Probe(1, opened.namespace, b"abcd"), messages.Probed)
        time.sleep(0.05)


def rude(path: str, rng: random.Random, until: float) -> None:
    """Breaks off, babbles, floods, and leaves with sequences running."""
    hello = encode(messages.Hello(1, VERSION, "soak rude", map=False))
    while time.monotonic() < until:
        with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
            sock.connect(path)
            sock.settimeout(5.0)
            what = rng.randrange(5)
            if what == 0:
                sock.sendall(hello[: rng.randrange(len(hello))])
            elif what == 1:
                sock.sendall(rng.randbytes(rng.randrange(1, 200)))
            elif what == 2:
                sock.sendall(hello + encode(messages.Ping(2)) * rng.randrange(1, 2000))
            elif what == 3:
                sock.sendall(hello)
                sock.recv(4096)
                sock.sendall(b"".join(encode(messages.Free(2, n)) for n in range(50)))
            else:
                with Peer(Path(path), namespace="rude", name="soak rude") as peer:
                    for number in range(rng.randrange(1, 6)):
                        prompt = noise(5000 + number, 0, rng.randrange(1, 200))
                        peer.send(messages.Allocate(1, peer.namespace, number, prompt))
                    peer.abandon()
        time.sleep(rng.random() * 0.1)


ROLES: Final[dict[str, Callable[[str, random.Random, float], None]]] = {
    "engine": engine,
    "namespaces": namespaces,
    "rude": rude,
}


# -- the watch --------------------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """The daemon at one moment."""

    at_s: float
    private_mib: float
    descriptors: int


class Child(NamedTuple):
    """A client, and when it is to be killed (0: it ends by itself)."""

    process: subprocess.Popen[bytes]
    kind: str
    seed: int
    kill_at: float


def look(pid: int, began: float) -> Sample:
    """A sample now.  Private memory: what is not backed by the pool or by files."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        kib = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
    return Sample(time.monotonic() - began, kib / 1024, len(os.listdir(f"/proc/{pid}/fd")))


def least(pid: int, began: float) -> Sample:
    """A sample with the fewest descriptors of some, since one that was just closed here may still be open there."""
    found = []
    for _ in range(10):
        found.append(look(pid, began))
        time.sleep(0.02)
    return min(found, key=lambda each: each.descriptors)


class Crowd:
    """The clients that are there."""

    def __init__(self, path: Path, seed: int, log: Path) -> None:
        self.path = path
        self.rng = random.Random(seed)
        self.log = log.open("ab")
        self.children: list[Child] = []
        self.born = self.killed = 0
        self.wrong: list[str] = []

    def keep(self, count: int) -> None:
        """Buries the dead, kills whose time has come, and starts new ones up to `count`."""
        now = time.monotonic()
        for child in list(self.children):
            if child.process.poll() is None and child.kill_at and now >= child.kill_at:
                if self.rng.random() < 0.3:
                    # Stopped for a while first: its socket fills, its steps stand still.
                    child.process.send_signal(signal.SIGSTOP)
                    time.sleep(0.05)
                child.process.kill()
                child.process.wait()
                self.killed += 1
            code = child.process.poll()
            if code is None:
                continue
            self.children.remove(child)
            if code not in (0, -signal.SIGKILL):
                self.wrong.append(f"{child.kind} with seed {child.seed} ended with {code}")
        while len(self.children) < count:
            self._start(now)

    def _start(self, now: float) -> None:
        kind, seed = self.rng.choice(KINDS), self.rng.getrandbits(32)
        life = self.rng.uniform(*LIFE_S)
        words = [sys.executable, "-Im", "kvslot.benchmarks.soak", "--role", kind, "--socket", str(self.path)]
        process = subprocess.Popen(
            [*words, "--seed", str(seed), "--seconds", f"{life:.2f}"], stdout=self.log, stderr=self.log
        )
        kill_at = now + self.rng.uniform(0.3, life) if self.rng.random() < 0.4 else 0.0
        self.children.append(Child(process, kind, seed, kill_at))
        self.born += 1

    def clear(self) -> None:
        """Kills all that is left."""
        self.keep(0)
        for child in self.children:
            child.process.kill()
        for child in self.children:
            child.process.wait()
        self.killed += len(self.children)
        self.children.clear()

    def close(self) -> None:
        """The end."""
        self.clear()
        self.log.close()


def growth(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the first and the last quarter."""
    quarter = max(1, len(values) // 4)
    return statistics.median(values[:quarter]), statistics.median(values[-quarter:])


def left_over(path: Path) -> dict[str, Any]:
    """What the pool still holds that belongs to a client; waits for it to be nothing."""
    until = time.monotonic() + SETTLE_S
    keys = (
        "sessions",
        "sequences",
        "private",
        "fenced",
        "quarantined",
        "reserved",
        "leased",
        "tickets",
        "pinned",
    )
    with Control(str(path)) as control:
        while True:
            row = next(iter(control.inspect("pools")))
            held = {key: row[key] for key in keys if row[key]}
            if not held or time.monotonic() > until:
                return held
            time.sleep(0.1)


def soak(
    seconds: float = SECONDS,
    *,
    seed: int = 0,
    workers: int = WORKERS,
    command: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda words: None,
) -> Document:
    """Runs it; the document's results say what was found."""
    about = meta(
        ["soak"],
        quick=seconds < SECONDS,
        seed=seed,
        cost_ns=0,
        command=command,
        suite="soak",
        clock="wall clock",
    )
    began = time.monotonic()
    warm = min(WARM_S, WARM_SHARE * seconds)
    every = max(0.25, min(10.0, seconds / 200))
    pause = max(PAUSE_LEAST_S, seconds / PAUSES)
    samples: list[Sample] = []
    quiet: list[Sample] = []
    faults: list[str] = []
    done = ""
    with tempfile.TemporaryDirectory(prefix="kvslot-") as name:
        folder = Path(name)
        log = folder / "clients.log"
        with Daemon(folder, slots=SLOTS, dtype="float32") as daemon:
            about.loop = daemon.loop()
            crowd = Crowd(daemon.socket, seed, log)
            try:
                next_sample = next_word = 0.0
                next_pause = pause
                while (now := time.monotonic() - began) < seconds and daemon.process.poll() is None:
                    crowd.keep(workers)
                    if now >= next_sample:
                        samples.append(look(daemon.pid, began))
                        next_sample = now + every
                    if now >= next_pause:
                        crowd.clear()
                        left_over(daemon.socket)
                        quiet.append(least(daemon.pid, began))
                        next_pause = now + pause
                    if now >= next_word:
                        say(_words(samples[-1], crowd))
                        next_word = now + max(10.0, seconds / 60)
                    time.sleep(0.05)
            finally:
                crowd.close()
            if daemon.process.poll() is not None:
                faults.append(f"the daemon ended with {daemon.process.returncode}: {daemon.words()}")
                held: dict[str, Any] = {}
                audited = messages.Audited(0, [], 0.0)
            else:
                held = left_over(daemon.socket)
                with Control(str(daemon.socket), timeout=120.0) as control:
                    audited = control.audit()
                    done = _done(next(iter(control.inspect("pools"))))
        faults += [f"audit: {each}" for each in audited.faults] + crowd.wrong
        if held:
            faults.append(f"left over: {held}")
        if crowd.wrong:
            faults.append(log.read_bytes()[-4000:].decode(errors="replace"))
        if daemon.process.returncode:
            faults.append(f"the daemon's exit code is {daemon.process.returncode}: {daemon.words()}")
    about.wall_s = round(time.monotonic() - began, 1)
    rows = judge(
        samples, quiet, warm, crowd.born, crowd.killed, crowd.wrong, len(audited.faults), len(held), done
    )
    document = Document(meta=about, results=rows)
    for fault in faults:
        say(fault)
    if faults and not document.missed:
        document.results.append(
            Result(
                name="faults", value=len(faults), unit="", target=0.0, ok=False, sense="<=", what=faults[0]
            )
        )
    return document


def _words(sample: Sample, crowd: Crowd) -> str:
    return (
        f"{sample.at_s:7.0f} s  private {sample.private_mib:.1f} MiB  descriptors {sample.descriptors}  "
        f"clients {crowd.born}, killed {crowd.killed}"
    )


def _done(pool: dict[str, Any]) -> str:
    """What the pool has been through, in words."""
    return (
        f"; {pool['prompt_tokens']:,} tokens of prompts, {pool['hit_tokens']:,} of them cached, "
        f"{pool['evicted_tokens']:,} evicted, {pool['extents_given']:,} extents given"
    )


def judge(
    samples: Sequence[Sample],
    quiet: Sequence[Sample],
    warm: float,
    born: int,
    killed: int,
    wrong: Sequence[str],
    faults: int,
    held: int,
    done: str,
) -> list[Result]:
    """The rows: `samples` all along, `quiet` without clients, both from `warm` seconds on."""
    steady = [each for each in samples if each.at_s >= warm] or list(samples)
    still = [each for each in quiet if each.at_s >= warm] or list(quiet) or list(samples)
    first, last = growth([each.private_mib for each in steady])
    before, after = growth([float(each.descriptors) for each in still])
    # Less than MARGIN_MIB is nothing, however small the daemon.
    ratio = 1.0 if last - first <= MARGIN_MIB else last / first
    note = f"{len(steady)} samples after {warm:.0f} s, first quarter {first:.1f} MiB, last {last:.1f} MiB"
    rows = (
        ("memory_growth", ratio, note),
        (
            "descriptors_growth",
            after - before,
            f"{len(still)} moments without clients, {before:g} to {after:g}",
        ),
        ("audit_faults", float(faults), f"{born} clients, {killed} killed{done}"),
        ("left_over", float(held), ""),
        ("wrong_clients", float(len(wrong)), "; ".join(wrong[:3])),
    )
    return [result(name, value, note=note, suite="soak") for name, value, note in rows]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 when something is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m kvslot.benchmarks.soak", description=DESCRIPTION)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long (an hour)")
    parser.add_argument("--seed", type=int, default=0, help="of who comes when, and does what")
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"clients at a time ({WORKERS})")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON too")
    parser.add_argument("--role", choices=sorted(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--socket", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.role:
        # The daemon may be at its end, or have dropped us by rule: that is no fault of this client.
        with contextlib.suppress(Disconnected, ConnectionError):
            ROLES[arguments.role](
                arguments.socket, random.Random(arguments.seed), time.monotonic() + arguments.seconds
            )
        return 0
    document = soak(
        arguments.seconds,
        seed=arguments.seed,
        workers=arguments.workers,
        say=lambda words: print(words, flush=True),
    )
    for each in document.results:
        verdict = "" if each.ok is None else "ok" if each.ok else "MISSED"
        target = f"{each.sense} {each.target:g}" if each.target is not None else ""
        print(
            f"{each.name:20} {each.value:10g} {each.unit:4} {target:8} {verdict:7} {each.what} ({each.note})"
        )
    if arguments.json:
        Path(arguments.json).write_bytes(msgspec.json.encode(document))
    return 1 if document.missed else 0


if __name__ == "__main__":
    sys.exit(main())
