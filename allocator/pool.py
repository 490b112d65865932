"""The pool: one accelerator's token slots, who holds them, and every verb that changes that.

Plain calls on plain values: nothing here waits, reads a clock, draws a random number or opens anything.  `now` is
seconds on the caller's clock.  A verb checks everything, then changes everything; a refusal (errors.py) or a LATER or
NEVER (results.py) leaves no trace but its count and its ticket.

What is never traded away: a slot has one owner, published slots are never written again, and no slot is handed out
while a submitted step of whoever had it may still touch it.  `audit()` recounts all of it from nothing.
"""

from __future__ import annotations

import heapq
import math

from kvslot.allocator import eviction
from kvslot.allocator.admission import Admission, whole_pages
from kvslot.allocator.errors import BadRequest, EndedHandle, ForeignHandle, OutOfTurn, Refusal, UnknownHandle
from kvslot.allocator.eviction import Lru
from kvslot.allocator.moves import Move, Moves
from kvslot.allocator.results import (
    UNLIMITED,
    Admitted,
    Committed,
    Copy,
    Forked,
    Grown,
    Later,
    Never,
    PoolConfig,
    PoolStatistics,
    Push,
    Reason,
    Space,
)
from kvslot.allocator.runs import EPHEMERAL, FRESH, REUSED, FreeRuns
from kvslot.allocator.sessions import DUPLICATE, OWN, PEELED, Fenced, Group, Life, Range, Sequence, Session
from kvslot.allocator.slots import CACHED, FENCED, FREE, PRIVATE, QUARANTINED, RESERVED, Ledger
from kvslot.allocator.tree import (
    MOVING_FLAG,
    PrefixTree,
    common_prefix,
    split_extents,
)

MAX_SLOTS = 2**31 - 1  # slots are int32 for the kernels
MAX_BLOCK_SIZE = 8192
MAX_PRIORITY = 7
MAX_SPACES = (
    65536  # namespaces open at a time; each costs a kilobyte, and a salt for every request is a mistake
)
HOLES_FROM = 512  # one slot in so many of those in use is in a hole: from there on new pieces begin in one
HOLE_LEAST = 3  # slots; a shorter hole costs an extent and saves next to nothing
HOLES_EACH = 2  # holes that a new piece begins in at the most, each costs an extent ...
HOLES_PER = 256  # ... and one more for so many tokens of it
PROMISE_LEAST = 64  # tokens; for fewer nobody waits: computing them takes less time than the waiting
SCATTER_SHIFT = (
    6  # 1/64: free slots in no whole cell that eviction puts up with before less than cells is handed out
)
HAND_ON = 64  # cells from which a request takes over what its victims leave
PAGE_VICTIMS = 64  # leaves that a request for whole pages looks at before it counts how many there can be
EMPTYING = 8  # oldest leaves among which one whose death empties a block is preferred


