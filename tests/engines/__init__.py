"""Tests of the adapters: each part skips, with a reason, where its engine is not installed."""
