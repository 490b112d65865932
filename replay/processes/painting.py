"""What is written into slots in place of K and V: a value that only the right token at the right place can have.

    sum[p]   = sum[p - 1] + mix(token[p]) * factor[p]        mod 2^64, so over all tokens up to and including p
    value[p] = finalise(sum[p] + namespace + p * constant)

Two sequences have the same value at a position exactly if they have the same namespace and the same tokens up to it
(but for one chance in 2^64), which is when they may share the slot.  So whoever reads a slot knows what must be in it:
a table that points one slot aside, a slot that was given to two, a hit on another prompt's tokens, a slot reused before
its last reader was done: all of them show as a value that differs.

Each plane holds the value combined with a constant of its own, in the first eight bytes of the slot (or all, where a
slot is shorter).
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvslot.api.client import PoolMemory

Values = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int64]

_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_C1, _C2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_CHUNK: Final = 8192  # positions worked on at a time: the buffers stay in a core's own cache
WORD: Final = 8  # bytes of a value


class WrongSlot(Exception):
    """A slot does not hold what was written for this token: two tables point at it, or one points aside."""

    def __init__(
        self,
        client: int,
        sequence: int,
        position: int,
        slot: int,
        plane: str,
        expected: int,
        found: int,
        what: str,
    ) -> None:
        super().__init__(
            f"wrong slot: client {client}, sequence {sequence}, position {position}, slot {slot}, plane {plane}: "
            f"expected {expected:016x}, found {found:016x} ({what})"
        )
        self.client = client
        self.sequence = sequence
        self.position = position
        self.slot = slot
        self.expected = expected
        self.found = found


def namespace_number(*names: str) -> int:
    """A namespace as a number that goes into every value."""
    return int.from_bytes(hashlib.blake2b("\0".join(names).encode(), digest_size=8).digest(), "little")


def slots_of(extents: list[int], start: int, stop: int) -> Slots:
    """The slots of positions [start, stop), which flat extents (slot, length, ...) place from position 0 on."""
    pairs = np.array(extents, dtype=np.int64).reshape(-1, 2)
    ends = np.cumsum(pairs[:, 1])
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, stop, side="left")) + 1
    pairs, ends = pairs[first:last], ends[first:last]
    # Of each extent: what is to be added to a position to get its slot.
    offsets = pairs[:, 0] - (ends - pairs[:, 1])
    lengths = np.minimum(ends, stop) - np.maximum(ends - pairs[:, 1], start)
    slots: Slots = np.arange(start, stop, dtype=np.int64) + np.repeat(offsets, lengths)
    return slots


class Painter:
    """Values for one namespace, written to and compared with the planes of one pool."""

    def __init__(self, memory: PoolMemory, namespace: int, client: int = 0) -> None:
        self.client = client
        self.painted = 0
        """Tokens written (in all planes)."""
        self.verified = 0
        """Tokens read back and found right (in all planes)."""
        self._namespace = np.uint64(namespace)
        self._factors = np.empty(0, dtype=np.uint64)
        self._planes = [
            (name, _words(memory.plane(name)), _constant(name)) for name in memory.planes
        ]  # fmt: skip

    def let_go(self) -> None:
        """No view of the pool's memory is held any longer."""
        self._planes.clear()

    def values(self, tokens: npt.NDArray[np.int32]) -> Values:
        """The value of each position of a sequence."""
        count = len(tokens)
        if count > len(self._factors):
            size = max(2 * len(self._factors), count)
            self._factors = _finalise(np.arange(1, size + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)
        out = np.empty(count, dtype=np.uint64)
        carried = self._namespace
        for at in range(0, count, _CHUNK):
            part = out[at : at + _CHUNK]
            np.multiply(tokens[at : at + _CHUNK].astype(np.uint64) + _GOLDEN, _C1, out=part)
            part ^= part >> _S31
            part *= self._factors[at : at + len(part)]
            np.cumsum(part, out=part)
            part += carried
            carried = part[-1]
        for at in range(0, count, _CHUNK):
            part = out[at : at + _CHUNK]
            part += np.arange(at, at + len(part), dtype=np.uint64) * _GOLDEN
            part[:] = _finalise(part)
        return out

    def paint(self, slots: Slots, values: Values) -> None:
        """Writes values to slots, in every plane."""
        for _, words, constant in self._planes:
            if words.ndim == 1:
                words[slots] = values ^ constant
            else:
                words[slots] = (values ^ constant).view(np.uint8).reshape(-1, WORD)[:, : words.shape[1]]
        self.painted += len(slots)

    def verify(self, slots: Slots, values: Values, first: int, sequence: int, what: str) -> None:
        """Compares what is in the slots of positions from `first` on; raises WrongSlot for the first that differs."""
        for name, words, constant in self._planes:
            found = words[slots]
            expected = values ^ constant
            if words.ndim == 1:
                if np.array_equal(found, expected):
                    continue
                at = int(np.flatnonzero(found != expected)[0])
                value = int(found[at])
            else:
                wanted = expected.view(np.uint8).reshape(-1, WORD)[:, : words.shape[1]]
                if np.array_equal(found, wanted):
                    continue
                at = int(np.flatnonzero((found != wanted).any(axis=1))[0])
                value = int.from_bytes(found[at].tobytes(), "little")
            raise WrongSlot(
                self.client, sequence, first + at, int(slots[at]), name, int(expected[at]), value, what
            )
        self.verified += len(slots)


def _words(plane: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A plane as one number a slot, or where slots are of another size as the first bytes of each."""
    raw = plane.reshape(len(plane), -1).view(np.uint8)
    if raw.shape[1] == WORD:
        return raw.view(np.uint64).reshape(-1)
    return raw[:, : min(WORD, raw.shape[1])]


def _constant(name: str) -> np.uint64:
    return np.uint64(namespace_number("plane", name))


def _finalise(x: Values) -> Values:
    """SplitMix64's."""
    x = (x ^ (x >> _S30)) * _C1
    x = (x ^ (x >> _S27)) * _C2
    return x ^ (x >> _S31)
