"""Caches of hybrids, from the description alone: what is claimed and how it is laid out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hybrid_examples import CONV, INT8, PAGE, PAGES, SSM, Hybrid, example
from hypothesis import given, settings
from hypothesis import strategies as st

import kvlinker_mamba
from kvlinker.description import (
    Fact,
    IndexArray,
    RankAxis,
    Replication,
)
from kvlinker.errors import ContractError
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan
from kvlinker.testing.cache_examples import with_facts
from kvlinker.testing.pool_memory import HostMemory
from kvlinker.testing.strategies import MadeUpMemory, PageRows, check_round_trip, check_strategy
from kvlinker.transfers import HitPolicy, PoolTransfer, ResolutionStatus

TWO_CONVS = {**SSM, **CONV, "conv_states": 2}


def laid_out(hybrid: Hybrid, start: int = 0, end: int | None = None) -> DevicePoolGroup:
    return check_strategy(kvlinker_mamba, hybrid.describe(MadeUpMemory().span, start, end))


def mappings(group: DevicePoolGroup) -> dict[str, dict[int, tuple[int, ...]]]:
    return {entry.name: dict(entry.layer_mapping) for entry in group.entries}


# ---- pages and states -------------------------------------------------------------------------


def test_g1_states_are_an_entry_whose_page_is_one_slot_beside_pages_of_tokens() -> None:
    group = laid_out(Hybrid(kinds=("mamba", "attention", "mamba", "mlp", "attention")))

    assert [
        (entry.name, entry.indices_from_pool, entry.page_size, entry.rows_are_pages)
        for entry in group.entries
    ] == [("kv", "kv", PAGE, False), ("mamba", "mamba", 1, True)]
    assert mappings(group) == {"kv": {1: (0,), 4: (1,)}, "mamba": {0: (0,), 2: (1,)}}
    assert (group.layout, group.page_size, group.num_layers) == ("mamba/1", PAGE, 5)


def test_a_state_is_the_recurrence_of_all_layers_then_each_convolution_of_all_layers() -> None:
    group = laid_out(Hybrid(kinds=("mamba", "attention", "mamba"), states=TWO_CONVS))

    states = group.entry_map["mamba"]
    assert [[span.label for span in component] for component in states.components] == [
        ["ssm_state[0]", "ssm_state[1]"],
        ["conv_state_0[0]", "conv_state_0[1]"],
        ["conv_state_1[0]", "conv_state_1[1]"],
    ]
    assert states.value_format == "ssm fp32, value_major; conv bf16, channel_major, window 3"


def test_a_layer_reads_its_part_of_the_state_at_its_place_in_the_object() -> None:
    description = Hybrid(kinds=("mamba", "attention", "mamba")).describe(MadeUpMemory().span)
    states = check_strategy(kvlinker_mamba, description).entry_map["mamba"]

    ranges = states.layer_plan(states.prepare_locations([5, 3]), 2)

    assert ranges is not None
    expanded = ranges.expand()
    ssm, conv = description.buffers["ssm_state"][1], description.buffers["conv_state_0"][1]
    assert expanded.address.tolist() == [
        ssm.base_ptr + 5 * 32,
        conv.base_ptr + 5 * 12,
        ssm.base_ptr + 3 * 32,
        conv.base_ptr + 3 * 12,
    ]
    # The object: 32 B of layers 0 and 2 each, then 12 B of both.
    assert expanded.offset.tolist() == [32, 2 * 32 + 12] * 2
    assert expanded.size.tolist() == [32, 12] * 2


def test_a_layer_of_both_kinds_has_pages_and_a_state() -> None:
    group = laid_out(Hybrid(kinds=("attention_and_mamba", "attention_and_mamba")))

    assert mappings(group) == {"kv": {0: (0,), 1: (1,)}, "mamba": {0: (0,), 1: (1,)}}


@pytest.mark.parametrize(
    ("pages", "entries"),
    [
        ("mha", {"kv": {2: (0,)}}),
        ("swa", {"kv": {2: (0,)}, "swa": {0: (0,)}}),
        ("mla", {"kv": {2: (0,)}}),
        ("dsa", {"kv": {2: (0,)}, "indexer": {2: (0,)}}),
    ],
)
def test_states_lie_beside_pages_of_every_family(
    pages: str, entries: dict[str, dict[int, tuple[int, ...]]]
) -> None:
    first = "sliding" if pages == "swa" else "mlp"

    group = laid_out(Hybrid(pages=pages, kinds=(first, "mamba", "attention")))

    assert mappings(group) == {**entries, "mamba": {1: (0,)}}


def test_layers_that_select_by_anothers_index_have_none() -> None:
    hybrid = Hybrid(pages="dsa", kinds=("attention", "mamba", "attention"))
    description = hybrid.describe(MadeUpMemory().span)

    match = kvlinker_mamba.match_kv_cache(description)

    assert match is not None
    assert list(match.omitted) == ["index_k[1]"]
    assert mappings(laid_out(hybrid))["indexer"] == {0: (0,)}


def test_scales_of_pages_are_an_entry_of_their_own() -> None:
    group = laid_out(Hybrid(facts={"kv_scaled": 1, "kv_format": "fp4_e2m1_block16_e8m0"}))

    assert {entry.name: entry.value_format for entry in group.entries} == {
        "kv": "fp4_e2m1_block16_e8m0",
        "kv_scale": "fp4_e2m1_block16_e8m0_scale",
        "mamba": "ssm fp32, value_major; conv bf16, channel_major, window 3",
    }


# ---- forms of states --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "row_bytes", "value_format"),
    [
        ({"ssm_format": "none", **CONV}, [12], "conv bf16, channel_major, window 3"),
        ({**SSM, "conv_states": 0}, [32], "ssm fp32, value_major"),
        (
            {**INT8, **CONV},
            [32, 4, 12],
            "ssm int8, scales bf16, value_major; conv bf16, channel_major, window 3",
        ),
    ],
    ids=["short convolutions", "no convolution", "int8 checkpoints"],
)
def test_a_state_has_all_its_parts(
    states: dict[str, Fact], row_bytes: list[int], value_format: str
) -> None:
    group = laid_out(Hybrid(kinds=("mamba", "attention"), states=states))

    entry = group.entry_map["mamba"]
    assert [span.row_bytes for span in entry.spans] == row_bytes
    assert entry.value_format == value_format


def test_b06_side_states_are_entries_loaded_with_the_layers_that_read_them() -> None:
    group = laid_out(Hybrid(kinds=("attention", "mamba", "mamba", "mamba"), has_sides=True))

    # The n-gram history is of no layer, and is read before the first one.
    assert mappings(group) == {
        "kv": {0: (0,)},
        "mamba": {1: (0,), 2: (1,), 3: (2,)},
        "side_ngram": {0: (0,)},
        "side_short_conv": {1: (0,), 3: (1,)},
    }
    assert group.entry_map["side_ngram"].page_size == 1


def test_layers_without_a_side_state_are_listed_as_omitted() -> None:
    description = Hybrid(kinds=("attention", "mamba"), has_sides=True).describe(MadeUpMemory().span)

    match = kvlinker_mamba.match_kv_cache(description)

    assert match is not None
    assert dict(match.omitted) == {"side_short_conv[0]": "layer 0 keeps no 'side_short_conv'"}


def test_rows_a_whole_slot_apart_make_the_same_objects_as_dense_ones() -> None:
    apart = laid_out(Hybrid(states=TWO_CONVS, envelope=True))

    states = apart.entry_map["mamba"]
    assert {span.row_stride for span in states.spans} == {3 * (32 + 12 + 6)}
    assert apart.fingerprint == laid_out(Hybrid(states=TWO_CONVS)).fingerprint


def envelope(layers: int, slots: int) -> tuple[list[BufferSpan], list[BufferSpan]]:
    """Return spans of recurrences [2, 3, 4] in fp32 and of convolutions [10, 3] in bf16, as engines view one buffer."""
    conv_bytes, ssm_bytes = 10 * 3 * 2, 2 * 3 * 4 * 4
    entry = layers * (conv_bytes + ssm_bytes)
    raw = torch.zeros(slots * entry, dtype=torch.uint8)
    conv = torch.as_strided(
        raw.view(torch.bfloat16), (layers, slots, 10, 3), (30, entry // 2, 3, 1), 0
    )
    ssm = torch.as_strided(
        raw.view(torch.float32),
        (layers, slots, 2, 3, 4),
        (24, entry // 4, 12, 4, 1),
        layers * conv_bytes // 4,
    )
    return (
        [BufferSpan.from_tensor(ssm[layer]) for layer in range(layers)],
        [BufferSpan.from_tensor(conv[layer]) for layer in range(layers)],
    )


def test_c3_states_that_are_views_of_one_buffer_come_back_whole() -> None:
    ssm, conv = envelope(layers=3, slots=PAGES)
    description = Hybrid(kinds=("mamba", "attention", "mamba", "mamba")).describe(
        HostMemory().allocate
    )
    description = replace(
        description,
        buffers={**description.buffers, "ssm_state": tuple(ssm), "conv_state_0": tuple(conv)},
    )

    group = check_strategy(kvlinker_mamba, description)

    places = {
        "k": PageRows("kv", PAGE),
        "v": PageRows("kv", PAGE),
        "ssm_state": PageRows("mamba", 1),
        "conv_state_0": PageRows("mamba", 1),
    }
    moves = {"kv": {0: 3, 4: 1}, "mamba": {2: 5, 0: 0}}
    check_round_trip(group, description, places, moves)


# ---- drafts, stages, ranks --------------------------------------------------------------------


def test_drafts_ride_on_the_first_layers_whatever_these_keep() -> None:
    group = laid_out(Hybrid(kinds=("mamba", "mamba", "attention"), drafts=2))

    assert mappings(group) == {"kv": {0: (1,), 1: (2,), 2: (0,)}, "mamba": {0: (0,), 1: (1,)}}


def test_drafts_with_heads_are_an_entry_of_their_own_beside_latents() -> None:
    group = laid_out(Hybrid(pages="mla", kinds=("mamba", "attention"), head_drafts=2))

    draft = group.entry_map["draft"]
    assert (draft.indices_from_pool, draft.page_bytes) == ("kv", 2 * PAGE * (24 + 28))
    assert mappings(group)["draft"] == {0: (0,), 1: (1,)}
    assert (draft.value_format, group.entry_map["kv"].value_format) == ("fp16", "bf16")


def test_drafts_with_heads_may_keep_whole_pages_in_a_row() -> None:
    hybrid = Hybrid(pages="mla", kinds=("mamba", "attention"), head_drafts=1)
    description = hybrid.describe(MadeUpMemory().span)
    paged = with_facts(description, draft_kv_layout="head_major")
    # 24 B and 28 B are no pages of 16 slots; rows of 32 B and 48 B are.
    rows = {
        role: (MadeUpMemory().span(PAGES, size),)
        for role, size in (("draft_k", 32), ("draft_v", 48))
    }

    group = check_strategy(kvlinker_mamba, replace(paged, buffers={**paged.buffers, **rows}))

    draft = group.entry_map["draft"]
    assert (draft.rows_are_pages, draft.page_bytes) == (True, 80)
    with pytest.raises(ContractError, match=r"'draft_k\[0\]' has rows of 24 B"):
        kvlinker_mamba.match_kv_cache(paged)


def test_a_draft_without_an_index_of_its_own_rides_with_its_latent_alone() -> None:
    description = Hybrid(pages="dsa", kinds=("mamba", "attention"), drafts=1).describe(
        MadeUpMemory().span
    )
    absent = BufferSpan(base_ptr=0, rows=0, row_bytes=PAGE * 132, row_stride=PAGE * 132)
    description = replace(description, buffers={**description.buffers, "draft_index_k": (absent,)})

    match = kvlinker_mamba.match_kv_cache(description)

    assert match is not None
    assert dict(match.omitted) == {"draft_index_k[0]": "draft layer 0 keeps no index buffer"}
    assert mappings(check_strategy(kvlinker_mamba, description))["indexer"] == {1: (0,)}


@pytest.mark.parametrize(
    ("end", "entries"), [(1, ["kv"]), (3, ["kv", "mamba"])], ids=["pages alone", "both"]
)
def test_a_stage_has_no_entry_for_what_its_layers_do_not_keep(end: int, entries: list[str]) -> None:
    hybrid = Hybrid(kinds=("attention", "mamba", "mamba"))

    assert list(laid_out(hybrid, 0, end).entry_map) == entries


def test_b13_a_stage_of_states_alone_takes_kv_keys_and_slots_without_storing_them() -> None:
    group = laid_out(Hybrid(kinds=("attention", "mamba", "mamba")), 1)
    transfers = [
        PoolTransfer(name="kv", keys=("a", "b"), device_indices=list(range(2 * PAGE))),
        PoolTransfer(
            name="mamba", keys=("b",), device_indices=[3], hit_policy=HitPolicy.TRAILING_PAGES
        ),
    ]

    resolution = group.resolve_transfers(transfers)

    assert (resolution.status, group.layer_range) == (ResolutionStatus.COMPLETE, (1, 3))
    assert [(t.name, t.hit_policy) for t in resolution] == [("mamba", HitPolicy.TRAILING_PAGES)]


def test_a_state_without_its_transfer_is_missing_and_never_passed_over() -> None:
    resolution = laid_out(Hybrid()).resolve_transfers([PoolTransfer(name="kv", keys=("a",))])

    assert resolution.status is ResolutionStatus.MISSING_POOLS
    assert (list(resolution), resolution.missing) == ([], ("mamba",))


def test_g6_latents_and_side_states_may_be_replicas_beside_sharded_states() -> None:
    axes = (RankAxis(name="tp", rank=1, size=2),)
    replicas = dict.fromkeys(("latent", "side_ngram", "side_short_conv"), frozenset[str]())
    description = replace(
        Hybrid(pages="mla", has_sides=True).describe(MadeUpMemory().span),
        replication=Replication(axes=axes, sharded_over=replicas),
    )

    group = check_strategy(kvlinker_mamba, description)

    assert {
        entry.name: (entry.replicated, entry.rank_axes, entry.is_writer) for entry in group.entries
    } == {
        "kv": (True, (), False),
        "mamba": (False, axes, True),
        "side_ngram": (True, (), False),
        "side_short_conv": (True, (), False),
    }


def test_each_index_space_has_its_own_translation() -> None:
    def moved(slots: IndexArray) -> IndexArray:
        return slots + 7

    description = replace(
        Hybrid(has_sides=True).describe(MadeUpMemory().span), index_maps={"mamba": moved}
    )

    for entry in check_strategy(kvlinker_mamba, description).entries:
        expected = 16 if entry.name == "kv" else 23
        assert entry.translate_indices([16]).tolist() == [expected]


# ---- keys -------------------------------------------------------------------------------------


def test_layouts_differ_by_everything_that_makes_other_bytes() -> None:
    state_facts: list[dict[str, Fact]] = [
        {"ssm_format": "bf16"},
        {"ssm_layout": "key_major"},
        {"conv_format": "fp16"},
        {"conv_layout": "window_major"},
        {"conv_window": 2},
    ]
    hybrids = [
        Hybrid(),
        Hybrid(kinds=("mlp", "mamba", "attention", "mamba", "attention_and_mamba")),
        Hybrid(states=TWO_CONVS),
        Hybrid(states={**SSM, "conv_states": 0}),
        Hybrid(states={**CONV, "ssm_format": "none"}),
        Hybrid(states={**CONV, **INT8}),
        Hybrid(states={**CONV, **INT8, "ssm_scale_format": "fp16"}),
        Hybrid(drafts=1),
        Hybrid(has_sides=True),
        Hybrid(facts={"kv_format": "fp16"}),
        *(Hybrid(facts=facts) for facts in state_facts),
    ]

    assert len({laid_out(hybrid).fingerprint for hybrid in hybrids}) == len(hybrids)


def test_golden_g5_the_fingerprints_of_layouts_stay() -> None:
    found = {
        "mha": laid_out(Hybrid(states=TWO_CONVS, drafts=1)).fingerprint.hex(),
        "mla": laid_out(Hybrid(pages="mla", has_sides=True)).fingerprint.hex(),
    }

    assert found == {
        "mha": "1f4d6dcdd62f5bd4b8dd5058ff568d14",
        "mla": "1e97f3570768444cd11c0ec6dac42e79",
    }


def test_the_order_in_which_side_states_are_described_changes_nothing() -> None:
    description = Hybrid(has_sides=True).describe(MadeUpMemory().span)
    turned = replace(
        description,
        buffers=dict(reversed(list(description.buffers.items()))),
    )

    groups = [check_strategy(kvlinker_mamba, each) for each in (description, turned)]

    assert groups[0].fingerprint == groups[1].fingerprint
    assert list(groups[0].entry_map) == list(groups[1].entry_map)


# ---- bytes ------------------------------------------------------------------------------------

FORMS: list[dict[str, Fact]] = [
    {**SSM, **CONV},
    TWO_CONVS,
    {**SSM, "conv_states": 0},
    {**CONV, "ssm_format": "none"},
    {**INT8, **TWO_CONVS, "ssm_format": "int8"},
]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_stage_of_any_hybrid_is_claimed_whole_and_moved_whole(data: st.DataObject) -> None:
    pages = data.draw(st.sampled_from(["mha", "swa", "mla", "dsa"]))
    kinds = ["mamba", "attention", "attention_and_mamba", "mlp"]
    if pages == "swa":
        kinds.append("sliding")
    model = [
        "attention",
        *data.draw(st.lists(st.sampled_from(kinds), min_size=3, max_size=6)),
        "mamba",
    ]
    drafts = data.draw(st.integers(0, 1))
    hybrid = Hybrid(
        pages=pages,
        kinds=model,
        states=data.draw(st.sampled_from(FORMS)),
        envelope=data.draw(st.booleans()),
        has_sides=data.draw(st.booleans()),
        drafts=drafts,
        head_drafts=data.draw(st.integers(0, 1)) if pages in ("mla", "dsa") else 0,
    )
    cache = example("drawn", hybrid)
    description = cache.in_memory()

    group = check_strategy(kvlinker_mamba, description)

    order = data.draw(st.permutations(range(group.num_layers)))
    check_round_trip(
        group,
        description,
        cache.page_rows(description),
        cache.moves(description),
        layers=order,
    )


def test_the_plugin_states_the_api_that_it_was_written_for() -> None:
    assert kvlinker_mamba.describe_plugin().api_version == 1
