"""Settings: one TOML file, the environment above it, flags above both; checked whole before anything is made.

    kvslot.toml        socket = "..."                      [[pool]]  name = "chat"  size = "8GiB"  ...
    environment        KVSLOT_SOCKET                       KVSLOT_POOL_SIZE       (of the only pool)
    flags              --socket                            --pool-size            (of the only pool)

Each setting is a field here with a `Rule`: what it means, its unit, its range, and what to do about a wrong value.  The
file, the environment, `--check-config` and the documentation all read the rules, so there is one place for each fact.

Every problem is found, not only the first: `ConfigError` lists them, each with where it stands (file, table), key,
value, what is allowed, and the remedy.  Times end in their unit (`_seconds`, `_ms`, `_us`); sizes are bytes, as a
number or as text: "512MiB", "8GiB" (1024s), "8GB" (1000s).  Paths in the file are taken from the file's folder on,
those in the environment and in flags from the working folder.

A pool is `[[pool]]` with its memory (`size` or `blocks`) and what a slot holds: one of `model_config` (a Hugging Face
config.json, or its folder), `layout` (a table), `opaque_block_bytes`.
"""

from __future__ import annotations

import difflib
import grp
import ipaddress
import json
import os
import pwd
import re
import tomllib
import typing
import unicodedata
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from kvslot.allocator import EVICTIONS, BadRequest, PoolConfig
from kvslot.allocator.config import MAX_BLOCK_SIZE, MAX_SLOTS, MAX_SPACES, check_config
from kvslot.daemon import layout as layouts
from kvslot.daemon.device import MemoryInformation, huge
from kvslot.daemon.device.memory import available, size_text
from kvslot.daemon.layout import Layout, LayoutError

PREFIX: Final = "KVSLOT_"
POOL_PREFIX: Final = "KVSLOT_POOL_"
FILE_BYTES_MAX: Final = 1 << 20
"""A configuration beyond that is some other file."""
SOCKET_PATH_MAX: Final = 103
"""Bytes; the kernel's sockaddr_un holds 107, and the socket is first bound under a name that is 4 longer."""
POOLS_MAX: Final = 64
TENANTS_MAX: Final = 1024
SIZE_MAX: Final = 1 << 46
"""Bytes; 64 TiB, beyond what a machine has and within what a mapping can be."""

Kind = Literal["text", "whole", "real", "flag", "size", "mode", "users", "groups", "choice", "path", "layout"]


class Rule(msgspec.Struct, frozen=True):
    """What a setting may be, and what to tell whoever set it otherwise."""

    kind: Kind
    text: str
    """What it is, for people."""
    unit: str = ""
    low: float = 0
    high: float = 0
    choices: tuple[str, ...] = ()
    remedy: str = ""

    def allowed(self) -> str:
        """The range in words."""
        match self.kind:
            case "choice":
                return "one of " + ", ".join(repr(each) for each in self.choices)
            case "flag":
                return "true or false"
            case "whole" | "real":
                what = "whole numbers from" if self.kind == "whole" else "from"
                unit = f" {self.unit}" if self.unit else ""
                return f"{what} {_number_text(self.low)} to {_number_text(self.high)}{unit}"
            case "size":
                low = f"{self.low:.0f}" if self.low < 1024 else size_text(int(self.low))
                return f"{low} to {size_text(int(self.high))}"
            case "mode":
                return "permission bits from 0 to 0o777"
            case "users":
                return "a list of user ids or names"
            case "groups":
                return "a list of group ids or names"
            case "layout":
                return "a table"
            case "path":
                return "a path"
            case _:
                return f"text of up to {self.high:.0f} characters"


