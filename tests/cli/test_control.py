"""The commands that ask a daemon, as a person and a script meet them: tables, JSON, colours, exit codes, messages."""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvslot.allocator import Admitted, Later, Pool, PoolConfig, Space
from kvslot.api.wire import messages
from kvslot.cli import ctl, tree
from kvslot.cli import map as pool_map

from ..core.tools import admit, cache, fresh, toks
from .control import FakeDaemon, served
from .views import compaction_of, made, view_of

COMMANDS = ("status", "clients", "map", "tree", "frag", "audit")
OTHERS = {
    "evict": ["5"], "tickets": [], "latency": [], "settings": [], "set": ["log_level", "debug"], "drain": [],
    "defrag": ["status"], "top": ["--count", "1"], "pin": [], "unpin": ["1"], "reload": [],
    "tenants": [],
}  # fmt: skip
"""Commands that show no pool, each with what it needs."""
EVERY = (*COMMANDS, *OTHERS)

Shown = Callable[..., str]


def filled() -> Pool:
    """A pool with a shared prompt that two conversations go on from, one of them running, and one tenant's salt."""
    pool = made(blocks=129)
    session = pool.open_session()
    shared = fresh(100, 0)
    cache(pool, session, shared)
    cache(pool, session, shared + fresh(60, 1000))
    running = admit(pool, session, shared + fresh(50, 2000))
    pool.commit(session, running.sequence, 150)
    salted = pool.open_space(Space("b\x1b[2J", salt="grain"))
    alone = pool.allocate(session, salted, fresh(40, 3000))
    assert isinstance(alone, Admitted)
    pool.commit(session, alone.sequence, 40)
    return pool


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    """One pool, filled, behind tmp_path/k.sock."""
    with served(tmp_path / "k.sock", view_of(default=filled())) as each:
        yield each


