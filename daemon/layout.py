"""What one token's slot holds: the planes of a pool, from a model's `config.json`, a few numbers, or bytes per block.

A *plane* is one strided array over all slots of the pool; a layout names them in order and says how wide a slot is in
each.  Layouts are plane-major, so that each layer's K and V are ordinary tensors for the kernels:

    granularity   planes, in order                                                   one slot of a plane
    token         0.k  0.v  1.k  1.v ...                    GQA, MHA, MQA             (kv_heads, head_dim)
                  0.k  0.v  0.k.scale  0.v.scale  1.k ...   fp8                       (kv_heads,) float32 for scales
                  0.kv  1.kv ...                            MLA                       (kv_lora_rank + qk_rope_head_dim,)
    opaque        blocks                                    the engine's own affair   (block_bytes / block_size,) bytes

    bytes per token (GQA) = 2 * layers * kv_heads * head_dim * bytes of the dtype
    bytes per token (MLA) =     layers * (kv_lora_rank + qk_rope_head_dim) * bytes of the dtype

Each plane begins at a multiple of 4096 bytes in the pool's memory: importers map it wherever they like, and no page
belongs to two planes.

A cached token that lacks something its model needs is the worst fault there is, wrong bytes under a right-looking
answer.  So a model whose state per token is not known to be these planes and nothing else (recurrent layers, attention
to images or to an encoder, an indexer with keys of its own, layers that differ in ways this module does not know) is
refused with a reason, never guessed at.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from kvslot.api.wire import Plane
from kvslot.daemon.device import Geometry

ALIGNMENT: Final = 4096
"""Bytes; of a plane's start.  The page size, which is what mappings are made of."""

DTYPES: Final[Mapping[str, int]] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}
"""Bytes of one value, by the names that torch uses."""

ALIASES: Final[Mapping[str, str]] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "float8_e4m3": "float8_e4m3fn",
}
"""What people and engines write instead."""

LAYERS_MAX: Final = 4096
HEADS_MAX: Final = 4096
HEAD_DIM_MAX: Final = 65536
SLOT_BYTES_MAX: Final = 1 << 30
"""Far beyond any model; below, sums stay within what offsets and the wire can say."""


class LayoutError(ValueError):
    """No layout can be made from this, and why; the message names the key, its value, and what would help."""


class PlaneSpec(msgspec.Struct, frozen=True):
    """One plane: its name, and what a slot of it holds."""

    name: str
    slot_bytes: int
    dtype: str
    shape: tuple[int, ...]


