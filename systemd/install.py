"""`python -m kvslot.systemd`: puts units, users, folders and settings where systemd looks for them, or takes them away.

Writes files and nothing else: what makes users and folders, and starts daemons, is printed as the commands to say.
What an operator has changed in a unit is in a drop-in (`systemctl edit`), so units are replaced; settings are not.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kvslot.systemd import DROP_INS, FILES, PROGRAM, File, drop_in, text

HIDDEN = ("home", "root", "tmp", "var/tmp", "run/user", "dev/shm")
"""Where the unit's sandbox shows nothing, or nothing of ours."""
UNITS = "etc/systemd/system"
EXAMPLES = """\
examples:
  python -Im kvslot.systemd                            into /etc, for this environment's kvslotd
  python -Im kvslot.systemd --drop-in gpu:gpu0         and what an NVIDIA GPU needs, for kvslotd@gpu0.service
  python -Im kvslot.systemd --root /mnt/image          into an image of a machine
  python -Im kvslot.systemd --print kvslotd@.service   to look at one
  python -Im kvslot.systemd --remove                   settings, and drop-ins that are not ours, stay and are named

exit codes: 0 done, 1 something could not be written, 2 usage
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m kvslot.systemd",
        description="Installs kvslotd as a service of systemd.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument(
        "--root", metavar="DIR", default="/", help="the machine's root, or an image's; default: /"
    )
    top.add_argument(
        "--program", metavar="PATH", help="kvslotd, as that machine has it; default: this environment's"
    )
    top.add_argument(
        "--drop-in",
        metavar="NAME:INSTANCE",
        action="append",
        default=[],
        help=f"as well, for one instance: {', '.join(DROP_INS)}; may be said several times",
    )
    what = top.add_mutually_exclusive_group()
    what.add_argument("--print", metavar="FILE", dest="show", help="print one of the files, and end")
    what.add_argument(
        "--remove", action="store_true", help="take away what was put there, drop-ins too, but for settings"
    )
    return top


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    top = parser()
    arguments = top.parse_args(argv)
    try:
        wanted = [*FILES, *(_drop_in(each) for each in arguments.drop_in)]
    except ValueError as error:
        top.error(str(error))
    root = Path(arguments.root)
    program = arguments.program or _program()
    if not program.startswith("/") or any(each.isspace() or each in "%$\"'\\;" for each in program):
        top.error(f"--program {program!r}: an absolute path of plain characters is needed")
    if arguments.show is not None:
        names = [each.name for each in FILES] + [f"{each}.conf" for each in DROP_INS]
        if arguments.show not in names:
            top.error(f"there is no {arguments.show!r}; there are {', '.join(names)}")
        sys.stdout.write(text(arguments.show, program))
        return 0
    try:
        if arguments.remove:
            _remove(root)
        else:
            _install(root, wanted, program)
    except OSError as error:
        print(f"{top.prog}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _drop_in(said: str) -> File:
    name, _, instance = said.partition(":")
    return drop_in(name, instance)


def _program() -> str:
    """The kvslotd of this environment, else the documented one."""
    beside = Path(sys.prefix) / "bin" / "kvslotd"
    return str(beside) if beside.exists() else PROGRAM


def _install(root: Path, wanted: list[File], program: str) -> None:
    for file in wanted:
        target = root / file.target
        new = text(file.name, program)
        there = target.read_text(encoding="utf-8") if target.exists() else None
        if there == new or (file.kept and there is not None):
            print(f"{'kept' if there != new else 'as it was':10} {target}")
            continue
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        # Written beside and moved there, so that nobody reads half a unit.
        beside = target.with_name(f".{target.name}.new")
        beside.write_text(new, encoding="utf-8")
        beside.chmod(0o644)
        beside.replace(target)
        print(f"{'written' if there is None else 'replaced':10} {target}")
    asked = {root / each.target for each in wanted}
    for there_is in _own_drop_ins(root):
        target = root / there_is.target
        if target not in asked and target.read_text(encoding="utf-8") != text(there_is.name, program):
            said = f"{there_is.name.removesuffix('.conf')}:{_instance(target.parent)}"
            print(f"{'differs':10} {target}, which --drop-in {said} replaces")
    if not (root / program.lstrip("/")).exists():
        print(
            f"\nThere is no {program} in {root} yet: a virtual environment there, with this package, has one."
        )
    mine = _program() == program
    # An environment leans on the Python that made it.
    for each in (program, sys.base_prefix if mine else ""):
        if f"{each[1:]}/".startswith(tuple(f"{hidden}/" for hidden in HIDDEN)):
            print(
                f"\nThe daemon will not find {each}: the unit's sandbox hides what is in /{each.split('/')[1]}.  "
                "Make an environment elsewhere, say at /opt/kvslot, with the system's own Python."
            )
    told = "" if root == Path("/") else f" --root={root}"
    print(
        "\nThen, as root:\n"
        f"  systemd-sysusers{told} kvslot.conf\n"
        f"  systemd-tmpfiles{told} --create kvslot.conf\n"
        + ("" if told else "  systemctl daemon-reload\n")
        + f"  systemctl{told} enable {'' if told else '--now '}kvslotd.socket kvslotd@default.service\n"
        "Engines' users go into the group kvslot-engine, operators into that and kvslot-admin."
    )


def _own_drop_ins(root: Path) -> list[File]:
    """Those of this package, of whatever version, for whatever instance: by name, and by the line they begin with."""
    found = []
    for folder in sorted((root / UNITS).glob("kvslotd@?*.service.d")):
        for each in DROP_INS:
            path = folder / f"{each}.conf"
            head = text(path.name).partition("\n")[0]
            if path.is_file() and path.read_text(encoding="utf-8", errors="replace").startswith(head):
                found.append(File(path.name, str(path.relative_to(root))))
    return found


def _instance(folder: Path) -> str:
    """Whose drop-ins a folder holds."""
    return folder.name.removeprefix("kvslotd@").removesuffix(".service.d")


def _remove(root: Path) -> None:
    for file in [*FILES, *_own_drop_ins(root)]:
        target = root / file.target
        if file.kept or not target.exists():
            continue
        target.unlink()
        print(f"{'removed':10} {target}")
        if target.parent.name.endswith(".service.d") and not any(target.parent.iterdir()):
            os.rmdir(target.parent)
    # What belongs to the operator: settings, and what `systemctl edit` and people wrote.
    kept = [*(root / UNITS).glob("kvslotd.socket.d/*"), *(root / UNITS).glob("kvslotd@*.d/*")]
    for path in sorted([*kept, *(root / "etc/kvslot").glob("*")]):
        print(f"{'left':10} {path}")
    told = "" if root == Path("/") else f" --root={root}"
    # By a pattern, since links that lead nowhere any more count, too.
    links = [
        each
        for each in (root / UNITS).glob("*.wants/kvslotd*")
        if each.name.startswith(("kvslotd.", "kvslotd@"))
    ]
    then = [f"systemctl{told} disable {' '.join(sorted({each.name for each in links}))}"] if links else []
    then += [] if told else ["systemctl daemon-reload"]
    if then:
        print("\nThen, as root:", *then, sep="\n  ")
    print("\nUsers and groups stay.")
