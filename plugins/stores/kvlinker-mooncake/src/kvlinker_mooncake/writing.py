"""A write asks for permission, reserves room for what nobody has, sends it, and lets it be read, batch by batch.

Staged, bytes are copied to host memory first. Straight from the pools nothing can be copied without reserving its
name, which would keep other writers out, and so permission is asked before. The client says of each key whether it
begun or "is there already", which may also mean that somebody is writing it now, or died over it: such a key is
waited for a while, and has failed if it cannot be read then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvlinker.device import DeviceAccess
from kvlinker.errors import StoreClosedError, StoreContractError, StoreError, StoreTimeoutError
from kvlinker.framed_objects import frame_pages
from kvlinker.frames import FrameLayout
from kvlinker.store import ObjectKey, WriteBatch, WriteStatus
from kvlinker_mooncake.codes import CONTENDED, FULL, Code
from kvlinker_mooncake.parts import CallPart, parts_of, row_parts
from kvlinker_mooncake.state import StoreState, checksum

__all__ = ["MAX_OBJECT_BYTES", "write_batches"]

_log = logging.getLogger(__name__)
_PAUSE_SECONDS = 0.02
_MAX_PAUSE_SECONDS = 0.2
MAX_OBJECT_BYTES = (1 << 31) - (1 << 22)
"""Payload of one object: the client's results are bytes in 32 bits, and the longest header has less than 4 MiB."""


