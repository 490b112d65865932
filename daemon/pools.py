"""A pool as the daemon hosts it: the core that decides, the memory it decides about, and how clients are told of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvslot.allocator import UNLIMITED, Pool, PoolConfig, Space
from kvslot.api.wire import messages
from kvslot.daemon.identity import OTHERS
from kvslot.daemon.journal.states import States
from kvslot.daemon.keeper import Keeper
from kvslot.daemon.lengths import Lengths

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvslot.daemon.config import PoolSettings, TenantSettings
    from kvslot.daemon.device.memory import MemoryDevice
    from kvslot.daemon.journal.warm import Journaled
    from kvslot.daemon.layout import Layout
    from kvslot.daemon.membership import Member
    from kvslot.daemon.scrub import Scrubber


class HostedPool:
    """One pool of the daemon's.

    `users` counts the sessions that have a namespace open, so that one which nobody uses and nothing is cached in can
    be closed again.  Until then it counts for its tenant, and for the user who was the first to open it (`owners`); one
    that came back over a restart, for whoever opens it next.
    """

    def __init__(
        self, settings: PoolSettings, layout: Layout, config: PoolConfig, device: MemoryDevice
    ) -> None:
        self.name = settings.name
        self.settings = settings
        self.layout = layout
        self.device = device
        self.core = Pool(config)
        self.members: dict[int, Member] = {}  # by session handle, the lost among them
        self.users: dict[int, int] = {}
        self.owners: dict[int, int] = {}
        self.owned: Counter[int] = Counter()  # by user
        self.fencing: set[Member] = set()  # those with fences that have not passed
        self.scrubber: Scrubber | None = None  # where slots are wiped before they are free
        self.gathering = 0  # cells that postponed requests will take
        self.lengths = Lengths()
        core = self.core
        self.keeper = Keeper(core)
        states = States(core.slots, core.padding)
        core.ledger.journal, core.ledger.journal_all = states.shift, states.shift_all
        self.states = states.view  # of every slot, by address: see journal/states.py
        self.journal: Journaled | None = None  # where it outlives the process
        self.description = messages.Pool(
            name=self.name,
            granularity=layout.granularity,
            blocks=config.blocks,
            block_size=config.block_size,
            padding=core.padding,
            usable=core.usable,
            quantum=core.quantum,
            windowed=config.windowed,
            fingerprint=layout.fingerprint,
            size_bytes=device.export().size_bytes,
            generation=device.export().generation,
            kind="memfd",
            planes=layout.place(core.slots),
            append=config.append,
        )

    def limit(self, tenants: Sequence[TenantSettings]) -> Iterator[None]:
        """Gives each tenant that is listed its account, and takes the limits off those that are no more.

        Namespaces that are open come under the account of the tenant that they belong to by now.  A little at a time:
        between two steps anything else may be done.
        """
        core = self.core
        listed = {each.name: each for each in tenants}
        before = set(core.accounts)
        for name in (*before, None):
            if (OTHERS if name is None else name) not in listed:
                core.unlimit(name)
                yield
        for name, each in listed.items():
            yield
            core.limit(
                None if name == OTHERS else name,
                slots=each.slots or UNLIMITED,
                runs=each.reserved_runs or UNLIMITED,
                pins=each.pins or UNLIMITED,
            )
        if before == set(core.accounts):
            return
        # Those that are opened from here on come under the right ones by themselves.
        strays: list[int] = []
        for root in list(core.roots):
            if core.unsettled(root):
                strays.append(root)
            yield
        core.resettle(strays)

    def open(self, space: Space, user: int) -> int:
        """The namespace, for a session that is about to `enter` it."""
        root = self.core.open_space(space)
        self.users.setdefault(root, 0)
        if root not in self.owners:
            self.owners[root] = user
            self.owned[user] += 1
        return root

    def enter(self, root: int) -> None:
        """One more session uses the namespace."""
        self.users[root] = self.users.get(root, 0) + 1

    def leave(self, roots: dict[int, None]) -> None:
        """A session has ended that used these."""
        for root in roots:
            self.users[root] -= 1
            self.close_if_idle(root)

    def close_if_idle(self, root: int) -> bool:
        """Ends a namespace that nobody has open and nothing is cached in; false where it has to stay."""
        core = self.core
        if self.users[root] or core.tree.kid[root] or core.tree.holds[root] > 1:
            return False
        core.close_space(root)
        del self.users[root]
        owner = self.owners.pop(root, None)
        if owner is not None:
            self.owned[owner] -= 1
            if not self.owned[owner]:
                del self.owned[owner]
        return True

    def close_idle_spaces(self, most: int = 64) -> None:
        """Ends namespaces that nobody has open and nothing is cached in, `most` looked at a call."""
        idle = [root for root, users in self.users.items() if not users]
        for root in idle[:most]:
            if not self.close_if_idle(root):
                # To the end of the line, so that all have their turn.
                self.users[root] = self.users.pop(root)
