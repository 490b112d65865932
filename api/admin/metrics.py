"""/metrics: what Prometheus scrapes, derived anew for each scrape from what the daemon counts.

    Source ──► figures (structs here) ──► families of prometheus-client ──► text, a piece of it a turn of the loop

Names are `kvslot_`, then what is measured, then its unit: slots, tokens, blocks, bytes, seconds, ratio (0 to 1); what
only rises ends in `_total`.  docs/metrics.md has every one, and a test compares.

Every label's value is one of ours: pools as configured, verbs, steps, codes, reasons, states.  Nothing that a client
chose, and no session, sequence or namespace, is a label: such series would grow with those who come and go, and never
end.  The library escapes values; what is no UTF-8 (a pool's name out of the environment) is told by its escapes.

A family of hundreds of series takes milliseconds to write, in which no engine would be answered.  So the text is made
in pieces of `PIECE` samples, and others have the loop in between.  The figures of one pool are of one moment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple, Protocol

import msgspec
from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvslot.api.admin.views import AdminStats

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `Exposition.render` gives: names and labels are plain enough for the version that every scraper knows."""
PIECE: Final = 16
"""Samples written at a time: about 0.2 ms."""
FRESH_SECONDS: Final = 0.25
"""How long a text serves others who ask: many scrapers, or one that never stops, cost no more than four of them."""
EDGES: Final = tuple(range(10, 27, 2))
"""Powers of two of nanoseconds that are edges of a histogram: 1 us, 4 us ... 67 ms."""

STATES: Final = ("free", "private", "cached", "fenced", "moving", "reserved", "quarantined", "padding")
MODES: Final = ("off", "idle", "forced")
COMPACTION_STATES: Final = ("off", "settled", "backed off", "planning", "waiting", "moving", "stopping")
OUTCOMES: Final = ("published", "abandoned_leased", "abandoned_freed", "deferred", "over_budget", "failed")


# -- what it is made from ---------------------------------------------------------------------------------------------


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What all figures have in common."""


class Refused(Figures, frozen=True, kw_only=True):
    verb: str
    code: str
    count: int


class Later(Figures, frozen=True, kw_only=True):
    reason: str
    count: int


class Daemon(Figures, frozen=True, kw_only=True):
    """Of the process.  Counts are since it began."""

    version: str
    protocol: int
    python: str
    loop: str
    draining: bool
    sessions: Mapping[str, int]  # by state
    stalled: int
    sessions_max: int
    connections: int
    connections_max: int
    accepted: int
    refused_connections: int
    peer_faults: int
    requests: Mapping[str, int]  # by verb
    refused: Sequence[Refused]
    sessions_opened: int
    sessions_adopted: int
    sessions_resumed: int
    sequences_reclaimed: int
    sessions_left: int
    sessions_lost: int
    sessions_gone: int
    sessions_stalled: int
    frames: int
    posted_errors: int
    audits: int
    audit_faults: int
    audit_seconds: float
    loop_late_seconds: float
    loop_late_seconds_max: float
    pushes: Mapping[str, int]
    log_events: Mapping[str, int]
    log_left_out: int
    log_lost: int
    collections: int
    collection_seconds: float
    collection_seconds_max: float
    cycles_found: int
    denied: int
    privileged: int
    tenants: Sequence[Tenant]
    admin: AdminStats = AdminStats()
    checks: Mapping[str, bool] = {}  # of /healthz, by name


class Tenant(Figures, frozen=True, kw_only=True):
    """A tenant that is configured: sessions, and how often a quota turned it away."""

    tenant: str
    sessions: int
    sessions_max: int  # 0: any
    refused: Mapping[str, int]  # by quota


class Account(Figures, frozen=True, kw_only=True):
    """What such a tenant holds of a pool, in slots."""

    tenant: str
    charged: int
    unwritten: int
    slots_max: int  # 0: all


class Step(Figures, frozen=True, kw_only=True):
    """Times of one step of one verb, of those that were sampled; `classes[k]`: how many were below 2^k ns."""

    verb: str
    step: str
    sampled: int
    seconds: float
    classes: Sequence[int]


class Compaction(Figures, frozen=True, kw_only=True):
    """As in the wire's `Compaction`."""

    mode: str
    state: str
    moves_in_flight: int
    passes: int
    plans: int
    planned: int
    published: int
    abandoned_leased: int
    abandoned_freed: int
    deferred: int
    over_budget: int
    failed: int
    moved_bytes: int
    blocks_given: int
    retired_tokens: int
    unpacked_pct: float
    unusable_pct: float
    copy_seconds: float
    copy_bytes_per_second: float
    steps: int
    collisions: int
    overtaken: int
    gaps: int
    idle_s: float
    granted_s: float


