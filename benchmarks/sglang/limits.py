"""Limits of any load: how long it takes to copy or to read as many bytes, by one thread and without looking at them."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from measuring import timed

__all__ = ["COPY", "READ", "limits"]

COPY = "one plain copy of as many bytes"
READ = "one read of a file of as many bytes, in the page cache"
_PIECE = 16 << 20


def limits(path: Path, size: int) -> Mapping[str, Callable[[], float]]:
    """Return what copies and what reads so many bytes; the file is made, and both return seconds."""
    source = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
    target = np.zeros(size, dtype=np.uint8)
    path.write_bytes(source.data)
    copy = functools.partial(
        ctypes.memmove,
        target.ctypes.data_as(ctypes.c_void_p),
        source.ctypes.data_as(ctypes.c_void_p),
        size,
    )
    return {COPY: timed(copy), READ: timed(functools.partial(_read, path, memoryview(target.data)))}


def _read(path: Path, target: memoryview) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for start in range(0, len(target), _PIECE):
            piece = target[start : start + _PIECE]
            if os.preadv(descriptor, [piece], start) != len(piece):
                msg = f"{path} is shorter than {len(target)} B"
                raise OSError(msg)
    finally:
        os.close(descriptor)
