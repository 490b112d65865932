"""The shipped units, read by systemd's own tools; none of them is ever started by systemd here (S63)."""

from __future__ import annotations

import json
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

import pytest

from kvslot.api.wire.messages import Ping, Pong
from kvslot.daemon import config
from kvslot.daemon.notify import NAME_BYTES, STORED_MAX
from kvslot.daemon.server import DESCRIPTORS_EACH
from kvslot.daemon.service import STOP_SECONDS
from kvslot.systemd import DROP_INS, FILES, PROGRAM, drop_in, text
from kvslot.systemd.install import main

from ..household.tree import ROOT
from ..tools.wire import Wire

UNITS = ("kvslotd.socket", "kvslotd@.socket", "kvslotd@.service")
LONG = 30.0


def tool(name: str) -> str:
    """A program of systemd's; skips the test where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*command: str, code: int | None = 0, **environ: str) -> str:
    """Output and errors of a command that must end with `code`; None: with any."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LONG, check=False, env={**os.environ, **environ}
    )
    said = done.stdout + done.stderr
    assert code is None or done.returncode == code, f"{command}: {done.returncode}\n{said}"
    return said


def unit(name: str) -> dict[str, dict[str, list[str]]]:
    """A unit's settings: section, key, all values in order."""
    sections: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in text(name).splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith(("#", ";")):
            key, _, value = line.partition("=")
            section.setdefault(key, []).append(value)
    return sections


def seconds(value: str) -> float:
    """Of a time span as the units write them."""
    found = re.fullmatch(r"(\d+)(ms|s|min)?", value)
    assert found is not None, value
    return float(found[1]) * {"ms": 1e-3, None: 1.0, "s": 1.0, "min": 60.0}[found[2]]


@pytest.fixture
def machine() -> Iterator[Path]:
    """A folder as the root of a machine, with a kvslotd and units installed as documented."""
    with tempfile.TemporaryDirectory(prefix="kvr") as name:
        root = Path(name)
        program = root / PROGRAM.lstrip("/")
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        for each in ("bin/kill", "usr/bin/install", "usr/bin/kill"):
            (root / each).parent.mkdir(parents=True, exist_ok=True)
            (root / each).write_text("#!/bin/sh\n")
            (root / each).chmod(0o755)
        (root / "etc").mkdir()
        assert main(["--root", name, "--program", PROGRAM]) == 0
        yield root


# -- what the units say -----------------------------------------------------------------------------------------------


