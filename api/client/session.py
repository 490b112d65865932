"""What a client knows of its session: running sequences, what is to be said, what is still to be answered.

    posted, refills ──► pack ──► one Batch frame ──► outstanding ──► apply(Results) ──► tables

No socket here: `pack` makes frames, `apply` takes messages, in the order of the stream.  The blocking client and the
asyncio one both stand on it.

Refills.  A table whose run is half used asks for more (`ask`); the question leaves with the next frame, its answer is
applied when it comes.  A LATER is asked again when its ticket is Ready or its time is over.  Questions that have time
wait for each other: a step sends none of them on alone as long as each sequence has a quarter of a run left, and none
has waited for more than three sixteenths of a run's steps.  So the answer is there a quarter of a run ahead of need,
and a frame carries the questions of several steps.
"""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import Any, Final

import msgspec

from kvslot.api.client.table import NEVER, QUEUED, SENT, SETTLED, Table
from kvslot.api.wire import HEAD, KvslotError, PeerFault, Refused, TooLarge, encode, messages, refusal
from kvslot.api.wire.messages import (
    Abandoned,
    Admitted,
    Batch,
    Commit,
    Committed,
    Done,
    Draining,
    Error,
    Extend,
    Fork,
    Free,
    Grown,
    Later,
    Moved,
    Never,
    Preempt,
    Pressure,
    Published,
    Ready,
    Results,
    Trim,
    Trimmed,
)

PUSHES: Final = frozenset((Ready, Published, Abandoned, Preempt, Pressure, Draining, Moved))
VERB_BYTES: Final = 64  # more than a verb without tokens takes on the wire

