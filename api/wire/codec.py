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

PARTS: Final = 256  # of a frame, kept apart; who sends byte by byte shall not make us keep an object for each

_length = struct.Struct("<I").unpack_from
_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_outgoing = msgspec.msgpack.Decoder(Outgoing)


class Reader:
    """Cuts a stream into frames."""

    __slots__ = ("limit", "uncut", "_need", "_parts", "_size")

    def __init__(self, limit: int = FRAME_BYTES) -> None:
        self.limit = limit
        self.uncut = False  # there may be whole frames in what was fed: `cut` has them
        self._parts: list[bytes | memoryview] = []  # of frames that are not complete: joined once they are
        self._size = 0  # bytes they have
        self._need = 0  # bytes at which there is something to cut

    def cut(self, most: int) -> list[bytes | memoryview]:
        """More of what was fed, where `feed` stopped at `most`."""
        return self.feed(b"", most) if self.uncut else []

    def feed(self, data: bytes, most: int = 1 << 30) -> list[bytes | memoryview]:
        """The bodies that `data` completes, in order; raises PeerFault on a length that is 0 or beyond the limit.

        At most `most` of them: what is left is kept as it is, and `uncut` says so.

        Frames that came before a bad length in the same `data` are lost with it: the stream ends there.
        """
        size = len(data)
        if self._size:
            self._parts.append(data)
            self._size = size = self._size + size
            if size < self._need:
                if len(self._parts) > PARTS:
                    self._parts = [b"".join(self._parts)]
                return []
            whole = self._parts[0] if len(self._parts) == 2 and not data else b"".join(self._parts)
            self._parts.clear()
            self._size = 0
        elif size >= HEAD and _length(data)[0] == size - HEAD and 0 < size - HEAD <= self.limit:
            # What is nearly always so: one whole frame.
            return [memoryview(data)[HEAD:]]
        else:
            whole = data
        self.uncut = False
        view = memoryview(whole)
        bodies: list[bytes | memoryview] = []
        at, need = 0, HEAD
        while size - at >= HEAD:
            if len(bodies) >= most:
                self.uncut = True
                break
            length = _length(view, at)[0]
            if not 0 < length <= self.limit:
                raise PeerFault(f"a frame of {length} bytes: from 1 to {self.limit} are allowed")
            if size - at - HEAD < length:
                need = HEAD + length
                break
            at += HEAD + length
            bodies.append(view[at - length : at])
        if at < size:
            self._parts.append(view[at:])
            self._size, self._need = size - at, need
        return bodies

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not complete."""
        return self._size


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
