"""Between engines and the daemon: the wire (`api.wire`) and the client library (`api.client`)."""

from kvslot.api import wire

__all__ = ["wire"]
