"""The rules by themselves: who is let in, whose tenant is whose, how often, and what is noted of refusals."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from kvslot.allocator import Space
from kvslot.api.wire import Denied
from kvslot.daemon import logs
from kvslot.daemon.config import ConfigError, Settings, TenantSettings, dump, load, pool_sum, read
from kvslot.daemon.identity import OTHERS, Identity, Tenant
from kvslot.daemon.membership import Peer

CORE = SimpleNamespace(roots={1: Space("a"), 2: Space("b"), 3: Space("a", salt="x")})
POOL = '[[pool]]\nblocks = 9\nopaque_block_bytes = "64KiB"\n'
ROOT = Peer(1, 0, 0)


def peer(uid: int, gid: int = 9, *groups: int) -> Peer:
    return Peer(100, uid, gid, groups)


def identity(*tenants: TenantSettings, **settings: object) -> Identity:
    return Identity(Settings(tenants=tenants, **settings))  # type: ignore[arg-type]


def may(rules: Identity, who: Peer, name: str) -> bool:
    try:
        rules.check(who, name)
    except Denied:
        return False
    return True


def lets_in(rules: Identity, who: Peer) -> bool:
    try:
        rules.check_connect(who)
    except Denied:
        return False
    return True


def test_without_settings_the_sockets_mode_decides() -> None:
    """Whoever reaches the socket may connect and open any namespace."""
    rules = identity()
    for who in (ROOT, peer(1000), peer(65534, 65534)):
        assert lets_in(rules, who)
        assert may(rules, who, "")
        assert may(rules, who, "any")
        assert may(rules, who, OTHERS)
    assert not rules.limited
    assert not rules.rated


def test_users_and_groups_are_let_in() -> None:
    """With client_uids or client_gids: those, by primary or supplementary group; control users, and tenants' users."""
    rules = identity(
        TenantSettings(name="t", users=(7,), groups=(77,)),
        client_uids=(1000,), client_gids=(50,), control_uids=(8,), control_gids=(88,),
    )  # fmt: skip
    for who in (peer(1000), peer(2, 50), peer(2, 9, 3, 50), peer(7), peer(2, 77), peer(8), peer(2, 9, 88)):
        assert lets_in(rules, who), who
    assert lets_in(rules, ROOT)
    assert lets_in(rules, peer(os.geteuid()))
    for who in (peer(2), peer(1001, 49, 51), peer(50, 1000)):
        assert not lets_in(rules, who), who


def test_tenants_are_their_users() -> None:
    """A listed tenant is for its users and groups, root not excepted; one that is not listed is for nobody."""
    rules = identity(
        TenantSettings(name="a", users=(1000,)),
        TenantSettings(name="b", groups=(50,)),
        TenantSettings(name="open"),
    )
    assert may(rules, peer(1000), "a")
    assert not may(rules, peer(1001), "a")
    assert not may(rules, ROOT, "a")
    assert may(rules, peer(3, 50), "b")
    assert may(rules, peer(3, 9, 50), "b")
    assert not may(rules, peer(50, 9), "b")
    assert may(rules, peer(3), "open")
    assert may(rules, ROOT, "open")
    assert not any(
        may(rules, who, name) for who in (ROOT, peer(1000)) for name in ("", "A", "a ", "c", OTHERS)
    )


def test_all_others_are_one_tenant() -> None:
    """ "*" has the rules of every name that is not listed, and one account; a client that says "*" is among them."""
    rules = identity(
        TenantSettings(name="a", users=(1000,)), TenantSettings(name=OTHERS, users=(2000,), sessions=1)
    )
    assert may(rules, peer(2000), "x")
    assert may(rules, peer(2000), "")
    assert may(rules, peer(2000), OTHERS)
    assert not may(rules, peer(2000), "a")
    assert not may(rules, peer(1000), "x")
    assert rules.tenant("x") is rules.tenant("y") is rules.tenant(OTHERS) is not rules.tenant("a")


