"""What the daemon shows of itself: every page bounded, every slot and node exactly once, no token and no salt."""

import json
import random
import time
from collections import Counter
from typing import Any

import pytest

from kvslot.allocator import Admitted, Later, Pool, PoolConfig, Space, State
from kvslot.api.wire import BadRequest, NotFound, messages
from kvslot.daemon import inspection

from ..core.tools import admit, cache, fork, fresh, make, root, toks
from ..simulation.driver import Driver
from .views import View, listed, made, pages, view_of

CORE_STATE = {
    "cached": State.CACHED, "leased": State.CACHED, "private": State.PRIVATE, "room": State.PRIVATE,
    "fenced": State.FENCED, "moving": State.MOVING, "reserved": State.RESERVED,
    "quarantined": State.QUARANTINED, "padding": State.PADDING,
}  # fmt: skip


def painted(view: View, slots: int, limit: int = 0) -> bytearray:
    """The map, slot by slot; slots named twice must be named alike."""
    shown = bytearray(slots)  # free
    for row in listed("map", view, limit):
        extents = row["extents"]
        state = CORE_STATE[row["state"]]
        for i in range(0, len(extents), 2):
            for slot in range(extents[i], extents[i] + extents[i + 1]):
                assert shown[slot] in (State.FREE, state)
                shown[slot] = state
    return shown


def nodes(view: View, limit: int = 0) -> dict[int, dict[str, Any]]:
    """The tree, by node."""
    found: dict[int, dict[str, Any]] = {}
    for row in listed("tree", view, limit):
        assert len({len(column) for column in row.values()}) == 1
        for values in zip(*row.values(), strict=True):
            each = dict(zip(row, values, strict=True))
            assert each["node"] not in found
            found[each["node"]] = each
    return found


@pytest.mark.parametrize("seed", range(12))
def test_the_map_says_of_every_slot_what_the_journal_says(seed: int) -> None:
    """After any history, with pages of any size, the map's states are the shadow's, slot by slot."""
    driver = Driver(seed, steps=0)
    world = driver.world
    view = view_of(default=world.pool)
    for number in range(200):
        driver.rng.choices(driver.acts, driver.weights)[0][1]()
        driver.answer()
        if number % 10 == 0:
            limit = driver.rng.choice((0, 1, 2, 7))
            assert painted(view, world.pool.slots, limit) == world.shadow, number


@pytest.mark.parametrize("seed", range(6))
def test_the_tree_lists_every_node_once(seed: int) -> None:
    """Nodes, parents, tokens, extents and holds are the tree's own, each node on one page only."""
    driver = Driver(seed, steps=0)
    pool = driver.world.pool
    tree = pool.tree
    view = view_of(default=pool)
    for number in range(150):
        driver.rng.choices(driver.acts, driver.weights)[0][1]()
        driver.answer()
        if number % 10 == 0:
            found = nodes(view, driver.rng.choice((0, 1, 5)))
            assert set(found) == {node for node in tree.live() if tree.parent[node]}
            for node, each in found.items():
                assert each["parent"] == tree.parent[node]
                assert each["depth"] == tree.depth[node]
                assert each["tokens"] == tree.length[node]
                assert each["extents"] == len(tree.extents(node)) // 2
                assert each["holds"] == tree.holds[node]
                assert each["age"] >= 0


@pytest.mark.parametrize("kind", ["map", "tree", "sessions", "namespaces", "tickets"])
@pytest.mark.parametrize("seed", range(4))
def test_a_listing_ends_whatever_happens_between_its_pages(kind: str, seed: int) -> None:
    """The pool changes after every page: nothing crashes, cursors rise, and no session is listed twice."""
    driver = Driver(seed, steps=0)
    pool = driver.world.pool
    for _ in range(60):
        driver.rng.choices(driver.acts, driver.weights)[0][1]()
        driver.answer()
    cursor = 0
    seen: Counter[int] = Counter()
    for _ in range(5000):
        page, following = inspection.rows(kind, view_of(default=pool), cursor, 1)
        seen.update(row["session"] for row in page if kind == "sessions")
        if not following:
            break
        assert following > cursor
        cursor = following
        driver.rng.choices(driver.acts, driver.weights)[0][1]()
        driver.answer()
    else:
        raise AssertionError("no end")
    assert not seen or max(seen.values()) == 1