class ConfigError(Exception):
    """The configuration cannot be used; `problems` says why, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


_CORE: Final = PoolConfig(blocks=2)
"""The core's own defaults, which are the daemon's."""


class LayoutTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`layout`: K and V of a model by its numbers.  Either `kv_heads` and `head_dim`, or `latent`."""

    layers: Annotated[int, Rule("whole", "layers with K and V of their own", "", 1, 4096)] = 0
    kv_heads: Annotated[int, Rule("whole", "KV heads of each layer", "", 0, 4096)] = 0
    head_dim: Annotated[int, Rule("whole", "width of a head's K", "values", 0, 65536)] = 0
    value_dim: Annotated[int, Rule("whole", "width of a head's V; 0: as K", "values", 0, 65536)] = 0
    latent: Annotated[
        int, Rule("whole", "width of an MLA layer's latent, rope part included", "values", 0, 65536)
    ] = 0
    dtype: Annotated[str, Rule("text", "bfloat16, float16, float32, fp8, ...", high=32)] = ""
    model: Annotated[str, Rule("text", "a name, for people", high=128)] = ""


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[pool]]`."""

    name: Annotated[str, Rule("text", "what clients ask for", high=64)] = "default"
    size: Annotated[
        int,
        Rule("size", "memory of the pool, padding included; or give blocks", "bytes", 4096, SIZE_MAX),
    ] = 0
    blocks: Annotated[
        int,
        Rule("whole", "memory of the pool in blocks, padding included; or give size", "blocks", 2, MAX_SLOTS),
    ] = 0
    block_size: Annotated[int, Rule("whole", "slots of a block", "slots", 1, MAX_BLOCK_SIZE)] = 16
    model_config: Annotated[
        str,
        Rule(
            "path", "a model's Hugging Face config.json, or its folder; from this file's folder on", high=4096
        ),
    ] = ""
    layout: Annotated[LayoutTable | None, Rule("layout", "K and V of a model by its numbers")] = None
    opaque_block_bytes: Annotated[
        int,
        Rule(
            "size",
            "bytes of a block whose inside is the engine's own affair",
            "bytes",
            1,
            layouts.SLOT_BYTES_MAX,
        ),
    ] = 0
    dtype: Annotated[
        str, Rule("text", "of K and V: bfloat16, float16, float32, fp8, ...; empty: the model's own", high=32)
    ] = ""
    scales: Annotated[
        bool,
        Rule("flag", "fp8: a float32 scale for each KV head of each token; false: kernels use one for all"),
    ] = True
    windowed: Annotated[
        bool | None,
        Rule(
            "flag",
            "every layer has a sliding window, so sequences may forget their front; unset: as the model says",
        ),
    ] = None
    users: Annotated[
        tuple[int, ...],
        Rule(
            "users",
            "who may open sessions in this pool, and map it; neither users nor groups: whoever may connect",
        ),
    ] = ()
    groups: Annotated[
        tuple[int, ...], Rule("groups", "whose members, supplementary groups included, may too")
    ] = ()
    scrub: Annotated[
        bool,
        Rule(
            "flag",
            "what was in use is filled with zeros before it is free again; wants a headroom of a few prompts",
        ),
    ] = False
    huge_pages: Annotated[
        str,
        Rule(
            "choice",
            "pages that the pool's memory is made of; other sizes than off are set aside beforehand (nr_hugepages)",
            choices=tuple(huge.SIZES),
        ),
    ] = "off"
    quota: Annotated[int, Rule("whole", "most slots a session may hold; 0: all", "slots", 0, MAX_SLOTS)] = 0
    quantum: Annotated[
        int,
        Rule(
            "whole",
            "slots of a growth run; 0: 32 or a block, whichever is smaller",
            "slots",
            0,
            MAX_BLOCK_SIZE,
        ),
    ] = _CORE.quantum
    append: Annotated[
        str, Rule("choice", "how a sequence goes on after a shared partial slot", choices=("chain", "peel"))
    ] = _CORE.append
    peel_max: Annotated[
        int, Rule("whole", "most tokens copied to keep a tail contiguous", "tokens", 0, MAX_BLOCK_SIZE)
    ] = _CORE.peel_max
    eviction: Annotated[
        str, Rule("choice", "which cached prefixes go first", choices=tuple(sorted(EVICTIONS)))
    ] = _CORE.eviction
    watermark: Annotated[
        float, Rule("real", "share of the slots kept back from new requests", "", 0, 0.9)
    ] = _CORE.watermark
    headroom: Annotated[float, Rule("real", "share of the slots that eviction keeps free", "", 0, 0.5)] = (
        _CORE.headroom
    )
    pin_share: Annotated[float, Rule("real", "most of the slots that pins may keep", "", 0, 1)] = (
        _CORE.pin_share
    )
    fence_patience_ms: Annotated[
        int, Rule("whole", "how long memory that is coming free holds eviction back", "ms", 0, 60_000)
    ] = round(_CORE.fence_patience * 1000)
    ticket_grace_ms: Annotated[
        int, Rule("whole", "how long a ticket keeps its place after its turn came", "ms", 1, 600_000)
    ] = round(_CORE.ticket_grace * 1000)
    preempt_deadline_ms: Annotated[
        int, Rule("whole", "how long a victim has to answer Preempt", "ms", 1, 600_000)
    ] = round(_CORE.preempt_deadline * 1000)
    reclaim_patience_ms: Annotated[
        int,
        Rule(
            "whole",
            "how long sessions have to give back spare runs before a victim is named",
            "ms",
            0,
            60_000,
        ),
    ] = round(_CORE.reclaim_patience * 1000)


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[tenant]]`: who may open its namespaces, and how much of a pool it may have."""

    name: Annotated[
        str, Rule("text", "the tenant that clients name; '*': all that have no table of their own", high=256)
    ] = ""
    users: Annotated[
        tuple[int, ...],
        Rule("users", "who may open its namespaces; neither users nor groups: whoever may connect"),
    ] = ()
    groups: Annotated[
        tuple[int, ...], Rule("groups", "whose members, supplementary groups included, may open them too")
    ] = ()
    slots: Annotated[
        int,
        Rule("whole", "most slots of each pool that are its sessions' own; 0: all", "slots", 0, MAX_SLOTS),
    ] = 0
    sessions: Annotated[
        int, Rule("whole", "most sessions, those included that are cleaned up; 0: any", "sessions", 0, 65536)
    ] = 0
    namespaces: Annotated[
        int,
        Rule(
            "whole",
            "most of its namespaces in each pool, those included that nobody has open and something is cached in; "
            "0: any",
            "namespaces",
            0,
            MAX_SPACES,
        ),
    ] = 0
    reserved_runs: Annotated[
        int,
        Rule(
            "whole",
            "growth runs that stand ready and unwritten in its sequences of each pool, from which on no more are "
            "handed out; 0: any",
            "runs",
            0,
            MAX_SLOTS,
        ),
    ] = 0
    pins: Annotated[
        int,
        Rule(
            "whole",
            "most tokens of each pool that pins in its namespaces keep; 0: pin_share",
            "tokens",
            0,
            MAX_SLOTS,
        ),
    ] = 0
    requests_per_second: Annotated[
        float,
        Rule(
            "real", "most new requests (Allocate, Probe, Pin), a second's worth at once; 0: any", "", 0, 1e6
        ),
    ] = 0.0


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that the daemon is told.  What `load` returns has been checked, and has every default filled in."""

    socket: Annotated[
        str,
        Rule(
            "path",
            "the Unix socket to listen on; unset: $XDG_RUNTIME_DIR/kvslot/kvslot.sock, or "
            "/run/kvslot/kvslot.sock for root and without that variable",
            high=4096,
        ),
    ] = ""
    socket_mode: Annotated[int, Rule("mode", "permissions of the socket", high=0o777)] = 0o660
    socket_group: Annotated[str, Rule("text", "group of the socket; empty: the daemon's", high=64)] = ""
    control_uids: Annotated[
        tuple[int, ...], Rule("users", "who may use control verbs, beside root and the daemon's own user")
    ] = ()
    control_gids: Annotated[tuple[int, ...], Rule("groups", "groups that may use control verbs")] = ()
    admin: Annotated[bool, Rule("flag", "the admin API: views, metrics, acts and a live page, over HTTP")] = (
        True
    )
    admin_socket: Annotated[
        str, Rule("path", "its Unix socket; unset: admin.sock beside the other one", high=4096)
    ] = ""
    admin_socket_mode: Annotated[
        int, Rule("mode", "permissions of that socket: who can connect may look", high=0o777)
    ] = 0o660
    admin_socket_group: Annotated[str, Rule("text", "group of that socket; empty: the daemon's", high=64)] = (
        ""
    )
    admin_tcp: Annotated[
        str,
        Rule("text", 'address and port to serve the admin API on as well, say "127.0.0.1:9477"', high=64),
    ] = ""
    admin_tcp_any: Annotated[bool, Rule("flag", "that address may be another one than a loopback one")] = (
        False
    )
    admin_token_file: Annotated[
        str, Rule("path", "tokens that may look over TCP, one a line; needed for admin_tcp", high=4096)
    ] = ""
    admin_act_token_file: Annotated[
        str, Rule("path", "tokens that may act over TCP, too, one a line; unset: none may", high=4096)
    ] = ""
    admin_connections: Annotated[
        int,
        Rule(
            "whole",
            "connections to the admin API at a time over Unix sockets, and as many over TCP that have shown a token",
            "connections",
            2,
            1024,
        ),
    ] = 32
    client_uids: Annotated[
        tuple[int, ...],
        Rule(
            "users",
            "who may connect, of those whom the socket's mode lets in; neither these nor client_gids: all of them",
        ),
    ] = ()
    client_gids: Annotated[
        tuple[int, ...], Rule("groups", "groups that may connect, supplementary ones included")
    ] = ()
    sessions_max: Annotated[int, Rule("whole", "sessions at a time", "sessions", 1, 65536)] = 256
    namespaces_per_user: Annotated[
        int,
        Rule(
            "whole",
            "most namespaces of a pool that one user was the first to open, as long as anybody has them open or "
            "something is cached in them; 0: any",
            "namespaces",
            0,
            MAX_SPACES,
        ),
    ] = 8192
    sequences_max: Annotated[
        int, Rule("whole", "running sequences of one session", "sequences", 1, 1 << 20)
    ] = 65536
    batch_max: Annotated[int, Rule("whole", "verbs in one Batch", "verbs", 1, 65536)] = 4096
    frame_bytes: Annotated[
        int, Rule("size", "most of one frame that a client sends", "bytes", 4096, 256 << 20)
    ] = 8 << 20
    reply_bytes: Annotated[
        int,
        Rule(
            "size",
            "replies a client may leave unread before the daemon reads no further",
            "bytes",
            4096,
            1 << 30,
        ),
    ] = 1 << 20
    reply_seconds: Annotated[
        float, Rule("real", "how long it may leave those unread before it is dropped", "seconds", 0.1, 3600)
    ] = 10.0
    idle_hello_seconds: Annotated[
        float, Rule("real", "how long a connection may say nothing before its Hello", "seconds", 0.1, 3600)
    ] = 10.0
    stall_seconds: Annotated[
        float,
        Rule(
            "real",
            "how long a submitted step may take before its session counts as stalled",
            "seconds",
            0.01,
            3600,
        ),
    ] = 5.0
    drain_seconds: Annotated[
        float, Rule("real", "how long SIGTERM waits for sessions to end", "seconds", 0, 3600)
    ] = 20.0
    slice_us: Annotated[
        int, Rule("whole", "most that background work takes at a time", "us", 50, 100_000)
    ] = 100
    compaction: Annotated[
        str,
        Rule(
            "choice",
            "off; idle: cached data is moved together in gaps between engines' steps; forced: at any time",
            choices=("off", "idle", "forced"),
        ),
    ] = "idle"
    compaction_start: Annotated[
        float,
        Rule(
            "real", "begins when so much of the free memory is not in whole blocks, or not in runs", "", 0, 1
        ),
    ] = 0.25
    compaction_stop: Annotated[
        float, Rule("real", "... and ends when it is no more than this; below compaction_start", "", 0, 1)
    ] = 0.05
    compaction_run_blocks: Annotated[
        int, Rule("whole", "blocks of a run that free memory should come in", "blocks", 1, 4096)
    ] = 32
    compaction_duty: Annotated[
        float,
        Rule(
            "real",
            "most of the time that copies take where they are not in a gap (forced, or short of memory)",
            "",
            0.001,
            1,
        ),
    ] = 0.25
    compaction_collisions: Annotated[
        float, Rule("real", "share of step begins that may meet a running copy", "", 0.0001, 0.5)
    ] = 0.01
    compaction_chunk_bytes: Annotated[
        int, Rule("size", "copied between two looks at whether a step has begun", "bytes", 4096, 64 << 20)
    ] = 256 << 10
    prefault: Annotated[bool, Rule("flag", "all memory is taken at start, not when it is first touched")] = (
        True
    )
    log_format: Annotated[
        str,
        Rule("choice", "auto: console on a terminal, else JSON lines", choices=("auto", "json", "console")),
    ] = "auto"
    log_level: Annotated[
        str, Rule("choice", "the least that is logged", choices=("debug", "info", "warning", "error"))
    ] = "info"
    pools: tuple[PoolSettings, ...] = ()
    tenants: tuple[TenantSettings, ...] = ()


