"""Planner, link and worker against a real daemon, with an engine that looks at every byte it reads."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvslot.api.client import Client, Control, Namespace
from kvslot.api.wire import Disconnected
from kvslot.engines.vllm import link
from kvslot.engines.vllm import planner as planner_module
from kvslot.engines.vllm.blocks import EngineBlocks
from kvslot.engines.vllm.link import Unfit
from kvslot.engines.vllm.messages import Orders, Report
from kvslot.engines.vllm.worker import Job, Worker

from ...tools.daemon import Running, running
from .mini import DIRECTORY, POOL, SIZE, Mini, Request


@pytest.fixture
def daemon() -> Iterator[Running]:
    """A daemon with a small pool of whole blocks, audited at the end."""
    with running(pools=[POOL]) as daemon:
        yield daemon
        audit(daemon)


def audit(daemon: Running, **gauges: int) -> None:
    """The pool is sound, and its gauges are these."""
    deadline = time.monotonic() + 10
    with Control(str(daemon.socket)) as control:
        assert control.audit().faults == []
        while True:
            (row,) = control.inspect("pools")
            if all(row[name] == value for name, value in gauges.items()):
                return
            assert time.monotonic() < deadline, (row, gauges)
            time.sleep(0.01)


class Held(Worker):
    """A worker whose loads wait, and fail, as a test says."""

    def __init__(self, engine: EngineBlocks, *, asynchronous: bool = True) -> None:
        super().__init__(engine, asynchronous=asynchronous)
        self.go = threading.Event()
        self.fail = False

    def _load(self, job: Job) -> bool:
        self.go.wait(20)
        return super()._load(job) and not self.fail


PROMPT = list(range(100, 127))  # 27 tokens: 6 whole blocks, and 3 tokens


@pytest.mark.parametrize("asynchronous", [True, False])
def test_one_engine_reads_what_another_computed(daemon: Running, asynchronous: bool) -> None:
    """A second engine with empty blocks finds the prompt, and the output, of the first; both read right bytes."""
    with (
        closing(Mini(str(daemon.socket), asynchronous=asynchronous)) as first,
        closing(Mini(str(daemon.socket), asynchronous=asynchronous)) as second,
    ):
        assert first.run("a", PROMPT, [7, 8, 9, 10, 11]).cached == 0
        audit(daemon, cached=32)  # published is heard of on another connection
        assert second.run("a", PROMPT).cached == 24
        assert second.run("b", [*PROMPT, 7, 8, 9, 10, 11, 12]).cached == 32, "output blocks are found, too"
        assert second.run("c", [*PROMPT[:17], *range(50)]).cached == 16
        statistics = second.planner.statistics()
        assert (statistics.requests, statistics.hit_tokens) == (3, 72)
        assert statistics.loaded_tokens == 72
    audit(daemon, cached=32 + 48, sequences=0)


@pytest.mark.parametrize("length", [1, 2, SIZE, SIZE + 1, 2 * SIZE, 2 * SIZE + 1, 31, 32, 33])
def test_one_token_is_left_to_compute(daemon: Running, length: int) -> None:
    """S15: of n cached tokens at most the whole blocks of n-1 are used, and running it again adds nothing."""
    with closing(Mini(str(daemon.socket))) as engine:
        prompt = list(range(length))
        engine.run("a", prompt)
        for _ in range(3):
            assert engine.run("b", prompt).cached == (length - 1) // SIZE * SIZE
    audit(daemon, cached=length // SIZE * SIZE)


def test_a_prompt_that_vllm_has_itself_is_stored_and_not_loaded(daemon: Running) -> None:
    """Blocks that the engine's own cache has, and the pool lacks, are stored with the step that computes the rest."""
    with closing(Mini(str(daemon.socket))) as engine, closing(Mini(str(daemon.socket))) as other:
        donor = Request("donor", list(PROMPT))  # of whom the planner never hears
        engine.take(donor, 27)
        engine.forward(donor, 27, set())
        request = Request("a", list(PROMPT), blocks=donor.blocks[:4])
        assert engine.admit(request, local=16) == 0
        engine.step({request: 11})
        audit(daemon, cached=24)
        assert other.run("b", PROMPT).cached == 24
        engine.planner.finished(request)
        assert engine.planner.statistics().loaded_tokens == 0


