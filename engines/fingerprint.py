"""What decides whether the K and V of one engine may be read by another: the namespace, made of digests.

    Namespace(tenant, model, adapter, salt)
       tenant    whose cache; as given
       model     config + weights (or a revision that the user vouches for) + what the engine adds; 32 hex digits
       adapter   configuration + weights of the adapters in force, whatever they are called; "" where there are none
       salt      of a request or a deployment that wants a tree to itself; as given

K and V of a token follow from the tokens before it, from every weight up to its layer, and from the configuration:
rope, norms, scaling, activations, vocabulary.  So two engines share a tree only where all of these are equal, and a
name says nothing: a folder may be filled anew, an adapter trained further under the same name.  What does *not*
change what a cached token means is left out: paths, versions of software, how outputs are returned, the kernel that
computes attention (its rounding differs in the last bits, as that of two GPUs does).  The layout of a slot (dtype,
heads, widths) is not part of it either: it belongs to the pool, and `kvslot.engines.hf` compares it plane by plane.

An engine whose bytes mean something of their own (vLLM's block size, layout name, instruction set, version) adds
that as `extra`.

Digesting reads all weights once: about a second for a gigabyte.  A `revision` that the user vouches for (a commit of
a model repository) replaces that, and the configuration stays part of the digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvslot.api.client import Namespace

PIECE_BYTES: Final = 16 << 20
"""Weights are read in pieces of this size."""

WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Endings of files that hold weights."""

