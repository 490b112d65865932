"""The pool as this process sees it: one shared mapping, and its planes as numpy arrays and torch tensors, never copied.

Views keep the mapping exported: closing it under one raises BufferError, and the memory stays.  (A tensor made by
`torch.frombuffer` would not, and its next use after a close would be a segmentation fault; tensors are made from numpy
arrays here for that reason.)

Children of a fork do not get the mapping (MADV_DONTFORK): memory whose lease only the parent can renew is of no use to
them.  A view that a child inherits must not be touched there; the client refuses, but an array cannot.
"""

from __future__ import annotations

import importlib
import mmap
from typing import TYPE_CHECKING, Any, Final

from kvslot.api.wire import BadRequest, NotFound, Plane
from kvslot.api.wire.messages import Pool

if TYPE_CHECKING:
    import numpy as np

NUMPY: Final = {
    "bfloat16": "uint16",
    "float16": "float16",
    "float32": "float32",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "uint8": "uint8",
}
"""How numpy, which has no bfloat16 and no float8, holds each dtype: as numbers of the same width."""

_inherited: list[object] = []
"""Mappings that a fork left this process without memory for.  Never let go: their addresses may be something else's by
now, and unmapping them would take that away."""


class PoolMemory:
    """A pool: what it is (`description`) and, if mapped, its memory."""

    def __init__(self, description: Pool, descriptor: int = -1) -> None:
        """Maps the memory behind `descriptor` (-1: none), which may be closed afterwards."""
        self.description = description
        self._planes = {plane.name: plane for plane in description.planes}
        self._map: mmap.mmap | None = None
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        if descriptor >= 0:
            self._map = mmap.mmap(descriptor, description.size_bytes)
            # A child of the engine's has no business with it, and its core dump is of its own memory.
            for advice in (mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
                self._map.madvise(advice)

    @property
    def name(self) -> str:
        """Of the pool."""
        return self.description.name

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self.description.block_size

    @property
    def slots(self) -> int:
        """All slots, padding included: the first dimension of every plane."""
        return self.description.blocks * self.description.block_size

    @property
    def read_padding(self) -> int:
        """The slot that padded reads go to: zero, never written."""
        return 0

    @property
    def write_padding(self) -> int:
        """The slot that padded writes go to: its content means nothing."""
        return self.description.padding - 1

    @property
    def planes(self) -> dict[str, Plane]:
        """The planes by name, in the order of the memory."""
        return self._planes

    @property
    def mapped(self) -> bool:
        """Whether the memory is there."""
        return self._map is not None

    def plane(self, name: str) -> np.ndarray[Any, Any]:
        """One plane as an array of shape (slots, *shape of one slot), without a copy.

        bfloat16 comes as uint16 and the float8s as uint8, which numpy has instead; `tensor` gives the real dtypes.
        """
        array = self._arrays.get(name)
        if array is not None:
            return array
        import numpy

        plane = self._plane(name)
        if self._map is None:
            raise BadRequest(
                "the pool is not mapped here: the client was opened with map=False, or is closed"
            )
        if plane.dtype not in NUMPY:
            raise BadRequest(f"plane {name} holds {plane.dtype}, which this version does not know")
        dtype = numpy.dtype(NUMPY[plane.dtype])
        flat = numpy.frombuffer(
            self._map, dtype, self.slots * plane.slot_bytes // dtype.itemsize, offset=plane.offset
        )
        array = self._arrays[name] = flat.reshape(self.slots, *plane.shape)
        return array

    def tensor(self, name: str) -> Any:
        """One plane as a torch tensor of its real dtype and shape (slots, *shape of one slot), without a copy."""
        torch = importlib.import_module("torch")  # an extra: checkers and light processes do without
        dtype = getattr(torch, self._plane(name).dtype)
        tensor = torch.from_numpy(self.plane(name))
        return tensor if tensor.dtype == dtype else tensor.view(dtype)

    def copy(self, copies: list[int]) -> None:
        """Makes the copies that an answer listed (flat source, target, length, ...) in every plane, with the CPU."""
        for name in self._planes:
            array = self.plane(name)
            for i in range(0, len(copies), 3):
                source, target, length = copies[i : i + 3]
                array[target : target + length] = array[source : source + length]

    def close(self) -> None:
        """Ends the mapping.  Raises BufferError while a view of it is alive, and nothing has changed then."""
        self._arrays.clear()
        if self._map is None:
            return
        try:
            self._map.close()
        except BufferError:
            raise BufferError(
                f"an array or tensor on the memory of pool {self.name!r} is still alive: let go of all views "
                "(del, or leave their scope) before the client is closed"
            ) from None
        self._map = None

    def abandon(self) -> None:
        """In a forked child: the memory is not there; what stands for it is kept and never touched."""
        _inherited.append((self._map, self._arrays))
        self._map = None
        self._arrays = {}

    def _plane(self, name: str) -> Plane:
        try:
            return self._planes[name]
        except KeyError:
            some = ", ".join(list(self._planes)[:4])
            raise NotFound(f"pool {self.name!r} has no plane {name!r}; it has {some}, ...") from None
