"""`python -m kvslot.engines.hf DIR`: the daemon's configuration of a pool for a model, from its config.json."""

from __future__ import annotations

import argparse

from kvslot.api.wire import KvslotError
from kvslot.engines.hf.layout import shape_of
from kvslot.engines.sizes import size

DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m kvslot.engines.hf", description=__doc__)
    parser.add_argument("model", metavar="DIR", help="a model's folder, or its name on a hub")
    parser.add_argument(
        "--dtype", default="", choices=DTYPES, help="that the model will be loaded in (default: its own)"
    )
    parser.add_argument("--name", default="default", help="of the pool (default %(default)s)")
    parser.add_argument("--size", default="4GiB", type=size, help="of the pool (default %(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="slots of a block (default %(default)s)")
    options = parser.parse_args(arguments)
    from transformers import AutoConfig  # pyright: ignore[reportMissingImports] - an extra

    try:
        config = AutoConfig.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        parser.error(f"{options.model} has no configuration of a model: {str(error).splitlines()[0]}")
    if options.dtype:
        config.dtype = options.dtype
    try:
        shape = shape_of(config)
    except KvslotError as error:
        parser.error(str(error))
    print(shape.toml(name=options.name, size=options.size, block_size=options.block_size), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
