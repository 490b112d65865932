"""A TCP port of this machine that leads to a Unix socket, as `ssh -L PORT:/run/kvslot/admin.sock` makes one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def forwarded(path: Path) -> Iterator[str]:
    """Its address, `http://127.0.0.1:PORT`."""
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = [listener]
    threads: list[threading.Thread] = []

    def start(work: threading.Thread) -> None:
        threads.append(work)
        work.start()

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            ends.extend((near, far))
            try:
                far.connect(str(path))
            except OSError:
                near.close()
                continue
            for source, target in ((near, far), (far, near)):
                start(threading.Thread(target=pump, args=(source, target)))

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                target.sendall(content)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    start(threading.Thread(target=accept))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in threads:
            thread.join(10)
