"""Storms of names and of the same warning: S46 and S65 of the scenarios."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import msgspec

from kvslot.api.admin import metrics
from kvslot.api.admin.metrics import FRESH_SECONDS
from kvslot.api.wire import encode, messages
from kvslot.daemon.latency import SAMPLE

from ..tools.daemon import Running, running
from ..tools.painting import Painter, scatter
from ..tools.wire import Wire, tokens
from . import samples
from .scraping import Scrape, fallen, scrape

NAMES = [
    'with "quotes"',
    "new\nline",
    "back\\slash",
    "\N{FIRE}",
    "x" * 250,
    '{a="b"} 1',
    "\x00\x1b[31m",
    "# HELP",
]
"""Of clients and tenants, which choose what they like."""
SESSIONS = 200
STORM = 3000
LINES_MOST = 20


def lines(daemon: Running, *names: str) -> list[dict[str, Any]]:
    """The log's events of these names."""
    return [each for each in map(json.loads, daemon.text().splitlines()) if each["event"] in names]


def told(daemon: Running, event: str) -> int:
    """How many of an event there were by the log's word: lines, and those left out."""
    own = [1 + int(each.get("suppressed", 0)) for each in lines(daemon, event)]
    return sum(own) + sum(int(each.get(event, 0)) for each in lines(daemon, "suppressed"))


def come_and_go(daemon: Running, rounds: int) -> None:
    """So many sessions, with names and tenants of which most are new."""
    for number in range(rounds):
        name = NAMES[number % len(NAMES)]
        with Wire(daemon.socket) as wire:
            wire.hello(name, namespace=messages.Namespace(tenant=f"{number}{name}"[:200]))


