"""A recording in progress is seen by everybody who looks: the views, the page, `kvslotctl status`, and the log."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvslot.api.wire import messages
from kvslot.api.wire.messages import Allocate, Free, Record
from kvslot.cli import ctl

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens
from .http import Client


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    with running(pools=[{}, {"name": "other"}]) as daemon:
        yield daemon


def test_it_is_told_which_pool_is_recorded_by_whom_since_when(
    daemon: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    """As long as it lasts, with requests so far and whether tokens are taken; the log has both ends."""
    with Client(daemon.socket.with_name("admin.sock")) as client, Wire(daemon.socket) as recorder:
        assert client.get("/v1/stats").json()["recordings"] == []
        assert "recorded" not in status(daemon, capsys)
        recorder.call(Record, "start", "default")
        with Wire(daemon.socket) as wire:
            wire.hello("engine")
            for number in range(3):
                assert isinstance(wire.call(Allocate, wire.namespace, number, tokens(20)), messages.Admitted)
                wire.call(Free, number)
        (row,) = client.get("/v1/stats").json()["recordings"]
        assert 0 <= row.pop("age_s") < 600
        peer = {"pid": row.pop("pid"), "uid": row.pop("uid")}
        assert all(isinstance(each, int) and each >= 0 for each in peer.values())
        assert row.pop("waiting_bytes") > 0
        assert row == {
            "pool": "default", "values": False, "requests": 3, "lost_requests": 0, "lost_tokens": 0,
        }  # fmt: skip
        assert f"pool default is recorded by process {peer['pid']}, since 0 s" in status(daemon, capsys)
        assert "pool default, by process" in client.get("/plain").body.decode()
        assert recorder.call(Record, "stop").more is False
        assert client.get("/v1/stats").json()["recordings"] == []
        assert "recorded" not in status(daemon, capsys)
    events = [line for line in daemon.text().splitlines() if '"recording_' in line]
    assert ["recording_started" in line for line in events] == [True, False]


def test_a_recorder_that_has_gone_records_nothing(daemon: Running) -> None:
    """It belongs to its connection, and is not shown any longer than that."""
    with Client(daemon.socket.with_name("admin.sock")) as client:
        with Wire(daemon.socket) as recorder:
            recorder.call(Record, "start", "other", True)
            (row,) = client.get("/v1/stats").json()["recordings"]
            assert (row["pool"], row["values"]) == ("other", True)
        with Wire(daemon.socket) as after:  # whatever it is answered, the end of the other has been seen
            after.call(messages.Ping)
        assert client.get("/v1/stats").json()["recordings"] == []


def status(daemon: Running, capsys: pytest.CaptureFixture[str]) -> str:
    assert ctl.main(["status", "--socket", str(daemon.socket)]) == 0
    return capsys.readouterr().out
