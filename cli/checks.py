"""What `kvslotctl doctor` makes of what it sees: one function a check, from a picture to findings.  Nothing here asks.

    ok        looked at, and as it should be         note      worth knowing; nothing has to be done
    warning   will hurt, or does already             fault     wrong: bytes, permissions or books
    unknown   could not be looked at, and why        absent    this version has no such thing

A check returns at least one finding, and one for each thing that is wrong: what was found, why that matters, and what
to do.  Where a command does it, that stands there as one would type it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvslot.cli import _common, _screen, host

Row = dict[str, Any]

VERDICTS: Final = ("fault", "warning", "unknown", "note", "ok", "absent")
"""Worst first."""
BAD: Final = ("fault", "warning")
"""What makes the exit code 1."""

WASTE_PCT: Final = 25.0
"""Of used blocks without a token: exclusive blocks of 16 leave 5 to 15 % empty under chat loads, slots less."""
PINNED_WASTE_PCT: Final = 25.0
"""Of the pool: free memory in such quantity that whole blocks and long runs cannot be made of."""
RUN_PCT: Final = 50.0
"""Of the free memory in runs that long: below it a long prompt waits for a window more often than not."""
FREE_PCT: Final = 5.0
"""With less than so much of a pool free, how the rest lies says little."""
DRIFT: Final = 0.25
"""Of the two distributions of lengths; chance alone keeps below 0.1 for the numbers that are compared."""
LENGTHS_LEAST: Final = 200
"""Sequences, of the start and of late: fewer say nothing of a distribution."""
BLOCK_WASTE_PCT: Final = 4.0
"""The largest block that wastes no more than this for lengths as they are is the one to have."""
WATERMARK_MOST: Final = 0.2
SHARE_NEAR: Final = 0.9
"""Of a limit: near enough to say so."""
LOST_NOTE_S: Final = 30.0
"""A process ends within seconds of its connection; after that somebody keeps it alive."""
LOST_WARNING_S: Final = 300.0
"""Also of what a restart left unsettled, where engines come back within seconds."""
TICKET_S: Final = 10.0
"""A request that waits so long is past what its user waits for."""
ALLOCATE_US: Final = 10_000.0
"""The 99th percentile inside the daemon; prompts of a hundred thousand tokens take some milliseconds."""
HIT_TOKENS: Final = 100_000
"""Prompt tokens, before a share of hits says anything."""
RELOADED: Final = (
    "client_uids", "client_gids", "control_uids", "control_gids", "namespaces_per_user",
    "admin_tcp", "admin_tcp_any", "admin_token_file", "admin_act_token_file",
)  # fmt: skip
"""Settings that a reload takes over, beside those that `kvslotctl set` changes.  A test compares."""
SHM_BYTES: Final = 1 << 30
"""Containers get 64 MiB of /dev/shm by default, with which frameworks' own shared memory fails."""
LISTED: Final = 3
"""Sessions and the like named in one finding; the rest are counted."""


class Finding(NamedTuple):
    """One thing found: `subject` is a pool, a session or a path, "" for the whole daemon."""

    check: str
    verdict: str
    subject: str
    finding: str
    reason: str
    remedy: str = ""


@dataclass
class Picture:
    """Everything that is looked at.  Rows are as the daemon gives them; an older one may lack some."""

    version: str  # of this kvslotctl
    protocol: int
    socket: str
    status: Row
    pools: list[Row]
    process: Row = field(default_factory=dict)
    totals: Row = field(default_factory=dict)
    settings: Row = field(default_factory=dict)  # by name
    sessions: list[Row] = field(default_factory=list)
    tickets: dict[str, list[Row]] = field(default_factory=dict)  # by pool
    tenants: list[Row] = field(default_factory=list)
    frag: list[Row] = field(default_factory=list)
    defrag: list[Row] = field(default_factory=list)
    lengths: list[Row] = field(default_factory=list)
    latency: list[Row] = field(default_factory=list)
    config: list[Row] = field(default_factory=list)
    audits: list[Row] = field(default_factory=list)
    effective: Row | None = None  # what a restart would make of the configuration
    effective_why: str = ""  # ... or why that is not known
    machine: Row = field(default_factory=dict)
    group: Row | None = None  # control group
    places: list[host.Place] = field(
        default_factory=list
    )  # the socket, its lock, then its folders up to the root
    admin: host.Place | None = None  # the admin API's socket; None: there is none
    tokens: list[host.Place] = field(default_factory=list)  # files of its bearer tokens
    unreadable: set[str] = field(default_factory=set)  # those of them that the daemon's user may not read
    health: Row | None = None  # what its /healthz says
    health_why: str = ""  # ... or why that is not known
    unit: str = ""
    stop_seconds: float | None = None
    state_of: Callable[[int], str] = host.process_state


Check = Callable[[Picture], list[Finding]]


# -- what runs against what should ------------------------------------------------------------------------------------


def versions(p: Picture) -> list[Finding]:
    """Are daemon and command line of one version, and do they speak one protocol?"""
    theirs = p.status["version"]
    protocol = p.process.get("protocol")
    if protocol is not None and protocol != p.protocol:
        return [
            Finding(
                "versions", "fault", "", f"the daemon speaks protocol {protocol}, kvslotctl {p.protocol}",
                "engines with the client library of this version are refused at Hello",
                "install one version of kvslot for daemon and engines, then restart the daemon",
            )
        ]  # fmt: skip
    if theirs != p.version:
        return [
            Finding(
                "versions", "warning", "", f"kvslotd is {theirs}, kvslotctl {p.version}",
                "the package was changed and the daemon not restarted, or this is another installation",
                f"restart the daemon ({_restart(p)}), or run the kvslotctl that belongs to it",
            )
        ]  # fmt: skip
    said = f", protocol {protocol}" if protocol is not None else ""
    return [_ok("versions", "", f"kvslotd and kvslotctl are both {theirs}{said}", "they know the same words")]


