"""Sequences and their tables: which slots hold a sequence's positions, from its first to its publication and end.

A table is what the tree has of the sequence, up to its base, and ranges of its own.  Ranges are shared by forks, split
where a boundary falls, published into the tree, and let go behind a fence.
"""

from __future__ import annotations

from kvslot.allocator.extents import append, copies_of, join, split_extents
from kvslot.allocator.placement import Placement
from kvslot.allocator.results import Admitted, Committed, Copy
from kvslot.allocator.runs import REUSED
from kvslot.allocator.sessions import DUPLICATE, OWN, PEELED, Fenced, Range, Sequence, Session
from kvslot.allocator.slots import CACHED, FENCED, FREE, PRIVATE
from kvslot.allocator.tree import common_prefix

PROMISE_LEAST = 64  # tokens; for fewer nobody waits: computing them takes less time than the waiting


class Tables(Placement):
    """Sequences: begun, grown, published, cut back and ended."""

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
        self.serial = handle = self.serial + 1
        position = hit - copied
        room = own[1] if len(own) == 2 else sum(own[1::2])
        self.ledger.holder = session.mark
        self.ledger.shift_all(own, room, FREE, PRIVATE)
        ranges = [Range(position, own, room)]
        capacity = position + room
        if extents and extents[-2] + extents[-1] == own[0]:
            join(extents, own)
        else:
            extents += own
        account = self.account_of[root]
        session.charged += capacity - hit + copied
        account.charged += capacity - hit + copied
        account.unwritten += capacity - n
        sequence = Sequence(
            handle, session, account, root, node, hit, n, capacity, tokens, 0, ranges, priority
        )
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
        if hit:
            tree.hits[node] += 1
            self.hit_tokens += hit
        self.prompt_tokens += n
        return Admitted(handle, hit, capacity, extents, [])

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
            or self.account_of[root].charged + count * self.cell > self.account_of[root].slots
        ):
            return None
        own = self._cells(count, REUSED, root, now)
        if not own:
            return None
        path = self.tree.path_to(node)
        answer = self._start(session, root, node, tokens, path, hit, own, priority, peel)
        self._list_copies(session, answer, extents, [], [], peel)
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
            self.ledger.holder = session.mark
            self.ledger.shift(slot, page, FREE, PRIVATE)
            answer.copies += copies_of(extents, first, page, slot)
        if part:
            last = sequence.own[0]
            front, _ = split_extents(last.extents, part)
            position = answer.hit - part
            for i in range(0, len(front), 2):
                answer.copies += copies_of(extents, position, front[i + 1], front[i])
                position += front[i + 1]
            if last.length > part:
                self._split_range(sequence, last, part)
            last.kind = PEELED
        sequence.own[:0] = ranges
        session.charged += page * len(joints)
        sequence.account.charged += page * len(joints)
        copied = page * len(joints) + part
        self.peeled += copied
        self.copied_tokens += copied
        if joints:
            answer.extents = self.table_of(sequence)

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
                    if self.ledger.recorder is not None:
                        before = tree.end_slot(node) - 1 if node != root else -1
                        self.ledger.recorder.publish(extents, key, before, root, sequence.priority, expiry)
                    self.ledger.shift_all(extents, taken, PRIVATE, CACHED)
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
        """Takes the slots of positions [start, stop) out of the sequence's own ranges for a new node; private as yet.

        Stops at the first position without a slot (trimmed away).  Returns flat extents and the tokens they hold;
        ranges that forks hold too are added to `shared`.
        """
        if start < sequence.kept_from:
            return [], 0  # what stands there now was never written: a window had dropped it
        own = sequence.own
        extents: list[int] = []
        position = start
        session, account = sequence.session, sequence.account
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
            join(extents, piece.extents)
            position += n
            if piece.kind == PEELED:
                self.peeled -= n
            elif piece.kind == DUPLICATE:
                self.duplicates -= n
            session.charged -= n
            account.charged -= n
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
                table = table_with(holder, piece)
                table.insert(table.index(piece) + 1, rear)
        return rear

    def _follow(self, sequence: Sequence, piece: Range, node: int) -> None:
        """Forks that shared `piece`, now published under `node`, read it from the tree from here on."""
        session = sequence.session
        if piece.fence > session.passed():
            # A fork that let go may still read these slots until its step has completed.
            self.tree.hold(node)
            session.fence(piece.fence, Fenced([], node, sequence.account))
        for holder in piece.holders or ():
            if holder is sequence:
                continue
            table = table_with(holder, piece)
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
        room = sequence.capacity - sequence.length
        self.unwritten -= room
        sequence.account.unwritten -= room
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
        session, account = sequence.session, sequence.account
        passed = session.passed()
        if fence <= passed and not (
            pieces and (len(pieces) > 1 or pieces[0].holders or pieces[0].fence or pieces[0].kind)
        ):
            # What is nearly always so: one range at most, nobody else's, and no step to wait for.
            if pieces:
                piece = pieces[0]
                session.charged -= piece.length
                account.charged -= piece.length
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
                account.charged -= piece.length
                self._release(piece.extents, piece.length, PRIVATE)
            elif last == fence:
                self.ledger.shift_all(piece.extents, piece.length, PRIVATE, FENCED)
                session.fenced += piece.length
                account.fenced += piece.length
                waiting.append(piece)
            else:
                self.ledger.shift_all(piece.extents, piece.length, PRIVATE, FENCED)
                session.fenced += piece.length
                account.fenced += piece.length
                session.fence(last, Fenced([piece], 0, account))
        if fence <= passed:
            if node:
                self.tree.unhold(node, self.tick)
        elif waiting or node:
            session.fence(fence, Fenced(waiting, node, account))

    def _unfence(self, session: Session, fenced: Fenced) -> None:
        account = fenced.account
        for piece in fenced.ranges:
            session.charged -= piece.length
            session.fenced -= piece.length
            account.charged -= piece.length
            account.fenced -= piece.length
            self._release(piece.extents, piece.length, FENCED)
        if fenced.node:
            self.tree.unhold(fenced.node, self.tree.tick[fenced.node])

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
        # Under pressure one run is all: who trims to its length then was asked for its second.
        room = (1 if self.admission.pressed >= 0 else 2) * max(self.quantum, session.page)
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
        more = (sequence.capacity - sequence.length) - before
        self.unwritten += more
        sequence.account.unwritten += more
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

    def _own(self, sequence: Sequence, position: int, extents: list[int], kind: int = OWN) -> None:
        """Free slots just taken become the sequence's, for positions from `position` on."""
        length = sum(extents[1::2])
        if not length:
            return
        self.ledger.holder = sequence.session.mark
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
            join(last.extents, extents)
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

    def _last_left(self, n: int) -> int:
        """The most of an n-token prompt that may be a hit: all but the last token, in whole units."""
        n -= 1
        return n - n % self.unit

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
                append(out, shared[index], n)
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
            join(out, piece.extents)
            position = piece.position + piece.length
        for i in range(index, len(shared), 2):
            append(out, shared[i], shared[i + 1])
        return out


def table_with(sequence: Sequence, piece: Range) -> list[Range]:
    """The list that holds `piece`: the sequence's own ranges, or the copy sources it keeps."""
    for own in sequence.own:
        if own is piece:
            return sequence.own
    assert sequence.sources is not None
    return sequence.sources
