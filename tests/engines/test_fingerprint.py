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


# -- equal digests over other K and V ---------------------------------------------------------------------------------


def test_a_cast_is_not_a_load(tmp_path: Path) -> None:
    """A model cast in memory has rounded rope frequencies: its K differ from those of one loaded in that dtype."""
    tiny().save_pretrained(tmp_path)
    cls = type(tiny())
    loaded = cls.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cast = cls.from_pretrained(tmp_path, dtype=torch.float32).to(torch.bfloat16)
    assert loaded.model.rotary_emb.inv_freq.dtype != cast.model.rotary_emb.inv_freq.dtype
    assert fingerprint.of_model(loaded) != fingerprint.of_model(cast)
    assert fingerprint.of_model(loaded, revision="r") != fingerprint.of_model(cast, revision="r")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_changes_as_it_goes(kind: str) -> None:
    """Frequencies that follow the length are not part of it; what they begin with is."""
    rope: dict[str, Any] = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0}
    if kind == "longrope":
        rope |= {"original_max_position_embeddings": 32, "long_factor": [2.0] * 8, "short_factor": [1.0] * 8}
    model = tiny(max_position_embeddings=32 if kind == "dynamic" else 64, rope_parameters=rope)
    before, frequencies = fingerprint.of_model(model), model.model.rotary_emb.inv_freq.clone()
    with torch.no_grad():
        model(input_ids=torch.ones(1, 50, dtype=torch.long))
    assert not torch.equal(frequencies, model.model.rotary_emb.inv_freq)
    assert fingerprint.of_model(model) == before
    assert fingerprint.of_model(model.to(torch.bfloat16).to(torch.float32)) != before


def _changed(seed: int) -> Any:
    model = tiny()
    torch.manual_seed(seed)
    with torch.no_grad():
        weight = model.model.layers[1].self_attn.k_proj.weight
        weight.add_(torch.randn_like(weight))
    torch.manual_seed(0)
    return model


@pytest.mark.parametrize("name", ["1", "weight", "model", "layers"])
def test_adapters_called_as_parts_of_the_model(name: str) -> None:
    """An adapter's name leaves out nothing but the adapter, whatever else has that name."""
    peft: Any = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    if name != "1":
        made = [peft.get_peft_model(_changed(seed), config, adapter_name="x") for seed in (1, 1, 2)]
        for each in made:
            each.add_adapter(name, config)
    else:
        made = [peft.get_peft_model(_changed(seed), config, adapter_name=name) for seed in (1, 1, 2)]
    digests = [fingerprint.of_model(each) for each in made]
    assert digests[0] == digests[1] == fingerprint.of_model(_changed(1))
    assert digests[0] != digests[2]


def test_modules_saved_with_an_adapter() -> None:
    """Whole modules that an adapter replaces are its own; the model below is the same with them and without."""
    peft: Any = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["up_proj"], r=2)
    model = peft.get_peft_model(tiny(), config)
    plain = fingerprint.namespace(model)
    assert plain.model == fingerprint.of_model(tiny())
    with torch.no_grad():
        model.base_model.model.model.layers[0].mlp.up_proj.modules_to_save["default"].weight.add_(1)
    assert fingerprint.namespace(model).model == plain.model
    assert fingerprint.namespace(model).adapter != plain.adapter


def test_a_models_own_code(tmp_path: Path) -> None:
    """Code beside the weights is part of a folder that names it, and a module's class is part of a model in memory."""
    for name in ("a", "b", "c"):
        tiny().save_pretrained(tmp_path / name)
        (tmp_path / name / "modeling_x.py").write_text("rope = 1" if name != "b" else "rope = 2")
    assert fingerprint.of_model(tmp_path / "a") == fingerprint.of_model(tmp_path / "b")
    for name in ("a", "b", "c"):
        path = tmp_path / name / "config.json"
        config = {**json.loads(path.read_text()), "auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}
        path.write_text(json.dumps(config))
    assert fingerprint.of_model(tmp_path / "a") != fingerprint.of_model(tmp_path / "b")
    assert fingerprint.of_model(tmp_path / "a") == fingerprint.of_model(tmp_path / "c")
    model, other = tiny(), tiny()

    class Half(type(model.model.layers[0].self_attn)):  # type: ignore[misc]
        pass

    other.model.layers[1].self_attn.__class__ = Half
    assert fingerprint.of_model(model) != fingerprint.of_model(other)


def test_what_fits_a_model() -> None:
    """A namespace is for one object with the adapters in force; unknown models are looked at, names are vouched for."""
    peft: Any = pytest.importorskip("peft", reason="peft is not installed")
    one, other = tiny(), tiny(1)
    name = fingerprint.namespace(one)
    assert not fingerprint.misfit(one, name)
    assert not fingerprint.misfit(tiny(), name)
    assert "another model's" in fingerprint.misfit(other, name)
    mine = Namespace("", "my model")
    assert fingerprint.misfit(one, mine)
    assert fingerprint.vouch(one, mine) is mine
    assert not fingerprint.misfit(one, mine)
    revised = fingerprint.namespace(other, revision="r", salt="s")
    assert not fingerprint.misfit(other, revised)
    config = peft.LoraConfig(target_modules=["k_proj"], r=4, init_lora_weights=False)
    model = peft.get_peft_model(one, config, adapter_name="x")
    model.add_adapter("y", config)
    assert "adapters in force" in fingerprint.misfit(model, name)
    x = fingerprint.namespace(model)
    model.set_adapter("y")
    assert "adapters in force" in fingerprint.misfit(model, x)
    y = fingerprint.namespace(model)
    assert y.model == x.model
    for use, fits, not_ in (("x", x, y), ("y", y, x)):
        model.set_adapter(use)
        assert not fingerprint.misfit(model, fits)
        assert fingerprint.misfit(model, not_)
    with model.disable_adapter():
        assert not fingerprint.misfit(model, name)
        assert fingerprint.misfit(model, y)
    assert not fingerprint.misfit(model, y)
    next(iter(fingerprint.tuned(model))).scale_layer(2.0)
    assert fingerprint.misfit(model, y)
    model.merge_adapter()
    assert "another model's" in fingerprint.misfit(model, y)
