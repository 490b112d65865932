"""A replay by real processes: as in one process, every slot read back, nothing left behind by whoever dies."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from kvslot.cli import ctl
from kvslot.replay import ReplayConfig, Row, Trace, find, load, replay
from kvslot.replay.processes import ProcessFault, ProcessSettings, check, replay_processes
from kvslot.replay.processes import board as boards
from kvslot.replay.processes.board import Board
from kvslot.replay.processes.painting import slots_of

from ..tools.daemon import running
from .tiny import Line, write

SPREAD = 3.0
"""Percentage points that a trace of a few seconds may be off: one prompt computed twice is a third of a point."""


def trace(requests: int = 240) -> Trace:
    return load(find("mtbench101_a")).head(requests)


def config(**changes: Any) -> ReplayConfig:
    return ReplayConfig(**{"policy": "slotted", "pool_tokens": 12_000, **changes})


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary folders go in a test; nothing is there afterwards, and no process of ours runs."""
    folder = tempfile.mkdtemp(prefix="kvr")
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", None)
    try:
        yield Path(folder)
        assert os.listdir(folder) == []
        assert not _descendants(os.getpid())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"pool_tokens": 20_000},
        {"pool_tokens": 3_000, "block_size": 64, "live": 24},
        {"pool_tokens": 6_000, "rate": 30.0, "live": 32},
        {"pool_tokens": 20_000, "page": 8},
    ],
    ids=["roomy", "tight", "poisson", "pages"],
)
def test_figures_are_those_of_one_process(changes: dict[str, Any]) -> None:
    """Four client processes find and waste what one process does, within the spread; every slot was read back."""
    made, settings = trace(), config(**changes)
    alone = replay(made, settings).rows[0]
    run, rows, *_ = replay_processes(made, settings, ProcessSettings())
    real = rows[0]
    assert (real.via, alone.via) == ("socket", "inproc")
    assert real.requests == real.finished == len(made)
    assert (real.stuck, real.never) == (alone.stuck, alone.never)
    assert real.prompt_tokens == alone.prompt_tokens
    assert real.usable_tokens == alone.usable_tokens
    assert (real.copied_tokens > 0) == (alone.copied_tokens > 0) == (settings.page > 1)
    assert abs(real.hit_tokens_pct - alone.hit_tokens_pct) <= SPREAD
    assert abs(real.internal_fragmentation_pct.mean - alone.internal_fragmentation_pct.mean) <= SPREAD
    assert real.end_s == pytest.approx(alone.end_s, rel=0.25)
    told = run.processes
    assert told is not None
    assert len(told.clients) == 4
    assert sum(each.requests for each in told.clients) == len(made)
    assert told.painted_tokens >= sum(made.total) - real.hit_tokens - sum(made.total) // 4
    assert told.verified_tokens >= sum(made.total)
    assert {row["verb"] for row in told.daemon} >= {"Allocate", "Extend", "Commit", "Free", "Hello", "Bye"}
    assert run.series.time_s


def test_short_memory_preempts_and_goes_on(place: Path) -> None:
    """Prompts fit and answers do not: clients free victims for growth, and every request ends all the same."""
    lines: list[Line] = [(None, i, 0, -1, 0, 40, 300) for i in range(40)]
    file = write(place / "long.kvs.gz", lines)
    made = load(file)
    file.unlink()
    settings = config(pool_tokens=1_600, live=16, watermark=0.0, ramp_s=0.0)
    run, rows, *_ = replay_processes(made, settings, ProcessSettings(clients=2))
    assert rows[0].finished == len(made)
    assert rows[0].stuck == 0
    assert rows[0].preemptions > 0
    assert run.processes is not None


NIGHTS = ProcessSettings(night=0.5, rest_every_s=0.5)
"""Every half second the cache is evicted to half the pool, and what is left is compacted to rest."""


