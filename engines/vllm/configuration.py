"""The daemon's configuration for a model under vLLM, as `python -m kvslot.engines.vllm` prints it.

    python -m kvslot.engines.vllm --model DIR --block-size 32 --dtype float32 --pool 4GiB > kvslot.toml
    kvslotd --config kvslot.toml

Needs neither vLLM nor torch: the bytes of a block follow from the model's config.json.  Should vLLM see it otherwise,
the connector says so in vLLM's log, with the numbers that it wants.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

from kvslot.engines.sizes import size
from kvslot.engines.vllm.region import record_bytes

BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float": 4, "half": 2}
WORDS: Final = {"float": "float32", "half": "float16"}


class Unknown(Exception):
    """The configuration does not say what is needed."""


def block_bytes(config: dict[str, Any], block_size: int, dtype: str) -> int:
    """Bytes of `block_size` tokens in all layers.  Raises Unknown for models whose cache is not K and V by heads."""
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    for key in ("kv_lora_rank", "ssm_cfg", "mamba_d_state", "linear_num_key_heads"):
        if config.get(key):
            raise Unknown(f"the model has {key}: its cache is more, or other, than K and V of each head")
    try:
        layers = int(config["num_hidden_layers"])
        heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
        width = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    except KeyError as error:
        raise Unknown(f"config.json has no {error}") from None
    return layers * heads * 2 * width * block_size * BYTES[dtype]


def chosen_dtype(config: dict[str, Any], dtype: str) -> str:
    """What vLLM computes in: as told, or as it reads a model's own."""
    if dtype == "auto":
        text = config.get("text_config") or {}
        dtype = str(
            config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
        )
        if dtype not in ("bfloat16", "float16"):
            raise Unknown(f"the model's dtype is {dtype}, which vLLM does not keep by itself: say --dtype")
    if dtype not in BYTES:
        raise Unknown(f"--dtype {dtype}: one of {', '.join(BYTES)}")
    return WORDS.get(dtype, dtype)


def configuration(
    folder: Path, block_size: int, dtype: str, pool: str, socket: str, name: str, form: str = "copy"
) -> str:
    """The file's text.  Raises Unknown, and OSError where there is no config.json."""
    config = json.loads((folder / "config.json").read_text())
    dtype = chosen_dtype(config, dtype)
    width = block_bytes(config, block_size, dtype)
    if block_size < 1 or block_size % 32:
        raise Unknown(f"--block-size {block_size}: vLLM's CPU backend takes multiples of 32")
    comment = f"# {folder.name} in {dtype}, {block_size} tokens a block: {width // block_size} bytes a token"
    if form == "region":
        comment += " in vLLM's own memory; here a record a block"
        width = record_bytes(block_size)
    lines = [
        comment,
        *([f"socket = {json.dumps(socket)}"] if socket else []),
        "",
        "[[pool]]",
        f"name = {json.dumps(name)}",
        f"size = {json.dumps(pool)}",
        f"block_size = {block_size}",
        f"opaque_block_bytes = {width}",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Exit code 2 where the model does not say enough."""
    parser = argparse.ArgumentParser(
        prog="python -m kvslot.engines.vllm",
        description="Prints the daemon's configuration for a model under vLLM.",
    )
    parser.add_argument("--model", required=True, type=Path, help="the model's folder")
    parser.add_argument("--block-size", type=int, default=128, help="vLLM's --block-size (128)")
    parser.add_argument("--dtype", default="auto", help="vLLM's --dtype (auto)")
    parser.add_argument("--pool", type=size, help="memory of the pool (4GiB; of a directory 4MiB)")
    parser.add_argument("--socket", default="", help="where the daemon listens (default: the usual place)")
    parser.add_argument(
        "--form", choices=("copy", "region"), default="copy", help="the connector's form (copy)"
    )
    parser.add_argument("--name", default="vllm", help="of the pool (vllm)")
    told = parser.parse_args(arguments)
    pool = told.pool or ("4MiB" if told.form == "region" else "4GiB")
    try:
        text = configuration(told.model, told.block_size, told.dtype, pool, told.socket, told.name, told.form)
    except (Unknown, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0