class Pool(Figures, frozen=True, kw_only=True):
    """Of one pool, at one moment.  Slots (= tokens) unless said; totals since the start."""

    pool: str
    block_size: int
    size_bytes: int
    watermark: int
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
    blocks_free: int
    tokens_held: int
    unwritten: int
    duplicate_tokens: int
    peeled_tokens: int
    evictable: int
    leased: int
    pinned: int
    pinned_waste_tokens: int
    largest_free_run: int
    free_runs: int
    hole_tokens: int
    usable_run_pct: Mapping[str, float]
    internal_waste_pct: float
    scatter_pct: float
    nodes: int
    namespaces: int
    sequences: int
    sessions: int
    waiting: Mapping[str, int]  # by kind: new, growth, commit
    oldest_wait_s: float
    moves: int
    hit_tokens: int
    prompt_tokens: int
    lost_hit_tokens: int
    evicted_tokens: int
    copied_tokens: int
    moved_tokens: int
    extents_given: int
    extent_tokens: int
    bad_handles: int
    late_completions: int
    later: Sequence[Later]
    never: int
    restored: int
    missing: int
    unsettled: bool
    accounts: Sequence[Account]
    compaction: Compaction


class Source(Protocol):
    """Where the figures come from; nothing that it returns is alive."""

    async def daemon(self) -> Daemon: ...
    async def steps(self) -> Sequence[Step]: ...
    async def pool_names(self) -> Sequence[str]: ...
    async def pool(self, name: str) -> Pool: ...


# -- the metrics ------------------------------------------------------------------------------------------------------


class Plain(NamedTuple):
    """A metric that is one number of the figures."""

    name: str
    text: str
    field: str
    scale: float = 1.0


