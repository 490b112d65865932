"""K and V in the pool are those of the tokens they are found by, whatever went wrong; words would not say so."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

WITHOUT = "torch and transformers are not installed: pip install 'kvslot[hf]'"
torch: Any = pytest.importorskip("torch", reason=WITHOUT)
transformers: Any = pytest.importorskip("transformers", reason=WITHOUT)

from kvslot.api.client import Client, Namespace  # noqa: E402
from kvslot.api.client.connection import Connection  # noqa: E402
from kvslot.api.wire import BadRequest, Disconnected, KvslotError, NotFound, Unsupported  # noqa: E402
from kvslot.engines import fingerprint  # noqa: E402
from kvslot.engines.hf import PoolCache, shape_of  # noqa: E402
from kvslot.engines.hf.cache import MODES  # noqa: E402

from ...tools.daemon import Running  # noqa: E402
from ..tools import check_pool, engine, pooled, sound, tiny, tokens  # noqa: E402

TENANTS = iter(range(1 << 30))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


@pytest.fixture(scope="module")
def daemon(model: Any) -> Iterator[Running]:
    with pooled(model) as one:
        yield one


@pytest.fixture
def client(daemon: Running, model: Any) -> Iterator[Client]:
    with engine(daemon, model, tenant=str(next(TENANTS)), append="chain") as one:
        yield one
        gc.collect()


def test_the_oracle_sees_a_wrong_byte(client: Client, model: Any) -> None:
    """One K of one head of one layer that is another one is found."""
    ids = tokens(30)
    with torch.no_grad(), PoolCache(client, model, ids) as cache:
        model(input_ids=ids, cache=cache)
        slot = cache.sequences[0].slot_of(11)
    assert check_pool(client, model, ids) == 30
    client.pool.tensor("1.k")[slot, 1, 3] += 0.5
    with pytest.raises(
        AssertionError, match=r"k of layer 1 is off by .* at token 11 of 30, from token 11 on"
    ):
        check_pool(client, model, ids)


# -- the connection is lost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", [socket.SHUT_RD, socket.SHUT_RDWR])
@pytest.mark.parametrize("more", [0, 1])
def test_cut_in_mid_append(client: Client, model: Any, mode: str, how: int, more: int) -> None:
    """Tokens appended to one row, and not to the next, are taken back without the wire, and fed again."""
    ids, after = torch.cat([tokens(20, 1), tokens(20, 2)]), tokens(400, 9)
    with torch.no_grad():
        with PoolCache(client, model, ids, mode=mode) as cache:
            model(input_ids=ids, cache=cache)
            client.settle()
            cache.sequences[more].reserve(
                cache.sequences[more].room + 40
            )  # the rows ask for more room at other times
            count = min(each.room for each in cache.sequences) + 1
            client._connection._socket.shutdown(how)
            piece = after[:, :count].repeat(2, 1)
            with pytest.raises(Disconnected):
                model(input_ids=piece, cache=cache)
            assert [each.length for each in cache.sequences] == [20, 20]
            client.reconnect()
            model(input_ids=piece, cache=cache)
            for at in range(count, count + 40):
                model(input_ids=after[:, at : at + 1].repeat(2, 1), cache=cache)
        client.settle()
        for row in ids:
            check_pool(client, model, torch.cat([row[None], after[:, : count + 40]], 1), 60 + count)


def test_cut_at_any_frame(daemon: Running, model: Any) -> None:
    """Whichever receive or send is the last of its connection: the same cache goes on, or says that it cannot."""
    ids, after = torch.cat([tokens(20, 1), tokens(20, 2)]), tokens(90, 9)

    def talk(client: Client, cut: int) -> int:
        calls = 0

        def lose(self: Any, *args: Any, original: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == cut:
                self._socket.shutdown(socket.SHUT_RDWR)
            return original(self, *args)

        with PoolCache(client, model, ids) as cache, pytest.MonkeyPatch.context() as patch:
            cache.sequences[0].reserve(cache.sequences[0].room + 40)  # the rows ask for more at other times
            for name in ("send", "receive"):
                original = getattr(Connection, name)
                patch.setattr(
                    Connection, name, lambda self, *a, original=original: lose(self, *a, original=original)
                )
            ends = (
                0,
                9,
                79,
                80,
                84,
                90,
            )  # the long one asks for room and waits for it, when one row has been served
            pieces = [ids, *(after[:, at:end].repeat(2, 1) for at, end in pairwise(ends))]
            for piece in pieces:
                for _ in range(2):
                    try:
                        model(input_ids=piece, cache=cache)
                        assert {each.length for each in cache.sequences} == {cache.get_seq_length()}
                        break
                    except Disconnected:
                        client.reconnect()
                if piece is pieces[-2]:
                    try:
                        cache.crop(-piece.shape[1])
                        model(input_ids=piece, cache=cache)
                    except Disconnected:
                        client.reconnect()
                        break
        return calls

    with torch.no_grad():
        cut, most = 0, 1
        while cut <= most:
            with engine(daemon, model, tenant=str(next(TENANTS)), append="chain") as client:
                most = max(talk(client, cut), most) if not cut else most
                if cut:
                    talk(client, cut)
                if client._connection.fault is not None:
                    client.reconnect()
                client.settle()
                for row in ids:
                    check_pool(client, model, torch.cat([row[None], after], 1))
            cut += 1
    assert most > 4


def test_a_roll_back_that_fails(client: Client, model: Any) -> None:
    """To take back told tokens takes the wire: a crop that could not ends the cache, and publishes nothing wrong."""
    ids, after = torch.cat([tokens(20, 1), tokens(20, 2)]), tokens(40, 9)
    with torch.no_grad():
        with PoolCache(client, model, ids) as cache:
            model(input_ids=ids, cache=cache)
            for each in cache.sequences:
                assert each.commit() == 20
            client._connection._socket.shutdown(socket.SHUT_RDWR)
            with pytest.raises(Disconnected):
                cache.crop(-3)
            client.reconnect()
            with pytest.raises(KvslotError, match="make another one"):
                model(input_ids=after[:, :1].repeat(2, 1), cache=cache)
        for row in ids:
            check_pool(client, model, row[None])


def test_a_sequence_that_is_not_as_long_as_it_should_be(client: Client, model: Any) -> None:
    """Somebody else's token in a row is noticed before anything is computed with it."""
    ids = tokens(20)
    with torch.no_grad(), PoolCache(client, model, ids) as cache:
        model(input_ids=ids, cache=cache)
        cache.sequences[0].append(5)
        with pytest.raises(KvslotError, match="make another one"):
            model(input_ids=tokens(1), cache=cache)


