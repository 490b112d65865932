"""Where a pool's slots come from: free runs, holes and cells, and eviction when those run out.

The lowest layer of the pool holds all of its state.  Nothing here knows what a verb is; `need` slots are found, set
aside or given back, and the ledger says whose they are.
"""

from __future__ import annotations

from collections import deque

from kvslot.allocator import eviction
from kvslot.allocator.accounts import Account
from kvslot.allocator.admission import Admission
from kvslot.allocator.config import PoolConfig, check_config
from kvslot.allocator.errors import EndedHandle, ForeignHandle, UnknownHandle
from kvslot.allocator.eviction import Lru
from kvslot.allocator.extents import joined, split_extents
from kvslot.allocator.moves import Moves
from kvslot.allocator.results import Push, Space
from kvslot.allocator.runs import FRESH, REUSED, FreeRuns
from kvslot.allocator.sessions import Sequence, Session
from kvslot.allocator.slots import CACHED, FENCED, FREE, RESERVED, Ledger
from kvslot.allocator.tree import PrefixTree

HOLES_FROM = 512  # one slot in so many of those in use is in a hole: from there on new pieces begin in one
HOLE_LEAST = 3  # slots; a shorter hole costs an extent and saves next to nothing
HOLES_EACH = 2  # holes that a new piece begins in at the most, each costs an extent ...
HOLES_PER = 256  # ... and one more for so many tokens of it
SCATTER_SHIFT = (
    6  # 1/64: free slots in no whole cell that eviction puts up with before less than cells is handed out
)
MANY = 64  # extents given back at once from which they are filed among the free runs later, in slices
PAGE_VICTIMS = 64  # leaves that a request for whole pages looks at before it counts how many there can be
SHED = 1024  # tokens evicted at a time where they are wiped before they are free
AHEAD_ROUNDS = (
    4  # of eviction in a request where others go on between requests; then scattered slots have to do
)


