"""The engine plugin `transformers`: describes the paged pools of the engine in `kvlinker_transformers.engine`.

This module imports neither torch nor transformers; the engine does.
"""

from __future__ import annotations

from kvlinker.description import DescribeRequest, KVCacheDescription
from kvlinker.hookspecs import DemoRequest, PluginInfo, hookimpl
from kvlinker_transformers.describe import describe_pools
from kvlinker_transformers.pools import PagedPools

__all__ = ["describe_kv_cache", "describe_plugin", "run_demo"]


@hookimpl
def describe_plugin() -> PluginInfo:
    """See `kvlinker.hookspecs`."""
    return PluginInfo(api_version=1, summary="Hugging Face transformers models on paged KV pools")


@hookimpl
def describe_kv_cache(
    engine: str, kv_cache: object, request: DescribeRequest
) -> KVCacheDescription | None:
    """Describe this engine's pools; see `kvlinker.hookspecs`.

    Raises:
        ContractError: the engine's page size is not the one that is asked for.
    """
    if engine != "transformers" or not isinstance(kv_cache, PagedPools):
        return None
    return describe_pools(kv_cache, request)


@hookimpl
def run_demo(request: DemoRequest) -> bool:
    """Show models going on in a new process with KV that another one stored; see `kvlinker.hookspecs`."""
    from kvlinker_transformers.demo.show import show

    return show(request)
