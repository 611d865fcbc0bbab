"""Compatibility: what of SGLang the linker relies on, compared with what is installed.

SGLang's linker interface is young and changes: another version is used only where everything below is as it was.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Protocol

from kvlinker.errors import UnsupportedOperationError

__all__ = [
    "TESTED_VERSIONS",
    "Host",
    "HostKey",
    "PageHash",
    "check_host",
    "differences",
    "field_differences",
    "refuse_differences",
    "signature_differences",
]

logger = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.5.23",)
"""Versions of SGLang that the tests of this distribution run with."""
_METHODS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cancel_queued_load": ("self", "rid"),
        "close": ("self",),
        "finish_layer_wise_loading": ("self", "counter_index"),
        "load": ("self", "rid", "transfers"),
        "lookup": ("self", "rid", "transfers"),
        "num_completed_offloads": ("self",),
        "offload": ("self", "transfers", "session_id"),
        "pop_completed_offload": ("self",),
        "reset": ("self",),
        "start_layer_wise_loading": ("self",),
    }
)
_HELPERS: Mapping[str, tuple[str, ...]] = MappingProxyType({"record_offload_ready": ("self",)})
_UPDATES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "begin_weight_update": ("self", "recv_req"),
        "check_weights": ("self", "recv_req"),
        "end_weight_update": ("self", "recv_req"),
        "flush_cache_after_weight_update": ("self", "recv_req", "success", "message"),
        "update_weights_from_disk": ("self", "recv_req"),
        "update_weights_from_distributed": ("self", "recv_req"),
        "update_weights_from_ipc": ("self", "recv_req"),
        "update_weights_from_tensor": ("self", "recv_req"),
    }
)
_UPDATER_FIELDS = frozenset({"is_fully_idle", "scheduler"})
_TREE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"init_cache_linker": ("self", "cache_linker"), "reset": ("self",), "total_size": ("self",)}
)
_TREE_ATTRIBUTES = frozenset({"linker"})
_WRAPPER_ATTRIBUTES = frozenset({"cache_linker"})
_TRANSFER_FIELDS = frozenset({"name", "keys", "device_indices", "hit_policy"})
_PARAMETER_FIELDS = frozenset(
    {
        "mtp_draft_device_pools",
        "mtp_draft_mamba_pools",
        "page_size",
        "pp_rank",
        "pp_size",
        "req_to_token_pool",
        "sidecar_draft_device_pools",
        "token_to_kv_pool_allocator",
        "tp_cache_group",
        "tree_components",
    }
)
_PARAMETER_PROPERTIES = frozenset({"swa_retain_window"})
_POLICIES = frozenset({"all_pages", "trailing_pages"})
_POOLS = frozenset({"kv", "mamba", "swa"})


class HostKey(Protocol):
    """A request's tokens with what its KV depends on beside them: SGLang's `RadixKey`."""


class PageHash(Protocol):
    """SGLang's function from tokens to the keys of their pages."""

    def __call__(
        self, key: HostKey, prior_hash: str | None = None, page_size: int | None = None
    ) -> object:
        """Return one text per page."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The parts of an installed SGLang that the linker relies on."""

    version: str
    linker: type
    """`UnifiedCacheLinker`."""
    transfer: type
    """`PoolTransfer`."""
    parameters: type
    """`CacheInitParams`."""
    policies: type[Enum]
    """`PoolHitPolicy`."""
    pools: type[Enum]
    """`PoolName`."""
    updater: type
    """`SchedulerWeightUpdaterManager`."""
    tree: type
    """`UnifiedRadixCache`."""
    wrapper: type
    """`UnifiedCacheLinkerWrapper`."""
    page_hash: PageHash
    """`get_storage_hash_str`."""
    make_key: Callable[..., HostKey]
    """`RadixKey`."""


def check_host(host: Host) -> None:
    """Refuse an SGLang that differs in what the linker relies on.

    Raises:
        UnsupportedOperationError: the text has every difference.
    """
    refuse_differences(host.version, differences(host))


