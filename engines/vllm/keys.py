"""Which prefixes a request may share: the namespace, and the reasons for which there is none.

    Namespace(tenant, model, adapter, salt)
       tenant    of the connector's configuration
       model     digest of weights and configuration (kvslot.engines.fingerprint), and of what decides what vLLM's
                 bytes mean: its version, dtype of model and cache, quantisation, block size, layout name, groups of
                 layers and their specs, attention backend and the instruction set that it packs K for
       adapter   digest of the adapter's files; its name, number and path say nothing
       salt      digest of the request's cache_salt, so that the daemon never sees it

Files are read where vLLM has read them before, perhaps minutes ago.  That both read the same is certain only if nobody
has written to them in between: the kernel's ctime, which no program can set, must be older than this process.  Else
there is no namespace, unless the configuration vouches for the files (`model_revision`, `trust_new_adapters`).

Nothing here imports vLLM: its objects are only looked into.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvslot.api.client import Namespace
from kvslot.engines import fingerprint

SPECS: Final = frozenset({"FullAttentionSpec", "SlidingWindowSpec"})
"""Kinds of KV cache whose blocks hold all that their tokens need."""

CLOCKS_SECONDS: Final = 0.25
"""The clock of file systems and that of processes may differ by less."""

TIMEOUT_MOST: Final = 3600.0
"""Seconds; a socket takes no endless ones."""

LINKS_MOST: Final = 40

FIXED_ROPE: Final = frozenset({"", "default", "linear", "llama3", "yarn", "proportional"})
"""Rope scalings that do not depend on how long a context the engine was started for."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`kv_connector_extra_config`, checked."""

    socket: str = ""
    pool: str = ""
    name: str = "vllm"
    tenant: str = ""
    model_revision: str = ""  # stands for the weights, which are not read then
    trust_new_adapters: bool = False  # those written since this process began are never written again
    form: str = "copy"  # or "region": vLLM's own memory is shared, and the pool is a directory of it
    load: str = "async"  # or "sync"
    store: str = "all"  # or "prompt"
    timeout: float = 1.0  # seconds that any answer of the daemon may take

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """Raises ValueError for what is not known, with what is."""
        if not isinstance(extra, Mapping):
            raise ValueError(f"kv_connector_extra_config is {extra!r}, not a table of settings")
        fields = cls.__dataclass_fields__
        unknown = sorted(str(name) for name in set(extra) - set(fields))
        if unknown:
            raise ValueError(
                f"kv_connector_extra_config has no {', '.join(unknown)}; it has {', '.join(sorted(fields))}"
            )
        for name, value in extra.items():
            if wrong := _wrong(value, fields[name].default):
                raise ValueError(f"kv_connector_extra_config: {name} is {value!r}, not {wrong}")
        settings = cls(**extra)
        for value, allowed, what in (
            (settings.form, ("copy", "region"), "form"),
            (settings.load, ("async", "sync"), "load"),
            (settings.store, ("all", "prompt"), "store"),
        ):
            if value not in allowed:
                raise ValueError(f"kv_connector_extra_config: {what} is {value!r}, not one of {allowed}")
        return settings


def _wrong(value: object, default: object) -> str:
    """What a setting should be that is not of its default's kind; "" where it is.

    A text where a bool should be would be taken for true, whatever it says; others the daemon would not understand.
    """
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, float):
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= TIMEOUT_MOST
        return "" if number else f"a number of seconds, more than 0 and at most {TIMEOUT_MOST:g}"
    if not isinstance(value, str):
        return "a text"
    try:
        return "a text without zero bytes" if b"\0" in value.encode() else ""
    except UnicodeEncodeError:
        return "a text of whole characters"


def unsupported(config: Any, cache: Any, *, on_cpu: bool) -> str:
    """Why an engine of this VllmConfig and KVCacheConfig cannot use a pool; "" where it can."""
    parallel = config.parallel_config
    if not on_cpu:
        return "only vLLM's CPU backend is supported"
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        return "the model is spread over several workers"
    if any(getattr(parallel, f"{what}_context_parallel_size", 1) > 1 for what in ("decode", "prefill")):
        return "the context is spread over several workers"
    if config.speculative_config is not None:
        return "speculative decoding is on"
    if getattr(getattr(config, "scheduler_config", None), "async_scheduling", False):
        return "scheduling is asynchronous"  # vLLM's CPU backend has none, so it could not be tried
    if getattr(config.cache_config, "calculate_kv_scales", False):
        return "scales of the cache are computed from what is in it"
    if config.model_config.runner_type != "generate":
        return "the model does not generate"
    if not cache.kv_cache_groups:
        return "the model has no KV cache"
    size = config.cache_config.block_size
    for group in cache.kv_cache_groups:
        spec = group.kv_cache_spec
        if type(spec).__name__ not in SPECS:
            return f"layers with {type(spec).__name__} are not supported"
        if spec.block_size != size:
            return f"groups of layers with blocks of {spec.block_size} and {size} tokens"
    return ""