def test_preempted_requests_resume_from_the_pool(daemon: Running) -> None:
    """What a request stored before vLLM preempted it is loaded when it resumes, its output included."""
    with closing(Mini(str(daemon.socket))) as engine:
        request = Request("a", list(PROMPT))
        engine.admit(request)
        engine.step({request: 27})
        for token in range(6):
            request.all_token_ids.append(token)
            engine.take(request, request.num_tokens)
            engine.step({request: 1})
        engine.free += request.blocks  # preempted
        request.blocks, request.num_computed_tokens = [], 0
        assert engine.admit(request) == 32
        engine.loaded(request)
        engine.step({request: 1})
        engine.finish(request)
    audit(daemon, cached=32, sequences=0)


def test_a_failed_load_is_computed_instead(daemon: Running) -> None:
    """Nothing of a failed load is used or published, the request is computed, and others load again soon."""
    with closing(Mini(str(daemon.socket), worker=Held)) as engine:
        worker = engine.worker
        assert isinstance(worker, Held)
        worker.go.set()
        engine.run("a", PROMPT)
        worker.fail = True
        request = Request("b", list(PROMPT))
        assert engine.admit(request) == 24
        engine.loaded(request)
        assert request.failed
        assert request.num_computed_tokens == 0
        assert engine.planner.matched(request, 0) == 0, "not promised again"
        engine.step({request: 27})
        engine.finish(request)
        worker.fail = False
        deadline = time.monotonic() + 5
        while engine.run(f"c{time.monotonic()}", PROMPT).cached == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert engine.planner.statistics().load_failures == 1
    audit(daemon, cached=24, sequences=0)


def test_failed_loads_before_the_forward_are_not_stored(daemon: Running) -> None:
    """With load = "sync", what a step computed on blocks that were not loaded is neither stored nor published."""
    with closing(Mini(str(daemon.socket), asynchronous=False, worker=_failing)) as engine:
        engine.run("a", PROMPT[:17])
        request = Request("b", list(PROMPT))
        assert engine.admit(request) == 16
        engine.step({request: 11})
        assert request.failed
        assert engine.planner.statistics().stored_tokens == 16
        engine.step({request: 27})
        engine.finish(request)
        assert engine.planner.statistics().stored_tokens == 16
    audit(daemon, cached=16, sequences=0)


@pytest.mark.parametrize("pool", [POOL, DIRECTORY], ids=["copy", "region"])
def test_a_store_behind_one_that_was_dropped_is_not_published(pool: dict[str, object]) -> None:
    """Two steps are ordered before the first is reported, and its store was not made: what a pool block held before
    is not found under the second's tokens."""
    region = pool is DIRECTORY
    with running(pools=[pool]) as daemon:
        with (
            closing(Mini(str(daemon.socket), region=region)) as engine,
            closing(Mini(str(daemon.socket), region=region)) as other,
        ):
            request = Request("a", list(PROMPT))
            engine.admit(request)
            orders = [engine.order({request: 12})]
            engine.forward(request, 12, set())
            orders.append(engine.order({request: 12}))
            assert [(each.first, each.end) for order in orders for each in order.stores] == [(0, 3), (3, 6)]
            engine.planner.report(Report(dropped=[orders[0].stores[0].entry]))
            engine.carry_out(orders[1], {request: 12})
            engine.finish(request)
            assert engine.planner.statistics().stored_tokens == 0
            assert other.run("b", PROMPT).cached == 0
            audit(daemon, cached=24)
            assert engine.run("c", PROMPT).cached == 24, (
                "another request stores them, and nothing is in its way"
            )
        audit(daemon, sequences=0)


def test_only_what_follows_is_published(daemon: Running) -> None:
    """A report of blocks that lie behind others of which nothing was said publishes nothing."""
    with closing(Mini(str(daemon.socket))) as engine:
        request = Request("a", list(PROMPT))
        engine.admit(request)
        orders = engine.order({request: 24})
        engine.planner.report(Report(stored=[(orders.stores[0].entry, 3, 6)]))
        engine.finish(request)
        assert engine.planner.statistics().stored_tokens == 0
        assert engine.planner.matched(Request("b", list(PROMPT)), 0) == 0


