"""A write copies objects into host memory, asks for permission, and sends them, batch by batch.

An object is sent in one request and becomes visible when the server has all of it, so that nobody ever reads
half of one, and a writer that dies leaves nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess
from kvlinker.errors import StoreClosedError, StoreError
from kvlinker.framed_objects import WantedObjects, frame_pages
from kvlinker.frames import FrameLayout
from kvlinker.store import ObjectKey, WriteBatch, WriteStatus
from kvlinker_s3.headers import look_at
from kvlinker_s3.requests import Put, put
from kvlinker_s3.state import StoreState, checksum

__all__ = ["MAX_OBJECT_BYTES", "write_batches"]

_log = logging.getLogger(__name__)

MAX_OBJECT_BYTES = 4 << 30
"""Payload of one object: less than any of the services takes in one request."""


@dataclass(kw_only=True, eq=False)
class _Work:
    """What one batch needs."""

    batch: WriteBatch
    layout: FrameLayout
    statuses: list[WriteStatus]
    fresh: IndexArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Positions of the objects to write."""
    replaces: set[int] = field(default_factory=set)
    """Positions of those in whose place something else lies."""
    rows: NDArray[np.uint8] = field(default_factory=lambda: np.empty((0, 0), dtype=np.uint8))
    """[objects] what is sent, header and payload; none for those objects that found no room."""
    twins: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Position to the batch and position where the call names the same key first."""


def write_batches(
    state: StoreState,
    batches: Sequence[WriteBatch],
    memory: DeviceAccess,
    may_publish: Callable[[], bool],
) -> tuple[tuple[WriteStatus, ...], ...]:
    """See Store.write."""
    return _Writer(state, batches).write(memory, may_publish)


class _Writer:
    """One call of `write`."""

    def __init__(self, state: StoreState, batches: Sequence[WriteBatch]) -> None:
        self._state = state
        self._works = [
            _Work(
                batch=batch,
                layout=FrameLayout.of_ranges(batch.plan.spans.offset, batch.plan.range_bytes),
                statuses=[WriteStatus.FAILED] * len(batch.keys),
            )
            for batch in batches
            if batch.keys
        ]
        self._empty = [not batch.keys for batch in batches]

    def write(
        self, memory: DeviceAccess, may_publish: Callable[[], bool]
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        self._look_up()
        room = self._state.options.write_bytes
        for work in self._works:
            room -= self._copy_out(work, room, memory)
        if may_publish():
            self._publish()
        else:
            self._discard()
        self._answer_twins()
        works = iter(self._works)
        return tuple(() if empty else tuple(next(works).statuses) for empty in self._empty)

    # ---- what is there --------------------------------------------------------------------------

    def _look_up(self) -> None:
        first: dict[ObjectKey, tuple[int, int]] = {}
        for number, work in enumerate(self._works):
            if work.layout.payload_bytes > MAX_OBJECT_BYTES:
                continue  # it stays FAILED
            look = look_at(
                self._state, self._state.writes, _wanted(work, range(len(work.statuses)))
            )
            stored = set(look.found)
            work.replaces = {*look.others, *look.damaged}
            fresh = []
            for at, key in enumerate(work.batch.keys):
                if at in stored:
                    work.statuses[at] = WriteStatus.EXISTS
                elif key in first:
                    work.twins[at] = first[key]
                else:
                    first[key] = (number, at)
                    fresh.append(at)
            work.fresh = np.array(fresh, dtype=np.int64)

    def _answer_twins(self) -> None:
        for work in self._works:
            for at, (number, twin) in work.twins.items():
                status = self._works[number].statuses[twin]
                is_written = status is WriteStatus.WRITTEN
                work.statuses[at] = WriteStatus.EXISTS if is_written else status

    # ---- copies ---------------------------------------------------------------------------------

    def _copy_out(self, work: _Work, room: int, memory: DeviceAccess) -> int:
        """Copy as many objects as there is room for in host memory, and return the bytes they take."""
        size = work.layout.header_bytes + work.layout.payload_bytes
        count = min(len(work.fresh), max(0, room) // size)
        for at in work.fresh[count:].tolist():
            work.statuses[at] = WriteStatus.FULL
        self._state.count("no_room", len(work.fresh) - count)
        work.fresh = work.fresh[:count]
        work.rows = np.empty((count, size), dtype=np.uint8)
        if count:
            frame_pages(work.batch, work.layout, work.fresh, work.rows, memory, checksum=checksum)
        return count * size

    def _discard(self) -> None:
        for work in self._works:
            for at in work.fresh.tolist():
                work.statuses[at] = WriteStatus.DISCARDED
            self._state.count("discarded", len(work.fresh))

    # ---- publishing -----------------------------------------------------------------------------

    def _publish(self) -> None:
        try:
            for work in self._works:
                self._send(work, list(range(len(work.fresh))))
        except StoreClosedError:
            raise
        except StoreError as error:
            # What was sent is there and said to be; the rest stays FAILED.
            self._note_failure(error)

    def _note_failure(self, error: StoreError) -> None:
        _log.warning("%s: not everything was stored: %s", self._state.writes, error)
        self._state.count("errors")

    def _send(self, work: _Work, numbers: Sequence[int]) -> None:
        """Send some of the objects that were copied, and answer for those whose names are taken."""
        positions = [int(work.fresh[number]) for number in numbers]
        asked = [
            put(
                self._state.names.of_object(work.batch.keys[at]),
                work.rows[number].data,
                replace=at in work.replaces or not self._state.creates,
            )
            for number, at in zip(numbers, positions, strict=True)
        ]
        again: list[int] = []
        taken: list[int] = []
        failures: list[StoreError] = []
        answers = self._state.writes.attempt(asked)
        for number, at, answer in zip(numbers, positions, answers, strict=True):
            if isinstance(answer, StoreError):
                failures.append(answer)
            elif answer is Put.UNKNOWN:
                self._state.creates = False
                again.append(number)
            elif answer is Put.EXISTS:
                taken.append(number)
            else:
                self._answer(work, at, answer)
        if failures:
            self._note_failure(failures[0])
        self._answer_taken(work, taken, again)
        if again:
            self._send(work, again)

    def _answer(self, work: _Work, at: int, answer: Put) -> None:
        is_stored = answer is Put.STORED
        work.statuses[at] = WriteStatus.WRITTEN if is_stored else WriteStatus.FULL
        self._state.count("written" if is_stored else "full")

    def _answer_taken(self, work: _Work, taken: Sequence[int], again: list[int]) -> None:
        """Answer for names that were taken: by the object, since another writer was faster, or by what is none."""
        if not taken:
            return
        positions = [int(work.fresh[number]) for number in taken]
        found = set(look_at(self._state, self._state.writes, _wanted(work, positions)).found)
        for place, (number, at) in enumerate(zip(taken, positions, strict=True)):
            if place in found:
                work.statuses[at] = WriteStatus.EXISTS
            else:
                work.replaces.add(at)
                again.append(number)


def _wanted(work: _Work, positions: Sequence[int]) -> WantedObjects:
    return WantedObjects(
        keys=tuple(work.batch.keys[at] for at in positions),
        object_bytes=work.layout.payload_bytes,
        fingerprint=work.batch.fingerprint,
    )
