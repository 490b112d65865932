"""Engines in processes of their own on one pool: they read one another's K and V, and survive one another's death."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvslot[hf]'")
transformers: Any = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'kvslot[hf]'"
)

from kvslot.api.client import Client  # noqa: E402
from kvslot.api.wire import Disconnected, KvslotError, StaleSession  # noqa: E402
from kvslot.engines import fingerprint  # noqa: E402
from kvslot.engines.hf import LayoutMismatch, PoolCache  # noqa: E402

from ...restart.killing import kept  # noqa: E402
from ...tools.daemon import Running, running  # noqa: E402
from ..tools import Worker, counts, engine, pool_for, pooled, sound, tiny, tokens, waiting  # noqa: E402

NEW = 24


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


@pytest.fixture(params=["chain", "peel"])
def daemon(model: Any, request: Any) -> Iterator[Running]:
    with pooled(model, append=request.param) as one:
        yield one


def alone(model: Any, ids: list[list[int]], new: int = NEW) -> list[list[int]]:
    """What the model says without kvslot."""
    given = torch.tensor(ids)
    out: list[list[int]] = model.generate(given, max_new_tokens=new, do_sample=False)[
        :, given.shape[1] :
    ].tolist()
    return out


def test_bytes_that_one_reads_are_those_that_another_wrote(daemon: Running, model: Any) -> None:
    """What A computed equals DynamicCache's K and V, and B, another process, reads exactly those bytes and goes on."""
    ids = tokens(70).tolist()
    own = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor(ids), cache=own)
    want = [
        part[0].transpose(0, 1).numpy().tobytes() for each in own.layers for part in (each.keys, each.values)
    ]
    with Worker(daemon.socket) as first, Worker(daemon.socket) as second:
        said = first.do("generate", ids=ids, new=NEW)
        assert said == {**said, "hits": [0], "tokens": alone(model, ids)}
        longer = [*ids[0], 5]
        assert first.do("bytes_of", ids=longer) == want
        assert second.do("bytes_of", ids=longer) == want
        for mode in ("gather", "write_through"):
            again = second.do("generate", ids=ids, new=NEW, mode=mode)
            assert again == {**again, "hits": [69], "tokens": said["tokens"], "computed": 1 + NEW - 1}
        first.close()  # neither owns what both read
        assert second.do("generate", ids=ids, new=NEW)["tokens"] == said["tokens"]
    assert counts(daemon)["sessions"] == 0


@pytest.mark.parametrize(
    ("other", "options"),
    [
        ({"seed": 1}, {}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {}),
        ({"vocab_size": 300}, {}),
        ({}, {"tenant": "b"}),
        ({}, {"salt": "s"}),
        ({}, {"revision": "r"}),
    ],
    ids=["weights", "rope", "vocabulary", "tenant", "salt", "revision"],
)
def test_what_is_not_the_same_never_hits(other: dict[str, Any], options: dict[str, str]) -> None:
    """Another model of the same shape, another tenant or salt: nothing of the first's is found, and all is right."""
    ids = tokens(40).tolist()
    with (
        pooled(tiny()) as daemon,
        Worker(daemon.socket) as first,
        Worker(daemon.socket, other, **options) as second,
    ):
        said = first.do("generate", ids=ids, new=NEW)
        assert said == {**said, "hits": [0], "tokens": alone(tiny(), ids)}
        apart = second.do("generate", ids=ids, new=NEW)
        assert apart == {**apart, "hits": [0], "tokens": alone(tiny(**other), ids)}
        assert first.do("generate", ids=ids, new=NEW)["hits"] == [39]
        assert second.do("generate", ids=ids, new=NEW)["hits"] == [39]


def test_another_dtype_never_meets(model: Any) -> None:
    """A pool holds one dtype; a model of another is refused."""
    with pooled(model) as daemon:
        other = tiny(dtype="bfloat16")
        with engine(daemon, other) as client, pytest.raises(LayoutMismatch, match="bfloat16"):
            PoolCache(client, other, tokens(20))


