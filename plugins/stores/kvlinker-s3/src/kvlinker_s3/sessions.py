"""A read session asks for what a plan needs of each object, and compares every checksum before a byte is copied."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.errors import ContractError, StoreClosedError
from kvlinker.framed_objects import (
    FoundObjects,
    Piece,
    WantedObjects,
    cut_plan,
)
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan, MemoryRegion
from kvlinker.store import ReadRequest, ReadSession, ReadStatus
from kvlinker_s3.fetching import Fetched, fetch
from kvlinker_s3.headers import look_at
from kvlinker_s3.requests import begin_of, delete
from kvlinker_s3.state import StoreState, parts_of

__all__ = ["S3ReadSession"]

_OK, _MISS, _CORRUPT, _FAILED = range(4)
_STATUSES = (ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT, ReadStatus.FAILED)
Flags: TypeAlias = NDArray[np.bool_]


class S3ReadSession(ReadSession):
    """Objects that were asked for; what is removed meanwhile reads as a miss from then on."""

    def __init__(self, state: StoreState, request: ReadRequest) -> None:
        """Note what is asked for; the server is asked with the first read."""
        self._state = state
        self._request = request
        self._names = state.names.of_objects(request.keys)
        self._lock = threading.Lock()
        self._is_closed = False
        self._parts: Sequence[FoundObjects] | None = None
        self._status = np.zeros(len(request.keys), dtype=np.int64)

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        """See ReadSession.

        Raises:
            StoreError: the server cannot be asked, or answers with other ranges.
        """
        self._state.reads.check_open()
        self._check(plan)
        with self._lock:
            if self._parts is None:
                self._parts = self._look()
        for part in self._parts:
            for numbers in part.alike():
                self._read_part(part, numbers, plan, memory)
        return tuple(map(_STATUSES.__getitem__, self._status.tolist()))

    def _check(self, plan: TransferPlan) -> None:
        keys, size = len(self._request.keys), self._request.object_bytes
        if self._is_closed:
            msg = f"pool {plan.pool!r}: this read session was closed; open another"
            raise StoreClosedError(msg)
        if plan.num_pages != keys or plan.object_bytes != size:
            msg = (
                f"pool {plan.pool!r}: a plan of {plan.num_pages} objects of {plan.object_bytes} B "
                f"does not fit a request of {keys} objects of {size} B"
            )
            raise ContractError(msg)

    def close(self) -> None:
        """See ReadSession."""
        self._is_closed = True

    # ---- headers ------------------------------------------------------------------------------

    def _look(self) -> Sequence[FoundObjects]:
        request = self._request
        wanted = WantedObjects(
            keys=request.keys, object_bytes=request.object_bytes, fingerprint=request.fingerprint
        )
        look = look_at(self._state, self._state.reads, wanted)
        self._status[[*look.absent, *look.others]] = _MISS
        self._state.count("missed", len(look.absent) + len(look.others))
        self._drop(np.array(look.damaged, dtype=np.int64))
        return look.parts

    def _drop(self, positions: IndexArray) -> None:
        """Remove objects that are not what was written, and say so."""
        if len(positions):
            self._status[positions] = _CORRUPT
            self._state.count("corrupt", len(positions))
            self._state.reads.run([delete([self._names[at]]) for at in positions.tolist()])

    # ---- payload ------------------------------------------------------------------------------

    def _read_part(
        self, part: FoundObjects, numbers: IndexArray, plan: TransferPlan, memory: DeviceAccess
    ) -> None:
        """Read what a plan needs of some objects of a part, whose tables of ranges are the same."""
        limit = self._state.options.call_bytes
        for pieces in _groups(cut_plan(part.headers, int(numbers[0]), plan, limit), limit):
            good = numbers[self._status[part.positions[numbers]] == _OK]
            each = max(1, limit // sum(piece.size for piece in pieces))
            for chosen in parts_of(len(good), each):
                self._read_pieces(part, good[chosen], pieces, memory)

    def _read_pieces(
        self,
        part: FoundObjects,
        numbers: IndexArray,
        pieces: Sequence[Piece],
        memory: DeviceAccess,
    ) -> None:
        block = self._state.blocks.take(len(numbers) * sum(piece.size for piece in pieces))
        rows = _rows_of(block, pieces, len(numbers))
        positions = part.positions[numbers]
        fetches = [
            fetch(self._names[at], part, number, pieces, [of_piece[row] for of_piece in rows])
            for row, (at, number) in enumerate(
                zip(positions.tolist(), numbers.tolist(), strict=True)
            )
        ]
        fetched = np.array([found.value for found in self._state.reads.run(fetches)])
        is_right = fetched == Fetched.RIGHT.value
        if is_right.any():
            for piece, of_piece in zip(pieces, rows, strict=True):
                _copy_in(piece, positions[is_right], of_piece, np.flatnonzero(is_right), memory)
        self._state.blocks.give(block)  # where it went wrong, requests may still be filling it
        self._vanish(positions[fetched == Fetched.GONE.value])
        is_short = fetched == Fetched.SHORT.value
        wrong = is_short | (fetched == Fetched.CHANGED.value)
        self._look_again(part, numbers[wrong], is_short[wrong])

    def _vanish(self, positions: IndexArray) -> None:
        """Note that objects went, or were written anew, since their headers were read."""
        self._status[positions] = _MISS
        self._state.count("vanished", len(positions))

    def _look_again(self, part: FoundObjects, numbers: IndexArray, is_short: Flags) -> None:
        """Tell objects that went or were written anew since their headers were read from damaged ones."""
        if not len(numbers):
            return
        positions = part.positions[numbers]
        found = self._state.reads.run(
            [begin_of(self._names[at], part.header_bytes) for at in positions.tolist()]
        )
        is_same = np.array(
            [
                now is not None and now.raw == part.raw[number]
                for number, now in zip(numbers.tolist(), found, strict=True)
            ]
        )
        self._vanish(positions[~is_same])
        # A short answer says nothing of the object, which may be right.
        self._status[positions[is_same & is_short]] = _FAILED
        self._state.count("short_answers", int((is_same & is_short).sum()))
        self._drop(positions[is_same & ~is_short])


def _groups(pieces: Iterator[Piece], limit: int) -> Iterator[Sequence[Piece]]:
    """Yield pieces that are asked for at once: of at most `limit` bytes together, or one alone."""
    group: list[Piece] = []
    for piece in pieces:
        if group and sum(one.size for one in group) + piece.size > limit:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _rows_of(
    block: NDArray[np.uint8], pieces: Sequence[Piece], count: int
) -> Sequence[NDArray[np.uint8]]:
    """Return the places in a block, [objects, bytes] for each piece."""
    ends = np.cumsum([count * piece.size for piece in pieces]).tolist()
    return [
        block[end - count * piece.size : end].reshape(count, piece.size)
        for piece, end in zip(pieces, ends, strict=True)
    ]


def _copy_in(
    piece: Piece,
    positions: IndexArray,
    rows: NDArray[np.uint8],
    slots: IndexArray,
    memory: DeviceAccess,
) -> None:
    """Copy a piece of some objects, which are in some of the rows, into the pools."""
    span = BufferSpan(
        base_ptr=rows.ctypes.data,
        rows=len(rows),
        row_bytes=piece.size,
        row_stride=piece.size,
        label="values",
        region=MemoryRegion(base_ptr=rows.ctypes.data, size_bytes=rows.nbytes, owner=rows),
    )
    plan = piece.plan
    selected = plan if len(positions) == plan.num_pages else plan.select(positions)
    memory.copy_in(selected, HostObjects(span=span, slots=slots, first_offset=piece.start))
