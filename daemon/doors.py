"""The doors of the admin API, its Unix socket and TCP: each is opened by itself, and engines need neither.

What stands in the way of one (a port that is taken, an address that is not there, a token file that cannot be read, a
folder that refuses) is found here and told as `Shut`, with what to do about it.  The daemon serves without that door,
and tries again when its settings are read again.  `problems` looks at the same without opening anything, for
`kvslotd --check-config`.

All of it may wait for a file system or for who listens at a path: while engines are served it runs beside the loop.
"""

from __future__ import annotations

import errno
import os
import pwd
import socket
from pathlib import Path
from typing import Final, NamedTuple

from kvslot.api.admin.auth import TokenError, Tokens, read_tokens
from kvslot.daemon import config
from kvslot.daemon.endpoint import Endpoint, EndpointError, claim
from kvslot.daemon.notify import Store

BACKLOG: Final = 64
AGAIN: Final = "then `kvslotctl reload`"
UNIT_USER: Final = "kvslot"
"""Whom the units run as: what root can read is not what that one can."""

Listener = tuple[Endpoint, socket.socket]


class Shut(NamedTuple):
    """A door that is not open, by the name of its setting."""

    door: str
    where: str
    reason: str
    remedy: str
    taken: bool = False
    """Somebody else listens there."""

    def text(self) -> str:
        """In one sentence."""
        return f"{self.door} {self.where}: {self.reason}: {self.remedy}"


def read(settings: config.Settings) -> Tokens | TokenError:
    """The tokens for TCP, or why there are none."""
    try:
        return read_tokens(settings.admin_token_file, settings.admin_act_token_file)
    except TokenError as error:
        return error


def open_socket(settings: config.Settings, store: Store) -> list[Listener] | Shut:
    """The Unix socket, or those that the service manager passed, listening."""
    path = config.admin_socket(settings)
    endpoints: list[Endpoint] = []
    try:
        endpoints = claim(store, "admin", path)
        return [
            (each, each.listen(settings.admin_socket_mode, settings.admin_socket_group)) for each in endpoints
        ]
    except (EndpointError, OSError) as error:
        for each in endpoints:
            each.close()
        return Shut("admin_socket", path, str(error), f"mend that, {AGAIN}; admin = false does without it")


def open_tcp(settings: config.Settings, tokens: Tokens | TokenError | None) -> socket.socket | Shut:
    """The TCP socket, listening; `tokens`: as `read` found them."""
    if not isinstance(tokens, Tokens):
        reason, remedy = (tokens.reason, tokens.remedy) if tokens is not None else ("there are no tokens", "")
        return Shut("admin_tcp", settings.admin_tcp, reason, f"{remedy}, {AGAIN}")
    try:
        return _listening(*config.admin_address(settings))
    except (OSError, ValueError) as error:
        taken = getattr(error, "errno", 0) == errno.EADDRINUSE
        return Shut("admin_tcp", settings.admin_tcp, *_trouble(error, settings), taken)


def move_tcp(
    settings: config.Settings, tokens: Tokens | TokenError, old: socket.socket
) -> tuple[socket.socket | Shut, socket.socket | None]:
    """The TCP socket at another address than `old` has, and what serves at that one from now on.

    That is `old`; but one address may be part of the other (0.0.0.0 and 127.0.0.1), and then `old` is closed first, and
    had again where that did not help.
    """
    host, port = old.getsockname()[:2]
    opened = open_tcp(settings, tokens)
    if not (isinstance(opened, Shut) and opened.taken and config.admin_address(settings)[1] == port):
        return opened, old
    old.close()
    opened = open_tcp(settings, tokens)
    if isinstance(opened, Shut):
        try:
            return opened, _listening(host, port)
        except OSError:
            pass  # somebody was quicker
    return opened, None


