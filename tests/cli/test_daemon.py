"""The commands against a running kvslotd with clients of its own: what they show is what those clients did."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvslot.api.wire import Namespace, messages
from kvslot.cli import ctl
from kvslot.daemon.main import DEMO

from ..tools.daemon import Running, running
from ..tools.painting import Painter, scatter
from ..tools.wire import Wire, tokens


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    """Two pools, nobody connected."""
    with running(pools=[{}, {"name": "other", "blocks": 33}]) as each:
        yield each


def told(capsys: pytest.CaptureFixture[str], daemon: Running, command: str, *argv: str, code: int = 0) -> str:
    """What a command prints."""
    found = ctl.main([command, "--socket", str(daemon.socket), *argv])
    out, err = capsys.readouterr()
    assert found == code, err
    return out or err


def document(capsys: pytest.CaptureFixture[str], daemon: Running, command: str, *argv: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(told(capsys, daemon, command, *argv, "--json"))
    return found


def test_every_command_shows_what_a_client_did(daemon: Running, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt published and freed, another still running: status, clients, map, tree and frag agree on them."""
    with Wire(daemon.socket) as wire:
        welcome = wire.hello("engine-1", namespace=Namespace("acme", "m", "", "grain"))
        space = wire.namespace
        wire.call(messages.Allocate, space, 1, tokens(100))
        wire.call(messages.Commit, 1, 100)
        wire.call(messages.Free, 1)
        admitted = wire.call(messages.Allocate, space, 2, tokens(130))
        assert admitted.hit == 100

        (pool, other) = document(capsys, daemon, "status")["pools"]
        assert (pool["cached"], pool["private"], other["cached"]) == (100, admitted.capacity - 100, 0)
        (client,) = document(capsys, daemon, "clients")["rows"]
        assert (client["name"], client["pid"], client["uid"]) == ("engine-1", os.getpid(), os.getuid())
        assert client["session"] == welcome.session
        assert (client["sequences"], client["charged"]) == (1, admitted.capacity - 100)
        totals = document(capsys, daemon, "map")["totals"]
        assert totals["leased"] == 100
        assert totals["private"] + totals["room"] == admitted.capacity - 100
        whole = document(capsys, daemon, "tree")
        assert [(row["start"], row["stop"], row["held"]) for row in whole["rows"]] == [(0, 100, True)]
        (namespace,) = whole["namespaces"]
        assert (namespace["tenant"], namespace["salted"]) == ("acme", True)
        assert document(capsys, daemon, "frag")["rows"][0]["free"] == pool["free"]
        for command in ("status", "clients", "map", "tree", "frag", "audit"):
            text = told(capsys, daemon, command)
            assert "default" in text
            assert "grain" not in text
        assert "engine-1" in told(capsys, daemon, "clients")
        assert "nobody" in told(capsys, daemon, "clients", "--pool", "other")


