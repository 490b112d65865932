"""`kvslotctl docs`: the pages that came with this version, for a host that has the wheel and nothing else.

They lie in a folder `docs` beside the rooms, in the repository as in the wheel, so one path finds them in both, and so
do the links within them: a name may be one of the list, or a file as a link has it (`integrations/vllm.md`).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kvslot.cli import _common

FOLDER: Final = Path(__file__).resolve().parents[1] / "docs"
FIRST: Final = ("operations", "events", "metrics", "admin", "security", "restart", "systemd", "daemon")
"""What whoever runs a daemon looks for; the other pages follow by name."""
OTHERS: Final = {
    "alerts": ("alerts.yml", "Alert rules for Prometheus, for rule_files"),
    "dashboard": ("grafana/kvslot.json", "Dashboard for Grafana, to be imported"),
    "units": ("../systemd/README.md", "kvslotd as a service of systemd: units, drop-ins, upgrade"),
}
"""What has no name, or no heading, of its own that tells enough."""

DESCRIPTION: Final = """\
The documentation that came with this version, alert rules and dashboard included: what to do about which symptom, what
each line of the log and each metric means. Without NAME: what there is. On a terminal a page is laid out and goes
through $PAGER (less); elsewhere it is printed as the file has it.

With WORDs only what speaks of them: sections whose heading has them all, else the rows and paragraphs that do. A
section may also be named as a link does, `operations#requests-wait`."""

EXAMPLES: Final = """\
examples:
  kvslotctl docs                               what there is
  kvslotctl docs operations                    the runbook
  kvslotctl docs operations requests wait      that section of it; or: kvslotctl docs operations#requests-wait
  kvslotctl docs events watchdog_withheld      what a line of the log means
  cp "$(kvslotctl docs alerts --path)" /etc/prometheus/rules/kvslot.yml
  kvslotctl docs dashboard > kvslot.json       to import into Grafana

"""


class Page(NamedTuple):
    """One of the list."""

    name: str
    title: str
    path: Path


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "docs",
        help="runbook, events, metrics, alert rules: the documentation",
        description=DESCRIPTION,
        epilog=EXAMPLES + _common.EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        default="",
        choices=_common.Suggested(lambda: [each.name for each in pages()]),
        help="a page, as the list has it, or a file, as a link has it; #SECTION may follow",
    )
    parser.add_argument("words", metavar="WORD", nargs="*", help="show only what speaks of them")
    parser.add_argument(
        "--path", action="store_true", help="print where the file lies, without NAME: the folder"
    )
    _common.add_json(parser)
    parser.set_defaults(handler=run)


def pages() -> list[Page]:
    """What there is, in the order of the list; empty where the installation brought none."""
    found = [Page(name, _title(FOLDER / f"{name}.md"), FOLDER / f"{name}.md") for name in FIRST]
    found += [Page(name, title, (FOLDER / file).resolve()) for name, (file, title) in OTHERS.items()]
    known = {each.path for each in found}
    # The single decisions are listed on a page of their own.
    more = [each for each in sorted(FOLDER.rglob("*.md")) if each not in known and not each.name[0].isdigit()]
    found += [Page(path.relative_to(FOLDER).with_suffix("").as_posix(), _title(path), path) for path in more]
    return [each for each in found if each.path.exists()]


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""
    there = pages()
    if not there:
        print(f"kvslotctl docs: this installation has no {FOLDER}; the wheel brings it", file=sys.stderr)
        return _common.BAD_INPUT
    if not arguments.name:
        return _list(arguments, there)
    name, _, anchor = arguments.name.partition("#")
    path = _find(name, there)
    if path is None:
        hint = _common.near(name, [each.name for each in there])
        print(
            f"kvslotctl docs: there is no page {name!r}"
            + (f"; did you mean {hint}?" if hint else "; kvslotctl docs lists them"),
            file=sys.stderr,
        )
        return _common.USAGE
    if arguments.json is not None:
        return _write(arguments.json, [each for each in there if each.path == path] or [Page(name, "", path)])
    if arguments.path:
        print(path)
        return _common.OK
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        print(f"kvslotctl docs: {path} is no text; --path says where it lies", file=sys.stderr)
        return _common.USAGE
    if anchor or arguments.words:
        text = about(text, arguments.words, anchor)
        if not text:
            sought = " ".join([f"#{anchor}" if anchor else "", *arguments.words]).strip()
            print(f"kvslotctl docs: nothing about {sought!r} in {path}", file=sys.stderr)
            return _common.USAGE
    _show(text, laid_out=path.suffix == ".md")
    return _common.OK


def about(text: str, words: list[str], anchor: str = "") -> str:
    """What a page says of the words, or below the heading that a link calls `anchor`; "" for nothing.

    A row of a table comes with the table's head, so that its columns can be told.
    """
    sought = [each.lower() for each in words]
    parts = list(_sections(text))
    if anchor:
        parts = [each for each in parts if _anchor(each.partition("\n")[0]) == anchor.lower()]
        if not sought:
            return "\n".join(parts)
    else:
        headed = [each for each in parts if _has(each.partition("\n")[0].lower(), sought)]
        if headed:
            # One that lies within another has been shown with it.
            return "\n".join(
                each for each in headed if not any(each in other for other in headed if other != each)
            )
    found: list[str] = []
    for block in re.split(r"\n\s*\n", "\n\n".join(parts) if anchor else text):
        lines = block.splitlines()
        if len(lines) > 2 and lines[1].startswith("| -"):
            rows = [each for each in lines[2:] if _has(each.lower(), sought)]
            lines = [*lines[:2], *rows] if rows else []
        elif not _has(block.lower(), sought):
            lines = []
        if lines:
            found.append("\n".join(lines) + "\n")
    return "\n".join(found)


def _sections(text: str) -> Iterator[str]:
    """Each heading with what stands below it, deeper headings included."""
    plain = re.sub(r"^```.*?^```", lambda block: "~" * len(block[0]), text, flags=re.MULTILINE | re.DOTALL)
    heads = [(each.start(), len(each[1])) for each in re.finditer(r"^(#+) ", plain, re.MULTILINE)]
    for place, (start, depth) in enumerate(heads):
        end = next((at for at, other in heads[place + 1 :] if other <= depth), len(text))
        if depth > 1:
            yield text[start:end].rstrip("\n") + "\n"


def _anchor(heading: str) -> str:
    """By the rule of those who show Markdown."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("#").strip().lower()).replace(" ", "-")


