"""DSA caches, from the description alone: what is claimed, laid out, left out and refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import pytest
import torch

import kvlinker_dsa
from kvlinker.description import (
    Fact,
    IndexArray,
    IndexerKind,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
    PoolKind,
    RankAxis,
    Replication,
)
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.spans import BufferSpan
from kvlinker.testing.strategies import MadeUpMemory, PageRows, check_round_trip, check_strategy

PAGE = 64
PAGES = 6
ROW_BYTES = {"bf16": 1152, "fp8_packed_656": 656, "fp8_e4m3fn": 576}
Allocate = Callable[[int, int], BufferSpan]


def tensor_span(rows: int, row_bytes: int) -> BufferSpan:
    return BufferSpan.from_tensor(torch.zeros((rows, row_bytes), dtype=torch.uint8))


def describe(
    layers: int = 4,
    *,
    owners: Collection[int] | None = None,
    drafts: int = 0,
    kv_format: str = "bf16",
    dead_indexes: bool = False,
    first_layer: int = 0,
    allocate: Allocate | None = None,
) -> KVCacheDescription:
    """Describe a DSA cache; layers that are no owners keep no index buffer, or a dead one."""
    span = allocate or MadeUpMemory().span
    owners = range(layers) if owners is None else owners
    index_bytes = PAGE * 132
    buffers = {
        "kv": tuple(span(PAGES * PAGE, ROW_BYTES[kv_format]) for _ in range(layers)),
        "index_k": tuple(
            span(PAGES if i in owners or dead_indexes else 0, index_bytes) for i in range(layers)
        ),
    }
    if drafts:
        rows = PAGES * PAGE
        buffers["draft_kv"] = tuple(span(rows, ROW_BYTES[kv_format]) for _ in range(drafts))
        buffers["draft_index_k"] = tuple(span(PAGES, index_bytes) for _ in range(drafts))
    return KVCacheDescription(
        family="dsa",
        page_size=PAGE,
        buffers=buffers,
        layers=tuple(
            LayerFacts(
                layer=i,
                global_layer=first_layer + i,
                indexer=IndexerKind.OWN if i in owners else IndexerKind.SHARED,
            )
            for i in range(layers)
        ),
        logical_pools=(LogicalPool(name="kv", page_size=PAGE),),
        facts={"kv_format": kv_format, "index_format": "fp8_e4m3fn_fp32_scale"},
    )


def with_facts(description: KVCacheDescription, **facts: Fact) -> KVCacheDescription:
    return replace(description, facts={**description.facts, **facts})


def with_buffers(
    description: KVCacheDescription, **buffers: tuple[BufferSpan, ...]
) -> KVCacheDescription:
    return replace(description, buffers={**description.buffers, **buffers})


def without(description: KVCacheDescription, role: str) -> KVCacheDescription:
    return replace(description, buffers={k: v for k, v in description.buffers.items() if k != role})


# ---- the layout -------------------------------------------------------------------------------


def test_kv_rows_are_slots_and_index_rows_are_pages() -> None:
    group = check_strategy(kvlinker_dsa, describe(3))

    kv, indexer = group.entries
    assert (kv.name, kv.indices_from_pool, kv.rows_are_pages) == ("kv", "kv", False)
    assert (indexer.name, indexer.indices_from_pool, indexer.rows_are_pages) == (
        "indexer",
        "kv",
        True,
    )
    assert kv.layer_mapping == indexer.layer_mapping == {0: (0,), 1: (1,), 2: (2,)}
    assert (kv.page_bytes, indexer.page_bytes) == (3 * 64 * 1152, 3 * 8448)
    assert (kv.value_format, indexer.value_format) == ("bf16", "fp8_e4m3fn_fp32_scale")
    assert (group.layout, group.page_size, group.num_layers) == ("dsa/1", 64, 3)


@pytest.mark.parametrize(
    ("layers", "owners", "kv_format", "kv_bytes", "index_bytes"),
    [
        # config.json of deepseek-ai/DeepSeek-V3.2: 61 layers, kv_lora_rank 512, qk_rope_head_dim 64,
        # index_head_dim 128.
        (61, range(61), "bf16", 70_272, 8_052),
        (61, range(61), "fp8_packed_656", 40_016, 8_052),
        (61, range(61), "fp8_e4m3fn", 35_136, 8_052),
        # config.json of zai-org/GLM-5: 78 layers, each with an indexer.
        (78, range(78), "bf16", 89_856, 10_296),
        (78, range(78), "fp8_packed_656", 51_168, 10_296),
        # config.json of zai-org/GLM-5.2: 78 layers; layers 0, 1, 2 and then every fourth own an indexer.
        (78, [0, 1, *range(2, 78, 4)], "bf16", 89_856, 2_772),
        (78, [0, 1, *range(2, 78, 4)], "fp8_packed_656", 51_168, 2_772),
    ],
    ids=[
        "V3.2-bf16",
        "V3.2-fp8-packed",
        "V3.2-fp8-raw",
        "GLM-5-bf16",
        "GLM-5-fp8-packed",
        "GLM-5.2-bf16",
        "GLM-5.2-fp8-packed",
    ],
)
def test_bytes_per_token_of_published_models(
    layers: int, owners: Collection[int], kv_format: str, kv_bytes: int, index_bytes: int
) -> None:
    description = describe(layers, owners=owners, kv_format=kv_format)

    group = check_strategy(kvlinker_dsa, description)

    sizes = {entry.name: entry.page_bytes for entry in group.entries}
    assert sizes == {"kv": kv_bytes * PAGE, "indexer": index_bytes * PAGE}


def test_w07_a_layer_without_an_index_buffer_is_left_out_and_the_group_is_valid() -> None:
    description = describe(4, owners=[0, 2])

    group = check_strategy(kvlinker_dsa, description)

    assert group.entry_map["indexer"].layer_mapping == {0: (0,), 2: (1,)}
    assert group.entry_map["kv"].layer_mapping.keys() == {0, 1, 2, 3}
    match = kvlinker_dsa.match_kv_cache(description)
    assert match is not None
    assert match.omitted == {
        "index_k[1]": "layer 1 selects by another layer's index; it keeps no buffer",
        "index_k[3]": "layer 3 selects by another layer's index; it keeps no buffer",
    }


def test_dh2_an_empty_tensor_as_index_buffer_divides_by_nothing() -> None:
    description = describe(2, owners=[0], allocate=tensor_span)
    empty = BufferSpan.from_tensor(torch.empty((0, 8), dtype=torch.uint8))

    group = check_strategy(
        kvlinker_dsa,
        with_buffers(description, index_k=(description.buffers["index_k"][0], empty)),
    )

    assert group.entry_map["indexer"].layer_mapping == {0: (0,)}


def test_a_dead_index_buffer_is_neither_stored_nor_restored() -> None:
    description = describe(3, owners=[0, 2], dead_indexes=True)

    group = check_strategy(kvlinker_dsa, description)

    assert [span.label for span in group.entry_map["indexer"].spans] == ["index_k[0]", "index_k[2]"]
    match = kvlinker_dsa.match_kv_cache(description)
    assert match is not None
    assert match.omitted == {
        "index_k[1]": "layer 1 selects by another layer's index; its own buffer is never read"
    }


def test_dead_and_absent_index_buffers_give_one_layout() -> None:
    dead = check_strategy(kvlinker_dsa, describe(3, owners=[0, 2], dead_indexes=True))
    absent = check_strategy(kvlinker_dsa, describe(3, owners=[0, 2]))

    assert dead.fingerprint == absent.fingerprint


def test_a_layer_without_any_indexer_is_left_out() -> None:
    description = describe(2, owners=[0])
    layers = (description.layers[0], replace(description.layers[1], indexer=IndexerKind.NONE))
    description = replace(description, layers=layers)

    match = kvlinker_dsa.match_kv_cache(description)

    assert match is not None
    assert match.omitted == {"index_k[1]": "layer 1 has no indexer"}


def test_a_stage_whose_layers_all_use_another_stages_index_has_no_indexer_entry() -> None:
    description = describe(3, owners=[], first_layer=3)

    group = check_strategy(kvlinker_dsa, description)

    assert [entry.name for entry in group.entries] == ["kv"]
    assert group.layer_range == (3, 6)


def test_drafts_ride_on_the_first_layers_with_kv_and_index_alike() -> None:
    group = check_strategy(kvlinker_dsa, describe(3, drafts=2))

    expected = {0: (0, 3), 1: (1, 4), 2: (2,)}
    assert group.entry_map["kv"].layer_mapping == expected
    assert group.entry_map["indexer"].layer_mapping == expected


def test_w24_a_draft_index_rides_on_a_layer_that_owns_none() -> None:
    group = check_strategy(kvlinker_dsa, describe(4, owners=[0, 3], drafts=2))

    indexer = group.entry_map["indexer"]
    assert indexer.layer_mapping == {0: (0, 2), 1: (3,), 3: (1,)}
    assert [span.label for span in indexer.spans] == [
        "index_k[0]",
        "index_k[3]",
        "draft_index_k[0]",
        "draft_index_k[1]",
    ]


def test_a_draft_without_an_index_buffer_keeps_its_kv() -> None:
    description = describe(3, drafts=2)
    indexes = description.buffers["draft_index_k"]
    empty = BufferSpan(base_ptr=0, rows=0, row_bytes=8448, row_stride=8448)
    description = with_buffers(description, draft_index_k=(empty, indexes[1]))

    group = check_strategy(kvlinker_dsa, description)

    assert group.entry_map["kv"].layer_mapping == {0: (0, 3), 1: (1, 4), 2: (2,)}
    assert group.entry_map["indexer"].layer_mapping == {0: (0,), 1: (1, 3), 2: (2,)}
    match = kvlinker_dsa.match_kv_cache(description)
    assert match is not None
    assert match.omitted == {"draft_index_k[0]": "draft layer 0 keeps no index buffer"}


def test_drafts_and_formats_change_the_layout_and_addresses_do_not() -> None:
    fingerprints = {
        check_strategy(kvlinker_dsa, description).fingerprint
        for description in (
            describe(),
            describe(drafts=1),
            describe(kv_format="fp8_e4m3fn"),
            describe(owners=[0]),
        )
    }

    assert len(fingerprints) == 4
    elsewhere = MadeUpMemory()
    elsewhere.span(1, 1 << 20)
    moved = check_strategy(kvlinker_dsa, describe(allocate=elsewhere.span))
    assert moved.fingerprint in fingerprints


def test_entries_take_index_map_and_replication_from_the_description() -> None:
    def shifted(slots: IndexArray) -> IndexArray:
        return slots + PAGE

    roles = dict.fromkeys(("kv", "index_k"), frozenset[str]())
    description = replace(
        describe(2),
        index_maps={"kv": shifted},
        replication=Replication(axes=(RankAxis(name="tp", rank=1, size=2),), sharded_over=roles),
    )

    group = check_strategy(kvlinker_dsa, description)

    assert group.rank_replicated
    for entry in group.entries:
        assert entry.translate_indices([0, 1]).tolist() == [64, 65]
        assert (entry.rank_axes, entry.is_writer) == ((), False)


# ---- bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", ROW_BYTES)
@pytest.mark.parametrize(
    ("owners", "drafts", "dead"), [([0, 1, 2], 0, False), ([0, 2], 2, True), ([1], 3, False)]
)
def test_b08_every_byte_of_a_page_comes_back_in_other_pages_drafts_included(
    *, kv_format: str, owners: list[int], drafts: int, dead: bool
) -> None:
    description = describe(
        3,
        owners=owners,
        drafts=drafts,
        kv_format=kv_format,
        dead_indexes=dead,
        allocate=tensor_span,
    )
    page_rows = {"kv": PageRows("kv", PAGE), "index_k": PageRows("kv", 1)}
    if drafts:
        page_rows |= {"draft_kv": PageRows("kv", PAGE), "draft_index_k": PageRows("kv", 1)}

    group = check_strategy(kvlinker_dsa, description)

    check_round_trip(
        group,
        description,
        page_rows,
        {"kv": {1: 4, 5: 0, 2: 2}},
        omitted=["index_k[1]"] if dead else [],
    )


# ---- refusals ---------------------------------------------------------------------------------


def test_other_families_are_declined_in_silence() -> None:
    assert kvlinker_dsa.match_kv_cache(replace(describe(), family="mla")) is None


@pytest.mark.parametrize("role", ["kv", "index_k"])
def test_b02_a_cache_without_one_of_its_buffers_is_refused_instead_of_shrunk(role: str) -> None:
    with pytest.raises(ContractError, match=rf"buffers \['{role}'\] are missing"):
        kvlinker_dsa.match_kv_cache(without(describe(), role))


def test_b02_recurrent_states_beside_kv_and_index_are_not_dropped() -> None:
    state = (MadeUpMemory().span(8, 4096),)

    with pytest.raises(UnsupportedKVCacheError, match=r"buffers \['mamba_state'\] are unknown"):
        kvlinker_dsa.match_kv_cache(with_buffers(describe(), mamba_state=state))


def test_b08_drafts_that_the_engine_has_and_does_not_describe_are_refused() -> None:
    with pytest.raises(ContractError, match="'draft_layers' says 1, but 0 are described"):
        kvlinker_dsa.match_kv_cache(with_facts(describe(), draft_layers=1))


def test_stated_and_described_drafts_that_agree_are_taken() -> None:
    description = with_facts(describe(drafts=1), draft_layers=1)

    assert kvlinker_dsa.match_kv_cache(description) is not None


def test_draft_kv_and_draft_index_must_agree_before_anything_is_left_out() -> None:
    description = describe(drafts=2)
    fewer = description.buffers["draft_index_k"][:1]

    with pytest.raises(ContractError, match=r"\{'draft_kv': 2, 'draft_index_k': 1\}"):
        kvlinker_dsa.match_kv_cache(with_buffers(description, draft_index_k=fewer))
    with pytest.raises(ContractError, match=r"\{'draft_kv': 2, 'draft_index_k': 0\}"):
        kvlinker_dsa.match_kv_cache(without(description, "draft_index_k"))
    with pytest.raises(ContractError, match=r"\{'draft_kv': 0, 'draft_index_k': 2\}"):
        kvlinker_dsa.match_kv_cache(without(description, "draft_kv"))


def test_more_drafts_than_layers_are_refused() -> None:
    with pytest.raises(ContractError, match="3 draft layers cannot ride on 2 layers"):
        kvlinker_dsa.match_kv_cache(describe(2, drafts=3))


@pytest.mark.parametrize(("pool_page", "tree_page"), [(64, 128), (64, 1)])
def test_b96_page_sizes_that_differ_are_refused_with_both_numbers(
    pool_page: int, tree_page: int
) -> None:
    description = replace(describe(), page_size=tree_page)

    with pytest.raises(
        ContractError, match=f"pages of {pool_page} slots and the prefix tree pages of {tree_page};"
    ):
        kvlinker_dsa.match_kv_cache(description)


@pytest.mark.parametrize(
    ("pools", "error", "message"),
    [
        ((), ContractError, "no logical pool 'kv'"),
        (
            (LogicalPool(name="kv", page_size=64), LogicalPool(name="swa", page_size=64)),
            UnsupportedKVCacheError,
            r"logical pools \['swa'\] are unknown",
        ),
        (
            (LogicalPool(name="kv", kind=PoolKind.SLOT, page_size=1),),
            UnsupportedKVCacheError,
            "'kv' must be paged, got slot",
        ),
    ],
)
def test_other_index_spaces_are_refused(
    pools: tuple[LogicalPool, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kvlinker_dsa.match_kv_cache(replace(describe(), logical_pools=pools))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"kv_format": "fp8_e4m3fn"}, r"'kv\[0\]' has rows of 1152 B, expected 576 B"),
        ({"kv_format": "fp8_packed_656"}, r"'kv\[0\]' has rows of 1152 B, expected 656 B"),
        ({"kv_format": "int4"}, "kv_format 'int4' is not laid out here; known are 'bf16'"),
        ({"index_format": "bf16"}, "index_format 'bf16' is not laid out here"),
        ({"kv_format": 8}, "fact 'kv_format' must be a non-empty text, got 8"),
    ],
)
def test_formats_that_the_rows_are_not_of_are_refused(
    facts: Mapping[str, Fact], message: str
) -> None:
    with pytest.raises((ContractError, UnsupportedKVCacheError), match=message):
        kvlinker_dsa.match_kv_cache(with_facts(describe(), **facts))


@pytest.mark.parametrize("name", ["kv_format", "index_format"])
def test_formats_are_never_guessed(name: str) -> None:
    facts = {key: value for key, value in describe().facts.items() if key != name}

    with pytest.raises(ContractError, match=f"fact '{name}' is missing"):
        kvlinker_dsa.match_kv_cache(replace(describe(), facts=facts))


@pytest.mark.parametrize("row_bytes", [8192, 8448 * 2])
@pytest.mark.parametrize("role", ["index_k", "draft_index_k"])
def test_an_index_page_of_other_bytes_is_refused(role: str, row_bytes: int) -> None:
    description = describe(1, drafts=1)
    wrong = (MadeUpMemory().span(PAGES, row_bytes),)

    with pytest.raises(ContractError, match=f"rows of {row_bytes} B, expected 8448 B"):
        kvlinker_dsa.match_kv_cache(with_buffers(description, **{role: wrong}))


def test_a_draft_in_another_format_than_the_target_is_refused() -> None:
    description = with_buffers(
        describe(1, drafts=1), draft_kv=(MadeUpMemory().span(PAGES * PAGE, 656),)
    )

    with pytest.raises(ContractError, match=r"'draft_kv\[0\]' has rows of 656 B, expected 1152 B"):
        kvlinker_dsa.match_kv_cache(description)


def test_a_layer_that_owns_an_indexer_needs_its_buffer() -> None:
    description = describe(2, owners=[0])
    layers = tuple(replace(facts, indexer=IndexerKind.OWN) for facts in description.layers)

    with pytest.raises(ContractError, match=r"layer 1 owns an indexer, but span 'index_k\[1\]'"):
        kvlinker_dsa.match_kv_cache(replace(description, layers=layers))


def test_an_index_buffer_that_no_layer_is_said_to_use_is_refused() -> None:
    description = describe(1)
    layers = (replace(description.layers[0], indexer=IndexerKind.NONE),)

    with pytest.raises(ContractError, match=r"layer 0 has no indexer, but .* has 6 rows"):
        kvlinker_dsa.match_kv_cache(replace(description, layers=layers))


@pytest.mark.parametrize(("role", "count"), [("kv", 3), ("index_k", 3), ("kv", 5), ("index_k", 5)])
def test_a_buffer_count_other_than_one_per_layer_is_refused(role: str, count: int) -> None:
    spans = describe(5).buffers[role][:count]

    with pytest.raises(ContractError, match=f"'{role}' has {count} buffers"):
        kvlinker_dsa.match_kv_cache(with_buffers(describe(4), **{role: spans}))


def test_a_kv_buffer_without_rows_is_refused() -> None:
    empty = BufferSpan(base_ptr=0, rows=0, row_bytes=1152, row_stride=1152)

    with pytest.raises(ContractError, match=r"span 'kv\[0\]' has no rows"):
        kvlinker_dsa.match_kv_cache(with_buffers(describe(1), kv=(empty,)))


def test_building_refuses_what_matching_refuses() -> None:
    with pytest.raises(ContractError, match=r"\['index_k'\] are missing"):
        kvlinker_dsa.build_direct_linker_pool_group(without(describe(), "index_k"))


def test_buffers_that_ranks_hold_differently_are_not_put_in_one_pool() -> None:
    replication = Replication(
        axes=(RankAxis(name="tp", rank=0, size=2),), sharded_over={"kv": frozenset()}
    )

    with pytest.raises(ContractError, match=r"pool 'kv': its buffers must be sharded alike"):
        kvlinker_dsa.build_direct_linker_pool_group(
            replace(describe(drafts=1), replication=replication)
        )


def test_the_plugin_states_the_api_that_it_was_written_for() -> None:
    assert kvlinker_dsa.describe_plugin().api_version == 1


def folded(tokens: int) -> KVCacheDescription:
    """Describe a cache in which some neighbouring tokens share an index key."""
    cache = describe()
    row_bytes = PAGE // tokens * 132
    keys = [
        replace(span, row_bytes=row_bytes, row_stride=row_bytes)
        for span in cache.buffers["index_k"]
    ]
    buffers = {**cache.buffers, "index_k": tuple(keys)}
    return with_facts(replace(cache, buffers=buffers), index_kpool=tokens)


def test_g5_how_many_tokens_share_an_index_key_is_in_the_fingerprint() -> None:
    one, other = map(kvlinker_dsa.build_direct_linker_pool_group, (describe(), folded(4)))

    assert one.entry_map["indexer"].page_bytes == 4 * other.entry_map["indexer"].page_bytes
    assert "a key for 4 tokens" in other.entry_map["indexer"].value_format
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize("tokens", [0, 3, 128])
def test_pages_without_whole_groups_of_an_index_key_are_refused(tokens: int) -> None:
    with pytest.raises(ContractError, match=f"'index_kpool' is {tokens}, of which a page of 64"):
        kvlinker_dsa.match_kv_cache(with_facts(describe(), index_kpool=tokens))


def test_index_keys_of_one_token_each_that_are_stated_to_be_of_several_are_refused() -> None:
    with pytest.raises(ContractError, match="rows of 8448 B, expected 2112 B"):
        kvlinker_dsa.match_kv_cache(with_facts(describe(), index_kpool=4))


def test_index_keys_of_several_tokens_that_are_not_stated_are_refused() -> None:
    cache = folded(4)
    facts = {name: value for name, value in cache.facts.items() if name != "index_kpool"}

    with pytest.raises(ContractError, match="rows of 2112 B, expected 8448 B"):
        kvlinker_dsa.match_kv_cache(replace(cache, facts=facts))