class Pool:
    """A pool of `config.blocks` blocks of `config.block_size` token slots.

    Block 0 is padding (two blocks at block_size 1): slot 0 is for padded reads, the last padding slot for padded
    writes.  `usable` counts the rest, for admission, statistics and documents alike.
    """

    def __init__(self, config: PoolConfig) -> None:
        _check_config(config)
        self.config = config
        self.block_size = config.block_size
        self.slots = config.blocks * config.block_size
        self.padding = config.block_size if config.block_size > 1 else 2
        self.usable = self.slots - self.padding
        self.unit = config.block_size if config.opaque else 1
        quantum = config.quantum or min(32, config.block_size)
        self.quantum = -(-quantum // self.unit) * self.unit
        self.watermark = int(self.usable * config.watermark)
        self.ledger = Ledger(self.slots, self.padding)
        self.headroom = int(self.usable * config.headroom) // self.quantum
        self.cell = (
            self.quantum
        )  # growth and placement go by the same measure; holes are what falls short of it
        self.holes_from = HOLES_FROM if config.fill_holes else 0
        self.runs = FreeRuns(config.blocks, config.block_size, self.padding, self.cell)
        self.evictor = eviction.make(config.eviction)
        self.tree = PrefixTree(self.evictor, self.unit)
        self.admission = Admission(self)
        self.moves = Moves(self)
        self.pushes: list[Push] = []
        self.sessions: dict[int, Session] = {}
        self.spaces: dict[Space, int] = {}
        self.roots: dict[int, Space] = {}
        self.sequences: dict[int, Sequence] = {}
        self.promised: dict[
            tuple[int, int, bytes], Sequence
        ] = {}  # (node, hit, first unit missed) -> who computes it
        self.loose = False  # whether any sequence may hold more of a node than it reads
        self.now = 0.0  # the latest time any verb was told; time does not go back
        self.tick = 0
        self._serial = 0
        self._sweeping: list[Session] = []
        # Gauges that no ledger sum gives; recounted by the audit.
        self.unwritten = 0
        self.duplicates = 0
        self.peeled = 0
        self.pinned = 0
        # Totals since boot.
        self.evicted_tokens = 0
        self.copied_tokens = 0
        self.extents_given = 0
        self.extent_tokens = 0
        self.hit_tokens = 0
        self.prompt_tokens = 0
        self.bad_handles = 0

    # -- sessions ----------------------------------------------------------------------------------------------

    def open_session(
        self,
        *,
        page: int = 1,
        quota: int = UNLIMITED,
        append: str = "",
        peel_max: int = -1,
        movable: bool = False,
        group: Session | None = None,
    ) -> Session:
        """A new session whose kernels read pages of `page` slots; `group` joins it to another of the same engine."""
        config = self.config
        if self.config.opaque:
            page = self.block_size
        if type(page) is not int or type(quota) is not int or type(peel_max) is not int:
            raise BadRequest("page, quota and peel_max are whole numbers")
        if page < 1 or self.block_size % page:
            raise BadRequest(f"page size {page} does not divide the block size {self.block_size}")
        if quota < 1:
            raise BadRequest(f"quota {quota}: a session needs at least one slot")
        append = append or config.append
        if append not in ("chain", "peel"):
            raise BadRequest(f"append mode {append!r} is neither 'chain' nor 'peel'")
        if group is not None and group.life != Life.LIVE:
            raise OutOfTurn("the session to join is not live")
        session = Session(
            self._handle(),
            page=page,
            quota=min(quota, UNLIMITED),
            append=append,
            peel_max=config.peel_max if peel_max < 0 else peel_max,
            movable=movable,
        )
        self.sessions[session.handle] = session
        if group is not None:
            if group.group is None:
                group.group = Group()
                group.group.members.append(group)
                group.group.completed = group.completed
            session.group = group.group
            session.group.members.append(session)
            # Every member publishes steps: until this one has completed those of a fence, the fence has not passed.
            session.submitted = session.completed = group.completed
            self._group_completed(session.group)
        return session

    def progress(self, session: Session, submitted: int, completed: int) -> None:
        """Takes over what the session's page says and releases the fences that passed; the values only ever rise."""
        if session.life == Life.ENDED:
            raise EndedHandle("the session has ended")
        if completed > submitted or submitted < session.submitted or completed < session.completed:
            raise BadRequest(
                f"steps went from {session.submitted}/{session.completed} to {submitted}/{completed} "
                "(submitted/completed); they only rise, and completed never passes submitted"
            )
        session.submitted = submitted
        if completed == session.completed:
            return
        session.completed = completed
        session.stalled = False
        if session.group is None:
            self._pass_fences(session)
        else:
            self._group_completed(session.group)

    def stall(self, session: Session, stalled: bool = True) -> None:
        """Marks a session whose steps do not complete: its fences hold eviction back no longer."""
        if session.life == Life.ENDED:
            raise EndedHandle("the session has ended")
        session.stalled = stalled
        if stalled:
            for sequence in session.sequences.values():
                self._settle(sequence, published=False)

    def bye(self, session: Session) -> None:
        """Ends a session in good order (all steps completed, nothing mapped): everything goes back at once."""
        if session.life == Life.ENDED:
            raise EndedHandle("the session has ended")
        if session.life:
            raise OutOfTurn("the session is not live: it is resumed, or proven gone")
        if session.passed() < session.submitted:
            raise OutOfTurn(
                f"step {session.submitted} was submitted, and not all processes have completed it"
            )
        session.life = Life.GONE
        self._start_sweep(session)
        while session in self._sweeping:
            self._wipe(session, 1 << 30)

    def lose(self, session: Session) -> None:
        """The connection ended without Bye: slots are quarantined (by `sweep`), leases stay."""
        if session.life != Life.LIVE:
            raise OutOfTurn("the session is not live")
        session.life = Life.LOST
        self._start_sweep(session)

    def resume(self, session: Session) -> None:
        """A lost session's live process came back with its secret: it holds again what it held."""
        if session.life != Life.LOST:
            raise OutOfTurn("only a lost session can be resumed")
        if session.proven:
            raise OutOfTurn("the session's process was proven gone")
        session.life = Life.LIVE
        if session in self._sweeping:
            self._sweeping.remove(session)
        self._unquarantine(session)
        self._pass_fences(session)

    def gone(self, session: Session) -> None:
        """The lost session's process is proven gone: `sweep` releases what it held, once all of its group are."""
        if session.life != Life.LOST:
            raise OutOfTurn("only a lost session can be gone")
        session.proven = True
        self._all_gone(session.group.members if session.group is not None else [session])

    def _all_gone(self, members: list[Session]) -> None:
        """Begins to release an engine's sessions when none of its processes can touch their slots any more."""
        if all(member.proven for member in members):
            for member in members:
                if member.life == Life.LOST:
                    member.life = Life.GONE
                    self._start_sweep(member)

    def sweep(self, budget: int = 256) -> bool:
        """Cleans up after ended sessions, at most `budget` sequences and fences; True when nothing is left to do."""
        while budget > 0 and self._sweeping:
            session = self._sweeping[-1]
            if session.life == Life.LOST:
                budget -= self._quarantine(session)
            else:
                budget = self._wipe(session, budget)
        return not self._sweeping

    def _start_sweep(self, session: Session) -> None:
        self.admission.forget_session(session)
        if session not in self._sweeping:
            self._sweeping.append(session)

    def _quarantine(self, session: Session) -> int:
        """Marks a lost session's private slots; O(its own holdings), once."""
        self._sweeping.remove(session)
        seen: set[int] = set()
        for sequence in session.sequences.values():
            self._settle(sequence, published=False)
            for piece in (*sequence.own, *(sequence.sources or ())):
                if id(piece) not in seen:
                    seen.add(id(piece))
                    session.swept.append((piece, PRIVATE))
        for _, _, fenced in session.fences:
            session.swept += ((piece, FENCED) for piece in fenced.ranges)
        for piece, state in session.swept:
            self.ledger.shift_all(piece.extents, piece.length, state, QUARANTINED)
        return len(session.sequences) + len(session.fences) + 1

    def _unquarantine(self, session: Session) -> None:
        for piece, state in session.swept:
            self.ledger.shift_all(piece.extents, piece.length, QUARANTINED, state)
        session.swept = []

    def _wipe(self, session: Session, budget: int) -> int:
        """Releases up to `budget` things a session of a gone process held."""
        self._unquarantine(session)
        while session.sequences and budget > 0:
            self._end(next(reversed(session.sequences.values())), 0)
            budget -= 1
        while session.fences and budget > 0:
            self._unfence(session, session.fences.pop()[2])
            budget -= 1
        while session.pins and budget > 0:
            self.unpin(session, next(reversed(session.pins)))
            budget -= 1
        if not session.sequences and not session.fences and not session.pins:
            session.life = Life.ENDED
            self._sweeping.remove(session)
            del self.sessions[session.handle]
            if session.group is not None:
                session.group.members.remove(session)
                if session.group.members:
                    self._group_completed(session.group)
                    self._all_gone(session.group.members)
        return budget

    def _group_completed(self, group: Group) -> None:
        completed = min(member.completed for member in group.members)
        group.completed = max(group.completed, completed)
        for member in group.members:
            self._pass_fences(member)

    def _pass_fences(self, session: Session) -> None:
        if session.life:  # lost: they stay; gone: the sweep releases them, with what it quarantined
            return
        passed = session.passed()
        fences = session.fences
        while fences and fences[0][0] <= passed:
            self._unfence(session, heapq.heappop(fences)[2])

    # -- namespaces --------------------------------------------------------------------------------------------

    def open_space(self, space: Space) -> int:
        """The root of a namespace's tree; the same structure gives the same root for as long as it is open."""
        root = self.spaces.get(space)
        if root is None:
            if len(self.spaces) >= MAX_SPACES:
                raise BadRequest(f"{MAX_SPACES} namespaces are open; close one that is not used")
            root = self.spaces[space] = self.tree.root()
            self.roots[root] = space
        return root

    def close_space(self, root: int) -> None:
        """Ends a namespace with nothing cached and nobody in it."""
        if root not in self.roots:
            raise UnknownHandle(f"no namespace {root} is open")
        if self.tree.kid[root] or self.tree.holds[root] > 1:
            raise OutOfTurn(f"namespace {root} is in use, or has cached prefixes")
        del self.spaces[self.roots.pop(root)]
        self.tree.remove_root(root)

    # -- verbs -------------------------------------------------------------------------------------------------

    def probe(self, root: int, tokens: bytes) -> int:
        """How many tokens of this prompt a sequence would find cached now; touches nothing."""
        n = self._count(root, tokens)
        hit = self.tree.matching(root, tokens)
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
            _check_priority(priority)
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
            and -(-n // session.page) * session.page <= min(session.quota, self.usable)
        ):
            sequence = self._promise(root, tokens, path, hit)
            if sequence is not None:
                return self.admission.wait_for(session, n - hit, now, ticket, sequence)
        if session.page > 1:
            if contiguous:
                raise BadRequest(
                    "contiguous: a session that reads whole pages places them by its block table"
                )
            return self._allocate_pages(session, root, tokens, path, hit, now, ticket, priority)
        limit = session.quota if session.quota < self.usable else self.usable
        if n > limit:
            return Never(n, limit)
        node = path[-1] if path else root
        evictable = tree.evictable
        tree.hold(node)
        need = n - hit
        spare = self.runs.total + tree.evictable - need
        want = need + 2 * self.quantum  # at most: the run rounds the whole up to cells
        # Room to spare, nobody waiting, no quota near: the common case decides in one comparison.
        if (
            spare < self.watermark + 2 * self.quantum
            or self.admission.busy
            or session.owes
            or session.charged + want > session.quota
            or self.ledger.counts[FENCED]
            or contiguous
            or ticket
        ):
            if (
                path
                and hit < tree.depth[node] + tree.length[node]
                and session.charged + need <= session.quota
            ):
                node = path[-1] = self._hold_less(node, hit)
                spare = self.runs.total + tree.evictable - need
            try:
                later = self.admission.admit(
                    session, need, evictable - tree.evictable, now, ticket, contiguous
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
            ):
                want = need
        if session.append == "peel" and path and want != need:
            answer = self._start_peeled(session, root, node, tokens, path, hit, spare - want, priority, now)
            if answer is not None:
                return answer
        own = self._place(need, want != need, contiguous, path, hit, root, now)
        return self._start(session, root, node, tokens, path, hit, own, priority)

    def _start_peeled(
        self,
        session: Session,
        root: int,
        node: int,
        tokens: bytes,
        path: list[int],
        hit: int,
        spare: int,
        priority: int,
        now: float,
    ) -> Admitted | None:
        """Starts a sequence whose new slots begin with copies of the partial slot its hit ends in.

        None where there is none, where the slots behind are free, and where memory or quota have no room for a copy.
        """
        extents: list[int] = []
        self.tree.path_extents(path, hit, extents)
        end = extents[-2] + extents[-1]
        peel = min(end % self.block_size, extents[-1])
        want = (len(tokens) >> 2) - hit + peel + (self.quantum >> 1)
        count = -(-want // self.cell)
        if (
            not 0 < peel <= session.peel_max
            or end in self.runs.length_at
            or spare < peel
            or session.charged + count * self.cell > session.quota
        ):
            return None
        own = self._cells(count, REUSED, root, now)
        if not own:
            return None
        path = self.tree.path_to(node)
        answer = self._start(session, root, node, tokens, path, hit, own, priority, peel)
        self._list_copies(session, answer, extents, [], [], peel)
        return answer

    def _place(
        self, need: int, run: bool, contiguous: bool, path: list[int], hit: int, root: int, now: float
    ) -> list[int]:
        """Takes `need` slots, and with `run` room to grow into; evicts what is missing.

        In place behind the hit where slots are free there, into a hole where holes have become many, the rest in whole
        cells.  The growth run is what rounds the whole to cells, from half a quantum to one and a half.
        """
        runs, cell = self.runs, self.cell
        kind = REUSED if path else FRESH
        own: list[int] = []
        left = need + (self.quantum >> 1) if run else need
        if contiguous:
            return runs.take_run(need, kind, root)
        if path:
            node = path[-1]
            tree = self.tree
            if hit == tree.depth[node] + tree.length[node]:
                end = tree.end_slot(node)
                beside = runs.length_at.get(end, 0)
                if beside:
                    # Up to the end of a cell, so that what follows is whole cells again.
                    wanted = left + -(end + left) % cell if run else left
                    if beside > wanted:
                        beside = wanted
                    runs.take_within(end, end, beside)
                    own = [end, beside]
                    left -= beside
        if left > 0 and (runs.total - runs.cells_free * cell) * self.holes_from > self.usable - runs.total:
            left -= self._fill_holes(left, HOLES_EACH + left // HOLES_PER, root, own)
        if left > 0:
            count = -(-left // cell)
            if not run and left % cell:
                cells = []
            elif count + self.headroom <= runs.cells_free:
                cells = runs.take_cells(count, kind, root)  # as `_cells` would, which need not be asked
            else:
                cells = self._cells(count, kind, root, now)
            if cells:
                own = own + cells if own else cells
            else:
                # The last resort, and what a request without room to grow into gets: exactly what it needs.
                least = need - sum(own[1::2])
                if least > 0:
                    whole = min(least // cell, runs.cells_free)
                    if whole:
                        own += runs.take_cells(whole, kind, root)
                    least -= whole * cell
                if least > 0:
                    if least > runs.total:
                        self._evict(least - runs.total, now)
                    own += runs.take(least, kind, root)
        return own if len(own) < 4 else _joined(own)

    def _hold_less(self, node: int, end: int) -> int:
        """Turns a hold on `node` into one on its part up to position `end`, so that the rest can be evicted.

        A node on the move is left whole: an answer that may yet be LATER gives up nobody's work.
        """
        tree = self.tree
        if tree.flags[node] & MOVING_FLAG:
            return node
        at = end - tree.depth[node]
        upper = tree.split(node, at + -at % self.unit)
        tree.hold(upper)
        tree.unhold(node, tree.tick[node])
        return upper

    def tighten(self) -> bool:
        """Gives back what sequences hold beyond their hits; true when more can be evicted now.

        A lease is taken on whole nodes, which costs nothing while memory is plenty.  When it is short a hit of four
        tokens must not keep the thousands behind it.
        """
        if not self.loose:
            return False
        self.loose = False
        tree = self.tree
        depth, length = tree.depth, tree.length
        before = tree.evictable
        for sequence in self.sequences.values():
            node, base = sequence.node, sequence.base
            end = base + -base % self.unit
            if depth[node] + length[node] <= end:
                continue
            while depth[node] >= base and tree.parent[node]:
                node = tree.parent[node]
            if depth[node] + length[node] <= end:
                tree.hold(node)
            elif tree.flags[node] & MOVING_FLAG:
                self.loose = True
                continue
            else:
                node = tree.split(node, end - depth[node])
                tree.hold(node)
            tree.unhold(sequence.node, tree.tick[sequence.node])
            sequence.node = node
        return tree.evictable > before

    def _promise(self, root: int, tokens: bytes, path: list[int], hit: int) -> Sequence | None:
        """A running sequence that is computing at least `PROMISE_LEAST` of the tokens that follow this hit."""
        key = (path[-1] if path else root, hit, tokens[4 * hit : 4 * hit + 4 * self.unit])
        sequence = self.promised.get(key)
        if (
            sequence is None
            or sequence.tokens_from > hit
            or sequence.session.life
            or sequence.session.stalled
        ):
            return None
        at = 4 * (hit - sequence.tokens_from)
        common = common_prefix(tokens, 4 * hit, sequence.tokens[at:], 4 * self.unit) >> 2
        return sequence if common >= PROMISE_LEAST else None

    def _settle(self, sequence: Sequence, published: bool) -> None:
        """The prompt's new part is published, or the sequence ends without: nobody needs to wait for it any longer."""
        promised = sequence.promised
        if promised is not None:
            sequence.promised = None
            if self.promised.get(promised) is sequence:
                del self.promised[promised]
                if self.admission.awaiting:
                    self.admission.settle(sequence, published)

    def _start(
        self,
        session: Session,
        root: int,
        node: int,
        tokens: bytes,
        path: list[int],
        hit: int,
        own: list[int],
        priority: int,
        copied: int = 0,
    ) -> Admitted:
        """Makes the sequence whose `own` slots have been taken; positions [hit - copied, capacity) are theirs."""
        tree = self.tree
        n = len(tokens) >> 2
        extents: list[int] = []
        if path:
            tree.path_extents(path, hit - copied, extents)
            self.loose = True
        self._serial = handle = self._serial + 1
        position = hit - copied
        room = own[1] if len(own) == 2 else sum(own[1::2])
        self.ledger.shift_all(own, room, FREE, PRIVATE)
        ranges = [Range(position, own, room)]
        capacity = position + room
        if extents and extents[-2] + extents[-1] == own[0]:
            _join(extents, own)
        else:
            extents += own
        session.charged += capacity - hit + copied
        sequence = Sequence(handle, session, root, node, hit, n, capacity, tokens, 0, ranges, priority)
        if tree.learns:
            sequence.prompt = n
            sequence.past = self._reuse(root, path, tokens, hit)
        session.sequences[handle] = sequence
        self.sequences[handle] = sequence
        if n - hit >= PROMISE_LEAST:
            key = (node, hit, tokens[4 * hit : 4 * hit + 4 * self.unit])
            if key not in self.promised:
                self.promised[key] = sequence
                sequence.promised = key
        self.unwritten += capacity - n
        self.extents_given += len(extents) >> 1
        self.extent_tokens += capacity
        self.hit_tokens += hit
        self.prompt_tokens += n
        return Admitted(handle, hit, capacity, extents, [])

    def _reuse(self, root: int, path: list[int], tokens: bytes, hit: int) -> int:
        """Tells the evictor of an admission; returns the sequence's past."""
        tree = self.tree
        if not path:
            return tree.evictor.reuse(0, False, tree.place(root, tokens, 0))
        node = path[-1]
        n = len(tokens) >> 2
        end = tree.depth[node] + tree.length[node]
        whole = end <= (n if hit == self._last_left(n) else hit)
        return tree.evictor.reuse(node, whole, tree.place(node, tokens, 4 * end) if whole and end < n else 0)

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
        want = tokens or self.quantum
        limit = min(session.quota, self.usable)
        occupied = sequence.capacity - sequence.dropped
        if occupied + want > limit:
            want = limit - occupied
            if want < (tokens or 1):
                return Never(occupied + (tokens or 1), limit)
        position = sequence.capacity
        peel = self._peel_length(session, sequence)
        runs, cell = self.runs, self.cell
        if peel and (
            want + peel > runs.total + self.tree.evictable or session.charged + want + peel > session.quota
        ):
            peel = 0  # a copy is a convenience; linking new slots costs no memory
        if not tokens and want > runs.total + self.tree.evictable:
            # Less than a run is better than a refusal while there is anything to be had.
            want = max(1, runs.total + self.tree.evictable - peel)
        need = want + peel
        if need > runs.total or self.admission.busy or session.owes or session.charged + need > session.quota:
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
                if session.charged + whole <= session.quota:
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
            _check_priority(priority)
        if length > sequence.length:
            self.unwritten -= length - sequence.length
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

    def _publish(self, sequence: Sequence, length: int, expiry: float) -> Committed:
        tree = self.tree
        keys, lengths, depths = tree.keys, tree.length, tree.depth
        tokens = sequence.tokens
        end = 4 * (length - sequence.tokens_from)
        if end != len(tokens):
            tokens = tokens[:end]
        self.tick = tick = self.tick + 1
        position = sequence.base - sequence.base % self.unit
        node = held = sequence.node
        root = sequence.root
        # Splits since the last look put new nodes above this one: find the one that `position` falls into.
        while node != root and depths[node] >= position:
            node = tree.parent[node]
        inside = position - depths[node]
        at = 4 * (position - sequence.tokens_from)
        duplicates = published = 0
        while True:
            if inside < lengths[node]:
                common = (
                    common_prefix(
                        tokens, at, keys[node][4 * inside :] if inside else keys[node], 4 * self.unit
                    )
                    >> 2
                )
                if common:
                    duplicates += self._mark_duplicates(sequence, position, position + common)
                position += common
                at += 4 * common
                inside += common
                if at == end:
                    break
                if inside < lengths[node]:
                    if tree.flags[node] & MOVING_FLAG:
                        self.moves.abandon_node(node)
                    node = tree.split(node, inside)
            if at == end:
                break
            child = tree.child(node, tokens, at)
            if not child:
                shared: list[Range] = []
                extents, taken = self._gather(sequence, position, length, shared)
                if taken:
                    key = tokens[at : at + 4 * taken]
                    parent = node
                    node = tree.add(node, key, extents, tick)
                    if tree.learns:
                        tree.evictor.created(node, parent, sequence.past, position >= sequence.prompt)
                    if sequence.priority:
                        self._prioritise(node, sequence.priority, expiry)
                    position += taken
                    published = taken
                    # The new node came with a hold of its own, which replaces the sequence's old one.
                    sequence.node = node
                    tree.unhold(held, tick)
                    for piece in shared:
                        self._follow(sequence, piece, node)
                break
            node = child
            inside = 0
        if not published and node != held and position > sequence.base:
            # Only deeper than before: what is already held above the old node needs no second hold.
            tree.hold(node)
            tree.unhold(held, tick)
            sequence.node = node
        if position > sequence.base:  # in whole units it may have fallen back to the broken one
            sequence.base = position
        if sequence.promised is not None:
            self._settle(sequence, published=True)
        if position > sequence.tokens_from:
            sequence.tokens = sequence.tokens[4 * (position - sequence.tokens_from) :]
            sequence.tokens_from = position
        return Committed(sequence.base, published, duplicates)

    def _gather(
        self, sequence: Sequence, start: int, stop: int, shared: list[Range]
    ) -> tuple[list[int], int]:
        """Takes the slots of positions [start, stop) out of the sequence's own ranges for a new node.

        Stops at the first position without a slot (trimmed away).  Returns flat extents and the tokens they hold;
        ranges that forks hold too are added to `shared`.
        """
        if start < sequence.kept_from:
            return [], 0  # what stands there now was never written: a window had dropped it
        own = sequence.own
        extents: list[int] = []
        position = start
        session = sequence.session
        shift_all = self.ledger.shift_all
        index = 0
        while index < len(own) and position < stop:
            piece = own[index]
            if piece.position + piece.length <= position:
                index += 1
                continue
            if piece.position > position:
                break
            if piece.position < position:
                piece = self._split_range(sequence, piece, position - piece.position)
                index += 1
            if piece.position + piece.length > stop:
                self._split_range(sequence, piece, stop - piece.position)
            n = piece.length
            _join(extents, piece.extents)
            position += n
            if piece.kind == PEELED:
                self.peeled -= n
            elif piece.kind == DUPLICATE:
                self.duplicates -= n
            shift_all(piece.extents, n, PRIVATE, CACHED)
            session.charged -= n
            if piece.holders is None:
                del own[index]
            else:
                shared.append(piece)
                own.remove(piece)
        return extents, position - start

    def _mark_duplicates(self, sequence: Sequence, start: int, stop: int) -> int:
        """Own ranges of positions [start, stop) turn out to hold what the tree has."""
        own = sequence.own
        marked = 0
        index = 0
        while index < len(own):
            piece = own[index]
            if piece.position >= stop:
                break
            if piece.position + piece.length > start and piece.kind == OWN:
                if piece.position < start:
                    self._split_range(sequence, piece, start - piece.position)
                    index += 1
                    continue
                if piece.position + piece.length > stop:
                    self._split_range(sequence, piece, stop - piece.position)
                piece.kind = DUPLICATE
                marked += piece.length
            index += 1
        self.duplicates += marked
        return marked

    def _split_range(self, sequence: Sequence, piece: Range, at: int) -> Range:
        """Splits a range after `at` slots in every table that has it; returns the rear part."""
        front, back = split_extents(piece.extents, at)
        rear = Range(piece.position + at, back, piece.length - at, piece.kind, piece.refs, piece.fence)
        piece.extents = front
        piece.length = at
        if piece.holders is None:
            own = sequence.own
            own.insert(own.index(piece) + 1, rear)
        else:
            rear.holders = list(piece.holders)
            for holder in piece.holders:
                table = _table_of(holder, piece)
                table.insert(table.index(piece) + 1, rear)
        return rear

    def _follow(self, sequence: Sequence, piece: Range, node: int) -> None:
        """Forks that shared `piece`, now published under `node`, read it from the tree from here on."""
        session = sequence.session
        if piece.fence > session.passed():
            # A fork that let go may still read these slots until its step has completed.
            self.tree.hold(node)
            session.fence(piece.fence, Fenced([], node))
        for holder in piece.holders or ():
            if holder is sequence:
                continue
            table = _table_of(holder, piece)
            table.remove(piece)
            self.tree.hold(node)
            if table is not holder.own:
                # It had peeled these away and may have gone another way since: the source is kept beside its path.
                holder.kept = [*(holder.kept or ()), node]
                continue
            self.tree.unhold(holder.node, self.tick)
            holder.node = node
            self.loose = True
            holder.base = max(holder.base, piece.position + piece.length)

    # -- fork, trim, free --------------------------------------------------------------------------------------

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
            later = self.admission.admit_fork(session, now, ticket)
            if later is not None:
                return later
        self._serial = child_handle = self._serial + 1
        own: list[Range] = []
        child = Sequence(
            child_handle, session, sequence.root, sequence.node, min(sequence.base, length), length, length,
            sequence.tokens, sequence.tokens_from, own, sequence.priority, length,
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

    def _end(self, sequence: Sequence, fence: int) -> None:
        session = sequence.session
        handle = sequence.handle
        del session.sequences[handle]
        del self.sequences[handle]
        if self.admission.pressed >= 0 or self.admission.growth:
            session.owes.pop(handle, None)
            self.admission.forget_sequence(handle)
        if sequence.promised is not None:
            self._settle(sequence, published=False)
        self.unwritten -= sequence.capacity - sequence.length
        pieces = sequence.own
        if sequence.sources:
            pieces = pieces + sequence.sources
        self.tick += 1
        if self.tree.learns:
            self.tree.evictor.ended(sequence.node)
        self._let_go(sequence, pieces, sequence.node, fence)
        if sequence.kept:
            for node in sequence.kept:
                self._let_go(sequence, [], node, fence)
        sequence.own = []
        sequence.sources = sequence.kept = None

    def _let_go(self, sequence: Sequence, pieces: list[Range], node: int, fence: int) -> None:
        """Gives up ranges (out of the table already) and, when not 0, a hold on `node`, both behind `fence`."""
        session = sequence.session
        passed = session.passed()
        if fence <= passed and not (
            pieces and (len(pieces) > 1 or pieces[0].holders or pieces[0].fence or pieces[0].kind)
        ):
            # What is nearly always so: one range at most, nobody else's, and no step to wait for.
            if pieces:
                piece = pieces[0]
                session.charged -= piece.length
                self._release(piece.extents, piece.length, PRIVATE)
            if node:
                self.tree.unhold(node, self.tick)
            return
        waiting: list[Range] = []
        for piece in pieces:
            if piece.holders is not None:
                if piece.fence < fence:
                    piece.fence = fence
                piece.holders.remove(sequence)
                piece.refs -= 1
                if piece.refs:
                    if piece.refs == 1:
                        # The last holder of an unpublished range writes it in place; late readers still count.
                        piece.holders = None if piece.fence <= passed else piece.holders
                    continue
                last = piece.fence
            else:
                last = piece.fence if piece.fence > fence else fence
            if piece.kind == DUPLICATE:
                self.duplicates -= piece.length
            elif piece.kind == PEELED:
                self.peeled -= piece.length
            if last <= passed:
                session.charged -= piece.length
                self._release(piece.extents, piece.length, PRIVATE)
            elif last == fence:
                self.ledger.shift_all(piece.extents, piece.length, PRIVATE, FENCED)
                session.fenced += piece.length
                waiting.append(piece)
            else:
                self.ledger.shift_all(piece.extents, piece.length, PRIVATE, FENCED)
                session.fenced += piece.length
                session.fence(last, Fenced([piece], 0))
        if fence <= passed:
            if node:
                self.tree.unhold(node, self.tick)
        elif waiting or node:
            session.fence(fence, Fenced(waiting, node))

    def _unfence(self, session: Session, fenced: Fenced) -> None:
        for piece in fenced.ranges:
            session.charged -= piece.length
            session.fenced -= piece.length
            self._release(piece.extents, piece.length, FENCED)
        if fenced.node:
            self.tree.unhold(fenced.node, self.tree.tick[fenced.node])

    def _release(self, extents: list[int], length: int, state: int) -> None:
        """`length` slots come back to the free runs, or to the ticket in whose window they lie."""
        give = self.runs.give
        window = self.admission.window
        if window is None:
            if state != FREE:
                self.ledger.shift_all(extents, length, state, FREE)
            if len(extents) == 2:
                give(extents[0], length)
                return
            for i in range(0, len(extents), 2):
                give(extents[i], extents[i + 1])
            return
        for i in range(0, len(extents), 2):
            slot, stop = extents[i], extents[i] + extents[i + 1]
            low, high = max(slot, window.start), min(stop, window.stop)
            if low >= high:
                low = high = stop
            else:
                self.ledger.shift(low, high - low, state, RESERVED)
                window.hold(low, high - low)
            for start, end in ((slot, low), (high, stop)):
                if end > start:
                    if state != FREE:
                        self.ledger.shift(start, end - start, state, FREE)
                    give(start, end - start)

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

    def _drop_front(self, sequence: Sequence, keep_from: int, fence: int) -> None:
        dropped: list[Range] = []
        for piece in list(sequence.own):
            if piece.position >= keep_from:
                break
            if piece.position + piece.length > keep_from:
                self._split_range(sequence, piece, keep_from - piece.position)
            sequence.own.remove(piece)
            dropped.append(piece)
        sequence.kept_from = keep_from
        sequence.dropped += sum(piece.length for piece in dropped)
        self._let_go(sequence, dropped, 0, fence)

    def _roll_back(self, sequence: Sequence, keep_to: int, fence: int) -> None:
        session = sequence.session
        before = sequence.capacity - sequence.length
        spare: list[Range] = []  # private room behind `keep_to`, to be written again
        dropped: list[Range] = []
        for piece in list(sequence.own):
            if piece.position + piece.length <= keep_to:
                continue
            if piece.position < keep_to:
                piece = self._split_range(sequence, piece, keep_to - piece.position)
            sequence.own.remove(piece)
            (spare if piece.holders is None and not piece.fence else dropped).append(piece)
        known = sequence.tokens_from + (len(sequence.tokens) >> 2)
        if known > keep_to:
            sequence.tokens = sequence.tokens[: 4 * max(keep_to - sequence.tokens_from, 0)]
            known = keep_to
        if keep_to < sequence.length:
            sequence.length = keep_to
            sequence.written = min(sequence.written, keep_to)
            sequence.tokens_from = min(sequence.tokens_from, keep_to)
        node = 0
        if keep_to < sequence.base:
            tree = self.tree
            node = sequence.node
            above = node
            while tree.depth[above] >= keep_to:
                above = tree.parent[above]
            tree.hold(above)
            sequence.node = above
            self.loose = True
            sequence.base = keep_to
            self._tokens_from_tree(sequence, known)
        # Room that stands ready behind the new end, in order; pages must keep their place modulo the page.
        room = 2 * max(self.quantum, session.page)
        position = keep_to
        for index, piece in enumerate(spare):
            if piece.kind == DUPLICATE:
                self.duplicates -= piece.length
            elif piece.kind == PEELED:
                self.peeled -= piece.length
            piece.kind = OWN
            left = room - (position - keep_to)
            if left <= 0 or (session.page > 1 and piece.position != position):
                dropped += spare[index:]
                break
            sequence.own.append(piece)
            if piece.length > left:
                dropped.append(self._split_range(sequence, piece, left))
                sequence.own.pop()
            piece.position = position
            position += piece.length
        sequence.capacity = position
        self.unwritten += (sequence.capacity - sequence.length) - before
        self._let_go(sequence, dropped, node, fence)

    def _tokens_from_tree(self, sequence: Sequence, known: int) -> None:
        """A sequence cut within what is published: in whole units its next commit compares the broken one again.

        `known` is how many of its tokens it has told, fewer than are published where a fork published for it: the next
        it tells is still the one after those.
        """
        tree, base, node = self.tree, sequence.base, sequence.node
        while tree.depth[node] >= base:
            node = tree.parent[node]
        start = base - base % self.unit
        inside = 4 * (start - tree.depth[node])
        sequence.tokens = tree.keys[node][inside : inside + 4 * (known - start)] if known > start else b""
        sequence.tokens_from = start if known > start else known

    # -- room --------------------------------------------------------------------------------------------------

    def _own(self, sequence: Sequence, position: int, extents: list[int], kind: int = OWN) -> None:
        """Free slots just taken become the sequence's, for positions from `position` on."""
        length = sum(extents[1::2])
        if not length:
            return
        self.ledger.shift_all(extents, length, FREE, PRIVATE)
        own = sequence.own
        last = own[-1] if own else None
        if (
            last is not None
            and last.position + last.length == position
            and last.holders is None
            and last.kind == kind
            and not last.fence
        ):
            last.length += length
            _join(last.extents, extents)
        else:
            own.append(Range(position, list(extents), length, kind))

    def _end_slot(self, sequence: Sequence) -> int:
        """The slot behind the sequence's last one, or -1 when it cannot be grown into."""
        own = sequence.own
        if own and own[-1].position + own[-1].length == sequence.capacity:
            extents = own[-1].extents
            return extents[-2] + extents[-1]
        tree, node, base = self.tree, sequence.node, sequence.base
        if base != sequence.capacity or not base or tree.depth[node] + tree.length[node] != base:
            return -1
        extents = tree.extents(node)
        return extents[-2] + extents[-1]

    def _tail(self, sequence: Sequence) -> tuple[int, int, Range | None]:
        """The last slot's end, how many of the last positions lie in one stretch up to it, and their private range."""
        own = sequence.own
        if own and own[-1].position + own[-1].length == sequence.capacity:
            piece = own[-1]
            return piece.extents[-2] + piece.extents[-1], piece.extents[-1], piece
        tree, base = self.tree, sequence.base
        node = sequence.node
        while tree.parent[node] and tree.depth[node] >= base:
            node = tree.parent[node]
        inside = base - tree.depth[node]
        extents = tree.extents(node)
        for i in range(0, len(extents), 2):
            if inside <= extents[i + 1]:
                return extents[i] + inside, inside, None
            inside -= extents[i + 1]
        return -1, 0, None

    def _peel_length(self, session: Session, sequence: Sequence) -> int:
        """How many tokens of a shared or published partial slot are copied before the sequence appends to it."""
        if session.append != "peel" or sequence.capacity != sequence.length or not sequence.capacity:
            return 0
        end, stretch, piece = self._tail(sequence)
        if piece is not None and piece.holders is None:
            return 0
        partial = min(end % self.block_size, stretch)
        if not partial or partial > session.peel_max or end in self.runs.length_at:
            return 0
        return partial

    def _peel(self, sequence: Sequence, count: int, taken: list[int], copies: list[Copy]) -> None:
        """The first `count` of the slots `taken` become copies of the sequence's last `count` tokens."""
        end, _, _ = self._tail(sequence)
        position = sequence.capacity - count
        own = sequence.own
        while own and own[-1].position + own[-1].length > position:
            piece = own[-1]
            if piece.position < position:
                piece = self._split_range(sequence, piece, position - piece.position)
            # Leaves the table, but is kept until the sequence ends: the client's copy may still be reading it.
            own.remove(piece)
            sequence.sources = [*(sequence.sources or ()), piece]
        front, back = split_extents(taken, count)
        source = end - count
        dropped = max(0, sequence.kept_from - position)  # by a window: their slots are another's by now
        self.copied_tokens += count - dropped
        for i in range(0, len(front), 2):
            slot, n = front[i], front[i + 1]
            skip = min(n, dropped)
            dropped -= skip
            if skip < n:
                copies.append(Copy(source + skip, slot + skip, n - skip))
            source += n
        self._own(sequence, position, front, PEELED)
        self._own(sequence, position + count, back)
        self.peeled += count

    def _allocate_pages(
        self,
        session: Session,
        root: int,
        tokens: bytes,
        path: list[int],
        hit: int,
        now: float,
        ticket: int,
        priority: int,
    ) -> Admitted | Later | Never:
        """`allocate` for kernels of whole pages: own pages are exclusive, hits keep their place modulo the page."""
        tree, page = self.tree, session.page
        n = len(tokens) >> 2
        pages = -(-n // page) * page
        limit = min(session.quota, self.usable) // page * page
        if pages > limit:
            return Never(pages, limit)
        extents: list[int] = []
        tree.path_extents(path, hit, extents)
        # Where two nodes meet inside a page and stand in different ones, the page is put together in one of ours.
        joints: list[int] = []
        position = 0
        for i in range(0, len(extents), 2):
            if (extents[i] - position) % page:
                hit = position
                break
            first = position - position % page
            if first != position and joints[-1:] != [first]:
                joints.append(first)
            position += extents[i + 1]
        hit -= hit % self.unit
        part = hit % page
        jointed = bool(joints) and joints[-1] + page > hit
        if jointed:
            joints.pop()
        depth = tree.depth
        while path and depth[path[-1]] >= hit:
            path.pop()
        extents = []
        tree.path_extents(path, hit, extents)
        end = extents[-2] + extents[-1] if part else -1
        node = path[-1] if path else root
        # Where the rest of the last page is free, as it is when a chat goes on, the page is filled up in place.
        rest = page - part if part and not jointed and self.runs.length_at.get(end, 0) >= page - part else 0
        copied = 0 if rest else part
        evictable = tree.evictable
        tree.hold(node)
        need = pages - hit + copied + page * len(joints)
        if path and hit < tree.depth[node] + tree.length[node]:
            node = path[-1] = self._hold_less(node, hit)
        mine = self.admission.waiting.get(ticket)
        own: list[int] = []
        try:
            later = self.admission.admit(session, need, evictable - tree.evictable, now, ticket, False)
        except Refusal:
            tree.unhold(node, tree.tick[node])
            raise
        if later is None:
            if rest:
                self.runs.take_within(end, end, rest)
            own = self._take_pages(need - rest, page, now) if need > rest else []
            if not own and need != rest:
                if rest:
                    self.runs.give(end, rest)
                if mine is not None:
                    self.admission.requeue(mine)
                try:
                    later = self.admission.refuse(session, need, now, ticket, Reason.RUN)
                except Refusal:
                    tree.unhold(node, tree.tick[node])
                    raise
        if later is not None:
            tree.unhold(node, tree.tick[node])
            if (copied or joints) and later.reason in (Reason.MEMORY, Reason.RUN, Reason.QUOTA):
                # Computing from the broken page on needs less room than keeping it and a copy of it.
                path = tree.path_to(node)  # which may have been split on the way
                less = joints[0] if joints else hit - part
                return self._allocate_pages(session, root, tokens, path, less, now, later.ticket, priority)
            return later
        path = tree.path_to(node)  # to make room, nodes on it may have been split
        places, own = split_extents(own, page * len(joints)) if joints else ([], own)
        if rest:
            own = _joined([end, rest, *own])
        answer = self._start(session, root, node, tokens, path, hit, own, priority, copied)
        if copied or joints:
            self._list_copies(session, answer, extents, joints, places, part if copied else 0)
        return answer

    def _list_copies(
        self,
        session: Session,
        answer: Admitted,
        extents: list[int],
        joints: list[int],
        places: list[int],
        part: int,
    ) -> None:
        """Lists the copies a new sequence begins with: of whole pages at `joints` into `places`, and of its last `part`
        cached tokens into the slots it goes on in.  `extents` are the slots of its hit.
        """
        sequence = self.sequences[answer.sequence]
        page = session.page
        ranges: list[Range] = []
        for index, first in enumerate(joints):
            _, behind = split_extents(places, page * index) if index else ([], places)
            slot = behind[0]
            ranges.append(Range(first, [slot, page], page, PEELED))
            self.ledger.shift(slot, page, FREE, PRIVATE)
            answer.copies += _copies(extents, first, page, slot)
        if part:
            last = sequence.own[0]
            front, _ = split_extents(last.extents, part)
            position = answer.hit - part
            for i in range(0, len(front), 2):
                answer.copies += _copies(extents, position, front[i + 1], front[i])
                position += front[i + 1]
            if last.length > part:
                self._split_range(sequence, last, part)
            last.kind = PEELED
        sequence.own[:0] = ranges
        session.charged += page * len(joints)
        copied = page * len(joints) + part
        self.peeled += copied
        self.copied_tokens += copied
        if joints:
            answer.extents = self.table_of(sequence)

    def _extend_pages(
        self, session: Session, sequence: Sequence, tokens: int, now: float, ticket: int
    ) -> Grown | Later | Never:
        page, runs = session.page, self.runs
        capacity = sequence.capacity
        part = capacity % page
        asked = tokens or self.quantum
        # Room in whole pages; a page shared or published in part is copied, our own with free slots behind is not.
        need = -(-(part + asked) // page) * page
        limit = min(session.quota, self.usable) // page * page
        occupied = capacity - part - sequence.dropped
        if occupied + need > limit:
            # A growth run may be shorter, as long as it is a page; what was asked for by number may not.
            need = (limit - occupied) // page * page
            if tokens or need <= 0:
                return Never(occupied + -(-(part + (tokens or 1)) // page) * page, limit)
        end, _, piece = self._tail(sequence) if capacity else (-1, 0, None)
        copies: list[Copy] = []
        beside = False
        left = runs.length_at.get(end, 0) if end >= 0 else 0
        if not part:
            beside = end % page == 0 and left >= need
        elif piece is not None and piece.holders is None and left >= page - part:
            asked = tokens or page - part
            beside = page - part >= asked
            if beside:
                need = page - part
        want = need if beside else need - part
        if need > runs.total or self.admission.busy or session.owes or session.charged + need > session.quota:
            later = self.admission.grow(sequence, need, now, ticket)
            if later is not None:
                return later
        if beside:
            runs.take_at(end, want)
            out = [end, want]
            self.admission.grown(sequence)
            self._own(sequence, capacity, out)
            start = capacity
        else:
            out = self._take_pages(need, page, now)
            if not out and not tokens:
                # As many pages as there are make a shorter run.
                fewer = whole_pages(self, page) * page
                if page <= fewer < need:
                    need, want = fewer, fewer - part
                    out = self._take_pages(need, page, now)
            if not out:
                return self.admission.starve(sequence, need, now, ticket, Reason.RUN)
            self.admission.grown(sequence)
            start = capacity - part
            if part:
                self._peel(sequence, part, out, copies)
            else:
                self._own(sequence, capacity, out)
        sequence.capacity = capacity + want
        session.charged += need
        self.unwritten += want
        self.extents_given += len(out) >> 1
        self.extent_tokens += need
        return Grown(start, sequence.capacity, out, copies)

    def _take_pages(self, need: int, page: int, now: float) -> list[int]:
        """Takes `need` slots in whole pages, evicting what that takes; [] and nothing evicted where that cannot do."""
        tree, runs = self.tree, self.runs
        own = runs.take_pages(need, page) if need <= runs.total else []
        if own:
            return own
        if not self._pages_in_sight(need, page):
            # The next victims make too few whole pages.  Only now is it worth counting how many there can be at all.
            self.tighten()
            if whole_pages(self, page) * page < need:
                return []
        elif page == self.cell:
            own = self._cells(need // page, FRESH, 0, now)
        while not own and tree.evictable:
            self._evict(min(tree.evictable, max(need - runs.total, page)), now)
            own = runs.take_pages(need, page)
        return own

    def _pages_in_sight(self, need: int, page: int) -> bool:
        """Whether the next few victims and the free slots beside them have `need` slots in whole pages."""
        tree, runs = self.tree, self.runs
        if self.unit == page:
            return need <= runs.total + tree.evictable  # only whole blocks are ever held
        missing = need - (runs.cells_free * page if page == self.cell else 0)
        stretches: list[tuple[int, int]] = []
        tokens = 0
        for node in tree.evictor.victims(PAGE_VICTIMS):
            extents = tree.extents(node)
            for i in range(0, len(extents), 2):
                slot, end = extents[i], extents[i] + extents[i + 1]
                stretches.append((runs.start_at.get(slot, slot), end + runs.length_at.get(end, 0)))
            tokens += tree.length[node]
            if tokens > 4 * missing:
                break
        found = low = high = 0
        for start, end in (*sorted(stretches), (self.slots, self.slots)):
            if start > high:
                found += max(0, high // page + -low // page)
                low = start
            high = max(high, end)
        return found * page >= missing

    # -- pins --------------------------------------------------------------------------------------------------

    def pin(self, session: Session, root: int, tokens: bytes) -> tuple[int, int]:
        """Keeps what is cached of this prefix; returns the pin's handle and the tokens it keeps (0: nothing cached)."""
        self._count(root, tokens)
        if session.life:
            raise OutOfTurn("the session is not live")
        path: list[int] = []
        tree = self.tree
        kept = tree.match(root, tokens, path)
        if not kept:
            return 0, 0
        limit = int(self.usable * self.config.pin_share)
        if self.pinned + kept > limit:
            raise BadRequest(
                f"pins keep {self.pinned} tokens and {kept} more would pass their limit of {limit}"
            )
        node = path[-1]
        if kept < tree.depth[node] + tree.length[node]:
            if tree.flags[node] & MOVING_FLAG:
                self.moves.abandon_node(node)
            node = tree.split(node, kept - tree.depth[node])
        tree.hold(node)
        handle = self._handle()
        session.pins[handle] = node
        self.pinned += kept
        return handle, kept

    def unpin(self, session: Session, handle: int) -> None:
        """Ends a pin."""
        if session.life == Life.LOST:
            raise OutOfTurn("the session is not live")
        node = session.pins.pop(handle, 0)
        if not node:
            raise self.bad_handle(handle, "pin")
        tree = self.tree
        self.pinned -= tree.depth[node] + tree.length[node]
        self.tick += 1
        tree.unhold(node, self.tick)

    # -- waiting and moving, as the daemon sees them --------------------------------------------------------------

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

    def begin_move(self, node: int) -> Move:
        """Starts to move an unheld node; see moves.py."""
        return self.moves.begin(node)

    def finish_move(self, handle: int, copied: bool = True) -> bool:
        """A move's copy has ended; true when it was published."""
        return self.moves.finish(handle, copied)

    def abandon_move(self, handle: int) -> None:
        """Gives a move up before its copy has ended."""
        self.moves.abandon(handle)

    # -- eviction ----------------------------------------------------------------------------------------------

    def evict(self, tokens: int, *, now: float = 0.0) -> int:
        """Evicts at most `tokens` cached tokens that nobody holds, in the policy's order; returns how many went."""
        before = self.evicted_tokens
        if tokens > 0:
            self.admission.drop_window()
            self._evict(min(tokens, self.tree.evictable), now)
        return self.evicted_tokens - before

    def _evict(self, tokens: int, now: float) -> None:
        """Frees `tokens` slots of evictable nodes: leaf first, and of a large leaf only its tail."""
        tree, evictor, unit = self.tree, self.tree.evictor, self.unit
        evictor.clock(now)
        lengths = tree.length
        short = 2 * self.block_size
        goal = self.runs.total + tokens
        while tokens > 0:
            node = evictor.oldest()
            if not node:
                # What lay in a window was set aside for its ticket; that goes before anybody else is let down.
                self.admission.drop_window()
                break
            length = lengths[node]
            if length < short:
                node = self._emptying(node)
                length = lengths[node]
            cut = tokens if unit == 1 else -(-tokens // unit) * unit
            if cut < length:
                extents = tree.trim_tail(node, cut)
                length = cut
            else:
                extents = tree.remove(node)
            self._release(extents, length, CACHED)
            self.evicted_tokens += length
            tokens = goal - self.runs.total

    def _fill_holes(self, most: int, holes: int, root: int, own: list[int]) -> int:
        """Where holes have become many, takes up to `holes` of them, the longest that `most` slots fill, onto `own`.

        Returns how many slots they have.
        """
        runs = self.runs
        filled = 0
        while (
            holes and (runs.total - runs.cells_free * self.cell) * self.holes_from > self.usable - runs.total
        ):
            size = runs.take_hole(most - filled, HOLE_LEAST, FRESH, root, own)
            if not size:
                break
            filled += size
            holes -= 1
        return filled

    def _cells(self, cells: int, kind: int, group: int, now: float) -> list[int]:
        """Takes `cells` whole cells as flat extents; [] and nothing taken when they are not to be had.

        Evicts where that would leave fewer cells free than the headroom, but at most twice what is taken, so that no
        single request pays for a headroom that was used up.
        """
        runs = self.runs
        goal = cells + self.headroom
        own: list[int] = []
        if goal > runs.cells_free and self.tree.evictable:
            left = cells
            if cells >= HAND_ON:
                left -= self._hand_on(min(cells, goal - runs.cells_free), kind, group, now, own)
                goal = left + self.headroom
            if left and goal > runs.cells_free:
                self._evict_cells(min(goal, max(left, runs.cells_free + 2 * cells)), now)
            cells = left
        if cells > runs.cells_free:
            if own:
                self._release(own, sum(own[1::2]), FREE)
            return []
        if not own:
            return runs.take_cells(cells, kind, group)
        return own + runs.take_cells(cells, kind, group) if cells else own

    def _hand_on(self, cells: int, kind: int, group: int, now: float, own: list[int]) -> int:
        """Evicts for up to `cells` cells; what victims leave in whole cells goes straight onto `own`; returns how many.

        For long requests: of hundreds of freed stretches each would be filed among the free runs and found there again.
        """
        tree, runs, cell = self.tree, self.runs, self.cell
        if type(tree.evictor) is not Lru or tree.expiry or self.admission.window is not None:
            return 0
        tree.evictor.clock(now)
        extents: list[int] = []
        gone = tree.shed(cells * cell, 2 * self.block_size, self.headroom * cell, extents)
        self.evicted_tokens += gone
        self.ledger.shift_all(extents, gone, CACHED, FREE)
        give = runs.give
        most = cells * cell
        for i in range(0, len(extents), 2):
            slot, length = extents[i], extents[i + 1]
            if most and not (slot % cell or length % cell):
                if length > most:
                    give(slot + most, length - most)
                    length = most
                most -= length
                own.append(slot)
                own.append(length)
            else:
                give(slot, length)
        if own:
            runs.handed_on(own, kind, group)
        return cells - most // cell

    def _evict_cells(self, goal: int, now: float) -> None:
        """Evicts until `goal` whole cells are free, or so many slots are that their being scattered is to blame.

        Leaves go whole, since a cut leaves two pieces where one was; only one that is larger than what is missing and
        the headroom together loses but its tail, at the start of a cell.
        """
        tree, runs, cell = self.tree, self.runs, self.cell
        evictor, lengths = tree.evictor, tree.length
        evictor.clock(now)
        short = 2 * self.block_size
        most = goal * cell + (self.usable >> SCATTER_SHIFT)
        slack = self.headroom * cell
        plain = type(evictor) is Lru and not tree.expiry
        while runs.cells_free < goal and runs.total < most:
            if plain:
                extents: list[int] = []
                gone = tree.shed((goal - runs.cells_free) * cell, short, slack, extents)
                if gone:
                    self._release(extents, gone, CACHED)
                    self.evicted_tokens += gone
                    continue
            node = evictor.oldest()
            if not node:
                return
            length = lengths[node]
            if length < short:
                node = self._emptying(node)
                length = lengths[node]
            missing = goal - runs.cells_free
            if length > missing * cell + slack:
                cut = self._tail_of_cells(node, missing)
            else:
                cut = length
            if cut < length:
                extents = tree.trim_tail(node, cut)
                length = cut
            else:
                extents = tree.remove(node)
            self._release(extents, length, CACHED)
            self.evicted_tokens += length

    def _tail_of_cells(self, node: int, cells: int) -> int:
        """How many tokens the shortest tail of a leaf has that contains `cells` whole cells; at most all."""
        tree, cell = self.tree, self.cell
        extents = tree.extents(node)
        tail = found = 0
        for i in range(len(extents) - 2, -1, -2):
            slot, n = extents[i], extents[i + 1]
            end = (slot + n) // cell
            whole = end + -slot // cell
            if whole >= cells - found:
                tail += slot + n - (end - cells + found) * cell
                break
            if whole > 0:
                found += whole
            tail += n
        return tail + -tail % self.unit

    def _emptying(self, oldest: int) -> int:
        """Of the oldest few leaves the first whose death empties a block, else the oldest."""
        tree, runs = self.tree, self.runs
        for node in tree.evictor.candidates(EMPTYING):
            extents = tree.extents(node)
            for i in range(0, len(extents), 2):
                if runs.would_free_blocks(extents[i], extents[i + 1]):
                    return node
        return oldest

    def _prioritise(self, node: int, priority: int, expiry: float) -> None:
        """Gives a node a priority, from `expiry` (0: never) on counted as none."""
        tree = self.tree
        tree.priority[node] = priority
        if expiry:
            tree.expiry[node] = expiry
        if priority and not isinstance(tree.evictor, eviction.Tiers):
            tree.evictor = self.evictor = eviction.Tiers(
                tree.evictor, tree.priority, tree.expiry, tree.length
            )

    # -- small things ------------------------------------------------------------------------------------------

    def _handle(self) -> int:
        self._serial += 1
        return self._serial

    def _sequence(self, session: Session, handle: int) -> Sequence:
        sequence = session.sequences.get(handle)
        if sequence is None or session.life:
            if sequence is not None:
                raise OutOfTurn("the session is not live")
            raise self.bad_handle(handle, "sequence")
        return sequence

    def bad_handle(self, handle: int, what: str) -> Exception:
        self.bad_handles += 1
        if handle in self.sequences or any(handle in s.pins for s in self.sessions.values()):
            return ForeignHandle(f"{what} {handle} belongs to another session, or is not a {what}")
        if 0 < handle <= self._serial:
            return EndedHandle(f"{what} {handle} has ended")
        return UnknownHandle(f"no {what} {handle} was ever given out")

    def _count(self, root: int, tokens: bytes) -> int:
        if type(tokens) is not bytes:
            raise BadRequest(f"tokens are {type(tokens).__name__}, not bytes of int32")
        n = len(tokens) >> 2
        if not n or len(tokens) & 3:
            if not tokens:
                raise BadRequest("no tokens: at least one is needed")
            raise BadRequest(f"{len(tokens)} bytes of tokens: they are int32, 4 bytes each")
        if root not in self.roots:
            raise UnknownHandle(f"no namespace {root} is open")
        return n

    def _last_left(self, n: int) -> int:
        """The most of an n-token prompt that may be a hit: all but the last token, in whole units."""
        n -= 1
        return n - n % self.unit

    def table(self, session: Session, handle: int) -> list[int]:
        """The sequence's slots in order of position, from its first kept one on, as flat extents."""
        sequence = self._sequence(session, handle)
        return self.table_of(sequence)

    def table_of(self, sequence: Sequence) -> list[int]:
        """`table` of any live sequence; for tools and the audit."""
        tree = self.tree
        node, base = sequence.node, sequence.base
        while tree.parent[node] and tree.depth[node] >= base:
            node = tree.parent[node]
        shared: list[int] = []
        tree.path_extents(tree.path_to(node), base, shared)
        out: list[int] = []
        position = 0  # of `shared`, consumed from its front
        index = 0
        for piece in sequence.own:
            while position < piece.position and index < len(shared):
                n = min(shared[index + 1], piece.position - position)
                _append(out, shared[index], n)
                shared[index] += n
                shared[index + 1] -= n
                position += n
                index += 0 if shared[index + 1] else 2
            skip = piece.length  # what the tree has for these positions is not this sequence's
            while skip and index < len(shared):
                n = min(shared[index + 1], skip)
                shared[index] += n
                shared[index + 1] -= n
                skip -= n
                index += 0 if shared[index + 1] else 2
            _join(out, piece.extents)
            position = piece.position + piece.length
        for i in range(index, len(shared), 2):
            _append(out, shared[i], shared[i + 1])
        return out

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
            bad_handles=self.bad_handles,
            late_completions=self.moves.late_completions,
            pinned_waste_tokens=counts[FREE] - runs.blocks_free * self.block_size,
            internal_fragmentation=max(0.0, 1 - held / room) if room > 0 else 0.0,
        )


def _append(extents: list[int], slot: int, length: int) -> None:
    if extents and extents[-2] + extents[-1] == slot:
        extents[-1] += length
    else:
        extents += (slot, length)


def _join(extents: list[int], more: list[int]) -> None:
    """Appends `more` to `extents`; the two become one extent where they touch."""
    if extents and more and extents[-2] + extents[-1] == more[0]:
        extents[-1] += more[1]
        extents += more[2:]
    else:
        extents += more


def _joined(extents: list[int]) -> list[int]:
    """The same slots, neighbours that touch made one: pages are found by where an extent begins."""
    out = extents[:2]
    for i in range(2, len(extents), 2):
        if out[-2] + out[-1] == extents[i]:
            out[-1] += extents[i + 1]
        else:
            out += extents[i : i + 2]
    return out


def _copies(extents: list[int], start: int, length: int, target: int) -> list[Copy]:
    """Copies of positions [start, start + length) of a table to the slots from `target` on."""
    copies = []
    position = 0
    for i in range(0, len(extents), 2):
        low, high = max(position, start), min(position + extents[i + 1], start + length)
        if low < high:
            copies.append(Copy(extents[i] + low - position, target + low - start, high - low))
        position += extents[i + 1]
    return copies


def _table_of(sequence: Sequence, piece: Range) -> list[Range]:
    """The list that holds `piece`: the sequence's own ranges, or the copy sources it keeps."""
    for own in sequence.own:
        if own is piece:
            return sequence.own
    assert sequence.sources is not None
    return sequence.sources


def _check_priority(priority: int) -> None:
    if type(priority) is not int or not 0 <= priority <= MAX_PRIORITY:
        raise BadRequest(f"priority {priority!r} is not in 0..{MAX_PRIORITY}")


def _check_config(config: PoolConfig) -> None:
    if not 1 <= config.block_size <= MAX_BLOCK_SIZE:
        raise BadRequest(f"block_size {config.block_size} is not in 1..{MAX_BLOCK_SIZE}")
    least = 2 if config.block_size > 1 else 3
    if config.blocks < least:
        raise BadRequest(
            f"{config.blocks} blocks: padding takes {least - 1}, so a pool needs at least {least}"
        )
    if config.blocks * config.block_size > MAX_SLOTS:
        raise BadRequest(
            f"{config.blocks} blocks of {config.block_size} are {config.blocks * config.block_size} slots; "
            f"kernels address fewer than 2^31: use at most {MAX_SLOTS // config.block_size} blocks"
        )
    if not 0 <= config.headroom < 1:
        raise BadRequest(f"headroom {config.headroom} is not in 0..1")
    if not 0 <= config.watermark < 1:
        raise BadRequest(f"watermark {config.watermark} is not in 0..1")
    if config.quantum < 0 or config.quantum > MAX_BLOCK_SIZE:
        raise BadRequest(f"quantum {config.quantum} is not in 0..{MAX_BLOCK_SIZE}")
    if config.append not in ("chain", "peel"):
        raise BadRequest(f"append mode {config.append!r} is neither 'chain' nor 'peel'")
    for name in ("fence_patience", "ticket_grace", "preempt_deadline", "reclaim_patience"):
        seconds = getattr(config, name)
        if not 0 <= seconds < math.inf:
            raise BadRequest(f"{name} {seconds} is no number of seconds")
    if config.peel_max < 0:
        raise BadRequest(f"peel_max {config.peel_max}: a count is not negative")
    if not 0 <= config.pin_share <= 1:
        raise BadRequest(f"pin_share {config.pin_share} is not in 0..1")
