"""Everything the admin API shows, as frozen structs: what a handler sees of the daemon, and what the client gets.

    daemon ── Source ──► these structs ──► JSON, and by the same types the OpenAPI document

A view is a copy: it holds numbers and text, nothing that lives.  Field names are those of `kvslotctl` and of the wire's
Inspect; each field's description is in its annotation, from where the document takes it.  Sizes are token slots and
counts since the daemon's start unless the description says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Generic, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta

Item = TypeVar("Item")


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What all have in common: frozen, and built by field names."""


class Page(View, Generic[Item], frozen=True, kw_only=True):
    """Some of a list.  Pages are taken one after the other while the daemon goes on: together they are no snapshot."""

    items: list[Item]
    next: Annotated[str | None, Meta(description="`cursor` of the next page; null: this was the last")] = None


# -- errors -----------------------------------------------------------------------------------------------------------


class ErrorBody(View, frozen=True, kw_only=True):
    """What was wrong, and what to do about it."""

    code: Annotated[str, Meta(description="short and stable, for programs", examples=["not_found"])]
    message: Annotated[str, Meta(description="for people: what was wrong, and which limit applied")]
    remedy: Annotated[str, Meta(description="for people: what to do; empty where there is nothing")] = ""


class Failure(View, frozen=True, kw_only=True):
    """Every answer that is not what was asked for."""

    error: ErrorBody


# -- the daemon as a whole --------------------------------------------------------------------------------------------


class Check(View, frozen=True, kw_only=True):
    """One named question about the daemon's health."""

    name: Annotated[str, Meta(examples=["device"])]
    ok: bool
    reason: Annotated[str, Meta(description="what it was judged by; with `ok` false, what is wrong")]
    vital: Annotated[
        bool,
        Meta(description="whether engines need it; a failed one that is not leaves the daemon's `ok` true"),
    ] = True


class Health(View, frozen=True, kw_only=True):
    """Whether the daemon works: every check by name.  Status 200 if all vital ones are ok, else 503."""

    ok: bool
    checks: list[Check]


class Readiness(View, frozen=True, kw_only=True):
    """Whether new work is taken.  Status 200 if `ready`, else 503."""

    ready: bool
    reason: Annotated[str, Meta(description="why, or why not", examples=["serving"])]


class AdminStats(View, frozen=True, kw_only=True):
    """What the admin API counts of itself."""

    connections: Annotated[int, Meta(description="open now")] = 0
    streams: Annotated[int, Meta(description="of /v1/events, now")] = 0
    requests: int = 0
    failures: Annotated[int, Meta(description="answers that were failures")] = 0
    refused_connections: Annotated[int, Meta(description="turned away since too many were open")] = 0
    cut_connections: Annotated[int, Meta(description="cut off since the client was too slow")] = 0
    dropped_streams: Annotated[int, Meta(description="of /v1/events, since the client did not read")] = 0
    faults: Annotated[int, Meta(description="requests that the API failed to answer by its own fault")] = 0


class Recording(View, frozen=True, kw_only=True):
    """A recording in progress (`kvslotctl record`): what engines ask of a pool is noted for that process."""

    pool: str
    pid: Annotated[int, Meta(description="of who records")]
    uid: int
    age_s: Annotated[float, Meta(description="seconds since it began")]
    values: Annotated[bool, Meta(description="whether it takes tokens as they are; else they leave blinded")]
    requests: Annotated[int, Meta(description="noted so far")]
    lost_requests: Annotated[int, Meta(description="passed over, since it fetches too slowly")]
    lost_tokens: int
    waiting_bytes: Annotated[int, Meta(description="noted and not fetched")]