DAEMON_GAUGES: Final = (
    Plain("draining", "1 while the daemon takes no new work and waits for what runs.", "draining"),
    Plain("sessions_limit", "Sessions that there may be at a time.", "sessions_max"),
    Plain("stalled_sessions", "Sessions with a submitted step that has not completed in time.", "stalled"),
    Plain("connections", "Connections open on the engines' socket, tools included.", "connections"),
    Plain("connections_limit", "Connections that there may be at a time.", "connections_max"),
    Plain("loop_late_max_seconds", "Longest that the event loop was late since the start.", "loop_late_seconds_max"),
    Plain("collection_max_seconds", "Longest garbage collection since the start.", "collection_seconds_max"),
)  # fmt: skip
DAEMON_COUNTERS: Final = (
    Plain("connections_accepted", "Connections taken.", "accepted"),
    Plain("connections_refused", "Connections refused since too many were open.", "refused_connections"),
    Plain("peer_faults", "Connections ended since the client broke the protocol.", "peer_faults"),
    Plain("sessions_opened", "Sessions opened.", "sessions_opened"),
    Plain("sessions_adopted", "Sessions of an earlier start whose processes may live, taken over.", "sessions_adopted"),
    Plain("sessions_resumed", "Lost sessions that their process took up again.", "sessions_resumed"),
    Plain("sequences_reclaimed", "Sequences that went on after a restart where they stood.", "sequences_reclaimed"),
    Plain("sessions_left", "Sessions that said goodbye.", "sessions_left"),
    Plain("sessions_lost", "Sessions whose connection ended without goodbye.", "sessions_lost"),
    Plain("sessions_gone", "Sessions of which nothing is left.", "sessions_gone"),
    Plain("sessions_stalled", "Times that a session was found to be stalled.", "sessions_stalled"),
    Plain("frames", "Frames received from sessions.", "frames"),
    Plain("denied", "Acts refused to somebody for who that is.", "denied"),
    Plain("privileged", "Control verbs carried out.", "privileged"),
    Plain("posted_errors", "Refused requests whose client had asked for no reply.", "posted_errors"),
    Plain("audits", "Recounts of a pool.", "audits"),
    Plain("audit_faults", "Disagreements that recounts found; any is a fault of the daemon.", "audit_faults"),
    Plain("audit_seconds", "Time that recounts took, in copies of the process.", "audit_seconds"),
    Plain("loop_late_seconds", "By how much the loop's timer of a second came late, summed.", "loop_late_seconds"),
    Plain("log_suppressed", "Log events left out since they repeated.", "log_left_out"),
    Plain("log_lost_lines", "Log lines that nobody took.", "log_lost"),
    Plain("collections", "Garbage collections.", "collections"),
    Plain("collection_seconds", "Time that garbage collections took.", "collection_seconds"),
    Plain("cycles_found", "Objects that only a garbage collection could free.", "cycles_found"),
)  # fmt: skip
ADMIN_GAUGES: Final = (
    Plain("connections", "Connections open to the admin API.", "connections"),
    Plain("streams", "Readers of /v1/events.", "streams"),
)  # fmt: skip
ADMIN_COUNTERS: Final = (
    Plain("requests", "Requests to the admin API, scrapes included.", "requests"),
    Plain("failures", "Of those, answers that were failures.", "failures"),
    Plain("connections_refused", "Connections to the admin API turned away since too many were open.",
          "refused_connections"),
    Plain("connections_cut", "Connections to the admin API cut off since the client was too slow.", "cut_connections"),
    Plain("streams_dropped", "Readers of /v1/events that did not read, and were dropped.", "dropped_streams"),
    Plain("faults", "Requests that the admin API failed to answer by its own fault.", "faults"),
)  # fmt: skip
POOL_GAUGES: Final = (
    Plain("size_bytes", "Memory of the pool.", "size_bytes"),
    Plain("usable_slots", "Token slots that can hold tokens.", "usable"),
    Plain("watermark_slots", "Slots kept back from new requests.", "watermark"),
    Plain("block_slots", "Slots of a block.", "block_size"),
    Plain("blocks", "Blocks, padding included.", "blocks"),
    Plain("free_blocks", "Blocks all of whose slots are free.", "blocks_free"),
    Plain("held_tokens", "Distinct tokens that slots hold.", "tokens_held"),
    Plain("unwritten_slots", "Room of running sequences that no token stands in yet.", "unwritten"),
    Plain("duplicate_tokens", "Private copies of tokens that the cache has as well.", "duplicate_tokens"),
    Plain("peeled_tokens", "Private copies made to keep a tail in one piece.", "peeled_tokens"),
    Plain("evictable_tokens", "Cached tokens that could be evicted now.", "evictable"),
    Plain("leased_tokens", "Cached tokens that somebody reads or pins.", "leased"),
    Plain("pinned_tokens", "Cached tokens that pins keep.", "pinned"),
    Plain("pinned_waste_slots", "Free slots of blocks that something else keeps from being wholly free.",
          "pinned_waste_tokens"),
    Plain("free_runs", "Runs of free slots, however long.", "free_runs"),
    Plain("largest_free_run_slots", "Longest run of free slots, by its whole growth runs; to within a sixteenth.",
          "largest_free_run"),
    Plain("hole_slots", "Free slots outside whole growth runs.", "hole_tokens"),
    Plain("internal_waste_ratio", "Of the slots in blocks not wholly free, less unwritten room, those without a token.",
          "internal_waste_pct", 0.01),
    Plain("scatter_ratio", "Share of the free slots that is not in the longest free run.", "scatter_pct", 0.01),
    Plain("nodes", "Nodes of the prefix tree.", "nodes"),
    Plain("namespaces", "Namespaces, each the root of a prefix tree.", "namespaces"),
    Plain("sequences", "Running sequences.", "sequences"),
    Plain("sessions", "Sessions of this pool, lost ones included.", "sessions"),
    Plain("oldest_wait_seconds", "Age of the oldest request that waits; 0: none does.", "oldest_wait_s"),
    Plain("moves", "Moves of compaction that have begun and not ended.", "moves"),
    Plain("restored_tokens", "Cached tokens that this process took over at its start from the one before.", "restored"),
    Plain("unrestored_tokens", "Tokens cached before that it could not take over.", "missing"),
    Plain("unsettled", "1 while sessions of before the start may read what was cached: nothing of it is evicted.",
          "unsettled"),
)  # fmt: skip
POOL_COUNTERS: Final = (
    Plain("prompt_tokens", "Prompt tokens that requests came with.", "prompt_tokens"),
    Plain("hit_tokens", "Of those, tokens found cached.", "hit_tokens"),
    Plain("lost_hit_tokens", "Tokens found cached that whole pages or opaque blocks cut off.", "lost_hit_tokens"),
    Plain("evicted_tokens", "Cached tokens evicted.", "evicted_tokens"),
    Plain("copied_tokens", "Tokens that engines were asked to copy (peels).", "copied_tokens"),
    Plain("moved_tokens", "Tokens that compaction moved.", "moved_tokens"),
    Plain("extents", "Extents handed out.", "extents_given"),
    Plain("extent_tokens", "Slots handed out in those.", "extent_tokens"),
    Plain("bad_handles", "Calls that named what is not, or no longer, there.", "bad_handles"),
    Plain("late_completions", "Copies that ended after their move had been given up.", "late_completions"),
    Plain("never", "Requests that can never fit.", "never"),
)  # fmt: skip
COMPACTION_GAUGES: Final = (
    Plain("gained_blocks", "Whole free blocks that moves gained, less those they took into use.", "blocks_given"),
    Plain("retired_slots", "Old places of moved tokens that engines may still read.", "retired_tokens"),
    Plain("unpacked_ratio", "Share of the free slots that is not in wholly free blocks.", "unpacked_pct", 0.01),
    Plain("unusable_ratio", "Share of the free slots not in runs of compaction_run_blocks.", "unusable_pct", 0.01),
    Plain("bandwidth_bytes_per_second", "Measured copy bandwidth; 0 before the first copy.", "copy_bytes_per_second"),
    Plain("moves_in_flight", "Moves whose copies have not ended.", "moves_in_flight"),
)  # fmt: skip
COMPACTION_COUNTERS: Final = (
    Plain("passes", "Passes that came to an end.", "passes"),
    Plain("plans", "Plans made.", "plans"),
    Plain("planned_moves", "Moves planned.", "planned"),
    Plain("moved_bytes", "Bytes of the tokens moved.", "moved_bytes"),
    Plain("copy_seconds", "Time that the device spent on copies.", "copy_seconds"),
    Plain("steps", "Engines' steps that began while copies were under way or planned.", "steps"),
    Plain("collisions", "Of those, steps that met a running copy.", "collisions"),
    Plain("gaps", "Idle gaps between engines' steps that ended while being watched.", "gaps"),
    Plain("gap_seconds", "Length of those.", "idle_s"),
    Plain("granted_seconds", "Of that, what copies were given.", "granted_s"),
    Plain("overtaken", "Times that a pool was let be, as it changed faster than it could be followed.", "overtaken"),
)  # fmt: skip


