"""A read session asks for what a plan needs of each value, and compares every checksum before a byte is copied."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.errors import ContractError, StoreClosedError
from kvlinker.frames import FrameHeaders
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan, MemoryRegion
from kvlinker.store import ReadRequest, ReadSession, ReadStatus
from kvlinker_redis.headers import FoundPart, Wanted, look_at
from kvlinker_redis.replies import expect_view, is_other_type
from kvlinker_redis.state import MAX_COMMANDS, StoreState, checksum, parts_of, run_in_parts
from kvlinker_redis.values import Command, Values, room_for

__all__ = ["RedisReadSession"]

_OK, _MISS, _CORRUPT = range(3)
_NOTHING = memoryview(b"")
_STATUSES = (ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    """Neighbouring ranges of every object of a part, and what of a plan lies in them."""

    start: int
    """Offset in the payload."""
    size: int
    frames: slice
    """Which ranges of the headers these are."""
    plan: TransferPlan


class RedisReadSession(ReadSession):
    """Objects that were asked for; what is evicted meanwhile reads as a miss from then on."""

    def __init__(self, state: StoreState, request: ReadRequest) -> None:
        """Note what is asked for; the server is asked with the first read."""
        self._state = state
        self._request = request
        self._names = state.names.of_objects(request.keys)
        self._lock = threading.Lock()
        self._is_closed = False
        self._parts: Sequence[FoundPart] | None = None
        self._status = np.zeros(len(request.keys), dtype=np.int64)

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        """See ReadSession."""
        self._state.reads.check_open()
        self._check(plan)
        with self._lock:
            if self._parts is None:
                self._parts = self._look()
        for part in self._parts:
            for numbers in _alike(part):
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

    def _look(self) -> Sequence[FoundPart]:
        request = self._request
        wanted = Wanted(
            keys=request.keys, object_bytes=request.object_bytes, fingerprint=request.fingerprint
        )
        look = look_at(self._state, self._state.reads, wanted)
        self._status[[*look.absent, *look.others]] = _MISS
        self._state.count("missed", len(look.absent) + len(look.others))
        self._drop(np.array(look.damaged, dtype=np.int64))
        return look.parts

    def _drop(self, positions: IndexArray) -> None:
        """Remove values that are not what was written, and say so."""
        if len(positions):
            self._status[positions] = _CORRUPT
            self._state.count("corrupt", len(positions))
            names = [self._names[at] for at in positions.tolist()]
            run_in_parts(self._state.reads, [("UNLINK", name) for name in names])

    # ---- payload ------------------------------------------------------------------------------

    def _read_part(
        self, part: FoundPart, numbers: IndexArray, plan: TransferPlan, memory: DeviceAccess
    ) -> None:
        """Read what a plan needs of some objects of a part, whose tables of ranges are the same."""
        for piece in _pieces(part.headers, int(numbers[0]), plan, self._state.options.call_bytes):
            good = numbers[self._status[part.positions[numbers]] == _OK]
            each = max(1, min(MAX_COMMANDS, self._state.options.call_bytes // piece.size))
            for chosen in parts_of(len(good), each):
                self._read_piece(part, good[chosen], piece, memory)

    def _read_piece(
        self, part: FoundPart, numbers: IndexArray, piece: _Piece, memory: DeviceAccess
    ) -> None:
        first = part.header_bytes + piece.start
        positions = part.positions[numbers]
        commands: list[Command] = [
            ("GETRANGE", self._names[at], first, first + piece.size - 1)
            for at in positions.tolist()
        ]
        with self._state.blocks.lent(room_for(len(commands), piece.size)) as block:
            values = self._state.reads.read_values(commands, piece.size, block)
            self._take(part, numbers, piece, values, memory)

    def _take(
        self,
        part: FoundPart,
        numbers: IndexArray,
        piece: _Piece,
        values: Values,
        memory: DeviceAccess,
    ) -> None:
        """Copy those values to their pages that are right; look again at the others."""
        positions = part.positions[numbers]
        views = [
            _NOTHING if is_other_type(reply) else expect_view(reply, "GETRANGE")
            for reply in values.replies
        ]
        is_right = _are_right(part.headers, numbers, piece, views)
        is_gone = np.array([not len(view) for view in views], dtype=np.bool_)
        self._status[positions[is_gone]] = _MISS
        self._state.count("vanished", int(is_gone.sum()))
        self._look_again(part, numbers[~is_right & ~is_gone])
        if is_right.any():
            plan, chosen = piece.plan, positions[is_right]
            selected = plan if len(chosen) == plan.num_pages else plan.select(chosen)
            memory.copy_in(selected, _slots(values, is_right, piece))

    def _look_again(self, part: FoundPart, numbers: IndexArray) -> None:
        """Tell objects that went or were written anew since their headers were read from damaged ones."""
        if not len(numbers):
            return
        positions = part.positions[numbers]
        commands: list[Command] = [
            ("GETRANGE", self._names[at], 0, part.header_bytes - 1) for at in positions.tolist()
        ]
        replies = run_in_parts(self._state.reads, commands)
        is_same = np.array(
            [
                reply == part.raw[number]
                for number, reply in zip(numbers.tolist(), replies, strict=True)
            ]
        )
        self._status[positions[~is_same]] = _MISS
        self._state.count("vanished", int((~is_same).sum()))
        self._drop(positions[is_same])


def _slots(values: Values, chosen: NDArray[np.bool_], piece: _Piece) -> HostObjects:
    """Return the chosen values as slots of one span: where they lie, if at equal distances, else side by side."""
    starts = values.starts[chosen]
    distances = np.unique(np.diff(starts))
    block, stride = values.block, piece.size
    if len(distances) > 1:
        block = np.concatenate([block[start : start + piece.size] for start in starts.tolist()])
        starts = np.arange(len(starts)) * piece.size
    elif len(distances):
        stride = int(distances[0])
    span = BufferSpan(
        base_ptr=block.ctypes.data + int(starts[0]),
        rows=len(starts),
        row_bytes=piece.size,
        row_stride=stride,
        label="values",
        region=MemoryRegion(base_ptr=block.ctypes.data, size_bytes=block.nbytes, owner=block),
    )
    slots = np.arange(len(starts), dtype=np.int64)
    return HostObjects(span=span, slots=slots, first_offset=piece.start)


def _alike(part: FoundPart) -> Iterator[IndexArray]:
    """Yield numbers of objects whose tables of ranges are the same: all at once, as those of one layout are."""
    everything = np.arange(len(part.positions), dtype=np.int64)
    if part.headers.is_uniform:
        yield everything
    else:
        yield from np.split(everything, len(everything))


def _are_right(
    headers: FrameHeaders, numbers: IndexArray, piece: _Piece, views: Sequence[memoryview]
) -> NDArray[np.bool_]:
    """[objects] whether values have the length and the checksums that their headers say; their ranges are the same."""
    first = int(numbers[0])
    starts = headers.offsets[first, piece.frames] - piece.start
    ends = starts + headers.sizes[first, piece.frames]
    places = list(zip(starts.tolist(), ends.tolist(), strict=True))
    expected = headers.checksums[numbers, piece.frames].tolist()
    return np.array(
        [
            len(view) == piece.size
            and all(
                checksum(view[start:end]) == wanted
                for (start, end), wanted in zip(places, sums, strict=True)
            )
            for view, sums in zip(views, expected, strict=True)
        ],
        dtype=np.bool_,
    )


def _pieces(headers: FrameHeaders, number: int, plan: TransferPlan, limit: int) -> Iterator[_Piece]:
    """Cut what a plan needs of an object into neighbouring ranges of at most `limit` bytes, where that can be."""
    offsets, sizes = headers.offsets[number], headers.sizes[number]
    lows, highs = plan.spans.offset, plan.spans.offset + plan.range_bytes
    ranges = headers.covering(number, lows, plan.range_bytes)
    if not len(ranges):
        return
    ends = offsets + sizes
    first = int(ranges[0])
    for last, following in zip(ranges.tolist(), [*ranges.tolist()[1:], -1], strict=True):
        end = int(ends[last])
        is_gap = following != last + 1
        is_long = not is_gap and int(ends[following]) - int(offsets[first]) > limit
        if is_gap or (is_long and not ((lows < end) & (highs > end)).any()):
            start = int(offsets[first])
            yield _Piece(
                start=start,
                size=end - start,
                frames=slice(first, last + 1),
                plan=_within(plan, (lows >= start) & (highs <= end)),
            )
            first = following


def _within(plan: TransferPlan, chosen: NDArray[np.bool_]) -> TransferPlan:
    if chosen.all():
        return plan
    return TransferPlan(
        pages=plan.pages, spans=plan.spans.select(chosen), part_bytes=plan.part_bytes
    )
