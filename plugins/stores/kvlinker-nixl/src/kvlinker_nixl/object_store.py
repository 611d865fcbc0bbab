"""The store over a bucket: objects by name, whose bytes NIXL moves through blocks of host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlinker.device import DeviceAccess
from kvlinker.errors import StoreError
from kvlinker.framed_looks import FramedState
from kvlinker.framed_reads import FramedReadSession
from kvlinker.framed_writes import FramedBatch, KeptFramesWrite
from kvlinker.host_blocks import HostBlocks
from kvlinker.named_values import parts_of
from kvlinker.store import (
    ObjectKey,
    ReadRequest,
    ReadSession,
    Store,
    StoreCapabilities,
    StoreStats,
    WriteBatch,
    WriteStatus,
)
from kvlinker_nixl.moving import Line
from kvlinker_nixl.object_catalog import ObjectCatalog
from kvlinker_nixl.object_values import ObjectValues
from kvlinker_nixl.options import NixlStoreOptions
from kvlinker_nixl.state import checksum

__all__ = ["Direction", "ObjectStore"]

_MAX_OBJECT_BYTES = 4 << 30
_BLOCK_BYTES = 32 << 20
_COUNTED = 200_000
_COUNTERS = (
    "written",
    "missed",
    "vanished",
    "corrupt",
    "short_answers",
    "discarded",
    "no_room",
    "errors",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """What loads or offloads go through."""

    line: Line
    catalog: ObjectCatalog

    @property
    def values(self) -> ObjectValues:
        """The objects, this way."""
        return ObjectValues(self.line, self.catalog)

    def check_open(self) -> None:
        """Do nothing while the store is open.

        Raises:
            StoreClosedError: it was closed.
        """
        self.line.check_open()

    def close(self) -> None:
        """Begin nothing more. Idempotent."""
        self.catalog.close()
        self.line.close()


class ObjectStore(Store):
    """Objects of a bucket, which nothing is evicted from."""

    def __init__(self, options: NixlStoreOptions, reads: Direction, writes: Direction) -> None:
        """Look whether objects can be listed.

        Raises:
            StoreError: the server cannot be asked, or has no such bucket.
        """
        self._options = options
        self._reads = reads
        self._writes = writes
        self._state = FramedState(
            checksum=checksum, blocks=HostBlocks(_BLOCK_BYTES), counters=_COUNTERS
        )
        try:
            next(reads.catalog.pages(), None)
        except BaseException:
            self.close()
            raise

    @property
    def lines(self) -> tuple[Line, Line]:
        """What moves loads and offloads, for figures and tests."""
        return self._reads.line, self._writes.line

    @property
    def capabilities(self) -> StoreCapabilities:
        """See Store."""
        return StoreCapabilities(
            persistent=True,
            shared=True,
            ranged_reads=True,
            max_object_bytes=_MAX_OBJECT_BYTES,
        )

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store; the server is asked once for each key.

        Raises:
            StoreError: the server cannot be asked.
        """
        self._reads.check_open()
        return tuple(bool(length) for length in self._reads.catalog.lengths(keys))

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store.

        Raises:
            StoreError: the server cannot be asked; nothing was published.
        """
        self._writes.check_open()
        write = _ObjectWrite(self._writes, self._state, batches, self._options)
        return write.run(memory, may_publish)

    def open_read(self, request: ReadRequest) -> ReadSession:
        """See Store."""
        self._reads.check_open()
        return FramedReadSession(
            self._reads.values, self._state, request, check_open=self._reads.check_open
        )

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store; of two that remove an object at once, both may hear that it was there.

        Raises:
            StoreError: the server cannot be asked; some may have been removed.
        """
        self._reads.check_open()
        return tuple(self._reads.catalog.remove(keys))

    def clear(self, namespace: bytes) -> int:
        """See Store.

        Raises:
            ContractError: that is no namespace.
            StoreError: the server cannot be asked; some may have been removed.
        """
        self._reads.check_open()
        return self._reads.catalog.clear(namespace)

    def stats(self) -> StoreStats:
        """See Store; objects are listed, up to 200,000 of them, and the counter `uncounted` is 1 where there are more.

        Raises:
            StoreError: the server cannot be asked.
        """
        counters = dict(self._state.counters)
        objects = used = 0
        for page in self._reads.catalog.pages():
            objects += len(page)
            used += sum(size for _, size in page)
            if objects >= _COUNTED:
                counters["uncounted"] = 1
                break
        return StoreStats(objects=objects, used_bytes=used, capacity_bytes=None, counters=counters)

    def close(self) -> None:
        """See Store; objects stay."""
        self._reads.close()
        self._writes.close()


class _ObjectWrite(KeptFramesWrite):
    """One call of `write`."""

    def __init__(
        self,
        writes: Direction,
        state: FramedState,
        batches: Sequence[WriteBatch],
        options: NixlStoreOptions,
    ) -> None:
        self._values = writes.values
        super().__init__(
            self._values,
            state,
            batches,
            label=str(writes.line),
            max_object_bytes=_MAX_OBJECT_BYTES,
            kept_bytes=options.write_bytes,
            block_bytes=_BLOCK_BYTES,
        )

    def publish(self, work: FramedBatch) -> None:
        """See FramedWrite; an object that another writer has put there meanwhile is replaced by one that is alike."""
        each = max(1, self._values.answer_bytes // work.value_bytes)
        for part in parts_of(len(work.fresh), each):
            positions = work.fresh[part].tolist()
            try:
                self._put(work, positions)
            except StoreError as error:
                self.note_failure(error)
                self._put_each(work, positions)

    def _put(self, work: FramedBatch, positions: Sequence[int]) -> None:
        keys = [work.batch.keys[at] for at in positions]
        self._values.put(keys, [self.row(work, at) for at in positions])
        for at in positions:
            work.statuses[at] = WriteStatus.WRITTEN
        self.state.count("written", len(positions))

    def _put_each(self, work: FramedBatch, positions: Sequence[int]) -> None:
        """Write objects one by one, of which one kept all from being written; those that cannot be stay FAILED."""
        if len(positions) < 2:  # noqa: PLR2004  # one has been tried
            return
        for at in positions:
            try:
                self._put(work, [at])
            except StoreError as error:
                self.note_failure(error)
