"""What the commands share: exit codes, the progress bar, and where `--json` goes."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

OK: Final = 0
FAILED: Final = 1
"""Something that was to be checked does not hold (a budget under --strict, an audit)."""
USAGE: Final = 2
BAD_INPUT: Final = 3
"""A file cannot be read, or does not hold what it should."""
FAULT: Final = 4
"""Ours: please report it."""
UNREACHABLE: Final = 5
"""No daemon answers, or it does not let this user ask."""
INTERRUPTED: Final = 130

EXIT_CODES: Final = """\
exit codes:
  0  done                          3  a file cannot be read, or is malformed
  1  a check does not hold         4  a fault of kvslot itself
  2  wrong usage                   5  no daemon there, or it refuses this user
                                 130  interrupted
"""

BAR_AFTER_S: Final = 1.0
"""What is over sooner shows no bar."""
BAR_EVERY_S: Final = 0.2
"""Five pictures a second look live, and cost the measured work next to nothing."""


class Subparsers(Protocol):
    """What `add_subparsers` returns, as far as commands need it."""

    def add_parser(
        self,
        name: str,
        *,
        help: str,  # noqa: A002 -- argparse's name
        description: str,
        epilog: str,
        formatter_class: type[argparse.HelpFormatter],
    ) -> argparse.ArgumentParser: ...


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json [FILE]`: machine-readable output, on stdout without FILE."""
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        default=None,
        metavar="FILE",
        help="write the result as JSON, to FILE or (instead of the table) to stdout",
    )


def write_json(data: bytes, where: str) -> None:
    """To stdout for "-", else to that file, whose folder is made."""
    if where == "-":
        # As bytes: JSON is UTF-8 whatever the terminal speaks.
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    path = Path(where)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


class Bar:
    """A progress bar on stderr: only on a terminal, and only once the work has taken longer than a second.

    It draws when told of progress, from the caller's thread: a thread of its own would take time from what is being
    measured."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._drawn = 0.0
        self._wanted = sys.stderr.isatty()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def report(self, words: str, share: float) -> None:
        """What is going on, and the share of all work done, 0..1."""
        if not self._wanted:
            return
        now = time.monotonic()
        if now - self._began < BAR_AFTER_S or now - self._drawn < BAR_EVERY_S:
            return
        self._drawn = now
        if self._progress is None:
            self._start()
        assert self._progress is not None
        assert self._task is not None
        self._progress.update(self._task, completed=share, description=words)
        self._progress.refresh()

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TaskProgressColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task("", total=1.0)
        self._progress.start()
