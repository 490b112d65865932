"""Compaction: where moves buy something, and when the device has time for them.

Knows the core and nothing else of ours: it reads no clock, opens nothing and waits for nobody.
"""
