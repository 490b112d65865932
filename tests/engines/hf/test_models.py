"""SmolLM2-135M in float32, a real model with real text: bytes, logits and words; several engines; a pool too small."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WITHOUT = "torch and transformers are not installed: pip install 'kvslot[hf]'"
torch: Any = pytest.importorskip("torch", reason=WITHOUT)
transformers: Any = pytest.importorskip("transformers", reason=WITHOUT)

from kvslot.api.client import indices  # noqa: E402
from kvslot.engines.hf import PoolCache  # noqa: E402
from kvslot.engines.hf.cache import MODES  # noqa: E402

from ...tools.daemon import Running  # noqa: E402
from ..tools import Worker, engine, pooled, smollm2  # noqa: E402
from .dialogues import dialogues  # noqa: E402
from .killing import kills  # noqa: E402

TEXT = Path(__file__).parents[1] / "text"


@pytest.fixture(scope="module")
def model_and_tokenizer() -> tuple[Any, Any]:
    return smollm2()


@pytest.fixture(scope="module")
def daemon(model_and_tokenizer: Any) -> Iterator[Running]:
    with pooled(model_and_tokenizer[0], blocks=257) as one:
        yield one


@pytest.fixture(scope="module")
def prompt(model_and_tokenizer: Any) -> Any:
    """A question under the first tools of an airline's agent."""
    tools = json.loads((TEXT / "tau_airline_tools.json").read_text())[:1]
    talk = [
        {"role": "system", "content": f"You are an airline's agent. Your tools: {json.dumps(tools)}"},
        {"role": "user", "content": "What is the capital of France? Answer in one sentence."},
    ]
    given = model_and_tokenizer[1].apply_chat_template(
        talk, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return given["input_ids"]


@pytest.mark.slow
def test_logits_bytes_and_words(daemon: Running, model_and_tokenizer: Any, prompt: Any) -> None:
    """Cold and on a prefix of the same pieces, in both modes: DynamicCache's logits and K and V, to the last bit."""
    model, tokenizer = model_and_tokenizer
    half = prompt.shape[1] // 2
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    own = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=prompt[:, :half], cache=own, logits_to_keep=1)
    want = model.generate(prompt, cache=own, **options)
    assert "Paris" in tokenizer.decode(want.sequences[0, prompt.shape[1] :])
    with engine(daemon, model, tenant="bits") as client:
        with torch.no_grad(), PoolCache(client, model, prompt[:, :half]) as cache:
            model(input_ids=prompt[:, :half], cache=cache, logits_to_keep=1)
        for mode in MODES:
            with PoolCache(client, model, prompt, mode=mode, publish=False) as cache:
                assert cache.hits == [half]
                got = model.generate(prompt, cache=cache, **options)
                assert torch.equal(got.sequences, want.sequences)
                assert all(map(torch.equal, got.logits, want.logits))
                slots = torch.from_numpy(indices.slot_indices(cache.sequences[0])).long()
                for number, layer in enumerate(own.layers):
                    for part, states in (("k", layer.keys), ("v", layer.values)):
                        assert torch.equal(
                            client.pool.tensor(f"{number}.{part}")[slots].transpose(0, 1), states[0]
                        )
        # Computed as one piece the last bits are others, and the words are not.
        whole = model.generate(prompt, **options)
        assert torch.equal(whole.sequences, want.sequences)
        assert torch.allclose(torch.stack(whole.logits), torch.stack(want.logits), atol=1e-3)


@pytest.mark.slow
def test_another_process_reads_what_one_wrote(daemon: Running, model_and_tokenizer: Any, prompt: Any) -> None:
    """The second computes one token of the prompt, and says the same words as without kvslot."""
    model, _ = model_and_tokenizer
    ids = prompt.tolist()
    want = model.generate(prompt, max_new_tokens=12, do_sample=False)[:, prompt.shape[1] :].tolist()
    with (
        Worker(daemon.socket, {"name": "smollm2"}, tenant="two") as first,
        Worker(daemon.socket, {"name": "smollm2"}, tenant="two") as second,
    ):
        one = first.do("generate", ids=ids, new=12)
        assert one == {**one, "hits": [0], "tokens": want}
        written = first.do("bytes_of", ids=ids[0])
        first.kill()
        assert second.do("bytes_of", ids=ids[0]) == written
        two = second.do("generate", ids=ids, new=12)
        assert two == {**two, "hits": [len(ids[0]) - 1], "tokens": want}
        assert two["first"] < one["first"]


@pytest.mark.slow
@pytest.mark.parametrize("append", ["chain", "peel"])
def test_dialogues_on_a_pool_that_is_too_small(append: str) -> None:
    """Five dialogues of a small model, many turns each, with eviction: every answer as without kvslot."""
    done = dialogues(5, append=append, seed=3, share=0.1)
    assert done.wrong == []
    assert done.turns >= 10
    assert done.hits > 1000


@pytest.mark.slow
def test_dialogues_with_a_real_model(model_and_tokenizer: Any) -> None:
    """Two dialogues with SmolLM2."""
    done = dialogues(2, model="smollm2", seed=5, new=8, preamble=200, limit=60)
    assert done.wrong == []
    assert done.hits > 100


@pytest.mark.slow
def test_engines_die_while_others_generate() -> None:
    """Ten engines killed at random moments: the one that lives says what it says alone, and no slot is lost."""
    report = kills(10, seed=4)
    assert report.killed == 10
    assert report.wrong == []
    assert report.hits > 0
