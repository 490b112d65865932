"""Every message there is: one frozen struct each, an array on the wire that begins with its number.

    frame     u32 little endian: bytes that follow | MessagePack array [number, field, field, ...]
    numbers   1..63 requests · 64..127 replies · 128..191 pushes; never used again for anything else
    fields    in the order given here; new ones come last and have a default, so that either side may be the older

`id` pairs a reply with its request; requests may be sent ahead, and replies come in the order of their requests.  Id 0
asks for no reply, and only Free and Trim may have it: what would have been an error is counted and logged then.

Sequences are named by the client: any number from 0 to 2^63-1 that is not running now.  Tokens are bytes, four per
token, little endian; what they mean is the client's own affair, they are only ever compared.  Extents are
flat: slot, length, slot, length, ...
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

VERSION: Final = 1
"""Of the protocol; a daemon refuses a Hello of another."""

Whole = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Signed = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Secret = Annotated[bytes, msgspec.Meta(max_length=64)]


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What all have in common; `tag` is the number on the wire."""


class Namespace(msgspec.Struct, array_like=True, frozen=True):
    """The root of a prefix tree, compared as a structure: ("ab", "c") is not ("a", "bc")."""

    tenant: Name = ""
    model: Name = ""
    adapter: Name = ""
    salt: Name = ""


class Plane(msgspec.Struct, array_like=True, frozen=True):
    """One strided array of the pool: slot n lies at `offset + n * slot_bytes`."""

    name: str  # "3.k", "3.v", "3.kv" (MLA), "3.k.scale", "blocks" (opaque)
    offset: int  # bytes from the pool's start
    slot_bytes: int
    dtype: str  # "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8"
    shape: tuple[int, ...]  # of one slot: (kv_heads, head_dim), (latent,), (kv_heads,) ...


class Pool(msgspec.Struct, array_like=True, frozen=True):
    """A pool as a client needs to know it.  All sizes in slots unless said."""

    name: str
    granularity: str  # "token", or "opaque": whole blocks whose inside is the engine's own
    blocks: int
    block_size: int
    padding: int  # slots 0..padding-1; 0 is read padding (zero), padding-1 write padding (anything)
    usable: int
    quantum: int  # of a growth run
    windowed: bool
    fingerprint: str  # of layout and dtype; a Hello that names another is refused
    size_bytes: int
    generation: int  # of the memory; another after each start that does not take over what was there
    kind: str  # of the descriptor: "memfd", or "none" where nothing can be mapped
    planes: list[Plane]
    append: str = (
        ""  # how sequences go on behind a shared partial slot, unless Hello says otherwise: "chain", "peel"
    )


class Limits(msgspec.Struct, array_like=True, frozen=True):
    """What one session may do before it is refused or dropped."""

    frame_bytes: int  # of one frame, without its length
    reply_bytes: int  # waiting to be read; past it the daemon reads no further requests
    reply_seconds: float  # ... and past this, without a byte read, drops the session
    sequences: int  # running at a time
    batch: int  # verbs in one Batch


# -- requests ---------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag=1):
    """Opens a session: the first message, but for Ping and the control verbs.  Replied to by Welcome."""

    id: Whole
    version: Whole
    name: Name  # of the client, for people
    pool: Name = ""  # "": the only one, or the first
    namespace: Namespace = Namespace()
    fingerprint: Name = ""  # "": any
    page: Whole = 1  # slots per page of its kernels
    append: str = ""  # "chain", "peel", or "" for the pool's default
    peel_max: Signed = -1  # tokens; -1: the pool's default
    movable: bool = False
    map: bool = True  # asks for the descriptors of pool, session page and wake-up
    quota: Whole = 0  # slots; 0: what the pool allows
    boot: Whole = 0  # of the daemon it last spoke to; another one means that nothing of then is left
    resume: Whole = 0  # session that this process lost its connection of
    group: Whole = 0  # session whose engine this process is part of
    secret: Secret = b""  # of the session named by `resume` or `group`


class OpenNamespace(Message, frozen=True, tag=2):
    """Another namespace beside the one named in Hello.  Replied to by Opened."""

    id: Whole
    namespace: Namespace


class Probe(Message, frozen=True, tag=3):
    """How much of a prompt is cached; changes nothing.  Replied to by Probed."""

    id: Whole
    namespace: Whole
    tokens: bytes


