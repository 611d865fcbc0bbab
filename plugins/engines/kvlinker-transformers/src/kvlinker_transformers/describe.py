"""Description: the facts of this engine's pools, as model plugins read them."""

from __future__ import annotations

from collections.abc import Iterable

from kvlinker.description import DescribeRequest, KVCacheDescription, Replication
from kvlinker.errors import ContractError
from kvlinker.spans import BufferSpan
from kvlinker_transformers.pools import PagedPools

__all__ = ["describe_pools"]


def describe_pools(pools: PagedPools, request: DescribeRequest) -> KVCacheDescription:
    """Return everything persistent in the pools, one span for each layer and role.

    Raises:
        ContractError: pages are asked for in a size that the pools do not have.
    """
    if request.page_size != pools.page_size:
        msg = f"{pools.family} pools have pages of {pools.page_size} slots, the request asks for {request.page_size}"
        raise ContractError(msg)
    spans = {
        role: tuple(BufferSpan.from_tensor(t, label=f"{role}[{i}]") for i, t in enumerate(tensors))
        for role, tensors in pools.tensors().items()
        if tensors
    }
    return KVCacheDescription(
        family=pools.family,
        page_size=pools.page_size,
        buffers=spans,
        layers=pools.layers,
        logical_pools=pools.logical_pools,
        facts=pools.facts,
        replication=_replication(pools, spans),
    )


def _replication(pools: PagedPools, roles: Iterable[str]) -> Replication:
    """Say whether the bytes are every rank's; the engine itself runs on one rank and has no axes."""
    replicas = pools.replicated_roles()
    return Replication(sharded_over={role: frozenset() for role in roles if role in replicas})
