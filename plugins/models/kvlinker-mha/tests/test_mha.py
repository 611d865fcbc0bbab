"""MHA caches, from the description alone: what is claimed, laid out and refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import kvlinker_mha
from kvlinker.description import (
    Fact,
    IndexArray,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
    RankAxis,
    Replication,
)
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.spans import BufferSpan
from kvlinker.testing.strategies import MadeUpMemory, PageRows, check_round_trip, check_strategy

PAGE, PAGES = 16, 6
HEAD_BYTES = 128
Allocate = Callable[[int, int], BufferSpan]


def tensor_span(rows: int, row_bytes: int) -> BufferSpan:
    return BufferSpan.from_tensor(torch.zeros((rows, row_bytes), dtype=torch.uint8))


def describe(
    layers: int = 3,
    *,
    drafts: int = 0,
    head_major: bool = False,
    scaled: bool = False,
    k_bytes: int = 2 * HEAD_BYTES,
    v_bytes: int = 2 * HEAD_BYTES,
    allocate: Allocate | None = None,
) -> KVCacheDescription:
    """Describe an MHA cache of `k_bytes` and `v_bytes` per slot, each with a byte of scales for 8 if `scaled`."""
    span = allocate or MadeUpMemory().span
    buffers: dict[str, tuple[BufferSpan, ...]] = {}
    for prefix, count in (("", layers), ("draft_", drafts)):
        for role, size in (("k", k_bytes), ("v", v_bytes)):
            rows, row_bytes = (PAGES, size * PAGE) if head_major else (PAGES * PAGE, size)
            buffers[f"{prefix}{role}"] = tuple(span(rows, row_bytes) for _ in range(count))
            buffers[f"{prefix}{role}_scale"] = tuple(
                span(PAGES, size // 8 * PAGE) for _ in range(count if scaled else 0)
            )
    return KVCacheDescription(
        family="mha",
        page_size=PAGE,
        buffers={role: spans for role, spans in buffers.items() if spans},
        layers=tuple(LayerFacts(layer=i, global_layer=i) for i in range(layers)),
        logical_pools=(LogicalPool(name="kv", page_size=PAGE),),
        facts={
            "kv_layout": "head_major" if head_major else "token_major",
            "kv_format": "fp4_e2m1_block16_e8m0" if scaled else "bf16",
            "kv_scaled": int(scaled),
        },
    )


def with_facts(description: KVCacheDescription, **facts: Fact) -> KVCacheDescription:
    return replace(description, facts={**description.facts, **facts})


def without(description: KVCacheDescription, *roles: str) -> KVCacheDescription:
    kept = {role: spans for role, spans in description.buffers.items() if role not in roles}
    return replace(description, buffers=kept)


def page_rows(description: KVCacheDescription) -> dict[str, PageRows]:
    """Say where the pages are: scales and head-major values have one row for each page."""
    paged = description.facts["kv_layout"] == "head_major"
    return {
        role: PageRows("kv", 1 if paged or role.endswith("_scale") else PAGE)
        for role in description.buffers
    }


# ---- the layout -------------------------------------------------------------------------------


def test_token_major_rows_are_slots_with_all_k_before_all_v() -> None:
    group = check_strategy(kvlinker_mha, describe(3))

    (entry,) = group.entries
    assert (entry.name, entry.indices_from_pool, entry.rows_are_pages) == ("kv", "kv", False)
    assert [[span.label for span in component] for component in entry.components] == [
        ["k[0]", "k[1]", "k[2]"],
        ["v[0]", "v[1]", "v[2]"],
    ]
    assert entry.layer_mapping == {0: (0,), 1: (1,), 2: (2,)}
    assert (entry.value_format, group.layout) == ("bf16", "mha/1")


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "bytes_per_token"),
    [
        # config.json of meta-llama/Llama-3.1-8B: num_hidden_layers 32, num_key_value_heads 8, head_dim 128.
        (32, 8, 128, 131_072),
        # config.json of Qwen/Qwen3-8B: num_hidden_layers 36, num_key_value_heads 8, head_dim 128.
        (36, 8, 128, 147_456),
        # config.json of HuggingFaceTB/SmolLM2-135M: num_hidden_layers 30, num_key_value_heads 3, head_dim 64.
        (30, 3, 64, 23_040),
    ],
    ids=["Llama-3.1-8B", "Qwen3-8B", "SmolLM2-135M"],
)
@pytest.mark.parametrize("head_major", [False, True])
def test_bytes_per_token_of_published_models_in_bf16(
    *, layers: int, kv_heads: int, head_dim: int, bytes_per_token: int, head_major: bool
) -> None:
    size = kv_heads * head_dim * torch.bfloat16.itemsize
    description = describe(layers, head_major=head_major, k_bytes=size, v_bytes=size)

    group = check_strategy(kvlinker_mha, description)

    assert sum(entry.page_bytes for entry in group.entries) == bytes_per_token * PAGE


def test_w27_head_major_rows_are_pages_and_a_page_is_not_claimed_sixteen_times() -> None:
    # 2 heads of 64 bf16 values: a page of 16 slots is 4096 B. Read as slots, its rows would be 65536 B.
    group = check_strategy(kvlinker_mha, describe(1, head_major=True))

    (entry,) = group.entries
    assert entry.rows_are_pages
    assert entry.part_bytes == (2 * 4096,)
    ranges = entry.page_plan(entry.prepare_locations(range(16, 32))).expand()
    k, v = entry.spans
    assert ranges.address.tolist() == [k.base_ptr + 4096, v.base_ptr + 4096]
    assert ranges.size.tolist() == [4096, 4096]


@pytest.mark.parametrize("head_major", [False, True])
def test_b90_two_layouts_of_one_shape_are_told_apart_by_the_adapter_alone(
    *, head_major: bool
) -> None:
    description = describe(head_major=head_major)
    facts = {name: value for name, value in description.facts.items() if name != "kv_layout"}

    with pytest.raises(ContractError, match="fact 'kv_layout' is missing; sizes do not tell it"):
        kvlinker_mha.match_kv_cache(replace(description, facts=facts))


def test_b90_one_buffer_under_two_stated_layouts_gives_two_layouts() -> None:
    buffer = torch.zeros((4, 2, 2, 8), dtype=torch.uint8)
    span = BufferSpan.from_tensor(buffer)
    description = replace(
        describe(1),
        page_size=2,
        logical_pools=(LogicalPool(name="kv", page_size=2),),
        buffers={"k": (span,), "v": (span.relabel("v"),)},
    )

    token_major, head_major = (
        check_strategy(kvlinker_mha, with_facts(description, kv_layout=layout))
        for layout in ("token_major", "head_major")
    )

    assert token_major.entries[0].page_bytes == 2 * 2 * 32
    assert head_major.entries[0].page_bytes == 2 * 32
    assert token_major.fingerprint != head_major.fingerprint


def test_k_and_v_may_have_different_sizes() -> None:
    group = check_strategy(kvlinker_mha, describe(2, k_bytes=384, v_bytes=256))

    assert group.entries[0].page_bytes == 2 * (384 + 256) * PAGE


def test_b04_scales_are_an_entry_of_whole_pages_beside_values_in_slots() -> None:
    # 256 B of values and 32 B of scales in a slot, halved between K and V.
    description = describe(1, k_bytes=128, v_bytes=128, scaled=True)

    group = check_strategy(kvlinker_mha, description)

    values, scales = group.entries
    assert (values.name, values.rows_are_pages, values.page_bytes) == ("kv", False, 256 * PAGE)
    assert (scales.name, scales.rows_are_pages, scales.page_bytes) == ("kv_scale", True, 32 * PAGE)
    assert scales.indices_from_pool == "kv"
    assert values.value_format == "fp4_e2m1_block16_e8m0"
    assert scales.value_format == "fp4_e2m1_block16_e8m0_scale"


def test_drafts_ride_on_the_first_layers_scales_included() -> None:
    group = check_strategy(kvlinker_mha, describe(3, drafts=2, scaled=True))

    assert [entry.name for entry in group.entries] == ["kv", "kv_scale"]
    for entry in group.entries:
        assert entry.layer_mapping == {0: (0, 3), 1: (1, 4), 2: (2,)}


def test_entries_take_index_map_and_replication_from_the_description() -> None:
    def shifted(slots: IndexArray) -> IndexArray:
        return slots + PAGE

    axes = (RankAxis(name="tp", rank=3, size=4),)
    description = replace(
        describe(scaled=True),
        index_maps={"kv": shifted},
        replication=Replication(
            axes=axes,
            sharded_over={role: frozenset() for role in ("k_scale", "v_scale")},
        ),
    )

    values, scales = check_strategy(kvlinker_mha, description).entries

    assert values.translate_indices([0]).tolist() == scales.translate_indices([0]).tolist() == [16]
    assert (values.rank_axes, values.replicated, values.is_writer) == (axes, False, True)
    assert (scales.rank_axes, scales.replicated, scales.is_writer) == ((), True, False)


# ---- bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("v_bytes", [256, 128])
def test_b04_b08_every_byte_of_a_page_comes_back_in_other_pages_scales_and_drafts_included(
    *, head_major: bool, scaled: bool, drafts: int, v_bytes: int
) -> None:
    description = describe(
        3,
        drafts=drafts,
        head_major=head_major,
        scaled=scaled,
        v_bytes=v_bytes,
        allocate=tensor_span,
    )

    group = check_strategy(kvlinker_mha, description)

    check_round_trip(group, description, page_rows(description), {"kv": {1: 4, 5: 0, 2: 2}})


def test_k_and_v_that_are_halves_of_one_allocation_come_back() -> None:
    fused = torch.zeros((2, PAGES * PAGE, 2, 64), dtype=torch.bfloat16)
    k, v = (
        BufferSpan.from_tensor(half, label=name) for half, name in zip(fused, "kv", strict=True)
    )
    description = replace(describe(1), buffers={"k": (k,), "v": (v,)})

    group = check_strategy(kvlinker_mha, description)

    check_round_trip(group, description, page_rows(description), {"kv": {0: 5, 5: 1}})
    assert len(group.regions) == 1


# ---- refusals ---------------------------------------------------------------------------------


def test_other_families_are_declined_in_silence() -> None:
    assert kvlinker_mha.match_kv_cache(replace(describe(), family="mla")) is None


@pytest.mark.parametrize("role", ["k", "v"])
def test_b02_a_cache_without_k_or_v_is_refused_instead_of_shrunk(role: str) -> None:
    with pytest.raises(ContractError, match=rf"buffers \['{role}'\] are missing"):
        kvlinker_mha.match_kv_cache(without(describe(), role))


def test_unknown_roles_are_refused() -> None:
    description = describe()
    buffers = {**description.buffers, "index_k": (MadeUpMemory().span(8, 8),)}

    with pytest.raises(UnsupportedKVCacheError, match=r"buffers \['index_k'\] are unknown here"):
        kvlinker_mha.match_kv_cache(replace(description, buffers=buffers))


@pytest.mark.parametrize("missing", [("k_scale", "v_scale"), ("k_scale",), ("v_scale",)])
def test_b04_scaled_values_without_their_scales_are_refused(missing: tuple[str, ...]) -> None:
    with pytest.raises(ContractError, match="the values are scaled, and their scales are not"):
        kvlinker_mha.match_kv_cache(without(describe(scaled=True), *missing))


def test_b04_scaled_drafts_without_their_scales_are_refused() -> None:
    description = without(describe(drafts=1, scaled=True), "draft_v_scale")

    with pytest.raises(ContractError, match=r"'draft_v': 1, .*'draft_v_scale': 0\}"):
        kvlinker_mha.match_kv_cache(description)


def test_scales_of_values_that_are_said_to_have_none_are_refused() -> None:
    description = with_facts(describe(scaled=True), kv_scaled=0)

    with pytest.raises(ContractError, match=r"kv_scaled is 0, but scales \['k_scale', 'v_scale'\]"):
        kvlinker_mha.match_kv_cache(description)


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("rows", [PAGE * PAGES, PAGES - 1, PAGES + 1])
@pytest.mark.parametrize("role", ["k_scale", "draft_v_scale"])
def test_b04_scales_that_are_not_one_row_for_each_page_are_refused(
    role: str, rows: int, *, head_major: bool
) -> None:
    description = describe(1, drafts=1, head_major=head_major, scaled=True)
    buffers = {**description.buffers, role: (MadeUpMemory().span(rows, 8),)}

    with pytest.raises(ContractError, match=f"has {rows} rows, expected {PAGES}, one per page"):
        kvlinker_mha.match_kv_cache(replace(description, buffers=buffers))


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize(
    ("role", "row_bytes"), [("k_scale", 16 * PAGE), ("draft_v_scale", 64 * PAGE)]
)
def test_b04_scales_of_another_size_than_the_format_says_are_refused(
    role: str, row_bytes: int, *, head_major: bool
) -> None:
    description = describe(1, drafts=1, head_major=head_major, scaled=True)
    buffers = {**description.buffers, role: (MadeUpMemory().span(PAGES, row_bytes),)}

    with pytest.raises(ContractError, match=f"rows of {row_bytes} B, expected {32 * PAGE} B"):
        kvlinker_mha.match_kv_cache(replace(description, buffers=buffers))


def test_b04_interleaved_scales_are_one_for_32_values() -> None:
    name = "mxfp8_e4m3fn_block32_interleaved"
    description = with_facts(describe(1, scaled=True), kv_format=name)
    memory = MadeUpMemory()
    scales = {f"{role}_scale": (memory.span(PAGES, 8 * PAGE),) for role in "kv"}

    with pytest.raises(ContractError, match=f"rows of {32 * PAGE} B, expected {8 * PAGE} B"):
        kvlinker_mha.match_kv_cache(description)
    check_strategy(kvlinker_mha, replace(description, buffers={**description.buffers, **scales}))


@pytest.mark.parametrize(
    "facts",
    [
        {"kv_format": "fp4_e2m1_block16_e8m0"},
        {"kv_format": "mxfp8_e4m3fn_block32_interleaved"},
        {"draft_kv_format": "fp4_e2m1_block16_e4m3", "draft_kv_layout": "token_major"},
    ],
    ids=["fp4", "mxfp8", "draft"],
)
def test_b04_blocks_of_which_no_scales_are_said_to_be_kept_are_refused(
    facts: dict[str, Fact],
) -> None:
    description = with_facts(describe(1, drafts=1), **facts)

    with pytest.raises(ContractError, match=r"kv_format is .*, whose scales are in buffers"):
        kvlinker_mha.match_kv_cache(description)


@pytest.mark.parametrize("name", ["nonsense", "fp8_e4m3fn", "fp4_e2m1_block16"])
def test_b04_values_whose_scales_are_of_an_unknown_form_are_refused_by_name(name: str) -> None:
    description = with_facts(describe(scaled=True), kv_format=name)

    with pytest.raises(UnsupportedKVCacheError, match=f"kv_format '{name}' .* known are 'fp4_e2m1"):
        kvlinker_mha.match_kv_cache(description)


@pytest.mark.parametrize("name", ["kv_layout", "kv_format", "kv_scaled"])
def test_facts_are_never_guessed(name: str) -> None:
    facts = {key: value for key, value in describe().facts.items() if key != name}

    with pytest.raises(ContractError, match=f"fact '{name}' is missing"):
        kvlinker_mha.match_kv_cache(replace(describe(), facts=facts))


@pytest.mark.parametrize(
    ("name", "value"), [("kv_layout", "block_major"), ("kv_scaled", 2), ("kv_scaled", -1)]
)
def test_unknown_values_of_facts_are_refused(name: str, value: Fact) -> None:
    with pytest.raises(UnsupportedKVCacheError, match=f"{name} {value!r} is not laid out here"):
        kvlinker_mha.match_kv_cache(with_facts(describe(), **{name: value}))


@pytest.mark.parametrize("role", ["k", "draft_v"])
def test_head_major_rows_that_are_no_pages_are_refused(role: str) -> None:
    description = describe(1, drafts=1, head_major=True)
    buffers = {**description.buffers, role: (MadeUpMemory().span(PAGES, 4097),)}

    with pytest.raises(ContractError, match="rows of 4097 B, which are no pages of 16 slots"):
        kvlinker_mha.match_kv_cache(replace(description, buffers=buffers))


def test_b08_drafts_that_the_engine_has_and_does_not_describe_are_refused() -> None:
    with pytest.raises(ContractError, match="'draft_layers' says 1, but 0 are described"):
        kvlinker_mha.match_kv_cache(with_facts(describe(), draft_layers=1))


def test_a_draft_k_without_its_v_is_refused() -> None:
    with pytest.raises(ContractError, match=r"\{'draft_k': 1, 'draft_v': 0\}"):
        kvlinker_mha.match_kv_cache(without(describe(drafts=1), "draft_v"))


def test_more_drafts_than_layers_are_refused() -> None:
    with pytest.raises(ContractError, match="4 draft layers cannot ride on 3 layers"):
        kvlinker_mha.match_kv_cache(describe(3, drafts=4))


def test_b96_page_sizes_that_differ_are_refused_with_both_numbers() -> None:
    with pytest.raises(ContractError, match="pages of 16 slots and the prefix tree pages of 64;"):
        kvlinker_mha.match_kv_cache(replace(describe(), page_size=64))


def test_trailing_windows_are_refused() -> None:
    pools = (*describe().logical_pools, LogicalPool(name="swa", page_size=PAGE, window=128))

    with pytest.raises(UnsupportedKVCacheError, match=r"logical pools \['swa'\] are unknown here"):
        kvlinker_mha.match_kv_cache(replace(describe(), logical_pools=pools))


@pytest.mark.parametrize("role", ["k", "v", "k_scale"])
def test_a_buffer_count_other_than_one_per_layer_is_refused(role: str) -> None:
    description = describe(2, scaled=True)
    buffers = {**description.buffers, role: description.buffers[role][:1]}

    with pytest.raises(ContractError, match=f"'{role}' has 1 buffers, expected 2, one per layer"):
        kvlinker_mha.match_kv_cache(replace(description, buffers=buffers))


def test_dh2_a_buffer_without_rows_is_refused() -> None:
    description = describe(1)
    empty = BufferSpan.from_tensor(torch.empty((0, 8), dtype=torch.uint8))

    with pytest.raises(ContractError, match=r"span 'v\[0\]' has no rows"):
        kvlinker_mha.match_kv_cache(
            replace(description, buffers={**description.buffers, "v": (empty,)})
        )


def test_building_refuses_what_matching_refuses() -> None:
    with pytest.raises(ContractError, match="fact 'kv_layout' is missing"):
        kvlinker_mha.build_direct_linker_pool_group(
            replace(describe(), facts={"kv_format": "bf16", "kv_scaled": 0})
        )


def test_the_plugin_states_the_api_that_it_was_written_for() -> None:
    assert kvlinker_mha.describe_plugin().api_version == 1
