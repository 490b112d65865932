"""Bytes that no client of ours would send, and what the daemon does with them: an answer, or the connection's end.

A stream is good frames with some made worse: bytes flipped, put in, taken out, cut off at any byte, lengths that lie,
values of the wrong type or beyond their range, nests without end, verbs out of turn, numbers of no verb.  Verbs
that would end the daemon or change its settings for all are left out, whatever a mutation makes of a frame.
"""

from __future__ import annotations

import random
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvslot.api.wire import VERSION, PeerFault, Reader, decode_outgoing, decode_request, encode, messages

from ..tools.wire import tokens

LIMIT = 8 << 20
LAST = 2**62
"""Id of the Ping that says: everything before it has been dealt with."""
NEST = b"\x91" * 100_000 + b"\xc0"
NUMBERS: list[Any] = [
    0,
    1,
    2,
    3,
    7,
    15,
    16,
    17,
    31,
    32,
    255,
    1024,
    1040,
    2**31 - 1,
    2**31,
    2**32,
    2**60,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -1,
    -2,
    -(2**31),
    -(2**63),
    0.0,
    1.0,
    -1.5,
    float("nan"),
    float("inf"),
    True,
    False,
    None,
    "",
    "7",
    b"",
    b"7",
    [],
    [1],
    {},
    {1: 2},
]
TEXTS: list[Any] = [
    "",
    "x",
    "ä€😀",
    "\x00",
    "\n\r\x1b[2J",
    "x" * 255,
    "x" * 257,
    "é" * 256,
    b"bytes",
    7,
    None,
    [],
    True,
    "lru",
    "memory",
]
BYTES: list[Any] = [
    b"",
    b"\x00",
    b"\x00" * 3,
    b"\x00" * 4,
    b"\xff" * 4,
    b"\x00" * 5,
    tokens(20),
    tokens(1023),
    tokens(1024),
    tokens(1025),
    "text",
    1,
    None,
    [1, 2],
    b"\x80" * 64,
    b"\x80" * 65,
]
RAW = [  # bodies that are no message, whatever they are
    b"\xc0",
    b"\xc1",
    b"\x00",
    b"\x90",
    b"\x80",
    b"\xa0",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\xdc\xff\xff",
    b"\x92\x12\x01\xc0",
    b"\x92\x12",
    b"\x91\x12",
    b"\x92\xcb" + b"\x00" * 8 + b"\x01",
    b"\x92\x40\x01",
    b"\x92\x3f\x01",
    b"\x92\xcc\xff\x01",
    b"\x92\x12\xca\x7f\xc0\x00\x00",
    b"\x92\x12\xcb\x7f\xf8" + b"\x00" * 6,
    b"\x92\x12\xc3",
    b"\x92\x12\xff",
    b"\x92\x12\xcf" + b"\xff" * 8,
    b"\x92\x12\xd3\x80" + b"\x00" * 7,
    b"\x93\x13\x01\x91\xc0",
    b"\x93\x13\x01\x91\x91\x12",
    b"\x94\x01\x01\x01\xa2\xc3\x28",
    b"\x82\x00\x12\x00\x12",
    b"\x92\xa41234\x01",
]
KEPT_BACK = (messages.Drain, messages.SetConfig)

_pack = msgspec.msgpack.Encoder().encode


def frame(body: bytes) -> bytes:
    """A body with its length."""
    return struct.pack("<I", len(body)) + body


def depth_bombs() -> list[bytes]:
    """Nests without end: as the message, as a field, as an unknown field behind the known ones, inside a batch."""
    return [
        frame(NEST),
        frame(b"\x92\x12" + NEST),
        frame(b"\x93\x12\x01" + NEST),
        frame(b"\x95\x03\x01\x01\xc4\x00" + NEST),
        frame(b"\x93\x13\x01\x91" + NEST),
        frame(b"\x94\x13\x01\x90" + NEST),
        frame(b"\x93\x12\x01" + b"\x81\xc0" * 100_000 + b"\xc0"),
        frame(b"\x93\x12\x01" + b"\x81" * 100_000 + b"\xc0"),
        frame(b"\x93\x12\x01" + b"\x91" * (LIMIT - 8) + b"\xc0"),
    ]


def whole(rng: random.Random) -> list[Any]:
    """A good request, as the list it is on the wire."""
    return rng.choice(_requests(rng))


