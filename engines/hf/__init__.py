"""Hugging Face transformers on a kvslot pool: a `Cache` whose K and V other engines find and read in place.

Needs torch and transformers: pip install 'kvslot[hf]'.
"""

from kvslot.engines.hf.cache import PoolCache, Preempted
from kvslot.engines.hf.layout import LayoutMismatch, Shape, shape_of

__all__ = ["LayoutMismatch", "PoolCache", "Preempted", "Shape", "shape_of"]
