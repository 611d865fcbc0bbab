"""What published models cost, told from their configurations: the sizes of the models, and of real pools."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from kvlinker.capacity import stored_prefixes
from kvlinker.description import DescribeRequest, Fact
from kvlinker.discovery import load_plugins
from kvlinker.explanation import Explanation, explain
from kvlinker.installed import PluginKind
from kvlinker.model_caches import describe_model
from kvlinker.model_config import ModelConfig, ModelConfigRequest
from kvlinker.registry import PluginRegistry
from kvlinker.selection import describe_cache
from kvlinker_deepseek_v4 import planned as v4
from kvlinker_deepseek_v4 import resolve_layer_mappings, stage_layers, v4_pools
from kvlinker_deepseek_v4.formats import V4Formats
from kvlinker_deepseek_v4.host_tier import ByteCapacity, plan_host_tier
from kvlinker_dsa import planned as dsa
from kvlinker_mamba import planned as mamba
from kvlinker_mha import planned as mha
from kvlinker_mla import planned as mla
from kvlinker_swa import planned as swa
from kvlinker_transformers.engine import pools_for_config
from kvlinker_transformers.models import TINY_MODEL_TYPES, tiny_model

LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
SPARSE = {**LATENT, "index_head_dim": 128}
V4 = {"head_dim": 512, "index_head_dim": 128, "sliding_window": 128}
GPT_OSS = {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
}
FLASH = [0, 0, *[4, 128] * 20, 4, 0]
PRO = [128, 128, *[4, 128] * 29, 4, 0]

CONFIGS: Mapping[str, Mapping[str, object]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "torch_dtype": "bfloat16",
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 4096,
        "use_sliding_window": False,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
    },
    "smollm2-135m": {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "torch_dtype": "bfloat16",
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_size": 1152,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
    },
    "gemma-3-27b": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "hidden_size": 5376,
        "sliding_window": 1024,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        **GPT_OSS,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        **GPT_OSS,
    },
    "qwen3-next-80b": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "kimi-linear-48b": {
        "model_type": "kimi_linear",
        "num_hidden_layers": 27,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [i for i in range(1, 27) if i % 4],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
        **LATENT,
    },
    "jamba-v0.1": {
        "model_type": "jamba",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "sliding_window": None,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2",
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 2048,
        "conv_L_cache": 3,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "deepseek-v3": {"model_type": "deepseek_v3", "num_hidden_layers": 61, **LATENT},
    "deepseek-v3.2": {"model_type": "deepseek_v32", "num_hidden_layers": 61, **SPARSE},
    "glm-5": {"model_type": "glm_moe_dsa", "num_hidden_layers": 78, **SPARSE},
    "glm-5.2": {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 78,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        **SPARSE,
    },
    "deepseek-v4-flash": {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 43,
        "compress_ratios": FLASH,
        **V4,
    },
    "deepseek-v4-pro": {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 61,
        "compress_ratios": PRO,
        **V4,
    },
}
"""What config.json of each model says about its cache."""
MODEL_TYPES = [
    mha.MODEL_TYPES,
    mla.MODEL_TYPES,
    frozenset(swa.MODELS),
    frozenset(mamba.MODELS),
    dsa.MODEL_TYPES,
    v4.MODEL_TYPES,
]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Bytes of a model's cache, computed from its published geometry."""

    model: str
    per_token: float
    per_boundary: int = 0
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.model, *map(str, self.facts.values())])


