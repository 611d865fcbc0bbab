"""Allocation: the pools that a model's configuration asks for."""

from __future__ import annotations

from typing import assert_never

import torch
from transformers import PreTrainedConfig

from kvlinker.errors import ContractError
from kvlinker_transformers.engine.codecs import plain_format
from kvlinker_transformers.engine.geometry import (
    Geometry,
    HybridGeometry,
    LatentGeometry,
    MHAGeometry,
    V4Geometry,
    read_geometry,
)
from kvlinker_transformers.engine.pools_latent import DSAPools, MLAPools
from kvlinker_transformers.engine.pools_mha import MHAPools
from kvlinker_transformers.engine.pools_swa import HybridPools
from kvlinker_transformers.engine.pools_v4 import V4Pools
from kvlinker_transformers.pools import PagedPools

__all__ = ["pools_for_config"]

_V4_FORMAT = "fp8_e4m3fn_ue8m0"
_CPU = torch.device("cpu")


def pools_for_config(
    config: PreTrainedConfig,
    *,
    pages: int,
    swa_pages: int | None = None,
    page_size: int | None = None,
    kv_format: str | None = None,
    head_major: bool = False,
    device: torch.device = _CPU,
) -> PagedPools:
    """Return pools for a model's configuration; nothing in them is written yet.

    Args:
        config: the model's.
        pages: pages of the index space `kv`, the reserved one included.
        swa_pages: pages of the index space `swa`, as many as `pages` by default; DeepSeek V4 and hybrids have one.
        page_size: slots in a page; 16 for MHA and hybrids, 64 for MLA and DSA, 256 for DeepSeek V4 by default.
        kv_format: how values are stored: `bf16`, `fp16`, `fp32` or `fp8_e4m3fn`, for latents also `fp8_packed_656`.
            MHA and hybrids take the model's own dtype by default, MLA and DSA take bf16; DeepSeek V4 has a format of
            its own.
        head_major: pages of MHA and hybrids are [kv_heads, slots, head_dim] instead of [slots, kv_heads, head_dim].
        device: where the pools are.

    Raises:
        UnsupportedKVCacheError: the engine has no pools for the model.
        ContractError: an option does not fit the model's family, or a format its geometry.
    """
    geometry = read_geometry(config)
    device = torch.empty(0, device=device).device  # with its index, as the model's has
    _check_options(config.model_type, geometry, swa_pages=swa_pages, head_major=head_major)
    if isinstance(geometry, MHAGeometry):
        return MHAPools(
            geometry,
            pages=pages,
            page_size=page_size or 16,
            kv_format=kv_format or _own_format(config),
            device=device,
            head_major=head_major,
        )
    if isinstance(geometry, HybridGeometry):
        return HybridPools(
            geometry,
            pages=pages,
            swa_pages=swa_pages or pages,
            page_size=page_size or 16,
            kv_format=kv_format or _own_format(config),
            device=device,
            head_major=head_major,
        )
    if isinstance(geometry, LatentGeometry):
        kind = DSAPools if geometry.index_dim else MLAPools
        return kind(
            geometry,
            pages=pages,
            page_size=page_size or 64,
            kv_format=kv_format or "bf16",
            device=device,
        )
    if isinstance(geometry, V4Geometry):
        if kv_format not in {None, _V4_FORMAT}:
            msg = (
                f"model type {config.model_type!r} stores {_V4_FORMAT}, got kv_format {kv_format!r}"
            )
            raise ContractError(msg)
        return V4Pools(
            geometry,
            pages=pages,
            swa_pages=swa_pages or pages,
            page_size=page_size or 256,
            device=device,
        )
    assert_never(geometry)


def _check_options(
    model_type: str, geometry: Geometry, *, swa_pages: int | None, head_major: bool
) -> None:
    if head_major and not isinstance(geometry, MHAGeometry | HybridGeometry):
        msg = f"model type {model_type!r}: head_major given, but only pages of K and V have heads"
        raise ContractError(msg)
    if swa_pages is not None and not isinstance(geometry, V4Geometry | HybridGeometry):
        msg = f"model type {model_type!r}: swa_pages given, but it has no index space 'swa'"
        raise ContractError(msg)


def _own_format(config: PreTrainedConfig) -> str:
    dtype: object = config.dtype
    return plain_format(dtype) if isinstance(dtype, torch.dtype) else "bf16"
