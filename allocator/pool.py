"""The pool: one accelerator's token slots, who holds them, and every verb that changes that.

Plain calls on plain values: nothing here waits, reads a clock, draws a random number or opens anything.  `now` is
seconds on the caller's clock.  A verb checks everything, then changes everything; a refusal (errors.py) or a LATER or
NEVER (results.py) leaves no trace but its count and its ticket.

What is never traded away: a slot has one owner, published slots are never written again, and no slot is handed out
while a submitted step of whoever had it may still touch it.  `audit()` recounts all of it from nothing.
"""

from __future__ import annotations

from kvslot.allocator.accounts import Quota, narrowest
from kvslot.allocator.config import check_priority
from kvslot.allocator.errors import BadRequest, OutOfTurn, Refusal
from kvslot.allocator.lifecycle import Lifecycle
from kvslot.allocator.moves import Move
from kvslot.allocator.pages import Pages
from kvslot.allocator.results import (
    Admitted,
    Committed,
    Copy,
    Forked,
    Grown,
    Later,
    Never,
    PoolStatistics,
    Push,
)
from kvslot.allocator.runs import EPHEMERAL
from kvslot.allocator.sessions import Range, Sequence, Session
from kvslot.allocator.slots import CACHED, FENCED, FREE, PRIVATE, QUARANTINED, RESERVED