def configuration(p: Picture) -> list[Finding]:
    """Is what runs what its configuration says by now?"""
    if p.effective is None:
        return [_unknown("configuration", p.effective_why, "run doctor as root or as the daemon's user")]
    if not p.effective.get("ok", False) and p.effective.get("settings") is None:
        return [
            Finding(
                "configuration", "warning", "", f"the configuration cannot be used: {problem}",
                "the daemon runs on with what it read at its start, and would not start again",
                "mend it, and look with kvslotd --check-config",
            )
            for problem in p.effective.get("problems", [])[:LISTED]
        ]  # fmt: skip
    told: Row = p.effective["settings"]
    found: list[Finding] = []
    live = p.settings
    # A socket that the service manager made lies where its own unit says.
    passed = {"socket"} if p.process.get("socket_passed") else set()
    differ = [
        name
        for name, row in live.items()
        if name in told and name not in passed and not _same(told[name], row["value"])
    ]
    for name in differ:
        mode = name.endswith("_mode")
        now, then = (f"0o{each:o}" if mode else each for each in (live[name]["value"], told[name]))
        changeable = live[name]["changeable"] or name in RELOADED
        found.append(
            Finding(
                "configuration", "note" if changeable else "warning", name,
                f"{name} is {_shown(now)} in the daemon, and {_shown(then)} in its configuration",
                "it was set while the daemon runs, or the file has been changed since",
                _reload(p) if changeable else f"a restart takes it over: {_restart(p)}",
            )
        )  # fmt: skip
    found += _pools_differ(p, told)
    names = [pool["pool"] for pool in p.pools]
    then_names = [pool.get("name", "default") for pool in told.get("pools", [])]
    if names != then_names:
        found.append(
            Finding(
                "configuration", "warning", "pools",
                f"the daemon hosts {', '.join(names)}, its configuration says {', '.join(then_names) or 'none'}",
                "pools are made at the start", f"a restart takes it over: {_restart(p)}",
            )
        )  # fmt: skip
    return found or [
        _ok("configuration", "", "what runs is what the configuration says", "a restart changes nothing")
    ]


def _pools_differ(p: Picture, told: Row) -> list[Finding]:
    """Settings of pools that a restart would change; block sizes have a check of their own."""
    found: list[Finding] = []
    then = {each.get("name", "default"): each for each in told.get("pools", [])}
    for row in p.config:
        wanted = then.get(row["pool"], {})
        for name, value in row["settings"].items():
            if name in wanted and name != "block_size" and not _same(wanted[name], value):
                found.append(
                    Finding(
                        "configuration", "warning", row["pool"],
                        f"{name} is {_shown(value)} in the pool, and {_shown(wanted[name])} in the configuration",
                        "pools are as they were made", f"a restart takes it over: {_restart(p)}",
                    )
                )  # fmt: skip
    return found


def block_size(p: Picture) -> list[Finding]:
    """Has each pool the block size that is configured for it?"""
    found: list[Finding] = []
    then = {}
    if p.effective is not None and p.effective.get("settings") is not None:
        then = {each.get("name", "default"): each for each in p.effective["settings"].get("pools", [])}
    for pool in p.pools:
        name, runs = pool["pool"], pool["block_size"]
        given = next((each["settings"].get("block_size") for each in p.config if each["pool"] == name), None)
        wanted = then.get(name, {}).get("block_size")
        if given is not None and given != runs:
            found.append(
                Finding(
                    "block_size", "fault", name, f"blocks of {given} were configured, the pool has {runs}",
                    "what the daemon made is not what it was told to make", "report it",
                )
            )  # fmt: skip
        elif wanted is not None and wanted != runs:
            found.append(
                Finding(
                    "block_size", "warning", name, f"blocks of {runs} run, the configuration says {wanted} by now",
                    "a block size is fixed when the pool is made", f"a restart takes it over: {_restart(p)}",
                )
            )  # fmt: skip
        else:
            found.append(_ok("block_size", name, f"blocks of {runs}, as configured", "set when it was made"))
    return found


def audit(p: Picture) -> list[Finding]:
    """Do all reference counts and sums agree with a recount from nothing?"""
    if not p.audits:
        return [_unknown("audit", "no pool was recounted", "kvslotctl audit")]
    found: list[Finding] = []
    for each in p.audits:
        if each.get("why"):
            found.append(_unknown("audit", each["why"], "kvslotctl audit", each["pool"]))
        elif each["faults"]:
            more = f" (and {len(each['faults']) - 1} more)" if len(each["faults"]) > 1 else ""
            found.append(
                Finding(
                    "audit", "fault", each["pool"], f"{each['faults'][0]}{more}",
                    "the books do not agree with themselves: what is handed out next may be wrong",
                    "keep the output of kvslotctl audit --json and the log, drain and restart the daemon, report it",
                )
            )  # fmt: skip
        else:
            found.append(
                _ok(
                    "audit", each["pool"], f"recounted in {each['milliseconds']:.0f} ms, and sound",
                    "one owner a slot, counts equal the holders found",
                )
            )  # fmt: skip
    return found


# -- memory of the pools ----------------------------------------------------------------------------------------------


def fragmentation(p: Picture) -> list[Finding]:
    """Is free memory there, and of no use?"""
    run_blocks = _value(p, "compaction_run_blocks") or 32
    found: list[Finding] = []
    for row in p.frag:
        name = row["pool"]
        usable = next((pool["usable"] for pool in p.pools if pool["pool"] == name), 0)
        before = len(found)
        waits = any(each.get("contiguous") for each in p.tickets.get(name, ()))
        used_blocks = row["blocks"] - row["blocks_free"]
        if row["internal_waste_pct"] > WASTE_PCT and used_blocks > row["blocks"] / 2:
            found.append(
                Finding(
                    "fragmentation", "warning", name,
                    f"{_screen.pct(row['internal_waste_pct'])} of the slots in used blocks hold no token",
                    f"room for {row['free']:,} tokens lies in holes, or in copies ({row['duplicate_tokens']:,}), "
                    "fences and quarantine",
                    f"{_defrag(p, name)}; kvslotctl frag says what it is",
                )
            )  # fmt: skip
        if usable and 100 * row["pinned_waste_tokens"] / usable > PINNED_WASTE_PCT:
            found.append(
                Finding(
                    "fragmentation", "warning", name,
                    f"{row['pinned_waste_tokens']:,} free slots lie in blocks that something keeps in use",
                    "short pieces still fit there, whole blocks and long runs do not", _defrag(p, name),
                )
            )  # fmt: skip
        index = row["usable_run_pct"].get(str(_power(run_blocks)))
        if usable and index is not None and 100 * row["free"] / usable > FREE_PCT and index < RUN_PCT:
            found.append(
                Finding(
                    "fragmentation", "warning" if waits else "note", name,
                    f"only {_screen.pct(index)} of the free memory is in runs of {_power(run_blocks)} blocks",
                    "a request that wants one run waits for it now" if waits
                    else "a request that wants one run may wait for it",
                    _defrag(p, name),
                )
            )  # fmt: skip
        if len(found) == before:
            found.append(
                _ok(
                    "fragmentation", name,
                    f"{_screen.pct(row['internal_waste_pct'])} of the used blocks is empty, longest free run "
                    f"{row['largest_free_run']:,} slots",
                    f"below {WASTE_PCT:.0f} %, and free memory comes in runs",
                )
            )  # fmt: skip
    return found or [_unknown("fragmentation", "the daemon tells nothing of it", "")]


