"""Ratios 1 and 2 of V4.1: some layers keep KV and index keys, and later layers of the same ratio read theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import kvlinker_deepseek_v4
from kvlinker.description import IndexerKind, KVCacheDescription, LogicalPool
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.spans import BufferSpan
from kvlinker.testing.strategies import PageRows, check_round_trip, check_strategy
from kvlinker_deepseek_v4 import V4Formats, resolve_layer_mappings, stage_layers, v4_pools

RATIOS, SOURCES = (0, 2, 2, 1, 1), (1, 3)
PAGE, PAGES = 256, 5
ROWS = {"c1_indexer": 4, "c2_indexer": 2}
"""Rows of 64 keys in a page of 256 slots."""


def describe(
    ratios: Sequence[int] = RATIOS, sources: Sequence[int] = SOURCES, *, page: int = PAGE
) -> KVCacheDescription:
    layers = stage_layers(ratios, kv_source_layers=sources)
    formats = V4Formats(page_size=page, shared_indexer_format="fp4_fused_rne_rows64")
    return KVCacheDescription(
        family="deepseek_v4",
        page_size=page,
        buffers={
            pool.role: tuple(
                BufferSpan.from_tensor(
                    torch.zeros((PAGES * pool.rows_per_page, pool.row_bytes), dtype=torch.uint8)
                )
                for _ in range(pool.spans)
            )
            for pool in v4_pools(formats, resolve_layer_mappings(layers))
        },
        layers=layers,
        logical_pools=(
            LogicalPool(name="kv", page_size=page),
            LogicalPool(name="swa", page_size=page, window=128),
        ),
        facts={
            "kv_format": "fp8_e4m3fn_ue8m0",
            "indexer_format": "fp8_fused",
            "shared_indexer_format": "fp4_fused_rne_rows64",
            "state_ring_rows": 8,
            "state_format": "fp32",
            "swa_page_size": page,
            "swa_physical_page_size": page,
            "unified_kv": 0,
            "hisparse": 0,
            "c128_state_persistent": 0,
        },
    )


def with_kinds(*kinds: IndexerKind) -> KVCacheDescription:
    """Describe the layers as keeping or reading KV otherwise, by layer."""
    description = describe()
    pairs = zip(description.layers, kinds, strict=True)
    return replace(description, layers=tuple(replace(facts, indexer=kind) for facts, kind in pairs))


# ---- the layout -------------------------------------------------------------------------------


def test_what_layers_share_comes_with_the_one_that_keeps_it() -> None:
    group = check_strategy(kvlinker_deepseek_v4, describe())

    found = {
        entry.name: (entry.indices_from_pool, entry.layer_mapping, entry.page_bytes)
        for entry in group.entries
    }
    assert found == {
        "swa": ("swa", {layer: (layer,) for layer in range(5)}, 5 * 149_760),
        "deepseek_v4_c1": ("kv", {3: (0,)}, 149_760),
        "deepseek_v4_c1_indexer": ("kv", {3: (0,)}, 256 * 68),
        "deepseek_v4_c2": ("kv", {1: (0,)}, 74_880),
        "deepseek_v4_c2_indexer": ("kv", {1: (0,)}, 128 * 68),
    }


def test_several_layers_of_a_ratio_may_keep_kv() -> None:
    mappings = resolve_layer_mappings(stage_layers((1, 1, 2, 1, 2), kv_source_layers=(0, 2, 3)))

    assert (dict(mappings.c1), dict(mappings.c2)) == ({0: (0,), 3: (1,)}, {2: (0,)})


def test_every_byte_that_layers_share_comes_back_in_other_pages() -> None:
    description = describe()
    page_rows = {
        role: PageRows("swa" if role == "swa_kv" else "kv", ROWS.get(role, 1))
        for role in description.buffers
    }

    group = check_strategy(kvlinker_deepseek_v4, description)

    check_round_trip(group, description, page_rows, {"kv": {1: 4, 3: 0}, "swa": {0: 2, 4: 1}})


@pytest.mark.parametrize("role", ROWS)
def test_rows_of_keys_behind_the_last_page_are_no_page(role: str) -> None:
    description = describe()
    rows = PAGES * ROWS[role] + 1
    longer = BufferSpan.from_tensor(torch.zeros((rows, 64 * 68), dtype=torch.uint8))

    group = check_strategy(
        kvlinker_deepseek_v4,
        replace(description, buffers={**description.buffers, role: (longer,)}),
    )

    entry = group.entry_map[f"deepseek_v4_{role}"]
    assert [span.rows for span in entry.spans] == [PAGES]
    with pytest.raises(ContractError, match="out of bounds"):
        entry.prepare_locations(range(PAGES * PAGE, (PAGES + 1) * PAGE))


# ---- refusals ---------------------------------------------------------------------------------

OWN, SHARED, NONE = IndexerKind.OWN, IndexerKind.SHARED, IndexerKind.NONE


@pytest.mark.parametrize(
    ("kinds", "layer"),
    [
        pytest.param((NONE, SHARED, SHARED, OWN, SHARED), 1, id="nothing_kept"),
        pytest.param((NONE, SHARED, OWN, OWN, SHARED), 1, id="kept_too_late"),
        pytest.param((NONE, OWN, SHARED, SHARED, SHARED), 3, id="kept_for_another_ratio"),
        pytest.param((NONE, OWN, NONE, OWN, SHARED), 2, id="neither"),
    ],
)
def test_a_layer_that_has_nothing_to_read_is_refused(
    kinds: Sequence[IndexerKind], layer: int
) -> None:
    with pytest.raises(ContractError, match=rf"layer {layer} \(global {layer}\) of compress ratio"):
        kvlinker_deepseek_v4.match_kv_cache(with_kinds(*kinds))


@pytest.mark.parametrize("role", ["c1_kv", "c1_indexer", "c2_kv", "c2_indexer"])
def test_what_layers_share_is_never_left_out(role: str) -> None:
    whole = describe()
    buffers = {name: spans for name, spans in whole.buffers.items() if name != role}

    with pytest.raises(ContractError, match=f"'{role}' has 0 buffers, expected 1, one per layer"):
        kvlinker_deepseek_v4.match_kv_cache(replace(whole, buffers=buffers))


def test_a_layer_more_that_keeps_kv_needs_a_buffer() -> None:
    with pytest.raises(ContractError, match="'c2_kv' has 1 buffers, expected 2"):
        kvlinker_deepseek_v4.match_kv_cache(with_kinds(NONE, OWN, OWN, OWN, SHARED))


def test_index_keys_of_an_unstated_format_are_refused() -> None:
    whole = describe()
    facts = {name: fact for name, fact in whole.facts.items() if name != "shared_indexer_format"}

    with pytest.raises(ContractError, match="'shared_indexer_format' is missing"):
        kvlinker_deepseek_v4.match_kv_cache(replace(whole, facts=facts))


def test_index_keys_of_another_format_are_refused() -> None:
    whole = describe()
    facts = {**whole.facts, "shared_indexer_format": "fp4_fused_rows8"}

    with pytest.raises(UnsupportedKVCacheError, match="shared_indexer_format 'fp4_fused_rows8'"):
        kvlinker_deepseek_v4.match_kv_cache(replace(whole, facts=facts))


def test_pages_without_whole_rows_of_index_keys_are_refused() -> None:
    formats = V4Formats(page_size=128, shared_indexer_format="fp4_fused_rne_rows64")

    assert formats.shared_indexer_rows(2) == (1, 64 * 68)
    with pytest.raises(ContractError, match="has 32 index keys of compress ratio 4, no whole rows"):
        formats.shared_indexer_rows(4)
