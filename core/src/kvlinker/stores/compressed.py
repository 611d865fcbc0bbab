"""A compressed store keeps objects in another store in fewer bytes.

The other store sees streams of `kvlinker.stores.compression`, of one of some lengths, which a reader finds out: it
asks for the length that it found last, and then for others. A stream is written in cells that can be read alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from kvlinker.device import DeviceAccess, HostAccess
from kvlinker.errors import ContractError
from kvlinker.event_counts import EventCounts
from kvlinker.integers import as_integer
from kvlinker.store import (
    ReadRequest,
    ReadSession,
    Store,
    StoreCapabilities,
    StoreStats,
    WriteBatch,
    WriteStatus,
)
from kvlinker.stores.compressed_reads import CompressedReadSession, StoredStreams
from kvlinker.stores.compression import (
    ITEM_BYTES,
    RAW_EXTRA_BYTES,
    Packer,
    check_installed,
    cut_blocks,
)
from kvlinker.stores.host_pages import plan_of_rows, slots_of
from kvlinker.stores.stream_lengths import MAX_STREAM_BYTES, StreamLengths, cells_of
from kvlinker.stores.wrapped import WrappedStore, check_takes_other_bytes, counting

__all__ = ["CompressedStore"]

_EVENTS = ("bytes_in", "bytes_out", "kept_as_they_are", "undecodable", "undeleted")
_CHUNK_BYTES = 16 << 20
"""Bytes that are in host memory as they are at a time, or one object."""
_MAX_LEVEL = 19


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stream:
    """The stream of an object of a batch that is to be written."""

    batch: int
    position: int
    pieces: list[NDArray[np.uint8]]
    """Empty once they lie side by side: host memory has the streams of a call once, and not twice."""
    stream_bytes: int
    """With what fills it up to a length that a reader asks for."""


class CompressedStore(WrappedStore):
    """A store whose objects are compressed before they reach the store in it."""

    def __init__(self, store: Store, *, level: int = 1, item_bytes: int = 2) -> None:
        """Take over an open store.

        Args:
            store: moves bytes through the host, and bounds no ranges; it leaves objects of another length
                than is asked for where they are.
            level: how much effort Zstandard makes, from 1 to 19.
            item_bytes: of the values in the objects, such as 2 for bfloat16: only writers need it.

        Raises:
            ContractError: a value is out of bounds, or the store needs the pools' own memory.
            UnsupportedOperationError: the package with the codec is not installed.
        """
        super().__init__(store)
        check_installed()
        self._level = as_integer(level, "level", at_least=1, at_most=_MAX_LEVEL)
        self._item_bytes = as_integer(item_bytes, "item_bytes")
        if self._item_bytes not in ITEM_BYTES:
            msg = f"item_bytes must be one of {', '.join(map(str, ITEM_BYTES))}, got {item_bytes}"
            raise ContractError(msg)
        check_takes_other_bytes(store, done="compressed", do="compress")
        able = store.capabilities
        self._counts = EventCounts(_EVENTS)
        self._streams = StoredStreams(store, StreamLengths(), self._counts)
        limit = MAX_STREAM_BYTES if able.max_object_bytes is None else able.max_object_bytes
        self._limit = min(limit, MAX_STREAM_BYTES) - RAW_EXTRA_BYTES
        self._capabilities = replace(able, max_object_bytes=self._limit)

    @property
    def capabilities(self) -> StoreCapabilities:
        """What the store in it can do."""
        return self._capabilities

    def open_read(self, request: ReadRequest) -> ReadSession:
        """See Store."""
        return CompressedReadSession(self._streams, request)

    def prefetch(self, request: ReadRequest, *, range_bytes: Sequence[int] = ()) -> int:  # noqa: ARG002  # cells are read
        """See Store; of those objects that are as long as what was read or written last."""
        length = self._streams.lengths.usual(request.object_bytes)
        _, sizes = cells_of(length)
        return self._inner.prefetch(
            self._streams.asked(request, length), range_bytes=sizes.tolist()
        )

    def stats(self) -> StoreStats:
        """See Store; `bytes_in` and `bytes_out` are of written objects before and after compression."""
        return counting(self._inner.stats(), self._counts.snapshot())

    # ---- writing ------------------------------------------------------------------------------

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store; what is stored already is neither copied nor compressed."""
        answer = [self._answer_before(batch) for batch in batches]
        streams = [
            stream
            for number, batch in enumerate(batches)
            for stream in self._pack(number, batch, answer[number], memory)
        ]
        made = [*self._inner_batches(batches, streams)]
        inner_batches = [batch for _, batch in made]
        given = self._inner_write(inner_batches, HostAccess(), may_publish)
        statuses = [status for of_batch in given for status in of_batch]
        for stream, status in zip(streams, statuses, strict=True):
            answer[stream.batch][stream.position] = status
            if status is WriteStatus.WRITTEN:
                self._note(batches[stream.batch].plan.object_bytes, stream.stream_bytes)
        return tuple(map(tuple, answer))

    def _note(self, object_bytes: int, stream_bytes: int) -> None:
        self._counts.add("bytes_in", object_bytes)
        self._counts.add("bytes_out", stream_bytes)
        self._counts.add("kept_as_they_are", stream_bytes == object_bytes + RAW_EXTRA_BYTES)
        self._streams.lengths.note(object_bytes, stream_bytes)

    def _answer_before(self, batch: WriteBatch) -> list[WriteStatus]:
        """Return what is known of objects before they are copied: WRITTEN for those that are to be."""
        count, size = len(batch.keys), batch.plan.object_bytes
        if size > self._limit:
            return [WriteStatus.FAILED] * count
        if self._capabilities.overwrite:
            return [WriteStatus.WRITTEN] * count
        answer = [WriteStatus.WRITTEN] * count
        hints = [i for i, is_there in enumerate(self._inner_exists(batch.keys)) if is_there]
        request = ReadRequest(
            keys=tuple(batch.keys[i] for i in hints),
            object_bytes=size,
            fingerprint=batch.fingerprint,
        )
        for i, is_there in zip(hints, self._streams.find(request), strict=True):
            if is_there:
                answer[i] = WriteStatus.EXISTS
        return answer

    def _pack(
        self, number: int, batch: WriteBatch, answer: Sequence[WriteStatus], memory: DeviceAccess
    ) -> Sequence[_Stream]:
        """Copy objects out of pool memory and compress them, some at a time."""
        wanted = [i for i, status in enumerate(answer) if status is WriteStatus.WRITTEN]
        plan, size = batch.plan, batch.plan.object_bytes
        packer = Packer(level=self._level, item_bytes=self._item_bytes)
        ends = cut_blocks(plan.spans.offset, plan.range_bytes) if wanted else ()
        step = max(1, _CHUNK_BYTES // size)
        streams = []
        for start in range(0, len(wanted), step):
            chosen = wanted[start : start + step]
            rows = np.empty((len(chosen), size), dtype=np.uint8)
            memory.copy_out(plan.select(chosen), slots_of(rows))
            for position, row in zip(chosen, rows, strict=True):
                pieces = packer.pack(row, ends)
                length = self._streams.lengths.fitting(size, sum(map(len, pieces)))
                streams.append(
                    _Stream(batch=number, position=position, pieces=pieces, stream_bytes=length)
                )
        return streams

    def _inner_batches(
        self, batches: Sequence[WriteBatch], streams: Sequence[_Stream]
    ) -> Iterator[tuple[NDArray[np.uint8], WriteBatch]]:
        """Yield streams of one length side by side as a batch, in order, with the memory that they are in."""
        for (number, length), group in groupby(streams, key=lambda s: (s.batch, s.stream_bytes)):
            own = [*group]
            batch = batches[number]
            rows = np.zeros((len(own), length), dtype=np.uint8)
            for row, stream in zip(rows, own, strict=True):
                np.concatenate(stream.pieces, out=row[: sum(map(len, stream.pieces))])
                stream.pieces.clear()
            yield (
                rows,
                WriteBatch(
                    keys=tuple(batch.keys[stream.position] for stream in own),
                    plan=plan_of_rows(batch.plan.pool, rows, *cells_of(length)),
                    fingerprint=self._streams.fingerprint(batch.fingerprint),
                ),
            )
