"""Reads of compressed objects: which streams there are, how long they are, and what unpacks right."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess, HostAccess
from kvlinker.errors import StoreClosedError, StoreError, UnsupportedOperationError
from kvlinker.event_counts import EventCounts
from kvlinker.guard import checked_flags, checked_read
from kvlinker.keys import digest_fields
from kvlinker.plans import TransferPlan
from kvlinker.store import ObjectKey, ReadRequest, ReadSession, ReadStatus, Store
from kvlinker.stores.compression import StreamTable, Unpacker
from kvlinker.stores.host_pages import plan_of_rows, slots_of
from kvlinker.stores.stream_lengths import StreamLengths, cells_of
from kvlinker.stores.tier_copy import of_keys

__all__ = ["CompressedReadSession", "StoredStreams"]

_OK, _MISS = ReadStatus.OK, ReadStatus.MISS
_FORM = "kvlinker.compressed/1"
_CHUNK_BYTES = 32 << 20
"""Bytes of the objects that are read and unpacked at a time, or one object."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Part:
    """Objects of a chunk whose streams have one length, and the session that reads them."""

    stream_bytes: int
    positions: Sequence[int]
    """Which objects of the chunk the session was opened for; of some it has none."""
    session: ReadSession
    tables: dict[int, StreamTable] = field(default_factory=dict)
    """By number in the session; of those objects that are there and right so far."""


class StoredStreams:
    """The streams in the store inside a compressed one."""

    def __init__(self, store: Store, lengths: StreamLengths, counts: EventCounts) -> None:
        """Keep an open store, and where lengths and events are noted."""
        self.store = store
        self.lengths = lengths
        self.counts = counts
        self.reads_ranges = store.capabilities.ranged_reads

    @staticmethod
    def fingerprint(fingerprint: bytes) -> bytes:
        """Return the fingerprint of streams of a layout; level and items make no other one."""
        return digest_fields(_FORM, (fingerprint,), size=16)

    def asked(self, request: ReadRequest, stream_bytes: int) -> ReadRequest:
        """Return the request for streams of some length."""
        fingerprint = self.fingerprint(request.fingerprint)
        return replace(request, object_bytes=stream_bytes, fingerprint=fingerprint)

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """Return the store's hints."""
        name = type(self.store).__name__
        return checked_flags(name, "exists", self.store.exists(keys), len(keys))

    def find(self, request: ReadRequest) -> tuple[bool, ...]:
        """Return which objects there are, as far as their tables say."""
        found: list[bool] = []
        for chunk in _chunks(request):
            with closing(_Chunk(self, chunk)) as there:
                found += [status is _OK for status in there.statuses]
        return tuple(found)

    def drop(self, keys: Sequence[ObjectKey]) -> None:
        """Count and remove objects that cannot be unpacked."""
        self.counts.add("undecodable", len(keys))
        try:
            self.store.delete(keys)
        except StoreError:  # what was read besides is right all the same
            self.counts.add("undeleted", len(keys))


