"""Namespaces of requests: what they tell apart, what they do not, and when there is none."""

from __future__ import annotations

import json
import math
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvslot.api.client import Namespace
from kvslot.engines.vllm.configuration import Unknown, block_bytes, configuration, main
from kvslot.engines.vllm.keys import CLOCKS_SECONDS, Keys, Settings, facts, links, process_start, unsupported

from .engine import TINY, TINY_BLOCK_BYTES, tiny_model

LATER = time.time() + 3600  # as if this process had begun long after all files were written


def request(**changes: Any) -> SimpleNamespace:
    """As much of vLLM's request as is looked at."""
    fields = {
        "mm_features": [], "prompt_embeds": None, "prompt_token_ids": [1], "resumable": False, "pooling_params": None,
        "lora_request": None, "cache_salt": None,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def lora(number: int, path: Path, **changes: Any) -> SimpleNamespace:
    return request(lora_request=SimpleNamespace(lora_int_id=number, lora_path=str(path), **changes))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tiny_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def adapter(folder: Path, weights: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def of(keys: Keys, request: object) -> Namespace:
    space = keys(request)
    assert isinstance(space, Namespace), space
    return space


def test_equal_only_where_all_is_equal(model: Path, tmp_path: Path) -> None:
    """Weights, configuration and every fact tell models apart; the folder's name does not."""
    base = of(Keys(Settings(), str(model), {"dtype": "float32", "block_size": 32}, since=LATER), request())
    copy = tmp_path / "copy"
    copy.mkdir()
    for each in model.iterdir():
        (copy / each.name).write_bytes(each.read_bytes())
    facts = {"dtype": "float32", "block_size": 32}
    assert of(Keys(Settings(), str(copy), facts, since=LATER), request()) == base
    assert of(Keys(Settings(tenant="t"), str(copy), facts, since=LATER), request()) != base
    for other in ({**facts, "dtype": "bfloat16"}, {**facts, "block_size": 64}, {**facts, "isa": ["AVX512"]}):
        assert of(Keys(Settings(), str(copy), other, since=LATER), request()).model != base.model
    (copy / "model.safetensors").write_bytes(b"Weights")
    assert of(Keys(Settings(), str(copy), facts, since=LATER), request()).model != base.model
    tiny_model(copy, vocab_size=511)
    (copy / "model.safetensors").write_bytes(b"weights")
    assert of(Keys(Settings(), str(copy), facts, since=LATER), request()).model != base.model


def test_salts_are_apart_and_unreadable(model: Path) -> None:
    """S44: a salt is a part of its own, of any length, and the daemon does not see it."""
    keys = Keys(Settings(), str(model), {}, since=LATER)
    spaces = [of(keys, request(cache_salt=salt)) for salt in (None, "a", "b", "a" * 10_000, "\udc80")]
    assert len(set(spaces)) == 5
    assert "a" * 100 not in spaces[3].salt
    assert of(keys, request(cache_salt="")) == spaces[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"mm_features": ["an image"]},
        {"prompt_embeds": [[0.1]]},
        {"prompt_token_ids": None},
        {"resumable": True},
        {"pooling_params": "mean"},
    ],
)
def test_requests_that_token_ids_do_not_describe_go_without(model: Path, changes: dict[str, Any]) -> None:
    """Images, embeddings, streamed input, pooling: a reason instead of a namespace."""
    assert isinstance(Keys(Settings(), str(model), {}, since=LATER)(request(**changes)), str)


def test_adapters_are_what_is_in_them(model: Path, tmp_path: Path) -> None:
    """Name, number and path say nothing: the same weights share, other weights under the same name do not."""
    one, two = adapter(tmp_path / "one", b"1"), adapter(tmp_path / "two", b"2")
    keys = Keys(Settings(), str(model), {}, since=LATER)
    base, first, second = of(keys, request()), of(keys, lora(1, one)), of(keys, lora(2, two))
    assert len({base, first, second}) == 3
    other = Keys(Settings(), str(model), {}, since=LATER)
    assert of(other, lora(7, adapter(tmp_path / "copy", b"1"))) == first
    assert of(Keys(Settings(), str(model), {}, since=LATER), lora(1, two)) == second


