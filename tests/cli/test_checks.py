"""Each check of `kvslotctl doctor`, on pictures made by hand: what is well, and each thing that may be wrong."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvslot.cli import checks, doctor, host
from kvslot.cli.checks import Picture
from kvslot.daemon import config

Change = Callable[[Picture], None]


def healthy() -> Picture:
    """A daemon with one pool and one session, of which nothing is to be said."""
    pool = {
        "pool": "chat", "block_size": 16, "usable": 10_000, "free": 4000, "evictable": 3000, "private": 2000,
        "cached": 4000, "quarantined": 0, "fenced": 0, "watermark": 200, "pinned": 0, "size_bytes": 1 << 24,
        "prompt_tokens": 500_000, "hit_tokens": 200_000, "namespaces": 1, "bad_handles": 0,
    }  # fmt: skip
    session = {
        "session": 7, "name": "engine", "pid": 4242, "pool": "chat", "state": "live", "stalled": False, "behind_s": 0.0,
        "lost_s": 0.0, "charged": 500, "fenced": 0, "quota": 10_000, "owes": 0, "outbox_bytes": 0, "posted_errors": 0,
        "submitted": 9, "completed": 9,
    }  # fmt: skip
    summary = {"count": 500, "mean": 900.0, "p10": 100, "p50": 800, "p90": 2000, "p99": 4000}
    settings = {
        "socket_mode": 0o660, "socket_group": "", "drain_seconds": 20.0, "sessions_max": 256, "reply_seconds": 10.0,
        "compaction": "idle", "compaction_start": 0.25, "compaction_run_blocks": 32,
    }  # fmt: skip
    told = {**settings, "pools": [{"name": "chat", "block_size": 16}]}
    root = {"uid": 0, "gid": 0}
    return Picture(
        version="1.0",
        protocol=1,
        socket="/run/kvslot/kvslot.sock",
        status={"version": "1.0", "state": "running", "drain_left_s": None, "size_bytes": 1 << 24, "uptime_s": 5.0},
        pools=[pool],
        process={
            "pid": 77, "uid": 0, "protocol": 1, "descriptors": 30, "descriptors_max": 4096, "sessions_max": 256,
            "locked_bytes_max": None, "file_bytes_max": None, "address_bytes_max": None, "swapped_bytes": 0,
            "peer_faults": 0, "refused_connections": 0, "connections_max": 288, "store": True, "store_max": 4096,
        },
        totals={"pushes": {"preempt": 0}, "loop_late_seconds_max": 0.01, "log_lost": 0, "log_left_out": 4},
        settings={
            name: {"name": name, "value": value, "changeable": name in ("drain_seconds", "compaction")}
            for name, value in settings.items()
        },
        sessions=[session],
        tickets={"chat": []},
        tenants=[
            {"pool": "chat", "tenant": "acme", "charged": 100, "slots": 1000, "unwritten": 0, "reserved": 0,
             "sessions": 2, "sessions_max": 9, "refused_sessions": 0, "refused_requests": 0, "namespaces": 1},
        ],
        frag=[
            {"pool": "chat", "blocks": 626, "blocks_free": 250, "free": 4000, "internal_waste_pct": 4.0,
             "duplicate_tokens": 0, "pinned_waste_tokens": 100, "largest_free_run": 3000,
             "usable_run_pct": {"1": 99.0, "32": 90.0, "64": 80.0}},
        ],
        defrag=[
            {"pool": "chat", "mode": "idle", "state": "settled", "reason": "nothing to gain", "failed": 0,
             "unpacked_pct": 3.0},
        ],
        lengths=[
            {"pool": "chat", "block_size": 16, "ended": 5000, "first": summary, "last": summary, "drift": 0.03,
             "waste_pct": {"1": 0.0, "4": 0.2, "8": 0.4, "16": 0.9, "32": 4.7, "64": 9.0, "128": 18.0}},
        ],
        latency=[{"verb": "Allocate", "all_us_p99": 500.0}],
        config=[{"pool": "chat", "settings": {"block_size": 16, "watermark": 0.02}, "core": {"pin_share": 0.5}}],
        audits=[{"pool": "chat", "faults": [], "milliseconds": 3.0}],
        effective={"ok": True, "problems": [], "settings": told},
        machine={"total": 1 << 36, "available": 1 << 35, "shm_total": 1 << 33, "shm_free": 1 << 33},
        group={"name": "/kvslot", "current": 1 << 24, "max": 1 << 30, "swap_current": 0, "oom_kills": 0},
        places=[
            host.Place("/run/kvslot/kvslot.sock", "socket", 0o660, **root),
            host.Place("/run/kvslot/kvslot.sock.lock", "file", 0o600, **root),
            host.Place("/run/kvslot", "folder", 0o755, **root),
            host.Place("/run", "folder", 0o755, **root),
            host.Place("/", "folder", 0o755, **root),
        ],
        admin=host.Place("/run/kvslot/admin.sock", "socket", 0o660, **root),
        health={"ok": True, "checks": [{"name": "loop", "ok": True, "reason": "last beat 0.1 s ago"}]},
        health_why="it does not answer",
        unit="kvslotd@0.service",
        stop_seconds=40.0,
        state_of=lambda pid: "S",
    )  # fmt: skip


@pytest.mark.parametrize("name", checks.CHECKS)
def test_of_what_is_well_nothing_is_said(name: str) -> None:
    """A healthy picture gives `ok`, with a reason and nothing to do; swap says that it is not there."""
    found = checks.CHECKS[name](healthy())
    assert found
    for each in found:
        assert each.check == name
        assert each.verdict == ("absent" if name == "swap" else "ok"), each
        assert each.finding
        assert each.reason
        assert not each.remedy


def row(picture: Picture, of: str, **fields: Any) -> None:
    getattr(picture, of)[0].update(fields)


def put(picture: Picture, of: str, **fields: Any) -> None:
    getattr(picture, of).update(fields)


def setting(picture: Picture, name: str, value: Any) -> None:
    picture.settings[name]["value"] = value


def told(picture: Picture, **fields: Any) -> None:
    assert picture.effective is not None
    picture.effective["settings"].update(fields)


def place(picture: Picture, number: int, **fields: Any) -> None:
    picture.places[number] = picture.places[number]._replace(**fields)


def open_to_all(picture: Picture) -> None:
    setting(picture, "socket_mode", 0o666)
    place(picture, 0, mode=0o666)


def unsettled(picture: Picture, up: float) -> None:
    put(picture, "status", uptime_s=up)
    put(picture, "process", unsettled=["chat"])


def not_read(picture: Picture, why: str) -> None:
    picture.effective, picture.effective_why = None, why


def ticket(**fields: Any) -> dict[str, Any]:
    return {
        "age_s": 1.0,
        "growth": False,
        "awaits_commit": False,
        "contiguous": False,
        "needed": 100,
        **fields,
    }


short = {"count": 500, "mean": 90.0, "p10": 10, "p50": 60, "p90": 200, "p99": 400}


def no_token(picture: Picture) -> None:
    picture.tokens.append(host.Place("/etc/kvslot/t", "file", 0o600, 0, 0))
    picture.unreadable.add("/etc/kvslot/t")


SHUT = {
    "name": "admin_tcp", "ok": False, "vital": False, "remedy": "name one of `ip -brief address`",
    "reason": "203.0.113.1:9 is not served: this machine has no such address",
}  # fmt: skip

CASES: list[tuple[str, Change, str, str, str]] = [
    # check, what is wrong, verdict, in the finding, in the remedy
    ("versions", lambda p: put(p, "status", version="0.9"), "warning", "0.9", "systemctl restart kvslotd@0.service"),
    ("versions", lambda p: put(p, "process", protocol=2), "fault", "protocol 2", "install one version"),
    ("configuration", lambda p: not_read(p, "it is another's"), "unknown", "", "as root"),
    ("configuration", lambda p: told(p, drain_seconds=5.0), "note", "20.0 in the daemon, and 5.0", "systemctl reload"),
    ("configuration", lambda p: told(p, sessions_max=9), "warning", "256 in the daemon, and 9", "systemctl restart"),
    ("configuration", lambda p: told(p, pools=[{"name": "chat", "block_size": 16, "watermark": 0.05}]), "warning",
     "watermark is 0.02 in the pool, and 0.05", "restart"),
    ("configuration", lambda p: told(p, pools=[]), "warning", "hosts chat, its configuration says none", "restart"),
    ("block_size", lambda p: told(p, pools=[{"name": "chat", "block_size": 32}]), "warning", "16 run", "restart"),
    ("block_size", lambda p: row(p, "pools", block_size=8), "fault", "16 were configured", "report"),
    ("audit", lambda p: row(p, "audits", faults=["slot 9 has two owners", "x"]), "fault", "slot 9", "report it"),
    ("audit", lambda p: row(p, "audits", why="an audit is running already"), "unknown", "", "kvslotctl audit"),
    ("audit", lambda p: p.audits.clear(), "unknown", "", "kvslotctl audit"),
    ("fragmentation", lambda p: row(p, "frag", internal_waste_pct=40.0), "warning", "40 %", "kvslotctl defrag once"),
    ("fragmentation", lambda p: row(p, "frag", pinned_waste_tokens=3000), "warning", "3,000 free slots", "defrag once"),
    ("fragmentation", lambda p: row(p, "frag", usable_run_pct={"32": 10.0}), "note", "10 % of the free", "defrag once"),
    ("compaction", lambda p: row(p, "defrag", failed=3), "warning", "3 of its copies failed", "log"),
    ("compaction", lambda p: row(p, "defrag", mode="off"), "note", "stopped by hand", "defrag start --pool chat"),
    ("lengths", lambda p: row(p, "lengths", drift=0.6, last=short), "note", "drifted", ""),
    ("watermark", lambda p: row(p, "sessions", owes=2), "warning", "2 sequences named", "raise watermark of pool chat"),
    ("watermark", lambda p: put(p, "totals", pushes={"preempt": 5}), "note", "5 sequences", "raise watermark"),
    ("watermark", lambda p: row(p, "pools", watermark=5000), "warning", "50 %", "lower watermark"),
    ("watermark", lambda p: p.tickets["chat"].append(ticket(needed=6900)), "note", "but for the watermark", "lower"),
    ("waiting", lambda p: p.tickets["chat"].append(ticket(age_s=99.0)), "warning", "for 1 min 39 s", "larger pool"),
    ("tenants", lambda p: row(p, "tenants", charged=950), "note", "950 of its quota of 1,000 (slots)", "raise slots"),
    ("tenants", lambda p: row(p, "tenants", refused_requests=5), "note", "0 namespaces and 5 requests", "tenants"),
    ("tenants", lambda p: row(p, "tenants", namespaces=95, namespaces_max=100), "note", "95 of its", "namespaces"),
    ("pins", lambda p: row(p, "pools", pinned=4900), "note", "4,900 tokens of the 5,000", "unpin"),
    ("hits", lambda p: row(p, "pools", hit_tokens=100), "note", "<0.1 %", "kvslotctl tree"),
    ("sessions", lambda p: row(p, "sessions", stalled=True, behind_s=70.0, submitted=12), "warning",
     "stalled for 1 min 10 s at step 9 of 12", "py-spy dump --pid 4242"),
    ("sessions", lambda p: row(p, "sessions", owes=1), "warning", "1 Preempt", "docs client"),
    ("sessions", lambda p: row(p, "sessions", outbox_bytes=2048), "note", "2 KiB of answers", "4242"),
    ("sessions", lambda p: row(p, "sessions", posted_errors=3), "note", "3 of its posted", "posted_refused"),
    ("sessions", lambda p: row(p, "sessions", quota=510), "note", "500 of its quota of 510", "raise quota"),
    ("sessions", lambda p: put(p, "process", sessions_max=1), "warning", "1 sessions of 1", "sessions_max"),
    ("quarantine", lambda p: row(p, "sessions", state="lost", lost_s=90.0), "note", "lost 1 min 30 s ago", "kill 4242"),
    ("quarantine", lambda p: row(p, "sessions", state="lost", lost_s=900.0), "warning", "500 slots", "kill 4242"),
    ("quarantine", lambda p: unsettled(p, 60.0), "note", "1 min 0 s ago, still hold it", "let those come back"),
    ("quarantine", lambda p: unsettled(p, 3600.0), "warning", "1 h 0 min ago", "let those come back"),
    ("quarantine", lambda p: row(p, "pools", quarantined=64), "note", "64 slots", "return or end"),
    ("peers", lambda p: put(p, "process", peer_faults=2), "note", "2 connections ended", "peer_fault"),
    ("peers", lambda p: put(p, "process", refused_connections=3), "warning", "3 connections refused", "sessions_max"),
    ("peers", lambda p: row(p, "pools", bad_handles=4), "note", "4 requests", "kvslotctl latency"),
    ("latency", lambda p: row(p, "latency", all_us_p99=20_000.0), "warning", "20.0 ms", "kvslotctl latency"),
    ("log", lambda p: put(p, "totals", log_lost=3), "note", "3 lines", "journald"),
    ("descriptors", lambda p: put(p, "process", descriptors=4000), "warning", "4,000 of 4,096", "LimitNOFILE"),
    ("descriptors", lambda p: put(p, "process", sessions_max=12, descriptors_max=100), "warning",
     "100 descriptors suffice for 12 sessions, not for 256", "LimitNOFILE=1408"),
    ("locked_memory", lambda p: put(p, "process", locked_bytes_max=65536), "note", "64 KiB may be locked",
     "LimitMEMLOCK=infinity"),
    ("shared_memory", lambda p: put(p, "process", file_bytes_max=1 << 20), "warning", "1 MiB", "LimitFSIZE=infinity"),
    ("shared_memory", lambda p: put(p, "machine", shm_total=64 << 20), "note", "has 64 MiB", "--shm-size"),
    ("memory", lambda p: put(p, "group", max=1 << 20), "warning", "may have 1 MiB", "MemoryMax="),
    ("memory", lambda p: put(p, "group", current=1 << 30), "warning", "1 GiB of 1 GiB", "raise MemoryMax"),
    ("memory", lambda p: put(p, "group", oom_kills=1), "warning", "killed 1 process", "journalctl -k"),
    ("memory", lambda p: put(p, "process", swapped_bytes=5 << 20), "warning", "5 MiB", "MemorySwapMax=0"),
    ("memory", lambda p: put(p, "machine", available=1 << 29), "warning", "512 MiB of 64 GiB", "smaller pool"),
    ("permissions", lambda p: place(p, 0, kind="missing"), "warning", "is missing by now", "restart"),
    ("permissions", lambda p: place(p, 0, uid=1234), "fault", "belongs to 1234", "chown"),
    ("permissions", lambda p: place(p, 0, mode=0o600), "warning", "0600, socket_mode says 0660", "chmod 0660"),
    ("permissions", open_to_all, "warning", "open to everybody", "socket_group"),
    ("permissions", lambda p: setting(p, "socket_group", "no-such-group"), "warning", "no-such-group", "chgrp"),
    ("permissions", lambda p: place(p, 1, mode=0o666), "warning", "may be written by others", "chmod 600"),
    ("permissions", lambda p: place(p, 2, uid=1234), "fault", "belongs to 1234", "RuntimeDirectory="),
    ("permissions", lambda p: place(p, 3, mode=0o777), "fault", "may be written by everybody", "chmod go-w /run"),
    ("admin", lambda p: setattr(p, "admin", host.Place("/run/a", "missing")), "warning", "is missing", "unavailable"),
    ("admin", lambda p: setattr(p, "admin", host.Place("/run/a", "socket", 0o666)), "warning", "open to every", "660"),
    ("admin", lambda p: p.tokens.append(host.Place("/etc/kvslot/t", "file", 0o644, 0, 0)), "fault", "is open to others",
     "chmod 640 /etc/kvslot/t"),
    ("admin", lambda p: p.tokens.append(host.Place("/etc/kvslot/t", "missing")), "warning", "is missing",
     "openssl rand -hex 32 > /etc/kvslot/t"),
    ("admin", no_token, "warning", "may not read it (root:root 0600)", "chmod 600 /etc/kvslot/t; kvslotctl reload"),
    ("admin", lambda p: put(p, "process", admin=[SHUT]), "warning", "203.0.113.1:9 is not served", "ip -brief address"),
    ("admin", lambda p: put(p, "effective", admin=["admin_tcp 127.0.0.1:9: the port is taken: end who has it"]),
     "warning", "the port is taken", "--check-config"),
    ("admin", lambda p: setattr(p, "health", None), "unknown", "", "curl --unix-socket"),
    ("admin", lambda p: put(p, "health", checks=[{"name": "loop", "ok": False, "reason": "no beat for 9 s"}]),
     "warning", "its check loop fails", "docs operations"),
    ("restart", lambda p: put(p, "process", store=False), "note", "lose 4,000 cached", "FileDescriptorStoreMax=4096"),
    ("restart", lambda p: put(p, "process", store_max=2), "warning", "3 descriptors are to be kept, and 2", "raise"),
    ("stopping", lambda p: setattr(p, "stop_seconds", 15.0), "warning", "TimeoutStopSec is 15 s", "TimeoutStopSec=30"),
    ("stopping", lambda p: setattr(p, "stop_seconds", None), "unknown", "", "systemctl show"),
    ("stopping", lambda p: put(p, "status", state="draining", drain_left_s=4.0), "note", "4 s at most", "clients"),
]  # fmt: skip


def test_the_daemons_own_port_is_not_taken_from_it() -> None:
    """What a start would find taken by the daemon that runs, it would find free."""
    picture = healthy()
    put(picture, "effective", admin=["admin_tcp 127.0.0.1:9477: the port is taken: end who has it"])
    put(picture, "process", admin=[{**SHUT, "ok": True, "reason": "served at 127.0.0.1:9477"}])
    (found,) = checks.admin(picture)
    assert found.verdict == "ok"


@pytest.mark.parametrize(
    ("name", "change", "verdict", "finding", "remedy"),
    CASES,
    ids=[f"{case[0]}-{number}" for number, case in enumerate(CASES)],
)
def test_what_is_wrong_is_found_with_a_reason_and_a_remedy(
    name: str, change: Change, verdict: str, finding: str, remedy: str
) -> None:
    """One thing wrong gives one finding of that verdict, which says what, why it matters, and what to do."""
    picture = healthy()
    change(picture)
    (found,) = [each for each in checks.CHECKS[name](picture) if each.verdict != "ok"]
    assert found.verdict == verdict
    assert finding in found.finding
    assert found.reason
    assert remedy in found.remedy


def test_every_check_has_a_case_that_makes_it_speak() -> None:
    """A check that nothing can move would be no check."""
    assert {case[0] for case in CASES} == set(checks.CHECKS) - {"swap"}


def test_names_stand_in_one_order_for_help_completion_and_output() -> None:
    """What is offered for completion is what there is, and every check says what it asks."""
    assert tuple(checks.CHECKS) == doctor.NAMES
    for name, check in checks.CHECKS.items():
        assert (check.__doc__ or "").strip().endswith("?"), name


def test_what_a_reload_takes_over_is_known() -> None:
    """A setting for which a restart is advised needs one."""
    assert set(checks.RELOADED) == set(config.RELOADABLE) - {"tenants"}


def test_a_stopped_process_is_to_be_continued_not_killed() -> None:
    """SIGSTOP looks like a hang from outside; /proc tells them apart."""
    picture = healthy()
    row(picture, "sessions", stalled=True, submitted=10)
    picture.state_of = lambda pid: "T"
    (found,) = checks.sessions(picture)
    assert found.reason == "its process is stopped"
    assert found.remedy == "kill -CONT 4242"


def test_a_block_size_is_advised_when_the_lengths_have_changed() -> None:
    """Short sequences in large blocks: the advice is the largest block that wastes little, and says both wastes."""
    picture = healthy()
    waste = {"1": 0.0, "4": 1.5, "8": 3.5, "16": 9.0, "32": 21.0, "64": 40.0}
    row(picture, "lengths", drift=0.7, last=short, waste_pct=waste)
    (found,) = checks.lengths(picture)
    assert found.verdict == "warning"
    assert found.reason == "block_size = 8 wastes 3.5 % in whole blocks, 16 9 %"
    assert found.remedy.startswith("block_size = 8 in the configuration")
    assert "kvslotctl advise" in found.remedy
    assert checks.best_block({"1": 0.0, "16": 3.0, "32": 3.9, "64": 4.1}) == 32
    assert checks.best_block({"16": 9.0, "8": 5.0}) == 8


def test_of_many_alike_a_few_are_named() -> None:
    """Three of forty stalled sessions, and how many more there are; what is wrong for another reason is named, too."""
    picture = healthy()
    (session,) = picture.sessions
    picture.sessions = [{**session, "session": n, "stalled": True, "submitted": 10} for n in range(1, 41)]
    picture.sessions.append({**session, "session": 99, "owes": 1})
    found = checks.look(picture, ["sessions"])
    assert [each.subject.partition(" (")[0] for each in found] == [
        "session 1", "session 2", "session 3", "", "session 99",
    ]  # fmt: skip
    assert found[3].finding == "37 more for the same reason"


def test_a_socket_that_the_manager_made_is_no_difference() -> None:
    """A unit's socket may lie elsewhere than the daemon's own would: only without a manager that is one."""
    picture = healthy()
    picture.settings["socket"] = {"name": "socket", "value": "/run/kvslot/kvslot.sock", "changeable": False}
    told(picture, socket="/run/kvslot/default/kvslot.sock")
    assert checks.configuration(picture)[0].verdict == "warning"
    picture.process["socket_passed"] = True
    assert checks.configuration(picture)[0].verdict == "ok"
    place(picture, 0, mode=0o600)
    assert checks.permissions(picture)[0].verdict == "ok"


def test_few_sequences_say_nothing_of_lengths() -> None:
    """A drift among a handful is chance, and is not told."""
    picture = healthy()
    few = {**short, "count": 20}
    row(picture, "lengths", drift=0.9, first=few, last=few, ended=40)
    (found,) = checks.lengths(picture)
    assert (found.verdict, found.finding) == ("ok", "40 sequences have ended so far")


def test_a_daemon_that_tells_less_takes_no_other_check_with_it() -> None:
    """Rows of an older daemon lack keys: those checks are unknown, and say so; none raises."""
    whole = healthy()
    for of in ("process", "totals", "settings"):
        picture = copy.deepcopy(whole)
        setattr(picture, of, {})
        found = checks.look(picture, checks.CHECKS)
        assert {each.check for each in found} == set(checks.CHECKS)
    bare = Picture("1.0", 1, "s", whole.status, [{"pool": "chat"}])
    found = checks.look(bare, checks.CHECKS)
    assert {each.check for each in found} == set(checks.CHECKS)
    assert not [each for each in found if each.verdict in checks.BAD]


def test_checks_ask_nobody() -> None:
    """They are functions of the picture: what reads files and asks the daemon stands elsewhere."""
    tree = ast.parse(Path(checks.__file__).read_text(encoding="utf-8"))
    called = {
        f"{node.func.value.id}.{node.func.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("host", "os")
    }
    assert called <= {"host.user", "host.group", "os.geteuid"}
