"""Bytes that compress as KV values do."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def values(count: int, *, seed: int, spread: float = 1.0) -> NDArray[np.uint8]:
    """Return so many bfloat16 values of a normal distribution, as KV values are much like."""
    floats = np.random.default_rng(seed).normal(scale=spread, size=count).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
