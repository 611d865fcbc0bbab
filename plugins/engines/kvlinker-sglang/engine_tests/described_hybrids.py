"""Examples of the real SGLang's hybrids that are described: pages, and the states beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from hybrid_pools import HybridWorker, hybrid_pool, request_pool
from real_pools import heads_pool, latent_pool

from kvlinker.testing.engines import PoolExample

__all__ = ["HYBRIDS"]

_REQUESTS = {
    "req_to_token_pool.req_*": "which requests run, and in which slots; restored ones get others",
    "req_to_token_pool.mamba_allocator.*": "which slots are free",
}
_ADDRESSES = {"*data_*": "addresses and rows of the buffers"}
_HYBRID = _REQUESTS | _ADDRESSES
_DRAFTING = {
    "*intermediate_*": "states after each token of a draft, until it is known which of them are right"
}
_RING = {
    "*.replayssm_*": "updates that are not folded in yet; a slot of the tree has none, and SGLang copies none",
}

Drafts = Callable[[object], Mapping[str, object]]


def _example(
    name: str,
    *,
    requests: Callable[[], object] = request_pool,
    pool: Callable[[object], object] = hybrid_pool,
    drafts: Drafts = lambda _: {},
    page_size: int = 16,
    excused: Mapping[str, str] = _HYBRID,
) -> PoolExample:
    worker = HybridWorker(requests, pool, drafts)
    return PoolExample(
        name=f"hybrid-{name}",
        make=worker.pool,
        extras=worker.extras,
        page_size=page_size,
        excused=excused,
    )


def _mtp(pool: Callable[[object], object]) -> Drafts:
    return lambda requests: {"mtp_draft_device_pools": (pool(requests),)}


_latents = partial(hybrid_pool, family="mla")
_sparse = partial(hybrid_pool, family="dsa", page_size=64)

HYBRIDS = (
    _example("mha"),
    _example("mha-page_of_one", pool=partial(hybrid_pool, page_size=1), page_size=1),
    _example("mha-fp8", pool=partial(hybrid_pool, dtype=torch.float8_e4m3fn)),
    _example("mha-extra_buffer", requests=partial(request_pool, extra_buffer=True)),
    _example("mha-short_conv", requests=partial(request_pool, states="short_conv")),
    _example("mha-lightning", requests=partial(request_pool, states="lightning")),
    _example("mha-two_convs", requests=partial(request_pool, states="two_convs")),
    _example("mha-both", requests=partial(request_pool, layers=(0, 1, 2, 3))),
    _example("mha-mlp", requests=partial(request_pool, layers=(0, 3))),
    _example("mha-side_states", requests=partial(request_pool, side_states=True)),
    _example("mla", requests=partial(request_pool, states="kda"), pool=_latents),
    _example(
        "mla-envelope",
        requests=partial(request_pool, states="kda", envelope=True),
        pool=_latents,
    ),
    _example(
        "mla-second_stage",
        requests=partial(request_pool, states="kda", layers=(5, 6), start_layer=5),
        pool=partial(_latents, attention=(7,), start_layer=5),
    ),
    _example(
        "mla-states_alone",
        requests=partial(request_pool, states="kda", layers=(5, 6), start_layer=5),
        pool=partial(_latents, attention=(), start_layer=5),
        excused=_REQUESTS,
    ),
    _example(
        "mla-pages_alone",
        requests=partial(request_pool, states="kda", layers=(), start_layer=5),
        pool=partial(_latents, attention=(5, 6), start_layer=5),
    ),
    _example("dsa", requests=partial(request_pool, states="kda"), pool=_sparse, page_size=64),
    _example(
        "dsa-absent_indexer",
        requests=partial(request_pool, states="kda"),
        pool=partial(_sparse, without_index=(4,)),
        page_size=64,
    ),
    _example(
        "mha-drafting",
        requests=partial(request_pool, draft_tokens=2),
        drafts=_mtp(partial(hybrid_pool, attention=(0,))),
        excused=_HYBRID | _DRAFTING,
    ),
    _example(
        "mha-replay",
        requests=partial(request_pool, replay=True),
        excused=_HYBRID | _RING,
    ),
    _example(
        "mla-draft_heads",
        requests=partial(request_pool, states="kda"),
        pool=_latents,
        drafts=lambda _: {"sidecar_draft_device_pools": (heads_pool(layers=1),)},
    ),
    _example(
        "mla-drafts_packed",
        requests=partial(request_pool, states="kda"),
        pool=_latents,
        drafts=_mtp(lambda _: latent_pool(layers=1)),
    ),
    _example(
        "dsa-draft",
        requests=partial(request_pool, states="kda"),
        pool=_sparse,
        drafts=_mtp(partial(_sparse, attention=(0,))),
        page_size=64,
    ),
)
