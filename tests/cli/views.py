"""A daemon's view of real pools, without a daemon: what inspection is given, and what the fake control server shows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvslot.allocator import Pool, PoolConfig, Session
from kvslot.api.wire import messages
from kvslot.daemon import inspection, process
from kvslot.daemon.collector import Collector
from kvslot.daemon.keeper import Keeper
from kvslot.daemon.lengths import Lengths
from kvslot.daemon.totals import Totals

SLOT_BYTES = 64
EVERYTHING = 1 << 40


class PoolSettings(msgspec.Struct, frozen=True):
    """As much of a pool's configuration as a listing needs."""

    name: str
    block_size: int = 16


class Settings(msgspec.Struct, frozen=True):
    """As much of the daemon's."""

    socket: str = ""
    sessions_max: int = 256
    log_level: str = "info"
    drain_seconds: float = 20.0
    pools: tuple[PoolSettings, ...] = ()


@dataclass
class Peer:
    pid: int = 4242
    uid: int = 1000


@dataclass
class Hosted:
    """A pool under a name."""

    name: str
    core: Pool
    settings: PoolSettings = field(init=False)
    members: dict[int, Member] = field(default_factory=dict)
    description: messages.Pool = field(init=False)
    lengths: Lengths = field(default_factory=Lengths)
    keeper: Keeper = field(init=False)

    def __post_init__(self) -> None:
        core, config = self.core, self.core.config
        self.keeper = Keeper(core)
        self.settings = PoolSettings(self.name, config.block_size)
        self.description = messages.Pool(
            name=self.name,
            granularity="opaque" if config.opaque else "token",
            blocks=config.blocks,
            block_size=config.block_size,
            padding=core.padding,
            usable=core.usable,
            quantum=core.quantum,
            windowed=config.windowed,
            fingerprint="f1",
            size_bytes=core.slots * SLOT_BYTES,
            generation=7,
            kind="memfd",
            planes=[messages.Plane("0.kv", 0, SLOT_BYTES, "uint8", (SLOT_BYTES,))],
        )


@dataclass
class Member:
    """A session under a name."""

    number: int
    session: Session
    hosted: Hosted
    name: str = "engine"
    peer: Peer = field(default_factory=Peer)
    since: float = 10.0
    state: str = "live"
    outbox: int = 0
    frames: int = 3
    posted_errors: int = 0
    lost_at: float = 0.0
    progressed: float = 70.0


@dataclass
class View:
    """A daemon that hosts these pools."""

    pools: dict[str, Hosted]
    members: list[Member] = field(default_factory=list)
    compaction: dict[str, messages.Compaction] = field(default_factory=dict)
    version: str = "0.test"
    boot: int = 99
    started: float = 0.0
    now: float = 70.0
    drain_left: float | None = None
    settings: Settings = field(default_factory=Settings)

    def act(self, action: str, pool: str) -> None:
        """What Defrag asks for."""
        for name, told in self.compaction.items():
            if pool in ("", name):
                mode = {"stop": "off", "start": "idle"}.get(action, told.mode)
                self.compaction[name] = msgspec.structs.replace(told, mode=mode, once=action == "once")

    process: dict[str, Any] = field(default_factory=lambda: {**process.facts(), "sessions_max": 256})
    recordings: list[dict[str, Any]] = field(default_factory=list)
    latency: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {"Allocate": {"count": 3, "p50_us": 40.0, "p99_us": 90.0}}
    )
    totals: dict[str, Any] = field(default_factory=lambda: Totals(["chat"]).row([], Collector().statistics()))
    tenants: list[dict[str, Any]] = field(default_factory=lambda: [{"pool": "chat", "tenant": "*"}])
    steps: list[dict[str, Any]] = field(
        default_factory=lambda: [
            {"verb": "Allocate", "step": "all", "sampled": 3, "seconds": 0.1, "classes": [0, 3]}
        ]
    )


def compaction_of(pool: str, **fields: Any) -> messages.Compaction:
    """How compaction of a pool stands: settled, unless said otherwise."""
    plain: dict[str, Any] = {
        field.name: {"str": "", "bool": False}.get(getattr(field.type, "__name__", ""), 0)
        for field in msgspec.structs.fields(messages.Compaction)
    }
    return messages.Compaction(
        **{**plain, "pool": pool, "mode": "idle", "state": "settled", "reason": "settled", **fields}
    )


def view_of(**cores: Pool) -> View:
    """A view of these pools by name, every session of theirs a member."""
    hosted = {name: Hosted(name, core) for name, core in cores.items()}
    members: list[Member] = []
    for each in hosted.values():
        for session in each.core.sessions.values():
            members.append(Member(len(members) + 1, session, each))
            each.members[session.handle] = members[-1]
    return View(hosted, members, {name: compaction_of(name) for name in cores})


def pages(kind: str, view: View, limit: int = 0, **options: Any) -> list[list[dict[str, Any]]]:
    """Every page of a kind, to the last."""
    found = []
    cursor = 0
    for _ in range(EVERYTHING):
        page, following = inspection.rows(kind, view, cursor, limit, **options)
        found.append(page)
        if not following:
            return found
        assert following > cursor, "a cursor that does not rise would go round for ever"
        cursor = following
    raise AssertionError("no end")


def listed(kind: str, view: View, limit: int = 0, **options: Any) -> list[dict[str, Any]]:
    return list(itertools.chain.from_iterable(pages(kind, view, limit, **options)))


def made(blocks: int = 65, block_size: int = 16, **options: Any) -> Pool:
    """A pool without a watermark."""
    return Pool(PoolConfig(blocks=blocks, block_size=block_size, **{"watermark": 0.0, **options}))
