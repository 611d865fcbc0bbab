"""An entry is one physical device pool, seen page by page without a copy.

Everything that could restore a wrong byte is refused when an entry is made, or when its pages are prepared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

import numpy as np

from kvlinker.description import IndexArray, IndexMap, RankAxis
from kvlinker.errors import ContractError, StalePoolError
from kvlinker.integers import as_integer
from kvlinker.locations import PageSpace
from kvlinker.plans import LayerMetadata, PoolLife, PreparedPages, SpanColumns, TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.transfers import as_index_array

__all__ = ["DevicePoolEntry"]

_MAX_PAGE_BYTES = 2**63 - 1
"""Plans hold sizes and offsets as int64."""
_KEPT_RUNS = 256
"""Sets of layers whose columns are kept: loads ask for the same few over and over."""


class DevicePoolEntry:
    """One physical device pool, seen page by page without a copy.

    >>> keys = BufferSpan(base_ptr=0x1000, rows=64, row_bytes=10, row_stride=10, label="k[0]")
    >>> values = BufferSpan(base_ptr=0x2000, rows=64, row_bytes=6, row_stride=6, label="v[0]")
    >>> pool = DevicePoolEntry(
    ...     name="kv",
    ...     indices_from_pool="kv",
    ...     components=[[keys], [values]],
    ...     layer_mapping={0: 0},
    ...     page_size=4,
    ...     rows_are_pages=False,
    ... )
    >>> pool.page_bytes
    64
    >>> ranges = pool.page_plan(pool.prepare_locations([8, 9, 10, 11])).expand()
    >>> [hex(address) for address in ranges.address.tolist()]
    ['0x1050', '0x2030']
    >>> ranges.size.tolist(), ranges.offset.tolist()
    ([40, 24], [0, 40])
    """

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
        self.page_size = as_integer(page_size, f"pool {name!r}: page_size", at_least=1)
        self.rows_are_pages = rows_are_pages
        self.packed = packed
        self.replicated = replicated
        self.value_format = value_format
        self.rank_axes = tuple(rank_axes)
        self.is_writer = is_writer
        self.fragmented = fragmented
        self._index_mapper = index_mapper
        self._components = tuple(tuple(component) for component in components)
        self._life = PoolLife(f"pool {name!r}")
        self._check_names()
        self._check_components()
        self.layer_mapping: Mapping[int, tuple[int, ...]] = MappingProxyType(
            {self._layer(key): self._positions(key, value) for key, value in layer_mapping.items()}
        )
        self._check_mapping(frozenset(shared_positions))
        self.part_bytes = self._part_bytes()
        self._columns = SpanColumns.of_components(
            self._components, page_rows=self.page_rows, packed=packed
        )
        self._layer_columns = {layer: self._columns_of(layer) for layer in self.layer_mapping}
        self._run_columns: dict[tuple[int, ...], SpanColumns] = {}
        self.layer_bytes: Mapping[int, int] = MappingProxyType(
            {
                layer: int(columns.row_bytes.sum()) * self.page_rows
                for layer, columns in self._layer_columns.items()
            }
        )
        self._pages = self._page_space()

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
        if len(devices := {span.device for span in self.spans}) > 1:
            self._refuse(f"spans are on {sorted(devices)}; make one entry for each device")

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
        return as_integer(layer, f"pool {self.name!r}: a layer id", at_least=0)

    def _positions(self, layer: object, value: object) -> tuple[int, ...]:
        several = value if isinstance(value, Sequence | np.ndarray) else (value,)
        last = len(self._components[0]) - 1
        what = f"pool {self.name!r}: the span position that layer {layer} maps"
        positions = tuple(as_integer(item, what, at_least=0, at_most=last) for item in several)
        if not positions or len(set(positions)) != len(positions):
            self._refuse(
                f"layer {layer} must map distinct positions, at least one, got {list(positions)}"
            )
        return positions

    def _check_mapping(self, shared: frozenset[int]) -> None:
        users: Counter[int] = Counter()
        for positions in self.layer_mapping.values():
            users.update(positions)
        for position, span in enumerate(self._components[0]):
            where = f"span {span.label!r} (position {position}) is mapped by"
            if not users[position]:
                self._refuse(f"{where} no layer: it would be stored and never loaded")
            if users[position] > 1 and position not in shared:
                layers = [la for la, ps in self.layer_mapping.items() if position in ps]
                self._refuse(f"{where} layers {layers}; declare it in shared_positions")

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

    def _part_bytes(self) -> tuple[int, ...]:
        rows = self.page_rows
        sizes = [sum(span.row_bytes * rows for span in part) for part in self._components]
        if (total := sum(sizes)) > _MAX_PAGE_BYTES:
            self._refuse(f"a page of {self.page_size} slots would have {total} B; check page_size")
        return (total,) if self.packed else tuple(sizes)

    def _page_space(self) -> PageSpace:
        smallest = min(self.spans, key=lambda span: span.rows)
        return PageSpace(
            pool=self.name,
            page_size=self.page_size,
            page_rows=self.page_rows,
            rows=smallest.rows,
            smallest=smallest.label,
            fragmented=self.fragmented and not self.rows_are_pages,
            life=self._life,
        )

    def _columns_of(self, *layers: int) -> SpanColumns:
        count = len(self._components[0])
        positions = dict.fromkeys(p for layer in layers for p in self.layer_mapping[layer])
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
            self.part_bytes,
            tuple(
                tuple((span.label, span.row_bytes) for span in component)
                for component in self.components
            ),
            tuple(sorted((la, tuple(sorted(ps))) for la, ps in self.layer_mapping.items())),
        )

    # ---- pages --------------------------------------------------------------------------------

    @property
    def index_mapper(self) -> IndexMap | None:
        """The engine's translation of slots, or None where its slots are the pool's own."""
        return self._index_mapper

    def translate_indices(self, indices: object) -> IndexArray:
        """Return the pool's own slots for an engine's: int64 [slots], in memory of their own.

        Raises:
            ContractError: the indices are no slots, or the engine's translation changed their number.
            StalePoolError: the memory was given up.
        """
        self.check_live()
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
        return self._pages.prepare(indices)

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

    def layers_plan(self, pages: PreparedPages, layers: Iterable[int]) -> TransferPlan | None:
        """Return the plan of the ranges of several layers, each once, or None where none of them has anything here."""
        mapped = tuple(layer for layer in layers if layer in self._layer_columns)
        if len(mapped) < 2:  # noqa: PLR2004  # one layer's columns are there already
            return self.layer_plan(pages, mapped[0]) if mapped else None
        self._check_prepared(pages)
        columns = self._run_columns.get(mapped)
        if columns is None:
            columns = self._columns_of(*mapped)
            if len(self._run_columns) == _KEPT_RUNS:
                self._run_columns.clear()
            self._run_columns[mapped] = columns
        return TransferPlan(pages=pages, spans=columns, part_bytes=self.part_bytes)

    def _check_prepared(self, pages: PreparedPages) -> None:
        self.check_live()
        if not isinstance(pages, PreparedPages):
            msg = f"plans take what prepare_locations returned, got {type(pages).__name__}"
            self._refuse(msg)
        if pages.life is not self._life:
            self._refuse(f"the pages were prepared by another entry, of pool {pages.pool!r}")

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
        """Do nothing while the memory may be used.

        Raises:
            StalePoolError: the memory moved or was given up.
        """
        self._life.check()

    def verify(self) -> None:
        """Compare the spans' current addresses with the planned ones.

        Raises:
            StalePoolError: a buffer moved; every later use raises it too.
        """
        for span in self.spans:
            try:
                span.verify()
            except StalePoolError:
                self.retire(f"the buffer of span {span.label!r} moved")
                raise

    def retire(self, reason: str) -> None:
        """Refuse every later use, of earlier plans too, and let go of the memory's owners."""
        self._life.end(reason)
        self._components = ()
        self._index_mapper = None
