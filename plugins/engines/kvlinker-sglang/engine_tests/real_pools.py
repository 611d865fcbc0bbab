"""The pools of the real SGLang, built as its model runner builds them: small, and on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import get_kv_cache_quant_method
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_context, get_exec, get_spec
from transformers import PretrainedConfig

__all__ = [
    "MODEL_CONFIG",
    "V4_FLASH",
    "V4_PRO",
    "V4_SHARED",
    "heads_pool",
    "latent_pool",
    "publish_configuration",
    "sparse_pool",
    "v4_pool",
    "windows_pool",
]

V4_FLASH = (0, 0, *(4, 128) * 20, 4)
V4_PRO = (128, 128, *(4, 128) * 29, 4)
"""Compress ratios of the models' layers (config.json, without the MTP layer)."""
V4_SHARED = ((0, 2, 2, 1, 1, 2, 4), (1, 3, 5))
"""Ratios of V4.1, and the layers that keep what others of their ratio read: two of ratio 2, and one of ratio 1."""
MODEL_CONFIG = PretrainedConfig.from_dict(
    {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "index_topk": 2048,
        "indexer_types": ["full"] * 3,
    }
)
"""What the server's model says of itself: each layer of sparse attention has an index of its own."""


@cache
def publish_configuration() -> None:
    """Let this process's pools ask for the server's configuration: a server of one rank on the CPU."""
    torch.set_num_threads(1)
    get_context().override_server_args(
        device="cpu",
        _model_config=SimpleNamespace(hf_config=MODEL_CONFIG),
        _mamba_cache_chunk_size=1,
    ).install()


def heads_pool(
    *,
    dtype: torch.dtype = torch.bfloat16,
    layers: int = 3,
    heads: int = 2,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    page_size: int = 16,
    pages: int = 16,
    start_layer: int = 0,
    head_major: bool = False,
    quantized_as: str | None = None,
) -> object:
    """Return an `MHATokenToKVPool`; SGLang quantizes by a named method for some platforms and formats."""
    publish_configuration()

    with envs.SGLANG_USE_HND_KVCACHE.override(head_major):
        return MHATokenToKVPool(
            size=pages * page_size,
            page_size=page_size,
            dtype=dtype,
            head_num=heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            layer_num=layers,
            device="cpu",
            enable_memory_saver=False,
            start_layer=start_layer,
            end_layer=start_layer + layers,
            quant_method=None if quantized_as is None else get_kv_cache_quant_method(quantized_as),
        )


def windows_pool(
    *,
    dtype: torch.dtype = torch.bfloat16,
    full: Sequence[int] = (1, 3),
    sliding: Sequence[int] = (0, 2),
    heads: int = 2,
    page_size: int = 16,
    pages: int = 16,
    window_pages: int = 8,
    head_major: bool = False,
    in_full_slots: bool = False,
    **classes: object,
) -> object:
    """Return an `SWAKVPool`: of two pools of K and V, unless SGLang's arguments name other classes.

    One `in_full_slots` has windows at every slot of the full pool, as SGLang makes it for some drafts.
    """
    publish_configuration()

    with envs.SGLANG_USE_HND_KVCACHE.override(head_major):
        pool = SWAKVPool(
            size=pages * page_size,
            size_swa=(pages if in_full_slots else window_pages) * page_size,
            page_size=page_size,
            dtype=dtype,
            head_num=heads,
            head_dim=64,
            swa_attention_layer_ids=list(sliding),
            full_attention_layer_ids=list(full),
            device="cpu",
            **classes,
        )
    pool.swa_uses_full_indices = in_full_slots
    return pool


def latent_pool(
    *,
    dtype: torch.dtype = torch.bfloat16,
    layers: int = 3,
    page_size: int = 16,
    pages: int = 16,
    start_layer: int = 0,
) -> object:
    """Return an `MLATokenToKVPool` of DeepSeek V3's latents."""
    publish_configuration()

    return MLATokenToKVPool(
        size=pages * page_size,
        page_size=page_size,
        dtype=dtype,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
        start_layer=start_layer,
        end_layer=start_layer + layers,
    )


def sparse_pool(
    *,
    dtype: torch.dtype = torch.bfloat16,
    layers: int = 3,
    row_values: int = 576,
    pages: int = 4,
    start_layer: int = 0,
    without_index: Sequence[int] = (),
    index_kpool: int = 1,
) -> object:
    """Return a `DSATokenToKVPool` in its pages of 64 slots.

    Args:
        dtype: of the latents.
        layers: of the pipeline stage.
        row_values: SGLang's kv_cache_dim: 576, or 656 for packed fp8 rows.
        pages: that requests may use.
        start_layer: first global layer of the stage.
        without_index: layers, counted in the stage, for which no index buffer is made.
        index_kpool: tokens folded into an index key.
    """
    publish_configuration()

    page_size = 64 * index_kpool
    return DSATokenToKVPool(
        size=pages * page_size,
        page_size=page_size,
        kv_lora_rank=512,
        dtype=dtype,
        qk_rope_head_dim=64,
        layer_num=layers,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=row_values,
        start_layer=start_layer,
        end_layer=start_layer + layers,
        index_kpool=index_kpool,
        skip_topk_layers=[layer in without_index for layer in range(layers)],
    )


def v4_pool(
    ratios: Sequence[int] = (0, 4, 128, 4),
    *,
    pages: int = 4,
    start: int = 0,
    end: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    draft: bool = False,
    fp4_indexer: bool = False,
    hisparse: bool = False,
    speculative: str | None = None,
    sources: Sequence[int] | None = None,
    kv_layout: str = "v4",
) -> object:
    """Return a `DeepSeekV4TokenToKVPool` in its pages of 256 slots.

    Args:
        ratios: compress ratios of all layers of the model.
        pages: that requests may use.
        start: first global layer of the pipeline stage.
        end: global layer behind its last; all layers by default.
        state_dtype: of the compressor states.
        draft: as the worker of a draft model builds it.
        fp4_indexer: keep index keys as fp4.
        hisparse: keep C4 pages where HiSparse wants them.
        speculative: SGLang's name of an algorithm that drafts two tokens; the rings of states are longer then.
        sources: layers of ratios 1 and 2 that keep KV, which the others of these ratios read; all of them by default.
        kv_layout: SGLang's name of how windows are kept, as it chooses it by the GPU.
    """
    publish_configuration()

    page_size, end = 256, len(ratios) if end is None else end
    slots = pages * page_size
    drafts = None if speculative is None else 2
    with (
        get_exec().kernel.override(enable_deepseek_v4_fp4_indexer=fp4_indexer),
        get_spec().override(speculative_algorithm=speculative, speculative_num_draft_tokens=drafts),
    ):
        return DeepSeekV4TokenToKVPool(
            max_num_reqs=2,
            swa_size=slots,
            c4_size=slots // 4,
            c128_size=slots // 128,
            c4_state_pool_size=pages * (8 if speculative is None else 16),
            c128_state_pool_size=0,
            page_size=page_size,
            swa_page_size=page_size,
            dtype=torch.float8_e4m3fn,
            c4_state_dtype=state_dtype,
            c128_state_dtype=state_dtype,
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            indexer_head_dim=128,
            layer_num=end - start,
            device="cpu",
            enable_memory_saver=False,
            compression_ratios=list(ratios),
            full_size=slots,
            start_layer=start,
            end_layer=end,
            enable_hisparse=hisparse,
            is_draft_worker=draft,
            kv_source_layers=[layer for layer, ratio in enumerate(ratios) if ratio in {1, 2}]
            if sources is None
            else list(sources),
            kv_layout=kv_layout,
        )
