"""An entry is one physical device pool, seen page by page without a copy.

Everything that could restore a wrong byte is refused when an entry is made, or when its pages are prepared.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

import numpy as np

from kvlinker.description import IndexArray, IndexMap, RankAxis
from kvlinker.errors import ContractError, StalePoolError
from kvlinker.plans import LayerMetadata, PreparedPages, SpanColumns, TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.transfers import as_index_array

__all__ = ["DevicePoolEntry"]

_SHOWN = 5
"""Indices of a page that a message shows."""


class DevicePoolEntry:
    """One physical device pool, seen page by page without a copy."""

    def __init__(  # noqa: PLR0913  # one record, named field by field
        self,
        *,
        name: str,
        indices_from_pool: str,
        components: Sequence[Sequence[BufferSpan]],
        layer_mapping: Mapping[int, int | Sequence[int]],
        page_size: int,
        rows_are_pages: bool,
        packed: bool = True,
        index_mapper: IndexMap | None = None,
        replicated: bool = False,
        value_format: str = "",
        rank_axes: Sequence[RankAxis] = (),
        is_writer: bool = True,
        shared_positions: Iterable[int] = (),
        fragmented: bool = False,
    ) -> None:
        """Check the layout and keep it.

        Args:
            name: physical pool, unique in its group.
            indices_from_pool: logical pool whose slots address it.
            components: lists of spans of one kind, one per layer, such as all K and all V buffers.
            layer_mapping: transfer layer to its span's position, or several, the same in every component.
            page_size: slots in a page; 1 for a slot pool.
            rows_are_pages: a row is a whole page; otherwise a row is a slot.
            packed: one object per page; otherwise one per page and component.
            index_mapper: the engine's translation of slots, applied once, in `translate_indices`.
            replicated: every rank holds the same bytes.
            value_format: what a value's bits mean, as far as sizes do not tell.
            rank_axes: the axes that a sharded pool is sharded over.
            is_writer: this rank writes the shard; the others hold copies of it.
            shared_positions: span positions that several layers may map.
            fragmented: a page's slots need not be contiguous.

        Raises:
            ContractError: anything in it would move bytes that are not the page's; the message says what.
        """
        self.name = name
        self.indices_from_pool = indices_from_pool
        self.page_size = page_size
        self.rows_are_pages = rows_are_pages
        self.packed = packed
        self.replicated = replicated
        self.value_format = value_format
        self.rank_axes = tuple(rank_axes)
        self.is_writer = is_writer
        self.fragmented = fragmented
        self._index_mapper = index_mapper
        self._components = tuple(tuple(component) for component in components)
        self._stale = ""
        self._check_names()
        self._check_components()
        self.layer_mapping = MappingProxyType(
            {self._layer(key): self._positions(key, value) for key, value in layer_mapping.items()}
        )
        self._check_mapping(frozenset(shared_positions))
        self._columns, self.part_bytes = self._layout()
        self._layer_columns = {layer: self._columns_of(layer) for layer in self.layer_mapping}

    # ---- checks -------------------------------------------------------------------------------

    def _refuse(self, problem: str) -> NoReturn:
        msg = f"pool {self.name!r}: {problem}"
        raise ContractError(msg)

    def _check_names(self) -> None:
        if not self.name or not self.indices_from_pool:
            msg = (
                f"needs a name and a logical pool, got {self.name!r} and {self.indices_from_pool!r}"
            )
            self._refuse(msg)
        if (
            isinstance(self.page_size, bool)
            or not isinstance(self.page_size, int)
            or self.page_size < 1
        ):
            msg = f"page_size must be an integer of at least 1, got {self.page_size!r}"
            self._refuse(msg)
        if self.replicated and self.rank_axes:
            names = [axis.name for axis in self.rank_axes]
            msg = f"is replicated and sharded over {names} at once; give one of them"
            self._refuse(msg)
        if self.fragmented and self.rows_are_pages and self.page_size > 1:
            self._refuse("rows are whole pages, which cannot be fragmented into slots")

    def _check_components(self) -> None:
        if not self._components or not all(self._components):
            self._refuse("needs at least one component with at least one span in each")
        counts = [len(component) for component in self._components]
        if len(set(counts)) > 1:
            self._refuse(f"components must have equal span counts, got {counts}")
        for span in self.spans:
            self._check_span(span)

    def _check_span(self, span: BufferSpan) -> None:
        if not span.rows:
            msg = (
                f"span {span.label!r} has no rows; leave it out together with its layer's mapping "
                f"and list it as omitted"
            )
            self._refuse(msg)
        if not self.rows_are_pages and not span.is_dense:
            msg = (
                f"span {span.label!r}: rows that are slots must be dense, got row {span.row_bytes} B "
                f"with stride {span.row_stride} B; a page of {self.page_size} would not be one range"
            )
            self._refuse(msg)

    def _layer(self, layer: object) -> int:
        if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or layer < 0:
            self._refuse(f"layer ids are integers of at least 0, got {layer!r}")
        return int(layer)

    def _positions(self, layer: int, value: int | Sequence[int]) -> tuple[int, ...]:
        raw = value if isinstance(value, Sequence) else (value,)
        count = len(self._components[0])
        positions = []
        for item in raw:
            try:
                position = operator.index(item)
            except TypeError:
                position = -1
            if isinstance(item, bool | np.bool_) or not 0 <= position < count:
                msg = f"layer {layer} maps position {item!r}, but there are {count} spans (0..{count - 1})"
                self._refuse(msg)
            positions.append(position)
        if not positions or len(set(positions)) != len(positions):
            self._refuse(
                f"layer {layer} must map distinct positions, at least one, got {positions}"
            )
        return tuple(positions)

    def _check_mapping(self, shared: frozenset[int]) -> None:
        mapped = [position for positions in self.layer_mapping.values() for position in positions]
        for position, span in enumerate(self._components[0]):
            times = mapped.count(position)
            if not times:
                msg = (
                    f"span {span.label!r} (position {position}) is mapped by no layer: "
                    f"it would be stored and never loaded"
                )
                self._refuse(msg)
            if times > 1 and position not in shared:
                layers = [la for la, ps in self.layer_mapping.items() if position in ps]
                msg = (
                    f"span {span.label!r} (position {position}) is mapped by layers {layers}; "
                    f"declare it in shared_positions"
                )
                self._refuse(msg)

    # ---- layout -------------------------------------------------------------------------------

    @property
    def components(self) -> tuple[tuple[BufferSpan, ...], ...]:
        """Lists of spans of one kind; raises StalePoolError once the pool is given up."""
        self.check_live()
        return self._components

    @property
    def spans(self) -> tuple[BufferSpan, ...]:
        """All spans in object order: component by component."""
        self.check_live()
        return tuple(span for component in self._components for span in component)

    @property
    def page_rows(self) -> int:
        """Pool rows in a page."""
        return 1 if self.rows_are_pages else self.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, over all its objects."""
        return sum(self.part_bytes)

    def _layout(self) -> tuple[SpanColumns, tuple[int, ...]]:
        offsets, parts, sizes = [], [], []
        offset = 0
        for part, component in enumerate(self._components):
            if part and not self.packed:
                sizes.append(offset)
                offset = 0
            for span in component:
                offsets.append(offset)
                parts.append(0 if self.packed else part)
                offset += span.row_bytes * self.page_rows
        sizes.append(offset)
        spans = self.spans
        columns = SpanColumns(
            labels=tuple(span.label for span in spans),
            base=np.array([span.base_ptr for span in spans], dtype=np.int64),
            stride=np.array([span.row_stride for span in spans], dtype=np.int64),
            row_bytes=np.array([span.row_bytes for span in spans], dtype=np.int64),
            span_rows=np.array([span.rows for span in spans], dtype=np.int64),
            offset=np.array(offsets, dtype=np.int64),
            part=np.array(parts, dtype=np.int64),
        )
        return columns.select(np.arange(len(spans))), tuple(sizes)

    def _columns_of(self, layer: int) -> SpanColumns:
        count = len(self._components[0])
        positions = self.layer_mapping[layer]
        chosen = [
            component * count + position
            for component in range(len(self._components))
            for position in positions
        ]
        return self._columns.select(np.array(chosen, dtype=np.int64))

    def layout_fields(self) -> tuple[object, ...]:
        """Return what determines the bytes of this pool's objects, for the group's fingerprint."""
        return (
            self.name,
            self.indices_from_pool,
            self.page_size,
            self.rows_are_pages,
            self.packed,
            self.value_format,
            tuple(
                tuple((span.label, span.row_bytes) for span in component)
                for component in self.components
            ),
            tuple(sorted(self.layer_mapping.items())),
        )

    # ---- pages --------------------------------------------------------------------------------

    def translate_indices(self, indices: object) -> IndexArray:
        """Return the pool's own slots for an engine's: int64 [slots].

        Raises:
            ContractError: the indices are no slots, or the engine's translation changed their number.
        """
        slots = as_index_array(indices, pool=self.name)
        if self._index_mapper is None:
            return slots
        translated = as_index_array(self._index_mapper(slots), pool=self.name)
        if len(translated) != len(slots):
            msg = f"the index map turned {len(slots)} slots into {len(translated)}"
            self._refuse(msg)
        return translated

    def prepare_locations(self, indices: object) -> PreparedPages:
        """Validate the pool's own slots once and return the pages they make.

        Args:
            indices: integers [pages * page_size]; see `as_index_array`. Empty is valid.

        Raises:
            ContractError: a wrong dtype or length, a page that is unaligned, scattered, repeated or out of bounds.
            StalePoolError: the memory was given up.
        """
        self.check_live()
        slots = as_index_array(indices, pool=self.name)
        if len(slots) % self.page_size:
            msg = f"got {len(slots)} indices, expected a multiple of the page size {self.page_size}"
            self._refuse(msg)
        if self.fragmented and not self.rows_are_pages:
            self._check_slots(slots)
            return PreparedPages.of_slots(self.name, slots, self.page_size)
        numbers = self._page_numbers(slots)
        return PreparedPages.of_starts(self.name, numbers * self.page_rows, self.page_rows)

    def _page_numbers(self, slots: IndexArray) -> IndexArray:
        pages = slots.reshape(-1, self.page_size)
        numbers, within = np.divmod(pages[:, 0], self.page_size)
        expected = numbers[:, None] * self.page_size + np.arange(self.page_size)
        bad = np.flatnonzero((within != 0) | (pages != expected).any(axis=1))
        if bad.size:
            first = int(bad[0])
            msg = (
                f"page {first} of the request must be {self.page_size} consecutive slots from a multiple of "
                f"{self.page_size}, got {_shorten(pages[first])}"
            )
            self._refuse(msg)
        self._check_rows(numbers * self.page_rows, self.page_rows)
        self._check_distinct(numbers, "page")
        return numbers

    def _check_slots(self, slots: IndexArray) -> None:
        self._check_rows(slots, 1)
        self._check_distinct(slots, "slot")

    def _check_rows(self, first: IndexArray, count: int) -> None:
        if not first.size:
            return
        low, high = int(first.min()), int(first.max()) + count
        smallest = int(self._columns.span_rows.min())
        if low >= 0 and high <= smallest:
            return
        row = low if low < 0 else high - count
        label = self._columns.labels[int(self._columns.span_rows.argmin())]
        msg = (
            f"page {row // self.page_rows} (rows {row}..{row + count - 1}) is out of bounds of span {label!r} "
            f"with {smallest} rows"
        )
        self._refuse(msg)

    def _check_distinct(self, numbers: IndexArray, what: str) -> None:
        values, counts = np.unique(numbers, return_counts=True)
        if len(values) != len(numbers):
            repeated = int(values[int(counts.argmax())])
            msg = f"{what} {repeated} is named {int(counts.max())} times; two keys cannot share one place"
            self._refuse(msg)

    # ---- plans --------------------------------------------------------------------------------

    def page_plan(self, pages: PreparedPages) -> TransferPlan:
        """Return the plan of whole pages: the exact tiling of their objects."""
        self._check_prepared(pages)
        return TransferPlan(pages=pages, spans=self._columns, part_bytes=self.part_bytes)

    def layer_plan(self, pages: PreparedPages, layer: int) -> TransferPlan | None:
        """Return the plan of one layer's ranges, or None where the layer has nothing here."""
        self._check_prepared(pages)
        columns = self._layer_columns.get(layer)
        if columns is None:
            return None
        return TransferPlan(pages=pages, spans=columns, part_bytes=self.part_bytes)

    def _check_prepared(self, pages: PreparedPages) -> None:
        self.check_live()
        if not isinstance(pages, PreparedPages):
            msg = f"plans take what prepare_locations returned, got {type(pages).__name__}"
            self._refuse(msg)
        if pages.pool != self.name or pages.page_rows != self.page_rows:
            self._refuse(f"the pages were prepared for pool {pages.pool!r}")

    def get_page_buffer_meta(self, indices: object) -> tuple[list[int], list[int]]:
        """Return flat lists of addresses and sizes, page by page, in SGLang 0.5.23's shape."""
        ranges = self.page_plan(self.prepare_locations(indices)).expand()
        return ranges.address.tolist(), ranges.size.tolist()

    def get_prepared_layer_range_meta(
        self, locations: PreparedPages, layer: int
    ) -> LayerMetadata | None:
        """Return nested lists of addresses, sizes and object offsets, in SGLang 0.5.23's shape.

        Packed: one inner list per page. Not packed: one inner list of one range per page, component and span.
        None where the layer has nothing in this pool.
        """
        plan = self.layer_plan(locations, layer)
        if plan is None:
            return None
        return plan.nested_lists(packed=self.packed)

    # ---- life time ----------------------------------------------------------------------------

    def check_live(self) -> None:
        """Raise StalePoolError once the memory moved or was given up."""
        if self._stale:
            msg = (
                f"pool {self.name!r}: {self._stale}; describe the pools again and build a new group"
            )
            raise StalePoolError(msg)

    def verify(self) -> None:
        """Compare the spans' current addresses with the planned ones.

        Raises:
            StalePoolError: a buffer moved; every later use raises it too.
        """
        for span in self.spans:
            try:
                span.verify()
            except StalePoolError as error:
                self.retire(str(error))
                raise

    def retire(self, reason: str) -> None:
        """Refuse every later use and let go of the memory's owners."""
        self._stale = self._stale or reason
        self._components = ()
        self._index_mapper = None


def _shorten(values: IndexArray) -> str:
    if len(values) <= _SHOWN:
        return str(values.tolist())
    shown = ", ".join(str(value) for value in values[: _SHOWN - 1].tolist())
    return f"[{shown}, ... {int(values[-1])}]"
