"""Elements as text.  A plain string that becomes a child or an attribute is escaped; only `Html` goes through as it is.

Names of traces, notes and commands come from outside, and a page that is sent on to others must not carry what
somebody hid in a file name.  So nothing here joins raw text: `el` is the only place where a `<` is written.
"""

from __future__ import annotations

import re
from html import escape
from typing import Final

VOID: Final = frozenset({"meta", "br", "col", "input", "hr"})
_UNFIT: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def clean(value: object) -> str:
    """`value` with the characters that no page may hold replaced by U+FFFD."""
    return _UNFIT.sub("\ufffd", str(value))


def text(value: object) -> Html:
    """`value` as text between tags or in a quoted attribute."""
    return Html(escape(clean(value), quote=True))


def el(name: str, *children: object, **attributes: str | int | bool | None) -> Html:
    """An element.  Attributes: a trailing underscore is dropped, others become dashes; True stands alone, False and
    None are left out."""
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(f" {key}" if value is True else f' {key}="{text(value)}"')
    parts.append(">")
    if name not in VOID:
        parts += [child if isinstance(child, Html) else text(child) for child in children]
        parts.append(f"</{name}>")
    return Html("".join(parts))


def join(*children: object) -> Html:
    """Children without an element around them."""
    return Html("".join(child if isinstance(child, Html) else text(child) for child in children))


def name(value: str) -> Html:
    """A name from outside: set apart, so that its writing direction does not spill over to what stands beside it."""
    return el("bdi", value or "(no name)")


def script_json(encoded: bytes) -> Html:
    """JSON for a script element: nothing in it can end the element, open a comment or break a line of script."""
    plain = encoded.decode()
    for char in "<>&\u2028\u2029":
        plain = plain.replace(char, f"\\u{ord(char):04x}")
    return Html(plain)