def compaction(p: Picture) -> list[Finding]:
    """Does compaction run as it was set, and do its copies succeed?"""
    found: list[Finding] = []
    setting = _value(p, "compaction")
    start = 100 * (_value(p, "compaction_start") or 0.25)
    for row in p.defrag:
        name = row["pool"]
        if row["failed"]:
            found.append(
                Finding(
                    "compaction", "warning", name, f"{row['failed']:,} of its copies failed",
                    "the device could not make them; what was to be moved stayed where it was",
                    "look for copy failures in the daemon's log",
                )
            )  # fmt: skip
        elif row["mode"] == "off" and setting not in (None, "off"):
            found.append(
                Finding(
                    "compaction", "note", name, f"stopped by hand, though the setting is {setting}",
                    "kvslotctl defrag stop holds until start, or until the daemon ends",
                    f"kvslotctl defrag start --pool {name}",
                )
            )  # fmt: skip
        elif row["mode"] == "off" and row["unpacked_pct"] > start:
            found.append(
                Finding(
                    "compaction", "note", name,
                    f"off, and {_screen.pct(row['unpacked_pct'])} of the free memory is in no whole block",
                    "nothing moves cached data together", "kvslotctl set compaction idle",
                )
            )  # fmt: skip
        else:
            found.append(_ok("compaction", name, f"{row['mode']}, {row['state']}", row["reason"]))
    return found or [_unknown("compaction", "the daemon tells nothing of it", "")]


def swap(p: Picture) -> list[Finding]:
    """Is the host tier fast enough to be worth it?"""
    return [
        Finding(
            "swap", "absent", "", "not there yet: this version has no host tier",
            "SwapOut, SwapIn and Prefetch are refused; what does not fit is evicted", "",
        )
    ]  # fmt: skip


def lengths(p: Picture) -> list[Finding]:
    """Do sequences still have the lengths of the daemon's start, and would another block size suit them better?"""
    found: list[Finding] = []
    for row in p.lengths:
        name, first, last = row["pool"], row["first"], row["last"]
        if first["count"] < LENGTHS_LEAST or last["count"] < LENGTHS_LEAST:
            found.append(
                _ok(
                    "lengths", name, f"{row['ended']:,} sequences have ended so far",
                    f"too few to tell: {2 * LENGTHS_LEAST} are needed",
                )
            )  # fmt: skip
            continue
        drift = row["drift"] or 0.0
        better = best_block(row["waste_pct"])
        waste = row["waste_pct"][str(row["block_size"])]
        half = f"half of them end by {last['p50']:,} tokens, {first['p50']:,} at the start"
        advice = ""
        if better != row["block_size"]:
            advice = (
                f"block_size = {better} wastes {_screen.pct(row['waste_pct'][str(better)])} in whole blocks, "
                f"{row['block_size']} {_screen.pct(waste)}"
            )
        oversized = waste > 2 * BLOCK_WASTE_PCT and better < row["block_size"]
        sure = "sure of it by kvslotctl record, then kvslotctl advise"
        if drift > DRIFT:
            found.append(
                Finding(
                    "lengths", "warning" if oversized else "note", name,
                    f"lengths have drifted since the start (distance {drift:.2f}): {half}",
                    advice or f"blocks of {row['block_size']} suit the lengths of now as well",
                    f"{advice.partition(' wastes')[0]} in the configuration; {sure}" if advice else "",
                )
            )  # fmt: skip
        elif oversized:
            found.append(
                Finding(
                    "lengths", "note", name,
                    f"blocks of {row['block_size']} are large: {_screen.pct(waste)} of whole ones is empty",
                    f"{advice}; slots make up for most of it, long runs and whole free blocks become rare",
                    f"block_size = {better} in the configuration; {sure}",
                )
            )  # fmt: skip
        else:
            found.append(
                _ok(
                    "lengths", name, f"as at the start (distance {drift:.2f}): {half}",
                    f"blocks of {row['block_size']} leave {_screen.pct(waste)} behind the last token",
                )
            )  # fmt: skip
    return found or [_unknown("lengths", "the daemon tells nothing of them", "it is of an older version")]


def best_block(waste: dict[str, float]) -> int:
    """The largest block that wastes no more than BLOCK_WASTE_PCT for whole blocks; the smallest where none does."""
    fits = [int(size) for size, pct in waste.items() if pct <= BLOCK_WASTE_PCT]
    return max(fits) if fits else min(map(int, waste))


def watermark(p: Picture) -> list[Finding]:
    """Is what is kept back from new requests enough for the growth of those that run, and not too much?"""
    found: list[Finding] = []
    pushes = p.totals.get("pushes", {})
    for pool in p.pools:
        name, held, usable = pool["pool"], pool["watermark"], pool["usable"]
        share = held / usable if usable else 0.0
        owing = sum(row["owes"] for row in p.sessions if row["pool"] == name)
        back = [
            each for each in p.tickets.get(name, ())
            if not each["growth"] and not each["awaits_commit"] and each["needed"] <= pool["free"] + pool["evictable"]
            and each["needed"] > pool["free"] + pool["evictable"] - held
        ]  # fmt: skip
        if owing or (len(p.pools) == 1 and pushes.get("preempt", 0)):
            times = f"{pushes.get('preempt', 0):,} sequences were named to be given up since the start"
            now = f"{_common.several(owing, 'sequence')} named to be given up now" if owing else times
            found.append(
                Finding(
                    "watermark", "warning" if owing else "note", name, now,
                    f"what runs grew into more than there is; {_screen.pct(100 * share)} is kept back for growth",
                    f"raise watermark of pool {name} (to {min(0.2, max(0.02, 2 * share)):.2f}), or let engines run "
                    "fewer sequences; it takes a restart",
                )
            )  # fmt: skip
        elif share > WATERMARK_MOST:
            found.append(
                Finding(
                    "watermark", "warning", name,
                    f"{_screen.pct(100 * share)} of the slots are kept back from new requests",
                    "so much never serves a new request while anything runs", f"lower watermark of pool {name}",
                )
            )  # fmt: skip
        elif back:
            found.append(
                Finding(
                    "watermark", "note", name,
                    f"{_common.several(len(back), 'request')} would fit but for the watermark",
                    f"{held:,} slots are kept for what runs to grow into",
                    "nothing, if they go on soon; a lower watermark admits sooner and preempts more",
                )
            )  # fmt: skip
        else:
            found.append(
                _ok(
                    "watermark", name, f"{held:,} slots ({_screen.pct(100 * share)}) are kept for growth",
                    "nobody had to give a sequence up",
                )
            )  # fmt: skip
    return found


