"""`kvslotctl advise`: what it says follows from the replays it makes, and it says nothing where they do not tell."""

from __future__ import annotations

import gzip
import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvslot.cli import advise as command
from kvslot.cli import ctl
from kvslot.replay import Present, advise, load, present_of
from kvslot.replay.advice import BLOCK_SIZES, REQUESTS, wasted

from ..tools.daemon import running
from . import engine
from .tools import wait_for

Line = list[float | int]


def trace(path: Path, lines: list[Line], pool: dict[str, Any] | None = None) -> Path:
    """A trace file; with `pool` one that was recorded from it."""
    head: dict[str, Any] = {"format": "kvstruct-1", "name": "made"}
    if pool is not None:
        head["recorded"] = {"complete": True, "requests": len(lines), "engines": 2, "pool": pool}
    text = "\n".join(json.dumps(each) for each in (head, *lines))
    path.write_bytes(gzip.compress(text.encode()))
    return path


def chats(count: int) -> list[Line]:
    """Short chats behind a common prompt of 200 tokens: each has a second turn a while after its first."""
    draw = random.Random(1)
    lines: list[Line] = []
    open_: list[tuple[int, int, int]] = []  # session, index of its first turn, length
    for number in range(count):
        t = number * 0.5
        if len(open_) >= 8:
            session, first, length = open_.pop(0)
            lines.append([t, session, 1, first, length, length + 10, 10])
            continue
        prompt = 200 + draw.randrange(20, 60)
        session = number
        lines.append([t, session, 0, 0 if number else -1, 200 if number else 0, prompt, 20])
        open_.append((session, number, prompt + 20))
    return lines


SMALL: dict[str, Any] = {"blocks": 40, "block_size": 16, "usable": 624, "watermark": 12, "slot_bytes": 1024}


