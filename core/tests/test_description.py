"""A description keeps facts, refuses what is none, and can be read by people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from kvlinker.description import (
    DescribeRequest,
    IndexArray,
    IndexerKind,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
    PoolKind,
    RankAxis,
    Replication,
)
from kvlinker.errors import ContractError
from kvlinker.spans import BufferSpan
from kvlinker.testing.strategies import MadeUpMemory

Fields = Mapping[str, object]


def same(indices: IndexArray) -> IndexArray:
    return indices


def describe(changed: Fields | None = None) -> KVCacheDescription:
    memory = MadeUpMemory()
    fields: dict[str, object] = {
        "family": "plain",
        "page_size": 4,
        "buffers": {"kv": [memory.span(8, 16), memory.span(8, 16)], "index": [memory.span(0, 8)]},
        "layers": [
            LayerFacts(layer=0, global_layer=10, compress_ratio=4, indexer=IndexerKind.OWN),
            LayerFacts(layer=1, global_layer=11, kind="mamba"),
        ],
        "logical_pools": [
            LogicalPool(name="kv", page_size=4, window=8),
            LogicalPool(name="mamba", kind=PoolKind.SLOT, page_size=1),
        ],
        "index_maps": {"kv": same},
        "facts": {"kv_format": "bf16", "kv_scaled": True, "rings": [8, np.int64(16)]},
        "replication": Replication(axes=(RankAxis(name="tp", rank=1, size=2),)),
    }
    return KVCacheDescription(**{**fields, **(changed or {})})  # type: ignore[arg-type]  # wrong types are under test


# ---- what is kept -----------------------------------------------------------------------------


def test_spans_without_a_label_are_named_by_role_and_position() -> None:
    memory = MadeUpMemory()
    named = memory.span(8, 16).relabel("mine")

    description = describe({"buffers": {"kv": (memory.span(8, 16), named)}})

    assert [span.label for span in description.buffers["kv"]] == ["kv[0]", "mine"]


def test_facts_are_integers_texts_and_tuples_of_integers() -> None:
    assert describe().facts == {"kv_format": "bf16", "kv_scaled": 1, "rings": (8, 16)}
    assert type(describe().facts["kv_scaled"]) is int


def test_a_description_is_frozen_with_everything_in_it() -> None:
    description = describe()

    with pytest.raises(FrozenInstanceError):
        description.family = "other"  # type: ignore[misc]  # what is frozen is under test
    with pytest.raises(TypeError):
        description.facts["kv_format"] = "fp8"  # type: ignore[index]  # what is frozen is under test
    with pytest.raises(TypeError):
        description.buffers["more"] = ()  # type: ignore[index]  # what is frozen is under test
    assert isinstance(description.layers, tuple)
    assert isinstance(description.buffers["kv"], tuple)


def test_a_change_of_the_callers_own_mapping_does_not_reach_the_description() -> None:
    facts = {"kv_format": "bf16"}
    description = describe({"facts": facts})

    facts["kv_format"] = "fp8"

    assert description.facts == {"kv_format": "bf16"}


def test_k3_the_stage_is_named_by_its_global_layers() -> None:
    assert describe().layer_range == (10, 12)


def test_a_logical_pool_is_found_by_name() -> None:
    found = describe().logical_pool("mamba")

    assert found is not None
    assert found.kind is PoolKind.SLOT
    assert describe().logical_pool("swa") is None


def test_the_text_form_shows_layers_buffers_pools_facts_and_ranks() -> None:
    assert describe().describe().splitlines() == [
        "plain: layers [10, 12), page of 4 slots",
        "  1 layers: attention, compressed 4, indexer own",
        "  1 layers: mamba",
        "  buffer kv: 2 x [8 rows of 16 B, stride 16 B]",
        "  buffer index: 1 x [0 rows of 8 B, stride 8 B]",
        "  logical pool kv: paged, page 4, window 8, slots translated",
        "  logical pool mamba: slot, page 1",
        "  fact kv_format = bf16",
        "  fact kv_scaled = 1",
        "  fact rings = (8, 16)",
        "  rank 1 of 2 on tp",
    ]
    assert "  buffer kv: no spans" in describe({"buffers": {"kv": ()}}).describe()


def test_numpy_integers_are_kept_as_pythons_own() -> None:
    pool = LogicalPool(name="kv", page_size=np.int64(4), window=np.int32(8))  # type: ignore[arg-type]  # numpy's are taken
    axis = RankAxis(name="tp", rank=np.int64(0), size=np.int64(2))  # type: ignore[arg-type]  # numpy's are taken
    request = DescribeRequest(page_size=np.int64(4))  # type: ignore[arg-type]  # numpy's are taken
    layer = LayerFacts(layer=np.int64(0), global_layer=np.int64(3))  # type: ignore[arg-type]  # numpy's are taken

    numbers = (pool.page_size, pool.window, axis.rank, axis.size, request.page_size)
    assert {type(number) for number in (*numbers, layer.layer, layer.global_layer)} == {int}


# ---- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("family", "", "needs a family and at least one layer"),
        ("layers", (), "needs a family and at least one layer, got 0 layers"),
        ("page_size", 0, "page_size must be at least 1, got 0"),
        ("page_size", 4.0, "page_size must be an integer, got 4.0"),
        ("page_size", True, "page_size must be an integer, got True"),
        ("facts", {"ratio": 0.5}, "fact 'ratio' must be an integer, got 0.5"),
        ("facts", {"rings": (8, "16")}, "fact 'rings' must be an integer, got '16'"),
        ("facts", {"none": None}, "fact 'none' must be an integer, got None"),
        ("index_maps", {"swa": same}, r"index maps for \['swa'\], but the logical pools are"),
        ("buffers", {"": ()}, "a buffer's role needs a name"),
    ],
)
def test_what_is_no_fact_is_refused_by_name(field: str, value: object, problem: str) -> None:
    with pytest.raises(ContractError, match=problem):
        describe({field: value})


@pytest.mark.parametrize("numbers", [(1, 0), (0, 2), (1, 2), (0, 0)])
def test_layers_are_numbered_from_zero_in_order(numbers: tuple[int, ...]) -> None:
    layers = [LayerFacts(layer=number, global_layer=i) for i, number in enumerate(numbers)]

    with pytest.raises(ContractError, match=rf"layers must be 0..n-1 in order, got \[{numbers[0]}"):
        describe({"layers": layers})


@pytest.mark.parametrize("numbers", [(0, 2), (1, 0), (3, 3)])
def test_k3_global_layers_with_a_gap_are_refused(numbers: tuple[int, ...]) -> None:
    layers = [LayerFacts(layer=i, global_layer=number) for i, number in enumerate(numbers)]

    with pytest.raises(ContractError, match="a stage's global layers must be consecutive"):
        describe({"layers": layers})


def test_names_are_used_once() -> None:
    memory = MadeUpMemory()
    twice = [memory.span(8, 16).relabel("same"), memory.span(8, 16).relabel("same")]

    with pytest.raises(ContractError, match="span label 'same' is used twice"):
        describe({"buffers": {"kv": twice}})
    with pytest.raises(ContractError, match="logical pool 'kv' is used twice"):
        describe({"logical_pools": [LogicalPool(name="kv", page_size=4)] * 2})


def test_spans_without_rows_may_share_a_label() -> None:
    nothing = BufferSpan(base_ptr=0, rows=0, row_bytes=1, row_stride=1, label="absent")

    assert describe({"buffers": {"index": [nothing, nothing]}}).buffers["index"] == (nothing,) * 2


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": "", "page_size": 4}, "needs a name, such as kv, swa or mamba"),
        ({"name": "kv", "page_size": 0}, "'kv': page_size must be at least 1"),
        ({"name": "kv", "page_size": 4, "window": 0}, "'kv': window must be at least 1"),
        (
            {"name": "m", "page_size": 4, "kind": PoolKind.SLOT},
            "a slot pool has page_size 1, got 4",
        ),
    ],
)
def test_a_logical_pool_that_cannot_be_is_refused(fields: Fields, problem: str) -> None:
    with pytest.raises(ContractError, match=problem):
        LogicalPool(**fields)  # type: ignore[arg-type]  # wrong types are under test


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"layer": -1, "global_layer": 0}, "layer -1: layer must be at least 0"),
        ({"layer": 0, "global_layer": -1}, "layer 0: global_layer must be at least 0"),
        ({"layer": 0, "global_layer": 0, "compress_ratio": -4}, "compress_ratio must be at least"),
        ({"layer": 0, "global_layer": 0, "kind": ""}, "layer 0: needs a kind"),
    ],
)
def test_layer_facts_that_cannot_be_are_refused(fields: Fields, problem: str) -> None:
    with pytest.raises(ContractError, match=problem):
        LayerFacts(**fields)  # type: ignore[arg-type]  # wrong types are under test


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (1, 1)])
def test_k3_a_rank_is_within_its_axis(rank: int, size: int) -> None:
    with pytest.raises(
        ContractError, match=f"rank axis 'tp': rank {rank} is not within size {size}"
    ):
        RankAxis(name="tp", rank=rank, size=size)


def test_k3_an_axis_has_a_name() -> None:
    with pytest.raises(ContractError, match="rank axis ''"):
        RankAxis(name="", rank=0, size=1)


def test_a_request_has_a_page_size_and_facts() -> None:
    request = DescribeRequest(page_size=4, facts={"first_layer": np.int64(3)})  # type: ignore[dict-item]  # numpy's are taken

    assert request.facts == {"first_layer": 3}
    with pytest.raises(ContractError, match="a request's page_size must be at least 1"):
        DescribeRequest(page_size=0)
    with pytest.raises(ContractError, match="a request: fact 'x' must be an integer"):
        DescribeRequest(page_size=4, facts={"x": 0.5})  # type: ignore[dict-item]  # wrong types are under test


# ---- replication ------------------------------------------------------------------------------

TP = RankAxis(name="tp", rank=1, size=4)
CP = RankAxis(name="cp", rank=0, size=2)


def test_g6_a_role_that_is_not_listed_is_sharded_over_every_axis_in_order_of_name() -> None:
    replication = Replication(axes=(TP, CP))

    assert replication.axes_of("kv") == (CP, TP)
    assert not replication.is_replicated("kv")


def test_g6_replication_is_said_role_by_role() -> None:
    replication = Replication(
        axes=(TP, CP), sharded_over={"latent": frozenset(), "state": frozenset({"tp"})}
    )

    assert replication.is_replicated("latent")
    assert replication.axes_of("latent") == ()
    assert not replication.is_replicated("state")
    assert replication.axes_of("state") == (TP,)


@pytest.mark.parametrize(
    ("tp", "cp", "writers"),
    [
        (0, 0, {"kv", "latent", "state"}),
        (1, 0, {"kv", "state"}),
        (0, 1, {"kv"}),
        (1, 1, {"kv"}),
    ],
)
def test_k3_each_shard_is_written_by_exactly_one_rank(tp: int, cp: int, writers: set[str]) -> None:
    replication = Replication(
        axes=(replace(TP, rank=tp, size=2), replace(CP, rank=cp)),
        sharded_over={"latent": frozenset(), "state": frozenset({"tp"})},
    )

    assert {role for role in ("kv", "latent", "state") if replication.is_writer(role)} == writers


def test_k3_axes_that_do_not_exist_or_repeat_are_refused() -> None:
    with pytest.raises(ContractError, match=r"rank axes \['tp', 'tp'\] repeat a name"):
        Replication(axes=(TP, TP))
    with pytest.raises(ContractError, match=r"role 'kv' is sharded over \['dcp'\], but the axes"):
        Replication(axes=(TP,), sharded_over={"kv": frozenset({"dcp", "tp"})})


def test_axes_and_roles_are_kept_apart_from_the_callers_own() -> None:
    over = {"kv": {"tp"}}
    replication = Replication(axes=[TP], sharded_over=over)  # type: ignore[arg-type]  # lists and sets are taken

    over["kv"].clear()

    assert replication.axes == (TP,)
    assert replication.axes_of("kv") == (TP,)
