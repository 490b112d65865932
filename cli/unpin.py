"""`kvslotctl unpin`: ends pins that operators made."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from kvslot.cli import _common, _control
from kvslot.cli.pin import pins

if TYPE_CHECKING:
    from kvslot.api.client import Control

DESCRIPTION: Final = """\
End pins of `kvslotctl pin`, by their numbers, or all of them: what they kept may be evicted again, and stays cached
until its memory is wanted. Pins of sessions end with those, or by the engine that made them."""

EXAMPLES: Final = """\
  kvslotctl pin                                lists them
  kvslotctl unpin 4711
  kvslotctl unpin all --pool default --json
"""


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    parser = _control.add_command(subparsers, "unpin", "end pins of `pin`", DESCRIPTION, EXAMPLES, run)
    parser.add_argument("pins", metavar="PIN", nargs="+", type=_pin, help="a number that pin lists, or all")


def _pin(text: str) -> int:
    if text == "all":
        return 0
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither the number of a pin nor all")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""

    def act(control: Control) -> int:
        from kvslot.api.client import NotFound

        there = pins(control, arguments.pool)
        ending = there if 0 in arguments.pins else [row for row in there if row["pin"] in arguments.pins]
        unknown = {pin for pin in arguments.pins if pin} - {row["pin"] for row in there}
        if unknown:
            known = ", ".join(str(row["pin"]) for row in there) or "none"
            raise NotFound(f"no pin {min(unknown)}; there are {known}")
        pools = {row["pool"] for row in ending}
        if len({row["pin"] for row in ending}) < len(ending) and 0 not in arguments.pins:
            return _control.fail(
                arguments,
                f"pools {', '.join(sorted(pools))} have pins of that number: say which with --pool",
                _common.USAGE,
            )
        rows = []
        for row in ending:
            control.unkeep(row["pin"], pool=row["pool"])
            rows.append({"pool": row["pool"], "pin": row["pin"], "tokens": row["tokens"]})
        code = _common.OK
        if arguments.json is not None:
            code = _control.write(arguments, control, {"rows": rows})
        if arguments.json != "-" and not code:
            tokens = sum(row["tokens"] for row in rows)
            ended = _common.several(len(rows), "pin")
            print(
                f"ended {ended} that kept {_common.several(tokens, 'token')}"
                if rows
                else "nothing was pinned"
            )
        return code

    return _control.ask(arguments, act)
