"""An encrypted store keeps objects in another store that can neither read nor change them unnoticed.

The other store sees frames of `kvlinker.stores.sealing` and asks for them as if they were pool memory, so that
it copies, checks, evicts and publishes them as ever.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.errors import ContractError, UnsupportedOperationError
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.store import (
    Integrity,
    ObjectKey,
    ReadRequest,
    ReadSession,
    ReadStatus,
    Store,
    StoreCapabilities,
    StoreStats,
    WriteBatch,
    WriteStatus,
)
from kvlinker.stores.sealing import (
    BLOCK_BYTES,
    FRAME_EXTRA_BYTES,
    BlockLayout,
    SealedObject,
    Sealer,
    blocks_of,
    salt_of,
)
from kvlinker.stores.tier import EventCounts
from kvlinker.stores.wrapped import WrappedStore

__all__ = ["EncryptedStore"]

_BASE = 1 << 44
"""Made-up addresses of the frames of each batch of a call: its number, times this."""


class EncryptedStore(WrappedStore):
    """A store whose objects are sealed before they reach the store in it."""

    def __init__(self, store: Store, secret: bytes) -> None:
        """Take over an open store.

        Args:
            store: moves bytes through the host, and bounds no ranges.
            secret: 32 random bytes; who has another one finds nothing.

        Raises:
            ContractError: the secret has another length, or the store needs the pools' own memory.
            UnsupportedOperationError: the package with the cipher is not installed.
        """
        super().__init__(store)
        _check_installed()
        able = store.capabilities
        if able.device_memory or able.registers_memory or able.max_ranges_per_call is not None:
            msg = (
                f"{type(store).__name__} moves pool memory itself, or bounds the ranges of a call, and so cannot be "
                f"given encrypted objects; encrypt another store"
            )
            raise ContractError(msg)
        self._sealer = Sealer(secret)
        self._counts = EventCounts()
        limit = able.max_object_bytes
        self._capabilities = replace(
            able,
            integrity=Integrity.CHECKSUM,
            max_object_bytes=None if limit is None else _largest(limit),
        )

    @property
    def capabilities(self) -> StoreCapabilities:
        """What the store in it can do, and every changed bit is noticed."""
        return self._capabilities

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store; what is stored already is neither copied nor encrypted."""
        sealing = [
            _SealedBatch(self._sealer, batch, memory, number)
            for number, batch in enumerate(batches)
        ]
        return self._inner.write(
            [item.batch for item in sealing], _SealingAccess(sealing), may_publish=may_publish
        )

    def open_read(self, request: ReadRequest) -> ReadSession:
        """See Store."""
        layout = BlockLayout(object_bytes=request.object_bytes)
        asked = replace(
            request,
            object_bytes=layout.sealed_bytes,
            fingerprint=self._sealer.fingerprint(request.fingerprint),
        )
        return _EncryptedReadSession(self, self._inner.open_read(asked), request)

    def opened(self, request: ReadRequest, page: int, salt: bytes) -> SealedObject:
        """Return what opens an object of a request whose frames begin with a salt."""
        layout = BlockLayout(object_bytes=request.object_bytes)
        return self._sealer.open(request.keys[page], request.fingerprint, layout, salt)

    def drop(self, keys: Sequence[ObjectKey]) -> None:
        """Count and remove objects that could not be opened."""
        self._counts.add("unsealable", len(keys))
        self._inner.delete(keys)

    def stats(self) -> StoreStats:
        """See Store; `unsealable` counts objects that were not what was written."""
        stats = self._inner.stats()
        return replace(stats, counters={**stats.counters, **self._counts.snapshot()})


def _check_installed() -> None:
    if importlib.util.find_spec("cryptography") is None:
        msg = "an encrypted store needs a cipher; pip install 'kvlinker[encryption]'"
        raise UnsupportedOperationError(msg)


def _largest(limit: int) -> int:
    """Return the bytes of the longest object whose frames have no more than so many bytes."""
    frames, rest = divmod(limit, BLOCK_BYTES + FRAME_EXTRA_BYTES)
    return frames * BLOCK_BYTES + max(0, rest - FRAME_EXTRA_BYTES)


# ---- writing ----------------------------------------------------------------------------------


class _SealedBatch:
    """A batch of objects, and the batch of their frames."""

    def __init__(
        self, sealer: Sealer, batch: WriteBatch, memory: DeviceAccess, number: int
    ) -> None:
        self._sealer, self._source, self._memory = sealer, batch, memory
        self._layout = BlockLayout(object_bytes=batch.plan.object_bytes)
        self._sealed: dict[int, SealedObject] = {}
        blocks = np.arange(self._layout.blocks, dtype=np.int64)
        plan = self._layout.frame_plan(
            batch.plan.pool, batch.plan.num_pages, blocks, base=_BASE * (number + 1)
        )
        self.batch = WriteBatch(
            keys=batch.keys, plan=plan, fingerprint=sealer.fingerprint(batch.fingerprint)
        )

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        """Copy objects out of pool memory, and put their frames where the store wants them."""
        pages = plan.pages.row.tolist()
        rows = np.empty((len(pages), self._layout.object_bytes), dtype=np.uint8)
        self._memory.copy_out(self._source.plan.select(pages), _slots(rows))
        for i, page in enumerate(pages):
            sealed, target = self._object(page), _slot(host, i)
            for block in blocks_of(plan):
                first, last = self._layout.place(block)
                frame = np.frombuffer(sealed.frame(block, rows[i, first:last]), dtype=np.uint8)
                begin = block * (BLOCK_BYTES + FRAME_EXTRA_BYTES) - host.first_offset
                target[begin : begin + len(frame)] = frame

    def _object(self, page: int) -> SealedObject:
        """Return the cipher of a page, the same in each of its copies."""
        if page not in self._sealed:
            self._sealed[page] = self._sealer.seal(
                self._source.keys[page], self._source.fingerprint, self._layout
            )
        return self._sealed[page]