class Layout(msgspec.Struct, frozen=True):
    """What a slot holds, plane by plane."""

    granularity: str
    """"token", or "opaque": only whole blocks mean something."""
    planes: tuple[PlaneSpec, ...]
    model: str
    """For people: where the layout comes from."""
    windowed: bool = False
    """Every layer has a sliding window, so that the front of a sequence may be forgotten."""
    block_size: int = 0
    """Slots of a block, where that is part of what the bytes mean (opaque); else 0."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token in all planes."""
        return sum(plane.slot_bytes for plane in self.planes)

    @property
    def fingerprint(self) -> str:
        """16 hex digits: equal where the bytes of a slot mean the same.  `model` and `windowed` are not part of it."""
        meaning = [self.granularity, self.block_size if self.granularity == "opaque" else 0]
        planes = [[plane.name, plane.dtype, list(plane.shape)] for plane in self.planes]
        text = json.dumps([meaning, planes], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def geometry(self, slots: int) -> Geometry:
        """The shape of a device's memory for so many slots."""
        return Geometry(
            slots=slots, slot_bytes=tuple(plane.slot_bytes for plane in self.planes), alignment=ALIGNMENT
        )

    def place(self, slots: int) -> list[Plane]:
        """The planes as clients are told of them, for a pool of so many slots; offsets in bytes."""
        return [
            Plane(
                name=plane.name,
                offset=offset,
                slot_bytes=plane.slot_bytes,
                dtype=plane.dtype,
                shape=plane.shape,
            )
            for plane, offset in zip(self.planes, self.geometry(slots).offsets, strict=True)
        ]

    def size_bytes(self, slots: int) -> int:
        """Bytes of a pool of so many slots, the gaps between planes included."""
        return self.geometry(slots).total_bytes

    def slots_within(self, size_bytes: int, multiple: int = 1) -> int:
        """The most slots, a multiple of `multiple`, whose pool takes no more than so many bytes; 0 if none fit."""
        fits, beyond = 0, size_bytes // (self.slot_bytes * multiple) + 1
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            if self.size_bytes(middle * multiple) <= size_bytes:
                fits = middle
            else:
                beyond = middle
        return fits * multiple


# -- by hand ----------------------------------------------------------------------------------------------------------


def plain(
    layers: int,
    kv_heads: int | Sequence[int],
    head_dim: int,
    dtype: str,
    *,
    value_dim: int = 0,
    scales: bool = True,
    model: str = "",
    windowed: bool = False,
) -> Layout:
    """K and V of each layer.  `kv_heads` may differ from layer to layer; `value_dim` 0: V is as wide as K.

    `scales`: fp8 has a float32 for each KV head of each token; False where the kernels use one for all.
    """
    _in_range("layers", layers, 1, LAYERS_MAX)
    heads = [kv_heads] * layers if isinstance(kv_heads, int) else list(kv_heads)
    if len(heads) != layers:
        raise LayoutError(
            f"kv_heads has {len(heads)} entries for {layers} layers: give one number, or one a layer"
        )
    for each in heads:
        _in_range("kv_heads", each, 1, HEADS_MAX)
    _in_range("head_dim", head_dim, 1, HEAD_DIM_MAX)
    if value_dim:
        _in_range("value_dim", value_dim, 1, HEAD_DIM_MAX)
    name = dtype_of(dtype)
    planes: list[PlaneSpec] = []
    for layer, count in enumerate(heads):
        parts = (("k", head_dim), ("v", value_dim or head_dim))
        planes += [_plane(f"{layer}.{part}", name, (count, width)) for part, width in parts]
        if scales and _is_fp8(name):
            planes += [_plane(f"{layer}.{part}.scale", "float32", (count,)) for part, _ in parts]
    shown = str(heads[0]) if len(set(heads)) == 1 else "various"
    several = "" if heads[0] == 1 and len(set(heads)) == 1 else "s"
    said = model or f"{_layers(layers)} of {shown} KV head{several} of {head_dim}"
    return _checked(Layout("token", tuple(planes), f"{said}, {name}", windowed))


def _layers(number: int) -> str:
    return f"{number} layer{'' if number == 1 else 's'}"


def latent(
    layers: int, width: int, dtype: str, *, scales: bool = True, model: str = "", windowed: bool = False
) -> Layout:
    """One plane a layer, K and V in one latent vector of `width` values (MLA)."""
    _in_range("layers", layers, 1, LAYERS_MAX)
    _in_range("latent", width, 1, HEAD_DIM_MAX)
    name = dtype_of(dtype)
    planes: list[PlaneSpec] = []
    for layer in range(layers):
        planes.append(_plane(f"{layer}.kv", name, (width,)))
        if scales and _is_fp8(name):
            planes.append(_plane(f"{layer}.kv.scale", "float32", (1,)))
    said = model or f"{_layers(layers)} of a latent of {width}"
    return _checked(Layout("token", tuple(planes), f"{said}, {name}", windowed))


def opaque(block_bytes: int, block_size: int) -> Layout:
    """Blocks of so many bytes whose inside is the engine's own affair."""
    _in_range("block_size", block_size, 1, 1 << 20)
    _in_range("opaque_block_bytes", block_bytes, 1, SLOT_BYTES_MAX)
    width, rest = divmod(block_bytes, block_size)
    if rest:
        raise LayoutError(
            f"opaque_block_bytes = {block_bytes} is no multiple of block_size = {block_size}: "
            f"round it up to {(width + 1) * block_size}"
        )
    said = f"opaque blocks of {block_bytes} byte{'' if block_bytes == 1 else 's'}"
    return Layout("opaque", (_plane("blocks", "uint8", (width,)),), said, block_size=block_size)


def dtype_of(name: str) -> str:
    """The torch name of a dtype, which may come with "torch." before it or as engines abbreviate it."""
    plain_name = name.strip().lower().removeprefix("torch.")
    found = ALIASES.get(plain_name, plain_name)
    if found not in DTYPES:
        known = ", ".join((*DTYPES, "fp8"))
        raise LayoutError(f"dtype {name!r} is not known: use one of {known}")
    return found


# -- from a model -----------------------------------------------------------------------------------------------------

_INNER: Final = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where models of several kinds of input keep what concerns their language model."""

_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS: Final = (
    "num_key_value_heads_per_layer",
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
    "num_attention_groups",
)
_WIDTH: Final = ("hidden_size", "n_embd", "d_model", "model_dim")
_HEAD_DIM: Final = ("head_dim", "kv_channels", "attention_head_dim")

_RECURRENT: Final = ("mamba", "rwkv", "recurrent", "linear", "lightning", "retnet", "lstm", "hyena")
"""Parts of the names of model types whose layers keep a state that is not one of tokens."""
_ATTENTION: Final = frozenset(
    {
        "attention",
        "full_attention",
        "global_attention",
        "sliding_attention",
        "local_attention",
        "chunked_attention",
    }
)
"""Kinds of layers whose K and V are all they keep of a token."""

_SEVERAL: Final = "layers of several kinds, some with a state that is not one of tokens"
_SHAPES: Final = "windowed layers of another shape than the others"
_STRANGE: Final[Mapping[str, str]] = {
    "layers_block_type": _SEVERAL,
    "hybrid_override_pattern": _SEVERAL,
    "block_types": _SEVERAL,
    "attn_layer_period": _SEVERAL,
    "full_attention_interval": _SEVERAL,
    "full_attn_idxs": _SEVERAL,
    "linear_attn_config": _SEVERAL,
    "linear_num_key_heads": _SEVERAL,
    "mamba_d_state": _SEVERAL,
    "mamba_d_ssm": _SEVERAL,
    "ssm_state_size": _SEVERAL,
    "block_configs": "layers that each have their own shape",
    "use_cla": "layers that use the K and V of others",
    "index_head_dim": "an indexer with keys of its own for every token",
    "cross_attention_layers": "layers that attend to an image",
    "swa_head_dim": _SHAPES,
    "swa_num_key_value_heads": _SHAPES,
    "global_head_dim": _SHAPES,
    "num_global_key_value_heads": _SHAPES,
}
"""What the keys say that make a model one that this module does not know how to lay out."""

_WINDOWED: Final = frozenset({"mistral", "mixtral", "starcoder2", "phi3", "phimoe"})
"""Model types that give every layer the window, where their configuration has one and does not list layers."""
_WINDOW_FROM_LAYER: Final = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
"""Those whose layers from `max_window_layers` on have it, if `use_sliding_window` says so."""


def from_model_config(config: Mapping[str, Any], dtype: str = "", *, scales: bool = True) -> Layout:
    """The layout of a model's K and V, from the content of its Hugging Face `config.json`.

    `dtype` overrides the model's own.  Layers count as windowed only where every one of them is known to be.  Raises
    LayoutError where something is missing, contradicts itself, or is of a kind that this module does not know.
    """
    outer, inner = config, config
    while True:
        nested = next((inner[key] for key in _INNER if isinstance(inner.get(key), Mapping)), None)
        if nested is None:
            break
        inner = nested
    kind = str(inner.get("model_type") or outer.get("model_type") or "")
    _refuse_strange(inner, outer, kind)
    layers = _number(inner, _LAYERS, "layers")
    shared = inner.get("num_kv_shared_layers") or 0
    _in_range("num_kv_shared_layers", shared, 0, layers - 1)
    kinds = _layer_types(inner, layers)
    name = dtype or _dtype_in(inner) or _dtype_in(outer)
    if not name:
        raise LayoutError("config.json names no dtype (dtype or torch_dtype): set dtype, say to 'bfloat16'")
    said = _model_name(outer, inner)
    windowed = _is_windowed(inner, kind, kinds, layers)
    own = layers - shared
    if inner.get("kv_lora_rank"):
        rope = inner.get("qk_rope_head_dim")
        _in_range("qk_rope_head_dim", rope, 0, HEAD_DIM_MAX)  # 0 for those that rotate nothing
        width = _number(inner, ("kv_lora_rank",), "values of latent") + int(rope or 0)
        return latent(own, width, name, scales=scales, model=said, windowed=windowed)
    heads = _number(inner, _HEADS, "attention heads")
    head_dim = _head_dim(inner, heads)
    value_dim = inner.get("v_head_dim") or 0
    if value_dim:
        _in_range("v_head_dim", value_dim, 1, HEAD_DIM_MAX)
    kv_heads = _kv_heads(inner, kind, heads)
    if not isinstance(kv_heads, int):
        if len(kv_heads) != layers:
            raise LayoutError(f"num_key_value_heads has {len(kv_heads)} entries for {layers} layers")
        kv_heads = kv_heads[:own]
    return plain(
        own, kv_heads, head_dim, name, value_dim=value_dim, scales=scales, model=said, windowed=windowed
    )


def _refuse_strange(inner: Mapping[str, Any], outer: Mapping[str, Any], kind: str) -> None:
    if outer.get("is_encoder_decoder"):
        raise LayoutError(
            "is_encoder_decoder: the decoder's cross-attention has K and V that belong to no token of a prompt; "
            "pools hold decoder-only models"
        )
    reasons = [f"{key}: {reason}" for key, reason in _STRANGE.items() if inner.get(key)]
    kinds = inner.get("attn_type_list")
    if isinstance(kinds, list) and any(each != 1 for each in kinds):
        reasons.append(f"attn_type_list: {_SEVERAL}")
    if any(word in kind for word in _RECURRENT):
        reasons.append(f"model_type {kind!r}: layers with a state that is not one of tokens")
    if reasons:
        raise LayoutError(
            f"{'; '.join(reasons)}: this version cannot lay that out.  Where the engine keeps the rest itself "
            "and never resumes from a cached prefix without it, describe K and V by a `layout` table"
        )


def _layer_types(inner: Mapping[str, Any], layers: int) -> list[str]:
    kinds = inner.get("layer_types")
    if not kinds:
        return []
    if not isinstance(kinds, list) or not all(isinstance(each, str) for each in kinds):
        raise LayoutError("layer_types is no list of names")
    if len(kinds) != layers:
        raise LayoutError(f"layer_types has {len(kinds)} entries for {layers} layers")
    for each in kinds:
        if each not in _ATTENTION:
            raise LayoutError(
                f"layer_types has {each!r}: not known to keep K and V of each token and nothing else, so that a "
                "cached prefix might lack something; this version cannot lay that out"
            )
    return kinds


def _is_windowed(inner: Mapping[str, Any], kind: str, kinds: list[str], layers: int) -> bool:
    window = inner.get("sliding_window")
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        return False
    if inner.get("use_sliding_window") is False:
        return False
    if kinds:
        return all(each == "sliding_attention" for each in kinds)
    if inner.get("sliding_window_pattern") or inner.get("_sliding_window_pattern"):
        return False
    if kind in _WINDOW_FROM_LAYER:
        return inner.get("use_sliding_window") is True and inner.get("max_window_layers", layers) == 0
    return kind in _WINDOWED


def _kv_heads(inner: Mapping[str, Any], kind: str, heads: int) -> int | list[int]:
    for key in _KV_HEADS:
        value = inner.get(key)
        if key == "multi_query_group_num" and not inner.get("multi_query_attention"):
            continue
        if key == "num_kv_heads" and kind == "falcon" and not inner.get("new_decoder_architecture"):
            continue  # the older Falcons carry the key and do not use it
        if isinstance(value, list):
            for each in value:
                _in_range(key, each, 1, HEADS_MAX)
            return value
        if value is not None:
            _in_range(key, value, 1, HEADS_MAX)
            if heads % value:
                raise LayoutError(f"{key} = {value} does not divide the {heads} attention heads")
            return int(value)
    attention = inner.get("attn_config")
    if isinstance(attention, Mapping) and attention.get("kv_n_heads") is not None:
        _in_range("attn_config.kv_n_heads", attention["kv_n_heads"], 1, HEADS_MAX)
        return int(attention["kv_n_heads"])
    return 1 if inner.get("multi_query") else heads


def _head_dim(inner: Mapping[str, Any], heads: int) -> int:
    for key in _HEAD_DIM:
        value = inner.get(key)
        if value is not None:
            _in_range(key, value, 1, HEAD_DIM_MAX)
            return int(value)
    width = _number(inner, _WIDTH, "width")
    if width % heads:
        raise LayoutError(
            f"hidden size {width} is no multiple of {heads} attention heads, and there is no head_dim"
        )
    return width // heads


def _number(inner: Mapping[str, Any], keys: Sequence[str], what: str) -> int:
    for key in keys:
        value = inner.get(key)
        if value is not None:
            _in_range(key, value, 1, LAYERS_MAX if keys is _LAYERS else 1 << 20)
            return int(value)
    raise LayoutError(
        f"config.json does not say how many {what}: none of {', '.join(keys)} is there.  Is it the config.json of a "
        "language model?"
    )


def _dtype_in(config: Mapping[str, Any]) -> str:
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        if isinstance(value, str) and value not in ("", "auto"):
            return value
    return ""


def _model_name(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> str:
    for config in (outer, inner):
        value = config.get("_name_or_path")
        if isinstance(value, str) and value:
            return value.rstrip("/").rpartition("/")[2][:128]
    architectures = outer.get("architectures") or inner.get("architectures")
    if isinstance(architectures, list) and architectures:
        return str(architectures[0])[:128]
    return str(outer.get("model_type") or inner.get("model_type") or "a model")[:128]


# -- inside -----------------------------------------------------------------------------------------------------------


def _plane(name: str, dtype: str, shape: tuple[int, ...]) -> PlaneSpec:
    return PlaneSpec(name, math.prod(shape) * DTYPES[dtype], dtype, shape)


def _is_fp8(dtype: str) -> bool:
    return dtype.startswith("float8")


def _in_range(key: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise LayoutError(f"{key} = {value!r} is no whole number from {low} to {high}")


def _checked(layout: Layout) -> Layout:
    if layout.slot_bytes > SLOT_BYTES_MAX:
        raise LayoutError(
            f"{layout.model}: {layout.slot_bytes} bytes a token; up to {SLOT_BYTES_MAX} are allowed"
        )
    return layout


__all__ = [
    "ALIGNMENT",
    "DTYPES",
    "Layout",
    "LayoutError",
    "PlaneSpec",
    "dtype_of",
    "from_model_config",
    "latent",
    "opaque",
    "plain",
]