def test_what_was_ordered_before_a_failed_load_was_known_is_not_published(daemon: Running) -> None:
    """A step computes on blocks that were not loaded, and another is ordered before that is told: neither the
    request's own blocks, nor those of one that vLLM gave the same blocks, are published; later ones are."""
    with closing(Mini(str(daemon.socket), asynchronous=False, worker=_failing)) as engine:
        engine.run("a", PROMPT[:17])
        request = Request("b", list(PROMPT))
        assert engine.admit(request) == 16
        sharing = Request("c", [*PROMPT[:16], *range(20)])
        engine.take(sharing, 36)
        engine.planner.matched(sharing, 16)
        sharing.num_computed_tokens = 16
        first = engine.order({request: 3})
        engine.worker.begin(first)
        request.num_computed_tokens += 3
        second = engine.order({request: 5, sharing: 16})
        assert len(second.stores) == 2
        engine.worker.end(first)
        told = engine.worker.report()
        assert told is not None
        engine.planner.report(told)
        engine.worker.begin(second)
        engine.worker.end(second)
        told = engine.worker.report()
        assert told is not None
        assert len(told.stored) == 2, "the worker knows nothing of the step before"
        engine.planner.report(told)
        assert engine.planner.statistics().stored_tokens == 16
        late = Request("d", [*PROMPT[:16], *range(50, 70)])
        engine.planner.matched(late, 16)
        late.num_computed_tokens = 16
        engine.take(late, 36)
        assert not engine.order({late: 16}).stores, "it may read what the first has not computed yet"
        for each in (request, sharing, late):
            engine.planner.finished(each)
        engine.run("e", list(range(300, 317)))
        assert engine.planner.statistics().stored_tokens == 32
    audit(daemon, cached=32, sequences=0)


def test_a_session_lost_under_such_a_load_is_no_way_around(daemon: Running) -> None:
    """The request that computes the blocks anew is remembered over the loss, until it ends and no longer."""
    now = [0.0]
    mini = Mini(str(daemon.socket), asynchronous=False, worker=_failing, clock=lambda: now[0])
    with closing(mini) as engine:
        engine.run("a", PROMPT[:17])
        request = Request("b", list(PROMPT))
        assert engine.admit(request) == 16
        orders = engine.order({request: 3})
        engine.planner._lost(Disconnected("cut by the test"))
        now[0] += 100
        _connect(engine)
        engine.carry_out(orders, {request: 3})
        assert request.failed
        engine.run("c", [*PROMPT[:16], *range(20)])
        assert engine.planner.statistics().stored_tokens == 16
        engine.finish(request)
        now[0] += 100
        engine.run("d", list(range(300, 317)))
        assert engine.planner.statistics().stored_tokens == 32


def _failing(engine: EngineBlocks) -> Worker:
    class Failing(Worker):
        def _load(self, job: Job) -> bool:
            return False

    return Failing(engine, asynchronous=False)


def test_found_and_then_evicted(daemon: Running) -> None:
    """S05: what a waiting request was told of is leased: it is there when the request gets its blocks."""
    with closing(Mini(str(daemon.socket))) as engine:
        engine.run("a", PROMPT)
        request = Request("b", list(PROMPT))
        assert engine.planner.matched(request, 0) == 24
        with Control(str(daemon.socket)) as control:
            assert control.evict(1000) == 0
        for number in range(12):
            engine.run(f"c{number}", [number] * 30)
        assert engine.admit(request) == 24
        engine.loaded(request)
        engine.step({request: 3})
        engine.finish(request)


@pytest.mark.parametrize("outcome", ["done", "failed", "twice"])
def test_aborted_during_a_load(daemon: Running, outcome: str) -> None:
    """S01: slots stay leased while a copy reads them, are freed once when it ends, and a late report does no harm."""
    with closing(Mini(str(daemon.socket), worker=Held)) as engine:
        worker = engine.worker
        assert isinstance(worker, Held)
        worker.go.set()
        engine.run("a", PROMPT)
        worker.go.clear()
        worker.fail = outcome == "failed"
        request = Request("b", list(PROMPT))
        assert engine.admit(request) == 24
        orders = engine.step()
        entry = orders.loads[0].entry
        engine.finish(request)
        audit(daemon, sequences=1, leased=24)
        with Control(str(daemon.socket)) as control:
            assert control.evict(1000) == 0, "what is being read is not evicted"
        worker.go.set()
        while engine.held:
            engine.step()
        if outcome == "twice":
            report = engine.worker._report
            report.loaded.append(entry)
            report.stored.append((entry, 0, 3))
            engine.step()
            assert engine.planner.statistics().late == 2
        engine.step()
        audit(daemon, sequences=0, leased=0)
        assert engine.planner.statistics().load_failures == 0, (
            "a copy that nobody wants any more is no failure"
        )
        worker.fail = False
        assert engine.run("b", PROMPT).cached == 24


