"""What the tests of engines share: small models, pools for them, what must hold of a pool, engines in processes.

A tiny model is random, made in memory from a seed, and the same in every process.  Engines run in processes forked from
a server that has imported torch and transformers once: a second of waiting each becomes a hundredth.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from kvslot.api.client import Client, Control
from kvslot.api.client.indices import slot_indices

from ..tools.daemon import Running, running

WORKER = Path(__file__).parent / "hf" / "worker.py"
VOCABULARY = 256
END = 255
"""Prompts hold tokens from 1 to here; 0 is padding.  Tiny models know no end: they say as much as they are asked."""


# -- models ------------------------------------------------------------------------------------------------------------


def tiny(
    seed: int = 0, *, kind: str = "llama", dtype: str = "float32", window: int = 0, **changes: Any
) -> Any:
    """A random model of two layers (three for gemma, which mixes windows), ready to generate.

    `kind`: "llama", "mistral" (all layers windowed where `window` says so), "gemma" (every third layer sees all).
    """
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    config: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    # Random weights of the usual size say the same token for ever: larger ones make the words depend on the context.
    config["initializer_range"] = 0.3
    if kind == "llama":
        made = transformers.LlamaConfig(**{**config, **changes})
        cls = transformers.LlamaForCausalLM
    elif kind == "mistral":
        made = transformers.MistralConfig(**{**config, "sliding_window": window or None, **changes})
        cls = transformers.MistralForCausalLM
    else:
        kinds = ["sliding_attention", "sliding_attention", "full_attention"]
        config |= {"num_hidden_layers": 3, "sliding_window": window or 16, "layer_types": kinds}
        made = transformers.Gemma3TextConfig(**{**config, **changes})
        cls = transformers.Gemma3ForCausalLM
    torch.manual_seed(seed)
    model = cls(made).to(getattr(torch, dtype)).eval()
    model.generation_config.pad_token_id = 0
    return model


def tokens(count: int, seed: int = 1) -> Any:
    """A prompt, (1, count), without padding and end tokens."""
    torch = importlib.import_module("torch")
    return torch.randint(1, END, (1, count), generator=torch.Generator().manual_seed(seed))


def padded(*prompts: Any) -> tuple[Any, Any]:
    """Prompts as a rectangle with padding in front, and its mask."""
    torch = importlib.import_module("torch")
    width = max(each.shape[1] for each in prompts)
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, each in enumerate(prompts):
        ids[row, width - each.shape[1] :] = each[0]
        mask[row, width - each.shape[1] :] = 1
    return ids, mask


def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer; skips the test where it cannot be had."""
    from kvslot.engines.hf import model

    try:
        folder = model.smollm2()
    except model.ModelMissing as error:
        pytest.skip(str(error).splitlines()[0])
    return model.load(folder)


# -- pools -------------------------------------------------------------------------------------------------------------


def pool_for(model: Any, **settings: Any) -> dict[str, Any]:
    """Settings of a pool that holds K and V of a model: 4,000 tokens in blocks of 16, unless said."""
    from kvslot.engines.hf import shape_of

    shape = shape_of(model)
    plain: dict[str, Any] = {"layout": shape.table(), "block_size": 16, "blocks": 251}
    if shape.windowed:
        plain["windowed"] = True
    if "size" in settings:
        del plain["blocks"]
    return {**plain, **settings}


@contextmanager
def pooled(model: Any, *, daemon: dict[str, Any] | None = None, **settings: Any) -> Iterator[Running]:
    """A daemon with one pool for a model, which at the end must be consistent, and hold nothing for anybody."""
    with running(pools=[pool_for(model, **settings)], **(daemon or {})) as one:
        yield one
        sound(one)


def sound(daemon: Running, seconds: float = 10.0) -> None:
    """Nothing in the pool is held by anybody, once what has died is cleared away, and the audit finds nothing."""
    with Control(str(daemon.socket)) as control:
        deadline = time.monotonic() + seconds
        while True:
            (row,) = control.inspect("pools")
            held = {
                name: row[name]
                for name in ("private", "fenced", "moving", "reserved", "quarantined")
                if row[name]
            }
            if not held and row["free"] + row["cached"] == row["usable"]:
                break
            if time.monotonic() > deadline:
                raise AssertionError(f"slots are held by nobody: {held or row}")
            time.sleep(0.02)
        audited = control.audit()
        assert not audited.faults, audited.faults


