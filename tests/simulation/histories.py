"""The kinds of histories a seed can stand for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from .driver import Driver


def chaos(seed: int, say: Callable[[str], None] | None = None) -> Counter[str]:
    """Everything at once, in no order."""
    return Driver(seed, say=say).run().tally


KINDS: dict[str, Callable[..., Counter[str]]] = {"chaos": chaos}