def test_a_page_takes_less_than_a_moment_whatever_the_pool_holds() -> None:
    """With 30,000 nodes and 3,000 sequences no page of any kind comes near a millisecond of the loop's time."""
    pool = Pool(PoolConfig(blocks=40_000, block_size=16, watermark=0.0))
    session = pool.open_session()
    space = pool.open_space(Space("a"))
    rng = random.Random(5)
    for number in range(30_000):
        tokens = toks([number, *(rng.randrange(9) for _ in range(11))])
        answer = pool.allocate(session, space, tokens)
        assert isinstance(answer, Admitted)
        pool.commit(session, answer.sequence, 12)
        if number % 10:
            pool.free(session, answer.sequence)
    view = view_of(default=pool)
    for kind in inspection.KINDS:
        cursor = 0
        slowest = 0.0
        while True:
            fastest = 1.0
            following = cursor
            for _ in range(5):  # the machine's own pauses are not the page's
                began = time.perf_counter()
                _, following = inspection.rows(kind, view, cursor)
                fastest = min(fastest, time.perf_counter() - began)
            slowest = max(slowest, fastest)
            if not following:
                break
            cursor = following
        assert slowest < 0.005, kind  # a millisecond, on a machine five times as slow


def test_rows_are_plain_and_go_through_the_wire() -> None:
    """Every kind's rows are values that MessagePack and JSON both know, in an answer that can be read again."""
    from kvslot.api.wire import decode_outgoing, encode

    pool = made()
    session = pool.open_session()
    admit(pool, session, fresh(40, 0))
    view = view_of(default=pool)
    for kind in inspection.KINDS:
        for page in pages(kind, view, 3):
            frame = encode(messages.Inspected(1, kind, page))
            answer = decode_outgoing(frame[4:])
            assert isinstance(answer, messages.Inspected)
            assert json.loads(json.dumps(answer.rows)) == json.loads(json.dumps(page))


def test_tokens_and_salts_are_shown_by_no_kind() -> None:
    """Whatever is asked for, neither a cached token nor a namespace's salt stands in the answer."""
    pool = made()
    session = pool.open_session()
    space = pool.open_space(Space("tenant-1", "model-1", "adapter-1", "grain-of-salt"))
    token = 1_234_567_891
    answer = pool.allocate(session, space, toks([token] * 40))
    assert isinstance(answer, Admitted)
    pool.commit(session, answer.sequence, 40)
    view = view_of(default=pool)
    told = json.dumps({kind: listed(kind, view) for kind in inspection.KINDS})
    assert "tenant-1" in told
    assert "grain-of-salt" not in told
    assert str(token) not in told
    assert listed("namespaces", view)[0]["salted"] is True


def test_running_room_cached_and_leased_are_told_apart() -> None:
    """A sequence's unwritten run is `room`, what it published is `leased` while it lives and `cached` afterwards."""
    pool = make(blocks=9, block_size=4, quantum=4)
    session = pool.open_session()
    running = admit(pool, session, fresh(6, 0))

    def sums() -> dict[str, int]:
        shown: Counter[str] = Counter()
        for row in listed("map", view_of(default=pool)):
            shown[row["state"]] += sum(row["extents"][1::2])
        return dict(shown)

    pool.wrote(session, running.sequence, 6)
    assert sums() == {"private": 6, "room": running.capacity - 6, "padding": 4}
    pool.commit(session, running.sequence, 6)
    assert sums() == {"leased": 6, "room": running.capacity - 6, "padding": 4}
    pool.free(session, running.sequence)
    assert sums() == {"cached": 6, "padding": 4}


