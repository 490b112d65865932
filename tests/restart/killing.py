"""A daemon under a service manager, and what it says of its starts."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvslot.api.wire.messages import Audit

from ..faults.actors import child
from ..systemd.supervisor import Supervisor
from ..tools.daemon import configuration
from ..tools.wire import Wire
from .engines import returning

ENGINES = 3


class Kept:
    """A daemon whose pools outlive it."""

    def __init__(self, folder: Path, **manager: Any) -> None:
        self.folder = folder
        self.faulty = False  # it was made to fail, and may say so
        self.socket = folder / "s"
        self.file = folder / "kvslot.toml"
        self.manager = Supervisor(
            [sys.executable, "-Im", "kvslot.daemon", "--config", str(self.file)],
            sockets={"kvslot": self.socket}, log=folder / "log", **manager,
        )  # fmt: skip

    def configure(self, pools: list[dict[str, Any]], **settings: Any) -> None:
        """From its next start on."""
        settings = {"log_format": "json", "drain_seconds": 2.0, "admin": False, **settings}
        self.file.write_text(configuration(self.socket, pools, settings))

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Lines of its log of these kinds, over all its lives."""
        found = []
        for line in self.manager.text().splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if row.get("event") in names:
                    found.append(row)
        return found


@contextmanager
def kept(
    pools: list[dict[str, Any]] | None = None, *, settings: Any = None, **manager: Any
) -> Iterator[Kept]:
    """One that serves; nothing in its log may be a fault of its own."""
    folder = Path(tempfile.mkdtemp(prefix="kvk"))
    try:
        daemon = Kept(folder, **manager)
        with daemon.manager:
            daemon.configure(pools or [{}], **(settings or {}))
            daemon.manager.start()
            yield daemon
            text = daemon.manager.text()
            assert daemon.faulty or "internal_fault" not in text, text[-8000:]
            assert daemon.faulty or "Traceback" not in text, text[-8000:]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Seen(NamedTuple):
    """What engines did while their daemons were killed."""

    acts: int
    returns: int
    strange: int  # returns to nothing
    gone_on: int  # sequences that went on where they stood


def kill_under_load(kills: int, seed: int) -> Seen:
    """Kills a daemon so often while engines work."""
    draw = random.Random(seed)
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(kept([{"blocks": 129}]))
        engines = [
            stack.enter_context(child(returning(daemon.socket, seed * 100 + number), seconds=60 + 10 * kills))
            for number in range(ENGINES)
        ]
        last = [[0, 0, 0, 0, 0] for _ in engines]
        for _ in range(kills):
            # Most have come back by then and done something, and some are just about to.
            if draw.random() < 0.8:
                for index, engine in enumerate(engines):
                    before = last[index]
                    while last[index][0] <= before[0] + 20 * draw.randrange(1, 4):
                        last[index] = engine.heard(60.0)
            daemon.manager.kill()
        with Wire(daemon.socket) as wire:
            boot = wire.hello("auditor").boot
        for index, engine in enumerate(engines):
            while last[index][3] != boot:
                last[index] = engine.heard(60.0)
        starts = daemon.events("warm_start", "cold_start")
        assert [each["event"] for each in starts] == ["cold_start", *["warm_start"] * kills], starts
        assert not any(each["lost"] for each in starts[1:]), starts
        assert sum(each["tokens"] for each in starts[1:]) > 0
        with Wire(daemon.socket) as wire:
            audited = wire.call(Audit)
            assert not audited.faults, audited.faults
        return Seen(*(sum(each[i] for each in last) for i in (0, 1, 2, 4)))
