"""`token`: page size 1 under a radix tree, SGLang's way.

    row of a request:   [ 4 5 6 7 8 | 91 17 18 40 ........ ]      one slot number per token, position by position
                          the tree's   own          ahead

Every token has a slot of its own, any free one; nothing is ever wasted inside a block, because there is no block.  The
price is an index entry per token: in the tree, in the request's row, and in every kernel call.

- `admit` follows the prompt down the tree and locks what it finds; a node that matches in part is split there.  It
  then needs one slot per token that is missing: free ones, or those of the leaves released longest ago.
- `prefilled` enters the prompt into the tree, `finish` the prompt and the output.  What the tree has by then is the
  tree's: the request's own slots for it are freed and its row rewritten (no duplicates are kept).
- Eviction takes whole leaves, least recently used first.
- The engine gets a slot a step.  To spare the replay a call per token, growth takes up to `AHEAD` slots at once, fewer
  when fewer are left; until they are written they count as reserved, and all unused ones come back at the end.
- New requests must leave the watermark free.  It stands in for the engine's reserve for running requests (a share of
  the output they may still ask for), which needs a bound on the output that this interface does not give.

As in the engine's, slot numbers live in flat int32 arrays: slicing, joining and freeing them is memcpy.  Free slots
are a stack of numbers beside the part of the pool that was never handed out.
"""

from __future__ import annotations

from array import array
from typing import ClassVar, Final

import numpy as np

from kvslot.replay.policies._base import Admitted, Counters, Gauges, PolicyConfig, Refused, Room
from kvslot.replay.policies.radix import Node, Tree
from kvslot.replay.policies.sequences import (
    NOTED_EVERY,
    TOKEN_BYTES,
    OutOfTurn,
    check_config,
    longest_run,
    picture,
    prompt_length,
    unknown,
)

AHEAD: Final = NOTED_EVERY
"""Slots taken at once when a sequence grows: no more than a block of the usual size, 1,024 slots in all at 64 running
sequences."""

RUNS_COUNTED_AT: Final = 1 << 16
"""Slot numbers gathered before their extents are counted: a whole array at once costs a nanosecond a token."""


class _Sequence:
    __slots__ = ("held", "node", "own", "row", "tokens", "written")

    def __init__(self, tokens: bytes, row: array[int], node: Node, held: int, own: int) -> None:
        self.tokens = tokens
        self.row = row
        """Slot of each position; past `written` slots taken ahead."""
        self.node = node
        """Deepest node it has locked."""
        self.held = held
        """Tokens up to the end of `node`."""
        self.own = own
        """First position whose slot is the sequence's own."""
        self.written = 0
        """Tokens known to be written, cached ones included; 0 before `prefilled`."""


