"""Sessions, namespaces and pins: who may hold anything, and what becomes of it when they end or are lost."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from kvslot.allocator.accounts import Account
from kvslot.allocator.config import MAX_SPACES
from kvslot.allocator.errors import BadRequest, EndedHandle, OutOfTurn, UnknownHandle
from kvslot.allocator.results import UNLIMITED, Space
from kvslot.allocator.sessions import Group, Life, Range, Session
from kvslot.allocator.slots import FENCED, PRIVATE, QUARANTINED
from kvslot.allocator.tables import Tables


class Lifecycle(Tables):
    """Sessions from Hello to the last slot given back; namespaces; pins."""

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
        """A new session whose kernels read pages of `page` slots; `group` joins it to another of the same engine.

        `quota` bounds the slots that are its own: private and fenced ones.  What it has published is everybody's and
        not charged, even while it alone reads it; `pin_share` bounds what may be kept there for good.
        """
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

    def progress(
        self, session: Session, submitted: int, completed: int, *, epoch: int = 0, now: float = 0.0
    ) -> None:
        """Takes over what the session's page says and releases the fences that passed; the values only ever rise.

        `epoch`: the last Moved it has applied, read from the page before the steps were.
        """
        if session.life == Life.ENDED:
            raise EndedHandle("the session has ended")
        if epoch > session.epoch:
            raise BadRequest(f"epoch {epoch} of the session: it was told of {session.epoch}")
        if completed > submitted or submitted < session.submitted or completed < session.completed:
            raise BadRequest(
                f"steps went from {session.submitted}/{session.completed} to {submitted}/{completed} "
                "(submitted/completed); they only rise, and completed never passes submitted"
            )
        if submitted != session.submitted:
            session.submitted = submitted
            session.stepped = max(now, self.now)
        if session.moved:
            self.moves.applied(session, epoch)
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

    def bye(self, session: Session, *, sliced: bool = False) -> None:
        """Ends a session in good order (all steps completed, nothing mapped): everything goes back.

        At once, or `sliced` with the next calls of `sweep`.
        """
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
        while not sliced and session in self._sweeping:
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
        session.marking = None
        self.moves.retell(session)
        self._bring_back(session, [piece for piece, _ in session.swept.values()])
        self._pass_fences(session)

    def gone(self, session: Session) -> None:
        """The lost session's process is proven gone: `sweep` releases what it held, once all of its group are."""
        if session.life != Life.LOST:
            raise OutOfTurn("only a lost session can be gone")
        session.proven = True
        if session.group is not None:
            self._group_completed(session.group)  # its steps are not waited for any longer
        self._all_gone(session.group.members if session.group is not None else [session])

    def _all_gone(self, members: list[Session]) -> None:
        """Begins to release an engine's sessions when none of its processes can touch their slots any more."""
        if all(member.proven for member in members):
            for member in members:
                if member.life == Life.LOST:
                    member.life = Life.GONE
                    member.marking = None
                    self._start_sweep(member)

    def sweep(self, budget: int = 256) -> bool:
        """Cleans up after ended sessions, at most `budget` sequences and fences; True when nothing is left to do."""
        while budget > 0 and self._sweeping:
            session = self._sweeping[-1]
            if session.life == Life.LOST:
                budget = self._quarantine(session, budget)
            else:
                budget = self._wipe(session, budget)
        return not self._sweeping

    def _start_sweep(self, session: Session) -> None:
        self.admission.forget_session(session)
        if session not in self._sweeping:
            self._sweeping.append(session)

    def _quarantine(self, session: Session, budget: int) -> int:
        """Marks a lost session's private and fenced slots, `budget` holdings of it at most; returns what is left."""
        if session.marking is None:
            session.marking = self._mark(session)
        for _ in session.marking:
            budget -= 1
            if budget <= 0:
                return 0
        session.marking = None
        self._sweeping.remove(session)
        return budget - 1

    def _mark(self, session: Session) -> Iterator[None]:
        """Goes through what a lost session holds, of which nothing changes as long as it is lost."""
        swept = session.swept
        shift_all = self.ledger.shift_all
        for sequence in session.sequences.values():
            self._settle(sequence, published=False)
            for piece in (*sequence.own, *(sequence.sources or ())):
                if id(piece) not in swept:  # forks share
                    swept[id(piece)] = (piece, PRIVATE)
                    shift_all(piece.extents, piece.length, PRIVATE, QUARANTINED)
            yield
        for _, _, fenced in session.fences:
            for piece in fenced.ranges:
                swept[id(piece)] = (piece, FENCED)
                session.swept_fenced += piece.length
                shift_all(piece.extents, piece.length, FENCED, QUARANTINED)
            yield

    def _bring_back(self, session: Session, pieces: list[Range]) -> None:
        """Those of `pieces` that are quarantined are again what they were."""
        for piece in pieces:
            _, state = session.swept.pop(id(piece), (piece, QUARANTINED))
            if state != QUARANTINED:
                if state == FENCED:
                    session.swept_fenced -= piece.length
                self.ledger.shift_all(piece.extents, piece.length, QUARANTINED, state)

    def _wipe(self, session: Session, budget: int) -> int:
        """Releases up to `budget` things a session of a gone process held."""
        while session.sequences and budget > 0:
            sequence = next(reversed(session.sequences.values()))
            if session.swept:
                self._bring_back(session, [*sequence.own, *(sequence.sources or ())])
            self._end(sequence, 0)
            budget -= 1
        while session.fences and budget > 0:
            fenced = session.fences.pop()[2]
            if session.swept:
                self._bring_back(session, fenced.ranges)
            self._unfence(session, fenced)
            budget -= 1
        while session.pins and budget > 0:
            self.unpin(session, next(reversed(session.pins)))
            budget -= 1
        while session.kept and budget > 0:
            self.tick += 1
            self.tree.unhold(session.kept.pop(), self.tick)
            budget -= 1
        if not (session.sequences or session.fences or session.pins or session.kept):
            session.life = Life.ENDED
            self.moves.ended(session)
            self._sweeping.remove(session)
            del self.sessions[session.handle]
            if session.group is not None:
                session.group.members.remove(session)
                if session.group.members:
                    self._group_completed(session.group)
                    self._all_gone(session.group.members)
        return budget

    def _group_completed(self, group: Group) -> None:
        completed = min((each.completed for each in group.members if not each.proven), default=0)
        group.completed = max(group.completed, completed)
        for member in group.members:
            self._pass_fences(member)

    def _pass_fences(self, session: Session) -> None:
        if session.life:  # lost: they stay; gone: the sweep releases them, with what it quarantined
            return
        passed = session.passed()
        if session.settling:
            self.moves.settle(session, passed)
        fences = session.fences
        while fences and fences[0][0] <= passed:
            self._unfence(session, heapq.heappop(fences)[2])

    def limit(
        self, tenant: str | None, *, slots: int = UNLIMITED, runs: int = UNLIMITED, pins: int = UNLIMITED
    ) -> Account:
        """Bounds what a tenant (None: all that have no account, together) holds: slots, growth runs in reserve, pins.

        Concerns its namespaces that are opened from now on, and those under the account it has (`resettle` moves the
        others).  Lowered below what is held, a limit takes nothing away.  Returns the account.
        """
        if min(slots, runs, pins) < 1:
            raise BadRequest(
                f"limits of {slots} slots, {runs} runs and {pins} pinned tokens: each is at least one"
            )
        room = UNLIMITED if runs >= UNLIMITED else runs * self.quantum
        account = self.everyone if tenant is None else self.accounts.get(tenant)
        if account is None:
            assert tenant is not None
            account = self.accounts[tenant] = Account(tenant)
        account.limit(slots=min(slots, UNLIMITED), room=min(room, UNLIMITED), pins=min(pins, UNLIMITED))
        return account

    def unlimit(self, tenant: str | None) -> None:
        """Takes the limits off; a tenant's next namespace (all, with `resettle`) is under the account of all others."""
        self.limit(tenant)
        if tenant is not None:
            del self.accounts[tenant]

    def unsettled(self, root: int) -> bool:
        """Whether a namespace is there and under another account than its tenant has by now."""
        space = self.roots.get(root)
        return (
            space is not None and self.accounts.get(space.tenant, self.everyone) is not self.account_of[root]
        )

    def resettle(self, roots: Iterable[int] | None = None) -> None:
        """Puts open namespaces (None: all) under the account that their tenant has by now, with what sequences hold.

        Takes nothing away.  What waits for a fence stays under the account it was taken from, until it is free.
        """
        moved = {
            root: self.accounts.get(self.roots[root].tenant, self.everyone)
            for root in (self.roots if roots is None else roots)
            if self.unsettled(root)
        }
        if not moved:
            return
        for root, account in moved.items():
            self.account_of[root].spaces -= 1
            account.spaces += 1
        for session in self.sessions.values():
            for node in session.pins.values():
                root = self.tree.root_of(node)
                if root in moved:
                    kept = self.tree.depth[node] + self.tree.length[node]
                    self.account_of[root].pinned -= kept
                    moved[root].pinned += kept
        self.account_of.update(moved)
        seen: set[int] = set()  # ranges: forks share them
        for sequence in self.sequences.values():
            after = moved.get(sequence.root)
            if after is None:
                continue
            before, sequence.account = sequence.account, after
            room = sequence.capacity - sequence.length
            before.unwritten -= room
            after.unwritten += room
            for piece in (*sequence.own, *(sequence.sources or ())):
                if id(piece) not in seen:
                    seen.add(id(piece))
                    before.charged -= piece.length
                    after.charged += piece.length
        for account in moved.values():
            account.ceiling = max(account.ceiling, account.charged)
        self.admission.resettle(moved)

    def open_space(self, space: Space) -> int:
        """The root of a namespace's tree; the same structure gives the same root for as long as it is open."""
        root = self.spaces.get(space)
        if root is None:
            if len(self.spaces) >= MAX_SPACES:
                raise BadRequest(f"{MAX_SPACES} namespaces are open; close one that is not used")
            root = self.spaces[space] = self.tree.root()
            self.roots[root] = space
            account = self.account_of[root] = self.accounts.get(space.tenant, self.everyone)
            account.spaces += 1
            if self.ledger.recorder is not None:
                self.ledger.recorder.opened(root, space)
        return root

    def close_space(self, root: int) -> None:
        """Ends a namespace with nothing cached and nobody in it."""
        if root not in self.roots:
            raise UnknownHandle(f"no namespace {root} is open")
        if self.tree.kid[root] or self.tree.holds[root] > 1:
            raise OutOfTurn(f"namespace {root} is in use, or has cached prefixes")
        if self.ledger.recorder is not None:
            self.ledger.recorder.closed(root)
        del self.spaces[self.roots.pop(root)]
        self.account_of.pop(root).spaces -= 1
        self.tree.remove_root(root)

    def pin(self, session: Session, root: int, tokens: bytes, *, bounded: bool = True) -> tuple[int, int]:
        """Keeps what is cached of this prefix; returns the pin's handle and the tokens it keeps (0: nothing cached).

        `bounded`: the tenant's limit holds; without, it counts as much.
        """
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
        account = self.account_of[root]
        if bounded and account.pinned + kept > account.pins:
            raise BadRequest(
                f"pins of tenant {account.name or '*'!r} keep {account.pinned} tokens and {kept} more would pass its "
                f"quota pins of {account.pins}: unpin what is not needed"
            )
        node = path[-1]
        if kept < tree.depth[node] + tree.length[node]:
            node = tree.split(node, kept - tree.depth[node])
        tree.hold(node)
        handle = self._handle()
        session.pins[handle] = node
        self.pinned += kept
        account.pinned += kept
        return handle, kept

    def unpin(self, session: Session, handle: int) -> None:
        """Ends a pin."""
        if session.life == Life.LOST:
            raise OutOfTurn("the session is not live")
        node = session.pins.pop(handle, 0)
        if not node:
            raise self.bad_handle(handle, "pin")
        tree = self.tree
        kept = tree.depth[node] + tree.length[node]
        self.pinned -= kept
        self.account_of[tree.root_of(node)].pinned -= kept
        self.tick += 1
        tree.unhold(node, self.tick)

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