RELOADABLE: Final = (
    "client_uids", "client_gids", "control_uids", "control_gids", "tenants",
    "namespaces_per_user",
    "admin_tcp", "admin_tcp_any", "admin_token_file", "admin_act_token_file",
)  # fmt: skip
"""Settings that SIGHUP changes and SetConfig does not: who may do what, and how much of it."""
RETRIED: Final = ("admin_socket", "admin_socket_mode", "admin_socket_group")
"""Settings that SIGHUP changes where what they are for could not be had so far."""
CHANGEABLE: Final = (
    "log_level", "stall_seconds", "reply_seconds", "idle_hello_seconds", "drain_seconds", "slice_us",
    "compaction", "compaction_start", "compaction_stop", "compaction_run_blocks", "compaction_duty",
    "compaction_collisions",
)  # fmt: skip
"""Settings that SetConfig and SIGHUP change: those that are looked at anew each time."""


class Effective(msgspec.Struct, frozen=True):
    """Settings, and where each came from."""

    settings: Settings
    origins: dict[str, str]
    """"socket", "pool.chat.size" -> "environment KVSLOT_SOCKET", "kvslot.toml", "flag --pool-size"; no defaults."""


# -- reading ----------------------------------------------------------------------------------------------------------


class Value(NamedTuple):
    """What was given, where, and the folder from which paths in it are taken."""

    value: object
    where: str
    base: Path


def load(
    path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    flags: Mapping[str, str] | None = None,
) -> Settings:
    """The settings that hold; ConfigError, with every problem, where they cannot be used.

    `overrides` are flags by setting: {"socket": ..., "pool_size": ...}; None counts as not given.  `flags`: what those
    were called on the command line, where that is not as `flag_of` says.
    """
    return read(path, environ, overrides, flags).settings


