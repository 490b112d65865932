"""`kvslotctl record` beside a real daemon and real client processes: the trace is the load that made it."""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvslot.api.wire import messages
from kvslot.replay import Expander, ReplayConfig, load, replay

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens
from . import engine
from .tools import SECONDS, wait_for


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    with running(pools=[{"blocks": 1025}]) as each:
        yield each


@contextmanager
def recorder(daemon: Running, out: Path, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """The command at work, from the moment on that the daemon notes what is asked."""
    before = daemon.text().count('"recording_started"')
    process = subprocess.Popen(
        [sys.executable, "-Im", "kvslot.cli.ctl", "record", str(out), "--socket", str(daemon.socket), *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + SECONDS
        while daemon.text().count('"recording_started"') == before and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def told(process: subprocess.Popen[str], code: int = 0) -> str:
    """What the command said, once it has ended."""
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == code, (out, err)
    return out + err


def engines(daemon: Running, count: int, folder: Path) -> list[dict[str, Any]]:
    """The load: several processes at once, behind one that goes first.  All requests, in no particular order."""
    processes = []
    outs = [folder / f"engine-{number}.json" for number in range(count)]
    for number, out in enumerate(outs):
        process = subprocess.Popen(
            [sys.executable, "-I", engine.__file__, str(daemon.socket), str(number), str(out)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        processes.append(process)
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=SECONDS)
        assert process.returncode == 0
    return [request for out in outs for request in json.loads(out.read_text())]


def common(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_trace_replays_as_the_load_that_made_it(daemon: Running, tmp_path: Path) -> None:
    """Three engines chat in two namespaces: lengths, hit tokens and every pair's common prefix are those of the trace.

    And the trace holds no token id, no tenant and no salt; those that were asked for lie in a file for the owner only.
    """
    out, values = tmp_path / "load.kvs.gz", tmp_path / "tokens.gz"
    with recorder(daemon, out, "--values", str(values)) as process:
        done = engines(daemon, 3, tmp_path)
        wait_for(out, len(done))
        process.send_signal(signal.SIGINT)
        said = told(process)
    assert f"{len(done)} requests of 3 engines" in said

    trace = load(out)
    lengths = Counter((len(each["prompt"]), len(each["output"])) for each in done)
    lines = list(zip(trace.prompt_len, trace.total, strict=True))
    assert Counter((prompt, total - prompt) for prompt, total in lines) == lengths

    # The values tell which request is which; by them, what each pair of requests has in common.
    known: list[list[int]] = []
    for index, position, own in map(json.loads, gzip.decompress(values.read_bytes()).splitlines()[1:]):
        parent = trace.parent[index]
        assert position == trace.keep[index]
        known.append(([] if parent < 0 else known[parent][:position]) + own)
    by_tokens = {(*each["prompt"], *each["output"]): each for each in done}
    asked = [by_tokens[tuple(each)] for each in known]
    assert len(by_tokens) == len(asked) == len(done)
    expander = Expander(trace)
    made = [expander.sequence(index).tolist() for index in range(len(trace))]
    for i, first in enumerate(asked):
        for j in range(i):
            apart = first["tenant"] != asked[j]["tenant"]
            assert common(made[i], made[j]) == (0 if apart else common(known[i], known[j]))
    # Chats are the sessions.
    for index in range(len(trace)):
        before = trace.previous[index]
        assert before < 0 or trace.keep[index] > trace.prompt_len[before]
    assert trace.sessions < len(trace)

    config = ReplayConfig(
        policy="slotted", block_size=16, pool_tokens=1025 * 16, live=1000, prefill_us=1e-6, decode_ms=1e-6
    )
    row = replay(trace, config).rows[0]
    assert row.hit_tokens == sum(each["hit"] for each in done) > 0
    assert row.prompt_tokens == sum(trace.prompt_len)
    header = trace.header.recorded
    assert header is not None
    assert (header.complete, header.hit_tokens, header.hit_tokens_before) == (True, row.hit_tokens, 0)
    assert (header.lost_requests, header.lost_tokens, header.namespaces) == (0, 0, 2)

    text = gzip.decompress(out.read_bytes()).decode()
    for secret in (engine.SALT, *engine.TENANTS, "engine-"):
        assert secret not in text, secret
    numbers = {int(each) for each in re.findall(r"\d+", text)}
    assert not numbers & {token for each in done for token in (*each["prompt"], *each["output"])}
    assert values.stat().st_mode & 0o777 == 0o600


def test_what_a_recorder_is_sent_is_blinded(daemon: Running) -> None:
    """Without `values` no token leaves the daemon as it is, equal ones at equal places stay equal, others differ."""
    with Wire(daemon.socket) as control, Wire(daemon.socket) as wire:
        wire.hello("e", namespace=messages.Namespace("t", "m", "", "blinded"))
        control.call(messages.Record, "start")
        for number, prompt in enumerate((tokens(300, 5000), tokens(200, 5000) + tokens(100, 9000))):
            wire.call(messages.Allocate, wire.namespace, number, prompt)
            wire.call(messages.Free, number)
        events = control.call(messages.Record, "stop").events
        one, two = (event.tokens for event in events if event.what == "begun")
        assert len(one) == len(two) == 1200
        same = [one[at : at + 4] == two[at : at + 4] for at in range(0, 1200, 4)]
        assert same == [True] * 200 + [False] * 100
        sent = {one[at : at + 4] for at in range(0, 1200, 4)}
        real = {tokens(1, 5000 + at) for at in range(300)}
        assert len(sent) > 290  # one permutation each: that two of 300 meet is one in 100,000
        assert not sent & real
        assert [event.count for event in events if event.what == "ended"] == [300, 300]


@pytest.mark.parametrize("which", ["recorder", "daemon"])
def test_a_trace_outlives_whoever_is_killed(which: str, tmp_path: Path) -> None:
    """kill -9 of the recorder or of the daemon leaves a trace that loads, with what had ended some seconds before."""
    out = tmp_path / "load.kvs.gz"
    with running(code=None) as daemon, recorder(daemon, out) as process, Wire(daemon.socket) as wire:
        wire.hello("e")
        for number in range(20):
            wire.call(messages.Allocate, wire.namespace, number, tokens(20 + number))
            wire.call(messages.Free, number)
        wire.call(messages.Allocate, wire.namespace, 99, tokens(77, 500))  # and is running at the end
        wait_for(out, 20)
        if which == "daemon":
            daemon.process.kill()
            said = told(process, 5)
            assert "the daemon ended" in said
            assert "requests cut off while they ran, with outputs as long as they were then: 1" in said
            trace = load(out)
            assert trace.prompt_len == [*range(20, 40), 77]
            assert trace.header.recorded is not None
            assert trace.header.recorded.complete
            return
        process.kill()
        trace = load(out)
        assert trace.prompt_len == [*range(20, 40)]
        assert trace.header.recorded is not None
        assert not trace.header.recorded.complete
        end = time.monotonic() + SECONDS
        while '"recording_ended"' not in daemon.text():
            assert time.monotonic() < end
            time.sleep(0.01)
        with Wire(daemon.socket) as control:
            control.call(messages.Record, "start")  # nobody is in the way


def test_a_recording_goes_on_with_the_daemon_that_comes_back(tmp_path: Path) -> None:
    """With --wait: one trace over two boots, in which what was asked before and after has in common what it has."""
    out = tmp_path / "load.kvs.gz"
    socket = tmp_path / "s"
    if len(str(socket)) > 100:
        pytest.skip("the temporary folder's name is too long for a socket")
    said = ""
    with ExitStack() as stack:
        process = None
        for boot in range(2):
            with running(socket=socket) as daemon:
                if process is None:
                    process = stack.enter_context(recorder(daemon, out, "--wait", "60s"))
                end = time.monotonic() + SECONDS
                while '"recording_started"' not in daemon.text():
                    assert time.monotonic() < end
                    time.sleep(0.01)
                with Wire(daemon.socket) as wire:
                    wire.hello("e", namespace=messages.Namespace("t", "", "", "same"))
                    wire.call(
                        messages.Allocate, wire.namespace, 1, tokens(100, 300) + tokens(10, 1000 * boot)
                    )
                    wire.call(messages.Free, 1)
                wait_for(out, boot + 1)
                if boot:
                    process.send_signal(signal.SIGTERM)
                    said = told(process)
        assert "waiting for it to come back" in said
    trace = load(out)
    assert (trace.prompt_len, trace.keep, trace.parent) == ([110, 110], [0, 100], [-1, 0])
    assert trace.t is not None
    assert trace.t[0] <= trace.t[1]
    assert trace.header.recorded is not None
    assert (trace.header.recorded.boots, trace.header.recorded.namespaces) == (2, 1)


def test_usage(daemon: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is there is not replaced unasked; a quiet pool leaves no file; wrong times and sizes are refused."""
    from kvslot.cli import ctl

    out = tmp_path / "load.kvs.gz"
    where = ["--socket", str(daemon.socket)]
    assert ctl.main(["record", str(out), "--for", "0.05s", *where]) == 1
    assert "nothing was asked" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    out.write_bytes(b"precious")
    assert ctl.main(["record", str(out), "--for", "1s", *where]) == 3
    assert "--force" in capsys.readouterr().err
    assert out.read_bytes() == b"precious"
    for wrong in (["--for", "soon"], ["--for", "-1"], ["--memory", "12"], ["--requests", "0"]):
        with pytest.raises(SystemExit) as ended:
            ctl.main(["record", str(out), *wrong, *where])
        assert ended.value.code == 2
    assert ctl.main(["record", str(tmp_path / "none" / "x.gz"), *where]) == 3
    assert ctl.main(["record", str(tmp_path / "x.gz"), "--pool", "none", *where]) == 2