class _SealingAccess(DeviceAccess):
    """What the store in it copies frames of a write from."""

    def __init__(self, batches: Sequence[_SealedBatch]) -> None:
        self._batches = batches

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        host.check(plan)
        if plan.num_pages and len(plan.spans.base):
            self._batches[int(plan.spans.base[0]) // _BASE - 1].copy_out(plan, host)

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess; a write copies nothing in."""
        msg = f"pool {plan.pool!r}: a write must change no memory, and copied {len(host.slots)} objects in"
        raise ContractError(msg)


# ---- reading ----------------------------------------------------------------------------------


class _EncryptedReadSession(ReadSession):
    """A session of the store in it, whose frames are opened on their way into pool memory."""

    def __init__(self, store: EncryptedStore, inner: ReadSession, request: ReadRequest) -> None:
        self._store, self._inner, self._request = store, inner, request
        self._layout = BlockLayout(object_bytes=request.object_bytes)
        self._lock = threading.Lock()
        self._bad: set[int] = set()

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        """See ReadSession."""
        keys, size = self._request.keys, self._request.object_bytes
        if plan.num_pages != len(keys) or plan.object_bytes != size:
            msg = (
                f"pool {plan.pool!r}: a plan of {plan.num_pages} objects of {plan.object_bytes} B "
                f"does not fit a request of {len(keys)} objects of {size} B"
            )
            raise ContractError(msg)
        is_whole = int(plan.range_bytes.sum()) == size
        if not (is_whole or self._store.capabilities.ranged_reads):
            msg = f"pool {plan.pool!r}: this store reads whole objects alone; see its capabilities"
            raise UnsupportedOperationError(msg)
        frames = self._layout.frame_plan(
            plan.pool, plan.num_pages, self._layout.covering(plan), base=_BASE
        )
        opening = _OpeningAccess(self._open, plan, memory)
        statuses = self._inner.read(frames, opening)
        self._drop(opening.bad)
        return tuple(
            ReadStatus.CORRUPT if page in self._bad and status is ReadStatus.OK else status
            for page, status in enumerate(statuses)
        )

    def _open(self, page: int, frame: NDArray[np.uint8]) -> SealedObject:
        return self._store.opened(self._request, page, salt_of(frame))

    def _drop(self, bad: Sequence[int]) -> None:
        with self._lock:
            fresh = [page for page in bad if page not in self._bad]
            self._bad.update(fresh)
        if fresh:
            self._store.drop([self._request.keys[page] for page in fresh])

    def close(self) -> None:
        """See ReadSession."""
        self._inner.close()


class _OpeningAccess(DeviceAccess):
    """What the store in it copies the frames of a read to."""

    def __init__(
        self,
        opened: Callable[[int, NDArray[np.uint8]], SealedObject],
        plan: TransferPlan,
        memory: DeviceAccess,
    ) -> None:
        self._opened, self._plan, self._memory = opened, plan, memory
        self._layout = BlockLayout(object_bytes=plan.object_bytes)
        self.bad: list[int] = []
        """Pages that could not be opened, and were not copied."""

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
        first, end = self._layout.place(blocks[0])[0], self._layout.place(blocks[-1])[1]
        rows = np.empty((plan.num_pages, end - first), dtype=np.uint8)
        pages = plan.pages.row.tolist()
        good = [i for i, page in enumerate(pages) if self._open(page, blocks, host, i, rows[i])]
        self.bad += [page for i, page in enumerate(pages) if i not in set(good)]
        if good:
            own = self._plan.select([pages[i] for i in good])
            slots = replace(_slots(rows, first_offset=first), slots=np.array(good, dtype=np.int64))
            self._memory.copy_in(own, slots)

    def _open(
        self, page: int, blocks: Sequence[int], host: HostObjects, i: int, row: NDArray[np.uint8]
    ) -> bool:
        """Open the frames of an object into a row; False where one is not right."""
        source, sealed = _slot(host, i), None
        start = self._layout.place(blocks[0])[0]
        for block in blocks:
            first, last = self._layout.place(block)
            begin = block * (BLOCK_BYTES + FRAME_EXTRA_BYTES) - host.first_offset
            frame = source[begin : begin + last - first + FRAME_EXTRA_BYTES]
            sealed = sealed or self._opened(page, frame)
            content = sealed.content(block, frame)
            if content is None:
                return False
            row[first - start : last - start] = np.frombuffer(content, dtype=np.uint8)
        return True


def _slots(rows: NDArray[np.uint8], *, first_offset: int = 0) -> HostObjects:
    count, size = rows.shape
    span = BufferSpan(base_ptr=rows.ctypes.data, rows=count, row_bytes=size, row_stride=size)
    return HostObjects(span=span, slots=np.arange(count, dtype=np.int64), first_offset=first_offset)


def _slot(host: HostObjects, i: int) -> NDArray[np.uint8]:
    """Return the bytes of a slot of the store in it, which it owns for the length of the copy."""
    span = host.span
    address = span.base_ptr + int(host.slots[i]) * span.row_stride
    return np.ctypeslib.as_array((ctypes.c_uint8 * span.row_bytes).from_address(address))