def read(
    path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    flags: Mapping[str, str] | None = None,
) -> Effective:
    """As `load`, with where each value came from."""
    environ = os.environ if environ is None else environ
    problems: list[str] = []
    given: dict[str, Value] = {}
    pools: list[dict[str, Value]] = []
    tenants: list[dict[str, Value]] = []
    file = Path(path) if path is not None else None
    if file is not None:
        _from_file(file, given, pools, tenants, problems)
    _from_outside(_environment(environ), given, pools, problems)
    _from_outside(_flags(overrides or {}, flags or {}), given, pools, problems)

    origins: dict[str, str] = {}
    values = _convert(given, SETTINGS, "", origins, "", problems)
    if not values.get("socket"):
        values["socket"] = default_socket(environ)
    made = []
    broken: set[int] = set()
    for index, table in enumerate(pools):
        where = f"pool[{index}]"
        found = len(problems)
        label = f"pool.{table['name'].value if 'name' in table else 'default'}."
        fields = _convert(table, POOL, f"{where} ", origins, label, problems)
        if len(problems) > found:
            broken.add(index)
        made.append(PoolSettings(**fields))
    _check_pools(made, pools, broken, problems)
    settings = Settings(**values, pools=tuple(made), tenants=_tenants(tenants, origins, problems))
    _check_settings(settings, given, set(given) - set(values), problems)
    if problems:
        raise ConfigError(problems)
    return Effective(settings, origins)


def default_socket(environ: Mapping[str, str]) -> str:
    """Where daemon and clients meet unless told otherwise: the user's runtime directory, or the system's."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.geteuid():
        return str(Path(runtime) / "kvslot" / "kvslot.sock")
    return "/run/kvslot/kvslot.sock"


def _from_file(
    file: Path,
    given: dict[str, Value],
    pools: list[dict[str, Value]],
    tenants: list[dict[str, Value]],
    problems: list[str],
) -> None:
    try:
        with file.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise ConfigError(
                [f"{file}: more than {size_text(FILE_BYTES_MAX)}: this is no configuration of kvslotd"]
            )
        tree = tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{file}: not TOML: {error}"]) from None
    where, base = str(file), file.absolute().parent
    for kind, most, found in (("pool", POOLS_MAX, pools), ("tenant", TENANTS_MAX, tenants)):
        tables = tree.pop(kind, [])
        if isinstance(tables, dict):
            tables = [tables]
        if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
            problems.append(f"{file}: {kind} is no table: write [[{kind}]] and its settings below it")
            tables = []
        if len(tables) > most:
            problems.append(f"{file}: {len(tables)} {kind}s: up to {most} are allowed")
        found += [{key: Value(value, where, base) for key, value in table.items()} for table in tables]
    given.update({key: Value(value, where, base) for key, value in tree.items()})


def _environment(environ: Mapping[str, str]) -> list[tuple[str, object, str]]:
    """(setting, text, where) of the variables that are settings; other KVSLOT_ ones may be somebody else's."""
    found: list[tuple[str, object, str]] = []
    for name in sorted(environ):
        key = name.removeprefix(PREFIX).lower() if name.startswith(PREFIX) else ""
        if key in SETTINGS or (key.startswith("pool_") and key.removeprefix("pool_") in POOL):
            found.append((key, environ[name], f"environment {name}"))
    return found


def strays(environ: Mapping[str, str]) -> list[str]:
    """Variables that look like ours and are none of the settings, each with the nearest name: worth a warning."""
    known = [PREFIX + key.upper() for key in SETTINGS] + [POOL_PREFIX + key.upper() for key in POOL]
    found = []
    for name in sorted(environ):
        near = difflib.get_close_matches(name, known, 1, 0.85) if name.startswith(PREFIX) else []
        if near and name not in known:
            found.append(f"{name} is not a setting: {near[0]} is")
    return found


def _flags(overrides: Mapping[str, object], flags: Mapping[str, str]) -> list[tuple[str, object, str]]:
    found = [
        (key, value, f"flag {flags.get(key) or flag_of(key)}")
        for key, value in overrides.items()
        if value is not None
    ]
    for key, _, _ in found:
        assert key in SETTINGS or key.removeprefix("pool_") in POOL, f"no setting {key}"
    return found


def flag_of(key: str) -> str:
    """The flag of a setting: "log_level" -> "--log-level", "pool_size" -> "--pool-size", "pool_dtype" -> "--dtype"."""
    name = key if key in SETTINGS or key in ("pool_size", "pool_blocks") else key.removeprefix("pool_")
    return "--" + name.replace("_", "-")


def _from_outside(
    found: list[tuple[str, object, str]],
    given: dict[str, Value],
    pools: list[dict[str, Value]],
    problems: list[str],
) -> None:
    """Puts variables or flags over what is there."""
    for key, value, where in found:
        if key in SETTINGS:
            given[key] = Value(value, where, Path.cwd())
            continue
        if len(pools) > 1:
            problems.append(
                f"{where} = {value!r}: there are {len(pools)} pools, so it is not clear which one: set it in the file"
            )
            continue
        if not pools:
            pools.append({})
        field = key.removeprefix("pool_")
        # Size and blocks say the same, and so do the three descriptions of a slot: the later one stands alone.
        for group in _ONE_OF:
            if field in group:
                for each in group:
                    pools[0].pop(each, None)
        pools[0][field] = Value(value, where, Path.cwd())


_ONE_OF: Final = (("size", "blocks"), ("model_config", "layout", "opaque_block_bytes"))


def changed(settings: Settings, name: str, value: str) -> Settings:
    """The settings with one of the daemon's own (no pool's) changed, from text as in the environment.

    Raises ConfigError.  Whether it can be changed while running is for the caller to say.
    """
    if name not in SETTINGS:
        raise ConfigError([f"{name} {_unknown(name, SETTINGS)}"])
    problems: list[str] = []
    given = {name: Value(value, "change", Path.cwd())}
    values = _convert(given, SETTINGS, "", {}, "", problems)
    after = msgspec.structs.replace(settings, **values)
    if not problems:
        _check_settings(after, given, set(), problems)
    if problems:
        raise ConfigError([each.removeprefix("change: ") for each in problems])
    return after


