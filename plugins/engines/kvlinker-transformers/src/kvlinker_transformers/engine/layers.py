"""Cache layers: what transformers reads and writes KV through; their only memory is the pools."""

from __future__ import annotations

from typing import NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin
from typing_extensions import override

from kvlinker.errors import ContractError, UnsupportedOperationError
from kvlinker_transformers.engine.buffers import RowBuffer
from kvlinker_transformers.engine.sequence import PagedSequence
from kvlinker_transformers.engine.tables import PageTable

__all__ = [
    "IndexedLayer",
    "LatentLayer",
    "MHALayer",
    "MHAWindowLayer",
    "PagedLayer",
    "SlidingLayer",
    "refuse_to_move",
]


def refuse_to_move(layer: int, what: str) -> NoReturn:
    """Refuse what no layer over pages can do.

    Args:
        layer: named in the message.
        what: was asked for.

    Raises:
        UnsupportedOperationError: always.
    """
    msg = f"layer {layer}: pages belong to one sequence and stay where they are, which rules out {what}"
    raise UnsupportedOperationError(msg)


class PagedLayer(CacheLayerMixin):
    """One layer of one sequence: counts tokens, and keeps everything else in the pools."""

    is_sliding = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped

    def __init__(self, layer: int, sequence: PagedSequence) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self.is_initialized = True
        self.layer = layer
        self.sequence = sequence
        self.tokens = 0
        """Tokens that the layer has seen or was given."""

    def resume(self, tokens: int) -> None:
        """Take the first `tokens` tokens as seen: their rows are in the pools, or will be behind the gate."""
        self.tokens = tokens

    def advance(self, states: torch.Tensor) -> int:
        """Pass the gate and count new tokens; return how many were seen before.

        Args:
            states: [1, heads, T, ...].

        Raises:
            ContractError: the batch holds more than one sequence.
        """
        if states.shape[0] != 1:
            msg = f"layer {self.layer}: a paged cache holds one sequence, got a batch of {states.shape[0]}"
            raise ContractError(msg)
        self.sequence.gate(self.layer)
        before = self.tokens
        self.tokens += states.shape[2]
        return before

    @override
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pools were allocated before the first token."""

    @override
    def get_seq_length(self) -> int:
        return self.tokens

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

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


class SlidingLayer(PagedLayer):
    """A layer that sees the last tokens alone: a query and those before it, a window of them together."""

    is_sliding = True

    def __init__(self, layer: int, sequence: PagedSequence, window: int) -> None:
        super().__init__(layer, sequence)
        self._window = window

    def first_seen(self, tokens: int) -> int:
        """Return the first token that is seen by the one behind `tokens` others."""
        return max(0, tokens - self._window + 1)

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self.first_seen(self.tokens)
        return self.tokens - first + query_length, first

    @override
    def get_max_length(self) -> int:
        return self._window


class MHALayer(PagedLayer):
    """K and V heads of every token."""

    def __init__(
        self, layer: int, sequence: PagedSequence, keys: RowBuffer, values: RowBuffer
    ) -> None:
        super().__init__(layer, sequence)
        self._buffers = (keys, values)

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append K and V, [1, heads, T, head_dim] each, and return all tokens' from the pools."""
        before, table = self.advance(key_states), self.sequence.kv
        keys, values = self._buffers
        return (
            _append_heads(keys, table, before, key_states, first=0),
            _append_heads(values, table, before, value_states, first=0),
        )


class MHAWindowLayer(SlidingLayer):
    """K and V heads of the tokens in a window."""

    def __init__(
        self,
        layer: int,
        sequence: PagedSequence,
        window: int,
        keys: RowBuffer,
        values: RowBuffer,
    ) -> None:
        super().__init__(layer, sequence, window)
        self._buffers = (keys, values)

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append K and V, [1, heads, T, head_dim] each; return those of the window and the new ones."""
        before, table = self.advance(key_states), self.sequence.swa
        first = self.first_seen(before)
        keys, values = self._buffers
        return (
            _append_heads(keys, table, before, key_states, first=first),
            _append_heads(values, table, before, value_states, first=first),
        )


def _append_heads(
    buffer: RowBuffer, table: PageTable, before: int, states: torch.Tensor, *, first: int
) -> torch.Tensor:
    """Write heads [1, heads, T, head_dim] behind `before` tokens; return those of the tokens from `first` on."""
    _, heads, count, head_dim = states.shape
    buffer.write(table, before, states[0].transpose(0, 1).flatten(1))
    rows = buffer.read(table, first, before + count, states.dtype)
    return rows.view(-1, heads, head_dim).transpose(0, 1).unsqueeze(0)


class LatentLayer(PagedLayer):
    """Latent and roped key of every token: MLA."""

    def __init__(self, layer: int, sequence: PagedSequence, latent: RowBuffer) -> None:
        super().__init__(layer, sequence)
        self._latent = latent

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append latents [1, 1, T, latent] and roped keys [1, 1, T, rope]; return all tokens' from the pools."""
        before = self.advance(key_states)
        row = torch.cat([key_states[0, 0], value_states[0, 0]], dim=1)
        self._latent.write(self.sequence.kv, before, row)
        rows = self._latent.read(self.sequence.kv, 0, self.tokens, key_states.dtype)
        latent, rope = rows.split([key_states.shape[-1], value_states.shape[-1]], dim=1)
        return latent[None, None], rope[None, None]


class IndexedLayer(LatentLayer):
    """Latents and the index keys that sparse attention selects by: DSA."""

    def __init__(
        self, layer: int, sequence: PagedSequence, latent: RowBuffer, index: RowBuffer
    ) -> None:
        super().__init__(layer, sequence, latent)
        self._index = index
        self._indexed = 0

    @override
    def resume(self, tokens: int) -> None:
        super().resume(tokens)
        self._indexed = tokens

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append index keys [1, T, index_dim] and return all tokens' from the pools."""
        # The order of this call and of update is the model's, so both must pass the gate.
        self.sequence.gate(self.layer)
        before = self._indexed
        self._indexed += indexer_key_states.shape[1]
        self._index.write(self.sequence.kv, before, indexer_key_states[0])
        keys = self._index.read(self.sequence.kv, 0, self._indexed, indexer_key_states.dtype)
        return keys.unsqueeze(0)
