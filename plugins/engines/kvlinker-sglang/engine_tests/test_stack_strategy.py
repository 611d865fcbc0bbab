"""The strategy that SGLang's own linkers are given: what it takes, and what it leaves to SGLang's own."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from engine_frame.trees import Tree
from real_pools import heads_pool
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import NoOpMHATokenToKVPool
from sglang.srt.runtime_context import get_memory

import kvlinker_sglang
from kvlinker.description import RankAxis
from kvlinker.entries import DevicePoolEntry as CoreEntry
from kvlinker.errors import ContractError, UnsupportedKVCacheError, UnsupportedOperationError
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan
from kvlinker_sglang.engine.stack import LinkedStack, install_stack, installed_stack_host
from kvlinker_sglang.engine.stack_view import StackEntry, stack_view
from kvlinker_sglang.stack_compatibility import stack_differences


@pytest.fixture(autouse=True)
def installed() -> None:
    """Install what is tested."""
    kvlinker_sglang.install()


@pytest.fixture
def tree() -> Tree:
    """Give a tree over K and V."""
    return Tree(name="mha")


@pytest.fixture
def linked(tree: Tree) -> Iterator[None]:
    """Be a server with an external linker: `tree` has published a configuration."""
    del tree
    with get_memory().override(enable_unified_cache_external_linker=True):
        yield


def pools_of(tree: Tree, pool: object | None = None) -> dict[str, DevicePoolEntry]:  # type: ignore[no-any-unimported]  # SGLang's
    """Ask as SGLang's linkers do."""
    group = resolve_hybrid_device_pool_group(
        kvcache=tree.pool if pool is None else pool,
        page_size=tree.kind.page_size,
        params=tree.params,
        components=set(tree.components()),
    )
    return dict(group.entry_map)


def strategies() -> list[object]:
    """Return SGLang's strategies, of which it makes no public list."""
    return list(vars(hybrid_pool_assembler)["_STRATEGIES"])


def memory_entry(**changed: object) -> CoreEntry:
    """Return an entry over a tensor of 64 rows."""
    fields: dict[str, object] = {
        "name": "kv",
        "indices_from_pool": "kv",
        "components": [[BufferSpan.from_tensor(torch.zeros(64, 8), label="k[0]")]],
        "layer_mapping": {0: 0},
        "page_size": 16,
        "rows_are_pages": False,
        **changed,
    }
    return CoreEntry(**fields)  # type: ignore[arg-type]  # fields by name


# ---- installation -----------------------------------------------------------------------------


def test_b106_the_installed_sglang_is_as_the_tested_one() -> None:
    assert stack_differences(installed_stack_host()) == ()


def test_a_second_installation_changes_nothing() -> None:
    before = strategies()

    kvlinker_sglang.install()

    assert strategies() == before
    assert [isinstance(strategy, LinkedStack) for strategy in before].count(True) == 1


def test_without_a_linker_sglangs_own_strategies_answer(tree: Tree) -> None:
    with pytest.raises(ValueError, match="does not support the direct external linker"):
        pools_of(tree)