def test_a_full_pool_holds_nobody_up(daemon: Running) -> None:
    """S17: Later and Never: the request is computed, may read what is cached, stores nothing, and leaks nothing."""
    with closing(Mini(str(daemon.socket), blocks=300)) as engine:
        engine.run("a", PROMPT)
        with Client(str(daemon.socket), page=SIZE) as hog:
            taken = [
                hog.admit([number] * 32, namespace=Namespace("hog"), timeout=5) for number in range(1, 7)
            ]
            last = hog.allocate([99] * 20, namespace=Namespace("hog"))
            assert engine.run("b", [*PROMPT, *range(20)]).cached == 24
            assert engine.planner.statistics().refused >= 1
            request = Request("never", list(range(1000)))
            assert engine.planner.matched(request, 0) == 0
            engine.planner.finished(request)
            engine.step()
            for each in [*taken, last]:
                getattr(each, "free", lambda: None)()
        time.sleep(0.15)
        assert engine.run("c", list(range(200, 240))).cached == 0
        assert engine.run("c", list(range(200, 240))).cached == 36
    audit(daemon, sequences=0, leased=0, tickets=0)


def test_a_preempted_sequence_is_given_back(daemon: Running) -> None:
    """When the daemon asks for a sequence, the planner frees it at once and the request goes on without."""
    with closing(Mini(str(daemon.socket))) as engine:
        request = Request("a", list(PROMPT))
        engine.admit(request)
        engine.step({request: 27})
        entry = next(iter(engine.planner._numbers.values()))
        engine.planner._give_back(entry)
        request.all_token_ids.append(1)
        engine.take(request, 28)
        engine.step({request: 1})
        audit(daemon, sequences=0, cached=24)
        engine.finish(request)


def test_requests_that_may_not_share_go_without(daemon: Running) -> None:
    """A request whose namespace is a reason is computed, and the daemon hears nothing of it."""
    with closing(Mini(str(daemon.socket))) as engine:
        assert engine.run("a", PROMPT, namespace="they have images").cached == 0
        assert engine.run("b", PROMPT).cached == 0
        assert engine.planner.statistics().bypassed == 1


def test_namespaces_do_not_mix(daemon: Running) -> None:
    """S44: adapter and salt are parts of their own: of 8 ways to fill them, each hits only itself."""
    spaces = [
        Namespace("t", "m", adapter, salt)
        for adapter, salt in (
            ("X", ""), ("", "X"), ("X", "X"), ("ab", "c"), ("a", "bc"), ("", "x"), ("x", ""), ("", ""),
        )
    ]  # fmt: skip
    with closing(Mini(str(daemon.socket), blocks=200)) as engine:
        prompt = list(range(9))
        for each in spaces:
            assert engine.run("a", prompt, namespace=each).cached == 0
        for each in spaces:
            assert engine.run("b", prompt, namespace=each).cached == 8
        assert engine.run("c", prompt, namespace=Namespace("u", "m")).cached == 0
        assert engine.run("c", prompt, namespace=Namespace("t", "n")).cached == 0


def test_after_a_reset_nothing_of_before_is_published(daemon: Running) -> None:
    """When vLLM's weights change under running requests, what they computed before is no longer stored or loaded."""
    with closing(Mini(str(daemon.socket))) as engine:
        request = Request("a", list(PROMPT))
        engine.admit(request)
        engine.step({request: 9})
        engine.planner.reset()
        engine.step({request: 18})
        engine.finish(request)
    audit(daemon, cached=8, sequences=0)


