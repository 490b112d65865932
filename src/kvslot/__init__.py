"""kvslot: a shared KV-cache pool for LLM servers, with slots for tokens inside every block.

The package is a set of rooms (`kvslot.allocator`, `kvslot.replay`, ...), each a folder at the top of the repository and
each with its own face.  This module holds what they have in common, the version, and what most come for, `Client`.  It
imports nothing by itself, so that a process which wants one room pays for that room alone.
"""

TYPE_CHECKING = False  # type checkers know the name, and take it for true

if TYPE_CHECKING:
    from kvslot.api.client import Client

__version__ = "0.1.0"
__all__ = ["Client", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Client":
        from kvslot.api.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
