"""Caches of hybrids, from the description alone: what is claimed and how it is laid out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvlinker_swa
from kvlinker.description import (
    Fact,
    IndexArray,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
    RankAxis,
    Replication,
)
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan
from kvlinker.testing.strategies import MadeUpMemory, PageRows, check_round_trip, check_strategy
from kvlinker.transfers import HitPolicy, PoolTransfer, ResolutionStatus

PAGE, PAGES, SWA_PAGES = 16, 6, 4
F, S = "attention", "sliding"
MIXED = (S, F, S, S)
Allocate = Callable[[int, int], BufferSpan]


def tensor_span(rows: int, row_bytes: int) -> BufferSpan:
    return BufferSpan.from_tensor(torch.zeros((rows, row_bytes), dtype=torch.uint8))


def describe(
    kinds: Sequence[str] = MIXED,
    *,
    start: int = 0,
    drafts: int = 0,
    window_drafts: int = 0,
    head_major: bool = False,
    scale_bytes: int = 0,
    slot_bytes: tuple[int, int] = (256, 256),
    swa_slot_bytes: tuple[int, int] = (256, 256),
    allocate: Allocate | None = None,
) -> KVCacheDescription:
    """Describe a hybrid with K and V slots of so many bytes, whose window pool has fewer pages than the other."""
    span = allocate or MadeUpMemory().span
    buffers: dict[str, tuple[BufferSpan, ...]] = {}
    for prefix, count, pages, sizes in (
        ("", kinds.count(F), PAGES, slot_bytes),
        ("draft_", drafts, PAGES, slot_bytes),
        ("swa_", kinds.count(S), SWA_PAGES, swa_slot_bytes),
        ("draft_swa_", window_drafts, SWA_PAGES, swa_slot_bytes),
    ):
        for role, size in zip("kv", sizes, strict=True):
            rows, row_bytes = (pages, size * PAGE) if head_major else (pages * PAGE, size)
            buffers[f"{prefix}{role}"] = tuple(span(rows, row_bytes) for _ in range(count))
            buffers[f"{prefix}{role}_scale"] = tuple(
                span(pages, scale_bytes * PAGE) for _ in range(count if scale_bytes else 0)
            )
    return KVCacheDescription(
        family="swa",
        page_size=PAGE,
        buffers={role: spans for role, spans in buffers.items() if spans},
        layers=tuple(
            LayerFacts(layer=i, global_layer=start + i, kind=kind) for i, kind in enumerate(kinds)
        ),
        logical_pools=(
            LogicalPool(name="kv", page_size=PAGE),
            LogicalPool(name="swa", page_size=PAGE, window=20),
        ),
        facts={
            "kv_layout": "head_major" if head_major else "token_major",
            "kv_format": "fp4_e2m1_block16_e8m0" if scale_bytes else "bf16",
            "kv_scaled": int(scale_bytes > 0),
        },
    )


def with_facts(description: KVCacheDescription, **facts: Fact) -> KVCacheDescription:
    return replace(description, facts={**description.facts, **facts})


def page_rows(description: KVCacheDescription) -> dict[str, PageRows]:
    """Say where the pages are: scales and head-major values have one row for each page."""
    paged = description.facts["kv_layout"] == "head_major"
    return {
        role: PageRows(
            "swa" if "swa" in role else "kv", 1 if paged or role.endswith("_scale") else PAGE
        )
        for role in description.buffers
    }


def page_bytes(group: DevicePoolGroup) -> dict[str, int]:
    return {entry.name: entry.page_bytes for entry in group.entries}


# ---- the layout -------------------------------------------------------------------------------


def test_each_kind_of_layer_has_an_entry_with_its_own_index_space() -> None:
    group = check_strategy(kvlinker_swa, describe([S, F, S, S]))

    assert [
        (entry.name, entry.indices_from_pool, entry.rows_are_pages, entry.layer_mapping)
        for entry in group.entries
    ] == [
        ("kv", "kv", False, {1: (0,)}),
        ("swa", "swa", False, {0: (0,), 2: (1,), 3: (2,)}),
    ]
    assert (group.layout, group.page_size, group.num_layers) == ("swa/1", PAGE, 4)


def test_all_k_come_before_all_v_in_both() -> None:
    group = check_strategy(kvlinker_swa, describe([F, S, F, S]))

    assert [
        [[span.label for span in component] for component in entry.components]
        for entry in group.entries
    ] == [
        [["k[0]", "k[1]"], ["v[0]", "v[1]"]],
        [["swa_k[0]", "swa_k[1]"], ["swa_v[0]", "swa_v[1]"]],
    ]


def test_a_layer_reads_from_its_own_pool_alone_at_its_own_place() -> None:
    description = describe([S, F, S], slot_bytes=(64, 32), swa_slot_bytes=(16, 8))
    group = check_strategy(kvlinker_swa, description)
    kv, swa = group.entries

    ranges = swa.layer_plan(swa.prepare_locations(range(PAGE, 2 * PAGE)), 2)

    assert ranges is not None
    k, v = description.buffers["swa_k"][1], description.buffers["swa_v"][1]
    expanded = ranges.expand()
    assert expanded.address.tolist() == [k.base_ptr + 16 * PAGE, v.base_ptr + 8 * PAGE]
    assert expanded.size.tolist() == [16 * PAGE, 8 * PAGE]
    # The object: K of layers 0 and 2, then V of both.
    assert expanded.offset.tolist() == [16 * PAGE, (2 * 16 + 8) * PAGE]
    assert kv.layer_plan(kv.prepare_locations(range(PAGE)), 2) is None


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize(
    ("kinds", "head_bytes", "heads", "swa_heads", "expected"),
    [
        # config.json of gemma-3-27b: 62 layers, 16 KV heads of 128, every 6th of full attention.
        ([F if i % 6 == 5 else S for i in range(62)], 256, 16, 16, (81_920, 425_984)),
        # config.json of gpt-oss-120b: 36 layers, 8 KV heads of 64, every other of full attention.
        ([S, F] * 18, 128, 8, 8, (36_864, 36_864)),
        # Layers of windows may have other heads than full ones.
        ([S, S, F], 128, 2, 8, (512, 4_096)),
    ],
    ids=["Gemma-3-27B", "gpt-oss-120b", "other heads"],
)
def test_bytes_per_slot_in_bf16(
    *,
    kinds: list[str],
    head_bytes: int,
    heads: int,
    swa_heads: int,
    expected: tuple[int, int],
    head_major: bool,
) -> None:
    sizes, swa_sizes = (heads * head_bytes,) * 2, (swa_heads * head_bytes,) * 2
    description = describe(kinds, head_major=head_major, slot_bytes=sizes, swa_slot_bytes=swa_sizes)

    group = check_strategy(kvlinker_swa, description)

    assert page_bytes(group) == {"kv": expected[0] * PAGE, "swa": expected[1] * PAGE}
    assert all(entry.rows_are_pages is head_major for entry in group.entries)


def test_windows_may_be_kept_in_another_way_than_full_layers() -> None:
    memory = MadeUpMemory()
    description = describe([F, S])
    description = replace(
        with_facts(description, swa_kv_layout="head_major", swa_kv_format="fp8_e5m2"),
        buffers={
            **description.buffers,
            "swa_k": (memory.span(SWA_PAGES, 128 * PAGE),),
            "swa_v": (memory.span(SWA_PAGES, 64 * PAGE),),
        },
    )

    kv, swa = check_strategy(kvlinker_swa, description).entries

    assert (kv.rows_are_pages, kv.value_format, kv.page_bytes) == (False, "bf16", 512 * PAGE)
    assert (swa.rows_are_pages, swa.value_format, swa.page_bytes) == (True, "fp8_e5m2", 192 * PAGE)


def test_b04_scales_are_entries_of_whole_pages_beside_the_values_of_their_kind() -> None:
    group = check_strategy(kvlinker_swa, describe([F, S], scale_bytes=4, slot_bytes=(128, 128)))

    assert [
        (entry.name, entry.indices_from_pool, entry.rows_are_pages, entry.page_bytes)
        for entry in group.entries
    ] == [
        ("kv", "kv", False, 256 * PAGE),
        ("kv_scale", "kv", True, 8 * PAGE),
        ("swa", "swa", False, 512 * PAGE),
        ("swa_scale", "swa", True, 8 * PAGE),
    ]
    assert {entry.value_format for entry in group.entries} == {
        "fp4_e2m1_block16_e8m0",
        "fp4_e2m1_block16_e8m0_scale",
    }


def test_scales_of_windows_alone_are_laid_out_for_windows_alone() -> None:
    memory = MadeUpMemory()
    description = describe([F, S])
    scales = {role: (memory.span(SWA_PAGES, 64),) for role in ("swa_k_scale", "swa_v_scale")}
    description = replace(
        with_facts(description, swa_kv_format="fp4_e2m1_block16_e8m0", swa_kv_scaled=1),
        buffers={**description.buffers, **scales},
    )

    group = check_strategy(kvlinker_swa, description)

    assert list(group.entry_map) == ["kv", "swa", "swa_scale"]


def test_drafts_of_each_kind_ride_on_the_first_layers_scales_included() -> None:
    description = describe([S, F, S], drafts=2, window_drafts=1, scale_bytes=4)

    group = check_strategy(kvlinker_swa, description)

    # The only full layer is layer 1; drafts 0 and 1 ride on layers 0 and 1, whatever these keep themselves.
    full, windows = {0: (1,), 1: (0, 2)}, {0: (0, 2), 2: (1,)}
    assert {entry.name: entry.layer_mapping for entry in group.entries} == {
        "kv": full,
        "kv_scale": full,
        "swa": windows,
        "swa_scale": windows,
    }
    assert [span.label for span in group.entry_map["kv"].components[1]] == [
        "v[0]",
        "draft_v[0]",
        "draft_v[1]",
    ]


def test_drafts_may_be_of_a_kind_that_the_stage_has_no_layers_of() -> None:
    group = check_strategy(kvlinker_swa, describe([S, S], drafts=1))

    assert {entry.name: entry.layer_mapping for entry in group.entries} == {
        "kv": {0: (0,)},
        "swa": {0: (0,), 1: (1,)},
    }


def test_stated_drafts_are_those_of_both_kinds_together() -> None:
    description = with_facts(describe(drafts=1, window_drafts=2), draft_layers=3)

    assert set(page_bytes(check_strategy(kvlinker_swa, description))) == {"kv", "swa"}


# ---- stages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kinds", "entry"), [([F, F], "kv"), ([S, S, S], "swa")])
def test_a_stage_of_one_kind_has_no_entry_for_the_other(kinds: list[str], entry: str) -> None:
    group = check_strategy(kvlinker_swa, describe(kinds, start=6))

    assert list(group.entry_map) == [entry]
    assert group.layer_range == (6, 6 + len(kinds))


def test_roles_of_a_missing_kind_may_be_described_as_empty() -> None:
    description = describe([F])
    empty: dict[str, tuple[BufferSpan, ...]] = {"swa_k": (), "swa_v": (), "draft_k": ()}

    group = check_strategy(
        kvlinker_swa, replace(description, buffers={**description.buffers, **empty})
    )

    assert list(group.entry_map) == ["kv"]


def test_b13_a_stage_of_windows_alone_takes_kv_keys_and_slots_without_storing_them() -> None:
    group = check_strategy(kvlinker_swa, describe([S, S]))
    slots = list(range(PAGE))
    transfers = [
        PoolTransfer(name="kv", keys=("a",), device_indices=slots),
        PoolTransfer(
            name="swa", keys=("a",), device_indices=slots, hit_policy=HitPolicy.TRAILING_PAGES
        ),
    ]

    resolution = group.resolve_transfers(transfers)

    assert resolution.status is ResolutionStatus.COMPLETE
    assert [(t.name, t.hit_policy) for t in resolution] == [("swa", HitPolicy.TRAILING_PAGES)]


def test_windows_without_their_transfer_are_missing_and_never_passed_over() -> None:
    group = check_strategy(kvlinker_swa, describe())

    resolution = group.resolve_transfers([PoolTransfer(name="kv", keys=("a",))])

    assert resolution.status is ResolutionStatus.MISSING_POOLS
    assert (list(resolution), resolution.missing) == ([], ("swa",))


# ---- index maps, ranks, keys ------------------------------------------------------------------


def test_entries_take_index_maps_and_replication_from_the_description() -> None:
    def full_to_swa(slots: IndexArray) -> IndexArray:
        return slots - 2 * PAGE

    axes = (RankAxis(name="tp", rank=3, size=4),)
    sharded = describe(scale_bytes=4)
    description = replace(
        sharded,
        index_maps={"swa": full_to_swa},
        replication=Replication(
            axes=axes,
            sharded_over={role: frozenset() for role in sharded.buffers if "scale" in role},
        ),
    )

    group = check_strategy(kvlinker_swa, description)

    for entry in group.entries:
        shift = 0 if entry.indices_from_pool == "kv" else -2 * PAGE
        assert entry.translate_indices([32, 33]).tolist() == [32 + shift, 33 + shift]
        replicated = entry.name.endswith("_scale")
        assert (entry.replicated, entry.is_writer) == (replicated, not replicated)
        assert entry.rank_axes == (() if replicated else axes)


def test_layouts_differ_by_everything_that_makes_other_bytes() -> None:
    descriptions = [
        describe(),
        describe([S, F, F, S]),
        describe([F, S, S, S]),
        describe(head_major=True),
        describe(scale_bytes=4),
        describe(drafts=1),
        describe(window_drafts=1),
        describe(slot_bytes=(256, 128)),
        describe(swa_slot_bytes=(256, 128)),
        with_facts(describe(), kv_format="fp16"),
        with_facts(describe(), swa_kv_format="fp16"),
    ]

    prints = {check_strategy(kvlinker_swa, each).fingerprint for each in descriptions}

    assert len(prints) == len(descriptions)


def test_golden_g5_the_fingerprint_of_a_layout_stays() -> None:
    group = check_strategy(kvlinker_swa, describe([S, F, S], drafts=1, window_drafts=1))

    assert group.fingerprint.hex() == "b568efae418ac8251e9b1d69968120de"


# ---- bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("scale_bytes", [0, 4])
@pytest.mark.parametrize("drafts", [(0, 0), (2, 0), (1, 2)])
@pytest.mark.parametrize("swa_slot_bytes", [(256, 256), (96, 64)])
def test_b04_b08_every_byte_of_a_page_comes_back_in_other_pages_scales_and_drafts_included(
    *,
    head_major: bool,
    scale_bytes: int,
    drafts: tuple[int, int],
    swa_slot_bytes: tuple[int, int],
) -> None:
    description = describe(
        drafts=drafts[0],
        window_drafts=drafts[1],
        head_major=head_major,
        scale_bytes=scale_bytes,
        swa_slot_bytes=swa_slot_bytes,
        allocate=tensor_span,
    )

    group = check_strategy(kvlinker_swa, description)

    # The window's pages are the last ones of the prefix alone, and lie elsewhere in a smaller pool.
    moves = {"kv": {1: 4, 5: 0, 2: 2}, "swa": {3: 0, 1: 3}}
    check_round_trip(group, description, page_rows(description), moves)


@settings(max_examples=30)
@given(st.data())
def test_any_stage_of_any_schedule_is_claimed_whole_and_moved_whole(data: st.DataObject) -> None:
    model = data.draw(st.lists(st.sampled_from([F, S]), min_size=1, max_size=7))
    start = data.draw(st.integers(0, len(model) - 1))
    kinds = model[start : data.draw(st.integers(start + 1, len(model)))]
    drafts = data.draw(st.integers(0, len(kinds)))
    slot_sizes = st.tuples(st.sampled_from([8, 24]), st.sampled_from([8, 16]))
    description = describe(
        kinds,
        start=start,
        drafts=drafts,
        window_drafts=data.draw(st.integers(0, len(kinds) - drafts)),
        head_major=data.draw(st.booleans()),
        scale_bytes=data.draw(st.sampled_from([0, 4])),
        slot_bytes=data.draw(slot_sizes),
        swa_slot_bytes=data.draw(slot_sizes),
        allocate=tensor_span,
    )
    to_kv = data.draw(st.permutations(range(PAGES)))
    to_swa = data.draw(st.permutations(range(SWA_PAGES)))

    group = check_strategy(kvlinker_swa, description)

    for layer, kind in enumerate(kinds):
        (own,) = [
            entry.name
            for entry in group.entries
            for position in entry.layer_mapping.get(layer, ())
            if not entry.components[0][position].label.startswith("draft")
            and not entry.name.endswith("_scale")
        ]
        assert own == {F: "kv", S: "swa"}[kind]
    moves = {"kv": {1: to_kv[0], 3: to_kv[1]}, "swa": {2: to_swa[0], 0: to_swa[1]}}
    check_round_trip(group, description, page_rows(description), moves)


def test_the_plugin_states_the_api_that_it_was_written_for() -> None:
    assert kvlinker_swa.describe_plugin().api_version == 1
