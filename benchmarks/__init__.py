"""Measured budgets of the core, each beside its target."""
