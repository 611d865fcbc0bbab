"""Description: the facts of an SGLang worker's KV pools, as model plugins read them.

A pool is recognised by its exact class: a class of SGLang's that is not known here, such as a subclass, is refused by
name, because its bytes may mean something else. Objects of other projects are declined in silence.

What the caller states beside the pool, in the request:

* `facts["sliding_window"]`: slots that window layers look back, needed for a sliding-window hybrid
  (`CacheInitParams.swa_retain_window`).
* `facts["attention_chunk_size"]`: slots of a chunk that layers attend within, where the model has such layers; the
  description repeats it, for a window that does not slide is no window.
* `facts["shared_index_layers"]`: global numbers of the DSA layers that select by another layer's index; without it,
  every index buffer that has rows counts as read (`kvlinker_sglang.describe.sparse.shared_index_layers` finds them).
* `extras["req_to_token_pool"]`: the pool of requests, needed where the model keeps states: they are reached through it.
* `extras["mtp_draft_device_pools"]` and `extras["sidecar_draft_device_pools"]`: the draft pools, as tuples under
  SGLang's own names (`CacheInitParams`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from kvlinker.description import DescribeRequest, KVCacheDescription
from kvlinker_sglang.describe.classes import class_name, is_of_sglang
from kvlinker_sglang.describe.deepseek_v4 import POOL as V4_POOL
from kvlinker_sglang.describe.deepseek_v4 import describe as describe_v4
from kvlinker_sglang.describe.engine import require_platform, require_whole_pages
from kvlinker_sglang.describe.heads import POOL as HEADS_POOL
from kvlinker_sglang.describe.heads import describe as describe_heads
from kvlinker_sglang.describe.hybrids import POOL as HYBRID_POOL
from kvlinker_sglang.describe.hybrids import describe as describe_hybrid
from kvlinker_sglang.describe.latent import POOL as LATENT_POOL
from kvlinker_sglang.describe.latent import describe as describe_latent
from kvlinker_sglang.describe.minimax import NVFP4_POOL as MINIMAX_NVFP4_POOL
from kvlinker_sglang.describe.minimax import POOL as MINIMAX_POOL
from kvlinker_sglang.describe.minimax import describe as describe_minimax
from kvlinker_sglang.describe.qsa import POOL as QSA_POOL
from kvlinker_sglang.describe.qsa import describe as describe_qsa
from kvlinker_sglang.describe.refusals import refusal_of
from kvlinker_sglang.describe.requests import check_request
from kvlinker_sglang.describe.scaled import FP4_POOL, MXFP8_POOL, is_in_blocks
from kvlinker_sglang.describe.scaled import describe as describe_scaled
from kvlinker_sglang.describe.scaled_latent import POOL as SCALED_LATENT_POOL
from kvlinker_sglang.describe.scaled_latent import describe as describe_scaled_latent
from kvlinker_sglang.describe.sparse import POOL as SPARSE_POOL
from kvlinker_sglang.describe.sparse import describe as describe_sparse
from kvlinker_sglang.describe.states import require_no_states
from kvlinker_sglang.describe.windows import POOL as WINDOWS_POOL
from kvlinker_sglang.describe.windows import describe as describe_windows

__all__ = ["describe_pool"]


def _describe_heads(pool: object, request: DescribeRequest) -> KVCacheDescription:
    """Return the description of a pool of K and V, which a method may keep in scaled blocks."""
    return (describe_scaled if is_in_blocks(pool) else describe_heads)(pool, request)


_Describe: TypeAlias = Callable[[object, DescribeRequest], KVCacheDescription]
_DESCRIBERS: Mapping[str, _Describe] = MappingProxyType(
    {
        HEADS_POOL: _describe_heads,
        WINDOWS_POOL: describe_windows,
        LATENT_POOL: describe_latent,
        SPARSE_POOL: describe_sparse,
        V4_POOL: describe_v4,
        HYBRID_POOL: describe_hybrid,
        QSA_POOL: describe_qsa,
        FP4_POOL: describe_scaled,
        MXFP8_POOL: describe_scaled,
        MINIMAX_POOL: describe_minimax,
        MINIMAX_NVFP4_POOL: describe_minimax,
        SCALED_LATENT_POOL: describe_scaled_latent,
    }
)
"""By the exact class."""


def describe_pool(pool: object, request: DescribeRequest) -> KVCacheDescription | None:
    """Return everything persistent in a worker's pool and its drafts, or None for another project's object.

    Raises:
        UnsupportedKVCacheError: the pool is SGLang's and is not described; the text names it, why, and what to do.
        ContractError: the page sizes differ, or the request lacks what the pool needs.
    """
    if not is_of_sglang(pool):
        return None
    describe = _DESCRIBERS.get(class_name(pool))
    if describe is None:
        raise refusal_of(pool)
    check_request(request)
    require_platform()
    if describe is not describe_latent:
        require_whole_pages()
    if describe not in (describe_hybrid, describe_qsa):
        require_no_states(pool, request)
    return describe(pool, request)