def waiting(p: Picture) -> list[Finding]:
    """Who waits for memory, and for how long?"""
    found: list[Finding] = []
    for name, tickets in p.tickets.items():
        oldest = max((each["age_s"] for each in tickets), default=0.0)
        pool = next(pool for pool in p.pools if pool["pool"] == name)
        if oldest > TICKET_S:
            free = pool["free"] + pool["evictable"]
            found.append(
                Finding(
                    "waiting", "warning", name,
                    f"{_common.several(len(tickets), 'request')} waiting, the oldest for {_screen.duration(oldest)}",
                    f"{free:,} slots are free or evictable, {pool['private']:,} held by what runs, "
                    f"{pool['quarantined']:,} quarantined, {pool['fenced']:,} fenced",
                    "kvslotctl tickets and kvslotctl clients say who; a larger pool, or fewer sequences at a time",
                )
            )  # fmt: skip
        else:
            count = _common.several(len(tickets), "request")
            found.append(_ok("waiting", name, f"{count} waiting", f"none longer than {TICKET_S:.0f} s"))
    return found or [_unknown("waiting", "the daemon tells nothing of it", "it is of an older version")]


def tenants(p: Picture) -> list[Finding]:
    """Does any tenant meet its quotas?"""
    found: list[Finding] = []
    for row in p.tenants:
        who = f"tenant {_screen.words(row['tenant']) or 'without a name'}"
        for held, most, name in (
            ("charged", "slots", "slots"),
            ("unwritten", "reserved", "reserved_runs"),
            ("sessions", "sessions_max", "sessions"),
            ("namespaces", "namespaces_max", "namespaces"),
            ("pinned", "pins", "pins"),
        ):
            if row.get(most) and row[held] > SHARE_NEAR * row[most]:
                found.append(
                    Finding(
                        "tenants", "note", f"{row['pool']}, {who}",
                        f"{row[held]:,} of its quota of {row[most]:,} ({name})",
                        "beyond it is told LATER (quota), or refused, whatever is free",
                        f"nothing, if that is meant; else raise {name} of that tenant, and kvslotctl reload",
                    )
                )  # fmt: skip
    # What was refused is the tenant's, and the same in the row of each pool.
    turned = {row["tenant"]: row for row in p.tenants}
    for name, row in turned.items():
        count = row["refused_sessions"] + row.get("refused_namespaces", 0) + row["refused_requests"]
        if count:
            found.append(
                Finding(
                    "tenants", "note", f"tenant {_screen.words(name) or 'without a name'}",
                    f"{row['refused_sessions']:,} sessions, {row.get('refused_namespaces', 0):,} namespaces and "
                    f"{row['refused_requests']:,} requests were turned away",
                    "they met its quotas sessions, namespaces or requests_per_second",
                    "kvslotctl tenants; raise what is too low",
                )
            )  # fmt: skip
    if found or p.tenants:
        return found or [_ok("tenants", "", "no tenant is near a quota", f"{len(turned)} are configured")]
    return [_ok("tenants", "", "none is configured", "every namespace is open to who may connect")]


def pins(p: Picture) -> list[Finding]:
    """How much of the cache is kept by pins?"""
    found: list[Finding] = []
    for pool in p.pools:
        core: Row = next((each["core"] for each in p.config if each["pool"] == pool["pool"]), {})
        limit = int(pool["usable"] * core.get("pin_share", 0.5))
        if limit and pool["pinned"] > SHARE_NEAR * limit:
            found.append(
                Finding(
                    "pins", "note", pool["pool"], f"pins keep {pool['pinned']:,} tokens of the {limit:,} they may",
                    "the next pin is refused, and so much is never evicted",
                    "kvslotctl clients names who pins; unpin, or raise pin_share",
                )
            )  # fmt: skip
        else:
            found.append(
                _ok("pins", pool["pool"], f"{pool['pinned']:,} tokens are pinned", f"{limit:,} may be")
            )
    return found


def hits(p: Picture) -> list[Finding]:
    """Does the cache find anything?"""
    found: list[Finding] = []
    for pool in p.pools:
        name, asked, hit = pool["pool"], pool["prompt_tokens"], pool["hit_tokens"]
        if asked >= HIT_TOKENS and hit < 0.01 * asked:
            found.append(
                Finding(
                    "hits", "note", name, f"{_screen.share(hit, asked)} of {asked:,} prompt tokens were found cached",
                    f"in {_common.several(pool['namespaces'], 'namespace')}: prompts share no beginning, or each has a "
                    "namespace of its own, or what is cached goes before it is asked for",
                    "kvslotctl tree shows what is cached; engines should share tenant, model and salt, and put what "
                    "changes (times, names) behind what does not",
                )
            )  # fmt: skip
        else:
            found.append(
                _ok("hits", name, f"{_screen.share(hit, asked)} of {asked:,} prompt tokens found", "since its start")
            )  # fmt: skip
    return found


# -- clients ----------------------------------------------------------------------------------------------------------


