"""At a page's end no group of tokens that share an index key is open: SGLang's own plans read none and leave none."""

from __future__ import annotations

import pytest
import torch
from indexed_pools import folded_pool
from sglang.srt.layers.attention.dsa import kpool_plan
from sglang.srt.layers.attention.qsa.metadata import build_pending_ring_slots
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

REQUEST = 3


def ring_rows(start: int, length: int, ratio: int) -> set[int]:
    """Return where QSA keeps keys of a request whose tokens [start, start + length) are computed."""
    rows = build_pending_ring_slots(
        token_to_batch_idx=torch.zeros(length, dtype=torch.int64),
        req_pool_indices=torch.tensor([REQUEST]),
        sequence_lengths=torch.tensor([start + length]),
        logical_positions=torch.arange(start, start + length),
        compress_ratio=ratio,
        is_extend=True,
    )
    return set(rows.tolist())


@pytest.mark.parametrize("ratio", [2, 4, 8])
@pytest.mark.parametrize("pages", [1, 3])
def test_qsa_keeps_no_key_of_a_request_that_ends_with_a_page(ratio: int, pages: int) -> None:
    nobodys = set(range(ratio))

    assert ring_rows(16, 16 * pages, ratio) <= nobodys
    assert not ring_rows(16, 16 * pages + 1, ratio) <= nobodys


@pytest.mark.parametrize("kpool", [2, 4, 8])
def test_a_folded_index_takes_nothing_from_before_the_end_of_a_page(kpool: int) -> None:
    pool = folded_pool(kpool=kpool)
    assert isinstance(pool, DSATokenToKVPool)
    end = 3 * pool.page_size

    behind = kpool_plan._decompose_compress(end, 2 * kpool + 1, kpool)  # noqa: SLF001  # SGLang's plan of an extend
    within = kpool_plan._decompose_compress(end + 1, 2 * kpool + 1, kpool)  # noqa: SLF001  # the control

    # `first_slot` is how many keys the first group takes from those that the request kept.
    assert (behind.first_slot, behind.base_pool * kpool) == (0, end)
    assert within.first_slot == 1
    assert kpool_plan._decompose_compress(end, pool.page_size, kpool).tail_n_write == 0  # noqa: SLF001  # the same
