"""Which leaf goes first: the order of eviction, behind one small protocol.

    lru       least recently used; knows nothing but the order                                     the default
    s3fifo    three FIFO queues: what was used once leaves early, what left too early is remembered
    gaps      learns after how many admissions each kind of leaf is used again, and evicts what earns least

`Tiers` puts priorities over any of them.  docs/decisions/0005-eviction.md has the figures.
"""

from __future__ import annotations

from collections.abc import Callable

from kvslot.allocator.errors import BadRequest
from kvslot.allocator.eviction.gaps import Gaps
from kvslot.allocator.eviction.ghosts import Ghosts
from kvslot.allocator.eviction.lru import Lru
from kvslot.allocator.eviction.protocol import Evictor
from kvslot.allocator.eviction.s3fifo import S3Fifo
from kvslot.allocator.eviction.tiers import Tiers

__all__ = ["EVICTIONS", "POLICIES", "Evictor", "Gaps", "Ghosts", "Lru", "S3Fifo", "Tiers", "make"]

POLICIES: dict[str, Callable[[], Evictor]] = {"lru": Lru, "s3fifo": S3Fifo, "gaps": Gaps}
EVICTIONS: tuple[str, ...] = tuple(POLICIES)
"""Names of the policies, the default first."""


def make(name: str) -> Evictor:
    """The eviction policy of this name."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise BadRequest(f"eviction policy {name!r} is none of {', '.join(sorted(POLICIES))}") from None