def test_a_refusal_says_what_only_looks_alike() -> None:
    """A name that differs from a listed one only in how its characters are made is refused, and told apart."""
    rules = identity(TenantSettings(name="caf\u00e9"), TenantSettings(name="Kelvin"))
    for name, points in (
        ("cafe\u0301", "U+0301"),
        ("\u212aelvin", "U+212A"),
        ("kelvin", "U+006B"),
        ("caf\u00e9 ", "U+0020"),
    ):
        with pytest.raises(Denied, match="look the same") as denied:
            rules.check(peer(1), name)
        assert points in str(denied.value)
    with pytest.raises(Denied, match="operator adds it"):
        rules.check(peer(1), "tea")
    with pytest.raises(Denied) as hostile:
        rules.check(peer(1), "\x1b[2J\u202egpj\n")
    assert str(hostile.value).isprintable(), "a client's name reaches a terminal as it came"


def test_a_rate_is_a_seconds_worth() -> None:
    """So many requests at once, then as many as time brings; the wait that is told suffices, and is not too long."""
    tenant = Tenant(TenantSettings(name="a", requests_per_second=4.0))
    assert [tenant.take(10.0) for _ in range(4)] == [0.0] * 4
    assert tenant.take(10.0) == pytest.approx(0.25)
    assert tenant.take(10.1) == pytest.approx(0.15)
    assert tenant.take(10.2501) == 0.0
    assert tenant.take(10.2501) > 0
    assert [tenant.take(1000.0) for _ in range(4)] == [0.0] * 4, "time unused is not saved up beyond a second"
    assert tenant.take(1000.0) > 0
    slow = Tenant(TenantSettings(name="b", requests_per_second=0.1))
    assert slow.take(1.0) == 0.0
    assert slow.take(1.0) == pytest.approx(10.0)
    assert not any(Tenant(TenantSettings(name="c")).take(1.0) for _ in range(1000))


def test_a_reload_goes_on_counting() -> None:
    """Other settings hold at once; what a tenant of the same name uses is not forgotten."""
    rules = identity(TenantSettings(name="a", sessions=1))
    tenant = rules.check(ROOT, "a")
    tenant.sessions = 1
    rules.change(Settings(tenants=(TenantSettings(name="a", users=(5,), sessions=2),)))
    assert rules.tenant("a") is tenant
    assert tenant.rules.sessions == 2
    assert not may(rules, ROOT, "a")
    assert may(rules, peer(5), "a")
    rules.change(Settings())
    assert may(rules, ROOT, "anything")


def test_refusals_are_noted_by_user_and_never_flood(tmp_path: Path) -> None:
    """Each user's first refusal of a kind is logged, with who it was; a thousand more of it are a number."""
    seen: list[dict[str, object]] = []
    stream = (tmp_path / "log").open("w")
    logs.set_up("json", "info", stream)
    logs.taps.append(lambda fields: seen.append(dict(fields)) if fields.get("event") == "denied" else None)
    rules = identity()
    try:
        for _ in range(1000):
            rules.deny(peer(1000), "connect", "no")
        rules.deny(peer(1001), "connect", "no")
        rules.deny(peer(1000), "Evict", "no")
        assert [(each["uid"], each["what"]) for each in seen] == [
            (1000, "connect"),
            (1001, "connect"),
            (1000, "Evict"),
        ]
        assert all({"uid", "gid", "pid", "what", "reason"} <= set(each) for each in seen)
        for uid in range(2000, 12000):
            rules.deny(peer(uid), "connect", "no")
        assert len(seen) < 100, "as many lines as there are users"
        assert rules.denied == 11002
    finally:
        logs.taps.pop()
        logs.tell_suppressed(structlog.get_logger())
        stream.close()
        structlog.reset_defaults()


# -- settings ---------------------------------------------------------------------------------------------------------


def session(*roots: int) -> Any:
    return SimpleNamespace(roots=dict.fromkeys(roots), tenants=[], hosted=SimpleNamespace(core=CORE))


