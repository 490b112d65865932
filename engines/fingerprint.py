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
computes attention (its rounding differs in the last bits, as that of two GPUs does).  Of the code of a model its
classes' names are part of it, and where it is not the libraries' own, its files.  Not seen are hooks, and whatever
else is changed in methods of a model in memory (steering vectors, replaced forwards).  The layout of a slot (dtype,
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
import sys
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

    `model`: a transformers model (a PEFT model, too), or the folder of one; what a folder's weights are made to be when
    they are loaded (dtype, quantisation) is not seen there: say it with `extra`.  `adapter`: see `of_adapter`; if it is
    None, the adapters in force in `model` are meant.  `revision`: stands for the weights, which are not read then.
    `extra`: what else must be equal, as plain values.
    """
    digest = of_model(model, revision=revision, extra=extra)
    in_memory = not isinstance(model, str | os.PathLike)
    if in_memory and adapter is None:
        adapter = model
    found = Namespace(tenant, digest, of_adapter(adapter) if adapter else "", salt)
    return vouch(model, found) if in_memory else found


def vouch(model: Any, namespace: Namespace) -> Namespace:
    """Says that a namespace is for what `model` computes with the adapters now in force; `misfit` believes it.

    For names that `namespace` did not make of this object: those of a folder, or your own.
    """
    _remember(model, in_force(tuned(model)), (namespace.model, namespace.adapter))
    return namespace


def misfit(model: Any, namespace: Namespace) -> str:
    """Why a namespace is not for what a model in memory computes now; "" where it is.

    Costs nothing where `namespace` has made it for this very object with these adapters; else the adapters are read,
    and the weights, too, if this object was never asked about.
    """
    now = in_force(tuned(model))
    known = _known.get(_inner(model), {})
    if (namespace.model, namespace.adapter) in known.get(now, ()):
        return ""
    # An adapter that is merged changes the weights, and with them the model.
    models = {one for then, pairs in known.items() if _merged(then) == _merged(now) for one, _ in pairs}
    if not models:
        models = {of_model(model)}
        for one in models:
            _remember(model, now, (one, of_adapter(model)))
    if namespace.model not in models:
        return "it is another model's"
    if namespace.adapter != of_adapter(model):
        return f"the adapters in force are others, {', '.join(_active(model)) or 'none'}"
    _remember(model, now, (namespace.model, namespace.adapter))
    return ""


Force = tuple[tuple[Any, ...], ...]


def tuned(model: Any) -> list[Any]:
    """The layers of a model in memory that adapters are added to."""
    return [layer for _, layer in _tuned(_inner(model))]


def in_force(layers: list[Any]) -> Force:
    """Which adapters those layers add, how much of each, and which are merged; equal as long as nobody changes it."""
    return tuple(
        (
            tuple(layer.active_adapters),
            getattr(layer, "disable_adapters", False) is True,
            tuple(getattr(layer, "merged_adapters", ())),
            tuple((getattr(layer, "scaling", None) or {}).items()),
        )
        for layer in layers
    )


def of_model(model: Any, *, revision: str = "", extra: Mapping[str, object] | None = None) -> str:
    """32 hex digits for a model's configuration and weights, those of adapters left out.

    A model in memory and the folder it came from have different digests: compare like with like.
    """
    hashed = hashlib.sha256(b"kvslot model 2\0")
    if isinstance(model, str | os.PathLike):
        folder = Path(model)
        config = json.loads((folder / "config.json").read_bytes())
        # The dtype of weights in a file is part of the file; what they are loaded as is the engine's to add.
        _take(hashed, "config", relevant(config))
        if "auto_map" in json.dumps(config):
            for file in sorted(folder.rglob("*.py")):
                _take(hashed, "code", file.relative_to(folder).as_posix())
                _take_file(hashed, file)
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
        _take(hashed, "classes", list(_classes(model)))
        # What rope makes of the configuration is taken in any case: a cast of the model may have rounded it.
        _take_weights(
            hashed,
            (
                (name, value)
                for name, value, adapter, kept in _state(model)
                if not adapter and not (kept and revision)
            ),
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
                    (key.replace(_OWNER, f"#{number}"), value)
                    for key, value, owner, _ in _state(adapter)
                    if owner == name
                ),
            )
    return hashed.hexdigest()[:32]


_known: weakref.WeakKeyDictionary[Any, dict[Force, set[tuple[str, str]]]] = weakref.WeakKeyDictionary()
# Names of models in memory, model and adapter, by the adapters in force.
_OWNER: Final = "\0adapter"


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


def _inner(model: Any) -> Any:
    """The transformers model inside a PEFT model."""
    get_base = getattr(model, "get_base_model", None)
    return get_base() if get_base is not None else model


def _remember(model: Any, now: Force, names: tuple[str, str]) -> None:
    _known.setdefault(_inner(model), {}).setdefault(now, set()).add(names)


def _merged(force: Force) -> list[Any]:
    return [each[2] for each in force if each[2]]


def _state(model: Any) -> Iterator[tuple[str, Any, str, bool]]:
    """Name, tensor, the adapter that it belongs to, and whether files of the model hold it; in the order of the names.

    Parameters and buffers, those that are not saved too.  A wrapped linear layer calls its own weight
    `base_layer.weight`: that is taken for `weight`, so that a model has the same digest with adapters loaded and
    without.  What an adapter is called says nothing about other layers of that name.
    """
    inner = _inner(model)
    layers, adapters = dict(_tuned(inner)), _adapters(model)
    found: dict[str, tuple[Any, bool]] = {
        name: (tensor, True)
        for name, tensor in inner.state_dict(keep_vars=True).items()
        if hasattr(tensor, "detach")
    }
    for where, module in inner.named_modules():
        for name, tensor in _buffers(module):
            found.setdefault(f"{where}.{name}" if where else name, (tensor, False))
    for name in _changing(inner):
        found.pop(name, None)
    placed = []
    for name, (tensor, kept) in found.items():
        plain, rest = _place(name, layers)
        owner = next((part for part in rest if part in adapters), "")
        if rest and owner:
            at = rest.index(owner)
            plain = [*plain, *rest[:at], _OWNER, *rest[at + 1 :]]
        else:
            plain += rest
        placed.append((".".join(plain), owner, tensor, kept))
    for name, owner, tensor, kept in sorted(placed, key=lambda each: each[:2]):
        yield name, tensor, owner, kept


def _buffers(module: Any) -> Iterator[tuple[str, Any]]:
    yield from module.named_buffers(recurse=False)
    for name in _changed(module):  # where the first of it is kept as a plain attribute
        first = getattr(module, name.replace("inv_freq", "original_inv_freq"), None)
        if first is not None:
            yield name.replace("inv_freq", "original_inv_freq"), first


def _changed(module: Any) -> Iterator[str]:
    """What a rope that depends on the length changes as it goes; the first of it is kept beside it."""
    kinds = getattr(module, "rope_type", None)
    for prefix, kind in (
        [(f"{k}_", v) for k, v in kinds.items()] if isinstance(kinds, dict) else [("", kinds)]
    ):
        if kind in ("dynamic", "longrope") and hasattr(module, f"{prefix}original_inv_freq"):
            yield f"{prefix}inv_freq"


def _changing(inner: Any) -> Iterator[str]:
    for where, module in inner.named_modules():
        for name in _changed(module):
            for each in (name, name.replace("inv_freq", "long_inv_freq")):
                yield f"{where}.{each}" if where else each


def _place(name: str, layers: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """A name as it is without adapters; and what follows in a layer that they are added to, if it is not its own."""
    plain: list[str] = []
    parts = name.split(".")
    for at, part in enumerate(parts):
        if at and ".".join(parts[:at]) in layers:
            if part not in ("base_layer", "original_module"):
                return plain, parts[at:]
        else:
            plain.append(part)
    return plain, []


def _classes(model: Any) -> Iterator[list[str]]:
    """Each module's class; that of code which is no library's by its file, wherever that lies."""
    inner = _inner(model)
    layers = dict(_tuned(inner))
    known: dict[type, str] = {}
    for name, module in inner.named_modules():
        plain, rest = _place(name, layers)
        if name in layers or rest:
            continue
        kind = type(module)
        if kind not in known:
            known[kind] = _class(kind)
        yield [".".join(plain), known[kind]]


def _class(kind: type) -> str:
    if kind.__module__.partition(".")[0] in ("torch", "transformers", "peft"):
        return f"{kind.__module__}.{kind.__qualname__}"
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if not file or not os.path.exists(file):
        return f"{kind.__module__}.{kind.__qualname__}"
    return f"{hashlib.sha256(Path(file).read_bytes()).hexdigest()}.{kind.__qualname__}"


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
    for layer in tuned(model):
        if getattr(layer, "disable_adapters", False) is not True:
            names.update(dict.fromkeys(layer.active_adapters))
    return list(names)


def _tuned(model: Any) -> Iterator[tuple[str, Any]]:
    for name, layer in model.named_modules():
        if hasattr(layer, "adapter_layer_names") and hasattr(layer, "active_adapters"):
            yield name, layer


def _strengths(model: Any, adapter: str) -> list[list[object]]:
    """How much each layer adds of an adapter, which may be set at run time."""
    found = [(name, getattr(layer, "scaling", None)) for name, layer in _tuned(_inner(model))]
    return [[name, each[adapter]] for name, each in found if each and adapter in each]


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


__all__ = ["in_force", "misfit", "namespace", "of_adapter", "of_model", "relevant", "tuned", "vouch"]
