"""Short words for the examples of this folder: a pool, prompts, and sequences carried through their life."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvslot.allocator import Admitted, Forked, Grown, Later, Pool, PoolConfig, Session, Space, audit


def make(blocks: int = 9, block_size: int = 4, **options: Any) -> Pool:
    """A pool of `blocks` blocks, the first of them padding; no watermark and no growth room unless said."""
    options = {"watermark": 0.0, "quantum": 1, **options}
    return Pool(PoolConfig(blocks=blocks, block_size=block_size, **options))


def root(pool: Pool, tenant: str = "a") -> int:
    return pool.open_space(Space(tenant))


def toks(tokens: Iterable[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)


def fresh(n: int, start: int) -> bytes:
    """`n` tokens from `start` on, all different."""
    return toks(range(start, start + n))


def admit(pool: Pool, session: Session, tokens: bytes, **options: Any) -> Admitted:
    answer = pool.allocate(session, root(pool), tokens, **options)
    assert isinstance(answer, Admitted), answer
    return answer


def later(answer: object) -> Later:
    assert isinstance(answer, Later), answer
    return answer


def grown(answer: object) -> Grown:
    assert isinstance(answer, Grown), answer
    return answer


def fork(pool: Pool, session: Session, handle: int, **options: Any) -> Forked:
    answer = pool.fork(session, handle, **options)
    assert isinstance(answer, Forked), answer
    return answer


def cache(pool: Pool, session: Session, tokens: bytes, *, priority: int = 0, **options: Any) -> None:
    """A prompt computed, published and freed: cached and held by nobody."""
    sequence = admit(pool, session, tokens, priority=priority, **options).sequence
    pool.commit(session, sequence, len(tokens) // 4)
    pool.free(session, sequence)


def slots(extents: list[int]) -> list[int]:
    return [s for i in range(0, len(extents), 2) for s in range(extents[i], extents[i] + extents[i + 1])]


def sound(pool: Pool) -> None:
    assert audit(pool) == []


def step(pool: Pool, session: Session) -> int:
    """One more submitted step; returns its number."""
    pool.progress(session, session.submitted + 1, session.completed)
    return session.submitted


def complete(pool: Pool, session: Session) -> None:
    """All submitted steps have completed."""
    pool.progress(session, session.submitted, session.submitted)
