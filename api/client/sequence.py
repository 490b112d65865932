"""A running sequence of a blocking client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvslot.api.client.errors import Lost
from kvslot.api.client.table import NEVER, QUEUED, SETTLED, Table, Tokens, token_bytes
from kvslot.api.wire import BadRequest
from kvslot.api.wire.messages import Commit, Committed, Free, Later, Trim, Trimmed

if TYPE_CHECKING:
    from kvslot.api.client.client import Client


class Sequence(Table):
    """One running request: where its tokens stand, and what is done with it.

    Made by `Client.allocate`, `Client.admit` and `fork`.  Ends with `free`; every method raises Ended from then on.
    """

    __slots__ = ("_client",)

    def __init__(self, client: Client, number: int, namespace: int, priority: int) -> None:
        super().__init__(number, namespace, priority)
        self._client = client

    def append(self, token: int) -> int:
        """The slot for the K and V of `token`, which becomes the sequence's last.

        Says nothing to the daemon: more room is asked for ahead of need, with the next step.  Waits for the daemon only
        where that was not enough, and raises OutOfRoom where there is no room to be had.
        """
        slot = self._slot
        if slot == self._stop:
            slot = self._cross()
        self._tell(token)
        self._slot = slot + 1
        return slot

    def append_all(self, tokens: Tokens) -> list[int]:
        """Appends several tokens; the slots they go to, flat slot, length, ....

        All or none: OutOfRoom where there is no room for all of them.
        """
        data = token_bytes(tokens)
        left = len(data) >> 2
        self.reserve(left)
        out: list[int] = []
        while left:
            slot = self._slot
            if slot == self._stop:
                slot = self._cross()
            run = min(left, self._stop - slot)
            self._slot = slot + run
            left -= run
            if out and out[-2] + out[-1] == slot:
                out[-1] += run
            else:
                out += (slot, run)
        self._pending.frombytes(data)
        return out

    def reserve(self, tokens: int) -> None:
        """Sees to it that `tokens` more can be appended without waiting; a round trip where they cannot yet.

        Raises OutOfRoom.
        """
        self._check()
        missing = tokens - self.room
        if missing > 0:
            self._client._make_room(self, tokens)

    def commit(
        self, length: int | None = None, *, wait: bool = True, priority: int = -1, expiry_ms: int = 0
    ) -> int:
        """Publishes positions [0, length), whose K and V the device has finished writing; how many are shareable now.

        Without `length` that is all tokens, or while steps are under way those known to be written.  With `wait` False
        it leaves with the next frame, `length` is returned as it was asked for, and less may be published: nothing
        that has still to be copied is.  `priority` (0..7) holds for `expiry_ms` (0: for good).
        """
        self._check()
        client = self._client
        if wait and client._copying:
            client._settle(self, drop=False)  # what comes with more room may have to be copied first
        if self._spoiled is not None:
            raise self._spoiled
        if self._copies:
            client._copy(self)  # nothing is published before it is there
        copied = self._taken  # whoever says the length says that what was taken to be copied is there
        if length is None:
            length = self._finished(client._submitted, client._completed)
            copied = self._copied(client._submitted, client._completed)
        if not 0 <= length <= self.length:
            raise BadRequest(f"commit to {length}: the sequence has {self.length} tokens")
        tokens = self._untold(length)
        request = Commit(client._session.next_id(), self.id, length, tokens, priority, expiry_ms, copied)
        if wait:
            # Taken as told only by an answer; a connection lost in between leaves it open, see `Client.reconnect`.
            answer = client._call(request, Committed)
            self._was_told(length)
            return answer.length
        client._session.post(request, self)
        self._was_told(length)
        return length

    def fork(self, length: int | None = None, *, ticket: int = 0) -> Sequence | Later:
        """A sequence of its own that shares the first `length` tokens (all, unless said) without a copy.

        It gets room to append in the same round trip if there is any.  Later: as for `Client.allocate`.
        """
        self._check()
        return self._client._fork(self, self.length if length is None else length, ticket)

    def trim(self, *, keep_from: int = 0, keep_to: int | None = None, fence: int | None = None) -> int:
        """Drops positions before `keep_from` (sliding window) and from `keep_to` on (roll-back); the capacity then.

        A roll-back over tokens that no commit and no fork has seen costs nothing, and needs no connection; any other is
        a round trip.
        `keep_from` leaves with the next frame.  What is dropped may still be read by steps up to `fence` (the last
        one submitted, unless said).
        """
        super()._check()
        client = self._client
        if client._session.given_up and client._session.shown(self) > (
            self.length if keep_to is None else keep_to
        ):
            client._catch_up()  # what is dropped may have been shown to others by a call that was interrupted
            super()._check()
        length = self.length
        if keep_to is None:
            keep_to = length
        if not 0 <= keep_from <= keep_to or not 0 < keep_to <= length:
            raise BadRequest(f"keep [{keep_from}, {keep_to}) of a sequence of {length} tokens")
        step = client._fence(fence)
        if keep_to < length:
            if keep_to >= self._own_from and keep_to >= self._told:
                self._roll_back(keep_to)
            else:
                client._settle(self)
                if self._copies:
                    client._copy(self)  # what they read may be given back by this
                request = Trim(client._session.next_id(), self.id, 0, keep_to, step)
                answer = client._call(request, Trimmed)
                self._trimmed(keep_to, answer.capacity, answer.extents)
        if keep_from > self.kept_from:
            written = self._finished(client._submitted, client._completed)
            client._session.post(Trim(0, self.id, keep_from, -1, step, written), self)
            self.kept_from = keep_from
        return self.capacity

    def free(self, *, fence: int | None = None) -> None:
        """Ends the sequence: its slots are another's once step `fence` (the last submitted, unless said) has completed.

        Leaves with the next frame.  The object is of no use afterwards.
        """
        if isinstance(self._fault, Lost):
            return  # it was freed already, by `Client.reconnect`
        super()._check()  # replies to calls that were interrupted may come, or be lost, after its end as well
        client = self._client
        client._session.post(Free(0, self.id, client._fence(fence)), self)
        client._forget(self)

    def take_copies(self) -> list[int]:
        """The copies still to be made; they count as made from now on, so make them on the stream that writes."""
        client = self._client
        self._made = self._copied(client._submitted, client._completed)
        return self._take(client._submitted + 1)  # they may be part of a step that is not submitted yet

    def _check(self) -> None:
        super()._check()
        if self._client._session.given_up:
            self._client._catch_up()

    def _cross(self) -> int:
        """The cursor has come to its stop: asks, waits or goes on as it must.  Returns the next slot."""
        if self._fault is not None:
            raise self._fault
        position = self._slot + self._base
        if position == self.capacity:
            self._client._make_room(self, 1)
        if position >= self._mark:
            self._mark = NEVER
            if self._asked == SETTLED:
                self._asked = QUEUED
                self._client._session.refills.append(self)
        self._seat(position)
        return self._slot
