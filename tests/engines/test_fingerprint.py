"""What shares a tree and what never does: same content under any name, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvslot.api.client import Namespace
from kvslot.engines import fingerprint

torch: Any = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvslot[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvslot[hf]'")

from .tools import tiny  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default:::transformers")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


def test_the_same_model_is_the_same_everywhere(model: Any) -> None:
    """Made again, moved through a file, called something else, used in another way: one namespace."""
    again = tiny()
    again.config._name_or_path = "somewhere/else"
    again.config.use_cache = False
    again.set_attn_implementation("eager")
    assert fingerprint.namespace(again) == fingerprint.namespace(model)
    assert fingerprint.namespace(model) == Namespace("", fingerprint.of_model(model), "", "")
    assert len(fingerprint.of_model(model)) == 32


def test_from_a_folder(model: Any, tmp_path: Path) -> None:
    """A folder's digest follows its files, wherever they lie; loading it again gives the digest of the model."""
    folder, copy = tmp_path / "a", tmp_path / "b"
    model.save_pretrained(folder)
    shutil.copytree(folder, copy)
    assert fingerprint.of_model(folder) == fingerprint.of_model(str(copy))
    loaded = type(model).from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    assert fingerprint.of_model(loaded) == fingerprint.of_model(model)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "9.9"}))
    assert fingerprint.of_model(folder) == fingerprint.of_model(copy)
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert fingerprint.of_model(folder) != fingerprint.of_model(copy)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        fingerprint.of_model(folder)
    assert fingerprint.of_model(folder, revision="abc")


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"vocab_size": 257},
        {"num_key_value_heads": 1},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rms_norm_eps": 1e-5},
        {"kind": "mistral"},
        {"kind": "mistral", "window": 32},
    ],
    ids=str,
)
def test_what_makes_another_model(model: Any, changes: dict[str, Any]) -> None:
    """Weights, dtype, vocabulary, heads, rope, norms, architecture, window."""
    assert fingerprint.of_model(tiny(**changes)) != fingerprint.of_model(model)


def test_one_weight_is_enough() -> None:
    """A single value in the last layer's last matrix."""
    one = tiny()
    before = fingerprint.of_model(one)
    with torch.no_grad():
        one.model.layers[1].self_attn.k_proj.weight[-1, -1] += 1e-3
    assert fingerprint.of_model(one) != before


def test_tied_weights_are_not_taken_for_others() -> None:
    """Tied and untied models differ, though their tensors are equal; each is the same as itself."""
    tied, untied = tiny(tie_word_embeddings=True), tiny(tie_word_embeddings=False)
    with torch.no_grad():
        untied.lm_head.weight.copy_(untied.model.embed_tokens.weight)
    assert fingerprint.of_model(tied) == fingerprint.of_model(tiny(tie_word_embeddings=True))
    assert fingerprint.of_model(tied) != fingerprint.of_model(untied)


def test_what_the_user_says(model: Any) -> None:
    """Tenant and salt as given; a revision stands for the weights alone; what else must be equal is mixed in."""
    plain = fingerprint.namespace(model)
    named = fingerprint.namespace(model, tenant="t", salt="s")
    assert named == Namespace("t", plain.model, "", "s")
    revisions = {fingerprint.of_model(each, revision="r1") for each in (model, tiny(1))}
    assert len(revisions) == 1
    assert revisions != {fingerprint.of_model(model, revision="r2")}
    assert revisions != {fingerprint.of_model(tiny(1, vocab_size=300), revision="r1")}
    extras = [None, {"block": 16}, {"block": 32}, {"block": 32, "isa": "avx2"}]
    assert len({fingerprint.of_model(model, extra=each) for each in extras}) == 4


def test_adapters_by_content() -> None:
    """Two adapters of one name differ by their weights; of two names with the same weights they are one."""
    a = {"layer.lora_A": torch.ones(2, 3), "layer.lora_B": torch.zeros(3, 2)}
    b = {**a, "layer.lora_B": torch.ones(3, 2)}
    assert fingerprint.of_adapter(a) == fingerprint.of_adapter(dict(reversed(a.items())))
    assert fingerprint.of_adapter(a) != fingerprint.of_adapter(b)
    assert fingerprint.of_adapter(b"one") != fingerprint.of_adapter(b"two")


def test_peft_adapters(tmp_path: Path) -> None:
    """Those in force, with their strength; the model below is the same with them and without."""
    peft: Any = pytest.importorskip("peft", reason="peft is not installed")
    base = fingerprint.namespace(tiny())

    def lora(seed: int, name: str = "default", **options: Any) -> Any:
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False, **options)
        model = tiny()
        torch.manual_seed(seed)
        return peft.get_peft_model(model, config, adapter_name=name)

    one = lora(1)
    found = fingerprint.namespace(one)
    assert found.model == base.model
    assert found.adapter
    assert fingerprint.namespace(lora(1, "other name")).adapter == found.adapter
    assert fingerprint.namespace(lora(2)).adapter != found.adapter  # the same name, other weights
    assert fingerprint.namespace(lora(1, lora_alpha=99)).adapter != found.adapter
    with one.disable_adapter():
        assert fingerprint.namespace(one) == base
    one.add_adapter("second", peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    assert fingerprint.namespace(one) == found  # loaded, and not in force
    one.set_adapter("second")
    assert fingerprint.namespace(one).adapter not in ("", found.adapter)
    one.set_adapter("default")
    assert fingerprint.namespace(one) == found
    one.merge_adapter()
    assert fingerprint.namespace(one).model != base.model
    one.save_pretrained(tmp_path)
    assert len(fingerprint.of_adapter(tmp_path)) == 32
