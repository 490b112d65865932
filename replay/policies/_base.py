"""The interface between the replay's engine and an allocation policy.

A policy decides where the tokens of running requests live and what it can find again.  The engine (`replay/engine.py`)
plays the part of a serving engine: it asks for room, "computes" for a while, says what has been written, and frees.

    admit ---> prefilled ---> grow* ---> finish          the ordinary life of a request
      |            |            |
      |            +--- abort --+                        preempted: it starts over later
      +--> Refused(never=False): asked again later; Refused(never=True): never asked again

Rules that hold for every policy, so that their figures can be compared:

- Tokens travel as bytes, four per token, little-endian int32.  The same bytes mean the same token.
- A hit never covers the whole prompt: at most n-1 of an n-token prompt, since the last token must be computed anew
  to give the first logits.
- `admit` is all or nothing: a refusal leaves no trace but what was evicted before it.
- Nothing is shareable before `prefilled` (prompt) or `finish` (output) has said that it was written.
- The watermark holds back new requests only, never growth, and is waived while nothing runs.
- Policies read no clock and draw no random numbers: `now` (simulated seconds) comes in, so runs can be repeated.
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

Compaction = Literal["off", "idle", "forced"]
"""When pieces are moved: never; while the device computes nothing; again and again until nothing more is gained."""

RUN_BLOCKS: Final = 32
"""Blocks of the runs that `Gauges.usable_run` counts."""
UNKNOWN: Final = -1
"""A gauge that a policy does not have."""


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What every policy is built from.  Sizes are in token slots."""

    pool_tokens: int
    """Slots in the pool; a policy may round down to whole blocks and set padding aside (`Gauges.usable` tells)."""
    block_size: int
    """Slots in a block, 1 or more."""
    eviction: str = "lru"
    """Order of eviction: "lru", "s3fifo" or "gaps"; a policy that lacks one refuses it with ValueError."""
    watermark: float = 0.02
    """Share of the usable slots held back from new requests while something runs."""
    max_length: int = 0
    """Longest prompt + output of the trace: what `contiguous` sets aside for each sequence.  0: not known."""
    engine_count: int = 1
    """Engines that share this instance; `admit`'s `engine` is below it."""
    fill_holes: bool = True
    """`slotted` only: False tells the core never to split a piece to fill a hole, the measure that splitting is
    judged by.  The others never split that way."""
    page: int = 1
    """`slotted` only: slots of the pages that engines' kernels read whole; it divides the block size."""
    emptying: bool = True
    """`slotted` only: False lets eviction take the oldest leaf, whether or not another one's death empties a block."""
    compaction: Compaction = "off"
    """`slotted` only: anything but "off" makes the policy `Compacting`."""
    planner: str = "planned"
    """`slotted` only: who chooses the moves; "greedy" is the baseline, see `kvslot.replay.compaction`."""
    purposes: tuple[str, ...] = ()
    """`slotted` only: what may be moved for; (): everything that the planner knows."""
    append: str = "chain"
    """`slotted` only: how a sequence goes on behind a shared partial slot, "chain" or "peel"."""


class Admitted(NamedTuple):
    """The request runs: it holds `hit` cached tokens and has room up to `capacity` tokens."""

    hit: int
    """Prompt tokens found cached, 0 <= hit <= prompt_len - 1."""
    capacity: int
    """Tokens (hit included) the sequence has room for, >= prompt_len."""
    ask_at: int
    """Length at which the engine must call `grow` before it writes the next token; prompt_len <= ask_at <= capacity."""


class Refused(NamedTuple):
    """The request does not run now."""

    never: bool
    """False: LATER, ask again when something was released.  True: NEVER, it would not fit an empty pool."""
    needed: int
    """Slots it would have needed, evictable ones not taken off; what pseudo-OOM is judged by.

    0 with never=False is no refusal for want of memory: the prefix is being computed by a running request, and the
    engine asks again once a prompt has been written."""


class Room(NamedTuple):
    """What a sequence has after `grow`."""

    capacity: int
    ask_at: int


