"""The client library: `Client` for engines, `AsyncClient` for tools on an event loop, `Control` for operators."""

from kvslot.api.client.connection import Connection, default_socket
from kvslot.api.client.control import Control
from kvslot.api.client.errors import AdmissionTimeout, Closed, NeverFits, OutOfRoom, WrongProcess

__all__ = [
    "AdmissionTimeout",
    "Closed",
    "Connection",
    "Control",
    "NeverFits",
    "OutOfRoom",
    "WrongProcess",
    "default_socket",
]
