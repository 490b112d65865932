"""A daemon that says what a test tells it to: one thread, one connection, one function from message to answers."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from kvslot.api.wire import Reader, decode_request, encode, messages

Answer = msgspec.Struct | bytes | None
"""A message, raw bytes, or the end of the connection."""

POOL = messages.Pool("fake", "token", 64, 16, 16, 1008, 16, False, "f", 4096, 1, "none", [])
LIMITS = messages.Limits(1 << 20, 1 << 20, 10.0, 100, 64)

_number = itertools.count()


def welcome(number: int, **changes: Any) -> messages.Welcome:
    """What a Hello without memory is answered with."""
    plain = messages.Welcome(number, 1, "fake", 7, 1, b"secret", 3, POOL, LIMITS, [])
    return msgspec.structs.replace(plain, **changes)


@contextmanager
def fake(answers: Callable[[Any], Iterator[Answer]]) -> Iterator[tuple[str, list[Any]]]:
    """The socket's path, and the requests as they come; `answers` yields what each is answered with, Hello included."""
    # One of its own each: clients remember where they were not heard.
    path = f"/tmp/kvs-fake-{os.getpid()}-{next(_number)}"
    with suppress(FileNotFoundError):
        os.unlink(path)
    requests: list[Any] = []
    failures: list[BaseException] = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(4)

        def serve() -> None:
            try:
                while True:
                    with listening.accept()[0] as sock:
                        _talk(sock, answers, requests)
            except OSError:
                pass  # closed: the test is over
            except BaseException as error:  # noqa: BLE001 - for the test to raise
                failures.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield path, requests
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            os.unlink(path)
    if failures:
        raise failures[0]


def _talk(sock: socket.socket, answers: Callable[[Any], Iterator[Answer]], requests: list[Any]) -> None:
    reader = Reader()
    with suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            for body in reader.feed(data):
                request = decode_request(body)
                requests.append(request)
                for answer in answers(request):
                    if answer is None:
                        return
                    sock.sendall(answer if isinstance(answer, bytes) else encode(answer))


def polite(request: Any) -> Iterator[Answer]:
    """What a daemon with nothing in it would say."""
    match request:
        case messages.Hello():
            yield welcome(request.id)
        case messages.Probe():
            yield messages.Probed(request.id, 0)
        case messages.Allocate():
            n = len(request.tokens) // 4
            yield messages.Admitted(request.id, 0, n + 16, [16, n + 16])
        case messages.Batch():
            yield messages.Results(request.id, [messages.Done(0) for _ in request.verbs])
        case messages.Ping():
            yield messages.Pong(request.id, 7)
        case _:
            yield messages.Done(request.id)
