"""An entry refuses every layout and every index that would move a wrong byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch

from kvlinker.description import IndexArray, RankAxis
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError
from kvlinker.plans import PreparedPages
from kvlinker.spans import BufferSpan, MemoryRegion

PAGE = 4
TP = RankAxis(name="tp", rank=0, size=2)


def span(number: int = 0, *, rows: int = 16, row_bytes: int = 8, padding: int = 0) -> BufferSpan:
    return BufferSpan(
        base_ptr=(number + 1) << 20,
        rows=rows,
        row_bytes=row_bytes,
        row_stride=row_bytes + padding,
        label=f"kv[{number}]",
    )


def entry(
    components: Sequence[Sequence[BufferSpan]] = ((span(0), span(1)),),
    mapping: object = None,
    **changed: object,
) -> DevicePoolEntry:
    count = len(components[0]) if components else 0
    fields: dict[str, object] = {
        "name": "kv",
        "indices_from_pool": "kv",
        "components": components,
        "layer_mapping": {i: i for i in range(count)} if mapping is None else mapping,
        "page_size": PAGE,
        "rows_are_pages": False,
    }
    return DevicePoolEntry(**{**fields, **changed})  # type: ignore[arg-type]  # wrong types are under test


def slots_of(*pages: int, page_size: int = PAGE) -> list[int]:
    return [page * page_size + i for page in pages for i in range(page_size)]


# ---- C1: components ---------------------------------------------------------------------------


@pytest.mark.parametrize("components", [(), ((),), ((span(0),), ())])
def test_c1_an_entry_has_components_with_spans(
    components: tuple[tuple[BufferSpan, ...], ...],
) -> None:
    with pytest.raises(
        ContractError, match="pool 'kv': needs at least one component with at least"
    ):
        entry(components, {0: 0})


def test_c1_one_span_in_one_component_is_enough() -> None:
    assert entry(((span(),),)).page_bytes == PAGE * 8


def test_c1_components_have_equal_span_counts() -> None:
    with pytest.raises(ContractError, match=r"must have equal span counts, got \[2, 1\]"):
        entry(((span(0), span(1)), (span(2),)))


def test_c1_w07_dh2_a_span_without_rows_is_refused_with_the_way_out() -> None:
    absent = span(1, rows=0)

    with pytest.raises(ContractError, match=r"'kv\[1\]' has no rows; leave it out together with"):
        entry(((span(0), absent),))


def test_w07_a_layer_without_an_indexer_is_left_out_and_the_rest_is_whole() -> None:
    indexer = entry(((span(0), span(2)),), {0: 0, 2: 1}, name="indexer", rows_are_pages=True)
    pages = indexer.prepare_locations(slots_of(1))

    assert indexer.layer_plan(pages, 1) is None
    assert indexer.page_bytes == 2 * 8


def test_c1_spans_are_on_one_device() -> None:
    region = MemoryRegion(base_ptr=2 << 20, size_bytes=1 << 20, device="cuda:0")

    with pytest.raises(
        ContractError, match=r"spans are on \['cpu', 'cuda:0'\]; make one entry for"
    ):
        entry(((span(0), replace(span(1), region=region)),))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"name": ""}, "pool '': needs a name and a logical pool, got '' and 'kv'"),
        ({"indices_from_pool": ""}, "needs a name and a logical pool, got 'kv' and ''"),
        ({"page_size": 0}, "pool 'kv': page_size must be at least 1, got 0"),
        ({"page_size": 4.0}, "page_size must be an integer, got 4.0"),
        ({"page_size": True}, "page_size must be an integer, got True"),
        ({"page_size": 2**60}, "a page of 1152921504606846976 slots would have .* check page_size"),
        (
            {"replicated": True, "rank_axes": (TP,)},
            r"is replicated and sharded over \['tp'\] at once",
        ),
        (
            {"fragmented": True, "rows_are_pages": True},
            "rows are whole pages, which cannot be frag",
        ),
    ],
)
def test_an_entry_that_cannot_be_is_refused(changed: dict[str, object], problem: str) -> None:
    with pytest.raises(ContractError, match=problem):
        entry(((span(),),), {0: 0}, **changed)


def test_b82_a_page_is_at_most_as_long_as_plans_can_hold() -> None:
    longest = 2**63 - 1

    assert entry(((span(row_bytes=7),),), page_size=longest // 7).page_bytes == longest
    with pytest.raises(ContractError, match=f"a page of {2**60} slots would have {2**63} B"):
        entry(((span(row_bytes=8),),), page_size=2**60)


def test_a_page_is_one_object_unless_it_is_said_otherwise() -> None:
    assert entry(((span(0),), (span(1),))).part_bytes == (2 * PAGE * 8,)
    assert entry(((span(0),), (span(1),)), packed=False).part_bytes == (PAGE * 8, PAGE * 8)


def test_a_page_size_of_numpy_is_kept_as_pythons_own() -> None:
    assert type(entry(page_size=np.int64(PAGE)).page_size) is int


# ---- C2: layer mapping ------------------------------------------------------------------------


@pytest.mark.parametrize("position", [5, 2])
def test_c2_w10_dh8_a_position_beyond_the_spans_is_refused(position: int) -> None:
    with pytest.raises(ContractError, match=f"that layer 0 maps must be at most 1, got {position}"):
        entry(mapping={0: position, 1: 0})


def test_c2_w09_a_negative_position_is_refused() -> None:
    with pytest.raises(ContractError, match="that layer 0 maps must be at least 0, got -1"):
        entry(mapping={0: -1, 1: 0})


@pytest.mark.parametrize("position", [True, 0.0, "0", None, [0.5], "01"])
def test_c2_a_position_is_an_integer(position: object) -> None:
    with pytest.raises(ContractError, match="that layer 0 maps must be an integer"):
        entry(mapping={0: position, 1: 1})


@pytest.mark.parametrize("layer", [True, 0.5, "0", None])
def test_c2_a_layer_id_is_an_integer(layer: object) -> None:
    with pytest.raises(ContractError, match="pool 'kv': a layer id must be an integer"):
        entry(mapping={layer: (0, 1)})


def test_c2_a_layer_id_is_not_negative() -> None:
    with pytest.raises(ContractError, match="a layer id must be at least 0, got -1"):
        entry(mapping={-1: (0, 1)})


@pytest.mark.parametrize(
    "positions", [(1, 0), [1, 0], range(1, -1, -1), np.array([1, 0]), (np.int32(1), np.uint8(0))]
)
def test_c2_numpy_integers_and_every_sequence_are_accepted(positions: object) -> None:
    made = entry(mapping={np.int64(7): positions})

    assert made.layer_mapping == {7: (1, 0)}
    assert {type(value) for value in (*made.layer_mapping, *made.layer_mapping[7])} == {int}


@pytest.mark.parametrize("positions", [(), (0, 0)])
def test_c2_a_layer_maps_distinct_positions(positions: tuple[int, ...]) -> None:
    with pytest.raises(
        ContractError, match=r"layer 0 must map distinct positions, at least one, got"
    ):
        entry(mapping={0: positions, 1: 1})


@pytest.mark.parametrize("mapping", [{}, {0: 0}])
def test_c2_w11_a_span_that_no_layer_maps_is_refused(mapping: dict[int, int]) -> None:
    with pytest.raises(ContractError, match="is mapped by no layer: it would be stored and never"):
        entry(mapping=mapping)


def test_c2_a_span_of_two_layers_must_be_declared_shared() -> None:
    mapping = {0: 0, 1: 1, 2: 0}

    with pytest.raises(
        ContractError, match=r"\(position 0\) is mapped by layers \[0, 2\]; declare"
    ):
        entry(mapping=mapping)
    with pytest.raises(ContractError, match="declare it in shared_positions"):
        entry(mapping=mapping, shared_positions=(1,))
    assert entry(mapping=mapping, shared_positions=(0,)).layer_mapping[2] == (0,)


@pytest.mark.parametrize(
    ("mapping", "positions"),
    [({0: (0, 2), 3: (1, 3)}, {0: [0, 2], 3: [1, 3]}), ({0: (0, 2), 1: 3, 3: 1}, {1: [3], 3: [1]})],
    ids=["drafts ride on mapped layers", "a draft rides on a layer without a target"],
)
def test_w24_drafts_ride_on_a_sparse_mapping(
    mapping: dict[int, object], positions: dict[int, list[int]]
) -> None:
    spans = [span(0), span(1), span(2, rows=8), span(3, rows=8)]
    made = entry((spans,), mapping)
    pages = made.prepare_locations(slots_of(1))

    for layer, expected in positions.items():
        plan = made.layer_plan(pages, layer)
        assert plan is not None
        assert plan.expand().address.tolist() == [spans[i].base_ptr + 4 * 8 for i in expected]


# ---- C3: rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [1, 8])
def test_c3_w02_dh1_padded_rows_that_are_slots_are_refused(padding: int) -> None:
    with pytest.raises(ContractError, match="rows that are slots must be dense, got row 8 B with"):
        entry(((span(0), span(1, padding=padding)),))


def test_c3_dh1_a_column_slice_of_token_rows_is_refused() -> None:
    backing = torch.zeros(64, 640, dtype=torch.uint8)

    with pytest.raises(ContractError, match="got row 512 B with stride 640 B; a page of 4 would"):
        entry(((BufferSpan.from_tensor(backing[:, :512]),),), page_size=4)


def test_c3_rows_that_are_pages_may_be_padded_and_only_their_data_counts() -> None:
    made = entry(((span(padding=8),),), rows_are_pages=True)

    assert made.page_bytes == 8
    ranges = made.page_plan(made.prepare_locations(slots_of(2))).expand()
    assert (ranges.address.tolist(), ranges.size.tolist()) == ([(1 << 20) + 2 * 16], [8])


# ---- C4: bounds -------------------------------------------------------------------------------


def test_c4_the_last_page_fits_and_the_next_one_is_named() -> None:
    made = entry()

    assert made.prepare_locations(slots_of(3)).row.tolist() == [12]
    with pytest.raises(
        ContractError, match=r"page 4 \(rows 16..19\) is out of bounds of span 'kv\[0"
    ):
        made.prepare_locations(slots_of(0, 4))


def test_c4_a_negative_page_is_out_of_bounds() -> None:
    with pytest.raises(ContractError, match=r"page -1 \(rows -4..-1\) is out of bounds"):
        entry().prepare_locations(slots_of(-1))


def test_c4_a_smaller_draft_bounds_the_pages_that_touch_it() -> None:
    made = entry(((span(0), span(1, rows=11)),))

    assert made.prepare_locations(slots_of(1)).num_pages == 1
    with pytest.raises(ContractError, match=r"page 2 \(rows 8..11\) .* 'kv\[1\]' with 11 rows"):
        made.prepare_locations(slots_of(2))


def test_c4_rows_that_are_pages_are_counted_as_pages() -> None:
    made = entry(((span(rows=3),),), rows_are_pages=True)

    assert made.prepare_locations(slots_of(2)).row.tolist() == [2]
    with pytest.raises(ContractError, match=r"page 3 \(rows 3..3\) is out of bounds"):
        made.prepare_locations(slots_of(3))


def test_c4_a_pool_smaller_than_a_page_has_no_page() -> None:
    with pytest.raises(ContractError, match=r"page 0 \(rows 0..3\) .* with 3 rows"):
        entry(((span(rows=3),),)).prepare_locations(slots_of(0))


# ---- C5: indices ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_c5_every_integer_dtype_is_taken(dtype: type[np.generic]) -> None:
    assert entry().prepare_locations(np.array(slots_of(2, 0), dtype=dtype)).row.tolist() == [8, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_c5_tensors_are_taken(dtype: torch.dtype) -> None:
    assert entry().prepare_locations(torch.tensor(slots_of(2), dtype=dtype)).row.tolist() == [8]


@pytest.mark.parametrize(
    "indices", [[], (), range(0), np.empty(0, dtype=np.int64), torch.empty(0, dtype=torch.int64)]
)
def test_c5_no_indices_make_an_empty_plan(indices: object) -> None:
    made = entry()

    plan = made.page_plan(made.prepare_locations(indices))

    assert (plan.num_pages, plan.total_bytes, plan.expand().address.size) == (0, 0, 0)
    assert made.get_page_buffer_meta(indices) == ([], [])


@pytest.mark.parametrize("count", [1, 3, 5, 7])
def test_c5_the_length_is_a_multiple_of_the_page_size(count: int) -> None:
    with pytest.raises(
        ContractError, match=f"got {count} indices, expected a multiple of the page"
    ):
        entry().prepare_locations(list(range(count)))


@pytest.mark.parametrize(
    "indices",
    [
        [1, 2, 3, 4],
        [0, 1, 2, 4],
        [3, 2, 1, 0],
        [0, 0, 0, 0],
        [-1, 0, 1, 2],
        [0, 1, 2, 3, 6, 7, 8, 9],
    ],
)
def test_c5_pages_are_aligned_and_consecutive(indices: list[int]) -> None:
    page = len(indices) // PAGE - 1

    with pytest.raises(
        ContractError, match=f"page {page} of the request must be 4 consecutive slots"
    ):
        entry().prepare_locations(indices)


def test_c5_a_short_page_is_shown_whole() -> None:
    with pytest.raises(ContractError, match=r"got \[0, 1, 2, 3, 9\]$"):
        entry(page_size=5).prepare_locations([0, 1, 2, 3, 9])


def test_c5_a_scattered_page_is_shown_shortened() -> None:
    made = entry(((span(rows=64),),), page_size=8)

    with pytest.raises(ContractError, match=r"got \[0, 1, 2, 3, ... 9\]$"):
        made.prepare_locations([0, 1, 2, 3, 4, 5, 6, 9])


def test_c5_dh6_a_page_is_named_once() -> None:
    with pytest.raises(ContractError, match="page 2 is named 2 times; two keys cannot share one"):
        entry().prepare_locations(slots_of(2, 1, 2))


@pytest.mark.parametrize("indices", [slots_of(2**60), slots_of(2**61 - 1)])
def test_c5_slots_near_the_largest_integer_are_out_of_bounds(indices: list[int]) -> None:
    for rows_are_pages in (False, True):
        with pytest.raises(ContractError, match="is out of bounds"):
            entry(rows_are_pages=rows_are_pages).prepare_locations(indices)


def test_c5_slots_that_overflow_within_a_page_are_refused() -> None:
    made = entry(((span(rows=16),),), page_size=3)

    with pytest.raises(ContractError, match=r"is out of bounds|must be 3 consecutive"):
        made.prepare_locations(np.array([2**63 - 2, 2**63 - 1, -(2**63)]))


@pytest.mark.parametrize(
    "indices", [torch.zeros(2, 4, dtype=torch.int64), torch.tensor(4), np.zeros((4, 1), np.int64)]
)
def test_c5_indices_have_one_dimension(indices: object) -> None:
    with pytest.raises(
        ContractError, match="pool 'kv': indices must have one dimension, got shape"
    ):
        entry().prepare_locations(indices)


@pytest.mark.parametrize(
    "indices",
    [
        np.zeros(4, dtype=np.bool_),
        torch.ones(4, dtype=torch.bool),
        [True, False, True, True],
        [0, True, 2, 3],
    ],
)
def test_c5_w18_bool_indices_are_refused(indices: object) -> None:
    with pytest.raises(ContractError, match="must be integers, got dtype bool; a mask or a float"):
        entry().prepare_locations(indices)


@pytest.mark.parametrize(
    ("indices", "dtype"),
    [
        (np.arange(4.0), "float64"),
        (torch.arange(4.0), "float32"),
        ([0.0, 1.0, 2.0, 3.0], "float64"),
        (np.array(["a"] * 4), "<U1"),
        (np.zeros(4, dtype="m8[s]"), "timedelta64"),
        ([2**70, 1, 2, 3], "object"),
        ([2**63, -1, 2, 3], "float64"),
    ],
)
def test_c5_w18_float_and_other_dtypes_are_refused(indices: object, dtype: str) -> None:
    with pytest.raises(ContractError, match=f"must be integers, got dtype {dtype}"):
        entry().prepare_locations(indices)


# ---- C5: fragmented pools ---------------------------------------------------------------------


def test_c5_a_fragmented_page_coalesces_to_runs() -> None:
    made = entry(fragmented=True)

    pages = made.prepare_locations([5, 6, 1, 9, 10, 11, 12, 13])

    assert pages.num_pages == 2
    assert pages.page.tolist() == [0, 0, 0, 1]
    assert pages.row.tolist() == [5, 1, 9, 10]
    assert pages.rows.tolist() == [2, 1, 1, 4]
    assert pages.first_row.tolist() == [0, 2, 3, 0]


@pytest.mark.parametrize(
    ("indices", "problem"),
    [
        ([0, 1, 2], "got 3 indices, expected a multiple of the page size 4"),
        ([0, 1, 2, 16], r"page 4 \(rows 16..16\) is out of bounds of span 'kv\[0\]' with 16 rows"),
        ([0, 1, 2, -1], r"\(rows -1..-1\) is out of bounds"),
        ([0, 1, 2, 1], "slot 1 is named 2 times"),
        (np.zeros(4), "got dtype float64"),
    ],
)
def test_c5_everything_else_holds_for_fragmented_pools(indices: object, problem: str) -> None:
    with pytest.raises(ContractError, match=problem):
        entry(fragmented=True).prepare_locations(indices)


def test_c5_whole_pages_are_one_run_each() -> None:
    assert entry().prepare_locations(slots_of(2, 0)).contiguous
    assert not entry(fragmented=True).prepare_locations(slots_of(2, 0)).contiguous


def test_c5_a_slot_pool_takes_scattered_states() -> None:
    made = entry(page_size=1, rows_are_pages=True, fragmented=True)

    assert made.prepare_locations([5, 2, 9]).row.tolist() == [5, 2, 9]


# ---- C7: validated once -----------------------------------------------------------------------


def test_c7_prepared_pages_cannot_be_changed() -> None:
    indices = np.array(slots_of(1, 2))
    pages = entry().prepare_locations(indices)

    indices[:] = 0

    assert pages.row.tolist() == [4, 8]
    with pytest.raises(FrozenInstanceError):
        pages.num_pages = 3  # type: ignore[misc]  # what is frozen is under test
    with pytest.raises(ValueError, match="read-only"):
        pages.row[0] = 10**9


@pytest.mark.parametrize("pages", [[10**9, -4], np.array([0]), None])
def test_c7_w21_numbers_that_were_never_checked_are_refused(pages: object) -> None:
    made = entry()

    with pytest.raises(ContractError, match="plans take what prepare_locations returned, got "):
        made.page_plan(pages)  # type: ignore[arg-type]  # wrong types are under test
    with pytest.raises(ContractError, match="plans take what prepare_locations returned, got "):
        made.get_prepared_layer_range_meta(pages, 0)  # type: ignore[arg-type]  # wrong types are under test


def test_c7_w21_pages_of_another_entry_of_the_same_name_are_refused() -> None:
    larger, smaller = entry(((span(rows=64),),)), entry(((span(rows=16),),))
    forged = PreparedPages.of_starts("kv", np.array([10**9]), PAGE)

    for pages in (larger.prepare_locations(slots_of(15)), forged):
        with pytest.raises(ContractError, match="were prepared by another entry, of pool 'kv'"):
            smaller.layer_plan(pages, 0)


# ---- C8: layers without a mapping -------------------------------------------------------------


@pytest.mark.parametrize("layer", [1, 3, 99, -1])
def test_c8_a_layer_without_a_mapping_has_no_plan_and_no_metadata(layer: int) -> None:
    made = entry(mapping={0: 0, 2: 1})
    pages = made.prepare_locations(slots_of(1))

    assert made.layer_plan(pages, layer) is None
    assert made.get_prepared_layer_range_meta(pages, layer) is None


# ---- translation ------------------------------------------------------------------------------


def test_indices_are_translated_by_the_engines_map_and_never_in_place() -> None:
    def halve(slots: IndexArray) -> IndexArray:
        slots //= 2
        return slots

    engines = np.array([8, 10, 12, 14])

    assert entry(index_mapper=halve).translate_indices(engines).tolist() == [4, 5, 6, 7]
    assert engines.tolist() == [8, 10, 12, 14]
    assert entry().translate_indices(torch.tensor([3])).tolist() == [3]


def test_an_entry_shows_its_map_until_it_lets_go_of_the_engine() -> None:
    def same(slots: IndexArray) -> IndexArray:
        return slots

    made = entry(index_mapper=same)
    before = made.index_mapper

    made.retire("closed")

    assert before is same
    assert made.index_mapper is None
    assert entry().index_mapper is None


def test_translated_indices_are_no_view_of_the_engines_own() -> None:
    engines = np.array(slots_of(1))
    translated = entry().translate_indices(engines)

    engines[:] = 0

    assert translated.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("translated", "problem"),
    [
        (np.array([0]), "the index map turned 4 slots into 1"),
        (np.zeros(4), "got dtype float64"),
        (None, "indices must be an array, a tensor or a sequence, got NoneType"),
    ],
)
def test_a_map_that_loses_slots_is_refused(translated: object, problem: str) -> None:
    with pytest.raises(ContractError, match=problem):
        entry(index_mapper=lambda _: translated).translate_indices([0, 1, 2, 3])