def verified(machine: Path, *names: str) -> str:
    """What systemd-analyze says of units in the machine; "" where it has nothing to say."""
    folder = machine / "etc/systemd/system"
    for name in ("sysinit", "basic", "shutdown", "sockets", "multi-user"):  # what every machine has
        (folder / f"{name}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    units = [str(folder / each) for each in names]
    return run(tool("systemd-analyze"), "verify", "--man=no", f"--root={machine}", *units, code=None)


def test_S63_systemd_has_nothing_to_say_about_the_units(machine: Path) -> None:
    """Every unit and drop-in is understood as it stands; a misspelt key or a missing program would be told."""
    for name in DROP_INS:
        assert main(["--root", str(machine), "--program", PROGRAM, "--drop-in", f"{name}:gpu0"]) == 0
    names = ("kvslotd.socket", "kvslotd@gpu0.socket", "kvslotd@gpu0.service", "kvslotd@default.service")
    service = machine / "etc/systemd/system/kvslotd@.service"
    assert verified(machine, *names) == ""
    service.write_text(service.read_text().replace("WatchdogSec=", "WatchdogSecs="))
    assert "WatchdogSecs" in verified(machine, *names)
    service.write_text(service.read_text().replace("WatchdogSecs=", "WatchdogSec="))
    (machine / PROGRAM.lstrip("/")).unlink()
    assert "kvslotd" in verified(machine, *names)


def exposure(path: Path) -> float:
    said = run(
        tool("systemd-analyze"), "security", "--offline=true", "--no-pager", "--threshold=100", str(path)
    )
    found = re.search(r"exposure level for \S+: ([\d.]+)", said)
    assert found is not None, said
    return float(found[1])


def test_the_unit_for_plain_memory_can_do_little(machine: Path) -> None:
    """Its exposure is 2.0 of 10 at the most; without its hardening it would not be."""
    service = machine / "etc/systemd/system/kvslotd@.service"
    assert exposure(service) <= 2.0
    service.write_text(service.read_text().partition("# -- what it cannot do")[0])
    assert exposure(service) > 5.0


def test_every_loosening_for_gpus_is_explained() -> None:
    """Each line of gpu.conf that takes something back is below its reason, and the unit names it where it is set."""
    service, known = text("kvslotd@.service"), unit("kvslotd@.service")["Service"]
    reasons = [line for line in service.splitlines() if line.startswith("# GPU:")]
    for key, values in unit("gpu.conf")["Service"].items():
        lines = text("gpu.conf").splitlines()
        for value in values:
            at = lines.index(f"{key}={value}")
            above = [line for line in lines[:at] if line][-1]
            assert above.startswith("#") or above.partition("=")[0] in ("PrivateDevices", "DeviceAllow"), key
        if key in known and key not in ("SupplementaryGroups", "TimeoutStartSec"):
            word = values[0] if values[0].startswith("@") else key
            assert any(word in line for line in reasons), f"{key} is loosened, and the unit does not say so"
    assert unit("admin-tcp.conf")["Service"]["IPAddressAllow"] == ["localhost"]
    assert known["IPAddressDeny"] == ["any"]


def test_S57_a_drain_ends_before_the_manager_loses_patience() -> None:
    """The default drain and the clean-up fit into TimeoutStopSec, with room for a slow machine."""
    limit = seconds(unit("kvslotd@.service")["Service"]["TimeoutStopSec"][0])
    assert config.Settings().drain_seconds + STOP_SECONDS <= 0.6 * limit


def test_limits_suffice_for_the_most_that_can_be_configured() -> None:
    """Descriptors for all sessions there may be, as many stored as the daemon stores, memory that may be locked."""
    service = unit("kvslotd@.service")["Service"]
    assert int(service["LimitNOFILE"][0]) >= DESCRIPTORS_EACH * config.SETTINGS["sessions_max"].high
    assert int(service["FileDescriptorStoreMax"][0]) == STORED_MAX
    assert STORED_MAX * (NAME_BYTES + 1) < 128 << 10
    assert service["LimitMEMLOCK"] == ["infinity"]
    assert service["Type"] == ["notify"]
    assert service["NotifyAccess"] == ["main"]
    assert service["RestartPreventExitStatus"] == ["2 3"]
    assert 2 <= seconds(service["WatchdogSec"][0]) <= 60


def test_S63_who_may_connect() -> None:
    """Sockets are the engines' group's and nobody else's; their folder is the daemon's before a socket lies in it."""
    for name in ("kvslotd.socket", "kvslotd@.socket"):
        door = unit(name)["Socket"]
        assert (door["SocketUser"], door["SocketGroup"]) == (["kvslot"], ["kvslot-engine"])
        assert door["SocketMode"] == ["0660"]
        folder = str(Path(door["ListenStream"][0]).parent)
        (made,) = door["ExecStartPre"]
        assert made.split()[:7] == "/usr/bin/install -d -o kvslot -g kvslot -m".split()
        assert folder in made.split()
    service = unit("kvslotd@.service")["Service"]
    assert service["RuntimeDirectory"] == ["kvslot kvslot/%i"]
    assert service["RuntimeDirectoryPreserve"] == ["yes"], "others' sockets are in it"
    assert (
        service["Environment"][0] == "KVSLOT_SOCKET=" + unit("kvslotd@.socket")["Socket"]["ListenStream"][0]
    )
    made = next(
        line for line in text("kvslot.tmpfiles").splitlines() if line.startswith("d     /run/kvslot ")
    )
    assert made.split()[2:5] == ["0755", "kvslot", "kvslot"]
    said = text("default.toml")
    assert 'socket_group = "kvslot-engine"' in said
    groups = re.findall(r"^g +(\S+)", text("kvslot.sysusers"), re.MULTILINE)
    assert set(groups) == {"kvslot-engine", "kvslot-admin"}
    for group in re.findall(r'"(kvslot-\w+)"', said):
        assert group in groups


def test_the_first_settings_can_be_used() -> None:
    """The settings that are installed to begin with are complete: with groups that are there, nothing is wrong."""
    with tempfile.TemporaryDirectory(prefix="kvs") as name:
        file = Path(name) / "default.toml"
        file.write_text(text("default.toml").replace("kvslot-engine", "root").replace("kvslot-admin", "root"))
        assert config.load(file, {}).pools[0].name == "default"


# -- installing -------------------------------------------------------------------------------------------------------


def test_installed_on_a_clean_machine(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Units, users and folders go where systemd's tools find them: each of them does its part on that root."""
    for file in FILES:
        assert (machine / file.target).stat().st_mode & 0o777 == 0o644
        assert (machine / file.target).read_text() == text(file.name)
    if os.geteuid() == 0:
        run(tool("systemd-sysusers"), f"--root={machine}", "kvslot.conf")
        users = {
            line.split(":")[0]: line.split(":") for line in (machine / "etc/passwd").read_text().splitlines()
        }
        groups = {
            line.split(":")[0]: line.split(":")[3]
            for line in (machine / "etc/group").read_text().splitlines()
        }
        assert users["kvslot"][-1].endswith("nologin")
        assert groups["kvslot-engine"] == groups["kvslot-admin"] == "kvslot"
        run(tool("systemd-tmpfiles"), f"--root={machine}", "--create", "kvslot.conf")
        made = (machine / "run/kvslot").stat()
        assert (made.st_uid, made.st_mode & 0o777) == (int(users["kvslot"][2]), 0o755)
    names = ("kvslotd.socket", "kvslotd@default.service", "kvslotd@gpu0.socket")
    run(tool("systemctl"), f"--root={machine}", "enable", *names)
    wants = machine / "etc/systemd/system"
    assert (wants / "sockets.target.wants/kvslotd.socket").is_symlink()
    assert (wants / "sockets.target.wants/kvslotd@gpu0.socket").is_symlink()
    assert (wants / "multi-user.target.wants/kvslotd@default.service").is_symlink()
    capsys.readouterr()


def test_installed_again_keeps_what_is_the_operators(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second time units are replaced and settings are not; what is removed is what was put there."""
    settings = machine / "etc/kvslot/default.toml"
    settings.write_text("# mine\n")
    service = machine / "etc/systemd/system/kvslotd@.service"
    service.write_text("of old\n")
    command = ["--root", str(machine), "--program", "/srv/kv/bin/kvslotd", "--drop-in", "gpu:gpu0"]
    capsys.readouterr()
    assert main(command) == 0
    told = capsys.readouterr().out
    assert re.search(rf"^replaced +{service}$", told, re.MULTILINE)
    assert re.search(rf"^kept +{settings}$", told, re.MULTILINE)
    assert "There is no /srv/kv/bin/kvslotd" in told
    assert "ExecStart=/srv/kv/bin/kvslotd --config" in service.read_text()
    assert settings.read_text() == "# mine\n"
    own = service.with_name("kvslotd@gpu0.service.d") / "own.conf"
    own.write_text("[Service]\n")
    assert main([*command, "--remove"]) == 0
    left = {str(each.relative_to(machine)) for each in (machine / "etc").rglob("*") if each.is_file()}
    assert left == {"etc/kvslot/default.toml", str(own.relative_to(machine))}
    capsys.readouterr()


def test_what_is_removed_leaves_what_is_the_operators_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drop-ins of ours go with the units, for whatever instance; what others put beside them is left, and named."""
    root = ["--root", str(tmp_path)]
    units = tmp_path / "etc/systemd/system"
    assert main([*root, "--drop-in", "gpu:gpu0", "--drop-in", "admin-tcp:gpu0", "--drop-in", "gpu:gpu1"]) == 0
    ours = [
        units / f"kvslotd@gpu{n}.service.d" / name for n, name in ((0, "admin-tcp.conf"), (1, "gpu.conf"))
    ]
    ours[1].write_text(text("gpu.conf") + "# of an older version\n")
    mine = [
        units / "kvslotd@gpu0.service.d/override.conf",
        units / "kvslotd@other.service.d/gpu.conf",  # the name is ours, the file is not
        units / "kvslotd@.service.d/memory.conf",
        units / "kvslotd.socket.d/group.conf",
        tmp_path / "etc/kvslot/gpu0.toml",
    ]
    for each in mine:
        each.parent.mkdir(exist_ok=True)
        each.write_text("# mine\n")
    link = units / "sockets.target.wants/kvslotd.socket"
    link.parent.mkdir()
    link.symlink_to("../kvslotd.socket")
    stranger = units / "kvslotdash.service.d/own.conf"
    stranger.parent.mkdir()
    stranger.write_text("# not of kvslot\n")
    capsys.readouterr()
    assert main([*root, "--remove"]) == 0
    told = capsys.readouterr().out
    assert {each for each in (tmp_path / "etc").rglob("*") if each.is_file()} == {
        *mine, stranger, tmp_path / "etc/kvslot/default.toml",
    }  # fmt: skip
    assert not ours[1].parent.exists()
    for each in ours:
        assert re.search(rf"^removed +{re.escape(str(each))}$", told, re.MULTILINE)
    for each in (*mine, tmp_path / "etc/kvslot/default.toml"):
        assert re.search(rf"^left +{re.escape(str(each))}$", told, re.MULTILINE)
    assert str(stranger) not in told
    assert f"systemctl --root={tmp_path} disable kvslotd.socket\n" in told
    # Once more: nothing is left to be removed.
    assert main([*root, "--remove"]) == 0
    assert not re.search(r"^removed", capsys.readouterr().out, re.MULTILINE)


def test_an_upgrade_says_which_drop_ins_are_of_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Units are replaced; a drop-in of ours that is not this version's is named with what replaces it."""
    root = ["--root", str(tmp_path)]
    assert main([*root, "--drop-in", "gpu:gpu0", "--drop-in", "gpu:gpu1"]) == 0
    old = tmp_path / "etc/systemd/system/kvslotd@gpu0.service.d/gpu.conf"
    old.write_text(text("gpu.conf") + "# of an older version\n")
    capsys.readouterr()
    assert main(root) == 0
    told = capsys.readouterr().out
    assert re.search(
        rf"^differs +{re.escape(str(old))}, which --drop-in gpu:gpu0 replaces$", told, re.MULTILINE
    )
    assert "gpu1" not in told
    assert main([*root, "--drop-in", "gpu:gpu0"]) == 0
    assert old.read_text() == text("gpu.conf")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--drop-in", "tpu:x"], "there are gpu, admin-tcp"),
        (["--drop-in", "gpu"], "no name of an instance"),
        (["--drop-in", "gpu:../../x"], "no name of an instance"),
        (["--program", "kvslotd"], "an absolute path"),
        (["--program", "/a b"], "an absolute path"),
        (["--print", "other"], "there are kvslotd.socket"),
    ],
)
def test_what_cannot_be_installed_is_said(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong usage is told in words, with 2, before anything is written."""
    with pytest.raises(SystemExit) as ended:
        main(["--root", str(tmp_path), *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_program_that_the_sandbox_hides_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An environment in a home or a temporary folder would not be found by the daemon, and the installer says so."""
    assert main(["--root", str(tmp_path), "--program", "/" + "home/me/venv/bin/kvslotd"]) == 0
    assert "hides what is in /home" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert main(["--root", str(tmp_path / "file")]) == 1
    assert "Not a directory" in capsys.readouterr().err
    assert main(["--print", "gpu.conf"]) == 0
    assert capsys.readouterr().out == text("gpu.conf")
    with pytest.raises(ValueError, match="no name of an instance"):
        drop_in("gpu", "a/b")


# -- activation by systemd's own tool ---------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["kvslot", "", "kvslot:kvslotd@gpu0.socket"])
def test_activated_by_systemd_socket_activate(names: str) -> None:
    """systemd's tool makes the sockets and starts the daemon at the first connection, which is then served."""
    program = tool("systemd-socket-activate")
    with tempfile.TemporaryDirectory(prefix="kvs", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        paths = [folder / f"s{index}" for index in range(names.count(":") + 1)]
        log = folder / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [
                    *(program, *(f"--listen={path}" for path in paths)),
                    *([f"--fdname={names}"] if names else []),
                    *(sys.executable, "-Im", "kvslot.daemon", "--demo", "--log-format", "json"),
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": name},
            )
        try:
            until = time.monotonic() + LONG
            for path in paths:
                while (found := _connected(path)) is None:
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < until
                    time.sleep(0.005)
                with found as wire:
                    assert isinstance(wire.call(Ping), Pong)
            process.send_signal(signal.SIGTERM)
            assert process.wait(LONG) == 0, log.read_text()
            assert all(path.exists() for path in paths), "they are the manager's"
            (ready,) = [json.loads(line) for line in log.read_text().splitlines() if '"ready"' in line]
            assert ready["socket"] == str(paths[0])
            assert "Traceback" not in log.read_text()
        finally:
            process.kill()
            process.wait()


def _connected(path: Path) -> Wire | None:
    """None while nobody listens: the file is there a moment before."""
    try:
        return Wire(path, timeout=LONG)
    except (FileNotFoundError, ConnectionRefusedError):
        return None


def test_the_readme_speaks_of_what_there_is() -> None:
    """Every file that systemd/README.md names is there, and every file there is is named."""
    said = (ROOT / "systemd/README.md").read_text(encoding="utf-8")
    for file in FILES:
        assert f"`{file.name}`" in said, file.name
    for name in DROP_INS:
        assert f"`{name}.conf`" in said, name