class Allocate(Message, frozen=True, tag=4):
    """Starts a sequence, or does nothing.  Replied to by Admitted, Later or Never."""

    id: Whole
    namespace: Whole
    sequence: Whole
    tokens: bytes
    ticket: Whole = 0
    priority: Whole = 0
    contiguous: bool = False
    wait_for_commit: bool = False


class Extend(Message, frozen=True, tag=5):
    """Room for `tokens` more (0: one growth run).  Replied to by Grown, Later or Never."""

    id: Whole
    sequence: Whole
    written: Whole = 0  # positions written so far; never falls
    tokens: Whole = 0
    ticket: Whole = 0


class Commit(Message, frozen=True, tag=6):
    """Publishes positions [0, length), which the device has finished writing.  Replied to by Committed.

    Slots that a reply listed as targets of copies are published only once `copied` counts that reply.
    """

    id: Whole
    sequence: Whole
    length: Whole
    tokens: bytes = b""  # those that follow the ones already told
    priority: Signed = -1  # -1: as it was
    expiry_ms: Whole = 0  # the priority ends so long from now; 0: never
    copied: Whole = (
        0  # replies with copies for this sequence whose copies have been made, in the order they came
    )


class Fork(Message, frozen=True, tag=7):
    """A child that shares the first `length` tokens (-1: all written).  Replied to by Forked or Later."""

    id: Whole
    sequence: Whole
    child: Whole
    length: Signed = -1
    written: Whole = 0
    ticket: Whole = 0
    copied: Whole = 0  # as in Commit, of the parent: what it has not copied yet cannot be shared


class Trim(Message, frozen=True, tag=8):
    """Drops what lies before `keep_from` and from `keep_to` on (-1: nothing).  Replied to by Trimmed; may be posted."""

    id: Whole
    sequence: Whole
    keep_from: Whole = 0
    keep_to: Signed = -1
    fence: Whole = 0
    written: Whole = 0  # positions written so far, as in Extend; a front can only be dropped once it is


class Free(Message, frozen=True, tag=9):
    """Ends a sequence; its slots are not used again before step `fence` has completed.  Done; may be posted."""

    id: Whole
    sequence: Whole
    fence: Whole = 0


class SwapOut(Message, frozen=True, tag=10):
    """To host memory.  UNSUPPORTED in this version."""

    id: Whole
    sequence: Whole
    fence: Whole = 0


class SwapIn(Message, frozen=True, tag=11):
    """Back from host memory.  UNSUPPORTED in this version."""

    id: Whole
    sequence: Whole
    ticket: Whole = 0


class Prefetch(Message, frozen=True, tag=12):
    """Host memory back ahead of its use.  UNSUPPORTED in this version."""

    id: Whole
    namespace: Whole
    tokens: bytes


class Pin(Message, frozen=True, tag=13):
    """Keeps what is cached of a prefix.  Replied to by Pinned."""

    id: Whole
    namespace: Whole
    tokens: bytes


class Unpin(Message, frozen=True, tag=14):
    """Ends a pin.  Done."""

    id: Whole
    pin: Whole


class Withdraw(Message, frozen=True, tag=15):
    """Gives a ticket up.  Done."""

    id: Whole
    ticket: Whole


class Release(Message, frozen=True, tag=16):
    """Ends a session of this process that lost its connection, and of which nothing is in use.  Done."""

    id: Whole
    session: Whole
    secret: Secret


class Bye(Message, frozen=True, tag=17):
    """Ends the session: all steps have completed and nothing is mapped.  Done, then the connection is closed."""

    id: Whole


class Ping(Message, frozen=True, tag=18):
    """Replied to by Pong; needs no session."""

    id: Whole


Batchable = (
    Probe
    | Allocate
    | Extend
    | Commit
    | Fork
    | Trim
    | Free
    | SwapOut
    | SwapIn
    | Prefetch
    | Pin
    | Unpin
    | Withdraw
)


