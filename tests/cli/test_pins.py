"""`kvslotctl pin`, `unpin` and `reload` against a running kvslotd."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvslot.api.wire import Namespace, messages
from kvslot.cli import ctl
from kvslot.cli.pin import tokens_of

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    """Two pools with 100 tokens of one tenant's in the first."""
    with running(pools=[{}, {"name": "other", "blocks": 33}]) as each:
        with Wire(each.socket) as wire:
            wire.hello(namespace=Namespace("acme", "m"))
            wire.call(messages.Allocate, wire.namespace, 1, tokens(100))
            wire.call(messages.Commit, 1, 100)
            wire.call(messages.Free, 1)
        yield each


def told(capsys: pytest.CaptureFixture[str], daemon: Running, *argv: str, code: int = 0) -> str:
    found = ctl.main([argv[0], "--socket", str(daemon.socket), *argv[1:]])
    out, err = capsys.readouterr()
    assert found == code, out + err
    return out or err


def rows(capsys: pytest.CaptureFixture[str], daemon: Running, *argv: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(told(capsys, daemon, *argv, "--json"))["rows"]
    return found


def test_what_is_pinned_stays_until_it_is_unpinned(
    daemon: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its node and end, as tree lists them: eviction passes it by, pin lists it, and unpin lets it go."""
    (prefix,) = rows(capsys, daemon, "tree", "--pool", "default")
    node = str(prefix["node"])
    assert node in told(capsys, daemon, "tree")
    assert "any more" in told(capsys, daemon, "pin", node, "99", "--pool", "default", code=2)
    (pin,) = rows(capsys, daemon, "pin", node, "100", "--pool", "default")
    assert (pin["tokens"], pin["pool"]) == (100, "default")
    (evicted,) = rows(capsys, daemon, "evict", "all", "--pool", "default")
    assert evicted["evicted"] == 0
    listed = told(capsys, daemon, "pin")
    assert str(pin["pin"]) in listed
    assert "tenant acme, model m" in listed
    assert told(capsys, daemon, "pin", "--pool", "other") == "nothing is pinned by operators\n"
    assert f"there are {pin['pin']}" in told(capsys, daemon, "unpin", "123456", code=2)
    assert "ended 1 pin that kept 100 tokens" in told(capsys, daemon, "unpin", str(pin["pin"]))
    assert rows(capsys, daemon, "pin") == []
    assert "nothing was pinned" in told(capsys, daemon, "unpin", "all")


def test_tokens_name_a_prefix_too(
    daemon: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the tokens given, what is cached in that namespace is kept, and how much that is is said."""
    with Wire(daemon.socket) as wire:
        wire.hello(namespace=Namespace("acme", "m"))
        wire.call(messages.Allocate, wire.namespace, 1, tokens(40, 5000))
        wire.call(messages.Commit, 1, 40)
        wire.call(messages.Free, 1)
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(list(range(5000, 5050))))
    where = ("--tenant", "acme", "--model", "m", "--pool", "default")
    text = told(capsys, daemon, "pin", "--tokens", str(file), *where)
    assert "keeps 40 tokens of 50, as no more is cached" in text
    monkeypatch.setattr("sys.stdin", io.StringIO("5000 5001\n5002"))
    assert rows(capsys, daemon, "pin", "--tokens", "-", *where)[0]["tokens"] == 3
    assert "no such namespace" in told(
        capsys, daemon, "pin", "--tokens", str(file), "--pool", "default", code=2
    )
    assert len(rows(capsys, daemon, "unpin", "all")) == 2


def test_what_is_no_pin_is_refused_before_anything_is_asked(
    daemon: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Half a name, a name without tokens, a file that is none, and one of several pools left open."""
    assert "where the prefix of node 5 ends" in told(capsys, daemon, "pin", "5", code=2)
    assert "goes with --tokens" in told(capsys, daemon, "pin", "--tenant", "acme", code=2)
    assert "not both" in told(capsys, daemon, "pin", "5", "10", "--tokens", "-", code=2)
    assert "cannot read" in told(capsys, daemon, "pin", "--tokens", str(tmp_path / "none"), code=3)
    assert "say which with --pool" in told(capsys, daemon, "pin", "5", "10", code=2)


@pytest.mark.parametrize("text", ["[1, 2, -3]", "1 2 -3", "1\n2\n-3\n", "1,2,-3"])
def test_token_ids_are_read_from_any_list_of_numbers(text: str) -> None:
    """JSON, words, lines: the same three tokens."""
    assert tokens_of(text) == struct.pack("<3i", 1, 2, -3)


@pytest.mark.parametrize("text", ["", "[]", "one two", "1 2 x", '{"tokens": [1]}', "1.5", "4294967296"])
def test_what_is_no_list_of_token_ids_is_refused(text: str) -> None:
    """Words, fractions, nothing, and what no int32 holds."""
    with pytest.raises((ValueError, struct.error)):
        tokens_of(text)


def test_reload_says_what_changed(capsys: pytest.CaptureFixture[str]) -> None:
    """What holds from now on, what needs a restart, and that nothing did; a broken file changes nothing."""
    with running(drain_seconds=2.0) as daemon:
        file = daemon.socket.parent / "kvslot.toml"
        before = file.read_text()
        assert told(capsys, daemon, "reload") == "nothing changed\n"
        file.write_text(before.replace("drain_seconds = 2.0", "drain_seconds = 3.0\nsessions_max = 9"))
        text = told(capsys, daemon, "reload")
        assert "from now on: drain_seconds" in text
        assert "needs a restart: sessions_max" in text
        file.write_text("drain_seconds = 'soon'")
        assert "drain_seconds" in told(capsys, daemon, "reload", code=2)