def check_changeable(name: str) -> None:
    """Raises ConfigError for a setting that only a start of the daemon takes, with what to do instead.

    What is no setting at all is for `changed` to refuse.
    """
    if name in POOL and name not in SETTINGS:
        raise ConfigError(
            [
                f"{name} is a setting of a pool, which is made once: set it in the file, and start the daemon anew"
            ]
        )
    if name in SETTINGS and name not in CHANGEABLE:
        remedy = f"set it in the file, or as {PREFIX}{name.upper()}, and start the daemon anew"
        others = ", ".join(CHANGEABLE)
        raise ConfigError(
            [f"{name} cannot be changed while the daemon runs: {remedy}; these can be changed: {others}"]
        )


# -- checking ---------------------------------------------------------------------------------------------------------


def _rules_of(struct: type[msgspec.Struct]) -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for name, hint in typing.get_type_hints(struct, include_extras=True).items():
        for each in getattr(hint, "__metadata__", ()):
            if isinstance(each, Rule):
                rules[name] = each
    return rules


SETTINGS: Final = _rules_of(Settings)
POOL: Final = _rules_of(PoolSettings)
TENANT: Final = _rules_of(TenantSettings)
LAYOUT: Final = _rules_of(LayoutTable)


def _convert(
    given: Mapping[str, Value],
    rules: Mapping[str, Rule],
    where: str,
    origins: dict[str, str],
    label: str,
    problems: list[str],
) -> dict[str, Any]:
    """The values of one table, as the settings have them; what is wrong goes to `problems`."""
    values: dict[str, Any] = {}
    for key, (value, source, base) in given.items():
        rule = rules.get(key)
        at = f"{source}: {where}{key}"
        if rule is None:
            problems.append(f"{at} {_unknown(key, rules, value)}")
            continue
        try:
            values[key] = _value(rule, value, base, at)
        except _Wrong as wrong:
            shown = _shown(value)
            as_text = ', in bytes or as "512MiB", "8GiB"' if rule.kind == "size" else ""
            problems.append(
                f"{at} = {shown}: {wrong.reason or 'not allowed'}; allowed: {rule.allowed()}{as_text}{wrong.remedy}"
            )
            continue
        except ConfigError as error:
            problems += error.problems
            continue
        origins[label + key] = source
    return values


class _Wrong(Exception):
    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = f"; {remedy}" if remedy else ""


_TRUE: Final = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)


def _value(rule: Rule, value: object, base: Path, at: str) -> object:
    match rule.kind:
        case "flag":
            if isinstance(value, str) and value.strip().lower() in _TRUE:
                return _TRUE[value.strip().lower()]
            if not isinstance(value, bool):
                raise _Wrong("neither true nor false")
            return value
        case "whole":
            return _ranged(rule, _integer(value))
        case "size":
            return _ranged(rule, parse_size(value))
        case "real":
            return _ranged(rule, _real(value))
        case "mode":
            return _mode(value)
        case "users":
            return _ids(value, lambda name: pwd.getpwnam(name).pw_uid, "user")
        case "groups":
            return _ids(value, lambda name: grp.getgrnam(name).gr_gid, "group")
        case "choice":
            if value not in rule.choices:
                near = difflib.get_close_matches(str(value), rule.choices, 1)
                raise _Wrong("unknown", f"did you mean {near[0]!r}?" if near else "")
            return value
        case "layout":
            if not isinstance(value, dict):
                raise _Wrong(
                    "no table", "write layout = { layers = 32, kv_heads = 8, head_dim = 128, dtype = 'bf16' }"
                )
            return _layout_table(value, base, at)
        case _:
            if not isinstance(value, str):
                raise _Wrong("no text", "put it in quotes")
            if len(value) > rule.high:
                raise _Wrong(f"{len(value)} characters, and {rule.high:.0f} are the most")
            if "\0" in value or (rule.kind == "text" and not value.isprintable()):
                raise _Wrong("has characters that cannot be shown")
            return str(base / Path(value).expanduser()) if rule.kind == "path" and value else value


def _layout_table(value: dict[str, object], base: Path, at: str) -> LayoutTable:
    problems: list[str] = []
    source, _, where = at.partition(": ")
    given = {key: Value(each, source, base) for key, each in value.items()}
    fields = _convert(given, LAYOUT, f"{where}.", {}, "", problems)
    if problems:
        raise ConfigError(problems)
    return LayoutTable(**fields)


def _integer(value: object) -> int:
    if isinstance(value, str):
        try:
            return int(value.strip().replace("_", ""), 0)
        except ValueError:
            raise _Wrong("no whole number") from None
    if not isinstance(value, int) or isinstance(value, bool):
        raise _Wrong("no whole number")
    return value


def _real(value: object) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise _Wrong("no number") from None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _Wrong("no number")
    return float(value)


def _ranged(rule: Rule, number: Any) -> Any:
    if not rule.low <= number <= rule.high:  # also what is no number at all
        raise _Wrong("out of range", rule.remedy)
    return number


