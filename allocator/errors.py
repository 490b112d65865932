"""What the core refuses, and how.

    Refusal                    the call had no effect; the caller may go on
    ├── BadRequest             malformed or out of range: says the value and the limit
    ├── UnknownHandle          no such sequence, session, pin or move was ever given out
    ├── EndedHandle            it was, and has ended
    ├── ForeignHandle          it belongs to another session
    └── OutOfTurn              not allowed in this state, e.g. a verb on a lost session

A request that memory cannot serve is not an error but an answer: `Later` or `Never` (results.py).  A broken invariant
is an AssertionError: our own fault, and the process must stop.
"""

from __future__ import annotations


class Refusal(Exception):
    """The call was refused and changed nothing."""


class BadRequest(Refusal):
    """An argument is malformed or beyond a limit."""


class UnknownHandle(Refusal):
    """The handle was never given out in this boot."""


class EndedHandle(Refusal):
    """The handle's object has ended; handles are not used twice."""


class ForeignHandle(Refusal):
    """The handle's object belongs to another session."""


class OutOfTurn(Refusal):
    """The object exists but cannot do this now."""
