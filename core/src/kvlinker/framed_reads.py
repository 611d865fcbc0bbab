"""A framed read asks for what a plan needs of each value, and compares every checksum before a byte is copied.

The first read of a session asks for headers, and in the same answers for what the plan needs right behind them:
an object that is read whole is one request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.errors import StoreClosedError
from kvlinker.framed_looks import FramedState, look_at
from kvlinker.framed_objects import (
    FoundObjects,
    Look,
    Piece,
    WantedObjects,
    cut_plan,
    which_are_right,
    which_rows_are_right,
)
from kvlinker.framed_runs import FramedRun, following
from kvlinker.frames import header_bytes
from kvlinker.host_blocks import HostBlocks
from kvlinker.named_values import Beginning, NamedValues, Range, RowViews
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.store import ObjectKey, ReadRequest, ReadSession, ReadStatus

__all__ = ["FramedReadSession"]

_OK, _MISS, _CORRUPT, _FAILED = range(4)
_STATUSES = (ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT, ReadStatus.FAILED)
_WHOLE = 1 << 62
"""No object is so long."""
_SIDE_BY_SIDE_BYTES = 256 << 10
"""Answers that are shorter are copied together: calls cost more than a second copy."""


class FramedReadSession(ReadSession):
    """Objects that were asked for; what is evicted or removed meanwhile reads as a miss from then on."""

    def __init__(
        self,
        values: NamedValues,
        state: FramedState,
        request: ReadRequest,
        *,
        check_open: Callable[[], None],
    ) -> None:
        """Note what is asked for; the server is asked with the first read.

        Args:
            values: where the objects are.
            state: of the store.
            request: the objects.
            check_open: raises StoreClosedError once the store was closed.
        """
        self._values = values
        self._state = state
        self._check_open = check_open
        self._request = request
        self._wanted = WantedObjects(
            keys=request.keys, object_bytes=request.object_bytes, fingerprint=request.fingerprint
        )
        self._lock = threading.Lock()
        # Of its own: whoever closes the session does not wait for a server that is silent.
        self._looking = threading.Lock()
        self._is_closed = False
        self._parts: Sequence[FoundObjects] | None = None
        # What nothing was found of is a miss, whatever nothing is said of it.
        self._status = np.full(len(request.keys), _MISS, dtype=np.int64)
        self._run: FramedRun | None = None
        """What the last read began and the next one may go on with."""

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        """See ReadSession.

        Raises:
            StoreError: the server cannot be asked, or answers with something else.
        """
        self._check_open()
        self._check(plan)
        with self._looking:
            reach = self._look(plan, memory) if self._parts is None else None
        for part in self._parts or ():
            for numbers, rest in _remains(part, plan, reach):
                self._read_part(part, numbers, rest, memory)
        return tuple(map(_STATUSES.__getitem__, self._status.tolist()))

    def _check(self, plan: TransferPlan) -> None:
        if self._is_closed:
            msg = f"pool {plan.pool!r}: this read session was closed; open another"
            raise StoreClosedError(msg)
        self._request.check(plan)

    def close(self) -> None:
        """See ReadSession."""
        with self._lock:
            self._is_closed = True
            run, self._run = self._run, None
        if run is not None:
            run.close()

    # ---- headers ------------------------------------------------------------------------------

    def _look(self, plan: TransferPlan, memory: DeviceAccess) -> IndexArray:
        """Read headers and what follows them; [objects] how far payloads were read."""
        reach = np.zeros(len(self._wanted.keys), dtype=np.int64)

        def take(look: Look, found: Mapping[int, Beginning]) -> None:
            for part in look.parts:
                self._status[part.positions] = _OK
                for numbers in part.alike():
                    reach[part.positions[numbers]] = self._take(part, numbers, plan, found, memory)

        size = self._first_bytes(plan)
        look = look_at(self._values, self._state, self._wanted, size=size, take=take)
        self._status[[*look.absent, *look.others]] = _MISS
        self._state.count("missed", len(look.absent) + len(look.others))
        self._drop(np.array(look.damaged, dtype=np.int64))
        self._parts = look.parts
        return reach

    def _first_bytes(self, plan: TransferPlan) -> int:
        """Return the bytes of a header and of what the plan needs right behind it."""
        wanted = self._wanted
        is_whole = int(plan.range_bytes.sum()) == wanted.object_bytes
        guess = header_bytes(len(plan.range_bytes)) if is_whole else None
        size = self._state.header_bytes(wanted.fingerprint, wanted.object_bytes, guess=guess)
        return size + _reach(plan, self._values.answer_bytes - size)

    def _take(
        self,
        part: FoundObjects,
        numbers: IndexArray,
        plan: TransferPlan,
        found: Mapping[int, Beginning],
        memory: DeviceAccess,
    ) -> int:
        """Take what a plan needs from behind the headers of some objects; return how far that goes."""
        raw = [found[at].raw for at in part.positions[numbers].tolist()]
        start = part.header_bytes
        reach = min(map(len, raw)) - start
        front = plan.select_spans(plan.spans.offset + plan.range_bytes <= reach)
        pieces = list(cut_plan(part.headers, int(numbers[0]), front, _WHOLE))
        if any(piece.start + piece.size > reach for piece in pieces):
            return 0  # the ranges that vouch for these bytes end behind them
        for piece in pieces:
            first = start + piece.start
            views = [one[first : first + piece.size] for one in raw]
            self._land(part, numbers, piece, views, memory)
        return reach

    def _drop(self, positions: IndexArray) -> None:
        """Remove values that are not what was written, and say so."""
        if len(positions):
            self._status[positions] = _CORRUPT
            self._state.count("corrupt", len(positions))
            self._values.remove(self._keys(positions))

    def _keys(self, positions: IndexArray) -> list[ObjectKey]:
        return [self._wanted.keys[at] for at in positions.tolist()]

    # ---- payload ------------------------------------------------------------------------------

    def _read_part(
        self, part: FoundObjects, numbers: IndexArray, plan: TransferPlan, memory: DeviceAccess
    ) -> None:
        """Read what a plan needs of some objects of a part, whose tables of ranges are the same."""
        limit = self._values.answer_bytes
        pieces = list(cut_plan(part.headers, int(numbers[0]), plan, limit))
        if not pieces:
            return
        ranges = [(part.header_bytes + piece.start, piece.size) for piece in pieces]
        run = self._run_of(part, numbers, ranges)
        if run is None:
            return
        try:
            for fetched in run.take(len(ranges)):
                these = run.numbers[np.array(fetched.numbers, dtype=np.int64)]
                self._land(part, these, pieces[fetched.range], fetched.views, memory)
        except BaseException:
            run.close()
            raise
        self._keep(run)

    def _run_of(
        self, part: FoundObjects, numbers: IndexArray, ranges: Sequence[Range]
    ) -> FramedRun | None:
        """Return a run that gives these ranges next: the expected one, or a new one; None if no object is good."""
        with self._lock:
            run, self._run = self._run, None
        if run is not None and run.gives(part, numbers, ranges):
            return run
        expected: Sequence[Range] = ()
        if run is not None:
            run.close()
            if run.is_followed_by(part, numbers, ranges):
                expected = following(ranges, part.header_bytes + self._wanted.object_bytes)
        good = numbers[self._status[part.positions[numbers]] == _OK]
        if not len(good):
            return None
        keys = self._keys(part.positions[good])
        return FramedRun(
            part=part,
            asked=numbers,
            numbers=good,
            ranges=[*ranges, *expected],
            fetched=self._values.fetch(keys, ranges, expected=expected),
        )

    def _keep(self, run: FramedRun) -> None:
        """Keep a run for the next read, in the place of the one that is there."""
        with self._lock:
            old: FramedRun | None = run
            if not self._is_closed:
                old, self._run = self._run, run
        if old is not None:
            old.close()

    def _land(
        self,
        part: FoundObjects,
        numbers: IndexArray,
        piece: Piece,
        views: Sequence[memoryview | None],
        memory: DeviceAccess,
    ) -> None:
        """Copy those bytes to their pages that are right; look again at the other objects."""
        checksum = self._state.checksum
        is_good = self._status[part.positions[numbers]] == _OK
        if not is_good.all():  # of what went or was damaged in another piece nothing is wanted
            views = [views[place] for place in np.flatnonzero(is_good).tolist()]
            numbers = numbers[is_good]
        if not len(numbers):
            return
        positions = part.positions[numbers]
        if isinstance(views, RowViews):
            is_right = which_rows_are_right(
                part.headers, numbers, piece, views.rows, checksum=checksum
            )
            if is_right.all():
                rows = views.rows
                _copy_rows(piece, positions, rows[0], rows.strides[0], memory)
                return
        else:
            is_right = which_are_right(part.headers, numbers, piece, views, checksum=checksum)
        if is_right.all():
            self._copy_in(piece, positions, views, memory)
            return
        if is_right.any():
            good = [view for view, right in zip(views, is_right.tolist(), strict=True) if right]
            self._copy_in(piece, positions[is_right], good, memory)
        is_gone = np.array([view is None for view in views])
        self._vanish(positions[is_gone])
        is_wrong = ~is_right & ~is_gone
        if is_wrong.any():
            is_short = np.array([len(view or b"") != piece.size for view in views])
            self._look_again(part, numbers[is_wrong], is_short[is_wrong])

    def _copy_in(
        self,
        piece: Piece,
        positions: IndexArray,
        views: Sequence[memoryview | None],
        memory: DeviceAccess,
    ) -> None:
        right = [view for view in views if view is not None]
        _copy_in(piece, positions, right, memory, self._state.blocks)

    def _vanish(self, positions: IndexArray) -> None:
        """Note that objects went, or were written anew, since their headers were read."""
        self._status[positions] = _MISS
        self._state.count("vanished", len(positions))

    def _look_again(
        self, part: FoundObjects, numbers: IndexArray, is_short: NDArray[np.bool_]
    ) -> None:
        """Tell objects that went or were written anew since their headers were read from damaged ones."""
        positions = part.positions[numbers]
        is_same = np.zeros(len(numbers), dtype=np.bool_)
        is_whole = np.zeros(len(numbers), dtype=np.bool_)
        whole = part.header_bytes + self._wanted.object_bytes
        for found in self._values.begin(self._keys(positions), part.header_bytes):
            for place, now in found:
                is_same[place] = now is not None and now.raw == part.raw[int(numbers[place])]
                is_whole[place] = now is not None and now.length == whole
        self._vanish(positions[~is_same])
        # A short answer says nothing of an object that is as long as it should be, and may be right.
        is_failed = is_same & is_short & is_whole
        self._status[positions[is_failed]] = _FAILED
        self._state.count("short_answers", int(is_failed.sum()))
        self._drop(positions[is_same & ~is_failed])


def _reach(plan: TransferPlan, limit: int) -> int:
    """Return how many bytes from the payload's first on a plan needs all of, in whole ranges up to a limit."""
    order = np.argsort(plan.spans.offset, kind="stable")
    lows, sizes = plan.spans.offset[order], plan.range_bytes[order]
    ends = np.cumsum(sizes)
    is_next = (lows == ends - sizes) & (ends <= limit)
    count = len(ends) if is_next.all() else int(is_next.argmin())
    return int(ends[count - 1]) if count else 0


