"""The storms of test_storms.py at full size, against a live daemon, and a real Prometheus where one is installed.

python -I tests/metrics --sessions 10000 --answers 100000 --seconds 15
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import types
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    if "tests" not in sys.modules:
        # Not the repository's root: from there rooms would load a second time under their short names.
        tests = types.ModuleType("tests")
        tests.__path__ = [str(Path(__file__).resolve().parents[1])]
        sys.modules["tests"] = tests
    parser = argparse.ArgumentParser(prog="metrics", description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000, help="that come and go (default %(default)s)")
    parser.add_argument("--answers", type=int, default=100_000, help="of each kind (default %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="that Prometheus scrapes (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    storms = importlib.import_module("tests.metrics.test_storms")
    took = storms.names(options.sessions)
    print(
        f"{options.sessions} sessions came and went: no series more; a scrape took {took * 1e3:.0f} ms at the most"
    )
    storms.storm(options.answers)
    print(
        f"{options.answers} waits and as many errors: {storms.LINES_MOST} lines each at the most, all counted"
    )
    if shutil.which("prometheus") is None:
        print("prometheus is not installed (Debian: apt-get install prometheus)")
    else:
        print(importlib.import_module("tests.metrics.prometheus").watch(options.seconds))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
