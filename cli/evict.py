"""`kvslotctl evict`: frees cached prefixes that nobody reads, least valuable first."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Final

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    from kvslot.api.client import Control

DESCRIPTION: Final = """\
Evict cached prefixes that nobody reads and no pin keeps, in the order in which the daemon itself would. What running
sequences hold stays. Serving goes on meanwhile: the daemon is asked for a little at a time."""

EXAMPLES: Final = """\
  kvslotctl evict 10000                        about ten thousand tokens
  kvslotctl evict 25%                          a quarter of the pool's slots
  kvslotctl evict all --pool default --json
"""

EACH: Final = 4096
"""Tokens asked for at a time, so that the bar moves; the daemon itself ends each request after 0.4 ms."""

_AMOUNT: Final = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[kM%]?)")
_UNITS: Final = {"": 1, "k": 1000, "M": 1_000_000}


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    parser = _control.add_command(
        subparsers, "evict", "free cached prefixes that nobody reads", DESCRIPTION, EXAMPLES, run
    )
    parser.add_argument(
        "amount", metavar="TOKENS", type=_amount, help="a count (20000, 20k, 1.5M), a share (25%%), or all"
    )


def _amount(text: str) -> str:
    found = _AMOUNT.fullmatch(text.replace("_", ""))
    if text != "all" and found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a count like 20k, nor a share like 25%, nor all"
        )
    if found and found["unit"] == "%" and float(found["number"]) > 100:
        raise argparse.ArgumentTypeError(f"{text} is more than all of a pool")
    return text.replace("_", "")


def tokens_of(amount: str, usable: int) -> int:
    """`amount` in tokens, of a pool with `usable` slots."""
    found = _AMOUNT.fullmatch(amount)
    if found is None:
        return usable
    number = float(found["number"])
    return int(usable * number / 100) if found["unit"] == "%" else int(number * _UNITS[found["unit"]])


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""

    def act(control: Control) -> int:
        pools = _control.pools(control, arguments.pool)
        if len(pools) > 1:
            names = ", ".join(pool["pool"] for pool in pools)
            return _control.fail(
                arguments, f"there are several pools ({names}): say which with --pool", _common.USAGE
            )
        (pool,) = pools
        wanted = tokens_of(arguments.amount, pool["usable"])
        gone = _evict(control, pool["pool"], wanted)
        (after,) = _control.pools(control, pool["pool"])
        row = {
            "pool": pool["pool"],
            "asked": wanted,
            "evicted": gone,
            "evictable_left": after["evictable"],
            "free": after["free"],
        }
        code = _common.OK
        if arguments.json is not None:
            code = _control.write(arguments, control, {"rows": [row]})
        if arguments.json != "-" and not code:
            less = "" if gone >= wanted else _why(after)
            asked = "" if gone >= wanted or arguments.amount == "all" else f" of {wanted:,}"
            evicted = _common.several(gone, "token")
            print(f"{pool['pool']}: evicted {evicted}{asked}{less}; {after['free']:,} slots are free")
        return code

    return _control.ask(arguments, act)


def _why(pool: _control.Row) -> str:
    """Why no more could go, by what a pool still holds."""
    if not pool["cached"]:
        return ": no more is cached"
    if pool["evictable"]:
        return ": more can go; ask again"
    held = _common.several(pool["cached"], "cached token")
    pins = f", {pool['pinned']:,} of them by pins" if pool["pinned"] else ""
    return (
        f": the {held} left {'is' if pool['cached'] == 1 else 'are'} held by running sequences or pins{pins}"
    )


def _evict(control: Control, pool: str, wanted: int) -> int:
    gone = 0
    with _common.Bar() as bar:
        while gone < wanted:
            more = control.evict(min(EACH, wanted - gone), pool=pool)
            if more <= 0:
                break
            gone += more
            bar.report("evicting", min(1.0, gone / wanted))
    return gone
