"""PoolCache against transformers' own cache: the same bytes, logits and words; and nothing of others' is touched."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvslot[hf]'")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'kvslot[hf]'"
)

from kvslot.api.client import Client, NeverFits, OutOfRoom, indices  # noqa: E402
from kvslot.api.client.connection import Connection  # noqa: E402
from kvslot.api.client.errors import AdmissionTimeout  # noqa: E402
from kvslot.api.wire import BadRequest, Ended, OutOfTurn, Unsupported  # noqa: E402
from kvslot.engines import fingerprint  # noqa: E402
from kvslot.engines.hf import LayoutMismatch, PoolCache, Preempted, shape_of  # noqa: E402
from kvslot.engines.hf.cache import MODES  # noqa: E402

from ...tools.daemon import Running  # noqa: E402
from ..tools import counts, engine, padded, pooled, sound, tiny, tokens  # noqa: E402

NEW = 24
TENANTS = iter(range(1 << 30))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


@pytest.fixture(scope="module", params=["chain", "peel"])
def daemon(model: Any, request: Any) -> Iterator[Running]:
    with pooled(model, append=request.param) as one:
        yield one


@pytest.fixture
def client(daemon: Running, model: Any) -> Iterator[Client]:
    """A tenant of its own for each test: nothing is cached."""
    with engine(daemon, model, tenant=str(next(TENANTS))) as one:
        yield one
        gc.collect()


def told(model: Any, ids: Any, cache: Any = None, mask: Any = None, new: int = NEW, **options: Any) -> Any:
    """Tokens and logits."""
    return model.generate(
        ids,
        attention_mask=mask,
        cache=cache,
        max_new_tokens=new,
        **{"do_sample": False, "return_dict_in_generate": True, "output_logits": True, **options},
    )


def same(one: Any, other: Any) -> bool:
    """Tokens and logits, to the last bit."""
    return torch.equal(one.sequences, other.sequences) and all(map(torch.equal, one.logits, other.logits))


def in_chunks(model: Any, ids: Any, *ends: int) -> Any:
    """What transformers' own cache says, filled with prompt pieces that end at `ends`, then generating."""
    cache = transformers.DynamicCache(config=model.config)
    start = 0
    with torch.no_grad():
        for end in ends:
            model(input_ids=ids[:, start:end], cache=cache)
            start = end
    return told(model, ids, cache)


@pytest.mark.parametrize("mode", MODES)
def test_logits_are_equal_to_the_last_bit(client: Client, model: Any, mode: str) -> None:
    """Cold, and on a prefix that was computed as one piece: as DynamicCache does with the same pieces."""
    ids = tokens(101)
    with PoolCache(client, model, ids[:, :60], mode=mode) as cache:
        assert cache.hits == [0]
        assert same(told(model, ids[:, :60], cache, new=1), told(model, ids[:, :60], new=1))
    with PoolCache(client, model, ids, mode=mode) as cache:
        assert cache.hits == [60]
        assert same(told(model, ids, cache), in_chunks(model, ids, 60))
        assert cache.computed == 41 + NEW - 1
    with PoolCache(client, model, ids, mode=mode) as cache:  # now all but one
        assert cache.hits == [100]
        warm = told(model, ids, cache)
        assert torch.equal(warm.sequences, told(model, ids).sequences)


