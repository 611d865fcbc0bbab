"""State layers: what transformers reads and writes states through; their only memory is a slot of the pools.

A sequence's slot changes with its page: a finished page's state stays as it is, for whoever stores it.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from typing_extensions import override

from kvlinker.errors import ContractError
from kvlinker_transformers.engine.buffers import StateBuffer
from kvlinker_transformers.engine.layers import refuse_to_move
from kvlinker_transformers.engine.pools_state import LayerState
from kvlinker_transformers.engine.sequence import PagedSequence

__all__ = ["StateLayer"]


class StateLayer(LinearAttentionCacheLayerMixin):
    """One layer of one sequence: a convolution's window and, in most models, a recurrence."""

    def __init__(
        self, layer: int, sequence: PagedSequence, state: LayerState, *, is_fed_by_token: bool
    ) -> None:
        super().__init__()
        self.layer = layer
        self.sequence = sequence
        self.is_fed_by_token = is_fed_by_token
        """See `StateGeometry`."""
        self._state = state
        self._slot: int | None = None
        """Where the state of the tokens that were seen is, or will be behind the gate; None before the first."""

    def resume(self) -> None:
        """Take the state in the sequence's slot as that of the tokens that were seen."""
        self._slot = self.sequence.state_slot

    # ---- states -------------------------------------------------------------------------------

    def conv_state(self, state_idx: int) -> torch.Tensor | None:
        """Return the window in the pool, which the model may write to; None before the first token.

        Raises:
            ContractError: the model has more than one convolution in a layer.
        """
        return self._view(self._state.conv, state_idx)

    def recurrence(self, state_idx: int) -> torch.Tensor | None:
        """Return the recurrence in the pool, which the model may write to; None before the first token.

        Raises:
            ContractError: the model has more than one recurrence in a layer, or none that is kept.
        """
        return self._view(self._kept_recurrence(), state_idx)

    @override
    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Append a convolution's inputs, [1, channels, T]; return them behind the window before them.

        Raises:
            ContractError: the batch holds more than one sequence; the layer keeps another window than the model's;
                the model would forget the state of the tokens before.
        """
        self._check_inputs(conv_states, conv_kernel_size)
        before = self.conv_state(state_idx)
        if before is None:
            self._slot = self.sequence.state_slot
            missing = max(0, self._state.conv.shape[1] - conv_states.shape[-1])
            known = torch.nn.functional.pad(conv_states, (missing, 0))
        else:
            known = torch.cat([before, conv_states], dim=-1)
        self._write(self._state.conv, known[..., -self._state.conv.shape[1] :])
        return known

    @override
    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Replace the recurrence, [1, ...], and return it from the pool.

        Raises:
            ContractError: it has another shape or dtype than the pool, or there is more than one.
        """
        self._check_index(state_idx)
        return self._write(self._kept_recurrence(), recurrent_states)

    def _view(self, buffer: StateBuffer, state_idx: int) -> torch.Tensor | None:
        self._check_index(state_idx)
        if self._slot is None:
            return None
        self.sequence.gate(self.layer)
        self._slot = self._follow(self._slot)
        return buffer.at(self._slot)

    def _follow(self, slot: int) -> int:
        """Take the state along to the slot of the page that the sequence ends with now, and return that one."""
        newest = self.sequence.state_slot
        if newest != slot:
            for buffer in self._state.buffers:
                buffer.at(newest).copy_(buffer.at(slot))
        return newest

    def _write(self, buffer: StateBuffer, values: torch.Tensor) -> torch.Tensor:
        if self._slot is None:
            msg = f"layer {self.layer}: the model keeps a recurrence before it has seen a token"
            raise ContractError(msg)
        kept = buffer.at(self._slot)
        if (kept.shape, kept.dtype) != (values.shape, values.dtype):
            msg = (
                f"layer {self.layer}: the pool holds states {list(kept.shape)} in {kept.dtype}, the model computed "
                f"{list(values.shape)} in {values.dtype}; run it in the dtype of its configuration"
            )
            raise ContractError(msg)
        return kept.copy_(values)

    def _kept_recurrence(self) -> StateBuffer:
        if self._state.recurrence is None:
            msg = f"layer {self.layer}: the pools keep no recurrence for it, and the model has one"
            raise ContractError(msg)
        return self._state.recurrence

    # ---- checks -------------------------------------------------------------------------------

    def _check_index(self, state_idx: int) -> None:
        if state_idx:
            msg = f"layer {self.layer}: the pools keep one state of each kind, the model asks for number {state_idx}"
            raise ContractError(msg)

    def _check_inputs(self, conv_states: torch.Tensor, conv_kernel_size: int | None) -> None:
        batch, _, tokens = conv_states.shape
        window = self._state.conv.shape[1]
        if batch != 1:
            msg = f"layer {self.layer}: a paged cache holds one sequence, got a batch of {batch}"
            raise ContractError(msg)
        if conv_kernel_size != window:
            msg = f"layer {self.layer}: the pools keep a window of {window} tokens, the model reads {conv_kernel_size}"
            raise ContractError(msg)
        if self.is_fed_by_token and self._slot is not None and tokens > 1:
            msg = (
                f"layer {self.layer}: in a pass over {tokens} tokens this model forgets the state of those before; "
                f"feed it token by token"
            )
            raise ContractError(msg)

    # ---- what transformers' own layers do besides ---------------------------------------------

    @override
    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Do nothing: the pools were allocated before the first token."""

    @override
    def get_max_length(self) -> int:
        return -1

    @override
    def reset(self) -> None:
        refuse_to_move(self.layer, "reset; start a new request")

    @override
    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        refuse_to_move(self.layer, "beam search")

    @override
    def offload(self) -> None:
        refuse_to_move(self.layer, "offloading to host memory; attach a store")

    @override
    def prefetch(self) -> None:
        refuse_to_move(self.layer, "offloading to host memory; attach a store")

    @override
    def activate_past_recording(self) -> None:
        refuse_to_move(self.layer, "taking tokens back")

    @override
    def crop(self, tokens_to_remove: int) -> None:
        refuse_to_move(self.layer, "taking tokens back")