def families(daemon: Daemon, pools: Sequence[Pool], steps: Iterable[Step]) -> Iterator[Metric]:
    """Every family of ours; a large one in several, one after the other."""
    yield from _daemon(daemon)
    yield from _pools(pools)
    yield from _steps(steps)


def _daemon(daemon: Daemon) -> Iterator[Metric]:
    info = {
        "version": daemon.version,
        "protocol": str(daemon.protocol),
        "python": daemon.python,
        "loop": daemon.loop,
    }
    yield InfoMetricFamily("kvslot_build", "The daemon's version, and what it runs on.", value=info)
    for each in DAEMON_GAUGES:
        yield GaugeMetricFamily(f"kvslot_{each.name}", each.text, value=_value(daemon, each))
    for each in DAEMON_COUNTERS:
        yield CounterMetricFamily(f"kvslot_{each.name}", each.text, value=_value(daemon, each))
    for each in ADMIN_GAUGES:
        yield GaugeMetricFamily(f"kvslot_admin_{each.name}", each.text, value=_value(daemon.admin, each))
    for each in ADMIN_COUNTERS:
        yield CounterMetricFamily(f"kvslot_admin_{each.name}", each.text, value=_value(daemon.admin, each))
    yield _gauges("sessions", "Sessions by state; lost: the connection ended, the process may live.", "state",
                  daemon.sessions)  # fmt: skip
    yield _gauges(
        "health_check", "1 where a check of /healthz passes, 0 where it fails.", "check", daemon.checks
    )
    yield _counters("requests", "Requests by verb, those in batches included.", "verb", daemon.requests)
    refused = CounterMetricFamily(
        "kvslot_requests_refused",
        "Requests answered with an error, by verb and error.",
        labels=("verb", "code"),
    )
    for row in daemon.refused:
        refused.add_metric((row.verb, row.code), row.count)
    yield refused
    held = GaugeMetricFamily("kvslot_tenant_sessions", "Sessions of a tenant.", labels=("tenant",))
    most = GaugeMetricFamily(
        "kvslot_tenant_sessions_limit", "Its quota of sessions, where it has one.", labels=("tenant",)
    )
    turned_away = CounterMetricFamily(
        "kvslot_tenant_refused",
        "Requests of a tenant that a quota turned away at the door.",
        labels=("tenant", "quota"),
    )
    for tenant in daemon.tenants:
        name = _text(tenant.tenant)
        held.add_metric((name,), tenant.sessions)
        if tenant.sessions_max:
            most.add_metric((name,), tenant.sessions_max)
        for quota, count in tenant.refused.items():
            turned_away.add_metric((name, quota), count)
    yield from (held, most, turned_away)
    yield _counters("pushes", "What clients were told unasked.", "kind", daemon.pushes)
    yield _counters("log_events", "Events logged, by level.", "level", daemon.log_events)


