"""The process around the core: devices behind a protocol, and what it asks of the garbage collector."""