class Stats(View, frozen=True, kw_only=True):
    """The daemon in one row."""

    version: str
    boot: Annotated[int, Meta(description="number of this start; another one after a restart")]
    pid: int
    uptime_s: float
    state: Annotated[str, Meta(description="running or draining")]
    drain_left_s: Annotated[
        float | None, Meta(description="seconds until a drain ends whatever still runs; null: no drain")
    ]
    socket: Annotated[str, Meta(description="where engines connect")]
    pools: int
    sessions: int
    sessions_lost: Annotated[int, Meta(description="whose connection ended and whose process may still run")]
    sequences: int
    size_bytes: Annotated[int, Meta(description="memory of all pools")]
    recordings: Annotated[list[Recording], Meta(description="in progress, one of a pool at the most")]
    connections: Annotated[int, Meta(description="open on the engines' socket, tools included")]
    accepted: Annotated[int, Meta(description="connections taken")]
    refused_connections: Annotated[int, Meta(description="connections refused since too many were open")]
    peer_faults: Annotated[int, Meta(description="connections ended since they broke the protocol")]
    requests: Annotated[int, Meta(description="verbs answered")]
    refused: Annotated[int, Meta(description="verbs answered with an error")]
    log_level: str
    log_lines_lost: Annotated[int, Meta(description="log lines that nobody took")]
    admin: AdminStats
    events_last: Annotated[int, Meta(description="number of the latest event of /v1/events")]


class Pool(View, frozen=True, kw_only=True):
    """A pool: what it is, and every slot by its state."""

    pool: Annotated[str, Meta(description="name")]
    granularity: Annotated[
        str, Meta(description="token, or opaque: whole blocks whose inside is the engine's own")
    ]
    block_size: Annotated[int, Meta(description="slots of a block")]
    quantum: Annotated[int, Meta(description="slots of a growth run")]
    watermark: Annotated[int, Meta(description="slots kept back from new requests")]
    eviction: Annotated[str, Meta(description="policy", examples=["lru"])]
    append: Annotated[
        str, Meta(description="how a sequence goes on behind a shared partial slot: chain or peel")
    ]
    size_bytes: int
    slot_bytes: Annotated[int, Meta(description="bytes of one slot in all planes")]
    planes: int
    kind: Annotated[str, Meta(description="of the memory", examples=["memfd"])]
    fingerprint: Annotated[str, Meta(description="of layout and dtype")]
    generation: Annotated[int, Meta(description="of the memory")]
    namespaces: int
    usable: Annotated[int, Meta(description="slots that can hold tokens")]
    free: Annotated[int, Meta(description="slots nobody has")]
    private: Annotated[int, Meta(description="slots of running sequences, not published")]
    cached: Annotated[int, Meta(description="slots of published prefixes")]
    fenced: Annotated[int, Meta(description="slots given back that a submitted step may still touch")]
    moving: Annotated[int, Meta(description="slots a move writes, or moved from and still read")]
    reserved: Annotated[int, Meta(description="slots set aside for a waiting ticket")]
    quarantined: Annotated[
        int, Meta(description="slots of lost sessions whose processes may still write them")
    ]
    padding: Annotated[int, Meta(description="slots never handed out")]
    blocks: int
    blocks_free: Annotated[int, Meta(description="wholly free blocks")]
    tokens_held: Annotated[int, Meta(description="distinct tokens that slots hold")]
    unwritten: Annotated[int, Meta(description="room of running sequences that no token stands in yet")]
    duplicate_tokens: Annotated[int, Meta(description="private copies of what the cache has")]
    peeled_tokens: Annotated[int, Meta(description="private copies made to keep a tail contiguous")]
    evictable: Annotated[int, Meta(description="cached tokens that could go now")]
    leased: Annotated[int, Meta(description="cached tokens that somebody reads or pins")]
    pinned: Annotated[int, Meta(description="tokens that pins keep")]
    pinned_waste_tokens: Annotated[
        int, Meta(description="free slots of blocks that something keeps from being wholly free")
    ]
    largest_free_run: Annotated[int, Meta(description="longest run of free slots")]
    nodes: Annotated[int, Meta(description="of the prefix tree")]
    sequences: int
    sessions: int
    tickets: Annotated[int, Meta(description="requests that wait")]
    moves: Annotated[int, Meta(description="moves under way")]
    evicted_tokens: int
    copied_tokens: int
    moved_tokens: int
    extents_given: int
    extent_tokens: int
    hit_tokens: Annotated[int, Meta(description="prompt tokens that were found cached")]
    prompt_tokens: Annotated[int, Meta(description="prompt tokens asked for")]
    lost_hit_tokens: Annotated[
        int, Meta(description="cached tokens that sessions of whole pages could not use")
    ]
    bad_handles: Annotated[int, Meta(description="calls that named what is not, or no longer, there")]
    late_completions: Annotated[int, Meta(description="copies that ended after their move was given up")]
    internal_fragmentation_pct: Annotated[
        float,
        Meta(description="of the slots in blocks that are not wholly free, the share that holds no token"),
    ]