def sessions(p: Picture) -> list[Finding]:
    """Does every session get on with its steps, read its answers and stay within its limits?"""
    found: list[Finding] = []
    for row in p.sessions:
        who = _who(row)
        if row["state"] != "live":
            continue
        if row["stalled"]:
            state = p.state_of(row["pid"])
            stopped = state == "T"
            found.append(
                Finding(
                    "sessions", "warning", who,
                    f"stalled for {_screen.duration(row.get('behind_s', 0))} at step {row['completed']} of "
                    f"{row['submitted']}; it holds {row['charged']:,} slots, {row['fenced']:,} of them fenced",
                    "its process is stopped" if stopped else "its device or its loop hangs: what it gave back waits "
                    "for steps that do not complete",
                    f"kill -CONT {row['pid']}" if stopped
                    else f"look at process {row['pid']} (py-spy dump --pid {row['pid']}); when it ends, all it "
                    "holds comes back",
                )
            )  # fmt: skip
        if row["owes"]:
            found.append(
                Finding(
                    "sessions", "warning", who, f"has not answered {_common.several(row['owes'], 'Preempt')}",
                    "past the deadline its new requests wait, and the next victim is named",
                    "its engine must free or swap what Preempt names; see kvslotctl docs client",
                )
            )  # fmt: skip
        if row["outbox_bytes"]:
            found.append(
                Finding(
                    "sessions", "note", who, f"leaves {_screen.size(row['outbox_bytes'])} of answers unread",
                    f"after {_value(p, 'reply_seconds') or 10:g} s of that it is dropped",
                    f"look at process {row['pid']}",
                )
            )  # fmt: skip
        if row["posted_errors"]:
            found.append(
                Finding(
                    "sessions", "note", who, f"{row['posted_errors']:,} of its posted Free and Trim were refused",
                    "it frees what it does not have: a fault of that engine's adapter",
                    "the log's posted_refused says which, and why",
                )
            )  # fmt: skip
        if row["quota"] and row["charged"] > SHARE_NEAR * row["quota"] and row["charged"] < row["quota"] * 10:
            usable = next((pool["usable"] for pool in p.pools if pool["pool"] == row["pool"]), 0)
            if row["quota"] < usable:
                found.append(
                    Finding(
                        "sessions", "note", who, f"holds {row['charged']:,} of its quota of {row['quota']:,} slots",
                        "it is told LATER (quota), whatever is free", "raise quota of the pool, or run fewer sequences",
                    )
                )  # fmt: skip
    most = p.process.get("sessions_max") or _value(p, "sessions_max") or 0
    if most and len(p.sessions) > SHARE_NEAR * most:
        found.append(
            Finding(
                "sessions", "warning", "", f"{len(p.sessions)} sessions of {most}",
                "the next engines are refused", "raise sessions_max; kvslotctl clients shows who is there",
            )
        )  # fmt: skip
    live = sum(row["state"] == "live" for row in p.sessions)
    return found or [
        _ok("sessions", "", f"{_common.several(live, 'session')}, all get on", "none is stalled")
    ]


def quarantine(p: Picture) -> list[Finding]:
    """How old is what was set aside for sessions that lost their connection?"""
    found: list[Finding] = []
    for row in p.sessions:
        age = row.get("lost_s", 0.0)
        if row["state"] != "lost" or age < LOST_NOTE_S:
            continue
        there = p.state_of(row["pid"])
        found.append(
            Finding(
                "quarantine", "warning" if age > LOST_WARNING_S else "note", _who(row),
                f"lost {_screen.duration(age)} ago, and holds {row['charged']:,} slots",
                "its process lives and may still write to them" if there
                else "its process cannot be seen from here, and was not seen to end",
                f"let it come back, or end process {row['pid']} (kill {row['pid']}): its slots come back at once",
            )
        )  # fmt: skip
    up = p.status.get("uptime_s", 0.0)
    for name in p.process.get("unsettled", ()):
        if up > LOST_NOTE_S:
            found.append(
                Finding(
                    "quarantine", "warning" if up > LOST_WARNING_S else "note", name,
                    f"sessions of before the start, {_screen.duration(up)} ago, still hold it",
                    "they may read what was cached then, so nothing of that is evicted or moved",
                    "kvslotctl clients shows them as lost, with their processes: let those come back, or end them",
                )
            )  # fmt: skip
    lost = sum(row["state"] == "lost" for row in p.sessions)
    for pool in p.pools:
        held = pool["quarantined"]
        if not found and held and not lost:
            found.append(
                Finding(
                    "quarantine", "note", pool["pool"], f"{held:,} slots are set aside for no session of this boot",
                    "processes of before a restart may still use them",
                    "they come back when those processes return or end",
                )
            )  # fmt: skip
    return found or [
        _ok("quarantine", "", "nothing is set aside for long", f"{lost} lost sessions, none for {LOST_NOTE_S:.0f} s")
    ]  # fmt: skip


def peers(p: Picture) -> list[Finding]:
    """Did clients break the protocol, or come in greater number than may?"""
    found: list[Finding] = []
    faults = p.process.get("peer_faults", 0)
    if faults:
        found.append(
            Finding(
                "peers", "note", "", f"{_common.several(faults, 'connection')} ended for breaking the protocol",
                "an engine of another version, or something that is no engine",
                "the log's peer_fault says which process",
            )
        )  # fmt: skip
    refused = p.process.get("refused_connections", 0)
    if refused:
        found.append(
            Finding(
                "peers", "warning", "", f"{_common.several(refused, 'connection')} refused since the start",
                f"more than {p.process.get('connections_max', 0)} came at a time",
                "raise sessions_max, and LimitNOFILE with it; or find who connects in a loop",
            )
        )  # fmt: skip
    for pool in p.pools:
        if pool.get("bad_handles"):
            found.append(
                Finding(
                    "peers", "note", pool["pool"],
                    f"{pool['bad_handles']:,} requests named what had ended or was not theirs",
                    "refused without effect; many of them mean that an adapter counts wrongly",
                    "kvslotctl latency shows which verbs are refused",
                )
            )  # fmt: skip
    return found or [_ok("peers", "", "no client broke the protocol", "and none was turned away")]


def latency(p: Picture) -> list[Finding]:
    """Does the daemon answer at once?"""
    row = next((each for each in p.latency if each["verb"] == "Allocate"), None)
    late = p.totals.get("loop_late_seconds_max", 0.0)
    if row is None or "all_us_p99" not in row:
        return [_ok("latency", "", "no Allocate has been timed yet", "nothing to judge by")]
    if row["all_us_p99"] > ALLOCATE_US:
        return [
            Finding(
                "latency", "warning", "", f"Allocate takes {row['all_us_p99'] / 1000:,.1f} ms (99th percentile)",
                f"inside the daemon, since its start; the loop was late by {late * 1000:,.0f} ms at most",
                "kvslotctl latency shows the steps; where the processor is shared, give the unit CPUWeight, or cores",
            )
        ]  # fmt: skip
    return [
        _ok(
            "latency", "", f"Allocate takes {row['all_us_p99'] / 1000:,.2f} ms (99th percentile)",
            f"below {ALLOCATE_US / 1000:.0f} ms inside the daemon",
        )
    ]  # fmt: skip


# -- the process and its machine --------------------------------------------------------------------------------------


def log(p: Picture) -> list[Finding]:
    """Does the log take all that is said?"""
    lost, left = p.totals.get("log_lost"), p.totals.get("log_left_out", 0)
    if lost is None:
        return [_unknown("log", "the daemon tells nothing of it", "it is of an older version")]
    if lost:
        return [
            Finding(
                "log", "note", "", f"{_common.several(lost, 'line')} of the log found no taker",
                "who reads its standard error is gone, or does not keep up",
                "look at journald: its limits and its disk",
            )
        ]  # fmt: skip
    return [
        _ok("log", "", "no line was lost", f"{_common.several(left, 'repeat')} left out, each counted there")
    ]


