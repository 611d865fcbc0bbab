"""A write copies objects into host memory, asks for permission, and sends them, batch by batch.

An object is sent in one request and becomes visible when the server has all of it, so that nobody ever reads half
of one, and a writer that dies leaves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvlinker.errors import StoreError
from kvlinker.framed_objects import Look
from kvlinker.framed_writes import FramedBatch, KeptFramesWrite
from kvlinker.store import WriteBatch, WriteStatus
from kvlinker_s3.requests import Put, put
from kvlinker_s3.state import BLOCK_BYTES, StoreState

__all__ = ["MAX_OBJECT_BYTES", "S3Write"]

MAX_OBJECT_BYTES = 4 << 30
"""Payload of one object: less than any of the services takes in one request."""


class S3Write(KeptFramesWrite):
    """One call of `write`."""

    def __init__(self, state: StoreState, batches: Sequence[WriteBatch]) -> None:
        """Take the batches of a call."""
        super().__init__(
            state.write_values,
            state.framed,
            batches,
            label=str(state.writes),
            max_object_bytes=MAX_OBJECT_BYTES,
            kept_bytes=state.options.write_bytes,
            block_bytes=BLOCK_BYTES,
        )
        self._store = state

    def look(self, work: FramedBatch) -> Look:
        """See FramedWrite; a server that knows writes that do not replace says by them what is there.

        Unless there may be no room for all: what is there must not take it from what is not.
        """
        total = sum(len(one.statuses) * one.value_bytes for one in self.works)
        if self._store.creates and total <= self._store.options.write_bytes:
            return Look()
        return super().look(work)

    def publish(self, work: FramedBatch) -> None:
        """See FramedWrite."""
        self._send(work, work.fresh.tolist())

    def _send(self, work: FramedBatch, positions: Sequence[int]) -> None:
        """Send some of the objects that were kept, and answer for those whose names are taken."""
        store = self._store
        asked = [
            put(
                store.names.of_object(work.batch.keys[at]),
                self.row(work, at).data,
                replace=at in work.replaces or not store.creates,
            )
            for at in positions
        ]
        taken: list[int] = []
        full: list[int] = []
        failures: list[StoreError] = []
        # Where a call ends early, others may still run.
        before, self.may_be_read = self.may_be_read, True
        answers = store.writes.attempt(asked)
        self.may_be_read = before
        for at, answer in zip(positions, answers, strict=True):
            if isinstance(answer, StoreError):
                failures.append(answer)
            elif answer is Put.STORED:
                work.statuses[at] = WriteStatus.WRITTEN
                self.state.count("written")
            elif answer is Put.FULL:
                full.append(at)
            else:
                store.creates = store.creates and answer is not Put.UNKNOWN
                taken.append(at)
        if failures:
            self.may_be_read = True
            self.note_failure(failures[0])
        self._answer_full(work, full)
        if again := self._answer_taken(work, taken):
            self._send(work, again)

    def _answer_full(self, work: FramedBatch, full: Sequence[int]) -> None:
        """Answer for objects that the server has no room for, and may have all the same."""
        found = self.found(work, full)
        for at in full:
            work.statuses[at] = WriteStatus.EXISTS if at in found else WriteStatus.FULL
        self.state.count("full", len(full) - len(found))

    def _answer_taken(self, work: FramedBatch, taken: Sequence[int]) -> Sequence[int]:
        """Answer for names that the objects have, and return those that are to be replaced."""
        found = self.found(work, taken)
        for at in found:
            work.statuses[at] = WriteStatus.EXISTS
        others = [at for at in taken if at not in found]
        work.replaces.update(others)
        return others