def test_the_usable_run_index_is_what_a_walk_over_the_runs_finds() -> None:
    """For every length: the whole cells of runs that have so many, over all free slots; 100 in an empty pool."""
    rng = random.Random(3)
    pool = Pool(PoolConfig(blocks=2049, block_size=16, watermark=0.0))
    assert set(inspection.usable_runs(pool).values()) == {100.0}
    session = pool.open_session()
    handles = []
    for number in range(900):
        answer = pool.allocate(session, root(pool), toks([number] * rng.choice((5, 20, 33, 200))))
        if isinstance(answer, Later):
            break
        assert isinstance(answer, Admitted)
        handles.append(answer.sequence)
    for handle in rng.sample(handles, len(handles) // 3):
        pool.free(session, handle)
    runs = pool.runs
    for blocks, share in inspection.usable_runs(pool).items():
        usable = 0
        for start, length in runs.length_at.items():
            cells = (start + length) // runs.cell - -(-start // runs.cell)
            size = cells * runs.cell if cells > 0 else length
            usable += size if size >= int(blocks) * 16 else 0
        assert share == pytest.approx(100 * usable / runs.total)


def test_the_index_of_long_runs_is_a_lower_bound() -> None:
    """Classes of long runs hold sizes within a sixteenth: the least of a class is the least that falls into it."""
    from kvslot.allocator.runs import size_class

    for cells in (512, 513, 543, 544, 1000, 1024, 5000, 123_456):
        least = inspection._least_cells(size_class(cells))
        assert least <= cells < least * 17 / 16
        assert size_class(least) == size_class(cells)
        assert size_class(least - 1) < size_class(cells)


def test_figures_are_the_pools_own() -> None:
    """`pools` and `frag` show the statistics of the core, and shares of what they say they are shares of."""
    pool = made()
    session = pool.open_session()
    cache(pool, session, fresh(50, 0))
    view = view_of(default=pool)
    (row,) = listed("pools", view)
    told = pool.statistics()
    assert row["cached"] == told.cached == 50
    assert row["internal_fragmentation_pct"] == pytest.approx(100 * told.internal_fragmentation)
    (frag,) = listed("frag", view)
    assert frag["pinned_waste_tokens"] == told.pinned_waste_tokens == 14
    assert frag["free"] == told.free
    assert list(frag["usable_run_pct"]) == [str(1 << n) for n in range(11)]


def test_sessions_are_listed_by_handle_with_what_they_hold() -> None:
    """One row a session, lost ones too, in pages of any size, of one pool where asked."""
    a, b = made(), made()
    sessions = [a.open_session(), a.open_session(), b.open_session()]
    admit(a, sessions[0], fresh(20, 0))
    view = view_of(a=a, b=b)
    view.members[1].state = "lost"
    rows = listed("sessions", view, 1)
    assert [row["session"] for row in rows] == [1, 2, 3]
    assert [row["session"] for row in listed("sessions", view, pool="a")] == [1, 2]
    first = listed("sessions", view, pool="a")[0]
    assert first["sequences"] == 1
    assert first["charged"] >= 20
    assert first["age_s"] == 60
    assert {row["state"] for row in rows} == {"live", "lost"}
    assert not any(row["movable"] or row["follows"] for row in rows)


def test_who_follows_moves_is_told() -> None:
    """A session that said movable is named so at once, and follows while its last step is no older than two seconds."""
    pool = made()
    session = pool.open_session(movable=True)
    view = view_of(default=pool)

    def told() -> tuple[bool, bool]:
        (row,) = listed("sessions", view)
        return row["movable"], row["follows"]

    pool.poll(100.0)
    assert told() == (True, False)
    pool.progress(session, 1, 0, epoch=0, now=100.5)
    assert told() == (True, True)
    pool.poll(103.0)
    assert told() == (True, False)


def test_who_waits_is_listed_oldest_first() -> None:
    """A refused request's ticket is there with its need, until it is withdrawn."""
    pool = make(blocks=5, block_size=4)
    session = pool.open_session()
    admit(pool, session, fresh(12, 0))
    first = pool.allocate(session, root(pool), fresh(8, 100))
    second = pool.allocate(session, root(pool), fresh(9, 200))
    assert isinstance(first, Later)
    assert isinstance(second, Later)
    rows = listed("tickets", view_of(default=pool), 1)
    assert [(row["ticket"], row["needed"]) for row in rows] == [(first.ticket, 8), (second.ticket, 9)]
    assert {row["session"] for row in rows} == {1}
    pool.withdraw(session, first.ticket)
    assert len(listed("tickets", view_of(default=pool))) == 1


def test_what_there_is_not_is_refused_by_name() -> None:
    """An unknown kind or pool is NotFound and lists what there is; a cursor of nowhere is refused or ends at once."""
    view = view_of(default=made())
    with pytest.raises(NotFound, match="status"):
        inspection.rows("nonsense", view)
    for kind in inspection.KINDS:
        if kind != "status":
            with pytest.raises(NotFound, match="default"):
                inspection.rows(kind, view, pool="other")
    with pytest.raises(BadRequest):
        inspection.rows("map", view, -1)
    with pytest.raises(BadRequest):
        inspection.rows("map", view, 6 << 56)
    for kind in inspection.KINDS:
        for cursor in (2**62, 2**63 - 1, 2**60 - 1, 2**58 + 2**50, 2**50, 2**20):
            try:
                _, following = inspection.rows(kind, view, cursor)
            except BadRequest:
                continue
            assert not following or following > cursor


def test_the_map_lists_once_what_forks_share() -> None:
    """However many sequences hold a range, and whoever of them ends, the map's slots add up to those in use."""
    pool = make()
    session = pool.open_session()
    parent = admit(pool, session, fresh(11, 1))
    pool.wrote(session, parent.sequence, 11)
    children = [fork(pool, session, parent.sequence) for _ in range(3)]
    view = view_of(default=pool)

    def listed_slots() -> int:
        return sum(sum(row["extents"][1::2]) for row in listed("map", view, 1))

    used = pool.slots - pool.ledger.counts[State.FREE]
    assert listed_slots() == used
    pool.free(session, parent.sequence)
    pool.free(session, children[0].sequence)
    assert listed_slots() == pool.slots - pool.ledger.counts[State.FREE]