def _pools(pools: Sequence[Pool]) -> Iterator[Metric]:
    names = [_text(pool.pool) for pool in pools]
    slots = GaugeMetricFamily("kvslot_pool_slots", "Token slots by state.", labels=("pool", "state"))
    for name, pool in zip(names, pools, strict=True):
        for state in STATES:
            slots.add_metric((name, state), getattr(pool, state))
    yield slots
    for each in POOL_GAUGES:
        yield _of_pools(GaugeMetricFamily, "pool", each, names, pools)
    for each in POOL_COUNTERS:
        yield _of_pools(CounterMetricFamily, "pool", each, names, pools)
    runs = GaugeMetricFamily(
        "kvslot_pool_usable_run_ratio", "Share of the free slots that lies in runs of so many blocks or more.",
        labels=("pool", "blocks"),
    )  # fmt: skip
    waiting = GaugeMetricFamily(
        "kvslot_pool_waiting_requests", "Requests that wait: new ones, growth of sequences, for another's commit.",
        labels=("pool", "kind"),
    )  # fmt: skip
    later = CounterMetricFamily(
        "kvslot_pool_later", "Requests told to wait, by reason; each asking again counts.",
        labels=("pool", "reason"),
    )  # fmt: skip
    for name, pool in zip(names, pools, strict=True):
        for blocks, share in pool.usable_run_pct.items():
            runs.add_metric((name, blocks), share / 100)
        for kind, count in pool.waiting.items():
            waiting.add_metric((name, kind), count)
        for row in pool.later:
            later.add_metric((name, row.reason), row.count)
    yield from (runs, waiting, later)
    yield from _accounts(names, pools)
    compactions = [pool.compaction for pool in pools]
    for each in COMPACTION_GAUGES:
        yield _of_pools(GaugeMetricFamily, "compaction", each, names, compactions)
    for each in COMPACTION_COUNTERS:
        yield _of_pools(CounterMetricFamily, "compaction", each, names, compactions)
    modes = GaugeMetricFamily(
        "kvslot_compaction_mode", "1 for the mode that holds, 0 for the others.", labels=("pool", "mode")
    )
    states = GaugeMetricFamily(
        "kvslot_compaction_state",
        "1 for the state that compaction is in, 0 for the others.",
        labels=("pool", "state"),
    )
    moves = CounterMetricFamily(
        "kvslot_compaction_moves", "Moves that ended, by outcome.", labels=("pool", "outcome")
    )
    for name, compaction in zip(names, compactions, strict=True):
        for word in MODES:
            modes.add_metric((name, word), compaction.mode == word)
        for word in COMPACTION_STATES:
            states.add_metric((name, word), compaction.state == word)
        for word in OUTCOMES:
            moves.add_metric((name, word), getattr(compaction, word))
    yield from (modes, states, moves)


def _accounts(names: Sequence[str], pools: Sequence[Pool]) -> Iterator[Metric]:
    # A pool at a time: there may be many tenants, each in many pools.
    for metric, text, field in (
        ("tenant_slots", "Slots of a pool that are a tenant's sessions' own.", "charged"),
        (
            "tenant_unwritten_slots",
            "Of those, room of running sequences that no token stands in yet.",
            "unwritten",
        ),
        ("tenant_slots_limit", "A tenant's quota of slots of a pool, where it has one.", "slots_max"),
    ):
        for name, pool in zip(names, pools, strict=True):
            family = GaugeMetricFamily(f"kvslot_{metric}", text, labels=("pool", "tenant"))
            for account in pool.accounts:
                value = getattr(account, field)
                if value or field != "slots_max":
                    family.add_metric((name, _text(account.tenant)), value)
            yield family


