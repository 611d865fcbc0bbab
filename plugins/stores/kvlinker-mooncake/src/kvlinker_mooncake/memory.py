"""Memory that the client may touch: the pools, as they were registered, and blocks of the store's own."""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import ContractError, StoreClosedError, StoreError, StoreTimeoutError
from kvlinker.plans import TransferPlan
from kvlinker.registration import RegisteredMemory
from kvlinker.spans import MemoryRegion
from kvlinker_mooncake.client import Client

__all__ = ["Blocks", "PoolMemory"]

_KEPT = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Index:
    """Where regions begin and end, in order; they do not overlap."""

    bases: list[int]
    ends: list[int]

    @classmethod
    def of(cls, regions: Sequence[MemoryRegion]) -> _Index:
        ordered = sorted((one.base_ptr, one.end_ptr) for one in regions)
        return cls(bases=[base for base, _ in ordered], ends=[end for _, end in ordered])

    def has(self, base: int, end: int) -> bool:
        """Whether memory lies within one region: within the last that begins before it."""
        at = bisect_right(self.bases, base) - 1
        return at >= 0 and end <= self.ends[at]


class PoolMemory:
    """The pools' regions, all registered or none."""

    def __init__(self, client: Client) -> None:
        self._lock = threading.Lock()
        self._index = _Index.of([])
        self._registered = RegisteredMemory(
            lambda region: client.register(region.base_ptr, region.size_bytes),
            lambda region: client.unregister(region.base_ptr),
        )

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """See Store.

        Raises:
            RegistrationError: see `RegisteredMemory.register`.
        """
        with self._lock:
            self._registered.register(regions)
            self._index = _Index.of(self._registered.regions)

    def unregister(self) -> None:
        """See Store."""
        with self._lock:
            self._registered.unregister()
            self._index = _Index.of(self._registered.regions)

    def check(self, plan: TransferPlan) -> None:
        """Do nothing for a plan whose memory is registered.

        A transport that needs no registration would not notice, and one that does would fail in the middle.

        Raises:
            ContractError: it is not.
        """
        spans = plan.spans
        ends = spans.base + (spans.span_rows - 1) * spans.stride + spans.row_bytes
        index = self._index
        for number, (base, end) in enumerate(zip(spans.base.tolist(), ends.tolist(), strict=True)):
            if not index.has(base, end):
                msg = (
                    f"pool {plan.pool!r}: the memory of {spans.labels[number]!r} is in none of "
                    f"{len(index.bases)} registered regions; register the group's regions with the store first"
                )
                raise ContractError(msg)


class Blocks:
    """Registered host memory, of which a few blocks are kept to be used again."""

    def __init__(self, client: Client, max_bytes: int) -> None:
        """Keep no block that is longer."""
        self._client = client
        self._max = max_bytes
        self._lock = threading.Lock()
        self._free: list[NDArray[np.uint8]] = []
        self._left: list[tuple[NDArray[np.uint8], frozenset[int]]] = []
        """Blocks that nobody waited for, and the calls that may still touch each."""

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return a block of at least so many bytes, with anything in it.

        Raises:
            StoreError: the client does not take the memory.
        """
        self._forget_left()
        with self._lock:
            for at, block in enumerate(self._free):
                if block.nbytes >= size:
                    return self._free.pop(at)
        block = np.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=np.uint8)
        if code := self._client.register(block.ctypes.data, block.nbytes):
            msg = f"{self._client.calls}: {block.nbytes} B of host memory were refused with code {code}"
            raise StoreError(msg)
        return block

    def give(self, block: NDArray[np.uint8]) -> None:
        """Let a block be taken again; the longest ones are kept. No call may touch it any more."""
        dropped = [block]
        if block.nbytes <= self._max:
            with self._lock:
                kept = sorted([*self._free, block], key=lambda one: one.nbytes)
                dropped, self._free = kept[:-_KEPT], kept[-_KEPT:]
        for one in dropped:
            self._forget(one)

    def _forget(self, block: NDArray[np.uint8]) -> None:
        try:
            self._client.unregister(block.ctypes.data)
        except StoreClosedError:
            return  # the client that knew it is going

    def _forget_left(self) -> None:
        """Let go of blocks that calls which were left behind may have touched, once those are over."""
        if not self._left:
            return
        with self._lock:
            under_way = self._client.calls.under_way()
            over = [block for block, calls in self._left if not calls & under_way]
            self._left = [one for one in self._left if one[1] & under_way]
        for block in over:
            self._forget(block)

    @contextmanager
    def block(
        self, size: int, *, is_left: Callable[[], bool] = lambda: False
    ) -> Iterator[NDArray[np.uint8]]:
        """Give a block for the length of a block of code.

        Who was timed out or interrupted did not wait for what touches it: it is not used again meanwhile.

        Args:
            size: bytes of it at least.
            is_left: whether somebody was timed out and has answered for it himself; asked in the end.

        Raises:
            StoreError: the client does not take the memory.
        """
        block = self.take(size)
        has_waited = False
        try:
            yield block
            has_waited = True
        except StoreTimeoutError:
            raise
        except Exception:
            has_waited = True
            raise
        finally:
            (self.give if has_waited and not is_left() else self._leave)(block)

    def _leave(self, block: NDArray[np.uint8]) -> None:
        with self._lock:
            self._left.append((block, self._client.calls.under_way()))

    def close(self) -> None:
        """Let go of every block that is free."""
        with self._lock:
            free, self._free = self._free, []
        for block in free:
            self._forget(block)
