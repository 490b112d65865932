"""What the commands share: exit codes, how wrong usage is told, the progress bar, and where `--json` goes."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, NoReturn, Protocol, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Result = TypeVar("Result")

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
LINE_EVERY_S: Final = 10.0
"""Where there is no terminal: lines, so that whoever reads a log sees that it goes on and how far it is."""
LINE_SHARE: Final = 1 / 30
"""Of the time so far: what takes hours needs no line every ten seconds."""


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


class Parser(argparse.ArgumentParser):
    """Tells wrong usage in two lines: what is wrong and what was meant, and where the help is.

    argparse prints the usage of the whole command, which for twenty options is a screenful, and lets the parser of
    `kvslotctl` complain about options of its commands."""

    # argparse declares two forms, the other for namespaces of one's own; `kvslotctl` has none.
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self._check_first(sys.argv[1:] if args is None else args)
        found, extra = super().parse_known_args(args, namespace)
        assert found is not None
        if extra:
            wrong = next((word for word in extra if word.startswith("-") and len(word) > 1), extra[0])
            name, mark, value = wrong.partition("=")
            options = [option for action in self._actions for option in action.option_strings]
            if not name.startswith("-"):
                self.error(f"{wrong!r} is one argument too many")
            hint = near(name, options)
            self.error(
                f"there is no option {name}" + (f"; did you mean {hint}{mark}{value}?" if hint else "")
            )
        return found, extra

    def _check_first(self, args: Sequence[str]) -> None:
        """Where commands follow, an option of theirs that stands before them is told where it belongs."""
        commands = next(
            (each for each in self._actions if isinstance(each, argparse._SubParsersAction)), None
        )
        if commands is None or not args or not args[0].startswith("-"):
            return
        name = args[0].partition("=")[0]
        if name in self._option_string_actions:
            return
        for parser in commands.choices.values():
            if name in parser._option_string_actions:
                chosen = next((word for word in args if word in commands.choices), commands.metavar)
                self.error(
                    f"options go behind the command: {self.prog} {chosen} {' '.join(_option(args, chosen))}"
                )

    def error(self, message: str) -> NoReturn:
        """Exit code 2."""
        chosen = re.fullmatch(
            r"(argument [^:]+): invalid choice: '([^']*)' \(choose from (.*)\)", message, re.DOTALL
        )
        if chosen is not None:
            where, word, known = chosen.groups()
            choices = [each.strip().strip("'") for each in known.split(",")]
            hint = near(word, choices)
            message = f"{where}: there is no {word!r}; " + (
                f"did you mean {hint}?" if hint else f"there are {', '.join(choices)}"
            )
        message = re.sub(r"invalid \w+ value: ", "cannot take ", message)  # the name of a function of ours
        self.exit(USAGE, f"{self.prog}: {message}\nSee {self.prog} --help\n")


class Suggested:
    """What the shell may complete an argument with; what is no such word is for the command to refuse.

    `words` is called when somebody asks, which is when a completion script is made: naming traces or settings takes
    loading what knows them.
    """

    def __init__(self, words: Callable[[], Iterable[str]]) -> None:
        self._words = words

    def __iter__(self) -> Iterator[str]:
        return iter(self._words())

    def __contains__(self, word: object) -> bool:
        return True


def near(word: str, known: Iterable[str]) -> str:
    """What was meant, if anything is close enough; else ""."""
    found = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else ""


def _option(args: Sequence[str], chosen: object) -> list[str]:
    """The option at the front, and its value where one stands before the command."""
    return [args[0], *args[1:2]] if len(args) > 1 and args[1] != chosen and args[1][:1] != "-" else [args[0]]


def several(number: int, one: str, many: str = "") -> str:
    """ "1 request", "2,000 requests"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def takes_file(option: argparse.Action) -> None:
    """Shells complete what comes behind it as the name of a file."""
    import shtab

    option.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab looks for it on the action


def add_json(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """`--json [FILE]`: machine-readable output, on stdout without FILE."""
    option = parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        default=None,
        metavar="FILE",
        help="write the result as JSON, to FILE or (instead of the table) to stdout",
    )
    takes_file(option)


def check_writable(where: str | None) -> None:
    """Before the work whose result is to go there.  "-" and None are no files.  No folder is made: a typing error
    should not leave one behind.  Raises OSError, with the name, if it could not be written."""
    if where in (None, "-"):
        return
    path = Path(where)
    problem = 0
    if path.is_dir():
        problem = errno.EISDIR
    elif path.exists():
        problem = 0 if os.access(path, os.W_OK) else errno.EACCES
    elif not path.parent.exists():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {path.parent}; make it first", where)
    elif not path.parent.is_dir():
        problem = errno.ENOTDIR
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        problem = errno.EACCES
    if problem:
        raise OSError(problem, os.strerror(problem), where)


def write_json(data: bytes, where: str) -> None:
    """To stdout for "-", else to that file."""
    if where == "-":
        # As bytes: JSON is UTF-8 whatever the terminal speaks.
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    Path(where).write_bytes(data)


class Lines:
    """Says now and then, to what is no terminal, how far it is: the first time when work has taken ten seconds."""

    def __init__(self) -> None:
        self._began = self._said = time.monotonic()

    def report(self, words: str, share: float | None = None) -> None:
        """As `Bar.report`; a line on stderr when it is time for one."""
        now = time.monotonic()
        passed = now - self._began
        if now - self._said < max(LINE_EVERY_S, passed * LINE_SHARE):
            return
        self._said = now
        minutes, seconds = divmod(int(passed), 60)
        done = "" if share is None else f"{min(max(share, 0.0), 1.0):4.0%} "
        print(f"{done}{minutes:3}:{seconds:02}  {words}", file=sys.stderr, flush=True)


class Bar:
    """A progress bar on stderr once the work has taken longer than a second; where that is no terminal, `Lines`.

    It draws when told of progress, from the caller's thread: a thread of its own would take time from what is being
    measured."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._drawn = 0.0
        self._wanted = sys.stderr.isatty()
        self._lines = Lines()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def report(self, words: str, share: float | None) -> None:
        """What is going on, and the share of all work done, 0..1; None: nobody knows."""
        if not self._wanted:
            self._lines.report(words, share)
            return
        now = time.monotonic()
        if now - self._began < BAR_AFTER_S or now - self._drawn < BAR_EVERY_S:
            return
        self._drawn = now
        if self._progress is None:
            self._start()
        assert self._progress is not None
        assert self._task is not None
        self._progress.update(
            self._task, completed=share or 0.0, total=None if share is None else 1.0, description=words
        )
        self._progress.refresh()

    def during(self, words: str, act: Callable[[], Result]) -> Result:
        """Does `act`, which tells of no progress, in a thread while the bar shows that something goes on.

        Without a terminal it is simply called.  ^C ends the wait, not the act: that thread keeps no process alive.
        """
        if not self._wanted:
            return act()
        import threading

        done: list[Result] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                done.append(act())
            except BaseException as error:  # noqa: BLE001 -- raised again by who waits
                failed.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(BAR_EVERY_S)
            self.report(words, None)
        if failed:
            raise failed[0]
        return done[0]

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
