"""The engine's side of the wire: one blocking socket, one shared page, and no word to the daemon while decoding.

    with Client(page=16) as client:
        sequence = client.admit(prompt)
        while ...:
            with client.step():                     # replies of earlier steps are taken in here
                slot = sequence.append(token)       # arithmetic
                ... compute, read and write K and V through client.pool ...
                                                    # refills, frees and trims of this step leave here, in one frame
        sequence.commit()
        sequence.free()

A call (allocate, probe, ...) is one send and one receive.  What was posted before it goes ahead of it in the same send,
so that the daemon sees everything in the order of the program.

Moves.  In a session opened with `movable=True` the daemon may put what a sequence has published elsewhere.  It says so
on the socket; `submit` takes that over, all at once, at the begin of a step:

    tables change, EPOCH is stored, then SUBMITTED       from here on the old slots are read by steps under way at most

So a table, and whatever was made of one (index arrays), is good until the next step begins, and in a step those that
were looked up since its begin.  (`admit` does the same while it waits with no step under way: the next may be far.)

One thread at a time.  A child of a fork cannot use its parent's client: everything raises WrongProcess there, and
nothing reaches the parent's socket.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic_ns
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec

from kvslot.api.client.connection import Connection, close_all
from kvslot.api.client.errors import AdmissionTimeout, Closed, Lost, NeverFits, OutOfRoom
from kvslot.api.client.memory import PoolMemory, _inherited
from kvslot.api.client.sequence import Sequence
from kvslot.api.client.session import Event, Session, Statistics
from kvslot.api.client.table import QUEUED, SENT, SETTLED, Table, Tokens, freed, token_bytes
from kvslot.api.wire import (
    BEGAN,
    BUSY,
    COMPLETED,
    ENDED,
    EPOCH,
    PAGE_BYTES,
    PUSHES,
    SUBMITTED,
    VERSION,
    WAKE,
    BadRequest,
    Disconnected,
    KvslotError,
    Namespace,
    OutOfTurn,
    PeerFault,
    Refused,
    SessionPage,
    StaleSession,
    encode,
    messages,
    refusal,
)
from kvslot.api.wire.messages import (
    Admitted,
    Allocate,
    Batch,
    Commit,
    Done,
    Extend,
    Fork,
    Forked,
    Free,
    Grown,
    Later,
    Never,
    Results,
    Trim,
)

M = TypeVar("M", bound=msgspec.Struct)

LAST_ID: Final = 2**63 - 1  # of a request whose reply nobody waits for
UNHEARD: Final = -(1 << 62)  # there is no page that would tell of pushes: the socket is looked at every time
NAMESPACES_APART: Final = 1 << 40  # above every number that a daemon gives a namespace
WAIT_SECONDS: Final = 5.0  # longest sleep of a waiting call before it looks at its connection again


@dataclass(frozen=True, slots=True)
class Token:
    """What proves that a session is one's own: to join its group from another process, or to take it up again.

    Can be pickled; keep it as you keep a password.
    """

    session: int
    secret: bytes = field(repr=False)
    boot: int = 0


class Step:
    """One step of the engine, as a context: submitted on the way in, completed on the way out."""

    __slots__ = ("_client", "_number")

    def __init__(self, client: Client) -> None:
        self._client = client
        self._number = 0

    def __enter__(self) -> int:
        self._number = number = self._client.submit()
        return number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        client, number = self._client, self._number
        if error is None:
            client.complete(max(number, client._completed))
        elif client._completed == number - 1 and client._connection.fault is None:
            # What went wrong is told by `error`; the step is over all the same.  Where others before it are still
            # under way, nobody knows that they are over: `complete` is the engine's to call.
            with contextlib.suppress(KvslotError):
                client.complete(number)


class _Remains:
    """What a client leaves behind.  Knows nothing of the client, so that it can be dealt with when that is gone."""

    __slots__ = ("connection", "label", "page", "pid", "pool", "wake")

    def __init__(self, connection: Connection, pool: PoolMemory, page: SessionPage | None, wake: int) -> None:
        self.connection = connection
        self.pool = pool
        self.page = page
        self.wake = wake
        self.pid = os.getpid()
        self.label = f"the Client of pool {pool.name!r} at {connection.path}"

    def close(self, fault: KvslotError) -> None:
        """Closes all but the mapping of the pool."""
        self.connection.close(fault)
        if self.page is not None:
            self.page.close()
            self.page = None
        close_all([self.wake])
        self.wake = -1

    def finalize(self) -> None:
        """The client was let go without being closed: ends its session without waiting for anything, and warns."""
        if os.getpid() != self.pid:
            return
        bye = self.connection.fault is None
        try:
            self.pool.close()
        except BufferError:
            bye = False  # a view is still alive: the slots stay aside until this process ends
        if self.page is not None:
            bye = bye and self.page.words[SUBMITTED] == self.page.words[COMPLETED]
        if bye:
            with contextlib.suppress(KvslotError):
                self.connection.send(encode(messages.Bye(LAST_ID)))
        self.close(Closed("the client was let go without being closed"))
        warnings.warn(f"{self.label} was not closed", ResourceWarning, stacklevel=1)


class Client:
    """A session with the daemon, for an engine: blocking calls, local appends, views of the pool."""

    def __init__(
        self,
        socket: str = "",
        *,
        name: str = "",
        pool: str = "",
        namespace: Namespace | None = None,
        page: int = 1,
        append: str = "",
        peel_max: int = -1,
        movable: bool = False,
        map: bool = True,  # noqa: A002 - the word of the wire
        quota: int = 0,
        fingerprint: str = "",
        group: Token | None = None,
        resume: Token | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Connects and opens a session.

        `socket`: of the daemon ("": the usual place).  `name`: of this client, for people.  `pool`: which one ("": the
        first).  `namespace`: root of the prefix tree that requests go to unless they say otherwise.  `page`: slots per
        page of this engine's kernels.  `append`: "chain" or "peel"; `peel_max`: most tokens a peel copies.  `quota`: of
        slots; 0: what the pool allows.  `movable`: the engine looks its tables up in every step, so what it has
        published may be put elsewhere between two; with pages of 1 and append "chain" (then "" is "chain"), and not in
        a group.  `fingerprint`: of the layout that the engine was built for; another is refused.
        `group`: `token` of another process's client of the same engine.  `resume`: `token` of a client of this process
        that lost its connection.  `timeout`: seconds that any one answer may take.

        Raises Disconnected when there is no daemon, and what the daemon refuses with: StaleSession for a session of an
        earlier boot, WrongVersion for another layout, NotFound for a pool that is not there, ...
        """
        if movable:
            if page != 1 or append not in ("", "chain") or group is not None or not map:
                raise BadRequest(
                    'movable needs page=1, append="chain", the memory (map=True) and no group: only a table of single '
                    "slots, read by steps that the daemon can see, can follow what is moved"
                )
            append = "chain"
        self._connection: Connection
        self._timeout = timeout
        self._pid = os.getpid()
        self._submitted = self._completed = 0
        self._epoch = 0
        self._epochs_before = 0  # of sessions before a restart
        self._heard = 0
        self._page: SessionPage | None = None
        self._paged = True  # it is the present session's
        self._wake = -1
        self._closed = False
        self._page_slots = page
        self._peels = self._copying = False  # whether more room may come with copies; known with the Welcome
        self._namespaces: dict[Namespace, int] = {}
        self._renumbered: dict[
            int, int
        ] = {}  # namespaces that have other numbers since the daemon was restarted
        self._former: list[
            tuple[Token, int]
        ] = []  # sessions of earlier boots, and the last step that may use them
        self._deferred: deque[Callable[[], None]] = deque()
        self._returning = False  # in `reconnect`, where nothing may change beside it
        self._request = messages.Hello(
            1, VERSION, name or _program(), pool, namespace or Namespace(), fingerprint, page, append, peel_max,
            movable, map, quota, 0, 0, group.session if group else 0, group.secret if group else b"",
        )  # fmt: skip
        if group is not None and resume is not None:
            raise BadRequest("group joins a session and resume takes one up again: name one of them")
        welcome, descriptors = self._hello(socket, resume)
        try:
            self.pool = PoolMemory(welcome.pool, descriptors.get("pool", -1))
            self._take_page(descriptors)
        except BaseException:
            self._connection.close()
            close_all([self._wake])
            raise
        finally:
            close_all(each for what, each in descriptors.items() if what != "wake")
        self.namespace: int = welcome.namespace
        """The number of the namespace that requests go to unless they say otherwise."""
        self.limits = welcome.limits
        """What the daemon allows one session."""
        self.root = self._request.namespace
        """That namespace itself, as it was opened."""
        self.server = welcome.server
        """Name and version of the daemon, for people."""
        self.token = Token(welcome.session, welcome.secret, welcome.boot)
        """Proves that the session is one's own; see Token."""
        self._namespaces[self._request.namespace] = welcome.namespace
        first = time.monotonic_ns() if resume else 0  # what runs there already has other numbers
        self._peels = (self._request.append or welcome.pool.append) != "chain"
        self._copying = self._page_slots > 1 or self._peels
        self._session = Session(welcome.limits, welcome.pool.quantum, first)
        self._session.epoch = self._epoch
        self._listen()
        self._remains = _Remains(self._connection, self.pool, self._page, self._wake)
        self._finalizer = weakref.finalize(self, self._remains.finalize)
        _clients.add(self)
        self._release_unheard()

    # -- opening ---------------------------------------------------------------------------------------------------

    def _hello(self, socket: str, resume: Token | None) -> tuple[messages.Welcome, dict[str, int]]:
        connection = self._connection = Connection(socket, timeout=self._timeout)
        request = self._request
        if resume is not None:
            request = msgspec.structs.replace(
                request, resume=resume.session, secret=resume.secret, boot=resume.boot, group=0
            )
        try:
            connection.send(encode(request))
            answer = connection.receive_with_descriptors()
            if isinstance(answer, messages.Error):
                raise refusal(answer.code, answer.message)
            if not isinstance(answer, messages.Welcome):
                raise connection.broken(f"{type(answer).__name__} came where Welcome was due")
            numbers = connection.take_descriptors()
            if len(numbers) != len(answer.descriptors):
                close_all(numbers)
                raise connection.broken(
                    f"{len(numbers)} descriptors came, and {len(answer.descriptors)} were named"
                )
        except BaseException:
            connection.close()
            raise
        return answer, dict(zip(answer.descriptors, numbers, strict=True))

    def _take_page(self, descriptors: dict[str, int]) -> None:
        self._wake = descriptors.get("wake", -1)
        if "page" in descriptors:
            self._page = SessionPage(descriptors["page"])
            self._page.keep_from_children()
            self._words = self._page.words
        else:
            # No page: nobody sees these words, and every step looks at the socket.
            self._words = memoryview(bytearray(PAGE_BYTES)).cast("Q")
        self._submitted = self._words[SUBMITTED]
        self._completed = self._words[COMPLETED]
        self._epoch = self._words[EPOCH]

    def reconnect(self) -> None:
        """Takes the session up again after Disconnected, with all sequences as they are here.

        Where the daemon was restarted meanwhile and has its memory still, the session is another one from here on:
        what is cached is as it was, pins and tickets are over.  With no step under way sequences go on where they
        stood, in the same slots.  Some cannot, and raise Lost (start them over; they find what they had committed): all
        of them while a step is under way (where its device has ended with one that failed, take back what it did not
        write, and say `complete` first), and those of which a front was trimmed, copies were still to be made, or a
        trim or a move was under way; of forks that share what neither has committed one goes on.  Steps under way may
        end as they would have: what they use stays untouched until they have completed.

        What was under way is settled: refills asked for are given back, sequences whose start nobody heard of are
        freed, trims are made, frees are said again.  A sequence of which a commit was under way can be committed no
        further.  One that was being moved to other slots, as it may be in a session with append "peel" or pages, is
        ended: it raises Lost.

        Raises Disconnected when the daemon cannot be reached (try again later), and StaleSession when it has started
        anew with other memory, has given this session up, or was restarted and the session is one of a group: then
        close this client and open another one.
        """
        if self._connection.fault is None:
            raise OutOfTurn("the connection is there")
        if self._closed or os.getpid() != self._pid:
            raise self._connection.fault
        self._do_deferred()
        self._returning = True
        try:
            self._return()
        finally:
            self._returning = False

    def _return(self) -> None:
        lost = self._connection
        try:
            welcome, descriptors = self._hello(lost.path, self.token)
        except KvslotError:
            self._connection = lost
            raise
        page = descriptors.pop("page", -1) if welcome.former or not self._paged else -1
        close_all(each for what, each in descriptors.items() if what != "wake")
        if welcome.pool.generation != self.pool.description.generation:
            close_all([descriptors.get("wake", -1), page])
            self._connection.close()
            self._connection = lost
            raise StaleSession("the pool's memory is another one since: what was in it is lost")
        close_all([self._wake])
        self._remains.wake = self._wake = descriptors.get("wake", -1)
        self._remains.connection = self._connection
        self._connection.frames_sent += lost.frames_sent
        self._connection.frames_received += lost.frames_received
        if welcome.former:
            self._begin_anew(welcome, page)
        else:
            self._turn_page(page)
            self._listen()
            self._resettle()
        self._release_former()

    def _begin_anew(self, welcome: messages.Welcome, page: int) -> None:
        """The daemon was restarted, and this is a new session with it; what was said to the old one is settled."""
        session = self._session
        left = self._unbroken()
        for table in list(session.sequences.values()):
            if table not in left:
                session.forget(table, _restarted(table.id))
        try:
            session.begin_anew(welcome.limits)
            former = self.token
            self._former.append((former, self._submitted))
            self.token = Token(welcome.session, welcome.secret, welcome.boot)
            self.limits, self.server = welcome.limits, welcome.server
            # The engine knows its namespaces by the numbers that they had; they are opened again when they are used.
            self._renumbered = dict.fromkeys(self._namespaces.values(), 0)
            self._renumbered[self.namespace] = welcome.namespace
            self._epochs_before += self._epoch + 1
            self._epoch = 0
            self._paged = self._page is None
            self._turn_page(page)
            self._listen()
            while left:
                self._reclaim(former, left[0])
                left.pop(0)
        finally:
            for table in left:  # cut again, or interrupted
                session.forget(table, _restarted(table.id))

    def _turn_page(self, page: int) -> None:
        """The session's new page, on which steps go on being counted from where they were; closes the descriptor."""
        if page < 0:
            return
        before = self._page
        try:
            self._page = self._remains.page = SessionPage(page)
        except BaseException:
            # Without one the daemon would see no step: the next `reconnect` tries again.
            self._connection.close(Disconnected("there was no memory for the page of the new session"))
            raise
        finally:
            close_all([page])
        self._paged = True
        self._page.keep_from_children()
        self._words = words = self._page.words
        words[SUBMITTED] = self._submitted
        words[COMPLETED] = self._completed
        if self._submitted != self._completed:
            words[BEGAN] = monotonic_ns()
            words[BUSY] = 1
        if before is not None:
            before.close()

    def _unbroken(self) -> list[Table]:
        """Sequences of which all is known, and which no step uses: those that the next daemon can go on with."""
        if self._submitted != self._completed:
            return []
        session = self._session
        if session.epoch != self._epoch:
            session.follow()
            self._epoch = session.epoch
        cut: set[int] = (
            set()
        )  # slots of them may be free by now, or others' of this session: nobody heard the answer
        for _, unanswered in session.outstanding:
            if isinstance(unanswered, list):
                verbs: list[msgspec.Struct] = [verb for verb, _ in unanswered]
            else:
                verbs = list(unanswered.verbs) if isinstance(unanswered, Batch) else [unanswered]
            for verb in verbs:
                if isinstance(verb, Trim) and verb.sequence in session.sequences:
                    if 0 <= verb.keep_to < session.sequences[verb.sequence].capacity:
                        cut.add(verb.sequence)
        return [
            table
            for table in session.sequences.values()
            if table.id not in cut
            and not table.kept_from
            and table.length
            # Where copies are still to be made, their sources may be free once the session of then is released.
            and not table._copies
            and table._taken_step <= self._completed
        ]

    def _reclaim(self, former: Token, table: Table) -> None:
        """Has the daemon go on with a sequence of the session of before the restart, as it stands here."""
        session = self._session
        try:
            request = messages.Reclaim(
                session.next_id(), former.session, former.secret, self._actual(table.namespace), table.id,
                table._all_tokens(), table.extents, table.priority,
            )  # fmt: skip
            self._call(request, messages.Reclaimed)
        except Refused as refused:
            session.forget(table, _restarted(table.id, refused))
        else:
            table._goes_on()

    def _release_former(self) -> None:
        """Sessions of earlier boots that no step under way uses any more are over."""
        while self._former and self._former[0][1] <= self._completed:
            token = self._former[0][0]
            with contextlib.suppress(Refused):  # it may be over, where an answer was lost
                self._call(messages.Release(self._session.next_id(), token.session, token.secret), Done)
            del self._former[0]

    def _release_unheard(self) -> None:
        """Ends sessions whose client was closed in this process while it had no connection, and nobody heard of it."""
        tokens = _unheard.get(self._connection.path, [])
        with contextlib.suppress(
            KvslotError
        ):  # lost again: the client's next call says so, and the next client this
            while tokens:
                token = tokens[-1]
                with contextlib.suppress(Refused):  # by a daemon that started anew
                    self._call(messages.Release(self._session.next_id(), token.session, token.secret), Done)
                tokens.pop()

    def _listen(self) -> None:
        """What the page says of pushes is compared with those that have been read since the Welcome.

        The daemon counts from 0 at each Welcome.  Were the word taken as it is now, a push that has come since and lies
        in the socket would count as read.
        """
        self._heard = -self._session.pushes if self._page is not None else UNHEARD

    def _resettle(self) -> None:
        """Says again, or takes back, what nobody knows the fate of."""
        session = self._session
        again: list[Free | Trim] = []
        for _, unanswered in session.outstanding:
            items: list[tuple[msgspec.Struct, Table | None]]
            if isinstance(unanswered, list):
                items = [*unanswered]
            elif isinstance(unanswered, Batch):
                items = [(verb, None) for verb in unanswered.verbs]
            else:
                items = [(unanswered, None)]
            for verb, _ in items:
                match verb:
                    case Free():
                        again.append(verb)
                    case Allocate():
                        again.append(Free(1, verb.sequence))
                    case messages.Reclaim():
                        again.append(Free(1, verb.sequence))  # it was told that it ended
                    case Fork():
                        again.append(Free(1, verb.child))
                        _share(session.sequences.get(verb.sequence), verb.length)
                    case Commit():
                        table = session.sequences.get(verb.sequence)
                        _share(table, verb.length)  # it may be published
                        _spoil(table)
                    case Trim() if verb.keep_to < 0:
                        again.append(verb)
                    case Trim():
                        # Where it was done those tokens' slots are gone, so it is what happens.
                        table = session.sequences.get(verb.sequence)
                        if table is not None:
                            if verb.keep_to < table.length:
                                table._trimmed(verb.keep_to, verb.keep_to, [])
                            table._asked = SENT
                    case Extend():
                        table = session.sequences.get(verb.sequence)
                        if table is None:
                            continue
                        table._asked = SENT
                        if self._may_have_moved(table):
                            again.append(Free(1, table.id, self._fence(None)))
                            session.forget(table, _lost(table.id))
                    case _:
                        pass
        session.outstanding.clear()
        session.given_up = 0
        try:
            while again:
                # It may have been done, or never have begun: then there is nothing to free.
                with contextlib.suppress(Refused):
                    self._ask(msgspec.structs.replace(again[0], id=session.next_id()))
                del again[0]
        finally:
            if again:  # cut again: the next `reconnect` says them
                session.outstanding.append((0, [(verb, None) for verb in again]))
        for table in list(session.sequences.values()):
            if table._asked != SENT:
                continue
            length = table.length
            request = Trim(session.next_id(), table.id, 0, length, self._fence(None))
            answer = self._call(request, messages.Trimmed)
            table._trimmed(length, answer.capacity, answer.extents)

    def _may_have_moved(self, table: Table) -> bool:
        """Whether the answer to a question for more room, now lost, may have been to move what stands there already.

        The daemon copies a tail that others read, or the beginning of a page that it cannot fill up in place.
        """
        if self._page_slots > 1:
            return table.capacity % self._page_slots != 0
        return self._peels and table.capacity <= table._own_from

    # -- sequences -------------------------------------------------------------------------------------------------

    def allocate(
        self,
        tokens: Tokens,
        *,
        namespace: int | Namespace | None = None,
        ticket: int = 0,
        priority: int = 0,
        contiguous: bool = False,
        wait_for_commit: bool = False,
    ) -> Sequence | Later | Never:
        """Starts a sequence, if there is room now.

        Its first `hit` tokens are cached; the engine computes the others.  `priority` 0..7; `contiguous` asks for the
        rest as one extent; `wait_for_commit` for LATER rather than a second computation of a prefix that another
        sequence is computing.

        Later: come back with its `ticket` when `events` has Ready for it, or after `retry_after_ms`.  Never: it would
        not fit an empty pool.
        """
        return self._allocate(
            token_bytes(tokens), self._root(namespace), ticket, priority, contiguous, wait_for_commit
        )

    def admit(
        self,
        tokens: Tokens,
        *,
        timeout: float | None = None,
        namespace: int | Namespace | None = None,
        priority: int = 0,
        contiguous: bool = False,
        wait_for_commit: bool = False,
    ) -> Sequence:
        """As `allocate`, waiting until there is room: `timeout` seconds at most (None: as long as it takes).

        Raises NeverFits, and AdmissionTimeout (a TimeoutError).  Not between `submit` and `complete` of a step whose
        completion would make the room that this waits for.
        """
        data, root = token_bytes(tokens), self._root(namespace)
        end = None if timeout is None else time.monotonic() + timeout
        ticket = 0
        while True:
            answer = self._allocate(data, root, ticket, priority, contiguous, wait_for_commit)
            if isinstance(answer, Sequence):
                return answer
            if isinstance(answer, Never):
                raise NeverFits(answer)
            ticket = answer.ticket
            if not self._wait_for(ticket, time.monotonic() + answer.retry_after_ms / 1e3, end):
                with contextlib.suppress(Refused):
                    self.withdraw(ticket)
                raise AdmissionTimeout(timeout or 0.0, answer)

    def probe(self, tokens: Tokens, *, namespace: int | Namespace | None = None) -> int:
        """How many tokens of this prompt a sequence would find cached now; changes nothing."""
        root = self._actual(self._root(namespace))
        request = messages.Probe(self._session.next_id(), root, token_bytes(tokens))
        return self._call(request, messages.Probed).hit

    def pin(self, tokens: Tokens, *, namespace: int | Namespace | None = None) -> tuple[int, int]:
        """Keeps what is cached of a prefix: the pin's number, and how many tokens it keeps; 0, 0 where none are."""
        root = self._actual(self._root(namespace))
        request = messages.Pin(self._session.next_id(), root, token_bytes(tokens))
        answer = self._call(request, messages.Pinned)
        return answer.pin, answer.length

    def unpin(self, pin: int) -> None:
        """Ends a pin."""
        self._call(messages.Unpin(self._session.next_id(), pin), Done)

    def withdraw(self, ticket: int) -> None:
        """Gives a ticket up."""
        self._call(messages.Withdraw(self._session.next_id(), ticket), Done)

    def open_namespace(self, namespace: Namespace) -> int:
        """The number of a namespace, for the calls that take one.  Known ones cost nothing."""
        number = self._namespaces.get(namespace)
        if number is None:
            request = messages.OpenNamespace(self._session.next_id(), namespace)
            number = self._call(request, messages.Opened).namespace
            if self._renumbered:
                actual = number
                while number in self._renumbered:
                    number += NAMESPACES_APART  # known by that number is another one
                self._renumbered[number] = actual
            self._namespaces[namespace] = number
        return number

    def opened(self, number: int) -> Namespace | None:
        """The namespace that this client has opened under a number."""
        return next((each for each, one in self._namespaces.items() if one == number), None)

    def release(self, token: Token) -> None:
        """Ends another session of this process, one that lost its connection and of which nothing is in use."""
        self._call(messages.Release(self._session.next_id(), token.session, token.secret), Done)

    def sequence(self, number: int) -> Sequence | None:
        """The running sequence of that number, as events name them."""
        found = self._session.sequences.get(number)
        return found if isinstance(found, Sequence) else None

    @property
    def sequences(self) -> list[Sequence]:
        """Those running."""
        return [each for each in self._session.sequences.values() if isinstance(each, Sequence)]

    @property
    def group(self) -> Token:
        """For the other processes of this engine: `Client(group=...)`."""
        return self.token

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """One step, as a context: the device has finished with it when the block is left.

        For an engine that runs ahead of its device: `submit` and `complete`.
        """
        return Step(self)

    def submit(self) -> int:
        """A step is about to be handed to the device; its number.  Takes in what the daemon said since the last one."""
        connection = self._connection
        if connection.fault is not None:
            raise connection.fault
        if self._deferred:
            self._do_deferred()
        session = self._session
        words = self._words
        if session.outstanding or words[PUSHES] != self._heard + session.pushes:
            self._read_along()
        if session.waiting:
            session.retry(time.monotonic())
        if session.epoch != self._epoch:
            self._follow()  # before SUBMITTED: see kvslot.api.wire.page
        number = self._submitted
        if number == self._completed:
            words[BEGAN] = monotonic_ns()
        self._submitted = number = number + 1
        words[SUBMITTED] = number
        words[BUSY] = 1
        return number

    def complete(self, number: int | None = None) -> None:
        """Steps up to `number` (all, unless said) have ended on the device.  Says all that is due, in one frame.

        Refills that have time wait for those of the next steps.  Counts without a connection, too, and raises then.
        """
        connection = self._connection
        if self._closed and connection.fault is not None:
            raise connection.fault
        if number is None:
            number = self._submitted
        elif not self._completed <= number <= self._submitted:
            raise BadRequest(
                f"step {number} completed: {self._completed} was before, and {self._submitted} is submitted"
            )
        words = self._words
        before, self._completed = self._completed, number
        words[COMPLETED] = number
        if number == self._submitted:
            if number != before:
                words[ENDED] = monotonic_ns()
            words[BUSY] = 0
        if connection.fault is not None:
            raise connection.fault
        if words[WAKE] and self._wake >= 0:
            os.eventfd_write(self._wake, 1)
        if self._session.pressing():
            self.flush()
        if self._former:
            self._release_former()

    def flush(self) -> None:
        """Says what is due now.  Needed only by an engine that has no step to come."""
        if self._connection.fault is not None:
            raise self._connection.fault
        if self._deferred:
            self._do_deferred()
        frames = self._session.pack(self._submitted, self._completed, self._fence(None))
        if frames:
            self._connection.send(frames[0] if len(frames) == 1 else b"".join(frames), len(frames))

    def settle(self) -> None:
        """Says what is due, and waits until everything said has been answered.  No engine needs it; tools may."""
        self.flush()
        while self._session.outstanding:
            self._take_in(self._connection.receive())

    def take_copies(self) -> list[int]:
        """Copies that running sequences need before they are read or written again (flat source, target, length, ...).

        They count as made from now on: make them, on the stream that writes (`pool.copy` does it with the CPU).
        """
        out: list[int] = []
        for table in self._session.sequences.values():
            if table._copies:
                out += table.take_copies()
        return out

    def events(self, timeout: float = 0.0) -> list[Event]:
        """What the daemon has pushed since the last call, waiting up to `timeout` seconds for something.

        Preempt: free that sequence by `sequence(number).preempt_by`.  Pressure: memory for growth is short; second runs
        go back with the next step by themselves.  Ready, Published, Abandoned: of a ticket from `allocate`.  Draining:
        the daemon ends.
        """
        end = time.monotonic() + timeout
        self._read_along(everything=True)
        while not self._session.events:
            left = end - time.monotonic()
            if left <= 0:
                break
            self._connection.wait(min(left, WAIT_SECONDS))
            self._read_along(everything=True)
        events, self._session.events = self._session.events, {}
        return list(events.values())

    def wait(self, timeout: float) -> None:
        """Waits up to `timeout` seconds until the daemon has pushed something; `events` still has it afterwards."""
        news, end = self._session.news, time.monotonic() + timeout
        self._read_along(everything=True)
        while self._session.news == news and (left := end - time.monotonic()) > 0:
            self._connection.wait(min(left, WAIT_SECONDS))
            self._read_along(everything=True)

    def defer(self, call: Callable[[], None]) -> None:
        """Has `call` called at the beginning of the client's next use, where it may post, and must not wait.

        For finalizers: they run at any moment and in any thread, in the middle of a call of this client, too.
        """
        self._deferred.append(call)

    def statistics(self) -> Statistics:
        """What this client has done."""
        connection = self._connection
        return self._session.statistics(
            connection.frames_sent, connection.frames_received, self._submitted, self._completed
        )

    @property
    def epoch(self) -> int:
        """Rises when a step begins that goes by other slots than the one before: index arrays from before are stale."""
        return self._epochs_before + self._epoch

    @property
    def last_error(self) -> KvslotError | None:
        """Why the daemon last refused something posted."""
        return self._session.last_error

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the session and the mapping; all that it holds goes back at once, or without a connection with this
        process's next client of the same daemon.

        Raises BufferError, and stays open, while an array or tensor on the pool's memory is alive.  With steps under
        way the daemon is not told that nothing is in use: the slots come back when this process ends.
        """
        if self._closed:
            return
        if os.getpid() != self._pid:
            self._forked()
            return
        self.pool.close()
        self._end(bye=True)

    def _end(self, *, bye: bool) -> None:
        connection = self._connection
        if bye and self._submitted == self._completed:
            try:
                self._call(messages.Bye(self._session.next_id()), Done)
            except KvslotError:
                # The next client of this process says so: until then all that it held is kept for it.
                unheard = _unheard.setdefault(connection.path, [])
                unheard += [self.token, *(token for token, _ in self._former)]
        self._closed = True
        fault = Closed("the client was closed")
        for table in list(self._session.sequences.values()):
            self._session.forget(table, fault)
        self._finalizer.detach()
        self._remains.close(fault)
        connection.fault = fault
        _clients.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except BufferError as alive:
            if error is None:
                raise
            # The error's own traceback is likely to hold the view: it must not hide what went wrong.
            error.add_note(f"kvslot: {alive}; its slots come back when this process ends")
            self._end(bye=False)

    def __reduce__(self) -> str:
        raise TypeError(
            "a Client belongs to its process: send `client.group`, and open Client(group=...) there"
        )

    def __repr__(self) -> str:
        if not hasattr(self, "_session"):
            return f"<Client, not opened, at {id(self):#x}>"
        running = len(self._session.sequences)
        state = "closed" if self._closed else f"{running} sequence{'s' if running != 1 else ''}"
        return f"<Client of pool {self.pool.name!r} at {self._connection.path}: {state}>"

    # -- inside ----------------------------------------------------------------------------------------------------

    def _call(self, request: messages.Request, kind: type[M]) -> M:
        """One request, one reply, with all that is due said ahead of it."""
        answer = self._ask(request)
        if type(answer) is not kind:
            raise self._connection.broken(f"{type(answer).__name__} came where {kind.__name__} was due")
        return answer

    def _ask(self, request: messages.Request) -> messages.Outgoing:
        session, connection = self._session, self._connection
        if connection.fault is not None:
            raise connection.fault
        if self._deferred:
            self._do_deferred()
        frame = session.fits(encode(request))
        if session.posted or session.refills or session.asked_back:
            frames = session.pack(self._submitted, self._completed, self._fence(None))
            connection.send(b"".join((*frames, frame)), len(frames) + 1)
        else:
            connection.send(frame)
        session.calls += 1
        number = request.id
        try:
            while True:
                answer = connection.receive()
                if not session.apply(answer):
                    break
        except PeerFault as fault:
            raise connection.broken(str(fault)) from fault
        except BaseException:
            # Interrupted: its reply will come all the same.  Lost: what became of it is for `reconnect` to settle.
            session.outstanding.append((number, request))
            session.given_up += 1
            raise
        if type(answer) is messages.Error:
            if answer.id == number:
                raise refusal(answer.code, answer.message)
            raise connection.dismissed(answer)
        if getattr(answer, "id", -1) != number:
            raise connection.broken(f"{type(answer).__name__} came where the reply to {number} was due")
        return answer

    def _do_deferred(self) -> None:
        while self._deferred and not self._returning:
            with contextlib.suppress(KvslotError):
                self._deferred.popleft()()

    def _allocate(
        self, tokens: bytes, root: int, ticket: int, priority: int, contiguous: bool, wait_for_commit: bool
    ) -> Sequence | Later | Never:
        session = self._session
        actual = self._actual(root)
        sequence = Sequence(self, session.next_sequence(), root, priority)
        answer = self._ask(
            Allocate(
                session.next_id(), actual, sequence.id, tokens, ticket, priority, contiguous, wait_for_commit
            )
        )
        if type(answer) is Admitted:
            sequence._begin(len(tokens) >> 2, answer, tokens)
            session.sequences[sequence.id] = sequence
            return sequence
        if type(answer) is Later or type(answer) is Never:
            return answer
        raise self._connection.broken(f"{type(answer).__name__} is no answer to Allocate")

    def _fork(self, parent: Sequence, length: int, ticket: int) -> Sequence | Later:
        if not 0 < length <= parent.length:
            raise BadRequest(f"fork at {length}: the sequence has {parent.length} tokens")
        session = self._session
        self._settle(parent)
        if parent._copies:
            self._copy(parent)
        child = Sequence(self, session.next_sequence(), parent.namespace, parent.priority)
        batch = Batch(
            session.next_id(),
            [Fork(1, parent.id, child.id, length, length, ticket, parent._taken), Extend(1, child.id)],
        )
        forked, grown = self._call(batch, Results).results
        match forked:
            case Forked():
                pass
            case Later():
                return forked
            case messages.Error():
                raise refusal(forked.code, forked.message)
            case _:
                raise self._connection.broken(f"{type(forked).__name__} is no answer to Fork")
        child._fork_from(parent, forked.length)
        if child._moved:
            session.moved.append(child)
        parent._own_from = max(parent._own_from, forked.length)
        session.sequences[child.id] = child
        try:
            session.first_room(child, grown)
        except PeerFault as fault:
            raise self._connection.broken(str(fault)) from fault
        return child

    def _copy(self, table: Table) -> None:
        """Makes a sequence's copies, since others are about to read what they copy to."""
        if self.pool.mapped:
            self.pool.copy(table._take(0))
        else:
            raise OutOfTurn(f"sequence {table.id} has copies that are still to be made: see take_copies")

    def _catch_up(self) -> None:
        """Takes in the replies to calls that were interrupted, so that all that is known of sequences is so."""
        while self._session.given_up:
            self._take_in(self._connection.receive())

    def _make_room(self, table: Table, tokens: int) -> None:
        """Sees to it that `tokens` can be appended, waiting for the daemon's answer; raises OutOfRoom."""
        session = self._session
        if session.given_up:
            self._catch_up()
        session.waits += 1
        if table._asked != SETTLED:
            self._settle(table, drop=False)
            if table.room >= tokens:
                return
        if (table._answer is not None or table._error is not None) and time.monotonic() < table._retry_at:
            self._read_along(everything=True)  # Ready may have come
            if table._fault is not None:
                raise table._fault
            if table._asked != QUEUED:
                raise OutOfRoom(table.id, table.length, table._answer) from table._error
        answer = table._answer
        ticket = 0
        if type(answer) is Later:
            ticket = answer.ticket
            session.waiting.pop(ticket, None)
        table._asked = SETTLED  # this question stands for the one that was due
        missing = tokens - table.room if tokens > 1 else 0
        request = Extend(
            session.next_id(), table.id, table._finished(self._submitted, self._completed), missing, ticket
        )
        reply = self._ask(request)
        if type(reply) is Grown:
            table._grown(reply)
            if table.room >= tokens:
                return
            raise OutOfRoom(table.id, table.length, None)
        if type(reply) is Later or type(reply) is Never:
            session.denied(table, reply)
            raise OutOfRoom(table.id, table.length, reply)
        raise self._connection.broken(f"{type(reply).__name__} is no answer to Extend")

    def _settle(self, table: Table, *, drop: bool = True) -> None:
        """Waits until nothing about the sequence's room is under way; with `drop`, what is only due is not asked."""
        while table._asked != SETTLED:
            # What comes may be Ready, and so have it asked again.
            if table._asked == SENT:
                self._take_in(self._connection.receive())
            elif drop:
                table._asked = SETTLED
                table._note_run(table.room)
                table._seat(table.length)
            else:
                self.flush()

    def _take_in(self, message: messages.Outgoing) -> None:
        """Applies a message that is no reply to a call, for there is none under way."""
        try:
            applied = self._session.apply(message)
        except PeerFault as fault:
            raise self._connection.broken(str(fault)) from fault
        if applied:
            return
        if isinstance(message, messages.Error) and not message.id:
            raise self._connection.dismissed(message)
        raise self._connection.broken(f"{type(message).__name__} came, and nothing was asked")

    def _read_along(self, *, everything: bool = False) -> None:
        """Takes in what has come, waiting for nothing."""
        session, connection, words = self._session, self._connection, self._words
        while everything or session.outstanding or words[PUSHES] != self._heard + session.pushes:
            message = connection.poll()
            if message is None:
                return
            self._take_in(message)

    def _follow(self) -> None:
        """What has been moved is where it is now: for the tables, then by the page."""
        session = self._session
        session.follow()
        self._words[EPOCH] = session.epoch
        self._epoch = session.epoch

    def _wait_for(self, ticket: int, until: float, end: float | None) -> bool:
        """Waits for a push about `ticket`, or `until`; False when `end` has come."""
        session, connection = self._session, self._connection
        session.tickets[ticket] = False
        try:
            while True:
                if session.due:
                    self.flush()
                self._read_along(everything=True)
                if session.tickets[ticket]:
                    return True
                now = time.monotonic()
                if end is not None and now >= end:
                    return False
                if now >= until:
                    return True
                if session.epoch != self._epoch and self._submitted == self._completed:
                    self._follow()  # no step is near, and what this waits for may be what the old places take
                limit = until if end is None else min(until, end)
                connection.wait(min(limit - now, WAIT_SECONDS))
        finally:
            del session.tickets[ticket]

    def _forget(self, table: Table) -> None:
        self._session.forget(table, freed(table.id))

    def _fence(self, fence: int | None) -> int:
        """The step that what is given back waits for."""
        if self._page is None:
            if fence:
                raise BadRequest(
                    f"fence {fence}: a client without a session page (map=False) has no steps that the daemon can see; "
                    "what it gives back is free at once"
                )
            return 0
        if fence is None:
            return self._submitted
        if not 0 <= fence <= self._submitted:
            raise BadRequest(f"fence {fence} is not among the steps submitted, 0..{self._submitted}")
        return fence

    def _root(self, namespace: int | Namespace | None) -> int:
        if namespace is None:
            return self.namespace
        return self.open_namespace(namespace) if isinstance(namespace, Namespace) else namespace

    def _actual(self, namespace: int) -> int:
        """The number by which the daemon knows a namespace."""
        if not self._renumbered:
            return namespace
        number = self._renumbered.get(namespace, namespace)
        if not number:
            known = self.opened(namespace)
            assert known is not None
            request = messages.OpenNamespace(self._session.next_id(), known)
            number = self._renumbered[namespace] = self._call(request, messages.Opened).namespace
        return number

    def _forked(self) -> None:
        """In a child of the fork: nothing of the parent's is touched, and everything says so from now on."""
        if self._closed:
            return
        self._closed = True
        self._finalizer.detach()
        fault = self._connection.forked()
        for table in list(self._session.sequences.values()):
            table._end(fault)
        self.pool.abandon()
        if self._page is not None:
            _inherited.append((self._page, self._words))
            self._page = self._remains.page = None
            self._words = memoryview(bytearray(PAGE_BYTES)).cast("Q")
        close_all([self._wake])
        self._wake = self._remains.wake = -1


