"""The JSON form of a description: nothing but addresses is lost, and every wrong field is named by its path."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.description import (
    IndexArray,
    IndexerKind,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
    RankAxis,
    Replication,
)
from kvlinker.description_json import FORMAT, description_from_json, description_to_json
from kvlinker.errors import ContractError
from kvlinker.spans import BufferSpan, MemoryRegion


def same(indices: IndexArray) -> IndexArray:
    return indices


def made_up(rows: int, row_bytes: int, padding: int, label: str, device: str) -> BufferSpan:
    stride, base = row_bytes + padding, 1 << 40
    extent = (rows - 1) * stride + row_bytes
    region = MemoryRegion(base_ptr=base, size_bytes=extent, device=device) if rows else None
    return BufferSpan(
        base_ptr=base if rows else 0,
        rows=rows,
        row_bytes=row_bytes,
        row_stride=stride,
        region=region,
        label=label,
    )


def small() -> KVCacheDescription:
    return KVCacheDescription(
        family="plain",
        page_size=4,
        buffers={"kv": (made_up(8, 16, 8, "kv[0]", "cuda:1"),), "index": ()},
        layers=(LayerFacts(layer=0, global_layer=3, compress_ratio=4, indexer=IndexerKind.SHARED),),
        logical_pools=(LogicalPool(name="kv", page_size=4, window=8),),
        index_maps={"kv": same},
        facts={"kv_format": "bf16", "scaled": 1, "rings": (8, 16)},
        replication=Replication(
            axes=(RankAxis(name="tp", rank=1, size=2),), sharded_over={"kv": frozenset({"tp"})}
        ),
    )


# ---- round trip -------------------------------------------------------------------------------

names = st.text(min_size=1, max_size=8)
facts = st.dictionaries(
    names, st.integers() | st.text() | st.lists(st.integers(), max_size=3).map(tuple), max_size=4
)
layer_facts = st.tuples(
    st.sampled_from(["attention", "mamba"]), st.integers(0, 128), st.sampled_from(IndexerKind)
)
shapes = st.tuples(
    st.integers(0, 2**40),
    st.integers(1, 2**16),
    st.integers(0, 64),
    st.sampled_from(["cpu", "cuda:0"]),
)


@st.composite
def descriptions(draw: st.DrawFn) -> KVCacheDescription:
    roles = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    pools = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    axes = draw(st.lists(names, max_size=2, unique=True))
    first = draw(st.integers(0, 60))
    layers = draw(st.lists(layer_facts, min_size=1, max_size=4))
    return KVCacheDescription(
        family=draw(names),
        page_size=draw(st.integers(1, 2**20)),
        buffers={
            role: tuple(
                made_up(rows, size, padding, f"{number}.{i}", device)
                for i, (rows, size, padding, device) in enumerate(
                    draw(st.lists(shapes, max_size=3))
                )
            )
            for number, role in enumerate(roles)
        },
        layers=tuple(
            LayerFacts(
                layer=i, global_layer=first + i, kind=kind, compress_ratio=ratio, indexer=own
            )
            for i, (kind, ratio, own) in enumerate(layers)
        ),
        logical_pools=tuple(
            LogicalPool(
                name=pool,
                page_size=draw(st.integers(1, 512)),
                window=draw(st.none() | st.integers(1, 4096)),
            )
            for pool in pools
        ),
        index_maps=dict.fromkeys(draw(st.sets(st.sampled_from(pools))), same),
        facts=draw(facts),
        replication=Replication(
            axes=tuple(RankAxis(name=axis, rank=0, size=draw(st.integers(1, 8))) for axis in axes),
            sharded_over={
                role: draw(st.frozensets(st.sampled_from(axes))) if axes else frozenset()
                for role in roles
            },
        ),
    )


def without_addresses(description: KVCacheDescription) -> tuple[object, ...]:
    return (
        description.family,
        description.page_size,
        {
            role: [(s.label, s.rows, s.row_bytes, s.row_stride, s.device) for s in spans]
            for role, spans in description.buffers.items()
        },
        description.layers,
        description.logical_pools,
        set(description.index_maps),
        description.facts,
        description.replication,
    )


@given(descriptions())
def test_everything_but_addresses_survives_the_round_trip(description: KVCacheDescription) -> None:
    text = description_to_json(description)

    loaded = description_from_json(text)

    assert without_addresses(loaded) == without_addresses(description)
    assert description_to_json(loaded) == text


@given(descriptions())
def test_loaded_addresses_overlap_nowhere(description: KVCacheDescription) -> None:
    loaded = description_from_json(description_to_json(description))

    filled = [span for spans in loaded.buffers.values() for span in spans if span.rows]
    places = sorted((span.base_ptr, span.end_ptr) for span in filled)
    assert all(end <= start for (_, end), (start, _) in pairwise(places))


def test_the_form_names_no_address() -> None:
    text = description_to_json(small())

    assert "base_ptr" not in text
    assert str(1 << 40) not in text
    assert json.loads(text)["format"] == FORMAT


def test_the_order_of_mappings_does_not_show() -> None:
    description = small()
    turned = KVCacheDescription(
        family="plain",
        page_size=4,
        buffers=dict(sorted(description.buffers.items(), reverse=True)),
        layers=description.layers,
        logical_pools=description.logical_pools,
        index_maps=description.index_maps,
        facts=dict(sorted(description.facts.items(), reverse=True)),
        replication=description.replication,
    )

    assert description_to_json(turned) == description_to_json(description)


def test_huge_pools_are_loaded_as_numbers() -> None:
    form = json.loads(description_to_json(small()))
    form["buffers"]["kv"][0] |= {"rows": 10**12, "row_bytes": 41984, "row_stride": 41984}

    loaded = description_from_json(json.dumps(form))

    assert loaded.buffers["kv"][0].rows == 10**12


def test_a_loaded_index_map_translates_nothing() -> None:
    loaded = description_from_json(description_to_json(small()))

    with pytest.raises(ContractError, match="read from JSON has no index maps; cannot translate 0"):
        loaded.index_maps["kv"]([])  # type: ignore[arg-type]  # the length alone is read


def test_a_window_may_be_left_out() -> None:
    form = json.loads(description_to_json(small()))
    del form["logical_pools"][0]["window"]

    assert description_from_json(json.dumps(form)).logical_pools[0].window is None


# ---- wrong forms ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "^a description must be JSON: "),
        ("{", "^a description must be JSON: "),
        ("[" * 100_000, "^a description must be JSON: "),
        ("9" * 5000, "^a description must be JSON: "),
        ("[]", "^description must be an object, got list$"),
        ("null", "^description must be an object, got NoneType$"),
        ("{}", r"^description\.format must be a string, got None$"),
        ('{"format": "kvlinker-description/2"}', "^description.format is 'kvlinker-description/2'"),
    ],
    ids=["empty", "cut", "deep", "long", "list", "null", "unmarked", "newer"],
)
def test_a_text_that_is_no_form_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ContractError, match=problem):
        description_from_json(text)


def test_a_wrong_value_is_shown_shortened() -> None:
    form = json.loads(description_to_json(small())) | {"family": ["x" * 1000]}

    with pytest.raises(ContractError) as caught:
        description_from_json(json.dumps(form))

    assert str(caught.value).endswith("...")
    assert len(str(caught.value)) < 200


WRONG: dict[str, object] = {
    "family": 1,
    "page_size": "4",
    "buffers": [],
    "buffers.kv": {},
    "buffers.kv[0]": "span",
    "buffers.kv[0].label": None,
    "buffers.kv[0].rows": 1.5,
    "buffers.kv[0].row_bytes": True,
    "buffers.kv[0].row_stride": "16",
    "buffers.kv[0].device": 0,
    "buffers.kv[0].unknown": 0,
    "layers": {},
    "layers[0]": [],
    "layers[0].layer": None,
    "layers[0].global_layer": "3",
    "layers[0].kind": 7,
    "layers[0].compress_ratio": 0.25,
    "layers[0].indexer": "mine",
    "layers[0].unknown": 0,
    "logical_pools": None,
    "logical_pools[0]": 4,
    "logical_pools[0].name": [],
    "logical_pools[0].kind": "heap",
    "logical_pools[0].page_size": {},
    "logical_pools[0].window": "wide",
    "logical_pools[0].unknown": 0,
    "index_maps": "kv",
    "facts": [],
    "facts.kv_format": None,
    "facts.scaled": True,
    "facts.rings": [8, "16"],
    "replication": [],
    "replication.axes": {},
    "replication.axes[0]": "tp",
    "replication.axes[0].name": 0,
    "replication.axes[0].rank": "1",
    "replication.axes[0].size": None,
    "replication.axes[0].unknown": 0,
    "replication.sharded_over": [],
    "replication.sharded_over.kv": ["tp", 1],
    "replication.unknown": 0,
    "unknown": 0,
}


def set_at(form: object, path: str, value: object) -> None:
    """Put a value at a path such as `buffers.kv[0].rows`."""
    *parents, last = path.replace("[", ".#").replace("]", "").split(".")
    for step in parents:
        form = child(form, step)
    if isinstance(form, list):
        form[int(last[1:])] = value
    else:
        assert isinstance(form, dict)
        form[last] = value


def child(form: object, step: str) -> object:
    if isinstance(form, list):
        return form[int(step[1:])]
    assert isinstance(form, dict)
    return form[step]


@pytest.mark.parametrize("path", WRONG)
def test_a_wrong_field_is_named_by_its_path(path: str) -> None:
    form = json.loads(description_to_json(small()))
    set_at(form, path, WRONG[path])

    with pytest.raises(ContractError) as caught:
        description_from_json(json.dumps(form))

    assert str(caught.value).startswith(f"description.{path} ")


OUT_OF_BOUNDS: dict[str, tuple[object, str]] = {
    "page_size": (0, "description: description 'plain': page_size must be at least 1"),
    "layers": ([], "description: description 'plain': needs a family and at least one layer"),
    "buffers.kv[0].rows": (-1, "description.buffers.kv[0]: span 'kv[0]': rows must be at least 0"),
    "buffers.kv[0].row_bytes": (0, "description.buffers.kv[0]: span 'kv[0]': row_bytes must be"),
    "buffers.kv[0].row_stride": (-4, "description.buffers.kv[0]: span 'kv[0]': rows overlap"),
    "buffers.kv[0].device": ("", "description.buffers.kv[0]: the region at"),
    "layers[0].layer": (-1, "description.layers[0]: layer -1: layer must be at least 0"),
    "layers[0].kind": ("", "description.layers[0]: layer 0: needs a kind"),
    "logical_pools[0].page_size": (0, "description.logical_pools[0]: logical pool 'kv': page_size"),
    "replication.axes[0].rank": (2, "description.replication.axes[0]: rank axis 'tp': rank 2"),
    "replication.sharded_over.kv": (["cp"], "description.replication: role 'kv' is sharded over"),
    "index_maps": (["swa"], "description: description 'plain': index maps for ['swa']"),
}


@pytest.mark.parametrize("path", OUT_OF_BOUNDS)
def test_a_value_that_cannot_be_is_named_by_its_path(path: str) -> None:
    form = json.loads(description_to_json(small()))
    value, problem = OUT_OF_BOUNDS[path]
    set_at(form, path, value)

    with pytest.raises(ContractError) as caught:
        description_from_json(json.dumps(form))

    assert str(caught.value).startswith(problem)


def test_rows_beyond_every_address_are_refused() -> None:
    form = json.loads(description_to_json(small()))
    form["buffers"]["kv"][0]["rows"] = 2**62

    with pytest.raises(ContractError, match=r"^description\.buffers\.kv\[0\]: "):
        description_from_json(json.dumps(form))


@pytest.mark.parametrize("drop", ["family", "buffers", "layers", "facts", "replication"])
def test_a_missing_field_is_named(drop: str) -> None:
    form = json.loads(description_to_json(small()))
    del form[drop]

    with pytest.raises(ContractError, match=rf"^description\.{drop} must be "):
        description_from_json(json.dumps(form))


@given(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.dictionaries(st.text(), x)))
def test_any_other_json_is_refused_in_words(value: object) -> None:
    with pytest.raises(ContractError):
        description_from_json(json.dumps(value))
