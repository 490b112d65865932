"""Pools of huge pages: made where there are enough, and a clear word with a remedy where there are not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvslot.api.client import Client
from kvslot.api.wire import messages
from kvslot.daemon.config import ConfigError, check_memory, load, pool_sum
from kvslot.daemon.device import Geometry, huge
from kvslot.daemon.device.memory import MemoryDevice, NoMemory

from ..restart.killing import kept
from ..restart.test_return import PROMPT, fill
from ..tools.daemon import running
from ..tools.wire import Wire

MIB = 1 << 20
GEOMETRY = Geometry(slots=96, slot_bytes=(16384, 16384), alignment=4096)  # 3 MiB
KERNEL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")


def kernel(folder: Path, size_kib: int, total: int, free: int, promised: int) -> Path:
    """A kernel's files that say this."""
    pages = folder / f"hugepages-{size_kib}kB"
    pages.mkdir(parents=True)
    for name, value in (("nr_hugepages", total), ("free_hugepages", free), ("resv_hugepages", promised)):
        (pages / name).write_text(f"{value}\n")
    return folder


@pytest.fixture
def pages() -> Iterator[None]:
    """Four huge pages of 2 MiB are there: some that nobody uses, or as root ones set aside for this test."""
    before, (total, free) = 0, huge.count(2 * MIB)
    if free < 4 and os.geteuid() == 0 and KERNEL.exists():
        before = total
        try:
            KERNEL.write_text(str(total + 4 - free))
        except OSError:
            pytest.skip("huge pages cannot be set aside here")
    try:
        if huge.count(2 * MIB)[1] < 4:
            pytest.skip("four free huge pages of 2 MiB are needed (vm.nr_hugepages)")
        yield
    finally:
        if free < 4 and os.geteuid() == 0 and KERNEL.exists():
            KERNEL.write_text(str(before))


def test_what_is_short_is_told_with_a_remedy(tmp_path: Path) -> None:
    """How many are wanted, free and there, and the number to write where; promised ones are not free."""
    where = kernel(tmp_path, 2048, 10, 8, 5)
    assert huge.count(2 * MIB, where) == (10, 3)
    assert huge.shortage("chat", 6 * MIB, 2 * MIB, where) == ""
    said = huge.shortage("chat", 6 * MIB + 1, 2 * MIB, where)
    assert "pool 'chat' wants 4 huge pages of 2MiB, and 3 of 10 are free: set 11 or more aside" in said
    assert f"echo 11 > {where}/hugepages-2048kB/nr_hugepages" in said
    assert 'huge_pages = "off"' in said
    assert "this kernel has none of that size" in huge.shortage("chat", 1, 1 << 30, where)


def test_a_pool_is_whole_pages() -> None:
    """The size is rounded up to whole pages, of ordinary ones not at all."""
    assert [huge.whole(size, 2 * MIB) for size in (1, 2 * MIB, 2 * MIB + 1)] == [2 * MIB, 2 * MIB, 4 * MIB]
    assert huge.whole(12345, 0) == 12345
    assert huge.flags_of(0) == 0
    assert huge.flags_of(2 * MIB) >> 26 == 21
    assert huge.flags_of(1 << 30) >> 26 == 30


def test_nothing_is_made_without_them(tmp_path: Path) -> None:
    """Without enough huge pages the device raises NoMemory with the remedy, and no descriptor is left."""
    much = Geometry(slots=1 << 20, slot_bytes=(1 << 24,))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NoMemory, match=r"wants 16384 huge pages of 1GiB"):
        MemoryDevice(much, page_bytes=1 << 30)
    assert len(os.listdir("/proc/self/fd")) == before
    file = tmp_path / "kvslot.toml"
    file.write_text(
        '[[pool]]\nname = "big"\nblocks = 9000\nopaque_block_bytes = "1GiB"\nhuge_pages = "1GiB"\n'
    )
    with pytest.raises(ConfigError, match=r"pool 'big' wants 9000 huge pages of 1GiB"):
        check_memory([pool_sum(each) for each in load(file, {}).pools])
    text = file.read_text() + '\n[[pool]]\nblocks = 9\nopaque_block_bytes = "64KiB"\n'
    file.write_text(f'socket = "{tmp_path}/s"\nlog_format = "json"\n{text}')
    ended = subprocess.run(
        [sys.executable, "-Im", "kvslot.daemon", "--config", str(file)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert "nr_hugepages" in ended.stderr
    assert not (tmp_path / "s").exists()


@pytest.mark.usefixtures("pages")
def test_a_pool_of_huge_pages_is_as_any() -> None:
    """Whole huge pages, prefaulted, written, copied and closed; mapped by an engine; in the end all are free again."""
    free = huge.count(2 * MIB)[1]
    device = MemoryDevice(GEOMETRY, page_bytes=2 * MIB)
    assert device.export().size_bytes == 4 * MIB == os.fstat(device.descriptor).st_size
    device.prefault()
    assert huge.count(2 * MIB)[1] == free - 2
    device.write(0, 5, b"k" * 16384)
    event = device.copy(device.stream(), [(5, 90, 1)])
    while not device.completion(event):
        pass
    assert device.read(0, 90, 1) == b"k" * 16384
    device.close()
    assert huge.count(2 * MIB)[1] == free

    pool = {"blocks": 5, "block_size": 4, "opaque_block_bytes": "1MiB", "huge_pages": "2MiB"}
    with running(pools=[pool]) as daemon:
        with Client(str(daemon.socket)) as client:
            client.admit(range(9)).free()
        with Wire(daemon.socket) as wire:
            assert wire.hello().pool.size_bytes == 6 * MIB
        with Wire(daemon.socket) as tool:
            assert tool.call(messages.Inspect, "pools").rows[0]["size_bytes"] == 6 * MIB
    assert huge.count(2 * MIB)[1] == free


@pytest.mark.usefixtures("pages")
def test_a_pool_of_huge_pages_outlives_its_daemon() -> None:
    """What is cached is taken over with its pages, and with the same bytes; with pages of another size than those it
    has a pool begins anew, and gives up those."""
    free = huge.count(2 * MIB)[1]
    pool = {"blocks": 128, "layout": {"layers": 2, "kv_heads": 4, "head_dim": 64, "dtype": "float32"}}
    with kept([{**pool, "huge_pages": "2MiB"}]) as daemon:
        manager = daemon.manager
        with Client(str(daemon.socket)) as client:
            slots = fill(client, PROMPT)
            assert client.pool.description.size_bytes == 8 * MIB
        for _ in range(2):
            manager.kill()
            assert huge.count(2 * MIB)[1] == free - 4
            with Client(str(daemon.socket)) as client:
                assert client.probe(PROMPT) == len(PROMPT) - 1
                for name in client.pool.planes:
                    assert (client.pool.plane(name)[slots, 0, 0] == PROMPT).all()
        for word, pages in (("off", 0), ("2MiB", 4)):
            daemon.configure([{**pool, "huge_pages": word}])
            manager.kill()
            assert huge.count(2 * MIB)[1] == free - pages
            last = daemon.events("cold_start", "warm_start")[-1]
            assert last["event"] == "cold_start"
            assert "pages" in last["reason"]
    assert huge.count(2 * MIB)[1] == free
