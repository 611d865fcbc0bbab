"""What the linker states beside a pool, read from the request and nowhere else."""

from __future__ import annotations

from kvlinker.description import DescribeRequest
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker_sglang.describe.classes import class_name

__all__ = [
    "ATTENTION_CHUNK_SIZE",
    "DRAFTS_BESIDE",
    "DRAFTS_PACKED",
    "DRAFT_STATES",
    "SHARED_INDEX_LAYERS",
    "SLIDING_WINDOW",
    "STATES_BESIDE",
    "check_request",
    "draft_pools",
    "require_page_size",
    "shared_index_layers_of",
    "sliding_window_of",
]

SLIDING_WINDOW = "sliding_window"
"""Fact: slots that window layers look back."""
ATTENTION_CHUNK_SIZE = "attention_chunk_size"
"""Fact: slots of a chunk that layers attend within, for a hybrid whose windows do not slide."""
SHARED_INDEX_LAYERS = "shared_index_layers"
"""Fact: global numbers of the layers that select by another layer's index."""
DRAFTS_PACKED = "mtp_draft_device_pools"
"""Extra: a tuple of pools, one for each MTP depth."""
DRAFTS_BESIDE = "sidecar_draft_device_pools"
"""Extra: a tuple of the pool of a draft model that is no MTP layer, such as EAGLE's."""
DRAFT_STATES = "mtp_draft_mamba_pools"
"""Extra: a tuple of state pools of MTP depths, refused where there are any."""
STATES_BESIDE = "req_to_token_pool"
"""Extra: the pool of requests, through which states are reached where the model has some."""
_FACTS = {SLIDING_WINDOW, ATTENTION_CHUNK_SIZE, SHARED_INDEX_LAYERS}
_EXTRAS = {DRAFTS_PACKED, DRAFTS_BESIDE, DRAFT_STATES, STATES_BESIDE}


def check_request(request: DescribeRequest) -> None:
    """Refuse what is stated and would not be read.

    Raises:
        ContractError: a fact or an extra is unknown.
        UnsupportedKVCacheError: drafts keep states, which are not described.
    """
    for what, names, known in (
        ("facts", request.facts.keys(), _FACTS),
        ("extras", request.extras.keys(), _EXTRAS),
    ):
        if unknown := sorted(names - known):
            msg = f"SGLang's pools are described without the {what} {unknown}; known are {sorted(known)}"
            raise ContractError(msg)
    if states := _pools(request, DRAFT_STATES):
        msg = (
            f"the draft keeps states in a {class_name(states[0])}, which is not described; run SGLang without "
            f"speculative decoding for this model"
        )
        raise UnsupportedKVCacheError(msg)


def draft_pools(request: DescribeRequest) -> tuple[object, ...]:
    """Return the draft pools in the order of their layers, packed ones first."""
    return (*_pools(request, DRAFTS_PACKED), *_pools(request, DRAFTS_BESIDE))


def _pools(request: DescribeRequest, name: str) -> tuple[object, ...]:
    pools = request.extras.get(name, ())
    if not isinstance(pools, tuple):
        msg = f"extra {name!r} must be a tuple of pools, got {type(pools).__name__}"
        raise ContractError(msg)
    return pools


def sliding_window_of(request: DescribeRequest, pool: object, *, usual: int | None = None) -> int:
    """Return the window that the request states: drafts may look further back than the model.

    Args:
        request: what is stated.
        pool: named in the message.
        usual: the model's own window, where the pool knows it.

    Raises:
        ContractError: neither the request nor the pool says it.
    """
    window = request.facts.get(SLIDING_WINDOW, usual)
    if not isinstance(window, int):
        msg = (
            f"{class_name(pool)} does not say how far its window layers look back; state the fact {SLIDING_WINDOW!r} "
            f"in slots, got {window!r}"
        )
        raise ContractError(msg)
    return window


def shared_index_layers_of(request: DescribeRequest) -> frozenset[int]:
    """Return the global layers that are stated to use another layer's index.

    Raises:
        ContractError: the fact is no tuple of layers.
    """
    layers = request.facts.get(SHARED_INDEX_LAYERS, ())
    if not isinstance(layers, tuple):
        msg = f"fact {SHARED_INDEX_LAYERS!r} must be a tuple of global layers, got {layers!r}"
        raise ContractError(msg)
    return frozenset(layers)


def require_page_size(pool: object, page_size: int, request: DescribeRequest) -> None:
    """Refuse a pool whose pages are not the prefix tree's.

    Raises:
        ContractError: the sizes differ; the message has both.
    """
    if page_size != request.page_size:
        msg = (
            f"{class_name(pool)} has pages of {page_size} slots and the prefix tree pages of {request.page_size}; "
            f"make SGLang's page sizes equal"
        )
        raise ContractError(msg)
