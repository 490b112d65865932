"""`kvslotd` as a process: what it prints, and with which code it ends."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from kvslot import __version__

POOL = '[[pool]]\nsize = "1MiB"\nlayout = { layers = 2, kv_heads = 1, head_dim = 16, dtype = "fp16" }\n'
HUGE = '[[pool]]\nsize = "60TiB"\nlayout = { layers = 1, latent = 65536, dtype = "fp32" }\n'


def kvslotd(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs it to its end, with these variables beside the least that it needs."""
    return subprocess.run(
        [sys.executable, "-Im", "kvslot.daemon", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], **environ},
        timeout=60,
        check=False,
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "k.toml"
    path.write_text('socket = "s"\n' + POOL)
    return path


def test_check_config(file: Path) -> None:
    """It prints the effective configuration, as one that can be read again, and what the pool comes to."""
    done = kvslotd("--config", file, "--check-config", KVSLOT_LOG_LEVEL="debug")
    assert (done.returncode, done.stderr) == (0, "")
    tree = tomllib.loads(done.stdout)
    assert tree["socket"] == str(file.parent / "s")
    assert tree["log_level"] == "debug"
    assert tree["pool"][0]["size"] == "1MiB"
    assert "128 bytes per token in 4 planes" in done.stdout
    assert "512 blocks of 16 slots, 8,176 slots to use" in done.stdout
    assert "# environment KVSLOT_LOG_LEVEL" in done.stdout


def test_check_config_as_json(file: Path) -> None:
    """The same for scripts, to standard output or beside the text to a file."""
    done = kvslotd("--config", file, "--check-config", "--json", "--block-size", "32")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["ok"]
    assert result["problems"] == result["warnings"] == []
    assert result["settings"]["pools"][0]["block_size"] == 32
    assert result["origins"]["pool.default.block_size"] == "flag --block-size"
    assert result["pools"][0]["slot_bytes"] == 128
    assert result["pools"][0]["blocks"] == 256
    assert result["pools"][0]["size_bytes"] == 1 << 20
    assert result["memory"]["total_bytes"] > 0
    done = kvslotd("--config", file, "--check-config", "--json", file.parent / "out" / "r.json")
    assert "[[pool]]" in done.stdout
    assert json.loads((file.parent / "out" / "r.json").read_text())["ok"]


def test_check_config_with_problems(file: Path) -> None:
    """Every problem is on standard error and in the JSON, and the code is 2."""
    file.write_text("sesions_max = 3\n" + POOL + "watermark = 7\n")
    done = kvslotd("--config", file, "--check-config", "--json")
    assert done.returncode == 2
    result = json.loads(done.stdout)
    assert not result["ok"]
    assert len(result["problems"]) == 2
    whole = json.loads(kvslotd("--demo", "--check-config", "--json").stdout)
    assert list(result) == list(whole), "the same keys either way"
    assert (result["settings"], result["origins"], result["pools"]) == (None, {}, [])
    assert result["memory"]["total_bytes"] == whole["memory"]["total_bytes"]
    assert done.stderr.splitlines() == [f"kvslotd: {problem}" for problem in result["problems"]]


def test_memory_that_no_such_machine_has(file: Path) -> None:
    """A pool larger than the machine is a problem at the check and at the start, before anything is made."""
    file.write_text('socket = "s"\n' + HUGE)
    done = kvslotd("--config", file, "--check-config")
    assert done.returncode == 2
    assert "the pools want 60 TiB (default 60 TiB), and " in done.stderr
    done = kvslotd("--config", file)
    assert done.returncode == 2
    assert "the pools want 60 TiB" in done.stderr
    assert not (file.parent / "s").exists()


def test_strange_variables_are_warned_of(file: Path) -> None:
    """A variable that is nearly a setting does not pass unseen."""
    done = kvslotd("--config", file, "--check-config", KVSLOT_LOGLEVEL="debug", KVSLOT_CONFIG="none")
    assert done.returncode == 0
    assert done.stderr == "kvslotd: warning: KVSLOT_LOGLEVEL is not a setting: KVSLOT_LOG_LEVEL is\n"
    done = kvslotd("--config", file, "--block-size", "x", KVSLOT_LOGLEVEL="debug")
    assert done.returncode == 2
    warned, problem = done.stderr.splitlines()
    assert warned == "kvslotd: warning: KVSLOT_LOGLEVEL is not a setting: KVSLOT_LOG_LEVEL is"
    assert "block_size" in problem


