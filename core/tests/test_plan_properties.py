"""On random layouts, plans and copies agree with a model that handles one byte at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import HostAccess, HostObjects
from kvlinker.entries import DevicePoolEntry
from kvlinker.plans import Ranges, TransferPlan
from kvlinker.spans import BufferSpan

POISON = 0xFF
_Bytes = NDArray[np.uint8]


# ---- layouts and the model of them ------------------------------------------------------------


@dataclass(frozen=True)
class Buffer:
    """A tensor of rows in a larger allocation, with padding and strangers around it."""

    rows: int
    row_bytes: int
    stride: int
    before: int
    """Bytes of the allocation in front of the first row."""
    backing: torch.Tensor = field(init=False)
    """uint8, the whole allocation."""

    def __post_init__(self) -> None:
        backing = torch.full((self.before + self.rows * self.stride + 7,), 0xA5, dtype=torch.uint8)
        object.__setattr__(self, "backing", backing)

    def tensor(self) -> torch.Tensor:
        return self.backing.as_strided((self.rows, self.row_bytes), (self.stride, 1), self.before)

    @property
    def bytes(self) -> _Bytes:
        """The whole allocation, as it is now."""
        return self.backing.numpy()

    def offsets(self, row: int) -> range:
        """Return where in the allocation a row's data is."""
        start = self.before + row * self.stride
        return range(start, start + self.row_bytes)