def test_a_lost_client_is_shown_until_its_process_is_gone(
    daemon: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its connection ended and its process lives: the session is `lost`, its slots are quarantined on the map."""
    program = (
        "import sys; from kvslot.api.wire import *; from kvslot.api.wire import messages as m; import socket\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "s.sendall(encode(m.Hello(1, VERSION, 'careless')))\n"
        "_, rights, _, _ = s.recvmsg(65536, 4096)\n"
        "r = Reader(1 << 20); s.sendall(encode(m.OpenNamespace(2, Namespace('t'))))\n"
        "n = decode_outgoing(r.feed(s.recv(65536))[0]).namespace\n"
        "s.sendall(encode(m.Allocate(3, n, 7, bytes(4 * 40)))); s.recv(65536)\n"
        "s.close(); print('lost', flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-Ic", program, str(daemon.socket)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"lost\n"
        for _ in range(1000):
            rows = document(capsys, daemon, "clients")["rows"]
            if [row["state"] for row in rows if row["name"] == "careless"] == ["lost"]:
                break
        else:
            raise AssertionError("it is not shown as lost")
        assert re.search(r"careless.*lost", told(capsys, daemon, "clients"))
        assert document(capsys, daemon, "map")["totals"]["quarantined"] >= 40
        assert "of them lost" in told(capsys, daemon, "status")
    finally:
        process.communicate(b"")
    for _ in range(1000):
        if not document(capsys, daemon, "clients")["rows"]:
            break
    else:
        raise AssertionError("its process is gone, and its session is not")
    assert document(capsys, daemon, "map")["totals"]["quarantined"] == 0
    assert all(row["sound"] for row in document(capsys, daemon, "audit")["rows"])


def test_eviction_empties_what_nobody_reads(daemon: Running, capsys: pytest.CaptureFixture[str]) -> None:
    """All of one pool's cache goes, and the daemon says how much is free then."""
    with Wire(daemon.socket) as wire:
        wire.hello(pool="other")
        wire.call(messages.Allocate, wire.namespace, 1, tokens(200, 5))
        wire.call(messages.Commit, 1, 200)
        wire.call(messages.Free, 1)
    assert document(capsys, daemon, "evict", "50", "--pool", "other")["rows"][0]["evicted"] == 50
    row = document(capsys, daemon, "evict", "all", "--pool", "other")["rows"][0]
    assert (row["evicted"], row["evictable_left"], row["free"]) == (150, 0, 512)
    assert "default, other" in told(capsys, daemon, "evict", "all", code=2)


def test_compaction_goes_on_to_rest_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """`once` says what it moved and gained, `status` what came of it, and the map is of whole free blocks then."""
    pool = {"blocks": 65, "headroom": 0.0}
    with (
        running(pools=[pool], compaction="off", compaction_duty=1.0) as daemon,
        Painter(daemon.socket) as one,
    ):
        kept = scatter(one)
        before = document(capsys, daemon, "map")["totals"]
        (row,) = document(capsys, daemon, "defrag", "once")["rows"]
        assert row["blocks_free_after"] > row["blocks_free_before"]
        assert row["moved_tokens_now"] == row["moved_tokens"] > 0
        assert document(capsys, daemon, "map")["totals"] == before
        assert sum(one.look(each) for each in kept) > 100
        out = told(capsys, daemon, "defrag", "once")
        assert "default · off · " in out
        assert "longest free run" in out
        assert "default · idle · " in told(capsys, daemon, "defrag", "start")
        assert "default · off · " in told(capsys, daemon, "defrag", "stop", "--pool", "default")
        with Wire(daemon.socket) as wire:
            (same,) = wire.call(messages.Inspect, "defrag").rows
            assert (same["pool"], same["mode"]) == ("default", "off")


def test_every_kind_of_the_daemon_can_be_inspected(daemon: Running) -> None:
    """Kinds without a command of their own are there for tools: each answers with rows."""
    with Wire(daemon.socket) as wire:
        wire.hello()
        for kind in ("status", "pools", "sessions", "namespaces", "tickets", "latency", "settings", "config"):
            answer = wire.call(messages.Inspect, kind)
            assert isinstance(answer, messages.Inspected), answer
            assert answer.rows or kind == "tickets"
        assert isinstance(wire.call(messages.Inspect, "nonsense"), messages.Error)


def test_what_set_can_complete_is_what_the_daemon_can_change() -> None:
    """The command names the settings; this room does not load the daemon's."""
    from kvslot.cli import set as setting
    from kvslot.daemon.config import CHANGEABLE

    assert setting.NAMES == CHANGEABLE


def test_settings_latency_and_a_drain_of_a_real_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    """A setting is changed and seen; verbs are counted; a drain is seen in status, and the second one ends it."""
    with running(drain_seconds=60.0) as daemon, Wire(daemon.socket) as wire:
        wire.hello("engine", map=False)
        wire.call(messages.Allocate, wire.namespace, 1, tokens(20))
        assert "drain_seconds is 30.0 (was 60.0)" in told(capsys, daemon, "set", "drain_seconds", "30")
        rows = {row["name"]: row for row in document(capsys, daemon, "settings")["rows"]}
        assert (rows["drain_seconds"]["value"], rows["drain_seconds"]["changeable"]) == (30.0, True)
        assert not rows["sessions_max"]["changeable"]
        assert "did you mean" in told(capsys, daemon, "set", "drain_secs", "30", code=2)
        assert "start the daemon anew" in told(capsys, daemon, "set", "sessions_max", "30", code=2)
        assert "nope is not a setting; those there are: " in told(capsys, daemon, "set", "nope", "1", code=2)
        assert "allowed: from 0 to 3600 seconds" in told(capsys, daemon, "set", "drain_seconds", "-1", code=2)
        counts = {row["verb"]: row["count"] for row in document(capsys, daemon, "latency")["rows"]}
        assert counts["Allocate"] == counts["Hello"] == 1
        assert "nobody waits" in told(capsys, daemon, "tickets")
        assert told(capsys, daemon, "drain") == "draining: 1 sequence running, ends in 30 s at most\n"
        assert "draining, ends in" in told(capsys, daemon, "status")
        assert "engine" in told(capsys, daemon, "clients")
        assert "draining already" in told(capsys, daemon, "drain")
        assert "ends now" in told(capsys, daemon, "drain", "--now")
        assert daemon.process.wait(5.0) == 0


def test_the_recipe_of_the_compaction_page_makes_holes_and_closes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/compaction.md, "Try it": its commands give the free memory back in whole blocks, as its figures say."""
    page = (Path(__file__).parents[2] / "docs" / "compaction.md").read_text(encoding="utf-8")
    recipe = page.split("\n## Try it\n", 1)[1].split("\n## ", 1)[0]
    (program,) = re.findall(r"```python\n(.*?)```", recipe, re.DOTALL)
    said = [
        line.removeprefix("$ kvslotctl ").split()
        for line in re.findall(r"^\$ kvslotctl [^#\n]+", recipe, re.MULTILINE)
    ]
    assert [" ".join(each) for each in said] == [
        "set compaction off", "evict 40%", "frag", "set compaction idle", "defrag status", "frag"
    ]  # fmt: skip
    file = tmp_path / "fill.py"
    file.write_text(program)
    size, layout = DEMO["pool_size"], DEMO["pool_layout"]
    with running(pools=[{"name": "demo", "size": size, "layout": layout}]) as daemon:
        off, evict, frag, idle, status, _ = said
        assert told(capsys, daemon, *off) in recipe
        subprocess.run([sys.executable, "-I", str(file), str(daemon.socket)], check=True, timeout=60)
        assert told(capsys, daemon, *evict) in recipe
        before = document(capsys, daemon, *frag)["rows"][0]
        first = told(capsys, daemon, *frag).splitlines()[0]
        assert first in recipe
        assert told(capsys, daemon, *idle) in recipe
        deadline = time.monotonic() + 30
        while (row := document(capsys, daemon, *status)["rows"][0])["unpacked_pct"] > 5 or row[
            "moves_in_flight"
        ]:
            assert time.monotonic() < deadline, row
            time.sleep(0.05)
        after = document(capsys, daemon, *frag)["rows"][0]
    share = 100 * before["blocks_free"] * before["block_size"] / before["free"]
    assert f"Of {before['free']:,} free slots {share:.0f} % lay in whole blocks" in recipe
    assert after["free"] == before["free"]
    assert after["blocks_free"] > 3 * before["blocks_free"]
    assert after["largest_free_run"] > 10 * before["largest_free_run"]