def refuse_differences(version: str, found: Sequence[str]) -> None:
    """Refuse a version of SGLang with what was found to differ; warn of one that was not tested.

    Raises:
        UnsupportedOperationError: something differs; the text has every difference.
    """
    if found:
        msg = (
            f"sglang {version} differs from {' and '.join(TESTED_VERSIONS)}, which kvlinker-sglang was tested "
            f"with: {'; '.join(found)}; install a version that was tested, or a newer kvlinker-sglang"
        )
        raise UnsupportedOperationError(msg)
    if version not in TESTED_VERSIONS:
        logger.warning(
            "sglang %s was not tested with kvlinker-sglang (%s were); what the linker relies on is as it was",
            version,
            ", ".join(TESTED_VERSIONS),
        )


def differences(host: Host) -> tuple[str, ...]:
    """Return what is not as the linker needs it, one text for each difference."""
    return tuple(
        text
        for part in (
            _abstract_methods(host.linker),
            signature_differences(host.linker, {**_METHODS, **_HELPERS}),
            signature_differences(host.updater, _UPDATES),
            field_differences(host.updater, _UPDATER_FIELDS),
            signature_differences(host.tree, _TREE),
            _attribute_differences(host.tree, _TREE_ATTRIBUTES),
            _attribute_differences(host.wrapper, _WRAPPER_ATTRIBUTES),
            field_differences(host.transfer, _TRANSFER_FIELDS),
            field_differences(host.parameters, _PARAMETER_FIELDS),
            _missing(host.parameters.__name__, _PARAMETER_PROPERTIES, _properties(host.parameters)),
            _missing(host.policies.__name__, _POLICIES, _values(host.policies)),
            _missing(host.pools.__name__, _POOLS, _values(host.pools)),
        )
        for text in part
    )


def _abstract_methods(linker: type) -> Iterator[str]:
    abstract = {name for name, member in inspect.getmembers(linker) if _is_abstract(member)}
    for name in sorted(abstract - _METHODS.keys()):
        yield f"{linker.__name__} asks for {name}, which this linker does not have"


def _is_abstract(member: object) -> bool:
    return inspect.isfunction(member) and "__isabstractmethod__" in vars(member)


def signature_differences(owner: type, expected: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield what is not as expected: names of methods to the names of their parameters."""
    members = dict(inspect.getmembers(owner))
    for name, parameters in sorted(expected.items()):
        if not callable(members.get(name)):
            yield f"{owner.__name__} has no {name}"
            continue
        found = tuple(inspect.signature(members[name]).parameters)
        if found != parameters:
            yield f"{owner.__name__}.{name} takes ({', '.join(found)}), not ({', '.join(parameters)})"


def field_differences(kind: type, expected: frozenset[str]) -> Iterator[str]:
    """Yield the fields that a dataclass does not have."""
    yield from _missing(kind.__name__, expected, _field_names(kind))


def _attribute_differences(kind: type, expected: frozenset[str]) -> Iterator[str]:
    """Yield the attributes that the constructor of a class does not set."""
    members = dict(inspect.getmembers(kind, inspect.isfunction))
    found = (
        frozenset(members["__init__"].__code__.co_names) if "__init__" in members else frozenset()
    )
    yield from _missing(kind.__name__, expected, found)


def _properties(kind: type) -> frozenset[str]:
    return frozenset(name for name, member in vars(kind).items() if isinstance(member, property))


def _missing(where: str, expected: frozenset[str], found: frozenset[str]) -> Iterator[str]:
    for name in sorted(expected - found):
        yield f"{where} has no {name}"


def _field_names(kind: type) -> frozenset[str]:
    if not dataclasses.is_dataclass(kind):
        return frozenset()
    return frozenset(item.name for item in dataclasses.fields(kind))


def _values(kind: type[Enum]) -> frozenset[str]:
    return frozenset(str(member.value) for member in kind)
