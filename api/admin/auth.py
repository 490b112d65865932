"""Who asks, and whether they may: the kernel's word on the Unix socket, a token on TCP.

    Unix socket   whoever can connect (mode and group of the socket) may look; acts need the daemon's own permission,
                  which it gives by user and group as for control verbs
    TCP           every request needs a token: `Authorization: Bearer TOKEN`, or Basic with the token for a password,
                  which is what browsers ask for; acts need a token of the file for acts

Tokens are compared by digests in constant time, and appear nowhere.  Browsers send what they know of a site whoever
makes them do it, so an act must come from a page of ours (Origin, Sec-Fetch-Site) and be JSON; and on the Unix socket,
which is reached through a forwarded port then, the host has to be a name that no foreign site can have.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import os
import pwd
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kvslot.api.admin.views import Identity, SourceError

TOKEN_LEAST: Final = 16
"""Characters; 16 of 64 kinds are 96 bits, beyond all guessing."""
TOKEN_MOST: Final = 512
FILE_BYTES: Final = 1 << 16
TOKENS_MOST: Final = 64


class TokenError(Exception):
    """A token file that cannot be used: `reason` says which and why, `remedy` what to do, the message both."""

    def __init__(self, path: Path, why: str, remedy: str) -> None:
        super().__init__(f"{path}: {why}: {remedy}")
        self.reason = f"{path}: {why}"
        self.remedy = remedy


class Tokens:
    """The tokens of one or two files, as digests: by digest, whether it may act."""

    def __init__(self, digests: Mapping[bytes, bool]) -> None:
        self._digests = dict(digests)

    def __len__(self) -> int:
        return len(self._digests)

    @property
    def names(self) -> Mapping[str, bool]:
        """What logs call them, digits of their digests, and whether each may act."""
        return {_name(digest): acts for digest, acts in self._digests.items()}

    def identify(self, token: str) -> Identity | None:
        """Whose it is, or None.  Takes as long whichever it is."""
        digest = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
        found: Identity | None = None
        for known, acts in self._digests.items():
            if hmac.compare_digest(known, digest):
                found = Identity(how="token", token=_name(known), acts=acts)
        return found


def _name(digest: bytes) -> str:
    return digest.hex()[:8]


def read_tokens(views: str, acts: str) -> Tokens:
    """Tokens from the file for looking and the one for acts ("": none); TokenError says what is wrong with either."""
    digests: dict[bytes, bool] = {}
    for path, may_act in ((views, False), (acts, True)):
        for token in _read(Path(path)) if path else ():
            digests[hashlib.sha256(token.encode()).digest()] = may_act
    return Tokens(digests)


def _read(path: Path) -> list[str]:
    """A token a line; empty lines and those that begin with # are none."""
    fresh = "write one token a line, say of `openssl rand -hex 32`"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        made = f"install -m 600 -o {_me()} /dev/null {path}; openssl rand -hex 32 > {path}"
        raise TokenError(path, "there is no such file", f"make it ({made}), or mend the setting") from None
    except PermissionError:
        raise TokenError(path, f"user {_me()} may not read it{_owner(path)}", _let_read(path)) from None
    except OSError as error:
        raise TokenError(
            path, f"cannot be read: {error.strerror}", "mend that, or name another file"
        ) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise TokenError(path, "is no plain file", "name a file with a token a line")
    with open(descriptor, "rb") as file:
        if status.st_mode & 0o027:
            raise TokenError(
                path, f"mode {stat.S_IMODE(status.st_mode):04o} lets others read or write it",
                f"chmod 600 {path}, or 640 for a group that may read it, and other tokens in it",
            )  # fmt: skip
        try:
            content = file.read(FILE_BYTES + 1)
        except OSError as error:
            raise TokenError(path, f"cannot be read: {error.strerror}", "name another file") from None
    if len(content) > FILE_BYTES:
        raise TokenError(path, f"more than {FILE_BYTES} bytes: this is no token file", "name another one")
    try:
        lines = [line.strip() for line in content.decode("ascii").splitlines()]
    except UnicodeDecodeError:
        raise TokenError(path, "tokens are ASCII text, one a line", fresh) from None
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise TokenError(path, "holds no token", fresh)
    if len(tokens) > TOKENS_MOST:
        raise TokenError(
            path, f"{len(tokens)} tokens, and {TOKENS_MOST} are the most", "take the old ones out"
        )
    for number, token in enumerate(tokens, 1):
        if not TOKEN_LEAST <= len(token) <= TOKEN_MOST or not token.isprintable() or " " in token:
            raise TokenError(
                path, f"token {number}: {TOKEN_LEAST} to {TOKEN_MOST} characters without spaces are needed",
                "write one of `openssl rand -hex 32`",
            )  # fmt: skip
    return tokens


def _me() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _owner(path: Path) -> str:
    """Whose the file is, as far as it can be seen."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f" (it is {status.st_uid}:{status.st_gid} {stat.S_IMODE(status.st_mode):04o})"


def _let_read(path: Path) -> str:
    """What opens a file to this user and nobody else; a folder on the way may be what is closed."""
    try:
        os.stat(path)
    except OSError:
        return f"move it into a folder that user {_me()} may enter, or let it into this one (namei -l {path})"
    return f"chown {_me()} {path} && chmod 600 {path}"


def token_of(authorization: str) -> str:
    """The token in an Authorization header; empty where there is none that can be read."""
    scheme, _, rest = authorization.partition(" ")
    match scheme.lower():
        case "bearer":
            return rest.strip()
        case "basic":
            try:
                return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
            except (binascii.Error, ValueError):
                return ""
    return ""


def by_token(tokens: Tokens | None, authorization: str | None) -> Identity:
    """Who asks on TCP; SourceError 401 without a token that is known."""
    token = token_of(authorization) if authorization else ""
    identity = tokens.identify(token) if token and tokens is not None else None
    if identity is None:
        what = "this token is not known" if token else "a token is needed"
        raise SourceError(401, "unauthorized", what, "send Authorization: Bearer TOKEN, of admin_token_file")
    return identity


def check_host(host: str | None) -> None:
    """On a Unix socket behind a forwarded port: that a browser was not led here by a foreign site's name.

    A name without a dot, `*.localhost` and addresses are nobody else's.
    """
    if not host:
        return
    name = host_of(host)
    if "." not in name or name.endswith(".localhost"):
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        raise SourceError(
            421, "misdirected", f"host {host[:100]!r} is not this daemon", "say http://localhost/"
        ) from None


def check_origin(headers: Mapping[str, str]) -> None:
    """Of an act: that no page of another site sent it by way of a browser."""
    site = headers.get("Sec-Fetch-Site", "none")
    origin = headers.get("Origin")
    foreign = site not in ("none", "same-origin")
    if origin is not None:
        try:
            named = urlsplit(origin).netloc
            foreign = foreign or not named or named != headers.get("Host", "")
        except ValueError:
            foreign = True
    if foreign:
        raise SourceError(403, "foreign_origin", "an act was asked for by a page of another site")


def host_of(host: str) -> str:
    """The name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    if host.count(":") > 1:
        return host.lower()
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).lower()
