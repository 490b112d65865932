"""What a replay measures, and how each figure is defined.

A *run* is one trace under one policy, block size, sharing and number of engines.  It yields one `Row` per phase, one
`Series` (how things went over time) and a few `Picture`s of the pool's blocks.  All times are simulated seconds unless
a name says otherwise; `cpu` and `alloc_us` are measured, so they alone differ between two runs with the same seed.

Definitions, the same for every policy (sums over the instances where each engine has a pool of its own):

    internal_fragmentation = 1 - tokens_held / (blocks_in_use_slots - reserved)
    reserved               = unwritten slots of running sequences' runs / usable
    pseudo-OOM             : a request or a growth refused although
                             usable - tokens_held - duplicates - peeled - fenced - quarantined - moving - reserved
                             + evictable - watermark * usable >= needed
    hit                    = prompt tokens found cached when the request was first admitted
    ideal hit              = prompt tokens, at most all but the last, that any request had written by then
    lost_hit_tokens        = the part of (ideal - hit) that rounding down to the policy's granularity explains
    evicted_hit_tokens     = the rest of it: evicted, or never kept, or kept in another engine's pool
    pinned_waste           = free slots in blocks that something keeps from being wholly free / usable
    usable_run             = of the free slots, the share that can be had as runs of 32 whole blocks
    moved_per_given_back   = tokens moved / slots of the whole blocks that moves gave back

Gauges are sampled on a regular grid of simulated time that starts at the first admission.  A run's length is not known
beforehand, so the grid starts fine and its step doubles whenever 2,000 buckets are full; two buckets merge into one
that keeps the time-weighted mean and the extremes of both.  Means over phases are therefore exact up to the grid, and
a phase's edges are blurred by at most one bucket, a thousandth of the run.

Phases: see PHASES.  They depend on the trace and the pool's size only, so that columns compare like with like.
"""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kvslot import __version__

SCHEMA = 1
"""Version of the JSON's keys: raised when a key changes its meaning, not when one is added."""

PHASES: dict[str, str] = {
    "all": "the whole run",
    "cold": "until the distinct tokens admitted so far would fill the pool once: nothing need be evicted",
    "warm": "from there until they would have filled it three times: eviction sets in, the start still shows",
    "steady": "all that follows warm",
    "first_hour": "the first simulated hour; only of runs that last longer than one",
    "full_hour": "the first hour of steady; only where the last one begins after it",
    "last_hour": "the last simulated hour; only of runs that last longer than one",
    "full_day": "the first 24 hours of steady; only where the last 24 begin after them",
    "last_day": "the last 24 simulated hours; only beside full_day",
}


class Spread(msgspec.Struct, frozen=True):
    """Time-weighted mean, and the highest value sampled."""

    mean: float
    max: float


