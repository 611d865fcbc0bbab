"""After a build: every described span is used once and unaltered, or the group never reaches the linker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from kvlinker.coverage import claim_problem, group_problem
from kvlinker.description import (
    IndexArray,
    IndexMap,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
    RankAxis,
    Replication,
)
from kvlinker.discovery import PluginKind, PluginRecord
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError, PluginContractError, PluginError
from kvlinker.hookspecs import StrategyMatch
from kvlinker.plugins import ModelPlugin
from kvlinker.pools import DevicePoolGroup
from kvlinker.selection import Selection, build_group
from kvlinker.spans import BufferSpan, MemoryRegion
from kvlinker.testing.strategies import MadeUpMemory, PageRows, check_round_trip

PAGE, LAYERS = 4, 2
RECORD = PluginRecord(
    name="fake", kind=PluginKind.MODEL, distribution="fake-x", version="1.0", module="fake_x"
)
Spans = Sequence[BufferSpan]


def described(
    buffers: Mapping[str, tuple[BufferSpan, ...]], *, replication: Replication | None = None
) -> KVCacheDescription:
    return KVCacheDescription(
        family="fake",
        page_size=PAGE,
        buffers=buffers,
        layers=tuple(LayerFacts(layer=i, global_layer=i) for i in range(LAYERS)),
        logical_pools=(LogicalPool(name="kv", page_size=PAGE),),
        replication=replication or Replication(),
    )


def two_roles(*, replication: Replication | None = None) -> KVCacheDescription:
    """Describe K and index buffers of two layers: K rows are slots, index rows are pages."""
    memory = MadeUpMemory()
    return described(
        {
            "k": (memory.span(18, 8), memory.span(18, 8)),
            "index": (memory.span(4, 32), memory.span(4, 32)),
        },
        replication=replication,
    )


def entry(
    name: str,
    spans: Spans,
    *,
    pages: bool = False,
    source: str = "kv",
    axes: Sequence[RankAxis] = (),
    index_map: IndexMap | None = None,
) -> DevicePoolEntry:
    return DevicePoolEntry(
        name=name,
        indices_from_pool=source,
        components=[spans],
        layer_mapping={layer: layer for layer in range(len(spans))},
        page_size=PAGE,
        rows_are_pages=pages,
        rank_axes=axes,
        index_mapper=index_map,
    )


def group(*entries: DevicePoolEntry, layers: int = LAYERS, page: int = PAGE) -> DevicePoolGroup:
    return DevicePoolGroup(entries, layers, page, layout="fake/1")


@dataclass(frozen=True)
class Claim:
    """A strategy whose build and claim are the test's."""

    build: Callable[[KVCacheDescription], object]
    omitted: Mapping[str, str] = field(default_factory=dict)

    def made_of(self, description: KVCacheDescription) -> DevicePoolGroup:
        hooks = {"build_direct_linker_pool_group": self.call}
        match = StrategyMatch(buffers=frozenset(description.buffers), omitted=self.omitted)
        return build_group(Selection(plugin=ModelPlugin(RECORD, hooks), match=match), description)

    def call(self, **arguments: object) -> object:
        (description,) = arguments.values()
        assert isinstance(description, KVCacheDescription)
        return self.build(description)


def whole(description: KVCacheDescription) -> DevicePoolGroup:
    return group(
        entry("k", description.buffers["k"]),
        entry("index", description.buffers["index"], pages=True),
    )


def test_s4_a_group_that_uses_every_span_once_is_handed_on() -> None:
    built = Claim(whole).made_of(two_roles())

    assert [made.name for made in built.entries] == ["k", "index"]


def test_s4_rows_that_are_grouped_into_pages_are_the_same_span() -> None:
    def grouped(description: KVCacheDescription) -> DevicePoolGroup:
        pages = [span.group_rows(PAGE) for span in description.buffers["k"]]
        return group(
            entry("k", pages, pages=True), entry("index", description.buffers["index"], pages=True)
        )

    built = Claim(grouped).made_of(two_roles())

    assert [span.rows for span in built.entry_map["k"].spans] == [4, 4]


def forgets_a_layer(description: KVCacheDescription) -> DevicePoolGroup:
    return group(
        entry("k", description.buffers["k"]),
        entry("index", description.buffers["index"][:1], pages=True),
    )


def uses_a_span_twice(description: KVCacheDescription) -> DevicePoolGroup:
    return group(
        entry("k", description.buffers["k"]),
        entry("index", description.buffers["index"], pages=True),
        entry("again", description.buffers["k"][1:]),
    )


