"""A value store keeps whatever has keys and values: a subclass says how one value is put, got and removed.

Everything else of the contract is here: headers with checksums, ranged reads, sessions, the order of a write,
positions, counters and what is in use. It makes a call for each object, which suits what is in the process or on
its machine; behind a network, `kvlinker.named_values` and its neighbours send calls together.
"""

from __future__ import annotations

import threading
import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

from kvlinker.device import DeviceAccess
from kvlinker.errors import KVLinkerError, StoreClosedError, StoreError
from kvlinker.framed_looks import FramedState
from kvlinker.framed_reads import FramedReadSession
from kvlinker.framed_writes import FramedBatch, KeptFramesWrite
from kvlinker.frames import Checksum
from kvlinker.host_blocks import HostBlocks
from kvlinker.named_values import Beginning, Fetched, NamedValues, Range, digits_of_namespace
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

__all__ = ["ValueStore"]

_T = TypeVar("_T")
_COUNTERS = ("written", "missed", "corrupt", "discarded", "full", "no_room", "errors")
_MAX_OBJECT_BYTES = 1 << 30
_ANSWER_BYTES = 8 << 20
_KEPT_BYTES = 256 << 20
_BLOCK_BYTES = 32 << 20


class ValueStore(Store):
    """A store of values under keys, each a header and an object's bytes.

    Whatever a subclass's methods raise that is no KVLinkerError, callers get as a StoreError that names the store.
    """

    def __init__(
        self,
        label: str,
        *,
        persistent: bool,
        shared: bool,
        capacity_bytes: int | None = None,
        max_object_bytes: int = _MAX_OBJECT_BYTES,
        kept_bytes: int = _KEPT_BYTES,
        checksum: Checksum = zlib.crc32,
    ) -> None:
        """Make an open store.

        Args:
            label: names the store in messages.
            persistent: whether values outlive the process.
            shared: whether other processes may have them open.
            capacity_bytes: what `put` keeps to; None for no limit.
            max_object_bytes: objects that are longer fail, and are not copied.
            kept_bytes: of host memory that one write may take until it may publish; what finds no room is FULL.
            checksum: of ranges and headers; all that read the same values need the same one.
        """
        self.label = label
        self.capacity_bytes = capacity_bytes
        # Names of two underscores: whatever a subclass calls its own attributes, it meets none of these.
        self.__kept_bytes = kept_bytes
        self.__capabilities = StoreCapabilities(
            persistent=persistent,
            shared=shared,
            ranged_reads=True,
            max_object_bytes=max_object_bytes,
        )
        blocks = HostBlocks(_BLOCK_BYTES)
        self.__state = FramedState(checksum=checksum, blocks=blocks, counters=_COUNTERS)
        self.__values = _Values(self)
        self.__lock = threading.Lock()
        self.__in_use: Counter[ObjectKey] = Counter()
        self.__is_open = True

    # ---- what a subclass does -------------------------------------------------------------------

    @abstractmethod
    def first(self, key: ObjectKey, size: int) -> tuple[bytes, int] | None:
        """Return at most so many first bytes of a value, and the bytes that all of it has; None where there is none.

        Both are of one moment: a value that is replaced meanwhile is the old one or the new one.
        """

    @abstractmethod
    def get(self, key: ObjectKey, start: int, size: int) -> bytes | None:
        """Return bytes of a value from one on; None where there is no value, fewer where it ends before."""

    @abstractmethod
    def put(self, key: ObjectKey, value: memoryview, *, replace: bool) -> WriteStatus:
        """Keep a value, visible as a whole or not at all, and return WRITTEN.

        EXISTS where the key has a value and `replace` is False; FULL where there is no room, and nothing may go
        for it that is not in use. The bytes are the caller's again when the call returns.
        """

    @abstractmethod
    def remove(self, key: ObjectKey) -> bool:
        """Remove a value; return whether there was one."""

    @abstractmethod
    def keys(self, namespace: bytes) -> Sequence[ObjectKey]:
        """Return the keys that begin with the 12 bytes of a namespace."""

    @abstractmethod
    def usage(self) -> tuple[int, int]:
        """Return how many values there are, and the bytes that count against the capacity."""

    @abstractmethod
    def shut(self) -> None:
        """Release everything; called once."""

    # ---- for subclasses -------------------------------------------------------------------------

    def is_in_use(self, key: ObjectKey) -> bool:
        """Return whether an open read of this process has asked for the key; it is not to be evicted then."""
        with self.__lock:
            return self.__in_use[key] > 0

    def count(self, event: str, number: int = 1) -> None:
        """Add to a counter of `stats`, such as `evicted`."""
        self.__state.count(event, number)

    # ---- the contract ---------------------------------------------------------------------------

    @property
    def capabilities(self) -> StoreCapabilities:
        """See Store."""
        return self.__capabilities

    def check_open(self) -> None:
        """Do nothing while the store is open.

        Raises:
            StoreClosedError: it was closed.
        """
        if not self.__is_open:
            msg = f"{self.label}: the store was closed; open it again"
            raise StoreClosedError(msg)

    def ask(self, call: Callable[[], _T]) -> _T:
        """Return what one of the subclass's methods returns.

        Raises:
            StoreClosedError: the store was closed, before the call or under it.
            StoreError: it raised something.
        """
        self.check_open()
        try:
            return call()
        except KVLinkerError:
            raise
        except Exception as error:
            self.check_open()  # what is closed under a call fails in any way
            self.count("errors")
            msg = f"{self.label}: {type(error).__name__}: {error}"
            raise StoreError(msg) from error

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store."""
        self.check_open()
        return tuple([self.__is_there(key) for key in keys])

    def __is_there(self, key: ObjectKey) -> bool:
        return self.ask(lambda: self.first(key, 0)) is not None

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store."""
        self.check_open()
        return _Write(self, self.__values, self.__state, batches, self.__kept_bytes).run(
            memory, may_publish
        )

    def open_read(self, request: ReadRequest) -> ReadSession:
        """See Store."""
        self.check_open()
        return _Session(self, self.__values, self.__state, request)

    def use(self, keys: Sequence[ObjectKey], number: int) -> None:
        """Note that so many more reads have asked for the keys."""
        with self.__lock:
            for key in keys:
                self.__in_use[key] += number
                if not self.__in_use[key]:
                    del self.__in_use[key]

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store."""
        self.check_open()
        return tuple([self.__removed(key) for key in keys])

    def __removed(self, key: ObjectKey) -> bool:
        return self.ask(lambda: self.remove(key))

    def clear(self, namespace: bytes) -> int:
        """See Store.

        Raises:
            ContractError: that is no namespace.
        """
        digits_of_namespace(namespace)
        return sum(self.delete(self.ask(lambda: self.keys(namespace))))

    def stats(self) -> StoreStats:
        """See Store."""
        objects, used = self.ask(self.usage)
        return StoreStats(
            objects=objects,
            used_bytes=used,
            capacity_bytes=self.capacity_bytes,
            counters=self.__state.counters,
        )

    def close(self) -> None:
        """See Store."""
        with self.__lock:
            was_open, self.__is_open = self.__is_open, False
        if was_open:
            self.shut()


class _Values(NamedValues):
    """The values of a store, a call for each."""

    def __init__(self, store: ValueStore) -> None:
        self._store = store

    @property
    def answer_bytes(self) -> int:
        return _ANSWER_BYTES

    def begin(
        self, keys: Sequence[ObjectKey], size: int
    ) -> Iterator[Sequence[tuple[int, Beginning | None]]]:
        for number, key in enumerate(keys):
            found = self._first(key, size)
            if found is None:
                yield [(number, None)]
            else:
                yield [(number, Beginning(raw=memoryview(found[0]), length=found[1]))]

    def _first(self, key: ObjectKey, size: int) -> tuple[bytes, int] | None:
        return self._store.ask(lambda: self._store.first(key, size))

    def fetch(
        self, keys: Sequence[ObjectKey], ranges: Sequence[Range], *, expected: Sequence[Range] = ()
    ) -> Generator[Fetched]:
        for at, (start, size) in enumerate([*ranges, *expected]):
            for number, key in enumerate(keys):
                found = self._get(key, start, size)
                view = None if found is None else memoryview(found)
                yield Fetched(range=at, numbers=[number], views=[view])

    def _get(self, key: ObjectKey, start: int, size: int) -> bytes | None:
        return self._store.ask(lambda: self._store.get(key, start, size))

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        self._store.delete(keys)


class _Session(FramedReadSession):
    """A read whose objects are in use as long as it lasts."""

    def __init__(
        self, store: ValueStore, values: NamedValues, state: FramedState, request: ReadRequest
    ) -> None:
        super().__init__(values, state, request, check_open=store.check_open)
        self._store = store
        self._ending = threading.Lock()
        self._used = request.keys
        store.use(self._used, 1)

    def close(self) -> None:
        """See ReadSession."""
        super().close()
        with self._ending:
            used, self._used = self._used, ()
        self._store.use(used, -1)


class _Write(KeptFramesWrite):
    """A write that puts one value after the other."""

    def __init__(
        self,
        store: ValueStore,
        values: NamedValues,
        state: FramedState,
        batches: Sequence[WriteBatch],
        kept_bytes: int,
    ) -> None:
        super().__init__(
            values,
            state,
            batches,
            label=store.label,
            max_object_bytes=store.capabilities.max_object_bytes or _MAX_OBJECT_BYTES,
            kept_bytes=kept_bytes,
            block_bytes=_BLOCK_BYTES,
        )
        self._store = store

    def publish(self, work: FramedBatch) -> None:
        """See FramedWrite."""
        for at in work.fresh.tolist():
            status = self._put(work, at, replace=at in work.replaces)
            if status is WriteStatus.EXISTS and not self.found(work, [at]):
                status = self._put(work, at, replace=True)
            work.statuses[at] = status
            if status is not WriteStatus.EXISTS:
                self.state.count("written" if status is WriteStatus.WRITTEN else "full")

    def _put(self, work: FramedBatch, at: int, *, replace: bool) -> WriteStatus:
        key, value = work.batch.keys[at], self.row(work, at).data
        return self._store.ask(lambda: self._store.put(key, value, replace=replace))