class Reclaim(Message, frozen=True, tag=20):
    """Goes on with a sequence of a session that was of an earlier boot; none of its steps is under way any more.

    Every slot is looked at: those of a sequence that cannot go on give Ended, and change nothing.  Replied to by
    Reclaimed; what is not reclaimed is free with Release.
    """

    id: Whole
    session: Whole  # of then
    secret: Secret  # of it
    namespace: Whole
    sequence: Whole  # its number from here on
    tokens: bytes  # all of them
    extents: list[Whole]  # where its positions stand, with the room behind its last token
    priority: Whole = 0


BATCH_VERBS: Final = 65536
"""Of any daemon's Batch; the daemon's own limit, which is less, stands in Welcome."""


class Batch(Message, frozen=True, tag=19):
    """Verbs answered in order, each as if alone; their own ids mean nothing but 0.  Replied to by Results."""

    id: Whole
    verbs: Annotated[list[Batchable], msgspec.Meta(max_length=BATCH_VERBS)]


class Inspect(Message, frozen=True, tag=32):
    """A page of what the daemon knows.  Replied to by Inspected.  Control."""

    id: Whole
    kind: Name  # see docs/protocol.md
    pool: Name = ""
    cursor: Whole = 0
    limit: Whole = 0  # rows; 0: as many as fit


class Evict(Message, frozen=True, tag=33):
    """Evicts up to `tokens` cached tokens that nobody holds.  Replied to by Evicted.  Control."""

    id: Whole
    tokens: Whole
    pool: Name = ""


class Defrag(Message, frozen=True, tag=34):
    """Compaction: how it stands, on, off, or once to rest.  Replied to by Defragged.  Control."""

    id: Whole
    pool: Name = ""  # "": all
    action: Name = "status"  # one of ACTIONS


ACTIONS: Final = ("status", "start", "stop", "once")
"""Of Defrag."""


class Audit(Message, frozen=True, tag=35):
    """Recounts a pool from nothing.  Replied to by Audited.  Control."""

    id: Whole
    pool: Name = ""


class Drain(Message, frozen=True, tag=36):
    """As SIGTERM: no new work, then the end.  Done.  Control."""

    id: Whole
    deadline_ms: Whole = 0  # 0: as configured


class SetConfig(Message, frozen=True, tag=37):
    """Changes a setting that may be changed while running.  Done.  Control."""

    id: Whole
    name: Name
    value: Name


class Record(Message, frozen=True, tag=38):
    """A recording of what clients ask of a pool, fetched bit by bit; ends with its connection.  Recorded.  Control."""

    id: Whole
    action: Name = "fetch"  # one of RECORDINGS
    pool: Name = ""  # start: "" is the first
    values: bool = False  # start: token values as they are; else blinded, so that only equality can be told
    key: Secret = b""  # start: what to blind with, so that two boots do it alike; empty: what nobody knows


RECORDINGS: Final = ("start", "fetch", "stop")
"""Actions of Record."""


class Keep(Message, frozen=True, tag=39):
    """Pins a cached prefix until Unkeep or the daemon's end, whoever's connection ends.  Pinned.  Control."""

    id: Whole
    pool: Name = ""  # "": the first
    node: Whole = 0  # as `tree` lists it; 0: by `namespace` and `tokens`
    length: Whole = (
        0  # tokens of the prefix that ends with `node`: tells it from another one that has its number now
    )
    namespace: Namespace = Namespace()
    tokens: bytes = b""


class Unkeep(Message, frozen=True, tag=40):
    """Ends a pin of Keep.  Done.  Control."""

    id: Whole
    pin: Whole
    pool: Name = ""


class Reload(Message, frozen=True, tag=41):
    """As SIGHUP: the settings are read again.  Replied to by Reloaded.  Control."""

    id: Whole


SessionVerb = (
    OpenNamespace
    | Probe
    | Allocate
    | Extend
    | Commit
    | Fork
    | Trim
    | Free
    | SwapOut
    | SwapIn
    | Prefetch
    | Pin
    | Unpin
    | Withdraw
    | Release
    | Reclaim
    | Bye
    | Batch
)
ControlVerb = Inspect | Evict | Defrag | Audit | Drain | SetConfig | Record | Keep | Unkeep | Reload
Request = Hello | Ping | SessionVerb | ControlVerb


# -- replies ----------------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag=64):
    """The session is open.  Descriptors come with this frame's first byte, named in order by `descriptors`."""

    id: int
    version: int
    server: str  # name and version of the daemon, for people
    boot: int
    session: int
    secret: bytes
    namespace: int
    pool: Pool
    limits: Limits
    descriptors: list[str]  # of "pool", "page", "wake"
    former: int = (
        0  # session of an earlier boot that this one takes the place of: sequences are lost, prefixes are not
    )