def test_sessions_are_counted_anew_one_at_a_time() -> None:
    """After a reload each is one of the tenants' that its namespaces are of by now; those that come and go meanwhile
    count once, and are gone."""
    rules = identity(TenantSettings(name="*"))
    (everyone,) = rules.tenants
    members = {number: session(*roots) for number, roots in enumerate([(1, 2, 3), (1,), (2,), (2, 3)])}
    for each in members.values():
        rules.join(each, everyone)
    rules.change(Settings(tenants=(TenantSettings(name="a"), TenantSettings(name="*"))))
    steps = rules.recount(members)
    next(steps)
    rules.leave(members.pop(1))
    members[9] = session(3)
    rules.join(members[9], rules.check(ROOT, "a"))
    assert list(steps) == [None] * 2
    assert {each.rules.name: each.sessions for each in rules.tenants} == {"a": 3, "*": 3}
    assert list(rules.recount(members)) == [None] * 4
    assert {each.rules.name: each.sessions for each in rules.tenants} == {"a": 3, "*": 3}
    for each in members.values():
        rules.leave(each)
    assert not any(each.sessions for each in rules.tenants)


def write(folder: Path, text: str) -> Path:
    file = folder / "kvslot.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_tenants_are_read_and_written_again(tmp_path: Path) -> None:
    """Each table with its defaults, in order; what is dumped reads as the same."""
    text = (
        'client_uids = [0]\n[[tenant]]\nname = "caf\u00e9"\nusers = [0, 12]\nslots = 5\n[[tenant]]\nname = "*"\n'
        'sessions = 2\nreserved_runs = 3\nrequests_per_second = 1.5\n[[tenant]]\nname = ""\n' + POOL
    )
    effective = read(write(tmp_path, text), {})
    settings = effective.settings
    assert settings.client_uids == (0,)
    assert settings.tenants == (
        TenantSettings(name="caf\u00e9", users=(0, 12), slots=5),
        TenantSettings(name="*", sessions=2, reserved_runs=3, requests_per_second=1.5),
        TenantSettings(name=""),
    )
    again = write(tmp_path, dump(effective, [pool_sum(each) for each in settings.pools]))
    assert load(again, {}) == settings
    assert load(write(tmp_path, POOL), {}).tenants == ()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("users = [0]", r"tenant\[0\]: name is missing; write name = "),
        ('name = "a"\nslot = 4', r"tenant\[0\] slot is not a setting: did you mean slots"),
        ('name = "a"\nslots = -1', r"tenant\[0\] slots = -1: out of range; allowed: whole numbers from 0"),
        (
            'name = "a"\nusers = ["nobody-of-that-name"]',
            r"there is no user 'nobody-of-that-name' on this machine",
        ),
        ('name = "a"\n[[tenant]]\nname = "a"', r"tenant\[1\]: name = 'a' is there already"),
        (
            'name = "caf\u00e9"\n[[tenant]]\nname = "cafe\u0301"',
            r"tenant\[1\]: name = 'cafe\u0301' looks like 'caf\u00e9'",
        ),
        ('name = "a\\u202eb"', r"has characters that cannot be shown"),
        ('name = "a"\nrequests_per_second = "many"', r"no number"),
    ],
)
def test_tenants_that_cannot_be_are_told(tmp_path: Path, table: str, said: str) -> None:
    """Each wrong table is named with what is wrong and what is allowed; the daemon does not start with it."""
    with pytest.raises(ConfigError, match=said):
        load(write(tmp_path, f"[[tenant]]\n{table}\n{POOL}"), {})


def test_tenants_are_no_plain_setting(tmp_path: Path) -> None:
    """`tenants = ...` and a table that is none say how it is written."""
    with pytest.raises(ConfigError, match=r"write \[\[tenant\]\] for each tenant"):
        load(write(tmp_path, f"tenants = 4\n{POOL}"), {})
    with pytest.raises(ConfigError, match=r"tenant is no table: write \[\[tenant\]\]"):
        load(write(tmp_path, f"tenant = 4\n{POOL}"), {})
