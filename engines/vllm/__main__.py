"""Prints the daemon's configuration for a model under vLLM: see `configuration`."""

from kvslot.engines.vllm.configuration import main

if __name__ == "__main__":
    raise SystemExit(main())
