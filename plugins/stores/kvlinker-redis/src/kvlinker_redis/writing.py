"""A write sends objects as drafts that nobody looks for, asks for permission, and renames them, batch by batch.

A draft is whole before it gets its name, so that nobody ever reads half of an object; drafts of a writer that
died end by their time.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import cycle

from kvlinker.description import IndexArray
from kvlinker.device import DeviceAccess
from kvlinker.errors import StoreError
from kvlinker.framed_writes import FramedBatch, FramedWrite
from kvlinker.named_values import parts_of
from kvlinker.store import ObjectKey, WriteBatch, WriteStatus
from kvlinker_redis.readings import MAX_COMMANDS
from kvlinker_redis.replies import is_full, is_gone
from kvlinker_redis.state import StoreState
from kvlinker_redis.wire import Command, Reply

__all__ = ["DRAFT_SECONDS", "MAX_OBJECT_BYTES", "RedisWrite"]

_log = logging.getLogger(__name__)

DRAFT_SECONDS = 600
"""How long a draft lives that nobody renamed: longer than any write, and short enough to be no waste."""
MAX_OBJECT_BYTES = 500 << 20
"""Payload of one value: a Redis server takes 512 MiB, header included, unless it was told otherwise."""


class RedisWrite(FramedWrite):
    """One call of `write`."""

    def __init__(self, state: StoreState, batches: Sequence[WriteBatch]) -> None:
        """Take the batches of a call."""
        super().__init__(
            state.write_values,
            state.framed,
            batches,
            label=str(state.writes),
            max_object_bytes=MAX_OBJECT_BYTES,
        )
        self._store = state
        self._call = uuid.uuid4().hex
        self._drafts: dict[FramedBatch, dict[int, None]] = {work: {} for work in self.works}
        """Positions of the objects that were sent, in order: a set would not keep it."""
        self._has_told = False

    # ---- drafts ---------------------------------------------------------------------------------

    def stage(self, work: FramedBatch, memory: DeviceAccess) -> None:
        """See FramedWrite; some objects are sent while the server takes those before."""
        with (
            closing(self._drafts_of(work, memory)) as drafts,
            closing(self._store.writes.send_values(drafts)) as answers,
        ):
            for positions, replies in zip(self._parts(work), answers, strict=True):
                self._note(work, positions.tolist(), replies)

    def _parts(self, work: FramedBatch) -> list[IndexArray]:
        """Return positions of fresh objects that are sent together: half of what a call may carry."""
        most = self._store.options.call_bytes // 2 // work.value_bytes
        each = max(1, min(MAX_COMMANDS, most))
        return [work.fresh[part] for part in parts_of(len(work.fresh), each)]

    def _drafts_of(self, work: FramedBatch, memory: DeviceAccess) -> Generator[Sequence[Command]]:
        """Yield commands that send drafts, whose frames lie in two places in turn."""
        parts, size = self._parts(work), work.value_bytes
        room = max((len(positions) for positions in parts), default=0)
        with self.state.blocks.lent(min(len(parts), 2) * room * size) as block:
            rows = block.reshape(-1, size)
            for positions, first in zip(parts, cycle((0, room))):
                some = rows[first : first + len(positions)]
                self.frame(work, positions, some, memory)
                # Noted before it is known: a call that was given up may have been done all the same.
                self._drafts[work].update(dict.fromkeys(positions.tolist()))
                yield [
                    ("SET", self._draft(work.batch.keys[at]), row.data, "EX", DRAFT_SECONDS)
                    for at, row in zip(positions.tolist(), some, strict=True)
                ]

    def _note(self, work: FramedBatch, positions: Sequence[int], replies: Sequence[Reply]) -> None:
        """Note which drafts the server did not take."""
        for at, reply in zip(positions, replies, strict=True):
            if isinstance(reply, Exception) or not reply:
                del self._drafts[work][at]
                work.statuses[at] = self._refused(reply)

    def _refused(self, reply: Reply) -> WriteStatus:
        if is_full(reply):
            self.state.count("full")
            return WriteStatus.FULL
        if not self._has_told:  # of many objects, a server says the same
            self._has_told = True
            _log.warning("%s: objects were not stored: %s", self.label, reply)
        self.state.count("errors")
        return WriteStatus.FAILED

    def _draft(self, key: ObjectKey) -> str:
        return self._store.names.of_draft(key, self._call)

    def end(self) -> None:
        """See FramedWrite; drafts that became no objects are removed, by their time in any case."""
        keys = [work.batch.keys[at] for work, drafts in self._drafts.items() for at in drafts]
        try:
            self._store.writes.run_in_parts([("UNLINK", self._draft(key)) for key in keys])
        except StoreError as error:
            _log.warning("%s: %d drafts are left for their time: %s", self.label, len(keys), error)

    # ---- publishing -----------------------------------------------------------------------------

    def publish(self, work: FramedBatch) -> None:
        """See FramedWrite."""
        drafts = list(self._drafts[work])
        for part in parts_of(len(drafts), MAX_COMMANDS // 2):
            self._rename(work, drafts[part])

    def _rename(self, work: FramedBatch, positions: Sequence[int]) -> None:
        ttl = self._store.options.ttl_seconds
        commands: list[Command] = []
        for at in positions:
            key = work.batch.keys[at]
            name = self._store.names.of_object(key)
            rename = "RENAME" if at in work.replaces else "RENAMENX"
            commands.append((rename, self._draft(key), name))
            commands.append(("PERSIST", name) if ttl is None else ("EXPIRE", name, ttl))
        rivals, lost = [], []
        for at, reply in zip(positions, self._store.writes.run(commands)[::2], strict=True):
            if is_gone(reply):
                lost.append(at)
            elif isinstance(reply, Exception):
                work.statuses[at] = self._refused(reply)
            elif reply:
                work.statuses[at] = WriteStatus.WRITTEN
                del self._drafts[work][at]
                self.state.count("written")
            else:
                rivals.append(at)
        self._answer_rivals(work, rivals)
        self._answer_lost(work, lost)

    def _answer_rivals(self, work: FramedBatch, rivals: Sequence[int]) -> None:
        """Answer for names that were taken: by the object, since another writer was faster, or by what is none."""
        found = self.found(work, rivals)
        for at in found:
            work.statuses[at] = WriteStatus.EXISTS
        if others := [at for at in rivals if at not in found]:
            work.replaces.update(others)
            self._rename(work, others)

    def _answer_lost(self, work: FramedBatch, lost: Sequence[int]) -> None:
        """Answer for drafts that are gone: renamed by an attempt whose reply was lost, or evicted."""
        found = self.found(work, lost)
        for at in lost:
            del self._drafts[work][at]
            work.statuses[at] = WriteStatus.EXISTS if at in found else WriteStatus.FULL
        self.state.count("drafts_evicted", len(lost) - len(found))
