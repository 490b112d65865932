"""`kvslotctl doctor` against a running kvslotd, and where none answers: what is done to it is what is found."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvslot.api.wire import COMPLETED, SUBMITTED, messages
from kvslot.cli import checks, ctl, doctor, host, reach

from ..systemd.supervisor import Supervisor
from ..tools.daemon import Running, configuration, running
from ..tools.wire import Wire, tokens


@pytest.fixture(scope="module")
def daemon() -> Iterator[Running]:
    """Two pools; sessions count as stalled soon."""
    with running(pools=[{}, {"name": "other", "blocks": 33}], stall_seconds=0.05) as each:
        yield each


def told(
    capsys: pytest.CaptureFixture[str], where: Running | Path, *argv: str, code: int | None = None
) -> str:
    """What doctor prints."""
    path = where.socket if isinstance(where, Running) else where
    found = ctl.main(["doctor", "--socket", str(path), *argv])
    out, err = capsys.readouterr()
    assert code is None or found == code, out + err
    return out or err


def document(
    capsys: pytest.CaptureFixture[str], where: Running | Path, *argv: str, code: int | None = None
) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(told(capsys, where, *argv, "--json", code=code))
    return found


def found_by(
    capsys: pytest.CaptureFixture[str], where: Running, check: str, code: int | None = None
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = document(capsys, where, check, code=code)["rows"]
    return rows


def test_a_daemon_that_was_just_started_has_no_fault(
    daemon: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every check answers, in its order; of what depends on this machine and its supervisor nothing is asked here."""
    machine = ("memory", "shared_memory", "stopping")
    argv = [word for name in machine for word in ("--skip", name)]
    whole = document(capsys, daemon, *argv, code=0)
    assert list(whole) == ["meta", "worst", "counts", "daemon", "rows"]
    assert whole["daemon"]["state"] == "running"
    assert set(whole["counts"]) == set(checks.VERDICTS)
    assert sum(whole["counts"].values()) == len(whole["rows"])
    names = list(dict.fromkeys(row["check"] for row in whole["rows"]))
    assert names == [name for name in doctor.NAMES if name not in machine]
    assert {tuple(row) for row in whole["rows"]} == {checks.Finding._fields}
    assert not [row for row in whole["rows"] if row["verdict"] in ("fault", "warning", "unknown")]
    text = told(capsys, daemon, *argv, code=0)
    assert re.search(r"^ok +audit +default: recounted", text, re.MULTILINE)
    assert re.search(r"^absent +swap +not there yet", text, re.MULTILINE)
    assert "\x1b" not in text


def test_only_what_is_asked_for_is_looked_at(daemon: Running, capsys: pytest.CaptureFixture[str]) -> None:
    """Names choose, `-` is as good as `_`, --skip leaves out, --quiet says nothing of what is well."""
    rows = document(capsys, daemon, "locked-memory", "versions", "audit", "--skip", "audit")["rows"]
    assert [row["check"] for row in rows] == ["versions", "locked_memory"]
    assert told(capsys, daemon, "versions", "--quiet", code=0) == ""
    assert "did you mean versions?" in told(capsys, daemon, "version", code=2)
    listed = told(capsys, daemon, "--list", code=0)
    assert all(re.search(rf"^{name} ", listed, re.MULTILINE) for name in doctor.NAMES)


