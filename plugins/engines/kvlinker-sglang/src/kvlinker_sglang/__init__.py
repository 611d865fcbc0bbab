"""The engine plugin `sglang`: describes the KV pools of an SGLang worker.

This module imports neither torch nor sglang; the engine does.
"""

from __future__ import annotations

from kvlinker.description import DescribeRequest, KVCacheDescription
from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker_sglang.describe import describe_pool

__all__ = ["describe_kv_cache", "describe_plugin"]


@hookimpl
def describe_plugin() -> PluginInfo:
    """See `kvlinker.hookspecs`."""
    return PluginInfo(api_version=1, summary="SGLang servers on CPU and GPU")


@hookimpl
def describe_kv_cache(
    engine: str, kv_cache: object, request: DescribeRequest
) -> KVCacheDescription | None:
    """Describe the pools of an SGLang worker; see `kvlinker.hookspecs`.

    Raises:
        KVLinkerError: the pool is SGLang's and is not described, or the request does not fit it; the text says why.
    """
    return describe_pool(kv_cache, request) if engine == "sglang" else None