Event = Ready | Published | Abandoned | Preempt | Pressure | Draining
Verb = Extend | Free | Trim | Commit


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a client has done since it was made."""

    frames_sent: int
    frames_received: int
    calls: int  # synchronous round trips
    waits: int  # of those: appends that had to wait for room, since no refill had come in time
    batches: int  # frames of refills, posted frees and trims
    refills: int  # runs asked for ahead of need
    refused: int  # ... and answered LATER, NEVER or with an error
    pushes: int
    posted_errors: int  # posted verbs that the daemon refused; `last_error` says why
    moves: int  # ranges of tables that the daemon has moved elsewhere
    sequences: int  # running now
    steps_submitted: int
    steps_completed: int


class Session:
    """The state behind a client."""

    __slots__ = (
        "asked_back",
        "batches",
        "calls",
        "epoch",
        "events",
        "given_up",
        "last_error",
        "limits",
        "moved",
        "moves",
        "news",
        "outstanding",
        "posted",
        "posted_errors",
        "pushes",
        "quantum",
        "refills",
        "refills_sent",
        "refused",
        "sequences",
        "tickets",
        "waiting",
        "waits",
        "_commits",
        "_held",
        "_id",
        "_sequence",
    )

    def __init__(self, limits: messages.Limits, quantum: int, first: int) -> None:
        self.limits = limits
        self.quantum = quantum
        self.sequences: dict[int, Table] = {}
        self.posted: list[tuple[Verb, Table | None]] = []
        self.refills: list[Table] = []
        # Frames whose reply is still to come, oldest first: their id, and who waits for each of their results; or the
        # request of a call that was given up.
        self.outstanding: deque[tuple[int, list[tuple[Verb, Table | None]] | msgspec.Struct]] = deque()
        self.waiting: dict[int, Table] = {}  # tickets of refills
        self.tickets: dict[int, bool] = {}  # those an `admit` waits with, and whether it is time to ask again
        self.events: dict[tuple[str, int], Event] = {}
        self.epoch = 0  # of the last Moved that was received
        self.moved: list[Table] = []  # those that it, or others before it, will change when a step begins
        self.moves = 0  # how many have been received
        self.news = 0  # pushes of other kinds
        self.asked_back = False  # Pressure: second runs are to be given back
        self.last_error: KvslotError | None = None
        self.batches = self.calls = self.waits = self.refills_sent = self.refused = 0
        self.pushes = self.posted_errors = 0
        self.given_up = 0  # calls among `outstanding` whose caller was interrupted
        self._commits = False  # whether any of `posted` carries tokens
        self._held = 0  # steps that the present refills have waited for others
        self._id = 0
        self._sequence = first

    def begin_anew(self, limits: messages.Limits) -> None:
        """Nothing that was said or asked counts any more; the sequences have been forgotten."""
        self.limits = limits
        self.posted.clear()
        self.refills.clear()
        self.outstanding.clear()
        self.waiting.clear()
        self.tickets.clear()
        self.events.clear()
        self.moved.clear()
        self.epoch = self.given_up = 0
        self.asked_back = self._commits = False

    def next_id(self) -> int:
        """A number for the next request."""
        self._id = number = self._id + 1
        return number

    def next_sequence(self) -> int:
        """A number for the next sequence, never used before in this session."""
        self._sequence = number = self._sequence + 1
        return number

    @property
    def due(self) -> bool:
        """Whether `pack` has anything to say."""
        return bool(self.posted or self.refills or self.asked_back)

    # -- what is to be said --------------------------------------------------------------------------------------

    def ask(self, table: Table) -> None:
        """More room for `table`, with the next frame."""
        if table._asked == SETTLED:
            table._asked = QUEUED
            self.refills.append(table)

    def post(self, verb: Verb, table: Table | None) -> None:
        """`verb` with the next frame."""
        if type(verb) is Commit:
            self._commits = True
        self.posted.append((verb, table))

    def pressing(self) -> bool:
        """At the end of a step: whether anything is due that has no time to wait for the next one."""
        if self.posted or self.asked_back:
            return True
        if not self.refills:
            return False
        self._held = held = self._held + 1
        quantum = self.quantum
        if held >= quantum * 3 >> 4:
            return True
        least = quantum >> 2
        return any(table.capacity - table._slot - table._base <= least for table in self.refills)

    def pack(self, submitted: int, completed: int, fence: int) -> list[bytes]:
        """All that is to be said, as frames: one, unless a limit of the daemon asks for more."""
        if self.asked_back:
            self._give_back(fence)
        items, self.posted = self.posted, []
        refills = self.refills
        if refills:
            self.refills = []
            self._held = 0
            for table in refills:
                if table._asked != QUEUED:
                    continue  # freed or cut since
                table._asked = SENT
                answer = table._answer
                ticket = answer.ticket if type(answer) is Later else 0
                written = (
                    table._slot + table._base
                    if submitted == completed
                    else table._finished(submitted, completed)
                )
                items.append((Extend(1, table.id, written, 0, ticket), table))
            self.refills_sent += len(refills)
        frames: list[bytes] = []
        if not items:
            return frames
        most = self.limits.batch
        if len(items) <= most and not self._commits:
            self._frame(items, frames)
            return frames
        self._commits = False
        first = size = 0
        for i, (verb, _) in enumerate(items):
            cost = VERB_BYTES + (len(verb.tokens) if type(verb) is Commit else 0)
            if i > first and (i - first >= most or size + cost > self.limits.frame_bytes):
                self._frame(items[first:i], frames)
                first, size = i, 0
            size += cost
        self._frame(items[first:], frames)
        return frames

    def _frame(self, items: list[tuple[Verb, Table | None]], frames: list[bytes]) -> None:
        number = self.next_id()
        self.outstanding.append((number, items))
        self.batches += 1
        frames.append(encode(Batch(number, [verb for verb, _ in items])))

    def fits(self, frame: bytes) -> bytes:
        """`frame`, unless the daemon would hang up over it: TooLarge."""
        if len(frame) - HEAD > self.limits.frame_bytes:
            raise TooLarge(
                f"a request of {len(frame) - HEAD} bytes: the daemon takes {self.limits.frame_bytes} (frame_bytes)"
            )
        return frame

    def _give_back(self, fence: int) -> None:
        """Second runs go back: the daemon decides what of the room behind the last token stays."""
        waits = False
        for table in self.sequences.values():
            length = table.length
            if table.capacity - length <= self.quantum:
                continue
            if table._asked != SETTLED:
                waits = waits or table._asked == SENT
                continue
            table._give_up(length)
            table._mark = NEVER
            table._asked = SENT
            table._seat(length)
            self.posted.append((Trim(1, table.id, 0, length, fence), table))
        self.asked_back = waits

    def retry(self, now: float) -> None:
        """Asks again for those whose LATER has lasted long enough."""
        for ticket in [ticket for ticket, table in self.waiting.items() if table._retry_at <= now]:
            self.ask(self.waiting.pop(ticket))

    def statistics(self, sent: int, received: int, submitted: int = 0, completed: int = 0) -> Statistics:
        """What its client has done, with the frames and steps that only the client counts."""
        return Statistics(
            frames_sent=sent,
            frames_received=received,
            calls=self.calls,
            waits=self.waits,
            batches=self.batches,
            refills=self.refills_sent,
            refused=self.refused,
            pushes=self.pushes,
            posted_errors=self.posted_errors,
            moves=self.moves,
            sequences=len(self.sequences),
            steps_submitted=submitted,
            steps_completed=completed,
        )

    def forget(self, table: Table, fault: KvslotError) -> None:
        """The sequence has ended."""
        del self.sequences[table.id]
        answer = table._answer
        if type(answer) is Later:
            self.waiting.pop(answer.ticket, None)
        table._asked = SETTLED
        table._end(fault)

    # -- what is said to us --------------------------------------------------------------------------------------

    def apply(self, message: messages.Outgoing) -> bool:
        """Takes over a push, or the replies to a packed frame; False when it is the reply to a call."""
        if isinstance(message, Results):
            return self._results(message)
        kind = type(message)
        if kind in PUSHES:
            self._push(message)
            return True
        if self.outstanding:
            number, given_up = self.outstanding[0]
            if isinstance(given_up, list):
                if type(message) is Error and not message.id:
                    return False  # the stream ends here
                raise PeerFault(f"{kind.__name__} came where the Results of {number} were due")
            if getattr(message, "id", -1) != number:
                raise PeerFault(f"{kind.__name__} came where the reply to {number} was due")
            self.outstanding.popleft()
            self.given_up_reply(given_up, message)
            return True
        return False

    def _results(self, message: Results) -> bool:
        if not self.outstanding:
            return False
        number, items = self.outstanding[0]
        if message.id != number:
            raise PeerFault(f"the results of request {message.id} came where those of {number} were due")
        self.outstanding.popleft()
        if not isinstance(items, list):
            self.given_up_reply(items, message)
            return True
        if len(message.results) != len(items):
            raise PeerFault(f"{len(message.results)} results for a Batch of {len(items)}")
        for (verb, table), result in zip(items, message.results, strict=True):
            if isinstance(result, Grown):
                if table is not None and table._fault is None:
                    table._grown(result)
                # else it has ended since, and what was given went back with it
            elif isinstance(result, Done):
                continue
            elif isinstance(result, Error):
                self._failed(verb, table, refusal(result.code, result.message))
            elif table is None or table._fault is not None:
                continue
            elif isinstance(result, Later | Never):
                self.denied(table, result)
            elif isinstance(result, Trimmed) and isinstance(verb, Trim):
                if verb.keep_to >= 0:
                    table._trimmed(verb.keep_to, result.capacity, result.extents)
            elif not isinstance(result, Committed):
                raise PeerFault(f"{type(result).__name__} is no answer to {type(verb).__name__}")
        return True

    def shown(self, table: Table) -> int:
        """Up to where calls that were given up may have told of `table`, shared it with a fork, or cut it."""
        shown = 0
        for _, request in self.outstanding:
            if isinstance(request, list):
                continue  # what was posted counts as told since then
            for verb in request.verbs if isinstance(request, Batch) else (request,):
                if isinstance(verb, Commit | Fork) and verb.sequence == table.id:
                    shown = max(shown, verb.length)
                elif isinstance(verb, Trim) and verb.sequence == table.id:
                    shown = NEVER
        return shown

    def first_room(self, child: Table, answer: messages.BatchReply) -> None:
        """What came of the room asked for together with a fork."""
        match answer:
            case Grown():
                child._grown(answer)
            case Later() | Never():
                self.denied(child, answer)
            case Error():
                child._refused(refusal(answer.code, answer.message), monotonic())
            case _:
                raise PeerFault(f"{type(answer).__name__} is no answer to Extend")

    def denied(self, table: Table, answer: Later | Never) -> None:
        """No more room for `table` now."""
        self.refused += 1
        table._refused(answer, monotonic())
        if type(answer) is Later:
            self.waiting[answer.ticket] = table

    def _failed(self, verb: Verb, table: Table | None, error: Refused) -> None:
        if table is None or table._fault is not None:
            if type(verb) is Free or table is None:
                self._note(error)
            return
        if type(verb) is Extend:
            self.refused += 1
            table._refused(error, monotonic())
            return
        self._note(error)
        if type(verb) is Commit:
            # The daemon did not take those tokens: what comes after them must not be told as if it had.
            table._spoiled = error
        else:
            table._refused(error, monotonic())

    def _note(self, error: Refused) -> None:
        self.posted_errors += 1
        self.last_error = error

    def given_up_reply(self, request: msgspec.Struct, message: messages.Outgoing) -> None:
        """The reply to a call whose caller was interrupted: a sequence nobody knows of is freed, others are told."""
        self.given_up -= 1
        match request, message:
            case messages.Allocate(), Admitted():
                self.post(Free(0, request.sequence), None)
            case Batch(), Results():
                for verb, result in zip(request.verbs, message.results, strict=True):
                    if isinstance(verb, Fork) and isinstance(result, messages.Forked):
                        self.post(Free(0, verb.child), None)
                        parent = self.sequences.get(verb.sequence)
                        if parent is not None:
                            parent._own_from = max(parent._own_from, result.length)
            case messages.Reclaim(), messages.Reclaimed():
                self.post(Free(0, request.sequence), None)  # it was told that it ended
            case ((Commit() | Extend() | Trim()), _):
                table = self.sequences.get(request.sequence)
                if table is None:
                    return
                match message:
                    case Committed() if isinstance(request, Commit):
                        table._was_told(request.length)
                    case Grown():
                        table._grown(message)
                    case Later() | Never():
                        self.denied(table, message)
                    case Trimmed() if isinstance(request, Trim):
                        table._trimmed(request.keep_to, message.capacity, message.extents)
                    case _:
                        pass
            case _:
                pass

    def _push(self, message: Any) -> None:
        self.pushes += 1
        kind = type(message)
        if kind is Moved:
            self._move(message)
            return
        self.news += 1
        if kind is Ready or kind is Published or kind is Abandoned:
            ticket: int = message.ticket
            table = self.waiting.pop(ticket, None)
            if table is not None:
                table._retry_at = 0.0
                self.ask(table)
            elif ticket in self.tickets:
                self.tickets[ticket] = True
            else:
                self._event(("ticket", ticket), message)
        elif kind is Preempt:
            victim = self.sequences.get(message.sequence)
            if victim is not None:
                victim.preempt_by = monotonic() + message.deadline_ms / 1e3
                self._event(("preempt", message.sequence), message)
        elif kind is Pressure:
            self.asked_back = True
            self._event(("pressure", 0), message)
        elif kind is Draining:
            self._event(("draining", 0), message)

    def _move(self, message: Moved) -> None:
        """Part of a table lies elsewhere from the next step on; what is said again after a reconnect is known.

        An interrupt may come between any two lines: what is lost by that is missed later, and never taken for heard.
        """
        if message.epoch <= self.epoch:
            return
        if message.epoch != self.epoch + 1:
            # To go on would be to read, one day, what is another's.
            raise PeerFault(f"moves {self.epoch + 1} to {message.epoch - 1} were never told")
        table = self.sequences.get(message.sequence)
        if (
            table is not None
        ):  # else it is freed; or a fork whose answer is to come, and then its parent is told, too
            if not table._moved:
                self.moved.append(table)
            table._will_move(message.position, message.extents)
        self.moves += 1
        self.epoch = message.epoch

    def follow(self) -> None:
        """A step begins: all tables go by what has been moved since the one before."""
        moved = self.moved
        while moved:
            table = moved[-1]
            if table._moved and table._fault is None:
                table._follow()
            moved.pop()  # last: where an interrupt comes, it is done again

    def _event(self, key: tuple[str, int], message: Event) -> None:
        """Of what is said twice the last counts: a client that never looks keeps no more than it has sequences."""
        if len(self.events) >= 2 * self.limits.sequences and key not in self.events:
            del self.events[next(iter(self.events))]
        self.events[key] = message
