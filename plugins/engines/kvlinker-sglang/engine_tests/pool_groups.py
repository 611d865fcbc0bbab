"""Groups that the installed plugins make of the real SGLang's pools, and their pages stored and read back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache

from linked_servers import wait_for

from kvlinker.description import DescribeRequest, KVCacheDescription
from kvlinker.device import DeviceEvent, HostAccess
from kvlinker.discovery import load_plugins
from kvlinker.installed import PluginKind
from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker
from kvlinker.pools import DevicePoolGroup
from kvlinker.registry import PluginRegistry
from kvlinker.selection import build_group, describe_cache, select_strategy
from kvlinker.store import Store
from kvlinker.testing.engines import PoolExample
from kvlinker.transfers import PoolTransfer

__all__ = ["KEYS", "PoolGroup", "group_of", "installed_plugins", "load", "offload"]

KEYS = ("first", "second")
"""Of the pages that tests store."""
_NAMESPACE = KeyNamespace(model_id="tiny", producer="sglang")
_LIMIT_SECONDS = 300.0


@dataclass(frozen=True)
class PoolGroup:
    """A process's pools, and what the plugins made of them."""

    target: object
    drafts: tuple[object, ...]
    requests: object
    """The pool of requests, where it was asked for."""
    description: KVCacheDescription
    group: DevicePoolGroup

    @property
    def page_bytes(self) -> dict[str, int]:
        """Bytes of a page in each entry, all layers and drafts together."""
        return {entry.name: sum(entry.part_bytes) for entry in self.group.entries}


@cache
def installed_plugins() -> PluginRegistry:
    """Return a registry of the distributions that are installed beside SGLang."""
    return load_plugins(kinds=(PluginKind.MODEL, PluginKind.ENGINE))


def group_of(example: PoolExample) -> PoolGroup:
    """Make an example's pools, and their group, as a new process would."""
    target, extras = example.make(), example.extras()
    request = DescribeRequest(page_size=example.page_size, facts=example.facts, extras=extras)
    registry = installed_plugins()
    description = describe_cache("sglang", target, request, registry=registry)
    drafts = [pool for pools in extras.values() if isinstance(pools, tuple) for pool in pools]
    return PoolGroup(
        target=target,
        drafts=tuple(drafts),
        requests=extras.get("req_to_token_pool"),
        description=description,
        group=build_group(select_strategy(description, registry), description),
    )


def offload(
    group: DevicePoolGroup,
    transfers: Sequence[PoolTransfer],
    store: Store,
    *,
    ready: Sequence[DeviceEvent] = (),
    until: Callable[[], None] = lambda: None,
    limit_seconds: float = _LIMIT_SECONDS,
) -> None:
    """Store pages once `ready` is done, and do something meanwhile.

    Raises:
        TimeoutError: they were not stored within the limit.
    """
    with closing(Linker(group, store, _NAMESPACE, device=HostAccess())) as linker:
        assert linker.offload(transfers, ready=ready)
        until()
        wait_for(
            lambda: linker.num_completed_offloads() > 0,
            "the end of an offload",
            limit_seconds=limit_seconds,
        )
        assert linker.pop_completed_offload()


def load(group: DevicePoolGroup, transfers: Sequence[PoolTransfer], store: Store) -> None:
    """Read pages back, all layers of them."""
    with closing(Linker(group, store, _NAMESPACE, device=HostAccess())) as linker:
        assert linker.load("request", transfers)
        assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