def descriptors(p: Picture) -> list[Finding]:
    """Do the descriptors suffice for the sessions that may come?"""
    used, most = p.process.get("descriptors"), p.process.get("descriptors_max")
    if used is None:
        return [_unknown("descriptors", "the daemon tells nothing of them", "it is of an older version")]
    wanted = _value(p, "sessions_max") or 0
    fits = p.process.get("sessions_max", wanted)
    if fits < wanted:
        return [
            Finding(
                "descriptors", "warning", "", f"{most:,} descriptors suffice for {fits} sessions, not for {wanted}",
                "a session takes five; beyond that engines are refused", f"LimitNOFILE={5 * wanted + 128} in the unit",
            )
        ]  # fmt: skip
    if most is not None and used > SHARE_NEAR * most:
        return [
            Finding(
                "descriptors", "warning", "", f"{used:,} of {most:,} descriptors are open",
                "without any the daemon accepts nobody",
                "raise LimitNOFILE in the unit; kvslotctl clients shows who holds them",
            )
        ]  # fmt: skip
    limit = "no limit" if most is None else f"of {most:,}"
    return [_ok("descriptors", "", f"{used:,} {limit} are open", f"enough for {fits} sessions")]


def locked_memory(p: Picture) -> list[Finding]:
    """May the daemon lock as much memory as its pools have?"""
    if "locked_bytes_max" not in p.process:
        return [
            _unknown("locked_memory", "the daemon tells nothing of its limits", "it is of an older version")
        ]
    limit, size = p.process["locked_bytes_max"], p.status["size_bytes"]
    if limit is None or limit >= size:
        shown = "no limit" if limit is None else _screen.size(limit)
        return [_ok("locked_memory", "", f"{shown} may be locked", f"the pools have {_screen.size(size)}")]
    return [
        Finding(
            "locked_memory", "note", "",
            f"{_screen.size(limit)} may be locked, and the pools have {_screen.size(size)}",
            "a pool in host memory is not locked and needs no more; one that a device copies from is",
            "LimitMEMLOCK=infinity in the unit",
        )
    ]  # fmt: skip


def shared_memory(p: Picture) -> list[Finding]:
    """Do limits on shared memory stand in the way of pools or engines?"""
    found: list[Finding] = []
    largest = max((pool["size_bytes"] for pool in p.pools), default=0)
    for key, name, unit in (
        ("file_bytes_max", "file size", "FSIZE"),
        ("address_bytes_max", "address space", "AS"),
    ):
        limit = p.process.get(key)
        if limit is not None and limit < 2 * largest:
            found.append(
                Finding(
                    "shared_memory", "warning", name, f"the limit on {name} is {_screen.size(limit)}",
                    f"it holds for a pool's memory, too, and the largest has {_screen.size(largest)}",
                    f"Limit{unit}=infinity in the unit",
                )
            )  # fmt: skip
    shm = p.machine.get("shm_total")
    if shm is not None and shm < SHM_BYTES:
        found.append(
            Finding(
                "shared_memory", "note", "/dev/shm", f"has {_screen.size(shm)}",
                "pools are not in it, but engines of several processes share theirs there",
                "docker run --shm-size, or mount -o remount,size=50% /dev/shm",
            )
        )  # fmt: skip
    if found:
        return found
    shown = "unknown" if shm is None else _screen.size(shm)
    return [
        _ok(
            "shared_memory", "", f"/dev/shm has {shown}, file sizes are not limited",
            "pools are memfds, in no file system",
        )
    ]  # fmt: skip


def memory(p: Picture) -> list[Finding]:
    """Is there memory enough beside the pools, and does none of it go to the machine's swap?"""
    found: list[Finding] = []
    size = p.status["size_bytes"]
    group = p.group
    if group is not None and group["max"] is not None:
        if group["max"] < size:
            found.append(
                Finding(
                    "memory", "warning", group["name"],
                    f"the control group may have {_screen.size(group['max'])}, the pools have {_screen.size(size)}",
                    "pages of a pool count for the daemon: the kernel kills it when they are touched",
                    f"MemoryMax={_screen.size(1.1 * size + (1 << 30)).replace(' ', '')[:-2]} or more in the unit",
                )
            )  # fmt: skip
        elif group["current"] > 0.97 * group["max"]:
            found.append(
                Finding(
                    "memory", "warning", group["name"],
                    f"{_screen.size(group['current'])} of {_screen.size(group['max'])} are used",
                    "past the limit the kernel takes pages away, then kills", "raise MemoryMax in the unit",
                )
            )  # fmt: skip
    if group is not None and group["oom_kills"]:
        found.append(
            Finding(
                "memory", "warning", group["name"],
                f"the kernel has killed {_common.several(group['oom_kills'], 'process', 'processes')} here",
                "memory was short: its limit, or the machine's, is too small for what runs there",
                "journalctl -k -g oom",
            )
        )  # fmt: skip
    swapped = max(p.process.get("swapped_bytes") or 0, (group or {}).get("swap_current") or 0)
    if swapped > 1 << 20:
        found.append(
            Finding(
                "memory", "warning", "", f"{_screen.size(swapped)} of the daemon's memory is swapped out",
                "a page that comes from disk takes milliseconds, for engines and for the daemon",
                "MemorySwapMax=0 in the unit, or swapoff -a",
            )
        )  # fmt: skip
    total, left = p.machine.get("total"), p.machine.get("available")
    if total and left is not None and left < 0.03 * total:
        found.append(
            Finding(
                "memory", "warning", "", f"{_screen.size(left)} of {_screen.size(total)} are left on this machine",
                "the kernel reclaims, then kills, whoever is largest: the daemon's pools are",
                "a smaller pool, or fewer neighbours",
            )
        )  # fmt: skip
    if found:
        return found
    beside = "" if left is None else f", {_screen.size(left)} are left on this machine"
    return [
        _ok(
            "memory",
            "",
            f"the pools have {_screen.size(size)}{beside}",
            "nothing is swapped out or near a limit",
        )
    ]


