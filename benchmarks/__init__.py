"""Measured budgets of the core, the daemon and engines on it, each beside its target."""

from __future__ import annotations

from kvslot.benchmarks.compaction import GROUPS as COMPACTION_GROUPS
from kvslot.benchmarks.compaction import USUAL as COMPACTION_USUAL
from kvslot.benchmarks.compaction import run as run_compaction
from kvslot.benchmarks.core import GROUPS, Progress, run
from kvslot.benchmarks.engines import GROUPS as ENGINES_GROUPS
from kvslot.benchmarks.engines import run as run_engines
from kvslot.benchmarks.memory import GROUPS as MEMORY_GROUPS
from kvslot.benchmarks.memory import run as run_memory
from kvslot.benchmarks.report import Budget, Document, Meta, Result, budgets
from kvslot.benchmarks.rpc import GROUPS as RPC_GROUPS
from kvslot.benchmarks.rpc import run as run_rpc

__all__ = [
    "COMPACTION_GROUPS",
    "COMPACTION_USUAL",
    "ENGINES_GROUPS",
    "GROUPS",
    "MEMORY_GROUPS",
    "RPC_GROUPS",
    "Budget",
    "Document",
    "Meta",
    "Progress",
    "Result",
    "budgets",
    "run",
    "run_compaction",
    "run_engines",
    "run_memory",
    "run_rpc",
]
