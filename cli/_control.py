"""What the commands that ask a daemon share: where it is, what goes wrong on the way, and the shape of their JSON.

    {"meta": {"command", "version", "socket", "time"}, ...}     keys never change their meaning; new ones may come

What a command prints, it asks for once, at its beginning: a listing of many pages is a picture taken over some
milliseconds of a daemon that goes on serving.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvslot.cli import _common

if TYPE_CHECKING:
    from kvslot.api.client import Control

Row = dict[str, Any]

SOCKET_HELP: Final = """\
the daemon's socket; unless given it is $KVSLOT_SOCKET, $XDG_RUNTIME_DIR/kvslot/kvslot.sock, or for root
/run/kvslot/kvslot.sock"""

PATIENCE_S: Final = 30.0
"""An answer takes milliseconds; after so long the daemon does not answer."""


def add_command(
    subparsers: _common.Subparsers,
    name: str,
    words: str,
    description: str,
    examples: str,
    handler: Callable[[argparse.Namespace], int],
    *,
    pool: bool = True,
) -> argparse.ArgumentParser:
    """A command with --socket, --json and, where it asks about one, --pool."""
    parser = subparsers.add_parser(
        name,
        help=words,
        description=description,
        epilog=f"examples:\n{examples}\n{_common.EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handler=handler)
    socket = parser.add_argument("--socket", default="", metavar="PATH", help=SOCKET_HELP)
    _common.takes_file(socket)
    if pool:
        parser.add_argument("--pool", default="", metavar="NAME", help=pool_help(name))
    _common.add_json(parser)
    return parser


def pool_help(command: str) -> str:
    """What `--pool` means there."""
    if command in ("map", "tree", "tickets"):
        return "the pool to show (the first one)"
    if command == "defrag":
        return "only this pool (all)"
    if command in ("record", "advise"):
        return "the pool to record; needed where there are several"
    if command == "pin":
        return "the pool to pin in, needed where there are several; to list: only this pool (all)"
    if command == "evict":
        return "the pool to evict from; needed where there are several"
    return "only this pool (all)"


def ask(arguments: argparse.Namespace, act: Callable[[Control], int], *, patience: float = PATIENCE_S) -> int:
    """Connects, runs `act` and turns what goes wrong into one line on stderr and an exit code."""
    from kvslot.api.client import default_socket
    from kvslot.api.wire import (
        BadRequest,
        Denied,
        Disconnected,
        KvslotError,
        NotFound,
        PeerFault,
        Unsupported,
    )

    try:
        _common.check_writable(arguments.json)
    except OSError as error:
        return fail(arguments, f"cannot write {arguments.json}: {error.strerror}", _common.BAD_INPUT)
    from kvslot.cli import reach

    try:
        with reach.connected(arguments.socket, patience) as control:
            return act(control)
    except Denied as error:
        return fail(
            arguments,
            f"the daemon does not let this user look or act: {error} "
            "(run as its user or root, or name this user in control_uids)",
            _common.UNREACHABLE,
        )
    except (NotFound, BadRequest) as error:
        return fail(arguments, str(error), _common.USAGE)
    except Unsupported as error:
        return fail(arguments, f"this daemon does not know how to: {error}", _common.UNREACHABLE)
    except PeerFault as error:
        if "speaks HTTP" in str(error):
            why = reach.is_admin(arguments.socket or default_socket())
            return fail(arguments, why.text(), _common.UNREACHABLE)
        return fail(arguments, f"{error}; is it a kvslotd, of this version?", _common.UNREACHABLE)
    except Disconnected as error:
        # One that was stopped while it was asked has been waited for; why it did not answer is known now.
        late = isinstance(error.__cause__, BlockingIOError) and not isinstance(error, reach.Silent)
        halted = reach.halted(arguments.socket or default_socket()) if late else None
        return fail(arguments, f"{error}: {halted.text()}" if halted else str(error), _common.UNREACHABLE)
    except KvslotError as error:
        return fail(arguments, f"the daemon refused: {error}", _common.UNREACHABLE)


def fail(arguments: argparse.Namespace, why: str, code: int) -> int:
    """One line on stderr; returns `code`."""
    line = "".join(each if each.isprintable() else "?" for each in " ".join(why.split()))
    print(f"kvslotctl {arguments.command}: {line}", file=sys.stderr)
    return code


def write(arguments: argparse.Namespace, control: Control, document: Row) -> int:
    """Writes `document` where --json says, headed by `meta`; the exit code."""
    return write_document(arguments, control.socket, document)


def write_document(arguments: argparse.Namespace, socket: str, document: Row) -> int:
    """As `write`, also where no daemon answered at `socket`."""
    import msgspec

    from kvslot import __version__

    meta = {
        "command": arguments.command,
        "version": __version__,
        "socket": socket,
        "time": round(time.time(), 3),
    }
    encoded = msgspec.json.format(msgspec.json.encode({"meta": meta, **document}), indent=2) + b"\n"
    try:
        _common.write_json(encoded, arguments.json)
    except BrokenPipeError:
        raise
    except OSError as error:
        return fail(arguments, f"cannot write {arguments.json}: {error.strerror}", _common.BAD_INPUT)
    return _common.OK


def pools(control: Control, name: str = "") -> list[Row]:
    """The row of one pool, or of all; NotFound names those there are."""
    return list(control.inspect("pools", pool=name))