@pytest.mark.parametrize("mode", MODES)
def test_bytes_in_the_pool_are_what_the_model_computed(client: Client, model: Any, mode: str) -> None:
    """K and V at the slots, layer by layer, equal those that DynamicCache holds."""
    ids = tokens(50)
    own = transformers.DynamicCache(config=model.config)
    out = told(model, ids, own)
    with PoolCache(client, model, ids, mode=mode) as cache:
        told(model, ids, cache)
        (sequence,) = cache.sequences
        slots = torch.from_numpy(indices.slot_indices(sequence)).long()
        assert len(slots) == out.sequences.shape[1] - 1
        for number, layer in enumerate(own.layers):
            for part, states in (("k", layer.keys), ("v", layer.values)):
                plane = client.pool.tensor(f"{number}.{part}")
                assert torch.equal(plane[slots].transpose(0, 1), states[0])
                del plane


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("append", ["chain", "peel"])
def test_scattered_slots(model: Any, mode: str, append: str) -> None:
    """A sequence in dozens of short runs reads and writes as one in a row."""
    with pooled(model, append=append, quantum=1, watermark=0.0) as daemon, engine(daemon, model) as client:
        pieces = [client.admit(tokens(3, seed).tolist()[0], timeout=5) for seed in range(900)]
        client.settle()
        for each in pieces[::2]:
            each.free()
        client.settle()
        ids = tokens(1500, 77)
        want = told(model, ids)
        with PoolCache(client, model, ids, mode=mode, timeout=5) as cache:
            assert len(cache.sequences[0].extents) // 2 > 50
            assert same(told(model, ids, cache), want)
        with PoolCache(client, model, ids, mode=mode, timeout=5) as cache:
            assert cache.hits == [1499]
            assert torch.equal(told(model, ids, cache).sequences, want.sequences)
        for each in pieces[1::2]:
            each.free()
        client.settle()


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 31, 32, 33])
def test_one_token_is_left_to_compute(client: Client, model: Any, count: int) -> None:
    """S15: a prompt that is cached to its last token hits all but that, any number of times, and nothing is added."""
    ids = tokens(count, count)
    want = told(model, ids, new=4)
    seen = []
    for round_ in range(3):
        with PoolCache(client, model, ids) as cache:
            assert cache.hits == [count - 1 if round_ else 0]
            assert torch.equal(told(model, ids, cache, new=4).sequences, want.sequences)
        client.settle()
        seen.append(client.probe(want.sequences[0].tolist()))
    assert seen == [count + 3] * 3  # the last word was said, and never fed


# -- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("known", [(0, 0, 0), (40, 0, 10), (40, 27, 10), (12, 29, 39)])
def test_rows_with_padding_and_different_hits(
    client: Client, model: Any, mode: str, known: tuple[int, int, int]
) -> None:
    """Every row says what it says alone, whatever of it is cached; padding and others' slots are left as they are."""
    prompts = [tokens(41, 1), tokens(30, 2), tokens(40, 3)]
    for prompt, length in zip(prompts, known, strict=True):
        if length:
            with PoolCache(client, model, prompt[:, :length]) as cache:
                told(model, prompt[:, :length], cache, new=1)
    ids, mask = padded(*prompts)
    with PoolCache(client, model, ids, mask, mode=mode) as cache:
        assert cache.hits == list(known)
        assert cache.hit == min(a + b for a, b in zip((0, 11, 1), known, strict=True))
        before = [_cached(client, cache, number, hit) for number, hit in enumerate(known)]
        out = told(model, ids, cache, mask)
        assert before == [_cached(client, cache, number, hit) for number, hit in enumerate(known)]
        assert torch.equal(out.sequences, told(model, ids, None, mask).sequences)
        assert not client.pool.plane("0.k")[0].any()  # read padding
        assert not client.pool.plane("1.v")[0].any()
    for row, prompt in zip(out.sequences, prompts, strict=True):
        alone = told(model, prompt).sequences[0, prompt.shape[1] :]
        assert torch.equal(row[41:], alone)


def _cached(client: Client, cache: PoolCache, number: int, hit: int) -> bytes:
    slots = indices.slot_indices(cache.sequences[number], 0, hit)
    return b"".join(client.pool.plane(name)[slots].tobytes() for name in client.pool.planes)


@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_ends_early(client: Client, model: Any, mode: str) -> None:
    """A row at its end token is fed padding while the others go on; they do not mind."""
    ids, mask = padded(tokens(20, 1), tokens(31, 4))
    stop = told(model, ids, None, mask).sequences[0, 31 + 4].item()
    want = told(model, ids, None, mask, eos_token_id=stop)
    with PoolCache(client, model, ids, mask, mode=mode) as cache:
        assert torch.equal(told(model, ids, cache, mask, eos_token_id=stop).sequences, want.sequences)


def test_a_prompt_twice_in_a_batch(client: Client, model: Any) -> None:
    """Rows with the same prompt are computed side by side, and one copy is published."""
    ids = tokens(64).repeat(3, 1)
    with PoolCache(client, model, ids, wait_for_commit=True) as cache:
        assert torch.equal(told(model, ids, cache).sequences, told(model, ids).sequences)
    with PoolCache(client, model, ids) as cache:
        assert cache.hits == [63] * 3


