"""Clients that stop, flood, never read, leak or lie.

The others do not notice; the offender is dropped or stalled by rule.
"""

from __future__ import annotations

import array
import os
import random
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from kvslot.api.wire import PUSHES, WAKE, encode, errors, messages
from kvslot.api.wire.messages import (
    Admitted,
    Allocate,
    Batch,
    Commit,
    Done,
    Error,
    Free,
    Inspect,
    Later,
    Namespace,
    Ping,
    Pong,
    Probe,
    Ready,
)

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens
from .actors import Paint, audit, child, cpu_seconds, empty, events, rows, until

WAIT = 30.0


def served(daemon: Running, *, times: int = 200) -> float:
    """An honest client allocates, paints, commits, reads and frees; returns its slowest call (s)."""
    slowest = 0.0
    with Wire(daemon.socket) as wire:
        wire.hello("honest", namespace=Namespace(tenant=f"honest{os.urandom(4).hex()}"))
        with Paint(wire, "honest") as paint:
            for n in range(times):
                began = time.monotonic()
                prompt = tokens(24, 100 * n)
                admitted = wire.call(Allocate, wire.namespace, 1, prompt)
                assert isinstance(admitted, Admitted), admitted
                paint.write(prompt, admitted.extents)
                wire.call(Commit, 1, 24)
                assert wire.call(Probe, wire.namespace, prompt).hit == 23
                assert not paint.wrong(prompt, admitted.extents)
                wire.call(Free, 1)
                slowest = max(slowest, time.monotonic() - began)
    return slowest


def flooding(
    daemon: Running, requests: list[bytes], *, session: bool
) -> Callable[[Callable[[Any], None]], None]:
    """Sends as fast as the socket takes it, never reads; tells when it is full, and when it has been dropped."""

    def work(tell: Callable[[Any], None]) -> None:
        wire = Wire(daemon.socket)
        if session:
            wire.hello("flooder")
        wire.sock.setblocking(False)
        data = b"".join(requests)
        at = 0
        full = False
        while True:
            _, ready, _ = select.select([], [wire.sock], [], 0.25)
            if not ready:
                if not full:
                    full = True
                    tell("full")
                continue
            try:
                at = (at + wire.sock.send(data[at:])) % len(data)
            except BlockingIOError:
                continue
            except OSError:
                tell("dropped")
                return

    return work


FLOODS = {
    "pings": [encode(Ping(n)) for n in range(1000, 9000)],
    "batches": [encode(Batch(n, [Probe(0, 1, tokens(4))] * 4096)) for n in range(1, 9)],
    "listings": [encode(Inspect(n, "config")) for n in range(1000, 3000)],
    "refused": [encode(Probe(n, 999, tokens(200))) for n in range(1000, 3000)],
}


@pytest.mark.parametrize("kind", FLOODS)
def test_S35_ten_that_never_read(kind: str) -> None:
    """Past `reply_bytes` the daemon reads no further, past `reply_seconds` it drops them; memory stays bounded."""
    with (
        running(reply_bytes=1 << 20, reply_seconds=1.5, pools=[{"blocks": 257}]) as daemon,
        ExitStack() as stack,
    ):
        served(daemon)
        before = daemon.rss_kib()
        flooders = [
            stack.enter_context(child(flooding(daemon, FLOODS[kind], session=kind != "listings")))
            for _ in range(10)
        ]
        for each in flooders:
            assert each.heard() == "full"
        most = daemon.rss_kib()
        slowest = served(daemon, times=50)
        for each in flooders:
            assert each.heard() == "dropped"
            most = max(most, daemon.rss_kib())
        # Of each: replies up to `reply_bytes`, and what one receive brought, cut into frames.
        assert most - before < 10 * (2 << 10) + (5 << 10), (
            f"{most - before} KiB for ten of at most 2 MiB each"
        )
        assert slowest < 1.0
        for each in flooders:
            each.kill()
        empty(daemon)


def test_stopped_client_is_stalled_and_the_others_go_on() -> None:
    """kill -STOP in mid-step: its fence never passes, it counts as stalled, and what it holds is not waited for."""
    with running(stall_seconds=0.5) as daemon, Wire(daemon.socket) as control:

        def work(tell: Callable[[Any], None]) -> None:
            wire = Wire(daemon.socket)
            wire.hello("stopped")
            wire.call(Allocate, wire.namespace, 1, tokens(300))
            wire.call(Allocate, wire.namespace, 2, tokens(300, 5000))
            wire.step(1, 0)
            assert isinstance(wire.call(Free, 1, 1), Done)
            tell("running")
            while True:
                time.sleep(0.01)
                if wire.page is not None and wire.page.words[8] >> 63:
                    return

        with child(work) as stopped:
            assert stopped.heard() == "running"
            stopped.signal(signal.SIGSTOP)
            until(lambda: rows(control, "sessions")[0]["stalled"], 5.0, "not stalled")
            assert served(daemon) < 1.0
            with Wire(daemon.socket) as wire:
                wire.hello("waits", namespace=Namespace(tenant="waits"))
                later = wire.call(Allocate, wire.namespace, 1, tokens(600))
                assert isinstance(later, Later)
                assert later.coming_free == 0, "nothing of a stalled session's is about to come"
                stopped.kill()
                assert wire.push(Ready).ticket == later.ticket
                assert isinstance(wire.call(Allocate, wire.namespace, 1, tokens(600), later.ticket), Admitted)
        assert [event["event"] for event in events(daemon)].count("session_stalled") == 1
        empty(daemon)


