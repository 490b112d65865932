"""Sequences for kernels that read whole pages: every position keeps its place modulo the page.

A hit may end or meet another node inside a page; then that page is put together from copies in one of the sequence's
own, so that no page is written by two.
"""

from __future__ import annotations

from kvslot.allocator.accounts import Quota, narrowest
from kvslot.allocator.errors import Refusal
from kvslot.allocator.extents import joined, split_extents
from kvslot.allocator.results import Admitted, Copy, Grown, Later, Never, Reason
from kvslot.allocator.sessions import Sequence, Session
from kvslot.allocator.tables import Tables


class Pages(Tables):
    """Allocation and growth in whole pages."""

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
        account = self.account_of[root]
        limit, quota = narrowest(session, account, self.usable)
        limit -= limit % page
        if pages > limit:
            return Never(pages, limit, quota)
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
            later = self.admission.admit(
                session, account, need, evictable - tree.evictable, now, ticket, False, root
            )
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
                    later = self.admission.refuse(session, account, need, now, ticket, Reason.RUN)
                    self.admission.waiting[later.ticket].root = root
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
            own = joined([end, rest, *own])
        answer = self._start(session, root, node, tokens, path, hit, own, priority, copied)
        if copied or joints:
            self._list_copies(session, answer, extents, joints, places, part if copied else 0)
        return answer

    def _extend_pages(
        self, session: Session, sequence: Sequence, tokens: int, now: float, ticket: int
    ) -> Grown | Later | Never:
        page, runs = session.page, self.runs
        capacity = sequence.capacity
        part = capacity % page
        asked = tokens or self.quantum
        # Room in whole pages; a page shared or published in part is copied, our own with free slots behind is not.
        need = -(-(part + asked) // page) * page
        account = sequence.account
        limit, quota = narrowest(session, account, self.usable)
        limit -= limit % page
        occupied = capacity - part - sequence.dropped
        if occupied + need > limit:
            # A growth run may be shorter, as long as it is a page; what was asked for by number may not.
            need = (limit - occupied) // page * page
            if tokens or need <= 0:
                return Never(occupied + -(-(part + (tokens or 1)) // page) * page, limit, quota)
        if account.unwritten + need > account.room:
            if (need if tokens else page) > account.room:
                return Never(need if tokens else page, account.room, Quota.RUNS)
            if not tokens:
                # A growth run may be shorter, as long as it is a page.
                need = max(page, (account.room - account.unwritten) // page * page)
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
                fewer = self.admission.whole_pages(page, need, now) * page
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
        account.charged += need
        account.unwritten += want
        self.unwritten += want
        self.extents_given += len(out) >> 1
        self.extent_tokens += need
        return Grown(start, sequence.capacity, out, copies)
