"""Plans are columns that expand to exactly the ranges that backends take."""

from __future__ import annotations

import numpy as np
import pytest

from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError
from kvlinker.plans import IOVEC, TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.store import ReadRequest

GIB = 1 << 30


def span(base: int, row_bytes: int, *, rows: int = 16, stride: int | None = None) -> BufferSpan:
    return BufferSpan(
        base_ptr=base,
        rows=rows,
        row_bytes=row_bytes,
        row_stride=stride or row_bytes,
        label=str(base),
    )


KEYS = (span(1000, 10), span(2000, 10))
VALUES = (span(3000, 6), span(4000, 6))


def pool(
    *,
    packed: bool = True,
    mapping: dict[int, int | tuple[int, ...]] | None = None,
    fragmented: bool = False,
) -> DevicePoolEntry:
    """Return a pool of keys and values, two slots a page."""
    return DevicePoolEntry(
        name="kv",
        indices_from_pool="kv",
        components=(KEYS, VALUES),
        layer_mapping=mapping or {0: 1, 3: 0},
        page_size=2,
        rows_are_pages=False,
        packed=packed,
        fragmented=fragmented,
    )


def paged_pool() -> DevicePoolEntry:
    """Return a pool of padded pages, four slots a page."""
    return DevicePoolEntry(
        name="index",
        indices_from_pool="kv",
        components=((span(1000, 10, stride=16), span(2000, 7)),),
        layer_mapping={0: 0, 1: 1},
        page_size=4,
        rows_are_pages=True,
    )


# ---- C6: objects ------------------------------------------------------------------------------


def test_c6_a_packed_page_is_one_object_of_all_components() -> None:
    made = pool()
    plan = made.page_plan(made.prepare_locations([4, 5, 0, 1]))

    ranges = plan.expand()

    assert ranges.offset.tolist() == [0, 20, 40, 52] * 2
    assert ranges.size.tolist() == [20, 20, 12, 12] * 2
    assert ranges.part.tolist() == [0] * 8
    assert ranges.page.tolist() == [0] * 4 + [1] * 4
    assert (made.part_bytes, plan.object_bytes, plan.total_bytes) == ((64,), 64, 128)


def test_c6_offsets_restart_in_every_component_that_is_an_object_of_its_own() -> None:
    made = pool(packed=False)
    plan = made.page_plan(made.prepare_locations([4, 5]))

    ranges = plan.expand()

    assert ranges.offset.tolist() == [0, 20, 0, 12]
    assert ranges.part.tolist() == [0, 0, 1, 1]
    assert (made.part_bytes, made.page_bytes, plan.total_bytes) == ((40, 24), 64, 64)


def test_c6_a_page_of_several_objects_is_taken_apart_by_part() -> None:
    made = pool(packed=False)
    plan = made.page_plan(made.prepare_locations([4, 5, 0, 1]))

    with pytest.raises(ContractError, match=r"pool 'kv': a page is 2 objects; .* with by_part\(\)"):
        _ = plan.object_bytes
    keys, values = plan.by_part()

    assert (keys.object_bytes, values.object_bytes) == (40, 24)
    assert keys.expand().address.tolist() == [1040, 2040, 1000, 2000]
    assert values.expand().offset.tolist() == [0, 12, 0, 12]
    assert keys.by_part() == (keys,)


@pytest.mark.parametrize("fragmented", [False, True])
def test_c6_a_part_without_spans_keeps_its_place(*, fragmented: bool) -> None:
    made = pool(packed=False, fragmented=fragmented)
    plan = made.page_plan(made.prepare_locations([4, 5]))
    values_alone = TransferPlan(
        pages=plan.pages, spans=plan.spans.select(plan.spans.part == 1), part_bytes=plan.part_bytes
    )

    keys, values = values_alone.by_part()

    assert (keys.total_bytes, values.total_bytes) == (0, 24)
    assert keys.nested_lists(packed=True) == ([[]], [[]], [[]])
    assert keys.nested_lists(packed=False) == ([], [], [])


# ---- C9: columns ------------------------------------------------------------------------------


def test_c9_a_plan_holds_one_row_per_page_and_one_column_per_span() -> None:
    made = pool()
    pages = made.prepare_locations([4, 5, 0, 1, 8, 9])
    plan = made.page_plan(pages)

    assert plan.pages.row.tolist() == [4, 0, 8]
    assert plan.spans.base.tolist() == [1000, 2000, 3000, 4000]
    assert plan.spans.stride.tolist() == [10, 10, 6, 6]
    assert plan.range_bytes.tolist() == [20, 20, 12, 12]
    assert (plan.pool, plan.num_pages, plan.spans.device) == ("kv", 3, "cpu")
    assert plan.spans.labels == ("1000", "2000", "3000", "4000")


def test_c9_a_layer_plan_holds_that_layers_spans_at_their_place_in_the_object() -> None:
    made = pool(mapping={5: (1, 0)})
    plan = made.layer_plan(made.prepare_locations([4, 5]), 5)

    assert plan is not None
    assert plan.spans.base.tolist() == [2000, 1000, 4000, 3000]
    assert plan.spans.offset.tolist() == [20, 0, 52, 40]
    assert plan.object_bytes == 64


