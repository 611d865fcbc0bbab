"""Pools of real models have the sizes of these models, and tell a restored prefix from another one."""

from __future__ import annotations

import pytest
from model_pools import MODELS, Model, ModelPools
from run import ROOT

from kvlinker.discovery import load_plugins
from kvlinker.registry import PluginRegistry

BYTES_PER_TOKEN = {
    "DeepSeek V3.2, fp8": 61 * (656 + 132),
    "DeepSeek V4-Pro, fp8": (30 * (37_440 + 8_448) + 31 * 1_728) / 256,
    "GQA of 8B, bf16": 32 * 2 * 8 * 128 * 2,
}
BYTES_AT_A_BOUNDARY = {"DeepSeek V4-Pro, fp8": 11_592_960}


DOCUMENT = (ROOT / "docs" / "stores.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def registry() -> PluginRegistry:
    return load_plugins()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.description)
def test_a_prefix_has_the_bytes_that_the_model_has(model: Model, registry: PluginRegistry) -> None:
    pools = ModelPools(model, registry, total_bytes=0)

    size = pools.total_bytes - BYTES_AT_A_BOUNDARY.get(model.name, 0)

    assert pools.pages == 2
    assert size == BYTES_PER_TOKEN[model.name] * pools.tokens


def test_a_prefix_that_was_not_restored_is_noticed(registry: PluginRegistry) -> None:
    pools = ModelPools(MODELS[1], registry, total_bytes=0)

    pools.spoil()

    assert not pools.is_restored()


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
def test_an_operator_is_told_what_a_token_takes(name: str) -> None:
    size = BYTES_PER_TOKEN[name]
    boundary = BYTES_AT_A_BOUNDARY.get(name)

    cells = [
        name,
        f"{size:,.0f}",
        f"{boundary:,}" if boundary else "",
        f"{(1 << 30) / size:,.0f}",
        f"{1e9 / size:,.0f}",
    ]

    line = next(line for line in DOCUMENT.splitlines() if line.startswith(f"| {name} |"))
    assert [cell.strip() for cell in line.strip("|").split("|")] == cells
