"""`kvslotctl bench memory`: what the daemon's process takes beside the pool it serves.

A daemon whose pool is never touched by anybody caches 200,000 prompts of 512 tokens that share nothing, one node each.
What it holds then is the kernel's proportional set size (smaps) of every mapping but the pool's: the code, the core's
columns for each block, the tree with its keys (four bytes a token are the tokens themselves), sessions and buffers.
The same before anything was cached is printed apart.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvslot.api.client import Control
from kvslot.benchmarks.report import Document, Result, check_groups, meta, result
from kvslot.benchmarks.rig import Daemon, Peer, inspect
from kvslot.benchmarks.rpc import Progress
from kvslot.benchmarks.traffic import noise

GROUPS: Final = ("daemon",)
NODES: Final = 200_000
NODES_QUICK: Final = 10_000
TOKENS: Final = 512
SPARE: Final = 1.05
"""Slots for each token that is cached: nothing is evicted, watermark and headroom included."""


POLL_S: Final = 0.02


class Resident(NamedTuple):
    """Bytes of a process."""

    own: int
    """Of all mappings but the pool's."""
    pool: int


def resident(pid: int) -> Resident:
    """By the kernel's smaps: pages shared with others count in part."""
    own = pool = 0
    inside = False
    with open(f"/proc/{pid}/smaps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            head, _, rest = line.partition(" ")
            if not head.endswith(":"):
                inside = "memfd:kvslot" in line and "session" not in line
            elif head == "Pss:":
                size = int(rest.split()[0]) << 10
                if inside:
                    pool += size
                else:
                    own += size
    return Resident(own, pool)


def measure(nodes: int, folder: Path, report: Progress) -> list[Result]:
    """Fills a daemon and looks at it."""

    def prompts() -> Iterator[bytes]:
        # The first token is the prompt's own, so that no two share a node.
        return (index.to_bytes(4, "little") + noise(1 + index, 1, TOKENS) for index in range(nodes))

    tokens = nodes * TOKENS
    with Daemon(folder, slots=int(tokens * SPARE) + (1 << 16)) as daemon:
        empty = resident(daemon.pid)
        began = time.monotonic()
        with Peer(daemon.socket, namespace="memory") as peer:
            peer.cache(prompts(), lambda count: report(f"caching {nodes:,} prompts", count / nodes))
        took = time.monotonic() - began
        pool = inspect(daemon.socket, "pools")[0]
        full = resident(daemon.pid)
        report("with compaction at work", 1.0)
        with Control(str(daemon.socket)) as control:
            told = control.defrag("once")[0]
            while told.once:
                time.sleep(POLL_S)
                told = control.defrag("status")[0]
        # Its planner listens for some seconds more.
        moving = resident(daemon.pid)
    cached = pool["cached"]
    note = (
        f"{pool['nodes']:,} nodes, {cached:,} tokens cached in {took:.1f} s; the pool's own pages: "
        f"{full.pool >> 20} MiB"
    )
    if pool["evicted_tokens"]:
        raise RuntimeError(
            f"{pool['evicted_tokens']} tokens were evicted: the pool is too small for this measurement"
        )

    def mib(size: int) -> float:
        return size / (1 << 20)

    return [
        result("rss_mib", mib(full.own), suite="memory", samples=pool["nodes"], note=note),
        result("rss_bytes_per_token", full.own / cached, suite="memory", samples=cached,
               note="4 of them are the token itself"),
        result("rss_empty_mib", mib(empty.own), unit="MiB", what="the same with nothing cached",
               note=f"columns of {pool['blocks']:,} blocks among it", suite="memory"),
        result("grown_bytes_per_token", (full.own - empty.own) / cached, unit="B",
               what="what caching added, by cached token", suite="memory"),
        result("grown_bytes_per_node", (full.own - empty.own) / pool["nodes"] - 4 * cached / pool["nodes"], unit="B",
               what="the same by node, tokens left out", suite="memory"),
        result("compaction_mib", mib(moving.own - full.own), unit="MiB", suite="memory",
               what="what compaction takes beside that while it has something to do",
               note=f"{(moving.own - full.own) / pool['blocks']:.1f} bytes a block"),
    ]  # fmt: skip


def run(
    groups: Sequence[str] = GROUPS,
    *,
    quick: bool = False,
    seed: int = 0,
    command: Sequence[str] | None = None,
    report: Progress | None = None,
) -> Document:
    """Measures; raises ValueError for an unknown group."""
    check_groups(groups, GROUPS)
    began = time.monotonic()
    about = meta(
        list(groups),
        quick=quick,
        seed=seed,
        cost_ns=0,
        command=command,
        suite="memory",
        clock="none: kernel's smaps",
    )
    with tempfile.TemporaryDirectory(prefix="kvslot-") as name:
        results = measure(NODES_QUICK if quick else NODES, Path(name), report or (lambda words, share: None))
    about.wall_s = round(time.monotonic() - began, 1)
    return Document(meta=about, results=results)
