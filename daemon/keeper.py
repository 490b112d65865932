"""Pins that an operator asked for: of one pool, for as long as the daemon runs or until they are ended.

A session's pins end with it, which is right for an engine and useless for who types a command.  So the daemon keeps
these in a session of its own, which is open while there are any: to the core they are pins like all others, under the
same limit (`pin_share`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from kvslot.allocator import Session, Space
from kvslot.api.wire import NotFound, TooLarge

if TYPE_CHECKING:
    from kvslot.allocator import Pool

PINS_MOST: Final = 4096
"""Of one pool: they are listed whole."""


class Kept(msgspec.Struct, frozen=True):
    """One pin."""

    pin: int
    namespace: int
    tokens: int
    since: float
    """On time.monotonic's clock."""
    by: str


class Keeper:
    """The operators' pins of one pool."""

    def __init__(self, core: Pool) -> None:
        self._core = core
        self._session: Session | None = None
        self.pins: dict[int, Kept] = {}

    @property
    def open(self) -> bool:
        """Whether there is a session for pins, which is one of the core's and nobody's."""
        return self._session is not None

    def pin_node(self, node: int, length: int, by: str) -> Kept:
        """Keeps the prefix of `length` tokens that ends with a node; raises NotFound where that is not so."""
        core = self._core
        tree = core.tree
        if not (
            0 < node < len(tree.keys) and tree.parent[node] and tree.depth[node] + tree.length[node] == length
        ):
            raise NotFound(
                f"no prefix of {length} tokens ends with node {node} (any more): list prefixes again"
            )
        path = tree.path_to(node)
        return self._pin(tree.parent[path[0]], b"".join([tree.keys[each] for each in path]), by)

    def pin_tokens(self, space: Space, tokens: bytes, by: str) -> Kept:
        """Keeps what is cached of these tokens; raises NotFound where nothing is."""
        core = self._core
        root = next((number for number, each in core.roots.items() if each == space), 0)
        if not root:
            raise NotFound("no such namespace is open in this pool")
        return self._pin(root, tokens, by)

    def unpin(self, pin: int) -> Kept:
        """Ends one; raises NotFound where there is none such."""
        kept = self.pins.pop(pin, None)
        if kept is None or self._session is None:
            raise NotFound(f"no pin {pin}; pins of sessions end with those")
        self._core.unpin(self._session, pin)
        self._close_if_unused()
        return kept

    def _pin(self, root: int, tokens: bytes, by: str) -> Kept:
        session = self._open()
        try:
            handle, length = self._core.pin(session, root, tokens, bounded=False)
        finally:
            self._close_if_unused()
        if not handle:
            raise NotFound("nothing of these tokens is cached")
        kept = self.pins[handle] = Kept(handle, root, length, time.monotonic(), by)
        return kept

    def _open(self) -> Session:
        if len(self.pins) >= PINS_MOST:
            raise TooLarge(f"{PINS_MOST} pins are kept, which is the most")
        if self._session is None:
            self._session = self._core.open_session()
        return self._session

    def _close_if_unused(self) -> None:
        if self._session is not None and not self._session.pins:
            self._core.bye(self._session)
            self._session = None
