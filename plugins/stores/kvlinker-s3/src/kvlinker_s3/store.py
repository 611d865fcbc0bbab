"""The object store: the contract's methods, each a few lines over the state of the open store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvlinker.framed_store import FramedStore
from kvlinker.store import ObjectKey, ReadRequest, ReadSession, StoreStats, WriteBatch
from kvlinker_s3.figures import ListedFigures
from kvlinker_s3.half_written import sweep
from kvlinker_s3.options import S3StoreOptions
from kvlinker_s3.state import StoreState
from kvlinker_s3.whole_reads import S3ReadSession
from kvlinker_s3.writing import MAX_OBJECT_BYTES, S3Write

__all__ = ["S3Store"]


class S3Store(FramedStore):
    """Objects of a bucket, a container or a directory, which nothing is evicted from."""

    def __init__(self, options: S3StoreOptions) -> None:
        """Look whether objects can be listed; in a directory, remove files that were never finished.

        Raises:
            ContractError: a setting is unknown, or settings do not fit together.
            StoreTimeoutError: the server cannot be reached.
            StoreError: it refuses, has no such bucket, or a secret is not where it should be.
        """
        self._state = state = StoreState(options)
        super().__init__(
            reads=state.reads,
            writes=state.writes,
            values=state.read_values,
            framed=state.framed,
            max_object_bytes=MAX_OBJECT_BYTES,
        )
        self._figures = ListedFigures(self._sizes)
        try:
            next(state.read_values.names_in(options.prefix), None)
            if options.scheme == "file":
                sweep(options.url, options.prefix)
        except BaseException:
            self.close()
            raise

    # ---- looking ------------------------------------------------------------------------------

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store; the server is asked once for each key.

        Raises:
            StoreError: the server cannot be asked.
        """
        return tuple(map(bool, self._state.read_values.sizes(keys)))

    def stats(self) -> StoreStats:
        """See Store; objects are listed, and figures of more than 10,000 are kept for five minutes.

        Up to 200,000 are listed; the counter `uncounted` is 1 where there are more.

        Raises:
            StoreError: the server cannot be asked.
        """
        figures = self._figures.read()
        counters = dict(self._state.framed.counters)
        if not figures.is_complete:
            counters["uncounted"] = 1
        return StoreStats(
            objects=figures.objects,
            used_bytes=figures.used_bytes,
            capacity_bytes=None,
            counters=counters,
        )

    def _sizes(self) -> Iterator[Sequence[int]]:
        return self._state.read_values.sizes_in(self._state.names.folder)

    # ---- moving -------------------------------------------------------------------------------

    def open_read(self, request: ReadRequest) -> ReadSession:
        """See Store."""
        state = self._state
        check_open = state.reads.check_open
        check_open()
        return S3ReadSession(state.read_values, state.framed, request, check_open=check_open)

    def begin_write(self, batches: Sequence[WriteBatch]) -> S3Write:
        """See FramedStore."""
        self._state.writes.check_up()
        return S3Write(self._state, batches)

    # ---- removing -----------------------------------------------------------------------------

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store; of two that remove an object at once, both may hear that it was there.

        Raises:
            StoreError: the server cannot be asked; some may have been removed.
        """
        names = self._state.names.of_objects(keys)
        first = {name: at for at, name in reversed(list(enumerate(names)))}
        there = dict(zip(first, self._state.read_values.take_away(list(first)), strict=True))
        return tuple([there[name] and first[name] == at for at, name in enumerate(names)])

    def clear(self, namespace: bytes) -> int:
        """See Store; the namespace's objects are listed.

        Raises:
            ContractError: that is no namespace.
            StoreError: the server cannot be asked; some objects may have been removed.
        """
        removed = 0
        values = self._state.read_values
        for names in values.names_in(self._state.names.folder_of(namespace)):
            values.remove_names(names)
            removed += len(names)
        return removed
