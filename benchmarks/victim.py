"""A process that holds much and waits to be killed: run by `bench rpc`.

    python -m kvslot.benchmarks.victim SOCKET NAMESPACE FIRST COUNT DEPTH

Allocates COUNT sequences, FIRST and those that follow, each on a path of DEPTH nodes of one token: what of a path is
not cached yet is published token by token.  The session has the pool's memory, so that its slots are free only once
this process is proven gone.  Says "ready" when it holds all.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kvslot.benchmarks.paths import hold
from kvslot.benchmarks.rig import Peer


def main() -> None:
    """Holds until killed."""
    path, namespace, first, count, depth = sys.argv[1:]
    with Peer(Path(path), namespace=namespace, name="victim", mapped=True) as peer:
        hold(peer, int(first), int(count), int(depth), keep=True)
        print("ready", flush=True)
        while True:
            time.sleep(60)


if __name__ == "__main__":
    main()
