"""DeepSeek V4 cache layers: a window in every layer, compressed entries and their open groups in some.

transformers calls an entry's inputs (kv, gate); a pool's state rows call the gate a score.
"""

from __future__ import annotations

from typing import Protocol

import torch
from typing_extensions import override

from kvlinker_transformers.engine.buffers import PageBuffer
from kvlinker_transformers.engine.layers import SlidingLayer
from kvlinker_transformers.engine.pools_v4 import (
    C4_RATIO,
    C128_RATIO,
    STATE_RING_ROWS,
    C4Buffers,
    C128Buffers,
    V4Pools,
)
from kvlinker_transformers.engine.sequence import PagedSequence

__all__ = ["C4Layer", "C128Layer", "V4Attention", "WindowLayer"]

_COMPRESSOR = "compressor"
_INDEXER = "indexer"


class _Biased(Protocol):
    @property
    def position_bias(self) -> torch.Tensor: ...


class _C4Compressor(_Biased, Protocol):
    @property
    def indexer(self) -> _Biased: ...


class V4Attention(Protocol):
    """What a ratio-4 layer needs of its attention module: the biases that are not part of the state."""

    @property
    def compressor(self) -> _C4Compressor:
        """The module that folds 4 tokens into an entry."""
        ...


class WindowLayer(SlidingLayer):
    """The sliding window, in which a key is its own value."""

    def __init__(self, layer: int, sequence: PagedSequence, pools: V4Pools) -> None:
        super().__init__(layer, sequence, pools.geometry.window)
        self._rows = pools.swa[layer]

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys [1, 1, T, head_dim]; return those of the window and the new ones, as keys and values."""
        before = self.advance(key_states)
        self._rows.write(self.sequence.swa, before, key_states[0, 0])
        first = self.first_seen(before)
        rows = self._rows.read(self.sequence.swa, first, self.tokens, key_states.dtype)[None, None]
        return rows, rows


class C128Layer(WindowLayer):
    """A window, and one entry for every 128 tokens; the open entry's inputs are scratch of the request."""

    def __init__(
        self, layer: int, sequence: PagedSequence, pools: V4Pools, buffers: C128Buffers
    ) -> None:
        super().__init__(layer, sequence, pools)
        self._buffers = buffers
        self._seen = 0
        self._entries = 0

    @override
    def resume(self, tokens: int) -> None:
        super().resume(tokens)
        self._seen = tokens
        self._entries = tokens // C128_RATIO

    def store_compression_weights(
        self,
        name: str,  # noqa: ARG002 - transformers names the entry kind, and there is one here
        kv: torch.Tensor,
        gate: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Append inputs of entries [1, T, head_dim]; return those of the entries now complete, and their position."""
        first = self._entries * C128_RATIO
        open_inputs = self._scratch(torch.arange(first, self._seen, device=kv.device))
        before, self._seen = self._seen, self._seen + kv.shape[1]
        kept = torch.arange(max(before, self._seen - C128_RATIO), self._seen, device=kv.device)
        inputs = torch.cat([kv[0], gate[0]], dim=1)
        self._buffers.scratch.write_at(*self._place(kept), inputs[kept - before])
        complete = _complete(open_inputs, inputs, C128_RATIO)
        return complete[None, :, : kv.shape[2]], complete[None, :, kv.shape[2] :], first

    @staticmethod
    def _place(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(positions), positions % C128_RATIO

    def _scratch(self, positions: torch.Tensor) -> torch.Tensor:
        return self._buffers.scratch.read_at(*self._place(positions), torch.float32)

    def update_compressor_states(
        self,
        name: str,  # noqa: ARG002 - transformers names the entry kind, and there is one here
        compressed: torch.Tensor,
    ) -> torch.Tensor:
        """Append entries [1, E, head_dim] and return all of them from the pools."""
        before, self._entries = self._entries, self._entries + compressed.shape[1]
        return _append_entries(self._buffers.kv, self.sequence, before, compressed)


class C4Layer(WindowLayer):
    """A window, and an entry and an index key for every 4 tokens.

    An entry is made of its own 4 tokens (Cb) and of the 4 before them (Ca): a ring in each window page keeps the
    inputs of the page's last 8 tokens.
    """

    def __init__(
        self,
        layer: int,
        sequence: PagedSequence,
        pools: V4Pools,
        buffers: C4Buffers,
        attention: V4Attention,
    ) -> None:
        super().__init__(layer, sequence, pools)
        compressor = attention.compressor
        self._rings = {_COMPRESSOR: buffers.state, _INDEXER: buffers.indexer_state}
        self._entry_rows = {_COMPRESSOR: buffers.kv, _INDEXER: buffers.indexer}
        self._bias = {
            _COMPRESSOR: compressor.position_bias,
            _INDEXER: compressor.indexer.position_bias,
        }
        self._seen = dict.fromkeys(self._rings, 0)
        self._entries = dict.fromkeys(self._rings, 0)
        self._previous: dict[str, torch.Tensor | None] = dict.fromkeys(self._rings)
        """Inputs of the 4 tokens before the first entry of this step."""

    @override
    def resume(self, tokens: int) -> None:
        super().resume(tokens)
        for name in self._rings:
            self._seen[name] = tokens
            self._entries[name] = tokens // C4_RATIO

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Append inputs of entries [1, T, 2 * width]; return those of the entries now complete, and their position."""
        first = self._entries[name] * C4_RATIO
        before = self._seen[name]
        # Read before the ring is written: the new tokens may take the rows of these.
        earlier = self._ring(
            name, torch.arange(max(0, first - C4_RATIO), before, device=kv.device), kv.dtype
        )
        overlap = C4_RATIO if first else 0
        self._previous[name] = earlier[:overlap] if overlap else None
        inputs = torch.cat([kv[0], gate[0]], dim=1)
        self._keep(name, before, inputs)
        complete = _complete(earlier[overlap:], inputs, C4_RATIO)
        return complete[None, :, : kv.shape[2]], complete[None, :, kv.shape[2] :], first

    def _keep(self, name: str, before: int, inputs: torch.Tensor) -> None:
        """Write the inputs of the last tokens of the sequence and of each page that ends within them."""
        after = self._seen[name] = before + len(inputs)
        positions = torch.arange(before, after, device=inputs.device)
        page_size = self.sequence.page_size
        last = positions >= after - STATE_RING_ROWS
        kept = positions[last | (positions % page_size >= page_size - STATE_RING_ROWS)]
        self._rings[name].write_at(*self._place(kept), inputs[kept - before])

    def _place(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pages, _ = self.sequence.swa.locate_each(positions, self.sequence.page_size)
        return pages, positions % STATE_RING_ROWS

    def _ring(self, name: str, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._rings[name].read_at(*self._place(positions), dtype)

    def update_overlap_state(
        self,
        name: str,
        chunk_kv: torch.Tensor,  # noqa: ARG002 - the ring keeps it already
        chunk_gate: torch.Tensor,  # noqa: ARG002 - the ring keeps it already
        head_dim: int,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return Ca of the 4 tokens before this step's first entry, [1, 4, head_dim] each; None at the very start."""
        previous = self._previous[name]
        if previous is None:
            return None, None
        score = previous[:, 2 * head_dim : 3 * head_dim] + self._bias[name][:, :head_dim]
        return previous[None, :, :head_dim], score[None]

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Append entries or index keys [1, E, width] and return all of them from the pools."""
        before = self._entries[name]
        self._entries[name] += compressed.shape[1]
        return _append_entries(self._entry_rows[name], self.sequence, before, compressed)


def _complete(open_inputs: torch.Tensor, inputs: torch.Tensor, ratio: int) -> torch.Tensor:
    """Return the inputs of whole entries: the open ones first, the unfinished rest cut."""
    everything = torch.cat([open_inputs.to(inputs.dtype), inputs])
    return everything[: len(everything) // ratio * ratio]


def _append_entries(
    rows: PageBuffer, sequence: PagedSequence, before: int, entries: torch.Tensor
) -> torch.Tensor:
    after = before + entries.shape[1]
    rows.write(sequence.kv, before, entries[0])
    return rows.read(sequence.kv, 0, after, entries.dtype).unsqueeze(0)