class TokenPolicy:
    """One pool of slots, one radix tree.  All requests of all engines share it."""

    name: ClassVar[str] = "token"

    def __init__(self, config: PolicyConfig) -> None:
        check_config(config)
        self._usable = config.pool_tokens
        self._block_size = config.block_size
        self._watermark = int(config.watermark * self._usable)
        self._tree = Tree()
        self._slots: array[int] = array("i", np.arange(self._usable, dtype=np.int32).tobytes())
        """0..usable-1, to cut stretches of slots never used from: padding stands outside."""
        self._fresh = 0
        self._returned: array[int] = array("i")
        """Slots given back, a stack.  Slots fresh..usable-1 were never handed out."""
        self._live: dict[int, _Sequence] = {}
        self._private = 0
        self._reserved = 0
        self._evicted = 0
        self._extents = 0
        self._extent_tokens = 0
        self._handed: array[int] = array("i")
        self._run_changed = 1 << 62
        self._run = 0

    @property
    def granularity(self) -> int:
        return 1

    # --- the life of a request --------------------------------------------------------------------------------

    def admit(self, request: int, tokens: bytes, engine: int, now: float) -> Admitted | Refused:
        length = prompt_length(request, tokens, self._live)
        if length > self._usable:
            return Refused(True, length)
        tree = self._tree
        match = tree.match(tokens)
        path = match.path
        held = match.end // TOKEN_BYTES
        hit = held if held < length else length - 1
        need = length - hit
        # Cached slots that nobody uses stop being evictable when this request locks them.
        kept = 0
        for node in reversed(path):
            if node.locks:
                break
            kept += len(node.places)
        if match.inside and not path[-1].locks:
            kept -= len(path[-1].places) - match.inside // TOKEN_BYTES
        spare = self._free + tree.idle_places - kept
        if need + (self._watermark if self._live else 0) > spare:
            return Refused(False, need + kept)
        row: array[int] = array("i")
        if match.inside:
            last = path.pop()
            tree.lock(path)
            cut = match.inside // TOKEN_BYTES
            last = tree.split(last, match.inside, last.places[:cut], last.places[cut:])
            path.append(last)
        else:
            tree.lock(path)
            last = path[-1] if path else tree.root
        for node in path:
            row += node.places
        if hit < held:
            row.pop()
        row += self._take(need)
        self._live[request] = _Sequence(tokens, row, last, held, hit)
        self._reserved += need
        self._handed += row
        self._handed.append(-2)  # no slot follows it, so it ends the run before it
        if len(self._handed) > RUNS_COUNTED_AT:
            self._count_extents()
        return Admitted(hit, length, length)

    def prefilled(self, request: int, now: float) -> None:
        sequence = self._get(request)
        if sequence.written:
            raise OutOfTurn(f"request {request} was prefilled before")
        length = len(sequence.tokens) // TOKEN_BYTES
        fresh = length - sequence.own
        sequence.written = length
        self._private += fresh
        self._reserved -= fresh
        self._publish(sequence, sequence.tokens)

    def grow(self, request: int, length: int, now: float) -> Room | None:
        sequence = self._get(request)
        row = sequence.row
        if not sequence.written or length <= sequence.written:
            raise OutOfTurn(f"request {request} cannot grow to {length} tokens now")
        if length > len(row):
            if length > self._usable:
                return None
            least = length - len(row)
            spare = self._free + self._tree.idle_places
            if least > spare:
                return None
            count = min(max(least, AHEAD), spare)
            taken = self._take(count)
            self._handed.append(row[-1])
            self._handed += taken
            self._handed.append(-2)
            self._extents -= 1  # the last slot before was counted when it was handed out
            self._extent_tokens -= 1
            row += taken
            self._reserved += count
        fresh = length - 1 - sequence.written
        sequence.written += fresh
        self._private += fresh
        self._reserved -= fresh
        return Room(len(row), min(len(row), length - 1 + NOTED_EVERY))

    def finish(self, request: int, output: bytes, now: float) -> None:
        sequence = self._get(request)
        if not sequence.written:
            raise OutOfTurn(f"request {request} finishes before its prompt was written")
        tokens = sequence.tokens + output
        length = len(tokens) // TOKEN_BYTES
        if not sequence.written <= length <= len(sequence.row):
            raise OutOfTurn(
                f"request {request} ends with {length} tokens, but has room for {len(sequence.row)}"
            )
        fresh = length - sequence.written
        sequence.written = length
        self._private += fresh
        self._reserved -= fresh
        if length > sequence.held:
            self._publish(sequence, tokens)
        self._release(request, sequence)

    def abort(self, request: int, now: float) -> None:
        self._release(request, self._get(request))

    def victim(self) -> int | None:
        return next(reversed(self._live), None)

    # --- what one can see -------------------------------------------------------------------------------------

    def gauges(self) -> Gauges:
        tree = self._tree
        free = self._free
        held = tree.tokens + self._private
        return Gauges(
            usable=self._usable,
            blocks_in_use_slots=self._usable - free,
            tokens_held=held,
            private=self._private,
            cached=tree.tokens,
            reserved=self._reserved,
            duplicates=0,
            peeled=0,
            fenced=0,
            quarantined=0,
            moving=0,
            free=free,
            evictable=tree.idle_tokens,
            largest_free_run=self._largest_free_run(),
            live_sequences=len(self._live),
        )

    def counters(self) -> Counters:
        self._count_extents()
        return Counters(
            copied_tokens=0,
            moved_tokens=0,
            extents=self._extents,
            extent_tokens=self._extent_tokens,
            evicted_tokens=self._evicted,
        )

    def blocks(self) -> bytes:
        held = np.zeros(self._usable, dtype=np.int64)
        for node in self._tree.nodes():
            held[np.frombuffer(node.places, dtype=np.int32)] = 1
        for sequence in self._live.values():
            row = np.array(sequence.row, dtype=np.int32)
            held[row[sequence.own : max(sequence.own, sequence.written)]] = 1
        size = self._block_size
        whole = -(-self._usable // size) * size
        return picture(np.pad(held, (0, whole - self._usable)).reshape(-1, size).sum(axis=1), size)

    def slots(self, request: int) -> list[int]:
        """The slot of each position a live request has room for: what its kernels would be given."""
        return list(self._get(request).row)

    def audit(self) -> None:
        """Recount everything and compare: free + cached + private + reserved = usable, no slot counted twice."""
        tree = self._tree
        nodes = tree.nodes()
        idle = tree.idle()
        assert {id(node) for node in idle} == {id(node) for node in nodes if not node.locks}
        seen = list(range(self._fresh, self._usable)) + list(self._returned)
        assert len(seen) == self._free
        for node in nodes:
            assert node.tokens == len(node.places) > 0
            assert node.parent is not None
            assert node.parent.kids[node.key[:TOKEN_BYTES]] is node
            assert node.locks >= sum(kid.locks for kid in node.kids.values())
            seen += node.places
        locks = {id(node): 0 for node in nodes}
        private = reserved = 0
        for sequence in self._live.values():
            walk: Node = sequence.node
            while walk is not tree.root:
                locks[id(walk)] += 1
                assert walk.parent is not None
                walk = walk.parent
            written = max(0, sequence.written - sequence.own)
            private += written
            reserved += len(sequence.row) - sequence.own - written
            seen += sequence.row[sequence.own :]
        assert all(locks[id(node)] == node.locks for node in nodes)
        assert sorted(seen) == list(range(self._usable))
        assert (private, reserved) == (self._private, self._reserved)
        assert sum(node.tokens for node in nodes) == tree.tokens
        assert sum(node.tokens for node in idle) == tree.idle_tokens == tree.idle_places
        gauges = self.gauges()
        assert min(gauges._replace(usable_run=0)) >= 0  # not all have that
        assert gauges.free + gauges.cached + gauges.private + gauges.reserved == gauges.usable

    # --- inside -----------------------------------------------------------------------------------------------

    def _get(self, request: int) -> _Sequence:
        sequence = self._live.get(request)
        if sequence is None:
            raise unknown(request)
        return sequence

    @property
    def _free(self) -> int:
        return len(self._returned) + self._usable - self._fresh

    def _publish(self, sequence: _Sequence, tokens: bytes) -> None:
        """Enter the written tokens past `held` into the tree and hold it to their end.

        The walk begins at the node the sequence holds: what is above cannot have changed."""
        tree = self._tree
        held, own, end = sequence.held, sequence.own, len(tokens) // TOKEN_BYTES
        row = sequence.row
        match = tree.match(tokens, sequence.node, held * TOKEN_BYTES)
        path = match.path
        if match.inside:
            last = path.pop()
            tree.lock(path)
            cut = match.inside // TOKEN_BYTES
            last = tree.split(last, match.inside, last.places[:cut], last.places[cut:])
            path.append(last)
        else:
            tree.lock(path)
        found = match.end // TOKEN_BYTES
        if found > own:
            # Somebody else entered these tokens first, or they are the last one of a prompt that was cached whole.
            self._give(row[own:found])
            if own < held:
                row[own:held] = sequence.node.places[own - held :]
            place = held
            for node in path:
                row[place : place + len(node.places)] = node.places
                place += len(node.places)
        last = path[-1] if path else sequence.node
        if found < end:
            last = tree.attach(last, tokens[found * TOKEN_BYTES :], row[found:end])
        self._private -= end - own
        sequence.node = last
        sequence.held = sequence.own = end

    def _release(self, request: int, sequence: _Sequence) -> None:
        """Give its own slots back and let go of its path."""
        own = sequence.own
        written = max(0, sequence.written - own)
        self._private -= written
        self._reserved -= len(sequence.row) - own - written
        self._give(sequence.row[own:])
        self._tree.unlock(sequence.node)
        del self._live[request]

    def _take(self, count: int) -> array[int]:
        """`count` slots; the caller has checked that free and evictable ones suffice."""
        returned = self._returned
        short = count - len(returned) - (self._usable - self._fresh)
        if short > 0:
            evict = self._tree.evict
            while short > 0:
                places = evict().places
                returned += places
                short -= len(places)
                self._evicted += len(places)
        self._run_changed += count
        if count <= len(returned):
            at = len(returned) - count
            taken = returned[at:]
            del returned[at:]
            return taken
        taken = returned[:]
        del returned[:]
        end = self._fresh + count - len(taken)
        taken += self._slots[self._fresh : end]
        self._fresh = end
        return taken

    def _give(self, slots: array[int]) -> None:
        self._returned += slots
        self._run_changed += len(slots)

    def _count_extents(self) -> None:
        """Count the runs of consecutive slots in what was handed out since, once for each batch."""
        handed = np.frombuffer(self._handed, dtype=np.int32)
        if not len(handed):
            return
        marks = int(np.count_nonzero(handed == -2))
        # Each stretch between marks starts a run; so does each slot that does not follow the one before it.
        self._extents += int(np.count_nonzero(np.diff(handed, prepend=np.int32(-2)) != 1)) - marks
        self._extent_tokens += len(handed) - marks
        self._handed = array("i")

    def _largest_free_run(self) -> int:
        """Exact while few slots are free; else counted again when an eighth of the free slots has changed."""
        if self._run_changed > len(self._returned) >> 3 or len(self._returned) <= 256:
            self._run = longest_run(
                np.frombuffer(self._returned, dtype=np.int32).copy(), self._fresh, self._usable
            )
            self._run_changed = 0
        return self._run