def test_an_adapter_that_changes_is_not_trusted_again(model: Path, tmp_path: Path) -> None:
    """Files rewritten in place, or another folder under the same number: nobody knows which weights are in use."""
    folder = tmp_path / "one"
    for change in (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"2"),
        lambda folder: os.utime(folder / "adapter_model.safetensors"),
        lambda folder: (folder / "more.bin").write_bytes(b""),
    ):
        adapter(folder, b"1")
        keys = Keys(Settings(), str(model), {}, since=LATER)
        of(keys, lora(1, folder))
        change(folder)
        assert isinstance(keys(lora(1, folder)), str)
        adapter(folder, b"1")
        (folder / "more.bin").unlink(missing_ok=True)
        assert isinstance(keys(lora(1, folder)), str), "not even when all is as before"
    keys = Keys(Settings(), str(model), {}, since=LATER)
    of(keys, lora(1, folder))
    assert isinstance(keys(lora(1, adapter(tmp_path / "two", b"1"))), str)
    assert isinstance(Keys(Settings(), str(model), {}, since=LATER)(lora(1, folder, load_inplace=True)), str)
    assert isinstance(keys(lora(9, tmp_path / "missing")), str)


def test_files_younger_than_the_process_are_not_trusted(model: Path, tmp_path: Path) -> None:
    """What was loaded may not be what is read now, unless somebody vouches for it."""
    assert "was written after this process began" in Keys(Settings(), str(model), {}).reason
    assert Keys(Settings(model_revision="v1"), str(model), {}).reason == ""
    assert Keys(Settings(), str(model), {}, dummy=True).reason == ""
    one = adapter(tmp_path / "one", b"1")
    vouched = Settings(model_revision="v1", trust_new_adapters=True)
    assert isinstance(Keys(Settings(model_revision="v1"), str(model), {})(lora(1, one)), str)
    assert isinstance(Keys(vouched, str(model), {})(lora(1, one)), Namespace)
    assert time.time() - 7 * 86400 < process_start() < time.time()


