"""The audit speaks: whatever is bent by hand in a sound pool is found, so that its silence means something."""

# ruff: noqa: E501  the faults are a table, one a line
from collections.abc import Callable

import pytest

from kvslot.allocator import Account, Pool, audit
from kvslot.allocator.runs import FreeRuns

from .tools import admit, cache, fresh, later, make, root, sound, step


def furnished() -> Pool:
    """A pool in which every state, every holder and every ticket occurs."""
    pool = make(blocks=41, block_size=4)
    s, other, dead = pool.open_session(append="peel"), pool.open_session(), pool.open_session()
    cache(pool, s, fresh(9, 0))
    cache(pool, s, fresh(5, 0) + fresh(4, 50))
    cache(pool, s, fresh(12, 7000))
    reader = admit(pool, s, fresh(7, 0) + fresh(5, 100))
    pool.wrote(s, reader.sequence, 12)
    pool.fork(s, reader.sequence, length=11)
    twin = admit(pool, other, fresh(10, 200))
    copy = admit(pool, other, fresh(10, 200))
    pool.commit(other, twin.sequence, 10)
    pool.commit(other, copy.sequence, 10)
    gone = admit(pool, other, fresh(6, 300))
    pool.free(other, gone.sequence, fence=step(pool, other))
    admit(pool, dead, fresh(6, 400))
    pool.lose(dead)
    pool.sweep()
    pool.pin(s, root(pool), fresh(6, 0))
    node = next(n for n in pool.tree.live() if pool.tree.length[n] == 12 and not pool.tree.holds[n])
    pool.moves.begin(node)
    holes = [admit(pool, s, fresh(3, 1000 * i)).sequence for i in range(20, 28)]
    for sequence in holes[::2]:
        pool.free(s, sequence)
    bound = pool.open_session(quota=8)
    small = admit(pool, bound, fresh(3, 95000))
    admit(pool, bound, fresh(3, 96000))
    later(pool.extend(bound, small.sequence, tokens=4))
    later(pool.allocate(other, root(pool), fresh(pool.runs.longest() + 3, 90000), contiguous=True))
    assert pool.admission.window is not None
    sound(pool)
    return pool


def a_range(pool: Pool) -> object:
    return next(piece for sequence in pool.sequences.values() for piece in sequence.own)


def a_leaf(pool: Pool) -> int:
    tree = pool.tree
    leaves = (n for n in tree.live() if tree.length[n] and not tree.holds[n] and not tree.children(n))
    return next(n for n in leaves if len(tree.children(tree.parent[n])) > 1)


def a_held(pool: Pool) -> int:
    return next(n for n in pool.tree.live() if pool.tree.length[n] and pool.tree.holds[n])


def bump(owner: object, name: str, by: int = 1) -> None:
    setattr(owner, name, getattr(owner, name) + by)


def bump_at(column: object, index: int, by: int = 1) -> None:
    column[index] += by  # type: ignore[index]


def stocked(pool: Pool) -> FreeRuns:
    pool.runs.gather(1, 1)
    return pool.runs


def a_session(pool: Pool) -> object:
    return next(s for s in pool.sessions.values() if s.fenced)