def test_a_commit_that_is_refused(client: Client, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's forward has ended and is right, whatever becomes of publishing it."""
    ids = tokens(20)
    with torch.no_grad(), PoolCache(client, model, ids) as cache:

        def refuse(*_: object, **__: object) -> int:
            raise NotFound("no such sequence")

        monkeypatch.setattr("kvslot.api.client.sequence.Sequence.commit", refuse)
        model(input_ids=ids, cache=cache)
        assert cache.get_seq_length() == 20
        monkeypatch.undo()


# -- private copies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["gemma", "mistral"])
def test_crop_behind_the_private_copy(kind: str, mode: str) -> None:
    """Rolled back behind what the private copy still holds, a windowed layer takes it from the pool again."""
    model, ids, tail = tiny(kind=kind, window=16), tokens(40), tokens(600, 5)
    settings: dict[str, Any] = {"windowed": False} if kind == "mistral" else {}
    with pooled(model, **settings) as daemon, engine(daemon, model) as client:
        with torch.no_grad(), PoolCache(client, model, ids, mode=mode) as cache:
            model(input_ids=ids, cache=cache)
            for at in range(320):
                model(input_ids=tail[:, at : at + 1], cache=cache)
            cache.crop(-150)
            for at in range(170, 176):
                model(input_ids=tail[:, at : at + 1], cache=cache)
            cache.crop(-180)
            for at in range(1, 12):
                assert cache.get_seq_length() == 36 + at - 1
                piece = torch.cat([ids, tail], 1)[:, 35 + at : 36 + at]
                model(input_ids=piece, cache=cache)
        check_pool(client, model, torch.cat([ids, tail], 1), 46)


# -- what tokens do not say -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"is_causal": False},
        {"pixel_values": [torch.zeros(1)]},
        {"token_type_ids": torch.zeros(1, 20, dtype=torch.long)},
        {"cu_seq_lens_q": torch.zeros(1)},
        {"whatever": 0.5},
    ],
    ids=str,
)
def test_more_than_tokens(client: Client, model: Any, more: dict[str, Any]) -> None:
    """Whatever else a forward is given, a tensor or not, is refused, and leaves nothing."""
    ids = tokens(20)
    with torch.no_grad(), PoolCache(client, model, ids) as cache:
        with pytest.raises(Unsupported, match=next(iter(more))):
            model(input_ids=ids, cache=cache, **more)
        with pytest.raises(Unsupported, match=next(iter(more))):
            model(input_ids=ids, cache=cache, **more)
        model(input_ids=ids, cache=cache, is_causal=None, use_cache=True, output_hidden_states=True)
    check_pool(client, model, ids, 20)


