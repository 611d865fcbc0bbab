"""The pools of this engine are described as every engine adapter promises."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

from transformers import DynamicCache, PreTrainedConfig

import kvlinker_transformers
from kvlinker.testing.engines import EngineAdapterTests, PoolExample
from kvlinker_transformers.engine.allocation import pools_for_config
from kvlinker_transformers.models import tiny_model
from kvlinker_transformers.pools import PagedPools

SCRATCH = {"c128.*.scratch.*": "open entry of the running request; nothing is open at a page's end"}


@cache
def config(model_type: str) -> PreTrainedConfig:
    found: object = tiny_model(model_type).config
    assert isinstance(found, PreTrainedConfig)
    return found


def pools(model_type: str, kv_format: str | None, *, head_major: bool) -> PagedPools:
    return pools_for_config(config(model_type), pages=4, kv_format=kv_format, head_major=head_major)


def example(
    model_type: str,
    page_size: int,
    *,
    kv_format: str | None = None,
    head_major: bool = False,
    excused: Mapping[str, str] = {},
) -> PoolExample:
    parts = [model_type, kv_format or "", "head_major" if head_major else ""]
    return PoolExample(
        name="-".join(part for part in parts if part),
        make=partial(pools, model_type, kv_format, head_major=head_major),
        page_size=page_size,
        excused=excused,
    )


class TestTransformers(EngineAdapterTests):
    plugin = kvlinker_transformers
    engine = "transformers"
    goldens = Path(__file__).parent / "goldens"
    pools = (
        example("llama", 16),
        example("qwen3", 16, kv_format="fp8_e4m3fn"),
        example("llama", 16, head_major=True),
        example("gemma3_text", 16),
        example("gpt_oss", 16, kv_format="fp8_e4m3fn", head_major=True),
        example("deepseek_v3", 64),
        example("deepseek_v32", 64, kv_format="fp8_packed_656"),
        example("glm_moe_dsa", 64),
        example("deepseek_v4", 256, excused=SCRATCH),
        example("qwen3_next", 16),
        example("qwen3_next", 16, kv_format="fp8_e4m3fn", head_major=True),
        example("kimi_linear", 64),
        example("jamba", 16),
        example("lfm2", 16),
    )
    unsupported = (PoolExample(name="dynamic_cache", make=DynamicCache, page_size=16),)
