"""MLA caches, from the description alone: what is claimed, laid out and refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import kvlinker_mla
from kvlinker.description import (
    Fact,
    IndexArray,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
    RankAxis,
    Replication,
)
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.spans import BufferSpan
from kvlinker.testing.strategies import MadeUpMemory, PageRows, check_round_trip, check_strategy

PAGE, PAGES = 16, 6
ROW_BYTES = {
    "bf16": 1152,
    "fp16": 1152,
    "fp32": 2304,
    "fp8_e4m3fn": 576,
    "fp8_packed_656": 656,
}
FP4 = "fp4_e2m1_block16_e8m0"


def tensor_span(rows: int, row_bytes: int) -> BufferSpan:
    return BufferSpan.from_tensor(torch.zeros((rows, row_bytes), dtype=torch.uint8))


def describe(
    layers: int = 3,
    *,
    drafts: int = 0,
    kv_format: str = "bf16",
    row_bytes: int | None = None,
    page: int = PAGE,
    first_layer: int = 0,
    allocate: Callable[[int, int], BufferSpan] | None = None,
) -> KVCacheDescription:
    span = allocate or MadeUpMemory().span
    size = row_bytes or ROW_BYTES[kv_format]
    buffers = {"latent": tuple(span(PAGES * page, size) for _ in range(layers))}
    if drafts:
        buffers["draft_latent"] = tuple(span(PAGES * page, size) for _ in range(drafts))
    return KVCacheDescription(
        family="mla",
        page_size=page,
        buffers=buffers,
        layers=tuple(LayerFacts(layer=i, global_layer=first_layer + i) for i in range(layers)),
        logical_pools=(LogicalPool(name="kv", page_size=page),),
        facts={"kv_format": kv_format},
    )


def with_facts(description: KVCacheDescription, **facts: Fact) -> KVCacheDescription:
    return replace(description, facts={**description.facts, **facts})


# ---- the layout -------------------------------------------------------------------------------


def test_latent_rows_are_slots_of_one_entry() -> None:
    group = check_strategy(kvlinker_mla, describe(3, first_layer=7))

    (entry,) = group.entries
    assert (entry.name, entry.indices_from_pool, entry.rows_are_pages) == ("kv", "kv", False)
    assert entry.layer_mapping == {0: (0,), 1: (1,), 2: (2,)}
    assert (entry.page_bytes, entry.value_format) == (3 * 16 * 1152, "bf16")
    assert (group.layout, group.layer_range) == ("mla/1", (7, 10))


@pytest.mark.parametrize(
    ("kv_format", "bytes_per_token"),
    [("bf16", 70_272), ("fp8_e4m3fn", 35_136), ("fp8_packed_656", 40_016)],
)
@pytest.mark.parametrize("page", [1, 16, 64])
def test_bytes_per_token_of_deepseek_v3(kv_format: str, bytes_per_token: int, page: int) -> None:
    # config.json of deepseek-ai/DeepSeek-V3: 61 layers, kv_lora_rank 512, qk_rope_head_dim 64.
    group = check_strategy(kvlinker_mla, describe(61, kv_format=kv_format, page=page))

    assert group.entries[0].page_bytes == bytes_per_token * page


def test_a_model_may_state_another_number_of_latent_values() -> None:
    # config.json of openbmb/MiniCPM3-4B: 62 layers, kv_lora_rank 256, qk_rope_head_dim 32.
    description = with_facts(describe(62, row_bytes=288 * 2), latent_values=288)

    group = check_strategy(kvlinker_mla, description)

    assert group.entries[0].page_bytes == 62 * 576 * PAGE


def test_drafts_ride_on_the_first_layers() -> None:
    group = check_strategy(kvlinker_mla, describe(3, drafts=2))

    assert group.entries[0].layer_mapping == {0: (0, 3), 1: (1, 4), 2: (2,)}
    assert group.entries[0].page_bytes == 5 * 16 * 1152


def test_formats_of_one_size_give_different_layouts() -> None:
    formats = {
        kv_format: check_strategy(kvlinker_mla, describe(kv_format=kv_format)).fingerprint
        for kv_format in ROW_BYTES
    }

    assert len(set(formats.values())) == len(ROW_BYTES)


def test_the_entry_takes_index_map_and_replication_from_the_description() -> None:
    def reversed_order(slots: IndexArray) -> IndexArray:
        return slots[::-1]

    axes = (RankAxis(name="dcp", rank=1, size=2), RankAxis(name="tp", rank=0, size=2))
    description = replace(
        describe(),
        index_maps={"kv": reversed_order},
        replication=Replication(axes=axes, sharded_over={"latent": frozenset({"dcp"})}),
    )

    (entry,) = check_strategy(kvlinker_mla, description).entries

    assert entry.translate_indices([1, 2]).tolist() == [2, 1]
    assert (entry.replicated, entry.rank_axes, entry.is_writer) == (False, (axes[0],), True)


@pytest.mark.parametrize("kv_format", ROW_BYTES)
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_b08_every_byte_of_a_page_comes_back_in_other_pages_drafts_included(
    kv_format: str, drafts: int
) -> None:
    description = describe(3, drafts=drafts, kv_format=kv_format, allocate=tensor_span)
    page_rows = {role: PageRows("kv", PAGE) for role in description.buffers}

    group = check_strategy(kvlinker_mla, description)

    check_round_trip(group, description, page_rows, {"kv": {1: 4, 5: 0, 2: 2}})


# ---- shares of pages --------------------------------------------------------------------------


def share(rank: int, *, count: int = PAGE // 2, ranks: int = 2) -> KVCacheDescription:
    """Return the cache of a rank that takes the slots of a page in turn with others."""
    description = describe(
        row_bytes=count * 1152, allocate=lambda _, size: tensor_span(PAGES, size)
    )
    axes = (RankAxis(name="dcp", rank=rank, size=ranks),)
    replication = Replication(axes=axes, sharded_over={"latent": frozenset({"dcp"})})
    return with_facts(replace(description, replication=replication), latents_in_row=count)


def test_k3_a_share_of_a_page_is_a_row_of_its_own_rank() -> None:
    for rank in range(2):
        group = check_strategy(kvlinker_mla, share(rank))

        (entry,) = group.entries
        assert (entry.rows_are_pages, entry.page_size, entry.page_bytes) == (True, 16, 3 * 8 * 1152)
        assert entry.rank_axes == (RankAxis(name="dcp", rank=rank, size=2),)
        assert entry.is_writer
        assert entry.prepare_locations(range(16, 48)).row.tolist() == [1, 2]


def test_shares_that_make_no_page_are_refused() -> None:
    for description in (
        share(0, count=4),
        share(0, ranks=4),
        with_facts(describe(), latents_in_row=8),
    ):
        with pytest.raises(
            ContractError, match=r"latents_in_row \d+ on each of \d ranks .* do not make a page"
        ):
            kvlinker_mla.match_kv_cache(description)


def test_drafts_beside_shares_are_refused() -> None:
    description = share(0)
    buffers = {**description.buffers, "draft_latent": (tensor_span(PAGES, 8 * 1152),)}

    with pytest.raises(UnsupportedKVCacheError, match=r"1 drafts .* without drafts and scales"):
        kvlinker_mla.match_kv_cache(replace(description, buffers=buffers))


# ---- scales -----------------------------------------------------------------------------------


def describe_fp4(
    layers: int = 3,
    *,
    drafts: int = 0,
    page: int = PAGE,
    scale_rows: int = PAGES,
    allocate: Callable[[int, int], BufferSpan] | None = None,
) -> KVCacheDescription:
    """Describe latents of two values a byte, with an exponent for each 16 of them: 36 B a slot."""
    span = allocate or MadeUpMemory().span
    latents = describe(
        layers, drafts=drafts, kv_format=FP4, row_bytes=288, page=page, allocate=allocate
    )
    scales = {
        f"{role}_scale": tuple(span(scale_rows, page * 36) for _ in spans)
        for role, spans in latents.buffers.items()
    }
    return replace(latents, buffers={**latents.buffers, **scales})


def test_scales_are_an_entry_of_their_own_whose_rows_are_pages() -> None:
    group = check_strategy(kvlinker_mla, describe_fp4())

    latents, scales = group.entries
    assert (latents.name, latents.rows_are_pages, latents.page_bytes) == ("kv", False, 3 * 16 * 288)
    assert (scales.name, scales.rows_are_pages, scales.page_bytes) == (
        "kv_scale",
        True,
        3 * 16 * 36,
    )
    assert (scales.indices_from_pool, scales.layer_mapping) == ("kv", latents.layer_mapping)
    assert (latents.value_format, scales.value_format) == (FP4, f"{FP4}_scale")


def test_a_token_of_deepseek_v3_takes_a_little_more_than_a_quarter_in_fp4() -> None:
    group = check_strategy(kvlinker_mla, describe_fp4(61))

    assert sum(entry.page_bytes for entry in group.entries) == PAGE * 61 * (288 + 36)


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_b08_every_scale_of_a_page_comes_back_in_other_pages_drafts_included(drafts: int) -> None:
    description = describe_fp4(drafts=drafts, allocate=tensor_span)
    page_rows = {
        role: PageRows("kv", 1 if role.endswith("scale") else PAGE) for role in description.buffers
    }

    group = check_strategy(kvlinker_mla, description)

    check_round_trip(group, description, page_rows, {"kv": {1: 4, 5: 0, 2: 2}})


@pytest.mark.parametrize("left_out", ["latent_scale", "draft_latent_scale"])
def test_scaled_latents_without_their_scales_are_refused(left_out: str) -> None:
    whole = describe_fp4(drafts=1)
    buffers = {role: spans for role, spans in whole.buffers.items() if role != left_out}

    with pytest.raises(ContractError, match=left_out):
        kvlinker_mla.match_kv_cache(replace(whole, buffers=buffers))


def test_scales_of_latents_without_any_are_refused() -> None:
    scales = {"latent_scale": describe_fp4().buffers["latent_scale"]}

    with pytest.raises(UnsupportedKVCacheError, match=r"buffers \['latent_scale'\] are unknown"):
        kvlinker_mla.match_kv_cache(replace(describe(), buffers={**describe().buffers, **scales}))


@pytest.mark.parametrize("rows", [PAGES - 1, PAGES + 1])
def test_scales_without_a_row_for_each_page_are_refused(rows: int) -> None:
    with pytest.raises(ContractError, match=f"has {rows} rows, expected {PAGES}, one per page of"):
        kvlinker_mla.match_kv_cache(describe_fp4(scale_rows=rows))


def test_draft_scales_without_a_row_for_each_page_are_refused() -> None:
    whole, short = describe_fp4(drafts=1), describe_fp4(drafts=1, scale_rows=PAGES - 1)
    draft = {"draft_latent_scale": short.buffers["draft_latent_scale"]}

    with pytest.raises(ContractError, match=r"'draft_latent_scale\[0\]' has 5 rows, expected 6"):
        kvlinker_mla.match_kv_cache(replace(whole, buffers={**whole.buffers, **draft}))


def test_scales_of_another_number_of_values_are_refused() -> None:
    whole = describe_fp4()
    short = tuple(MadeUpMemory().span(PAGES, PAGE * 35) for _ in range(3))

    with pytest.raises(ContractError, match="rows of 560 B, expected 576 B"):
        kvlinker_mla.match_kv_cache(
            replace(whole, buffers={**whole.buffers, "latent_scale": short})
        )


def test_blocks_that_are_not_whole_are_refused() -> None:
    with pytest.raises(ContractError, match="holds blocks of 16 values, got latent_values 290"):
        kvlinker_mla.match_kv_cache(with_facts(describe_fp4(), latent_values=290))


# ---- refusals ---------------------------------------------------------------------------------


def test_other_families_are_declined_in_silence() -> None:
    assert kvlinker_mla.match_kv_cache(replace(describe(), family="dsa")) is None


def test_b02_a_cache_with_an_indexer_is_never_taken_without_it() -> None:
    index = (MadeUpMemory().span(PAGES, PAGE * 132),)
    description = describe()

    with pytest.raises(UnsupportedKVCacheError, match=r"buffers \['index_k'\] are unknown here"):
        kvlinker_mla.match_kv_cache(
            replace(description, buffers={**description.buffers, "index_k": index})
        )


def test_a_cache_without_latents_is_refused() -> None:
    with pytest.raises(ContractError, match=r"buffers \['latent'\] are missing"):
        kvlinker_mla.match_kv_cache(replace(describe(), buffers={}))


def test_b08_drafts_that_the_engine_has_and_does_not_describe_are_refused() -> None:
    with pytest.raises(ContractError, match="'draft_layers' says 1, but 0 are described"):
        kvlinker_mla.match_kv_cache(with_facts(describe(), draft_layers=1))


def test_more_drafts_than_layers_are_refused() -> None:
    with pytest.raises(ContractError, match="4 draft layers cannot ride on 3 layers"):
        kvlinker_mla.match_kv_cache(describe(3, drafts=4))


def test_b96_page_sizes_that_differ_are_refused_with_both_numbers() -> None:
    with pytest.raises(ContractError, match="pages of 16 slots and the prefix tree pages of 64;"):
        kvlinker_mla.match_kv_cache(replace(describe(), page_size=64))


def test_trailing_windows_are_refused() -> None:
    pools = (*describe().logical_pools, LogicalPool(name="swa", page_size=PAGE, window=128))

    with pytest.raises(UnsupportedKVCacheError, match=r"logical pools \['swa'\] are unknown here"):
        kvlinker_mla.match_kv_cache(replace(describe(), logical_pools=pools))


@pytest.mark.parametrize(
    ("kv_format", "row_bytes"), [("bf16", 576), ("fp8_packed_656", 1152), ("fp8_e4m3fn", 512)]
)
def test_rows_that_are_not_of_the_stated_format_are_refused(kv_format: str, row_bytes: int) -> None:
    expected = ROW_BYTES[kv_format]

    with pytest.raises(ContractError, match=f"rows of {row_bytes} B, expected {expected} B"):
        kvlinker_mla.match_kv_cache(describe(kv_format=kv_format, row_bytes=row_bytes))


def test_a_draft_in_another_format_than_the_target_is_refused() -> None:
    description = describe(1)
    draft = (MadeUpMemory().span(PAGES * PAGE, 656),)

    with pytest.raises(ContractError, match=r"'draft_latent\[0\]' has rows of 656 B"):
        kvlinker_mla.match_kv_cache(
            replace(description, buffers={**description.buffers, "draft_latent": draft})
        )


def test_packed_rows_hold_deepseeks_number_of_values_and_no_other() -> None:
    description = with_facts(describe(kv_format="fp8_packed_656"), latent_values=288)

    with pytest.raises(
        ContractError, match="fp8_packed_656 holds 576 values, got latent_values 288"
    ):
        kvlinker_mla.match_kv_cache(description)


def test_unknown_and_unstated_formats_are_refused() -> None:
    with pytest.raises(UnsupportedKVCacheError, match="kv_format 'int4' is not laid out here"):
        kvlinker_mla.match_kv_cache(with_facts(describe(), kv_format="int4"))
    with pytest.raises(ContractError, match="fact 'kv_format' is missing"):
        kvlinker_mla.match_kv_cache(replace(describe(), facts={}))


@pytest.mark.parametrize("count", [2, 4])
def test_a_buffer_count_other_than_one_per_layer_is_refused(count: int) -> None:
    description = replace(describe(3), buffers=describe(count).buffers)

    with pytest.raises(ContractError, match=f"'latent' has {count} buffers, expected 3"):
        kvlinker_mla.match_kv_cache(description)


def test_dh2_a_buffer_without_rows_is_refused() -> None:
    empty = BufferSpan.from_tensor(torch.empty((0, 1152), dtype=torch.uint8))

    with pytest.raises(ContractError, match=r"span 'latent\[0\]' has no rows"):
        kvlinker_mla.match_kv_cache(replace(describe(1), buffers={"latent": (empty,)}))


def test_building_refuses_what_matching_refuses() -> None:
    with pytest.raises(ContractError, match=r"\['latent'\] are missing"):
        kvlinker_mla.build_direct_linker_pool_group(replace(describe(), buffers={}))


def test_the_plugin_states_the_api_that_it_was_written_for() -> None:
    assert kvlinker_mla.describe_plugin().api_version == 1
