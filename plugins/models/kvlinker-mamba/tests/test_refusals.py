"""What would come back wrong is refused, with the values and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hybrid_examples import CONV, INT8, PAGE, PAGES, SSM, Hybrid

import kvlinker_mamba
from kvlinker.description import Fact, IndexerKind, KVCacheDescription, LogicalPool, PoolKind
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.testing.cache_examples import with_facts, without_role
from kvlinker.testing.strategies import MadeUpMemory

Change = Callable[[KVCacheDescription], KVCacheDescription]


def described(hybrid: Hybrid) -> KVCacheDescription:
    return hybrid.describe(MadeUpMemory().span)


def without_fact(description: KVCacheDescription, name: str) -> KVCacheDescription:
    facts = {key: value for key, value in description.facts.items() if key != name}
    return replace(description, facts=facts)


def with_kind(description: KVCacheDescription, kind: str) -> KVCacheDescription:
    first, *others = description.layers
    return replace(description, layers=(replace(first, kind=kind), *others))


def halved(description: KVCacheDescription, role: str, row_bytes: int) -> KVCacheDescription:
    spans = tuple(
        replace(span, row_bytes=row_bytes, row_stride=row_bytes)
        for span in description.buffers[role]
    )
    return replace(description, buffers={**description.buffers, role: spans})


def test_a_state_with_no_recurrence_and_no_convolution_is_none() -> None:
    cache = described(Hybrid(states={"ssm_format": "none", "conv_states": 0}))

    with pytest.raises(ContractError, match="ssm_format 'none' and conv_states 0 leave no state"):
        kvlinker_mamba.match_kv_cache(cache)


def test_int8_values_without_their_scales_are_refused() -> None:
    cache = described(Hybrid(states={**INT8, **CONV}))

    with pytest.raises(ContractError, match=r"buffers \['ssm_scale'\] are missing"):
        kvlinker_mamba.match_kv_cache(without_role(cache, "ssm_scale"))
    with pytest.raises(ContractError, match="fact 'ssm_scale_format' is missing"):
        kvlinker_mamba.match_kv_cache(without_fact(cache, "ssm_scale_format"))


def test_scales_of_values_that_have_none_are_refused() -> None:
    cache = described(Hybrid(states={**INT8, **CONV}))
    plain = with_facts(without_fact(cache, "ssm_scale_format"), ssm_format="fp32")

    with pytest.raises(UnsupportedKVCacheError, match=r"buffers \['ssm_scale'\] are unknown"):
        kvlinker_mamba.match_kv_cache(plain)


@pytest.mark.parametrize(
    ("states", "name"),
    [
        ({**CONV, "ssm_format": "none", "ssm_layout": "value_major"}, "ssm_layout"),
        ({**SSM, **CONV, "ssm_scale_format": "bf16"}, "ssm_scale_format"),
        ({**SSM, "conv_states": 0, "conv_layout": "channel_major"}, "conv_layout"),
    ],
)
def test_a_fact_about_what_is_not_kept_is_refused(states: dict[str, Fact], name: str) -> None:
    with pytest.raises(UnsupportedKVCacheError, match=f"facts .*'{name}'.* are unknown"):
        kvlinker_mamba.match_kv_cache(described(Hybrid(states=states)))


def test_a_stated_ring_of_updates_beside_a_state_is_refused() -> None:
    cache = with_facts(described(Hybrid()), replay_ring_rows=16)

    with pytest.raises(UnsupportedKVCacheError, match="'replay_ring_rows': 16"):
        kvlinker_mamba.match_kv_cache(cache)


@pytest.mark.parametrize("role", ["ssm_state", "conv_state_0", "conv_state_1"])
def test_b06_a_cache_without_one_of_its_states_is_refused(role: str) -> None:
    cache = described(Hybrid(states={**SSM, **CONV, "conv_states": 2}))

    with pytest.raises(ContractError, match=f"buffers \\['{role}'\\] are missing"):
        kvlinker_mamba.match_kv_cache(without_role(cache, role))


def test_b06_a_side_state_that_is_stated_and_not_described_is_refused() -> None:
    cache = described(Hybrid(has_sides=True))

    with pytest.raises(UnsupportedKVCacheError, match=r"facts \{'side_ngram_format': 'int64'\}"):
        kvlinker_mamba.match_kv_cache(without_role(cache, "side_ngram"))


def test_a_side_state_without_a_format_is_refused() -> None:
    cache = without_fact(described(Hybrid(has_sides=True)), "side_ngram_format")

    with pytest.raises(ContractError, match="fact 'side_ngram_format' is missing"):
        kvlinker_mamba.match_kv_cache(cache)


def test_a_side_state_of_some_layers_must_say_which() -> None:
    cache = described(Hybrid(has_sides=True))
    two = cache.buffers["side_short_conv"][:2]
    cache = replace(cache, buffers={**cache.buffers, "side_short_conv": two})

    with pytest.raises(ContractError, match="'side_short_conv' has 2 buffers for 5 layers"):
        kvlinker_mamba.match_kv_cache(cache)


def test_states_of_drafts_are_refused() -> None:
    cache = described(Hybrid())
    buffers = {**cache.buffers, "draft_ssm_state": (MadeUpMemory().span(6, 32),)}

    with pytest.raises(UnsupportedKVCacheError, match=r"buffers \['draft_ssm_state'\] are unknown"):
        kvlinker_mamba.match_kv_cache(replace(cache, buffers=buffers))


@pytest.mark.parametrize("count", [-1, 1 << 40])
def test_a_number_of_convolutions_that_no_layer_has_is_refused_at_once(count: int) -> None:
    with pytest.raises(ContractError, match=f"conv_states must be 0 to 64, got {count}"):
        kvlinker_mamba.match_kv_cache(with_facts(described(Hybrid()), conv_states=count))


def test_a_window_of_no_token_is_refused() -> None:
    with pytest.raises(ContractError, match="conv_window must be at least 1 token, got 0"):
        kvlinker_mamba.match_kv_cache(with_facts(described(Hybrid()), conv_window=0))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"kv_family": "nsa"}, "kv_family 'nsa' is not laid out here; known are 'mha', 'swa'"),
        ({"ssm_format": "fp8_e4m3fn"}, "ssm_format 'fp8_e4m3fn' is not laid out here"),
        ({"ssm_layout": "other"}, "ssm_layout 'other' is not laid out here"),
        ({"conv_layout": "other"}, "conv_layout 'other' is not laid out here"),
        ({"conv_format": "int4"}, "conv_format 'int4' is not laid out here"),
    ],
)
def test_forms_that_nobody_laid_out_are_refused(facts: dict[str, Fact], message: str) -> None:
    with pytest.raises(UnsupportedKVCacheError, match=message):
        kvlinker_mamba.match_kv_cache(with_facts(described(Hybrid()), **facts))


@pytest.mark.parametrize(
    ("role", "row_bytes", "values"),
    [
        ("ssm_state", 30, "4 B, for values in fp32"),
        ("conv_state_0", 10, "6 B, for windows of 3 values in bf16"),
    ],
)
def test_rows_that_are_no_whole_values_are_refused(role: str, row_bytes: int, values: str) -> None:
    cache = halved(described(Hybrid()), role, row_bytes)

    with pytest.raises(
        ContractError, match=f"rows of {row_bytes} B, which is no multiple of {values}"
    ):
        kvlinker_mamba.match_kv_cache(cache)


def test_a_latent_that_is_not_whole_is_refused() -> None:
    cache = halved(described(Hybrid(pages="mla")), "latent", 20)

    with pytest.raises(ContractError, match="rows of 20 B, expected 40 B"):
        kvlinker_mamba.match_kv_cache(cache)


def test_a_packed_latent_has_one_number_of_values() -> None:
    cache = with_facts(described(Hybrid(pages="dsa")), latent_values=320)

    with pytest.raises(ContractError, match="holds 576 values, got latent_values 320; use bf16"):
        kvlinker_mamba.match_kv_cache(cache)


def test_a_head_major_row_that_is_no_page_is_refused() -> None:
    cache = with_facts(halved(described(Hybrid()), "k", 9), kv_layout="head_major")

    with pytest.raises(
        ContractError, match=r"'k\[0\]' has rows of 9 B, which is no multiple of 16 B, for pages"
    ):
        kvlinker_mamba.match_kv_cache(cache)


def test_scales_that_are_said_not_to_be_there_are_refused() -> None:
    cache = with_facts(described(Hybrid(facts={"kv_scaled": 1})), kv_scaled=0)

    with pytest.raises(
        ContractError, match=r"\['k_scale', 'v_scale'\] are described; state kv_scaled"
    ):
        kvlinker_mamba.match_kv_cache(cache)


SCALED: dict[str, Fact] = {"kv_scaled": 1, "kv_format": "fp4_e2m1_block16_e8m0"}


@pytest.mark.parametrize("layout", ["token_major", "head_major"])
@pytest.mark.parametrize("rows", [PAGE * PAGES, PAGES - 1])
@pytest.mark.parametrize("role", ["k_scale", "draft_v_scale"])
def test_b04_scales_that_are_not_one_row_for_each_page_are_refused(
    role: str, rows: int, layout: str
) -> None:
    cache = described(Hybrid(facts={**SCALED, "kv_layout": layout}, drafts=1))
    spans = tuple(replace(span, rows=rows) for span in cache.buffers[role])

    with pytest.raises(ContractError, match=f"has {rows} rows, expected {PAGES}, one per page"):
        kvlinker_mamba.match_kv_cache(replace(cache, buffers={**cache.buffers, role: spans}))


@pytest.mark.parametrize("name", ["nonsense", "fp8_e4m3fn", "fp4_e2m1_block16"])
def test_b04_values_whose_scales_are_of_an_unknown_form_are_refused_by_name(name: str) -> None:
    cache = described(Hybrid(facts={**SCALED, "kv_format": name}))

    with pytest.raises(UnsupportedKVCacheError, match=f"kv_format '{name}' .* known are 'fp4_e2m1"):
        kvlinker_mamba.match_kv_cache(cache)


@pytest.mark.parametrize("kind", ["conv", "sliding"])
def test_layers_of_kinds_that_the_cache_has_no_place_for_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedKVCacheError, match=f"layer 0 .* is of kind '{kind}'"):
        kvlinker_mamba.match_kv_cache(with_kind(described(Hybrid()), kind))


@pytest.mark.parametrize("indexer", [IndexerKind.NONE, IndexerKind.OWN])
def test_an_index_that_does_not_fit_its_layer_is_refused(indexer: IndexerKind) -> None:
    cache = described(Hybrid(pages="dsa", kinds=("attention", "mamba", "attention")))
    layer = 0 if indexer is IndexerKind.NONE else 2
    layers = [replace(la, indexer=indexer) if la.layer == layer else la for la in cache.layers]

    with pytest.raises(ContractError, match=f"indexer is said to be '{indexer.value}'"):
        kvlinker_mamba.match_kv_cache(replace(cache, layers=tuple(layers)))


def test_an_index_of_some_layers_must_say_which() -> None:
    cache = described(Hybrid(pages="dsa", kinds=("attention", "mamba", "attention")))
    one = cache.buffers["index_k"][:1]

    with pytest.raises(ContractError, match="'index_k' has 1 buffers for 2 layers of attention"):
        kvlinker_mamba.match_kv_cache(replace(cache, buffers={**cache.buffers, "index_k": one}))


SLOTS = LogicalPool(name="mamba", page_size=1, kind=PoolKind.SLOT)


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ([LogicalPool(name="kv", page_size=16)], "there is no logical pool 'mamba'"),
        ([SLOTS], "there is no logical pool 'kv'"),
        (
            [LogicalPool(name="kv", page_size=16), LogicalPool(name="mamba", page_size=16)],
            "'mamba' must be a pool of whole states, got paged",
        ),
        (
            [LogicalPool(name="kv", page_size=16), replace(SLOTS, window=1)],
            "'mamba' states the window 1",
        ),
    ],
)
def test_states_come_from_slots_and_pages_from_pages(
    pools: list[LogicalPool], message: str
) -> None:
    cache = replace(described(Hybrid()), logical_pools=tuple(pools))

    with pytest.raises((ContractError, UnsupportedKVCacheError), match=message):
        kvlinker_mamba.match_kv_cache(cache)


def test_windows_of_no_stated_length_are_refused() -> None:
    cache = described(Hybrid(pages="swa"))
    pools = tuple(replace(pool, window=None) for pool in cache.logical_pools)

    with pytest.raises(ContractError, match="'swa' states the window None"):
        kvlinker_mamba.match_kv_cache(replace(cache, logical_pools=pools))


@pytest.mark.parametrize(
    ("hybrid", "stated", "message"),
    [
        (Hybrid(pages="mla", drafts=1, head_drafts=1), 1, "says 1, but 2 are described"),
        (Hybrid(kinds=("mamba", "attention"), drafts=3), 3, "3 draft layers cannot ride on 2"),
    ],
)
def test_b08_drafts_are_all_described_and_all_ride(
    hybrid: Hybrid, stated: int, message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        kvlinker_mamba.match_kv_cache(with_facts(described(hybrid), draft_layers=stated))


def test_b08_drafts_with_half_of_their_buffers_are_refused() -> None:
    cache = without_role(described(Hybrid(drafts=1)), "draft_v")

    with pytest.raises(ContractError, match="draft buffers must come in equal numbers"):
        kvlinker_mamba.match_kv_cache(cache)


def test_a_stage_that_keeps_nothing_is_refused() -> None:
    cache = Hybrid(kinds=("mlp", "mamba", "attention")).describe(MadeUpMemory().span, 0, 1)

    with pytest.raises(ContractError, match="no layer keeps anything"):
        kvlinker_mamba.match_kv_cache(cache)
