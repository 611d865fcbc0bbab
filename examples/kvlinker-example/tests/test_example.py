"""What every model plugin should test: the claim, the layout, every byte, and each refusal by its message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvlinker_example
from kvlinker.description import KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.description_json import description_from_json
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.spans import BufferSpan
from kvlinker.testing.strategies import MadeUpMemory, PageRows, check_round_trip, check_strategy

PAGE, BLOCK, PAGES = 128, 64, 6
SLOT_BYTES = 24


def tensor_span(rows: int, row_bytes: int) -> BufferSpan:
    return BufferSpan.from_tensor(torch.zeros((rows, row_bytes), dtype=torch.uint8))


def describe(
    layers: int = 3,
    *,
    page: int = PAGE,
    block: int = BLOCK,
    allocate: Callable[[int, int], BufferSpan] | None = None,
) -> KVCacheDescription:
    """Describe a cache; made-up addresses will do for everything but the bytes themselves."""
    span = allocate or MadeUpMemory().span
    rows = PAGES * PAGE // max(block, 1)
    return KVCacheDescription(
        family="example_blocks",
        page_size=page,
        buffers={"blocks": tuple(span(rows, max(block, 1) * SLOT_BYTES) for _ in range(layers))},
        layers=tuple(LayerFacts(layer=i, global_layer=i) for i in range(layers)),
        logical_pools=(LogicalPool(name="kv", page_size=page),),
        facts={"kv_format": "bf16", "block_size": block},
    )


def test_the_whole_cache_is_claimed_and_laid_out_as_pages() -> None:
    group = check_strategy(kvlinker_example, describe(3))

    (entry,) = group.entries
    assert (entry.name, entry.rows_are_pages, entry.page_bytes) == ("kv", True, 3 * 128 * 24)
    assert entry.layer_mapping == {0: (0,), 1: (1,), 2: (2,)}


def test_b95_page_3_of_128_slots_covers_blocks_6_and_7_of_64() -> None:
    description = describe(1)
    first_block = description.buffers["blocks"][0].base_ptr
    (entry,) = check_strategy(kvlinker_example, description).entries

    ranges = entry.page_plan(entry.prepare_locations(range(3 * 128, 4 * 128))).expand()

    assert ranges.address.tolist() == [first_block + 6 * 64 * 24]
    assert ranges.size.tolist() == [2 * 64 * 24]


@pytest.mark.parametrize("block", [1, 32, 64, 128])
def test_every_byte_of_a_page_comes_back_in_other_pages(block: int) -> None:
    description = describe(block=block, allocate=tensor_span)
    group = check_strategy(kvlinker_example, description)

    page_rows = {"blocks": PageRows("kv", PAGE // block)}

    check_round_trip(group, description, page_rows, {"kv": {1: 4, 5: 0, 2: 2}})


def test_the_description_in_cache_json_is_laid_out() -> None:
    text = (Path(__file__).parents[1] / "cache.json").read_text()

    group = check_strategy(kvlinker_example, description_from_json(text))

    assert [entry.page_bytes for entry in group.entries] == [3 * 128 * 24]


def test_other_families_are_declined_in_silence() -> None:
    assert kvlinker_example.match_kv_cache(replace(describe(), family="mha")) is None


def test_a_buffer_that_is_not_known_is_refused_instead_of_dropped() -> None:
    description = describe()
    buffers = {**description.buffers, "rope": (MadeUpMemory().span(8, 8),)}

    with pytest.raises(UnsupportedKVCacheError, match=r"buffers \['rope'\] are unknown here"):
        kvlinker_example.match_kv_cache(replace(description, buffers=buffers))


@pytest.mark.parametrize(("page", "block"), [(128, 96), (64, 128), (128, 0), (128, -64)])
def test_pages_that_are_not_whole_blocks_are_refused_with_both_numbers(
    page: int, block: int
) -> None:
    with pytest.raises(
        ContractError, match=f"pages of {page} slots are not whole blocks of {block};"
    ):
        kvlinker_example.match_kv_cache(describe(page=page, block=block))


@pytest.mark.parametrize("name", ["block_size", "kv_format"])
def test_facts_are_never_guessed(name: str) -> None:
    facts = {key: value for key, value in describe().facts.items() if key != name}

    with pytest.raises(ContractError, match=f"fact '{name}' is missing"):
        kvlinker_example.match_kv_cache(replace(describe(), facts=facts))


def test_layers_without_a_buffer_are_refused() -> None:
    description = replace(describe(3), buffers=describe(2).buffers)

    with pytest.raises(ContractError, match="'blocks' has 2 buffers, expected 3, one per layer"):
        kvlinker_example.match_kv_cache(description)


def test_b96_page_sizes_that_differ_are_refused_with_both_numbers() -> None:
    with pytest.raises(ContractError, match="pages of 128 slots and the prefix tree pages of 256;"):
        kvlinker_example.match_kv_cache(replace(describe(), page_size=256))


def test_building_refuses_what_matching_refuses() -> None:
    with pytest.raises(ContractError, match="fact 'block_size' is missing"):
        kvlinker_example.build_direct_linker_pool_group(
            replace(describe(), facts={"kv_format": "bf16"})
        )


def test_the_plugin_states_the_api_that_it_was_written_for() -> None:
    assert kvlinker_example.describe_plugin().api_version == 1
