"""The second form: vLLM's whole KV memory is shared, and the daemon's pool holds only where to find each block.

    region     a memfd of the engine's own, in which vLLM's one allocation lies; other engines map it to read
                 head       what the region is: token, pieces of a block, where they lie
                 sequence   a word for each block: odd while what stands there may change, even while it is whole
                 blocks     vLLM's
    directory  an opaque pool of small blocks; each holds one record
                 record     region, block, the sequence word's value, and a check of these

Nothing is copied to store: the block's word becomes even, and a record with its value goes where a copy would have
gone.  To load, a reader looks at the word, copies from the owner's memory into its own, and looks at the word again:
where it is not the record's, before or after, the load has failed.  So an entry is revoked without anybody being told:
before vLLM writes into a block, its word becomes odd, which ends all records of it.  With the engine all its entries
end: its memory is found through its process (/proc/PID/fd), and its token tells it from another of the same number.

The order of these loads and stores is what x86-64 keeps of itself; other machines are refused.

Records are not K and V.  One that no longer holds would keep its prefix from being stored again, since what is
published stays, so whoever has leased its place writes a new one over it; a reader that meets half of each finds that
the check is wrong, which is a miss.  No one else writes there: the lease is on that prefix.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import platform
import select
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvslot.api.client import Client
from kvslot.engines.vllm.blocks import Array, EngineBlocks, Piece, runs
from kvslot.engines.vllm.pages import READ, WRITE, populate_aside

MAGIC: Final = b"kvslotR1"
HEAD_BYTES: Final = 1 << 16  # of a region's head, its description included
RECORD: Final = struct.Struct("<8s16sIIIIQ")  # magic, token, process, descriptor, block, 0, sequence word
CHECK_BYTES: Final = 8
RECORD_BYTES: Final = 64
"""Of a record, with its check and room to spare."""

log: Final = logging.getLogger("vllm.kvslot")


def record_bytes(block_size: int) -> int:
    """Of a directory's block of so many tokens: a record's, in whole bytes a token."""
    return -(-RECORD_BYTES // block_size) * block_size


def unsupported(groups: int) -> str:
    """Why the second form cannot be used; "" where it can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "form = 'region' needs an x86-64 machine"
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "form = 'region' needs Linux"
    if groups != 1:
        return "form = 'region' with several groups of layers"
    return ""


@dataclass(frozen=True, slots=True)
class Record:
    """Where a block of K and V stands, and since when."""

    token: bytes
    process: int
    descriptor: int
    block: int
    word: int

    def pack(self) -> bytes:
        """As it stands in the directory."""
        head = RECORD.pack(MAGIC, self.token, self.process, self.descriptor, self.block, 0, self.word)
        return head + _check(head)


def unpack(data: bytes) -> Record | None:
    """The record that stands there, if a whole one does."""
    head = data[: RECORD.size]
    if data[:8] != MAGIC or data[RECORD.size : RECORD.size + CHECK_BYTES] != _check(head):
        return None
    _, token, process, descriptor, block, _, word = RECORD.unpack(head)
    return Record(token, process, descriptor, block, word)


def _check(head: bytes) -> bytes:
    return hashlib.blake2b(head, digest_size=CHECK_BYTES).digest()


