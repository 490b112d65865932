"""Who holds what: sessions, their sequences, the ranges of slots a sequence owns, and fences.

A sequence's table has two sources.  Positions on the path of the prefix tree, up to `base`, are read from the tree's
slots under one hold on the deepest node; everything else stands in `own`, ordered by position:

    position   0 ............ base ............ length ........ capacity
               tree path       own, unpublished   own, unwritten

    below base, ranges of `own` are private copies of what the tree has (kind DUPLICATE) or copies made for the tail
    (kind PEELED); the sequence reads those, not the tree's.

Fences.  Slots and holds that a sequence gives back stay untouchable until the step named with them has completed in
all members of the session's group.  A session keeps them in a heap by step.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec

from kvslot.allocator.results import UNLIMITED, Moved

if TYPE_CHECKING:
    from kvslot.allocator.accounts import Account
    from kvslot.allocator.moves import Retired

OWN, DUPLICATE, PEELED = range(3)
NO_STEP = 2**63 - 1


class Range(msgspec.Struct, gc=False, eq=False):
    """`length` slots, private to the sequences that hold them, for positions from `position` on.

    `extents` is a flat list slot, length, ...: a range has as many as its slots lie in, and no object per extent.
    """

    position: int
    extents: list[int]
    length: int
    kind: int = OWN
    refs: int = 1
    fence: int = 0  # the latest step named by a holder that let go before the last one did
    holders: list[Sequence] | None = None  # only where forks share it


class Sequence(msgspec.Struct, gc=False, eq=False):
    """One running request.  Its references to its session and back are cut when it ends."""

    handle: int
    session: Session
    account: Account  # of its namespace's tenant
    root: int
    node: int  # deepest node held
    base: int  # positions [0, base) are on the path to `node`
    length: int  # tokens known to have a place: the prompt, then what was committed or reported written
    capacity: int  # positions that have a slot
    tokens: bytes  # those from position `tokens_from` on, as far as they are known
    tokens_from: int
    own: list[Range]
    priority: int = 0
    written: int = 0  # positions whose K and V the engine has reported written
    kept_from: int = 0  # positions before it were trimmed (sliding window)
    dropped: int = 0  # how many of those have no slot any more
    promised: tuple[int, int, bytes] | None = None  # what others may wait for until its prompt is committed
    kept: list[int] | None = None  # nodes that hold such sources since somebody published them
    past: int = 0  # of the session it goes on with, in the eviction policy's terms
    prompt: int = 0  # tokens of its prompt; told like `past` only where the policy learns
    sources: list[Range] | None = None  # shared ranges kept until this sequence ends: sources of peel copies


class Life(IntEnum):
    """Where a session stands."""

    LIVE = 0
    LOST = 1  # its connection ended without Bye: slots are quarantined, leases kept
    GONE = 2  # its process is proven gone: everything is being released
    ENDED = 3


class Group:
    """Sessions of one engine that has several processes: a fence has passed when it has for all members."""

    __slots__ = ("completed", "members")

    def __init__(self) -> None:
        self.members: list[Session] = []
        self.completed = 0


class Fenced(msgspec.Struct, gc=False):
    """Ranges (already out of every table) and a node's hold that wait for a step."""

    ranges: list[Range]
    node: int
    account: Account


class Session:
    """One connected engine process (or one of several, in a group)."""

    __slots__ = (
        "append",
        "charged",
        "completed",
        "epoch",
        "fenced",
        "fences",
        "group",
        "handle",
        "kept",
        "life",
        "mark",
        "marking",
        "movable",
        "moved",
        "owes",
        "page",
        "peel_max",
        "pins",
        "proven",
        "quota",
        "retired_tokens",
        "sequences",
        "settling",
        "stalled",
        "stepped",
        "submitted",
        "swept",
        "swept_fenced",
        "_serial",
    )

    def __init__(
        self, handle: int, *, page: int, quota: int, append: str, peel_max: int, movable: bool
    ) -> None:
        self.handle = handle
        self.mark = 0  # what a journal knows it by
        self.page = page  # slots per page of its kernels; 1 for token-granular ones
        self.quota = quota
        self.append = append
        self.peel_max = peel_max
        self.movable = movable
        self.sequences: dict[int, Sequence] = {}
        self.pins: dict[int, int] = {}  # pin handle -> node
        self.kept: list[int] = []  # nodes that it may read since an earlier life of the pool (restore.py)
        self.charged = 0  # private, fenced and quarantined slots it took
        self.submitted = 0
        self.completed = 0
        self.fences: list[tuple[int, int, Fenced]] = []
        self._serial = 0
        self.group: Group | None = None
        self.life = Life.LIVE
        self.proven = False  # lost, and its process proven gone; released once its whole group is
        self.stalled = False
        self.owes: dict[int, float] = {}  # sequence -> deadline of the Preempt it has not answered
        self.fenced = 0  # slots of `fences`
        # Ranges the sweep has quarantined, by identity, with the state they had; and how many fenced slots they have.
        self.swept: dict[int, tuple[Range, int]] = {}
        self.swept_fenced = 0
        self.marking: Iterator[None] | None = None  # how far the sweep has come
        # What it was told of moves (moves.py): the last epoch, what it has not applied, and what steps may still read.
        self.epoch = 0
        self.moved: deque[tuple[int, Retired, list[Moved]]] = deque()  # (epoch, old place, what was pushed)
        self.settling: deque[tuple[int, Retired]] = deque()  # (last step that may read it, old place)
        self.retired_tokens = 0  # in those two
        self.stepped = 0.0  # when it was last seen to submit a step

    def passed(self) -> int:
        """The last step that has completed everywhere it must; every step, once the process is gone."""
        if self.group is None:
            return self.completed if self.life != Life.GONE else NO_STEP
        return self.group.completed if self.life != Life.GONE else NO_STEP

    def fence(self, step: int, fenced: Fenced) -> None:
        self._serial += 1
        heapq.heappush(self.fences, (step, self._serial, fenced))

    def quota_left(self) -> int:
        return UNLIMITED if self.quota >= UNLIMITED else self.quota - self.charged