def test_fence_that_never_passes_and_then_does() -> None:
    """Its slots are nobody's until the step has completed, however long that takes; then they are free at once."""
    with running(stall_seconds=0.3) as daemon, Wire(daemon.socket) as wire, Wire(daemon.socket) as other:
        usable = wire.hello("slow").pool.usable
        other.hello("other", namespace=Namespace(tenant="other"))
        with Paint(wire, "slow") as paint:
            mine = tokens(usable - 200)
            held = wire.call(Allocate, wire.namespace, 1, mine)
            paint.write(mine, held.extents)
            wire.step(1, 0)
            assert isinstance(wire.call(Free, 1, 1), Done)
            later = other.call(Allocate, other.namespace, 1, tokens(300, 7000))
            assert isinstance(later, Later)
            with Paint(other, "other") as theirs:
                small = other.call(Allocate, other.namespace, 2, tokens(20, 8000))
                if isinstance(small, Admitted):  # or it waits for its turn behind the older one
                    theirs.write(tokens(20, 8000), small.extents)
                    other.call(Free, 2)
                until(lambda: rows(other, "sessions")[0]["stalled"], 5.0, "not stalled")
                again = other.call(Allocate, other.namespace, 1, tokens(300, 7000), later.ticket)
                assert isinstance(again, Later)
                assert not paint.wrong(mine, held.extents), "the device still reads these"
                wire.step(1, 1)
                assert other.push(Ready).ticket == later.ticket
                assert isinstance(
                    other.call(Allocate, other.namespace, 1, tokens(300, 7000), later.ticket), Admitted
                )


def _lies(rng: random.Random) -> list[list[tuple[int, int]]]:
    """What may be scribbled into a page: (word, value) pairs, one list a moment."""
    most = 2**64 - 1
    return [
        [(1, 1)],
        [(0, 1), (1, 2)],
        [(0, most), (1, most)],
        [(1, most)],
        [(0, 2**63)],
        [(0, 5), (1, 3)],
        [(0, 4), (1, 4)],
        [(0, 9), (1, 9)],
        [(0, 9), (1, 8)],
        [(0, 0), (1, 0)],
        *[[(word, rng.randrange(1 << 64)) for word in range(512)] for _ in range(3)],
    ]


@pytest.mark.parametrize("seed", range(6))
def test_lying_pages_cost_their_own_session_alone(seed: int) -> None:
    """Steps that fall, completed beyond submitted, noise in every word: that connection ends, told why (4.4)."""
    rng = random.Random(seed)
    with running(pools=[{"blocks": 4097}]) as daemon:

        def work(tell: Callable[[Any], None]) -> None:
            lies = _lies(rng)
            for _ in range(25):
                wire = Wire(daemon.socket)
                wire.hello("liar", namespace=Namespace(tenant="liar"))
                assert wire.page is not None
                wire.call(Allocate, wire.namespace, 1, tokens(20))
                wire.call(Allocate, wire.namespace, 2, tokens(20))
                fenced = rng.random() < 0.5
                if fenced:
                    wire.step(2, 0)
                    wire.call(Free, 1, 2)
                told: list[Any] = []
                try:
                    for _ in range(rng.randrange(1, 4)):
                        for word, value in rng.choice(lies):
                            wire.page.words[word] = value
                        if rng.random() < 0.3:
                            os.eventfd_write(wire.descriptors[2], 1)
                        # Verbs that look at the page, alone and in a batch that goes on behind it, whole and in turns.
                        behind: list[messages.Batchable] = [
                            Probe(0, wire.namespace, tokens(3)),
                            Free(0, 2, 1),
                            Commit(0, 1, 20),
                        ] * rng.choice([1, 40])
                        asked = rng.choice(
                            [
                                Free(7, 2, 1),
                                Free(0, 2, 1),
                                Batch(7, [Free(0, 1, 1), *behind]),
                                Allocate(7, wire.namespace, 3, tokens(2000)),
                                messages.Extend(7, 2, tokens=900),
                                messages.Bye(7),
                            ]
                        )
                        wire.send(asked)
                        wire.send(Ping(8))
                        while True:
                            told.append(wire.receive())
                            if isinstance(told[-1], Pong):
                                break
                except OSError:
                    pass  # it was ended, as it should have been
                wire.close()
            tell("done")

        with child(work) as liar:
            assert liar.heard(60) == "done"
            assert served(daemon) < 1.0
            audit(daemon)
        empty(daemon)
        assert any(event["event"] == "peer_fault" for event in events(daemon))


