"""What a pool must hold for a transformers model: planes from its configuration, compared with those of the daemon.

A pool is laid out when the daemon starts, from the daemon's own configuration; an engine only checks.  It compares
every plane by name, dtype and shape of a slot, so that a pool of another model's shape is refused before anything is
written, and the refusal prints the TOML that would fit.  (That the shape fits does not say that the *content* is
this model's: that is the namespace's affair, see `kvslot.engines.fingerprint`.)

Refused are models whose cache is more than K and V of each token in each layer: what a prefix has left behind in a
recurrent layer, in an encoder or in an indexer would be missing after a hit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

from kvslot.api.client import PoolMemory
from kvslot.api.wire import KvslotError, Plane, Unsupported

FULL: Final = frozenset({"full_attention", "attention", "global_attention", "chunked_attention"})
"""Kinds of layers that keep K and V of every token.  Chunks are the mask's affair."""
SLIDING: Final = frozenset({"sliding_attention", "local_attention"})
"""Those that look back no further than the window."""


class LayoutMismatch(KvslotError):
    """The pool is laid out for another model; the message has the configuration that would fit."""


@dataclass(frozen=True, slots=True)
class Shape:
    """K and V of a model, layer by layer."""

    heads: tuple[int, ...]
    """KV heads of each layer."""
    key: int
    """Width of a head's K."""
    value: int
    """Width of a head's V."""
    dtype: str
    """As torch calls it, without the "torch."."""
    windows: tuple[int, ...]
    """Sliding window of each layer in tokens, its own included; 0: none."""
    folder: str = ""
    """Where the model's config.json lies, if that is known."""

    @property
    def windowed(self) -> bool:
        """Whether every layer has a window, so that the front of a sequence may be forgotten."""
        return all(self.windows)

    @property
    def mixed(self) -> bool:
        """Whether some layers have a window and others need all tokens."""
        return any(self.windows) and not all(self.windows)

    def planes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> dtype and shape of a slot, in the order of the pool."""
        out: dict[str, tuple[str, tuple[int, ...]]] = {}
        for layer, heads in enumerate(self.heads):
            out[f"{layer}.k"] = (self.dtype, (heads, self.key))
            out[f"{layer}.v"] = (self.dtype, (heads, self.value))
        return out

    def toml(self, *, name: str = "default", size: str = "4GiB", block_size: int = 16) -> str:
        """The daemon's configuration of a pool for this model."""
        lines = ["[[pool]]", f'name = "{name}"', f'size = "{size}"', f"block_size = {block_size}"]
        if len(set(self.heads)) == 1:
            value = f", value_dim = {self.value}" if self.value != self.key else ""
            lines.append(
                f"layout = {{ layers = {len(self.heads)}, kv_heads = {self.heads[0]}, head_dim = {self.key}{value}, "
                f'dtype = "{self.dtype}" }}'
            )
        else:
            lines += [f'model_config = "{self.folder or "FOLDER OF THE MODEL"}"', f'dtype = "{self.dtype}"']
        if self.windowed:
            lines.append("windowed = true")
        return "\n".join(lines) + "\n"

    def table(self) -> dict[str, Any]:
        """The same as `toml` says it, as a `layout` table."""
        table: dict[str, Any] = {
            "layers": len(self.heads), "kv_heads": self.heads[0], "head_dim": self.key, "dtype": self.dtype,
        }  # fmt: skip
        if self.value != self.key:
            table["value_dim"] = self.value
        return table


def shape_of(model: Any) -> Shape:
    """K and V of a transformers model, or of its configuration (then in the configuration's dtype).

    Raises Unsupported for models that keep more than that, or what this version does not know.
    """
    outer = getattr(model, "config", model)
    config = outer.get_text_config(decoder=True) if hasattr(outer, "get_text_config") else outer
    dtype = str(getattr(model, "dtype", None) or getattr(config, "dtype", None) or "").removeprefix("torch.")
    if not dtype:
        raise Unsupported("the configuration names no dtype: give the model itself")
    if getattr(outer, "is_encoder_decoder", False):
        raise Unsupported(
            "an encoder's K and V belong to no token of the prompt: kvslot holds decoder-only models"
        )
    lacks = [
        name
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        if not hasattr(config, name)
    ]
    if lacks:
        raise Unsupported(
            f"{type(outer).__name__} has no {', '.join(lacks)}: not a model whose layers keep K and V"
        )
    if getattr(config, "index_n_heads", None):
        raise Unsupported(f"{type(outer).__name__}: an indexer keeps more than K and V of each token")
    if _both_ways(outer) or _both_ways(config):
        raise Unsupported(
            f"{type(outer).__name__}: tokens see those after them, so that a prefix's K and V depend on both"
        )
    layers = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or 0
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * layers
    strange = sorted(set(kinds) - FULL - SLIDING)
    if strange or getattr(config, "kv_sharing_modes", None) or getattr(config, "num_kv_shared_layers", 0):
        what = f"layers of kind {', '.join(strange)}" if strange else "layers that use others' K and V"
        raise Unsupported(f"{type(outer).__name__}: {what} keep more, or less, than K and V of each token")
    attention = int(config.num_attention_heads)
    heads = getattr(config, "num_key_value_heads", None)
    if heads is None:
        heads = 1 if getattr(config, "multi_query", False) else attention
    each = tuple(int(n) for n in heads) if isinstance(heads, list | tuple) else (int(heads),) * layers
    width = getattr(config, "head_dim", None) or int(config.hidden_size) // attention
    key, value = int(width), int(width)
    if getattr(config, "kv_lora_rank", None):  # transformers keeps what MLA's latent expands to
        each = (attention,) * layers
        key, value = int(config.qk_nope_head_dim) + int(config.qk_rope_head_dim), int(config.v_head_dim)
    name = str(getattr(outer, "_name_or_path", "") or "")
    return Shape(
        each, key, value, dtype,
        tuple(int(window) if kind in SLIDING else 0 for kind in kinds),
        name if os.path.isdir(name) else "",
    )  # fmt: skip


def _both_ways(config: Any) -> bool:
    """Whether text sees what comes after it.  "vision" means images alone, and those are refused with their forward."""
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        return True
    if getattr(config, "is_decoder", None) is False and not str(config.model_type).startswith("gpt_neox"):
        return True  # the BERT family; GPT-NeoX has the key, and is causal whatever it says
    return getattr(config, "is_causal", None) is False


def check(pool: PoolMemory, shape: Shape) -> None:
    """Raises LayoutMismatch unless the pool holds what the model needs, plane by plane."""
    wanted = shape.planes()
    have = {name: (plane.dtype, tuple(plane.shape)) for name, plane in pool.planes.items()}
    if have == wanted:
        return
    if pool.description.granularity != "token":
        why = "holds opaque blocks, whose inside is another engine's affair"
    else:
        missing = [name for name in wanted if have.get(name) != wanted[name]]
        name = missing[0] if missing else next(each for each in have if each not in wanted)
        plane: Plane | None = pool.planes.get(name)
        ours = f"{wanted[name][1]} {wanted[name][0]}" if name in wanted else "nothing"
        theirs = f"{tuple(plane.shape)} {plane.dtype}" if plane is not None else "nothing"
        why = f"has {theirs} in plane {name}, where the model has {ours}"
    raise LayoutMismatch(
        f"pool {pool.name!r} is not laid out for this model: it {why}. A pool that is:\n\n{shape.toml()}"
    )


__all__ = ["LayoutMismatch", "Shape", "check", "shape_of"]
