"""Spans and regions are plain numbers that name memory, or refuse to."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.errors import ContractError
from kvlinker.spans import BufferSpan, MemoryKind, MemoryRegion, unique_regions

MAX_ADDRESS = 2**63 - 1


def span(
    base_ptr: int = 4096,
    rows: int = 4,
    row_bytes: int = 16,
    row_stride: int = 16,
    *,
    region: MemoryRegion | None = None,
) -> BufferSpan:
    return BufferSpan(
        base_ptr=base_ptr,
        rows=rows,
        row_bytes=row_bytes,
        row_stride=row_stride,
        region=region,
        label="kv[0]",
    )


def span_with(field: str, value: object) -> BufferSpan:
    """Return the span with one number replaced by anything."""
    numbers: dict[str, object] = {"base_ptr": 4096, "rows": 4, "row_bytes": 16, "row_stride": 16}
    return BufferSpan(**{**numbers, field: value}, label="kv[0]")  # type: ignore[arg-type]  # wrong types are under test


# ---- rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [15, 0, -16])
def test_c3_rows_that_overlap_are_refused(stride: int) -> None:
    with pytest.raises(ContractError, match=r"span 'kv\[0\]': rows overlap, stride -?\d+ B"):
        span(row_stride=stride)


def test_c3_padded_rows_end_with_the_last_rows_data() -> None:
    padded = span(row_bytes=16, row_stride=24)

    assert padded.end_ptr == 4096 + 3 * 24 + 16
    assert not padded.is_dense
    assert span().is_dense


def test_c3_a_null_address_is_refused_where_there_are_rows() -> None:
    with pytest.raises(ContractError, match="4 rows at address 0x0 are no memory"):
        span(base_ptr=0)


def test_c3_an_address_is_at_most_the_largest_that_plans_hold() -> None:
    assert span(base_ptr=MAX_ADDRESS - 64).end_ptr == MAX_ADDRESS
    with pytest.raises(ContractError, match="are no memory"):
        span(base_ptr=MAX_ADDRESS - 63)


@pytest.mark.parametrize("field", ["base_ptr", "rows", "row_bytes", "row_stride"])
@pytest.mark.parametrize("value", [True, 1.5, "16", None, 2**63])
def test_c3_numbers_of_a_span_are_integers_that_plans_hold(field: str, value: object) -> None:
    with pytest.raises(ContractError, match=rf"span 'kv\[0\]': {field} must be "):
        span_with(field, value)


@pytest.mark.parametrize(
    ("field", "value"), [("base_ptr", -1), ("rows", -1), ("row_bytes", 0), ("row_bytes", -16)]
)
def test_c3_numbers_of_a_span_are_not_negative(field: str, value: int) -> None:
    with pytest.raises(ContractError, match=rf"{field} must be at least [01], got {value}"):
        span_with(field, value)


def test_numpy_integers_are_kept_as_pythons_own() -> None:
    made = BufferSpan(
        base_ptr=np.int64(4096),  # type: ignore[arg-type]  # numpy's are taken
        rows=np.uint32(4),  # type: ignore[arg-type]  # numpy's are taken
        row_bytes=np.int32(16),  # type: ignore[arg-type]  # numpy's are taken
        row_stride=np.uint64(16),  # type: ignore[arg-type]  # numpy's are taken
        label="kv[0]",
    )

    assert made == span()
    assert {type(made.base_ptr), type(made.rows), type(made.row_bytes), type(made.row_stride)} == {
        int
    }


def test_a_span_without_rows_may_be_nowhere() -> None:
    empty = span(base_ptr=0, rows=0)

    assert empty.end_ptr == 0
    assert empty.device == "cpu"


def test_a_span_is_frozen_and_compared_by_value() -> None:
    with pytest.raises(FrozenInstanceError):
        span().rows = 5  # type: ignore[misc]  # what is frozen is under test
    assert span() == span()
    assert span() != span(rows=5)
    assert span().relabel("other") == replace(span(), label="other")


@pytest.mark.parametrize(
    "found",
    [
        None,
        MemoryRegion(base_ptr=4096, size_bytes=64),
        MemoryRegion(base_ptr=4096, size_bytes=64, owner=bytearray(64), owner_ptr=4096),
    ],
    ids=["no region", "made up", "no address to ask for"],
)
def test_c10_memory_whose_owner_cannot_say_where_it_is_counts_as_in_place(
    found: MemoryRegion | None,
) -> None:
    span(region=found).verify()


# ---- groups of rows ---------------------------------------------------------------------------


def test_b95_rows_that_are_smaller_blocks_are_grouped_to_pages() -> None:
    blocks = span(rows=8, row_bytes=64, row_stride=64)

    pages = blocks.group_rows(2)

    assert (pages.rows, pages.row_bytes, pages.row_stride) == (4, 128, 128)
    assert pages.base_ptr + 3 * pages.row_stride == blocks.base_ptr + 6 * blocks.row_stride


def test_b94_buffers_of_unequal_rows_over_the_same_pages_are_grouped_to_equal_counts() -> None:
    one, two = span(rows=10), span(rows=20)

    assert one.rows == two.group_rows(2).rows == 10


@pytest.mark.parametrize(
    ("rows", "count", "groups"), [(8, 8, 1), (9, 8, 1), (7, 8, 0), (16, 8, 2), (4, 1, 4)]
)
def test_rows_that_fill_no_group_are_cut(rows: int, count: int, groups: int) -> None:
    assert span(rows=rows).group_rows(count).rows == groups


@pytest.mark.parametrize("count", [0, -1, True, 1.0])
def test_a_group_needs_a_positive_count_of_rows(count: int) -> None:
    with pytest.raises(ContractError, match="rows in a group must be "):
        span().group_rows(count)


def test_padded_rows_make_no_group() -> None:
    padded = span(row_stride=24)

    assert padded.group_rows(1) == padded
    with pytest.raises(ContractError, match="are padded, so that 2 of them are not one range"):
        padded.group_rows(2)


@given(rows=st.integers(0, 100), row_bytes=st.integers(1, 64), count=st.integers(1, 12))
def test_a_group_names_the_same_bytes(rows: int, row_bytes: int, count: int) -> None:
    buffer = span(rows=rows, row_bytes=row_bytes, row_stride=row_bytes)

    grouped = buffer.group_rows(np.int64(count))  # type: ignore[arg-type]  # numpy's are taken

    assert grouped.rows * count <= rows < (grouped.rows + 1) * count
    assert grouped.end_ptr - grouped.base_ptr == grouped.rows * count * row_bytes


# ---- regions ----------------------------------------------------------------------------------


def region(base_ptr: int = 4096, size_bytes: int = 64) -> MemoryRegion:
    return MemoryRegion(base_ptr=base_ptr, size_bytes=size_bytes)


def test_a_span_may_fill_its_region_and_not_leave_it() -> None:
    assert span(region=region()).region == region()
    with pytest.raises(ContractError, match=r"bytes \[0x1000, 0x1040\) leave their region"):
        span(region=region(size_bytes=63))
    with pytest.raises(ContractError, match=r"leave their region \[0x1001, 0x1041\)"):
        span(region=region(base_ptr=4097))


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("base_ptr", 0, "base_ptr must be at least 1"),
        ("base_ptr", -4096, "base_ptr must be at least 1"),
        ("base_ptr", 2**63, "base_ptr must be at most"),
        ("base_ptr", 1.0, "base_ptr must be an integer"),
        ("size_bytes", 0, "size_bytes must be at least 1"),
        ("size_bytes", MAX_ADDRESS - 4095, "size_bytes must be at most"),
        ("size_bytes", True, "size_bytes must be an integer"),
        ("device", "", "the region at 0x1000 needs a device"),
    ],
)
def test_a_region_names_at_least_one_byte_of_some_device(
    field: str, value: object, problem: str
) -> None:
    fields: dict[str, object] = {"base_ptr": 4096, "size_bytes": 64, "device": "cpu"}

    with pytest.raises(ContractError, match=problem):
        MemoryRegion(**{**fields, field: value})  # type: ignore[arg-type]  # wrong types are under test


def test_a_region_may_reach_to_the_largest_address() -> None:
    assert region(size_bytes=MAX_ADDRESS - 4096).end_ptr == MAX_ADDRESS


def test_a_regions_numpy_integers_are_kept_as_pythons_own() -> None:
    made = MemoryRegion(
        base_ptr=np.int64(4096),  # type: ignore[arg-type]  # numpy's are taken
        size_bytes=np.uint32(64),  # type: ignore[arg-type]  # numpy's are taken
    )

    assert made == region()
    assert {type(made.base_ptr), type(made.size_bytes)} == {int}


def test_regions_are_equal_when_they_name_the_same_bytes_whoever_owns_them() -> None:
    first, second = object(), object()
    mine = MemoryRegion(base_ptr=4096, size_bytes=64, owner=first, owner_ptr=1)
    yours = MemoryRegion(base_ptr=4096, size_bytes=64, owner=second, owner_ptr=2)

    assert mine == yours
    assert hash(mine) == hash(yours)
    assert repr(mine) == repr(yours)
    assert mine != replace(yours, device="cuda:0")


def test_a_region_never_leaves_its_process() -> None:
    with pytest.raises(TypeError, match="cannot be pickled; send a description"):
        pickle.dumps(span(region=region()))
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.deepcopy(region())


def test_regions_of_many_spans_are_listed_once_in_order_of_address() -> None:
    low, high = region(4096, 64), region(8192, 64)
    remote = MemoryRegion(base_ptr=64, size_bytes=64, device="cuda:0", kind=MemoryKind.DEVICE)
    spans = [
        span(8192, region=high),
        span(4096, rows=2, region=low),
        span(4128, rows=2, region=region(4096, 64)),
        span(64, region=remote),
        span(),
    ]

    assert unique_regions(spans) == (low, high, remote)
    assert spans[3].device == "cuda:0"