def test_a_stalled_session_is_named_with_its_process(
    daemon: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    """A submitted step that does not complete is a warning, and exit code 1."""
    with Wire(daemon.socket) as wire:
        wire.hello("stuck")
        assert wire.page is not None
        wire.page.words[SUBMITTED] = 1
        (row,) = found_by(capsys, daemon, "sessions")
        for _ in range(2000):
            if row["verdict"] == "warning":
                break
            (row,) = found_by(capsys, daemon, "sessions")
        assert row["finding"].startswith("stalled for")
        assert f"(stuck, pid {os.getpid()})" in row["subject"]
        assert str(os.getpid()) in row["remedy"]
        text = told(capsys, daemon, "sessions", code=1)
        assert "do   look at process" in text
        wire.page.words[COMPLETED] = 1
        for _ in range(2000):
            (row,) = found_by(capsys, daemon, "sessions")
            if row["verdict"] == "ok":
                break
        assert row["verdict"] == "ok"


def test_an_open_socket_and_folder_are_found_and_the_remedy_closes_them(
    daemon: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    """S63: what others may write on the way to the socket is a fault; doing as doctor says makes it well again."""
    assert found_by(capsys, daemon, "permissions", code=0)[0]["verdict"] == "ok"
    daemon.socket.chmod(0o666)
    daemon.socket.parent.chmod(0o777)
    rows = found_by(capsys, daemon, "permissions", code=1)
    assert {row["verdict"] for row in rows} == {"fault", "warning"}
    for row in rows:
        if row["remedy"].startswith("chmod "):
            subprocess.run(row["remedy"].partition(",")[0].split(), check=True)
    assert found_by(capsys, daemon, "permissions", code=0)[0]["verdict"] == "ok"


def test_what_a_restart_would_change_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """The file is read again as the daemon would: what a reload takes over is a note, a block size needs a restart."""
    with running(drain_seconds=2.0) as daemon:
        file = daemon.socket.parent / "kvslot.toml"
        before = file.read_text()
        assert found_by(capsys, daemon, "configuration", code=0)[0]["verdict"] == "ok"
        file.write_text(before.replace("drain_seconds = 2.0", "drain_seconds = 3.0"))
        (row,) = found_by(capsys, daemon, "configuration", code=0)
        assert (row["verdict"], row["subject"]) == ("note", "drain_seconds")
        assert ctl.main(["reload", "--socket", str(daemon.socket)]) == 0
        assert "from now on: drain_seconds" in capsys.readouterr().out
        assert found_by(capsys, daemon, "configuration", code=0)[0]["verdict"] == "ok"
        file.write_text(before.replace("block_size = 16", "block_size = 8"))
        (row,) = found_by(capsys, daemon, "block_size", code=1)
        assert row["finding"] == "blocks of 16 run, the configuration says 8 by now"
        file.write_text(before.replace("block_size = 16", "block_size = 0"))
        rows = found_by(capsys, daemon, "configuration", code=1)
        assert "cannot be used" in rows[0]["finding"]
        assert "block_size" in rows[0]["finding"]


def test_a_door_of_the_admin_api_that_is_shut_is_told_and_a_reload_says_what_came_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token file that is missing, then emptied: doctor and reload say so, once each, until it is well."""
    file = tmp_path / "token"
    with running(admin_tcp="127.0.0.1:0", admin_token_file=file) as daemon:
        reload = ["reload", "--socket", str(daemon.socket)]
        (shut,) = found_by(capsys, daemon, "admin", code=1)
        assert shut["subject"] == "admin_tcp"
        assert "there is no such file" in shut["finding"]
        assert ctl.main(reload) == 1
        assert "there is no such file" in capsys.readouterr().err
        file.touch(0o600)
        file.write_text("0123456789abcdef0123456789\n")
        assert ctl.main(reload) == 0
        assert "admin_tcp: served at 127.0.0.1:" in capsys.readouterr().out
        assert found_by(capsys, daemon, "admin", code=0)[0]["verdict"] == "ok"
        file.write_text("")
        (row,) = found_by(capsys, daemon, "admin", code=1)
        assert "holds no token" in row["finding"]
        assert ctl.main([*reload, "--json"]) == 1
        out, err = capsys.readouterr()
        assert (
            "those of before hold on, 1 that may look and 0 that may act"
            in json.loads(out)["rows"][0]["failed"][0]
        )
        assert "those of before hold on" in err


def test_lengths_of_what_ended_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    """Long sequences first, short ones later: the drift is told, and a block size that suits the short ones."""
    with running(pools=[{"blocks": 257}]) as daemon, Wire(daemon.socket) as wire:
        wire.hello()
        number = 0
        for length, times in ((200, 300), (6, 700)):
            for _ in range(times):
                number += 1
                wire.call(messages.Allocate, wire.namespace, number, tokens(length))
                wire.call(messages.Free, number)
        (row,) = found_by(capsys, daemon, "lengths", code=1)
        assert row["finding"].startswith("lengths have drifted since the start (distance 0.")
        assert "half of them end by 6 tokens, 200 at the start" in row["finding"]
        assert row["remedy"].startswith("block_size = 1 in the configuration")


def test_where_nobody_answers_doctor_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No folder, no socket, none of ours, one that was left: exit code 5 each time, and something to do."""
    path = tmp_path / "run" / "s"
    row = document(capsys, path, code=5)["rows"][0]
    assert row["finding"] == f"there is no folder {path.parent}"
    path.parent.mkdir()
    row = document(capsys, path, code=5)["rows"][0]
    assert row["finding"] == "there is no such socket"
    assert "systemctl status" in row["remedy"]
    path.write_text("text")
    assert "no socket" in document(capsys, path, code=5)["rows"][0]["finding"]
    path.unlink()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    row = document(capsys, path, code=5)["rows"][0]
    assert "nobody listens" in row["finding"]
    assert "start it again" in row["remedy"]
    text = told(capsys, path, code=5)
    assert text.startswith(f"no answer from {path}")


def test_a_daemon_that_hangs_is_told_from_one_that_is_gone(
    daemon: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process holds its lock and answers nothing: it is named, and to be continued."""
    monkeypatch.setattr(reach, "SOON_S", 0.3)
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        for _ in range(2000):
            if host.process_state(daemon.pid) == "T":
                break
        row = document(capsys, daemon, code=5)["rows"][0]
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert row["finding"] == f"process {daemon.pid} serves it, and does not answer"
    assert row["reason"] == "it is stopped (state T)"
    assert row["remedy"] == f"kill -CONT {daemon.pid}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_told_what_is_in_the_way(daemon: Running) -> None:
    """Who may not open the socket learns its group; who may, and not look, learns the setting."""
    # Once as who we are: another user may not read the modules of this installation.
    program = (
        "import contextlib, io, os, sys; from kvslot.cli import ctl\n"
        "argv = ['doctor', '--json', '--skip', 'audit', '--socket', sys.argv[1]]\n"
        "with open(os.devnull, 'w') as out, contextlib.redirect_stdout(out): ctl.main(argv)\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534); sys.exit(ctl.main(argv))"
    )

    def as_nobody() -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-Ic", program, str(daemon.socket)], capture_output=True, check=False
        )
        assert done.returncode == 5, done.stderr
        row: dict[str, Any] = json.loads(done.stdout)["rows"][0]
        return row

    folder = daemon.socket.parent
    folder.chmod(0o750)
    row = as_nobody()
    assert f"may not look into {folder}" in row["finding"]
    assert "usermod" not in row["remedy"]  # the group is root's
    os.chown(folder, -1, 54321)
    assert "usermod -aG 54321 nobody" in as_nobody()["remedy"]
    folder.chmod(0o755)
    row = as_nobody()
    assert "may not open it" in row["finding"]
    assert "usermod" not in row["remedy"]  # the group is root's
    assert "socket_group" in row["remedy"]
    os.chown(daemon.socket, -1, 54321)
    row = as_nobody()
    assert "usermod -aG 54321 nobody" in row["remedy"]
    daemon.socket.chmod(0o666)
    try:
        row = as_nobody()
        assert "does not let this user look" in row["finding"]
        assert "control_uids" in row["remedy"]
    finally:
        daemon.socket.chmod(0o660)


def test_under_a_service_manager_a_restart_keeps_what_is_cached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """S41, as an operator sees it: doctor says what a restart would keep, and after it that is there."""
    with tempfile.TemporaryDirectory(prefix="kvs") as name:
        path = Path(name) / "s"
        file = tmp_path / "kvslot.toml"
        file.write_text(configuration(tmp_path / "other", [{}], {"log_format": "json", "drain_seconds": 0.5}))
        command = [sys.executable, "-Im", "kvslot.daemon", "--config", str(file)]
        with Supervisor(command, sockets={"kvslot": path}) as manager:
            manager.start()
            with Wire(path) as wire:
                wire.hello()
                wire.call(messages.Allocate, wire.namespace, 1, tokens(100))
                wire.call(messages.Commit, 1, 100)
                wire.call(messages.Free, 1)
            names = ("restart", "configuration", "permissions")
            for _ in range(2):
                rows = document(capsys, path, *names)["rows"]
                found = {row["check"]: row for row in rows}
                assert found["restart"]["finding"] == "a restart keeps 100 cached tokens"
                assert found["configuration"]["verdict"] == "ok", found
                manager.restart()


# -- what is read on the machine --------------------------------------------------------------------------------------


def test_only_flags_that_settings_come_from_are_passed_on() -> None:
    """A daemon's command line may hold what would write files: nothing of that is run again."""
    words = [
        "python",
        "-m",
        "kvslot.daemon",
        "--config",
        "a.toml",
        "--check-config",
        "--json",
        "/etc/x",
        "--demo",
    ]
    words += ["--json=/etc/y", "--log-level=debug", "--no-prefault", "--print-completion", "bash"]
    assert host.passed_on(words) == ["--config", "a.toml", "--demo", "--log-level=debug", "--no-prefault"]


def test_a_number_that_is_somebody_elses_is_not_taken_for_the_daemon(daemon: Running) -> None:
    """From another container the daemon's number may be another process's, of which nothing is to be believed."""
    assert host.is_daemon(daemon.pid)
    assert not host.is_daemon(os.getpid())
    assert not host.is_daemon(0)
    assert not host.is_daemon(2**22 + 1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1min 30s", 90.0), ("500ms", 0.5), ("2h", 7200.0), ("infinity", None), ("", None), ("90", None)],
)
def test_spans_are_read_as_systemd_prints_them(text: str, seconds: float | None) -> None:
    """A number without a unit, and no limit at all, are no span."""
    assert host.seconds_of(text) == seconds


def test_a_file_is_described_without_following_links(tmp_path: Path) -> None:
    """A link in the socket's place is a link, whatever it points to; what is not there is missing."""
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert host.place(tmp_path / "link").kind == "link"
    assert host.place(tmp_path / "none").kind == "missing"
    assert host.place(tmp_path).kind == "folder"
    found = host.folders(str(tmp_path / "x"))
    assert found[0].path == os.path.realpath(tmp_path)
    assert found[-1].path == "/"
