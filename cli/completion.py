"""`kvslotctl --print-completion SHELL`: what the shells complete, by shtab out of the parsers.

shtab shows the first line of each command's description, cut off in mid-sentence, and repeats an argument's whole help
beside each of its words.  So it is given copies of the short words instead: this process prints, and ends.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

SHELLS = ("bash", "zsh", "fish", "tcsh")
"""Those that are tried out by tests, and tcsh."""


class PrintCompletion(argparse.Action):
    """Prints the script for the shell that is named, and ends."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        import shtab

        shorten(parser)
        print(shtab.complete(parser, shell=str(values)))
        parser.exit(0)


def shorten(parser: argparse.ArgumentParser) -> None:
    """Words that fit beside a candidate: the list of commands has them; what has choices is named, not explained."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action._choices_actions:
                command = action.choices[each.dest]
                command.description = each.help
                shorten(command)
        elif not action.option_strings and action.choices is not None:
            action.help = str(action.metavar or action.dest).lower()


def add_to(parser: argparse.ArgumentParser) -> None:
    """The option."""
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        metavar="SHELL",
        help=f"print a script that makes the shell complete: {', '.join(SHELLS)}",
    )
