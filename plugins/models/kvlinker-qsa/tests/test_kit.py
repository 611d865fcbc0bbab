"""Caches of compressed sparse attention keep what every model plugin promises."""

from __future__ import annotations

from functools import partial

import pytest
from qsa_examples import PAGES, Cache

import kvlinker_qsa
from kvlinker.testing.cache_examples import CacheExample
from kvlinker.testing.models import ModelPluginTests

POOLS = {"ssm_state": "mamba", "conv_state_0": "mamba"}
LAYERS = {
    **{role: [1, 3] for role in ("k", "v", "index_k")},
    **{role: [0, 2] for role in ("ssm_state", "conv_state_0")},
}


def example(name: str, cache: Cache) -> CacheExample:
    """Return a cache for the kit, cut into a stage of a state alone and one of the rest."""
    return CacheExample(
        name=name,
        describe=cache.describe,
        pages=PAGES,
        pools=POOLS,
        role_layers={
            **LAYERS,
            **{role: list(range(cache.drafts)) for role in ("draft_k", "draft_v", "draft_index_k")},
        },
        stages=[partial(cache.describe, start=0, end=1), partial(cache.describe, start=1)],
    )


@pytest.mark.supports(engine="any", level="kit", of="cache")
class TestQsa(ModelPluginTests):
    plugin = kvlinker_qsa
    caches = (
        example("bf16", Cache()),
        example("bf16-drafts", Cache(drafts=2)),
        example(
            "fp8_e4m3fn",
            Cache(
                facts={"index_format": "fp8_e4m3fn", "index_values": 16, "index_ratio": 8},
                index_row=32,
            ),
        ),
    )