def names(sessions: int) -> float:
    """So many sessions come and go under all sorts of names; the longest a scrape took, in seconds.

    Every scrape parses, no counter falls, and in the end there are as many series as before, and as much memory.
    """
    took = 0.0
    with running() as daemon:
        known = max(len(NAMES), 4 * SAMPLE)  # each verb of theirs has been timed by then
        come_and_go(daemon, known)
        first = last = scrape(daemon.socket)
        resident = daemon.rss_kib()
        for _ in range(4):
            come_and_go(daemon, sessions // 4)
            time.sleep(FRESH_SECONDS)
            began = time.monotonic()
            found = scrape(daemon.socket)
            took = max(took, time.monotonic() - began)
            assert not fallen(last, found)
            last = found
        assert set(last.values) == set(first.values), "a name became a series"
        assert last["kvslot_sessions_opened_total"] == known + sessions
        assert daemon.rss_kib() < resident * 1.05 + 1024
        # What is too long, or no text at all, is no request: that client goes, and the scrape stays as it is.
        frame = bytearray(encode(messages.Hello(1, 1, "SURROGATE")))
        at = frame.index(b"SURROGATE")
        frame[at : at + 3] = b"\xed\xa0\x80"
        for wrong in (bytes(frame), encode(messages.Hello(1, 1, "x" * 10_240))):
            with Wire(daemon.socket) as wire:
                wire.sock.sendall(wrong)
                assert wire.closed()
        time.sleep(FRESH_SECONDS)
        found = scrape(daemon.socket)
        assert set(found.values) == set(first.values)
        assert found["kvslot_peer_faults_total"] == 2
    return took


def test_S46_names_never_break_a_scrape_and_leave_no_series() -> None:
    """S46: whatever sessions and tenants call themselves, each scrape parses, and has as many series as before."""
    names(SESSIONS)


class Named:
    """Figures of a daemon whose pools have these names."""

    def __init__(self, *names: str) -> None:
        self._names = names

    async def daemon(self) -> metrics.Daemon:
        return samples.daemon()

    async def steps(self) -> list[metrics.Step]:
        return [samples.step()]

    async def pool_names(self) -> tuple[str, ...]:
        return self._names

    async def pool(self, name: str) -> metrics.Pool:
        return msgspec.structs.replace(samples.pool(), pool=name)


def test_S46_a_pool_may_be_called_anything() -> None:
    """S46: a pool's name, which is a label, comes out of a scrape as it is; what is no UTF-8 as its escapes."""
    names = [*NAMES, "lone \udc80 surrogate"]
    text = asyncio.run(metrics.Exposition(Named(*names)).render()).decode("utf-8")
    found = Scrape(text).of("kvslot_pool_usable_slots", "pool")
    assert set(found) == {*NAMES, "lone \\udc80 surrogate"}


def storm(answers: int) -> None:
    """So many LATER, and as many errors: at most 20 lines each, and by the log's word as many as the counters say."""
    secret = 987_600_000
    with running(pools=[{"blocks": 9, "watermark": 0.0}]) as daemon, Wire(daemon.socket) as wire:
        wire.hello(namespace=messages.Namespace(tenant="t", salt="pepper"))
        whole = wire.call(messages.Allocate, namespace=wire.namespace, sequence=1, tokens=tokens(120, secret))
        assert isinstance(whole, messages.Admitted)
        answer = wire.call(
            messages.Allocate, namespace=wire.namespace, sequence=2, tokens=tokens(100, secret + 500)
        )
        assert isinstance(answer, messages.Later)
        for start in range(0, answers, 100):
            wire.sock.sendall(
                b"".join(
                    encode(
                        messages.Allocate(
                            start + n + 10, wire.namespace, 2, tokens(100, secret + 500), answer.ticket
                        )
                    )
                    for n in range(100)
                )
            )
            for _ in range(100):
                assert isinstance(wire.reply(), messages.Later)
            wire.sock.sendall(b"".join(encode(messages.Commit(start + n + 10, 77, 1)) for n in range(100)))
            for _ in range(100):
                assert isinstance(wire.reply(), messages.Error)
        time.sleep(FRESH_SECONDS)
        found = scrape(daemon.socket)
        wire.call(messages.Withdraw, answer.ticket)
        wire.call(messages.Free, sequence=1)
        daemon.stop()
        later = sum(found.of("kvslot_pool_later_total", "reason").values())
        refused = sum(found.of("kvslot_requests_refused_total", "code").values())
        assert (later, refused) == (answers + 1, answers)
        assert told(daemon, "later") == later
        assert told(daemon, "refused") == refused
        for event in ("later", "refused"):
            assert 1 <= len(lines(daemon, event)) <= LINES_MOST
        text = daemon.text()
        assert "98760" not in text, "token ids are in no line"
        assert "pepper" not in text, "nor are salts"


def test_S65_a_storm_of_waits_and_refusals_is_a_few_lines_and_all_of_it_is_counted() -> None:
    """S65: thousands of LATER and of errors are at most 20 lines each; lines and suppressed sum to the counters."""
    storm(STORM)


def test_S65_compaction_that_can_move_nothing_says_little() -> None:
    """S65: a pool whose scattered prefixes are all held is let be after a look; it does not fill the log."""
    with (
        running(pools=[{"quantum": 1, "headroom": 0.0}], compaction="off", compaction_duty=1.0) as daemon,
        Painter(daemon.socket) as painter,
    ):
        for number, prompt in enumerate(scatter(painter), 1):
            painter.call(
                messages.Allocate,
                namespace=painter.namespace,
                sequence=90_000 + number,
                tokens=prompt + tokens(1, 7),
            )
        painter.call(messages.SetConfig, name="compaction", value="forced")
        deadline = time.monotonic() + 20
        while painter.defrag().state != "settled" or not painter.defrag().passes:
            assert time.monotonic() < deadline, painter.defrag()
            time.sleep(0.05)
        assert (
            len(lines(daemon, "compaction_planned", "compaction_moved", "compaction_overtaken")) <= LINES_MOST
        )
        assert painter.defrag().published == 0
