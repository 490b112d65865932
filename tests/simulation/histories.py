"""The kinds of histories a seed can stand for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from .driver import Driver
from .liveness import Load


def chaos(seed: int, say: Callable[[str], None] | None = None) -> Counter[str]:
    """Everything at once, in no order."""
    return Driver(seed, say=say).run().tally


def load(seed: int, say: Callable[[str], None] | None = None) -> Counter[str]:
    """More than the pool bears; everybody gets through."""
    return Load(seed, say=say).run().tally


KINDS: dict[str, Callable[..., Counter[str]]] = {"chaos": chaos, "load": load}