def _listening(host: str, port: int) -> socket.socket:
    sock = _bound(host, port)
    try:
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _bound(host: str, port: int) -> socket.socket:
    """A socket at the address, not listening yet; OSError where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def _trouble(error: OSError | ValueError, settings: config.Settings) -> tuple[str, str]:
    """What is wrong with an address, and what to do."""
    number = error.errno if isinstance(error, OSError) else 0
    _, _, port = settings.admin_tcp.rpartition(":")
    if number == errno.EADDRINUSE:
        holder = listener(int(port)) if port.isdigit() else ""
        return f"the port is taken{holder and f' by {holder}'}", (
            f"end who has it (ss -ltnp 'sport = :{port}'), or choose another port, {AGAIN}"
        )
    if number == errno.EADDRNOTAVAIL:
        return "this machine has no such address", f"name one of `ip -brief address`, {AGAIN}"
    if number == errno.EACCES:
        return "this user may not have that port", f"choose one from 1024 on, {AGAIN}"
    if number in (errno.EPERM, errno.EAFNOSUPPORT):
        return (
            "this process may not use TCP",
            f"the unit needs its drop-in admin-tcp.conf, and a restart for it; else mend that, {AGAIN}",
        )
    told = error.strerror if isinstance(error, OSError) else str(error)
    return f"cannot be served: {told}", f"mend that, {AGAIN}"


# -- without opening anything ------------------------------------------------------------------------------------------


def problems(settings: config.Settings) -> list[str]:
    """What would keep a door of these settings shut now, in sentences, as the user who asks."""
    if not settings.admin:
        return []
    found = []
    if settings.admin_socket and not os.access(
        _nearest(Path(settings.admin_socket).parent), os.W_OK | os.X_OK
    ):
        folder = _nearest(Path(settings.admin_socket).parent)
        found.append(f"admin_socket: {folder} is not to be written by this user; choose a folder that is")
    if not settings.admin_tcp:
        return found
    tokens = read(settings)
    if isinstance(tokens, TokenError):
        found.append(f"admin_tcp is not served without tokens: {tokens}")
    try:
        _bound(*config.admin_address(settings)).close()
    except (OSError, ValueError) as error:
        if getattr(error, "errno", 0) != errno.EADDRINUSE or not _is_ours(settings):
            found.append(Shut("admin_tcp", settings.admin_tcp, *_trouble(error, settings)).text())
    return found


def hints(settings: config.Settings) -> list[str]:
    """Files that root, who asks, can read, and whom the units run as cannot."""
    if os.geteuid() or not settings.admin or not settings.admin_tcp:
        return []
    return [
        f"{path}: root can read it; user {UNIT_USER}, whom the units run as, cannot: "
        f"chgrp {UNIT_USER} {path} && chmod 640 {path}"
        for path in (settings.admin_token_file, settings.admin_act_token_file)
        if path and not _unit_reads(path)
    ]


def _nearest(folder: Path) -> Path:
    """The folder, or what is there of those that lead to it: the others are made."""
    return next((each for each in (folder, *folder.parents) if each.exists()), folder)


def _unit_reads(path: str) -> bool:
    """Whether the units' user may read a file, by its mode; true where there is no such user."""
    try:
        told, user = os.stat(path), pwd.getpwnam(UNIT_USER)
    except (OSError, KeyError):
        return True
    if told.st_uid == user.pw_uid:
        return bool(told.st_mode & 0o400)
    return bool(told.st_mode & 0o040) and told.st_gid in os.getgrouplist(user.pw_name, user.pw_gid)


def listener(port: int) -> str:
    """Who listens on a TCP port here, "process 4711 (name)", as far as this user may see that; else ""."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{words[9]}]")
    for process in Path("/proc").iterdir() if sockets else ():
        if not process.name.isdigit():
            continue
        try:
            for each in (process / "fd").iterdir():
                if os.readlink(each) in sockets:
                    return f"process {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:
            continue
    return ""


def _is_ours(settings: config.Settings) -> bool:
    """Whether it is the daemon of these settings that has the port, which it would find free after its own end."""
    _, port = config.admin_address(settings)
    try:
        holder = Path(f"{settings.socket}.lock").read_text().split()[0]
    except (OSError, IndexError):
        return False
    found = listener(port)
    return found.split()[1:2] == [holder] if found else Path(f"/proc/{holder}").exists()
