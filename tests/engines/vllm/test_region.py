"""The second form: blocks that stay where an engine computed them, and records that hold until it needs them again."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvslot.engines.vllm.blocks import EngineBlocks, Placed
from kvslot.engines.vllm.region import (
    Peers,
    Record,
    Region,
    copy,
    read_records,
    record_bytes,
    unpack,
    write_record,
)

from ...tools.daemon import Running, running
from .mini import DIRECTORY, SIZE, Mini, Request
from .test_planner import PROMPT, audit


@pytest.fixture
def daemon() -> Iterator[Running]:
    """A daemon with a directory, audited at the end."""
    with running(pools=[DIRECTORY]) as daemon:
        yield daemon
        audit(daemon, sequences=0)


def engine(blocks: int = 8, layers: int = 2, width: int = 16) -> tuple[Region, EngineBlocks]:
    region = Region(layers * blocks * width, blocks)
    start = region.memory.ctypes.data
    placed = [Placed(start + i * blocks * width, blocks, width, width) for i in range(layers)]
    blocks_ = EngineBlocks([placed], {start: region.memory})
    region.describe(blocks_)
    return region, blocks_


def test_records_are_whole_or_nothing() -> None:
    """Half a record, or one of two halves, is no record."""
    a, b = Record(b"a" * 16, 1, 2, 3, 4), Record(b"b" * 16, 5, 6, 7, 8)
    assert unpack(a.pack()) == a
    for cut in range(1, len(a.pack())):
        torn = a.pack()[:cut] + b.pack()[cut:]
        assert unpack(torn) in (None, a, b)
        assert unpack(torn) is None or torn in (a.pack(), b.pack())
    assert unpack(bytes(64)) is None
    directory = np.zeros((4, record_bytes(32)), np.uint8)
    write_record(directory, 2, a)
    assert read_records(directory, [2, 1, 2]) == [a, None, a]
    assert (record_bytes(4), record_bytes(32), record_bytes(128)) == (64, 64, 128)


def test_a_block_that_is_written_again_is_no_longer_found() -> None:
    """Its word is odd from before the write on, and never again what an older record says."""
    (one, blocks), (two, others) = engine(), engine()
    peers = Peers()
    one.memory[:] = 7
    record = one.settle(3)
    assert peers.holds(record)
    assert one.settle(3) == record, "while it stands, all its records are alike"
    assert copy(peers, [record], others, [5])
    assert bytes(others.groups[0][0].view[:, 5]) == b"\7" * 32
    assert not copy(peers, [record], others, [5], between=lambda: one.revoke(3)), "revoked during the copy"
    assert not peers.holds(record)
    assert not copy(peers, [record], others, [5])
    again = one.settle(3)
    assert again != record
    assert peers.holds(again)
    assert not copy(peers, [again, None], others, [5, 6])
    assert not copy(peers, [again, record], others, [5, 6])
    one.close()
    assert not peers.holds(again), "all its entries end with it"
    peers.close()
    two.close()
    del blocks


@pytest.mark.parametrize("forked", [False, True])
def test_a_region_that_is_let_go_ends(forked: bool) -> None:
    """Without being closed: its entries end, though vLLM's tensors still have its memory, and nothing of it stays open.
    A child that was forked and lets its copy go ends nothing."""
    region, blocks = engine()
    peers = Peers()
    record = region.settle(3)
    fd = region._fd
    kept = region.memory
    if forked:
        child = os.fork()
        if not child:
            del region
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert peers.holds(record)
        region.close()
    else:
        assert peers.holds(record)
        del region
        deadline = time.monotonic() + 10
        while peers.holds(record):
            assert time.monotonic() < deadline
            time.sleep(0.01)
            gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    kept[:] = 1
    peers.close()
    del blocks


def test_other_shapes_are_not_read() -> None:
    """A region whose blocks are cut otherwise is no source, however many bytes they have."""
    (one, _), (two, others) = engine(layers=2, width=16), engine(layers=4, width=8)
    assert others.block_bytes == 32
    peers = Peers()
    assert not copy(peers, [one.settle(1)], others, [1])
    for each in (one, two):
        each.close()
    peers.close()


def test_descriptors_of_other_files_are_not_read(tmp_path: Path) -> None:
    """A record is no way to have this process read what it should not."""
    peers = Peers()
    with (tmp_path / "file").open("wb+") as file:
        file.write(b"kvslotR1" * 10000)
        file.flush()
        assert not peers.holds(Record(b"x" * 16, os.getpid(), file.fileno(), 1, 2))
    region, _ = engine()
    assert not peers.holds(Record(b"y" * 16, os.getpid(), region._fd, 1, 2)), "another region by now"
    assert not peers.holds(Record(b"z" * 16, 2**30, 3, 1, 2)), "no such process"
    region.close()
    peers.close()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_one_engine_reads_the_memory_of_another(daemon: Running, asynchronous: bool) -> None:
    """As in the first form, and nothing was copied to store it."""
    with (
        closing(Mini(str(daemon.socket), region=True, asynchronous=asynchronous)) as first,
        closing(Mini(str(daemon.socket), region=True, asynchronous=asynchronous)) as second,
    ):
        assert first.run("a", PROMPT, [7, 8, 9, 10, 11]).cached == 0
        assert first.worker.copied_bytes == 0
        assert second.run("a", PROMPT).cached == 24
        assert second.run("b", [*PROMPT, 7, 8, 9, 10, 11, 12]).cached == 32
    audit(daemon, cached=32, sequences=0)


def test_what_the_owner_overwrote_is_computed_and_stored_again(daemon: Running) -> None:
    """Revoked records are no hits, do not keep their prefix from being stored anew, and the new ones hold."""
    with (
        closing(Mini(str(daemon.socket), region=True, blocks=12)) as first,
        closing(Mini(str(daemon.socket), region=True)) as second,
    ):
        first.run("a", PROMPT)
        first.run("b", list(range(500, 540)))  # takes the same blocks
        assert second.run("c", PROMPT).cached == 0
        assert first.run("d", PROMPT).cached == 24, "from the second's memory now"
        assert second.planner.statistics().load_failures == 0
    audit(daemon, sequences=0)


def test_overwritten_while_it_is_read(daemon: Running) -> None:
    """The reader notices after its copy, and computes."""
    with (
        closing(Mini(str(daemon.socket), region=True, blocks=12)) as first,
        closing(Mini(str(daemon.socket), region=True)) as second,
    ):
        first.run("a", PROMPT)
        request = Request("b", list(PROMPT))
        assert second.admit(request) == 24
        first.run("c", list(range(500, 540)))
        second.loaded(request)
        assert request.failed
        second.step({request: 27})
        second.finish(request)
        assert second.planner.statistics().load_failures == 1
        assert first.run("d", PROMPT).cached == 24, "what was computed instead is found"


def test_many_engines_overwriting_all_the_time(daemon: Running) -> None:
    """Three engines with few blocks and many prompts, each in a thread: every byte that is used is right."""
    numbers = random.Random(1)
    heads = [[numbers.randrange(1000) for _ in range(16)] for _ in range(6)]
    faults: list[BaseException] = []
    hits: list[int] = []

    def live(seed: int) -> None:
        mine = random.Random(seed)
        try:
            with closing(Mini(str(daemon.socket), region=True, blocks=14)) as engine:
                for i in range(60):
                    prompt = [
                        *mine.choice(heads),
                        *(mine.randrange(1000) for _ in range(mine.randrange(1, 20))),
                    ]
                    hits.append(engine.run(f"{i}", prompt, chunk=mine.randrange(1, 40)).cached)
        except BaseException as error:  # noqa: BLE001 - told below
            faults.append(error)

    threads = [threading.Thread(target=live, args=(seed,)) for seed in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120)
    assert not faults, faults
    assert any(hits)
    audit(daemon, sequences=0)


def test_preempted_requests_resume_from_what_is_left(daemon: Running) -> None:
    """A preempted request's own blocks are found while nobody has written to them, and not after."""
    with closing(Mini(str(daemon.socket), region=True, blocks=16)) as engine:
        request = Request("a", list(PROMPT))
        engine.admit(request)
        engine.step({request: 27})
        for overwritten in (False, True):
            engine.free += request.blocks
            request.blocks, request.num_computed_tokens = [], 0
            if overwritten:
                engine.run("b", list(range(700, 740)))
            else:
                engine.free = engine.free[-7:] + engine.free[:-7]  # others are handed out first
            found = engine.admit(request)
            assert found < 24 if overwritten else found == 24
            engine.loaded(request)
            while request.num_computed_tokens < 27:
                engine.step({request: 27 - request.num_computed_tokens})
        engine.finish(request)


DEAD = """
import sys
sys.path.insert(0, {root!r})
from tests.engines.vllm.mini import Mini
engine = Mini({socket!r}, region=True)
engine.run("a", list(range(100, 127)))
print("ready", flush=True)
sys.stdin.read()
"""


def test_with_the_engine_its_entries_end(daemon: Running) -> None:
    """Killed with -9: what it held is computed and stored anew by others, at once."""
    root = str(Path(__file__).resolve().parents[3])
    code = DEAD.format(root=root, socket=str(daemon.socket))
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == b"ready\n"
    with closing(Mini(str(daemon.socket), region=True)) as engine:
        assert engine.run("b", PROMPT[:17]).cached == 16
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
        with closing(Mini(str(daemon.socket), region=True)) as other:
            assert other.run("c", PROMPT).cached == 0, "what the first loaded is in no record of its own"
            assert engine.run("d", PROMPT).cached == 24
    assert SIZE == 4