def _steps(steps: Iterable[Step]) -> Iterator[Metric]:
    # One family, a verb's step at a time: all of it at once would be thousands of samples.
    for step in steps:
        family = HistogramMetricFamily(
            "kvslot_request_step_seconds",
            "Times of the steps of the data path, of sampled requests (one turn in 17), by verb.",
            labels=("verb", "step"),
        )
        family.add_metric((step.verb, step.step), buckets(step.classes), step.seconds)
        yield family


def buckets(classes: Sequence[int]) -> list[tuple[str, float]]:
    """The histogram's buckets, cumulative, by their edges in seconds; `classes[k]`: how many were below 2^k ns.

    A class lies wholly below an edge or wholly not, since the edges are powers of two as well.
    """
    found: list[tuple[str, float]] = []
    count = at = 0
    for edge in EDGES:
        count += sum(classes[at : edge + 1])
        at = edge + 1
        found.append((repr((1 << edge) / 1e9), count))
    found.append(("+Inf", sum(classes)))
    return found


def _value(figures: msgspec.Struct, each: Plain) -> float:
    value: float = getattr(figures, each.field)
    return value * each.scale if each.scale != 1.0 else value


def _of_pools(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    group: str,
    each: Plain,
    names: Sequence[str],
    figures: Sequence[Figures],
) -> Metric:
    family = kind(f"kvslot_{group}_{each.name}", each.text, labels=("pool",))
    for name, of_one in zip(names, figures, strict=True):
        family.add_metric((name,), _value(of_one, each))
    return family


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"kvslot_{name}", text, labels=(label,))
    for key, value in values.items():
        family.add_metric((_text(key),), value)
    return family


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"kvslot_{name}", text, labels=(label,))
    for key, value in values.items():
        family.add_metric((_text(key),), value)
    return family


def _text(value: str) -> str:
    """As a label's value: a lone surrogate, which no UTF-8 has, would break the whole scrape."""
    return value.encode("utf-8", "backslashreplace").decode()


# -- the text ---------------------------------------------------------------------------------------------------------


class Exposition:
    """The text for scrapers; one for each source."""

    def __init__(self, source: Source, *, fresh_seconds: float = FRESH_SECONDS) -> None:
        self._source = source
        self._fresh_seconds = fresh_seconds
        self._process: tuple[Collector, ...] = (ProcessCollector(registry=None),)
        self._text = b""
        self._made = 0.0
        self._making: asyncio.Task[bytes] | None = None

    async def render(self) -> bytes:
        """All metrics, as they are now or were a moment ago."""
        if self._text and time.monotonic() - self._made < self._fresh_seconds:
            return self._text
        if self._making is None:
            self._making = asyncio.ensure_future(self._make())
            self._making.add_done_callback(self._ended)
        # Who asked may go away meanwhile; others wait for the same text.
        return await asyncio.shield(self._making)

    def _ended(self, task: asyncio.Task[bytes]) -> None:
        self._making = None
        if not task.cancelled():
            task.exception()  # it is told to those who wait, if any still do

    async def _make(self) -> bytes:
        source = self._source
        text: list[bytes] = []
        last = ""
        daemon = await source.daemon()
        pools: list[Pool] = []
        for name in await source.pool_names():
            pools.append(await source.pool(name))
            await asyncio.sleep(0)
        steps = await source.steps()
        written = 0
        for family in chain(
            families(daemon, pools, steps), chain.from_iterable(each.collect() for each in self._process)
        ):
            for piece in pieces(family):
                if written and written + len(piece.samples) > PIECE:
                    written = 0
                    await asyncio.sleep(0)
                written += len(piece.samples) + 2
                text.append(write(piece, header=piece.name != last))
                last = piece.name
        self._text, self._made = b"".join(text), time.monotonic()
        return self._text


class _One(Collector):
    """A collector of one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


def write(family: Metric, *, header: bool = True) -> bytes:
    """A family's text; without its header for what follows under the same one."""
    text = generate_latest(_One(family))
    if not header:
        while text.startswith(b"#"):
            text = text.partition(b"\n")[2]
    return text


def pieces(family: Metric) -> Iterator[Metric]:
    """The family, in families of `PIECE` samples at most."""
    if len(family.samples) <= PIECE:
        yield family
        return
    for start in range(0, len(family.samples), PIECE):
        piece = Metric(family.name, family.documentation, family.type)
        piece.samples = family.samples[start : start + PIECE]
        yield piece


__all__ = ["CONTENT_TYPE", "Daemon", "Exposition", "Pool", "Source", "Step"]