def facts(config: Any, cache: Any, *, version: str, isa: list[str]) -> dict[str, object]:
    """What decides what the bytes of a block mean, beside the model: plain values."""
    model = config.model_config
    text = model.hf_text_config.to_dict()
    out: dict[str, object] = {
        "engine": "vllm",
        "version": version,
        "dtype": str(model.dtype),
        "cache_dtype": str(config.cache_config.cache_dtype),
        "quantization": str(model.quantization),
        "architectures": list(getattr(model, "architectures", None) or ()),
        "remote_code": bool(getattr(model, "trust_remote_code", False)),
        "block_size": config.cache_config.block_size,
        "layout": str(cache.kv_cache_layout),
        "isa": isa,
        "backend": str(getattr(getattr(config, "attention_config", None), "backend", None)),
        "groups": [[list(each.layer_names), repr(each.kv_cache_spec)] for each in cache.kv_cache_groups],
        # As it is in force, with what the command line overrides.
        "config": fingerprint.relevant(text),
        "lora": str(config.lora_config.lora_dtype) if config.lora_config is not None else "",
    }
    if not all(kind in FIXED_ROPE for key, value in text.items() for kind in _rope_kinds(key, value)):
        out["max_model_len"] = model.max_model_len
    return out


def _rope_kinds(key: str, value: object) -> Iterator[str]:
    """The kinds of rope scaling that a configuration's entry names, those of single kinds of layers included."""
    if isinstance(value, Mapping):
        if key.startswith("rope"):
            yield str(value.get("rope_type", value.get("type", "")))
        for name, each in value.items():
            if isinstance(each, Mapping) or not key.startswith("rope"):
                yield from _rope_kinds(key if key.startswith("rope") else str(name), each)
    elif (
        value is not None
        and key in ("rope_parameters", "rope_scaling")
        and not isinstance(value, int | float)
    ):
        yield "?"


class Keys:
    """Namespaces of an engine's requests: call it with one."""

    def __init__(
        self,
        settings: Settings,
        folder: str,
        facts: Mapping[str, object],
        *,
        dummy: bool = False,
        since: float | None = None,
    ) -> None:
        """`folder`: of the model.  `dummy`: its weights are vLLM's own random ones, always the same.

        `since`: when this process began (seconds of the epoch); looked up unless given.
        """
        self._settings = settings
        self._since = process_start() if since is None else since
        self._adapters: dict[int, tuple[str, tuple[object, ...], str]] = {}
        self._spoiled: set[int] = set()
        self._epoch = ""
        self.reason = ""
        """Why no request has a namespace."""
        self._model = ""
        try:
            self._model = self._of_model(folder, facts, dummy)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with its files, vLLM goes on without
            self.reason = f"the model has no fingerprint: {_told(error)}"

    def _of_model(self, folder: str, facts: Mapping[str, object], dummy: bool) -> str:
        revision = self._settings.model_revision
        if dummy:
            revision = f"vllm's dummy weights {revision}"
        path = Path(folder)
        if not path.is_dir():
            raise ValueError(f"{folder} is no folder; name one, or give model_revision and a local copy")
        if not revision and (young := written_since(path, self._since)):
            raise ValueError(
                f"{young} was written after this process began, so it may not be what was loaded; "
                "start vLLM in another process, or vouch for the files with model_revision"
            )
        if facts.get("remote_code") and not revision and (away := _code_elsewhere(path)):
            raise ValueError(f"its code is {away}, in another repository: vouch for it with model_revision")
        # Which of the files vLLM takes which weights from.
        index = {each.name: _file_digest(each) for each in sorted(path.glob("*.index.json"))}
        return "vllm:" + fingerprint.of_model(path, revision=revision, extra={**facts, "index": index})

    def reset(self) -> None:
        """The weights have changed in memory: nothing of before is found from now on, and nothing by others."""
        self._epoch = f":{secrets.token_hex(16)}"

    def __call__(self, request: Any) -> Namespace | str:
        """The namespace of a request of vLLM's, or why it has none."""
        if self.reason:
            return self.reason
        if request.mm_features:
            return "they have images, sound or the like, which token ids do not tell apart"
        if request.prompt_embeds is not None or request.prompt_token_ids is None:
            return "they have prompt embeddings"
        if getattr(request, "resumable", False):
            return "their input is streamed"
        if request.pooling_params is not None:
            return "they are pooling requests"
        adapter = ""
        if request.lora_request is not None:
            adapter = self._adapter(request.lora_request)
            if not adapter.startswith("sha256:"):
                return adapter
        salt = request.cache_salt
        return Namespace(
            self._settings.tenant,
            self._model + self._epoch,
            adapter,
            "sha256:" + hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest() if salt else "",
        )

    def _adapter(self, lora: Any) -> str:
        """The digest of an adapter, or why it has none.  Costs a look at its folder each time, and one reading."""
        number, path = int(lora.lora_int_id), str(lora.lora_path)
        if number in self._spoiled:
            return "their adapter's files have changed, so it is not known which are in use"
        known = self._adapters.get(number)
        try:
            signature = _signature(Path(path))
            if known is None and not getattr(lora, "load_inplace", False):
                young = written_since(Path(path), self._since)
                if young and not self._settings.trust_new_adapters:
                    return f"their adapter was written after this process began ({young}): see trust_new_adapters"
                digest = "sha256:" + fingerprint.of_adapter(Path(path))
                known = (path, signature, digest)
                if _signature(Path(path)) == signature:
                    self._adapters[number] = known
        except Exception as error:  # noqa: BLE001 - whatever is wrong with its files, the request goes on
            return f"their adapter has no fingerprint: {_told(error)}"
        if known is None or number not in self._adapters or known[:2] != (path, signature):
            # Which of the two vLLM computes with depends on when it loaded the adapter, and whether it still has it.
            self._spoiled.add(number)
            return "their adapter's files have changed, so it is not known which are in use"
        return known[2]


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"


