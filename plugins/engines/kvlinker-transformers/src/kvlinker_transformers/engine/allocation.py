"""Allocation: the pools that a model's configuration asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, assert_never

import torch
from transformers import PreTrainedConfig

from kvlinker.errors import ContractError
from kvlinker_transformers.engine.codecs import plain_format
from kvlinker_transformers.engine.geometry import (
    Geometry,
    HybridGeometry,
    LatentGeometry,
    MHAGeometry,
    StateGeometry,
    V4Geometry,
    read_geometry,
)
from kvlinker_transformers.engine.pools_latent import DSAPools, MLAPools
from kvlinker_transformers.engine.pools_mha import MHAPools
from kvlinker_transformers.engine.pools_state import StatePools
from kvlinker_transformers.engine.pools_swa import HybridPools
from kvlinker_transformers.engine.pools_v4 import V4Pools
from kvlinker_transformers.pools import PagedPools

__all__ = ["pools_for_config"]

_V4_FORMAT = "fp8_e4m3fn_ue8m0"
_CPU = torch.device("cpu")
_AnyLatentPools = TypeVar("_AnyLatentPools", MLAPools, DSAPools)


def pools_for_config(
    config: PreTrainedConfig,
    *,
    pages: int,
    swa_pages: int | None = None,
    state_slots: int | None = None,
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
        state_slots: slots of the index space `mamba`, the reserved one included, as many as `pages` by default; models
            with states have one, and need two for a request and one for each state that is being stored.
        page_size: slots in a page; 16 for MHA and hybrids, 64 for MLA and DSA, 256 for DeepSeek V4 by default; beside
            states as for the same pages alone.
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
    options = _Options(
        model_type=config.model_type,
        own_format=_own_format(config),
        pages=pages,
        swa_pages=swa_pages,
        state_slots=state_slots,
        page_size=page_size,
        kv_format=kv_format,
        head_major=head_major,
        device=torch.empty(0, device=device).device,  # with its index, as the model's has
    )
    options.check(geometry)
    return _pools(geometry, options)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What was asked for; see `pools_for_config`."""

    model_type: str
    own_format: str
    """Of the model's own dtype."""
    pages: int
    swa_pages: int | None
    state_slots: int | None
    page_size: int | None
    kv_format: str | None
    head_major: bool
    device: torch.device

    def check(self, geometry: Geometry) -> None:
        """Refuse what the family does not have.

        Raises:
            ContractError: an option is given for pages or an index space that are not there.
        """
        where = f"model type {self.model_type!r}"
        pages = geometry.pages if isinstance(geometry, StateGeometry) else geometry
        if self.head_major and not isinstance(pages, MHAGeometry | HybridGeometry):
            msg = f"{where}: head_major given, but only pages of K and V have heads"
            raise ContractError(msg)
        if self.swa_pages is not None and not isinstance(geometry, V4Geometry | HybridGeometry):
            msg = f"{where}: swa_pages given, but it has no index space 'swa'"
            raise ContractError(msg)
        if self.state_slots is not None and not isinstance(geometry, StateGeometry):
            msg = f"{where}: state_slots given, but it has no index space 'mamba'"
            raise ContractError(msg)


def _pools(geometry: Geometry, options: _Options) -> PagedPools:
    if isinstance(geometry, MHAGeometry):
        return _heads(geometry, options)
    if isinstance(geometry, HybridGeometry):
        return _windows(geometry, options)
    if isinstance(geometry, LatentGeometry):
        if geometry.index_dim:
            return _latents(DSAPools, geometry, options)
        return _latents(MLAPools, geometry, options)
    if isinstance(geometry, StateGeometry):
        return _states(geometry, options)
    if isinstance(geometry, V4Geometry):
        return _v4(geometry, options)
    assert_never(geometry)


def _heads(geometry: MHAGeometry, options: _Options) -> MHAPools:
    return MHAPools(
        geometry,
        pages=options.pages,
        page_size=options.page_size or 16,
        kv_format=options.kv_format or options.own_format,
        device=options.device,
        head_major=options.head_major,
    )


def _windows(geometry: HybridGeometry, options: _Options) -> HybridPools:
    return HybridPools(
        geometry,
        pages=options.pages,
        swa_pages=options.swa_pages or options.pages,
        page_size=options.page_size or 16,
        kv_format=options.kv_format or options.own_format,
        device=options.device,
        head_major=options.head_major,
    )


def _latents(
    kind: type[_AnyLatentPools], geometry: LatentGeometry, options: _Options
) -> _AnyLatentPools:
    return kind(
        geometry,
        pages=options.pages,
        page_size=options.page_size or 64,
        kv_format=options.kv_format or "bf16",
        device=options.device,
    )


def _states(geometry: StateGeometry, options: _Options) -> StatePools:
    pages = geometry.pages
    return StatePools(
        geometry,
        _heads(pages, options)
        if isinstance(pages, MHAGeometry)
        else _latents(MLAPools, pages, options),
        slots=options.state_slots or options.pages,
        conv_format=options.own_format,
    )


def _v4(geometry: V4Geometry, options: _Options) -> V4Pools:
    if options.kv_format not in {None, _V4_FORMAT}:
        msg = (
            f"model type {options.model_type!r} stores {_V4_FORMAT}, "
            f"got kv_format {options.kv_format!r}"
        )
        raise ContractError(msg)
    return V4Pools(
        geometry,
        pages=options.pages,
        swa_pages=options.swa_pages or options.pages,
        page_size=options.page_size or 256,
        device=options.device,
    )


def _own_format(config: PreTrainedConfig) -> str:
    dtype: object = config.dtype
    return plain_format(dtype) if isinstance(dtype, torch.dtype) else "bf16"
