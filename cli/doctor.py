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
    from kvslot.cli.reach import Why

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

STEP_S: Final = 5.0
"""Of one answer: each takes milliseconds, but for audits."""
AUDIT_S: Final = 60.0
"""Of one pool: a copy of the daemon recounts a million slots in seconds."""
LOOK_S: Final = 0.5
"""Between two looks at the process while its recount is waited for."""
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
    from kvslot.api.client import Denied, Disconnected, KvslotError, PeerFault
    from kvslot.cli import checks, reach

    try:
        _common.check_writable(arguments.json)
    except OSError as error:
        return _control.fail(arguments, f"cannot write {arguments.json}: {error.strerror}", _common.BAD_INPUT)
    try:
        with _common.Bar() as bar:
            control = bar.during("connecting", lambda: reach.connected(arguments.socket, STEP_S))
            with control:
                picture = see(control, names, bar)
        return _tell(arguments, control.socket, checks.look(picture, names), picture)
    except PeerFault as error:
        if "speaks HTTP" not in str(error):
            return _control.fail(
                arguments, f"{error}; is it a kvslotd, of this version?", _common.UNREACHABLE
            )
        found = [_unreachable(_path(arguments), reach.is_admin(_path(arguments)))]
        return _tell(arguments, _path(arguments), found, None)
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


def see(control: Control, names: list[str], bar: _common.Bar) -> Picture:
    """Everything that these checks go by; only `audit` makes the daemon work.  Each step has a limit of its own."""
    from kvslot import __version__
    from kvslot.api.client import BadRequest, NotFound
    from kvslot.api.wire import VERSION
    from kvslot.cli import checks, host

    def ask(kind: str, pool: str = "") -> list[_control.Row]:
        try:
            return bar.during(f"asking for {kind}", lambda: list(control.inspect(kind, pool=pool)))
        except (NotFound, BadRequest):
            return []  # a daemon of before

    (status,) = ask("status")
    pools = ask("pools")
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
            picture.health, picture.health_why = bar.during("asking /healthz", partial(host.health, path))
    if picture.unit:
        picture.stop_seconds = bar.during("asking systemd", partial(host.stop_seconds, picture.unit))
    if {"configuration", "block_size", "admin"} & set(names):
        picture.effective, picture.effective_why = bar.during(
            "reading the configuration again", partial(_effective, pid)
        )
    if "audit" in names:
        picture.audits = [
            bar.during(f"recounting {name}", partial(recount, control.socket, name, pid))
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


def recount(socket: str, pool: str, pid: int) -> _control.Row:
    """Waits for a recount for as long as the daemon can make one: one that is stopped meanwhile is not waited for."""
    import threading

    from kvslot.api.client import Control, KvslotError
    from kvslot.cli import host, reach

    told: list[_control.Row] = []

    def wait() -> None:
        try:
            with Control(socket, timeout=AUDIT_S) as control:
                found = control.audit(pool=pool)
            told.append({"pool": pool, "faults": list(found.faults), "milliseconds": found.milliseconds})
        except KvslotError as error:
            told.append({"pool": pool, "why": str(error)})

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(LOOK_S)
        if pid and thread.is_alive() and host.process_state(pid) in ("T", "t", "Z", "X", ""):
            why = reach.halted(socket)
            return {"pool": pool, "why": why.text() if why else f"process {pid} does not go on"}
    return told[0]


# -- where nothing answers --------------------------------------------------------------------------------------------


def _path(arguments: argparse.Namespace) -> str:
    from kvslot.api.client import default_socket

    return arguments.socket or default_socket()


def _unreachable(path: str, why: Why) -> Finding:
    from kvslot.cli.checks import Finding

    return Finding("reachable", "fault", path, *why)


def _no_answer(path: str, error: Exception) -> list[Finding]:
    """Why nobody answers at a socket, as far as it can be seen from outside."""
    from kvslot.api.client import Denied
    from kvslot.cli import host, reach
    from kvslot.cli.checks import Finding
    from kvslot.cli.reach import Why

    me = host.user(os.geteuid())
    if isinstance(error, Denied):
        return [
            Finding(
                "reachable", "warning", path, "the daemon is there, and does not let this user look", str(error),
                f"run doctor as root or as the daemon's user, or name {me} in control_uids",
            )
        ]  # fmt: skip
    if isinstance(error, reach.Silent):
        return [_unreachable(path, error.why)]
    socket, _, *folders = places(path)
    held = reach.holder(path)
    groups = ", ".join(host.group(each) for each in sorted({os.getegid(), *os.getgroups()}))
    hidden = next((each for each in reversed(folders) if each.kind == "hidden"), None)
    missing = next((each for each in reversed(folders) if each.kind == "missing"), None)
    dead = held is not None and not held.state
    if missing is not None:
        why = Why(
            f"there is no folder {missing.path}",
            "a daemon makes it when it starts: none has, since this machine started, or it listens elsewhere",
            "systemctl status 'kvslotd@*', or start kvslotd; --socket or KVSLOT_SOCKET says where it listens",
        )  # fmt: skip
    elif socket.kind == "hidden" or hidden is not None:
        shut = next((each for each in reversed(folders) if not os.access(each.path, os.X_OK)), folders[0])
        why = Why(
            f"this user, {me} ({groups}), may not look into {shut.path}", shut.text() if shut.uid >= 0 else "",
            reach.admission(shut.gid, shut.mode & 0o010, "let the engines' group enter that folder"),
        )  # fmt: skip
    elif socket.kind == "missing":
        named = (
            f"the lock beside it names process {held.pid}" if held is not None and not held.foreign else ""
        )
        why = Why(
            "there is no such socket",
            f"{named}, which is dead" if dead
            else f"{named}, which is there: somebody removed the socket's file, or it is not made yet" if named
            else "no daemon runs there, or it listens elsewhere",
            "systemctl status 'kvslotd@*' and its log; kvslotd --check-config says where it would listen",
        )  # fmt: skip
    elif socket.kind != "socket":
        why = Why(
            f"this is a {socket.kind}, and no socket", "the daemon does not replace what is none",
            "move it away, or name the right path",
        )  # fmt: skip
    elif not os.access(path, os.W_OK):
        why = Why(
            f"this user, {me} ({groups}), may not open it", f"it is {socket.text()}",
            reach.admission(
                socket.gid, socket.mode & 0o020,
                "give the socket a group of its own: socket_group and socket_mode in the daemon's settings",
            ),
        )  # fmt: skip
    elif held is None or dead or (held.foreign and isinstance(error.__cause__, ConnectionRefusedError)):
        named = (
            f": the lock beside it names process {held.pid}, which is dead"
            if dead and held is not None
            else ""
        )
        why = Why(
            f"a socket lies there, and nobody listens{named}", str(error),
            "the daemon was killed; start it again (systemctl restart 'kvslotd@*'): it replaces the file",
        )  # fmt: skip
    elif held.foreign:
        why = reach.silent(path)
    else:
        why = reach.halted(path) or Why(
            f"{held.text()} holds its lock, and there is no answer", str(error),
            f"its log says what it does; py-spy dump --pid {held.pid}",
        )  # fmt: skip
    return [_unreachable(path, why)]


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
