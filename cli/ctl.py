"""`kvslotctl`: the command line for all that is not the daemon itself.

Each subcommand is a module of this room with `add(subparsers)`, which describes its options and sets `handler`, a
function from the parsed arguments to an exit code.  Modules load what they need when their handler runs, so that
`--help` and completion answer at once.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from importlib import import_module
from typing import Final

from kvslot import __version__
from kvslot.cli import _common, completion

COMMANDS: Final = (
    "status", "top", "doctor", "clients", "tenants", "tickets", "map", "tree", "frag", "latency", "settings", "set",
    "reload", "evict", "pin", "unpin", "defrag", "audit", "drain", "docs",
    "record", "replay", "advise", "bench",
)  # fmt: skip
"""Modules of this room, in the order of the help."""

DESCRIPTION: Final = (
    "kvslot: a shared KV-cache pool for LLM servers, with slots for tokens inside every block.\n"
    "Options go behind the command: kvslotctl status --socket ./kvslot.sock"
)

EPILOG: Final = f"""\
examples:
  kvslotctl status                             is the daemon there, and how full is it
  kvslotctl doctor                             what is wrong with it, and what to do
  kvslotctl docs operations                    what to do, by symptom; kvslotctl docs lists all pages
  kvslotctl top                                what it does, live
  kvslotctl map                                its blocks as a picture
  kvslotctl replay --demo                      what slots, sharing and one pool are worth, a minute or two
  kvslotctl replay mix200_a --policy all       one recorded trace under all policies
  kvslotctl replay --help                      all options of a command
  kvslotctl --print-completion bash            completion for your shell (bash, zsh, fish, tcsh)

{_common.EXIT_CODES}"""


def parser() -> argparse.ArgumentParser:
    """The whole command line, with every command this installation has."""
    top = _common.Parser(
        prog="kvslotctl",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"kvslotctl {__version__}")
    completion.add_to(top)
    commands = top.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = f"kvslot.cli.{name}"
        try:
            add = import_module(module).add
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            continue  # a build without this command
        add(commands)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code is returned.  argparse exits by itself on --help and wrong usage."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- started with standard output closed
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a name from elsewhere must not end a command on an ASCII terminal
    try:
        arguments = parser().parse_args(argv)
        code: int = arguments.handler(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _common.INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head`): nobody to tell.  Keep the interpreter from flushing into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _common.OK


if __name__ == "__main__":
    sys.exit(main())
