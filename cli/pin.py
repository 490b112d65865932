"""`kvslotctl pin`: keeps a cached prefix from being evicted, or lists what is kept so."""

from __future__ import annotations

import argparse
import re
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    from kvslot.api.client import Control

DESCRIPTION: Final = """\
Keep a cached prefix: it is not evicted until `kvslotctl unpin`, or until the daemon ends. Name it as `kvslotctl tree`
lists it, by its node and its end (`12 500` for the prefix at node 12 that spans 0..500), which tells it from another
that may have come in its place; or by the tokens themselves, of which what is cached is kept. All pins together keep at
most pin_share of a pool. Without arguments: the pins that there are; those of sessions stand in `kvslotctl clients`."""

EXAMPLES: Final = """\
  kvslotctl pin                                what is pinned, and by whom
  kvslotctl tree --top 5; kvslotctl pin 12 500
  kvslotctl pin --tokens system-prompt.json --model 7f3a --tenant acme
  kvslotctl pin 12 500 --json | jq .rows[0].pin
"""

TOKEN: Final = struct.Struct("<i")
_NUMBER: Final = re.compile(r"-?\d+")


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    parser = _control.add_command(
        subparsers, "pin", "keep a cached prefix, or list what is kept", DESCRIPTION, EXAMPLES, run
    )
    parser.add_argument("node", metavar="NODE", nargs="?", type=_number, help="as kvslotctl tree lists it")
    parser.add_argument("end", metavar="END", nargs="?", type=_number, help="where its prefix ends")
    by = parser.add_argument_group("by tokens", "the names are those that engines open their namespace with")
    tokens = by.add_argument(
        "--tokens",
        metavar="FILE",
        help="token ids as text (JSON or one after the other); - is standard input",
    )
    _common.takes_file(tokens)
    for name in ("tenant", "model", "adapter", "salt"):
        by.add_argument(f"--{name}", default="", metavar="NAME", help=f"{name} of the namespace ('')")


def _number(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""
    named = [f"--{name}" for name in ("tenant", "model", "adapter", "salt") if getattr(arguments, name)]
    if arguments.tokens is None and named:
        return _control.fail(arguments, f"{named[0]} goes with --tokens FILE", _common.USAGE)
    if arguments.tokens is not None and arguments.node is not None:
        return _control.fail(arguments, "give a node or --tokens, not both", _common.USAGE)
    if arguments.node is not None and arguments.end is None:
        return _control.fail(
            arguments,
            f"say where the prefix of node {arguments.node} ends: kvslotctl tree lists both",
            _common.USAGE,
        )
    tokens = b""
    if arguments.tokens is not None:
        try:
            tokens = tokens_of(_read(arguments.tokens))
        except OSError as error:
            return _control.fail(
                arguments, f"cannot read {arguments.tokens}: {error.strerror}", _common.BAD_INPUT
            )
        except (ValueError, struct.error) as error:
            return _control.fail(arguments, f"{arguments.tokens}: {error}", _common.BAD_INPUT)

    def act(control: Control) -> int:
        if arguments.node is None and arguments.tokens is None:
            return _list(arguments, control)
        return _keep(arguments, control, tokens)

    return _control.ask(arguments, act)


def _read(name: str) -> str:
    if name == "-":
        return sys.stdin.read()
    return Path(name).read_text(encoding="utf-8", errors="replace")


def tokens_of(text: str) -> bytes:
    """Token ids out of text, as the wire has them; brackets, commas and line ends between them are all the same.

    ValueError for what is no list of numbers, struct.error for one that is no int32.
    """
    rest = _NUMBER.sub("", text).strip("[](){} \t\r\n,;")
    if rest.strip("[](){} \t\r\n,;"):
        raise ValueError(f"not a list of token ids: {rest.split()[0][:20]!r} is in it")
    found = b"".join(TOKEN.pack(int(each)) for each in _NUMBER.findall(text))
    if not found:
        raise ValueError("no token id is in it")
    return found


def _keep(arguments: argparse.Namespace, control: Control, tokens: bytes) -> int:
    from kvslot.api.client import Namespace

    pool = only_pool(control, arguments.pool)
    if tokens:
        space = Namespace(arguments.tenant, arguments.model, arguments.adapter, arguments.salt)
        told = control.keep(namespace=space, tokens=tokens, pool=pool)
    else:
        told = control.keep(node=arguments.node, length=arguments.end, pool=pool)
    asked = len(tokens) // 4 or arguments.end
    row = {"pool": pool, "pin": told.pin, "tokens": told.length, "asked": asked}
    code = _common.OK
    if arguments.json is not None:
        code = _control.write(arguments, control, {"rows": [row]})
    if arguments.json != "-" and not code:
        several = f" --pool {pool}" if arguments.pool else ""
        kept = _common.several(told.length, "token")
        part = f" of {asked:,}, as no more is cached" if told.length < asked else ""
        print(f"{pool}: pin {told.pin} keeps {kept}{part}; kvslotctl unpin {told.pin}{several} ends it")
    return code


def only_pool(control: Control, name: str) -> str:
    """The pool that is meant; BadRequest where there are several and none is named."""
    from kvslot.api.client import BadRequest

    pools = [pool["pool"] for pool in _control.pools(control, name)]
    if len(pools) > 1:
        raise BadRequest(f"there are several pools ({', '.join(pools)}): say which with --pool")
    return str(pools[0])


def pins(control: Control, pool: str) -> list[_control.Row]:
    """Operators' pins of one pool, or of all."""
    found: list[dict[str, Any]] = []
    for each in _control.pools(control, pool):
        found += [{"pool": each["pool"], **row} for row in control.inspect("pins", pool=each["pool"])]
    return found


def _list(arguments: argparse.Namespace, control: Control) -> int:
    rows = pins(control, arguments.pool)
    if arguments.json is not None:
        code = _control.write(arguments, control, {"rows": rows})
        if code or arguments.json == "-":
            return code
    from kvslot.cli import _screen
    from kvslot.cli.tree import space_name

    out = _screen.console()
    if not rows:
        out.print("nothing is pinned by operators")
        return _common.OK
    names = {
        (pool, space["namespace"]): space_name(space)
        for pool in {row["pool"] for row in rows}
        for space in control.inspect("namespaces", pool=pool)
    }
    table = _screen.table("pin", "pool", "tokens", "for", "by", "namespace", left=("pool", "by", "namespace"))
    for row in rows:
        table.add_row(
            str(row["pin"]),
            row["pool"],
            f"{row['tokens']:,}",
            _screen.duration(row["age_s"]),
            _screen.words(row["by"]),
            names.get((row["pool"], row["namespace"])) or f"namespace {row['namespace']}",
        )
    out.print(table)
    return _common.OK
