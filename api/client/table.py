"""Where a sequence's tokens stand, kept on the client's side, and the cursor that appends to it: arithmetic, no socket.

    position   0 ......... told ......... length ......... mark ......... capacity
               the daemon   appended,      not yet used;    from here on    end of what
               knows these  told with the  the next slot    more room is    the daemon gave
                            next commit    is `_slot`       asked for

    extents    slot, length, slot, length, ...   place positions [0, capacity) in order
    cursor     `_slot` is where the next token goes, and `_slot + _base` is its position; `_stop` is the slot before
               which something has to be looked at: the end of the present extent, or the mark.  A `_stop` that is
               too low costs a look, never a wrong slot

Appending is one comparison and two stores as long as the cursor has not come to its stop.  A sequence that has ended
stands before a stop for ever, so that the hot path need not ask whether it has.

Positions from `_own_from` on are private to this sequence and held by no fork: a roll-back that stays above, and above
what the daemon has been told, moves the cursor and tells nobody.

Moves.  In a movable session the daemon says of published positions that they lie elsewhere from the next step on.  That
waits in `_moved`, in the order in which it came, until a step begins (`_follow`); until then the old slots are read.
What is cut off meanwhile is cut off there, too, and a fork takes its part of it along.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol, runtime_checkable

from kvslot.api.wire import BadRequest, Ended, KvslotError, PeerFault
from kvslot.api.wire.messages import Admitted, Grown, Later, Never

NEVER: Final = 1 << 62
"""A mark that is not reached: more room has been asked for, or there is nothing to ask."""

# Whether an answer about room is still to come.
SETTLED, QUEUED, SENT = range(3)


class Tokens(Protocol):
    """A prompt: int32 in any form.

    bytes, bytearray and buffers of bytes are little-endian int32, 4 bytes a token; numpy arrays, torch tensors on the
    CPU, array('i') and plain sequences of numbers are what they are.
    """

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...


@runtime_checkable
class _Tensor(Protocol):
    def numpy(self) -> Any: ...


def token_bytes(tokens: Tokens) -> bytes:
    """`tokens` as the wire carries them: 4 bytes each, little endian.

    Raises BadRequest for what is no list of int32.
    """
    if isinstance(tokens, bytes):
        data = tokens if type(tokens) is bytes else bytes(tokens)
    elif isinstance(tokens, list | tuple | range):
        return _packed(tokens)
    else:
        buffer: Any = tokens.numpy() if isinstance(tokens, _Tensor) else tokens
        try:
            view = memoryview(buffer)
        except (TypeError, ValueError):
            return _packed(tokens)
        if view.ndim != 1:
            raise BadRequest(f"tokens have {view.ndim} dimensions: one prompt is one row of numbers")
        if view.format not in ("B", "b", "c") and not (
            view.format in ("i", "l", "<i") and view.itemsize == 4
        ):
            return _packed(view.tolist())
        data = view.tobytes()
    if len(data) & 3:
        raise BadRequest(f"{len(data)} bytes of tokens: they are int32, 4 bytes each")
    return data


def _packed(tokens: Iterable[Any]) -> bytes:
    try:
        return array("i", tokens).tobytes()
    except (TypeError, OverflowError) as error:
        raise BadRequest(f"tokens are whole numbers from -2^31 to 2^31 - 1: {error}") from None


class Table:
    """A running sequence as its client sees it.  `Sequence` and `AsyncSequence` add the talking."""

    __slots__ = (
        "id",
        "namespace",
        "hit",
        "extents",
        "capacity",
        "kept_from",
        "priority",
        "preempt_by",
        "_slot",
        "_stop",
        "_base",
        "_mark",
        "_own_from",
        "_told",
        "_prompt",
        "_said",
        "_pending",
        "_tell",
        "_copies",
        "_given",
        "_taken",
        "_taken_step",
        "_made",
        "_asked",
        "_answer",
        "_error",
        "_retry_at",
        "_stepped",
        "_stepped_length",
        "_spoiled",
        "_moved",
        "_fault",
        "__weakref__",
    )

    def __init__(self, number: int, namespace: int, priority: int) -> None:
        self.id = number
        self.namespace = namespace
        self.priority = priority
        self.hit = 0
        """Tokens of the prompt whose K and V are there already: the engine computes from here on."""
        self.extents: list[int] = []
        """Flat slot, length, ...: where positions [0, capacity) stand.  Belongs to the client; not to be changed."""
        self.capacity = 0
        """Positions that have a slot."""
        self.kept_from = 0
        """Positions before it were given back (sliding window)."""
        self.preempt_by = 0.0
        """When this sequence is to be freed, on `time.monotonic`'s clock; 0.0: not asked for."""
        self._slot = self._stop = -1
        self._base = 1
        self._mark = NEVER
        self._own_from = 0
        self._told = 0
        # What the daemon was told: the prompt as it was given, and the tokens of commits behind it.  The next daemon is
        # told it again, where this one ends (`_all_tokens`).
        self._prompt = b""
        self._said = bytearray()
        self._pending = array("i")
        self._tell: Callable[[int], None] = self._pending.append
        self._copies: list[int] = []
        # Replies that brought copies: how many came, of how many the copies were taken to be made and in which step at
        # the latest, and of how many they were known to be made when the last were taken.
        self._given = self._taken = self._taken_step = self._made = 0
        self._asked = SETTLED
        self._answer: Later | Never | None = None
        self._error: KvslotError | None = None
        self._retry_at = 0.0
        self._stepped = 0
        self._stepped_length = 0
        self._spoiled: KvslotError | None = None  # why nothing more of it can be committed
        self._moved: list[tuple[int, list[int]]] = []  # positions from there on will lie in those extents
        self._fault: KvslotError | None = None

    @property
    def length(self) -> int:
        """Tokens that have a place: the prompt, and what was appended."""
        return self._slot + self._base

    @property
    def room(self) -> int:
        """Tokens that can be appended without another word to the daemon."""
        return self.capacity - self._slot - self._base

    @property
    def copies(self) -> list[int]:
        """Flat source, target, length, ...: slots to be copied, in every plane, before the next read or write."""
        return self._copies

    @property
    def ended(self) -> bool:
        """Whether it was freed, or its client has gone."""
        return self._fault is not None

    def take_copies(self) -> list[int]:
        """The copies still to be made; they count as made from now on, so make them."""
        return self._take(0)

    def _take(self, step: int) -> list[int]:
        """The copies still to be made, which will be once `step` has completed."""
        taken, self._copies = self._copies, []
        self._taken = self._given
        self._taken_step = max(self._taken_step, step)
        return taken

    def _copied(self, submitted: int, completed: int) -> int:
        """Of how many replies the copies have surely been made: with steps under way, those of steps that ended."""
        return self._taken if submitted == completed or self._taken_step <= completed else self._made

    def slot_of(self, position: int) -> int:
        """The slot of one position; O(extents).  For many use `kvslot.api.client.indices`."""
        if not 0 <= position < self.capacity:
            raise BadRequest(f"position {position} is not within [0, {self.capacity})")
        end = self.capacity
        for i in range(len(self.extents) - 2, -1, -2):
            end -= self.extents[i + 1]
            if position >= end:
                return self.extents[i] + position - end
        raise AssertionError("extents do not add up to the capacity")

    def __repr__(self) -> str:
        state = "ended" if self.ended else f"{self.length} of {self.capacity} tokens, {self.hit} hit"
        return f"<{type(self).__name__} {self.id}: {state}>"

    # -- the cursor ----------------------------------------------------------------------------------------------

    def _seat(self, position: int) -> None:
        """Puts the cursor before `position`, which has a slot or is the first that has none."""
        extents = self.extents
        end = self.capacity
        i = len(extents) - 2
        start = end - extents[i + 1]
        while position < start:
            i -= 2
            end = start
            start = end - extents[i + 1]
        slot = extents[i] + position - start
        mark = self._mark
        if mark < end:
            end = mark if mark > position else position
        self._slot = slot
        self._base = position - slot
        self._stop = slot + end - position

    def _advance(self) -> int:
        """The cursor has come to its stop: asks for more where the mark is reached, and goes on to the next extent.

        Returns the next slot.  There must be room.
        """
        position = self._slot + self._base
        if position >= self._mark:
            self._mark = NEVER
            self._ask()
        self._seat(position)
        return self._slot

    def _ask(self) -> None:
        """Has room asked for with the next frame."""
        raise NotImplementedError  # a table alone has no connection; who advances by `_advance` says how to ask

    def _check(self) -> None:
        if self._fault is not None:
            raise self._fault

    # -- what the daemon says ----------------------------------------------------------------------------------

    def _begin(self, length: int, answer: Admitted, prompt: bytes = b"") -> None:
        """The sequence has been admitted, its prompt `length` tokens long; kept where it may have to be told again."""
        self._prompt = prompt
        self.hit = answer.hit
        self.extents = answer.extents
        self.capacity = answer.capacity
        self._copies = answer.copies
        self._given += bool(answer.copies)
        if sum(answer.extents[1::2]) != answer.capacity or answer.capacity < length:
            raise PeerFault(
                f"{len(answer.extents) // 2} extents do not place the {answer.capacity} positions of sequence {self.id}"
            )
        self._told = length
        self._own_from = length
        self._note_run(answer.capacity - length)
        self._seat(length)

    def _fork_from(self, parent: Table, length: int) -> None:
        """The sequence begins as another's first `length` tokens, on the same slots."""
        self.hit = length
        self.extents = parent.extents.copy()
        self.capacity = parent.capacity
        # What the parent was told and has not applied holds for the child, too: the daemon will not say it again.
        self._moved = parent._moved.copy()
        self._cut(length)
        self._told = min(parent._told, length)
        self._own_from = length
        self._prompt, self._said = parent._prompt, parent._said.copy()
        self._unsay(self._told)
        self._pending.extend(parent._pending[: length - self._told])
        self._spoiled = parent._spoiled  # what nobody knows of its parent's tokens nobody knows of its own
        # What the parent has not yet copied is the child's to wait for, too; it is the same memory.
        self._mark = NEVER
        self._seat(length)

    def _note_run(self, run: int) -> None:
        self._mark = self.capacity - ((run + 1) >> 1)

    def _cut(self, capacity: int) -> None:
        """Forgets where positions from `capacity` on stand."""
        extents = self.extents
        over = self.capacity - capacity
        while over > 0:
            last = extents[-1]
            if last > over:
                extents[-1] = last - over
                break
            over -= last
            del extents[-2:]
        self.capacity = capacity
        if self._moved:
            # What comes to stand there will be other slots; what was moved was those that were given back.
            self._moved = [
                (
                    position,
                    moved if position + sum(moved[1::2]) <= capacity else _first(moved, capacity - position),
                )
                for position, moved in self._moved
                if position < capacity
            ]

    def _give_up(self, capacity: int) -> None:
        """Positions from `capacity` on are the daemon's again."""
        self._cut(capacity)
        self._stepped_length = min(self._stepped_length, capacity)  # what comes there next is written anew
        if self._copies:
            # Those into slots that were given back must not be made: the slots may be another's by now.
            self._copies = _copies_within(self._copies, self.extents)
            if not self._copies:
                self._taken = self._given

    def _add(self, extents: list[int]) -> None:
        """Further positions stand in `extents`; where they touch what is there, it grows."""
        mine = self.extents
        if mine and extents and mine[-2] + mine[-1] == extents[0]:
            mine[-1] += extents[1]
            if len(extents) > 2:
                mine += extents[2:]
        else:
            mine += extents

    def _grown(self, answer: Grown) -> None:
        """The daemon gave more room."""
        before, capacity = self.capacity, answer.capacity
        mine, given = self.extents, answer.extents
        if answer.position == before and len(given) == 2 and mine and not answer.copies:
            start, size = mine[-2:]
            if start + size == given[0] and start <= self._slot and self._base + given[0] == before:
                # What is nearly always so: the cursor stands in the last extent, and that one goes on.
                if before + given[1] != capacity:
                    raise PeerFault(f"sequence {self.id} grew by {given[1]} from {before} to {capacity}")
                mine[-1] = size + given[1]
                self.capacity = capacity
                self._asked = SETTLED
                self._answer = self._error = None
                self._mark = mark = capacity - ((given[1] + 1) >> 1)
                stop = mark - self._base
                self._stop = stop if stop > self._slot else self._slot
                return
        position = answer.position
        length = self._slot + self._base
        if position > before:
            raise PeerFault(f"sequence {self.id} grew from {position}, but ends at {before}")
        if position + sum(given[1::2]) != capacity:
            raise PeerFault(f"sequence {self.id} grew by {sum(given[1::2])} from {position} to {capacity}")
        self._cut(position)
        self._add(given)
        self.capacity = capacity
        if answer.copies:
            self._copies += answer.copies
            self._given += 1
        self._asked = SETTLED
        self._answer = self._error = None
        self._note_run(capacity - before)
        self._seat(length)

    def _will_move(self, position: int, extents: list[int]) -> None:
        """Positions from `position` on lie in `extents` from the next step on, as far as they are still there."""
        lengths = extents[1::2]
        if (
            len(extents) & 1
            or position < 0
            or min(extents[::2], default=0) < 0
            or min(lengths, default=1) < 1
        ):
            raise PeerFault(f"positions from {position} on of sequence {self.id} were moved to {extents}")
        size = min(sum(lengths), self.capacity - position)
        if size > 0:
            self._moved.append((position, _first(extents, size)))

    def _follow(self) -> None:
        """A step begins: it goes by where things have been moved to."""
        length = self._slot + self._base
        for position, moved in self._moved:
            self._replace(position, moved)
        self._moved = []
        self._seat(length)

    def _replace(self, position: int, moved: list[int]) -> None:
        """Positions from `position` on stand in `moved`; what touches is one extent."""
        extents = self.extents
        out: list[int] = []
        end = position + sum(moved[1::2])
        start = 0
        for i in range(0, len(extents), 2):
            slot, size = extents[i], extents[i + 1]
            stop = start + size
            if start < position:
                _join(out, slot, min(stop, position) - start)
            if start <= position < stop:
                for j in range(0, len(moved), 2):
                    _join(out, moved[j], moved[j + 1])
            if stop > end:
                skip = max(end - start, 0)
                _join(out, slot + skip, size - skip)
            start = stop
        extents[:] = out

    def _refused(self, answer: Later | Never | KvslotError, now: float) -> None:
        """The daemon gave no more room; it is asked again at `_retry_at` or when it says so."""
        self._asked = SETTLED
        if isinstance(answer, KvslotError):
            self._answer, self._error = None, answer
            self._retry_at = now
        else:
            self._answer, self._error = answer, None
            self._retry_at = now + (answer.retry_after_ms / 1e3 if isinstance(answer, Later) else 0.1)

    def _trimmed(self, keep_to: int, capacity: int, extents: list[int]) -> None:
        """The daemon has rolled back to `keep_to`; `extents` place what it kept behind, if that is known."""
        length = min(self._slot + self._base, keep_to)
        if capacity < keep_to or sum(extents[1::2]) > capacity - keep_to:
            raise PeerFault(f"sequence {self.id} was cut to {keep_to} and ends at {capacity}")
        del self._pending[max(length - self._told, 0) :]
        self._told = min(self._told, length)
        self._unsay(self._told)
        self._own_from = min(self._own_from, keep_to)
        self._give_up(min(keep_to, self.capacity))
        self._add(extents)
        self.capacity = keep_to + sum(extents[1::2])
        self._asked = SETTLED
        self._answer = self._error = None
        self._note_run(self.capacity - length)
        self._seat(length)

    # -- what the client says ----------------------------------------------------------------------------------

    def _roll_back(self, keep_to: int) -> None:
        """Drops tokens from `keep_to` on that nobody has been told of; their slots are written again."""
        del self._pending[keep_to - self._told :]
        self._stepped_length = min(self._stepped_length, keep_to)
        self._seat(keep_to)

    def _untold(self, length: int) -> bytes:
        """The tokens that the daemon needs to be told to know the first `length`."""
        return self._pending[: length - self._told].tobytes() if length > self._told else b""

    def _was_told(self, length: int) -> None:
        """A commit to `length` was sent."""
        if length > self._told:
            self._said += self._pending[: length - self._told].tobytes()
            del self._pending[: length - self._told]
            self._told = length
        self._own_from = max(self._own_from, length)

    def _unsay(self, length: int) -> None:
        """Of what was told only the first `length` tokens are still the sequence's."""
        prompt = len(self._prompt)
        if 4 * length < prompt:
            self._prompt = self._prompt[: 4 * length]
            self._said.clear()
        else:
            del self._said[4 * length - prompt :]

    def _all_tokens(self) -> bytes:
        """All tokens of the sequence."""
        return b"".join((self._prompt, self._said, self._pending.tobytes()))

    def _goes_on(self) -> None:
        """The next daemon runs it as it stands, and has been told all of its tokens."""
        length = self.length
        self._prompt, self._said, self._pending[:] = self._all_tokens(), bytearray(), array("i")
        self._told = self._own_from = length
        self._given = self._taken = self._taken_step = self._made = 0
        self._asked = SETTLED
        self._answer = self._error = self._spoiled = None
        self._retry_at = self.preempt_by = 0.0
        self._stepped = self._stepped_length = 0
        self._note_run(self.capacity - length)
        self._seat(length)

    def _finished(self, submitted: int, completed: int) -> int:
        """How many positions the device has surely written: all, unless steps are under way.

        Looked at whenever more room is asked for, so what it knows of the steps before is at most a run old.
        """
        length = self._slot + self._base
        if submitted == completed:
            return length
        if self._stepped > completed:
            return 0
        known = min(self._stepped_length, length)
        # What was appended since may be of a step that is not submitted yet.
        self._stepped, self._stepped_length = submitted + 1, length
        return known

    def _end(self, fault: KvslotError) -> None:
        """Nothing can be done with it any more; whoever tries is told `fault`."""
        self._fault = fault
        length = self._slot + self._base
        self._slot = self._stop = -1
        self._base = length + 1


def _join(extents: list[int], slot: int, length: int) -> None:
    """Appends one extent, or lets the last one grow."""
    if extents and extents[-2] + extents[-1] == slot:
        extents[-1] += length
    else:
        extents += (slot, length)


def _first(extents: list[int], length: int) -> list[int]:
    """The first `length` slots, at most all of them."""
    out: list[int] = []
    for i in range(0, len(extents), 2):
        if length <= 0:
            break
        out += (extents[i], min(length, extents[i + 1]))
        length -= extents[i + 1]
    return out


def _copies_within(copies: list[int], extents: list[int]) -> list[int]:
    """The part of `copies` whose targets lie in `extents`."""
    out: list[int] = []
    for i in range(0, len(copies), 3):
        source, target, length = copies[i : i + 3]
        for j in range(0, len(extents), 2):
            low = max(target, extents[j])
            high = min(target + length, extents[j] + extents[j + 1])
            if low < high:
                out += (source + low - target, low, high - low)
    return out


def freed(number: int) -> Ended:
    """What a freed sequence raises."""
    return Ended(f"sequence {number} was freed: its slots may be another's by now")