def test_without_a_linker_the_log_says_once_that_nothing_is_laid_out(
    tree: Tree, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = LinkedStack()
    components = set(tree.components())

    with caplog.at_level(logging.WARNING, logger="kvlinker_sglang"):
        answers = [strategy.matches(tree.pool, components) for _ in range(2)]

    assert answers == [False, False]
    assert caplog.text.count("add --enable-unified-cache-external-linker") == 1


@pytest.mark.parametrize("linker", ["on", "off"])
def test_an_installation_says_so_where_the_server_has_no_linker(
    tree: Tree, caplog: pytest.LogCaptureFixture, linker: str
) -> None:
    del tree
    before = strategies()
    install_stack.cache_clear()

    with (
        caplog.at_level(logging.WARNING, logger="kvlinker_sglang"),
        get_memory().override(enable_unified_cache_external_linker=linker == "on"),
    ):
        kvlinker_sglang.install()

    vars(hybrid_pool_assembler)["_STRATEGIES"][:] = before
    assert ("this server has none" in caplog.text) is (linker == "off")


# ---- what is refused --------------------------------------------------------------------------


@pytest.mark.usefixtures("linked")
def test_what_no_plugin_takes_is_laid_out_by_sglang_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Tree(name="v4")
    monkeypatch.setenv("KVLINKER_DISABLED_PLUGINS", "deepseek_v4")

    with caplog.at_level(logging.WARNING, logger="kvlinker_sglang"):
        pools = pools_of(tree)

    assert "deepseek_v4_c4" in pools
    assert not any(isinstance(pool, StackEntry) for pool in pools.values())
    assert "SGLang's own strategy lays out" in caplog.text


@pytest.mark.usefixtures("linked")
def test_what_nobody_takes_is_refused_with_kvlinkers_reason(tree: Tree) -> None:
    pool = object.__new__(NoOpMHATokenToKVPool)

    with pytest.raises(UnsupportedKVCacheError, match="NoOpMHATokenToKVPool"):
        pools_of(tree, pool)

    assert isinstance(pools_of(tree)["kv"], StackEntry)


def test_pages_of_scattered_slots_are_refused() -> None:
    entry = memory_entry(fragmented=True)

    with pytest.raises(UnsupportedOperationError, match=r"'kv' has pages of scattered slots"):
        stack_view(DevicePoolGroup([entry], 1, 16, layout="test/1"))


def test_pages_of_several_pages_of_the_tree_are_refused() -> None:
    entry = memory_entry(page_size=32)
    group = DevicePoolGroup([entry], 1, 16, layout="test/1", page_multiples={"kv": 2})

    with pytest.raises(UnsupportedOperationError, match=r"pages of \{'kv': 2\} are several"):
        stack_view(group)


def test_k3_shares_of_ranks_that_take_slots_in_turn_are_refused() -> None:
    entry = memory_entry(rank_axes=[RankAxis(name="dcp", rank=1, size=2)])

    with pytest.raises(
        UnsupportedOperationError, match=r"pages of \['kv'\] are dealt out to ranks"
    ):
        stack_view(DevicePoolGroup([entry], 1, 16, layout="test/1"))


def test_memory_of_unknown_allocations_is_refused() -> None:
    span = BufferSpan(base_ptr=0x1000, rows=64, row_bytes=8, row_stride=8, label="k[0]")
    entry = memory_entry(components=[[span]])

    with pytest.raises(UnsupportedOperationError, match=r"'k\[0\]' does not say which allocation"):
        stack_view(DevicePoolGroup([entry], 1, 16, layout="test/1"))


# ---- the view ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("linked")
def test_c5_pages_are_checked_by_the_core(tree: Tree) -> None:
    entry = pools_of(tree)["kv"]
    page = torch.arange(16, 32)

    assert entry.prepare_locations(page) == [16]
    with pytest.raises(ContractError, match="'kv'"):
        entry.prepare_locations(torch.cat([page, page]))


@pytest.mark.usefixtures("linked")
def test_the_buffers_are_the_engines_own_memory(tree: Tree) -> None:
    pool = tree.pool
    entry = pools_of(tree)["kv"]

    buffers = [*pool.k_buffer, *pool.v_buffer]  # type: ignore[attr-defined]  # a real pool

    assert [shown.data_ptr() for shown in entry.get_hybrid_pool_buffer()] == [
        buffer.data_ptr() for buffer in buffers
    ]
    allocations = [
        [(part.untyped_storage().data_ptr(), part.untyped_storage().nbytes()) for part in parts]
        for parts in (entry.kv_buffer, buffers)
    ]
    assert allocations[0] == allocations[1]


@pytest.mark.usefixtures("linked")
def test_a_draft_beside_the_target_is_shown_under_sglangs_name(tree: Tree) -> None:
    draft = heads_pool(layers=1, heads=4, pages=12)
    tree.params.sidecar_draft_device_pools = (draft,)

    pools = pools_of(tree)

    assert set(pools) == {"kv", "draft"}
    assert [shown.data_ptr() for shown in pools["draft"].kv_buffer] == [
        *(buffer.data_ptr() for buffer in (*draft.k_buffer, *draft.v_buffer))  # type: ignore[attr-defined]  # a real pool
    ]
    assert pools["draft"].layer_mapping == {0: (0, 1)}
    assert pools["kv"].layer_mapping == {0: (0, 3), 1: (1, 4), 2: (2, 5)}


def test_an_index_map_is_applied_once() -> None:
    entry = memory_entry(index_mapper=_halved)
    view = stack_view(DevicePoolGroup([entry], 1, 16, layout="test/1")).entry_map["kv"]

    slots = view.translate_indices(torch.arange(32, 48))

    assert view.prepare_locations(slots) == [16]


def _halved(slots: object) -> object:
    return slots - 16  # type: ignore[operator]  # an array of slots
