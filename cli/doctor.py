"""`kvslotctl doctor`: looks at everything that is known to go wrong, and says what to do about it."""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvslot.cli import _common, _control

if TYPE_CHECKING:
    from rich.console import Console

    from kvslot.api.client import Control
    from kvslot.cli.checks import Finding, Picture

DESCRIPTION: Final = """\
Look at a daemon, its pools, its clients and its machine, and say of each thing what was found, why it matters and what
to do. `fault`: something is wrong with bytes, books or permissions. `warning`: it hurts or will. `note`: worth knowing.
`unknown`: it could not be looked at, mostly for want of permission. `absent`: this version has no such thing.
Nothing is changed. Where no daemon answers, doctor looks for why."""

EXAMPLES: Final = """\
  kvslotctl doctor
  kvslotctl doctor permissions descriptors     only these checks
  kvslotctl doctor --skip audit                without recounting the pools
  kvslotctl doctor --list                      what is asked
  kvslotctl doctor --quiet || mail -s "kvslot on $HOSTNAME" ops
  kvslotctl doctor --json | jq -r '.rows[] | select(.verdict == "warning") | .remedy'
exit codes of doctor: 1 for a fault or a warning, else 0, notes and unknowns included; 5 where no daemon answers
"""

NAMES: Final = (
    "versions", "configuration", "block_size", "audit", "fragmentation", "compaction", "swap", "lengths", "watermark",
    "waiting", "tenants", "pins", "hits", "sessions", "quarantine", "peers", "latency", "log", "descriptors",
    "locked_memory", "shared_memory", "memory", "permissions", "admin", "restart", "stopping",
)  # fmt: skip
"""For completion and help, without loading the checks.  A test compares."""

PATIENCE_S: Final = 120.0
"""Of one answer: the audit of a large pool takes seconds."""
STYLES: Final = {
    "fault": "bold red",
    "warning": "yellow",
    "unknown": "cyan",
    "note": "blue",
    "ok": "green",
    "absent": "dim",
}


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    parser = _control.add_command(
        subparsers,
        "doctor",
        "look for what is wrong, and say what to do",
        DESCRIPTION,
        EXAMPLES,
        run,
        pool=False,
    )
    parser.add_argument(
        "checks",
        nargs="*",
        metavar="CHECK",
        choices=_common.Suggested(lambda: NAMES),
        help=f"only these (all): {', '.join(NAMES)}",
    )
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="CHECK",
        choices=_common.Suggested(lambda: NAMES),
        help="leave this one out; may be given again",
    )
    parser.add_argument("--list", action="store_true", help="print what each check asks, and end")
    parser.add_argument("--quiet", action="store_true", help="print only what is a fault or a warning")


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""
    for name in (*arguments.checks, *arguments.skip):
        if name.replace("-", "_") not in NAMES:
            hint = _common.near(name, NAMES)
            meant = f"did you mean {hint}?" if hint else f"there are {', '.join(NAMES)}"
            return _control.fail(arguments, f"there is no check {name!r}; {meant}", _common.USAGE)
    asked = [name.replace("-", "_") for name in arguments.checks] or list(NAMES)
    left_out = {name.replace("-", "_") for name in arguments.skip}
    names = [name for name in NAMES if name in asked and name not in left_out]
    if arguments.list:
        return _list(names)
    from kvslot.api.client import Control, Denied, Disconnected, KvslotError
    from kvslot.cli import checks

    try:
        _common.check_writable(arguments.json)
    except OSError as error:
        return _control.fail(arguments, f"cannot write {arguments.json}: {error.strerror}", _common.BAD_INPUT)
    try:
        with Control(arguments.socket, timeout=PATIENCE_S) as control:
            picture = see(control, names)
        return _tell(arguments, control.socket, checks.look(picture, names), picture)
    except (Denied, Disconnected) as error:
        return _tell(arguments, _path(arguments), _no_answer(_path(arguments), error), None)
    except KvslotError as error:
        return _control.fail(arguments, f"the daemon refused: {error}", _common.UNREACHABLE)


def _list(names: list[str]) -> int:
    from kvslot.cli import _screen, checks

    table = _screen.table("check", "asks", left=("check", "asks"))
    for name in names:
        table.add_row(name, (checks.CHECKS[name].__doc__ or "").strip())
    _screen.console().print(table)
    return _common.OK


# -- looking ----------------------------------------------------------------------------------------------------------