class Quantiles(msgspec.Struct, frozen=True):
    """Of single measurements, in the unit that the field's name gives."""

    p50: float
    p99: float
    max: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table: one phase of one run.  Keys are stable; new ones come last."""

    run: int
    """Index into `ReplayResult.runs`."""
    trace: str
    policy: str
    block_size: int
    sharing: str
    engines: int
    phase: str
    routing: str
    eviction: str
    live: int
    """Limit on sequences running at once, all engines together."""
    pool_tokens: int
    usable_tokens: int
    start_s: float
    end_s: float
    requests: int
    """Requests first admitted in this phase."""
    finished: int
    never: int
    """Requests dropped because they could not fit an empty pool."""
    stuck: int
    """Requests told LATER although nothing ran, and dropped; anything but 0 is a fault of the policy."""
    prompt_tokens: int
    hit_tokens: int
    internal_fragmentation_pct: Spread
    reserved_pct: Spread
    occupancy_pct: Spread
    """tokens_held / usable."""
    hit_tokens_pct: float
    hit_tokens_pct_ideal: float
    """What a cache that never evicts would have found."""
    hit_tokens_pct_optimum: float | None
    """What the best eviction would have found, in one pool of this size, given the run's admissions; None: not
    computed.  In phase `all` it is a bound; in others its part of that.  See `kvslot.replay.clairvoyant`."""
    lost_hit_tokens: int
    evicted_hit_tokens: int
    usable_pct: float | None
    """Distinct tokens in use by running requests at the first refusal / pool tokens; None: nothing was refused."""
    refusals: int
    """Requests told LATER, each counted once."""
    refusals_per_hour: float
    pseudo_oom: int
    pseudo_oom_per_hour: float
    refused_room_elsewhere: int
    """Refusals in one engine's pool while another engine's pool had what was needed; 0 where the pool is shared."""
    preemptions: int
    max_concurrent_sessions: int | None
    """Largest `live` with no preemption and at most 1 % refusals; None: not searched for."""
    alloc_us: Quantiles
    """CPU time of one admission."""
    cpu_us_per_request: float
    """CPU time of admit (refused tries included), prefilled and finish, per finished request."""
    grow_us_per_request: float
    """Wall time of all growth, per finished request: many short calls, too short for the CPU clock's own cost."""
    extents_per_1k_tokens: float
    largest_free_run: Spread
    """In slots, as sampled: `max` is the largest, and `largest_free_run_min` the smallest value seen."""
    largest_free_run_min: int
    copied_tokens: int
    moved_tokens: int
    evicted_tokens: int
    duplicate_tokens: Spread
    via: str = "inproc"
    """How the policy was reached: in this process, or "socket": by real client processes of a daemon."""
    compaction: str = "off"
    """"off", "idle": moves in the gaps between steps, or "forced": moves to rest again and again."""
    emptying: bool = True
    """Whether eviction prefers, among equals, a leaf whose death empties a block."""
    blocks_free: Spread = Spread(0.0, 0.0)
    """Blocks that are wholly free."""
    pinned_waste_pct: Spread = Spread(0.0, 0.0)
    usable_run_pct: float | None = None
    """Mean over time; None: the policy does not know its free runs."""
    moves: int = 0
    moves_abandoned: int = 0
    blocks_given_back: int = 0
    """Whole blocks that moves gave back, less those that they took."""
    moved_per_given_back: float | None = None
    """None: no block was given back."""
    compaction_overtaken: int = 0
    """Via a socket: times that the daemon let the pool be, since it changed faster than it can be followed."""

    @property
    def means(self) -> str:
        """What kept this pool in order, where that is told apart: "placement", "eviction" or "moves"."""
        return "moves" if self.compaction != "off" else "eviction" if self.emptying else "placement"


class Series(msgspec.Struct, kw_only=True):
    """One run over time: lists of equal length, one entry a bucket; the i-th bucket ends at time_s[i].

    States are means over the bucket, in slots; counts are what fell into the bucket."""

    time_s: list[float]
    internal_fragmentation_pct: list[float]
    private: list[float]
    cached: list[float]
    reserved: list[float]
    duplicates: list[float]
    peeled: list[float]
    fenced: list[float]
    quarantined: list[float]
    moving: list[float]
    free: list[float]
    tokens_held: list[float]
    evictable: list[float]
    blocks_in_use_slots: list[float]
    live_sequences: list[float]
    largest_free_run: list[float]
    hit_tokens_pct: list[float | None]
    """Of the prompt tokens admitted in the bucket; None: nothing was admitted."""
    refusals: list[int]
    pseudo_oom: list[int]
    preemptions: list[int]


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """The pool's blocks at one moment; instances of several engines follow each other."""

    time_s: float
    progress: float
    """Share of the requests that had started, 0..1."""
    blocks: bytes
    """One byte a block, or a bucket of blocks: 0..255 the share of its slots that hold tokens."""


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """What compaction to rest makes of the pool of a run in which nothing was ever moved.

    At the run's end the policy evicts until `occupancy_pct` of the usable slots are in use; that is `before`."""

    occupancy_pct: float
    before: Picture
    after: Picture
    blocks_free_before: int
    blocks_free_after: int
    usable_run_pct_before: float
    usable_run_pct_after: float
    moved_tokens: int