@pytest.mark.parametrize("when", ["queued", "running", "made", "reported", "lost", "sync"])
def test_a_reset_during_a_load_fails_it(daemon: Running, when: str) -> None:
    """Weights change while blocks of the old ones are loaded: however far the load is, vLLM hears that it failed,
    computes them, and keeps none of what was loaded; nothing of it is stored."""
    asynchronous = when != "sync"
    held = functools.partial(Held, asynchronous=asynchronous)
    with closing(Mini(str(daemon.socket), worker=held, asynchronous=asynchronous)) as engine:
        worker = engine.worker
        assert isinstance(worker, Held)
        worker.go.set()
        engine.run("a", PROMPT)
        worker.go.clear()
        request = Request("b", list(PROMPT))
        assert engine.admit(request) == 24
        if when in ("running", "made", "reported", "lost"):
            engine.step()
            assert request.request_id in engine.waiting
        if when in ("made", "reported"):
            worker.go.set()
            with worker._changed:
                assert worker._changed.wait_for(lambda: not worker._running, timeout=20)
        if (
            when == "reported"
        ):  # and ended between vLLM's two questions: only the scheduler's side knows of it
            report = worker.report()
            assert report is not None
            assert report.loaded
            engine.planner.report(report)
        if when == "lost":
            engine.planner._lost(Disconnected("cut by the test"))
        engine.planner.reset()
        if when != "sync":
            engine.step()
            worker.go.set()
            engine.loaded(request)
        else:
            worker.go.set()
            engine.step({request: 3})
        assert request.failed
        assert request.num_computed_tokens == 0
        assert engine.planner.matched(request, 0) == 0
        engine.step({request: 27})
        engine.finish(request)
        assert engine.planner.statistics().stored_tokens == 24


def test_without_a_daemon_and_with_one_again(tmp_path: Path) -> None:
    """S41: no daemon, one that comes, one that is killed, and another: requests are served, and share again."""
    socket = tmp_path / "s"
    now = [0.0]
    with closing(Mini(str(socket), clock=lambda: now[0])) as engine:
        assert engine.run("a", PROMPT).cached == 0
        for _ in range(2):
            with running(pools=[POOL], socket=socket, code=None) as daemon:
                now[0] += 100
                _connect(engine)
                assert engine.run("b", PROMPT).cached == 0
                assert engine.run("c", PROMPT).cached == 24
                request = Request("d", [*PROMPT, *range(8)])
                assert engine.admit(request) == 24
                engine.loaded(request)
                daemon.process.kill()
                daemon.process.wait()
                engine.step({request: 11})  # what this asks for and says goes nowhere
                assert engine.run("e", PROMPT).cached == 0
                engine.finish(request)
                assert engine.run("f", PROMPT).cached == 0
            socket.unlink(missing_ok=True)
        assert engine.planner.statistics().losses == 2
        attempts = engine.link.attempts
        for _ in range(50):
            now[0] += 0.1
            engine.step()
            time.sleep(0.001)
        assert engine.link.attempts - attempts <= 5, "it tries less and less often"


def _connect(engine: Mini) -> None:
    deadline = time.monotonic() + 10
    while engine.link.client is None:
        assert time.monotonic() < deadline
        engine.step()
        time.sleep(0.005)


def test_a_cut_connection_leaves_nothing_behind(daemon: Running) -> None:
    """The daemon lives and the connection does not: the new session releases what the lost one held."""
    now = [0.0]
    with closing(Mini(str(daemon.socket), worker=Held, clock=lambda: now[0])) as engine:
        worker = engine.worker
        assert isinstance(worker, Held)
        worker.go.set()
        engine.run("a", PROMPT)
        worker.go.clear()
        request = Request("b", list(PROMPT))
        assert engine.admit(request) == 24
        engine.step()
        client = engine.link.client
        assert client is not None
        client._connection.lost("cut by the test")
        del client
        other = Request("c", list(PROMPT))
        assert engine.planner.matched(other, 0) == 0
        now[0] += 100
        _connect(engine)
        audit(daemon, sessions=2, leased=24)  # the lost one's lease holds while the load reads
        worker.go.set()
        engine.loaded(request)
        assert not request.failed
        engine.step({request: 3})
        engine.finish(request)
        engine.step()
        audit(daemon, sessions=1, sequences=0, quarantined=0, leased=0)
        assert engine.run("d", PROMPT).cached == 24


