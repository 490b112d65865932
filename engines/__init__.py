"""Adapters: real engines whose K and V lie in a kvslot pool.  Each brings its heavy dependency as an extra."""
