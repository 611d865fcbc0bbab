"""What model plugins share: facts, roles, pools and drafts are read or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from kvlinker.description import (
    Fact,
    IndexArray,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
    PoolKind,
    RankAxis,
    Replication,
)
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.layouts import (
    draft_count,
    folded_keys,
    integer_fact,
    pool_entry,
    pool_group,
    require_facts,
    require_page_rows,
    require_paged_pools,
    require_pools,
    require_roles,
    require_row_bytes,
    ride_along,
    role_spans,
    text_fact,
)
from kvlinker.spans import BufferSpan
from kvlinker.testing.pool_memory import HostMemory
from kvlinker.testing.strategies import MadeUpMemory, PageRows, check_round_trip

PAGE = 4


def spans(count: int, rows: int = 8, row_bytes: int = 16) -> tuple[BufferSpan, ...]:
    memory = MadeUpMemory()
    return tuple(memory.span(rows, row_bytes) for _ in range(count))


def describe(
    buffers: Mapping[str, tuple[BufferSpan, ...]] | None = None,
    *,
    facts: Mapping[str, Fact] | None = None,
    layers: int = 2,
) -> KVCacheDescription:
    return KVCacheDescription(
        family="plain",
        page_size=PAGE,
        buffers={"kv": spans(layers)} if buffers is None else buffers,
        layers=tuple(LayerFacts(layer=i, global_layer=10 + i) for i in range(layers)),
        logical_pools=(LogicalPool(name="kv", page_size=PAGE),),
        facts=facts or {},
    )


# ---- roles ------------------------------------------------------------------------------------


def test_required_and_optional_roles_are_taken() -> None:
    description = describe({"kv": spans(1), "draft": spans(1)})

    require_roles(description, required=["kv"], optional=["draft", "scale"])


@pytest.mark.parametrize("buffers", [{}, {"kv": ()}])
def test_a_missing_role_is_refused_and_so_is_one_without_buffers(
    buffers: Mapping[str, tuple[BufferSpan, ...]],
) -> None:
    with pytest.raises(ContractError, match=r"family 'plain': buffers \['kv'\] are missing"):
        require_roles(describe(buffers), required=["kv"])


def test_an_unknown_role_is_refused_even_beside_all_known_ones() -> None:
    with pytest.raises(UnsupportedKVCacheError, match=r"buffers \['rope'\] are unknown here"):
        require_roles(describe({"kv": spans(1), "rope": spans(1)}), required=["kv"])


def test_spans_of_a_role_are_returned_in_order() -> None:
    description = describe()

    assert role_spans(description, "kv", count=2, row_bytes=16) == description.buffers["kv"]
    assert role_spans(description, "draft", count=0) == ()


def test_another_number_of_spans_is_refused() -> None:
    with pytest.raises(ContractError, match="'kv' has 2 buffers, expected 3, one per sparse layer"):
        role_spans(describe(), "kv", count=3, per="sparse layer")


def test_an_empty_span_is_refused_where_rows_are_needed() -> None:
    empty = BufferSpan(base_ptr=0, rows=0, row_bytes=16, row_stride=16)

    with pytest.raises(ContractError, match=r"span 'kv\[0\]' has no rows"):
        role_spans(describe({"kv": (empty,)}, layers=1), "kv", count=1)


def test_rows_of_another_size_are_refused_with_both_sizes() -> None:
    message = r"span 'kv\[0\]' has rows of 16 B, expected 20 B"

    with pytest.raises(ContractError, match=message):
        role_spans(describe(), "kv", count=2, row_bytes=20)
    with pytest.raises(ContractError, match=message):
        require_row_bytes(describe(), describe().buffers["kv"], 20)


@pytest.mark.parametrize(
    ("rows", "rows_are_pages"), [(2, False), (8, True)], ids=["slots", "pages"]
)
def test_a_row_for_each_page_of_what_lies_beside_is_taken(
    rows: int, *, rows_are_pages: bool
) -> None:
    description = describe({"kv": spans(2), "scale": spans(2, rows=rows)})

    require_page_rows(description, "scale", beside="kv", rows_are_pages=rows_are_pages)


def test_slots_behind_the_last_whole_page_need_no_row() -> None:
    description = describe({"kv": spans(1, rows=11), "scale": spans(1, rows=2)})

    require_page_rows(description, "scale", beside="kv", rows_are_pages=False)


@pytest.mark.parametrize(
    ("rows", "rows_are_pages", "expected"),
    [(8, False, 2), (3, False, 2), (1, False, 2), (2, True, 8)],
    ids=["slots", "more", "fewer", "pages"],
)
def test_other_rows_than_one_for_each_page_are_refused(
    rows: int, expected: int, *, rows_are_pages: bool
) -> None:
    description = describe({"kv": spans(1), "scale": spans(1, rows=rows)})

    with pytest.raises(ContractError, match=rf"{rows} rows, expected {expected}, one per page of"):
        require_page_rows(description, "scale", beside="kv", rows_are_pages=rows_are_pages)


# ---- facts ------------------------------------------------------------------------------------


def test_facts_are_returned_with_their_type() -> None:
    description = describe(facts={"format": "bf16", "ring": 8})

    assert text_fact(description, "format") == text_fact(description, "format", known=["bf16"])
    assert integer_fact(description, "ring") == integer_fact(description, "ring", known=(8, 16))
    assert (text_fact(description, "format"), integer_fact(description, "ring")) == ("bf16", 8)


def test_an_unknown_fact_is_refused_with_its_value_and_drafts_are_known_to_everybody() -> None:
    description = describe(facts={"format": "bf16", "kv_scaled": 1, "draft_layers": 0})

    with pytest.raises(UnsupportedKVCacheError, match=r"facts \{'kv_scaled': 1\} are unknown here"):
        require_facts(description, known=["format"])
    require_facts(description, known=["format", "kv_scaled"])


def test_a_missing_fact_is_refused_and_never_guessed() -> None:
    with pytest.raises(ContractError, match="fact 'format' is missing; sizes do not tell it"):
        text_fact(describe(), "format")
    with pytest.raises(ContractError, match="fact 'ring' is missing"):
        integer_fact(describe(), "ring")


@pytest.mark.parametrize("value", [8, (8,), ""])
def test_a_fact_that_is_no_text_is_refused(value: Fact) -> None:
    with pytest.raises(ContractError, match="fact 'format' must be a non-empty text, got"):
        text_fact(describe(facts={"format": value}), "format")


@pytest.mark.parametrize("value", ["8", (8,)])
def test_a_fact_that_is_no_integer_is_refused(value: Fact) -> None:
    with pytest.raises(ContractError, match="fact 'ring' must be an integer, got"):
        integer_fact(describe(facts={"ring": value}), "ring")


def test_an_unknown_value_of_a_fact_is_refused_with_the_known_ones() -> None:
    description = describe(facts={"format": "int4", "ring": 4})

    with pytest.raises(UnsupportedKVCacheError, match=r"format 'int4' .* known are 'bf16', 'fp8'"):
        text_fact(description, "format", known=("bf16", "fp8"))
    with pytest.raises(UnsupportedKVCacheError, match="ring 4 is not laid out here; known are 8"):
        integer_fact(description, "ring", known=(8,))


# ---- keys that tokens share -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "keys", "value_format"),
    [(1, 4, "fp8"), (2, 2, "fp8, a key for 2 tokens"), (4, 1, "fp8, a key for 4 tokens")],
)
def test_a_page_has_a_key_for_each_group_of_tokens_and_the_format_says_so(
    tokens: int, keys: int, value_format: str
) -> None:
    description = describe(facts={"pooled": tokens})

    assert folded_keys(description, "pooled", "fp8") == (keys, value_format)


@pytest.mark.parametrize("tokens", [0, -1, 3, 8])
def test_pages_without_whole_groups_of_tokens_are_refused(tokens: int) -> None:
    with pytest.raises(ContractError, match=f"'pooled' is {tokens}, of which a page of 4 slots"):
        folded_keys(describe(facts={"pooled": tokens}), "pooled", "fp8", unstated=1)


def test_how_many_tokens_share_a_key_is_guessed_only_where_a_plugin_says_what_is_usual() -> None:
    assert folded_keys(describe(), "pooled", "fp8", unstated=1) == (4, "fp8")
    with pytest.raises(ContractError, match="fact 'pooled' is missing"):
        folded_keys(describe(), "pooled", "fp8")


# ---- logical pools ----------------------------------------------------------------------------


def test_paged_pools_of_the_trees_page_size_are_taken() -> None:
    require_paged_pools(describe(), "kv")


@pytest.mark.parametrize(
    ("pools", "error", "message"),
    [
        ([], ContractError, "there is no logical pool 'kv'"),
        (
            [LogicalPool(name="kv", page_size=4), LogicalPool(name="swa", page_size=4)],
            UnsupportedKVCacheError,
            r"logical pools \['swa'\] are unknown here; known are \['kv'\]",
        ),
        (
            [LogicalPool(name="kv", page_size=1, kind=PoolKind.SLOT)],
            UnsupportedKVCacheError,
            "logical pool 'kv' must be paged, got slot",
        ),
        (
            [LogicalPool(name="kv", page_size=8)],
            ContractError,
            "'kv' has pages of 8 slots and the prefix tree pages of 4;",
        ),
    ],
)
def test_b96_other_pools_kinds_and_page_sizes_are_refused(
    pools: Sequence[LogicalPool], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        require_paged_pools(replace(describe(), logical_pools=tuple(pools)), "kv")


def states(*, kind: PoolKind = PoolKind.SLOT, page_size: int = 1) -> KVCacheDescription:
    """Describe a pool of states beside pages, or another pool in its place."""
    pools = (
        LogicalPool(name="kv", page_size=PAGE),
        LogicalPool(name="mamba", kind=kind, page_size=page_size),
    )
    return replace(describe({"state": spans(2)}), logical_pools=pools)


def test_a_pool_of_whole_states_is_taken_beside_paged_ones() -> None:
    require_pools(states(), paged=["kv"], slots=["mamba"])


def test_a_pool_of_states_whose_slots_are_tokens_is_refused() -> None:
    paged = states(kind=PoolKind.PAGED, page_size=PAGE)

    with pytest.raises(
        UnsupportedKVCacheError, match="'mamba' must be a pool of whole states, got paged"
    ):
        require_pools(paged, paged=["kv"], slots=["mamba"])


def test_a_pool_of_states_that_nobody_described_is_missed() -> None:
    with pytest.raises(ContractError, match="there is no logical pool 'mamba'"):
        require_pools(describe(), paged=["kv"], slots=["mamba"])


# ---- drafts -----------------------------------------------------------------------------------


def test_drafts_are_counted_over_all_roles() -> None:
    description = describe({"draft_k": spans(2), "draft_v": spans(2)})

    assert draft_count(description, "draft_k", "draft_v") == 2
    assert draft_count(describe(), "draft_k", "draft_v") == 0


def test_drafts_of_different_numbers_are_refused() -> None:
    description = describe({"draft_k": spans(2), "draft_v": spans(1)})

    with pytest.raises(ContractError, match=r"got \{'draft_k': 2, 'draft_v': 1\}"):
        draft_count(description, "draft_k", "draft_v")


@pytest.mark.parametrize(("stated", "described"), [(1, 0), (1, 2), (0, 1)])
def test_b08_drafts_other_than_the_stated_ones_are_refused(stated: int, described: int) -> None:
    description = describe({"draft": spans(described)}, facts={"draft_layers": stated})

    with pytest.raises(ContractError, match=f"says {stated}, but {described} are described"):
        draft_count(description, "draft")


def test_there_may_be_as_many_drafts_as_layers_and_no_more() -> None:
    assert draft_count(describe({"draft": spans(2)}), "draft") == 2
    with pytest.raises(ContractError, match="3 draft layers cannot ride on 2 layers"):
        draft_count(describe({"draft": spans(3)}), "draft")


def test_draft_spans_follow_the_targets_and_ride_on_its_layers() -> None:
    assert ride_along({0: 0, 1: 1}, []) == {0: (0,), 1: (1,)}
    assert ride_along({0: 0, 1: 1}, range(2)) == {0: (0, 2), 1: (1, 3)}
    assert ride_along({2: 0}, [0, 2]) == {0: (1,), 2: (0, 2)}
    assert list(ride_along({2: 0}, [0])) == [0, 2]


# ---- entries ----------------------------------------------------------------------------------


def test_an_entry_takes_page_size_index_map_and_shard_from_the_description() -> None:
    def doubled(slots: IndexArray) -> IndexArray:
        return slots * 2

    axes = (RankAxis(name="tp", rank=1, size=2), RankAxis(name="cp", rank=0, size=4))
    description = replace(
        describe(),
        index_maps={"kv": doubled},
        replication=Replication(axes=axes, sharded_over={"kv": frozenset({"tp"})}),
    )

    entry = pool_entry(
        description,
        name="pool",
        indices_from_pool="kv",
        roles=["kv"],
        components=[description.buffers["kv"]],
        layer_mapping={0: 0, 1: 1},
        rows_are_pages=False,
        value_format="bf16",
    )

    assert (entry.page_size, entry.value_format, entry.replicated) == (PAGE, "bf16", False)
    assert (entry.rank_axes, entry.is_writer) == ((axes[0],), True)
    assert entry.translate_indices([1, 2]).tolist() == [2, 4]
    group = pool_group(description, [entry], layout="plain/1")
    assert (group.layout, group.num_layers, group.layer_range) == ("plain/1", 2, (10, 12))


def test_g1_a_page_of_a_pool_of_states_is_one_slot() -> None:
    entry = pool_entry(
        states(),
        name="states",
        indices_from_pool="mamba",
        roles=["state"],
        components=[spans(2)],
        layer_mapping={0: 0, 1: 1},
        rows_are_pages=True,
        value_format="fp32",
    )

    assert (entry.page_size, entry.page_bytes) == (1, 32)
    assert pool_group(states(), [entry], layout="plain/1").page_size == PAGE


def test_roles_that_ranks_hold_differently_are_not_put_in_one_entry() -> None:
    description = replace(
        describe({"kv": spans(1), "draft": spans(1)}),
        replication=Replication(
            axes=(RankAxis(name="tp", rank=0, size=2),), sharded_over={"kv": frozenset()}
        ),
    )

    with pytest.raises(
        ContractError,
        match=r"\{'kv': 'the same on all ranks', 'draft': \['tp'\]\}; list every role",
    ):
        pool_entry(
            description,
            name="pool",
            indices_from_pool="kv",
            roles=["kv", "draft"],
            components=[[*description.buffers["kv"], *description.buffers["draft"]]],
            layer_mapping={0: (0, 1)},
            rows_are_pages=False,
            value_format="bf16",
        )


def test_b01_a_row_in_two_buffers_is_one_entry_and_all_640_bytes_come_back() -> None:
    memory = HostMemory()
    values, rope = (
        memory.allocate(8, size, label=name) for name, size in (("nope", 512), ("rope", 128))
    )
    description = replace(
        describe({"nope": (values,), "rope": (rope,)}, layers=1),
        page_size=1,
        logical_pools=(LogicalPool(name="kv", page_size=1),),
    )
    entry = pool_entry(
        description,
        name="unified",
        indices_from_pool="kv",
        roles=["nope", "rope"],
        components=[[values], [rope]],
        layer_mapping={0: 0},
        rows_are_pages=True,
        value_format="fp8",
    )
    group = pool_group(description, [entry], layout="plain/1")

    rows = {"nope": PageRows("kv", 1), "rope": PageRows("kv", 1)}
    check_round_trip(group, description, rows, {"kv": {2: 5}})

    assert entry.page_bytes == 640
