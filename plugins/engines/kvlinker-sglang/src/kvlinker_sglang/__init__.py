"""The engine plugin `sglang`: describes the KV pools of an SGLang worker, and is the linker that SGLang loads.

This module imports neither torch nor sglang; `KVLinker` does, when SGLang asks for it.
"""

from __future__ import annotations

from kvlinker.description import DescribeRequest, KVCacheDescription
from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker_sglang.describe import describe_pool

__all__ = ["KVLinker", "describe_kv_cache", "describe_plugin"]  # noqa: F822  # see `__getattr__`


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


def __getattr__(name: str) -> type:
    """Return `KVLinker`, whose module is built on SGLang's classes."""
    if name != "KVLinker":
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from kvlinker_sglang.engine.linker import KVLinker

    return KVLinker
