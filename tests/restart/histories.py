"""Lives of a pool whose journal is cut at every store, and what a later life may make of each of those moments.

Engines paint a slot when they have been told of it: its colour stands for the namespace and all tokens up to its own.
So what a slot may be cached as is known at any moment, whatever the journal says.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvslot.allocator import (
    Admitted,
    Aside,
    Forked,
    Grown,
    Later,
    Life,
    Pool,
    PoolConfig,
    Session,
    Space,
    State,
    audit,
    reclaim,
)
from kvslot.allocator.errors import EndedHandle, Refusal
from kvslot.daemon.journal.columns import HEAD, SESSION_BYTES, SPACE_BYTES, Columns
from kvslot.daemon.journal.takeover import Takeover, take_over
from kvslot.daemon.journal.writer import Session as Entry
from kvslot.daemon.journal.writer import Writer

SPACES = 3
UNTOLD = 2  # the one whose names are too long for the journal
TABLES = {"sessions": 64, "spaces": 16}  # entries, as many as these lives touch


def bytes_of(slots: int) -> int:
    aligned = [-(-n * slots // 4096) * 4096 for n in (1, 1, 8, 4, 4, 8)]
    return HEAD + sum(aligned) + 64 * SESSION_BYTES + 16 * SPACE_BYTES


class Tape:
    """A column that tells of each store into it, halfway through and when it is done."""

    def __init__(self, view: memoryview, told: Callable[[], None]) -> None:
        self._view = view
        self._told = told

    def __getitem__(self, key: Any) -> Any:
        return self._view[key]

    def __len__(self) -> int:
        return len(self._view)

    def cast(self, code: Any) -> Tape:
        return Tape(self._view.cast(code), self._told)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, slice) and self._view[key].nbytes > 8:
            start, stop, _ = key.indices(len(self._view))
            half = start + (stop - start) // 2
            self._view[start:half] = value[: half - start]
            self._told()
        self._view[key] = value
        self._told()


class Known(NamedTuple):
    """A sequence as its engine knows it, whatever becomes of the pool."""

    handle: int
    space: int
    tokens: list[int]
    extents: list[int]
    whole: bool  # nothing private is a fork's, too, and no published unit was cut: it must be able to go on


class History:
    """One pool, some sessions that do anything, and what each cut of their journal comes to."""

    def __init__(self, seed: int, config: PoolConfig, *, paged: bool = False) -> None:
        self.rng = random.Random(seed)
        self.config = config
        self.pool = Pool(config)
        slots = self.pool.slots
        self.buffer = bytearray(bytes_of(slots))
        self.cuts: list[bytes] = []
        self.colours: dict[int, tuple[int, ...]] = {}  # slot -> namespace, then the tokens up to its own
        self.paints: list[tuple[int, tuple[int, ...]]] = []  # what is written once the reply is there
        self.page = 4 if paged else 1
        self.number = 0
        self.alive: dict[int, Session] = {}  # number -> session, those of earlier lives among them
        self.takeover: Takeover | None = None
        self.prompts: dict[int, list[int]] = {}  # sequence -> its tokens as far as they are painted
        self.moves: list[int] = []
        self.known: dict[int, list[Known]] = {}  # of sessions of earlier lives
        self.gone_on = self.ended = 0  # sequences that did, and that could not
        self.touched: set[int] = set()  # sequences that the present verb cuts or ends
        self.stirred = False  # by the present verb, which moves what nobody has been told of yet
        self.restored = self.cached = self.idled = 0
        self.columns = self._taped()
        self._hook(Writer(self.columns, self.pool.padding, self.pool.ledger))
        self.open()
        self.open()

    def _taped(self) -> Columns:
        columns = Columns(memoryview(self.buffer), self.pool.slots, **TABLES)
        for name in ("words", "state", "whose", "stretch", "place", "token", "link", "sessions", "spaces"):
            setattr(columns, name, Tape(getattr(columns, name), self._told))
        return columns

    def _hook(self, writer: Writer) -> None:
        self.writer = writer
        writer.follow()

    def _told(self) -> None:
        self.cuts.append(bytes(self.buffer))

    # -- what is done ------------------------------------------------------------------------------------------

    def act(self) -> None:
        """One verb, and a look at every moment of it."""
        before, tables = self.held(), self.tables()
        self.cuts.clear()
        self.touched.clear()
        self.stirred = False
        act = self.rng.choices(
            [self.open, self.allocate, self.extend, self.commit, self.fork, self.free, self.trim, self.step, self.move,
             self.lose, self.leave, self.pin, self.evict, self.go_on],
            [2, 12, 6, 12, 3, 7, 3, 6, 6, 1, 1, 1, 1, 6 if self.known else 0],
        )[0]  # fmt: skip
        self.idle()
        with contextlib.suppress(Refusal):
            act()
        self.pool.poll(0.0)
        self.pool.pushes.clear()
        if self.pool.scrubs and self.rng.random() < 0.5:
            handle, _ = self.pool.wipe(self.rng.randrange(1, 60))
            if handle:
                self.pool.wiped(handle)
        after = self.held()
        kept = {number: slots & after.get(number, frozenset()) for number, slots in before.items()}
        for cut in self.cuts:
            self.look(cut, kept, tables)
        # Only now has anybody been told of slots, and writes to them.
        for target, colour in self.paints:
            self.colours[target] = colour
        self.paints.clear()

    def open(self) -> None:
        if len(self.live()) >= 4:
            return
        self.number += 1
        session = self.pool.open_session(
            page=self.page, movable=self.page == 1 and self.rng.random() < 0.7,
            append="chain" if self.rng.random() < 0.7 else "peel",
        )  # fmt: skip
        session.mark = self.writer.session_opened(
            Entry(
                number=self.number, boot=1, pid=1, uid=0, gid=0, birth=7, secret=b"s" * 16, name="x", holds=False
            )
        )  # fmt: skip
        self.alive[self.number] = session

    def holds(self, session: Session) -> None:
        """It is about to use slots: as before Allocate and Pin, the journal says so first."""
        number = next(n for n, each in self.alive.items() if each is session)
        self.writer.session_holds(number, True)

    def idle(self) -> None:
        """What upkeep does once a second: of live sessions that use nothing the journal says so."""
        for number, session in self.alive.items():
            uses = session.sequences or session.fences or session.pins or session.moved or session.settling
            if session.life == Life.LIVE and not uses:
                self.writer.session_holds(number, False)
                self.idled += 1

    def live(self) -> list[Session]:
        return [each for each in self.alive.values() if each.life == Life.LIVE]

    def _sequence(self) -> tuple[Session, int] | None:
        all_ = [(session, handle) for session in self.live() for handle in session.sequences]
        return self.rng.choice(all_) if all_ else None

    def allocate(self) -> None:
        live = self.live()
        if not live:
            self.open()
            return
        session, space = self.rng.choice(live), self.rng.randrange(SPACES)
        root = self.pool.open_space(Space("t", str(space), salt="long" * 2000 if space == UNTOLD else ""))
        lead = random.Random(self.rng.randrange(4))
        tokens = [lead.randrange(3) for _ in range(self.rng.randrange(40))]
        tokens += [self.rng.randrange(3) for _ in range(self.rng.randrange(1, 12))]
        self.holds(session)
        answer = self.pool.allocate(session, root, np.array(tokens, "<i4").tobytes())
        if isinstance(answer, Admitted):
            self.prompts[answer.sequence] = tokens
            for copy in answer.copies:
                for i in range(copy.length):
                    if copy.source + i in self.colours:
                        self.paints.append((copy.target + i, self.colours[copy.source + i]))
            self._paint(session, answer.sequence, space, answer.hit)
        elif isinstance(answer, Later):
            self.pool.withdraw(session, answer.ticket)

    def _paint(self, session: Session, handle: int, space: int, start: int) -> None:
        """The engine writes positions from `start` on of what it knows tokens for."""
        tokens = self.prompts[handle]
        slots = self._slots(session, handle)
        for position in range(start, min(len(tokens), len(slots))):
            self.paints.append((slots[position], (space, *tokens[: position + 1])))

    def _slots(self, session: Session, handle: int) -> list[int]:
        flat = self.pool.table(session, handle)
        return [s for i in range(0, len(flat), 2) for s in range(flat[i], flat[i] + flat[i + 1])]

    def _space(self, handle: int) -> int:
        return int(self.pool.roots[self.pool.sequences[handle].root].model)

    def extend(self) -> None:
        found = self._sequence()
        if found is None:
            return
        session, handle = found
        answer = self.pool.extend(session, handle, tokens=self.rng.choice([0, 0, 3]))
        if isinstance(answer, Grown):
            for copy in answer.copies:
                for i in range(copy.length):
                    if copy.source + i in self.colours:
                        self.paints.append((copy.target + i, self.colours[copy.source + i]))
            at = len(self.prompts[handle])
            more = self.rng.randrange(1, 6)
            self.prompts[handle] += [self.rng.randrange(3) for _ in range(more)]
            del self.prompts[handle][answer.capacity :]
            self._paint(session, handle, self._space(handle), at)
        elif isinstance(answer, Later):
            self.pool.withdraw(session, answer.ticket)

    def commit(self) -> None:
        found = self._sequence()
        if found is None:
            return
        session, handle = found
        sequence = self.pool.sequences[handle]
        tokens = self.prompts[handle]
        known = sequence.tokens_from + (len(sequence.tokens) >> 2)
        length = self.rng.randrange(len(tokens) + 1)
        self.pool.commit(
            session, handle, length, np.array(tokens[known:], "<i4").tobytes(),
            priority=self.rng.choice([None, None, None, 2]),
        )  # fmt: skip

    def fork(self) -> None:
        found = self._sequence()
        if found is None:
            return
        session, handle = found
        sequence = self.pool.sequences[handle]
        self.pool.wrote(session, handle, len(self.prompts[handle]))
        answer = self.pool.fork(session, handle, length=self.rng.randrange(1, max(2, sequence.written)))
        if isinstance(answer, Forked):
            self.prompts[answer.sequence] = self.prompts[handle][: answer.length]

    def tables(self) -> dict[int, list[Known]]:
        """By session: what its engine knows of its sequences."""
        out: dict[int, list[Known]] = {}
        for number, session in self.alive.items():
            times: dict[int, int] = {}
            for sequence in session.sequences.values():
                for piece in (*sequence.own, *(sequence.sources or ())):
                    times[id(piece)] = times.get(id(piece), 0) + 1
            out[number] = [
                Known(
                    handle, self._space(handle), self.prompts[handle].copy(), self.pool.table_of(sequence),
                    not sequence.base % self.pool.unit and all(times[id(each)] == 1 for each in sequence.own),
                )
                for handle, sequence in session.sequences.items()
                if self.prompts.get(handle)
            ]  # fmt: skip
        return out

    def go_on(self) -> None:
        """An engine of an earlier life comes back and goes on with a sequence, as far as that is still there."""
        known = [(number, each) for number, all_ in self.known.items() for each in all_]
        live = self.live()
        if not known or not live:
            return
        number, each = self.rng.choice(known)
        self.known[number].remove(each)
        former = self.alive.get(number)
        if former is None or each.space == UNTOLD:
            return
        session = self.rng.choice(live)
        self.holds(session)
        handle = self.reclaim(self.pool, session, former, each)
        if handle:
            self.prompts[handle] = each.tokens

    def reclaim(self, pool: Pool, session: Session, former: Session, known: Known) -> int:
        """The sequence that goes on, 0 where it cannot; what it reads is what was written there."""
        root = pool.open_space(Space("t", str(known.space)))
        try:
            answer = reclaim(
                pool, session, Aside(former), root, np.array(known.tokens, "<i4").tobytes(), known.extents
            )
        except EndedHandle:
            # A store cut in the middle of a unit leaves a part of it cached, which is nobody's then.
            cut = pool is not self.pool and (pool.unit > 1 or self.stirred)
            assert not known.whole or cut
            self.ended += 1
            return 0
        self.gone_on += 1
        flat = pool.table(session, answer.sequence)
        assert flat == known.extents
        slots = [s for i in range(0, len(flat), 2) for s in range(flat[i], flat[i] + flat[i + 1])]
        for position, slot in enumerate(slots[: len(known.tokens)]):
            colour = (known.space, *known.tokens[: position + 1])
            assert self.colours[slot] == colour, f"position {position} in slot {slot}: {self.colours[slot]}"
        return answer.sequence

    def _fence(self, session: Session) -> int:
        return self.rng.choice([0, session.submitted])

    def free(self) -> None:
        found = self._sequence()
        if found is not None:
            session, handle = found
            self.touched.add(handle)
            self.pool.free(session, handle, fence=self._fence(session))
            del self.prompts[handle]

    def trim(self) -> None:
        found = self._sequence()
        if found is None:
            return
        session, handle = found
        self.touched.add(handle)
        keep = self.rng.randrange(1, max(2, len(self.prompts[handle])))
        self.pool.trim(session, handle, keep_to=keep, fence=self._fence(session))
        del self.prompts[handle][keep:]

    def step(self) -> None:
        live = self.live()
        if not live:
            return
        session = self.rng.choice(live)
        submitted = session.submitted + self.rng.randrange(2)
        completed = self.rng.randrange(session.completed, submitted + 1)
        self.pool.progress(session, submitted, completed, epoch=session.epoch)

    def move(self) -> None:
        if self.moves and self.rng.random() < 0.6:
            handle = self.moves.pop(self.rng.randrange(len(self.moves)))
            move = self.pool.moves.tickets[handle]
            source = [
                s
                for i in range(0, len(move.source), 2)
                for s in range(move.source[i], sum(move.source[i : i + 2]))
            ]
            target = [
                s
                for i in range(0, len(move.target), 2)
                for s in range(move.target[i], sum(move.target[i : i + 2]))
            ]
            for a, b in zip(source, target, strict=True):
                if a in self.colours:
                    self.colours[b] = self.colours[a]
            self.stirred = True
            self.pool.finish_move(handle, self.rng.random() < 0.9)
            return
        tree = self.pool.tree
        nodes = [node for node in tree.live() if tree.parent[node]]
        if nodes:
            self.moves.append(self.pool.begin_move(self.rng.choice(nodes)).handle)

    def pin(self) -> None:
        found = self._sequence()
        if found is not None:
            session, handle = found
            if session.pins and self.rng.random() < 0.5:
                self.pool.unpin(session, next(iter(session.pins)))
            else:
                tokens = np.array(self.prompts[handle], "<i4").tobytes()
                self.holds(session)
                self.pool.pin(session, self.pool.sequences[handle].root, tokens)

    def evict(self) -> None:
        self.pool.evict(self.rng.randrange(1, 40))

    def lose(self) -> None:
        live = self.live()
        if live and self.rng.random() < 0.4:
            session = self.rng.choice(live)
            self.pool.lose(session)
            self.pool.sweep(self.rng.randrange(1, 20))

    def leave(self) -> None:
        """A lost session's process is proven gone, or a live one ends in good order."""
        ends = [
            n for n, each in self.alive.items() if each.life == Life.LOST or each.submitted == each.completed
        ]
        if not ends:
            return
        number = self.rng.choice(ends)
        session = self.alive[number]
        for handle in session.sequences:
            self.prompts.pop(handle, None)
            self.touched.add(handle)
        if session.life == Life.LOST:
            self.pool.gone(session)
        else:
            self.pool.bye(session)
        while not self.pool.sweep():
            pass
        del self.alive[number]
        self.writer.session_closed(number)
        if self.takeover is not None and not (self.takeover.restored.sessions.keys() & self.alive.keys()):
            everybody = self.takeover.everybody
            if everybody is not None and everybody.life == Life.LOST:
                self.pool.gone(everybody)
                while not self.pool.sweep():
                    pass

    # -- what must hold ----------------------------------------------------------------------------------------

    def held(self) -> dict[int, frozenset[int]]:
        """By session: slots that its engine may still read or write."""
        out: dict[int, frozenset[int]] = {}
        everybody = self.takeover.everybody if self.takeover is not None else None
        common: set[int] = set()
        if everybody is not None and everybody.life == Life.LOST:
            common = self._of(everybody)
        for number, session in self.alive.items():
            out[number] = frozenset(self._of(session) | (common if session.life == Life.LOST else set()))
        return out

    def _of(self, session: Session) -> set[int]:
        pool = self.pool
        flat: list[int] = []
        nodes: list[int] = [*session.kept, *session.pins.values()]
        for sequence in session.sequences.values():
            flat += pool.table_of(sequence)
            for piece in sequence.sources or ():
                flat += piece.extents
            nodes += sequence.kept or ()
        for _, _, fenced in session.fences:
            for piece in fenced.ranges:
                flat += piece.extents
            if fenced.node:
                nodes.append(fenced.node)
        for waiting in (session.moved, session.settling):
            for entry in waiting:
                flat += entry[1].extents
        for node in nodes:
            for each in pool.tree.path_to(node):
                flat += pool.tree.extents(each)
        return {s for i in range(0, len(flat), 2) for s in range(flat[i], flat[i] + flat[i + 1])}

    def look(
        self, cut: bytes, held: dict[int, frozenset[int]], tables: dict[int, list[Known]] | None = None
    ) -> None:
        """What a later life makes of a journal that ends here: nothing wrong, and nobody's slots to another."""
        dead = {number for number in self.alive if self.rng.random() < 0.3}
        pool, takeover, buffer = reborn(cut, self.config, lambda entry: entry.number not in dead)
        self.compare(pool, {n: slots for n, slots in held.items() if n not in dead})
        # Dying once more at once changes nothing of what is there.
        again, _, _ = reborn(bytes(buffer), self.config, lambda entry: entry.number not in dead)
        assert again.ledger.counts == pool.ledger.counts
        assert again.tree.tokens == pool.tree.tokens
        self.compare(again, {n: slots for n, slots in held.items() if n not in dead})
        if tables is not None and self.rng.random() < 0.2:
            self.come_back(pool, takeover, buffer, {n: all_ for n, all_ in tables.items() if n not in dead})

    def come_back(
        self, pool: Pool, takeover: Takeover, buffer: bytearray, tables: dict[int, list[Known]]
    ) -> None:
        """Engines that have not heard what the last verb came to go on with what they know, and one dies again."""
        number = 1 << 20
        for former, all_ in tables.items():
            before = takeover.restored.sessions.get(former)
            for known in all_ if before is not None and before.life == Life.LOST else ():
                if known.handle in self.touched or known.space == UNTOLD:
                    continue
                number += 1
                session = pool.open_session(page=self.page)
                session.mark = takeover.writer.session_opened(
                    Entry(number=number, boot=2, pid=1, uid=0, gid=0, birth=7, secret=b"s" * 16, name="x")
                )
                assert before is not None
                if self.reclaim(pool, session, before, known):
                    private = [piece for each in session.sequences.values() for piece in each.own]
                    mine = {s for piece in private for s in _slots(piece.extents)}
                    again, _, _ = reborn(bytes(buffer), self.config, lambda entry: True)
                    assert not mine & free(again)
                    assert not audit(again)
        faults = audit(pool)
        assert not faults, faults

    def compare(self, pool: Pool, held: dict[int, frozenset[int]]) -> None:
        faults = audit(pool)
        assert not faults, faults
        for slot, colour in cached(pool).items():
            assert self.colours[slot] == colour, f"slot {slot} holds {self.colours[slot]}, cached as {colour}"
        for number, slots in held.items():
            taken = slots & free(pool)
            assert not taken, f"slots {sorted(taken)} of session {number} are free"
        if any(held.values()):
            assert not pool.tree.evictable, "what somebody may read can be evicted"

    def die(self) -> None:
        """The process ends between two verbs and another takes over; nothing that was cached is lost."""
        before = {slot: colour for slot, colour in cached(self.pool).items() if colour[0] != UNTOLD}
        dead = {number for number in self.alive if self.rng.random() < 0.4}
        held, tables = self.held(), self.tables()
        cut = bytes(self.buffer)
        pool, takeover, buffer = reborn(cut, self.config, lambda entry: entry.number not in dead)
        self.compare(pool, {n: slots for n, slots in held.items() if n not in dead})
        for number, slots in takeover.found.private.items():
            strange = set(slots.tolist()) - held.get(number, frozenset())
            assert not strange, (
                f"slots {sorted(strange)} are set aside for session {number}, which may not use them"
            )
        after = cached(pool)
        assert after == before, "what was cached is not cached any more"
        self.restored += len(after)
        self.cached += len(before)
        self.pool, self.buffer, self.takeover = pool, buffer, takeover
        self.prompts.clear()
        self.moves.clear()
        self.alive = {n: s for n, s in takeover.restored.sessions.items() if n not in dead}
        self.known = {n: all_ for n, all_ in tables.items() if n in self.alive}
        while not pool.sweep():
            pass
        for entry in takeover.found.sessions:
            if entry.number not in self.alive:
                takeover.writer.session_closed(entry.number)
        # From here on its stores are told of.
        self.columns = self._taped()
        writer = Writer(self.columns, pool.padding, pool.ledger, new=False)
        writer.go_on(takeover.found, takeover.restored.roots)
        for entry in takeover.found.sessions:
            if entry.number not in self.alive:
                writer.session_closed(entry.number)
        self._hook(writer)


