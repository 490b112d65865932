"""The policies a trace can be replayed under, by name.

Each stands in a module of its own and is imported only when asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import cast

from kvslot.allocator import EVICTIONS
from kvslot.replay.policies._base import (
    RUN_BLOCKS,
    UNKNOWN,
    Admitted,
    Compacting,
    Compaction,
    Counters,
    Gauges,
    Policy,
    PolicyConfig,
    Refused,
    Room,
    Shrinking,
)

__all__ = [
    "NAMES",
    "RUN_BLOCKS",
    "UNKNOWN",
    "Admitted",
    "Compacting",
    "Compaction",
    "Counters",
    "Gauges",
    "Policy",
    "PolicyConfig",
    "Refused",
    "Room",
    "Shrinking",
    "UnknownPolicy",
    "available",
    "evictions",
    "make",
    "register",
    "unregister",
]

NAMES: tuple[str, ...] = ("contiguous", "paged", "hashed", "token", "slotted")
"""In the order of the table's columns: from before paging to ours.  Module replay/policies/NAME.py holds a class
whose name is NAME capitalised + "Policy", taking one PolicyConfig."""

_registered: dict[str, Callable[[PolicyConfig], Policy]] = {}


class UnknownPolicy(ValueError):
    """No policy of that name, or its module is not installed."""


def register(name: str, factory: Callable[[PolicyConfig], Policy]) -> None:
    """Add a policy of one's own under `name` (for tests and experiments); it takes precedence over ours."""
    _registered[name] = factory


def unregister(name: str) -> None:
    """Take back what `register` added."""
    del _registered[name]


def available(name: str) -> bool:
    """Whether this installation has the policy."""
    return name in _registered or (name in NAMES and find_spec(f"kvslot.replay.policies.{name}") is not None)


def evictions(name: str) -> tuple[str, ...]:
    """The orders of eviction that the policy called `name` offers, its default first."""
    return EVICTIONS if name == "slotted" else EVICTIONS[:1]


def make(name: str, config: PolicyConfig) -> Policy:
    """A fresh instance of the policy called `name`.  Raises UnknownPolicy, or ValueError for a setting it refuses."""
    factory = _registered.get(name)
    if factory is not None:
        return factory(config)
    if name not in NAMES:
        raise UnknownPolicy(f"no policy is called {name!r}; there are {', '.join((*NAMES, *_registered))}")
    try:
        module = import_module(f"kvslot.replay.policies.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"kvslot.replay.policies.{name}":
            raise
        raise UnknownPolicy(f"policy {name!r} is not part of this installation") from error
    factory = cast("Callable[[PolicyConfig], Policy]", getattr(module, f"{name.capitalize()}Policy"))
    return factory(config)
