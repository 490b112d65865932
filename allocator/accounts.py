"""Accounts: what one tenant holds of a pool over all of its sessions, and the most that it may.

    charged     slots of its own: private, fenced and quarantined ones, as a session is charged them
    unwritten   of those the room that stands ready in its running sequences' growth runs
    spaces      namespaces of its that there are, open or with anything cached
    pinned      tokens that pins in those keep

They are sums kept where slots change hands, so that a check is a comparison.  What a tenant has published is
everybody's of its namespaces and not charged, even while it alone reads it, as with a session's own quota.  What pins
keep of it has a limit of its own.

A namespace belongs to the account of its tenant, or to `everyone`, which all tenants without one share: who invents
names gains nothing by it.  Of the limits that hold for a request the narrowest is the one that is named.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from kvslot.allocator.results import UNLIMITED

if TYPE_CHECKING:
    from kvslot.allocator.sessions import Session


class Quota(StrEnum):
    """Which limit binds; empty: the pool itself."""

    NONE = ""
    SESSION = "session"  # slots of one session
    SLOTS = "slots"  # ... of a tenant, over all its sessions
    RUNS = "reserved_runs"  # growth runs that stand ready and unwritten in a tenant's sequences


class Account:
    """A tenant's sums and limits, in slots but for `spaces`."""

    __slots__ = (
        "ceiling",
        "charged",
        "fenced",
        "name",
        "pinned",
        "pins",
        "room",
        "slots",
        "spaces",
        "unwritten",
    )

    def __init__(
        self, name: str = "", *, slots: int = UNLIMITED, room: int = UNLIMITED, pins: int = UNLIMITED
    ) -> None:
        self.name = name
        self.charged = 0
        self.fenced = 0  # of the charged ones
        self.unwritten = 0
        self.spaces = 0
        self.pinned = 0
        self.slots = slots  # most of `charged`
        self.room = room  # of `unwritten` from which on no more growth runs are handed out
        self.pins = pins  # most of `pinned`
        self.ceiling = slots  # what `charged` cannot have passed: more than `slots` after that was lowered

    def left(self) -> int:
        """Slots that may still be taken."""
        return UNLIMITED if self.slots >= UNLIMITED else self.slots - self.charged

    def limit(self, *, slots: int, room: int, pins: int) -> None:
        """Other limits from now on; who holds more than that keeps it and gets no more."""
        self.slots, self.room, self.pins = slots, room, pins
        self.ceiling = max(slots, self.charged)


def narrowest(session: Session, account: Account, usable: int) -> tuple[int, Quota]:
    """The most slots that one sequence may ever have, and the quota that says so."""
    if usable <= session.quota and usable <= account.slots:
        return usable, Quota.NONE
    if session.quota <= account.slots:
        return session.quota, Quota.SESSION
    return account.slots, Quota.SLOTS


def left_under(session: Session, account: Account, quota: Quota) -> tuple[int, int, int]:
    """(slots left, slots coming free, the limit) under a quota that binds."""
    if quota is Quota.SESSION:
        return max(0, session.quota - session.charged), session.fenced, session.quota
    if quota is Quota.RUNS:
        return max(0, account.room - account.unwritten), 0, account.room
    return max(0, account.slots - account.charged), account.fenced, account.slots
