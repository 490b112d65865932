"""The core: pages of slots and a shared prefix tree. Pure Python, no I/O, no clock, no asyncio."""
