"""Values that go in and out of the core: answers, pushes, statistics.

Extents are flat lists of integers slot, length, slot, length, ...; `blocks_of` turns them into the (block, offset,
length) triples of the wire.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

UNLIMITED = 2**31 - 1


class Space(msgspec.Struct, frozen=True):
    """A namespace, compared as a structure: no two of its parts can run into each other."""

    tenant: str = ""
    model: str = ""
    adapter: str = ""
    salt: str = ""


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """`length` slots to be copied by the client on its own stream before its first write to `target`."""

    source: int
    target: int
    length: int


class Admitted(msgspec.Struct, gc=False):
    """OK: `hit` tokens are cached; `extents` place positions [0, capacity)."""

    sequence: int
    hit: int
    capacity: int
    extents: list[int]
    copies: list[Copy]


class Grown(msgspec.Struct, gc=False):
    """OK: `extents` place positions [position, capacity); positions before keep their place, but for `copies`."""

    position: int
    capacity: int
    extents: list[int]
    copies: list[Copy]


class Forked(msgspec.Struct, gc=False):
    """OK: the child reads the same slots as its parent up to `length`."""

    sequence: int
    length: int


class Committed(msgspec.Struct, gc=False):
    """OK: positions [0, length) are on the tree's path; `published` became shareable, `duplicates` stay private."""

    length: int
    published: int
    duplicates: int


class Reason(StrEnum):
    """Why LATER."""

    MEMORY = "memory"  # neither free nor evictable memory suffices
    FENCED = "fenced"  # enough is coming free; nothing is evicted for it yet
    QUOTA = "quota"  # the session's own quota binds, or its tenant's
    TURN = "turn"  # older tickets or growth come first
    RUN = "run"  # memory is there but scattered; a window is being cleared
    COMMIT = "commit"  # another sequence is computing the same prefix; Published or Abandoned will be pushed
    PREEMPT_FIRST = "preempt_first"  # this session owes an answer to Preempt
    STALLED = "stalled"  # every other holder is stalled
    RATE = "rate"  # the tenant asks too often; said by who knows a clock, not here


class Later(msgspec.Struct, frozen=True, gc=False):
    """LATER: ask again with `ticket`, which keeps its place in line.  Figures are those of the limit that binds."""

    ticket: int
    reason: Reason
    needed: int
    free_now: int
    coming_free: int
    evictable: int
    retry_after_ms: int
    stalled: tuple[int, ...] = ()
    quota: str = ""  # which one binds (accounts.Quota), where one does
    limit: int = 0  # ... and how many slots it allows


class Never(msgspec.Struct, frozen=True, gc=False):
    """NEVER: `needed` slots would not fit an otherwise empty pool under this quota of `limit` slots."""

    needed: int
    limit: int
    quota: str = ""  # which one it is (accounts.Quota); empty: the pool's size


# -- pushes: what the core wants told to a session ------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The ticket's request would be served now; it keeps its age for `ticket_grace` more seconds."""

    session: int
    ticket: int


class Pressure(msgspec.Struct, frozen=True, tag=True):
    """Growth is starving: give second runs back (Trim to the written length)."""

    session: int


class Preempt(msgspec.Struct, frozen=True, tag=True):
    """Free (or swap out) this sequence by `deadline`."""

    session: int
    sequence: int
    deadline: float


class Published(msgspec.Struct, frozen=True, tag=True):
    """The prefix the ticket waits for is cached now: ask again."""

    session: int
    ticket: int


class Abandoned(msgspec.Struct, frozen=True, tag=True):
    """The prefix the ticket waits for will not come: ask again and compute it."""

    session: int
    ticket: int


class Moved(msgspec.Struct, frozen=True, tag=True):
    """Positions from `position` on lie at `extents` (flat) from the step on that the session applies `epoch` with."""

    session: int
    epoch: int
    sequence: int
    position: int
    extents: list[int]


Push = Ready | Pressure | Preempt | Published | Abandoned | Moved


class PoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Everything countable about a pool, in slots (= tokens) unless said; derived when asked for."""

    usable: int
    free: int
    private: int
    cached: int
    fenced: int
    moving: int
    reserved: int
    quarantined: int
    padding: int
    blocks: int
    blocks_free: int  # wholly free blocks
    tokens_held: (
        int  # distinct tokens that slots hold: cached + private - unwritten runs - duplicates - peeled
    )
    unwritten: int  # room of running sequences that no token stands in yet
    duplicate_tokens: int  # private copies of what the tree has
    peeled_tokens: int  # private copies made to keep a tail contiguous or a page exclusive
    evictable: int
    leased: int  # cached and not evictable
    pinned: int
    pinned_waste_tokens: int  # free slots of blocks that something keeps from being wholly free
    largest_free_run: int
    nodes: int
    sequences: int
    sessions: int
    tickets: int
    moves: int
    evicted_tokens: int  # since boot, like all below
    copied_tokens: int
    moved_tokens: int
    extents_given: int
    extent_tokens: int
    hit_tokens: int
    prompt_tokens: int
    lost_hit_tokens: int  # of hits that whole pages cut short
    bad_handles: int
    late_completions: int
    internal_fragmentation: float  # 1 - tokens_held / (slots of blocks in use - unwritten)


def blocks_of(extents: list[int], block_size: int) -> list[tuple[int, int, int]]:
    """Flat extents as (block_id, slot_offset, length) triples; a length may run past its block's end."""
    return [(*divmod(extents[i], block_size), extents[i + 1]) for i in range(0, len(extents), 2)]
