"""A store of framed values in a dictionary: the least that a store has to say of its wire, and what it was asked."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np

from kvlinker.device import DeviceAccess
from kvlinker.framed_looks import FramedState
from kvlinker.framed_reads import FramedReadSession
from kvlinker.framed_writes import FramedBatch, KeptFramesWrite
from kvlinker.host_blocks import HostBlocks
from kvlinker.named_values import (
    Beginning,
    Fetched,
    NamedValues,
    Range,
    RowViews,
    digits_of_key,
    digits_of_namespace,
)
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
from kvlinker.store_lanes import StoreLane

__all__ = ["DictionaryStore", "DictionaryValues", "checksum"]

MOST_BYTES = 4 << 20


def checksum(data: memoryview) -> int:
    return zlib.crc32(data) << 32 | zlib.adler32(data)


def _wipe(views: Sequence[memoryview]) -> None:
    for view in views:
        view[:] = bytes(len(view))


def _in_rows(views: Sequence[memoryview]) -> RowViews | None:
    """Return views as rows with something between them, where they are equally long."""
    sizes = {len(view) for view in views}
    if len(sizes) != 1:
        return None
    size = sizes.pop()
    block = np.full((len(views), size + 7), 0xA5, dtype=np.uint8)
    for row, view in zip(block, views, strict=True):
        row[3 : 3 + size] = view
    return RowViews(block[:, 3 : 3 + size])


class DictionaryValues(NamedValues):
    """Values in a dictionary, a few at a time and backwards; every answer is noted as (key, first byte, bytes).

    Every other range comes in rows. What was yielded is gone when the next is asked for.
    """

    def __init__(self, *, answer_bytes: int = 1 << 20) -> None:
        self.values: dict[str, bytes] = {}
        self.answers: list[tuple[ObjectKey, int, int]] = []
        self.begins: list[tuple[int, int]] = []
        """Keys, and bytes of each, of which beginnings were asked for together."""
        self.fetches: list[tuple[int, int]] = []
        """Ranges that were wanted and that were expected, of each fetch."""
        self.open_fetches = 0
        self.change: Callable[[ObjectKey, int, bytes], bytes] = lambda _key, _start, found: found
        self._answer_bytes = answer_bytes

    @property
    def answer_bytes(self) -> int:
        return self._answer_bytes

    def begin(
        self, keys: Sequence[ObjectKey], size: int
    ) -> Iterator[Sequence[tuple[int, Beginning | None]]]:
        self.begins.append((len(keys), size))
        for first in reversed(range(0, len(keys), 2)):
            numbers = range(first, min(first + 2, len(keys)))[::-1]
            found = [(number, self._begin(keys[number], size)) for number in numbers]
            yield found
            _wipe([one.raw for _, one in found if one is not None])

    def _begin(self, key: ObjectKey, size: int) -> Beginning | None:
        value = self.values.get(digits_of_key(key))
        if value is None:
            return None
        return Beginning(raw=self._answer(key, 0, value[:size]), length=len(value))

    def fetch(
        self, keys: Sequence[ObjectKey], ranges: Sequence[Range], *, expected: Sequence[Range] = ()
    ) -> Generator[Fetched]:
        self.fetches.append((len(ranges), len(expected)))
        self.open_fetches += 1
        try:
            for number, (start, size) in enumerate([*ranges, *expected]):
                for first in range(0, len(keys), 4):
                    numbers = range(first, min(first + 4, len(keys)))[::-1]
                    views = [self._range(keys[at], start, size) for at in numbers]
                    some = [view for view in views if view is not None]
                    rows = _in_rows(some) if number % 2 and len(some) == len(numbers) else None
                    yield Fetched(range=number, numbers=numbers, views=rows or views)
                    _wipe(some)
                    if rows is not None:
                        rows.rows[:] = 0
        finally:
            self.open_fetches -= 1

    def _range(self, key: ObjectKey, start: int, size: int) -> memoryview | None:
        value = self.values.get(digits_of_key(key))
        if value is None or len(value) <= start:
            return None
        return self._answer(key, start, value[start : start + size])

    def _answer(self, key: ObjectKey, start: int, found: bytes) -> memoryview:
        found = self.change(key, start, found)
        self.answers.append((key, start, len(found)))
        return memoryview(bytearray(found))

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            self.values.pop(digits_of_key(key), None)


class DictionaryWrite(KeptFramesWrite):
    """One call of `write`."""

    def __init__(self, store: DictionaryStore, batches: Sequence[WriteBatch]) -> None:
        super().__init__(
            store.values,
            store.state,
            batches,
            label="dictionary",
            max_object_bytes=store.capacity,
            kept_bytes=MOST_BYTES,
            block_bytes=1 << 20,
        )
        self._store = store

    def publish(self, work: FramedBatch) -> None:
        for at in work.fresh.tolist():
            store, key = self._store, work.batch.keys[at]
            if at not in work.replaces and self.found(work, [at]):
                work.statuses[at] = WriteStatus.EXISTS
            elif store.used_bytes + work.value_bytes > store.capacity:
                work.statuses[at] = WriteStatus.FULL
            else:
                store.values.values[digits_of_key(key)] = self.row(work, at).tobytes()
                work.statuses[at] = WriteStatus.WRITTEN
                self.state.count("written")


class DictionaryStore(Store):
    """Objects in a dictionary, of which nothing is evicted."""

    def __init__(self, capacity: int = 8 << 20, *, answer_bytes: int = 1 << 20) -> None:
        self.capacity = capacity
        self.values = DictionaryValues(answer_bytes=answer_bytes)
        self.lane = StoreLane("dictionary", pause_seconds=1.0)
        counters = ("written", "missed", "vanished", "corrupt", "short_answers", "discarded")
        blocks = HostBlocks(2 << 20)
        self.state = FramedState(checksum=checksum, blocks=blocks, counters=counters)

    @property
    def used_bytes(self) -> int:
        return sum(map(len, self.values.values.values()))

    @property
    def capabilities(self) -> StoreCapabilities:
        return StoreCapabilities(persistent=False, shared=False, ranged_reads=True)

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        self.lane.check_open()
        return tuple(digits_of_key(key) in self.values.values for key in keys)

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        self.lane.check_open()
        return DictionaryWrite(self, batches).run(memory, may_publish)

    def open_read(self, request: ReadRequest) -> ReadSession:
        self.lane.check_open()
        check_open = self.lane.check_open
        return FramedReadSession(self.values, self.state, request, check_open=check_open)

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        self.lane.check_open()
        values = self.values.values
        return tuple(values.pop(digits_of_key(key), None) is not None for key in keys)

    def clear(self, namespace: bytes) -> int:
        self.lane.check_open()
        begin = digits_of_namespace(namespace)
        names = [name for name in self.values.values if name.startswith(begin)]
        for name in names:
            del self.values.values[name]
        return len(names)

    def stats(self) -> StoreStats:
        return StoreStats(
            objects=len(self.values.values),
            used_bytes=self.used_bytes,
            capacity_bytes=self.capacity,
            counters=self.state.counters,
        )

    def close(self) -> None:
        self.lane.close()