class Pool(Lifecycle, Pages):
    """A pool of `config.blocks` blocks of `config.block_size` token slots.

    Block 0 is padding (two blocks at block_size 1): slot 0 is for padded reads, the last padding slot for padded
    writes.  `usable` counts the rest, for admission, statistics and documents alike.
    """

    def probe(self, root: int, tokens: bytes) -> int:
        """How many tokens of this prompt a sequence would find cached now; touches nothing."""
        n = self._count(root, tokens)
        hit = self.tree.matching(root, tokens)
        return hit if hit < n else self._last_left(n)

    def touch(self, root: int, tokens: bytes) -> int:
        """As `probe`, and what was found counts as used now: it is not among the next to be evicted."""
        n = self._count(root, tokens)
        path: list[int] = []
        hit = self.tree.match(root, tokens, path)
        if path:
            self.tick += 1
            self.tree.hold(path[-1])
            self.tree.unhold(path[-1], self.tick)
        return hit if hit < n else self._last_left(n)

    def allocate(
        self,
        session: Session,
        root: int,
        tokens: bytes,
        *,
        now: float = 0.0,
        ticket: int = 0,
        priority: int = 0,
        contiguous: bool = False,
        wait_for_commit: bool = False,
    ) -> Admitted | Later | Never:
        """Starts a sequence: finds the longest cached prefix, holds it, and takes room for the rest, or does nothing.

        `tokens` is the prompt as little-endian int32.  A growth run is added when there is room and never makes the
        request fail.  `contiguous` asks for the rest as one extent.  `ticket` is that of an earlier LATER.
        With `wait_for_commit`, a prefix that another sequence is computing right now gives LATER(commit) rather than
        being computed twice.
        """
        n = len(tokens) >> 2
        if not n or len(tokens) & 3 or root not in self.roots or type(tokens) is not bytes:
            self._count(root, tokens)
        if priority:
            check_priority(priority)
        if session.life:
            raise OutOfTurn("the session is not live")
        if now < self.now:
            now = self.now
        else:
            self.now = now
        tree = self.tree
        path: list[int] = []
        hit = tree.match(root, tokens, path)
        if hit >= n:
            # The one place of the rule that a token is left to compute: an engine needs its logits.
            hit = self._last_left(n)
            depth = tree.depth
            while path and depth[path[-1]] >= hit:
                path.pop()
        if (
            wait_for_commit
            and self.promised
            and -(-n // session.page) * session.page
            <= narrowest(session, self.account_of[root], self.usable)[0]
        ):
            sequence = self._promise(root, tokens, path, hit)
            if sequence is not None:
                return self.admission.wait_for(session, n - hit, now, ticket, sequence)
        if session.page > 1:
            if contiguous:
                raise BadRequest(
                    "contiguous: a session that reads whole pages places them by its block table"
                )
            paged = self._allocate_pages(session, root, tokens, path, hit, now, ticket, priority)
            if type(paged) is Admitted:
                self.lost_hit_tokens += hit - paged.hit
            return paged
        account = self.account_of[root]
        if n > session.quota or n > account.slots or n > self.usable:
            return Never(n, *narrowest(session, account, self.usable))
        node = path[-1] if path else root
        evictable = tree.evictable
        tree.hold(node)
        need = n - hit
        spare = self.runs.total + (0 if self.scrubs else tree.evictable) - need
        want = need + 2 * self.quantum  # at most: the run rounds the whole up to cells
        # Room to spare, nobody waiting, no quota near: the common case decides in one comparison.
        if (
            spare < self.watermark + 2 * self.quantum
            or self.admission.busy
            or session.owes
            or session.charged + want > session.quota
            or account.charged + want > account.slots
            or account.unwritten + want - need > account.room
            or self.ledger.counts[FENCED]
            or contiguous
            or ticket
        ):
            if (
                path
                and hit < tree.depth[node] + tree.length[node]
                and session.charged + need <= session.quota
                and account.charged + need <= account.slots
            ):
                node = path[-1] = self._hold_less(node, hit)
                spare = self.runs.total + self.yields - need
            try:
                later = self.admission.admit(
                    session, account, need, evictable - tree.evictable, now, ticket, contiguous, root
                )
            except Refusal:
                tree.unhold(node, tree.tick[node])
                raise
            if later is not None:
                tree.unhold(node, tree.tick[node])
                return later
            path = tree.path_to(node)  # to make room, nodes on it may have been split
            if (
                contiguous
                or spare < 2 * self.quantum + self.admission.held_back()
                or session.charged + want > session.quota
                or account.charged + want > account.slots
                or account.unwritten + want - need > account.room
                or self.admission.runs_wanted(account, want - need)
            ):
                want = need
        if session.append == "peel" and path and want != need:
            answer = self._start_peeled(session, root, node, tokens, path, hit, spare - want, priority, now)
            if answer is not None:
                return answer
        own = self._place(need, want != need, contiguous, path, hit, root, now)
        return self._start(session, root, node, tokens, path, hit, own, priority)

    def extend(
        self, session: Session, handle: int, *, tokens: int = 0, now: float = 0.0, ticket: int = 0
    ) -> Grown | Later | Never:
        """Gives a sequence room for `tokens` more (0: one growth run), next to its last slot where that is free."""
        sequence = self._sequence(session, handle)
        if tokens < 0:
            raise BadRequest(f"extend by {tokens} tokens: a count is not negative")
        now = self.now = max(now, self.now)
        if session.page > 1:
            return self._extend_pages(session, sequence, tokens, now, ticket)
        account = sequence.account
        want = tokens or self.quantum
        limit = min(session.quota, account.slots, self.usable)
        occupied = sequence.capacity - sequence.dropped
        if occupied + want > limit:
            want = limit - occupied
            if want < (tokens or 1):
                return Never(occupied + (tokens or 1), *narrowest(session, account, self.usable))
        if account.unwritten + want > account.room:
            if tokens > account.room:
                return Never(tokens, account.room, Quota.RUNS)
            if not tokens and account.unwritten < account.room:
                want = account.room - account.unwritten  # less than a run is better than a refusal
        position = sequence.capacity
        peel = self._peel_length(session, sequence)
        runs, cell = self.runs, self.cell
        if peel and (
            want + peel > runs.total + self.yields
            or session.charged + want + peel > session.quota
            or account.charged + want + peel > account.slots
            or account.unwritten + want + peel > account.room
        ):
            peel = 0  # a copy is a convenience; linking new slots costs no memory
        if not tokens and want > runs.total + self.yields:
            # Less than a run is better than a refusal while there is anything to be had.
            want = max(1, runs.total + self.yields - peel)
        need = want + peel
        if (
            need > runs.total
            or self.admission.busy
            or session.owes
            or session.charged + need > session.quota
            or account.charged + need > account.slots
            or account.unwritten + need > account.room
        ):
            later = self.admission.grow(sequence, need, now, ticket)
            if later is not None:
                return later
            self.admission.grown(sequence)
        copies: list[Copy] = []
        last = -1 if peel else self._end_slot(sequence)
        left = runs.length_at.get(last, 0) if last >= 0 else 0
        # A free stretch right behind the last slot costs no extent, so even part of a run is worth having there.
        if left >= want or (not tokens and left * 4 >= want):
            if not tokens:
                whole = want + -(last + want) % cell  # to the end of a cell
                if (
                    session.charged + whole <= session.quota
                    and account.charged + whole <= account.slots
                    and account.unwritten + whole <= account.room
                ):
                    want = whole
            want = min(want, left)
            runs.take_within(last, last, want)
            out = [last, want]
        else:
            out = []
            if not tokens and not peel and self._fill_holes(want, 1, sequence.root, out):
                want = out[1]
            elif not peel and not want % cell:
                out = self._cells(want // cell, EPHEMERAL, sequence.root, now)
            if not out:
                if need > runs.total:
                    self._evict(need - runs.total, now)
                out = runs.take(need, EPHEMERAL, sequence.root)
        if peel:
            self._peel(sequence, peel, out, copies)
        else:
            self._own(sequence, position, out)
        sequence.capacity = position + want
        session.charged += want + peel
        account.charged += want + peel
        account.unwritten += want
        self.unwritten += want
        self.extents_given += len(out) >> 1
        self.extent_tokens += want + peel
        return Grown(position - peel, sequence.capacity, out, copies)

    def wrote(self, session: Session, handle: int, length: int) -> None:
        """The engine's device has written positions [0, length)."""
        sequence = self._sequence(session, handle)
        if length < 0:
            raise BadRequest(f"written up to {length}: a length is not negative")
        if length > sequence.capacity:
            raise BadRequest(f"written up to {length}, but the sequence has room for {sequence.capacity}")
        if length > sequence.length:
            self.unwritten -= length - sequence.length
            sequence.account.unwritten -= length - sequence.length
            sequence.length = length
        if length > sequence.written:
            sequence.written = length

    def commit(
        self,
        session: Session,
        handle: int,
        length: int,
        tokens: bytes = b"",
        *,
        priority: int | None = None,
        expiry: float = 0.0,
    ) -> Committed:
        """Publishes positions [0, length), which the engine has written: what the tree lacks becomes the tree's.

        `tokens` are those that follow the ones already told.  What the tree has stays the tree's, and the sequence's
        own copy of it stays private until Free.  The sequence's table does not change.
        """
        sequence = self._sequence(session, handle)
        if type(tokens) is not bytes:
            raise BadRequest(f"tokens are {type(tokens).__name__}, not bytes of int32")
        if len(tokens) & 3:
            raise BadRequest(f"{len(tokens)} bytes of tokens: they are int32, 4 bytes each")
        told = sequence.tokens + tokens if tokens else sequence.tokens
        known = sequence.tokens_from + (len(told) >> 2)
        if not 0 <= length <= known:
            raise BadRequest(f"commit to {length}: tokens are known up to {known}")
        if known > sequence.capacity:
            raise BadRequest(
                f"tokens are known up to {known}, but the sequence has room for {sequence.capacity}"
            )
        if priority is not None:
            check_priority(priority)
        if length > sequence.length:
            self.unwritten -= length - sequence.length
            sequence.account.unwritten -= length - sequence.length
            sequence.length = length
        if length > sequence.written:
            sequence.written = length
        sequence.tokens = told
        if priority is not None:
            sequence.priority = priority
        length -= length % self.unit
        if length <= sequence.base:
            return Committed(sequence.base, 0, 0)
        return self._publish(sequence, length, expiry)

    def fork(
        self, session: Session, handle: int, *, length: int = -1, now: float = 0.0, ticket: int = 0
    ) -> Forked | Later:
        """A child that shares the first `length` (-1: all written) tokens of a sequence; copies nothing.

        What the parent has written and not published is counted, and immutable while more than one holds it.  The
        parent keeps its unwritten room and goes on in place; the child takes room of its own with its first extend.
        """
        sequence = self._sequence(session, handle)
        if length == -1:
            length = max(sequence.written, sequence.base)
        if not 0 < length <= max(sequence.written, sequence.base):
            raise BadRequest(
                f"fork at {length}: a fork shares what is written, here {max(sequence.written, sequence.base)} tokens"
            )
        if sequence.kept_from:
            raise BadRequest("fork of a sequence whose front was trimmed")
        now = self.now = max(now, self.now)
        if session.owes or ticket:
            later = self.admission.admit_fork(sequence, now, ticket)
            if later is not None:
                return later
        self.serial = child_handle = self.serial + 1
        own: list[Range] = []
        child = Sequence(
            child_handle, session, sequence.account, sequence.root, sequence.node, min(sequence.base, length), length,
            length, sequence.tokens, sequence.tokens_from, own, sequence.priority, length,
        )  # fmt: skip
        child.past, child.prompt = sequence.past, sequence.prompt
        for piece in list(sequence.own):
            if piece.position >= length:
                break
            if piece.position + piece.length > length:
                self._split_range(sequence, piece, length - piece.position)
            if piece.holders is None:
                piece.holders = [sequence]
            piece.holders.append(child)
            piece.refs += 1
            own.append(piece)
        known = child.tokens_from + (len(child.tokens) >> 2)
        if known > length:
            child.tokens = child.tokens[: 4 * max(length - child.tokens_from, 0)]
            known = length
        if child.tokens_from > child.base - child.base % self.unit:
            self._tokens_from_tree(child, known)
        self.tree.hold(sequence.node)
        self.loose = True
        session.sequences[child_handle] = child
        self.sequences[child_handle] = child
        return Forked(child_handle, length)

    def free(self, session: Session, handle: int, *, fence: int = 0, now: float = 0.0) -> None:
        """Ends a sequence.  Its slots and its hold stay untouchable until step `fence` has completed."""
        sequence = self._sequence(session, handle)
        if not 0 <= fence <= session.submitted:
            raise BadRequest(f"fence {fence} is not among the steps submitted, 0..{session.submitted}")
        self.now = max(now, self.now)
        self._end(sequence, fence)
        if self.admission.busy:
            self.admission.pump(self.now)

    def trim(
        self,
        session: Session,
        handle: int,
        *,
        keep_from: int = 0,
        keep_to: int = -1,
        fence: int = 0,
        now: float = 0.0,
    ) -> int:
        """Drops positions before `keep_from` (sliding window) and from `keep_to` on (roll-back); returns the capacity.

        A roll-back keeps private room for at most two growth runs.  Below the published or shared end it detaches: the
        sequence appends to its own slots from there on.  Published slots before `keep_from` stay leased until Free.
        """
        sequence = self._sequence(session, handle)
        if not 0 <= fence <= session.submitted:
            raise BadRequest(f"fence {fence} is not among the steps submitted, 0..{session.submitted}")
        if keep_to < 0:
            keep_to = sequence.capacity
        if keep_to > sequence.capacity or keep_to < max(keep_from, 1):
            raise BadRequest(f"keep [{keep_from}, {keep_to}) is not within [0, {sequence.capacity})")
        if keep_from and not self.config.windowed:
            raise BadRequest("keep_from: not every layer of this pool's layout has a sliding window")
        if keep_from > sequence.written and keep_from > sequence.base:
            raise BadRequest(f"keep_from {keep_from} is beyond the {sequence.written} tokens written")
        if keep_to < sequence.kept_from:
            raise BadRequest(f"keep_to {keep_to}: positions before {sequence.kept_from} were trimmed away")
        self.tick += 1
        if keep_to < sequence.capacity:
            self._roll_back(sequence, keep_to, fence)
        if keep_from > sequence.kept_from:
            self._drop_front(sequence, keep_from, fence)
        self.now = max(now, self.now)
        if self.admission.busy:
            self.admission.pump(self.now)
        return sequence.capacity

    def poll(self, now: float) -> list[Push]:
        """Looks who can go on now, and hands over what has to be told to sessions since the last call.

        To be called after any batch of verbs, and now and then while anybody waits: deadlines pass by time alone.
        """
        self.now = max(now, self.now)
        if self.admission.busy:
            self.admission.pump(self.now)
        pushes, self.pushes = self.pushes, []
        return pushes

    def withdraw(self, session: Session, ticket: int) -> None:
        """Gives a ticket up."""
        self.admission.withdraw(session, ticket)

    def begin_move(self, node: int, at: int = 0, length: int = 0, target: list[int] | None = None) -> Move:
        """Starts to move tokens [at, at + length) of a node (`length` 0: all from there on); see moves.py."""
        return self.moves.begin(node, at, length, target)

    def finish_move(self, handle: int, copied: bool = True) -> bool:
        """A move's copy has ended; true when it was published."""
        return self.moves.finish(handle, copied)

    def abandon_move(self, handle: int) -> None:
        """Gives a move up before its copy has ended."""
        self.moves.abandon(handle)

    def _sequence(self, session: Session, handle: int) -> Sequence:
        sequence = session.sequences.get(handle)
        if sequence is None or session.life:
            if sequence is not None:
                raise OutOfTurn("the session is not live")
            raise self.bad_handle(handle, "sequence")
        return sequence

    def table(self, session: Session, handle: int) -> list[int]:
        """The sequence's slots in order of position, from its first kept one on, as flat extents."""
        sequence = self._sequence(session, handle)
        return self.table_of(sequence)

    def statistics(self) -> PoolStatistics:
        """All gauges and totals, derived now."""
        counts = self.ledger.counts
        tree, runs = self.tree, self.runs
        held = counts[CACHED] + counts[PRIVATE] - self.unwritten - self.duplicates - self.peeled
        room = (
            self.config.blocks - self.padding // self.block_size - runs.blocks_free
        ) * self.block_size - self.unwritten
        return PoolStatistics(
            usable=self.usable,
            free=counts[FREE],
            private=counts[PRIVATE],
            cached=counts[CACHED],
            fenced=counts[FENCED],
            moving=counts[4],
            reserved=counts[RESERVED],
            quarantined=counts[QUARANTINED],
            padding=counts[7],
            blocks=self.config.blocks,
            blocks_free=runs.blocks_free,
            tokens_held=held,
            unwritten=self.unwritten,
            duplicate_tokens=self.duplicates,
            peeled_tokens=self.peeled,
            evictable=tree.evictable,
            leased=tree.tokens - tree.evictable,
            pinned=self.pinned,
            largest_free_run=runs.longest(),
            nodes=tree.nodes,
            sequences=len(self.sequences),
            sessions=len(self.sessions),
            tickets=len(self.admission.waiting),
            moves=len(self.moves.tickets),
            evicted_tokens=self.evicted_tokens,
            copied_tokens=self.copied_tokens,
            moved_tokens=self.moves.moved_tokens,
            extents_given=self.extents_given,
            extent_tokens=self.extent_tokens,
            hit_tokens=self.hit_tokens,
            prompt_tokens=self.prompt_tokens,
            lost_hit_tokens=self.lost_hit_tokens,
            bad_handles=self.bad_handles,
            late_completions=self.moves.late_completions,
            pinned_waste_tokens=counts[FREE] - runs.blocks_free * self.block_size,
            internal_fragmentation=max(0.0, 1 - held / room) if room > 0 else 0.0,
        )