def _spoil(table: Table | None) -> None:
    if table is not None:
        table._spoiled = Disconnected(
            f"a commit of sequence {table.id} was under way when the connection was lost: nobody knows which of its "
            "tokens the daemon was told, so no more of it can be published"
        )


def _share(table: Table | None, length: int) -> None:
    """Others may read the first `length` tokens: a roll-back into them is the daemon's business."""
    if table is not None:
        table._own_from = max(table._own_from, min(length, table.length))


def _lost(number: int) -> Lost:
    return Lost(
        f"sequence {number} was asking for more room when the connection was lost, and may have been moved to other "
        "slots that nobody was told of: it was freed; start it over"
    )


def _restarted(number: int, why: Refused | None = None) -> Lost:
    reason = f" ({why})" if why is not None else ""
    return Lost(
        f"sequence {number} ended with the daemon, which was restarted{reason}: start it over; what it had committed "
        "is cached"
    )


def _program() -> str:
    return os.path.basename(sys.argv[0] if sys.argv and sys.argv[0] else sys.executable or "python")[:64]


_clients: weakref.WeakSet[Client] = weakref.WeakSet()

_unheard: dict[str, list[Token]] = {}
"""By socket: sessions that are over, their memory let go, of which no daemon has heard that."""


def _after_fork() -> None:
    for client in list(_clients):
        client._forked()
    _clients.clear()
    _unheard.clear()  # those are the parent's


os.register_at_fork(after_in_child=_after_fork)