def parse_size(value: object) -> int:
    """Bytes, from a number or from text such as "512MiB", "1.5 GiB", "8GB" (1000s); raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _Wrong("no size")
    if isinstance(value, int):
        return value
    found = _SIZE.fullmatch(value)
    if found is None or (found[3] and not found[2]):
        raise _Wrong("no size")
    power = " kmgt".index(found[2].lower() or " ")
    # "8G" is what people write for 8 GiB; only "8GB" says 1000s outright.
    unit = 1000 if found[4] and not found[3] else 1024
    scale: int = unit**power
    return round(float(found[1]) * scale) if "." in found[1] else int(found[1]) * scale


def _mode(value: object) -> int:
    if isinstance(value, str):
        text = value.strip().removeprefix("0o")
        if not re.fullmatch("[0-7]{1,4}", text):
            raise _Wrong("no permission bits", 'write 0o660 or "0660"')
        value = int(text, 8)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _Wrong("no permission bits", "write 0o660")
    if not 0 <= value <= 0o777:
        near = f"0o{value}" if re.fullmatch("[0-7]{3}", str(value)) else "0o660"
        raise _Wrong("out of range", f"permission bits are octal: write {near}")
    if value & 0o600 != 0o600:
        raise _Wrong("the daemon's own user could not connect", "write 0o660")
    return value


def _ids(value: object, look_up: Callable[[str], int], what: str) -> tuple[int, ...]:
    if isinstance(value, str):
        value = [each.strip() for each in value.split(",") if each.strip()]
    if not isinstance(value, list | tuple):
        raise _Wrong("no list")
    found = []
    for each in value:
        if isinstance(each, str) and not each.isdigit():
            try:
                found.append(look_up(each))
            except KeyError:
                raise _Wrong(f"there is no {what} {each!r} on this machine") from None
        elif isinstance(each, bool) or not isinstance(each, int | str) or not 0 <= int(each) < 2**32 - 1:
            raise _Wrong(f"{each!r} is no id")
        else:
            found.append(int(each))
    return tuple(found)


def _check_settings(
    settings: Settings, given: Mapping[str, Value], wrong: Set[str], problems: list[str]
) -> None:
    """What concerns more than one value, or the machine.  Of those in `wrong` a problem has been told already."""
    length = len(os.fsencode(settings.socket))
    if length > SOCKET_PATH_MAX:
        source = given["socket"].where if "socket" in given else "default"
        problems.append(
            f"{source}: socket = {settings.socket!r}: {length} bytes, and the kernel takes paths of up to "
            f"{SOCKET_PATH_MAX} here; choose a shorter one"
        )
    if settings.compaction_stop > settings.compaction_start and not (
        wrong & {"compaction_start", "compaction_stop"}
    ):
        name = "compaction_stop" if "compaction_stop" in given else "compaction_start"
        source = given[name].where if name in given else "default"
        problems.append(
            f"{source}: compaction_stop = {settings.compaction_stop} is more than compaction_start = "
            f"{settings.compaction_start}, so that it would end before it begins; lower the one or raise the other"
        )
    for name in ("socket_group", "admin_socket_group"):
        group = getattr(settings, name)
        try:
            group_id(group or "0")
        except KeyError:
            problems.append(
                f"{given[name].where}: {name} = {group!r}: there is no such group on "
                "this machine; create it (groupadd), or leave it out"
            )
    if settings.admin:
        _check_admin(settings, given, problems)


def admin_socket(settings: Settings) -> str:
    """Where the admin API is served."""
    return settings.admin_socket or str(Path(settings.socket).with_name("admin.sock"))


def admin_address(settings: Settings) -> tuple[str, int]:
    """Address and port of `admin_tcp`; ValueError where it is none."""
    host, _, port = settings.admin_tcp.rpartition(":")
    address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    if not (port.isascii() and port.isdigit() and 0 <= int(port) <= 65535):
        raise ValueError("no port")
    return str(address), int(port)


def _check_admin(settings: Settings, given: Mapping[str, Value], problems: list[str]) -> None:
    def where(name: str) -> str:
        return f"{given[name].where if name in given else 'default'}: {name} = {getattr(settings, name)!r}"

    length = len(os.fsencode(settings.admin_socket))
    if length > SOCKET_PATH_MAX:
        problems.append(
            f"{where('admin_socket')}: {length} bytes, and the kernel takes paths of up to {SOCKET_PATH_MAX} here; "
            "choose a shorter one"
        )
    if settings.admin_socket and settings.admin_socket == settings.socket:
        problems.append(f"{where('admin_socket')}: the engines' socket is there; choose another path")
    if not settings.admin_tcp:
        return
    try:
        host, _ = admin_address(settings)
    except ValueError:
        problems.append(
            f'{where("admin_tcp")}: no address and port; write "127.0.0.1:9477", or "[::1]:9477", as numbers'
        )
        return
    if not ipaddress.ip_address(host).is_loopback and not settings.admin_tcp_any:
        problems.append(
            f"{where('admin_tcp')}: {host} can be reached from other machines, and what passes is not encrypted: "
            "serve on 127.0.0.1 behind a proxy, or say admin_tcp_any = true"
        )
    if not settings.admin_token_file and not settings.admin_act_token_file:
        problems.append(
            f"{where('admin_tcp')}: TCP is served with tokens only: write one into a file "
            "(openssl rand -hex 32 > FILE; chmod 600 FILE), and name that as admin_token_file"
        )


def group_id(name: str) -> int:
    """Of a group by name or number; raises KeyError."""
    return int(name) if name.isdigit() else grp.getgrnam(name).gr_gid


def _tenants(
    given: list[dict[str, Value]], origins: dict[str, str], problems: list[str]
) -> tuple[TenantSettings, ...]:
    """The tenants; names that are the same, or look it, are a problem: one of the two would be met by surprise."""
    made: list[TenantSettings] = []
    seen: dict[str, str] = {}
    for index, table in enumerate(given):
        found = len(problems)
        named = table.get("name")
        label = f"tenant.{named.value if named is not None else ''}."
        fields = _convert(table, TENANT, f"tenant[{index}] ", origins, label, problems)
        source = next((each.where for each in table.values()), "default")
        at = f"{source}: tenant[{index}]"
        if named is None:
            problems.append(
                f'{at}: name is missing; write name = "..." as clients say it, name = "" for those that name no '
                'tenant, or name = "*" for all that are not listed'
            )
        if len(problems) > found:
            continue
        tenant = TenantSettings(**fields)
        folded = unicodedata.normalize("NFKC", tenant.name)
        if folded in seen:
            same = "is there already" if seen[folded] == tenant.name else f"looks like {seen[folded]!r}"
            problems.append(
                f"{at}: name = {tenant.name!r} {same}; give each tenant one table, and a name of its own"
            )
        seen.setdefault(folded, tenant.name)
        made.append(tenant)
    return tuple(made)


_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def _check_pools(
    made: list[PoolSettings], given: list[dict[str, Value]], broken: Set[int], problems: list[str]
) -> None:
    """What concerns more than one value of a pool; nothing of those in `broken`, where values are missing."""
    names: set[str] = set()
    for index, (pool, table) in enumerate(zip(made, given, strict=True)):
        if index in broken:
            continue
        found = len(problems)
        source = next((each.where for each in table.values()), "default")
        at = f"{source}: pool[{index}] {pool.name!r}"
        if not _NAME.fullmatch(pool.name):
            problems.append(
                f"{at}: name: letters, digits, '.', '_' and '-' are allowed, the first a letter or digit"
            )
        if pool.name in names:
            problems.append(f"{at}: name: another pool is called so; give each its own")
        names.add(pool.name)
        if bool(pool.size) == bool(pool.blocks):
            which = "both size and blocks are given" if pool.size else "neither size nor blocks is given"
            problems.append(f'{at}: {which}; write one of them, say size = "8GiB"')
        said = [key for key in _ONE_OF[1] if getattr(pool, key)]
        if len(said) != 1:
            which = f"{' and '.join(said)} are given" if said else "what a slot holds is not given"
            problems.append(f"{at}: {which}; write one of model_config, layout, opaque_block_bytes")
        if len(problems) > found:
            continue
        try:
            pool_config(pool, pool_layout(pool))
        except ConfigError as error:
            problems += [f"{at}: {each}" for each in error.problems]


# -- what a pool comes to ---------------------------------------------------------------------------------------------


def pool_layout(pool: PoolSettings) -> Layout:
    """What a slot of the pool holds; reads the model's config.json where that is named.  Raises ConfigError."""
    try:
        if pool.opaque_block_bytes:
            if pool.dtype:
                raise LayoutError(f"dtype = {pool.dtype!r}: opaque blocks have none; leave it out")
            return layouts.opaque(pool.opaque_block_bytes, pool.block_size)
        if pool.layout is not None:
            return _layout_by_hand(pool, pool.layout)
        config = model_config(Path(pool.model_config))
        try:
            return layouts.from_model_config(config, pool.dtype, scales=pool.scales)
        except LayoutError as error:
            raise ConfigError([f"model_config = {pool.model_config!r}: {error}"]) from None
    except LayoutError as error:
        raise ConfigError([str(error)]) from None


