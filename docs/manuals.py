"""Writes the manual pages in docs/man/ out of the parsers and the settings: `python docs/manuals.py`; a test compares.

    kvslotctl(1)             the command line as a whole          kvslotd(8)          the daemon
    kvslotctl-NAME(1)        one page a command                   kvslot.toml(5)      its configuration

The words are those of --help, so there is one place for each.  Pages carry no date: they are as old as the version that
they name.  The wheel puts them into share/man, where `man` looks for whatever stands beside its share in bin.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from kvslot import __version__
from kvslot.cli import checks, ctl
from kvslot.daemon import config
from kvslot.daemon import main as daemon

FOLDER: Final = Path(__file__).parent / "man"

SOCKET_TEXT: Final = """\
The daemon's socket, unless --socket says otherwise."""
FILES: Final = (
    ("/etc/kvslot/NAME.toml", "the configuration of the unit kvslotd@NAME; nothing is read unless it is named"),
    ("/run/kvslot/kvslot.sock", "the socket, for root and where there is no XDG_RUNTIME_DIR"),
    ("/run/kvslot/kvslot.sock.lock", "whose socket it is: held by the daemon, and left behind"),
    ("$XDG_RUNTIME_DIR/kvslot/kvslot.sock", "the socket of a user's own daemon"),
)  # fmt: skip
SIGNALS: Final = (
    (
        "SIGTERM, SIGINT",
        "drain: no new work, running sequences have drain_seconds; a second one ends at once",
    ),
    ("SIGHUP", "the configuration is read again; what cannot be changed while running is named in the log"),
)


def pages() -> dict[str, str]:
    """Every page's text, by its file below docs/man: "man1/kvslotctl-top.1"."""
    top = ctl.parser()
    commands = _commands(top)
    found = {"man1/kvslotctl.1": _program(top, commands)}
    for name, (words, parser) in commands.items():
        found[f"man1/kvslotctl-{name}.1"] = _command(name, words, parser)
    found["man8/kvslotd.8"] = _daemon(daemon.parser())
    found["man5/kvslot.toml.5"] = _configuration()
    return found


def main() -> int:
    """Writes all, and removes what is no page any more."""
    made = pages()
    for name, text in made.items():
        (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / name).write_text(text, encoding="utf-8")
    for old in FOLDER.glob("man?/*"):
        if old.relative_to(FOLDER).as_posix() not in made:
            old.unlink()
    print(f"{len(made)} pages in {FOLDER}")
    return 0


# -- the pages --------------------------------------------------------------------------------------------------------


def _commands(top: argparse.ArgumentParser) -> dict[str, tuple[str, argparse.ArgumentParser]]:
    """By name: the words of the list of commands, and the parser."""
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            words = {each.dest: each.help or "" for each in action._choices_actions}
            return {name: (words.get(name, ""), parser) for name, parser in action.choices.items()}
    return {}


def _program(top: argparse.ArgumentParser, commands: dict[str, tuple[str, argparse.ArgumentParser]]) -> str:
    page = _Page("kvslotctl", 1, "look at, control and measure a kvslot daemon")
    page.section("SYNOPSIS")
    page.synopsis("kvslotctl", "COMMAND [OPTION]...")
    page.prose(top.description or "", "DESCRIPTION")
    page.section("COMMANDS")
    page.terms((f"kvslotctl-{name}(1)", words) for name, (words, _) in commands.items())
    _options(page, top)
    page.section("ENVIRONMENT")
    page.terms(
        (
            ("KVSLOT_SOCKET", SOCKET_TEXT),
            (
                "XDG_RUNTIME_DIR",
                "for others than root: where the socket is looked for, in kvslot/kvslot.sock",
            ),
            ("NO_COLOR", "no colours"),
            ("COLUMNS", "the width of what is printed"),
        )
    )
    _epilog(page, top)
    page.section("FILES")
    page.terms(FILES[1:])
    page.see("kvslotd(8)", "kvslot.toml(5)", *(f"kvslotctl-{name}(1)" for name in commands))
    return page.text()


def _command(name: str, words: str, parser: argparse.ArgumentParser) -> str:
    page = _Page(f"kvslotctl-{name}", 1, words)
    page.section("SYNOPSIS")
    nested = _commands(parser)
    page.synopsis(f"kvslotctl {name}", _usage(parser))
    page.prose(parser.description or "", "DESCRIPTION")
    _options(page, parser)
    if name == "doctor":
        page.section("CHECKS")
        page.terms((check, " ".join((asks.__doc__ or "").split())) for check, asks in checks.CHECKS.items())
    for inner, (inner_words, inner_parser) in nested.items():
        page.section(f"{name} {inner}".upper())
        page.synopsis(f"kvslotctl {name} {inner}", _usage(inner_parser))
        page.prose(inner_parser.description or inner_words)
        page.terms(_rows(inner_parser._actions))
        _epilog(page, inner_parser, codes=False)
    _epilog(page, parser)
    page.see("kvslotctl(1)", "kvslotd(8)")
    return page.text()