def see(control: Control, names: list[str]) -> Picture:
    """Everything that these checks go by; only `audit` makes the daemon work."""
    from kvslot import __version__
    from kvslot.api.client import BadRequest, NotFound
    from kvslot.api.wire import VERSION
    from kvslot.cli import checks, host

    def ask(kind: str, pool: str = "") -> list[_control.Row]:
        try:
            return list(control.inspect(kind, pool=pool))
        except (NotFound, BadRequest):
            return []  # a daemon of before

    (status,) = control.inspect("status")
    pools = _control.pools(control)
    process: dict[str, Any] = next(iter(ask("process")), {})
    pid = process.get("pid", 0) if host.is_daemon(process.get("pid", 0)) else 0
    picture = checks.Picture(
        version=__version__,
        protocol=VERSION,
        socket=control.socket,
        status=status,
        pools=pools,
        process=process,
        totals=next(iter(ask("totals")), {}),
        settings={row["name"]: row for row in ask("settings")},
        sessions=ask("sessions"),
        tickets={pool["pool"]: ask("tickets", pool["pool"]) for pool in pools},
        tenants=ask("tenants"),
        frag=ask("frag"),
        defrag=ask("defrag"),
        lengths=ask("lengths"),
        latency=ask("latency"),
        config=ask("config"),
        machine=host.machine(),
        group=host.control_group(pid),
        unit=host.unit_of(pid),
        places=places(control.socket),
    )
    if not pid:
        picture.state_of = lambda pid: ""  # nor are those of sessions the same here
    if "admin" in names and _setting(picture, "admin"):
        path = _setting(picture, "admin_socket") or os.path.join(
            os.path.dirname(control.socket), "admin.sock"
        )
        picture.admin = host.place(path)
        files = [_setting(picture, name) for name in ("admin_token_file", "admin_act_token_file")]
        picture.tokens = [host.place(file) for file in files if file]
        if pid:
            groups = host.groups_of(pid)
            picture.unreadable = {
                each.path for each in picture.tokens if not host.may_read(each, process["uid"], groups)
            }
        if picture.admin.kind == "socket":
            picture.health, picture.health_why = host.health(path)
    if picture.unit:
        picture.stop_seconds = host.stop_seconds(picture.unit)
    with _common.Bar() as bar:
        if {"configuration", "block_size", "admin"} & set(names):
            picture.effective, picture.effective_why = bar.during(
                "reading the configuration again", partial(_effective, pid)
            )
        if "audit" in names:
            picture.audits = [
                bar.during(f"recounting {name}", partial(_audit, control, name))
                for name in [pool["pool"] for pool in pools]
            ]
    return picture


def _setting(picture: Picture, name: str) -> Any:
    return picture.settings.get(name, {}).get("value")


def places(socket: str) -> list[Any]:
    """The socket, its lock, and the folders that lead there."""
    from kvslot.cli import host

    return [host.place(socket), host.place(f"{socket}.lock"), *host.folders(socket)]


def _effective(pid: int) -> tuple[dict[str, Any] | None, str]:
    from kvslot.cli import host

    if not pid:
        return (
            None,
            "the daemon's process cannot be seen from here: another container's, or of an older version",
        )
    return host.effective(pid)


def _audit(control: Control, pool: str) -> _control.Row:
    from kvslot.api.client import Refused

    try:
        told = control.audit(pool=pool)
    except Refused as error:
        return {"pool": pool, "why": str(error)}
    return {"pool": pool, "faults": list(told.faults), "milliseconds": told.milliseconds}


# -- where nothing answers --------------------------------------------------------------------------------------------


def _path(arguments: argparse.Namespace) -> str:
    from kvslot.api.client import default_socket

    return arguments.socket or default_socket()