class Block(View, frozen=True, kw_only=True):
    """A block: how many of its slots are in each state."""

    block: int
    free: int
    private: int
    cached: int
    fenced: int
    moving: int
    reserved: int
    quarantined: int
    padding: int


class Blocks(View, frozen=True, kw_only=True):
    """Some blocks of a pool, by number."""

    pool: str
    block_size: int
    blocks: Annotated[int, Meta(description="of the pool")]
    items: list[Block]
    next: str | None = None


class Frag(View, frozen=True, kw_only=True):
    """How a pool is fragmented; `definitions` beside the items says what each figure is."""

    pool: str
    block_size: int
    blocks: int
    blocks_free: int
    free: int
    internal_waste_pct: float
    reserved_pct: float
    unwritten: int
    duplicate_tokens: int
    peeled_tokens: int
    pinned_waste_tokens: int
    pinned_waste_pct: float
    free_runs: int
    hole_tokens: int
    largest_free_run: int
    scatter_pct: float
    extents_per_1k_tokens: float
    usable_run_pct: Annotated[
        dict[str, float],
        Meta(description="by length in blocks, 1 to 1024", examples=[{"1": 97.5, "1024": 12.0}]),
    ]
    lost_hit_tokens: int


class Frags(View, frozen=True, kw_only=True):
    """Fragmentation of each pool, and what the figures mean."""

    items: list[Frag]
    definitions: Annotated[dict[str, str], Meta(description="by field of the items")]
    next: str | None = None


DEFINITIONS: Final[Mapping[str, str]] = {
    "blocks_free": "blocks all of whose slots are free",
    "free": "slots that nobody has",
    "internal_waste_pct": "of the slots in blocks that are not wholly free, the share that holds no token; room that "
    "running sequences have not written yet is left out",
    "reserved_pct": "of the slots in blocks that are not wholly free, the share that is such room",
    "unwritten": "slots that running sequences may grow into and have not written",
    "duplicate_tokens": "private copies of tokens that the cache has as well",
    "peeled_tokens": "tokens copied so that a tail lies in one piece",
    "pinned_waste_tokens": "free slots in blocks that something else keeps from being wholly free",
    "pinned_waste_pct": "the same as a share of all usable slots",
    "free_runs": "runs of free slots, however long",
    "hole_tokens": "free slots outside whole growth runs",
    "largest_free_run": "slots of the longest free run",
    "scatter_pct": "share of the free slots that is not in the longest free run",
    "extents_per_1k_tokens": "extents handed out per thousand tokens since the start: 1000 / this is the mean length",
    "usable_run_pct": "for a length in blocks: share of the free slots that lies in runs that long or longer; 100 "
    "where nothing is free",
    "lost_hit_tokens": "cached tokens that a request could not use, since its session's page size or opaque blocks cut "
    "the hit short; since the start",
}
"""What the figures of `Frag` are."""


class Session(View, frozen=True, kw_only=True):
    """An engine's session."""

    session: Annotated[int, Meta(description="number; used once in a boot")]
    name: Annotated[str, Meta(description="of the client, by its own word")]
    pid: int
    uid: int
    pool: str
    state: Annotated[str, Meta(description="live; lost: its connection ended; ending: being cleaned up")]
    stalled: Annotated[bool, Meta(description="a submitted step has not completed for `stall_seconds`")]
    age_s: float
    page: Annotated[int, Meta(description="slots per page of its kernels")]
    sequences: int
    charged: Annotated[int, Meta(description="slots charged to its quota")]
    quota: Annotated[int, Meta(description="slots it may hold")]
    fenced: Annotated[int, Meta(description="slots of its that wait for a step to complete")]
    pins: int
    submitted: Annotated[int, Meta(description="steps")]
    completed: Annotated[int, Meta(description="steps")]
    behind_s: Annotated[
        float, Meta(description="seconds since it last had completed all it submitted; 0: it has")
    ]
    lost_s: Annotated[float, Meta(description="seconds since its connection ended; 0: it has not")]
    owes: Annotated[int, Meta(description="victims it was asked to free and has not")]
    group: Annotated[int, Meta(description="sessions of its engine")]
    movable: Annotated[bool, Meta(description="what it reads may be moved")]
    follows: Annotated[bool, Meta(description="it steps often enough to be told of moves")]
    retired_tokens: Annotated[int, Meta(description="old places of moved tokens that it may still read")]
    outbox_bytes: Annotated[int, Meta(description="replies it has not read")]
    frames: Annotated[int, Meta(description="received")]
    posted_errors: Annotated[int, Meta(description="of what it asked no reply to: how much was refused")]


