"""A write copies objects into host memory, asks for permission, and sends them, batch by batch.

An object is sent in one request and becomes visible when the server has all of it, so that nobody ever reads half
of one, and a writer that dies leaves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvlinker.errors import StoreError
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
        again: list[int] = []
        taken: list[int] = []
        failures: list[StoreError] = []
        for at, answer in zip(positions, store.writes.attempt(asked), strict=True):
            if isinstance(answer, StoreError):
                failures.append(answer)
            elif answer is Put.UNKNOWN:
                store.creates = False
                again.append(at)
            elif answer is Put.EXISTS:
                taken.append(at)
            else:
                self._answer(work, at, answer)
        if failures:
            self.may_be_read = True
            self.note_failure(failures[0])
        again += self._answer_taken(work, taken)
        if again:
            self._send(work, again)

    def _answer(self, work: FramedBatch, at: int, answer: Put) -> None:
        is_stored = answer is Put.STORED
        work.statuses[at] = WriteStatus.WRITTEN if is_stored else WriteStatus.FULL
        self.state.count("written" if is_stored else "full")

    def _answer_taken(self, work: FramedBatch, taken: Sequence[int]) -> Sequence[int]:
        """Answer for names that the objects have, since another writer was faster; return the others."""
        found = self.found(work, taken)
        for at in found:
            work.statuses[at] = WriteStatus.EXISTS
        others = [at for at in taken if at not in found]
        work.replaces.update(others)
        return others
