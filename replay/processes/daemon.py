"""A kvslotd of one's own for the time of a replay: a child process with a private socket in a temporary folder."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvslot.api.client import Control
from kvslot.api.wire import KvslotError
from kvslot.replay.engine import ReplayConfig

SOCKET_PATH_MAX: Final = 100  # bytes; the kernel's limit is a little more
START_S: Final = 30.0
STOP_S: Final = 5.0

# The child ends with its parent, however that ends (prctl, PR_SET_PDEATHSIG); what it is made into keeps that.
_WRAP: Final = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.executable, sys.argv[1:])"
)


class DaemonFault(RuntimeError):
    """The daemon did not start, or ended by itself; the text has the end of its log."""


@contextmanager
def folder() -> Iterator[Path]:
    """A private folder with a short name, gone afterwards."""
    made = tempfile.mkdtemp(prefix="kvslot-")
    if len(made) + 10 > SOCKET_PATH_MAX:
        shutil.rmtree(made)
        made = tempfile.mkdtemp(prefix="kvslot-", dir="/tmp")
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def running(where: Path, config: ReplayConfig) -> Iterator[str]:
    """A daemon with one pool as the run says, of two planes of 8 bytes a slot; the path of its socket."""
    socket, log = where / "socket", where / "daemon.log"
    (where / "kvslot.toml").write_text(_configuration(socket, config), encoding="utf-8")
    command = [sys.executable, "-Im", "kvslot.daemon", "--config", str(where / "kvslot.toml")]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-ISc", _WRAP, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt from the keyboard is for the parent to handle
        )
    try:
        _wait(process, str(socket), log)
        yield str(socket)
        if process.poll() is not None:
            raise DaemonFault(f"the daemon ended by itself, with {process.returncode}: {_tail(log)}")
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a child: first as asked, then for certain."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def _wait(process: subprocess.Popen[bytes], socket: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            with Control(socket) as control:
                control.ping()
            return
        except KvslotError:
            pass
        if process.poll() is not None:
            raise DaemonFault(f"the daemon did not start ({process.returncode}): {_tail(log)}")
        if time.monotonic() > end:
            raise DaemonFault(f"the daemon was not there within {START_S:g} s: {_tail(log)}")
        time.sleep(0.01)


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-2000:].strip() or "it said nothing"


def _configuration(socket: Path, config: ReplayConfig) -> str:
    return f"""\
socket = "{socket}"
socket_mode = 0o600
log_format = "json"
log_level = "warning"
drain_seconds = 1.0
compaction = "{config.compaction}"

[[pool]]
name = "replay"
blocks = {config.pool_tokens // config.block_size}
block_size = {config.block_size}
watermark = {config.watermark!r}
eviction = "{config.eviction}"
layout = {{ layers = 1, kv_heads = 1, head_dim = 2, dtype = "float32" }}
"""
