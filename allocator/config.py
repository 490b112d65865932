"""What a pool is made from, and the limits it keeps to."""

from __future__ import annotations

import math

import msgspec

from kvslot.allocator.errors import BadRequest

MAX_SLOTS = 2**31 - 1  # slots are int32 for the kernels
MAX_BLOCK_SIZE = 8192
MAX_PRIORITY = 7
MAX_SPACES = (
    65536  # namespaces open at a time; each costs a kilobyte, and a salt for every request is a mistake
)


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Size and rules of one pool.  All times are in seconds on the caller's clock, all sizes in slots unless said."""

    blocks: int
    block_size: int = 16
    opaque: bool = (
        False  # only bytes per block are known: match, split, insert and evict at multiples of block_size
    )
    windowed: bool = False  # every layer has a sliding window, so the front of a sequence may be trimmed
    watermark: float = 0.02  # share of `usable` kept back from new requests
    headroom: float = (
        0.003  # share of `usable` that eviction keeps free, so that what is freed meets its neighbours
    )
    ahead: bool = (
        False  # the caller keeps the headroom by `replenish`, between requests; else each request does
    )
    eviction: str = "lru"
    emptying: int = (
        8  # oldest small leaves among which one whose death empties a block goes first; 1: just the oldest
    )
    quantum: int = 0  # slots of a growth run; 0: 32 tokens or a block, whichever is smaller
    fence_patience: float = 0.05  # how long memory that is coming free holds eviction back
    ticket_grace: float = 1.0  # how long a ticket keeps its age after Ready was pushed
    preempt_deadline: float = 1.0  # how long a victim has to answer Preempt
    reclaim_patience: float = 0.02  # how long Pressure(reclaim) is given before a victim is named
    pin_share: float = 0.5  # most of `usable` that pins may keep
    scrubs: bool = False  # what was in use is wiped by the caller (`dirt`, `wiped`) before it is free again
    peel_max: int = 64  # most tokens copied to keep a tail contiguous
    append: str = "chain"  # or "peel"; a session may choose otherwise
    fill_holes: bool = (
        True  # new pieces begin in holes where those have become many; False: no piece is split for one
    )


def check_config(config: PoolConfig) -> None:
    if not 1 <= config.block_size <= MAX_BLOCK_SIZE:
        raise BadRequest(f"block_size {config.block_size} is not in 1..{MAX_BLOCK_SIZE}")
    least = 2 if config.block_size > 1 else 3
    if config.blocks < least:
        raise BadRequest(
            f"{config.blocks} blocks: padding takes {least - 1}, so a pool needs at least {least}"
        )
    if config.blocks * config.block_size > MAX_SLOTS:
        raise BadRequest(
            f"{config.blocks} blocks of {config.block_size} are {config.blocks * config.block_size} slots; "
            f"kernels address fewer than 2^31: use at most {MAX_SLOTS // config.block_size} blocks"
        )
    if not 0 <= config.headroom < 1:
        raise BadRequest(f"headroom {config.headroom} is not in 0..1")
    if not 0 <= config.watermark < 1:
        raise BadRequest(f"watermark {config.watermark} is not in 0..1")
    if config.emptying < 1:
        raise BadRequest(f"emptying {config.emptying}: of no leaf none can be chosen")
    if config.quantum < 0 or config.quantum > MAX_BLOCK_SIZE:
        raise BadRequest(f"quantum {config.quantum} is not in 0..{MAX_BLOCK_SIZE}")
    if config.append not in ("chain", "peel"):
        raise BadRequest(f"append mode {config.append!r} is neither 'chain' nor 'peel'")
    for name in ("fence_patience", "ticket_grace", "preempt_deadline", "reclaim_patience"):
        seconds = getattr(config, name)
        if not 0 <= seconds < math.inf:
            raise BadRequest(f"{name} {seconds} is no number of seconds")
    if config.peel_max < 0:
        raise BadRequest(f"peel_max {config.peel_max}: a count is not negative")
    if not 0 <= config.pin_share <= 1:
        raise BadRequest(f"pin_share {config.pin_share} is not in 0..1")


def check_priority(priority: int) -> None:
    if type(priority) is not int or not 0 <= priority <= MAX_PRIORITY:
        raise BadRequest(f"priority {priority!r} is not in 0..{MAX_PRIORITY}")
