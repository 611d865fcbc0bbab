"""What is copied and summed in one pass is what was there, and its XXH3, with registers of every width."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

RANGES = 2
"""In one call at most."""


class _Functions(ctypes.Structure):
    """`struct fused`."""

    _fields_ = [  # type: ignore[mutable-override]  # ctypes takes any sequence of pairs
        ("copy", ctypes.CFUNCTYPE(None, ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_size_t)),
        (
            "sum_copy",
            ctypes.CFUNCTYPE(
                None, ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_size_t, ctypes.c_void_p
            ),
        ),
    ]


FLAGS = {256: "avx2", 512: "avx512f"}
SHORTEST, LONGEST = 241, 5000
GUARD = 64


@cache
def fused_by(bits: int) -> _Functions | None:
    """Return the compiled functions; None where the processor has none, which the kernel has to confirm."""
    found = importlib.util.find_spec("kvlinker_native.ranges")
    assert found is not None
    assert found.origin is not None
    choose = ctypes.CDLL(found.origin).kvlinker_fused_by
    choose.restype = ctypes.POINTER(_Functions)
    functions = choose(bits)
    if not functions:
        assert FLAGS.get(bits, "") not in Path("/proc/cpuinfo").read_text().split()
        return None
    found_functions: _Functions = functions.contents
    return found_functions


def aligned(size: int, offset: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return zeros that begin so many bytes behind a multiple of 64."""
    block = np.zeros(size + 128, dtype=np.uint8)
    first = -block.ctypes.data % 64 + offset
    return block[first : first + size]


@pytest.mark.parametrize("bits", FLAGS)
@pytest.mark.parametrize("is_summed", [False, True])
@given(
    size=st.integers(SHORTEST, LONGEST),
    places=st.lists(
        st.tuples(st.sampled_from((0, 16, 32, 48)), st.integers(0, 63)),
        min_size=1,
        max_size=RANGES,
    ),
    seed=st.integers(0, 1 << 32),
)
@example(size=1024, places=[(0, 0)], seed=0)
@example(size=1025, places=[(0, 1), (0, 0)], seed=1)
@example(size=1088, places=[(16, 0), (32, 1)], seed=2)
@example(size=2048, places=[(32, 63), (0, 0)], seed=3)
@example(size=SHORTEST, places=[(48, 7), (16, 9)], seed=4)
def test_every_byte_is_copied_and_summed_and_none_beside_them(
    bits: int, *, is_summed: bool, size: int, places: list[tuple[int, int]], seed: int
) -> None:
    functions = fused_by(bits)
    if functions is None:
        return
    random = np.random.default_rng(seed)
    targets = [aligned(size + GUARD, at) for at, _ in places]
    sources = [aligned(size, at) for _, at in places]
    for source in sources:
        source[:] = random.integers(0, 256, size)
    addresses = [
        (ctypes.c_void_p * len(places))(*(block.ctypes.data for block in blocks))
        for blocks in (targets, sources)
    ]
    sums = (ctypes.c_uint64 * len(places))()

    if is_summed:
        functions.sum_copy(len(places), *addresses, size, sums)
        assert list(sums) == [xxhash.xxh3_64_intdigest(source.tobytes()) for source in sources]
    else:
        functions.copy(len(places), *addresses, size)

    assert [target[:size].tobytes() for target in targets] == [each.tobytes() for each in sources]
    assert not any(target[size:].any() for target in targets)


def test_other_widths_are_not_to_be_had() -> None:
    assert fused_by(128) is None