def _no_answer(path: str, error: Exception) -> list[Finding]:
    """Why nobody answers at a socket, as far as it can be seen from outside."""
    from kvslot.api.client import Denied
    from kvslot.cli import host
    from kvslot.cli.checks import Finding

    socket, _, *folders = places(path)
    holder = host.lock_holder(path)
    groups = ", ".join(host.group(each) for each in sorted({os.getegid(), *os.getgroups()}))
    me = f"{host.user(os.geteuid())} ({groups})"
    if isinstance(error, Denied):
        return [
            Finding(
                "reachable", "warning", path, "the daemon is there, and does not let this user look", str(error),
                f"run doctor as root or as the daemon's user, or name {host.user(os.geteuid())} in control_uids",
            )
        ]  # fmt: skip
    found: list[Finding] = []
    hidden = next((each for each in reversed(folders) if each.kind == "hidden"), None)
    missing = next((each for each in reversed(folders) if each.kind == "missing"), None)
    if missing is not None:
        found.append(
            Finding(
                "reachable", "fault", path, f"there is no folder {missing.path}",
                "a daemon makes it when it starts: none has, since this machine started, or it listens elsewhere",
                "systemctl status 'kvslotd@*', or start kvslotd; --socket or KVSLOT_SOCKET says where it listens",
            )
        )  # fmt: skip
    elif socket.kind == "hidden" or hidden is not None:
        where = hidden or folders[0]
        found.append(
            Finding(
                "reachable", "fault", path, f"this user, {me}, may not look into {where.path}", where.text(),
                "add the user to the socket's group (usermod -aG), or run this as root",
            )
        )  # fmt: skip
    elif socket.kind == "missing":
        found.append(
            Finding(
                "reachable", "fault", path, "there is no such socket",
                f"the lock beside it names process {holder}" if holder
                else "no daemon runs there, or it listens elsewhere",
                "systemctl status 'kvslotd@*' and its log; kvslotd --check-config says where it would listen",
            )
        )  # fmt: skip
    elif socket.kind != "socket":
        found.append(
            Finding(
                "reachable", "fault", path, f"this is a {socket.kind}, and no socket",
                "the daemon does not replace what is none", "move it away, or name the right path",
            )
        )  # fmt: skip
    elif not os.access(path, os.W_OK):
        found.append(
            Finding(
                "reachable", "fault", path, f"this user, {me}, may not open it", f"it is {socket.text()}",
                f"usermod -aG {host.group(socket.gid)} {host.user(os.geteuid())}, or other socket_group, socket_mode",
            )
        )  # fmt: skip
    else:
        pid = int(holder.partition(" ")[0]) if holder.partition(" ")[0].isdigit() else 0
        if pid and host.alive(pid):
            state = host.process_state(pid)
            found.append(
                Finding(
                    "reachable", "fault", path, f"process {holder} serves it, and does not answer",
                    "it is stopped" if state == "T" else str(error),
                    f"kill -CONT {pid}" if state == "T"
                    else f"its log says what it does; py-spy dump --pid {pid}; in the last resort kill -ABRT {pid}",
                )
            )  # fmt: skip
        else:
            found.append(
                Finding(
                    "reachable", "fault", path, "a socket lies there, and nobody listens", str(error),
                    "the daemon was killed; start it again (systemctl restart 'kvslotd@*'): it replaces the file",
                )
            )  # fmt: skip
    return found


# -- telling ----------------------------------------------------------------------------------------------------------


def _tell(arguments: argparse.Namespace, socket: str, found: list[Finding], picture: Picture | None) -> int:
    from kvslot.cli import checks

    counts = {verdict: sum(each.verdict == verdict for each in found) for verdict in checks.VERDICTS}
    worst = next((verdict for verdict in checks.VERDICTS if counts[verdict]), "ok")
    code = _common.FAILED if any(counts[each] for each in checks.BAD) else _common.OK
    if picture is None:
        code = _common.UNREACHABLE
    if arguments.json is not None:
        document = {
            "worst": worst,
            "counts": counts,
            "daemon": picture.status if picture is not None else None,
            "rows": [each._asdict() for each in found],
        }
        wrong = _control.write_document(arguments, socket, document)
        if wrong or arguments.json == "-":
            return wrong or code
    from kvslot.cli import _screen

    _print(_screen.console(), socket, found, counts, picture, quiet=arguments.quiet)
    return code


def _print(
    out: Console,
    socket: str,
    found: list[Finding],
    counts: dict[str, int],
    picture: Picture | None,
    *,
    quiet: bool,
) -> None:
    from kvslot.cli import _screen, checks

    shown = [each for each in found if each.verdict in checks.BAD] if quiet else found
    if quiet and not shown:
        return
    told = [
        _common.several(counts[verdict], verdict) if verdict in ("fault", "warning", "note")
        else f"{counts[verdict]} {verdict}"
        for verdict in checks.VERDICTS if counts[verdict]
    ]  # fmt: skip
    if picture is None:
        out.print(f"no answer from {socket}", style="bold")
    else:
        status = picture.status
        out.print(
            f"kvslotd {status['version']} at {socket}: {status['state']} for {_screen.duration(status['uptime_s'])}; "
            f"{', '.join(told)}",
            style="bold",
        )
    order = {verdict: place for place, verdict in enumerate(checks.VERDICTS)}
    table = _screen.table("", "check", "", left=("", "check"))
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for each in sorted(shown, key=lambda each: order[each.verdict]):
        subject = f"{_screen.words(each.subject)}: " if each.subject else ""
        lines = [f"{subject}{_screen.words(each.finding)}"]
        if each.verdict != "ok":
            lines.append(f"why  {_screen.words(each.reason)}")
        if each.remedy:
            lines.append(f"do   {_screen.words(each.remedy)}")
        table.add_row(_styled(each.verdict), each.check, "\n".join(lines))
    out.print(table)


def _styled(verdict: str) -> Any:
    from rich.text import Text

    return Text(verdict, STYLES[verdict])