PACKED, RAW = {"kv_format": "fp8_packed_656"}, {"kv_format": "fp8_e4m3fn"}
SIZES = [
    Size(model="llama-3.1-8b", per_token=131_072),
    Size(model="llama-3.1-8b", per_token=65_536, facts=RAW),
    Size(model="llama-3.1-8b", per_token=131_072, facts={"kv_layout": "head_major"}),
    Size(model="qwen3-8b", per_token=147_456),
    Size(model="smollm2-135m", per_token=23_040),
    Size(model="gemma-3-1b", per_token=4_096, per_boundary=11_534_336),
    Size(model="gemma-3-27b", per_token=81_920, per_boundary=436_207_616),
    Size(model="gpt-oss-20b", per_token=24_576, per_boundary=3_145_728),
    Size(model="gpt-oss-20b", per_token=12_288, per_boundary=1_572_864, facts=RAW),
    Size(model="gpt-oss-120b", per_token=36_864, per_boundary=4_718_592),
    Size(model="qwen3-next-80b", per_token=24_576, per_boundary=77_266_944),
    Size(model="qwen3-next-80b", per_token=12_288, per_boundary=77_266_944, facts=RAW),
    Size(model="kimi-linear-48b", per_token=8_064, per_boundary=43_417_600),
    Size(model="jamba-v0.1", per_token=16_384, per_boundary=16_056_320),
    Size(model="lfm2-1.2b", per_token=12_288, per_boundary=81_920),
    Size(model="deepseek-v3", per_token=70_272),
    Size(model="deepseek-v3.2", per_token=78_324),
    Size(model="deepseek-v3.2", per_token=48_068, facts=PACKED),
    Size(model="deepseek-v3.2", per_token=43_188, facts=RAW),
    Size(model="glm-5", per_token=100_152),
    Size(model="glm-5", per_token=61_464, facts=PACKED),
    Size(model="glm-5.2", per_token=92_628),
    Size(model="glm-5.2", per_token=53_940, facts=PACKED),
    Size(model="deepseek-v4-flash", per_token=998_208 / 256, per_boundary=8_160_000),
    Size(model="deepseek-v4-pro", per_token=1_430_208 / 256, per_boundary=11_592_960),
]


@pytest.fixture(scope="module")
def registry() -> PluginRegistry:
    return load_plugins(environ={})


def explained(
    registry: PluginRegistry, model: str, facts: Mapping[str, Fact] | None = None
) -> Explanation:
    request = ModelConfigRequest(facts=facts or {})
    config = ModelConfig(values=CONFIGS[model])
    return explain(describe_model(config, request, registry=registry), registry)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_model_costs_what_its_configuration_says(registry: PluginRegistry, size: Size) -> None:
    explanation = explained(registry, size.model, size.facts)

    assert explanation.problem == ""
    assert explanation.bytes_per_token == size.per_token
    assert explanation.bytes_per_boundary == size.per_boundary


def test_each_part_of_deepseek_v4_has_its_size(registry: PluginRegistry) -> None:
    flash = {pool.name: pool.page_bytes for pool in explained(registry, "deepseek-v4-flash").pools}
    pro = {pool.name: pool.page_bytes for pool in explained(registry, "deepseek-v4-pro").pools}

    assert flash == {
        "swa": 6_439_680,
        "deepseek_v4_c4": 786_240,
        "deepseek_v4_c4_indexer": 177_408,
        "deepseek_v4_c128": 34_560,
        "deepseek_v4_c4_state": 1_376_256,
        "deepseek_v4_c4_indexer_state": 344_064,
    }
    assert pro == {
        "swa": 9_135_360,
        "deepseek_v4_c4": 1_123_200,
        "deepseek_v4_c4_indexer": 253_440,
        "deepseek_v4_c128": 53_568,
        "deepseek_v4_c4_state": 1_966_080,
        "deepseek_v4_c4_indexer_state": 491_520,
    }


def test_boundaries_farther_apart_leave_room_for_more_tokens(registry: PluginRegistry) -> None:
    explanation = explained(registry, "deepseek-v4-flash")

    prefixes = stored_prefixes(explanation, page_size=256, intervals=[1, 8, 64])

    assert [prefix.interval_bytes for prefix in prefixes] == [
        998_208 + 8_160_000,
        8 * 998_208 + 8_160_000,
        64 * 998_208 + 8_160_000,
    ]
    tib = 1 << 40
    assert [prefix.tokens_in(tib) for prefix in prefixes] == [
        tib // 9_158_208 * 256,
        tib // 16_145_664 * 2048,
        tib // 72_045_312 * 16384,
    ]


