"""The core: slotted blocks and the shared prefix tree.  Pure functions on plain values; see `pool.Pool`."""

from kvslot.allocator.accounts import Account, Quota
from kvslot.allocator.audit import audit
from kvslot.allocator.config import PoolConfig
from kvslot.allocator.errors import BadRequest, EndedHandle, ForeignHandle, OutOfTurn, Refusal, UnknownHandle
from kvslot.allocator.eviction import EVICTIONS
from kvslot.allocator.moves import Move
from kvslot.allocator.pool import Pool
from kvslot.allocator.reclaiming import Aside, Reclaimed, reclaim
from kvslot.allocator.results import (
    UNLIMITED,
    Abandoned,
    Admitted,
    Committed,
    Copy,
    Forked,
    Grown,
    Later,
    Never,
    PoolStatistics,
    Preempt,
    Pressure,
    Published,
    Push,
    Ready,
    Reason,
    Space,
    blocks_of,
)
from kvslot.allocator.sessions import Life, Session
from kvslot.allocator.slots import Journal, State

__all__ = [
    "EVICTIONS",
    "UNLIMITED",
    "Abandoned",
    "Account",
    "Admitted",
    "Aside",
    "BadRequest",
    "Committed",
    "Copy",
    "EndedHandle",
    "ForeignHandle",
    "Forked",
    "Grown",
    "Journal",
    "Later",
    "Life",
    "Move",
    "Never",
    "OutOfTurn",
    "Pool",
    "PoolConfig",
    "PoolStatistics",
    "Preempt",
    "Pressure",
    "Published",
    "Push",
    "Quota",
    "Ready",
    "Reason",
    "Reclaimed",
    "Refusal",
    "Session",
    "Space",
    "State",
    "UnknownHandle",
    "audit",
    "blocks_of",
    "reclaim",
]
