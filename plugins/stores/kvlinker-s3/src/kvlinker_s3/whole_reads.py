"""A read of whole objects makes their checksums while it copies, and looks at all headers at once.

Bytes that are not right reach pool memory so, and are told: whatever is not as it should be at first sight is read
once more in the way that compares first, and that way says what became of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess, HostObjects, room_for_sums
from kvlinker.errors import StoreClosedError
from kvlinker.framed_looks import FramedState
from kvlinker.framed_objects import FoundObjects, WantedObjects, sort_values
from kvlinker.framed_reads import FramedReadSession
from kvlinker.frames import header_bytes
from kvlinker.named_values import Beginning
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.store import ReadRequest, ReadSession, ReadStatus
from kvlinker_s3.object_values import ObjectValues

__all__ = ["S3ReadSession"]


class S3ReadSession(ReadSession):
    """Objects that were asked for; read by layer, they are read as those of other stores are."""

    def __init__(
        self,
        values: ObjectValues,
        state: FramedState,
        request: ReadRequest,
        *,
        check_open: Callable[[], None],
    ) -> None:
        """Note what is asked for; see FramedReadSession."""
        self._values = values
        self._state = state
        self._request = request
        self._check_open = check_open
        self._lock = threading.Lock()
        # Of its own: whoever closes the session does not wait for a server that is silent.
        self._looking = threading.Lock()
        self._is_closed = False
        self._only: FramedReadSession | None = None
        """What reads all of the objects, where the first read was not of the whole of them."""
        self._sessions: list[tuple[IndexArray, FramedReadSession]] = []
        """Else one for the objects that were right at first sight, and one for the others; and which these are."""

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        """See ReadSession.

        Raises:
            StoreError: the server cannot be asked, or answers with something else.
        """
        if self._only is not None:
            return self._only.read(plan, memory)
        self._check(plan)
        try:
            return self._read(plan, memory)
        finally:
            if self._is_closed:  # under this read, which went on
                self.close()

    def _read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        with self._looking:
            is_first = self._only is None and not self._sessions
            right = self._read_first(plan, memory) if is_first else None
        if self._only is not None:
            return self._only.read(plan, memory)
        statuses = [ReadStatus.OK] * len(self._request.keys)
        for positions, session in self._sessions:
            if right is None or not right[positions].all():
                some = plan.select(positions) if len(positions) < len(statuses) else plan
                for at, status in zip(positions.tolist(), session.read(some, memory), strict=True):
                    statuses[at] = status
        return tuple(statuses)

    def _check(self, plan: TransferPlan) -> None:
        self._check_open()
        if self._is_closed:
            msg = f"pool {plan.pool!r}: this read session was closed; open another"
            raise StoreClosedError(msg)
        self._request.check(plan)

    def close(self) -> None:
        """See ReadSession."""
        with self._lock:
            self._is_closed = True
            sessions = [session for _, session in self._sessions]
            only = self._only
        for session in sessions if only is None else [only]:
            session.close()

    # ---- the first read -----------------------------------------------------------------------

    def _read_first(self, plan: TransferPlan, memory: DeviceAccess) -> NDArray[np.bool_] | None:
        """Read whole objects, if that is what is wanted, and say which are right: [objects]; None where it is not."""
        right = self._read_whole(plan, memory)
        if right is None:
            only = self._session_of(np.arange(len(self._request.keys), dtype=np.int64))
            sessions = []
        else:
            only = None
            parts = [np.flatnonzero(right), np.flatnonzero(~right)]
            sessions = [(part, self._session_of(part)) for part in parts if len(part)]
        with self._lock:
            self._only, self._sessions = only, sessions
        return right

    def _session_of(self, positions: IndexArray) -> FramedReadSession:
        request = self._request
        some = ReadRequest(
            keys=tuple([request.keys[at] for at in positions.tolist()]),
            object_bytes=request.object_bytes,
            fingerprint=request.fingerprint,
        )
        return FramedReadSession(self._values, self._state, some, check_open=self._check_open)

    def _read_whole(self, plan: TransferPlan, memory: DeviceAccess) -> NDArray[np.bool_] | None:
        request = self._request
        sums = room_for_sums(plan, memory, self._state.checksum)
        header = self._state.header_bytes(
            request.fingerprint, request.object_bytes, guess=header_bytes(len(plan.range_bytes))
        )
        size = header + request.object_bytes
        is_whole = int(plan.range_bytes.sum()) == request.object_bytes
        if sums is None or not is_whole or size > self._values.answer_bytes:
            return None
        headers: list[bytes | None] = [None] * len(request.keys)

        def take(part: slice, rows: NDArray[np.uint8], found: Sequence[Beginning | None]) -> None:
            there = _whole_ones(found, size)
            if len(there):
                positions = there + part.start
                sums[:, positions] = _copy_in(plan, positions, rows, there, header, memory)
            for row in there.tolist():
                headers[part.start + row] = rows[row, :header].tobytes()

        self._values.each_whole(request.keys, size, take)
        return self._which_are_right(plan, headers, sums)

    def _which_are_right(
        self, plan: TransferPlan, headers: Sequence[bytes | None], sums: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        """Tell which objects have a header that says what was copied: [objects]."""
        request = self._request
        wanted = WantedObjects(
            keys=request.keys, object_bytes=request.object_bytes, fingerprint=request.fingerprint
        )
        lengths = [len(one or b"") + request.object_bytes for one in headers]
        look = sort_values(wanted, headers, lengths, checksum=self._state.checksum)
        right = np.zeros(len(headers), dtype=np.bool_)
        for part in look.parts:
            self._state.note(wanted, part.header_bytes)
            right[part.positions] = _are_as_told(part, plan, sums)
        return right


def _whole_ones(found: Sequence[Beginning | None], size: int) -> IndexArray:
    """Return the rows of values that have so many bytes, and no more."""
    return np.array(
        [
            row
            for row, one in enumerate(found)
            if one is not None and len(one.raw) == one.length == size
        ],
        dtype=np.int64,
    )


def _copy_in(
    plan: TransferPlan,
    positions: IndexArray,
    rows: NDArray[np.uint8],
    slots: IndexArray,
    header: int,
    memory: DeviceAccess,
) -> NDArray[np.uint64]:
    """Copy objects into the pools, and return the checksums of what was copied: [spans, objects]."""
    some = plan.select(positions) if len(positions) < plan.num_pages else plan
    sums = np.zeros((len(plan.spans.base), len(positions)), dtype=np.uint64)
    span = BufferSpan(
        base_ptr=int(rows.__array_interface__["data"][0]),
        rows=len(rows),
        row_bytes=rows.shape[1],
        row_stride=rows.shape[1],
        label="values",
    )
    objects = HostObjects(span=span, slots=slots, first_offset=-header, sums=sums)
    memory.copy_in(some, objects)
    return sums


def _are_as_told(
    part: FoundObjects, plan: TransferPlan, sums: NDArray[np.uint64]
) -> NDArray[np.bool_]:
    """Tell which objects' headers have the ranges and the checksums of what was copied: [objects of the part]."""
    headers, order = part.headers, np.argsort(plan.spans.offset, kind="stable")
    if headers.offsets.shape[1] != len(order):
        return np.zeros(len(part.positions), dtype=np.bool_)
    is_told = (
        (headers.offsets == plan.spans.offset[order])
        & (headers.sizes == plan.range_bytes[order])
        & (headers.checksums == sums[order][:, part.positions].T)
    )
    return np.asarray(is_told.all(axis=1), dtype=np.bool_)
