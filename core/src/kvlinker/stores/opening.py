"""Opening turns sealed frames into an object's bytes in pool memory, in whatever pieces a store copies them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.errors import ContractError
from kvlinker.plans import TransferPlan
from kvlinker.stores.host_pages import slot_bytes, slots_of
from kvlinker.stores.sealing import (
    BLOCK_BYTES,
    FRAME_EXTRA_BYTES,
    BlockLayout,
    SealedObject,
    blocks_of,
)

__all__ = ["CHUNK_BYTES", "OpeningAccess"]

CHUNK_BYTES = 16 << 20
"""Bytes that are in the clear in host memory at a time, or one object."""


class OpeningAccess(DeviceAccess):
    """What a store copies the frames of one read to; only what has opened reaches pool memory.

    A range goes there once all of its blocks were opened; those of one that other copies have the rest of
    are kept until then.
    """

    def __init__(
        self,
        cipher: Callable[[int, NDArray[np.uint8]], SealedObject],
        plan: TransferPlan,
        memory: DeviceAccess,
    ) -> None:
        """Begin a read.

        Args:
            cipher: returns what opens the object of a page, one of whose frames is given.
            plan: of the ranges in pool memory.
            memory: copies them there.
        """
        self._cipher, self._plan, self._memory = cipher, plan, memory
        self._layout = BlockLayout(object_bytes=plan.object_bytes)
        self._first = plan.spans.offset // BLOCK_BYTES
        self._last = (plan.spans.offset + plan.range_bytes - 1) // BLOCK_BYTES
        self._lock = threading.Lock()  # a store may copy from several threads at once
        self._kept: dict[int, dict[int, NDArray[np.uint8]]] = {}
        self._is_copied = np.zeros((plan.num_pages, len(self._first)), dtype=np.bool_)
        self.bad: set[int] = set()
        """Pages of which a frame could not be opened."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of blocks that wait for the rest of a range."""
        with self._lock:
            return sum(block.size for kept in self._kept.values() for block in kept.values())

    def is_filled(self, page: int) -> bool:
        """Whether every range of a page was copied."""
        return bool(self._is_copied[page].all())

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess; a read copies nothing out."""
        msg = f"pool {plan.pool!r}: a read must take no memory, and copied {len(host.slots)} objects out"
        raise ContractError(msg)

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        host.check(plan)
        blocks = blocks_of(plan)
        if not plan.num_pages or not blocks:
            return
        size = self._layout.place(blocks[-1])[1] - self._layout.place(blocks[0])[0]
        step = max(1, CHUNK_BYTES // size)
        for start in range(0, plan.num_pages, step):
            self._open_some(
                plan.pages.row, blocks, host, range(plan.num_pages)[start : start + step]
            )

    def _open_some(
        self, pages: IndexArray, blocks: Sequence[int], host: HostObjects, objects: range
    ) -> None:
        """Open the frames of some objects of a copy, and fill what is whole by that."""
        start, end = self._layout.place(blocks[0])[0], self._layout.place(blocks[-1])[1]
        rows = np.empty((len(objects), end - start), dtype=np.uint8)
        own = pages[objects.start : objects.stop]
        opened = np.array(
            [
                self._open(page, blocks, host, i, row)
                for page, i, row in zip(own.tolist(), objects, rows, strict=True)
            ]
        )
        with self._lock:
            self.bad.update(own[~opened].tolist())
        good = np.flatnonzero(opened)
        if len(good):
            self._fill(own[good], blocks, rows, good)

    def _open(
        self, page: int, blocks: Sequence[int], host: HostObjects, i: int, row: NDArray[np.uint8]
    ) -> bool:
        """Open the frames of an object into a row; False where one is not right."""
        source, sealed = slot_bytes(host, i), None
        start = self._layout.place(blocks[0])[0]
        for block in blocks:
            first, last = self._layout.place(block)
            begin = block * (BLOCK_BYTES + FRAME_EXTRA_BYTES) - host.first_offset
            frame = source[begin : begin + last - first + FRAME_EXTRA_BYTES]
            sealed = sealed or self._cipher(page, frame)
            content = sealed.content(block, frame)
            if content is None:
                return False
            row[first - start : last - start] = np.frombuffer(content, dtype=np.uint8)
        return True

    def _fill(
        self, pages: IndexArray, blocks: Sequence[int], rows: NDArray[np.uint8], good: IndexArray
    ) -> None:
        """Copy the ranges that lie in the opened blocks, and keep the blocks of those that do not wholly."""
        is_here = np.zeros(self._layout.blocks + 1, dtype=np.int64)
        is_here[np.array(blocks) + 1] = 1
        count = np.cumsum(is_here)
        found = count[self._last + 1] - count[self._first]
        whole = np.flatnonzero(found == self._last - self._first + 1)
        start = self._layout.place(blocks[0])[0]
        self._copy(pages, whole, slots_of(rows, chosen=good, first_offset=start))
        parts = np.flatnonzero((found > 0) & (found < self._last - self._first + 1))
        if not len(parts):
            return
        for page, row in zip(pages.tolist(), rows[good], strict=True):
            # Of a range that was filled before, a store copies all of the blocks again.
            self._is_copied[page, parts] = False
            self._keep(page, blocks, row)
            for span in parts.tolist():
                self._fill_kept(page, span)
            self._forget(page)

    def _is_awaited(self, page: int, block: int) -> bool:
        """Whether a block is part of a range of a page that is not filled yet."""
        is_in = (self._first <= block) & (block <= self._last)
        return bool((is_in & ~self._is_copied[page]).any())

    def _keep(self, page: int, blocks: Sequence[int], row: NDArray[np.uint8]) -> None:
        start = self._layout.place(blocks[0])[0]
        with self._lock:
            kept = self._kept.setdefault(page, {})
            for block in blocks:
                if self._is_awaited(page, block):
                    first, last = self._layout.place(block)
                    # A copy of it, and not all that was opened.
                    kept[block] = row[first - start : last - start].copy()

    def _forget(self, page: int) -> None:
        """Let go of blocks whose ranges are all filled."""
        with self._lock:
            kept = self._kept[page]
            self._kept[page] = {at: kept[at] for at in kept if self._is_awaited(page, at)}

    def _fill_kept(self, page: int, span: int) -> None:
        """Copy a range of a page once all of its blocks are there."""
        first, last = int(self._first[span]), int(self._last[span])
        with self._lock:
            kept = self._kept[page]
            parts = [kept[block] for block in range(first, last + 1) if block in kept]
        if len(parts) == last - first + 1:
            start = self._layout.place(first)[0]
            whole = np.concatenate(parts)[None]
            slots = slots_of(whole, first_offset=start)
            self._copy(np.array([page], dtype=np.int64), np.array([span], dtype=np.int64), slots)

    def _copy(self, pages: IndexArray, spans: IndexArray, slots: HostObjects) -> None:
        if len(spans):
            self._memory.copy_in(self._plan.select_spans(spans).select(pages), slots)
            self._is_copied[np.ix_(pages, spans)] = True
