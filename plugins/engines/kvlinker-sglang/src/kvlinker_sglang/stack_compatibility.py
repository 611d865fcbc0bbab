"""Stack compatibility: what of SGLang's own linkers the stack strategy relies on, compared with what is installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvlinker_sglang.compatibility import (
    field_differences,
    refuse_differences,
    signature_differences,
)

__all__ = ["StackHost", "check_stack_host", "stack_differences"]

_STRATEGY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "build_direct_linker_pool_group": ("self", "kvcache", "params", "page_size"),
        "matches": ("self", "kvcache", "components"),
    }
)
_ENTRY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "__init__": (
            "self",
            "name",
            "indices_from_pool",
            "device_pool",
            "components",
            "layer_mapping",
            "page_size",
            "rows_are_pages",
            "packed",
            "index_mapper",
        ),
        "get_hybrid_pool_buffer": ("self",),
        "get_page_buffer_meta": ("self", "indices"),
        "get_prepared_layer_range_meta": ("self", "locations", "layer"),
        "prepare_locations": ("self", "indices"),
        "translate_indices": ("self", "indices"),
    }
)
_GROUP: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "__init__": ("self", "entries", "num_layers", "page_size", "rank_replicated"),
        "resolve_transfers": ("self", "transfers", "allow_partial", "allow_missing_kv"),
    }
)
_PARAMETERS = frozenset(
    {
        "mtp_draft_device_pools",
        "mtp_draft_mamba_pools",
        "page_size",
        "req_to_token_pool",
        "sidecar_draft_device_pools",
        "token_to_kv_pool_allocator",
        "tree_components",
    }
)
_REGISTER = ("strategy",)
_RESOLVE = ("kvcache", "page_size", "params", "components")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackHost:
    """The parts of an installed SGLang that the stack strategy relies on."""

    version: str
    strategy: type
    """`StackStrategy`."""
    entry: type
    """`DevicePoolEntry`."""
    group: type
    """`DevicePoolGroup`."""
    parameters: type
    """`CacheInitParams`."""
    register: Callable[..., object]
    """`register_stack_strategy`."""
    resolve: Callable[..., object]
    """`resolve_hybrid_device_pool_group`."""


def check_stack_host(host: StackHost) -> None:
    """Refuse an SGLang whose own linkers take their pools otherwise.

    Raises:
        UnsupportedOperationError: the text has every difference.
    """
    refuse_differences(host.version, stack_differences(host))


def stack_differences(host: StackHost) -> tuple[str, ...]:
    """Return what is not as the strategy needs it, one text for each difference."""
    return (
        *signature_differences(host.strategy, _STRATEGY),
        *signature_differences(host.entry, _ENTRY),
        *signature_differences(host.group, _GROUP),
        *field_differences(host.parameters, _PARAMETERS),
        *_parameters("register_stack_strategy", host.register, _REGISTER),
        *_parameters("resolve_hybrid_device_pool_group", host.resolve, _RESOLVE),
    )


def _parameters(
    name: str, function: Callable[..., object], expected: tuple[str, ...]
) -> Iterator[str]:
    found = tuple(inspect.signature(function).parameters)
    if found != expected:
        yield f"{name} takes ({', '.join(found)}), not ({', '.join(expected)})"