def permissions(p: Picture) -> list[Finding]:
    """May those open the socket who should, and nobody else put another in its place?"""
    if not p.places:
        return [_unknown("permissions", "the socket was not looked at", "")]
    daemon = p.process.get("uid", os.geteuid())
    trusted = {0, daemon}
    found: list[Finding] = []
    socket, lock, *folders = p.places
    mode = _value(p, "socket_mode")
    passed = p.process.get("socket_passed", False)  # then mode and group are those of the manager's unit
    if socket.kind != "socket":
        found.append(
            Finding(
                "permissions", "warning", socket.path, f"is {socket.kind} by now, and this is not the daemon's socket",
                "it was removed or replaced while the daemon runs: no new engine can connect",
                f"restart the daemon: {_restart(p)}",
            )
        )  # fmt: skip
    else:
        if socket.uid not in trusted:
            found.append(
                Finding(
                    "permissions", "fault", socket.path,
                    f"belongs to {host.user(socket.uid)}, and the daemon runs as {host.user(daemon)}",
                    "its owner may replace it, and see what engines send", f"chown {host.user(daemon)} {socket.path}",
                )
            )  # fmt: skip
        if mode is not None and socket.mode != mode and not passed:
            found.append(
                Finding(
                    "permissions", "warning", socket.path, f"has mode {socket.mode:04o}, socket_mode says {mode:04o}",
                    "somebody changed it, or systemd made it with a SocketMode of its own",
                    f"chmod {mode:04o} {socket.path}, and one value in unit and configuration",
                )
            )  # fmt: skip
        if socket.mode & 0o002:
            found.append(
                Finding(
                    "permissions", "warning", socket.path, f"is open to everybody ({socket.mode:04o})",
                    "whoever opens a session maps the pool, and may write all of it",
                    "socket_mode = 0o660 and socket_group = the engines' group",
                )
            )  # fmt: skip
        group = _value(p, "socket_group")
        if group and host.group(socket.gid) != group and not passed:
            found.append(
                Finding(
                    "permissions", "warning", socket.path,
                    f"belongs to group {host.group(socket.gid)}, socket_group says {group}",
                    "engines of that group cannot connect", f"chgrp {group} {socket.path}, or restart the daemon",
                )
            )  # fmt: skip
    if lock.kind == "file" and lock.mode & 0o022:
        found.append(
            Finding(
                "permissions", "warning", lock.path, f"may be written by others ({lock.text()})",
                "who takes the lock keeps the daemon from starting", f"chmod 600 {lock.path}",
            )
        )  # fmt: skip
    for folder in folders:
        sticky = folder.mode & 0o1000
        if folder.kind != "folder":
            continue
        if folder.uid not in trusted:
            found.append(
                Finding(
                    "permissions", "fault", folder.path,
                    f"belongs to {host.user(folder.uid)}, and the daemon runs as {host.user(daemon)}",
                    "who owns a folder on the way can put another socket in its place",
                    "let systemd make it (RuntimeDirectory=), or chown it",
                )
            )  # fmt: skip
        elif folder.mode & 0o022 and not sticky:
            whose = "everybody" if folder.mode & 0o002 else f"group {host.group(folder.gid)}"
            found.append(
                Finding(
                    "permissions", "fault", folder.path, f"may be written by {whose} ({folder.text()})",
                    "who can write a folder on the way can put another socket in its place",
                    f"chmod go-w {folder.path}",
                )
            )  # fmt: skip
    if found:
        return found
    return [
        _ok("permissions", "", f"{socket.path} is {socket.text()}", "and only root and the daemon can replace it")
    ]  # fmt: skip


def admin(p: Picture) -> list[Finding]:
    """Are the admin API's socket, port and token files as they should be, and does /healthz pass?"""
    if p.admin is None:
        return [_ok("admin", "", "no admin API", "admin = false, or a version without one")]
    where = p.admin.path
    found = [
        Finding(
            "admin", "warning", each["name"], each["reason"],
            "engines are served all the same: it is the admin API alone that lacks it", each["remedy"],
        )
        for each in p.process.get("admin", ()) if not each["ok"]
    ]  # fmt: skip
    if p.admin.kind != "socket" and not any(each.subject == "admin_socket" for each in found):
        found.append(
            Finding(
                "admin", "warning", where, f"is {p.admin.kind}, and the admin API is on",
                "no metrics, no page, no /healthz: it could not have its socket, or that was removed",
                "the log's admin_unavailable says why; admin = false turns it off",
            )
        )  # fmt: skip
    elif p.admin.mode & 0o002:
        found.append(
            Finding(
                "admin", "warning", where, f"is open to everybody ({p.admin.mode:04o})",
                "whoever connects sees who is connected and what is cached",
                "admin_socket_mode = 0o660 and admin_socket_group = the operators' group",
            )
        )  # fmt: skip
    told = [each.finding for each in found]
    found += [
        each
        for each in _tokens(p)
        if each.verdict == "fault" or not any(each.subject in text for text in told)
    ]
    # What a start would find, but what has been said already of what runs, or of a file.
    said = {each.subject for each in found}
    ours = [
        f"admin_tcp {each['reason'].removeprefix('served at ')}: the port is taken"
        for each in p.process.get("admin", ()) if each["ok"]
    ]  # fmt: skip
    found += [
        Finding(
            "admin", "warning", "a reload or start", each, "it would do without that door of the API",
            "do what it says; kvslotd --check-config says whether it is enough",
        )
        for each in (p.effective or {}).get("admin", ())
        if not any(subject in each for subject in (*said, *ours))
    ]  # fmt: skip
    if p.admin.kind != "socket":
        return found
    if p.health is None:
        found.append(
            _unknown("admin", p.health_why, f"curl --unix-socket {where} http://localhost/healthz", where)
        )
        return found
    known = {each["name"] for each in p.process.get("admin", ())}
    for told in p.health.get("checks", ()):
        if not told["ok"] and told["name"] not in known:
            found.append(
                Finding(
                    "admin", "warning", told["name"], f"its check {told['name']} fails", told["reason"],
                    "kvslotctl docs operations goes on from there",
                )
            )  # fmt: skip
    names = ", ".join(each["name"] for each in p.health.get("checks", ()))
    return found or [_ok("admin", where, "/healthz passes", names)]


def _tokens(p: Picture) -> list[Finding]:
    """Files of tokens that the daemon may not read, or others may."""
    found: list[Finding] = []
    user = host.user(p.process.get("uid", os.geteuid()))
    for each in p.tokens:
        if each.kind == "missing":
            found.append(
                Finding(
                    "admin", "warning", each.path, "this token file is missing",
                    "the daemon goes on with tokens that it has read, and would start without TCP",
                    f"install -m 600 -o {user} /dev/null {each.path}; openssl rand -hex 32 > {each.path}; "
                    "kvslotctl reload",
                )
            )  # fmt: skip
        elif each.kind == "file" and each.mode & 0o027:
            found.append(
                Finding(
                    "admin", "fault", each.path, f"is open to others ({each.text()})",
                    "who has a token may look over TCP, or act",
                    f"chmod 640 {each.path}, and other tokens in it",
                )
            )  # fmt: skip
        elif each.path in p.unreadable:
            found.append(
                Finding(
                    "admin", "warning", each.path, f"user {user} may not read it ({each.text()})",
                    "the daemon goes on with tokens that it has read, and would start without TCP",
                    f"chown {user} {each.path} && chmod 600 {each.path}; kvslotctl reload",
                )
            )  # fmt: skip
    return found