BENT: dict[str, Callable[[Pool], object]] = {
    "a sum of the ledger": lambda p: bump_at(p.ledger.counts, 1),
    "a slot in two states": lambda p: p.ledger.shift(0, 1, 2, 0),
    "a free run lost": lambda p: p.runs.length_at.pop(next(iter(p.runs.length_at))),
    "a free run too long": lambda p: bump_at(p.runs.length_at, next(iter(p.runs.length_at))),
    "a free run's end lost": lambda p: p.runs.start_at.pop(next(iter(p.runs.start_at))),
    "a piece of the stock lost": lambda p: stocked(p).stock.clear(),
    "the count of the stock": lambda p: bump(stocked(p), "stocked"),
    "the sum of free runs": lambda p: bump(p.runs, "total"),
    "the count of free blocks": lambda p: bump(p.runs, "blocks_free"),
    "the map of run classes": lambda p: setattr(p.runs, "occupied", p.runs.occupied ^ 1 << 3),
    "a run in no class": lambda p: next(c for c in p.runs.classes if c).popitem(),
    "a hold too many": lambda p: bump_at(p.tree.holds, a_held(p)),
    "a hold too few": lambda p: bump_at(p.tree.holds, a_held(p), -1),
    "a hold on a leaf": lambda p: bump_at(p.tree.holds, a_leaf(p)),
    "the evictable": lambda p: bump(p.tree, "evictable"),
    "the cached": lambda p: bump(p.tree, "tokens"),
    "the nodes": lambda p: bump(p.tree, "nodes"),
    "a node's length": lambda p: bump_at(p.tree.length, a_leaf(p)),
    "a node's depth": lambda p: bump_at(p.tree.depth, a_leaf(p)),
    "a node's key": lambda p: p.tree.keys.__setitem__(a_leaf(p), p.tree.keys[a_leaf(p)] + b"1234"),
    "a node's first token": lambda p: p.tree.keys.__setitem__(a_leaf(p), b"\x7f\x7f\x7f\x7f" + p.tree.keys[a_leaf(p)][4:]),
    "a node's parent": lambda p: p.tree.parent.__setitem__(a_leaf(p), root(p, "elsewhere")),
    "a node's slot": lambda p: bump_at(p.tree.slot, next(n for n in p.tree.live() if p.tree.length[n] and p.tree.slot[n] > 8)),
    "a leaf not queued": lambda p: p.tree.evictor.discard(a_leaf(p)),
    "a held node queued": lambda p: p.tree.evictor.add(a_held(p), 1),
    "a mark of moving": lambda p: bump_at(p.tree.flags, a_leaf(p), 1),
    "a move forgotten": lambda p: p.moves.tickets.clear(),
    "what a session holds up of moves": lambda p: bump(next(iter(p.sessions.values())), "retired_tokens"),
    "a range's count": lambda p: bump(a_range(p), "refs"),
    "a range's length": lambda p: bump(a_range(p), "length"),
    "a range's place": lambda p: bump(a_range(p), "position", 3),
    "a range's slots": lambda p: bump_at(a_range(p).extents, 0),  # type: ignore[attr-defined]
    "a range's kind": lambda p: setattr(a_range(p), "kind", (a_range(p).kind + 1) % 3),  # type: ignore[attr-defined]
    "a range forgotten": lambda p: next(s for s in p.sequences.values() if s.own).own.pop(),
    "a holder forgotten": lambda p: setattr(next(r for s in p.sequences.values() for r in s.own if r.holders), "holders", []),
    "a sequence's base": lambda p: bump(next(iter(p.sequences.values())), "base", 100),
    "a sequence's capacity": lambda p: bump(next(iter(p.sequences.values())), "capacity"),
    "a sequence forgotten": lambda p: p.sequences.popitem(),
    "the unwritten": lambda p: bump(p, "unwritten"),
    "the duplicates": lambda p: bump(p, "duplicates"),
    "the peeled": lambda p: bump(p, "peeled", -1),
    "the pinned": lambda p: bump(p, "pinned"),
    "what a session is charged": lambda p: bump(a_session(p), "charged"),
    "what a session has fenced": lambda p: bump(a_session(p), "fenced", -1),
    "what a tenant is charged": lambda p: bump(p.everyone, "charged"),
    "what a tenant has fenced": lambda p: bump(p.everyone, "fenced"),
    "what a tenant has in reserve": lambda p: bump(p.everyone, "unwritten", -1),
    "a tenant's limit passed": lambda p: setattr(p.everyone, "ceiling", 1),
    "a namespace under another account": lambda p: p.account_of.update(dict.fromkeys(p.account_of, Account("x"))),
    "a fence lost": lambda p: a_session(p).fences.pop(),  # type: ignore[attr-defined]
    "a pin lost": lambda p: next(s for s in p.sessions.values() if s.pins).pins.popitem(),
    "a quota passed": lambda p: setattr(a_session(p), "quota", 1),
    "a quarantined range lost": lambda p: next(s for s in p.sessions.values() if s.swept).swept.popitem(),
    "what a window holds": lambda p: bump(p.admission.window, "held"),
    "a window forgotten": lambda p: setattr(p.admission, "window", None),
    "whether anybody waits": lambda p: setattr(p.admission, "busy", False),
    "growth of nobody": lambda p: p.admission.growth.__setitem__(10**9, next(iter(p.admission.growth.values()))),
    "padding handed out": lambda p: p.runs.give(0, 1),
    "a slot given twice": lambda p: p.runs.give(p.slots - 1, 1) if p.slots - 1 not in p.runs.length_at else p.runs.give(5, 1),
}  # fmt: skip


@pytest.mark.parametrize("what", BENT)
def test_what_is_bent_is_found(what: str) -> None:
    """The audit of a bent pool is not silent, nor does it fall over."""
    pool = furnished()
    BENT[what](pool)
    assert audit(pool) != []


def test_an_empty_pool_is_sound() -> None:
    """A new pool, and one that everybody has left, have nothing to report."""
    pool = make()
    sound(pool)
    s = pool.open_session()
    cache(pool, s, fresh(9, 0))
    pool.bye(s)
    sound(pool)


def test_something_held_when_all_have_left_is_found() -> None:
    """A hold or a slot of nobody's shows once there is no session to have it."""
    pool = make()
    s = pool.open_session()
    for start in (0, 50):
        cache(pool, s, fresh(9, start))
    pool.bye(s)
    pool.tree.hold(a_leaf(pool))
    assert any("leased" in sentence or "holds" in sentence for sentence in audit(pool))