def test_a_pool_of_another_shape_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unfit: said once, looked at again every half minute, and used when the daemon is back with the right one."""
    socket = tmp_path / "s"
    now = [0.0]

    def check(client: Client) -> None:
        if client.pool.description.blocks != POOL["blocks"]:
            raise Unfit("it has another size")

    def steps(engine: Mini, seconds: int) -> None:
        for _ in range(seconds):
            now[0] += 1
            for _ in range(100):
                engine.step()
                if engine.link._thread is None:
                    break
                time.sleep(0.005)

    with ExitStack() as stack:
        with running(pools=[{**POOL, "blocks": 33}], socket=socket, code=None) as daemon:
            engine = stack.enter_context(closing(Mini(str(socket), check=check, clock=lambda: now[0])))
            assert engine.run("a", PROMPT).cached == 0
            assert (engine.link.attempts, engine.link.unfit) == (1, "it has another size")
            steps(engine, 29)
            assert engine.link.attempts == 1
            steps(engine, 61)
            assert 3 <= engine.link.attempts <= 4
            audit(daemon, sessions=0)
            daemon.process.kill()
            daemon.process.wait()
        socket.unlink(missing_ok=True)
        with running(pools=[POOL], socket=socket):
            steps(engine, 31)
            assert engine.link.unfit == ""
            engine.run("b", PROMPT)
            assert engine.run("c", PROMPT).cached == 24
            stack.close()
    assert len([each for each in caplog.records if "another size" in each.getMessage()]) == 1


@pytest.mark.parametrize("joined", [False, True], ids=["the scheduler's", "its own"])
def test_memory_that_is_still_in_view_is_let_go_later(daemon: Running, joined: bool) -> None:
    """After a loss the worker's memory cannot be unmapped while an array on it lives: its session is not called ended
    until then, and is then."""
    now = [0.0]
    with closing(Mini(str(daemon.socket), clock=lambda: now[0])) as engine:
        session = engine.link.session
        assert session is not None
        client = link.local[session.token]
        if joined:
            link.local.pop(session.token)
        engine.run("a", PROMPT)
        view = engine.worker._mappings[1].pool
        assert view is not None
        assert (engine.worker._mappings[1].client is not None) == joined
        request = Request("b", list(PROMPT))
        assert engine.planner.matched(request, 0) == 24
        client._connection.lost("cut by the test")
        del client
        engine.planner._lost(Disconnected("cut by the test"))
        now[0] += 100
        _connect(engine)
        for _ in range(3):
            now[0] += 2
            engine.step()
        assert 1 in engine.link._old
        audit(daemon, leased=24)
        del view
        now[0] += 2
        engine.step()
        engine.step()
        assert not engine.link._old
        audit(daemon, leased=0, sequences=0, quarantined=0)
        engine.planner.finished(request)
        assert engine.run("c", PROMPT).cached == 24


def test_old_memory_goes_though_the_new_cannot_be_had_yet(daemon: Running) -> None:
    """A worker that cannot join the present session lets go of an earlier one's memory all the same."""
    with closing(Mini(str(daemon.socket))) as engine:
        engine.run("a", PROMPT)
        session = engine.link.session
        assert session is not None
        token = dataclasses.replace(session.token, session=session.token.session + 1)
        absent = dataclasses.replace(session, generation=2, socket="/nowhere", token=token)
        report: Report | None = None
        for _ in range(1000):  # what prepares its pages ends first
            engine.worker.begin(Orders(absent))
            report = engine.worker.report()
            if report is not None:
                break
            time.sleep(0.005)
        assert report is not None
        assert report.closed == [1]


def test_waiting_costs_next_to_nothing(daemon: Running) -> None:
    """vLLM polls while a load is under way: thousands of steps, no frame to the daemon, microseconds each."""
    with closing(Mini(str(daemon.socket), worker=Held)) as engine:
        assert isinstance(engine.worker, Held)
        engine.worker.go.set()
        engine.run("a", PROMPT)
        engine.worker.go.clear()
        request = Request("b", list(PROMPT))
        engine.admit(request)
        engine.step()
        client = engine.link.client
        assert client is not None
        before = client.statistics().frames_sent
        start = time.perf_counter()
        for _ in range(2000):
            engine.planner.step({}, {}, lambda name: ())
            engine.planner.matched(request, 0)
        each = (time.perf_counter() - start) / 2000
        assert client.statistics().frames_sent == before
        assert each < 100e-6, "some 3 us, and a look at the socket every 20 ms"
        del client
        engine.worker.go.set()
        engine.loaded(request)
        engine.finish(request)