def test_adapters_of_one_name_with_other_weights() -> None:
    """The same adapter name in two engines, trained differently: never a hit; the same weights: always."""
    peft: Any = pytest.importorskip("peft", reason="peft is not installed")

    def lora(seed: int) -> Any:
        model = tiny()
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, config, adapter_name="helpful").eval()

    ids = tokens(40)
    with pooled(tiny()) as daemon:
        for seed, hit in ((1, 0), (2, 0), (1, 39), (2, 39), (None, 0), (None, 39)):
            model = tiny() if seed is None else lora(seed)
            want = model.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)
            with engine(daemon, model) as client, PoolCache(client, model, ids) as cache:
                assert cache.hits == [hit], seed
                got = model.generate(input_ids=ids, cache=cache, max_new_tokens=NEW, do_sample=False)
                assert torch.equal(got, want)


# -- work in flight ----------------------------------------------------------------------------------------------------


def test_the_same_prompt_at_once_is_computed_once(daemon: Running, model: Any) -> None:
    """The second waits for the first's prompt, and computes only its own words behind it."""
    ids = tokens(300).tolist()
    other = [[*ids[0][:280], *tokens(20, 9).tolist()[0]]]
    with Worker(daemon.socket) as first, Worker(daemon.socket) as second:
        first.do("ready")
        second.do("ready")
        first.start("generate", ids=ids, new=NEW, hold=1.0)
        _until(lambda: counts(daemon)["sequences"] == 1)
        second.start("generate", ids=other, new=NEW, wait_for_commit=True)
        one, two = first.result(), second.result()
    assert one == {**one, "hits": [0], "computed": 300 + NEW - 1, "tokens": alone(model, ids)}
    assert two == {**two, "hits": [280], "computed": 20 + NEW - 1, "tokens": alone(model, other)}
    assert 0.3 < two["admitted"] < 10


def test_death_of_the_first_wakes_who_waits(daemon: Running, model: Any) -> None:
    """At once, and not when its patience is over: it computes all by itself, and is right."""
    ids = tokens(300).tolist()
    with Worker(daemon.socket) as first, Worker(daemon.socket) as second:
        second.do("ready")
        first.start("generate", ids=ids, new=NEW, hold=120.0)
        _until(lambda: counts(daemon)["sequences"] == 1)
        second.start("generate", ids=ids, new=NEW, wait_for_commit=True)
        _until(lambda: waiting(daemon) == 1)
        first.kill()
        two = second.result(60)
    assert two == {**two, "hits": [0], "tokens": alone(model, ids)}
    assert two["admitted"] < 30


def test_waiting_is_bounded(daemon: Running, model: Any) -> None:
    """Who has waited long enough goes on alone, while the first is still at it."""
    ids = tokens(300).tolist()
    with Worker(daemon.socket) as first, Worker(daemon.socket) as second:
        second.do("ready")
        first.start("generate", ids=ids, new=NEW, hold=120.0)
        _until(lambda: counts(daemon)["sequences"] == 1)
        two = second.do("generate", ids=ids, new=NEW, wait_for_commit=True, patience=0.5)
        assert two == {**two, "hits": [0], "tokens": alone(model, ids)}
        assert 0.4 < two["admitted"] < 20
        first.kill()


# -- death -------------------------------------------------------------------------------------------------------------