class Namespace(View, frozen=True, kw_only=True):
    """The root of a prefix tree.  The salt itself is never shown."""

    namespace: Annotated[int, Meta(description="number in this boot")]
    tenant: str
    model: str
    adapter: str
    salted: bool
    in_use: Annotated[bool, Meta(description="a session has it open, or something of it is held")]
    empty: Annotated[bool, Meta(description="nothing is cached in it")]


class Prefix(View, frozen=True, kw_only=True):
    """A cached stretch of tokens behind another one.  Tokens themselves are never shown."""

    node: Annotated[int, Meta(description="number; given to another one once this has gone")]
    namespace: Annotated[
        int, Meta(description="0 where the path to its root is too long to be followed here")
    ]
    parent: Annotated[int, Meta(description="node before it; the namespace's number where there is none")]
    depth: Annotated[int, Meta(description="tokens before this stretch")]
    tokens: Annotated[int, Meta(description="of this stretch; the prefix that ends here has depth + tokens")]
    extents: Annotated[int, Meta(description="pieces it lies in")]
    hits: Annotated[int, Meta(description="requests whose longest cached prefix ended here")]
    age: Annotated[int, Meta(description="verbs that changed the pool since it was last used")]
    holds: Annotated[int, Meta(description="leases and pins that end here, and held stretches behind it")]
    priority: int
    leaf: Annotated[bool, Meta(description="nothing is cached behind it")]


class Pin(View, frozen=True, kw_only=True):
    """A prefix that an operator keeps."""

    pin: int
    pool: str
    namespace: int
    tokens: Annotated[int, Meta(description="kept, from the namespace's root on")]
    age_s: float
    by: Annotated[str, Meta(description="who asked for it")]


class Step(View, frozen=True, kw_only=True):
    """Times of one step of the data path, in microseconds, of the sampled requests."""

    step: Annotated[
        str, Meta(description="received, decoded, applied, encoded, sent, or all of them together")
    ]
    mean_us: float
    p50_us: Annotated[float, Meta(description="known to a factor of two: the upper edge of a power of two")]
    p99_us: float
    max_us: float


class Latency(View, frozen=True, kw_only=True):
    """A verb: how many, and how long its steps took."""

    verb: Annotated[str, Meta(examples=["Allocate"])]
    count: int
    refused: int
    sampled: Annotated[int, Meta(description="requests whose times were taken")]
    steps: list[Step]


class Gap(View, frozen=True, kw_only=True):
    """Idle gaps between engines' steps, and what compaction did with them.  Shares are percent, times seconds."""

    pool: str
    mode: Annotated[str, Meta(description="off, idle: compaction in gaps only, forced: at any time")]
    state: Annotated[str, Meta(description="off, settled, backed off, planning, waiting, moving or stopping")]
    reason: Annotated[str, Meta(description="of that, for people")]
    once: Annotated[bool, Meta(description="asked to go on to rest, whatever the mode")]
    purpose: Annotated[
        str, Meta(description="of the plan under way: free_blocks, run, join; empty while none is")
    ]
    progress: float
    watched: Annotated[bool, Meta(description="gaps are looked at just now, since copies wait for one")]
    engines: Annotated[int, Meta(description="that the predictor knows; 0 while it is not watching")]
    stalled: int
    idle: Annotated[bool, Meta(description="a gap goes on")]
    gaps: Annotated[int, Meta(description="that ended while being watched")]
    idle_s: Annotated[float, Meta(description="sum of those")]
    granted_s: Annotated[float, Meta(description="of those, what copies were given")]
    surprise: Annotated[
        float, Meta(description="mean factor between a gap and its prediction; 1 would be exact")
    ]
    steps: Annotated[int, Meta(description="of engines that began while copies were under way or planned")]
    collisions: Annotated[int, Meta(description="of those, begins that met a running copy")]
    moves_in_flight: int
    passes: int
    plans: int
    planned: int
    published: int
    abandoned_leased: Annotated[int, Meta(description="somebody read the source who could not be told")]
    abandoned_freed: Annotated[int, Meta(description="the source was evicted, split or moved by another")]
    deferred: int
    over_budget: int
    failed: Annotated[int, Meta(description="copies that the device could not make")]
    moved_tokens: int
    moved_bytes: int
    blocks_given: Annotated[
        int, Meta(description="whole free blocks more, less those that moves took into use")
    ]
    retired_tokens: Annotated[int, Meta(description="old places that engines may still read, now")]
    unpacked_pct: Annotated[float, Meta(description="of the free memory, what is not in whole free blocks")]
    unusable_pct: Annotated[float, Meta(description="of the free memory, what is not in long runs")]
    copy_seconds: float
    copy_bytes_per_second: Annotated[float, Meta(description="measured; 0 before the first copy")]
    overtaken: Annotated[
        int, Meta(description="times the pool was let be, as it changed too fast to be followed")
    ]


