"""Compaction: where moves buy something, and when the device has time for them.

Knows the core and nothing else of ours: it reads no clock, opens nothing and waits for nobody.
"""

from kvslot.defrag.greedy import Greedy, GreedyParts
from kvslot.defrag.planner import Planner, Plans, Rest, rest
from kvslot.defrag.view import RUN_BLOCKS, Plan, PlannedMove, Purpose

__all__ = [
    "RUN_BLOCKS",
    "Greedy",
    "GreedyParts",
    "Plan",
    "PlannedMove",
    "Planner",
    "Plans",
    "Purpose",
    "Rest",
    "rest",
]