class Placement:
    """The slots of one pool and how they are found, evicted for and given back."""

    def __init__(self, config: PoolConfig) -> None:
        check_config(config)
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
        self.headroom = int(self.usable * config.headroom) // self.quantum  # in cells
        self.kept = 0 if config.ahead else self.headroom  # what a request leaves free of it
        self.cell = (
            self.quantum
        )  # growth and placement go by the same measure; holes are what falls short of it
        self.many = MANY
        self.holes_from = HOLES_FROM if config.fill_holes else 0
        # What is to be wiped before it is free again, as flat extents with their length; fenced until then.
        self.scrubs = config.scrubs
        self.dirt: deque[tuple[list[int], int]] = deque()
        self.wiping: dict[int, tuple[list[int], int]] = {}  # ... and is being wiped, by handle
        self.dirty = 0  # slots of both
        self.runs = FreeRuns(config.blocks, config.block_size, self.padding, self.cell)
        self.evictor = eviction.make(config.eviction)
        self.tree = PrefixTree(self.evictor, self.unit)
        self.admission = Admission(self)
        self.moves = Moves(self)
        self.pushes: list[Push] = []
        self.sessions: dict[int, Session] = {}
        self.spaces: dict[Space, int] = {}
        self.roots: dict[int, Space] = {}
        self.everyone = Account()  # of all tenants without one of their own
        self.accounts: dict[str, Account] = {}  # by tenant
        self.account_of: dict[int, Account] = {}  # by root
        self.sequences: dict[int, Sequence] = {}
        self.promised: dict[
            tuple[int, int, bytes], Sequence
        ] = {}  # (node, hit, first unit missed) -> who computes it
        self.loose = False  # whether any sequence may hold more of a node than it reads
        self.now = 0.0  # the latest time any verb was told; time does not go back
        self.tick = 0
        self.serial = 0
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
        self.lost_hit_tokens = 0  # cached, and no use to a session of whole pages
        self.bad_handles = 0

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
            elif count + self.kept <= runs.cells_free:
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
        return own if len(own) < 4 else joined(own)

    def _take_pages(self, need: int, page: int, now: float) -> list[int]:
        """Takes `need` slots in whole pages, evicting what that takes; [] and nothing evicted where that cannot do."""
        tree, runs = self.tree, self.runs
        own = runs.take_pages(need, page) if need <= runs.total else []
        if own:
            return own
        if not self._pages_in_sight(need, page):
            # The next victims make too few whole pages.  Only now is it worth counting how many there can be at all.
            self.tighten()
            if self.admission.lack_pages(need, page, now):
                return []
        elif page == self.cell:
            own = self._cells(need // page, FRESH, 0, now)
        while not own and self.yields:
            self._evict(min(tree.evictable, max(need - runs.total, page)), now)
            own = runs.take_pages(need, page)
        return own

    def _pages_in_sight(self, need: int, page: int) -> bool:
        """Whether the next few victims and the free slots beside them have `need` slots in whole pages."""
        tree, runs = self.tree, self.runs
        if self.admission.window is not None:
            return False  # what is freed inside it is set aside for its ticket: only a count can tell
        if self.unit == page > 1:
            # Nodes are whole blocks here; a sequence that was cut short may share one with free slots.
            return need <= runs.blocks_free * page + tree.evictable
        missing = need - (runs.cells_free * page if page == self.cell else 0)
        stretches: list[tuple[int, int]] = []
        beside: set[tuple[int, int]] = set()
        tokens = 0
        for node in tree.evictor.victims(PAGE_VICTIMS):
            extents = tree.extents(node)
            for i in range(0, len(extents), 2):
                slot, end = extents[i], extents[i] + extents[i + 1]
                start, stop = runs.start_at.get(slot, slot), end + runs.length_at.get(end, 0)
                stretches.append((start, stop))
                beside |= {(start, slot), (end, stop)}
            tokens += tree.length[node]
            if tokens > 4 * missing:
                break
        if page == self.cell:  # the free pages beside them are among the free cells already
            missing += sum(max(0, stop // page + -start // page) for start, stop in beside) * page
        found = low = high = 0
        for start, end in (*sorted(stretches), (self.slots, self.slots)):
            if start > high:
                found += max(0, high // page + -low // page)
                low = start
            high = max(high, end)
        return found * page >= missing

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
        single request pays for a headroom that was used up.  With `ahead`, only where cells are missing.
        """
        runs = self.runs
        goal = cells + self.kept
        own: list[int] = []
        if goal > runs.cells_free and self.yields:
            left = cells
            if cells >= self.runs.long:
                left -= self._hand_on(min(cells, goal - runs.cells_free), kind, group, now, own)
                goal = left + self.kept
            if left and goal > runs.cells_free:
                goal = min(goal, max(left, runs.cells_free + 2 * cells))
                self._evict_cells(goal, now, AHEAD_ROUNDS if self.config.ahead else 1 << 30)
            cells = left
        if cells > runs.cells_free:
            if own:
                self._release(own, sum(own[1::2]), FREE)
            return []
        if not own:
            return runs.take_cells(cells, kind, group)
        return joined(own + runs.take_cells(cells, kind, group) if cells else own)

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

    @property
    def yields(self) -> int:
        """Tokens that a request may evict and use at once; none where they are to be wiped first."""
        return 0 if self.scrubs else self.tree.evictable

    def wipe(self, most: int) -> tuple[int, list[int]]:
        """Up to `most` slots to be wiped now, as flat extents, and the handle for `wiped`; 0: there are none."""
        taken: list[int] = []
        left = most
        while self.dirt and left > 0:
            extents, length = self.dirt.popleft()
            if length > left:
                extents, behind = split_extents(extents, left)
                self.dirt.appendleft((behind, length - left))
                length = left
            taken += extents
            left -= length
        if not taken:
            return 0, taken
        handle = self._handle()
        self.wiping[handle] = (taken, most - left)
        return handle, taken

    def wiped(self, handle: int) -> None:
        """Those slots hold nothing any more of whoever had them: they are free."""
        extents, length = self.wiping.pop(handle)
        self.dirty -= length
        self._release(extents, length, FENCED, wiped=True)

    def shed(self, now: float) -> bool:
        """Where slots are wiped: evicts for the headroom and for who waits, a little; True when there is more to do.

        A request evicts nothing then, since it could not have what it evicts.
        """
        runs = self.runs
        goal = max(self.headroom * self.cell, self.admission.wanted())
        missing = goal - runs.total - self.dirty
        if missing <= 0 or not self.tree.evictable:
            return False
        self._evict(min(missing, SHED, self.tree.evictable), now)
        return missing > SHED and self.tree.evictable > 0

    def evict(self, tokens: int, *, now: float = 0.0) -> int:
        """Evicts at most `tokens` cached tokens that nobody holds, in the policy's order; returns how many went."""
        before = self.evicted_tokens
        if tokens > 0:
            self.admission.drop_window()
            self._evict(min(tokens, self.tree.evictable), now)
        return self.evicted_tokens - before

    def _evict(self, tokens: int, now: float) -> None:
        """Frees `tokens` slots of evictable nodes: leaf first, and of a large leaf only its tail."""
        unit = self.unit
        self.tree.evictor.clock(now)
        goal = self.runs.total + self.dirty + tokens
        while tokens > 0:
            node = self._victim()
            if not node:
                # What lay in a window was set aside for its ticket; that goes before anybody else is let down.
                self.admission.drop_window()
                break
            self._drop(node, tokens if unit == 1 else -(-tokens // unit) * unit)
            tokens = goal - self.runs.total - self.dirty

    def replenish(self, now: float, cells: int = 8, goal: int = 0) -> bool:
        """Evicts until some `cells` more are free, where fewer than `goal` (0: the headroom) are.

        True when there is more to be done.
        """
        if self.scrubs:
            return self.shed(now)
        runs = self.runs
        goal = goal or self.headroom
        if runs.cells_free >= goal or not self.tree.evictable:
            return False
        before = self.evicted_tokens
        self._evict_cells(min(goal, runs.cells_free + cells), now, 1)
        return self.evicted_tokens > before and runs.cells_free < goal

    def gather(self, cells: int, pieces: int = 8) -> bool:
        """Sorts out free runs for a request of `cells` whole cells that is to come, a few at a time; True: not yet.

        They stay free; the request, or another long one, finds them at once.
        """
        return self.admission.window is None and self.runs.gather(cells, pieces)

    def tidy(self, keep: int = 0, pieces: int = 8) -> bool:
        """Files a few of the extents that stand aside among the free runs; True while more than `keep` cells do."""
        return self.runs.unstock(pieces, keep)

    def _evict_cells(self, goal: int, now: float, rounds: int = 1 << 30) -> None:
        """Evicts until `goal` whole cells are free, or so many slots are that their being scattered is to blame.

        At most `rounds` times what is missing.
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
        if not plain:
            rounds *= max(1, goal - runs.cells_free)  # each of them one leaf
        while runs.cells_free < goal and runs.total < most and rounds:
            rounds -= 1
            missing = goal - runs.cells_free
            if plain:
                extents: list[int] = []
                gone = tree.shed(missing * cell, short, slack, extents)
                if gone:
                    self._release(extents, gone, CACHED)
                    self.evicted_tokens += gone
                    continue
            node = self._victim()
            if not node:
                return
            length = lengths[node]
            self._drop(
                node, self._tail_of_cells(node, missing) if length > missing * cell + slack else length
            )

    def _victim(self) -> int:
        """The next leaf to be evicted, among small ones rather one whose death empties a block; 0: there is none."""
        node = self.tree.evictor.oldest()
        return self._emptying(node) if node and self.tree.length[node] < 2 * self.block_size else node

    def _drop(self, node: int, most: int) -> None:
        """Evicts a leaf, or when it is longer than `most` tokens so many from its end."""
        tree = self.tree
        length = tree.length[node]
        if most < length:
            extents, length = tree.trim_tail(node, most), most
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
        for node in tree.evictor.candidates(self.config.emptying):
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

    def _hold_less(self, node: int, end: int) -> int:
        """Turns a hold on `node` into one on its part up to position `end`, so that the rest can be evicted."""
        tree = self.tree
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
            else:
                node = tree.split(node, end - depth[node])
                tree.hold(node)
            tree.unhold(sequence.node, tree.tick[sequence.node])
            sequence.node = node
        return tree.evictable > before

    def _release(self, extents: list[int], length: int, state: int, *, wiped: bool = False) -> None:
        """`length` slots come back to the free runs, or to the ticket in whose window they lie.

        Where slots are wiped first they come twice: as they were left, and `wiped`.
        """
        if self.scrubs and state != FREE and not wiped:
            if self.ledger.recorder is not None:
                self.ledger.recorder.owned(extents, 0)
            if state != FENCED:
                self.ledger.shift_all(extents, length, state, FENCED)
            self.dirt.append((extents, length))
            self.dirty += length
            return
        give = self.runs.give
        window = self.admission.window
        if window is None:
            if state != FREE:
                self.ledger.shift_all(extents, length, state, FREE)
            if len(extents) == 2:
                give(extents[0], length)
                return
            if len(extents) > 2 * self.many and self.config.ahead:
                self.runs.put_aside(extents)
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

    def _handle(self) -> int:
        self.serial += 1
        return self.serial

    def bad_handle(self, handle: int, what: str) -> Exception:
        self.bad_handles += 1
        if handle in self.sequences or any(handle in s.pins for s in self.sessions.values()):
            return ForeignHandle(f"{what} {handle} belongs to another session, or is not a {what}")
        if 0 < handle <= self.serial:
            return EndedHandle(f"{what} {handle} has ended")
        return UnknownHandle(f"no {what} {handle} was ever given out")
