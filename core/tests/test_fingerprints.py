"""The fingerprint of a group changes with everything that determines an object's bytes, and with nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.description import RankAxis
from kvlinker.entries import DevicePoolEntry
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan, MemoryRegion


@dataclass(frozen=True)
class Span:
    """A span by what determines bytes, and by what does not."""

    label: str = "kv[0]"
    row_bytes: int = 8
    base: int = 1 << 20
    rows: int = 64
    padding: int = 0

    def make(self) -> BufferSpan:
        stride = self.row_bytes + self.padding
        return BufferSpan(
            base_ptr=self.base,
            rows=self.rows,
            row_bytes=self.row_bytes,
            row_stride=stride,
            region=MemoryRegion(base_ptr=self.base, size_bytes=self.rows * stride),
            label=self.label,
        )


@dataclass(frozen=True)
class Pool:
    """An entry as plain values."""

    name: str = "kv"
    source: str = "kv"
    components: tuple[tuple[Span, ...], ...] = ((Span(), Span("kv[1]", base=2 << 20)),)
    mapping: tuple[tuple[int, tuple[int, ...]], ...] = ((0, (0,)), (1, (1,)))
    page_size: int = 4
    rows_are_pages: bool = True
    packed: bool = True
    value_format: str = "bf16"
    replicated: bool = False
    rank_axes: tuple[RankAxis, ...] = ()
    is_writer: bool = True
    translated: bool = False

    def make(self) -> DevicePoolEntry:
        return DevicePoolEntry(
            name=self.name,
            indices_from_pool=self.source,
            components=[[span.make() for span in part] for part in self.components],
            layer_mapping=dict(self.mapping),
            page_size=self.page_size,
            rows_are_pages=self.rows_are_pages,
            packed=self.packed,
            index_mapper=(lambda slots: slots) if self.translated else None,
            value_format=self.value_format,
            replicated=self.replicated,
            rank_axes=self.rank_axes,
            is_writer=self.is_writer,
        )


@dataclass(frozen=True)
class Group:
    """A group as plain values."""

    pools: tuple[Pool, ...] = (Pool(),)
    layout: str = "plain/1"
    num_layers: int = 3
    page_size: int = 4
    layer_range: tuple[int, int] = (0, 3)
    multiples: dict[str, int] = field(default_factory=dict)

    @property
    def fingerprint(self) -> bytes:
        group = DevicePoolGroup(
            [pool.make() for pool in self.pools],
            self.num_layers,
            self.page_size,
            layout=self.layout,
            layer_range=self.layer_range,
            page_multiples=self.multiples,
        )
        return group.fingerprint


BASE = Group()
POOL = Pool()
FIRST, SECOND = POOL.components[0]
INDEX = Pool(name="index", components=((Span("index[0]", base=9 << 20),),), mapping=((0, (0,)),))


def with_pool(**changed: object) -> Group:
    return Group(pools=(replace(POOL, **changed),))  # type: ignore[arg-type]  # any field may change


def with_span(**changed: object) -> Group:
    span = replace(FIRST, **changed)  # type: ignore[arg-type]  # any field may change
    return with_pool(components=((span, SECOND),))


def test_g5_a_fingerprint_has_128_bits() -> None:
    assert len(BASE.fingerprint) == 16


def test_g5_a_fingerprint_outlives_its_group() -> None:
    group = DevicePoolGroup([POOL.make()], 3, 4, layout="plain/1")

    group.close()

    assert group.fingerprint == BASE.fingerprint


DIFFERENT: dict[str, Group] = {
    "layout version": Group(layout="plain/2"),
    "number of layers": Group(num_layers=4),
    "page size": Group(pools=(replace(POOL, page_size=8),), page_size=8),
    "page multiple": Group(pools=(replace(POOL, page_size=8),), multiples={"kv": 2}),
    "unused page multiple": Group(multiples={"swa": 2}),
    "another pool": Group(pools=(POOL, INDEX)),
    "pool name": with_pool(name="kv2"),
    "logical pool": with_pool(source="swa"),
    "rows are slots": with_pool(rows_are_pages=False),
    "objects by component": with_pool(packed=False),
    "value format": with_pool(value_format="fp8_e4m3fn"),
    "row bytes": with_span(row_bytes=16),
    "span label": with_span(label="latent[0]"),
    "span order": with_pool(components=((SECOND, FIRST),)),
    "components": with_pool(components=((FIRST,), (SECOND,)), mapping=((0, (0,)),)),
    "layer": with_pool(mapping=((0, (0,)), (2, (1,)))),
    "mapping": with_pool(mapping=((0, (1,)), (1, (0,)))),
    "rider": with_pool(mapping=((0, (0, 1)),)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_g5_what_determines_bytes_changes_the_fingerprint(what: str) -> None:
    others = [group.fingerprint for name, group in DIFFERENT.items() if name != what]

    assert DIFFERENT[what].fingerprint not in {BASE.fingerprint, *others}


SAME: dict[str, Group] = {
    "address": with_span(base=7 << 20),
    "row count": with_span(rows=65),
    "padding": with_span(padding=8),
    "index map": with_pool(translated=True),
    "order of the mapping": with_pool(mapping=((1, (1,)), (0, (0,)))),
    "replication": with_pool(replicated=True),
    "rank axes": with_pool(rank_axes=(RankAxis(name="tp", rank=1, size=2),)),
    "writer": with_pool(is_writer=False),
    "pipeline stage": Group(layer_range=(8, 11)),
}


@pytest.mark.parametrize("what", SAME)
def test_g5_what_does_not_determine_bytes_keeps_the_fingerprint(what: str) -> None:
    assert SAME[what].fingerprint == BASE.fingerprint


def test_g5_the_order_of_pools_keeps_the_fingerprint() -> None:
    assert Group(pools=(POOL, INDEX)).fingerprint == Group(pools=(INDEX, POOL)).fingerprint


def test_g5_the_order_of_a_layers_spans_keeps_the_fingerprint() -> None:
    one, other = with_pool(mapping=((0, (0, 1)),)), with_pool(mapping=((0, (1, 0)),))

    assert one.fingerprint == other.fingerprint


def test_dh9_the_objects_length_is_part_of_the_contract() -> None:
    older, newer = with_span(row_bytes=4096), with_span(row_bytes=4608)

    assert older.fingerprint != newer.fingerprint
    assert older.pools[0].make().part_bytes == (4096 + 8,)
    assert newer.pools[0].make().part_bytes == (4608 + 8,)


# ---- property ---------------------------------------------------------------------------------

texts = st.sampled_from(["", "a", "b", "ab"])
names = st.sampled_from(["kv", "swa", "index"])


@st.composite
def pools(draw: st.DrawFn, name: str, page_size: int) -> Pool:
    count = draw(st.integers(1, 2))
    spans = st.builds(Span, texts, st.sampled_from([1, 2, 12]))
    part = st.lists(spans, min_size=count, max_size=count).map(tuple)
    return Pool(
        name=name,
        source=draw(names),
        components=draw(st.lists(part, min_size=1, max_size=2).map(tuple)),
        mapping=draw(
            st.sampled_from([((0, (0,)), (1, (1,))), ((0, (1,)), (1, (0,))), ((2, (0, 1)),)])
            if count > 1
            else st.sampled_from([((0, (0,)),), ((1, (0,)),)])
        ),
        page_size=page_size,
        rows_are_pages=draw(st.booleans()),
        packed=draw(st.booleans()),
        value_format=draw(texts),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    page_size = draw(st.sampled_from([1, 2]))
    chosen = sorted(draw(st.sets(names, min_size=1, max_size=2)))
    return Group(
        pools=tuple(draw(pools(name, page_size)) for name in chosen),
        layout=draw(st.sampled_from(["a/1", "a/2"])),
        num_layers=draw(st.sampled_from([3, 4])),
        page_size=page_size,
    )


def elsewhere(group: Group, move: Callable[[Span], Span]) -> Group:
    return replace(
        group,
        pools=tuple(
            replace(
                pool, components=tuple(tuple(move(span) for span in p) for p in pool.components)
            )
            for pool in group.pools
        ),
    )


@given(groups(), groups())
def test_g5_two_layouts_share_a_fingerprint_only_when_they_are_one(one: Group, two: Group) -> None:
    assert (one.fingerprint == two.fingerprint) == (one == two)


@given(groups(), st.integers(1, 1 << 40), st.integers(8, 1 << 20))
def test_g5_addresses_and_row_counts_never_show(group: Group, base: int, rows: int) -> None:
    moved = elsewhere(group, lambda span: replace(span, base=base, rows=rows))

    assert moved.fingerprint == group.fingerprint
