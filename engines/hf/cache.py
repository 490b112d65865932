"""A transformers `Cache` whose K and V lie in the daemon's pool, at the slots that the daemon gave.

    with Client(namespace=fingerprint.namespace(model)) as client, PoolCache(client, model, input_ids) as cache:
        out = model.generate(input_ids, cache=cache, max_new_tokens=64)

transformers sees a rectangle, kvslot a row of positions for each sequence; padding in front makes the one the other:

    column     0 ........ pad ......... pad + hit ............... W ............ columns
    row        padding    |  cached: read, never written  | computed | answer     |
    position              0            hit                n = W - pad             written

    columns    tokens that every layer has behind it (`get_seq_length`); at first the least of pad + hit over the rows,
               since transformers feeds all rows from the same column on
    a row whose hit reaches further computes the columns between again; what it computes goes to the write padding,
    for those slots belong to whoever computed them first
    padding    reads slot 0, which is zero, and is masked; it writes the write padding

**Where tokens come from.** A cache is handed K and V, not tokens, but the daemon must know the tokens to find them
again.  So the cache hooks the model: before a forward with this cache it reads `input_ids`, begins a step, takes slots
for what is new, and lays out the reads and writes of all layers (a *plan*); after it, it ends the step and publishes
what of the prompt has been computed.  That is also where it is checked that what the tokens say is all there is:
positions and mask as the padding has them, no embeddings or images beside.  K and V that depend on something else
would be wrong for the next reader.

**Steps.** A step begins before the first layer and has ended when the forward returns, because torch on the CPU is
synchronous.  (`_end_step` is the place where a CUDA variant records an event and completes the step when that has
passed; the plan's shared buffers are safe there because they are used in the order of the stream.)  A long prompt
takes a CPU many seconds, and a session whose step does not end counts as stalled: then a step ends between two layers,
every second, and another begins.  A forward that an exception left is undone by the next call, or by `close`: the
tokens it appended are taken back.

**Moves.** With `Client(movable=True)` the daemon may put what is published elsewhere, which the client takes over when
a step begins.  Tables are looked up then; and a layer that finds that another step has begun since, as in a long
forward, has them looked up again.  The private copies of `write_through` are not concerned.

**Reading.** Mode `gather` reads the pool in each step: where a sequence is one run of slots as a view, without any
copy; a few runs are put together in a buffer that all layers share; many are gathered by index.  Mode `write_through`
keeps a private contiguous copy beside the pool: what is cached is gathered once, then each token is written to both.

    gather          pool only; costs a copy of the context a step and layer where the context is not one run
    write_through   a second copy of each running sequence's K and V in private memory; costs nothing a step

**Sliding windows.** Layers with a window return its columns only, as transformers' own do.  Where every layer has one,
and the pool is configured as windowed, a running sequence gives its front back as it goes (Trim); what it has
published stays with the tree.  Mixed models (Gemma 3) keep all tokens in the pool: slots are per token, not per layer.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from kvslot.api.client import AdmissionTimeout, Client, Later, Namespace, OutOfRoom, indices
from kvslot.api.client import Sequence as Slots
from kvslot.api.wire import BadRequest, Ended, KvslotError, OutOfTurn, Unsupported
from kvslot.engines import fingerprint
from kvslot.engines.hf import layout

try:
    import torch  # pyright: ignore[reportMissingImports] - an extra
    from transformers.cache_utils import (  # pyright: ignore[reportMissingImports] - an extra
        Cache,
        CacheLayerMixin,
    )
except ImportError as missing:
    raise ImportError(
        f"{missing}; the adapter needs torch and transformers: pip install 'kvslot[hf]'"
    ) from missing

MODES: Final = ("gather", "write_through")
PIECE_LEAST: Final = 64
"""Tokens; where runs are shorter than this on average, one gather by index is cheaper than a copy of each run."""
SLACK: Final = 64
"""Columns kept beyond a sliding window, so that speculation can be rolled back."""
STEP_SECONDS: Final = 1.0
"""A forward of a prompt that lasts longer is several steps; a daemon's `stall_seconds` is 5 unless configured."""
TRIM_LEAST: Final = 32
"""Positions; fewer are not given back at a time: each is a verb, if no round trip."""
KNOWN: Final = frozenset(
    (
        "input_ids attention_mask position_ids cache past_key_values cache_position use_cache labels logits_to_keep "
        "num_items_in_batch output_attentions output_hidden_states output_router_logits return_dict"
    ).split()
)
"""What a forward may be given: it is checked, or changes nothing about K and V.  Whatever else is given is refused."""
RANDOM: Final = ("drop", "jitter", "noise")
"""In the names of what a module does by chance while it is in training."""


class Preempted(KvslotError):
    """The daemon needs the memory of this generation back: leave the cache's `with` block, and start it over later.

    What was published may still be found cached then.  `within` is how many seconds there are.
    """

    def __init__(self, sequence: int, within: float) -> None:
        super().__init__(
            f"memory ran short, and the daemon asks for that of sequence {sequence} within {within:.1f} s: "
            "close this cache and generate again later"
        )
        self.within = within


class _Row:
    """One running sequence, and where it stands in the rectangle."""

    __slots__ = ("extents", "hit", "pad", "sequence", "spoiled", "written")

    def __init__(self, sequence: Slots, pad: int, written: int) -> None:
        self.sequence = sequence
        self.pad = pad
        self.hit = sequence.hit  # positions before it are not this row's to write
        self.written = written  # positions whose K and V are in the pool
        self.spoiled = False  # its tokens are not what was fed: nothing of it may be published
        self.extents: list[int] = []  # of the sequence, when its slots were last looked up