@pytest.mark.parametrize("ratios", [FLASH, PRO])
def test_a_store_and_a_host_tier_of_one_size_hold_the_same_tokens(
    registry: PluginRegistry, ratios: list[int]
) -> None:
    model = "deepseek-v4-flash" if ratios is FLASH else "deepseek-v4-pro"
    pools = v4_pools(
        V4Formats(page_size=256), resolve_layer_mappings(stage_layers(ratios, end=len(ratios) - 1))
    )
    size = 10 << 30

    tier = plan_host_tier(
        pools,
        page_size=256,
        capacity=ByteCapacity(total_bytes=size, kv_pages_per_swa_page=8),
        available_bytes=lambda: size,
    )
    (prefix,) = stored_prefixes(explained(registry, model), page_size=256, intervals=[8])

    assert tier.tokens == prefix.tokens_in(size)


def test_the_command_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["deepseek-v4-pro"]))
    command = [sys.executable, "-m", "kvlinker", "explain", "--json", "--store", "1TiB", "--model"]

    done = subprocess.run([*command, str(path)], check=True, stdout=subprocess.PIPE)

    form = json.loads(done.stdout)
    assert (form["bytes_per_token"], form["bytes_per_boundary"]) == (1_430_208 / 256, 11_592_960)
    assert form["stored"][3]["tokens"] == (1 << 40) // (8 * 1_430_208 + 11_592_960) * 2048


# ---- against pools that an engine really makes ------------------------------------------------


@pytest.mark.parametrize("model_type", sorted(TINY_MODEL_TYPES))
def test_a_configuration_gives_the_layout_that_the_engine_describes(
    registry: PluginRegistry, model_type: str
) -> None:
    torch.set_num_threads(1)
    transformers_config = tiny_model(model_type).config
    pools = pools_for_config(transformers_config, pages=4)
    request = DescribeRequest(page_size=pools.page_size)
    real = describe_cache("transformers", pools, request, registry=registry)
    config = ModelConfig(values={**transformers_config.to_dict(), "model_type": model_type})

    planned = describe_model(
        config,
        ModelConfigRequest(page_size=pools.page_size, facts=real.facts),
        registry=registry,
    )

    assert (planned.family, planned.layers) == (real.family, real.layers)
    assert planned.logical_pools == real.logical_pools
    assert planned.facts == real.facts
    assert {role: len(spans) for role, spans in planned.buffers.items()} == {
        role: len(spans) for role, spans in real.buffers.items()
    }
    assert explain(planned, registry).fingerprint == explain(real, registry).fingerprint


def test_every_model_type_is_one_that_transformers_knows_or_that_ships_its_own_code() -> None:
    known = frozenset().union(*MODEL_TYPES)

    assert sorted(known - set(CONFIG_MAPPING)) == ["kimi_k2"]


def test_no_two_plugins_know_one_model_type() -> None:
    assert len(frozenset().union(*MODEL_TYPES)) == sum(map(len, MODEL_TYPES))


def test_drafts_ride_on_the_models_layers(registry: PluginRegistry) -> None:
    for model, more in {
        "llama-3.1-8b": 4096,
        "gpt-oss-20b": 2048,
        "qwen3-next-80b": 2048,
        "deepseek-v3": 1152,
        "deepseek-v3.2": 1152 + 132,
        "deepseek-v4-flash": 0,
    }.items():
        config = ModelConfig(values=CONFIGS[model])
        request = ModelConfigRequest(draft_layers=1)

        with_draft = explain(describe_model(config, request, registry=registry), registry)

        without = explained(registry, model)
        assert with_draft.problem == ""
        assert with_draft.bytes_per_token == without.bytes_per_token + more
        assert with_draft.bytes_per_boundary - without.bytes_per_boundary in {0, 149_760}


def test_an_unknown_model_type_is_declined_by_everybody(registry: PluginRegistry) -> None:
    plugins = [
        p for p in registry.models() if p.record.kind is PluginKind.MODEL and p.reads_configs
    ]
    config = ModelConfig(values={"model_type": "mamba2"})

    answers = {
        plugin.name: plugin.describe_config(config, ModelConfigRequest()) for plugin in plugins
    }

    assert answers == dict.fromkeys(["deepseek_v4", "dsa", "mamba", "mha", "mla", "swa"])
