"""An encrypted store keeps objects in another store that can neither read nor change them unnoticed.

The other store sees frames of `kvlinker.stores.sealing` and asks for them as if they were pool memory, so that
it copies, checks, evicts and publishes them as ever.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.errors import ContractError, StoreError, UnsupportedOperationError
from kvlinker.event_counts import EventCounts
from kvlinker.frames import MAX_RANGES
from kvlinker.guard import checked_read
from kvlinker.plans import TransferPlan
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
from kvlinker.stores.host_pages import slot_bytes, slots_of
from kvlinker.stores.opening import CHUNK_BYTES, OpeningAccess
from kvlinker.stores.sealing import (
    BLOCK_BYTES,
    FRAME_EXTRA_BYTES,
    BlockLayout,
    SealedObject,
    Sealer,
    blocks_of,
    salt_of,
)
from kvlinker.stores.wrapped import WrappedStore, check_takes_other_bytes, counting

__all__ = ["EncryptedStore"]

_EVENTS = ("undeleted", "unsealable")
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
        check_takes_other_bytes(store, done="encrypted", do="encrypt")
        able = store.capabilities
        self._sealer = Sealer(secret)
        self._counts = EventCounts(_EVENTS)
        limit = able.max_object_bytes
        self._capabilities = replace(
            able,
            integrity=Integrity.CHECKSUM,
            max_object_bytes=_largest(limit),
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
        limit = self._capabilities.max_object_bytes
        wanted = [
            i
            for i, batch in enumerate(batches)
            if limit is None or batch.plan.object_bytes <= limit
        ]
        sealing = [
            _SealedBatch(self._sealer, batches[i], memory, number)
            for number, i in enumerate(wanted)
        ]
        frames = [item.batch for item in sealing]
        given = self._inner_write(frames, _SealingAccess(sealing), may_publish)
        answer = dict(zip(wanted, given, strict=True))
        return tuple(
            answer.get(i, (WriteStatus.FAILED,) * len(batch.keys))
            for i, batch in enumerate(batches)
        )

    def open_read(self, request: ReadRequest) -> ReadSession:
        """See Store."""
        inner = self._inner.open_read(self._asked(request))
        return _EncryptedReadSession(self, self._inner_name, inner, request)

    def prefetch(self, request: ReadRequest, *, range_bytes: Sequence[int] = ()) -> int:  # noqa: ARG002  # frames are read
        """See Store."""
        layout = BlockLayout(object_bytes=request.object_bytes)
        return self._inner.prefetch(self._asked(request), range_bytes=layout.frame_bytes)

    def _asked(self, request: ReadRequest) -> ReadRequest:
        """Return the request for the frames of objects."""
        layout = BlockLayout(object_bytes=request.object_bytes)
        return replace(
            request,
            object_bytes=layout.sealed_bytes,
            fingerprint=self._sealer.fingerprint(request.fingerprint),
        )

    def opened(self, request: ReadRequest, page: int, salt: bytes) -> SealedObject:
        """Return what opens an object of a request whose frames begin with a salt."""
        layout = BlockLayout(object_bytes=request.object_bytes)
        return self._sealer.open(request.keys[page], request.fingerprint, layout, salt)

    def drop(self, keys: Sequence[ObjectKey]) -> None:
        """Count and remove objects that could not be opened."""
        self._counts.add("unsealable", len(keys))
        try:
            self._inner.delete(keys)
        except StoreError:  # what was read besides is right all the same
            self._counts.add("undeleted", len(keys))

    def stats(self) -> StoreStats:
        """See Store; `unsealable` counts objects that were not what was written."""
        return counting(self._inner.stats(), self._counts.snapshot())


def _check_installed() -> None:
    if importlib.util.find_spec("cryptography") is None:
        msg = "an encrypted store needs a cipher; pip install 'kvlinker[encryption]'"
        raise UnsupportedOperationError(msg)


def _largest(limit: int | None) -> int:
    """Return the bytes of the longest object whose frames take no more, and are no more than an object has ranges."""
    longest = MAX_RANGES * BLOCK_BYTES
    if limit is None:
        return longest
    frames, rest = divmod(limit, BLOCK_BYTES + FRAME_EXTRA_BYTES)
    return min(longest, frames * BLOCK_BYTES + max(0, rest - FRAME_EXTRA_BYTES))


# ---- writing ----------------------------------------------------------------------------------


class _SealedBatch:
    """A batch of objects, and the batch of their frames."""

    def __init__(
        self, sealer: Sealer, batch: WriteBatch, memory: DeviceAccess, number: int
    ) -> None:
        self._sealer, self._source, self._memory = sealer, batch, memory
        self._layout = BlockLayout(object_bytes=batch.plan.object_bytes)
        self._lock = threading.Lock()
        self._sealed: dict[int, tuple[SealedObject, set[int]]] = {}
        """Pages to the ciphers of their parts, and the blocks that were sealed with them."""
        blocks = np.arange(self._layout.blocks, dtype=np.int64)
        plan = self._layout.frame_plan(
            batch.plan.pool, batch.plan.num_pages, blocks, base=_BASE * (number + 1)
        )
        self.batch = WriteBatch(
            keys=batch.keys, plan=plan, fingerprint=sealer.fingerprint(batch.fingerprint)
        )

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        """Copy objects out of pool memory, and put their frames where the store wants them."""
        pages, blocks = plan.pages.row.tolist(), blocks_of(plan)
        step = max(1, CHUNK_BYTES // self._layout.object_bytes)
        for start in range(0, len(pages), step):
            chosen = pages[start : start + step]
            rows = np.empty((len(chosen), self._layout.object_bytes), dtype=np.uint8)
            self._memory.copy_out(self._source.plan.select(chosen), slots_of(rows))
            for i, page in enumerate(chosen):
                self._seal(page, blocks, rows[i], slot_bytes(host, start + i), host.first_offset)

    def _seal(
        self,
        page: int,
        blocks: Sequence[int],
        row: NDArray[np.uint8],
        target: NDArray[np.uint8],
        first_offset: int,
    ) -> None:
        """Put the frames of some blocks of an object where the store wants them."""
        is_whole = len(blocks) == self._layout.blocks
        sealed = self._new(page) if is_whole else self._part_of(page, blocks)
        for block in blocks:
            first, last = self._layout.place(block)
            frame = np.frombuffer(sealed.frame(block, row[first:last]), dtype=np.uint8)
            begin = block * (BLOCK_BYTES + FRAME_EXTRA_BYTES) - first_offset
            target[begin : begin + len(frame)] = frame

    def _new(self, page: int) -> SealedObject:
        """Return a cipher that no copy had before: pool memory may hold other bytes at the next one."""
        return self._sealer.seal(self._source.keys[page], self._source.fingerprint, self._layout)

    def _part_of(self, page: int, blocks: Sequence[int]) -> SealedObject:
        """Return the cipher of a page that is copied part by part: the same until a block comes again."""
        with self._lock:  # a store may copy from several threads at once
            sealed, done = self._sealed.get(page, (None, set[int]()))
            if sealed is None or not done.isdisjoint(blocks):
                sealed, done = self._new(page), set()
                self._sealed[page] = sealed, done
            done.update(blocks)
        return sealed


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

    def __init__(
        self, store: EncryptedStore, name: str, inner: ReadSession, request: ReadRequest
    ) -> None:
        self._store, self._inner, self._request = store, inner, request
        self._name = name
        self._layout = BlockLayout(object_bytes=request.object_bytes)
        self._lock = threading.Lock()
        self._bad: set[int] = set()
        self._ciphers: dict[int, SealedObject] = {}

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        """See ReadSession."""
        self._request.check(plan)
        is_whole = int(plan.range_bytes.sum()) == plan.object_bytes
        if not (is_whole or self._store.capabilities.ranged_reads):
            msg = f"pool {plan.pool!r}: this store reads whole objects alone; see its capabilities"
            raise UnsupportedOperationError(msg)
        frames = self._layout.frame_plan(
            plan.pool, plan.num_pages, self._layout.covering(plan), base=_BASE
        )
        opening = OpeningAccess(self._open, plan, memory)
        statuses = checked_read(self._name, self._inner, frames, opening)
        self._drop(opening.bad)
        return tuple(self._status(page, status, opening) for page, status in enumerate(statuses))

    def _status(self, page: int, status: ReadStatus, opening: OpeningAccess) -> ReadStatus:
        """Return what became of an object of which the store in it says a status."""
        if status is not ReadStatus.OK:
            return status
        if page in self._bad:
            return ReadStatus.CORRUPT
        return ReadStatus.OK if opening.is_filled(page) else ReadStatus.FAILED

    def _open(self, page: int, frame: NDArray[np.uint8]) -> SealedObject:
        """Return what opens a page: for each layer the same, as long as the object is."""
        salt = salt_of(frame)
        known = self._ciphers.get(page)
        if known is None or known.salt != salt:
            known = self._ciphers[page] = self._store.opened(self._request, page, salt)
        return known

    def _drop(self, bad: Collection[int]) -> None:
        with self._lock:
            fresh = [page for page in bad if page not in self._bad]
            self._bad.update(fresh)
        if fresh:
            self._store.drop([self._request.keys[page] for page in fresh])

    def close(self) -> None:
        """See ReadSession."""
        self._inner.close()