class _Chunk:
    """Some objects of a request, which are read together."""

    def __init__(self, streams: StoredStreams, request: ReadRequest) -> None:
        """Open what there is of the objects: of the usual length first."""
        self._streams, self._request = streams, request
        self._parts: list[_Part] = []
        self._sessions = ExitStack()
        self.statuses = [_MISS] * len(request.keys)
        """What is known of each object so far: OK for those whose tables are right."""
        try:
            self._search()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the objects."""
        self._sessions.close()

    # ---- which streams there are --------------------------------------------------------------

    def _search(self) -> None:
        """Ask for streams of one length after the other, until nothing is left that exists."""
        usual, *others = self._streams.lengths.candidates(self._request.object_bytes)
        rest = self._ask(usual, range(len(self.statuses)))
        if not rest:
            return
        exists = self._streams.exists([self._request.keys[i] for i in rest])
        rest = [i for i, is_there in zip(rest, exists, strict=True) if is_there]
        for length in others:
            if not rest:
                break
            rest = self._ask(length, rest)

    def _ask(self, length: int, positions: Sequence[int]) -> Sequence[int]:
        """Open streams of one length, and read their tables; return the objects that have none."""
        streams = self._streams
        asked = streams.asked(of_keys(self._request, positions), length)
        session = streams.store.open_read(asked)
        with ExitStack() as undo:
            undo.callback(session.close)
            part = _Part(stream_bytes=length, positions=positions, session=session)
            statuses = self._read_tables(part)
            missing = [i for i, status in zip(positions, statuses, strict=True) if status is _MISS]
            if len(missing) < len(positions):
                self._parts.append(part)
                self._sessions.callback(session.close)
                undo.pop_all()
                streams.lengths.note(self._request.object_bytes, length)
        return missing

    def _read_tables(self, part: _Part) -> Sequence[ReadStatus]:
        """Read what streams begin with until their tables are there."""
        offsets, sizes = cells_of(part.stream_bytes)
        count = 1 if self._streams.reads_ranges else len(offsets)
        while True:
            rows = np.empty((len(part.positions), part.stream_bytes), dtype=np.uint8)
            statuses = self._read_cells(part, rows, np.arange(count))
            good = [i for i, status in enumerate(statuses) if status is _OK]
            have = int(sizes[:count].sum())
            claimed = [StreamTable.size_of(rows[i]) or 0 for i in good]
            # What cannot be is damaged, and must not keep others from being read.
            needed = max((size for size in claimed if size <= part.stream_bytes), default=0)
            if needed <= have:
                break
            count = int(np.searchsorted(offsets, needed, side="left"))
        for i, status in enumerate(statuses):
            self._note_table(part, i, status, rows[i, :have])
        return statuses

    def _note_table(
        self, part: _Part, number: int, status: ReadStatus, stream: NDArray[np.uint8]
    ) -> None:
        position = part.positions[number]
        self.statuses[position] = status
        if status is not _OK:
            return
        table = StreamTable.decode(
            stream, object_bytes=self._request.object_bytes, stream_bytes=part.stream_bytes
        )
        if table is None:
            self._fail(position)
        else:
            part.tables[number] = table

    def _fail(self, position: int) -> None:
        self.statuses[position] = ReadStatus.CORRUPT
        self._streams.drop([self._request.keys[position]])

    def _read_cells(
        self, part: _Part, rows: NDArray[np.uint8], cells: IndexArray
    ) -> tuple[ReadStatus, ...]:
        """Read some cells of every stream of a part to their places in rows."""
        offsets, sizes = cells_of(part.stream_bytes)
        plan = plan_of_rows("streams", rows, offsets[cells], sizes[cells])
        name = type(self._streams.store).__name__
        return checked_read(name, part.session, plan, HostAccess())

    # ---- what is in them ----------------------------------------------------------------------

    def read(
        self, plan: TransferPlan, memory: DeviceAccess, unpacker: Unpacker
    ) -> Sequence[ReadStatus]:
        """Read the ranges of a plan of the chunk's objects into pool memory."""
        statuses = [*self.statuses]
        for part in self._parts:
            for number, status in self._read_part(part, plan, memory, unpacker).items():
                statuses[part.positions[number]] = status
        return statuses

    def _read_part(
        self, part: _Part, plan: TransferPlan, memory: DeviceAccess, unpacker: Unpacker
    ) -> dict[int, ReadStatus]:
        """Return a status by number in the part's session, of objects whose tables are right."""
        ranges = plan.spans.offset, plan.range_bytes
        blocks = _blocks(part, ranges)
        cells = self._cells(part, ranges, blocks)
        if not len(cells):
            return {}
        streams = np.empty((len(part.positions), part.stream_bytes), dtype=np.uint8)
        given = self._read_cells(part, streams, cells)
        found = {number: given[number] for number in part.tables}
        good = [number for number, status in found.items() if status is _OK]
        rows = np.empty((len(good), plan.object_bytes), dtype=np.uint8)
        right = []
        for number, row in zip(good, rows, strict=True):
            table = part.tables[number]
            if unpacker.unpack(table, streams[number], blocks[table.form], ranges, row):
                right.append(number)
            else:
                found[number] = ReadStatus.CORRUPT
                del part.tables[number]
                self._fail(part.positions[number])
        if right:
            slots = np.array([good.index(number) for number in right], dtype=np.int64)
            chosen = plan.select([part.positions[number] for number in right])
            memory.copy_in(chosen, slots_of(rows, chosen=slots))
        return found

    def _cells(
        self,
        part: _Part,
        ranges: tuple[IndexArray, IndexArray],
        blocks: Mapping[bytes, IndexArray],
    ) -> IndexArray:
        """Return the cells that any object of a part needs, ascending."""
        offsets, _ = cells_of(part.stream_bytes)
        if not len(ranges[0]) or not part.tables:
            return np.arange(0)
        if not self._streams.reads_ranges:
            return np.arange(len(offsets))
        places = [table.places_of(blocks[table.form], ranges) for table in part.tables.values()]
        begins, ends = (np.concatenate(column) for column in zip(*places, strict=True))
        marks = np.zeros(len(offsets) + 1, dtype=np.int64)
        np.add.at(marks, np.searchsorted(offsets, begins, side="right") - 1, 1)
        np.add.at(marks, np.searchsorted(offsets, ends, side="left"), -1)
        return np.flatnonzero(np.cumsum(marks[:-1]) > 0)


def _blocks(part: _Part, ranges: tuple[IndexArray, IndexArray]) -> Mapping[bytes, IndexArray]:
    """Return the blocks that ranges lie in, by form: most objects have the same."""
    forms = {table.form: table for table in part.tables.values()}
    return {form: table.blocks_of(*ranges) for form, table in forms.items()}


class CompressedReadSession(ReadSession):
    """Objects of a request, unpacked on their way into pool memory."""

    def __init__(self, streams: StoredStreams, request: ReadRequest) -> None:
        """Open every object that there is."""
        self._streams, self._request = streams, request
        self._lock = threading.Lock()
        self._is_closed = False
        self._chunks: list[_Chunk] = []
        with ExitStack() as opening:
            for chunk in _chunks(request):
                self._chunks.append(_Chunk(streams, chunk))
                opening.callback(self._chunks[-1].close)
            self._closing = opening.pop_all()

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        """See ReadSession."""
        self._check(plan)
        statuses: list[ReadStatus] = []
        unpacker = Unpacker()
        with self._lock:  # what one read finds damaged, another one leaves alone
            for chunk in self._chunks:
                first = len(statuses)
                own = plan.select(range(first, first + len(chunk.statuses)))
                statuses += chunk.read(own, memory, unpacker)
        return tuple(statuses)

    def _check(self, plan: TransferPlan) -> None:
        if self._is_closed:
            msg = f"pool {plan.pool!r}: this read session was closed; open another"
            raise StoreClosedError(msg)
        self._request.check(plan)
        if not self._streams.reads_ranges and int(plan.range_bytes.sum()) != plan.object_bytes:
            msg = f"pool {plan.pool!r}: this store reads whole objects alone; see its capabilities"
            raise UnsupportedOperationError(msg)

    def close(self) -> None:
        """See ReadSession."""
        self._is_closed = True
        self._closing.close()


def _chunks(request: ReadRequest) -> Iterator[ReadRequest]:
    step = max(1, _CHUNK_BYTES // request.object_bytes)
    count = len(request.keys)
    for start in range(0, count, step):
        yield of_keys(request, range(start, min(start + step, count)))