def test_the_daemon_dies_and_comes_back(tmp_path: Path, model: Any) -> None:
    """An engine that runs meanwhile is told so, never reads what is not its own, and begins anew on the new pool."""
    ids, pool = tokens(60), pool_for(model)
    want = alone(model, ids.tolist(), 60)
    path = tmp_path / "s"
    namespace = fingerprint.namespace(model)
    with running(pools=[pool], socket=path, code=None) as daemon:
        client = Client(str(path), namespace=namespace)
        boot = client.token.boot
        hook = model.register_forward_hook(_later(daemon, 5))
        with pytest.raises(Disconnected), PoolCache(client, model, ids) as cache:
            model.generate(ids, cache=cache, max_new_tokens=200, do_sample=False)
        hook.remove()
        assert cache.closed
        with pytest.raises(Disconnected):  # nobody is there
            client.reconnect()
        with pytest.raises(KvslotError):
            PoolCache(client, model, ids)
    with running(pools=[pool], socket=path) as daemon:
        with pytest.raises(StaleSession):
            client.reconnect()
        client.close()
        with Client(str(path), namespace=namespace) as fresh:
            assert fresh.token.boot != boot
            for hit in (0, 59):
                with PoolCache(fresh, model, ids) as cache:
                    assert cache.hits == [hit]
                    out = model.generate(ids, cache=cache, max_new_tokens=60, do_sample=False)
                    assert out[:, 60:].tolist() == want
        sound(daemon)


def _later(daemon: Running, calls: int) -> Any:
    """A hook that kills the daemon at its `calls`-th call."""
    left = [calls]

    def hook(*_: object) -> None:
        left[0] -= 1
        if not left[0]:
            daemon.process.kill()
            daemon.process.wait()

    return hook


def _next(client: Client, model: Any, cache: PoolCache, token: int) -> int:
    """The word behind this one; where the connection ends meanwhile, once it is there again."""
    given = torch.tensor([[token]])
    try:
        out = model(input_ids=given, cache=cache)
    except Disconnected:
        client.reconnect()
        out = model(input_ids=given, cache=cache)
    return int(out.logits[0, -1].argmax())


def test_a_lost_connection_taken_up_again(daemon: Running, model: Any) -> None:
    """Disconnected in mid-answer, and the daemon is there: reconnect, and the same cache goes on to the same words."""
    ids = tokens(60)
    want = alone(model, ids.tolist(), 60)[0]
    with engine(daemon, model, append="chain") as client, torch.no_grad():
        with PoolCache(client, model, ids) as cache:
            said = [int(model(input_ids=ids, cache=cache).logits[0, -1].argmax())]
            for step in range(59):
                if step in (7, 30):
                    client._connection._socket.shutdown(2)
                said.append(_next(client, model, cache, said[-1]))
            assert said == want
        assert cache.published >= 60


@pytest.mark.parametrize("mode", ["gather", "write_through"])
def test_a_daemon_that_is_killed_in_mid_answer(model: Any, mode: str) -> None:
    """Under a service manager the next daemon has it all: the same cache goes on in its slots to the same words."""
    ids = tokens(60)
    want = alone(model, ids.tolist(), 60)[0]
    with kept([pool_for(model)]) as daemon:
        client = Client(str(daemon.socket), namespace=fingerprint.namespace(model))
        with client, torch.no_grad(), PoolCache(client, model, ids, mode=mode) as cache:
            said = [int(model(input_ids=ids, cache=cache).logits[0, -1].argmax())]
            for step in range(59):
                if step in (7, 30):
                    daemon.manager.kill()
                said.append(_next(client, model, cache, said[-1]))
            assert said == want
            assert cache.hits == [0]
        assert cache.published >= 60
        with Client(str(daemon.socket), namespace=fingerprint.namespace(model)) as other:
            assert other.probe([*ids[0].tolist(), *said]) >= 60
        assert len(daemon.events("warm_start")) == 2


def test_a_connection_lost_while_the_answer_is_published(daemon: Running, model: Any) -> None:
    """Nobody knows what became of the commit: the slots go back all the same, once the connection is there again."""
    ids = torch.cat([tokens(60, 1), tokens(60, 2)])
    with engine(daemon, model) as client:
        cache = PoolCache(client, model, ids)
        model.generate(ids, cache=cache, max_new_tokens=5, do_sample=False)
        client.settle()
        client._connection._socket.shutdown(socket.SHUT_RD)  # what is sent arrives, and no answer comes
        cache.close()
        assert not client.sequences
        client.reconnect()
        client.settle()
        sound(daemon)


def _until(true: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError("it did not come to that")
        time.sleep(0.01)
