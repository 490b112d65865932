"""The live page of a daemon: static files that hold nothing of it, and a page without scripts that does.

    /            index.html ─ page/*.js, page/*.css     asks the same views as everybody else: /v1/..., /v1/events
    /plain       tables made here, anew every few seconds, for browsers without scripts; `/` sends those there

The static files are the same for all, so they are served before anybody has shown a token; what fills them comes from
views that need one.  The browser is told to take nothing from anywhere else, to run no text as a script, and to be in
nobody's frame: names that clients gave themselves are shown here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from kvslot.api.admin.app import Mounted
from kvslot.api.admin.events import Ring
from kvslot.api.admin.page.plain import render
from kvslot.api.admin.views import Source

HERE: Final = Path(__file__).parent
KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}

_NOTHING: Final = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
POLICY: Final = (
    f"{_NOTHING}; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
POLICY_PLAIN: Final = f"{_NOTHING}; style-src 'self'"
SHUT: Final = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "X-Frame-Options": "DENY",
}


def mounted(source: Source, ring: Ring) -> tuple[Mounted, ...]:
    """What is to be served beside the views."""

    async def plain() -> bytes:
        return await render(source, ring)

    policy = {**SHUT, "Content-Security-Policy": POLICY}
    files = [
        Mounted(
            "/" if path.name == "index.html" else f"/page/{path.name}",
            KINDS[path.suffix],
            "A file of the page",
            _always(path.read_bytes()),
            policy,
            open=True,
        )
        for path in sorted(HERE.iterdir())
        if path.suffix in KINDS
    ]
    shut = {**SHUT, "Content-Security-Policy": POLICY_PLAIN}
    return (*files, Mounted("/plain", KINDS[".html"], "The page without scripts", plain, shut))


def _always(content: bytes) -> Callable[[], Awaitable[bytes]]:
    async def make() -> bytes:
        return content

    return make


__all__ = ["mounted"]