def _daemon(parser: argparse.ArgumentParser) -> str:
    page = _Page("kvslotd", 8, "serves a KV-cache pool to the LLM engines of a host")
    page.section("SYNOPSIS")
    page.synopsis("kvslotd", _usage(parser))
    page.prose(parser.description or "", "DESCRIPTION")
    _options(page, parser)
    page.section("SIGNALS")
    page.terms(SIGNALS)
    _epilog(page, parser)
    page.section("ENVIRONMENT")
    page.terms(
        (
            ("KVSLOT_CONFIG", "the configuration, unless --config names one"),
            ("KVSLOT_...", "any setting of kvslot.toml(5) in capitals: KVSLOT_LOG_LEVEL, KVSLOT_POOL_SIZE"),
            ("NO_COLOR", "no colours in the log on a terminal"),
        )
    )
    page.section("FILES")
    page.terms(FILES)
    page.see("kvslot.toml(5)", "kvslotctl(1)", "kvslotctl-doctor(1)", "systemd.service(5)")
    return page.text()


def _configuration() -> str:
    page = _Page("kvslot.toml", 5, "configuration of kvslotd")
    page.prose(
        "Settings of kvslotd(8), as TOML: those of the daemon at the top, then one [[pool]] for each pool, and one "
        "[[tenant]] for each tenant, where there are any. The "
        "environment (KVSLOT_ and the name in capitals; KVSLOT_POOL_ for the only pool) overrules the file, and flags "
        "overrule both. Unknown names, and values out of range, are errors; kvslotd --check-config says what a file "
        'comes to. Sizes are bytes, or text like "8GiB". Paths are taken from the folder of the file on.\n\n'
        "A pool needs its memory, size or blocks, and what a slot holds: one of model_config, layout, "
        "opaque_block_bytes.",
        "DESCRIPTION",
    )
    for title, struct, rules in (
        ("SETTINGS OF THE DAEMON", config.Settings, config.SETTINGS),
        ("SETTINGS OF A POOL", config.PoolSettings, config.POOL),
        ("LAYOUT OF A POOL", config.LayoutTable, config.LAYOUT),
        ("SETTINGS OF A TENANT", config.TenantSettings, config.TENANT),
    ):
        page.section(title)
        page.terms(_setting(struct, key, rules[key]) for key in rules)
    page.section("EXAMPLES")
    page.verbatim(daemon.EXAMPLE.strip())
    page.section("FILES")
    page.terms(FILES[:1])
    page.see("kvslotd(8)", "kvslotctl-settings(1)", "kvslotctl-set(1)", "kvslotctl-reload(1)")
    return page.text()


def _setting(struct: Any, key: str, rule: config.Rule) -> tuple[str, str]:
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    shown = dict(
        row.split("|")[1:3] for row in config.documentation()
    )  # the same key twice has the same default or none
    default = shown.get(f" `{key}` ", "").strip().strip("`")
    assert key in defaults
    live = ""
    if struct is config.Settings and key in config.CHANGEABLE:
        live = " It can be changed while the daemon runs."
    elif struct is config.TenantSettings or (struct is config.Settings and key in config.RELOADABLE):
        live = " A reload takes it over."
    words = f"{rule.text[:1].upper()}{rule.text[1:]}. Allowed: {rule.allowed()}.{live}"
    return (f"{key} = {default}" if default else key), words


# -- parts of a page --------------------------------------------------------------------------------------------------


def _usage(parser: argparse.ArgumentParser) -> str:
    words = ["[OPTION]..."]
    for action in parser._actions:
        if action.option_strings or action.help is argparse.SUPPRESS:
            continue
        name = _metavar(action)
        form = {"?": f"[{name}]", "*": f"[{name}]...", "+": f"{name}..."}
        words.append(form.get(str(action.nargs), name))
    return " ".join(words)


def _metavar(action: argparse.Action) -> str:
    if isinstance(action.metavar, tuple):
        return " ".join(action.metavar)
    if action.metavar is not None:
        return action.metavar
    if action.choices is not None:
        return "|".join(str(each) for each in action.choices)
    return action.dest.upper()


def _rows(actions: Iterable[argparse.Action]) -> Iterator[tuple[str, str]]:
    """Options and arguments with their help, as --help has it."""
    for action in actions:
        if action.help is argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
            continue
        values = {name: value for name, value in vars(action).items() if value is not argparse.SUPPRESS}
        if values.get("choices") is not None:
            values["choices"] = ", ".join(map(str, values["choices"]))
        words = " ".join(((action.help or "") % values).split())
        if not action.option_strings:
            yield _metavar(action), words
            continue
        flags = ", ".join(action.option_strings)
        if action.nargs == 0:
            yield flags, words
        elif action.nargs == "?":
            yield f"{flags} [{_metavar(action)}]", words
        else:
            yield f"{flags} {_metavar(action)}", words