class Opened(Message, frozen=True, tag=65):
    id: int
    namespace: int


class Probed(Message, frozen=True, tag=66):
    id: int
    hit: int


class Admitted(Message, frozen=True, tag=67):
    """OK: `hit` tokens are cached, `extents` place positions [0, capacity)."""

    id: int
    hit: int
    capacity: int
    extents: list[int]
    copies: list[int] = []  # source, target, length, ...: to be made by the client before its first write


class Grown(Message, frozen=True, tag=68):
    """OK: `extents` place positions [position, capacity); what lies before keeps its place."""

    id: int
    position: int
    capacity: int
    extents: list[int]
    copies: list[int] = []


class Later(Message, frozen=True, tag=69):
    """Not now: ask again with `ticket`, which keeps its place in line.  Slots, of the limit that binds."""

    id: int
    ticket: int
    reason: str
    needed: int
    free_now: int
    coming_free: int
    evictable: int
    retry_after_ms: int
    stalled: list[int] = []
    quota: str = (
        ""  # which one binds: "session", or of the tenant "slots", "reserved_runs", "requests_per_second"
    )
    limit: int = 0  # what it allows


class Never(Message, frozen=True, tag=70):
    """`needed` slots would not fit an otherwise empty pool under this quota of `limit` slots."""

    id: int
    needed: int
    limit: int
    quota: str = ""  # which one, as in Later; empty: the size of the pool


class Committed(Message, frozen=True, tag=71):
    id: int
    length: int  # positions [0, length) are shareable now
    published: int  # tokens of them that this commit added
    duplicates: int  # own copies of what was there already


class Forked(Message, frozen=True, tag=72):
    id: int
    length: int


class Trimmed(Message, frozen=True, tag=73):
    """`extents` place positions [keep_to, capacity): room kept behind a roll-back may stand elsewhere than it did."""

    id: int
    capacity: int
    extents: list[int] = []


class Pinned(Message, frozen=True, tag=74):
    """`length` tokens are kept; pin 0 and length 0 where nothing was cached."""

    id: int
    pin: int
    length: int


class Done(Message, frozen=True, tag=75):
    id: int


class Pong(Message, frozen=True, tag=76):
    id: int
    boot: int


class Error(Message, frozen=True, tag=77):
    """The request changed nothing; `code`: see errors.py; `message` says what was wrong and which limit applied."""

    id: int
    code: int
    message: str


BatchReply = Probed | Admitted | Grown | Later | Never | Committed | Forked | Trimmed | Pinned | Done | Error


class Results(Message, frozen=True, tag=78):
    """One for each verb of the Batch, in its order; Done for a posted one that was done."""

    id: int
    results: list[BatchReply]


class Reclaimed(Message, frozen=True, tag=79):
    """The sequence is running as it was; positions [0, length) of it are shareable."""

    id: int
    length: int


class Inspected(Message, frozen=True, tag=96):
    """Rows of `kind`; `cursor` fetches the next page, 0 when this was the last."""

    id: int
    kind: str
    rows: list[dict[str, Any]]
    cursor: int = 0


class Evicted(Message, frozen=True, tag=97):
    id: int
    tokens: int


class Audited(Message, frozen=True, tag=98):
    """What is wrong, as sentences; none when sound."""

    id: int
    faults: list[str]
    milliseconds: float