class Region:
    """An engine's own memory.  `memory` is what vLLM gets, all zero."""

    def __init__(self, size: int, blocks: int) -> None:
        """`size`: bytes that vLLM asks for.  `blocks`: that it has."""
        self._words_bytes = -(-8 * blocks // mmap.PAGESIZE) * mmap.PAGESIZE
        start = HEAD_BYTES + self._words_bytes
        self._fd = os.memfd_create("kvslot-vllm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, start + size)
        # A reader that finds less memory than it mapped would be killed.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map = mmap.mmap(self._fd, start + size)
        self._map.madvise(mmap.MADV_DONTFORK)
        self.token = os.urandom(16)
        self.words = np.frombuffer(self._map, np.uint64, blocks, offset=HEAD_BYTES)
        self.words[:] = 1  # odd: nothing stands there
        self.memory = np.frombuffer(self._map, np.uint8, size, offset=start)
        # Where this object is let go without being closed, or vLLM's tensors are all that is left of it, nobody would
        # revoke what is written to.
        ended = threading.Event()
        self._finalizer = weakref.finalize(self, _end, self._fd, self.words, ended, os.getpid())
        self._finalizer.atexit = False  # with the process its entries end anyway
        populate_aside(self.memory, WRITE, ended.is_set)

    def describe(self, engine: EngineBlocks) -> None:
        """Writes the head: from now on others can read.  Raises ValueError where vLLM's blocks lie elsewhere."""
        base = self.memory.ctypes.data
        pieces: list[list[int]] = []
        for group in engine.groups:
            for piece in group:
                view = piece.view
                at = view.ctypes.data - base
                end = (
                    at + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) + engine.word
                )
                if at < 0 or end > self.memory.nbytes:
                    raise ValueError("vLLM's blocks do not lie in the region made for them")
                pieces.append([at, *view.shape, *view.strides, piece.first])
        head = json.dumps(
            {
                "token": self.token.hex(),
                "start": HEAD_BYTES + self._words_bytes,
                "words": len(self.words),
                "word": engine.word,
                "block_bytes": engine.block_bytes,
                "pieces": pieces,
            }
        ).encode()
        if len(head) > HEAD_BYTES - 16:
            raise ValueError("the layers lie in too many pieces")
        self._map[16 : 16 + len(head)] = head
        self._map[8:16] = len(head).to_bytes(8, "little")
        self._map[:8] = MAGIC

    def revoke(self, block: int) -> None:
        """The block may be written from now on."""
        word = int(self.words[block])
        if word % 2 == 0:
            self.words[block] = word + 1

    def settle(self, block: int) -> Record:
        """The block is whole, until it is revoked; what to tell others."""
        word = int(self.words[block])
        if word % 2:
            word += 1
            self.words[block] = word
        return Record(self.token, os.getpid(), self._fd, block, word)

    def close(self) -> None:
        """All entries end.  vLLM's tensors keep the memory as long as they live."""
        self._finalizer()
        self._fd = -1


def _end(fd: int, words: Array, ended: threading.Event, process: int) -> None:
    """Ends a region's entries."""
    ended.set()
    if os.getpid() == process:  # in a forked child the memory is not there, and the entries are not its own
        words |= np.uint64(1)
    os.close(fd)


class Peer:
    """Another engine's region, mapped to read."""

    def __init__(self, record: Record) -> None:
        """Raises OSError or ValueError where it is no more, or cannot be read."""
        # The process first: if it is still there when its descriptor has been opened, that was its.
        self._process = os.pidfd_open(record.process)
        try:
            fd = os.open(f"/proc/{record.process}/fd/{record.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if not os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:kvslot-vllm"):
                    raise ValueError("the descriptor is another file's")
                self._map = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
            finally:
                os.close(fd)
            if self._map[:8] != MAGIC:
                raise ValueError("no region")
            head = json.loads(self._map[16 : 16 + int.from_bytes(self._map[8:16], "little")])
            if bytes.fromhex(head["token"]) != record.token:
                raise ValueError("another region by now")
            self.block_bytes = int(head["block_bytes"])
            self.words = np.frombuffer(self._map, np.uint64, head["words"], offset=HEAD_BYTES)
            dtype = np.dtype(np.uint64 if head["word"] == 8 else np.uint8)
            self.pieces = [
                Piece(
                    np.ndarray(
                        each[1:4], dtype, self._map, offset=head["start"] + each[0], strides=each[4:7]
                    ),
                    each[7],
                )
                for each in head["pieces"]
            ]
        except BaseException:
            os.close(self._process)
            raise
        self._poll = select.poll()
        self._poll.register(self._process, select.POLLIN)
        self._closed = False

    def populate(self) -> None:
        """For who will read much of it."""
        populate_aside(np.frombuffer(self._map, np.uint8), READ, lambda: self._closed)

    @property
    def alive(self) -> bool:
        """Whether its process is."""
        return not self._poll.poll(0)

    def close(self) -> None:
        """Lets its memory go; views of it must be gone."""
        self._closed = True
        os.close(self._process)
        self.pieces = []
        self.words = np.zeros(0, np.uint64)
        with contextlib.suppress(BufferError):
            self._map.close()


class Peers:
    """The regions that records name, opened when first met.  One thread at a time."""

    def __init__(self, *, populate: bool = False) -> None:
        """`populate`: for a reader of blocks; else their words are all that is looked at."""
        self._populate = populate
        self._peers: dict[bytes, Peer | None] = {}

    def find(self, record: Record) -> Peer | None:
        """The record's region; None where it is no more."""
        token = record.token
        if token in self._peers:
            peer = self._peers[token]
            if peer is not None and not peer.alive:
                peer.close()
                peer = self._peers[token] = None
            return peer
        try:
            peer = Peer(record)
            if self._populate:
                peer.populate()
        except (OSError, ValueError, KeyError) as error:
            peer = None
            if getattr(error, "errno", 0) in (errno.EACCES, errno.EPERM):
                log.warning("kvslot: the memory of process %d may not be read: %s", record.process, error)
            if getattr(error, "errno", 0) in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                return None  # ours to get over
        self._peers[token] = peer
        return peer

    def holds(self, record: Record | None) -> bool:
        """Whether what the record names stands there still."""
        if record is None:
            return False
        peer = self.find(record)
        return (
            peer is not None
            and record.block < len(peer.words)
            and int(peer.words[record.block]) == record.word
        )

    def sweep(self) -> None:
        """Lets the memory go of those that have ended."""
        for token, peer in self._peers.items():
            if peer is not None and not peer.alive:
                peer.close()
                self._peers[token] = None

    def close(self) -> None:
        """Lets all go."""
        for peer in self._peers.values():
            if peer is not None:
                peer.close()
        self._peers.clear()


def read_records(directory: Array, blocks: Sequence[int]) -> list[Record | None]:
    """The records of some blocks; `directory` is (blocks, bytes of one)."""
    raw = directory[list(blocks), :RECORD_BYTES].tobytes() if blocks else b""
    return [unpack(raw[i : i + RECORD_BYTES]) for i in range(0, len(raw), RECORD_BYTES)]


def standing(peers: Peers, client: Client, blocks: Sequence[int]) -> int:
    """How many records of a client's directory, from the first on, name what still stands there."""
    memory = client.pool
    directory = memory.plane("blocks").reshape(-1, memory.planes["blocks"].slot_bytes * memory.block_size)
    for i, record in enumerate(read_records(directory, blocks)):
        if not peers.holds(record):
            return i
    return len(blocks)


def write_record(directory: Array, block: int, record: Record) -> None:
    """Puts a record in its place."""
    data = record.pack()
    directory[block, : len(data)] = np.frombuffer(data, np.uint8)


def copy(
    peers: Peers,
    records: Sequence[Record | None],
    engine: EngineBlocks,
    targets: Sequence[int],
    *,
    between: Callable[[], None] = lambda: None,
) -> bool:
    """Copies what the records name into the engine's blocks; False where not all of it stood there throughout.

    What is in the targets then means nothing.  `between` is called between the copies and the second look.
    """
    i = 0
    seen: list[tuple[Peer, list[Record]]] = []
    while i < len(records):
        first = records[i]
        if first is None or not peers.holds(first):
            return False
        j = i
        run: list[Record] = []
        while j < len(records) and (each := records[j]) is not None and each.token == first.token:
            run.append(each)
            j += 1
        peer = peers.find(first)
        if peer is None or peer.block_bytes != engine.block_bytes or not _words(peer, run):
            return False
        (ours,) = engine.groups
        if [(each.view.shape[0], each.view.shape[2], each.first) for each in ours] != [
            (each.view.shape[0], each.view.shape[2], each.first) for each in peer.pieces
        ]:
            return False
        for source, target, count in runs([each.block for each in run], targets[i:j]):
            for mine, theirs in zip(ours, peer.pieces, strict=True):
                np.copyto(mine.view[:, target : target + count], theirs.view[:, source : source + count])
        seen.append((peer, run))
        i = j
    between()
    return all(_words(peer, run) for peer, run in seen)


def _words(peer: Peer, run: Sequence[Record]) -> bool:
    """Whether every word is what its record says."""
    if any(each.block >= len(peer.words) for each in run):
        return False
    now = peer.words[[each.block for each in run]]
    return bool((now == np.array([each.word for each in run], np.uint64)).all())


def allocation(blocks: int, keep: Callable[[Region], None]) -> Any:
    """A context in which torch's one large allocation of zero bytes is a region; `keep` gets it."""
    import torch  # pyright: ignore[reportMissingImports] - an extra

    # The checkers do without torch, so they do not know this class.
    class Allocation(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            words = kwargs or {}
            if (
                func is torch.zeros
                and words.get("dtype") is torch.int8
                and len(args) == 1
                and isinstance(args[0], int)
                and str(words.get("device", "cpu")).startswith("cpu")
            ):
                region = Region(args[0], blocks)
                keep(region)
                return torch.from_numpy(region.memory.view(np.int8))
            return func(*args, **words)

    return Allocation()