def test_c9_ranges_become_an_array_of_iovecs() -> None:
    made = pool()

    vectors = made.page_plan(made.prepare_locations([4, 5])).expand().iovecs()

    assert vectors.dtype == IOVEC
    assert vectors.dtype.itemsize == 16
    assert vectors.tolist() == [(1040, 20), (2040, 20), (3024, 12), (4024, 12)]


def test_c9_adjacent_slots_of_a_fragmented_page_are_one_range() -> None:
    made = pool(fragmented=True)

    ranges = made.page_plan(made.prepare_locations([4, 5, 9, 2])).expand()

    assert ranges.page.tolist() == [0] * 4 + [1] * 8
    assert ranges.address.tolist() == [
        *(1040, 2040, 3024, 4024),
        *(1090, 1020, 2090, 2020, 3054, 3012, 4054, 4012),
    ]
    assert ranges.size.tolist() == [20, 20, 12, 12, *[10] * 4, *[6] * 4]
    assert ranges.offset.tolist() == [0, 20, 40, 52, 0, 10, 20, 30, 40, 46, 52, 58]


def test_c9_columns_cannot_be_changed() -> None:
    made = pool()
    plan = made.page_plan(made.prepare_locations([4, 5]))

    with pytest.raises(ValueError, match="read-only"):
        plan.spans.base[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        plan.range_bytes[0] = 0


def test_b82_sizes_beyond_four_gib_are_not_cut() -> None:
    halves = (span(1 << 40, 3 * GIB, rows=4), span(1 << 50, 2 * GIB, rows=4))
    made = DevicePoolEntry(
        name="kv",
        indices_from_pool="kv",
        components=(halves,),
        layer_mapping={0: (0, 1)},
        page_size=1,
        rows_are_pages=True,
    )
    plan = made.page_plan(made.prepare_locations([3, 1]))

    assert (made.page_bytes, plan.object_bytes, plan.total_bytes) == (5 * GIB, 5 * GIB, 10 * GIB)
    assert plan.expand().offset.tolist() == [0, 3 * GIB] * 2
    assert plan.expand().address.tolist() == [
        (1 << 40) + 9 * GIB,
        (1 << 50) + 6 * GIB,
        (1 << 40) + 3 * GIB,
        (1 << 50) + 2 * GIB,
    ]


def test_b82_addresses_near_the_largest_are_not_cut() -> None:
    base = 2**63 - 1 - 16 * 8
    made = DevicePoolEntry(
        name="kv",
        indices_from_pool="kv",
        components=((span(base, 8),),),
        layer_mapping={0: 0},
        page_size=1,
        rows_are_pages=False,
    )

    assert made.get_page_buffer_meta([15]) == ([base + 15 * 8], [8])


# ---- C9: choosing pages -----------------------------------------------------------------------


def test_c9_chosen_pages_are_renumbered_in_the_order_given() -> None:
    made = pool()
    plan = made.page_plan(made.prepare_locations([4, 5, 0, 1, 8, 9]))

    chosen = plan.select([2, 0])

    assert chosen.pages.row.tolist() == [8, 4]
    assert chosen.expand().page.tolist() == [0] * 4 + [1] * 4
    assert plan.select([]).num_pages == 0
    assert made.layer_plan(chosen.pages, 0) is not None


def test_c9_chosen_fragmented_pages_keep_all_their_runs() -> None:
    made = pool(fragmented=True)
    pages = made.prepare_locations([4, 9, 0, 1, 8, 3])

    chosen = pages.select(np.array([2, 1]))

    assert chosen.num_pages == 2
    assert chosen.page.tolist() == [0, 0, 1]
    assert chosen.row.tolist() == [8, 3, 0]
    assert chosen.rows.tolist() == [1, 1, 2]
    assert chosen.first_row.tolist() == [0, 1, 0]
    assert pages.select([]).row.size == 0


def test_c9_spans_are_chosen_by_a_mask_or_by_numbers_and_keep_their_places() -> None:
    entry = pool()
    plan = entry.page_plan(entry.prepare_locations([4, 5, 0, 1]))
    mask = np.array([False, True, False, True])

    for chosen in (plan.select_spans(mask), plan.select_spans(np.flatnonzero(mask))):
        assert chosen.spans.labels == ("2000", "4000")
        assert chosen.spans.offset.tolist() == [20, 52]
        assert (chosen.num_pages, chosen.object_bytes) == (2, plan.object_bytes)
    assert plan.select_spans(np.arange(4)) is plan
    assert plan.select_spans(np.ones(4, dtype=np.bool_)) is plan


@pytest.mark.parametrize("fragmented", [False, True])
@pytest.mark.parametrize(
    ("pages", "problem"),
    [
        ([3], r"pool 'kv': cannot select pages \[3\] of 3"),
        ([0, -1], r"cannot select pages \[0, -1\] of 3"),
        ([1, 0, 1], r"pages \[1, 0, 1\] name one twice; two keys cannot share one place"),
        ([True, False, True], "got dtype bool"),
    ],
)
def test_c5_what_is_no_page_of_a_plan_cannot_be_chosen(
    pages: list[int], problem: str, *, fragmented: bool
) -> None:
    made = pool(fragmented=fragmented)
    plan = made.page_plan(made.prepare_locations([4, 5, 0, 1, 8, 9]))

    with pytest.raises(ContractError, match=problem):
        plan.select(pages)


# ---- SGLang's shapes --------------------------------------------------------------------------


def test_c9_page_metadata_is_two_flat_lists_page_by_page() -> None:
    addresses, sizes = pool().get_page_buffer_meta([4, 5, 0, 1])

    assert addresses == [1040, 2040, 3024, 4024, 1000, 2000, 3000, 4000]
    assert sizes == [20, 20, 12, 12, 20, 20, 12, 12]
    assert {type(number) for number in (*addresses, *sizes)} == {int}
    assert pool(packed=False).get_page_buffer_meta([4, 5, 0, 1]) == (addresses, sizes)


def test_c9_page_metadata_of_padded_pages_steps_by_the_stride() -> None:
    assert paged_pool().get_page_buffer_meta([12, 13, 14, 15, 4, 5, 6, 7]) == (
        [1048, 2021, 1016, 2007],
        [10, 7, 10, 7],
    )


def test_c9_packed_layer_metadata_is_one_inner_list_per_page() -> None:
    made = pool()
    pages = made.prepare_locations([4, 5, 0, 1])

    assert made.get_prepared_layer_range_meta(pages, 3) == (
        [[1040, 3024], [1000, 3000]],
        [[20, 12], [20, 12]],
        [[0, 40], [0, 40]],
    )
    assert made.get_prepared_layer_range_meta(pages, 0) == (
        [[2040, 4024], [2000, 4000]],
        [[20, 12], [20, 12]],
        [[20, 52], [20, 52]],
    )


def test_c9_layer_metadata_of_several_objects_is_one_inner_list_per_page_and_component() -> None:
    made = pool(packed=False)
    pages = made.prepare_locations([4, 5, 0, 1])

    assert made.get_prepared_layer_range_meta(pages, 0) == (
        [[2040], [4024], [2000], [4000]],
        [[20], [12], [20], [12]],
        [[20], [12], [20], [12]],
    )


def test_c9_a_layer_of_several_spans_keeps_the_order_of_its_mapping() -> None:
    mapping: dict[int, int | tuple[int, ...]] = {5: (1, 0)}
    packed, apart = pool(mapping=mapping), pool(mapping=mapping, packed=False)

    assert packed.get_prepared_layer_range_meta(packed.prepare_locations([4, 5]), 5) == (
        [[2040, 1040, 4024, 3024]],
        [[20, 20, 12, 12]],
        [[20, 0, 52, 40]],
    )
    assert apart.get_prepared_layer_range_meta(apart.prepare_locations([4, 5]), 5) == (
        [[2040], [1040], [4024], [3024]],
        [[20], [20], [12], [12]],
        [[20], [0], [12], [0]],
    )


def test_c9_layer_metadata_of_padded_pages_steps_by_the_stride() -> None:
    made = paged_pool()

    assert made.get_prepared_layer_range_meta(made.prepare_locations([12, 13, 14, 15]), 1) == (
        [[2021]],
        [[7]],
        [[10]],
    )


@pytest.mark.parametrize("packed", [True, False])
def test_c9_layer_metadata_of_no_pages_is_empty(*, packed: bool) -> None:
    made = pool(packed=packed)

    assert made.get_prepared_layer_range_meta(made.prepare_locations([]), 0) == ([], [], [])


def test_c9_layer_metadata_of_fragmented_pages_lists_their_runs() -> None:
    packed, apart = pool(fragmented=True), pool(fragmented=True, packed=False)
    slots = [9, 2, 4, 5]

    assert packed.get_prepared_layer_range_meta(packed.prepare_locations(slots), 3) == (
        [[1090, 1020, 3054, 3012], [1040, 3024]],
        [[10, 10, 6, 6], [20, 12]],
        [[0, 10, 40, 46], [0, 40]],
    )
    assert apart.get_prepared_layer_range_meta(apart.prepare_locations(slots), 3) == (
        [[1090, 1020], [3054, 3012], [1040], [3024]],
        [[10, 10], [6, 6], [20], [12]],
        [[0, 10], [0, 6], [0], [0]],
    )
    assert packed.get_prepared_layer_range_meta(packed.prepare_locations([]), 3) == ([], [], [])


@pytest.mark.parametrize(("pages", "longer"), [(1, 0), (2, 1)], ids=["fewer", "longer"])
def test_t4_a_read_of_other_objects_than_were_asked_for_is_refused(pages: int, longer: int) -> None:
    entry = pool()
    plan = entry.page_plan(entry.prepare_locations(range(2 * pages)))
    request = ReadRequest(
        keys=(b"a", b"b"), object_bytes=plan.object_bytes + longer, fingerprint=b"f"
    )

    with pytest.raises(ContractError, match=f"a plan of {pages} objects of 64 B does not fit"):
        request.check(plan)
