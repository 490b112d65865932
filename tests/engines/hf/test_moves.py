"""PoolCache while what it reads is moved: the same tokens and logits as over memory that stays as it is.

The daemon moves whatever can be moved, between any two steps, and overwrites free memory with what is no number, so
one slot read from where it was would spoil all logits from there on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvslot[hf]'")
transformers: Any = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'kvslot[hf]'"
)

from kvslot.api.client import Client, Control  # noqa: E402
from kvslot.engines.hf import PoolCache  # noqa: E402
from kvslot.engines.hf import cache as cache_module  # noqa: E402
from kvslot.engines.hf.cache import MODES  # noqa: E402

from ...client.followers import INSTALL  # noqa: E402
from ...tools.daemon import Running  # noqa: E402
from ..tools import check_pool, engine, padded, pooled, tiny, tokens  # noqa: E402
from .test_cache import TENANTS, same, told  # noqa: E402

SEEDS = iter(range(1000, 1 << 30))
FORCED = {
    "compaction": "forced",
    "compaction_start": 0.01,
    "compaction_stop": 0.0,
    "compaction_duty": 1.0,
}


@pytest.fixture(scope="module", params=["shuffled", "compacted"])
def mover(request: Any) -> dict[str, Any]:
    """A daemon's settings: everything is moved at random, or its own compactor runs at any time."""
    if request.param == "shuffled":
        return {"first": f"{INSTALL}(1)", "compaction": "off"}
    return {"first": f"{INSTALL}(1, moves=0)", **FORCED}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


@pytest.fixture(scope="module")
def daemon(model: Any, mover: dict[str, Any]) -> Iterator[Running]:
    with pooled(model, daemon=mover) as one:
        yield one


def pieces(client: Client, model: Any, *prompts: Any) -> None:
    """Prompts are computed a few tokens at a time, with others' between them: they lie in many pieces then."""

    def compute(ids: Any) -> None:
        with torch.no_grad(), PoolCache(client, model, ids) as cache:
            model(input_ids=ids[:, cache.hit :], cache=cache)

    for ids in prompts:
        for end in range(5, ids.shape[1] + 1, 5):
            for other in range(2):
                compute(tokens(4 + (end + other) % 9, seed=next(SEEDS)))
            compute(ids[:, :end])


@contextmanager
def holes(daemon: Running, mover: dict[str, Any]) -> Iterator[None]:
    """Of all that nobody reads nothing is left; meanwhile the compactor, if it is to run, puts together what is."""
    over = threading.Event()

    def compact() -> None:
        with Control(str(daemon.socket)) as control:
            while not over.wait(0.004):
                control.defrag("once")

    with Control(str(daemon.socket)) as control:
        control.evict(1 << 20)
    thread = threading.Thread(target=compact)
    if mover["compaction"] != "off":
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_the_same_while_what_is_read_moves(
    daemon: Running, model: Any, mode: str, mover: dict[str, Any]
) -> None:
    """Hit, forked and padded rows: tokens are those of transformers' own cache."""
    with engine(daemon, model, tenant=str(next(TENANTS)), movable=True) as client:
        round_ = 0
        while True:
            ids, *rows = (tokens(90 - 30 * i, seed=100 + 10 * round_ + i) for i in range(3))
            both, mask = padded(*rows)
            pieces(client, model, ids, *rows)
            for given, shown in ((ids, None), (both, mask)):
                with PoolCache(client, model, given, shown, mode=mode) as cache, holes(daemon, mover):
                    ours = told(model, given, cache, shown, new=40)
                assert torch.equal(ours.sequences, told(model, given, None, shown, new=40).sequences)
            with PoolCache(client, model, ids, mode=mode) as cache, holes(daemon, mover):
                beams = told(model, ids, cache, new=20, num_beams=3)
            assert torch.equal(beams.sequences, told(model, ids, new=20, num_beams=3).sequences)
            if client.statistics().moves > 10:
                break
            round_ += 1
            assert round_ < 6, "hardly anything was moved"
        check_pool(client, model, ids)


@pytest.mark.parametrize("mode", MODES)
def test_logits_are_equal_to_the_last_bit(
    daemon: Running, model: Any, mode: str, mover: dict[str, Any]
) -> None:
    """A prompt that nobody has computed, and what is said after it, while all of it is moved."""
    with engine(daemon, model, tenant=str(next(TENANTS)), movable=True) as client:
        ids = tokens(70, seed=next(SEEDS))
        pieces(client, model, tokens(60, seed=next(SEEDS)))
        with PoolCache(client, model, ids, mode=mode) as cache, holes(daemon, mover):
            assert same(told(model, ids, cache, new=40), told(model, ids, new=40))


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_of_many_steps_looks_again(
    mover: dict[str, Any], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each layer begins a step of its own, each reads what is cached where it is by then."""
    model = tiny(num_hidden_layers=8)
    monkeypatch.setattr(cache_module, "STEP_SECONDS", 0.0)
    looked = 0
    look_again, next_step = PoolCache._look_again, PoolCache._next_step

    def counting(cache: PoolCache, plan: Any) -> None:
        nonlocal looked
        looked += 1
        look_again(cache, plan)

    def slow(cache: PoolCache, plan: Any) -> None:
        time.sleep(0.004)  # what a layer of a large model takes
        next_step(cache, plan)

    start = 60
    with pooled(model, daemon=mover) as one, engine(one, model, movable=True) as client, torch.no_grad():
        for round_ in range(6):
            ids = tokens(180, seed=200 + round_)
            pieces(client, model, ids[:, :start])
            own = transformers.DynamicCache(config=model.config)
            model(input_ids=ids[:, :start], cache=own)
            want = model(input_ids=ids[:, start:], cache=own).logits
            with (
                monkeypatch.context() as patch,
                PoolCache(client, model, ids, mode=mode) as cache,
                holes(one, mover),
            ):
                patch.setattr(PoolCache, "_look_again", counting)
                patch.setattr(PoolCache, "_next_step", slow)
                assert cache.hits == [start]
                have = model(input_ids=ids[:, start:], cache=cache).logits
            assert torch.allclose(have, want, atol=1e-4)
            if looked > 5:
                break
    assert looked


@pytest.mark.parametrize("kind", ["mistral", "gemma"])
@pytest.mark.parametrize("mode", MODES)
def test_windows_slide_over_what_moves(kind: str, mode: str, mover: dict[str, Any]) -> None:
    """With windows in all or in some layers, and fronts given back, words are those of transformers' own cache."""
    model = tiny(kind=kind, window=16)
    ids = tokens(60, seed=7)
    want = told(model, ids, new=40)
    with pooled(model, daemon=mover) as one, engine(one, model, movable=True) as client:
        pieces(client, model, ids)
        for _ in range(3):
            with PoolCache(client, model, ids, mode=mode) as cache, holes(one, mover):
                assert torch.equal(told(model, ids, cache, new=40).sequences, want.sequences)
