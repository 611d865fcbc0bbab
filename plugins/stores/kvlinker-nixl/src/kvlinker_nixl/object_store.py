"""The store over a bucket: objects by name, whose bytes NIXL moves through blocks of host memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvlinker.errors import StoreError
from kvlinker.framed_looks import FramedState
from kvlinker.framed_store import FramedStore
from kvlinker.framed_writes import FramedBatch, KeptFramesWrite
from kvlinker.host_blocks import HostBlocks
from kvlinker.named_values import parts_of
from kvlinker.store import ObjectKey, StoreStats, WriteBatch, WriteStatus
from kvlinker_nixl.moving import Line
from kvlinker_nixl.object_catalog import ObjectCatalog
from kvlinker_nixl.object_values import ObjectValues
from kvlinker_nixl.options import NixlStoreOptions
from kvlinker_nixl.state import checksum

__all__ = ["ObjectLane", "ObjectStore"]

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


class ObjectLane(ObjectCatalog):
    """One direction: what is asked of the bucket, and the line that moves bytes, open and closed as one."""

    def __init__(self, options: NixlStoreOptions, label: str, line: Line) -> None:
        """Take a line; see ObjectCatalog."""
        super().__init__(options, label)
        self.line = line

    @property
    def values(self) -> ObjectValues:
        """The objects, this way."""
        return ObjectValues(self.line, self)

    def check_open(self) -> None:
        """See StoreLane; a child of the process that opened the store is refused as well."""
        super().check_open()
        self.line.check_open()

    def close(self) -> None:
        """See ObjectCatalog; what moves is waited for, for a while."""
        super().close()
        self.line.close()


class ObjectStore(FramedStore):
    """Objects of a bucket, which nothing is evicted from."""

    def __init__(self, options: NixlStoreOptions, reads: ObjectLane, writes: ObjectLane) -> None:
        """Look whether objects can be listed.

        Raises:
            StoreError: the server cannot be asked, or has no such bucket.
        """
        self._options = options
        self._catalog = reads
        self._offloads = writes
        self._state = FramedState(
            checksum=checksum, blocks=HostBlocks(_BLOCK_BYTES), counters=_COUNTERS
        )
        super().__init__(
            reads=reads,
            writes=writes,
            values=reads.values,
            framed=self._state,
            max_object_bytes=_MAX_OBJECT_BYTES,
        )
        try:
            next(reads.pages(), None)
        except BaseException:
            self.close()
            raise

    @property
    def lines(self) -> tuple[Line, Line]:
        """What moves loads and offloads, for figures and tests."""
        return self._catalog.line, self._offloads.line

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store; the server is asked once for each key.

        Raises:
            StoreError: the server cannot be asked.
        """
        self._catalog.check_open()
        return tuple(bool(length) for length in self._catalog.lengths(keys))

    def begin_write(self, batches: Sequence[WriteBatch]) -> _ObjectWrite:
        """See FramedStore."""
        self._offloads.check_up()
        return _ObjectWrite(self._offloads, self._state, batches, self._options)

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store; of two that remove an object at once, both may hear that it was there.

        Raises:
            StoreError: the server cannot be asked; some may have been removed.
        """
        self._catalog.check_open()
        return tuple(self._catalog.remove(keys))

    def clear(self, namespace: bytes) -> int:
        """See Store.

        Raises:
            ContractError: that is no namespace.
            StoreError: the server cannot be asked; some may have been removed.
        """
        self._catalog.check_open()
        return self._catalog.clear(namespace)

    def stats(self) -> StoreStats:
        """See Store; objects are listed, up to 200,000 of them, and the counter `uncounted` is 1 where there are more.

        Raises:
            StoreError: the server cannot be asked.
        """
        counters = dict(self._state.counters)
        objects = used = 0
        for page in self._catalog.pages():
            objects += len(page)
            used += sum(size for _, size in page)
            if objects >= _COUNTED:
                counters["uncounted"] = 1
                break
        return StoreStats(objects=objects, used_bytes=used, capacity_bytes=None, counters=counters)


class _ObjectWrite(KeptFramesWrite):
    """One call of `write`."""

    def __init__(
        self,
        writes: ObjectLane,
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