def _layout_by_hand(pool: PoolSettings, table: LayoutTable) -> Layout:
    dtype = pool.dtype or table.dtype
    if pool.dtype and table.dtype and layouts.dtype_of(pool.dtype) != layouts.dtype_of(table.dtype):
        raise LayoutError(
            f"dtype is {pool.dtype!r} beside layout and {table.dtype!r} in it; write one of them"
        )
    if not dtype:
        raise LayoutError("layout has no dtype: add dtype = 'bfloat16', say")
    windowed = bool(pool.windowed)
    if bool(table.latent) == bool(table.kv_heads or table.head_dim):
        raise LayoutError("layout: give either kv_heads and head_dim, or latent")
    if table.latent:
        return layouts.latent(
            table.layers, table.latent, dtype, scales=pool.scales, model=table.model, windowed=windowed
        )
    return layouts.plain(
        table.layers,
        table.kv_heads,
        table.head_dim,
        dtype,
        value_dim=table.value_dim,
        scales=pool.scales,
        model=table.model,
        windowed=windowed,
    )


def model_config(path: Path) -> dict[str, Any]:
    """The content of a model's config.json, which `path` is, or is the folder of.  Raises ConfigError."""
    file = path / "config.json" if path.is_dir() else path
    said = f"model_config = {str(path)!r}"
    try:
        with file.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise ConfigError([f"{said}: more than {size_text(FILE_BYTES_MAX)}: this is no config.json"])
        config = json.loads(content)
    except OSError as error:
        raise ConfigError([f"{said}: cannot be read: {error.strerror}"]) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{said}: not JSON: {error}"]) from None
    if not isinstance(config, dict):
        raise ConfigError([f"{said}: holds no JSON object"])
    return config


def pool_config(pool: PoolSettings, layout: Layout) -> PoolConfig:
    """The core's configuration of a pool.  Raises ConfigError where the two do not go together."""
    blocks = pool.blocks or layout.slots_within(pool.size, pool.block_size) // pool.block_size
    block_bytes = layout.slot_bytes * pool.block_size
    least = 2 if pool.block_size > 1 else 3
    if blocks < least:
        if pool.blocks:
            raise ConfigError([f"blocks = {blocks}: a pool needs {least}, padding included"])
        enough = size_text(layout.size_bytes(least * pool.block_size))
        said = f"size = {size_text(pool.size)} is {blocks} blocks of {size_text(block_bytes)}"
        raise ConfigError([f"{said}, and a pool needs {least}, padding included: give at least {enough}"])
    config = PoolConfig(
        blocks=blocks,
        block_size=pool.block_size,
        opaque=layout.granularity == "opaque",
        windowed=layout.windowed if pool.windowed is None else pool.windowed,
        watermark=pool.watermark,
        headroom=pool.headroom,
        ahead=True,
        scrubs=pool.scrub,
        eviction=pool.eviction,
        quantum=pool.quantum,
        fence_patience=pool.fence_patience_ms / 1000,
        ticket_grace=pool.ticket_grace_ms / 1000,
        preempt_deadline=pool.preempt_deadline_ms / 1000,
        reclaim_patience=pool.reclaim_patience_ms / 1000,
        pin_share=pool.pin_share,
        peel_max=pool.peel_max,
        append=pool.append,
    )
    try:
        check_config(config)
    except BadRequest as error:
        raise ConfigError([str(error)]) from None
    return config