def test_frames_are_few(daemon: Running) -> None:
    """A request costs two frames for its prompt and its end, and at most one for each block that decoding fills."""
    with closing(Mini(str(daemon.socket))) as engine:
        engine.run("warm", [1] * 9)
        client = engine.link.client
        assert client is not None
        before = client.statistics()
        engine.run("a", PROMPT, list(range(32)), chunk=27)
        after = client.statistics()
        assert after.calls - before.calls == 1, "Allocate, and nothing that waits"
        assert after.frames_sent - before.frames_sent <= 3 + 2 * 8
        del client


KILLED = """
import sys
sys.path.insert(0, {root!r})
from tests.engines.vllm.mini import Mini, Request
from kvslot.engines.vllm.worker import Worker
import numpy as np, os, signal

class Dying(Worker):
    def _store(self, store, pool):
        if {where!r} == "during":
            half = len(store.pool) // 2
            self._engine.store(pool, store.pool[:half], [table[:half] for table in store.engine])
            os.kill(os.getpid(), signal.SIGKILL)
        good = super()._store(store, pool)
        if {where!r} == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return good

engine = Mini({socket!r}, worker=Dying)
request = Request("a", list(range(100, 127)))
engine.admit(request)
if {where!r} == "before":
    os.kill(os.getpid(), signal.SIGKILL)
engine.step({{request: 27}})
"""


@pytest.mark.parametrize("where", ["before", "during", "after"])
def test_killed_in_mid_store(daemon: Running, where: str) -> None:
    """S31: nothing of an engine that was killed while it stored is ever found, and its prompt can be stored anew."""
    root = str(Path(__file__).resolve().parents[3])
    code = KILLED.format(root=root, where=where, socket=str(daemon.socket))
    done = subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ}, timeout=60)
    assert done.returncode == -9
    audit(daemon, sequences=0, quarantined=0, private=0, cached=0)
    with closing(Mini(str(daemon.socket))) as engine:
        assert engine.run("b", PROMPT).cached == 0
        assert engine.run("c", PROMPT).cached == 24


LIVING = """
import random, sys
sys.path.insert(0, {root!r})
from tests.engines.vllm.mini import Mini
numbers = random.Random({seed})
heads = [[100 * each + i for i in range(20)] for each in range(4)]
engine = Mini({socket!r})
print("ready", flush=True)
while True:
    prompt = [*numbers.choice(heads)[:numbers.randrange(4, 21)], *(numbers.randrange(9) for _ in range(5))]
    engine.run("a", prompt, [1, 2, 3, 4], chunk=numbers.randrange(1, 30))
"""


def test_killed_at_any_moment(daemon: Running) -> None:
    """Engines that live on the same prompts as this one and are killed with -9: it reads right bytes, nothing is lost.

    Ten of them, or as many as $KVSLOT_KILLS says.
    """
    root = str(Path(__file__).resolve().parents[3])
    numbers = random.Random(7)
    heads = [[100 * each + i for i in range(20)] for each in range(4)]
    hits = 0
    with closing(Mini(str(daemon.socket))) as engine:
        for seed in range(int(os.environ.get("KVSLOT_KILLS", "10"))):
            code = LIVING.format(root=root, seed=seed, socket=str(daemon.socket))
            with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
                assert child.stdout is not None
                assert child.stdout.readline() == b"ready\n"
                end = time.monotonic() + numbers.uniform(0.0, 0.1)
                while time.monotonic() < end:
                    prompt = [*numbers.choice(heads), *(numbers.randrange(9) for _ in range(5))]
                    hits += engine.run("a", prompt, chunk=numbers.randrange(1, 30)).cached
                child.kill()
            hits += engine.run("a", [*numbers.choice(heads), 1]).cached
            if seed % 10 == 9:
                audit(daemon, sessions=1, quarantined=0, sequences=0)
        assert hits
    audit(daemon, sessions=0, sequences=0, quarantined=0, private=0)


def test_refusals_are_told_once(daemon: Running, caplog: pytest.LogCaptureFixture) -> None:
    """S65: a thousand requests of one kind make one line."""
    with caplog.at_level("INFO", logger=planner_module.log.name), closing(Mini(str(daemon.socket))) as engine:
        for number in range(50):
            engine.run(f"{number}", [1], namespace="they have images")
        assert len([each for each in caplog.records if "images" in each.getMessage()]) == 1
