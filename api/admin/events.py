"""What /v1/events is made of: a bounded ring of numbered events, and readers that follow it.

    log line ─┐
              ├─► ring ─► reader ─► text/event-stream        id: 1796000000123
    tick ─────┘    │                                         event: log | tick | missed | dropped | end
                   └─ the oldest go                          data: one line of JSON

Numbers rise by one and begin with the time of the start in milliseconds, so that they go on rising over a restart of
the daemon: a reader that comes back with a number of before is told what it has missed, and gets the rest.  The ring
is bounded in events and in bytes.  A reader that falls too far behind is dropped, with a last event that says so;
nobody else notices.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, Final, NamedTuple

import msgspec

EVENTS_MOST: Final = 4096
BYTES_MOST: Final = 2 << 20
"""Half an hour of ticks; the whole process has some forty megabytes beside its pools."""
LINE_MOST: Final = 64 << 10
"""Bytes of one event; what is longer is cut down to its name."""

KINDS: Final = ("log", "tick")


class Entry(NamedTuple):
    """An event as it is sent."""

    number: int
    kind: str
    data: bytes  # JSON, without line ends

    def frame(self) -> bytes:
        """As text/event-stream has it."""
        return b"id: %d\nevent: %b\ndata: %b\n\n" % (self.number, self.kind.encode(), self.data)


class Ring:
    """The latest events, oldest first; their numbers have no holes."""

    def __init__(
        self, *, events_most: int = EVENTS_MOST, bytes_most: int = BYTES_MOST, first: int | None = None
    ) -> None:
        self._entries: deque[Entry] = deque()
        self._bytes = 0
        self._events_most = events_most
        self._bytes_most = bytes_most
        self._next = int(time.time() * 1000) if first is None else first
        self._readers: set[Reader] = set()
        self._encoder = msgspec.json.Encoder(enc_hook=repr)
        self.closed = False
        self.dropped = 0
        """Readers that were too slow."""

    @property
    def first(self) -> int:
        """Number of the oldest event that is kept, or of the next one."""
        return self._next - len(self._entries)

    @property
    def last(self) -> int:
        """Number of the latest event; one less than `first` before there was any."""
        return self._next - 1

    @property
    def readers(self) -> int:
        """How many follow."""
        return len(self._readers)

    def add(self, kind: str, content: Any) -> int:
        """Takes an event in; `content` becomes its JSON.  Returns its number."""
        try:
            data = self._encoder.encode(content)
        except Exception:  # noqa: BLE001 -- a field that cannot be shown must not cost the event
            data = self._encoder.encode({str(key): repr(value) for key, value in dict(content).items()})
        if len(data) > LINE_MOST:
            name = content.get("event", "") if isinstance(content, dict) else ""
            data = self._encoder.encode({"event": name, "cut": len(data)})
        number = self._next
        self._next += 1
        self._entries.append(Entry(number, kind, data))
        self._bytes += len(data)
        while len(self._entries) > self._events_most or self._bytes > self._bytes_most:
            self._bytes -= len(self._entries.popleft().data)
        for reader in self._readers:
            reader.wake()
        return number

    def take(self, number: int, most: int) -> list[Entry]:
        """Up to `most` events from `number` on, as far as they are kept."""
        skip = max(0, number - self.first)
        count = min(most, len(self._entries) - skip)
        # From the end a deque is as quick as from its start; readers are mostly near the end.
        return [self._entries[skip + index] for index in range(count)]

    def follow(self, number: int) -> Reader:
        """A reader whose first event is `number`, or the next one for a number beyond."""
        reader = Reader(self, min(number, self._next))
        self._readers.add(reader)
        return reader

    def leave(self, reader: Reader) -> None:
        """It reads no more."""
        self._readers.discard(reader)

    def close(self) -> None:
        """No more events: readers get what there is, and then the end."""
        self.closed = True
        for reader in self._readers:
            reader.wake()


class Reader:
    """One follower of a ring."""

    def __init__(self, ring: Ring, number: int) -> None:
        self._ring = ring
        self.number = number
        self._awake = asyncio.Event()

    def wake(self) -> None:
        """There is something."""
        self._awake.set()

    @property
    def missed(self) -> int:
        """Events from its place on that are no longer kept."""
        return max(0, self._ring.first - self.number)

    def skip_missed(self) -> None:
        """Goes on with the oldest that is kept."""
        self.number = max(self.number, self._ring.first)

    def take(self, most: int) -> list[Entry]:
        """What there is from its place on, which moves behind it."""
        found = self._ring.take(self.number, most)
        self.number += len(found)
        return found

    async def wait(self) -> bool:
        """Until there is something to take, or nothing more comes: False."""
        while self.number > self._ring.last:
            if self._ring.closed:
                return False
            self._awake.clear()
            await self._awake.wait()
        return True
