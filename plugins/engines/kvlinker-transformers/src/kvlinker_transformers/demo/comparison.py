"""Comparison: what must hold between the process that read a text and the one that restored it."""

from __future__ import annotations

import numpy as np

from kvlinker_transformers.demo.records import Logits, RunRecord

__all__ = ["differences"]


def differences(
    read: tuple[RunRecord, Logits], continued: tuple[RunRecord, Logits]
) -> tuple[str, ...]:
    """Return what is not as it should be: every whole page restored, every logit the same number, every token too."""
    (cold, cold_logits), (warm, warm_logits) = read, continued
    found = []
    whole = (cold.prompt_tokens - 1) // cold.page_size * cold.page_size
    if warm.cached_tokens != whole:
        found.append(f"{warm.cached_tokens:,} of {whole:,} tokens were restored")
    if cold_logits.shape != warm_logits.shape:
        found.append(f"logits have the shapes {cold_logits.shape} and {warm_logits.shape}")
    # NaN equals nothing, itself included: a row that was never filled cannot pass.
    elif not np.array_equal(cold_logits, warm_logits):
        rows = np.flatnonzero((cold_logits != warm_logits).any(axis=1))
        furthest = np.abs(cold_logits - warm_logits).max()
        found.append(f"logits differ from token {rows[0] + 1} on, by up to {furthest:.3g}")
    if cold.tokens != warm.tokens:
        found.append("other tokens were written")
    return tuple(found)
