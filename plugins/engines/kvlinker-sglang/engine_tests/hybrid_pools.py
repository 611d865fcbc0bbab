"""Hybrids of the real SGLang: pools of pages beside pools of states, built as its model runner builds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from real_pools import publish_configuration
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateShape,
)
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.runtime_context import get_exec

__all__ = ["HybridWorker", "hybrid_pool", "request_pool"]

SLOTS = 8
"""Slots of states that requests may use; the pools have one more, for padding."""


def _mamba2(layers: Sequence[int]) -> object:
    """Return what Nemotron-H's layers keep; Gated DeltaNet's are laid out alike."""
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=64,
        n_groups=2,
        num_heads=4,
        head_dim=16,
        state_size=8,
        conv_kernel=4,
    )
    return Mamba2CacheParams(shape=shape, layers=list(layers))


def _kda(layers: Sequence[int]) -> object:
    """Return what Kimi Linear's layers keep, whose windows lie the other way."""
    shape = KimiLinearStateShape.create(
        tp_world_size=1, num_heads=2, head_dim=16, conv_kernel_size=4
    )
    return KimiLinearCacheParams(shape=shape, layers=list(layers))


def _short_conv(layers: Sequence[int]) -> object:
    """Return what LFM2's layers keep: no recurrence."""
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=64,
        n_groups=1,
        num_heads=1,
        head_dim=64,
        state_size=0,
        conv_kernel=3,
    )
    return Mamba2CacheParams(shape=shape, layers=list(layers))


def _lightning(layers: Sequence[int]) -> object:
    """Return what the layers of lightning attention keep: no convolution."""
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=0,
        n_groups=0,
        num_heads=2,
        head_dim=16,
        state_size=16,
        conv_kernel=1,
    )
    return Mamba2CacheParams(shape=shape, layers=list(layers))


def _convs(*shapes: tuple[int, int]) -> Callable[[Sequence[int]], object]:
    def make(layers: Sequence[int]) -> object:
        shape = Mamba2StateShape(
            conv=list(shapes),
            temporal=(4, 16, 8),
            intermediate_size=64,
            conv_dim=96,
            ssm_state_size=8,
            num_heads=4,
            head_dim=16,
            state_size=8,
            conv_kernel=4,
        )
        return Mamba2CacheParams(shape=shape, layers=list(layers))

    return make


STATES: Mapping[str, Callable[[Sequence[int]], object]] = MappingProxyType(
    {
        "mamba2": _mamba2,
        "kda": _kda,
        "short_conv": _short_conv,
        "lightning": _lightning,
        "two_convs": _convs((64, 3), (32, 3)),
        "other_windows": _convs((64, 3), (32, 1)),
        "inkling_convs": _convs((3, 64), (3, 32)),
    }
)
"""What layers keep, by name."""


def request_pool(
    *,
    states: str = "mamba2",
    layers: Sequence[int] = (0, 1, 3),
    slots: int = SLOTS,
    start_layer: int = 0,
    envelope: bool = False,
    int8_checkpoints: bool = False,
    side_states: bool = False,
    draft_tokens: int | None = None,
    replay: bool = False,
    extra_buffer: bool = False,
) -> object:
    """Return a `HybridReqToTokenPool` with a `MambaPool`.

    Args:
        states: what the layers keep, a name of STATES.
        layers: global layers that keep states.
        slots: states that the tree and requests may keep.
        start_layer: first global layer of the pipeline stage.
        envelope: keep all layers of a slot side by side.
        int8_checkpoints: keep the tree's states rounded, in a pool of their own.
        side_states: keep Qwen4's windows of layers 1 and 3, and its last tokens.
        draft_tokens: tokens that a draft may propose; None without speculative decoding.
        replay: keep rings of updates that are not folded in yet.
        extra_buffer: track states at boundaries while tokens are computed.
    """
    publish_configuration()

    sides = {
        "short_conv_layer_ids": [1, 3],
        "short_conv_state_shape": (3, 32),
        "ngram_context_len": 2,
        "ngram_eos_token_id": 7,
    }
    with get_exec().mamba.override(enable_int8_mamba_checkpoint=int8_checkpoints):
        return HybridReqToTokenPool(
            size=4,
            mamba_size=slots,
            mamba_spec_state_size=4,
            max_context_len=4096,
            device="cpu",
            enable_memory_saver=False,
            cache_params=STATES[states](layers),
            mamba_layer_ids=list(layers),
            enable_mamba_extra_buffer=extra_buffer,
            speculative_num_draft_tokens=draft_tokens,
            start_layer=start_layer,
            enable_linear_replayssm=replay,
            mamba_envelope_layout=envelope,
            **(sides if side_states else {}),
        )


def hybrid_pool(
    requests: object,
    *,
    attention: Sequence[int] = (2, 4),
    family: str = "mha",
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 16,
    pages: int = 16,
    start_layer: int = 0,
    without_index: Sequence[int] = (),
) -> object:
    """Return a `HybridLinearKVPool` beside the states of requests.

    Args:
        requests: whose states.
        attention: global layers that keep pages.
        family: `mha`, `mla` or `dsa`; the last one in pages of 64 slots.
        dtype: of the pages' values.
        page_size: slots in a page.
        pages: that requests may use.
        start_layer: first global layer of the pipeline stage.
        without_index: global layers of attention for which no index buffer is made.
    """
    publish_configuration()

    assert isinstance(requests, HybridReqToTokenPool)
    latents: dict[str, object] = {"use_mla": True, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    sparse: dict[str, object] = {
        **latents,
        "use_dsa": True,
        "index_head_dim": 128,
        "kv_cache_dim": 576,
        "skip_topk_layers": [layer in without_index for layer in attention],
    }
    return HybridLinearKVPool(
        size=pages * page_size,
        dtype=dtype,
        page_size=page_size,
        head_num=2,
        head_dim=64,
        full_attention_layer_ids=list(attention),
        device="cpu",
        mamba_pool=requests.mamba_pool,
        start_layer=start_layer,
        **{"mha": {}, "mla": latents, "dsa": sparse}[family],
    )


class HybridWorker:
    """Makes the pools of workers: a worker's pages and requests are asked for one by one, and refer to one another."""

    def __init__(
        self,
        requests: Callable[[], object],
        pool: Callable[[object], object],
        drafts: Callable[[object], Mapping[str, object]] = lambda _: {},
    ) -> None:
        """Make what the callables make, the second and third ones for the requests of the same worker."""
        self._make_requests = requests
        self._make_pool = pool
        self._drafts = drafts
        self._requests: object = None
        self._taken: set[str] = set()

    def pool(self) -> object:
        """Return the pages of the worker whose requests were asked for last, or of a new one."""
        return self._make_pool(self._worker("pool"))

    def extras(self) -> Mapping[str, object]:
        """Return the requests of the worker whose pages were asked for last, or of a new one, and its drafts."""
        requests = self._worker("extras")
        return {"req_to_token_pool": requests, **self._drafts(requests)}

    def _worker(self, what: str) -> object:
        if self._requests is None or what in self._taken:
            self._requests, self._taken = self._make_requests(), set()
        self._taken.add(what)
        return self._requests