def test_what_the_demo_sets_comes_from_the_demo() -> None:
    """Origins name the flags that were given: --demo, --no-prefault, and one that overrides the demo."""
    done = kvslotd("--demo", "--no-prefault", "--pool-size", "32MiB", "--check-config", "--json")
    origins = json.loads(done.stdout)["origins"]
    assert origins == {
        "prefault": "flag --no-prefault",
        "pool.demo.name": "flag --demo",
        "pool.demo.size": "flag --pool-size",
        "pool.demo.layout": "flag --demo",
    }


INSTEAD = "write it in the file, or set KVSLOT_"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--bogus"], "there is no option --bogus"),
        (["--log-levl=debug"], "there is no option --log-levl; did you mean --log-level=debug?"),
        (
            ["--compaction", "off"],
            f"there is no option --compaction; compaction is a setting: {INSTEAD}COMPACTION in the environment",
        ),
        (
            ["--pool-quota=4"],
            f"there is no option --pool-quota; quota is a setting: {INSTEAD}POOL_QUOTA in the environment",
        ),
        (["--demo", "serve"], "'serve' is one argument too many"),
        (["--config"], "argument --config: expected one argument"),
    ],
)
def test_wrong_usage_is_two_lines(arguments: list[str], told: str) -> None:
    """What is wrong and where the help is, as kvslotctl tells it; not a screenful of usage."""
    done = kvslotd(*arguments)
    assert (done.returncode, done.stderr) == (2, f"kvslotd: {told}\nSee kvslotd --help\n")


def test_configuration_from_the_environment(file: Path) -> None:
    """KVSLOT_CONFIG names the file where no flag does."""
    done = kvslotd("--check-config", KVSLOT_CONFIG=str(file))
    assert done.returncode == 0
    assert f"# {file}" in done.stdout


def test_without_any_pool() -> None:
    """Without a pool it says that one is needed, and how a configuration looks."""
    done = kvslotd()
    assert done.returncode == 2
    assert "no pool is configured" in done.stderr
    assert "[[pool]]" in done.stderr
    assert "--demo" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json"],
        ["--demo", "--config", "x.toml"],
        ["--config", "none.toml"],
        ["--pool-size", "x"],
        ["--bogus"],
        ["x"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    """Flags that do not go together, or are not there, end with 2 and a word on why, never with a traceback."""
    done = kvslotd(*arguments)
    assert done.returncode == 2
    assert "kvslotd: " in done.stderr
    assert "Traceback" not in done.stderr


def test_version_help_and_completion() -> None:
    """It says its version, helps with examples, and completes in the shell."""
    assert kvslotd("--version").stdout == f"kvslotd {__version__}\n"
    done = kvslotd("--help")
    assert "examples:" in done.stdout
    assert "exit codes:" in done.stdout
    assert " 130  interrupted" in done.stdout
    assert "(debug info warning error)" in kvslotd("--print-completion", "zsh").stdout
    assert "--check-config" in kvslotd("--print-completion", "bash").stdout


@pytest.mark.parametrize("closed", [">&-", "2>&-", "0<&- >&- 2>&-"])
def test_closed_standard_streams(file: Path, closed: str) -> None:
    """Started with standard streams closed it does its work, and no file of its own takes their numbers."""
    command = f'exec "$0" -Im kvslot.daemon --config "$1" --check-config --json "$2" {closed}'
    out = file.parent / "r.json"
    done = subprocess.run(["sh", "-c", command, sys.executable, file, out], timeout=60, check=False)
    assert done.returncode == 0
    assert json.loads(out.read_text())["ok"]
    command = f'exec "$0" -Im kvslot.daemon --config "$1" {closed}'
    process = subprocess.Popen(["sh", "-c", command, sys.executable, file])
    try:
        deadline = time.monotonic() + 30
        while not (file.parent / "s").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        standard = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)]
        assert not any("memfd" in each or "socket" in each for each in standard)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_demo_serves(tmp_path: Path) -> None:
    """`--demo` serves a small pool until it is told to end, with logs in JSON lines where nobody watches."""
    path = tmp_path / "s"
    process = subprocess.Popen(
        [sys.executable, "-Im", "kvslot.daemon", "--demo", "--socket", str(path)],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        deadline = time.monotonic() + 30
        events: list[str] = []
        while "ready" not in events:
            assert time.monotonic() < deadline
            line = process.stderr.readline()
            assert line, f"ended after {events}"
            events.append(json.loads(line)["event"])
        assert path.is_socket()
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(30) == 0
        assert all(json.loads(line)["level"] == "info" for line in rest.splitlines())
        assert not path.exists()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
