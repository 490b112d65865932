"""kvslot: a shared KV-cache pool for LLM servers, with slots for tokens inside every block.

The package is a set of rooms (`kvslot.allocator`, `kvslot.replay`, ...), each a folder at the top of the repository and
each with its own face. This module holds what they have in common: the version. It imports nothing, so that a process
which wants one room pays for that room alone.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