class Gauges(NamedTuple):
    """The state of a pool, in slots unless said.  O(1) to read: the engine samples it throughout."""

    usable: int
    """Slots that can ever hold a token (padding left out)."""
    blocks_in_use_slots: int
    """Slots of the blocks that are not wholly free."""
    tokens_held: int
    """Slots that hold a distinct written token.  Duplicates, peeled copies, fenced and quarantined slots hold none."""
    private: int
    """Written slots of running sequences, not (yet) shareable."""
    cached: int
    """Slots of the shared index, in use by somebody or not."""
    reserved: int
    """Unwritten slots of running sequences' runs."""
    duplicates: int
    """Written slots whose tokens are also held elsewhere."""
    peeled: int
    """Slots holding copies made to append after a shared partial slot."""
    fenced: int
    quarantined: int
    moving: int
    free: int
    """Slots holding nothing that stand in a free structure: whole blocks and holes that can be handed out."""
    evictable: int
    """Tokens of the shared index that could be evicted now."""
    largest_free_run: int
    """Longest run of consecutive free slots."""
    live_sequences: int
    """Sequences admitted and not yet finished or aborted (a count)."""
    usable_run: int = UNKNOWN
    """Free slots usable as runs of RUN_BLOCKS whole blocks: such runs that the free runs hold, times their length."""


class Counters(NamedTuple):
    """Counts from the start; they never fall."""

    copied_tokens: int
    """Tokens copied inside the pool to be appended to (peel, partial pages)."""
    moved_tokens: int
    """Tokens moved by compaction."""
    extents: int
    """Extents handed out."""
    extent_tokens: int
    """Slots in the extents handed out."""
    evicted_tokens: int
    moves: int = 0
    """Moves that were published."""
    moves_abandoned: int = 0
    """Moves whose node was split, evicted or read by somebody before their copy had ended."""
    given_back: int = 0
    """Whole blocks that moves gave back, less those that they took as targets."""
    overtaken: int = 0
    """Times that a daemon let the pool be, since it changed faster than it can be followed."""


@runtime_checkable
class Policy(Protocol):
    """One pool under one way of managing it.  `request` is an int that the engine never uses for two live requests."""

    name: ClassVar[str]

    @property
    def granularity(self) -> int:
        """1 if a hit may end at any token, else the multiple of tokens at which hits end."""
        ...

    def admit(self, request: int, tokens: bytes, engine: int, now: float) -> Admitted | Refused:
        """Match the prompt, lock what is found and take room for the rest; all or nothing.

        Raises ValueError for an empty prompt or a request id that is live."""
        ...

    def prefilled(self, request: int, now: float) -> None:
        """The K/V of the whole prompt is written: shareable from now on."""
        ...

    def grow(self, request: int, length: int, now: float) -> Room | None:
        """Room for at least `length` tokens in all; called when the sequence's length == ask_at, with length > ask_at.

        None: refused, and nothing has changed for this sequence."""
        ...

    def finish(self, request: int, output: bytes, now: float) -> None:
        """All output tokens are written: publish prompt + output, then release the request."""
        ...

    def abort(self, request: int, now: float) -> None:
        """Release at once (preempted).  What was published may stay cached."""
        ...

    def victim(self) -> int | None:
        """The request to preempt when `grow` was refused: the youngest; None while nothing runs."""
        ...

    def gauges(self) -> Gauges: ...

    def counters(self) -> Counters: ...

    def blocks(self) -> bytes:
        """A picture of the pool: one byte per block (or per bucket of blocks; at most 4096 bytes in all), 0..255 the
        share of its slots that hold tokens."""
        ...


@runtime_checkable
class Compacting(Protocol):
    """A policy that moves what is cached, when the engine says that it may.  Moving is never part of another call."""

    def gap(self, tokens: float, now: float) -> None:
        """The device has had nothing to do until `now`, for as long as it takes to copy `tokens` tokens; what it does
        not use of that is lost."""
        ...

    def rest(self, now: float) -> None:
        """Moves, at once, until nothing is left that a move gains."""
        ...


@runtime_checkable
class Shrinking(Policy, Compacting, Protocol):
    """A policy whose pool can be pictured before and after compaction."""

    def shrink(self, share: float, now: float) -> None:
        """Evicts until `share` (0..1) of the usable slots hold tokens, as far as nobody uses them."""
        ...
