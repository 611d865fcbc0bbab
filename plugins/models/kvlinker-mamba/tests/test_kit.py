"""Caches of hybrids keep what every model plugin promises."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hybrid_examples import CONV, INT8, SSM, Hybrid, example

import kvlinker_mamba
from kvlinker.description import Fact
from kvlinker.testing.models import ModelPluginTests

TWO_CONVS = {**SSM, **CONV, "conv_states": 2}
NO_SSM = {**CONV, "ssm_format": "none"}
NO_CONV = {**SSM, "conv_states": 0}
WINDOWS = ("sliding", "mamba", "attention", "sliding", "mamba")
SCALED: Mapping[str, Fact] = {
    "kv_layout": "head_major",
    "kv_format": "fp4_e2m1_block16_e8m0",
    "kv_scaled": 1,
}


@pytest.mark.supports(engine="any", level="kit", of="cache")
class TestMamba(ModelPluginTests):
    plugin = kvlinker_mamba
    caches = (
        example("mha", Hybrid(states=TWO_CONVS, drafts=2), cuts=(1, 3)),
        example("head_major_and_scaled", Hybrid(facts=SCALED, drafts=1)),
        example("envelope", Hybrid(states=TWO_CONVS, envelope=True), cuts=(3,)),
        example("side_states", Hybrid(has_sides=True)),
        example("short_convolutions_alone", Hybrid(states=NO_SSM)),
        example("without_convolutions", Hybrid(states=NO_CONV)),
        example("int8_checkpoints", Hybrid(states={**INT8, **CONV})),
        example("windows", Hybrid(pages="swa", kinds=WINDOWS, drafts=2), cuts=(1, 2)),
        example("qsa", Hybrid(pages="qsa", drafts=2), cuts=(1, 3)),
        example("mla", Hybrid(pages="mla", drafts=2, head_drafts=2), cuts=(3,)),
        example("dsa", Hybrid(pages="dsa", drafts=2, has_sides=True)),
        example("dsa_folded", Hybrid(pages="dsa", drafts=1, facts={"index_kpool": 4})),
    )
