"""A plain HTTP client for tests: over a Unix socket or TCP, and one that says just the bytes it is told to."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

SECONDS = 20.0


class Answer(msgspec.Struct, frozen=True):
    """What came back."""

    status: int
    headers: Mapping[str, str]
    """By names in lower case."""
    body: bytes

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def code(self) -> str:
        """Of a failure."""
        return str(self.json()["error"]["code"])


class _Connection(http.client.HTTPConnection):
    def __init__(self, sock: socket.socket) -> None:
        super().__init__("localhost", timeout=SECONDS)
        self.sock = sock

    def connect(self) -> None:
        raise ConnectionError("the connection was closed")


def connect(where: Path | tuple[str, int]) -> socket.socket:
    """A connected socket."""
    if isinstance(where, Path):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(SECONDS)
        sock.connect(str(where))
        return sock
    return socket.create_connection(where, SECONDS)


class Client:
    """One connection, kept."""

    def __init__(self, where: Path | tuple[str, int], headers: Mapping[str, str] | None = None) -> None:
        self.sock = connect(where)
        self._connection = _Connection(self.sock)
        self._headers = dict(headers or {})

    def ask(
        self, method: str, path: str, content: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """One request; `content` goes as JSON unless it is bytes."""
        sent = {**self._headers, **(headers or {})}
        body = None
        if content is not None:
            body = content if isinstance(content, bytes) else msgspec.json.encode(content)
            sent.setdefault("Content-Type", "application/json")
        self._connection.request(method, path, body, sent)
        response = self._connection.getresponse()
        names: dict[str, str] = {}
        for name, value in response.getheaders():
            names[name.lower()] = f"{names[name.lower()]}, {value}" if name.lower() in names else value
        return Answer(response.status, names, response.read())

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask(
            "GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )

    def act(self, name: str, content: Any = None, **headers: str) -> Answer:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.ask("POST", f"/v1/acts/{name}", {} if content is None else content, sent)

    def close(self) -> None:
        self._connection.close()
        self.sock.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream:
    """/v1/events, event by event."""

    def __init__(self, where: Path | tuple[str, int], query: str = "", **headers: str) -> None:
        self.sock = connect(where)
        lines = [f"GET /v1/events{query} HTTP/1.1", "Host: localhost"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.sock.sendall("\r\n".join([*lines, "", ""]).encode())
        self._response = http.client.HTTPResponse(self.sock)
        self._response.begin()
        self.status = self._response.status

    def events(self) -> Iterator[tuple[int, str, Any]]:
        """Number, kind and content of each, until the stream ends."""
        fields: dict[bytes, bytes] = {}
        while line := self._response.readline():
            line = line.rstrip(b"\n")
            if line:
                name, _, value = line.partition(b": ")
                fields[name] = value
            elif b"data" in fields:
                yield int(fields[b"id"]), fields[b"event"].decode(), msgspec.json.decode(fields[b"data"])
                fields = {}

    def until(self, kind: str, seconds: float = SECONDS) -> list[tuple[int, str, Any]]:
        """All up to the first of a kind."""
        found = []
        deadline = time.monotonic() + seconds
        for event in self.events():
            found.append(event)
            if event[1] == kind:
                return found
            assert time.monotonic() < deadline, found
        raise AssertionError(f"the stream ended: {found}")

    def close(self) -> None:
        self._response.close()
        self.sock.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def gone(sock: socket.socket, seconds: float = SECONDS) -> bytes:
    """What still comes on a socket until the other end closes it."""
    sock.settimeout(seconds)
    found = b""
    while True:
        try:
            chunk = sock.recv(1 << 16)
        except ConnectionResetError:
            return found
        if not chunk:
            return found
        found += chunk
