"""The resolver of layer mappings, for whole models and for any stage of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker_deepseek_v4 import resolve_layer_mappings, stage_layers

# config.json of deepseek-ai/DeepSeek-V4-Flash and -Pro, compress_ratios without the MTP layer.
FLASH = [0, 0, *[4, 128] * 20, 4]
PRO = [128, 128, *[4, 128] * 29, 4]


@pytest.mark.parametrize(
    ("ratios", "layers", "window_only", "c4", "c128"),
    [(FLASH, 43, 2, 21, 20), (PRO, 61, 0, 30, 31)],
)
def test_layer_counts_of_the_published_schedules(
    ratios: list[int], layers: int, window_only: int, c4: int, c128: int
) -> None:
    mappings = resolve_layer_mappings(stage_layers(ratios))

    assert (len(mappings.swa), len(mappings.c4), len(mappings.c128)) == (layers, c4, c128)
    assert layers - c4 - c128 == window_only


def test_parts_are_mapped_in_order_of_appearance_within_the_stage() -> None:
    mappings = resolve_layer_mappings(stage_layers([0, 4, 128, 4, 128, 0], start=1, end=5))

    assert mappings.swa == {0: (0,), 1: (1,), 2: (2,), 3: (3,)}
    assert mappings.c4 == mappings.c4_state == {0: (0,), 2: (1,)}
    assert mappings.c128 == {1: (0,), 3: (1,)}
    assert (mappings.c4_global_layers, mappings.c128_global_layers) == ((1, 3), (2, 4))
    assert mappings.draft_layers == 0


def test_stages_without_a_ratio_have_an_empty_mapping_for_it() -> None:
    mappings = resolve_layer_mappings(stage_layers(FLASH, start=0, end=2))

    assert mappings.swa == {0: (0,), 1: (1,)}
    assert mappings.c4 == mappings.c4_state == mappings.c128 == {}
    assert mappings.c4_global_layers == mappings.c128_global_layers == ()


def test_draft_windows_ride_on_the_first_layers() -> None:
    mappings = resolve_layer_mappings(stage_layers([0, 4, 128]), draft_layers=2)

    assert mappings.swa == {0: (0, 3), 1: (1, 4), 2: (2,)}
    assert mappings.c4 == {1: (0,)}
    assert mappings.draft_layers == 2


@pytest.mark.parametrize("drafts", [-1, 4])
def test_drafts_need_a_layer_each(drafts: int) -> None:
    with pytest.raises(ContractError, match=f"{drafts} draft layers cannot ride on 3 layers"):
        resolve_layer_mappings(stage_layers([0, 4, 128]), draft_layers=drafts)


@pytest.mark.parametrize("ratio", [3, 8, 64, 256])
def test_other_ratios_are_refused_with_layer_and_ratio(ratio: int) -> None:
    layers = list(stage_layers([0, 4, 128], start=1, end=3))
    layers[1] = replace(layers[1], compress_ratio=ratio)

    with pytest.raises(
        UnsupportedKVCacheError, match=rf"layer 1 \(global 2\) has compress ratio {ratio};"
    ):
        resolve_layer_mappings(layers)


@pytest.mark.parametrize(("start", "end"), [(0, 0), (2, 2), (3, 1), (-1, 2), (0, 5), (5, None)])
def test_a_stage_that_is_empty_or_leaves_the_model_is_refused(start: int, end: int | None) -> None:
    with pytest.raises(ContractError, match="is not within the model's 4 layers"):
        stage_layers([0, 4, 128, 4], start=start, end=end)


def test_mappings_cannot_be_changed() -> None:
    mappings = resolve_layer_mappings(stage_layers(PRO))

    with pytest.raises(TypeError):
        mappings.c4[0] = (0,)  # type: ignore[index]  # what is tested


@given(st.data())
def test_stages_together_map_what_the_whole_model_maps(data: st.DataObject) -> None:
    ratios = data.draw(st.lists(st.sampled_from([0, 4, 128]), min_size=1, max_size=40))
    cuts = data.draw(st.sets(st.integers(1, len(ratios)), max_size=4))
    bounds = sorted({0, *cuts, len(ratios)})

    whole = resolve_layer_mappings(stage_layers(ratios))
    stages = [
        resolve_layer_mappings(stage_layers(ratios, start=start, end=end))
        for start, end in pairwise(bounds)
    ]

    assert [g for stage in stages for g in stage.c4_global_layers] == list(whole.c4_global_layers)
    assert [g for s in stages for g in s.c128_global_layers] == list(whole.c128_global_layers)
    for start, stage in zip(bounds, stages, strict=False):
        assert [start + layer for layer in stage.c4] == list(stage.c4_global_layers)
        assert [start + layer for layer in stage.c128] == list(stage.c128_global_layers)
        for mapping in (stage.swa, stage.c4, stage.c4_state, stage.c128):
            assert list(mapping.values()) == [(i,) for i in range(len(mapping))]