def process_start() -> float:
    """When this process began, in seconds of the epoch, to some hundredths."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])  # since the machine was started
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def written_since(folder: Path, since: float) -> str:
    """A file of the folder that was written, or put there, after `since`; "" where none was.

    A link, on the way to a file or to the folder, may have led elsewhere before it was made; a folder under another
    name may have been another one.
    """
    files = sorted(
        each
        for each in folder.iterdir()
        if each.suffix in fingerprint.WEIGHTS or each.name.endswith(("config.json", ".index.json"))
    )
    files += [each for each in code_of(folder) if each not in files]
    for each in (folder, *files):
        if each.stat().st_ctime > since - CLOCKS_SECONDS:
            return str(each)
        for link in links(each):
            if link.lstat().st_ctime > since - CLOCKS_SECONDS:
                return f"{link}, a link to {each}" if link != each else str(each)
    return ""


def code_of(folder: Path) -> list[Path]:
    """The code that a model brings, which `fingerprint` digests: all of it, where its configuration names some."""
    return sorted(folder.rglob("*.py")) if list(_auto_maps(_config(folder))) else []


def _config(folder: Path) -> object:
    try:
        return json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:  # a folder of an adapter
        return None


def _auto_maps(config: object) -> Iterator[object]:
    """Where a configuration, or one inside it, names classes of the model's own."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key == "auto_map":
                yield value
            else:
                yield from _auto_maps(value)


def _code_elsewhere(folder: Path) -> str:
    """A class that a model's configuration takes from another repository than its own; "" where there is none."""
    named = re.search(r'"([^"]*--[^"]*)"', json.dumps(list(_auto_maps(_config(folder)))))
    return named[1] if named else ""


def _file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def links(path: Path) -> list[Path]:
    """The symbolic links that a path leads over."""
    found: list[Path] = []
    at, left = Path("/"), list(reversed(path.absolute().parts[1:]))
    while left:
        part = left.pop()
        if part == "..":
            at = at.parent
            continue
        step = at / part
        if not step.is_symlink():
            at = step
            continue
        if len(found) == LINKS_MOST:
            raise OSError(f"{path} leads over more than {LINKS_MOST} links")
        found.append(step)
        target = step.readlink()
        at = Path("/") if target.is_absolute() else at
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return found


def _signature(folder: Path) -> tuple[object, ...]:
    """Changes whenever a file of the folder does."""
    out: list[object] = []
    for entry in sorted(os.scandir(folder), key=lambda each: each.name):
        if entry.is_file():
            info = entry.stat()
            out.append((entry.name, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns))
    return tuple(out)