def uses_a_span_twice_in_one_entry(description: KVCacheDescription) -> DevicePoolGroup:
    k0, _ = description.buffers["k"]
    return group(entry("k", [k0, k0]), entry("index", description.buffers["index"], pages=True))


def altered(change: Callable[[BufferSpan], BufferSpan]) -> Callable[[KVCacheDescription], object]:
    def build(description: KVCacheDescription) -> DevicePoolGroup:
        k0, k1 = description.buffers["k"]
        return group(
            entry("k", [change(k0), k1], pages=True),
            entry("index", description.buffers["index"], pages=True),
        )

    return build


def invents_a_span(description: KVCacheDescription) -> DevicePoolGroup:
    k0, k1 = description.buffers["k"]
    return group(
        entry("k", [k0.relabel("mine"), k1]),
        entry("index", description.buffers["index"], pages=True),
    )


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (forgets_a_layer, "forgets span 'index[1]'; use every span, or omit it with a reason"),
        (
            lambda d: group(entry("k", d.buffers["k"])),
            "forgets spans 'index[0]', 'index[1]'; use every span, or omit it with a reason",
        ),
        (uses_a_span_twice, "uses span 'k[1]' more than once"),
        (uses_a_span_twice_in_one_entry, "uses span 'k[0]' more than once"),
        (invents_a_span, "uses span 'mine' in pool 'k', which was not described"),
    ],
)
def test_s4_a_build_that_forgets_repeats_or_invents_a_span_is_refused(
    build: Callable[[KVCacheDescription], object], problem: str
) -> None:
    with pytest.raises(PluginContractError) as caught:
        Claim(build).made_of(two_roles())

    assert str(caught.value) == f"model plugin 'fake' (fake-x 1.0): {problem}"


@pytest.mark.parametrize(
    "change",
    [
        lambda span: replace(span, base_ptr=span.base_ptr + 8),
        lambda span: replace(span, rows=span.rows - 1),
        lambda span: replace(span, row_bytes=4),
        lambda span: replace(span, row_bytes=12, row_stride=12, rows=10),
        lambda span: replace(span, row_stride=16, rows=9),
        lambda span: replace(span.group_rows(2), rows=8),
        lambda span: replace(span, rows=8, row_bytes=16, row_stride=18),
        lambda span: replace(span, region=MemoryRegion(base_ptr=span.base_ptr, size_bytes=4096)),
    ],
    ids=["base", "rows", "bytes", "ratio", "stride", "tail", "padding", "region"],
)
def test_s4_a_span_that_was_altered_is_refused(
    change: Callable[[BufferSpan], BufferSpan],
) -> None:
    with pytest.raises(PluginContractError, match=r"altered span 'k\[0\]' in pool 'k': 18 rows of"):
        Claim(altered(change)).made_of(two_roles())


def test_s4_padded_rows_cannot_be_grouped_by_hand() -> None:
    padded = BufferSpan(base_ptr=4096, rows=8, row_bytes=8, row_stride=16)
    description = described({"k": (padded, replace(padded, base_ptr=8192))})

    def build(description: KVCacheDescription) -> DevicePoolGroup:
        k0, k1 = description.buffers["k"]
        return group(entry("k", [replace(k0, rows=4, row_bytes=16), k1], pages=True))

    with pytest.raises(PluginContractError, match=r"altered span 'k\[0\]'"):
        Claim(build).made_of(description)


# ---- omitted spans ----------------------------------------------------------------------------


def test_s4_a_span_may_be_omitted_with_a_reason() -> None:
    built = Claim(forgets_a_layer, omitted={"index[1]": "shared, never read"}).made_of(two_roles())

    assert len(built.entry_map["index"].spans) == 1


def test_s4_a_span_is_not_used_and_omitted_at_once() -> None:
    with pytest.raises(PluginContractError, match=r"uses span 'index\[1\]' and omits the same"):
        Claim(whole, omitted={"index[1]": "dead"}).made_of(two_roles())


@pytest.mark.parametrize("omitted", [{}, {"index[1]": "owns no index"}])
def test_s4_a_span_without_rows_need_not_be_omitted_and_may_be(omitted: dict[str, str]) -> None:
    memory = MadeUpMemory()
    description = described(
        {
            "k": (memory.span(16, 8), memory.span(16, 8)),
            "index": (memory.span(4, 32), memory.span(0, 32)),
        }
    )

    built = Claim(forgets_a_layer, omitted=omitted).made_of(description)

    assert len(built.entry_map["index"].spans) == 1


