"""Index keys beside K and V are laid out page by page, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from indexed_examples import PAGE, PAGES, Indexed

import kvlinker_mha
from kvlinker.description import Fact, IndexerKind, KVCacheDescription
from kvlinker.errors import ContractError, KVLinkerError, UnsupportedKVCacheError
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan
from kvlinker.testing.strategies import MadeUpMemory, check_strategy

OWN_DRAFTS: dict[str, Fact] = {"draft_kv_layout": "token_major", "draft_kv_format": "bf16"}


def described(cache: Indexed) -> KVCacheDescription:
    return cache.describe(MadeUpMemory().span)


def laid_out(cache: Indexed) -> DevicePoolGroup:
    return check_strategy(kvlinker_mha, described(cache))


def relabelled(spans: Sequence[BufferSpan], role: str) -> tuple[BufferSpan, ...]:
    return tuple(span.relabel(f"{role}[{layer}]") for layer, span in enumerate(spans))


# ---- the layout -------------------------------------------------------------------------------


def test_index_keys_are_loaded_with_the_layer_that_selects_by_them() -> None:
    cache = described(Indexed())
    entries = check_strategy(kvlinker_mha, cache).entry_map

    assert {name: dict(entry.layer_mapping) for name, entry in entries.items()} == {
        "kv": {0: (0,), 1: (1,), 2: (2,), 3: (3,)},
        "indexer": {1: (0,), 2: (1,), 3: (2,)},
        "indexer_v": {2: (0,)},
    }
    keys = entries["indexer"]
    ranges = keys.layer_plan(keys.prepare_locations(range(5 * PAGE, 6 * PAGE)), 2)
    assert ranges is not None
    row = PAGE * 32 * 2
    assert ranges.expand().address.tolist() == [cache.buffers["index_k"][2].base_ptr + 5 * row]
    assert ranges.expand().size.tolist() == [row]


def test_buffers_that_layers_do_not_keep_are_left_out_by_name() -> None:
    match = kvlinker_mha.match_kv_cache(described(Indexed()))

    assert match is not None
    assert set(match.omitted) == {"index_k[0]", "index_v[0]", "index_v[1]", "index_v[3]"}


def test_scales_of_nvfp4_are_entries_of_their_own() -> None:
    pages = {entry.name: entry.page_bytes for entry in laid_out(Indexed(packed=True)).entries}

    assert pages == {
        "kv": 4 * 2 * PAGE * 32,
        "kv_scale": 4 * 2 * PAGE * 4,
        "indexer": 3 * PAGE * 32 // 2,
        "indexer_scale": 3 * PAGE * 32 // 16,
    }


def test_drafts_of_another_format_are_an_entry_of_their_own() -> None:
    group = laid_out(Indexed(packed=True, drafts=2, draft_facts=OWN_DRAFTS))

    draft = group.entry_map["draft"]
    assert (draft.value_format, draft.rows_are_pages) == ("bf16", False)
    assert dict(draft.layer_mapping) == {0: (0,), 1: (1,)}
    assert draft.page_bytes == 2 * 2 * PAGE * 32
    assert group.entry_map["kv"].page_bytes == 4 * 2 * PAGE * 32


def test_drafts_of_the_targets_format_ride_on_its_entry() -> None:
    group = laid_out(Indexed(drafts=1))

    assert set(group.entry_map) == {"kv", "indexer", "indexer_v"}
    assert group.entry_map["kv"].page_bytes == 5 * 2 * PAGE * 32


@pytest.mark.parametrize(
    "other",
    [
        Indexed(facts={"index_format": "fp16"}),
        Indexed(indexed=(0, 2, 3)),
        Indexed(with_values=(3,)),
        Indexed(with_values=()),
    ],
    ids=["format", "layers", "layers_of_values", "no_values"],
)
def test_g5_how_index_keys_are_kept_is_in_the_fingerprint(other: Indexed) -> None:
    assert laid_out(other).fingerprint != laid_out(Indexed()).fingerprint


# ---- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (Indexed(facts={"index_format": "fp8_e4m3fn"}), "rows of 1024 B, expected 512 B"),
        (Indexed(facts={"index_format": "int8"}), "index_format 'int8' is not laid out here"),
        (Indexed(facts={"index_values": 64}), "rows of 1024 B, expected 2048 B"),
        (Indexed(facts={"index_values": 0}), "'index_values' is 0"),
        (Indexed(facts={"index_kpool": 4}), r"facts \{'index_kpool': 4\} are unknown"),
        (
            Indexed(packed=True, facts={"index_format": "bf16"}),
            r"buffers \['index_k_scale'\] are unknown here",
        ),
        (
            Indexed(facts={"index_format": "fp4_e2m1_block16_e4m3"}),
            r"buffers \['index_k_scale'\] are missing",
        ),
    ],
    ids=["bytes", "format", "values", "no_values", "fact", "plain", "scales"],
)
def test_index_keys_of_another_form_are_refused(cache: Indexed, reason: str) -> None:
    with pytest.raises(KVLinkerError, match=reason):
        kvlinker_mha.match_kv_cache(described(cache))


@pytest.mark.parametrize("name", ["index_format", "index_values", "index_has_values"])
def test_how_index_keys_are_kept_is_never_guessed(name: str) -> None:
    cache = described(Indexed())
    facts = {key: value for key, value in cache.facts.items() if key != name}

    with pytest.raises(ContractError, match=f"fact '{name}' is missing"):
        kvlinker_mha.match_kv_cache(replace(cache, facts=facts))


@pytest.mark.parametrize(
    ("role", "packed"), [("index_k", False), ("index_v", False), ("index_k_scale", True)]
)
def test_b60_a_cache_without_a_part_of_its_index_is_refused(role: str, *, packed: bool) -> None:
    cache = described(Indexed(packed=packed))
    rest = {name: spans for name, spans in cache.buffers.items() if name != role}

    with pytest.raises(ContractError, match=rf"buffers \['{role}'\] are missing"):
        kvlinker_mha.match_kv_cache(replace(cache, buffers=rest))


def _none(span: BufferSpan) -> BufferSpan:
    return replace(span, base_ptr=0, rows=0, region=None)


@pytest.mark.parametrize(
    ("role", "layer", "change", "reason"),
    [
        ("index_k", 2, _none, r"layers \[1, 2, 3\] are said .* 'index_k' has rows for \[1, 3\]"),
        (
            "index_k",
            1,
            lambda span: replace(span, rows=PAGES - 1),
            r"'index_k\[1\]' has 5 rows, expected 6",
        ),
        (
            "index_v",
            2,
            lambda span: replace(span, rows=PAGES - 1),
            r"'index_v\[2\]' has 5 rows, expected 6",
        ),
    ],
    ids=["none", "fewer_pages", "fewer_pages_of_values"],
)
def test_index_buffers_that_are_not_whole_are_refused(
    role: str, layer: int, change: Callable[[BufferSpan], BufferSpan], reason: str
) -> None:
    cache = described(Indexed())
    spans = list(relabelled(cache.buffers[role], role))
    spans[layer] = change(spans[layer])

    with pytest.raises(ContractError, match=reason):
        kvlinker_mha.match_kv_cache(replace(cache, buffers={**cache.buffers, role: tuple(spans)}))


def test_index_buffers_of_layers_without_an_indexer_are_refused() -> None:
    cache = described(Indexed())
    layers = [replace(facts, indexer=IndexerKind.NONE) for facts in cache.layers[:2]]

    with pytest.raises(ContractError, match=r"layers \[2, 3\] are said .* rows for \[1, 2, 3\]"):
        kvlinker_mha.match_kv_cache(replace(cache, layers=(*layers, *cache.layers[2:])))


def test_index_buffers_in_another_number_than_layers_are_refused() -> None:
    cache = described(Indexed())
    buffers = {**cache.buffers, "index_k": cache.buffers["index_k"][1:]}

    with pytest.raises(ContractError, match="'index_k' has 3 buffers for 4 layers"):
        kvlinker_mha.match_kv_cache(replace(cache, buffers=buffers))


def test_layers_that_share_an_index_are_refused() -> None:
    cache = described(Indexed())
    shared = replace(cache.layers[3], indexer=IndexerKind.SHARED)

    with pytest.raises(UnsupportedKVCacheError, match=r"layers \[3\] select by another layer's"):
        kvlinker_mha.match_kv_cache(replace(cache, layers=(*cache.layers[:3], shared)))


@pytest.mark.parametrize("role", ["index_v", "index_k_scale"])
def test_parts_that_no_index_is_said_to_have_are_refused(role: str) -> None:
    cache = described(Indexed(with_values=()))
    buffers = {**cache.buffers, role: relabelled(cache.buffers["index_k"], role)}

    with pytest.raises(UnsupportedKVCacheError, match=rf"buffers \['{role}'\] are unknown here"):
        kvlinker_mha.match_kv_cache(replace(cache, buffers=buffers))


def test_values_beside_scaled_index_keys_are_refused() -> None:
    cache = described(Indexed(packed=True, facts={"index_has_values": 1}))
    buffers = {**cache.buffers, "index_v": relabelled(cache.buffers["index_k"], "index_v")}

    with pytest.raises(UnsupportedKVCacheError, match="no scales of values are known"):
        kvlinker_mha.match_kv_cache(replace(cache, buffers=buffers))


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (
            Indexed(drafts=1, draft_facts={"draft_kv_format": "bf16"}),
            "'draft_kv_layout' is missing",
        ),
        (
            Indexed(drafts=1, draft_facts={"draft_kv_layout": "token_major"}),
            "'draft_kv_format' is missing",
        ),
        (Indexed(packed=True, drafts=1, facts=OWN_DRAFTS), "draft_k_scale"),
        (Indexed(drafts=5, draft_facts=OWN_DRAFTS), "5 draft layers cannot ride on 4"),
    ],
    ids=["layout", "format", "scaled", "too_many"],
)
def test_drafts_of_a_format_of_their_own_that_are_not_so_are_refused(
    cache: Indexed, reason: str
) -> None:
    with pytest.raises(ContractError, match=reason):
        kvlinker_mha.match_kv_cache(described(cache))


def test_drafts_in_pages_of_another_size_are_refused() -> None:
    facts = {**OWN_DRAFTS, "draft_kv_layout": "head_major"}
    cache = described(Indexed(drafts=1, draft_facts=facts))
    memory = MadeUpMemory()
    buffers = {**cache.buffers, "draft_k": (memory.span(PAGES, 17),)}

    with pytest.raises(ContractError, match=r"rows of 17 B, which are no pages of 16 slots"):
        kvlinker_mha.match_kv_cache(replace(cache, buffers=buffers))