def _requests(rng: random.Random) -> list[list[Any]]:
    number, sequence, root = rng.randrange(1, 1000), rng.randrange(6), rng.choice([1, 1, 1, 2, 3])
    prompt = tokens(rng.choice([0, 1, 15, 16, 17, 20, 40, 100, 900]), rng.choice([0, 0, 1000]))
    fence = rng.choice([0, 0, 1])
    return [
        [18, number],
        [3, number, root, prompt],
        [4, number, root, sequence, prompt, 0, rng.randrange(3), rng.random() < 0.2, rng.random() < 0.2],
        [4, number, root, sequence, prompt],
        [5, number, sequence, rng.randrange(40), rng.randrange(40)],
        [6, number, sequence, rng.randrange(40)],
        [6, number, sequence, rng.randrange(60), prompt],
        [7, number, sequence, rng.randrange(6), rng.randrange(40), rng.randrange(40)],
        [8, number, sequence, rng.randrange(-1, 20), rng.randrange(-1, 40), fence],
        [9, number, sequence, fence],
        [9, 0, sequence],
        [2, number, ["t", "m", "", rng.choice("abc")]],
        [10, number, sequence],
        [11, number, sequence],
        [12, number, root, prompt],
        [13, number, root, prompt],
        [14, number, rng.randrange(1 << 20)],
        [15, number, rng.randrange(1 << 20)],
        [16, number, rng.randrange(9), b"secret"],
        [19, number, [[3, 0, root, prompt], [9, 0, sequence], [5, 0, sequence]]],
        [32, number, rng.choice(["status", "sessions", "map", "tree", "frag", "nothing"]), "", rng.randrange(9)],
        [33, number, rng.randrange(200)],
        [34, number],
        [38, number, rng.choice(["start", "start", "fetch", "stop", "x"]), "", rng.random() < 0.5],
        [1, number, VERSION, "again"],
        [1, number, VERSION, "x", "", ["t", "m", "", rng.choice("abc")], "", 1, "", -1, False, rng.random() < 0.2,
         0, 0, 0, 0, b""],
        [1, number, VERSION, "x", "default", ["", "", "", ""], "", 16, "peel", 3, True, False,
         100, 7, rng.randrange(9), 0, b"x" * 16],
        [1, number, VERSION, "x", "default", ["", "", "", ""], "", 1, "chain", 3, False, False,
         9, 7, 0, rng.randrange(9), b"x" * 16],
    ]  # fmt: skip


def _worse_value(rng: random.Random, value: Any) -> Any:
    if rng.random() < 0.1:
        return rng.choice(NUMBERS + TEXTS + BYTES)
    if isinstance(value, bytes):
        return rng.choice(BYTES)
    if isinstance(value, str):
        return rng.choice(TEXTS)
    if isinstance(value, list):
        inner = list(value)
        if inner and rng.random() < 0.8:
            place = rng.randrange(len(inner))
            inner[place] = _worse_value(rng, inner[place])
        elif rng.random() < 0.5:
            inner += [rng.choice(NUMBERS)] * rng.randrange(1, 5)
        else:
            inner = []
        return inner
    return rng.choice(NUMBERS)


