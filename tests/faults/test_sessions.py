"""Sessions as processes: return after a lost connection, forks, groups, one prompt at once, growth (S11, S33)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from kvslot.api.wire import errors, messages
from kvslot.api.wire.messages import (
    Admitted,
    Allocate,
    Commit,
    Done,
    Error,
    Extend,
    Free,
    Grown,
    Hello,
    Later,
    Namespace,
    Never,
    Ping,
    Pong,
    Preempt,
    Pressure,
    Probe,
    Ready,
    Release,
)

from ..tools.daemon import running
from ..tools.wire import Wire, tokens
from .actors import Paint, audit, child, empty, rows, stay, until


def test_session_returns_after_its_connection_was_lost() -> None:
    """Its process comes back with number and secret and finds sequences, memory and steps as they were."""
    with running() as daemon, Wire(daemon.socket) as other:
        other.hello("other", namespace=Namespace(tenant="other"))

        def work(tell: Callable[[Any], None]) -> None:
            wire = Wire(daemon.socket)
            welcome = wire.hello("returns")
            paint = Paint(wire, "returns")
            prompt = tokens(500)
            admitted = wire.call(Allocate, wire.namespace, 7, prompt)
            paint.write(prompt, admitted.extents)
            wire.step(2, 1)
            wire.sock.close()
            tell("lost")
            signal.sigtimedwait([signal.SIGUSR1], 20)
            for secret, number in (
                (b"x" * 16, welcome.session),
                (welcome.secret, welcome.session + 1),
                (b"", 1),
            ):
                stranger = Wire(daemon.socket)
                stale = stranger.call(Hello, 1, "returns", resume=number, secret=secret)
                assert stale.code == errors.StaleSession.code, stale
                stranger.close()
            again = Wire(daemon.socket)
            back = again.hello("returns", resume=welcome.session, secret=welcome.secret, boot=welcome.boot)
            assert (back.session, back.boot, back.namespace) == (
                welcome.session,
                welcome.boot,
                welcome.namespace,
            )
            assert again.page is not None
            assert list(again.page.words[:2]) == [2, 1], "the page is the same memory"
            grown = again.call(Extend, 7, tokens=16)
            assert isinstance(grown, Grown)
            assert not paint.wrong(prompt, admitted.extents)
            again.call(Commit, 7, 500)
            assert isinstance(again.call(Free, 7, 2), Done)
            again.step(2, 2)
            tell([welcome.session, welcome.secret.hex()])
            stay()

        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        try:
            with child(work) as one:
                assert one.heard() == "lost"
                until(lambda: any(row["state"] == "lost" for row in rows(other, "sessions")), 5.0, "not lost")
                # What it holds is nobody's meanwhile.
                later = other.call(Allocate, other.namespace, 1, tokens(800, 9000))
                assert isinstance(later, Later)
                one.signal(signal.SIGUSR1)
                session, secret = one.heard()
                assert other.push(Ready).ticket == later.ticket
                assert isinstance(
                    other.call(Allocate, other.namespace, 1, tokens(800, 9000), later.ticket), Admitted
                )
                # Nobody else takes it up, not with the secret either.
                thief = Wire(daemon.socket)
                denied = thief.call(Hello, 1, "thief", resume=session, secret=bytes.fromhex(secret))
                assert denied.code == errors.Denied.code
                thief.close()
                assert isinstance(other.call(Ping), Pong)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        other.call(Free, 1)
        other.bye()
        other.welcome = None
        empty(daemon)


def test_session_that_lives_is_taken_over_by_its_own_process_only() -> None:
    """A process that knows its old connection is dead says so with the new one; the old one ends."""
    with running() as daemon, Wire(daemon.socket) as first:
        welcome = first.hello()
        first.call(Allocate, first.namespace, 1, tokens(20))

        def thief(tell: Callable[[Any], None]) -> None:
            tell(Wire(daemon.socket).call(Hello, 1, "x", resume=welcome.session, secret=welcome.secret).code)

        with child(thief) as one:
            assert one.heard() == errors.Denied.code
        assert isinstance(first.call(Ping), Pong)
        with Wire(daemon.socket) as second:
            second.hello(resume=welcome.session, secret=welcome.secret)
            assert first.closed()
            first.welcome = None
            assert isinstance(second.call(Free, 1), Done)


def test_lost_sessions_can_be_released_by_their_process() -> None:
    """The finalizer's way: another connection of the same process says that nothing of the lost one is in use."""
    with running() as daemon, Wire(daemon.socket) as wire:
        wire.hello("stays")
        lost = Wire(daemon.socket)
        welcome = lost.hello("lost")
        lost.call(Allocate, lost.namespace, 1, tokens(800))
        lost.close()
        until(lambda: any(row["state"] == "lost" for row in rows(wire, "sessions")), 5.0, "not lost")
        later = wire.call(Allocate, wire.namespace, 1, tokens(800, 5000))
        assert isinstance(later, Later)
        assert wire.call(Release, welcome.session, b"wrong").code == errors.NotFound.code
        assert wire.call(Release, welcome.session + 9, welcome.secret).code == errors.NotFound.code

        def thief(tell: Callable[[Any], None]) -> None:
            with Wire(daemon.socket) as other:
                other.hello(map=False)
                tell(other.call(Release, welcome.session, welcome.secret).code)

        with child(thief) as one:
            assert one.heard() == errors.Denied.code
        assert isinstance(wire.call(Release, welcome.session, welcome.secret), Done)
        assert wire.push(Ready).ticket == later.ticket
        assert wire.call(Release, welcome.session, welcome.secret).code == errors.NotFound.code


