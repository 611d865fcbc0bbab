"""DeepSeek V4 caches that are refused, and what the refusal says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import kvlinker_deepseek_v4
from kvlinker.description import Fact, KVCacheDescription, LogicalPool, PoolKind
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.spans import BufferSpan
from kvlinker.testing.strategies import MadeUpMemory
from kvlinker_deepseek_v4 import V4Formats, resolve_layer_mappings, stage_layers, v4_pools

PAGE, PAGES = 256, 5
FACTS: dict[str, Fact] = {
    "kv_format": "fp8_e4m3fn_ue8m0",
    "indexer_format": "fp8_fused",
    "state_ring_rows": 8,
    "state_format": "fp32",
    "swa_page_size": PAGE,
    "swa_physical_page_size": PAGE,
    "unified_kv": 0,
    "hisparse": 0,
    "c128_state_persistent": 0,
}


def describe(ratios: Sequence[int] = (0, 4, 128, 4), *, page: int = PAGE) -> KVCacheDescription:
    """Describe a cache that is taken."""
    memory, layers = MadeUpMemory(), stage_layers(ratios)
    pools = v4_pools(V4Formats(page_size=page), resolve_layer_mappings(layers))
    return KVCacheDescription(
        family="deepseek_v4",
        page_size=page,
        buffers={
            pool.role: tuple(
                memory.span(PAGES * pool.rows_per_page, pool.row_bytes) for _ in range(pool.spans)
            )
            for pool in pools
        },
        layers=layers,
        logical_pools=(
            LogicalPool(name="kv", page_size=page),
            LogicalPool(name="swa", page_size=page, window=128),
        ),
        facts=FACTS | {"swa_page_size": page, "swa_physical_page_size": page},
    )


def with_facts(description: KVCacheDescription, **facts: Fact) -> KVCacheDescription:
    return replace(description, facts={**description.facts, **facts})


def with_buffers(
    description: KVCacheDescription, **buffers: tuple[BufferSpan, ...]
) -> KVCacheDescription:
    return replace(description, buffers={**description.buffers, **buffers})


def without(description: KVCacheDescription, role: str) -> KVCacheDescription:
    return replace(description, buffers={k: v for k, v in description.buffers.items() if k != role})


def refusal(description: KVCacheDescription) -> str:
    """Return what matching says, after checking that building says the same."""
    with pytest.raises((ContractError, UnsupportedKVCacheError)) as matching:
        kvlinker_deepseek_v4.match_kv_cache(description)
    with pytest.raises(type(matching.value)) as building:
        kvlinker_deepseek_v4.build_direct_linker_pool_group(description)
    assert str(building.value) == str(matching.value)
    return str(matching.value)


def test_what_is_varied_below_is_taken() -> None:
    assert kvlinker_deepseek_v4.match_kv_cache(describe()) is not None


def test_other_families_are_declined_in_silence() -> None:
    assert kvlinker_deepseek_v4.match_kv_cache(replace(describe(), family="dsa")) is None


# ---- ways of keeping the cache ----------------------------------------------------------------


def test_b01_unified_kv_is_refused_by_name() -> None:
    message = refusal(with_facts(describe(), unified_kv=1))

    assert message.startswith("unified KV keeps one row in two buffers")
    assert "until kvlinker-deepseek-v4 lays out both" in message


def test_b01_a_buffer_of_values_without_their_rope_is_refused_by_its_size() -> None:
    half = tuple(MadeUpMemory().span(PAGES, PAGE * 512) for _ in range(4))

    message = refusal(with_buffers(describe(), swa_kv=half))

    assert "span 'swa_kv[0]' has rows of 131072 B, expected 149760 B" in message


def test_hisparse_is_refused_by_name() -> None:
    message = refusal(with_facts(describe(), hisparse=1))

    assert message.startswith("HiSparse moves C4 pages to host memory")
    assert "until kvlinker-deepseek-v4 lays out pages in two places" in message


def test_b11_a_persistent_c128_state_is_refused() -> None:
    message = refusal(with_facts(describe(), c128_state_persistent=1))

    assert "which is empty at a page's end" in message


def test_b11_a_c128_state_is_never_stored_for_nothing() -> None:
    state = (MadeUpMemory().span(2 * 128, 4096),)

    assert "buffers ['c128_state'] are unknown here" in refusal(
        with_buffers(describe(), c128_state=state)
    )


@pytest.mark.parametrize("page", [1, 64, 192, 300])
def test_b11_pages_that_end_within_a_chunk_of_128_are_refused(page: int) -> None:
    description = describe()
    pools = tuple(replace(pool, page_size=page) for pool in description.logical_pools)
    repaged = replace(description, page_size=page, logical_pools=pools)

    message = refusal(with_facts(repaged, swa_page_size=page, swa_physical_page_size=page))

    assert f"needs pages of a multiple of 128 slots, got {page}" in message


def test_b11_a_page_of_one_chunk_is_taken() -> None:
    assert kvlinker_deepseek_v4.match_kv_cache(describe(page=128)) is not None


@pytest.mark.parametrize("ratio", [3, 8])
def test_ratios_that_no_version_has_are_refused_by_layer_and_ratio(ratio: int) -> None:
    description = describe()
    layers = (replace(description.layers[0], compress_ratio=ratio), *description.layers[1:])

    message = refusal(replace(description, layers=layers))

    assert (
        f"layer 0 (global 0) has compress ratio {ratio}; laid out are (0, 1, 2, 4, 128)" in message
    )


# ---- page sizes and index spaces --------------------------------------------------------------


def test_b96_a_logical_swa_page_that_differs_from_the_trees_is_refused() -> None:
    message = refusal(with_facts(describe(), swa_page_size=128, swa_physical_page_size=128))

    assert "swa_page_size is 128 and the prefix tree has pages of 256 slots" in message


def test_b95_a_physical_swa_page_that_differs_from_the_logical_one_is_refused() -> None:
    message = refusal(with_facts(describe(), swa_physical_page_size=64))

    assert "physical pages have 64 slots and its logical ones 256" in message


@pytest.mark.parametrize("name", ["kv", "swa"])
def test_b96_a_logical_pool_of_other_pages_is_refused(name: str) -> None:
    description = describe()
    pools = tuple(
        replace(pool, page_size=64) if pool.name == name else pool
        for pool in description.logical_pools
    )

    message = refusal(replace(description, logical_pools=pools))

    assert f"'{name}' has pages of 64 slots and the prefix tree pages of 256" in message


def test_states_without_a_paged_swa_pool_are_refused() -> None:
    kv = LogicalPool(name="kv", page_size=PAGE)
    slots = LogicalPool(name="swa", page_size=1, kind=PoolKind.SLOT)

    absent = refusal(replace(describe(), logical_pools=(kv,)))
    not_paged = refusal(replace(describe(), logical_pools=(kv, slots)))

    assert "there is no logical pool 'swa'" in absent
    assert "logical pool 'swa' must be paged, got slot" in not_paged


# ---- facts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FACTS)
def test_facts_are_never_guessed(name: str) -> None:
    description = describe()
    facts = {key: value for key, value in description.facts.items() if key != name}

    assert f"fact '{name}' is missing" in refusal(replace(description, facts=facts))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_format", "fp8_e4m3fnuz_ue8m0"),
        ("indexer_format", "int4"),
        ("state_format", "fp16"),
        ("state_ring_rows", 4),
        ("unified_kv", 2),
    ],
)
def test_unknown_values_of_facts_are_refused(name: str, value: Fact) -> None:
    message = refusal(with_facts(describe(), **{name: value}))

    assert f"{name} {value!r} is not laid out here; known are" in message


# ---- buffers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["c4_kv", "c4_indexer", "c4_state", "c4_indexer_state", "c128_kv"])
def test_b02_a_stage_without_one_of_its_parts_is_refused_instead_of_shrunk(role: str) -> None:
    count = 1 if role == "c128_kv" else 2

    message = refusal(without(describe(), role))

    ratio = 128 if role == "c128_kv" else 4
    assert f"{role!r} has 0 buffers, expected {count}, one per layer of ratio {ratio}" in message


def test_b02_a_cache_without_windows_is_refused() -> None:
    assert "buffers ['swa_kv'] are missing" in refusal(without(describe(), "swa_kv"))


def test_a_part_that_no_layer_of_the_stage_has_is_refused() -> None:
    c128 = describe().buffers["c128_kv"]

    message = refusal(with_buffers(describe([0, 4]), c128_kv=c128))

    assert "'c128_kv' has 1 buffers, expected 0" in message


def test_scales_beside_an_indexer_that_is_fused_are_refused() -> None:
    scales = tuple(MadeUpMemory().span(PAGES, 256) for _ in range(2))

    message = refusal(with_buffers(describe(), c4_indexer_scale=scales))

    assert "'c4_indexer_scale' has 2 buffers, expected 0" in message


def test_a_split_indexer_without_its_scales_is_refused() -> None:
    payload = tuple(MadeUpMemory().span(PAGES, 4096) for _ in range(2))
    description = with_facts(
        with_buffers(describe(), c4_indexer=payload), indexer_format="fp4_split"
    )

    assert "'c4_indexer_scale' has 0 buffers, expected 2" in refusal(description)


@pytest.mark.parametrize(
    ("role", "row_bytes"),
    [
        ("swa_kv", 256 * 584),
        ("c4_kv", 64 * 584),
        ("c4_indexer", 4352),
        ("c4_state", 4096),
        ("c4_indexer_state", 1024),
        ("c128_kv", 2 * 584),
    ],
)
def test_rows_of_another_size_than_the_format_says_are_refused(role: str, row_bytes: int) -> None:
    description = describe()
    count = len(description.buffers[role])
    wrong = tuple(MadeUpMemory().span(PAGES * 8, row_bytes) for _ in range(count))
    expected = description.buffers[role][0].row_bytes

    message = refusal(with_buffers(description, **{role: wrong}))

    assert f"span '{role}[0]' has rows of {row_bytes} B, expected {expected} B" in message


def test_dh2_a_buffer_without_rows_is_refused() -> None:
    empty = BufferSpan.from_tensor(torch.empty((0, 1728), dtype=torch.uint8))

    assert "span 'c128_kv[0]' has no rows" in refusal(with_buffers(describe(), c128_kv=(empty,)))


@pytest.mark.parametrize("rows", [1, 7])
def test_a_state_buffer_that_holds_no_whole_ring_is_refused(rows: int) -> None:
    state = tuple(MadeUpMemory().span(rows, 8192) for _ in range(2))
    description = with_buffers(describe(), c4_state=state)

    with pytest.raises(ContractError, match=r"pool 'deepseek_v4_c4_state': span .* no rows"):
        kvlinker_deepseek_v4.build_direct_linker_pool_group(description)


def test_padded_state_rows_are_refused_for_a_ring_would_not_be_one_range() -> None:
    padded = tuple(
        BufferSpan(base_ptr=1 << 41 + i, rows=80, row_bytes=8192, row_stride=8704) for i in (0, 1)
    )

    with pytest.raises(ContractError, match=r"'c4_state\[0\]': rows of 8192 B with stride 8704 B"):
        kvlinker_deepseek_v4.build_direct_linker_pool_group(
            with_buffers(describe(), c4_state=padded)
        )


# ---- drafts -----------------------------------------------------------------------------------


def test_b08_drafts_that_the_engine_has_and_does_not_describe_are_refused() -> None:
    message = refusal(with_facts(describe(), draft_layers=1))

    assert "'draft_layers' says 1, but 0 are described" in message


def test_more_drafts_than_layers_are_refused() -> None:
    drafts = tuple(MadeUpMemory().span(PAGES, 149_760) for _ in range(5))

    assert "5 draft layers cannot ride on 4 layers" in refusal(
        with_buffers(describe(), draft_swa_kv=drafts)
    )


def test_a_draft_window_of_another_size_is_refused() -> None:
    draft = (MadeUpMemory().span(PAGES, 37_440),)

    message = refusal(with_buffers(describe(), draft_swa_kv=draft))

    assert "span 'draft_swa_kv[0]' has rows of 37440 B, expected 149760 B" in message


def test_the_plugin_states_the_api_that_it_was_written_for() -> None:
    assert kvlinker_deepseek_v4.describe_plugin().api_version == 1
