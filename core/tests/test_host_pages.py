"""Host pages: objects in host memory, and the ranges that they are read by."""

from __future__ import annotations

import numpy as np
import pytest

from kvlinker.plans import TransferPlan
from kvlinker.stores.host_pages import HostPages, ObjectRanges, RangesSeen, by_range

_RANGES = ObjectRanges(
    pool="kv", offset=np.array([0, 4, 10], dtype=np.int64), size=np.array([4, 6, 2], dtype=np.int64)
)


def plan_of(*ranges: tuple[int, int]) -> TransferPlan:
    """Return a plan of one page with these offsets and sizes in an object of 12 bytes."""
    offsets, sizes = (np.array(column, dtype=np.int64) for column in zip(*ranges, strict=True))
    made = ObjectRanges(pool="kv", offset=offsets, size=sizes)
    plan = HostPages(64).plan(made, 1)
    return TransferPlan(pages=plan.pages, spans=plan.spans, part_bytes=(12,))


def test_ranges_that_were_seen_in_any_order_make_an_object() -> None:
    seen = RangesSeen(12)

    seen.add(plan_of((4, 6)))
    seen.add(plan_of((0, 4), (10, 2)))

    tiling = seen.tiling()
    assert tiling is not None
    assert tiling.offset.tolist() == [0, 4, 10]
    assert tiling.size.tolist() == [4, 6, 2]
    assert tiling.object_bytes == 12


@pytest.mark.parametrize(
    "ranges",
    [[(0, 4), (4, 6)], [(0, 4), (10, 2)], [(4, 6), (10, 2)], [(0, 6), (4, 6)], [(0, 12), (12, 2)]],
    ids=["no end", "a gap", "no beginning", "an overlap", "too long"],
)
def test_ranges_that_are_not_each_byte_once_make_none(ranges: list[tuple[int, int]]) -> None:
    seen = RangesSeen(12)

    seen.add(plan_of(*ranges))

    assert seen.tiling() is None


def test_a_plan_names_objects_one_behind_the_other() -> None:
    pages = HostPages(40)

    plan = pages.plan(_RANGES, pages.room_for(12))

    ranges = plan.expand()
    base = pages.region.base_ptr
    assert plan.num_pages == 3
    assert ((ranges.address - base) % 12).tolist() == [0, 4, 10] * 3
    assert (ranges.address + ranges.size).max() == base + 36
    assert plan.select([2]).expand().address.tolist() == [base + 24, base + 28, base + 34]


def test_a_plan_can_be_taken_range_by_range() -> None:
    plan = HostPages(24).plan(_RANGES, 2)

    parts = [part.expand().size.tolist() for part in by_range(plan)]

    assert parts == [[4, 4], [6, 6], [2, 2]]