def stopping(p: Picture) -> list[Finding]:
    """Does the supervisor wait longer for the end than a drain takes?"""
    if p.status["state"] == "draining":
        left = _screen.duration(p.status["drain_left_s"] or 0)
        return [
            Finding(
                "stopping", "note", "", f"it drains, and ends in {left} at most", "somebody stops or restarts it",
                "kvslotctl clients says who still runs",
            )
        ]  # fmt: skip
    if not p.unit:
        return [_ok("stopping", "", "no unit of systemd's", "a drain has drain_seconds, whoever ends it")]
    budget = _value(p, "drain_seconds") or 0.0
    if p.stop_seconds is None:
        return [
            _unknown(
                "stopping",
                f"systemd does not tell how long it waits for {p.unit}",
                f"systemctl show {p.unit}",
            )
        ]
    if p.stop_seconds <= budget:
        return [
            Finding(
                "stopping", "warning", p.unit, f"TimeoutStopSec is {p.stop_seconds:g} s, drain_seconds {budget:g}",
                "the daemon is killed in the middle of its drain", f"TimeoutStopSec={budget + 10:g} in the unit",
            )
        ]  # fmt: skip
    return [
        _ok("stopping", p.unit, f"TimeoutStopSec {p.stop_seconds:g} s, drain_seconds {budget:g}", "a drain can end")
    ]  # fmt: skip


def restart(p: Picture) -> list[Finding]:
    """Would a restart keep what is cached?"""
    if "store" not in p.process:
        return [_unknown("restart", "the daemon tells nothing of it", "it is of an older version")]
    cached = sum(pool["cached"] for pool in p.pools)
    if not p.process["store"]:
        lost = f"a restart would lose {_common.several(cached, 'cached token')}"
        if not p.unit:
            return [_ok("restart", "", lost, "started by hand: nothing keeps its memory meanwhile")]
        return [
            Finding(
                "restart", "note", p.unit, lost, "the unit has no store of descriptors",
                "FileDescriptorStoreMax=4096 in the unit, as the one that comes along says",
            )
        ]  # fmt: skip
    wanted, most = 2 * len(p.pools) + len(p.sessions), p.process["store_max"]
    if wanted > most:
        return [
            Finding(
                "restart", "warning", p.unit, f"{wanted} descriptors are to be kept, and {most} are",
                "of the others' sessions a restart has no proof of life, so their slots wait for long",
                "raise FileDescriptorStoreMax in the unit",
            )
        ]  # fmt: skip
    return [
        _ok("restart", p.unit, f"a restart keeps {_common.several(cached, 'cached token')}", f"{wanted} of {most} kept")
    ]  # fmt: skip


CHECKS: Final[dict[str, Check]] = {
    "versions": versions,
    "configuration": configuration,
    "block_size": block_size,
    "audit": audit,
    "fragmentation": fragmentation,
    "compaction": compaction,
    "swap": swap,
    "lengths": lengths,
    "watermark": watermark,
    "waiting": waiting,
    "tenants": tenants,
    "pins": pins,
    "hits": hits,
    "sessions": sessions,
    "quarantine": quarantine,
    "peers": peers,
    "latency": latency,
    "log": log,
    "descriptors": descriptors,
    "locked_memory": locked_memory,
    "shared_memory": shared_memory,
    "memory": memory,
    "permissions": permissions,
    "admin": admin,
    "restart": restart,
    "stopping": stopping,
}
"""All there are, in the order of what is printed."""


def look(picture: Picture, names: Iterable[str]) -> list[Finding]:
    """The findings of these checks; one that fails itself is `unknown`, and does not take the others with it."""
    found: list[Finding] = []
    for name in names:
        try:
            found += CHECKS[name](picture)
        except (KeyError, TypeError, ValueError, StopIteration) as error:
            # A daemon of another version may leave out what a check goes by.
            what = f"{type(error).__name__}: {error}"
            found.append(_unknown(name, f"what the daemon tells cannot be read ({what})", "see versions"))
    return few(found)


def few(found: list[Finding]) -> list[Finding]:
    """The first few of those that are wrong for one reason, and how many more there are."""
    kept: list[Finding] = []
    counts: dict[tuple[str, str, str], int] = {}
    for each in found:
        key = each.check, each.verdict, each.reason
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= LISTED or each.verdict == "ok":
            kept.append(each)
        elif counts[key] == LISTED + 1:
            kept.append(each._replace(subject="", finding="", remedy=""))
    for place, each in enumerate(kept):
        if not each.finding:
            more = counts[each.check, each.verdict, each.reason] - LISTED
            kept[place] = each._replace(finding=f"{more:,} more for the same reason")
    return kept


# -- words ------------------------------------------------------------------------------------------------------------


def _ok(check: str, subject: str, finding: str, reason: str) -> Finding:
    return Finding(check, "ok", subject, finding, reason)


def _unknown(check: str, why: str, remedy: str, subject: str = "") -> Finding:
    return Finding(check, "unknown", subject, "could not be looked at", why, remedy)


def _value(p: Picture, name: str) -> Any:
    """A setting of the running daemon; None where it has no such setting."""
    row = p.settings.get(name)
    return row["value"] if row is not None else None


def _same(one: Any, other: Any) -> bool:
    """Settings as JSON and as MessagePack have them."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return list(one) == list(other)
    return bool(one == other)


def _shown(value: Any) -> str:
    return _screen.words(str(value)) or "empty"


def _who(row: Row) -> str:
    return f"session {row['session']} ({_screen.words(row['name']) or 'unnamed'}, pid {row['pid']})"


def _power(number: int) -> int:
    """The largest power of two that is no greater, up to 1024: lengths that the usable-run index knows."""
    return min(1024, 1 << (max(1, number).bit_length() - 1))


def _defrag(p: Picture, pool: str) -> str:
    several = f" --pool {pool}" if len(p.pools) > 1 else ""
    return f"kvslotctl defrag once{several}"


def _restart(p: Picture) -> str:
    return f"systemctl restart {p.unit}" if p.unit else "kvslotctl drain, then start it again"


def _reload(p: Picture) -> str:
    told = f"systemctl reload {p.unit}" if p.unit else f"kill -HUP {p.process.get('pid', 'PID')}"
    return f"{told} takes the file over, kvslotctl set the other way"
