"""The admin API: HTTP over a Unix socket, or TCP with tokens, for people, scripts, scrapers and a browser.

It is handed a `Source` and a `Ring` of events, and knows nothing else of the daemon.
"""

from kvslot.api.admin.app import ROUTES, Admin, Mounted, now_text
from kvslot.api.admin.auth import TokenError, Tokens, read_tokens
from kvslot.api.admin.events import Ring
from kvslot.api.admin.guard import Caller
from kvslot.api.admin.views import BlockMap, Identity, Page, Source, SourceError

__all__ = [
    "ROUTES",
    "Admin",
    "BlockMap",
    "Caller",
    "Identity",
    "Mounted",
    "Page",
    "Ring",
    "Source",
    "SourceError",
    "TokenError",
    "Tokens",
    "now_text",
    "read_tokens",
]