def test_a_pool_that_is_too_small_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Chats that a small pool forgets between their turns: more memory is advised, with the figures of the replay."""
    path = trace(tmp_path / "made.kvs.gz", chats(220), SMALL)
    document = tmp_path / "advice.json"
    assert ctl.main(["advise", str(path), "--json", str(document)]) == 0
    found = json.loads(document.read_text())
    by_name = {each["setting"]: each for each in found["advice"]}
    pool = by_name["pool size"]
    assert pool["change"]
    assert pool["now"].startswith("640 slots")
    tried = {each["what"]: each for each in found["tried"]}
    factor = "1.5x" if "960 slots" in pool["advised"] else "2x"
    better = tried[f"pool {factor}"]
    assert better["gain"] > 1
    assert better["gain"] > 2 * better["gain_error"]
    assert f"{better['row']['hit_tokens_pct']:.2f} %" in pool["reason"]
    gain = better["row"]["hit_tokens_pct"] - tried["now"]["row"]["hit_tokens_pct"]
    assert better["gain"] == pytest.approx(gain, abs=0.01)
    assert {f"block_size {size}" for size in BLOCK_SIZES if size != 16} <= set(tried)
    assert {"hashed", "token", "paged", "compaction idle"} <= set(tried)
    assert {"eviction s3fifo", "eviction gaps"} <= set(tried)
    assert by_name["sharing"]["figures"]["engines"] == 2
    assert found["meta"]["present"]["assumed"] == []
    # The same in words.
    text = capsys.readouterr().out
    assert f"pool size: {pool['now']} -> {pool['advised']}" in " ".join(text.split())


def test_nothing_is_advised_where_nothing_helps(tmp_path: Path) -> None:
    """Requests with nothing in common in a pool that holds them all: every setting stays, and why is said."""
    lines: list[Line] = [[number * 1.0, number, 0, -1, 0, 100, 10] for number in range(205)]
    found = advise(load(trace(tmp_path / "made.kvs.gz", lines)), Present(block_size=16, pool_tokens=64_000))
    assert [each.setting for each in found.advice if each.change] == []
    assert all(each.reason for each in found.advice)
    assert any("nothing was evicted" in each for each in found.meta["cautions"])


def test_a_block_size_that_wastes_memory_is_replaced(tmp_path: Path) -> None:
    """Where blocks of 256 strand half of a small pool in short sequences, a smaller size is advised."""
    found = advise(
        load(trace(tmp_path / "made.kvs.gz", chats(120))), Present(block_size=256, pool_tokens=2048)
    )
    (block,) = [each for each in found.advice if each.setting == "block_size"]
    assert block.change
    assert int(block.advised) < 256
    waste = {each.row.block_size: wasted(each.row) for each in found.tried if "block" in each.what}
    waste[256] = wasted(found.tried[0].row)
    assert waste[int(block.advised)] + 0.5 < waste[256]


def test_what_is_not_known_is_said_to_be_assumed(tmp_path: Path) -> None:
    """A trace that no daemon recorded says nothing of settings; what is given on the command line is taken."""
    made = load(trace(tmp_path / "made.kvs.gz", chats(50)))
    present = present_of(made, block_size=32)
    assert present.block_size == 32
    assert set(present.assumed) == {"pool_tokens", "eviction", "append", "compaction", "watermark"}
    recorded = present_of(load(trace(tmp_path / "too.kvs.gz", chats(50), SMALL)))
    assert (recorded.block_size, recorded.pool_tokens, recorded.assumed) == (16, 640, ())


def test_an_opaque_pools_block_size_is_left_to_its_engine(tmp_path: Path) -> None:
    """No other block size is tried or advised, append neither, and what the replays are worth for it is said."""
    pool = {**SMALL, "granularity": "opaque", "pages": [16]}
    made = load(trace(tmp_path / "made.kvs.gz", chats(40), pool))
    found = advise(made, present_of(made))
    assert not any(each.what.startswith(("block_size", "append")) for each in found.tried)
    kept = {each.setting: each.advised for each in found.advice if not each.change}
    assert (kept["block_size"], kept["append"]) == ("16", "chain")
    assert any("whole blocks only" in each for each in found.meta["cautions"])


def test_live(tmp_path: Path) -> None:
    """`--live` records a daemon at work, keeps the trace where asked, and knows the settings of its pool."""
    kept = tmp_path / "kept.kvs.gz"
    program = [sys.executable, "-Im", "kvslot.cli.ctl", "advise", "--live", "--for", "10m"]
    with running(pools=[{"blocks": 513, "append": "peel"}]) as daemon:
        process = subprocess.Popen(
            [*program, "--keep", str(kept), "--socket", str(daemon.socket), "--sizes", "16", "32", "--json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            while '"recording_started"' not in daemon.text():
                assert process.poll() is None
            out = tmp_path / "out.json"
            subprocess.run(
                [sys.executable, "-I", engine.__file__, str(daemon.socket), "0", str(out)],
                input="go\n",
                text=True,
                check=True,
                stdout=subprocess.DEVNULL,
                timeout=120,
            )
            wait_for(kept, len(json.loads(out.read_text())))
            process.send_signal(signal.SIGINT)  # ends the recording, not the command
            said, _ = process.communicate(timeout=120)
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()
    assert process.returncode == 0
    found = json.loads(said)
    present = found["meta"]["present"]
    assert (present["block_size"], present["append"], present["pool_tokens"]) == (16, "peel", 513 * 16)
    assert present["assumed"] == []
    assert found["meta"]["requests"] == len(load(kept)) > 0


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace or --live, not both and not neither; what goes with --live goes with nothing else."""
    for wrong in ([], ["sgd_a", "--live"], ["sgd_a", "--keep", "x"], ["sgd_a", "--for", "3s"]):
        assert ctl.main(["advise", *wrong]) == 2
    assert ctl.main(["advise", str(tmp_path / "none.kvs.gz")]) == 3
    assert "no such file" in capsys.readouterr().err
    assert command.REQUESTS == REQUESTS
