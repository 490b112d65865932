"""What the index of a filled pool costs in memory, by node: run as a process of its own.

    python -m kvslot.benchmarks.footprint NODES

tracemalloc adds up every byte that the core asked for since the empty pool was made and has not given back: columns,
links, children's dicts, lists of extents, the keys' objects, the evictor, what is left of the free runs.  The tokens
themselves (4 bytes each) are taken off.  Per-block columns are made with the pool and are not counted: they do not
grow with nodes.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tracemalloc
from pathlib import Path
from typing import NamedTuple

import kvslot.allocator
from kvslot.benchmarks.traffic import Filling, Ours, Shape


class Footprint(NamedTuple):
    """Bytes, but for counts."""

    nodes: int
    tokens: int
    traced: int
    """All that the core's own lines allocated and hold."""
    per_node: float
    """`traced` without the tokens, by node."""
    scattered: int
    """Nodes with more than one extent."""
    estimate: float
    """What the tree's own `bytes_used` says, by node."""


def measure(nodes: int, turnover: float) -> Footprint:
    """Fills a pool of `nodes` turns `1 + turnover` times."""
    shape = Shape(chats_open=max(4, min(256, nodes // 64)))
    slots = nodes * (shape.turn_least + shape.turn_most) // 2
    side = Ours(slots)
    filling = Filling(shape)
    home = str(Path(kvslot.allocator.__file__).parent)
    gc.collect()
    tracemalloc.start()
    filling.run(side, int(slots * (1 + turnover)))
    gc.collect()
    taken = tracemalloc.take_snapshot()
    tracemalloc.stop()
    own = taken.filter_traces([tracemalloc.Filter(True, os.path.join(home, "*"))])
    traced = sum(trace.size for trace in own.traces)
    tree = side.pool.tree
    live = tree.nodes - 1  # the root is no node of the cache
    return Footprint(
        nodes=live,
        tokens=tree.tokens,
        traced=traced,
        per_node=(traced - 4 * tree.tokens) / live,
        scattered=sum(len(tree.extents(node)) > 2 for node in tree.live()),
        estimate=tree.bytes_used() / live,
    )


if __name__ == "__main__":
    gc.disable()
    print(json.dumps(measure(int(sys.argv[1]), float(sys.argv[2]))._asdict()))
