"""Measured budgets of the core, each beside its target."""

from __future__ import annotations

from kvslot.benchmarks.core import GROUPS, Progress, run
from kvslot.benchmarks.report import Budget, Document, Meta, Result, budgets

__all__ = ["GROUPS", "Budget", "Document", "Meta", "Progress", "Result", "budgets", "run"]
