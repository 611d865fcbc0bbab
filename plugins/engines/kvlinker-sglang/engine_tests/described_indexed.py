"""Examples of the real SGLang's pools in which some neighbouring tokens share an index key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from hybrid_pools import HybridWorker, request_pool
from indexed_pools import folded_hybrid_pool, folded_pool, qsa_pool

from kvlinker.testing.engines import PoolExample

__all__ = ["INDEXED"]

_REQUESTS = {
    "req_to_token_pool.req_*": "which requests run, and in which slots; restored ones get others",
    "req_to_token_pool.mamba_allocator.*": "which slots are free",
}
_ADDRESSES = {"*data_*": "addresses and rows of the buffers"}
_UNFOLDED = {
    "*qsa_key_state_*": "keys of running requests' groups that are not whole; none is open at a page's end",
    "*qsa_rope_position_*": "positions of those keys",
}
_TAILS = {
    "*_compress_tail_*": "keys of running requests' groups that are not whole; none is open at a page's end"
}


def _hybrid(
    name: str,
    pool: Callable[[object], object],
    *,
    states: str = "mamba2",
    page_size: int = 16,
    excused: Mapping[str, str] = _UNFOLDED,
    drafts: Callable[[object], Mapping[str, object]] = lambda _: {},
    draft_tokens: int | None = None,
) -> PoolExample:
    requests = partial(request_pool, states=states, draft_tokens=draft_tokens)
    worker = HybridWorker(requests, pool, drafts)
    return PoolExample(
        name=name,
        make=worker.pool,
        extras=worker.extras,
        page_size=page_size,
        excused={**_REQUESTS, **_ADDRESSES, **excused},
    )


def _draft(requests: object) -> Mapping[str, object]:
    return {"mtp_draft_device_pools": (qsa_pool(requests, attention=(0,)),)}


_FP8 = torch.float8_e4m3fn

INDEXED = (
    _hybrid("qsa", qsa_pool),
    _hybrid("qsa-fp8", partial(qsa_pool, dtype=_FP8)),
    _hybrid("qsa-fp8_index", partial(qsa_pool, index_dtype=_FP8)),
    _hybrid("qsa-ratio_8", partial(qsa_pool, ratio=8)),
    _hybrid(
        "qsa-draft",
        qsa_pool,
        drafts=_draft,
        draft_tokens=2,
        excused={
            **_UNFOLDED,
            "*intermediate_*": "states after each token of a draft, until it is known which are right",
        },
    ),
    PoolExample(name="dsa-folded", make=folded_pool, page_size=256, excused=_ADDRESSES | _TAILS),
    PoolExample(
        name="dsa-folded_absent_indexer",
        make=partial(folded_pool, kpool=2, without_index=(1,)),
        page_size=128,
        excused=_ADDRESSES | _TAILS,
    ),
    PoolExample(
        name="dsa-folded_draft",
        make=partial(folded_pool, kpool=2),
        extras=lambda: {"mtp_draft_device_pools": (folded_pool(kpool=2, layers=1),)},
        page_size=128,
        excused=_ADDRESSES | _TAILS,
    ),
    _hybrid("hybrid-dsa-folded", folded_hybrid_pool, states="kda", page_size=128, excused=_TAILS),
)
