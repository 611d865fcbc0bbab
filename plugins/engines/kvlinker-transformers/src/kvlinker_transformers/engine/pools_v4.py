"""DeepSeek V4 pools: sliding window, entries of 4 and of 128 tokens, and the states that compress them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from typing_extensions import override

from kvlinker.description import Fact, IndexerKind, LayerFacts, LogicalPool
from kvlinker.errors import ContractError
from kvlinker_transformers.engine.buffers import PageBuffer
from kvlinker_transformers.engine.codecs import IndexKeyRows, PlainRows, RowCodec, V4Rows
from kvlinker_transformers.engine.geometry import V4Geometry
from kvlinker_transformers.pools import KV, SWA, PagedPools

__all__ = ["C4_RATIO", "C128_RATIO", "STATE_RING_ROWS", "C4Buffers", "C128Buffers", "V4Pools"]

C4_RATIO = 4
C128_RATIO = 128
STATE_RING_ROWS = 8
"""Last tokens of each window page whose unfinished entry is kept: the open group of 4 and the one before it."""
_SPARE_STATE_ROWS = 1
"""State buffers end in a row that belongs to no page."""
_STATE_DTYPE = torch.float32
_FUSED_INDEXER = "fp8_fused"
"""Keys and scales of a page in one row, as opposed to a buffer for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class C4Buffers:
    """What a layer of ratio 4 keeps beside its window."""

    kv: PageBuffer
    indexer: PageBuffer
    state: PageBuffer
    """Ring rows of [kv Ca, kv Cb, score Ca, score Cb], scores without position bias."""
    indexer_state: PageBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class C128Buffers:
    """What a layer of ratio 128 keeps beside its window."""

    kv: PageBuffer
    scratch: PageBuffer
    """Open entry of the running request, [kv, score] for each token; nothing is open at a page's end."""


class V4Pools(PagedPools):
    """DeepSeek V4 (Flash, Pro): index spaces `kv` for compressed entries, `swa` for windows and states."""

    family = "deepseek_v4"
    is_replicated = True

    def __init__(
        self,
        geometry: V4Geometry,
        *,
        pages: int,
        swa_pages: int,
        device: torch.device,
        page_size: int = 256,
        row_codec: RowCodec | None = None,
        index_codec: RowCodec | None = None,
    ) -> None:
        """Allocate the buffers.

        Args:
            geometry: shape of the model's KV cache.
            pages: pages of the index space `kv`, the reserved one included.
            swa_pages: pages of the index space `swa`, the reserved one included.
            device: where the memory is.
            page_size: slots in a page, a multiple of 128, so that no entry is open at a page's end.
            row_codec: layout of window and compressed rows; fp8 with ue8m0 scales by default.
            index_codec: layout of index keys; fp8 with one fp32 scale by default.

        Raises:
            ContractError: entries would be open at a page's end, or the geometry does not fit the layout.
        """
        if page_size % C128_RATIO or page_size < C128_RATIO:
            msg = (
                f"page_size must be a multiple of {C128_RATIO}, got {page_size}: an entry of {C128_RATIO} tokens "
                f"would be open at a page's end, and its state is kept for running requests alone"
            )
            raise ContractError(msg)
        super().__init__(page_size=page_size, pages={KV: pages, SWA: swa_pages}, device=device)
        self.geometry = geometry
        self._rows = row_codec or V4Rows(geometry.head_dim)
        self._index_rows = index_codec or IndexKeyRows(geometry.index_dim)
        self.swa = tuple(self._buffer(self._rows, SWA, page_size) for _ in geometry.compress_ratios)
        self.c4 = {i: self._c4() for i in self._layers_of(C4_RATIO)}
        self.c128 = {i: self._c128() for i in self._layers_of(C128_RATIO)}

    def _layers_of(self, ratio: int) -> tuple[int, ...]:
        return tuple(i for i, r in enumerate(self.geometry.compress_ratios) if r == ratio)

    def _buffer(self, codec: RowCodec, space: str, rows: int) -> PageBuffer:
        return PageBuffer(codec, pages=self.pages[space], rows_per_page=rows, device=self.device)

    def _ring(self, width: int) -> PageBuffer:
        return PageBuffer(
            PlainRows(4 * width, _STATE_DTYPE),
            pages=self.pages[SWA],
            rows_per_page=STATE_RING_ROWS,
            device=self.device,
            spare_rows=_SPARE_STATE_ROWS,
        )

    def _c4(self) -> C4Buffers:
        entries = self.page_size // C4_RATIO
        return C4Buffers(
            kv=self._buffer(self._rows, KV, entries),
            indexer=self._buffer(self._index_rows, KV, entries),
            state=self._ring(self.geometry.head_dim),
            indexer_state=self._ring(self.geometry.index_dim),
        )

    def _c128(self) -> C128Buffers:
        return C128Buffers(
            kv=self._buffer(self._rows, KV, self.page_size // C128_RATIO),
            scratch=PageBuffer(
                PlainRows(2 * self.geometry.head_dim, _STATE_DTYPE),
                pages=1,
                rows_per_page=C128_RATIO,
                device=self.device,
            ),
        )

    @property
    @override
    def layers(self) -> tuple[LayerFacts, ...]:
        return tuple(
            LayerFacts(
                layer=i,
                global_layer=i,
                compress_ratio=ratio,
                indexer=IndexerKind.OWN if ratio == C4_RATIO else IndexerKind.NONE,
            )
            for i, ratio in enumerate(self.geometry.compress_ratios)
        )

    @property
    @override
    def logical_pools(self) -> tuple[LogicalPool, ...]:
        return (
            LogicalPool(name=KV, page_size=self.page_size),
            LogicalPool(name=SWA, page_size=self.page_size, window=self.geometry.window),
        )

    @property
    def _indexer_format(self) -> str:
        codec = self._index_rows
        return _FUSED_INDEXER if isinstance(codec, IndexKeyRows) else codec.value_format

    @property
    @override
    def facts(self) -> Mapping[str, Fact]:
        return {
            "kv_format": self._rows.value_format,
            "indexer_format": self._indexer_format,
            "state_ring_rows": STATE_RING_ROWS,
            "state_format": "fp32",
            "swa_page_size": self.page_size,
            "swa_physical_page_size": self.page_size,
            "unified_kv": 0,
            "hisparse": 0,
            "c128_state_persistent": 0,
        }

    @override
    def tensors(self) -> Mapping[str, tuple[torch.Tensor, ...]]:
        c4, c128 = self.c4.values(), self.c128.values()
        return {
            "swa_kv": tuple(buffer.page_rows for buffer in self.swa),
            "c4_kv": tuple(layer.kv.page_rows for layer in c4),
            "c4_indexer": tuple(layer.indexer.page_rows for layer in c4),
            "c4_state": tuple(layer.state.rows for layer in c4),
            "c4_indexer_state": tuple(layer.indexer_state.rows for layer in c4),
            "c128_kv": tuple(layer.kv.page_rows for layer in c128),
        }
