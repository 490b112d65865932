"""What the tree and the pool ask of an eviction policy."""

from __future__ import annotations

from typing import Protocol


class Evictor(Protocol):
    """Decides which evictable leaf goes first.  Node numbers index flat columns of the policy.

    A *leaf* here is a node without children that nobody holds: exactly those are queued.  The tree says when a node
    becomes one (`add`, `exposed`) and when it ceases to be one (`discard`); the policy names victims (`oldest`).

    History is told only to a policy that `learns`, so that one which does not costs nothing: every caller asks for that
    flag first.  All calls are O(1), amortised where a policy says so.
    """

    @property
    def name(self) -> str:
        """As in the configuration."""
        ...

    @property
    def learns(self) -> bool:
        """Whether the calls under "history" are to be made.  Never changes."""
        ...

    # -- the queue ---------------------------------------------------------------------------------------------

    def resize(self, nodes: int) -> None:
        """Room for node numbers below `nodes`."""

    def add(self, node: int, length: int) -> None:
        """`node`, of `length` tokens, became an evictable leaf because its last hold ended."""

    def exposed(self, node: int, length: int, used_alone: bool) -> None:
        """`node` became an evictable leaf as its last child was evicted; `used_alone`: it was used since that child."""

    def discard(self, node: int) -> None:
        """`node` is no evictable leaf any more, if it was one: held, given a child, or removed."""

    def oldest(self) -> int:
        """The next victim, or 0 when there is no leaf."""
        ...

    def candidates(self, most: int) -> list[int]:
        """The next victim and at most `most` - 1 others that may go in its place at no or little loss."""
        ...

    def victims(self, most: int) -> list[int]:
        """At most `most` leaves, the next victims first; all of them for a `most` as large as their number."""
        ...

    def clock(self, now: float) -> None:
        """The time, told before victims are asked for; for policies whose priorities expire."""

    def split(self, upper: int, lower: int, at: int) -> None:
        """The first `at` tokens of `lower` became `upper`, which is no leaf; `lower` keeps its number and its place."""

    def bytes_used(self) -> int:
        """Bytes of the columns."""
        ...

    # -- history: only where `learns` ---------------------------------------------------------------------------

    def reuse(self, node: int, whole: bool, ghost: int) -> int:
        """A sequence was admitted, of whose prompt `node` (0: nothing) is the deepest that is cached.

        `whole`: down to its last token.  `ghost`: the place where the cached part stops (`PrefixTree.place`), 0 where
        it stops within a node or with the prompt.  Returns the sequence's past, for `created`; 0 for one without.
        """
        ...

    def created(self, node: int, parent: int, past: int, output: bool) -> None:
        """A sequence with that `past` published `node` below `parent`; `output`: past its prompt."""

    def branched(self, node: int) -> None:
        """`node` got a second child (or third...): its paths part behind it."""

    def ended(self, node: int) -> None:
        """A sequence ended whose cached part ends with `node`."""

    def trimmed(self, node: int, length: int, ghost: int) -> None:
        """The tail of the leaf `node` is being evicted; `length` tokens stay; `ghost`: the place of the cut."""

    def forget(self, node: int, parent: int, ghost: int) -> None:
        """The leaf `node` is being evicted, before its `discard`; what stays ends with `parent`; `ghost`: the cut."""