def test_s4_a_label_that_is_omitted_exists() -> None:
    match = StrategyMatch(buffers=frozenset({"k", "index"}), omitted={"index[2]": "dead"})

    assert "omits span 'index[2]'" in claim_problem(match, two_roles())


# ---- the frame --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (
            lambda d: DevicePoolGroup(
                [
                    DevicePoolEntry(
                        name="k",
                        indices_from_pool="kv",
                        components=[d.buffers["k"]],
                        layer_mapping={0: 0, 1: 1},
                        page_size=8,
                        rows_are_pages=False,
                    )
                ],
                LAYERS,
                8,
                layout="fake/1",
            ),
            "made a group whose page size is 8, but the description says 4",
        ),
        (
            lambda d: group(entry("k", d.buffers["k"]), layers=3),
            "made a group whose number of layers is 3, but the description says 2",
        ),
        (
            lambda d: DevicePoolGroup(
                [entry("k", d.buffers["k"])],
                LAYERS,
                PAGE,
                layout="fake/1",
                layer_range=(2, 4),
            ),
            r"made a group whose global layer range is \(2, 4\), but the description says \(0, 2\)",
        ),
        (
            lambda d: group(entry("k", d.buffers["k"], source="swa")),
            r"takes indices in pool 'k' from 'swa', but the engine allocates from \['kv'\]",
        ),
    ],
    ids=["page size", "layers", "stage", "logical pool"],
)
def test_s4_a_group_of_other_pages_layers_or_index_spaces_is_refused(
    build: Callable[[KVCacheDescription], object], problem: str
) -> None:
    with pytest.raises(PluginContractError, match=problem):
        Claim(build).made_of(two_roles())


def test_s4_a_build_that_returns_no_group_is_refused() -> None:
    with pytest.raises(PluginContractError, match="returned list, expected DevicePoolGroup"):
        Claim(lambda _: []).made_of(two_roles())
    with pytest.raises(PluginContractError, match="returned nothing, expected DevicePoolGroup"):
        Claim(lambda _: None).made_of(two_roles())


def test_s4_what_a_build_raises_names_the_plugin() -> None:
    def refuse(_: KVCacheDescription) -> object:
        msg = "pool 'k': no"
        raise ContractError(msg)

    with pytest.raises(PluginError, match=r"'fake' .* raised ZeroDivisionError"):
        Claim(lambda _: 1 / 0).made_of(two_roles())
    with pytest.raises(ContractError, match="pool 'k': no"):
        Claim(refuse).made_of(two_roles())


# ---- ranks ------------------------------------------------------------------------------------

TP = RankAxis(name="tp", rank=1, size=4)
CP = RankAxis(name="cp", rank=0, size=2)


def sharded() -> KVCacheDescription:
    over = {"k": frozenset({"tp"}), "index": frozenset[str]()}
    return two_roles(replication=Replication(axes=(TP, CP), sharded_over=over))


def with_axes(*axes: RankAxis) -> Callable[[KVCacheDescription], object]:
    return lambda description: group(
        entry("k", description.buffers["k"], axes=axes),
        entry("index", description.buffers["index"], pages=True),
    )


def test_s4_ranks_that_hold_different_bytes_never_share_a_key() -> None:
    with pytest.raises(
        PluginContractError, match="keeps 'k' in pool 'k' without the rank axes tp 1/4"
    ):
        Claim(with_axes()).made_of(sharded())
    for axes in ((CP,), (RankAxis(name="tp", rank=0, size=4),)):
        with pytest.raises(PluginContractError, match="without the rank axes tp 1/4"):
            Claim(with_axes(*axes)).made_of(sharded())


def test_s4_more_rank_axes_than_needed_share_less_and_are_right() -> None:
    assert Claim(with_axes(TP)).made_of(sharded()).entries[0].rank_axes == (TP,)
    assert Claim(with_axes(TP, CP)).made_of(sharded()).entries[0].rank_axes == (TP, CP)


# ---- index maps -------------------------------------------------------------------------------


def doubled(slots: IndexArray) -> IndexArray:
    return slots * 2


def mapped_by(index_map: IndexMap | None) -> Callable[[KVCacheDescription], object]:
    return lambda description: group(
        entry("k", description.buffers["k"], index_map=index_map),
        entry("index", description.buffers["index"], pages=True, index_map=index_map),
    )


def test_s4_an_engine_s_translation_of_slots_is_handed_on() -> None:
    description = replace(two_roles(), index_maps={"kv": doubled})

    built = Claim(mapped_by(doubled)).made_of(description)

    assert [made.index_mapper for made in built.entries] == [doubled, doubled]


