"""Somebody who has the live page open, as far as the daemon can tell: the same requests, as often, over a Unix socket.

    python -Im kvslot.benchmarks.viewer ADMIN_SOCKET [SCRAPE_SECONDS]

It follows /v1/events, and asks each second for what has changed of the map, and now and then for the tables; beside it
a scraper asks for /metrics every `SCRAPE_SECONDS` (15, as Prometheus does by default).  One line on standard output
says that it has begun; SIGTERM ends it, with a line of JSON: how many answers, bytes and ticks it had.
"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import sys
import threading
import time
from typing import Final

ASKED: Final[dict[str, float]] = {
    "/v1/pool": 2.0,
    "/v1/frag": 2.0,
    "/v1/sessions": 2.0,
    "/v1/gaps": 2.0,
    "/v1/latency": 2.0,
    "/v1/prefixes?order=size&limit=50": 5.0,
    "/healthz": 5.0,
}
"""Every so many seconds."""
MAP_SECONDS: Final = 1.0
OCTETS: Final = {"Accept": "application/octet-stream"}


class Viewer:
    """One page, and one scraper."""

    def __init__(self, path: str, scrape_seconds: float) -> None:
        self.path = path
        self.asked = {**ASKED, "/metrics": scrape_seconds}
        self.answers = self.bytes = self.ticks = self.failures = 0
        self.ended = threading.Event()

    def connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("localhost", timeout=30)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(30)
        connection.sock.connect(self.path)
        return connection

    def follow(self) -> None:
        """Events, until the end."""
        connection = self.connect()
        connection.request("GET", "/v1/events")
        response = connection.getresponse()
        while not self.ended.is_set() and (line := response.readline()):
            self.bytes += len(line)
            self.ticks += line == b"event: tick\n"

    def ask(self) -> None:
        """The map and the tables, each in its time, one after the other."""
        connection = self.connect()
        now = time.monotonic()
        due = dict.fromkeys(self.asked, now)
        since, map_due = "", now
        while not self.ended.is_set():
            now = time.monotonic()
            if now >= map_due:
                map_due = now + MAP_SECONDS
                response = self.get(connection, f"/v1/blocks{since}", OCTETS)
                since = f"?since={response.headers['X-Kvslot-Sequence']}"
            for path, at in due.items():
                if now >= at:
                    due[path] = now + self.asked[path]
                    self.get(connection, path, {})
            self.ended.wait(max(0.0, min(map_due, *due.values()) - time.monotonic()))

    def get(
        self, connection: http.client.HTTPConnection, path: str, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        self.bytes += len(response.read())
        self.answers += 1
        self.failures += response.status != 200
        return response


def main() -> int:
    """Runs until SIGTERM."""
    viewer = Viewer(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 15.0)
    signal.signal(signal.SIGTERM, lambda *_: viewer.ended.set())
    threading.Thread(target=viewer.follow, daemon=True).start()
    print("begun", flush=True)
    viewer.ask()
    told = {name: getattr(viewer, name) for name in ("answers", "bytes", "ticks", "failures")}
    print(json.dumps(told), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
