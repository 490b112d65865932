"""Layouts: what models and numbers come to in bytes per token, and which models are refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvslot.daemon.layout import (
    ALIGNMENT,
    Layout,
    LayoutError,
    dtype_of,
    from_model_config,
    latent,
    opaque,
    plain,
)

LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
QWEN_25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "hidden_size": 2560,
        "num_attention_heads": 8,
        "num_hidden_layers": 34,
        "num_key_value_heads": 4,
        "sliding_window": 1024,
        "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(34)],
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27},
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8"},
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "torch_dtype": "bfloat16",
}
MISTRAL_7B_V01 = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
MISTRAL_7B_V03 = {**MISTRAL_7B_V01, "head_dim": 128, "sliding_window": None}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12}
FALCON_7B = {
    "model_type": "falcon",
    "hidden_size": 4544,
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "num_kv_heads": 71,
    "torch_dtype": "bfloat16",
}
FALCON_40B = {
    **FALCON_7B,
    "new_decoder_architecture": True,
    "num_kv_heads": 8,
    "num_attention_heads": 128,
} | {
    "hidden_size": 8192,
    "num_hidden_layers": 60,
}
CHATGLM3 = {
    "model_type": "chatglm",
    "hidden_size": 4096,
    "kv_channels": 128,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 32,
    "num_layers": 28,
    "torch_dtype": "float16",
}
GEMMA_3N = {
    "model_type": "gemma3n",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3n_text",
        "head_dim": 256,
        "hidden_size": 2048,
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 15,
    },
}


@pytest.mark.parametrize(
    ("config", "dtype", "slot_bytes", "planes"),
    [
        (LLAMA_31_8B, "", 131_072, 64),  # 32 layers * 2 * 8 heads * 128 * 2 bytes
        (LLAMA_31_8B, "fp32", 262_144, 64),
        (LLAMA_31_8B, "fp8", 67_584, 128),  # 32 * 2 * (8 * 128 + 8 scales * 4)
        (QWEN_25_7B, "", 57_344, 56),  # 28 * 2 * 4 * 128 * 2
        (GEMMA_3_4B, "", 139_264, 68),  # 34 * 2 * 4 * 256 * 2
        (DEEPSEEK_V3, "", 70_272, 61),  # 61 * (512 + 64) * 2
        (DEEPSEEK_V3, "float8_e4m3fn", 35_380, 122),  # 61 * (576 + 4)
        (SMOLLM2_135M, "", 23_040, 60),  # 30 * 2 * 3 * 64 * 2
        (SMOLLM2_135M, "float16", 23_040, 60),
        (MISTRAL_7B_V01, "", 131_072, 64),
        (MISTRAL_7B_V03, "", 131_072, 64),
        (GPT2, "float32", 73_728, 24),  # MHA: 12 * 2 * 12 * 64 * 4
        (FALCON_7B, "", 8_192, 64),  # MQA: 32 * 2 * 1 * 64 * 2
        (FALCON_40B, "", 122_880, 120),  # 60 * 2 * 8 * 64 * 2
        (CHATGLM3, "", 28_672, 56),  # 28 * 2 * 2 * 128 * 2
        (GEMMA_3N, "", 40_960, 40),  # 20 layers with K and V of their own * 2 * 2 * 256 * 2
    ],
)
def test_bytes_per_token(config: dict[str, Any], dtype: str, slot_bytes: int, planes: int) -> None:
    """A model's config.json comes to the bytes per token that its architecture says."""
    layout = from_model_config(config, dtype)
    assert layout.slot_bytes == slot_bytes
    assert len(layout.planes) == planes
    assert layout.granularity == "token"


def test_planes_of_gqa() -> None:
    """K and V of a layer are a plane each, layer by layer, with a head's values in order."""
    planes = from_model_config(LLAMA_31_8B).planes
    assert [plane.name for plane in planes[:4]] == ["0.k", "0.v", "1.k", "1.v"]
    assert planes[63].name == "31.v"
    assert {(plane.dtype, plane.shape, plane.slot_bytes) for plane in planes} == {
        ("bfloat16", (8, 128), 2048)
    }