# -- events -----------------------------------------------------------------------------------------------------------


class PoolTick(View, frozen=True, kw_only=True):
    """A pool's sums at one moment."""

    pool: str
    usable: int
    free: int
    private: int
    cached: int
    fenced: int
    moving: int
    reserved: int
    quarantined: int
    padding: int
    blocks_free: int
    tokens_held: int
    unwritten: int
    evictable: int
    leased: int
    pinned: int
    pinned_waste_tokens: int
    largest_free_run: int
    internal_fragmentation_pct: float
    scatter_pct: float
    nodes: int
    sequences: int
    sessions: int
    tickets: int
    moves: int
    hit_tokens: int
    prompt_tokens: int
    evicted_tokens: int
    moved_tokens: int
    copied_tokens: int
    compaction: Annotated[str, Meta(description="its state")]
    gap: Annotated[bool, Meta(description="no engine is in a step")]
    gap_s: Annotated[float, Meta(description="sum of the gaps seen")]
    granted_s: Annotated[float, Meta(description="of those, what copies were given")]
    moved: Annotated[
        list[list[int]],
        Meta(description="moves since the last tick, the latest 128: block before, block after, and tokens"),
    ] = []


class VerbTick(View, frozen=True, kw_only=True):
    """A verb in the second that ended."""

    verb: str
    count: Annotated[int, Meta(description="in that second")]
    refused: int
    p50_us: Annotated[float, Meta(description="of the sampled ones; 0: none was sampled")]
    p99_us: float


class Tick(View, frozen=True, kw_only=True):
    """Once a second in /v1/events, event `tick`: sums of everything a live page shows.  Totals are since the start."""

    time: Annotated[str, Meta(description="ISO 8601, UTC")]
    uptime_s: float
    sessions: int
    sequences: int
    connections: int
    draining: bool
    pools: list[PoolTick]
    verbs: list[VerbTick]
    recordings: list[Recording]


# -- acts -------------------------------------------------------------------------------------------------------------