def _slots(extents: list[int]) -> list[int]:
    return [s for i in range(0, len(extents), 2) for s in range(extents[i], extents[i] + extents[i + 1])]


def reborn(
    cut: bytes, config: PoolConfig, lives: Callable[[Entry], bool]
) -> tuple[Pool, Takeover, bytearray]:
    pool = Pool(config)
    buffer = bytearray(cut)
    takeover = take_over(Columns(memoryview(buffer), pool.slots, **TABLES), pool, lives)
    state = np.frombuffer(buffer, np.uint8, pool.slots, HEAD)
    assert np.bincount(state, minlength=len(State)).tolist() == pool.ledger.counts
    return pool, takeover, buffer


def cached(pool: Pool) -> dict[int, tuple[int, ...]]:
    """Slot -> namespace and tokens, of all that is cached."""
    out: dict[int, tuple[int, ...]] = {}
    tree = pool.tree
    below: list[tuple[int, tuple[int, ...]]] = [
        (child, (int(space.model),)) for root, space in pool.roots.items() for child in tree.children(root)
    ]
    for node, path in below:
        extents = tree.extents(node)
        slots = [s for i in range(0, len(extents), 2) for s in range(extents[i], extents[i] + extents[i + 1])]
        for slot, token in zip(slots, np.frombuffer(tree.keys[node], "<i4").tolist(), strict=True):
            path = (*path, token)
            out[slot] = path
        below += [(child, path) for child in tree.children(node)]
    return out


def free(pool: Pool) -> set[int]:
    runs = [*pool.runs.length_at.items(), *zip(pool.runs.stock[::2], pool.runs.stock[1::2], strict=True)]
    return {s for slot, length in runs for s in range(slot, slot + length)}