@dataclass(kw_only=True, eq=False)
class _Work:
    """What one batch needs."""

    batch: WriteBatch
    layout: FrameLayout
    names: list[str]
    object_bytes: int
    """What is stored: header and payload, or the payload alone."""
    statuses: list[WriteStatus]
    fresh: list[int] = field(default_factory=list)
    """Positions of the objects to write, ascending."""
    rows: NDArray[np.uint8] | None = None
    """[fresh, object_bytes] what is sent; None where it is sent from the pools."""
    begun: list[int] = field(default_factory=list)
    """Positions of objects that have room; they are ended or revoked."""
    twins: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Position to the batch and position where the call names the same key first."""

    def settle(self, positions: Sequence[int], status: WriteStatus) -> None:
        """Answer for objects that were begun, and are no more."""
        gone = set(positions)
        self.begun = [at for at in self.begun if at not in gone]
        for at in positions:
            self.statuses[at] = status


def write_batches(
    state: StoreState,
    batches: Sequence[WriteBatch],
    memory: DeviceAccess,
    may_publish: Callable[[], bool],
) -> tuple[tuple[WriteStatus, ...], ...]:
    """See Store.write."""
    if not state.options.staged:
        for batch in batches:
            if batch.plan.object_bytes <= MAX_OBJECT_BYTES:
                state.pools.check(batch.plan)
    with ExitStack() as blocks:
        return _Writer(state, batches).write(memory, may_publish, blocks)


class _Writer:
    """One call of `write`."""

    def __init__(self, state: StoreState, batches: Sequence[WriteBatch]) -> None:
        self._state = state
        self._until = time.monotonic() + state.options.transfer_seconds
        self._works = [self._work_of(batch) for batch in batches if batch.keys]
        self._empty = [not batch.keys for batch in batches]
        self._is_late = False
        """Whether a call may still read what it was to send."""

    def _work_of(self, batch: WriteBatch) -> _Work:
        layout = FrameLayout.of_ranges(batch.plan.spans.offset, batch.plan.range_bytes)
        header = layout.header_bytes if self._state.options.staged else 0
        return _Work(
            batch=batch,
            layout=layout,
            names=self._state.names.of_objects(batch.keys),
            object_bytes=header + layout.payload_bytes,
            statuses=[WriteStatus.FAILED] * len(batch.keys),
        )

    def write(
        self, memory: DeviceAccess, may_publish: Callable[[], bool], blocks: ExitStack
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        self._look_up()
        if self._state.options.staged:
            self._copy_out(memory, blocks)
        if may_publish():
            self._publish()
        else:
            self._discard()
        self._answer_twins()
        works = iter(self._works)
        return tuple(() if empty else tuple(next(works).statuses) for empty in self._empty)

    def _discard(self) -> None:
        for work in self._works:
            work.settle(work.fresh, WriteStatus.DISCARDED)
            self._state.count("discarded", len(work.fresh))

    # ---- what is there --------------------------------------------------------------------------

    def _look_up(self) -> None:
        """Answer for objects that can be read already, and note which are to be written."""
        first: dict[ObjectKey, tuple[int, int]] = {}
        for number, work in enumerate(self._works):
            if work.layout.payload_bytes > MAX_OBJECT_BYTES:
                continue  # it stays FAILED
            positions = []
            for at, key in enumerate(work.batch.keys):
                if key in first:
                    work.twins[at] = first[key]
                else:
                    first[key] = (number, at)
                    positions.append(at)
            work.fresh = self._answer_stored(work, positions)

    def _answer_stored(self, work: _Work, positions: list[int]) -> list[int]:
        """Answer for objects that can be read, and return the others."""
        left = []
        found = self._state.look([work.names[at] for at in positions])
        for at, one in zip(positions, found, strict=True):
            if one is not None and one.size == work.object_bytes:
                work.statuses[at] = WriteStatus.EXISTS
                continue
            left.append(at)
            if one is not None:
                # Of another length: nobody can read it here, and it goes when its leases are over.
                self._state.removals.hide(work.names[at])
        return left

    def _answer_twins(self) -> None:
        for work in self._works:
            for at, (number, twin) in work.twins.items():
                status = self._works[number].statuses[twin]
                is_written = status is WriteStatus.WRITTEN
                work.statuses[at] = WriteStatus.EXISTS if is_written else status

    # ---- room -----------------------------------------------------------------------------------

    def _store(self, work: _Work) -> None:
        """Write what can begin, and wait a while for names that somebody else holds.

        Nothing is held meanwhile: two writers of the same keys in another order would wait for each other.
        """
        until = time.monotonic() + self._state.options.contended_seconds
        pause = _PAUSE_SECONDS
        left = self._store_some(work, work.fresh)
        while left and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)
            self._state.removals.try_again([work.names[at] for at in left])
            left = self._store_some(work, left)
        self._state.count("contended", len(left))

    def _store_some(self, work: _Work, positions: list[int]) -> list[int]:
        left = self._try_begin(work, positions)
        self._send(work)
        self._end(work)
        return left

    def _try_begin(self, work: _Work, positions: list[int]) -> list[int]:
        """Try to reserve room, and return the objects that are there and cannot be read or removed."""
        if not positions:
            return []
        names = [work.names[at] for at in positions]
        codes = self._state.client.start_writes(names, work.object_bytes)
        self._state.removals.show(
            [name for name, code in zip(names, codes, strict=True) if code == Code.DONE]
        )
        taken = []
        for at, code in zip(positions, codes, strict=True):
            if code == Code.DONE:
                work.begun.append(at)
            elif code in CONTENDED:
                taken.append(at)
            elif code in FULL:
                work.statuses[at] = WriteStatus.FULL
                self._state.count("full")
            else:
                self._note(f"a write could not begin: code {code}")
        return self._answer_stored(work, taken)

    # ---- bytes ----------------------------------------------------------------------------------

    def _copy_out(self, memory: DeviceAccess, blocks: ExitStack) -> None:
        """Copy as many objects as there is room for to host memory."""
        room = self._state.options.write_bytes
        for work in self._works:
            size = work.object_bytes
            count = min(len(work.fresh), max(0, room) // size)
            for at in work.fresh[count:]:
                work.statuses[at] = WriteStatus.FULL
            self._state.count("no_room", len(work.fresh) - count)
            work.fresh = work.fresh[:count]
            room -= count * size
            if count:
                lent = self._state.blocks.block(count * size, is_left=lambda: self._is_late)
                block = blocks.enter_context(lent)
                work.rows = block[: count * size].reshape(count, size)
                positions = np.array(work.fresh)
                frame_pages(
                    work.batch, work.layout, positions, work.rows, memory, checksum=checksum
                )

    def _send(self, work: _Work) -> None:
        """Send the objects that were begun to the cluster, where nobody can read them yet."""
        for part in self._parts(work):
            if time.monotonic() > self._until:
                seconds = self._state.options.transfer_seconds
                self._drop(work, part.positions, f"a write took more than {seconds} s")
                continue
            codes = self._state.client.put_ranges(part, from_pools=work.rows is None)
            wrong = {
                at: code
                for at, code, size in zip(part.positions, codes, part.expected, strict=True)
                if code != size
            }
            if wrong:
                self._drop(work, list(wrong), f"a write answered {next(iter(wrong.values()))}")

    def _drop(self, work: _Work, positions: list[int], why: str) -> None:
        """Give up objects whose bytes are not all there."""
        known = set(work.begun)
        begun = [at for at in positions if at in known]
        work.settle(begun, WriteStatus.FAILED)
        self._note(why, len(begun))
        self._state.client.revoke([work.names[at] for at in begun])

    def _note(self, why: str, count: int = 1) -> None:
        _log.warning("%s: %s", self._state.client.calls, why)
        self._state.count("errors", count)

    def _parts(self, work: _Work) -> Iterator[CallPart]:
        limit = self._state.options.call_bytes
        if work.rows is None:
            yield from parts_of(work.batch.plan, work.begun, work.names, call_bytes=limit)
            return
        size = work.object_bytes
        rows = {at: work.rows.ctypes.data + row * size for row, at in enumerate(work.fresh)}
        begun = [(at, rows[at]) for at in work.begun]
        yield from row_parts(begun, work.names, size, call_bytes=limit, owner=work.rows)

    # ---- publishing -----------------------------------------------------------------------------

    def _publish(self) -> None:
        try:
            for work in self._works:
                self._store(work)
        except StoreClosedError:
            raise
        except StoreContractError:
            self._drop_begun()  # else other writers are kept out until the master finds it forgotten
            raise
        except StoreError as error:
            # What was ended is there and said to be; the rest has failed, and may still appear, whole.
            self._is_late = isinstance(error, StoreTimeoutError)
            self._note(f"not everything was stored: {error}")
            self._drop_begun()

    def _drop_begun(self) -> None:
        for work in self._works:
            if work.begun:
                self._drop(work, work.begun, "it was not ended")

    def _end(self, work: _Work) -> None:
        begun = list(work.begun)
        if not begun:
            return
        codes = self._state.client.end_writes([work.names[at] for at in begun])
        done = [at for at, code in zip(begun, codes, strict=True) if code == Code.DONE]
        work.settle(done, WriteStatus.WRITTEN)
        self._state.count("written", len(done))
        if work.begun:
            self._drop(work, list(work.begun), "an object could not be ended")