class DefragAct(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Compaction: on, off, once to rest, or just how it stands."""

    action: Literal["status", "start", "stop", "once"] = "once"
    pool: Annotated[str, Meta(max_length=256, description="empty: all")] = ""


Slots = Annotated[int, Meta(ge=1, le=2**53)]


class EvictAct(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Evicts cached tokens that nobody holds, the coldest first.  An answer with fewer tokens: that was all."""

    tokens: Annotated[Slots, Meta(description="at most so many")]
    pool: Annotated[str, Meta(max_length=256, description="empty: the first")] = ""


class PinAct(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keeps the cached prefix that ends with a node of /v1/prefixes, for as long as this daemon runs or until unpin.

    `tokens` and `depth` have to be the node's as they were listed: a number that was given to another node since is
    recognised by them.
    """

    node: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    depth: Annotated[int, Meta(ge=0, le=2**53)]
    tokens: Slots
    pool: Annotated[str, Meta(max_length=256, description="empty: the first")] = ""


class UnpinAct(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ends an operator's pin."""

    pin: Annotated[int, Meta(ge=1, le=2**53)]
    pool: Annotated[str, Meta(max_length=256, description="empty: the first")] = ""


class AuditAct(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recounts a pool from nothing, in a copy of the process: takes seconds for a large one, and stops nobody."""

    pool: Annotated[str, Meta(max_length=256, description="empty: the first")] = ""


class DrainAct(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ends the daemon as SIGTERM does: no new work, then the end."""

    deadline_ms: Annotated[int, Meta(ge=0, le=3_600_000, description="0: as configured")] = 0


class LogLevelAct(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes what is logged, for as long as this process runs."""

    level: Literal["debug", "info", "warning", "error"]


class ReloadAct(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reads the settings again, as SIGHUP does."""


class Defragged(View, frozen=True, kw_only=True):
    """How compaction stands."""

    items: list[Gap]


class Evicted(View, frozen=True, kw_only=True):
    """What has gone."""

    tokens: int


class Pinned(View, frozen=True, kw_only=True):
    """What is kept."""

    pin: int
    tokens: int


class Audited(View, frozen=True, kw_only=True):
    """What is wrong, as sentences; none when sound."""

    ok: bool
    faults: list[str]
    milliseconds: float


class Reloaded(View, frozen=True, kw_only=True):
    """What the settings' new reading came to."""

    changed: Annotated[list[str], Meta(description="settings that hold from now on")]
    needs_restart: Annotated[
        list[str], Meta(description="settings that differ and hold after a restart only")
    ]
    taken: Annotated[
        list[str], Meta(description="what is new of the tokens and of the sockets of this API, in sentences")
    ] = []
    failed: Annotated[
        list[str], Meta(description="what of them cannot be had, and what to do; what was before goes on")
    ] = []


class Done(View, frozen=True, kw_only=True):
    """It was done."""

    done: bool = True


# -- who asks, and whom ------------------------------------------------------------------------------------------------


class Identity(View, frozen=True, kw_only=True):
    """Who asks, as far as it is known for certain: by the kernel on the Unix socket, by its token on TCP."""

    how: str
    """"unix" or "token"."""
    pid: int = -1
    uid: int = -1
    gid: int = -1
    groups: tuple[int, ...] = ()
    token: str = ""
    """A few digits of the token's digest: tells tokens apart, and gives none away."""
    acts: bool = False
    """On TCP: whether the token is one for acts.  On the Unix socket the daemon decides by user and group."""

    def text(self) -> str:
        """For logs and people."""
        if self.how == "token":
            return f"token {self.token}"
        return f"uid {self.uid} pid {self.pid}"


class SourceError(Exception):
    """Why a source does not do what it was asked; becomes a `Failure`."""

    def __init__(self, status: int, code: str, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.remedy = remedy


class BlockMap(View, frozen=True, kw_only=True):
    """The blocks of a pool, or what has changed of them, two bytes each: state code of most slots, and fill 0..255."""

    pool: str
    block_size: int
    blocks: int
    sequence: int
    whole: bool
    data: memoryview


class Source(Protocol):
    """What the daemon is to the admin API.  All of it raises SourceError; nothing that it returns is alive."""

    async def health(self) -> Health: ...
    async def ready(self) -> Readiness: ...
    async def stats(self) -> Stats: ...
    async def pools(self, pool: str) -> list[Pool]: ...
    async def blocks(self, pool: str, cursor: int, limit: int) -> Blocks: ...
    async def block_map(self, pool: str, since: int) -> BlockMap: ...
    async def frag(self, pool: str) -> list[Frag]: ...
    async def sessions(self, pool: str, cursor: int, limit: int) -> Page[Session]: ...
    async def namespaces(self, pool: str, cursor: int, limit: int) -> Page[Namespace]: ...
    async def prefixes(self, pool: str, order: str, cursor: str, limit: int) -> Page[Prefix]: ...
    async def pins(self, pool: str) -> list[Pin]: ...
    async def latency(self) -> list[Latency]: ...
    async def gaps(self, pool: str) -> list[Gap]: ...
    async def tick(self) -> Tick: ...
    async def allow(self, name: str, identity: Identity) -> None:
        """Raises SourceError where this one may not act; before it is looked at what exactly was asked."""

    async def act(self, name: str, arguments: Any, identity: Identity) -> msgspec.Struct: ...


ORDERS: Final = ("size", "hits", "age")
"""Of /v1/prefixes."""