def _options(page: _Page, parser: argparse.ArgumentParser) -> None:
    """Every group of options as a section, or as a part of OPTIONS."""
    groups = [(each, list(_rows(each._group_actions))) for each in parser._action_groups]
    plain = {"positional arguments": "ARGUMENTS", "options": "OPTIONS", "optional arguments": "OPTIONS"}
    for title in ("ARGUMENTS", "OPTIONS"):
        rows = [row for each, rows in groups if plain.get(each.title or "") == title for row in rows]
        if rows:
            page.section(title)
            page.terms(rows)
    for each, rows in groups:
        if rows and (each.title or "") not in plain:
            page.part(each.title or "")
            if each.description:
                page.prose(each.description)
            page.terms(rows)


def _epilog(page: _Page, parser: argparse.ArgumentParser, *, codes: bool = True) -> None:
    """Examples, exit codes, and what else stands behind the options; "name:" begins a part."""
    title = ""
    body: list[str] = []

    def finish() -> None:
        text = "\n".join(body).strip("\n")
        body.clear()
        if not text.strip() or (title == "exit codes" and not codes):
            return
        if title == "exit codes":
            page.section("EXIT STATUS")
            page.verbatim(text)
        elif title.startswith("exit codes of"):
            page.prose(text)
        elif title:
            page.section(title.upper()) if codes else page.part(title)
            page.prose(text)
        else:
            page.prose(text)

    for line in (parser.epilog or "").splitlines():
        head = re.fullmatch(r"(examples?|exit codes)(?: of \w+)?:(.*)", line)
        if head and not head[2].strip():
            finish()
            title = "examples" if head[1].startswith("example") else head[1]
        else:
            body.append(line)
    finish()


class _Page:
    """One page, in the man macros that every formatter knows."""

    def __init__(self, name: str, section: int, words: str) -> None:
        self._lines = [
            ".\\\" Written by docs/manuals.py out of the program's own words: change those.",
            f'.TH "{name.upper()}" "{section}" "" "kvslot {__version__}" "kvslot"',
            ".SH NAME",
            f"{_escaped(name)} \\- {_escaped(words)}",
        ]

    def section(self, title: str) -> None:
        self._lines.append(f".SH {_quoted(title)}")

    def part(self, title: str) -> None:
        self._lines.append(f".SS {_quoted(title)}")

    def synopsis(self, command: str, rest: str) -> None:
        self._lines.append(f"\\fB{_escaped(command)}\\fR {_escaped(rest)}".rstrip())

    def terms(self, rows: Iterable[tuple[str, str]]) -> None:
        """A tagged paragraph each."""
        for term, words in rows:
            self._lines += [".TP", f"\\fB{_escaped(term)}\\fR", *_flowing(words or "\\&")]

    def prose(self, text: str, title: str = "") -> None:
        """Paragraphs; what is indented stays as it is, what is in backticks is bold."""
        if title:
            self.section(title)
        for place, paragraph in enumerate(re.split(r"\n\s*\n", text.strip("\n"))):
            if not paragraph.strip():
                continue
            if place:
                self._paragraph()
            plain: list[str] = []
            fixed: list[str] = []
            for line in paragraph.splitlines():
                if line.startswith("  "):
                    if plain:
                        self._lines += _flowing(" ".join(plain))
                        plain = []
                    fixed.append(line)
                else:
                    if fixed:
                        self.verbatim("\n".join(fixed))
                        fixed = []
                    plain.append(line.strip())
            if fixed:
                self.verbatim("\n".join(fixed))
            if plain:
                self._lines += _flowing(" ".join(plain))

    def verbatim(self, text: str) -> None:
        self._paragraph()
        self._lines += [".nf", *(_line(line) for line in text.splitlines()), ".fi"]

    def _paragraph(self) -> None:
        """Begins one, where that is not done by what stands before."""
        if not self._lines[-1].startswith((".SH", ".SS", ".PP")):
            self._lines.append(".PP")

    def see(self, *names: str) -> None:
        self.section("SEE ALSO")
        self._lines += [
            _bold_page(name) + ("," if place < len(names) - 1 else "") for place, name in enumerate(names)
        ]

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def _bold_page(name: str) -> str:
    head, _, rest = name.partition("(")
    return f"\\fB{_escaped(head)}\\fR({rest}"


def _flowing(text: str) -> list[str]:
    """A paragraph, a sentence a line."""
    words = " ".join(text.split())
    sentences = re.split(r"(?<=[.;:])\s+(?=[A-Z0-9`])", words) if words != "\\&" else [words]
    lines = []
    for sentence in sentences:
        shown = sentence if sentence == "\\&" else _escaped(sentence)
        shown = re.sub(r"`([^`]*)`", r"\\fB\1\\fR", shown)
        lines.append(f"\\&{shown}" if shown.startswith((".", "'")) else shown)
    return lines


def _line(text: str) -> str:
    shown = _escaped(text)
    return f"\\&{shown}" if shown.startswith((".", "'")) else shown


def _quoted(text: str) -> str:
    return '"' + _escaped(text).replace('"', "\\(dq") + '"'


_CHARACTERS: Final = {"\\": "\\e", "-": "\\-", "^": "\\(ha", "~": "\\(ti", "'": "\\(aq"}


def _escaped(text: str) -> str:
    """Text that shows as it stands: every hyphen is one that can be copied."""
    return "".join(_CHARACTERS.get(each, each) for each in text)


if __name__ == "__main__":
    sys.exit(main())
