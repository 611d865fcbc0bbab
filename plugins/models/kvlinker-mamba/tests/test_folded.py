"""Index keys of compressed sparse attention are laid out page by page beside states, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hybrid_examples import Hybrid

import kvlinker_mamba
from kvlinker.description import Fact, KVCacheDescription
from kvlinker.errors import ContractError, KVLinkerError
from kvlinker.testing.strategies import MadeUpMemory


def described(facts: Mapping[str, Fact] = {}, *, drafts: int = 0) -> KVCacheDescription:
    return Hybrid(pages="qsa", drafts=drafts, facts=facts).describe(MadeUpMemory().span)


def test_index_keys_of_a_page_are_loaded_with_their_layer_at_the_slots_of_kv() -> None:
    cache = described()
    entry = kvlinker_mamba.build_direct_linker_pool_group(cache).entry_map["indexer"]

    ranges = entry.layer_plan(entry.prepare_locations(range(2 * 16, 3 * 16)), 4)

    assert entry.indices_from_pool == "kv"
    assert ranges is not None
    assert ranges.expand().address.tolist() == [cache.buffers["index_k"][1].base_ptr + 2 * 64]
    assert ranges.expand().size.tolist() == [64]


def test_g5_how_many_tokens_share_a_key_is_in_the_fingerprint() -> None:
    one, other = map(
        kvlinker_mamba.build_direct_linker_pool_group,
        (described(), described({"index_kpool": 8, "index_values": 16})),
    )

    assert one.entry_map["indexer"].page_bytes == other.entry_map["indexer"].page_bytes
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"index_kpool": 3}, "'index_kpool' is 3, of which a page of 16 slots has no whole number"),
        ({"index_kpool": 0}, "'index_kpool' is 0, of which"),
        ({"index_ratio": 4}, r"facts \{'index_ratio': 4\} are unknown"),
        ({"index_values": 4}, "64 B"),
        ({"index_values": 0}, "'index_values' is 0"),
        ({"index_format": "fp4"}, "fp4"),
        ({"index_scale": "fp32"}, "index_scale"),
    ],
    ids=["kpool", "no_kpool", "former_name", "values", "no_values", "format", "unknown_fact"],
)
def test_index_keys_of_another_form_are_refused(facts: dict[str, Fact], reason: str) -> None:
    with pytest.raises(KVLinkerError, match=reason):
        kvlinker_mamba.match_kv_cache(described(facts))


def test_how_many_tokens_share_a_key_is_never_guessed() -> None:
    cache = described()
    facts = {name: value for name, value in cache.facts.items() if name != "index_kpool"}

    with pytest.raises(ContractError, match="fact 'index_kpool' is missing"):
        kvlinker_mamba.match_kv_cache(replace(cache, facts=facts))


@pytest.mark.parametrize("role", ["index_k", "draft_index_k"])
def test_b60_a_cache_without_its_index_keys_is_refused(role: str) -> None:
    cache = described(drafts=1)
    rest = {name: spans for name, spans in cache.buffers.items() if name != role}

    with pytest.raises(ContractError, match=role):
        kvlinker_mamba.match_kv_cache(replace(cache, buffers=rest))
