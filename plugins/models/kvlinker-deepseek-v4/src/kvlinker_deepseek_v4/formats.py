"""How large a row of each part of a DeepSeek V4 cache is, as its value formats say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvlinker.description import Fact, KVCacheDescription
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.layouts import integer_fact, require_facts, text_fact
from kvlinker_deepseek_v4.mappings import C128_RATIO

__all__ = ["V4Formats", "read_formats"]

FAMILY = "deepseek_v4"
FACTS = (
    "kv_format",
    "indexer_format",
    "state_format",
    "state_ring_rows",
    "swa_page_size",
    "swa_physical_page_size",
    "unified_kv",
    "hisparse",
    "c128_state_persistent",
    "shared_indexer_format",
)
"""What a description states; another fact may change what the bytes mean."""
HEAD_VALUES, INDEX_VALUES = 512, 128
"""Values of a KV head and of an index key (config.json of DeepSeek V4: head_dim, index_head_dim)."""
STATE_VALUES_PER_VALUE = 4
"""A state row is [kv Ca, kv Cb, score Ca, score Cb]: the compressor's two branches, value and score of each."""

KV_ROW_BYTES: Mapping[str, int] = {
    # 448 e4m3 values and 64 rope values in bf16, then 7 ue8m0 scales and a pad byte.
    "fp8_e4m3fn_ue8m0": 448 + 64 * 2 + 8,
    "bf16": HEAD_VALUES * 2,
}
KV_PAGE_ALIGNMENT: Mapping[str, int] = {
    # Block-split: all data rows of a page, then all its scale rows, padded to whole data rows.
    "fp8_e4m3fn_ue8m0": 448 + 64 * 2,
    "bf16": 1,
}
INDEXER_BYTES: Mapping[str, tuple[int, ...]] = {
    # Values and scales of one key: in one buffer where fused, in two where split.
    "fp8_fused": (INDEX_VALUES + 4,),
    "fp4_fused": (INDEX_VALUES // 2 + 4,),
    "fp4_split": (INDEX_VALUES // 2, 4),
}
SHARED_INDEXER_ROWS: Mapping[str, tuple[int, int]] = {
    # V4.1's keys of ratios 1 and 2, rounded to the nearest even value: rows of 64, their values and then their scales.
    "fp4_fused_rne_rows64": (64, INDEX_VALUES // 2 + 4),
}
"""Format to the keys in a row of the engine's, and the bytes of a key with its scales."""
STATE_VALUE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2}
STATE_RING_ROWS = (8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class V4Formats:
    """What a V4 cache's values are, and so how many bytes its rows have."""

    page_size: int
    """Slots in a page, a multiple of 128: no compressed entry is open at a page's end."""
    kv_format: str = "fp8_e4m3fn_ue8m0"
    indexer_format: str = "fp8_fused"
    state_format: str = "fp32"
    state_ring_rows: int = 8
    """Rows of one page's state ring."""
    shared_indexer_format: str | None = None
    """Of the index keys of ratios 1 and 2; None where no layer has such a ratio."""

    def __post_init__(self) -> None:
        if self.page_size < C128_RATIO or self.page_size % C128_RATIO:
            msg = (
                f"DeepSeek V4 needs pages of a multiple of {C128_RATIO} slots, got {self.page_size}: an entry of "
                f"{C128_RATIO} tokens would be open at a page's end, and its state is not kept"
            )
            raise ContractError(msg)
        _check_known("kv_format", self.kv_format, KV_ROW_BYTES)
        _check_known("indexer_format", self.indexer_format, INDEXER_BYTES)
        _check_known("state_format", self.state_format, STATE_VALUE_BYTES)
        _check_known("state_ring_rows", self.state_ring_rows, STATE_RING_ROWS)
        if self.shared_indexer_format is not None:
            _check_known("shared_indexer_format", self.shared_indexer_format, SHARED_INDEXER_ROWS)

    def kv_page_bytes(self, ratio: int = 1) -> int:
        """Return the bytes of a page and layer of KV entries, each of `ratio` tokens."""
        size = self.page_size // ratio * KV_ROW_BYTES[self.kv_format]
        alignment = KV_PAGE_ALIGNMENT[self.kv_format]
        return -(-size // alignment) * alignment

    def indexer_page_bytes(self, ratio: int) -> tuple[int, ...]:
        """Return the bytes of a page and layer in each of the indexer's buffers."""
        keys = self.page_size // ratio
        return tuple(keys * size for size in INDEXER_BYTES[self.indexer_format])

    def shared_indexer_rows(self, ratio: int) -> tuple[int, int]:
        """Return the rows in a page of index keys that layers share, each of `ratio` tokens, and the bytes of a row.

        Raises:
            ContractError: the format is not stated, or a page has no whole number of the engine's rows of keys.
        """
        if self.shared_indexer_format is None:
            msg = (
                f"DeepSeek V4: there are layers of compress ratio {ratio}, and fact 'shared_indexer_format' is "
                f"missing; sizes do not tell it, so the engine adapter must state it"
            )
            raise ContractError(msg)
        keys_in_a_row, key_bytes = SHARED_INDEXER_ROWS[self.shared_indexer_format]
        keys = self.page_size // ratio
        if keys % keys_in_a_row:
            msg = (
                f"DeepSeek V4: a page of {self.page_size} slots has {keys} index keys of compress ratio {ratio}, no "
                f"whole rows of {keys_in_a_row}; use pages of a multiple of {keys_in_a_row * ratio} slots"
            )
            raise ContractError(msg)
        return keys // keys_in_a_row, keys_in_a_row * key_bytes

    def state_row_bytes(self, values: int) -> int:
        """Return the bytes of one ring row of a compressor whose output has that many values."""
        return STATE_VALUES_PER_VALUE * values * STATE_VALUE_BYTES[self.state_format]


def _check_known(name: str, value: Fact, known: Collection[Fact]) -> None:
    if value not in known:
        names = ", ".join(repr(item) for item in known)
        msg = f"DeepSeek V4: {name} {value!r} is not laid out here; known are {names}"
        raise UnsupportedKVCacheError(msg)


def read_formats(description: KVCacheDescription) -> V4Formats:
    """Return the formats that a description states.

    Raises:
        ContractError: a fact is missing, or page sizes differ; the message has both.
        UnsupportedKVCacheError: a format, or a way of keeping the cache, is not laid out here.
    """
    require_facts(description, known=FACTS)
    _refuse_other_ways(description)
    _check_swa_pages(description)
    return V4Formats(
        page_size=description.page_size,
        kv_format=text_fact(description, "kv_format"),
        indexer_format=text_fact(description, "indexer_format"),
        state_format=text_fact(description, "state_format"),
        state_ring_rows=integer_fact(description, "state_ring_rows"),
        shared_indexer_format=(
            text_fact(description, "shared_indexer_format")
            if "shared_indexer_format" in description.facts
            else None
        ),
    )


def _refuse_other_ways(description: KVCacheDescription) -> None:
    if integer_fact(description, "unified_kv", known=(0, 1)):
        msg = (
            "unified KV keeps one row in two buffers (in fp8, 512 B of values and 128 B of rope), and one without "
            "the other is wrong text; run the engine without it until kvlinker-deepseek-v4 lays out both"
        )
        raise UnsupportedKVCacheError(msg)
    if integer_fact(description, "hisparse", known=(0, 1)):
        msg = (
            "HiSparse moves C4 pages to host memory by itself, so that a device row may hold no page; "
            "run the engine without it until kvlinker-deepseek-v4 lays out pages in two places"
        )
        raise UnsupportedKVCacheError(msg)
    if integer_fact(description, "c128_state_persistent", known=(0, 1)):
        msg = (
            "the C128 state covers the unfinished chunk of 128 tokens alone, which is empty at a page's end; "
            "describe it as not persistent (c128_state_persistent 0) and leave its buffers out"
        )
        raise UnsupportedKVCacheError(msg)


def _check_swa_pages(description: KVCacheDescription) -> None:
    logical = integer_fact(description, "swa_page_size")
    physical = integer_fact(description, "swa_physical_page_size")
    if logical != description.page_size:
        msg = (
            f"swa_page_size is {logical} and the prefix tree has pages of {description.page_size} slots; "
            f"make the engine's page sizes equal"
        )
        raise ContractError(msg)
    if physical != logical:
        msg = (
            f"the SWA pool's physical pages have {physical} slots and its logical ones {logical}; a stored page "
            f"would be another one's bytes, so make the engine's SWA page sizes equal"
        )
        raise ContractError(msg)
