"""A probe writes one object when a store is opened, and reads it both ways: a client may not be able, or be slow."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import StoreError
from kvlinker_mooncake.codes import Code
from kvlinker_mooncake.parts import CallPart
from kvlinker_mooncake.state import StoreState

__all__ = ["reads_by_layer"]

_log = logging.getLogger(__name__)
_RANGES = 16
_RANGE_BYTES = 64 << 10
_ROUNDS = 3
_MOST = 3.0
"""Layer by layer may take so many times as long: the engine begins with the first layer, and waits for a whole page."""


def reads_by_layer(state: StoreState) -> bool:
    """Return whether reads go layer by layer; without a word from a cluster that is empty or slow, they do not.

    Raises:
        StoreTimeoutError: the master does not answer, or a segment that has the object.
    """
    size = _RANGES * _RANGE_BYTES
    name = f"{state.options.prefix}-probe/{os.urandom(16).hex()}"
    with state.blocks.block(2 * size) as block:
        block[:size] = np.frombuffer(os.urandom(_RANGE_BYTES) * _RANGES, dtype=np.uint8)
        source = _part(name, block[:size], range(_RANGES))
        if not _is_stored(state, source, size):
            return False
        try:
            verdict = _compare(state, name, block[size:])
            if verdict and not np.array_equal(block[:size], block[size:]):
                msg = f"{state.client.calls}: ranged gets answered with other bytes than were put"
                raise StoreError(msg)
            return verdict
        finally:
            with suppress(
                StoreError
            ):  # a master that is gone has forgotten it, and what went wrong is told
                # Nobody else knows the name: no reader's memory is given away.
                state.client.remove([name], force=True)


def _is_stored(state: StoreState, source: CallPart, size: int) -> bool:
    (code,) = state.client.start_writes(source.names, size)
    if code == Code.DONE:
        (moved,) = state.client.put_ranges(source, from_pools=False)
        if moved == size:
            (code,) = state.client.end_writes(source.names)
            if code == Code.DONE:
                return True
        state.client.revoke(source.names)
        code = moved
    _log.warning(
        "%s: nothing could be put (code %s), so that reads are not measured: whole objects are read; has the "
        "cluster a segment with room? open the store again, or set reads",
        state.client.calls,
        code,
    )
    return False


def _compare(state: StoreState, name: str, target: NDArray[np.uint8]) -> bool:
    """Return whether ranges can be read, and nearly as quickly as whole objects."""
    state.client.keep_reads([name])
    try:
        (code,) = state.client.start_reads([name])
        if code != Code.DONE:
            return False
        # All in one question: to hand each over to another thread would take longer than the quickest ones do.
        return state.client.calls.ask(
            "probe",
            lambda: _is_nearly_as_quick(state, name, target),
            seconds=state.options.transfer_seconds,
        )
    finally:
        state.client.end_reads([name])


def _is_nearly_as_quick(state: StoreState, name: str, target: NDArray[np.uint8]) -> bool:
    whole = _part(name, target, range(_RANGES))
    quickest = {True: float("inf"), False: float("inf")}
    for _ in range(_ROUNDS):
        for is_whole in (True, False):
            target[:] = 0  # what comes is looked at in the end
            began = time.monotonic()
            if not _reads(state, name, whole, target, is_whole=is_whole):
                return False
            quickest[is_whole] = min(quickest[is_whole], time.monotonic() - began)
    return quickest[False] <= _MOST * quickest[True]


def _reads(
    state: StoreState, name: str, whole: CallPart, target: NDArray[np.uint8], *, is_whole: bool
) -> bool:
    if is_whole:
        return state.client.read_here(whole, is_whole=True) == whole.expected
    return all(
        state.client.read_here(_part(name, target, [number]), is_whole=False) == [_RANGE_BYTES]
        for number in range(_RANGES)
    )


def _part(name: str, memory: NDArray[np.uint8], ranges: Sequence[int]) -> CallPart:
    offsets = [number * _RANGE_BYTES for number in ranges]
    part = CallPart(owner=memory)
    pointers = [memory.ctypes.data + offset for offset in offsets]
    part.add(0, name, (pointers, [_RANGE_BYTES] * len(offsets), offsets))
    return part