def _worse_bytes(rng: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        if not data:
            break
        place = rng.randrange(len(data))
        match rng.randrange(6):
            case 0:
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                data[place] = rng.randrange(256)
            case 2:
                data.insert(place, rng.randrange(256))
            case 3:
                del data[place]
            case 4:
                del data[place:]
            case _:
                data += rng.randbytes(rng.randrange(1, 9))
    return bytes(data)


def bodies(rng: random.Random) -> Iterator[bytes]:
    """Bodies, good and worse, without end."""
    while True:
        fields = whole(rng)
        match rng.randrange(10):
            case 0 | 1:
                yield _pack(fields)
            case 2 | 3 | 4 | 5:
                place = rng.randrange(len(fields)) if rng.random() < 0.15 else rng.randrange(1, len(fields))
                fields[place] = _worse_value(rng, fields[place])
                yield _pack(fields)
            case 6 | 7:
                yield _worse_bytes(rng, _pack(fields))
            case 8:
                more = [*fields, *(rng.choice(NUMBERS + TEXTS + BYTES) for _ in range(rng.randrange(1, 30)))]
                yield _pack(more)
            case _:
                yield rng.choice(RAW) if rng.random() < 0.7 else rng.randbytes(rng.randrange(1, 40))


def kept_back(body: bytes) -> bool:
    """Whether a body would do to all what a test may not."""
    try:
        return isinstance(decode_request(body), KEPT_BACK)
    except PeerFault:
        return False


def ends(body: bytes) -> bool:
    """Whether a body ends its connection by being unreadable."""
    try:
        decode_request(body)
    except PeerFault:
        return True
    return False


class Stranger:
    """A connection that sends what it is given and reads what comes, without ever waiting long."""

    def __init__(self, path: Path, *, hello: bool, rng: random.Random) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10.0)
        self.sock.connect(str(path))
        self.reader = Reader(1 << 28)
        self.replies = 0
        self.settled = self.welcomed = False
        self.session = hello
        if hello:
            self.sock.sendall(encode(messages.Hello(1, VERSION, f"fuzz{rng.randrange(99)}", map=False)))
            self.settle(1)
            self.session = self.welcomed  # there may be no more sessions for a process that has lost so many

    def send(self, data: bytes) -> bool:
        """False once the daemon has closed the connection."""
        try:
            self.sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def take(self, wait: float) -> bool:
        """Reads what there is within `wait`; False at the end of the stream."""
        ready, _, _ = select.select([self.sock], [], [], wait)
        if not ready:
            return True
        try:
            data = self.sock.recv(1 << 18)
        except ConnectionResetError:
            return False
        if not data:
            return False
        for body in self.reader.feed(data):
            reply = decode_outgoing(body)  # whatever it was, the answer is in order
            self.replies += 1
            self.welcomed |= isinstance(reply, messages.Welcome)
            self.settled |= isinstance(reply, messages.Pong) and reply.id == LAST
        return True

    def settle(self, replies: int, seconds: float = 10.0) -> bool:
        """Reads until so many replies have come; False when the stream ends before."""
        deadline = time.monotonic() + seconds
        while self.replies < replies:
            if not self.take(max(0.0, deadline - time.monotonic())):
                return False
            assert time.monotonic() < deadline, "neither answered nor closed"
        return True

    def caught_up(self, seconds: float = 10.0) -> bool:
        """Reads up to the answer to Ping(LAST); False when the stream ends before."""
        deadline = time.monotonic() + seconds
        self.settled = False
        while not self.settled:
            if not self.take(max(0.0, deadline - time.monotonic())):
                return False
            assert time.monotonic() < deadline, "neither answered nor closed"
        return True

    def ended(self, seconds: float = 10.0) -> bool:
        """Whether the daemon closes the connection by itself."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.take(max(0.0, deadline - time.monotonic())):
                return True
        return False

    def close(self) -> None:
        self.sock.close()


def flood(path: Path, seed: int, frames: int, *, together: int = 16) -> int:
    """Sends so many frames over as many connections as it takes; returns how many connections the daemon ended.

    Frames go out in pieces of up to `together`, each cut into two sends anywhere.  What can be read must be answered,
    and the first that cannot be read must end the connection, with an Error before.
    """
    rng = random.Random(seed)
    source = bodies(rng)
    ended = 0
    one: Stranger | None = None
    while frames > 0:
        if one is None:
            one = Stranger(path, hello=rng.random() < 0.8, rng=rng)
        piece = [body for _ in range(rng.randrange(1, together)) if not kept_back(body := next(source))]
        data = b"".join(frame(body) if body else frame(b"\xc0") for body in piece)
        frames -= len(piece)
        lies = rng.random()
        if lies < 0.01:
            data += struct.pack("<I", rng.choice([0, LIMIT + 1, 2**31, 2**32 - 1])) + rng.randbytes(9)
        elif lies < 0.02:
            data += frame(b"\x92\x12\x01")[
                : rng.randrange(1, 7)
            ]  # half a frame, and then the connection closes
        cut = rng.randrange(len(data) + 1)
        alive = one.send(data[:cut]) and one.send(data[cut:])
        broken = lies < 0.01 or any(map(ends, piece))
        if alive and not broken and lies >= 0.02:
            # A ping behind it all: its answer says that everything before has been dealt with.
            alive = one.send(encode(messages.Ping(LAST))) and one.caught_up()
            assert alive or not one.session, (seed, piece)
        if broken:
            assert one.ended(), (seed, piece)
        if broken or not alive or lies < 0.02 or rng.random() < 0.02:
            ended += broken
            one.close()
            one = None
    if one is not None:
        one.close()
    return ended
