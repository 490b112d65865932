"""Faults planted on purpose: each must be seen by the audit, by the paint, or by the sums.  A check that has never
failed has not been tested."""

from __future__ import annotations

from typing import Any

import pytest

from kvslot.replay.policies import Admitted
from kvslot.replay.policies.chained import ChainedPool
from kvslot.replay.policies.hashed import HashedPolicy
from kvslot.replay.policies.paged import PagedPolicy
from kvslot.replay.policies.radix import Tree
from kvslot.replay.policies.token import TokenPolicy

from .life import Life, ramp


def busy(name: str) -> Life:
    """Two sequences share a prefix and one more runs; enough for every fault to show."""
    life = Life(name, 256, 16)
    life.serve(ramp(40))
    life.start(ramp(20) + ramp(30, 900))
    life.start(ramp(20) + ramp(30, 700))
    life.start(ramp(18, 5000))
    life.check()
    return life


@pytest.mark.parametrize(
    ("name", "gauge"),
    [
        ("contiguous", "_private"),
        ("paged", "_private"),
        ("paged", "_reserved"),
        ("paged", "_duplicates"),
        ("hashed", "_private"),
        ("hashed", "_reserved"),
        ("token", "_private"),
        ("token", "_reserved"),
    ],
)
def test_a_wrong_sum_is_found(name: str, gauge: str) -> None:
    """One token too many in an incremental sum fails the recount."""
    life = busy(name)
    setattr(life.policy, gauge, getattr(life.policy, gauge) + 1)
    with pytest.raises(AssertionError):
        life.check()


@pytest.mark.parametrize(("name", "policy"), [("paged", PagedPolicy), ("token", TokenPolicy)])
def test_places_given_back_twice_are_found(name: str, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot or block that stands in the free list twice would be handed out twice."""
    life = busy(name)
    give = policy._give

    def twice(self: Any, places: Any) -> None:
        give(self, places)
        give(self, places)

    life.admit(ramp(18, 6000))
    monkeypatch.setattr(policy, "_give", twice)
    life.abort(life.next - 1)
    with pytest.raises(AssertionError):
        life.check()


def test_a_reference_not_counted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that holds blocks without a reference is found by walking the tables."""
    life = busy("hashed")
    life.policy._pool._references[life.policy._live[2].table.blocks[0]] -= 1
    with pytest.raises(AssertionError):
        life.check()


@pytest.mark.parametrize("name", ["paged", "token"])
def test_a_lock_not_taken_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path in use that is not locked could be evicted under its reader."""
    life = Life(name, 256, 16)
    life.serve(ramp(40))
    monkeypatch.setattr(Tree, "lock", lambda self, path: None)
    life.admit(ramp(40) + ramp(4, 100))
    with pytest.raises(AssertionError):
        life.check()


def test_a_copy_not_made_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split that only says it copied leaves other bytes where the prefix should be."""
    life = busy("paged")
    monkeypatch.setattr(PagedPolicy, "_copy", lambda *_: None)
    life.admit(ramp(8) + ramp(4, 300))
    with pytest.raises((AssertionError, KeyError)):
        life.check()


def test_a_key_that_forgets_its_prefix_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks keyed by their own tokens alone would be hit behind another prefix: the paint differs."""
    match = ChainedPool._match

    def careless(self: ChainedPool, tokens: bytes, keys: Any = None) -> Any:
        found, hits = match(self, tokens, keys)
        if len(hits) == 0 and len(tokens) > 2 * self._stride:
            later = [block for block, key in enumerate(self._key) if key is not None][1:2]
            hits = later
        return found, hits

    life = Life("hashed", 256, 16)
    life.serve(ramp(48))
    monkeypatch.setattr(ChainedPool, "_match", careless)
    life.admit(ramp(16, 500) + ramp(32, 16))
    with pytest.raises(AssertionError):
        life.check()


def test_a_hit_of_the_whole_prompt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that hits all n tokens would have nothing to compute the first logits from."""
    admit = HashedPolicy.admit

    def whole(self: Any, request: int, tokens: bytes, engine: int, now: float) -> Any:
        answer = admit(self, request, tokens, engine, now)
        assert isinstance(answer, Admitted)
        return answer._replace(hit=len(tokens) // 4)

    monkeypatch.setattr(HashedPolicy, "admit", whole)
    life = Life("hashed", 256, 16)
    with pytest.raises(AssertionError):
        life.admit(ramp(32))


@pytest.mark.parametrize("name", ["paged", "token"])
def test_a_parent_released_before_its_child_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the wrong order of release, the oldest idle node has children, and eviction stops at once."""

    def downwards(self: Tree, node: Any) -> None:
        path = []
        while node is not self.root:
            path.append(node)
            node = node.parent
        for node in reversed(path):
            node.locks -= 1
            if not node.locks:
                last = self.root.older
                last.newer = self.root.older = node
                node.older = last
                node.newer = self.root
                self.idle_tokens += node.tokens
                self.idle_places += len(node.places)

    monkeypatch.setattr(Tree, "unlock", downwards)
    life = Life(name, 128, 16, watermark=0.0)
    life.serve(ramp(20))
    life.serve(ramp(20) + ramp(20, 100))
    life.check()
    with pytest.raises(AssertionError):
        life.serve(ramp(100, 1000))
