"""State pools: pages of attention in some layers, and in the others states that stand for a whole prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from typing_extensions import override

from kvlinker.description import Fact, LayerFacts, LogicalPool, PoolKind
from kvlinker_transformers.engine.buffers import StateBuffer
from kvlinker_transformers.engine.codecs import plain_dtype, plain_format
from kvlinker_transformers.engine.geometry import StateGeometry
from kvlinker_transformers.engine.pools_latent import MLAPools
from kvlinker_transformers.engine.pools_mha import MHAPools
from kvlinker_transformers.pools import KV, MAMBA, PagedPools

__all__ = ["LayerState", "StatePools"]

_RECURRENCE_DTYPE = torch.float32
"""What transformers computes every recurrence in."""

_USUAL_LATENT_VALUES = 512 + 64
"""What a latent has where nothing is stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """What one layer keeps in each slot of the index space `mamba`."""

    conv: StateBuffer
    """[channels, window]: the newest tokens of a convolution, the newest last."""
    recurrence: StateBuffer | None
    """None where the layer keeps a convolution's window alone."""

    @property
    def buffers(self) -> tuple[StateBuffer, ...]:
        """Everything that is kept."""
        return (self.conv,) if self.recurrence is None else (self.recurrence, self.conv)


class StatePools(PagedPools):
    """Index space `kv` for the pages of attention, `mamba` for states: one slot holds those of all layers."""

    family = "mamba"
    is_replicated = False

    def __init__(
        self,
        geometry: StateGeometry,
        paged: MHAPools | MLAPools,
        *,
        slots: int,
        conv_format: str,
    ) -> None:
        """Allocate the states beside pools of pages.

        Args:
            geometry: shape of the model's cache.
            paged: pools of the layers that keep pages, in order.
            slots: slots of the index space `mamba`, the reserved one included.
            conv_format: `bf16`, `fp16` or `fp32`: what the model computes its convolutions in.

        Raises:
            ContractError: the format is unknown.
        """
        super().__init__(
            page_size=paged.page_size, pages={**paged.pages, MAMBA: slots}, device=paged.device
        )
        self.geometry = geometry
        self.paged = paged
        self._conv_dtype = plain_dtype(conv_format)
        self.states = tuple(self._layer_state() for _ in range(geometry.keeps_state.count(True)))
        """One for each layer that keeps a state, in order."""

    def _layer_state(self) -> LayerState:
        window = (self.geometry.conv_channels, self.geometry.conv_window)
        recurrence = self.geometry.recurrence
        return LayerState(
            conv=self._buffer(window, self._conv_dtype),
            recurrence=self._buffer(recurrence.shape, _RECURRENCE_DTYPE) if recurrence else None,
        )

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> StateBuffer:
        return StateBuffer(shape, dtype, slots=self.pages[MAMBA], device=self.device)

    @property
    @override
    def layers(self) -> tuple[LayerFacts, ...]:
        return tuple(
            LayerFacts(layer=i, global_layer=i, kind="mamba" if keeps_state else "attention")
            for i, keeps_state in enumerate(self.geometry.keeps_state)
        )

    @property
    @override
    def logical_pools(self) -> tuple[LogicalPool, ...]:
        return (
            LogicalPool(name=KV, page_size=self.page_size),
            LogicalPool(name=MAMBA, page_size=1, kind=PoolKind.SLOT),
        )

    @property
    @override
    def facts(self) -> Mapping[str, Fact]:
        return {
            "kv_family": self.paged.family,
            **self.paged.facts,
            **self._latent_facts(),
            **self._recurrence_facts(),
            "conv_states": 1,
            "conv_format": plain_format(self._conv_dtype),
            "conv_layout": "channel_major",
            "conv_window": self.geometry.conv_window,
        }

    def _latent_facts(self) -> Mapping[str, Fact]:
        if isinstance(self.paged, MHAPools):
            return {}
        values = self.paged.geometry.latent + self.paged.geometry.rope
        return {} if values == _USUAL_LATENT_VALUES else {"latent_values": values}

    def _recurrence_facts(self) -> Mapping[str, Fact]:
        recurrence = self.geometry.recurrence
        if recurrence is None:
            return {"ssm_format": "none"}
        return {"ssm_format": plain_format(_RECURRENCE_DTYPE), "ssm_layout": recurrence.layout}

    @override
    def tensors(self) -> Mapping[str, tuple[torch.Tensor, ...]]:
        kept = [state.recurrence.rows for state in self.states if state.recurrence is not None]
        return {
            **self.paged.tensors(),
            **({"ssm_state": tuple(kept)} if kept else {}),
            "conv_state_0": tuple(state.conv.rows for state in self.states),
        }

    @override
    def replicated_roles(self) -> frozenset[str]:
        return self.paged.replicated_roles()