def _remains(
    part: FoundObjects, plan: TransferPlan, reach: IndexArray | None
) -> Iterator[tuple[IndexArray, TransferPlan]]:
    """Yield numbers of objects whose tables of ranges are the same, and what of a plan was not read of them yet.

    Args:
        part: the objects.
        plan: what is to be read.
        reach: [objects of the request] how far their payloads were read; None where nothing was.
    """
    for numbers in part.alike():
        if reach is None:
            yield numbers, plan
            continue
        known = reach[part.positions[numbers]]
        for end in np.unique(known).tolist():
            rest = plan.select_spans(plan.spans.offset + plan.range_bytes > end)
            yield numbers[known == end], rest


def _copy_in(
    piece: Piece,
    positions: IndexArray,
    views: Sequence[memoryview],
    memory: DeviceAccess,
    blocks: HostBlocks,
) -> None:
    """Copy a piece of some objects into the pools, from where they lie, or from side by side in a block."""
    found = [np.frombuffer(view, dtype=np.uint8) for view in views]
    stride = _stride(found, piece.size)
    if stride is not None:
        _copy_rows(piece, positions, found[0], stride, memory)
    elif piece.size < _SIDE_BY_SIDE_BYTES:
        with blocks.lent(len(found) * piece.size) as block:
            np.concatenate(found, out=block)
            _copy_rows(piece, positions, block, piece.size, memory)
    else:
        for at, one in enumerate(found):
            _copy_rows(piece, positions[at : at + 1], one, piece.size, memory)


def _stride(blocks: Sequence[NDArray[np.uint8]], size: int) -> int | None:
    """Return the distance of blocks that lie at equal distances, one behind the other; None for others."""
    if len(blocks) == 1:
        return size
    starts = [int(block.__array_interface__["data"][0]) for block in blocks]
    distance = starts[1] - starts[0]
    is_even = all(later - start == distance for start, later in pairwise(starts))
    return distance if is_even and distance >= size else None


def _copy_rows(
    piece: Piece,
    positions: IndexArray,
    first: NDArray[np.uint8],
    stride: int,
    memory: DeviceAccess,
) -> None:
    """Copy a piece of some objects into the pools, whose bytes begin in a block and lie at equal distances."""
    address = int(first.__array_interface__["data"][0])
    span = BufferSpan(
        base_ptr=address,
        rows=len(positions),
        row_bytes=piece.size,
        row_stride=stride,
        label="values",
    )
    plan = piece.plan
    is_all = np.array_equal(positions, np.arange(plan.num_pages))
    selected = plan if is_all else plan.select(positions)
    slots = np.arange(len(positions), dtype=np.int64)
    memory.copy_in(selected, HostObjects(span=span, slots=slots, first_offset=piece.start))