@pytest.fixture
def show(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Runs a command against tmp_path/k.sock, expects an exit code, and gives back what it printed."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*argv: str, code: int = 0, width: int = 0) -> str:
        if width:
            monkeypatch.setenv("COLUMNS", str(width))
        found = ctl.main([argv[0], "--socket", str(tmp_path / "k.sock"), *argv[1:]])
        told = capsys.readouterr()
        assert found == code, told.err
        if code:
            assert told.err.count("\n") <= 1
            assert not told.err or told.err.startswith(f"kvslotctl {argv[0]}: ")
        else:
            assert not told.err
        return told.out or told.err

    return run


def rows(text: str) -> list[dict[str, Any]]:
    found = json.loads(text)["rows"]
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_nothing_but_json_and_says_who_made_it(
    command: str, daemon: FakeDaemon, show: Shown, tmp_path: Path
) -> None:
    """--json alone prints one document with `meta`; with a file the table is printed, too."""
    document = json.loads(show(command, "--json"))
    assert list(document["meta"]) == ["command", "version", "socket", "time"]
    assert document["meta"]["command"] == command
    file = tmp_path / "out.json"
    table = show(command, f"--json={file}")
    assert json.loads(file.read_text())["meta"]["socket"] == str(tmp_path / "k.sock")
    assert "default" in table


KEYS = {
    "status": (
        "pool granularity block_size quantum watermark eviction append size_bytes slot_bytes planes kind fingerprint "
        "generation namespaces usable free private cached fenced moving reserved quarantined padding blocks "
        "blocks_free tokens_held unwritten duplicate_tokens peeled_tokens evictable leased pinned pinned_waste_tokens "
        "largest_free_run nodes sequences sessions tickets moves evicted_tokens copied_tokens moved_tokens "
        "extents_given extent_tokens hit_tokens lost_hit_tokens prompt_tokens bad_handles late_completions "
        "internal_fragmentation_pct"
    ),
    "clients": (
        "session name pid uid pool state stalled age_s page sequences charged quota fenced pins submitted completed "
        "behind_s lost_s owes group movable follows retired_tokens outbox_bytes frames posted_errors"
    ),
    "map": "block blocks slots",
    "tree": (
        "node parent namespace start stop nodes extents priority held subtree_tokens subtree_prefixes readers age"
    ),
    "frag": (
        "pool block_size blocks blocks_free free internal_waste_pct reserved_pct unwritten duplicate_tokens "
        "peeled_tokens pinned_waste_tokens pinned_waste_pct free_runs hole_tokens largest_free_run scatter_pct "
        "extents_per_1k_tokens usable_run_pct lost_hit_tokens"
    ),
    "audit": "pool sound faults milliseconds",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_keys_of_the_rows_are_these(command: str, daemon: FakeDaemon, show: Shown) -> None:
    """Scripts go by keys: adding one means adding it here, none may go or change its meaning."""
    document = json.loads(show(command, "--json"))
    row = document["pools" if command == "status" else "rows"][0]
    assert set(row) == set(KEYS[command].split())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_piped_output_has_no_colour_and_no_width_breaks_it(
    command: str, width: int, daemon: FakeDaemon, show: Shown
) -> None:
    """Whatever COLUMNS says, something is shown, and no escape sequence is in it."""
    out = show(command, width=width)
    assert "default" in out
    assert "\x1b" not in out


def test_a_terminal_gets_colours(daemon: FakeDaemon, tmp_path: Path) -> None:
    """On a terminal the map is coloured heights with a legend; NO_COLOR makes it letters."""
    out = on_a_terminal(["map", "--socket", str(tmp_path / "k.sock")])
    assert "\x1b[" in out
    assert "█" in out
    plain = on_a_terminal(["map", "--socket", str(tmp_path / "k.sock")], NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", plain)
    assert "CCC" in plain


def on_a_terminal(argv: list[str], columns: int = 60, **environ: str) -> str:
    """What the command writes to a terminal of so many columns."""
    import pty

    controller, terminal = pty.openpty()
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")},
        "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "30", "PYTHONUTF8": "1", **environ,
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-Im", "kvslot.cli.ctl", *argv], stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    out = b""
    while True:
        try:
            data = os.read(controller, 1 << 16)
        except OSError:  # Linux's way to say that the other end has closed
            break
        if not data:
            break
        out += data
    os.close(controller)
    assert process.wait(30) == 0
    lines = re.sub(rb"\x1b\[[0-9;]*m", b"", out).decode().splitlines()
    assert max(map_length(line) for line in lines) <= columns
    return out.decode()


def map_length(line: str) -> int:
    return len(line.rstrip())


# -- what each shows --------------------------------------------------------------------------------------------------


def test_status_says_how_full_each_pool_is(tmp_path: Path, show: Shown) -> None:
    """One line a pool, and one of the daemon; a draining daemon says so."""
    view = view_of(default=filled(), other=made())
    view.drain_left = 12.5
    with served(tmp_path / "k.sock", view):
        out = show("status")
        assert "draining, ends in 12 s at most" in " ".join(out.split())
        assert re.search(r"up for \d+ (min|h) ", " ".join(out.split()))
        assert re.search(r"default .* 16 ", out)
        assert re.search(r"other .* 0 % ", out)
        assert "other" not in show("status", "--pool", "default")
        document = json.loads(show("status", "--json"))
        assert [pool["pool"] for pool in document["pools"]] == ["default", "other"]
        assert document["status"]["state"] == "draining"
        assert document["status"]["drain_left_s"] == 12.5
        view.drain_left = None
        assert re.search(r"running for \d+ (min|h) ", show("status"))


def test_clients_are_listed_with_what_is_wrong_with_them(tmp_path: Path, show: Shown) -> None:
    """The largest holder first; stalled, lost and owing sessions are named so; nobody is said plainly."""
    pool = made()
    _, busy = pool.open_session(), pool.open_session()
    admit(pool, busy, fresh(40, 0))
    pool.stall(busy)
    view = view_of(default=pool)
    view.members[0].name = "quiet\x1b[31m"
    view.members[0].state = "lost"
    view.members[0].posted_errors = 2
    with served(tmp_path / "k.sock", view) as daemon:
        daemon.limit = 1
        out = show("clients", width=200)
        assert [int(each) for each in re.findall(r"^ *(\d+) ", out, re.MULTILINE)] == [2, 1]
        assert "stalled" in out
        assert "lost" in out
        assert "2 posted refused" in out
        assert "follows" not in out
        assert "\x1b" not in out
        view.members.clear()
        assert show("clients") == "nobody is connected\n"


def test_clients_that_follow_moves_are_named(tmp_path: Path, show: Shown) -> None:
    """Who said movable is `movable`, and `follows` once it steps; what it has yet to let go of is counted."""
    pool = made()
    session = pool.open_session(movable=True)
    with served(tmp_path / "k.sock", view_of(default=pool)):
        pool.poll(100.0)
        assert re.search(r"movable$", show("clients"), re.MULTILINE)
        pool.progress(session, 1, 0, epoch=0, now=100.0)
        session.retired_tokens = 7
        assert re.search(r"follows, 7 old places$", show("clients"), re.MULTILINE)
        (row,) = json.loads(show("clients", "--json"))["rows"]
        assert (row["movable"], row["follows"]) == (True, True)


def test_the_map_has_every_block_once(daemon: FakeDaemon, show: Shown) -> None:
    """In letters: as many cells as blocks, padding first, what is cached as c, free as dots, and a legend of sums."""
    out = show("map", width=80)
    lines = [line.split(maxsplit=1)[1] for line in out.splitlines()[1:] if re.match(r" *\d+  \S", line)]
    cells = "".join(lines)
    pool = daemon.view.pools["default"].core
    assert len(cells) == pool.config.blocks
    assert cells.startswith("#")
    assert cells.count(".") == pool.runs.blocks_free
    assert "C" in cells
    found = json.loads(show("map", "--json"))
    assert sum(row["blocks"] for row in found["rows"]) == pool.config.blocks
    assert sum(row["blocks"] * sum(row["slots"].values()) for row in found["rows"]) == pool.slots
    counts = pool.statistics()
    assert found["totals"]["free"] == counts.free
    assert found["totals"]["cached"] + found["totals"]["leased"] == counts.cached
    assert found["totals"]["room"] == counts.unwritten


def test_a_large_pool_shares_cells_and_a_part_can_be_looked_at(tmp_path: Path, show: Shown) -> None:
    """Blocks to a cell are a power of two, so that --lines suffice; --blocks shows some of them in detail."""
    pool = Pool(PoolConfig(blocks=50_001, block_size=16, watermark=0.0))
    session = pool.open_session()
    for each in range(8):
        admit(pool, session, toks([each] * 4000))
    with served(tmp_path / "k.sock", view_of(default=pool)):
        out = show("map", "--lines", "5", width=80)
        assert "a cell is 128 blocks" in out
        assert len(re.findall(r"^ *[\d,]+  [.a-zA-Z#]+ *$", out, re.MULTILINE)) <= 5
        part = show("map", "--blocks", "100:164", width=80)
        assert "a cell is a block" in part
        assert re.search(r"^100  [.a-zA-Z#]{64}$", part, re.MULTILINE)
        assert "60000" in show("map", "--blocks", "60000:", code=2)


@pytest.mark.parametrize("blocks", [1, 2, 63, 64, 65, 1000, 131_072, 1_000_003])
@pytest.mark.parametrize("width", [1, 8, 17, 60, 79, 119, 500])
def test_any_pool_fits_any_terminal(blocks: int, width: int) -> None:
    """The picture never has more lines than allowed, nor cells that are more than half in vain."""
    each, across = pool_map.layout(blocks, width, 24)
    cells = -(-blocks // each)
    assert cells <= across * 24
    assert each == 1 or cells > across * 12 - 1
    assert across <= max(width, pool_map.LEAST_CELLS)


def test_every_state_of_the_daemons_map_can_be_drawn() -> None:
    """The command knows the states that inspection names, each with a letter of its own."""
    from kvslot.daemon import inspection

    assert tuple(kind.state for kind in pool_map.KINDS) == inspection.MAP_STATES
    assert len({kind.letter for kind in pool_map.KINDS}) == len(pool_map.KINDS)
    assert len({kind.colour for kind in pool_map.KINDS}) == len(pool_map.KINDS)


def test_the_tree_shows_what_goes_on_from_what(daemon: FakeDaemon, show: Shown) -> None:
    """The shared prompt first, with the sums of what begins with it, its two continuations indented behind it."""
    out = show("tree")
    lines = [line for line in out.splitlines() if ".." in line]
    assert [line.split()[0] for line in lines] == ["0..100*", "100..160", "100..150*", "0..40*"]
    assert len(lines[1]) - len(lines[1].lstrip()) > len(lines[0]) - len(lines[0].lstrip())
    assert "tenant b?[2J, salted" in out
    assert "grain" not in out
    found = rows(show("tree", "--json"))
    assert [row["subtree_tokens"] for row in found] == [210, 60, 50, 40]
    assert [row["subtree_prefixes"] for row in found] == [2, 1, 1, 1]
    assert [row["readers"] for row in found] == [1, 0, 1, 1]
    assert [row["parent"] for row in found] == [0, found[0]["node"], found[0]["node"], 0]


@pytest.mark.parametrize("by", tree.BY)
def test_the_best_prefixes_hang_together(by: str, daemon: FakeDaemon, show: Shown) -> None:
    """With any order and any --top, a prefix is shown only behind the one it continues."""
    whole = rows(show("tree", "--by", by, "--json"))
    for most in range(1, len(whole) + 1):
        found = rows(show("tree", "--by", by, "--top", str(most), "--json"))
        assert len(found) == most
        seen = {0}
        for row in found:
            assert row["parent"] in seen
            seen.add(row["node"])
    assert "1 more" in show("tree", "--by", by, "--top", "3")


def test_a_conversation_is_one_line(tmp_path: Path, show: Shown) -> None:
    """Turns that nobody else goes on from make one prefix, of as many nodes."""
    pool = made()
    session = pool.open_session()
    for turns in range(1, 6):
        cache(pool, session, fresh(20 * turns, 0))
    with served(tmp_path / "k.sock", view_of(default=pool)):
        (row,) = rows(show("tree", "--json"))
        assert (row["start"], row["stop"], row["nodes"], row["subtree_tokens"]) == (0, 100, 5, 100)
        assert "0..100 (5 nodes)" in show("tree")


def test_a_tree_that_changed_while_it_was_read_is_shown_without_what_hangs_in_the_air() -> None:
    """Nodes whose parents are missing, or end elsewhere, are left out with all behind them; nothing loops."""
    columns = {
        "node": [20, 21, 22, 23, 24, 25], "parent": [16, 20, 99, 22, 20, 24], "depth": [0, 5, 7, 9, 8, 1],
        "tokens": [5, 5, 2, 3, 4, 4], "extents": [1] * 6, "holds": [0] * 6, "age": [1] * 6, "priority": [0] * 6,
    }  # fmt: skip
    found = tree.chains(columns, {16})
    assert {(each.start, each.stop) for each in found.values()} == {(0, 10)}
    loop = {**columns, "parent": [21, 20, 23, 22, 25, 24]}
    assert tree.chains(loop, {16}) == {}


def test_frag_defines_what_it_shows(
    daemon: FakeDaemon, show: Shown, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every figure of the table is a key of the JSON, and its definition stands in the help."""
    out = show("frag")
    row = rows(show("frag", "--json"))[0]
    assert re.search(r"^ *128 ", out, re.MULTILINE)
    assert not re.search(r"^ *256 ", out, re.MULTILINE), "the pool has 129 blocks"
    with pytest.raises(SystemExit):
        ctl.main(["frag", "--help"])
    told = capsys.readouterr().out
    for name in re.findall(r"^([a-z_0-9]+_(?:pct|tokens))\b", out, re.MULTILINE):
        assert name in row
        assert name in told
    assert "usable_run_pct" in told


def test_an_audit_that_finds_something_fails(daemon: FakeDaemon, show: Shown) -> None:
    """Sound is exit code 0; a fault is named and is exit code 1, in JSON as well."""
    assert re.fullmatch(r"default: sound \(1\.5 ms\)\n", show("audit"))
    daemon.faults = ["slots 3..4 have no owner"]
    out = show("audit", code=1)
    assert "1 fault " in out
    assert "slots 3..4 have no owner" in out
    assert rows(show("audit", "--json", code=1))[0]["faults"] == daemon.faults


def test_evicting_frees_what_nobody_reads(
    daemon: FakeDaemon, show: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A count, a share or all; a little at a time; what is in use stays, and that is said."""
    from kvslot.cli import evict

    monkeypatch.setattr(evict, "EACH", 16)
    core = daemon.view.pools["default"].core
    before = core.tree.evictable
    assert "evicted 20 tokens;" in show("evict", "20")
    assert core.tree.evictable == before - 20
    row = rows(show("evict", "100%", "--json"))[0]
    assert list(row) == ["pool", "asked", "evicted", "evictable_left", "free"]
    assert row["evicted"] == before - 20
    assert row["evictable_left"] == 0
    assert re.search(
        r"evicted 0 tokens of 1,000: the \d+ cached tokens left are held by running sequences or pins;",
        show("evict", "1k"),
    )
    assert "evicted 0 tokens: the " in show("evict", "all")
    assert core.tree.tokens > 0


def test_evicting_from_what_is_empty_says_so(tmp_path: Path, show: Shown) -> None:
    """Nothing is in use where nothing is cached; and what a pin keeps is told from what is read."""
    pool = made()
    with served(tmp_path / "k.sock", view_of(default=pool)):
        assert "evicted 0 tokens of 50: no more is cached; " in show("evict", "50")
        assert "evicted 0 tokens: no more is cached; " in show("evict", "all")
        session = pool.open_session()
        cache(pool, session, fresh(30, 0))
        cache(pool, session, fresh(20, 500))
        pool.pin(session, next(iter(pool.roots)), fresh(30, 0))
        out = show("evict", "50")
        assert "evicted 20 tokens of 50: the 30 cached tokens left are held by running " in out
        assert "sequences or pins, 30 of them by pins;" in out


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("5", 5), ("20k", 20_000), ("1.5M", 1_500_000), ("25%", 250), ("all", 1000), ("1_000", 1000)],
)
def test_amounts_are_counts_shares_or_all(text: str, tokens: int) -> None:
    """What --help names as an amount is one."""
    from kvslot.cli import evict

    assert evict.tokens_of(evict._amount(text), 1000) == tokens


@pytest.mark.parametrize("text", ["", "-1", "many", "k", "101%", "5 tokens", "1e9"])
def test_other_amounts_are_refused(text: str) -> None:
    """And anything else is not."""
    from kvslot.cli import evict

    with pytest.raises(argparse.ArgumentTypeError):
        evict._amount(text)


def test_compaction_is_shown_and_switched(daemon: FakeDaemon, show: Shown) -> None:
    """How it stands, what came of the moves, and what `start` and `stop` changed; nothing is said of what never was."""
    plain = show("defrag", "status")
    assert "default · idle · settled" in plain
    assert "collisions" not in plain
    assert "deferred" not in plain
    daemon.view.compaction["default"] = compaction_of(
        "default", state="moving", reason="40 % of the free memory is not in whole blocks", purpose="free_blocks",
        progress=0.25, moves_in_flight=3, plans=2, planned=40, published=30, deferred=4, abandoned_leased=2,
        moved_tokens=300, moved_bytes=19_200, blocks_given=12, retired_tokens=7, unpacked_pct=40.0,
        copy_seconds=0.002, copy_bytes_per_second=2e9, steps=1000, collisions=3, overtaken=2,
    )  # fmt: skip
    out = show("defrag", "status")
    for each in ("free_blocks: 25 % of its moves, 3 being copied", "30  of 40 in 2 plans", "4  10 %", "18.8 KiB",
                 "1.86 GiB/s", "3  of 1,000 step begins met a copy", "7  old places", "let be"):  # fmt: skip
        assert each in re.sub(r"  +", "  ", out), out
    assert "default · off" in show("defrag", "stop")
    assert rows(show("defrag", "start", "--json"))[0]["mode"] == "idle"
    assert [type(each).__name__ for each in daemon.asked][-1] == "Defrag"


def test_what_compaction_is_told_wrongly(daemon: FakeDaemon, show: Shown) -> None:
    """An action that there is not, and a watch over what ends, are matters of usage."""
    assert "--watch is for status" in show("defrag", "once", "--watch", code=2)
    assert "--watch is for status" in show("defrag", "status", "--watch", "--json", code=2)
    with pytest.raises(SystemExit) as end:
        show("defrag", "sideways")
    assert end.value.code == 2


def test_watching_compaction_prints_a_line_each_time(
    daemon: FakeDaemon, show: Shown, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--watch goes on until it is interrupted."""
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("kvslot.cli.defrag.time.sleep", nap)
    assert ctl.main(["defrag", "status", "--watch", "--socket", daemon.path]) == 130
    assert capsys.readouterr().out.count("default: settled, 0 of 0 moves published") == 3


def test_eviction_asks_which_pool_where_there_are_several(tmp_path: Path, show: Shown) -> None:
    """Nothing is evicted from a pool that was not named."""
    with served(tmp_path / "k.sock", view_of(a=made(), b=made())):
        assert "a, b" in show("evict", "all", code=2)
        assert show("evict", "all", "--pool", "b").startswith("b: ")


def test_waiting_requests_are_listed(tmp_path: Path, show: Shown) -> None:
    """Whose, for how much, since when and for what; nobody is said plainly."""
    pool = made()
    first, second = pool.open_session(), pool.open_session()
    with served(tmp_path / "k.sock", view_of(default=pool)) as daemon:
        assert show("tickets") == "nobody waits\n"
        admit(pool, first, fresh(pool.usable - 20, 0))
        later = pool.allocate(second, next(iter(pool.roots)), fresh(100, 5000))
        assert isinstance(later, Later)
        out = show("tickets")
        assert re.search(rf"^ *{later.ticket} +2 +100 +0 s +a new request", out, re.MULTILINE), out
        (row,) = rows(show("tickets", "--json"))
        assert set(row) == {
            "ticket", "session", "needed", "age_s", "growth", "contiguous", "ready", "awaits_commit"
        }  # fmt: skip
        assert daemon.asked


def test_latency_is_shown_by_verb(daemon: FakeDaemon, show: Shown) -> None:
    """Counts, percentiles and steps; what was never timed has none."""
    daemon.view.latency = {
        "Allocate": {
            "count": 1234, "refused": 2, "sampled": 77, "all_us_p50": 65.5, "all_us_p99": 131.1, "all_us_mean": 60.0,
            **{f"{step}_us_mean": 10.0 for step in ("received", "decoded", "applied", "encoded", "sent")},
        },
        "Ping": {"count": 1, "refused": 0, "sampled": 0},
    }  # fmt: skip
    out = show("latency")
    assert re.search(r"^Allocate +1,234 +2 +77 +65\.5 +131\.1 +60\.0( +10\.0){5}", out, re.MULTILINE)
    assert re.search(r"^Ping +1 +0 +0( +-){8}", out, re.MULTILINE)
    assert re.search(r"p50 +p99 .* sent\nverb +count +refused +timed( +µs){8} *$", out, re.MULTILINE)
    assert [row["verb"] for row in rows(show("latency", "--json"))] == ["Allocate", "Ping"]


def test_settings_are_shown_and_some_can_be_set(daemon: FakeDaemon, show: Shown) -> None:
    """What is, what may be, what can be changed; what was changed is seen, and what cannot be is refused in a line."""
    out = show("settings")
    assert re.search(r"^log_level +\* +info +one of 'debug', 'info'", out, re.MULTILINE)
    assert re.search(r"^sessions_max +256 +whole numbers from 1 ", out, re.MULTILINE)
    document = json.loads(show("settings", "--json"))
    assert [pool["pool"] for pool in document["pools"]] == ["default"]
    assert set(document["rows"][0]) == {"name", "value", "changeable", "allowed", "meaning"}
    assert "log_level is debug (was info) until" in show("set", "log-level", "debug")
    (row,) = rows(show("set", "log_level", "info", "--json"))
    assert row == {"name": "log_level", "value": "info", "before": "debug"}
    assert "'nonsense' cannot be changed" in show("set", "nonsense", "1", code=2)


def test_a_drain_says_how_long_it_takes_and_is_asked_for_once(daemon: FakeDaemon, show: Shown) -> None:
    """As configured, as said, or now; a daemon that drains already is hurried only when that is asked for."""

    def asked() -> list[int]:
        return [each.deadline_ms for each in daemon.asked if isinstance(each, messages.Drain)]

    assert show("drain") == "draining: 2 sequences running, ends in 20 s at most\n"
    assert "draining already, 2 sequences running, ends in 20 s at most; --now" in show(
        "drain", "--seconds", "5"
    )
    assert asked() == [20_000]
    (row,) = rows(show("drain", "--json"))
    assert row == {"asked": False, "drain_left_s": 20.0, "sequences": 2}
    assert "ends now" in show("drain", "--now")
    assert asked() == [20_000, 0]
    daemon.view.drain_left = None
    assert "ends in 1.5 s at most" in show("drain", "--seconds", "1.5")
    daemon.view.drain_left = None
    assert "ends now" in show("drain", "--seconds", "0")
    assert asked() == [20_000, 0, 1500, 1], "0 would mean: as configured"


@pytest.mark.parametrize("seconds", ["x", "-1", "nan", "90000"])
def test_a_drain_takes_seconds(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Anything else is wrong usage."""
    with pytest.raises(SystemExit) as end:
        ctl.main(["drain", "--seconds", seconds])
    assert end.value.code == 2
    assert "argument --seconds" in capsys.readouterr().err


def test_an_option_before_the_command_is_told_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    """The commonest order of words that is wrong here gets the right one, ready to be copied."""
    for argv, told in (
        (
            ["--socket", "/k.sock", "status"],
            "options go behind the command: kvslotctl status --socket /k.sock\n",
        ),
        (["--json", "clients"], "options go behind the command: kvslotctl clients --json\n"),
        (["--socket=/k.sock"], "options go behind the command: kvslotctl COMMAND --socket=/k.sock\n"),
        (["--bogus", "status"], "there is no option --bogus"),
    ):
        with pytest.raises(SystemExit) as end:
            ctl.main(argv)
        assert end.value.code == 2
        assert told in capsys.readouterr().err


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", EVERY)
def test_a_daemon_that_is_not_there_is_one_line_with_the_remedy(
    command: str, tmp_path: Path, show: Shown
) -> None:
    """No socket, a socket of a daemon that has ended, one that may not be opened, and a path no socket can have."""
    more = OTHERS.get(command, [])
    assert "start kvslotd" in show(command, *more, code=5)
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "k.sock"))
    stale.close()
    out = show(command, *more, code=5)
    assert "left over" in out
    assert "start kvslotd" in out
    (tmp_path / "k.sock").unlink()
    (tmp_path / "k.sock").write_text("text")
    out = show(command, *more, code=5)
    assert "that is no socket" in out
    assert "--socket" in out
    assert "left over" not in out
    code = ctl.main([command, *more, "--socket", str(tmp_path / ("x" * 150))])
    assert code == 5


def test_a_socket_that_may_not_be_opened_names_the_setting(
    show: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without permission the remedy is in the daemon's configuration."""

    def refuse(self: socket.socket, address: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)  # root may open every socket
    assert "socket_group" in show("status", code=5)


@pytest.mark.parametrize("command", EVERY)
def test_a_daemon_that_lets_this_user_not_ask_says_whom_it_does(
    command: str, daemon: FakeDaemon, show: Shown
) -> None:
    """Denied is exit code 5 and names the setting that would allow it."""
    daemon.denies = True
    assert "control_uids" in show(command, *OTHERS.get(command, []), code=5)


def test_something_else_behind_the_socket_is_recognised(daemon: FakeDaemon, show: Shown) -> None:
    """Bytes that are no frame of ours end in one line, no traceback."""
    daemon.garbage = b"SSH-2.0-OpenSSH_9.2p1\r\n"
    assert "is it a kvslotd" in show("status", code=5)


@pytest.mark.parametrize("command", [*COMMANDS, "evict", "tickets", "defrag", "top", "pin"])
def test_an_unknown_pool_names_those_there_are(command: str, daemon: FakeDaemon, show: Shown) -> None:
    """A typing error is a matter of usage."""
    more = OTHERS.get(command, [])
    assert "default" in show(command, *more, "--pool", "defualt", code=2)


def test_a_json_file_that_cannot_be_written_is_said(daemon: FakeDaemon, show: Shown, tmp_path: Path) -> None:
    """A folder in the way is no traceback."""
    assert "cannot write" in show("status", f"--json={tmp_path}", code=3)


def test_an_empty_daemon_is_shown_plainly(tmp_path: Path, show: Shown) -> None:
    """Nothing connected and nothing cached is no special case to anybody."""
    with served(tmp_path / "k.sock", view_of(default=made())):
        for command in COMMANDS:
            assert show(command)
        assert "nothing is cached" in show("tree")


def test_completion_knows_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The shells' completion has the commands and their options, and files where a file is meant."""
    for shell in ("bash", "zsh", "fish", "tcsh"):
        with pytest.raises(SystemExit) as end:
            ctl.main(["--print-completion", shell])
        assert end.value.code == 0
        told = capsys.readouterr().out
        for command in (*EVERY, "doctor"):
            assert command in told
        assert "drain_seconds" in told
        assert "socket" in told


@pytest.mark.parametrize("command", [*EVERY, "doctor"])
def test_help_has_examples_and_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What a command means, how it is called, and what its exit code tells."""
    with pytest.raises(SystemExit) as end:
        ctl.main([command, "--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    assert f"  kvslotctl {command}" in told
    assert "exit codes:" in told
    assert max(len(line) for line in told.splitlines()) <= 120


@pytest.mark.parametrize("command", COMMANDS)
def test_output_that_knows_only_ascii_gets_ascii(command: str, daemon: FakeDaemon, tmp_path: Path) -> None:
    """No bar, cell or name ends a command with a traceback; JSON is UTF-8 all the same."""
    hosted = daemon.view.pools.pop("default")
    hosted.name = "b\u00fcro"
    daemon.view.pools[hosted.name] = hosted
    argv = [sys.executable, "-I", "-X", "utf8=0", "-m", "kvslot.cli.ctl", command]
    argv += ["--socket", str(tmp_path / "k.sock")]
    for more in ([], ["--json"]):
        done = subprocess.run(
            [*argv, *more], capture_output=True, check=False,
            env={"PATH": os.environ["PATH"], "LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        text = done.stdout.decode("utf-8" if more else "ascii")
        assert ("b\u00fcro" if more else "b?ro") in text
