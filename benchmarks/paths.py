"""Deep trees for little memory: sequences on paths of nodes of one token each.

sequence n    n | token | token | ...      every token published by a commit of its own, and so a node of its own
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvslot.api.wire import messages
from kvslot.benchmarks.rig import Peer
from kvslot.benchmarks.traffic import noise

TOGETHER: Final = 64
"""Sequences a frame."""


def path_of(number: int, depth: int) -> bytes:
    """`depth` tokens that only this path begins with."""
    return number.to_bytes(4, "little") + noise(number, 1, depth)


def hold(peer: Peer, first: int, count: int, depth: int, *, keep: bool) -> None:
    """Allocates, publishes node by node what is new, and frees again unless `keep`."""
    for start in range(first, first + count, TOGETHER):
        numbers = range(start, min(start + TOGETHER, first + count))
        # One token more than the path, since the last of a prompt is never a hit.
        found = peer.batch(
            [
                messages.Allocate(1, peer.namespace, number, path_of(number, depth) + b"\x01\0\0\0")
                for number in numbers
            ]
        )
        rest: list[messages.Batchable] = []
        for number, admitted in zip(numbers, found, strict=True):
            assert isinstance(admitted, messages.Admitted), admitted
            rest += _publish(number, admitted.hit, depth)
            if not keep:
                rest.append(messages.Free(1, number))
        if rest:
            peer.batch(rest)


def _publish(number: int, hit: int, depth: int) -> Iterator[messages.Commit]:
    return (messages.Commit(1, number, length) for length in range(hit + 1, depth + 1))