def test_a_mask_of_earlier_columns_later(client: Client, model: Any) -> None:
    """Columns that were fed unmasked must stay so: the whole mask is looked at in each step."""
    ids, after = tokens(20), tokens(5, 3)
    mask = torch.ones(1, 21, dtype=torch.long)
    mask[0, :15] = 0
    with torch.no_grad(), PoolCache(client, model, ids) as cache:
        model(input_ids=ids, cache=cache)
        with pytest.raises(Unsupported, match="masks more"):
            model(input_ids=after[:, :1], attention_mask=mask, cache=cache)
        model(input_ids=after[:, :1], attention_mask=torch.ones_like(mask), cache=cache)
    check_pool(client, model, torch.cat([ids, after], 1), 21)


def test_left_to_chance(daemon: Running) -> None:
    """A model in training mode is refused where that leaves anything to chance, be it in one layer only."""
    model, ids = tiny(attention_dropout=0.5), tokens(20)
    with engine(daemon, model) as client, torch.no_grad():
        with PoolCache(client, model, ids) as cache:
            model.model.layers[1].train()
            with pytest.raises(Unsupported, match="training"):
                model(input_ids=ids, cache=cache)
            model.eval()
            model(input_ids=ids, cache=cache)
        check_pool(client, model, ids, 20)
    plain = tiny().train()
    with engine(daemon, plain, tenant="train") as client, torch.no_grad():
        with PoolCache(client, plain, ids) as cache:
            plain(input_ids=ids, cache=cache)
        check_pool(client, plain, ids, 20)


@pytest.mark.parametrize("name", ["blt", "rwkv", "xlstm", "minimax_m3_vl_text"])
def test_models_of_another_kind(name: str) -> None:
    """What keeps something else than K and V is refused by name, not by an AttributeError."""
    config = transformers.AutoConfig.for_model(name)
    config.dtype = torch.float32
    with pytest.raises(Unsupported):
        shape_of(config)


def test_models_that_look_ahead() -> None:
    """Where tokens see those after them, a prefix has no K and V of its own."""
    for config in (
        transformers.GemmaConfig(use_bidirectional_attention=True, dtype=torch.float32),
        transformers.BertConfig(dtype=torch.float32),
    ):
        with pytest.raises(Unsupported, match="see those after them"):
            shape_of(config)
    for config in (
        transformers.BertConfig(is_decoder=True, dtype=torch.float32),
        transformers.GPTNeoXConfig(dtype=torch.float32),
    ):
        assert shape_of(config).heads


# -- at any moment ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_forgotten_in_the_middle_of_a_call(daemon: Running, model: Any) -> None:
    """A cache that nobody closed is collected while another call waits for its answer: that call gets its own."""
    with engine(daemon, model, tenant=str(next(TENANTS))) as client:
        cache = PoolCache(client, model, tokens(20))
        model.generate(tokens(20), cache=cache, max_new_tokens=5)
        gc.disable()
        del cache
        with pytest.MonkeyPatch.context() as patch:
            receive = Connection.receive

            def collecting(self: Any) -> Any:
                patch.undo()
                gc.collect()  # which may happen at any allocation
                return receive(self)

            patch.setattr(Connection, "receive", collecting)
            try:
                assert client.probe(tokens(30, 2)[0].tolist()) == 0
            finally:
                gc.enable()
        assert client._connection.fault is None
        client.settle()
        sound(daemon)
        assert check_pool(client, model, tokens(20)) == 20