class _Plan:
    """What all layers do in one forward."""

    __slots__ = ("epoch", "fixed", "new", "past", "reads", "step_until", "total", "write_at", "write_to")

    def __init__(self, past: int, new: int) -> None:
        self.past, self.new, self.total = past, new, past + new
        self.epoch = 0  # of the client, when the tables were looked up
        self.step_until = 0.0  # when the step ends between two layers, and another begins
        self.write_at = -1  # slot of the first of consecutive slots to write; -1: `write_to` has them
        self.write_to: Any = None  # LongTensor (rows * new,)
        self.reads: dict[int, _Read] = {}  # by window
        self.fixed: list[
            tuple[int, int, int, Any]
        ] = []  # row, columns from, to, LongTensor: cached beyond `past`


class _Read:
    """Where columns [start, total) of all rows are read from."""

    __slots__ = ("at", "index", "pieces", "span", "start")

    def __init__(self, start: int, span: int) -> None:
        self.start, self.span = start, span
        self.at = -1  # first of consecutive slots
        self.pieces: list[tuple[int, int]] | None = None  # slot and length of runs; slot -1: padding
        self.index: Any = None  # LongTensor (rows * span,)


# The checkers do without the extras, so they do not know what these are.
class PoolLayer(CacheLayerMixin):  # type: ignore[misc]  # see above
    """K and V of one layer."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: PoolCache, number: int, window: int) -> None:
        super().__init__()
        self.cache = cache
        self.number = number
        self.window = window
        self.is_sliding = window > 0
        self.length = 0  # columns written; beyond those of the cache while a forward is under way
        # Planes as (1, heads, slots, width): a run of slots is one `narrow` away from what attention takes.
        self.key_plane: Any = None
        self.value_plane: Any = None
        self.base = self.end = 0  # columns that the scratch has room for
        self.key_scratch: Any = None
        self.value_scratch: Any = None

    # -- what transformers asks --------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Checks that what the model computes is what the pool's planes hold."""
        for what, states, plane in (("K", key_states, self.key_plane), ("V", value_states, self.value_plane)):
            heads, width = plane.shape[1], plane.shape[3]
            if states.shape[1] != heads or states.shape[3] != width or states.dtype != plane.dtype:
                raise layout.LayoutMismatch(
                    f"layer {self.number} computes {what} of {states.shape[1]} heads of {states.shape[3]} in "
                    f"{states.dtype}, and the pool holds {heads} of {width} in {plane.dtype}"
                )
            if states.device != plane.device:
                raise Unsupported(
                    f"the model computes on {states.device}, and the pool lies in {plane.device} memory"
                )
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Writes the new tokens' K and V, (rows, heads, new, width), to their slots; returns what attention needs."""
        cache = self.cache
        plan = cache._plan
        if plan is None or self.length != plan.past:
            raise OutOfTurn(
                "K and V came outside a forward of the model that this PoolCache was made for: call that model, with "
                "cache=..., and each of its layers once"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if time.monotonic() > plan.step_until:
            cache._next_step(plan)
        if cache.client.epoch != plan.epoch:
            cache._look_again(plan)
        if key_states.requires_grad or value_states.requires_grad:
            key_states, value_states = key_states.detach(), value_states.detach()
        for plane, states in ((self.key_plane, key_states), (self.value_plane, value_states)):
            if plan.write_at >= 0:
                plane.narrow(2, plan.write_at, plan.new).copy_(states)
            else:
                rows, heads, new, width = states.shape
                plane[0].transpose(0, 1).index_copy_(
                    0, plan.write_to, states.transpose(1, 2).reshape(rows * new, heads, width)
                )
        read = plan.reads[self.window]
        if cache.mode == "write_through":
            out = self._through(plan, read, key_states, value_states)
        else:
            rows = key_states.shape[0]
            out = (
                self._gathered(self.key_plane, read, rows, cache._buffer("k", self.key_plane)),
                self._gathered(self.value_plane, read, rows, cache._buffer("v", self.value_plane)),
            )
        self.length = plan.total
        return out

    def get_seq_length(self) -> int:
        """Columns that all layers have behind them; what a forward under way, or a broken one, adds does not count."""
        return self.cache._columns

    def get_max_length(self) -> int:
        """None: the pool is the limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many columns `update` will return, and the first of them."""
        past = self.cache._columns
        start = self.start(past)
        return past + query_length - start, start

    def start(self, past: int) -> int:
        """The first column that a token in column `past` sees."""
        return max(past - self.window + 1, 0) if self.window else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Of all layers at once: see PoolCache."""
        raise OutOfTurn("crop the PoolCache: its layers share their slots")

    reset = reorder_cache = batch_repeat_interleave = batch_select_indices = crop

    def offload(self) -> None:
        """Not for memory that others read."""
        raise Unsupported("a PoolCache is not offloaded: its memory is the daemon's")

    prefetch = offload

    # -- reading -----------------------------------------------------------------------------------------------------

    def _gathered(self, plane: Any, read: _Read, rows: int, buffer: Any) -> Any:
        """Columns of all rows, (rows, heads, span, width)."""
        if read.at >= 0:
            return plane.narrow(2, read.at, read.span)
        slots = plane[0].transpose(0, 1)  # (slots, heads, width), as it lies in memory
        out = buffer(rows * read.span)
        if read.pieces is not None:
            zero = slots.narrow(0, 0, 1)
            torch.cat(
                [
                    slots.narrow(0, at, n) if at >= 0 else zero.expand(n, *zero.shape[1:])
                    for at, n in read.pieces
                ],
                out=out,
            )
        else:
            torch.index_select(slots, 0, read.index, out=out)
        return out.view(rows, read.span, *out.shape[1:]).transpose(1, 2)

    def _through(self, plan: _Plan, read: _Read, key_states: Any, value_states: Any) -> tuple[Any, Any]:
        """Writes to the private copy, too, and returns a view of that."""
        if plan.total > self.end:
            self._grow(plan, key_states, value_states)
        out = []
        for plane, scratch, states in (
            (self.key_plane, self.key_scratch, key_states),
            (self.value_plane, self.value_scratch, value_states),
        ):
            assert 0 <= self.base <= min(plan.past, read.start)  # torch would count from the end
            scratch.narrow(2, plan.past - self.base, plan.new).copy_(states)
            for row, start, stop, slots in plan.fixed:
                # What is cached is what is read, whatever this row has computed again.
                scratch[row, :, start - self.base : stop - self.base] = plane[0].index_select(1, slots)
            out.append(scratch.narrow(2, read.start - self.base, read.span))
        return out[0], out[1]

    def _grow(self, plan: _Plan, key_states: Any, value_states: Any) -> None:
        """Makes room in the private copy for the plan's columns; the first time, takes over what is cached."""
        first = self.key_scratch is None
        base = max(self.start(plan.past) - SLACK, 0) if self.window else 0
        keep = plan.past - base
        size = keep + plan.new
        size += max(256, size // 4)
        scratch = []
        for plane, old, states in (
            (self.key_plane, self.key_scratch, key_states),
            (self.value_plane, self.value_scratch, value_states),
        ):
            rows, heads, _, width = states.shape
            new = torch.empty((rows, heads, size, width), dtype=states.dtype, device=states.device)
            if not first:
                assert self.base <= base  # a deep crop has dropped what did not reach so far back
                new.narrow(2, 0, keep).copy_(old.narrow(2, base - self.base, keep))
            elif keep:
                read = self.cache._read_of(base, plan.past)
                new.narrow(2, 0, keep).copy_(
                    self._gathered(plane, read, rows, self.cache._buffer("k", plane))
                )
            scratch.append(new)
        self.key_scratch, self.value_scratch = scratch
        self.base, self.end = base, base + size

    def _drop(self) -> None:
        """The private copy is of no use: the next forward takes it from the pool again."""
        self.key_scratch = self.value_scratch = None
        self.base = self.end = 0

    def _select(self, rows: Any) -> None:
        if self.key_scratch is not None:
            self.key_scratch = self.key_scratch.index_select(0, rows)
            self.value_scratch = self.value_scratch.index_select(0, rows)


class PoolCache(Cache):  # type: ignore[misc]  # as above: a class that the checkers do not know
    """The cache of one `generate`: give it as `cache=`, and close it (or use `with`) when that has ended."""

    _closed = True  # until it holds something

    def __init__(
        self,
        client: Client,
        model: Any,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        mode: str = "gather",
        namespace: int | Namespace | None = None,
        wait_for_commit: bool = False,
        patience: float = 30.0,
        timeout: float | None = 60.0,
        priority: int = 0,
        publish: bool = True,
    ) -> None:
        """Looks the prompts up and takes room for the rest of them, waiting for it if it must.

        `input_ids`: (rows, width) or one row, as `generate` will be given them; `attention_mask`: 0 for padding, which
        must be in front.  `mode`: "gather" or "write_through".  `namespace`: where to look and to publish (None: the
        client's).  `wait_for_commit`: where another is computing the beginning of a prompt now, waits for that rather
        than compute it, too; for `patience` seconds at most.  `timeout`: seconds that room may take, for the prompts
        and for each growth (None: as long as it takes).  `priority`: 0..7.  `publish`: False keeps what is computed to
        itself.

        Raises LayoutMismatch for a pool of another layout, NeverFits, AdmissionTimeout, Unsupported for models and
        BadRequest for prompts that a cache of tokens cannot hold, and Disconnected.  Nothing is held then.
        """
        if mode not in MODES:
            raise BadRequest(f"mode {mode!r}: {' or '.join(MODES)}")
        if namespace is None and not client.root.model:
            raise BadRequest(
                "the client's namespace names no model, so that another model's K and V could be taken for this one's: "
                "Client(namespace=kvslot.engines.fingerprint.namespace(model))"
            )
        named = client.root if namespace is None else namespace
        if isinstance(named, int):
            opened = client.opened(named)
            if opened is None:
                raise BadRequest(f"namespace {named} was not opened by this client")
            named = opened
        if not named.model:
            raise BadRequest(
                "the namespace names no model: kvslot.engines.fingerprint.namespace(model) makes one that does"
            )
        if why := fingerprint.misfit(model, named):
            raise BadRequest(
                f"the namespace does not fit: {why}. What is cached there would be taken for this one's. "
                "fingerprint.namespace(model) makes the right one; a name of your own is vouched for with "
                "fingerprint.vouch(model, namespace)"
            )
        self.client = client
        self.mode = mode
        self.shape = layout.shape_of(model)
        layout.check(client.pool, self.shape)
        super().__init__(layers=[PoolLayer(self, n, window) for n, window in enumerate(self.shape.windows)])
        self._rows: list[_Row] = []
        self._columns = 0
        self._group = 1  # rows of the model for each of ours, until they are forked
        self._plan: _Plan | None = None
        self._step: Any = None
        self._broken: KvslotError | None = None  # why it is of no more use
        self._error: BaseException | None = None  # that was being handled when a forward began
        self._before: list[int] = []  # lengths of the sequences before the step under way
        self._buffers: dict[tuple[object, ...], Any] = {}
        self._timeout = timeout
        self._publish = publish
        self._fed = False
        self._model: Any = None  # a reference to it that does not keep it
        self.computed = 0
        """Tokens that were computed, in all rows, padding left out."""
        self.published = 0
        """Tokens that are shareable of what this cache held; known when it is closed."""
        self._limit = _rope_limit(model)
        self._prompt, pads = _prompts(input_ids, attention_mask)
        self._width: int = self._prompt.shape[1]
        self._closed = False
        try:
            self._admit(pads, namespace, patience if wait_for_commit else 0.0, timeout, priority)
            self._copy()
            self._open_planes()
            self._hook(model)
        except BaseException:
            self.close()
            raise

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def hits(self) -> list[int]:
        """Tokens of each prompt that were cached."""
        return list(self._hits)

    @property
    def hit(self) -> int:
        """Columns that need not be computed: padding, and what is cached in every row."""
        return self._first

    @property
    def sequences(self) -> list[Slots]:
        """The running sequences, a row each."""
        return [row.sequence for row in self._rows]

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    def __repr__(self) -> str:
        if self._closed:
            return "<PoolCache, closed>"
        kept = "; windows in some layers only, so all tokens are kept" if self.shape.mixed else ""
        return f"<PoolCache: {len(self._rows)} rows of {self._columns} tokens, {self._hits} hit, {self.mode}{kept}>"

    def __reduce__(self) -> str:
        raise TypeError(
            "a PoolCache holds slots of a daemon: make another one for the same prompt, it will hit"
        )

    def __deepcopy__(self, memo: object) -> Self:
        self.__reduce__()
        raise AssertionError

    # -- what transformers asks --------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens of all rows; free for tokens that nobody has been told of."""
        self._live()
        if tokens_to_remove > 0:
            raise BadRequest(f"crop({tokens_to_remove}): say how many tokens to remove as a negative number")
        if tokens_to_remove == 0:
            return
        self._undo()
        self._live()
        columns = self._columns + tokens_to_remove
        least = max(row.pad for row in self._rows) + 1
        start = min((layer.start(columns) for layer in self.layers), default=0)
        gone = any(0 < row.sequence.kept_from > start - row.pad for row in self._rows)
        if columns < least or gone:
            raise BadRequest(
                f"crop({tokens_to_remove}) of {self._columns} columns: every row keeps a token, and of a sliding "
                f"window no more than {SLACK} columns before it are kept"
            )
        for row in self._rows:
            length = columns - row.pad
            row.written = min(row.written, length)
            row.hit = min(row.hit, length)
            row.extents = []
            if length < row.sequence.length:
                try:
                    row.sequence.trim(keep_to=length)
                except BaseException as error:  # some rows are cut, and nobody knows about this one
                    self._break(row, error)
                    raise
        self._columns = columns
        self._width = min(self._width, columns)
        for layer in self.layers:
            layer.length = columns
            if layer.start(columns) < layer.base:
                layer._drop()

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row i goes on as what row `beam_idx[i]` was: by forks, without a copy in the pool."""
        self._live()
        order = [int(i) for i in beam_idx]
        self._rearrange([self._rows[i // self._group] for i in order], order)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self._live()
        order = [i for i in range(len(self._rows) * self._group) for _ in range(repeats)]
        self._rearrange([self._rows[i // self._group] for i in order], order)

    def batch_select_indices(self, indices: Any) -> None:
        """Only those rows, in that order."""
        self.reorder_cache(indices)

    def reset(self) -> None:
        """Not for slots that were given for one prompt."""
        raise Unsupported("a PoolCache is of its prompts: close it, and make another one")

    @property
    def batch_size(self) -> int:
        """Rows of the model, once it is known how many."""
        return len(self._rows) * self._group if self._fed else -1

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Publishes what was computed, gives all slots back, and lets go of the pool's memory.  Never fails.

        After an error, too: what was written by forwards that ended is right, and may be found by the next.
        """
        if self._closed and not self._rows:
            return
        self._closed = True
        try:
            self._undo()
            for row in self._rows:
                if self._publish and row.written > row.hit and not row.spoiled:
                    with contextlib.suppress(KvslotError):
                        self.published += row.sequence.commit(min(row.written, row.sequence.length))
        finally:  # an interrupt while the daemon is slow to answer must not leave slots behind
            for layer in self.layers:
                layer.key_plane = layer.value_plane = layer.key_scratch = layer.value_scratch = None
            self._buffers.clear()
            while self._rows:
                with contextlib.suppress(KvslotError):
                    self._rows[-1].sequence.free()
                self._rows.pop()
        with contextlib.suppress(KvslotError):
            self.client.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._closed and not getattr(self, "_rows", None):
            return
        # At any moment, in any thread, in the middle of another call: whatever there is to say is said by the next one.
        rows = [
            (row.sequence, 0 if row.spoiled or not self._publish else row.written, row.hit)
            for row in self._rows
        ]
        self._closed = True

        def leave() -> None:
            for sequence, written, hit in rows:
                if written > hit:
                    with contextlib.suppress(KvslotError):
                        sequence.commit(min(written, sequence.length), wait=False)
                with contextlib.suppress(KvslotError):
                    sequence.free()

        self.client.defer(leave)
        warnings.warn("a PoolCache was not closed", ResourceWarning, stacklevel=1)

    # -- the beginning -----------------------------------------------------------------------------------------------

    def _admit(
        self,
        pads: list[int],
        namespace: int | Namespace | None,
        patience: float,
        timeout: float | None,
        priority: int,
    ) -> None:
        prompts = [np.ascontiguousarray(row[pad:]) for row, pad in zip(self._prompt, pads, strict=True)]
        self._hits: list[int] = []
        self._first = self._columns = 0
        end = None if timeout is None else time.monotonic() + timeout
        for number, (tokens, pad) in enumerate(zip(prompts, pads, strict=True)):
            # To wait for what a row above is about to compute would be to wait for oneself.
            own = any(
                _common(tokens, above) > hit for above, hit in zip(prompts[:number], self._hits, strict=True)
            )
            sequence = None
            if patience and not own:
                until = patience if end is None else min(end - time.monotonic(), patience)
                with contextlib.suppress(AdmissionTimeout):  # from here on, alone
                    sequence = self.client.admit(
                        tokens, timeout=until, namespace=namespace, priority=priority, wait_for_commit=True
                    )
            if sequence is None:
                left = None if end is None else max(end - time.monotonic(), 0.0)
                sequence = self.client.admit(tokens, timeout=left, namespace=namespace, priority=priority)
            self._rows.append(_Row(sequence, pad, sequence.hit))
            self._hits.append(sequence.hit)
        for row in self._rows:
            if (
                not row.sequence.room
            ):  # in a pool that is nearly full: asked for now, the first token need not wait
                with contextlib.suppress(OutOfRoom):
                    row.sequence.reserve(1)
        self._first = self._columns = min(row.pad + row.hit for row in self._rows)
        for layer in self.layers:
            layer.length = self._columns
        self._table = np.zeros((len(self._rows), self._width + 256), dtype=np.int64)
        self._slots = torch.from_numpy(self._table)

    def _open_planes(self) -> None:
        pool = self.client.pool
        with torch.inference_mode(False):  # the planes outlive whatever mode they are opened in
            for layer in self.layers:
                layer.key_plane = pool.tensor(f"{layer.number}.k").transpose(0, 1).unsqueeze(0)
                layer.value_plane = pool.tensor(f"{layer.number}.v").transpose(0, 1).unsqueeze(0)

    def _hook(self, model: Any) -> None:
        get_base = getattr(model, "get_base_model", None)  # PEFT generates with the model inside
        inner = get_base() if get_base is not None else model
        self._model = weakref.ref(inner)
        self._tuned = fingerprint.tuned(inner)
        self._force = fingerprint.in_force(self._tuned)
        self._random = [module for module in inner.modules() if _random(module)]
        with _hooking:
            if _before not in inner._forward_pre_hooks.values():
                inner.register_forward_pre_hook(_before, with_kwargs=True)
            if _after not in inner._forward_hooks.values():
                inner.register_forward_hook(_after, with_kwargs=True, always_call=True)

    # -- a forward ---------------------------------------------------------------------------------------------------

    def _begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before the first layer: a step, room for the new tokens, the plan.  Returns changed arguments, or None."""
        self._error = sys.exc_info()[1]
        self._live()
        self._undo()
        self._as_long_as_fed()
        ids = args[0] if args else kwargs.get("input_ids")
        if ids is None or ids.dim() != 2:
            raise Unsupported("a forward without input_ids: tokens are what cached K and V are found by")
        changed = None
        if not self._fed and self._columns and ids.shape[1] >= self._width:
            # Assisted generation, and whoever calls the model himself, feeds the whole prompt: what is cached is cut.
            cut = self._columns
            ids = ids[:, cut:]
            positions = kwargs.get("position_ids")
            if positions is not None and positions.shape[-1] > ids.shape[1]:
                kwargs = {**kwargs, "position_ids": positions[..., cut:]}
            if args:
                args = (ids, *args[1:])
            else:
                kwargs = {**kwargs, "input_ids": ids}
            changed = args, kwargs
        rows, new = ids.shape
        past = self._columns
        self._check_forward(ids, args, kwargs)
        if not self._fed:
            self._group = rows // len(self._rows)
        if past + new > self._width and self._group > 1:
            if past < self._width:
                raise Unsupported("beams and samples begin behind their prompt: feed the prompt alone first")
            order = list(range(rows))
            self._rearrange([self._rows[i // self._group] for i in order], order)
        added = past + new - max(past, self._width)
        self._take_room(ids[:, new - added :].tolist() if added > 0 else None)
        try:
            self._copy()
            self._plan = self._plan_of(past, new)
            # Where nothing was appended nothing was asked for, so a step's begin brings no news of these sequences but
            # moves, and layers look for those.
            self._plan.step_until = float("inf") if added > 0 else time.monotonic() + STEP_SECONDS
        except BaseException:
            self._undo()
            raise
        self._fed = True
        return changed

    def _end(self) -> None:
        """After the last layer: the step has ended, and the prompt's new part is there for others."""
        plan = self._plan
        if plan is None:
            return
        passed = sum(layer.length == plan.total for layer in self.layers)
        if passed != len(self.layers):
            self._undo()
            raise Unsupported(
                f"a forward of {passed} of {len(self.layers)} layers: tokens would have no K and V there"
            )
        self._plan = None
        self._columns = plan.total
        for row in self._rows:
            written = plan.total - row.pad
            self.computed += (written - max(plan.past - row.pad, 0)) * self._group
            row.written = max(row.written, written)
        # Whatever the daemon says, or that it is gone: the forward has ended, and is right.  The next one will say so.
        with contextlib.suppress(KvslotError):
            self._end_step()
        if plan.past < self._width and self._publish:
            for row in self._rows:
                length = min(row.written, self._width - row.pad)
                if length > row.hit and not row.spoiled:
                    with contextlib.suppress(KvslotError):
                        row.sequence.commit(length, wait=False)
            with contextlib.suppress(KvslotError):
                self.client.flush()
        if self.shape.windowed and self.client.pool.description.windowed:
            with contextlib.suppress(KvslotError):
                self._give_front()

    def _end_step(self) -> None:
        """The device has finished what the step submitted: on the CPU, it has when this is called."""
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def _next_step(self, plan: _Plan) -> None:
        """What the layers so far were given to do is done; the rest is another step."""
        plan.step_until = time.monotonic() + STEP_SECONDS
        with contextlib.suppress(KvslotError):  # the next forward will say so
            self._end_step()
            step = self.client.step()
            step.__enter__()
            self._step = step

    def _undo(self) -> None:
        """A forward did not end: what it appended is taken back, and its step is over."""
        if self._plan is None and self._step is None:
            return
        self._plan = None
        for row, length in zip(self._rows, self._before, strict=False):
            if length < row.sequence.length:
                try:
                    row.sequence.trim(keep_to=length)  # nobody has been told of them: no word goes out
                except BaseException as error:
                    self._break(row, error)
                    if not isinstance(error, KvslotError):
                        raise
            row.extents = []
        for layer in self.layers:
            layer.length = self._columns
        with contextlib.suppress(KvslotError):
            self._end_step()

    def _break(self, row: _Row, error: BaseException) -> None:
        """The row's tokens cannot be made what was fed: no more of it is published, and the cache is of no use."""
        row.spoiled = True
        if self._broken is None:
            self._broken = Ended(
                f"tokens of this PoolCache could not be taken back ({error}): close it, and make another one"
            )

    def _as_long_as_fed(self) -> None:
        """Every sequence has the tokens that were fed and no others, or K and V would be published under wrong ones."""
        for row in self._rows:
            row.sequence.reserve(0)  # takes in what is still to come of calls that were interrupted
            length, meant = row.sequence.length, max(self._columns, self._width) - row.pad
            if length != meant:
                self._break(row, OutOfTurn(f"{row.sequence!r} was to have {meant}"))
        self._live()

    def _take_room(self, added: list[list[int]] | None) -> None:
        """Begins a step with a slot for each new token, waiting for room if it must."""
        end = None
        while True:
            step = self.client.step()
            step.__enter__()
            self._step = step
            self._before = [row.sequence.length for row in self._rows]
            try:
                for row in self._rows:
                    if row.sequence.preempt_by:
                        raise Preempted(row.sequence.id, row.sequence.preempt_by - time.monotonic())
                if added is not None:
                    for row, tokens in zip(self._rows, added, strict=True):
                        # Not `append`: an interrupt in the middle of that may leave a token that no roll-back finds.
                        row.sequence.append_all(tokens)
                return
            except OutOfRoom as short:
                self._undo()
                now = time.monotonic()
                if end is None and self._timeout is not None:
                    end = now + self._timeout
                if not isinstance(short.answer, Later) or (end is not None and now >= end):
                    raise
                self._wait(short.answer.retry_after_ms / 1e3, end)
            except BaseException:
                self._undo()
                raise

    def _wait(self, seconds: float, end: float | None) -> None:
        """Until something has changed, or for a while."""
        left = seconds if end is None else min(seconds, end - time.monotonic())
        self.client.flush()
        self.client.wait(max(left, 0.001))  # what has come stays with `events`, which is the user's

    def _copy(self) -> None:
        """Copies that came with room: before anything is read or written."""
        copies = self.client.take_copies()
        if copies:
            self.client.pool.copy(copies)

    def _plan_of(self, past: int, new: int) -> _Plan:
        plan = _Plan(past, new)
        total = plan.total
        rows = self._rows
        for number, row in enumerate(rows):
            if row.extents != row.sequence.extents:
                self._look_up(number, row)
        # Writes: to the row's own slots, and to the padding where a column is padding, another's, or a row's double.
        only = rows[0] if len(rows) == 1 and self._group == 1 else None
        if only is not None and past >= only.pad + only.hit:
            first, last = int(self._table[0, past]), int(self._table[0, total - 1])
            if last - first == new - 1 and _consecutive(self._table[0, past:total]):
                plan.write_at = first
        if plan.write_at < 0:
            pad = self.client.pool.write_padding
            to = np.repeat(self._table[:, past:total], self._group, axis=0)
            for number, row in enumerate(rows):
                at = number * self._group
                to[at, : max(row.pad + row.hit - past, 0)] = pad
                to[at + 1 : at + self._group] = pad
            plan.write_to = torch.from_numpy(to.reshape(-1))
        self._lay_out(plan)
        return plan

    def _lay_out(self, plan: _Plan) -> None:
        """What all layers read, by the tables of now."""
        past, total = plan.past, plan.total
        plan.epoch = self.client.epoch
        plan.reads.clear()
        plan.fixed.clear()
        if self.mode == "gather":
            for layer in self.layers:
                if layer.window not in plan.reads:
                    plan.reads[layer.window] = self._read_of(layer.start(past), total)
            return
        for layer in self.layers:
            if layer.window not in plan.reads:
                start = layer.start(past)
                plan.reads[layer.window] = _Read(start, total - start)
        for number, row in enumerate(self._rows):
            stop = min(row.pad + row.hit, total)
            start = max(past, row.pad)
            if stop > start:
                slots = self._slots[number, start:stop]
                plan.fixed += [(number * self._group + i, start, stop, slots) for i in range(self._group)]

    def _look_again(self, plan: _Plan) -> None:
        """A step has begun since the plan was made, and what was published may lie elsewhere by now.

        What the forward writes is not published, and stays where it is.
        """
        for number, row in enumerate(self._rows):
            if row.extents != row.sequence.extents:
                self._look_up(number, row)
        self._lay_out(plan)

    def _read_of(self, start: int, stop: int) -> _Read:
        """How columns [start, stop) of all rows are read."""
        read = _Read(start, stop - start)
        rows = self._rows
        runs = sum(len(row.sequence.extents) >> 1 for row in rows)
        if runs * PIECE_LEAST <= len(rows) * read.span or runs == 1:
            pieces: list[tuple[int, int]] = []
            for row in rows:
                mine: list[tuple[int, int]] = []
                if row.pad > start:
                    mine.append((-1, min(row.pad, stop) - start))
                if stop > row.pad:
                    flat = indices.within(row.sequence.extents, max(start - row.pad, 0), stop - row.pad)
                    mine += zip(flat[::2], flat[1::2], strict=True)
                pieces += mine * self._group
            if len(pieces) == 1 and pieces[0][0] >= 0:
                read.at = pieces[0][0]
            else:
                read.pieces = pieces
        else:
            table = self._slots[:, start:stop]
            if self._group > 1:
                table = table.repeat_interleave(self._group, 0)
            read.index = table.reshape(-1)
        return read

    def _look_up(self, number: int, row: _Row) -> None:
        """Notes the slots of all positions that a row has."""
        sequence = row.sequence
        slots = indices.slots_of(sequence.extents, np.int64)
        end = row.pad + len(slots)
        if end > self._table.shape[1]:
            table = np.zeros((len(self._rows), end + end // 4), dtype=np.int64)
            table[:, : self._table.shape[1]] = self._table
            self._table = table
            self._slots = torch.from_numpy(table)
        self._table[number, row.pad : end] = slots
        row.extents = sequence.extents.copy()

    def _buffer(self, part: str, plane: Any) -> Any:
        """What makes a buffer of (tokens, heads, width) that all layers of one shape share, one for K and one for V."""
        key = (part, plane.dtype, plane.shape[1], plane.shape[3])

        def take(tokens: int) -> Any:
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape[0] < tokens:
                with torch.inference_mode(False):
                    buffer = torch.empty(
                        (tokens + max(256, tokens // 4), *key[2:]), dtype=plane.dtype, device=plane.device
                    )
                self._buffers[key] = buffer
            return buffer.narrow(0, 0, tokens)

        return take

    # -- rows --------------------------------------------------------------------------------------------------------

    def _rearrange(self, sources: list[_Row], order: list[int]) -> None:
        """The model's row i goes on as what `sources[i]` was: rows that nobody wants are freed, others forked."""
        self._live()
        self._undo()
        fed = len(self._rows) * self._group
        wanted = {id(row) for row in sources}
        for row in self._rows:
            if id(row) not in wanted:
                row.sequence.free()
        kept = [row for row in self._rows if id(row) in wanted]
        dropped = len(kept) < len(self._rows)
        self._rows = list(kept)
        rows: list[_Row] = []
        taken: set[int] = set()
        try:
            for row in sources:
                if id(row) not in taken:
                    taken.add(id(row))
                    rows.append(row)
                else:
                    child = _Row(self._fork(row), row.pad, row.written)
                    rows.append(child)
                    self._rows.append(child)
        except BaseException as error:
            if dropped and self._broken is None:
                self._broken = Ended(f"rows of this PoolCache could not be made ({error}): make another one")
            while len(self._rows) > len(kept):  # the others are as they were
                with contextlib.suppress(KvslotError):
                    self._rows[-1].sequence.free()
                self._rows.pop()
            raise
        self._rows = rows
        self._group = 1
        for row in rows:
            row.extents = []
        width = self._table.shape[1]
        self._table = np.zeros((len(rows), width), dtype=np.int64)
        self._slots = torch.from_numpy(self._table)
        if order != list(range(fed)):
            chosen = torch.tensor(order)
            for layer in self.layers:
                layer._select(chosen)

    def _fork(self, row: _Row) -> Slots:
        end = None if self._timeout is None else time.monotonic() + self._timeout
        ticket = 0
        while True:
            answer = row.sequence.fork(ticket=ticket)
            if not isinstance(answer, Later):
                return answer
            ticket = answer.ticket
            if end is not None and time.monotonic() >= end:
                raise OutOfRoom(row.sequence.id, row.sequence.length, answer)
            self._wait(answer.retry_after_ms / 1e3, end)

    def _give_front(self) -> None:
        """Gives back what no layer's window reaches any more."""
        start = min(layer.start(self._columns) for layer in self.layers) - SLACK
        for row in self._rows:
            keep = min(start - row.pad, row.sequence.length)
            if keep - row.sequence.kept_from >= TRIM_LEAST:
                row.sequence.trim(keep_from=keep)

    # -- what may be asked -------------------------------------------------------------------------------------------

    def _live(self) -> None:
        if self._closed:
            raise Ended("this PoolCache is closed: its slots may be another's by now")
        if self._broken is not None:
            raise self._broken

    def _check_forward(self, ids: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """K and V must follow from the tokens alone: everything else that a forward is given has to say the same."""
        rows, new = ids.shape
        past, ours = self._columns, len(self._rows)
        total = past + new
        if rows % ours or (self._fed and rows != ours * self._group):
            raise BadRequest(
                f"{rows} rows of tokens for a cache of {ours * (self._group if self._fed else 1)}"
            )
        if len(args) > 1:
            raise Unsupported(
                "name the arguments of a forward with a PoolCache: cache=..., attention_mask=..."
            )
        if total > self._limit:
            raise Unsupported(
                f"beyond {self._limit} tokens this model's rope changes with the length: K of earlier tokens would "
                "have to change, too"
            )
        group = rows // ours
        for name, value in kwargs.items():
            if value is not None and name not in KNOWN:
                raise Unsupported(
                    f"a forward with {name}: K and V would depend on more than the tokens, and be wrong for others"
                )
        if not self._fed:
            self._tuned = fingerprint.tuned(self._model())  # adapters may have been loaded since
        if fingerprint.in_force(self._tuned) != self._force:
            raise BadRequest(
                "other adapters are in force than when this PoolCache was made: make one for them"
            )
        if any(module.training for module in self._random):
            raise Unsupported("a model in training mode, with dropout or noise: call model.eval() first")
        if past < self._width:
            stop = min(total, self._width)
            given = ids[:, : stop - past].cpu().numpy()
            meant = np.repeat(self._prompt[:, past:stop], group, axis=0)
            columns = np.arange(past, stop)
            pads = np.repeat([row.pad for row in self._rows], group)[:, None]
            if ((given != meant) & (columns >= pads)).any():
                raise BadRequest("these are not the tokens that this PoolCache was made for")
        front = np.array([row.pad for row in self._rows for _ in range(group)])[:, None]
        positions = kwargs.get("position_ids")
        if positions is not None:
            if positions.dim() != 2 or positions.shape[1] != new:
                raise Unsupported("position_ids that are not a number for each token")
            if positions.device.type == "cpu":
                meant = np.arange(past, total) - front
                if ((positions.numpy() != meant) & (meant >= 0)).any():
                    if (positions.numpy()[:, -1] < past - front[:, 0]).all():
                        raise BadRequest(
                            f"{past} columns are cached, these among them: feed what comes after, or crop the cache "
                            "first; to give generate a prompt again, to one column less than that has"
                        )
                    raise Unsupported(
                        f"position_ids {positions[0, :3].tolist()}... for columns {past}...: position 0 is each "
                        f"prompt's first token, and the padding is {front[:, 0].tolist()}. Give generate the "
                        "attention_mask that PoolCache was given (or ones): without one, it takes padding tokens "
                        "within a prompt for padding"
                    )
        elif front.any():
            raise BadRequest(
                "rows with padding need position_ids, as generate makes them from attention_mask"
            )
        mask = kwargs.get("attention_mask")
        if mask is None:
            if front.any():
                raise BadRequest("rows with padding need their attention_mask")
        elif not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[1] != total:
            raise Unsupported(f"an attention_mask that is not (rows, {total}): only padding may be masked")
        else:
            if ((mask.cpu().numpy() != 0) != (np.arange(total) >= front)).any():
                raise Unsupported("an attention_mask that masks more, or less, than the padding in front")


# -- inside ---------------------------------------------------------------------------------------------------------


# One pair of hooks for each model, for good, and not one for each cache: other threads may run the same model with
# caches of their own, and torch goes through a model's hooks without a lock, so that none may come or go meanwhile.
_hooking: Final = threading.Lock()


def _given(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PoolCache | None:
    """The cache that a forward of a model is given, if it was made for that."""
    for each in (kwargs.get("cache"), kwargs.get("past_key_values"), *args):
        if isinstance(each, PoolCache) and each._model is not None and each._model() is module:
            return each
    return None


def _before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cache = _given(module, args, kwargs)
    return None if cache is None else cache._begin(args, kwargs)


def _after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache = _given(module, args, kwargs)
    if cache is None:
        return
    error = sys.exc_info()[1]
    if output is None or (error is not None and error is not cache._error):
        cache._undo()  # it failed: at once, for until its step ends the session counts as stalled
    else:
        cache._end()


def _prompts(input_ids: Any, attention_mask: Any) -> tuple[Any, list[int]]:
    """The prompts as int32 (rows, width), and the padding in front of each."""
    ids = np.asarray(input_ids.cpu() if isinstance(input_ids, torch.Tensor) else input_ids)
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or not ids.size or ids.dtype.kind not in "iu":
        raise BadRequest(f"input_ids of shape {ids.shape}: one row of token numbers for each prompt")
    pads = [0] * len(ids)
    if attention_mask is not None:
        mask = (
            np.asarray(attention_mask.cpu() if isinstance(attention_mask, torch.Tensor) else attention_mask)
            != 0
        )
        if mask.ndim == 1:
            mask = mask[None]
        if mask.shape != ids.shape:
            raise BadRequest(f"an attention_mask of {mask.shape} for tokens of {ids.shape}")
        pads = [int(n) for n in (~mask).sum(1)]
        if (mask != (np.arange(ids.shape[1]) >= np.array(pads)[:, None])).any() or max(pads) == ids.shape[1]:
            raise BadRequest("padding must be in front, and every prompt have a token: padding_side='left'")
    return ids.astype(np.int32), pads


def _random(module: Any) -> bool:
    """Whether what a module computes is left to chance while it is in training."""
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return bool(module.p > 0)
    return any(
        isinstance(value, float) and value > 0 and any(word in name for word in RANDOM)
        for name, value in vars(module).items()
    )


def _rope_limit(model: Any) -> int:
    """Tokens up to which K of a token does not depend on how long its sequence is."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [each for each in rope.values() if isinstance(each, dict)]
    limit = 1 << 62
    for each in nested or [rope]:
        if each.get("rope_type", each.get("type", "default")) in ("dynamic", "longrope"):
            own = each.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(limit, int(own or config.max_position_embeddings))
            if each.get("rope_type", each.get("type")) == "dynamic":
                limit -= 1  # a sequence of just that length is computed as the one before it was, if that was longer
    return limit


def _common(one: Any, other: Any) -> int:
    """How many tokens two prompts begin with alike."""
    n = min(len(one), len(other))
    different = np.flatnonzero(one[:n] != other[:n])
    return int(different[0]) if different.size else n


def _consecutive(slots: Iterable[Any]) -> bool:
    array = np.asarray(slots)
    return len(array) < 2 or bool((np.diff(array) == 1).all())


__all__ = ["MODES", "PoolCache", "PoolLayer", "Preempted"]
