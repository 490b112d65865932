"""The kinds of histories a seed can stand for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from .compacting import Compacting
from .driver import Driver
from .liveness import Load


def chaos(seed: int, say: Callable[[str], None] | None = None) -> Counter[str]:
    """Everything at once, in no order."""
    return Driver(seed, say=say).run().tally


def load(seed: int, say: Callable[[str], None] | None = None) -> Counter[str]:
    """More than the pool bears; everybody gets through."""
    return Load(seed, say=say).run().tally


def moves(seed: int, say: Callable[[str], None] | None = None) -> Counter[str]:
    """Plans and moves without end, at every phase of which something else happens."""
    return Compacting(seed, say=say).run().tally


KINDS: dict[str, Callable[..., Counter[str]]] = {"chaos": chaos, "load": load, "moves": moves}
