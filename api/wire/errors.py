"""What goes wrong between a client and the daemon: one tree, one table to and from the codes of the wire.

    KvslotError
    ├── PeerFault               the other side broke the protocol: the connection ends
    ├── Disconnected            the connection ended, or there was none
    └── Refused                 the request changed nothing, and the message says why; life goes on
        ├── BadRequest       1  malformed, or out of range
        ├── NotFound         2  no such namespace, sequence, session, pin, ticket, pool or setting
        ├── Ended            3  it was there, and has ended
        ├── Denied           4  not this client's: another session's, or a control verb without permission
        ├── OutOfTurn        5  not allowed in this state
        ├── Exists           6  the sequence is running, and this is not the same request again
        ├── Unsupported      7  known, and not in this version
        ├── TooLarge         8  beyond a limit on size or number
        ├── Busy             9  too many sessions, or the daemon is starting
        ├── StaleSession    10  of an earlier boot of the daemon, or a session that is no more
        ├── ShuttingDown    11  the daemon is draining
        └── WrongVersion    12  of the protocol, or another layout than the pool's

Codes are never used again for anything else.  A broken invariant of our own is an AssertionError and goes through.
"""

from __future__ import annotations

from typing import ClassVar


class KvslotError(Exception):
    """Whatever this package raises on purpose towards a client's user."""


class PeerFault(KvslotError):
    """The other side sent what the protocol does not allow."""


class Disconnected(KvslotError):
    """There is no connection, or no longer."""


class Refused(KvslotError):
    """The request was refused and changed nothing."""

    code: ClassVar[int] = 0


class BadRequest(Refused):
    code = 1


class NotFound(Refused):
    code = 2


class Ended(Refused):
    code = 3


class Denied(Refused):
    code = 4


class OutOfTurn(Refused):
    code = 5


class Exists(Refused):
    code = 6


class Unsupported(Refused):
    code = 7


class TooLarge(Refused):
    code = 8


class Busy(Refused):
    code = 9


class StaleSession(Refused):
    code = 10


class ShuttingDown(Refused):
    code = 11


class WrongVersion(Refused):
    code = 12


CODES: dict[int, type[Refused]] = {
    each.code: each
    for each in (
        BadRequest, NotFound, Ended, Denied, OutOfTurn, Exists, Unsupported, TooLarge, Busy, StaleSession,
        ShuttingDown, WrongVersion,
    )
}  # fmt: skip


def refusal(code: int, message: str) -> Refused:
    """The exception of an Error reply; of a code that this version does not know, plain `Refused`."""
    return CODES.get(code, Refused)(message)
