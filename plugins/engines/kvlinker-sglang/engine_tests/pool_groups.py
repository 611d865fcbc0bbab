"""Groups that the installed plugins make of the real SGLang's pools."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from kvlinker.description import DescribeRequest, KVCacheDescription
from kvlinker.discovery import load_plugins
from kvlinker.installed import PluginKind
from kvlinker.pools import DevicePoolGroup
from kvlinker.registry import PluginRegistry
from kvlinker.selection import build_group, describe_cache, select_strategy
from kvlinker.testing.engines import PoolExample

__all__ = ["PoolGroup", "group_of", "installed_plugins"]


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
