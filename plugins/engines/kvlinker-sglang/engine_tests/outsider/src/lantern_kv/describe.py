"""What lies in the pool, as spans over its own tensors."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from kvlinker.description import DescribeRequest, KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.spans import BufferSpan
from lantern_kv.layout import FAMILY

if TYPE_CHECKING:
    from lantern_kv.pool import LanternPool

__all__ = ["describe_lanterns", "is_lantern_pool"]


def is_lantern_pool(kv_cache: object) -> TypeGuard[LanternPool]:
    """Return whether an object is such a pool; SGLang is not imported where nobody has made one."""
    if "lantern_kv.pool" not in sys.modules:
        return False
    from lantern_kv.pool import LanternPool  # noqa: PLC0415 - loads SGLang

    return isinstance(kv_cache, LanternPool)


def describe_lanterns(pool: LanternPool, request: DescribeRequest) -> KVCacheDescription:
    """Return everything that a page needs.

    Raises:
        UnsupportedKVCacheError: it is of a class that keeps something elsewhere.
    """
    from lantern_kv.pool import LanternPool  # noqa: PLC0415 - loads SGLang

    if type(pool) is not LanternPool:
        msg = f"{type(pool).__name__} keeps wicks in host memory; run the model with LanternPool"
        raise UnsupportedKVCacheError(msg)
    lamps = (pool.lamps[:, layer] for layer in range(pool.layer_num))
    return KVCacheDescription(
        family=FAMILY,
        page_size=request.page_size,
        buffers={
            "lamps": tuple(
                BufferSpan.from_tensor(found, label=f"lamps[{i}]", owner=pool.lamps[:, i])
                for i, found in enumerate(lamps)
            ),
            "wicks": tuple(
                BufferSpan.from_tensor(found, label=f"wicks[{i}]")
                for i, found in enumerate(pool.wicks)
            ),
        },
        layers=tuple(LayerFacts(layer=i, global_layer=i) for i in range(pool.layer_num)),
        logical_pools=(LogicalPool(name="kv", page_size=pool.page_size),),
        facts={"lamp_format": "lantern8"},
    )