class PoolSum(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool comes to."""

    name: str
    model: str
    granularity: str
    fingerprint: str
    planes: int
    slot_bytes: int
    """Bytes per token, in all planes."""
    block_size: int
    blocks: int
    slots: int
    """Padding included."""
    usable: int
    size_bytes: int
    windowed: bool
    huge_pages: str = "off"


def pool_sum(pool: PoolSettings) -> PoolSum:
    """What a pool comes to, without making it."""
    layout = pool_layout(pool)
    config = pool_config(pool, layout)
    slots = config.blocks * config.block_size
    return PoolSum(
        name=pool.name,
        model=layout.model,
        granularity=layout.granularity,
        fingerprint=layout.fingerprint,
        planes=len(layout.planes),
        slot_bytes=layout.slot_bytes,
        block_size=config.block_size,
        blocks=config.blocks,
        slots=slots,
        usable=slots - (config.block_size if config.block_size > 1 else 2),
        size_bytes=huge.whole(layout.size_bytes(slots), huge.SIZES[pool.huge_pages]),
        windowed=config.windowed,
        huge_pages=pool.huge_pages,
    )


def check_memory(sums: Sequence[PoolSum], memory: MemoryInformation | None = None) -> None:
    """Whether all pools together fit in what is free now; ConfigError with the figures where they do not."""
    have = memory or available()
    apart: dict[str, list[PoolSum]] = {}  # huge pages are kept apart from other memory
    for each in sums:
        apart.setdefault(each.huge_pages, []).append(each)
    sums = apart.pop("off", [])
    problems = [
        why
        for word, those in apart.items()
        if (
            why := huge.shortage(
                ", ".join(each.name for each in those),
                sum(each.size_bytes for each in those),
                huge.SIZES[word],
            )
        )
    ]
    if problems:
        raise ConfigError(problems)
    wanted = sum(each.size_bytes for each in sums)
    if wanted > have.free_bytes:
        pools = ", ".join(f"{each.name} {size_text(each.size_bytes)}" for each in sums)
        have_text = f"{size_text(have.free_bytes)} of {size_text(have.total_bytes)} memory are free"
        remedy = "make them smaller, or free memory first"
        raise ConfigError([f"the pools want {size_text(wanted)} ({pools}), and {have_text}: {remedy}"])


def dump(effective: Effective, sums: Sequence[PoolSum]) -> str:
    """The settings as a file that says the same again, with where each came from and what each pool comes to."""
    lines: list[str] = []
    origins = effective.origins
    for key, rule in SETTINGS.items():
        lines.append(_line(key, getattr(effective.settings, key), rule, origins.get(key, "default")))
    for tenant in effective.settings.tenants:
        lines += ["", "[[tenant]]"]
        lines += [
            _line(key, getattr(tenant, key), rule, origins.get(f"tenant.{tenant.name}.{key}", "default"))
            for key, rule in TENANT.items()
        ]
    for pool, total in zip(effective.settings.pools, sums, strict=True):
        planes = f"{total.planes} {'plane' if total.planes == 1 else 'planes'}"
        lines += [
            "",
            f"# {total.name}: {total.model}",
            f"#   {total.slot_bytes:,} bytes per token in {planes}, fingerprint {total.fingerprint}",
            f"#   {total.blocks:,} blocks of {total.block_size} slots, {total.usable:,} slots to use",
            f"#   {size_text(total.size_bytes)} ({total.size_bytes:,} bytes)",
            "[[pool]]",
        ]
        for key, rule in POOL.items():
            value = getattr(pool, key)
            if value is None or (not value and any(key in group for group in _ONE_OF)):
                continue
            lines.append(_line(key, value, rule, origins.get(f"pool.{pool.name}.{key}", "default")))
    return "\n".join(lines) + "\n"


def documentation() -> list[str]:
    """A table row, in Markdown, for each setting; docs/daemon.md holds them all."""
    rows = []
    for struct, rules in (
        (Settings, SETTINGS), (PoolSettings, POOL), (LayoutTable, LAYOUT), (TenantSettings, TENANT),
    ):  # fmt: skip
        defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
        for key, rule in rules.items():
            value = defaults[key]
            known = value is not None and value != "" and not (value == 0 and rule.low > 0)
            default = f"`{_text(value, rule)}`" if known else ""
            rows.append(f"| `{key}` | {default} | {rule.allowed()} | {rule.text} |")
    return rows


def _line(key: str, value: object, rule: Rule, origin: str) -> str:
    return f"{key} = {_text(value, rule)}".ljust(40) + f"  # {origin}"


def _text(value: object, rule: Rule) -> str:
    """A value as TOML has it."""
    match value:
        case bool():
            return str(value).lower()
        case int() if rule.kind == "mode":
            return f"0o{value:o}"
        case int() if rule.kind == "size" and value and value % (1 << 20) == 0:
            return f'"{value >> 30}GiB"' if value % (1 << 30) == 0 else f'"{value >> 20}MiB"'
        case int() if rule.kind == "size" and value and value % (1 << 10) == 0:
            return f'"{value >> 10}KiB"'
        case int() | float():
            return f"{value}"
        case LayoutTable():
            fields = {name: getattr(value, name) for name in LAYOUT if getattr(value, name)}
            return "{ " + ", ".join(f"{name} = {_json(each)}" for name, each in fields.items()) + " }"
        case _:
            return _json(value)


def _json(value: object) -> str:
    """Text, numbers and lists are the same in TOML, but for one control character."""
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


# -- words ------------------------------------------------------------------------------------------------------------


def _unknown(key: str, rules: Mapping[str, Rule], value: object = None) -> str:
    """What is to be said of a name that is none of these settings; `value`: what it was given."""
    plain = key.lower().replace("-", "_")
    if rules is SETTINGS and plain in POOL:
        return "is a setting of a pool: put it below [[pool]]"
    if rules is POOL and plain in SETTINGS:
        return "is a setting of the daemon, for all pools: put it above the first [[pool]]"
    if rules is SETTINGS and plain.removeprefix("pool_") in POOL:
        return f"is not a setting here: it is {plain.removeprefix('pool_')}, below [[pool]]"
    if rules is SETTINGS and (
        table := difflib.get_close_matches(plain, ("pools", "pool", "tenants", "tenant"), 1, 0.75)
    ):
        name = table[0].removesuffix("s")
        return f"is not a setting: write [[{name}]] for each {name}"
    near = difflib.get_close_matches(plain, list(rules), 3, 0.6)
    if near:
        return f"is not a setting: did you mean {' or '.join(near)}?"
    if rules is SETTINGS and isinstance(value, dict):
        return "is no table there is: settings of the daemon stand above [[pool]] and [[tenant]]"
    if rules is SETTINGS and (near := difflib.get_close_matches(plain, list(POOL), 1, 0.75)):
        return f"is not a setting: did you mean {near[0]}, below [[pool]]?"
    return f"is not a setting; those there are: {', '.join(rules)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _number_text(number: float) -> str:
    return f"{int(number)}" if number == int(number) else f"{number:g}"


__all__ = [
    "CHANGEABLE",
    "ConfigError",
    "Effective",
    "admin_address",
    "admin_socket",
    "LayoutTable",
    "PoolSettings",
    "PoolSum",
    "RELOADABLE",
    "RETRIED",
    "Rule",
    "Settings",
    "TenantSettings",
    "changed",
    "check_changeable",
    "check_memory",
    "default_socket",
    "documentation",
    "dump",
    "flag_of",
    "group_id",
    "pool_layout",
    "load",
    "model_config",
    "parse_size",
    "pool_config",
    "pool_sum",
    "read",
    "strays",
]
