"""The operator's side of the wire: look, evict, audit, drain, change a setting.  Needs no session.

The daemon grants control verbs to its own user, to root, and to those its configuration names; others get Denied.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from kvslot.api.client.connection import Connection
from kvslot.api.wire import messages


class Control:
    """A blocking connection for control verbs; use it as a context manager."""

    def __init__(self, socket: str = "", *, timeout: float = 30.0) -> None:
        """Connects to the daemon at `socket` ("": the usual place).  `timeout`: seconds an answer may take."""
        self._connection = Connection(socket, timeout=timeout)
        self._id = 0

    @property
    def socket(self) -> str:
        """The path of the daemon's socket."""
        return self._connection.path

    def limit(self, timeout: float) -> None:
        """From now on any one answer may take so many seconds."""
        self._connection.limit(timeout)

    def page(
        self, kind: str, *, pool: str = "", cursor: int = 0, limit: int = 0
    ) -> tuple[list[dict[str, Any]], int]:
        """Rows of `kind` from `cursor` on, and where the next page begins (0: nowhere)."""
        request = messages.Inspect(self._next(), kind, pool, cursor, limit)
        answer = self._connection.call(request, messages.Inspected)
        return answer.rows, answer.cursor

    def inspect(self, kind: str, *, pool: str = "", limit: int = 0) -> Iterator[dict[str, Any]]:
        """All rows of `kind`, page by page of at most `limit` rows (0: as many as fit a frame).

        Pages are taken one after the other while the daemon goes on: together they are no snapshot.
        """
        cursor = 0
        while True:
            rows, cursor = self.page(kind, pool=pool, cursor=cursor, limit=limit)
            yield from rows
            if not cursor:
                return

    def ping(self) -> messages.Pong:
        """Asks the daemon whether it is there; its boot number tells whether it is still the same."""
        return self._connection.call(messages.Ping(self._next()), messages.Pong)

    def evict(self, tokens: int, *, pool: str = "") -> int:
        """Evicts up to `tokens` cached tokens that nobody holds; how many it were."""
        return self._connection.call(messages.Evict(self._next(), tokens, pool), messages.Evicted).tokens

    def defrag(self, action: str = "status", *, pool: str = "") -> list[messages.Compaction]:
        """Compaction, pool by pool: "status", "start", "stop" or "once"; how it stands after that."""
        return self._connection.call(messages.Defrag(self._next(), pool, action), messages.Defragged).pools

    def audit(self, *, pool: str = "") -> messages.Audited:
        """Has a pool recounted from nothing: what is wrong, as sentences, and how long it took."""
        return self._connection.call(messages.Audit(self._next(), pool), messages.Audited)

    def drain(self, *, deadline_ms: int = 0) -> None:
        """Ends the daemon as SIGTERM does; `deadline_ms` 0: as configured."""
        self._connection.call(messages.Drain(self._next(), deadline_ms), messages.Done)

    def set_config(self, name: str, value: str) -> None:
        """Changes a setting that may be changed while the daemon runs."""
        self._connection.call(messages.SetConfig(self._next(), name, value), messages.Done)

    def record(
        self, action: str = "fetch", *, pool: str = "", values: bool = False, key: bytes = b""
    ) -> messages.Recorded:
        """Of a recording: "start" it for a pool, "fetch" what was noted since, "stop" it and fetch while there is more.

        `values`: tokens come as they are, not blinded.  `key`: of 64 bytes at most; with the same one, equal tokens
        are blinded alike by another boot of the daemon, too.  A recording ends with this connection.
        """
        return self._connection.call(
            messages.Record(self._next(), action, pool, values, key), messages.Recorded
        )

    def keep(
        self,
        *,
        node: int = 0,
        length: int = 0,
        namespace: messages.Namespace | None = None,
        tokens: bytes = b"",
        pool: str = "",
    ) -> messages.Pinned:
        """Pins a cached prefix until `unkeep` or the daemon's end: a `node` of `length` tokens, or `tokens` (int32)."""
        space = namespace or messages.Namespace()
        return self._connection.call(
            messages.Keep(self._next(), pool, node, length, space, tokens), messages.Pinned
        )

    def unkeep(self, pin: int, *, pool: str = "") -> None:
        """Ends a pin of `keep`."""
        self._connection.call(messages.Unkeep(self._next(), pin, pool), messages.Done)

    def reload(self) -> messages.Reloaded:
        """Has the settings read again, as SIGHUP does: what changed, and what needs a restart."""
        return self._connection.call(messages.Reload(self._next()), messages.Reloaded)

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next(self) -> int:
        self._id += 1
        return self._id
