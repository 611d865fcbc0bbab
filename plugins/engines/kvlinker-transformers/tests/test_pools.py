"""Pools: every buffer has exactly the bytes of the published layouts."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker_transformers.engine.allocation import pools_for_config
from kvlinker_transformers.engine.pools_v4 import V4Pools
from kvlinker_transformers.pools import PagedPools

Model = tuple[str, Mapping[str, object]]

PAGES = 3

V3: Model = ("deepseek_v3", {"num_hidden_layers": 61})
V32: Model = ("deepseek_v32", {"num_hidden_layers": 61})
GLM5: Model = ("glm_moe_dsa", {"num_hidden_layers": 78})
GLM52: Model = (
    "glm_moe_dsa",
    {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3},
)
LLAMA: Model = (
    "llama",
    {"num_hidden_layers": 32, "num_key_value_heads": 8, "num_attention_heads": 32, "head_dim": 128},
)
QWEN3: Model = ("qwen3", {"num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128})
SMOLLM2: Model = (
    "llama",
    {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
)
GEMMA3_27B: Model = (
    "gemma3_text",
    {
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
    },
)
GPT_OSS_120B: Model = ("gpt_oss", {"num_hidden_layers": 36})
QWEN3_NEXT: Model = ("qwen3_next", {"num_hidden_layers": 48})
KIMI_LINEAR: Model = (
    "kimi_linear",
    {
        "num_hidden_layers": 27,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [n for n in range(1, 27) if n % 4],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    },
)
JAMBA: Model = ("jamba", {})
LFM2: Model = (
    "lfm2",
    {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
)
V4_FLASH: Model = (
    "deepseek_v4",
    {"num_hidden_layers": 43, "compress_ratios": [0, 0, *[4, 128] * 20, 4]},
)
V4_PRO: Model = (
    "deepseek_v4",
    {"num_hidden_layers": 61, "compress_ratios": [128, 128, *[4, 128] * 29, 4]},
)


def config_of(model: Model) -> PreTrainedConfig:
    model_type, options = model
    config = AutoConfig.for_model(model_type, **options)
    config.dtype = torch.bfloat16
    return config


def page_bytes(pools: PagedPools, role: str) -> int:
    """Bytes of one page in all buffers of a role; spare rows belong to no page."""
    pages = pools.pages["swa" if role in {"swa_kv", "c4_state", "c4_indexer_state"} else "kv"]
    return sum(len(t) // pages * pages * t.shape[1] // pages for t in pools.tensors()[role])


@pytest.mark.parametrize(
    ("model", "kv_format", "bytes_per_token"),
    [
        (LLAMA, None, 131_072),  # Llama-3.1-8B config.json
        (QWEN3, None, 147_456),  # Qwen3-8B config.json
        (SMOLLM2, None, 23_040),  # SmolLM2-135M config.json
        (V3, "bf16", 70_272),  # DeepSeek-V3 config.json
        (V32, "bf16", 78_324),  # DeepSeek-V3.2 config.json, FlashMLA sparse layout
        (V32, "fp8_packed_656", 48_068),
        (GLM5, "bf16", 100_152),  # GLM-5 config.json
        (GLM5, "fp8_packed_656", 61_464),
        (GLM52, "bf16", 92_628),  # GLM-5.2 config.json: 21 of 78 layers own an index
        (GLM52, "fp8_packed_656", 53_940),
    ],
)
def test_b15_allocated_bytes_per_token_are_those_of_the_published_models(
    model: Model, kv_format: str | None, bytes_per_token: int
) -> None:
    pools = pools_for_config(config_of(model), pages=PAGES, kv_format=kv_format)

    allocated = sum(t.numel() for tensors in pools.tensors().values() for t in tensors)

    assert allocated == bytes_per_token * pools.page_size * PAGES


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            V4_FLASH,
            {
                "swa_kv": 6_439_680,
                "c4_kv": 786_240,
                "c4_indexer": 177_408,
                "c4_state": 1_376_256,
                "c4_indexer_state": 344_064,
                "c128_kv": 34_560,
            },
        ),
        (
            V4_PRO,
            {
                "swa_kv": 9_135_360,
                "c4_kv": 1_123_200,
                "c4_indexer": 253_440,
                "c4_state": 1_966_080,
                "c4_indexer_state": 491_520,
                "c128_kv": 53_568,
            },
        ),
    ],
)
def test_v4_pages_have_the_published_bytes(model: Model, expected: dict[str, int]) -> None:
    pools = pools_for_config(config_of(model), pages=2, swa_pages=3)

    assert {role: page_bytes(pools, role) for role in pools.tensors()} == expected


@pytest.mark.parametrize(
    ("model", "slot_bytes", "swa_slot_bytes"),
    [
        (GEMMA3_27B, 81_920, 425_984),  # gemma-3-27b config.json: 10 of 62 layers see everything
        (GPT_OSS_120B, 36_864, 36_864),  # gpt-oss-120b config.json: every other of 36 layers
    ],
)
@pytest.mark.parametrize("head_major", [False, True])
def test_hybrids_have_the_published_bytes_in_each_index_space(
    *, model: Model, slot_bytes: int, swa_slot_bytes: int, head_major: bool
) -> None:
    pools = pools_for_config(config_of(model), pages=2, swa_pages=3, head_major=head_major)

    sizes = {role: sum(t.numel() for t in held) for role, held in pools.tensors().items()}
    assert sizes["k"] == sizes["v"]
    assert sizes["k"] + sizes["v"] == 2 * 16 * slot_bytes
    assert sizes["swa_k"] + sizes["swa_v"] == 3 * 16 * swa_slot_bytes


@pytest.mark.parametrize(
    ("model", "slot_bytes", "recurrence_bytes", "window_bytes"),
    [
        # Qwen3-Next-80B-A3B config.json: 36 of 48 layers keep 32 heads of 128 x 128, and 8192 channels
        (QWEN3_NEXT, 24_576, 36 * 32 * 128 * 128 * 4, 36 * 8192 * 4 * 2),
        # Kimi-Linear-48B-A3B config.json: 20 of 27 layers
        (KIMI_LINEAR, 8_064, 20 * 32 * 128 * 128 * 4, 20 * 3 * 4096 * 4 * 2),
        # Jamba-v0.1 config.json: 28 of 32 layers keep 8192 channels of 16
        (JAMBA, 16_384, 28 * 8192 * 16 * 4, 28 * 8192 * 4 * 2),
        # LFM2-1.2B config.json: 10 of 16 layers keep a window of 3
        (LFM2, 12_288, 0, 10 * 2048 * 3 * 2),
    ],
)
def test_states_and_the_pages_beside_them_have_the_published_bytes(
    model: Model, slot_bytes: int, recurrence_bytes: int, window_bytes: int
) -> None:
    pools = pools_for_config(config_of(model), pages=2, state_slots=3)

    sizes = {role: sum(t.numel() for t in held) for role, held in pools.tensors().items()}
    assert sizes.pop("ssm_state", 0) == 3 * recurrence_bytes
    assert sizes.pop("conv_state_0") == 3 * window_bytes
    assert sum(sizes.values()) == 2 * pools.page_size * slot_bytes


def test_b16_v4_states_are_rings_of_8_rows_for_each_window_page() -> None:
    pools = pools_for_config(config_of(V4_FLASH), pages=2, swa_pages=5)

    (rows,) = {len(tensor) for tensor in pools.tensors()["c4_state"]}

    assert rows == 5 * 8 + 1  # a spare row belongs to no ring


def test_b94_v4_buffers_of_two_index_spaces_have_row_counts_of_their_own() -> None:
    tensors = pools_for_config(config_of(V4_FLASH), pages=2, swa_pages=5).tensors()

    assert {len(tensor) for tensor in tensors["swa_kv"]} == {5}
    assert {len(tensor) for tensor in tensors["c4_kv"]} == {2}


def test_b11_the_open_entry_of_128_tokens_is_scratch_and_not_described() -> None:
    pools = pools_for_config(config_of(V4_FLASH), pages=2)

    assert pools.facts["c128_state_persistent"] == 0
    assert "c128_state" not in pools.tensors()


@pytest.mark.parametrize("page_size", [64, 192, 257])
def test_b11_a_v4_page_that_ends_within_an_entry_of_128_tokens_is_refused(page_size: int) -> None:
    with pytest.raises(ContractError, match=f"multiple of 128, got {page_size}"):
        pools_for_config(config_of(V4_FLASH), pages=2, page_size=page_size)


def test_w07_a_layer_that_shares_an_index_owns_a_buffer_without_rows() -> None:
    tensors = pools_for_config(config_of(GLM52), pages=PAGES).tensors()["index_k"]

    owners = [i for i, tensor in enumerate(tensors) if len(tensor)]
    assert owners == [0, 1, 2, *range(6, 78, 4)]
    assert {tuple(t.shape) for t in tensors} == {(PAGES, 8448), (0, 8448)}


@pytest.mark.parametrize(
    ("layout", "shape"), [("token_major", (48, 2048)), ("head_major", (3, 32768))]
)
def test_w27_mha_rows_are_slots_or_pages_as_the_layout_says(
    layout: str, shape: tuple[int, int]
) -> None:
    pools = pools_for_config(config_of(LLAMA), pages=PAGES, head_major=layout == "head_major")

    assert pools.facts["kv_layout"] == layout
    assert {tuple(tensor.shape) for tensor in pools.tensors()["k"]} == {shape}


@pytest.mark.parametrize("model", [LLAMA, GPT_OSS_120B, V32, LFM2, V4_FLASH])
def test_new_pools_read_as_nan_everywhere(model: Model) -> None:
    for tensors in pools_for_config(config_of(model), pages=2).tensors().values():
        for tensor in tensors:
            assert (tensor == 0xFF).all()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (LLAMA, {"kv_format": "fp8_packed_656"}, "'fp8_packed_656' is no plain dtype"),
        (LLAMA, {"swa_pages": 3}, "'llama': swa_pages given"),
        (V32, {"head_major": True}, "'deepseek_v32': head_major given"),
        (V4_FLASH, {"kv_format": "bf16"}, "'deepseek_v4' stores fp8_e4m3fn_ue8m0, got"),
        (LFM2, {"swa_pages": 3}, "'lfm2': swa_pages given"),
        (LLAMA, {"state_slots": 3}, "'llama': state_slots given"),
        (KIMI_LINEAR, {"head_major": True}, "'kimi_linear': head_major given"),
    ],
)
def test_an_option_that_a_family_does_not_have_is_refused(
    model: Model, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        pools_for_config(config_of(model), pages=2, **options)  # type: ignore[arg-type]  # any option


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (("gpt2", {}), "'gpt2' has no paged pools in this engine; it serves deepseek_v3, "),
        (
            ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
            "'qwen3': layer_types must be full_attention everywhere",
        ),
        (
            ("gpt_oss", {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}),
            "'gpt_oss': layer_types must be full_attention and sliding_attention",
        ),
        (
            ("gemma3_text", {"use_bidirectional_attention": True}),
            "'gemma3_text': use_bidirectional_attention must be false, got True",
        ),
        (("deepseek_v4", {"compress_rate_hca": 64}), "'deepseek_v4': compress_rates must be"),
        (
            ("qwen3_next", {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}),
            "'qwen3_next': layer_types must be full_attention in some layers and states in the",
        ),
        (
            ("kimi_linear", {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}),
            "'kimi_linear': layer_types must be full_attention in some layers",
        ),
        (
            (
                "lfm2",
                {
                    "num_hidden_layers": 3,
                    "layer_types": ["conv", "full_attention", "sliding_attention"],
                },
            ),
            "'lfm2': layer_types must be full_attention in some layers",
        ),
        (("jamba", {"num_hidden_layers": 4}), "'jamba': attn_layer_period must be such that some"),
        (("jamba", {"head_dim": 64}), "'jamba': head_dim must be unset, got 64"),
    ],
)
def test_a_model_that_the_engine_has_no_pools_for_is_refused(model: Model, message: str) -> None:
    with pytest.raises(UnsupportedKVCacheError, match=message):
        pools_for_config(config_of(model), pages=2)


def test_v4_layers_state_what_they_compress() -> None:
    pools = pools_for_config(config_of(V4_PRO), pages=2)

    assert isinstance(pools, V4Pools)
    assert [facts.compress_ratio for facts in pools.layers[:4]] == [128, 128, 4, 128]
    assert [pool.window for pool in pools.logical_pools] == [None, 128]