class QuietNight(msgspec.Struct, frozen=True, kw_only=True):
    """The same in numbers, as the terminal and the JSON have it: what is free, before and after compaction to rest."""

    trace: str
    block_size: int
    pool_tokens: int
    usable_blocks: int
    occupancy_pct: float
    """Of the usable slots, those that hold tokens once the policy has evicted."""
    blocks_free_before: int
    blocks_free_after: int
    usable_run_pct_before: float
    usable_run_pct_after: float
    moved_tokens: int
    moved_per_given_back: float | None
    """Tokens moved for each slot of the blocks more that are wholly free; None: there are none."""


def quiet_nights(runs: list[Run]) -> list[QuietNight]:
    """Of all runs that have a pool before and after, in their order."""
    return [_quiet_night(run, run.compacted) for run in runs if run.compacted is not None]


def _quiet_night(run: Run, told: Compacted) -> QuietNight:
    slots = (told.blocks_free_after - told.blocks_free_before) * run.block_size
    return QuietNight(
        trace=run.trace,
        block_size=run.block_size,
        pool_tokens=run.pool_tokens,
        usable_blocks=run.usable_tokens // run.block_size,
        occupancy_pct=told.occupancy_pct,
        blocks_free_before=told.blocks_free_before,
        blocks_free_after=told.blocks_free_after,
        usable_run_pct_before=told.usable_run_pct_before,
        usable_run_pct_after=told.usable_run_pct_after,
        moved_tokens=told.moved_tokens,
        moved_per_given_back=round(told.moved_tokens / slots, 6) if slots > 0 else None,
    )


class ClientReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one client process of a replay via a socket did."""

    client: int
    pid: int
    killed: bool = False
    """It was killed on purpose: nothing else is known of it."""
    requests: int = 0
    """First admitted by this client."""
    finished: int = 0
    round_trips: int = 0
    """Calls that waited for the daemon's reply."""
    waits: int = 0
    """Of those: for room to append, since no refill had come in time."""
    frames_sent: int = 0
    frames_received: int = 0
    refills: int = 0
    """Runs asked for ahead of need."""
    refused: int = 0
    """Of those: answered LATER or NEVER."""
    steps: int = 0
    appended_tokens: int = 0
    painted_tokens: int = 0
    """Written through the mapping, in all planes."""
    verified_tokens: int = 0
    """Read back through the mapping and found right, in all planes."""
    allocate_us: Quantiles = Quantiles(0.0, 0.0, 0.0)
    """Round trip of Allocate on the real clock."""
    moved_ranges: int = 0
    """Ranges of running sequences' tables that the daemon moved under this client, which followed."""


class CompactionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a daemon's compaction did in the time of one run: differences of what it counts itself."""

    mode: str
    """The daemon's own: "off", "idle" or "forced"."""
    rests: int
    """Times that all clients stood still, until everything was moved that gains something."""
    rests_cut: int
    """Of those, the ones that did not come to rest in the time that they may take."""
    rests_s: float
    """Real seconds that all of them took."""
    plans: int
    planned: int
    published: int
    abandoned_leased: int
    """Somebody read the piece who cannot be told."""
    abandoned_freed: int
    """The piece was evicted, split or moved meanwhile."""
    deferred: int
    over_budget: int
    failed: int
    moved_tokens: int
    blocks_given_back: int
    moved_ranges: int
    """Ranges of running sequences' tables that moved under the clients, which followed."""
    overtaken: int
    """Times that the daemon was seen to let the pool be, since it changed faster than it can be followed."""
    too_short: bool = False
    """All were to stand still, and the run was over before that."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of a run by real processes, and of the same run in one process."""

    figure: str
    """As `Row` names it."""
    socket: float
    inproc: float


class ProcessReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a run via a socket went."""

    trace: str
    block_size: int
    pool_tokens: int
    window_s: float
    """Simulated seconds that one process could be ahead of another."""
    clients: list[ClientReport]
    painted_tokens: int
    verified_tokens: int
    audit_ms: float
    """The audit at the end found nothing, in this time."""
    daemon: list[dict[str, Any]]
    """By verb: how many, how many refused, and the sampled latencies in the daemon (us)."""
    beside: list[Comparison] = []
    """Figures of the same run in one process, where that was asked for."""
    compaction: CompactionReport | None = None
    """None: neither was it asked for nor does the daemon do it."""


class Run(msgspec.Struct, kw_only=True):
    """What belongs to a run as a whole."""

    trace: str
    policy: str
    block_size: int
    sharing: str
    engines: int
    routing: str
    eviction: str
    live: int
    pool_tokens: int
    usable_tokens: int
    wall_s: float
    series: Series
    pictures: list[Picture]
    via: str = "inproc"
    processes: ProcessReport | None = None
    compaction: str = "off"
    emptying: bool = True
    compacted: Compacted | None = None


class TraceMeta(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: str
    digest: str
    """SHA-256 of the trace file."""
    requests: int
    prompt_tokens: int
    output_tokens: int
    clock: str
    """How requests arrived: "trace", "poisson R/s" or "closed loop"."""
    note: str = ""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    system: str
    processor: str
    cpus: int
    python: str


class Meta(msgspec.Struct, kw_only=True):
    schema: int
    version: str
    command: str
    seed: int
    started: str
    """UTC, ISO 8601."""
    wall_s: float
    machine: Machine
    traces: list[TraceMeta]
    phases: dict[str, str]
    settings: dict[str, float | int | str | bool | None]
    via: str = "inproc"
    """"socket" where the slotted runs were done by real client processes of a daemon."""
    processes: list[ProcessReport] = []
    """One for each run via a socket."""
    quiet_nights: list[QuietNight] = []
    """One for each run in which nothing was moved, where the means are told apart."""
    compaction: list[str] = []
    """What each of the means was worth, a sentence for each trace and block size where they are told apart."""


class ReplayResult(msgspec.Struct, kw_only=True):
    """All that one command replayed.  `--json` writes meta and rows; `--html` uses the runs as well."""

    meta: Meta
    rows: list[Row]
    runs: list[Run]

    def to_json(self) -> bytes:
        """`{"meta": ..., "rows": [...]}`, indented; the keys are stable."""
        plain = msgspec.json.encode({"meta": self.meta, "rows": self.rows})
        return msgspec.json.format(plain, indent=2) + b"\n"

    def write_json(self, path: Path) -> None:
        """Into a folder that is there."""
        path.write_bytes(self.to_json())

    def write_html(self, path: Path) -> None:
        """One self-contained page: what was replayed, the tables, plots over time, pictures of the pool."""
        from kvslot.replay.report import write_html

        write_html(path, self)


def machine() -> Machine:
    """What the measured times were measured on."""
    processor = platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    processor = line.partition(":")[2].strip()
                    break
    except OSError:
        pass
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        processor=processor or platform.machine(),
        cpus=os.cpu_count() or 1,
        python=platform.python_version(),
    )


def meta(
    *,
    seed: int,
    traces: list[TraceMeta],
    settings: dict[str, float | int | str | bool | None],
    command: list[str] | None = None,
) -> Meta:
    """The head of a result; `wall_s` is filled in by whoever ends the command."""
    words = sys.argv if command is None else command
    shown = " ".join([os.path.basename(words[0]), *words[1:]]) if words else ""
    return Meta(
        schema=SCHEMA,
        version=__version__,
        command=shown,
        seed=seed,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        wall_s=0.0,
        machine=machine(),
        traces=traces,
        phases=PHASES,
        settings=settings,
    )
