"""DeepSeek V4 caches, from the description alone: what is claimed, laid out and refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvlinker_deepseek_v4
from kvlinker.description import (
    Fact,
    IndexArray,
    KVCacheDescription,
    LogicalPool,
    RankAxis,
    Replication,
)
from kvlinker.errors import ContractError
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan
from kvlinker.testing.strategies import MadeUpMemory, PageRows, check_round_trip, check_strategy
from kvlinker.transfers import HitPolicy, PoolTransfer, ResolutionStatus
from kvlinker_deepseek_v4 import build_pool_group, resolve_layer_mappings, stage_layers

# config.json of deepseek-ai/DeepSeek-V4-Flash and -Pro, compress_ratios without the MTP layer.
FLASH = [0, 0, *[4, 128] * 20, 4]
PRO = [128, 128, *[4, 128] * 29, 4]
MIXED = [0, 4, 128, 4]
PAGES = 5
Allocate = Callable[[int, int], BufferSpan]


def tensor_span(rows: int, row_bytes: int) -> BufferSpan:
    return BufferSpan.from_tensor(torch.zeros((rows, row_bytes), dtype=torch.uint8))


def block_split(entries: int) -> int:
    """Return the bytes of a page: 576 B rows of values, 8 B rows of scales, padded to whole 576 B."""
    return -(-entries * (576 + 8) // 576) * 576


def describe(
    ratios: Sequence[int] = MIXED,
    *,
    start: int = 0,
    end: int | None = None,
    page: int = 256,
    drafts: int = 0,
    indexer: str = "fp8_fused",
    ring: int = 8,
    state: str = "fp32",
    spare_rows: int = 1,
    allocate: Allocate | None = None,
) -> KVCacheDescription:
    """Describe a V4 stage of layers [start, end), with spare rows behind the last state ring."""
    span = allocate or MadeUpMemory().span
    layers = stage_layers(ratios, start=start, end=end)
    c4, c128 = (sum(facts.compress_ratio == ratio for facts in layers) for ratio in (4, 128))
    keys = page // 4
    payload, scale = {
        "fp8_fused": (132, 0),
        "fp4_fused": (68, 0),
        "fp4_split": (64, 4),
    }[indexer]
    ring_rows = PAGES * ring + spare_rows
    value_bytes = {"fp32": 4, "bf16": 2}[state]
    shapes = {
        "swa_kv": (len(layers), PAGES, block_split(page)),
        "c4_kv": (c4, PAGES, block_split(keys)),
        "c4_indexer": (c4, PAGES, keys * payload),
        "c4_indexer_scale": (c4 if scale else 0, PAGES, keys * max(scale, 1)),
        "c4_state": (c4, ring_rows, 4 * 512 * value_bytes),
        "c4_indexer_state": (c4, ring_rows, 4 * 128 * value_bytes),
        "c128_kv": (c128, PAGES, block_split(page // 128)),
        "draft_swa_kv": (drafts, PAGES, block_split(page)),
    }
    return KVCacheDescription(
        family="deepseek_v4",
        page_size=page,
        buffers={
            role: tuple(span(rows, row_bytes) for _ in range(count))
            for role, (count, rows, row_bytes) in shapes.items()
            if count
        },
        layers=layers,
        logical_pools=(
            LogicalPool(name="kv", page_size=page),
            LogicalPool(name="swa", page_size=page, window=128),
        ),
        facts={
            "kv_format": "fp8_e4m3fn_ue8m0",
            "indexer_format": indexer,
            "state_ring_rows": ring,
            "state_format": state,
            "swa_page_size": page,
            "swa_physical_page_size": page,
            "unified_kv": 0,
            "hisparse": 0,
            "c128_state_persistent": 0,
        },
    )


def page_rows(description: KVCacheDescription) -> dict[str, PageRows]:
    """Say where the pages are: states have a ring of rows for each, everything else one row."""
    ring = description.facts["state_ring_rows"]
    assert isinstance(ring, int)
    places = {
        "swa_kv": PageRows("swa", 1),
        "draft_swa_kv": PageRows("swa", 1),
        "c4_kv": PageRows("kv", 1),
        "c4_indexer": PageRows("kv", 1),
        "c4_indexer_scale": PageRows("kv", 1),
        "c128_kv": PageRows("kv", 1),
        "c4_state": PageRows("swa", ring),
        "c4_indexer_state": PageRows("swa", ring),
    }
    return {role: places[role] for role in description.buffers}


def with_facts(description: KVCacheDescription, **facts: Fact) -> KVCacheDescription:
    return replace(description, facts={**description.facts, **facts})


def with_buffers(
    description: KVCacheDescription, **buffers: tuple[BufferSpan, ...]
) -> KVCacheDescription:
    return replace(description, buffers={**description.buffers, **buffers})


def without(description: KVCacheDescription, role: str) -> KVCacheDescription:
    return replace(description, buffers={k: v for k, v in description.buffers.items() if k != role})


def page_bytes(group: DevicePoolGroup) -> dict[str, int]:
    return {entry.name: entry.page_bytes for entry in group.entries}


# ---- the layout -------------------------------------------------------------------------------


def test_entries_with_their_index_spaces_and_sparse_mappings() -> None:
    group = check_strategy(kvlinker_deepseek_v4, describe([0, 4, 128, 4]))

    sparse, heavy = {1: (0,), 3: (1,)}, {2: (0,)}
    assert [
        (entry.name, entry.indices_from_pool, entry.layer_mapping) for entry in group.entries
    ] == [
        ("swa", "swa", {0: (0,), 1: (1,), 2: (2,), 3: (3,)}),
        ("deepseek_v4_c4", "kv", sparse),
        ("deepseek_v4_c4_indexer", "kv", sparse),
        ("deepseek_v4_c128", "kv", heavy),
        ("deepseek_v4_c4_state", "swa", sparse),
        ("deepseek_v4_c4_indexer_state", "swa", sparse),
    ]
    assert all(entry.rows_are_pages for entry in group.entries)
    assert (group.layout, group.page_size, group.num_layers) == ("deepseek_v4/1", 256, 4)


def test_bytes_of_a_page_and_layer() -> None:
    sizes = page_bytes(check_strategy(kvlinker_deepseek_v4, describe([0, 4, 128])))

    assert sizes == {
        "swa": 3 * 149_760,
        "deepseek_v4_c4": 37_440,
        "deepseek_v4_c4_indexer": 8_448,
        "deepseek_v4_c128": 1_728,
        "deepseek_v4_c4_state": 65_536,
        "deepseek_v4_c4_indexer_state": 16_384,
    }


@pytest.mark.parametrize(
    ("ratios", "every_page", "trailing"),
    [
        (
            FLASH,
            {
                "deepseek_v4_c4": 786_240,
                "deepseek_v4_c4_indexer": 177_408,
                "deepseek_v4_c128": 34_560,
            },
            {
                "swa": 6_439_680,
                "deepseek_v4_c4_state": 1_376_256,
                "deepseek_v4_c4_indexer_state": 344_064,
            },
        ),
        (
            PRO,
            {
                "deepseek_v4_c4": 1_123_200,
                "deepseek_v4_c4_indexer": 253_440,
                "deepseek_v4_c128": 53_568,
            },
            {
                "swa": 9_135_360,
                "deepseek_v4_c4_state": 1_966_080,
                "deepseek_v4_c4_indexer_state": 491_520,
            },
        ),
    ],
    ids=["V4-Flash", "V4-Pro"],
)
def test_page_bytes_of_the_published_models_in_fp8_at_page_256(
    ratios: list[int], every_page: dict[str, int], trailing: dict[str, int]
) -> None:
    group = check_strategy(kvlinker_deepseek_v4, describe(ratios))

    sizes = page_bytes(group)
    fed_from_kv = {name for name, source in group.sources.items() if source == "kv"}
    assert sizes == every_page | trailing
    assert fed_from_kv == every_page.keys()
    totals = sum(every_page.values()), sum(trailing.values())
    assert totals == {43: (998_208, 8_160_000), 61: (1_430_208, 11_592_960)}[len(ratios)]


@pytest.mark.parametrize(
    ("indexer", "expected"),
    [
        ("fp8_fused", {"deepseek_v4_c4_indexer": 8_448}),
        ("fp4_fused", {"deepseek_v4_c4_indexer": 4_352}),
        (
            "fp4_split",
            {"deepseek_v4_c4_indexer": 4_096, "deepseek_v4_c4_indexer_scale": 256},
        ),
    ],
)
def test_indexer_formats(indexer: str, expected: dict[str, int]) -> None:
    group = check_strategy(kvlinker_deepseek_v4, describe([4], indexer=indexer))

    found = {k: v for k, v in page_bytes(group).items() if k.startswith("deepseek_v4_c4_indexer")}
    assert found == expected | {"deepseek_v4_c4_indexer_state": 16_384}
    assert all(group.sources[name] == "kv" for name in expected)


@pytest.mark.parametrize(
    ("ring", "state", "state_bytes"),
    [(8, "fp32", 65_536), (16, "fp32", 131_072), (8, "bf16", 32_768), (16, "bf16", 65_536)],
)
@pytest.mark.parametrize("spare_rows", [0, 1, 7])
def test_rings_are_cut_to_whole_ones(
    ring: int, state: str, state_bytes: int, spare_rows: int
) -> None:
    description = describe([4], ring=ring, state=state, spare_rows=spare_rows)

    group = check_strategy(kvlinker_deepseek_v4, description)

    entry = group.entry_map["deepseek_v4_c4_state"]
    assert (entry.page_bytes, entry.spans[0].rows) == (state_bytes, PAGES)
    assert group.entry_map["deepseek_v4_c4_indexer_state"].page_bytes == state_bytes // 4


def test_b94_b95_buffers_of_unequal_rows_over_the_same_pages_are_addressed_by_page() -> None:
    description = describe([4])
    group = check_strategy(kvlinker_deepseek_v4, description)
    windows, states = group.entry_map["swa"], group.entry_map["deepseek_v4_c4_state"]
    assert (description.buffers["swa_kv"][0].rows, description.buffers["c4_state"][0].rows) == (
        5,
        41,
    )

    slots = range(3 * 256, 4 * 256)
    window, state = (e.page_plan(e.prepare_locations(slots)).expand() for e in (windows, states))

    assert window.address.tolist() == [windows.spans[0].base_ptr + 3 * 149_760]
    assert state.address.tolist() == [states.spans[0].base_ptr + 3 * 8 * 8192]
    assert state.size.tolist() == [8 * 8192]


def test_b94_the_spare_rows_behind_the_last_ring_are_no_page() -> None:
    group = check_strategy(kvlinker_deepseek_v4, describe([4], spare_rows=7))
    entry = group.entry_map["deepseek_v4_c4_state"]

    with pytest.raises(ContractError, match=r"page 5 .* out of bounds"):
        entry.prepare_locations(range(5 * 256, 6 * 256))


@pytest.mark.parametrize(
    ("start", "end", "missing"),
    [
        (0, 2, {"deepseek_v4_c4", "deepseek_v4_c128", "deepseek_v4_c4_state"}),
        (2, 3, {"deepseek_v4_c128"}),
        (3, 4, {"deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c4_indexer_state"}),
    ],
)
def test_a_stage_without_a_kind_of_layer_has_no_entry_for_it(
    start: int, end: int, missing: set[str]
) -> None:
    group = check_strategy(kvlinker_deepseek_v4, describe(FLASH, start=start, end=end))

    assert missing & set(group.entry_map) == set()
    assert "swa" in group.entry_map
    assert group.layer_range == (start, end)


def test_roles_of_a_missing_kind_of_layer_may_be_described_as_empty() -> None:
    empty = dict.fromkeys(("c4_kv", "c4_indexer", "c4_state", "c4_indexer_state", "c128_kv"), ())
    description = with_buffers(describe([0, 0]), **empty)

    assert page_bytes(check_strategy(kvlinker_deepseek_v4, description)) == {"swa": 2 * 149_760}


def test_b13_a_stage_of_windows_alone_takes_kv_keys_and_indices_without_storing_them() -> None:
    group = check_strategy(kvlinker_deepseek_v4, describe([0, 0]))
    slots = list(range(256))
    transfers = [
        PoolTransfer(name="kv", keys=("a",), device_indices=slots),
        PoolTransfer(
            name="swa", keys=("a",), device_indices=slots, hit_policy=HitPolicy.TRAILING_PAGES
        ),
    ]

    resolution = group.resolve_transfers(transfers)

    assert resolution.status is ResolutionStatus.COMPLETE
    assert [(t.name, t.hit_policy) for t in resolution] == [("swa", HitPolicy.TRAILING_PAGES)]


def test_draft_windows_ride_on_the_first_layers() -> None:
    group = check_strategy(kvlinker_deepseek_v4, describe([0, 4, 128], drafts=2))

    entry = group.entry_map["swa"]
    assert entry.layer_mapping == {0: (0, 3), 1: (1, 4), 2: (2,)}
    assert [span.label for span in entry.spans[3:]] == ["draft_swa_kv[0]", "draft_swa_kv[1]"]


def test_rows_of_plain_bf16_are_laid_out_too() -> None:
    memory = MadeUpMemory()
    description = with_facts(
        with_buffers(
            describe([4]),
            swa_kv=(memory.span(PAGES, 256 * 1024),),
            c4_kv=(memory.span(PAGES, 64 * 1024),),
        ),
        kv_format="bf16",
    )

    sizes = page_bytes(check_strategy(kvlinker_deepseek_v4, description))

    assert (sizes["swa"], sizes["deepseek_v4_c4"]) == (256 * 1024, 64 * 1024)


def test_layouts_differ_by_everything_that_makes_other_bytes() -> None:
    descriptions = [
        describe(),
        describe(indexer="fp4_fused"),
        describe(indexer="fp4_split"),
        describe(ring=16),
        describe(state="bf16"),
        describe(ring=16, state="bf16"),
        describe(page=128),
        describe(drafts=1),
        describe([4, 0, 128, 4]),
    ]

    prints = {check_strategy(kvlinker_deepseek_v4, each).fingerprint for each in descriptions}

    assert len(prints) == len(descriptions)


def test_entries_take_index_maps_and_replication_from_the_description() -> None:
    def full_to_swa(slots: IndexArray) -> IndexArray:
        return slots - 256

    description = replace(
        describe([4]),
        index_maps={"swa": full_to_swa},
        replication=Replication(
            axes=(RankAxis(name="tp", rank=0, size=8),),
            sharded_over=dict.fromkeys(describe([4]).buffers, frozenset()),
        ),
    )

    group = check_strategy(kvlinker_deepseek_v4, description)

    assert group.rank_replicated
    for entry in group.entries:
        expected = [0, 1] if entry.indices_from_pool == "swa" else [256, 257]
        assert entry.translate_indices([256, 257]).tolist() == expected


def test_mappings_that_were_resolved_before_are_used_as_they_are() -> None:
    description = describe(MIXED, drafts=1)
    mappings = resolve_layer_mappings(description.layers, draft_layers=1)

    group = build_pool_group(description, mappings)

    hooked = kvlinker_deepseek_v4.build_direct_linker_pool_group(description)
    assert group.fingerprint == hooked.fingerprint
    assert group.entry_map["deepseek_v4_c4"].layer_mapping == mappings.c4


# ---- bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("indexer", ["fp8_fused", "fp4_split"])
@pytest.mark.parametrize(("ring", "state"), [(8, "fp32"), (16, "bf16")])
@pytest.mark.parametrize("drafts", [0, 2])
def test_b08_every_byte_of_a_page_comes_back_in_other_pages_drafts_and_states_included(
    indexer: str, ring: int, state: str, drafts: int
) -> None:
    description = describe(
        page=128, indexer=indexer, ring=ring, state=state, drafts=drafts, allocate=tensor_span
    )

    group = check_strategy(kvlinker_deepseek_v4, description)

    moves = {"kv": {0: 3, 1: 4, 2: 0}, "swa": {4: 1}}
    check_round_trip(group, description, page_rows(description), moves)


@settings(max_examples=25)
@given(st.data())
def test_any_stage_of_any_schedule_is_claimed_whole_and_moved_whole(data: st.DataObject) -> None:
    ratios = data.draw(st.lists(st.sampled_from([0, 4, 128]), min_size=1, max_size=7))
    start = data.draw(st.integers(0, len(ratios) - 1))
    end = data.draw(st.integers(start + 1, len(ratios)))
    description = describe(
        ratios,
        start=start,
        end=end,
        page=128,
        drafts=data.draw(st.integers(0, end - start)),
        indexer=data.draw(st.sampled_from(["fp8_fused", "fp4_fused", "fp4_split"])),
        ring=data.draw(st.sampled_from([8, 16])),
        state=data.draw(st.sampled_from(["fp32", "bf16"])),
        spare_rows=data.draw(st.integers(0, 7)),
        allocate=tensor_span,
    )
    target = data.draw(st.permutations(range(PAGES)))

    group = check_strategy(kvlinker_deepseek_v4, description)

    for layer, ratio in enumerate(ratios[start:end]):
        parts = {
            e.name.removeprefix("deepseek_v4_") for e in group.entries if layer in e.layer_mapping
        }
        sparse = {"c4", "c4_indexer", "c4_state", "c4_indexer_state"}
        expected = {0: set[str](), 4: sparse, 128: {"c128"}}[ratio]
        assert parts - {"c4_indexer_scale"} == {"swa", *expected}
    moves = {"kv": {1: target[0], 3: target[1]}, "swa": {2: target[2]}}
    check_round_trip(group, description, page_rows(description), moves)
