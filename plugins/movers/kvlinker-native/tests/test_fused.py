"""What is copied and summed in one pass is what was there, and its XXH3, with registers of every width."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

Fused = Callable[[int, int, int], int]
"""Of the addresses of target and source, and the size."""

FLAGS = {256: "avx2", 512: "avx512f"}
SHORTEST, LONGEST = 241, 5000
GUARD = 64


@cache
def fused_by(bits: int) -> Fused | None:
    """Return the compiled function; None where the processor has none, which the kernel has to confirm."""
    found = importlib.util.find_spec("kvlinker_native.ranges")
    assert found is not None
    assert found.origin is not None
    choose = ctypes.CDLL(found.origin).kvlinker_fused_by
    choose.restype = ctypes.c_void_p
    address = choose(bits)
    if address is None:
        assert FLAGS.get(bits, "") not in Path("/proc/cpuinfo").read_text().split()
        return None
    return ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
        address
    )


def aligned(size: int, offset: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return zeros that begin so many bytes behind a multiple of 64."""
    block = np.zeros(size + 128, dtype=np.uint8)
    first = -block.ctypes.data % 64 + offset
    return block[first : first + size]


@pytest.mark.parametrize("bits", FLAGS)
@given(
    size=st.integers(SHORTEST, LONGEST),
    at=st.sampled_from((0, 16, 32, 48)),
    source_at=st.integers(0, 63),
    seed=st.integers(0, 1 << 32),
)
@example(size=1024, at=0, source_at=0, seed=0)
@example(size=1025, at=0, source_at=1, seed=1)
@example(size=1088, at=16, source_at=0, seed=2)
@example(size=2048, at=32, source_at=63, seed=3)
@example(size=SHORTEST, at=48, source_at=7, seed=4)
def test_every_byte_is_copied_and_summed_and_none_beside_them(
    bits: int, size: int, at: int, source_at: int, seed: int
) -> None:
    fused = fused_by(bits)
    if fused is None:
        return
    source = aligned(size, source_at)
    source[:] = np.random.default_rng(seed).integers(0, 256, size)
    target = aligned(size + GUARD, at)

    found = fused(target.ctypes.data, source.ctypes.data, size)

    assert found == xxhash.xxh3_64_intdigest(source.tobytes())
    assert target[:size].tobytes() == source.tobytes()
    assert not target[size:].any()


def test_other_widths_are_not_to_be_had() -> None:
    assert fused_by(128) is None
