"""Replay recorded serving traces through allocation policies."""