def test_a_forward_that_fails_ends_its_step(client: Client, model: Any) -> None:
    """At once: a session whose step goes on counts as stalled.  An error that the caller is handling is not its."""
    ids = tokens(20)

    def fail(*_: object) -> None:
        raise RuntimeError("stop")

    with torch.no_grad(), PoolCache(client, model, ids) as cache:
        for module in (model.model.layers[1], model):
            hook = (
                module.register_forward_pre_hook(fail)
                if module is model
                else module.register_forward_hook(fail)
            )
            with pytest.raises(RuntimeError, match="stop"):
                model(input_ids=ids, cache=cache)
            hook.remove()
            done = client.statistics()
            assert done.steps_completed == done.steps_submitted
            assert cache.get_seq_length() == 0
        try:
            raise KeyError
        except KeyError:
            model(input_ids=ids, cache=cache)
        assert cache.get_seq_length() == 20
    check_pool(client, model, ids, 20)


def _until_room_is_short(model: Any, old: PoolCache, young: PoolCache) -> None:
    for step in range(100):
        for cache in (old, young):
            model(input_ids=tokens(1 if step else 100, step or 1 + (cache is young)), cache=cache)


def test_events_are_the_users(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for room leaves what the daemon says to whoever asks for it."""
    settings: dict[str, Any] = {"preempt_deadline_ms": 200, "reclaim_patience_ms": 5, "fence_patience_ms": 5}
    with (
        pooled(model, blocks=17, watermark=0.0, headroom=0.0, **settings) as daemon,
        engine(daemon, model) as client,
    ):
        said: list[Any] = []
        with (
            torch.no_grad(),
            PoolCache(client, model, tokens(100, 1), timeout=1) as old,
            PoolCache(client, model, tokens(100, 2), timeout=1) as young,
        ):
            monkeypatch.setattr(Client, "events", lambda *_: pytest.fail("taken away from the user"))
            with pytest.raises(KvslotError):
                _until_room_is_short(model, old, young)
            monkeypatch.undo()
            said += client.events()
        assert any(type(each).__name__ in ("Preempt", "Pressure") for each in said), said
        client.settle()


# -- whose K and V ----------------------------------------------------------------------------------------------------


def test_two_models_and_one_client(client: Client) -> None:
    """A model that nobody has asked about yet is looked at before it writes under another's name."""
    other = tiny(1)
    with pytest.raises(BadRequest, match="another model's"):
        PoolCache(client, other, tokens(20))
    with pytest.raises(BadRequest, match="another model's"):
        PoolCache(client, other, tokens(20), namespace=client.namespace)
    with pytest.raises(BadRequest, match="not opened"):
        PoolCache(client, other, tokens(20), namespace=1 << 40)
    mine = fingerprint.vouch(other, Namespace("mine", "other"))
    with torch.no_grad(), PoolCache(client, other, tokens(20), namespace=mine) as cache:
        other(input_ids=tokens(20), cache=cache)


def test_adapters_are_changed_under_a_name(daemon: Running) -> None:
    """set_adapter before a cache is made, and between two of its forwards: refused, and nothing of it is written."""
    peft: Any = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(target_modules=["k_proj", "v_proj"], r=4, init_lora_weights=False)
    model = peft.get_peft_model(tiny(), config, adapter_name="x").eval()
    model.add_adapter("y", config)
    model.set_adapter("x")
    ids = tokens(20)
    with engine(daemon, model, tenant=str(next(TENANTS))) as client, torch.no_grad():
        with PoolCache(client, model, ids) as cache:
            model.set_adapter("y")
            with pytest.raises(BadRequest, match="other adapters"):
                model(input_ids=ids, cache=cache)
            with pytest.raises(BadRequest, match="adapters in force"):
                PoolCache(client, model, ids)
            model.set_adapter("x")
            model(input_ids=ids, cache=cache)
            model.set_adapter("y")
            with pytest.raises(BadRequest, match="other adapters"):
                model(input_ids=tokens(1), cache=cache)
            model.set_adapter("x")
            model(input_ids=tokens(1), cache=cache)
        assert check_pool(client, model, torch.cat([ids, tokens(1)], 1)) == 21
