"""What an engine in a process of its own does: takes commands from a pipe until it is told to end, or killed.

Run by `tests.engines.tools.Worker`, which puts PIPE, SOCKET, MODEL and OPTIONS into this module.
"""

from __future__ import annotations

import importlib
import sys
import time
import types
from pathlib import Path
from typing import Any

given: dict[str, Any] = globals()
PIPE: Any = given.get("PIPE")
SOCKET: str = given.get("SOCKET", "")
MODEL: dict[str, Any] = given.get("MODEL", {})
OPTIONS: dict[str, Any] = given.get("OPTIONS", {})


class Engine:
    """A model and a client; each method but `__init__` is a command."""

    def __init__(self) -> None:
        from kvslot import Client
        from kvslot.engines import fingerprint

        self.torch = importlib.import_module("torch")
        self.torch.set_num_threads(1)
        options = dict(OPTIONS)
        names = {name: options.pop(name) for name in ("tenant", "salt", "revision") if name in options}
        self.model = _model(MODEL)
        self.namespace = fingerprint.namespace(self.model, **names)
        self.client = Client(SOCKET, namespace=self.namespace, **options)

    def ready(self) -> str:
        """The model's fingerprint."""
        return self.namespace.model

    def generate(
        self,
        ids: list[list[int]],
        new: int,
        mask: list[list[int]] | None = None,
        pause: float = 0.0,
        hold: float = 0.0,
        **options: Any,
    ) -> dict[str, Any]:
        """The tokens after `ids`, and what was cached; sleeps `hold` before the first forward, `pause` after each."""
        from kvslot.engines.hf import PoolCache

        torch = self.torch
        given = torch.tensor(ids)
        # Without a mask, generate takes every padding token in a prompt for padding, those that the model said, too.
        shown = torch.ones_like(given) if mask is None else torch.tensor(mask)
        names = ("num_beams", "num_return_sequences", "prefill_chunk_size", "prompt_lookup_num_tokens")
        more = {name: options.pop(name) for name in names if name in options}
        began = time.perf_counter()
        first: list[float] = []

        def after(*_: object) -> None:
            first.append(time.perf_counter() - began)
            time.sleep(pause)

        hook = self.model.register_forward_hook(after)
        try:
            with PoolCache(self.client, self.model, given, shown, **options) as cache:
                waited = time.perf_counter() - began
                time.sleep(hold)
                out = self.model.generate(
                    given, attention_mask=shown, cache=cache, max_new_tokens=new, do_sample=False, **more
                )
                return {
                    "tokens": out[:, given.shape[1] :].tolist(),
                    "hits": cache.hits,
                    "computed": cache.computed,
                    "first": first[0],
                    "admitted": waited,
                }
        finally:
            hook.remove()

    def alone(self, ids: list[list[int]], new: int, **options: Any) -> list[list[int]]:
        """The tokens after `ids` without kvslot."""
        given = self.torch.tensor(ids)
        shown = self.torch.ones_like(given)
        out = self.model.generate(given, attention_mask=shown, max_new_tokens=new, do_sample=False, **options)
        return [row[given.shape[1] :] for row in out.tolist()]

    def check(self, ids: list[int]) -> int:
        """How much of a prompt is cached; raises where its K and V are not those that the model computes."""
        return int(tools.check_pool(self.client, self.model, self.torch.tensor([ids])))

    def bytes_of(self, ids: list[int]) -> list[bytes]:
        """K and V of what is cached of a prompt, plane by plane, as they lie in the pool."""
        from kvslot.api.client import indices

        sequence = self.client.admit(ids)
        self.client.pool.copy(self.client.take_copies())
        slots = indices.slot_indices(sequence, 0, sequence.hit)
        found = [self.client.pool.plane(name)[slots].tobytes() for name in self.client.pool.planes]
        sequence.free()
        self.client.flush()
        return found

    def statistics(self) -> dict[str, int]:
        """Of the client."""
        found = self.client.statistics()
        return {name: getattr(found, name) for name in ("calls", "waits", "frames_sent", "steps_submitted")}


def _model(arguments: dict[str, Any]) -> Any:
    if arguments.get("name") == "smollm2":
        from kvslot.engines.hf import model

        folder = model.cached()
        assert folder is not None
        return model.load(folder)[0]
    return tools.tiny(**arguments)


def main() -> None:
    """The life of it."""
    engine = Engine()
    while True:
        try:
            do, arguments = PIPE.recv()
        except EOFError:
            return
        if do == "end":
            engine.client.close()
            return
        try:
            PIPE.send(("value", getattr(engine, do)(**arguments)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
            PIPE.send(("error", f"{type(error).__name__}: {error}"))


if PIPE is not None:
    if "tests" not in sys.modules:
        # Not the repository's root: from there rooms would load a second time under their short names.
        package = types.ModuleType("tests")
        package.__path__ = [str(Path(__file__).resolve().parents[2])]
        sys.modules["tests"] = package
    tools: Any = importlib.import_module("tests.engines.tools")
    main()