def test_links_and_folders_put_elsewhere_are_not_trusted(model: Path, tmp_path: Path) -> None:
    """The files are old, but the name led to others, or may have, when they were loaded."""

    def since() -> float:
        """As if this process had begun when all of this was there."""
        time.sleep(2 * CLOCKS_SECONDS)
        return time.time()

    other = tiny_model(tmp_path / "other")
    (other / "model.safetensors").write_bytes(b"others")
    blob = tmp_path / "blob"
    blob.write_bytes(b"blob")
    hub = tiny_model(tmp_path / "hub")
    (hub / "model.safetensors").symlink_to("../blob")
    link, above = tmp_path / "link", tmp_path / "above"
    link.symlink_to("model")
    above.symlink_to(".")
    began = since()
    names = [hub, link, above / "model", above / "above" / "link", model]
    for name in names:
        assert Keys(Settings(), str(name), {}, since=began).reason == "", name
    # The other file behind the same name; the same, and the folder unchanged; the other folder behind the same name.
    (tmp_path / "first").write_bytes(b"old")
    (hub / "model.safetensors").unlink()
    (hub / "model.safetensors").symlink_to("../first")
    link.unlink()
    link.symlink_to("other")
    above.unlink()
    above.symlink_to(tmp_path)
    for name in names[:-1]:
        assert "after this process began" in Keys(Settings(), str(name), {}, since=began).reason, name
    assert Keys(Settings(), str(model), {}, since=began).reason == ""
    model.rename(tmp_path / "away")
    other.rename(model)
    assert "after this process began" in Keys(Settings(), str(model), {}, since=began).reason
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(OSError, match="links"):
        links(loop)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff", b"[" * 100_000, b"7", b""], ids=range(6))
def test_files_of_garbage_fail_no_request(model: Path, tmp_path: Path, text: bytes) -> None:
    """Whatever stands in a configuration, the scheduler is told why there is no namespace, and goes on."""
    folder = adapter(tmp_path / "one", b"1")
    (folder / "adapter_config.json").write_bytes(text)
    keys = Keys(Settings(), str(model), {}, since=LATER)
    assert "no fingerprint" in str(keys(lora(1, folder)))
    assert "no fingerprint" in str(keys(lora(2, Path("a\0b"))))
    (model / "config.json").write_bytes(text)
    assert "no fingerprint" in Keys(Settings(), str(model), {}, since=LATER).reason


def test_after_a_reset_nothing_is_shared(model: Path) -> None:
    """Weights that changed in memory have no digest: a namespace that nobody else has."""
    keys = Keys(Settings(), str(model), {}, since=LATER)
    before = of(keys, request())
    keys.reset()
    after = of(keys, request())
    assert before != after
    keys.reset()
    assert len({before, after, of(keys, request())}) == 3


def test_a_model_that_is_not_there_has_a_reason(tmp_path: Path) -> None:
    """No folder, no weights, no config.json: kvslot is not used, and says why."""
    assert "no folder" in Keys(Settings(), "org/model", {}).reason
    (tmp_path / "empty").mkdir()
    assert "no fingerprint" in Keys(Settings(), str(tmp_path / "empty"), {}, since=LATER).reason
    folder = tiny_model(tmp_path / "no weights")
    assert "no weights" in Keys(Settings(), str(folder), {}, since=LATER).reason


def test_settings_are_checked() -> None:
    """A word that is not known is told together with those that are."""
    assert Settings.of({"socket": "/s", "load": "sync"}).load == "sync"
    with pytest.raises(ValueError, match="has no sokcet; it has form"):
        Settings.of({"sokcet": "/s"})
    with pytest.raises(ValueError, match="store is 'some'"):
        Settings.of({"store": "some"})


@pytest.mark.parametrize(
    ("extra", "wanted"),
    [
        ({"trust_new_adapters": "false"}, "true or false"),
        ({"trust_new_adapters": 1}, "true or false"),
        *(({"timeout": each}, "seconds") for each in ("1", 0, -1, math.nan, math.inf, 1e12, None, True)),
        *(
            ({name: each}, "a text")
            for name in ("tenant", "socket", "model_revision")
            for each in (None, 5, ["a"])
        ),
        ({"tenant": "\ud800"}, "whole characters"),
        ({"socket": "a\0b"}, "zero bytes"),
        ({"load": ["async"]}, "a text"),
        ({1: 2}, "table|has no"),
        (None, "table"),
        ("socket", "table"),
    ],
)
def test_settings_of_another_kind_are_told_at_the_start(extra: Any, wanted: str) -> None:
    """Not taken for something else ("false" is not false), nor left for the daemon to choke on."""
    with pytest.raises(ValueError, match=wanted):
        Settings.of(extra)
    assert Settings.of({"timeout": 2, "trust_new_adapters": True, "tenant": "ä"}).timeout == 2


class FullAttentionSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


def vllm_config(**changes: Any) -> Any:
    """As much of vLLM's configuration as is looked at."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        speculative_config=None,
        cache_config=SimpleNamespace(block_size=32, cache_dtype="auto", calculate_kv_scales=False),
        model_config=SimpleNamespace(
            runner_type="generate", dtype="float32", quantization=None, max_model_len=2048,
            hf_text_config=SimpleNamespace(to_dict=lambda: dict(TINY)),
        ),
        lora_config=None,
    )  # fmt: skip
    for path, value in changes.items():
        at: Any = config
        *way, last = path.split("__")
        for part in way:
            at = getattr(at, part)
        setattr(at, last, value)
    return config


def cache_config(spec: Any = None, layers: int = 2) -> Any:
    spec = spec or FullAttentionSpec(block_size=32, dtype="float32", head_size=32)
    group = SimpleNamespace(layer_names=[f"l{i}" for i in range(layers)], kv_cache_spec=spec)
    return SimpleNamespace(kv_cache_groups=[group], kv_cache_layout="LBHNC")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"parallel_config__tensor_parallel_size": 2}, "several workers"),
        ({"parallel_config__decode_context_parallel_size": 2}, "several workers"),
        ({"speculative_config": "ngram"}, "speculative"),
        ({"scheduler_config": SimpleNamespace(async_scheduling=True)}, "asynchronous"),
        ({"scheduler_config": SimpleNamespace(async_scheduling=False)}, ""),
        ({"cache_config__calculate_kv_scales": True}, "scales"),
        ({"model_config__runner_type": "pooling"}, "generate"),
        ({"cache_config__block_size": 64}, "blocks of 32 and 64"),
    ],
)
def test_engines_that_cannot_use_a_pool_say_why(changes: dict[str, Any], reason: str) -> None:
    """Not in the middle of a request: when the engine starts."""
    said = unsupported(vllm_config(**changes), cache_config(), on_cpu=True)
    assert (reason in said) if reason else said == ""


def test_other_devices_and_kinds_of_cache_are_not_used() -> None:
    """No GPU yet, and no layers whose state is more than blocks."""
    assert "CPU" in unsupported(vllm_config(), cache_config(), on_cpu=False)
    assert "MambaSpec" in unsupported(vllm_config(), cache_config(MambaSpec(block_size=32)), on_cpu=True)
    empty = SimpleNamespace(kv_cache_groups=[], kv_cache_layout=None)
    assert "no KV cache" in unsupported(vllm_config(), empty, on_cpu=True)


def test_facts_change_with_whatever_changes_the_bytes() -> None:
    """Each of these gives other facts, hence another namespace; the length of the context does not."""

    def said(cache: Any = None, version: str = "1", isa: str = "vec", **changes: Any) -> str:
        return json.dumps(facts(vllm_config(**changes), cache or cache_config(), version=version, isa=[isa]))

    base = said()
    assert said(model_config__max_model_len=4096) == base
    different = {
        said(version="2"), said(isa="amx"), said(cache_config(layers=3)), said(model_config__dtype="bfloat16"),
        said(model_config__quantization="fp8"), said(cache_config__cache_dtype="fp8"),
        said(lora_config=SimpleNamespace(lora_dtype="float32")), said(model_config__architectures=["Other"]),
        said(model_config__trust_remote_code=True),
    }  # fmt: skip
    assert len(different | {base}) == 10


@pytest.mark.parametrize(
    ("rope", "fixed"),
    [
        ({"rope_scaling": None}, True),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e4}}, True),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, True),
        ({"rope_parameters": {"rope_type": "llama3"}, "rope_scaling": {"rope_type": "longrope"}}, False),
        ({"rope_scaling": {"rope_type": "longrope"}}, False),
        ({"rope_scaling": {"type": "dynamic"}}, False),
        ({"rope_scaling": "dynamic"}, False),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn"},
                    "sliding_attention": {"rope_theta": 1},
                }
            },
            True,
        ),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_theta": 1},
                    "full_attention": {"type": "dynamic"},
                }
            },
            False,
        ),
        ({"text_config": {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}}, False),
    ],
)
def test_length_of_the_context_counts_where_rope_depends_on_it(rope: dict[str, Any], fixed: bool) -> None:
    """Dynamic and long rope, of whatever layers: engines of other lengths compute other K."""

    def said(length: int) -> str:
        config = SimpleNamespace(to_dict=lambda: {**TINY, **rope})
        changed = vllm_config(model_config__hf_text_config=config, model_config__max_model_len=length)
        return json.dumps(facts(changed, cache_config(), version="1", isa=["vec"]))

    assert (said(2048) == said(4096)) == fixed


def test_the_models_own_code_counts(model: Path, tmp_path: Path) -> None:
    """What a model's configuration names as its code is part of it, with all that it may import; and so is the
    list of which file holds which weights.  What it does not name is not."""

    def told(settings: Settings = Settings(), since: float = LATER, **facts: object) -> str:  # noqa: B008
        keys = Keys(settings, str(model), facts, since=since)
        return keys.reason or of(keys, request()).model

    base = told()
    (model / "modeling_own.py").write_text("rope = 1")
    assert told() == base, "nobody reads it"
    seen = {base}
    auto = {"AutoModelForCausalLM": "modeling_own.Own"}
    tiny_model(model, auto_map=auto)
    seen.add(told())
    (model / "modeling_own.py").write_text("rope = 2")
    seen.add(told())
    (model / "parts").mkdir()
    (model / "parts" / "rope.py").write_text("rope = 3")
    seen.add(told())
    seen.add(told(Settings(model_revision="v1")))
    (model / "model.safetensors.index.json").write_text("{}")
    seen.add(told())
    seen.add(told(Settings(model_revision="v1")))
    assert len(seen) == 7
    for changes in ({"auto_map": auto}, {"text_config": {"auto_map": auto}}):
        tiny_model(model, **changes)
        time.sleep(2 * CLOCKS_SECONDS)
        began = time.time()
        (model / "parts" / "rope.py").write_text("rope = 4")
        assert "rope.py was written after" in told(since=began)
    tiny_model(model, auto_map={**auto, "AutoConfig": ["org/other--configuration.Own", None]})
    assert "org/other--configuration.Own, in another repository" in told(remote_code=True)
    assert "repository" not in told(remote_code=False)
    assert "repository" not in told(Settings(model_revision="v1"), remote_code=True)


def test_the_daemons_configuration_for_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed is what a daemon takes, and its numbers are those that vLLM has."""
    folder = tiny_model(tmp_path / "tiny")
    assert main(["--model", str(folder), "--block-size", "32", "--dtype", "float32", "--pool", "1MiB"]) == 0
    text = capsys.readouterr().out
    assert f"opaque_block_bytes = {TINY_BLOCK_BYTES}\n" in text
    assert 'size = "1MiB"' in text
    assert (
        main(["--model", str(folder), "--dtype", "float32", "--form", "region", "--block-size", "128"]) == 0
    )
    text = capsys.readouterr().out
    assert "opaque_block_bytes = 128\n" in text
    assert 'size = "4MiB"' in text
    assert main(["--model", str(folder)]) == 2
    assert "say --dtype" in capsys.readouterr().err
    assert main(["--model", str(tmp_path / "none")]) == 2
    with pytest.raises(Unknown, match="multiples of 32"):
        configuration(folder, 48, "float32", "1GiB", "", "vllm")
    with pytest.raises(Unknown, match="kv_lora_rank"):
        block_bytes({**TINY, "kv_lora_rank": 512}, 32, "float32")
    smol = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    assert block_bytes(smol, 32, "float32") == 46080 * 32
    assert block_bytes({"text_config": smol}, 32, "bfloat16") == 23040 * 32


def test_a_pool_of_no_size_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is no size is told at once, not first by the daemon that is given the file."""
    with pytest.raises(SystemExit) as ended:
        main(["--model", str(tmp_path), "--pool", "12xx"])
    assert ended.value.code == 2
    assert "'12xx' is no size" in capsys.readouterr().err


def test_the_page_tells_all_settings() -> None:
    """docs/integrations/vllm.md has each setting with its default."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "integrations" / "vllm.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.MULTILINE))
    settings = Settings()
    assert set(rows) == set(Settings.__dataclass_fields__)
    for name, default in rows.items():
        value = getattr(settings, name)
        if default.startswith("`"):
            assert default.strip("`") == (str(value).lower() if isinstance(value, bool) else str(value)), name
        else:
            assert value == "", name