# -- beams, samples, roll-backs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{"num_beams": 4}, {"num_beams": 3, "num_return_sequences": 2}])
def test_beams(client: Client, model: Any, mode: str, options: dict[str, int]) -> None:
    """S13: beam search forks and drops sequences at every step, with batches and hits; the words are the same."""
    ids, mask = padded(tokens(33, 1), tokens(20, 2))
    want = told(model, ids, None, mask, **options)
    for hits in ([0, 0], [32, 19]):
        with PoolCache(client, model, ids, mask, mode=mode) as cache:
            assert cache.hits == hits
            assert torch.equal(told(model, ids, cache, mask, **options).sequences, want.sequences)
            assert len(cache.sequences) == 2 * options["num_beams"]


@pytest.mark.parametrize("mode", MODES)
def test_samples_of_one_prompt(client: Client, model: Any, mode: str) -> None:
    """num_return_sequences prefills once in the pool, and each sample goes on by itself."""
    ids = tokens(48)
    options = {"do_sample": True, "num_return_sequences": 5}
    torch.manual_seed(7)
    want = told(model, ids, **options)
    with PoolCache(client, model, ids, mode=mode) as cache:
        torch.manual_seed(7)
        got = told(model, ids, cache, **options)
        assert torch.equal(got.sequences, want.sequences)
        slots = [set(indices.slot_indices(each, 0, 48).tolist()) for each in cache.sequences]
        assert len(set().union(*slots)) < 48 + 5 * 17  # shared, but for what is copied of a last block
    client.settle()
    for row in want.sequences:
        assert client.probe(row.tolist()) >= len(row) - 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("helper", ["prompt lookup", "assistant"])
def test_speculation(client: Client, model: Any, mode: str, helper: str) -> None:
    """Assisted generation feeds guesses and crops those that were wrong, cold and on a hit."""
    ids = torch.cat([tokens(20), tokens(20), tokens(9, 2)], 1)
    other = tiny(5) if helper == "assistant" else None
    options: dict[str, Any] = {"assistant_model": other} if other else {"prompt_lookup_num_tokens": 3}
    want = told(model, ids)
    for hit in (0, 48):
        with PoolCache(client, model, ids, mode=mode) as cache:
            assert cache.hits == [hit]
            got = told(model, ids, cache, output_logits=False, **options)
            assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("mode", MODES)
def test_crop(client: Client, model: Any, mode: str) -> None:
    """Rolled back by any number, into what is published and what is a hit, and fed something else: as DynamicCache."""
    ids, tail = tokens(40), tokens(30, 9)
    with PoolCache(client, model, ids[:, :20]) as first:
        told(model, ids[:, :20], first, new=1)
    own = transformers.DynamicCache(config=model.config)
    with PoolCache(client, model, ids, mode=mode) as cache, torch.no_grad():
        model(input_ids=ids[:, :20], cache=own)
        model(input_ids=ids[:, 20:], cache=own)
        model(input_ids=ids, cache=cache)
        at = 0
        for back, forth in ((0, 5), (3, 2), (4, 1), (10, 7), (25, 3), (2, 1)):
            own.crop(-back)
            cache.crop(-back)
            assert cache.get_seq_length() == own.get_seq_length()
            piece = tail[:, at : at + forth]
            at += forth
            one, other = (model(input_ids=piece, cache=each).logits for each in (own, cache))
            assert torch.equal(one, other)
        with pytest.raises(BadRequest, match="negative"):
            cache.crop(1)
        with pytest.raises(BadRequest, match="keeps a token"):
            cache.crop(-cache.get_seq_length())
    client.settle()
    assert client.probe(ids[0].tolist()) == 39  # what was published stays, and is right
    assert torch.equal(told(model, ids).sequences, _warm(client, model, ids))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [0, 24])
def test_crop_of_rows_with_padding(mode: str, window: int) -> None:
    """Padding is no part of a window that was given back: rows of all lengths are rolled back, down to a token."""
    model = tiny(kind="mistral", window=window)
    ids, mask = padded(tokens(41, 1), tokens(12, 2), tokens(30, 3))
    more = tokens(3 * 9, 4).reshape(3, 9)
    with (
        pooled(model) as daemon,
        engine(daemon, model) as client,
        PoolCache(client, model, ids, mask, mode=mode) as cache,
    ):
        said = told(model, ids, cache, mask, new=20).sequences
        for columns in (58, 41, 35, 30):
            cache.crop(columns - cache.get_seq_length())
            assert cache.get_seq_length() == columns
            given = torch.cat([said[:, :columns], more], 1)
            shown = torch.ones_like(given)
            shown[:, :30] = mask[:, :30]
            want = told(model, given, None, shown, new=1).sequences
            assert torch.equal(told(model, given, cache, shown, new=1).sequences, want)
        with pytest.raises(BadRequest, match="keeps a token"):
            cache.crop(29 - cache.get_seq_length())