@dataclass(frozen=True)
class Layout:
    """A pool, and what its objects are, said byte by byte."""

    entry: DevicePoolEntry
    components: tuple[tuple[Buffer, ...], ...]

    def page_offsets(self, buffer: Buffer, slots: list[int]) -> list[int]:
        """Return where in the allocation the bytes of one page are, in the object's order."""
        page_size = self.entry.page_size
        rows = [slots[0] // page_size] if self.entry.rows_are_pages else slots
        return [offset for row in rows for offset in buffer.offsets(row)]

    def objects(self, slots: list[int]) -> list[list[tuple[Buffer, int]]]:
        """Return a page's objects: for each byte, its buffer and where in the allocation it is."""
        parts = [
            [(buffer, offset) for buffer in part for offset in self.page_offsets(buffer, slots)]
            for part in self.components
        ]
        return [[byte for part in parts for byte in part]] if self.entry.packed else parts

    def layer_bytes(self, slots: list[int], layer: int) -> set[tuple[int, int]]:
        """Return the bytes that belong to a layer, each as its object and its offset there."""
        positions = self.entry.layer_mapping.get(layer, ())
        chosen = {id(part[position]) for part in self.components for position in positions}
        return {
            (part, offset)
            for part, content in enumerate(self.objects(slots))
            for offset, (buffer, _) in enumerate(content)
            if id(buffer) in chosen
        }

    def buffers(self) -> list[Buffer]:
        return [buffer for part in self.components for buffer in part]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    page_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    rows_are_pages = draw(st.booleans())
    fragmented = draw(st.booleans()) and not rows_are_pages
    pages = draw(st.sampled_from([1, 3, 7, 60]))
    count = draw(st.integers(1, 4))
    components = tuple(
        tuple(draw(buffers(pages, page_size, rows_are_pages=rows_are_pages)) for _ in range(count))
        for _ in range(draw(st.integers(1, 3)))
    )
    entry = DevicePoolEntry(
        name="kv",
        indices_from_pool="kv",
        components=[[BufferSpan.from_tensor(b.tensor()) for b in part] for part in components],
        layer_mapping=draw(mappings(count)),
        page_size=page_size,
        rows_are_pages=rows_are_pages,
        packed=draw(st.booleans()),
        fragmented=fragmented,
    )
    return Layout(entry, components)


@st.composite
def buffers(draw: st.DrawFn, pages: int, page_size: int, *, rows_are_pages: bool) -> Buffer:
    """Draw a buffer of at least so many pages; a draft's may be the smallest, and end within a page."""
    row_bytes = draw(st.integers(1, 24))
    padding = draw(st.integers(0, 9)) if rows_are_pages else 0
    rows = pages if rows_are_pages else pages * page_size + draw(st.integers(0, page_size - 1))
    rows += draw(st.integers(0, 3)) * (1 if rows_are_pages else page_size)
    return Buffer(rows, row_bytes, row_bytes + padding, draw(st.integers(0, 5)))


@st.composite
def mappings(draw: st.DrawFn, count: int) -> dict[int, tuple[int, ...]]:
    """Draw a sparse mapping of layers to one span or several, drafts among them."""
    order = draw(st.permutations(range(count)))
    riders = draw(st.integers(0, count - 1))
    layers = draw(st.permutations(range(count + 2)))
    mapping: dict[int, tuple[int, ...]] = {layers[i]: (order[i],) for i in range(count - riders)}
    for i in range(count - riders, count):
        layer = draw(st.sampled_from(layers[: count - riders]))
        mapping[layer] = (*mapping[layer], order[i])
    return mapping


def rows_in_all(layout: Layout) -> int:
    return min(buffer.rows for buffer in layout.buffers())


@st.composite
def requests(draw: st.DrawFn, layout: Layout, count: int | None = None) -> list[list[int]]:
    """Draw the slots of some distinct pages, page by page."""
    size = layout.entry.page_size
    rows = rows_in_all(layout)
    pages = rows if layout.entry.rows_are_pages else rows // size
    chosen = draw(st.permutations(range(pages)))
    count = draw(st.integers(0, pages) | st.just(pages)) if count is None else count
    if layout.entry.fragmented:
        slots = draw(st.permutations(range(pages * size)))
        return [list(slots[i * size : (i + 1) * size]) for i in range(count)]
    return [[page * size + i for i in range(size)] for page in chosen[:count]]


@st.composite
def layouts_and_requests(draw: st.DrawFn) -> tuple[Layout, list[list[int]]]:
    layout = draw(layouts())
    return layout, draw(requests(layout))


def flat(pages: list[list[int]]) -> IndexArray:
    return np.array([slot for page in pages for slot in page], dtype=np.int64)


def fill(layout: Layout, seed: int) -> None:
    generator = np.random.default_rng(seed)
    for buffer in layout.buffers():
        buffer.bytes[:] = generator.integers(0, POISON, buffer.bytes.size, dtype=np.uint8)


# ---- plans ------------------------------------------------------------------------------------


def address_of(buffer: Buffer, offset: int) -> int:
    return buffer.backing.data_ptr() + offset


def bytes_of(ranges: Ranges) -> dict[tuple[int, int, int], int]:
    """Return page, object and offset of every byte in a plan to its address."""
    found: dict[tuple[int, int, int], int] = {}
    columns = (ranges.page, ranges.part, ranges.address, ranges.size, ranges.offset)
    for page, part, address, size, offset in zip(*(c.tolist() for c in columns), strict=True):
        for i in range(size):
            assert (page, part, offset + i) not in found, "a byte of an object is named twice"
            found[page, part, offset + i] = address + i
    return found


@given(layouts_and_requests())
def test_c6_a_page_plan_is_the_exact_tiling_of_the_models_objects(
    given_: tuple[Layout, list[list[int]]],
) -> None:
    layout, pages = given_
    entry = layout.entry

    plan = entry.page_plan(entry.prepare_locations(flat(pages)))

    expected = {
        (number, part, offset): address_of(buffer, where)
        for number, slots in enumerate(pages)
        for part, content in enumerate(layout.objects(slots))
        for offset, (buffer, where) in enumerate(content)
    }
    assert bytes_of(plan.expand()) == expected
    assert plan.total_bytes == len(expected) == len(pages) * entry.page_bytes


@given(layouts_and_requests())
def test_c9_the_plans_of_all_layers_are_the_page_plan(
    given_: tuple[Layout, list[list[int]]],
) -> None:
    layout, pages = given_
    entry = layout.entry
    prepared = entry.prepare_locations(flat(pages))
    whole = bytes_of(entry.page_plan(prepared).expand())

    union: dict[tuple[int, int, int], int] = {}
    for layer in range(max(entry.layer_mapping) + 2):
        plan = entry.layer_plan(prepared, layer)
        found = bytes_of(plan.expand()) if plan is not None else {}
        assert {(page, part, offset) for page, part, offset in found} == {
            (page, part, offset)
            for page, slots in enumerate(pages)
            for part, offset in layout.layer_bytes(slots, layer)
        }
        assert not union.keys() & found.keys()
        union |= found

    assert union == whole


@given(layouts_and_requests())
def test_c9_nested_lists_and_iovecs_are_the_same_ranges(
    given_: tuple[Layout, list[list[int]]],
) -> None:
    layout, pages = given_
    entry = layout.entry
    prepared = entry.prepare_locations(flat(pages))
    layer = min(entry.layer_mapping)
    plan = entry.layer_plan(prepared, layer)
    assert plan is not None
    ranges = plan.expand()

    metadata = entry.get_prepared_layer_range_meta(prepared, layer)

    assert metadata is not None
    lists = len(pages) if entry.packed else len(pages) * len(plan.spans.base)
    assert [len(column) for column in metadata] == [lists] * 3
    joined = [[number for inner in column for number in inner] for column in metadata]
    assert joined == [ranges.address.tolist(), ranges.size.tolist(), ranges.offset.tolist()]
    assert ranges.iovecs().tolist() == list(zip(joined[0], joined[1], strict=True))


@given(layouts_and_requests(), st.data())
def test_c9_chosen_pages_are_planned_like_pages_asked_for_alone(
    given_: tuple[Layout, list[list[int]]], data: st.DataObject
) -> None:
    layout, pages = given_
    entry = layout.entry
    order = data.draw(st.permutations(range(len(pages))))
    chosen = order[: data.draw(st.integers(0, len(pages)))]

    plan = entry.page_plan(entry.prepare_locations(flat(pages))).select(chosen)

    alone = entry.page_plan(entry.prepare_locations(flat([pages[i] for i in chosen])))
    assert bytes_of(plan.expand()) == bytes_of(alone.expand())


# ---- copies -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shelf:
    """Host slots with gaps between them, in an order of their own."""

    backing: _Bytes
    objects: HostObjects

    def payload(self, number: int, size: int) -> _Bytes:
        """Return the bytes of an object."""
        span = self.objects.span
        start = span.base_ptr - self.backing.ctypes.data - self.objects.first_offset
        start += int(self.objects.slots[number]) * span.row_stride
        return self.backing[start : start + size]


def shelf(size: int, count: int, *, scattered: bool, gap: int, header: int) -> Shelf:
    rows, row_bytes = count + 3, header + size
    stride = row_bytes + gap
    backing = np.full(rows * stride + 1, 0x5A, dtype=np.uint8)
    order = np.random.default_rng(count).permutation(rows) if scattered else np.arange(rows)
    span = BufferSpan(
        base_ptr=backing.ctypes.data, rows=rows, row_bytes=row_bytes, row_stride=stride
    )
    return Shelf(backing, HostObjects(span=span, slots=order[:count], first_offset=-header))


def copy(plan: TransferPlan, shelves: list[Shelf], *, out: bool) -> None:
    access = HostAccess()
    for part, place in zip(plan.by_part(), shelves, strict=True):
        if out:
            access.copy_out(part, place.objects)
        else:
            access.copy_in(part, place.objects)


Page = list[list[int]]
"""The values of a page's objects, byte by byte."""


def values_of(layout: Layout, slots: list[int]) -> Page:
    return [[int(b.bytes[where]) for b, where in part] for part in layout.objects(slots)]


def check_shelves(shelves: list[Shelf], before: list[_Bytes], pages: list[Page]) -> None:
    """Check that the shelves hold the pages, and beside them what they held before."""
    for part, (place, array) in enumerate(zip(shelves, before, strict=True)):
        for number, parts in enumerate(pages):
            content = place.payload(number, len(parts[part]))
            assert content.tolist() == parts[part]
            start = content.ctypes.data - place.backing.ctypes.data
            array[start : start + content.size] = content
        assert np.array_equal(place.backing, array), "a byte beside the objects was written"


def poisoned_but(layout: Layout, targets: list[list[int]], pages: list[Page]) -> list[_Bytes]:
    """Return what every allocation should hold when poison was overwritten by the pages alone."""
    arrays = [np.full(buffer.bytes.size, POISON, dtype=np.uint8) for buffer in layout.buffers()]
    places = {id(buffer): array for buffer, array in zip(layout.buffers(), arrays, strict=True)}
    for slots, parts in zip(targets, pages, strict=True):
        for content, values in zip(layout.objects(slots), parts, strict=True):
            for (buffer, where), value in zip(content, values, strict=True):
                places[id(buffer)][where] = value
    return arrays


@given(st.data(), layouts())
def test_c6_pages_come_back_elsewhere_and_no_other_byte_is_touched(
    data: st.DataObject, layout: Layout
) -> None:
    entry = layout.entry
    sources = data.draw(requests(layout))
    targets = data.draw(requests(layout, len(sources)))
    scattered, gap = data.draw(st.booleans()), data.draw(st.integers(0, 5))
    header = data.draw(st.sampled_from([0, 64]))
    shelves = [
        shelf(size, len(sources), scattered=scattered, gap=gap, header=header)
        for size in entry.part_bytes
    ]
    fill(layout, seed=len(sources))
    pages = [values_of(layout, slots) for slots in sources]
    before = [place.backing.copy() for place in shelves]

    copy(entry.page_plan(entry.prepare_locations(flat(sources))), shelves, out=True)

    check_shelves(shelves, before, pages)
    for buffer in layout.buffers():
        buffer.bytes[:] = POISON
    prepared = entry.prepare_locations(flat(targets))
    layer_plans = [
        plan for layer in entry.layer_mapping if (plan := entry.layer_plan(prepared, layer))
    ]

    for plan in data.draw(st.sampled_from([[entry.page_plan(prepared)], layer_plans])):
        copy(plan, shelves, out=False)

    for buffer, expected in zip(
        layout.buffers(), poisoned_but(layout, targets, pages), strict=True
    ):
        assert np.array_equal(buffer.bytes, expected), "pool bytes differ from the model's"
