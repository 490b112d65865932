"""`kvslotctl tree`: what is cached, as a tree of prefixes: the largest, the most read, or the latest used.

A node's figures are those of its whole subtree, so a parent never comes behind its children, and the best N prefixes
always hang together.  A chain of nodes without branches (turns of one conversation) is one line.  Tokens are not shown:
the daemon does not tell them to anybody.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    from rich.console import Console

    from kvslot.api.client import Control

DESCRIPTION: Final = """\
What is cached, as a tree of prefixes, one line a prefix: the positions it spans, then the figures of all that begins
with it: tokens cached, ends (prefixes that nothing continues), readers (leases and pins that end there), age (how many
publications and releases ago it was last used), pieces of memory its own tokens lie in, and the node it ends with, by
which `kvslotctl pin` keeps it. A prefix marked * is held and cannot be evicted now. Tokens are never shown."""

EXAMPLES: Final = """\
  kvslotctl tree                               the twenty prefixes with the most behind them
  kvslotctl tree --by readers --top 50         ... that most sequences read
  kvslotctl tree --by age                      ... used last
  kvslotctl tree --pool default --top 1000 --json prefixes.json
"""

TOP: Final = 20
BY: Final = ("size", "readers", "age")


class Prefix(msgspec.Struct, kw_only=True):
    """A chain of nodes without branches; sums are over all that begins with it.  The rows of --json."""

    node: int  # the last of the chain
    parent: int  # the prefix it continues; 0 at the top
    namespace: int
    start: int  # positions [start, stop)
    stop: int
    nodes: int  # of the chain
    extents: int  # ... and the pieces of memory they lie in
    priority: int
    held: bool
    subtree_tokens: int
    subtree_prefixes: int  # that end without a continuation
    readers: int
    age: int  # of the latest use


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    parser = _control.add_command(
        subparsers, "tree", "cached prefixes by size, readers or age", DESCRIPTION, EXAMPLES, run
    )
    parser.add_argument("--by", choices=BY, default=BY[0], help="which come first (size)")
    parser.add_argument("--top", type=_top, default=TOP, metavar="N", help=f"prefixes shown at most ({TOP})")


def _top(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""

    def act(control: Control) -> int:
        pool = _control.pools(control, arguments.pool)[0]
        name = pool["pool"]
        spaces = list(control.inspect("namespaces", pool=name))
        nodes = read(control, name, pool["nodes"])
        prefixes = chains(nodes, {space["namespace"] for space in spaces})
        best = top(prefixes, arguments.by, arguments.top)
        if arguments.json is not None:
            told = {
                "pool": {"pool": name, "cached": pool["cached"], "nodes": pool["nodes"]},
                "namespaces": spaces,
                "prefixes": len(prefixes),
                "rows": [msgspec.to_builtins(each) for each in best],
            }
            code = _control.write(arguments, control, told)
            if code or arguments.json == "-":
                return code
        from kvslot.cli import _screen

        _print(_screen.console(), pool, spaces, best, len(prefixes))
        return _common.OK

    return _control.ask(arguments, act)


def read(control: Control, pool: str, whole: int) -> dict[str, list[int]]:
    """The columns of all nodes."""
    columns: dict[str, list[int]] = {}
    with _common.Bar() as bar:
        for row in control.inspect("tree", pool=pool):
            for name, values in row.items():
                columns.setdefault(name, []).extend(values)
            bar.report("reading the tree", min(1.0, len(columns["node"]) / max(1, whole)))
    return columns


def chains(columns: dict[str, list[int]], roots: set[int]) -> dict[int, Prefix]:
    """The tree of prefixes, by the last node of each; nodes whose parents went while they were read are left out."""
    if not columns:
        return {}
    numbers, parents, depths = columns["node"], columns["parent"], columns["depth"]
    lengths, holds, ages = columns["tokens"], columns["holds"], columns["age"]
    place = {node: at for at, node in enumerate(numbers)}
    # From the top: parents end before their children begin, or the two were not read at the same time.
    order = sorted(range(len(numbers)), key=depths.__getitem__)
    space: dict[int, int] = dict.fromkeys(roots, 0)
    children: dict[int, list[int]] = {}
    known: list[int] = []
    for at in order:
        parent = parents[at]
        above = place.get(parent)
        if parent in roots:
            space[numbers[at]] = parent
        elif above is not None and depths[above] + lengths[above] == depths[at] and parent in space:
            space[numbers[at]] = space[parent]
        else:
            continue
        children.setdefault(parent, []).append(at)
        known.append(at)
    tokens = list(lengths)
    readers = [0] * len(numbers)
    ends = [0] * len(numbers)
    latest = list(ages)
    for at in reversed(known):
        below = children.get(numbers[at], [])
        # A child that is held counts once among its parent's holds.
        readers[at] += holds[at] - sum(holds[child] > 0 for child in below)
        ends[at] += not below
        parent = parents[at]
        if parent not in roots:
            above = place[parent]
            tokens[above] += tokens[at]
            readers[above] += readers[at]
            ends[above] += ends[at]
            latest[above] = min(latest[above], latest[at])
    found: dict[int, Prefix] = {}
    for first in known:
        parent = parents[first]
        if parent not in roots and len(children[parent]) == 1:
            continue  # inside a chain
        last, count, pieces = first, 1, columns["extents"][first]
        while len(below := children.get(numbers[last], [])) == 1:
            last = below[0]
            count += 1
            pieces += columns["extents"][last]
        found[numbers[last]] = Prefix(
            node=numbers[last],
            parent=0 if parent in roots else parent,
            namespace=space[numbers[first]],
            start=depths[first],
            stop=depths[last] + lengths[last],
            nodes=count,
            extents=pieces,
            priority=columns["priority"][last],
            held=holds[first] > 0,
            subtree_tokens=tokens[first],
            subtree_prefixes=ends[first],
            readers=max(0, readers[first]),
            age=latest[first],
        )
    return found


def _score(each: Prefix, by: str) -> tuple[int, int, int]:
    """Ascending; ties go to the larger, then to the one that begins earlier, so that parents stay in front."""
    first = {"size": -each.subtree_tokens, "readers": -each.readers, "age": each.age}[by]
    return first, -each.subtree_tokens, each.start


def top(prefixes: dict[int, Prefix], by: str, most: int) -> list[Prefix]:
    """The best `most`, in the order of a tree: each behind the one it continues, better ones first."""
    best = sorted(prefixes.values(), key=lambda each: _score(each, by))[:most]
    below: dict[int, list[Prefix]] = {}
    for each in best:
        below.setdefault(each.parent, []).append(each)
    ordered: list[Prefix] = []
    stack = below.get(0, [])[::-1]
    while stack:
        each = stack.pop()
        ordered.append(each)
        stack += below.get(each.node, [])[::-1]
    return ordered


def _print(
    out: Console, pool: _control.Row, spaces: list[_control.Row], best: list[Prefix], prefixes: int
) -> None:
    from kvslot.cli import _screen

    out.print(
        f"{pool['pool']} · {_common.several(pool['cached'], 'token')} cached in "
        f"{_common.several(pool['nodes'] - pool['namespaces'], 'node')} of "
        f"{_common.several(pool['namespaces'], 'namespace')}",
        style="bold",
    )
    if not best:
        out.print("nothing is cached")
        return
    names: dict[int, Any] = {space["namespace"]: space_name(space) for space in spaces}
    table = _screen.table(
        "prefix", "tokens", "of cached", "ends", "readers", "age", "pieces", "node", left=("prefix",)
    )  # fmt: skip
    depth: dict[int, int] = {0: 0}
    told = 0
    several = len({each.namespace for each in best}) > 1 or any(names.values())
    for each in best:
        level = depth[each.node] = depth[each.parent] + 1
        if several and not each.parent and each.namespace != told:
            told = each.namespace
            table.add_row(names.get(told) or f"namespace {told}", style="bold")
        marks = "*" if each.held else ""
        marks += f" ({each.nodes} nodes)" if each.nodes > 1 else ""
        marks += f" priority {each.priority}" if each.priority else ""
        table.add_row(
            f"{'  ' * (level - 1 + several)}{each.start:,}..{each.stop:,}{marks}",
            f"{each.subtree_tokens:,}",
            _screen.share(each.subtree_tokens, pool["cached"]),
            f"{each.subtree_prefixes:,}",
            f"{each.readers:,}",
            f"{each.age:,}",
            f"{each.extents:,}",
            str(each.node),
            style="" if level == 1 else "default",
        )
    out.print(table)
    if prefixes > len(best):
        out.print(
            f"{_common.several(prefixes - len(best), 'more prefix', 'more prefixes')}: see --top", style="dim"
        )


def space_name(space: _control.Row) -> str:
    """A namespace for people; that it is salted, never with what."""
    from kvslot.cli import _screen

    parts = [f"{key} {space[key]}" for key in ("tenant", "model", "adapter") if space[key]]
    return _screen.words(", ".join([*parts, *(["salted"] if space["salted"] else [])]))
