"""A write sends objects as drafts that nobody looks for, asks for permission, and renames them, batch by batch.

A draft is whole before it gets its name, so that nobody ever reads half of an object; drafts of a writer that
died end by their time.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.errors import StoreClosedError, StoreError
from kvlinker.frames import FrameLayout, encode_headers
from kvlinker.spans import BufferSpan
from kvlinker.store import ObjectKey, WriteBatch, WriteStatus
from kvlinker_redis.headers import Wanted, look_at
from kvlinker_redis.replies import is_full, is_gone
from kvlinker_redis.state import MAX_COMMANDS, StoreState, checksum, parts_of, run_in_parts
from kvlinker_redis.values import Command, Reply

__all__ = ["DRAFT_SECONDS", "MAX_OBJECT_BYTES", "write_batches"]

_log = logging.getLogger(__name__)

DRAFT_SECONDS = 600
"""How long a draft lives that nobody renamed: longer than any write, and short enough to be no waste."""
MAX_OBJECT_BYTES = 500 << 20
"""Payload of one value: a Redis server takes 512 MiB, header included, unless it was told otherwise."""


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
    drafts: dict[int, None] = field(default_factory=dict)
    """Positions of the objects that were sent, in order: a set would not keep it."""
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
        self._call = uuid.uuid4().hex
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
        try:
            for work in self._works:
                self._send(work, memory)
            is_allowed = may_publish()
        except BaseException:
            self._forget_drafts()
            raise
        if is_allowed:
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
            batch = work.batch
            wanted = Wanted(
                keys=batch.keys,
                object_bytes=work.layout.payload_bytes,
                fingerprint=batch.fingerprint,
            )
            look = look_at(self._state, self._state.writes, wanted)
            stored = set(look.found)
            work.replaces = {*look.others, *look.damaged}
            fresh = []
            for at, key in enumerate(batch.keys):
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

    # ---- drafts ---------------------------------------------------------------------------------

    def _send(self, work: _Work, memory: DeviceAccess) -> None:
        size = work.layout.header_bytes + work.layout.payload_bytes
        each = max(1, min(MAX_COMMANDS, self._state.options.call_bytes // size))
        if not len(work.fresh):
            return
        with self._state.blocks.lent(min(each, len(work.fresh)) * size) as block:
            for part in parts_of(len(work.fresh), each):
                positions = work.fresh[part]
                rows = block[: len(positions) * size].reshape(len(positions), size)
                _fill(work, positions, rows, memory)
                self._send_rows(work, positions, rows)

    def _send_rows(self, work: _Work, positions: IndexArray, rows: NDArray[np.uint8]) -> None:
        keys = work.batch.keys
        numbers = positions.tolist()
        commands: list[Command] = [
            ("SET", self._draft(keys[at]), row.data, "EX", DRAFT_SECONDS)
            for at, row in zip(numbers, rows, strict=True)
        ]
        # Noted before it is known: a call that was given up may have been done all the same.
        work.drafts.update(dict.fromkeys(numbers))
        replies = self._state.writes.send_values(commands)
        for at, reply in zip(numbers, replies, strict=True):
            if isinstance(reply, Exception) or not reply:
                del work.drafts[at]
                work.statuses[at] = self._refused(reply)

    def _refused(self, reply: Reply) -> WriteStatus:
        if is_full(reply):
            self._state.count("full")
            return WriteStatus.FULL
        self._state.count("errors")
        _log.warning("%s: an object was not stored: %s", self._state.writes, reply)
        return WriteStatus.FAILED

    def _draft(self, key: ObjectKey) -> str:
        return self._state.names.of_draft(key, self._call)

    def _forget_drafts(self) -> None:
        """Remove drafts if the server can be reached; their time removes them in any case."""
        keys = [work.batch.keys[at] for work in self._works for at in work.drafts]
        try:
            run_in_parts(self._state.writes, [("UNLINK", self._draft(key)) for key in keys])
        except StoreError as error:
            _log.warning("%s: %d drafts are left for their time: %s", self, len(keys), error)

    def __str__(self) -> str:
        return str(self._state.writes)

    def _discard(self) -> None:
        for work in self._works:
            for at in work.fresh.tolist():
                work.statuses[at] = WriteStatus.DISCARDED
            self._state.count("discarded", len(work.fresh))
        self._forget_drafts()

    # ---- publishing -----------------------------------------------------------------------------

    def _publish(self) -> None:
        try:
            for work in self._works:
                drafts = list(work.drafts)
                for part in parts_of(len(drafts), MAX_COMMANDS // 2):
                    self._rename(work, drafts[part])
        except StoreClosedError:
            raise
        except StoreError as error:
            # What was renamed is there and said to be; the rest stays FAILED.
            _log.warning("%s: not everything was published: %s", self, error)
            self._state.count("errors")
        if any(work.drafts for work in self._works):
            self._forget_drafts()

    def _rename(self, work: _Work, positions: Sequence[int]) -> None:
        ttl = self._state.options.ttl_seconds
        commands: list[Command] = []
        for at in positions:
            key = work.batch.keys[at]
            name = self._state.names.of_object(key)
            rename = "RENAME" if at in work.replaces else "RENAMENX"
            commands.append((rename, self._draft(key), name))
            commands.append(("PERSIST", name) if ttl is None else ("EXPIRE", name, ttl))
        rivals, lost = [], []
        for at, reply in zip(positions, self._state.writes.run(commands)[::2], strict=True):
            if is_gone(reply):
                lost.append(at)
            elif isinstance(reply, Exception):
                work.statuses[at] = self._refused(reply)
            elif reply:
                work.statuses[at] = WriteStatus.WRITTEN
                del work.drafts[at]
                self._state.count("written")
            else:
                rivals.append(at)
        self._answer_rivals(work, rivals)
        self._answer_lost(work, lost)

    def _answer_rivals(self, work: _Work, rivals: Sequence[int]) -> None:
        """Answer for names that were taken: by the object, since another writer was faster, or by what is none."""
        found = self._found(work, rivals)
        for at in found:
            work.statuses[at] = WriteStatus.EXISTS
        if others := [at for at in rivals if at not in found]:
            work.replaces.update(others)
            self._rename(work, others)

    def _answer_lost(self, work: _Work, lost: Sequence[int]) -> None:
        """Answer for drafts that are gone: renamed by an attempt whose reply was lost, or evicted."""
        found = self._found(work, lost)
        for at in lost:
            del work.drafts[at]
            work.statuses[at] = WriteStatus.EXISTS if at in found else WriteStatus.FULL
        self._state.count("drafts_evicted", len(lost) - len(found))

    def _found(self, work: _Work, positions: Sequence[int]) -> set[int]:
        """Return which of these objects are there and what they should be."""
        if not positions:
            return set()
        wanted = Wanted(
            keys=tuple(work.batch.keys[at] for at in positions),
            object_bytes=work.layout.payload_bytes,
            fingerprint=work.batch.fingerprint,
        )
        look = look_at(self._state, self._state.writes, wanted)
        return {positions[number] for number in look.found}


def _fill(
    work: _Work, positions: IndexArray, rows: NDArray[np.uint8], memory: DeviceAccess
) -> None:
    """Copy objects out of pool memory into rows, and write their headers in front of them."""
    batch, layout = work.batch, work.layout
    plan = batch.plan if len(positions) == batch.plan.num_pages else batch.plan.select(positions)
    span = BufferSpan(
        base_ptr=rows.ctypes.data,
        rows=len(rows),
        row_bytes=rows.shape[1],
        row_stride=rows.shape[1],
        label="values",
    )
    slots = np.arange(len(rows), dtype=np.int64)
    memory.copy_out(plan, HostObjects(span=span, slots=slots, first_offset=-layout.header_bytes))
    starts = np.array(layout.offsets) + layout.header_bytes
    places = list(zip(starts.tolist(), (starts + layout.sizes).tolist(), strict=True))
    checksums = [[checksum(row.data[start:end]) for start, end in places] for row in rows]
    rows[:, : layout.header_bytes] = encode_headers(
        layout,
        [batch.keys[at] for at in positions.tolist()],
        batch.fingerprint,
        np.array(checksums, dtype=np.uint64),
        checksum=checksum,
    )
