"""Caches of hybrids that are refused, and what the refusal says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import kvlinker_swa
from kvlinker.description import Fact, KVCacheDescription, LayerFacts, LogicalPool, PoolKind
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.spans import BufferSpan
from kvlinker.testing.strategies import MadeUpMemory

PAGE, PAGES = 16, 5
FACTS: dict[str, Fact] = {"kv_layout": "token_major", "kv_format": "bf16", "kv_scaled": 0}
F, S = "attention", "sliding"


def spans(count: int, rows: int = PAGE * PAGES, row_bytes: int = 64) -> tuple[BufferSpan, ...]:
    memory = MadeUpMemory()
    return tuple(memory.span(rows, row_bytes) for _ in range(count))


def describe(kinds: Sequence[str] = (S, F, S), *, drafts: int = 0) -> KVCacheDescription:
    """Describe a cache that is taken."""
    counts = {"": kinds.count(F), "swa_": kinds.count(S), "draft_": drafts, "draft_swa_": drafts}
    buffers = {f"{prefix}{role}": count for prefix, count in counts.items() for role in "kv"}
    return KVCacheDescription(
        family="swa",
        page_size=PAGE,
        buffers={role: spans(count) for role, count in buffers.items() if count},
        layers=tuple(
            LayerFacts(layer=i, global_layer=i, kind=kind) for i, kind in enumerate(kinds)
        ),
        logical_pools=(
            LogicalPool(name="kv", page_size=PAGE),
            LogicalPool(name="swa", page_size=PAGE, window=128),
        ),
        facts=FACTS,
    )


def with_facts(description: KVCacheDescription, **facts: Fact) -> KVCacheDescription:
    return replace(description, facts={**description.facts, **facts})


def with_buffers(
    description: KVCacheDescription, **buffers: tuple[BufferSpan, ...]
) -> KVCacheDescription:
    return replace(description, buffers={**description.buffers, **buffers})


def without(description: KVCacheDescription, role: str) -> KVCacheDescription:
    return replace(description, buffers={k: v for k, v in description.buffers.items() if k != role})


def with_kind(description: KVCacheDescription, layer: int, kind: str) -> KVCacheDescription:
    layers = [
        replace(facts, kind=kind) if facts.layer == layer else facts for facts in description.layers
    ]
    return replace(description, layers=tuple(layers))


def with_pool(description: KVCacheDescription, pool: LogicalPool) -> KVCacheDescription:
    """Return the cache with a logical pool in the place of the one of its name."""
    pools = [pool if other.name == pool.name else other for other in description.logical_pools]
    return replace(description, logical_pools=tuple(pools))


def without_pool(description: KVCacheDescription, name: str) -> KVCacheDescription:
    pools = tuple(pool for pool in description.logical_pools if pool.name != name)
    return replace(description, logical_pools=pools)


def refusal(description: KVCacheDescription) -> str:
    """Return what matching says, after checking that building says the same."""
    with pytest.raises((ContractError, UnsupportedKVCacheError)) as matching:
        kvlinker_swa.match_kv_cache(description)
    with pytest.raises(type(matching.value)) as building:
        kvlinker_swa.build_direct_linker_pool_group(description)
    assert str(building.value) == str(matching.value)
    return str(matching.value)


def test_what_is_varied_below_is_taken() -> None:
    assert kvlinker_swa.match_kv_cache(describe()) is not None
    assert kvlinker_swa.match_kv_cache(describe(drafts=1)) is not None


def test_other_families_are_declined_in_silence() -> None:
    assert kvlinker_swa.match_kv_cache(replace(describe(), family="mha")) is None


# ---- kinds of layers --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chunked", "chunked_attention"])
def test_layers_that_attend_within_chunks_are_no_windows(kind: str) -> None:
    message = refusal(with_kind(describe(), 2, kind))

    assert "layers [2] attend within chunks" in message
    assert "what a boundary needs depends on where it lies in its chunk" in message


def test_windows_that_a_fact_calls_chunks_are_refused() -> None:
    message = refusal(with_facts(describe(), attention_chunk_size=8192))

    assert "attend within chunks (attention_chunk_size 8192)" in message


def test_no_chunks_may_be_stated() -> None:
    description = with_facts(describe(), attention_chunk_size=0)

    assert kvlinker_swa.match_kv_cache(description) is not None


def test_layers_of_another_kind_are_refused_by_layer_and_kind() -> None:
    message = refusal(with_kind(describe(), 1, "mamba"))

    assert "layer 1 (global 1) is of kind 'mamba'" in message
    assert "only ['attention', 'sliding'] are laid out here" in message


def test_a_layer_of_the_other_kind_misses_its_buffers() -> None:
    message = refusal(with_kind(describe(), 1, S))

    assert "'k' has 1 buffers, expected 0, one per layer of full attention" in message


# ---- index spaces -----------------------------------------------------------------------------


def test_a_model_without_windows_is_another_family() -> None:
    message = refusal(without_pool(describe([F, F]), "swa"))

    assert "no layer of the model looks through a window; describe the cache as family 'mha'" in (
        message
    )


def test_a_model_of_windows_alone_is_refused_with_the_reason() -> None:
    message = refusal(without_pool(describe([S, S]), "kv"))

    assert "every layer of the model looks through a window" in message
    assert "a prefix is known by its pages of 'kv'" in message


def test_a_window_pool_that_states_no_window_is_refused() -> None:
    message = refusal(with_pool(describe(), LogicalPool(name="swa", page_size=PAGE)))

    assert "logical pool 'swa' states no window; state how many slots before a boundary" in message


def test_a_window_of_full_layers_is_refused() -> None:
    message = refusal(with_pool(describe(), LogicalPool(name="kv", page_size=PAGE, window=128)))

    assert "logical pool 'kv' states a window of 128 slots, and its layers need every page" in (
        message
    )


@pytest.mark.parametrize("name", ["kv", "swa"])
def test_b96_a_logical_pool_of_other_pages_is_refused_with_both_numbers(name: str) -> None:
    window = 128 if name == "swa" else None

    message = refusal(with_pool(describe(), LogicalPool(name=name, page_size=64, window=window)))

    assert f"'{name}' has pages of 64 slots and the prefix tree pages of 16" in message


def test_windows_that_are_not_allocated_in_pages_are_refused() -> None:
    slots = LogicalPool(name="swa", page_size=1, kind=PoolKind.SLOT, window=128)

    assert "logical pool 'swa' must be paged, got slot" in refusal(with_pool(describe(), slots))


def test_other_logical_pools_are_refused() -> None:
    description = describe()
    mamba = LogicalPool(name="mamba", page_size=1, kind=PoolKind.SLOT)

    message = refusal(replace(description, logical_pools=(*description.logical_pools, mamba)))

    assert "logical pools ['mamba'] are unknown here" in message


# ---- facts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FACTS)
def test_facts_are_never_guessed(name: str) -> None:
    facts = {key: value for key, value in FACTS.items() if key != name}

    assert f"fact '{name}' is missing" in refusal(replace(describe(), facts=facts))


@pytest.mark.parametrize("prefix", ["", "swa_"])
@pytest.mark.parametrize(
    ("name", "value"), [("kv_layout", "block_major"), ("kv_scaled", 2), ("kv_scaled", -1)]
)
def test_unknown_values_of_facts_are_refused(prefix: str, name: str, value: Fact) -> None:
    message = refusal(with_facts(describe(), **{f"{prefix}{name}": value}))

    assert f"{prefix}{name} {value!r} is not laid out here; known are" in message


@pytest.mark.parametrize("name", ["kv_format", "swa_kv_format"])
def test_a_format_is_text(name: str) -> None:
    message = refusal(with_facts(describe(), **{name: 8}))

    assert f"fact '{name}' must be a non-empty text, got 8" in message


def test_unknown_facts_are_refused_for_they_may_change_what_bytes_mean() -> None:
    message = refusal(with_facts(describe(), swa_sink_tokens=4))

    assert "facts {'swa_sink_tokens': 4} are unknown here" in message


# ---- buffers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["k", "v", "swa_k", "swa_v"])
def test_b02_a_cache_without_one_of_its_parts_is_refused_instead_of_shrunk(role: str) -> None:
    assert f"buffers ['{role}'] are missing" in refusal(without(describe(), role))


@pytest.mark.parametrize(
    ("role", "expected", "attention"),
    [("k", 1, "full attention"), ("swa_v", 2, "sliding-window attention")],
)
def test_a_buffer_count_other_than_one_per_layer_is_refused(
    role: str, expected: int, attention: str
) -> None:
    message = refusal(with_buffers(describe(), **{role: spans(3)}))

    assert f"{role!r} has 3 buffers, expected {expected}, one per layer of {attention}" in message


@pytest.mark.parametrize(("kinds", "role"), [([F, F], "swa_k"), ([S], "k")])
def test_buffers_of_a_kind_that_the_stage_has_no_layers_of_are_refused(
    kinds: list[str], role: str
) -> None:
    message = refusal(with_buffers(describe(kinds), **{role: spans(1)}))

    assert f"{role!r} has 1 buffers, expected 0" in message


def test_unknown_roles_are_refused() -> None:
    message = refusal(with_buffers(describe(), sink_k=spans(1)))

    assert "buffers ['sink_k'] are unknown here" in message


def test_dh2_a_buffer_without_rows_is_refused() -> None:
    empty = BufferSpan.from_tensor(torch.empty((0, 64), dtype=torch.uint8))

    assert "span 'v[0]' has no rows" in refusal(with_buffers(describe(), v=(empty,)))


@pytest.mark.parametrize("role", ["k", "swa_k", "draft_v", "draft_swa_v"])
def test_head_major_rows_that_are_no_pages_are_refused(role: str) -> None:
    description = with_facts(describe(drafts=1), kv_layout="head_major")
    paged = {name: spans(len(held), PAGES, 1024) for name, held in description.buffers.items()}
    wrong = spans(len(paged[role]), PAGES, 1025)

    message = refusal(with_buffers(description, **{**paged, role: wrong}))

    assert f"span '{role}[0]' has rows of 1025 B, which are no pages of 16 slots" in message


# ---- scales -----------------------------------------------------------------------------------


def scaled() -> KVCacheDescription:
    """Describe a cache that is taken, whose values of full attention have scales."""
    roles = [f"{prefix}{role}_scale" for prefix in ("", "draft_") for role in "kv"]
    return with_facts(
        with_buffers(describe([F, S], drafts=1), **{role: spans(1, rows=PAGES) for role in roles}),
        kv_format="fp4_e2m1_block16_e8m0",
        kv_scaled=1,
        swa_kv_format="bf16",
        swa_kv_scaled=0,
    )


@pytest.mark.parametrize(
    ("facts", "attention"),
    [
        ({"kv_scaled": 1}, "full attention"),
        ({"kv_scaled": 0, "swa_kv_scaled": 1}, "sliding-window attention"),
    ],
)
def test_b04_scaled_values_without_their_scales_are_refused(
    facts: dict[str, Fact], attention: str
) -> None:
    message = refusal(with_facts(describe(), **facts))

    assert f"the values of {attention} are scaled, and their scales are not described" in message


def test_b04_half_of_the_scales_is_refused() -> None:
    description = with_buffers(describe(), swa_k_scale=spans(2))

    message = refusal(with_facts(description, swa_kv_scaled=1))

    assert "(got ['swa_k_scale'], expected ['swa_k_scale', 'swa_v_scale'])" in message


def test_b04_scaled_drafts_without_their_scales_are_refused() -> None:
    description = scaled()
    assert kvlinker_swa.match_kv_cache(description) is not None

    message = refusal(without(description, "draft_v_scale"))

    assert "'draft_k_scale': 1, 'draft_v_scale': 0" in message


@pytest.mark.parametrize("rows", [PAGE * PAGES, PAGES + 1])
@pytest.mark.parametrize("role", ["k_scale", "draft_v_scale"])
def test_b04_scales_that_are_not_one_row_for_each_page_are_refused(role: str, rows: int) -> None:
    message = refusal(with_buffers(scaled(), **{role: spans(1, rows=rows)}))

    assert f"has {rows} rows, expected {PAGES}, one per page of" in message


@pytest.mark.parametrize("name", ["nonsense", "fp8_e4m3fn", "fp4_e2m1_block16"])
def test_b04_values_whose_scales_are_of_an_unknown_form_are_refused_by_name(name: str) -> None:
    message = refusal(with_facts(scaled(), kv_format=name))

    assert f"kv_format '{name}' is not laid out here; known are 'fp4_e2m1" in message


@pytest.mark.parametrize("role", ["k_scale", "draft_v_scale", "swa_v_scale"])
def test_scales_of_values_that_are_said_to_have_none_are_refused(role: str) -> None:
    message = refusal(with_buffers(describe(), **{role: spans(1)}))

    assert f"are said to need no scales, but ['{role}'] are described; state kv_scaled" in message


# ---- drafts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stated", [0, 1, 3])
def test_b08_drafts_other_than_those_that_are_stated_are_refused(stated: int) -> None:
    message = refusal(with_facts(describe(drafts=1), draft_layers=stated))

    assert f"'draft_layers' says {stated}, but 2 are described ({{'kv': 1, 'swa': 1}})" in message


@pytest.mark.parametrize("role", ["draft_v", "draft_swa_k"])
def test_a_draft_k_without_its_v_is_refused(role: str) -> None:
    message = refusal(without(describe(drafts=1), role))

    assert "draft buffers must come in equal numbers" in message
    assert f"'{role}': 0" in message


def test_more_drafts_than_layers_are_refused() -> None:
    assert "4 draft layers cannot ride on 3 layers" in refusal(describe(drafts=2))
