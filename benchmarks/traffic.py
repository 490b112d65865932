"""Made-up traffic that fills two pools alike: chats under a few system prompts, interleaved, turn by turn.

    system prompt (one of 8)  |  turn  |  turn  |  turn ...      a chat is one path of the tree, a turn one node
    ------- 512 tokens -------   384 .. 640 tokens each

At any time some hundred chats are open and a random one of them takes its next turn, so that nodes that stand next to
each other in memory belong to different chats, and what is evicted leaves holes between what stays.  Pools are filled
more than twice over before anything is measured: the free space is then that of a pool in service, not of a new one.

Tokens are a hash of (chat, position): any part of any chat can be made again, so nothing of it is kept.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np

from kvslot.allocator import Admitted, Pool, PoolConfig, Session, Space
from kvslot.replay.policies.hashed import ChainedPool, Shortage, Table

SYSTEMS: Final = 8
_VOCABULARY: Final = 0x1FFFF
_FRESH: Final = 1 << 30  # chats from here on exist only in measured requests


class Shape(NamedTuple):
    """How chats look.  All in tokens but for the counts."""

    system: int = 512
    turn_least: int = 384
    turn_most: int = 640
    chats_open: int = 256
    turns_least: int = 4
    turns_most: int = 24
    long_share: float = 0.2
    """Chats that go on for up to `turns_long` turns: prompts of 32k tokens need some."""
    turns_long: int = 72


class Turn(NamedTuple):
    """A chat goes on from `start` to `stop` tokens; `start` is 0 at its first turn."""

    chat: int
    start: int
    stop: int
    last: bool


def noise(seed: int, start: int, stop: int) -> bytes:
    """Tokens start..stop-1 of the endless text that `seed` names, as little-endian int32."""
    x = np.arange(start, stop, dtype=np.uint32)
    x *= np.uint32(0x9E3779B1)
    x += np.uint32((seed * 0x85EBCA6B + 0x1B873593) & 0xFFFFFFFF)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x2C1B3C6D)
    x ^= x >> np.uint32(13)
    x &= np.uint32(_VOCABULARY)
    return x.astype("<u4", copy=False).tobytes()


def text(shape: Shape, chat: int, start: int, stop: int) -> bytes:
    """Tokens start..stop-1 of a chat."""
    system = shape.system
    if start >= system:
        return noise(chat + SYSTEMS, start, stop)
    front = noise(chat % SYSTEMS, start, min(system, stop))
    return front + noise(chat + SYSTEMS, system, stop) if stop > system else front


def turns(shape: Shape, seed: int = 0) -> Iterator[Turn]:
    """Turns of interleaved chats, without end."""
    rng = random.Random(seed)
    born = 0
    chats: list[list[int]] = []  # chat, length, turns left
    while True:
        if len(chats) < shape.chats_open:
            if rng.random() < shape.long_share:
                left = rng.randint(shape.turns_most, shape.turns_long)
            else:
                left = rng.randint(shape.turns_least, shape.turns_most)
            chats.append([born, 0, left])
            born += 1
        # Chats begin one after the other, so that they do not all end at once.
        index = rng.randrange(len(chats))
        chat = chats[index]
        start = chat[1]
        stop = (start or shape.system) + rng.randint(shape.turn_least, shape.turn_most)
        chat[1] = stop
        chat[2] -= 1
        if not chat[2]:
            chats[index] = chats[-1]
            chats.pop()
        yield Turn(chat[0], start, stop, not chat[2])


class Side(Protocol):
    """One of the pools that are compared, as far as filling it goes."""

    def turn(self, turn: Turn, history: bytes) -> None:
        """The chat's `history`, the new turn at its end, is computed and cached."""

    def evicted_tokens(self) -> int:
        """Since the pool was made."""
        ...


