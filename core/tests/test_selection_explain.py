"""An explanation says which strategy takes a cache, why the others do not, and what a token costs."""

from __future__ import annotations

from types import ModuleType

import pytest

from kvlinker.description import KVCacheDescription, LayerFacts, LogicalPool, PoolKind
from kvlinker.description_json import description_from_json, description_to_json
from kvlinker.discovery import PluginRegistry, load_modules
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import PluginNotFoundError
from kvlinker.explanation import PoolExplanation, explain
from kvlinker.hookspecs import PluginInfo, StrategyMatch, hookimpl
from kvlinker.pools import DevicePoolGroup
from kvlinker.selection import Outcome
from kvlinker.testing.strategies import MadeUpMemory

PAGE = 64


def hybrid() -> KVCacheDescription:
    """Describe K and V, a sliding window, one state, and a dead buffer, of two layers."""
    memory = MadeUpMemory()
    return KVCacheDescription(
        family="hybrid",
        page_size=PAGE,
        buffers={
            "k": (memory.span(1024, 16), memory.span(1024, 16)),
            "window": (memory.span(16, 640),),
            "state": (memory.span(8, 5000),),
            "dead": (memory.span(16, 8),),
        },
        layers=tuple(LayerFacts(layer=i, global_layer=i) for i in range(2)),
        logical_pools=(
            LogicalPool(name="kv", page_size=PAGE),
            LogicalPool(name="swa", page_size=PAGE, window=128),
            LogicalPool(name="mamba", kind=PoolKind.SLOT, page_size=1),
        ),
    )


def plugin(*, match: bool = True, forgets: bool = False) -> ModuleType:
    module = ModuleType("fake_hybrid")

    @hookimpl
    def describe_plugin() -> PluginInfo:
        return PluginInfo(api_version=1, summary="a fake")

    @hookimpl
    def match_kv_cache(description: KVCacheDescription) -> StrategyMatch | None:
        omitted = {"dead[0]": "never read"}
        return (
            StrategyMatch(buffers=frozenset(description.buffers), omitted=omitted)
            if match
            else None
        )

    @hookimpl
    def build_direct_linker_pool_group(description: KVCacheDescription) -> DevicePoolGroup:
        sources = {"k": ("kv", False), "window": ("swa", True), "state": ("mamba", True)}
        entries = [
            DevicePoolEntry(
                name=role,
                indices_from_pool=source,
                components=[description.buffers[role]],
                layer_mapping={i: i for i in range(len(description.buffers[role]))},
                page_size=1 if source == "mamba" else PAGE,
                rows_are_pages=rows_are_pages,
            )
            for role, (source, rows_are_pages) in sources.items()
            if not (forgets and role == "state")
        ]
        return DevicePoolGroup(entries, 2, PAGE, layout="hybrid/1")

    vars(module).update(
        describe_plugin=describe_plugin,
        match_kv_cache=match_kv_cache,
        build_direct_linker_pool_group=build_direct_linker_pool_group,
    )
    return module


def registry() -> PluginRegistry:
    return load_modules(models={"hybrid": plugin(), "other": plugin(match=False)})


def test_s3_an_explanation_names_the_winner_and_every_other_verdict() -> None:
    found = explain(hybrid(), registry())

    assert (found.winner, found.problem) == ("hybrid", "")
    assert [(v.record.name, v.outcome) for v in found.verdicts] == [
        ("hybrid", Outcome.SELECTED),
        ("other", Outcome.DECLINED),
    ]
    assert found.omitted == {"dead[0]": "never read"}
    assert len(bytes.fromhex(found.fingerprint)) == 16


def test_an_explanation_has_the_bytes_of_each_pool() -> None:
    pools = {pool.name: pool for pool in explain(hybrid(), registry()).pools}

    k, window, state = pools["k"], pools["window"], pools["state"]
    assert (k.page_bytes, k.bytes_per_token, k.spans, k.layers) == (2048, 32.0, 2, 2)
    assert (window.page_bytes, window.bytes_per_token, window.window) == (640, 10.0, 128)
    assert (state.page_size, state.page_bytes, state.holds_states) == (1, 5000, True)
    assert (k.indices_from_pool, k.objects_per_page, k.window) == ("kv", 1, None)


@pytest.mark.parametrize(
    ("tokens", "k", "window", "state"),
    [
        (0, 0, 0, 0),
        (63, 0, 0, 5000),
        (64, 2048, 640, 5000),
        (191, 2 * 2048, 2 * 640, 5000),
        (32768, 512 * 2048, 2 * 640, 5000),
    ],
)
def test_a_restored_prefix_moves_whole_pages_and_of_a_window_the_last_ones(
    tokens: int, k: int, window: int, state: int
) -> None:
    found = explain(hybrid(), registry())

    assert [pool.restored_bytes(tokens) for pool in found.pools] == [k, window, state]
    assert found.restored_bytes(tokens) == k + window + state


def test_only_pools_that_grow_with_the_prefix_count_per_token() -> None:
    found = explain(hybrid(), registry())

    assert [pool.grows for pool in found.pools] == [True, False, False]
    assert found.bytes_per_token == 32.0


def test_a_restorable_boundary_takes_a_window_and_a_state_beside_its_pages() -> None:
    found = explain(hybrid(), registry())

    assert [pool.boundary_pages for pool in found.pools] == [0, 2, 1]
    assert found.bytes_per_boundary == 2 * 640 + 5000


def test_a_window_that_is_no_multiple_of_the_page_takes_one_page_more() -> None:
    pool = PoolExplanation(
        name="swa",
        indices_from_pool="swa",
        page_size=64,
        page_bytes=10,
        spans=1,
        layers=1,
        objects_per_page=1,
        window=65,
    )

    assert pool.restored_bytes(64 * 9) == 20


def test_s3_a_refusal_is_part_of_the_explanation() -> None:
    found = explain(hybrid(), load_modules(models={"other": plugin(match=False)}))

    assert found.winner is None
    assert "no plugin takes this KV cache (family 'hybrid'" in found.problem
    assert (found.pools, found.verdicts[0].outcome) == ((), Outcome.DECLINED)


def test_s3_a_tie_is_part_of_the_explanation_and_is_settled_by_name() -> None:
    twins = load_modules(models={"a": plugin(), "b": plugin()})

    tied, settled = explain(hybrid(), twins), explain(hybrid(), twins, strategy="b")

    assert (tied.winner, [v.outcome for v in tied.verdicts]) == (None, [Outcome.TIED] * 2)
    assert "several plugins take this KV cache" in tied.problem
    assert settled.winner == "b"
    with pytest.raises(PluginNotFoundError):
        explain(hybrid(), twins, strategy="c")


def test_s4_what_the_check_of_a_build_refuses_is_part_of_the_explanation() -> None:
    found = explain(hybrid(), load_modules(models={"a": plugin(forgets=True)}))

    assert found.winner is None
    assert "forgets span 'state[0]'" in found.problem


def test_a_description_from_a_file_is_explained_like_the_cache_itself() -> None:
    there = description_from_json(description_to_json(hybrid()))

    assert explain(there, registry()).pools == explain(hybrid(), registry()).pools