def test_planes_of_mla_and_fp8() -> None:
    """MLA has one plane a layer; fp8 has a float32 scale per KV head and token beside each, unless told otherwise."""
    assert [(p.name, p.shape) for p in from_model_config(DEEPSEEK_V3).planes[:2]] == [
        ("0.kv", (576,)),
        ("1.kv", (576,)),
    ]
    scaled = plain(2, 8, 128, "fp8").planes
    assert [(p.name, p.dtype, p.shape) for p in scaled[:4]] == [
        ("0.k", "float8_e4m3fn", (8, 128)),
        ("0.v", "float8_e4m3fn", (8, 128)),
        ("0.k.scale", "float32", (8,)),
        ("0.v.scale", "float32", (8,)),
    ]
    assert len(plain(2, 8, 128, "fp8", scales=False).planes) == 4
    assert [p.name for p in latent(1, 64, "fp8_e5m2").planes] == ["0.kv", "0.kv.scale"]


@pytest.mark.parametrize(
    ("config", "windowed"),
    [
        (LLAMA_31_8B, False),
        (QWEN_25_7B, False),  # a window that is switched off
        ({**QWEN_25_7B, "use_sliding_window": True}, False),  # from layer 28 on, so in none
        ({**QWEN_25_7B, "use_sliding_window": True, "max_window_layers": 0}, True),
        (GEMMA_3_4B, False),  # mixed
        (MISTRAL_7B_V01, True),
        (MISTRAL_7B_V03, False),
        ({**LLAMA_31_8B, "sliding_window": 512, "layer_types": ["sliding_attention"] * 32}, True),
        ({**LLAMA_31_8B, "sliding_window": 512, "layer_types": ["sliding_attention"] * 31 + ["full_attention"]}, False),
        ({**LLAMA_31_8B, "model_type": "gemma2", "sliding_window": 4096}, False),  # every other layer, says its code
        ({**MISTRAL_7B_V01, "sliding_window_pattern": 4}, False),
    ],
)  # fmt: skip
def test_windowed_only_if_every_layer_is(config: dict[str, Any], windowed: bool) -> None:
    """A model counts as windowed only where each of its layers is known to be: else its front is needed."""
    assert from_model_config(config).windowed is windowed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["linear_attention"] * 31 + ["full_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention"] * 31 + ["conv"]}, "conv"),
        ({"attn_type_list": [1, 0] * 16}, "attn_type_list"),
        ({"full_attention_interval": 4}, "several kinds"),
        ({"use_cla": True}, "K and V of others"),
        ({"model_type": "kimi_linear"}, "kimi_linear"),
        ({"layer_types": ["full_attention"]}, "1 entries for 32 layers"),
        ({"layers_block_type": ["mamba", "attention"]}, "layers_block_type"),
        ({"model_type": "mamba2"}, "mamba2"),
        ({"is_encoder_decoder": True}, "cross-attention"),
        ({"cross_attention_layers": [3, 8]}, "image"),
        ({"index_head_dim": 128}, "indexer"),
        ({"global_head_dim": 512}, "another shape"),
        ({"torch_dtype": None}, "set dtype"),
        ({"torch_dtype": "int4"}, "'int4' is not known"),
        ({"num_hidden_layers": None}, "how many layers"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers = '32'"),
        ({"num_hidden_layers": 0}, "from 1 to"),
        ({"num_key_value_heads": 5}, "does not divide"),
        ({"num_key_value_heads": True}, "num_key_value_heads = True"),
        ({"num_key_value_heads": [8, 8]}, "2 entries for 32 layers"),
        ({"hidden_size": 4097}, "no multiple"),
        ({"num_kv_shared_layers": 32}, "num_kv_shared_layers"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim = None"),
    ],
)
def test_what_is_not_known_is_refused(change: dict[str, Any], words: str) -> None:
    """A model that cannot be laid out with certainty is refused with the key that says so, never guessed at."""
    with pytest.raises(LayoutError, match=words):
        from_model_config({**LLAMA_31_8B, **change})


def test_an_empty_config_is_refused() -> None:
    """Something that is no model's configuration is refused as that."""
    with pytest.raises(LayoutError, match=r"config\.json of a language model"):
        from_model_config({})


def test_keys_that_say_no_are_no_reason() -> None:
    """A model that carries a key of a strange kind, and does not use it, is laid out as any."""
    unused = {
        "use_cla": False,
        "index_head_dim": None,
        "attn_type_list": [1] * 32,
        "cross_attention_layers": [],
    }
    assert from_model_config({**LLAMA_31_8B, **unused}).planes == from_model_config(LLAMA_31_8B).planes


