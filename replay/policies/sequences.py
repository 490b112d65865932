"""What the baseline policies have in common: the checks at their door, the watermark, the step at which a sequence's
progress is noted, and the picture of a pool.

A policy hears of a sequence's length only when the engine calls `grow`.  Left alone, a policy whose runs are long (a
block of 2,048 tokens, or one run for life) would take written tokens for reserved ones for thousands of tokens.  So
every baseline asks to be called at least every `NOTED_EVERY` tokens, whether it then needs memory or not: the figures
`private` and `reserved` are at most that late, and equally late for all.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

import numpy as np
import numpy.typing as npt

from kvslot.replay.policies._base import PolicyConfig

NOTED_EVERY: Final = 16
"""Tokens between two calls of `grow` at the most: the block size that engines come with, hence no extra calls there."""

PICTURE_BYTES: Final = 4096
"""Longest picture: wider than any screen, short enough to be kept a hundred times in one page."""

TOKEN_BYTES: Final = 4
"""Tokens travel as little-endian int32."""


class Misuse(ValueError):
    """A call that breaks the rules of `_base.Policy`; nothing has changed."""


class EmptyPrompt(Misuse):
    """A prompt without a token: there is nothing to compute the first logits from."""


class NotTokens(Misuse):
    """The bytes are no whole number of int32 tokens."""


class RequestIsLive(Misuse):
    """A request id that is in use was admitted again."""


class UnknownRequest(Misuse):
    """No live request has this id: never admitted, or finished or aborted already."""


class OutOfTurn(Misuse):
    """The request is live, but this call does not fit its state (twice prefilled, finished before, grown too far)."""


def prompt_length(request: int, tokens: bytes, live: Container[int]) -> int:
    """Tokens in a prompt that may be admitted.  Raises EmptyPrompt, NotTokens, RequestIsLive.

    `live` is the policy's container of live requests, asked with `in`."""
    if not tokens:
        raise EmptyPrompt(f"request {request}: the prompt is empty")
    length, rest = divmod(len(tokens), TOKEN_BYTES)
    if rest:
        raise NotTokens(f"request {request}: {len(tokens)} bytes are no whole number of int32 tokens")
    if request in live:
        raise RequestIsLive(f"request {request} is live already")
    return length


def unknown(request: int) -> UnknownRequest:
    """The error for a request that is not live."""
    return UnknownRequest(f"request {request} is not live")


def check_config(config: PolicyConfig, *, evictions: tuple[str, ...] = ("lru",)) -> None:
    """Raises ValueError for a size below 1, a watermark outside 0..1, or an order of eviction not among `evictions`."""
    if config.block_size < 1:
        raise ValueError(f"block_size must be 1 or more, not {config.block_size}")
    if config.pool_tokens < config.block_size:
        raise ValueError(f"a pool of {config.pool_tokens} slots holds no block of {config.block_size}")
    if not 0.0 <= config.watermark <= 1.0:
        raise ValueError(f"watermark is a share between 0 and 1, not {config.watermark}")
    if config.eviction not in evictions:
        raise ValueError(f"eviction {config.eviction!r} is not offered; there is {', '.join(evictions)}")


def longest_run(numbers: list[int] | npt.NDArray[np.int32], fresh: int, end: int) -> int:
    """Longest stretch of consecutive numbers among `numbers` (distinct, all below `fresh`) and fresh..end-1.

    O(k log k) in the k numbers, none of it in the pool: the part never handed out is one stretch."""
    if not len(numbers):
        return end - fresh
    marks = np.sort(np.asarray(numbers, dtype=np.int64))
    edges = np.flatnonzero(np.diff(marks) != 1)
    starts = np.concatenate(([0], edges + 1))
    ends = np.concatenate((edges, [len(marks) - 1]))
    lengths = ends - starts + 1
    best = int(lengths.max())
    last = int(lengths[-1]) if int(marks[-1]) == fresh - 1 else 0
    return max(best, end - fresh + last)


def picture(held: npt.NDArray[np.int64], block_size: int) -> bytes:
    """`held[b]` tokens lie in block b -> one byte a block, or a bucket of equally many blocks if there are too many."""
    if not len(held):
        return b""
    wide = -(-len(held) // PICTURE_BYTES)
    edges = np.arange(0, len(held), wide)
    sums = np.add.reduceat(held, edges)
    blocks = np.diff(np.append(edges, len(held)))
    return bytes(np.minimum(sums * 255 // (blocks * block_size), 255).astype(np.uint8).tobytes())