def _has(text: str, words: list[str]) -> bool:
    return all(each in text for each in words)


def _title(path: Path) -> str:
    """A page's first heading."""
    try:
        with path.open(encoding="utf-8") as file:
            return next((line.lstrip("# ").strip() for line in file if line.startswith("# ")), "")
    except OSError:
        return ""


def _find(name: str, there: list[Page]) -> Path | None:
    """A page of the list, with or without its suffix, or a file of the package as a link has it."""
    for each in there:
        if name in (each.name, f"{each.name}.md", each.path.name):
            return each.path
    path = (FOLDER / name).resolve()
    return path if path.is_relative_to(FOLDER.parent) and path.is_file() else None


def _list(arguments: argparse.Namespace, there: list[Page]) -> int:
    if arguments.json is not None:
        return _write(arguments.json, there)
    if arguments.path:
        print(FOLDER)
        return _common.OK
    from kvslot.cli import _screen

    table = _screen.table("name", "what it is", left=("name", "what it is"))
    table.columns[0].no_wrap = True
    for each in there:
        table.add_row(each.name, each.title)
    _screen.console().print(table)
    print(
        f"\nIn {FOLDER}; options and settings have pages of the manual: man kvslotctl, kvslotd, kvslot.toml."
    )
    return _common.OK


def _write(where: str, there: list[Page]) -> int:
    import msgspec

    rows = [{"name": each.name, "title": each.title, "path": str(each.path)} for each in there]
    document = msgspec.json.format(msgspec.json.encode({"rows": rows}), indent=2) + b"\n"
    try:
        _common.check_writable(where)
        _common.write_json(document, where)
    except OSError as error:
        print(f"kvslotctl docs: {error}", file=sys.stderr)
        return _common.BAD_INPUT
    return _common.OK


def _show(text: str, *, laid_out: bool) -> None:
    """As it is, or for whoever reads it on a terminal."""
    if not sys.stdout.isatty():
        print(text, end="")
        return
    from rich.markdown import Markdown

    from kvslot.cli import _screen

    out = _screen.console()
    with out.capture() as captured:
        out.print(Markdown(text, hyperlinks=False) if laid_out else text)
    _through_pager(captured.get())


def _through_pager(text: str) -> None:
    """$PAGER, else less; printed where there is neither."""
    command = shlex.split(os.environ.get("PAGER", "less"))
    if not command or shutil.which(command[0]) is None:
        print(text, end="")
        return
    # As other programs have it: colours pass, and what fits on the screen is not paged.
    environ = {"LESS": "FRX", **os.environ}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environ) as pager:
        assert pager.stdin is not None
        try:
            pager.stdin.write(text.encode(sys.stdout.encoding or "utf-8", "replace"))
            pager.stdin.close()
        except BrokenPipeError:
            pass  # left before the end
        while True:
            try:
                pager.wait()
                return
            except KeyboardInterrupt:
                continue  # ^C is the pager's