@pytest.mark.parametrize("index_map", [None, lambda slots: slots], ids=["none", "another"])
def test_s4_a_dropped_index_map_would_move_other_requests_rows(index_map: IndexMap | None) -> None:
    description = replace(two_roles(), index_maps={"kv": doubled})

    with pytest.raises(
        PluginContractError, match="drops the engine's index map of 'kv' in pool 'k'"
    ):
        Claim(mapped_by(index_map)).made_of(description)


# ---- faults -----------------------------------------------------------------------------------


def real_span(rows: int, row_bytes: int) -> BufferSpan:
    array = np.zeros((rows, row_bytes), dtype=np.uint8)
    region = MemoryRegion(base_ptr=array.ctypes.data, size_bytes=array.nbytes, owner=array)
    return BufferSpan(
        base_ptr=region.base_ptr,
        rows=rows,
        row_bytes=row_bytes,
        row_stride=row_bytes,
        region=region,
    )


def row_in_two_buffers() -> KVCacheDescription:
    """Describe a row of 640 bytes that is kept as 512 in one buffer and 128 in another."""
    return described(
        {
            "nope": tuple(real_span(8 * PAGE, 512) for _ in range(LAYERS)),
            "rope": tuple(real_span(8 * PAGE, 128) for _ in range(LAYERS)),
        }
    )


def row_entry(description: KVCacheDescription, *roles: str) -> DevicePoolGroup:
    return group(
        DevicePoolEntry(
            name="kv",
            indices_from_pool="kv",
            components=[description.buffers[role] for role in roles],
            layer_mapping={layer: layer for layer in range(LAYERS)},
            page_size=PAGE,
            rows_are_pages=False,
        )
    )


def test_b01_half_of_a_row_that_is_kept_in_two_buffers_is_refused() -> None:
    with pytest.raises(PluginContractError, match=r"forgets spans 'rope\[0\]', 'rope\[1\]'"):
        Claim(lambda d: row_entry(d, "nope")).made_of(row_in_two_buffers())


def test_b01_both_halves_of_a_row_come_back_in_another_page() -> None:
    description = row_in_two_buffers()

    built = Claim(lambda d: row_entry(d, "nope", "rope")).made_of(description)

    assert built.entries[0].page_bytes == LAYERS * PAGE * 640
    rows = {role: PageRows("kv", PAGE) for role in ("nope", "rope")}
    check_round_trip(built, description, rows, {"kv": {2: 5, 5: 0}})


@pytest.mark.parametrize("lost", ["kv", "index", "state"])
def test_b02_every_buffer_of_a_hybrid_cache_is_stored_and_none_can_be_left_out(lost: str) -> None:
    memory = MadeUpMemory()
    roles = ("kv", "index", "state")
    description = described({r: (memory.span(16, 8), memory.span(16, 8)) for r in roles})

    def build(description: KVCacheDescription, *, without: str = "") -> DevicePoolGroup:
        spans = {role: s for role, s in description.buffers.items() if role != without}
        return group(*(entry(role, s) for role, s in spans.items()))

    assert len(Claim(build).made_of(description).entries) == 3
    with pytest.raises(PluginContractError, match=rf"forgets spans '{lost}\[0\]', '{lost}\[1\]'"):
        Claim(lambda d: build(d, without=lost)).made_of(description)


def test_b08_a_group_without_the_draft_s_buffers_is_refused() -> None:
    memory = MadeUpMemory()
    description = described(
        {"kv": (memory.span(16, 8), memory.span(16, 8)), "draft_kv": (memory.span(16, 8),)}
    )

    def with_draft(description: KVCacheDescription) -> DevicePoolGroup:
        spans = [*description.buffers["kv"], *description.buffers["draft_kv"]]
        return group(
            DevicePoolEntry(
                name="kv",
                indices_from_pool="kv",
                components=[spans],
                layer_mapping={0: (0, 2), 1: 1},
                page_size=PAGE,
                rows_are_pages=False,
            )
        )

    assert Claim(with_draft).made_of(description).entries[0].page_bytes == 3 * PAGE * 8
    with pytest.raises(PluginContractError, match=r"forgets span 'draft_kv\[0\]'"):
        Claim(lambda d: group(entry("kv", d.buffers["kv"]))).made_of(description)


def test_a_group_without_a_problem_has_no_text() -> None:
    description = two_roles()
    match = StrategyMatch(buffers=frozenset(description.buffers))

    assert claim_problem(match, description) == ""
    assert group_problem(whole(description), match, description) == ""