def test_forked_child_does_not_keep_a_dead_session() -> None:
    """A child that holds the socket open: the parent's death ends the session all the same, and frees its memory."""
    with running() as daemon, Wire(daemon.socket) as other:
        other.hello("other", namespace=Namespace(tenant="other"))

        def work(tell: Callable[[Any], None]) -> None:
            wire = Wire(daemon.socket)
            wire.hello("forks")
            wire.call(Allocate, wire.namespace, 1, tokens(800))
            if not os.fork():
                time.sleep(30)  # with all that its parent had open
                os._exit(0)
            tell("forked")
            stay()

        with child(work) as one:
            assert one.heard() == "forked"
            later = other.call(Allocate, other.namespace, 1, tokens(800, 5000))
            assert isinstance(later, Later)
            one.kill()
            assert other.push(Ready).ticket == later.ticket
            assert isinstance(
                other.call(Allocate, other.namespace, 1, tokens(800, 5000), later.ticket), Admitted
            )
        other.call(Free, 1)
        other.bye()
        other.welcome = None
        empty(daemon)


def test_process_that_has_gone_gets_no_memory() -> None:
    """A connection made by a parent that has died, and used by its child: nobody could watch whom it belongs to."""
    with running() as daemon:

        def work(tell: Callable[[Any], None]) -> None:
            read, write = os.pipe()
            if not os.fork():
                wire = Wire(daemon.socket)
                if not os.fork():
                    os.read(read, 1)
                    time.sleep(0.1)
                    denied = wire.call(Hello, 1, "orphan")
                    tell(denied.code if isinstance(denied, Error) else "welcome")
                    os._exit(0)
                os._exit(0)
            os.wait()
            os.write(write, b"x")

        with child(work) as one:
            assert one.heard() == errors.Denied.code


def test_group_ends_when_all_its_processes_have() -> None:
    """An engine of two processes: what one leaves behind is in quarantine until the other is gone, too."""
    with running() as daemon, Wire(daemon.socket) as other:
        other.hello("other", namespace=Namespace(tenant="other"))

        def scheduler(tell: Callable[[Any], None]) -> None:
            wire = Wire(daemon.socket)
            welcome = wire.hello("scheduler")
            wire.call(Allocate, wire.namespace, 1, tokens(800))
            tell([welcome.session, welcome.secret.hex()])
            stay()

        with child(scheduler) as first:
            session, secret = first.heard()

            def worker(tell: Callable[[Any], None]) -> None:
                wire = Wire(daemon.socket)
                wrong = wire.call(Hello, 1, "worker", group=session, secret=b"wrong")
                assert wrong.code == errors.NotFound.code
                wire = Wire(daemon.socket)
                wire.hello("worker", group=session, secret=bytes.fromhex(secret))
                tell("joined")
                stay()

            with child(worker) as second:
                assert second.heard() == "joined"
                later = other.call(Allocate, other.namespace, 1, tokens(800, 5000))
                assert isinstance(later, Later)
                first.kill()
                with pytest.raises(TimeoutError):
                    other.push(Ready, 0.7)
                second.kill()
                assert other.push(Ready).ticket == later.ticket
        audit(daemon)


