"""The command line, `kvslotctl`."""
