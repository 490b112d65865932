"""What the tests of recordings share."""

from __future__ import annotations

import gzip
import time
from pathlib import Path

SECONDS = 60.0
"""That a loaded machine may take for anything."""


def wait_for(out: Path, requests: int) -> None:
    """Until the trace that is growing has so many lines."""
    end = time.monotonic() + SECONDS
    while len(gzip.decompress(out.read_bytes()).splitlines()) <= requests:
        assert time.monotonic() < end
        time.sleep(0.05)
