"""Bytes in, messages out; messages in, bytes out.  Knows no socket and no clock.

    Reader.feed(bytes) -> bodies of the frames that are complete now
    decode_request(body), decode_outgoing(body) -> message, or PeerFault
    encode(message) -> frame

A frame's length is checked before any of its body is kept, so that a lying one costs four bytes.  Whatever a decoder
does to a body it cannot read (truncated, unknown number, wrong type, nested without end) is one PeerFault.
"""

from __future__ import annotations

import struct
from typing import Final, TypeVar

import msgspec

from kvslot.api.wire.errors import PeerFault
from kvslot.api.wire.messages import Outgoing, Request

HEAD: Final = 4
FRAME_BYTES: Final = (
    8 << 20
)  # a prompt of two million tokens; what one client may make the daemon hold in memory

M = TypeVar("M")

_length = struct.Struct("<I").unpack_from
_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_outgoing = msgspec.msgpack.Decoder(Outgoing)


class Reader:
    """Cuts a stream into frames."""

    __slots__ = ("limit", "_buffer")

    def __init__(self, limit: int = FRAME_BYTES) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes | memoryview]:
        """The bodies that `data` completes, in order; raises PeerFault on a length that is 0 or beyond the limit.

        Frames that came before a bad length in the same `data` are lost with it: the stream ends there.
        """
        buffer = self._buffer
        size = len(data)
        if not buffer:
            # What is nearly always so: one whole frame.
            if size >= HEAD and _length(data)[0] == size - HEAD and 0 < size - HEAD <= self.limit:
                return [memoryview(data)[HEAD:]]
            view, stop, kept = memoryview(data), size, False
        else:
            buffer += data
            stop = len(buffer)
            if stop < HEAD or (stop < HEAD + _length(buffer)[0] and 0 < _length(buffer)[0] <= self.limit):
                return []
            view, kept = memoryview(bytes(buffer)), True
        bodies: list[bytes | memoryview] = []
        at = 0
        while stop - at >= HEAD:
            length = _length(view, at)[0]
            if not 0 < length <= self.limit:
                raise PeerFault(f"a frame of {length} bytes: from 1 to {self.limit} are allowed")
            if stop - at - HEAD < length:
                break
            at += HEAD + length
            bodies.append(view[at - length : at])
        if kept:
            del buffer[:at]
        elif at < stop:
            buffer += view[at:]
        return bodies

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not complete."""
        return len(self._buffer)

    def wanted(self) -> int:
        """How many bytes are missing from the frame that has begun; 0 where that is not known."""
        return HEAD + _length(self._buffer)[0] - len(self._buffer) if len(self._buffer) >= HEAD else 0


def encode(message: msgspec.Struct) -> bytes:
    """The whole frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(HEAD, "little") + body


def decode_request(body: bytes | memoryview) -> Request:
    """What a client sent; PeerFault where it is none of the requests."""
    return _decode(_requests, body)


def decode_outgoing(body: bytes | memoryview) -> Outgoing:
    """What the daemon sent, a reply or a push; PeerFault where it is neither."""
    return _decode(_outgoing, body)


def _decode(decoder: msgspec.msgpack.Decoder[M], body: bytes | memoryview) -> M:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, ValueError) as error:
        raise PeerFault(f"a frame that cannot be read: {error}") from None
