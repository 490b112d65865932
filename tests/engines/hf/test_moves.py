"""PoolCache while what it reads is moved: the same tokens and logits as over memory that stays as it is.

The daemon moves whatever can be moved, between any two steps, and overwrites free memory with what is no number, so
one slot read from where it was would spoil all logits from there on.
"""

from __future__ import annotations

import random
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


@contextmanager
def holes(daemon: Running, mover: dict[str, Any]) -> Iterator[None]:
    """Meanwhile the daemon's compactor always has something to gain: what nobody reads is evicted, a little at a time."""
    over = threading.Event()

    def make() -> None:
        rng = random.Random(1)
        with Control(str(daemon.socket)) as control:
            while not over.wait(0.004):
                control.evict(rng.randrange(1, 30))
                control.defrag("once")

    thread = threading.Thread(target=make)
    if mover["compaction"] == "forced":
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


def scatter(client: Client, model: Any, count: int = 24) -> None:
    """Leaves pieces and holes: prompts of many lengths are computed and given back, every other one for good."""
    for seed in range(count):
        ids = tokens(7 + 5 * seed % 40, seed=1000 + seed)
        with torch.no_grad(), PoolCache(client, model, ids, publish=bool(seed % 2)) as cache:
            model(input_ids=ids, cache=cache)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_the_same_while_what_is_read_moves(
    daemon: Running, model: Any, mode: str, mover: dict[str, Any]
) -> None:
    """Cold, hit, forked and padded: tokens and logits are those of transformers' own cache, to the last bit."""
    ids = tokens(90)
    both, mask = padded(tokens(70, seed=2), tokens(31, seed=3))
    with engine(daemon, model, tenant=str(next(TENANTS)), movable=True) as client:
        for round_ in range(8):
            scatter(client, model)
            with holes(daemon, mover):
                for given, shown in ((ids, None), (both, mask)):
                    with PoolCache(client, model, given, shown, mode=mode) as cache:
                        ours = told(model, given, cache, shown, new=40)
                    theirs = told(model, given, None, shown, new=40)
                    assert torch.equal(ours.sequences, theirs.sequences)
                    assert round_ or shown is not None or same(ours, theirs)
                with PoolCache(client, model, ids, mode=mode) as cache:
                    beams = told(model, ids, cache, new=20, num_beams=3)
                assert torch.equal(beams.sequences, told(model, ids, new=20, num_beams=3).sequences)
            if round_ > 1 and client.statistics().moves > 10:
                break
        assert client.statistics().moves > 10
        check_pool(client, model, ids)


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

    monkeypatch.setattr(PoolCache, "_look_again", counting)
    monkeypatch.setattr(PoolCache, "_next_step", slow)
    ids, start = tokens(300, seed=5), 120
    with pooled(model, daemon=mover) as one, engine(one, model, movable=True) as client, torch.no_grad():
        scatter(client, model)
        with PoolCache(client, model, ids[:, :start]) as cache:
            model(input_ids=ids[:, :start], cache=cache)
        own = transformers.DynamicCache(config=model.config)
        model(input_ids=ids[:, : start - 1], cache=own)
        want = model(input_ids=ids[:, start - 1 :], cache=own).logits
        client.pin(ids[0, :start])
        for _ in range(60):
            with holes(one, mover), PoolCache(client, model, ids, mode=mode, publish=False) as cache:
                assert cache.hits[0] in (start - 1, start)
                have = model(input_ids=ids[:, cache.hit :], cache=cache).logits
            assert torch.allclose(have, want[:, -have.shape[1] :], atol=1e-4)
            if looked > 11:
                break
            scatter(client, model, 6)
    assert looked


@pytest.mark.parametrize("kind", ["mistral", "gemma"])
@pytest.mark.parametrize("mode", MODES)
def test_windows_slide_over_what_moves(kind: str, mode: str, mover: dict[str, Any]) -> None:
    """With windows in all or in some layers, and fronts given back, words are those of transformers' own cache."""
    model = tiny(kind=kind, window=16)
    ids = tokens(60, seed=7)
    want = told(model, ids, new=40)
    with pooled(model, daemon=mover) as one, engine(one, model, movable=True) as client:
        scatter(client, model)
        for _ in range(3):
            with holes(one, mover), PoolCache(client, model, ids, mode=mode) as cache:
                assert torch.equal(told(model, ids, cache, new=40).sequences, want.sequences)