def compacted() -> ReplayConfig:
    return config(pool_tokens=20_000, block_size=64, compaction="forced")


def test_what_moves_under_running_sequences_is_read_back_where_it_lies() -> None:
    """Everybody stands still while the daemon compacts to rest; tables of sequences that run are among what moves, they
    follow, and every slot is right.  The row says what the daemon moved.  (S19)"""
    made = trace()
    run, rows, *_ = replay_processes(made, compacted(), NIGHTS)
    row, told = rows[0], run.processes
    assert told is not None
    moved = told.compaction
    assert moved is not None
    assert (row.compaction, row.means, moved.mode) == ("forced", "moves", "forced")
    assert moved.rests >= 4
    assert moved.moved_ranges > 0
    assert moved.moved_ranges == sum(each.moved_ranges for each in told.clients)
    assert (row.moved_tokens, row.moves) == (moved.moved_tokens, moved.published)
    assert row.blocks_given_back == moved.blocks_given_back > 0
    assert row.compaction_overtaken == moved.overtaken
    assert row.moves_abandoned == moved.abandoned_leased + moved.abandoned_freed
    assert row.moved_tokens >= row.moves > 0
    assert row.finished == len(made)
    assert told.verified_tokens >= sum(made.total)
    assert not moved.too_short


DEAF: Final = """\
import sys
from kvslot.api.client import session
from kvslot.replay.processes.client import main
session.Session.follow = lambda self: self.moved.clear()
sys.exit(main(sys.argv[1:]))
"""
"""A client that takes moves for heard, and reads on where its data was."""


def test_a_client_that_does_not_follow_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run with clients that go on reading old places: one of them reads what is another's by then."""
    popen = subprocess.Popen

    def start(command: list[str], **how: Any) -> Any:
        at = (
            command.index("kvslot.replay.processes.client")
            if "kvslot.replay.processes.client" in command
            else 0
        )
        return popen([command[0], "-Ic", DEAF, *command[at + 1 :]] if at else command, **how)

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(ProcessFault, match=r"wrong slot: client \d, sequence"):
        replay_processes(trace(), compacted(), NIGHTS)


@pytest.mark.parametrize("by", [1, -1])
def test_a_planted_wrong_slot_ends_the_run(by: int) -> None:
    """A client whose table points one slot aside is told so, with all that is needed to find it."""
    with pytest.raises(
        ProcessFault, match=r"wrong slot: client 2, sequence \d+, position \d+, slot \d+, plane "
    ) as caught:
        replay_processes(trace(), config(), ProcessSettings(plant=(2, 30, by)))
    assert re.search(r"expected [0-9a-f]{16}, found [0-9a-f]{16}", str(caught.value))


def test_a_client_that_is_killed_leaves_the_others_right() -> None:
    """kill -9 of one in the middle: the others end their work, every slot right, and the daemon's books are clean."""
    made = trace()
    run, rows, *_ = replay_processes(made, config(), ProcessSettings(kill=(1, 0.4)))
    told = run.processes
    assert told is not None
    assert [each.killed for each in told.clients] == [False, True, False, False]
    assert rows[0].finished == rows[0].requests == sum(each.requests for each in told.clients)
    assert len(made) / 2 < rows[0].requests < len(made)
    assert rows[0].stuck == 0


def test_the_command_prints_the_table_and_what_the_processes_did(capsys: pytest.CaptureFixture[str]) -> None:
    """--via socket: slotted's column beside the others', then clients and verbs; the JSON says how it was done."""
    argv = ["replay", "mtbench101_a", "--requests", "120", "--policy", "hashed", "slotted", "--via", "socket"]
    argv += ["--clients", "2", "--pool-tokens", "8000"]
    assert ctl.main(argv) == 0
    out = capsys.readouterr().out
    assert re.search(r"hashed.*slotted", out)
    assert "2 client processes of a daemon" in out
    assert "all right; audit clean" in out
    assert "Allocate" in out
    assert ctl.main([*argv, "--no-optimum", "--json"]) == 0
    told = msgspec.json.decode(capsys.readouterr().out)
    assert told["meta"]["via"] == told["meta"]["settings"]["via"] == "socket"
    assert len(told["meta"]["processes"][0]["clients"]) == 2
    assert {row["policy"]: row["via"] for row in told["rows"]} == {"hashed": "inproc", "slotted": "socket"}
    assert list(told["rows"][0]) == list(Row.__struct_fields__)