def test_lie_is_answered_by_its_name() -> None:
    """Who lies hears it: BAD_REQUEST with what was wrong, and then the end."""
    with running() as daemon, Wire(daemon.socket) as wire:
        wire.hello()
        wire.call(Allocate, wire.namespace, 1, tokens(20))
        wire.step(1, 2)
        error = wire.call(Free, 1, 1)
        assert isinstance(error, Error)
        assert error.code == errors.BadRequest.code
        assert "1/2" in error.message
        assert wire.closed()
        wire.welcome = None


def test_the_daemons_half_of_the_page_is_a_hint() -> None:
    """Whoever scribbles over it misleads only itself."""
    with running() as daemon, Wire(daemon.socket) as wire:
        usable = wire.hello().pool.usable
        assert wire.page is not None
        wire.call(Allocate, wire.namespace, 1, tokens(usable))
        later = wire.call(Allocate, wire.namespace, 2, tokens(usable, 5000))
        assert isinstance(later, Later)
        wire.page.words[PUSHES] = 2**64 - 1
        wire.page.words[WAKE] = 2**64 - 1
        wire.call(Free, 1)
        assert wire.push(Ready).ticket == later.ticket
        words = wire.page.words
        until(lambda: words[PUSHES] == 0, 5.0, "counts on")


def test_bell_that_never_stops_or_has_been_made_to_wait() -> None:
    """A client that rings all the time, and one that reads the bell away under the daemon: nobody else waits."""
    with running() as daemon:

        def ring(tell: Callable[[Any], None]) -> None:
            wire = Wire(daemon.socket)
            wire.hello("rings")
            bell = wire.descriptors[2]
            os.set_blocking(bell, True)  # shared with the daemon
            tell("rings")
            while True:
                os.eventfd_write(bell, 1)
                if select.select([bell], [], [], 0)[0] and random.random() < 0.5:
                    os.eventfd_read(bell)

        with child(ring) as one, child(ring) as two:
            assert (one.heard(), two.heard()) == ("rings", "rings")
            assert served(daemon, times=300) < 1.0
            one.kill()
            two.kill()
        empty(daemon)


def test_descriptors_sent_to_the_daemon_are_not_kept() -> None:
    """Who passes descriptors along with its bytes fills nobody's table but its own."""
    with running() as daemon:
        with Wire(daemon.socket) as wire:
            wire.hello()
            before = daemon.descriptors()
            read, write = os.pipe()
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [read, write] * 100))]
            for number in range(50):
                wire.sock.sendmsg([encode(Ping(number + 1000))], rights)
                assert isinstance(wire.reply(), Pong)
            assert daemon.descriptors() == before
            os.close(read)
            os.close(write)
        empty(daemon)


def test_urgent_byte_does_not_spin() -> None:
    """Out-of-band data, where the kernel has it for Unix sockets, costs no processor time, and no connection."""
    with running() as daemon, Wire(daemon.socket) as wire:
        wire.hello(map=False)
        try:
            wire.sock.send(b"x", socket.MSG_OOB)
        except OSError:
            pytest.skip("no urgent data for Unix sockets here")
        before = cpu_seconds(daemon.pid)
        time.sleep(1.0)
        assert cpu_seconds(daemon.pid) - before < 0.5
        assert served(daemon, times=5) < 1.0


def test_sessions_left_open_by_a_living_process_have_an_end() -> None:
    """A process that loses its sessions' connections hears BUSY at a bound of its own, others are served meanwhile."""
    with running(sessions_max=40) as daemon:

        def leak(tell: Callable[[Any], None]) -> None:
            for _ in range(5):
                wire = Wire(daemon.socket)
                wire.hello("leaks")
                wire.sock.close()
            wire = Wire(daemon.socket)
            tell(wire.call(messages.Hello, 1, "more").code)

        before = daemon.descriptors()
        with child(leak) as leaker:
            assert leaker.heard() == errors.Busy.code
            assert daemon.descriptors() <= before + 4 * 5 + 1
            assert served(daemon, times=5) < 1.0
            leaker.kill()
        empty(daemon)
        until(lambda: daemon.descriptors() == before, 5.0, "descriptors are left")
        assert served(daemon, times=5) < 1.0