class Ours:
    """kvslot's core with one session and one namespace."""

    def __init__(self, slots: int, block_size: int = 16, headroom: int = 0) -> None:
        """`headroom`: slots, where a pool is so small that the usual share of it is nothing."""
        padding = 1 if block_size > 1 else 2
        config = PoolConfig(blocks=slots // block_size + padding, block_size=block_size)
        if headroom > slots * config.headroom:
            config = msgspec.structs.replace(config, headroom=headroom / slots)
        self.pool = Pool(config)
        self.session: Session = self.pool.open_session()
        self.root: int = self.pool.open_space(Space())

    def turn(self, turn: Turn, history: bytes) -> None:
        self.cache(history)

    def cache(self, prompt: bytes) -> None:
        """A request's whole life: room, publication, release."""
        pool, session = self.pool, self.session
        admitted = pool.allocate(session, self.root, prompt)
        assert isinstance(admitted, Admitted), admitted
        pool.commit(session, admitted.sequence, len(prompt) >> 2)
        pool.free(session, admitted.sequence)

    def evicted_tokens(self) -> int:
        return self.pool.evicted_tokens


class Chained:
    """The plain paged allocator under chained block hashes.

    While a chat of the filling is open its table stays open too: hashing a whole history anew for each turn would make
    filling the pool take minutes, and the index comes out the same.
    """

    def __init__(self, slots: int, block_size: int = 16) -> None:
        self.pool = ChainedPool(slots // block_size, block_size)
        self._tables: dict[int, Table] = {}

    def turn(self, turn: Turn, history: bytes) -> None:
        pool = self.pool
        if turn.start:
            table = self._tables[turn.chat]
            missing = -(-turn.stop // pool.block_size) - len(table.blocks)
            assert pool.extend(table, missing)
        else:
            fresh = pool.allocate(history)
            assert not isinstance(fresh, Shortage)
            table = self._tables[turn.chat] = fresh
        pool.publish(table, history)
        if turn.last:
            pool.release(self._tables.pop(turn.chat))

    def cache(self, prompt: bytes) -> None:
        """A request's whole life: room, publication, release."""
        pool = self.pool
        table = pool.allocate(prompt)
        assert not isinstance(table, Shortage)
        pool.publish(table, prompt)
        pool.release(table)

    def close(self) -> None:
        """Releases what the filling held."""
        for table in self._tables.values():
            self.pool.release(table)
        self._tables.clear()

    def evicted_tokens(self) -> int:
        return self.pool.evicted * self.pool.block_size


class Filling:
    """Drives one pool through the same turns as any other filling of the same shape and seed."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        self._turns = turns(shape, seed)
        self._histories: dict[int, bytes] = {}
        self.tokens = 0
        """Tokens of turns cached so far."""
        self.ended: deque[tuple[int, int]] = deque(maxlen=1 << 16)
        """Chats that have ended and their lengths, oldest first."""

    def run(self, side: Side, tokens: int, served: Callable[[], None] | None = None) -> int:
        """Caches turns until `tokens` more tokens were new; returns how many turns that took.

        `served` is called after each turn."""
        stop_at = self.tokens + tokens
        count = 0
        histories = self._histories
        shape = self.shape
        for turn in self._turns:
            history = histories.get(turn.chat, b"") + text(shape, turn.chat, turn.start, turn.stop)
            if turn.last:
                histories.pop(turn.chat, None)
                self.ended.append((turn.chat, turn.stop))
            else:
                histories[turn.chat] = history
            side.turn(turn, history)
            if served is not None:
                served()
            self.tokens += turn.stop - turn.start
            count += 1
            if self.tokens >= stop_at:
                break
        return count

    def recent(self, length: int, most: int, within: int) -> list[int]:
        """Up to `most` ended chats of at least `length` tokens, youngest first, from the last `within` tokens."""
        found: list[int] = []
        for chat, total in reversed(self.ended):
            within -= total
            if within < 0 or len(found) == most:
                break
            if total >= length:
                found.append(chat)
        return found


class Short:
    """Short chats: a first turn is cached, and some requests later the second turn comes, half of it cached then."""

    def __init__(self, shape: Shape, half: int, delay: int) -> None:
        self.shape = shape
        self.half = half
        self._born = _FRESH
        self._delay = delay
        self._waiting: deque[int] = deque()

    def first(self) -> bytes:
        """The first turn of a new chat: `half` tokens."""
        self._born += 1
        self._waiting.append(self._born)
        return self._text(self._born, self.half)

    def second(self) -> bytes | None:
        """The whole prompt of the second turn of a chat `delay` requests old, once there is one: 2 x half tokens."""
        if len(self._waiting) <= self._delay:
            return None
        return self._text(self._waiting.popleft(), 2 * self.half)

    def _text(self, chat: int, length: int) -> bytes:
        system = min(self.shape.system, self.half // 3)
        return noise(SYSTEMS + 64 + chat % SYSTEMS, 0, system) + noise(chat, system, length)


def branch(shape: Shape, chat: int, half: int, serial: int) -> bytes:
    """A prompt of 2 x half tokens: the first half is that of an older chat, the rest is new."""
    return text(shape, chat, 0, half) + noise(_FRESH + (1 << 28) + serial, half, 2 * half)