def test_the_command_says_what_the_daemon_moved(capsys: pytest.CaptureFixture[str]) -> None:
    """--compaction via a socket: the column says so, rows of moves are there even as zeros, and a line tells the
    rest; a run that is over before the first compaction is told of."""
    argv = [
        "replay",
        "mtbench101_a",
        "--requests",
        "60",
        "--policy",
        "slotted",
        "--via",
        "socket",
        "--no-optimum",
    ]
    argv += ["--clients", "2", "--pool-tokens", "8000", "--compaction", "forced", "--night", "0.5", "--json"]
    assert ctl.main(argv) == 0
    told = msgspec.json.decode(capsys.readouterr().out)
    assert {row["compaction"] for row in told["rows"]} == {"forced"}
    moved = told["meta"]["processes"][0]["compaction"]
    assert (moved["mode"], moved["too_short"]) == ("forced", True)
    assert ctl.main(argv[:-1]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\+ moves, forced", out)
    for name in ("moved_tokens", "moves_abandoned", "blocks_given_back", "moved_per_given_back"):
        assert re.search(rf"│ {name} ", out)
    assert "compaction forced: " in out
    assert "The run was over before all would have stood still" in " ".join(out.split())


def test_a_wrong_slot_is_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts see it: code 1, and one line that says where."""
    argv = ["replay", "mtbench101_a", "--requests", "120", "--policy", "slotted", "--via", "socket"]
    assert ctl.main([*argv, "--pool-tokens", "8000", "--plant", "0:20:3"]) == 1
    assert "wrong slot: client 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--policy", "hashed"], "about slotted"),
        (["--policy", "slotted", "--hours", "1"], "--hours"),
        (["--policy", "slotted", "--engines", "2", "--sharing", "partitioned"], "share one pool"),
        (["--policy", "slotted", "--engines", "2"], "--clients"),
        (["--policy", "slotted", "--unsplit"], "--unsplit"),
        (["--policy", "slotted", "--clients", "65"], "1 to 64"),
        (["--policy", "slotted", "--max-live-search"], "--max-live-search"),
        (["--policy", "slotted", "--night", "0.5", "--compaction", "idle"], "--compaction forced"),
    ],
)
def test_what_real_processes_cannot_do_is_said(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings that need one process are refused before anything runs."""
    assert ctl.main(["replay", "mtbench101_a", "--requests", "20", "--via", "socket", *argv]) == 2
    assert words in capsys.readouterr().err


def test_a_daemon_that_runs_already_can_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    """--socket PATH: with the size that its pool has; another size is refused with the one to ask for."""
    layout = {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "bfloat16"}
    with running(pools=[{"blocks": 500, "block_size": 16, "layout": layout}]) as daemon:
        argv = ["replay", "mtbench101_a", "--requests", "60", "--policy", "slotted", "--via", "socket"]
        argv += ["--socket", str(daemon.socket), "--no-optimum", "--clients", "2"]
        assert ctl.main([*argv, "--pool-tokens", "4000"]) == 2
        assert "--block-size 16 --pool-tokens 8000" in capsys.readouterr().err
        assert ctl.main([*argv, "--pool-tokens", "8000"]) == 0
        assert "audit clean" in capsys.readouterr().out


def test_no_daemon_at_the_socket_is_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--socket PATH with nothing behind it: the code for that, and the path."""
    argv = ["replay", "mtbench101_a", "--requests", "20", "--policy", "slotted", "--via", "socket"]
    assert ctl.main([*argv, "--socket", str(place / "none")]) == 5
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_behind(number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM in the middle: clients and daemon end, and the folder goes."""
    command = [
        sys.executable,
        "-Im",
        "kvslot.cli.ctl",
        "replay",
        "mix200_a",
        "--policy",
        "slotted",
        "--via",
        "socket",
    ]
    command += ["--pool-tokens", "400000"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    with process:
        try:
            end = time.monotonic() + 30
            while len(mine := _descendants(process.pid)) < 5:
                assert time.monotonic() < end, "the clients did not start"
                assert process.poll() is None
                time.sleep(0.05)
            time.sleep(0.3)
            process.send_signal(number)
            code = process.wait(20)
        finally:
            process.kill()
    assert code == (130 if number == signal.SIGINT else 143)
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in mine):
        assert time.monotonic() < end, "processes are left"
        time.sleep(0.05)


def _descendants(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# -- parts --------------------------------------------------------------------------------------------------------


def test_slots_of_positions_are_those_of_a_walk() -> None:
    """Random extents and ranges against a list of all slots."""
    random = np.random.default_rng(5)
    for _ in range(200):
        lengths = random.integers(1, 9, random.integers(1, 12))
        starts = random.integers(0, 1000, len(lengths))
        extents = np.stack((starts, lengths), 1).ravel().tolist()
        whole = [s + i for s, n in zip(starts.tolist(), lengths.tolist(), strict=True) for i in range(n)]
        first, last = sorted(random.integers(0, len(whole) + 1, 2).tolist())
        assert slots_of(extents, first, last).tolist() == whole[first:last]


def test_nobody_gets_further_ahead_than_the_window() -> None:
    """A turn is there while the slowest clock is within the window; who has nothing planned holds nobody back."""
    parent = boards.make(2, sessions=3, requests=5, window_s=1.0)
    try:
        first, second = (Board(parent.descriptor, parent.bells, each, 3, 5, 1.0) for each in (0, 1))
        parent.promise(float("inf"))
        second.promise(0.5)
        assert first.turn_now(1.5)
        assert not first.turn_now(1.6)
        second.end()
        assert first.turn_now(100.0)
        assert first.stranded()
        assert not second.stranded()
        for each in (first, second):
            each.close()
    finally:
        boards.unmake(parent)


def test_settings_that_do_not_fit_are_refused() -> None:
    """More clients than sequences that may run, and policies that have no daemon."""
    with pytest.raises(ValueError, match="cannot share"):
        check(config(live=2), ProcessSettings())
    with pytest.raises(ValueError, match="only slotted"):
        check(config(policy="hashed"), ProcessSettings())


def test_the_children_end_with_their_parent() -> None:
    """The parent killed outright: the kernel ends daemon and clients."""
    command = [
        sys.executable,
        "-Im",
        "kvslot.cli.ctl",
        "replay",
        "mix200_a",
        "--policy",
        "slotted",
        "--via",
        "socket",
    ]
    with subprocess.Popen(
        [*command, "--pool-tokens", "400000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        end = time.monotonic() + 30
        while len(mine := _descendants(process.pid)) < 5:
            assert time.monotonic() < end
            time.sleep(0.05)
        folder = _folder(mine)
        time.sleep(0.3)
        process.kill()
    end = time.monotonic() + 15
    while any(Path(f"/proc/{pid}").exists() for pid in mine):
        assert time.monotonic() < end, "processes are left"
        time.sleep(0.05)
    shutil.rmtree(folder)  # nobody was left to do it


def _folder(pids: list[int]) -> Path:
    for pid in pids:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"kvslot.replay.processes.client" in words:
            return Path(os.fsdecode(words[words.index(b"kvslot.replay.processes.client") + 1]))
    raise AssertionError("no client is there")