@pytest.mark.parametrize("seed", range(3))
def test_S11_same_prompt_finished_by_several_in_one_step(seed: int) -> None:
    """First commit wins, the others keep their own copies until their Free; all read right, and one prefix is left."""
    with running(pools=[{"blocks": 129}]) as daemon, ExitStack() as stack, Wire(daemon.socket) as control:
        prompt = tokens(100, seed * 1000)

        def work(tell: Callable[[Any], None]) -> None:
            wire = Wire(daemon.socket)
            wire.hello("writer", namespace=Namespace(tenant="same"))
            paint = Paint(wire, "same")
            mine = wire.call(Allocate, wire.namespace, 1, prompt)
            assert mine.hit == 0, "nothing is shared before it is committed"
            paint.write(prompt, mine.extents)
            tell("written")
            signal.sigtimedwait([signal.SIGUSR1], 20)
            done = wire.call(Commit, 1, 100)
            assert not paint.wrong(prompt, mine.extents)
            tell([done.length, done.published, done.duplicates])
            signal.sigtimedwait([signal.SIGUSR2], 20)
            assert not paint.wrong(prompt, mine.extents), "its own place is its own until its Free"
            assert isinstance(wire.call(Free, 1), Done)
            assert wire.call(Probe, wire.namespace, prompt).hit == 99
            wire.bye()
            tell("freed")

        blocked = [signal.SIGUSR1, signal.SIGUSR2]
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            writers = [stack.enter_context(child(work)) for _ in range(4)]
            for each in writers:
                assert each.heard() == "written"
            for each in writers:
                each.signal(signal.SIGUSR1)
            results = [each.heard() for each in writers]
            assert sorted(results) == [[100, 0, 100]] * 3 + [[100, 100, 0]], results
            assert rows(control, "pools")[0]["duplicate_tokens"] == 300
            audit(daemon)
            for each in writers:
                each.signal(signal.SIGUSR2)
            for each in writers:
                assert each.heard() == "freed"
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        pool = rows(control, "pools")[0]
        assert (pool["cached"], pool["duplicate_tokens"]) == (100, 0)
        empty(daemon)


def _engine(
    daemon_socket: Any, number: int, *, want: int, together: int = 0
) -> Callable[[Callable[[Any], None]], None]:
    """Grows one sequence token by token, frees it on Preempt and begins anew, until it has grown to `want` tokens.

    With 100 tokens it first waits until `together` engines have as many, so that all are in each other's way.
    """

    def work(tell: Callable[[Any], None]) -> None:
        met = not together
        wire = Wire(daemon_socket, timeout=30.0)
        wire.hello(f"engine{number}", namespace=Namespace(tenant=f"engine{number}"))
        paint = Paint(wire, f"engine{number}")
        whole = tokens(want, number * 10_000)
        preempted = 0
        start = 20
        while True:
            extents = _admit(wire, whole[: 4 * start])
            paint.write(whole[: 4 * start], extents)
            length = start
            capacity = sum(extents[1::2])
            while length < want:
                if length >= 100 and not met:
                    met = True
                    (daemon_socket.parent / f"met{number}").touch()
                    until(lambda: len([*daemon_socket.parent.glob("met*")]) >= together, 30.0, "not all came")
                if capacity > length:
                    step = min(capacity, want)
                    paint.write(whole[: 4 * step], extents, length)
                    length = step
                    continue
                grown = wire.call(Extend, 1, written=length, tokens=16)
                if isinstance(grown, Grown):
                    extents += grown.extents
                    capacity = grown.capacity
                    continue
                assert isinstance(grown, Later), grown
                if _waits(wire, grown.ticket) is Preempt:
                    break
            else:
                assert not paint.wrong(whole, extents), f"engine {number} reads what is not its own"
                assert isinstance(wire.call(Free, 1), Done)
                wire.bye()
                tell(["finished", preempted])
                return
            preempted += 1
            assert not paint.wrong(whole[: 4 * length], extents)
            assert isinstance(wire.call(Free, 1), Done)
            wire.pushes.clear()

    return work


def _admit(wire: Wire, prompt: bytes) -> list[int]:
    ticket = 0
    while True:
        answer = wire.call(Allocate, wire.namespace, 1, prompt, ticket)
        if isinstance(answer, Admitted):
            return list(answer.extents)
        assert isinstance(answer, Later), answer
        ticket = answer.ticket
        _waits(wire, ticket)


