"""Between engines and the daemon: the wire (`api.wire`) and the client library (`api.client`)."""

from kvslot.api import client, wire

__all__ = ["client", "wire"]
