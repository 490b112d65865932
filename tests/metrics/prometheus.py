"""A real Prometheus on a real daemon under load: it scrapes with a token, and is asked all queries and rules."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..faults.actors import child
from ..faults.engines import engine
from ..tools.daemon import running
from .test_alerts import ALERTS, queries, rules

TOKEN = "scraper-0123456789abcdef0123456789abcdef"
START_SECONDS = 60.0
QUIET = {
    "kvslot_compaction_collisions_total", "kvslot_requests_refused_total", "kvslot_pool_later_total",
    "kvslot_pushes_total", "kvslot_compaction_moves_total", "kvslot_log_events_total", "kvslot_tenant_",
}  # fmt: skip
"""Queries of these may be empty, or divide by nothing, in a short time of random load."""


def port() -> int:
    """One that nobody listens on just now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Prometheus:
    """One that runs, by its HTTP API."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **query: str) -> Any:
        """The `data` of an answer."""
        url = f"http://{self._address}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, text: str) -> list[Any]:
        """The series of a query, now."""
        found: list[Any] = self.get("/api/v1/query", query=text)["result"]
        return found


def watch(seconds: float) -> str:
    """Scrapes for so long; asserts that all rules can be evaluated and all queries give something.  A line on it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvp")))
        token = folder / "token"
        token.write_text(TOKEN + "\n")
        token.chmod(0o600)
        target, address = f"127.0.0.1:{port()}", f"127.0.0.1:{port()}"
        daemon = stack.enter_context(running(admin_tcp=target, admin_token_file=str(token)))
        for number in range(2):
            stack.enter_context(
                child(engine(daemon.socket, number), seconds=int(seconds + 2 * START_SECONDS))
            )
        (folder / "prometheus.yml").write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(ALERTS)],
                    "scrape_configs": [
                        {
                            "job_name": "kvslot",
                            "authorization": {"credentials_file": str(token)},
                            "static_configs": [{"targets": [target]}],
                        }
                    ],
                }
            )
        )
        log = stack.enter_context((folder / "log").open("w"))
        command = [
            "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
        ]  # fmt: skip
        process = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        stack.callback(process.terminate)
        prometheus = Prometheus(address)
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                up = prometheus.query('up{job="kvslot"}')
                if up and up[0]["value"][1] == "1":
                    break
            assert time.monotonic() < deadline, (folder / "log").read_text()[-4000:]
            time.sleep(0.2)
        time.sleep(seconds)
        for text in queries():
            found = prometheus.query(text.replace("[5m]", f"[{max(5, round(seconds))}s]"))
            assert found or any(name in text for name in QUIET), text
        told = [rule for group in prometheus.get("/api/v1/rules")["groups"] for rule in group["rules"]]
        assert {rule["name"] for rule in told} == set(rules())
        assert all(rule["health"] == "ok" for rule in told), [rule for rule in told if rule["health"] != "ok"]
        (one,) = prometheus.get("/api/v1/targets")["activeTargets"]
        assert one["health"] == "up", one
        samples = prometheus.query("scrape_samples_scraped")[0]["value"][1]
        took = one["lastScrapeDuration"] * 1e3
    return (
        f"{len(queries())} queries and {len(rules())} rules: a scrape of {samples} samples took {took:.0f} ms"
    )
