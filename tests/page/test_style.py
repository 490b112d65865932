"""What of the page's style can be held against itself without a browser."""

import re

from ..household.tree import ROOT

STYLE = (ROOT / "api" / "admin" / "page" / "page.css").read_text(encoding="utf-8")


def palette(selector: str) -> dict[str, str]:
    """The colours that a rule sets."""
    (body,) = re.findall(re.escape(selector) + r" \{([^}]*)\}", STYLE)
    return dict(re.findall(r"(--[\w-]+): ([^;]+);", body))


def test_dark_is_dark_however_it_came_about() -> None:
    """Who chose dark sees what they see who prefer it, and every colour of it is one that light has, too."""
    preferred, chosen = palette(':root:not([data-theme="light"])'), palette(':root[data-theme="dark"]')
    assert preferred
    assert preferred == chosen
    assert preferred.keys() == {name for name in palette(":root") if re.match("#", palette(":root")[name])}