def _waits(wire: Wire, ticket: int) -> type:
    """Until Ready for the ticket, or Preempt; Pressure has nothing to give back here.  A wait of its own has an end."""
    until_when = time.monotonic() + 0.2
    while True:
        for push in wire.pushes:
            if isinstance(push, Preempt):
                return Preempt
            if isinstance(push, Ready) and push.ticket == ticket:
                wire.pushes.remove(push)
                return Ready
        wire.pushes = [each for each in wire.pushes if not isinstance(each, (Ready, Pressure))]
        wire.sock.settimeout(max(0.001, until_when - time.monotonic()))
        try:
            wire.pushes.append(wire.receive())
        except TimeoutError:
            return Later  # asks again
        finally:
            wire.sock.settimeout(30.0)


def test_growth_deadlock_over_eight_processes() -> None:
    """Each wants to grow to half of the pool; all at once they cannot, and all of them finish."""
    with (
        running(pools=[{"blocks": 65, "reclaim_patience_ms": 20, "preempt_deadline_ms": 300}]) as daemon,
        ExitStack() as stack,
    ):
        engines = [
            stack.enter_context(child(_engine(daemon.socket, n, want=500, together=8))) for n in range(8)
        ]
        ended = [each.heard(60.0) for each in engines]
        assert [each[0] for each in ended] == ["finished"] * 8
        assert sum(each[1] for each in ended) > 0, "nobody was in anybody's way"
        empty(daemon)


def test_growth_goes_on_when_the_others_die_or_stop() -> None:
    """The oldest grows to all of the pool though its rivals do not answer to Preempt: one is stopped, one is killed."""
    with (
        running(
            stall_seconds=0.5, pools=[{"blocks": 65, "reclaim_patience_ms": 20, "preempt_deadline_ms": 100}]
        ) as daemon,
        ExitStack() as stack,
    ):
        usable = 1024

        def deaf(tell: Callable[[Any], None]) -> None:
            wire = Wire(daemon.socket)
            wire.hello("deaf", namespace=Namespace(tenant="deaf"))
            assert isinstance(wire.call(Allocate, wire.namespace, 1, tokens(300)), Admitted)
            tell("holds")
            stay()

        with Wire(daemon.socket, timeout=20.0) as wire:
            wire.hello("oldest")
            assert isinstance(wire.call(Allocate, wire.namespace, 1, tokens(100)), Admitted)
            one, two = (stack.enter_context(child(deaf)) for _ in range(2))
            assert (one.heard(), two.heard()) == ("holds", "holds")
            one.signal(signal.SIGSTOP)
            two.signal(signal.SIGSTOP)
            answer = wire.call(Extend, 1, tokens=800)
            assert isinstance(answer, Later)
            time.sleep(0.5)
            answer = wire.call(Extend, 1, tokens=800, ticket=answer.ticket)
            assert isinstance(answer, Later), "what a living process may still read is not given away"
            one.kill()
            two.kill()
            wire.push(Ready)
            assert isinstance(wire.call(Extend, 1, tokens=800, ticket=answer.ticket), Grown)
            never = wire.call(Extend, 1, tokens=usable)
            assert isinstance(never, Never)
            assert isinstance(wire.call(messages.Commit, 1, 100), messages.Committed)


def test_S33_a_large_death_is_cleaned_up_between_the_others_calls() -> None:
    """2,000 sequences of a dead session: Hello and calls meanwhile are answered, and in the end nothing is left."""
    with running(pools=[{"blocks": 8193}], slice_us=200) as daemon, Wire(daemon.socket) as other:
        other.hello("other", namespace=Namespace(tenant="other"))

        def work(tell: Callable[[Any], None]) -> None:
            wire = Wire(daemon.socket)
            wire.hello("large")
            for n in range(2000):
                wire.send(Allocate(n + 10, wire.namespace, n, tokens(20, 20 * n)))
                wire.send(Commit(n + 10, n, 20))
                assert isinstance(wire.reply(), Admitted)
                wire.reply()
            tell("holds")
            stay()

        with child(work) as large:
            assert large.heard(60) == "holds"
            large.kill()
        slowest = 0.0
        calls = 0
        while any(row["name"] == "large" for row in rows(other, "sessions")):
            began = time.monotonic()
            with Wire(daemon.socket) as new:
                new.hello("new", map=False)
            assert isinstance(other.call(Allocate, other.namespace, 1, tokens(8)), Admitted)
            other.call(Free, 1)
            slowest = max(slowest, time.monotonic() - began)
            calls += 1
            assert calls < 10_000
        assert slowest < 0.5
        audit(daemon)
