"""SGLang's own linkers are served where they take their pools as the tested version's do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

import kvlinker_sglang
from kvlinker.errors import UnsupportedOperationError
from kvlinker_sglang.stack_compatibility import StackHost, check_stack_host, stack_differences


class Strategy:
    """SGLang's `StackStrategy`."""

    def matches(self, kvcache: object, components: object) -> object: ...
    def build_direct_linker_pool_group(
        self, *, kvcache: object, params: object, page_size: int
    ) -> object: ...


class Entry:
    """SGLang's `DevicePoolEntry`."""

    def __init__(
        self,
        *,
        name: str,
        indices_from_pool: str,
        device_pool: object,
        components: object,
        layer_mapping: object,
        page_size: int,
        rows_are_pages: bool,
        packed: bool = True,
        index_mapper: object = None,
    ) -> None: ...
    def get_hybrid_pool_buffer(self) -> object: ...
    def translate_indices(self, indices: object) -> object: ...
    def get_page_buffer_meta(self, indices: object) -> object: ...
    def prepare_locations(self, indices: object) -> object: ...
    def get_prepared_layer_range_meta(self, locations: object, layer: int) -> object: ...


class Group:
    """SGLang's `DevicePoolGroup`."""

    def __init__(
        self,
        entries: Sequence[object],
        num_layers: int,
        page_size: int,
        *,
        rank_replicated: bool = False,
    ) -> None: ...
    def resolve_transfers(
        self, transfers: object, *, allow_partial: bool = False, allow_missing_kv: bool = False
    ) -> object: ...


@dataclass
class Parameters:
    """SGLang's `CacheInitParams`."""

    req_to_token_pool: object
    token_to_kv_pool_allocator: object
    page_size: int
    tree_components: tuple[object, ...] | None = None
    mtp_draft_device_pools: tuple[object, ...] = ()
    sidecar_draft_device_pools: tuple[object, ...] = ()
    mtp_draft_mamba_pools: tuple[object, ...] = ()


class StrategyWithoutLinkers:
    matches = Strategy.matches


class GroupOfRanks(Group):
    def __init__(
        self,
        entries: Sequence[object],
        num_layers: int,
        page_size: int,
        *,
        ranks: int = 1,
    ) -> None: ...


@dataclass
class OneComponent:
    req_to_token_pool: object
    token_to_kv_pool_allocator: object
    page_size: int
    mtp_draft_device_pools: tuple[object, ...] = ()
    sidecar_draft_device_pools: tuple[object, ...] = ()
    mtp_draft_mamba_pools: tuple[object, ...] = ()


def register(strategy: object) -> None: ...


def register_behind(strategy: object, other: object) -> None: ...


def resolve(*, kvcache: object, page_size: int, params: object, components: object) -> object: ...


def host(
    *,
    version: str = "0.5.23",
    strategy: type = Strategy,
    group: type = Group,
    parameters: type = Parameters,
    register: Callable[..., object] = register,
) -> StackHost:
    """Return a host of stand-ins, some of them changed."""
    return StackHost(
        version=version,
        strategy=strategy,
        entry=Entry,
        group=group,
        parameters=parameters,
        register=register,
        resolve=resolve,
    )


def test_b106_the_tested_form_of_own_linkers_has_no_differences() -> None:
    assert stack_differences(host()) == ()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            host(strategy=StrategyWithoutLinkers),
            "StrategyWithoutLinkers has no build_direct_linker_pool_group",
        ),
        (
            host(group=GroupOfRanks),
            (
                "GroupOfRanks.__init__ takes (self, entries, num_layers, page_size, ranks), "
                "not (self, entries, num_layers, page_size, rank_replicated)"
            ),
        ),
        (
            host(register=register_behind),
            "register_stack_strategy takes (strategy, other), not (strategy)",
        ),
        (host(parameters=OneComponent), "OneComponent has no tree_components"),
    ],
    ids=["strategy", "group", "register", "parameters"],
)
def test_b106_own_linkers_that_differ_are_refused_with_the_difference(
    changed: StackHost, expected: str
) -> None:
    assert stack_differences(changed) == (expected,)
    with pytest.raises(UnsupportedOperationError, match=r"sglang 0\.5\.23 differs"):
        check_stack_host(changed)


def test_b106_without_sglang_there_is_nothing_to_install_for() -> None:
    with pytest.raises(UnsupportedOperationError, match=r"install sglang 0\.5\.23"):
        kvlinker_sglang.install()