IDLE: Final = frozenset(
    {
        "_model_name_or_path",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
        "auto_map",
        "chunk_size_feed_forward",
        "dtype",  # that of the weights is digested with each of them
        "id2label",
        "label2id",
        "initializer_range",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "transformers_weights",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
)
"""Keys of a configuration that do not change what K and V of a token are."""


def namespace(
    model: Any,
    *,
    tenant: str = "",
    salt: str = "",
    adapter: Any = None,
    revision: str = "",
    extra: Mapping[str, object] | None = None,
) -> Namespace:
    """The namespace for K and V that `model` computes: give it to `Client`, or to one request.

    `model`: a transformers model (a PEFT model, too), or the folder of one.  `adapter`: see `of_adapter`; where it is
    None, the adapters in force in `model` are meant.  `revision`: stands for the weights, which are not read then.
    `extra`: what else must be equal, as plain values.
    """
    digest = of_model(model, revision=revision, extra=extra)
    if not isinstance(model, str | os.PathLike):
        adapter = model if adapter is None else adapter
        _known.setdefault(model, set()).add(digest)
    return Namespace(tenant, digest, of_adapter(adapter) if adapter else "", salt)


def known(model: Any) -> frozenset[str]:
    """What `namespace` has called this very object in this process; for a check that costs nothing."""
    return frozenset(_known.get(model, ()))


def of_model(model: Any, *, revision: str = "", extra: Mapping[str, object] | None = None) -> str:
    """32 hex digits for a model's configuration and weights, those of adapters left out.

    A model in memory and the folder it came from have different digests: compare like with like.
    """
    hashed = hashlib.sha256(b"kvslot model 1\0")
    if isinstance(model, str | os.PathLike):
        folder = Path(model)
        config = json.loads((folder / "config.json").read_bytes())
        # The dtype of weights in a file is part of the file; what they are loaded as is the engine's to add.
        _take(hashed, "config", relevant(config))
        if not revision:
            files = sorted(each for each in folder.iterdir() if each.suffix in WEIGHTS)
            if not files:
                raise FileNotFoundError(f"{folder} holds no weights ({', '.join(WEIGHTS)})")
            for file in files:
                _take(hashed, "file", file.name)
                _take_file(hashed, file)
    else:
        _take(hashed, "config", relevant(_plain_config(model)))
        _take(hashed, "dtype", str(getattr(model, "dtype", "")))
        if not revision:
            adapters = set(_adapters(model))
            _take_weights(
                hashed, ((k, v) for k, v in _state(model) if not adapters.intersection(k.split(".")))
            )
    if revision:
        _take(hashed, "revision", revision)
    if extra:
        _take(hashed, "extra", dict(extra))
    return hashed.hexdigest()[:32]


def of_adapter(adapter: Any) -> str:
    """32 hex digits for the weights and configuration of adapters; "" for none.

    `adapter`: a model with PEFT adapters (those in force), a folder (adapter_config.json and weights), a mapping from
    names to tensors, or bytes.  What it is called is not part of it.
    """
    hashed = hashlib.sha256(b"kvslot adapter 1\0")
    if isinstance(adapter, bytes):
        hashed.update(adapter)
    elif isinstance(adapter, str | os.PathLike):
        folder = Path(adapter)
        files = sorted(each for each in folder.iterdir() if each.suffix in WEIGHTS)
        if not files:
            raise FileNotFoundError(f"{folder} holds no weights ({', '.join(WEIGHTS)})")
        config = folder / "adapter_config.json"
        if config.exists():
            _take(hashed, "config", _adapter_config(json.loads(config.read_bytes())))
        for file in files:
            _take(hashed, "file", file.name)
            _take_file(hashed, file)
    elif isinstance(adapter, Mapping):
        _take_weights(hashed, iter(sorted(adapter.items())))
    else:
        active = _active(adapter)
        if not active:
            return ""
        configs = _adapters(adapter)
        for number, name in enumerate(active):
            _take(hashed, "config", _adapter_config(configs[name]))
            _take(hashed, "strengths", _strengths(adapter, name))
            _take_weights(
                hashed,
                (
                    (".".join(f"#{number}" if part == name else part for part in key.split(".")), value)
                    for key, value in _state(adapter)
                    if name in key.split(".")
                ),
            )
    return hashed.hexdigest()[:32]


_known: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a Hugging Face configuration that may change what K and V are; nested ones, too."""
    return {
        key: relevant(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in IDLE
    }


# -- inside -----------------------------------------------------------------------------------------------------------


def _take(hashed: Any, what: str, value: object) -> None:
    text = json.dumps([what, value], sort_keys=True, separators=(",", ":"), default=str).encode()
    hashed.update(len(text).to_bytes(8, "little") + text)


def _take_file(hashed: Any, file: Path) -> None:
    with file.open("rb") as stream:
        hashed.update(os.fstat(stream.fileno()).st_size.to_bytes(8, "little"))
        while piece := stream.read(PIECE_BYTES):
            hashed.update(piece)


def _take_weights(hashed: Any, weights: Iterator[tuple[str, Any]]) -> None:
    """Names, shapes, dtypes and bytes of tensors.  One that stands for another (tied) is not read twice."""
    import torch  # pyright: ignore[reportMissingImports] - an extra

    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in weights:
        tensor = tensor.detach()
        _take(hashed, "tensor", [name, str(tensor.dtype), list(tensor.shape)])
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
        first = seen.setdefault(place, name) if tensor.numel() else name
        if first != name:
            _take(hashed, "as", first)
            continue
        flat = (
            tensor.contiguous().view(-1).view(torch.uint8)
            if tensor.dim()
            else tensor.reshape(1).view(torch.uint8)
        )
        for start in range(0, flat.numel(), PIECE_BYTES):
            hashed.update(memoryview(flat[start : start + PIECE_BYTES].cpu().numpy()))


def _state(model: Any) -> Iterator[tuple[str, Any]]:
    """Parameters and saved buffers by name, however deep a PEFT model has wrapped them; rope is in the configuration.

    A wrapped linear layer calls its own weight `base_layer.weight`: that is taken for `weight`, so that a model has
    the same digest with adapters loaded and without.
    """
    get_base = getattr(model, "get_base_model", None)
    inner = get_base() if get_base is not None else model
    for name, tensor in sorted(inner.state_dict(keep_vars=True).items()):
        yield name.replace(".base_layer.", "."), tensor


def _plain_config(model: Any) -> dict[str, Any]:
    config = model.config
    plain: dict[str, Any] = config if isinstance(config, dict) else config.to_dict()
    return plain


def _adapters(model: Any) -> Mapping[str, Any]:
    """The adapters loaded into a model, by name."""
    configs = getattr(model, "peft_config", None)
    return configs if isinstance(configs, Mapping) else {}


def _active(model: Any) -> list[str]:
    """Names of the adapters in force, in their order: those that the layers themselves say they add."""
    if not _adapters(model):
        return []
    names: dict[str, None] = {}
    for _, layer in _tuned(model):
        if getattr(layer, "disable_adapters", False) is not True:
            names.update(dict.fromkeys(layer.active_adapters))
    return list(names)


def _tuned(model: Any) -> Iterator[tuple[str, Any]]:
    for name, layer in model.named_modules():
        if hasattr(layer, "adapter_layer_names") and hasattr(layer, "active_adapters"):
            yield name, layer


def _strengths(model: Any, adapter: str) -> list[list[object]]:
    """How much each layer adds of an adapter, which may be set at run time."""
    found = [(name, getattr(layer, "scaling", None)) for name, layer in _tuned(model)]
    return [
        [name.rpartition("base_model.model.")[2], each[adapter]]
        for name, each in found
        if each and adapter in each
    ]


def _adapter_config(config: Any) -> dict[str, Any]:
    plain = dict(config) if isinstance(config, Mapping) else dict(config.to_dict())
    for key in (
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "auto_mapping",
        "peft_version",
        "task_type",
    ):
        plain.pop(key, None)
    return {key: sorted(value) if isinstance(value, set) else value for key, value in plain.items()}


__all__ = ["known", "namespace", "of_adapter", "of_model", "relevant"]
