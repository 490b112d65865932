"""The client library: `Client` for engines, `AsyncClient` for tools on an event loop, `Control` for operators.

With them come all errors that they raise, and the events of `Client.events`.

Importing it loads neither numpy nor torch nor asyncio: `AsyncClient` and `indices` are loaded when first asked for.
"""

from typing import TYPE_CHECKING, Any

from kvslot.api.client.client import Client, Step, Token
from kvslot.api.client.connection import Connection, default_socket
from kvslot.api.client.control import Control
from kvslot.api.client.errors import AdmissionTimeout, Closed, Lost, NeverFits, OutOfRoom, WrongProcess
from kvslot.api.client.memory import PoolMemory
from kvslot.api.client.sequence import Sequence
from kvslot.api.client.session import Event, Statistics
from kvslot.api.wire.errors import (
    BadRequest,
    Busy,
    Denied,
    Disconnected,
    Ended,
    Exists,
    KvslotError,
    NotFound,
    OutOfTurn,
    PeerFault,
    Refused,
    ShuttingDown,
    StaleSession,
    TooLarge,
    Unsupported,
    WrongVersion,
)
from kvslot.api.wire.messages import (
    Abandoned,
    Draining,
    Later,
    Namespace,
    Never,
    Preempt,
    Pressure,
    Published,
    Ready,
)

if TYPE_CHECKING:
    from kvslot.api.client import indices
    from kvslot.api.client.aio import AsyncClient, AsyncSequence

__all__ = [
    "Abandoned",
    "AdmissionTimeout",
    "AsyncClient",
    "AsyncSequence",
    "BadRequest",
    "Busy",
    "Client",
    "Closed",
    "Connection",
    "Control",
    "Denied",
    "Disconnected",
    "Draining",
    "Ended",
    "Event",
    "Exists",
    "KvslotError",
    "Later",
    "Lost",
    "Namespace",
    "Never",
    "NeverFits",
    "NotFound",
    "OutOfRoom",
    "OutOfTurn",
    "PeerFault",
    "PoolMemory",
    "Preempt",
    "Pressure",
    "Published",
    "Ready",
    "Refused",
    "Sequence",
    "ShuttingDown",
    "StaleSession",
    "Statistics",
    "Step",
    "Token",
    "TooLarge",
    "Unsupported",
    "WrongProcess",
    "WrongVersion",
    "default_socket",
    "indices",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("AsyncClient", "AsyncSequence"):
        return getattr(importlib.import_module("kvslot.api.client.aio"), name)
    if name == "indices":
        return importlib.import_module("kvslot.api.client.indices")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