class Compaction(msgspec.Struct, array_like=True, frozen=True):
    """How compaction of one pool stands.  Counts are since the daemon's start."""

    pool: str
    mode: str  # that holds, by the setting or by Defrag: "off", "idle": in gaps between steps; "forced": at any time
    state: str  # "off", "settled", "backed off", "planning", "waiting" for a gap, "moving", "stopping"
    reason: str  # of that, for people
    once: bool  # asked to go on to rest, whatever the mode
    purpose: str  # of the plan under way: "free_blocks", "run", "join"; "" while none is
    progress: (
        float  # of its moves that have ended, or of all that `once` is to gain; 0 to 1, 0 while nothing is
    )
    moves_in_flight: int  # whose copies have not ended
    passes: int  # that came to an end
    plans: int
    planned: int  # moves
    published: int
    abandoned_leased: int  # somebody read the source who could not be told
    abandoned_freed: int  # the source was evicted, split, or moved by another
    deferred: int  # could not begin, or not be published, just then
    over_budget: int  # planned, and left when the time for them was over
    failed: int  # copies that the device could not make
    moved_tokens: int
    moved_bytes: int
    blocks_given: int  # whole free blocks more, less those that moves took into use
    retired_tokens: int  # old places that engines may still read, now
    unpacked_pct: float  # of the free memory, what is not in whole free blocks
    unusable_pct: float  # ... and what is not in runs of `compaction_run_blocks`
    copy_seconds: float  # the device spent on it
    copy_bytes_per_second: float  # measured; 0 before the first copy
    steps: int  # of engines that began while copies were under way or planned
    collisions: int  # of those, begins that met a running copy
    overtaken: (
        int  # times that the pool was let be for a while, as it changed faster than it could be followed
    )


class Defragged(Message, frozen=True, tag=99):
    id: int
    pools: list[Compaction]


class Noted(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One thing that a client did, as a recording has it.  Which fields mean something depends on `what`."""

    what: str  # "begun", "told", "cut", "forked", "ended", "left"
    request: int  # the daemon's number of the sequence, never used again in its boot; 0: of "left"
    at: float  # seconds of the daemon's monotonic clock; of "begun", when it was first asked for
    session: int
    space: int  # "begun": the namespace, as a hash under the key; "forked": the parent's `request`
    count: int  # tokens: of the prompt; where those told of begin; that are left or shared; of the whole sequence
    hit: int  # "begun": tokens found cached
    tokens: bytes  # "begun": the prompt's, or the first of them; "told": those that follow


class Recorded(Message, frozen=True, tag=100):
    """What was noted, the oldest first.  Counts are since the recording's start."""

    id: int
    at: float  # now, on the daemon's monotonic clock
    floor: float  # no request will be told of that was asked for before
    more: bool  # there is more to fetch already
    running: int  # requests told of that have not ended
    waiting: int  # requests that were told LATER, so far
    lost_requests: int  # not told of, since too much had not been fetched
    lost_tokens: int  # ... of these and of others
    never: int  # requests that were told NEVER
    given_up: int  # told LATER, and not asked for again
    events: list[Noted]


class Reloaded(Message, frozen=True, tag=101):
    """Names of settings that hold from now on, and of those that differ and need a restart.

    What stands beside the settings (token files, the admin API's sockets) was looked at, too: in sentences.
    """

    id: int
    changed: list[str]
    needs_restart: list[str]
    taken: list[str] = []  # what is new of it
    failed: list[str] = []  # what cannot be had, and what to do


Reply = (
    Welcome
    | Opened
    | Pong
    | BatchReply
    | Reclaimed
    | Results
    | Inspected
    | Evicted
    | Audited
    | Defragged
    | Recorded
    | Reloaded
)


# -- pushes -----------------------------------------------------------------------------------------------------------


class Ready(Message, frozen=True, tag=128):
    """The ticket's request would be served now."""

    ticket: int


class Published(Message, frozen=True, tag=129):
    """The prefix this ticket waits for is cached now."""

    ticket: int


class Abandoned(Message, frozen=True, tag=130):
    """The prefix this ticket waits for will not come from the one that was computing it."""

    ticket: int


class Preempt(Message, frozen=True, tag=131):
    """Free this sequence within so many milliseconds."""

    sequence: int
    deadline_ms: int


class Pressure(Message, frozen=True, tag=132):
    """Memory for growth is short: give back second runs (Trim to what is written)."""

    level: int


class Draining(Message, frozen=True, tag=133):
    """The daemon ends in so many milliseconds; new work is refused."""

    deadline_ms: int


class Moved(Message, frozen=True, tag=134):
    """Positions [position, position + sum of lengths) lie at `extents` from the step on that applies `epoch`.

    What lies before and behind stays.  No extents: what was moved has ended meanwhile, and only the epoch counts.
    """

    epoch: int
    sequence: int
    position: int
    extents: list[int]


Push = Ready | Published | Abandoned | Preempt | Pressure | Draining | Moved
Outgoing = Reply | Push
