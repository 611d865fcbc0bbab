"""The engine plugin `sglang`: describes the KV pools of an SGLang worker, and is the linker that SGLang loads.

This module imports neither torch nor sglang; `KVLinker` does, when SGLang asks for it.
"""

from __future__ import annotations

from kvlinker.description import DescribeRequest, KVCacheDescription
from kvlinker.errors import UnsupportedOperationError
from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker_sglang.compatibility import TESTED_VERSIONS
from kvlinker_sglang.describe import describe_pool

__all__ = [
    "KVLinker",  # noqa: F822  # see `__getattr__`
    "describe_kv_cache",
    "describe_plugin",
    "install",
]


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


def install() -> None:
    """Let SGLang's own Mooncake and mori linkers move every pool that an installed model plugin lays out.

    Idempotent, and for the life of the process: SGLang takes no strategy back. Call it before SGLang makes a linker,
    in the process of the scheduler; `kvlinker_sglang.linkers` does so by itself. In a server without
    `--enable-unified-cache-external-linker` it changes nothing, and the log says so once.

    Raises:
        UnsupportedOperationError: no SGLang is installed, or its own linkers take their pools otherwise.
    """
    try:
        from kvlinker_sglang.engine.stack import install_stack
    except ImportError as error:
        msg = (
            f"the installed SGLang has no stack strategies for linkers of its own: {error}; install sglang "
            f"{' or '.join(TESTED_VERSIONS)}"
        )
        raise UnsupportedOperationError(msg) from error
    install_stack()


def __getattr__(name: str) -> type:
    """Return `KVLinker`, whose module is built on SGLang's classes.

    Raises:
        UnsupportedOperationError: no SGLang is installed, or it lacks something that the linker is built on.
    """
    if name != "KVLinker":
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    try:
        from kvlinker_sglang.engine.linker import KVLinker
    except ImportError as error:
        msg = (
            f"the installed SGLang lacks what the linker is built on: {error}; install sglang "
            f"{' or '.join(TESTED_VERSIONS)}, or a newer kvlinker-sglang"
        )
        raise UnsupportedOperationError(msg) from error
    return KVLinker