def _warm(client: Client, model: Any, ids: Any) -> Any:
    with PoolCache(client, model, ids) as cache:
        assert cache.hit
        return told(model, ids, cache).sequences


def test_rows_chosen_and_repeated(client: Client, model: Any) -> None:
    """batch_repeat_interleave and batch_select_indices do what they do to DynamicCache."""
    ids = torch.cat([tokens(30, 1), tokens(30, 2)])
    own = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for mode in MODES:
            with PoolCache(client, model, ids, mode=mode) as cache:
                for each in (own, cache):
                    model(input_ids=ids, cache=each)
                    each.batch_repeat_interleave(2)
                piece = tokens(4, 5).reshape(4, 1)
                one, other = (model(input_ids=piece, cache=each).logits for each in (own, cache))
                assert torch.allclose(one, other, atol=1e-4)
                for each in (own, cache):
                    each.batch_select_indices(torch.tensor([3, 0]))
                one, other = (model(input_ids=piece[:2], cache=each).logits for each in (own, cache))
                assert torch.allclose(one, other, atol=1e-4)
            own = transformers.DynamicCache(config=model.config)


# -- aborts -----------------------------------------------------------------------------------------------------------


class _Stop(BaseException):
    pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("error", [RuntimeError, _Stop])
@pytest.mark.parametrize(("layer", "after"), [(0, 0), (1, 0), (0, 1), (1, 3)])
def test_an_abort_at_any_step(
    client: Client, daemon: Running, model: Any, mode: str, error: type[BaseException], layer: int, after: int
) -> None:
    """An error inside a forward takes back that forward alone: the next goes on as if it had not been."""
    ids = tokens(37)
    calls = 0

    def fail(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == after + 1:
            raise error("stop")

    want = told(model, ids)
    with PoolCache(client, model, ids, mode=mode) as cache:
        hook = model.model.layers[layer].register_forward_hook(fail)
        try:
            with pytest.raises(error):
                told(model, ids, cache)
        finally:
            hook.remove()
        got = want.sequences[:, : max(37 + after, 37)]
        assert cache.get_seq_length() == (0 if after == 0 else 37 + after - 1)
        again = told(model, got, cache, new=NEW - after)
        assert torch.equal(again.sequences, want.sequences)
    assert client.statistics().steps_completed == client.statistics().steps_submitted
    with PoolCache(client, model, ids, mode=mode) as cache:
        hook = model.model.layers[layer].register_forward_hook(fail)
        calls = 0
        try:
            with pytest.raises(error):
                told(model, ids, cache)
        finally:
            hook.remove()
    client.settle()
    sound(daemon)
    assert torch.equal(_warm(client, model, ids), want.sequences)


@pytest.mark.parametrize("what", [KeyboardInterrupt, _Stop])
def test_an_interrupt_while_it_is_closed(
    client: Client,
    daemon: Running,
    model: Any,
    what: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The daemon is slow to answer, and somebody loses patience: no row keeps its slots."""
    ids, mask = padded(tokens(40, 1), tokens(30, 2))
    cache = PoolCache(client, model, ids, mask)
    told(model, ids, cache, mask, new=3)

    def interrupted(*_: object) -> None:
        raise what

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "receive", interrupted)
        with pytest.raises(what):
            cache.close()
    assert cache.closed
    assert not client.sequences
    cache.close()
    client.settle()
    sound(daemon)
    assert torch.equal(_warm(client, model, tokens(40, 1)), told(model, tokens(40, 1)).sequences)


def test_the_same_prompt_again_after_an_abort(client: Client, model: Any) -> None:
    """The first answer was broken off: what is cached is more than generate is given, and how to go on is told."""
    ids = tokens(37)
    with PoolCache(client, model, ids) as cache:
        told(model, ids, cache, new=5)
        with pytest.raises(BadRequest, match=r"41 columns are cached.*crop"):
            told(model, ids, cache)
        cache.crop(-5)
        assert torch.equal(told(model, ids, cache).sequences, told(model, ids).sequences)


def test_a_cache_that_was_forgotten(daemon: Running, model: Any) -> None:
    """One that nobody closed says so, and gives its slots back all the same."""
    with engine(daemon, model, tenant=str(next(TENANTS))) as client:
        caches = [PoolCache(client, model, tokens(20))]
        told(model, tokens(20), caches[0], new=2)
        with pytest.warns(ResourceWarning, match="was not closed"):
            _forget(caches)
        client.settle()
        sound(daemon)


def _forget(caches: list[PoolCache]) -> None:
    caches.clear()
    gc.collect()


def test_what_a_closed_cache_says(client: Client, model: Any) -> None:
    """It is over, and says so; closing it again is nothing."""
    cache = PoolCache(client, model, tokens(20))
    cache.close()
    cache.close()
    assert cache.closed
    assert repr(cache) == "<PoolCache, closed>"
    calls: list[Callable[[], None]] = [
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.batch_select_indices([0]),
        lambda: cache.batch_repeat_interleave(2),
    ]
    for call in calls:
        with pytest.raises(Ended):
            call()
    with pytest.raises(Ended):
        told(model, tokens(20), cache)


def test_caches_of_other_threads_on_the_same_model(daemon: Running, model: Any) -> None:
    """One that another thread opens or closes while a forward's hooks are being called is not that forward's."""
    ids = tokens(30)
    want = told(model, ids)

    def fail(*_: object) -> None:
        raise RuntimeError("of the forward")

    with (
        engine(daemon, model, tenant=str(next(TENANTS))) as client,
        engine(daemon, model, tenant=str(next(TENANTS))) as second,
        PoolCache(client, model, ids) as cache,
        torch.no_grad(),
    ):
        others: list[PoolCache] = []

        def come_and_go(*_: object) -> None:
            for other in others:
                other.close()
            others.append(PoolCache(second, model, tokens(9)))

        for register, options in (
            (model.register_forward_pre_hook, {}),
            (model.register_forward_hook, {"always_call": True}),
        ):
            hook = register(come_and_go, **options)
            others.append(PoolCache(second, model, tokens(9)))
            broken = model.model.layers[1].register_forward_hook(fail)
            with pytest.raises(RuntimeError, match="of the forward"):
                model(input_ids=ids, cache=cache)
            broken.remove()
            model(input_ids=ids, cache=cache)
            assert len(others) == 3
            while others:
                others.pop().close()
            hook.remove()
            cache.crop(-29)
            ids = ids[:, 1:]
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    ids = tokens(30)
    wrong: list[Any] = []

    def talk() -> None:
        try:
            with engine(daemon, model, tenant=str(next(TENANTS))) as mine:
                for _ in range(5):
                    with PoolCache(mine, model, ids) as cache:
                        wrong.append(not torch.equal(told(model, ids, cache).sequences, want.sequences))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is wrong
            wrong.append(error)

    threads = [threading.Thread(target=talk) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == [False] * 20


# -- publishing -------------------------------------------------------------------------------------------------------


def test_the_prompt_is_there_before_the_answer(client: Client, daemon: Running, model: Any) -> None:
    """Right after the prefill others hit the prompt, after each of its chunks if it is fed in those."""
    ids = tokens(80)
    seen: list[int] = []
    namespace = client.root
    with Client(str(daemon.socket), namespace=namespace, map=False) as other:

        def look(*_: object) -> None:
            # What is posted on one connection and asked on another may be served in either order.
            until = time.monotonic() + 1
            while (found := other.probe([*ids[0].tolist(), 1])) < expected[len(seen)]:
                if time.monotonic() > until:
                    break
                time.sleep(0.005)
            seen.append(found)

        expected = [32, 64, 80, 80, 80]
        with PoolCache(client, model, ids) as cache:
            hook = model.register_forward_hook(look)
            told(model, ids, cache, new=3, prefill_chunk_size=32)
            hook.remove()
        assert seen == expected


def test_publish_false_keeps_it_to_itself(client: Client, model: Any) -> None:
    """Nothing of it is ever found."""
    ids = tokens(40)
    with PoolCache(client, model, ids, publish=False) as cache:
        told(model, ids, cache)
    client.settle()
    assert client.probe(ids[0].tolist()) == 0


def test_a_dialogue(client: Client, model: Any) -> None:
    """Each turn computes what the last one did not know: its own words and the end of the answer."""
    history = tokens(50)
    for turn in range(5):
        with PoolCache(client, model, history) as cache:
            assert cache.hits == [history.shape[1] - 11 if turn else 0]
            answer = told(model, history, cache, new=15).sequences
        assert torch.equal(answer, told(model, history, new=15).sequences)
        history = torch.cat([answer, tokens(10, 100 + turn)], 1)


def test_one_cache_for_a_whole_dialogue(client: Client, model: Any) -> None:
    """generate may be called again with the same cache, and the longer history: it goes on where it was."""
    history = tokens(50)
    with PoolCache(client, model, history) as cache:
        for turn in range(4):
            answer = told(model, history, cache, new=15).sequences
            assert torch.equal(answer, told(model, history, new=15).sequences)
            history = torch.cat([answer, tokens(10, 100 + turn)], 1)
        assert cache.computed == history.shape[1] - 10 - 1
    with PoolCache(client, model, history) as cache:
        assert cache.hits == [history.shape[1] - 11]


@pytest.mark.parametrize("page", [4, 16])
def test_a_client_of_whole_pages(daemon: Running, model: Any, page: int) -> None:
    """A session that other kernels share has pages, and so copies: nothing changes."""
    with engine(daemon, model, tenant=str(next(TENANTS)), page=page) as client:
        stem, hits = tokens(40), []
        for end in range(4):
            ids = torch.cat([stem, tokens(5 + 7 * end, 50 + end)], 1)
            want = told(model, ids, num_beams=2).sequences
            for mode in MODES:
                with PoolCache(client, model, ids, mode=mode) as cache:
                    hits += cache.hits
                    assert torch.equal(told(model, ids, cache, num_beams=2).sequences, want)
        assert min(hits[1:]) >= 40 - page


def test_no_round_trip_while_decoding(client: Client, model: Any) -> None:
    """Growth, steps and fences go out with frames that nobody waits for."""
    ids, mask = padded(*(tokens(30, seed) for seed in range(8)))
    with PoolCache(client, model, ids, mask) as cache:
        told(model, ids, cache, mask, new=1)
        before = client.statistics()
        with torch.no_grad():
            for step in range(100):
                model(input_ids=tokens(8, step).reshape(8, 1), cache=cache)
                client.settle()  # a real model's step lasts longer than the daemon's answer takes
        done = client.statistics()
        assert done.calls == before.calls
        assert done.waits == before.waits


# -- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("windowed", [True, False])
def test_every_layer_has_a_window(mode: str, windowed: bool) -> None:
    """Logits as DynamicCache's to the last bit; a windowed pool gets the front back as the answer grows."""
    model = tiny(kind="mistral", window=24)
    with pooled(model, windowed=windowed) as daemon, engine(daemon, model) as client:
        ids = tokens(40)
        with PoolCache(client, model, ids, mode=mode) as cache:
            got = told(model, ids, cache, new=400)
            want = told(model, ids, new=400)
            assert torch.equal(got.sequences, want.sequences)
            assert all(map(torch.equal, got.logits, want.logits))
            client.settle()
            held = counts(daemon)["private"] + counts(daemon)["leased"]
            assert held < 40 + 24 + 200 if windowed else held >= 400
        with PoolCache(client, model, ids, mode=mode) as cache:
            assert cache.hits == [39]
            assert torch.equal(told(model, ids, cache, new=60).sequences, want.sequences[:, :100])


@pytest.mark.parametrize("mode", MODES)
def test_speculation_in_a_window(mode: str) -> None:
    """Roll-backs a few tokens behind the window's edge."""
    model, other = tiny(kind="mistral", window=24), tiny(3, kind="mistral", window=24)
    with pooled(model) as daemon, engine(daemon, model) as client:
        ids = tokens(40)
        with PoolCache(client, model, ids, mode=mode) as cache:
            got = told(model, ids, cache, new=300, assistant_model=other, output_logits=False)
            assert torch.equal(got.sequences, told(model, ids, new=300).sequences)


@pytest.mark.parametrize("mode", MODES)
def test_windows_in_some_layers(mode: str) -> None:
    """A mixed model keeps all tokens, and each layer reads what its own cache would have."""
    model = tiny(kind="gemma", window=16)
    assert shape_of(model).mixed
    with pooled(model) as daemon, engine(daemon, model) as client:
        ids = tokens(60)
        with PoolCache(client, model, ids, mode=mode) as cache:
            assert "all tokens are kept" in repr(cache)
            assert same(told(model, ids, cache, new=100), told(model, ids, new=100))
            client.settle()
            assert counts(daemon)["private"] + counts(daemon)["leased"] >= 159
        with PoolCache(client, model, ids, mode=mode) as cache:
            assert cache.hits == [59]
            got = told(model, ids, cache, new=100)
            assert torch.allclose(
                torch.stack(got.logits), torch.stack(told(model, ids, new=100).logits), atol=1e-3
            )


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_pool_of_another_model(model: Any) -> None:
    """Another dtype, width or number of layers is refused before anything is taken, with the TOML that would do."""
    others = [
        tiny(dtype="bfloat16"),
        tiny(head_dim=32),
        tiny(num_hidden_layers=3),
        tiny(num_key_value_heads=4),
    ]
    with pooled(model) as daemon:
        for other in others:
            with engine(daemon, other) as client, pytest.raises(LayoutMismatch) as error:
                PoolCache(client, other, tokens(20))
            assert shape_of(other).toml() in str(error.value)
            assert counts(daemon)["sequences"] == 0
        with (
            engine(daemon, model) as client,
            PoolCache(client, model, tokens(9)) as cache,
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(
                (LayoutMismatch, RuntimeError)
            ),  # the weights are float32, and what is computed is not
        ):
            told(model, tokens(9), cache)


def test_bfloat16() -> None:
    """K and V of another width than numpy knows."""
    model = tiny(dtype="bfloat16")
    with pooled(model) as daemon, engine(daemon, model) as client:
        ids = tokens(50)
        for hit in (0, 49):
            for mode in MODES:
                with PoolCache(client, model, ids, mode=mode, publish=bool(hit) or mode == MODES[1]) as cache:
                    assert cache.hits == [hit]
                    got = told(model, ids, cache)
                    assert same(got, told(model, ids)) if not hit else got.sequences.shape[1] == 50 + NEW


def test_a_namespace_without_a_model(daemon: Running, model: Any) -> None:
    """A client that does not say whose K and V it holds is refused: every model's would be the same."""
    with Client(str(daemon.socket)) as client:
        with pytest.raises(BadRequest, match=r"fingerprint\.namespace"):
            PoolCache(client, model, tokens(20))
        named = fingerprint.namespace(model, tenant="named")
        with PoolCache(client, model, tokens(20), namespace=named) as cache:
            told(model, tokens(20), cache, new=1)


def test_a_namespace_of_another_model(client: Client, model: Any) -> None:
    """A client that was opened for one model is refused for another that is known to be another."""
    other = tiny(1)
    fingerprint.namespace(other)
    with pytest.raises(BadRequest, match="another model's"):
        PoolCache(client, other, tokens(20))


def test_a_forward_that_skips_layers(client: Client, model: Any) -> None:
    """Early exits leave tokens without K and V in some layers: refused, and taken back."""
    ids = tokens(20)
    with PoolCache(client, model, ids) as cache:
        model.config.num_hidden_layers = 1
        try:
            with pytest.raises(Unsupported, match="1 of 2 layers"), torch.no_grad():
                model(input_ids=ids, cache=cache)
        finally:
            model.config.num_hidden_layers = 2
        assert torch.equal(told(model, ids, cache).sequences, told(model, ids).sequences)


def test_what_tokens_do_not_say(client: Client, model: Any) -> None:
    """K and V that depend on more than the tokens before would be wrong for others, and never come into the pool."""
    ids = tokens(20)
    ones = torch.ones_like(ids)
    holes = ones.clone()
    holes[0, 3] = 0
    embedded = model.get_input_embeddings()(ids)
    shifted = torch.arange(5, 25)[None]
    with torch.no_grad(), PoolCache(client, model, ids) as cache:
        with pytest.raises(Unsupported, match="input_ids"):
            model(inputs_embeds=embedded, cache=cache)
        with pytest.raises(Unsupported, match="position_ids"):
            model(input_ids=ids, position_ids=shifted, cache=cache)
        with pytest.raises(Unsupported, match="masks more"):
            model(input_ids=ids, attention_mask=holes, cache=cache)
        with pytest.raises(Unsupported, match="attention_mask"):
            model(input_ids=ids, attention_mask=torch.zeros(1, 1, 20, 20), cache=cache)
        with pytest.raises(BadRequest, match="not the tokens"):
            model(input_ids=tokens(20, 2), cache=cache)
        with pytest.raises(BadRequest, match="not the tokens"):
            told(model, torch.cat([ids, tokens(20, 2)]), cache)
        with pytest.raises(Unsupported, match="pixel_values"):
            model(input_ids=ids, cache=cache, pixel_values=torch.zeros(1))
        with pytest.raises(OutOfTurn):
            model.model(input_ids=ids, cache=cache)
        assert torch.equal(
            told(model, ids, cache).sequences, told(model, ids).sequences
        )  # none of it mattered
    with pytest.raises(BadRequest, match="padding must be in front"):
        PoolCache(client, model, ids, holes)
    with pytest.raises(BadRequest, match="every prompt have a token"):
        PoolCache(client, model, ids, torch.zeros_like(ids))
    with pytest.raises(BadRequest, match="mode"):
        PoolCache(client, model, ids, mode="both")


def test_rope_that_changes_with_length(daemon: Running) -> None:
    """Dynamic rope gives earlier tokens another K once the sequence is long: refused from there on."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny(max_position_embeddings=32, rope_parameters=rope)
    with engine(daemon, model) as client, PoolCache(client, model, tokens(30)) as cache:
        with pytest.raises(Unsupported, match="rope"):
            told(model, tokens(30), cache)
        assert cache.get_seq_length() == 31


# -- memory runs short ------------------------------------------------------------------------------------------------


def test_memory_runs_short(model: Any) -> None:
    """A prompt that can never fit, one that does not fit now, an answer that cannot grow: clear errors, no leak."""
    with (
        pooled(model, blocks=17, watermark=0.0, headroom=0.0) as daemon,
        engine(daemon, model) as client,
    ):  # 256 slots
        with pytest.raises(NeverFits):
            PoolCache(client, model, tokens(300))
        with PoolCache(client, model, tokens(200)) as cache:
            with pytest.raises(AdmissionTimeout):
                PoolCache(client, model, tokens(100, 2), timeout=0.05)
            with pytest.raises(OutOfRoom):
                told(model, tokens(200), cache, new=100)
            length = cache.get_seq_length()
            assert 240 <= length <= 256
        client.settle()
        sound(daemon)
        assert client.probe(tokens(200)[0].tolist()) == 199
        batch = torch.cat([tokens(100, seed) for seed in range(3)])
        with pytest.raises(AdmissionTimeout):
            PoolCache(client, model, batch, timeout=0.05)
        client.settle()
        sound(daemon)


def test_a_victim_says_so(model: Any) -> None:
    """Of two generations that cannot both go on, one is told to give way, and the other ends."""
    settings: dict[str, Any] = {"preempt_deadline_ms": 200, "reclaim_patience_ms": 5, "fence_patience_ms": 5}
    with (
        pooled(model, blocks=17, watermark=0.0, headroom=0.0, **settings) as daemon,
        engine(daemon, model) as client,
    ):
        first, second = tokens(100, 1), tokens(100, 2)
        with torch.no_grad(), PoolCache(client, model, first, timeout=10) as old:
            model(input_ids=first, cache=old)
            young = PoolCache(client, model, second, timeout=0.5)
            try:
                model(input_ids=second, cache=young)
                with pytest.raises((Preempted, OutOfRoom)):
                    _in_turns(model, 100, old, young)
            finally:
                young.close()
            _in_turns(model, 100, old)
        client.settle()


def _in_turns(model: Any, steps: int, *caches: PoolCache) -> None:
    for step in range(steps):
        for cache in caches:
            model(input_ids=tokens(1, step), cache=cache)


def test_a_long_prompt_is_several_steps(client: Client, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that takes long ends a step between layers, so that its session does not count as stalled."""
    monkeypatch.setattr("kvslot.engines.hf.cache.STEP_SECONDS", 0.0)
    ids = tokens(40)
    with PoolCache(client, model, ids) as cache:
        before = client.statistics().steps_completed
        assert same(told(model, ids, cache, new=3), told(model, ids, new=3))
        assert client.statistics().steps_completed == before + 3 + 2  # the prompt's, in two layers twice more