def test_heads_may_differ_by_layer() -> None:
    """A list of KV heads gives each layer its own."""
    layout = from_model_config({**LLAMA_31_8B, "num_hidden_layers": 3, "num_key_value_heads": [1, 2, 4]})
    assert layout.slot_bytes == 2 * (1 + 2 + 4) * 128 * 2
    assert [plane.shape[0] for plane in layout.planes] == [1, 1, 2, 2, 4, 4]


def test_dtype_names() -> None:
    """A dtype may be written as torch, engines or people write it."""
    assert dtype_of("torch.bfloat16") == dtype_of("BF16") == dtype_of(" bfloat16 ") == "bfloat16"
    assert dtype_of("fp8") == dtype_of("fp8_e4m3") == "float8_e4m3fn"
    with pytest.raises(LayoutError, match="use one of bfloat16"):
        dtype_of("bf61")


def test_opaque() -> None:
    """An opaque layout is one plane of bytes; a block that is no multiple of its slots is told the next that is."""
    layout = opaque(block_bytes=1 << 20, block_size=16)
    assert layout.slot_bytes == 65536
    assert [(p.name, p.dtype, p.shape) for p in layout.planes] == [("blocks", "uint8", (65536,))]
    with pytest.raises(LayoutError, match="round it up to 1008"):
        opaque(block_bytes=1000, block_size=16)


def test_fingerprint_is_of_what_bytes_mean() -> None:
    """Equal layouts have equal fingerprints whatever they are called; another dtype, shape or block has another."""
    base = plain(4, 2, 64, "bf16")
    same = plain(4, 2, 64, "torch.bfloat16", model="other", windowed=True)
    others = [
        plain(4, 2, 64, "fp16"),
        plain(4, 4, 32, "bf16"),
        plain(5, 2, 64, "bf16"),
        latent(8, 128, "bf16"),
        opaque(16384, 16),
        opaque(32768, 32),
    ]
    assert base.fingerprint == same.fingerprint
    assert len({each.fingerprint for each in (base, *others)}) == len(others) + 1
    assert opaque(16384, 16).slot_bytes == opaque(32768, 32).slot_bytes, "only the block differs"
    # Written down, so that an upgrade that changes it is seen: it would make clients of other versions be refused.
    assert base.fingerprint == "a0dc1ae00025b9e1"


LAYOUTS = st.one_of(
    st.builds(
        plain,
        st.integers(1, 9),
        st.integers(1, 5),
        st.integers(1, 99),
        st.sampled_from(["bf16", "fp32", "fp8"]),
    ),
    st.builds(latent, st.integers(1, 9), st.integers(1, 600), st.sampled_from(["bf16", "fp8"])),
)


@given(LAYOUTS, st.integers(1, 5000))
def test_planes_lie_apart(layout: Layout, slots: int) -> None:
    """Planes begin at multiples of 4096 bytes, do not overlap, and waste less than a page each."""
    planes = layout.place(slots)
    size = layout.size_bytes(slots)
    end = 0
    for plane in planes:
        assert plane.offset % ALIGNMENT == 0
        assert 0 <= plane.offset - end < ALIGNMENT
        end = plane.offset + slots * plane.slot_bytes
    assert 0 <= size - end < ALIGNMENT
    assert [plane.name for plane in planes] == [plane.name for plane in layout.planes]


@given(LAYOUTS, st.integers(0, 1 << 24), st.sampled_from([1, 16, 32]))
def test_slots_within_a_size(layout: Layout, size: int, block: int) -> None:
    """The slots that fit in a size do, in whole blocks, and one block more does not."""
    slots = layout.slots_within(size, block)
    assert slots % block == 0
    assert slots == 0 or layout.size_bytes(slots) <= size
    assert layout.size_bytes(slots + block) > size


KEYS = [*LLAMA_31_8B, *QWEN_25_7B, "layer_types", "kv_lora_rank", "head_dim", "text_config", "dtype"]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 70000),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-1, 9), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers()),
)


@given(st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_any_content_is_a_layout_or_a_refusal(change: dict[str, Any]) -> None:
    """Whatever stands in a config.json, there is a layout or a LayoutError, nothing else."""
    try:
        layout = from_model_config({**LLAMA_31_8B, **change})
    except LayoutError:
        return
    assert layout.slot_bytes > 0
