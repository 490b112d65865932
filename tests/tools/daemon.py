"""Runs a real `kvslotd` process for a test, and takes it down again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POOL: dict[str, Any] = {"name": "default", "blocks": 65, "block_size": 16}
LAYOUT = {"layers": 2, "kv_heads": 1, "head_dim": 8, "dtype": "float32"}
START_SECONDS = 20.0


@dataclass
class Running:
    """A daemon that accepts connections."""

    socket: Path
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    def descriptors(self) -> int:
        """How many it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def rss_kib(self) -> int:
        """Its resident memory, the pool's shared pages left out: those are mapped twice, and touched as it is used."""
        with open(f"/proc/{self.pid}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

    def stop(self, seconds: float = 10.0) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, Path)):
        return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    return "[" + ", ".join(_toml(each) for each in value) + "]"


def configuration(socket: Path, pools: list[dict[str, Any]], settings: dict[str, Any]) -> str:
    """A configuration file's text."""
    lines = [f"{key} = {_toml(value)}" for key, value in {"socket": socket, **settings}.items()]
    for pool in pools:
        lines += ["", "[[pool]]"]
        whole = {**POOL, "layout": LAYOUT, **pool}
        if "size" in pool:
            whole.pop("blocks", None)
        if "model_config" in pool or "opaque_block_bytes" in pool:
            del whole["layout"]
        lines += [f"{key} = {_toml(value)}" for key, value in whole.items()]
    return "\n".join(lines) + "\n"


@contextmanager
def running(
    *,
    pools: list[dict[str, Any]] | None = None,
    code: int | None = 0,
    env: dict[str, str] | None = None,
    first: str = "",
    faulty: bool = False,
    **settings: Any,
) -> Iterator[Running]:
    """A daemon with these settings over sensible small ones; stopped, and its exit code and log looked at, at the end.

    `code`: the exit code it must end with, None for any.  `first`: what its interpreter does before it is a daemon.
    Sockets lie in a folder with a short name.  `faulty`: it is made to fail, and may say so in its log.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvs"))
    try:
        socket = Path(settings.pop("socket", folder / "s"))
        file = folder / "kvslot.toml"
        settings = {"log_format": "json", "drain_seconds": 2.0, **settings}
        file.write_text(configuration(socket, pools if pools is not None else [{}], settings))
        main = "from kvslot.daemon.main import main; raise SystemExit(main())"
        program = ["-Ic", f"{first}\n{main}"] if first else ["-Im", "kvslot.daemon"]
        log = folder / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *program, "--config", str(file)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )
        daemon = Running(socket, process, log)
        try:
            _wait(daemon)
            yield daemon
            if process.poll() is None and code is not None:
                ended = daemon.stop()
                assert ended == code, f"ended with {ended}:\n{daemon.text()}"
            text = daemon.text()
            assert faulty or "internal_fault" not in text, text
            assert faulty or "Traceback" not in text, text
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(daemon: Running) -> None:
    deadline = time.monotonic() + START_SECONDS
    while '"ready"' not in daemon.text():
        if daemon.process.poll() is not None:
            raise AssertionError(f"kvslotd ended with {daemon.process.returncode}:\n{daemon.text()}")
        if time.monotonic() > deadline:
            raise AssertionError(f"kvslotd was not ready in {START_SECONDS} s:\n{daemon.text()}")
        time.sleep(0.01)
