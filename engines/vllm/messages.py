"""What the two sides of the connector tell each other, each step.  Plain values: they cross processes by pickle.

    scheduler ── Orders ──► worker        loads and stores of this step, and which session they belong to
    scheduler ◄── Report ── worker        what of them has ended, and how

Loads and stores name the *entry* they belong to (a number of the planner's, never used again), so that what is reported
late, of a request that has ended or been started over, cannot be taken for another's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvslot.api.client import Token


@dataclass(frozen=True, slots=True)
class Session:
    """The daemon's session in which pool blocks are leased."""

    generation: int  # of the scheduler's connection; rises with each
    socket: str
    pool: str
    token: Token


@dataclass(frozen=True, slots=True)
class Load:
    """Pool blocks to be copied into engine blocks; `engine` has a table for each group, NULL where nothing is kept."""

    entry: int
    generation: int
    request: str
    pool: list[int]
    engine: list[list[int]]


@dataclass(frozen=True, slots=True)
class Store:
    """Engine blocks, complete when this step's forward has ended, to be copied into pool blocks."""

    entry: int
    generation: int
    first: int  # blocks of the sequence [first, end) are in the pool then
    end: int
    pool: list[int]
    engine: list[list[int]]


@dataclass(slots=True)
class Orders:
    """Of one step."""

    session: Session | None = None  # the present one; copies of earlier ones may still be under way
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    void: bool = False  # loads ordered until now are to fail, as far as vLLM has not heard of them
    idle: bool = False  # nothing is computed in this step
    writes: list[int] = field(
        default_factory=list
    )  # engine blocks that it writes into, where that is asked for


@dataclass(slots=True)
class Report:
    """Of what has ended since the last one."""

    stored: list[tuple[int, int, int]] = field(default_factory=list)  # entry, first, end
    dropped: list[int] = field(default_factory=list)  # entries of stores that were not made
    loaded: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)  # entries of loads that were not made, or not whole
    closed: list[int] = field(default_factory=list)  # generations whose memory the worker has let go of
    poisoned: bool = (
        False  # loads of a step failed that its forward was to read: any request may have read them
    )

    def __bool__(self) -> bool:
        return bool(self.stored or self.dropped or self.loaded or self.failed or self.closed or self.poisoned)
