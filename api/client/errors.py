"""What a client's user may have to handle beside what the daemon refuses; the same tree as the wire's.

    KvslotError
    ├── Disconnected             no daemon there, or the connection ended: nothing more can be asked of this client
    │   ├── Closed               the client was closed by its own user
    │   └── WrongProcess         the client belongs to the process that this one was forked from
    ├── NeverFits                the request would not fit an empty pool under this quota
    ├── OutOfRoom                a running sequence cannot grow now; `answer` says why and what would help
    ├── AdmissionTimeout         (a TimeoutError, too) memory did not come free in time; the ticket was given back
    └── Refused ...              see kvslot.api.wire.errors; `Ended` is also what a freed Sequence raises
        └── Lost                 (an Ended) the sequence did not survive the loss of the connection

`Later` and `Never` are answers, not errors: `allocate` returns them, `admit` and `append` turn them into these.
"""

from __future__ import annotations

from kvslot.api.wire import Disconnected, Ended, KvslotError
from kvslot.api.wire.messages import Later, Never


class Closed(Disconnected):
    """The client was closed."""


class WrongProcess(Disconnected):
    """The client belongs to the parent of this process."""


class Lost(Ended):
    """`Client.reconnect` ended this sequence; start it over.  Only `free` may still be called, and does nothing.

    It was being given other slots for tokens that it has already, and the answer that said which is lost; or the daemon
    was restarted, and the sequence is one of those that cannot go on.
    """


def _whose(answer: Never) -> str:
    """What has the limit of a Never."""
    match answer.quota:
        case "":
            return "that the pool has"
        case "session":
            return "that this session may ever have (quota session)"
        case quota:
            return f"that this tenant may ever have (quota {quota})"


def _why(answer: Later) -> str:
    """The reason, and the quota where one binds."""
    return f"{answer.reason}; quota {answer.quota}, {answer.limit}" if answer.quota else answer.reason


class NeverFits(KvslotError):
    """The request would not fit an otherwise empty pool under this quota.

    `needed` and `limit` are in slots.
    """

    def __init__(self, answer: Never) -> None:
        super().__init__(
            f"the request needs {answer.needed} slots and {answer.limit} is all {_whose(answer)}: "
            "shorten it, or give the session a larger quota or the daemon a larger pool"
        )
        self.needed = answer.needed
        self.limit = answer.limit


class OutOfRoom(KvslotError):
    """A running sequence has used all its slots, and more are not to be had now.

    `answer` is the daemon's Later or Never (None where it refused with an error, which is then the cause).  The
    sequence is intact: free another one, or this one, or try again after `answer.retry_after_ms`.
    """

    def __init__(self, sequence: int, length: int, answer: Later | Never | None) -> None:
        match answer:
            case Later():
                why = (
                    f"{answer.needed} slots are needed; {answer.free_now} free, {answer.coming_free} coming free, "
                    f"{answer.evictable} evictable ({_why(answer)}): free a sequence, or append again in "
                    f"{answer.retry_after_ms} ms"
                )
            case Never():
                why = (
                    f"{answer.needed} slots are needed and {answer.limit} is the limit, all {_whose(answer)}: it "
                    "can grow no further; end it, or give the session a larger quota or the daemon a larger pool"
                )
            case _:
                why = "the daemon refused to let it grow"
        super().__init__(f"sequence {sequence} has no room after {length} tokens: {why}")
        self.answer = answer


class AdmissionTimeout(KvslotError, TimeoutError):
    """Memory for a request did not come free in the time its caller gave it.

    `answer` is the last Later; its ticket was withdrawn.
    """

    def __init__(self, seconds: float, answer: Later) -> None:
        super().__init__(
            f"no room within {seconds:g} s: {answer.needed} slots are needed; {answer.free_now} free, "
            f"{answer.coming_free} coming free, {answer.evictable} evictable ({_why(answer)})"
        )
        self.answer = answer