def counts(daemon: Running) -> dict[str, Any]:
    """The pool's figures now."""
    with Control(str(daemon.socket)) as control:
        (row,) = control.inspect("pools")
        return row


@contextmanager
def engine(daemon: Running, model: Any, **options: Any) -> Iterator[Client]:
    """A client of this process for a model's K and V."""
    from kvslot.engines import fingerprint

    names = {name: options.pop(name) for name in ("tenant", "salt", "adapter", "revision") if name in options}
    with Client(str(daemon.socket), namespace=fingerprint.namespace(model, **names), **options) as client:
        yield client


def check_pool(client: Client, model: Any, ids: Any, least: int = 0, *, tolerance: float = 1e-2) -> int:
    """K and V that are found for a prompt are those that the model computes for it; how many tokens were found.

    Words are a weak oracle: the same may be said over wrong bytes.  `ids`: (1, n).  `least`: tokens that must be found.
    """
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    sequence = client.admit([*ids[0].tolist(), 1], timeout=10)
    found = sequence.hit
    try:
        client.pool.copy(client.take_copies())
        assert found >= least, f"{found} tokens were found, and not {least}"
        if not found:
            return 0
        own = transformers.DynamicCache()  # keeps all columns of windowed layers, too
        with torch.no_grad():
            model(input_ids=ids[:, :found], cache=own)
        slots = torch.from_numpy(slot_indices(sequence, 0, found)).long()
        for number, layer in enumerate(own.layers):
            for part, states in (("k", layer.keys), ("v", layer.values)):
                have = client.pool.tensor(f"{number}.{part}")[slots].transpose(0, 1).float()
                apart = (have - states[0].float()).abs().amax(dim=(0, 2))
                limit = tolerance * max(1.0, float(states.float().abs().max()))
                assert float(apart.max()) < limit, (
                    f"{part} of layer {number} is off by {float(apart.max()):.3g} at token {int(apart.argmax())} of "
                    f"{found}, from token {int((apart >= limit).int().argmax())} on"
                )
                del have
    finally:
        sequence.free()
        client.settle()
    return found


def waiting(daemon: Running) -> int:
    """How many wait for what another is computing."""
    with Control(str(daemon.socket)) as control:
        return sum(row["awaits_commit"] for row in control.inspect("tickets"))


# -- processes ---------------------------------------------------------------------------------------------------------


class Worker:
    """An engine in a process of its own: a model, a client, and commands over a pipe (see hf/worker.py)."""

    _context: Any = None

    def __init__(self, socket: Path, model: dict[str, Any] | None = None, **options: Any) -> None:
        """`model`: arguments for `tiny`, or {"name": "smollm2"}.  `options`: of the client and its namespace."""
        if Worker._context is None:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            Worker._context = multiprocessing.get_context("forkserver")
            Worker._context.set_forkserver_preload(
                ["torch", "transformers", "transformers.models.llama.modeling_llama", "kvslot.engines.hf"]
            )
        self._pipe, theirs = Worker._context.Pipe()
        given = {"PIPE": theirs, "SOCKET": str(socket), "MODEL": model or {}, "OPTIONS": options}
        self.process = Worker._context.Process(target=runpy.run_path, args=(str(WORKER), given), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return int(self.process.pid)

    def start(self, do: str, **arguments: Any) -> None:
        """Gives a command; `result` has its outcome."""
        self._pipe.send((do, arguments))

    def result(self, timeout: float = 300.0) -> Any:
        """What the oldest open command came to; raises what it raised, as a RuntimeError with its name."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"engine {self.pid} said nothing for {timeout:g} s")
        kind, value = self._pipe.recv()
        if kind == "error":
            raise RuntimeError(value)
        return value

    def do(self, do: str, **arguments: Any) -> Any:
        """One command, and its outcome."""
        self.start(do, **arguments)
        return self.result()

    def kill(self) -> None:
        """Ends the process as a power cut would."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.join(10)

    def close(self) -> None:
        """Ends it in order."""
        if self.process.is_alive():
            try:
                self._pipe.send(("end", {}))
                self.process.join(30)
            except OSError:
                pass
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
